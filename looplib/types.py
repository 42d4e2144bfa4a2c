"""The contracts: everything in looplib is a function of one of these types, or from one of them to the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from looplib._core import ownership, records, updates
from looplib._core.engines import NO_CONTEXT, Context
from looplib._core.kinds import instances_are

__all__ = [
    "DonatedStateError",
    "EvalStep",
    "GradFn",
    "Gradients",
    "Grads",
    "Init",
    "LossFn",
    "Metric",
    "Metrics",
    "Optimizer",
    "Params",
    "Part",
    "PredictStep",
    "Schedule",
    "Sink",
    "TrainState",
    "TrainStep",
    "Update",
]


class DonatedStateError(RuntimeError):
    """A state was touched whose tensors a donated step has since written over."""


@instances_are("state")
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrainState(ownership.Marked):
    """A training run at one moment, immutable.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.1), epoch_length=10)
    >>> state
    TrainState(step=0, epoch=0, batch=0/10, samples=0, params=2 tensors (3 numbers), seed=0)
    >>> state.replace(step=7).step
    7

    It is a pytree: the tensors of `params`, `buffers`, `opt_state` and `extra` are its leaves, the counts and
    the seed belong to its structure, so that `torch.func` and `tree_map` see tensors alone.

    Attributes:
        step: optimizer updates completed.
        epoch: epochs completed.
        batch: batches consumed in this epoch.
        epoch_length: batches in an epoch, or None for a stream.
        samples: examples consumed.
        batch_samples: examples in the batch consumed last.
        batch_steps: updates made on the batch consumed last: 1, or 0 if it was skipped, or more (`same_batch`).
        params, buffers: name -> tensor, as `named_parameters` and `named_buffers` give them.
        opt_state: the optimizer's pytree.
        seed: what all randomness of the run comes from.
        extra: the user's own pytree (EMA weights, an early-stopping record, ...), checkpointed with the rest.

    Raises:
        DonatedStateError: when `params`, `buffers`, `opt_state` or `extra` is read after a donated step wrote
            over one of its tensors.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    epoch_length: int | None = None
    samples: int = 0
    batch_samples: int = 0
    batch_steps: int = 1
    params: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    opt_state: Any = None
    seed: int = 0
    extra: Any = None

    def __post_init__(self) -> None:
        _record.mark(self)

    @property
    def skipped(self) -> bool:
        """Whether the batch consumed last made no update, so that `step` did not move."""
        return self.batch_steps == 0

    def replace(self, **changes: Any) -> TrainState:
        """A copy with these fields changed; it shares every tensor that is not.

        >>> TrainState(step=3).replace(step=4, extra={"note": "kept"}).extra
        {'note': 'kept'}

        What is computed from parameters that require a gradient has a graph behind it, which steps refuse unless they
        are `ll.transforms.differentiable`: write `with torch.no_grad():` around, as in a raw loop.

        Raises:
            TypeError: a field that a TrainState does not have.
            DonatedStateError: a field that is not changed was donated.
        """
        if unknown := changes.keys() - set(FIELDS):
            raise TypeError(f"a TrainState has no field {sorted(unknown)}; it has {', '.join(FIELDS)}")
        return _record.replaced(self, changes)

    def __repr__(self) -> str:
        return records.summary(self, _record.is_spent(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainState, tuple(getattr(self, name) for name in FIELDS)


TREES = ("params", "buffers", "opt_state", "extra")  # of tensors; the rest are counts and settings


_record = ownership.Guarded(TrainState, TREES, DonatedStateError)


FIELDS, COUNTS = _record.fields, _record.counts


records.register(TrainState, FIELDS, TREES)


# For steps: states whose marks are known.
counts_of, made, written, unwritten = _record.counts_of, _record.made, _record.written, _record.unwritten


Grads = dict[str, Tensor]


LossFn = Callable[[Any, Any], Any]


class Gradients(NamedTuple):
    """What a `GradFn` returns.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> out = ll.make_grad_fn(model, lambda model, x: model(x).mean())(ll.init_state(model), torch.ones(4, 2))
    >>> out.grads["weight"], out.samples, sorted(out.metrics)
    (tensor([[1., 1.]]), 4, ['loss'])

    A wrapper changes what it is about and keeps the rest: `out._replace(grads=...)`.

    Attributes:
        grads: name -> gradient of the mean loss; with `Part.reduction` "sum", of the summed loss over `normalizer`.
            The tensors are the caller's own.
        metrics: name -> mergeable record; holds "loss".
        buffers: name -> the buffers after the forward pass.
        samples: samples in the batch.
        weight: what the summed loss is to be divided by; None when `grads` are the mean's already.
        normalizer: what the summed loss was divided by already.
        ranks: of how many ranks `grads` are the average, which an engine such as DDP has taken.
        params: name -> parameters that the forward pass itself has written, such as those of
            `nn.Embedding(max_norm=...)`, as they are after it; None for most models.
        finish: `finish(state, gradients)` makes one gradient of all ranks' sums, where an engine has sent nothing yet
            (see `retry_on_oom`); else None.
    """

    grads: Grads
    metrics: dict[str, Metric]
    buffers: dict[str, Tensor]
    samples: int
    weight: Tensor | float | None = None
    normalizer: Tensor | float = 1.0
    ranks: int = 1
    params: Params | None = None
    finish: Callable[[TrainState, Gradients], Gradients] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One microbatch of an optimizer step, or all of it: what a `GradFn` is asked for.

    A wrapper hands it on to the function that it wraps, as it is or changed by `dataclasses.replace(part, ...)`.

    >>> import looplib as ll
    >>> ll.types.Part(index=2, reduction="sum").reduction
    'sum'

    Attributes:
        index: the microbatch's, which its random numbers depend on.
        reduction: "mean" for the gradient of the mean loss; "sum" for that of the summed loss over `normalizer`,
            together with its weight.
        normalizer: what summed losses are divided by, so that gradients of half precision stay as small as a mean's;
            None to let the function choose: the step's samples where they are known, else the microbatch's own weight
            (at least 1).
        scale: multiplies the loss before the backward pass.
        donate: whether the state's buffers may be written in place.
        context: what looplib's own functions tell each other. It makes no promises; hand it on.
    """

    index: int = 0
    reduction: Literal["mean", "sum"] = "mean"
    normalizer: Tensor | float | None = None
    scale: Tensor | None = None
    donate: bool = False
    context: Context = NO_CONTEXT

    @property
    def summed(self) -> bool:
        """Whether the gradient of the summed loss is asked for, with its weight."""
        return self.reduction == "sum"


WHOLE = Part()


class GradFn(Protocol):
    """`grad_fn(state, batch, part=Part()) -> Gradients`, pure.

    What `make_grad_fn` returns, and what wraps it, which hands `part` on:

    >>> import looplib as ll, torch
    >>> def halved(grad_fn):
    ...     def halved_grad_fn(state, batch, part=ll.types.Part()):
    ...         out = grad_fn(state, batch, part)
    ...         return out._replace(grads={name: grad / 2 for name, grad in out.grads.items()})
    ...     return halved_grad_fn
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
    >>> halved(grad_fn)(ll.init_state(model), torch.ones(4, 2)).grads["weight"]
    tensor([[0.5000, 0.5000]])
    """

    def __call__(self, state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients: ...


@runtime_checkable
class Metric(Protocol):
    """What `merge` and `compute` accept: a record with these two methods, such as `Mean`.

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
        """The record of both parts together."""

    def compute(self) -> Any:
        """The value: a number or a tensor of one element."""


Metrics = Mapping[str, Metric]


Params = dict[str, Tensor]


class Init(Protocol):
    """`init(params, **extra) -> opt_state`, a pytree whose structure stays the same for the whole run.

    `extra` holds `buffers`, name -> tensor, when `init_state` calls.
    """

    def __call__(self, params: Params, **extra: Any) -> Any: ...


class Update(Protocol):
    """`update(grads, opt_state, params, step, donate=False, when=True, **extra) -> (params, opt_state, applied)`.

    `grads` names the parameters to change; the others are handed through. `step` counts the updates before this one:
    schedules are functions of it. `applied` says whether an update was made, since `state.step` counts those: a bool,
    or a 0-dim bool tensor, which the train step reads. A wrapper returns what the inner optimizer said.

    All after `step` are keyword arguments, which an update may leave out:

    Args:
        donate: the tensors of `params` and `opt_state` may be written in place. An update without it makes new ones,
            in donated steps too, so that a state bound to a module leaves it.
        when: a bool or a 0-dim bool tensor: where it is not set, `params` and `opt_state` come back as they were,
            and `applied` is False. An update without it is simply not called then, or its result not taken.
        extra: `metrics` and `buffers` of the gradients (`Gradients`), the state's `seed`, and `evaluate`, a function
            from params to `(loss, grads)` of the same batch, when a train step calls.

    So a wrapper that skips updates has one line to add, which works donated (the flag is read before anything is
    written over), compiled and vectorized (the graph chooses), and in other such wrappers, with one flag to read for
    all of them:

    >>> import dataclasses, looplib as ll, torch
    >>> def skip_small_losses(optimizer, least):
    ...     def update(grads, opt_state, params, step, *, when=True, **extra):
    ...         when = when & (extra["metrics"]["loss"].compute() >= least)
    ...         return optimizer.update(grads, opt_state, params, step, when=when, **extra)
    ...     return dataclasses.replace(optimizer, update=update)
    >>> model, optimizer = torch.nn.Linear(2, 1), skip_small_losses(ll.optimizer(torch.optim.SGD, lr=0.1), 10.0)
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> state, metrics = train_step(ll.init_state(model, optimizer), torch.ones(4, 2))
    >>> state.step, state.skipped
    (0, True)

    What a wrapper keeps in a state of its own it chooses by `ll.optim.where(applied, new, old)`.
    """

    def __call__(
        self,
        grads: Grads,
        opt_state: Any,
        params: Params,
        step: int,
        *,
        donate: bool = False,
        when: bool | Tensor = True,
        **extra: Any,
    ) -> tuple[Params, Any, bool | Tensor]: ...


Evaluation = Callable[[Params, dict[str, Tensor], Any], tuple[Params, dict[str, Tensor]]]


Numbers = Callable[[Any, int], dict[str, float]]


def _as_they_are(params: Params, buffers: dict[str, Tensor], opt_state: Any) -> tuple[Params, dict[str, Tensor]]:
    return params, buffers


def _none_known(opt_state: Any, step: int) -> dict[str, float]:
    return {}


@instances_are("optimizer")
@dataclass(frozen=True, slots=True, repr=False)
class Optimizer:
    """A pair of pure functions; `ll.optimizer` makes one of a `torch.optim` class, wrappers one of another.

    Functions that take no `**extra` are given none, and an `update` without `when` is made to take it.

    Attributes:
        init: `init(params, **extra) -> opt_state`, a pytree; `extra` holds `buffers`.
        update: `update(grads, opt_state, params, step, donate=False, when=True, **extra) -> (params, opt_state,
            applied)`; `step` counts the updates before this one; see `Update`.
        evaluation: `evaluation(params, buffers, opt_state) -> (params, buffers)`, the weights to evaluate with, where
            those are others than the weights that are trained (averages); see `eval_state`.
        hyperparameters: `hyperparameters(opt_state, step) -> {name: float}`, those of the next update; see
            `ll.optim.hyperparameters`.
        description: the optimizer class and its settings as plain values, which checkpoints hold.
        kernel: says which of torch's kernels the updates take, for `repr`.
    """

    init: Init
    update: Update
    evaluation: Evaluation = _as_they_are
    hyperparameters: Numbers = _none_known
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kernel: Callable[[], str] | None = None

    def __repr__(self) -> str:
        settings = [f"{name}={value!r}" for name, value in self.description.items()]
        kernel = [] if self.kernel is None else [f"kernel: {self.kernel()}"]
        return f"Optimizer({', '.join([*settings, *kernel])})"

    def __post_init__(self) -> None:
        object.__setattr__(self, "init", updates.with_known_arguments(self.init))
        object.__setattr__(self, "update", updates.conditional(self.update))


Schedule = Callable[[int], float]


"""A hyperparameter as a function of the updates made so far.

>>> import looplib as ll, torch
>>> def rising(step):
...     return 1e-4 * (step + 1)
>>> optimizer = ll.optimizer(torch.optim.SGD, lr=rising, momentum=lambda step: min(0.9, step / 100))
"""


Sink = Callable[[TrainState, Mapping[str, float]], None]


"""Where numbers go: a function of the state that they are of, for its counts, and of names and values.

>>> import looplib as ll
>>> def shout(state, values):
...     print(f"STEP {state.step}:", *(f"{name.upper()} {value}" for name, value in values.items()))
>>> ll.tee(shout, ll.console())(ll.TrainState(step=5), {"loss": 0.5})
STEP 5: LOSS 0.5
step      5  epoch      0  loss 0.5
"""


class TrainStep(Protocol):
    """`train_step(state, batch) -> (state, metrics)`.

    What `make_train_step` returns, and any function like it, such as one around it:

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> def noisy_step(state, batch):
    ...     generator = torch.Generator().manual_seed(state.step)
    ...     return train_step(state, batch + 0.1 * torch.randn(batch.shape, generator=generator))
    >>> state, metrics = noisy_step(ll.init_state(model, optimizer), torch.ones(4, 2))
    """

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]: ...


class EvalStep(Protocol):
    """`eval_step(state, batch) -> metrics`.

    What `make_eval_step` returns, and any function like it:

    >>> import looplib as ll, torch
    >>> def eval_step(state, batch):
    ...     return {"mean": ll.Mean(batch.sum(), len(batch))}
    >>> ll.evaluate(eval_step, ll.TrainState(), torch.arange(4.0).split(3))
    {'mean': 1.5}
    """

    def __call__(self, state: TrainState, batch: Any) -> dict[str, Metric]: ...


class PredictStep(Protocol):
    """`predict_step(state, batch) -> outputs`.

    What `make_predict_step` returns, and any function like it:

    >>> import looplib as ll, torch
    >>> def predict_step(state, batch):
    ...     return 2 * batch
    >>> list(ll.predict(predict_step, ll.TrainState(), [torch.tensor([1.0, 2.0])]))
    [tensor([2., 4.])]
    """

    def __call__(self, state: TrainState, batch: Any) -> Any: ...
