"""Evaluation: metrics over whole datasets.

Batches are processed one by one, and only one record per metric is kept, so memory does not grow with the dataset.
State, module and torch's random streams are left unchanged, so training continues as if there had been no evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from looplib._core.checks import check, few, separated, warn
from looplib._core.misuse import note_scores
from looplib._core.random import restored
from looplib._core.ranks import gather
from looplib._core.records import check_kind
from looplib._core.samples import counter_of
from looplib.distributed.records import merged
from looplib.evaluation._batches import Reading, ranks_of, read
from looplib.metrics import Cat, compute, merge
from looplib.types import Metric, Metrics, TrainState

EvalFn = Callable[[TrainState, Any], Metrics]


def evaluate(
    eval_step: EvalFn | Mapping[str, EvalFn],
    state: TrainState,
    batches: Any,
    prefix: str = "",
    *,
    max_batches: int | None = None,
    progress: bool = False,
    rates: bool = False,
    divide: bool = True,
) -> dict[str, float]:
    """Evaluate: compute metrics over all batches, as floats.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1)
    >>> eval_step = ll.make_eval_step(model, lambda model, x: {"mean": ll.Mean(x.sum(), len(x))})
    >>> state = ll.init_state(model)
    >>> ll.evaluate(eval_step, state, torch.arange(7.0).split(3), prefix="eval/")
    {'eval/mean': 3.0}
    >>> sets = {"easy": torch.arange(7.0).split(3), "hard": [torch.ones(4)]}
    >>> ll.evaluate(eval_step, state, sets, prefix="eval/")
    {'eval/easy/mean': 3.0, 'eval/hard/mean': 1.0}

    Metrics that average over samples do not depend on the batch size, because totals and weights are added up and
    divided once at the end. On several ranks, all ranks call this, each sample counts once, and all get the same
    values. To get the records themselves, such as a confusion matrix to draw, use `evaluate_records`.

    Args:
        eval_step: from `make_eval_step`, or a dict of them, one for each of several sets by name. A function
            `(state, batch)` of your own runs as it is: choosing eval mode and `torch.no_grad()` is up to it.
        state: the state to evaluate. It is not changed. With `ll.ema` in the chain, give `ll.eval_state(optimizer, state)`,
            which has the averaged weights. For a module in a loop of your own, give `ll.init_state(model)`, made at each
            call, since it holds the module's tensors of that moment.
        batches: any iterable, such as a list, a DataLoader, or a looplib loader (read from the start of the epoch),
            with any batch size. Or a dict of them by name, whose metrics are put under `name/`. `loader(state)` is warned of if
            it is the rest of an epoch, but not within an iterator of your own or a progress bar. A DataLoader with workers gives
            each sample of a stream once for each worker, unless the stream divides itself; `ll.make_loader` refuses that.
        prefix: string put before each name, such as "eval/". A slash is added to one that ends with a letter or digit.
        max_batches: evaluate only the first `max_batches` batches, for example as a check before training.
        progress: if True, show a progress bar, removed when done.
        rates: if True, add `samples_per_second`, `steps_per_second` and `seconds`. They depend on the machine, so a
            log that contains them is not reproduced by a resumed run.
        divide: if True, several ranks divide the given batches, which must be the same on each. If False, this rank
            evaluates all batches it is given and waits for no other: the result is its own.

    Raises:
        ValueError: there are no batches; batches have different metric names; a set has no `eval_step`; or a single
            batch (a dict of tensors) is passed instead of batches.
        TypeError: a state is passed in place of the step.

    **Several processes.** A looplib loader divides each batch among the ranks; with any other iterable, the ranks
    take turns. A rank that runs out repeats a batch, which does not count, since a forward pass may need all ranks.
    To evaluate on the first rank alone:

        if ll.distributed.is_rank_zero():
            scores = ll.evaluate(eval_step, state, batches, divide=False)

    A model sharded by FSDP2 needs all ranks in each pass, so all of them must make this call; the result is still
    this rank's own. If each rank has batches of its own, merge their records:
    `ll.compute(ll.distributed.reduce(ll.evaluation.evaluate_records(eval_step, state, batches, divide=False)))`.

    **Memory and draws.** Memory is that of one batch and a few records per metric. torch's random streams are
    restored afterwards, whatever the iterable draws.
    """
    check_order("evaluate", eval_step, state)
    prefix = separated(prefix)
    if isinstance(batches, Mapping):
        _check_sets(batches)
        steps = eval_step if isinstance(eval_step, Mapping) else dict.fromkeys(batches, eval_step)
        missing = ", ".join(name for name in batches if name not in steps)
        check(not missing, f"no eval_step for the sets {missing}: there are those of {', '.join(steps)}")
        values: dict[str, float] = {}
        for name, of_set in batches.items():
            options: dict[str, Any] = {
                "max_batches": max_batches,
                "progress": progress,
                "rates": rates,
                "divide": divide,
            }
            values |= evaluate(steps[name], state, of_set, f"{prefix}{name}/", **options)
        return values
    if isinstance(eval_step, Mapping):
        raise ValueError(f"eval_step has {', '.join(eval_step)}, and the batches no names: give a dict of sets too")
    counts, counter = {"samples": 0, "steps": 0}, counter_of(eval_step)

    def count(batch: Any) -> None:
        counts["samples"] += counter(batch)
        counts["steps"] += 1

    title = f"{prefix.strip('/') or 'evaluation'}" if progress else None
    began = time.perf_counter()
    with restored(torch.default_generator):
        reading = Reading(batches, max_batches, title, divide)
        records = _records("evaluate", eval_step, state, reading, count if rates else None)
        _warn_of_tensors(records)
        metrics = compute(records, prefix)  # waits for the device
    note_scores(state, metrics)
    return metrics | _rates(counts, time.perf_counter() - began, prefix, divide) if rates else metrics


def _warn_of_tensors(records: Metrics) -> None:
    if left_out := [repr(name) for name, record in records.items() if isinstance(record, Cat)]:
        warn(
            f"evaluate returns numbers and leaves out {few(left_out)}, a Cat, whose tensors of all batches it has kept: "
            "ll.evaluation.evaluate_records(eval_step, state, batches) returns the records with it; if you need the numbers alone, "
            "leave it out of what the metric function returns"
        )


def _rates(counts: dict[str, int], seconds: float, prefix: str, divide: bool) -> dict[str, float]:
    """Rates of all ranks that divide the batches: their total counts over the longest time."""
    ranks = gather((counts, seconds)) if divide else [(counts, seconds)]
    longest = max(taken for _, taken in ranks)
    totals = {name: sum(of_rank[name] for of_rank, _ in ranks) for name in counts}
    values = {f"{prefix}{name}_per_second": total / longest for name, total in totals.items()}
    return values | {f"{prefix}seconds": longest}


def evaluate_records(
    eval_step: EvalFn,
    state: TrainState,
    batches: Any,
    *,
    max_batches: int | None = None,
    progress: bool = False,
    divide: bool = True,
) -> dict[str, Metric]:
    """Evaluate and return the metric records, for metrics that are more than a number.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1)
    >>> def metric_fn(model, batch):
    ...     x, y = batch
    ...     return {"confusion": ll.metrics.ConfusionMatrix.of(x > 0, y, classes=2)}
    >>> batches = [(torch.tensor([-1.0, 2.0]), torch.tensor([0, 1])), (torch.tensor([3.0]), torch.tensor([0]))]
    >>> records = ll.evaluation.evaluate_records(ll.make_eval_step(model, metric_fn), ll.init_state(model), batches)
    >>> records["confusion"].matrix
    tensor([[1, 1],
            [0, 1]])
    >>> ll.compute(records)
    {'confusion': 0.666...}

    An example is a confusion matrix to draw. `evaluate` returns `compute` of these records.

    Args:
        eval_step, state, batches: as for `evaluate`, for a single set.
        max_batches, progress, divide: as for `evaluate`.

    It behaves like `evaluate` on several ranks, and raises the same errors.
    """
    check_order("evaluate_records", eval_step, state)
    if isinstance(batches, Mapping):
        _check_sets(batches)
        raise ValueError(
            f"evaluate_records takes one set, and batches has {', '.join(batches)}: call it for each of them"
        )
    with restored(torch.default_generator):
        title = "evaluation" if progress else None
        return _records("evaluate_records", eval_step, state, Reading(batches, max_batches, title, divide))


def _records(
    function: str,
    eval_step: EvalFn,
    state: TrainState,
    reading: Reading,
    count: Callable[[Any], None] | None = None,
) -> dict[str, Metric]:
    """Metrics of all batches and ranks together. `count` is called with each batch that counts."""
    eval_step = check_kind(eval_step, function, "eval_step")
    held: list[Metrics] = []
    metrics: Metrics | None = None
    with ranks_of(reading, state, "evaluate")():
        for batch, counts in read(reading, state):
            metrics = eval_step(state, batch)
            if counts:
                held.append(metrics)
                if len(held) == 8:  # merging several costs little more than merging two
                    held = [merge(*held)]
                if count is not None:
                    count(batch)
    of_this_rank = merge(*held) if held else None
    records = merged(of_this_rank, metrics) if reading.divide else of_this_rank
    empty = "the iterable is empty, or a generator that was used up; give a list, a DataLoader or a loader"
    check(records is not None, f"{function} got no batches: {empty}")
    return dict(records or {})


def check_order(function: str, step: Any, state: Any, before: str = "") -> None:
    check(
        isinstance(state, TrainState) and (callable(step) or isinstance(step, Mapping)),
        f"{function} takes a step and then a state, and found a {type(step).__name__} and then a "
        f"{type(state).__name__}: write {function}({before}step, state, batches), with ll.init_state(model) for the weights that a "
        "module has",
        TypeError,
    )


def _check_sets(sets: Mapping[str, Any]) -> None:
    tensors = [name for name, value in sets.items() if isinstance(value, torch.Tensor)]
    check(
        not tensors,
        f"batches is a dict of tensors ({', '.join(map(str, tensors))}), as one batch is, and a dict here is of "
        "several sets by name: give a list of batches, such as [batch]",
    )
