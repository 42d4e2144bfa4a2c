"""Master weights: update a half-precision model in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.mappings import in_dtypes_of, pick
from looplib._core.updates import updated
from looplib.optim._wrap import Updated, wrap
from looplib.types import Grads, Optimizer, Params


def master_weights(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Optimizer:
    """Master weights: keep a float32 copy of half-precision weights in the optimizer's state, and train that copy.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1).bfloat16()
    >>> optimizer = ll.optim.master_weights(ll.optimizer(torch.optim.AdamW, lr=1e-3))
    >>> state = ll.init_state(model, optimizer)
    >>> state.params["weight"].dtype, state.opt_state["master"]["weight"].dtype
    (torch.bfloat16, torch.float32)

    bfloat16 has 8 bits of precision, so an update of less than 1/256 of a weight would be rounded away. With this
    wrapper the master is updated and the model's weight is the rounded master. Gradients are converted to `dtype`,
    and moments are those of the masters. Parameters of different dtypes are updated directly.

    `ema(master_weights(optimizer))` averages the rounded weights; `master_weights(ema(optimizer))` averages the
    masters.

    Args:
        optimizer: the optimizer that updates the masters.
        dtype: dtype of the masters, `torch.float32` or `torch.float64`.

    Raises:
        ValueError: `dtype` is neither of the two, or, from `init`, no parameter is half precision.
    """
    check(dtype in (torch.float32, torch.float64), f"masters in {dtype}: give torch.float32 or torch.float64")

    def within(grads: Grads, params: Params, opt_state: Any) -> tuple[Grads, Params]:
        master = opt_state["master"]
        wide = {name: grad.to(dtype) if name in master else grad for name, grad in grads.items()}
        return wide, {**params, **master}

    def update_(grads: Grads, opt_state: Any, params: Params, step: int, **info: Any) -> Updated:
        master = opt_state["master"]
        wide, full = within(grads, params, opt_state)
        new, inner, more = updated(optimizer, wide, opt_state["inner_state"], full, step, info)
        with torch.no_grad():
            for name in grads.keys() & master.keys():
                params[name].copy_(new[name])
        opt_state.update(inner_state=inner, master=pick(new, master))
        return {**new, **pick(params, master)}, opt_state, more

    keeps, evaluation = {"master": partial(_first_masters, dtype)}, partial(_evaluated, optimizer)
    own: dict[str, Any] = {"update_": update_, "evaluation": evaluation, "within": within}
    return wrap(optimizer, master_weights, {"dtype": dtype}, keeps, **own)


def _first_masters(dtype: torch.dtype, params: Params, **extra: Any) -> Params:
    master = {
        name: tensor.detach().to(dtype)
        for name, tensor in params.items()
        if tensor.dtype in (torch.bfloat16, torch.float16)
    }
    dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in params.values()}))
    check(
        master,
        f"master_weights has nothing to keep: the parameters are {dtypes}. Make the model of half precision "
        "(model.bfloat16()), or leave this wrapper out",
    )
    return master


def _evaluated(
    optimizer: Optimizer, params: Params, buffers: dict[str, Tensor], opt_state: Any
) -> tuple[Params, dict[str, Tensor]]:
    full = {**params, **opt_state["master"]}
    chosen, buffers = optimizer.evaluation(full, buffers, opt_state["inner_state"])
    return (params if chosen is full else in_dtypes_of(chosen, params)), buffers
