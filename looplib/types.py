"""Types: the records and protocols that looplib's functions take and return."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, runtime_checkable

from torch import Tensor

from looplib._core import chain as chains
from looplib._core import errors, lease
from looplib._core.contracts import BatchPart as BatchPart
from looplib._core.contracts import Transformed as Transformed
from looplib._core.lease import TREES as TREES
from looplib._core.lease import DonatedStateError
from looplib._core.lease import check_state as check_state
from looplib._core.mappings import fields_of
from looplib._core.records import Call, kinds_of_classes
from looplib._core.torch_private import pytree
from looplib._core.trees import by_fields

__all__ = [
    "BatchPart",
    "DonatedStateError",
    "EvalStep",
    "GradFn",
    "Gradients",
    "Grads",
    "Init",
    "Logger",
    "LossFn",
    "Metric",
    "Metrics",
    "Optimizer",
    "Params",
    "Part",
    "PredictStep",
    "Role",
    "Run",
    "Schedule",
    "TrainState",
    "TrainStep",
    "Transform",
    "Transformed",
    "Update",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Record of a run: the settings that it was made with, as plain values.

    >>> import looplib as ll, torch
    >>> loader = ll.make_loader(range(8), batch_size=4)
    >>> state = ll.init_state(torch.nn.Linear(2, 1), loader=loader)
    >>> state.run.model, state.run.loaders[0]["batch_size"]
    ({'class': 'Linear', 'parameters': 3}, 4)

    `ll.init_state` makes it, and all states of the run hold the same record: it passes through steps, `replace`, copies,
    stacks and pytrees unchanged. Checkpoints store the settings of the optimizer and the loaders, and a restore compares
    them with those of the state that it is given. No comparison of states looks at the record, and states of different
    runs have the same pytree structure.

    Attributes:
        optimizer: settings of the optimizer, or None if the state has none.
        model: class, size and configuration of the model, or None if they are not known.
        loaders: settings of the looplib loaders that `init_state` was given (`Loader.description`), the first of which
            counts the batches of an epoch. Empty if it was given none.
        restored: path of the checkpoint from which the run was restored, or "".
        at_step: step of the restored state.
        saved_loaders: settings of the loaders in whose batches the position of the restored state is counted: those that
            the checkpoint stores, or those to whose batches the position has been converted.
        partly_read: an epoch, a batch, and a number of samples. The run had read these first samples of this batch, in
            batches of a different size, when its position was converted, so the loader leaves them out.
    """

    optimizer: Mapping[str, Any] | None = None
    model: Mapping[str, Any] | None = None
    loaders: tuple[Mapping[str, Any], ...] = ()
    restored: str = ""
    at_step: int = 0
    saved_loaders: tuple[Mapping[str, Any], ...] = ()
    partly_read: tuple[int, int, int] = (0, 0, 0)

    @property
    def known_loaders(self) -> tuple[Mapping[str, Any], ...]:
        """Settings of the loaders that `init_state` was given, or those that the checkpoint stores if it was given none."""
        return self.loaders or self.saved_loaders

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        return self  # a copied state belongs to the same run


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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
    seed belong to its structure. So does `run`, but structures that differ in nothing else are equal.

    Attributes:
        step: optimizer updates completed.
        epoch: epochs completed.
        batch: batches consumed in this epoch.
        epoch_length: batches in an epoch, or None for a stream.
        samples, batch_samples: samples consumed, and samples in the last batch.
        batch_steps: updates made on the last batch: usually 1, 0 if the update was skipped, more with `same_batch`.
        no_batch: True after an update that belongs to no batch (`ll.apply_gradients`), which `batch_steps` then counts.
            Predicates of samples and epochs do not fire for it.
        params, buffers: dicts of name -> tensor, as given by `named_parameters` and `named_buffers`. States of a run may hold
            the same dict, so leave its entries as they are: `replace(params={**state.params, name: tensor})`.
        opt_state: the optimizer's pytree. Leave its entries as they are, too: a donated step writes into whatever tensors lie
            there, also into those of another state that you have put there, and does not look.
        seed: int from which all randomness of the run is derived.
        extra: your own pytree (EMA weights, an early-stopping record, ...), checkpointed with the rest.
        run: record of the settings of the run (`ll.types.Run`), which all of its states share.

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
    params: lease.Tree[dict[str, Tensor]] = lease.Tree(dict)  # noqa: RUF009 (a descriptor, and no default)
    buffers: lease.Tree[dict[str, Tensor]] = lease.Tree(dict)  # noqa: RUF009 (a descriptor, and no default)
    opt_state: lease.Tree[Any] = lease.Tree()  # noqa: RUF009
    seed: int = 0
    extra: lease.Tree[Any] = lease.Tree()  # noqa: RUF009
    run: Run = dataclasses.field(default_factory=Run)

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

    def with_extra(self, **entries: Any) -> TrainState:
        """Return a copy with these entries of the dict `extra` added or changed. The other entries stay.

        >>> TrainState().with_extra(best=0.5).with_extra(tokens=100).extra
        {'best': 0.5, 'tokens': 100}

        Names that Python's arguments cannot have are given as `state.with_extra(**{"eval/loss": 0.5})`.

        Raises:
            TypeError: `extra` is neither None nor a dict.
            DonatedStateError: a step has written over a tensor in `extra` or in another field.
        """
        extra = self.extra
        if extra is not None and not isinstance(extra, dict):
            raise TypeError(
                f"with_extra changes entries of a dict, and the state's extra is a {type(extra).__name__}: write "
                "state.replace(extra=...), or keep it in a dict, extra={'name': value}"
            )
        return self.replace(extra={**(extra or {}), **entries})

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
        return TrainState, tuple(getattr(self, name) for name in FIELDS)

    if not TYPE_CHECKING:  # type checkers would take any attribute for one that there is

        def __getattr__(self, name: str) -> NoReturn:
            raise errors.missing(self, "a TrainState", name, _NOT_OF_A_STATE)


