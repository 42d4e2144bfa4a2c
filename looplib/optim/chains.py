"""Chains of parts, and the check that an optimizer changes weights."""

from __future__ import annotations

from looplib._core.chain import contents
from looplib._core.checks import check, check_type
from looplib._core.records import shown, with_repr
from looplib.types import Optimizer, Part, TrainState

_ADVICE = "give what ll.optimizer, ll.ema, ll.clip_by_global_norm or ll.optim.part returns"


def chain(*parts: Optimizer | tuple[str, Optimizer]) -> Optimizer:
    """Put the parts of an update together, in the order in which they are read.

    >>> import looplib as ll, torch
    >>> optimizer = ll.chain(
    ...     ll.skip_nonfinite(),  # leave out the update of a batch with NaN
    ...     ll.clip_by_global_norm(1.0),  # reports grad_norm
    ...     ll.optimizer(torch.optim.AdamW, lr=1e-3),
    ...     ll.ema(0.999),
    ... )
    >>> list(optimizer.init({"w": torch.zeros(2)}))
    ['skip_nonfinite', 'AdamW', 'ema']

    The result is an `Optimizer` like each of its parts, for `make_train_step`, `init_state`, a `partition`, or another chain,
    into which it is flattened. An update first reads, part by part: gradients may be changed, and each part may decide
    against the update. Then the weights and all else are written, part by part. If it is skipped, nothing is written.

    The state is a dict with an entry for each part that keeps one: `state.opt_state["AdamW"]`. A part is named by its kind;
    if there are two of one kind, name them, `("slow", ll.ema(0.9999))`. Where two parts report under one name, that of the part
    is added: `grad_norm/slow`.

    Order: what decides or changes gradients comes before the weights, averages after them. `skip_nonfinite` and
    `dynamic_loss_scale` judge the gradients as they entered the chain, wherever they stand before the weights.

    Args:
        parts: optimizers, each alone or as `(name, optimizer)`.

    Raises:
        TypeError: a part is something different.
        ValueError: two parts have one name; a part stands where it has no effect; two write the weights; there are two loss
            scales; or one that evaluates the loss at other points (LBFGS) follows one that changes gradients, or a loss
            scale.

    Source: `optax.chain`, `optax.named_chain`.
    """
    named_parts: list[tuple[str, Part]] = []
    for argument in parts:
        name, optimizer = argument if isinstance(argument, tuple) and len(argument) == 2 else (None, argument)
        check_type("a part of a chain is", optimizer, Optimizer, _ADVICE)
        assert isinstance(optimizer, Optimizer)
        check(name is None or isinstance(name, str), f"the name of a part is {name!r}; give a string", TypeError)
        check(
            name is None or len(optimizer.parts) == 1,
            f"{name!r} names a chain of {', '.join(optimizer.parts)}, which this chain takes apart: name its parts",
        )
        named_parts += [(own_name if name is None else name, part) for own_name, part in optimizer.parts.items()]
    check(named_parts, "ll.chain got no parts: give at least ll.optimizer(torch.optim.AdamW, lr=1e-3)")
    check_order(named_parts)
    names = [name for name, _ in named_parts]
    for name in names:
        check(
            names.count(name) == 1,
            f"two parts are called {name!r}, which is the key of their state and their name in reports: name them, "
            f'll.chain(("first", ...), ("second", ...))',
        )
    return with_repr(Optimizer(dict(named_parts)), chain, *parts)


def check_order(parts: list[tuple[str, Part]]) -> None:
    """Raise ValueError for an order of parts in which one has no effect, or a wrong one."""
    places: dict[str, list[str]] = {"judge": [], "gradients": [], "weights": [], "after": []}
    for name, part in parts:
        writers, after = places["weights"], places["after"]
        if part.role in ("judge", "gradients"):
            follows = writers or after
            check(
                not follows,
                f"{name} comes after {', '.join(follows)} and would get the gradients too late: put it before, "
                f"ll.chain({name}, {', '.join(follows)})",
            )
        if part.role == "weights":
            check(
                not writers,
                f"{', '.join(writers)} and {name} would both write the same weights: give each its parameters by "
                "ll.optim.partition",
            )
            check(
                not after,
                f"{', '.join(after)} comes before {name}, whose update it would not see: put it behind, "
                f"ll.chain({name}, {', '.join(after)})",
            )
            earlier = places["gradients"] + [
                earlier_name for earlier_name, other in parts if other.loss_scale is not None
            ]
            check(
                not part.evaluates or not earlier,
                f"{name} takes further gradients of the loss itself, which {', '.join(earlier)} would not change: leave that out",
            )
        places[part.role].append(name)
    scales = [name for name, part in parts if part.loss_scale is not None]
    check(len(scales) < 2, f"{' and '.join(scales)} both scale the loss: once is enough")


def check_writes(optimizer: Optimizer, who: str) -> Optimizer:
    """Return an optimizer that changes weights. Raises TypeError for anything else, ValueError for parts that do not."""
    advice = "give what ll.optimizer returns, such as ll.optimizer(torch.optim.AdamW, lr=1e-3)"
    check_type(f"{who} got, in place of an optimizer,", optimizer, Optimizer, advice)
    roles = [part.role for part in optimizer.parts.values()]
    check(
        "weights" in roles,
        f"{who} got {', '.join(optimizer.parts)}, which changes no weights: put it into a chain with an optimizer, such as "
        f"{_with_weights(optimizer)}. (A part of your own that makes the update has role='weights'.)",
    )
    return optimizer


def _with_weights(optimizer: Optimizer) -> str:
    """The call of a chain with these parts and an optimizer."""
    call = optimizer.call
    arguments = call.args if call is not None and call.factory is chain else (optimizer,)
    codes: dict[bool, list[str]] = {False: [], True: []}
    for argument in arguments:
        parts = (argument[1] if isinstance(argument, tuple) else argument).parts.values()
        codes[all(part.role == "after" for part in parts)].append(shown(argument))
    return f"ll.chain({', '.join([*codes[False], 'll.optimizer(torch.optim.AdamW, lr=1e-3)', *codes[True]])})"


def of_another(optimizer: Optimizer, state: TrainState) -> ValueError:
    """Error for a state that an optimizer cannot read."""
    return ValueError(
        f"state.opt_state holds {contents(state.opt_state)}, and is not that of {optimizer.call or optimizer}: give the "
        "optimizer that made it, with all of its parts"
    )
