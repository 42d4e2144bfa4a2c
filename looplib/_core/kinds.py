"""Kinds of functions: gradient function, step, predicate, sink, and so on.

To Python they are all callables, and many take two arguments. looplib therefore marks the functions it makes with a
record, `Made`: their kind, the function that made them, what they wrap, and known facts about the result. Functions
that take such a function read the record, through all wrappers that are marked too. For a plain function, they can
only inspect its parameters, and when it is called, what it does with the state and what it returns.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn

from looplib._core.checks import named

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C")


class Made(NamedTuple):
    """Facts about a function made by looplib, or by a user with `ll.grads.wrapper`.

    Attributes:
        kind: one of `KINDS`.
        name: name of the function that made it, such as "accumulate".
        inner: the function that it wraps.
        whole_step: True if it makes sense only for the gradients of a whole step, not of a microbatch.
        scaled: True if it also makes sense for the gradients of a scaled loss.
        per_sample: True if its gradients are those of each sample.
        max_norm: bound on the norm of each sample's gradient before they were added up.
        adds: True if it accumulates into given gradients of earlier microbatches itself.
        microbatches: the same function for several microbatches at once, which is faster.
        compare: function that raises on all ranks, before the first step, if they run different programs.
        model: the module whose gradients it computes.
        renormed: names of the trained parameters that its forward pass writes because of `max_norm=`.
        reach: what the graph of its loss reaches (`_core.reached.Reach`).
    """

    kind: str
    name: str
    inner: Any = None
    whole_step: bool = False
    scaled: bool = False
    per_sample: bool = False
    max_norm: float | None = None
    adds: bool = False
    microbatches: Callable[..., Any] | None = None
    compare: Callable[..., None] | None = None
    model: nn.Module | None = None
    renormed: tuple[str, ...] = ()
    reach: Any = None


# Kinds of arguments: a name for messages, the number of arguments, and the function that makes them.
KINDS = {
    "grad_fn": ("a grad_fn", 3, "a grad_fn, as ll.make_grad_fn(model, loss_fn) returns"),
    "train_step": ("a train step", 2, "a train step, as ll.make_train_step(grad_fn, optimizer) returns"),
    "eval_step": ("an eval step", 2, "an eval step, as ll.make_eval_step(model, metric_fn) returns"),
    "predict_step": ("a predict step", 2, "a predict step, as ll.make_predict_step(model, predict_fn) returns"),
    "optimizer": (
        "an optimizer",
        None,
        "what ll.optimizer returns, such as ll.optimizer(torch.optim.AdamW, lr=1e-3)",
    ),
    "model": ("a module", None, "a torch.nn.Module"),
    "loss_fn": ("a loss function", 2, "a function (model, batch) -> loss"),
    "predicate": ("a predicate", 1, "a predicate, such as ll.every_n_steps(100)"),
    "schedule": ("a schedule", 1, "a number or a schedule, such as ll.warmup_cosine(...)"),
    "sink": ("a sink", 2, "a sink, such as ll.jsonl(path)"),
    "loader": ("a loader", 1, "a loader, as ll.make_loader returns"),
    "state": ("a state", None, "a state, as ll.init_state returns"),
}

# Usual names of the first parameter of a function of a model, and of the second of a sink.
MODELS = {"model", "module", "net", "network"}
_VALUES = {"values"}

_classes: dict[type, str] = {nn.Module: "model"}


def instances_are(kind: str) -> Callable[[type[C]], type[C]]:
    """Class decorator: set the kind of a class's instances."""

    def register(cls: type[C]) -> type[C]:
        _classes[cls] = kind
        return cls

    return register


def mark(function: F, made: Made) -> F:
    """Attach a record to a function, and return the function."""
    # A weak reference distinguishes it from a function that got its attributes from `functools.wraps`.
    function.__looplib__ = made, weakref.ref(function)  # type: ignore[attr-defined]
    return function


def mark_alike(function: F, name: str, inner: Any) -> F:
    """Mark a function with the kind of the function it wraps, if that is known, and return it."""
    kind = kind_of(inner)
    return function if kind is None else mark(function, Made(kind, name, inner))


def made(function: Any) -> Made | None:
    """Record of a function, or None."""
    record, owner = getattr(function, "__looplib__", None) or (None, None)
    return record if owner is not None and owner() is function else None


def chain(function: Any) -> Iterator[Made]:
    """Records of a function, of the function it wraps, and so on, as far as they are marked."""
    while (record := made(function)) is not None:
        yield record
        function = record.inner


def kind_of(value: Any) -> str | None:
    """One of `KINDS`, or None if it is not certain."""
    of_class = next(filter(None, map(_classes.get, type(value).__mro__)), None)
    return of_class or _kind_made(value) or _kind_by_parameters(value)


def _kind_made(value: Any) -> str | None:
    if (record := made(value)) is not None:
        return record.kind
    # A step made by looplib has `parts`.
    kind = getattr(getattr(value, "parts", None), "kind", None)
    return None if kind is None else f"{kind}_step"


