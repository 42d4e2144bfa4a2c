"""Classes of third parties: what they keep, updates by their own step, and a comparison with a raw loop.

A pure update can pass in and take out what a class keeps in `state` and `param_groups`. Whatever it keeps elsewhere is out
of reach, and the comparison reveals it. Each update has an instance of its own, into which the state is put.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import random as draws
from looplib._core import torch_private, trees
from looplib._core.checks import check, few, warn
from looplib._core.copies import copy_tree
from looplib._core.mappings import mapped, subset, without
from looplib._core.random import generators_of, mix, restored
from looplib._core.ranks import is_sharded, shards
from looplib._core.torch_private import pytree
from looplib.optim._recipe import Recipe
from looplib.types import Params

STREAM = 0x0F71  # separates an update's random draws from those of a forward pass
_PLAIN = (Tensor, int, float, complex, str, torch.dtype, type(None))


# What a class keeps


class Probe(NamedTuple):
    """Record of what a class keeps after a step on copies.

    Attributes:
        state: name -> state of a parameter, as `packed` stores it, in tensors without memory (`without_memory`).
        makers: name -> key -> function that makes an object kept for a parameter again.
        groups: for each group, the numbers that the class changes there, as before the first step; None for those
            that the first step creates.
        writes_grads: True if the class writes into the gradients, as schedule-free optimizers do.
    """

    state: dict[str, dict[str, Any]]
    makers: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    writes_grads: bool


def probe(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> Probe:
    """Step once on copies, and raise if the class keeps something that a pure update cannot copy."""
    copies = _leaves(params)
    instance = recipe.build(copies, members)
    groups = [*map(dict, instance.param_groups)]
    _raw_step(instance, copies, 0)
    together = [key for key in instance.state if not isinstance(key, Tensor)]
    check(
        not together,
        f"{recipe.cls.__name__} keeps state for all parameters together, under {few(together)}; looplib takes optimizers "
        "that keep it for each parameter, or as numbers in their groups",
        TypeError,
    )
    # Those that a class hands on to the one that it inherits from, by **kwargs, are the user's as well.
    constructors = [inspect.signature(kind.__init__).parameters for kind in recipe.cls.__mro__]
    known = {*chain.from_iterable([*constructors, recipe.defaults, *recipe.overrides])}
    of_groups = []
    for old, group, moving in zip(groups, instance.param_groups, recipe.moving, strict=True):
        numbers = without(
            {key: value for key, value in group.items() if isinstance(value, (int, float, Tensor))}, moving
        )
        changing = [key for key, value in numbers.items() if key not in known or old.get(key) != value]
        of_groups.append({key: copy_tree(old.get(key)) for key in changing})
    gradients = [(tensor.grad, sample_gradient(tensor, 0)) for tensor in copies.values() if tensor.grad is not None]
    kept_by_class = Probe({}, {}, of_groups, writes_grads=not all(trees.same(*shards(both)) for both in gradients))
    for name, tensor in copies.items():
        kept, kept_by_class.makers[name] = packed(recipe, name, instance.state.get(tensor, {}))
        kept_by_class.state[name] = pytree.tree_map_only(Tensor, without_memory, kept)
    return kept_by_class


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides, dtype, device and placements, whose memory has been freed.

    `torch.zeros_like` reads no more of it.
    """
    like = torch.empty_like(tensor.detach())
    (local,) = shards([like])
    if local.layout is torch.strided:
        local.untyped_storage().resize_(0)
    return like


def _leaves(params: Params) -> Params:
    """Copies of parameters that a class can step on."""
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in params.items()}


def sample_gradient(tensor: Tensor, phase: int) -> Tensor:
    """Noise, the same at each call."""
    if is_sharded(tensor):
        return torch.full_like(tensor, 0.1)
    generator = torch.Generator(tensor.device).manual_seed(phase)
    return torch.empty_like(tensor).normal_(0, 0.1, generator=generator)


def _raw_step(instance: Any, params: Params, phase: int) -> None:
    """A step as in a raw loop, on sample gradients."""
    for tensor in params.values():
        tensor.grad = sample_gradient(tensor, phase)
    with streams_at(mix(0, phase, STREAM), params.values()):
        instance.step()


