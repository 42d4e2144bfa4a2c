"""Windows of one long sequence of tokens, for language models."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from looplib._core.checks import as_tensor, check, check_count, check_optional_count

Window = tuple[Tensor, Tensor]


class Windows(Dataset[Window]):
    """Dataset of pairs (inputs, targets), each cut out of a row of a view of the tokens."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Window:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Window]:
        rows = self.rows[torch.as_tensor(indices, device="cpu")].long()
        return [*zip(rows[:, :-1], rows[:, 1:], strict=True)]


def windows(tokens: Any, length: int, stride: int | None = None) -> Windows:
    """Fixed-length windows of one long sequence of tokens, as pairs of inputs and next-token targets.

    >>> import looplib as ll, torch
    >>> dataset = ll.data.windows(torch.arange(9), length=4)
    >>> dataset[0], len(dataset)
    ((tensor([0, 1, 2, 3]), tensor([1, 2, 3, 4])), 2)

    Window i starts at token `i * stride`. Its targets are its inputs one token later, so that each of the `length`
    positions has a target: `ll.next_token_loss(model(inputs), targets, shift=False)`. A model that shifts its labels
    itself, as those of transformers do, takes the inputs as labels, too. Tokens after the last complete window are
    left out.

    The windows are views of the tokens, which may be a memory map of uint16 numbers (`numpy.memmap`): the tokens of a
    batch are read together and converted to int64. A corpus can have too many windows to shuffle, in particular with
    `stride=1`; `order=ll.data.with_replacement(num_samples)` keeps no list of them.

    Args:
        tokens: (n,) ids, a tensor or array of an integer type. A document that should not run into the next one ends
            with a token that says so.
        length: number of inputs, and of targets, of a window.
        stride: distance between the starts of two windows. Defaults to `length`, which makes each token a target
            once. With 1, a window starts at every token.

    Raises:
        ValueError: `tokens` are not integers in one dimension, or fewer than `length + 1`; or `length` or `stride` is
            below 1.

    Source: `get_batch` in Karpathy, nanoGPT, https://github.com/karpathy/nanoGPT, draws its batches from the windows
    with `stride=1`, with replacement.
    """
    check(
        not isinstance(tokens, (str, bytes)),
        f"tokens are a {type(tokens).__name__}; give numbers, such as tokenizer(text)['input_ids'], or list(text.encode())",
        TypeError,
    )
    check_count("length", length)
    check_optional_count("stride", stride)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that is read-only, as it may be: nothing is written here
        ids = as_tensor(tokens)
    check(
        ids.dim() == 1 and torch.can_cast(ids.dtype, torch.int64),
        f"tokens have shape {tuple(ids.shape)} and dtype {ids.dtype}; give ids of an integer type in one dimension",
    )
    check(
        len(ids) > length,
        f"tokens has {len(ids)} ids, and a window of length={length} needs {length + 1}: its inputs and the target of "
        "the last one",
    )
    return Windows(ids.unfold(0, length + 1, stride or length))
