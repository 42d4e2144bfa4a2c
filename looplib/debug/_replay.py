"""Replay: take any step of a run again.

A step is a function of a state and a batch, and the batch one of the state. So a kept state holds all of the run that
came after it: any step is had again, to the bit, by going there, and two runs that should be one are compared by
going on with both from where they still were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from looplib._core.ranks import is_first
from looplib.log._progress import progress
from looplib.metrics._mean import compute
from looplib.state import copy_state, end_epoch
from looplib.types import GradFn, Metric, TrainState, TrainStep

Batches = Callable[[TrainState], Iterable[Any]]


States = TrainState | Mapping[int, TrainState]


@dataclass(frozen=True, eq=False, repr=False)
class Replayed:
    """One step of a run, as it was.

    Attributes:
        state: the one before the step.
        indices: of the batch's rows in the dataset, where the loader can tell.
        batch: what the step was given.
        metrics: those of the step.
        grads: name -> gradient, where a `grad_fn` was given.
        after: the state that it returned.
    """

    state: TrainState
    indices: Any
    batch: Any
    metrics: dict[str, Metric]
    grads: dict[str, Tensor] | None
    after: TrainState

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.6g}" for name, value in compute(self.metrics).items())
        return f"Replayed(step={self.state.step}, epoch={self.state.epoch}, batch={self.state.batch}, {values})"


def replay(
    train_step: TrainStep,
    state: States,
    loader: Batches,
    step: int,
    *,
    grad_fn: GradFn | None = None,
    donate: bool = False,
) -> Replayed:
    """The batch, the loss and the gradients of any step again, from a state kept at or before it.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    >>> loader = ll.make_loader(torch.arange(12.0).reshape(12, 1) / 12, batch_size=4)
    >>> kept = ll.copy_state(ll.init_state(model, optimizer, epoch_length=len(loader)))
    >>> found = replay(train_step, kept, loader, 7, grad_fn=grad_fn)
    >>> found
    Replayed(step=7, epoch=2, batch=1, loss=...)
    >>> found.batch.shape, sorted(found.grads), found.after.step, kept.step
    (torch.Size([4, 1]), ['bias', 'weight'], 8, 0)

    The run goes on from the state that is nearest before, with the loader, up to that step and through it: the update
    from a state at step 7 to one at step 8 is step 7. Where its batch was skipped (`found.after.skipped`), the next
    one tried at the same step is `replay(train_step, found.after, loader, 7)`.

    The bits are those of the run, if what it did between its steps is in `train_step` too: a loop that changes
    `state.extra` for the step to read, or makes two updates on a batch, is given as a function
    `(state, batch) -> (state, metrics)` of all that. The states given stay good, whether the step donates or not, and
    those returned share no tensor with them. A replay of more than a second shows a bar in a terminal or notebook.

    Args:
        train_step: the run's own.
        state: one of the run, or a mapping from steps to such, as `keep` and `saved_states` give them.
        loader: the run's own: a function from a state to what is left of its epoch.
        step: which one, as `state.step` counts them.
        grad_fn: for the gradients too: the one that the step was made of.
        donate: a step that donates may spend the state given. For a module wrapped in DDP or FSDP2, which works on
            its own tensors alone: the state is then one bound to it, and the grad_fn left out.

    Raises:
        ValueError: no state at or before the step, a step that no batch begins with, a loader that gives no batch.
        TypeError: a step that is no whole number, a state that is none.
    """
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step is {step!r}; give a whole number, as state.step counts them")
    start = _nearest(_by_step(state), step)
    start = start if donate else copy_state(start)
    whole = TrainState(epoch_length=max(step - start.step, 1))
    walk = _walk(train_step, start, loader)
    disable = None if is_first() else True  # None: unless in a terminal or a notebook
    with closing(progress(walk, whole, desc=f"to step {step}", leave=False, delay=1.0, disable=disable)) as places:
        now, batch, _ = next(place for place in places if place[0].step >= step)
    if now.step > step:
        raise ValueError(
            f"no batch begins at step {step}: one begins before it and ends at step {now.step}, as several updates "
            "are made on each; give the step at which that batch begins"
        )
    before = copy_state(now)
    grads = None if grad_fn is None else grad_fn(before, batch).grads
    after, metrics = train_step(now, batch)
    return Replayed(before, _indices(loader, before), batch, metrics, grads, after)


def _by_step(states: States) -> Mapping[int, TrainState]:
    if isinstance(states, TrainState):
        return {states.step: states}
    if not isinstance(states, Mapping):
        raise TypeError(f"state is a {type(states).__name__}; give a TrainState, or a mapping from steps to these")
    return states


def _nearest(states: Mapping[int, TrainState], step: int) -> TrainState:
    before = [at for at in states if at <= step]
    if not before:
        raise ValueError(
            f"there is no state at or before step {step}, and a run cannot be run back: those given are at "
            f"{', '.join(map(str, sorted(states))) or 'no step at all'}; give one that was kept earlier, such as the "
            "first of the run"
        )
    return states[max(before)]


def _walk(
    train_step: TrainStep, state: TrainState, loader: Batches
) -> Iterator[tuple[TrainState, Any, dict[str, Metric] | None]]:
    """A run without end: each state, its batch, and the metrics of the step that led there."""
    metrics: dict[str, Metric] | None = None
    while True:
        empty = True
        for batch in loader(state):
            empty = False
            yield state, batch, metrics
            state, metrics = train_step(state, batch)
        if empty:
            raise ValueError(f"the loader gave no batch for {state}; is it the run's own?")
        if state.epoch_length is None:
            state = end_epoch(state)


def _indices(loader: Any, state: TrainState) -> Any:
    return loader.indices(state) if hasattr(loader, "indices") else None
