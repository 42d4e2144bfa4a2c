"""Closure inspection: the variables that functions, modules and objects refer to.

A function reads more than its arguments: variables it closes over, globals and attributes that its code names, and
its defaults. `walk` finds all of them. It is used by compiled steps, which would freeze a number from there, and by
the purity checks in `looplib.testing`.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial, singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core.modules import Host, named_modules
from looplib._core.notices import LIBRARIES

_INSTALLED = (*LIBRARIES, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)

_MODULES_OWN = {"training", "call_super_init", "dump_patches"}  # attributes that torch gives to modules

_MANY = 64  # a container with more entries holds data, not settings

_SEARCHED = "<searched>"  # not a name that occurs in code

_NAMING = (nn.Module, types.FunctionType, types.MethodType)  # their references depend only on their own code


class Variable(NamedTuple):
    """A value that something refers to.

    Attributes:
        owner: the function, module, object or container that refers to it; None for a root of the walk.
        key: its name there.
        path: its name in messages, starting at the nearest function or module.
        read: function that returns its current value.
        value: its value during the walk.
        mentioned: attributes named by code on the way; only these are searched in an object.
    """

    owner: Any
    key: str
    path: str
    read: Callable[[], Any]
    value: Any
    mentioned: Set[str]


def walk(*roots: Any, in_whole: Callable[[Any], bool] = lambda thing: False) -> Iterator[Variable]:
    """Depth-first search through references: yields the roots first, then each variable once.

    Args:
        roots: functions, modules, objects, or containers of these.
        in_whole: selects functions and objects to search completely. In others, only attributes that code on the way
            names are searched, and none in objects of looplib's and torch's classes.
    """
    yielded: set[tuple[int, str]] = set()
    searched: dict[int, tuple[Any, set[str]]] = {}  # id -> the thing (kept alive by this), and the names mentioned
    waiting = [_constant(None, f"root {index}", "it", root, frozenset()) for index, root in enumerate(roots)][::-1]
    while waiting:
        variable = waiting.pop()
        if (id(variable.owner), variable.key) not in yielded:
            yielded.add((id(variable.owner), variable.key))
            yield variable
        value, mentioned = variable.value, variable.mentioned
        if is_plain(value):
            continue
        names = searched.setdefault(id(value), (value, set()))[1]
        if _SEARCHED not in names or not (mentioned <= names or isinstance(value, _NAMING)):
            names |= {_SEARCHED, *mentioned}  # an object is searched again if other code mentions more of its names
            waiting += list(_referred_to(value, variable, in_whole))[::-1]


def is_plain(value: Any) -> bool:
    """True if a value refers to nothing else: a tensor, a number, a string or similar."""
    return isinstance(value, Tensor) or type(value) in PLAIN


def is_library(filename: str) -> bool:
    """True if a source file belongs to torch or looplib, or there is none."""
    return filename.startswith(LIBRARIES) or filename.startswith("<")


def is_installed(function: Any) -> bool:
    """True if a function comes with Python, torch, looplib or another installed package."""
    return isinstance(function, types.FunctionType) and function.__code__.co_filename.startswith(_INSTALLED)


def _constant(owner: Any, key: str, path: str, value: Any, mentioned: Set[str]) -> Variable:
    """A variable that cannot be reassigned."""
    return Variable(owner, key, path, partial(_itself, value), value, mentioned)


def _itself(value: Any) -> Any:
    return value


@singledispatch
def _referred_to(thing: Any, variable: Variable, in_whole: Callable[[Any], bool]) -> Iterator[Variable]:
    """Variables that a value refers to directly: here, an object of any other type than those below."""
    kind, attributes, whole = type(thing), _attributes(thing), in_whole(thing)
    if not whole and kind.__module__.split(".")[0] in ("looplib", "torch"):
        return
    mentioned = variable.mentioned
    called = [method for method in _methods(kind) if method.__name__ in mentioned | {"__call__"}]
    yield from _method_variables(thing, called, mentioned)
    mentioned = _all_names(called) | mentioned
    for key in attributes if whole else sorted(mentioned & attributes.keys()):
        in_dict = key in getattr(thing, "__dict__", ())
        read = partial(vars(thing).get, key) if in_dict else partial(getattr, thing, key, None)
        yield Variable(thing, key, f"{variable.path}.{key}", read, attributes[key], mentioned)
    yield _constant(thing, "class", variable.path, kind, mentioned)


@_referred_to.register
def _of_module(model: nn.Module, *_: Any) -> Iterator[Variable]:
    for prefix, module in named_modules(model):
        name = prefix or type(module).__name__
        yield from _entries(module, vars(module), own_attributes(module), frozenset(), f"{name}.", f"{name}.")
        methods = _methods(type(module))
        yield from _method_variables(module, methods, frozenset())
        yield _constant(module, f"{prefix}'s class", name, type(module), _all_names(methods))


def own_attributes(module: nn.Module) -> list[str]:
    """Names of the attributes that a module's own code has set."""
    return [name for name in vars(module) if not name.startswith("_") and name not in _MODULES_OWN]


