"""The ways out of a state and into one: files that other programs read, and raw torch loops.

Outside, a module's `state_dict` names the weights, and a torch optimizer counts its parameters by group. A state
names both as the innermost module does. The functions here translate; they need the module for its names, and
leave it as it was. Tensors of which each rank holds a part (FSDP2's, and those of tensor parallel plans) are whole
outside: all ranks call alike, and gather one after another.
"""

from __future__ import annotations

import functools
import inspect
import os
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from looplib._core import modules as _modules
from looplib._core import ranks as _ranks
from looplib._core.collective import together
from looplib._core.ranks import is_sharded, shards
from looplib.optim._first_state import first_state
from looplib.optim._recipe import Recipe
from looplib.optim._update import not_started
from looplib.types import TrainState

R = TypeVar("R")


def state_dict(model: nn.Module, state: TrainState, *, cpu_offload: bool = False) -> dict[str, Any]:
    """What `model.state_dict()` would be with the state's values: for `torch.save`, or for plain torch.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> weights = ll.checkpoint.state_dict(model, ll.init_state(model))
    >>> list(weights), weights["weight"].requires_grad
    (['weight', 'bias'], False)
    >>> torch.nn.Linear(2, 1).load_state_dict(weights)
    <All keys matched successfully>

    The same names in the same order, tied weights under each of theirs, no buffer that is not persistent, and no
    `module.` or `_orig_mod.`, whatever wraps the module or a part of it. For other weights of the same names, such
    as an average in `extra`, give `state.replace(params=...)`.

    The tensors are the state's own memory: save or copy them before a donated step writes over it.

    Those of which each rank holds a part are gathered, and all ranks call this; `ll.bind` is for a module that is
    sharded as the state is. No rank ever has more than one whole tensor beyond what it keeps, and none has to keep
    any but the first, in its host's memory:

        weights = ll.checkpoint.state_dict(model, state, cpu_offload=True)
        if ll.distributed.is_rank_zero():
            torch.save(weights, "weights.pt")

    Args:
        model: the module, wrapped or not; the state need not be bound to it.
        state: a state of this module.
        cpu_offload: give tensors on the CPU, each moved there before the next is gathered, and on the first of
            several ranks alone; the others get an empty dict. As torch's
            `StateDictOptions(full_state_dict=True, cpu_offload=True)`.

    Raises:
        ValueError: a state of another module.
        DonatedStateError: the state is spent.
    """
    kept = _ranks.is_first() or not cpu_offload

    def exported() -> dict[str, Any]:
        clean, places = _cleaner(model), _places(model)
        found: dict[str, Any] = model.state_dict()
        whole: dict[str, Tensor | None] = {}  # one for all names of tied weights
        for key in list(found):
            value, key = found.pop(key), clean(key)
            if isinstance(value, Tensor):
                name = places.get(key, key)
                if name not in whole:
                    value = _whole(value, trim=kept)
                    whole[name] = (value.cpu() if cpu_offload else value) if kept else None
                value = whole[name]
            if kept:
                found[key] = value
        versions = getattr(found, "_metadata", {})  # by names of modules
        for key in list(versions):
            versions[clean(key)] = versions.pop(key)
        return found

    return _lend(model, state, exported)


