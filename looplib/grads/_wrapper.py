"""Custom gradient wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from looplib._core.records import Made, chain, made, mark
from looplib._wrapping import check_grad_fn, of_whole_step
from looplib.types import GradFn


def wrapper(
    grad_fn: GradFn,
    *,
    whole_step: bool = False,
    keeps_max_norm: bool = False,
    max_norm: float | None = None,
) -> Callable[[Any], Any]:
    """Decorator for custom gradient wrappers, which lets looplib check their order.

    >>> import looplib as ll, torch
    >>> def halved(grad_fn):
    ...     @ll.grads.wrapper(grad_fn)
    ...     def halved_grad_fn(state, batch, request=ll.types.GradRequest()):
    ...         out = grad_fn(state, batch, request)
    ...         return out._replace(grads={name: grad / 2 for name, grad in out.grads.items()})
    ...     return halved_grad_fn
    >>> grad_fn = ll.make_grad_fn(torch.nn.Linear(2, 1), lambda model, x: model(x).mean())
    >>> ll.accumulate(halved(ll.clip_by_global_norm(grad_fn, 1.0)), microbatches=2)
    Traceback (most recent call last):
        ...
    ValueError: clip_by_global_norm within accumulate ...

    Use it like `functools.wraps`, on the function that your wrapper returns. Messages then use your wrapper's name.

    A wrapper works without it too, but looplib cannot see what it wraps. A wrong order is then refused when the step
    runs instead of when it is built, and functions that must know in advance refuse the wrapper altogether, such as
    `add_noise`, which needs the clipping norm.

    Args:
        grad_fn: the gradient function that you wrap.
        whole_step: True if the wrapper makes sense only for the gradient of a whole step, as clipping does. It is
            then refused inside `accumulate` and `scale_loss`.
        keeps_max_norm: True if the wrapper never makes a sample's gradient larger, so that the bound set by
            `clip_per_sample` still holds outside it.
        max_norm: set this if the wrapper itself clips each sample's gradient to this norm and adds them up.

    Raises:
        TypeError: `grad_fn` is something different, such as a train step.
    """
    check_grad_fn(grad_fn, "grads.wrapper")

    def decorate(function: Any) -> Any:
        name = name_of(function)
        if whole_step:
            return of_whole_step(name, function, grad_fn)
        known = max_norm if max_norm is not None or not keeps_max_norm else max_norm_of(grad_fn)
        return mark(function, Made("grad_fn", name, grad_fn, max_norm=known))

    return decorate


def kept(function: Any, name: str, inner: GradFn, **facts: Any) -> GradFn:
    """Mark a wrapper that never makes a sample's gradient larger."""
    adds = (record := made(inner)) is not None and record.adds
    return mark(function, Made("grad_fn", name, inner, max_norm=max_norm_of(inner), adds=adds, **facts))  # type: ignore[no-any-return]


def name_of(function: Any) -> str:
    """Name of the wrapper that created a function: "halved" for "halved.<locals>.halved_grad_fn"."""
    qualified: str = getattr(function, "__qualname__", type(function).__name__)
    within = qualified.split(".<locals>.")
    return within[-2].rpartition(".")[2] if len(within) > 1 else qualified


def max_norm_of(grad_fn: GradFn) -> float | None:
    """The norm that each sample's gradient is known to be clipped to, or None."""
    record = made(grad_fn)
    return None if record is None else record.max_norm


def seen(grad_fn: GradFn) -> list[str]:
    """Marked wrappers of a function, from the outside in."""
    return [record.name for record in chain(grad_fn)]
