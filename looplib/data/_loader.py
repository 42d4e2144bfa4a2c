"""Batches as a function of the state.

The batches of an epoch are planned before anything is read, so a run starts at any of them by counting, and
only then divided among the ranks, so they are the same for any number of these; what is drawn while an item is
read is seeded by the item's own place, so it does not matter which process reads it or what was read before.
torch's DataLoader is the engine for workers, pinned memory and streams.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    default_collate,
    default_convert,
)

from looplib._core import ranks as _ranks
from looplib._core import trees
from looplib._core.interrupts import interruptible
from looplib.data._orders import (
    Plan,
    Sampling,
    in_order,
    order_of,
    plan_epoch,
    same_plan,
    shuffled,
    similar_lengths,
    weighted,
)
from looplib.data._workers import Engines, Items, Jobs, Rows, Stream, read_jobs, read_stream, rows_of, start_worker
from looplib.types import TrainState

_ORDERS = ("shuffle", "weights", "lengths", "sampler", "batch_sampler")


@dataclass(frozen=True, eq=False, repr=False)
class Loader:
    """Batches as a function of the state, made by `make_loader`.

    `loader(state)` is an iterator over what is left of the state's epoch; `len(loader)` is the number of
    batches in an epoch, and a TypeError for a stream, whose end is known only when it comes.

    Under torchrun a batch is divided among the ranks, and `loader(state)` gives this rank's part of each. Which rank
    that is, of how many, is asked for at each call.

    Attributes:
        dataset: what is read.
        batch_size: samples in a batch, of all ranks together, or None where the dataset or a batch sampler decides.
        seed: what the order and the draws within the dataset come from, together with the epoch.
        shuffles: the order is not the dataset's, nor one that was given.
        divide: the batches are divided among the ranks.
    """

    dataset: Any
    batch_size: int | None
    seed: int
    _length: int | None
    _batches: Callable[[TrainState, bool, Any], Iterator[Any]]
    shuffles: bool = False
    divide: bool = True
    _plan: Callable[[int], Plan] | None = None  # of an epoch; a stream has none
    _cuts: bool = True  # a rank reads some keys of a batch, and not a whole one of which it takes rows

    def __call__(self, state: TrainState) -> Iterator[Any]:
        return interruptible(self._batches(state, False, self._plan))

    def parts(self, state: TrainState) -> Iterator[tuple[Any, bool]]:
        """For evaluation: pairs of this rank's part of each batch, and whether it counts.

        >>> import looplib as ll, torch
        >>> loader = ll.make_loader(torch.arange(5), batch_size=4, shuffle=False)
        >>> list(loader.parts(ll.TrainState()))
        [(tensor([0, 1, 2, 3]), True), (tensor([4]), True)]

        Where a batch has no row for this rank, the batch's first row stands in and does not count: so all ranks
        make as many forward passes, and each sample counts once.
        """
        return interruptible(self._batches(state, True, self._plan))

    def indices(self, state: TrainState) -> Tensor | list[Any] | None:
        """Which samples of the dataset the next batch has, in the order of its rows, without reading them.

        >>> import looplib as ll, torch
        >>> loader = ll.make_loader(torch.arange(5) * 10, batch_size=4, shuffle=False)
        >>> loader.indices(ll.TrainState(batch=1))
        tensor([4])

        (rows,) int64, or a list of keys where a sampler gives others; of this rank's part of the batch. None for a
        stream, whose samples have no numbers.
        """
        if self._plan is None:
            return None
        plan = self._plan(state.epoch)
        assert self._length is not None
        _check_position(state, len(plan), self._length)
        return plan.batch(state.batch, *(_place(self.divide) if self._cuts else (0, 1)))[0]

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(
                f"a loader over a stream ({type(self.dataset).__name__}) has no length; leave epoch_length out "
                "of init_state, and call state = ll.end_epoch(state) after the for loop"
            )
        return self._length

    def __iter__(self) -> NoReturn:
        raise TypeError("a Loader is a function of the state: write `for batch in loader(state)`")

    def __repr__(self) -> str:
        batches = "a stream" if self._length is None else f"{self._length} batches"
        return f"Loader({type(self.dataset).__name__}, {batches}, batch_size={self.batch_size}, seed={self.seed})"


def make_loader(
    dataset: Any,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    weights: Sequence[float] | Tensor | None = None,
    num_samples: int | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    pool: int | None = None,
    sampler: Callable[[int, torch.Generator], Any] | Iterable[Any] | None = None,
    batch_sampler: Callable[[int, torch.Generator], Any] | Iterable[Any] | None = None,
    drop_last: bool = False,
    limit: int | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    device: torch.device | str | int | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    timeout: float = 0,
    multiprocessing_context: Any = None,
    worker_init_fn: Callable[[int], None] | None = None,
    divide: bool = True,
) -> Loader:
    """A function of the state that gives what is left of its epoch, batch by batch.

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

    Under torchrun nothing is to be changed. `batch_size` is that of the global batch, which all ranks share: each
    gets consecutive rows of it, the first ranks one more where it cannot be even (as by `torch.tensor_split`), and
    reads no others. The global batches are the same for any number of ranks, so a run may go on with more or fewer;
    nothing is repeated or dropped to make them even, and there is no `set_epoch` to call. To train, each rank needs
    a sample of each batch. To evaluate it does not: see `Loader.parts`.

    The order is a function of (seed, epoch), with any number of workers, and a run that starts at batch k
    reads nothing of what went before. What `__getitem__` draws from the global streams of torch (CPU), numpy
    and `random` is a function of (seed, epoch, index): the same with any number of workers and any batch
    size. (A sampler that gives an index again within an epoch gets other draws for it each time.) What
    `collate_fn` draws is a function of (seed, epoch, batch, rank). The global streams themselves are left as they
    were. Generators that a dataset holds for itself are its own affair.

    A dataset with a `__getitems__` of its own is given the whole list of a batch, under the seed of its first
    index: its draws then depend on the batch size and the number of ranks too.

    An item that is a batch already (with neither batch_size nor batch_sampler) is read whole by each rank, which
    then takes its rows of every tensor, array and list in it.

    A stream (an `IterableDataset`, or anything else with `__iter__` alone) is read from its start for every
    call, and the batches before `state.batch` are read and passed over (a `state_dict` of its own is not used).
    What it draws is a function of (seed, epoch), and with workers of the worker's number. Its
    `set_epoch(epoch)` is called if there is one. An epoch is one pass: call `state = ll.end_epoch(state)` after
    the for loop. For a state with an `epoch_length`, it is that many batches instead. Each rank reads all of the
    stream, and collates its own rows; among several ranks, what `collate_fn` draws does not move the stream's draws.
    A stream that gives each rank other samples already (such as those of `split_dataset_by_node` of Hugging Face's
    datasets) cannot be told from one that does not: give divide=False, the batch_size of one rank, a state with an
    `epoch_length` that all ranks can reach, and another seed on each rank if the stream draws.

    Args:
        dataset: anything with `__len__` and `__getitem__`; a stream; or a DataLoader (or a
            torchdata StatefulDataLoader), whose settings are taken over, except for its generator.
        batch_size: samples in a batch, of all ranks together; None when each item of the dataset is a batch
            already.
        seed: of the order and of the draws within the dataset.
        shuffle: True unless another order is given; False takes the samples in order.
        weights: (len(dataset),) how likely each sample is, relative to the others; samples are drawn with
            replacement, `num_samples` an epoch.
        num_samples: `len(dataset)` unless given; only with `weights`.
        lengths: (len(dataset),) of each sample, to make batches of similar lengths: the samples are shuffled,
            sorted within pools of so many batches, and the batches shuffled.
        pool: batches that are sorted together, only with `lengths`. More of them are more alike in length, and less
            different from epoch to epoch; 1 is the plain shuffle. 50, or as many as a quarter of the dataset has,
            unless given.
        sampler: any other order: `(epoch, generator) -> indices`, or an object to iterate, such as a torch
            Sampler, whose draws are seeded. It must give the same indices whenever it is asked for an epoch.
        batch_sampler: the same, for lists of indices, each a batch; in place of batch_size and drop_last.
        drop_last: leave out the last batch of an epoch when it is not full.
        limit: end each epoch after so many batches, the first ones of its order: `len(loader)` is `limit` then, or
            less where the epoch has fewer. A shuffled order has others in each epoch; to see the same samples again
            and again, give `shuffle=False` too, or a Subset. A stream's epochs are ended by the state's
            `epoch_length`.
        collate_fn: list of samples -> batch; torch's `default_collate` unless given.
        device: where to move the tensors of each batch (and whatever else in it has a `to`), without waiting
            for the copy if `pin_memory`.
        num_workers, pin_memory, prefetch_factor, persistent_workers, timeout, multiprocessing_context,
            worker_init_fn: as for torch's DataLoader.
        divide: False gives each rank the whole of each batch.

    Raises:
        TypeError: a dataset that can be neither indexed nor iterated more than once; a sampler that gives
            anything but indices; among several ranks, an item without rows where items are batches.
        ValueError: options that contradict each other or the dataset, a sampler that is no function of the
            epoch, or that divides among ranks by itself (DistributedSampler), an epoch without batches; from
            `loader(state)`, a state whose `epoch_length` or position is not this loader's, and a batch of fewer
            samples than ranks: before the first is read, or when it comes, from a stream and from items that are
            batches.

    Batches of similar lengths are made as by the `group_by_length` of transformers.
    """
    arguments = dict(locals())
    if isinstance(dataset, DataLoader):
        defaults = inspect.signature(make_loader).parameters
        given = [name for name, value in arguments.items() if value is not defaults[name].default]
        if extra := set(given) - {"dataset", "limit", "seed", "device", "divide"}:
            raise ValueError(
                f"{', '.join(sorted(extra))} given together with a {type(dataset).__name__}, which has its own; "
                "give them to it, or give its dataset to make_loader"
            )
        ours: dict[str, Any] = {"limit": limit, "seed": seed, "device": device, "divide": divide}
        return make_loader(dataset.dataset, **ours, **_options_of(dataset))

    stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    _check_options(arguments, stream)
    collate = collate_fn or (default_convert if batch_size is None and batch_sampler is None else default_collate)
    move = _mover(device, non_blocking=pin_memory)
    options: dict[str, Any] = {
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "prefetch_factor": prefetch_factor,
        "persistent_workers": persistent_workers,
        "timeout": timeout,
        "multiprocessing_context": multiprocessing_context,
        "worker_init_fn": functools.partial(start_worker, worker_init_fn),
    }
    if stream:

        def build() -> DataLoader[Any]:
            source = Stream(dataset, collate, seed, batched=batch_size is not None)
            return DataLoader(
                source,
                batch_size=batch_size,
                drop_last=drop_last,
                collate_fn=source.batch,
                generator=torch.Generator(),
                **options,
            )

        engines, name = Engines(build, seed), f"the stream ({type(dataset).__name__})"

        def stream_batches(state: TrainState, pairs: bool, _: None) -> Iterator[Any]:
            place = _place(divide)
            found = read_stream(engines, name, state.epoch, state.batch, state.epoch_length, *place)
            return _given(found, move, state.epoch, state.batch, *place, pairs)

        return Loader(dataset, batch_size, seed, None, stream_batches, divide=divide)

    sampling = _sampling_of(arguments)
    length = _epoch_length(sampling, arguments)
    reader: Rows | Items
    batched = batch_size is not None or batch_sampler is not None
    if batch_size and collate is default_collate and (found := rows_of(dataset)):
        reader = Rows(dataset, *found)
    else:
        reader = Items(dataset, collate, seed, batched=batched)
    engines = Engines(
        lambda: DataLoader(
            reader,
            batch_size=None,
            sampler=Jobs(),
            collate_fn=_unchanged,
            generator=torch.Generator(),
            **options,
        ),
        seed,
    )
    in_process = num_workers == 0 and not pin_memory

    def batches(state: TrainState, pairs: bool, plan_of: Callable[[int], Plan]) -> Iterator[Any]:
        epoch, first, plan = state.epoch, state.batch, plan_of(state.epoch)
        _check_position(state, len(plan), length)
        rank, ranks = _place(divide)
        # An item that is a batch is one key, which all ranks read.
        cut = (rank, ranks) if batched else (0, 1)
        if ranks > 1 and batched and not pairs:
            k = plan.smallest(first)
            _check_size(epoch, k, plan.size(k), ranks)
        # What is returned holds no state: a loop would keep the epoch's first one alive to its end.
        jobs = ((epoch, k, *plan.batch(k, *cut), rank, ranks) for k in range(first, len(plan)))
        # A generator turns a StopIteration out of the dataset into an error; a map would end the epoch there.
        read = (reader[job] for job in jobs) if in_process else read_jobs(engines, epoch, jobs)
        if ranks > 1 and batched:
            read = ((batch, plan.size(k)) for k, batch in enumerate(read, first))
        return _given(read, move, epoch, first, rank, ranks, pairs)

    ordered = shuffle is False or sampler is not None or batch_sampler is not None
    plan_of = functools.partial(plan_epoch, sampling, seed)
    return Loader(dataset, batch_size, seed, length, batches, not ordered, divide, plan_of, _cuts=batched)


def _count(dataset: Any) -> float:
    return len(dataset) if hasattr(dataset, "__len__") else float("inf")


def _place(divide: bool) -> tuple[int, int]:
    """Which rank reads, and how many there are now."""
    return (_ranks.rank(), _ranks.world_size()) if divide else (0, 1)


def _given(
    read: Iterator[Any],
    move: Callable[[Any], Any],
    epoch: int,
    first: int,
    rank: int,
    ranks: int,
    pairs: bool,
) -> Iterator[Any]:
    """What is given of what was read: batches, and among several ranks (part, samples in the global batch)."""
    if ranks > 1:
        return _parts(read, move, epoch, first, rank, ranks, pairs)
    if pairs:
        return ((move(batch), True) for batch in read)
    return read if move is _unchanged else (move(batch) for batch in read)


def _parts(
    read: Iterator[Any], move: Callable[[Any], Any], epoch: int, first: int, rank: int, ranks: int, pairs: bool
) -> Iterator[Any]:
    with closing(read):  # type: ignore[type-var]
        for k, (part, count) in enumerate(read, first):
            if not pairs:
                _check_size(epoch, k, count, ranks)
            yield (move(part), rank < count) if pairs else move(part)


def _check_size(epoch: int, k: int, count: int, ranks: int) -> None:
    if count < ranks:
        raise ValueError(
            f"batch {k} of epoch {epoch} has {count} samples for {ranks} ranks, and each needs one at least to train "
            "on; give drop_last=True if it is a last batch that is not full, or another batch_size (the batches are "
            "divided among the ranks)"
        )


def _options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    names = (
        "collate_fn",
        "num_workers",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "prefetch_factor",
        "persistent_workers",
    )
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    if isinstance(loader.dataset, IterableDataset):
        return options | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler
    if _is_torchs("BatchSampler", batches):
        options |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
        sampler = batches.sampler
    elif batches is not None:
        return options | {"batch_sampler": batches}
    count = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    if _is_torchs("SequentialSampler", sampler) and len(sampler) == count:
        return options | {"shuffle": False}
    if _is_torchs("RandomSampler", sampler) and not sampler.replacement and len(sampler) == count:
        return options | {"shuffle": True}
    if _is_torchs("WeightedRandomSampler", sampler) and sampler.replacement and len(sampler.weights) == count:
        return options | {"weights": sampler.weights, "num_samples": sampler.num_samples}
    return options | {"sampler": sampler}


def _divided_by_rank(part: Any) -> str | None:
    """The name of what divides samples among ranks: torch's sampler, or a shard of accelerate's or transformers'."""
    while part is not None:
        if isinstance(part, DistributedSampler) or hasattr(part, "process_index"):
            return type(part).__name__
        part = getattr(part, "sampler", None)
    return None


