"""From a state to numbers over whole sets.

Batches pass one by one, and what is kept of them is a record of each metric, or nothing: memory does not grow with
the set. Nothing here changes the state, the module or torch's random stream: training goes on as if it had not been.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from looplib.metrics import Mean, Metrics, batch_size, compute, merge
from looplib.state import TrainState

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

    Memory is that of one batch and some records of each metric. torch's random stream stands afterwards where it
    stood, whatever the iterable draws.

    Raises:
        ValueError: there is no batch; batches differ in their names; a set without an `eval_step`.
    """
    if isinstance(batches, Mapping):
        found: dict[str, float] = {}
        for name, members in batches.items():
            step = eval_step.get(name) if isinstance(eval_step, Mapping) else eval_step
            if step is None:
                raise ValueError(f"no eval_step for the set {name!r}: there are those of {', '.join(eval_step)}")  # type: ignore[arg-type]
            place = f"{prefix}{name}/"
            found |= evaluate(step, state, members, place, limit=limit, progress=progress, rates=rates, tokens=tokens)
        return found
    if isinstance(eval_step, Mapping):
        raise ValueError(f"eval_step has {', '.join(eval_step)}, and the batches no names: give a dict of sets too")

    began, counts = time.perf_counter(), {"steps": 0, "samples": 0, "tokens": 0}
    total: Metrics | None = None
    waiting: list[Metrics] = []
    stream = torch.default_generator.get_state()
    try:
        for batch in read(batches, state, 0, limit, f"{prefix.strip('/') or 'evaluation'}" if progress else None):
            waiting.append(eval_step(state, batch))
            # A few Means are added up at a time, for the cost of two; of others, which may be large, one is held.
            if len(waiting) == 4 or not all(isinstance(metric, Mean) for metric in waiting[-1].values()):
                total, waiting = merge(*([] if total is None else [total]), *waiting), []
            if rates or tokens:
                counts["steps"] += 1
                counts["samples"] += batch_size(batch)
                counts["tokens"] += tokens(batch) if tokens else 0
    finally:
        torch.default_generator.set_state(stream)
    if total is not None:
        waiting = [total, *waiting]
    if not waiting:
        raise ValueError(
            "evaluate got no batches: the iterable is empty, or a generator that was used up; give a list, a "
            "DataLoader or a loader"
        )
    values = compute(merge(*waiting), prefix)  # which waits for the device
    if rates or tokens:
        seconds = time.perf_counter() - began
        names = ["samples", "steps"] + (["tokens"] if tokens else [])
        values |= {f"{prefix}{name}_per_second": counts[name] / seconds for name in names}
        values[f"{prefix}seconds"] = seconds
    return values


def read(batches: Any, state: TrainState, start: int, limit: int | None, title: str | None) -> Iterator[Any]:
    """The batches from a place on, read from there where they can be."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; give how many batches, at least 1, or None for all")
    length = len(batches) if hasattr(batches, "__len__") and getattr(batches, "_length", 0) is not None else None
    found: Iterator[Any]
    if callable(batches):
        found = iter(batches(state.replace(epoch=0, batch=start, epoch_length=None)))
    else:
        found = islice(batches, start, None)
    if limit is not None:
        found = islice(found, limit)
        length = limit if length is None else min(limit, length - start)
    if title is None:
        return found
    from tqdm.auto import tqdm

    bar: Iterator[Any] = iter(tqdm(found, desc=title, total=length, leave=False))
    return bar
