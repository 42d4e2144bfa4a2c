"""Data loaders: batches as a function of the state.

The batches of an epoch are planned before anything is read (`_plan`), in an order that is a value (`_orders`). They
are read in this process or in workers (`_readers`, `_workers`) and divided among the ranks (`_plan`). torch's
DataLoader provides workers and pinned memory.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from looplib._core import trees
from looplib._core.checks import check, warn
from looplib._core.iterations import Iteration, begin_iteration, warn_of_position
from looplib._core.mappings import without
from looplib._core.positions import read_of_batch
from looplib._core.ranks import is_alone, rank, rank_and_size
from looplib._core.records import Call, Code, differences, kinds_of_classes, other_settings, with_repr
from looplib._core.samples import as_counter
from looplib.data import _arguments
from looplib.data._microbatches import collate_microbatches
from looplib.data._orders import Order, check_undivided, shuffled
from looplib.data._plan import empty_part, plan_of
from looplib.data._position import is_just_restored, loaders_of_position, resumed
from looplib.data._readers import Counts, reader_of
from looplib.data._sources import Samples, Stream, Streamed
from looplib.data._workers import Engines, unchanged
from looplib.data.remaining import Remaining
from looplib.types import Run, TrainState, check_state


class _Asked:
    """Epochs for which a loader was asked, by run, as long as there are states of the run.

    All that a loader remembers of its calls, and for a refusal alone: a state after the last batch of an epoch is fine where
    a run was restarted there, and is refused where the loader has been asked for that epoch, since a loop without
    `end_epoch` would ask for ever. No state tells the one from the other.
    """

    def __init__(self) -> None:
        self._epochs: WeakKeyDictionary[Run, set[int]] = WeakKeyDictionary()

    def __contains__(self, state: TrainState) -> bool:
        return state.epoch in self._epochs.get(state.run, ())

    def add(self, state: TrainState) -> None:
        self._epochs.setdefault(state.run, set()).add(state.epoch)

    def __reduce__(self) -> tuple[type[_Asked], tuple[()]]:
        return _Asked, ()  # a copy of the loader was asked for nothing


@dataclass(frozen=True, eq=False, repr=False)
class Loader:
    """Data loader returned by `make_loader`: batches as a function of the state.

    `loader(state)` returns an iterator over the remaining batches of the state's epoch. It is empty if the state stands
    after the last batch of an epoch that `end_epoch` has not ended yet, as in a run that was restarted there: the loop then
    ends the epoch. If this loader was asked for that epoch of the run before, `loader(state)` raises ValueError instead, since
    a loop that forgets `end_epoch` would never end; nothing else depends on earlier calls. `len(loader)` is the number of
    batches in an epoch; it raises TypeError for a stream, whose end is known only when it is reached.

    `loader(state)` changes nothing that it is given. It warns if the state was restored from a checkpoint that was made with
    a different loader, or that knows none: checkpoints store the settings of the loaders given to `init_state` (`loader=`).
    It also warns if two train steps ran on each batch of the last iteration and none of them had `same_batch=True`, because
    the state has then moved too far; and if the state has not moved at all, because `apply_gradients` was not given
    `samples=`.

    Under torchrun, each batch is divided among the ranks and `loader(state)` yields this rank's part. Rank and number
    of ranks are read at each call.

    Attributes:
        dataset: the dataset.
        batch_size: samples per batch over all ranks together, or None if the dataset or a batch sampler decides.
        seed: seed of the order and of random draws inside the dataset.
        order: order of the samples, or None for a stream.
        drop_last: True if an incomplete last batch is dropped.
        max_batches: number of batches after which an epoch ends, or None.
        divide: True if batches are divided among the ranks.
        counts: function from a batch to its number of samples.
        batch_size_per_rank: samples per batch and rank, if the loader was made with it.
    """

    dataset: Any
    batch_size: int | None
    seed: int
    order: Order | None
    drop_last: bool
    max_batches: int | None
    divide: bool
    source: Samples | Streamed
    counts: Counts
    _move: Callable[[Any], Any]
    batch_size_per_rank: int | None = None
    call: Call | None = field(default=None, init=False)
    _asked: _Asked = field(default_factory=_Asked, init=False)

    def __call__(self, state: TrainState) -> Iterator[Any]:
        check_state(state, "for batch in loader(state)")
        is_new = not state.step and state.opt_state is not None  # of a run that trains
        if is_new and state.epoch_length is None and self.order and not self.order.may_vary:
            warn(
                f"state.epoch_length is None, so train_step cannot know that an epoch has {len(self)} batches; write "
                "ll.init_state(..., loader=loader), or call state = ll.state.end_epoch(state) after the for loop"
            )
        warn_of_position(state)
        if not state.params and state.step and not (state.epoch or state.batch or state.samples):
            warn(
                f"the state has step={state.step}, and the loader reads epoch=0 and batch=0, from where epoch 0 comes again: in a "
                "loop of your own, count the batches taken, epoch, batch = divmod(taken, len(loader)), and give "
                "ll.TrainState(step=step, epoch=epoch, batch=batch)"
            )
        self._check_ranks()
        source = self._read(state, again=state in self._asked, read=self._samples_read(state))
        if isinstance(self.source, Streamed):
            _check_stream(state, self.description)
        _compare(state, self.description)
        self._asked.add(state)
        batches = self._batches(source, begin_iteration(state))
        return Remaining(batches, state.batch, rank_and_size()[1] if self.divide else 1)

    def parts(self, state: TrainState) -> Iterator[tuple[Any, bool]]:
        """For evaluation on several ranks: pairs of this rank's part of each batch and True if it counts.

        >>> import looplib as ll, torch
        >>> loader = ll.make_loader(torch.arange(5), batch_size=4, order=ll.data.sequential())
        >>> list(loader.parts(ll.TrainState()))
        [(tensor([0, 1, 2, 3]), True), (tensor([4]), True)]

        If a batch has no sample for this rank, the batch's first sample is used in its place and does not count. All
        ranks therefore make the same number of forward passes, and each sample counts once.
        """
        return self._batches(self._read(state, again=True), Iteration(), pairs=True)

    def indices(self, state: TrainState) -> Tensor | tuple[Any, ...] | None:
        """Dataset indices of the samples in the next batch, without reading them.

        >>> import looplib as ll, torch
        >>> loader = ll.make_loader(torch.arange(5) * 10, batch_size=4, order=ll.data.sequential())
        >>> loader.indices(ll.TrainState(batch=1))
        tensor([4])

        The result is an int64 tensor of shape (samples,). It covers this rank's part of the batch. Streams return None,
        since their samples have no indices. Of `zipped` loaders, it is a tuple with the indices of each.
        """
        check_state(state, "loader.indices(state)")
        indices: Tensor | tuple[Any, ...] | None = self._indices(state, self._samples_read(state))
        return indices

    def _indices(self, state: TrainState, read: int) -> Any:
        if isinstance(self.source, Streamed):
            return None
        ranks = rank_and_size() if self.divide else (0, 1)
        return next(self.source.jobs(state, *ranks, again=True, read=read)).keys

    def resume(self, state: TrainState) -> TrainState:
        """Continue a run with a different batch size or dataset: convert the state's position to this loader's batches.

        >>> import looplib as ll, torch
        >>> of_4, of_20 = (ll.make_loader(range(100), batch_size=size) for size in (4, 20))
        >>> state = ll.init_state(torch.nn.Linear(1, 1), loader=of_4)
        >>> state = state.replace(step=5, batch=5, samples=20, batch_samples=4)  # after 5 steps
        >>> of_20.resume(state)
        TrainState(step=5, epoch=0, batch=1/5, samples=20, params=2 tensors (2 numbers), seed=0)

        Only the position, `epoch_length` and the loader in `state.run` change; weights, optimizer state, step and samples stay.

        `ckpt.restore(state)` does this by itself if only the batch size has changed, and `init_state` was given the loader.

        At the end of an epoch, any batch size and any dataset are accepted. Within an epoch, the remaining samples
        are the same as before, in larger or smaller batches. If the next sample is in the middle of a batch of this
        loader, the first batch has the samples that are left of it. The order of the samples must not have changed. The
        order changes if the dataset does, except with `sequential()`, and `by_length` and `batch_sampler` build different
        batches for a different batch size. A state knows the batch sizes of the loaders that `init_state` was given, or
        that its checkpoint stores, so a change is seen even if the epoch has as many batches as before. If it knows none,
        it warns that the batches are taken to have the size of the last one. Use the same seed as before, which this
        function does not compare.

        A loader of growing batches has no batch that can begin later: one has to begin at the next sample, as with
        `order=ll.data.growing({0: old, n: new})`, where n is `state.samples`, or if `drop_last` has dropped samples,
        the number that the error gives. Epochs of such a loader have different lengths, so continue with
        `loader.resume(state).replace(epoch_length=None)`.

        Args:
            state: a state whose run used a different loader.

        Raises:
            ValueError: the state is within an epoch that this loader cannot continue.
            TypeError: the loader reads a stream, whose samples are not counted.
        """
        source = self.source
        if isinstance(source, Streamed):
            raise TypeError(
                f"a loader over a stream ({type(self.dataset).__name__}) cannot continue a run that began with another "
                "batch size within an epoch; at the end of one, there is nothing to change"
            )
        plan = source.plan(state.epoch)
        converted = resumed(state, plan, source.length, self.batch_size, source.order, self.description)
        return state if converted is state else converted.replace(run=_with_loader(converted.run, self.description))

    @functools.cached_property
    def description(self) -> dict[str, str | int | bool | None]:
        """Description of everything that the batches depend on, as plain values to store with a checkpoint.

        >>> import looplib as ll
        >>> ll.make_loader(range(10), batch_size=4, seed=3).description
        {'dataset': 'range', 'samples': 10, 'order': 'shuffled()', 'seed': 3, 'batch_size': 4, 'drop_last': False,
         'max_batches': None}

        Compare it when resuming. Long weights and lengths, and the indices that a sampler gives for epoch 0, are
        represented by a checksum. It is made when it is first asked for, and kept.

        Of the dataset, it has the name of the class and the number of samples, not the contents. A run knows its loaders by
        their descriptions, so one over another dataset of the same class and length is the same to it: no warning tells
        you that a resumed run reads other data. Within a batch that was partly read on another number of ranks, it also
        leaves out the samples that the run has read. Give such a loader another `seed`.
        """
        sized = self.order is not None and hasattr(self.dataset, "__len__")  # keys of a sampler need none
        return {
            "dataset": type(self.dataset).__name__,
            "samples": len(self.dataset) if sized else None,
            "order": self._described_order(),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "max_batches": self.max_batches,
            **self._described_stream(),
            **({} if self.divide else {"divide": False}),
            **({} if self.batch_size_per_rank is None else {"batch_size_per_rank": self.batch_size_per_rank}),
        }

    def _described_stream(self) -> dict[str, int]:
        if not isinstance(self.source, Streamed):
            return {}
        if self.source.seekable:  # any workers read the same batches
            return {"buffer": self.source.seekable.buffer}
        return {"workers": self.source.engines.workers}

    def _described_order(self) -> str:
        if isinstance(self.source, Streamed):
            return "stream"
        order = self.source.order
        if order.numbers is not None:
            checked: Any = array("d", order.numbers.tolist())  # a tensor has no bytes without numpy
        elif order.source is not None:
            keys, ends = self.source.plan(0).listed
            checked = repr((keys, ends) if order.whole_batches else keys).encode()
        else:
            return repr(order)
        of_size = "" if order.any_batch_size or order.whole_batches else f" in batches of {self.batch_size}"
        return f"{order!r}{of_size}, checksum {crc32(checked):08x}"

    def _read(self, state: TrainState, *, again: bool, read: int = 0) -> Iterator[tuple[Any, int]]:
        """Remaining batches as the source gives them: this rank's part, and the samples in the batch."""
        return self.source.read(state, *(rank_and_size() if self.divide else (0, 1)), again=again, read=read)

    def _samples_read(self, state: TrainState) -> int:
        """Samples of the state's batch that the run has read before it, if this loader is known to the run.

        They are counted in the first of the run's loaders, whatever stands beside it (`zipped`). The others have read the same
        part of their batch.
        """
        loaders, description, beside = state.run.known_loaders, self.description, ("beside",)
        read = read_of_batch(state.run.partly_read, state.epoch, state.batch)
        if not read or not loaders or without(loaders[0], beside) == without(description, beside):
            return read if loaders else 0
        if description not in loaders:
            return 0
        size, of_first = self.batch_size or 0, loaders[0].get("batch_size") or 1
        check(
            size and read * size % of_first == 0,
            f"the run has read {read} samples of the batch of {of_first} at which the state stands, and no part of a batch of "
            f"{size} says what {self.call} has read: its batch size and that of the run's first loader have to change by the same "
            "factor, or at the end of an epoch",
        )
        return read * size // of_first

    def _check_ranks(self) -> None:
        ranks, size = rank_and_size()[1], self.batch_size_per_rank
        check(
            size is None or is_alone() or self.batch_size == size * ranks,
            f"a loader with batch_size_per_rank={size} was made for batches of {self.batch_size} samples, and there are "
            f"{ranks} ranks now: make it after ll.distributed.setup(), and again if the number of ranks has changed",
        )

    def _batches(
        self, source: Iterator[tuple[Any, int]], iteration: Iteration, *, pairs: bool = False
    ) -> Generator[Any, None, None]:
        rank, ranks = rank_and_size() if self.divide else (0, 1)

        def delivered(read: tuple[Any, int]) -> Any:
            iteration.drawn += 1
            part, counts = self._move(read[0]), rank < read[1] or ranks == 1
            if pairs:
                return part, counts
            return part if counts else empty_part(part, read[1], ranks, self.counts)

        return _closable(map(delivered, source), iteration)

    def __len__(self) -> int:
        if isinstance(self.source, Streamed):
            raise TypeError(
                f"a loader over a stream ({type(self.dataset).__name__}) has no length; write ll.init_state(..., loader=loader), "
                "and call state = ll.state.end_epoch(state) after the for loop"
            )
        return self.source.length

    @property
    def shuffles(self) -> bool:
        """True if the samples come in an order that is neither the dataset's nor given by the user."""
        return self.order is not None and self.order.shuffles

    def __iter__(self) -> NoReturn:
        raise TypeError("a Loader is a function of the state: write `for batch in loader(state)`")

    def __repr__(self) -> str:
        return f"{self.call}  # {'a stream' if self.order is None else f'{len(self)} batches'}"


