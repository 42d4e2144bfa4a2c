"""Optimizer functions with optional arguments: keyword arguments, and conditional updates.

`update(..., when=flag)` makes the update if the flag is set. Wrappers that pass the flag on, or combine it with their
own, take `when` by name; for all others it is handled here. Conditional updates can therefore be nested, and the host
reads one flag for all of them, before anything is overwritten.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from looplib._core.kinds import parameters_of
from looplib._core.optimizer_states import kept_in, name_of, wrong_state
from looplib._core.tracing import tracing, where

F = TypeVar("F", bound=Callable[..., Any])


def with_known_arguments(function: Any) -> Any:
    """Wrap a function so that it ignores keyword arguments that it does not take."""
    accepted = keywords(function)
    if accepted is None:
        return function

    def deaf(*args: Any, **extra: Any) -> Any:
        return function(*args, **{name: value for name, value in extra.items() if name in accepted})

    return deaf


def conditional(update: Any, init: Any, description: Mapping[str, Any]) -> Callable[..., tuple[Any, Any, Any]]:
    """Make an `update` that accepts `when` and reports if it was applied from one that may not.

    `init` and `description` belong to its optimizer, and are used in errors about a different optimizer's state.
    """
    if update in _complete:
        return update  # type: ignore[no-any-return]
    known = with_known_arguments(update)
    if "when" in parameters_of(update):

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
        if when is not True:
            return update_if(when, update_when, grads, opt_state, params, step, **extra)
        try:
            out = known(grads, opt_state, params, step, **extra)
        except (KeyError, TypeError) as error:
            _check_state(update, init, description, error, grads, opt_state, params)
            raise
        if type(out) is not tuple or len(out) != 3:
            _refuse(update, out)
        return out  # type: ignore[no-any-return]

    return update_when


def update_if(
    when: bool | Tensor, update: Callable[..., Any], grads: Any, opt_state: Any, params: Any, step: int, **extra: Any
) -> tuple[Any, Any, Any]:
    """Make an update if the flag is set: on the host, which reads it here and nowhere else, or in a graph."""
    chooses = tracing()
    if not chooses and not when:
        return params, opt_state, False
    out = update(grads, opt_state, params, step, **extra)
    if not chooses:
        return out  # type: ignore[no-any-return]
    new, new_state, applied = out
    return where(when, new, params), where(when, new_state, opt_state), when & applied


_complete: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def complete(update: F) -> F:
    """Declare that an `update` takes all arguments, `when` among them, and returns three values, so needs no wrapper."""
    _complete.add(update)
    return update


def keywords(function: Any) -> set[str] | None:
    """Names of the keyword arguments that a function accepts; None for any."""
    parameters = parameters_of(function)
    if not parameters or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return set(parameters)


def _refuse(update: Any, out: Any) -> Any:
    kind = f"{len(out)} values" if isinstance(out, tuple) else f"a {type(out).__name__}"
    raise TypeError(
        f"{getattr(update, '__qualname__', update)} returned {kind}; an optimizer's update returns three, "
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
    """Raise a clearer error for a failed update of a wrapper if the cause is a different optimizer's state."""
    try:
        needed = kept_in(init(params))
    except Exception:  # it cannot initialize these parameters, so the first error is more informative
        return
    if not needed or kept_in(opt_state) == needed:
        return
    wrapper = getattr(update, "__qualname__", str(update)).partition(".")[0].lstrip("_")
    raise wrong_state(opt_state, name_of(description, wrapper), f", which keeps {', '.join(needed)}") from error


def read(applied: Any) -> bool:
    """True if an update was made. If a tensor says so, the host waits for it here."""
    return bool(checked(applied))


def checked(applied: Any) -> bool | Tensor:
    """The third value of an update, after checking its type."""
    if isinstance(applied, bool):
        return applied
    if isinstance(applied, Tensor) and applied.dtype is torch.bool and applied.dim() == 0:
        return applied
    kind = (
        f"a {applied.dtype} tensor of shape {tuple(applied.shape)}" if isinstance(applied, Tensor) else repr(applied)
    )
    raise TypeError(f"update returned {kind} as its third value, applied: give True, False, or a 0-dim bool tensor")
