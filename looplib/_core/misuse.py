"""Misuse: warnings for mistakes that raise no error.

- A loop without `state =` trains the initial state forever.
- The module of a pure run, or of a donated run whose state is not bound to it, keeps its initial weights:
  `torch.save(model.state_dict())` then saves them, `model(x)` runs them, the loss of another network trains against them, and
  what you write to them or to its buffers has no effect.
- An optimizer of torch's beside a train step finds no gradients, and its schedulers set a learning rate that nothing uses.
- The record of an early stopping that never sees a score never stops the run.
- Buffers, modes and `requires_grad` of a module may change while its steps use what they were. `_core.modules`, which knows
  that, warns of these.
- A plain scalar is taken for the mean over the samples of its microbatch or rank. torch's graph tells of its own losses what
  they are: a sum, a mean over the labels that count, a mean by class weights, or a mean over the samples. Of a loss written
  by hand, such as a masked sum, it tells nothing, nor of those that torch writes in such a way (`l1_loss`, `kl_div`). In a
  trace, what needs values is not looked at.
- Rows of packed documents go through a model that does not keep them apart.

Each gets one warning. This file does nothing else: steps compute the same with it and without it, and it holds no tensor.
`ll.debug.warn_of_misuse(False)` switches it off, and then nothing is looked at.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from looplib._core import trees
from looplib._core.checks import few, is_due, warn
from looplib._core.checksums import checksums
from looplib._core.forward_writes import has_values, versions
from looplib._core.graphs import LossGraphs
from looplib._core.lease import last_write
from looplib._core.memory import tensors_in
from looplib._core.modules import members, named_modules, running, tensors
from looplib._core.ranks import is_first
from looplib._core.records import records_of
from looplib._core.switch import warnings_of_misuse
from looplib._core.torch_private import (
    disable_current_modes,
    has_class_weights,
    ignored_label_of,
    mean_shape_of,
    own_buffers,
    reduction_of,
    saved_by,
    transient_buffers,
    version,
)
from looplib._core.torch_storage import lease_on
from looplib._core.tracing import entered, tracing

_LIMIT = 10  # calls with the same state and a different batch: more than branches, replays and tests make


class Watch:
    """Detector for a loop that drops the state returned by a pure step.

    A loader cannot tell a loop without `state =` from one that trains several branches of a state, since both request
    the batches of one state repeatedly. The step can: a branch advances after its first batch. Repeating the same
    state with the same batch does not count, since benchmarks and tests do so. A batch that is freed before the next
    one is created may look the same, as in `train_step(state, next(batches))`.
    """

    def __init__(self, grad_fn: Any) -> None:
        record_of_model = next((record for record in records_of(grad_fn) if record.model is not None), None)
        self._model = record_of_model and record_of_model.model
        if self._model is not None:
            _trained.add(self._model)
            _register()
        self._graphs: LossGraphs | None = record_of_model and record_of_model.loss_graphs
        # A weak reference to the state and the batch's number: a reference to either would keep tensors alive.
        self._state: Any = None
        self._batch = -1
        self._repeats = 0

    def see(self, state: Any, batch: Any) -> None:
        """Record a call of the step."""
        if not warnings_of_misuse.on:
            return
        if self._state is None or self._state() is not state:
            if self._model is not None:
                left_behind(self._model, state)
            if self._graphs is not None and self._graphs.others:
                warn_of_reached(self._graphs.other_leaves())
            self._state, self._batch, self._repeats = weakref.ref(state), id(batch), 0
        elif id(batch) != self._batch:
            self._batch = id(batch)
            self._repeats += 1
            if self._repeats == _LIMIT - 1:
                warn(
                    f"train_step was given the same state {_LIMIT} times in a row, with different batches, so the run "
                    f"stays at step {state.step}. A pure step returns the next state and leaves the one that it is given "
                    "as it is: write `state, metrics = train_step(state, batch)`. If you mean to take one step from the "
                    "same state on many batches, ignore this warning"
                )


class _Stale:
    """A module as it was before steps on other tensors, and its hooks."""

    def __init__(self, module: nn.Module, state: Any, donated: bool) -> None:
        own = {name: tensor for name, tensor in tensors(members(module).params).items() if _is_trained(tensor)}
        # A donated run may continue with some of the module's own parameters, after `state.replace(params=...)`.
        self.shared = {id(tensor) for tensor in state.params.values()} if donated else set[int]()
        self._refs = {name: weakref.ref(tensor) for name, tensor in own.items() if id(tensor) not in self.shared}
        self.writes = _writes(module, self.shared)  # empty once its user has been warned of a use
        self.hooks: list[RemovableHandle] = []
        self.run = state.seed, state.step
        self.marks: tuple[list[int], list[int]] | None = self._marks()  # None if writes are not looked for
        self.sums: list[int] | None = checksums(self.params.values())  # until the second step has compared them
        self.trial = False
        caches = {(id(part), key) for part in module.modules() for key in transient_buffers(part)}
        self._buffers = [
            (weakref.ref(part), key, f"{prefix}.{key}".lstrip("."))
            for prefix, part in named_modules(module)
            for key, tensor in own_buffers(part).items()
            if tensor is not None and (id(part), key) not in caches
        ]
        self.buffers = self._marks_of_buffers()
        self.called = False  # since the last step: a forward pass moves statistics

    @property
    def params(self) -> dict[str, Tensor]:
        """Those of its parameters that are still in use."""
        return {name: tensor for name, ref in self._refs.items() if (tensor := ref()) is not None}

    def _marks(self) -> tuple[list[int], list[int]]:
        """The memory of each parameter, and torch's counts of the writes to them."""
        params = self.params
        return [tensor.data_ptr() for tensor in params.values()], versions(params)

    def _marks_of_buffers(self) -> dict[str, tuple[int, int]]:
        """The memory of each buffer that is saved, and torch's count of the writes to it."""
        held = {name: own_buffers(part).get(key) for ref, key, name in self._buffers if (part := ref()) is not None}
        return {
            name: (tensor.data_ptr(), _counted(tensor)) if tensor is not None and has_values(tensor) else (0, 0)
            for name, tensor in held.items()
        }

    def is_taken_over(self, state: Any) -> bool:
        """True if this state begins to write over what the module's run needs to continue."""
        return (state.seed, state.step - 1) != self.run and _shares_lease(self.params, state)

    def used(self, module: nn.Module) -> None:
        """Its user has called or saved it: if it was written before, that was meant."""
        if self.marks != self._marks() and self._is_of(module):
            self.marks = None

    def _is_of(self, module: nn.Module) -> bool:
        """True if the module holds these parameters now, and not others for a call, or since they were replaced."""
        present = tensors(members(module).params)
        return all(present.get(name) is tensor for name, tensor in self.params.items())

    def look(self, module: nn.Module, state: Any) -> None:
        """Warn once if it was written since the step that led to this state, with values of its own.

        torch does not count writes to `tensor.data`, so the second step compares values.
        """
        follows = (state.seed, state.step - 1) == self.run
        self.run = state.seed, state.step
        if self.marks is None or not self.writes:
            return
        marks, before, sums = self._marks(), self.marks, self.sums
        buffers, known, called = self._marks_of_buffers(), self.buffers, self.called
        self.marks, self.sums, self.buffers, self.called = marks, None, buffers, False
        if not follows:
            return
        of_params = marks != before or (sums is not None and checksums(self.params.values()) != sums)
        of_buffers = [] if called else [name for name, mark in buffers.items() if mark != known[name]]
        # Not if a donated step wrote them.
        if (
            (of_params or of_buffers)
            and [last_write(tensor) for tensor in self.params.values()] == [time for *_, time in self.writes]
            and self._is_of(module)
        ):
            self._warn(module, state, of_params, of_buffers)

    def _warn(self, module: nn.Module, state: Any, of_params: bool, of_buffers: Sequence[str]) -> None:
        """Warn of what was written, unless its values are the state's own."""
        if of_params and not all(_is_value(state.params.get(name), tensor) for name, tensor in self.params.items()):
            what, line = "the parameters", _PARAMS_LINE
        else:
            now = tensors(members(module).buffers)
            other = [name for name in of_buffers if name in now and not _is_value(state.buffers.get(name), now[name])]
            if not other:
                return
            what, line = f"the buffers {few(other)}", _BUFFERS_LINE.format(name=other[0])
        self.marks = None
        warn(_NO_EFFECT.format(what=what, line=line, type=type(module).__name__))


