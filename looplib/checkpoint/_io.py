"""Checkpoints that are all there or not there at all: which are kept, and how they fit a state.

A state is taken apart into tensors and plain values by their places (`_tree_file`), put into the directory as a whole
(`_directory`), and only then do older ones go. A restore goes the way back, into the structure of a state that the
code has made, after each leaf was found to fit it.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import hashlib
import html
import math
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import ownership as _donation
from looplib._core.checks import check_optional_count
from looplib._core.collective import Together, finish_first, together
from looplib._core.ranks import is_sharded
from looplib._core.torch_private import pytree
from looplib.checkpoint._directory import Lock, beside, free_name, in_words, number_of, put, put_aside, remove
from looplib.checkpoint._format import (
    MANIFEST,
    DamagedCheckpointError,
    Parts,
    Reader,
    check_files,
    leaves_of,
    local,
    read_manifest,
    sound,
)
from looplib.types import TrainState

_COUNTS = ("step", "epoch", "batch", "epoch_length", "samples", "batch_samples", "batch_steps", "seed")


_WEIGHTS = ("/params/", "/buffers/")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is known of a checkpoint without reading its tensors.

    Attributes:
        path: its directory.
        step, epoch, batch, samples: where the run stood.
        metrics: those given to `save`.
        bytes: of the file that holds its tensors.
        parts: bytes of the tensors in params, buffers, opt_state and extra, where there are any.
        created: in UTC.
    """

    path: Path
    step: int
    epoch: int
    batch: int
    samples: int
    metrics: dict[str, float]
    bytes: int
    parts: dict[str, int]
    created: str


class Checkpoints(list[Checkpoint]):
    """The checkpoints of a directory, oldest first, as a table to look at."""

    def _rows(self) -> list[list[str]]:
        parts = list(dict.fromkeys(name for found in self for name in found.parts))
        names = list(dict.fromkeys(name for found in self for name in found.metrics))
        return [["step", "epoch", "batch", "samples", "saved", "size", *parts, *names]] + [
            [str(found.step), str(found.epoch), str(found.batch), str(found.samples)]
            + [found.created.replace("T", " ").replace("Z", " UTC"), in_words(found.bytes)]
            + [in_words(found.parts[name]) if name in found.parts else "" for name in parts]
            + [f"{found.metrics[name]:.5g}" if name in found.metrics else "" for name in names]
            for found in self
        ]

    def __repr__(self) -> str:
        if not self:
            return "no checkpoints"
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    def _repr_html_(self) -> str:
        if not self:
            return "no checkpoints"
        head, *body = [[html.escape(cell) for cell in row] for row in self._rows()]
        lines = [f"<th>{'</th><th>'.join(head)}</th>"] + [f"<td>{'</td><td>'.join(row)}</td>" for row in body]
        return f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>"


