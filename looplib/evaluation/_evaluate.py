"""From a state to numbers over whole sets.

Batches pass one by one, and what is kept of them is a record of each metric, or nothing: memory does not grow with
the set. Nothing here changes the state, the module or torch's random stream: training goes on as if it had not been.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from looplib._core.ranks import any_rank, gather, is_first, rank, world_size
from looplib._core.torch_private import pytree
from looplib._core.trees import batch_size
from looplib.distributed._reduce import merged
from looplib.metrics._mean import Mean, compute, merge
from looplib.types import Metric, Metrics, TrainState

EvalFn = Callable[[TrainState, Any], Metrics]


def evaluate(
    eval_step: EvalFn | Mapping[str, EvalFn],
    state: TrainState,
    batches: Any,
    prefix: str = "",
    *,
    limit: int | None = None,
    progress: bool = False,
    rates: bool = False,
    tokens: Callable[[Any], int] | None = None,
    divide: bool = True,
) -> dict[str, float]:
    """The metrics over all batches, as floats: exact for any split, and training stays as it was.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1)
    >>> eval_step = ll.make_eval_step(model, lambda model, x: {"mean": ll.Mean(x.sum(), len(x))})
    >>> state = ll.init_state(model)
    >>> ll.evaluate(eval_step, state, torch.arange(7.0).split(3), prefix="eval/")
    {'eval/mean': 3.0}
    >>> sets = {"easy": torch.arange(7.0).split(3), "hard": [torch.ones(4)]}
    >>> ll.evaluate(eval_step, state, sets, prefix="eval/")
    {'eval/easy/mean': 3.0, 'eval/hard/mean': 1.0}

    Args:
        eval_step: from `make_eval_step`; or one for each of several sets, by their names.
        state: what to evaluate; it is not changed. `eval_state(optimizer, state)` has the averaged weights.
        batches: any iterable, such as a list, a DataLoader, or a looplib loader (read from its beginning), with a
            batch size of its own; or several by name, whose metrics are put under `name/`.
        prefix: put before each name.
        limit: the first batches only, as for a check before training.
        progress: show a bar that goes away.
        rates: add `samples_per_second`, `steps_per_second` and `seconds`. They are no function of the state, so a log
            that holds them is no longer the same for a run that was resumed.
        tokens: counts those of a batch, for `tokens_per_second`, too.
        divide: on several ranks, where the batches given are the same on each: divide them. False where each rank's
            are its own already.

    On several ranks, all of which call this, each sample counts once, and all get the same values. A looplib loader
    divides each of its batches; of other batches each rank takes one in turn. A rank that runs out takes a batch
    again, which does not count, since forward passes may be those of all ranks together. Records merge as by
    `ll.distributed.reduce`.

    Memory is that of one batch and some records of each metric. torch's random stream stands afterwards where it
    stood, whatever the iterable draws.

    For the records themselves, such as a confusion matrix to draw, see `measure`.

    Raises:
        ValueError: there is no batch; batches differ in their names; a set without an `eval_step`; one batch, a dict
            of tensors, in place of batches.
        TypeError: a state in the place of the step.
    """
    check_order("evaluate", eval_step, state)
    if isinstance(batches, Mapping):
        _check_sets(batches)
        found: dict[str, float] = {}
        options: dict[str, Any] = {
            "limit": limit,
            "progress": progress,
            "rates": rates,
            "tokens": tokens,
            "divide": divide,
        }
        for name, members in batches.items():
            step = eval_step.get(name) if isinstance(eval_step, Mapping) else eval_step
            if step is None:
                raise ValueError(f"no eval_step for the set {name!r}: there are those of {', '.join(eval_step)}")  # type: ignore[arg-type]
            place = f"{prefix}{name}/"
            found |= evaluate(step, state, members, place, **options)
        return found
    if isinstance(eval_step, Mapping):
        raise ValueError(f"eval_step has {', '.join(eval_step)}, and the batches no names: give a dict of sets too")

    began, counts = time.perf_counter(), [0, 0, 0]

    def count(batch: Any) -> None:
        sizes = 1, batch_size(batch), tokens(batch) if tokens else 0
        counts[:] = [counted + size for counted, size in zip(counts, sizes, strict=True)]

    title = f"{prefix.strip('/') or 'evaluation'}" if progress else None
    counted = rates or tokens
    with _kept_stream():
        whole = _measured("evaluate", eval_step, state, batches, limit, title, divide, count if counted else None)
        values = compute(whole, prefix)  # which waits for the device
    if counted:
        ranks = gather((time.perf_counter() - began, counts))
        seconds = max(taken for taken, _ in ranks)
        totals = dict(
            zip(("steps", "samples", "tokens"), map(sum, zip(*[own for _, own in ranks], strict=True)), strict=True)
        )
        names = ["samples", "steps"] + (["tokens"] if tokens else [])
        values |= {f"{prefix}{name}_per_second": totals[name] / seconds for name in names}
        values[f"{prefix}seconds"] = seconds
    return values


def measure(
    eval_step: EvalFn,
    state: TrainState,
    batches: Any,
    *,
    limit: int | None = None,
    progress: bool = False,
    divide: bool = True,
) -> dict[str, Metric]:
    """The metrics over all batches of one set as records, for what is more than a number, such as a matrix to draw.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1)
    >>> def metric_fn(model, batch):
    ...     x, y = batch
    ...     return {"confusion": ll.metrics.ConfusionMatrix.of(x > 0, y, classes=2)}
    >>> batches = [(torch.tensor([-1.0, 2.0]), torch.tensor([0, 1])), (torch.tensor([3.0]), torch.tensor([0]))]
    >>> records = ll.evaluation.measure(ll.make_eval_step(model, metric_fn), ll.init_state(model), batches)
    >>> records["confusion"].matrix
    tensor([[1, 1],
            [0, 1]])
    >>> ll.compute(records)
    {'confusion': 0.666...}

    `evaluate` gives what `compute` makes of these.

    Args:
        eval_step, state, batches: as for `evaluate`, of one set.
        limit, progress, divide: as there.

    Ranks and errors are as there too.
    """
    check_order("measure", eval_step, state)
    for name, value in {"batches": batches, "eval_step": eval_step}.items():
        if isinstance(value, Mapping):
            _check_sets(value)
            raise ValueError(f"measure takes one set, and {name} has {', '.join(value)}: call it for each of them")
    with _kept_stream():
        title = "evaluation" if progress else None
        return _measured("measure", eval_step, state, batches, limit, title, divide)


def _measured(
    function: str,
    eval_step: EvalFn,
    state: TrainState,
    batches: Any,
    limit: int | None,
    title: str | None,
    divide: bool,
    count: Callable[[Any], None] | None = None,
) -> dict[str, Metric]:
    """The metrics of all batches and ranks together; each batch that counts is counted."""
    metrics: Metrics | None = None
    held: list[tuple[int, Metrics]] = []
    for batch, counts in read(batches, state, 0, limit, title, divide):
        metrics = eval_step(state, batch)
        if counts:
            _hold(held, metrics)
            if count is not None:
                count(batch)
    whole = merged(merge(*[part for _, part in held]) if held else None, metrics)
    if whole is None:
        raise ValueError(
            f"{function} got no batches: the iterable is empty, or a generator that was used up; give a list, a "
            "DataLoader or a loader"
        )
    return whole


@contextmanager
def _kept_stream() -> Iterator[None]:
    """torch's random stream stands afterwards where it stood."""
    stream = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(stream)


