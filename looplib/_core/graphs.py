"""Leaves that a loss reaches, on which the form of a backward pass depends.

A backward pass is told which leaves to fill, so the gradients of anything else stay as they are. Two kinds of graphs
do not show all of their leaves, and take a plain backward pass: those of FSDP2, whose leaves are unsharded
parameters, and those with a function that runs a backward pass of its own, such as a reentrant checkpoint. There, the
gradients of the other networks that looplib trains, and of the leaves that are shown, are set aside and put back. If only
a checkpoint or FSDP2 reaches a network, and no gradient function was made of it, its gradients are filled, as in a raw
loop.

Which form it takes is learned from the first loss and kept, since walking through a graph takes longer than a small step. A
checkpoint that comes later is refused when a parameter in it has got no gradient. All this could go if reentrant checkpoints
were refused, but the Trainer of transformers turns them on (`gradient_checkpointing=True`).
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import trees
from looplib._core.modules import LATE_CHECKPOINT

_CHECKPOINT = "CheckpointFunction"  # of torch, and of the libraries that copied it

# Functions that only select, arrange or cast elements of one tensor.
_VIEW = re.compile(
    "(Alias|AsStrided|Clone|Diagonal|Expand|Index|IndexSelect|Movedim|Permute|ReshapeAlias|Select|Slice|Split|"
    "SplitWithSizes|Squeeze|T|ToCopy|Transpose|Unbind|Unfold|UnsafeSplit|UnsafeView|Unsqueeze|View)Backward[0-9]+$"
)
# Parameters of the modules of all gradient functions, by id. Between its passes, FSDP2 may put others into a module.
_trained: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


class Reach:
    """Leaves that the losses of one gradient function reach, learned at its first call.

    Attributes:
        known: True after the first call.
        plain: True if backward passes must not be told which leaves to fill.
        others: leaves in the graph that belong to neither the model nor the batch.
    """

    def __init__(self, model: nn.Module, plain: bool) -> None:
        self._model, self.plain = model, plain
        self.known = False
        self.others: list[weakref.ref[Tensor]] = []
        self._unreached: Set[str] = frozenset()
        _trained.update({id(tensor): tensor for tensor in model.parameters()})

    def learn(self, loss: Tensor, batch: Any, params: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Look through the graph of the first loss."""
        leaves, functions = _graph(loss)
        self._unreached = {name for name in names if id(params[name]) not in leaves}
        known = {*map(id, params.values()), *map(id, self._model.buffers())}
        for path, leaf in trees.leaves(batch):
            if isinstance(leaf, Tensor):
                known.add(id(leaf))
                source = viewed_leaf(leaf)
                if source is not None:
                    known.add(id(source))
                elif leaf.grad_fn is not None:
                    raise ValueError(
                        f"batch{trees.pointer(path)} carries the graph of what computed it ({type(leaf.grad_fn).__name__}), "
                        "and a step takes gradients of its own loss only: hand on its detach(), or compute it under "
                        "torch.no_grad() or in the loss function. For derivatives with respect to the batch, give "
                        "detach().requires_grad_(), or call requires_grad_() in the loss function"
                    )
        if not self.plain:  # the leaves of FSDP2 are its own unsharded parameters
            self.others = [weakref.ref(leaf) for key, leaf in leaves.items() if key not in known]
            self.plain = any(_CHECKPOINT in name for name in functions) or bool(functions and self._unreached)
        self.known = True

    def check(self, loss: Tensor, missing: Set[str]) -> None:
        """Raise if parameters without a gradient are in a reentrant checkpoint that the first call did not have."""
        if not (self.plain or missing <= self._unreached):
            self._unreached |= missing
            if any(_CHECKPOINT in name for name in _graph(loss)[1]):
                raise RuntimeError(LATE_CHECKPOINT)

    def other_tensors(self) -> list[Tensor]:
        """The leaves in `others` that are still in use."""
        return [tensor for other in self.others if (tensor := other()) is not None]

    @contextmanager
    def others_aside(self, leaves: Iterable[Tensor]) -> Iterator[None]:
        """Context for a plain backward pass, in which the gradients of all but these leaves are set aside."""
        own = {*map(id, leaves)}
        others = [tensor for tensor in {*_trained.values(), *self.other_tensors()} if id(tensor) not in own]
        grads = [tensor.grad for tensor in others]
        try:
            for tensor in others:
                tensor.grad = None
            yield
        finally:
            _interrupts.waits.depth += 1
            try:
                for tensor, grad in zip(others, grads, strict=True):
                    tensor.grad = grad
            finally:
                _interrupts.waits.depth -= 1


def viewed_leaf(tensor: Tensor) -> Tensor | None:
    """The leaf of which a tensor is a view or a cast, such as a column of coordinates; None if it was computed otherwise.

    >>> x = torch.ones(4, 2, requires_grad=True)
    >>> viewed_leaf(x[:, :1].double()) is x, viewed_leaf(x * 2) is None
    (True, True)
    """
    function: Any = tensor.grad_fn
    while function is not None and _VIEW.match(function.name()):
        function = function.next_functions[0][0]
    leaf: Any = getattr(function, "variable", None)
    return leaf if leaf is not None and not isinstance(leaf, nn.Parameter) and id(leaf) not in _trained else None


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
