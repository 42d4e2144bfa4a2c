"""Gradient checks for microbatches and ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check, few
from looplib._core.engines import Context
from looplib._core.kinds import chain
from looplib._core.trees import batch_size, split
from looplib._wrapping import check_grad_fn
from looplib.grads._accumulation import accumulate
from looplib.testing._compare import above, copied, gaps, same
from looplib.testing._float64 import WithoutDropout, in_float64
from looplib.testing._report import fail
from looplib.testing._surroundings import streams_kept
from looplib.types import GradFn, Gradients, Part, TrainState


def assert_pieces_equal_whole(
    grad_fn: GradFn, state: TrainState, batch: Any, *, microbatches: int = 3, tolerance: float = 1e-4
) -> None:
    """Check gradient accumulation: the microbatches of `ll.accumulate` give the gradient of the whole batch.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> testing.assert_pieces_equal_whole(grad_fn, ll.init_state(model), torch.randn(8, 2))

    The computation is in float64 if the loss function supports it, and without the dropout of torch's own layers,
    since microbatches draw different random numbers from the whole batch.

    Args:
        grad_fn: the function that your script accumulates, without wrappers for the gradient of a whole step, such as
            `clip_by_global_norm`, which goes around `accumulate`.
        state: the state at which to take the gradient.
        batch: a batch as irregular as your real ones. If every sample has the same number of tokens, a wrong average
            goes unnoticed.
        microbatches: number of microbatches, preferably one that does not divide the batch evenly.
        tolerance: largest difference of gradients, relative to the largest gradient. Mistakes usually cause 1e-2 or
            more.

    Raises:
        AssertionError: gradients differ. The message has the parameters and the differences.
        ValueError: there are fewer samples than microbatches, the loss draws its own random numbers, or `grad_fn` is
            for a whole step.
    """
    __tracebackhide__ = True
    accumulated = accumulate(_of_parts(grad_fn), microbatches)
    count = batch_size(batch)
    check(
        2 <= microbatches <= count,
        f"microbatches is {microbatches}, and the batch has {count} samples: give 2 or more, up to that",
    )
    with _comparable(grad_fn, state, batch, tolerance) as (wide, rows, whole):
        _compare(
            whole, accumulated(wide, rows).grads, wide, tolerance, f"{microbatches} microbatches of {count} samples"
        )


def assert_reduces_alike(
    grad_fn: GradFn, state: TrainState, batch: Any, *, ranks: int = 2, tolerance: float = 1e-4
) -> None:
    """Check gradient reduction: the parts of a batch on n ranks add up to the gradient of the whole batch.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> testing.assert_reduces_alike(grad_fn, ll.init_state(model), torch.randn(7, 2), ranks=3)

    No process is started: the batch is divided as by looplib's loaders, the gradient of each part is computed in
    turn, and they are added up by their weights as by `ll.grads.reduce_gradients`. This takes milliseconds, and tests
    the loss function and its wrappers. It does not test that the script reduces gradients and wraps its model
    correctly; use `assert_ranks_train_alike` for that.

    Args:
        grad_fn, state, batch, tolerance: as for `assert_pieces_equal_whole`.
        ranks: number of parts.

    Raises:
        AssertionError: gradients differ (the message has the parameters and the differences), or a part has no
            weight.
        ValueError: there are fewer samples than ranks, the loss draws its own random numbers, or `grad_fn` is for a
            whole step.
    """
    __tracebackhide__ = True
    _of_parts(grad_fn)
    count = batch_size(batch)
    check(2 <= ranks <= count, f"ranks is {ranks}, and the batch has {count} samples: give 2 or more, up to that")
    with _comparable(grad_fn, state, batch, tolerance) as (wide, rows, whole):
        parts = split(rows, count, [len(part) for part in torch.arange(count).tensor_split(ranks)])
        outs = [grad_fn(wide, part, Part(reduction="sum", context=Context(local=True))) for part in parts]
        fail(
            "a part of a batch came without its weight",
            [f"rank {rank} of {ranks}" for rank, out in enumerate(outs) if out.weight is None],
            "A GradFn that wraps another hands its third argument on to it, grad_fn(state, batch, part), and the "
            "weight and normalizer of what that returns: out._replace(grads=...). See ll.types.Part.",
        )
        _compare(whole, _added_up(outs), wide, tolerance, f"the parts of {ranks} ranks, of {count} samples together")


def _added_up(outs: list[Gradients]) -> dict[str, Tensor]:
    """The gradient of the whole batch, from those of its parts."""
    total: Any = sum(out.weight for out in outs)
    added: dict[str, Tensor] = {}
    for out in outs:
        for name, grad in out.grads.items():
            mine = grad * (out.normalizer / (total + (total == 0)))
            added[name] = added[name] + mine if name in added else mine
    return added


def _of_parts(grad_fn: GradFn) -> GradFn:
    grad_fn = check_grad_fn(grad_fn, "testing")
    for record in chain(grad_fn):
        check(
            not record.whole_step or record.name == "retry_on_oom",
            f"this grad_fn ends in {record.name}, which acts on the gradient of a whole step, not on a part's: give the "
            f"one that {record.name} is put around",
        )
    return grad_fn


@contextmanager
def _comparable(
    grad_fn: GradFn, state: TrainState, batch: Any, tolerance: float
) -> Iterator[tuple[TrainState, Any, Gradients]]:
    """State, batch and gradients of the whole batch, in float64 if supported and without dropout."""
    with streams_kept(state), WithoutDropout(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="labels of -100")  # reported by the comparison if it matters
        wide, rows, whole = in_float64(grad_fn, state, batch)
        other = grad_fn(wide.replace(seed=wide.seed + 1), copied(rows))
        drawn = _apart(whole.grads, other.grads, tolerance)
        check(
            not drawn,
            f"the gradient of {few(drawn)} differs from one state.seed to another: the loss draws random numbers, and "
            "pieces draw others than the whole, so there is nothing to compare. Turn off what draws (dropout of torch's "
            "own layers is off already), such as by model.eval() on that layer before ll.make_grad_fn",
        )
        yield wide, rows, whole


def _apart(whole: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float) -> dict[str, float]:
    """Differences of the gradients that differ by more than a fraction of the largest one, by name."""
    largest = max((float(grad.abs().max()) for grad in whole.values() if grad.numel()), default=0.0)
    return above(tolerance * largest, gaps(whole, found))


def _compare(whole: Gradients, found: Mapping[str, Tensor], state: TrainState, tolerance: float, what: str) -> None:
    __tracebackhide__ = True
    apart = sorted(_apart(whole.grads, found, tolerance).items(), key=lambda item: -item[1])
    lines = [
        f"{name}: apart by {gap:.3g}, of {float(whole.grads[name].abs().max()):.3g} at most" for name, gap in apart
    ]
    written = [name for name, tensor in whole.buffers.items() if not same(tensor, state.buffers[name])]
    why = (
        f"The forward pass moved {few(written)}: BatchNorm, or another layer in training mode that takes its "
        "statistics over the batch, sees only a part at a time, so that its result depends on the size of the parts. "
        "GroupNorm or LayerNorm does not; on ranks, torch.nn.SyncBatchNorm sees all; or put the layer in eval mode."
        if written
        else "Usually a loss that is a mean over something else than the rows (tokens, pixels, what a mask leaves) "
        "returned as a plain scalar, which weighs by its rows: return ll.Mean(total, weight), the sum and the "
        "number of what counts. Or a sum over the rows: return a mean, or ll.Mean(total, number of rows). Or a "
        "term that looks across rows, such as a contrastive loss or a balance of experts, which parts cannot give."
    )
    fail(f"{what} do not give the gradient of the whole batch", lines, why)
