"""Weight averaging: EMA, SWA, and the state to evaluate with.

An average is a part of the update, after the weights, so it is skipped, donated,
interrupted and checkpointed with them. It counts the updates of its chain, which can be fewer than
`state.step` if several optimizers take turns (`partition`) or everything is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check, check_number, is_count
from looplib._core.mappings import in_dtypes_of, pick
from looplib._core.ranks import shards
from looplib._core.records import check_kind, with_repr
from looplib._core.tracing import on_host
from looplib.optim._part import made_of, wraps_nothing
from looplib.optim.averages import averages_in
from looplib.optim.chains import of_another
from looplib.types import Grads, Optimizer, Params, TrainState, check_state

Tensors = dict[str, Tensor]


@wraps_nothing("ema(0.999)", takes_functions=True)
def ema(
    decay: float | Callable[[int], float] = 0.999,
    *,
    start: int = 0,
    every: int = 1,
    buffers: bool = False,
) -> Optimizer:
    """Exponential moving average (EMA) of the trained weights.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.chain(ll.optimizer(torch.optim.SGD, lr=0.1), ll.ema(ll.optim.ema_warmup(0.999)))
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer)
    >>> state, metrics = train_step(ll.init_state(model, optimizer), torch.ones(4, 2))
    >>> averaged = ll.eval_state(optimizer, state)  # to evaluate, to export
    >>> torch.equal(averaged.params["weight"], state.params["weight"])
    False

    After each update, `average = decay * average + (1 - decay) * weights`, computed as
    `average.lerp_(weights, 1 - decay)`. It is a part of a chain, behind the optimizer, and stored as
    `opt_state["ema"]["average"]`, in float32 for half-precision
    weights. It takes one more copy of the weights, and one operation over them per step. `evaluate` and `bind` take the
    trained weights of a state, unless they are given `ll.eval_state(optimizer, state)`.

    Behind a `partition`, the average of every parameter moves in each update of any part. For a target network, which
    follows the updates of one network, put it into the chain of that part instead. Two averages need names,
    `("slow", ll.ema(0.9999))`; the last one decides the weights to evaluate with.

    Args:
        decay: float from 0 to 1, or a function of the number of averages so far, such as `ema_warmup(0.999)`. The first
            average is a copy of the weights (the initial ones, or those after `start` updates), so the function's first
            call gets 1.
        start: number of updates after which the average is initialized to the weights; 0 for the initial weights.
        every: number of updates between averages.
        buffers: if True, also average floating-point buffers (BatchNorm's statistics) and evaluate with the averages.
            By default, evaluation uses the state's own buffers, which are BatchNorm's statistics of the trained weights; or
            compute those of the average by `ll.evaluation.recompute_batch_norm`.

    Raises:
        TypeError: `decay` is neither a number nor a function.
        ValueError: an argument is out of range.

    Source: Polyak and Juditsky, 1992. The result is bitwise that of `torch.optim.swa_utils.AveragedModel` with
    `get_ema_multi_avg_fn(decay)`, first updated after `start` updates.
    """
    advice = "give a number from 0 to 1, or a function of the averages so far"
    if not callable(decay):
        check_number("decay", decay, lambda decay: 0 <= decay <= 1, advice)
    check(
        is_count(start, 0) and is_count(every),
        f"start is {start} and every {every}; give a step of at least 0 and a count of at least 1",
    )

    def moment(before: Tensor) -> tuple[Tensor, float | None]:
        """Updates so far, and the weight of the trained weights in the average; None if none is due."""
        updates = int(before) + 1
        count, rest = divmod(updates - start, every)
        if count < 0 or rest:
            return torch.tensor(updates, device="cpu"), None
        old_weight = (decay(count) if callable(decay) else decay) if count else 0  # the first average is a copy
        return torch.tensor(updates, device="cpu"), float(1 - old_weight)

    def update_(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> tuple[Params, Any]:
        updates, weight = on_host(moment, state["updates"])
        if weight is not None:
            now = {"params": params}
            if buffers:
                now["buffers"] = _buffers_of(info)
            for kind, average in state["average"].items():
                _move(average, now[kind], weight)
        return params, {**state, "updates": updates}

    settings = {"decay": decay, "start": start, "every": every, "buffers": buffers}

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        averaged = {"params": params}
        if buffers:
            averaged["buffers"] = {
                name: tensor
                for name, tensor in _buffers_of(extra).items()
                if tensor.is_floating_point() or tensor.is_complex()
            }
        average = {
            kind: {name: _wide(tensor).clone() for name, tensor in tensors.items()}
            for kind, tensors in averaged.items()
        }
        return {"average": average, "updates": torch.tensor(0, device="cpu")}

    averaging = made_of("ema", "after", settings, init=init, update_=update_, evaluation=partial(_evaluated, start))
    return with_repr(averaging, ema, decay, start=start, every=every, buffers=buffers)


def _buffers_of(info: dict[str, Any]) -> Tensors:
    """The module's buffers, which a step gives, and a loop of one's own to each function."""
    buffers: Tensors | None = info.get("buffers")
    if buffers is None:
        raise TypeError(
            "ema(buffers=True) and swa(buffers=True) average buffers, and got none: with buffers = dict(model.named_buffers()), "
            "write ema.init(params, buffers=buffers), and ema.update({}, kept, params, step, buffers=buffers)"
        )
    return buffers


def _evaluated(start: int, params: Params, buffers: Tensors, state: Any) -> tuple[Params, Tensors]:
    """The averages, or before the first average, the weights that the parts before evaluate with."""
    average = state["average"]
    if start and not on_host(partial(_has_begun, start), state["updates"]):
        return params, buffers
    statistics = in_dtypes_of(average.get("buffers", {}), buffers)
    return {**params, **in_dtypes_of(average["params"], params)}, {**buffers, **statistics}


def _has_begun(start: int, updates: Tensor) -> bool:
    begun = updates >= start
    check(
        bool(begun.all()) or not begun.any(),
        "only some members of this stack have an average so far: ask for one of unstack_states(stack)",
    )
    return bool(begun.all())


def _wide(tensor: Tensor) -> Tensor:
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.detach().float() if half else tensor.detach()


def _move(average: Tensors, now: Tensors, weight: float | Tensor) -> None:
    """Move averages towards the values, in place."""
    if not average:  # a model without floating-point buffers; kernels over lists refuse empty ones
        return
    with torch.no_grad():
        old, new = shards(average.values()), shards(in_dtypes_of(pick(now, average), average).values())
        if isinstance(weight, Tensor):  # in a graph
            for before, after in zip(old, new, strict=True):
                before.lerp_(after, weight.to(before))
        else:
            torch_private.foreach_lerp_(old, new, weight)


def ema_warmup(decay: float, *, inv_gamma: float | None = None, power: float | None = None) -> Callable[[int], float]:
    """EMA decay with warmup, so that the initial weights are soon forgotten.

    After `n` averages the decay is `min(decay, (1 + n) / (10 + n))`. With `inv_gamma` or `power`, it is
    `min(decay, 1 - (1 + n / inv_gamma) ** -power)`, as in diffusers: a power of 2/3 suits runs of a million steps, 3/4
    shorter ones.

    >>> [round(ema_warmup(0.999)(n), 3) for n in (1, 10, 100, 100_000)]
    [0.182, 0.55, 0.918, 0.999]
    >>> [round(ema_warmup(0.9999, power=3 / 4)(n), 3) for n in (1, 10, 100, 1000)]
    [0.405, 0.834, 0.969, 0.994]

    Args:
        decay: largest decay, from 0 to 1.
        inv_gamma: number of averages that stretches the warmup, above 0. Defaults to 1 if `power` is given.
        power: how steeply the decay rises, above 0. Defaults to 2/3 if `inv_gamma` is given.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Source: `tf.train.ExponentialMovingAverage` with `num_updates`; `diffusers.training_utils.EMAModel`.
    """
    check_number("decay", decay, lambda decay: 0 <= decay <= 1, "give a number from 0 to 1")
    if inv_gamma is None and power is None:
        return lambda count: min(decay, (1 + count) / (10 + count))
    gamma, exponent = 1.0 if inv_gamma is None else inv_gamma, 2 / 3 if power is None else power
    for name, value in (("inv_gamma", gamma), ("power", exponent)):
        check_number(name, value, lambda value: value > 0, "give a number above 0")
    return lambda count: min(decay, 1 - (1 + count / gamma) ** -exponent)


@wraps_nothing("optim.swa(start=1500)")
def swa(*, start: int, every: int = 1, buffers: bool = False) -> Optimizer:
    """Stochastic weight averaging (SWA): the equal average of the weights at regular intervals.

    >>> import looplib as ll, torch
    >>> optimizer = ll.chain(ll.optimizer(torch.optim.SGD, lr=0.1), ll.optim.swa(start=1500, every=100))

    The weights are averaged after `start`, `start + every`, `start + 2 * every`, ... updates. Evaluate with
    `eval_state`, which returns the weights themselves before `start`. For a learning rate that is constant from
    `start` on, combine schedules with `ll.schedules.join(...)`. BatchNorm's statistics belong to the weights that
    produced them: compute them again by `ll.evaluation.recompute_batch_norm`, or pass `buffers=True` to average them too.

    Args:
        start: number of updates before the first average.
        every: number of updates between averages.
        buffers: if True, also average floating-point buffers and evaluate with the averages.

    Raises:
        ValueError: an argument is out of range.

    Source: Izmailov et al., "Averaging weights leads to wider optima and better generalization", 2018. The result is
    that of `torch.optim.swa_utils.AveragedModel` with `get_swa_multi_avg_fn()`, bit by bit for weights of at most
    float32.
    """
    [part] = ema(_equal, start=start, every=every, buffers=buffers).parts.values()
    return with_repr(Optimizer({"swa": part}), swa, start=start, every=every, buffers=buffers)


def _equal(count: int) -> float:
    """Decay of an equal average, of which there have been so many terms."""
    return count / (count + 1)


def eval_state(optimizer: Optimizer, state: TrainState) -> TrainState:
    """State to evaluate with: the averaged weights if the optimizer keeps averages, otherwise the trained ones.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.chain(ll.optimizer(torch.optim.SGD, lr=0.1), ll.ema(0.999))
    >>> state = ll.init_state(model, optimizer)
    >>> averaged = ll.eval_state(optimizer, state)
    >>> averaged.params["weight"] is state.opt_state["ema"]["average"]["params"]["weight"]
    True

    This covers EMA, SWA, Lookahead's slow weights, and the evaluation point of schedule-free optimizers. Pass the
    result to `evaluate`, `predict`, and exports (`state_dict`, `save_pretrained`), and continue training with
    `state`, which is unchanged. The averages are shared and not copied, so once a donated step has consumed `state`,
    the evaluation state cannot be used either.

    Args:
        optimizer: the optimizer that created `state.opt_state`, with all of its parts.
        state: a training state.

    Raises:
        ValueError: the state was created by a different optimizer.
    """
    check_kind(optimizer, "eval_state", "optimizer")
    check_state(state, "ll.eval_state(optimizer, state)")
    if not optimizer.fits(state.opt_state):
        raise of_another(optimizer, state)
    try:
        params, buffers = optimizer.evaluation(state.params, state.buffers, state.opt_state)
    except KeyError as error:
        raise of_another(optimizer, state) from error
    if params is state.params and buffers is state.buffers:
        return state
    return state.replace(params=params, buffers=buffers)


def average(optimizer: Optimizer, state: TrainState, name: str = "") -> Tensors:
    """Read a moving average of the weights, by the name of its part.

    >>> import looplib as ll, torch
    >>> networks = torch.nn.ModuleDict({"actor": torch.nn.Linear(2, 1), "critic": torch.nn.Linear(2, 1)})
    >>> adam = ll.optimizer(torch.optim.Adam, lr=1e-3)
    >>> optimizer = ll.optim.partition(
    ...     {"actor": adam, "critic": ll.chain(adam, ll.ema(0.995))}, lambda name, tensor: name.split(".")[0]
    ... )
    >>> target = ll.optim.average(optimizer, ll.init_state(networks, optimizer), "critic")
    >>> list(target)
    ['critic.weight', 'critic.bias']
    >>> ll.state.apply(networks, target, torch.ones(3, 2), method="critic").shape
    torch.Size([3, 1])

    These are the weights that `eval_state` takes from this part: in the dtypes of the state's, with averaged buffers if the
    part has them (`buffers=True`), and the state's own weights before the part's `start`. They are shared with the state,
    not copied.

    Args:
        optimizer: the optimizer that created `state.opt_state`, with all of its parts.
        state: a training state.
        name: name of the part (`ema`, or as given, `("slow", ll.ema(0.9999))`), or label of a partition that has one
            average. Where this is not enough, names from the outside to the inside, "critic/slow". It may be left out if there
            is one average.

    Returns:
        Name -> tensor, under the names of the whole model.

    Raises:
        ValueError: there is no average of this name, or several, or the state was created by a different optimizer.
    """
    check_kind(optimizer, "average", "optimizer")
    check_state(state, "ll.optim.average(optimizer, state)")
    if not optimizer.fits(state.opt_state):
        raise of_another(optimizer, state)
    averages = dict(averages_in(state.opt_state, optimizer.description))
    titles = {"/".join(path): path for path in averages}
    chosen = [title for title, path in titles.items() if _within(name.split("/") if name else [], path)]
    chosen = [name] if name in titles else chosen
    known = ", ".join(map(repr, titles)) or "none"
    check(
        len(chosen) == 1,
        f"{len(chosen) or 'no'} averages{f' are called {name!r}' * bool(name)} in this state, which keeps {known}: give the "
        "name of one, and put ll.ema or ll.optim.swa into the chain of what is to be averaged",
    )
    entry, start = averages[titles[chosen[0]]]
    params, buffers = (
        pick(tensors, entry["average"].get(kind, ()))
        for kind, tensors in (("params", state.params), ("buffers", state.buffers))
    )
    params, buffers = _evaluated(start, params, buffers, entry)
    return {**params, **buffers}


def _within(names: Iterable[str], path: Iterable[str]) -> bool:
    """True if these names are in a path, in this order."""
    rest = iter(path)
    return all(name in rest for name in names)