class _Hook:
    """Hook of `module.state_dict()` and of `module(...)`: warns once of a module that is used with its first weights."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        # First, or what it compiles would depend on all modules that are stale.
        if torch.compiler.is_dynamo_compiling():
            return
        stale = _stale.get(module) if warnings_of_misuse.on else None
        if stale is None or not stale.writes:
            return
        # Steps and looplib's exports know whose weights they use.
        if any(module is running_module for wrapper in running.models for running_module in wrapper.modules()):
            return
        stale.called = True
        if not running.models:  # not in the loss of another network
            stale.used(module)
        # Not if it has other weights by now, or for this call, as by torch.func.functional_call.
        if _writes(module, stale.shared) == stale.writes:
            stale.writes.clear()
            warn(_STALE.format(type=type(module).__name__))

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or copied module has this method in its place: it takes any arguments and does nothing, and
        # unpickling needs no looplib.
        return getattr, (nullcontext(), "__exit__")


_STALE = (
    "this {type} still has the weights of before training: its steps were pure, or donated with a state that is not bound to "
    "it, so the trained weights are in the state that the last step returned. Call ll.bind(model, state) before you call or "
    "save the module. To run it on a state, use ll.make_predict_step or ll.make_eval_step; to save a state, "
    "ll.checkpoint.state_dict(model, state) or ll.checkpoint.save_pretrained(model, state, folder). In the loss of another "
    "network, make the steps of both with donate=True, or hand this one's state.params on in the batch and call "
    "torch.func.functional_call(model, params, x). If you mean the weights that the module has, ignore this warning"
)
_NO_EFFECT = (
    "{what} of this {type} were written between two steps (clipped, perturbed, loaded or initialized), which has no "
    "effect: the steps are pure, or their state is not bound to the module, so what they use is in the state. Write that, "
    "`state = {line}` under torch.no_grad(), or take donate=True and a bound state (from ll.init_state, or state = "
    "ll.bind(model, state)), which has the module's own. If you mean the module and not the run, ignore this warning"
)
_PARAMS_LINE = "state.replace(params={name: param.clamp(-c, c) for name, param in state.params.items()})"
_BUFFERS_LINE = "state.replace(buffers={{**state.buffers, {name!r}: value}})"
_warn_if_stale = _Hook()
_stale: weakref.WeakKeyDictionary[nn.Module, _Stale] = weakref.WeakKeyDictionary()


def left_behind(module: nn.Module, state: Any, donated: bool = False) -> None:
    """Record a step on tensors that are not the module's.

    A donated one may be a trial on a copy: a module that another donated run has trained is not stale for that, unless this
    step writes over what that run needs to continue.
    """
    # In a trace, tensors have no values and no step is taken. `entered` first, since each pure step asks.
    if not warnings_of_misuse.on or (entered and tracing()):
        return None
    stale = _stale.get(module)
    if stale is not None and not (stale.trial and stale.is_taken_over(state)):
        return stale.look(module, state)
    _stale[module] = stale = _Stale(module, state, donated)
    if donated and any(time for *_, time in stale.writes) and not _shares_lease(stale.params, state):
        stale.trial = True
        stale.writes.clear()
        return None
    if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks of state_dict
        stale.hooks.append(module.register_state_dict_pre_hook(_warn_if_stale))  # type: ignore[no-untyped-call]
        stale.hooks.append(module.register_forward_pre_hook(_warn_if_stale))


def bound(module: nn.Module) -> None:
    """Remove the warning until the next pure step: the module has a state's weights."""
    if (stale := _stale.pop(module, None)) is not None:
        for hook in stale.hooks:
            hook.remove()


