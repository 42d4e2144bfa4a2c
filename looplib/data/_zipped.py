"""Loaders made of loaders: one without an end, and several side by side.

Neither has a position of its own: the number of batches that a run has consumed follows from its state, and the epoch and
batch of each loader from this number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any

from looplib._core.checks import check, named
from looplib._core.iterations import Iteration
from looplib._core.records import with_repr
from looplib._core.samples import as_counter, counted
from looplib.data._loader import Loader
from looplib.types import TrainState

Batches = Generator[Any, None, None]


@dataclass(frozen=True, eq=False, repr=False)
class Endless(Loader):
    """A loader that continues with the next epoch. Its attributes are those of the loader in it."""

    _loader: Loader = field(kw_only=True)

    def _check_ranks(self) -> None:
        self._loader._check_ranks()  # noqa: SLF001

    def _read(self, state: TrainState, *, again: bool, read: int = 0) -> Batches:
        return _epochs(self._loader, self._position(state), read)

    def _batches(self, source: Any, iteration: Iteration, *, pairs: bool = False) -> Batches:
        check(not pairs, f"{self.call} has no end: evaluate with the loader in it", TypeError)
        return _counted(source, iteration)

    def _position(self, state: TrainState) -> TrainState:
        """The state's position alone. Without `epoch_length`, a state counts the batches of all epochs in one."""
        more, batch = divmod(state.batch, len(self)) if state.epoch_length is None else (0, state.batch)
        return TrainState(epoch=state.epoch + more, batch=batch, epoch_length=state.epoch_length or len(self))

    def _indices(self, state: TrainState, read: int) -> Any:
        return self._loader._indices(self._position(state), read)  # noqa: SLF001

    def resume(self, state: TrainState) -> TrainState:
        """Convert a position as the loader in it does."""
        return self._loader.resume(state)

    @cached_property
    def description(self) -> dict[str, Any]:
        """Description of the loader in it, whose batches these are."""
        return self._loader.description


@dataclass(frozen=True, eq=False, repr=False)
class Zipped(Loader):
    """Loaders side by side. Its attributes are those of the first."""

    _loaders: tuple[Loader, ...] = field(kw_only=True)
    _count_samples: Callable[[Any], int] | None = field(kw_only=True)

    def _check_ranks(self) -> None:
        for loader in self._loaders:
            loader._check_ranks()  # noqa: SLF001

    def _batches(self, source: Any, iteration: Iteration, *, pairs: bool = False) -> Batches:
        check(not pairs, f"{self.call} is for training: evaluate with each loader alone", TypeError)
        return _counted(source, iteration)

    def _read(self, state: TrainState, *, again: bool, read: int = 0) -> Batches:
        first, *others = self._loaders
        position = partial(_position_after, count=self._consumed(state))
        batches = first._batches(first._read(state, again=again, read=read), Iteration())  # noqa: SLF001
        rest = [_epochs(loader, position(loader)) for loader in others]
        return self._side_by_side([batches, *rest])  # which holds no state: a loop would keep it alive

    def _side_by_side(self, loaders: list[Batches]) -> Batches:
        with ExitStack() as stack:  # its end ends the workers of each loader
            for loader in loaders:
                stack.enter_context(closing(loader))
            for batch in zip(*loaders, strict=False):  # the others do not end
                if self._count_samples is None:
                    self._check_count(batch)
                yield batch

    def _check_count(self, batch: tuple[Any, ...]) -> None:
        """Raise ValueError for a batch of which steps would take something else for its samples."""
        try:
            by_rule, samples = as_counter(None)(batch), self._loaders[0].counts(batch[0])
        except (TypeError, ValueError):
            return  # the step refuses it where it counts
        check(
            by_rule == samples,
            f"the first loader's batch has {samples} samples, and a step would count {by_rule} in the batches side by side, "
            f"by looplib's rule ({counted(batch)}). Say how they are counted, to this function and to make_grad_fn: "
            "count_samples=lambda batch: len(batch[0][0])",
        )

    def _consumed(self, state: TrainState) -> int:
        """Batches of the run before this state."""
        length = state.epoch_length or (len(self) if self.order and not self.order.may_vary else None)
        check(
            length or not state.epoch,
            f"the state is in epoch {state.epoch}, and nothing says how many batches the epochs before it had, so the "
            "position of the other loaders is unknown: give init_state(..., epoch_length=...), or a first loader whose "
            "epochs have one length",
        )
        return state.epoch * (length or 0) + state.batch

    def _indices(self, state: TrainState, read: int) -> Any:
        """Those of each loader, as a tuple."""
        first, *others = self._loaders
        count = self._consumed(state)
        rest = [loader._indices(_position_after(loader, count), 0) for loader in others]  # noqa: SLF001
        return first._indices(state, read), *rest  # noqa: SLF001

    def resume(self, state: TrainState) -> TrainState:
        """Refuse: with a different number of batches in an epoch, the other loaders would stand elsewhere."""
        raise TypeError(
            f"{self.call} cannot convert a position: the epoch and batch of the other loaders follow from the number of "
            f"batches that the run has consumed, {self._consumed(state)}. Continue with the batch sizes and datasets that it "
            "began with; or state = first.resume(state), with which the others continue elsewhere"
        )

    @cached_property
    def description(self) -> dict[str, Any]:
        """Description of everything that the batches depend on: the first loader's, and those of the others by number."""
        descriptions: list[dict[str, Any]] = [loader.description for loader in self._loaders]
        first, *others = descriptions
        others = [*first.get("beside", {}).values(), *others]  # of a first loader that is zipped itself
        return {**first, "beside": {str(number): other for number, other in enumerate(others, 1)}}


