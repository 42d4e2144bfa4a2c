"""Leaves of the graph behind a loss: the model's parameters and those of other networks.

A backward pass is told which leaves to fill, so the gradients of anything else stay as they are. Two kinds of graphs
do not show all of their leaves, and take a plain backward pass: those of FSDP2, whose leaves are unsharded
parameters, and those with a function that runs a backward pass of its own, such as a reentrant checkpoint. There, the
gradients of the other networks are set aside and put back: of those that looplib trains, and of the leaves that are
shown. A network without a gradient function of its own that only a checkpoint or FSDP2 reaches has its filled, as in a
raw loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import trees
from looplib._core.modules import LATE_CHECKPOINT

_CHECKPOINT = "CheckpointFunction"  # of torch, and of the libraries that copied it

_trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the modules of all gradient functions


class Reach:
    """Leaves that the losses of one gradient function reach, learned at its first call.

    Attributes:
        known: True after the first call.
        plain: True if backward passes must not be told which leaves to fill.
        others: leaves in the graph that belong to neither the model nor the batch.
    """

    __slots__ = ("_aside", "_model", "_unreached", "known", "others", "plain")

    def __init__(self, model: nn.Module, plain: bool) -> None:
        self._model, self.plain = model, plain
        self.known = False
        self.others: list[weakref.ref[Tensor]] = []
        self._aside: list[tuple[Tensor, Tensor | None]] = []
        self._unreached: Set[str] = frozenset()
        _trained.add(model)

    def learn(self, loss: Tensor, batch: Any, params: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Look through the graph of the first loss."""
        leaves, functions = _graph(loss)
        self._unreached = {name for name in names if id(params[name]) not in leaves}
        known = {*map(id, params.values()), *map(id, self._model.buffers())}
        for path, leaf in trees.leaves(batch):
            if isinstance(leaf, Tensor):
                known.add(id(leaf))
                if leaf.grad_fn is not None:
                    raise ValueError(
                        f"batch{trees.pointer(path)} carries the graph of what computed it ({type(leaf.grad_fn).__name__}), "
                        "and a step takes gradients of its own loss only: hand on its detach(), or compute it under "
                        "torch.no_grad() or in the loss function"
                    )
        self.others = [weakref.ref(leaf) for key, leaf in leaves.items() if key not in known]
        if not self.plain and (any(_CHECKPOINT in name for name in functions) or (functions and self._unreached)):
            self.plain = True
            self.set_aside()
        self.known = True

    def check(self, loss: Tensor, missing: Set[str]) -> None:
        """Raise if parameters without a gradient are in a reentrant checkpoint that the first call did not have."""
        if not (self.plain or missing <= self._unreached):
            self._unreached |= missing
            if any(_CHECKPOINT in name for name in _graph(loss)[1]):
                raise RuntimeError(LATE_CHECKPOINT)

    def set_aside(self) -> None:
        """Take the gradients of other networks away for plain backward passes, until `put_back`."""
        own = {*map(id, self._model.parameters())}
        others: list[Tensor] = [tensor for module in _trained for tensor in module.parameters()]
        others += [tensor for other in self.others if (tensor := other()) is not None]
        for tensor in {id(tensor): tensor for tensor in others if id(tensor) not in own}.values():
            self._aside.append((tensor, tensor.grad))
            tensor.grad = None

    def put_back(self) -> None:
        while self._aside:
            tensor, grad = self._aside.pop()
            tensor.grad = grad


def _graph(loss: Tensor) -> tuple[dict[int, Tensor], set[str]]:
    """Leaves of the graph behind a loss by id, and the names of its functions that are written in Python."""
    leaves: dict[int, Tensor] = {}
    functions: set[str] = set()
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            functions.add(type(node).__name__)
        elif node.name() == "torch::autograd::AccumulateGrad":
            leaves[id(node.variable)] = node.variable
        waiting += [function for function, _ in node.next_functions]
    return leaves, functions
