"""Types: the records and protocols that looplib's functions take and return."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from looplib._core import errors, lease, updates
from looplib._core.engines import RunningSum
from looplib._core.lease import TREES as TREES
from looplib._core.lease import DonatedStateError, check_valid, clock
from looplib._core.lease import check_state as check_state
from looplib._core.mappings import fields_of
from looplib._core.records import Call, kinds_of_classes
from looplib._core.torch_private import pytree
from looplib._core.trees import by_fields

__all__ = [
    "Decide",
    "DonatedStateError",
    "EvalStep",
    "GradFn",
    "GradRequest",
    "Gradients",
    "Grads",
    "Init",
    "Logger",
    "LossFn",
    "Metric",
    "Metrics",
    "Optimizer",
    "Params",
    "PredictStep",
    "Schedule",
    "TrainState",
    "TrainStep",
    "Update",
]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrainState(lease.Leased):
    """Training state: an immutable record of a training run at one moment.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.1), epoch_length=10)
    >>> state
    TrainState(step=0, epoch=0, batch=0/10, samples=0, params=2 tensors (3 numbers), seed=0)
    >>> state.replace(step=7).step
    7

    It is a pytree whose leaves are the tensors of `params`, `buffers`, `opt_state` and `extra`. The counts and the
    seed belong to its structure.

    Attributes:
        step: optimizer updates completed.
        epoch: epochs completed.
        batch: batches consumed in this epoch.
        epoch_length: batches in an epoch, or None for a stream.
        samples, batch_samples: samples consumed, and samples in the last batch.
        batch_steps: updates made on the last batch: usually 1, 0 if the update was skipped, more with `same_batch`.
        no_batch: True after an update that belongs to no batch (`ll.apply_gradients`), which `batch_steps` then counts.
            Predicates of samples and epochs do not fire for it.
        params, buffers: dicts of name -> tensor, as given by `named_parameters` and `named_buffers`.
        opt_state: the optimizer's pytree.
        seed: int from which all randomness of the run is derived.
        extra: your own pytree (EMA weights, an early-stopping record, ...), checkpointed with the rest.

    Raises:
        DonatedStateError: `params`, `buffers`, `opt_state` or `extra` is read after a donated step has overwritten
            one of its tensors.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    epoch_length: int | None = None
    samples: int = 0
    batch_samples: int = 0
    batch_steps: int = 1
    no_batch: bool = False
    params: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    opt_state: Any = None
    seed: int = 0
    extra: Any = None

    @property
    def skipped(self) -> bool:
        """True if the last batch, or call of `ll.apply_gradients`, made no update, so that `step` did not advance."""
        return self.batch_steps == 0

    def replace(self, **changes: Any) -> TrainState:
        """Return a copy with the given fields changed. The other fields share their tensors with the original.

        >>> TrainState(step=3).replace(step=4, extra={"note": "kept"}).extra
        {'note': 'kept'}

        Compute new values from parameters inside `with torch.no_grad():`, as in a raw loop. Steps refuse values with a
        graph, unless they are `ll.transforms.differentiable`.

        Raises:
            TypeError: TrainState has no such field.
            DonatedStateError: a field that is not replaced was donated.
        """
        if unknown := changes.keys() - FIELDS:
            name = min(unknown)
            near = ", ".join(difflib.get_close_matches(name, FIELDS) or FIELDS)
            instead = f"replace {near}, or keep a value of your own in extra"
            raise TypeError(f"a TrainState has no field {name!r}: {_NOT_OF_A_STATE.get(name, instead)}")
        new = TrainState(**fields_of(self, [name for name in FIELDS if name not in changes]), **changes)
        # With other tensors, the next donated step has to find out again what it writes, and what `extra` shares with it.
        written = changes.keys() & {"params", "buffers", "opt_state"}
        same = not written and not lease.lies_on(self._lease, changes.get("extra"))
        lease.follows(new, self, self._lease if same else None)
        return new

    def __repr__(self) -> str:
        """Position and size, in one line."""
        position = self.batch if self.epoch_length is None else f"{self.batch}/{self.epoch_length}"
        parts = [f"step={self.step}", f"epoch={self.epoch}", f"batch={position}", f"samples={self.samples}"]
        if lease.overwritten(self, [getattr(self, f"_{name}") for name in TREES]) is not None:
            return f"TrainState({', '.join(parts)}, donated)"
        parts += [
            f"{name}={len(tensors)} tensors ({sum(tensor.numel() for tensor in tensors.values()):,} numbers)"
            for name in ("params", "buffers")
            if (tensors := getattr(self, name))
        ]
        parts.append(f"seed={self.seed}")
        if self.extra is not None:
            keys = f" of {', '.join(map(str, self.extra))}" if isinstance(self.extra, dict) else ""
            parts.append(f"extra={type(self.extra).__name__}{keys}")
        return f"TrainState({', '.join(parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainState, tuple(getattr(self, name) for name in FIELDS), lease.provenance(self)

    __setstate__ = lease.note_provenance


