"""Evaluation: metrics over whole datasets.

Batches are processed one by one, and only one record per metric is kept, so memory does not grow with the dataset.
State, module and torch's random streams are left unchanged, so training continues as if there had been no evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from looplib._core.checks import check
from looplib._core.kinds import check_kind, checked
from looplib._core.random import restored
from looplib._core.ranks import gather
from looplib._core.torch_private import pytree
from looplib._core.trees import batch_size
from looplib.distributed._reduce import merged
from looplib.evaluation._batches import Reading, ranks_of, read
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
    divided once at the end. Memory is that of one batch and a few records per metric. torch's random streams are
    restored afterwards, whatever the iterable draws.

    On several ranks, all ranks call this, each sample counts once, and all get the same values. A looplib loader
    divides each batch among the ranks; with any other iterable, the ranks take turns. A rank that runs out repeats a
    batch, which does not count, since a forward pass may need all ranks. Records are merged as by
    `ll.distributed.reduce`. With `divide=False`, a rank evaluates all batches by itself, so a validation on the first
    rank alone is

        if ll.distributed.is_rank_zero():
            scores = ll.evaluate(eval_step, state, batches, divide=False)

    To get the records themselves, such as a confusion matrix to draw, use `measure`.

    Args:
        eval_step: from `make_eval_step`, or a dict of them, one for each of several sets by name.
        state: the state to evaluate. It is not changed. For averaged weights, pass `ll.eval_state(optimizer, state)`.
        batches: any iterable, such as a list, a DataLoader, or a looplib loader (read from the start of the epoch),
            with any batch size. Or a dict of them by name, whose metrics are put under `name/`.
        prefix: string put before each name.
        limit: evaluate only the first `limit` batches, for example as a check before training.
        progress: if True, show a progress bar, removed when done.
        rates: if True, add `samples_per_second`, `steps_per_second` and `seconds`. They depend on the machine, so a
            log that contains them is not reproduced by a resumed run.
        tokens: function that counts the tokens in a batch, to add `tokens_per_second` as well.
        divide: if True, several ranks divide the given batches, which must be the same on each. If False, this rank
            evaluates all batches it is given and waits for no other: the result is its own. For ranks that have
            different batches, merge their records:
            `ll.compute(ll.distributed.reduce(ll.evaluation.measure(eval_step, state, batches, divide=False)))`. Only a
            model sharded by FSDP2 needs all ranks in each pass, so all of them must then make the call; the result is
            still this rank's own.

    Raises:
        ValueError: there are no batches; batches have different metric names; a set has no `eval_step`; or a single
            batch (a dict of tensors) is passed instead of batches.
        TypeError: a state is passed in place of the step.
    """
    check_order("evaluate", eval_step, state)
    _check_steps(eval_step)
    if isinstance(batches, Mapping):
        options = {"limit": limit, "progress": progress, "rates": rates, "tokens": tokens, "divide": divide}
        return _evaluate_sets(eval_step, state, batches, prefix, options)
    if isinstance(eval_step, Mapping):
        raise ValueError(f"eval_step has {', '.join(eval_step)}, and the batches no names: give a dict of sets too")

    counter = _Counter(tokens, divide) if rates or tokens else None
    title = f"{prefix.strip('/') or 'evaluation'}" if progress else None
    with restored(torch.default_generator):
        records = _measured("evaluate", eval_step, state, Reading(batches, limit, title, divide), counter)
        values = compute(records, prefix)  # waits for the device
    return values | counter.rates(prefix) if counter else values


def _evaluate_sets(
    eval_step: EvalFn | Mapping[str, EvalFn],
    state: TrainState,
    sets: Mapping[str, Any],
    prefix: str,
    options: dict[str, Any],
) -> dict[str, float]:
    """The metrics of several sets, each under its name."""
    _check_sets(sets)
    values: dict[str, float] = {}
    steps = eval_step if isinstance(eval_step, Mapping) else dict.fromkeys(sets, eval_step)
    for name, batches in sets.items():
        check(name in steps, f"no eval_step for the set {name!r}: there are those of {', '.join(steps)}")
        values |= evaluate(steps[name], state, batches, f"{prefix}{name}/", **options)
    return values


