"""Arithmetic in fewer bits: where it happens, and what keeps it from losing small numbers.

`autocast` wraps what calls the model, so the backward pass is left outside, as torch asks. fp16 needs a loss scale:
`scale_loss` multiplies the loss and divides the gradients, and `dynamic_loss_scale` around the optimizer holds the
scale, grows it, and skips the updates that overflowed. Weights in bfloat16 need `master_weights` to move at all;
`cast` makes a state of such weights to evaluate and export with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from looplib._core.kinds import check_kind

R = TypeVar("R")


def autocast(
    function: Callable[[Any, Any], R], dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True
) -> Callable[[Any, Any], R]:
    """A `loss_fn`, `metric_fn` or `predict_fn` under `torch.autocast`, on the device of the model's parameters.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> predict_step = ll.make_predict_step(model, ll.autocast(lambda model, x: model(x), torch.bfloat16))
    >>> predict_step(ll.init_state(model), torch.zeros(4, 2)).dtype
    torch.bfloat16

    The parameters, and their gradients, stay in their own dtype. float16 needs `scale_loss` besides.

    Args:
        function: `function(model, batch)`.
        dtype: torch.bfloat16 or torch.float16.
        enabled: False for no effect, so that a setting can choose.

    Raises ValueError for another dtype.
    """
    check_kind(function, "autocast", "loss_fn")
    if dtype not in (torch.bfloat16, torch.float16):
        plain = "; float32 is what there is without autocast: leave it out, or give enabled=False"
        raise ValueError(
            f"autocast to {dtype}: give torch.bfloat16 or torch.float16{plain if dtype is torch.float32 else ''}"
        )

    def casted(model: nn.Module, batch: Any) -> R:
        device = next(model.parameters()).device.type
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return function(model, batch)

    return casted
