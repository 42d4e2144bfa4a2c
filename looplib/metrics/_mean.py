"""Weighted means that can be merged.

A metric is a small record of sums, so the value over a dataset is that of the merged records of its parts, however it
was split. Nothing leaves the device until `compute`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from looplib._core import torch_private, trees
from looplib._core.checks import as_tensor, check, check_real, named, separated
from looplib._core.mappings import wide_dtype
from looplib.metrics._collected import Cat
from looplib.types import Metric, Metrics


class Mean(NamedTuple):
    """Weighted mean that can be merged: `total / weight`.

    >>> import torch
    >>> Mean(torch.tensor(6.0), 3).merge(Mean(torch.tensor(2.0), 1)).compute()
    tensor(2., dtype=torch.float64)

    Return it from a loss function whose average is not over samples: for tokens, the summed loss and the number of
    tokens. Merging adds totals and weights separately, so the result is the mean over everything, not a mean of
    means. If `value` is a mean over n samples already, `Mean(value, 1, times=n)` computes exactly `value`, and counts n
    times when it is merged.

    Merging adds in float64 (float32 on devices without it). The value is NaN if the weight is 0, as 0 / 0.

    Attributes:
        total: the sum, a tensor with one element or a number. In a stack (`vmap_step`), a tensor with one value per
            member.
        weight: what to divide it by, of the same kind.
        times: number of equal (total, weight) pairs that the record represents.
    """

    total: Tensor | float
    weight: Tensor | float = 1
    times: int = 1

    def merge(self, *others: Mean) -> Mean:
        totals, weights, times = zip(self, *others, strict=True)
        return Mean(_sum(totals, times), _sum(weights, times))

    def compute(self) -> Tensor | float:
        if isinstance(self.weight, (int, float)) and self.weight == 1:
            return self.total
        if isinstance(self.total, Tensor):  # stays on its device, without a sync
            return (self.total if self.total.is_floating_point() else _wide(self.total)) / self.weight
        return _wide(as_tensor(self.weight)).new_tensor(self.total) / self.weight

    def item(self) -> float:
        """Return the value as a Python float, like `Tensor.item`. Waits for the device."""
        return float(self)

    def __float__(self) -> float:
        value = self.compute()
        check_real("this Mean", value)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"this Mean has the shape {tuple(value.shape)}, and not one value: for the step of a stack "
                "(ll.vmap_step), ll.transforms.compute_members(metrics) gives the values of each member; otherwise, give a total "
                "and a weight of one element each"
            )
        return float(value)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np  # NumPy has called this; it would take a list of tuples for a matrix

        return np.array(float(self), dtype=dtype)


def _not_a_number(self: Mean, *others: Any) -> NoReturn:
    raise TypeError(
        "a Mean is a record of a sum and a weight, not a number: metrics['loss'].item() gives its value; "
        "for the mean over several steps, use ll.Window or ll.metrics.merge(metrics, other_metrics)"
    )


# As a tuple, it would be compared and concatenated field by field.
for _name in ("add", "radd", "mul", "rmul", "sub", "rsub", "truediv", "rtruediv", "lt", "le", "gt", "ge"):
    setattr(Mean, f"__{_name}__", _not_a_number)


def _sum(values: Sequence[Tensor | float], times: Sequence[int]) -> Tensor | float:
    """Sum of the values, each multiplied by its entry of `times`, in few operations."""
    pairs = list(zip(values, times, strict=True))
    number = sum(value * n for value, n in pairs if not isinstance(value, Tensor))
    tensors = [value.reshape(()) if value.numel() == 1 else value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return number
    counts = [n for value, n in pairs if isinstance(value, Tensor)]
    terms = torch_private.foreach_mul(_wide(torch.stack(tensors)).unbind(), counts)
    return torch.stack(terms).sum(0) + number


def _wide(tensor: Tensor) -> Tensor:
    check_real("the total or the weight of a Mean", tensor)
    return tensor.to(wide_dtype(tensor.device))


def merge(first: Metrics, *rest: Metrics) -> dict[str, Metric]:
    """Merge metrics: combine the records of several parts, name by name.

    >>> both = merge({"loss": Mean(1.0, 1, times=3)}, {"loss": Mean(5.0, 1)})
    >>> compute(both)
    {'loss': 2.0}

    Args:
        first, rest: dicts of name -> record.

    Raises:
        ValueError: the dicts have different names.
        TypeError: a value that is merged with another one is not a metric (the message names it).
    """
    for metrics in (first, *rest):
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"merge got {named(metrics)}: give dicts of name -> record, and those of a list as merge(*list)"
            )
    for other in rest:
        if other.keys() != first.keys():
            raise ValueError(
                f"metrics to merge must have the same names: found {sorted(first)} and {sorted(other)}; "
                "let the metric or loss function return each name for every batch"
            )
    return _merged_by_name((first, *rest))


def _merged_by_name(parts: Sequence[Metrics]) -> dict[str, Metric]:
    """Merge the records of each name, over the parts that have it."""
    names = dict.fromkeys(name for metrics in parts for name in metrics)
    try:
        return {name: _merged([metrics[name] for metrics in parts if name in metrics]) for name in names}
    except AttributeError:
        for metrics in parts:
            _check_metrics(metrics)
        raise


def _merged(records: list[Any]) -> Metric:
    if len(records) > 1 and all(isinstance(record, Mean) for record in records):
        return Mean.merge(*records)  # all at once, in few operations
    merged: Metric = reduce(lambda total, record: total.merge(record), records)
    return merged


def _check_metrics(metrics: Metrics) -> None:
    """Raise TypeError for a value that is not a metric."""
    for name, metric in metrics.items():
        check(
            isinstance(metric, Metric),
            f"{name!r} is a {type(metric).__name__}, not a metric; give a record with merge and compute, such as "
            "ll.Mean(total, weight), for the mean of a batch ll.Mean(mean * count, count). "
            f"A number goes beside them: ll.compute(metrics) | {{{name!r}: value}}",
            TypeError,
        )


def _numbers(tensors: list[Tensor]) -> list[Any]:
    """The numbers of scalar tensors, in one transfer if they are on one device."""
    wide = [_wide(tensor) for tensor in tensors]
    if len({tensor.device for tensor in wide}) == 1:
        return torch.stack(wide).tolist()
    return [tensor.item() for tensor in wide]


def compute(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """Compute metrics: their values as Python floats, in one transfer from the device, which is waited for.

    >>> compute({"loss": Mean(3.0, 4)}, prefix="train/")
    {'train/loss': 0.75}

    Args:
        metrics: name -> record. A `Cat` is no number, and is left out.
        prefix: string put before each name, such as "train/". A slash is added to one that ends with a letter or digit.

    Raises:
        TypeError: a value is not a metric or does not compute a number (the message names it), or `metrics` is not a dict.
        ValueError: the metrics are those of a stack; use `compute_members`.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"compute takes a dict of metrics, and found a {type(metrics).__name__}: give the second value that a step "
            "returns, or window.metrics(). The number of one Mean is metrics['loss'].item()"
        )
    _check_metrics(metrics)
    values = {name: metric.compute() for name, metric in metrics.items() if not isinstance(metric, Cat)}
    for name, value in values.items():
        check(
            hasattr(value, "__float__"),
            f"{name!r} computes {named(value)}, and not one number: make a record of each number, such as "
            "Corpus.of(lambda *columns: function(*columns)['rouge1'], *columns)",
            TypeError,
        )
        check_real(repr(name), value)
    # One transfer for all values of a device instead of one for each.
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if tensor.numel() != 1:
            raise ValueError(
                f"{name!r} has the shape {tuple(tensor.shape)}, and not one value: of the step of a stack "
                "(ll.vmap_step) ll.transforms.compute_members(metrics) gives the values of each member, also of the metrics that "
                "ll.evaluation.evaluate_records(eval_step, stack, batches) returns; for a Mean, give a total and a weight of one element "
                "each; of another record, read one "
                "number by ll.metrics.Reading(record, lambda record: record.value()[0])"
            )
    waiting = [tensor.detach().reshape(()) for tensor in tensors.values()]
    values.update(zip(tensors, _numbers(waiting), strict=True))
    prefix = separated(prefix)
    return {prefix + name: float(value) for name, value in values.items()}


