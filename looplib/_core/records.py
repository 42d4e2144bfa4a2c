"""Records of functions: what made a function, its kind, and how it is shown and described.

To Python, gradient functions, steps, loggers and so on are all callables. Each that looplib makes
is therefore a `Function` with one record, `Made`. Functions that take such a function read the record, through all wrappers
that have one too, or that `functools.wraps` what they wrap. Of a plain function, only the parameters can be inspected.

The record also holds the call that made the function, which is its repr: `ll.make_train_step(ll.make_grad_fn(Linear,
loss_fn), ...)`. A factory returns `with_repr(result, itself, *its_arguments)`. Arguments without short code are shown
by name: modules and datasets by their class, functions by their name, lambdas by their parameters.

Descriptions are plain values, stored with a run and compared with those of a later one. Secrets (tokens, keys and
passwords) are left out of settings that are stored.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import math
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from looplib._core.checks import check, few, named
from looplib._core.trees import leaves, map_leaves, paired

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

ADDRESS = r" at 0x[0-9a-fA-F]+"
_SHOWN = 8  # number of entries of a container that are shown
_LONG = 200  # maximum length of a repr, such as a tensor's, in characters


class Call(NamedTuple):
    """A call of a factory with its arguments."""

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        defaults = inspect.signature(self.factory).parameters
        named = [
            f"{name}={shown(value)}"
            for name, value in self.settings.items()
            if name not in defaults or value is not defaults[name].default
        ]
        return f"{_public_name(self.factory)}({', '.join([*map(shown, self.args), *named])})"


class Made(NamedTuple):
    """Facts about a function made by looplib.

    Attributes:
        kind: one of `KINDS`, or None.
        name: name of the function that made it, such as "accumulate".
        inner: the function that it wraps.
        per_sample: True if its gradients are those of each sample.
        max_norm: bound on the norm of each sample's gradient before they were added up.
        microbatches: the same for several microbatches at once, which is faster: their results, and over how many ranks an
            engine averages.
        model: the module whose gradients it computes.
        batch_norms: layers that normalize a sample by the others of its batch.
        loss_graphs: what the graphs of its losses show (`_core.graphs.LossGraphs`).
        spec: of a step, its components (`looplib.steps.StepSpec`).
        count_samples: counts the samples in a batch of it, if it does not leave that to the function that it wraps.
        call: the call that made it, which is its repr.
    """

    kind: str | None
    name: str
    inner: Any = None
    per_sample: bool = False
    max_norm: float | None = None
    microbatches: Callable[..., Any] | None = None
    model: nn.Module | None = None
    batch_norms: tuple[str, ...] = ()
    loss_graphs: Any = None
    spec: Any = None
    count_samples: Callable[[Any], int] | None = None
    call: Call | None = None


class Function(functools.partial[Any]):
    """A function with its record. Calling it adds no Python code."""

    record: Made
    bare: Callable[..., Any]  # what it was made of; of a `partial`, `func` is without the arguments

    def __repr__(self) -> str:
        return str(self.record.call or self.bare)

    def __deepcopy__(self, memo: Any) -> Function:
        """Itself, as for Python's functions: a copy of the record would tell of a copy of the module."""
        return self

    @property
    def compiler(self) -> Any:
        """The compiler of a step that runs as a graph."""
        return self.record.spec.compiler


Function.__name__ = "function"  # in error messages, which call it what it is to its users


def record_of(function: Any) -> Made | None:
    """Record of a function, or None."""
    return function.record if type(function) is Function else None


def records_of(function: Any) -> Iterator[Made]:
    """Records of a function, of the function it wraps, and so on, as far as they have one or say so (`functools.wraps`)."""
    while function is not None:
        if (record := record_of(function)) is None:
            function = getattr(function, "__wrapped__", None)
        else:
            yield record
            function = record.inner


def with_record(function: F, record: Made) -> F:
    """The function with this record, and no other."""
    plain = without_record(function)
    marked = Function(plain)
    # The name, the docstring and attributes. A function that `functools.wraps` it has no record: it is no `Function`.
    functools.update_wrapper(marked, plain)
    marked.record, marked.bare = record, plain
    return cast(F, marked)


