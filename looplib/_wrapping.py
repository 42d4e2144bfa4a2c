"""Checks of gradient functions: which wrappers may go around which."""

from __future__ import annotations

from typing import Any

from looplib._core import records
from looplib._core.checks import check
from looplib._core.records import Made
from looplib.types import WHOLE, GradFn, Gradients, GradRequest, TrainState


def check_grad_fn(grad_fn: GradFn, who: str) -> GradFn:
    """Return the `GradFn` to call. Raise unless this is one, or a function that may be one."""
    inside = f"; put it inside: make_train_step({who}(grad_fn, ...), optimizer)"
    steps = ("train_step", "eval_step", "predict_step")
    return records.check_kind(grad_fn, who, "grad_fn", advice=inside if records.kind_of(grad_fn) in steps else "")


def check_whole(grad_fn: GradFn, who: str) -> GradFn:
    """Like `check_grad_fn`; also raise unless it returns gradients of the parameters, and not one per sample."""
    checked = check_grad_fn(grad_fn, who)
    if (record := records.made(grad_fn)) is not None and record.per_sample:
        raise ValueError(
            f"gradients of each sample do not add up within {who}: bring them together inside, "
            f"{who}(clip_per_sample({record.name}(...), max_norm), ...)"
        )
    return checked


def check_parts(grad_fn: GradFn, who: str, but: str = "") -> GradFn:
    """Like `check_grad_fn`; also raise if it has no meaning for microbatches, which `who` is going to request."""
    checked = check_whole(grad_fn, who)
    for record in records.chain(grad_fn):
        check(not record.whole_step or record.name == but, _order(record, who))
    return checked


def check_scalable(grad_fn: GradFn, who: str) -> GradFn:
    """Like `check_grad_fn`; also raise if it has no meaning for a scaled loss."""
    checked = check_whole(grad_fn, who)
    for record in records.chain(grad_fn):
        check(record.name != who, f"{who} within {who}: once is enough")
        check(record.scaled or not record.whole_step, _order(record, who))
        check(not record.per_sample, PER_SAMPLE_SCALED)
    return checked


PER_SAMPLE_SCALED = (
    "per-sample gradients within scale_loss are not supported: leave it out; autocast to torch.bfloat16, which needs "
    "no loss scale"
)


def of_whole_step(name: str, function: GradFn, inner: GradFn, *, scaled: bool = False) -> GradFn:
    """Build a wrapper for the gradients of a whole step, which refuses those of a single microbatch.

    It also refuses the gradients of a scaled loss unless `scaled` is True.
    """
    check_whole(inner, name)

    made = Made("grad_fn", name, inner, whole_step=True, scaled=scaled)

    def whole(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        if request.sum is not None:
            raise ValueError(_order(made, "accumulate"))
        if request.scale is not None and not scaled:
            raise ValueError(_order(made, "scale_loss"))
        return function(state, batch, request)

    return records.mark(whole, made)


def _order(record: Made, wrapper: str) -> str:
    """Why this function cannot be inside a wrapper, and what to write instead."""
    parts = {"scale_loss": "scaled gradients", "reduce_gradients": "each rank's part alone"}
    name, part = record.name, parts.get(wrapper, "each microbatch alone")
    outside = "leave {1} out" if record.inner is None else "put it around, {0}({1}(grad_fn, ...), ...)"
    return f"{name} within {wrapper} would act on {part}: {outside.format(name, wrapper)}"
