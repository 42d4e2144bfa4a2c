"""Training state: create one, copy it, and bind it to a module."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor, nn

from looplib._core import interrupts, lease, misuse, torch_private
from looplib._core import modules as _modules
from looplib._core import random as draws
from looplib._core.checks import check, check_optional_count, check_type, few, is_plain, named
from looplib._core.copies import shared_copy
from looplib._core.engines import engine_of
from looplib._core.forward_writes import WROTE, put_back, versions, written_since
from looplib._core.graphs import functions_behind, runs_again
from looplib._core.mappings import fields_of, pick
from looplib._core.memory import named_tensors, overlaps
from looplib._core.random import mix
from looplib._core.records import MANY, check_kind, described, kind_of, settings_of
from looplib._core.torch_private import pytree
from looplib._core.torch_storage import identity_of_memory
from looplib._graft import Grafted, graft
from looplib.types import (
    TREES,
    Optimizer,
    Run,
    TrainState,
    check_state,
)

__all__ = ["Grafted", "apply", "bind", "copy_state", "end_epoch", "fold_in", "fresh", "graft", "init_state"]


def init_state(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    loader: Any = None,
    epoch_length: int | None = None,
    extra: Any = None,
) -> TrainState:
    """Create the initial training state, bound to `model`: it holds the module's own tensors, not copies.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=1e-3), seed=0)
    >>> state.params["weight"] is model.weight
    True
    >>> loader = ll.make_loader(range(10), batch_size=4)
    >>> ll.init_state(model, loader=loader).epoch_length
    3

    Args:
        model: the `nn.Module`, with or without torch's wrappers. Parameter names are those of the innermost module.
        optimizer: an optimizer whose `init` creates `opt_state`, for the parameters that require a gradient now. None for a
            state used only for evaluation.
        seed: int from which dropout and all other random draws of the steps are derived.
        loader: the loader of the run, or a list of all that it trains on, the first of which counts the batches of an epoch:
            `len(loader)`, or None for a stream. The settings of looplib's loaders are kept in `state.run`, for checkpoints
            to store and for restores and ranks to compare. A torch DataLoader, or anything else with `__len__` that is not
            indexed, gives only its length. Loaders that only evaluate are not among them.
        epoch_length: number of batches in an epoch, in place of the loader's: for a run without a loader object, or to
            end the epochs of a stream. For a loader whose epochs differ in length, such as those of `ll.data.growing`,
            write `ll.init_state(..., loader=loader).replace(epoch_length=None)`.
        extra: a pytree of your own, kept in `state.extra` and checkpointed: tensors, ints of any size, floats, strings,
            bytes, bools and None, in dicts, lists, tuples and registered pytrees. Turn NumPy arrays into tensors
            (`torch.from_numpy`). For global random streams and objects with a `state_dict`, see `ll.checkpoint.capture`.

    Raises:
        TypeError: `model` is not a module, `optimizer` is not an `ll.optimizer(...)`, `loader` is a dataset, a batch or
            something else that is not a loader, or `seed` is not an int.
        ValueError: a lazy parameter has no shape yet, no parameter requires a gradient, `epoch_length` is 0, a trained parameter
            is on the meta device, or what is trained or kept by the optimizer shares memory with another tensor.
    """
    slots = _modules.members(model)
    advice = "an epoch has 1 batch or more, or give None for a stream"
    loaders = _loaders_of(loader)
    lengths = [*map(_length_of, loaders)]
    if epoch_length is None and lengths:
        epoch_length = lengths[0]
    check_optional_count("epoch_length", epoch_length, advice=advice)
    check_type("seed is", seed, SupportsIndex, "give an int")
    params, buffers = _modules.tensors(slots.params), _modules.tensors(slots.buffers)
    opt_state = None
    if optimizer is not None:
        check_kind(optimizer, "init_state", "optimizer")
        names = _modules.trainable_names(model)
        opt_state = _first_opt_state(optimizer, params, buffers, names)
    run = Run(
        optimizer=None if optimizer is None else described(optimizer) or None,
        model=described_model(model),
        loaders=_described_loaders(loaders),
    )
    return TrainState(
        epoch_length=epoch_length,
        params=params,
        buffers=buffers,
        opt_state=opt_state,
        seed=operator.index(seed),
        extra=extra,
        run=run,
    )


def _loaders_of(loader: Any) -> list[Any]:
    """The loaders of a run, which are given as one, as a list, or not at all."""
    loaders = [*loader] if isinstance(loader, (list, tuple)) else [] if loader is None else [loader]
    check(loaders or loader is None, "loader is an empty list; give the loaders of the run, or leave it out")
    return loaders


def _described_loaders(loaders: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(described(loader) for loader in loaders if kind_of(loader) == "loader")


def _length_of(loader: Any) -> int | None:
    """Number of batches that a loader gives in an epoch; None for a stream.

    >>> _length_of(torch.utils.data.DataLoader(range(5), batch_size=2))
    3

    Raises TypeError for what is not a loader: the length of a dataset is its number of samples, and that of a batch too.
    """
    check(
        hasattr(type(loader), "__len__") and not hasattr(type(loader), "__getitem__"),
        f"loader is {named(loader)}; give what ll.make_loader returns, a DataLoader, or a list of these. For batches from "
        "elsewhere, give their number: init_state(..., epoch_length=len(batches)), or None for a stream",
        TypeError,
    )
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # as of a DataLoader over a dataset without a length
        return None


def _first_opt_state(
    optimizer: Optimizer, params: dict[str, Tensor], buffers: dict[str, Tensor], names: Iterable[str]
) -> Any:
    """The optimizer's state before its first update of the parameters with these names."""
    trained = pick(params, names)
    _modules.check_materialized(trained)
    with torch.inference_mode(False):  # steps take no tensors made there
        opt_state = optimizer.init(trained, buffers=buffers)
    plain = {name: tensor for name, tensor in {**params, **buffers}.items() if is_plain(tensor)}
    written = named_tensors("opt_state", opt_state)
    for first, other in overlaps({**plain, **written}):
        check(
            not {first, other} & {*trained, *written},
            f"{first} and {other} are two tensors that share memory: training one in place would change the "
            "other, and a copy of the state would part them. Register one tensor under both names "
            "(model.decoder.weight = model.encoder.weight), or give one memory of its own (.detach().clone(), also in "
            "an optimizer's init)",
        )
    return opt_state


