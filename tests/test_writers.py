import csv
import gc
import io
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from looplib.metrics import Mean, compute
from looplib.sinks import console, jsonl, read_jsonl, tee
from looplib.state import TrainState, init_state
from looplib.writers import (
    Window,
    csv_file,
    first_rank_only,
    in_background,
    only,
    read_columns,
    record,
    rename,
    safely,
    tensorboard,
    wandb,
)

STATE = TrainState(step=7, epoch=2, batch=3, epoch_length=4, samples=96)
COUNTS = {"step": 7, "epoch": 2, "batch": 3, "samples": 96}


def at(step, samples=0):
    return TrainState(step=step, samples=samples)


def python(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60, **options
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.csv"


def table(path):
    """As the standard library reads it, which knows nothing of looplib."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# csv_file

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
numbers = st.floats() | st.integers() | st.booleans()
rows = st.lists(st.dictionaries(names.filter(lambda name: name not in COUNTS), numbers, max_size=4), min_size=1)


def bits(value):
    return (
        type(value),
        struct.pack("d", value) if isinstance(value, float) and not math.isnan(value) else str(value),
    )


@given(rows)
def test_every_number_in_any_growing_table_comes_back_with_its_type_and_bits(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    for step, row in enumerate(rows):
        csv_file(path)(at(step), row) if step % 3 else csv_file(str(path))(at(step), row)
    columns = read_columns(path)
    assert list(columns) == list(dict.fromkeys([*COUNTS, *(name for row in rows for name in row)]))
    assert columns["step"] == list(range(len(rows)))
    for name in columns.keys() - COUNTS.keys():
        assert [bits(value) for value in columns[name]] == [bits(row.get(name)) for row in rows]
    written = table(path)
    assert [line["step"] for line in written] == [str(step) for step in range(len(rows))]
    assert all(set(line) == set(columns) for line in written)


@given(st.lists(texts, min_size=1))
def test_any_text_reaches_other_readers_of_csv(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    log = csv_file(path)
    for step, value in enumerate(values):
        log(at(step), {"note": value})
    assert [row["note"] for row in table(path)] == values
    assert list(map(str, read_columns(path)["note"])) == [str(read_one(value)) for value in values]


def read_one(cell):
    """What Python's own literals say of a cell, where it is written as Python writes it."""
    if cell.removeprefix("-").isascii() and cell.removeprefix("-").isdigit():
        return int(cell)
    with suppress(ValueError):
        return float(cell) if repr(float(cell)) == cell else cell
    return cell


def test_rows_of_the_same_names_are_appended_and_a_new_name_keeps_the_file_mode_and_links(tmp_path, path):
    log = csv_file(tmp_path / "link.csv")
    log(at(1), {"a": 1})
    (tmp_path / "link.csv").rename(path)
    (tmp_path / "link.csv").symlink_to(path)
    path.chmod(0o640)
    inode = path.stat().st_ino
    log(at(2), {"a": 2})
    assert path.stat().st_ino == inode
    log(at(3), {"b": 3})
    assert path.stat().st_ino != inode
    assert path.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link.csv").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.csv", "log.csv"]
    assert read_columns(path)["b"] == [None, None, 3]


def test_a_table_cut_at_any_byte_loses_at_most_its_last_row(path):
    values = [{"x": math.inf, "text": 'é\n"5",'}, {"x": -0.5, "text": "\r\n"}]
    for step, row in enumerate(values):
        csv_file(path)(at(step), row)
    whole = path.read_bytes()
    ends = [len(whole[: whole.index(b"1,0,0,0,-0.5")]), len(whole)]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = values[: sum(cut >= end for end in ends)]
        assert read_columns(path).get("x", []) == [row["x"] for row in kept]
        csv_file(path)(at(9), {"x": 9.0, "text": "t"})
        columns = read_columns(path)
        assert columns["x"] == [*(row["x"] for row in kept), 9.0]
        assert [row["text"] for row in table(path)] == [*(row["text"] for row in kept), "t"]


ENDLESS = """
import itertools, sys
from looplib.writers import csv_file
from looplib.state import TrainState

log = csv_file(sys.argv[1])
for step in itertools.count():
    log(TrainState(step=step), {f"x{step // int(sys.argv[2])}": step, "text": 'x,"' * 3000})
    print(step, flush=True)
"""


