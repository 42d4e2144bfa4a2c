"""Watches: what a gradient function or a step notices of its calls, and warnings for common mistakes.

A backward pass is told which leaves to fill, so the gradients of anything else stay as they are. Two kinds of graphs
do not show all of their leaves, and take a plain backward pass: those of FSDP2, whose leaves are unsharded
parameters, and those with a function that runs a backward pass of its own, such as a reentrant checkpoint. There, the
gradients of the other networks that looplib trains, and of the leaves that are shown, are set aside and put back. If only
a checkpoint or FSDP2 reaches a network, and no gradient function was made of it, its gradients are filled, as in a raw
loop.

None of the mistakes raises an error. A loop without `state =` trains the initial state forever. The module of a pure run,
or of a donated run whose state is not bound to it, keeps its initial weights: `torch.save(model.state_dict())` then saves
them, `model(x)` runs them, the loss of another network trains against them, and what you write to them has no effect. Each
gets one warning.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from looplib._core import interrupts as _interrupts
from looplib._core import trees
from looplib._core.checks import warn
from looplib._core.checksums import checksums
from looplib._core.lease import has_values, last_write, versions
from looplib._core.modules import LATE_CHECKPOINT, members, running, tensors
from looplib._core.records import chain
from looplib._core.torch_private import version
from looplib._core.tracing import tracing

_CHECKPOINT = "CheckpointFunction"  # of torch, and of the libraries that copied it

# Functions that only select, arrange or cast elements of one tensor.
_VIEW = re.compile(
    "(Alias|AsStrided|Clone|Diagonal|Expand|Index|IndexSelect|Movedim|Permute|ReshapeAlias|Select|Slice|Split|"
    "SplitWithSizes|Squeeze|T|ToCopy|Transpose|Unbind|Unfold|UnsafeSplit|UnsafeView|Unsqueeze|View)Backward[0-9]+$"
)
# Parameters of the modules of all gradient functions, by id. Between its passes, FSDP2 may put others into a module.
_trained: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


class Reach:
    """Leaves that the losses of one gradient function reach, learned at its first call.

    Attributes:
        known: True after the first call.
        plain: True if backward passes must not be told which leaves to fill.
        others: leaves in the graph that belong to neither the model nor the batch.
    """

    def __init__(self, model: nn.Module, plain: bool) -> None:
        self._model, self.plain = model, plain
        self.known = False
        self.others: list[weakref.ref[Tensor]] = []
        self._unreached: Set[str] = frozenset()
        _trained.update({id(tensor): tensor for tensor in model.parameters()})

    def learn(self, loss: Tensor, batch: Any, params: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Look through the graph of the first loss."""
        leaves, functions = _graph(loss)
        self._unreached = {name for name in names if id(params[name]) not in leaves}
        known = {*map(id, params.values()), *map(id, self._model.buffers())}
        for path, leaf in trees.leaves(batch):
            if isinstance(leaf, Tensor):
                known.add(id(leaf))
                source = viewed_leaf(leaf)
                if source is not None:
                    known.add(id(source))
                elif leaf.grad_fn is not None:
                    raise ValueError(
                        f"batch{trees.pointer(path)} carries the graph of what computed it ({type(leaf.grad_fn).__name__}), "
                        "and a step takes gradients of its own loss only: hand on its detach(), or compute it under "
                        "torch.no_grad() or in the loss function. For derivatives with respect to the batch, give "
                        "detach().requires_grad_(), or call requires_grad_() in the loss function"
                    )
        if not self.plain:  # the leaves of FSDP2 are its own unsharded parameters
            self.others = [weakref.ref(leaf) for key, leaf in leaves.items() if key not in known]
            self.plain = any(_CHECKPOINT in name for name in functions) or bool(functions and self._unreached)
        self.known = True

    def check(self, loss: Tensor, missing: Set[str]) -> None:
        """Raise if parameters without a gradient are in a reentrant checkpoint that the first call did not have."""
        if not (self.plain or missing <= self._unreached):
            self._unreached |= missing
            if any(_CHECKPOINT in name for name in _graph(loss)[1]):
                raise RuntimeError(LATE_CHECKPOINT)

    def other_tensors(self) -> list[Tensor]:
        """The leaves in `others` that are still in use."""
        return [tensor for other in self.others if (tensor := other()) is not None]

    @contextmanager
    def others_aside(self, leaves: Iterable[Tensor]) -> Iterator[None]:
        """Context for a plain backward pass, in which the gradients of all but these leaves are set aside."""
        own = {*map(id, leaves)}
        others = [tensor for tensor in {*_trained.values(), *self.other_tensors()} if id(tensor) not in own]
        grads = [tensor.grad for tensor in others]
        try:
            for tensor in others:
                tensor.grad = None
            yield
        finally:
            _interrupts.waits.depth += 1
            try:
                for tensor, grad in zip(others, grads, strict=True):
                    tensor.grad = grad
            finally:
                _interrupts.waits.depth -= 1