def fresh(
    state: TrainState,
    optimizer: Optimizer | None = None,
    *,
    seed: int,
    loader: Any = None,
    extra: Any = None,
) -> TrainState:
    """Start a new run from the weights of a state: its counts, position, optimizer state and `extra` begin again.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> pretraining, finetuning = ll.optimizer(torch.optim.SGD, lr=0.1), ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), pretraining)
    >>> trained, metrics = train_step(ll.init_state(model, pretraining), torch.ones(4, 2))
    >>> state = ll.state.fresh(trained, finetuning, seed=1)
    >>> state
    TrainState(step=0, epoch=0, batch=0, samples=0, params=2 tensors (3 numbers), seed=1)
    >>> list(state.opt_state), state.params["weight"] is trained.params["weight"]
    (['AdamW'], True)

    The result is what `init_state` makes of a module that has the state's weights and buffers.

    Parameters and buffers are shared, not copied, so a donated step of either run spends the state of the other. To
    continue both, start from a copy: `ll.state.fresh(ll.copy_state(state), optimizer, seed=1)`. Averages require no gradient.
    To start from them, write them into the module: `ll.state.fresh(ll.bind(model, ll.eval_state(averaging, state)), ...)`.

    Args:
        state: the state whose weights to start from.
        optimizer: the optimizer of the new run, as in `init_state`, for the state's parameters that require a gradient.
        seed: int from which the new run draws. The seed of the old run gives the same order of samples and the same
            dropout masks again.
        loader: the loader of the new run, or a list of all, as in `init_state`. Without it, `epoch_length` is the state's, and
            no settings of a loader are kept: those of the old run's loaders are not the new run's.
        extra: the new run's pytree, as in `init_state`. That of `state` belongs to the old run and is left out.

    Raises:
        TypeError: `optimizer` is not an `ll.optimizer(...)`, `loader` is not a loader, or `seed` is not an int.
        ValueError: no parameter requires a gradient, a trained one is on the meta device or shares memory with another tensor, or
            the state is a stack.
        DonatedStateError: the state was donated to a step.
    """
    check_state(state, "ll.state.fresh(state, optimizer, seed=...)")
    check_type("seed is", seed, SupportsIndex, "give an int")
    check(
        not isinstance(state.seed, tuple),
        "this state is a stack, whose members have a seed and an optimizer state each: give one of "
        "ll.transforms.unstack_states(stack), and stack the results",
    )
    opt_state = None
    if optimizer is not None:
        check_kind(optimizer, "fresh", "optimizer")
        names = _modules.requiring_gradient(
            state.params,
            "this state",
            ". Averages require none: to train from them, give ll.bind(model, ll.eval_state(averaging, state))",
        )
        opt_state = _first_opt_state(optimizer, state.params, state.buffers, names)
    loaders = _loaders_of(loader)
    lengths = [*map(_length_of, loaders)]
    return TrainState(
        epoch_length=lengths[0] if lengths else state.epoch_length,
        params=state.params,
        buffers=state.buffers,
        opt_state=opt_state,
        seed=operator.index(seed),
        extra=extra,
        run=Run(
            optimizer=None if optimizer is None else described(optimizer) or None,
            model=state.run.model,
            loaders=_described_loaders(loaders),
        ),
    )