# `dataclass` makes one that says less, and takes none from the class.
TrainState.__setattr__ = errors.no_assignment("a TrainState", "write state = state.replace({name}=...)")  # type: ignore[method-assign]


def next_state(state: TrainState, under: lease.Lease | None, **changes: Any) -> TrainState:
    """The next state of a run, under this lease. Trees are given by the names of their attributes (`_params`).

    A call of the class takes longer, which a step of a small model would notice (1%).
    """
    new = object.__new__(TrainState)
    vars(new).update(vars(state), **changes)
    lease.Leased.__post_init__(new)
    lease.follows(new, state, under)
    return new


# What users of torch and of Trainers write -> what to write instead.
_NOT_OF_A_STATE = {
    "model": "the model is yours; ll.bind(model, state) copies the state's values into it",
    "optimizer": "the optimizer is what ll.optimizer returned; its moments are state.opt_state",
    "loss": "it is among the metrics, `state, metrics = train_step(state, batch)`",
    "lr": "ll.optim.hyperparameters(optimizer, state) gives the learning rate of the next update",
    "global_step": "it is state.step",
    "current_epoch": "it is state.epoch",
    "batch_idx": "it is state.batch, the number of batches of this epoch that were consumed",
    "parameters": "they are state.params, name -> tensor",
    "state_dict": "ll.checkpoint.state_dict(model, state) gives the model's",
    "load_state_dict": "ckpt.restore(state) loads a checkpoint; ll.checkpoint.load_state_dict(...) weights",
}
FIELDS = tuple(field.name for field in dataclasses.fields(TrainState))
COUNTS = tuple(name for name in FIELDS if name not in (*TREES, "run"))


# For torch, a state's trees are leaves and its counts are structure; for looplib, all fields but `run` are leaves.
# `torch.func` and `tree_map` therefore see only tensors, and a comparison sees every field but that one.


@dataclass(frozen=True)
class _Structure:
    """Context of a state in torch's pytrees. Those of different runs are equal."""

    present: tuple[str, ...]
    counts: dict[str, Any]
    run: Run = dataclasses.field(compare=False, default_factory=Run)


