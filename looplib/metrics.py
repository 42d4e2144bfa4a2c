"""Numbers that merge.

A metric is a small record of sums, so that the value over a whole is the merge of the values over its parts,
however it was cut. Nothing leaves the device until `compute`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Metric(Protocol):
    """What `merge` and `compute` accept: a record with these two methods, such as `Mean`.

    >>> from dataclasses import dataclass
    >>> import looplib as ll
    >>> @dataclass(frozen=True)
    ... class Largest:
    ...     value: float
    ...     def merge(self, other):
    ...         return Largest(max(self.value, other.value))
    ...     def compute(self):
    ...         return self.value
    >>> ll.compute(ll.merge({"largest": Largest(2.0)}, {"largest": Largest(5.0)}))
    {'largest': 5.0}
    """

    def merge(self, other: Any) -> Any:
        """The record of both parts together."""

    def compute(self) -> Any:
        """The value: a number or a tensor of one element."""


class Mean(NamedTuple):
    """A weighted mean that merges exactly: `total / weight`.

    >>> import torch
    >>> Mean(torch.tensor(6.0), 3).merge(Mean(torch.tensor(2.0), 1)).compute()
    tensor(2., dtype=torch.float64)

    A loss_fn returns it where the average must be exact: for tokens, the summed loss and the number of tokens.
    The mean of a whole batch, with the number of its examples, is `Mean(value, 1, times=len(x))`, which keeps
    the value's own bits as long as it is alone.

    Attributes:
        total: sum, a tensor of one element, or a number; of a stack (`vmap_step`), a tensor with one for each member.
        weight: what it is divided by, likewise.
        times: how many equal parts of (total, weight) the record stands for.

    Merging adds in float64 (float32 on devices without it). A weight of 0 computes to NaN, as 0 / 0 does.
    """

    total: Tensor | float
    weight: Tensor | float = 1
    times: int = 1

    def merge(self, *others: Mean) -> Mean:
        parts = (self, *others)
        times = [part.times for part in parts]
        return Mean(_sum([part.total for part in parts], times), _sum([part.weight for part in parts], times))

    def compute(self) -> Tensor | float:
        if isinstance(self.weight, (int, float)) and self.weight == 1:
            return self.total
        if isinstance(self.total, Tensor):  # stays on its device: no sync
            return (self.total if self.total.is_floating_point() else self.total.double()) / self.weight
        narrow = isinstance(self.weight, Tensor) and self.weight.device.type == "mps"
        return torch.tensor(float(self.total), dtype=torch.float32 if narrow else torch.float64) / self.weight


def _sum(values: list[Tensor | float], times: list[int]) -> Tensor | float:
    """The sum of so many times each, with few operations however many there are."""
    pairs = list(zip(values, times, strict=True))
    number = sum(value * n for value, n in pairs if not isinstance(value, Tensor))
    tensors = [value for value in values if isinstance(value, Tensor)]
    tensors = [value.reshape(()) if value.dim() and value.numel() == 1 else value for value in tensors]
    if not tensors:
        return number
    stacked = torch.stack(tensors)
    wide = stacked if stacked.device.type == "mps" else stacked.double()
    counts = {n for value, n in pairs if isinstance(value, Tensor)}
    if len(counts) > 1:
        terms = torch._foreach_mul(wide.unbind(), [n for value, n in pairs if isinstance(value, Tensor)])
        return torch.stack(terms).sum(0) + number
    total = wide.sum(0) * counts.pop()
    return total + number if number else total


Metrics = Mapping[str, Metric]
M = TypeVar("M", bound=Metrics)


def merge(first: Metrics, *rest: Metrics) -> dict[str, Metric]:
    """The metrics of all parts together, name by name.

    >>> both = merge({"loss": Mean(1.0, 1, times=3)}, {"loss": Mean(5.0, 1)})
    >>> compute(both)
    {'loss': 2.0}

    Args:
        first, rest: of the parts, name -> record.

    Raises ValueError when the parts do not have the same names.
    """
    for other in rest:
        if other.keys() != first.keys():
            raise ValueError(
                f"metrics to merge must have the same names: found {sorted(first)} and {sorted(other)}; "
                "let the metric or loss function return each name for every batch"
            )
    if not rest:
        return dict(first)
    merged: dict[str, Metric] = {}
    for name, record in first.items():
        others = [m[name] for m in rest]
        means = [other for other in (record, *others) if isinstance(other, Mean)]
        if len(means) == len(rest) + 1:
            merged[name] = means[0].merge(*means[1:])
        else:
            merged[name] = _fold([record, *others])
    return merged


def _fold(records: list[Metric]) -> Metric:
    """As a tree and not a chain: of n records that collect, each is copied log n times and not n."""
    half = len(records) // 2
    return _fold(records[:half]).merge(_fold(records[half:])) if half else records[0]


def compute(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """The values as Python floats, with `prefix` before each name. Here, and only here, a device is waited for.

    >>> compute({"loss": Mean(3.0, 4)}, prefix="train/")
    {'train/loss': 0.75}

    Args:
        metrics: name -> record.
        prefix: such as "train/".

    Raises TypeError for a value that is no metric, naming it, and for what is no dict; ValueError for metrics of a
    stack, which `compute_members` takes.
    """
    if not isinstance(metrics, Mapping):
        what = "window.metrics()" if isinstance(metrics, Window) else '{"loss": ll.Mean(total, weight)}'
        raise TypeError(f"compute takes a dict of metrics, and found a {type(metrics).__name__}: give {what}")
    values = {}
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise TypeError(
                f"{name!r} is a {type(metric).__name__}, not a metric; give a record with merge and compute, "
                "such as ll.Mean(total, weight)"
            )
        values[name] = metric.compute()
    # One transfer for all of a device's values, not one each.
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if tensor.numel() != 1:
            raise ValueError(
                f"{name!r} has the shape {tuple(tensor.shape)}, and not one value: of the step of a stack "
                "(ll.vmap_step) ll.compute_members gives the values of each member"
            )
    waiting = [tensor.detach().reshape(()) for tensor in tensors.values()]
    if len(waiting) > 1 and len({(tensor.device, tensor.dtype) for tensor in waiting}) == 1:
        numbers = torch.stack(waiting).tolist()
    else:
        numbers = [tensor.item() for tensor in waiting]
    values.update(zip(tensors, numbers, strict=True))
    return {prefix + name: float(value) for name, value in values.items()}


def _leaves(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)
    elif not isinstance(batch, (str, bytes, int, float)):
        leaves = torch.utils._pytree.tree_leaves(batch)
        if leaves != [batch]:
            yield from _leaves(leaves)


def batch_size(batch: Any) -> int:
    """The number of examples in a batch: the length of the first dimension of its first tensor.

    >>> batch_size({"x": torch.zeros(16, 3), "y": torch.zeros(16)}), batch_size(["a", "b"])
    (16, 2)

    Args:
        batch: a tensor, or any pytree of such; what is no tensor is passed over.

    A batch without a tensor of at least one dimension counts as `len(batch)`. Raises TypeError if it has no
    length either.
    """
    first = batch[0] if type(batch) in (tuple, list) and batch else batch
    if isinstance(first, Tensor) and first.dim():  # the common case, which each step passes
        return first.size(0)
    for leaf in _leaves(batch):
        return leaf.size(0)
    try:
        return len(batch)
    except TypeError:
        raise TypeError(
            f"cannot count the examples in a {type(batch).__name__}: a batch is a tensor, or a dict, list or "
            "tuple with one, whose first dimension is the examples; for another, give make_grad_fn(..., "
            "batch_size=lambda batch: ...)"
        ) from None


@dataclass(frozen=True)
class Window:
    """The metrics of several steps, to be logged together: exact, and without a wait for the device.

    >>> import looplib as ll
    >>> window = ll.Window()
    >>> window = window.add({"loss": ll.Mean(6.0, 3)})
    >>> window = window.add({"loss": ll.Mean(2.0, 1)})
    >>> len(window), ll.compute(window.metrics(), prefix="train/")
    (2, {'train/loss': 2.0})

    In a loop:

        window = ll.Window()
        for batch in loader(state):
            state, metrics = train_step(state, batch)
            window = window.add(metrics)
            if log_now(state):
                log(state, ll.compute(window.metrics(), prefix="train/"))
                window = ll.Window()

    No checkpoint has it, so log where you save, and a run that goes on begins with an empty one:
    `log_now = ll.every_n_steps(50) | save_now`.

    It is a record that never changes, so an interrupt leaves the old one or the new one, and adding again what was
    added is adding it twice. Records wait in it unmerged until there are 64: a step costs a few operations in 64, and
    a window of any length the memory of 64 steps.

    `metrics()` raises ValueError when nothing was added, or when steps differ in their names.
    """

    merged: tuple[Metrics, ...] = ()
    waiting: tuple[Metrics, ...] = ()
    steps: int = 0

    def add(self, metrics: Metrics) -> Window:
        """The window with the metrics of one more step."""
        waiting = (*self.waiting, metrics)
        if len(waiting) == 64:
            return Window((merge(*self.merged, *waiting),), (), self.steps + 1)
        return Window(self.merged, waiting, self.steps + 1)

    def metrics(self) -> dict[str, Metric]:
        """Those of all steps together, for `ll.compute`."""
        if not self.steps:
            raise ValueError("the window is empty; add the metrics of a step first: window = window.add(metrics)")
        return merge(*self.merged, *self.waiting)

    def __len__(self) -> int:
        return self.steps
