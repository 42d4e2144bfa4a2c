"""Descriptions of settings as plain values, stored with a run and compared with those of a later one.

Secrets (tokens, keys and passwords) are left out of settings that are stored.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import re
import types
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from looplib._core.records import ADDRESS, made, shown
from looplib._core.trees import MISSING, paired

T = TypeVar("T")

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
    if isinstance(value, (set, frozenset)):
        return described(sorted(value, key=repr))  # the order of text in a set differs between processes
    if isinstance(value, (list, tuple)):
        members = [described(member) for member in value]
        if len(value) <= MANY:
            return members
        return f"{type(value).__qualname__} of {len(value)}, checksum {zlib.crc32(repr(members).encode()):08x}"
    if hasattr(value, "tolist") and hasattr(value, "shape"):  # a tensor, or an array or number of NumPy's
        return described(value.tolist())
    if (settings := settings_of(value)) is not None:
        return described(settings)
    if isinstance(value, types.FunctionType):
        return _function(value)
    if isinstance(value, partial) and made(value) is None:
        return f"{described(value.func)} with {described_arguments(value.args, value.keywords)}"
    return shown(value) if made(value) is not None or inspect.isroutine(value) else _plain(value)


def settings_of(value: Any) -> Mapping[str, Any] | None:
    """Named settings that an object holds, if it is a record of settings."""
    if isinstance(getattr(value, "description", None), Mapping):
        return value.description  # type: ignore[no-any-return]
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    if dataclasses.is_dataclass(value):
        if type(value).__module__.startswith("looplib.") and not value.__dataclass_params__.repr:  # type: ignore[union-attr]
            return None  # its repr is the code that makes it, as a predicate's
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


def described_arguments(args: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """Arguments of a call, as in its code."""
    named = [f"{name}={described(value)}" for name, value in settings.items()]
    return ", ".join([*map(str, map(described, args)), *named])


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

_SECRET = re.compile(r"pass(word|wd|phrase)|secret|credential|(key|token|auth)$")
_HARMLESS = re.compile(r"[\d.]{1,6}|<.*>|\[.*\]")  # a number, or a tokenizer's "<pad>" or "[CLS]"
# The password of a URL, and what tokens of well-known services begin with.
_KNOWN = re.compile(
    r"(?<=://)[^/\s@]+:[^/\s@]+(?=@)|\b(?:hf_|sk-|gh[opsur]_|github_pat_|glpat-|xox[a-z]-|pypi-|nvapi-|AKIA|AIza)[\w.-]{16,}"
)


def without_secrets(settings: T, name: str = "") -> T:
    """Described settings, with *** in place of values whose names say that they are secret, and of a URL's password.

    >>> without_secrets({"lr": 0.1, "hub": {"api_key": "abc", "repo": "me/tiny"}})
    {'lr': 0.1, 'hub': {'api_key': '***', 'repo': 'me/tiny'}}

    Such a name ends in key, token or auth, or contains password, secret or the like. A secret under another name stays,
    unless it begins as tokens of well-known services do, such as hf_ and sk-.
    """
    if isinstance(settings, Mapping):
        return {key: without_secrets(value, key) for key, value in settings.items()}  # type: ignore[return-value]
    if isinstance(settings, list):
        return [without_secrets(value, name) for value in settings]  # type: ignore[return-value]
    if not isinstance(settings, str):
        return settings
    secret = _SECRET.search(name.lower()) and not _HARMLESS.fullmatch(settings)
    return LEFT_OUT if secret else _KNOWN.sub(LEFT_OUT, settings)  # type: ignore[return-value]
