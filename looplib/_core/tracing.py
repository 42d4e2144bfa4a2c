"""Tracing primitives: communication between a step's code and the graph it is traced into.

A graph has no branches and no numbers except constants. Values that the host decides before an update (a schedule,
whether an average is due) are requested by `on_host` and passed to the graph at each step. Decisions that depend on
tensors (whether to skip) are made with `where`, and errors that depend on them are raised with `afterwards`. Outside
a trace, each of these is the plain operation.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from looplib._core import torch_private, trees
from looplib._core.ranks import is_sharded

R = TypeVar("R")


class UntraceableError(RuntimeError):
    """A step does something that a graph of tensor operations cannot represent."""

    __module__ = "looplib.transforms"  # as tracebacks name it


class Count:
    """Placeholder for a state's field that is not a tensor, whose value a trace would freeze if it were read."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def refuse(self, *_: Any) -> Any:
        raise UntraceableError(
            f"state.{self.name} was read for its value, which the graph of a step would keep for ever: ask for what "
            f"follows from it by ll.transforms.on_host(function, state.{self.name}), which is called again at each step"
        )


# All that can be done with a number, or with the user's `extra`, which is often a dict.
_names = {*vars(int), *vars(dict), "__str__", "__format__"} - {"__new__", "__getattribute__", *vars(Count)}
for _name in _names:
    setattr(Count, _name, Count.refuse)


