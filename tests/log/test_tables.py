"""Tables: read by the standard library, cut, killed and resumed."""

import csv
import math
import os
import re
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared import COUNTS, STATE, at, file_size_limit

from looplib.log import csv_file, jsonl, read_columns, read_jsonl, record, tee


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.csv"


def table(path):
    """As the standard library reads it, which knows nothing of looplib."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# csv_file

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"), max_size=5)
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
def test_any_text_reaches_other_readers_of_csv_on_one_line(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    log = csv_file(path)
    for step, value in enumerate(values):
        log(at(step), {"note": value})
    expected = [re.sub("[\r\n]+", " ", value) for value in values]
    assert [row["note"] for row in table(path)] == expected
    assert list(map(str, read_columns(path)["note"])) == expected


def test_rows_of_the_same_names_are_appended_and_a_new_name_keeps_links(tmp_path, path):
    log = csv_file(tmp_path / "link.csv")
    log(at(1), {"a": 1})
    (tmp_path / "link.csv").rename(path)
    (tmp_path / "link.csv").symlink_to(path)
    inode = path.stat().st_ino
    log(at(2), {"a": 2})
    assert path.stat().st_ino == inode
    (tmp_path / "outside").write_text("mine")
    (tmp_path / f".{path.name}.writing").symlink_to(tmp_path / "outside")
    log(at(3), {"b": 3})
    assert path.stat().st_ino != inode
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "outside").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["link.csv", "log.csv", "outside"]
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
        assert read_columns(path)["x"] == [*(row["x"] for row in kept), 9.0]
        assert [row["text"] for row in table(path)] == [*['é "5",', " "][: len(kept)], "t"]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_full_disk_is_an_error_and_the_next_row_is_whole(path, name):
    log = csv_file(path)
    log(at(1), {"a": 1.0})
    with file_size_limit(path.stat().st_size + 30), pytest.raises(OSError, match="File too large"):
        log(at(2), {name: "x" * 100})
    assert read_columns(path)["a"] == [1.0]
    log(at(3), {"a": 3.0})
    assert read_columns(path)["a"] == [1.0, 3.0]
    assert os.listdir(path.parent) == ["log.csv"]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "a", '{"step":1}\n', "\n"])
def test_a_file_of_another_kind_is_left_alone(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match=r"log\.csv is no log of csv_file"):
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


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path, path):
    log = csv_file(path)
    log(at(1), {"a": 1})
    (tmp_path / "outside").write_text("mine")
    (tmp_path / f".{path.name}.writing").symlink_to(tmp_path / "outside")
    log(at(2), {"b": 2})
    assert (tmp_path / "outside").read_text() == "mine"
    assert read_columns(path)["b"] == [None, 2]