def viewed_leaf(tensor: Tensor) -> Tensor | None:
    """The leaf of which a tensor is a view or a cast, such as a column of coordinates; None if it was computed otherwise.

    >>> x = torch.ones(4, 2, requires_grad=True)
    >>> viewed_leaf(x[:, :1].double()) is x, viewed_leaf(x * 2) is None
    (True, True)
    """
    function: Any = tensor.grad_fn
    while function is not None and _VIEW.match(function.name()):
        function = function.next_functions[0][0]
    leaf: Any = getattr(function, "variable", None)
    return leaf if leaf is not None and not isinstance(leaf, nn.Parameter) and id(leaf) not in _trained else None


def _graph(loss: Tensor) -> tuple[dict[int, Tensor], set[str]]:
    """Leaves of the graph behind a loss by id, and the names of its functions that are written in Python."""
    leaves: dict[int, Tensor] = {}
    functions: set[str] = set()
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            functions.add(type(node).__name__)
        elif node.name() == "torch::autograd::AccumulateGrad":
            leaves[id(node.variable)] = node.variable
        waiting += [function for function, _ in node.next_functions]
    return leaves, functions


_LIMIT = 10  # calls with the same state and a different batch: more than branches, replays and tests make


class Watch:
    """Detector for a loop that drops the state returned by a pure step.

    A loader cannot tell a loop without `state =` from one that trains several branches of a state, since both request
    the batches of one state repeatedly. The step can: a branch advances after its first batch. Repeating the same
    state with the same batch does not count, since benchmarks and tests do so. A batch that is freed before the next
    one is created may look the same, as in `train_step(state, next(batches))`.
    """

    def __init__(self, grad_fn: Any) -> None:
        made = next((record for record in chain(grad_fn) if record.model is not None), None)
        self._model = made and made.model
        self._reach: Reach | None = made and made.reach
        # A weak reference to the state and the batch's number: a reference to either would keep tensors alive.
        self._state: Any = None
        self._batch = -1
        self._repeats = 0

    def see(self, state: Any, batch: Any) -> None:
        """Record a call of the step."""
        if self._state is None or self._state() is not state:
            if self._model is not None:
                left_behind(self._model, state)
            if self._reach is not None and self._reach.others:
                warn_of_reached(self._reach.other_tensors())
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

    def __init__(self, module: nn.Module, state: Any) -> None:
        self.params = {
            name: tensor for name, tensor in tensors(members(module).params).items() if _is_trained(tensor)
        }
        self.writes = _writes(module)  # empty once its user has been warned of a use
        self.hooks: list[RemovableHandle] = []
        self.run = state.seed, state.step
        self.marks: tuple[list[int], list[int]] | None = self._marks()  # None if writes are not looked for
        self.sums: list[int] | None = checksums(self.params.values())  # until the second step has compared them

    def _marks(self) -> tuple[list[int], list[int]]:
        """The memory of each parameter, and torch's counts of the writes to them."""
        return [tensor.data_ptr() for tensor in self.params.values()], versions(self.params)

    def used(self, module: nn.Module) -> None:
        """Its user has called or saved it: if it was written before, that was meant."""
        if self.marks != self._marks() and self._is_of(module):
            self.marks = None

    def _is_of(self, module: nn.Module) -> bool:
        """True if the module holds these parameters now, and not others for a call, or since they were replaced."""
        held = tensors(members(module).params)
        return all(held.get(name) is tensor for name, tensor in self.params.items())

    def look(self, module: nn.Module, state: Any) -> None:
        """Warn once if it was written since the step that led to this state, with values of its own.

        torch does not count writes to `tensor.data`, so the second step compares values.
        """
        follows = (state.seed, state.step - 1) == self.run
        self.run = state.seed, state.step
        if self.marks is None or not self.writes:
            return
        marks, before, sums = self._marks(), self.marks, self.sums
        self.marks, self.sums = marks, None
        written = follows and (marks != before or (sums is not None and checksums(self.params.values()) != sums))
        if not written:
            return
        # By a donated step, or with the state's own values.
        times = [last_write(tensor) for tensor in self.params.values()]
        if times == [time for *_, time in self.writes] and self._is_of(module) and not self._has_values_of(state):
            self.marks = None
            warn(_NO_EFFECT.format(type=type(module).__name__))

    def _has_values_of(self, state: Any) -> bool:
        return all(
            (value := state.params.get(name)) is not None
            and value.shape == tensor.shape
            and torch.equal(value.to(tensor), tensor)
            for name, tensor in self.params.items()
        )


