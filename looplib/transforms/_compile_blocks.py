"""Regional compilation: compile the repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from looplib._core.kinds import check_kind
from looplib.losses._recompute import Classes, choice, outermost


def compile_blocks(model: nn.Module, blocks: Classes | Callable[[str, nn.Module], bool], **options: Any) -> nn.Module:
    """Compile each of a model's blocks by itself, in place, and leave the rest of the step as it is.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)])
    >>> model = ll.transforms.compile_blocks(model, torch.nn.TransformerEncoderLayer, backend="eager")
    >>> list(dict(model.named_parameters()))[0]
    '0.self_attn.in_proj_weight'

    For large models, whose whole step would take long to compile: blocks of one class share their code, so the first
    is compiled and the others are not. It goes with DDP (before it is wrapped) and FSDP2, with hooks, and with models
    of which some parts cannot be traced. Names stay as they are.

    Args:
        model: changed in place, and returned.
        blocks: a class of modules, a tuple of them, or `(name, module) -> bool`; the outermost of those chosen.
        options: torch.compile's.

    Raises ValueError when the model has no such module, TypeError for `blocks` of another kind.

    Source: "regional compilation" in PyTorch's tutorials; `torch.nn.Module.compile`.
    """
    check_kind(model, "compile_blocks", "model")
    for module in outermost(model, choice(blocks), "compile_blocks"):
        module.compile(**options)
    return model
