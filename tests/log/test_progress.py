"""The bar, as tqdm draws it on a stream, beside a plain tqdm."""

import io
import re
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
from shared import assert_each_refused
from tqdm import tqdm

from looplib.log import console, progress
from looplib.metrics import Mean
from looplib.types import TrainState


@pytest.fixture
def stream():
    return io.StringIO()


def at(batch=0, epoch_length=5, **counts):
    return TrainState(batch=batch, epoch_length=epoch_length, **counts)


def drawings(stream):
    return [drawing for drawing in re.split("[\r\n]", stream.getvalue()) if drawing.strip()]


def closed(stream):
    return stream.getvalue().endswith("\n")


def bar_of(batches, stream, **options):
    return progress(lambda state: batches, file=stream, **options)


class Counted:
    """A metric that counts how often it is brought to the host."""

    def __init__(self, error=None):
        self.threads, self.error = [], error

    def merge(self, other):
        raise NotImplementedError

    def compute(self):
        self.threads.append(threading.get_ident())
        if self.error is not None:
            raise self.error
        return 0.5


def test_a_bar_begins_where_the_state_stands_and_options_go_to_tqdm(stream):
    for options, state, first, last in (
        ({}, at(batch=2, epoch=2), "epoch 3:  40%.*2/5", "epoch 3: 100%.*5/5"),
        ({}, at(batch=7, epoch_length=None), "epoch 1: 7it", "epoch 1: 10it"),
        ({"desc": "fold 1", "unit": "step"}, at(epoch_length=3), "fold 1: .*step", "3/3"),
        ({"total": 20}, at(epoch_length=4, epoch=1), " 4/20 ", " 7/20 "),  # a run that is measured in steps
    ):
        stream = io.StringIO()
        bar = bar_of(iter("abc"), stream, mininterval=0, **options)
        assert list(bar(state)) == ["a", "b", "c"]
        shown = drawings(stream)
        assert re.search(first, shown[0])
        assert re.search(last, shown[-1])
        assert closed(stream) == ("total" not in options)
        bar.close()


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves when told, in seconds."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: now[0])
    return now


def test_a_loop_that_becomes_slow_is_redrawn_at_every_batch(stream, clock):
    for batch in bar_of(range(2010), stream)(at(epoch_length=2010)):
        clock[0] += 0.001 if batch < 2000 else 2.0
    shown = [int(re.search(r"(\d+)/2010", line)[1]) for line in drawings(stream)]
    assert [n for n in shown if n > 2000] == [*range(2001, 2011), 2010]
    assert len([n for n in shown if n <= 2000]) < 25


def test_the_last_numbers_are_shown_whenever_the_bar_is_drawn(stream):
    bar = bar_of(range(3), stream, mininterval=0)
    for i in bar(at(epoch_length=3)):
        bar.show({"loss": Mean(torch.tensor(0.123456 + i), 1, times=4), "rows": [1, 2], "eval/accuracy": 0.5})
        bar.show({"eval/accuracy": 0.75, "grad_norm": torch.tensor(0.25)})
    first, *shown = drawings(stream)
    assert "loss" not in first
    assert [re.search(r"loss=([\d.]+)", line)[1] for line in shown] == ["0.1235", "1.123", "2.123", "2.123"]
    assert "loss=2.123, eval/accuracy=0.75, grad_norm=0.25]" in shown[-1]
    assert "rows" not in shown[-1]


def test_metrics_are_brought_to_the_host_only_to_be_drawn_and_let_go_at_the_end(stream):
    loss = Counted()
    bar = bar_of(range(100), stream, mininterval=1000)
    for i in bar(at(epoch_length=100)):
        bar.show({"loss": loss, "step": i})
        assert loss.threads == []
    assert len(loss.threads) == 1
    assert "loss=0.5, step=99]" in drawings(stream)[-1]
    for options, reads in (({}, 2), ({"disable": True}, 2)):  # once a bar, however often it is drawn
        bar = bar_of(range(5), stream, mininterval=0, **options)
        for i in bar(at()):
            if i == 0:
                bar.show({"loss": loss})
        assert len(loss.threads) == reads
    held = weakref.ref(loss)
    del loss
    assert held() is None


def test_a_line_of_another_thread_leaves_the_bar_whole_and_reads_no_metric(stream):
    loss = Counted()
    bar = bar_of(range(2), stream, mininterval=0, ncols=60)
    for i in bar(at(epoch_length=2)):
        bar.show({"loss": loss})
        writer = threading.Thread(target=console(file=stream), args=(at(step=i), {"x": 1.0}))
        writer.start()
        writer.join()
    lines = [line.rsplit("\r", 1)[-1] for line in stream.getvalue().split("\n")]
    assert [line.split()[:2] for line in lines[:2]] == [["step", "0"], ["step", "1"]]
    assert lines[2].startswith("epoch 1: 100%")
    assert set(loss.threads) == {threading.get_ident()}


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


def test_a_run_that_is_resumed_stopped_or_goes_back_keeps_its_place(stream):
    bar, state = run_of(stream, at(epoch_length=4, epoch=1, batch=2), stop=2)
    shown = [line for line in drawings(stream) if line.startswith("epoch")]
    assert shown[0].startswith("epoch 2/3:  50%")
    assert not closed(stream)
    for _ in bar(at(epoch_length=4, epoch=1)):  # back to a checkpoint
        pass
    assert "8/12" in drawings(stream)[-1]
    bar.close()
    assert closed(stream)
    text = stream.getvalue()
    bar.close()
    assert stream.getvalue() == text
    for _ in bar(state):  # a new bar
        break
    assert drawings(stream)[-1].startswith("epoch 3/3:  67%")
    assert closed(stream)


