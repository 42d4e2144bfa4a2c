"""torchmetrics adapter: its metrics as mergeable records.

A torchmetrics metric is an object that accumulates. Here the object only updates and computes, and is empty between
calls: the state that a batch produces is the record.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core import trees
from looplib._core.checks import check
from looplib._core.torch_private import pytree


class TorchMetric(NamedTuple):
    """A torchmetrics metric as a record: see `torchmetric`.

    >>> import looplib as ll, torch, torchmetrics
    >>> accuracy = ll.metrics.torchmetric(torchmetrics.Accuracy(task="binary"))
    >>> accuracy.of(torch.tensor([1, 0]), torch.tensor([1, 1])).updates
    1

    Attributes:
        host: the metric that updates and computes. It is empty between calls.
        states: name -> state of the metric, prefixed with the path of the metric it belongs to; None if inputs are
            kept.
        inputs: (args, kwargs) of each update, for a metric whose inputs are kept.
        updates: number of batches.
    """

    host: Any
    states: Mapping[str, Any] | None
    inputs: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = ()
    updates: int = 0

    def of(self, *args: Any, **kwargs: Any) -> TorchMetric:
        """Record of a batch, from the arguments of the metric's `update`."""
        args, kwargs = trees.map_tensors(Tensor.detach, (args, kwargs))
        if self.states is None:
            kept = trees.map_tensors(Tensor.clone, (args, kwargs))
            return TorchMetric(self.host, None, (kept,), 1)
        try:
            self.host.update(*args, **kwargs)
            return TorchMetric(self.host, _states_of(self.host), (), 1)
        finally:
            self.host.reset()

    def merge(self, other: TorchMetric) -> TorchMetric:
        # An empty record does not have the others' device and dtype yet.
        if not self.updates or not other.updates:
            return self if self.updates else other
        updates = self.updates + other.updates
        if self.states is None or other.states is None:
            return TorchMetric(self.host, None, self.inputs + other.inputs, updates)
        states = {}
        for path, part, name in _places(self.host):
            mine, theirs = self.states[path], other.states[path]
            if isinstance(mine, list):
                states[path] = mine + theirs
            else:
                states[path] = _REDUCTIONS[part._reductions[name].__name__](mine, theirs)
        return TorchMetric(self.host, states, (), updates)

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
        if self.states is None:
            # A reset does not clear all of such a metric: MinMaxMetric keeps its extremes.
            metric = copy.deepcopy(self.host)
            for args, kwargs in self.inputs:
                metric.update(*args, **kwargs)
            return metric.compute()
        try:
            for path, part, name in _places(self.host):
                state = self.states[path]
                setattr(part, name, list(state) if isinstance(state, list) else state)
            for part in _parts(self.host).values():
                part._update_count = self.updates
            return self.host.compute()
        finally:
            self.host.reset()

    def compute(self) -> Any:
        """The value, which must be a single number."""
        value = self.value()
        shape = tuple(value.shape) if isinstance(value, Tensor) else value
        check(
            isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1),
            f"{type(self.host).__name__} computes a {type(value).__name__}, {shape}, not a number: read one from it, "
            "as by ll.metrics.Reading(record, lambda record: record.value()[0])",
        )
        return value


def torchmetric(metric: Any) -> TorchMetric:
    """torchmetrics adapter: use any metric of torchmetrics as a mergeable record.

    >>> import looplib as ll, torch, torchmetrics
    >>> f1 = ll.metrics.torchmetric(torchmetrics.F1Score(task="binary"))
    >>> first, second = f1.of(torch.tensor([1, 0]), torch.tensor([1, 1])), f1.of(torch.tensor([1]), torch.tensor([1]))
    >>> ll.compute({"f1": first.merge(second)})
    {'f1': 0.800...}

    It returns the record without batches; `.of(...)` takes the arguments of the metric's `update`. The given metric
    is copied and never changed. Most metrics keep their state in sums, extremes or lists; they and their collections
    and compositions are merged by these, and memory is that of the state. For any other metric, such as a running
    correlation or a bootstrap, the inputs are kept, and the metric is updated with all of them when it is computed.

    Return the record from your metric function, not the metric's own value: a scalar such as `f1(logits, y)` would be
    averaged over batches, and for F1 or AUC such a mean of means is a different number.

    Args:
        metric: a torchmetrics metric, or an object with the same `update()`, `reset()` and `compute()`, on the device
            of its inputs.

    Raises:
        TypeError: `metric` is something different.
        ValueError: when computed, if the metric has several numbers (use `Reading` to take one from its `value()`),
            or the record has no batches because `.of(...)` was forgotten.
    """
    kind = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
    check(
        not isinstance(metric, type) and all(hasattr(metric, name) for name in ("update", "compute", "reset")),
        f"found {kind}, not a metric of torchmetrics, which has update, compute and reset; give an instance, "
        "such as torchmetrics.classification.BinaryF1Score()",
        TypeError,
    )
    host = copy.deepcopy(metric)
    for part in host.modules() if isinstance(host, nn.Module) else ():
        if hasattr(part, "sync_on_compute"):  # merging adds up the ranks, so torchmetrics must not do it too
            vars(part).update(sync_on_compute=False, _to_sync=False)
        if hasattr(part, "_enable_compute_groups"):
            # Metrics with equal states after the first batch would share one from then on, even if they differ later.
            vars(part).update(_enable_compute_groups=False, _groups_checked=False, _groups={})
    host.reset()
    for _, part, name in _places(host) if isinstance(host, nn.Module) else ():
        if isinstance(getattr(part, name), list):
            setattr(part, name, [])  # a separate copy, where metrics of a collection shared one
    return TorchMetric(host, _states_of(host) if _merges(host) else None)


# By name, since torchmetrics is not imported. A mean of means has no weights, so it is not included.
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}
_LISTS = ("dim_zero_cat", None)  # reductions of states that are lists


# Metrics that only pass their inputs on to the metrics they contain.
_GROUPS = ("MetricCollection", "CompositionalMetric", "ClasswiseWrapper")


def _parts(metric: Any) -> dict[str, Any]:
    """The metric and those it consists of, by path."""
    return {path: part for path, part in metric.named_modules() if hasattr(part, "_update_count")}


def _places(metric: Any) -> Iterator[tuple[str, Any, str]]:
    """For each state: its path, its metric, and its name."""
    for path, part in _parts(metric).items():
        for name in part._reductions:
            yield f"{path}.{name}", part, name


def _merges(metric: Any) -> bool:
    if type(metric).__name__ in _GROUPS:
        return all(map(_merges, metric.children()))
    reductions = getattr(metric, "_reductions", {})
    if not reductions or len(_parts(metric)) != 1:
        return False
    if not getattr(metric, "reset_real_features", True):  # a state that a reset does not clear
        return False
    for name, reduction in reductions.items():
        known = _LISTS if isinstance(getattr(metric, name), list) else _REDUCTIONS
        if getattr(reduction, "__name__", None) not in known:
            return False
    return True


def _states_of(metric: Any) -> dict[str, Any]:
    """Copies of the states: a reset clears the metric's lists, and these may contain the batch itself."""
    states = {path: getattr(part, name) for path, part, name in _places(metric)}
    return pytree.tree_map_only(Tensor, torch.clone, states)  # type: ignore[no-any-return]