def forget_trial(grad_fn: Any) -> None:
    """Remove the warnings that follow from a run on a copied state which is given up."""
    for record in records_of(grad_fn):
        if record.model is not None:
            bound(record.model)


def warn_of_reached(others: Iterable[Tensor]) -> None:
    """Warn of modules whose parameters a pure step's loss reaches, called or not, if pure steps train them by now."""
    reached = {*map(id, others)} if warnings_of_misuse.on else set()
    for module in [*_stale]:
        if not reached.isdisjoint(map(id, module.parameters())):
            _warn_if_stale(module)


def _writes(module: nn.Module, shared: Set[int]) -> list[tuple[int, int, int]]:
    """The memory of each trained parameter, torch's count of its writes, and the time of the last donated step's.

    If one differs later, it was written. torch does not count what fused kernels write. Those whose ids are in `shared` are
    left out.
    """
    return [
        (tensor.data_ptr(), _counted(tensor), last_write(tensor))
        for tensor in module.parameters()
        if _is_trained(tensor) and id(tensor) not in shared
    ]


def _is_value(value: Tensor | None, tensor: Tensor) -> bool:
    return value is not None and value.shape == tensor.shape and torch.equal(value.to(tensor), tensor)


def _shares_lease(params: Mapping[str, Tensor], state: Any) -> bool:
    """True if a state has tensors of the donated run that trained these parameters, as after `state.replace(params=...)`."""
    leases = {id(lease) for tensor in params.values() if (lease := lease_on(tensor)) is not None}
    held = tensors_in((state.params, state.buffers, state.opt_state))
    return any(lease is not None and id(lease) in leases for lease in map(lease_on, held))


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and has_values(tensor)


