"""Probe of an optimizer class: a step on copies shows what a third party's class keeps, and where.

A pure update can pass in and take out what a class keeps in `state` and `param_groups`. Anything else is refused.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from looplib._core import random as draws
from looplib._core import torch_private, trees
from looplib._core.checks import check
from looplib._core.mappings import without
from looplib._core.modules import _generators
from looplib._core.random import restored
from looplib._core.ranks import is_sharded, shards
from looplib._core.updates import copied
from looplib.optim._recipe import Recipe
from looplib.types import Params

_PLAIN = (Tensor, int, float, complex, str, torch.dtype, type(None))


@dataclass
class Probe:
    """State that a class keeps after a step.

    Attributes:
        state: name -> state of a parameter, as `packed` stores it.
        makers: name -> key -> function that makes an object kept for a parameter again.
        shared: key -> entry of `state` that belongs to all parameters together, as before the first step.
        groups: for each group, the numbers that the class changes there, as before the first step; None for those
            that the first step creates.
        flags: attributes of the optimizer that record that it has started.
        writes_grads: True if the class writes into the gradients, as schedule-free optimizers do.
    """

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    makers: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    writes_grads: bool = False


def probe(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> Probe:
    """Step once on copies, and raise if the class keeps state, or draws, out of reach of a pure update."""
    copies = leaf_copies(params)
    made = recipe.build(copies, members)
    before = _snapshot(made, copies)
    groups, shared = [*map(dict, made.param_groups)], copied(_for_all(made.state))
    for name, tensor in copies.items():
        tensor.grad = sample_gradient(tensor, len(name))
    with streams_at(0, copies.values()):
        drawn = _other_streams()
        recipe.cls.step(made, *([_closure_of(copies)] if recipe.needs_closure else []))
    check(
        drawn == _other_streams(),
        f"{recipe.cls.__name__} draws from the random streams of Python or NumPy in its step, which no seed of a "
        "state reaches; looplib takes optimizers that draw from torch's",
        TypeError,
    )
    changed = [key for key, value in _snapshot(made, copies).items() if before.get(key) != value]
    for key in changed:  # a flag that is set after any update, such as bitsandbytes' `initialized`, is allowed
        check(
            getattr(made, key) is True,
            f"{recipe.cls.__name__} keeps {key!r} on the optimizer itself, out of reach of a pure update; looplib takes "
            "optimizers that keep their state in `state` and `param_groups`",
            TypeError,
        )
    found = Probe(groups=_numbers_of_groups(recipe, groups, made.param_groups), flags=changed)
    given = [(copy.grad, sample_gradient(copy, len(name))) for name, copy in copies.items() if copy.grad is not None]
    found.writes_grads = any(not trees.same(*shards(pair)) for pair in given)
    for key, value in _for_all(made.state).items():
        _check_plain(recipe, f"for all parameters, under {key!r},", value if isinstance(key, str) else key)
        found.shared[key] = shared.get(key)
    for name, tensor in copies.items():
        found.state[name], found.makers[name] = packed(recipe, name, made.state.get(tensor, {}))
    return found


def leaf_copies(params: Params) -> Params:
    """Copies of parameters that a class can step on."""
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in params.items()}


def sample_gradient(tensor: Tensor, phase: int) -> Tensor:
    """Noise-like numbers, none of them 0, the same at each call."""
    if is_sharded(tensor):
        return torch.full_like(tensor, 0.1)
    count = torch.arange(1, tensor.numel() + 1, device=tensor.device, dtype=torch.float32)
    values = 0.1 * torch.sin(count * 1.7 + phase).reshape(tensor.shape)
    return torch.empty_like(tensor).copy_(values)


@contextmanager
def streams_at(seed: int, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Seed the random streams of these tensors' devices inside the block and restore them afterwards."""
    generators = _generators(*(tensor.device for tensor in tensors))
    with draws.turn, restored(*generators):
        for generator in generators:
            generator.manual_seed(seed)
        yield


def _other_streams() -> list[Any]:
    numpy = sys.modules.get("numpy")
    return [random.getstate(), *([str(numpy.random.get_state())] if numpy is not None else [])]


def _closure_of(params: Params) -> Callable[[], Any]:
    """Closure whose loss is half the sum of squares."""

    def closure() -> Any:
        for tensor in params.values():
            tensor.grad = tensor.detach().clone()
        return sum(tensor.detach().abs().square().sum() for tensor in params.values()) / 2

    return closure


def _for_all(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Entries of a class's `state` that belong to all parameters together."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _numbers_of_groups(
    recipe: Recipe, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For each group, the class's own numbers in it, and the settings that its step has changed."""
    known = {*inspect.signature(recipe.cls).parameters, *chain.from_iterable(recipe.overrides)}
    return [
        {
            key: copied(old.get(key))
            for key, value in group.items()
            if isinstance(value, (int, float, Tensor)) and key not in moving
            if key not in known or old.get(key) != value
        }
        for old, group, moving in zip(before, after, recipe.moving, strict=True)
    ]


# Attributes of the optimizer itself


@functools.cache
def _of_torch() -> frozenset[str]:
    """Attributes of torch.optim.Optimizer itself. Computed late, since creating the first one imports much of torch."""
    return frozenset(("state", "param_groups", "defaults", *vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))))


def own_attributes(made: Any) -> dict[str, Any]:
    """Attributes that a class has given an optimizer in addition to those that all optimizers have."""
    return without(vars(made), _of_torch())


class _Pickler(pickle.Pickler):
    """Pickles parameters by name, and functions, classes and modules by identity."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self.names = names

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.names.get(id(value))
        return id(value) if callable(value) else None


def _snapshot(made: Any, params: Params) -> dict[str, Any]:
    """The class's own attributes as bytes, to compare with later; by identity, if they cannot be pickled."""
    names = {id(tensor): name for name, tensor in params.items()}
    snapshot: dict[str, Any] = {}
    for key, value in own_attributes(made).items():
        file = io.BytesIO()
        try:
            _Pickler(file, names).dump(value)
            snapshot[key] = file.getvalue()
        except Exception:
            snapshot[key] = id(value)
    return snapshot


# Objects that a class keeps for a parameter


def packed(recipe: Recipe, name: str, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State of a parameter as a pytree of plain tensors and numbers, and functions that make its objects again.

    The attributes of an object, and the tensors within a tensor subclass such as torchao's, are stored as dicts.
    """
    plain, makers = {}, {}
    for key, value in state.items():
        kind: Any = type(value)
        plain[key] = value
        if torch_private.wraps_tensors(value) and not is_sharded(value):
            parts, context = value.__tensor_flatten__()
            plain[key] = {part: getattr(value, part) for part in parts}
            makers[key] = functools.partial(_subclass, kind, context, value.size(), value.stride())
        elif kind.__new__ is object.__new__ and hasattr(value, "__dict__"):
            plain[key], makers[key] = dict(vars(value)), functools.partial(_object, kind)
        _check_plain(recipe, f"for {name}, under {key!r},", plain[key])
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
    for _, leaf in trees.leaves(value, lambda node: not isinstance(node, (dict, list, tuple))):
        check(
            isinstance(leaf, _PLAIN),
            f"{recipe.cls.__name__} keeps {where} a {type(leaf).__name__}, which a pure update cannot copy; looplib "
            "takes optimizers that keep tensors and numbers, in dicts and lists of a fixed length, or in an object",
            TypeError,
        )