kinds_of_classes[Loader] = "loader"


def make_loader(  # noqa: PLR0913 - there are two ways to give the batch size
    dataset: Any,
    *,
    batch_size: int | _arguments.Required | None = _arguments.REQUIRED,
    batch_size_per_rank: int | None = None,
    order: Order | None = None,
    seed: int = 0,
    drop_last: bool = False,
    max_batches: int | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    count_samples: Callable[[Any], int] | None = None,
    device: torch.device | str | int | None = None,
    divide: bool = True,
    **dataloader_options: Any,
) -> Loader:
    """Make a data loader: a function from a state to the remaining batches of its epoch.

    >>> import looplib as ll, torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(10))
    >>> loader = ll.make_loader(data, batch_size=4, seed=0)
    >>> state = ll.init_state(torch.nn.Linear(1, 1), loader=loader)
    >>> for (x,) in loader(state):
    ...     print(x)
    tensor([...])
    tensor([...])
    tensor([...])
    >>> [x for (x,) in loader(state.replace(batch=2))][0].equal(x)
    True
    >>> test_batches = ll.make_loader(data, batch_size=4, order=ll.data.sequential(), num_workers=0)

    The order is a function of (seed, epoch), so a resumed run gets the batches that were left, with any number of
    workers (those of a stream may not change within an epoch). Under torchrun, nothing needs to change:
    `batch_size` is that of the global batch, and each rank reads its own part.

    In a loop of your own, give `loader(ll.TrainState(epoch=epoch, batch=batches_taken))`. With the same epoch, the order is
    the same again.

    Args:
        dataset: anything with `__len__` and `__getitem__`; a stream; or a DataLoader (or torchdata
            StatefulDataLoader), whose settings are used, except for its generator.
        batch_size: samples per batch over all ranks together, or None if each item of the dataset is already a batch.
            Required, except with `batch_size_per_rank`, `growing` and `batch_sampler`, and for a DataLoader.
        batch_size_per_rank: samples per batch and rank, in place of `batch_size`. See **Another number of ranks**.
        order: `ll.data.shuffled()` (the default), `sequential()`, `with_replacement(num_samples)`, `weighted(weights)`,
            `mixture(weights, num_samples)`, `by_length(lengths)`, `growing(sizes)`, `shuffled_blocks(buffer)`,
            `sampler(...)` or `batch_sampler(...)`. A stream has its own order.
        seed: int, seed of the order and of random draws inside the dataset.
        drop_last: if True, drop the last batch of an epoch when it is incomplete.
        max_batches: number of batches after which each epoch ends. A shuffled order has different samples in each epoch; to
            repeat the same ones, also pass `order=ll.data.sequential()`, or use a Subset. For streams, set the state's
            `epoch_length` instead.
        collate_fn: function from a list of samples to a batch. Defaults to torch's `default_collate`.
        count_samples: function from a batch to its number of samples, for a `collate_fn` that packs samples into rows,
            leaves some out on purpose, or returns a batch for which the rule of `ll.data.count_samples` gives a different
            number. Without it, a batch is refused if the rule does not give the number of samples drawn. Pass the same
            function to `make_grad_fn`.
        device: device to move the tensors of each batch to (and anything else in it that has a `to`). The copy to an
            accelerator is asynchronous, by way of pinned memory; `pin_memory=True` fills that in a thread of its own.
        divide: if False, each rank gets the whole batch.
        dataloader_options: `num_workers`, `pin_memory`, `prefetch_factor`, `persistent_workers`, `timeout`,
            `multiprocessing_context` and `worker_init_fn` of torch's DataLoader, and its `shuffle`, short for an order:
            True for `shuffled()`, False for `sequential()`.

    Raises:
        TypeError: the dataset can be neither indexed nor iterated more than once; `batch_size` is missing; a sampler
            returns something other than indices; torch's DataLoader has no such option; or, on several ranks, an item
            that should be a batch has no samples that can be counted.
        ValueError: options contradict each other or the dataset; a sampler is not a function of the epoch, or divides
            samples among ranks itself (DistributedSampler); or an epoch has no batches. From `loader(state)`: the
            state's `epoch_length` or position is not this loader's (see `Loader.resume`), or a batch has fewer
            samples than there are ranks and is of a type that cannot be made without samples; or the batch that
            `collate_fn` returned has a different number of samples from those drawn, by the rule of
            `ll.data.count_samples`.
        RuntimeError: the dataset or `collate_fn` raises StopIteration, which a loop would mistake for the end of the
            data.

    **Random draws.** Augmentation may draw from the global streams of torch (CPU), numpy and `random`. What
    `__getitem__` draws is a function of (seed, epoch, index), and what `collate_fn` draws of (seed, epoch, batch,
    rank). The streams themselves are left unchanged. An index that a sampler repeats within an epoch gets different
    draws each time. Generators that belong to the dataset are not seeded. A dataset with its own `__getitems__`
    receives a whole batch under the seed of its first index, so its draws also depend on the batch size and the
    number of ranks.

    Seeding takes some 10 microseconds for each item, and saving and restoring the streams some 100 for each batch. A dataset
    that draws nothing and whose items take less than that is read faster as a TensorDataset, or with `__getitems__`.

    **Several processes.** Each rank reads consecutive samples of the global batch; if it does not divide evenly, the
    first ranks get one more, as with `torch.tensor_split`. A step weights them by their
    samples. DDP in a loop of your own does not, so choose a `batch_size` that the number of ranks divides, and
    `drop_last=True`, there. No samples are repeated or dropped. In a batch with fewer samples than ranks, some ranks
    get no samples (0 rows), with which a step with DDP, FSDP2 or `reduce_gradients` contributes nothing. For
    evaluation, see `Loader.parts`.

    **Another number of ranks.** With `batch_size`, the batches are the same on any number of ranks. With
    `batch_size_per_rank=8`, a batch has 8 samples for each of the ranks that there are when the loader is made, after
    `ll.distributed.setup()`. A run whose `init_state` was given the loader can be restored on another number of ranks in
    both cases, also within an epoch: `ckpt.restore(state)` continues at the next sample. With `batch_size_per_rank`, the
    position is counted in the new batches from there. If the next sample is in the middle of one, the first batch has the
    samples that are left of it. The order of the samples is a function of (seed, epoch), so each comes once in an epoch,
    in the same order on any ranks. Only `drop_last` drops other samples at the end, and epochs of `max_batches`, or of the
    `epoch_length` of a stream, have as many batches of the new size. Several loaders stay together if all have a batch size
    per rank. Refused within an epoch: `zipped` loaders, a stream that several workers read, and without `epoch_length`, as for a
    stream, a run that was saved after a last batch that was not full. Continue it there with `batch_size=`, that of before.

    **Streams.** A stream (an `IterableDataset`, or anything else that has only `__iter__`) is read from its start at every
    call. The batches before `state.batch` are read and skipped, unless `ll.data.with_position` has kept its position, or the
    stream is one of `ll.data.shuffled_stream`, which begins anywhere. An epoch is one pass, after which you call `state =
    ll.state.end_epoch(state)`; or `epoch_length` batches, if the state has one. Its `set_epoch(epoch)` is called if it
    exists. Draws are a function of (seed, epoch), and with workers, of the worker's index. Each worker iterates over the
    dataset for itself, which divides its samples by `torch.utils.data.get_worker_info()`, or each sample comes once for each
    worker. Another `num_workers` gives other batches, so keep it within an epoch. Each rank reads the whole stream and
    collates its own samples. A stream that gives each rank different samples needs `divide=False`; see "Train on a stream" in
    the cookbook.

    **Items that are batches.** With `batch_size=None`, each item of the dataset is a batch. Each rank reads the whole
    item and takes its samples from every tensor, array and list in it.

    **Memory.** The order of an epoch takes 8 bytes per sample on each rank (8 GB for a billion samples), except with
    `ll.data.with_replacement`.
    """
    if isinstance(dataset, Loader):
        raise TypeError(f"make_loader got {dataset!r}, which is a loader already; give its dataset")
    if isinstance(dataset, DataLoader):
        arguments: dict[str, Any] = {
            "batch_size": batch_size,
            "batch_size_per_rank": batch_size_per_rank,
            "order": order,
        }
        arguments = {**arguments, "drop_last": drop_last or None, "collate_fn": collate_fn}
        settings = _arguments.settings_of(dataset, arguments | dataloader_options)
        return make_loader(
            dataset.dataset,
            seed=seed,
            max_batches=max_batches,
            count_samples=count_samples,
            device=device,
            divide=divide,
            **settings,
        )

    _arguments.check_options(order, max_batches, dataloader_options)
    order = _arguments.order_of(order, dataloader_options.pop("shuffle", None))
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        _arguments.check_stream(dataset, order, max_batches, dataloader_options.get("num_workers", 0), divide)
        order = None
    else:
        _arguments.check_samples(dataset)
        order = order or shuffled()
        if divide:
            check_undivided(repr(order), order.source)
    settings = (
        {"batch_size": batch_size} if batch_size_per_rank is None else {"batch_size_per_rank": batch_size_per_rank}
    )
    batch_size = _arguments.of_all_ranks(batch_size_per_rank, batch_size, divide)
    size = _arguments.check_batch_size(dataset, batch_size, order, drop_last)
    is_given, in_microbatches = count_samples is not None, isinstance(collate_fn, collate_microbatches)
    counts = Counts(as_counter(count_samples), is_given, in_microbatches)
    source: Samples | Streamed
    if order is None:
        engines = Engines(Stream(dataset, collate_fn, seed, counts, size, drop_last), seed, dataloader_options)
        source = Streamed(engines, dataset, divide)
    else:
        batched = size is not None or order.whole_batches
        reader = reader_of(dataset, collate_fn, seed, counts, size, batched=batched, by_list=order.by_list)
        engines = Engines(reader, seed, dataloader_options)
        plan = functools.partial(plan_of, order, dataset, size, seed, drop_last, max_batches)
        first = plan(0)
        check(first, f"an epoch has no batches: {first.drawn} samples, batch_size={size}, drop_last={drop_last}")
        check(
            order.source is None or first.listed == plan(0).listed,
            f"{order} gave two different orders when asked twice for epoch 0; it must be a function of the epoch: "
            "draw from the global streams, from its own torch `generator` attribute, or from the generator given to a "
            "function (epoch, generator), and keep no count",
        )
        source = Samples(engines, order, plan, len(first), batched)
    move = _mover(device, dataloader_options.get("pin_memory", False))
    return with_repr(
        Loader(dataset, size, seed, order, drop_last, max_batches, divide, source, counts, move, batch_size_per_rank),
        make_loader,
        Code(type(dataset).__name__),
        **settings,
        order=None if repr(order) in ("None", "shuffled()") else Code(f"ll.data.{order}"),  # these are the defaults
        seed=seed,
        drop_last=drop_last,
        max_batches=max_batches,
        divide=divide,
        collate_fn=collate_fn,
        count_samples=count_samples,
        device=device,
        **dataloader_options,
    )


