"""Atomic checkpoints: save, keep, restore and delete them.

A state is split into tensors and plain values by path (`_write`) and put into the directory atomically
(`_directory`). Only then are older checkpoints deleted (`_policy`). A restore (`_restore`) checks that each leaf fits
the state that the code has created, and then loads the values into it.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from looplib._core import errors
from looplib._core.checks import check, check_type, few, warn
from looplib._core.collective import RankGroup, finish_first, together, together_with_data
from looplib._core.iterations import is_of_loader, warn_of_position
from looplib._core.mappings import mapped
from looplib._core.random import members_of
from looplib._core.ranks import is_alone, is_first
from looplib._core.records import described
from looplib._core.replicas import checksums_by_name, different
from looplib.checkpoint._checkpoints import Checkpoint, Listing, Policy
from looplib.checkpoint._directory import entries_of, new_entry, number_of, remove, write_entry
from looplib.checkpoint._format import DamagedCheckpointError, counts_of, in_words, numbers_of
from looplib.checkpoint._objects import changed_since, check_objects, load_objects, of_module, take
from looplib.checkpoint._objects import counts_of as counts_of_objects
from looplib.checkpoint._restore import load
from looplib.checkpoint._settings import Select, Settings, trees_to_save
from looplib.checkpoint._structure import structure_of
from looplib.checkpoint._write import Parts
from looplib.predicates import BestSoFar, Plateau
from looplib.types import TrainState, check_state

_unheard: set[Future[None]] = set()  # saves whose errors no later call has raised yet


@atexit.register  # runs after the background threads have finished
def _report_unheard() -> None:
    for save in _unheard:
        if error := save.exception():
            print(f"looplib: the last save failed: {error}", file=sys.stderr)


def checkpoint_io(
    directory: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_best: int = 0,
    monitor: str | BestSoFar | None = None,
    mode: Literal["min", "max"] | None = None,
    keep: Callable[[Checkpoint], bool] | None = None,
    asynchronous: bool = False,
    describe: Mapping[str, Any] | None = None,
    select: Select | None = None,
) -> CheckpointIO:
    """Checkpointing: save and restore a run in a directory so that no crash loses the last good one.

    >>> import looplib as ll, tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> ckpt = ll.checkpoint_io(folder.name, keep_last=3, keep_best=1, monitor="eval/loss")
    >>> state = ckpt.restore(ll.init_state(model, optimizer))  # no checkpoint yet: returns the given state
    >>> path = ckpt.save(state.replace(step=500), {"eval/loss": 0.3})
    >>> path.name, ckpt.best().step, ckpt.restore(state, quiet=True).step
    ('step-00000500', 500, 500)
    >>> folder.cleanup()

    A loop of your own, with torch's optimizer, gives its objects by name instead of a state:

    >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> ckpt = ll.checkpoint_io(folder.name, keep_last=3)
    >>> run = ckpt.restore({"model": model, "optimizer": adamw, "step": 0})  # no checkpoint yet: loads nothing
    >>> run["step"] += 1  # after each update
    >>> path = ckpt.save(run)
    >>> ckpt.restore({"model": model, "optimizer": adamw, "step": 0}, quiet=True)["step"]
    1
    >>> folder.cleanup()

    A checkpoint is complete or it does not exist, because it is written under a temporary name, synced and then
    renamed. After a save, the last `keep_last` checkpoints stay, the `keep_best` best, and those that `keep` chooses; the
    others are deleted. The latest always stays, the best does if there is a `monitor`, and damaged ones stay until you
    delete them. Under torchrun, all ranks call `save` and `restore`.

    Args:
        directory: folder for the checkpoints, created at the first save. All ranks must see the same one.
        keep_last: number of most recent checkpoints to keep; None keeps all.
        keep_best: number of best checkpoints by `monitor` to keep. The best one is kept anyway, so give 2 or more to keep
            several, for example to average them.
        monitor: the metric that defines the best: the `BestSoFar` that `early_stopping` reads, or its name, if it is one of
            those that say whether lower or higher is better (loss, accuracy, as for `BestSoFar`).
        mode: "min" or "max", for the name of a metric that does not say it.
        keep: function of a `Checkpoint`; keep those for which it returns True, such as
            `lambda checkpoint: checkpoint.step % 1000 == 0`.
        asynchronous: if True, `save` returns once the state is copied into host memory, and the copy is written in the
            background, one at a time, so there is at most one copy. Errors are raised by the next `save`, `restore`,
            `delete` or `wait`, or printed when the process exits if there is none.
        describe: further settings of the run by name, stored in each checkpoint, such as `{"augment": True}` or
            `{"loader": loader, **vars(args)}`. `restore` warns if they have changed, so leave out what may change, such
            as the number of epochs. Optimizer, loader and seed are known without it (see `CheckpointIO`). A value whose
            name says that it is a token, key or password is stored as `***`.
        select: `select(name, tensor) -> bool`, the parameters to save, such as `lambda name, tensor:
            tensor.requires_grad` for a model of which only adapters are trained. See below.

    Raises:
        ValueError: a policy is inconsistent, such as `keep_best` without `monitor`.
        TypeError: `describe` is not a mapping, `directory` is not a path, or `monitor` is neither a name nor a record.
        NotADirectoryError: `directory` is a file.

    The methods of `CheckpointIO` list what they raise. Those that read a checkpoint or continue a directory, `restore`,
    `save` and `best`, also raise CheckpointVersionError for a format that this looplib does not read.

    **Several processes.** The first rank applies the policies, chooses checkpoints, and writes states that all ranks
    hold completely, as with DDP (with its own buffers and metrics, if they differ). Of a state with DTensors, as made
    by FSDP2's `fully_shard` and tensor-parallel plans, each rank writes its shards. Counts, plain values and the
    tensors of `extra` must be the same on all ranks. Of parameters that differ, such as those that each rank trains
    by itself (`per_rank` of `make_grad_fn`), only the first rank's are saved; the first save compares them and warns.
    With FSDP2, `reduce_gradients` or `DistributedDataParallel(broadcast_buffers=False)`, each rank has running statistics
    of its own (BatchNorm), and all of them continue from the first rank's after a restore. With `nn.SyncBatchNorm`, whose
    statistics are equal on all ranks, they continue as in an unbroken run. An error on one rank is raised on all, with the
    rank in the message. A checkpoint can be restored with any number of ranks: sharded over a different mesh, with DDP, or
    in one process, and the reverse. A rank reads the files that it needs a part of and compares their checksums; of the
    others it checks only size and header.

    **One run at a time** writes to a directory. Two would delete each other's checkpoints and unfinished saves, which then
    fail, and the first to save a step wins: nothing is mixed. The run that is behind is refused, because the directory
    holds later steps.

    **Only adapters.** With `select`, the other parameters are left out, and checksums of their bits are stored
    instead. `restore` takes them from the state it is given, and refuses one whose base model is different. Optimizer
    state, buffers, counts and `extra` are saved as always. Parameters that FSDP2 shards cannot be left out.

    **Objects by name.** Modules, torch's optimizers and schedulers, a `GradScaler`, a sampler, a `torch.Generator`, and
    whatever else has `state_dict` and `load_state_dict`, besides plain values: numbers, strings, bytes, None, dtypes,
    devices, tensors and NumPy arrays, in lists, tuples and dicts with keys of any of these types. `"step"` is one of
    them. Of subclasses of dict, `OrderedDict` and `Counter` stay what they are, and the others become a dict. A module is
    saved under the names of the innermost module. Optimizers restore their hyperparameters too, as in torch. Dropout in a
    loop of your own draws from torch's global stream: save `ll.checkpoint.RandomStreams()` with the rest if a resumed run
    is to have the bits of an unbroken one.

    Of several ranks, modules and optimizers are the first rank's, or shards of all, and may differ only in what their
    tensors hold. Other objects and values that differ, such as a sampler or the streams, are saved for each rank, gathered
    by the others first, so keep them small; they are restored on the same number of ranks. The rest is restored on any.

    **Format.** A checkpoint is a directory with two files. To read the weights without looplib:
    `safetensors.torch.load_file(path / "tensors.safetensors")["/params/NAME"]` of a state, `["/objects/model/NAME"]` of a
    module saved as "model". `manifest.json` has the dtype and
    shape of each tensor; dtypes that safetensors does not have are stored as bytes. A tensor that a state holds twice
    is stored once and tied again by a restore. A frozen parameter that the members of a stack share is stored once too, with
    a first dimension of 1. Tensors that overlap without being the same are refused. A state with
    DTensors is in files `tensors-RANK.safetensors`, whose metadata say which part of a tensor each has. A restored tensor
    has the memory layout of the one that it replaces, such as `channels_last`. Nothing in a file is executed. Checksums
    find accidents; they do not protect from somebody who writes a false checkpoint.
    """
    check(
        not Path(directory).is_file(),
        f"{directory} is a file, and checkpoint_io needs a directory: it writes a folder for each checkpoint",
        NotADirectoryError,
    )
    check(select is None or callable(select), f"select is {select!r}; give select(name, tensor) -> bool", TypeError)
    check(
        mode is None or isinstance(monitor, str),
        f"mode={mode!r} is given with monitor={monitor!r}: it belongs to the name of a metric, such as monitor='score', "
        "and a BestSoFar has its own",
    )
    name = None
    if monitor is not None:
        record = monitor if isinstance(monitor, BestSoFar) else BestSoFar(monitor, mode=mode)
        name, mode = record.monitor, record.mode
    policy = Policy(keep_last, keep_best, name, mode, keep)
    return CheckpointIO(Path(directory).absolute(), policy, asynchronous, Settings(describe), select)


class CheckpointIO:
    """Checkpoints of one directory, returned by `checkpoint_io`.

    A checkpoint stores what its run was made with: the class and hyperparameters of the optimizer given to
    `init_state`, the seed, the batch size and order of the looplib loaders given to it (`loader=`), and what `describe`
    adds. A restore compares these settings with those of the state that it is given. They are `state.run`, which all states
    of the run share. A state made as `TrainState(...)` has none, and other loaders are not known: use `describe` for those.

    On several ranks, all of them call `save`, `restore` and `delete`; `restore` verifies that they read the same
    checkpoint. `steps`, `latest` and `best` read the folder, on any rank. `checkpoint_io` constructs it from a `folder`, a
    `policy`, the `asynchronous` flag, the `settings` of the run and the function that `select`s parameters.
    """

    def __init__(
        self, folder: Path, policy: Policy, asynchronous: bool, settings: Settings, select: Select | None
    ) -> None:
        self._policy = policy
        self._select = select
        self._settings = settings
        self._asynchronous = asynchronous
        self._listing = Listing(folder)
        # One save at a time is written in the background, by threads that talk to each other through a group of their own.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._second_group = lru_cache(1)(RankGroup.another)
        self._pending: Future[None] | None = None
        self._step_of_objects: int | None = None  # of the last save of objects by name
        self._warned_of_step = False
        self._compared_in: Callable[[], Any] = lambda: None  # the processes whose parameters were compared

    def __repr__(self) -> str:
        return f"CheckpointIO({str(self._listing.folder)!r})"

    def save(self, state: TrainState | Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> Path:
        """Save a checkpoint of a state, or of objects by name, then delete those that no policy keeps.

        >>> import looplib as ll, tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 100)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ckpt = ll.checkpoint_io(folder)
        ...     path = ckpt.save({"model": model, "optimizer": adamw, "scheduler": scheduler, "step": 7})
        ...     ckpt.latest().step
        7

        If the step already has a checkpoint, it is replaced atomically: the new one, whose name ends with a number,
        is there before the old one is deleted. If you save the same tensors again without metrics, the metrics of the
        old one are kept.

        Objects by name that are saved again at the same step, and have been trained since, get a warning once: the updates
        are not counted in "step".

        A checkpoint whose monitored metric is NaN is saved with a warning, and is never the best. A warning also says so if
        a `BestSoFar` in `state.extra` watches one of the metrics and has seen no value yet, which means that `update_best`
        was forgotten.

        To save only the weights, use `save(state.replace(opt_state=None))`. Restore them with `weights_only`; a run
        cannot be continued from them.

        Args:
            state: the state to save; or a mapping of names to objects with `state_dict` and `load_state_dict` and to plain
                values, as `checkpoint_io` lists them. Its "step" is the number of steps made so far. Its "epoch",
                "batch" and "samples", if it has them, are those of the `Checkpoint`.
            metrics: name -> number, stored with the checkpoint. If the monitored metric is among them, the checkpoint
                is a candidate for the best.

        Returns:
            The path of the checkpoint. In the background, the path that it is going to have.

        Raises:
            ValueError: `metrics` are given without the monitored one; the directory has checkpoints of later steps, which
                belong to a different run; two tensors overlap; the ranks' states differ; or a mapping has no "step".
            TypeError: a leaf is neither a dense tensor nor a plain value, or is a DTensor of partial sums; or a DTensor is
                outside of modules and of the state of their optimizers.
            OSError: the disk is full, or the directory cannot be written. Earlier checkpoints are left unchanged.
            DonatedStateError: the state was donated to a step.
        """
        if isinstance(state, Mapping):
            check_objects(state, "ckpt.save")
            advice = "leave out what you do not want to save"
            check(self._select is None, f"select= is for the parameters of a state: {advice}")
        else:
            check_state(state, "ckpt.save(state)", of_module("ckpt.save"))
            warn_of_position(state)
        check_type(
            "metrics is", metrics, (Mapping, type(None)), "give the scores by name, such as those of ll.evaluate"
        )
        ranks = self._barrier("save")
        if isinstance(state, Mapping):
            objects, trees = take(state, ranks)
            taken_apart = partial(self._objects_taken_apart, state, objects, trees)
        else:
            taken_apart = partial(self._taken_apart, state)
        parts, about = ranks.all_or_raise(partial(taken_apart, metrics, ranks.first))
        if ranks.is_distributed:
            # A count, a plain value, a dtype or a shape may not differ.
            facts = {**about["counts"], **parts.values, **parts.about, "sharded": sorted(parts.sharded)}
            ranks.check_alike(facts, _DIFFERS, in_words, _ONE_FOR_ALL, 4)
            if not isinstance(state, Mapping):
                together_with_data().check_alike(numbers_of({"extra": state.extra}), _DIFFERS, str, _ONE_FOR_ALL, 4)
                self._warn_of_params_that_differ(state, ranks)
        step = about["counts"]["step"]
        if isinstance(state, Mapping):
            ranks.on_rank0(partial(self._warn_of_a_step_not_counted, step, state, trees))
        target = ranks.on_rank0(partial(self._begin, step))

        def write(ranks: RankGroup) -> None:
            write_entry(ranks, target, parts, about)
            ranks.on_rank0(self._rotate)

        if self._asynchronous:
            self._pending = self._pool.submit(write, self._second_group(ranks))
            _unheard.add(self._pending)
            finish_first(self._pending)
        else:
            write(ranks)
        return target

    @overload
    def restore(
        self,
        state: TrainState,
        which: Literal["latest", "best"] | int = "latest",
        *,
        weights_only: bool = False,
        required: bool = False,
        optional: Collection[str] = (),
        resized: Collection[str] = (),
        quiet: bool = False,
    ) -> TrainState: ...

    @overload
    def restore(
        self,
        state: Mapping[str, Any],
        which: Literal["latest", "best"] | int = "latest",
        *,
        required: bool = False,
        optional: Collection[str] = (),
        quiet: bool = False,
    ) -> dict[str, Any]: ...

    def restore(
        self,
        state: TrainState | Mapping[str, Any],
        which: Literal["latest", "best"] | int = "latest",
        *,
        weights_only: bool = False,
        required: bool = False,
        optional: Collection[str] = (),
        resized: Collection[str] = (),
        quiet: bool = False,
    ) -> TrainState | dict[str, Any]:
        """Restore a checkpoint into the structure of a state and onto its devices, or into objects by name.

        >>> import looplib as ll, tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> folder = tempfile.TemporaryDirectory()
        >>> ckpt, state = ll.checkpoint_io(folder.name), ll.init_state(model)
        >>> path = ckpt.save(state.replace(step=7))
        >>> ckpt.restore(state, quiet=True).step
        7
        >>> folder.cleanup()

        If there is no checkpoint yet, it returns the given state, so the same line starts a run and resumes it. The
        first rank prints what was restored and from where. If `state` is bound to a module, so is the result: the
        values are written into the module's tensors, and `state` itself can no longer be used.

        Of objects by name, each is given its state, also in a process whose optimizer has no state yet. Plain values need
        no template, and their start values are what it returns without a checkpoint:

        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ckpt, adamw = ll.checkpoint_io(folder), torch.optim.AdamW(model.parameters(), lr=1e-3)
        ...     path = ckpt.save({"model": model, "optimizer": adamw, "losses": [0.5, 0.4], "step": 2})
        ...     run = ckpt.restore({"model": model, "optimizer": adamw, "losses": [], "step": 0}, quiet=True)
        >>> run["step"], run["losses"]
        (2, [0.5, 0.4])

        Names, classes of torch's objects, parameters and shapes are compared before the first object is loaded, so that
        either all are loaded or none. If the `load_state_dict` of an object of your own raises nevertheless, optimizers and
        modules have not been loaded yet. After Ctrl-C in between, restore again. Tensors among the values are on the CPU.

        Args:
            state: a state of the same structure, created with `init_state`; or a mapping of the names that were saved to
                new objects and start values.
            which: "latest" for the latest complete checkpoint, "best", or a step.
            weights_only: if True, restore only parameters and buffers, and keep everything else from `state`. An average in it
                would be of other weights, so there is a warning.
            required: if True, raise an error if there is no checkpoint, for a run that must not start over.
            optional: names of objects that the checkpoint or the mapping may lack, or that a different number of ranks has
                saved. Objects that are not in the checkpoint keep their state, and values are as given. Of a state, names
                of parts of its update, or of entries such as "extra.window", that the checkpoint or the state may lack: see
                **Other parts of the update**.
            resized: of a state, names or patterns of leaves whose shape, and of lists and dicts in `extra` whose size, is to be
                the checkpoint's, such as `("params.means", "extra.history")`: see **Shapes that change during a run**.
            quiet: if True, print nothing, not even that a plain DataLoader starts its epoch again.

        Returns:
            The saved state, or `state` itself if "latest" is requested and there is no checkpoint yet. For a mapping, a
            dict of the same names with the given objects and the saved values, or the given ones.

        Raises:
            ValueError: the checkpoint does not fit the state or the objects (the message lists what differs), or was saved
                without the parameters of a base model that is not the state's (`select`); it is within
                an epoch of a different length; the state is on the meta device; or there is no best, no checkpoint of that
                step, or none at all and it is `required`.
            DamagedCheckpointError: the requested checkpoint is damaged, or all of them are. If the latest one is
                damaged, a warning names it and the one before it is used. It stays until you delete it.
            RuntimeError: an object's own `load_state_dict` failed.
            DonatedStateError: the state was donated to a step.

        **Changed settings.** A warning names the settings that differ from those of the saved run, as far as both are
        known; the run continues with the new ones, except for the seed, of which the state keeps the checkpoint's. A
        loader that is not described is compared when it yields the first batches for the restored state.

        **Other parts of the update.** A part of a chain that keeps a state, such as `ll.ema`, is refused by its name if only
        the state or only the checkpoint has it. `optional` says that it is meant: a part that is new starts as it is in
        `state`, and what a part kept that is gone is dropped. All else continues as it was saved:

        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ckpt, adamw = ll.checkpoint_io(folder), ll.optimizer(torch.optim.AdamW, lr=1e-3)
        ...     path = ckpt.save(ll.init_state(model, adamw).replace(step=7))
        ...     optimizer = ll.chain(adamw, ll.ema(0.999, start=1))
        ...     state = ckpt.restore(ll.init_state(model, optimizer), optional=("ema",), quiet=True)
        >>> state.step, list(state.opt_state)
        (7, ['AdamW', 'ema'])

        The line may stay: as soon as a checkpoint has the part, it is restored. A new average starts from the weights of
        `state`, usually those of a new model; with `start=1`, it starts from those after the next update. A part within
        another has a name such as "partition/matrices/ema", as the message says. Parts that keep nothing, such as clipping,
        come and go without it. To continue the state of a part under another class, give it the old name,
        `ll.chain(("AdamW", ll.optimizer(torch.optim.Adam, lr=1e-3)))`. An entry that a script adds to `extra` or takes out,
        such as a `Window`, has a name too: `optional=("extra.window",)`.

        **Shapes that change during a run.** A tensor of a different shape is refused by its name. `resized` says that it is
        meant, for rows that were added or pruned, and for what grows in `extra`:

        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ckpt, params = ll.checkpoint_io(folder), {"means": torch.ones(5, 3, requires_grad=True)}
        ...     opt_state = adamw.init(params)
        ...     path = ckpt.save(ll.TrainState(params=params, opt_state=opt_state, extra={"counts": [3, 5]}))
        ...     params = {"means": torch.zeros(3, 3, requires_grad=True)}
        ...     start = ll.TrainState(params=params, opt_state=adamw.init(params), extra={"counts": []})
        ...     state = ckpt.restore(start, resized=("params.means", "extra.counts"), quiet=True)
        >>> state.params["means"].shape, state.opt_state["AdamW"]["state"]["means"]["exp_avg"].shape, state.extra
        (torch.Size([5, 3]), torch.Size([5, 3]), {'counts': [3, 5]})

        What the update keeps of a parameter follows it. A name is that of a leaf or of what it is in, with `*` as in file names.
        Lists, tuples and dicts of tensors and plain values are made as they were saved; a `Window` needs no name. Dtypes stay
        the state's. A state that is restored with a parameter of another shape than the module's is not bound to it:
        `state = ll.bind(model, state, resize=True)` gives the module its shapes.

        **A different batch size, other ranks, or more data.** If the loader that `init_state` was given differs from the
        saved run's in its batch size alone, which `batch_size_per_rank` makes of other ranks, the run continues at the next
        sample, and a line says so. Of several loaders, the sizes have to change by one factor. `state.epoch`, `batch` and
        `epoch_length` then count the new batches, `step` and `samples` what they did. Between two epochs, `epoch_length` is
        taken from `state` in any case, but for `ll.data.zipped` loaders, whose positions follow from it. Within an epoch,
        another change is refused, and `Loader.resume` continues where it can:
        `loader.resume(ckpt.restore(state.replace(epoch_length=...)))`.

        **Tied weights.** If leaves that share a tensor in `state` were saved with different values, they are
        separated: the module's leaves keep their tensors, and the others get new ones.
        """
        reading: Callable[[Path], Any]
        for_state = "resized= names leaves of a state; objects by name take the shapes that they are given"
        check(not (resized and isinstance(state, Mapping)), for_state, TypeError)
        is_several = isinstance(resized, Collection) and not isinstance(resized, str)
        check(is_several, f"resized is {resized!r}; give names, such as resized=('params.means',)", TypeError)
        is_several = isinstance(optional, Collection) and not isinstance(optional, str)
        check(is_several, f"optional is {optional!r}; give names, such as optional=('ema',)", TypeError)
        if isinstance(state, Mapping):
            check_objects(state, "ckpt.restore")
            check(not weights_only, "weights_only is for a state: give the module alone, with optional=", TypeError)
        else:
            check_state(state, "ckpt.restore(state)", of_module("ckpt.restore"))
            check(
                not (weights_only and optional),
                "optional= names parts of the update and entries of extra, of which weights_only restores none: leave out one",
                TypeError,
            )
        ranks = self._barrier("restore")
        if isinstance(state, Mapping):
            reading = partial(load_objects, objects=state, optional=optional, settings=self._settings, ranks=ranks)
        else:
            reading = partial(
                load,
                template=state,
                weights_only=weights_only,
                optional=optional,
                settings=self._settings,
                resized=resized,
            )
        ranks.check_alike({"which": which}, "the ranks ask for different checkpoints:\n  ", repr)
        while (path := ranks.on_rank0(lambda: self._listing.choose(which, self._policy))) is not None:
            try:
                restored, checksum, warning, line = ranks.all_or_raise(partial(reading, path))
            except DamagedCheckpointError as error:
                if not ranks.on_rank0(partial(self._listing.is_damaged, path)):
                    continue  # it has been removed since it was chosen
                if which != "latest":
                    raise
                warnings.warn(f"{error}; going back to the checkpoint before it", stacklevel=2)
                continue
            ranks.check_alike(
                {"the checksum of the manifest": f"{checksum:08x}"},
                f"the ranks read different checkpoints at {path}: give a directory that all hosts share\n  ",
            )
            if warning and ranks.first:
                warnings.warn(warning, stacklevel=2)
            new: Any = ranks.all_or_raise(restored) if isinstance(state, Mapping) else restored()
            if isinstance(state, Mapping):
                title = f"step {new['step']}"
            else:
                title = "weights" if weights_only else f"step {new.step} (epoch {new.epoch}, batch {new.batch})"
            if ranks.first and not quiet:
                shown = min(os.path.relpath(path), str(path), key=len)
                print(f"Restored {title} from {shown}", flush=True)
                if line:
                    print(line, flush=True)
            return new  # type: ignore[no-any-return]
        check(
            not required,
            f"there is no checkpoint in {self._listing.folder}, and required=True: is this the directory of the run?",
        )
        return dict(state) if isinstance(state, Mapping) else state

    def steps(self) -> list[Checkpoint]:
        """List all checkpoints, oldest first. `pandas.DataFrame(ckpt.steps())` is a table. It needs no other rank."""
        return self._listing.read()

    def latest(self) -> Checkpoint | None:
        """Return the latest complete checkpoint, or None. It needs no other rank."""
        return checkpoints[-1] if (checkpoints := self.steps()) else None

    def best(self) -> Checkpoint | None:
        """Return the best checkpoint by the monitored metric, or None. It needs no other rank.

        Raises ValueError without `monitor`, or if the checkpoints have other metrics alone.
        """
        return self._policy.best(self.steps())

    def delete(self, *, after: int) -> None:
        """Delete the checkpoints of steps later than `after`, to restart from there."""

        def remove_later() -> None:
            for path in entries_of(self._listing.folder):
                if number_of(path)[0] > after:
                    remove(path)

        self._barrier("delete").on_rank0(remove_later)

    def wait(self) -> None:
        """Wait until a background save has finished on all ranks, and raise its error."""
        if self._pending is not None:
            wait([self._pending])  # an interrupt is raised here while the work continues
            done, self._pending = self._pending, None
            _unheard.discard(done)
            done.result()

    def _barrier(self, method: str) -> RankGroup:
        """All ranks, once they are in this method and their background saves have finished."""
        self.wait()
        ranks = together()
        ranks.barrier(f"checkpoint_io.{method}")
        return ranks

    def _taken_apart(
        self, state: TrainState, metrics: Mapping[str, float] | None, first: bool
    ) -> tuple[Parts, dict[str, Any]]:
        """The tensors of a state, copied if they are written in the background, and what its manifest says."""
        scores = self._scores(metrics)
        if metrics is not None:
            _warn_of_records(state.extra, scores)
        structure = structure_of(state.extra, ("extra",))
        trees, left_out = trees_to_save(state, self._select)
        return self._parts(trees, first, members_of(state.seed)), {
            "counts": counts_of(state),
            "metrics": mapped(described, scores),
            "made_with": self._settings.description(state),
            "loaders": state.run.known_loaders,
            "batches_of_loader": is_of_loader(state),
            "partly_read": state.run.partly_read,
            "left_out": left_out,
            "structure": structure,
        }

    def _objects_taken_apart(
        self,
        objects: Mapping[str, Any],
        entries: Mapping[str, Any],
        trees: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        first: bool,
    ) -> tuple[Parts, dict[str, Any]]:
        """The same for objects by name, of which `take` has made entries and trees."""
        return self._parts(trees, first), {
            "counts": counts_of_objects(objects),
            "metrics": mapped(described, self._scores(metrics)),
            "made_with": self._settings.described,
            "left_out": {},
            "objects": entries,
        }

    def _scores(self, metrics: Mapping[str, float] | None) -> dict[str, float]:
        """Metrics as numbers, checked by the policy."""
        scores = {name: _number(name, value) for name, value in (metrics or {}).items()}
        if metrics is not None:
            self._policy.check_scores(scores)
        return scores

    def _parts(self, trees: Any, first: bool, members: int = 1) -> Parts:
        """The tensors to write, copied if that is done in the background."""
        parts = Parts(trees, first, members)
        check(
            not (parts.sharded and is_alone()),
            "the state is sharded, and this rank holds a part of it: save it on all ranks together",
        )
        if self._asynchronous:
            parts.copy()
        return parts

    def _warn_of_params_that_differ(self, state: TrainState, ranks: RankGroup) -> None:
        """Warn at the first save of several ranks if these train different parameters, of which one rank's are saved.

        All ranks of a group compare at the same save: those that continue with a new process, in place of one that was lost,
        compare with it again.
        """
        if self._compared_in() is ranks.group:
            return
        self._compared_in = weakref.ref(ranks.group)
        names = different(together_with_data(), *checksums_by_name(state.params))
        if names and is_first():
            warn(_PARAMS_DIFFER.format(names=few(names)), RuntimeWarning)

    def _warn_of_a_step_not_counted(self, step: int, objects: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
        """Warn once if objects are saved at a step at which they were saved before, and have been trained since."""
        last, self._step_of_objects = self._step_of_objects, step
        if last != step or self._warned_of_step:
            return
        earlier = next((checkpoint.path for checkpoint in self._listing.read() if checkpoint.step == step), None)
        if earlier is None:
            return
        with suppress(DamagedCheckpointError, OSError):
            if names := changed_since(earlier, objects, trees):
                self._warned_of_step = True
                warn(_NOT_COUNTED.format(step=step, names=few(names)))

    def _begin(self, step: int) -> Path:
        """Path for a checkpoint of this step, after checking that there are no later ones."""
        folder = self._listing.folder
        later = [checkpoint.step for checkpoint in self._listing.read() if checkpoint.step > step]
        check(
            not later,
            f"{folder} holds later steps ({few(later)}) than this state's {step}: they are of another run, or "
            "this run has continued from here before. To continue from the latest, state = ckpt.restore(state); to "
            f"delete the later ones, ckpt.delete(after={step}); to keep both, use another directory",
        )
        return new_entry(folder, step)

    def _rotate(self) -> None:
        """Delete what no policy keeps, and what a later save of the same step replaces, but for what is damaged."""
        kept = self._policy.kept(self._listing.read()) | self._listing.damaged
        for path in entries_of(self._listing.folder):
            if path not in kept:
                remove(path)

    if not TYPE_CHECKING:  # type checkers would take any attribute for one that there is

        def __getattr__(self, name: str) -> NoReturn:
            advice = {"load": "ckpt.restore(state) reads the latest checkpoint"}
            raise errors.missing(self, "what ll.checkpoint_io returns", name, advice)


_DIFFERS = "the state differs between ranks, so it is not one state to save:\n  "
_ONE_FOR_ALL = (
    "\nA checkpoint holds one value for all ranks. Sum or average it over them first, such as "
    'll.distributed.reduce({"tokens": ll.Mean(count, 1)})["tokens"].total, or keep the values of all ranks in one tensor '
    "(torch.distributed.all_gather), from which each reads its own after a restore. To save the first rank's state alone: "
    "ll.distributed.rank_zero_only(ckpt.save)(state)"
)


_PARAMS_DIFFER = (
    "the ranks hold different values of {names}, and the checkpoint has only the first rank's. If they should be the same, "
    "ll.distributed.check_replicas(state) finds when they began to differ. Experts of each rank need to be DTensors that "
    "are sharded over the ranks, of which each rank's part is saved. If the first rank's are meant, call "
    "ll.distributed.rank_zero_only(ckpt.save)(state)"
)

_NOT_COUNTED = (
    "step {step} is saved a second time, and since the first time these have changed: {names}. If an update was made in "
    'between, a restart would make it again, so count it in what is saved: run["step"] += 1 after each update, and '
    "ckpt.save(run)"
)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the metric {name!r} is a {type(value).__name__}; give a number") from None


def _warn_of_records(extra: Any, scores: Mapping[str, float]) -> None:
    """Warn of a record in a state that is saved, if it has not seen its score."""
    for key, record in extra.items() if isinstance(extra, Mapping) else ():
        unseen = isinstance(record, (BestSoFar, Plateau)) and record.reference is None and not record.waited
        if unseen and record.monitor in scores:
            update, harm = record.USE
            warn(
                f"the state is saved with {record.monitor!r}, but state.extra[{key!r}], which watches it, has seen no value: "
                f"{harm}. Write state = {update}(state, scores) before you save"
            )
