"""Interrupts at any moment: the user's variable holds a complete state, and the run continues bit for bit."""

import contextlib
import gc
import inspect
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import looplib as ll
from looplib._core import interrupts as _interrupts

EPOCHS, BATCHES = 2, 6
NOTICE = "\nlooplib: stopping at the next batch; press Ctrl-C again to stop at once\n"

both = pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])


class Trap(nn.Module):
    """The identity, which does something once when it is run, and something once in the backward pass."""

    forward_action = backward_action = None

    def forward(self, x):
        self.act("forward_action")
        if self.backward_action:
            x.register_hook(lambda grad: self.act("backward_action"))
        return x

    def act(self, name):
        action, self.__dict__[name] = getattr(self, name), None
        if action:
            action()


class Visits(nn.Module):
    """A buffer that is not written in place, but replaced."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return x * (1 + self.count / 100)


class Halfway(torch.optim.SGD):
    """Does something once when the first parameter is written and the others are not.

    A rehearsal, of one parameter alone, is no update.
    """

    action = None
    finished = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.add_(tensor.grad, alpha=-group["lr"])
                if len(group["params"]) > 1 and (action := Halfway.action):
                    Halfway.action = None
                    action()
        Halfway.finished += any(len(group["params"]) > 1 for group in self.param_groups)


class Parts:
    """A small run: batch norm, dropout, moments; the same bits whenever it is made."""

    def __init__(self, donate, cls=torch.optim.AdamW):
        torch.manual_seed(0)
        self.trap = Trap()
        self.model = nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), Visits(), self.trap, nn.Dropout(0.2), nn.Linear(5, 3)
        )
        self.optimizer = ll.optimizer(cls, lr=0.01)
        self.grad_fn = ll.make_grad_fn(self.model, lambda model, xy: nn.functional.cross_entropy(model(xy[0]), xy[1]))
        self.step = ll.make_train_step(self.grad_fn, self.optimizer, donate=donate)
        data = torch.utils.data.TensorDataset(torch.randn(4 * BATCHES, 4), torch.arange(4 * BATCHES) % 3)
        self.loader = ll.make_loader(data, batch_size=4, seed=1)
        self.state = ll.init_state(self.model, self.optimizer, seed=3, epoch_length=BATCHES)
        self.batches = list(self.loader(self.state))


def record(state):
    """All that a state is, to be compared with ==."""
    trees = [leaf.tolist() for leaf in tree_leaves((state.params, state.buffers, state.opt_state))]
    return state.step, state.epoch, state.batch, state.samples, state.batch_samples, state.skipped, state.seed, trees


def trajectory(parts, epochs=1, over="loader"):
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


def press(times=1):
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def guarded():
    return isinstance(signal.getsignal(signal.SIGINT), _interrupts.Guard)


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


class Stop(BaseException):
    pass


def within_a_test(frame):
    """False while pytest reports a test that has failed, which a signal that is sent again must not end."""
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return frame is not None


def interrupt(signum, frame):
    if within_a_test(frame):
        raise KeyboardInterrupt


def stop(signum, frame):
    if within_a_test(frame):
        raise Stop(signal.Signals(signum).name)


@pytest.fixture(autouse=True)
def ctrl_c():
    """Ctrl-C raises, also where the tests were started in the background; nothing is left of it afterwards."""
    before = {number: signal.getsignal(number) for number in _interrupts._HELD}
    signal.signal(signal.SIGINT, interrupt)
    yield
    settle()  # a signal that came later would end the process of the tests
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not _interrupts._stopping
    assert not _interrupts._bodies
    assert Halfway.action is None


# Real signals at random moments, in a process of their own


SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    for delay in map(float, line.split()):
        time.sleep(delay)
        os.kill(os.getppid(), signal.SIGINT)
        os.read(int(sys.argv[1]), 1)  # it has arrived
    print(flush=True)
"""