@dataclass(frozen=True, slots=True)
class CheckpointIO:
    """The functions over one directory of checkpoints, which `checkpoint_io` returns.

    Attributes:
        save: `save(state, metrics=None)`, the path of the new checkpoint, where it will be if it is written in the
            background.
        restore: `restore(state, which="latest", ...)`, the state that was saved, or `state` itself where there is
            none yet; see `checkpoint_io`.
        latest, best: the newest whole checkpoint, and the best by the monitored metric, or None.
        steps: all of them, oldest first; shown as a table.
        delete: `delete(after=step)` removes the later ones, to start again from there.
        wait: returns when a save in the background is done, on all ranks, and raises its error.

    Where there are several ranks, each of these is called by all.
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
    other dtypes than the state's. For checkpoints of the weights alone, which no run can go on from,
    `save(state.replace(opt_state=None))`; they are restored with `weights_only`.

    A checkpoint is kept while one of the policies wants it; the latest and the best never go.

    Args:
        directory: where; it is made at the first save.
        keep_last: how many of the newest to keep; None for all.
        keep_best: how many of the best by `monitor` to keep.
        monitor: name of the metric that the best is judged by.
        mode: whether the best is the smallest ("min") or the largest ("max").
        keep_every: keep those at multiples of this many steps.
        keep: keep those for which this is True, of a `Checkpoint`.
        asynchronous: write in the background. A state of donated steps, or bound to a module, is copied first; a
            pure one is not. An error is raised by the next `save`, `restore`, `delete` or `wait`; one that none of
            them met is printed when the process ends, which finishes the last save before.

    Raises:
        ValueError: by `save`, a monitored metric that is missing or NaN, later checkpoints of another run in the
            directory, ranks whose states differ; by `restore`, a state that the checkpoint does not fit, with the
            leaves and what differs, or a best or a step that is not there.
        TypeError: by `save`, a leaf that is neither a dense tensor nor a plain value, or a DTensor of partial sums.
        DamagedCheckpointError: by `restore`, when the one asked for, or every one, is damaged. A damaged latest one
            is named in a warning, and the one before it taken; the next save puts it aside as damaged-...
        CheckpointVersionError: a checkpoint there was written by a newer looplib.
        OSError: a full disk, a directory that cannot be written, another process that writes there; the
            checkpoints before it are untouched.

    Under torchrun every rank makes the same calls. The first chooses among the checkpoints, applies the policies,
    and writes a state that all ranks hold whole, such as that of DDP (of buffers and metrics that differ, its own).
    A state of DTensors, as FSDP2's `fully_shard` and tensor parallel plans make them, is written by all, each rank
    its part: once all parts are on disk, the checkpoint is there. The directory must be one that all ranks see. What
    fails on one rank raises on all, with the rank in the message; `save` and `wait` return when the checkpoint is
    whole. Counts and plain values must be the same on all ranks.

    A checkpoint of any number of ranks is restored by any other: sharded into sharded over another mesh, into DDP or
    one process, and the other way. Each rank reads the chunks that hold some of its numbers, those whole, and
    compares their checksums; of the other chunks it knows that no file is cut.

    A checkpoint is a directory of two files. To read the weights without looplib:
    `safetensors.torch.load_file(path / "tensors.safetensors")["/params/NAME"]`. That file holds a tensor as it is,
    or, where safetensors cannot say what it is (a view, a rarer dtype), its bytes under the name that
    `manifest.json` gives as `data`, together with its dtype, shape, stride and offset in bytes.
    DTensors lie in `tensors-RANK.safetensors`, and `manifest.json` has the offsets and sizes of their chunks as
    `shards`.
    """
    folder = Path(directory).absolute()
    _check_policies(keep_last, keep_best, monitor, mode, keep_every)
    known: dict[tuple[str, int], Checkpoint] = {}  # by name and time: what was renamed into place stays as it is
    damaged: set[Path] = set()
    lock: Lock | None = None
    writer: ThreadPoolExecutor | None = None
    writers: tuple[Together, Together] | None = None  # the ranks, and the same for the threads that write
    pending: Future[None] | None = None

    def listing() -> Checkpoints:
        """On the first rank alone, as all that only it does."""
        nonlocal known
        found: dict[tuple[str, int], Checkpoint] = {}
        for path in folder.iterdir() if folder.is_dir() else ():
            if number_of(path) and path not in damaged:
                try:
                    key = path.name, path.stat().st_mtime_ns
                    found[key] = known.get(key) or _describe(path)
                except (DamagedCheckpointError, FileNotFoundError) as error:
                    if not path.exists():  # rotated away meanwhile, for one that the listing may not hold yet
                        return listing()
                    damaged.add(path)
                    warnings.warn(f"{error}; this checkpoint is left out", stacklevel=5)
        known = found
        return Checkpoints(sorted(found.values(), key=lambda c: number_of(c.path)))

    def ranked(found: Checkpoints) -> list[Checkpoint]:
        """The candidates for best, best first; of equal ones the earlier."""
        candidates = [c for c in found if not math.isnan(c.metrics.get(str(monitor), math.nan))]
        sign = 1 if mode == "min" else -1
        return sorted(candidates, key=lambda c: sign * c.metrics[str(monitor)])

    def steps() -> Checkpoints:
        return together().on_first(listing)

    def latest() -> Checkpoint | None:
        return found[-1] if (found := steps()) else None

    def best() -> Checkpoint | None:
        if monitor is None:
            raise ValueError(_NO_MONITOR)
        return found[0] if (found := ranked(steps())) else None

    def save(state: TrainState, metrics: Mapping[str, float] | None = None) -> Path:
        nonlocal writer, writers, pending
        wait()
        ranks = together()
        copied = asynchronous and _donation.written_in_place(state)

        def taken_apart() -> tuple[Parts, dict[str, Any]]:
            scores = {name: _number_of(name, value) for name, value in (metrics or {}).items()}
            if monitor is not None and metrics is not None:
                _check_monitor(monitor, scores)
            parts = Parts(_tree(state))
            # DTensors are always copied: nearly all are those of donated steps, which FSDP2 asks for.
            if asynchronous and (parts.sharded or (copied and ranks.first)):
                parts.copy()
            return parts, {
                "counts": {**{name: getattr(state, name) for name in _COUNTS}, "seed": _written(state.seed)},
                "metrics": {name: value if math.isfinite(value) else str(value) for name, value in scores.items()},
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }

        parts, about = ranks.on_each(taken_apart)
        if ranks.several:
            _check_same(ranks, {**about["counts"], **parts.description()})
        writing, target = ranks.on_first(lambda: begin(state.step))
        held = lock

        def work(ranks: Together) -> None:
            if parts.sharded:
                from looplib.checkpoint import _shards  # a second or two to import, for those who have shards

                _shards.put(ranks, writing, target, parts, about, not asynchronous)
            else:
                ranks.on_first(lambda: put(writing, target, parts, about, not asynchronous))
            ranks.on_first(rotate)

        if not asynchronous:
            work(ranks)
            return target
        if writers is None or writers[0] is not ranks:
            writers = ranks, ranks.another()
        writer = writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        threads = writers[1]
        pending = writer.submit(_in_background, lambda: work(threads), held)
        finish_first(pending)
        if not (copied or parts.sharded) and ranks.first:
            _donation.let_finish(parts.storages, pending)
        return target

    def begin(step: int) -> tuple[Path, Path]:
        """Where to write, and where it is to be then, once it is known that this may be written."""
        nonlocal lock
        lock = Lock(folder)
        found = listing()
        if found and found[-1].step > step:
            raise ValueError(
                f"{folder} holds later steps ({', '.join(str(c.step) for c in found if c.step > step)}) than "
                f"this state's {step}, of another run or of one that went on: to go on with that one, "
                "state = ckpt.restore(state); to go back for good, ckpt.delete(after="
                f"{step}); to keep both, use another directory"
            )
        for path in list(damaged):
            put_aside(path)
            damaged.discard(path)
        target = free_name(folder, step)
        return beside(folder, target), target

    def rotate() -> None:
        found = listing()
        kept = {c.path for c in found[-1:]} | {c.path for c in ranked(found)[: max(keep_best, monitor is not None)]}
        for index, c in enumerate(found):
            last = keep_last is None or index >= len(found) - keep_last
            every = keep_every is not None and c.step % keep_every == 0
            if not (c.path in kept or last or every or (keep is not None and keep(c))):
                remove(c.path)

    def restore(
        state: TrainState,
        which: Literal["latest", "best"] | int = "latest",
        *,
        weights_only: bool = False,
        names: Callable[[str], bool] | None = None,
        convert: bool = False,
    ) -> TrainState:
        wait()
        ranks = together()
        only = (lambda place: _is_weight(place, names)) if weights_only or names else (lambda place: True)

        def choose() -> Path | None:
            found = listing()
            if which == "best":
                if monitor is None:
                    raise ValueError(_NO_MONITOR)
                candidates = ranked(found)[:1]
            else:
                candidates = [c for c in found[::-1] if which in ("latest", c.step)]
            if candidates:
                return candidates[0].path
            if which == "latest" and not damaged:
                return None
            raise _nothing_for(which, folder, found, damaged, monitor)

        def is_damaged(path: Path) -> bool:
            """Or rotated away meanwhile, by the process that trains."""
            if path.exists():
                damaged.add(path)
            return path in damaged

        while (path := ranks.on_first(choose)) is not None:
            try:
                return ranks.on_each(functools.partial(_load, path, state, only, convert))()
            except DamagedCheckpointError as error:  # noqa: PERF203, once a checkpoint
                if ranks.on_first(functools.partial(is_damaged, path)):
                    if which != "latest":
                        raise
                    warnings.warn(f"{error}; going back to the checkpoint before it", stacklevel=2)
        return state

    def delete(*, after: int) -> None:
        """Remove the checkpoints of steps later than `after`."""
        wait()

        def work() -> None:
            nonlocal lock
            lock = Lock(folder)
            for c in listing():
                if c.step > after:
                    remove(c.path)

        together().on_first(work)

    def wait() -> None:
        nonlocal pending
        if pending is not None:
            concurrent.futures.wait([pending])  # an interrupt strikes here, and the save goes on
            done, pending = pending, None
            _unheard.discard(done.exception())
            done.result()

    return CheckpointIO(save, restore, latest, best, steps, delete, wait)


