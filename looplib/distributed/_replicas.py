"""Silent corruption: compare the tensors that all ranks should hold alike."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from looplib._core import trees
from looplib._core.checks import few
from looplib._core.collective import together
from looplib._core.lease import trees_of
from looplib._core.mappings import fields_of
from looplib._core.replicas import checksums_by_name, different
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
    ranks.barrier("check_replicas")
    if not ranks.is_distributed:
        return
    trees_held = {"params": state.params, "opt_state": state.opt_state}
    held = {trees.pointer(path)[1:]: leaf for path, leaf in trees.leaves(trees_held) if isinstance(leaf, Tensor)}
    everywhere, in_shards = checksums_by_name(held)
    versions_by_name = different(ranks, {**fields_of(state, COUNTS), **everywhere}, in_shards)
    if versions_by_name:
        lines = [
            f"{name} is " + ", and ".join(f"{version.value} on {_ranks(version.ranks)}" for version in versions)
            for name, versions in versions_by_name.items()
        ]
        between = "\n  "
        raise ValueError(f"the ranks hold different values:\n  {few(lines, 10, between)}")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {few(list(map(str, ranks)), 10)}"
