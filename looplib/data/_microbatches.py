"""Microbatches that are collated one by one, so that each is padded to its own longest sample, or packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any

from looplib._core.checks import check, check_optional_count
from looplib.data._plan import own_rows


@dataclass(frozen=True)
class collate_microbatches:
    """A `collate_fn` that sorts samples by length, cuts them into microbatches and collates each by itself.

    >>> import looplib as ll, torch
    >>> texts = [torch.ones(n) for n in (1, 7, 2, 8)]
    >>> pad = lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    >>> loader = ll.make_loader(texts, batch_size=4, collate_fn=ll.data.collate_microbatches(pad, 2))
    >>> [tuple(microbatch.shape) for microbatch in next(iter(loader(ll.TrainState())))]  # 20 tokens; padded whole, 32
    [(2, 8), (2, 2)]

    Give the result to `ll.accumulate(grad_fn)`, without a number: the loader has cut the batch already. The gradient is
    that of the whole batch if the loss is a `Mean` over tokens (`next_token_loss`, `model_loss`). Cutting a batch that
    is padded as a whole, as `accumulate(grad_fn, 2)` does, computes more padding for the same gradient.

    To pack several documents into one row, pass a collator that concatenates them, such as transformers'
    `DataCollatorWithFlattening`, with `tokens=` and `packed=True`, and `count_samples=` to `make_loader` and
    `make_grad_fn`, since a row is not a sample then. It counts the samples of one microbatch.

    Args:
        collate_fn: makes one microbatch of a list of samples, such as a collator of transformers.
        microbatches: number of microbatches; the first ones may have one sample more.
        tokens: most tokens per microbatch: samples times the longest length, or with `packed`, the sum of lengths. A
            longer sample is a microbatch by itself.
        packed: if True, `collate_fn` packs without padding.
        length: length of a sample. Defaults to the length of its `input_ids`, or of itself if it is not a mapping.

    Raises:
        ValueError: not exactly one of `microbatches` and `tokens` is given, or it is below 1.
    """

    collate_fn: Callable[[list[Any]], Any]
    microbatches: int | None = None
    _: KW_ONLY
    tokens: int | None = None
    packed: bool = False
    length: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        check(
            (self.microbatches is None) != (self.tokens is None),
            f"microbatches={self.microbatches}, tokens={self.tokens}: give one of both",
        )
        check_optional_count("microbatches", self.microbatches)
        check_optional_count("tokens", self.tokens)

    def __call__(self, samples: list[Any]) -> list[Any]:
        length = self.length or _length
        ordered = sorted(samples, key=length, reverse=True)  # the longest first: if it does not fit, you know at once
        ends = [0, *self._ends([*map(length, ordered)])]
        return [self.collate_fn(ordered[begin:end]) for begin, end in pairwise(ends)]

    def _ends(self, lengths: list[int]) -> Iterator[int]:
        """Ends of the microbatches, for lengths that fall."""
        if self.tokens is None:
            count = min(self.microbatches or 1, len(lengths))
            yield from (own_rows(len(lengths), k, count)[1] for k in range(count))
            return
        begin = 0
        for k in range(1, len(lengths)):
            together = lengths[begin : k + 1]
            if (sum(together) if self.packed else len(together) * lengths[begin]) > self.tokens:
                yield k
                begin = k
        yield len(lengths)


def _length(sample: Any) -> int:
    return len(sample["input_ids"] if isinstance(sample, Mapping) else sample)
