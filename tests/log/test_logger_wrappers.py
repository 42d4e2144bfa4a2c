"""Logger wrappers: with real processes that end and hang, and full disks."""

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from shared import COUNTS, STATE, at, python
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from looplib.log import (
    every_rank,
    in_background,
    jsonl,
    read_jsonl,
    record,
    rename,
    safely,
    select,
    tee,
    tracker,
    windowed,
)
from looplib.metrics import Mean
from looplib.predicates import every_n_steps
from looplib.state import init_state


def test_rename_and_only_hand_on_what_they_say():
    values = {"train/loss": 1.0, "eval/auc": 2.0}
    for wrap, passed in (
        (lambda logger: rename(logger, {"eval/auc": "eval_auc"}), [{"train/loss": 1.0, "eval_auc": 2.0}]),
        (lambda logger: rename(logger, lambda name: name[-3:]), [{"oss": 1.0, "auc": 2.0}]),
        (lambda logger: select(logger, ["eval/auc"]), [{"eval/auc": 2.0}]),
        (lambda logger: select(logger, lambda name: name.startswith("train/")), [{"train/loss": 1.0}]),
        (lambda logger: select(logger, {"other"}), []),
    ):
        calls = []
        wrap(lambda *call, calls=calls: calls.append(call))(STATE, values)
        assert calls == [(STATE, each) for each in passed]
    assert values == {"train/loss": 1.0, "eval/auc": 2.0}


def test_windowed_logs_the_means_over_each_window():
    rows = []
    log = windowed(record(rows), every_n_steps(2), prefix="train/")
    for step, (total, weight) in enumerate([(1.0, 1), (6.0, 3), (4.0, 1), (2.0, 2), (9.0, 1)], 1):
        log(at(step), {"loss": Mean(total, weight)})
    assert [(row["step"], row["train/loss"]) for row in rows] == [(2, 1.75), (4, 2.0)]


def test_the_first_rank_alone_writes_unless_each_is_to(tmp_path):
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        makes = [jsonl, lambda path: tracker("tensorboard", path)]
        quiet = [make(folder / f"quiet{i}") for i, make in enumerate(makes)]
        loud = [every_rank(make(folder / f"loud{i}")) for i, make in enumerate(makes)]
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            tee(*quiet, *loud)(STATE, {"x": 1.0})
        finally:
            distributed.destroy_process_group()
        written = {path.name[:-1] for path in folder.iterdir()}
        assert written == ({"loud", "quiet"} if rank == 0 else {"loud"})
        assert len([*folder.iterdir()]) == 2 * len(written)


# safely and in_background


def test_safely_tells_the_first_error_at_the_line_of_the_call_and_tries_again(tmp_path):
    log = safely(jsonl(tmp_path / "log"))
    (tmp_path / "log").mkdir()
    with pytest.warns(RuntimeWarning, match=r"jsonl\(.*\) failed at step 7: IsADirectoryError.*continues") as told:
        log(STATE, {"x": 1})
    log(STATE, {"x": 1})  # a second warning would be an error here
    assert [os.path.basename(warning.filename) for warning in told] == [os.path.basename(__file__)]
    (tmp_path / "log").rmdir()
    log(STATE, {"x": 2})
    assert read_jsonl(tmp_path / "log") == [{**COUNTS, "x": 2}]


def test_calls_reach_the_inner_logger_in_order_and_by_another_thread():
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


def test_a_slow_logger_holds_nothing_up_and_what_does_not_fit_is_counted():
    gate, got = threading.Event(), []

    def slow(state, values):
        gate.wait()
        got.append(state.step)

    log = in_background(slow, max_pending=3)
    log(at(0), {})
    while log._calls.qsize():
        time.sleep(0.001)
    for step in range(1, 4):
        log(at(step), {})
    with pytest.warns(RuntimeWarning, match=r"slow .* lost 1 of 5 calls; at step 4, 3 calls were waiting"):
        log(at(4), {})
    for step in range(5, 9):
        log(at(step), {})
    gate.set()
    with pytest.warns(RuntimeWarning, match=r"lost 5 of 9 calls"):
        log.flush()
    assert got == [0, 1, 2, 3]
    log(at(9), {})
    log.close()  # what is lost was told
    assert got[-1] == 9


def test_an_error_is_told_once_and_counted_and_later_calls_are_tried(tmp_path):
    log = in_background(jsonl(tmp_path / "log"))
    (tmp_path / "log").mkdir()
    log(at(1), {"x": 1})
    while not log._failed:
        time.sleep(0.001)
    with pytest.warns(RuntimeWarning, match="lost 1 of 2 calls; at step 1 .*IsADirectoryError.*continues") as told:
        log(at(2), {"x": 2})
    log(at(3), {"x": 3})
    assert [os.path.basename(warning.filename) for warning in told] == [os.path.basename(__file__)]
    with pytest.warns(RuntimeWarning, match="lost 3 of 3 calls; at step 1 .*IsADirectoryError"):
        log.flush()
    (tmp_path / "log").rmdir()
    log(at(4), {"x": 4})
    log.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "log")] == [4]


@pytest.mark.slow
def test_the_values_of_the_call_are_written_and_no_parameter_is_kept():
    gate, got = threading.Event(), []

    def logger(state, values):
        gate.wait()
        got.append((state, values))

    log = in_background(logger)
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


PROGRAM = """
import os, sys, time
import torch
from looplib.log import in_background, jsonl
from looplib.types import TrainState

folder = sys.argv[1]
for how in ("disk", "workers"):  # each in a fork, which ends as any process does
    if not os.fork():
        for descriptor, name in ((1, "out"), (2, "error")):
            os.dup2(os.open(f"{folder}/{how}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        break
    print(how, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    raise SystemExit
done = jsonl(f"{folder}/{how}.jsonl")

def slow(state, values):
    time.sleep(0.01)
    done(state, values)

if how == "disk":
    full = in_background(jsonl("/dev/full"))
    hung = in_background(lambda state, values: time.sleep(1000), patience=0.1)
    for step in range(1000):
        full(TrainState(step=step), {"x": step})
    hung(TrainState(step=1), {})
    print("trained")
else:
    log = in_background(slow)
    for step in range(30):
        log(TrainState(step=step), {})
    for step, _ in enumerate(torch.utils.data.DataLoader(range(40), num_workers=2, batch_size=2), 30):
        log(TrainState(step=step), {})
    raise SystemExit(3)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder in which both ways of the program have run, and their exit codes."""
    folder = tmp_path_factory.mktemp("ended")
    result = python(PROGRAM, folder)
    assert result.returncode == 0, result.stderr
    return folder, dict(line.split() for line in result.stdout.splitlines())


@pytest.mark.slow
def test_all_is_written_when_a_process_with_workers_leaves(ended):
    folder, codes = ended
    assert codes["workers"] == "3", (folder / "workers.error").read_text()
    assert [row["step"] for row in read_jsonl(folder / "workers.jsonl")] == list(range(50))


@pytest.mark.slow
def test_a_full_disk_and_a_hung_server_stop_no_training_nor_its_end_and_are_told(ended):
    folder, codes = ended
    error = (folder / "disk.error").read_text()
    assert (codes["disk"], (folder / "disk.out").read_text()) == ("0", "trained\n"), error
    told = [line for line in error.splitlines() if "RuntimeWarning" in line]
    assert sum("jsonl('/dev/full') lost 1000 of 1000 calls" in line for line in told) == 1
    assert any("No space left on device" in line and "continues" in line for line in told)
    assert sum("not written 1 of 1 calls" in line for line in told) == 1