def _kind_by_parameters(value: Any) -> str | None:
    first, second, *_ = [*positional(value), "", ""]
    if second and first in MODELS:
        return "loss_fn"
    return "sink" if second in _VALUES else None


def check_kind(value: Any, who: str, *expected: str, advice: str = "") -> None:
    """Raise TypeError unless a value is of one of these kinds, or is a plain callable that may be."""
    kind = kind_of(value)
    if kind not in expected and not (kind is None and callable(value) and _may_be(value, expected)):
        raise TypeError(f"{who} got {_named(value, kind)}; give {_wanted(expected)}{advice}")


def _may_be(value: Any, expected: tuple[str, ...]) -> bool:
    """True if a plain function can be called with the arguments of one of these kinds."""
    return any(_takes(value, count) for name in expected if (count := KINDS[name][1]))


def _wanted(expected: tuple[str, ...]) -> str:
    return " or ".join(dict.fromkeys(KINDS[name][2] for name in expected))


class WrongKindError(TypeError):
    """A call has shown that a plain function is of a different kind."""


def checked(value: F, who: str, *expected: str, advice: str = "") -> F:
    """Check a step or gradient function, wrapping plain functions so that errors name the mistake.

    A plain function of two arguments may be a function of a model. That shows only when it is called: it fails
    because it takes the state for a module, or it does not return what is expected.

    Raises TypeError as `check_kind` does.
    """
    check_kind(value, who, *expected, advice=advice)
    if kind_of(value) in expected:
        return value

    @functools.wraps(value)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            out = value(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            if not _failed_on_the_state(error):
                raise
            raise WrongKindError(
                f"{who} got {_named(value, None)}, which is called with a state and a batch and failed on the state "
                f"({error}); give {_wanted(expected)}"
            ) from error
        if not any(_RETURNS[name][1](out) for name in expected):
            should = " or ".join(dict.fromkeys(_RETURNS[name][0] for name in expected))
            raise WrongKindError(
                f"{who} got {_named(value, None)}, which returned {_returned(out)} and should return {should}; "
                f"give {_wanted(expected)}"
            )
        return out

    return called  # type: ignore[return-value]


def _failed_on_the_state(error: Exception) -> bool:
    """True for the error of a function that takes the state for something else, unless it is explained already."""
    of_the_state = isinstance(error, AttributeError) and kind_of(error.obj) == "state"
    about_the_state = of_the_state or "'TrainState'" in str(error) or "not TrainState" in str(error)
    return about_the_state and not isinstance(error, WrongKindError)


def _is_state_and_more(out: Any) -> bool:
    return isinstance(out, (tuple, list)) and len(out) == 2 and kind_of(out[0]) == "state"


def _are_metrics(out: Any) -> bool:
    return isinstance(out, Mapping) and all(hasattr(v, "merge") and hasattr(v, "compute") for v in out.values())


def _are_outputs(out: Any) -> bool:
    of_another_step = kind_of(out) in ("gradients", "state") or _is_state_and_more(out) or (_are_metrics(out) and out)
    return not of_another_step


# Results of functions of these kinds in words, and a test for them.
_RETURNS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "grad_fn": ("ll.types.Gradients", lambda out: kind_of(out) == "gradients"),
    "train_step": ("(state, metrics)", _is_state_and_more),
    "eval_step": ('a dict of metrics, such as {"loss": ll.Mean(total, weight)}', _are_metrics),
    "predict_step": ("outputs", _are_outputs),
}


def _returned(out: Any) -> str:
    if type(out) in (tuple, list):
        return f"a {type(out).__name__} of {', '.join(type(item).__name__ for item in out) or 'nothing'}"
    if isinstance(out, Mapping):
        return f"a {type(out).__name__} of {', '.join(f'{k!r}: {type(v).__name__}' for k, v in out.items())}"
    return named(out)


def _named(value: Any, kind: str | None) -> str:
    if (record := made(value)) is not None:
        return f"{KINDS[record.kind][0]} (of {record.name})"
    if kind is not None and kind.endswith("_step"):
        return f"{KINDS[kind][0]} (of make_{kind})"
    if not inspect.isroutine(value):
        return f"a {type(value).__name__}"
    parameters = ", ".join(positional(value))
    called = f"{getattr(value, '__name__', 'a function')}({parameters})"
    return called if kind is None else f"{called}, which looks like {KINDS[kind][0]}"


def positional(value: Any, required: bool = False) -> list[str]:
    """Names of the parameters that can be passed by position, or of those that must be."""
    if isinstance(value, type) or not callable(value):
        return []
    allowed = [p for p in parameters_of(value).values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [p.name for p in allowed if not required or p.default is p.empty]


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters of a function by name; none if Python cannot tell, as for some functions in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _takes(value: Any, count: int) -> bool:
    """True if it can be called with `count` arguments, as far as can be determined."""
    if isinstance(value, type):
        return False
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
