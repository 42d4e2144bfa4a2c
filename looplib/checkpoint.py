"""Checkpoints that are all there or not there at all.

A save writes into a directory beside the others, syncs it, and renames it: only then do older ones go. So whatever
kills the process, every directory named step-... is whole, and a restore needs no guess at which one to trust.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from looplib import _donation
from looplib._tree_file import (
    DamagedCheckpointError,
    Reader,
    leaves_of,
    read_manifest,
    sync_directory,
    write,
)
from looplib.state import TrainState, copy_state

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_WRITING, _DELETING = ".writing-", ".deleting-"
_COUNTS = ("step", "epoch", "batch", "epoch_length", "samples", "batch_samples", "skipped", "seed")
_WEIGHTS = ("/params/", "/buffers/")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is known of a checkpoint without reading its tensors."""

    path: Path
    step: int
    epoch: int
    batch: int
    samples: int
    metrics: dict[str, float]
    bytes: int
    created: str
    run: str


class Checkpoints(list[Checkpoint]):
    """The checkpoints of a directory, oldest first, as a table to look at."""

    def _rows(self) -> list[list[str]]:
        names = list(dict.fromkeys(name for found in self for name in found.metrics))
        return [["step", "epoch", "batch", "samples", "MB", "created", *names]] + [
            [str(found.step), str(found.epoch), str(found.batch), str(found.samples)]
            + [f"{found.bytes / 1e6:.1f}", found.created]
            + [f"{found.metrics[name]:.5g}" if name in found.metrics else "" for name in names]
            for found in self
        ]

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    def _repr_html_(self) -> str:
        cells = [[f"<td>{cell}</td>" for cell in row] for row in self._rows()]
        return "<table>" + "".join(f"<tr>{''.join(row)}</tr>" for row in cells) + "</table>"


@dataclass(frozen=True, slots=True)
class CheckpointIO:
    """The functions over one directory of checkpoints, which `checkpoint_io` returns.

    Attributes:
        save: `save(state, metrics=None)`, the path of the new checkpoint.
        restore: `restore(state, which="latest", ...)`, the state that was saved, or `state` itself where there is
            none yet; see `checkpoint_io`.
        latest, best: the newest whole checkpoint, and the best by the monitored metric, or None.
        steps: all of them, oldest first; shown as a table.
        delete: `delete(after=step)` removes the later ones, to start again from there.
        wait: returns when a save in the background is done, and raises its error.
    """

    save: Callable[..., Path]
    restore: Callable[..., TrainState]
    latest: Callable[[], Checkpoint | None]
    best: Callable[[], Checkpoint | None]
    steps: Callable[[], Checkpoints]
    delete: Callable[..., None]
    wait: Callable[[], None]


