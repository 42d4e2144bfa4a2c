"""Cuts: where a loss function itself keeps the gradient from its inputs.

The graph of a step holds its own backward pass, in which torch detaches what it likes. A step that is differentiated
has to be cut where the loss function has cut it, and nowhere else: so the operations of those cuts are marked.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from looplib._core import torch_private
from looplib._core.torch_private import pytree
from looplib._core.tracing import UntraceableError, current, differentiated, tracing

STOPS = "looplib_stops"  # in the notes of a node: no gradient passes here


class _Marks(TorchFunctionMode):
    """Marks what a loss function cuts off from the gradient itself: by `detach`, in `no_grad`, and the like.

    Whether gradients are off is heard from `no_grad` itself: they are off as well within an `autograd.Function`,
    which cuts nothing off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace = current()
        self.off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if current() is not self.trace:  # a step within the loss function is written down, with marks of its own
            return func(*args, **kwargs)
        refuse_strangers(args, kwargs)
        if func is torch_private.set_grad_enabled:
            self.off = not args[0]
        if not (self.off or _cuts(func, kwargs)):
            return func(*args, **kwargs)
        with torch.fx.traceback.annotate({STOPS: True}):
            return func(*args, **kwargs)


def _cuts(func: Any, kwargs: Any) -> bool:
    """Tell whether a function of torch's returns something that its inputs get no gradient through."""
    if func is torch.autograd.grad:
        return not kwargs.get("create_graph")
    if getattr(func, "__self__", None) is Tensor.data:
        return True
    name: str = getattr(func, "__name__", "")
    return name.partition(".")[0] == "detach"


def refuse_strangers(args: Any, kwargs: Any) -> None:
    """Raise for tensors of a transform of torch.func's that is not in progress here: no gradient would reach them."""
    level = torch_private.functorch_level()
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and torch_private.functorch_level_of(leaf) > level:
            raise UntraceableError(
                "the step reads a tensor that torch.func transforms from elsewhere than its state and batch (a "
                "function closes over it), so no gradient would reach it: give it in the batch, or as a "
                "hyperparameter in the state (ll.optim.injected)"
            )


def cuts_marked() -> AbstractContextManager[Any]:
    """A context for the loss function of a user, in which a trace that is to be differentiated marks its cuts."""
    return _Marks() if tracing() and differentiated() else _nothing


_nothing = nullcontext()