def load_state_dict(
    model: nn.Module,
    state: TrainState,
    source: Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
    names: Callable[[str], bool] | None = None,
) -> TrainState:
    """A state with the weights of a `state_dict`, or of a file of one; all else stays as it is in `state`.

    >>> import looplib as ll, torch
    >>> model, pretrained = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> state = ll.checkpoint.load_state_dict(model, ll.init_state(model), pretrained.state_dict())
    >>> torch.equal(state.params["weight"], pretrained.weight)
    True

    A part of it, such as all but the head, which may have another shape then:

    >>> mapping = {"weight": torch.zeros(1, 2), "bias": torch.zeros(10)}
    >>> state = ll.checkpoint.load_state_dict(model, state, mapping, names=lambda name: name != "bias")

    The values are copied, and take the state's dtypes and devices. The new state is not bound to the module;
    `ll.bind(model, state)` binds it.

    Where the state has a part of a tensor on each rank, each takes its own of the whole one that it is given, without
    a message; of a file it reads that alone. Only a `source` that holds parts itself is gathered, by all ranks.

    Args:
        model: the module, wrapped or not.
        state: a state of this module.
        source: names and tensors, as the module's `state_dict()` or the innermost one's gives them; or the path of
            a safetensors file or one of `torch.save`, of which nothing is ever run (`weights_only=True`). One name of
            tied weights is enough.
        strict: refuse names that are missing, or unexpected. One name at least must fit in any case.
        names: `names(name) -> bool`, which to load; others are passed over, on either side.

    Raises:
        ValueError: names, shapes or dtypes that do not fit, all in one message; values of tied weights that differ;
            a file that is damaged, or holds more than tensors and plain values.
        TypeError: `source` is neither names and tensors nor a path.
        ImportError: a safetensors file, without `pip install looplib[safetensors]`.
        DonatedStateError: the state is spent.
    """
    if not isinstance(source, (Mapping, str, os.PathLike)):
        raise TypeError(f"source is a {type(source).__name__}; give a state_dict, or the path of a file of one")
    _check_state(model, state)
    given = source if isinstance(source, Mapping) else _read(source)
    held = {**state.params, **state.buffers}
    places, clean = _places(model), _cleaner(model)
    ours = [key for key in places if names is None or names(key)]
    chosen = {clean(str(key)): value for key, value in given.items()}
    chosen = {key: value for key, value in chosen.items() if names is None or names(key)}
    chosen = {key: value for key, value in chosen.items() if not key.endswith("_extra_state")}  # the module's own
    unexpected = [key for key in chosen if key not in places]
    covered = {places[key] for key in chosen if key in places}
    missing = [key for key in ours if places[key] not in covered]

    wrong = []
    if missing and (strict or not covered):
        wrong.append(f"missing {_some(missing)}")
    if unexpected and (strict or not covered):
        wrong.append(f"unexpected {_some(unexpected)}{_hint(unexpected, chosen, places)}")
    if places and not (ours or chosen):
        wrong.append("names= chose none")
    new: dict[str, Tensor] = {}
    taken: dict[str, str] = {}  # under which of its names each was found
    for key in [key for key in places if key in chosen]:
        value, old = chosen[key], held[places[key]]
        if not isinstance(value, Tensor):
            wrong.append(f"{key} is a {type(value).__name__}, not a tensor")
        elif value.shape != old.shape:
            wrong.append(f"{key} has shape {tuple(value.shape)}, the state's has {_shape(old)}")
        elif not torch.can_cast(value.dtype, old.dtype):
            wrong.append(f"{key} is of {value.dtype}, which does not go into the state's {old.dtype}")
        else:
            if (first := taken.setdefault(places[key], key)) == key:
                new[places[key]] = _like(value, old).requires_grad_(old.requires_grad)
            elif not _same(chosen[first], value, old):
                wrong.append(f"{key} has other values than another name of the same tied weight")
    if wrong:
        title = "the mapping" if isinstance(source, Mapping) else os.fspath(source)
        raise ValueError(
            f"{title} does not fit the state of this {type(model).__name__}: {'; '.join(wrong)}. To load a part, "
            "choose it with names=, or pass over names that one side alone has with strict=False"
        )
    return state.replace(
        params={name: new.get(name, tensor) for name, tensor in state.params.items()},
        buffers={name: new.get(name, tensor) for name, tensor in state.buffers.items()},
    )


def save_safetensors(model: nn.Module, state: TrainState, path: str | os.PathLike[str]) -> None:
    """Write the weights of a state as a safetensors file, which `load_state_dict` reads.

    >>> import looplib as ll, pathlib, tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> ll.checkpoint.save_safetensors(model, state, path)
    >>> again = ll.checkpoint.load_state_dict(model, state, path)

    The names are those of `state_dict`. The format has no tied weights: they stand there under the first of their
    names, and the file's metadata leads from the others to it, as `safetensors.torch.save_model` does it. What was
    at `path` is replaced once all is written.

    Of several ranks all call this, whatever wraps the model: the first writes whole tensors, and what keeps it from
    that is raised on each.

    Args:
        model, state: as for `state_dict`.
        path: the file; its directory exists.

    Raises:
        ImportError: without `pip install looplib[safetensors]`.
        OSError: the file cannot be written.
        ValueError, DonatedStateError: as `state_dict`.
    """
    weights, places = state_dict(model, state, cpu_offload=True), _places(model)

    def write() -> None:
        safetensors = _safetensors()
        kept: dict[str, Tensor] = {}
        first: dict[str, str] = {}
        metadata = {"format": "pt"}
        for key, value in weights.items():
            if (other := first.setdefault(places.get(key, key), key)) != key:
                metadata[key] = other
            else:
                kept[key] = value.contiguous() if isinstance(value, Tensor) else value
        part = Path(f"{os.fspath(path)}.part")
        try:
            safetensors.torch.save_file(kept, part, metadata)
            part.replace(path)
        except safetensors.SafetensorError as error:  # of a disk's, too
            raise OSError(f"{os.fspath(path)} could not be written: {error}") from error
        finally:
            part.unlink(missing_ok=True)

    together().on_first(write)


