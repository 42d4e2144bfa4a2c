"""Secrets are left out of what is stored and logged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

_LEFT_OUT = "***"

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
    return _LEFT_OUT if secret else _KNOWN.sub(_LEFT_OUT, settings)  # type: ignore[return-value]