def check_order(function: str, step: Any, state: Any, before: str = "") -> None:
    if not isinstance(state, TrainState) or not (callable(step) or isinstance(step, Mapping)):
        raise TypeError(
            f"{function} takes a step and then a state, and found a {type(step).__name__} and then a "
            f"{type(state).__name__}: write {function}({before}step, state, batches)"
        )


def _check_sets(sets: Mapping[str, Any]) -> None:
    if tensors := [name for name, value in sets.items() if isinstance(value, torch.Tensor)]:
        raise ValueError(
            f"batches is a dict of tensors ({', '.join(map(str, tensors))}), as one batch is, and a dict here is of "
            "several sets by name: give a list of batches, such as [batch]"
        )


def _hold(held: list[tuple[int, Metrics]], metrics: Metrics) -> None:
    """Add the metrics of a batch to those that are held, each with the number of its tensors."""
    if all(isinstance(metric, Mean) for metric in metrics.values()):
        held.append((1, metrics))
        if len(held) == 5:  # a few are added up at a time, for the cost of two
            held[:] = [(1, merge(*[metrics for _, metrics in held]))]
        return
    held.append((_tensors(metrics), metrics))
    # Those of fixed size, which may be large, are merged at once, and one is held. Those that collect are merged with
    # their like, as a binary counter carries: of n batches log n are held, and each is copied log n times.
    while len(held) > 1 and held[-2][0] <= held[-1][0]:
        both = merge(held[-2][1], held[-1][1])
        held[-2:] = [(_tensors(both), both)]


def _tensors(metrics: Metrics) -> int:
    return len(pytree.tree_leaves(dict(metrics)))


def read(
    batches: Any, state: TrainState, start: int, limit: int | None, title: str | None, divide: bool
) -> Iterator[tuple[Any, bool]]:
    """This rank's batches from a place on, and whether each counts: all ranks are given the same number of them."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; give how many batches, at least 1, or None for all")
    stream = getattr(batches, "_length", 0) is None
    length = max(0, len(batches) - start) if hasattr(batches, "__len__") and not stream else None
    if length == 0:
        batches, start = (), 0  # a loader takes it for a mistake to be read on from its end
    if limit is not None:
        length = limit if length is None else min(limit, length)
    # A stream reads what comes before as well, and takes its end for a mistake, too.
    first = 0 if stream or not callable(batches) else start
    rest = slice(start - first, None if limit is None else start - first + limit)
    ranks = world_size()
    found: Iterator[tuple[Any, bool]]
    place = state.replace(epoch=0, batch=first, epoch_length=None)
    if divide and getattr(batches, "divide", False):
        found = islice(batches.parts(place), rest.start, rest.stop)
    else:
        whole = islice(batches(place) if callable(batches) else batches, rest.start, rest.stop)
        if divide:
            found = _in_turn(whole, rank(), ranks)
            length = None if length is None else -(-length // ranks)
        else:
            found = _together(whole)
    if title is None or not is_first():
        return found
    from tqdm.auto import tqdm

    bar: Iterator[tuple[Any, bool]] = iter(tqdm(found, desc=title, total=length, leave=False))
    return bar


def _in_turn(batches: Iterator[Any], rank: int, ranks: int) -> Iterator[tuple[Any, bool]]:
    """Each rank takes a batch of so many; where the last ones are fewer, the first of them stands in."""
    for first in batches:
        mine, counts = first, rank == 0
        for place in range(1, ranks):
            other = next(batches, _END)
            if other is _END:
                break
            if place == rank:
                mine, counts = other, True
        yield mine, counts
        del first, mine


def _together(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Ranks with batches of their own: one that has no more takes its last one again while others go on."""
    last: Any = _END
    while any_rank((batch := next(batches, _END)) is not _END):
        if batch is _END and last is _END:
            raise ValueError(
                f"rank {rank()} has no batch at all, and others have: with divide=False give each rank at least one"
            )
        last = last if batch is _END else batch
        yield last, batch is not _END


_END = object()
