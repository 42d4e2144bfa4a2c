"""Train, eval and predict steps.

A train step takes a state and a batch and returns the next state and the metrics. It is pure: it leaves its inputs
unchanged. With `donate=True` it may reuse the old state's memory for the new one, and the old state can no longer be
used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import modules as _modules
from looplib._core import torch_private
from looplib._core.chain import any_of, flags_in_graph, update_where
from looplib._core.checks import check, named
from looplib._core.errors import fold, with_advice
from looplib._core.forward_writes import put_back
from looplib._core.lease import overwritten, trees_of
from looplib._core.misuse import LossWatch, Watch
from looplib._core.passes import passes
from looplib._core.ranks import rank
from looplib._core.records import Made, check_function_of_model, record_of, with_record, with_repr, without_record
from looplib._core.samples import as_counter
from looplib._objective import check_no_counts, loss_over_ranks, record, split_loss, without_skipped
from looplib.gradients import EVALUATED, check_history
from looplib.grads.wrapping import DROPPED, check_summed
from looplib.metrics import Mean
from looplib.optim.chains import check_writes
from looplib.types import (
    EvalStep,
    GradFn,
    Gradients,
    Metric,
    Optimizer,
    Params,
    PredictStep,
    TrainState,
    TrainStep,
)
from looplib.updates import UpdateKind, copied_where_shared, snapshot_of, undo, update, with_late_report, with_report

__all__ = ["make_eval_step", "make_predict_step", "make_train_step"]


S = TypeVar("S", bound=Callable[..., Any])


class Outcome(NamedTuple):
    """Result of a step before its counts are updated."""

    params: dict[str, Tensor]
    opt_state: Any
    buffers: dict[str, Tensor]
    metrics: dict[str, Metric]
    samples: int
    applied: bool | Tensor = True  # True if an update was made


@dataclass(frozen=True)
class StepSpec:
    """Components of a step, for transforms that build another step from it; `spec` of its record.

    Attributes:
        kind: "train", "eval" or "predict".
        for_graphs: the step without its counts, in the form that is traced.
        watched: the functions that it calls.
        donate, same_batch: as passed to `make_train_step`.
        compiler: of its graphs, if it runs as a graph (`transforms._compile_step.Compiler`).
        count_samples: counts the samples in a batch of an eval or predict step.
    """

    kind: Literal["train", "eval", "predict"]
    for_graphs: Callable[[TrainState, Any], Outcome]
    watched: tuple[Any, ...]
    donate: bool = False
    same_batch: bool = False
    compiler: Any = None
    count_samples: Callable[[Any], int] | None = None


def with_spec(step: S, spec: StepSpec) -> S:
    """The step, with a record of its components."""
    name = f"make_{spec.kind}_step"
    return with_record(step, Made(f"{spec.kind}_step", name, spec=spec, count_samples=spec.count_samples))


def spec_of(step: object, transform: str) -> StepSpec:
    """Components of a step. Raises TypeError, naming the transform, for a function that is no step of looplib."""
    record = record_of(step)
    if record is None or record.spec is None:
        raise TypeError(
            f"{transform} got a {type(step).__name__} that is no step of looplib; give what ll.make_train_step, "
            "ll.make_eval_step or ll.make_predict_step returned, and put wrappers of your own around the result"
        )
    return cast(StepSpec, record.spec)


@with_advice("write ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)")
def make_train_step(
    grad_fn: GradFn,
    optimizer: Optimizer,
    *,
    donate: bool = False,
    same_batch: bool = False,
) -> TrainStep:
    """Make a training step: a function from a state and a batch to the next state and its metrics.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.make_train_step(grad_fn, optimizer)
    >>> start = ll.init_state(model, optimizer)
    >>> state, metrics = train_step(start, torch.ones(4, 2))
    >>> state.step, state.samples, start.step
    (1, 4, 0)
    >>> sorted(ll.compute(metrics))
    ['loss']

    Keep the returned state. The old one stays at its own step, and without `donate` the module's weights do not
    change either: use `ll.bind(model, state)` before saving the module. Wrap the step with `ll.compile_step` to
    compile it into one graph, or with `ll.vmap_step` to train many members at once.

    Args:
        grad_fn: from `make_grad_fn`, with or without wrappers.
        optimizer: from `ll.optimizer` or `ll.chain`. Use the one that created the state.
        donate: if True, write the new state over the old one, for the speed and memory of an in-place loop.
            Afterwards the old state, and every state that shares a tensor with it (trained parameters, all buffers, the
            optimizer's state), raises DonatedStateError. The forward pass may write to parameters then, as in a raw loop,
            such as a momentum encoder's: these writes stay even if the update is skipped or the step fails, and the old
            state is spent. (torch counts no writes through `param.data` and by fused kernels. If the update is skipped after
            such a write, the old state can still be read, with the written values.)
        same_batch: if True, this is a second update on a batch that another step has already consumed, such as the
            second network of a GAN. `step` counts the update; the position in the data stays. Call the other step
            first. If each network has a state of its own, give the loader and predicates the other step's; if both are in
            one state, ask predicates after the last step on a batch.

    Raises:
        DonatedStateError: the state was already donated to a step.
        ValueError, TypeError: see `make_grad_fn` and `ll.optimizer`. The state is unchanged then.

    **What counts as sharing.** States share a tensor if its memory is shared: views, `detach()` and `tensor.data` count. Not
    noticed is memory that is shared through NumPy or DLPack. A class of tensors with several inside counts by the first that its
    `__tensor_flatten__` names (DTensors and torchao's do), and a sparse tensor by its values. Nothing is known of a class that
    wraps tensors without this method, and of mkldnn tensors: take `donate=False`, or copies (`ll.copy_state`), where a state
    with such tensors is read after the step.

    **Interrupts.** With `donate`, a signal (Ctrl-C, SIGTERM; on Windows, these two) that arrives during an update is
    handled some milliseconds after it, when your variable holds the new state. One that arrives between the return of
    the step and the assignment, within some microseconds, is handled there: the old state is spent then and the new
    one lost, so continue from a checkpoint. A function of your own around the step makes that time longer. If the update
    itself fails, there is no state after it. To finish the loop's body first, its log and its evaluation included, ask
    `ll.after_signal(signal.SIGINT)` at its end.

    **Warnings.** These mistakes get one warning each: ten calls in a row with the same state and different batches;
    saving or calling the module while it still has the weights from before its first pure step; a pure step of
    another network whose loss reaches such a module's parameters; writing to such a module's parameters or buffers between
    two steps (WGAN's clipping, a perturbation), which has no effect; and `step()` of an optimizer of torch's that has parameters
    of the module and finds no `.grad`. A donated run on a state that is not bound to the module leaves it behind likewise, as
    after `state.replace(params=...)`. If that state is a copy (`ll.copy_state`), the run is taken for a trial, and the
    module for that of the run before it.

    Uses of the module are noticed by hooks on it, which `ll.bind` removes; saving or calling a part of
    the module, or a copy of it, is not noticed. Writes through `param.data` are noticed by the second step only. Nothing
    notices `torch.nn.utils.clip_grad_norm_` between two steps: it finds no `.grad` and returns 0 (clip by
    `ll.clip_by_global_norm`, a part of `ll.chain`).
    """
    grad_fn = check_summed(grad_fn, "make_train_step")
    check_writes(optimizer, "make_train_step")
    watched = (grad_fn, [half for part in optimizer.parts.values() for half in (part.transform, part.update_)])
    spec = StepSpec("train", _train_step_for_graphs(grad_fn, optimizer), watched, donate, same_batch)
    step = with_spec(_train_step(grad_fn, optimizer, donate, same_batch), spec)
    return with_repr(step, make_train_step, grad_fn, optimizer, donate=donate, same_batch=same_batch)


def _train_step(grad_fn: GradFn, optimizer: Optimizer, donate: bool, same_batch: bool) -> TrainStep:
    """The gradient function, then the update (`looplib.updates`), which consumes one more batch."""
    request = {"donate": True, "in_step": True} if donate else {}
    watch = Watch(grad_fn)  # which reads the records of the wrappers
    grad_fn = without_record(grad_fn)  # calls of the plain function are faster
    kind = UpdateKind(same_batch=same_batch)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]:
        params, buffers, opt_state = trees_of(state, "train_step(state, batch)")  # raises for a spent state
        if donate:
            snapshot = snapshot_of(params, buffers)
        else:
            snapshot = None
            watch.see(state, batch)
        try:
            out = _gradients(grad_fn, state, batch, optimizer, opt_state, request)
            _interrupts.install()
            _interrupts.waits.depth += donate  # a pure step leaves the state as it is
            try:
                new, metrics = update(
                    optimizer, state, out, snapshot, kind, partial(_evaluate, grad_fn, state, batch)
                )
                del out, params, buffers, opt_state  # freed while signals wait, and not with this frame
                snapshot = None
                _interrupts.look()
            finally:
                _interrupts.waits.depth -= donate
            return new, metrics
        except BaseException as error:
            _interrupts.waits.depth += 1
            try:
                undo(state, snapshot, error)
                fold(error)
                if isinstance(error, (TypeError, AttributeError)) and "'TrainState' object" in str(error):
                    error.add_note(_OF_A_LOSS)
                raise
            finally:
                _interrupts.waits.depth -= 1

    train_step.__qualname__ = "train_step"  # in Python's error for a call without the batch
    return train_step


_OF_A_LOSS = (
    "make_train_step calls a gradient function, grad_fn(state, batch, **request) -> Gradients. If this is a loss function "
    "(model, batch), write ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)"
)


def _train_step_for_graphs(grad_fn: GradFn, optimizer: Optimizer) -> Callable[[TrainState, Any], Outcome]:
    """The step for graphs, from the same parts: it writes copies, and a tensor chooses between them and the old values."""

    def step_for_graphs(state: TrainState, batch: Any) -> Outcome:
        params, _, opt_state = trees_of(state)
        out = _gradients(grad_fn, state, batch, optimizer, opt_state, {})
        first = optimizer.transform(
            out.grads,
            opt_state,
            params,
            state.step,
            scale=out.scale,
            metrics=out.metrics,
            seed=state.seed,
            owned=True,
        )
        flags = flags_in_graph(first)
        info = {"metrics": out.metrics, "seed": state.seed, "buffers": out.buffers, "carry": first.carry}
        new_params, opt_state, report = update_where(
            flags, optimizer, first.grads, first.state, params, state.step, info
        )
        applied = any_of(flags)
        metrics = with_report(out.metrics, first.metrics, out.samples)
        if applied is not True:
            metrics |= without_skipped({name: metrics[name] for name in first.metrics}, applied)
        metrics = with_late_report(metrics, report, out.samples)
        return Outcome({**params, **new_params}, opt_state, out.buffers, metrics, out.samples, applied)

    return step_for_graphs


def _gradients(
    grad_fn: GradFn, state: TrainState, batch: Any, optimizer: Optimizer, opt_state: Any, request: Mapping[str, Any]
) -> Gradients:
    """The gradients of a step. If the update has a scale, they are those of the loss times this scale."""
    scale = optimizer.loss_scale(opt_state)
    out = grad_fn(state, batch, **request) if scale is None else grad_fn(state, batch, scale=scale, **request)
    if not isinstance(out, Gradients):
        raise TypeError(f"the gradient function returned {named(out)}. {_OF_A_LOSS}")
    if scale is not None:
        what = "gradients of a loss that was not multiplied by the scale of dynamic_loss_scale"
        check(out.scale is scale, DROPPED.format(who="make_train_step", what=what), TypeError)
    return out


def _evaluate(
    grad_fn: GradFn,
    state: TrainState,
    batch: Any,
    owned: Params,
    buffers: Params,
    writes: bool,
    params: Mapping[str, Tensor],
) -> tuple[Any, dict[str, Tensor]]:
    """Loss and gradients of the step's batch at different parameters, for optimizers that request them.

    If the forward pass writes to parameters, which it may in a donated step, so does this one.
    """
    # The state itself may be spent: its tensors belong to the update that asks.
    now = TrainState(step=state.step, seed=state.seed, params={**owned, **params}, buffers=buffers)
    out = grad_fn(now, batch, donate=writes)
    put_back(out.copies or ())
    return loss_over_ranks(out.metrics), out.grads


def make_eval_step(
    model: nn.Module, metric_fn: Callable[[Any, Any], Any], *, count_samples: Callable[[Any], int] | None = None
) -> EvalStep:
    """Make an evaluation step: a function from a state and a batch to metrics.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 3)
    >>> def metric_fn(model, batch):
    ...     x, y = batch
    ...     logits = model(x)
    ...     return {
    ...         "loss": torch.nn.functional.cross_entropy(logits, y),  # a mean over the samples
    ...         "accuracy": ll.Mean((logits.argmax(1) == y).sum(), len(y)),
    ...     }
    >>> eval_step = ll.make_eval_step(model, metric_fn)
    >>> metrics = eval_step(ll.init_state(model), (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)))
    >>> sorted(metrics)
    ['accuracy', 'loss']

    The module runs in eval mode and without gradients, with copies of the state's buffers and of parameters that its
    forward pass writes (`nn.Embedding(max_norm=...)`, `weight.clamp_()`), so state and module are left unchanged. (In a model
    above 1 GiB, a layer of your own that writes is named after its first write, since no copy of such a model is taken.)

    On several ranks, call it on all of them, most easily through `ll.evaluate`: DDP sends the buffers of BatchNorm in the
    forward pass and waits for every rank. For a validation on the first rank alone, call
    `ll.evaluate(eval_step, state, batches, divide=False)` within `ll.distributed.rank_zero_only`, not the bare step.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        metric_fn: `metric_fn(model, batch)`, which returns a dict of metrics such as `Mean(total, weight)`, or of
            scalars. A scalar is taken as the mean over the batch's samples and weighted by their number. That is
            right for averages over samples, and wrong for F1, AUC or the value of a torchmetrics metric: use the
            records in `ll.metrics` or `torchmetric` for those. A loss function, as for `make_grad_fn`, does as well: its
            loss is the metric `loss`, next to those of its aux.
        count_samples: function from a batch to its number of samples, as for `make_grad_fn`.

    Raises:
        TypeError: `metric_fn` returns a tuple other than `(loss, aux)`, or an integer, which would be averaged: for a count,
            return a `Mean`, or `ll.metrics.Reading(ll.Mean(count), operator.attrgetter("total"))` for the sum over all batches.
        TypeError, ValueError: it returns a scalar, and the samples of the batch cannot be counted.
        ValueError: a value is no metric, a parameter of the state carries a graph, or the state belongs to a different
            model.
    """
    check_function_of_model(model, metric_fn, "make_eval_step", "metric_fn")
    forward, counter = _without_gradients(model, metric_fn), as_counter(count_samples)
    watch = LossWatch()

    def eval_step(state: TrainState, batch: Any) -> dict[str, Metric]:
        values = forward(state, batch)
        if not isinstance(values, Mapping):
            loss, aux = split_loss(values)
            values = {"loss": loss, **aux}
        check_no_counts(values)
        samples = counter(batch) if any(not isinstance(value, Mean) for value in values.values()) else 0
        if samples and isinstance(values.get("loss"), Mean):
            watch.look_beside(values["loss"], values, samples)
        return {name: record(name, value, samples) for name, value in values.items()}

    spec = StepSpec("eval", _without_update(eval_step), (forward, metric_fn), count_samples=counter)
    return with_repr(with_spec(eval_step, spec), make_eval_step, model, metric_fn, count_samples=count_samples)


def make_predict_step(
    model: nn.Module,
    predict_fn: Callable[[Any, Any], Any],
    *,
    training: bool = False,
    count_samples: Callable[[Any], int] | None = None,
) -> PredictStep:
    """Make a prediction step: a function from a state and a batch to the model's outputs.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 3)
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x).softmax(1))
    >>> predict_step(ll.init_state(model), torch.zeros(4, 2)).shape
    torch.Size([4, 3])

    As with `make_eval_step`, the module runs in eval mode and without gradients, on copies of the state's buffers.

    With `training=True` it runs as in a train step, with dropout and batch norm, but the running statistics do not
    change. Use that for a GAN's fake images, a teacher, or the values of a critic between two steps. The same state
    and batch always give the same outputs. To draw again, such as for a second rollout, use
    `ll.state.fold_in(state, 1)`.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        predict_fn: `predict_fn(model, batch)`, which returns a tensor or any pytree of tensors. The step returns it
            unchanged.
        training: if True, run the module in training mode, except for submodules that were in eval mode when this was
            called.
        count_samples: function from a batch to its number of samples, as for `make_grad_fn`. `ll.predict` needs it on
            several ranks, and `split_on_oom`.

    Raises:
        ValueError: the state belongs to a different model.
    """
    check_function_of_model(model, predict_fn, "make_predict_step", "predict_fn")
    predict_step = _without_gradients(model, predict_fn, training)
    watched, counter = (predict_step, predict_fn), as_counter(count_samples)
    step = with_spec(predict_step, StepSpec("predict", _without_update(predict_step), watched, count_samples=counter))
    settings = {"training": training, "count_samples": count_samples}
    return with_repr(step, make_predict_step, model, predict_fn, **settings)


def _without_update(step: Callable[[TrainState, Any], Any]) -> Callable[[TrainState, Any], Outcome]:
    """An eval or predict step for graphs: it leaves the state as it is."""

    def step_for_graphs(state: TrainState, batch: Any) -> Outcome:
        return Outcome(state.params, state.opt_state, state.buffers, step(state, batch), 0)

    return step_for_graphs


def _without_gradients(model: nn.Module, function: Callable[[Any, Any], Any], training: bool = False) -> PredictStep:
    host = _modules.FunctionalModule(model, training, backward=False)

    def forward(state: TrainState, batch: Any) -> Any:
        params, buffers, _ = trees_of(state)
        host.check(params, buffers)
        form = passes()
        guard = form.guard or host.unwritten
        (seed,) = form.seeds(state, rank(), (0,))
        grad_mode = torch.is_grad_enabled()
        if grad_mode:
            check_history(params, EVALUATED)
        guarded = None
        try:
            torch_private.set_grad_enabled(False)
            guarded = guard.begin(params)
            out = host.run(guarded.params, buffers, seed, lambda: function(model, batch))
            trees_of(state)  # raises if another thread has written it since
            guard.check(guarded, params, may_write=True)
            return copied_where_shared(out, (*params.values(), *buffers.values()))
        except Exception as error:
            if guarded is not None and overwritten(state, (params,)) is None:
                guard.end(guarded, params)
            raise host.explained(error, params, buffers, batch)  # noqa: B904
        finally:
            torch_private.set_grad_enabled(grad_mode)

    return forward