def checkpoint_io(
    directory: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_best: int = 0,
    monitor: str | None = None,
    mode: Literal["min", "max"] = "min",
    keep_every: int | None = None,
    keep: Callable[[Checkpoint], bool] | None = None,
    asynchronous: bool = False,
) -> CheckpointIO:
    """Save and restore states in a directory, so that no moment of a crash can lose the last good one.

    >>> import looplib as ll, tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> ckpt = ll.checkpoint_io(folder.name, keep_last=3, keep_best=1, monitor="eval/loss")
    >>> state = ckpt.restore(ll.init_state(model, optimizer))  # nothing there yet: the state itself
    >>> path = ckpt.save(state.replace(step=500), {"eval/loss": 0.3})
    >>> path.name, ckpt.best().step, ckpt.restore(state).step
    ('step-00000500', 500, 500)
    >>> folder.cleanup()

    `save(state, metrics=None)` writes a checkpoint; with the monitored metric among `metrics` it is a candidate for
    the best. `restore(state, which="latest", *, weights_only=False, names=None, convert=False)` gives the latest
    whole checkpoint, the "best", or that of a step, in the structure of `state` and on its devices. A `state` that
    is bound to a module stays so: the values go into its tensors, and `state` itself is spent. With `weights_only`,
    parameters and buffers are taken and all else stays; `names(name)` chooses among them. `convert` allows
    other dtypes than the state's.

    A checkpoint is kept while one of the policies wants it; the latest and the best never go.

    Args:
        directory: where; it is made at the first save.
        keep_last: how many of the newest to keep; None for all.
        keep_best: how many of the best by `monitor` to keep.
        monitor: name of the metric that the best is judged by.
        mode: whether the best is the smallest ("min") or the largest ("max").
        keep_every: keep those at multiples of this many steps.
        keep: keep those for which this is True, of a `Checkpoint`.
        asynchronous: write in the background. A state of donated steps is copied first; a pure one is not. An
            error is raised by the next `save`, or by `wait`.

    Raises:
        ValueError: by `save`, a monitored metric that is missing or NaN, later checkpoints of another run in the
            directory; by `restore`, a state that the checkpoint does not fit, with the leaves and what differs.
        DamagedCheckpointError: by `restore`, when the one asked for, or every one, is damaged. A damaged latest one
            is named in a warning, and the one before it taken.
        OSError: a full disk, a directory that cannot be written, another process that writes there.

    To read the weights without looplib:
    `safetensors.torch.load_file(path / "tensors.safetensors")["/params/NAME"]`.
    """
    folder = Path(directory).absolute()
    _check_policies(keep_last, keep_best, monitor, mode, keep_every)
    damaged: set[Path] = set()
    run = uuid.uuid4().hex
    lock: Any = None
    writer: ThreadPoolExecutor | None = None
    pending: Future[None] | None = None

    def steps() -> Checkpoints:
        found = Checkpoints()
        for path in folder.iterdir() if folder.is_dir() else ():
            if _NAME.fullmatch(path.name) and path not in damaged:
                try:
                    found.append(_describe(path))
                except DamagedCheckpointError as error:
                    if not path.exists():  # rotated away by the save in the background
                        continue
                    damaged.add(path)
                    warnings.warn(f"{error}; this checkpoint is left out", stacklevel=3)
        found.sort(key=lambda c: (c.step, c.samples, _number(c.path)))
        return found

    def ranked(found: Checkpoints) -> list[Checkpoint]:
        """The candidates for best, best first; of equal ones the earlier."""
        candidates = [c for c in found if monitor in c.metrics]
        sign = 1 if mode == "min" else -1
        return sorted(candidates, key=lambda c: (sign * c.metrics[str(monitor)], c.step))

    def latest() -> Checkpoint | None:
        return found[-1] if (found := steps()) else None

    def best() -> Checkpoint | None:
        if monitor is None:
            raise ValueError("there is no best without a metric: give checkpoint_io(..., monitor=...)")
        return found[0] if (found := ranked(steps())) else None

    def save(state: TrainState, metrics: Mapping[str, float] | None = None) -> Path:
        nonlocal lock, writer, pending
        wait()
        scores = {name: float(value) for name, value in (metrics or {}).items()}
        if monitor is not None and metrics is not None:
            _check_monitor(monitor, scores)
        lock = lock or _Lock(folder)
        found = steps()
        if found and found[-1].step > state.step:
            raise ValueError(
                f"{folder} holds later steps ({', '.join(str(c.step) for c in found if c.step > state.step)}) than "
                f"this state's {state.step}, of another run or of one that went on: to go on with that one, "
                "state = ckpt.restore(state); to go back for good, ckpt.delete(after="
                f"{state.step}); to keep both, use another directory"
            )
        for path in [path for path in damaged if path.exists()]:
            path.rename(path.with_name(f"damaged-{uuid.uuid4().hex[:6]}-{path.name}"))
        target = _free_name(folder, state.step)
        about = {
            "counts": {name: getattr(state, name) for name in _COUNTS},
            "metrics": {name: value if math.isfinite(value) else str(value) for name, value in scores.items()},
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "run": run,
        }

        def work(tree: Any) -> None:
            _write_beside(folder, target, tree, about)
            rotate()

        if not asynchronous:
            work(_tree(state))
            return target
        borrowed = _donation.written_in_place(state)
        tree = _tree(copy_state(state) if borrowed else state)
        writer = writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        pending = writer.submit(work, tree)
        if not borrowed:
            _donation.let_finish(tree, pending)
        return target

    def rotate() -> None:
        found = steps()
        kept = {c.path for c in found[-1:]} | {c.path for c in ranked(found)[: max(keep_best, monitor is not None)]}
        for index, c in enumerate(found):
            last = keep_last is None or index >= len(found) - keep_last
            every = keep_every is not None and c.step % keep_every == 0
            if not (c.path in kept or last or every or (keep is not None and keep(c))):
                _remove(c.path)

    def restore(
        state: TrainState,
        which: Literal["latest", "best"] | int = "latest",
        *,
        weights_only: bool = False,
        names: Callable[[str], bool] | None = None,
        convert: bool = False,
    ) -> TrainState:
        nonlocal run
        wait()
        found = steps()
        if which == "best":
            candidates = ranked(found) if monitor is not None else [best()]  # best() raises then
        elif which == "latest":
            candidates = found[::-1]
        else:
            candidates = [c for c in found[::-1] if c.step == which]
        if not candidates:
            if which == "latest" and not damaged:
                return state
            there = ", ".join(str(c.step) for c in found) or "none"
            bad = f"; damaged: {', '.join(sorted(path.name for path in damaged))}" if damaged else ""
            raise DamagedCheckpointError(f"{folder} has no whole checkpoint for {which!r}; it has {there}{bad}")
        only = (lambda place: _is_weight(place, names)) if weights_only or names else (lambda place: True)
        for chosen in candidates:
            assert chosen is not None
            try:
                restored = _load(chosen.path, state, only, convert)
            except DamagedCheckpointError as error:
                damaged.add(chosen.path)
                if which != "latest" or chosen is candidates[-1]:
                    raise
                warnings.warn(f"{error}; going back to the checkpoint before it", stacklevel=2)
                continue
            if not (weights_only or names):
                run = chosen.run
            return restored
        raise AssertionError("unreachable")

    def delete(*, after: int) -> None:
        """Remove the checkpoints of steps later than `after`."""
        nonlocal lock
        wait()
        lock = lock or _Lock(folder)
        for c in steps():
            if c.step > after:
                _remove(c.path)

    def wait() -> None:
        nonlocal pending
        if pending is not None:
            done, pending = pending, None
            done.result()

    return CheckpointIO(save, restore, latest, best, steps, delete, wait)


