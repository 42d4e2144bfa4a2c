"""`iter_weights`: the weights of a state one by one, as an inference engine loads them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from looplib._core import lease
from looplib._core.checks import check, few
from looplib._core.modules import innermost
from looplib.checkpoint._adapters import Source, merged_sources
from looplib.checkpoint._state_dict import check_fits, cleaner, lend, state_names
from looplib.types import TrainState


def iter_weights(
    model: nn.Module, state: TrainState, *, merge_adapters: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights of a state as `(name, full tensor)`, to send them to an inference engine.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model)
    >>> [(name, tuple(tensor.shape), state.step) for name, tensor in ll.checkpoint.iter_weights(model, state)]
    [('weight', (1, 2), 0), ('bias', (1,), 0)]

    Names and values are those that `save_pretrained` of transformers writes: a tied tensor comes once, under the name
    that is kept there, and fused weights are split as in the file. For other modules they are those of
    `ll.checkpoint.state_dict`, with the first name of a tied tensor. The version of the weights is `state.step`.

    Sharded tensors are gathered when their turn comes, so all ranks must iterate to the end. A loop variable holds its
    tensor while the next one is gathered: write `del tensor` as the last line of the loop, and memory holds one
    gathered tensor at a time beside the shards. (Layouts other than FSDP2's rows, and fused weights, take what
    `DTensor.full_tensor` and transformers need in addition.) Tensors that are not sharded share the
    state's memory, so copy what you keep before a donated step.

    Args:
        model: the `nn.Module`, with or without torch's wrappers. The state need not be bound to it.
        state: a state of this module. A donated step in the middle of the iteration ends it with an error.
        merge_adapters: if True, adapters of a model of peft are merged into the weights that they adapt, by peft's own
            `merge`, and the names are those of the base model. A layer that is merged needs its own memory twice.
            The active adapters are merged. The state and the model stay as they are. By default, weights of base model
            and adapters come under the names that peft gives them.

    Raises:
        ValueError: the state belongs to a different module; the model has no adapters to merge, or merging would
            change a tied weight under one of its names only; transformers could not save such ties; or a quantized
            model, whose file is written by its quantizer.
        DonatedStateError: the state was donated to a step, before or during the iteration.
    """
    check_fits(model, state)
    inner: Any = innermost(model)
    check(
        getattr(inner, "hf_quantizer", None) is None,
        f"this {type(inner).__name__} is quantized, and what its file holds is written by its quantizer: write "
        "ll.checkpoint.save_pretrained(model, state, folder)",
    )
    if merge_adapters:
        inner, sources, names = merged_sources(model, state)
    else:
        clean, names = cleaner(model), state_names(model)  # with one name for all keys of a tied weight
        entries = {clean(key): value for key, value in lend(model, state, model.state_dict).items()}
        tensors = {key: value for key, value in entries.items() if isinstance(value, Tensor)}  # no `_extra_state`
        sources = {key: Source.of(key, value) for key, value in tensors.items()}
    kept = {key: sources[key] for key in _without_ties(list(sources), names, inner)}
    return _iterated(state, inner, [{key: kept[key] for key in group} for group in _groups(inner, kept)])


def _iterated(
    state: TrainState, inner: nn.Module, groups: Sequence[Mapping[str, Source]]
) -> Iterator[tuple[str, Tensor]]:
    """Gather and convert one group of weights at a time. No name here keeps a tensor that was handed out."""
    for group in groups:
        gathered: dict[str, Tensor] = {}
        for gather in dict.fromkeys(source.gather for source in group.values()):
            lease.check_valid(state)
            gathered |= gather()
        saved = _as_saved(inner, {key: gathered[key] for key in group})
        gathered.clear()
        while saved:
            name = next(iter(saved))
            yield name, saved.pop(name)


def _is_of_transformers(inner: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(inner, transformers.PreTrainedModel)


# What `save_pretrained` of transformers makes of a `state_dict`


def _without_ties(keys: Sequence[str], names: Mapping[str, str], inner: nn.Module) -> list[str]:
    """The keys that are saved: of tied weights, the one that the model does not tie again when it is loaded.

    Of a module that is not a model of transformers, it is the first.
    """
    tied = [
        f"{path}.{key}" if path else key
        for path, module in inner.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    keys_of: dict[str, list[str]] = {}
    for key in keys:
        keys_of.setdefault(names.get(key, key), []).append(key)
    dropped = {*(getattr(inner, "_keys_to_ignore_on_save", None) or ())}
    for same in keys_of.values():
        loaded = [key for key in same if not any(re.search(pattern, key) for pattern in tied)] or [max(same)]
        check(
            len(loaded) == 1 or not _is_of_transformers(inner),
            f"{few(loaded)} are one tensor, which the _tied_weights_keys of this {type(inner).__name__} do not say, so "
            "transformers would not save it: name all but one of them there, or give each a tensor of its own",
        )
        dropped.update(key for key in same if key != loaded[0])
    return [key for key in keys if key not in dropped]


def _as_saved(inner: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as a file has them, such as a matrix for each expert of a fused tensor."""
    if not _is_of_transformers(inner) or getattr(inner, "_hf_peft_config_loaded", False):
        return weights
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(inner, weights)  # type: ignore[no-any-return]


def _groups(inner: nn.Module, sources: Mapping[str, Source]) -> list[list[str]]:
    """Keys that are gathered together: those that are merged together, and those that become one tensor in a file.

    A trial on tensors without values shows which these are: each alone becomes a part of the same name.
    """
    likes = {key: source.like for key, source in sources.items()}
    saved = {name: like.shape for name, like in _as_saved(inner, dict(likes)).items()}
    groups: list[list[str]] = []
    group_of: dict[Any, list[str]] = {}  # by the names in the file, and by what gathers
    for key, source in sources.items():
        signs = [source.gather, *_as_saved(inner, {key: source.like})]
        joined = {id(group): group for sign in signs if (group := group_of.get(sign)) is not None}
        group = [*(key for other in joined.values() for key in other), key]
        groups = [*(other for other in groups if id(other) not in joined), group]
        group_of |= dict.fromkeys(signs, group)
        group_of = {sign: group if id(of) in joined else of for sign, of in group_of.items()}
    parts = [_as_saved(inner, {key: likes[key] for key in group}) for group in groups]
    if {name: like.shape for part in parts for name, like in part.items()} != saved:
        return [list(sources)]  # converted by more of the model than names tell
    return groups
