"""Exports of a state for other programs: a safetensors file, and a folder for Hugging Face transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from looplib._core.checks import check
from looplib._core.collective import together
from looplib._core.modules import innermost
from looplib._core.records import check_kind
from looplib._core.trees import map_tensors
from looplib.checkpoint._state_dict import lend, state_dict, state_names
from looplib.types import TrainState, check_state


def save_safetensors(model: nn.Module, state: TrainState, path: str | os.PathLike[str]) -> None:
    """Save the weights of a state as a safetensors file.

    >>> import looplib as ll, pathlib, safetensors.torch, tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> ll.checkpoint.save_safetensors(model, state, path)
    >>> again = ll.checkpoint.load_state_dict(model, state, safetensors.torch.load_file(path))

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
        safetensors.SafetensorError: the file cannot be written.
        ValueError: the state belongs to a different module.
        DonatedStateError: the state was donated to a step.
    """
    weights, names = state_dict(model, state, cpu_offload=True), state_names(model)

    def write() -> None:
        from safetensors.torch import save_file

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
            save_file(tensors, part, metadata)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    together().on_rank0(write)


def save_pretrained(model: nn.Module, state: TrainState, directory: str | os.PathLike[str], **arguments: Any) -> None:
    """Save a `transformers` model with a state's values, using the model's own `save_pretrained`.

    >>> import looplib as ll, tempfile, transformers
    >>> config = transformers.BertConfig(
    ...     vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    >>> model = transformers.BertModel(config)
    >>> folder = tempfile.mkdtemp()
    >>> ll.checkpoint.save_pretrained(model, ll.init_state(model), folder)

    Every program that uses `transformers` can read the folder. To load it again:

    >>> model = transformers.AutoModel.from_pretrained(folder)
    >>> state = ll.init_state(model)

    All ranks call this and the first one writes whole tensors, as with `save_safetensors`: leave out arguments that have
    all ranks write, such as `distributed_checkpoint=True`.

    Args:
        model: a `transformers` model, with or without torch's wrappers. As always when saving, its `config` records
            dtype and class.
        state: a state of this module. It need not be bound to it.
        directory: the folder, created if it does not exist.
        arguments: further arguments of `save_pretrained`, such as `max_shard_size`.

    Raises:
        TypeError: the model has no `save_pretrained`.
        NotADirectoryError: `directory` is a file.
        ValueError: see `state_dict`.
        DonatedStateError: the state was donated to a step.
    """
    check_kind(model, "save_pretrained", "model")
    check_state(state, "ll.checkpoint.save_pretrained(model, state, folder)")
    inner: Any = innermost(model)
    advice = "give a model of transformers, or write ll.checkpoint.save_safetensors(model, state, path)"
    check(hasattr(inner, "save_pretrained"), f"a {type(inner).__name__} has no save_pretrained; {advice}", TypeError)
    save = inner.save_pretrained
    weights = state_dict(model, state, cpu_offload=True)

    def write() -> None:
        # transformers only logs this case and returns
        check(
            not Path(directory).is_file(),
            f"{directory} is a file; save_pretrained needs a folder",
            NotADirectoryError,
        )
        # The module holds the values too, because transformers reads the dtype for config.json from it.
        lend(model, state, lambda: save(directory, state_dict=weights, **arguments))

    together().on_rank0(write)
