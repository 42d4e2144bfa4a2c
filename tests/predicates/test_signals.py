"""Signals as predicates: real signals in real processes, and a plain model of who is told what."""

import gc
import os
import re
import signal
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import be_rank, launch, run_script
from shared import examples, mean_square

import looplib as ll
from looplib.predicates import after_signal

STATE = ll.TrainState()


@pytest.fixture(autouse=True)
def no_predicate_is_left():
    yield
    gc.collect()
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    assert not any(getattr(handler, "listeners", ()) for handler in handlers)


# The predicate


def test_it_is_true_from_the_signal_on_and_does_nothing_else():
    with after_signal(signal.SIGUSR1, signal.SIGTERM) as stop_now:
        either, both = ll.after_steps(5) | stop_now, ll.after_steps(5) & stop_now
        assert [stop_now(STATE), either(STATE), (~stop_now)(STATE)] == [False, False, True]
        signal.raise_signal(signal.SIGUSR1)
        assert [stop_now(STATE), either(STATE), (~stop_now)(STATE)] == [True, True, False]
        assert [both(STATE), both(STATE.replace(step=5))] == [False, True]
    assert stop_now(STATE)  # closing does not forget


@pytest.mark.parametrize("end", ["close", "garbage", "error"])
def test_the_handler_of_before_is_called_again(end):
    came = []
    before = signal.signal(signal.SIGUSR2, lambda *_: came.append(True))
    stop_now = after_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    assert not came
    if end == "close":
        stop_now.close()
        stop_now.close()
    elif end == "garbage":
        done = SimpleNamespace(predicate=ll.after_steps(5) | stop_now)
        done.itself = done
        del done, stop_now
        gc.collect()
    else:
        with pytest.raises(RuntimeError), stop_now:
            raise RuntimeError
    signal.raise_signal(signal.SIGUSR2)
    assert came
    signal.signal(signal.SIGUSR2, before)


steps = st.one_of(
    st.just(("open",)),
    st.just(("signal",)),
    st.tuples(st.just("close"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 2.5, 5.0, 9.0])),
)


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(steps, max_size=20))
@example([("open",), ("open",), ("close", 0), ("signal",), ("close", 0), ("signal",)])
@example([("open",), ("signal",), ("wait", 2.5), ("open",), ("signal",), ("wait", 2.5), ("signal",), ("signal",)])
def test_any_number_of_them_in_any_order_are_told_and_the_rest_is_passed_on(steps):
    passed, now, expected = [], 0.0, 0

    def previous(number, frame):
        passed.append(number)

    before = signal.signal(signal.SIGUSR1, previous)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", lambda: now)
        made, opened = [], []  # pairs of a predicate and when it should have been told
        for step, *value in steps:
            if step == "open":
                made.append([after_signal(signal.SIGUSR1), None])
                opened.append(made[-1])
            elif step == "close" and opened:
                opened.pop(value[0] % len(opened))[0].close()
            elif step == "wait":
                now += value[0]
            elif step == "signal":
                signal.raise_signal(signal.SIGUSR1)
                expected += all(told is not None and now - told >= 5 for _, told in opened)
                for pair in opened:
                    pair[1] = now if pair[1] is None else pair[1]
            assert [stop_now(STATE) for stop_now, _ in made] == [told is not None for _, told in made]
            assert len(passed) == expected
        for stop_now, _ in opened:
            stop_now.close()
    signal.signal(signal.SIGUSR1, before)


# Threads and processes


def test_it_is_made_in_the_main_thread_and_asked_in_any():
    with after_signal(signal.SIGUSR1) as stop_now, ThreadPoolExecutor(1, thread_name_prefix="helper") as helper:
        with pytest.raises(ValueError, match=r"after_signal .* helper.* main thread"):
            helper.submit(after_signal, signal.SIGUSR1).result()
        signal.raise_signal(signal.SIGUSR1)
        assert helper.submit(stop_now, STATE).result()


def sleep():
    while True:  # a signal that comes just before a sleep does not wake it
        time.sleep(0.01)


def without(started):
    started.set()
    sleep()


def with_its_own(started):
    stop_now = after_signal(signal.SIGTERM)
    started.set()
    while not stop_now(STATE):
        time.sleep(0.01)
    sys.exit(3)


def hanging(started):
    now = 0.0
    time.monotonic = lambda: now
    with after_signal(signal.SIGTERM):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # the same, sent twice
        now = 1000.0
        started.set()
        sleep()


def forks():
    stop_now = after_signal(signal.SIGTERM)
    fork = get_context("fork")
    for target in (without, with_its_own, hanging):
        started = fork.Event()
        process = fork.Process(target=target, args=(started,))
        process.start()
        started.wait()
        process.terminate()
        process.join()
        print(process.exitcode, stop_now(STATE))


