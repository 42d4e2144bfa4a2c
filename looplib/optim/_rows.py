"""Rows of parameters that are pruned and added during a run, with what the update keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.by_parameter import name_indices
from looplib._core.checks import check, check_type, few
from looplib._core.mappings import pick
from looplib._core.ranks import is_sharded
from looplib._core.records import check_kind
from looplib.optim.chains import of_another
from looplib.types import Optimizer, TrainState, check_state

_LATE = (
    "/opt_state{where} was made by the first update of {name}, and what it is for rows that are added, or for a leaf that is not "
    "of its shape, is not known: use an optimizer whose state is made by its init, such as Adam, or add rows before the "
    "first step"
)


def take_rows(
    optimizer: Optimizer,
    state: TrainState,
    rows: Mapping[str, Tensor],
    append: Mapping[str, Tensor] | None = None,
) -> TrainState:
    """Prune and add rows of parameters, with their moments, as in the densification of Gaussian splats.

    >>> import looplib as ll, torch
    >>> adam, params = ll.optimizer(torch.optim.Adam, lr=0.1), {"means": torch.ones(4, 3, requires_grad=True)}
    >>> state = ll.TrainState(params=params, opt_state=adam.init(params))
    >>> visible = torch.tensor([True, False, True, True])
    >>> state = ll.optim.take_rows(adam, state, {"means": visible}, append={"means": torch.zeros(2, 3)})
    >>> state.params["means"].shape, state.opt_state["Adam"]["state"]["means"]["exp_avg"].shape
    (torch.Size([5, 3]), torch.Size([5, 3]))

    What the update keeps for each row is taken with the row: moments, sums of `every`, averages. For a row that is added, it
    is what `optimizer.init` gives: zero moments, and an average that begins at the row. Counts, such as Adam's `step`, are
    those of the whole parameter and stay. If a class makes its state in the first update of a parameter, as schedule-free ones
    and those of torchao do, rows can be pruned at any time and added only before.

    The result is not bound to a module: write `state = ll.bind(model, state, resize=True)` before the next step. A restore
    needs `resized=("params.means",)`. `state` is unchanged, and the result shares with it the parameters that keep all their
    rows. With donated steps, `bind` or the next step therefore spends `state`, too: to keep it, make a copy before,
    `ll.copy_state(state)`.

    Args:
        optimizer: the optimizer that created `state.opt_state`, with all of its parts.
        state: the state to change.
        rows: name of a parameter -> the rows to keep: a mask of (rows,), or their indices, in their new order.
        append: name of a parameter -> rows to add behind these, of (added, ...). Parameters that are not in `rows` keep all.

    Raises:
        ValueError: there is no such parameter, a mask or rows have the wrong shape, an index occurs twice or is out of range,
            the optimizer keeps something of a parameter that has no rows, or has made what it keeps in the first update and
            rows are added; or the state was created by a different optimizer.
        TypeError: `rows` or `append` is not a mapping.
        DonatedStateError: the state was donated to a step.

    Source: Kerbl et al., "3D Gaussian Splatting", 2023: `_prune_optimizer` and `cat_tensors_to_optimizer`.
    """
    check_kind(optimizer, "take_rows", "optimizer")
    check_state(state, "ll.optim.take_rows(optimizer, state, rows)")
    added = {} if append is None else append
    for title, mapping in (("rows is", rows), ("append is", added)):
        check_type(title, mapping, Mapping, "give a dict of names of parameters to tensors")
    unknown = [*({*rows, *added} - state.params.keys())]
    check(not unknown, f"the state has no parameter {few(sorted(unknown))}: it has {few(state.params)}")
    check(
        not isinstance(state.seed, tuple), "this state is a stack: change one of ll.transforms.unstack_states(stack)"
    )
    if not optimizer.fits(state.opt_state):
        raise of_another(optimizer, state)
    indices_of: dict[str, Tensor] = {}
    params = dict(state.params)
    with torch.no_grad():
        for name in dict.fromkeys([*rows, *added]):
            before = params[name]
            check(before.ndim, f"{name} is a scalar and has no rows: leave it out of rows and append")
            check(
                not is_sharded(before),
                f"{name} is sharded, and its rows belong to ranks: leave the module unwrapped, and give its gradient function to "
                "ll.grads.reduce_gradients, with which each rank has all of them",
            )
            indices_of[name] = _indices(name, rows.get(name), before)
            extra = added.get(name, before.detach()[:0])
            check(
                extra.shape[1:] == before.shape[1:] and extra.ndim == before.ndim,
                f"append gives {name} rows of shape {tuple(extra.shape[1:])}, and it has rows of {tuple(before.shape[1:])}",
            )
            new = torch.cat([before.detach()[indices_of[name]], extra.detach().to(before)])
            params[name] = new.requires_grad_(before.requires_grad)
        trained = [name for name, tensor in params.items() if tensor.requires_grad]
        begun = optimizer.init(pick(params, trained), buffers=state.buffers)
        longer = {
            name: _longer(tensor) if name in indices_of else tensor for name, tensor in pick(params, trained).items()
        }
        probe = dict(trees.leaves(optimizer.init(longer, buffers=state.buffers)))
        fresh, kept = dict(trees.leaves(begun)), dict(trees.leaves(state.opt_state))
        names = {
            path: path[index]
            for path, index in name_indices(kept, {**state.buffers, **state.params}).items()
            if path[index] in indices_of
        }
        for path, name in names.items():
            if path[-2:] == ("started", name) and len(params[name]) > len(indices_of[name]) and kept[path]:
                raise ValueError(_LATE.format(where=trees.pointer((*path[:-2], "state", name)), name=name))
        leaves = iter(
            [
                _taken(
                    path, leaf, names.get(path), state.params, params, indices_of, fresh.get(path), probe.get(path)
                )
                for path, leaf in kept.items()
            ]
        )
        opt_state = trees.map_leaves(lambda _: next(leaves), state.opt_state)
    return state.replace(params=params, opt_state=opt_state)


def _indices(name: str, rows: Tensor | None, before: Tensor) -> Tensor:
    """Rows to keep as indices."""
    count = len(before)
    if rows is None:
        return torch.arange(count, device=before.device)
    advice = f"give a mask of {count} bools, or different indices from 0 to {count - 1}"
    check_type(f"rows[{name!r}] is", rows, Tensor, advice)
    check(rows.ndim == 1, f"rows[{name!r}] has shape {tuple(rows.shape)}; {advice}")
    if rows.dtype == torch.bool:
        check(len(rows) == count, f"rows[{name!r}] has {len(rows)} entries, and {name} {count} rows; {advice}")
        return rows.to(before.device).nonzero().squeeze(1)
    check(not (rows.is_floating_point() or rows.is_complex()), f"rows[{name!r}] is of {rows.dtype}; {advice}")
    indices = rows.to(before.device, torch.int64)
    inside = bool(((indices >= 0) & (indices < count)).all()) and len({*indices.tolist()}) == len(indices)
    check(inside, f"rows[{name!r}] has an index twice or outside of {name}; {advice}")
    return indices


def _longer(tensor: Tensor) -> Tensor:
    """A parameter with one more row, for which the optimizer's state shows what it keeps by row."""
    return torch.cat([tensor.detach(), tensor.detach().new_zeros(1, *tensor.shape[1:])]).requires_grad_()