def test_what_is_refused():
    assert_each_refused(
        (lambda: progress([1]), TypeError, r"list.*ll.progress\(loader, epochs=10\)"),
        (lambda: progress(iter, epochs=0.5), ValueError, "epochs.* 0.5"),
        (lambda: progress(iter).show(0.5), TypeError, "float.*metrics"),
        (lambda: list(progress(lambda state: [1], colr="red")(at())), KeyError, "colr"),
    )


@pytest.mark.parametrize("where", ["loop", "batches"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
def test_leaving_the_loop_closes_the_bar_and_lets_go_of_the_batches(stream, error, where):
    ended = []

    def source():
        try:
            yield from range(5)
        finally:
            ended.append(True)

    def fail_at_2(at, batch):
        if error and (where, batch) == (at, 2):
            raise error("here")
        return batch

    bar = progress(lambda state: map(partial(fail_at_2, "batches"), source()), file=stream)
    caught = None
    try:
        for batch in bar(at()):
            bar.show({"loss": 0.5})
            if fail_at_2("loop", batch) == 2:
                break
    except (KeyboardInterrupt, RuntimeError) as found:
        caught = found  # whose traceback, as a notebook keeps it, still holds the frames
    assert type(caught) is (error or type(None))
    assert closed(stream)
    assert ended == [True]
    assert "2/5" in drawings(stream)[-1]
    assert "loss=0.5" in drawings(stream)[-1]


def test_an_error_while_drawing_closes_the_bar_and_frees_the_lock(stream):
    bar = bar_of(range(5), stream, mininterval=0)
    bar.show({"loss": Counted(KeyboardInterrupt())})
    with pytest.raises(KeyboardInterrupt):
        list(bar(at()))
    assert closed(stream)
    # This thread could take its own lock again, so another must try.

    def take():
        with tqdm.get_lock():
            pass

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    taker.join(timeout=300)
    assert not taker.is_alive()


PLAIN = """
import sys
import threading

from looplib.log import progress
from looplib.types import TrainState

assert "tqdm.auto" not in sys.modules
bar = progress(lambda state: range(3))
next(left_open := bar(TrainState(epoch_length=3)))
assert threading.active_count() == 1, "a thread was started"
bar.show({"loss": 0.5})
"""


@pytest.mark.slow
def test_a_plain_process_has_no_thread_and_no_warning_and_draws_on_the_error_stream():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PLAIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "epoch 1" in done.stderr
    assert not re.search("warning|error|exception", done.stderr, re.IGNORECASE)


def test_the_mean_of_the_finite_members_of_a_stack_is_shown(stream):
    bar = bar_of([0], stream, mininterval=0)
    for _ in bar(at(epoch_length=1)):
        bar.show({"loss": torch.tensor([1.0, float("nan"), 3.0]), "lost": torch.tensor([float("nan")] * 2)})
        bar.show({"matrix": torch.ones(2, 2)})
    assert "loss=2, lost=nan]" in drawings(stream)[-1]


def screen(text):
    """The lines that a terminal shows: a carriage return goes back to the start of the line, and text replaces text."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


@pytest.mark.parametrize("options", [{}, {"disable": True}])
def test_a_printed_line_stands_above_the_bar_as_print_writes_it(stream, options):
    bar = bar_of(range(3), stream, mininterval=0, ncols=79, **options)
    plain = io.StringIO()
    bar.print("before", file=stream)
    print("before", file=plain)
    for i in bar(at(epoch_length=3)):
        bar.print("batch", i, [i], sep=", ", end=".\n", file=stream)
        print("batch", i, [i], sep=", ", end=".\n", file=plain)
    bar.print("after", file=stream)
    print("after", file=plain)
    printed = plain.getvalue().splitlines()
    *lines, last = [line for line in screen(stream.getvalue()) if not line.startswith("epoch 1")]
    assert [*lines, last] == [*printed, ""]
    bars = [line for line in screen(stream.getvalue()) if line.startswith("epoch 1")]
    assert len(bars) == (0 if options else 1)
    assert options or "3/3" in bars[0]


def test_a_line_is_printed_to_standard_output_and_on_the_first_rank_only(capsys, monkeypatch):
    bar = progress(iter)
    bar.print("one", 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    bar.print("two", 2)
    assert capsys.readouterr().out == "one 1\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
def test_the_bar_of_a_run_is_closed_when_its_context_is_left_between_two_epochs(stream, error):
    made = bar_of(range(4), stream, epochs=3)
    caught = None
    try:
        with made as bar:
            assert bar is made
            list(bar(at(epoch_length=4)))
            assert not closed(stream)
            bar.show({"loss": 0.25})
            if error:
                raise error("here")
    except (KeyboardInterrupt, RuntimeError) as raised:
        caught = raised
    assert type(caught) is (error or type(None))
    assert closed(stream)
    assert "4/12" in drawings(stream)[-1]
    assert "loss=0.25" in drawings(stream)[-1]
    with bar_of([], stream):  # nothing to close
        pass
