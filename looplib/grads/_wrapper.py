"""Gradient wrappers of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from looplib._core.kinds import Made, chain, made, mark
from looplib.gradients import check_grad_fn, of_whole_step
from looplib.types import GradFn


def wrapper(
    grad_fn: GradFn,
    *,
    whole_step: bool = False,
    keeps_max_norm: bool = False,
    max_norm: float | None = None,
) -> Callable[[Any], Any]:
    """Mark a gradient wrapper, so that checks see what it wraps.

    >>> import looplib as ll, torch
    >>> def halved(grad_fn):
    ...     @ll.grads.wrapper(grad_fn)
    ...     def halved_grad_fn(state, batch, part=ll.types.Part()):
    ...         out = grad_fn(state, batch, part)
    ...         return out._replace(grads={name: grad / 2 for name, grad in out.grads.items()})
    ...     return halved_grad_fn
    >>> grad_fn = ll.make_grad_fn(torch.nn.Linear(2, 1), lambda model, x: model(x).mean())
    >>> ll.accumulate(halved(ll.clip_by_global_norm(grad_fn, 1.0)), microbatches=2)
    Traceback (most recent call last):
        ...
    ValueError: clip_by_global_norm within accumulate would act on each piece alone: put it around, ...

    A `GradFn` wrapper without this mark works too. But what it wraps cannot be seen then: a wrong order is refused
    when the step runs and not when it is built, and what must be known before, such as the norm that `add_noise`
    protects, is refused. It is used like `functools.wraps`, on the function that the wrapper returns. The name in
    messages is that of the wrapper.

    Args:
        grad_fn: the function that is wrapped.
        whole_step: the wrapper has a meaning for the gradient of a whole step alone, as clipping does. It is then
            refused within `accumulate` and `scale_loss`.
        keeps_max_norm: no sample's gradient becomes larger by this wrapper, so what `clip_per_sample` has made sure
            of still holds outside.
        max_norm: the wrapper itself clips the gradient of each sample to this norm and adds them up.

    Raises TypeError when `grad_fn` is something else, such as a train step.
    """
    check_grad_fn(grad_fn, "grads.wrapper")

    def decorate(function: Any) -> Any:
        name = name_of(function)
        if whole_step:
            return of_whole_step(name, function, grad_fn)
        known = max_norm if max_norm is not None or not keeps_max_norm else max_norm_of(grad_fn)
        return mark(function, Made("grad_fn", name, grad_fn, max_norm=known))

    return decorate


def kept(function: Any, name: str, inner: GradFn, whole_step: bool = False) -> GradFn:
    """Mark a wrapper that makes no sample's gradient larger."""
    adds = (record := made(inner)) is not None and record.adds
    facts = Made("grad_fn", name, inner, whole_step=whole_step, max_norm=max_norm_of(inner), adds=adds)
    return mark(function, facts)  # type: ignore[no-any-return]


def name_of(function: Any) -> str:
    """The name of the wrapper that a function was made by: "halved" of "halved.<locals>.halved_grad_fn"."""
    qualified: str = getattr(function, "__qualname__", type(function).__name__)
    within = qualified.split(".<locals>.")
    return within[-2].rpartition(".")[2] if len(within) > 1 else qualified


def max_norm_of(grad_fn: GradFn) -> float | None:
    """The norm that each sample's gradient is known to be clipped to, or None."""
    record = made(grad_fn)
    return None if record is None else record.max_norm


def seen(grad_fn: GradFn) -> list[str]:
    """The wrappers of a function that are marked, from the outside in."""
    return [record.name for record in chain(grad_fn)]
