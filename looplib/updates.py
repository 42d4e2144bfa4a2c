"""Updates: from gradients to the next state.

The order of an update, and why:

- check: the state is valid; a spent one has no values to update.
- transform: the first halves of all parts, which may change the gradients, refuse, or decide against the update. Nothing but
  the forward pass of a donated step has written so far. The host reads the flags of all parts at once.
- check again: the loss or the decision may have run a step of another run over the same memory. A pure step and a
  skipped one, which give up nothing, need it as well.
- own: a pure step copies what the update writes. A donated one gives up the state, which may still refuse, and then
  spends it. That comes before the first write, so an update that fails halfway cannot leave a state that looks valid
  (tests/_core/test_lease.py).
- update: the second halves write in place, or return new tensors.
- advance: the next state. Only now does the lease say at which step the run is: until then, and if the update has failed,
  a reader is told that there is no state after it.

A step that runs as a graph (`transforms/_compile_step.py`) has the same order: its graph makes the update, after the state is
given up.

The caller lets signals wait from the moment the gradients are there until the next state is returned: none comes between
giving up the old state and returning the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import interrupts as _interrupts
from looplib._core import torch_private
from looplib._core.chain import any_of, new_tensors, read
from looplib._core.checks import check, check_optional_count, check_type, few
from looplib._core.copies import clones, own_copies
from looplib._core.errors import fold
from looplib._core.forward_writes import put_back, versions, with_copies, written_since
from looplib._core.lease import (
    Lease,
    give_up,
    lease_of,
    lease_over,
    overwritten,
    trees_of,
    with_own_tensors,
)
from looplib._core.mappings import mapped
from looplib._core.memory import tensors_in
from looplib._core.ranks import is_sharded
from looplib._core.torch_storage import memory_of
from looplib._core.tracing import refuse_in_graph
from looplib._core.trees import map_tensors
from looplib._objective import aux_records, without_skipped
from looplib.metrics import Mean
from looplib.optim.chains import check_writes
from looplib.types import Gradients, Grads, Metric, Optimizer, Params, TrainState, next_state

__all__ = ["apply_gradients"]

# Its arguments: all parameters, the buffers, True if the forward pass writes to parameters, and the values to evaluate at.
Evaluate = Callable[[Params, Params, bool, Params], tuple[Any, Grads]]


def apply_gradients(
    optimizer: Optimizer,
    state: TrainState,
    gradients: Gradients | Mapping[str, Tensor | None],
    *,
    donate: bool = False,
    buffers: Mapping[str, Tensor] | None = None,
    samples: int | None = None,
    same_batch: bool = False,
    scale: Tensor | float | None = None,
    evaluate: Callable[[Params], tuple[Any, Grads]] | None = None,
) -> tuple[TrainState, dict[str, Metric]]:
    """Apply gradients: one optimizer update, from gradients of any origin to the next state.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> state = ll.init_state(model, optimizer)
    >>> def loss_of(params, x):
    ...     return torch.func.functional_call(model, params, x).square().mean()
    >>> grads = torch.func.grad(loss_of)(dict(state.params), torch.ones(4, 2))
    >>> state, metrics = ll.apply_gradients(optimizer, state, grads)
    >>> state.step, state.batch
    (1, 0)

    A train step is its gradient function, this function, and one more batch consumed. Use it where the gradient is not that
    of one loss on one batch: two losses added by hand, projected gradients, a policy update after a rollout, the
    differences that clients send in federated averaging.

    The update is that of a train step. `state.step` counts it. If it is refused, the state is unchanged; if the optimizer
    decides against it, it is skipped (`state.step` stays, `state.skipped` is True). A parameter without a gradient keeps its
    value and its optimizer state, as one whose `.grad` is None in a raw loop.

    **The position in the data** stays as it is, and predicates take the update for an event of its own: `every_n_steps`
    fires, `every_n_samples` and `at_epoch_end` do not. Pass `samples=` if the update also consumes a batch, or
    `same_batch=True` if it is a further update on the batch that the last step consumed.

    **Several ranks.** Every rank calls it, with the same gradients (shards of the same gradients for FSDP2). For a model in
    DDP or FSDP2, `grad_fn(state, batch, donate=True)` followed by `apply_gradients(..., donate=True)`
    is what a donated train step does.

    **The module.** After a pure update it has its earlier weights, and what you write to it there (WGAN's clipping) has no
    effect. A train step warns of that, and this function does not: change the state, `state.replace(params=...)`.

    **Graphs.** `ll.compile_step`, `ll.vmap_step` and `ll.transforms.differentiable` take train steps, and refuse a step of your
    own that calls this function. For them, compute the gradients in a gradient function (see WRITE_YOUR_OWN), and give that
    to `make_train_step`.

    Args:
        optimizer: the optimizer that created `state.opt_state`.
        state: the state to update.
        gradients: what a gradient function returned, or a dict of name -> gradient, with the shape, dtype and device of the
            parameter. None counts as no gradient. They are not changed.
        donate: if True, write the new state over the old one, as in `make_train_step`.
        buffers: name -> new value of buffers, such as BatchNorm's running statistics after a forward pass of your own. The
            others keep theirs. Taken from `gradients` if those come from a gradient function. A skipped update leaves
            buffers as they were.
        samples: number of samples in the batch that this update consumes, over all ranks together. It advances the position
            by one batch, as a train step does.
        same_batch: if True, the update belongs to the batch that was consumed last, as in `make_train_step`.
        scale: factor by which the loss of these gradients was multiplied, for an optimizer with `dynamic_loss_scale`, which
            divides by it. Taken from `gradients` if those come from a gradient function.
        evaluate: function from params (name -> tensor, all of them) to `(loss, gradients)`, for optimizers that evaluate the
            loss at several points (LBFGS).

    Returns:
        The next state, and the metrics of `gradients` together with those that the optimizer reports.

    Raises:
        TypeError: `optimizer`, `state` or `gradients` is something different.
        ValueError: there is no gradient; a name is not that of a parameter; a shape, dtype or device differs from the
            parameter's; `gradients` are those of a microbatch, or of a scaled loss without
            `dynamic_loss_scale`; `samples` and `same_batch` are both given;
            or the optimizer refuses. The state is unchanged then.
        DonatedStateError: the state was already donated.

    Source: `flax.training.train_state.TrainState.apply_gradients`.
    """
    check_writes(optimizer, "apply_gradients")
    check_optional_count("samples", samples, 0)
    check(
        samples is None or not same_batch, "samples= consumes a batch, and same_batch=True does not: give one of them"
    )
    params, old_buffers, opt_state = trees_of(state, "ll.apply_gradients(optimizer, state, gradients)")
    refuse_in_graph(
        "ll.apply_gradients inside a step that runs as a graph: make the inner step with ll.make_train_step, around a "
        "gradient function of your own if need be, function(state, batch, **request) -> Gradients"
    )
    computed = _as_gradients(gradients, scale)
    grads = _checked(computed.grads, params)
    if donate and computed is not gradients:  # tensors of the caller's own: an update must not read what it writes
        grads = copied_where_shared(grads, tensors_in((params, opt_state)))
    new_buffers = _new_buffers(computed.buffers, buffers, old_buffers)
    # The weight of the plain values that the update reports: the samples, or 1 if they are not known.
    weight = samples if samples is not None else computed.samples or 1
    out = computed._replace(grads=grads, buffers=new_buffers, samples=weight)
    snapshot = Snapshot(params, old_buffers, [*(computed.copies or ())], versions(params)) if donate else None
    kind = UpdateKind(own_event=samples is None and not same_batch, same_batch=same_batch)
    at_any_point = None if evaluate is None else partial(_at, evaluate)
    _interrupts.install()
    _interrupts.waits.depth += donate  # a pure update leaves the state as it is
    try:
        new, metrics = update(optimizer, state, out, snapshot, kind, at_any_point, owned=False, copy_buffers=donate)
        del out, grads, computed, gradients, new_buffers, params, old_buffers, opt_state  # freed while signals wait
        snapshot = None
        _interrupts.look()
        return new, metrics
    except BaseException as error:
        undo(state, snapshot, error)
        fold(error)
        raise
    finally:
        _interrupts.waits.depth -= donate


def _at(
    evaluate: Callable[[Params], tuple[Any, Grads]], owned: Params, buffers: Params, writes: bool, values: Params
) -> tuple[Any, Grads]:
    """A function of all parameters, at values of some of them."""
    return evaluate({**owned, **values})


def _as_gradients(gradients: Any, scale: Any) -> Gradients:
    """Gradients of a whole step, from what a gradient function returned or a dict of tensors."""
    if isinstance(gradients, Gradients):
        check(
            gradients.weight is None,
            "these are gradients of a microbatch, not yet divided by the weight of all: give those of the whole batch, as "
            "ll.accumulate returns",
        )
        check(
            scale is None or gradients.scale is None,
            "these gradients say themselves by what their loss was multiplied (Gradients.scale): leave scale= out",
        )
        return gradients if scale is None else gradients._replace(scale=scale)
    advice = "give what a gradient function returned, or a dict of name -> gradient"
    if isinstance(gradients, tuple) and gradients and isinstance(gradients[0], Mapping):
        advice += " (torch.func.grad_and_value returns two values: gradients first)"
    check_type("gradients are", gradients, Mapping, advice)
    return Gradients(dict(gradients), {}, {}, 0, scale=scale)


def _checked(grads: Mapping[str, Any], params: Params) -> Grads:
    """Gradients that fit their parameters, without those that are None. Raises for others, by name."""
    present = {name: grad for name, grad in grads.items() if grad is not None}
    check(present, "there are no gradients: give name -> gradient, for the parameters that this update changes")
    if unknown := present.keys() - params.keys():
        name = min(unknown)
        inner = name.removeprefix("module.").removeprefix("_orig_mod.")
        hint = f"write {inner!r}, without the name of the wrapper" if inner in params else f"it has {few(params)}"
        raise ValueError(
            f"there is a gradient for {few(sorted(unknown))}, and the state has no such parameter: {hint}"
        )
    for name, grad in present.items():
        check_type(f"the gradient of {name} is", grad, Tensor, "give a tensor, or None for no gradient")
        if _kind(grad) != _kind(params[name]):
            raise ValueError(
                f"the gradient of {name} is {_in_words(grad)}, the parameter {_in_words(params[name])}: give it as the latter"
            )
    return {name: grad.detach() if grad.requires_grad else grad for name, grad in present.items()}


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device, is_sharded(tensor)


def _in_words(tensor: Tensor) -> str:
    dtype, shape, device, sharded = _kind(tensor)
    return f"a {'sharded ' * sharded}{str(dtype).removeprefix('torch.')} tensor of shape {tuple(shape)} on {device}"


def _new_buffers(
    computed: Mapping[str, Tensor], replaced: Mapping[str, Tensor] | None, old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state's buffers after the update: those of a gradient function, or copies of the caller's own."""
    if replaced is None:
        return {**old, **mapped(Tensor.detach, computed)}
    check_type("buffers are", replaced, Mapping, "give a dict of name -> tensor")
    unknown = sorted(replaced.keys() - old.keys())
    check(not unknown, f"there are buffers {few(unknown)}, and the state has {few(old)}")
    names = [name for name, tensor in replaced.items() if tensor is not old[name]]
    return {**old, **dict(zip(names, clones([replaced[name].detach() for name in names]), strict=True))}


# The update itself, of which `apply_gradients` and train steps are made


class Snapshot(NamedTuple):
    """A state that a donated step is about to run on.

    Attributes:
        params, buffers: those of the state.
        copies: pairs of a buffer and a copy of it, to put back.
        writes: torch's counts of the writes to the parameters.
    """

    params: Params
    buffers: Params
    copies: list[tuple[Tensor, Tensor]]
    writes: list[int]


def snapshot_of(params: Params, buffers: Params) -> Snapshot:
    """Copy what a donated step's forward pass may write, and count the writes to the rest."""
    return Snapshot(params, buffers, with_copies(buffers.values()), versions(params))


def undo(state: TrainState, snapshot: Snapshot | None, error: BaseException) -> None:
    """Leave the state of a donated step that failed as it was before it; pure steps have nothing to undo.

    Until the state is given up, only the forward pass has written. Its buffers are put back, and parameters that it wrote
    spend the state. The memory of one that is given up, by this step or by another run, is left alone. A note of the error
    says so where this step has spent it.
    """
    if snapshot is None:
        return
    lease = overwritten(state, (snapshot.params, snapshot.buffers))
    if lease is not None:
        if lease is lease_of(state) and lease.step is None:
            error.add_note(_SPENT.format(why="the update was writing over its tensors"))
        return
    # Before buffers are put back, which may share memory with a parameter.
    written = written_since(snapshot.params, snapshot.writes)
    put_back(snapshot.copies)
    if written:
        lease_over("a train step with donate=True", tensors_in((snapshot.params, snapshot.buffers))).write()
        error.add_note(_SPENT.format(why=f"the forward pass had written {few(written)}"))


_SPENT = (
    "The state is spent, since {why}, and there is no state after it: continue from a checkpoint, or from a copy that you "
    "took before the step (ll.copy_state(state))"
)


class UpdateKind(NamedTuple):
    """Kind of an update: a batch consumed (the default), an event of its own, or a further update on the last batch."""

    own_event: bool = False
    same_batch: bool = False


def update(
    optimizer: Optimizer,
    state: TrainState,
    out: Gradients,
    snapshot: Snapshot | None,
    kind: UpdateKind,
    evaluate: Evaluate | None,
    *,
    owned: bool = True,
    copy_buffers: bool = False,
) -> tuple[TrainState, dict[str, Metric]]:
    """The next state and its metrics. The caller undoes a step that fails, and lets signals wait.

    `snapshot` is None for a pure step. If `owned`, the update may write over the gradients, as over those of a gradient
    function. If `copy_buffers`, a donated update copies new buffers into the state's own, as a forward pass would have.
    """
    params, buffers, opt_state = trees_of(state)
    metrics, new_buffers, samples = out.metrics, out.buffers, out.samples
    grad_mode = torch.is_grad_enabled()
    try:
        torch_private.set_grad_enabled(False)  # so that plain functions leave no graph in the state
        written = () if snapshot is None else written_since(params, snapshot.writes)  # names of parameters
        first = optimizer.transform(
            out.grads, opt_state, params, state.step, scale=out.scale, metrics=metrics, seed=state.seed, owned=owned
        )
        grads, next_opt_state = first.grads, first.state
        if first.metrics:  # which may be refused
            metrics = with_report(metrics, first.metrics, samples)
        applied = first.apply is True or read(first)
        trees_of(state)  # raises if it was written since: by another thread, in the loss, or in the decision
        makes_update = applied is True or any_of(applied)
        if first.metrics and not makes_update:
            metrics |= without_skipped({name: metrics[name] for name in first.metrics}, False)
        if not makes_update:
            if snapshot is not None:
                put_back(snapshot.copies)
            lease = give_up(state, {*written})[0] if written else lease_of(state)
            next_params, new_buffers, new_opt_state = params, buffers, with_own_tensors(next_opt_state, opt_state)
        else:
            if snapshot is None:
                next_params, next_opt_state = own_copies(grads, params, next_opt_state)
                lease = None
            else:
                lease, _ = give_up(state, grads.keys() | written)  # the state is spent from here on
                next_params, next_opt_state = params, with_own_tensors(next_opt_state, opt_state)
                if copy_buffers:
                    new_buffers = _in_memory_of(buffers, new_buffers)
            info = {
                "applied": applied,
                "metrics": metrics,
                "buffers": new_buffers,
                "seed": state.seed,
                "carry": first.carry,
                "evaluate": evaluate and partial(evaluate, next_params, new_buffers, bool(written)),
            }
            new_params, new_opt_state, report = optimizer.update_(
                grads, next_opt_state, dict(next_params), state.step, **info
            )
            if replaced := new_tensors(new_params, next_params, grads):  # by a functional update
                new_opt_state = _copy_into(next_params, replaced, new_opt_state)
            if report:
                metrics = with_late_report(metrics, report, samples)
        new = advanced(state, next_params, new_buffers, new_opt_state, samples, makes_update, kind, lease)
        if lease is not None and lease.step is None:  # written by this step
            lease.step = new.step
        if snapshot is not None:  # freed now, and not with the caller's frame, when signals no longer wait
            snapshot.copies.clear()
        return new, metrics
    finally:
        torch_private.set_grad_enabled(grad_mode)


def _in_memory_of(old: Params, values: Params) -> Params:
    """Values in the memory of the tensors of the same names, where they fit."""
    result = dict(values)
    for name, tensor in old.items():
        value = values[name]
        if value is not tensor and (value.shape, value.dtype) == (tensor.shape, tensor.dtype):
            result[name] = tensor.copy_(value)
    return result


def _copy_into(owned: Params, replaced: Params, opt_state: Any) -> Any:
    """Copy the new tensors of a functional update into the step's own, which the module holds.

    What shares memory with these, values from another parameter or in the optimizer's state, is copied first. Returns
    that state.
    """
    values = copied_where_shared([*replaced.values()], owned.values())
    tensors = [owned[name] for name in replaced]
    opt_state = copied_where_shared(opt_state, tensors)
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
    return opt_state


def copied_where_shared(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """The tree, with copies of what shares memory with these tensors, over which a donated step writes."""
    memories = {*map(memory_of, tensors)} - {None}  # a trace's tensors have no memory; its program takes them apart
    return map_tensors(lambda tensor: tensor.clone() if memory_of(tensor) in memories else tensor, tree)


def with_report(metrics: dict[str, Metric], report: Mapping[str, Any], samples: int) -> dict[str, Metric]:
    """The metrics of a step, with those that its update reports before anything is written, in a new dict."""
    for name in report:
        if name in metrics:
            raise ValueError(f"the update reports {name!r}, and the gradient function does so too: rename one")
    # A Mean is taken as it is, without a copy: first halves compute what they report.
    plain = {name: value for name, value in report.items() if type(value) is not Mean}
    return {**metrics, **report, **(aux_records(plain, samples) if plain else {})}


def with_late_report(metrics: dict[str, Metric], report: Mapping[str, Any], samples: int) -> dict[str, Metric]:
    """The metrics of a step, with those that its update reports when the state is spent: nothing can be refused by then."""
    named = {f"{name}/update" if name in metrics else name: value for name, value in report.items()}
    return {**metrics, **aux_records(named, samples)}


def advanced(
    state: TrainState,
    params: Params,
    buffers: dict[str, Tensor],
    opt_state: Any,
    samples: int,
    applied: bool,
    kind: UpdateKind,
    lease: Lease | None,
) -> TrainState:
    """The next state: these trees, and the counts after the update."""
    step, epoch, batch, consumed = state.step + applied, state.epoch, state.batch, state.samples
    batch_samples, no_batch = state.batch_samples, kind.own_event
    if kind.own_event:
        batch_steps = int(applied)
    elif kind.same_batch:
        batch_steps, no_batch = state.batch_steps + applied, state.no_batch
    else:
        batch, consumed, batch_samples, batch_steps = batch + 1, consumed + samples, samples, int(applied)
        if batch == state.epoch_length:
            epoch, batch = epoch + 1, 0
    return next_state(
        state, lease, step=step, epoch=epoch, batch=batch, samples=consumed, batch_samples=batch_samples, batch_steps=batch_steps,
        no_batch=no_batch, _params=params, _buffers=buffers, _opt_state=opt_state,
    )  # fmt: skip
