"""Mixed precision with `torch.autocast`.

`autocast` wraps only the function that calls the model, so the backward pass runs outside it, as torch recommends.
float16 also needs loss scaling: `dynamic_loss_scale`, a part of the update, keeps the scale, adapts it, and skips updates
that overflowed. Keep the weights in float32:
bfloat16 would round small updates away. `cast` makes a state with such weights for evaluation and export.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from looplib._core.records import check_kind, with_repr

R = TypeVar("R")


def autocast(
    function: Callable[[Any, Any], R], dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True
) -> Callable[[Any, Any], R]:
    """Mixed precision: run a `loss_fn`, `metric_fn` or `predict_fn` under `torch.autocast` on the model's device.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> predict_step = ll.make_predict_step(model, ll.autocast(lambda model, x: model(x), torch.bfloat16))
    >>> predict_step(ll.init_state(model), torch.zeros(4, 2)).dtype
    torch.bfloat16

    Parameters and their gradients keep their own dtype. For float16, put `ll.optim.dynamic_loss_scale()` into the chain as well.

    Args:
        function: `function(model, batch)`.
        dtype: `torch.bfloat16` or `torch.float16`.
        enabled: False turns it off, so that a setting can control it.

    Raises:
        ValueError: `dtype` is neither of the two.
    """
    check_kind(function, "autocast", "loss_fn")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"autocast to {dtype}: give torch.bfloat16 or torch.float16, or enabled=False for float32")

    def casted(model: nn.Module, batch: Any) -> R:
        device = next(model.parameters()).device.type
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return function(model, batch)

    return with_repr(casted, autocast, function, dtype, enabled=enabled)
