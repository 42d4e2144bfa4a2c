"""Exports of a state for other programs: a safetensors file, and a folder for Hugging Face transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from looplib._core import modules as _modules
from looplib._core.checks import check
from looplib._core.collective import together
from looplib._core.trees import map_tensors
from looplib.checkpoint.interop._state_dict import lend, safetensors_package, state_dict, state_names
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

    All ranks call this and the first one writes, as with `save_safetensors`.

    Args:
        model: a `transformers` model, with or without torch's wrappers. As always when saving, its `config` records
            dtype and class.
        state: a state of this module. It need not be bound to it.
        directory: the folder, created if it does not exist.
        arguments: further arguments of `save_pretrained`, such as `max_shard_size`.

    Raises:
        TypeError: the model has no `save_pretrained`.
        NotADirectoryError: `directory` is a file.
        ValueError: see `state_dict`; or several ranks would have to write, because of `distributed_checkpoint=True`
            or because `transformers` sharded the model itself.
        DonatedStateError: the state was donated to a step.
    """
    inner: Any = [module for name, module in _modules.named_modules(model) if not name][-1]
    check(
        callable(getattr(inner, "save_pretrained", None)),
        f"{type(inner).__name__} has no save_pretrained, which the models of transformers have; for other models "
        "take ll.checkpoint.save_safetensors, or torch.save(ll.checkpoint.state_dict(model, state), path)",
        TypeError,
    )
    ranks = together()
    of_all_ranks = {
        "config.distributed_config": getattr(getattr(inner, "config", None), "distributed_config", None) is not None,
        "distributed_checkpoint=True": arguments.get("distributed_checkpoint"),
    }
    for setting in filter(of_all_ranks.get, of_all_ranks):
        check(
            not ranks.is_distributed,
            f"{setting} has all ranks write, and here the first alone does, whole tensors: shard the model by "
            "fully_shard, or, for checkpoints in parts, take ll.checkpoint_io",
        )
    weights = state_dict(model, state, cpu_offload=True)

    def write() -> None:
        # transformers only logs this case and returns
        check(
            not Path(directory).is_file(),
            f"{directory} is a file; save_pretrained needs a folder",
            NotADirectoryError,
        )
        # The module holds the values too, because transformers reads the dtype for config.json from it.
        lend(model, state, lambda: inner.save_pretrained(directory, state_dict=weights, **arguments))

    ranks.on_rank0(write)
