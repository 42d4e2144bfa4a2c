"""Gradient wrappers: which may go around which, and wrappers of your own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from looplib._core.checks import check
from looplib._core.records import Made, chain, check_kind, kind_of, made, mark
from looplib.types import WHOLE, GradFn, Gradients, GradRequest, Metric, TrainState


def wrapper(
    grad_fn: GradFn,
    *,
    whole_step: bool = False,
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

    Raises:
        TypeError: `grad_fn` is something different, such as a train step.
    """
    check_grad_fn(grad_fn, "grads.wrapper")

    def decorate(function: Any) -> Any:
        name = name_of(function)
        if whole_step:
            return of_whole_step(name, function, grad_fn)
        return mark(function, Made("grad_fn", name, grad_fn))

    return decorate


def kept(function: Any, name: str, inner: GradFn, count_samples: Callable[[Any], int] | None = None) -> GradFn:
    """Mark a wrapper that leaves the gradients as they are, but for their sum. `count_samples` counts those of its batches."""
    known = made(inner) or Made("grad_fn", name)
    record = Made(
        "grad_fn", name, inner, per_sample=known.per_sample, max_norm=known.max_norm, count_samples=count_samples
    )
    return mark(function, record)  # type: ignore[no-any-return]


def name_of(function: Any) -> str:
    """Name of the wrapper that created a function: "halved" for "halved.<locals>.halved_grad_fn"."""
    qualified: str = getattr(function, "__qualname__", type(function).__name__)
    within = qualified.split(".<locals>.")
    return within[-2].rpartition(".")[2] if len(within) > 1 else qualified


def seen(grad_fn: GradFn) -> list[str]:
    """Marked wrappers of a function, from the outside in."""
    return [record.name for record in chain(grad_fn)]


def check_grad_fn(grad_fn: GradFn, who: str) -> GradFn:
    """Return the `GradFn` to call. Raise unless this is one, or a function that may be one."""
    inside = f"; put it inside: make_train_step({who}(grad_fn, ...), optimizer)"
    steps = ("train_step", "eval_step", "predict_step")
    checked = check_kind(grad_fn, who, "grad_fn", advice=inside if kind_of(grad_fn) in steps else "")
    if inspect.isfunction(grad_fn) and (names := _too_few(grad_fn)):
        shown = f"{grad_fn.__name__}({', '.join(names)})"
        raise TypeError(
            f"{who} got {shown}, which cannot be called as grad_fn(state, batch, request): give ll.make_grad_fn(model, "
            "loss_fn) of a loss function loss_fn(model, batch), and let a gradient function of your own take the request"
        )
    return checked


def _too_few(function: Any) -> list[str]:
    """Names of a function's parameters, if it cannot be called with three arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(None, None, WHOLE)
    except TypeError:
        return [*signature.parameters]
    return []


def check_whole(grad_fn: GradFn, who: str) -> GradFn:
    """Like `check_grad_fn`; also raise unless it returns gradients of the parameters, and not one per sample."""
    checked = check_grad_fn(grad_fn, who)
    if (record := made(grad_fn)) is not None and record.per_sample:
        raise ValueError(
            f"gradients of each sample do not add up within {who}: bring them together inside, "
            f"{who}(clip_per_sample({record.name}(...), max_norm), ...)"
        )
    return checked


def check_parts(grad_fn: GradFn, who: str) -> GradFn:
    """Like `check_grad_fn`; also raise if it has no meaning for microbatches, which `who` is going to request."""
    checked = check_whole(grad_fn, who)
    for record in chain(grad_fn):
        check(not record.whole_step, _order(record, who))
    return checked


def check_scalable(grad_fn: GradFn, who: str) -> GradFn:
    """Like `check_grad_fn`; also raise if it has no meaning for a scaled loss."""
    checked = check_whole(grad_fn, who)
    for record in chain(grad_fn):
        check(record.name != who, f"{who} within {who}: once is enough")
        check(record.scaled or not record.whole_step, _order(record, who))
        check(not record.per_sample, PER_SAMPLE_SCALED)
    return checked


def check_samples_apart(batch_norms: Sequence[str]) -> None:
    """Raise if these layers make each sample's gradient depend on the others."""
    check(
        not batch_norms,
        f"{', '.join(batch_norms)} would normalise each sample by the others, so that it has no gradient of its own: "
        "use GroupNorm in its place, or put it into eval mode, with running statistics, before its grad_fn is made",
    )


def joined(metrics: dict[str, Metric], more: dict[str, Metric]) -> dict[str, Metric]:
    """Metrics, and those that a wrapper adds. Raise for a name that both have, of which one value would be lost."""
    for name in more:
        if name in metrics:
            raise ValueError(
                f"the metrics have a {name!r} from inside already, of loss_fn's aux or of another wrapper: choose another "
                "name for yours, or leave out one of two wrappers that report it"
            )
    return {**metrics, **more}


PER_SAMPLE_SCALED = (
    "per-sample gradients within scale_loss are not supported: leave it out; autocast to torch.bfloat16, which needs "
    "no loss scale"
)


def of_whole_step(name: str, function: GradFn, inner: GradFn, *, scaled: bool = False) -> GradFn:
    """Build a wrapper for the gradients of a whole step, which refuses those of a single microbatch.

    It also refuses the gradients of a scaled loss unless `scaled` is True.
    """
    check_whole(inner, name)

    own = Made("grad_fn", name, inner, whole_step=True, scaled=scaled)

    def whole(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        if request.sum is not None:
            raise ValueError(_order(own, "accumulate"))
        if request.scale is not None and not scaled:
            raise ValueError(_order(own, "scale_loss"))
        return function(state, batch, request)

    return mark(whole, own)


def _order(record: Made, wrapper: str) -> str:
    """Why this function cannot be inside a wrapper, and what to write instead."""
    parts = {"scale_loss": "scaled gradients", "reduce_gradients": "each rank's part alone"}
    name, part = record.name, parts.get(wrapper, "each microbatch alone")
    outside = "leave {1} out" if record.inner is None else "put it around, {0}({1}(grad_fn, ...), ...)"
    return f"{name} within {wrapper} would act on {part}: {outside.format(name, wrapper)}"