def _is_torchs(name: str, sampler: Any) -> bool:
    """Is it torch's or torchdata's own, and not a subclass, which may give another order?"""
    kind = type(sampler)
    return kind.__name__ == name and kind.__module__.partition(".")[0] in ("torch", "torchdata")


def _one_each(name: str, values: Sequence[float] | Tensor, dataset: Any) -> Tensor:
    found = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if found.shape != (len(dataset),):
        raise ValueError(
            f"{name} has the shape {tuple(found.shape)}; expected ({len(dataset)},), one for each of the "
            f"{len(dataset)} samples"
        )
    if not found.isfinite().all() or (found < 0).any() or not found.any():
        raise ValueError(
            f"{name} go from {found.min().item()} to {found.max().item()}; expected finite numbers, none of them "
            "negative and not all 0"
        )
    return found


def _check_options(given: Mapping[str, Any], stream: bool) -> None:
    dataset, batch_size, num_samples = given["dataset"], given["batch_size"], given["num_samples"]
    kind = type(dataset).__name__
    orders = [name for name in _ORDERS if given[name] is not None]
    if stream and (not hasattr(dataset, "__iter__") or isinstance(dataset, Iterator)):
        raise TypeError(
            f"dataset is a {kind}; expected something with __len__ and __getitem__, or with an __iter__ that "
            "starts anew each time (not an iterator, which can be read once only)"
        )
    if stream and orders and given["shuffle"] is not False:
        raise ValueError(f"{orders[0]} is given for a stream ({kind}), whose order is its own")
    if stream and given["num_workers"] and isinstance(dataset, IterDataPipe):
        raise TypeError(
            f"dataset is a DataPipe ({kind}), which cannot be divided among workers here; use num_workers=0, or "
            "an IterableDataset that divides itself by get_worker_info()"
        )
    if len(orders) > 1:
        raise ValueError(f"{' and '.join(orders)} are given; each of them is an order: give one")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
        raise TypeError(f"batch_size is {batch_size!r}; expected a positive int, or None if items are batches")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected a positive int, or None if items are batches")
    if batch_size is None and (given["drop_last"] or given["lengths"] is not None):
        raise ValueError(f"{'drop_last=True' if given['drop_last'] else 'lengths'} needs a batch_size")
    if batch_size is not None and given["batch_sampler"] is not None:
        raise ValueError(f"batch_size={batch_size} and a batch_sampler are given; the sampler makes the batches")
    for name in ("dataset",) if stream else ("sampler", "batch_sampler"):
        if given["divide"] and (divided := _divided_by_rank(given[name])):
            raise ValueError(
                f"{name} is or holds a {divided}, which gives each rank samples of its own, and repeats or drops "
                "some; a looplib loader divides each batch among the ranks by itself: give it the plain dataset and "
                "the batch_size of all ranks together, or divide=False to keep this division"
            )
    if num_samples is not None and (given["weights"] is None or num_samples < 1):
        raise ValueError(f"num_samples is {num_samples}; expected a positive number, together with weights")
    if (pool := given["pool"]) is not None and (given["lengths"] is None or type(pool) is not int or pool < 1):
        raise ValueError(f"pool is {pool!r}; expected a number of batches, at least 1, together with lengths")
    if (limit := given["limit"]) is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"limit is {limit!r}; expected a number of batches, at least 1, or None for all")
    if limit is not None and stream:
        raise ValueError(
            f"limit={limit} is given for a stream ({kind}), whose epochs the state ends: "
            f"ll.init_state(..., epoch_length={limit})"
        )