def save_pretrained(model: nn.Module, state: TrainState, directory: str | os.PathLike[str], **arguments: Any) -> None:
    """Write a `transformers` model with the state's values as the model's own `save_pretrained` does.

    >>> import looplib as ll, tempfile, transformers
    >>> config = transformers.BertConfig(
    ...     vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    >>> model = transformers.BertModel(config)
    >>> folder = tempfile.mkdtemp()
    >>> ll.checkpoint.save_pretrained(model, ll.init_state(model), folder)

    The folder is what every program takes that knows `transformers`. In again:

    >>> model = transformers.AutoModel.from_pretrained(folder)
    >>> state = ll.init_state(model)

    Of several ranks all call this, and the first writes, as in `save_safetensors`.

    Args:
        model: a `transformers` model, wrapped or not. Its `config` records the dtype and the class, as it always
            does on being saved.
        state: a state of this module, bound to it or not.
        directory: the folder, made where there is none.
        arguments: as `save_pretrained` takes them, such as `max_shard_size`.

    Raises:
        TypeError: a model that has no `save_pretrained`.
        NotADirectoryError: `directory` is a file.
        ValueError: as `state_dict`; or several ranks are to write, by `distributed_checkpoint=True` or since
            `transformers` divided the model itself.
        DonatedStateError: the state is spent.
    """
    inner: Any = [module for name, module in _modules.named_modules(model) if not name][-1]
    if not callable(getattr(inner, "save_pretrained", None)):
        raise TypeError(
            f"{type(inner).__name__} has no save_pretrained, which the models of transformers have; for other models "
            "take ll.checkpoint.save_safetensors, or torch.save(ll.checkpoint.state_dict(model, state), path)"
        )
    ranks = together()
    divided = getattr(getattr(inner, "config", None), "distributed_config", None) is not None
    if ranks.several and (divided or arguments.get("distributed_checkpoint")):
        raise ValueError(
            f"{'config.distributed_config' if divided else 'distributed_checkpoint=True'} has all ranks write, and "
            "here the first alone does, whole tensors: shard the model by fully_shard, or, for checkpoints in parts, "
            "take ll.checkpoint_io"
        )
    weights = state_dict(model, state, cpu_offload=True)

    def write() -> None:
        if Path(directory).is_file():  # transformers logs this and returns
            raise NotADirectoryError(f"{directory} is a file; save_pretrained needs a folder")
        # With the values in the module too, for what is read off it: the dtype in config.json.
        _lend(model, state, lambda: inner.save_pretrained(directory, state_dict=weights, **arguments))

    ranks.on_first(write)