def test_a_killed_process_loses_at_most_the_row_in_flight(path):
    every = 3  # rows to a column
    for first in (0, 1):  # the second one begins on what the first one left
        command = [sys.executable, "-c", ENDLESS, path, str(every)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(25):
                process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
            told = 24 + len([line for line in process.stdout.read().splitlines(True) if line.endswith("\n")])
        columns = read_columns(path)
        assert columns["step"] == list(range(len(columns["step"])))
        assert len(columns["step"]) > told * (1 - first)
        for name in columns:
            if name.startswith("x"):
                group = int(name[1:])
                assert columns[name] == [step if step // every == group else None for step in columns["step"]]


@contextmanager
def file_size_limit(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_and_leaves_the_table_whole(path):
    log = csv_file(path)
    log(at(1), {"a": 1.0})
    before = path.read_bytes()
    for name in ("a", "b"):
        with file_size_limit(len(before) + 30), pytest.raises(OSError, match="File too large"):
            log(at(2), {name: "x" * 100})
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == ["log.csv"]
    log(at(3), {"a": 3.0})
    assert read_columns(path)["a"] == [1.0, 3.0]
    with pytest.raises(OSError, match="No space left"):
        csv_file("/dev/full")(STATE, {"x": 1.0})


def test_two_sinks_and_a_removed_file(path):
    first, second = csv_file(path), csv_file(path)
    first(at(1), {"a": 1})
    second(at(2), {"b": 2})
    first(at(3), {"a": 3})
    assert read_columns(path)["a"] == [1, None, 3]
    path.unlink()
    first(at(4), {"c": 4})
    assert read_columns(path) == {"step": [4], "epoch": [0], "batch": [0], "samples": [0], "c": [4]}


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "a", '{"step":1}\n', "\n"])
def test_a_file_of_another_kind_is_left_alone(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match=r"log\.csv is no log of csv_file: it begins with .* give another path"):
        csv_file(path)(STATE, {"x": 1.0})
    assert path.read_text() == text


@pytest.mark.parametrize("make", [csv_file, lambda path: record([]), lambda path: record({})])
def test_what_cannot_be_written_is_refused_by_name(path, make):
    with pytest.raises(TypeError, match=r"'x' is a Tensor of shape \(2,\)"):
        make(path)(STATE, {"x": torch.zeros(2)})
    with pytest.raises(ValueError, match="'step' is taken by the state's own"):
        make(path)(STATE, {"step": 1})
    assert not path.exists()


# record


def test_rows_and_columns_hold_what_jsonl_holds(tmp_path):
    rows, columns = [], {}
    log = tee(record(rows), record(columns), jsonl(tmp_path / "log"), csv_file(tmp_path / "log.csv"))
    log(at(1), {"a": torch.tensor(0.5), "s": "text"})
    log(at(2), {"b": np.float32(0.25), "flag": True})
    assert rows == read_jsonl(tmp_path / "log")
    assert columns == read_columns(tmp_path / "log") == read_columns(tmp_path / "log.csv")
    assert columns["a"] == [0.5, None]


# read_columns


@given(data=st.data())
def test_resumed_runs_are_joined_without_doubled_or_lost_steps(tmp_path_factory, data):
    """Any number of passes over one run, each from a checkpoint at or before the last step that was logged."""
    folder = tmp_path_factory.mktemp("log")
    log = tee(jsonl(folder / "log.jsonl"), csv_file(folder / "log.csv"))
    train, evals = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    step = start = 0
    for attempt in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, step))
        stop = start + data.draw(st.integers(1, 10))
        for step in range(start + 1, stop + 1):
            if step % train == 0:
                log(at(step, samples=8 * step), {"loss": step / 10, "pass": attempt})
            if step % evals == 0:
                log(at(step, samples=8 * step), {"auc": -step})
    for name in ("log.jsonl", "log.csv"):
        if not (folder / name).exists():
            continue
        columns = read_columns(folder / name)
        logged = [n for n in range(1, columns["step"][-1] + 1) if n % train == 0 or n % evals == 0]
        assert columns["step"] == logged
        if step in logged:
            assert logged[-1] == step
        if "loss" in columns:
            assert columns["loss"] == [n / 10 if n % train == 0 else None for n in logged]
            passes = [(n, p) for n, p in zip(logged, columns["pass"], strict=True) if p is not None]
            assert all(p == attempt for n, p in passes if start < n <= step)
        if "auc" in columns:
            assert columns["auc"] == [-n if n % evals == 0 else None for n in logged]


