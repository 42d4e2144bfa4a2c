"""Interoperability: weights and optimizer state in the formats of plain torch, safetensors and transformers."""

from looplib.checkpoint.interop._export import save_pretrained, save_safetensors
from looplib.checkpoint.interop._optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from looplib.checkpoint.interop._state_dict import load_state_dict, state_dict

__all__ = [
    "load_optimizer_state_dict",
    "load_state_dict",
    "optimizer_state_dict",
    "save_pretrained",
    "save_safetensors",
    "state_dict",
]