@contextmanager
def streams_at(seed: int, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Seed the random streams of these tensors' devices inside the block and restore them afterwards."""
    generators = generators_of(*(tensor.device for tensor in tensors))
    with draws.turn, restored(*generators):
        for generator in generators:
            generator.manual_seed(seed)
        yield


# Objects that a class keeps for a parameter: tensor subclasses such as torchao's, or of its own, such as GaLore's


def packed(recipe: Recipe, name: str, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State of a parameter as a pytree of plain tensors and numbers, and functions that make its objects again.

    The attributes of an object, and the tensors within a tensor subclass, are stored as dicts.
    """
    plain, makers = dict(state), {}
    for key, value in state.items():
        kind: Any = type(value)
        (local,) = shards([value])
        if torch_private.wraps_tensors(local):
            place = _placement(recipe, name, key, value)
            parts, context = local.__tensor_flatten__()
            plain[key] = {part: place(getattr(local, part)) for part in parts}
            makers[key] = partial(_subclass, type(local), context, local.size(), local.stride(), place=place)
        elif kind.__new__ is object.__new__ and hasattr(value, "__dict__"):
            plain[key], makers[key] = dict(vars(value)), partial(_object, kind)
        _check_plain(recipe, f"for {name}, under {key!r},", plain[key])
    return plain, makers


def check_same_makers(recipe: Recipe, name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise TypeError for objects kept for a parameter whose class or settings an update has changed.

    A state of a run holds their tensors alone, and another process knows the settings from the probe's sample gradients.
    So a run's first update must not choose others either. `before` and `now` are the functions that `packed` returns.
    """
    for key in {**before, **now}:
        # The class and its settings; nothing where there is no object.
        old, new = (makers[key].args if key in makers else () for makers in (before, now))
        if all(trees.same(*both) for _, *both in trees.paired(trees.leaves(old), trees.leaves(new))):
            continue
        if old[:1] == new[:1]:
            old, new = old[1:], new[1:]
        raise TypeError(
            f"{recipe.cls.__name__} keeps for {name}, under {key!r}, an object whose settings differ from one update to the "
            f"next, or from one first gradient to another ({old} and then {new}): a state holds tensors and numbers, so the "
            "update would not be a function of it. Keep the numbers that change in tensors"
        )


def _placement(recipe: Recipe, name: str, key: str, value: Any) -> Callable[[Tensor], Tensor]:
    """Function that places this rank's part of a tensor as the value is: as it is, or as a shard of a DTensor.

    What a class keeps beside the numbers (scales, tables) then lies one after another over the ranks, so such a state
    continues on as many ranks.
    """
    if not is_sharded(value):
        return lambda part: part
    mesh, placements = value.device_mesh, value.placements
    check(
        len(placements) == 1 and placements[0].is_shard(0) and value.shape[0] % mesh.size() == 0,
        f"{recipe.cls.__name__} keeps for {name}, under {key!r}, shards of a class of its own, which looplib can save if "
        f"the ranks of one mesh dimension divide the first dimension evenly, and not of shape {tuple(value.shape)} placed "
        f"as {placements} on {mesh.size()} ranks: use it with DistributedDataParallel, or write "
        "ll.optimizer(torch.optim.AdamW, lr=...), of whose state each rank holds a part as well",
        TypeError,
    )
    return partial(type(value).from_local, device_mesh=mesh, placements=placements, run_check=False)


def _subclass(
    kind: Any, context: Any, size: Any, stride: Any, parts: dict[str, Tensor], *, place: Callable[[Tensor], Tensor]
) -> Any:
    local_parts = dict(zip(parts, shards(parts.values()), strict=True))
    return place(kind.__tensor_unflatten__(local_parts, context, size, stride))


def _object(kind: Any, attributes: dict[str, Any]) -> Any:
    instance = object.__new__(kind)
    vars(instance).update(attributes)
    return instance


def _check_plain(recipe: Recipe, where: str, value: Any) -> None:
    """Raise for state that a pure update cannot copy or a checkpoint cannot hold."""
    for _, leaf in trees.leaves(value, lambda node: not isinstance(node, (dict, list, tuple))):
        check(
            isinstance(leaf, _PLAIN),
            f"{recipe.cls.__name__} keeps {where} a {type(leaf).__name__}, which a pure update cannot copy; looplib "
            "takes optimizers that keep tensors and numbers, in dicts and lists of a fixed length, or in an object",
            TypeError,
        )


def check_sparse(recipe: Recipe, name: str, like: Tensor, members: Sequence[Sequence[str]]) -> None:
    """Raise unless a class takes sparse gradients, and keeps the same for them as for dense ones.

    A new state is made for dense gradients, and no checkpoint of another structure could be restored into it. `like` is a
    small tensor in place of the parameter, and `members` has its name in its group.
    """
    keys = []
    for is_sparse in (False, True):
        tensor = like.detach().clone().requires_grad_()
        instance = recipe.build({name: tensor}, members)
        grad = sample_gradient(tensor, 0)
        tensor.grad = grad.to_sparse(1) if is_sparse else grad
        try:
            with streams_at(mix(0, 0, STREAM), [tensor]):
                instance.step()
        except Exception as error:
            if not is_sparse:
                return  # the class cannot step on so small a tensor, so this shows nothing
            raise ValueError(f"{recipe.cls.__name__} cannot take the sparse gradient of {name}: {error}") from error
        keys.append(sorted(instance.state.get(tensor, {})))
    dense, sparse = keys
    check(
        dense == sparse,
        f"{recipe.cls.__name__} keeps {few(sparse)} for {name}, whose gradient is sparse, and {few(dense)} for dense "
        "gradients, for which a state is made: no checkpoint could be restored into a new state. Leave out sparse=True of "
        "its Embedding, or choose a class that keeps the same for both",
        TypeError,
    )


# Comparison with a raw loop, before training starts

_STEPS = 3
_GROWS = "since it keeps more after some updates than after one"


def check_against_raw_loop(
    recipe: Recipe, params: Params, begin: Callable[[Params], Any], update: Callable[..., Any]
) -> None:
    """Raise if a class's pure updates differ from its own `step()` in a raw loop; warn if that cannot be found out.

    This reveals state that a class keeps out of sight: in closures, in attributes of its module, in lists of parameters;
    and draws from the random streams of Python and NumPy. A few steps on the smallest parameters of each group and number
    of dimensions (of DTensors, on this rank's shards) are compared bit by bit. What has no effect in these steps is not
    noticed, but for numbers, texts and tensors in the optimizer's own attributes: a step after the first that changes
    one is refused.
    """
    with torch.no_grad():
        params = dict(zip(params, shards(params.values()), strict=True))
    falling = sorted(params, key=lambda name: params[name].numel(), reverse=True)
    chosen = {(recipe.group_of(name, params[name]), params[name].ndim): name for name in falling}
    smallest = subset(params, {*chosen.values()})
    raw, pure = _leaves(smallest), _leaves(smallest)
    attributes: list[dict[str, list[Any]]] = []
    try:
        instance = recipe.build(raw, recipe.members(raw))
        for step in range(_STEPS):
            for group, values in zip(
                instance.param_groups, recipe.values_at(instance.param_groups, {}, step), strict=True
            ):
                group.update(values)
            _raw_step(instance, raw, step)
            attributes.append(_attributes(instance))
    except (RuntimeError, ValueError, ArithmeticError) as error:
        line = str(error).strip().partition("\n")[0]
        return warn(_NOT_COMPARED.format(cls=recipe.cls.__name__, error=f"{type(error).__name__}: {line}"))
    # A first step may fill caches and set flags, as each update will in an instance of its own.
    for before, after in pairwise(attributes):
        _check_attributes(recipe, before, after)
    try:
        opt_state, structures = begin(pure), []
        for step in range(_STEPS):
            grads = mapped(partial(sample_gradient, phase=step), pure)
            pure, opt_state, _ = update(grads, opt_state, pure, step)
            structures.append(pytree.tree_structure(opt_state))
    except KeepsMoreError as error:
        raise _out_of_reach(recipe, _GROWS) from error
    except Exception as error:
        shown = f"which fails where a raw loop does not ({type(error).__name__}: {error})"
        raise _out_of_reach(recipe, shown) from error
    if changed := [name for name, tensor in raw.items() if not trees.same(tensor.detach(), pure[name].detach())]:
        raise _out_of_reach(recipe, f"after {_STEPS} of which {changed[0]} is not what it is in a raw loop")
    if structures[0] != structures[-1]:
        raise _out_of_reach(recipe, _GROWS)


_NOT_COMPARED = (
    "{cls} could not be compared with a raw loop: its step() failed there on sample gradients of a few parameters ({error}). "
    "So it is not known whether its updates here are those of its own step(), which they are not if it keeps something "
    "outside of `state` and `param_groups`. Compare a few steps on your own batches with a raw loop of {cls}, and if the "
    "weights are equal, ignore this warning"
)


def _attributes(instance: Any) -> dict[str, list[Any]]:
    """Numbers, texts and tensors in an optimizer's attributes, beside its parameters, its groups and its state."""
    params = {id(tensor) for group in instance.param_groups for tensor in group["params"]}
    return {
        name: [
            leaf.clone() if isinstance(leaf, Tensor) else leaf
            for _, leaf in trees.leaves(value, lambda node: not isinstance(node, (Mapping, list, tuple)))
            if isinstance(leaf, _PLAIN) and id(leaf) not in params
        ]
        for name, value in without(vars(instance), {"state", "param_groups", "defaults"}).items()
    }


def _check_attributes(recipe: Recipe, before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> None:
    """Raise TypeError for an attribute that a step has changed."""
    for name, leaves in after.items():
        old = before.get(name, [])
        check(
            len(old) == len(leaves) and all(map(trees.same, old, leaves)),
            f"{recipe.cls.__name__} changes its attribute {name!r} in a step, which is out of reach of a pure update: each one "
            "has an instance of its own. looplib takes optimizers that keep their state in `state` and `param_groups`",
            TypeError,
        )


class KeepsMoreError(TypeError):
    """The state of a parameter got other keys in a later update."""

    def __init__(self, recipe: Recipe, name: str, entries: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        super().__init__(
            f"{recipe.cls.__name__} keeps {few(sorted(entries))} for {name} from this update on, and {few(sorted(before))} before: "
            "a checkpoint of it could not be restored into a new state. Continue from the last checkpoint with a class, or "
            "with hyperparameters, for which it keeps the same from the first update on"
        )


def _out_of_reach(recipe: Recipe, shown: str) -> TypeError:
    return TypeError(
        f"{recipe.cls.__name__} keeps something out of reach of a pure update, {shown}; looplib takes optimizers that "
        "keep their state in `state` and `param_groups`"
    )
