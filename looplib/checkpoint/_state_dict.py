"""`state_dict`: weights of a state in the form of plain torch, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import modules as _modules
from looplib._core import ranks as _ranks
from looplib._core.checks import check, check_type, few
from looplib._core.mappings import subset, without
from looplib._core.ranks import whole
from looplib._core.trees import map_tensors
from looplib.checkpoint._format import about, in_words, words
from looplib.checkpoint._shards import copied_like
from looplib.types import TrainState, check_state


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
                gathered[name] = kept(whole(value))
            if keeps:
                entries[key] = gathered[name]
        return entries

    return lend(model, state, exported)  # type: ignore[no-any-return]


def load_state_dict(
    model: nn.Module,
    state: TrainState,
    source: Mapping[str, Any],
    *,
    strict: bool = True,
) -> TrainState:
    """Load the weights of a `state_dict` into a state. Everything else in it is kept.

    >>> import looplib as ll, torch
    >>> model, pretrained = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> state = ll.checkpoint.load_state_dict(model, ll.init_state(model), pretrained.state_dict())
    >>> torch.equal(state.params["weight"], pretrained.weight)
    True

    To load only a part, such as everything but the head, which may then have a different shape:

    >>> mapping = {"weight": torch.zeros(1, 2), "bias": torch.zeros(10)}
    >>> body = {name: tensor for name, tensor in mapping.items() if name != "bias"}
    >>> state = ll.checkpoint.load_state_dict(model, state, body, strict=False)

    For a file, give `safetensors.torch.load_file(path)` or `torch.load(path, map_location="cpu", mmap=True)`.

    The values are copied and converted to the state's dtypes and devices. The new state is not bound to the module;
    `ll.bind(model, state)` binds it.

    If the state is sharded, each rank takes its shard from the given tensors without communication. A `source`
    that is itself sharded is gathered, by all ranks.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        state: a state of this module.
        source: name -> tensor, as from the `state_dict()` of the module or its innermost one. For tied weights, one of
            the names is enough.
        strict: if True, refuse missing and unexpected names. At least one name must match in any case.

    Raises:
        ValueError: names, shapes or dtypes do not match (all listed in one message), or tied weights have different
            values.
        TypeError: `source` is not a mapping.
        DonatedStateError: the state was donated to a step.
    """
    advice = "give a state_dict; for a file, safetensors.torch.load_file(path), or torch.load(path)"
    check_type("source is", source, Mapping, advice)
    check_fits(model, state)
    name_of, clean = state_names(model), cleaner(model)
    # An `_extra_state` belongs to the module.
    chosen = {clean(str(key)): value for key, value in source.items() if not str(key).endswith("_extra_state")}
    held = {**state.params, **state.buffers}
    _modules.check_materialized(subset(held, [name for key, name in name_of.items() if key in chosen]))
    loaded, misfits = _fitted(name_of, chosen, held)
    problems = _unmatched(name_of, chosen, strict) + misfits
    check(
        not problems,
        f"source does not fit the state of this {type(model).__name__}: {'; '.join(problems)}. To load a part, give "
        "that part alone, with strict=False, which passes over names that one side alone has",
    )
    return state.replace(
        params={**state.params, **subset(loaded, state.params)},
        buffers={**state.buffers, **subset(loaded, state.buffers)},
    )


def _unmatched(name_of: Mapping[str, str], chosen: Mapping[str, Any], strict: bool) -> list[str]:
    """Missing and unexpected names, in words."""
    loaded = {*subset(name_of, chosen).values()}
    if loaded and not strict:
        return []
    missing = [key for key, name in name_of.items() if name not in loaded]
    kinds = {"missing": missing, "unexpected": without(chosen, name_of)}
    return [f"{kind} {few(keys)}" for kind, keys in kinds.items() if keys]


def _fitted(
    name_of: Mapping[str, str], chosen: Mapping[str, Any], held: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Copies like the state's tensors, by their names in the state, and the mismatches, in words."""
    loaded: dict[str, Tensor] = {}
    misfits: list[str] = []
    first_key: dict[str, str] = {}  # for tied weights, the name that was loaded
    for key, name in subset(name_of, chosen).items():
        value, like = chosen[key], held[name]
        if problem := _misfit(value, like):
            misfits.append(f"{key} {problem}")
        elif first_key.setdefault(name, key) == key:
            loaded[name] = copied_like(value, like).requires_grad_(like.requires_grad)
        elif not torch.equal(words(whole(chosen[first_key[name]])), words(whole(value))):
            misfits.append(f"{key} has other values than another name of the same tied weight")
    return loaded, misfits


def _misfit(value: Any, like: Tensor) -> str:
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    fits = value.shape == like.shape and torch.can_cast(value.dtype, like.dtype)
    return "" if fits else f"is {in_words(about(value))}, which does not go into {in_words(about(like))}"


# Names of tensors: those of a module's `state_dict` and those of a state


def check_fits(model: nn.Module, state: TrainState) -> None:
    """Raise TypeError for what is no state, and ValueError for a state of a different module."""
    check_state(state, "after the model, as in ll.checkpoint.state_dict(model, state)")
    slots = _modules.members(model)
    _modules.check_names("parameters", state.params, slots.params, model)
    _modules.check_names("buffers", state.buffers, slots.buffers, model)


def lend(model: nn.Module, state: TrainState, body: Callable[[], Any]) -> Any:
    """Call `body()` while the module holds the state's values."""
    check_fits(model, state)
    host = _modules.FunctionalModule(model, training=False)
    return host.run(state.params, state.buffers, 0, body, in_place=True)


def cleaner(model: nn.Module) -> Callable[[str], str]:
    """Make a function that removes what wrappers add to the names in a module's `state_dict`."""
    modules = model.named_modules(remove_duplicate=False)
    parallel = [_parts_of(path) for path, module in modules if _modules.is_parallel(module)]

    def cleaned(key: str) -> str:
        parts = _parts_of(key)
        return ".".join(part for i, part in enumerate(parts) if part != "module" or parts[:i] not in parallel)

    return cleaned


def _parts_of(path: str) -> list[str]:
    return [part for part in path.split(".") if part not in ("", *_modules.TRANSPARENT)]


def state_names(model: nn.Module) -> dict[str, str]:
    """Map each name in the module's `state_dict` to the tensor's name in a state."""
    clean, names = cleaner(model), names_of(model)
    with _exporting(model):
        entries = model.state_dict(keep_vars=True)
    return {clean(key): names[id(entry)] for key, entry in entries.items() if id(entry) in names}


def names_of(model: nn.Module) -> dict[int, str]:
    """Names in a state of the module's own tensors, by their ids."""
    slots = _modules.members(model)
    return {id(tensor): name for name, tensor in _modules.tensors([*slots.params, *slots.buffers]).items()}


@contextmanager
def _exporting(module: nn.Module) -> Iterator[None]:
    """Context for looplib's own calls of `module.state_dict()`, which know whose weights they save."""
    before = _modules.running.models
    _modules.running.models = (*before, module)
    try:
        yield
    finally:
        _modules.running.models = before