def _counted(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version(tensor)


# Optimizers of torch's beside train steps

_trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_told: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
# The hook of all of torch's optimizers, since no train step knows those that stand beside it. It is registered with the first
# train step and removed when the warnings are switched off. When no module is left that a train step trains, it does nothing,
# and stays: Python may free the last one while torch goes through its hooks, which must not change then.
_hooks: list[RemovableHandle] = []

_IDLE = (
    "this {optimizer} has parameters of the {model}, which a train step trains, and none of them has a .grad, so its step() "
    "changes nothing: a train step makes the update by its own optimizer and leaves .grad as it is. Take the lines of a raw "
    "loop out (backward, clip_grad_norm_, step, zero_grad and the scheduler's), and give the train step ll.chain(..., "
    "ll.optimizer(torch.optim.{optimizer}, lr=a number or schedule)). To keep this optimizer, call ll.grads.backward(grad_fn, "
    "model, batch, step=step) in place of the train step"
)


def switch(on: bool) -> None:
    """Switch all of this on or off."""
    warnings_of_misuse.on = on
    _register()


def _register() -> None:
    """Have torch's optimizers looked at while the warnings are on and a train step has been made."""
    if warnings_of_misuse.on and _trained:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_look_at_optimizer))
    else:
        while _hooks:
            _hooks.pop().remove()


