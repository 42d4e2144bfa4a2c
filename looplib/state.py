"""Functions of a state: the first one of a run, copies, and the values of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import modules as _modules
from looplib._core import ownership
from looplib._core.checks import check_optional_count
from looplib._core.overlap import overlapping
from looplib._core.torch_private import pytree
from looplib.types import (
    TREES,
    Optimizer,
    TrainState,
)

__all__ = ["bind", "cast", "copy_state", "end_epoch", "init_state"]


def init_state(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    epoch_length: int | None = None,
    trainable: Callable[[str, Tensor], bool] | None = None,
    extra: Any = None,
) -> TrainState:
    """The first state of a run, bound to `model`: it holds the module's own tensors, uncopied.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=1e-3), seed=0)
    >>> state.params["weight"] is model.weight
    True

    Args:
        model: the module, wrapped or not; names are the innermost module's own.
        optimizer: its `init` makes `opt_state`; None for a state to evaluate with.
        seed: what dropout and every other random draw of the steps come from.
        epoch_length: batches in an epoch (`len(loader)`), or None for a stream.
        trainable: `(name, tensor) -> bool`, the parameters to train, as given to `make_grad_fn`; without it
            those that require a gradient.
        extra: a pytree of the user's own.

    Raises:
        TypeError: `model` is no module, or `optimizer` no `ll.optimizer(...)`.
        ValueError: a lazy parameter without a shape, no trainable parameter, an epoch of no batches; a trained
            parameter that shares memory with another tensor of the module.
    """
    slots = _modules.members(model)
    advice = "an epoch has 1 batch or more, or give None for a stream"
    check_optional_count("epoch_length", epoch_length, advice=advice)
    params, buffers = _modules.tensors(slots.params), _modules.tensors(slots.buffers)
    opt_state = None
    if optimizer is not None:
        if not hasattr(optimizer, "init"):
            raise TypeError(
                f"optimizer is {_describe(optimizer)}; init_state needs what ll.optimizer returns, "
                "such as ll.optimizer(torch.optim.AdamW, lr=1e-3)"
            )
        names = _modules.trainable_names(model, trainable)
        if (pair := overlapping({**params, **buffers}, set(names))) is not None:
            raise ValueError(
                f"{pair[0]} and {pair[1]} are two tensors that share memory: training one in place would change the "
                "other, and a copy of the state would part them. Register one tensor under both names "
                "(model.decoder.weight = model.encoder.weight), or give one memory of its own (.detach().clone())"
            )
        opt_state = optimizer.init({name: params[name] for name in names}, buffers=buffers)
    state = TrainState(
        epoch_length=epoch_length, params=params, buffers=buffers, opt_state=opt_state, seed=seed, extra=extra
    )
    description = getattr(optimizer, "description", None)
    return ownership.mark_made_with(state, {"optimizer": description}) if description else state


def _describe(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"an instance of {type(thing).__name__}"


def copy_state(state: TrainState) -> TrainState:
    """A state equal to `state` that shares no tensor with it, so that a donated step may spend either.

    >>> import looplib as ll, torch
    >>> state = ll.init_state(torch.nn.Linear(2, 1))
    >>> kept = ll.copy_state(state)
    >>> kept.params["weight"] is state.params["weight"]
    False

    Tensors that stand in it twice stand in the copy twice. Raises DonatedStateError for a spent state.
    """
    copies: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return state.replace(**{name: pytree.tree_map(copy, getattr(state, name)) for name in TREES})


def bind(model: nn.Module, state: TrainState) -> TrainState:
    """Copy a state's values into the module, and return the state bound to it.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> kept = ll.copy_state(ll.init_state(model))
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> state = ll.bind(model, kept)
    >>> state.params["weight"] is model.weight, torch.equal(model.weight, kept.params["weight"])
    (True, True)

    The state returned shares nothing with the one given, which therefore stays good. Other states that were
    bound to the module are spent. A state that is bound to it already is returned as it is.

    Args:
        model: the module, wrapped or not.
        state: with the module's names and shapes, in any dtypes and on any devices.

    Raises:
        ValueError: names or shapes that are not the module's; nothing is copied then.
        DonatedStateError: the state is spent.
    """
    slots = _modules.members(model)
    _modules.check_names("parameters", state.params, slots.params, model)
    _modules.check_names("buffers", state.buffers, slots.buffers, model)
    own = {"params": _modules.tensors(slots.params), "buffers": _modules.tensors(slots.buffers)}
    if all(getattr(state, tree)[name] is own[tree][name] for tree in own for name in own[tree]):
        return state
    bound = copy_state(state)
    ownership.claim("ll.bind(model, state)", ownership.tensors_in(own)).wrote()
    with torch.no_grad():
        for tree, values in own.items():
            for name, tensor in values.items():
                tensor.copy_(getattr(bound, tree)[name])
    return bound.replace(**own)


def end_epoch(state: TrainState) -> TrainState:
    """The state at the start of the next epoch: call it after the `for` loop over a stream.

    A loader with a length ends its epochs by itself, since the step knows `epoch_length`; a stream's end is
    known only when it comes.

    >>> import looplib as ll
    >>> state = ll.end_epoch(ll.TrainState(batch=3, step=3))
    >>> state.epoch, state.batch
    (1, 0)

    Args:
        state: of a stream, after its last batch.

    Raises ValueError for a state with an `epoch_length`.
    """
    if state.epoch_length is not None:
        raise ValueError(
            f"the state has epoch_length={state.epoch_length}, so train_step ends its epochs; "
            "end_epoch is for streams, whose states are made with epoch_length=None"
        )
    return state.replace(epoch=state.epoch + 1, batch=0, batch_samples=0)  # no batch, so no multiple is crossed


def cast(state: TrainState, dtype: torch.dtype) -> TrainState:
    """The state with its floating-point parameters and buffers in `dtype`, and complex ones as they are.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model)
    >>> half = ll.state.cast(state, torch.bfloat16)
    >>> half.params["weight"].dtype, state.params["weight"].dtype
    (torch.bfloat16, torch.float32)
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x.bfloat16()))
    >>> predict_step(half, torch.zeros(4, 2)).dtype
    torch.bfloat16

    For evaluation at half the memory, `ll.evaluate(eval_step, ll.state.cast(state, torch.bfloat16), batches)`, and for
    export, `ll.checkpoint.save_safetensors(model, ll.state.cast(state, torch.bfloat16), path)`. What a batch has in floating point the
    metric function casts; for arithmetic in fewer bits with weights in float32 there is `autocast`.

    Parameters and buffers, those of integers too, are copies, which carry no gradient back and are bound to no
    module, so a donated step may go on from `state`. (A module that FSDP2 shards computes, and is exported, in its
    own dtype all the same.)

    `opt_state` and `extra` are those of `state`, so torch's optimizers refuse to go on from here with moments of
    another dtype. To train on, begin them anew: `state.replace(opt_state=optimizer.init(state.params))`, with
    `master_weights` around the optimizer where the weights are of half precision.

    Args:
        state: any; of averages, `ll.eval_state(optimizer, state)` first.
        dtype: a floating-point one.

    Raises:
        TypeError: something else than a state.
        ValueError: a dtype that is not floating-point.
        DonatedStateError: the state is spent.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"cast got a {type(state).__name__}; give a TrainState, such as ll.init_state returns "
            "(for a module, torch has module.to(dtype))"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"cast to {dtype}: give a floating-point dtype, such as torch.bfloat16")

    def converted(tensor: Tensor) -> Tensor:
        own = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(own, copy=True).requires_grad_(tensor.requires_grad)

    return state.replace(
        params={name: converted(tensor) for name, tensor in state.params.items()},
        buffers={name: converted(tensor) for name, tensor in state.buffers.items()},
    )
