"""Purity and donation checks of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from looplib._core.ranks import is_sharded
from looplib._core.records import check_no_module
from looplib._core.torch_private import wraps_tensors
from looplib.metrics import compute
from looplib.state import copy_state
from looplib.steps import make_train_step
from looplib.testing._compare import about_kernels, copied, differing, fail, is_spent, result_of
from looplib.testing._surroundings import module_values, seed_streams, stream_positions, streams_kept
from looplib.types import GradFn, Optimizer, TrainState


def assert_pure(step: Callable[[TrainState, Any], Any], state: TrainState, batch: Any) -> None:
    """Check that a step is pure: the same inputs always give the same bits, and nothing else changes.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> testing.assert_pure(step, ll.init_state(model, optimizer), torch.ones(4, 2))

    The step is called three times: on copies of the state and the batch; on different weights with a different seed,
    after reseeding torch's, NumPy's and Python's streams; and on copies of the state and the batch again. The first
    and the third result must be bitwise equal. The random streams, the batch, the given state (unless the step
    donates) and the modules that the step uses must be unchanged.

    A step that remembers something from its very first call passes, because no call comes before it.

    Args:
        step: a train, eval or predict step.
        state: initial state.
        batch: batch for all three calls.

    Raises:
        AssertionError: something differs. The message has the names and the differences.
    """
    __tracebackhide__ = True
    check_no_module(
        "assert_pure", step, "a step of it, as ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer) returns"
    )
    with streams_kept(state):
        before, inputs = copied(state), copied(batch)
        modules, positions = module_values(step), stream_positions(state)
        mine, rows = copy_state(state), copied(batch)
        first = result_of(step(mine, rows))
        fail(
            "the step drew from a global random stream, and moved it on",
            differing(positions, stream_positions(state)),
            "So its result depends on what ran before it, and it changes what runs after. Draw from torch within the "
            "loss function, where looplib seeds the stream by the state's seed and step and puts it back, and make "
            "what NumPy or Python draw in the dataset, where the loader seeds them.",
        )
        fail(
            "the step wrote to its batch",
            differing(inputs, rows),
            "Code that reads the batch afterwards (a second step, a metric, the next epoch of a dataset in memory) gets "
            "different values. Usually an operation in place on an input (x += ..., x.clamp_(...), labels[mask] = -100, "
            "batch.pop(...)): make a new tensor, such as x = x + ...",
        )
        fail(
            "the step wrote to the state that it was given",
            [] if is_spent(mine) else differing(before, mine),
            "A state that was kept is no longer what it was. Usually an operation in place on model.weight.data, on a "
            "tensor of state.extra, or on one of opt_state in an optimizer of one's own: make a new tensor, or make "
            "the step with donate=True, which tells everyone that the old state is spent.",
        )
        fail(
            "the step changed tensors or modes that belong to neither its state nor its result",
            differing(modules, module_values(step)) or differing(before, state),
            "Usually a loss function that calls model.eval(), model.train() or requires_grad_(...) and does not put it "
            "back, a torch optimizer that steps on the module itself, or a gradient left in .grad. Let the step return "
            "what it changes, as a part of the state.",
        )
        seed_streams(0)
        step(_perturbed(state), copied(batch))
        second = result_of(step(copy_state(state), copied(batch)))
        fail(
            "the step is not a function of its state and its batch: two calls on equal ones differ",
            differing(first, second),
            "Between them torch's, NumPy's and Python's random streams were seeded otherwise, and the step ran "
            "on other weights. Usually something that remembers between calls (a counter "
            "or a cached tensor in a module, a closure or an optimizer, a torch.Generator of one's own), or "
            "the time: put what must be remembered into a buffer or state.extra, and draw from torch's own "
            "stream." + about_kernels(state),
        )


def _perturbed(state: TrainState) -> TrainState:
    """A state of the same run with different weights and a different seed."""
    # Frozen tensors that consist of others, such as quantized ones, cannot be multiplied.
    params = {
        name: (tensor.detach() * 1.125).to(tensor.dtype).requires_grad_(tensor.requires_grad)
        for name, tensor in state.params.items()
        if tensor.requires_grad or is_sharded(tensor) or not wraps_tensors(tensor)
    }
    copy = copy_state(state)
    return copy.replace(params={**copy.params, **params}, seed=state.seed + 1)


def assert_donated_equals_pure(
    grad_fn: GradFn, optimizer: Optimizer, state: TrainState, batches: Iterable[Any]
) -> None:
    """Check that donated steps give the bits of pure ones, in states and in metrics.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> testing.assert_donated_equals_pure(grad_fn, optimizer, ll.init_state(model, optimizer), torch.randn(3, 4, 2))

    A donated step writes over the old state's memory, so a tensor of yours that shares memory with it changes as well: in
    a wrapper of the gradients, in an optimizer of your own, or in a metric that you keep. Use this check for wrappers that
    you write.

    Args:
        grad_fn, optimizer: as for `make_train_step`, which makes both steps.
        state: initial state.
        batches: two batches or more.

    Raises:
        AssertionError: a state or a metric differs. The message has the names and the differences.
    """
    __tracebackhide__ = True
    why = (
        "Usually a tensor that shares memory with the state's: a parameter, a buffer or a view of one (detach() is a view "
        "too), kept in opt_state, in a metric or in a closure. Keep a copy of it, tensor.clone()."
    )
    batches = [*batches]
    pure, donated = (make_train_step(grad_fn, optimizer, donate=donate) for donate in (False, True))
    with streams_kept(state):
        expected, now = [], copy_state(state)
        for batch in batches:
            now, metrics = pure(now, copied(batch))
            expected.append(result_of((now, metrics)))
        kept, now = [], copy_state(state)
        for number, batch in enumerate(batches):
            now, metrics = donated(now, copied(batch))
            kept.append(metrics)
            changed = differing(expected[number], result_of((now, metrics)))
            fail(
                f"after step {number + 1}, a donated step differs from a pure one",
                changed,
                why + about_kernels(state),
            )
        for number, metrics in enumerate(kept):
            changed = differing(expected[number]["metrics"], compute(metrics))
            fail(f"metrics of step {number + 1} have changed since", changed, why)