def described_model(model: nn.Module) -> dict[str, Any]:
    """Describe a model by its class, its size, its `config`, and the configs of its adapters.

    >>> described_model(nn.Linear(2, 1))
    {'class': 'Linear', 'parameters': 3}
    """
    model = _modules.innermost(model)
    adapters = getattr(model, "peft_config", None)
    try:
        config = _config_of(model)
    except Exception as error:  # the user's own, which may be anything, and no reason to end the run
        config = {"config": f"not described: {error!r}"}
    return {
        "class": type(model).__qualname__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **config,
        **({"adapters": described(adapters)} if isinstance(adapters, Mapping) else {}),
    }


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    settings = config if isinstance(config, Mapping) else settings_of(config) or {}
    # A dict of many, such as the names of a thousand classes, is no setting that one reads.
    return {
        str(name): f"dict of {len(value)}" if isinstance(value, Mapping) and len(value) > MANY else described(value)
        for name, value in settings.items()
    }


def copy_state(state: TrainState) -> TrainState:
    """Copy a state, tensors included, so that a donated step can consume either copy.

    >>> import looplib as ll, torch
    >>> state = ll.init_state(torch.nn.Linear(2, 1))
    >>> kept = ll.copy_state(state)
    >>> kept.params["weight"] is state.params["weight"]
    False

    Tensors that occur twice in the state are still shared with each other in the copy, and frozen parameters that the
    members of a stack share are still held once.

    Args:
        state: the state to copy.

    Raises:
        DonatedStateError: the state was donated to a step.
    """
    check_state(state, "ll.copy_state(state)")
    of_stack = isinstance(state.seed, tuple)  # whose graphs never write what its members share
    shared = {id(tensor) for tensor in state.params.values() if of_stack and not tensor.requires_grad}
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            new = shared_copy(tensor) if id(tensor) in shared else tensor.detach().clone()
            copies[id(tensor)] = new.requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    with torch.inference_mode(False):  # steps take no tensors made there
        copied = state.replace(**pytree.tree_map_only(Tensor, copy, fields_of(state, TREES)))
    lease.check_valid(state)  # raises if another thread has written it since
    return copied


