"""looplib: write PyTorch training loops from small, composable functions.

    import looplib as ll

    loader = ll.make_loader(train_set, batch_size=64)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    state = ll.init_state(model, optimizer, loader=loader)
    done = ll.after_epochs(10)
    while not done(state):
        for batch in loader(state):
            state, metrics = train_step(state, batch)

`model` is any `nn.Module`, `loss_fn(model, batch)` returns a loss, and `train_set` is any dataset. There is no Trainer:
you write the loop, and everything that a Trainer does is a function that you can use on its own.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from looplib import (
    checkpoint,
    data,
    distributed,
    evaluation,
    gradients,
    grads,
    log,
    losses,
    metrics,
    optim,
    predicates,
    state,
    steps,
    types,
    updates,
)
from looplib._core.hints import unknown as _unknown
from looplib._core.version import __version__ as __version__
from looplib.checkpoint import checkpoint_io
from looplib.data import make_loader
from looplib.evaluation import evaluate, predict
from looplib.gradients import make_grad_fn
from looplib.grads import accumulate
from looplib.log import console, jsonl, plot, progress, tee
from looplib.losses import autocast, next_token_loss
from looplib.metrics import Mean, Window, accuracy, compute
from looplib.optim import chain, clip_by_global_norm, ema, eval_state, optimizer, skip_nonfinite
from looplib.predicates import (
    after_epochs,
    after_signal,
    after_steps,
    at_epoch_end,
    early_stopping,
    every_n_epochs,
    every_n_steps,
    update_best,
)
from looplib.state import bind, copy_state, init_state
from looplib.steps import make_eval_step, make_predict_step, make_train_step
from looplib.types import DonatedStateError, TrainState
from looplib.updates import apply_gradients

if _TYPE_CHECKING:
    from looplib import contrib, debug, schedules, testing, transforms
    from looplib.schedules import warmup_cosine
    from looplib.transforms import compile_step, vmap_step

__all__ = [
    "DonatedStateError",
    "Mean",
    "TrainState",
    "Window",
    "accumulate",
    "accuracy",
    "after_epochs",
    "after_signal",
    "after_steps",
    "apply_gradients",
    "at_epoch_end",
    "autocast",
    "bind",
    "chain",
    "checkpoint",
    "checkpoint_io",
    "clip_by_global_norm",
    "compile_step",
    "compute",
    "console",
    "contrib",
    "copy_state",
    "data",
    "debug",
    "distributed",
    "early_stopping",
    "ema",
    "eval_state",
    "evaluate",
    "evaluation",
    "every_n_epochs",
    "every_n_steps",
    "gradients",
    "grads",
    "init_state",
    "jsonl",
    "log",
    "losses",
    "make_eval_step",
    "make_grad_fn",
    "make_loader",
    "make_predict_step",
    "make_train_step",
    "metrics",
    "next_token_loss",
    "optim",
    "optimizer",
    "plot",
    "predicates",
    "predict",
    "progress",
    "schedules",
    "skip_nonfinite",
    "state",
    "steps",
    "tee",
    "testing",
    "transforms",
    "types",
    "update_best",
    "updates",
    "vmap_step",
    "warmup_cosine",
]

# Rooms that many loops do not use are imported when they, or one of these names in them, are asked for.
_LATE = {
    "contrib": "contrib",
    "debug": "debug",
    "schedules": "schedules",
    "testing": "testing",
    "transforms": "transforms",
    "compile_step": "transforms",
    "vmap_step": "transforms",
    "warmup_cosine": "schedules",
}


def _looked_up(name: str) -> _Any:
    """A late room, or a name in one. Raises AttributeError for another name, and says where it is or what to write."""
    package = _sys.modules[__name__]
    if name in _LATE:
        room = _import_module(f"{__name__}.{_LATE[name]}")
        setattr(package, name, room if name == _LATE[name] else getattr(room, name))
        return getattr(package, name)
    raise _unknown(package, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})


if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _looked_up
