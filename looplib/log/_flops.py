"""FLOPs of a step, and model FLOP utilization."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from looplib._core import torch_private
from looplib._core.checks import check_argument


def flops(function: Callable[..., Any], *args: Any, **named: Any) -> int:
    """Count FLOPs: the floating-point operations of one call. A multiply-add counts as two.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(20, 10, bias=False)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> state, batch = ll.init_state(model), torch.ones(8, 20)
    >>> ll.log.flops(grad_fn, state, batch)  # forward, and backward to the weights: 2 * 8 * 20 * 10 each
    6400

    The function is called once. A gradient function, with any wrappers, leaves the state unchanged; a train step with
    `donate=True` would consume it. Matrix products, convolutions and attention are counted, which make up nearly all
    of the work. Everything else, such as an optimizer's update, counts as zero. Activations that are recomputed count
    twice.

    Args:
        function: the function to measure.
        args, named: its arguments.

    Source: `torch.utils.flop_counter.FlopCounterMode`.
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

    # torch has no formula for its attention kernel on CPUs and would not count it.
    attention = {
        torch_private.cpu_attention: inspect.unwrap(sdpa_flop),
        torch_private.cpu_attention_backward: inspect.unwrap(sdpa_backward_flop),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        function(*args, **named)
    return int(counter.get_total_flops())


def utilization(flops: float, seconds: float, peak_flops: float) -> float:
    """Model FLOP utilization (MFU): the fraction of a device's peak that a step uses, `flops / seconds / peak_flops`.

    >>> import looplib as ll
    >>> ll.log.utilization(flops=2e12, seconds=0.01, peak_flops=989e12)  # a step on an H100 in bf16
    0.2022...

    Args:
        flops: FLOPs of a step, from `ll.log.flops`. Pass those of all ranks if `peak_flops` is for all.
        seconds: duration of a step, such as `meter.read()["step_seconds"]`.
        peak_flops: operations per second stated by the device's maker for the dtype in use.

    Raises:
        ValueError: `seconds` or `peak_flops` is not above 0.

    Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    check_argument(seconds > 0, "seconds", seconds, "give a number above 0")
    check_argument(peak_flops > 0, "peak_flops", peak_flops, "give a number above 0")
    return flops / seconds / peak_flops