def bombarded(donate, over, count):
    """Runs that are hit by SIGINTs of another process until `count` of them were interrupted; how many lost their state."""
    armed = []

    def strike(signum, frame):
        if armed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, strike)
    arrivals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    command = [sys.executable, "-S", "-c", SENDER, str(arrivals)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    sender = subprocess.Popen(command, **pipes, pass_fds=[arrivals], start_new_session=True)
    parts, draw = Parts(donate), random.Random(0)
    start, expected = ll.copy_state(parts.state), trajectory(parts, EPOCHS, over)
    duration, interrupted, lost = 0.01, 0, 0
    while interrupted < count:
        state = ll.bind(parts.model, ll.copy_state(start))
        while state.epoch < EPOCHS:
            begin, hit = time.perf_counter(), False
            print(draw.uniform(0, duration), file=sender.stdin, flush=True)
            try:
                armed.append(True)
                while state.epoch < EPOCHS:
                    for batch in parts.loader(state) if over == "loader" else parts.batches[state.batch :]:
                        state, _ = parts.step(state, batch)
                duration = time.perf_counter() - begin
            except KeyboardInterrupt:
                hit = True
            armed.clear()
            sender.stdout.readline()
            settle()
            while select.select([arrivals], [], [], 0)[0]:  # of a signal that was sent again
                os.read(arrivals, 1)
            interrupted += hit
            if "donated" in repr(state):
                lost += 1
                break
            assert record(state) == expected[state.step]
    sender.communicate("")
    return lost


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.large)])
@pytest.mark.parametrize("over", ["loader", "list"])
@both
def test_interrupted_at_random_moments_and_run_again_it_ends_in_the_same_bits(donate, over, count):
    command = [sys.executable, __file__, json.dumps([donate, over, count])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    # Between the return of a donated step and the assignment, a signal loses the state, unless a loader holds it back.
    assert int(done.stdout.split()[-1]) <= (0 if over == "loader" or not donate else max(2, count / 100))


# Every moment in turn: where the interpreter looks for signals, at a function's start and after a C function, the
# profiler looks in too; and at each function's return, such as that of a step whose result has no name yet.


def at_moment(moment, action, while_=lambda: True):
    """Profile function that acts at the n-th event and keeps counting in its attribute `seen`."""

    def profile(frame, event, arg):
        # Python ignores what a handler raises while a generator that is not exhausted is deleted.
        may_be_ignored = event != "c_return" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if event != "c_call" and not may_be_ignored and while_():
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


@pytest.mark.parametrize("started", [False, True])
@both
def test_every_moment_of_a_step(donate, started, monkeypatch):
    """Afterwards the variable holds the state before or the result, but for the moments after the last hold."""
    monkeypatch.setattr(threading, "Timer", Later)
    parts, lost = Parts(donate), []
    start = parts.state if not started else parts.step(parts.state, parts.batches[0])[0]
    start = ll.copy_state(start)
    wanted = record(start), record(parts.step(ll.copy_state(start), parts.batches[1])[0])
    for moment in itertools.count(1, 1 if started else 25):
        if not started:
            parts = Parts(donate)
        state, profile = ll.bind(parts.model, start), at_moment(moment, press)
        try:
            with profiled(profile):
                state, _ = parts.step(state, parts.batches[1])
            if profile.seen < moment:
                break
            assert settle()  # else the signal was lost
            assert record(state) == wanted[1]
        except KeyboardInterrupt:
            if "donated" in repr(state):
                lost.append(moment)
            else:
                assert record(state) in wanted
    assert moment > 200
    assert not lost


@both
def test_every_moment_of_an_error_in_the_forward_pass(donate):
    parts, reference = Parts(donate), Parts(donate)
    state, wanted = parts.state, reference.state
    for moment in itertools.count(1):
        batch, before, failed = parts.batches[moment % BATCHES], record(state), []

        def fail(failed=failed):
            failed.append(True)
            raise ValueError("in the forward pass")

        parts.trap.forward_action = fail
        profile = at_moment(moment, press, while_=lambda failed=failed: failed)
        try:
            interrupted = False
            with pytest.raises(ValueError, match="in the forward pass"), profiled(profile):
                parts.step(state, batch)
            interrupted = settle()
        except KeyboardInterrupt:
            interrupted = True
        assert record(state) == before
        if profile.seen < moment:
            break
        assert interrupted
        state, _ = parts.step(state, batch)
        wanted, _ = reference.step(wanted, batch)
        assert record(state) == record(wanted)
    assert moment > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.large)])