@pytest.mark.slow
def test_forked_processes_end_as_they_did_before_or_by_a_second_signal_if_they_hang():
    assert launch(0, forks) == "-15 False\n3 False\n-15 False\n"


# In loops


class Signalled(torch.optim.SGD):
    """An update in which signals come."""

    numbers = ()

    def step(self, closure=None):
        for number in self.numbers:
            signal.raise_signal(number)
        return super().step(closure)


@pytest.mark.parametrize("made", ["before the loop", "in its body"])
@pytest.mark.parametrize("closed", ["in its body", "after the loop"])
def test_loops_and_donated_steps_pass_signals_on(monkeypatch, made, closed):
    model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(Signalled, lr=0.1)
    train_step = ll.make_train_step(ll.make_grad_fn(model, mean_square), optimizer, donate=True)
    loader = ll.make_loader(torch.randn(12, 2), batch_size=2)
    passed = []
    before = signal.signal(signal.SIGUSR2, lambda *_: passed.append(True))
    state, stop_now = ll.init_state(model, optimizer, loader=loader), None
    if made == "before the loop":
        stop_now = after_signal(signal.SIGUSR2)
    for batch in loader(state):
        if made == "in its body" and state.step == 2:
            stop_now = after_signal(signal.SIGUSR2)
        monkeypatch.setattr(Signalled, "numbers", [signal.SIGUSR2] if state.step == 3 else [])
        state, _ = train_step(state, batch)
        if stop_now is not None and stop_now(state):
            if closed == "in its body":
                stop_now.close()
            break
    assert state.step == 4
    stop_now.close()
    assert not passed
    signal.raise_signal(signal.SIGUSR2)
    assert passed
    signal.signal(signal.SIGUSR2, before)


RUN = """
    import signal, sys, time
    import torch
    import looplib as ll

    def main(folder, wait_at=None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        loader = ll.make_loader(torch.utils.data.TensorDataset(torch.randn(40, 4)), batch_size=4)
        optimizer = ll.optimizer(torch.optim.AdamW, lr=0.01)
        loss_fn = lambda model, batch: model(batch[0]).square().mean()
        train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
        done = ll.after_steps(30) | ll.after_signal(signal.SIGTERM, signal.SIGUSR1)
        ckpt = ll.checkpoint_io(folder)
        state = ckpt.restore(ll.init_state(model, optimizer, loader=loader), quiet=True)
        print("from", state.step, flush=True)
        while not done(state):
            for batch in loader(state):
                if str(state.step) == wait_at:
                    print("ready", flush=True)
                    while not done(state):
                        time.sleep(0.001)
                state, _ = train_step(state, batch)
                if done(state):
                    break
        ckpt.save(state)
        print("left at", state.step, *[float(p.detach().double().sum()).hex() for p in state.params.values()])

    main(*sys.argv[1:3])
    main(*sys.argv[3:]) if sys.argv[3:] else None
"""


def test_a_process_told_to_end_saves_and_continues_to_the_same_bits(tmp_path):
    (tmp_path / "run.py").write_text(textwrap.dedent(RUN))
    (tmp_path / "printed").mkdir()
    printed = tmp_path / "printed/00000"
    arguments = run_script, (str(tmp_path / "run.py"), str(tmp_path / "told"), "3")
    told = get_context("forkserver").Process(
        target=be_rank, args=(0, str(tmp_path / "printed"), {"WORLD_SIZE": "0"}, *arguments)
    )
    told.start()
    while told.is_alive() and not (printed.exists() and "ready" in printed.read_text()):
        time.sleep(0.001)
    os.kill(told.pid, signal.SIGTERM)
    told.join(300)
    out = printed.read_text()
    assert told.exitcode == 0, out
    assert out.startswith("from 0\nready\nleft at 4 "), out  # the batch at hand was finished, and no other begun
    out = launch(0, run_script, *map(str, (tmp_path / "run.py", tmp_path / "told", "", tmp_path / "whole")))
    resumed, whole = re.findall("^left at 30 .*$", out, re.MULTILINE)
    assert out.startswith("from 4\n"), out
    assert resumed == whole


# Errors


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((), r"\(\)"),
        (("SIGTERM",), r"\('SIGTERM',\)"),
        ((0,), r"\(0,\)"),
        ((signal.SIGTERM, signal.SIGKILL), r"\(.*9.*\)"),
    ],
)
@pytest.mark.every_case
def test_signals_that_cannot_be_caught_are_refused_and_nothing_is_installed(given, found):
    with pytest.raises(ValueError, match=rf"after_signal{found}: expected one or more signals that can be caught"):
        after_signal(*given)
