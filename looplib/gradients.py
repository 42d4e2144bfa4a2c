"""Gradient functions: from a state and a batch to the gradients of a loss.

`make_grad_fn` runs your loss function on your module with the state's tensors in it, and takes the gradient inside
that call, so hooks, buffers and activation checkpointing behave as in a raw loop. What stands between the loss and the
update is either a wrapper of a gradient function, which decides how the gradient is computed (accumulation, ranks), or a
part of the update, which acts on a gradient that has been computed (clipping, skipping, averages).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import modules as _modules
from looplib._core import torch_private
from looplib._core.contracts import BatchPart
from looplib._core.engines import Sync, sync_over_ranks, warn_of_lone_ranks
from looplib._core.forward_writes import put_back, with_copies
from looplib._core.graphs import LossGraphs, check_batch
from looplib._core.lease import check_assigned, lease_replaced, overwritten, trees_of
from looplib._core.mappings import pairs, without
from looplib._core.misuse import LossWatch, left_behind
from looplib._core.passes import Passes, passes
from looplib._core.random import mix
from looplib._core.ranks import placed_like, rank_and_size
from looplib._core.records import Made, check_function_of_model, with_record, with_repr
from looplib._core.samples import as_counter, padding_batch
from looplib._objective import (
    aux_records,
    copied_if_leaf,
    objective_of,
    record,
    split_loss,
    uncounted,
    with_own_weight,
    without_weight,
)
from looplib.metrics import Mean
from looplib.types import GradFn, Gradients, LossFn, TrainState

__all__ = ["make_grad_fn"]


def make_grad_fn(
    model: nn.Module,
    loss_fn: LossFn,
    *,
    trainable: Callable[[str, Tensor], bool] | None = None,
    allow_unused: bool = False,
    per_rank: Callable[[str, Tensor], bool] | None = None,
    count_samples: Callable[[Any], int] | None = None,
    reentrant: bool = False,
) -> GradFn:
    """Make a pure gradient function from a module and a loss function.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> grad_fn = ll.make_grad_fn(model, loss_fn)
    >>> gradients = grad_fn(ll.init_state(model), (torch.zeros(4, 2), torch.ones(4, 1)))
    >>> sorted(gradients.grads), gradients.samples
    (['bias', 'weight'], 4)

    The same state and batch always give the same gradients, because dropout and other draws are seeded from the
    state. If the module is wrapped in DDP or sharded by FSDP2, the result is the gradient of the global batch over
    all ranks, even if their batches have different sizes or token counts.

    Called by hand, it leaves the module as it was: the gradients and the moved buffers are in the result, and another call
    with this state draws the same dropout masks. In a loop with torch's own optimizer, call it by `ll.grads.backward`.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        loss_fn: `loss_fn(model, batch)`, which returns a scalar loss (the mean over the samples), a
            `Mean(total, weight)`, or `(loss, aux)` with a dict of scalars and metrics.
        trainable: `(name, tensor) -> bool`, selects the parameters to train. Defaults to all that require a gradient when
            `make_grad_fn` is called; a warning names those whose `requires_grad` changes later. Use it for steps that train
            different parts over one state; what no step trains, freeze by `requires_grad_(False)`.
        allow_unused: skip parameters that the loss does not reach, as a raw loop does, instead of raising.
        per_rank: `(name, tensor) -> bool`, selects trained parameters whose gradients differ between the ranks on purpose,
            such as the experts that each rank holds for itself. The gradients of all others are compared between the ranks in
            the steps 1, 2, 4, 8, ... of a model in DDP or FSDP2.
        count_samples: function from a batch to its number of samples, for batches that the rule of `ll.data.count_samples`
            cannot count, or counts differently, such as packed rows. Functions around this one (`accumulate`) use it too.
        reentrant: True if the loss has a function that runs a backward pass of its own, such as
            `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`. The backward pass is then that of a raw loop. Without
            it, such a function is refused if "checkpoint" is in its name. Under another name it is not recognized, and its
            weights get no gradient from it: a weight that no other layer uses is refused as one without a gradient, and one
            that others use too (tied) lacks this part of its gradient, without an error. With `allow_unused=True`, neither is
            noticed.

    Raises:
        ValueError: `trainable` selects no parameter, or one that requires no gradient; the loss is not a scalar or reaches no
            parameter; a parameter has no gradient or carries a graph; a tensor of the batch carries one; the batch has no
            samples or cannot be counted; or the state belongs to a different model. The message gives the names.
        TypeError: `loss_fn` returns anything else, or a complex loss.
        RuntimeError: the module is wrapped in DDP or FSDP2, and the state is not bound to it or the step does not
            donate; gradients of step 1, 2, 4, 8, ... differ between the ranks, since the wrapper has not averaged them, as with
            parameters that were added after it; the loss has a checkpoint that needs `reentrant=True`; or, without `donate`,
            the forward pass writes to a parameter.

    **Training mode.** What counts is the mode at the call of `make_grad_fn`. If the module itself is in training mode
    then, it is so during each call, and submodules that are in eval mode stay in it. If one of those has dropout and
    trainable parameters, a warning names it: models from `from_pretrained` come in eval mode, and stay in it inside a
    peft wrapper. If the module itself is in eval mode, that is taken for an oversight: all of it runs in training mode,
    submodules too, and a warning names its batch norm and dropout layers. Layers that go into eval mode later still run in
    training mode. A warning says so if they go alone, or with the whole module before the first call; `model.eval()` between
    two steps is taken for an evaluation of your own.

    **Random draws.** torch's random streams are seeded from `(seed, step, rank, microbatch)` for the call and
    restored afterwards. Steps of several threads take turns, because threads share torch's stream of the CPU. If
    another thread of yours draws (`torch.rand`) during a step, it takes the step's numbers.

    **Whose tensors.** If the state is bound to the module, the module runs on its own tensors, hooks included.
    Otherwise the state's tensors take their place during the call.

    **Gradients of anything else** that the loss reaches, such as a second network or a leaf in the batch, stay as they are.
    With `reentrant=True` and in FSDP2, the backward pass adds to theirs, as in a raw loop: call `zero_grad()` before you use
    them, or `requires_grad_(False)` if nothing trains them.

    **Looked for in the calls 1, 2, 4, 8, ...**, since looking takes longer than a small step:

    - Writes to parameters that torch does not count (`weight.data.clamp_()`), which a pure step refuses. Writes that begin
      later change the state until the next of these calls names them; so does the first write of a model above 1 GiB, of which
      no copy is taken, unless its layer is known to write (`nn.Embedding(max_norm=...)`).
    - Checkpoints with `use_reentrant=True`. One that comes later is also noticed if a parameter has no gradient any more. If
      other layers use all of its weights too, gradients lack its part until the next of these calls: give `reentrant=True`
      from the beginning. A donated step that is refused for a checkpoint leaves its state as it was, since the graph is there
      before the update. If the forward pass had written parameters by then, or LBFGS was evaluating the loss again, the
      state is spent, and a note of the error says so.
    """
    check_function_of_model(model, loss_fn, "make_grad_fn", "loss_fn")
    host = _modules.FunctionalModule(model, training=True)
    names = _modules.trainable_names(model, trainable)
    needed = [] if allow_unused else names
    host.warn_of_eval_mode(names)
    graphs = LossGraphs(plain=reentrant or host.sharded)
    warn_once = cache(partial(warn_of_lone_ranks, model))
    counter = as_counter(count_samples)
    passes_of = _passes_of(host, loss_fn, counter, graphs)

    def grad_fn(
        state: TrainState,
        batch: Any,
        *,
        index: int = 0,
        scale: Tensor | None = None,
        donate: bool = False,
        in_step: bool = False,
        part: BatchPart | None = None,
    ) -> Gradients:
        outs, _ = run(state, (batch,), index=index, scale=scale, donate=donate, in_step=in_step, part=part)
        return outs[0]

    def run(
        state: TrainState,
        batches: Sequence[Any],
        *,
        part: BatchPart | None,
        index: int = 0,
        scale: Tensor | None = None,
        donate: bool = False,
        in_step: bool = False,
    ) -> tuple[list[Gradients], int]:
        """Run microbatches in order, with the state's tensors placed in the module once.

        Returns their results, the last one with the sum of the gradients, and the number of ranks that average it.
        """
        params, buffers, _ = trees_of(state)
        host.check(params, buffers)
        rank, ranks = rank_and_size()
        sync = None
        if ranks > 1 or host.engine is not None:
            in_place = donate and host.is_bound(params)
            graphs.plain = reentrant or host.sharded
            sync = sync_over_ranks(host.engine, ranks, state, batches, counter, part, in_place, warn_once)
        form = passes()
        if donate:
            call, guarded = _Call(params, names, scale, part, sync, form), None
        else:
            guard = form.guard or host.unwritten
            guarded = guard.begin(params)
            call = _Call(guarded.params, names, scale, part, sync, form)
            guarded = guard.on_leaves(guarded, call.params)
        seeds = form.seeds(state, rank, indices(index, len(batches)))
        copies = with_copies(buffers.values()) if donate and not in_step else None
        grad_mode = torch.is_grad_enabled()
        try:
            torch_private.set_grad_enabled(True)
            if trainable is None:
                host.warn_of_flags()
            body = partial(passes_of, call, batches, seeds)
            # A call by hand may be of any tensors, and is not the step of a run.
            if_unbound = partial(call.begin_unbound, state) if in_step else None
            grads, after = host.run(call.params, buffers, seeds[0], body, donate, if_unbound)
            if sync is not None:
                sync.check_reduced(grads, params, per_rank)
        except BaseException as error:
            _interrupts.waits.depth += 1
            try:
                put_back(copies or ())
                if not isinstance(error, Exception):
                    raise
                if guarded is not None and overwritten(state, (params,)) is None:
                    guard.end(guarded, params)
                batch = batches[min(len(call.outs), len(batches) - 1)]
                raise host.explained(error, params, buffers, batch)
            finally:
                _interrupts.waits.depth -= 1
        finally:
            _interrupts.waits.depth += 1
            try:
                torch_private.set_grad_enabled(grad_mode)
                if sync is not None:
                    sync.end()
            finally:
                _interrupts.waits.depth -= 1
        if call.unbound:
            lease_replaced(state)
            left_behind(model, state, donated=True)
        if guarded is not None:
            trees_of(state)  # raises if another thread has written it since
            guard.check(guarded, params)
            # A forward pass may have assigned a new one, with its graph.
            after = {name: buffer.detach() if buffer.requires_grad else buffer for name, buffer in after.items()}
        if (
            host.engine is not None
            and host.engine.lends_grads
            and not (in_step and (part is None or not part.wrapper))
        ):
            grads = {name: grad.clone() for name, grad in grads.items()}
        if len(grads) < len(needed):
            _refuse_unreached(grads, needed, copies)
        # Not by `_replace`, whose call takes longer.
        _, metrics, _, samples, weight, normalizer, scaled, _ = call.outs[-1]
        call.outs[-1] = Gradients(grads, metrics, after, samples, weight, normalizer, scaled, copies)
        return call.outs, 1 if sync is None else sync.ranks

    facts = Made(
        "grad_fn",
        "make_grad_fn",
        microbatches=run,
        model=model,
        batch_norms=host.batch_norms(),
        loss_graphs=graphs,
        count_samples=counter,
    )
    settings = {
        "trainable": trainable,
        "allow_unused": allow_unused,
        "per_rank": per_rank,
        "count_samples": count_samples,
        "reentrant": reentrant,
    }
    return with_repr(with_record(grad_fn, facts), make_grad_fn, model, loss_fn, **settings)


def _passes_of(
    host: _modules.FunctionalModule, loss_fn: LossFn, count_samples: Callable[[Any], int], graphs: LossGraphs
) -> Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Forward and backward passes of microbatches, with a state's tensors already in the module."""
    microbatch = _microbatch_of(host.model, loss_fn, graphs)

    def uncounted_pass(call: _Call, batch: Any) -> Gradients:
        """A pass that does not count."""
        return host.run_uncounted(partial(microbatch, call, batch, 0))

    def passes_of(
        call: _Call, batches: Sequence[Any], seeds: Sequence[int]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients of all microbatches, and the buffers after them. What each one gives goes into `call.outs`."""
        sync = call.sync
        before = [leaf.grad for leaf in call.inputs]
        try:
            for tensor in call.frozen:
                tensor.requires_grad_(False)
            for leaf in call.inputs:
                leaf.grad = None
            for number, batch in enumerate(batches):
                if number:
                    host.seed(seeds[number])
                samples = count_samples(batch)
                if samples:
                    run_microbatch = partial(microbatch, call, batch, samples)
                else:
                    batch = _stand_in(batch, call.part, sync)
                    run_microbatch = partial(uncounted_pass, call, batch)
                out = run_microbatch() if sync is None else sync.make(number, run_microbatch)
                call.outs.append(out if samples else out._replace(metrics=uncounted(out.metrics)))
            if sync is not None:
                sync.pad(partial(uncounted_pass, call, batch))
            # Each is placed over the ranks as its parameter is.
            grads = {
                name: grad if type(grad) is Tensor else placed_like(leaf, grad)
                for name, leaf in call.leaves.items()
                if (grad := leaf.grad) is not None
            }
            if len(grads) < len(call.leaves):
                graphs.check_unreached(call.loss, call.leaves.keys() - grads.keys())
            return grads, host.buffers() if host.slots.buffers else {}
        finally:
            _interrupts.waits.depth += 1
            try:
                for tensor in call.frozen:
                    tensor.requires_grad_(True)
                for leaf, grad in pairs(call.inputs, before):
                    leaf.grad = grad
            finally:
                _interrupts.waits.depth -= 1

    return passes_of


def _microbatch_of(model: nn.Module, loss_fn: LossFn, graphs: LossGraphs) -> Callable[..., Gradients]:
    """Forward and backward pass of one microbatch, a function of its own so that its graph is freed before the next."""
    watch = LossWatch()

    def microbatch(call: _Call, batch: Any, samples: int) -> Gradients:
        """One pass, which adds to the gradients of the leaves. One of 0 samples does not count."""
        call.loss = None
        if not call.form.traced:
            check_batch(batch)
        with call.form.around_loss:
            out = loss_fn(model, batch)
        if not call.outs and not call.form.traced and any(leaf.grad is not None for leaf in call.inputs):
            raise ValueError(_OWN_BACKWARD)
        loss, aux = split_loss(out)
        if isinstance(loss, Mean):
            loss = with_own_weight(loss) if samples else without_weight(loss)
            if aux:
                watch.look_beside(loss, aux, samples)
        value, factor, weight, normalizer = objective_of(loss, samples, call.part, call.sync)
        if call.part is not None and call.part.normalizer is None:
            call.part = replace(call.part, normalizer=normalizer)
        if samples and not isinstance(loss, Mean) and (call.part is not None or call.sync is not None):
            watch.look(batch, value, samples)
        call.loss = value
        if not call.form.traced:
            graphs.look(value, call.params)
        inputs = () if graphs.plain and not call.form.traced else call.inputs
        _backward(value, factor, call.scale, inputs, call.form.create_graph)
        if value.is_leaf or torch_private.is_view(value):  # a parameter, or a part of one
            loss = copied_if_leaf(loss)
        metrics = {"loss": record("loss", loss, samples)}
        if aux:
            metrics |= aux_records(aux, samples)
        return Gradients({}, metrics, {}, samples, weight, normalizer, call.scale)

    return microbatch


def _backward(
    loss: Tensor, factor: Tensor | float, scale: Tensor | None, inputs: Sequence[Tensor], create_graph: bool
) -> None:
    """Backward pass of loss * factor * scale, into these leaves or, without any, into all that it reaches."""
    # The backward pass begins with the factors, which takes no operation. It gets a new tensor each time, since the gradient
    # of a parameter may be a view of it.
    seed = factor if isinstance(factor, Tensor) else torch.full_like(loss, factor)
    if scale is not None:
        seed = seed * scale.to(loss.device)  # the scale is on the first parameter's
    if seed is factor or scale is not None:
        seed = seed.to(loss).reshape(loss.shape)
    torch_private.run_backward(
        (loss,), (seed,), create_graph, create_graph, inputs, allow_unreachable=True, accumulate_grad=True
    )


def _stand_in(batch: Any, part: BatchPart | None, sync: Sync | None) -> Any:
    """A batch to run the model on in place of one without samples, since other ranks or microbatches may have some."""
    if sync is None and (part is None or (part.samples == 0 and not part.local)):
        raise ValueError("the batch has no samples, so its mean loss has no value: leave it out")
    return padding_batch(batch)


_OWN_BACKWARD = (
    "loss_fn returns the loss and does not call loss.backward(). This one has run a backward pass into the parameters, and the step "
    "runs one over what it returns, so gradients would count twice, or without the factors of accumulation and of a loss scale. "
    "Return the loss, or the sum of its parts; for a gradient within a loss, call torch.autograd.grad"
)
_UNREACHED = (
    "no gradient reached {names}: the loss does not depend on them. Freeze them (requires_grad_(False)), choose what this "
    "step trains with make_grad_fn(..., trainable=...), or leave them as they are with make_grad_fn(..., allow_unused=True)"
)


def _refuse_unreached(
    grads: Mapping[str, Tensor], needed: Sequence[str], copies: Sequence[tuple[Tensor, Tensor]] | None
) -> None:
    """Raise for parameters that have no gradient, after putting buffers back."""
    put_back(copies or ())
    raise ValueError(_UNREACHED.format(names=", ".join(name for name in needed if name not in grads)))


class _Call:
    """Record that the passes of one call share.

    Attributes:
        scale, part, sync: as given; `part` with the normalizer that the first pass has chosen.
        form: how its passes run.
        leaves: trained parameters as the leaves of the call's graphs, with their gradients in `grad`.
        inputs: the same, as a backward pass takes them.
        params: all parameters, including the trained ones.
        frozen: other parameters that require a gradient; they get none.
        outs: what each microbatch gave; the last one gets the gradients.
        loss: of the last microbatch.
        unbound: True for a donated step on tensors that are not the module's.
    """

    __slots__ = ("form", "frozen", "inputs", "leaves", "loss", "outs", "params", "part", "scale", "sync", "unbound")

    def __init__(
        self,
        params: dict[str, Tensor],
        names: Sequence[str],
        scale: Tensor | None,
        part: BatchPart | None,
        sync: Sync | None,
        form: Passes,
    ) -> None:
        self.scale, self.part, self.sync, self.form = scale, part, sync, form
        self.leaves = {
            name: tensor if (tensor := params[name]).requires_grad and tensor.is_leaf else _leaf(name, tensor)
            for name in names
        }
        self.inputs = tuple(self.leaves.values())
        self.params = {**params, **self.leaves}
        self.frozen: list[Tensor] = []
        if len(names) < len(params):
            rest = {name: tensor for name, tensor in without(params, self.leaves).items() if tensor.requires_grad}
            check_history(rest)
            self.frozen = [*rest.values()]
        self.outs: list[Gradients] = []
        self.loss: Any = None
        self.unbound = False

    def begin_unbound(self, state: TrainState) -> None:
        """A donated step begins on a state that is not bound to the module."""
        self.unbound = True
        check_assigned(state)  # before a forward pass that replaces the memory of a parameter


def indices(index: int, count: int) -> Sequence[int]:
    """Indices of the microbatches of a part, distinct even if the part is itself a microbatch of another."""
    if count == 1:
        return [index]
    return range(count) if not index else [mix(index, number) for number in range(count)]


def _leaf(name: str, tensor: Tensor) -> Tensor:
    check_history({name: tensor})
    return tensor.detach().requires_grad_()


_TRAINED = (
    "compute it under torch.no_grad(), or give its detach(); to take the gradient through the step, use "
    "ll.transforms.differentiable(train_step)"
)
EVALUATED = (
    "eval and predict steps would cut its gradient off. Take the loss itself, "
    "torch.func.functional_call(model, state.params, inputs), or if you want no gradient, give its detach(), or "
    "call the step under torch.no_grad()"
)


def check_history(params: Mapping[str, Tensor], instead: str = _TRAINED) -> None:
    """Raise if a parameter carries a graph: a step would cut off its gradient, and a donated step would keep the graph."""
    for name, tensor in params.items():
        if tensor.grad_fn is not None or (
            torch_private.in_transform(tensor) and torch_private.is_differentiated(tensor)
        ):
            graph = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else "torch.func"
            raise ValueError(
                f"the parameter {name} of the state was computed from others, with a graph behind it ({graph}): {instead}"
            )
