"""Better errors: notes about the batch and the layer, memory that runs out, and names that looplib does not have."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import FrozenInstanceError
from functools import partial
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from looplib._core.checks import named

_SIGNS = (
    "out of memory",
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


# looplib, and how torch calls a module's forward
_FOLDED = f"{Path(__file__).parents[1]}{os.sep}", nn.modules.module.__file__


def fold(error: BaseException) -> None:
    """Take the frames between the user's code and where an error was raised out of its traceback.

    They stay if LOOPLIB_FULL_TRACEBACKS is set in the environment.
    """
    if "LOOPLIB_FULL_TRACEBACKS" in os.environ:
        return
    entries, entry, folded = [], error.__traceback__, None
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    for entry in reversed(entries):
        if folded is None or not entry.tb_frame.f_code.co_filename.startswith(_FOLDED):
            entry.tb_next, folded = folded, entry
    error.__traceback__ = folded


def note_batch(error: Exception, batch: Any, layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Add a description of the batch to an error from the user's function or torch, and of the layer that raised it."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if str(frames[-1].f_globals.get("__name__")).startswith("looplib.") or out_of_memory(error):
        return
    note = f"The batch was {described_batch(batch)}."
    names = {id(layer): name for name, layer in layers}
    running = [frame.f_locals["self"] for frame in frames if id(frame.f_locals.get("self")) in names]
    if running:
        layer = running[-1]
        name = names[id(layer)] or "the model itself"
        note += f" The layer was {name}: {type(layer).__name__}({layer.extra_repr()})."
    error.add_note(note)


def described_batch(batch: Any) -> str:
    """Description of a batch in words.

    >>> import torch
    >>> described_batch((torch.zeros(6, 4), {"label": torch.zeros(6, dtype=torch.int64)}))
    'a tuple (float32 (6, 4), a dict {label: int64 (6,)})'
    """
    if isinstance(batch, Tensor):
        device = "" if batch.device.type == "cpu" else f" on {batch.device}"
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}{device}"
    if isinstance(batch, dict):
        members = [f"{key}: {described_batch(value)}" for key, value in batch.items()]
        return f"a dict {{{', '.join(members[:20])}}}"
    if isinstance(batch, (tuple, list)):
        return f"{named(batch)} ({', '.join(map(described_batch, batch[:20]))})"
    return named(batch)


# What to write instead of a name or an assignment that there is not


# What users of torch and of Trainers write -> what to write instead, by what they look at.
_LOOP = "there is no Trainer: write the loop, `for batch in loader(state): state, metrics = train_step(state, batch)`"
_SEEDS = "draws follow from seed= of ll.init_state and ll.make_loader; torch.manual_seed(0) seeds a new model"
OF_AN_OPTIMIZER = {
    "step": "the train step makes the update, `state, metrics = train_step(state, batch)`",
    "zero_grad": "there is nothing to reset: gradients belong to the step that computed them",
    "state_dict": "its state is state.opt_state, which checkpoints hold; for a file that torch reads, "
    "ll.checkpoint.optimizer_state_dict(...)",
    "load_state_dict": "its state is state.opt_state, which ckpt.restore(state) loads; for one of torch's, "
    "ll.checkpoint.load_optimizer_state_dict(...)",
    "param_groups": "the learning rate is a function of the step; to read it, ll.optim.hyperparameters(optimizer, "
    "state), and to change it in a loop, lr=ll.optim.injected(...)",
    "lr": "ll.optim.hyperparameters(optimizer, state) gives the learning rate of the next update",
}
OF_A_STATE = {
    "model": "the model is yours; ll.bind(model, state) copies the state's values into it",
    "optimizer": "the optimizer is what ll.optimizer returned; its moments are state.opt_state",
    "loss": "it is among the metrics, `state, metrics = train_step(state, batch)`",
    "lr": "ll.optim.hyperparameters(optimizer, state) gives the learning rate of the next update",
    "global_step": "it is state.step",
    "parameters": "they are state.params, name -> tensor",
    "state_dict": "ll.checkpoint.state_dict(model, state) gives the model's",
    "load_state_dict": "ckpt.restore(state) loads a checkpoint; ll.checkpoint.load_state_dict(...) weights",
}
OF_A_CHECKPOINT_IO = {"load": "ckpt.restore(state) reads the latest checkpoint"}
OF_LOOPLIB = {
    "Trainer": _LOOP,
    "fit": _LOOP,
    "train": _LOOP,
    "TrainingArguments": "each setting goes to the function that it concerns; recipes/FROM_TRANSFORMERS.md has them all",
    "Callback": "what a callback does is a line of the loop, and when is a predicate, `if ll.every_n_steps(100)(state):`",
    "DataLoader": "ll.make_loader makes a loader, also of a DataLoader",
    "load": "it is ll.checkpoint_io(folder).restore(state)",
    "save": "it is ll.checkpoint_io(folder).save(state)",
    "clip_grad_norm_": "it is ll.clip_by_global_norm",
    "gradient_accumulation": "it is ll.accumulate",
    "GradScaler": "it is ll.optim.dynamic_loss_scale(optimizer)",
    "amp": "ll.autocast(loss_fn) computes the loss in mixed precision",
    "seed_everything": _SEEDS,
    "set_seed": _SEEDS,
    "AdamW": "write ll.optimizer(torch.optim.AdamW, lr=1e-3)",
    "SGD": "write ll.optimizer(torch.optim.SGD, lr=0.1)",
    "train_step": "ll.make_train_step makes one",
    "loader": "ll.make_loader makes one",
}


def explain(cls: type, owner: str, advice: Mapping[str, str], assignment: str = "") -> None:
    """Make the errors for these missing attributes of a class say what to write instead, and those for assignments.

    The class has none of them, so that neither editors nor `help` offer them. Python calls `__getattr__` for a missing
    attribute alone; with it, reading one that is there takes 0.01 us longer. `assignment` is the advice of a frozen
    record, in which {name} is the attribute's.
    """

    def __getattr__(record: Any, name: str) -> NoReturn:
        instead = f": {advice[name]}" if name in advice else ""
        raise AttributeError(f"{owner} has no attribute {name!r}{instead}", name=name, obj=record)

    def __setattr__(record: Any, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(
            f"cannot assign to {name!r}: {owner} does not change; {assignment.format(name=name)}"
        )

    cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
    if assignment:
        cls.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]


def explain_names(package: ModuleType, late: Mapping[str, str], unlisted: Collection[str]) -> None:
    """Make a package say where a name is that it does not have, and import late rooms at their first use.

    `late` maps a name of the package to the room that it is, or that has it. `unlisted` names are left out of `dir`.
    """

    def __getattr__(name: str) -> Any:
        if name in late:
            room = import_module(f"{package.__name__}.{late[name]}")
            setattr(package, name, room if name == late[name] else getattr(room, name))
            return getattr(package, name)
        advice = f": {OF_LOOPLIB.get(name, 'recipes/WORDS.md and the search of the site know the words of other libraries')}"
        # Names with an underscore are asked for by imports, and this imports the late rooms.
        for room in () if name.startswith("_") else map(partial(getattr, package), package.__all__):
            if isinstance(room, ModuleType) and name in room.__all__:
                advice = f": it is ll.{room.__name__.rpartition('.')[2]}.{name}"
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}{advice}", name=name, obj=package)

    vars(package).update(
        __getattr__=__getattr__, __dir__=lambda: sorted({*vars(package), *late}.difference(unlisted))
    )
