"""Stacks of states: the members of an ensemble or sweep as one state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from looplib._core import trees
from looplib._core.checks import as_tensor, check, few, is_plain, named, separated, warn
from looplib._core.copies import is_shared
from looplib._core.mappings import fields_of
from looplib._core.torch_private import wraps_tensors
from looplib._core.trees import same, same_kind
from looplib.metrics import Mean
from looplib.types import TREES, Metric, TrainState, check_state

_MOMENT = ("step", "epoch", "batch", "epoch_length", "samples")  # counts that all members share


def stack_states(states: Sequence[TrainState], *, same_seeds: bool = False) -> TrainState:
    """Stack states into one, to train with `vmap_step`: each tensor gets a first dimension of members.

    >>> import looplib as ll, torch
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> def member(seed):
    ...     torch.manual_seed(seed)
    ...     return ll.init_state(torch.nn.Linear(2, 1), optimizer, seed=seed)
    >>> stack = ll.transforms.stack_states([member(seed) for seed in range(4)])
    >>> stack.params["weight"].shape, stack.seed
    (torch.Size([4, 1, 2]), (0, 1, 2, 3))

    The members are copied. A frozen parameter (`requires_grad_(False)`) that is the same in all of them is held once: it is
    expanded over the members, so that a stack of adapters takes the memory of one base model and all adapters, here, in its
    copies and in its checkpoints. Buffers are held once for each member, constants such as a causal mask
    included, since nothing says of a buffer that no step moves it: eight members with 1.6 MB of masks hold 12.8 MB of them. To
    share a large constant, register it as a frozen parameter.

    Predicates, `eval_state`, `checkpoint_io` and everything that uses counts or whole trees accept a stack as a state. Its
    `seed` is the tuple of the members' seeds.

    A `Window` in `extra` is that of each member, stacked too: members have windows of the same steps.

    Members with equal seeds draw the same random numbers (dropout, noise, samples) in every step, so this warns of them.
    Copies of one state need seeds of their own: `[ll.state.fold_in(state, i) for i in range(4)]`.

    Args:
        states: states at the same step and position in the data, with the same names, shapes and dtypes.
        same_seeds: if True, members may have equal seeds, as in a sweep over learning rates with the same masks for all.

    Raises:
        ValueError: there are no states, or they differ (the message says where).
    """
    check(states, "stack_states got no states; give a list of at least one")
    for state in states:
        check_state(state, "ll.transforms.stack_states([state, state])")
    first = states[0]
    for (number, state), name in itertools.product(enumerate(states), _MOMENT):
        at, first_at = getattr(state, name), getattr(first, name)
        check(
            at == first_at,
            f"member {number} is at {name} {at}, member 0 at {first_at}: members are stepped together, so take states of "
            "one moment",
        )
    trees = {name: _stacked([*map(attrgetter(name), states)], name) for name in TREES}
    seeds = tuple(state.seed for state in states)
    alike = [number for number, seed in enumerate(seeds) if seeds.count(seed) > 1]
    if alike and not same_seeds:
        warn(
            f"members {few(alike)} have equal seeds ({few(dict.fromkeys(seeds[number] for number in alike))}), so they draw "
            "the same random numbers in every step, such as dropout masks: give each its own, stack_states("
            "[ll.state.fold_in(state, i) for i, state in enumerate(states)]), or say same_seeds=True"
        )
    return first.replace(**trees, seed=seeds)


def _stacked(trees: Sequence[Any], name: str) -> Any:
    paths = [{name + keystr(path) for path, _ in tree_flatten_with_path(tree)[0]} for tree in trees]
    for number, of_member in enumerate(paths):
        differing = of_member ^ paths[0]
        check(
            not differing,
            f"{few(sorted(differing), 5)} stands in one of the members 0 and {number} and not in the other; members have "
            "the same model and optimizer",
        )
    return tree_map_with_path(lambda path, *leaves: _stacked_leaves(name + keystr(path), leaves), *trees)


def _stacked_leaves(path: str, leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if all(map(_is_record, leaves)):
        return _Records(tuple(leaves))
    if trees.node_of(first) is not None:  # a dataclass such as Window, a leaf to torch's pytrees
        return _stacked_nodes(path, leaves)
    if isinstance(first, Tensor) and wraps_tensors(first):
        raise ValueError(
            f"{path} is {named(first)}, which consists of other tensors, as quantized weights do, and cannot be stacked: "
            "step the members one after another"
        )
    frozen = path.startswith("params") and isinstance(first, Tensor) and is_plain(first) and not first.requires_grad
    for number, leaf in enumerate(leaves):
        if isinstance(first, Tensor) and isinstance(leaf, Tensor):
            check(
                same_kind(first, leaf),
                f"{path} has shape {tuple(leaf.shape)}, {leaf.dtype} on {leaf.device} in member {number}, and "
                f"{tuple(first.shape)}, {first.dtype} on {first.device} in member 0; a stack has one of each",
            )
        elif not same(first, leaf):
            raise ValueError(
                f"{path} is {first!r} in member 0 and {leaf!r} in member {number}; only tensors may differ"
            )
    if not isinstance(first, Tensor):
        return first
    if frozen and all(leaf is first or torch.equal(leaf, first) for leaf in leaves):
        return first.detach().clone().expand(len(leaves), *first.shape)
    return torch.stack([*map(Tensor.detach, leaves)]).requires_grad_(first.requires_grad)


def _stacked_nodes(path: str, nodes: Sequence[Any]) -> Any:
    columns = [dict(trees.leaves(node, _is_record)) for node in nodes]
    for number, column in enumerate(columns):
        differing = [trees.python_path(inner, path) for inner in column.keys() ^ columns[0].keys()]
        check(
            not differing,
            f"{few(sorted(differing), 5)} stands in one of the members 0 and {number} and not in the other; give windows of the "
            "same steps, or empty ones, state.with_extra(window=ll.Window())",
        )
    stacked = iter(
        [_stacked_leaves(trees.python_path(inner, path), [*map(itemgetter(inner), columns)]) for inner in columns[0]]
    )
    return trees.map_leaves(lambda _: next(stacked), nodes[0], is_leaf=_is_record)


def unstack_states(stack: TrainState) -> list[TrainState]:
    """Unstack a stack into its members, each a separate state.

    >>> import looplib as ll, torch
    >>> stack = ll.transforms.stack_states([ll.init_state(torch.nn.Linear(2, 1), seed=seed) for seed in (5, 6)])
    >>> [member.seed for member in ll.transforms.unstack_states(stack)]
    [5, 6]

    They are copies, so a donated step of the stack or of one member does not affect the others. Frozen parameters that the
    members of the stack share are copied once, for all of them. To continue with some of
    them, `stack_states([members[3], members[1]])`.

    Args:
        stack: from `stack_states`.

    Raises:
        ValueError: `stack` is not a stack.
    """
    shared: dict[str, Tensor] = {}
    return [_member(stack, number, shared) for number in range(members_of(stack))]


def members_of(stack: TrainState) -> int:
    """Number of members of a stack. Raises ValueError for a state that is not a stack."""
    seeds: Any = stack.seed
    if not isinstance(seeds, tuple):  # each step asks, so the message is made only here
        raise ValueError(
            f"this is one state, with the seed {seeds}, and no stack; make one by ll.transforms.stack_states([...])"
        )
    return len(seeds)


def _member(stack: TrainState, number: int, shared: dict[str, Tensor]) -> TrainState:
    """A member, with those of its tensors that all members share from `shared`, or copied to it."""
    seeds: Any = stack.seed
    trees = {
        name: tree_map_with_path(partial(_leaf_of, number, len(seeds), name, shared), tree)
        for name, tree in fields_of(stack, TREES).items()
    }
    return stack.replace(**trees, seed=seeds[number])


def _leaf_of(number: int, count: int, name: str, shared: dict[str, Tensor], path: Any, leaf: Any) -> Any:
    place = name + keystr(path)
    if name == "params" and isinstance(leaf, Tensor) and is_shared(leaf) and not leaf.requires_grad:
        if place not in shared:
            shared[place] = leaf.detach()[0].clone()
        return shared[place]
    # Of a dataclass such as Window, which is a leaf to torch's pytrees, the parts.
    parts = iter([_part_of(number, count, place, inner, part) for inner, part in trees.leaves(leaf, _is_record)])
    return trees.map_leaves(lambda _: next(parts), leaf, is_leaf=_is_record)


def _part_of(number: int, count: int, place: str, inner: trees.Path, part: Any) -> Any:
    """The part of a stack's leaf that one member has."""
    if isinstance(part, _Records):
        return part.members[number]
    if not isinstance(part, Tensor):
        return part
    if inner and not part.dim():  # a number in a Window, which is that of each member
        return part.detach().clone()
    check(
        part.shape[:1] == (count,),
        f"{trees.python_path(inner, place)} has shape {tuple(part.shape)}, and no first dimension of the stack's {count} members; "
        "what is put into the state of a stack needs one",
    )
    return part.detach()[number].clone().requires_grad_(part.requires_grad)


