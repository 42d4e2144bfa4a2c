"""Warnings for common mistakes with pure steps: dropping the returned state, and using an unbound module.

None raises an error. A loop without `state =` trains the initial state forever, and the module of a pure run keeps
its initial weights, which `torch.save(model.state_dict())` then saves, `model(x)` runs, and the loss of another network
trains against. Each gets one warning.
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
from looplib._core.modules import running
from looplib._core.notices import warn
from looplib._core.ranks import is_sharded
from looplib._core.reached import Reach
from looplib._core.torch_private import disable_current_modes, version
from looplib._core.tracing import tracing

_LIMIT = 10  # calls with the same state and a different batch: more than branches, replays and tests make


class Watch:
    """Detector for a loop that drops the state returned by a pure step.

    A loader cannot tell a loop without `state =` from one that trains several branches of a state, since both request
    the batches of one state repeatedly. The step can: a branch advances after its first batch. Repeating the same
    state with the same batch does not count, since benchmarks and tests do so. A batch that is freed before the next
    one is created may look the same, as in `train_step(state, next(batches))`.
    """

    __slots__ = ("_batch", "_model", "_reach", "_repeats", "_state", "_warned")

    def __init__(self, grad_fn: Any, inner: bool = False) -> None:
        # An inner step of meta-learning says nothing about the module, which its outer step may train.
        made = None if inner else next((record for record in kinds.chain(grad_fn) if record.model is not None), None)
        self._model = made and made.model
        self._reach: Reach | None = made and made.reach
        # A weak reference to the state and the batch's number: a reference to either would keep tensors alive.
        self._state: Any = None
        self._batch = -1
        self._repeats = 0
        self._warned = False

    def see(self, state: Any, batch: Any) -> None:
        """Record a call of the step."""
        if self._state is not None and self._state() is state:
            self._see_again(state, batch)
        else:
            if self._model is not None and self._model not in _stale and not tracing():
                _stale[self._model] = _Stale(self._model)
            if self._reach is not None and self._reach.known:
                reach, self._reach = self._reach, None
                _warn_of_others(reach)
            self._state, self._batch, self._repeats = weakref.ref(state), id(batch), 0

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


class _Stale:
    """A module with the weights that it had before pure steps, and its hooks, which warn once."""

    def __init__(self, module: nn.Module, watched: bool = True) -> None:
        self._first_elements = _first_elements(module)
        self._first = weakref.ref(next(module.parameters()))
        self._hooks: list[RemovableHandle] = []
        self.settled = False  # True once it has warned, or the module has got different weights
        if watched and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks of state_dict
            self._hooks = [
                module.register_state_dict_pre_hook(_OnSave(self)),  # type: ignore[no-untyped-call]
                module.register_forward_pre_hook(_OnCall(self)),
            ]

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def on_save(self, module: nn.Module) -> None:
        if not (self.settled or _exports.count):
            self._settle(module, _SAVED)

    def on_call(self, module: nn.Module) -> None:
        if torch.compiler.is_dynamo_compiling() or self.settled or _exports.count:
            return
        if module in running.models:
            return  # a step runs it, with a state's tensors
        for wrapper in running.models:
            if module in [*wrapper.modules()]:
                return
        first, *_ = module.parameters()
        if first is self._first():  # not with others, as by torch.func.functional_call
            self._settle(module, _CALLED)

    def _settle(self, module: nn.Module, message: str) -> None:
        self.settled = True
        if self._first_elements and _first_elements(module) == self._first_elements:
            warn(message.format(type=type(module).__name__))


class _OnSave:
    """Hook of `module.state_dict()`."""

    def __init__(self, stale: _Stale) -> None:
        self._stale = stale

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._stale.on_save(module)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or copied module has the class `slice` in this place: called as a hook, it does nothing, and
        # unpickling needs no looplib.
        return type, (slice(None),)


class _OnCall:
    """Hook of `module(...)`."""

    def __init__(self, stale: _Stale) -> None:
        self._stale = stale

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._stale.on_call(module)

    def __reduce__(self) -> tuple[Any, ...]:
        # As above: `{}.get(module, args)` is `args`, so the module is called as it would be without a hook.
        return getattr, ({}, "get")


_STALE = (
    "this {type} still has the weights of before training: its steps were pure, so the trained weights are in the state "
    "that the last step returned. "
)
_SAVED = _STALE + (
    "Call ll.bind(model, state) before you save the module, or save the state: ll.checkpoint.state_dict(model, state), "
    "ll.checkpoint.save_pretrained(model, state, folder). If you mean to save the weights that the module has, ignore "
    "this warning"
)
_CALLED = _STALE + (
    "To run it on a state, use ll.make_predict_step or ll.make_eval_step, or call ll.bind(model, state) first. In the "
    "loss of another network, make the steps of both with donate=True, or hand this one's state.params on in the batch "
    "and call torch.func.functional_call(model, params, x). If you mean the weights that the module has, ignore this "
    "warning"
)
_OTHERS = (
    "the loss of a pure step reaches {names}, which the step does not train. Other modules keep their weights while "
    "pure steps train them, so this loss would stay with the first ones. For two networks, make the steps of both with "
    "donate=True, or hand the other one's state.params on in the batch and call torch.func.functional_call(module, "
    "params, x). What nothing trains gets requires_grad_(False); what this step should train belongs in its module"
)
_SHOWN = 6  # names in a message

_stale: weakref.WeakKeyDictionary[nn.Module, _Stale] = weakref.WeakKeyDictionary()


class _Exports(threading.local):
    count = 0  # that are under way in this thread


_exports = _Exports()


def bound(module: nn.Module) -> None:
    """Remove the warning until the next pure step: the module has a state's weights."""
    if (stale := _stale.get(module)) is not None:
        stale.remove()
        if not stale.settled:
            del _stale[module]


def _warn_of_others(reach: Reach) -> None:
    """Warn of other networks in the loss, unless the user has been told of their modules."""
    owners = {name: None if owner is None else owner() for name, owner in reach.others.items()}
    told = {module for module, stale in _stale.items() if stale.settled}
    names = [name for name, module in owners.items() if module not in told]
    for module in owners.values():
        if module is not None:
            _stale.setdefault(module, _Stale(module, watched=False)).settled = True
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warn(_OTHERS.format(names=", ".join(names[:_SHOWN]) + more))


@contextmanager
def export() -> Iterator[None]:
    """Context for looplib's own calls of `module.state_dict()`, which know whose weights they save."""
    _exports.count += 1
    try:
        yield
    finally:
        _exports.count -= 1


def _first_elements(module: nn.Module) -> list[tuple[float, int]]:
    """One number of each trained parameter, and torch's count of its writes. If they differ later, it was written."""
    with disable_current_modes():  # a step that calls the module may be traced
        tensors = [tensor for tensor in module.parameters() if tensor.requires_grad and tensor.numel()]
        return [
            (tensor.detach()[(0,) * tensor.dim()].item(), 0 if tensor.is_inference() else version(tensor))
            for tensor in tensors
            if not (tensor.is_meta or is_sharded(tensor))
        ]
