"""Keep states of a run in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core import ownership as _donation
from looplib._core import trees
from looplib._core.checks import check_optional_count
from looplib._core.ranks import is_sharded
from looplib.checkpoint._format import local
from looplib.checkpoint._io import CheckpointIO
from looplib.debug._differences import _same_bits, leaves_by_path
from looplib.state import copy_state
from looplib.types import TrainState


def keep(kept: Mapping[int, TrainState], state: TrainState, *, at_most: int | None = None) -> dict[int, TrainState]:
    """The kept states of a run and one more, which costs only what differs from the last of them.

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

    A tensor with the same bits as in the last one kept is shared with it: a frozen parameter, an unchanged buffer.
    The others are copied, so that the run, if its steps donate, spends none that is kept. What all of them take is
    `nbytes(list(kept.values()))`.

    With `at_most`, the first and the last stay, and between them those go first that stand closest for their age.
    What is left stands ever wider apart, so that a step is replayed from about as far before it as it lies back.

    Args:
        kept: by step; `{}` to begin with. It is left as it is.
        state: no earlier than those.
        at_most: how many to keep, 2 or more; None for all.

    Raises:
        ValueError: the state is from before the last one kept, or `at_most` is below 2.
        DonatedStateError: the state is spent.
    """
    check_optional_count("at_most", at_most, 2, "give 2 or more: the first state and the last are always kept")
    last = max(kept, default=None)
    if last is not None and last > state.step:
        raise ValueError(
            f"the state is at step {state.step}, and the last one kept at step {last}, so they are not one after "
            "another in a run. After a roll-back, take the others along no further: "
            f"kept = {{step: state for step, state in kept.items() if step <= {state.step}}}"
        )
    known = {} if last is None else dict(leaves_by_path(kept[last]))
    copies: dict[int, Tensor] = {}

    def own(place: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            old, plain = known.get(place), leaf.detach().requires_grad_(leaf.requires_grad)
            if isinstance(old, Tensor) and old is not leaf and _interchangeable(old, plain):
                copies[id(leaf)] = old
            else:
                copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    owned = {}
    for name in ("params", "buffers", "opt_state", "extra"):
        paths = (f"/{name}{trees.pointer(path)}" for path, _ in trees.leaves(getattr(state, name)))
        owned[name] = trees.map_leaves(lambda leaf, paths=paths: own(next(paths), leaf), getattr(state, name))
    found = {**kept, state.step: state.replace(**owned)}
    steps = sorted(found)
    while at_most is not None and len(steps) > at_most:
        # Where they stand apart by a factor, the gap that each would leave is the same part of its age.
        neighbours = zip(steps, steps[1:], steps[2:], strict=False)
        gaps = [(after - before) / (steps[-1] - at) for before, at, after in neighbours]
        del steps[1 + gaps.index(min(gaps))]
    return {step: found[step] for step in steps}


def _interchangeable(old: Tensor, new: Tensor) -> bool:
    """Not only in their bits, but for whoever computes with them."""

    def kind(tensor: Tensor) -> Any:
        strides = tensor.stride() if tensor.layout == torch.strided else None
        return type(tensor), tensor.device, tensor.layout, strides, tensor.requires_grad

    return kind(old) == kind(new) and _same_bits(old, new)


def nbytes(tree: Any) -> int:
    """How many bytes the tensors of a tree take, each piece of memory counted once, however many share it.

    >>> import torch
    >>> weight = torch.zeros(1000)
    >>> nbytes(weight), nbytes([weight, {"view": weight[:10], "copy": weight.clone()}])
    (4000, 8000)

    Args:
        tree: any pytree: a state, a list of states, a batch. Of a DTensor, what this process holds.

    Raises DonatedStateError for a spent state.
    """
    storages = {}
    for leaf in _donation.tensors_in(tree):
        storage = (local(leaf) if is_sharded(leaf) else leaf).untyped_storage()
        storages[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _Saved(Mapping[int, TrainState]):
    """The states of a directory of checkpoints, each read when it is asked for."""

    def __init__(self, ckpt: CheckpointIO, state: TrainState) -> None:
        self._ckpt, self._like = ckpt, copy_state(state)  # which is bound to no module that a restore would write to

    def __getitem__(self, step: int) -> TrainState:
        if step not in self:
            raise KeyError(step)
        return self._ckpt.restore(self._like, which=step)

    def __contains__(self, step: object) -> bool:
        return step in list(self)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({found.step for found in self._ckpt.steps()}))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def saved_states(ckpt: CheckpointIO, state: TrainState) -> Mapping[int, TrainState]:
    """The states of a directory of checkpoints by their steps, each read when it is asked for.

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

    So `replay(train_step, saved_states(ckpt, state), loader, 730)` begins at the checkpoint of step 500. Nothing is
    written into the module that `state` is bound to.

    Args:
        ckpt: from `checkpoint_io`.
        state: any state of that structure, such as that of `init_state`; it stays good.

    Asking for a step raises what `ckpt.restore` does, and KeyError for one that is not there.
    """
    return _Saved(ckpt, state)
