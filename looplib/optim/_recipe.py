"""Optimizer recipe: a torch optimizer class with the user's hyperparameters and groups, and checks of them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from looplib._core.checks import check, named
from looplib._core.records import kind_of, parameters_of
from looplib.types import Params

Groups = Sequence[tuple[Callable[[str, Tensor], bool], Mapping[str, Any]]]

# If the user passes one of these, the kernel is chosen and looplib does not change it.
KERNEL_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})


class inject:
    """Injected hyperparameter: stored in the state as `opt_state["hyperparameters"]`, where training can change it.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=ll.optim.inject(0.1))
    >>> state = ll.init_state(model, optimizer)
    >>> state.opt_state["SGD"]["hyperparameters"]
    [{'lr': tensor(0.1000, dtype=torch.float64)}]

    Each state can then have its own value: members of a stack, trials of a population, or an inner loop whose
    learning rate is learned (`ll.transforms.differentiable`). `ll.optim.set_hyperparameters` returns a state with new
    values. There is one dict for each entry of `groups`, and one for the defaults, which comes last.

    Within a tuple such as `betas`, it is a number like any other and not kept in the state.

    Args:
        value: initial value, a number.

    Raises:
        TypeError: `value` is not a number.

    Source: `optax.inject_hyperparams`.
    """

    def __init__(self, value: float) -> None:
        real = isinstance(value, Real) and not isinstance(value, bool)
        check(real, f"inject got a {type(value).__name__}; give a number", TypeError)
        self.value = float(value)

    def __repr__(self) -> str:
        return f"inject({self.value})"

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True, eq=False)
class Recipe:
    """Arguments of `ll.optimizer`. Nothing here changes after creation.

    Attributes:
        cls: the optimizer class.
        defaults: hyperparameters by name, numbers or schedules, including `lr`.
        groups: `(predicate, hyperparameters)` as passed by the user.
    """

    cls: Any
    defaults: Mapping[str, Any]
    groups: Groups = ()

    @cached_property
    def is_torch_optim(self) -> bool:
        """True for torch's own classes with the step that torch gives them, whose behavior is known."""
        return f"{self.cls.__module__}.".startswith("torch.optim.") and _is_of_torch(self.cls.step)

    @cached_property
    def is_schedule_free(self) -> bool:
        """True for a third party's class that evaluates at other weights.

        Such classes have no base in common. What they share is the interface of the schedulefree package: `train()`,
        without which they refuse to step, and `eval()`, both without arguments.
        """
        return not self.is_torch_optim and all(callable(getattr(self.cls, name, None)) for name in ("train", "eval"))

    @cached_property
    def overrides(self) -> list[Mapping[str, Any]]:
        """Hyperparameters set in each group. The default group comes last."""
        return [*(values for _, values in self.groups), {}]

    @cached_property
    def values(self) -> list[dict[str, Any]]:
        """All hyperparameters of each group, as passed by the user."""
        return [{**self.defaults, **values} for values in self.overrides]

    @cached_property
    def moving(self) -> list[dict[str, Any]]:
        """For each group, the hyperparameters that are schedules or injected."""
        return [{key: value for key, value in values.items() if moves(value)} for values in self.values]

    @cached_property
    def end(self) -> int | None:
        """The step from which the learning rate is 0, or nothing beside what it was, if it is of `ll.schedules` and has an end."""
        lr = self.defaults["lr"]
        end: int | None = lr.end if kind_of(lr) == "schedule" else None
        return end if end is not None and lr(end) <= 1e-4 * lr(end // 2) else None

    def members(self, params: Params) -> list[list[str]]:
        """Parameter names in each group. The first predicate that matches wins."""
        names: list[list[str]] = [[] for _ in self.overrides]
        for name, tensor in params.items():
            names[self.group_of(name, tensor)].append(name)
        return names

    def group_of(self, name: str, tensor: Tensor) -> int:
        """Number of a parameter's group. The default group comes last."""
        for number, (predicate, _) in enumerate(self.groups):
            if predicate(name, tensor):
                return number
        return len(self.groups)

    @cached_property
    def makes_state_late(self) -> bool:
        """True if the values of a parameter's state are known only in its own first update.

        Of torch's classes, these are SGD with dampening, whose first momentum buffer is not an average with zeros, and
        those whose state begins with the learning rate, which may move.
        """
        dampened = any(values.get("dampening") for values in self.values)
        return dampened or self.cls in (torch.optim.ASGD, torch.optim.Rprop) or not self.is_torch_optim

    @cached_property
    def has_plain_entries(self) -> bool:
        """True for torch's classes that keep numbers and tensors of a parameter's shape, the same for all parameters."""
        others = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam)
        return self.is_torch_optim and not self.makes_state_late and self.cls not in others

    def takes(self, sparse: bool) -> bool:
        """True for classes that take sparse gradients, or dense ones.

        SGD and Adagrad take both, but no sparse ones by a fused kernel, nor by Nesterov's momentum, which is dense here and
        which torch adds to the gradients.
        """
        special = any(values.get("fused") or values.get("nesterov") for values in self.values)
        both = self.cls in (torch.optim.SGD, torch.optim.Adagrad) and not special
        return both or not self.is_torch_optim or sparse == (self.cls is torch.optim.SparseAdam)

    def values_at(
        self, groups: Sequence[Mapping[str, Any]], opt_state: Mapping[str, Any], step: int
    ) -> list[dict[str, Any]]:
        """Hyperparameters of these groups of the class at a step, with the numbers that a state has for them."""
        nothing: list[dict[str, Any]] = [{}] * len(groups)
        injected, of_groups = opt_state.get("hyperparameters", nothing), opt_state.get("groups", nothing)
        numbers = []
        for values, moving, numbers_injected, of_group in zip(groups, self.moving, injected, of_groups, strict=True):
            now = values_at(moving, step) | {key: value.item() for key, value in numbers_injected.items()}
            now |= {key: value for key, value in of_group.items() if value is not None}
            numbers.append({**values, **{key: as_kept(value, values.get(key)) for key, value in now.items()}})
        return numbers

    def build(self, params: Params, members: Sequence[Sequence[str]], fused: Set[int] = frozenset()) -> Any:
        """An instance over these tensors, with the hyperparameters of step 0.

        `fused` has the groups that take a fused kernel by looplib's choice, on which the device of counts depends.
        """
        overrides = self.overrides
        if not self.is_torch_optim and not members[-1]:
            # A class may need a key of its own in each group (`use_muon`), which the default group, here empty, lacks.
            overrides = [*overrides[:-1], overrides[0]]
        groups = [
            {"params": [params[name] for name in names], **values_at(values, 0)}
            for names, values in zip(members, overrides, strict=True)
        ]
        for number in fused:
            groups[number]["fused"] = True
        instance = self.cls(groups, **values_at(self.defaults, 0))
        if self.is_schedule_free:
            instance.train()
        return instance

    def check(self) -> None:
        """Let the class refuse a hyperparameter now instead of at the first step."""
        cls, known, defaults = self.cls, inspect.signature(self.cls).parameters.keys(), values_at(self.defaults, 0)
        # A third party's class may need keys of its own in each group, which the defaults lack.
        for overrides in self.overrides if self.is_torch_optim or not self.groups else self.overrides[:-1]:
            values = {**defaults, **values_at(overrides, 0)}
            of_group = {} if self.is_torch_optim else {key: values.pop(key) for key in overrides.keys() - known}
            for key in of_group:
                if near := difflib.get_close_matches(key, known, 1, 0.85):
                    raise TypeError(
                        f"a group gives {key!r}, which is no parameter of {cls.__name__}: give {near[0]!r}"
                    )
            try:
                cls([{"params": [torch.zeros(2, 2, device="cpu")], **of_group}], **values)
            except TypeError as error:
                arguments = ", ".join(f"{name}={value!r}" for name, value in values.items())
                takes = ", ".join(name for name in known if name != "params")
                raise TypeError(
                    f"{cls.__name__} cannot be made with {arguments}: {error}; it takes {takes}"
                ) from error
        for moving in self.moving if self.is_schedule_free else ():
            for key, value in moving.items():
                check(
                    key in ("lr", "weight_decay") or isinstance(value, inject),
                    f"{key} is a schedule. {self.cls.__name__} computes the weights to evaluate with in its eval(), which "
                    f"may read {key} and knows no step: give a number, or ll.optim.inject(...), which the state keeps",
                )


