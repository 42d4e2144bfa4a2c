"""Rehearsal: a step on copies that shows what an optimizer class keeps, for classes that do not declare it."""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from looplib._core.modules import _generators
from looplib._core.random import restored
from looplib._core.ranks import is_sharded
from looplib._core.torch_private import pytree
from looplib.optim._recipe import Recipe, copied
from looplib.types import Params


@functools.cache
def _of_torch() -> frozenset[str]:
    """Attributes of torch.optim.Optimizer itself. Computed late, since creating the first one imports much of torch."""
    return frozenset(("state", "param_groups", "defaults", *vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))))


@dataclass
class Kept:
    """State that a class keeps after a step.

    Attributes:
        state: name -> state of a parameter. Attributes of an object are stored as a dict.
        shared: key -> entry of `state` that belongs to all parameters together, as before the first step.
        groups: for each group, the numbers that the class changes there, as before the first step; None for those
            that the first step creates.
        objects: name -> key -> class of an object kept for a parameter.
        flags: attributes of the optimizer that record that it has started.
    """

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)


@contextmanager
def streams_at(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random streams inside the block and restore them afterwards."""
    generators = _generators(device)
    with restored(*generators):
        for generator in generators:
            generator.manual_seed(seed)
        yield


def rehearse(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> Kept:
    """Run one step of the class on copies, and raise if it keeps state out of reach of a pure update."""
    copies = {name: tensor.detach().clone().requires_grad_() for name, tensor in params.items()}
    names = {id(tensor): name for name, tensor in copies.items()}
    made = recipe.build(copies, members)
    before = _pictures(made, names)
    groups = [dict(group) for group in made.param_groups]
    shared = {key: copied(value) for key, value in made.state.items() if not isinstance(key, Tensor)}
    for name, tensor in copies.items():
        tensor.grad = sample_gradient(tensor, len(name))
    with streams_at(0, next(iter(copies.values())).device):
        drawn = _other_streams()
        recipe.cls.step(made, *([_closure_of(copies)] if recipe.needs_closure else []))
    if drawn != _other_streams():
        raise TypeError(
            f"{recipe.cls.__name__} draws from the random streams of Python or NumPy in its step, which no seed of a "
            "state reaches; looplib takes optimizers that draw from torch's"
        )
    after = _pictures(made, names)
    kept = Kept(groups=_numbers_of_groups(recipe, groups, made.param_groups))
    kept.flags = _flags(recipe, before, after)
    for key, value in made.state.items():
        if not isinstance(key, Tensor):
            _check_plain(recipe, f"for all parameters, under {key!r},", value if isinstance(key, str) else key)
            kept.shared[key] = shared.get(key)
    for name, tensor in copies.items():
        kept.state[name], kinds = packed(recipe, name, made.state.get(tensor, {}))
        kept.objects |= {name: kinds} if kinds else {}
    return kept


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
    known = inspect.signature(recipe.cls).parameters.keys()

    def own(key: str, value: Any, old: Mapping[str, Any], number: int) -> bool:
        if key == "params" or key in recipe.moving[number] or not isinstance(value, (int, float, Tensor)):
            return False
        return key not in known | recipe.overrides[number].keys() or bool(old[key] != value)

    return [
        {key: copied(old.get(key)) for key, value in group.items() if own(key, value, old, number)}
        for number, (old, group) in enumerate(zip(before, after, strict=True))
    ]


def packed(recipe: Recipe, name: str, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State of a parameter as a pytree, and the classes of the objects in it, whose attributes are stored as dicts."""
    plain, kinds = {}, {}
    for key, value in state.items():
        kind: Any = type(value)
        if kind.__new__ is object.__new__ and hasattr(value, "__dict__"):
            kinds[key] = kind
            value = dict(vars(value))
            inner = [getattr(each, "__dict__", {}) for each in value.values()]
            if any(isinstance(part, Tensor) for attributes in inner for part in attributes.values()):
                raise TypeError(
                    f"{recipe.cls.__name__} keeps a {kind.__name__} for {name}, with an object in it that holds "
                    "tensors: looplib takes objects whose own attributes are tensors and numbers"
                )
        else:
            _check_plain(recipe, f"for {name}, under {key!r},", value)
        plain[key] = value
    return plain, kinds


def unpacked(state: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `packed`, on copies, since it is not known which tensors an object writes to."""
    entries = dict(state)
    for key, kind in kinds.items():
        if key in state:
            entries[key] = object.__new__(kind)
            vars(entries[key]).update(pytree.tree_map(copied, state[key]))
    return entries


def _check_plain(recipe: Recipe, where: str, value: Any) -> None:
    """Raise for state that a pure update cannot copy or a checkpoint cannot hold."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for member in value:
            _check_plain(recipe, where, member)
    elif not isinstance(value, (Tensor, int, float, complex, str, torch.dtype, type(None))):
        raise TypeError(
            f"{recipe.cls.__name__} keeps {where} a {type(value).__name__}, which a pure update cannot copy; looplib "
            "takes optimizers that keep tensors and numbers, in dicts and lists of a fixed length"
        )


def own_attributes(made: Any) -> dict[str, Any]:
    """Attributes that a class has given an optimizer in addition to those that all optimizers have."""
    return {key: value for key, value in vars(made).items() if key not in _of_torch()}


def _flags(recipe: Recipe, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Attributes that record that an optimizer has started. Any other attribute that its step changes is refused."""
    changed = [key for key in after if key not in before or not _same(before[key], after[key])]
    for key in changed:
        if after[key] is not True:  # such as bitsandbytes' `initialized`, which is set after any update
            raise TypeError(
                f"{recipe.cls.__name__} keeps {key!r} on the optimizer itself, out of reach of a pure update; "
                "looplib takes optimizers that keep their state in `state` and `param_groups`"
            )
    return changed


def _picture(value: Any, names: Mapping[int, str], depth: int = 4) -> Any:
    """Snapshot of a value, to compare with later."""
    if isinstance(value, Tensor):
        return names.get(id(value)) or value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        return value
    if not depth or callable(value):
        return id(value)
    if isinstance(value, Mapping):
        return {str(key): _picture(member, names, depth - 1) for key, member in value.items()}
    if isinstance(value, (Sequence, Set)):
        return [_picture(member, names, depth - 1) for member in value]
    return _picture(getattr(value, "__dict__", {}), names, depth - 1)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
