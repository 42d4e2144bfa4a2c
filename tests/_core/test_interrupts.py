"""Interrupts at any moment: the user's variable holds a complete state, and the run continues bit for bit."""

import contextlib
import functools
import gc
import inspect
import itertools
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import looplib as ll
from looplib._core import interrupts as _interrupts

EPOCHS, BATCHES = 2, 6
ACTIONS = {}  # place in a step -> what happens there once

both = pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])


def act(place):
    if action := ACTIONS.pop(place, None):
        action()


class Trap(nn.Module):
    def forward(self, x):
        act("forward")
        if "backward" in ACTIONS:
            x.register_hook(lambda grad: act("backward"))
        return x


class Halfway(torch.optim.SGD):
    """Acts when the first parameter is written and the others are not. A rehearsal of one parameter is no update."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.add_(tensor.grad, alpha=-group["lr"])
                if len(group["params"]) > 1:
                    act("update")


class Parts:
    """A small run: batch norm, dropout, moments; the same bits whenever it is made."""

    def __init__(self, donate=True, cls=torch.optim.AdamW):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Trap(), nn.Dropout(0.2), nn.Linear(5, 3))
        self.optimizer = ll.optimizer(cls, lr=0.01)
        self.grad_fn = ll.make_grad_fn(self.model, lambda model, xy: nn.functional.cross_entropy(model(xy[0]), xy[1]))
        self.step = ll.make_train_step(self.grad_fn, self.optimizer, donate=donate)
        self.eval_step = ll.make_eval_step(self.model, lambda model, xy: {"mean": model(xy[0]).mean()})
        data = torch.utils.data.TensorDataset(torch.randn(4 * BATCHES, 4), torch.arange(4 * BATCHES) % 3)
        self.loader = ll.make_loader(data, batch_size=4, seed=1)
        self.state = ll.init_state(self.model, self.optimizer, seed=3, epoch_length=BATCHES)
        self.batches = list(self.loader(self.state))


def record(state):
    """All that a state is, to be compared with ==."""
    trees = [leaf.tolist() for leaf in tree_leaves((state.params, state.buffers, state.opt_state))]
    return state.step, state.epoch, state.batch, state.samples, state.batch_samples, state.skipped, state.seed, trees


def trajectory(parts, epochs=1, over="list"):
    """The records of an uninterrupted run, from step 0 on."""
    state = parts.state
    records = [record(state)]
    for _ in range(epochs):
        for batch in parts.batches if over == "list" else parts.loader(state):
            state, _ = parts.step(state, batch)
            records.append(record(state))
    return records


def train(state, step, batches, after=lambda state: False, ended_by=()):
    """A loop as a user writes it, left by a break where `after` says so; its variable, when an error ended it too."""
    try:
        for batch in batches:
            state, _ = step(state, batch)
            if after(state):
                break
    except ended_by:
        return state
    assert not ended_by, "nothing ended the loop"
    return state


def press():
    signal.raise_signal(signal.SIGINT)


def guarded():
    return isinstance(signal.getsignal(signal.SIGINT), _interrupts.Guard)


class Stop(BaseException):
    pass


class Later(threading.Timer):
    """A timer for `settle` to run: 10 ms are sometimes less than a step takes on a busy machine with a profiler."""

    waiting: list[threading.Timer] = []  # noqa: RUF012

    def start(self):
        self.waiting.append(self)


def settle():
    """Wait until signals that are sent again have arrived. True if one of them raised."""
    raised = False
    while True:
        try:
            while Later.waiting:
                timer = Later.waiting.pop()
                timer.function(*timer.args)
            timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
            for timer in timers:
                timer.join()
            time.sleep(0.001)
            if not timers:
                return raised
        except (KeyboardInterrupt, Stop):
            raised = True


def handler(error):
    """A handler that raises within a test: a signal that is sent again must not end pytest's report of a failure."""

    def handle(signum, frame):
        while frame is not None and frame.f_code.co_filename != __file__:
            frame = frame.f_back
        if frame is not None:
            raise error

    return handle


interrupt, stop = handler(KeyboardInterrupt), handler(Stop)


@pytest.fixture(autouse=True)
def ctrl_c():
    """Ctrl-C raises, also where the tests were started in the background; nothing is left of it afterwards."""
    before = {number: signal.getsignal(number) for number in _interrupts._HELD}
    signal.signal(signal.SIGINT, interrupt)
    yield
    settle()  # a signal that came later would end the process of the tests
    for number, previous in before.items():
        signal.signal(number, previous)
    assert not ACTIONS