def bind(model: nn.Module, state: TrainState, *, resize: bool = False) -> TrainState:
    """Copy a state's values into the module and return a state that is bound to it.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> kept = ll.copy_state(ll.init_state(model))
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> state = ll.bind(model, kept)
    >>> state.params["weight"] is model.weight, torch.equal(model.weight, kept.params["weight"])
    (True, True)

    Use it after training with pure steps, before `torch.save(model.state_dict(), ...)`: the module does not follow
    the state unless the state is bound to it.

    The returned state shares no tensors with the given one, which stays valid. Other states bound to the module can
    no longer be used, because their tensors are overwritten. A state that is already bound to the module is returned
    unchanged.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        state: a state with the module's parameter names and shapes, in any dtype and on any device.
        resize: if True, parameters and buffers whose shape is not the state's get it, and stay the same objects. For a run
            that adds and prunes rows (`ll.optim.take_rows`). Steps and gradient functions of the module need not be made again.

    Raises:
        ValueError: names or shapes differ from the module's, the module is on the meta device, or the state is a stack.
            Nothing is copied then. With `resize`, the module is within DDP or FSDP2, which were made for the old shapes.
        DonatedStateError: the state was donated to a step.
    """
    check_state(state, "ll.bind(model, state)")
    slots = _modules.members(model)
    _modules.check_names("parameters", state.params, slots.params, model, shapes=not resize)
    _modules.check_names("buffers", state.buffers, slots.buffers, model, shapes=not resize)
    check(
        not (resize and isinstance(state.seed, tuple)),
        "this state is a stack: bind one of ll.transforms.unstack_states(stack)",
    )
    params, buffers = _modules.tensors(slots.params), _modules.tensors(slots.buffers)
    targets, of_state = {**params, **buffers}, {**state.params, **state.buffers}
    if all(of_state[name] is tensor for name, tensor in targets.items()):
        return state
    _modules.check_materialized(targets)
    misuse.bound(model)
    bound = copy_state(state)
    values = {**bound.params, **bound.buffers}
    # Frozen parameters and masks, which states of pure steps share with the module, are not written.
    writes = [(tensor, values[name]) for name, tensor in targets.items() if not same_value(tensor, values[name])]
    reshaped = [(tensor, value) for tensor, value in writes if tensor.shape != value.shape]
    engine = engine_of(model) if reshaped else None
    check(
        engine is None,
        f"{engine and engine.name} has been made for the parameters' old shapes: bind the module before it is wrapped, or "
        "leave it unwrapped, and give its gradient function to ll.grads.reduce_gradients",
    )
    interrupts.install()
    interrupts.waits.depth += 1  # until no state that is spent can be read
    try:
        for tensor, value in reshaped:
            tensor.data, tensor.grad = torch.empty_like(value, dtype=tensor.dtype, device=tensor.device), None
        new_lease = lease.lease_over("ll.bind(model, state)", [tensor for tensor, _ in writes])
        new_lease.write()
        put_back(writes)
        new_lease.step = state.step
    finally:
        interrupts.waits.depth -= 1
    return bound.replace(params=params, buffers=buffers)


