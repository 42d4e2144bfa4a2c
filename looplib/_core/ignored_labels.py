"""Warning about ignored labels in a loss that does not report how many labels it counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from looplib._core.notices import warn
from looplib._core.tracing import tracing
from looplib._core.trees import leaves, named

IGNORED = -100  # default `ignore_index` of torch and of transformers' models
_LABELS = (torch.int16, torch.int32, torch.int64)

_MESSAGE = (
    "labels of -100 ({path}) and a loss that is a plain scalar, within accumulate or on several ranks: such a "
    "mean is over the labels that count, but microbatches and ranks weigh by their samples, so the loss and the "
    "gradient are not the whole batch's where the numbers of labels differ. Return what is added up and what is "
    "counted: Mean(total, weight), with the sum of the losses and the number of labels that are not -100, or use "
    "ll.next_token_loss, or ll.losses.model_loss for a transformers model's own loss"
)


class Watch:
    """Warn once if a batch contains ignored labels and the loss is a plain scalar.

    Checking takes a pass over the labels, and on an accelerator a wait. So it checks the first microbatch, the
    second, the fourth, the eighth and so on.
    """

    __slots__ = ("_calls", "_warned")

    def __init__(self) -> None:
        self._calls, self._warned = 0, False

    def look(self, batch: Any) -> None:
        self._calls += 1
        if self._calls & (self._calls - 1) or self._warned or tracing():
            return
        for path, leaf in leaves(batch):
            if isinstance(leaf, Tensor) and leaf.dtype in _LABELS and bool((leaf == IGNORED).any()):
                self._warned = True
                warn(_MESSAGE.format(path=named(path, "batch")))
                return