def _check_policies(
    keep_last: int | None, keep_best: int, monitor: str | None, mode: str, keep_every: int | None
) -> None:
    counts = ("keep_last", keep_last, 1), ("keep_best", keep_best, 0), ("keep_every", keep_every, 1)
    for name, value, least in counts:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} is {value!r}; give a whole number of at least {least}")
    if mode not in ("min", "max"):
        raise ValueError(f"mode is {mode!r}; give 'min' where the smallest is best, or 'max'")
    if keep_best and monitor is None:
        raise ValueError(f"keep_best={keep_best} needs monitor=, the name of the metric that the best is judged by")


def _check_monitor(monitor: str, scores: Mapping[str, float]) -> None:
    if monitor not in scores:
        raise ValueError(
            f"the monitored metric {monitor!r} is not among the metrics given: {', '.join(scores) or 'none'}"
        )
    if math.isnan(scores[monitor]):
        raise ValueError(f"the monitored metric {monitor!r} is NaN, so this state can be neither best nor not")


def _tree(state: TrainState) -> dict[str, Any]:
    trees = {name: getattr(state, name) for name in ("params", "buffers", "opt_state", "extra")}
    return {name: tree for name, tree in trees.items() if tree is not None}


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[2] or 0)


def _free_name(folder: Path, step: int) -> Path:
    target, number = folder / f"step-{step:08d}", 0
    while target.exists():  # saved at this step before
        number += 1
        target = folder / f"step-{step:08d}.{number}"
    return target


