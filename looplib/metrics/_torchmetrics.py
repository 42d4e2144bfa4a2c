"""torchmetrics adapter: its metrics as mergeable records.

A torchmetrics metric is an object that accumulates. Here the object only updates and computes, and is empty between
calls: the state that a batch produces is the record.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check, named


class TorchMetric(NamedTuple):
    """A torchmetrics metric as a record: see `torchmetric`.

    >>> import looplib as ll, torch, torchmetrics
    >>> accuracy = ll.metrics.torchmetric(torchmetrics.Accuracy(task="binary"))
    >>> accuracy.of(torch.tensor([1, 0]), torch.tensor([1, 1])).updates
    1

    Attributes:
        host: the metric that updates and computes. It is empty between calls.
        states: name -> state of the metric.
        updates: number of batches.
    """

    host: Any
    states: Mapping[str, Any]
    updates: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not available: a metric of torchmetrics is called, and its record has `of`."""
        raise TypeError(
            f"this {type(self.host).__name__} is a record, which is not called: metric.of(predictions, labels) gives the record "
            "of a batch, to return from the metric function"
        )

    def of(self, *args: Any, **kwargs: Any) -> TorchMetric:
        """Record of a batch, from the arguments of the metric's `update`."""
        args, kwargs = trees.map_tensors(Tensor.detach, (args, kwargs))
        try:
            self.host.update(*args, **kwargs)
            # Copies, because a reset clears the metric's lists, which may contain the batch itself.
            states = trees.map_tensors(Tensor.clone, self.host.metric_state)
        finally:
            self.host.reset()
        return TorchMetric(self.host, states, 1)

    def merge(self, other: TorchMetric) -> TorchMetric:
        # An empty record does not have the others' device and dtype yet.
        if not self.updates or not other.updates:
            return self if self.updates else other
        states = {}
        for name, mine in self.states.items():
            merge = _REDUCTIONS.get(_name_of(self.host._reductions[name]), operator.add)  # lists are concatenated
            states[name] = merge(mine, other.states[name])
        return TorchMetric(self.host, states, self.updates + other.updates)

    def value(self) -> Any:
        """The metric's own value: a tensor of any shape, or a dict.

        Raises:
            ValueError: the record has no batches.
        """
        check(
            self.updates,
            f"this {type(self.host).__name__} was given no batch: return metric.of(predictions, labels), or what its "
            "update takes, and not the metric itself, from the function of the model and the batch",
        )
        try:
            for name, state in self.states.items():
                setattr(self.host, name, list(state) if isinstance(state, list) else state)
            self.host._update_count = self.updates
            return self.host.compute()
        finally:
            self.host.reset()

    def compute(self) -> Any:
        """The value, which must be a single number for `ll.compute`."""
        return self.value()


def torchmetric(metric: Any) -> TorchMetric:
    """torchmetrics adapter: use any metric of torchmetrics as a mergeable record.

    >>> import looplib as ll, torch, torchmetrics
    >>> f1 = ll.metrics.torchmetric(torchmetrics.F1Score(task="binary"))
    >>> first, second = f1.of(torch.tensor([1, 0]), torch.tensor([1, 1])), f1.of(torch.tensor([1]), torch.tensor([1]))
    >>> ll.compute({"f1": first.merge(second)})
    {'f1': 0.800...}

    It returns the record without batches; `.of(...)` takes the arguments of the metric's `update`. The given metric
    is copied and never changed. Most metrics keep their state in sums, extremes or lists, which are merged, and memory
    is that of the state. For any other metric, such as a running correlation, a composition or a wrapper around
    another metric, collect the samples: `ll.metrics.Corpus.of(function, predictions, labels)`, with a function that
    updates the metric with all of them and computes it.

    Return the record from your metric function, not the metric's own value: a scalar such as `f1(logits, y)` would be
    averaged over batches, and for F1 or AUC such a mean of means is a different number.

    Args:
        metric: a torchmetrics metric, on the device of its inputs. For a `MetricCollection`, make a record of each of
            its metrics.

    Raises:
        TypeError: `metric` is something different, a collection, or has a state that cannot be merged.
        ValueError: when computed, if the metric has several numbers (use `Reading` to take one from its `value()`),
            or the record has no batches because `.of(...)` was forgotten.
    """
    check(
        not isinstance(metric, type) and _merges(metric),
        f"found {named(metric)}, not a metric of torchmetrics whose state is sums, extremes or lists; give an instance of one, such "
        "as torchmetrics.classification.BinaryF1Score(). Of a MetricCollection, make a record of each metric. Of another "
        "metric, collect the samples by ll.metrics.Corpus.of(function, predictions, labels)",
        TypeError,
    )
    host = copy.deepcopy(metric)
    vars(host).update(sync_on_compute=False, _to_sync=False)  # merging adds up the ranks, so torchmetrics must not
    host.reset()
    return TorchMetric(host, host.metric_state)


# By name, since torchmetrics is not imported. A mean of means has no weights, so it is not included.
_REDUCTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}
_LISTS = ("dim_zero_cat", None)  # reductions of states that are lists


def _name_of(reduction: Any) -> str | None:
    return getattr(reduction, "__name__", None)


def _merges(metric: Any) -> bool:
    """True if all that the metric remembers are sums, extremes and lists of its own."""
    reductions = getattr(metric, "_reductions", {})
    of_its_own = reductions and not any(hasattr(part, "_reductions") for part in [*metric.modules()][1:])
    if not of_its_own or not getattr(metric, "reset_real_features", True):  # a state that a reset does not clear
        return False
    return all(
        _name_of(reduction) in (_LISTS if isinstance(getattr(metric, name), list) else _REDUCTIONS)
        for name, reduction in reductions.items()
    )
