"""Warnings for two common mistakes with pure steps: dropping the returned state, and saving an unbound module.

Neither raises an error. A loop without `state =` trains the initial state forever, and the module of a pure run keeps
its initial weights, which `torch.save(model.state_dict())` then saves. Each gets one warning.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from looplib._core import kinds
from looplib._core.notices import warn
from looplib._core.ownership import mark_of
from looplib._core.ranks import is_sharded
from looplib._core.tracing import tracing

_LIMIT = 10  # calls with the same state and a different batch: more than branches, replays and tests make


class Watch:
    """Detector for a loop that drops the state returned by a pure step.

    A loader cannot tell a loop without `state =` from one that trains several branches of a state, since both request
    the batches of one state repeatedly. The step can: a branch advances after its first batch. Repeating the same
    state with the same batch does not count, since benchmarks and tests do so. A batch that is freed before the next
    one is created may look the same, as in `train_step(state, next(batches))`.
    """

    __slots__ = ("_batch", "_mark", "_model", "_repeats", "_warned")

    def __init__(self, grad_fn: Any) -> None:
        self._model = next((record.model for record in kinds.chain(grad_fn) if record.model is not None), None)
        # The state's mark and the batch's number, since a reference to either would keep tensors alive.
        self._mark: Any = None
        self._batch = -1
        self._repeats = 0
        self._warned = False

    def see(self, state: Any, batch: Any) -> None:
        """Record a call of the step."""
        mark = mark_of(state)
        if mark is self._mark:
            self._see_again(state, batch)
        else:
            if self._mark is None and self._model is not None and not tracing():
                _warn_of_stale_weights(self._model)
            self._mark, self._batch, self._repeats = mark, id(batch), 0

    def _see_again(self, state: Any, batch: Any) -> None:
        """Record a call with the previous state."""
        if id(batch) != self._batch:
            self._batch = id(batch)
            self._repeats += 1
        if self._repeats == _LIMIT - 1 and not self._warned:
            self._warned = True
            warn(
                f"train_step was given the same state {_LIMIT} times in a row, with different batches, so the run stays "
                f"at step {state.step}. A pure step returns the next state and leaves the one that it is given as it "
                "is: write `state, metrics = train_step(state, batch)`. If you mean to take one step from the same "
                "state on many batches, ignore this warning"
            )


class _StaleWeights:
    """Hook of `module.state_dict()` that warns once if the module's weights have not changed since now."""

    def __init__(self, module: nn.Module) -> None:
        self._first_elements = _first_elements(module)
        self._warned = False

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._warned or _exports.count:
            return
        if self._first_elements and _first_elements(module) == self._first_elements:
            self._warned = True
            warn(
                f"this {type(module).__name__} still has the weights of before training: its steps were pure, so the "
                "trained weights are in the state that the last step returned. Call ll.bind(model, state) before you "
                "save the module, or save the state: ll.checkpoint.state_dict(model, state), "
                "ll.checkpoint.save_pretrained(model, state, folder). If you mean to save the weights that the module "
                "has, ignore this warning"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or copied module has the class `slice` in this place: called as a hook, it does nothing, and
        # unpickling needs no looplib.
        return type, (slice(None),)


_hooks: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()


class _Exports(threading.local):
    count = 0  # that are under way in this thread


_exports = _Exports()


def _warn_of_stale_weights(module: nn.Module) -> None:
    bound(module)
    if isinstance(module, torch.jit.ScriptModule):  # which takes no hooks of state_dict
        return
    _hooks[module] = module.register_state_dict_pre_hook(_StaleWeights(module))  # type: ignore[no-untyped-call]


def bound(module: nn.Module) -> None:
    """Remove the warning: the module has a state's weights."""
    if (hook := _hooks.pop(module, None)) is not None:
        hook.remove()


@contextmanager
def export() -> Iterator[None]:
    """Context for looplib's own calls of `module.state_dict()`, which know whose weights they save."""
    _exports.count += 1
    try:
        yield
    finally:
        _exports.count -= 1


def _first_elements(module: nn.Module) -> list[float]:
    """One number of each trained parameter. If the numbers differ later, the weights have changed."""
    tensors = [tensor.detach() for tensor in module.parameters() if tensor.requires_grad and tensor.numel()]
    return [tensor[(0,) * tensor.dim()].item() for tensor in tensors if not (tensor.is_meta or is_sharded(tensor))]