def optimizer_state_dict(
    model: nn.Module,
    state: TrainState,
    torch_optimizer: torch.optim.Optimizer,
    *,
    full_state_dict: bool = True,
    cpu_offload: bool = False,
) -> dict[str, Any]:
    """The optimizer's state for a `torch.optim` optimizer to load: with it a raw loop goes on where the state is.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=1e-3))
    >>> state = ll.bind(model, state)  # the weights
    >>> raw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    >>> raw.load_state_dict(ll.checkpoint.optimizer_state_dict(model, state, raw))

    The tensors are copies: torch's `load_state_dict` keeps those that it is given, and writes into them. The
    hyperparameters are `torch_optimizer`'s own, the learning rate too: a schedule is a function of `state.step`, a
    raw loop sets it, or a torch scheduler does. For the same bits give `fused=True` where looplib does (it does
    where torch can, unless told).

    Tensors of which each rank holds a part are gathered, as by `state_dict`, so all ranks call this. An optimizer
    over such parameters itself goes on with parts: `raw.load_state_dict(ll.checkpoint.optimizer_state_dict(model, state, raw,
    full_state_dict=False))`.

    Args:
        model: the module, wrapped or not.
        state: a state of this module, with the state of an `ll.optimizer`, wrapped by `apply_if_finite` or not.
        torch_optimizer: of the class and the kind that `ll.optimizer` was given, over the module's own parameters,
            in any groups and any order; it is not changed. One that keeps values in its groups (schedule-free ones
            do) needs the groups of `ll.optimizer` in the same order, those of the defaults last.
        full_state_dict: gather what ranks hold parts of; False leaves this rank's parts, as DTensors.
        cpu_offload: give tensors on the CPU; if they are gathered, on the first of several ranks alone, and an empty
            dict on the others. Both are torch's `StateDictOptions`.

    Raises:
        ValueError: `torch_optimizer` is over other parameters, keeps other things, or has other groups.
        TypeError: `torch_optimizer` is no torch optimizer, or the state has none of an `ll.optimizer`.
        DonatedStateError: the state is spent.
    """
    grouped, core = _matched(model, state, torch_optimizer)
    kept_here = _ranks.is_first() or not (cpu_offload and full_state_dict)

    def exported(value: Tensor, like: Tensor, place: str) -> Tensor | None:
        value = _whole(value) if full_state_dict else value
        device = torch.device("cpu") if cpu_offload else like.device
        return value.detach().to(device, like.dtype, copy=True) if kept_here else None

    packed: dict[str, Any] = torch_optimizer.state_dict()
    packed["state"] = {}
    for group, described, names in zip(torch_optimizer.param_groups, packed["param_groups"], grouped, strict=True):
        ids = {name: id for name, id in zip(names, described["params"], strict=True) if name in core["state"]}
        if not ids:
            continue
        # A look at what an optimizer of this kind keeps, on parameters of one number each.
        cls = type(torch_optimizer)
        chosen = {key: group[key] for key in inspect.signature(cls).parameters if key in group and key != "params"}
        recipe = Recipe(cls, chosen)
        own = state.params
        tiny = {
            name: torch.zeros((1,) * own[name].ndim, dtype=own[name].dtype, device=own[name].device) for name in ids
        }
        kept = first_state(recipe, tiny)["state"]
        late = not_started(recipe, core, state.step)
        entries = {
            ids[name]: _converted(name, core["state"][name], kept[name], "the state", cls.__name__, exported)
            for name in ids
            if name not in late
        }
        if state.step or cls is not torch.optim.SGD:  # which has nothing before its first step
            packed["state"] |= {id: entry for id, entry in entries.items() if entry}
    if state.step and "groups" in core:
        for described, values in zip(packed["param_groups"], core["groups"], strict=True):
            described.update({key: _copied(value) for key, value in values.items()})
    return packed if kept_here else {}


def load_optimizer_state_dict(
    model: nn.Module, state: TrainState, torch_optimizer: torch.optim.Optimizer
) -> TrainState:
    """A state with what a `torch.optim` optimizer has kept: looplib goes on where a raw loop is.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> raw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> raw.step()
    >>> state = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=1e-3)).replace(step=1)
    >>> state = ll.checkpoint.load_optimizer_state_dict(model, state, raw)

    The weights are the module's own, as `init_state` takes them. The counts are what you say they are: schedules
    and randomness go by `step`, loaders by `epoch` and `batch`. For a file of an optimizer's `state_dict()`, have
    `torch_optimizer` load it first.

    Args:
        model: the module, wrapped or not.
        state: a state of this module, with its counts set; its `opt_state` says what is to be found.
        torch_optimizer: as for `optimizer_state_dict`; its tensors are copied, and take the dtypes and devices of the
            state's. They are whole or in parts, whichever the state's are. A parameter of which it keeps nothing
            yet, since it never had a gradient, keeps what `state` has. Schedule-free ones have to be in training
            mode.

    Raises:
        ValueError: `torch_optimizer` is over other parameters, keeps other things, has other groups, or has made no
            step; `state.step` is 0.
        TypeError: `torch_optimizer` is no torch optimizer, or the state has none of an `ll.optimizer`.
        DonatedStateError: the state is spent.
    """
    grouped, core = _matched(model, state, torch_optimizer)
    cls = type(torch_optimizer).__name__
    entries = dict(core["state"])
    loaded: set[str] = set()

    def fitted(value: Tensor, like: Tensor, place: str) -> Tensor:
        if value.shape != like.shape:
            raise ValueError(f"{place} has shape {tuple(value.shape)} in this {cls}, the state's has {_shape(like)}")
        return _like(value, like)

    for group, names in zip(torch_optimizer.param_groups, grouped, strict=True):
        for name, param in zip(names, group["params"], strict=True):
            if name in entries and (given := torch_optimizer.state.get(param)):
                entries[name] = _converted(name, given, entries[name], f"this {cls}", "the state", fitted)
                loaded.add(name)
    if not loaded and any(entries.values()):
        raise ValueError(
            f"this {cls} keeps nothing for any parameter: it has made no step, and no load_state_dict has filled it"
        )
    if loaded and state.step == 0:
        raise ValueError(
            f"the state is at step 0, where an optimizer begins anew, and this {cls} has made steps: give "
            "state.replace(step=..., epoch=..., batch=..., samples=...)"
        )
    new: dict[str, Any] = {**core, "state": entries}
    if "started" in core:
        new["started"] = torch.tensor([name in loaded for name in entries])
    if "groups" in core:
        new["groups"] = [
            {key: _copied(group[key]) for key in values}
            for group, values in zip(torch_optimizer.param_groups, core["groups"], strict=True)
        ]
    return state.replace(opt_state=_with_core(state.opt_state, new))


