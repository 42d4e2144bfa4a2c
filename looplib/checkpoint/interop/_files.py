"""Weight files: safetensors, and `torch.save` without executing anything."""

from __future__ import annotations

import functools
import os
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

from looplib._core.checks import check


def safetensors_package() -> Any:
    """Import safetensors, or raise an ImportError that says how to install it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors files need the package: pip install safetensors") from error
    return safetensors


def read_state_dict(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Names and tensors of a safetensors or `torch.save` file."""
    with open(path, "rb") as file:
        head = file.read(9)
    load: Callable[..., Any]
    if head[8:] == b"{":  # safetensors starts with the length of a JSON header, then the header
        load = safetensors_package().torch.load_file
    else:
        mapped = zipfile.is_zipfile(path)  # torch's older format cannot be mapped
        load = functools.partial(torch.load, map_location="cpu", weights_only=True, mmap=mapped)
    try:
        content = load(path)
    except OSError:
        raise
    except Exception as error:  # torch raises errors of many types for a damaged file
        raise ValueError(
            f"{os.fspath(path)} is damaged, or holds more than tensors and plain values, and was not loaded"
        ) from error
    check(isinstance(content, Mapping), f"{os.fspath(path)} holds a {type(content).__name__}, not a state_dict")
    return content  # type: ignore[no-any-return]
