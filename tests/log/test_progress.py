import contextlib
import io
import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from tqdm import tqdm

import looplib as ll
from looplib.log import console, progress
from looplib.metrics import Mean
from looplib.types import TrainState


@pytest.fixture
def stream():
    return io.StringIO()


def at(batch=0, epoch_length=5, **counts):
    return TrainState(batch=batch, epoch_length=epoch_length, **counts)


def metrics_of(loss):
    return {"loss": Mean(torch.tensor(loss), 1, times=4)}


def drawings(stream):
    return [drawing for drawing in re.split("[\r\n]", stream.getvalue()) if drawing.strip()]


class Counted:
    """A metric that counts how often it is brought to the host."""

    def __init__(self):
        self.threads = []

    def merge(self, other):
        raise NotImplementedError

    def compute(self):
        self.threads.append(threading.get_ident())
        return 0.5


@pytest.mark.parametrize("batches", [[1, 2, 3], iter([1, 2, 3]), (b for b in [1, 2, 3])])
def test_batches_come_through_unchanged(batches, stream):
    given = list(batches) if isinstance(batches, list) else None
    bar = progress(batches, at(batch=2), file=stream)
    loop = iter(bar)
    assert iter(loop) is loop
    del loop  # a loop that never began ends nothing
    assert list(bar) == (given or [1, 2, 3])
    assert list(bar) == []


def test_a_bar_begins_where_the_state_stands_and_ends_with_the_epoch(stream):
    for _ in progress(range(3), at(batch=2, epoch=2), file=stream, mininterval=0):
        pass
    shown = drawings(stream)
    assert shown[0].startswith("epoch 3:  40%")
    assert "2/5" in shown[0]
    assert shown[-1].startswith("epoch 3: 100%")
    assert "5/5" in shown[-1]
    assert stream.getvalue().endswith("\n")


@pytest.fixture
def clock(monkeypatch):
    """A clock of tqdm's that moves when told, in seconds."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def test_the_rate_counts_only_what_this_bar_saw(stream, clock):
    for _ in progress(range(10), at(batch=990, epoch_length=1000), file=stream):
        clock[0] += 4
    assert "4.00s/it" in drawings(stream)[-1]


def test_a_loop_that_becomes_slow_is_redrawn_at_every_batch(stream, clock):
    for batch in progress(range(2010), at(epoch_length=2010), file=stream):
        clock[0] += 0.001 if batch < 2000 else 2.0
    shown = [int(re.search(r"(\d+)/2010", line)[1]) for line in drawings(stream)]
    assert [n for n in shown if n > 2000] == [*range(2001, 2011), 2010]
    assert len([n for n in shown if n <= 2000]) < 25


def test_a_stream_has_a_position_and_no_length(stream):
    bar = progress(range(3), at(batch=7, epoch_length=None), file=stream)
    with pytest.raises(TypeError, match=r"no length: state\.epoch_length is None"):
        len(bar)
    assert list(bar) == [0, 1, 2]
    assert drawings(stream)[-1].startswith("epoch 1: 10it")


def test_len_is_what_is_left_of_the_epoch(stream):
    assert len(progress(range(3), at(batch=2), file=stream)) == 3


def test_a_batch_is_counted_after_its_body_as_tqdm_does(stream):
    theirs = io.StringIO()
    shown = {}
    for file, bar in [
        (stream, progress(range(3), at(epoch_length=3), file=stream, mininterval=0, ncols=60)),
        (theirs, tqdm(range(3), file=theirs, mininterval=0, miniters=1, ncols=60)),
    ]:
        shown[file] = [re.search(r"\d/3", drawings(file)[-1])[0] for _ in bar]
        shown[file].append(re.search(r"\d/3", drawings(file)[-1])[0])
    assert shown[stream] == shown[theirs] == ["0/3", "1/3", "2/3", "3/3"]


def test_the_last_loss_is_shown_whenever_the_bar_is_drawn(stream):
    bar = progress(range(3), at(epoch_length=3), file=stream, mininterval=0)
    for i in bar:
        bar.show(metrics_of(0.123456 + i))
    shown = drawings(stream)
    assert "loss" not in shown[0]
    assert [re.search(r"loss=([\d.]+)", line)[1] for line in shown[1:]] == [
        "0.1235",
        "1.123",
        "2.123",
        "2.123",
    ]


def test_the_last_loss_is_shown_at_the_end_though_no_redraw_was_due(stream):
    bar = progress(range(3), at(epoch_length=3), file=stream, mininterval=1000)
    for i in bar:
        bar.show(metrics_of(float(i)))
    first, last = drawings(stream)
    assert "0/3" in first
    assert "3/3" in last
    assert "loss=2]" in last


def test_two_runs_side_by_side_each_have_their_own_loss(stream):
    """The bars of two runs that train in turns, with a third that is shown nothing: none sees the other's steps."""
    model = torch.nn.Linear(1, 1)
    optimizer = ll.optimizer(torch.optim.SGD, lr=1e-3)
    streams, bars, states, steps = [], [], [], []
    for number in range(3):
        train_step = ll.make_train_step(
            ll.make_grad_fn(model, lambda model, x, number=number: 0 * model(x).sum() + number + 1), optimizer
        )
        steps.append(train_step)
        states.append(ll.init_state(model, optimizer, epoch_length=3))
        streams.append(io.StringIO())
        bars.append(progress(torch.ones(3, 2, 1), states[-1], file=streams[-1], mininterval=0))
    for batches in zip(*bars, strict=True):
        for number, batch in enumerate(batches):
            states[number], metrics = steps[number](states[number], batch)
            if number < 2:
                bars[number].show(metrics)
    shown = [set(re.findall(r"loss=([\d.]+)", file.getvalue())) for file in streams]
    assert shown == [{"1"}, {"2"}, set()]