# What users of torch and of Trainers write -> what to write instead.
_NOT_OF_A_STATE = {
    "model": "the model is yours; ll.bind(model, state) copies the state's values into it",
    "optimizer": "the optimizer is what ll.optimizer returned; its moments are state.opt_state",
    "loss": "it is among the metrics, `state, metrics = train_step(state, batch)`",
    "lr": "ll.optim.hyperparameters(optimizer, state) gives the learning rate of the next update",
    "global_step": "it is state.step",
    "parameters": "they are state.params, name -> tensor",
    "state_dict": "ll.checkpoint.state_dict(model, state) gives the model's",
    "load_state_dict": "ckpt.restore(state) loads a checkpoint; ll.checkpoint.load_state_dict(...) weights",
}
errors.explain(TrainState, "a TrainState", _NOT_OF_A_STATE, "write state = state.replace({name}=...)")

FIELDS = tuple(field.name for field in dataclasses.fields(TrainState))
COUNTS = tuple(name for name in FIELDS if name not in TREES)


def _guard(name: str) -> None:
    """Let a tree of a state be read only while no step has written its tensors. The tree itself is in `_name`."""
    slot = vars(TrainState)[name]

    def tree(state: Any) -> Any:
        if state._at != clock.time:
            check_valid(state, (name,))
        return slot.__get__(state)

    setattr(TrainState, f"_{name}", slot)
    setattr(TrainState, name, property(tree, slot.__set__, doc=slot.__doc__))


for _tree in TREES:
    _guard(_tree)

# For torch, a state's trees are leaves and its counts are structure; for looplib, all fields are leaves. `torch.func` and
# `tree_map` therefore see only tensors, and a comparison sees every field.


def _flatten(state: TrainState) -> tuple[list[Any], Any]:
    # None is a leaf in torch's pytrees, so a missing tree belongs to the structure.
    present = {name: tree for name in TREES if (tree := getattr(state, name)) is not None}
    return list(present.values()), (tuple(present), fields_of(state, COUNTS))


def _flatten_with_keys(state: TrainState) -> tuple[list[Any], Any]:
    children, structure = _flatten(state)
    return list(zip(map(pytree.GetAttrKey, structure[0]), children, strict=True)), structure


def _unflatten(children: Iterable[Any], structure: Any) -> TrainState:
    present, counts = structure
    return TrainState(**dict(zip(present, children, strict=True)), **counts)


pytree.register_pytree_node(
    TrainState,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="looplib.TrainState",
)
by_fields.add(TrainState)
kinds_of_classes[TrainState] = "state"


Params = dict[str, Tensor]
"""Parameters by name, as `named_parameters` gives them."""

Grads = dict[str, Tensor]
"""Gradients by the name of their parameter, as in `Gradients`."""

LossFn = Callable[[Any, Any], Any]
"""Loss function: `loss_fn(model, batch)`, for `make_grad_fn`.

It returns a scalar loss (the mean over the samples), a `Mean(total, weight)` if the average is not over samples, such as
over tokens, or `(loss, aux)` with a dict of scalars and metrics to report.

>>> import looplib as ll, torch
>>> def loss_fn(model, batch):
...     x, y = batch
...     logits = model(x)
...     return torch.nn.functional.cross_entropy(logits, y), {"accuracy": ll.accuracy(logits, y)}
"""