def without_record(function: T) -> T:
    """The function itself. Calls of it are faster: a subclass of `partial` lacks the fast protocol."""
    return cast(Any, function).bare if type(function) is Function else function


def with_repr(result: T, factory: Callable[..., Any], *args: Any, **settings: Any) -> T:
    """Return what a factory made, with the call as its repr. Settings at their defaults are left out."""
    call = Call(factory, args, settings)
    if hasattr(type(result), "call"):
        object.__setattr__(result, "call", call)  # works for frozen records too
        return result
    record = record_of(result) or Made(None, factory.__name__)
    return cast(T, with_record(cast(Any, result), record._replace(call=call)))


class Code(str):
    """Text that is already code, such as the name of a class in place of its instance."""

    __slots__ = ()
    __repr__ = str.__str__


def shown(value: Any) -> str:
    """A value as code.

    >>> shown({"lr": 0.1, "dtype": float, "key": lambda name: name})
    "{'lr': 0.1, 'dtype': float, 'key': lambda name: ...}"
    """
    record = record_of(value)
    call = getattr(value, "call", None) if record is None else record.call
    if isinstance(call, Call):
        return str(call)
    name = type(value).__name__
    if record is not None or isinstance(value, (type, nn.Module)) or inspect.isroutine(value):
        title: str = getattr(value, "__name__", name)
        return f"lambda {', '.join(parameters_of(value))}: ..." if title == "<lambda>" else title
    if isinstance(value, (list, tuple, dict)):
        if len(value) > _SHOWN:
            return f"{name} of {len(value)}"
        return repr(map_leaves(lambda member: Code(shown(member)), value, is_leaf=lambda node: node is not value))
    text = repr(value)
    if type(value).__module__.startswith("looplib.") and text.startswith(f"{name}("):
        return text.replace(name, _public_name(type(value)), 1)
    return f"{name}(...)" if re.search(ADDRESS, text) or len(text) > _LONG else text


def _public_name(thing: Any) -> str:
    """Public name of an object: `ll.ema`, `ll.optim.swa`.

    The package imports this file, which therefore cannot import it, and finds it in `sys.modules`.
    """
    looplib, name = sys.modules["looplib"], thing.__name__
    if vars(looplib).get(name) is thing:
        return f"ll.{name}"
    room, *_ = thing.__module__.partition(".")[2].split(".")
    return f"ll.{room}.{name}" if getattr(getattr(looplib, room, None), name, None) is thing else name


# Kinds of functions: gradient function, step, predicate, logger, and so on


# Kinds of arguments, and what to give.
KINDS = {
    "grad_fn": "a grad_fn(state, batch, **request) -> Gradients, as ll.make_grad_fn(model, loss_fn) returns",
    "train_step": "a train step(state, batch) -> (state, metrics), as ll.make_train_step(grad_fn, optimizer) returns",
    "eval_step": 'an eval step(state, batch) -> {"loss": ll.Mean(total, weight)}, as ll.make_eval_step(model, metric_fn) '
    "returns",
    "predict_step": "a predict step, as ll.make_predict_step(model, predict_fn) returns",
    "optimizer": "what ll.optimizer or ll.chain returns, such as ll.optimizer(torch.optim.AdamW, lr=1e-3)",
    "model": "a torch.nn.Module",
    "loss_fn": "a function (model, batch)",
    "predicate": "a predicate, such as ll.every_n_steps(100)",
    "schedule": "a number or a schedule, such as ll.warmup_cosine(...)",
    "logger": "a logger, such as ll.jsonl(path)",
    "loader": "a loader, as ll.make_loader returns",
    "state": "a state, as ll.init_state returns",
}
RECORDS = {"optimizer", "model", "state"}  # no plain function is one of these

# How a plain function of each kind is called, by position and by name. Nothing else of it is judged.
CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "grad_fn": (("state", "batch"), ("index", "scale", "donate", "in_step", "part")),
    "train_step": (("state", "batch"), ()),
    "eval_step": (("state", "batch"), ()),
    "predict_step": (("state", "batch"), ()),
    "loss_fn": (("model", "batch"), ()),
    "predicate": (("state",), ()),
    "schedule": (("step",), ()),
    "logger": (("state", "values"), ()),
    "loader": (("state",), ()),
}

