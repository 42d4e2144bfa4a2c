"""Gradient clipping.

Each function clips the gradients of a whole step, so it goes around `accumulate`, and around `scale_loss`, which
returns unscaled gradients. Norms are reported as metrics and stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check, check_number, few
from looplib._core.mappings import stacked
from looplib._core.ranks import any_sharded
from looplib._core.records import with_repr
from looplib._objective import multiply
from looplib.grads._wrapper import check_whole, joined, of_whole_step
from looplib.metrics._mean import Mean
from looplib.types import WHOLE, GradFn, Gradients, GradRequest, Grads, TrainState


def clip_by_global_norm(grad_fn: GradFn, max_norm: float, norm_type: float = 2.0) -> GradFn:
    """Gradient clipping by global norm. The norm before clipping is reported as `grad_norm`.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> clipped = ll.clip_by_global_norm(grad_fn, 1.0)(ll.init_state(model), torch.full((4, 2), 100.0))
    >>> torch.nn.utils.get_total_norm(clipped.grads.values()).item() <= 1.0
    True

    Gradients whose norm is above `max_norm` are scaled down to it. The result is bitwise that of
    `torch.nn.utils.clip_grad_norm_`, because it runs the same operations in the same order. As there, a norm that is
    infinite or NaN makes the gradients NaN. The norm is not read by the host, so it does not delay the step.

    Args:
        grad_fn: gradient function of a whole step.
        max_norm: largest norm of all gradients together, above 0. Pass `math.inf` to report the norm without
            clipping.
        norm_type: order of the norm, such as 2 or `math.inf`.

    Raises:
        TypeError: `max_norm` or `norm_type` is not a number; from the step, a gradient is sparse.
        ValueError: `max_norm` is not above 0, or the wrapper is used inside `accumulate`, where it would clip each
            microbatch.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013.
    """
    check_number("max_norm", max_norm, lambda norm: norm > 0, "give a norm above 0")
    check_number("norm_type", norm_type, _is_an_order, "give a number such as 2 or math.inf")
    grad_fn = check_whole(grad_fn, "clip_by_global_norm")

    def clipped(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        out = grad_fn(state, batch, request)
        norm = _norm_of(out.grads, norm_type, "clip_by_global_norm")
        if max_norm != math.inf:
            multiply(out.grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return out._replace(metrics=joined(out.metrics, {"grad_norm": Mean(norm)}))

    made = of_whole_step("clip_by_global_norm", clipped, grad_fn)
    return with_repr(made, clip_by_global_norm, grad_fn, max_norm, norm_type=norm_type)


def clip_by_norm(grad_fn: GradFn, max_norm: float, norm_type: float = 2.0) -> GradFn:
    """Gradient clipping by norm, of each parameter on its own.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> clipped = ll.grads.clip_by_norm(grad_fn, 1.0)(ll.init_state(model), torch.full((4, 2), 100.0))
    >>> all(grad.norm() <= 1.0 for grad in clipped.grads.values())
    True

    A large gradient of one parameter leaves the others as they are, where `clip_by_global_norm` would scale all of them.
    The result is bitwise that of `torch.nn.utils.clip_grad_norm_` called with each parameter. The norms are not read by
    the host.

    Args:
        grad_fn: gradient function of a whole step.
        max_norm: largest norm of a parameter's gradient, above 0.
        norm_type: order of the norm, such as 2 or `math.inf`.

    Raises:
        TypeError: `max_norm` or `norm_type` is not a number; from the step, a gradient is sparse.
        ValueError: `max_norm` is not above 0, or the wrapper is used inside `accumulate`.

    Source: Keras' `clipnorm`; `tf.clip_by_norm`.
    """
    check_number("max_norm", max_norm, lambda norm: norm > 0, "give a norm above 0")
    check_number("norm_type", norm_type, _is_an_order, "give a number such as 2 or math.inf")
    grad_fn = check_whole(grad_fn, "clip_by_norm")

    def clipped(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        out = grad_fn(state, batch, request)
        for name, grad in out.grads.items():
            norm = _norm_of({name: grad}, norm_type, "clip_by_norm")
            multiply({name: grad}, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return out

    made = of_whole_step("clip_by_norm", clipped, grad_fn)
    return with_repr(made, clip_by_norm, grad_fn, max_norm, norm_type=norm_type)


def _norm_of(grads: Grads, norm_type: float, who: str) -> Tensor:
    try:
        return _norm(list(grads.values()), norm_type)
    except NotImplementedError:
        _check_dense(grads, who)
        raise


def _check_dense(grads: Grads, who: str) -> None:
    """Raise TypeError for sparse gradients, of which torch has no norm and no clamp."""
    sparse = [name for name, grad in grads.items() if grad.is_sparse]
    check(
        not sparse,
        f"{who} got the sparse gradient of {few(sparse)}, which torch cannot clip: leave out Embedding(sparse=True), or clip "
        "the other parameters alone, in a gradient function of their own (trainable=)",
        TypeError,
    )


def _is_an_order(norm_type: float) -> bool:
    return not math.isnan(norm_type)


def global_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm of all elements of all tensors together, as a scalar tensor on the first tensor's device.

    >>> global_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)

    Args:
        tensors: one or more tensors of any shapes. Those on other devices are copied to the first one's. Of a module's
            gradients, leave out those that are None: `[p.grad for p in model.parameters() if p.grad is not None]`.
        norm_type: order of the norm, such as 2 or `math.inf`.

    Raises:
        TypeError: a tensor is sparse, for which torch has no norm.
    """
    tensors = list(tensors)
    try:
        return _norm(tensors, norm_type)
    except NotImplementedError:
        sparse = any(tensor.is_sparse for tensor in tensors)
        advice = "give tensor.coalesce().values(), or leave out Embedding(sparse=True)"
        check(
            not sparse, f"the norm of a sparse tensor was asked for, which torch does not have: {advice}", TypeError
        )
        raise