def test_all_numbers_are_shown_until_others_of_their_names_come(stream):
    bar = progress(range(2), at(epoch_length=2), file=stream, mininterval=0)
    for _ in bar:
        bar.show({"loss": Mean(3.0, 2), "grad_norm": torch.tensor(0.25), "rows": [1, 2], "eval/accuracy": 0.5})
        bar.show({"eval/accuracy": 0.75})
        bar.show({})
    assert "loss=1.5, grad_norm=0.25, eval/accuracy=0.75]" in drawings(stream)[-1]  # spaces may follow a longer line


def test_what_is_no_metrics_is_refused(stream):
    with pytest.raises(TypeError, match="got a float; give the metrics that the train step returned"):
        progress(range(3), at(), file=stream).show(0.5)


# The bar of a run


def run_of(stream, state, epochs=3, stop=None, **options):
    """A run of epochs of four batches, with a line between two epochs; the bar, and the last state."""
    bar = progress(
        lambda state: range(state.batch, 4), epochs=epochs, file=stream, mininterval=0, ncols=79, **options
    )
    while state.epoch < epochs:
        for _ in bar(state):
            bar.show({"loss": Mean(1.0 + state.batch)})
            state = at(epoch_length=4, epoch=state.epoch + (state.batch == 3), batch=(state.batch + 1) % 4)
        console(file=stream)(state, {"eval/loss": 0.5})
        if state.epoch == stop:
            break
    return bar, state


def test_one_bar_for_a_run(stream):
    bar, _ = run_of(stream, at(epoch_length=4))
    lines = [line.rsplit("\r", 1)[-1] for line in stream.getvalue().split("\n")]
    assert [line.split()[0] for line in lines if line] == ["step", "step", "epoch", "step"]
    shown = drawings(stream)
    counts = [re.search(r"epoch (\d/3): .* (\d+/12)", line).groups() for line in shown if line.startswith("epoch")]
    assert counts[0] == ("1/3", "0/12")
    assert ("1/3", "4/12") in counts
    assert ("2/3", "4/12") in counts
    assert counts[-1] == ("3/3", "12/12")
    assert "loss=4" in shown[-2]
    with pytest.raises(TypeError, match="no len"):
        len(bar)


