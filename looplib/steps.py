"""Train, eval and predict steps.

A train step takes a state and a batch and returns the next state and the metrics. It is pure: it leaves its inputs
unchanged. With `donate=True` it may reuse the old state's memory for the new one, and the old state can no longer be
used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import modules as _modules
from looplib._core import ownership, torch_private
from looplib._core.buffers import NO_NAMES, NOTHING, Written, explain
from looplib._core.calls import bare, remember
from looplib._core.checks import check_type, named
from looplib._core.engines import NO_CONTEXT, Context
from looplib._core.forgotten import Watch
from looplib._core.kinds import chain
from looplib._core.loss_functions import check_function_of_model
from looplib._core.program import program_of
from looplib._core.random import mix
from looplib._core.ranks import rank, several
from looplib._core.tracing import tracing, where
from looplib._core.trees import batch_size
from looplib._core.updates import checked, read
from looplib._objective import loss_over_ranks, record
from looplib._wrapping import check_whole
from looplib.gradients import of_this_model
from looplib.metrics._mean import Mean
from looplib.types import (
    EvalStep,
    GradFn,
    Gradients,
    Metric,
    Optimizer,
    Params,
    Part,
    PredictStep,
    TrainState,
    TrainStep,
    check_state,
    draft,
    made,
    step_and_seed_of,
    trees_of,
    unwritten,
    written,
)

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
class Parts:
    """Components of a step, for transforms that build another step from it.

    Attributes:
        kind: "train", "eval" or "predict".
        core: the step without its counts.
        watched: the functions that it calls.
        donate, same_batch: as passed to `make_train_step`.
    """

    kind: Literal["train", "eval", "predict"]
    core: Callable[[TrainState, Any], Outcome]
    watched: tuple[Any, ...]
    donate: bool = False
    same_batch: bool = False


@runtime_checkable
class MadeStep(Protocol):
    """A step that records its components: returned by this module and by transforms."""

    parts: Parts

    def __call__(self, state: TrainState, batch: Any) -> Any: ...


def with_parts(step: S, parts: Parts) -> S:
    """Return the step as a `MadeStep`."""
    open_to_attributes: Any = step
    open_to_attributes.parts = parts
    return step


def parts_of(step: object, transform: str) -> Parts:
    """Return a step's components; raise TypeError, naming the transform, for a function that is not a `MadeStep`."""
    if isinstance(step, MadeStep) and isinstance(step.parts, Parts):
        return step.parts
    raise TypeError(
        f"{transform} got a {type(step).__name__} that is no step of looplib; give what ll.make_train_step, "
        "ll.make_eval_step or ll.make_predict_step returned, and put wrappers of your own around the result"
    )


