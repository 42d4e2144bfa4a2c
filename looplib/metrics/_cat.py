"""Tensors beside a loss: outputs that are concatenated instead of averaged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cat(NamedTuple):
    """Tensor to hand out of a loss or metric function, such as a hidden state. Merging concatenates.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> def loss_fn(model, x):
    ...     out = model(x)
    ...     return out.square().mean(), {"outputs": ll.metrics.Cat(out)}
    >>> grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches=2)
    >>> metrics = grad_fn(ll.init_state(model), torch.ones(6, 2)).metrics
    >>> metrics["outputs"].compute().shape, list(ll.compute(metrics))
    (torch.Size([6, 1]), ['loss'])

    The step detaches it. The microbatches of `accumulate` and the batches of an evaluation follow each other along `dim`.
    It is no number, so `ll.compute`, and therefore what you log, leaves it out. A `Window` keeps the tensors of all its
    steps: take those that you do not log out of the metrics before you add them.

    Attributes:
        tensor: a tensor of any shape.
        dim: dimension along which to concatenate, that of the samples: 0, or 1 for the state of an RNN.

    Source: `torchmetrics.CatMetric`.
    """

    tensor: Tensor
    dim: int = 0

    def merge(self, other: Cat) -> Cat:
        """The tensors of both, one after the other."""
        both = [each.reshape(1) if not each.dim() else each for each in (self.tensor, other.tensor)]
        return Cat(torch.cat(both, self.dim), self.dim)

    def compute(self) -> Tensor:
        """The whole tensor."""
        return self.tensor
