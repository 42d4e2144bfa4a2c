"""Argument checks for types and ranges (a bool is not a number), names of values in messages, and warnings."""

from __future__ import annotations

import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Collection
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import torch_private

# torch, looplib, and the methods that Python makes for a dataclass. A file beside them, `looplib_train.py`, is a user's.
LIBRARIES = *(f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[1])), "<string>"


PLAIN = {Tensor, nn.Parameter}  # torch's own classes of tensors


def is_count(value: Any, least: float = 1) -> bool:
    """True for an int of at least `least` that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_due(call: int) -> bool:
    """True for the 1st, 2nd, 4th, 8th, ... call, in which a check is made that takes too long for each.

    >>> [call for call in range(1, 20) if is_due(call)]
    [1, 2, 4, 8, 16]
    """
    return call & (call - 1) == 0


def is_number(value: Any) -> bool:
    """True for a finite int or float that is not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check(condition: Any, message: str, error: Callable[[str], Exception] = ValueError) -> None:
    """Raise an error with this message unless a condition holds.

    The message is made in any case, so it must be cheap and must not depend on the condition.

    >>> check(1 + 1 == 3, "two ones are 2", ArithmeticError)
    Traceback (most recent call last):
    ArithmeticError: two ones are 2
    """
    # pytest then ends the traceback at the function that checks, and IPython shows no docstring.
    __tracebackhide__ = True
    if not condition:
        raise error(message)


def few(items: Collection[Any], most: int = 8, between: str = ", ") -> str:
    """The first few of many items, for messages.

    >>> few("abc", 2), few([]), few("abc", 2, "; ")
    ('a, b and 1 more', 'none', 'a; b; and 1 more')
    """
    shown = between.join(map(str, islice(items, most))) or "none"
    more = len(items) - most
    return f"{shown}{between.replace(', ', ' ')}and {more} more" if more > 0 else shown


def is_plain(tensor: Tensor) -> bool:
    """True for a strided tensor of one of torch's own two classes."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Tensors that hold the numbers of a subclass, such as a quantized tensor's; else the tensor itself."""
    if type(tensor) in PLAIN or not torch_private.wraps_tensors(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def as_tensor(value: Any) -> Tensor:
    """A tensor itself, or numbers as a tensor on the host, also where torch's default device is another.

    >>> with torch.device("meta"):
    ...     as_tensor(2.0)
    tensor(2.)
    """
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def check_argument(condition: bool, name: str, value: Any, advice: str) -> None:
    """Raise ValueError unless a condition on an argument holds; `advice` says what to pass.

    >>> rho = -1.0
    >>> check_argument(rho > 0, "rho", rho, "give a distance above 0")
    Traceback (most recent call last):
    ValueError: rho is -1.0; give a distance above 0
    """
    __tracebackhide__ = True
    if not condition:
        raise ValueError(f"{name} is {value!r}; {advice}")


def check_type(subject: str, value: Any, expected: Any, advice: str) -> None:
    """Raise TypeError unless a value is an instance of one of these classes; `advice` says what to pass.

    >>> check_type("describe is", [], dict, "give a dict of names to settings")
    Traceback (most recent call last):
    TypeError: describe is a list; give a dict of names to settings
    """
    __tracebackhide__ = True
    if not isinstance(value, expected):
        raise TypeError(f"{subject} {named(value)}; {advice}")


def check_number(name: str, value: Any, condition: Callable[[Any], Any], advice: str) -> None:
    """Raise TypeError unless an argument is a number, and ValueError unless a condition on it holds.

    >>> check_number("rho", "0.1", lambda rho: rho > 0, "give a distance above 0")
    Traceback (most recent call last):
    TypeError: rho is the text '0.1'; give a distance above 0
    """
    __tracebackhide__ = True
    check_type(f"{name} is", value, Real | Tensor, advice)
    check_argument(condition(value), name, value, advice)


def check_count(name: str, value: Any, least: int = 1, advice: str = "") -> None:
    """Raise ValueError unless the argument is an int of at least `least`; `advice` says what to pass.

    >>> check_count("microbatches", 0)
    Traceback (most recent call last):
    ValueError: microbatches is 0; give a whole number of at least 1
    """
    __tracebackhide__ = True
    check_argument(is_count(value, least), name, value, advice or f"give a whole number of at least {least}")


def check_optional_count(name: str, value: Any, least: int = 1, advice: str = "") -> None:
    """Like `check_count`, for an argument that may be None."""
    __tracebackhide__ = True
    if value is not None:
        check_count(name, value, least, advice)


def named(value: Any) -> str:
    """Name of a value in a message.

    >>> [named(value) for value in (1, {}, "sgd", None, int, len)]
    ['an int', 'a dict', "the text 'sgd'", 'None', 'the class int', 'the function len']
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        return f"the text {value!r}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', value)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def separated(prefix: str) -> str:
    """A prefix that ends with what separates it from a name.

    >>> separated("eval"), separated("eval/"), separated("eval_"), separated("")
    ('eval/', 'eval/', 'eval_', '')
    """
    return f"{prefix}/" if prefix[-1:].isalnum() else prefix


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called looplib, directly or through torch: frames are read for that line alone."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def check_real(what: str, *values: Any) -> None:
    """Raise TypeError for complex tensors, whose imaginary part would be lost."""
    for value in values:
        if isinstance(value, Tensor) and value.is_complex():
            raise TypeError(
                f"{what} is complex, and a metric is a real number: give its parts as two metrics, value.real and "
                "value.imag, or value.abs()"
            )