def _closable(batches: Iterator[Any], iteration: Iteration) -> Generator[Any, None, None]:
    """The batches from a generator, whose `close` ends their workers, and which holds none of them."""
    yield from batches
    iteration.ended = True


def _mover(device: torch.device | str | int | None, non_blocking: bool) -> Callable[[Any], Any]:
    if device is None:
        return unchanged
    target = torch.device(device)
    # A copy from memory that is not pinned would wait for the steps that the device still has to do.
    pins = target.type not in ("cpu", "meta", "mps") and torch.accelerator.is_available()

    def moved(leaf: Any) -> Any:
        if not hasattr(leaf, "to"):
            return leaf
        if pins and type(leaf) is Tensor and leaf.is_cpu:
            return leaf.pin_memory().to(target, non_blocking=True)
        return leaf.to(target, non_blocking=non_blocking)

    # Objects with their own `to` (a tokenizer's BatchEncoding, a PackedSequence) are moved by it.
    return functools.partial(trees.map_leaves, moved, is_leaf=lambda node: hasattr(node, "to"))


def _check_stream(state: TrainState, description: Mapping[str, Any]) -> None:
    """Raise ValueError if the rest of a stream's epoch would come in other batches, whose position is not known."""
    loaders = loaders_of_position(state) if state.batch else ()
    for loader in () if description in loaders else loaders:
        sizes = {name: description[name] for name in ("batch_size", "workers", "buffer") if name in description}
        was = ", ".join(f"{name}={loader.get(name)}" for name, now in sizes.items() if loader.get(name) != now)
        check(
            {**loader, **sizes} != description,
            f"the state is at batch {state.batch} of an epoch of a stream that was read with {was}, which is different now: "
            "its samples come in other batches, so some would come again and others never. Continue this epoch with as many "
            f"workers and ranks, or leave out the rest of it: state.replace(epoch={state.epoch + 1}, batch=0)",
        )