def _look_at_optimizer(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
    """Hook of `optimizer.step()`: warn once of one without gradients that has parameters of a train step's module."""
    if not _trained or torch.compiler.is_dynamo_compiling() or optimizer in _told:
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    # A closure computes the gradients later.
    if any(param.grad is not None for param in params) or any(map(callable, (*args[1:], *settings.values()))):
        return
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for model in _trained:
        if any(id(param) in known for param in model.parameters()):
            _told.add(optimizer)
            return warn(_IDLE.format(optimizer=type(optimizer).__name__, model=type(model).__name__))


# Early stopping

_NEVER = sys.maxsize  # a step that no evaluation is after

# Of each run, the steps at which `ll.evaluate` first and last returned a score of each name.
_scores: weakref.WeakKeyDictionary[Any, dict[str, tuple[int, int]]] = weakref.WeakKeyDictionary()


def note_scores(state: Any, names: Iterable[str]) -> None:
    """Note that an evaluation of this state has returned these scores."""
    if not warnings_of_misuse.on:
        return
    known = _scores.setdefault(state.run, {})
    known.update({name: (known.get(name, (state.step,))[0], state.step) for name in names})


def warn_of_unwatched(state: Any, key: str, monitor: str) -> None:
    """Warn once of a record that has seen no value, if `ll.evaluate` has returned some at two steps.

    A loop that updates its record after each evaluation but one (before the training) has updated it by the second.
    """
    known = _scores.get(state.run, {}) if warnings_of_misuse.on else {}
    first, last = known.get(monitor, (0, 0))
    if first < last <= state.step:
        known[monitor] = (_NEVER, last)
        if is_first():
            warn(
                f"ll.evaluate has returned {monitor!r} at steps {first} and {last}, and state.extra[{key!r}], which watches it, has "
                "seen no value, so early_stopping cannot stop the run: write state = ll.update_best(state, scores) after "
                "each evaluation"
            )


# Models whose batches were looked at for packed rows: the number of calls. One that was warned of is at -1.
_looks: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def warn_of_packed(model: nn.Module, batch: Mapping[str, Any], takes: Set[str]) -> None:
    """Warn once of a model that does not keep the documents of packed rows apart, whose `forward` has these arguments.

    transformers finds them by the `position_ids`, and only without an `attention_mask` of two dimensions. Positions are
    read at the 1st, 2nd, 4th, ... call of a model that has such a mask or ignores them: reading waits for an accelerator.
    """
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    ignored = "position_ids" not in takes and takes != {"**"}
    masked = isinstance(mask, Tensor) and mask.dim() == 2
    if not (isinstance(positions, Tensor) and positions.dim() == 2 and (ignored or masked)):
        return
    if not warnings_of_misuse.on or tracing():
        return
    calls = _looks.get(model, 0)
    if calls < 0:
        return
    _looks[model] = calls = calls + 1
    if not is_due(calls):
        return
    restarts = positions[:, 1:] <= positions[:, :-1]
    if isinstance(mask, Tensor) and masked and mask.shape[1] == positions.shape[1]:
        seen = mask != 0
        restarts = restarts & seen[:, 1:] & seen[:, :-1]  # padding has any position
    if bool(restarts.any()):
        _looks[model] = -1
        warn(_PACKED.format((_IGNORES_POSITIONS if ignored else _HAS_MASK).format(type(model).__name__)))


_PACKED = (
    "the position_ids of the batch begin again within a row, as for documents packed into one row, and {}. So the "
    "documents of a row see each other, and the loss is another than that of each document alone. "
    "looplib.testing.assert_samples_independent finds out, as on the page FINE_TUNING"
)
_HAS_MASK = "it has an attention_mask (b, length), with which {} does not keep the documents apart: leave the mask out of the batch"
_IGNORES_POSITIONS = (
    "{}.forward takes no position_ids: give rows of one document each, with padding, or a model that takes them"
)


# Losses, and values beside them

_IGNORED = -100  # default `ignore_index` of torch and of transformers' models
_LABEL_DTYPES = (torch.int16, torch.int32, torch.int64)
_TERMS = {"Add", "Sub", "Neg"}
_FACTORS = {"Mul", "Div"}
_COPIES = {"ToCopy", "View", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "Alias"}
_SELECTED = {"Index", "MaskedSelect"}  # as many as a mask leaves

_LABELS = (
    "{what} a plain scalar, within accumulate or on several ranks. Such "
    "a loss is a mean over the other labels, but microbatches and ranks are weighted by their samples. So the loss and "
    "the gradient are not those of the whole batch if the numbers of labels differ. Return ll.Mean(total, "
    "weight): the sum of the losses, and the number of labels that are not {label}. ll.next_token_loss does so, and "
    "ll.losses.model_loss for the loss of a transformers model"
)
_SUM = (
    "the loss is a sum over the samples (reduction='sum'), returned as a plain scalar, within accumulate or on several "
    "ranks. Such a scalar is taken for the mean over the samples of its microbatch or rank, so the gradient is that of the "
    "sum divided by the number of microbatches and ranks. Return a mean, or ll.Mean(total, number of samples), which has the "
    "gradient of the mean whatever the split"
)
_CLASS_WEIGHTS = (
    "the loss is a plain scalar of a cross-entropy with class weights, within accumulate or on several ranks. Such a loss is "
    "a mean by the weights of the labels, but microbatches and ranks are weighted by their samples. So the loss and the "
    "gradient are not those of the whole batch if the weights of their labels differ. Return ll.Mean(cross_entropy(outputs, "
    "labels, weight=weight, reduction='sum'), weight[labels].sum())"
)
_BESIDE = (
    "{names} beside the loss: a plain scalar is averaged over the samples of batches, microbatches and ranks, and the loss "
    "is a Mean(total, weight) with a weight of {weight:g} in a batch of {samples} samples. A mean over what the loss is over "
    "(tokens) is then averaged to another number: return ll.Mean(total, weight) for it as well. For a mean over the "
    "samples, return ll.Mean(value, 1, times=number of samples), and for a constant, a float"
)


class LossWatch:
    """Warn once of each such value.

    Reading labels and weights waits for an accelerator. So it looks at the first microbatch, the second, the fourth, the
    eighth and so on.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._warned: set[str] = set()
        self._first: dict[str, float] = {}  # of values beside the loss that are no mean over the samples

    def _warn(self, message: str, **words: Any) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message.format(**words))

    def _now(self) -> bool:
        if not warnings_of_misuse.on:
            return False
        self._calls += 1
        return is_due(self._calls) and not tracing()

    def look(self, batch: Any, loss: Tensor, samples: int) -> None:
        """Look at a plain scalar that is weighted by its samples. In a trace, its graph shows all but the labels."""
        in_trace = warnings_of_misuse.on and tracing()
        if not (in_trace or self._now()):
            return
        with disable_current_modes() if in_trace else nullcontext():  # what is read is no part of the trace
            terms = _terms_of(loss, samples)
        kinds = {term.kind for term in terms}
        if "sum" in kinds:
            self._warn(_SUM)
        if "class weights" in kinds:
            self._warn(_CLASS_WEIGHTS)
        if in_trace or _LABELS in self._warned:
            return
        ignored = next((term.ignored for term in terms if term.ignored is not None), None)
        if ignored is None and kinds <= {"sum", "samples", "labels"}:
            return
        path = _path_of_ignored(batch) if ignored in (None, _IGNORED) else None
        if path is not None:
            self._warn(_LABELS, what=f"the batch has labels of {_IGNORED} ({path}) and the loss is", label=_IGNORED)
        elif ignored is not None:
            self._warn(_LABELS, what=f"the loss leaves out labels of {ignored} (ignore_index) and is", label=ignored)

    def look_beside(self, loss: Any, values: Mapping[str, Any], samples: int) -> None:
        """Look at the values beside a loss that is a `Mean`."""
        if _BESIDE in self._warned or not self._now():
            return
        plain = {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
        }
        if not plain:
            return
        weight = float(loss.weight) * loss.times
        if weight == samples:
            return
        values = {
            name: float(value.detach())
            for name, value in plain.items()
            if _terms_of(value, samples) != {_Term("samples")}
        }
        # A constant has the same mean over anything.
        names = [
            repr(name) for name, value in values.items() if self._first.setdefault(name, value) != value == value
        ]
        if names:
            self._warn(_BESIDE, names=few(names), weight=weight, samples=samples)


def _path_of_ignored(batch: Any) -> str | None:
    """Path of the first labels in a batch of which some are not counted; None if there are none."""
    for path, leaf in trees.leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dtype in _LABEL_DTYPES and bool((leaf == _IGNORED).any()):
            return trees.python_path(path, "batch")
    return None


class _Term(NamedTuple):
    """A term of a scalar.

    Attributes:
        kind: "sum", or what it is a mean over: "class weights", "labels", the "samples", or "unknown".
        ignored: of a mean over labels, one that is left out, if it is among them.
    """

    kind: str
    ignored: int | None = None


def _terms_of(loss: Tensor, samples: int) -> set[_Term]:
    """Kinds of the terms of a scalar, by the functions of its graph."""
    terms: set[_Term] = set()
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    while waiting:
        node, scaled = waiting.pop()
        kind = _kind(node)
        if kind in _TERMS or kind in _FACTORS or kind in _COPIES:
            below = [(function, scaled or kind in _FACTORS) for function, _ in node.next_functions]
            waiting += [(function, by) for function, by in below if function is not None]
        else:
            terms.add(_term(node, kind, scaled, samples))
    return terms


def _term(node: Any, kind: str, scaled: bool, samples: int) -> _Term:
    reduction = reduction_of(node)
    if reduction == "mean" and has_class_weights(node) and not _are_alike(_values(node, "weight")):
        return _Term("class weights")
    ignored = ignored_label_of(node)
    if reduction == "mean" and ignored is not None and (labels := _values(node, "target")) is not None:
        return _Term("labels", ignored if bool((labels == ignored).any()) else None)
    of_each = _below(node) if kind in ("Sum", "Mean") else None
    if not scaled and (reduction == "sum" or (kind == "Sum" and reduction_of(of_each) == "none")):
        return _Term("sum")
    if kind == "Mean" and mean_shape_of(node)[:1] == (samples,) and _kind(of_each) not in _SELECTED:
        return _Term("samples")
    return _Term("unknown")


def _values(node: Any, name: str) -> Tensor | None:
    """A tensor that a function of a graph has saved, if its values can be read."""
    saved = saved_by(node, name)
    return saved if saved is not None and has_values(saved) else None


def _are_alike(weights: Tensor | None) -> bool:
    """True for weights that are all the same number, by which a mean is the plain one."""
    return weights is not None and bool((weights == weights.reshape(-1)[:1]).all())


def _below(node: Any) -> Any:
    """The function that computed what a reduction is of, before it was only reshaped or copied."""
    node = node.next_functions[0][0]
    while _kind(node) in _COPIES:
        node = node.next_functions[0][0]
    return node


def _kind(node: Any) -> str:
    """The name of a function of a graph: "Add" for AddBackward0."""
    return "" if node is None else node.name().rstrip("0123456789").removesuffix("Backward")