def test_the_time_left_is_that_of_the_run(stream, clock):
    bar = progress(lambda state: range(4), epochs=3, file=stream, mininterval=0)
    for _ in bar(at(epoch_length=4)):
        clock[0] += 10
    assert re.search("4/12 .00:40<01:(19|20)", drawings(stream)[-1])
    clock[0] += 20  # an evaluation
    for _ in bar(at(epoch_length=4, epoch=1)):
        pass
    assert "8/12 [01:00<" in drawings(stream)[-1]
    bar.close()


def test_the_bar_of_a_resumed_run_begins_where_it_stands(stream):
    run_of(stream, at(epoch_length=4, epoch=1, batch=2))
    shown = [line for line in drawings(stream) if line.startswith("epoch")]
    assert "6/12" in shown[0]
    assert shown[0].startswith("epoch 2/3:  50%")


def test_a_run_that_stops_early_or_goes_back_keeps_its_bar(stream):
    bar, state = run_of(stream, at(epoch_length=4), stop=2)
    assert not closed(stream)
    for _ in bar(at(epoch_length=4, epoch=1)):  # back to a checkpoint
        pass
    assert "8/12" in drawings(stream)[-1]
    bar.close()
    assert closed(stream)
    for _ in bar(state):  # a new bar
        break
    assert drawings(stream)[-1].startswith("epoch 3/3:  67%")
    assert closed(stream)


def test_a_stream_is_counted_through_the_run(stream):
    bar = progress(lambda state: range(4), file=stream, mininterval=0)
    for epoch in range(2):
        assert list(bar(at(epoch_length=None, epoch=epoch))) == [0, 1, 2, 3]
    assert drawings(stream)[-1].startswith("epoch 2: 8it")
    bar.close()


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: progress(iter([1])), r"bar = ll.progress\(loader, epochs=10\) and `for batch in bar\(state\)`"),
        (lambda: iter(progress(lambda state: [1])), r"`for batch in bar\(state\)`"),
        (lambda: progress([1], at(), disable=True)(at()), r"write ll.progress\(loader, epochs=10\)"),
    ],
)
def test_the_bars_of_a_run_and_of_an_epoch_are_told_apart(use, text):
    with pytest.raises(TypeError, match=text):
        use()


def test_a_step_that_is_none_is_refused(stream):
    with pytest.raises(TypeError, match="step is a TrainState; give the step that the loop calls"):
        progress(range(3), at(), step=at(), file=stream)


def test_a_closed_bar_holds_no_metrics(stream):
    loss = Counted()
    bar = progress(range(1), at(epoch_length=1), file=stream)
    for _ in bar:
        bar.show({"loss": loss})
    held = weakref.ref(loss)
    del loss
    assert held() is None


def test_the_loss_is_brought_to_the_host_only_to_be_drawn(stream):
    loss = Counted()
    bar = progress(range(100), at(epoch_length=100), file=stream, mininterval=1000)
    for i in bar:
        bar.show({"loss": loss, "step": i})
        assert loss.threads == []
    assert len(loss.threads) == 1


def test_a_disabled_bar_shows_and_reads_nothing(stream):
    loss = Counted()
    batches = []
    bar = progress(range(3), at(epoch_length=3), file=stream, mininterval=0, disable=None)
    for batch in bar:
        bar.show({"loss": loss})
        batches.append(batch)
    assert batches == [0, 1, 2]
    assert stream.getvalue() == ""
    assert loss.threads == []


def test_another_thread_redraws_without_reading_the_loss(stream):
    loss = Counted()
    bar = progress(range(3), at(epoch_length=3), file=stream, mininterval=0)
    next(bar)
    bar.show({"loss": loss})
    next(bar)
    writer = threading.Thread(target=console(file=stream), args=(at(), {"x": 1.0}))
    writer.start()
    writer.join()
    assert "loss=0.5" in drawings(stream)[-1]
    assert loss.threads == [threading.get_ident()]