class Gradients(NamedTuple):
    """Gradients and metrics of one batch, as returned by a `GradFn`.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> out = ll.make_grad_fn(model, lambda model, x: model(x).mean())(ll.init_state(model), torch.ones(4, 2))
    >>> out.grads["weight"], out.samples, sorted(out.metrics)
    (tensor([[1., 1.]]), 4, ['loss'])

    A wrapper replaces the fields it is responsible for and keeps the rest: `out._replace(grads=...)`.

    Attributes:
        grads: name -> gradient of the mean loss, or if a running sum was requested, of the summed loss divided by its
            normalizer. The caller owns the tensors.
        metrics: name -> mergeable record. Always contains "loss".
        buffers: name -> tensor after the forward pass.
        samples: number of samples in the batch.
        weight: of this batch, in samples or what a `Mean` counts; None if `grads` are already those of the mean loss. The
            gradient of a step's mean loss is the sum of `grads` times `request.sum.normalizer` over the sum of weights.
        scale: the `GradRequest.scale` by which the loss was multiplied, else None.
        copies: pairs of a buffer of the state and a copy of its value before a donated call has written it, so that
            `apply_gradients` can put it back if the update is skipped; None if there is nothing to put back.
    """

    grads: Grads
    metrics: dict[str, Metric]
    buffers: dict[str, Tensor]
    samples: int
    weight: Tensor | float | None = None
    scale: Tensor | None = None
    copies: Sequence[tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True, slots=True)
class GradRequest:
    """Request to a `GradFn`: the gradient of the mean loss, or that of one microbatch of a step.

    A wrapper passes it on to the function it wraps, unchanged or changed with `dataclasses.replace(request, ...)`.

    Attributes:
        index: index of the microbatch, which its random numbers depend on.
        scale: factor by which the loss is multiplied before the backward pass.
        donate: True if the state's buffers may be overwritten, as a model in DDP or FSDP2 needs.
        copied: True if the caller has copies of the buffers already, as a train step does. Otherwise, a donated call makes
            them (`Gradients.copies`), and puts them back if it fails.
        sum: the running sum within `accumulate`, to which the gradient of the summed loss is added; otherwise None. Pass it
            on as it is: what it contains may change between versions.
    """

    index: int = 0
    scale: Tensor | None = None
    donate: bool = False
    copied: bool = False
    sum: RunningSum | None = None


WHOLE = GradRequest()