_NICE = 10


_NO_MONITOR = "there is no best without a metric: give checkpoint_io(..., monitor=...)"


_unheard: set[BaseException | None] = set()  # errors of background saves that no save or wait has raised yet


def _in_background(work: Callable[[], None], lock: Lock | None) -> None:
    """The lock is held till the work is done, though its CheckpointIO be gone."""
    if sys.platform == "linux":  # where a thread has a priority of its own: the steps beside it go first
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    try:
        work()
    except BaseException as error:
        _unheard.add(error)
        raise


@atexit.register  # which comes after the background threads are done
def _report_unheard() -> None:
    for error in _unheard:
        print(f"looplib: the last save failed: {error}", file=sys.stderr)


def _nothing_for(which: Any, folder: Path, found: Checkpoints, damaged: set[Path], monitor: str | None) -> ValueError:
    whole = ", ".join(str(c.step) for c in found if c.path not in damaged) or "none"
    bad = ", ".join(sorted(path.name for path in list(damaged)))
    if which == "best":
        return ValueError(f"no checkpoint in {folder} was saved with the metric {monitor!r}; steps there: {whole}")
    kind = DamagedCheckpointError if bad else ValueError
    asked = f"no checkpoint of step {which}" if type(which) is int else "no whole checkpoint"
    if which != "latest" and type(which) is not int:
        asked = f"no {which!r} (give 'latest', 'best' or a step)"
    return kind(f"{folder} has {asked}; steps there: {whole}" + (f"; damaged: {bad}" if bad else ""))


