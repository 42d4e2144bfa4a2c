"""Floating-point operations of a step, and model FLOP utilization."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from looplib._core import torch_private
from looplib._core.checks import check_argument


def flops(function: Callable[..., Any], *args: Any, **named: Any) -> int:
    """Count FLOPs: the floating-point operations of one call. A multiplication with its addition is two.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(20, 10, bias=False)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> state, batch = ll.init_state(model), torch.ones(8, 20)
    >>> ll.log.flops(grad_fn, state, batch)  # forward, and backward to the weights: 2 * 8 * 20 * 10 each
    6400

    The function is called once. A gradient function (clipped, accumulated, ...) leaves the state as it was; a train
    step with `donate=True` would spend it. The counter knows matrix products, convolutions and attention, which is
    where the work is, and counts nothing for the rest: an optimizer's update among it. What activation checkpointing
    computes again counts again.

    Args:
        function: what to count.
        args, named: what it is called with.

    Source: `torch.utils.flop_counter.FlopCounterMode`.
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

    # torch has no count for its own attention on a CPU, and would leave it out.
    attention = {
        torch_private.cpu_attention: inspect.unwrap(sdpa_flop),
        torch_private.cpu_attention_backward: inspect.unwrap(sdpa_backward_flop),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        function(*args, **named)
    return int(counter.get_total_flops())


def utilization(flops: float, seconds: float, peak_flops: float) -> float:
    """Model FLOP utilization (MFU), the share of a device's peak that a step uses: `flops / seconds / peak_flops`.

    >>> import looplib as ll
    >>> ll.log.utilization(flops=2e12, seconds=0.01, peak_flops=989e12)  # a step on an H100 in bf16
    0.2022...

    Args:
        flops: operations of a step, from `ll.log.flops`; those of all ranks, if the peak is that of all.
        seconds: the time of a step, such as `meter.read()["step_seconds"]`.
        peak_flops: operations a second that the device's maker states, for the dtype in use.

    Raises ValueError when `seconds` or `peak_flops` is not above 0.

    Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    check_argument(seconds > 0, "seconds", seconds, "give a number above 0")
    check_argument(peak_flops > 0, "peak_flops", peak_flops, "give a number above 0")
    return flops / seconds / peak_flops
