"""Data: a state goes in, the batches that are left of its epoch come out."""

from looplib._core.trees import batch_size
from looplib.data._loader import Loader, make_loader
from looplib.data._without_samples import without_samples

__all__ = ["Loader", "batch_size", "make_loader", "without_samples"]