@dataclass(eq=False)
class Trace:
    """One trace of a step.

    Attributes:
        inputs: id of a traced tensor -> its index among the inputs.
        answer: function that returns the host's answer to a question.
        differentiable: True if the graph itself is to be differentiated.
        stacked: True if the graph is to be mapped over members.
        kernels_from: number of parameters from which on a fused kernel, which can neither be mapped over members nor
            differentiated, updates them.
        stream: index of the microbatch for which random numbers are drawn.
        afterwards: checks to make after the graph has run.
        copies: copies of inputs, kept alive for their ids.
    """

    inputs: dict[int, int]
    answer: Callable[[Callable[..., Any], list[Any]], Any]
    differentiable: bool = False
    stacked: bool = False
    kernels_from: float = math.inf
    stream: int = 0
    afterwards: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)

    def note_copies(self, originals: Iterable[Tensor], copies: Iterable[Tensor]) -> None:
        """Let the host be asked about copies of inputs too: an update is given copies, of numbers such as counts too."""
        for original, copy in zip(originals, copies, strict=True):
            if id(original) in self.inputs:
                self.inputs[id(copy)] = self.inputs[id(original)]
                self.copies.append(copy)

    def ask(self, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        sources: list[Any] = []
        for value in values:
            if isinstance(value, Count):
                sources.append(("count", value.name))
            elif isinstance(value, Tensor):
                if id(value) not in self.inputs:
                    raise UntraceableError(
                        "on_host was given a tensor that the step has computed: it takes numbers of the state as "
                        "the step was given it, such as state.step or a counter in opt_state"
                    )
                sources.append(("input", self.inputs[id(value)]))
            else:
                sources.append(("value", value))
        return self.answer(function, sources)


_KEY = "looplib.tracing"

# Traces in all threads. There is nearly always none, and then nothing else is checked. Code that runs in each step
# checks this before it calls `tracing()`.
entered: list[Trace | None] = []


@contextmanager
def within(trace: Trace | None) -> Iterator[None]:
    """Activate a trace for the duration of a block, or with None, deactivate it for work on the host.

    It applies to this thread, and to the threads in which autograd runs its backward pass. Forward and backward passes
    of other threads' steps wait until the trace is complete (`_core.random.turn`).
    """
    before = current()
    entered.append(trace)
    torch_private.set_thread_value(_KEY, trace)
    try:
        yield
    finally:
        torch_private.set_thread_value(_KEY, before)
        entered.remove(trace)


def current() -> Trace | None:
    """The current trace, or None."""
    trace: Trace | None = torch_private.thread_value(_KEY) if entered else None
    return trace


def tracing() -> bool:
    """True while a step is being traced instead of run."""
    return bool(entered) and current() is not None


def differentiated() -> bool:
    """True while a step is being traced to be differentiated itself."""
    trace = current()
    return trace is not None and trace.differentiable


def keeps_terms_of_0() -> bool:
    """True if an update is to have the terms whose factors are 0: of other members they may not be, or of a gradient."""
    trace = current()
    return trace is not None and (trace.stacked or trace.differentiable)


def takes_kernel(parameters: int) -> bool:
    """True if a fused kernel is to update so many parameters in the graph that is being traced."""
    trace = current()
    return trace is not None and parameters >= trace.kernels_from


def draws_for(microbatch: int) -> None:
    """Set the microbatch for which a trace draws random numbers from now on."""
    if (trace := current()) is not None:
        trace.stream = microbatch


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Lock for making graphs: torch's compilers and their flags are shared by the whole process.

    A checkpoint around the step would take what a trace saves for what the step saves, so its hooks wait as well.
    """
    if tracing():  # inside another trace, which holds the lock
        yield
        return
    around = saved_tensors_hooks(_unchanged, _unchanged) if torch_private.has_saved_tensors_hooks() else nullcontext()
    with _lock, around:
        yield


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


_lock = threading.RLock()


def on_host(function: Callable[..., R], *values: Any) -> R:
    """Call `function(*values)` on the host at each step, even if the step itself is compiled.

    >>> import looplib as ll
    >>> ll.transforms.on_host(lambda step: 0.5 if step < 100 else 1.0, 7)
    0.5

    Use it in your own gradient functions and optimizers that depend on a number of the state. A compiled step is a
    graph without such numbers, so this declares what to compute before each run of the graph. Floats and tensors in
    the result are inputs of the graph. Everything else (bool, int, str, None, and the structure of tuples, lists and
    dicts) selects the graph, and each new value compiles one.

    Args:
        function: function of plain numbers and CPU tensors.
        values: numbers of the state (`state.step`), or tensors of its `opt_state` as passed to the step.

    Raises:
        UntraceableError: within `vmap_step`, if a value is `state.seed`: each member has its own, but the function
        gives one answer.
    """
    if (trace := current()) is None:
        return function(*values)

    def of_one(*values: Any) -> R:
        if any(isinstance(value, tuple) for value in values):
            raise UntraceableError(
                "on_host was given state.seed within vmap_step, which is a tuple of the members' seeds, and its answer is "
                "for all of them, so that they would draw the same numbers: take the step of each member by itself"
            )
        return function(*values)

    answer: R = trace.ask(of_one, values)
    return answer


def afterwards(function: Callable[..., None], *values: Any) -> None:
    """Call `function(*values)`, which may raise: in a compiled step, with the tensors' values after it has run."""
    if (trace := current()) is None:
        function(*values)
    else:
        trace.afterwards.append((function, values))


def where(flag: bool | Tensor, new: Any, old: Any) -> Any:
    """`torch.where` for trees: `new` if the flag is set, otherwise `old`.

    >>> import looplib as ll, torch
    >>> ll.optim.where(torch.tensor(False), {"count": torch.tensor(1)}, {"count": torch.tensor(0)})
    {'count': tensor(0)}

    Use it in your own optimizers if a tensor decides about their state. The flag stays on its device, so nothing
    waits for it. In an update `old` may already be overwritten, so decide in advance there (see `ll.types.Decide`).

    Args:
        flag: a bool, which selects a whole tree, or a 0-dim bool tensor.
        new, old: pytrees of the same structure, with tensors of the same shapes and dtypes. Other leaves must be
            equal if a compiled step chooses between them.
    """
    if isinstance(flag, bool):
        return new if flag else old
    return trees.map_leaves(partial(_chosen, flag), new, old)


def _chosen(flag: Tensor, new: Any, old: Any) -> Any:
    if new is old:
        return new
    if not isinstance(new, Tensor) or is_sharded(new):
        if tracing():
            if new != old:
                raise UntraceableError(
                    f"a skipped update would have to choose between {new!r} and {old!r}: keep tensors"
                )
            return new
        return new if flag else old
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"where chooses between a tensor of {new.dtype} and shape {tuple(new.shape)}, and one of {old.dtype} and "
            f"shape {tuple(old.shape)}: an update keeps the shapes and dtypes of what it updates"
        )
    if tracing():
        return torch.where(flag.to(new.device), new, old)
    with torch.no_grad():
        return torch.where(flag.to(new.device), new, old).requires_grad_(new.requires_grad)


# Where a loss function itself blocks the gradient to its inputs
#
# The graph of a step contains its own backward pass, in which torch detaches tensors freely. A differentiable step must
# block gradients exactly where the loss function does, so the operations of those cuts are marked.

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
        _refuse_strangers(args, kwargs)
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


def _refuse_strangers(args: Any, kwargs: Any) -> None:
    """Raise for tensors of a torch.func transform that is not active here: no gradient would reach them."""
    level = torch_private.functorch_level()
    for leaf in torch_private.pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and torch_private.functorch_level_of(leaf) > level:
            raise UntraceableError(
                "the step reads a tensor that torch.func transforms from elsewhere than its state and batch (a "
                "function closes over it), so no gradient would reach it: give it in the batch, or as a "
                "hyperparameter in the state (ll.optim.injected)"
            )


def cuts_marked() -> AbstractContextManager[Any]:
    """Context for a user's loss function, in which a differentiable trace marks its cuts."""
    return _Marks() if differentiated() else _nothing


_nothing = nullcontext()