def test_steps_without_an_update_are_told_apart_and_another_batch_size_replaces(tmp_path):
    log = jsonl(tmp_path / "log")
    for step, samples in [(1, 8), (1, 16), (2, 24), (3, 32)]:
        log(at(step, samples), {"loss": samples})
    assert read_columns(tmp_path / "log")["loss"] == [8, 16, 24, 32]
    log(at(2, 28), {"loss": -1})
    assert read_columns(tmp_path / "log")["loss"] == [8, 16, -1]
    assert read_columns(tmp_path / "log")["samples"] == [8, 16, 28]


def test_reading_no_log_is_an_error(path):
    with pytest.raises(FileNotFoundError, match=r"log\.csv"):
        read_columns(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no log of csv_file"):
        read_columns(path)


# rename, only, first_rank_only


def test_rename_and_only_hand_on_what_they_say():
    calls = []

    def sink(state, values):
        calls.append((state, values))

    values = {"train/loss": 1.0, "eval/auc": 2.0}
    rename(sink, {"eval/auc": "eval_auc"})(STATE, values)
    rename(sink, lambda name: name.replace("/", "_"))(STATE, values)
    only(sink, ["eval/auc"])(STATE, values)
    only(sink, lambda name: name.startswith("train/"))(STATE, values)
    only(sink, {"other"})(STATE, values)
    assert calls == [
        (STATE, {"train/loss": 1.0, "eval_auc": 2.0}),
        (STATE, {"train_loss": 1.0, "eval_auc": 2.0}),
        (STATE, {"eval/auc": 2.0}),
        (STATE, {"train/loss": 1.0}),
    ]
    assert values == {"train/loss": 1.0, "eval/auc": 2.0}


def test_two_values_of_one_name_and_a_single_name_are_refused():
    with pytest.raises(ValueError, match="'a/x' and 'b/x' would both be named 'x'"):
        rename(console(), lambda name: name[-1])(STATE, {"a/x": 1, "b/x": 2})
    with pytest.raises(TypeError, match=r"found the str 'loss'; write \['loss'\]"):
        only(console(), "loss")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_writes(tmp_path, rank):
    log = first_rank_only(jsonl(tmp_path / "log"))
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        log(STATE, {"x": 1.0})
    finally:
        distributed.destroy_process_group()
    assert (tmp_path / "log").exists() == (rank == 0)


# safely and in_background


def test_safely_tells_the_first_error_at_the_line_of_the_call_and_tries_again(tmp_path):
    log = safely(jsonl(tmp_path / "log"))
    (tmp_path / "log").mkdir()
    with pytest.warns(RuntimeWarning, match=r"jsonl\(.*\) failed at step 7: IsADirectoryError.*goes on") as told:
        log(STATE, {"x": 1})
    log(STATE, {"x": 1})  # a second warning would be an error here
    assert [os.path.basename(warning.filename) for warning in told] == ["test_writers.py"]
    (tmp_path / "log").rmdir()
    log(STATE, {"x": 2})
    assert read_jsonl(tmp_path / "log") == [{**COUNTS, "x": 2}]


def test_an_interrupt_passes_safely():
    def interrupted(state, values):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        safely(interrupted)(STATE, {})


def test_calls_reach_the_inner_sink_in_order_and_by_another_thread():
    got = []
    log = in_background(lambda state, values: got.append((state.step, values, threading.get_ident())))
    for step in range(500):
        log(at(step), {"x": step})
    log.flush()
    assert [(step, values) for step, values, _ in got] == [(step, {"x": step}) for step in range(500)]
    assert threading.get_ident() not in {thread for *_, thread in got}
    log.close()
    log(at(500), {})
    log.close()
    log.close()
    assert len(got) == 501
    assert not [thread for thread in threading.enumerate() if thread.name == repr(log)]


def test_a_slow_sink_holds_nothing_up_and_what_does_not_fit_is_counted():
    gate, got = threading.Event(), []

    def slow(state, values):
        gate.wait()
        got.append(state.step)

    log = in_background(slow, max_pending=3)
    log(at(0), {})
    while log._queue.qsize():
        time.sleep(0.001)
    for step in range(1, 4):
        log(at(step), {})
    with pytest.warns(RuntimeWarning, match=r"slow .* is behind by 3 calls; the one at step 4 is lost"):
        log(at(4), {})
    for step in range(5, 9):
        log(at(step), {})
    gate.set()
    with pytest.warns(RuntimeWarning, match=r"lost 5 of 9 calls; 5 came while 3 waited"):
        log.flush()
    assert got == [0, 1, 2, 3]
    log(at(9), {})
    log.close()  # what is lost was told
    assert got[-1] == 9


def test_an_error_is_told_once_and_counted_and_later_calls_are_tried(tmp_path):
    log = in_background(jsonl(tmp_path / "log"))
    (tmp_path / "log").mkdir()
    log(at(1), {"x": 1})
    while not log._finished:
        time.sleep(0.001)
    with pytest.warns(RuntimeWarning, match="failed at step 1: IsADirectoryError.*goes on") as told:
        log(at(2), {"x": 2})
    log(at(3), {"x": 3})
    assert [os.path.basename(warning.filename) for warning in told] == ["test_writers.py"]
    with pytest.warns(RuntimeWarning, match="lost 3 of 3 calls; 3 failed, the first at step 1: IsADirectoryError"):
        log.flush()
    (tmp_path / "log").rmdir()
    log(at(4), {"x": 4})
    log.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "log")] == [4]


