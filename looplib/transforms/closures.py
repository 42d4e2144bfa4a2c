"""Closure inspection: the variables that functions, modules and objects refer to.

A function reads more than its arguments: variables it closes over, globals and attributes that its code names, and
its defaults. `walk` finds all of them. It is used by compiled steps, which would freeze a number from there, and by
the purity checks in `looplib.testing`.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core.checks import LIBRARIES
from looplib._core.modules import FunctionalModule, named_modules, running
from looplib._core.torch_private import own_modules, own_parameters

_FOLDERS = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_INSTALLED = (*LIBRARIES, *(f"{folder}{os.sep}" for folder in _FOLDERS))

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)

_MANY = 64  # a container with more entries holds data, not settings

Reference = tuple[str, Callable[[], Any]]  # path, and function that reads the current value


class Variable(NamedTuple):
    """A value that something refers to.

    Attributes:
        owner: the function, module, object or container that refers to it; None for a root of the walk.
        path: its name in messages, starting at the nearest function or module.
        read: function that returns its current value.
        value: its value during the walk.
    """

    owner: Any
    path: str
    read: Callable[[], Any]
    value: Any


def walk(*roots: Any) -> list[Variable]:
    """Depth-first search through references: lists the roots and each variable once.

    Of an object, only attributes whose names occur in the user's code are searched, and none of looplib's and torch's
    classes.

    Args:
        roots: functions, modules, objects, or containers of these.
    """
    names = {"forward", "__call__", "__getitem__", "__iter__", "__len__"}  # methods that torch and Python call
    while True:  # until the code that was found mentions no new names
        count = len(names)
        variables = _search(roots, names)
        if len(names) == count:
            return variables


def _search(roots: tuple[Any, ...], names: set[str]) -> list[Variable]:
    """One search for attributes with these names, to which those in the code on the way are added."""
    variables: list[Variable] = []
    seen: dict[int, Any] = {}  # by id, and kept alive for it
    waiting = [Variable(None, "it", partial(itself, root), root) for root in reversed(roots)]
    while waiting:
        variables.append(variable := waiting.pop())
        thing = variable.value
        if is_plain(thing) or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, types.FunctionType) and not is_installed(thing):
            names |= _names(thing.__code__)
        references = _references(thing, variable.path, names)
        waiting += [Variable(thing, path, read, read()) for path, read in references][::-1]
    return variables


def is_plain(value: Any) -> bool:
    """True if a value refers to nothing else: a tensor, a number, a string or similar."""
    return isinstance(value, Tensor) or type(value) in PLAIN


def is_library(filename: str) -> bool:
    """True if a source file belongs to torch or looplib, or there is none."""
    return filename.startswith(LIBRARIES) or filename.startswith("<")


def is_installed(function: Any) -> bool:
    """True if a function comes with Python, torch, looplib or another installed package."""
    return isinstance(function, types.FunctionType) and function.__code__.co_filename.startswith(_INSTALLED)


def _references(thing: Any, path: str, names: set[str]) -> Iterator[Reference]:
    """Direct references of a value."""
    parts = next((parts for kind, parts in _PARTS.items() if isinstance(thing, kind)), None)
    if parts is not None:
        yield from ((path, partial(getattr, thing, part)) for part in parts)
        if isinstance(thing, FunctionalModule):
            yield f"the parameters of {type(thing.model).__name__}", _HeldParameters(thing)
    elif isinstance(thing, types.FunctionType):
        yield from _of_function(thing, names)
    elif isinstance(thing, nn.Module):
        yield from _of_module(thing)
    elif isinstance(thing, (dict, list, tuple)):
        if isinstance(thing, list):  # which a function may fill
            yield f"the length of {path}", partial(len, thing)
        for key in _keys(thing):
            yield f"{path}[{key!r}]", partial(_member, thing, key)
    elif isinstance(thing, (type, types.ModuleType)):
        yield from _of_namespace(thing, path, names)
    elif type(thing).__module__.split(".")[0] not in ("looplib", "torch"):
        for name in sorted(names & _attributes(thing)):
            yield f"{path}.{name}", partial(getattr, thing, name, None)
        yield path, partial(itself, type(thing))


_PARTS = {
    partial: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    FunctionalModule: ("model",),
}


class _HeldParameters:
    """A number that changes if a module holds other parameters than before, such as a new `nn.Parameter`.

    While a step runs the module, it holds those of a state, which do not count.
    """

    def __init__(self, host: FunctionalModule) -> None:
        self._host, self._last = host, 0

    def __call__(self) -> int:
        if not running.models:
            self._last = hash(tuple(id(owner.get(key)) for owner, key, _ in self._host.slots.params))
        return self._last


def _of_module(model: nn.Module) -> Iterator[Reference]:
    for prefix, module in named_modules(model):
        path = prefix or type(module).__name__
        for name in vars(module):
            if not name.startswith("_") and name != "training":
                yield f"{path}.{name}", partial(vars(module).get, name)
        if children := own_modules(module):
            yield f"the layers of {path}", partial(_layers, children)
        yield path, partial(itself, type(module))


def _layers(children: Mapping[str, Any]) -> int:
    """A number that changes if one of these layers is replaced. Those without parameters may be, in each forward pass."""
    with_variables = [
        child for child in children.values() if child is not None and (own_parameters(child) or own_modules(child))
    ]
    return hash(tuple(map(id, with_variables)))


def _of_namespace(space: type | types.ModuleType, path: str, names: set[str]) -> Iterator[Reference]:
    """Variables of a user's class or module, such as `settings.scale`, and methods that are called."""
    for owner in space.__mro__ if isinstance(space, type) else (space,):
        module = sys.modules.get(owner.__module__) if isinstance(owner, type) else owner
        if not _is_installed_module(module):
            for name in sorted(names & vars(owner).keys()):
                yield f"{path}.{name}", partial(vars(owner).get, name)


def _of_function(function: types.FunctionType, names: set[str]) -> Iterator[Reference]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, partial(_content, cell)
    if not is_installed(function):
        for name in names & vars(function).keys():
            yield f"{function.__name__}.{name}", partial(vars(function).get, name)
        space = function.__globals__
        for name in sorted(_names(function.__code__) & space.keys()):
            yield name, partial(space.get, name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield f"a default of {function.__name__}", partial(itself, value)


def _attributes(thing: Any) -> set[str]:
    """Names of the attributes of an object itself, including slots."""
    members = [member for kind in type(thing).__mro__ for member in vars(kind).items()]
    slots = {name for name, member in members if inspect.ismemberdescriptor(member)}
    return slots | getattr(thing, "__dict__", {}).keys()


def _is_installed_module(module: types.ModuleType | None) -> bool:
    if module is None or module.__name__ == "__main__":
        return module is None
    return (getattr(module, "__file__", None) or _INSTALLED[0]).startswith(_INSTALLED)


def _keys(values: Any) -> Iterable[Any]:
    if len(values) > _MANY:
        return ()
    return list(values) if isinstance(values, dict) else range(len(values))


def itself(value: Any) -> Any:
    return value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # the variable has no value yet


def _member(values: Any, key: Any) -> Any:
    try:
        return values[key]
    except LookupError:
        return None


def _names(code: types.CodeType) -> set[str]:
    """Globals and attributes that a function mentions, including those of nested functions."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner) - {"__init__"}
