"""The first step at which two runs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from looplib.debug._differences import Fingerprint, LeafDifference, differences
from looplib.debug._keep import _Saved
from looplib.debug._replay import Batches, Replayed, States, _by_step, _indices, _walk
from looplib.state import copy_state
from looplib.types import GradFn, Metric, TrainState, TrainStep


@dataclass(frozen=True, eq=False)
class Run:
    """What a run is replayed from.

    >>> Run(lambda state, batch: (state, {}), TrainState(), lambda state: []).states
    TrainState(step=0, epoch=0, batch=0, samples=0, seed=0)

    Attributes:
        train_step: its step.
        states: one state of it, or a mapping from steps to such, as `keep` and `saved_states` give them.
        loader: its batches, as a function of the state.
        grad_fn: what the step was made of, to compare gradients.
    """

    train_step: TrainStep
    states: States
    loader: Batches
    grad_fn: GradFn | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Difference:
    """Where two runs part.

    Attributes:
        equal: the last step at which their states were the same; None where the first ones differ.
        different: the next one that was looked at, where they are not.
        leaves: what differs there, in the order in which it came to differ.
        replayed: the step between, of either run, where they were replayed.
    """

    equal: int | None
    different: int
    leaves: list[LeafDifference]
    replayed: tuple[Replayed, Replayed] | None = None

    def __repr__(self) -> str:
        since = "from the first on" if self.equal is None else f"and were the same at step {self.equal}"
        shown = [f"  {leaf}" for leaf in self.leaves[:10]]
        more = [f"  and {len(self.leaves) - 10} more"] if len(self.leaves) > 10 else []
        return "\n".join([f"the runs differ at step {self.different}, {since}:", *shown, *more])


def first_difference(
    one: Run | Mapping[int, TrainState | Fingerprint],
    other: Run | Mapping[int, TrainState | Fingerprint],
    *,
    stop: int | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Difference | None:
    """The first step at which two runs part, and what parts there; None where they do not.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> loader = ll.make_loader(torch.arange(12.0).reshape(12, 1), batch_size=4)
    >>> state = ll.init_state(model, optimizer, epoch_length=len(loader))
    >>> train_step = ll.make_train_step(grad_fn, optimizer)
    >>> def other_step(state, batch):
    ...     return train_step(state, batch * 2 if state.step == 7 else batch)
    >>> one, other = Run(train_step, state, loader, grad_fn), Run(other_step, state, loader, grad_fn)
    >>> found = first_difference(one, other, stop=20)
    >>> found.equal, found.different, found.leaves[0].place
    (7, 8, '/metrics/loss')
    >>> print(first_difference(one, one, stop=20))
    None

    Of two mappings from steps to states or fingerprints (`keep`, `saved_states`, `read_fingerprints`) the steps in
    common are compared. Checkpoints are found by bisection: of a thousand pairs ten are read, since runs that have
    parted are taken to stay so.

    Of two `Run`s, their kept states are compared so, and from the last that are the same both run on, side by side,
    until they part: to the first that differ, or to `stop`. What parts in that step is named in the order in which it
    came about, so that it shows where it begins: with the batch, the loss, a gradient, or only the update. Steps may
    donate; the states given stay good.

    Two machines or two versions: a log of `fingerprint(state)` on each tells between which steps to look. From the
    last checkpoint before, log each step, the batch and the gradients too:
    `prints(found.state, ll.debug.fingerprint({"batch": found.batch, "grads": found.grads}))` of a `replay`. Eager
    against compiled: two `Run`s from one state, with a tolerance.

    Args:
        one, other: two `Run`s, or two mappings.
        stop: where to end if the runs have not parted; without it, at the last kept states in common.
        rtol, atol: see `differences`; both 0 compares bits.

    Where kept states differ, and the same steps replayed do not, what parted the runs is in neither's functions: they
    ran on another machine, or by another version. `replayed` is None then, and the steps are those of kept states.

    Raises:
        ValueError: no step in common, or nothing to run on to.
        TypeError: a run and a mapping: log the run, or give both with their steps.
    """
    if isinstance(one, Run) != isinstance(other, Run):
        raise TypeError(
            "one of these is a Run and the other is not; give two Runs, or two mappings from steps to states or "
            "fingerprints, such as the states that the Run has kept"
        )
    first: Mapping[int, Any] = _by_step(one.states) if isinstance(one, Run) else one
    second: Mapping[int, Any] = _by_step(other.states) if isinstance(other, Run) else other
    steps = sorted(set(first) & set(second))
    if not steps:
        raise ValueError(
            f"the runs have no step in common: one has {_listed(first)}, the other {_listed(second)}; keep or log "
            "both at the same steps, such as ll.every_n_steps(100), or give them one state to begin with"
        )

    def leaves_at(step: int) -> list[LeafDifference]:
        return differences(first[step], second[step], rtol=rtol, atol=atol)

    lazy = isinstance(first, _Saved) or isinstance(second, _Saved)
    index = (_bisect if lazy else _scan)(steps, lambda step: bool(leaves_at(step)))
    equal = steps[index - 1] if index else None
    kept = Difference(equal, steps[index], leaves_at(steps[index])) if index < len(steps) else None
    if equal is None or not (isinstance(one, Run) and isinstance(other, Run)):
        return kept
    if kept is None and len(steps) == 1 and stop is None:
        raise ValueError(f"the runs have one state in common, at step {equal}; give stop=, a step to run on to")
    ends = [end for end in (stop, None if kept is None else kept.different) if end is not None]
    return _side_by_side(one, other, first[equal], second[equal], min(ends, default=equal), rtol, atol) or kept


def _listed(steps: Iterable[int]) -> str:
    found = sorted(steps)
    return f"steps {found[0]} to {found[-1]}" if found else "none"


def _scan(steps: Sequence[int], differ: Callable[[int], bool]) -> int:
    """Where the first of the steps is that differs, or how many there are."""
    return next((index for index, step in enumerate(steps) if differ(step)), len(steps))


def _bisect(steps: Sequence[int], differ: Callable[[int], bool]) -> int:
    """The same, where all that come after one that differs do."""
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if differ(steps[middle]) else (middle + 1, high)
    return low


class _Place(NamedTuple):
    state: TrainState
    batch: Any
    metrics: dict[str, Metric] | None


def _side_by_side(
    one: Run, other: Run, first: TrainState, second: TrainState, stop: int, rtol: float, atol: float
) -> Difference | None:
    """Both runs on from states that are the same, to the first that are not or to a step."""
    runs = one, other
    walks = [
        _walk(run.train_step, copy_state(start), run.loader) for run, start in zip(runs, (first, second), strict=True)
    ]
    before: list[_Place] | None = None
    for pair in zip(*walks, strict=True):
        now = [_Place(*place) for place in pair]
        leaves = differences(now[0].state, now[1].state, rtol=rtol, atol=atol)
        if leaves and before is not None:
            rows = [_indices(run.loader, was.state) for run, was in zip(runs, before, strict=True)]
            known = all(indices is not None for indices in rows)
            replayed = [
                Replayed(
                    state=was.state,
                    indices=indices if known else None,
                    batch=was.batch,
                    metrics=place.metrics or {},
                    grads=None if run.grad_fn is None else run.grad_fn(was.state, was.batch).grads,
                    after=place.state,
                )
                for run, was, place, indices in zip(runs, before, now, rows, strict=True)
            ]
            leaves = differences(*replayed, rtol=rtol, atol=atol)
            different = max(place.state.step for place in now)
            return Difference(before[0].state.step, different, leaves, (replayed[0], replayed[1]))
        if max(place.state.step for place in now) >= stop:
            return None
        before = [place._replace(state=copy_state(place.state)) for place in now]  # which the step may spend
    return None