def _matched(
    model: nn.Module, state: TrainState, torch_optimizer: torch.optim.Optimizer
) -> tuple[list[list[str]], dict[str, Any]]:
    """The names of a torch optimizer's parameters by group, and the state of the `ll.optimizer` itself."""
    if not isinstance(torch_optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"torch_optimizer is a {type(torch_optimizer).__name__}; give an instance over the module's parameters, "
            "such as torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )
    _check_state(model, state)
    core = state.opt_state
    while isinstance(core, Mapping) and "inner_state" in core:  # a wrapper's, such as apply_if_finite's
        core = core["inner_state"]
    if not isinstance(core, dict) or "state" not in core:
        raise TypeError(
            f"the state's opt_state is a {type(core).__name__}, not what an ll.optimizer keeps: make the state with "
            "ll.init_state(model, ll.optimizer(...))"
        )
    name_of = {id(param): name for name, param in _modules.tensors(_modules.members(model).params).items()}
    cls, model_cls = type(torch_optimizer).__name__, type(model).__name__
    grouped: list[list[str]] = []
    free = set()
    for group in torch_optimizer.param_groups:
        if strange := [tuple(param.shape) for param in group["params"] if id(param) not in name_of]:
            raise ValueError(
                f"this {cls} has parameters that are not this {model_cls}'s own, of shapes {_some(strange)}: make it "
                "over model.parameters(), after all that gives the module new ones"
            )
        grouped.append([name_of[id(param)] for param in group["params"]])
        free |= {name_of[id(param)] for param in group["params"] if param.requires_grad}
    missing = core["state"].keys() - {name for names in grouped for name in names}
    unexpected = free - core["state"].keys()
    if missing or unexpected:
        raise ValueError(
            f"this {cls} and the state's optimizer train different parameters: missing {_some(sorted(missing))}, "
            f"unexpected {_some(sorted(unexpected))}; make it over the others, or the state with the same trainable="
        )
    if "groups" in core and len(core["groups"]) != len(grouped):
        raise ValueError(
            f"this {cls} has {len(grouped)} groups, and the state's optimizer {len(core['groups'])}: make "
            "the groups of ll.optimizer in its order, those of the defaults last"
        )
    return grouped, core


def _with_core(opt_state: Any, core: Any) -> Any:
    if "inner_state" not in opt_state:
        return core
    return {**opt_state, "inner_state": _with_core(opt_state["inner_state"], core)}


def _converted(
    name: str,
    entry: Mapping[str, Any],
    like: Mapping[str, Any],
    giver: str,
    taker: str,
    copied: Callable[[Tensor, Tensor, str], Tensor | None],
) -> dict[str, Any]:
    """Copies of what is kept for one parameter, of tensors by `copied(value, like, place)`."""
    if entry.keys() != like.keys():
        raise ValueError(
            f"for {name}, {giver} keeps {sorted(entry) or 'nothing'}, and {taker} keeps {sorted(like) or 'nothing'}: "
            "both need the same class of optimizer, with the same hyperparameters"
        )
    return {
        key: copied(torch.as_tensor(value), like[key], f"{name}'s {key}")
        if isinstance(like[key], Tensor)
        else _copied(value)
        for key, value in entry.items()
    }


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _whole(tensor: Tensor, *, trim: bool = False) -> Tensor:
    """All of a tensor, which all ranks gather together where each holds a part of it."""
    if not is_sharded(tensor):
        return tensor
    meeting = tensor.device_mesh.device_type
    with torch.no_grad():
        part = tensor if tensor.device.type == meeting else tensor.to(meeting)  # offloaded
        found: Tensor = part.full_tensor().detach().to(tensor.device)
    # Unequal parts were filled up to be sent: torch.save would write that too.
    return found.clone() if trim and found.untyped_storage().nbytes() > found.nbytes else found


def _like(value: Tensor, like: Tensor) -> Tensor:
    """A copy laid out as `like` is: its dtype, device and strides, and this rank's part of it if that is a part."""
    copied = torch.empty_like(like, requires_grad=False)
    with torch.no_grad():
        if not is_sharded(like):
            return copied.copy_(_whole(value))
        if not is_sharded(value) or (value.device_mesh, value.placements) != (like.device_mesh, like.placements):
            from torch.distributed.tensor import distribute_tensor

            whole = _whole(value).detach()
            value = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)  # sends nothing
        into, part = shards([copied, value])
        into.copy_(part)
    return copied


