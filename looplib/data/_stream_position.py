"""Positions of streams that know their own: kept in a state, so that a resumed run need not read past what was seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from looplib._core.checks import check
from looplib._core.collective import together_with_data
from looplib._core.notices import warn
from looplib.data._loader import Loader
from looplib.data._streams import KEY, Streamed
from looplib.types import TrainState, check_state


class _Place(NamedTuple):
    epoch: int
    batch: int


def with_position(loader: Loader, state: TrainState) -> TrainState:
    """Keep the position of a stream in the state, for a dataset that has `state_dict` and `load_state_dict`.

    >>> import looplib as ll
    >>> class Numbers:
    ...     at = 0
    ...     def __iter__(self):
    ...         while self.at < 8:
    ...             self.at += 1
    ...             yield self.at
    ...     def state_dict(self):
    ...         return {"at": self.at}
    ...     def load_state_dict(self, saved):
    ...         self.at = saved["at"]
    >>> loader = ll.make_loader(Numbers(), batch_size=2)
    >>> state = ll.TrainState(extra={"stream": ""})
    >>> batches = loader(state)
    >>> next(batches)
    tensor([1, 2])
    >>> state = ll.data.with_position(loader, state.replace(batch=1))
    >>> state.extra["stream"]
    '{"epoch": 0, "batch": 1, "ranks": [{"at": 2}]}'
    >>> next(loader(state))
    tensor([3, 4])

    Without it, a resumed run reads the batches before `state.batch` again and skips them, which takes long for a large
    stream. With it, `loader(state)` hands the stored position to the dataset and continues there. Streams of Hugging Face
    `datasets` have these methods. Create the state with `extra={"stream": ""}`, and call this before each save:

        ckpt.save(ll.data.with_position(loader, state))

    The position is a line of JSON in `state.extra["stream"]`, with the epoch and batch that it belongs to. At any other
    batch it is ignored. On several ranks that read streams of their own (`divide=False`, such as
    `split_dataset_by_node`), all ranks call this together, and as many ranks continue.

    What it cannot keep is what the dataset's `state_dict` does not: `datasets` fill a shuffle buffer with new samples, so the
    resumed run never sees those that were in the buffer, and a warning says so. Draws from the global random streams
    (torch, numpy, `random`) in the dataset differ from those of an uninterrupted run.

    Args:
        loader: a loader over a stream, with `num_workers=0`.
        state: the state after the last batch that this loader has yielded.

    Raises:
        TypeError: the dataset is no stream with `state_dict` and `load_state_dict`, `num_workers` is above 0, the position
            is no JSON, or `state.extra` is not a dict.
        ValueError: the loader has yielded more or fewer batches than the state has seen.
    """
    check_state(state, "ll.data.with_position(loader, state)")
    source, kind = loader.source, type(loader.dataset).__name__
    known = isinstance(source, Streamed) and source.keeps_position
    check(
        known,
        f"{kind} is no stream with state_dict and load_state_dict, or is read by workers, which are ahead of the loop: "
        "give such a stream, with num_workers=0, or save without with_position, and a resumed run reads past what was seen",
        TypeError,
    )
    assert isinstance(source, Streamed)
    extra = {} if state.extra is None else state.extra
    check(
        isinstance(extra, Mapping),
        f"state.extra is a {type(extra).__name__}; give a dict to add {KEY!r} to",
        TypeError,
    )
    text = ""
    if state.batch:
        place = _Place(*source.yielded)
        check(
            place == (state.epoch, state.batch),
            f"the state is at batch {state.batch} of epoch {state.epoch}, and the loader has yielded {place.batch} of epoch "
            f"{place.epoch}: call with_position between two batches, with the newest state",
        )
        if (size := _shuffle_buffer(loader.dataset)) > 1:
            warn(
                f"the position of this {kind} leaves out its shuffle buffer of {size} samples: a resumed run fills it with "
                "the samples that follow, and those in it are lost until the next epoch. Shuffle the shards alone "
                "(dataset.shuffle(buffer_size=1)), or save without with_position, and a resumed run reads past what was seen"
            )
        own: Any = loader.dataset.state_dict()
        ranks = [own] if loader.divide else together_with_data().gather(own)
        text = json.dumps({**place._asdict(), "ranks": ranks})
    return state.replace(extra={**extra, KEY: text})


def _shuffle_buffer(stream: Any) -> int:
    """Size of the largest shuffle buffer in a stream of Hugging Face `datasets`, which is made of nested iterables."""
    inner = [getattr(stream, name) for name in ("_ex_iterable", "ex_iterable") if hasattr(stream, name)]
    sizes = [_shuffle_buffer(part) for part in (*inner, *getattr(stream, "ex_iterables", ()))]
    own: int = stream.buffer_size if type(stream).__name__ == "BufferShuffledExamplesIterable" else 1
    return max(own, *sizes, 1)