def _position_after(loader: Loader, count: int) -> TrainState:
    """A loader's position after this number of its batches, over all epochs. A stream has one epoch."""
    epoch, batch = (0, count) if loader.order is None else divmod(count, len(loader))
    return TrainState(epoch=epoch, batch=batch, epoch_length=None if loader.order is None else len(loader))


def _counted(batches: Batches, iteration: Iteration) -> Batches:
    with closing(batches):
        for batch in batches:
            iteration.drawn += 1
            yield batch
    iteration.ended = True


def _epochs(loader: Loader, position: TrainState, read: int = 0) -> Batches:
    """A loader's batches from a position on, epoch after epoch. Of the first one, some samples may have been read."""
    for epoch in itertools.count(position.epoch):
        if loader.order and loader.order.may_vary:
            count, length = len(loader.source.plan(epoch)), len(loader)  # type: ignore[union-attr]
            check(
                count == length,
                f"epoch {epoch} of {loader.call} has {count} batches, and epoch 0 has {length}: its position follows from the "
                "number of batches that the run has consumed only if all epochs have as many",
            )
        remaining = loader._batches(loader._read(position, again=False, read=read), Iteration())  # noqa: SLF001
        with closing(remaining) as batches:
            yield from batches
        check(
            loader.order is not None,
            f"the stream of {loader.call} has ended, and it stands beside another loader: its __iter__ must not end before "
            "the run, such as with itertools.cycle",
        )
        position, read = position.replace(epoch=epoch + 1, batch=0), 0


def endless(loader: Loader) -> Loader:
    """Endless (infinite) data loader: epochs follow each other in one for loop.

    >>> import looplib as ll
    >>> loader = ll.data.endless(ll.make_loader(range(5), batch_size=2, order=ll.data.sequential()))
    >>> state = ll.TrainState(epoch_length=len(loader))
    >>> for step, batch in enumerate(loader(state), 1):
    ...     print(batch.tolist())
    ...     if step == 4:
    ...         break
    [0, 1]
    [2, 3]
    [4]
    [0, 1]
    >>> next(loader(state.replace(epoch=7, batch=1)))  # a resumed run
    tensor([2, 3])

    It is for runs that count steps. Write it in place of `itertools.cycle(dataloader)`, which shuffles once only, and of
    calls of `next` that start again at StopIteration. Each epoch has an order and random draws of its own, those of the
    loader. The position is the state's `epoch` and `batch`, so that a run continues after any step: a step counts both,
    given `init_state(..., loader=loader)`. In a loop of your own, `loader(ll.TrainState(batch=batches_taken))`
    counts on over the epochs.

    Args:
        loader: the loader, whose epochs have the same number of batches.

    Raises:
        TypeError: it is no loader of looplib, or reads a stream, which is endless if its `__iter__` does not end.
        ValueError: from the loop, if an epoch has a different number of batches.

    Source: `InfiniteSampler`, as in Detectron2's `TrainingSampler`, and the `cycle(loader)` of many training scripts.
    """
    _check_loader("endless", loader)
    check(
        loader.order is not None,
        f"endless got {loader.call}, which reads a stream: it has no end if the stream's __iter__ has none",
        TypeError,
    )
    return with_repr(Endless(**_attributes(loader), _loader=loader), endless, loader)