class _Counter:
    """Counter of batches, samples, tokens, and seconds since its creation."""

    def __init__(self, tokens: Callable[[Any], int] | None, divide: bool) -> None:
        self._divide = divide
        self._began = time.perf_counter()
        self._tokens = tokens
        self._counts = {"samples": 0, "steps": 0} | ({"tokens": 0} if tokens else {})

    def add(self, batch: Any) -> None:
        self._counts["steps"] += 1
        self._counts["samples"] += batch_size(batch)
        if self._tokens is not None:
            self._counts["tokens"] += self._tokens(batch)

    def rates(self, prefix: str) -> dict[str, float]:
        """Rates of all ranks that divide the batches: their total counts over the longest time."""
        own = time.perf_counter() - self._began, self._counts
        ranks = gather(own) if self._divide else [own]
        seconds = max(taken for taken, _ in ranks)
        totals = {name: sum(counts[name] for _, counts in ranks) for name in self._counts}
        values = {f"{prefix}{name}_per_second": total / seconds for name, total in totals.items()}
        return values | {f"{prefix}seconds": seconds}


def measure(
    eval_step: EvalFn,
    state: TrainState,
    batches: Any,
    *,
    limit: int | None = None,
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
    >>> records = ll.evaluation.measure(ll.make_eval_step(model, metric_fn), ll.init_state(model), batches)
    >>> records["confusion"].matrix
    tensor([[1, 1],
            [0, 1]])
    >>> ll.compute(records)
    {'confusion': 0.666...}

    An example is a confusion matrix to draw. `evaluate` returns `compute` of these records.

    Args:
        eval_step, state, batches: as for `evaluate`, for a single set.
        limit, progress, divide: as for `evaluate`.

    It behaves like `evaluate` on several ranks, and raises the same errors.
    """
    check_order("measure", eval_step, state)
    for name, value in {"batches": batches, "eval_step": eval_step}.items():
        if isinstance(value, Mapping):
            _check_sets(value)
            raise ValueError(f"measure takes one set, and {name} has {', '.join(value)}: call it for each of them")
    with restored(torch.default_generator):
        title = "evaluation" if progress else None
        return _measured("measure", eval_step, state, Reading(batches, limit, title, divide))


def _measured(
    function: str,
    eval_step: EvalFn,
    state: TrainState,
    reading: Reading,
    counter: _Counter | None = None,
) -> dict[str, Metric]:
    """Metrics of all batches and ranks together. Each batch that counts is passed to the counter."""
    eval_step = checked(eval_step, function, "eval_step")
    metrics: Metrics | None = None
    held: list[tuple[int, Metrics]] = []
    with ranks_of(reading, state)():
        for batch, counts in read(reading, state):
            metrics = eval_step(state, batch)
            if counts:
                _hold(held, metrics)
                if counter is not None:
                    counter.add(batch)
    own = merge(*[part for _, part in held]) if held else None
    records = merged(own, metrics) if reading.divide else own
    empty = "the iterable is empty, or a generator that was used up; give a list, a DataLoader or a loader"
    check(records is not None, f"{function} got no batches: {empty}")
    return cast(dict[str, Metric], records)


def check_order(function: str, step: Any, state: Any, before: str = "") -> None:
    check(
        isinstance(state, TrainState) and (callable(step) or isinstance(step, Mapping)),
        f"{function} takes a step and then a state, and found a {type(step).__name__} and then a "
        f"{type(state).__name__}: write {function}({before}step, state, batches)",
        TypeError,
    )


def _check_steps(eval_step: EvalFn | Mapping[str, EvalFn]) -> None:
    for one in eval_step.values() if isinstance(eval_step, Mapping) else (eval_step,):
        check_kind(one, "evaluate", "eval_step")


def _check_sets(sets: Mapping[str, Any]) -> None:
    tensors = [name for name, value in sets.items() if isinstance(value, torch.Tensor)]
    check(
        not tensors,
        f"batches is a dict of tensors ({', '.join(map(str, tensors))}), as one batch is, and a dict here is of "
        "several sets by name: give a list of batches, such as [batch]",
    )


def _hold(held: list[tuple[int, Metrics]], metrics: Metrics) -> None:
    """Add the metrics of a batch to those held, each with the number of its tensors."""
    if all(isinstance(metric, Mean) for metric in metrics.values()):
        held.append((1, metrics))
        if len(held) == 5:  # merge a few at a time, at the cost of merging two
            held[:] = [(1, merge(*[metrics for _, metrics in held]))]
        return
    held.append((_tensors(metrics), metrics))
    _carry(held)


def _carry(held: list[tuple[int, Metrics]]) -> None:
    """Merge the last records with those before them that are no larger.

    Records of fixed size, which may be large, are merged at once, so one is held. Records that grow are merged with
    those of the same size, like carries in a binary counter: log n are held, and each is copied log n times.
    """
    while len(held) > 1 and held[-2][0] <= held[-1][0]:
        both = merge(held[-2][1], held[-1][1])
        held[-2:] = [(_tensors(both), both)]


def _tensors(metrics: Metrics) -> int:
    return len(pytree.tree_leaves(dict(metrics)))
