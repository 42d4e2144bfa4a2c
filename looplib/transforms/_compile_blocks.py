"""Regional compilation: compile the repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from looplib._core.kinds import check_kind
from looplib.losses._recompute import Classes, choice, outermost


def compile_blocks(model: nn.Module, blocks: Classes | Callable[[str, nn.Module], bool], **options: Any) -> nn.Module:
    """Regional compilation: compile each of a model's blocks in place, and leave the rest of the step eager.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)])
    >>> model = ll.transforms.compile_blocks(model, torch.nn.TransformerEncoderLayer, backend="eager")
    >>> list(dict(model.named_parameters()))[0]
    '0.self_attn.in_proj_weight'

    Use it for large models whose whole step would take long to compile: blocks of one class share their code, so only
    the first is compiled. It works with DDP (call it before wrapping), FSDP2, hooks, and models that cannot be traced
    completely. Parameter names do not change.

    Args:
        model: the module, changed in place and returned.
        blocks: a module class, a tuple of classes, or `(name, module) -> bool`. The outermost matching modules are
            compiled.
        options: arguments of `torch.compile`.

    Raises:
        ValueError: the model has no such module.
        TypeError: `blocks` is of a different type.

    Source: "regional compilation" in PyTorch's tutorials; `torch.nn.Module.compile`.
    """
    check_kind(model, "compile_blocks", "model")
    for module in outermost(model, choice(blocks), "compile_blocks"):
        module.compile(**options)
    return model