class GradFn(Protocol):
    """Gradient function: `grad_fn(state, batch, request=GradRequest()) -> Gradients`, pure.

    `make_grad_fn` returns one. A wrapper takes one, returns another, and passes `request` on. If it calls the inner one
    twice, a donated step writes to its buffers twice, as two forward passes of a raw loop do; with
    `dataclasses.replace(request, donate=False)`, a call leaves them alone:

    >>> import looplib as ll, torch
    >>> def halved(grad_fn):
    ...     def halved_grad_fn(state, batch, request=ll.types.GradRequest()):
    ...         out = grad_fn(state, batch, request)
    ...         return out._replace(grads={name: grad / 2 for name, grad in out.grads.items()})
    ...     return halved_grad_fn
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
    >>> halved(grad_fn)(ll.init_state(model), torch.ones(4, 2)).grads["weight"]
    tensor([[0.5000, 0.5000]])
    """

    def __call__(self, state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients: ...


@runtime_checkable
class Metric(Protocol):
    """Metric record: an object with `merge` and `compute`, such as `Mean`.

    >>> from dataclasses import dataclass
    >>> import looplib as ll
    >>> @dataclass(frozen=True)
    ... class Largest:
    ...     value: float
    ...     def merge(self, other):
    ...         return Largest(max(self.value, other.value))
    ...     def compute(self):
    ...         return self.value
    >>> ll.compute(ll.merge({"largest": Largest(2.0)}, {"largest": Largest(5.0)}))
    {'largest': 5.0}
    """

    def merge(self, other: Any) -> Any:
        """Combine two records into the record of their samples together."""

    def compute(self) -> Any:
        """Return the value: a number or a tensor with one element."""


Metrics = Mapping[str, Metric]
"""Metrics of a batch by name, as a step returns them; `ll.compute` turns them into numbers."""


class Init(Protocol):
    """Optimizer initialization: `init(params, **extra) -> opt_state`, a pytree with a fixed structure.

    It is one of torch's pytrees: dicts, lists, tuples, and the classes that are registered with them. looplib does not look
    into other containers (`UserDict`), so states would share the tensors in them.

    `extra` holds `buffers`, name -> tensor, when `init_state` calls it.
    """

    def __call__(self, params: Params, **extra: Any) -> Any: ...


class Update(Protocol):
    """Optimizer update: `update_(grads, opt_state, params, step, **info) -> (params, opt_state)`.

    It owns what it is given: it may write over the tensors of `params` and `opt_state`, or return new ones, because
    the caller has copied them (a pure step) or given them up (a donated one). So it is written once. Gradients are
    not written. If it returns new parameters in a donated step, the step copies them into the old ones. To put new
    tensors into `opt_state`, return a new dict, `{**opt_state, "count": count}`: the dict that it is given may also be
    that of other states.

    `grads` names the parameters to change; the others are returned unchanged. `step` is the number of earlier
    updates, which schedules depend on.

    Args:
        info: from a train step, the `metrics` and `buffers` of the gradients (see `Gradients`), the state's `seed`,
            `applied` (pass it on), `evaluate`, a function from params to `(loss, grads)` on the same batch, and `report`,
            a dict: scalars and metrics that an update puts into it are returned with those of the step. A skipped update
            reports nothing, and `ll.Window` averages over those that were made. (A compiled step reports the values that
            it has computed for the skipped one.) A function that does not take one of them is not passed it.
    """

    def __call__(self, grads: Grads, opt_state: Any, params: Params, step: int, **info: Any) -> Any: ...


class Decide(Protocol):
    """Optimizer decision: `decide(grads, opt_state, metrics) -> (flag, opt_state)`, before anything is written.

    `flag` says whether to update: a bool, or a 0-dim bool tensor, which the train step reads. `opt_state` goes to the
    update, or is kept if there is none. Put into it what is counted per batch rather than per update: skips, windows
    of losses, loss scales. It writes to nothing that it is given: changed entries go into a new dict,
    `{**opt_state, "skips": skips}`. What the optimizer cannot update is refused here. No gradients are recorded.

    A wrapper that skips updates combines its flag with the one of the optimizer that it wraps. Such wrappers can be
    nested, and the host still reads only one flag per step. On several ranks, decide by what all of them share, such as
    the gradients: the metrics are those of the rank's own batch, and ranks that decide differently end with different
    weights.

    >>> import dataclasses, looplib as ll, torch
    >>> def skip_small_gradients(optimizer, least):
    ...     def decide(grads, opt_state, metrics, **info):
    ...         flag, opt_state = optimizer.decide(grads, opt_state, metrics, **info)
    ...         return flag & (ll.grads.global_norm(grads.values()) >= least), opt_state
    ...     return dataclasses.replace(optimizer, decide=decide)
    >>> model, optimizer = torch.nn.Linear(2, 1), skip_small_gradients(ll.optimizer(torch.optim.SGD, lr=0.1), 10.0)
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> state, metrics = train_step(ll.init_state(model, optimizer), torch.ones(4, 2))
    >>> state.step, state.skipped
    (0, True)

    Args:
        info: the `params` and the `step` of the update. A function that does not take one of them is not passed it.
    """

    def __call__(self, grads: Grads, opt_state: Any, metrics: Metrics, **info: Any) -> tuple[Any, Any]: ...


Evaluation = Callable[[Params, dict[str, Tensor], Any], tuple[Params, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True, repr=False)
class Optimizer:
    """Optimizer: `init`, `decide` and `update_`.

    `ll.optimizer` makes one from a `torch.optim` class, and wrappers make one from another.

    Attributes:
        init, update_, decide: see `Init`, `Update` and `Decide`.
        evaluation: `evaluation(params, buffers, opt_state) -> (params, buffers)`, the weights to evaluate with if
            they differ from the trained ones, such as averages. See `eval_state`.
        hyperparameters: `hyperparameters(opt_state, step) -> {name: float}`, the values for the next update. See
            `ll.optim.hyperparameters`.
        description: the optimizer class and its settings as plain values, which checkpoints store.
        kernel: function that returns the name of torch's kernel used by the updates, for `repr`.
        call: the call that made it, for `repr`.
    """

    init: Callable[..., Any]
    update_: Callable[..., Any]
    decide: Callable[..., tuple[Any, Any]] = lambda grads, opt_state, metrics, **info: (True, opt_state)
    evaluation: Evaluation = lambda params, buffers, opt_state: (params, buffers)
    hyperparameters: Callable[[Any, int], dict[str, float]] = lambda opt_state, step: {}
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kernel: Callable[[], str] | None = None
    call: Call | None = dataclasses.field(default=None, init=False, compare=False)

    def update(
        self, grads: Grads, opt_state: Any, params: Params, step: int, **info: Any
    ) -> tuple[Params, Any, bool | Tensor]:
        """A pure update, for use by hand: `(params, opt_state, applied)`. It decides, copies, and updates the copies.

        >>> import looplib as ll, torch
        >>> sgd, params = ll.optimizer(torch.optim.SGD, lr=0.5), {"w": torch.ones(2)}
        >>> sgd.update({"w": torch.ones(2)}, sgd.init(params), params, 0)[0]
        {'w': tensor([0.5000, 0.5000])}

        `applied` is False if the optimizer has decided to skip the update. While a graph is traced it is a tensor.
        """
        return updates.update_by_hand(self, grads, opt_state, params, step, info)

    def __repr__(self) -> str:
        kernel = [] if self.kernel is None else [f"kernel: {self.kernel()}"]
        if self.call is not None:
            return "  # ".join([str(self.call), *kernel])
        settings = [f"{name}={value!r}" for name, value in self.description.items()]
        return f"Optimizer({', '.join([*settings, *kernel])})"

    def __post_init__(self) -> None:
        for name in ("init", "update_", "decide"):
            object.__setattr__(self, name, updates.ignore_extra_kwargs(getattr(self, name)))


_NOT_OF_AN_OPTIMIZER = {
    "step": "the train step makes the update, `state, metrics = train_step(state, batch)`",
    "zero_grad": "there is nothing to reset: gradients belong to the step that computed them",
    "state_dict": "its state is state.opt_state, which checkpoints hold; for a file that torch reads, "
    "ll.checkpoint.optimizer_state_dict(...)",
    "load_state_dict": "its state is state.opt_state, which ckpt.restore(state) loads; for one of torch's, "
    "ll.checkpoint.load_optimizer_state_dict(...)",
    "param_groups": "the learning rate is a function of the step; to read it, ll.optim.hyperparameters(optimizer, "
    "state), and to change it in a loop, lr=ll.optim.injected(...)",
    "lr": "ll.optim.hyperparameters(optimizer, state) gives the learning rate of the next update",
}
kinds_of_classes[Optimizer] = "optimizer"
errors.explain(
    Optimizer,
    "what ll.optimizer returns",
    _NOT_OF_AN_OPTIMIZER,
    "give {name}= to ll.optimizer, or a schedule, or lr=ll.optim.injected(...)",
)

Schedule = Callable[[int], float]
"""Schedule: a hyperparameter as a function of the number of updates made so far.

It gives the value itself. In a loop of your own, assign it, `group["lr"] = schedule(step)`; torch's `LambdaLR` multiplies by
it, so the torch optimizer must have `lr=1.0` there.

>>> import looplib as ll, torch
>>> def rising(step):
...     return 1e-4 * (step + 1)
>>> optimizer = ll.optimizer(torch.optim.SGD, lr=rising, momentum=lambda step: min(0.9, step / 100))
"""

Logger = Callable[[TrainState, Mapping[str, float]], None]
"""Logger: a function that logs values, given the state (for its counts) and a dict of names and floats.

>>> import looplib as ll
>>> def shout(state, values):
...     print(f"STEP {state.step}:", *(f"{name.upper()} {value}" for name, value in values.items()))
>>> ll.tee(shout, ll.console())(ll.TrainState(step=5), {"loss": 0.5})
STEP 5: LOSS 0.5
step      5  epoch      0  loss 0.5
"""


class TrainStep(Protocol):
    """Training step: `train_step(state, batch) -> (state, metrics)`.

    `make_train_step` returns one, and a wrapper like this is one:

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> def noisy_step(state, batch):
    ...     generator = torch.Generator().manual_seed(state.step)
    ...     return train_step(state, batch + 0.1 * torch.randn(batch.shape, generator=generator))
    >>> state, metrics = noisy_step(ll.init_state(model, optimizer), torch.ones(4, 2))
    """

    # The records are `Metric`s. Most are `Mean`s, whose `item()` a user's type checker is to accept.
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]: ...


class EvalStep(Protocol):
    """Evaluation step: `eval_step(state, batch) -> metrics`, as from `make_eval_step` or written by hand.

    >>> import looplib as ll, torch
    >>> def eval_step(state, batch):
    ...     return {"mean": ll.Mean(batch.sum(), len(batch))}
    >>> ll.evaluate(eval_step, ll.TrainState(), torch.arange(4.0).split(3))
    {'mean': 1.5}
    """

    def __call__(self, state: TrainState, batch: Any) -> dict[str, Any]: ...


class PredictStep(Protocol):
    """Prediction step: `predict_step(state, batch) -> outputs`, as from `make_predict_step` or written by hand.

    >>> import looplib as ll, torch
    >>> def predict_step(state, batch):
    ...     return 2 * batch
    >>> list(ll.predict(predict_step, ll.TrainState(), [torch.tensor([1.0, 2.0])]))
    [tensor([2., 4.])]
    """

    def __call__(self, state: TrainState, batch: Any) -> Any: ...