# Every moment in turn: the interpreter looks for signals at a function's start and after a C function, and a profiler is
# called there too. A profiler is also called at each function's return, where the interpreter does not look.


def at_moment(moment, action, while_=lambda: True):
    """Profile function that acts at the n-th event and keeps counting in its attribute `seen`."""

    def profile(frame, event, arg):
        # Python ignores what a handler raises while a generator that is not exhausted is deleted.
        may_be_ignored = event != "c_return" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if event in ("call", "c_return") and not may_be_ignored and while_():
            profile.seen += 1
            if profile.seen == moment:
                action()

    profile.seen = 0
    return profile


@contextlib.contextmanager
def profiled(profile):
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def after_ctrl_c(moment, parts, step, start, wanted):
    """The variable's state after a step in which Ctrl-C comes at a moment, or None if the step has fewer moments.

    It is one of the two that are wanted: the state before the step, or its result if the signal was kept until then.
    """
    state, profile = ll.bind(parts.model, start), at_moment(moment, press)
    try:
        with profiled(profile):
            state, _ = step(state, parts.batches[1])
        if profile.seen < moment:
            return None
        assert settle()  # else the signal was lost
        assert record(state) == wanted[1]
    except KeyboardInterrupt:
        assert record(state) in wanted
    return state


@pytest.mark.parametrize("started", [False, True])
@both
def test_at_every_moment_of_a_step_the_variable_holds_the_state_before_or_the_result(donate, started, monkeypatch):
    monkeypatch.setattr(threading, "Timer", Later)
    parts = Parts(donate)
    start = parts.state if not started else parts.step(parts.state, parts.batches[0])[0]
    start = ll.copy_state(start)
    wanted = record(start), record(parts.step(ll.copy_state(start), parts.batches[1])[0])
    for moment in itertools.count(1, 1 if started else 25):
        if not started:
            parts = Parts(donate)
        if after_ctrl_c(moment, parts, parts.step, start, wanted) is None:
            break
        assert torch.is_grad_enabled()
    assert moment > 200


@pytest.mark.parametrize(
    "stride", [997, pytest.param(97, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.large)]
)
@both
def test_at_every_moment_of_a_step_that_runs_twice_the_state_is_complete_and_the_run_continues(
    donate, stride, monkeypatch
):
    monkeypatch.setattr(threading, "Timer", Later)
    parts = Parts(donate)
    step = ll.debug.run_twice(parts.step, every=1)
    start, _ = parts.step(parts.state, parts.batches[0])
    start = ll.copy_state(start)
    wanted = record(start), record(parts.step(ll.copy_state(start), parts.batches[1])[0])
    for moment in itertools.count(1, stride):
        state = after_ctrl_c(moment, parts, step, start, wanted)
        if state is None:
            break
        if record(state) == wanted[0]:
            assert record(step(state, parts.batches[1])[0]) == wanted[1]
    assert moment > 500


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.large)])
@both
def test_every_moment_of_a_loop_over_a_loader(donate, every, monkeypatch):
    monkeypatch.setattr(threading, "Timer", Later)
    parts = Parts(donate)
    start, expected = ll.copy_state(parts.state), trajectory(parts, over="loader")
    for moment in itertools.count(1, every):
        run = Run(parts, ll.copy_state(start))
        profile, raised = at_moment(moment, press), False
        try:
            with profiled(profile):
                run()
        except KeyboardInterrupt:
            raised = True
        assert raised or settle() or profile.seen < moment  # else the signal was lost
        assert record(run.state) == expected[run.state.step]
        if run.state.step < 2:
            run()
        assert record(run.state) == expected[2]
        if profile.seen < moment:
            break
    assert moment > 500


class Run:
    """A loop of two steps, with the state in an attribute."""

    def __init__(self, parts, state):
        self.parts, self.state = parts, state

    def __call__(self):
        for batch in self.parts.loader(self.state):
            self.state, _ = self.parts.step(self.state, batch)
            if self.state.step == 2:
                break