def apply(
    model: nn.Module, weights: TrainState | Mapping[str, Tensor], *args: Any, method: str = "", **kwargs: Any
) -> Any:
    """Functional call: run a module, a submodule or a method with other weights, and leave the module as it is.

    >>> import looplib as ll, torch
    >>> networks = torch.nn.ModuleDict({"actor": torch.nn.Linear(2, 1), "critic": torch.nn.Linear(2, 1)})
    >>> kept = ll.copy_state(ll.init_state(networks))
    >>> x = torch.ones(3, 2)
    >>> expected = networks["critic"](x)
    >>> _ = torch.nn.init.zeros_(networks["critic"].weight)
    >>> torch.equal(ll.state.apply(networks, kept, x, method="critic"), expected)
    True

    Use it in a loss that needs two versions of one network, such as a target network (`ll.optim.average`), a reference
    policy, or a member of a population. For whole batches, `make_predict_step` runs a state in eval mode.

    The module runs in the modes that it is in, and gradients flow into the weights if they require them; take targets under
    `torch.no_grad()`. Buffers, and the weights of embeddings with `max_norm`, are copied first, so neither the module's nor
    the given ones change. It draws from torch's random streams, in a loss those of the step.

    Args:
        model: the `nn.Module`, with or without torch's wrappers, which are not called.
        weights: a state of the model, or name -> tensor under the names of the whole model: parameters, and buffers if they
            are not to be the model's. Frozen parameters that are not there are the model's own. Tied tensors may be under
            one of their names or all, as in a `state_dict`. What is called needs the parameters that it shares with other
            parts, such as an encoder, under the names where the model registers them first.
        args, kwargs: for the call.
        method: path of a submodule or a method within the model, such as "critic" or "actor.get_action". "" calls the model.

    Raises:
        ValueError: the names or shapes are not the model's, a trained parameter of what is called is missing, tied names have
            different tensors, there is no such method, or the module is sharded by FSDP2, which runs its own parameters.
        TypeError: `weights` is neither a state nor a mapping.
        RuntimeError: the forward pass wrote to the weights in place, such as by `weight.clamp_()` (writes to `weight.data`
            are not found), or a torch.utils.checkpoint within the module would run again without the weights in the backward
            pass (`ll.losses.recompute` runs with them).
        DonatedStateError: the state was donated to a step.

    Source: `torch.func.functional_call`, `flax.linen.Module.apply`.
    """
    slots = _modules.members(model)
    if isinstance(weights, TrainState):
        _modules.check_names("parameters", weights.params, slots.params, model)
        _modules.check_names("buffers", weights.buffers, slots.buffers, model)
        weights = {**weights.params, **weights.buffers}
    check_type("weights is", weights, Mapping, "give a state, or a mapping of names to tensors")
    of_model = _modules.tensors([*slots.params, *slots.buffers])
    inner = dict(_modules.named_modules(model))  # without wrappers, of which each name's last one is in the others
    steps = method.split(".") if method else []
    parents = [".".join(steps[:end]) for end in range(len(steps) + 1)]
    called = next(name for name in reversed(parents) if name in inner)
    path = method.removeprefix(called).removeprefix(".")
    if weights.keys() - of_model.keys():
        weights = _under_first_names(weights, _modules.first_names(model))
    owners = {id(torch_private.own_parameters(module)) for module in inner[called].modules()}
    _check_weights(model, weights, of_model, {slot.name for slot in slots.params if id(slot.owner) in owners}, called)
    function: Any = inner[called]
    try:
        function = operator.attrgetter(path)(function) if path else function
    except AttributeError:
        function = None
    check(callable(function), f"this {type(model).__name__} has no submodule or method {method!r}")
    engine = engine_of(inner[called])
    check(
        engine is None,
        f"{engine and engine.name} within this {type(model).__name__} runs its own parameters, whatever others are given: run "
        "it on a state by ll.make_predict_step",
    )
    with draws.turn:  # while no other thread runs the module
        shortened = _modules.names_of_shortened(model.modules(), slots.params) & weights.keys()
        copies = {name: weights[name].clone() for name in shortened}
        swaps = [(slot, slot.owner[slot.key], copies.get(slot.name, weights.get(slot.name))) for slot in slots.params]
        entries = [(slot.owner, slot.key, tensor) for slot, _, tensor in swaps if tensor is not None]
        # Within a step its own may be written as by a call of the model: the step knows if they may.
        kept = {
            slot.name: tensor
            for slot, before, tensor in swaps
            if not (tensor is None or slot.name in copies or (tensor is before and _modules.running.models))
        }
        counts = versions(kept)
        for slot in slots.buffers:
            buffer = weights.get(slot.name, of_model[slot.name])
            swaps.append((slot, slot.owner[slot.key], copies.setdefault(slot.name, buffer.clone())))
        around = _modules.running.lent
        lent = _modules.Lent([*(around.entries if around else ()), *entries], around.run_again if around else set())
        changed = any(tensor is not before for _, before, tensor in swaps if tensor is not None)
        swaps += [(slot, None, None) for slot in slots.empty]
        try:
            _modules.running.lent = lent
            for slot, _, tensor in swaps:
                if tensor is not None:
                    slot.owner[slot.key] = tensor
            out = function(*args, **kwargs)
        finally:
            for slot, before, _ in swaps:
                slot.owner[slot.key] = before
            _modules.running.lent = around
        if written := written_since(kept, counts):
            raise RuntimeError(WROTE.format(names=few(written), state="The weights that were given have changed"))
        if changed and torch.is_grad_enabled():
            _check_runs_once(out, (args, kwargs, weights), lent.run_again)
        return out


def _check_runs_once(out: Any, inputs: Any, run_again: set[Any]) -> None:
    """Raise RuntimeError if a backward pass would run the module again, when it has its own weights."""
    check(
        run_again.issuperset(filter(runs_again, functions_behind(out, inputs))),
        "activation checkpointing (torch.utils.checkpoint) within ll.state.apply runs layers again in the backward pass, when "
        "the module has its own weights again, and gradients would be those of other weights: switch it off in this module, "
        "and wrap the loss function in ll.losses.recompute(loss_fn, layers). Without gradients, call it under torch.no_grad()",
        RuntimeError,
    )


