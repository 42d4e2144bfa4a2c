"""Train, eval and predict steps.

A train step takes a state and a batch and returns the next state and the metrics. It is pure: it leaves its inputs
unchanged. With `donate=True` it may reuse the old state's memory for the new one, and the old state can no longer be
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import modules as _modules
from looplib._core import torch_private
from looplib._core.checks import check, check_type
from looplib._core.errors import fold
from looplib._core.lease import (
    Lease,
    extra_of,
    follows,
    give_up,
    lease_of,
    lease_over,
    memory_of,
    overwritten,
    put_back,
    tensors_in,
    trees_of,
    versions,
    with_copies,
    with_own_tensors,
    written_since,
)
from looplib._core.random import mix
from looplib._core.ranks import rank
from looplib._core.records import Made, check_function_of_model, made, mark, with_repr, without_record
from looplib._core.tracing import tracing
from looplib._core.trees import batch_size, map_tensors
from looplib._core.updates import (
    any_of,
    call_decide,
    call_update,
    flags_in_graph,
    new_tensors,
    own_copies,
    read,
    update_where,
)
from looplib._core.watches import Watch
from looplib._objective import aux_records, loss_over_ranks, record, split_loss
from looplib.gradients import EVALUATED, check_history
from looplib.grads._wrapper import check_whole
from looplib.metrics._mean import Mean
from looplib.types import (
    EvalStep,
    GradFn,
    GradRequest,
    Metric,
    Optimizer,
    Params,
    PredictStep,
    TrainState,
    TrainStep,
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
class StepSpec:
    """Components of a step, for transforms that build another step from it; `parts` of its record.

    Attributes:
        kind: "train", "eval" or "predict".
        core: the step without its counts.
        watched: the functions that it calls.
        donate, same_batch: as passed to `make_train_step`.
        compiler: of its graphs, if it runs as a graph (`transforms._compiler.Compiler`).
    """

    kind: Literal["train", "eval", "predict"]
    core: Callable[[TrainState, Any], Outcome]
    watched: tuple[Any, ...]
    donate: bool = False
    same_batch: bool = False
    compiler: Any = None


def with_spec(step: S, parts: StepSpec) -> S:
    """The step, with a record of its components."""
    return mark(step, Made(f"{parts.kind}_step", f"make_{parts.kind}_step", parts=parts))


def spec_of(step: object, transform: str) -> StepSpec:
    """Components of a step. Raises TypeError, naming the transform, for a function that is no step of looplib."""
    record = made(step)
    if record is None or record.parts is None:
        raise TypeError(
            f"{transform} got a {type(step).__name__} that is no step of looplib; give what ll.make_train_step, "
            "ll.make_eval_step or ll.make_predict_step returned, and put wrappers of your own around the result"
        )
    return cast(StepSpec, record.parts)


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
        optimizer: from `ll.optimizer`, with or without wrappers. Use the one that created the state.
        donate: if True, write the new state over the old one, for the speed and memory of an in-place loop.
            Afterwards the old state, and every state that shares a tensor with it (trained parameters, all buffers, the
            optimizer's state), raises DonatedStateError. The forward pass may write to parameters then, as in a raw loop,
            such as a momentum encoder's: these writes stay even if the update is skipped or the step fails, and the old
            state is spent.
        same_batch: if True, this is a second update on a batch that another step has already consumed, such as the
            second network of a GAN. `step` counts the update; the position in the data stays. Call the other step
            first, and ask predicates with the state that it returns.

    Raises:
        DonatedStateError: the state was already donated to a step.
        ValueError, TypeError: see `make_grad_fn` and `ll.optimizer`. The state is unchanged then.

    **Interrupts.** With `donate`, a signal (Ctrl-C, SIGTERM; on Windows, these two) that arrives during an update is
    handled some milliseconds after it, when your variable holds the new state. One that arrives between the return of
    the step and the assignment, within about a microsecond, is handled there: the old state is spent then and the new
    one lost, so continue from a checkpoint. A function of your own around the step makes that time longer. If the update
    itself fails, there is no state after it. To finish the loop's body first, its log and its evaluation included, ask
    `ll.after_signal(signal.SIGINT)` at its end.

    **Warnings.** Four mistakes get one warning each: ten calls in a row with the same state and different batches;
    saving or calling the module while it still has the weights from before its first pure step; a pure step of
    another network whose loss reaches such a module's parameters; and writing to such a module's parameters between two
    steps (WGAN's clipping, a perturbation), which has no effect. A donated run on a state that is not bound to the module
    leaves it behind likewise. The second uses hooks on the module, which `ll.bind` removes; saving or calling a part of the
    module, or a copy of it, is not noticed. Writes through `param.data` are noticed by the second step only.
    """
    given, grad_fn = grad_fn, check_whole(grad_fn, "make_train_step")
    advice = "give what ll.optimizer returns, such as ll.optimizer(torch.optim.AdamW, lr=1e-3)"
    check_type("optimizer is", optimizer, Optimizer, advice)
    watched = (given, optimizer.decide, optimizer.update_)
    parts = StepSpec("train", _core(grad_fn, optimizer), watched, donate, same_batch)
    step = with_spec(_train_step(grad_fn, optimizer, donate, same_batch), parts)
    return with_repr(step, make_train_step, given, optimizer, donate=donate, same_batch=same_batch)


