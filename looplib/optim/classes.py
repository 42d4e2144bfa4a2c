"""Facts of the classes of `torch.optim`, and of others with the same interface, for checkpoints."""

from __future__ import annotations

from looplib.optim._recipe import Recipe as Recipe
from looplib.optim._update import Plan as Plan
from looplib.optim._update import first_state as first_state
from looplib.optim._update import tiny_like as tiny_like
from looplib.optim._update import without_state as without_state
