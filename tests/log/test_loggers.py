"""Files and lines: read by the standard library, cut and resumed."""

import enum
import io
import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared import COUNTS, STATE, assert_each_refused, at

import looplib as ll
from looplib.log import console, every_rank, jsonl, read_columns, read_jsonl, record, rename, select, tee
from looplib.metrics import Mean


def strict_json(line):
    """As a reader that knows no NaN and no Infinity, the way the JSON standard has it."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def bits(value):
    exact = isinstance(value, float) and not math.isnan(value)
    return type(value), struct.pack("d", value) if exact else str(value)


characters = {"exclude_categories": ["Cs"]}
names = st.text(st.characters(**characters, exclude_characters="\0\r\n"), max_size=5)
numbers = st.floats() | st.integers(-(2**63), 2**64 - 1) | st.booleans()
texts = st.text(st.characters(**characters, exclude_characters="\0"))
values = numbers | texts.filter(
    lambda text: text not in ("NaN", "Infinity", "-Infinity")
)  # which read_jsonl takes for floats
rows = st.lists(st.dictionaries(names.filter(lambda name: name not in COUNTS), values, max_size=4), min_size=1)


@given(rows)
def test_every_value_in_any_growing_log_comes_back_with_its_type_and_bits(tmp_path_factory, rows):
    folder, memory = tmp_path_factory.mktemp("log"), []
    for step, row in enumerate(rows):
        record(memory)(at(step), row)
    assert [list(line) for line in memory] == [[*COUNTS, *row] for row in rows]
    names = dict.fromkeys([*COUNTS, *(name for row in rows for name in row)])
    path = folder / "log"
    log = jsonl(str(path))
    for step, row in enumerate(rows):
        log = log if step % 3 else jsonl(path)  # which continues it
        log(at(step), row)
    columns = read_columns(path)
    assert list(columns) == list(names)
    for name in columns:
        assert [bits(value) for value in columns[name]] == [bits(row.get(name)) for row in memory]
        assert name in COUNTS or [bits(value) for value in columns[name]] == [bits(row.get(name)) for row in rows]
    assert columns["step"] == list(range(len(rows)))
    lines = [strict_json(line) for line in path.read_bytes().splitlines()]
    assert [list(line) for line in lines] == [[*COUNTS, *row] for row in rows]


class Phase(enum.IntEnum):
    WARMUP = 3


def test_scalars_of_torch_and_numpy_are_plain_values(tmp_path):
    values = [
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor(math.nan), math.nan),
        (torch.tensor(3), 3),
        (torch.tensor(True), True),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float64("inf"), math.inf),
        (np.bool_(True), True),
        (np.array(0.5), 0.5),
        (np.str_("a"), "a"),
        (Phase.WARMUP, 3),
    ]
    rows, given = [], {str(i): value for i, (value, _) in enumerate(values)}
    tee(record(rows), jsonl(tmp_path / "log"))(STATE, given)
    expected = {name: bits(value) for name, value in COUNTS.items()}
    expected |= {str(i): bits(plain) for i, (_, plain) in enumerate(values)}
    read = {name: value for name, (value,) in read_columns(tmp_path / "log").items()}
    for found in (read, *rows):
        assert list(found) == list(expected)
        for name, value in found.items():
            assert bits(value) == expected[name] or value is Phase.WARMUP


def test_a_log_cut_at_any_byte_loses_at_most_its_last_row(tmp_path):
    path, ends = tmp_path / "log", []
    values = [{"x": math.inf, "text": 'é}\n{"5",'}, {"x": -0.5, "text": "\r\n"}]
    for step, row in enumerate(values):
        jsonl(path)(at(step), row)
        ends.append(path.stat().st_size - 1)  # a line that lacks nothing but its newline is whole
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = [row["x"] for row, end in zip(values, ends, strict=True) if cut >= end]
        assert read_columns(path).get("x", []) == kept
        jsonl(path)(at(9), {"x": 9.0, "text": "t"})
        assert read_columns(path)["x"] == [*kept, 9.0]
        assert read_columns(path)["text"][-1] == "t"


def test_lines_of_pythons_json_are_read_with_nan_and_infinity(tmp_path):
    (tmp_path / "log").write_text(json.dumps({"step": 1, "x": math.nan, "y": -math.inf}) + "\n")
    [row] = read_jsonl(tmp_path / "log")
    assert math.isnan(row["x"])
    assert row["y"] == -math.inf


# read_columns


@given(data=st.data())
def test_resumed_runs_are_joined_without_doubled_or_lost_steps(tmp_path_factory, data):
    """Any number of passes over one run, each from a checkpoint at or before the last step that was logged."""
    path = tmp_path_factory.mktemp("log") / "log"
    log = jsonl(path)
    train, evals = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    log(at(0), {})
    step, passes = 0, {}
    for attempt in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, step))
        passes = {at: which for at, which in passes.items() if at <= start}
        for step in range(start + 1, start + 1 + data.draw(st.integers(1, 10))):
            if step % train == 0:
                log(at(step, samples=8 * step), {"loss": step / 10, "pass": attempt})
            if step % evals == 0:
                log(at(step, samples=8 * step), {"auc": -step})
            if step % train == 0 or step % evals == 0:
                passes[step] = attempt
    columns = read_columns(path)
    # A pass that ended before its first row has replaced nothing.
    assert columns["step"][: len(passes) + 1] == [0, *passes]
    for name, every, value in (("loss", train, lambda n: n / 10), ("auc", evals, int.__neg__)):
        expected = [value(n) if n and n % every == 0 else None for n in columns["step"]]
        assert columns.get(name, [None] * len(expected)) == expected
    found = dict(zip(columns["step"], columns.get("pass", [None] * len(columns["step"])), strict=True))
    assert all(found[n] in (None, which) for n, which in passes.items())


def test_steps_without_an_update_are_told_apart_and_another_batch_size_replaces(tmp_path):
    log = jsonl(tmp_path / "log")
    for step, samples in [(1, 8), (1, 16), (2, 24), (3, 32)]:
        log(at(step, samples), {"loss": samples})
    assert read_columns(tmp_path / "log")["loss"] == [8, 16, 24, 32]
    log(at(2, 28), {"loss": -1})
    columns = read_columns(tmp_path / "log")
    assert (columns["loss"], columns["samples"]) == ([8, 16, -1], [8, 16, 28])


# console and tee


def printed(*calls):
    stream = io.StringIO()
    log = console(file=stream)
    for call in calls:
        log(*call)
    return stream.getvalue()


def test_console_shows_four_digits_of_floats_and_all_of_others():
    shown = {0.693147: "0.6931", 1e-5: "1e-05", 123456.0: "1.235e+05", -math.inf: "-inf", 7: "7", "warm": "warm"}
    for value, text in [*shown.items(), (123456, "123456"), (True, "True"), (torch.tensor(0.25), "0.25")]:
        assert printed((STATE, {"x": value})).split() == ["step", "7", "epoch", "2.75", "x", text]
    assert printed((STATE.replace(epoch_length=None), {})).split() == ["step", "7", "epoch", "2"]


@given(st.lists(st.tuples(st.integers(0, 999_999), *[st.floats(width=32)] * 3), min_size=2, max_size=2))
def test_console_lines_of_the_same_names_are_aligned(rows):
    calls = [(at(step), dict(zip("bac", row, strict=True))) for step, *row in rows]
    first, second, last = printed(*calls, (STATE, {"d": 1, "c": 2})).splitlines()
    for name in (" epoch ", " a ", " b ", " c "):
        assert first.index(name) == second.index(name)
    assert [line.split()[4::2] for line in (first, last)] == [["b", "a", "c"], ["d", "c"]]


def test_tee_calls_all_and_raises_the_first_error_with_the_loggers_named():
    def broken(state, values):
        raise ConnectionError("no route to the server")

    def interrupted(state, values):
        raise KeyboardInterrupt

    rows = []
    with pytest.raises(OSError, match="No space left") as error:
        tee(jsonl("/dev/full"), broken, record(rows))(STATE, {"x": 1.0})
    first, second = error.value.__notes__
    assert "jsonl('/dev/full')" in first
    assert "broken" in second
    assert "no route to the server" in second
    with pytest.raises(KeyboardInterrupt):
        tee(interrupted, record(rows))(STATE, {})
    assert rows == [{**COUNTS, "x": 1.0}]


# refusals, and reprs


def test_every_logger_refuses_tensors_and_names_of_counts(tmp_path):
    live_plot = ll.log.live_plot(path=tmp_path / "plot.png")
    for log in (jsonl(tmp_path / "log"), record([]), console(), live_plot, rename(console(), {"one": "two"})):
        with pytest.raises(TypeError, match=r"state is a dict; give a TrainState.*log\(state, values\)"):
            log({"loss": 1.0}, STATE)
        for value, parts in (
            (torch.zeros(2, 3), ["Tensor", "(2, 3)", ".mean()"]),
            (np.zeros(4), ["ndarray", "(4,)"]),
            ({"a": 1.0}, ["dict", "'train/loss/0'"]),
            (None, ["NoneType"]),
            (torch.tensor(1j), ["complex", "float()"]),
            (Mean(torch.tensor(3.0), 2), ["Mean", "ll.compute(metrics)"]),
        ):
            with pytest.raises(TypeError) as error:
                log(STATE, {"fine": 1.0, "train/loss": value})
            assert all(part in str(error.value) for part in ["'train/loss'", *parts])
        for name in COUNTS:
            with pytest.raises(ValueError, match=f"'{name}' .* 'train/{name}'"):
                log(STATE, {name: 1.0})
    for value in (2**64, -(2**63) - 1):  # which readers of JSON would round
        with pytest.raises(TypeError, match="64-bit"):
            jsonl(tmp_path / "log")(STATE, {"seed": value})
    assert not [*tmp_path.iterdir()]


def test_other_mistakes_are_named(tmp_path):
    path = tmp_path / "log.jsonl"
    assert_each_refused(
        (lambda: read_jsonl(path), FileNotFoundError, "log.jsonl"),
        (lambda: read_columns(path), FileNotFoundError, "log.jsonl"),
        (lambda: tee(console(), [console()]), TypeError, r"tee got a list.*ll.tee\(\*loggers\)"),
        (lambda: select(console(), "loss"), TypeError, r"'loss'.*\['loss'\]"),
        (lambda: every_rank(tee(console())), TypeError, r"tee\(.*\) writes in each process"),
        (lambda: rename(console(), lambda name: name[-1])(STATE, {"a/x": 1, "b/x": 2}), ValueError, "a/x.*b/x.*'x'"),
    )


def test_reprs_read_as_the_code_that_made_them(tmp_path):
    inner = f"every_rank(jsonl({str(tmp_path / 'log.jsonl')!r}))"
    wrapped = f"in_background(safely(select(rename({inner}, {{'a': 'b'}}), ['b'])), max_pending=5)"
    windowed = "windowed(console(), every_n_steps(5), prefix='train/')"
    code = f"tee({inner}, {wrapped}, {windowed})"
    assert repr(eval(code, vars(ll.log) | {"every_n_steps": ll.every_n_steps})) == code
    assert "StringIO" in repr(console(file=io.StringIO()))
