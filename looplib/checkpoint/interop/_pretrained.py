"""`save_pretrained`: a state as a folder that Hugging Face's transformers reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from looplib._core import modules as _modules
from looplib._core.collective import together
from looplib.checkpoint.interop._names import lend
from looplib.checkpoint.interop._state_dict import state_dict
from looplib.types import TrainState


def save_pretrained(model: nn.Module, state: TrainState, directory: str | os.PathLike[str], **arguments: Any) -> None:
    """Save a `transformers` model with the state's values, as the model's own `save_pretrained` does.

    >>> import looplib as ll, tempfile, transformers
    >>> config = transformers.BertConfig(
    ...     vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    >>> model = transformers.BertModel(config)
    >>> folder = tempfile.mkdtemp()
    >>> ll.checkpoint.save_pretrained(model, ll.init_state(model), folder)

    Any program that knows `transformers` can read the folder. To load it again:

    >>> model = transformers.AutoModel.from_pretrained(folder)
    >>> state = ll.init_state(model)

    All ranks call this, and the first one writes, as in `save_safetensors`.

    Args:
        model: a `transformers` model, wrapped or not. Saving records the dtype and the class in its `config`, as
            always.
        state: a state of this module, bound to it or not.
        directory: the folder; it is made if it does not exist.
        arguments: further arguments of `save_pretrained`, such as `max_shard_size`.

    Raises:
        TypeError: a model that has no `save_pretrained`.
        NotADirectoryError: `directory` is a file.
        ValueError: as `state_dict`; or several ranks would have to write, because of `distributed_checkpoint=True` or
            because `transformers` divided the model itself.
        DonatedStateError: the state is spent.
    """
    inner: Any = [module for name, module in _modules.named_modules(model) if not name][-1]
    if not callable(getattr(inner, "save_pretrained", None)):
        raise TypeError(
            f"{type(inner).__name__} has no save_pretrained, which the models of transformers have; for other models "
            "take ll.checkpoint.save_safetensors, or torch.save(ll.checkpoint.state_dict(model, state), path)"
        )
    ranks = together()
    divided = getattr(getattr(inner, "config", None), "distributed_config", None) is not None
    if ranks.several and (divided or arguments.get("distributed_checkpoint")):
        raise ValueError(
            f"{'config.distributed_config' if divided else 'distributed_checkpoint=True'} has all ranks write, and "
            "here the first alone does, whole tensors: shard the model by fully_shard, or, for checkpoints in parts, "
            "take ll.checkpoint_io"
        )
    weights = state_dict(model, state, cpu_offload=True)

    def write() -> None:
        if Path(directory).is_file():  # transformers logs this and returns
            raise NotADirectoryError(f"{directory} is a file; save_pretrained needs a folder")
        # With the values in the module too, for what is read off it: the dtype in config.json.
        lend(model, state, lambda: inner.save_pretrained(directory, state_dict=weights, **arguments))

    ranks.on_first(write)