def _is_of_torch(step: Any) -> bool:
    """True if a step, and each function that it wraps, is defined in torch, not put there by somebody else.

    Functions tell of their module alone where they are from. One that a user defines in a module called `torch.` something
    would be taken for torch's.
    """
    while step is not None:
        if not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def check_by_kind(choose: Callable[[str, Tensor], Any], params: Params, what: str) -> None:
    """Raise for a choice that depends on the identity of a tensor, since each update makes new ones."""
    for name, tensor in sorted(params.items()):
        choice = choose(name, tensor)
        check(
            choose(name, tensor.detach().requires_grad_(tensor.requires_grad)) == choice,
            f"{what} {choice!r} is chosen for {name}, but not for an equal tensor, and each update makes new "
            "tensors: choose a parameter by its name, shape or dtype",
        )


def value_at(value: Any, step: int) -> Any:
    """A hyperparameter's value at a step: the number itself, or the value of a schedule."""
    if isinstance(value, (tuple, list)):
        return tuple(value_at(member, step) for member in value)
    return value(step) if callable(value) else value


def as_kept(value: Any, before: Any) -> Any:
    """A number as a tensor, if the class keeps one in its groups, as torchao's classes do."""
    if isinstance(before, Tensor) and isinstance(value, (int, float)):
        return torch.full_like(before, value)
    return value


