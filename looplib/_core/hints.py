"""Hints for names that looplib does not have: where a name is, or what to write instead."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

import torch

_LOOP = "there is no Trainer: write the loop, `for batch in loader(state): state, metrics = train_step(state, batch)`"
_SEEDS = "draws follow from seed= of ll.init_state and ll.make_loader; torch.manual_seed(0) seeds a new model"
_CSV = "write ll.jsonl(path), and pandas.DataFrame(ll.log.read_columns(path)).to_csv(...) for a CSV file of it"
_LAMBDA = "a schedule is a function of the step, lr=lambda step: ..."
_LOSS = "looplib takes any loss of torch or your own, in loss_fn(model, batch)"

# Names of torch, torchmetrics, transformers and Lightning -> what to write instead.
_INSTEAD = {
    "Trainer": _LOOP,
    "fit": _LOOP,
    "train": _LOOP,
    "TrainingArguments": "each setting goes to the function that it concerns; recipes/FROM_TRANSFORMERS_NAMES.md has them all",
    "Callback": "what a callback does is a line of the loop, and when is a predicate, `if ll.every_n_steps(100)(state):`",
    "DataLoader": "ll.make_loader makes a loader, also of a DataLoader",
    "RandomSampler": "it is ll.data.shuffled, the default order of ll.make_loader",
    "load": "it is ll.checkpoint_io(folder).restore(state)",
    "save": "it is ll.checkpoint_io(folder).save(state)",
    "ModelCheckpoint": "it is ll.checkpoint_io",
    "EarlyStopping": "it is ll.early_stopping",
    "EarlyStoppingCallback": "it is ll.early_stopping",
    "LearningRateMonitor": "log ll.optim.hyperparameters(optimizer, state), the rates of the next update",
    "clip_grad_norm_": "it is ll.clip_by_global_norm",
    "clip_grad_value_": "it is ll.optim.clip_by_value",
    "gradient_accumulation": "it is ll.accumulate",
    "GradScaler": "it is ll.optim.dynamic_loss_scale(), a part of ll.chain",
    "apply_if_finite": "it is ll.skip_nonfinite(), a part of ll.chain",
    "scale_loss": "it is ll.optim.dynamic_loss_scale(), a part of ll.chain: the train step hands the scale to the gradients",
    "GradRequest": "a gradient function takes **request and hands it on, grad_fn(state, batch, **request)",
    "wrapper": "a gradient function of your own needs none; functools.wraps(grad_fn) lets accumulate count samples as what it wraps",
    "amp": "ll.autocast(loss_fn) computes the loss in mixed precision",
    "seed_everything": _SEEDS,
    "set_seed": _SEEDS,
    "train_step": "ll.make_train_step makes one",
    "loader": "ll.make_loader makes one",
    "AveragedModel": "it is ll.ema, or ll.optim.swa",
    "EMA": "it is ll.ema",
    "Accuracy": "it is ll.accuracy",
    "AUROC": "it is ll.metrics.AUC",
    "F1Score": "it is ll.metrics.ConfusionMatrix.macro_f1",
    "MeanSquaredError": "it is ll.metrics.mse",
    "MeanAbsoluteError": "it is ll.metrics.mae",
    "CrossEntropyLoss": f"{_LOSS}: torch.nn.functional.cross_entropy(model(x), y)",
    "cross_entropy": f"{_LOSS}: torch.nn.functional.cross_entropy(model(x), y)",
    "mse_loss": f"{_LOSS}: torch.nn.functional.mse_loss(model(x), y)",
    "checkpoint": "it is ll.losses.recompute",
    "init_process_group": "it is ll.distributed.setup",
    "get_rank": "it is ll.distributed.rank",
    "get_world_size": "it is ll.distributed.world_size",
    "compile": "it is ll.compile_step",
    "vmap": "it is ll.vmap_step",
    "WandbLogger": "it is ll.log.tracker",
    "TensorBoardLogger": "it is ll.log.tracker",
    "SummaryWriter": "it is ll.log.tracker",
    "CSVLogger": _CSV,
    "csv": _CSV,
    "ConstantLR": "it is ll.schedules.constant",
    "CosineAnnealingLR": "it is ll.schedules.cosine",
    "CosineAnnealingWarmRestarts": "it is ll.schedules.cosine_restarts",
    "ChainedScheduler": "it is ll.schedules.join",
    "CyclicLR": f"{_LAMBDA}, with the position in the cycle, step % (rise + fall)",
    "ExponentialLR": "it is ll.schedules.exponential",
    "LambdaLR": _LAMBDA,
    "LinearLR": "it is ll.schedules.linear",
    "MultiStepLR": "it is ll.schedules.multistep_decay",
    "MultiplicativeLR": _LAMBDA,
    "OneCycleLR": "it is ll.schedules.one_cycle",
    "PolynomialLR": "it is ll.schedules.polynomial",
    "ReduceLROnPlateau": "write lr=ll.optim.inject(...), and ll.optim.reduce_on_plateau(state, scores) after each evaluation",
    "SequentialLR": "it is ll.schedules.join",
    "StepLR": "it is ll.schedules.step_decay",
    "get_constant_schedule": "it is ll.schedules.constant",
    "get_constant_schedule_with_warmup": "it is ll.schedules.warmup",
    "get_cosine_schedule_with_warmup": "it is ll.warmup_cosine",
    "get_cosine_with_hard_restarts_schedule_with_warmup": "it is ll.schedules.cosine_restarts",
    "get_inverse_sqrt_schedule": "it is ll.schedules.inverse_sqrt",
    "get_linear_schedule_with_warmup": "it is ll.schedules.warmup_linear",
    "get_polynomial_decay_schedule_with_warmup": "it is ll.schedules.polynomial",
    "get_wsd_schedule": "it is ll.schedules.warmup_stable_decay",
}


def in_room(name: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a room, which explains names that it does not have.

    A module is in `sys.modules` under its name from the first line of its code on.
    """

    def __getattr__(missing: str) -> NoReturn:
        raise unknown(sys.modules[name], missing)

    return __getattr__


