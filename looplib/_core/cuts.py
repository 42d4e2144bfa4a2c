"""Gradient cuts: the places where a loss function itself blocks the gradient to its inputs.

The graph of a step contains its own backward pass, in which torch detaches tensors freely. A differentiable step must
block gradients exactly where the loss function does, so the operations of those cuts are marked.
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

STOPS = "looplib_stops"  # key in a node's metadata: no gradient passes here


class _Marks(TorchFunctionMode):
    """Mode that marks where a loss function blocks gradients: with `detach`, `no_grad` and similar.

    It watches `no_grad` itself to know if gradients are off, because they are also off inside an `autograd.Function`,
    which blocks nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace = current()
        self.off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if current() is not self.trace:  # a step inside the loss function is traced with its own marks
            return func(*args, **kwargs)
        refuse_strangers(args, kwargs)
        if func is torch_private.set_grad_enabled:
            self.off = not args[0]
        if not (self.off or _cuts(func, kwargs)):
            return func(*args, **kwargs)
        with torch.fx.traceback.annotate({STOPS: True}):
            return func(*args, **kwargs)


def _cuts(func: Any, kwargs: Any) -> bool:
    """True if a torch function returns something through which its inputs get no gradient."""
    if func is torch.autograd.grad:
        return not kwargs.get("create_graph")
    if getattr(func, "__self__", None) is Tensor.data:
        return True
    name: str = getattr(func, "__name__", "")
    return name.partition(".")[0] == "detach"


def refuse_strangers(args: Any, kwargs: Any) -> None:
    """Raise for tensors of a torch.func transform that is not active here: no gradient would reach them."""
    level = torch_private.functorch_level()
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and torch_private.functorch_level_of(leaf) > level:
            raise UntraceableError(
                "the step reads a tensor that torch.func transforms from elsewhere than its state and batch (a "
                "function closes over it), so no gradient would reach it: give it in the batch, or as a "
                "hyperparameter in the state (ll.optim.injected)"
            )


def cuts_marked() -> AbstractContextManager[Any]:
    """Context for a user's loss function, in which a differentiable trace marks its cuts."""
    return _Marks() if tracing() and differentiated() else _nothing


_nothing = nullcontext()