# The order of a train step, and why:
#   check    the state is valid; a spent one has no values to compute with.
#   keep     a donated step's forward pass writes into the state's own buffers, so they are copied first. If the step is
#            skipped or fails before its update, they are put back, and the state is as it was. Parameters that the forward
#            pass writes are not put back: the state is spent, as in a raw loop.
#   gradients, decide
#            whatever the gradients or the optimizer can refuse or skip is decided here: only the forward pass has written so
#            far. The host reads the flags of all wrappers at once.
#   check    once more, since the loss or the decision may have run a step of another run over the same memory. A pure step
#            and a skipped one, which give up nothing, need it as well.
#   own      a pure step copies what the update writes. A donated one gives up the state, which may still refuse, and then
#            spends it. That comes before the first write, so an update that fails halfway cannot leave a state that looks
#            valid (tests/_core/test_lease.py).
#   update   writes in place, or returns new tensors.
#   advance  the next state. Only now does the lease say at which step the run is: until then, and if the update has failed,
#            a reader is told that there is no state after it.
# Signals that arrive after the flags are read, or after the passes have failed, are handled when the step has returned: none
# can come between giving up the old state and returning the new one.


def _train_step(grad_fn: GradFn, optimizer: Optimizer, donate: bool, same_batch: bool) -> TrainStep:
    request = GradRequest(donate=donate)
    watch = Watch(grad_fn)
    grad_fn = without_record(grad_fn)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]:
        params, buffers, opt_state = trees_of(state, "train_step(state, batch)")
        step = state.step
        if donate:
            kept, writes = with_copies(buffers.values()), versions(params)
        else:
            watch.see(state, batch)
        grad_mode = torch.is_grad_enabled()
        try:
            try:
                out = grad_fn(state, batch, request)
                grads, metrics, new_buffers, samples, *_ = out
                written = written_since(params, writes) if donate else ()  # names of parameters
                torch_private.set_grad_enabled(False)  # so that plain functions leave no graph in the state
                decision, next_opt_state = call_decide(optimizer, grads, opt_state, metrics, params, step)
                applied = decision is True or read(decision)
            finally:
                # Read by `interrupts.held` from this frame: until it has returned, signals are sent again later.
                _hold_signals = True
            trees_of(state)  # raises if it was written since: by another thread, in the loss, or in the decision
            makes_update = applied is True or any_of(applied)
            if not makes_update:
                if donate:
                    put_back(kept)
                lease = give_up(state, {*written})[0] if written else lease_of(state)
                owned, new_buffers, new_opt_state = params, buffers, with_own_tensors(next_opt_state, opt_state)
            else:
                _interrupts.install()  # the passes of a gradient function of the user's have installed nothing
                if donate:
                    lease, _ = give_up(state, grads.keys() | written)  # the state is spent from here on
                    owned, next_opt_state = params, with_own_tensors(next_opt_state, opt_state)
                else:
                    owned, next_opt_state = own_copies(grads, params, next_opt_state)
                    lease = None
                report: dict[str, Any] = {}
                info = {
                    "applied": applied,
                    "metrics": metrics,
                    "report": report,
                    "buffers": new_buffers,
                    "seed": state.seed,
                    "evaluate": partial(_evaluate, grad_fn, state, owned, new_buffers, batch),
                }
                new_params, new_opt_state = call_update(optimizer, grads, next_opt_state, dict(owned), step, info)
                if replaced := new_tensors(new_params, owned, grads):  # by a functional update
                    new_opt_state = _copy_into(owned, replaced, new_opt_state)
                if report:  # which may be refused: before the run is said to be at the next step
                    metrics = _with_report(metrics, report, samples)
                del info, new_params  # see below
            new = advanced(state, owned, new_buffers, new_opt_state, samples, makes_update, same_batch, lease)
            if lease is not None and lease.step is None:  # written by this step
                lease.step = new.step
            if donate:  # these would be freed with the frame, when signals are no longer held back
                kept.clear()
                del out, grads
            return new, metrics
        except BaseException as error:
            # Until the state is given up, only the forward pass has written, which is undone. The memory of one that is given
            # up, by this step or by another run, is left alone.
            if donate and overwritten(state, (params, buffers)) is None:
                # Before buffers are put back, which may share memory with a parameter.
                written = written_since(params, writes)
                put_back(kept)
                if written:
                    lease_over("a train step with donate=True", tensors_in((params, buffers))).write()
            fold(error)
            raise
        finally:
            torch_private.set_grad_enabled(grad_mode)

    train_step.__qualname__ = "train_step"  # in Python's error for a call without the batch
    return train_step


