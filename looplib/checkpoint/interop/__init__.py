"""Weights and optimizer state as other programs read and write them."""

from looplib.checkpoint.interop._export import (
    load_optimizer_state_dict,
    load_state_dict,
    optimizer_state_dict,
    save_pretrained,
    save_safetensors,
    state_dict,
)

__all__ = [
    "load_optimizer_state_dict",
    "load_state_dict",
    "optimizer_state_dict",
    "save_pretrained",
    "save_safetensors",
    "state_dict",
]
