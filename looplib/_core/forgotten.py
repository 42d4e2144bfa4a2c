"""What users of a pure step forget: to keep the state that it returns, and to copy the last one into the module.

Neither raises an error. A loop without `state =` trains the first state for ever, and the module of a pure run keeps
its first weights, which `torch.save(model.state_dict())` then saves. Each gets one warning.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from looplib._core import kinds
from looplib._core.tracing import tracing

_LIMIT = 10  # calls with the same state and another batch: more than forks, replays and tests make


class Watch:
    """What a pure step notices of its calls.

    The loader cannot tell a loop without `state =` from one that trains several forks of a state, as both ask for the
    batches of one state again and again. The step can: a fork moves on after its first batch. The same state with the
    same batch is not counted, as benchmarks and tests repeat a step so. A batch that is freed before the next one is
    made may look the same, as in `train_step(state, next(batches))`.
    """

    __slots__ = ("_batch", "_counts", "_last", "_model", "_repeats", "_warned")

    def __init__(self, grad_fn: Any) -> None:
        self._model = next((record.model for record in kinds.chain(grad_fn) if record.model is not None), None)
        self._last = self._batch = 0  # ids of the last call: references would keep tensors alive
        self._repeats = 0
        self._counts: tuple[int, ...] = ()
        self._warned = False

    def see(self, state: Any, batch: Any) -> None:
        """The step is called."""
        if id(state) == self._last:
            self._see_again(state, batch)
        else:
            if not self._last and self._model is not None and not tracing():
                _warn_of_stale_weights(self._model)
            self._last, self._batch, self._repeats = id(state), id(batch), 0

    def _see_again(self, state: Any, batch: Any) -> None:
        """The step is given the state that it was given last, or another one at the same address."""
        counts = (state.step, state.samples)
        if self._repeats and counts != self._counts:
            self._repeats = 0
        self._counts = counts
        if id(batch) != self._batch:
            self._batch = id(batch)
            self._repeats += 1
        if self._repeats == _LIMIT - 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"train_step was given the same state {_LIMIT} times in a row, with different batches, so the run stays "
                f"at step {state.step}. A pure step returns the next state and leaves the one that it is given as it "
                "is: write `state, metrics = train_step(state, batch)`. If you mean to take one step from the same "
                "state on many batches, ignore this warning",
                stacklevel=4,
            )


class _StaleWeights:
    """A hook of `module.state_dict()` that warns once if the module still has the weights that it has now."""

    def __init__(self, module: nn.Module) -> None:
        self._first_elements = _first_elements(module)
        self._warned = False

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._warned or getattr(_exports, "count", 0):
            return
        if self._first_elements and _first_elements(module) == self._first_elements:
            self._warned = True
            warnings.warn(
                f"this {type(module).__name__} still has the weights of before training: its steps were pure, so the "
                "trained weights are in the state that the last step returned. Call ll.bind(model, state) before you "
                "save the module, or save the state: ll.checkpoint.state_dict(model, state), "
                "ll.checkpoint.save_pretrained(model, state, folder). If you mean to save the weights that the module "
                "has, ignore this warning",
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or copied module has the class `slice` in this place: called as a hook, it does nothing, and
        # unpickling needs no looplib.
        return type, (slice(None),)


_hooks: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()


_exports = threading.local()


def _warn_of_stale_weights(module: nn.Module) -> None:
    bound(module)
    _hooks[module] = module.register_state_dict_pre_hook(_StaleWeights(module))  # type: ignore[no-untyped-call]


def bound(module: nn.Module) -> None:
    """The module has the weights of a state: nothing to warn of."""
    if (hook := _hooks.pop(module, None)) is not None:
        hook.remove()


@contextmanager
def export() -> Iterator[None]:
    """For looplib's own calls of `module.state_dict()`, which know whose weights they take."""
    _exports.count = getattr(_exports, "count", 0) + 1
    try:
        yield
    finally:
        _exports.count -= 1


def _first_elements(module: nn.Module) -> list[float]:
    """One number of each trained parameter: other numbers show other weights, however the module came by them."""
    tensors = [tensor for tensor in module.parameters() if tensor.requires_grad and tensor.numel()]
    return [tensor.detach()[(0,) * tensor.dim()].item() for tensor in tensors if not tensor.is_meta]
