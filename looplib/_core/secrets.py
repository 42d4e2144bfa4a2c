"""Secrets: tokens, keys and passwords, which are left out of settings that are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

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