def test_a_postfix_of_the_user_stands_behind_the_loss(stream):
    bar = progress(range(1), at(epoch_length=1), file=stream, postfix={"fold": 2})
    for _ in bar:
        bar.show(metrics_of(0.25))
    assert "fold=2]" in drawings(stream)[0]
    assert "loss=0.25, fold=2]" in drawings(stream)[-1]


def test_options_go_to_tqdm(stream):
    list(progress(range(2), at(epoch_length=2), desc="fold 1", file=stream, unit="step", leave=False))
    assert drawings(stream)[0].startswith("fold 1:")
    assert "step" in drawings(stream)[0]
    assert not stream.getvalue().endswith("\n")
    with pytest.raises(KeyError, match="colr"):
        progress(range(2), at(), file=stream, colr="red")


def closed(stream):
    return stream.getvalue().endswith("\n")


def test_leaving_the_loop_closes_the_bar_and_lets_go_of_the_batches(stream):
    ended = []

    def batches():
        try:
            yield from range(5)
        finally:
            ended.append(True)

    bar = progress(batches(), at(), file=stream)
    for batch in bar:
        bar.show(metrics_of(0.5))
        if batch == 2:
            break
    assert closed(stream)
    assert ended == [True]
    assert "2/5" in drawings(stream)[-1]
    assert "loss=0.5" in drawings(stream)[-1]


def test_an_error_in_the_body_closes_the_bar(stream):
    def loop():
        for _ in progress(range(5), at(), file=stream):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert closed(stream)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_what_the_batches_raise_goes_through_a_closed_bar(stream, error):
    ended = []

    def source():
        try:
            yield from range(5)
        finally:
            ended.append(True)

    def fail_at_2(batch):
        if batch == 2:
            raise error("here")

    def loop():
        bar = progress(map(fail_at_2, source()), at(), file=stream)
        for _ in bar:
            bar.show(metrics_of(0.5))

    with pytest.raises(error, match="here") as held:
        loop()
    assert closed(stream)
    assert "2/5" in drawings(stream)[-1]
    assert "loss=0.5" in drawings(stream)[-1]
    # The batches are let go although the traceback, as a notebook keeps it, still holds the frames.
    assert held.traceback
    assert ended == [True]


def test_an_error_while_drawing_closes_the_bar_and_frees_the_lock(stream):
    class Failing(Counted):
        def compute(self):
            raise KeyboardInterrupt

    bar = progress(range(5), at(), file=stream, mininterval=0)
    next(bar)
    bar.show({"loss": Failing()})
    with pytest.raises(KeyboardInterrupt):
        next(bar)
    # This thread could take its own lock again, so another must try.
    taken = []

    def take():
        with tqdm.get_lock():
            taken.append(True)

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    taker.join(timeout=300)
    assert taken == [True]
    assert list(bar) == []


def test_a_device_that_failed_does_not_hide_the_error_of_the_batches(stream):
    class Dead(Counted):
        def compute(self):
            raise RuntimeError("device-side assert")

    def batches():
        yield 0
        bar.show({"loss": Dead()})
        raise OSError("disk")

    bar = progress(batches(), at(), file=stream)
    with pytest.raises(OSError, match="disk"):
        list(bar)
    assert closed(stream)


def test_close_ends_the_batches_and_draws_once(stream):
    bar = progress(range(5), at(), file=stream)
    with contextlib.closing(bar):
        assert next(bar) == 0
    text = stream.getvalue()
    assert closed(stream)
    bar.close()
    assert list(bar) == []
    assert stream.getvalue() == text


def test_the_batches_are_asked_for_by_progress_itself_in_the_loops_own_frame(stream):
    # What takes interrupts at the next batch knows the loop by the frame that asked.
    frames = []

    class Batches:
        def __iter__(self):
            return self

        def __next__(self):
            caller = sys._getframe(1)
            code = caller.f_code
            while caller.f_globals["__name__"] == progress.__module__:  # which interrupts look through
                caller = caller.f_back
            frames.append((code, caller))
            if len(frames) == 3:
                raise StopIteration
            return 0

    for _ in progress(Batches(), at(), file=stream):
        pass
    assert frames == [(progress.__next__.__code__, sys._getframe())] * 3


