"""Descriptions of settings as plain values, stored with a run and compared with those of a later one."""

from __future__ import annotations

import argparse
import dataclasses
import dis
import functools
import inspect
import math
import re
import types
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core.calls import Function
from looplib._core.modules import named_modules
from looplib._core.trees import MISSING, paired

_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST"}  # names of instructions in several Python versions

_MANY = 100  # a longer list is described by a checksum

_ADDRESS = r" at 0x[0-9a-fA-F]+"


def described(value: Any) -> Any:
    """Describe a setting as a JSON value that is the same in each process that creates it in the same way.

    >>> described({"lr": 0.1, "betas": (0.9, 0.99), "dtype": torch.float32})
    {'lr': 0.1, 'betas': [0.9, 0.99], 'dtype': 'torch.float32'}
    >>> described(lambda step: 0.1 * step)
    'lambda step (0.1)'

    If an object has a `description`, that is used. A function is described by its name, its constants and the plain
    values it closes over; other objects by their repr, or only their type if the repr contains an address.
    """
    return _described(value)


def described_model(model: nn.Module) -> dict[str, Any]:
    """Describe a model by its class, its size, its `config`, and the configs of its adapters.

    >>> described_model(nn.Linear(2, 1))
    {'class': 'Linear', 'parameters': 3}
    """
    model = [module for name, module in named_modules(model) if not name][-1]  # within torch's wrappers
    adapters = getattr(model, "peft_config", None)
    try:
        config = _config_of(model)
    except Exception as error:  # the user's own, which may be anything, and no reason to end the run
        config = {"config": f"not described: {error!r}"}
    return {
        "class": type(model).__qualname__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **config,
        **({"adapters": described(adapters)} if isinstance(adapters, Mapping) else {}),
    }


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    elif isinstance(config, (argparse.Namespace, types.SimpleNamespace)):
        config = vars(config)
    elif dataclasses.is_dataclass(config):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if not isinstance(config, Mapping):
        return {}
    # A dict of many, such as the names of a thousand classes, is no setting that one reads.
    return {
        str(name): f"dict of {len(value)}" if isinstance(value, Mapping) and len(value) > _MANY else described(value)
        for name, value in config.items()
    }


@functools.singledispatch
def _described(value: Any) -> Any:
    """Description of an object of any other type than those below."""
    if isinstance(getattr(value, "description", None), Mapping):
        return described(value.description)
    if dataclasses.is_dataclass(value):
        fields = {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__qualname__, **fields}
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # a NumPy number
        return described(value.item())
    return _function(value) if callable(value) else _text(value)


# JSON values: 64-bit numbers and text, of Python's own types and not subclasses.
_described.register(type(None), lambda value: None)
_described.register(bool, bool)
_described.register(str, str)
_described.register(complex, str)
_described.register(int, lambda value: int(value) if -(2**63) <= value < 2**63 else str(value))
_described.register(float, lambda value: float(value) if math.isfinite(value) else str(value))
_described.register(argparse.Namespace, lambda value: described(vars(value)))


@_described.register
def _class(value: type) -> str:
    return f"{value.__module__}.{value.__qualname__}"


@_described.register
def _mapping(value: Mapping) -> dict[str, Any]:  # type: ignore[type-arg]
    return {str(key): described(member) for key, member in value.items()}


@_described.register(list)
@_described.register(tuple)
def _sequence(value: Any) -> Any:
    members = [described(member) for member in value]
    return members if len(value) <= _MANY else _of_many(value, len(value), members)


@_described.register(set)
@_described.register(frozenset)
def _set(value: Any) -> Any:
    return _sequence(sorted(value, key=repr))  # the order of text in a set differs between processes


@_described.register
def _tensor(value: Tensor) -> Any:
    return described(value.tolist()) if value.numel() <= 16 else _of_many(value, value.shape, value.tolist())


def _of_many(value: Any, size: Any, members: list[Any]) -> str:
    return f"{type(value).__qualname__} of {size}, checksum {zlib.crc32(repr(members).encode()):08x}"


def _text(value: Any) -> str:
    text = str(value) if isinstance(value, (Path, torch.dtype, torch.device)) else repr(value)
    return type(value).__qualname__ if re.search(_ADDRESS, text) else text


@functools.singledispatch
def _function(function: Any) -> str:
    """Description of a callable of any other type than those below."""
    return getattr(function, "__qualname__", None) or _text(function)


_function.register(Function, lambda function: _function(function.func))


@_function.register
def _partial(function: functools.partial) -> str:  # type: ignore[type-arg]
    arguments = [*map(described, function.args), *(f"{k}={described(v)}" for k, v in function.keywords.items())]
    return f"{_function(function.func)} with {', '.join(map(str, arguments))}"


@_function.register
def _of_python(function: types.FunctionType) -> str:
    name = function.__qualname__.rpartition(".")[2]
    if name == "<lambda>":
        name = f"lambda {', '.join(inspect.signature(function).parameters)}"
    loaded = [each.argval for each in dis.get_instructions(function) if each.opname in _CONSTANTS]
    numbers = [str(constant) for constant in loaded if isinstance(constant, (int, float))]
    settings = [f"{name}={setting}" for name, setting in closure_settings(function).items()]
    constants = ", ".join([*numbers, *settings])
    return f"{name} ({constants})" if constants else name


def closure_settings(function: Any) -> dict[str, Any]:
    """Settings that a closure holds, including those of the local functions it calls.

    >>> def scaled(factor):
    ...     return lambda step: factor * step
    >>> closure_settings(scaled(0.1))
    {'factor': 0.1}

    Settings are plain values, records, and functions from elsewhere.
    """
    settings: dict[str, Any] = {}
    prefix, functions = function.__qualname__.rpartition(".")[0] + ".", [function]
    for inner in functions:
        for name, value in inspect.getclosurevars(inner).nonlocals.items():
            if isinstance(value, types.FunctionType) and value.__qualname__.startswith(prefix):
                functions += [value] if value not in functions else []
            elif _is_setting(value):
                settings[name] = described(value)
    return dict(sorted(settings.items()))


def _is_setting(value: Any) -> bool:
    if isinstance(value, (bool, int, float, str, tuple, types.FunctionType, Function)):
        return True
    return dataclasses.is_dataclass(value) and not hasattr(value, "description")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ between two descriptions, in words.

    >>> differences({"optimizer": {"lr": 0.1}, "loader": {}}, {"optimizer": {"lr": 0.2, "momentum": 0.9}})
    ['optimizer lr was 0.1, is 0.2', 'optimizer momentum was not given, is 0.9']

    Settings that only one of them describes are not compared.
    """
    changes = []
    for key, before, now in paired(old.items(), new.items()):
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            changes += differences(before, now, f"{prefix}{key} ")
        elif before != now and (prefix or MISSING not in (before, now)):
            changes.append(f"{prefix}{key} was {_given(before)}, is {_given(now)}")
    return changes


def _given(value: Any) -> Any:
    return "not given" if value is MISSING else value
