"""Replay: repeat any step of a run.

A step is a function of a state and a batch, and the batch is a function of the state. A kept state therefore
determines the rest of the run: training from it repeats every later step bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from looplib._core.checks import check, check_count, check_type, few, is_count
from looplib._core.random import mix
from looplib._core.records import check_kind
from looplib.metrics import compute
from looplib.state import copy_state, end_epoch
from looplib.types import GradFn, Metric, TrainState, TrainStep, check_state


def step_seed(state: TrainState, *, rank: int = 0, microbatch: int = 0) -> int:
    """Seed of a step's random numbers, with which your own loop draws the same ones.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5))
    >>> def loss_fn(model, x):
    ...     return model(x).square().mean()
    >>> state, x = ll.init_state(model, seed=3), torch.ones(4, 2)
    >>> metrics = ll.make_grad_fn(model, loss_fn)(state, x).metrics
    >>> _ = torch.manual_seed(ll.debug.step_seed(state))
    >>> loss_fn(model, x).item() == metrics["loss"].item()
    True

    Before the forward pass of each microbatch, a step seeds torch's random streams with a hash of the state's seed, its
    step, the rank and the index of the microbatch, and puts them back afterwards. Eval and predict steps do so too, with
    microbatch 0. Steps that are compiled by Inductor draw other numbers from the same seed. For draws of your own that
    follow from the state, `torch.Generator().manual_seed(ll.debug.step_seed(ll.state.fold_in(state, 1)))`.

    Args:
        state: the state that the step is given.
        rank: rank of the process among those that divide the data.
        microbatch: index of the microbatch within `accumulate`.

    Returns:
        A non-negative int of 63 bits.
    """
    check_state(state, "ll.debug.step_seed(state)")
    check_count("rank", rank, 0)
    check_count("microbatch", microbatch, 0)
    return mix(state.seed, state.step, rank, microbatch)


Batches = Callable[[TrainState], Iterable[Any]]


@dataclass(frozen=True, eq=False, repr=False)
class Replayed:
    """A replayed step of a run.

    Attributes:
        state: state before the step.
        indices: dataset indices of the batch's samples, if the loader provides them.
        batch: batch of the step.
        metrics: metrics of the step.
        grads: name -> gradient, if a `grad_fn` was given.
        after: state returned by the step.
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
    state: TrainState | Mapping[int, TrainState],
    loader: Batches,
    step: int,
    *,
    grad_fn: GradFn | None = None,
    donate: bool = False,
) -> Replayed:
    """Replay a step of a run from an earlier state, to get its batch, loss and gradients.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    >>> loader = ll.make_loader(torch.arange(12.0).reshape(12, 1) / 12, batch_size=4)
    >>> kept = ll.copy_state(ll.init_state(model, optimizer, loader=loader))
    >>> found = replay(train_step, kept, loader, 7, grad_fn=grad_fn)
    >>> found
    Replayed(step=7, epoch=2, batch=1, loss=...)
    >>> found.batch.shape, sorted(found.grads), found.after.step, kept.step
    (torch.Size([4, 1]), ['bias', 'weight'], 8, 0)

    Training is repeated from the nearest given state before the step, through the step; from a checkpoint, give
    `ckpt.restore(ll.copy_state(state), which=500)`. Step 7 is the update from a
    state at step 7 to one at step 8. If its batch was skipped (`found.after.skipped`),
    `replay(train_step, found.after, loader, 7)` gives the next batch that was tried at the same step.

    The result is bitwise that of the run if everything that the run does between its steps is in `train_step`. If
    your loop changes `state.extra` for the step to read, or makes two updates per batch, pass a function
    `(state, batch) -> (state, metrics)` that does all of it. The given states can still be used, even if the step
    donates, and the returned ones share no tensor with them.

    Args:
        train_step: train step of the run.
        state: a state of the run, such as one of a checkpoint, or a mapping from steps to states, as returned by
            `record_steps`.
        loader: loader of the run: a function from a state to the rest of its epoch.
        step: the step to replay, as counted by `state.step` before it. A logger gets the state after the step, so a row
            with step 6 is that of step 5. A loss that jumps was often spoiled by the update before: replay that step too.
        grad_fn: gradient function of the step, to get the gradients too.
        donate: if True, a donated step may overwrite the given state. This is needed for a module wrapped in DDP or
            FSDP2, which works only on its own tensors: pass a state that is bound to it, and no `grad_fn`.

    Raises:
        ValueError: there is no state at or before the step, no batch starts at the step, or the loader has no
            batches.
        TypeError: `step` is not an int, or `state` is not a state.
    """
    if grad_fn is not None:
        grad_fn = check_kind(grad_fn, "replay", "grad_fn")
    train_step = check_kind(train_step, "replay", "train_step")
    check_kind(loader, "replay", "loader", advice=", also of a DataLoader: ll.make_loader(dataloader)")
    check(is_count(step, -math.inf), f"step is {step!r}; give a whole number, as state.step counts them", TypeError)
    states = {state.step: state} if isinstance(state, TrainState) else state
    check_type("state is", states, Mapping, "give a TrainState, or a mapping from steps to these")
    start = _nearest(states, step)
    positions = _walk(train_step, start if donate else copy_state(start), loader)
    now, batch = next(position for position in positions if position[0].step >= step)
    check(
        now.step <= step,
        f"no batch begins at step {step}: one begins before it and ends at step {now.step}, as several updates are made "
        "on each; give the step at which that batch begins",
    )
    before = copy_state(now)
    indices = loader.indices(before) if hasattr(loader, "indices") else None
    grads = None if grad_fn is None else grad_fn(before, batch).grads
    after, metrics = train_step(now, batch)
    return Replayed(before, indices, batch, metrics, grads, after)


def _nearest(states: Mapping[int, TrainState], step: int) -> TrainState:
    before = [at for at in states if at <= step]
    check(
        before,
        f"no state at or before step {step} was given (steps given: {few(sorted(states))}), and a run cannot be run back: "
        "give one that was kept earlier, such as the first of the run",
    )
    return states[max(before)]


def _walk(train_step: TrainStep, state: TrainState, loader: Batches) -> Iterator[tuple[TrainState, Any]]:
    """An endless run: each state with its batch."""
    while True:
        empty = True
        for batch in loader(state):
            empty = False
            yield state, batch
            state, _ = train_step(state, batch)
        check(not empty, f"the loader gave no batch for {state}; is it the run's own?")
        if state.epoch_length is None:
            state = end_epoch(state)
