"""Checks that wrappers of gradient functions share, and their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from looplib._core.checks import check
from looplib._core.records import Made, check_kind, kind_of, record_of, records_of, with_record
from looplib.types import BatchPart, GradFn, Metric


def as_wrapper(function: Any, name: str, inner: GradFn, count_samples: Callable[[Any], int] | None = None) -> GradFn:
    """A wrapper, with a record of what is known of the function in it. `count_samples` counts the samples of its batches."""
    inner_record = record_of(inner) or Made("grad_fn", name)
    record = Made(
        "grad_fn",
        name,
        inner,
        per_sample=inner_record.per_sample,
        max_norm=inner_record.max_norm,
        count_samples=count_samples,
    )
    return with_record(function, record)  # type: ignore[no-any-return]


def name_of(function: Any) -> str:
    """Name of the wrapper that created a function: "halved" for "halved.<locals>.halved_grad_fn"."""
    if (record := record_of(function)) is not None:
        return record.name
    code = getattr(function, "__code__", None)
    if code is not None:
        qualified: str = code.co_qualname  # functools.wraps changes __qualname__, and not this
    else:
        qualified = getattr(function, "__qualname__", type(function).__name__)
    enclosing = qualified.split(".<locals>.")
    return enclosing[-2].rpartition(".")[2] if len(enclosing) > 1 else qualified


def seen(grad_fn: GradFn) -> list[str]:
    """Names of the wrappers of a function that have a record, from the outside in."""
    return [record.name for record in records_of(grad_fn)]


def check_grad_fn(grad_fn: GradFn, who: str) -> GradFn:
    """Return the `GradFn` to call. Raise unless this is one, or a function that may be one."""
    kind, advice = kind_of(grad_fn), ""
    if kind is None:
        advice = ". A gradient function of your own takes **request and hands it on"
    elif kind in ("train_step", "eval_step", "predict_step"):
        advice = f"; put it inside: make_train_step({who}(grad_fn, ...), optimizer)"
    return check_kind(grad_fn, who, "grad_fn", advice=advice)


def check_whole_batch(part: BatchPart | None, name: str, instead: str = "") -> None:
    """Raise if a gradient function is called for a part of a batch, where it has no meaning."""
    advice = instead or f"put it around, {name}(accumulate(grad_fn, ...), ...)"
    check(
        part is None,
        f"{name} within accumulate or reduce_gradients would act on each part of a batch alone: {advice}",
    )


def check_summed(grad_fn: GradFn, who: str) -> GradFn:
    """Like `check_grad_fn`; also raise for gradients of each sample, which are not those of the parameters."""
    checked = check_grad_fn(grad_fn, who)
    record = record_of(grad_fn)
    check(
        record is None or not record.per_sample,
        f"gradients of each sample are not those of a step: bring them together inside, {who}(clip_per_sample(...), ...)",
    )
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
    "per-sample gradients of a scaled loss are not supported: leave out ll.optim.dynamic_loss_scale, or the scaler= of "
    "backward, and autocast to torch.bfloat16, which needs no loss scale"
)
DROPPED = (
    "{who} got {what}: a gradient function of your own hands what it is given by name on to the one that it wraps, "
    "grad_fn(state, batch, **request), and returns out._replace(grads=...) (see ll.types.GradFn)"
)
