"""Parts of an update, of looplib and of users."""

from __future__ import annotations

import difflib
import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast, get_args

from torch import Tensor

from looplib._core.checks import check
from looplib._core.copies import leaves_of
from looplib._core.forward_writes import versions, written_since
from looplib._core.mappings import mapped, without
from looplib._core.random import mix
from looplib._core.records import described, kind_of, with_repr
from looplib.optim._third_party import STREAM, streams_at
from looplib.types import Evaluation, Grads, Optimizer, Params, Part, Role, Transformed

_FIRST = ("grads", "state", "params", "step")
ROLES = get_args(Role)
F = TypeVar("F", bound=Callable[..., Optimizer])


def part(
    name: str,
    *,
    init: Callable[..., Any] | None = None,
    transform: Callable[..., Transformed] | None = None,
    update_: Callable[..., Any] | None = None,
    role: Role | None = None,
    evaluation: Evaluation | None = None,
    hyperparameters: Callable[[Any, int], dict[str, float]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Make a part of an update of your own, for `ll.chain`.

    >>> import looplib as ll, torch
    >>> def centralize():
    ...     def transform(grads, state, params, step):
    ...         for name, grad in grads.items():
    ...             if grad.ndim > 1:
    ...                 grad -= grad.flatten(1).mean(1).reshape(-1, *[1] * (grad.ndim - 1))
    ...         return ll.types.Transformed(grads)
    ...     return ll.optim.part("centralize", transform=transform)
    >>> optimizer = ll.chain(centralize(), ll.optimizer(torch.optim.SGD, lr=1.0))
    >>> params = {"w": torch.zeros(1, 2)}
    >>> optimizer.update({"w": torch.tensor([[1.0, 3.0]])}, optimizer.init(params), params, 0)[0]
    {'w': tensor([[ 1., -1.]])}

    An update has two halves. `transform` reads: it may change the gradients, report, refuse, or decide against the update.
    Then the host reads what all parts have decided, and only then `update_` writes. Counts of batches, such as skips, move in
    `transform`. Counts of updates and averages move in `update_`, so that nothing of a skipped batch gets in. All arguments but
    one of the two halves may be left out.

    Random numbers that a half draws from torch are derived from the state's seed and step, so that a pure step has the same
    result again and all ranks have the same noise. In a graph they are other numbers, as a function of the same seed and step.
    By hand, without `seed=`, they are drawn from torch's streams.

    To run in a graph, too (`ll.compile_step`, `ll.vmap_step`, `ll.transforms.differentiable`), write both halves as operations
    on tensors, and compute what depends on a count of the state through `ll.transforms.on_host`. There is no second form
    for graphs: a part that reads values, as by `if` or `.item()`, works in steps that run without one.

    Args:
        name: of the part: key of its state in `state.opt_state`, and its name in messages.
        init: `init(params, **extra) -> state`, see `ll.types.Init`. Leave it out for a part without state.
        transform: `transform(grads, state, params, step, **info) -> ll.types.Transformed`, see `ll.types.Transform`.
        update_: `update_(grads, state, params, step, **info) -> (params, state)`, see `ll.types.Update`.
        role: where it may stand, see `ll.types.Role`: "judge", "gradients" (the default, if there is a `transform`),
            "weights" for one that writes parameters from gradients, or "after" (the default otherwise).
        evaluation: `evaluation(params, buffers, state) -> (params, buffers)`, the weights to evaluate with.
        hyperparameters: `hyperparameters(state, step) -> {name: float}`, to log.
        settings: numbers and names by which checkpoints tell whether it is the same part.

    Raises:
        TypeError: a function takes an argument that it will not be given, such as a misspelt `metrics`.
        ValueError: the role is unknown, or there is nothing to do.
        RuntimeError: from an update, `transform` has written to its state, to a parameter, or, unless its role is "gradients", to
            a gradient; or `update_` has written to a gradient, or to a parameter without one.
        UntraceableError: from a step that runs as a graph (`ll.compile_step`), it reads the value of a tensor.
    """
    check(
        isinstance(name, str) and name,
        f"the name of a part is {name!r}; give a string, such as 'centralize'",
        TypeError,
    )
    check(
        transform is not None or update_ is not None,
        f"{name} has neither transform= nor update_=, so it does nothing",
    )
    chosen = role or ("gradients" if transform is not None else "after")
    check(chosen in ROLES, f"the role of {name} is {role!r}; it is one of {', '.join(map(repr, ROLES))}")
    check(
        chosen != "weights" or update_ is not None,
        f"{name} has the role 'weights', and no update_= that writes them",
    )
    reads = _taking(f"transform of {name}", transform, _FIRST, ("metrics", "seed", "owned"))
    of_second = ("metrics", "buffers", "seed", "applied", "evaluate", "carry")
    writes = _taking(f"update_ of {name}", update_, _FIRST, of_second)
    in_graphs = Part(
        role=chosen,
        init=_taking(f"init of {name}", init, ("params",), ("buffers",)),
        transform=_reading(name, chosen, reads),
        update_=_writing(name, chosen, writes),
        evaluation=_taking(f"evaluation of {name}", evaluation, ("params", "buffers", "state"), ()),
        hyperparameters=_taking(f"hyperparameters of {name}", hyperparameters, ("state", "step"), ()),
        description=mapped(described, settings or {}),
    )
    seeded = replace(
        in_graphs,
        transform=_drawing(name, "transform", in_graphs.transform),
        update_=_drawing(name, "update_", in_graphs.update_),
        for_graphs=in_graphs,  # which draw for the state's seed when they run
    )
    single = Optimizer({name: seeded})
    arguments = {
        "init": init,
        "transform": transform,
        "update_": update_,
        "role": role,
        "evaluation": evaluation,
        "hyperparameters": hyperparameters,
        "settings": settings,
    }
    return with_repr(single, part, name, **{key: value for key, value in arguments.items() if value is not None})


_STATE = (
    "the transform of {part} has written to its state in place, which other states may share, and which changes even if the "
    "update is skipped: return a new one, Transformed(grads, {{**state, 'count': count + 1}}), or write it in update_"
)
_PARAMETER = (
    "the transform of {part} has written to {tensor} in place, which other states may share, and which changes even if the "
    "update is skipped: write parameters in update_"
)
_JUDGED = (
    "the transform of {part}, whose role is '{role}', has written to the gradient of {tensor}, which is the caller's: give it "
    "role='gradients', whose gradients are its own"
)
_WITHOUT_GRADIENT = (
    "the update_ of {part} has written to {tensor}, which has no gradient in this step and which other states may share: it "
    "writes the parameters that grads names, for key in grads: params[key]..."
)
_GRADIENT = (
    "the update_ of {part} has written to the gradient of {tensor}, which is the caller's and which later parts read: compute "
    "from it, grads[key] * 0.5, or change it in the transform of a part"
)


def _reading(name: str, role: Role, transform: Any) -> Any:
    """A first half, which raises if it has written what it reads: a pure step's state would change."""
    if transform is None:
        return None

    def checked(grads: Grads, state: Any, params: Params, *args: Any, **info: Any) -> Any:
        entries = {str(place): leaf for place, leaf in enumerate(leaves_of(state)) if isinstance(leaf, Tensor)}
        judged: Grads = {} if role == "gradients" else grads
        with _unwritten(name, role, (entries, _STATE), (params, _PARAMETER), (judged, _JUDGED)):
            return transform(grads, state, params, *args, **info)

    return checked


def _writing(name: str, role: Role, update_: Any) -> Any:
    """A second half, which raises if it has written a gradient, or a parameter without one, of which a pure step makes no copy."""
    if update_ is None:
        return None

    def checked(grads: Grads, state: Any, params: Params, *args: Any, **info: Any) -> Any:
        rest = {} if len(grads) == len(params) else without(params, grads)
        with _unwritten(name, role, (rest, _WITHOUT_GRADIENT), (grads, _GRADIENT)):
            return update_(grads, state, params, *args, **info)

    return checked


@contextmanager
def _unwritten(part: str, role: Role, *groups: tuple[Mapping[str, Tensor], str]) -> Iterator[None]:
    """Raise RuntimeError with the message of a group of which a tensor has been written in the block."""
    before = [versions(tensors) for tensors, _ in groups]
    yield
    for (tensors, message), counts in zip(groups, before, strict=True):
        for tensor in written_since(tensors, counts):
            raise RuntimeError(message.format(part=part, role=role, tensor=tensor))


def _drawing(name: str, half: str, function: Any) -> Any:
    """A half whose draws from torch's random streams are a function of the state's seed and step, as those of a loss are.

    By hand, without `seed=`, it draws from the streams as they are.
    """
    if function is None:
        return None

    def seeded(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Any:
        seed = info.get("seed")
        if seed is None:
            return function(grads, state, params, step, **info)
        # The name of a parameter tells the chains of a partition apart, which may have parts of one name.
        place = zlib.crc32(f"{half} of {name} for {next(iter(params), None)}".encode())
        with streams_at(mix(seed, step, STREAM, place), params.values()):
            return function(grads, state, params, step, **info)

    return seeded


def made_of(name: str, role: Role, settings: Mapping[str, Any], **fields: Any) -> Optimizer:
    """An optimizer of one part."""
    return Optimizer({name: Part(role=role, description=mapped(described, settings), **fields)})


def wraps_nothing(line: str, takes_functions: bool = False) -> Callable[[F], F]:
    """Decorator of a function that makes a part: a call with what it would wrap is refused, with the line to write.

    `takes_functions` is True for a part that has a function as an argument.
    """
    name = line.partition("(")[0].rpartition(".")[2]
    optimizer = "ll.optimizer(torch.optim.AdamW, lr=1e-3)"
    in_order = f"{optimizer}, ll.{line}" if name in ("ema", "swa") else f"ll.{line}, {optimizer}"
    message = (
        f"{name} is a part of the update and wraps nothing: write ll.chain({in_order}) and give that to ll.make_train_step "
        "and ll.init_state"
    )

    def is_wrapped(value: Any) -> bool:
        function = callable(value) and not takes_functions
        return isinstance(value, Optimizer) or kind_of(value) == "grad_fn" or function

    def decorate(make: F) -> F:
        @functools.wraps(make)
        def make_part(*args: Any, **settings: Any) -> Optimizer:
            __tracebackhide__ = True
            if any(map(is_wrapped, (*args, *settings.values()))):
                raise TypeError(message)
            return make(*args, **settings)

        return cast(F, make_part)

    return decorate


# Functions of a part, which take what they name


def _taking(who: str, function: Any, positional: Sequence[str], named: Iterable[str]) -> Any:
    """The function, called with those of these named arguments that it takes. Raises TypeError if it cannot be called so."""
    if function is None:
        return None
    check(callable(function), f"{who} is a {type(function).__name__}; give a function", TypeError)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C
        return function
    known = {*named}
    shown = f"({', '.join([*positional, *['**info'] * bool(known)])})"
    places = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    rest = (
        places[len(positional) :]
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in places)
        else []
    )
    for parameter in rest:
        if parameter.name not in known:
            near = difflib.get_close_matches(parameter.name, known, 1)
            meant = f", perhaps {near[0]!r}" if near else ""
            raise TypeError(
                f"{who} takes {parameter.name!r}, and is called as {shown} with {', '.join(sorted(known))}: take one of these"
                f"{meant}"
            )
    try:
        signature.bind(*positional, **dict.fromkeys(parameter.name for parameter in rest))
    except TypeError as error:
        raise TypeError(
            f"{who} takes ({', '.join(signature.parameters)}), and is called as {shown}: {error}"
        ) from None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return function
    taken = {parameter.name for parameter in rest}
    # By hand and in graphs, some are not known, such as `evaluate`.
    unknown = dict.fromkeys(parameter.name for parameter in rest if parameter.default is parameter.empty)

    def with_own_arguments(*args: Any, **info: Any) -> Any:
        return function(*args, **{**unknown, **{name: value for name, value in info.items() if name in taken}})

    return with_own_arguments