def _sampling_of(given: Mapping[str, Any]) -> Sampling:
    dataset, batch_size, drop_last, limit = (given[name] for name in ("dataset", "batch_size", "drop_last", "limit"))
    for name in ("sampler", "batch_sampler"):
        if (own := given[name]) is None:
            continue
        if isinstance(own, Iterator) or (isinstance(own, Iterable) and not hasattr(own, "__len__")):
            raise TypeError(
                f"{name} is a {type(own).__name__}, which has no __len__ and so may never end or be read once "
                "only; give a torch Sampler, a sequence, or a function (epoch, generator) -> indices"
            )
        size = None if name == "batch_sampler" else batch_size or 1
        return Sampling(order_of(own), size, drop_last, distinct=False, limit=limit)
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"dataset is a {type(dataset).__name__} without __len__; give it one, or give a sampler")
    if given["weights"] is not None:
        weights = _one_each("weights", given["weights"], dataset)
        order = weighted(weights, given["num_samples"] or len(dataset))
        return Sampling(order, batch_size or 1, drop_last, distinct=False, limit=limit)
    if given["lengths"] is not None:
        lengths = _one_each("lengths", given["lengths"], dataset)
        order = similar_lengths(lengths, batch_size, drop_last, given["pool"])
    else:
        order = (in_order if given["shuffle"] is False else shuffled)(len(dataset))
    return Sampling(order, batch_size or 1, drop_last, distinct=True, limit=limit)