def _has_graph(record: Any) -> bool:
    if isinstance(record, Tensor):
        return record.requires_grad
    return isinstance(record, tuple) and any(map(_has_graph, record))


@dataclass(frozen=True)
class Window:
    """Logging window: collect the metrics of several steps without waiting for the device.

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

    In a loop of your own, add records: `window.add({"loss": ll.Mean(loss, 1, times=len(x))})` of a mean over the batch.

    A window in `state.extra` is part of checkpoints, so the log of a run that was stopped is that of an unbroken one:

        state = ckpt.restore(ll.init_state(model, optimizer, extra={"window": ll.Window()}))
        ...
        state = state.with_extra(window=state.extra["window"].add(metrics))

    Such a window must hold only `Mean`s, the same on all ranks (`ll.distributed.reduce`). A window outside the state is
    empty again in a resumed run: log when you save, `log_now = ll.every_n_steps(50) | save_now`.

    It is an immutable record, so an interrupt leaves either the old window or the new one. Adding the same metrics
    again counts them twice. Up to 64 records wait unmerged: merging costs a few operations every 64 steps, and a
    window of any length takes the memory of 64 steps.

    A name that only some of the steps have, such as one that an update reports and a skipped update does not, is merged
    over these steps. `metrics()` raises ValueError if nothing was added.

    One step whose loss is infinite or NaN makes the mean of the window so. If updates may be skipped for it (float16
    with a loss scale, `skip_nonfinite`), add only the others: `if not state.skipped: window = window.add(metrics)`. A norm that
    is not finite counts in no mean if its update is skipped.
    """

    merged: tuple[Metrics, ...] = ()
    waiting: tuple[Metrics, ...] = ()
    steps: int = 0

    def add(self, metrics: Metrics) -> Window:
        """The window with the metrics of one more step, cut off from the graph of their loss."""
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"the metrics of a step are {named(metrics)}: give the second value that a step returns, or a dict of records, "
                'such as {"loss": ll.Mean(loss, 1, times=number of samples)}'
            )
        if any(map(_has_graph, metrics.values())):
            metrics = trees.map_tensors(Tensor.detach, metrics)
        waiting = (*self.waiting, metrics)
        if len(waiting) == 64:
            return Window((_merged_by_name((*self.merged, *waiting)),), (), self.steps + 1)
        return Window(self.merged, waiting, self.steps + 1)

    def metrics(self) -> dict[str, Metric]:
        """Metrics of all steps together, for `ll.compute`."""
        if not self.steps:
            raise ValueError("the window is empty; add the metrics of a step first: window = window.add(metrics)")
        return _merged_by_name((*self.merged, *self.waiting))

    def __len__(self) -> int:
        return self.steps
