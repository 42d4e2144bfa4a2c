"""What the functions of an optimizer may leave out: keyword arguments, and making an update or not.

`update(..., when=flag)` makes the update where the flag is set. Those that pass the flag on, or combine it with one of
their own, take `when` by name; for all others it is looked at here. So conditional updates may stand in each other,
and the host reads one flag for all of them, before anything is written over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core.optimizer_states import in_words, kept_in, name_of
from looplib._core.tracing import tracing, where


def with_known_arguments(function: Any) -> Any:
    """The function, deaf to keyword arguments that it does not take."""
    accepted = _keywords(function)
    if accepted is None:
        return function

    def deaf(*args: Any, **extra: Any) -> Any:
        return function(*args, **{name: value for name, value in extra.items() if name in accepted})

    return deaf


def conditional(update: Any, init: Any, description: Mapping[str, Any]) -> Callable[..., tuple[Any, Any, Any]]:
    """An `update` that takes `when`, made of one that may not, and says whether it was applied.

    `init` and `description` are those of its optimizer, which name it to one whose state is another's.
    """
    known = with_known_arguments(update)
    if "when" in _parameters(update):

        def update_of_three(*args: Any, **extra: Any) -> tuple[Any, Any, Any]:
            try:
                out = known(*args, **extra)
            except (KeyError, TypeError) as error:
                _check_state(update, init, description, error, *args)
                raise
            return out if type(out) is tuple and len(out) == 3 else _refuse(update, out)

        return update_of_three

    def update_when(
        grads: Any, opt_state: Any, params: Any, step: int, *, when: bool | Tensor = True, **extra: Any
    ) -> tuple[Any, Any, Any]:
        chooses = when is not True and tracing()
        if when is not True and not chooses and not when:  # the one time that the host reads it
            return params, opt_state, False
        try:
            out = known(grads, opt_state, params, step, **extra)
        except (KeyError, TypeError) as error:
            _check_state(update, init, description, error, grads, opt_state, params)
            raise
        if type(out) is not tuple or len(out) != 3:
            _refuse(update, out)
        new, new_state, applied = out
        if not chooses:
            return new, new_state, applied
        return where(when, new, params), where(when, new_state, opt_state), when & applied

    return update_when


def _parameters(function: Any) -> Any:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _keywords(function: Any) -> set[str] | None:
    """The names of the arguments that a function takes; None for any."""
    parameters = _parameters(function)
    if not parameters or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return set(parameters)


def _refuse(update: Any, out: Any) -> Any:
    found = f"{len(out)} values" if isinstance(out, tuple) else f"a {type(out).__name__}"
    raise TypeError(
        f"{getattr(update, '__qualname__', update)} returned {found}; an optimizer's update returns three, "
        "(params, opt_state, applied), where applied is True for an update that was made, and what an inner "
        "optimizer said in a wrapper"
    )


def _check_state(
    update: Any,
    init: Any,
    description: Mapping[str, Any],
    error: Exception,
    grads: Any = None,
    opt_state: Any = None,
    params: Any = None,
    *args: Any,
) -> None:
    """Say of a failed update of a wrapper that the state is not its own, where that is why it failed."""
    try:
        needed = kept_in(init(params))
    except Exception:  # of parameters that it cannot begin with; then the first error says more
        return
    if not needed or kept_in(opt_state) == needed:
        return
    wrapper = getattr(update, "__qualname__", str(update)).partition(".")[0].lstrip("_")
    which = f"and {name_of(description, wrapper)} is to update it"
    advice = (
        "Make the state with this optimizer, ll.init_state(model, optimizer), or a new opt_state by "
        "optimizer.init(params)"
    )
    if opt_state is None:
        raise ValueError(f"the state was made without an optimizer, {which}. {advice}") from error
    raise ValueError(
        f"opt_state is {in_words(opt_state)}, {which}, which keeps {', '.join(needed)}. {advice}"
    ) from error


def read(applied: Any) -> bool:
    """Whether an update was made, as a bool: here the host waits for a tensor that says so."""
    return bool(checked(applied))


def checked(applied: Any) -> bool | Tensor:
    """The third value of an update, if it is of the right kind."""
    if isinstance(applied, bool):
        return applied
    if isinstance(applied, Tensor) and applied.dtype is torch.bool and applied.dim() == 0:
        return applied
    kind = (
        f"a {applied.dtype} tensor of shape {tuple(applied.shape)}" if isinstance(applied, Tensor) else repr(applied)
    )
    raise TypeError(f"update returned {kind} as its third value, applied: give True, False, or a 0-dim bool tensor")
