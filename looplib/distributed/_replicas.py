"""Silent corruption: compare the tensors that all ranks should hold alike."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from looplib._core import trees
from looplib._core.checks import few
from looplib._core.checksums import checksums
from looplib._core.collective import together
from looplib._core.lease import trees_of
from looplib._core.mappings import fields_of
from looplib._core.ranks import is_sharded, shards
from looplib.types import COUNTS, TrainState, check_state


def check_replicas(state: TrainState) -> None:
    """Compare the parameters and the optimizer state of all ranks, and raise if they are not the same bits.

    >>> import looplib as ll, torch
    >>> state = ll.init_state(torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3))
    >>> ll.distributed.check_replicas(state)  # one process has nothing to compare

    Ranks that train with DDP hold the same weights, and the hosts of a hybrid mesh the same shards. A faulty device, or
    code that changes them on one rank alone, makes them drift apart without an error. Call it now and then:

        if ll.every_n_steps(1000)(state):
            ll.distributed.check_replicas(state)

    Each rank reads all of its tensors once and sends 32 bytes. Names and checksums are sent only if something differs.
    All ranks must call it. A shard is compared with the shards of the same index on the other ranks. Buffers are not
    compared, since each rank keeps running statistics of its own between two forward passes, nor is `extra`.

    Args:
        state: the state to check. In a loop of your own, `ll.init_state(model)` has the parameters, and nothing of torch's
            optimizer.

    Raises:
        ValueError: a tensor or a count differs. The message names it and the ranks that differ from most others.
        DonatedStateError: the state was donated to a step.
    """
    check_state(state, "ll.distributed.check_replicas(state)")
    trees_of(state)  # raises if it was donated
    ranks = together()
    ranks.barrier()
    if not ranks.is_distributed:
        return
    everywhere, in_shards = _facts(state)
    digests = ranks.gather((_digest(everywhere), _digest(list(in_shards)), _digest(in_shards)))
    shards_of = {shards: values for _, shards, values in digests}
    if all(one[0] == digests[0][0] and shards_of[one[1]] == one[2] for one in digests):
        return
    differences = _differences(ranks.gather({**everywhere, **in_shards}))
    raise ValueError(f"the ranks hold different values:\n  {few(differences, 10, _NEXT)}")


_NEXT = "\n  "


def _facts(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Counts and checksums by name: those that all ranks share, and those of shards."""
    everywhere, in_shards = fields_of(state, COUNTS), dict[str, Any]()
    trees_held = {"params": state.params, "opt_state": state.opt_state}
    held = {path: leaf for path, leaf in trees.leaves(trees_held) if isinstance(leaf, Tensor)}
    for path, leaf, checksum in zip(held, held.values(), checksums(shards(held.values())), strict=True):
        index = _shard(leaf)
        (in_shards if index else everywhere)[trees.pointer(path)[1:] + index] = f"{checksum % 2**64:016x}"
    return everywhere, in_shards


def _shard(leaf: Tensor) -> str:
    """Index of a shard within its tensor, the same on all ranks that hold a copy of it; "" for a whole tensor."""
    if not is_sharded(leaf):
        return ""
    coordinate = leaf.device_mesh.get_coordinate() or ()
    index = [here for here, placement in zip(coordinate, leaf.placements, strict=False) if placement.is_shard()]
    return f" (shard {', '.join(map(str, index))})" if index else ""


def _digest(facts: Any) -> int:
    return zlib.crc32(repr(facts).encode())


def _differences(everyone: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each value that differs, with the ranks that hold each version, the most common one first."""
    ranks_of: dict[str, dict[Any, list[int]]] = {}
    for rank, facts in enumerate(everyone):
        for name, value in facts.items():
            ranks_of.setdefault(name, {}).setdefault(value, []).append(rank)
    return [
        f"{name} is " + ", and ".join(f"{value} on {_ranks(ranks)}" for value, ranks in _by_number(versions))
        for name, versions in ranks_of.items()
        if len(versions) > 1
    ]


def _by_number(versions: dict[Any, list[int]]) -> list[tuple[Any, list[int]]]:
    return sorted(versions.items(), key=lambda version: -len(version[1]))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {few(list(map(str, ranks)), 10)}"
