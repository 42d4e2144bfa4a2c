"""An optimizer around another."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from looplib.optim._description import description_of_wrapper
from looplib.types import Evaluation, Init, Optimizer, Params, Update


def wrap(optimizer: Optimizer, init: Init, update: Update, evaluation: Evaluation | None = None) -> Optimizer:
    """An optimizer around another whose state stands in its own under `inner_state`."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"this wraps what ll.optimizer returns, and got a {type(optimizer).__name__}: give "
            "ll.optimizer(torch.optim.AdamW, lr=...), or that wrapped"
        )

    def inner(params: Params, buffers: dict[str, Tensor], opt_state: Any) -> tuple[Params, dict[str, Tensor]]:
        return optimizer.evaluation(params, buffers, opt_state["inner_state"])

    def numbers(opt_state: Any, step: int) -> dict[str, float]:
        return optimizer.hyperparameters(opt_state["inner_state"], step)

    return Optimizer(
        init, update, evaluation or inner, numbers, description_of_wrapper(optimizer, update), optimizer.kernel
    )