def test_the_values_of_the_call_are_written_and_no_parameter_is_kept():
    gate, got = threading.Event(), []

    def sink(state, values):
        gate.wait()
        got.append((state, values))

    log = in_background(sink)
    state = init_state(torch.nn.Linear(2, 2)).replace(step=3, samples=5)
    held = weakref.ref(state.params["weight"])
    vector, array, values = torch.ones(3), np.ones(3), {"x": 1.0}
    log(state, {**values, "vector": vector, "array": array})
    vector.zero_()
    array[:] = 0
    del state
    gc.collect()
    assert held() is None
    gate.set()
    log.close()
    ((seen, values),) = got
    assert (seen.step, seen.samples, dict(seen.params)) == (3, 5, {})
    assert values["vector"].tolist() == values["array"].tolist() == [1, 1, 1]


def test_a_hung_sink_does_not_hold_flush_beyond_its_patience():
    gate = threading.Event()
    log = in_background(lambda state, values: gate.wait(), patience=0.05)
    log(at(1), {})
    log(at(2), {})
    with pytest.warns(RuntimeWarning, match=r"lost 2 of 2 calls; 2 wait still, and none was finished in 0.05 sec"):
        log.close()
    gate.set()
    log.close()


def test_max_pending_must_be_positive():
    with pytest.raises(ValueError, match="max_pending is 0; at least one call"):
        in_background(console(), 0)


PROGRAM = """
import itertools, os, resource, signal, sys, time
import torch
from looplib.sinks import jsonl
from looplib.state import TrainState
from looplib.writers import csv_file, in_background, safely

path, how = sys.argv[1:]
done = jsonl(path)

def slow(state, values):
    time.sleep(0.01)
    done(state, values)

if how == "disk":
    log = in_background(csv_file("/dev/full"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    limited, guarded = in_background(csv_file(path)), safely(csv_file(path + ".safely"))
    for step in range(1000):
        for each in (log, limited, guarded):
            each(TrainState(step=step), {"x": step})
    hung = in_background(lambda state, values: time.sleep(1000), patience=0.1)
    hung(TrainState(step=1), {})
    print("trained")
else:
    log = in_background(slow)
    for step in range(30):
        log(TrainState(step=step), {})
    if how == "workers":
        for step, _ in enumerate(torch.utils.data.DataLoader(range(40), num_workers=2, batch_size=2), 30):
            log(TrainState(step=step), {})
        raise SystemExit(3)
    pid = os.fork()
    if not pid:
        log(TrainState(step=10**6), {})
        sys.exit(0)  # which runs what is registered for the end
    assert os.waitpid(pid, 0)[1] == 0
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    for step in itertools.count(30):
        log(TrainState(step=step), {})
        time.sleep(0.001)
"""


def test_all_is_written_when_a_process_with_workers_leaves(path):
    result = python(PROGRAM, path, "workers")
    assert result.returncode == 3, result.stderr
    assert [row["step"] for row in read_jsonl(path)] == list(range(50))


def test_all_is_written_after_an_interrupt_and_a_fork_writes_its_own_calls_alone(path):
    result = python(PROGRAM, path, "interrupt")
    assert result.returncode == -signal.SIGINT, result.stderr
    steps = [row["step"] for row in read_jsonl(path)]
    assert steps.count(10**6) == 1
    steps.remove(10**6)
    assert len(steps) >= 30
    assert steps == list(range(len(steps)))


