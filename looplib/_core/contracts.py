"""Records that are public in `looplib.types`, and that `_core` needs as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

Check = tuple[Callable[..., None], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Facts of a whole batch, as a call for one part of it is told. The caller adds up the gradients of all parts.

    Attributes:
        samples: samples in all parts, if known. Scalar losses are divided by this number at once.
        normalizer: divisor of each part's summed loss, which keeps half-precision gradients as small as those of a
            mean. None for the first part, which chooses it: `samples`, or its own weight (at least 1), and returns it
            (`Gradients.normalizer`).
        local: True if the caller adds up the ranks' gradients itself.
        wrapper: name of the function that is called for each part by itself; "" if one call makes all passes.
    """

    samples: int | None = None
    normalizer: Tensor | float | None = None
    local: bool = False
    wrapper: str = ""

    def normalizer_for(self, samples: int) -> Tensor | float:
        """Its normalizer, or the one that a first part with this number of samples chooses."""
        if self.normalizer is not None:
            return self.normalizer
        return max(samples if self.samples is None else self.samples, 1)


class Transformed(NamedTuple):
    """Result of a first half.

    Attributes:
        grads: the gradients, changed or not.
        state: the part's state, kept even if the update is skipped. Changed entries go into a new dict.
        apply: False to decide against the update: a bool, or a 0-dim bool tensor. In a partition, one for each label.
        carry: any value for the part's own second half, such as a norm.
        metrics: name -> scalar or metric record, reported with the metrics of the step. A `Mean` is kept as it is, without a
            copy of its tensors.
        on_skip: functions with their arguments, called if some flag is not set. They may raise.
    """

    grads: Any
    state: Any = None
    apply: Any = True
    carry: Any = None
    metrics: Mapping[str, Any] = {}
    on_skip: Sequence[Check] = ()
