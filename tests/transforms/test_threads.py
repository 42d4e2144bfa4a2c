"""Steps in several threads: what one thread traces, no other takes part in."""

import threading
import time

import pytest
import torch
from torch import nn

import looplib as ll


def made(loss_fn=None, averaged=True, compiled=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    # A schedule, since a trace asks the host for its value, and a plain step does not.
    optimizer = ll.optimizer(torch.optim.SGD, lr=ll.schedules.cosine(0.1, total=10), momentum=0.9)
    optimizer = ll.optim.ema(optimizer, decay=0.9) if averaged else optimizer
    grad_fn = ll.make_grad_fn(model, loss_fn or (lambda model, x: model(x).square().mean()))
    step = ll.make_train_step(grad_fn, optimizer, **options)
    return ll.compile_step(step, backend="eager") if compiled else step, ll.init_state(model, optimizer)


def steps_of(step, state, batches):
    for batch in batches:
        state, _ = step(state, batch)
    return state


class Waiting:
    """A loss function that waits, at its first call, until it is told to continue."""

    def __init__(self):
        self.entered, self.proceed = threading.Event(), threading.Event()

    def __call__(self, model, x):
        if not self.entered.is_set():
            self.entered.set()
            assert self.proceed.wait(120)
        return model(x).square().mean()


def in_thread(function):
    results = []

    def run():
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def result_of(thread, results):
    thread.join(120)
    assert not thread.is_alive()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@pytest.fixture
def batches():
    return [torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


@pytest.fixture
def expected(batches):
    step, state = made()
    return steps_of(step, state, batches)


def assert_same(one, other):
    for tree in ("params", "opt_state"):
        torch.testing.assert_close(getattr(one, tree), getattr(other, tree))
    assert one.step == other.step


@pytest.mark.parametrize("donate", [False, True])
def test_a_plain_step_while_another_thread_traces(batches, expected, donate):
    waiting = Waiting()
    compiled, state = made(waiting, compiled=True)
    running = in_thread(lambda: steps_of(compiled, state, batches))
    assert waiting.entered.wait(120)
    try:
        plain, start = made(donate=donate)
        taken = steps_of(plain, start, batches)
    finally:
        waiting.proceed.set()
    assert_same(taken, expected)
    assert_same(result_of(*running), expected)


def test_two_traces_at_once(batches, expected):
    waiting = Waiting()
    (one, state), (other, start) = made(waiting, compiled=True), made(compiled=True)
    running = in_thread(lambda: steps_of(one, state, batches))
    assert waiting.entered.wait(120)
    meanwhile = in_thread(lambda: steps_of(other, start, batches))
    time.sleep(0.5)  # in which it comes as far as it can; the result is to be the same however far that is
    waiting.proceed.set()
    assert_same(result_of(*running), expected)
    assert_same(result_of(*meanwhile), expected)


def test_a_trace_within_a_trace_waits_for_nothing(batches):
    inner_step, start = made(averaged=False)
    inner_step, start = ll.transforms.differentiable(inner_step), ll.copy_state(start)
    model = nn.Linear(3, 1, bias=False)

    def meta_loss(model, x):
        state, _ = inner_step(start, x * model.weight)
        return sum(tensor.square().sum() for tensor in state.params.values())

    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn = ll.make_grad_fn(model, meta_loss)
    state = ll.init_state(model, optimizer)
    plain = steps_of(ll.make_train_step(grad_fn, optimizer), state, batches)
    compiled = steps_of(ll.compile_step(ll.make_train_step(grad_fn, optimizer), backend="eager"), state, batches)
    torch.testing.assert_close(compiled.params, plain.params)