@_referred_to.register
def _of_function(
    function: types.FunctionType, variable: Variable, in_whole: Callable[[Any], bool]
) -> Iterator[Variable]:
    code, installed = function.__code__, is_installed(function)
    mentioned = _names(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield Variable(function, name, name, partial(_content, cell), _content(cell), mentioned)
    attributes = vars(function)
    whole = in_whole(function)
    if whole or not installed:
        read = attributes if whole else sorted(mentioned & attributes.keys())
        yield from _entries(function, attributes, read, mentioned, ".", f"{function.__name__}.")
    if not installed:
        yield from _globals_and_defaults(function, mentioned)


def _globals_and_defaults(function: types.FunctionType, mentioned: Set[str]) -> Iterator[Variable]:
    space = function.__globals__
    yield from _entries(function, space, sorted(mentioned & space.keys()), mentioned, "global ")
    for index, value in enumerate(function.__defaults__ or ()):
        yield _constant(function, f"default {index}", f"a default of {function.__name__}", value, mentioned)


@_referred_to.register
def _of_partial(bound: partial, variable: Variable, _: Any) -> Iterator[Variable]:  # type: ignore[type-arg]
    for key, value in (("func", bound.func), ("args", bound.args), ("keywords", bound.keywords)):
        yield _constant(bound, key, variable.path, value, variable.mentioned)


@_referred_to.register
def _of_method(method: types.MethodType, variable: Variable, _: Any) -> Iterator[Variable]:
    yield _constant(method, "__func__", variable.path, method.__func__, variable.mentioned)
    mentioned = _names(getattr(method.__func__, "__code__", None))
    yield _constant(method, "__self__", variable.path, method.__self__, mentioned)


@_referred_to.register(dict)
@_referred_to.register(list)
@_referred_to.register(tuple)
def _of_container(values: Any, variable: Variable, _: Any) -> Iterator[Variable]:
    members = values if isinstance(values, dict) else dict(enumerate(values))
    read = values.get if isinstance(values, dict) else partial(_member, values)
    for key, value in list(members.items()) if len(values) <= _MANY else ():
        path = f"[{key!r}]"
        yield Variable(values, path, variable.path + path, partial(read, key), value, variable.mentioned)


@_referred_to.register
def _of_host(host: Host, variable: Variable, _: Any) -> Iterator[Variable]:
    yield _constant(host, "model", variable.path, host.model, frozenset())


@_referred_to.register(type)
@_referred_to.register(types.ModuleType)
def _of_namespace(space: type | types.ModuleType, variable: Variable, _: Any) -> Iterator[Variable]:
    """Variables of a user's class or module that code on the way names: `settings.scale`."""
    for owner in space.__mro__ if isinstance(space, type) else (space,):
        module = sys.modules.get(owner.__module__) if isinstance(owner, type) else owner
        if _is_installed_module(module):
            continue
        names = sorted(variable.mentioned & vars(owner).keys())
        yield from _entries(owner, vars(owner), names, variable.mentioned, path=f"{variable.path}.")


def _entries(
    owner: Any, space: Mapping[str, Any], names: Iterable[str], mentioned: Set[str], key: str = "", path: str = ""
) -> Iterator[Variable]:
    """Variables in a mapping of the owner's; `key` and `path` are put before their names."""
    for name in names:
        yield Variable(owner, key + name, path + name, partial(space.get, name), space[name], mentioned)


def _method_variables(owner: Any, methods: Iterable[types.FunctionType], mentioned: Set[str]) -> Iterator[Variable]:
    for method in methods:
        yield _constant(owner, f"{method.__qualname__}()", method.__name__, method, mentioned)


def _is_installed_module(module: types.ModuleType | None) -> bool:
    if module is None or module.__name__ == "__main__":
        return module is None
    return (getattr(module, "__file__", None) or _INSTALLED[0]).startswith(_INSTALLED)


def _attributes(thing: Any) -> dict[str, Any]:
    """Attributes of an object itself, including slots."""
    members = {name: member for kind in type(thing).__mro__[::-1] for name, member in vars(kind).items()}
    slots = [name for name in sorted(members) if inspect.ismemberdescriptor(members[name]) and hasattr(thing, name)]
    return {name: getattr(thing, name) for name in slots} | getattr(thing, "__dict__", {})


def _methods(kind: type) -> list[types.FunctionType]:
    """Methods of a class that is not from an installed package."""
    functions = [
        value for cls in kind.__mro__ for value in vars(cls).values() if isinstance(value, types.FunctionType)
    ]
    return [function for function in functions if not is_installed(function)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # the variable has no value yet


def _member(values: list[Any] | tuple[Any, ...], index: int) -> Any:
    return values[index] if index < len(values) else None


def _all_names(functions: Iterable[types.FunctionType]) -> frozenset[str]:
    return frozenset[str]().union(*(_names(function.__code__) for function in functions))


def _names(code: types.CodeType | None) -> frozenset[str]:
    """Globals and attributes that a function mentions, including those of nested functions."""
    if code is None:
        return frozenset()
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)
