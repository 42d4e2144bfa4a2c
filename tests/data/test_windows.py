"""Windows of one long sequence."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looplib.data import windows


@given(count=st.integers(2, 40), length=st.integers(1, 12), stride=st.none() | st.integers(1, 15))
def test_windows_are_slices_and_have_all_targets_once_by_default(count, length, stride):
    tokens = [7 * i % 31 for i in range(count)]
    if count <= length:
        with pytest.raises(ValueError, match=rf"tokens has {count} ids.*length={length} needs {length + 1}"):
            windows(tokens, length, stride)
        return
    dataset = windows(tokens, length, stride)
    found = [(inputs.tolist(), targets.tolist()) for inputs, targets in dataset]
    assert found == [
        (tokens[i : i + length], tokens[i + 1 : i + 1 + length]) for i in range(0, count - length, stride or length)
    ]
    assert len(found) == len(dataset)
    if stride is None:
        assert [token for _, targets in found for token in targets] == tokens[1 : 1 + len(found) * length]


def test_windows_of_tokens_on_disk_are_views_of_them_in_int64(tmp_path):
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    written, read = (np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode=mode) for mode in ("r+", "r"))
    dataset = windows(read, 4)
    written[3] = 2**16 - 1
    assert dataset[0][0].tolist() == [0, 1, 2, 2**16 - 1]
    assert dataset[-1][1].tolist() == [5, 6, 7, 8]
    assert {part.dtype for part in dataset[0]} == {torch.int64}
    with pytest.raises(IndexError):
        dataset[2]


def test_wrong_windows_are_refused_by_name():
    for tokens, arguments, names in (
        (torch.zeros(4, 9, dtype=torch.int64), {"length": 2}, r"\(4, 9\)"),
        (torch.zeros(9), {"length": 2}, "torch.float32"),
        (range(9), {"length": 2.0}, "length is 2.0"),
        (range(9), {"length": 2, "stride": 0}, "stride is 0"),
    ):
        with pytest.raises(ValueError, match=names):
            windows(tokens, **arguments)
