import enum
import io
import json
import math
import os
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looplib.log import console, jsonl, read_jsonl, tee
from looplib.metrics import Mean
from looplib.types import TrainState

STATE = TrainState(step=7, epoch=2, batch=3, epoch_length=4, samples=96)
COUNTS = {"step": 7, "epoch": 2, "batch": 3, "samples": 96}


def strict_json(line):
    """As a reader that knows no NaN and no Infinity, the way the JSON standard has it."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def bits(number):
    return "nan" if math.isnan(number) else struct.pack("d", number)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


# jsonl and read_jsonl


def test_a_line_holds_counts_and_values_in_order(path):
    log = jsonl(path)
    log(STATE, {"train/loss": 0.3, "note": "warm\nup", "best": True, "k": 5})
    line = path.read_bytes()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    expected = {**COUNTS, "train/loss": 0.3, "note": "warm\nup", "best": True, "k": 5}
    assert list(strict_json(line).items()) == list(expected.items())
    assert read_jsonl(path) == [expected]


@given(
    values=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])).filter(lambda name: name not in COUNTS),
        st.floats()
        | st.floats(allow_subnormal=True, min_value=-1e-300, max_value=1e-300)
        | st.integers(-(2**63), 2**64 - 1)
        | st.booleans(),
    )
)
def test_every_number_comes_back_with_its_type_and_bits(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    jsonl(path)(STATE, values)
    raw = strict_json(path.read_text(encoding="utf-8"))
    (row,) = read_jsonl(path)
    assert list(row) == list(raw) == [*COUNTS, *values]
    for name, value in values.items():
        assert type(row[name]) is type(value)
        if isinstance(value, float):
            assert bits(row[name]) == bits(float(raw[name])) == bits(value)
        else:
            assert row[name] == raw[name] == value


class Phase(enum.IntEnum):
    WARMUP = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor(math.nan), math.nan),
        (torch.tensor(3), 3),
        (torch.tensor(True), True),
        (np.float64(0.5), 0.5),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float64("inf"), math.inf),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(0.5), 0.5),
        (np.str_("a"), "a"),
        (Phase.WARMUP, 3),
    ],
)
def test_scalars_of_torch_and_numpy_are_plain_values(path, value, expected):
    jsonl(path)(STATE, {"x": value})
    (row,) = read_jsonl(path)
    assert type(row["x"]) is type(expected)
    np.testing.assert_equal(row["x"], expected)


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (torch.zeros(2, 3), ["Tensor of shape (2, 3)", ".mean()"]),
        (np.zeros(4), ["ndarray of shape (4,)", ".mean()"]),
        ({"a": 1.0}, ["dict", "'train/loss/0'"]),
        (None, ["NoneType", "leave it out"]),
        (torch.tensor(1j), ["complex", "float()"]),
        (Mean(torch.tensor(3.0), 2), ["Mean", "ll.compute(metrics)"]),
    ],
)
@pytest.mark.parametrize("make", [jsonl, lambda path: console()])
def test_what_is_no_single_value_is_refused_by_name(path, make, value, parts):
    with pytest.raises(TypeError) as error:
        make(path)(STATE, {"fine": 1.0, "train/loss": value})
    for part in ["'train/loss'", *parts]:
        assert part in str(error.value)
    assert not path.exists()


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_an_integer_that_json_readers_would_round_is_refused(path, value):
    with pytest.raises(TypeError, match="64-bit"):
        jsonl(path)(STATE, {"seed": value})
    jsonl(path)(STATE, {"seed": str(value)})
    assert read_jsonl(path)[0]["seed"] == str(value)


@pytest.mark.parametrize("name", COUNTS)
def test_a_name_of_the_counts_is_refused(path, name):
    with pytest.raises(ValueError, match=f"'{name}' is taken .* 'train/{name}'"):
        jsonl(path)(STATE, {name: 1.0})


def test_folders_are_made_and_an_earlier_log_is_kept(tmp_path):
    path = tmp_path / "runs" / "digits" / "log.jsonl"
    first = jsonl(path)
    assert not path.parent.exists()
    first(STATE, {"x": 1.0})
    jsonl(str(path))(STATE, {"x": 2.0})
    first(STATE, {"x": 3.0})
    assert [row["x"] for row in read_jsonl(path)] == [1.0, 2.0, 3.0]


def test_a_relative_path_stays_where_it_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = jsonl("log.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    log(STATE, {})
    assert read_jsonl(tmp_path / "log.jsonl") == [COUNTS]


def test_a_log_cut_at_any_byte_loses_at_most_its_last_line(path):
    rows = [{**COUNTS, "x": x, "text": "é}\n{"} for x in (math.inf, -0.5)]
    for row in rows:
        jsonl(path)(STATE, {name: row[name] for name in ("x", "text")})
    whole = path.read_bytes()
    first = whole.index(b"\n")
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        # A line that lacks nothing but its newline is whole.
        kept = rows[: (cut >= first) + (cut >= len(whole) - 1)]
        assert read_jsonl(path) == kept
        jsonl(path)(STATE, {"x": 9.0})
        assert read_jsonl(path) == [*kept, {**COUNTS, "x": 9.0}]


ENDLESS = """
import itertools, sys
from looplib.log import jsonl
from looplib.types import TrainState