@both
def test_every_moment_of_a_loop_over_a_loader(donate, every, capfd, monkeypatch):
    monkeypatch.setattr(threading, "Timer", Later)
    parts = Parts(donate)
    start, expected, lost = ll.copy_state(parts.state), trajectory(parts), []
    for moment in itertools.count(1, every):
        run = Run(parts, ll.copy_state(start))
        profile = at_moment(moment, press, while_=guarded)
        try:
            with profiled(profile):
                run()
            if profile.seen < moment:
                break
            if not settle():
                lost.append(moment)
        except KeyboardInterrupt:
            settle()
            assert record(run.state) == expected[run.state.step]
        assert run.log == list(range(1, run.state.step + 1))
        if run.state.step < 2:
            run()
        assert run.log == [1, 2]
        assert record(run.state) == expected[2]
    assert moment > 1000
    # Python ignores what a handler raises while it closes the generator of a loop that is left.
    assert len(lost) <= 100 / every + 2
    assert all(each > moment * 0.9 for each in lost), (lost, moment)


@pytest.mark.parametrize("handler", ["raises", "notes"])
@pytest.mark.parametrize("over", ["loader", "list"])
def test_every_moment_of_the_handling_of_a_ctrl_c_for_a_second_one(over, handler, capfd):
    expected, noted = trajectory(Parts(donate=True), over=over), []
    if handler == "notes":
        signal.signal(signal.SIGINT, lambda *_: noted.append(True))
    for moment in itertools.count(1):
        parts, handling = Parts(donate=True), []
        noted.clear()

        def after(state, handling=handling):
            if state.step == 1:
                handling.append(True)
                try:
                    press()
                finally:
                    handling.clear()

        batches = parts.loader(parts.state) if over == "loader" else parts.batches
        profile = at_moment(moment, press, while_=lambda handling=handling: handling)
        with profiled(profile):
            ended_by = KeyboardInterrupt if handler == "raises" else ()
            state = train(parts.state, parts.step, batches, after, ended_by)
        assert record(state) == expected[1 if handler == "raises" else BATCHES]
        assert bool(noted) is (handler == "notes")
        if profile.seen < moment:
            break
    assert moment > 10


class Run:
    """A loop of two steps, with the state in an attribute."""

    def __init__(self, parts, state):
        self.parts, self.state, self.log = parts, state, []

    def __call__(self):
        for batch in self.parts.loader(self.state):
            self.state, _ = self.parts.step(self.state, batch)
            self.log.append(self.state.step)
            if self.state.step == 2:
                break


# Within the update, and in the passes before it


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1"])
@pytest.mark.parametrize("at", [3, 1])
def test_within_the_update_a_signal_waits_until_the_variable_holds_the_result(name, at):
    parts = Parts(donate=True, cls=Halfway)
    expected = trajectory(Parts(donate=True, cls=Halfway), over="list")
    signal.signal(getattr(signal, name), stop)
    state = train(parts.state, parts.step, parts.batches[: at - 1])
    Halfway.action = lambda: signal.raise_signal(getattr(signal, name))
    finished = Halfway.finished
    state = train(state, parts.step, parts.batches[at - 1 : at], lambda state: time.sleep(500), Stop)
    assert Halfway.finished == finished + 1
    assert record(state) == expected[at]
    assert record(train(state, parts.step, parts.batches[at:])) == expected[BATCHES]


