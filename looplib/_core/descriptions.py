"""Descriptions of settings as plain values, stored with a run and compared with those of a later one.

Secrets (tokens, keys and passwords) are left out of settings that are stored.
"""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from looplib._core.records import ADDRESS
from looplib._core.trees import MISSING, paired

T = TypeVar("T")

_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST"}  # names of instructions in several Python versions

MANY = 100  # a longer list is described by a checksum


def described(value: Any) -> Any:
    """Describe a setting as a JSON value that is the same in each process that creates it in the same way.

    >>> described({"lr": 0.1, "betas": (0.9, 0.99), "dtype": torch.float32})
    {'lr': 0.1, 'betas': [0.9, 0.99], 'dtype': 'torch.float32'}
    >>> described(lambda step: 0.1 * step)
    'lambda step (0.1)'

    If an object has a `description`, that is used. A function is described by its name, its constants and the plain
    values it closes over; other objects by their repr, or only their type if the repr contains an address.
    """
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return {str(key): described(member) for key, member in value.items()}
    if isinstance(value, (set, frozenset)):
        return described(sorted(value, key=repr))  # the order of text in a set differs between processes
    if isinstance(value, (list, tuple)):
        return _unless_many(value, len(value), [described(member) for member in value])
    if hasattr(value, "tolist") and hasattr(value, "shape"):  # a tensor, or an array or number of NumPy's
        return _unless_many(value, math.prod(value.shape), described(value.tolist()))
    if (settings := settings_of(value)) is not None:
        return described(settings)
    return _function(value) if callable(value) else _plain(value)


def _unless_many(value: Any, count: int, members: Any) -> Any:
    if count <= MANY:
        return members
    return f"{type(value).__qualname__} of {count}, checksum {zlib.crc32(repr(members).encode()):08x}"


def settings_of(value: Any) -> Mapping[str, Any] | None:
    """Named settings that an object holds, if it is a record of settings."""
    if isinstance(getattr(value, "description", None), Mapping):
        return value.description  # type: ignore[no-any-return]
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    if dataclasses.is_dataclass(value):
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
    if isinstance(value, (str, int, float, complex, Path, torch.dtype, torch.device)):
        return str(value)
    text = repr(value)
    return type(value).__qualname__ if re.search(ADDRESS, text) else text


def _function(function: Any) -> str:
    if isinstance(function, functools.partial):  # as what looplib makes is, without arguments
        arguments = described_arguments(function.args, function.keywords)
        return f"{_function(function.func)} with {arguments}" if arguments else _function(function.func)
    if not isinstance(function, types.FunctionType):
        return getattr(function, "__qualname__", None) or str(_plain(function))
    name = function.__qualname__.rpartition(".")[2]
    if name == "<lambda>":
        name = f"lambda {', '.join(inspect.signature(function).parameters)}"
    loaded = [each.argval for each in dis.get_instructions(function) if each.opname in _CONSTANTS]
    constants = [str(constant) for constant in loaded if isinstance(constant, (int, float))]
    constants += [f"{name}={setting}" for name, setting in closure_settings(function).items()]
    return f"{name} ({', '.join(constants)})" if constants else name


def described_arguments(args: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """Arguments of a call, as in its code."""
    named = [f"{name}={described(value)}" for name, value in settings.items()]
    return ", ".join([*map(str, map(described, args)), *named])


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
    if isinstance(value, (bool, int, float, str, tuple, types.FunctionType, functools.partial)):
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
            was, has = ("not given" if value is MISSING else value for value in (before, now))
            changes.append(f"{prefix}{key} was {was}, is {has}")
    return changes


LEFT_OUT = "***"

_ALWAYS = ("password", "passwd", "passphrase", "secret", "credential")  # beginnings of words
_SPECIAL = {"bos", "cls", "eos", "mask", "pad", "sep", "unk"}  # tokens of a tokenizer
_SHORT_NUMBER = r"[\d.]{1,6}"  # as in --heads-per-key 4

# What tokens of well-known services begin with, the password of a URL, and what follows Bearer.
_TOKEN = re.compile(
    r"\b(?:hf_|sk-|gsk_|r8_|gh[opsur]_|github_pat_|glpat-|xox[a-z]-|pypi-|nvapi-|AKIA|AIza|eyJ)[\w.-]{16,}"
    r"|(?<=://)[^/\s@]+:[^/\s@]+(?=@)"
    r"|(?<=Bearer )\S+"
)

# Letters and digits without a pause, as in the keys of W&B and Comet (and in checksums).
_KEY = re.compile(r"(?<![A-Za-z0-9])(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{32,}")


def command_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command, with *** in place of what looks like a token, key or password.

    >>> command_without_secrets(["--lr", "0.1", "--hf-token", "abc", "wandb.api_key=abc", "--pad-token", "<pad>"])
    ['--lr', '0.1', '--hf-token', '***', 'wandb.api_key=***', '--pad-token', '<pad>']
    """
    shown, name = [], ""
    for argument in arguments:
        before, equals, value = argument.partition("=")
        if name and not argument.startswith("--"):
            shown.append(_shown(name, argument))
        else:
            shown.append(f"{before}={_shown(before, value)}" if equals else argument)
        name = argument if argument.startswith("-") and not equals else ""
    return [_KEY.sub(LEFT_OUT, _TOKEN.sub(LEFT_OUT, argument)) for argument in shown]


def without_secrets(settings: T, name: str = "") -> T:
    """Described settings, with *** in place of what looks like a token, key or password.

    >>> without_secrets({"lr": 0.1, "hub": {"api_key": "abc", "repo": "me/tiny"}})
    {'lr': 0.1, 'hub': {'api_key': '***', 'repo': 'me/tiny'}}
    """
    if isinstance(settings, Mapping):
        return {key: without_secrets(value, key) for key, value in settings.items()}  # type: ignore[return-value]
    if isinstance(settings, list):
        return [without_secrets(value, name) for value in settings]  # type: ignore[return-value]
    if isinstance(settings, str):
        return _TOKEN.sub(LEFT_OUT, _shown(name, settings))  # type: ignore[return-value]
    return settings


def _shown(name: str, value: str) -> str:
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    if any(word.startswith(_ALWAYS) for word in words):
        return LEFT_OUT
    named = words[-1].endswith(("key", "token", "auth")) and _SPECIAL.isdisjoint(words)
    return LEFT_OUT if named and not re.fullmatch(_SHORT_NUMBER, value) else value
