"""A torch optimizer class with the hyperparameters and groups that the user gave."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from looplib._core.torch_private import pytree
from looplib.optim._arguments import refuse_hyperparameters
from looplib.types import Params

Groups = Sequence[tuple[Callable[[str, Tensor], bool], Mapping[str, Any]]]

# A user who gives one of these chooses the kernel; looplib then changes nothing about it.
KERNEL_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})


@dataclass(frozen=True, eq=False)
class Recipe:
    """What an optimizer is made from; nothing here changes after it was made.

    Attributes:
        cls: the optimizer class.
        defaults: hyperparameters by name, numbers or schedules, `lr` among them.
        groups: `(predicate, hyperparameters)` as the user gave them.
    """

    cls: Any
    defaults: Mapping[str, Any]
    groups: Groups = ()

    @cached_property
    def ours(self) -> bool:
        """Whether the class is torch's own, whose habits are known."""
        module: str = self.cls.__module__
        return module == "torch.optim" or module.startswith("torch.optim.")

    @cached_property
    def needs_closure(self) -> bool:
        """Whether the class's `step` evaluates the loss itself."""
        closure = inspect.signature(self.cls.step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty

    @cached_property
    def overrides(self) -> list[Mapping[str, Any]]:
        """The hyperparameters that each group has for itself; the group of the defaults is the last one."""
        return [*(values for _, values in self.groups), {}]

    @cached_property
    def moving(self) -> list[dict[str, Any]]:
        """For each group, the hyperparameters that are schedules or injected."""
        return [
            {key: value for key, value in {**self.defaults, **values}.items() if moves(value)}
            for values in self.overrides
        ]

    def group_values(self, key: str, default: Any = None) -> list[Any]:
        """A hyperparameter's value in each group, as the user gave it."""
        return [{**self.defaults, **values}.get(key, default) for values in self.overrides]

    def members(self, params: Params) -> list[list[str]]:
        """The names of the parameters in each group; the first predicate that matches wins."""
        names: list[list[str]] = [[] for _ in range(len(self.groups) + 1)]
        for name, tensor in params.items():
            matches = (number for number, (predicate, _) in enumerate(self.groups) if predicate(name, tensor))
            names[next(matches, -1)].append(name)
        return names

    def check_predicates(self, params: Params) -> None:
        """Refuse predicates that go by which tensor it is: each update makes new ones."""
        others = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in params.items()}
        for number, (one, other) in enumerate(zip(self.members(params), self.members(others), strict=True)):
            if changed := sorted(set(one) ^ set(other)):
                raise ValueError(
                    f"the predicate of group {number} says something else of {changed[0]} for an equal tensor, and each "
                    "update makes new tensors: choose a parameter by its name, shape or dtype"
                )

    def build(self, params: Params, members: Sequence[Sequence[str]], fused: Sequence[bool] = ()) -> Any:
        """An instance over these tensors, with the hyperparameters of step 0.

        `fused` names the groups that take the fused kernel although the user did not ask for it.
        """
        groups = [
            {"params": [params[name] for name in names], **{key: value_at(v, 0) for key, v in values.items()}}
            for names, values in zip(members, self.overrides, strict=True)
        ]
        for group, fuse in zip(groups, fused, strict=False):
            group |= {"fused": True} if fuse else {}
        made = self.cls(groups, **{key: value_at(value, 0) for key, value in self.defaults.items()})
        if not self.ours and callable(getattr(made, "train", None)):
            made.train()  # schedule-free optimizers refuse to step before
        return made

    def check(self) -> None:
        """Let the class refuse a hyperparameter now, not at the first step."""
        defaults = {key: value_at(value, 0) for key, value in self.defaults.items()}
        known = inspect.signature(self.cls).parameters.keys()
        for overrides in ({}, *self.overrides[:-1]):
            given = {key: value_at(value, 0) for key, value in overrides.items()}
            beyond = {} if self.ours else {key: given.pop(key) for key in given.keys() - known}
            for key in beyond:
                if near := difflib.get_close_matches(key, known, 1, 0.85):
                    raise TypeError(
                        f"a group gives {key!r}, which is no parameter of {self.cls.__name__}: give {near[0]!r}"
                    )
            try:
                self.cls([{"params": [torch.zeros(2, 2)], **beyond}], **{**defaults, **given})
            except TypeError as error:
                refuse_hyperparameters(self.cls, error, {**defaults, **given})


def value_at(value: Any, step: int) -> Any:
    """A hyperparameter's value at a step: a number, or what a schedule or its members give."""
    if callable(value):
        return value(step)
    if isinstance(value, (tuple, list)):
        return tuple(member(step) if callable(member) else member for member in value)
    return value


def moves(value: Any) -> bool:
    """Whether a hyperparameter, or a member of it, is a schedule or injected."""
    return callable(value) or (isinstance(value, (tuple, list)) and any(map(callable, value)))


def copied(value: Any) -> Any:
    """A copy that shares no tensor and no container with the value."""
    if isinstance(value, (dict, list, tuple)):
        return pytree.tree_map(copied, value)
    return value.clone() if isinstance(value, Tensor) else value