def surroundings(model):
    """Everything that a step must leave unchanged, although it changes some of it temporarily."""
    modules, parameters = list(model.modules()), list(model.parameters())
    slots = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
    return (
        [id(tensor) for tensor in slots],
        [(parameter.requires_grad, parameter.grad) for parameter in parameters],
        [module.training for module in modules],
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* went into eval mode")
@pytest.mark.parametrize(
    ("kind", "every"), [("donated", 41), ("donated", 2), ("pure", 3), ("evaluation", 3), ("failing", 3)]
)
def test_a_step_gives_back_what_it_borrows_at_whatever_moment_it_is_interrupted(kind, every, monkeypatch):
    monkeypatch.setattr(threading, "Timer", Later)  # one of 10 ms may send a signal after `settle` on a busy machine
    parts = Parts(kind == "donated")
    parts.model.eval()  # so that each kind of step sets modes
    parts.model[1].train()
    step = parts.eval_step if kind == "evaluation" else parts.step
    start, _ = parts.step(ll.copy_state(parts.state), parts.batches[0])  # on tensors that are not the module's own
    start = ll.copy_state(start)
    before, expected = surroundings(parts.model), record(start)

    def fail():
        raise ValueError

    for moment in itertools.count(1, every):
        state, profile = ll.copy_state(start), at_moment(moment, press)
        if kind == "failing":
            ACTIONS["forward"] = fail
        with contextlib.suppress(KeyboardInterrupt, ValueError):
            with profiled(profile):
                step(state, parts.batches[1])
            settle()
        settle()
        ACTIONS.clear()
        assert surroundings(parts.model) == before
        assert kind == "donated" or record(state) == expected
        if profile.seen < moment:
            break
    assert moment > 100


# Within the update, and in the passes before it


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1"])
@pytest.mark.parametrize("at", [3, 1])
def test_within_the_update_a_signal_waits_until_the_variable_holds_the_result(name, at):
    parts, expected = Parts(cls=Halfway), trajectory(Parts(cls=Halfway))
    signal.signal(getattr(signal, name), stop)
    state = train(parts.state, parts.step, parts.batches[: at - 1])
    ACTIONS["update"] = lambda: signal.raise_signal(getattr(signal, name))
    state = train(state, parts.step, parts.batches[at - 1 : at], lambda state: time.sleep(500), Stop)
    assert record(state) == expected[at]
    assert record(train(state, parts.step, parts.batches[at:])) == expected[BATCHES]


def test_gradients_are_freed_while_signals_wait():
    """Else freeing them would part a step's return from the assignment of its result."""
    parts, waited = Parts(), []

    def watched(state, batch, **request):
        out = parts.grad_fn(state, batch, **request)
        for grad in out.grads.values():
            weakref.finalize(grad, lambda: waited.append(_interrupts.waits.depth > 0))
        return out

    step = ll.make_train_step(watched, parts.optimizer, donate=True)
    state, _ = step(parts.state, parts.batches[0])
    assert waited == [True] * len(state.params)


def test_a_signal_that_comes_while_gradients_are_freed_waits_until_the_result_has_a_name():
    """Python looks for signals at the start of a function, and none begins between the freeing and the end of the wait."""
    model, optimizer = nn.Linear(1000, 20_000), ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn, watched = ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), []
    signal.signal(signal.SIGALRM, stop)

    def with_timer(state, batch, **request):
        out = grad_fn(state, batch, **request)
        # All in C: a timer of a microsecond is set when the first gradient is freed, before those of 80 MB are.
        set_timer = map(signal.setitimer, [signal.ITIMER_REAL], [1e-6])
        watched[:] = [weakref.ref(out.grads["bias"], functools.partial(dict.fromkeys, set_timer))]
        out = out._replace(grads={name: out.grads[name] for name in ("bias", "weight")})
        return out

    step = ll.make_train_step(with_timer, optimizer, donate=True)
    state, _ = ll.make_train_step(grad_fn, optimizer, donate=True)(
        ll.init_state(model, optimizer), torch.ones(1, 1000)
    )
    state = train(state, step, itertools.repeat(torch.ones(1, 1000)), lambda state: time.sleep(500), Stop)
    assert state.step == 2
    assert all(tensor.isfinite().all() for tensor in state.params.values())  # which can be read


@pytest.mark.parametrize(("name", "waits"), [("SIGINT", False), ("SIGTERM", True)])
def test_a_second_ctrl_c_does_not_wait_and_a_second_sigterm_does(name, waits):
    """During a long update, looplib sends the first signal again, which does not count as a second one."""
    parts, seen = Parts(cls=Halfway), []
    number = getattr(signal, name)
    signal.signal(number, stop)

    def action():
        signal.raise_signal(number)
        time.sleep(0.05)
        seen.append("waited")
        signal.raise_signal(number)
        seen.append("waited again")

    ACTIONS["update"] = action
    state = train(parts.state, parts.step, parts.batches[:1], lambda state: time.sleep(500), Stop)
    assert seen == ["waited", "waited again"][: 1 + waits]
    if waits:
        assert record(state) == trajectory(Parts(cls=Halfway))[1]
    else:
        with pytest.raises(ll.DonatedStateError, match="when it failed"):
            _ = parts.state.params


