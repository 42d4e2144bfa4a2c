"""Numbers added up: in a wide dtype, and on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype that a device supports."""
    return torch.float32 if device.type == "mps" else torch.float64


def stacked(values: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape on the device of the first."""
    device = values[0].device
    return torch.stack([value.to(device) for value in values])