def _is_record(node: Any) -> bool:
    """True for a metric that is more than a mean."""
    return isinstance(node, Metric) and not isinstance(node, Mean)


class _Records(NamedTuple):
    """Records of each member, for a metric that is more than a mean. They are merged and computed per member."""

    members: tuple[Metric, ...]

    def merge(self, other: _Records) -> _Records:
        pairs = zip(self.members, other.members, strict=True)
        return _Records(tuple(mine.merge(others) for mine, others in pairs))

    def compute(self) -> Tensor:
        return torch.stack([as_tensor(member.compute()).double().reshape(()) for member in self.members])


def compute_members(metrics: Mapping[str, Metric], prefix: str = "") -> list[dict[str, float]]:
    """Compute the metrics of each member of a stack, like `ll.compute` for a single state.

    >>> import looplib as ll, torch
    >>> ll.transforms.compute_members({"loss": ll.Mean(torch.tensor([2.0, 6.0]), 2)})
    [{'loss': 1.0}, {'loss': 3.0}]

    Args:
        metrics: from a `vmap_step` step, from a `Window` of these, or from `ll.evaluation.evaluate_records` with such a step.
        prefix: string put before each name, as for `ll.compute`.

    Raises:
        ValueError: the metrics are those of a single state.
    """
    values = {name: as_tensor(metric.compute()).detach().double().cpu() for name, metric in metrics.items()}
    counts = {len(value) for value in values.values() if value.dim()}
    check(
        len(counts) == 1,
        f"these metrics ({few(values)}) are of {' and '.join(map(str, sorted(counts))) or 'no'} members; give those of a "
        "step by ll.vmap_step, and ll.compute those of one state",
    )
    (count,) = counts
    prefix = separated(prefix)
    columns = {prefix + name: value.expand(count).tolist() for name, value in values.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


# Hyperparameters that differ between the members


class per_member:
    """Hyperparameters per member of a stack: one value or schedule for each.

    >>> import looplib as ll, torch
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.transforms.per_member([1e-3, 3e-3, 1e-2]), weight_decay=0.1)

    Use it anywhere `ll.optimizer` takes a number or a schedule. If the value is 0 for some members (weight decay,
    momentum), the update includes the term, multiplied by 0 for those.

    Args:
        values: one number or schedule for each member, in order.

    Raises:
        ValueError: there are no values; or, from the step, the state is a stack with a different number of members, or no
            stack (from its second update on: the first one has the first value that is not 0, as `init_state` has).
    """

    def __init__(self, values: Sequence[Any]) -> None:
        check(len(values), "per_member got no values; give one for each member")
        self.values = tuple(value if callable(value) else float(value) for value in values)

    def __repr__(self) -> str:
        return f"per_member({list(self.values)})"

    def __call__(self, step: int) -> float:
        asked = _asked.get()
        if asked is None:
            check(step == 0, f"{self} was asked for by a step of one state; make a step of a stack: ll.vmap_step")
            # The initial state is created with this value, and needs room for everything that any member keeps.
            return next(filter(None, (_at(value, 0) for value in self.values)), 0.0)
        if asked.count != len(self.values):
            raise ValueError(
                f"{self} has {len(self.values)} values, and the stack {asked.count} members: give one each"
            )
        asked.per_member = True
        return _at(self.values[asked.number], step)


def _at(value: Any, step: int) -> float:
    return float(value(step) if callable(value) else value)


@dataclass
class Asked:
    """The member for which the host is asked.

    Attributes:
        number, count: index of the member, and number of members.
        per_member: True if a hyperparameter with a value per member was asked for.
    """

    number: int
    count: int
    per_member: bool = False


_asked: ContextVar[Asked | None] = ContextVar("looplib.transforms.asked", default=None)


@contextmanager
def asking(count: int) -> Iterator[Asked]:
    """Ask for the members of a stack in turn: the caller increases `number`."""
    asked = Asked(0, count)
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)
