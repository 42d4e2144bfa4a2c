"""torch's own lists of modules and optimizers, which its test suite runs through."""

import functools
import os
from contextlib import contextmanager

import hypothesis
import torch


@contextmanager
def _as_before():
    """Undo what torch's test suite sets for the whole process when it is imported."""
    variables, profile = dict(os.environ), hypothesis.settings.get_current_profile_name()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        hypothesis.settings.load_profile(profile)
        torch.backends.__allow_nonbracketed_mutation_flag = True


@functools.cache
def modules():
    with _as_before():
        from torch.testing._internal.common_modules import module_db
    return {info.name: info for info in module_db}


@functools.cache
def optimizers():
    with _as_before():
        from torch.testing._internal.common_optimizers import optim_db
    return {info.optim_cls.__name__: info for info in optim_db}
