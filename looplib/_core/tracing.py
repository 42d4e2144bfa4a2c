"""Tracing primitives: communication between a step's code and the graph it is traced into.

A graph has no branches and no numbers except constants. Values that the host decides before an update (a schedule,
whether an average is due) are requested by `on_host` and passed to the graph at each step. Decisions that depend on
tensors (whether to skip) are made with `where`, and errors that depend on them are raised with `afterwards`. Outside
a trace, each of these is the plain operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from looplib._core import torch_private, trees
from looplib._core.random import mix
from looplib._core.ranks import is_sharded

R = TypeVar("R")


class UntraceableError(RuntimeError):
    """A step does something that a graph of tensor operations cannot represent."""

    __module__ = "looplib.transforms"  # as tracebacks name it


@dataclass(eq=False)
class Trace:
    """One trace of a step.

    Attributes:
        answer: function that returns the host's answer to a question: a function, and its arguments.
        around_loss: context for the user's loss function, if the graph itself is to be differentiated.
        stacked: True if the graph is to be mapped over members.
        originals: by the id of a tensor of the traced state, the tensor with values for which it stands: of all members,
            if `stacked`.
        kernels_from: number of parameters from which on a fused kernel, which can neither be mapped over members nor
            differentiated, updates them.
        stream: index of the microbatch for which random numbers are drawn.
        afterwards: checks to make after the graph has run.
    """

    answer: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
    around_loss: Callable[[], AbstractContextManager[Any]] | None = None
    stacked: bool = False
    kernels_from: float = math.inf
    originals: Mapping[int, Tensor] = field(default_factory=dict)
    stream: int = 0
    afterwards: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)


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
    return trace is not None and trace.around_loss is not None


def around_loss() -> AbstractContextManager[Any]:
    """Context for a user's loss function, in which a trace that is to be differentiated marks where it blocks gradients."""
    trace = current()
    return nullcontext() if trace is None or trace.around_loss is None else trace.around_loss()


def may_recompute() -> bool:
    """True unless the graph that is being traced will be differentiated.

    What its backward pass computes once more would not carry the marks of `around_loss`, so gradients would pass where the
    loss function blocks them.
    """
    return not differentiated()


def may_offload() -> bool:
    """True unless a step is being traced.

    Its graph has no tensors that autograd saves: who runs it plans its memory, and `torch.func` takes no hooks for them.
    """
    return not tracing()


def keeps_terms_of_0() -> bool:
    """True if an update is to have the terms whose factors are 0: of other members they may not be, or of a gradient."""
    trace = current()
    return trace is not None and (trace.stacked or trace.around_loss is not None)


def takes_kernel(parameters: int) -> bool:
    """True if a fused kernel is to update so many parameters in the graph that is being traced."""
    trace = current()
    return trace is not None and parameters >= trace.kernels_from


def draws_for(microbatch: int) -> None:
    """Set the microbatch for which a trace draws random numbers from now on."""
    if (trace := current()) is not None:
        trace.stream = microbatch


def original(tensor: Tensor) -> Tensor:
    """The tensor with values for which a tensor of a traced state stands; outside a trace, the tensor itself."""
    trace = current()
    return tensor if trace is None else trace.originals.get(id(tensor), tensor)


def refuse_in_graph(message: str) -> None:
    """Raise UntraceableError while a step is being traced: for what no graph can hold, where it begins.

    Asked there and not by the transform, which cannot see what the functions of a step will call.
    """
    if tracing():
        raise UntraceableError(message)


def number_in(count: Tensor) -> Any:
    """The number in a 0-dim tensor on the host; in a trace the tensor, whose number `on_host` asks for at each step."""
    return count if tracing() else int(count)


def for_message(tensors: R) -> R | dict[str, Any]:
    """Tensors for the text of an error that `afterwards` may raise; none in a trace, whose graph would return them all."""
    return {} if tracing() else tensors


def generator_at(device: torch.device, *position: int) -> torch.Generator | None:
    """A random generator seeded by these numbers of a state; in a trace None, torch's own, which is the step's.

    A graph is for all seeds, and its numbers are drawn for the state's when it runs.
    """
    return None if tracing() else torch.Generator(device).manual_seed(mix(*position))


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
    answer: R = trace.answer(function, values)
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

    Use it in your own optimizers if a tensor decides about their state. The flag stays on its device, so nothing waits
    for it, unless there are sharded tensors or values that are no tensors to choose between. In an update `old` may
    already be overwritten, so decide in advance there (see `ll.types.Transform`).

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
    if not isinstance(old, Tensor):
        raise ValueError(
            f"where chooses between a tensor of shape {tuple(new.shape)} and {old!r}: an update keeps the structure of what it "
            "updates, so let the first state hold a tensor there"
        )
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"where chooses between a tensor of {new.dtype} and shape {tuple(new.shape)}, and one of {old.dtype} and "
            f"shape {tuple(old.shape)}: an update keeps the shapes and dtypes of what it updates"
        )
    if tracing():
        return torch.where(flag.to(new.device), new, old)
    with torch.no_grad():
        return torch.where(flag.to(new.device), new, old).requires_grad_(new.requires_grad)