def _same(one: Tensor, other: Tensor, like: Tensor) -> bool:
    """Whether the values are the same once they are in the state."""
    one, other = (_whole(value).detach().to(like.device, like.dtype) for value in (one, other))
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _shape(tensor: Tensor) -> str:
    parts = ", of which each rank holds a part: give it whole" if is_sharded(tensor) else ""
    return f"{tuple(tensor.shape)}{parts}"


def _check_state(model: nn.Module, state: TrainState) -> None:
    slots = _modules.members(model)
    _modules.check_names("parameters", state.params, slots.params, model)
    _modules.check_names("buffers", state.buffers, slots.buffers, model)


def _lend(model: nn.Module, state: TrainState, body: Callable[[], R]) -> R:
    """`body()` while the module has the state's values."""
    _check_state(model, state)
    return _modules.Host(model, training=False).run(state.params, state.buffers, 0, body)


def _cleaner(model: nn.Module) -> Callable[[str], str]:
    """What takes the parts that wrappers add out of a name in the module's `state_dict`."""

    def parts_of(path: str) -> list[str]:
        return [part for part in path.split(".") if part not in _modules._TRANSPARENT]

    parallel = [
        parts_of(path) if path else []
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (DataParallel, DistributedDataParallel))
    ]

    def clean(key: str) -> str:
        parts = parts_of(key)
        return ".".join(part for i, part in enumerate(parts) if part != "module" or parts[:i] not in parallel)

    return clean


def _places(model: nn.Module) -> dict[str, str]:
    """Each name of a tensor in the module's `state_dict`, and the one that a state has for it."""
    clean = _cleaner(model)
    names = {id(own): name for slots in _modules.members(model) for name, own in _modules.tensors(slots).items()}
    found = model.state_dict(keep_vars=True)
    return {clean(key): names[id(own)] for key, own in found.items() if id(own) in names}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors files need the package: pip install looplib[safetensors]") from error
    return safetensors


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    with open(path, "rb") as file:
        head = file.read(9)
    load: Callable[..., Any]
    if head[8:] == b"{":  # the length of a JSON header, then the header
        load = _safetensors().torch.load_file
    else:
        mapped = zipfile.is_zipfile(path)  # older ones of torch can only be read
        load = functools.partial(torch.load, map_location="cpu", weights_only=True, mmap=mapped)
    try:
        found = load(path)
    except OSError:
        raise
    except Exception as error:  # torch raises whatever a damaged file leads to
        raise ValueError(
            f"{os.fspath(path)} is damaged, or holds more than tensors and plain values, and was not loaded"
        ) from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{os.fspath(path)} holds a {type(found).__name__}, not a state_dict")
    return found


def _some(items: Collection[Any]) -> str:
    shown = ", ".join(map(str, list(items)[:8])) or "none"
    return f"{shown} and {len(items) - 8} more" if len(items) > 8 else shown


def _hint(unexpected: list[str], given: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """What the usual misfits are due to."""
    if nested := [key for key in unexpected if isinstance(given[key], Mapping)]:
        return f" ({nested[0]} is a dict: if the weights are in it, give that)"
    prefix = unexpected[0].partition(".")[0] + "."
    if all(key.startswith(prefix) and key.removeprefix(prefix) in places for key in unexpected):
        return f' (they fit without "{prefix}": give {{name.removeprefix("{prefix}"): ... for each}})'
    return ""