def _copy_into(owned: Params, replaced: Params, opt_state: Any) -> Any:
    """Copy the new tensors of a functional update into the step's own, which the module holds.

    What shares memory with these, values from another parameter or in the optimizer's state, is copied first. Returns
    that state.
    """
    values = _apart([*replaced.values()], owned.values())
    given = [owned[name] for name in replaced]
    opt_state = _apart(opt_state, given)
    for tensor, value in zip(given, values, strict=True):
        tensor.copy_(value)
    return opt_state


def _core(grad_fn: GradFn, optimizer: Optimizer) -> Callable[[TrainState, Any], Outcome]:
    """The step for graphs, from the same parts: to own is to copy, and tensors choose whether the update is made."""

    def core(state: TrainState, batch: Any) -> Outcome:
        out = grad_fn(state, batch, GradRequest())
        params, _, opt_state = trees_of(state)
        decision, opt_state = call_decide(optimizer, out.grads, opt_state, out.metrics, params, state.step)
        flags = flags_in_graph(decision)
        buffers = out.buffers
        report: dict[str, Any] = {}
        info = {"metrics": out.metrics, "report": report, "buffers": buffers, "seed": state.seed}
        new_params, opt_state = update_where(flags, optimizer, out.grads, opt_state, params, state.step, info)
        metrics = _with_report(out.metrics, report, out.samples)
        return Outcome({**params, **new_params}, opt_state, buffers, metrics, out.samples, any_of(flags))

    return core


def _with_report(metrics: dict[str, Metric], report: Mapping[str, Any], samples: int) -> dict[str, Metric]:
    """The metrics of a step, with those that its update reports."""
    for name in report:
        check(name not in metrics, f"the update reports {name!r}, and the gradient function does so too: rename one")
    return {**metrics, **aux_records(report, samples)}


