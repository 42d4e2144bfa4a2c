"""Data loaders: batches as a function of the state.

The batches of an epoch are planned before anything is read (`_plan`), in an order that is a value (`_orders`). They are
read here or in worker processes (`_samples`, `_streams`), and divided among the ranks (`_divide`). torch's DataLoader
is the engine for workers, pinned memory and streams.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert

from looplib._core import trees
from looplib._core.checks import check_optional_count
from looplib._core.interrupts import interruptible
from looplib._core.kinds import instances_are
from looplib.data import _arguments
from looplib.data._arguments import NotGiven
from looplib.data._divide import delivered, rank_and_ranks, unchanged
from looplib.data._from_dataloader import settings_of
from looplib.data._orders import Order, sampler, shuffled
from looplib.data._plan import Epochs
from looplib.data._position import Restart, check_position
from looplib.data._samples import Samples, reader_of, samples_engine
from looplib.data._streams import Stream, Streamed, stream_engine
from looplib.data._workers import Engines, start_worker
from looplib.types import TrainState


class Source(Protocol):
    """What a loader reads from: `Samples` of a dataset with indices, or `Streamed`."""

    def read(self, state: TrainState, rank: int, ranks: int, *, train: bool) -> Iterator[Any]:
        """What is left of the state's epoch: batches; of several ranks, (this rank's part, samples in the batch)."""
        ...


@instances_are("loader")
@dataclass(frozen=True, eq=False, repr=False)
class Loader:
    """Batches as a function of the state, made by `make_loader`.

    `loader(state)` is an iterator over what is left of the state's epoch. `len(loader)` is the number of batches in
    an epoch, and a TypeError for a stream, whose end is known only when it comes.

    Under torchrun a batch is divided among the ranks, and `loader(state)` gives this rank's part of each. Rank and
    number of ranks are read at each call.

    Attributes:
        dataset: the dataset.
        batch_size: samples in a batch, of all ranks together, or None where the dataset or a batch sampler decides.
        seed: the seed of the order and of the draws within the dataset.
        order: the order of the samples, or None for a stream.
        drop_last: a last batch that is not full is left out.
        limit: batches after which an epoch ends, or None.
        divide: the batches are divided among the ranks.
        left_out: samples that `without_samples` has taken out of all batches.
    """

    dataset: Any
    batch_size: int | None
    seed: int
    order: Order | None
    drop_last: bool
    limit: int | None
    divide: bool
    source: Source
    _move: Callable[[Any], Any]
    left_out: frozenset[Any] = frozenset()

    def __call__(self, state: TrainState) -> Iterator[Any]:
        self._say_if_epochs_have_no_end(state)
        return interruptible(self._batches(state, pairs=False))

    def parts(self, state: TrainState) -> Iterator[tuple[Any, bool]]:
        """For evaluation: pairs of this rank's part of each batch, and whether it counts.

        >>> import looplib as ll, torch
        >>> loader = ll.make_loader(torch.arange(5), batch_size=4, order=ll.data.in_order())
        >>> list(loader.parts(ll.TrainState()))
        [(tensor([0, 1, 2, 3]), True), (tensor([4]), True)]

        Where a batch has no sample for this rank, the batch's first sample stands in and does not count. So all ranks
        make the same number of forward passes, and each sample counts once.
        """
        return interruptible(self._batches(state, pairs=True))

    def indices(self, state: TrainState) -> Tensor | list[Any] | None:
        """Indices in the dataset of the next batch's samples, without reading them.

        >>> import looplib as ll, torch
        >>> loader = ll.make_loader(torch.arange(5) * 10, batch_size=4, order=ll.data.in_order())
        >>> loader.indices(ll.TrainState(batch=1))
        tensor([4])

        (samples,) int64, or a list of keys where a sampler gives others; of this rank's part of the batch. None for a
        stream, whose samples have no indices.
        """
        if not isinstance(self.source, Samples):
            return None
        plan = self.source.plan(state.epoch)
        check_position(state, len(plan), self.source.length)
        return plan.batch(state.batch, *(rank_and_ranks(self.divide) if self.source.batched else (0, 1)))[0]

    def resume(self, state: TrainState) -> TrainState:
        """The state of a run that began with another batch size or dataset, to continue with this loader.

        >>> import looplib as ll
        >>> loader = ll.make_loader(range(100), batch_size=20)
        >>> state = ll.TrainState(step=5, batch=5, epoch_length=25, samples=20, batch_samples=4)  # batches of 4
        >>> loader.resume(state)
        TrainState(step=5, epoch=0, batch=1/5, samples=20, seed=0)

        Only the position and `epoch_length` change: weights, optimizer state, step and samples stay. At the end of an
        epoch, any batch size and any dataset will do. Within an epoch, the samples that are left are the same as
        before, in larger or smaller batches, if a batch of this loader begins at the sample that comes next and
        the order of the samples has not changed. It changes if the dataset does, except for `in_order()`; and
        `by_length` and `batch_sampler` make other batches for another batch size. The seed must be that of before,
        which a state does not know.

        Raises:
            ValueError: within an epoch that this loader cannot continue.
            TypeError: a stream, whose samples are not counted.
        """
        source = self.source
        if not isinstance(source, Samples) or self.order is None:
            raise TypeError(
                f"a loader over a stream ({type(self.dataset).__name__}) cannot continue a run that began with another "
                "batch size within an epoch; at the end of one, there is nothing to change"
            )
        any_size = self.order.any_batch_size and source.batched
        restart = Restart(source.plan, source.length, repr(self.order), any_size, self.order.any_length)
        return restart.state(state)

    @property
    def description(self) -> dict[str, str | int | bool | None]:
        """What the batches depend on, as plain values: to store with a checkpoint, and compare when resuming.

        >>> import looplib as ll
        >>> ll.make_loader(range(10), batch_size=4, seed=3).description
        {'dataset': 'range', 'samples': 10, 'order': 'shuffled()', 'seed': 3, 'batch_size': 4, 'drop_last': False,
         'limit': None, 'left_out': 0}

        Long weights and lengths, and the indices that a sampler gives for epoch 0, come with a checksum. The contents
        of the dataset are not described.
        """
        return {
            "dataset": type(self.dataset).__name__,
            "samples": len(self.dataset) if hasattr(self.dataset, "__len__") else None,
            "order": self._described_order(),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "limit": self.limit,
            "left_out": len(self.left_out),
        }

    def _described_order(self) -> str:
        if self.order is None or not isinstance(self.source, Samples):
            return "stream"
        checksum = self.order.checksum(self.source.plan)
        return repr(self.order) if checksum is None else f"{self.order!r}, checksum {checksum:08x}"

    def _batches(self, state: TrainState, *, pairs: bool) -> Iterator[Any]:
        rank, ranks = rank_and_ranks(self.divide)
        read = self.source.read(state, rank, ranks, train=not pairs)
        return delivered(read, self._move, state.epoch, state.batch, rank, ranks, pairs=pairs)

    def _say_if_epochs_have_no_end(self, state: TrainState) -> None:
        """Warn of a training state without an epoch_length, whose epochs the step would not end."""
        if state.epoch_length is not None or state.step or state.opt_state is None:
            return
        if isinstance(self.source, Samples) and not isinstance(self.order, sampler):
            warnings.warn(
                f"state.epoch_length is None, so train_step cannot know that an epoch has {len(self)} batches; write "
                "ll.init_state(..., epoch_length=len(loader)), or call state = ll.end_epoch(state) after the for loop",
                stacklevel=3,
            )

    def __len__(self) -> int:
        if not isinstance(self.source, Samples):
            raise TypeError(
                f"a loader over a stream ({type(self.dataset).__name__}) has no length; leave epoch_length out "
                "of init_state, and call state = ll.end_epoch(state) after the for loop"
            )
        return self.source.length

    @property
    def shuffles(self) -> bool:
        """Whether the samples come in an order that is neither the dataset's nor the user's own."""
        return self.order is not None and self.order.shuffles

    def __iter__(self) -> NoReturn:
        raise TypeError("a Loader is a function of the state: write `for batch in loader(state)`")

    def __repr__(self) -> str:
        batches = f"{self.source.length} batches" if isinstance(self.source, Samples) else "a stream"
        return f"Loader({type(self.dataset).__name__}, {batches}, batch_size={self.batch_size}, seed={self.seed})"


def make_loader(
    dataset: Any,
    *,
    batch_size: int | NotGiven | None = NotGiven.BATCH_SIZE,
    order: Order | None = None,
    seed: int = 0,
    drop_last: bool = False,
    limit: int | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    device: torch.device | str | int | None = None,
    divide: bool = True,
    **dataloader_options: Any,
) -> Loader:
    """A data loader: a function of the state that gives what is left of its epoch, batch by batch.

    >>> import looplib as ll, torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(10))
    >>> loader = ll.make_loader(data, batch_size=4, seed=0)
    >>> state = ll.init_state(torch.nn.Linear(1, 1), epoch_length=len(loader))
    >>> for (x,) in loader(state):
    ...     print(x)
    tensor([...])
    tensor([...])
    tensor([...])
    >>> [x for (x,) in loader(state.replace(batch=2))][0].equal(x)
    True
    >>> test_batches = ll.make_loader(data, batch_size=4, order=ll.data.in_order(), num_workers=0)

    The order is a function of (seed, epoch), with any number of workers, and a run that starts at batch k
    reads nothing of what went before. What `__getitem__` draws from the global streams of torch (CPU), numpy
    and `random` is a function of (seed, epoch, index): the same with any number of workers and any batch
    size. (A sampler that gives an index again within an epoch gets other draws for it each time.) What
    `collate_fn` draws is a function of (seed, epoch, batch, rank). The global streams themselves are left as they
    were. Generators that a dataset holds for itself are not seeded.

    Under torchrun there is nothing to change. `batch_size` is that of the global batch, which all ranks share. Each
    rank reads only its own consecutive samples of it; where the batch does not divide evenly, the first ranks get one
    more (as by `torch.tensor_split`). The global batches are the same for any number of ranks, so a run may continue
    with more or fewer. Nothing is repeated or dropped to make them even, and there is no `set_epoch` to call. To
    train, each rank needs a sample of each batch. To evaluate it does not: see `Loader.parts`.

    A dataset with a `__getitems__` of its own is given the whole list of a batch, under the seed of its first
    index: its draws then depend on the batch size and the number of ranks too.

    With `batch_size=None`, each item of the dataset is a batch already. Each rank reads it whole and takes its rows of
    every tensor, array and list in it.

    A stream (an `IterableDataset`, or anything else with `__iter__` alone) is read from its start for every
    call, and the batches before `state.batch` are read and skipped (a `state_dict` of its own is not used).
    What it draws is a function of (seed, epoch), and with workers of the worker's number. Its
    `set_epoch(epoch)` is called if there is one. An epoch is one pass: call `state = ll.end_epoch(state)` after
    the for loop. For a state with an `epoch_length`, it is that many batches instead. Each rank reads all of the
    stream, and collates its own samples; among several ranks, what `collate_fn` draws does not move the stream's
    draws. A stream that gives each rank different samples already (such as those of `split_dataset_by_node` of
    Hugging Face's datasets) cannot be told from one that does not: give divide=False, the batch_size of one rank, a
    state with an `epoch_length` that all ranks can reach, and another seed on each rank if the stream draws.

    Args:
        dataset: anything with `__len__` and `__getitem__`; a stream; or a DataLoader (or a
            torchdata StatefulDataLoader), whose settings are taken over, except for its generator.
        batch_size: samples in a batch, of all ranks together; None when each item of the dataset is a batch
            already. Required, except with `batch_sampler` and for a DataLoader.
        order: `ll.data.shuffled()` (the default), `in_order()`, `weighted(weights)`, `by_length(lengths)`,
            `sampler(...)` or `batch_sampler(...)`. A stream has its own order.
        seed: of the order and of the draws within the dataset.
        drop_last: leave out the last batch of an epoch when it is not full.
        limit: end each epoch after this many batches, the first ones of its order: `len(loader)` is `limit` then, or
            less where the epoch has fewer. A shuffled order has different ones in each epoch; to see the same samples
            again and again, give `order=ll.data.in_order()` too, or a Subset. A stream's epochs are ended by the
            state's `epoch_length`.
        collate_fn: list of samples -> batch; torch's `default_collate` unless given.
        device: where to move the tensors of each batch (and whatever else in it has a `to`), without waiting
            for the copy if `pin_memory`.
        divide: False gives each rank the whole of each batch.
        dataloader_options: `num_workers`, `pin_memory`, `prefetch_factor`, `persistent_workers`, `timeout`,
            `multiprocessing_context` and `worker_init_fn` of torch's DataLoader.

    Raises:
        TypeError: a dataset that can be neither indexed nor iterated more than once; no `batch_size`; a sampler that
            gives anything but indices; an option that torch's DataLoader does not have; among several ranks, an item
            without rows where items are batches.
        ValueError: options that contradict each other or the dataset, a sampler that is no function of the
            epoch, or that divides among ranks by itself (DistributedSampler), an epoch without batches; from
            `loader(state)`, a state whose `epoch_length` or position is not this loader's (see `Loader.resume`), and a
            batch of fewer samples than ranks: before the first is read, or when it comes, from a stream and from
            items that are batches.
        RuntimeError: a dataset or `collate_fn` that raises StopIteration, which a loop would take for its end.
    """
    if isinstance(dataset, DataLoader):
        given = {
            "batch_size": batch_size is not NotGiven.BATCH_SIZE,
            "order": order is not None,
            "drop_last": drop_last,
            "collate_fn": collate_fn is not None,
            **dict.fromkeys(dataloader_options, True),
        }
        _arguments.check_beside_dataloader(dataset, given)
        settings = settings_of(dataset)
        return make_loader(dataset.dataset, seed=seed, limit=limit, device=device, divide=divide, **settings)

    _arguments.check_dataloader_options(dataloader_options)
    _arguments.check_order(order)
    check_optional_count("limit", limit, advice="expected a number of batches, at least 1, or None for all")
    stream = _arguments.is_stream(dataset)
    if stream:
        _arguments.check_stream(dataset, order, limit, dataloader_options.get("num_workers", 0), divide)
        order = None
    else:
        _arguments.check_samples(dataset)
        order = order or shuffled()
        if divide:
            order.check_undivided()
    size = _arguments.check_batch_size(dataset, batch_size, order, drop_last)
    whole_batches = order is not None and order.whole_batches
    batched = size is not None or whole_batches
    collate = collate_fn or (default_collate if batched else default_convert)
    move = _mover(device, non_blocking=dataloader_options.get("pin_memory", False))
    options = dataloader_options | {
        "worker_init_fn": functools.partial(start_worker, dataloader_options.get("worker_init_fn"))
    }
    if order is None:
        source: Source = _stream_source(dataset, size, seed, drop_last, collate, options)
    else:
        draw = order.draw(dataset, size, drop_last)
        epochs = Epochs(draw, seed, None if whole_batches else size or 1, drop_last, limit, order.distinct)
        length = _epoch_length(epochs, order, size)
        reader = reader_of(dataset, collate, seed, size, batched=batched)
        engines = Engines(lambda: samples_engine(reader, options), seed)
        in_process = not options.get("num_workers") and not options.get("pin_memory")
        source = Samples(reader, engines, epochs, length, batched, in_process)
    return Loader(dataset, size, seed, order, drop_last, limit, divide, source, move)


def _stream_source(
    dataset: Any,
    batch_size: int | None,
    seed: int,
    drop_last: bool,
    collate: Callable[[Any], Any],
    options: dict[str, Any],
) -> Streamed:
    def build() -> DataLoader[Any]:
        stream = Stream(dataset, collate, seed, batched=batch_size is not None)
        return stream_engine(stream, batch_size, drop_last, options)

    return Streamed(Engines(build, seed), f"the stream ({type(dataset).__name__})")


def _epoch_length(epochs: Epochs, order: Order, batch_size: int | None) -> int:
    plan = epochs(0)
    if not plan:
        raise ValueError(
            f"an epoch has no batches: {len(plan.keys)} samples, batch_size={batch_size}, drop_last={epochs.drop_last}"
        )
    order.check_repeatable(plan, epochs)
    return len(plan)


def _mover(device: torch.device | str | int | None, non_blocking: bool) -> Callable[[Any], Any]:
    if device is None:
        return unchanged
    target = torch.device(device)

    def move(leaf: Any) -> Any:
        return leaf.to(target, non_blocking=non_blocking) if hasattr(leaf, "to") else leaf

    # What has a `to` of its own (a tokenizer's BatchEncoding, a PackedSequence) is moved by that.
    return functools.partial(trees.map_leaves, move, is_leaf=lambda node: hasattr(node, "to"))
