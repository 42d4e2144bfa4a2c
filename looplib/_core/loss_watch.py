"""Watch of losses: warnings for values that are averaged over something other than they mean.

A plain scalar is taken for the mean over the samples of its microbatch or rank. torch's graph tells of its own losses what
they are: a sum, a mean over the labels that count, a mean by class weights, or a mean over the samples. Of a loss written by
hand, such as a masked sum, it tells nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import few, warn
from looplib._core.torch_private import class_weights_of, mean_shape_of, reduction_of
from looplib._core.tracing import tracing

_IGNORED = -100  # default `ignore_index` of torch and of transformers' models
_LABEL_DTYPES = (torch.int16, torch.int32, torch.int64)
_TERMS = {"Add", "Sub", "Neg"}
_FACTORS = {"Mul", "Div"}
_COPIES = {"ToCopy", "View", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "Alias"}
_SELECTED = {"Index", "MaskedSelect"}  # as many as a mask leaves

_LABELS = (
    "the batch has labels of -100 ({path}) and the loss is a plain scalar, within accumulate or on several ranks. Such "
    "a loss is a mean over the other labels, but microbatches and ranks are weighted by their samples. So the loss and "
    "the gradient are not those of the whole batch if the numbers of labels differ. Return ll.Mean(total, "
    "weight): the sum of the losses, and the number of labels that are not -100. ll.next_token_loss does so, and "
    "ll.losses.model_loss for the loss of a transformers model"
)
_SUM = (
    "the loss is a sum over the samples (reduction='sum'), returned as a plain scalar, within accumulate or on several "
    "ranks. Such a scalar is taken for the mean over the samples of its microbatch or rank, so the gradient is that of the "
    "sum divided by the number of microbatches and ranks. Return a mean, or ll.Mean(total, number of samples), which has the "
    "gradient of the mean whatever the split"
)
_CLASS_WEIGHTS = (
    "the loss is a plain scalar of a cross-entropy with class weights, within accumulate or on several ranks. Such a loss is "
    "a mean by the weights of the labels, but microbatches and ranks are weighted by their samples. So the loss and the "
    "gradient are not those of the whole batch if the weights of their labels differ. Return ll.Mean(cross_entropy(outputs, "
    "labels, weight=weight, reduction='sum'), weight[labels].sum())"
)
_BESIDE = (
    "{names} beside the loss: a plain scalar is averaged over the samples of batches, microbatches and ranks, and the loss "
    "is a Mean(total, weight) with a weight of {weight:g} in a batch of {samples} samples. A mean over what the loss is over "
    "(tokens) is then averaged to another number: return ll.Mean(total, weight) for it as well. For a mean over the "
    "samples, return ll.Mean(value, 1, times=number of samples), and for a constant, a float"
)


class LossWatch:
    """Warn once of each such value.

    Reading labels and weights waits for an accelerator. So it looks at the first microbatch, the second, the fourth, the
    eighth and so on.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._warned: set[str] = set()

    def _warn(self, message: str, **words: Any) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message.format(**words))

    def _now(self) -> bool:
        self._calls += 1
        return not (self._calls & (self._calls - 1) or tracing())

    def look(self, batch: Any, loss: Tensor, samples: int) -> None:
        """Look at a plain scalar that is weighted by its samples."""
        if not self._now():
            return
        found = kinds_of_mean(loss, samples)
        if "sum" in found:
            self._warn(_SUM)
        if "class weights" in found:
            self._warn(_CLASS_WEIGHTS)
        if _LABELS in self._warned or found <= {"sum", "samples"}:
            return
        for path, leaf in trees.leaves(batch):
            if isinstance(leaf, Tensor) and leaf.dtype in _LABEL_DTYPES and bool((leaf == _IGNORED).any()):
                return self._warn(_LABELS, path=trees.named(path, "batch"))

    def look_beside(self, loss: Any, values: Mapping[str, Any], samples: int) -> None:
        """Look at the values beside a loss that is a `Mean`."""
        if _BESIDE in self._warned or not self._now():
            return
        plain = {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
        }
        if not plain:
            return
        weight = float(loss.weight) * loss.times
        if weight == samples:
            return
        if names := [name for name, value in plain.items() if kinds_of_mean(value, samples) != {"samples"}]:
            self._warn(_BESIDE, names=few([repr(name) for name in names]), weight=weight, samples=samples)


def kinds_of_mean(loss: Tensor, samples: int) -> set[str]:
    """Kinds of the terms of a scalar: "sum", "class weights", a mean over the "samples", and "unknown"."""
    kinds: set[str] = set()
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    while waiting:
        node, scaled = waiting.pop()
        kind = _kind(node)
        if kind in _TERMS or kind in _FACTORS or kind in _COPIES:
            below = [(function, scaled or kind in _FACTORS) for function, _ in node.next_functions]
            waiting += [(function, by) for function, by in below if function is not None]
        else:
            kinds.add(_kind_of_term(node, kind, scaled, samples))
    return kinds


def _kind_of_term(node: Any, kind: str, scaled: bool, samples: int) -> str:
    reduction = reduction_of(node)
    if reduction == "mean" and class_weights_of(node) is not None:
        return "class weights"
    of_each = _below(node) if kind in ("Sum", "Mean") else None
    if not scaled and (reduction == "sum" or (kind == "Sum" and reduction_of(of_each) == "none")):
        return "sum"
    if kind == "Mean" and mean_shape_of(node)[:1] == (samples,) and _kind(of_each) not in _SELECTED:
        return "samples"
    return "unknown"


def _below(node: Any) -> Any:
    """The function that computed what a reduction is of, before it was only reshaped or copied."""
    node = node.next_functions[0][0]
    while _kind(node) in _COPIES:
        node = node.next_functions[0][0]
    return node


def _kind(node: Any) -> str:
    """The name of a function of a graph: "Add" for AddBackward0."""
    return "" if node is None else node.name().rstrip("0123456789").removesuffix("Backward")
