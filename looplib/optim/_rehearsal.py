"""Rehearsal: a step on copies that shows what an optimizer class keeps, for classes that do not declare it."""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from looplib._core import draws, torch_private, trees
from looplib._core.checks import check
from looplib._core.mappings import without
from looplib._core.modules import _generators
from looplib._core.random import restored
from looplib._core.ranks import is_sharded
from looplib._core.updates import copied
from looplib.optim._recipe import Recipe
from looplib.types import Params

_PLAIN = (Tensor, int, float, complex, str, torch.dtype, type(None))


@functools.cache
def _of_torch() -> frozenset[str]:
    """Attributes of torch.optim.Optimizer itself. Computed late, since creating the first one imports much of torch."""
    return frozenset(("state", "param_groups", "defaults", *vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))))


@dataclass
class Rehearsed:
    """State that a class keeps after a step.

    Attributes:
        state: name -> state of a parameter, as `packed` stores it.
        shared: key -> entry of `state` that belongs to all parameters together, as before the first step.
        groups: for each group, the numbers that the class changes there, as before the first step; None for those
            that the first step creates.
        objects: name -> key -> function that makes an object kept for a parameter again.
        flags: attributes of the optimizer that record that it has started.
    """

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)


@contextmanager
def streams_at(seed: int, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Seed the random streams of these tensors' devices inside the block and restore them afterwards."""
    generators = _generators(*(tensor.device for tensor in tensors))
    with draws.turn, restored(*generators):
        for generator in generators:
            generator.manual_seed(seed)
        yield


def rehearse(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> Rehearsed:
    """Run one step of the class on copies, and raise if it keeps state out of reach of a pure update."""
    copies = leaf_copies(params)
    names = {id(tensor): name for name, tensor in copies.items()}
    made = recipe.build(copies, members)
    before = _pictures(made, names)
    groups = [*map(dict, made.param_groups)]
    shared = copied(_for_all(made.state))
    _step(recipe, made, copies)
    flags = _flags(recipe, before, _pictures(made, names))
    kept = Rehearsed(groups=_numbers_of_groups(recipe, groups, made.param_groups), flags=flags)
    for key, value in _for_all(made.state).items():
        _check_plain(recipe, f"for all parameters, under {key!r},", value if isinstance(key, str) else key)
        kept.shared[key] = shared.get(key)
    for name, tensor in copies.items():
        kept.state[name], kinds = packed(recipe, name, made.state.get(tensor, {}))
        kept.objects |= {name: kinds} if kinds else {}
    return kept


def _step(recipe: Recipe, made: Any, params: Params) -> None:
    """Step on sample gradients, and raise if the class draws random numbers that no seed of a state reaches."""
    for name, tensor in params.items():
        tensor.grad = sample_gradient(tensor, len(name))
    with streams_at(0, params.values()):
        drawn = _other_streams()
        recipe.cls.step(made, *([_closure_of(params)] if recipe.needs_closure else []))
    check(
        drawn == _other_streams(),
        f"{recipe.cls.__name__} draws from the random streams of Python or NumPy in its step, which no seed of a "
        "state reaches; looplib takes optimizers that draw from torch's",
        TypeError,
    )


def leaf_copies(params: Params) -> Params:
    """Copies of parameters that a class can step on."""
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in params.items()}


def _for_all(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Entries of a class's `state` that belong to all parameters together."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _pictures(made: Any, names: Mapping[int, str]) -> dict[str, Any]:
    return {key: _picture(value, names) for key, value in own_attributes(made).items()}


def _closure_of(params: Params) -> Callable[[], Any]:
    """Closure for a rehearsal, whose loss is half the sum of squares."""

    def closure() -> Any:
        for tensor in params.values():
            tensor.grad = tensor.detach().clone()
        return sum(tensor.detach().abs().square().sum() for tensor in params.values()) / 2

    return closure


def sample_gradient(tensor: Tensor, phase: int) -> Tensor:
    """Gradient for a rehearsal: noise-like numbers, none of them 0, the same at each call."""
    if is_sharded(tensor):
        return torch.full_like(tensor, 0.1)
    count = torch.arange(1, tensor.numel() + 1, device=tensor.device, dtype=torch.float32)
    values = 0.1 * torch.sin(count * 1.7 + phase).reshape(tensor.shape)
    return torch.empty_like(tensor).copy_(values)


def _other_streams() -> list[Any]:
    numpy = sys.modules.get("numpy")
    return [random.getstate(), *([str(numpy.random.get_state())] if numpy is not None else [])]


def _numbers_of_groups(
    recipe: Recipe, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For each group, the class's own numbers in it, and those that its step has changed."""
    known = {*inspect.signature(recipe.cls).parameters, *chain.from_iterable(recipe.overrides)}
    numbers = []
    for old, group, moving in zip(before, after, recipe.moving, strict=True):
        settings = {key for key in known if old.get(key) == group.get(key)}
        own = {key: value for key, value in group.items() if isinstance(value, (int, float, Tensor))}
        changing = own.keys() - settings - moving.keys()
        numbers.append({key: copied(old.get(key)) for key in own if key in changing})
    return numbers


def packed(recipe: Recipe, name: str, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State of a parameter as a pytree of plain tensors and numbers, and functions that make its objects again.

    The attributes of an object, and the tensors within a tensor subclass such as torchao's, are stored as dicts.
    """
    plain, makers = {}, {}
    for key, value in state.items():
        kind: Any = type(value)
        if torch_private.wraps_tensors(value) and not is_sharded(value):
            inner, context = value.__tensor_flatten__()
            plain[key] = {part: getattr(value, part) for part in inner}
            makers[key] = functools.partial(_subclass, kind, context, value.size(), value.stride())
        elif kind.__new__ is not object.__new__ or not hasattr(value, "__dict__"):
            _check_plain(recipe, f"for {name}, under {key!r},", value)
            plain[key] = value
        else:
            plain[key], makers[key] = dict(vars(value)), functools.partial(_object, kind)
            _check_object(f"{recipe.cls.__name__} keeps a {kind.__name__} for {name}", value)
    return plain, makers


def _subclass(kind: Any, context: Any, size: Any, stride: Any, parts: dict[str, Tensor]) -> Any:
    return kind.__tensor_unflatten__(parts, context, size, stride)


def _object(kind: Any, attributes: dict[str, Any]) -> Any:
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


def unpacked(state: Mapping[str, Any], makers: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `packed`, on copies, since it is not known which tensors an object writes to."""
    return {key: makers[key](copied(value)) if key in makers else value for key, value in state.items()}


def _check_plain(recipe: Recipe, where: str, value: Any) -> None:
    """Raise for state that a pure update cannot copy or a checkpoint cannot hold."""
    leaves = trees.leaves(value, lambda node: not isinstance(node, (dict, list, tuple)))
    for _, leaf in leaves:
        check(
            isinstance(leaf, _PLAIN),
            f"{recipe.cls.__name__} keeps {where} a {type(leaf).__name__}, which a pure update cannot copy; looplib "
            "takes optimizers that keep tensors and numbers, in dicts and lists of a fixed length",
            TypeError,
        )


def _check_object(found: str, value: Any) -> None:
    """Raise for an object with tensors in another object, which would not be stored with its attributes."""
    inner = chain.from_iterable(getattr(each, "__dict__", {}).values() for each in vars(value).values())
    check(
        not any(isinstance(part, Tensor) for part in inner),
        f"{found}, with an object in it that holds tensors: looplib takes objects whose own attributes are tensors "
        "and numbers",
        TypeError,
    )


def own_attributes(made: Any) -> dict[str, Any]:
    """Attributes that a class has given an optimizer in addition to those that all optimizers have."""
    return without(vars(made), _of_torch())


def _flags(recipe: Recipe, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Attributes that record that an optimizer has started. Any other attribute that its step changes is refused."""
    leaves = trees.paired(trees.leaves(before), trees.leaves(after))
    changed = {path[0]: after.get(path[0]) for path, one, other in leaves if not trees.same(one, other)}
    # A flag that is set after any update, such as bitsandbytes' `initialized`, is the one change allowed.
    if kept := [key for key, value in changed.items() if value is not True]:
        raise TypeError(
            f"{recipe.cls.__name__} keeps {kept[0]!r} on the optimizer itself, out of reach of a pure update; "
            "looplib takes optimizers that keep their state in `state` and `param_groups`"
        )
    return list(changed)


@functools.singledispatch
def _picture(value: Any, names: Mapping[int, str], depth: int = 4) -> Any:
    """Snapshot of a value, to compare with later: here, of an object of any other type than those below."""
    if not depth or callable(value):
        return id(value)
    return _picture(getattr(value, "__dict__", {}), names, depth - 1)


for _plain in (str, bytes, int, float, complex, type(None)):
    _picture.register(_plain, lambda value, *_: value)
_picture.register(torch.Generator, lambda value, *_: value.get_state())
_picture.register(random.Random, lambda value, *_: value.getstate())


@_picture.register
def _of_tensor(value: Tensor, names: Mapping[int, str], depth: int = 4) -> Any:
    return names.get(id(value)) or value.detach().clone()


@_picture.register(Mapping)
def _of_mapping(value: Any, names: Mapping[int, str], depth: int = 4) -> Any:
    return {str(key): _picture(member, names, depth - 1) for key, member in value.items()} if depth else id(value)


@_picture.register(Sequence)
@_picture.register(Set)
def _of_members(value: Any, names: Mapping[int, str], depth: int = 4) -> Any:
    return [_picture(member, names, depth - 1) for member in value] if depth else id(value)