class _Hook:
    """Hook of `module.state_dict()` and of `module(...)`: warns once of a module that is used with its first weights."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        stale = _stale.get(module)
        if stale is None or not stale.writes or torch.compiler.is_dynamo_compiling():
            return
        # Steps and looplib's exports know whose weights they use.
        if any(module is each for wrapper in running.models for each in wrapper.modules()):
            return
        if not running.models:  # not in the loss of another network
            stale.used(module)
        # Not if it has other weights by now, or for this call, as by torch.func.functional_call.
        if _writes(module) == stale.writes:
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
    "the parameters of this {type} were written between two steps (clipped, perturbed, loaded or initialized), which has no "
    "effect: the steps are pure, or their state is not bound to the module, so the weights that they train are those of "
    "the state. Write these, `state = state.replace(params={{name: param.clamp(-c, c) for name, param in "
    "state.params.items()}})` under torch.no_grad(), or take donate=True and a bound state (from ll.init_state, or state = "
    "ll.bind(model, state)), which has the module's own. If you mean the module and not the run, ignore this warning"
)
_warn_if_stale = _Hook()
_stale: weakref.WeakKeyDictionary[nn.Module, _Stale] = weakref.WeakKeyDictionary()


def left_behind(module: nn.Module, state: Any, donated: bool = False) -> None:
    """Record a step on tensors that are not the module's.

    A donated one may be a trial on a copy: a module that another donated run has trained is not stale for that.
    """
    if tracing():
        return
    if (stale := _stale.get(module)) is not None:
        return stale.look(module, state)
    _stale[module] = stale = _Stale(module, state)
    if donated and any(time for *_, time in stale.writes):
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
    for record in chain(grad_fn):
        if record.model is not None:
            bound(record.model)


def warn_of_reached(others: Iterable[Tensor]) -> None:
    """Warn of modules whose parameters a pure step's loss reaches, called or not, if pure steps train them by now."""
    reached = {*map(id, others)}
    for module in [*_stale]:
        if not reached.isdisjoint(map(id, module.parameters())):
            _warn_if_stale(module)


def _writes(module: nn.Module) -> list[tuple[int, int, int]]:
    """The memory of each trained parameter, torch's count of its writes, and the time of the last donated step's.

    If one differs later, it was written. torch does not count what fused kernels write.
    """
    return [
        (tensor.data_ptr(), _counted(tensor), last_write(tensor))
        for tensor in module.parameters()
        if _is_trained(tensor)
    ]


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and has_values(tensor)


def _counted(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version(tensor)


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
    if not (isinstance(positions, Tensor) and positions.dim() == 2 and (ignored or masked)) or tracing():
        return
    calls = _looks.get(model, 0)
    if calls < 0:
        return
    _looks[model] = calls = calls + 1
    if calls & (calls - 1):
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