def _check_same(ranks: Together, leaves: dict[str, Any]) -> None:
    """Raise on all ranks where a count, a plain value or what a tensor is differs on one."""
    text = repr(sorted(leaves.items())).encode()
    if len(set(ranks.gather(hashlib.sha256(text).digest()))) == 1:
        return
    first, *others = ranks.gather(leaves)
    for rank, other in enumerate(others, 1):
        places = [place for place in {**first, **other} if first.get(place) != other.get(place)]
        if places:
            differences = [f"{p} is {_brief(first, p)} on rank 0, {_brief(other, p)} on rank {rank}" for p in places]
            more = f"\n  and {len(places) - 10} more" if len(places) > 10 else ""
            raise ValueError(
                "the state differs between ranks, so it is not one state to save:\n  "
                + "\n  ".join(differences[:10])
                + more
            )


def _brief(leaves: Mapping[str, Any], place: str) -> str:
    if place not in leaves:
        return "not there"
    entry = leaves[place]
    if isinstance(entry, list):
        return f"a tensor of {entry[0]} and shape {tuple(entry[1])}" + ", sharded" * len(entry[2:])
    return repr(next(iter(entry.values()))) if isinstance(entry, dict) else repr(entry)


def _number_of(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the metric {name!r} is a {type(value).__name__}; give a number") from None


def _check_policies(
    keep_last: int | None, keep_best: int, monitor: str | None, mode: str, keep_every: int | None
) -> None:
    counts = ("keep_last", keep_last, 1), ("keep_best", keep_best, 0), ("keep_every", keep_every, 1)
    for name, value, least in counts:
        check_optional_count(name, value, least)
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


def _describe(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    with sound(path / MANIFEST):
        counts = _counts(manifest)
        parts: Counter[str] = Counter()
        size = check_files(path, manifest)
        for place, entry in (*manifest["tensors"].items(), *manifest.get("shards", {}).items()):
            parts[place.split("/")[1]] += math.prod(entry["shape"]) * getattr(torch, entry["dtype"]).itemsize
        return Checkpoint(
            path=path,
            step=counts["step"],
            epoch=counts["epoch"],
            batch=counts["batch"],
            samples=counts["samples"],
            metrics={name: float(value) for name, value in manifest["metrics"].items()},
            bytes=size,
            parts=dict(parts),
            created=str(manifest["created"]),
        )


def _counts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    counts = {**manifest["counts"], "seed": _seed(manifest["counts"]["seed"])}
    wrong = [name for name in _COUNTS if name != "seed" and type(counts[name]) is not int]
    if counts.keys() != set(_COUNTS) or (wrong and (wrong != ["epoch_length"] or counts["epoch_length"] is not None)):
        raise ValueError(f"counts that are no counts of a state: {counts}")
    return counts


def _written(seed: Any) -> str | list[str]:
    """As text, since a number of JSON has 64 bits; the seeds of a stack are a list."""
    return [str(one) for one in seed] if isinstance(seed, tuple) else str(seed)


def _seed(written: str | list[str]) -> Any:
    return tuple(int(one) for one in written) if isinstance(written, list) else int(written)


def _is_weight(place: str, names: Callable[[str], bool] | None) -> bool:
    if not place.startswith(_WEIGHTS):
        return False
    return names is None or names(place.split("/", 2)[2].replace("~1", "/").replace("~0", "~"))


def _load(path: Path, state: TrainState, only: Callable[[str], bool], convert: bool) -> Callable[[], TrainState]:
    """Read and verify all that this process needs; the function returned puts it into a state, and cannot fail."""
    manifest = read_manifest(path)
    reader = Reader(path, manifest)
    with sound(path / MANIFEST):
        counts = _counts(manifest)
    whole = only("/")
    tree = _tree(state)
    leaves = leaves_of(tree)
    own = {place: leaf for place, leaf in leaves.items() if only(place)}
    _check_fit(path, own, reader, only, convert)
    if whole and state.epoch_length != counts["epoch_length"]:
        raise ValueError(
            f"{path} was made with epoch_length={counts['epoch_length']}, the state with {state.epoch_length}: the "
            "data or the batch size has changed, so it cannot go on within the epoch. Give the same, or take the "
            "weights alone (weights_only=True)"
        )
    sharded = {
        place: leaf
        for place, leaf in own.items()
        if place in reader.shards or (is_sharded(leaf) and reader.about(place) is not None)
    }
    reader.verify(own.keys() - sharded.keys())
    parts: dict[str, Tensor] = {}
    if sharded:
        from looplib.checkpoint import _shards

        parts = _shards.read(reader, sharded)
    bound = bool(state.params) and all(isinstance(leaf, nn.Parameter) for leaf in state.params.values())
    copies: dict[Any, Tensor] = {}
    written: list[tuple[Tensor, Tensor]] = []
    for place, leaf in own.items():
        if not reader.about(place):
            leaves[place] = reader.values[place]
        elif place in parts:
            here, part = local(leaf) if is_sharded(leaf) else leaf, parts[place]
            if not isinstance(leaf, Tensor):
                leaves[place] = part
            elif bound:
                written.append((here, part))
            else:
                part = part.to(leaf.device, leaf.dtype)
                part = _shards.like(leaf, part) if is_sharded(leaf) else part
                leaves[place] = part.requires_grad_(leaf.requires_grad)
        elif not isinstance(leaf, Tensor):
            leaves[place] = reader.tensor(place, copies)
        elif bound:
            written.append((leaf, reader.tensor(place)))
        else:
            loaded = reader.tensor(place, copies, leaf.device).to(leaf.dtype)
            leaves[place] = loaded.requires_grad_(leaf.requires_grad)
    if not whole:
        counts = {name: getattr(state, name) for name in _COUNTS}
    values = iter(leaves.values())
    trees = pytree.tree_map(lambda _: next(values), tree)

    def restored() -> TrainState:
        return TrainState(**{**dict.fromkeys(("opt_state", "extra")), **trees, **counts})

    return functools.partial(_write_over, state, written, restored) if bound else restored


def _write_over(
    state: TrainState, written: list[tuple[Tensor, Tensor]], restored: Callable[[], TrainState]
) -> TrainState:
    """Copy values into tensors of this state, as a donated step does: no interrupt leaves it half done."""
    _interrupts.install()
    chain = _donation.Chain("ckpt.restore(state)")
    _donation.own(chain, [leaf for leaf, _ in written])
    _interrupts.hold()
    try:
        chain.generation = 1
        with torch.no_grad():
            for leaf, value in written:
                once = tuple(slice(n if step else 1) for n, step in zip(leaf.shape, leaf.stride(), strict=True))
                leaf[once].copy_(value[once])  # expanded dimensions have one value to write
        new = restored()
        _donation.in_flight(state, new)
    finally:
        _interrupts.release()
    return new


def _check_fit(
    path: Path, own: Mapping[str, Any], reader: Reader, only: Callable[[str], bool], convert: bool
) -> None:
    there = {**reader.shards, **reader.tensors, **reader.values}
    unexpected = [place for place in there if only(place) and place not in own]
    wrong = [f"{place} is in the state, and not in the checkpoint" for place in own if place not in there]
    wrong += [f"{place} is in the checkpoint, and not in the state" for place in unexpected]
    for place, leaf in own.items():
        if place not in there:
            continue
        about = reader.about(place)
        if (about is None) != (not isinstance(leaf, Tensor)):
            if about is not None and leaf is None:
                continue  # something that was not there yet
            kinds = "a tensor", type(leaf).__name__
            first, second = kinds if about else (type(reader.values[place]).__name__, "a tensor")
            wrong.append(f"{place} is {first} in the checkpoint, {second} in the state")
        elif about is not None:
            dtype, shapes = str(leaf.dtype).removeprefix("torch."), (tuple(about["shape"]), tuple(leaf.shape))
            if shapes[0] != shapes[1]:
                wrong.append(f"{place} has shape {shapes[0]} in the checkpoint, {shapes[1]} in the state")
            elif about["dtype"] != dtype and not convert:
                wrong.append(f"{place} is {about['dtype']} in the checkpoint, {dtype} in the state (or convert=True)")
        elif not _same_kind(leaf, value := reader.values[place]):
            wrong.append(f"{place} is {type(value).__name__} in the checkpoint, {type(leaf).__name__} in the state")
    if wrong:
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(f"{path} does not fit the state:\n  " + "\n  ".join(wrong[:10]) + more)


def _same_kind(one: Any, other: Any) -> bool:
    """A number may be whole at one time and not at another, and what is None may be set later."""
    kinds = {type(one), type(other)}
    return len(kinds) == 1 or kinds == {int, float} or type(None) in kinds