# Kinds of the instances of classes; each file that defines such a class adds it.
kinds_of_classes: dict[type, str] = {nn.Module: "model"}


def kind_of(value: Any) -> str | None:
    """One of `KINDS`, or None for a plain function and other values."""
    for cls in type(value).__mro__:
        if cls in kinds_of_classes:
            return kinds_of_classes[cls]
    record = record_of(value)
    return None if record is None else record.kind


def check_kind(value: T, who: str, *expected: str, advice: str = "") -> T:
    """Return a value of one of these kinds, or a plain callable that can be called so. Raises TypeError for another."""
    __tracebackhide__ = True
    kind = kind_of(value)
    plain = kind is None and callable(value) and not isinstance(value, type) and not RECORDS & {*expected}
    if kind in expected or (plain and any(_can_be_called(value, name) for name in expected)):
        return value
    wanted = " or ".join(KINDS[name] for name in expected)
    as_what = f", which cannot be called as {_call_of(expected[0])}" if plain else ""
    raise TypeError(f"{who} got {_called(value, kind)}{as_what}; give {wanted}{advice}")


def _can_be_called(function: Any, kind: str) -> bool:
    """True if a function takes the arguments of this kind of functions, or Python cannot tell."""
    positional, named = CALLS[kind]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*positional, **dict.fromkeys(named))
    except TypeError:
        return False
    return True


def check_call(who: str, function: Callable[..., Any], *positional: str) -> None:
    """Raise TypeError for a plain function that cannot be called with these positional arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*positional)
    except TypeError:
        raise TypeError(
            f"{who} got {_called(function, None)}, which is called as ({', '.join(positional)})"
        ) from None


def check_no_module(who: str, function: Any, advice: str) -> None:
    """Raise TypeError for a module in the place of a function that is made of one."""
    __tracebackhide__ = True
    check(not isinstance(function, nn.Module), f"{who} got {named(function)}; give {advice}", TypeError)


def _call_of(kind: str) -> str:
    """A call of a function of this kind: `grad_fn(state, batch, **request)`."""
    positional, named = CALLS[kind]
    return f"{kind}({', '.join([*positional, *(['**request'] if named else [])])})"


def _called(value: Any, kind: str | None) -> str:
    """Name of a value in a message: the factory that made it, or the call of a plain function."""
    if (record := record_of(value)) is not None:
        return f"the {kind or 'function'} of {record.name}"
    if not inspect.isroutine(value):
        return named(value)
    return f"{value.__name__}({', '.join(parameters_of(value))})"


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters of a function by name; none if Python cannot tell, as for some functions in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


_ENDINGS = {
    "loss_fn": "return nn.functional.cross_entropy(model(inputs), targets)",
    "metric_fn": 'return {"loss": nn.functional.cross_entropy(model(inputs), targets)}',
    "predict_fn": "return model(inputs)",
}


def check_function_of_model(model: Any, function: Any, who: str, name: str) -> None:
    """Raise TypeError unless `who(model, function)` was given a module and a function `name(model, batch)`."""
    check_kind(model, who, "model", advice=f", and the function after it: {who}(model, {name})")
    check(
        not isinstance(function, nn.Module) and not str(getattr(function, "__module__", "")).startswith("torch."),
        f"{who} got {named(function)}, which takes outputs and targets; {name} is called as {name}(model, batch). "
        f"Write a function around it:\n    def {name}(model, batch):\n        inputs, targets = batch\n"
        f"        {_ENDINGS[name]}",
        TypeError,
    )
    if getattr(function, "__self__", None) is model:
        given = [*inspect.signature(function).parameters]
        check(
            given[:1] != ["batch"],  # as Lightning's training_step(self, batch, batch_idx)
            f"{who} got the method {type(model).__name__}.{function.__name__}, and {name} is called as {name}(model, batch), so the "
            f"model would be its batch. Write {who}(model, lambda model, batch: model.{function.__name__}(batch"
            f"{', 0' * (len(given) - 1)}))",
            TypeError,
        )
    check_kind(function, who, "loss_fn", advice=f", as its {name}")


# Descriptions of settings as plain values


MANY = 100  # a longer list is described by a checksum


def described(value: Any) -> Any:
    """Describe a setting as a JSON value that is the same in each process that creates it in the same way.

    >>> described({"lr": 0.1, "betas": (0.9, 0.99), "dtype": torch.float32})
    {'lr': 0.1, 'betas': [0.9, 0.99], 'dtype': 'torch.float32'}
    >>> described(lambda step: 0.1 * step)
    'lambda step: ... (0.1)'

    If an object has a `description`, that is used. A function is described by its name, the numbers in its code and the
    numbers and texts it closes over, but not by its other code, nor by what the functions that it calls close over. Other
    objects are described by their repr, or only their type if the repr contains an address.
    """
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return {str(key): described(member) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        # The order of text in a set differs between processes.
        members = [
            described(member) for member in (value if isinstance(value, Sequence) else sorted(value, key=repr))
        ]
        if len(value) <= MANY:
            return members
        return f"{type(value).__qualname__} of {len(value)}, checksum {zlib.crc32(repr(members).encode()):08x}"
    if hasattr(value, "tolist") and hasattr(value, "shape"):  # a tensor, or an array or number of NumPy's
        return described(value.tolist())
    if (settings := settings_of(value)) is not None:
        return described(settings)
    if isinstance(value, types.FunctionType):
        return _function(value)
    return shown(value) if record_of(value) is not None or inspect.isroutine(value) else _plain(value)


def settings_of(value: Any) -> Mapping[str, Any] | None:
    """Named settings that an object holds, if it is a record of settings."""
    if isinstance(getattr(value, "description", None), Mapping):
        return value.description  # type: ignore[no-any-return]
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    if type(value) is partial:
        return {"function": value.func, "args": value.args, **value.keywords}
    if dataclasses.is_dataclass(value):
        if not value.__dataclass_params__.repr:  # type: ignore[union-attr]
            return None  # it has a repr of its own, as a predicate's, which is the code that makes it
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"type": type(value).__qualname__, **fields}
    return None


def _plain(value: Any) -> Any:
    """A JSON value: a 64-bit number or text, of Python's own types and not subclasses."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, (str, int, float, Path, torch.device)):
        return str(value)
    text = repr(value)
    return type(value).__qualname__ if re.search(ADDRESS, text) else text


