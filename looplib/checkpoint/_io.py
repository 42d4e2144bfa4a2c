"""Checkpoints that are whole or not there at all: saving, keeping, restoring and deleting them.

A state is taken apart into tensors and plain values by their paths (`_format_write`), put into the directory as a
whole (`_directory`), and only then are older checkpoints deleted (`_policy`). A restore (`_restore`) goes the way back,
into the structure of a state that the code has made, after each leaf was found to fit it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from looplib._core import ownership as _donation
from looplib._core.collective import Together, together
from looplib.checkpoint._background import BackgroundWriter
from looplib.checkpoint._describe import Checkpoint, Checkpoints, counts_of, trees_of
from looplib.checkpoint._directory import Entry, Lock, new_entry, put, put_aside, remove
from looplib.checkpoint._format import DamagedCheckpointError
from looplib.checkpoint._format_write import Parts
from looplib.checkpoint._listing import Listing
from looplib.checkpoint._policy import Policy
from looplib.checkpoint._restore import Selection, load
from looplib.checkpoint._settings import Settings
from looplib.types import TrainState


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
    describe: Mapping[str, Any] | None = None,
) -> CheckpointIO:
    """Checkpointing into a directory: save and restore states so that no crash loses the last good one.

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

    A checkpoint is kept while one of the policies asks for it. The latest and the best are always kept.

    Args:
        directory: where the checkpoints are; it is made at the first save.
        keep_last: how many of the newest to keep; None for all.
        keep_best: how many of the best by `monitor` to keep.
        monitor: name of the metric that the best is judged by.
        mode: whether the best is the smallest ("min") or the largest ("max").
        keep_every: keep those at multiples of this many steps.
        keep: keep those for which this is True, of a `Checkpoint`.
        asynchronous: write in the background. A state of donated steps, or bound to a module, is copied first; a
            pure one is not. An error is raised by the next `save`, `restore`, `delete` or `wait`. One that none of
            them met is printed when the process ends, which finishes the last save before.
        describe: settings of the run by name, which each checkpoint holds, such as
            `{"loader": loader, "augment": True}` or `{"loader": loader, **vars(args)}`. A loader describes its batch
            size, order and dataset itself, and the optimizer's class and numbers come from `init_state` without being
            given here. A `restore` warns of settings that have changed; with the loader among them, it also finds
            where a run continues within an epoch with another batch size.

    Raises:
        ValueError: a policy that makes no sense, such as `keep_best` without `monitor`. The methods of `CheckpointIO`
            say what they raise; each of them also raises CheckpointVersionError for a checkpoint that a newer looplib
            wrote.
        TypeError: `describe` is no mapping.

    Under torchrun every rank makes the same calls. The first rank chooses among the checkpoints, applies the policies,
    and writes a state that all ranks hold whole, such as that of DDP (of buffers and metrics that differ, its own).
    A state of DTensors, as FSDP2's `fully_shard` and tensor parallel plans make them, is written by all ranks, each its
    shards: once all of them are on disk, the checkpoint is there. The directory must be one that all ranks see. What
    fails on one rank raises on all, with the rank in the message; `save` and `wait` return when the checkpoint is
    whole. Counts and plain values must be the same on all ranks.

    A checkpoint of any number of ranks is restored by any other: sharded into sharded over another mesh, into DDP or
    one process, and the other way. Each rank reads the chunks that hold some of its numbers, each as a whole, and
    compares their checksums; of the other chunks it knows that no file is cut short.

    A checkpoint is a directory of two files. To read the weights without looplib:
    `safetensors.torch.load_file(path / "tensors.safetensors")["/params/NAME"]`. That file holds a tensor as it is,
    or, where safetensors cannot describe it (a view, a rarer dtype), its bytes under the name that
    `manifest.json` gives as `data`, together with its dtype, shape, stride and offset in bytes.
    DTensors are in `tensors-RANK.safetensors`, and `manifest.json` has the offsets and sizes of their chunks as
    `shards`.
    """
    policy = Policy(keep_last, keep_best, monitor, mode, keep_every, keep)
    return CheckpointIO(Path(directory).absolute(), policy, asynchronous, Settings(describe))


class CheckpointIO:
    """The checkpoints of one directory, as `checkpoint_io` returns it.

    Where there are several ranks, all of them call each of these methods. `checkpoint_io` makes it, of a `folder`, a
    `policy`, whether saves are `asynchronous`, and the `settings` of the run.
    """

    def __init__(self, folder: Path, policy: Policy, asynchronous: bool, settings: Settings) -> None:
        self._policy = policy
        self._settings = settings
        self._asynchronous = asynchronous
        self._listing = Listing(folder)  # which the first rank alone reads
        self._background = BackgroundWriter()
        self._lock: Lock | None = None

    def save(self, state: TrainState, metrics: Mapping[str, float] | None = None) -> Path:
        """Write a checkpoint of a state, then delete those that no policy keeps.

        A save of a step that has a checkpoint already replaces it, in one step that a crash cannot divide: one of the
        two is whole at each moment. If the later one is given no metrics and its weights are the same, it keeps the
        earlier one's.

        For checkpoints of the weights alone, from which no run can continue, `save(state.replace(opt_state=None))`;
        they are restored with `weights_only`.

        Args:
            state: the state to save.
            metrics: numbers to save with it. With the monitored one among them it is a candidate for the best.

        Returns:
            The path of the checkpoint, where it will be if it is written in the background.

        Raises:
            ValueError: the monitored metric is missing or NaN; the directory has checkpoints of later steps, which are
                another run's; the states of the ranks differ.
            TypeError: a leaf that is neither a dense tensor nor a plain value, or a DTensor of partial sums.
            OSError: a full disk, a directory that cannot be written, another process that writes there. The
                checkpoints before it are untouched.
            DonatedStateError: the state is spent.
        """
        self.wait()
        ranks = together()
        copied = self._asynchronous and _donation.written_in_place(state)

        def taken_apart() -> tuple[Parts, dict[str, Any]]:
            about = self._about(state, metrics)
            parts = Parts(trees_of(state))
            # DTensors are always copied: nearly all are those of donated steps, which FSDP2 asks for.
            if self._asynchronous and (parts.sharded or (copied and ranks.first)):
                parts.copy()
            return parts, about

        parts, about = ranks.on_each(taken_apart)
        if ranks.several:
            _check_same(ranks, {**about["counts"], **parts.description()})
        entry = ranks.on_first(functools.partial(self._begin, state.step))
        write = functools.partial(self._write, entry, parts, about)
        if not self._asynchronous:
            write(ranks)
            return entry.target
        writing = self._background.start(write, ranks)
        if not (copied or parts.sharded) and ranks.first:
            _donation.let_finish(parts.storages, writing)
        return entry.target

    def restore(
        self,
        state: TrainState,
        which: Literal["latest", "best"] | int = "latest",
        *,
        weights_only: bool = False,
        names: Callable[[str], bool] | None = None,
        convert: bool = False,
    ) -> TrainState:
        """Load a checkpoint into the structure of a state and onto its devices.

        A state that is bound to a module stays so: the values are written into its tensors, and `state` itself is
        spent. Leaves that share a tensor in `state` and were saved as different ones come back as different ones: the
        module's keep their tensors, and the others get new ones.

        Between two epochs a run may continue with another `epoch_length`, that of `state`: with another batch size or
        more data. Within an epoch it may if the loader is described to `checkpoint_io`, and one of its batches begins
        with the sample that comes next. A warning names the settings that are different from those of the run that
        saved the checkpoint, as far as both are known.

        Args:
            state: a state of the same structure, as `init_state` makes it.
            which: the latest whole checkpoint, the "best", or that of a step.
            weights_only: take parameters and buffers, and leave all else as it is in `state`.
            names: `names(name) -> bool`, which parameters and buffers to take, instead of all.
            convert: allow other dtypes than the state's.

        Returns:
            The state that was saved; `state` itself if "latest" is asked for and there is no checkpoint yet.

        Raises:
            ValueError: the checkpoint does not fit the state, with the leaves and what differs; it stands within an
                epoch of another length; there is no best, or no checkpoint of that step.
            DamagedCheckpointError: the checkpoint asked for is damaged, or all of them are. A damaged latest one is
                named in a warning, and the one before it taken; the next save renames it to damaged-...
            DonatedStateError: the state is spent.
        """
        self.wait()
        ranks = together()
        self._settings.take(state)
        selected = Selection(weights_only, names)
        while (chosen := ranks.on_first(lambda: self._listing.choose(which, self._policy))) is not None:
            path, stamp = chosen
            try:
                loaded = ranks.on_each(functools.partial(load, path, state, selected, convert, self._settings))
            except DamagedCheckpointError as error:
                if ranks.on_first(functools.partial(self._listing.is_damaged, path, stamp)):
                    if which != "latest":
                        raise
                    warnings.warn(f"{error}; going back to the checkpoint before it", stacklevel=2)
                continue
            if len(set(ranks.gather(loaded.checksum))) == 1:  # else it was replaced between two ranks' reading
                if loaded.differences and ranks.first:
                    warnings.warn(_changed(path, loaded.differences), stacklevel=2)
                return loaded.state()
        return state

    def steps(self) -> Checkpoints:
        """All checkpoints, oldest first, which print as a table."""
        return together().on_first(self._listing.read)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None."""
        return checkpoints[-1] if (checkpoints := self.steps()) else None

    def best(self) -> Checkpoint | None:
        """The best checkpoint by the monitored metric, or None. Raises ValueError without `monitor`."""
        self._policy.check_monitors()
        return self._policy.best(self.steps())

    def delete(self, *, after: int) -> None:
        """Delete the checkpoints of steps later than `after`, to start again from there."""
        self.wait()

        def delete_later() -> None:
            for checkpoint in self._locked_listing():
                if checkpoint.step > after:
                    remove(checkpoint.path)

        together().on_first(delete_later)

    def wait(self) -> None:
        """Wait until a save in the background is done, on all ranks, and raise its error."""
        self._background.wait()

    def _about(self, state: TrainState, metrics: Mapping[str, float] | None) -> dict[str, Any]:
        """What the manifest says besides the leaves."""
        scores = {name: _number(name, value) for name, value in (metrics or {}).items()}
        if metrics is not None:
            self._policy.check_scores(scores)
        self._settings.take(state)
        return {
            "counts": counts_of(state),
            "metrics": {name: value if math.isfinite(value) else str(value) for name, value in scores.items()},
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "made_with": self._settings.description,
        }

    def _locked_listing(self) -> Checkpoints:
        """The listing, once this process alone may write, without what an interrupted replacement has left."""
        self._lock = Lock(self._listing.folder)
        checkpoints = self._listing.read()
        for path in self._listing.superseded:
            remove(path)
        return checkpoints

    def _begin(self, step: int) -> Entry:
        """Where to write a checkpoint of this step, once it is known that it may be written."""
        checkpoints, folder = self._locked_listing(), self._listing.folder
        later = [str(checkpoint.step) for checkpoint in checkpoints if checkpoint.step > step]
        if later:
            raise ValueError(
                f"{folder} holds later steps ({', '.join(later)}) than this state's {step}: they are of another run, or "
                "this run has continued from here before. To continue from the latest, state = ckpt.restore(state); to "
                f"delete the later ones, ckpt.delete(after={step}); to keep both, use another directory"
            )
        for path in list(self._listing.damaged):
            put_aside(path)
            self._listing.damaged.discard(path)
        return new_entry(folder, step)

    def _write(self, entry: Entry, parts: Parts, about: Mapping[str, Any], ranks: Together) -> None:
        # In the background this method keeps the CheckpointIO, and so its lock, until it is done.
        helped = not self._asynchronous
        if parts.sharded:
            from looplib.checkpoint import _shards  # a second or two to import, for those who have shards

            _shards.put(ranks, entry, parts, about, helped)
        else:
            ranks.on_first(lambda: put(entry, parts, about, helped))
        ranks.on_first(self._rotate)

    def _rotate(self) -> None:
        for path in self._policy.dropped(self._listing.read()):
            remove(path)