def unknown(module: ModuleType, name: str) -> AttributeError:
    """Error for a name that a module does not have, with a hint."""
    # Imports ask for names with an underscore.
    advice = "" if name.startswith("_") else f": {_hint(module, name)}"
    return AttributeError(f"module {module.__name__!r} has no attribute {name!r}{advice}", name=name, obj=module)


def _hint(module: ModuleType, name: str) -> str:
    places = _places()
    if name in places:
        return f"it is {places[name]}"
    if name in _INSTEAD:
        return _INSTEAD[name]
    classes = {known.lower(): known for known, cls in vars(torch.optim).items() if isinstance(cls, type)}
    if (cls := classes.get(name.lower())) is not None:
        return f"write ll.optimizer(torch.optim.{cls}, lr={'0.1' if cls == 'SGD' else '1e-3'})"
    # The same words in another order, or letters of another case, or one that is nearly alike.
    words = {_words(known): known for known in reversed(places)}
    public = getattr(module, "__all__", ())
    near = words.get(_words(name)) or next(iter(difflib.get_close_matches(name, public, 1, 0.8)), None)
    if near:
        return f"it is {places.get(near, f'{_called(module)}.{near}')}"
    return "recipes/WORDS.md and the search of the site know the words of other libraries"


def _words(name: str) -> tuple[str, ...]:
    return tuple(sorted(name.lower().split("_")))


def _places() -> dict[str, str]:
    """Address of each public name: at the top, or in a room."""
    # Not imported: the package imports this file.
    package = sys.modules["looplib"]
    rooms = [room for name in package.__all__ if isinstance(room := getattr(package, name), ModuleType)]
    places = {name: f"{_called(room)}.{name}" for room in rooms for name in room.__all__}
    return places | {name: f"ll.{name}" for name in package.__all__}


def _called(module: ModuleType) -> str:
    return module.__name__.replace("looplib", "ll", 1)
