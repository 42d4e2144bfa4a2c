"""Any `torch.optim` class as two pure functions.

torch's optimizers do the arithmetic; what they keep inside, parameters in groups and moments by parameter,
is handed in and taken out again at each update. One instance of the class, empty between updates, serves as
the engine. An update writes in place: into the given tensors when they are donated, else into copies.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from looplib._core import ownership as _donation
from looplib._core import torch_private
from looplib._core import tracing as _tracing
from looplib._core.ranks import is_sharded, shards
from looplib._core.torch_private import pytree
from looplib._core.tracing import UntraceableError, on_host, tracing
from looplib.optim._description import description_of
from looplib.optim._hyperparameters import injected
from looplib.types import Grads, Optimizer, Params

Groups = Sequence[tuple[Callable[[str, Tensor], bool], Mapping[str, Any]]]


def optimizer(cls: type, *, lr: Any, groups: Groups = (), **hyperparameters: Any) -> Optimizer:
    """Make a `torch.optim` class, or a third party's with the same interface, an `Optimizer`.

    >>> import looplib as ll, torch
    >>> adamw = ll.optimizer(
    ...     torch.optim.AdamW,
    ...     lr=ll.warmup_cosine(3e-4, warmup=100, total=2000),
    ...     weight_decay=0.1,
    ...     groups=[(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})],  # norms and biases
    ... )
    >>> params = dict(torch.nn.Linear(2, 1).named_parameters())
    >>> opt_state = adamw.init(params)
    >>> grads = {name: torch.ones_like(tensor) for name, tensor in params.items()}
    >>> new_params, opt_state, applied = adamw.update(grads, opt_state, params, 0)

    Args:
        cls: the class, not an instance.
        lr: learning rate, a number or a schedule `(step) -> float`.
        groups: `(predicate(name, tensor), {hyperparameter: value or schedule})`; the first match wins, the
            rest take the defaults. A third party's class may read more from a group than it takes for all, such
            as GaLore's `rank`: a key that is no parameter of such a class is handed to it in the group.
        hyperparameters: as the class takes them. Any of them, and any member of a tuple such as `betas`, may be
            a schedule. Where torch has a fused kernel for the parameters it is used, unless `fused`, `foreach`,
            `capturable` or `differentiable` is given.

    `opt_state["state"][name]` holds what torch keeps for a parameter, under torch's names. An optimizer that
    changes values in its groups (schedule-free ones do) has these in `opt_state["groups"]`. Where a class keeps an
    object for a parameter (GaLore's `projector`), its attributes stand there as a dict.

    Raises:
        TypeError: no optimizer class; one whose `step` needs a closure (LBFGS); an unknown hyperparameter, or in a
            group of a third party's class one that is spelt nearly as a parameter of it; a class
            that keeps state elsewhere than in `state` and `param_groups`.
        ValueError: a value that the class refuses; gradients sparse where it needs dense ones, or dense where
            it needs sparse ones; a gradient of a parameter that `init` did not see.
    """
    _check_class(cls)
    for predicate, values in groups:
        if not callable(predicate) or not isinstance(values, Mapping):
            raise TypeError(
                f"a group is (predicate(name, tensor), {{hyperparameter: value}}); found ({predicate!r}, {values!r})"
            )
    engine = _Engine(cls, {"lr": lr, **hyperparameters}, groups)
    engine.try_values()
    description = description_of(cls, {"lr": lr, **hyperparameters}, groups)
    return Optimizer(engine.init, engine.update, engine.evaluation, engine.hyperparameters, description)


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type):
        raise TypeError(
            f"ll.optimizer needs the class, found an instance of {type(cls).__name__}: "
            f"ll.optimizer(torch.optim.{type(cls).__name__}, lr=...), without the parameters"
        )
    step = getattr(cls, "step", None)
    if not callable(step) or "params" not in inspect.signature(cls).parameters:
        raise TypeError(f"{cls.__name__} is no optimizer class: it needs the interface of torch.optim.Optimizer")
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{cls.__name__} evaluates the loss several times within one step (its step needs a closure), "
            "which a step of given gradients cannot do: take a first-order optimizer such as AdamW or SGD"
        )


def _moves(value: Any) -> bool:
    return callable(value) or (isinstance(value, (tuple, list)) and any(map(callable, value)))


def _at(value: Any, step: int) -> Any:
    """A hyperparameter's value at a step."""
    if callable(value):
        return value(step)
    if isinstance(value, (tuple, list)):
        return tuple(member(step) if callable(member) else member for member in value)
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        return pytree.tree_map(_copy, value)
    return value.clone() if isinstance(value, Tensor) else value


def _number(value: Any) -> float:
    return float(value.detach().item() if isinstance(value, Tensor) else value)


class _Engine:
    """One instance of an optimizer class, empty between the updates that it is lent tensors for."""

    def __init__(self, cls: Any, defaults: dict[str, Any], groups: Groups) -> None:
        self.cls = cls
        self.defaults = defaults
        self.groups = groups
        self.moving = [
            {key: value for key, value in {**defaults, **values}.items() if _moves(value)}
            for values in [values for _, values in groups] + [{}]
        ]
        self.ours = cls.__module__.startswith("torch.optim")
        # Without torch's profiler hook and grad-mode wrapper, 7 us a step. Third parties keep what they have.
        self.step: Callable[[Any], Any] = inspect.unwrap(self.cls.step) if self.ours else self.cls.step
        self.differentiable = bool(defaults.get("differentiable", False))
        # Classes that make a parameter's state in their first step. Its later structure is known beforehand,
        # its first values are not: so the first step is given none, as torch's own is.
        self.lazy = self.cls is torch.optim.SGD or not hasattr(cls, "_init_group")
        chosen = {"fused", "foreach", "capturable", "differentiable"} & defaults.keys()
        self.fuse = "fused" in inspect.signature(cls).parameters and not chosen
        self.kernel: Any = None
        self.unit: Tensor | None = None
        self.instance: Any = None
        self.kind: tuple[Any, ...] = ()
        self.names: list[str] = []
        self.partition: list[list[str]] = []
        self.kinds: dict[str, dict[str, Any]] = {}  # of the objects that the class keeps for each parameter
        self.constructed: dict[str, dict[str, Any]] = {}  # what a third party's class begins with

    def try_values(self) -> None:
        """Let the class refuse a hyperparameter now, not at the first step."""
        values = {key: _at(value, 0) for key, value in self.defaults.items()}
        known = inspect.signature(self.cls).parameters.keys()
        for overrides in ({}, *(values for _, values in self.groups)):
            given = {key: _at(value, 0) for key, value in overrides.items()}
            beyond = {} if self.ours else {key: given.pop(key) for key in given.keys() - known}
            for key in beyond:
                if near := difflib.get_close_matches(key, known, 1, 0.85):
                    raise TypeError(
                        f"a group gives {key!r}, which is no parameter of {self.cls.__name__}: give {near[0]!r}"
                    )
            self.cls([{"params": [torch.zeros(2, 2)], **beyond}], **{**values, **given})

    def hyperparameters(self, opt_state: Any, step: int) -> dict[str, float]:
        found = {}
        count = len(self.groups)
        for number in (count, *range(count)):  # the defaults first
            overrides = self.groups[number][1] if number < count else self.defaults
            injected = opt_state.get("hyperparameters", [{}] * (count + 1))[number]
            written = {**opt_state.get("groups", [{}] * (count + 1))[number], **injected}
            given = {**self.defaults, **overrides}
            for key in dict.fromkeys(["lr", *self.moving[number]]):
                if key not in overrides and key not in injected:
                    continue
                place = f"/{number}" if number < count else ""
                now = written[key] if key in written else _at(given[key], step)
                if isinstance(now, (Real, Tensor)):
                    found[key + place] = _number(now)
                elif isinstance(now, tuple):
                    moving = [i for i, member in enumerate(given[key]) if callable(member)]
                    found |= {f"{key}[{i}]{place}": _number(now[i]) for i in moving}
        return found

    def divide(self, params: Params) -> list[list[str]]:
        """The names of each group, those of the defaults last."""
        members: list[list[str]] = [[] for _ in self.moving]
        for name, tensor in params.items():
            matches = (i for i, (predicate, _) in enumerate(self.groups) if predicate(name, tensor))
            members[next(matches, -1)].append(name)
        return members

    def build(self, params: Params) -> Any:
        """An instance over these tensors, with the hyperparameters of step 0."""
        values: list[Mapping[str, Any]] = [*(values for _, values in self.groups), {}]
        groups = [
            {"params": [params[name] for name in names], **{key: _at(v, 0) for key, v in overrides.items()}}
            for names, overrides in zip(self.divide(params), values, strict=True)
        ]
        defaults = {key: _at(value, 0) for key, value in self.defaults.items()}
        made = self.cls(groups, **defaults, **({"fused": True} if self.fuse else {}))
        if not self.ours and callable(getattr(made, "train", None)):
            made.train()  # schedule-free optimizers refuse to step before
        return made

    def init(self, params: Params, **extra: Any) -> dict[str, Any]:
        if not params:
            raise ValueError(f"{self.cls.__name__} got no parameters to optimize")
        self.names = []  # these may be another model's, which divides otherwise
        if self.cls not in _KERNELS and any(map(is_sharded, params.values())):
            self.fuse = False  # torch's other fused kernels take no DTensor
        try:
            return self.first_state(params)
        except RuntimeError:
            if not self.fuse:
                raise
            self.fuse = False  # torch has no fused kernel for this device or dtype
            return self.first_state(params)

    def first_state(self, params: Params) -> dict[str, Any]:
        for values in self.moving:
            for key, value in values.items():
                if isinstance(value, (tuple, list)) and any(isinstance(member, injected) for member in value):
                    raise TypeError(
                        f"{key} has an injected member: injected stands for a hyperparameter as a whole, so give a "
                        "number or a schedule there"
                    )
        hyperparameters = [
            {key: torch.tensor(v.value, dtype=torch.float64) for key, v in values.items() if isinstance(v, injected)}
            for values in self.moving
        ]
        state = self.first_moments(params)
        return {**state, "hyperparameters": hyperparameters} if any(hyperparameters) else state

    def first_moments(self, params: Params) -> dict[str, Any]:
        params = {name: tensor.detach() for name, tensor in params.items()}
        made = self.build(params)
        if self.cls is torch.optim.SGD:
            momentum = {id(p) for group in made.param_groups if group["momentum"] for p in group["params"]}
            return {
                "state": {
                    name: {"momentum_buffer": torch.zeros_like(p)} if id(p) in momentum else {}
                    for name, p in params.items()
                }
            }
        if self.lazy:
            return self.rehearse(params)
        for tensor in params.values():
            tensor.grad = tensor.new_zeros(()).expand_as(tensor)  # it is only looked at, so it takes no memory
        lists = len(inspect.signature(made._init_group).parameters) - 1
        for group in made.param_groups:
            made._init_group(group, *([] for _ in range(lists)))
        return {"state": {name: dict(made.state[tensor]) for name, tensor in params.items()}}

    def rehearse(self, params: Params) -> dict[str, Any]:
        """The structure of the state, from one step on copies: for classes that only their step tells it of."""
        copies = {name: tensor.detach().clone().requires_grad_() for name, tensor in params.items()}
        made = self.build(copies)
        own = {key: value for key, value in vars(made).items() if isinstance(value, (int, float, Tensor))}
        before = [dict(group) for group in made.param_groups]
        for tensor in copies.values():
            sparse = self.cls is torch.optim.SparseAdam
            tensor.grad = torch.zeros_like(tensor).to_sparse() if sparse else torch.zeros_like(tensor)
        made.step()
        for key, value in vars(made).items():
            if value is True:
                continue  # that it has begun (bitsandbytes' `initialized`), which is so after any update
            if isinstance(value, (int, float, Tensor)) and own.get(key) is not value and own.get(key) != value:
                raise TypeError(
                    f"{self.cls.__name__} keeps {key!r} on the optimizer itself, out of reach of a pure update; "
                    "looplib takes optimizers that keep their state in `state` and `param_groups`"
                )
        known = inspect.signature(self.cls).parameters.keys()
        given = [*(values for _, values in self.groups), {}]
        groups = [
            {
                key: old.get(key, value)
                for key, value in group.items()
                if key != "params"
                and key not in moving
                and isinstance(value, (int, float, Tensor))
                and (key not in known | own_keys.keys() or old[key] != value)
            }
            for group, old, moving, own_keys in zip(made.param_groups, before, self.moving, given, strict=True)
        ]
        state: dict[str, Any] = {"state": {name: self.packed(name, made.state[p]) for name, p in copies.items()}}
        return {**state, "groups": groups} if any(groups) else state

    def packed(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the class keeps for a parameter, with the attributes of an object in its place: a tree of tensors."""
        plain, kinds = {}, {}
        for key, value in state.items():
            kind: Any = type(value)
            if kind.__new__ is object.__new__ and hasattr(value, "__dict__"):
                kinds[key] = kind
                value = dict(vars(value))
                if any(
                    isinstance(part, Tensor)
                    for each in value.values()
                    for part in getattr(each, "__dict__", {}).values()
                ):
                    raise TypeError(
                        f"{self.cls.__name__} keeps a {kind.__name__} for {name}, with an object in it that holds "
                        "tensors: looplib takes objects whose own attributes are tensors and numbers"
                    )
            plain[key] = value
        if kinds:
            self.kinds[name] = kinds
        return plain

    def unpacked(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The same with objects again, on copies, since what they write in is not known."""
        whole = dict(state)
        for key, kind in self.kinds.get(name, {}).items():
            if key in state:
                whole[key] = object.__new__(kind)
                vars(whole[key]).update(pytree.tree_map(_copy, state[key]))
        return whole

    def evaluation(
        self, params: Params, buffers: dict[str, Tensor], opt_state: Any
    ) -> tuple[Params, dict[str, Tensor]]:
        """Schedule-free optimizers train at one point and evaluate at another: their own `eval` goes there."""
        if self.ours or not callable(getattr(self.cls, "eval", None)):
            return params, buffers
        states = opt_state["state"]
        copies = {name: params[name].detach().clone() for name in states}
        made = self.build(copies)
        for name, state in states.items():
            made.state[copies[name]] = dict(state)
        for group, values in zip(made.param_groups, opt_state.get("groups", ()), strict=False):
            group.update({key: _copy(value) for key, value in values.items()})
        made.eval()
        return {**params, **copies}, buffers

    def update(
        self, grads: Grads, opt_state: Any, params: Params, step: int, *, donate: bool = False, **extra: Any
    ) -> tuple[Params, Any, bool]:
        states = opt_state["state"]
        if not grads.keys() <= states.keys():
            raise ValueError(
                f"the optimizer's state has nothing for {sorted(grads.keys() - states.keys())}: make the state "
                "with the same model, and the same trainable=, as the gradient function"
            )
        if tracing():
            return *self.written_down(grads, opt_state, params, step), True
        for name, grad in grads.items():
            if grad.dtype is not params[name].dtype:
                raise ValueError(
                    f"the gradient of {name} is {grad.dtype}, the parameter {params[name].dtype}: to train weights "
                    "of half precision on gradients in float32, wrap the optimizer, ll.optim.master_weights(optimizer)"
                )
            if self.fuse and grad.is_sparse:
                self.fuse = False  # torch's fused kernels take dense gradients only
        fresh = self.lazy and step == 0
        self.settle(params, states, fresh and not self.ours)
        if donate:
            tensors = {name: params[name] for name in grads}
            working = {name: states[name] for name in grads}
        else:
            tensors, working = _copies(grads, params, states)
        kept = {name: dict(states[name]) for name in grads} if donate and (fresh or not self.ours) else {}
        if fresh:
            working = {name: dict(self.constructed.get(name, {})) for name in grads}
            self.constructed = {}
        instance = self.instance
        for group, moving in zip(instance.param_groups, self.moving, strict=True):
            for key, value in moving.items():
                group[key] = _at(value, step)
        for group, values in zip(instance.param_groups, opt_state.get("hyperparameters", ()), strict=False):
            group.update({key: value.item() for key, value in values.items()})
        if "groups" in opt_state and not fresh:
            for group, values in zip(instance.param_groups, opt_state["groups"], strict=True):
                group.update({key: _copy(value) for key, value in values.items()})
        grad_mode = torch.is_grad_enabled()
        try:
            if self.ours:
                torch_private.set_grad_enabled(self.differentiable)
            if self.kernel is not None:
                self.launch(grads, tensors, working)
            else:
                self.run(grads, tensors, working)
        finally:
            torch_private.set_grad_enabled(grad_mode)
        _donation.updates += donate
        # A class may put new tensors into its state. A donated state keeps its own, so that those who share
        # them are told by what stands in one table, made at the first step.
        for name, old in kept.items():
            for key, tensor in old.items():
                if isinstance(tensor, Tensor) and working[name][key] is not tensor:
                    working[name][key] = tensor.copy_(working[name][key])
        new_state: dict[str, Any] = {**opt_state, "state": {**states, **working}}
        if "groups" in opt_state:
            new_state["groups"] = [
                {key: _copy(group[key]) for key in values}
                for group, values in zip(instance.param_groups, opt_state["groups"], strict=True)
            ]
        return {**params, **tensors}, new_state, True

    def written_down(self, grads: Grads, opt_state: Any, params: Params, step: int) -> tuple[Params, Any]:
        """An update in a trace, by the class's own step."""
        states = opt_state["state"]
        if any(isinstance(value, dict) for state in states.values() for value in state.values()):
            raise UntraceableError(
                f"{self.cls.__name__} keeps objects for its parameters, whose numbers a graph would keep for ever: "
                "take the step without ll.compile_step, or one of torch.optim's classes"
            )
        if "groups" in opt_state:
            raise UntraceableError(
                f"{self.cls.__name__} changes numbers of its own at each update, which a graph would keep for ever: "
                "take the step without ll.compile_step, or one of torch.optim's classes"
            )
        if sparse := [name for name, grad in grads.items() if grad.is_sparse]:
            raise UntraceableError(
                f"the gradient of {', '.join(sparse)} is sparse, which a graph of a step cannot hold: leave out "
                "Embedding(sparse=True), or take the step without ll.compile_step"
            )
        # A first buffer of zeros is what torch's own first step makes one of, but for dampening.
        dampened = any(
            values.get("dampening", 0) for values in (self.defaults, *(values for _, values in self.groups))
        )
        lazy = self.lazy and (dampened or self.cls is not torch.optim.SGD)
        fresh = lazy and on_host(lambda step: step == 0, step)
        tensors = {name: params[name].detach().clone() for name in grads}
        working = {name: {} if fresh else {k: _precise(k, v) for k, v in states[name].items()} for name in grads}
        twin = _Engine(self.cls, self.defaults, self.groups)
        twin.fuse = False
        members = self.divide({name: params[name] for name in states})
        with (
            torch_private.disable_current_modes()
        ):  # in which a schedule's tensor has a value, for the class to check
            instance = twin.build(tensors)
        numbers = _Numbers()
        given = opt_state.get("hyperparameters") or [{}] * len(members)
        for group, names, moving, own in zip(instance.param_groups, members, self.moving, given, strict=True):
            group["params"] = [tensors[name] for name in names if name in tensors]
            for key, value in moving.items():
                group[key] = numbers.of_state(own[key]) if key in own else numbers.at(value, step)
            # The plain forms: what they ask of a count they ask of a tensor while torch compiles. Those for CUDA
            # graphs (capturable) divide 0 by 0 at a learning rate of 0, and are for those that ask more of a count.
            forms = {"fused": False, "foreach": False, "capturable": self.cls in _BRANCHING}
            group |= {key: form for key, form in forms.items() if key in group}
        for name, grad in grads.items():
            tensors[name].grad = grad
            instance.state[tensors[name]] = working[name]
        step_in_place = inspect.unwrap(self.cls.step)
        with torch.no_grad(), numbers, _limits_of_tensors(step_in_place if self.ours else None):
            step_in_place(instance)
        made = {name: dict(instance.state[tensor]) for name, tensor in tensors.items()}
        for name, state in made.items():
            tensors[name].grad = None
            for key, value in state.items():
                if isinstance(value, Tensor) and isinstance(old := states[name].get(key), Tensor):
                    state[key] = value.to(old.dtype)
        return {**params, **tensors}, {**opt_state, "state": {**states, **made}}

    def settle(self, params: Params, states: Mapping[str, Any], rebuild: bool) -> None:
        """Make the instance one for these parameters."""
        first = params[next(iter(states))]
        kind = (first.device, first.dtype, self.fuse)
        if rebuild or self.kind != kind or self.names != list(states):
            chosen = {name: params[name] for name in states}
            self.names = []  # an interrupt from here on leaves it unsettled
            self.instance, self.partition = self.build(chosen), self.divide(chosen)
            made = self.instance.state if rebuild else {}
            self.constructed = {name: made[tensor] for name, tensor in chosen.items() if tensor in made}
            self.clear()
            if not self.kinds and any(isinstance(v, dict) for state in states.values() for v in state.values()):
                self.rehearse(chosen)  # made by another optimizer, such as this one in another process
            # The class's own step finds its lists anew in each step, for ten times what the kernel takes. Where
            # torch has one kernel for all of a group it is called as the class would.
            alike = len({(tensor.device, tensor.dtype) for tensor in chosen.values()}) == 1
            self.kernel = _KERNELS.get(self.cls) if self.fuse and alike else None
            self.kind, self.names = kind, list(states)

    def one(self, device: torch.device) -> Tensor:
        """A one to add, made once: a number would be made a tensor at each of the additions."""
        if self.unit is None or self.unit.device != device:
            self.unit = torch.ones((), device=device)
        return self.unit

    def clear(self) -> None:
        """Let go of all tensors, which belong to states."""
        self.instance.state = defaultdict(dict)
        for group in self.instance.param_groups:
            group["params"] = []

    def launch(self, grads: Grads, tensors: Params, working: dict[str, dict[str, Any]]) -> None:
        """Adam's fused kernel on these tensors, in place, as the class calls it."""
        for group, members in zip(self.instance.param_groups, self.partition, strict=True):
            names = members if len(members) == len(grads) else [name for name in members if name in grads]
            if not names:
                continue
            states = [working[name] for name in names]
            steps = [state["step"] for state in states]
            torch_private.foreach_add_(steps, self.one(steps[0].device))
            lists = [
                [tensors[name] for name in names],
                [grads[name] for name in names],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            ]
            if any(map(is_sharded, lists[0])):
                # Each element by itself: so this rank's part, without what DTensor asks of each operation.
                lists = [shards(tensors) for tensors in lists]
            self.kernel(
                *lists,
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )

    def run(self, grads: Grads, tensors: Params, working: dict[str, dict[str, Any]]) -> None:
        """The class's own step on these tensors, in place."""
        instance = self.instance
        for group, names in zip(instance.param_groups, self.partition, strict=True):
            group["params"] = [tensors[name] for name in names if name in tensors]
        stale = {name: tensor.grad for name, tensor in tensors.items()}
        try:
            for name, grad in grads.items():
                tensors[name].grad = grad
                instance.state[tensors[name]] = self.unpacked(name, working[name]) if self.kinds else working[name]
            self.step(instance)
            if self.kinds:
                working |= {name: self.packed(name, instance.state[tensors[name]]) for name in grads}
        except RuntimeError as error:
            if "sparse" not in str(error).lower():
                raise
            kinds = {name: "sparse" if grad.is_sparse else "dense" for name, grad in grads.items()}
            raise ValueError(
                f"{self.cls.__name__} cannot take these gradients ({error}): {kinds}. Sparse ones come from "
                "Embedding(sparse=True): SparseAdam takes nothing else (choose those parameters with trainable=), "
                "SGD and Adagrad take both kinds, the others dense ones only"
            ) from error
        finally:
            for name, tensor in tensors.items():
                tensor.grad = stale[name]
            self.clear()


_KERNELS: dict[Any, Any] = {
    torch.optim.Adam: torch_private.fused_adam_,
    torch.optim.AdamW: torch_private.fused_adamw_,
}


def _precise(key: str, value: Any) -> Any:
    """A copy to update in a trace; counts in double precision, since bias corrections come of them there."""
    if not isinstance(value, Tensor):
        return value
    wide = key == "step" and value.is_floating_point() and not value.dim() and value.device.type != "mps"
    return value.double() if wide else value.clone()


class _Numbers(TorchFunctionMode):
    """Hyperparameters that are tensors, since they move, where torch's optimizers expect numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[Tensor, Callable[[Any], Any], Any]] = {}

    def at(self, value: Any, step: int) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self.at(member, step) if callable(member) else member for member in value)
        made = on_host(lambda step: value(step), step)
        if isinstance(made, Tensor):
            self.known[id(made)] = made, value, step
        return made

    def of_state(self, tensor: Tensor) -> Tensor:
        self.known[id(tensor)] = tensor, float, tensor
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _COMPARISONS and id(args[0]) in self.known and not isinstance(args[1], Tensor):
            _, value, source = self.known[id(args[0])]
            compare, other = _COMPARISONS[name], args[1]
            if _tracing.differentiable:  # also where it is 0 it has a gradient, which the branch for 0 would not have
                return bool(compare(0.5, other))
            return on_host(lambda source: bool(compare(value(source), other)), source)
        if name == "item":
            return args[0]
        if _tracing.differentiable and name in ("pow", "__pow__") and args[1] == 0.5:
            # RAdam takes a root below 0 in its first steps, which it does not use; its gradient would be NaN.
            return func(args[0].clamp(min=1e-30), 0.5)
        if name in ("addcdiv_", "addcmul_") and isinstance(kwargs.get("value"), Tensor):
            into, one, two = args
            return into.add_((one / two if name == "addcdiv_" else one * two) * kwargs["value"])
        if name in ("add_", "add", "sub", "sub_") and isinstance(kwargs.get("alpha"), Tensor):
            into, other = args
            wide = torch.promote_types(into.dtype, other.dtype)  # in which torch's kernel multiplies: for Muon
            return getattr(into, name)(other.to(wide) * kwargs["alpha"])
        if name == "lerp_" and isinstance(weight := kwargs.get("weight", args[2] if args[2:] else None), Tensor):
            return args[0].add_((args[1] - args[0]) * weight)
        return func(*args, **kwargs)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name.strip("_")) for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
} | {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


_BRANCHING = {torch.optim.ASGD, torch.optim.RAdam}


@contextmanager
def _limits_of_tensors(function: Any) -> Iterator[None]:
    """`max` and `min` that take a tensor for a number, in this function's module: Adafactor limits its steps so."""

    def limited(plain: Callable[..., Any], by: str, bound: str) -> Callable[..., Any]:
        def of(*values: Any) -> Any:
            tensors = [value for value in values if isinstance(value, Tensor)]
            numbers = [value for value in values if not isinstance(value, Tensor)]
            if not tensors:
                return plain(*values)
            found = functools.reduce(getattr(torch, by), tensors)
            return torch.clamp(found, **{bound: plain(numbers)}) if numbers else found

        return of

    space = {} if function is None else function.__globals__
    space |= {"max": limited(max, "maximum", "min"), "min": limited(min, "minimum", "max")}
    try:
        yield
    finally:
        del space["max"], space["min"]


def _copies(
    grads: Grads, params: Params, states: Mapping[str, dict[str, Any]]
) -> tuple[Params, dict[str, dict[str, Any]]]:
    """Copies of what an update of these parameters writes, in one sweep."""
    grad_mode = torch.is_grad_enabled()
    try:
        torch_private.set_grad_enabled(False)
        tensors = {name: params[name].clone() for name in grads}
        working = {name: {key: _copy(value) for key, value in states[name].items()} for name in grads}
    finally:
        torch_private.set_grad_enabled(grad_mode)
    for name, tensor in tensors.items():
        tensor.requires_grad_(params[name].requires_grad)
    return tensors, working