def test_signals_that_come_together_within_an_update_all_get_to_their_handlers():
    parts, calls, numbers = Parts(cls=Halfway), [], (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
    for number in numbers:
        signal.signal(number, lambda signum, frame: calls.append(signum))
    ACTIONS["update"] = lambda: [[signal.raise_signal(number) for number in numbers], calls.append("updated")]
    state, _ = parts.step(parts.state, parts.batches[0])
    settle()
    assert (calls[0], sorted(calls[1:])) == ("updated", sorted(numbers))
    assert record(state) == trajectory(Parts(cls=Halfway))[1]


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("cause", ["Ctrl-C", KeyboardInterrupt, ValueError])
@both
def test_in_the_passes_it_leaves_the_state_as_it_was(donate, place, cause):
    parts, expected = Parts(donate), trajectory(Parts(donate))
    error = KeyboardInterrupt if cause == "Ctrl-C" else cause

    def action():
        if cause == "Ctrl-C":
            press()
        raise error

    state = train(parts.state, parts.step, parts.batches[:2])
    ACTIONS[place] = action
    state = train(state, parts.step, parts.batches[2:], ended_by=error)
    assert record(state) == expected[2]
    assert record(train(state, parts.step, parts.batches[2:])) == expected[BATCHES]


# Handlers


def test_outside_of_an_update_a_signal_is_taken_at_once():
    parts, done = Parts(), []

    def after(state):
        press()
        done.append(state.step)

    assert train(parts.state, parts.step, parts.loader(parts.state), after, KeyboardInterrupt).step == 1
    assert not done
    assert guarded()


def test_a_handler_that_is_set_later_is_guarded_by_the_next_step():
    parts = Parts(cls=Halfway)
    state = train(parts.state, parts.step, parts.batches[:1])
    before = signal.signal(signal.SIGINT, stop)
    ACTIONS["update"] = press
    assert train(state, parts.step, parts.batches[1:], lambda state: time.sleep(500), Stop).step == 2
    signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_compiled_step_guards_a_handler_that_was_set_since():
    model, optimizer = nn.Linear(4, 3), ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    step = ll.compile_step(ll.make_train_step(grad_fn, optimizer, donate=True), backend="eager")
    state, _ = step(ll.init_state(model, optimizer), torch.ones(2, 4))
    signal.signal(signal.SIGINT, interrupt)
    assert not guarded()
    step(state, torch.ones(2, 4))
    assert guarded()


def test_an_evaluation_notices_a_handler_that_was_set_since():
    parts = Parts()
    parts.step(parts.state, parts.batches[0])
    signal.signal(signal.SIGINT, stop)
    assert not guarded()
    parts.eval_step(ll.init_state(parts.model), parts.batches[0])
    assert guarded()


def test_signals_that_are_ignored_or_deadly_stay_so():
    parts, seen = Parts(), []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def after(state):
        press()
        seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    train(parts.state, parts.step, parts.loader(parts.state), after)
    assert seen == [(signal.SIG_IGN, signal.SIG_DFL)] * BATCHES


def test_a_batch_lives_no_longer_than_the_loop_needs_it():
    parts, alive = Parts(), []
    gc.disable()
    try:
        for batch in parts.loader(parts.state):
            assert [seen() for seen in alive] == [None] * len(alive)
            alive.append(weakref.ref(batch[0]))
            del batch
            assert alive[-1]() is None
    finally:
        gc.enable()
    assert len(alive) == BATCHES


# Threads


def test_an_update_in_another_thread_holds_no_signal_up():
    parts, other = Parts(), Parts(cls=Halfway)
    entered, leave = threading.Event(), threading.Event()
    parts.step(parts.state, parts.batches[0])  # puts up the guards
    assert guarded()
    ACTIONS["update"] = lambda: [entered.set(), leave.wait(300)]
    thread = threading.Thread(target=train, args=(other.state, other.step, other.loader(other.state)))
    thread.start()
    assert entered.wait(300)
    with pytest.raises(KeyboardInterrupt):
        press()
    leave.set()
    thread.join()
