"""Metrics of a whole corpus."""

import numpy as np
import pytest
import torch

import looplib as ll


def average_length(names, rows):
    """Of lists: no tensor or array has a method `index`."""
    return sum(map(len, rows)) / (1 + names.index("c"))


def test_columns_of_strings_tensors_and_ragged_rows_reach_the_function_as_lists():
    one = ll.metrics.Corpus.of(average_length, ["a", "b"], torch.tensor([[1, 2], [3, 4]]))
    other = ll.metrics.Corpus.of(average_length, ["c"], torch.tensor([[5, 6, 7]]))
    assert ll.compute(ll.metrics.merge({"score": one}, {"score": other})) == {"score": 7 / 3}


def test_lengths_are_checked():
    for columns, lengths in ((["ab", "a"], r"\[2, 1\]"), ([], r"\[\]")):
        with pytest.raises(ValueError, match=f"columns of lengths {lengths}"):
            ll.metrics.Corpus.of(len, *columns)


def test_a_corpus_keeps_its_rows_when_a_reader_overwrites_its_batch():
    for column in (
        torch.tensor,
        np.array,
        lambda rows: list(torch.tensor(rows)),
        lambda rows: [{"row": np.array(r)} for r in rows],
    ):
        buffer = column([[1, 2], [3, 4]])
        record = ll.metrics.Corpus.of(str, buffer)
        expected = record.compute()
        for row in buffer:
            (row["row"] if isinstance(row, dict) else row)[:] = 0
        assert record.compute() == expected