def zipped(first: Loader, *others: Loader, count_samples: Callable[[Any], int] | None = None) -> Loader:
    """Several data loaders side by side: each batch is a tuple with a batch of each of them.

    >>> import looplib as ll
    >>> labelled = ll.make_loader(range(4), batch_size=2, order=ll.data.sequential())
    >>> unlabelled = ll.make_loader(range(10, 16), batch_size=2, order=ll.data.sequential())
    >>> loader = ll.data.zipped(labelled, unlabelled)
    >>> for epoch in range(2):
    ...     print([(x.tolist(), u.tolist()) for x, u in loader(ll.TrainState(epoch=epoch))])
    [([0, 1], [10, 11]), ([2, 3], [12, 13])]
    [([0, 1], [14, 15]), ([2, 3], [10, 11])]

    Use it for labelled and unlabelled samples (FixMatch), two domains, or several tasks. The epoch is the first loader's:
    `len(loader)` is its number of batches. Each other loader goes through its dataset at its own pace. A shorter one begins
    its next epoch, with another order, when it has ended; a longer one continues where the last epoch left it. To end the
    epoch with the longest loader, put that first.

    No position is stored. After `n = state.epoch * len(first) + state.batch` batches, a loader of `m` batches stands in its
    epoch `n // m` at batch `n % m`. A run therefore continues after any step, on any number of ranks and with any number of
    workers. Each loader divides its own batches among the ranks.

    So a restored run needs the number of batches in an epoch of `first` that it began with: after an epoch, `ckpt.restore`
    refuses another one, with which the others would stand elsewhere. If another loader has a new batch size, a warning says
    that it continues after as many of its batches.

    **Seeds.** Give each loader a `seed` of its own. Two loaders with the same seed (each has 0 by default) and the same number
    of samples have the same order in every epoch, so the same two samples always meet, and over one dataset, its random
    augmentations are equal in both. Only paired datasets, such as the images of two cameras, need that, which is why nothing
    warns of it. For two different views of one sample, return both from one dataset's `__getitem__`.

    **Samples.** Batches of different sizes cannot be counted by the rule of `ll.data.count_samples`, so say which ones count:

        count = lambda batch: len(batch[0][0])  # those of the first loader
        loader = ll.data.zipped(labelled, unlabelled, count_samples=count)
        grad_fn = ll.make_grad_fn(model, loss_fn, count_samples=count)

    A loss that adds the means over two batches is the same on several ranks only if each of the batches divides evenly among
    them: choose such a `batch_size` and `drop_last=True`. `accumulate` cuts batches of the same size, and refuses others.

    Args:
        first: the loader that decides how long an epoch is.
        others: at least one loader. A stream among them must not end, and is read again from its start by a resumed run.
        count_samples: function from the tuple of batches to its number of samples. Without it, a tuple is refused in which
            the rule would count a different number from the first batch's.

    Raises:
        TypeError: an argument is not a loader of looplib, or there is one only; from `Loader.resume`, which has no answer for
            the other loaders, and in evaluation.
        ValueError: from the loop, if an epoch of another loader has a different number of batches from its first, a stream
            among the others ends, samples are counted differently, or the state does not say how long its epochs are.

    Source: `CombinedLoader(mode="max_size_cycle")` in Lightning, with the first loader in place of the longest; Sohn et al.,
    "FixMatch: Simplifying semi-supervised learning with consistency and confidence", 2020.
    """
    check(others, "zipped got one loader; give at least two, zipped(labelled, unlabelled)", TypeError)
    for loader in (first, *others):
        _check_loader("zipped", loader)
    as_counter(count_samples)  # which checks it
    side_by_side = Zipped(**_attributes(first), _loaders=(first, *others), _count_samples=count_samples)
    return with_repr(side_by_side, zipped, first, *others, count_samples=count_samples)


def _check_loader(name: str, loader: Any) -> None:
    check(
        isinstance(loader, Loader),
        f"{name} got {named(loader)}; give a loader, as ll.make_loader returns, also of a DataLoader: "
        "ll.make_loader(dataloader)",
        TypeError,
    )


def _attributes(loader: Loader) -> dict[str, Any]:
    return {attribute.name: getattr(loader, attribute.name) for attribute in fields(Loader) if attribute.init}
