"""State history in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check, check_optional_count, named, parts_of
from looplib._core.mappings import pick
from looplib._core.memory import tensors_in
from looplib._core.ranks import local
from looplib._core.torch_private import pytree
from looplib.debug._fingerprint import same_bits
from looplib.state import copy_state
from looplib.types import TrainState, check_state


def record_steps(
    kept: Mapping[int, TrainState], state: TrainState, *, at_most: int | None = None
) -> dict[int, TrainState]:
    """Keep a history of states in memory: return the states kept so far and one more, sharing unchanged tensors.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(100, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> model.weight.requires_grad_(False).shape
    torch.Size([1, 100])
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer, donate=True)
    >>> state, kept = ll.init_state(model, optimizer), {}
    >>> for _ in range(10):
    ...     kept = record_steps(kept, state)
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
    check_state(state, "kept = ll.debug.record_steps(kept, state)")
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
        tree: a state, a list of states, or a batch; of a module or an optimizer of torch's its `state_dict()`. For a
            DTensor, this process's shard counts.

    Raises:
        TypeError: the tree has an object with a `state_dict`, whose tensors are not counted.
        DonatedStateError: a state was donated to a step.
    """
    for leaf in pytree.tree_iter(tree):
        name = type(leaf).__name__
        check(
            not hasattr(leaf, "state_dict"), f"nbytes got {named(leaf)}; give {name.lower()}.state_dict()", TypeError
        )
    storages = {}
    for leaf in tensors_in(tree):
        for part in parts_of(local(leaf)):
            storage = part.untyped_storage()
            storages[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
