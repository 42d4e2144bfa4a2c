"""Adapters of peft merged into the weights that they adapt, one layer at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core.checks import check, few
from looplib._core.modules import innermost
from looplib._core.ranks import whole
from looplib._core.torch_storage import memory_of
from looplib.checkpoint._state_dict import cleaner, names_of
from looplib.types import TrainState


class Source(NamedTuple):
    """Source of a weight.

    Attributes:
        like: a tensor without values of its shape and dtype.
        gather: function that returns it by its name, with others that are computed together.
    """

    like: Tensor
    gather: Callable[[], dict[str, Tensor]]

    @classmethod
    def of(cls, key: str, value: Tensor) -> Source:
        """Source of a tensor that is only gathered."""
        return cls(_without_values(value), partial(_gathered, key, value))


def _gathered(key: str, value: Tensor) -> dict[str, Tensor]:
    return {key: whole(value).detach()}


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def merged_sources(model: nn.Module, state: TrainState) -> tuple[nn.Module, dict[str, Source], dict[str, str]]:
    """The base model without values, sources of its weights with the adapters merged, and the state's names for them.

    peft merges a copy of the model without values, which shows the names and which weights are merged. The values of a
    layer are merged when they are asked for, in a copy of that layer.
    """
    inner: Any = innermost(model)
    check(
        hasattr(inner, "merge_and_unload"),
        f"merge_adapters=True, and a {type(inner).__name__} has no adapters that peft could merge: leave it out, or give "
        "the model that peft.get_peft_model returned",
    )
    from peft.tuners.tuners_utils import BaseTunerLayer

    held, names = {**state.params, **state.buffers}, names_of(model)
    likes: dict[int, tuple[Tensor, str]] = {}  # of tensors without values, by id: their names in the state

    def like(tensor: Tensor) -> Tensor:
        name = names[id(tensor)]
        blank = _in_kind(_without_values(held[name]), tensor)
        likes[id(blank)] = blank, name
        return blank

    empty: Any = _copied(inner, like, {})
    raw_paths = {id(module): path for path, module in empty.named_modules()}
    modules = [*empty.get_base_model().named_modules()]
    tuners = {path: module for path, module in modules if isinstance(module, BaseTunerLayer)}
    layers = {path: raw_paths[id(tuner)] for path, tuner in tuners.items() if not _within(path, {*tuners} - {path})}
    with torch.no_grad():
        try:
            base: nn.Module = empty.merge_and_unload()
        except NotImplementedError as error:  # of torch, about tensors without values
            raise ValueError(
                f"peft's {type(inner.base_model).__name__} reads values to merge its adapters, so they cannot be merged one by "
                "one: write iter_weights of a model that peft has merged (merge_and_unload)"
            ) from error
    lost = layers.keys() - {path for path, _ in base.named_modules()}
    check(
        not lost,
        f"{few(sorted(lost))} of this model cannot be merged one by one: write iter_weights of a model that peft has "
        "merged (merge_and_unload)",
    )
    clean = cleaner(base)
    gathers = {
        path: partial(_merged_layer, inner.get_submodule(raw), lambda tensor: held[names[id(tensor)]], clean(path))
        for path, raw in layers.items()
    }
    sources: dict[str, Source] = {}
    names_of_keys: dict[str, str] = {}
    for key, tensor in base.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        path = _within(key, layers)
        _, name = likes.get(id(tensor), (None, clean(key)))
        gather = gathers[path] if path else partial(_gathered, clean(key), held[name])
        sources[clean(key)] = Source(tensor.detach(), gather)
        names_of_keys[clean(key)] = name
    _check_ties(sources, names_of_keys, [*gathers.values()])
    return base, sources, names_of_keys


def _check_ties(sources: dict[str, Source], names: dict[str, str], merges: list[Any]) -> None:
    """Raise ValueError if merging would change a tied weight, which the adapter changes in one of its places."""
    for key, source in sources.items():
        others = [other for other, name in names.items() if name == names[key] and other != key]
        check(
            source.gather not in merges or not others,
            f"{key} is adapted and is one tensor with {few(others)}, which merging would change too: give it a tensor of its "
            "own before the adapters are added, or leave out merge_adapters",
        )


def _merged_layer(layer: nn.Module, value_of: Callable[[Tensor], Tensor], path: str) -> dict[str, Tensor]:
    """The weights of a layer with its adapters merged by peft. The layer and the state stay as they are."""

    def copied(tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        gathered = whole(value).detach()
        return _in_kind(gathered.clone() if memory_of(gathered) == memory_of(value) else gathered, tensor)

    with torch.no_grad():
        merged: Any = _copied(layer, copied, {})
        if hasattr(merged, "unload_and_optionally_merge_module"):
            base = merged.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            merged.merge()
            base = merged.get_base_layer()
        return {f"{path}.{key}": tensor for key, tensor in base.state_dict().items()}


def _within(key: str, paths: Iterable[str]) -> str | None:
    """The first of these modules in which a name stands, or None."""
    return next((path for path in paths if key.startswith(f"{path}.")), None)


def _in_kind(value: Tensor, tensor: Tensor) -> Tensor:
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value


def _copied(module: nn.Module, tensor_of: Callable[[Tensor], Tensor], copies: dict[int, Any]) -> nn.Module:
    """A copy of a module with other tensors. (FSDP2 refuses `copy.deepcopy`, which would copy the old tensors first.)"""

    def of(value: Any) -> Any:
        if value is None:
            return None
        if id(value) not in copies:
            copies[id(value)] = tensor_of(value)
        return copies[id(value)]

    if id(module) not in copies:
        copies[id(module)] = copied = object.__new__(type(module))
        parts = vars(module)
        attributes = {
            name: copy.copy(value) if type(value) in (dict, list, set) else value for name, value in parts.items()
        }
        vars(copied).update(attributes)
        for kind in ("_parameters", "_buffers"):
            vars(copied)[kind] = {name: of(tensor) for name, tensor in parts[kind].items()}
        vars(copied)["_modules"] = {
            name: None if child is None else _copied(child, tensor_of, copies)
            for name, child in parts["_modules"].items()
        }
    return copies[id(module)]  # type: ignore[no-any-return]
