"""safetensors: export a state's weights to a file for other programs."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor, nn

from looplib._core.collective import together
from looplib._core.trees import map_tensors
from looplib.checkpoint.interop._files import safetensors_package
from looplib.checkpoint.interop._names import state_names
from looplib.checkpoint.interop._state_dict import state_dict
from looplib.types import TrainState


def save_safetensors(model: nn.Module, state: TrainState, path: str | os.PathLike[str]) -> None:
    """Save the weights of a state as a safetensors file, which `load_state_dict` can read.

    >>> import looplib as ll, pathlib, tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> ll.checkpoint.save_safetensors(model, state, path)
    >>> again = ll.checkpoint.load_state_dict(model, state, path)

    The names are those of `state_dict`. The format has no tied weights, so each is saved once, under its first name,
    and the file's metadata maps the other names to it, as with `safetensors.torch.save_model`. An existing file is
    replaced once the new one is complete.

    All ranks call this, with any wrapper around the model. The first rank writes unsharded tensors; an error there is
    raised on all.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        state: a state of this module.
        path: path of the file, in an existing directory.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file cannot be written.
        ValueError: the state belongs to a different module.
        DonatedStateError: the state was donated to a step.
    """
    weights, names = state_dict(model, state, cpu_offload=True), state_names(model)

    def write() -> None:
        safetensors = safetensors_package()
        tensors: dict[str, Tensor] = {}
        first_key: dict[str, str] = {}  # maps the names of tied weights
        metadata = {"format": "pt"}
        for key, value in weights.items():
            if (first := first_key.setdefault(names.get(key, key), key)) != key:
                metadata[key] = first
            else:
                tensors[key] = map_tensors(Tensor.contiguous, value)
        part = Path(f"{os.fspath(path)}.part")
        try:
            safetensors.torch.save_file(tensors, part, metadata)
            part.replace(path)
        except safetensors.SafetensorError as error:  # also raised for disk errors
            raise OSError(f"{os.fspath(path)} could not be written: {error}") from error
        finally:
            part.unlink(missing_ok=True)

    together().on_rank0(write)
