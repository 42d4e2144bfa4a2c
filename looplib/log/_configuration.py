"""Configuration of a run: what it was made with, found rather than listed."""

from __future__ import annotations

import inspect
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from looplib._core.ranks import world_size
from looplib._core.records import described
from looplib._core.secrets import without_secrets
from looplib.state import described_model
from looplib.types import TrainState, check_state

# Packages whose version matters to a run that has imported them.
_PACKAGES = (
    "looplib",
    "torch",
    "accelerate",
    "datasets",
    "numpy",
    "peft",
    "sklearn",
    "timm",
    "tokenizers",
    "torchvision",
    "transformers",
)


def configuration(state: TrainState, **more: Any) -> dict[str, Any]:
    """Configuration of a run, without listing it: optimizer, loaders, model, seed, sizes, versions and git commit.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    >>> loader = ll.make_loader(torch.ones(8, 2), batch_size=4, seed=3)
    >>> state = ll.init_state(model, optimizer, loader=loader)
    >>> settings = ll.log.configuration(state, args={"warmup": 100})
    >>> settings["optimizer"]["SGD"]["lr"], settings["loader"]["batch_size"], settings["model"]
    (0.1, 4, {'class': 'Linear', 'parameters': 3})
    >>> settings["args"], {"looplib", "python", "torch"} <= settings["versions"].keys()
    ({'warmup': 100}, True)

    A state knows the optimizer, the model and the loaders that its `init_state` was given (`state.run`).
    The model's part is its class, its number of parameters and its `config` (of transformers, a dataclass, a dict or a namespace), and
    `peft_config` if it has one. The commit is that of the folder of the program, with "-dirty" after it if tracked
    files have changed; without git or a repository there is none.

    In the command and in `more`, `***` stands for values whose names say that they are a token, key or password, and
    for the passwords of URLs and tokens that begin as well-known ones do (`hf_`, `sk-`). Any other secret is stored,
    so pass secrets in environment variables, which are not.

    Args:
        state: a state of the run.
        **more: further settings by name, such as `args=args` of argparse. Modules, optimizers and loaders describe
            themselves.

    Returns:
        Nested dicts of plain values, such as JSON holds.
    """
    check_state(state, "configuration(state)")
    run = state.run
    loaders = {f"loader {n}" if n > 1 else "loader": loader for n, loader in enumerate(run.known_loaders, 1)}
    settings = {"optimizer": _with_defaults(run.optimizer or {}), "model": run.model, **loaders}
    commit = git_commit()
    return {
        **{name: description for name, description in settings.items() if description},
        "seed": state.seed,
        "epoch_length": state.epoch_length,
        "ranks": world_size(),
        "versions": _versions(),
        "device": _device(),
        "command": " ".join([Path(sys.argv[0]).name, *_command_without_secrets(sys.argv[1:])]),
        **({"git_commit": commit} if commit else {}),
        **{
            name: described_model(value) if isinstance(value, nn.Module) else without_secrets(described(value), name)
            for name, value in more.items()
        },
    }


def _with_defaults(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Description of an optimizer, with the arguments of its class that were not given."""
    entries = {
        name: _with_defaults(value) if isinstance(value, Mapping) else value for name, value in optimizer.items()
    }
    module, _, name = str(optimizer.get("class")).rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    if not isinstance(cls, type):
        return entries
    arguments = inspect.signature(cls).parameters.values()
    defaults = {a.name: described(a.default) for a in arguments if a.default not in (a.empty, None)}
    return {"class": entries["class"], **defaults, **entries}


def _device() -> str:
    """Name of the accelerator, as its driver gives it, or its type; else "cpu"."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "cpu"
    return str(getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)())


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    versions |= {name: str(sys.modules[name].__version__) for name in _PACKAGES if name in sys.modules}
    return dict(sorted(versions.items()))


def git_commit() -> str | None:
    """Commit of the program's folder, with "-dirty" if it has changes; None without one."""
    program: Mapping[str, Any] = vars(sys.modules["__main__"])
    folder = Path(program.get("__file__") or ".").absolute()
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            command, cwd=folder if folder.is_dir() else folder.parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _command_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command, with *** in place of values whose names say that they are secret.

    >>> _command_without_secrets(["--lr", "0.1", "--hf-token", "abc", "wandb.api_key=abc", "--pad-token", "<pad>"])
    ['--lr', '0.1', '--hf-token', '***', 'wandb.api_key=***', '--pad-token', '<pad>']
    """
    shown, name = [], ""
    for argument in arguments:
        before, equals, value = argument.partition("=")
        if name and not argument.startswith("--"):
            shown.append(without_secrets(argument, name))
        else:
            shown.append(f"{before}={without_secrets(value, before)}" if equals else without_secrets(argument))
        name = argument if argument.startswith("-") and not equals else ""
    return shown