def _norm(tensors: list[Tensor], norm_type: float) -> Tensor:
    if any_sharded(tensors):
        return _norm_of_shards(tensors, norm_type)
    if len({tensor.dtype for tensor in tensors}) > 1:
        return torch.nn.utils.get_total_norm(tensors, norm_type)
    norms = torch_private.foreach_norm(tensors, norm_type)
    norm: Tensor = torch.linalg.vector_norm(stacked(norms), norm_type)
    return norm


def _norm_of_shards(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Norm over all ranks' shards: first of each device mesh separately, then of all meshes."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_mesh.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    norms: list[Any] = [torch.nn.utils.get_total_norm(alike, norm_type) for alike in by_mesh.values()]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(whole), norm_type) if len(whole) > 1 else whole[0]
    return norm


def clip_by_value(grad_fn: GradFn, max_value: float) -> GradFn:
    """Gradient clipping by value: clip each element to `[-max_value, max_value]`.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
    >>> clipped = ll.grads.clip_by_value(grad_fn, 0.5)(ll.init_state(model), torch.tensor([[100.0, -100.0]]))
    >>> clipped.grads["weight"]
    tensor([[ 0.5000, -0.5000]])

    The result is bitwise that of `torch.nn.utils.clip_grad_value_`. NaN elements stay NaN.

    Args:
        grad_fn: gradient function of a whole step.
        max_value: largest magnitude of an element, above 0.

    Raises:
        TypeError: `max_value` is not a number; from the step, a gradient is sparse or complex.
        ValueError: `max_value` is not above 0, or the wrapper is used inside `accumulate`.
    """
    check_number("max_value", max_value, lambda value: value > 0, "give a magnitude above 0")
    grad_fn = check_whole(grad_fn, "clip_by_value")

    def clipped(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        out = grad_fn(state, batch, request)
        grads = list(out.grads.values())
        try:
            torch_private.foreach_clamp_min_(grads, -max_value)
            torch_private.foreach_clamp_max_(grads, max_value)
        except NotImplementedError:
            _check_dense(out.grads, "clip_by_value")
            unordered = [name for name, grad in out.grads.items() if grad.is_complex()]
            check(
                not unordered,
                f"clip_by_value got the complex gradient of {few(unordered)}, whose numbers have no order: use "
                "clip_by_norm or clip_by_global_norm",
                TypeError,
            )
            raise
        return out

    made = of_whole_step("clip_by_value", clipped, grad_fn)
    return with_repr(made, clip_by_value, grad_fn, max_value)