def test_a_full_disk_and_a_hung_server_stop_no_training_nor_its_end_and_are_told(path):
    result = python(PROGRAM, path, "disk")
    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    told = [line for line in result.stderr.splitlines() if "RuntimeWarning" in line]
    assert sum("csv_file('/dev/full') lost 1000 of 1000 calls; 1000 failed" in line for line in told) == 1
    assert sum("No space left on device" in line and "goes on" in line for line in told) <= 1
    assert sum(".safely') failed at step" in line and "File too large" in line for line in told) == 1
    steps = read_columns(path)["step"]
    assert 0 < len(steps) < 1000
    assert steps == read_columns(f"{path}.safely")["step"] == list(range(len(steps)))
    assert sum(f"lost {1000 - len(steps)} of 1000 calls" in line for line in told) == 1
    assert sum("lost 1 of 1 calls; 1 wait still" in line for line in told) == 1


# Window


@given(
    some=st.lists(st.tuples(st.fractions(), st.fractions(), st.integers(1, 4)), min_size=1, max_size=10),
    steps=st.integers(1, 300),
)
def test_a_window_is_the_sum_of_its_steps(some, steps):
    parts = [some[step % len(some)] for step in range(steps)]
    window = Window()
    for total, weight, times in parts:
        earlier = window
        window = window.add({"loss": Mean(total, weight, times=times), "n": Mean(1)})
        assert len(window) == len(earlier) + 1
    assert len(window) == len(parts)
    loss = window.metrics()["loss"]
    assert loss.total * loss.times == sum((total * times for total, _, times in parts), Fraction(0))
    assert loss.weight * loss.times == sum((weight * times for _, weight, times in parts), Fraction(0))
    assert window.metrics()["n"].compute() == (1 if len(parts) == 1 else 1.0)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(1, 9)), min_size=1, max_size=150))
def test_a_window_of_tensors_is_the_mean_of_all_in_float64(parts):
    window = Window()
    for total, weight in parts:
        window = window.add({"loss": Mean(torch.tensor(total), weight)})
    totals, weights = zip(*parts, strict=True)
    expected = math.fsum(totals) / sum(weights)
    got = compute(window.metrics(), prefix="train/")["train/loss"]
    assert got == pytest.approx(expected, rel=1e-6 if len(parts) == 1 else 1e-12, abs=1e-9)


def test_a_window_asks_no_tensor_for_its_value():
    """On the meta device nothing has a value, so whatever asked for one would raise."""
    window = Window()
    for _ in range(200):
        window = window.add({"loss": Mean(torch.empty((), device="meta"), 3)})
        assert len(window.waiting) < 64
    assert window.metrics()["loss"].total.device.type == "meta"


def test_an_empty_window_and_other_names_are_refused():
    with pytest.raises(ValueError, match="the window is empty; add the metrics"):
        Window().metrics()
    with pytest.raises(ValueError, match=r"found \['a'\] and \['b'\]"):
        Window().add({"a": Mean(1.0)}).add({"b": Mean(1.0)}).metrics()


# tensorboard


def events_of(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0}).Reload()


def test_tensorboard_reads_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    board = tensorboard(tmp_path / "run", hyperparameters={"lr": 0.5, "layers": 3, "name": "mlp", "fused": True})
    vector = torch.randn(1000).bfloat16()
    picture = torch.rand(3, 5, 7)
    for step in range(10):
        board(at(step), {"train/loss": torch.tensor(step / 4), "best": step == 3, "nan": math.nan})
    board(at(10), {"vector": vector, "picture": picture, "bytes": np.full((1, 4, 4), 200, np.uint8), "note": "warm"})
    board(at(11), {"vector": torch.tensor([math.nan, 1.0, math.inf]), "none": torch.tensor([math.nan])})
    events = events_of(tmp_path / "run")
    assert set(events.Tags()["scalars"]) == {"train/loss", "best", "nan"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(n, n / 4) for n in range(10)]
    assert [event.value for event in events.Scalars("best")] == [float(n == 3) for n in range(10)]
    assert math.isnan(events.Scalars("nan")[0].value)
    first, second = events.Histograms("vector")
    assert (first.step, first.histogram_value.num, second.histogram_value.num) == (10, 1000, 1)
    assert first.histogram_value.sum == pytest.approx(vector.double().sum().item(), rel=1e-3)
    assert (first.histogram_value.min, first.histogram_value.max) == (vector.min().item(), vector.max().item())
    assert sum(first.histogram_value.bucket) == 1000
    assert events.Tags()["histograms"] == ["vector"]
    (image,) = events.Images("picture")
    np.testing.assert_array_equal(pixels(image.encoded_image_string), (picture * 255).byte().permute(1, 2, 0))
    (image,) = events.Images("bytes")
    assert set(pixels(image.encoded_image_string).flat) == {200}
    (text,) = events.Tensors("note/text_summary")
    assert text.tensor_proto.string_val[0] == b"warm"

    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["lr"].number_value == 0.5
    assert hparams["layers"].number_value == 3
    assert hparams["name"].string_value == "mlp"
    assert set(hparams) == {"lr", "layers", "name", "fused"}