def test_signals_that_come_together_within_an_update_all_get_to_their_handlers():
    parts, calls = Parts(donate=True, cls=Halfway), []
    for name in ("SIGUSR1", "SIGTERM", "SIGUSR2", "SIGINT"):
        signal.signal(getattr(signal, name), lambda signum, frame: calls.append(signal.Signals(signum).name))

    def action():
        for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.raise_signal(signum)
        assert not calls

    Halfway.action = action
    state, _ = parts.step(parts.state, parts.batches[0])
    settle()
    assert sorted(calls) == ["SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"]
    assert record(state) == trajectory(Parts(donate=True, cls=Halfway))[1]


def test_a_second_signal_may_come_at_every_moment_while_the_first_one_is_put_off():
    for moment in itertools.count(1):
        parts, calls = Parts(donate=True, cls=Halfway), []
        signal.signal(signal.SIGTERM, lambda *_, calls=calls: calls.append(True))
        profile = at_moment(moment, lambda: signal.raise_signal(signal.SIGTERM))

        def action(profile=profile):
            with profiled(profile):
                signal.raise_signal(signal.SIGTERM)

        Halfway.action = action
        state, _ = parts.step(parts.state, parts.batches[0])
        settle()
        assert state.step == 1
        assert calls
        if profile.seen < moment:
            break
    assert moment > 10


def test_a_handler_set_in_the_body_is_guarded_in_the_next_update():
    parts, expected = Parts(donate=True, cls=Halfway), trajectory(Parts(donate=True, cls=Halfway))

    def after(state):
        signal.signal(signal.SIGALRM, stop)
        Halfway.action = lambda: signal.raise_signal(signal.SIGALRM)
        if state.step == 2:
            time.sleep(500)

    state = train(parts.state, parts.step, parts.loader(parts.state), after, Stop)
    Halfway.action = None
    assert record(state) == expected[2]
    assert signal.getsignal(signal.SIGALRM) is stop


def test_the_garbage_of_a_loop_takes_no_guard_from_an_update():
    parts = Parts(donate=True, cls=Halfway)
    expected = trajectory(Parts(donate=True, cls=Halfway), over="list")

    def make_garbage():
        cycle = [parts.loader(parts.state)]
        next(cycle[0])
        cycle.append(cycle)

    gc.disable()
    try:
        make_garbage()
        Halfway.action = lambda: [gc.collect(), press()]
        state = train(parts.state, parts.step, parts.batches, lambda state: time.sleep(500), KeyboardInterrupt)
    finally:
        gc.enable()
    assert record(state) == expected[1]


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("place", ["forward_action", "backward_action"])
@pytest.mark.parametrize("cause", ["Ctrl-C", "KeyboardInterrupt", "ValueError"])
@both
def test_in_the_passes_it_leaves_the_state_as_it_was(donate, at, place, cause):
    parts, expected = Parts(donate), trajectory(Parts(donate), over="list")
    error = ValueError if cause == "ValueError" else KeyboardInterrupt

    def action():
        if cause == "Ctrl-C":
            press()
        raise error

    state = train(parts.state, parts.step, parts.batches[: at - 1])
    setattr(parts.trap, place, action)
    state = train(state, parts.step, parts.batches[at - 1 :], ended_by=error)
    assert record(state) == expected[at - 1]
    assert record(train(state, parts.step, parts.batches[at - 1 :])) == expected[BATCHES]


# When a signal is taken in a loop over a loader


@pytest.mark.parametrize("where", ["update", "body", "wrapper"])
def test_a_first_ctrl_c_waits_for_the_next_batch_and_says_so(where, capfd):
    parts, done = Parts(donate=True, cls=Halfway), []

    def step(state, batch):
        if where == "update" and state.step == 1:
            Halfway.action = press
        state, metrics = parts.step(state, batch)
        if where == "wrapper" and state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return state.replace(extra={"mean": state.params["0.bias"].mean().item()}), metrics

    def after(state):
        if where == "body" and state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        settle()
        done.append(state.step)

    state = train(parts.state, step, parts.loader(parts.state), after, KeyboardInterrupt)
    assert (state.step, done) == (2, [1, 2])
    assert state.extra == {"mean": state.params["0.bias"].mean().item()}
    assert capfd.readouterr() == ("", NOTICE)


