"""Orders of very large datasets: each sample's index is computed from its position, so that no list of them is held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from looplib._core.random import finish_each

_ROUNDS = 8


@dataclass(frozen=True, eq=False)
class Computed:
    """The keys of an epoch as a function of their positions. A slice is a tensor.

    Attributes:
        count: number of keys.
        at: function from positions (n,) to the keys there, both int64.
    """

    count: int
    at: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> Tensor:
        return self.at(torch.arange(*part.indices(self.count)))


def permutation(count: int, generator: torch.Generator) -> Computed:
    """A random permutation of `range(count)` in constant memory, each part of which is computed when it is read.

    >>> shuffled = permutation(1_000_000_000, torch.Generator().manual_seed(0))
    >>> shuffled[900_000_000:900_000_003]
    tensor([...])
    >>> sorted(permutation(10, torch.Generator().manual_seed(0))[:].tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    It is a Feistel network on pairs of digits in base ceil(sqrt(count)), as for ciphers over arbitrary finite domains
    (Black and Rogaway, 2002), with the finalizer of splitmix64 as its round function. A result beyond `count` is
    permuted again until it is inside. It draws one of at most 2**512 permutations, which look random but are few
    among all. Do not use it for secrets.
    """
    side = isqrt(count - 1) + 1
    keys = torch.randint(-(2**63), 2**63 - 1, (_ROUNDS,), generator=generator).tolist()

    def permuted(positions: Tensor) -> Tensor:
        left, right = positions // side, positions % side
        for key in keys:
            left, right = right, (left + finish_each(right + key)) % side
        return left * side + right

    def at(positions: Tensor) -> Tensor:
        found = permuted(positions)
        while (beyond := found >= count).any():
            found[beyond] = permuted(found[beyond])
        return found

    return Computed(count, at)
