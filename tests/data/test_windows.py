"""Windows of one long sequence, drawn with replacement."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import looplib as ll
from looplib.data import make_loader, windows, with_replacement


def on_disk(folder, tokens, mode="r"):
    path = folder / "tokens.bin"
    tokens.tofile(path)
    return np.memmap(path, dtype=tokens.dtype, mode=mode)


def get_batch(data, block_size, ix):
    """As in nanoGPT's train.py, for given starts."""
    x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
    return x, y


def test_batches_and_loss_are_those_of_nanogpt(tmp_path):
    data = on_disk(tmp_path, np.random.default_rng(0).integers(0, 2**16, 500).astype(np.uint16))
    loader = make_loader(windows(data, 8, stride=1), batch_size=6, order=with_replacement(60), seed=1)
    assert len(loader.dataset) == len(data) - 8  # that many starts nanoGPT draws from
    state = ll.TrainState()
    for inputs, targets in loader(state):
        x, y = get_batch(data, 8, loader.indices(state).tolist())
        assert torch.equal(inputs, x)
        assert torch.equal(targets, y)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        state = state.replace(batch=state.batch + 1)
    assert state.batch == 10
    logits = torch.randn(6, 8, 10, dtype=torch.float64)
    loss = ll.compute({"loss": ll.next_token_loss(logits, targets % 10, shift=False)})["loss"]
    torch.testing.assert_close(loss, cross_entropy(logits.view(-1, 10), (y % 10).view(-1)).item())


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


def test_windows_are_views_of_the_tokens(tmp_path):
    data = on_disk(tmp_path, np.arange(9, dtype=np.int16), mode="r+")
    dataset = windows(data, 4)
    data[3] = 77
    assert dataset[0][0].tolist() == [0, 1, 2, 77]
    assert dataset[-1][1].tolist() == [5, 6, 7, 8]
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
