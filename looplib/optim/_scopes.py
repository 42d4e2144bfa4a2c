"""Several optimizers in one, and optimizers that follow a count of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.chain import any_of, update_where, wrong_state
from looplib._core.checks import check, check_count, check_type
from looplib._core.mappings import mapped, pick
from looplib._core.ranks import shards
from looplib._core.records import with_repr
from looplib._core.tracing import number_in, on_host, where
from looplib._objective import without_skipped
from looplib.optim._part import made_of
from looplib.optim._recipe import check_by_kind
from looplib.optim.chains import check_writes
from looplib.types import Grads, Optimizer, Params, Part, Transformed


def _check_inner(optimizer: Any, who: str) -> None:
    """Raise unless this is an optimizer that can be a part of another."""
    check_writes(optimizer, who)
    scales = [name for name, part in optimizer.parts.items() if part.loss_scale is not None]
    check(
        not scales,
        f"{', '.join(scales)} within {who} would scale the loss of all parameters: put it into the outer chain, "
        f"ll.chain(ll.optim.dynamic_loss_scale(), ll.optim.{who}(...))",
    )


def partition(optimizers: Mapping[str, Optimizer], label: Callable[[str, Tensor], str]) -> Optimizer:
    """Parameter groups with different optimizers, chosen by a label.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    >>> optimizer = ll.optim.partition(
    ...     {"matrices": ll.optimizer(torch.optim.SGD, lr=0.1), "rest": ll.optimizer(torch.optim.AdamW, lr=1e-3)},
    ...     lambda name, tensor: "matrices" if tensor.ndim == 2 else "rest",
    ... )
    >>> state = ll.init_state(model, optimizer)
    >>> list(state.opt_state["partition"])
    ['matrices', 'rest']

    An optimizer acts only if one of its parameters has a gradient. Two networks in one module, with two gradient
    functions (`trainable=`), can therefore be trained by two steps over one state, each with its own optimizer, as in
    a GAN. All optimizers see the same `step`, so a schedule counts the updates of all of them (see `own_steps`).

    Each may be a chain, whose parts act on its own parameters: clipping by their norm, an average of their weights. If one
    optimizer skips an update, the others still make theirs; if all do, the step counts as skipped. Classes that
    create their state in their first update (SGD with dampening, schedule-free ones) do so in the first update of each
    parameter. What they report has the label in its name: `grad_norm/matrices`.

    Args:
        optimizers: label -> optimizer, or a chain.
        label: `(name, tensor) -> label`.

    Raises:
        ValueError: a label has no optimizer, an optimizer has no parameters, or one scales the loss.

    Source: `optax.partition`.
    """
    check_type("optimizers are", optimizers, Mapping, "give a dict of label -> optimizer")
    for key, member in optimizers.items():
        check_type(f"{key!r} in a partition is", member, Optimizer, "give what ll.optimizer returns")
        _check_inner(member, "partition")

    parts_of = partial(_parts, optimizers, label)

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        check_by_kind(label, params, "label")
        members = {key: subset for key, _, subset in parts_of(params, params)}
        empty = [key for key in optimizers if key not in members]
        check(not empty, f"no parameter has the label {', '.join(map(repr, empty))}: leave that optimizer out")
        return {key: optimizer.init(members[key], **extra) for key, optimizer in optimizers.items()}

    def transform(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Transformed:
        if type(state) is not dict or state.keys() != optimizers.keys():
            raise wrong_state(state, repr(partitioned), [f"states of {', '.join(optimizers)}"])
        outs = {
            key: optimizers[key].transform(label_grads, state[key], members, step, **info)
            for key, label_grads, members in parts_of(grads, params)
        }
        return _of_labels(outs, {**state, **mapped(operator.attrgetter("state"), outs)})

    def update_(
        grads: Grads, state: Any, params: Params, step: int, applied: Any = True, carry: Any = None, **info: Any
    ) -> tuple[Params, Any, dict[str, Any]]:
        reports: dict[str, Any] = {}
        for key, label_grads, members in parts_of(grads, params):
            flag = applied[key] if isinstance(applied, dict) else applied
            makes_update = any_of(flag)
            if makes_update is False:
                continue
            of_label = {**info, "applied": flag, "carry": (carry or {}).get(key)}
            if makes_update is True:
                new, state[key], report = optimizers[key].update_(label_grads, state[key], members, step, **of_label)
            else:  # a tensor, as in a graph, which chooses between copies
                new, state[key], report = update_where(
                    flag, optimizers[key], label_grads, state[key], members, step, of_label
                )
            params.update(new)
            reports |= {with_label(key, name): value for name, value in report.items()}
        return params, state, reports

    def evaluation(params: Params, buffers: Params, state: Any) -> tuple[Params, Params]:
        members = _labelled(label, params)
        for key, entry in state.items():
            averaged, buffers = optimizers[key].evaluation(members[key], buffers, entry)
            params = params if averaged is members[key] else {**params, **averaged}
        return params, buffers

    def hyperparameters(state: Any, step: int) -> dict[str, float]:
        return {
            with_label(key, name): value
            for key, member in optimizers.items()
            for name, value in member.hyperparameters(state[key], step).items()
        }

    whole = Part(
        role="weights",
        init=init,
        transform=transform,
        update_=update_,
        evaluation=evaluation,
        hyperparameters=hyperparameters,
        description=mapped(operator.attrgetter("description"), optimizers),
        evaluates=any(part.evaluates for member in optimizers.values() for part in member.parts.values()),
    )
    partitioned = with_repr(Optimizer({"partition": whole}), partition, optimizers, label)
    return partitioned


def _labelled(label: Callable[[str, Tensor], str], params: Params) -> dict[str, Params]:
    """The parameters with each label."""
    members: dict[str, Params] = {}
    for name, tensor in params.items():
        members.setdefault(label(name, tensor), {})[name] = tensor
    return members


def _parts(
    optimizers: Mapping[str, Optimizer], label: Callable[[str, Tensor], str], grads: Grads, params: Params
) -> Iterator[tuple[str, Grads, Params]]:
    """Label, gradients and parameters of each optimizer that has a gradient."""
    for key, members in _labelled(label, params).items():
        label_grads = {name: grads[name] for name in members if name in grads}
        if label_grads:  # parameters that are not trained need no optimizer
            if key not in optimizers:
                raise ValueError(
                    f"{next(iter(label_grads))} has the label {key!r}, and there are optimizers for {', '.join(optimizers)}"
                )
            yield key, label_grads, members


def _around(optimizer: Optimizer, name: str, settings: Mapping[str, Any], **fields: Any) -> Optimizer:
    """A part that contains another optimizer, whose state is `inner` of its own."""
    parts = optimizer.parts.values()
    return made_of(
        name,
        "weights",
        {**optimizer.description, **settings},
        evaluation=lambda params, buffers, state: optimizer.evaluation(params, buffers, state["inner"]),
        evaluates=any(part.evaluates for part in parts),
        kernel=next((part.kernel for part in parts if part.kernel is not None), None),
        **fields,
    )


def own_steps(optimizer: Optimizer) -> Optimizer:
    """Step count of its own: schedules of this optimizer follow its own updates instead of `state.step`.

    >>> import looplib as ll, torch
    >>> def adam(total):
    ...     return ll.optimizer(torch.optim.Adam, lr=ll.schedules.cosine(1e-3, total=total))
    >>> networks = {"critic": ll.optim.own_steps(adam(5000)), "generator": ll.optim.own_steps(adam(1000))}
    >>> optimizer = ll.optim.partition(networks, lambda name, tensor: name.split(".")[0])

    Use it for the parts of a `partition` that are updated by steps of their own, such as a critic with five updates for
    each of the generator's: `state.step` counts the updates of both. The count is kept beside the optimizer's state, as
    `updates`, and is not moved by updates that are skipped or go to other parts.

    Args:
        optimizer: the optimizer, or chain, whose schedules and other parts that depend on the step are to follow its own
            updates.
    """
    _check_inner(optimizer, "own_steps")

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        return {"inner": optimizer.init(params, **extra), "updates": torch.tensor(0, device="cpu")}

    def transform(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Transformed:
        out = optimizer.transform(grads, state["inner"], params, number_in(state["updates"]), **info)
        return out._replace(state={**state, "inner": out.state})

    def update_(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> tuple[Params, Any, Any]:
        params, state["inner"], report = optimizer.update_(
            grads, state["inner"], params, number_in(state["updates"]), **info
        )
        state["updates"] += 1
        return params, state, report

    def hyperparameters(state: Any, step: int) -> dict[str, float]:
        return optimizer.hyperparameters(state["inner"], number_in(state["updates"]))

    fields = {"init": init, "transform": transform, "update_": update_, "hyperparameters": hyperparameters}
    return with_repr(_around(optimizer, "own_steps", {}, **fields), own_steps, optimizer)


def every(optimizer: Optimizer, n: int, *, gradients: Literal["mean", "last"] = "mean") -> Optimizer:
    """Update by every `n`-th step, such as Adam beside a Muon that updates in each step.

    >>> import looplib as ll, torch
    >>> optimizers = {
    ...     "matrices": ll.optimizer(torch.optim.Muon, lr=0.02),
    ...     "rest": ll.optim.every(ll.optimizer(torch.optim.AdamW, lr=1e-3), 2),
    ... }
    >>> optimizer = ll.optim.partition(optimizers, lambda name, tensor: "matrices" if tensor.ndim == 2 else "rest")

    With `gradients="mean"`, the update uses the mean of the gradients of the `n` steps; their sum takes one more copy of the
    parameters. With `gradients="last"`, it uses that of the `n`-th step alone, and the others are dropped. `state.step` counts
    all steps, and so do schedules. For schedules that count the updates, write `every(own_steps(optimizer), n)`.

    A skipped step does not count and its gradient is not in the mean. Put what judges single gradients (`skip_nonfinite`)
    into the chain around it alone: within, it sees the mean, and if it decides against the update, the sum starts again from
    zero. A parameter that has no gradient in the `n`-th step is not updated, and what it had before is dropped.

    Args:
        optimizer: the optimizer, or chain, that makes the updates.
        n: number of steps for one update.
        gradients: "mean" or "last".

    Raises:
        ValueError: `n` is below 1, or `gradients` is something different.
    """
    _check_inner(optimizer, "every")
    check_count("n", n)
    check(gradients in ("mean", "last"), f"gradients is {gradients!r}; give 'mean' or 'last'")
    sums = gradients == "mean"
    check(
        not sums or not any(part.evaluates for part in optimizer.parts.values()),
        f"{', '.join(optimizer.parts)} takes further gradients of the loss itself, which are no means: give gradients='last'",
    )
    kept = dict.fromkeys(("inner", "steps", "sum") if sums else ("inner", "steps"))

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        entry: dict[str, Any] = {"inner": optimizer.init(params, **extra), "steps": torch.tensor(0, device="cpu")}
        return {**entry, "sum": mapped(torch.zeros_like, mapped(Tensor.detach, params))} if sums else entry

    def transform(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Transformed:
        if type(state) is not dict or state.keys() != kept.keys() or not optimizer.fits(state["inner"]):
            raise wrong_state({"every": state}, repr(periodic), kept)
        count = on_host(partial(_due, n), state["steps"])
        if not count:
            return Transformed(grads, state)
        used = grads
        if sums:
            info["owned"] = True
            used = {name: (state["sum"][name] + grad) / count for name, grad in grads.items()}
        out = optimizer.transform(used, state["inner"], params, step, **info)
        state = {**state, "inner": out.state}
        if sums and out.apply is not True:  # if the chain within decides against it
            flag = any_of(out.apply)
            state["sum"] = where(flag, state["sum"], mapped(torch.zeros_like, state["sum"]))
            state["steps"] = where(flag, state["steps"], torch.zeros_like(state["steps"]))
        return out._replace(grads=grads, state=state, carry=(out.grads, out.carry))

    def update_(
        grads: Grads, state: Any, params: Params, step: int, carry: Any = None, **info: Any
    ) -> tuple[Params, Any, Any]:
        if carry is None:
            state["steps"] += 1
            if sums:
                total = pick(state["sum"], grads)
                torch_private.foreach_add_(shards(total.values()), shards(grads.values()))
            return params, state, {}
        used, inner_carry = carry
        params, state["inner"], report = optimizer.update_(
            used, state["inner"], params, step, carry=inner_carry, **info
        )
        for tensor in shards([state["steps"], *(state["sum"].values() if sums else ())]):
            tensor.copy_(
                torch.zeros_like(tensor)
            )  # for which torch.func.vmap has a rule, and which keeps the strides
        return params, state, report

    def hyperparameters(state: Any, step: int) -> dict[str, float]:
        return optimizer.hyperparameters(state["inner"], step)

    fields = {"init": init, "transform": transform, "update_": update_, "hyperparameters": hyperparameters}
    settings = {"every": n, "gradients": gradients}
    periodic = _around(optimizer, "every", settings, **fields)
    return with_repr(periodic, every, optimizer, n, gradients=gradients)


def _due(n: int, steps: Tensor) -> int:
    """Number of gradients in the update of this step, or 0 without one. More than `n`, if a run has been continued with less."""
    count = int(steps) + 1
    return count if count >= n else 0


def _of_labels(outs: Mapping[str, Transformed], states: Any) -> Transformed:
    """Results of the chains of a partition together: a flag and a carried value for each label."""
    grads = {name: grad for out in outs.values() for name, grad in out.grads.items()}
    flags = mapped(lambda out: out.apply, outs)
    reports = {
        label: out.metrics if out.apply is True else without_skipped(out.metrics, any_of(out.apply))
        for label, out in outs.items()
    }
    return Transformed(
        grads,
        states,
        True if all(flag is True for flag in flags.values()) else flags,
        mapped(lambda out: out.carry, outs),
        {with_label(label, name): value for label, report in reports.items() for name, value in report.items()},
        [skip_check for out in outs.values() for skip_check in out.on_skip],
    )


def with_label(label: str, name: str) -> str:
    """Name of a hyperparameter or a metric with the label of its optimizer: `lr/0` of `rest` is `lr/rest/0`."""
    first, slash, rest = name.partition("/")
    return f"{first}/{label}{slash}{rest}"
