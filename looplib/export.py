"""The ways out of a state and into one: files that other programs read, and raw torch loops.

Outside, a module's `state_dict` gives names to weights, and a torch optimizer counts parameters by group. A state
names both as the innermost module does. Every function here translates between the two, takes values as arguments
and returns values; the module serves for its names alone, and is left as it was.
"""

from __future__ import annotations

import inspect
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parallel import DataParallel, DistributedDataParallel

from looplib import _modules
from looplib.optimizer import _Engine
from looplib.state import TrainState


def state_dict(model: nn.Module, state: TrainState) -> dict[str, Any]:
    """What `model.state_dict()` would be with the state's values: for `torch.save`, or a plain torch program.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model)
    >>> weights = ll.state_dict(model, state)
    >>> list(weights), weights["weight"].requires_grad
    (['weight', 'bias'], False)
    >>> torch.nn.Linear(2, 1).load_state_dict(weights)
    <All keys matched successfully>

    The same names in the same order, tied weights under each of their names, no buffers that are not persistent;
    and no `module.` or `_orig_mod.`, whatever wraps the module or a part of it. For other weights of the same
    names, such as an average in `extra`, give `state.replace(params=...)`.

    The tensors are the state's own memory: save them, or copy them, before a donated step writes over it.

    Args:
        model: the module, wrapped or not; the state need not be bound to it.
        state: a state of this module.

    Raises:
        ValueError: a state of another model.
        DonatedStateError: the state is spent.
    """
    found: Any = _with_values(model, state, model.state_dict)
    clean = _cleaner(model)
    for table in (found, getattr(found, "_metadata", {})):  # the latter: versions by module, for load_state_dict
        for key in list(table):
            table[clean(key)] = table.pop(key)
    return found  # type: ignore[no-any-return]


def load_state_dict(
    model: nn.Module,
    state: TrainState,
    source: Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
    names: Callable[[str], bool] | None = None,
) -> TrainState:
    """A state with the weights of a `state_dict`, or of a file of one; all else in it stays.

    >>> import looplib as ll, torch
    >>> model, pretrained = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> state = ll.load_state_dict(model, ll.init_state(model), pretrained.state_dict())
    >>> torch.equal(state.params["weight"], pretrained.weight)
    True

    A part, such as all but the head, which may have another shape then:

    >>> state = ll.load_state_dict(model, state, {"weight": torch.zeros(1, 2), "bias": torch.zeros(7)},
    ...                            names=lambda name: name != "bias")

    Values are copied, to the dtype and device that the state has. The state returned is not bound to the module:
    `ll.bind(model, state)` does that.

    Args:
        model: the module, wrapped or not; `source` is named as the innermost module's own `state_dict` is. One
            name of tied weights is enough.
        state: a state of this module.
        source: names and tensors, or the path of a file: `*.safetensors`, or one that `torch.save` has written.
            Nothing in a file is ever run (`weights_only=True`).
        strict: refuse when a name is missing, or unexpected. At least one name must fit in any case.
        names: `names(name) -> bool`, which to load; all others, on either side, are passed over.

    Raises:
        ValueError: names, shapes or dtypes that do not fit, all of them in one message; tied weights that differ;
            a file that is no `state_dict`.
        TypeError: no mapping and no path.
        ImportError: a safetensors file without `pip install looplib[safetensors]`.
        DonatedStateError: the state is spent.
    """
    _check_state(model, state)
    title = "the mapping" if isinstance(source, Mapping) else str(source)
    given = source if isinstance(source, Mapping) else _read(source)
    clean = _cleaner(model)
    held = {**state.params, **state.buffers}
    members = _modules.members(model)
    own = {id(tensor): name for slots in members for name, tensor in _modules.tensors(slots).items()}
    theirs = {clean(key): own.get(id(tensor)) for key, tensor in model.state_dict(keep_vars=True).items()}
    # An extra state is the module's, and no part of a TrainState.
    places = {key: name for key, name in theirs.items() if name is not None}
    chosen = {key: value for key, value in given.items() if names is None or names(key)}

    wrong, new = [], {}
    for key, value in chosen.items():
        if key.endswith(_EXTRA_STATE_KEY_SUFFIX) or key not in places:
            continue
        name = places[key]
        old = held[name]
        if not isinstance(value, Tensor):
            wrong.append(f"{key} is a {type(value).__name__}, no tensor")
        elif value.shape != old.shape:
            wrong.append(f"{key} has shape {tuple(value.shape)}, the state's has {tuple(old.shape)}")
        elif not torch.can_cast(value.dtype, old.dtype):
            wrong.append(f"{key} is {value.dtype}, which does not go into the state's {old.dtype}")
        elif name in new and not torch.equal(new[name], value):
            wrong.append(f"{key} and {name} are tied in this {type(model).__name__}, and differ there")
        else:
            new[name] = value
    unexpected = [key for key in chosen if key not in theirs and not key.endswith(_EXTRA_STATE_KEY_SUFFIX)]
    if strict or not new:
        missing = [key for key, name in places.items() if name not in new and (names is None or names(key))]
        missing = [key for key in missing if key not in chosen]
        if missing:
            wrong.append(f"missing {_some(missing)}")
        if unexpected:
            wrong.append(f"unexpected {_some(unexpected)}{_hint(chosen, places)}")
        if not wrong and not new:
            wrong.append("names= chose nothing")
    if wrong:
        raise ValueError(
            f"{title} does not fit the state of this {type(model).__name__}: {'; '.join(wrong)}. To load a part of it, "
            "choose with names=, or leave names that are on one side only alone with strict=False"
        )
    loaded = {name: _copied(value, held[name]) for name, value in new.items()}
    return state.replace(
        params={name: loaded.get(name, tensor) for name, tensor in state.params.items()},
        buffers={name: loaded.get(name, tensor) for name, tensor in state.buffers.items()},
    )
