"""State history in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check, check_optional_count
from looplib._core.lease import tensors_in
from looplib._core.mappings import pick
from looplib.checkpoint._format import local
from looplib.checkpoint._io import CheckpointIO
from looplib.debug._fingerprint import same_bits
from looplib.state import copy_state
from looplib.types import TrainState


def keep(kept: Mapping[int, TrainState], state: TrainState, *, at_most: int | None = None) -> dict[int, TrainState]:
    """Keep a history of states in memory: return the states kept so far and one more, sharing unchanged tensors.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(100, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> model.weight.requires_grad_(False).shape
    torch.Size([1, 100])
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer, donate=True)
    >>> state, kept = ll.init_state(model, optimizer), {}
    >>> for _ in range(10):
    ...     kept = keep(kept, state)
    ...     state, metrics = step(state, torch.ones(2, 100))
    >>> len(kept), nbytes(kept[0].params), nbytes([state.params for state in kept.values()])
    (10, 404, 440)

    A tensor with the same bits as in the last kept state is shared with it, such as a frozen parameter or an
    unchanged buffer, as long as both states have the same structure. All others are copied, so donated steps do not
    affect kept states. `nbytes(list(kept.values()))` is the memory of all of them.

    With `at_most`, the first and the last state are kept. Of the others, the one is dropped whose neighbors are
    closest together relative to its age. Older states are therefore further apart, and the time to replay a step is
    proportional to its age.

    Args:
        kept: states by step; start with `{}`. It is not changed.
        state: a state that is not older than those.
        at_most: largest number of states to keep, 2 or more; None keeps all.

    Raises:
        ValueError: the state is older than the last one kept, or `at_most` is below 2.
        DonatedStateError: the state was donated to a step.
    """
    check_optional_count("at_most", at_most, 2, "give 2 or more: the first state and the last are always kept")
    last = max(kept, default=None)
    check(
        last is None or last <= state.step,
        f"the state is at step {state.step}, and the last one kept at step {last}, so they are not one after another in "
        "a run. After a roll-back, take the others along no further: "
        f"kept = {{step: state for step, state in kept.items() if step <= {state.step}}}",
    )
    new = copy_state(state)
    if last is not None:
        with suppress(ValueError):  # another structure, such as a new entry of extra: nothing is shared
            new = trees.map_leaves(_shared, new, kept[last], state)
    states = {**kept, state.step: new}
    return pick(states, _thinned(sorted(states), at_most))


def _shared(new: Any, old: Any, current: Any) -> Any:
    """The kept tensor if it has the same bits as this copy, behaves the same, and is not the run's own tensor."""
    tensors = isinstance(new, Tensor) and isinstance(old, Tensor) and old is not current
    return old if tensors and _layout(old) == _layout(new) and same_bits(old, new) else new


def _thinned(steps: list[int], at_most: int | None) -> list[int]:
    """At most this many of the steps, spread so that each gap is about the same fraction of its age."""
    while at_most is not None and len(steps) > at_most:
        neighbours = zip(steps, steps[1:], steps[2:], strict=False)
        gaps = [(after - before) / (steps[-1] - at) for before, at, after in neighbours]
        del steps[1 + gaps.index(min(gaps))]
    return steps


def _layout(tensor: Tensor) -> Any:
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return type(tensor), tensor.device, tensor.layout, strides, tensor.requires_grad


def nbytes(tree: Any) -> int:
    """Memory of the tensors of a tree in bytes. Memory shared by several tensors counts once.

    >>> import torch
    >>> weight = torch.zeros(1000)
    >>> nbytes(weight), nbytes([weight, {"view": weight[:10], "copy": weight.clone()}])
    (4000, 8000)

    Args:
        tree: a state, a list of states, or a batch. For a DTensor, this process's shard counts.

    Raises:
        DonatedStateError: a state was donated to a step.
    """
    storages = {}
    for leaf in tensors_in(tree):
        storage = local(leaf).untyped_storage()
        storages[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _Saved(Mapping[int, TrainState]):
    """Checkpoints by step, each read on demand."""

    def __init__(self, ckpt: CheckpointIO, state: TrainState) -> None:
        self._ckpt = ckpt
        self._like = copy_state(state)  # which is not bound to a module that a restore would write to

    def __getitem__(self, step: int) -> TrainState:
        if step not in self:
            raise KeyError(step)
        return self._ckpt.restore(self._like, which=step, quiet=True)

    def __contains__(self, step: object) -> bool:
        return step in list(self)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({checkpoint.step for checkpoint in self._ckpt.steps()}))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def saved_states(ckpt: CheckpointIO, state: TrainState) -> Mapping[int, TrainState]:
    """Checkpoints as a mapping from steps to states, each read on demand.

    >>> import looplib as ll, tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> ckpt = ll.checkpoint_io(folder.name)
    >>> state = ll.init_state(torch.nn.Linear(2, 1))
    >>> for step in (0, 500):
    ...     path = ckpt.save(state.replace(step=step))
    >>> states = saved_states(ckpt, state)
    >>> list(states), states[500].step
    ([0, 500], 500)
    >>> folder.cleanup()

    For example, `replay(train_step, saved_states(ckpt, state), loader, 730)` starts at the checkpoint of step 500.
    The module that `state` is bound to is not written to.

    Args:
        ckpt: from `checkpoint_io`.
        state: any state of the same structure, such as that of `init_state`. It can still be used afterwards.

    Reading a step raises the errors of `ckpt.restore`, and KeyError if there is no such checkpoint.
    """
    return _Saved(ckpt, state)