def _changed(path: Path, differences: list[str]) -> str:
    more = f"; and {len(differences) - 10} more" if len(differences) > 10 else ""
    return (
        f"{path} was saved with other settings: {'; '.join(differences[:10])}{more}. The run continues from it with the "
        "new ones; to start over, give checkpoint_io another directory or delete this one"
    )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the metric {name!r} is a {type(value).__name__}; give a number") from None


def _check_same(ranks: Together, leaves: dict[str, Any]) -> None:
    """Raise on all ranks if a count, a plain value, a dtype or a shape differs on one of them."""
    text = repr(sorted(leaves.items())).encode()
    if len(set(ranks.gather(hashlib.sha256(text).digest()))) == 1:
        return
    first, *others = ranks.gather(leaves)
    for rank, other in enumerate(others, 1):
        paths = [path for path in {**first, **other} if first.get(path) != other.get(path)]
        if paths:
            differences = [f"{p} is {_brief(first, p)} on rank 0, {_brief(other, p)} on rank {rank}" for p in paths]
            more = f"\n  and {len(paths) - 10} more" if len(paths) > 10 else ""
            raise ValueError(
                "the state differs between ranks, so it is not one state to save:\n  "
                + "\n  ".join(differences[:10])
                + more
            )


def _brief(leaves: Mapping[str, Any], path: str) -> str:
    if path not in leaves:
        return "not there"
    entry = leaves[path]
    if isinstance(entry, list):
        return f"a tensor of {entry[0]} and shape {tuple(entry[1])}" + ", sharded" * len(entry[2:])
    return repr(next(iter(entry.values()))) if isinstance(entry, dict) else repr(entry)
