"""First difference: the first step at which two runs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from looplib._core.checks import check, few
from looplib.debug._differences import LeafDifference, differences
from looplib.debug._fingerprint import Fingerprint
from looplib.debug._replay import Batches, Replayed, States, _by_step, _walk
from looplib.state import copy_state
from looplib.types import GradFn, TrainState, TrainStep


@dataclass(frozen=True, eq=False)
class Run:
    """A run to replay: its step, states and loader.

    >>> Run(lambda state, batch: (state, {}), TrainState(), lambda state: []).states
    TrainState(step=0, epoch=0, batch=0, samples=0, seed=0)

    Attributes:
        train_step: train step of the run.
        states: one of its states, or a mapping from steps to states, as returned by `keep` and `saved_states`.
        loader: its batches, as a function of the state.
        grad_fn: the gradient function of the step, to compare gradients.
    """

    train_step: TrainStep
    states: States
    loader: Batches
    grad_fn: GradFn | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Difference:
    """The first step at which two runs differ.

    Attributes:
        equal: last step at which their states were the same; None if the first ones differ.
        different: next step that was compared, at which the states differ.
        leaves: leaves that differ there, in the order in which the differences arose.
        replayed: the step in between, of each run, if it was replayed. Its `indices` are None;
            `loader.indices(replayed.state)` gives them.
    """

    equal: int | None
    different: int
    leaves: list[LeafDifference]
    replayed: tuple[Replayed, Replayed] | None = None

    def __repr__(self) -> str:
        since = "from the first on" if self.equal is None else f"and were the same at step {self.equal}"
        return f"the runs differ at step {self.different}, {since}:\n  " + few(self.leaves, 10, "\n  ")


def first_difference(
    one: Run | Mapping[int, TrainState | Fingerprint],
    other: Run | Mapping[int, TrainState | Fingerprint],
    *,
    stop: int | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Difference | None:
    """Find the first step at which two runs differ, and what differs there. Returns None if they do not.

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
    >>> found.equal, found.different, found.leaves[0].path
    (7, 8, '/metrics/loss')
    >>> print(first_difference(one, one, stop=20))
    None

    For two mappings from steps to states or fingerprints (`keep`, `saved_states`, `read_fingerprints`), the steps
    that both have are compared one after another. Checkpoints are read up to the first that differ.

    For two `Run`s, their kept states are compared first. From the last equal ones, both runs are replayed side by
    side until they differ, up to the first kept states that differ or to `stop`. The differences in that step are
    listed in the order in which they arise (batch, loss, gradients, update), so the first one shows the cause. Steps
    may donate; the given states can still be used.

    For runs on two machines or versions, log `fingerprint(state)` on each to find the steps between which they start
    to differ. Then, from the last checkpoint before, log each step with its batch and gradients: `prints(found.state,
    ll.debug.fingerprint({"batch": found.batch, "grads":
    found.grads}))` of a `replay`. To compare eager with compiled, use two `Run`s from one state, with a tolerance.

    If kept states differ but the replayed steps do not, the cause is outside the functions of either run: they ran on
    different machines or versions. In this case `replayed` is None, and the steps are those of kept states.

    Args:
        one, other: two `Run`s, or two mappings.
        stop: step at which to end if the runs do not differ before. Defaults to the last kept states that both have.
        rtol, atol: see `differences`. If both are 0, bits are compared.

    Raises:
        ValueError: the runs have no step in common, or there is no step to run to.
        TypeError: one is a run and the other a mapping. Log the run, or pass both as mappings.
    """
    check(
        isinstance(one, Run) == isinstance(other, Run),
        "one of these is a Run and the other is not; give two Runs, or two mappings from steps to states or "
        "fingerprints, such as the states that the Run has kept",
        TypeError,
    )
    first, second = (_by_step(getattr(run, "states", run)) for run in (one, other))
    steps = sorted(set(first) & set(second))
    check(
        steps,
        f"the runs have no step in common: one has {_listed(first)}, the other {_listed(second)}; keep or log both at "
        "the same steps, such as ll.every_n_steps(100), or give them one state to begin with",
    )

    compare = partial(differences, rtol=rtol, atol=atol)

    equal, kept = None, None
    for step in steps:
        if leaves := compare(first[step], second[step]):
            kept = Difference(equal, step, leaves)
            break
        equal = step
    if equal is None or not (isinstance(one, Run) and isinstance(other, Run)):
        return kept
    check(
        len(steps) > 1 or stop is not None,
        f"the runs have one state in common, at step {equal}; give stop=, a step to run on to",
    )
    ends = [end for end in (stop, kept.different if kept else None) if end is not None]
    return _side_by_side((one, other), (first[equal], second[equal]), min(ends, default=equal), compare) or kept


Compare = Callable[[Any, Any], list[LeafDifference]]


def _listed(steps: Iterable[int]) -> str:
    ordered = sorted(steps)
    return f"steps {ordered[0]} to {ordered[-1]}" if ordered else "none"


def _side_by_side(
    runs: tuple[Run, Run], starts: tuple[TrainState, TrainState], stop: int, compare: Compare
) -> Difference | None:
    """Continue both runs from equal states until they differ or reach a step."""
    walks = [_walk(run.train_step, copy_state(start), run.loader) for run, start in zip(runs, starts, strict=True)]
    before: list[tuple[TrainState, Any]] = []
    for one, other in zip(*walks, strict=True):
        step = max(one[0].step, other[0].step)
        if before and compare(one[0], other[0]):
            first, second = map(_replayed, runs, before, (one, other))
            return Difference(before[0][0].step, step, compare(first, second), (first, second))
        if step >= stop:
            return None
        before = [(copy_state(state), batch) for state, batch, _ in (one, other)]  # since a step may donate them
    return None


def _replayed(run: Run, before: tuple[TrainState, Any], after: tuple[TrainState, Any, Any]) -> Replayed:
    """The step of a run between two positions."""
    (state, batch), (end, _, metrics) = before, after
    grads = run.grad_fn(state, batch).grads if run.grad_fn else None
    return Replayed(state, None, batch, metrics or {}, grads, end)