def test_a_second_ctrl_c_is_taken_at_once_and_the_next_run_begins_again(capfd):
    parts, done = Parts(donate=True), []

    def after(state):
        press()
        done.append("first")
        press()
        done.append("second")

    state = parts.state
    for run in (1, 2):
        state = train(state, parts.step, parts.loader(state), after, KeyboardInterrupt)
        assert state.step == run
        assert done == ["first"] * run
        assert capfd.readouterr().err == NOTICE


@pytest.mark.parametrize("name", ["SIGTERM", "SIGALRM"])
def test_other_signals_are_taken_at_once(name):
    parts, done = Parts(donate=True), []
    signal.signal(getattr(signal, name), stop)

    def after(state):
        signal.raise_signal(getattr(signal, name))
        done.append(state.step)

    assert train(parts.state, parts.step, parts.loader(parts.state), after, Stop).step == 1
    assert not done


def test_ctrl_c_is_taken_at_once_while_a_batch_is_read():
    read = []

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            press()
            read.append(index)

    loader = ll.make_loader(Slow(), batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        list(loader(ll.TrainState(epoch_length=4)))
    assert not read


def through_generator(batches):
    for batch in batches:
        kept = batch
        yield kept


AROUND = {
    "enumerate": lambda batches, state: (batch for _, batch in enumerate(batches)),
    "map": lambda batches, state: map(tuple, batches),
    "islice": lambda batches, state: itertools.islice(batches, 5),
    "generators": lambda batches, state: through_generator(through_generator(batches)),
    "progress": lambda batches, state: ll.progress(lambda state: batches)(state),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_what_stands_around_the_loader_does_not_matter(around, capfd):
    parts, done = Parts(donate=True), []

    def after(state):
        if state.step == 2:
            press()
        done.append(state.step)

    batches = around(parts.loader(parts.state), parts.state)
    assert train(parts.state, parts.step, batches, after, KeyboardInterrupt).step == 2
    assert done == [1, 2]
    assert NOTICE in capfd.readouterr().err


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_loop_in_the_body_is_part_of_the_body(by_hand, capfd):
    parts, evaluated, done = Parts(donate=True), [], []
    eval_step = ll.make_eval_step(parts.model, lambda model, xy: {"seen": ll.Mean(torch.ones(()), 1)})

    def step(state, batch):
        if not evaluated:
            press()
        evaluated.append(state.step)
        return eval_step(state, batch)

    def after(state):
        if by_hand:
            for batch in parts.loader(state.replace(epoch=0, batch=0)):
                step(state, batch)
        else:
            ll.evaluate(step, state, parts.loader)
        done.append(state.step)

    assert train(parts.state, parts.step, parts.loader(parts.state), after, KeyboardInterrupt).step == 1
    assert evaluated == [1] * BATCHES
    assert done == [1]
    assert not guarded()


def test_an_evaluation_on_its_own_stops_at_its_next_batch(capfd):
    parts, done = Parts(donate=True), []
    eval_step = ll.make_eval_step(parts.model, lambda model, xy: {"seen": ll.Mean(torch.ones(()), 1)})

    def step(state, batch):
        press()
        done.append(True)
        return eval_step(state, batch)

    with pytest.raises(KeyboardInterrupt):
        ll.evaluate(step, parts.state, parts.loader)
    assert done == [True]


@pytest.mark.parametrize("way", ["break", "error"])
def test_a_ctrl_c_that_waits_when_the_loop_is_left_comes_after_it(way, capfd):
    parts, noted = Parts(donate=True), []
    signal.signal(signal.SIGINT, lambda *_: noted.append(guarded()))

    def after(state):
        press()
        assert not noted
        if way == "error":
            raise ValueError
        return True

    train(parts.state, parts.step, parts.loader(parts.state), after, ValueError if way == "error" else ())
    settle()
    assert noted == [False]


def test_another_signal_does_not_make_it_forget_a_ctrl_c(capfd):
    parts, noted = Parts(donate=True), []
    signal.signal(signal.SIGUSR1, lambda *_: noted.append(True))

    def after(state):
        press()
        signal.raise_signal(signal.SIGUSR1)

    assert train(parts.state, parts.step, parts.loader(parts.state), after, KeyboardInterrupt).step == 1
    assert noted == [True]


def test_it_stops_all_the_same_when_nobody_reads_what_it_says():
    parts, done = Parts(donate=True), []

    def after(state):
        press()
        done.append(state.step)

    reading, writing = os.pipe()
    os.close(reading)  # as of a `tee` that Ctrl-C has ended
    stderr = os.dup(2)
    os.dup2(writing, 2)
    try:
        train(parts.state, parts.step, parts.loader(parts.state), after, KeyboardInterrupt)
    finally:
        os.dup2(stderr, 2)
        os.close(writing)
        os.close(stderr)
    assert done == [1]


# Handlers


@pytest.mark.parametrize("way", ["end", "break", "error", "Ctrl-C", "close"])
def test_handlers_come_back_after_the_loop(way, capfd):
    parts = Parts(donate=True)
    signal.signal(signal.SIGTERM, stop)
    before = {number: signal.getsignal(number) for number in _interrupts._HELD}

    def after(state):
        assert guarded()
        if way == "error":
            raise ValueError
        if way == "Ctrl-C":
            press()
        return way == "break"

    batches = parts.loader(parts.state)
    if way == "close":
        next(batches)
        batches.close()
    else:
        ended_by = {"error": ValueError, "Ctrl-C": KeyboardInterrupt}.get(way, ())
        train(parts.state, parts.step, batches, after, ended_by)
        del batches
    assert {number: signal.getsignal(number) for number in before} == before


def test_signals_that_are_ignored_or_deadly_stay_so():
    parts, seen = Parts(donate=True), []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def after(state):
        press()
        seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    train(parts.state, parts.step, parts.loader(parts.state), after)
    assert seen == [(signal.SIG_IGN, signal.SIG_DFL)] * BATCHES


class Delayed:
    """The usual recipe to put off a Ctrl-C, which saves the handler and puts it back."""

    def __enter__(self):
        self.received = None
        self.before = signal.signal(signal.SIGINT, self.handler)

    def handler(self, *arguments):
        self.received = arguments

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.before)
        if self.received:
            self.before(*self.received)


@pytest.mark.parametrize("place", ["in the update", "after the step"])
def test_code_that_saves_handlers_and_puts_them_back_works_in_the_body(place, capfd):
    parts, done = Parts(donate=True, cls=Halfway), []

    def step(state, batch):
        with Delayed():
            if state.step == 1 and place == "in the update":
                Halfway.action = press
            state, metrics = parts.step(state, batch)  # which puts a guard before the handler of this moment
            settle()
            if state.step == 2 and place == "after the step":
                press()
        return state, metrics

    train(parts.state, step, parts.loader(parts.state), lambda state: done.append(state.step), KeyboardInterrupt)
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is interrupt


def test_a_handler_that_calls_the_one_before_it_works_in_the_body(capfd):
    parts, noted = Parts(donate=True), []

    def after(state):
        before = signal.getsignal(signal.SIGINT)
        if state.step == 1:
            signal.signal(signal.SIGINT, lambda *arguments: noted.append(True) or before(*arguments))
        if state.step == 2:
            press()

    assert train(parts.state, parts.step, parts.loader(parts.state), after, KeyboardInterrupt).step == 2
    assert noted == [True]


def test_a_batch_lives_no_longer_than_the_loop_needs_it():
    parts, alive = Parts(donate=True), []
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


def test_import_touches_no_handler_and_starts_no_thread():
    code = """if True:
        import signal, threading
        numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        before = {number: signal.getsignal(number) for number in numbers}
        import torch
        threads = threading.active_count()
        import looplib as ll
        model = torch.nn.Linear(2, 1)
        optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
        step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).sum()), optimizer, donate=True)
        ll.init_state(model, optimizer)
        assert {number: signal.getsignal(number) for number in numbers} == before
        assert threading.active_count() == threads
    """
    subprocess.run([sys.executable, "-c", code], check=True)


# Threads


def test_training_in_another_thread():
    parts, expected, results = Parts(donate=True), trajectory(Parts(donate=True)), []

    def run():
        results.append(train(parts.state, parts.step, parts.loader(parts.state)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert record(results[0]) == expected[BATCHES]
    assert signal.getsignal(signal.SIGINT) is interrupt


def test_an_update_in_another_thread_holds_no_signal_up():
    parts, other = Parts(donate=True), Parts(donate=True, cls=Halfway)
    entered, leave = threading.Event(), threading.Event()
    parts.step(parts.state, parts.batches[0])  # puts up the guards
    assert guarded()
    Halfway.action = lambda: [entered.set(), leave.wait(300)]
    thread = threading.Thread(target=train, args=(other.state, other.step, other.loader(other.state)))
    thread.start()
    assert entered.wait(300)
    with pytest.raises(KeyboardInterrupt):
        press()
    leave.set()
    thread.join()


def test_a_loop_in_another_thread_does_not_take_the_ctrl_c_that_waits(capfd):
    parts, other, results = Parts(donate=True), Parts(donate=True), []

    def run():
        results.append(train(other.state, other.step, other.loader(other.state)))

    def after(state):
        press()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    assert train(parts.state, parts.step, parts.loader(parts.state), after, KeyboardInterrupt).step == 1
    assert results[0].step == BATCHES


# What a step borrows


def surroundings(model):
    """Everything that a step must leave unchanged, although it changes some of it temporarily."""
    slots = [
        tensor for module in model.modules() for tensor in (*module._parameters.values(), *module._buffers.values())
    ]
    return (
        [id(tensor) for tensor in slots],
        [parameter.requires_grad for parameter in model.parameters()],
        [parameter.grad for parameter in model.parameters()],
        [module.training for module in model.modules()],
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("kind", ["donated", "pure", "evaluation"])
def test_a_step_gives_back_what_it_borrows_at_whatever_moment_it_is_interrupted(kind):
    parts = Parts(kind == "donated")
    parts.grad_fn = ll.make_grad_fn(
        parts.model,
        lambda model, xy: nn.functional.cross_entropy(model(xy[0]), xy[1]),
        trainable=lambda name, tensor: name != "0.bias",
    )
    parts.model.eval()  # so that each kind of step sets modes
    parts.model[1].train()
    parts.step = ll.make_train_step(parts.grad_fn, parts.optimizer, donate=kind == "donated")
    eval_step = ll.make_eval_step(parts.model, lambda model, xy: {"mean": ll.Mean(model(xy[0]).mean(), 1)})
    start, _ = parts.step(ll.copy_state(parts.state), parts.batches[0])  # on tensors that are not the module's own
    start = ll.copy_state(start)
    before = surroundings(parts.model)
    for moment in itertools.count(1):
        state, profile = ll.copy_state(start), at_moment(moment, press)
        with contextlib.suppress(KeyboardInterrupt):
            with profiled(profile):
                (eval_step if kind == "evaluation" else parts.step)(state, parts.batches[1])
            settle()
        assert surroundings(parts.model) == before
        if profile.seen < moment:
            break
    assert moment > 100


if __name__ == "__main__":
    print(bombarded(*json.loads(sys.argv[1])))


@pytest.mark.slow
def test_the_suite_hears_ctrl_c_as_a_background_job_of_a_shell():
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import conftest; "
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    tests = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=tests, check=True)