def _flatten(state: TrainState) -> tuple[list[Any], Any]:
    # None is a leaf in torch's pytrees, so a missing tree belongs to the structure.
    present = {name: tree for name in TREES if (tree := getattr(state, name)) is not None}
    return list(present.values()), _Structure(tuple(present), fields_of(state, COUNTS), state.run)


def _flatten_with_keys(state: TrainState) -> tuple[list[Any], Any]:
    children, structure = _flatten(state)
    return list(zip(map(pytree.GetAttrKey, structure.present), children, strict=True)), structure


def _unflatten(children: Iterable[Any], structure: Any) -> TrainState:
    return TrainState(**dict(zip(structure.present, children, strict=True)), **structure.counts, run=structure.run)


pytree.register_pytree_node(
    TrainState,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="looplib.TrainState",
    # In JSON, without the record of the run.
    to_dumpable_context=lambda structure: [structure.present, structure.counts],
    from_dumpable_context=lambda context: _Structure(tuple(context[0]), context[1]),
)
by_fields[TrainState] = tuple(name for name in FIELDS if name != "run")
kinds_of_classes[TrainState] = "state"


Params = dict[str, Tensor]
"""Parameters by name, as `named_parameters` gives them."""

Grads = dict[str, Tensor]
"""Gradients by the name of their parameter, as in `Gradients`."""

LossFn = Callable[[Any, Any], "Tensor | Metric | tuple[Any, Mapping[str, Any]]"]
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
        grads: name -> gradient of the mean loss; if the call was one of several (`part=`), of its summed loss divided by
            `normalizer`. The caller owns the tensors.
        metrics: name -> mergeable record. Always contains "loss".
        buffers: name -> tensor after the forward pass.
        samples: number of samples in the batch.
        weight: of this part of a batch, in samples or what a `Mean` counts; None if `grads` are already those of the mean
            loss. The gradient of a step's mean loss is the sum of `grads` times `normalizer` over the sum of weights.
        normalizer: the number by which the summed loss of a part was divided, the same for all parts of a step; else None.
        scale: the `scale` by which the loss was multiplied, which `grads` still contain; else None.
        copies: pairs of a buffer of the state and a copy of its value before a donated call has written it, so that
            `apply_gradients` can put it back if the update is skipped; None if there is nothing to put back.
    """

    grads: Grads
    metrics: dict[str, Metric]
    buffers: dict[str, Tensor]
    samples: int
    weight: Tensor | float | None = None
    normalizer: Tensor | float | None = None
    scale: Tensor | None = None
    copies: Sequence[tuple[Tensor, Tensor]] | None = None


class GradFn(Protocol):
    """Gradient function: `grad_fn(state, batch, **request) -> Gradients`, pure.

    `make_grad_fn` returns one. A wrapper takes one, returns another, and passes on what it is given by name. If it calls
    the inner one twice, a donated step writes to its buffers twice, as two forward passes of a raw loop do; with
    `donate=False`, a call leaves them alone:

    >>> import looplib as ll, torch
    >>> def halved(grad_fn):
    ...     def halved_grad_fn(state, batch, **request):
    ...         out = grad_fn(state, batch, **request)
    ...         return out._replace(grads={name: grad / 2 for name, grad in out.grads.items()})
    ...     return halved_grad_fn
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
    >>> halved(grad_fn)(ll.init_state(model), torch.ones(4, 2)).grads["weight"]
    tensor([[0.5000, 0.5000]])

    What acts on a gradient that is already there (clipping, skipping, averages) is a part of the update: see `ll.chain`.

    Args:
        index: index of the microbatch, which its random numbers depend on.
        scale: factor by which the loss is multiplied before the backward pass; `Gradients.scale` returns it.
        donate: True if the state's buffers may be overwritten, as a model in DDP or FSDP2 needs.
        in_step: True within a donated train step, which has copies of the buffers and puts them back if it fails. Otherwise,
            a donated call makes them (`Gradients.copies`).
        part: what is known of the whole batch, if this is one of several calls whose gradients are added up; else None. A
            gradient function that has no meaning for a part, such as one that adds noise, refuses it.
    """

    def __call__(
        self,
        state: TrainState,
        batch: Any,
        *,
        index: int = 0,
        scale: Tensor | None = None,
        donate: bool = False,
        in_step: bool = False,
        part: BatchPart | None = None,
    ) -> Gradients: ...


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
    >>> ll.compute(ll.metrics.merge({"largest": Largest(2.0)}, {"largest": Largest(5.0)}))
    {'largest': 5.0}
    """

    def merge(self, other: Any) -> Any:
        """Combine two records into the record of their samples together."""

    def compute(self) -> Any:
        """Return the value: a number or a tensor with one element."""


