"""What several tests of logs need: a state, a process of Python, and a disk that is full."""

import resource
import subprocess
import sys
from contextlib import contextmanager

import looplib as ll
from looplib.types import TrainState

STATE = TrainState(step=7, epoch=2, batch=3, epoch_length=4, samples=96)
COUNTS = {"step": 7, "epoch": 2, "batch": 3, "samples": 96}


def at(step, samples=0):
    return TrainState(step=step, samples=samples)


def make_train_step(grad_fn, optimizer, *, compile=False, **options):
    """A train step, compiled where `compile` is True or a dict of `ll.compile_step`'s options."""
    step = ll.make_train_step(grad_fn, optimizer, **options)
    return ll.compile_step(step, **({} if compile is True else compile)) if compile else step


def python(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60, **options
    )


@contextmanager
def file_size_limit(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
