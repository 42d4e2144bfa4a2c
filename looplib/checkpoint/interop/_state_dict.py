"""`state_dict`: weights of a state in the form of plain torch, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import ranks as _ranks
from looplib._core.checks import check, check_type, few
from looplib._core.mappings import subset
from looplib._core.trees import map_tensors
from looplib.checkpoint.interop._files import read_state_dict
from looplib.checkpoint.interop._names import check_state, cleaner, lend, state_names
from looplib.checkpoint.interop._whole import copied_like, same_values, shape_of, whole
from looplib.types import TrainState


def state_dict(model: nn.Module, state: TrainState, *, cpu_offload: bool = False) -> dict[str, Any]:
    """Return `model.state_dict()` with the values of a state, for `torch.save` or plain torch.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> weights = ll.checkpoint.state_dict(model, ll.init_state(model))
    >>> list(weights), weights["weight"].requires_grad
    (['weight', 'bias'], False)
    >>> torch.nn.Linear(2, 1).load_state_dict(weights)
    <All keys matched successfully>

    Names and order are the module's, without the `module.` or `_orig_mod.` of wrappers. Tied weights appear under
    each of their names, and non-persistent buffers are left out. To export different weights under the same names,
    such as an average in `extra`, pass `state.replace(params=...)`.

    The tensors share the state's memory: save or copy them before a donated step overwrites it.

    Sharded tensors are gathered, so all ranks call this. (`ll.bind` is for a module with the same sharding as the
    state.) Each rank holds at most one gathered tensor at a time besides those it returns. With `cpu_offload` only
    the first rank returns tensors, in CPU memory:

        weights = ll.checkpoint.state_dict(model, state, cpu_offload=True)
        if ll.distributed.is_rank_zero():
            torch.save(weights, "weights.pt")

    Args:
        model: the `nn.Module`, with or without torch's wrappers. The state need not be bound to it.
        state: a state of this module.
        cpu_offload: if True, return tensors on the CPU, each moved there before the next is gathered. On several
            ranks, only the first gets them, and the others an empty dict, as with torch's
            `StateDictOptions(full_state_dict=True, cpu_offload=True)`.

    Raises:
        ValueError: the state belongs to a different module.
        DonatedStateError: the state was donated to a step.
    """
    keeps = _ranks.is_first() or not cpu_offload

    def kept(value: Any) -> Any:
        return (map_tensors(Tensor.cpu, value) if cpu_offload else value) if keeps else None

    def exported() -> dict[str, Any]:
        clean, names = cleaner(model), state_names(model)
        entries: dict[str, Any] = model.state_dict()
        gathered: dict[str, Any] = {}  # one tensor for all names of tied weights
        for key in list(entries):
            value, key = entries.pop(key), clean(key)
            name = names.get(key, key)
            if name not in gathered:  # without a name here for the whole tensor, which would live until the next one
                gathered[name] = kept(whole(value, trim=keeps))
            if keeps:
                entries[key] = gathered[name]
        versions = getattr(entries, "_metadata", {})  # by module name
        for key in list(versions):
            versions[clean(key)] = versions.pop(key)
        return entries

    return lend(model, state, exported)


def load_state_dict(
    model: nn.Module,
    state: TrainState,
    source: Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
    names: Callable[[str], bool] | None = None,
) -> TrainState:
    """Load the weights of a `state_dict`, or of a weight file, into a state. Everything else in it is kept.

    >>> import looplib as ll, torch
    >>> model, pretrained = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> state = ll.checkpoint.load_state_dict(model, ll.init_state(model), pretrained.state_dict())
    >>> torch.equal(state.params["weight"], pretrained.weight)
    True

    To load only a part, such as everything but the head, which may then have a different shape:

    >>> mapping = {"weight": torch.zeros(1, 2), "bias": torch.zeros(10)}
    >>> state = ll.checkpoint.load_state_dict(model, state, mapping, names=lambda name: name != "bias")

    The values are copied and converted to the state's dtypes and devices. The new state is not bound to the module;
    `ll.bind(model, state)` binds it.

    If the state is sharded, each rank takes its shard from the given tensors without communication, and reads only
    that from a file. A `source` that is itself sharded is gathered, by all ranks.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        state: a state of this module.
        source: name -> tensor, as from the `state_dict()` of the module or its innermost one; or the path of a
            safetensors or `torch.save` file, whose code is never executed (`weights_only=True`). For tied weights,
            one of the names is enough.
        strict: if True, refuse missing and unexpected names. At least one name must match in any case.
        names: `names(name) -> bool`, selects names to load. Others are ignored in the state and in the source.

    Raises:
        ValueError: names, shapes or dtypes do not match (all listed in one message); tied weights have different
            values; or the file is damaged or holds more than tensors and plain values.
        TypeError: `source` is neither a mapping of tensors nor a path.
        ImportError: the file is in safetensors format and safetensors is not installed.
        DonatedStateError: the state was donated to a step.
    """
    check_type("source is", source, (Mapping, str, os.PathLike), "give a state_dict, or the path of a file of one")
    check_state(model, state)
    tensors = source if isinstance(source, Mapping) else read_state_dict(source)
    name_of, clean = state_names(model), cleaner(model)
    selected = names or (lambda key: True)
    given = {clean(str(key)): value for key, value in tensors.items()}
    # An `_extra_state` belongs to the module.
    chosen = {key: value for key, value in given.items() if selected(key) and not key.endswith("_extra_state")}
    loaded, misfits = _fitted(name_of, chosen, {**state.params, **state.buffers})
    problems = _unmatched(name_of, chosen, strict, selected) + misfits
    title = "the mapping" if isinstance(source, Mapping) else os.fspath(source)
    check(
        not problems,
        f"{title} does not fit the state of this {type(model).__name__}: {'; '.join(problems)}. To load a part, choose it "
        "with names=, or pass over names that one side alone has with strict=False",
    )
    return state.replace(
        params={**state.params, **subset(loaded, state.params)},
        buffers={**state.buffers, **subset(loaded, state.buffers)},
    )


def _unmatched(
    name_of: Mapping[str, str], chosen: Mapping[str, Any], strict: bool, selected: Callable[[str], bool]
) -> list[str]:
    """Missing and unexpected names, in words."""
    expected = [*filter(selected, name_of)]
    if name_of and not (expected or chosen):
        return ["names= chose none"]
    loaded = {name_of[key] for key in chosen.keys() & name_of.keys()}
    if loaded and not strict:
        return []
    missing = [key for key in expected if name_of[key] not in loaded]
    unexpected = [key for key in chosen if key not in name_of]
    problems = {
        f"missing {few(missing)}": missing,
        f"unexpected {few(unexpected)}{_hint(unexpected, chosen, name_of)}": unexpected,
    }
    return [problem for problem, keys in problems.items() if keys]


def _fitted(
    name_of: Mapping[str, str], chosen: Mapping[str, Any], held: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Copies like the state's tensors, by their names in the state, and the mismatches, in words."""
    loaded: dict[str, Tensor] = {}
    misfits: list[str] = []
    first_key: dict[str, str] = {}  # for tied weights, the name that was loaded
    for key in [key for key in name_of if key in chosen]:
        name, value = name_of[key], chosen[key]
        like = held[name]
        if problem := _misfit(value, like):
            misfits.append(f"{key} {problem}")
        elif first_key.setdefault(name, key) == key:
            loaded[name] = copied_like(value, like).requires_grad_(like.requires_grad)
        elif not same_values(chosen[first_key[name]], value, like):
            misfits.append(f"{key} has other values than another name of the same tied weight")
    return loaded, misfits


def _misfit(value: Any, like: Tensor) -> str:
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if value.shape != like.shape:
        return f"has shape {tuple(value.shape)}, the state's has {shape_of(like)}"
    if not torch.can_cast(value.dtype, like.dtype):
        return f"is of {value.dtype}, which does not go into the state's {like.dtype}"
    return ""


def _hint(unexpected: list[str], chosen: Mapping[str, Any], name_of: Mapping[str, str]) -> str:
    """Advice for common mismatches."""
    if nested := [key for key in unexpected if isinstance(chosen[key], Mapping)]:
        return f" ({nested[0]} is a dict: if the weights are in it, give that)"
    prefix = next(iter(unexpected), "").partition(".")[0] + "."
    if all(key.startswith(prefix) and key.removeprefix(prefix) in name_of for key in unexpected):
        return f' (they fit without "{prefix}": give {{name.removeprefix("{prefix}"): ... for each}})'
    return ""
