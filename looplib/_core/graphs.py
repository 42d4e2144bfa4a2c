"""Autograd graphs of batches and losses: what a step must not cut off, and what its backward pass would not reach.

A backward pass is told which leaves to fill, those of the state, so the gradients of anything else stay as they are. Two
kinds of graphs do not show all of their leaves, and need a plain backward pass, which fills every leaf that it reaches:

- Those of FSDP2, whose leaves are the unsharded parameters. The module shows that it is sharded.
- Those with a function that runs a backward pass of its own, such as a checkpoint with `use_reentrant=True`. The user says
  so, `make_grad_fn(..., reentrant=True)`: the kind of backward pass is never learned from a loss.

A backward pass that is told which leaves to fill skips such a function, unless an input of it leads to one of these leaves.
The gradients of the function's weights then lack what it would have added.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Set
from functools import lru_cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from looplib._core import trees

_CHECKPOINT = "checkpoint"  # in the names of torch's function, and of those of the libraries that wrote their own

# Functions that only select, arrange or cast elements of one tensor.
_VIEW = re.compile(
    "(Alias|AsStrided|Clone|Diagonal|Expand|Index|IndexSelect|Movedim|Permute|ReshapeAlias|Select|Slice|Split|"
    "SplitWithSizes|Squeeze|T|ToCopy|Transpose|Unbind|Unfold|UnsafeSplit|UnsafeView|Unsqueeze|View)Backward[0-9]+$"
)
REENTRANT = (
    "the loss has a checkpoint that runs a backward pass of its own (use_reentrant=True), and a step's backward pass is told "
    "which parameters to fill, which such a checkpoint does not show: use use_reentrant=False, or give "
    "ll.make_grad_fn(..., reentrant=True)"
)


class LossGraphs:
    """Graphs of the losses of one gradient function, looked at in its calls 1, 2, 4, 8, ...

    Walking through a graph takes longer than a small step. A checkpoint that was not declared is refused, and leaves of other
    networks may be warned of. Gradients lack a part, without an error, in two cases: a function with a backward pass of its
    own has no "checkpoint" in its name; or a checkpoint begins after a look, and other layers use all of its weights too,
    which the next look finds. If a weight of it is used nowhere else, it has no gradient, which is noticed at once.

    What is refused teaches nothing: the next call looks again.

    Attributes:
        plain: True if its backward passes fill every leaf that they reach, as reentrant checkpoints need.
        others: leaves in the last graph looked at that are not of the state, of which `_core.misuse` may warn.
    """

    def __init__(self, plain: bool) -> None:
        self.plain = plain
        self.others: list[weakref.ref[Tensor]] = []
        self._calls, self._due = 0, 1
        self._unreached: Set[str] = frozenset()

    def look(self, loss: Tensor, params: Mapping[str, Tensor]) -> None:
        """Look at the graph of a loss if it is due. Raises RuntimeError for a checkpoint that was not declared."""
        self._calls += 1
        if self._calls < self._due:
            return
        of_state = {*map(id, params.values())}
        self.others = []
        for function in functions_behind(loss):
            if self._is_undeclared(function):
                raise RuntimeError(REENTRANT)
            leaf = getattr(function, "variable", None)
            if leaf is not None and id(leaf) not in of_state:
                self.others.append(weakref.ref(leaf))
        self._due *= 2

    def check_unreached(self, loss: Tensor, unreached: Set[str]) -> None:
        """Raise RuntimeError for a checkpoint that was not declared, and may be why these parameters have no gradient.

        The graph is looked at if one of them has had its gradient in all calls so far.
        """
        if unreached <= self._unreached:
            return
        if any(map(self._is_undeclared, functions_behind(loss))):
            raise RuntimeError(REENTRANT)
        self._unreached |= unreached

    def _is_undeclared(self, function: Any) -> bool:
        """True for a checkpoint with a backward pass of its own, unless the backward pass is a plain one."""
        return not self.plain and _is_reentrant(function)

    def other_leaves(self) -> list[Tensor]:
        """Those of `others` that are still in use."""
        return [leaf for other in self.others if (leaf := other()) is not None]


def _is_reentrant(function: Any) -> bool:
    """True for a checkpoint with a backward pass of its own."""
    if not isinstance(function, torch.autograd.function.BackwardCFunction):
        return False
    return _CHECKPOINT in type(function).__name__.lower()


def functions_behind(outputs: Any, inputs: Any = ()) -> Iterator[Any]:
    """All functions of the graph behind the tensors of a tree, up to those that computed the inputs, another tree.

    Those with a `variable` accumulate the gradient of a leaf.
    """
    waiting, computed = (
        [leaf.grad_fn for _, leaf in trees.leaves(tree) if isinstance(leaf, Tensor)] for tree in (outputs, inputs)
    )
    seen: set[Any] = {None, *computed}
    while waiting:
        function: Any = waiting.pop()
        if function not in seen:
            seen.add(function)
            yield function
            waiting += [before for before, _ in function.next_functions]


def runs_again(function: Any) -> bool:
    """True for a function of one of torch's checkpoints, whose forward pass runs again in the backward pass."""
    return _is_reentrant(function) or any(map(_of_checkpoint, _saved_by(function)))


def _saved_by(function: Any) -> Iterator[Any]:
    """Values that autograd has saved for a function, without the hooks that would compute it again."""
    kind: Any = type(function)
    for name in _names_of_saved(kind):
        try:
            saved = getattr(function, name)
        except RuntimeError:  # freed by a backward pass within the forward pass
            continue
        yield from saved if isinstance(saved, (list, tuple)) else (saved,)


@lru_cache(maxsize=512)  # kinds of operations, of which torch has some hundred
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _of_checkpoint(saved: Any) -> bool:
    return getattr(getattr(saved, "unpack_hook", None), "__module__", None) == torch.utils.checkpoint.__name__


def check_batch(batch: Any) -> None:
    """Raise ValueError for a tensor of a batch that carries the graph of what computed it, which a step would cut off."""
    # Each microbatch comes here, so the common batches are looked at first: they have plain tensors without a graph.
    entries = batch.values() if type(batch) is dict else batch if type(batch) in (tuple, list) else (batch,)
    for entry in entries:
        if type(entry) is not Tensor or entry.requires_grad:
            break
    else:
        return
    for path, leaf in trees.leaves(batch):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None and viewed_leaf(leaf) is None:
            raise ValueError(
                f"batch{trees.pointer(path)} carries the graph of what computed it ({type(leaf.grad_fn).__name__}), "
                "and a step takes gradients of its own loss only: hand on its detach(), or compute it under "
                "torch.no_grad() or in the loss function. For derivatives with respect to the batch, give "
                "detach().requires_grad_(), or call requires_grad_() in the loss function"
            )


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
    return None if isinstance(leaf, nn.Parameter) else leaf
