"""Donation check of a gradient function and an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from looplib.metrics._mean import compute
from looplib.state import copy_state
from looplib.steps import make_train_step
from looplib.testing._compare import copied, differing, result_of
from looplib.testing._report import about_kernels, fail
from looplib.testing._surroundings import streams_kept
from looplib.types import GradFn, Optimizer, TrainState


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
            found = differing(expected[number], result_of((now, metrics)))
            fail(
                f"after step {number + 1}, a donated step differs from a pure one", found, why + about_kernels(state)
            )
        for number, metrics in enumerate(kept):
            found = differing(expected[number]["metrics"], compute(metrics))
            fail(f"metrics of step {number + 1} have changed since", found, why)