def _describe(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    counts = manifest["counts"]
    return Checkpoint(
        path=path,
        step=counts["step"],
        epoch=counts["epoch"],
        batch=counts["batch"],
        samples=counts["samples"],
        metrics={name: float(value) for name, value in manifest["metrics"].items()},
        bytes=manifest["bytes"],
        created=manifest["created"],
        run=manifest["run"],
    )


def _write_beside(folder: Path, target: Path, tree: Any, about: Mapping[str, Any]) -> None:
    beside = folder / f"{_WRITING}{target.name}-{uuid.uuid4().hex[:6]}"
    try:
        beside.mkdir()
        write(beside, tree, about)
        beside.rename(target)
        sync_directory(folder)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise OSError(
            error.errno,
            f"{target.name} could not be saved: {error.strerror} ({free / 1e6:.1f} MB free there); the checkpoints "
            "before it are untouched",
            str(target),
        ) from error
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _remove(path: Path) -> None:
    # Out of sight in one step, so that a half-deleted one is never taken for a checkpoint.
    aside = path.with_name(f"{_DELETING}{uuid.uuid4().hex[:6]}-{path.name}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


class _Lock:
    """The right to write in a folder, held until the process ends; leftovers of a dead holder are cleared."""

    held: ClassVar[weakref.WeakValueDictionary[Path, _Lock]] = weakref.WeakValueDictionary()

    def __new__(cls, folder: Path) -> _Lock:
        folder.mkdir(parents=True, exist_ok=True)
        key = folder.resolve()
        if (lock := cls.held.get(key)) is None:
            lock = super().__new__(cls)
            lock.acquire(folder)
            cls.held[key] = lock
        return lock

    def acquire(self, folder: Path) -> None:
        import fcntl

        self.file = open(folder / ".lock", "a+")  # noqa: SIM115
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.seek(0)
            raise BlockingIOError(
                f"process {self.file.read().strip() or 'unknown'} is writing checkpoints into {folder} already; give "
                "each run a directory of its own, or end that process"
            ) from None
        self.file.truncate(0)
        self.file.write(str(os.getpid()))
        self.file.flush()
        for path in folder.iterdir():
            if path.name.startswith((_WRITING, _DELETING)):
                shutil.rmtree(path, ignore_errors=True)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


def _is_weight(place: str, names: Callable[[str], bool] | None) -> bool:
    if not place.startswith(_WEIGHTS):
        return False
    return names is None or names(place.split("/", 2)[2].replace("~1", "/").replace("~0", "~"))


def _load(path: Path, state: TrainState, only: Callable[[str], bool], convert: bool) -> TrainState:
    manifest = read_manifest(path)
    reader = Reader(path, manifest)
    whole = only("/")
    tree = _tree(state)
    own = {place: leaf for place, leaf in leaves_of(tree).items() if only(place)}
    _check_fit(path, own, reader, only, convert)
    if whole and state.epoch_length != (length := manifest["counts"]["epoch_length"]):
        raise ValueError(
            f"{path} was made with epoch_length={length}, the state with {state.epoch_length}: the data or the batch "
            "size has changed, so it cannot go on within the epoch. Give the same, or take the weights alone "
            "(weights_only=True)"
        )
    reader.verify([place for place in own if reader.about(place)])
    bound = any(isinstance(leaf, nn.Parameter) for leaf in state.params.values())
    if bound:
        chain = _donation.Chain("ckpt.restore(state)")
        _donation.own(chain, [leaf for leaf in own.values() if isinstance(leaf, Tensor)])
        chain.generation = 1
    runs: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    with torch.no_grad():
        for place, leaf in own.items():
            if not reader.about(place):
                values[place] = reader.value(place)
            elif bound and isinstance(leaf, Tensor):
                values[place] = leaf.copy_(reader.tensor(place))
            elif isinstance(leaf, Tensor):
                loaded = reader.tensor(place, runs, leaf.device).to(leaf.dtype)
                values[place] = loaded.requires_grad_(leaf.requires_grad)
            else:
                values[place] = reader.tensor(place, runs)
    leaves = iter([values.get(place, leaf) for place, leaf in leaves_of(tree).items()])
    trees = torch.utils._pytree.tree_map(lambda _: next(leaves), tree)
    counts = manifest["counts"] if whole else {name: getattr(state, name) for name in _COUNTS}
    return TrainState(**{**dict.fromkeys(("opt_state", "extra")), **trees, **counts})


def _check_fit(
    path: Path, own: Mapping[str, Any], reader: Reader, only: Callable[[str], bool], convert: bool
) -> None:
    unexpected = [place for place in reader if only(place) and place not in own]
    wrong = [f"{place} is in the state, and not in the checkpoint" for place in own if place not in reader]
    wrong += [f"{place} is in the checkpoint, and not in the state" for place in unexpected]
    for place, leaf in own.items():
        if place not in reader:
            continue
        about = reader.about(place)
        if (about is None) != (not isinstance(leaf, Tensor)):
            if about is not None and leaf is None:
                continue  # something that was not there yet
            kinds = "a tensor", type(leaf).__name__
            first, second = kinds if about else (type(reader.value(place)).__name__, "a tensor")
            wrong.append(f"{place} is {first} in the checkpoint, {second} in the state")
        elif about is not None:
            dtype, shapes = str(leaf.dtype).removeprefix("torch."), (tuple(about["shape"]), tuple(leaf.shape))
            if shapes[0] != shapes[1]:
                wrong.append(f"{place} has shape {shapes[0]} in the checkpoint, {shapes[1]} in the state")
            elif about["dtype"] != dtype and not convert:
                wrong.append(f"{place} is {about['dtype']} in the checkpoint, {dtype} in the state (or convert=True)")
        elif None not in (leaf, value := reader.value(place)) and not _same_kind(leaf, value):
            wrong.append(f"{place} is {type(value).__name__} in the checkpoint, {type(leaf).__name__} in the state")
    if wrong:
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(f"{path} does not fit the state:\n  " + "\n  ".join(wrong[:10]) + more)


def _same_kind(one: Any, other: Any) -> bool:
    numbers = (int, float)
    return type(one) is type(other) or (type(one) in numbers and type(other) in numbers)