def test_a_function_in_place_of_its_batches_is_refused():
    with pytest.raises(TypeError, match=r"function is not iterable; write ll\.progress\(loader\(state\), state\)"):
        progress(lambda state: [], at())


def test_a_log_line_in_the_loop_leaves_the_bar_whole(stream):
    log = console(file=stream)
    for i in progress(range(2), at(epoch_length=2), file=stream, mininterval=0, ncols=60):
        log(at(step=i), {"x": 1.0})
    lines = [line.rsplit("\r", 1)[-1] for line in stream.getvalue().split("\n")]
    assert [line.split()[:2] for line in lines[:2]] == [["step", "0"], ["step", "1"]]
    assert lines[2].startswith("epoch 1: 100%")


PLAIN = """
import sys
import threading

import tqdm

from looplib.log import progress
from looplib.types import TrainState

assert "tqdm.auto" not in sys.modules
left_open = progress(range(3), TrainState(epoch_length=3))
next(left_open)
assert threading.active_count() == 1, "a thread was started"
assert left_open._bar.get_lock() is tqdm.tqdm.get_lock(), "the bar and tqdm.write do not share a lock"
left_open.show({"loss": 0.5})
"""


def test_a_plain_process_has_no_thread_and_no_warning_and_draws_on_the_error_stream():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PLAIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "epoch 1" in done.stderr
    assert not re.search("warning|error|exception", done.stderr, re.IGNORECASE)


NOTEBOOK = """
import sys
import ipykernel.zmqshell  # by which tqdm knows a notebook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell
HistoryManager.enabled = False
shell = InteractiveShell.instance()
shell.display_pub = CapturingDisplayPublisher()

def shown(cell):
    shell.display_pub.outputs.clear()
    shell.run_cell(cell, store_history=True).raise_error()
    print(cell, file=sys.stderr)
    widgets = [out["data"]["application/vnd.jupyter.widget-view+json"] for out in shell.display_pub.outputs]
    boxes = [shell.user_ns["widget"]._instances[widget["model_id"]] for widget in widgets]
    return [[bar.children[0].value.split(":")[0] for bar in box.children] for box in boxes]

shown("from ipywidgets.widgets import widget; from looplib import TrainState; from looplib.log import progress")
epochs = "for epoch in range(6): list(progress('ab', TrainState(epoch=epoch, epoch_length=2), leave={}))"
assert shown(epochs.format(False)) == [[]]
bars = [name.replace(chr(0x2007), " ") for name in shown(epochs.format(True))[0]]
assert bars == [f"epoch {number}" for number in range(1, 7)], bars
assert shown("list(progress('ab', TrainState(), disable=True))") == []
stopped = "for one in progress('ab', TrainState(epoch_length=2), leave=False): break"
assert [len(box) for box in shown(stopped)] == [1]  # as tqdm leaves it
assert [len(box) for box in shown("list(progress('ab', TrainState(), desc='stream'))")] == [0]  # it is finished

run = '''
bar = progress(lambda state: 'ab', epochs=3)
for epoch in range({}):
    for one in bar(TrainState(epoch=epoch, epoch_length=2)):
        {}
    seen = bar._bar.container.children[0].value.split(":")[0]
'''
for epochs in (3, 2):  # to the end, and stopped early
    assert shown(run.format(epochs, "pass")) == [[]]
    assert shell.user_ns["seen"].replace(chr(0x2007), " ") == f"epoch {epochs}/3"
assert len(shown(run.format(2, "if epoch: break"))[0]) == 1  # left amid an epoch
"""


def test_the_bars_of_a_notebook_cell_are_one_output():
    subprocess.run([sys.executable, "-W", "error", "-c", NOTEBOOK], check=True)