def _epoch_length(sampling: Sampling, given: Mapping[str, Any]) -> int:
    plan = plan_epoch(sampling, given["seed"], 0)
    if not plan:
        raise ValueError(
            f"an epoch has no batches: {len(plan.keys)} samples, batch_size={given['batch_size']}, "
            f"drop_last={given['drop_last']}"
        )
    for name in ("sampler", "batch_sampler"):
        if given[name] is not None and not same_plan(plan, plan_epoch(sampling, given["seed"], 0)):
            raise ValueError(
                f"{name} gave two different orders when asked twice for epoch 0; it must be a function of the "
                "epoch: draw from the global streams, from its own torch `generator` attribute, or from the "
                "generator given to a function (epoch, generator), and keep no count"
            )
    return len(plan)


def _check_position(state: TrainState, count: int, length: int) -> None:
    if state.epoch_length not in (None, length):
        raise ValueError(
            f"state.epoch_length is {state.epoch_length}, but this loader has {length} batches in an epoch; make "
            "the state with init_state(..., epoch_length=len(loader)), and go on with the data and the "
            "batch_size that it began with; to read another set from its beginning: loader(ll.TrainState())"
        )
    if state.epoch_length is not None and count != length:
        raise ValueError(
            f"epoch {state.epoch} has {count} batches, but epoch 0 has {length}; for epochs of different lengths, "
            "leave epoch_length out of init_state, and call state = ll.end_epoch(state) after the for loop"
        )
    if state.batch == count:
        raise ValueError(
            f"the state stands at the end of epoch {state.epoch} (batch {count} of {count}); make it with "
            "init_state(..., epoch_length=len(loader)), or call state = ll.end_epoch(state) after the for loop"
        )
    if state.batch > count:
        raise ValueError(
            f"state.batch is {state.batch}, but epoch {state.epoch} has {count} batches; is this the loader, with "
            "the data and the batch_size, that the run began with?"
        )


def _mover(device: torch.device | str | int | None, non_blocking: bool) -> Callable[[Any], Any]:
    if device is None:
        return _unchanged
    target = torch.device(device)

    def move(leaf: Any) -> Any:
        return leaf.to(target, non_blocking=non_blocking) if hasattr(leaf, "to") else leaf

    # What has a `to` of its own (a tokenizer's BatchEncoding, a PackedSequence) is moved by that.
    return functools.partial(trees.map_leaves, move, is_leaf=lambda node: hasattr(node, "to"))


def _unchanged(batch: Any) -> Any:
    return batch
