"""Checkpoints: a state goes in and files come out, and a state is restored from them."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.checkpoint._capture import RandomStreams, capture, reinstate
from looplib.checkpoint._checkpoints import Checkpoint
from looplib.checkpoint._export import save_pretrained, save_safetensors
from looplib.checkpoint._format import CheckpointVersionError, DamagedCheckpointError
from looplib.checkpoint._io import CheckpointIO, checkpoint_io
from looplib.checkpoint._iter_weights import iter_weights
from looplib.checkpoint._optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from looplib.checkpoint._state_dict import load_state_dict, state_dict

__all__ = [
    "Checkpoint",
    "CheckpointIO",
    "CheckpointVersionError",
    "DamagedCheckpointError",
    "RandomStreams",
    "capture",
    "checkpoint_io",
    "iter_weights",
    "load_optimizer_state_dict",
    "load_state_dict",
    "optimizer_state_dict",
    "reinstate",
    "save_pretrained",
    "save_safetensors",
    "state_dict",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