log = jsonl(sys.argv[1])
for step in itertools.count():
    log(TrainState(step=step), {"text": "x" * 1000})
    print(step, flush=True)
"""


def test_a_killed_process_loses_at_most_the_line_in_flight(path):
    with subprocess.Popen([sys.executable, "-c", ENDLESS, path], stdout=subprocess.PIPE, text=True) as process:
        for _ in range(50):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        told = 49 + len([line for line in process.stdout.read().splitlines(True) if line.endswith("\n")])
    steps = [row["step"] for row in read_jsonl(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > told


def test_a_full_disk_is_an_error():
    with pytest.raises(OSError, match="No space left"):
        jsonl("/dev/full")(STATE, {"x": 1.0})


def test_reading_no_log_is_an_error(path):
    with pytest.raises(FileNotFoundError, match=r"log\.jsonl"):
        read_jsonl(path)


# console


def printed(log, state, values):
    stream = io.StringIO()
    console(file=stream)(state, values) if log is None else log(stream)(state, values)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.693147, "0.6931"),
        (1e-5, "1e-05"),
        (123456.0, "1.235e+05"),
        (123456, "123456"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (True, "True"),
        ("warm", "warm"),
        (torch.tensor(0.25), "0.25"),
    ],
)
def test_console_shows_four_digits_of_floats_and_all_of_others(value, text):
    assert printed(None, STATE, {"x": value}).split() == ["step", "7", "epoch", "2.75", "x", text]


def test_console_counts_whole_epochs_of_a_stream():
    assert printed(None, STATE.replace(epoch_length=None), {}).split() == ["step", "7", "epoch", "2"]


@given(
    steps=st.lists(st.integers(0, 999_999), min_size=2, max_size=2),
    rows=st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=2, max_size=2),
)
def test_console_lines_of_the_same_names_are_aligned(steps, rows):
    stream = io.StringIO()
    log = console(file=stream)
    for step, row in zip(steps, rows, strict=True):
        log(STATE.replace(step=step), dict(zip("abc", row, strict=True)))
    first, second = stream.getvalue().splitlines()
    for name in (" epoch ", " a ", " b ", " c "):
        assert first.index(name) == second.index(name)


def test_console_keeps_the_order_in_which_names_first_came():
    stream = io.StringIO()
    log = console(file=stream)
    log(STATE, {"b": 1, "a": 2})
    log(STATE, {"c": 3})
    log(STATE, {"c": 6, "a": 5, "b": 4})
    names = [line.split()[4::2] for line in stream.getvalue().splitlines()]
    assert names == [["b", "a"], ["c"], ["b", "a", "c"]]


# tee


def test_tee_calls_all_and_raises_the_first_error_with_the_sinks_named(path):
    def broken(state, values):
        raise ConnectionError("no route to the server")

    log = tee(jsonl("/dev/full"), broken, jsonl(path))
    with pytest.raises(OSError, match="No space left") as error:
        log(STATE, {"x": 1.0})
    assert read_jsonl(path) == [{**COUNTS, "x": 1.0}]
    first, second = error.value.__notes__
    assert "raised by the sink jsonl('/dev/full')" in first
    assert "broken" in second
    assert "no route to the server" in second


def test_an_interrupt_in_a_tee_is_raised_at_once():
    calls = []

    def interrupted(state, values):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tee(interrupted, lambda *given: calls.append(given))(STATE, {})
    assert calls == []


def test_tee_refuses_a_list_of_sinks():
    with pytest.raises(TypeError, match=r"argument 2 is a list; for a list of sinks write ll.tee\(\*sinks\)"):
        tee(console(), [console()])


def test_reprs_read_as_the_code_that_made_them(tmp_path):
    code = f"tee(jsonl({str(tmp_path / 'log.jsonl')!r}), console())"
    assert repr(eval(code)) == code
    assert repr(jsonl(tmp_path)) == f"jsonl({str(tmp_path)!r})"
    assert "StringIO" in repr(console(file=io.StringIO()))
