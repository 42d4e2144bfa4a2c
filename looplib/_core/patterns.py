"""Names and patterns of leaves that a user lists."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from looplib._core import trees


class Patterns:
    """Names or patterns of leaves, with `*` as in file names, and those that have matched.

    >>> patterns = Patterns(["params.head.*", "extra"])
    >>> patterns.match(("params", "head.weight")), patterns.match(("params", "body.weight"))
    (True, False)
    >>> patterns.used
    {'params.head.*'}
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = [*dict.fromkeys(patterns)]
        self.used: set[str] = set()

    def match(self, path: trees.Path, *names: str) -> bool:
        """True if a leaf, a container that it is in, or one of its further names is among them."""
        if not self.patterns:
            return False
        titles = {*names, *(trees.dotted(path[:end]) for end in range(1, len(path) + 1))}
        matching = [
            pattern
            for pattern in self.patterns
            if any(title == pattern or fnmatchcase(title, pattern) for title in titles)
        ]
        self.used.update(matching)
        return bool(matching)
