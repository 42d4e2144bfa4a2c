"""Weighted means that merge exactly.

A metric is a small record of sums, so that the value over a whole is the merge of the values over its parts,
however it was cut. Nothing leaves the device until `compute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib.types import Metric, Metrics


class Mean(NamedTuple):
    """Weighted mean that merges exactly: `total / weight`.

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

    def item(self) -> float:
        """The value as a Python float, as of a tensor; a device is waited for."""
        return float(self)

    def __float__(self) -> float:
        return float(self.compute())

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np  # which has called this: to it, a list of tuples would be a matrix

        return np.array(float(self), dtype=dtype)


def _not_a_number(self: Mean, *others: Any) -> NoReturn:
    raise TypeError(
        "a Mean is a record of a sum and a weight, not a number: metrics['loss'].item() gives its value; "
        "for the mean over several steps, use ll.Window or ll.merge(metrics, other_metrics)"
    )


# A tuple would compare and join them field by field.
for _name in ("add", "radd", "mul", "rmul", "sub", "rsub", "truediv", "rtruediv", "lt", "le", "gt", "ge"):
    setattr(Mean, f"__{_name}__", _not_a_number)


def _sum(values: list[Tensor | float], times: list[int]) -> Tensor | float:
    """The sum of so many times each, with few operations however many there are."""
    pairs = list(zip(values, times, strict=True))
    number = sum([value * n for value, n in pairs if not isinstance(value, Tensor)])
    tensors = [value for value in values if isinstance(value, Tensor)]
    tensors = [value.reshape(()) if value.dim() and value.numel() == 1 else value for value in tensors]
    if not tensors:
        return number
    stacked = torch.stack(tensors)
    wide = stacked if stacked.device.type == "mps" else stacked.double()
    counts = {n for value, n in pairs if isinstance(value, Tensor)}
    if len(counts) > 1:
        terms = torch_private.foreach_mul(wide.unbind(), [n for value, n in pairs if isinstance(value, Tensor)])
        return torch.stack(terms).sum(0) + number
    total = wide.sum(0) * counts.pop()
    return total + number if number else total


def merge(first: Metrics, *rest: Metrics) -> dict[str, Metric]:
    """Merge metrics: the records of all parts together, name by name.

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
    """Compute metrics: their values as Python floats. Here, and only here, a device is waited for.

    >>> compute({"loss": Mean(3.0, 4)}, prefix="train/")
    {'train/loss': 0.75}

    Args:
        metrics: name -> record.
        prefix: such as "train/".

    Raises TypeError for a value that is no metric, naming it, and for what is no dict; ValueError for metrics of a
    stack, which `compute_members` takes.
    """
    if not isinstance(metrics, Mapping):
        what = '{"loss": ll.Mean(total, weight)}'
        if hasattr(metrics, "metrics"):
            what = "window.metrics()"
        elif isinstance(metrics, Mean):
            what = "all of them, ll.compute(metrics), or write metrics['loss'].item() for one value"
        elif isinstance(metrics, tuple):
            what = "the second value that a train step returns, state, metrics = train_step(state, batch)"
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
                "(ll.vmap_step) ll.transforms.compute_members gives the values of each member"
            )
    waiting = [tensor.detach().reshape(()) for tensor in tensors.values()]
    if len(waiting) > 1 and len({(tensor.device, tensor.dtype) for tensor in waiting}) == 1:
        numbers = torch.stack(waiting).tolist()
    else:
        numbers = [tensor.item() for tensor in waiting]
    values.update(zip(tensors, numbers, strict=True))
    return {prefix + name: float(value) for name, value in values.items()}
