"""Values that trackers take: numbers and texts, histograms, and images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from looplib.log._sinks import plain_values


def tracked_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the clients of trackers take them.

    Numbers, bools and strs stay. A tensor with one dimension becomes an array of its finite elements, for a histogram,
    and is left out if there are none. One with three, (channels, height, width), becomes an array of bytes,
    (height, width, channels), or (height, width) for one channel.
    """
    tracked: dict[str, Any] = {}
    for name, value in values.items():
        shape = tuple(getattr(value, "shape", ()))
        if not shape:
            tracked |= plain_values({name: value})
        elif len(shape) == 1:
            elements = torch.as_tensor(value).detach().cpu().double()
            elements = elements[elements.isfinite()]
            if len(elements):
                tracked[name] = elements.numpy()
        elif len(shape) == 3 and shape[0] in (1, 3, 4):
            image = torch.as_tensor(value).detach().cpu()
            # Trackers may rescale floats by their range; uint8 values are used unchanged.
            pixels = image if image.dtype == torch.uint8 else (image.float().clamp(0, 1) * 255).to(torch.uint8)
            tracked[name] = pixels.permute(1, 2, 0).squeeze(-1).numpy()
        else:
            raise TypeError(
                f"{name!r} is a {type(value).__name__} of shape {shape}; one dimension makes a histogram, and (1, 3 "
                "or 4 channels, height, width) an image: for a histogram of all its elements give .flatten()"
            )
    return tracked
