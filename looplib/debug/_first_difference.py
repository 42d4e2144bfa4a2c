"""First difference: the first kept step at which two runs differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from looplib._core.checks import check, few
from looplib.debug._differences import LeafDifference, differences
from looplib.debug._fingerprint import Fingerprint
from looplib.types import TrainState


@dataclass(frozen=True, eq=False, repr=False)
class Difference:
    """The first kept step at which two runs differ.

    Attributes:
        equal: last step at which their states were the same; None if the first ones differ.
        different: next step that was compared, at which the states differ.
        leaves: leaves that differ there.
    """

    equal: int | None
    different: int
    leaves: list[LeafDifference]

    def __repr__(self) -> str:
        since = "from the first on" if self.equal is None else f"and were the same at step {self.equal}"
        return f"the runs differ at step {self.different}, {since}:\n  " + few(self.leaves, 10, "\n  ")


def first_difference(
    one: Mapping[int, TrainState | Fingerprint],
    other: Mapping[int, TrainState | Fingerprint],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Difference | None:
    """Find the first step at which two runs differ, and what differs there. Returns None if they do not.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> def run(step_fn, state, kept):
    ...     for x in torch.ones(10, 4, 1):
    ...         kept = ll.debug.keep(kept, state)
    ...         state, metrics = step_fn(state, x)
    ...     return kept
    >>> def other_step(state, batch):
    ...     return train_step(state, batch * 2 if state.step == 7 else batch)
    >>> start = ll.init_state(model, optimizer)
    >>> found = first_difference(run(train_step, start, {}), run(other_step, start, {}))
    >>> found.equal, found.different, found.leaves[0].path
    (7, 8, '/params/weight')

    The steps that both mappings have are compared one after another. If only every hundredth state was kept, replay the
    steps between the last equal states and the first different ones, and compare each: the differences of two
    `Replayed` steps come in the order in which they arise (batch, loss, gradients, update), so the first one shows the
    cause.

        for step in range(found.equal, found.different):
            replayed = [ll.debug.replay(run.train_step, run.kept, run.loader, step, grad_fn=run.grad_fn) for run in runs]
            if leaves := ll.debug.differences(*replayed):
                break

    If kept states differ but no replayed step does, the cause is outside the functions of either run: they ran on
    different machines or versions. For such runs, log `fingerprint(state)` on each to find the steps between which they
    start to differ. Then, from the last checkpoint before, log each step with its batch and gradients: `prints(found.state,
    ll.debug.fingerprint({"batch": found.batch, "grads": found.grads}))` of a `replay`.

    Args:
        one, other: mappings from steps to states or fingerprints, from `keep` or `read_fingerprints`.
        rtol, atol: see `differences`. If both are 0, bits are compared.

    Raises:
        ValueError: the runs have no step in common.
    """
    steps = sorted(set(one) & set(other))
    check(
        steps,
        f"the runs have no step in common: one has {_listed(one)}, the other {_listed(other)}; keep or log both at the "
        "same steps, such as ll.every_n_steps(100), or give them one state to begin with",
    )
    equal = None
    for step in steps:
        if leaves := differences(one[step], other[step], rtol=rtol, atol=atol):
            return Difference(equal, step, leaves)
        equal = step
    return None


def _listed(steps: Iterable[int]) -> str:
    ordered = sorted(steps)
    return f"steps {ordered[0]} to {ordered[-1]}" if ordered else "none"