def _evaluate(
    grad_fn: GradFn, state: TrainState, owned: Params, buffers: Params, batch: Any, params: Mapping[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """Loss and gradients of the step's batch at different parameters, for optimizers that request them."""
    # The state itself may be spent: its tensors belong to the update that asks.
    now = TrainState(step=state.step, seed=state.seed, params={**owned, **params}, buffers=buffers)
    out = grad_fn(now, batch, GradRequest())
    return loss_over_ranks(out.metrics), out.grads


def advanced(
    state: TrainState,
    params: Params,
    buffers: dict[str, Tensor],
    opt_state: Any,
    samples: int,
    applied: bool,
    same_batch: bool,
    lease: Lease | None,
) -> TrainState:
    """The next state: these trees, and the counts after one more batch."""
    step, epoch, batch, consumed = state.step + applied, state.epoch, state.batch, state.samples
    if same_batch:
        batch_samples, batch_steps = state.batch_samples, state.batch_steps + applied
    else:
        batch, consumed, batch_samples, batch_steps = batch + 1, consumed + samples, samples, int(applied)
        if batch == state.epoch_length:
            epoch, batch = epoch + 1, 0
    new = TrainState(
        step, epoch, batch, state.epoch_length, consumed, batch_samples, batch_steps, params, buffers, opt_state, state.seed,
        extra_of(state),
    )  # fmt: skip
    follows(new, state, lease)
    return new


def make_eval_step(model: nn.Module, metric_fn: Callable[[Any, Any], Any]) -> EvalStep:
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
    forward pass writes (`nn.Embedding(max_norm=...)`, `weight.clamp_()`), so state and module are left unchanged.

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

    Raises:
        TypeError: `metric_fn` returns a tuple other than `(loss, aux)`.
        ValueError: a value is no metric, a parameter of the state carries a graph, or the state belongs to a different
            model.
    """
    check_function_of_model(model, metric_fn, "make_eval_step", "metric_fn")
    forward = _without_gradients(model, metric_fn)

    def eval_step(state: TrainState, batch: Any) -> dict[str, Metric]:
        values = forward(state, batch)
        if not isinstance(values, Mapping):
            loss, aux = split_loss(values)
            values = {"loss": loss, **aux}
        samples = batch_size(batch) if any(not isinstance(value, Mean) for value in values.values()) else 0
        return {name: record(name, value, samples) for name, value in values.items()}

    step = with_spec(eval_step, StepSpec("eval", _unchanging(eval_step), (model, metric_fn)))
    return with_repr(step, make_eval_step, model, metric_fn)


def make_predict_step(
    model: nn.Module, predict_fn: Callable[[Any, Any], Any], *, training: bool = False
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

    Raises:
        ValueError: the state belongs to a different model.
    """
    check_function_of_model(model, predict_fn, "make_predict_step", "predict_fn")
    predict_step = _without_gradients(model, predict_fn, training)
    step = with_spec(predict_step, StepSpec("predict", _unchanging(predict_step), (model, predict_fn)))
    return with_repr(step, make_predict_step, model, predict_fn, training=training)


def _unchanging(step: Callable[[TrainState, Any], Any]) -> Callable[[TrainState, Any], Outcome]:
    def core(state: TrainState, batch: Any) -> Outcome:
        return Outcome(state.params, state.opt_state, state.buffers, step(state, batch), 0)

    return core


def _apart(tree: Any, of: Iterable[Tensor]) -> Any:
    """The tree, with copies of tensors that share memory with these, over which a donated step writes."""
    known = {*map(memory_of, of)}
    return map_tensors(lambda tensor: tensor.clone() if memory_of(tensor) in known else tensor, tree)


def _without_gradients(model: nn.Module, function: Callable[[Any, Any], Any], training: bool = False) -> PredictStep:
    host = _modules.FunctionalModule(model, training, backward=False)

    def forward(state: TrainState, batch: Any) -> Any:
        params, buffers, _ = trees_of(state)
        host.check(params, buffers)
        seed = 0 if tracing() else mix(state.seed, state.step, rank(), 0)
        grad_mode = torch.is_grad_enabled()
        if grad_mode:
            check_history(params, EVALUATED)
        guarded = None
        try:
            torch_private.set_grad_enabled(False)
            guarded = host.unwritten.begin(params)
            out = host.run(guarded.params, buffers, seed, lambda: function(model, batch))
            trees_of(state)  # raises if another thread has written it since
            host.unwritten.check(guarded, params, of_state=True)
            return out if tracing() else _apart(out, (*params.values(), *buffers.values()))
        except Exception as error:
            if guarded is not None and overwritten(state, (params,)) is None:
                host.unwritten.end(guarded, params)
            raise host.explained(error, params, buffers, batch)  # noqa: B904
        finally:
            torch_private.set_grad_enabled(grad_mode)

    return forward
