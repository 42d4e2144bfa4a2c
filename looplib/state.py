"""Training state: create one, copy it, and bind it to a module."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor, nn

from looplib._core import lease, misuse
from looplib._core import modules as _modules
from looplib._core.checks import check, check_optional_count, check_type, is_plain, named
from looplib._core.copies import shared_copy
from looplib._core.forward_writes import put_back
from looplib._core.mappings import fields_of, pick
from looplib._core.memory import named_tensors, overlaps
from looplib._core.random import mix
from looplib._core.records import MANY, check_kind, described, kind_of, settings_of
from looplib._core.torch_private import pytree
from looplib.types import (
    TREES,
    Optimizer,
    Run,
    TrainState,
    check_state,
)

__all__ = ["bind", "copy_state", "end_epoch", "fold_in", "init_state"]


def init_state(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    loader: Any = None,
    epoch_length: int | None = None,
    trainable: Callable[[str, Tensor], bool] | None = None,
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
        optimizer: an optimizer whose `init` creates `opt_state`. None for a state used only for evaluation.
        seed: int from which dropout and all other random draws of the steps are derived.
        loader: the loader of the run, or a list of all that it trains on, the first of which counts the batches of an epoch:
            `len(loader)`, or None for a stream. The settings of looplib's loaders are kept in `state.run`, for checkpoints
            to store and for restores and ranks to compare. A torch DataLoader, or anything else with `__len__` that is not
            indexed, gives only its length. Loaders that only evaluate are not among them.
        epoch_length: number of batches in an epoch, in place of the loader's: for a run without a loader object, or to
            end the epochs of a stream. For a loader whose epochs differ in length, such as those of `ll.data.growing`,
            write `ll.init_state(..., loader=loader).replace(epoch_length=None)`.
        trainable: `(name, tensor) -> bool`, selects the parameters to train. Pass the same function as to
            `make_grad_fn`. Defaults to the parameters that require a gradient.
        extra: a pytree of your own, kept in `state.extra` and checkpointed: tensors, ints of any size, floats, strings,
            bytes, bools and None, in dicts, lists, tuples and registered pytrees. Turn NumPy arrays into tensors
            (`torch.from_numpy`). For global random streams and objects with a `state_dict`, see `ll.checkpoint.capture`.

    Raises:
        TypeError: `model` is not a module, `optimizer` is not an `ll.optimizer(...)`, `loader` is a dataset, a batch or
            something else that is not a loader, or `seed` is not an int.
        ValueError: a lazy parameter has no shape yet, no parameter is trainable, `epoch_length` is 0, a trained parameter
            is on the meta device, or what is trained or kept by the optimizer shares memory with another tensor.
    """
    slots = _modules.members(model)
    advice = "an epoch has 1 batch or more, or give None for a stream"
    loaders = [*loader] if isinstance(loader, (list, tuple)) else [] if loader is None else [loader]
    check(loaders or loader is None, "loader is an empty list; give the loaders of the run, or leave it out")
    lengths = [*map(_length_of, loaders)]
    if epoch_length is None and lengths:
        epoch_length = lengths[0]
    check_optional_count("epoch_length", epoch_length, advice=advice)
    check_type("seed is", seed, SupportsIndex, "give an int")
    params, buffers = _modules.tensors(slots.params), _modules.tensors(slots.buffers)
    opt_state = None
    if optimizer is not None:
        check_kind(optimizer, "init_state", "optimizer")
        names = _modules.trainable_names(model, trainable)
        trained = pick(params, names)
        _modules.check_materialized(trained)
        with torch.inference_mode(False):  # steps take no tensors made there
            opt_state = optimizer.init(trained, buffers=buffers)
        plain = {name: tensor for name, tensor in {**params, **buffers}.items() if is_plain(tensor)}
        written = named_tensors("opt_state", opt_state)
        for one, other in overlaps({**plain, **written}):
            check(
                not {one, other} & {*trained, *written},
                f"{one} and {other} are two tensors that share memory: training one in place would change the "
                "other, and a copy of the state would part them. Register one tensor under both names "
                "(model.decoder.weight = model.encoder.weight), or give one memory of its own (.detach().clone(), also in "
                "an optimizer's init)",
            )
    run = Run(
        optimizer=None if optimizer is None else described(optimizer) or None,
        model=described_model(model),
        loaders=tuple(described(each) for each in loaders if kind_of(each) == "loader"),
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


def described_model(model: nn.Module) -> dict[str, Any]:
    """Describe a model by its class, its size, its `config`, and the configs of its adapters.

    >>> described_model(nn.Linear(2, 1))
    {'class': 'Linear', 'parameters': 3}
    """
    model = [module for name, module in _modules.named_modules(model) if not name][-1]  # within torch's wrappers
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


def bind(model: nn.Module, state: TrainState) -> TrainState:
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

    Raises:
        ValueError: names or shapes differ from the module's, the module is on the meta device, or the state is a stack.
            Nothing is copied then.
        DonatedStateError: the state was donated to a step.
    """
    check_state(state, "ll.bind(model, state)")
    slots = _modules.members(model)
    _modules.check_names("parameters", state.params, slots.params, model)
    _modules.check_names("buffers", state.buffers, slots.buffers, model)
    params, buffers = _modules.tensors(slots.params), _modules.tensors(slots.buffers)
    targets, held = {**params, **buffers}, {**state.params, **state.buffers}
    if all(held[name] is tensor for name, tensor in targets.items()):
        return state
    _modules.check_materialized(targets)
    misuse.bound(model)
    bound = copy_state(state)
    values = {**bound.params, **bound.buffers}
    # Frozen parameters and masks, which states of pure steps share with the module, are not written.
    writes = [(tensor, values[name]) for name, tensor in targets.items() if not same_value(tensor, values[name])]
    taken = lease.lease_over("ll.bind(model, state)", [tensor for tensor, _ in writes])
    taken.write()
    put_back(writes)
    taken.step = state.step
    return bound.replace(params=params, buffers=buffers)


def same_value(tensor: Tensor, value: Tensor) -> bool:
    """True for a tensor that is not trained and has this value already, so that it need not be written."""
    if tensor.requires_grad or tensor.dtype != value.dtype or not (is_plain(tensor) and is_plain(value)):
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