Metrics = Mapping[str, Metric]
"""Metrics of a batch by name, as a step returns them; `ll.compute` turns them into numbers."""


class Record(Protocol):
    """The part of a `Mean` that type checkers know of a metric in a step's result, most of which are `Mean`s."""

    @property
    def total(self) -> Any: ...
    @property
    def weight(self) -> Any: ...
    def merge(self, *others: Any) -> Any: ...
    def compute(self) -> Any: ...
    def item(self) -> float: ...
    def __float__(self) -> float: ...


class Init(Protocol):
    """First state of a part of an update: `init(params, **extra) -> state`, a pytree with a fixed structure.

    It is one of torch's pytrees: dicts, lists, tuples, and the classes that are registered with them. looplib does not look
    into other containers (`UserDict`), so states would share the tensors in them.

    `extra` holds `buffers`, name -> tensor, when `init_state` calls it.
    """

    def __call__(self, params: Params, **extra: Any) -> Any: ...


class Transform(Protocol):
    """First half of an update: `transform(grads, state, params, step, **info) -> Transformed`, before anything is written.

    It returns `Transformed(grads, state, apply=..., carry=..., metrics=...)`: the gradients, changed or not; the state of
    this part, kept even if the update is skipped, so put into it what is counted for each batch; whether to update; a value
    for the second half; and what to report. What cannot be updated is refused here. It writes neither to `params` nor to
    `state`: changed entries go into a new dict, `{**state, "skips": skips}`. It may write over `grads` if the part changes
    gradients (`role="gradients"`, the default). No gradients are recorded.

    The host reads the flags of all parts at once. On several ranks, decide by what all of them share, such as the
    gradients: the metrics are those of the rank's own batch, and ranks that decide differently end with different weights.

    >>> import looplib as ll, torch
    >>> def skip_small(least):
    ...     def transform(grads, state, params, step, **info):
    ...         return ll.types.Transformed(grads, apply=ll.optim.global_norm(grads.values()) >= least)
    ...     return ll.optim.part("skip_small", transform=transform)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.chain(skip_small(10.0), ll.optimizer(torch.optim.SGD, lr=0.1))
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> state, metrics = train_step(ll.init_state(model, optimizer), torch.ones(4, 2))
    >>> state.step, state.skipped
    (0, True)

    Args:
        grads: name -> gradient, of the parameters to change.
        state: this part's own, as `init` or its last call has returned it; None if it keeps none.
        params: name -> tensor.
        step: number of earlier updates, which schedules depend on.
        info: `metrics`, those of the gradients, and `seed`, the state's. Take `**info`, or exactly those that you use.
    """

    def __call__(self, grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Transformed: ...


class Update(Protocol):
    """Second half of an update: `update_(grads, state, params, step, **info) -> (params, state)`.

    It owns what it is given: it may write over the tensors of `params` and `state`, or return new ones, because
    the caller has copied them (a pure step) or given them up (a donated one). So it is written once. Gradients are
    not written. If it returns new parameters in a donated step, the step copies them into the old ones. To put new
    tensors into `state`, return a new dict, `{**state, "count": count}`.

    `grads` names the parameters to change; the others are returned unchanged. Parts write in the order of the chain, and
    each sees what the ones before it wrote.

    A third value, if it returns one, is a dict of scalars and metrics to report with those of the step. One whose name the step
    has already is reported as `<name>/update`. A skipped update reports nothing, and `ll.Window` averages over those that were
    made. (A compiled step reports the values that it has computed for the skipped one.)

    Args:
        info: from a train step, the `metrics` and `buffers` of the gradients (see `Gradients`), the state's `seed`,
            `carry`, what this part's `transform` has handed over, `applied`, the flags of the update, and `evaluate`, a
            function from params to `(loss, grads)` on the same batch. Take `**info`, or exactly those that you use. Where one is
            not known, as `evaluate` in a graph, it is None, or with `**info` missing.
    """

    def __call__(self, grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Any: ...


Evaluation = Callable[[Params, dict[str, Tensor], Any], tuple[Params, dict[str, Tensor]]]

Role = Literal["judge", "gradients", "weights", "after"]
"""Role of a part of an update, which decides where it may stand in a chain.

- `"judge"` looks at the gradients as they entered the chain and decides whether to update. It runs before the others.
- `"gradients"` changes gradients, or decides by them as they are there: behind clipping, by the clipped ones. It stands before
  the weights.
- `"weights"` writes parameters from gradients. There is one; `ll.optim.partition` has one for each label.
- `"after"` follows the weights: averages, projections.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of an update, as `ll.optim.part` makes it.

    Attributes:
        role: see `Role`.
        init: first state of the part, or None if it keeps none. See `Init`.
        transform, update_: its two halves, or None. See `Transform` and `Update`.
        evaluation: `evaluation(params, buffers, state) -> (params, buffers)`, the weights to evaluate with if
            they differ from the trained ones, such as averages. See `eval_state`.
        hyperparameters: `hyperparameters(state, step) -> {name: float}`, the values for the next update. See
            `ll.optim.hyperparameters`.
        description: settings as plain values, which checkpoints store.
        kernel: function that returns the name of torch's kernel used by the updates, for `repr`.
        loss_scale: `loss_scale(state) -> Tensor`, of the part that scales losses.
        unscale: `unscale(grads, scale)`, which divides gradients by it in place.
        evaluates: True if `update_` evaluates the loss at other parameters, as LBFGS does.
        by_parameter: True if all that the update of a parameter reads and writes is in the state's `["state"][name]`, and the
            tensors there are written in place: some parameters may then be updated before others. See `ll.optim.offload_state`.
        for_graphs: the part as operations on tensors alone, which runs in its place while a step is traced into a graph.
            None for a part whose halves are such operations already. A part of yours runs its halves without seeding there,
            since a graph draws for the state's seed when it runs.
    """

    role: Role
    init: Callable[..., Any] | None = None
    transform: Callable[..., Transformed] | None = None
    update_: Callable[..., Any] | None = None
    evaluation: Evaluation | None = None
    hyperparameters: Callable[[Any, int], dict[str, float]] | None = None
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kernel: Callable[[], str] | None = None
    loss_scale: Callable[[Any], Tensor] | None = None
    unscale: Callable[[Grads, Tensor], None] | None = None
    evaluates: bool = False
    by_parameter: bool = False
    for_graphs: Part | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Optimizer:
    """Update: named parts, whose first halves read and whose second halves write. `ll.chain` puts several together.

    `ll.optimizer`, `ll.ema` and `ll.clip_by_global_norm` return one with a single part. The methods `init`, `transform`,
    `update_`, `evaluation` and `hyperparameters` are those of all parts together, with the arguments of a part's own, so that
    a part may contain an optimizer without knowing its parts.

    Attributes:
        parts: name -> part, in order.
        call: the call that made it, for `repr`.
    """

    parts: Mapping[str, Part]
    call: Call | None = dataclasses.field(default=None, compare=False)
    _firsts: Sequence[tuple[str, Part]] = dataclasses.field(init=False, compare=False)
    _seconds: Sequence[tuple[str, Part]] = dataclasses.field(init=False, compare=False)
    _keys: Mapping[str, None] = dataclasses.field(init=False, compare=False)
    _scaler: tuple[str, Part] | None = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.parts, Mapping):
            raise TypeError(
                f"an Optimizer is made of named parts, found {self.parts!r}: write ll.optim.part(name, init=..., update_=..., "
                "role='weights') for one of your own"
            )
        firsts = [(name, part) for name, part in self.parts.items() if part.transform is not None]
        firsts.sort(key=lambda named: named[1].role != "judge")
        object.__setattr__(self, "_firsts", firsts)
        object.__setattr__(
            self, "_seconds", [named_part for named_part in self.parts.items() if named_part[1].update_ is not None]
        )
        keys = dict.fromkeys(name for name, part in self.parts.items() if part.init is not None)
        object.__setattr__(self, "_keys", keys)
        scalers = [named_part for named_part in self.parts.items() if named_part[1].loss_scale is not None]
        object.__setattr__(self, "_scaler", scalers[0] if scalers else None)

    def init(self, params: Params, **extra: Any) -> dict[str, Any]:
        """First state: a dict with an entry for each part that keeps one."""
        if not extra.keys() <= _OF_INIT:
            raise chains.unknown_names("init", extra, _OF_INIT)
        if not isinstance(params, Mapping):
            raise TypeError(
                f"params are a {type(params).__name__}: give name -> tensor, such as state.params or "
                "dict(model.named_parameters())"
            )
        return {name: part.init(params, **extra) for name, part in self.parts.items() if part.init is not None}

    def fits(self, opt_state: Any) -> bool:
        """True if a state has an entry for each part that keeps one, and no other."""
        return type(opt_state) is dict and opt_state.keys() == self._keys.keys()

    def transform(self, grads: Grads, opt_state: Any, params: Params, step: int, **info: Any) -> Transformed:
        """The first halves of all parts, in order. Raises ValueError for a state of another optimizer.

        `scale=` says that these are gradients of a loss that was multiplied by it (`dynamic_loss_scale`), and `owned=True`
        that they may be written.
        """
        if not info.keys() <= _OF_AN_UPDATE:
            raise chains.unknown_names("transform", info, _OF_AN_UPDATE)
        # As `fits`, whose call would take as long as the comparison.
        if type(opt_state) is not dict or opt_state.keys() != self._keys.keys():
            raise chains.wrong_state(opt_state, repr(self), self._keys)
        scale = info.pop("scale", None)  # which no part is given
        if scale is not None or self._scaler is not None:
            grads = chains.unscaled(self._scaler, scale, grads, info.get("owned", False))
            info["owned"] = True
        return chains.transform(self._firsts, grads, opt_state, params, step, info)

    def update_(
        self, grads: Grads, opt_state: Any, params: Params, step: int, **info: Any
    ) -> tuple[Params, Any, dict[str, Any]]:
        """The second halves of all parts, in order, on tensors that they may write: parameters, state, and reports."""
        if not info.keys() <= _OF_AN_UPDATE:
            raise chains.unknown_names("update_", info, _OF_AN_UPDATE)
        return chains.update_(self._seconds, grads, opt_state, params, step, info)

    def update(
        self, grads: Grads, opt_state: Any, params: Params, step: int, *, scale: Any = None, **info: Any
    ) -> tuple[Params, Any, bool | Tensor]:
        """A pure update, for use by hand: `(params, opt_state, applied)`. It decides, copies, and updates the copies.

        >>> import looplib as ll, torch
        >>> sgd, params = ll.optimizer(torch.optim.SGD, lr=0.5), {"w": torch.ones(2)}
        >>> sgd.update({"w": torch.ones(2)}, sgd.init(params), params, 0)[0]
        {'w': tensor([0.5000, 0.5000])}

        `applied` is False if the optimizer has decided to skip the update. While a graph is traced it is a tensor.
        """
        return chains.update_by_hand(self, grads, opt_state, params, step, scale, info)

    def evaluation(self, params: Params, buffers: Params, opt_state: Any) -> tuple[Params, Params]:
        """Weights and buffers to evaluate with: those of the last part that has its own. See `ll.eval_state`.

        Raises ValueError for a state of another optimizer, as `hyperparameters` does.
        """
        if not self.fits(opt_state):
            raise chains.wrong_state(opt_state, repr(self), self._keys)
        for name, part in self.parts.items():
            if part.evaluation is not None:
                params, buffers = part.evaluation(params, buffers, opt_state.get(name))
        return params, buffers

    def hyperparameters(self, opt_state: Any, step: int) -> dict[str, float]:
        """Values for the next update. See `ll.optim.hyperparameters`."""
        if not self.fits(opt_state):
            raise chains.wrong_state(opt_state, repr(self), self._keys)
        return chains.named_reports(
            {
                name: part.hyperparameters(opt_state.get(name), step)
                for name, part in self.parts.items()
                if part.hyperparameters is not None
            }
        )

    def loss_scale(self, opt_state: Any) -> Tensor | None:
        """The factor by which the loss is to be multiplied, or None. See `ll.optim.dynamic_loss_scale`."""
        if self._scaler is None:
            return None
        name, part = self._scaler
        if type(opt_state) is not dict or name not in opt_state:
            raise chains.wrong_state(opt_state, repr(self), self._keys)
        scale: Tensor = part.loss_scale(opt_state[name])  # type: ignore[misc]
        return scale

    @property
    def description(self) -> dict[str, Any]:
        """Settings of each part as plain values, which checkpoints store."""
        return {name: dict(part.description) for name, part in self.parts.items()}

    def __repr__(self) -> str:
        kernels = [f"kernel: {part.kernel()}" for part in self.parts.values() if part.kernel is not None]
        shown = f"Optimizer({', '.join(self.parts)})" if self.call is None else str(self.call)
        return "  # ".join([shown, *kernels])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise errors.missing(self, "what ll.optimizer returns", name, _NOT_OF_AN_OPTIMIZER)


# What a step gives the parts of its update by name, of which each takes what it needs. Any other name is refused.
_OF_INIT = frozenset({"buffers"})
_OF_AN_UPDATE = frozenset({"metrics", "seed", "owned", "scale", "buffers", "applied", "evaluate", "carry"})

_NOT_OF_AN_OPTIMIZER = {
    "step": "the train step makes the update, `state, metrics = train_step(state, batch)`",
    "zero_grad": "there is nothing to reset: gradients belong to the step that computed them",
    "state_dict": "its state is state.opt_state, which checkpoints hold; for a file that torch reads, "
    "ll.checkpoint.optimizer_state_dict(...)",
    "load_state_dict": "its state is state.opt_state, which ckpt.restore(state) loads; for one of torch's, "
    "ll.checkpoint.load_optimizer_state_dict(...)",
    "param_groups": "the learning rate is a function of the step; to read it, ll.optim.hyperparameters(optimizer, "
    "state), and to change it in a loop, lr=ll.optim.inject(...)",
    "lr": "ll.optim.hyperparameters(optimizer, state) gives the learning rate of the next update",
}
# A method in the class would hide the one that `frozen=True` makes from type checkers, which report an assignment by it.
Optimizer.__setattr__ = errors.no_assignment(  # type: ignore[method-assign]
    "what ll.optimizer returns", "give {name}= to ll.optimizer, or a schedule, or lr=ll.optim.inject(...)"
)
kinds_of_classes[Optimizer] = "optimizer"

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

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Record | Any]]: ...


class EvalStep(Protocol):
    """Evaluation step: `eval_step(state, batch) -> metrics`, as from `make_eval_step` or written by hand.

    >>> import looplib as ll, torch
    >>> def eval_step(state, batch):
    ...     return {"mean": ll.Mean(batch.sum(), len(batch))}
    >>> ll.evaluate(eval_step, ll.TrainState(), torch.arange(4.0).split(3))
    {'mean': 1.5}
    """

    def __call__(self, state: TrainState, batch: Any) -> dict[str, Record | Any]: ...


class PredictStep(Protocol):
    """Prediction step: `predict_step(state, batch) -> outputs`, as from `make_predict_step` or written by hand.

    >>> import looplib as ll, torch
    >>> def predict_step(state, batch):
    ...     return 2 * batch
    >>> list(ll.predict(predict_step, ll.TrainState(), [torch.tensor([1.0, 2.0])]))
    [tensor([2., 4.])]
    """

    def __call__(self, state: TrainState, batch: Any) -> Any: ...
