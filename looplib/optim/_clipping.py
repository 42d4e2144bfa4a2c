"""Gradient clipping: parts of an update that go before the weights.

Each clips the gradients of a whole step, whatever microbatches, ranks or loss scales they come from. Norms are reported as
metrics and stay on the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check, check_number, few
from looplib._core.records import with_repr
from looplib._objective import multiply
from looplib.metrics import Mean
from looplib.optim._norms import norm_of
from looplib.optim._part import made_of, wraps_nothing
from looplib.types import Grads, Optimizer, Params, Transformed


@wraps_nothing("clip_by_global_norm(1.0)")
def clip_by_global_norm(max_norm: float, norm_type: float = 2.0) -> Optimizer:
    """Gradient clipping by global norm. The norm before clipping is reported as `grad_norm`.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.chain(ll.clip_by_global_norm(1.0), ll.optimizer(torch.optim.SGD, lr=1.0))
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> start = ll.init_state(model, optimizer)
    >>> state, metrics = train_step(start, torch.full((4, 2), 100.0))
    >>> changes = [state.params[name] - start.params[name] for name in start.params]
    >>> ll.optim.global_norm(changes).item() <= 1.0 + 1e-4
    True

    Gradients whose norm is above `max_norm` are scaled down to it. The result is bitwise that of
    `torch.nn.utils.clip_grad_norm_`, because it runs the same operations in the same order. As there, a norm that is
    infinite or NaN makes the gradients NaN. The norm is not read by the host, so it does not delay the step.

    It is a part of an update (`ll.chain`), before the optimizer. In an optimizer of a `partition`, the norm is that of this
    optimizer's own gradients.

    Args:
        max_norm: largest norm of all gradients together, above 0. Pass `math.inf` to report the norm without
            clipping.
        norm_type: order of the norm, such as 2 or `math.inf`.

    Raises:
        TypeError: `max_norm` or `norm_type` is not a number; from the step, a gradient is sparse, of which torch has no norm before 2.14.
        ValueError: `max_norm` is not above 0.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013; as a part,
    `optax.clip_by_global_norm`.
    """
    check_number("max_norm", max_norm, lambda norm: norm > 0, "give a norm above 0")
    check_number("norm_type", norm_type, _is_an_order, "give a number such as 2 or math.inf")

    def transform(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Transformed:
        norm = _norm_of(grads, norm_type, "clip_by_global_norm")
        if max_norm != math.inf:
            multiply(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return Transformed(grads, metrics={"grad_norm": Mean(norm)})

    settings = {"max_norm": max_norm, "norm_type": norm_type}
    clipping = made_of("clip_by_global_norm", "gradients", settings, transform=transform)
    return with_repr(clipping, clip_by_global_norm, max_norm, norm_type=norm_type)


@wraps_nothing("optim.clip_by_norm(1.0)")
def clip_by_norm(max_norm: float, norm_type: float = 2.0) -> Optimizer:
    """Gradient clipping by norm, of each parameter on its own.

    >>> import looplib as ll, torch
    >>> optimizer = ll.chain(ll.optim.clip_by_norm(1.0), ll.optimizer(torch.optim.SGD, lr=1.0))
    >>> params = {"w": torch.zeros(2), "b": torch.zeros(1)}
    >>> grads = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}
    >>> optimizer.update(grads, optimizer.init(params), params, 0)[0]
    {'w': tensor([-0.6000, -0.8000]), 'b': tensor([-0.5000])}

    A large gradient of one parameter leaves the others as they are, where `clip_by_global_norm` would scale all of them.
    The result is bitwise that of `torch.nn.utils.clip_grad_norm_` called with each parameter. The norms are not read by
    the host.

    Args:
        max_norm: largest norm of a parameter's gradient, above 0.
        norm_type: order of the norm, such as 2 or `math.inf`.

    Raises:
        TypeError: `max_norm` or `norm_type` is not a number; from the step, a gradient is sparse, of which torch has no norm before 2.14.
        ValueError: `max_norm` is not above 0.
    """
    check_number("max_norm", max_norm, lambda norm: norm > 0, "give a norm above 0")
    check_number("norm_type", norm_type, _is_an_order, "give a number such as 2 or math.inf")

    def transform(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Transformed:
        for name, grad in grads.items():
            norm = _norm_of({name: grad}, norm_type, "clip_by_norm")
            multiply({name: grad}, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return Transformed(grads)

    settings = {"max_norm": max_norm, "norm_type": norm_type}
    clipping = made_of("clip_by_norm", "gradients", settings, transform=transform)
    return with_repr(clipping, clip_by_norm, max_norm, norm_type=norm_type)


def _norm_of(grads: Grads, norm_type: float, who: str) -> Tensor:
    try:
        return norm_of(list(grads.values()), norm_type)
    except NotImplementedError:
        _check_dense(grads, who)
        raise


def _check_dense(grads: Grads, who: str) -> None:
    """Raise TypeError for sparse gradients, of which torch has no norm and no clamp."""
    sparse = [name for name, grad in grads.items() if grad.is_sparse]
    check(
        not sparse,
        f"{who} got the sparse gradient of {few(sparse)}, which torch cannot clip: leave out Embedding(sparse=True), or clip "
        "the other parameters alone, in an optimizer of ll.optim.partition",
        TypeError,
    )


def _is_an_order(norm_type: float) -> bool:
    return not math.isnan(norm_type)


@wraps_nothing("optim.clip_by_value(0.5)")
def clip_by_value(max_value: float) -> Optimizer:
    """Gradient clipping by value: clip each element to `[-max_value, max_value]`.

    >>> import looplib as ll, torch
    >>> optimizer = ll.chain(ll.optim.clip_by_value(0.5), ll.optimizer(torch.optim.SGD, lr=1.0))
    >>> params = {"w": torch.zeros(2)}
    >>> optimizer.update({"w": torch.tensor([100.0, -0.25])}, optimizer.init(params), params, 0)[0]
    {'w': tensor([-0.5000,  0.2500])}

    The result is bitwise that of `torch.nn.utils.clip_grad_value_`. NaN elements stay NaN.

    Args:
        max_value: largest magnitude of an element, above 0.

    Raises:
        TypeError: `max_value` is not a number; from the step, a gradient is sparse or complex.
        ValueError: `max_value` is not above 0.
    """
    check_number("max_value", max_value, lambda value: value > 0, "give a magnitude above 0")

    def transform(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Transformed:
        values = list(grads.values())
        try:
            torch_private.foreach_clamp_min_(values, -max_value)
            torch_private.foreach_clamp_max_(values, max_value)
        except NotImplementedError:
            _check_dense(grads, "clip_by_value")
            unordered = [name for name, grad in grads.items() if grad.is_complex()]
            check(
                not unordered,
                f"clip_by_value got the complex gradient of {few(unordered)}, whose numbers have no order: use "
                "clip_by_norm or clip_by_global_norm",
                TypeError,
            )
            raise
        return Transformed(grads)

    clipping = made_of("clip_by_value", "gradients", {"max_value": max_value}, transform=transform)
    return with_repr(clipping, clip_by_value, max_value)