def pixels(encoded):
    return np.asarray(Image.open(io.BytesIO(encoded)))


def test_tensorboard_leaves_out_what_a_resumed_run_logs_anew(tmp_path):
    pytest.importorskip("tensorboard")
    first = tensorboard(tmp_path)
    for step in range(1, 9):
        first(at(step), {"loss": float(step)})
    time.sleep(1.1)  # files of one directory are read in the order of the second in their names
    second = tensorboard(tmp_path)
    for step in range(5, 7):
        second(at(step), {"loss": -float(step)})
    got = [(event.step, event.value) for event in events_of(tmp_path).Scalars("loss")]
    assert got == [(1, 1), (2, 2), (3, 3), (4, 4), (5, -5), (6, -6)]


def test_tensorboard_reads_on_after_a_full_disk(tmp_path):
    pytest.importorskip("tensorboard")
    log = tensorboard(tmp_path)
    log(at(1), {"x": 1.0})
    with file_size_limit(400), pytest.raises(OSError, match="File too large"):
        log(at(2), {"x": "x" * 1000})
    log(at(3), {"x": 3.0})
    assert [(event.step, event.value) for event in events_of(tmp_path).Scalars("x")] == [(1, 1), (3, 3)]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 3), (1, 1, 1, 1)])
def test_tensorboard_refuses_other_shapes_by_name(tmp_path, shape):
    pytest.importorskip("tensorboard")
    with pytest.raises(TypeError, match=r"'w' is a Tensor of shape .* give .flatten\(\)"):
        tensorboard(tmp_path)(STATE, {"w": torch.zeros(shape)})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("make", "name"), [(lambda: tensorboard("x"), "tensorboard"), (wandb, "wandb")])
def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch, make, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"needs its package: pip install looplib\[{name}\]"):
        make()


# wandb

OFFLINE = """
import sys, numpy as np, torch
from looplib.state import TrainState
from looplib.writers import in_background, wandb

log = wandb(project="digits", dir=sys.argv[1], config={"lr": 0.5}, settings={"silent": True, "console": "off"})
log = in_background(log)
log(TrainState(step=3), {"train/loss": 0.25, "note": "warm"})
log(TrainState(step=3), {"eval/auc": 0.75})
log(TrainState(step=5), {"vector": torch.arange(10.0), "picture": torch.ones(1, 4, 4) / 2})
"""


def records_of(path):
    """The records of W&B's file: a LevelDB log of blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def test_wandb_holds_what_was_logged_offline(tmp_path):
    pytest.importorskip("wandb")
    result = python(OFFLINE, tmp_path, env={**os.environ, "WANDB_ERROR_REPORTING": "false"})
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history, config = {}, {}
    for one in records_of(path):
        for item in one.history.item:
            history.setdefault(one.history.step.num, {})[item.key or "/".join(item.nested_key)] = item.value_json
        for item in one.run.config.update:
            config[item.key] = item.value_json
    assert json.loads(config["lr"]) == 0.5
    assert json.loads(history[3]["train/loss"]) == 0.25
    assert json.loads(history[3]["note"]) == "warm"
    assert json.loads(history[3]["eval/auc"]) == 0.75
    assert set(history) == {3, 5}
    # The one picture that it keeps is half gray, of 8 bits.
    (picture,) = path.parent.glob("files/media/images/*.png")
    assert set(pixels(picture.read_bytes()).flat) == {127}
    assert json.loads(history[5]["picture/_type"]) == "image-file"
    assert sum(json.loads(history[5]["vector/values"])) == 10


def test_reprs_read_as_the_code_that_made_them(tmp_path):
    inner = f"first_rank_only(csv_file({str(tmp_path / 'log.csv')!r}))"
    code = f"in_background(safely(only(rename({inner}, {{'a': 'b'}}), ['b'])), max_pending=5)"
    assert repr(eval(code)) == code