def values_at(values: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Values of several hyperparameters at a step."""
    return {key: value_at(value, step) for key, value in values.items()}


def moves(value: Any) -> bool:
    """True if a hyperparameter, or a member of it, is a schedule or injected."""
    return callable(value) or (isinstance(value, (tuple, list)) and any(map(callable, value)))


def drop_grads(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


@contextmanager
def restored_grads(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the tensors' own `.grad`s back at the end of the block."""
    before = [(tensor, tensor.grad) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, grad in before:
            tensor.grad = grad


# Checks of arguments, each with a message that says what to write instead


_NO_RATES = bool, str, list, tuple, Mapping, type(None)


def check_class(cls: Any, *parameters: Any) -> None:
    """Raise TypeError for anything but an optimizer class without parameters."""
    kind = cls if isinstance(cls, type) else type(cls)
    # By its name, since torchao is not imported for this, and copies of the class are as wrong.
    check(
        not any(base.__name__ == "CPUOffloadOptimizer" for base in kind.__mro__),
        f"{kind.__name__} makes another optimizer's update, on copies of its own parameters, which hooks of theirs fill during the "
        "backward pass: write ll.optim.offload_state(ll.optimizer(torch.optim.AdamW, lr=...)), which keeps the moments on the host",
        TypeError,
    )
    advice = (
        f"write {_line_for(cls, kind)}, without parameters. The parameters are in the state, "
        "ll.init_state(model, optimizer)"
    )
    check(isinstance(cls, type), f"ll.optimizer needs an optimizer class, found {named(cls)}: {advice}", TypeError)
    extra = ", ".join(map(named, parameters))
    check(
        not parameters,
        f"ll.optimizer takes a class and keyword arguments, found {extra} as well: {advice}",
        TypeError,
    )
    check(
        not any(kind.__module__.startswith("torch.distributed.optim") for kind in cls.__mro__),
        f"{cls.__name__} makes another optimizer's update and talks to the other ranks itself, about its own parameters: "
        "give the class that makes the update, ll.optimizer(torch.optim.AdamW, lr=...). To divide its state among the "
        "ranks, shard the model with fully_shard",
        TypeError,
    )
    check(
        callable(getattr(cls, "step", None)),
        f"{cls.__name__} is no optimizer class: it needs the interface of torch.optim.Optimizer",
        TypeError,
    )
    closure = parameters_of(cls.step).get("closure")
    check(
        cls is torch.optim.LBFGS or closure is None or closure.default is not closure.empty,
        f"{cls.__name__}.step() needs a closure, which looplib gives to torch.optim.LBFGS alone, and not to a subclass: give "
        "LBFGS itself, or a class whose step takes the gradients as they are",
        TypeError,
    )
    taken = [*inspect.signature(cls).parameters]
    check(
        "params" in taken,
        f"{cls.__name__} takes {', '.join(taken[:1]) or 'nothing'} where optimizers take params. If it wraps another "
        "optimizer, parameters and state are in that one, out of reach of a pure update: give the class that it "
        "wraps; averages and the like are parts of a chain, in ll.optim",
        TypeError,
    )


def _line_for(optimizer: Any, kind: type) -> str:
    """The line to write in place of an optimizer of torch's interface, or of something else."""
    if not issubclass(kind, torch.optim.Optimizer):
        return "ll.optimizer(torch.optim.AdamW, lr=1e-3)"
    name = f"torch.optim.{kind.__name__}" if getattr(torch.optim, kind.__name__, None) is kind else kind.__name__
    defaults = {} if optimizer is kind else optimizer.defaults
    known = inspect.signature(kind).parameters
    chosen = [f"lr={defaults.get('lr', '...')}"] + [
        f"{key}={value!r}"
        for key, value in defaults.items()
        if key != "lr" and key in known and value is not known[key].default and value != known[key].default
    ]
    groups = ", groups=[(predicate, {...})]" * (optimizer is not kind and len(optimizer.param_groups) > 1)
    return f"ll.optimizer({name}, {', '.join(chosen)}{groups})"


def check_lr(lr: Any) -> None:
    """Raise TypeError for an `lr` that is neither a number nor a function of the step."""
    advice = "a number such as 1e-3, or a schedule such as ll.warmup_cosine(1e-3, warmup=100, total=2000)"
    scheduler = lr if isinstance(lr, type) else type(lr)
    if issubclass(scheduler, LRScheduler):
        raise TypeError(
            f"lr is {named(lr)}, which changes an optimizer in place; give a schedule, a function of the step, such as "
            "lr=ll.warmup_cosine(...) or another one of ll.schedules. There is no step() to call"
        )
    check(not isinstance(lr, _NO_RATES), f"lr is {named(lr)}; give {advice}", TypeError)
    if callable(lr):
        try:
            first = lr(0)
        except TypeError as error:
            raise TypeError(f"lr is {named(lr)}, and lr(0) raised {error}; give {advice}") from error
        what = f"lr(0) is {named(first)}; a schedule gives a number for each step"
        check(not isinstance(first, _NO_RATES), what, TypeError)


def check_groups(groups: Any) -> None:
    """Raise TypeError for groups that are not (predicate, hyperparameters)."""
    for group in groups:
        match group:
            case (predicate, Mapping()) if callable(predicate):
                continue
        raise TypeError(
            "a group is (predicate(name, tensor), {hyperparameter: value}), such as (lambda name, tensor: "
            f'tensor.ndim < 2, {{"weight_decay": 0.0}}), in a list of them; found {group!r}'
        )