def _under_first_names(weights: Mapping[str, Tensor], first_names: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights under the first of the names of tied tensors, as a state has them. A `state_dict` has all of the names."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        first = first_names.get(name, name)
        known = renamed.setdefault(first, weights.get(first, tensor))
        check(
            known is tensor or _same_detached(known, tensor),
            f"{name} is tied to {first} in the model, and the weights have another tensor under each name: leave out {name}",
        )
    return renamed


def _same_detached(one: Tensor, other: Tensor) -> bool:
    """True for two tensors that are the same numbers in memory, and of which none gets a gradient."""
    (first, memory), (second, other_memory) = (
        ((tensor.shape, tensor.dtype, tensor.stride(), tensor.storage_offset()), identity_of_memory(tensor))
        for tensor in (one, other)
    )
    return first == second and memory == other_memory is not None and not (one.requires_grad or other.requires_grad)


def _check_weights(
    model: nn.Module, weights: Mapping[str, Tensor], of_model: Mapping[str, Tensor], needed: set[str], called: str
) -> None:
    """Raise ValueError unless these are weights of a model, with all that the called submodule trains."""
    title = f"the weights are not those of this {type(model).__name__}"
    missing = [
        name for name, tensor in of_model.items() if name in needed and tensor.requires_grad and name not in weights
    ]
    unexpected = [name for name in weights if name not in of_model]
    shared = [name for name in missing if called and not name.startswith(f"{called}.")]
    check(
        not (missing or unexpected),
        f"{title}: missing {few(missing) if missing else 'none'}, unexpected {few(unexpected) if unexpected else 'none'}; give "
        "them under the names of the whole model, and a part of it as method='name'. To keep the others of a state: "
        "{**state.params, **weights}"
        + (f". {called} shares {few(shared)} with another part, under whose names they are" if shared else ""),
    )
    for name, tensor in weights.items():
        check(
            tensor.shape == of_model[name].shape,
            f"{title}: {name} has shape {tuple(tensor.shape)}, the model's has {tuple(of_model[name].shape)}",
        )


def same_value(tensor: Tensor, value: Tensor) -> bool:
    """True for a tensor that is not trained and has this value already, so that it need not be written."""
    if (
        tensor.requires_grad
        or (tensor.dtype, tensor.shape) != (value.dtype, value.shape)
        or not (is_plain(tensor) and is_plain(value))
    ):
        return False
    return tensor is value or torch.equal(tensor, value.to(tensor.device))


def end_epoch(state: TrainState) -> TrainState:
    """Start the next epoch of a stream: call it after the `for` loop over the loader.

    Loaders with a length do not need it, because each step compares its batch with `epoch_length`. The end of a
    stream is known only when it is reached. In a loop without a loader, call it where an epoch is to end, such as after
    each rollout in reinforcement learning: predicates such as `after_epochs` then count these.

    >>> import looplib as ll
    >>> state = ll.state.end_epoch(ll.TrainState(batch=3, step=3))
    >>> state.epoch, state.batch
    (1, 0)

    Args:
        state: the state after the stream's last batch.

    Raises:
        ValueError: the state has an `epoch_length`.
    """
    check_state(state, "ll.state.end_epoch(state)")
    check(
        state.epoch_length is None,
        f"the state has epoch_length={state.epoch_length}, so train_step ends its epochs; end_epoch is for streams, "
        "whose states are made with epoch_length=None",
    )
    # No batch was consumed here, so predicates such as every_n_samples do not fire.
    return state.replace(epoch=state.epoch + 1, batch=0, batch_samples=0, no_batch=False)


def fold_in(state: TrainState, index: int) -> TrainState:
    """Derive a new random stream: the same state, with a seed that follows from its own and an index.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Dropout(0.5)
    >>> sample = ll.make_predict_step(model, lambda model, x: model(x), training=True)
    >>> state, x = ll.TrainState(), torch.ones(100)
    >>> bool((sample(state, x) == sample(state, x)).all())
    True
    >>> bool((sample(state, x) == sample(ll.state.fold_in(state, 1), x)).all())
    False

    A step draws the same numbers for the same state, so this is how to draw several times at one state: rollouts, samples
    of a generator, repeated evaluations. Use the result for that call, and continue training with `state`.

    Args:
        state: a state, or a stack, each of whose members gets a stream of its own.
        index: an int that tells the draws apart.

    Raises:
        TypeError: `index` is not an int.
        DonatedStateError: the state was donated to a step.

    Source: `jax.random.fold_in`.
    """
    check_state(state, "ll.state.fold_in(state, index)")
    check_type("index is", index, SupportsIndex, "give an int that tells the draws apart")
    index, seeds = operator.index(index), cast(Any, state.seed)
    return state.replace(
        seed=tuple(mix(seed, index) for seed in seeds) if isinstance(seeds, tuple) else mix(seeds, index)
    )