def _compare(state: TrainState, description: Mapping[str, Any]) -> None:
    """Warn if a restored state continues with a loader that neither its checkpoint nor its `init_state` knows.

    The restore has compared the loaders that `init_state` was given. At the start of an epoch, a loader that is not among
    them may be one that evaluates.
    """
    run, ranks = state.run, rank_and_size()[1]
    if rank():
        return
    if is_just_restored(state):
        if not run.saved_loaders and state.batch:
            warn(
                f"{run.restored} does not say which loader gave the batches of epoch {state.epoch}, so this one, which "
                f"continues at batch {state.batch}, cannot be compared with it: has it the dataset, batch_size, order and "
                "seed of before? Checkpoints of a run that begins with ll.init_state(..., loader=loader) say it"
            )
        is_known = not run.saved_loaders or description in (*run.saved_loaders, *run.loaders)
        if not is_known and (state.batch or not run.loaders):
            changed = differences({"loader": run.saved_loaders[-1]}, {"loader": description})
            warn(
                f"{other_settings(run.restored, changed)}. If the run has several loaders, give all of them to "
                "ll.init_state(..., loader=[...])"
            )
    if not run.known_loaders and not state.step and state.opt_state is not None and ranks > 1:
        warn(
            "the run does not know its loader, so the ranks do not compare whether all of them have the same one: write "
            "ll.init_state(..., loader=loader)"
        )


def _with_loader(run: Run, description: Mapping[str, Any]) -> Run:
    """The record of a run whose position has been converted to the batches of a loader."""
    others = (loader for loader in run.known_loaders[1:] if loader != description)
    loaders = (description, *others)
    return replace(run, loaders=loaders, saved_loaders=loaders if run.restored else ())