def make_train_step(
    grad_fn: GradFn,
    optimizer: Optimizer,
    *misplaced: NoReturn,
    donate: bool = False,
    same_batch: bool = False,
    **unknown: NoReturn,
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
    change either: use `ll.bind(model, state)` before saving the module. Two mistakes get one warning each: ten calls
    in a row with the same state and different batches, and `model.state_dict()` while the module has the weights that
    it had when its first pure step was called. (The second is a hook on the module, which `ll.bind` removes. Saving a
    part of the module, or a copy of it, is not noticed.)

    Wrap the result with `ll.compile_step` to compile the whole step into one graph, or with `ll.vmap_step` to train
    many members at once.

    Args:
        grad_fn: from `make_grad_fn`, with or without wrappers.
        optimizer: from `ll.optimizer`, with or without wrappers. Use the one that created the state.
        donate: if True, write the new state over the old one, for the speed and memory of an in-place loop.
            Afterwards the old state, and every state that shares an overwritten tensor, raises DonatedStateError. A
            signal that arrives during an update is handled after it.
        same_batch: if True, this is a second update on a batch that another step has already consumed, such as the
            second network of a GAN. `step` counts the update; the position in the data stays. Call the other step
            first.
        misplaced, unknown: no other arguments are accepted. `compile=` is refused with a message that says what to write
            instead.

    Raises:
        DonatedStateError: the state was already donated to a step.
        ValueError, TypeError: see `make_grad_fn` and `ll.optimizer`. The state is unchanged then.
    """
    if misplaced or unknown:
        _refuse_unknown(misplaced, unknown)
    if not callable(grad_fn) or isinstance(grad_fn, nn.Module):
        raise TypeError(f"grad_fn is {named(grad_fn)}; give ll.make_grad_fn(model, loss_fn)")
    given, grad_fn = grad_fn, check_whole(grad_fn, "make_train_step")
    advice = "give what ll.optimizer returns, such as ll.optimizer(torch.optim.AdamW, lr=1e-3)"
    check_type("optimizer is", optimizer, Optimizer, advice)
    step_of = _donated_step if donate else _pure_step
    # Ranks compare it at the first step.
    context = Context(program=partial(program_of, given, optimizer.description)) if several() else NO_CONTEXT
    parts = Parts("train", _core(grad_fn, optimizer), (given, optimizer.update), donate, same_batch)
    step = with_parts(step_of(bare(grad_fn), optimizer, same_batch, context), parts)
    return remember(step, make_train_step, given, optimizer, donate=donate, same_batch=same_batch)


def _pure_step(grad_fn: GradFn, optimizer: Optimizer, same_batch: bool, context: Context) -> TrainStep:
    part, watch, update = Part(context=context), Watch(grad_fn), optimizer.update

    def pure_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]:
        _interrupts.install()
        out = grad_fn(state, batch, part)
        old_params, _, old_opt_state, _ = trees_of(state)
        step, seed = step_and_seed_of(state)
        watch.see(state, batch)
        params, opt_state, applied = update(
            out.grads,
            old_opt_state,
            old_params if out.params is None else {**old_params, **out.params},
            step,
            metrics=out.metrics,
            buffers=out.buffers,
            seed=seed,
            evaluate=partial(_evaluate, grad_fn, state, batch),
        )
        if applied is not True:
            applied = read(applied)
            params = _put_back(applied, out, params, state)
        new = advanced(state, out.samples, applied, same_batch)
        new.params, new.opt_state = params, opt_state
        if applied:
            new.buffers = out.buffers
        return made(state, new), out.metrics

    pure_step.__qualname__ = "train_step"  # in Python's error for a call without the batch
    return pure_step


def _donated_step(grad_fn: GradFn, optimizer: Optimizer, same_batch: bool, context: Context) -> TrainStep:
    part, in_forward = (
        Part(donate=True, context=context),
        Written(name for one in chain(grad_fn) for name in one.renormed),
    )
    update = optimizer.update

    def donated_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]:
        try:
            params, buffers, opt_state, _ = trees_of(state)
        except AttributeError:
            check_state(state, "train_step(state, batch)")
            raise
        step, seed = step_and_seed_of(state)
        readers = ownership.before_a_step(state, (params, buffers, opt_state))
        _interrupts.install()
        thread = threading.get_ident()
        looks = buffers or in_forward.looks
        saved = in_forward.save(buffers, params) if looks else NOTHING
        writes = ownership.writes.count
        try:
            try:
                out = grad_fn(state, batch, part)
            finally:
                _interrupts.begin_hold(thread)
            grads, metrics, new_buffers, samples = out[:4]  # at once, since each name of a NamedTuple takes 40 ns
            changed: Set[str] = grads.keys()
            in_buffers: Set[str] = NO_NAMES
            if looks:
                in_buffers = in_forward.learn(saved, buffers)
                changed = changed | in_forward.params if in_forward.params else changed
            lane = ownership.before_writing(state, changed, in_buffers)
            new_params, new_opt_state, applied = update(
                grads,
                opt_state,
                params,
                step,
                donate=True,
                metrics=metrics,
                buffers=new_buffers,
                seed=seed,
                evaluate=partial(_evaluate, grad_fn, state, batch),
            )
            if applied is not True:
                if ownership.writes.count != writes:
                    _refuse_late_choice(applied)
                applied = read(applied)
            new = advanced(state, samples, applied, same_batch)
            new.params, new.opt_state = new_params, new_opt_state
            if applied:
                new.buffers = new_buffers
                new = written(state, new, lane, readers)
            else:
                if lost := saved.restore():
                    raise RuntimeError(explain(lost, buffers.keys()))
                new = unwritten(state, new)
        except BaseException:
            lost = saved.restore()
            # One of several optimizers may have written before another failed.
            if lost or ownership.writes.count != writes:
                ownership.spoil(state, params.keys(), lost & buffers.keys())
            raise
        finally:
            _interrupts.end_hold(thread)
            _interrupts.deliver()
        return new, metrics

    donated_step.__qualname__ = "train_step"
    return donated_step


def _refuse_unknown(misplaced: tuple[Any, ...], unknown: Mapping[str, Any]) -> NoReturn:
    if misplaced:
        raise TypeError(
            f"make_train_step takes a grad_fn and an optimizer, and got {named(misplaced[0])} as well: write "
            "ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)"
        )
    if "compile" in unknown:
        raise TypeError(
            "make_train_step takes no compile=: compile the step that it returns, "
            "ll.compile_step(ll.make_train_step(grad_fn, optimizer)), with torch.compile's mode=, options= or backend="
        )
    raise TypeError(f"make_train_step takes donate= and same_batch=, and got {', '.join(sorted(unknown))}")


def _core(grad_fn: GradFn, optimizer: Optimizer) -> Callable[[TrainState, Any], Outcome]:
    def core(state: TrainState, batch: Any) -> Outcome:
        out = grad_fn(state, batch, Part())
        params, opt_state, applied = optimizer.update(
            out.grads,
            state.opt_state,
            state.params if out.params is None else {**state.params, **out.params},
            state.step,
            metrics=out.metrics,
            buffers=out.buffers,
            seed=state.seed,
        )
        applied = checked(applied)
        params = _put_back(applied, out, params, state)
        return Outcome(params, opt_state, out.buffers, out.metrics, out.samples, applied)

    return core


def _put_back(applied: bool | Tensor, out: Gradients, params: Params, state: TrainState) -> Params:
    """The parameters, with the forward pass's writes undone if no update was made."""
    if applied is True or out.params is None:
        return params
    before = state.params  # each read checks all tensors
    old = {name: before[name] for name in out.params}
    return {**params, **where(applied, {name: params[name] for name in old}, old)}


def _evaluate(
    grad_fn: GradFn, state: TrainState, batch: Any, params: Mapping[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """Loss and gradients of the step's batch at different parameters, for optimizers that request them."""
    out = grad_fn(state.replace(params={**state.params, **params}), batch, Part())
    return loss_over_ranks(out.metrics), out.grads


def _refuse_late_choice(applied: Any) -> None:
    raise RuntimeError(
        f"the optimizer wrote over the parameters, as a donated step lets it, and a wrapper around it returned "
        f"applied={applied!r} afterwards, when what it would keep is gone. Decide before the inner update, and hand "
        "it on: optimizer.update(grads, opt_state, params, step, when=flag & when, **extra); or do not hand on "
        "donate=, so that the inner update makes new tensors"
    )


def advanced(state: TrainState, samples: int, applied: bool, same_batch: bool) -> Any:
    """A draft of the next state with its counts after one more batch, and with the trees of this one."""
    new = draft(state)
    new.step += applied
    if same_batch:
        new.batch_steps += applied
        return new
    new.batch += 1
    if new.batch == new.epoch_length:
        new.epoch, new.batch = new.epoch + 1, 0
    new.samples += samples
    new.batch_samples = samples
    new.batch_steps = int(applied)
    return new


def make_eval_step(model: nn.Module, metric_fn: Callable[[Any, Any], Mapping[str, Any]]) -> EvalStep:
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

    The module runs in eval mode and without gradients, with copies of the state's buffers, so state and module are
    left unchanged.

    On several ranks, call it on all of them, most easily through `ll.evaluate`: DDP sends the buffers of BatchNorm in the
    forward pass and waits for every rank. For a validation on the first rank alone, call
    `ll.evaluate(eval_step, state, batches, divide=False)` within `ll.distributed.rank_zero_only`, not the bare step.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        metric_fn: `metric_fn(model, batch)`, which returns a dict of metrics such as `Mean(total, weight)`, or of
            scalars. A scalar is taken as the mean over the batch's samples and weighted by their number. That is
            right for averages over samples, and wrong for F1, AUC or the value of a torchmetrics metric: use the
            records in `ll.metrics` or `torchmetric` for those.

    Raises:
        TypeError: `metric_fn` returns anything else.
        ValueError: the state belongs to a different model, or the batch is on a different device.
    """
    check_function_of_model(model, metric_fn, "make_eval_step", "metric_fn")
    forward = _without_training(model, metric_fn)

    def eval_step(state: TrainState, batch: Any) -> dict[str, Metric]:
        values = forward(state, batch)
        if not isinstance(values, Mapping):
            raise TypeError(
                f'metric_fn returned a {type(values).__name__}; return a dict such as {{"loss": Mean(total, weight)}}'
            )
        samples = batch_size(batch) if any(not isinstance(value, Mean) for value in values.values()) else 0
        return {name: record(name, value, samples) for name, value in values.items()}

    made = with_parts(eval_step, Parts("eval", _unchanging(eval_step), (model, metric_fn)))
    return remember(made, make_eval_step, model, metric_fn)


def make_predict_step(model: nn.Module, predict_fn: Callable[[Any, Any], Any]) -> PredictStep:
    """Make a prediction step: a function from a state and a batch to the model's outputs.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 3)
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x).softmax(1))
    >>> predict_step(ll.init_state(model), torch.zeros(4, 2)).shape
    torch.Size([4, 3])

    As with `make_eval_step`, the module runs in eval mode and without gradients, on copies of the state's buffers.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        predict_fn: `predict_fn(model, batch)`, which returns a tensor or any pytree of tensors. The step returns it
            unchanged.

    Raises:
        ValueError: the state belongs to a different model, or the batch is on a different device.
    """
    check_function_of_model(model, predict_fn, "make_predict_step", "predict_fn")
    predict_step = _without_training(model, predict_fn)
    made = with_parts(predict_step, Parts("predict", _unchanging(predict_step), (model, predict_fn)))
    return remember(made, make_predict_step, model, predict_fn)


def _unchanging(step: Callable[[TrainState, Any], Any]) -> Callable[[TrainState, Any], Outcome]:
    def core(state: TrainState, batch: Any) -> Outcome:
        return Outcome(state.params, state.opt_state, state.buffers, step(state, batch), 0)

    return core


def _apart(out: Any) -> Any:
    """The outputs, with copies of parameters among them, over which a donated step may write."""
    if not any(map(ownership.may_be_written, ownership.tensors_in(out))):
        return out

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and ownership.may_be_written(leaf) else leaf

    return torch_private.pytree.tree_map(copied, out)


def _without_training(model: nn.Module, function: Callable[[Any, Any], Any]) -> PredictStep:
    host = _modules.Host(model, training=False)

    def forward(state: TrainState, batch: Any) -> Any:
        _interrupts.install()
        params, buffers = of_this_model(host, state)
        lent = {name: tensor.clone() for name, tensor in buffers.items()}
        seed = 0 if tracing() else mix(state.seed, state.step, rank())
        grad_mode = torch.is_grad_enabled()
        try:
            torch_private.set_grad_enabled(False)
            before = host.unwritten.begin(params)
            out = host.run(host.unshared(params), lent, seed, lambda: function(model, batch))
            host.unwritten.check(params, before)
            return out if tracing() else _apart(out)
        except Exception as error:
            raise host.explained(error, params, buffers, batch)  # noqa: B904
        finally:
            torch_private.set_grad_enabled(grad_mode)

    return forward
