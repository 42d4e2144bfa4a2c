"""Silent data corruption: run a step twice and compare the bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core import interrupts as _interrupts
from looplib._core.checks import check, check_count, few
from looplib._core.checksums import checksum
from looplib._core.collective import together
from looplib._core.mappings import mapped
from looplib._core.ranks import any_sharded
from looplib._core.records import check_kind, with_repr
from looplib.debug._differences import LeafDifference, differences
from looplib.debug._fingerprint import same_bits
from looplib.optim import part
from looplib.state import copy_state
from looplib.types import Metric, Optimizer, TrainState, TrainStep, Transformed, check_state


class CorruptionError(RuntimeError):
    """Two runs of one step from one state and one batch differ.

    Attributes:
        step: `state.step` before the step.
        leaves: rank -> the leaves that differ there. Ranks on which nothing differs are left out.
    """

    def __init__(self, step: int, leaves: Mapping[int, list[LeafDifference]]) -> None:
        super().__init__(step, leaves)  # as pickle calls it
        self.step, self.leaves = step, leaves

    def __str__(self) -> str:
        separator = "\n  "
        ranks = "".join(f"\nrank {rank}:\n  {few(leaves, 6, separator)}" for rank, leaves in self.leaves.items())
        return (
            f"step {self.step} gave different bits in two runs from the same state and batch:{ranks}\nIf it happens again at "
            "this step, the step itself is not a function of its state and batch (ll.testing.assert_pure says why; on a GPU, "
            "torch.use_deterministic_algorithms(True)). If not, a device or its memory is faulty: nothing says which of the "
            "two runs was right, so exclude that device and continue from a checkpoint."
        )


def run_twice(train_step: TrainStep, *, every: int = 100) -> TrainStep:
    """Detect silent data corruption: run every n-th train step twice, and compare the results bit by bit.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.chain(ll.debug.checksums(), ll.optimizer(torch.optim.AdamW, lr=1e-3))
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.debug.run_twice(ll.make_train_step(grad_fn, optimizer, donate=True), every=10)
    >>> state = ll.init_state(model, optimizer)
    >>> for _ in range(20):  # of which those at steps 0 and 10 run twice
    ...     state, metrics = train_step(state, torch.ones(4, 2))
    >>> state.step
    20

    A faulty core, accelerator or memory cell changes a number without an error, and the run continues from it. A step is a
    function of its state and its batch, so two runs of it have the same bits, dropout included. This compares all of their
    results: parameters, buffers, optimizer state, counts, `extra` and metrics.

    **What is found.** Every difference between the two runs: bits that flip while a step computes, or in its memory (weights,
    moments, buffers, activations, gradients) while one of the runs uses it. A flipped bit of a gradient may be rounded
    away in the update; with `ll.debug.checksums()` in the chain it is found too, and the leaf where it began comes first.
    A low bit of a moment or a buffer may be rounded away when the new average is computed. The results then have the bits
    of a clean run, so nothing is corrupt, and nothing is found: of 2,000 flips at random in a small network, all 800 in
    weights and gradients were found, 790 of 800 in AdamW's moments, and 393 of 400 in BatchNorm's statistics.

    **What is not found.** A flip in the state between two steps is in the input of both runs, which then agree; so is one
    in a step that is not checked. Compare ranks for that (`ll.distributed.check_replicas`), or, on one process, fingerprints
    of the state before and after a pause (`ll.debug.fingerprint`). A device that makes the same mistake twice agrees
    with itself.

    **Several ranks.** All ranks check the same steps and raise together; the error has the leaves of each rank. A flip on
    one rank before the gradients are averaged reaches the weights of all: the rank where it began is the one with another
    loss, or another checksum of a parameter. Where neither differs, all ranks are named.

    A checked step takes the time of two, and the memory of two more states. Others cost nothing. Donated steps run
    both times on the tensors of the state, so modules in DDP and FSDP2 work too.

    **Interrupts.** Ctrl-C waits for the end of a checked step, and a second one does not. If the second of two donated runs
    fails, the state is spent.

    Args:
        train_step: from `make_train_step`, donated or not, or a function of your own around one.
        every: check the steps at which `state.step` is a multiple of this.

    Raises:
        CorruptionError: from a checked step, if the two runs differ. A donated state is spent then; a pure one is valid.

    Source: redundant execution, as in "Cores that don't count" (Hochschild et al., 2021).
    """
    train_step = check_kind(train_step, "run_twice", "train_step")
    check_count("every", every)

    def checked_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]:
        check_state(state, "train_step(state, batch)")
        if state.step % every:
            return train_step(state, batch)
        _interrupts.install()
        _interrupts.waits.depth += 1  # the first of two donated runs spends the state, and its result is not returned
        try:
            start = copy_state(state)
            after, metrics = train_step(state, batch)
            first = copy_state(after)
            # The tensors of a donated state are the module's own.
            _put_back({**after.params, **after.buffers}, {**start.params, **start.buffers})
            again, again_metrics = train_step(start.replace(params=after.params, buffers=after.buffers), batch)
            differing = differences({"metrics": metrics}, {"metrics": again_metrics}) + differences(first, again)
            differing.sort(
                key=lambda leaf: not leaf.path.startswith(f"/opt_state/{_NAME}/")
            )  # where it began comes first
            leaves = {rank: leaves for rank, leaves in enumerate(together().gather(differing)) if leaves}
            del start, after, first  # freed while signals wait
            _interrupts.look()
        finally:
            _interrupts.waits.depth -= 1
        if leaves:
            raise CorruptionError(state.step, leaves)
        return again, again_metrics

    return with_repr(checked_step, run_twice, train_step, every=every)


def _put_back(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write the values into the tensors that differ from them."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not same_bits(tensor, values[name]):
                if tensor.layout is torch.strided and 0 in tensor.stride():
                    # What the members of a stack share is expanded, and torch writes to no such tensor.
                    once = tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())
                    tensor[once].copy_(values[name][once])
                else:
                    tensor.copy_(values[name])


_NAME = "checksums"


def checksums() -> Optimizer:
    """Keep checksums of the gradients and the parameters that enter each update, by name, in the optimizer's state.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.chain(ll.debug.checksums(), ll.optimizer(torch.optim.SGD, lr=0.1))
    >>> state = ll.init_state(model, optimizer)
    >>> sorted(state.opt_state["checksums"]["grads"])
    ['bias', 'weight']

    They change with any single bit, also with one that the update rounds away. So `ll.debug.run_twice` finds it and says
    in which gradient or parameter it was. Two runs that differ are compared in the same way (`ll.debug.first_difference`).
    Each step reads its gradients and their parameters once more for it.

    Gradients are those that enter the chain, averaged over ranks and before clipping. The values are int64 scalars.

    Raises:
        ValueError: from `init`, for sharded parameters (FSDP2), whose checksums would differ from rank to rank.
    """

    def init(params: Mapping[str, Tensor], **_: Any) -> dict[str, dict[str, Tensor]]:
        check(
            not any_sharded(params.values()),
            "checksums() of sharded parameters would differ from rank to rank: leave it out of the chain. "
            "ll.debug.run_twice works without it",
        )

        def zero(tensor: Tensor) -> Tensor:
            return torch.zeros((), dtype=torch.int64, device=tensor.device)

        return {kind: mapped(zero, params) for kind in ("params", "grads")}

    def transform(grads: Any, state: Any, params: Any, step: int, **_: Any) -> Transformed:
        # A parameter without a gradient keeps its last sums.
        now = {"params": {name: checksum(params[name]) for name in grads}, "grads": mapped(checksum, grads)}
        return Transformed(grads, {kind: {**state[kind], **sums} for kind, sums in now.items()})

    return part(_NAME, init=init, transform=transform, role="judge")
