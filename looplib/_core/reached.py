"""Leaves of the graph behind a loss: the model's parameters and those of other networks.

A backward pass is told which leaves to fill, so the gradients of anything else stay as they are. Two kinds of graphs
do not show all of their leaves, and take a plain backward pass: those of FSDP2, whose leaves are unsharded
parameters, and those with a function that runs a backward pass of its own, such as a reentrant checkpoint. There, the
gradients of other networks are set aside and put back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import trees
from looplib._core.closures import walk
from looplib._core.modules import LATE_CHECKPOINT

_CHECKPOINT = "CheckpointFunction"  # of torch, and of the libraries that copied it


class Reach:
    """Leaves that the losses of one gradient function reach, learned at its first call.

    Attributes:
        known: True after the first call.
        plain: True if backward passes must not be told which leaves to fill.
        others: names of trainable tensors of other networks in the graph, with their modules.
    """

    __slots__ = ("_aside", "_loss_fn", "_model", "_referred", "_unreached", "known", "others", "plain")

    def __init__(self, model: nn.Module, loss_fn: Any, plain: bool) -> None:
        self._model, self._loss_fn, self.plain = model, loss_fn, plain
        self.known = False
        self.others: dict[str, weakref.ref[nn.Module] | None] = {}
        self._referred: list[weakref.ref[nn.Module] | weakref.ref[Tensor]] | None = None
        self._aside: list[tuple[Tensor, Tensor | None]] = []
        self._unreached: Set[str] = frozenset()

    def learn(self, loss: Tensor, batch: Any, params: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Look through the graph of the first loss."""
        leaves, functions = _graph(loss)
        self._unreached = {name for name in names if id(params[name]) not in leaves}
        if not self.plain and (any(_CHECKPOINT in name for name in functions) or (functions and self._unreached)):
            self.plain = True
            self.set_aside()
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
        foreign = leaves.keys() - known
        if foreign and not self.plain:
            # A leaf without a name there was made by the loss, such as a perturbation, or belongs to a state that it has.
            for name, tensor, owner in _trainable(_referred_to(self._loss_fn)):
                if id(tensor) in foreign:
                    self.others[name] = None if owner is None else weakref.ref(owner)
        self.known = True

    def check(self, loss: Tensor, missing: Set[str]) -> None:
        """Raise if parameters without a gradient are in a reentrant checkpoint that the first call did not have."""
        if not (self.plain or missing <= self._unreached):
            self._unreached |= missing
            if any(_CHECKPOINT in name for name in _graph(loss)[1]):
                raise RuntimeError(LATE_CHECKPOINT)

    def set_aside(self) -> None:
        """Take the gradients of other networks away for plain backward passes, until `put_back`."""
        if self._referred is None:
            self._referred = [weakref.ref(value) for _, value in _referred_to(self._loss_fn)]
        own = {*map(id, self._model.parameters())}
        referred = [("", value) for reference in self._referred if (value := reference()) is not None]
        for _, tensor, _ in _trainable(referred):
            if id(tensor) not in own:
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


def _referred_to(loss_fn: Any) -> list[tuple[str, Any]]:
    """Modules and tensors that a loss function refers to, with their names."""
    return [(each.path, each.value) for each in walk(loss_fn) if isinstance(each.value, (nn.Module, Tensor))]


def _trainable(referred: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor, nn.Module | None]]:
    """Trainable tensors among these and in these modules, once each, with their names and modules."""
    seen: set[int] = set()
    for path, value in referred:
        owner = value if isinstance(value, nn.Module) else None
        for name, tensor in [(path, value)] if owner is None else owner.named_parameters(path):
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor, owner
