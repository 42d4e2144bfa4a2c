"""Steps in several threads: what one thread traces, no other takes part in."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from shared import SGD, both_steps, mean_square, trained
from torch import nn

import looplib as ll


def made(loss_fn=None, compiled=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    # A schedule, since a trace asks the host for its value, and a plain step does not.
    optimizer = ll.chain(
        ll.optimizer(torch.optim.SGD, lr=ll.schedules.cosine(0.1, total=10), momentum=0.9), ll.ema(0.9)
    )
    grad_fn = ll.make_grad_fn(model, loss_fn or mean_square)
    step = ll.make_train_step(grad_fn, optimizer, **options)
    return ll.compile_step(step, backend="eager") if compiled else step, ll.init_state(model, optimizer)


class Waiting:
    """A loss function that waits, at its first call, until it is told to continue."""

    def __init__(self):
        self.entered, self.proceed = threading.Event(), threading.Event()

    def __call__(self, model, x):
        if not self.entered.is_set():
            self.entered.set()
            assert self.proceed.wait(120)
        return mean_square(model, x)


@pytest.fixture
def batches():
    return [torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


@pytest.fixture
def expected(batches):
    step, state = made()
    return trained(step, state, batches)


def assert_same(one, other):
    for tree in ("params", "opt_state"):
        torch.testing.assert_close(getattr(one, tree), getattr(other, tree))
    assert one.step == other.step


@pytest.fixture
def pool():
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.mark.slow
@both_steps
def test_plain_steps_and_another_trace_while_a_thread_traces(batches, expected, donate, pool):
    waiting = Waiting()
    running = pool.submit(trained, *made(waiting, compiled=True), batches)
    assert waiting.entered.wait(120)
    others = [
        pool.submit(trained, *made(compiled=True), batches),
        pool.submit(trained, *made(donate=donate), batches),
    ]
    time.sleep(0.5)  # in which they come as far as they can; the results are to be the same
    waiting.proceed.set()
    for found in (running.result(120), *(other.result(120) for other in others)):
        assert_same(found, expected)


@pytest.mark.slow
def test_a_trace_does_not_move_the_stream_that_another_threads_step_draws_from(pool, batches):
    model, other = (nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)) for _ in range(2))
    waiting = Waiting()

    def drawing(model, x):
        first = torch.rand(8)
        waiting(model, x)
        return model(x).square().mean(), {"drawn": torch.cat([first, torch.rand(8)]).mean()}

    step, state = ll.make_train_step(ll.make_grad_fn(model, drawing), SGD), ll.init_state(model, SGD)
    stream = torch.get_rng_state()
    running = pool.submit(step, state, batches[0])
    assert waiting.entered.wait(120)
    traced = ll.compile_step(ll.make_train_step(ll.make_grad_fn(other, drawing), SGD), backend="eager")
    meanwhile = pool.submit(traced, ll.init_state(other, SGD), batches[0])
    time.sleep(0.5)
    waiting.proceed.set()
    _, metrics = running.result(120)
    meanwhile.result(120)
    assert torch.equal(torch.get_rng_state(), stream)
    assert ll.compute(metrics) == ll.compute(step(state, batches[0])[1])