def _function(function: types.FunctionType) -> str:
    numbers = [str(constant) for constant in function.__code__.co_consts if isinstance(constant, (int, float))]
    closed_over = inspect.getclosurevars(function).nonlocals.items()
    numbers += [f"{name}={value}" for name, value in closed_over if isinstance(value, (int, float, str))]
    return f"{shown(function)} ({', '.join(numbers)})" if numbers else shown(function)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings that differ between two descriptions, in words.

    >>> differences({"optimizer": {"lr": 0.1}, "loader": {}}, {"optimizer": {"lr": 0.2, "momentum": 0.9}})
    ['optimizer lr was 0.1, is 0.2', 'optimizer momentum was not given, is 0.9']

    Settings that only one of them describes are not compared.
    """
    compared = [
        leaves({name: description[name] for name in old if name in new}, lambda value: not isinstance(value, Mapping))
        for description in (old, new)
    ]
    return [f"{' '.join(path)} was {was}, is {now}" for path, was, now in paired(*compared) if was != now]


def other_settings(path: Any, changed: Sequence[str], seed: Sequence[str] = ()) -> str:
    """Warning about settings that differ from those of the saved run.

    Args:
        path: path of the checkpoint.
        changed: settings with which the run continues, each in words.
        seed: the seed in words, if the restored state takes a different one from the checkpoint.
    """
    taken = {few(changed, 10, "; "): "the new ones"} if changed else {}
    taken |= dict.fromkeys(seed, "the checkpoint's seed (state.replace(seed=...) changes it)")
    beside = (
        ". Loaders beside the first one (zipped) continue after as many of their batches as before, so of other batches, samples "
        "may come again or never"
    )
    return (
        f"{path} was saved with other settings: {'; '.join(taken)}. The run continues from it with "
        f"{' and '.join(taken.values())}; to start over, give checkpoint_io another directory or delete this one"
        f"{beside if any(' beside ' in words for words in changed) else ''}"
    )