def _taken(
    path: trees.Path,
    leaf: Any,
    name: str | None,
    params: Mapping[str, Tensor],
    new_params: Mapping[str, Tensor],
    indices_of: Mapping[str, Tensor],
    fresh: Any,
    probe: Any,
) -> Any:
    """A leaf of the optimizer's state, of which a parameter's rows are taken if it has them."""
    if name is None or not isinstance(leaf, Tensor):
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
    indices, before, where = (
        indices_of[name].to(leaf.device),
        params[name],
        trees.pointer(path),
    )  # it may be on the host
    if not (
        isinstance(fresh, Tensor) and isinstance(probe, Tensor)
    ):  # made by an update, so `init` has none for new rows
        check(
            leaf.shape == before.shape and len(new_params[name]) == len(indices), _LATE.format(where=where, name=name)
        )
        return leaf.detach()[indices]
    if fresh.shape == probe.shape:  # of the whole parameter
        return leaf.detach().clone()
    by_row = (
        leaf.ndim == fresh.ndim and len(leaf) == len(before) and leaf.shape[1:] == fresh.shape[1:] == probe.shape[1:]
    )
    check(
        by_row,
        f"/opt_state{where} of shape {tuple(leaf.shape)} depends on the rows of {name}, and has none of its own to take: use an "
        "optimizer that keeps a value for each element or row, such as Adam",
    )
    return torch.cat([leaf.detach()[indices], fresh.detach()[len(indices) :].to(leaf)])
