"""Settings of the run, and checksums of the parameters that a checkpoint leaves out: a restore compares both.

Of the settings, what is named as a secret is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from looplib._core.checks import check, check_type, few
from looplib._core.checksums import checksums
from looplib._core.mappings import mapped, subset, without
from looplib._core.positions import PartlyRead, all_same_samples, is_elastic, read_of_batch
from looplib._core.ranks import is_sharded
from looplib._core.records import described, differences, kind_of, other_settings
from looplib._core.secrets import without_secrets
from looplib.checkpoint._format import counts_in, leaves_of, trees_of
from looplib.types import Run, TrainState

T = TypeVar("T")


class Settings:
    """Settings of a run: those that the user describes, and those known from its states.

    Args:
        describe: settings by name. Loaders and optimizers among them describe themselves.
    """

    def __init__(self, describe: Mapping[str, Any] | None) -> None:
        advice = 'give a mapping of names to settings, such as {"loader": loader, **vars(args)}'
        check_type("describe is", describe, (Mapping, type(None)), advice)
        settings = {str(name): setting for name, setting in (describe or {}).items()}
        self.described: dict[str, Any] = without_secrets(mapped(described, settings))
        self._loaders = [name for name, setting in settings.items() if kind_of(setting) == "loader"]

    def description(self, state: TrainState) -> dict[str, Any]:
        """Settings as stored in a manifest, without the loaders of the state's run, which have an entry of their own."""
        optimizer = state.run.optimizer
        return {**({} if optimizer is None else {"optimizer": optimizer}), **self.described}

    def continued(
        self, path: Path, manifest: Mapping[str, Any], template: TrainState
    ) -> tuple[dict[str, Any], Run, str, str]:
        """Counts and record of a run that continues with the settings of `template`.

        Also returns a warning if the settings differ, and a line to print if the batches have another size, or if no loader of
        looplib is known to have given them.
        """
        counts, length, run = counts_in(manifest), template.epoch_length, template.run
        saved = manifest["made_with"]
        loaders = run.loaders or tuple(self.described[name] for name in self._loaders)
        described_before = tuple(saved[name] for name in self._loaders if name in saved)
        saved_loaders = tuple(manifest["loaders"]) or described_before
        stored: PartlyRead = tuple(manifest["partly_read"])
        moved, partly_read, line = _at_the_same_sample(counts, stored, saved_loaders, loaders, length)
        if moved is None:
            _check_beside(path, counts, saved_loaders, loaders, length)
            _check_sizes(path, counts, stored, saved_loaders, loaders)
            _check_position(path, counts, stored, length)
        elastic = moved is not None and all(map(is_elastic, saved_loaders, loaders))  # as many samples as asked for
        changed = [] if elastic else differences({"epoch_length": counts["epoch_length"]}, {"epoch_length": length})
        alike = [
            name
            for name in self._loaders
            if elastic and name in saved and is_elastic(saved[name], self.described[name])
        ]
        settings = (without(description, alike) for description in (saved, self.description(template)))
        changed = differences(*_of_common_parts(*settings)) + changed
        if loaders and saved_loaders and not described_before:  # else they have been compared under their names
            changed += [] if elastic else _differences_of_loaders(saved_loaders, loaders)
        seed = differences({"seed": counts["seed"]}, {"seed": template.seed})
        warning = other_settings(path, changed, seed) if changed or seed else ""
        optimizer = saved.get("optimizer") if run.optimizer is None else run.optimizer
        run = replace(
            run,
            optimizer=optimizer if isinstance(optimizer, Mapping) else None,
            loaders=loaders,
            restored=str(path),
            at_step=counts["step"],
            saved_loaders=saved_loaders if moved is None else loaders,
            partly_read=partly_read,
        )
        counts = {**counts, **(moved or {}), "epoch_length": length}
        # Whether epochs are counted is certain from the second one on: before it, a run may have no epochs.
        within = counts["batch"] and (length or counts["epoch"])
        if within and not run.known_loaders and not manifest.get("batches_of_loader"):
            first = "batch" if counts["batch"] == 1 else f"{counts['batch']} batches"
            line = _OF_ANOTHER_LOADER.format(first=first)
        return counts, run, warning, line


_OF_ANOTHER_LOADER = (
    "No looplib loader is known to give the run's batches. A plain DataLoader starts the epoch again: skip its first {first}, "
    "or write loader = ll.make_loader(dataloader), ll.init_state(..., loader=loader) and for batch in loader(state)"
)

# Settings from which the number of batches in an epoch follows.
_OF_LENGTH = ("samples", "batch_size", "drop_last", "max_batches")


def _at_the_same_sample(
    counts: Mapping[str, Any],
    partly_read: PartlyRead,
    saved_loaders: Sequence[Mapping[str, Any]],
    loaders: Sequence[Mapping[str, Any]],
    length: int | None,
) -> tuple[dict[str, int] | None, PartlyRead, str]:
    """Epoch and batch of the next sample in the batches of a loader that differs from the saved one in their size.

    The first is None if the loaders differ in more, or the counts do not say which sample is next. It is followed by the
    part of the batch that was read, and by a line to print.
    """
    unmoved = None, partly_read, ""
    epoch, batch, old_length = counts["epoch"], counts["batch"], counts["epoch_length"]
    if not all_same_samples(saved_loaders, loaders) or (old_length is None) != (length is None):
        return unmoved
    was, now = saved_loaders[0]["batch_size"], loaders[0]["batch_size"]
    sizes = _sizes_in_words(saved_loaders, loaders) + ("" if length is None else f", an epoch {length} batches")
    consumed = batch * was + read_of_batch(partly_read, epoch, batch)
    if not consumed:
        return {}, partly_read, sizes
    first, is_alone = saved_loaders[0], len(loaders) == 1
    is_stream = first["order"] == "stream"
    if batch and (length is None or is_stream):  # the last batch of an epoch may have been smaller
        last = was - read_of_batch(partly_read, epoch, batch - 1)
        is_full = partly_read[:2] == (epoch, batch) or counts["batch_samples"] == last
        are_all_full = epoch or consumed == counts["samples"]
        # Without epoch_length, an endless loader counts the batches of all epochs
        is_one_epoch = is_stream or (first["max_batches"] is None and consumed <= (first["samples"] or 0))
        if not (is_full and are_all_full and (length or (is_one_epoch and is_alone))):
            return unmoved
    batch, read = divmod(consumed, now)
    if length is not None and batch >= length:
        is_over = all(_may_end_early(loader, length) for loader in loaders)
        return ({"epoch": epoch + 1, "batch": 0}, (0, 0, 0), sizes) if is_over else unmoved
    return (
        {"batch": batch},
        (epoch, batch, read),
        f"{sizes}: epoch {epoch} continues after its first {consumed} samples",
    )


def _sizes_in_words(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> str:
    """The sizes of batches, before and now, as a sentence.

    >>> _sizes_in_words([{"batch_size": 4}, {"batch_size": 2}], [{"batch_size": 6}, {"batch_size": 3}])
    'Batches have 6 and 3 samples instead of 4 and 2'
    """
    before, now = (" and ".join(str(loader["batch_size"]) for loader in loaders) for loaders in (old, new))
    return f"{'A batch has' if len(new) == 1 else 'Batches have'} {now} samples instead of {before}"


def _may_end_early(loader: Mapping[str, Any], length: int) -> bool:
    """True for a loader whose epochs of this many batches may leave samples of its dataset out."""
    return bool(loader["drop_last"]) or loader["max_batches"] == length or loader["order"] == "stream"


def _differences_of_loaders(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that differ between the loaders of a saved run and those of this one, in words.

    >>> _differences_of_loaders([{"seed": 0}, {"seed": 1}], [{"seed": 0}, {"seed": 2}])
    ['loader seed was 1, is 2']
    >>> _differences_of_loaders([{"seed": 0}, {"seed": 1}], [{"seed": 0}])
    ['number of loaders was 2, is 1']
    """
    before, after = [loader for loader in old if loader not in new], [loader for loader in new if loader not in old]
    pairs = zip(before, after, strict=False)
    words = [word for was, now in pairs for word in differences({"loader": was}, {"loader": now})]
    return words + ([f"number of loaders was {len(old)}, is {len(new)}"] if len(old) != len(new) else [])


def _of_common_parts(*descriptions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Two descriptions without the parts of an update that one of them alone has, such as clipping.

    Of parts that keep a state, the restore has told by then. What `ll.optimizer` makes is compared, since it may keep none.

    >>> adamw, clip = {"class": "AdamW", "lr": 0.1}, {"max_norm": 1.0}
    >>> [*_of_common_parts({"optimizer": {"AdamW": adamw}}, {"optimizer": {"clip": clip, "AdamW": adamw}})][1]
    {'optimizer': {'AdamW': {'class': 'AdamW', 'lr': 0.1}}}
    """
    updates = [description.get("optimizer") for description in descriptions]
    for description, update, other in zip(descriptions, updates, reversed(updates), strict=True):
        yield {**description, "optimizer": _common(update, other)} if "optimizer" in description else {**description}


def _common(update: Any, other: Any) -> Any:
    if not (isinstance(update, Mapping) and isinstance(other, Mapping)) or "class" in update:
        return update
    parts = {name for name, value in update.items() if isinstance(value, Mapping) and "class" not in value}
    return {name: _common(update[name], other.get(name)) for name in update if name not in parts - other.keys()}


def _check_sizes(
    path: Path,
    counts: Mapping[str, Any],
    partly_read: PartlyRead,
    saved_loaders: Sequence[Mapping[str, Any]],
    loaders: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ValueError within an epoch if the next sample is not known in batches of another size.

    By a batch size per rank, they have another one with nothing changed by hand. Without `epoch_length`, no other number tells
    them from those of before.
    """
    epoch, batch = counts["epoch"], counts["batch"]
    is_within = batch or read_of_batch(partly_read, epoch, batch)
    for was, now in zip(saved_loaders, loaders, strict=False) if is_within else ():
        size, per_rank = was.get("batch_size"), now.get("batch_size_per_rank")
        is_other = None not in (size, now.get("batch_size")) and size != now["batch_size"]
        check(
            not is_other or (per_rank is None and counts["epoch_length"] is not None and "beside" not in now),
            f"{path} stands within an epoch, after batch {batch} of {size} samples, and "
            f"{'' if per_rank is None else f'with batch_size_per_rank={per_rank} '}a batch has {now.get('batch_size')} here. A "
            "restore converts the position if init_state was given the loaders, the batch sizes of all of them have changed by "
            "one factor and nothing else has, for datasets with indices and for streams that one process reads, and without "
            "epoch_length only while all batches of the epoch were full. Finish this epoch with make_loader(..., "
            f"batch_size={size}), on any number of ranks; if it has been read to its end, the loop then ends it at once",
        )


def _check_beside(
    path: Path,
    counts: Mapping[str, Any],
    saved_loaders: Sequence[Mapping[str, Any]],
    loaders: Sequence[Mapping[str, Any]],
    length: int | None,
) -> None:
    """Raise ValueError after an epoch if its number of batches has changed, and with it the position of loaders beside the first.

    Their epochs and batches (`zipped`) follow from the number of batches that the run has consumed.
    """
    epoch, old_length = counts["epoch"], counts["epoch_length"]
    pairs = zip(saved_loaders, loaders, strict=False) if epoch else ()
    for was, now in pairs:
        sizes, other_sizes = ([loader.get(name) for name in _OF_LENGTH] for loader in (was, now))
        moves = old_length != length or (length is None and sizes != other_sizes)
        words = differences({"epoch_length": old_length, "loader": was}, {"epoch_length": length, "loader": now})
        check(
            not moves or not ("beside" in was and "beside" in now),
            f"{path} stands at batch {counts['batch']} of epoch {epoch}, and was saved with other settings: "
            f"{few(words, 10, '; ')}. Where the loaders beside the first one (zipped) continue follows from the number of "
            "batches that the run has consumed, so with other epochs they would stand elsewhere: some of their samples would "
            "come again or never. Continue with the batch_size and the dataset that the first loader began with. To let the others "
            "continue elsewhere: restore with the loaders of before, and then state = first.resume(state), with the new first "
            "loader",
        )


def _check_position(path: Path, counts: Mapping[str, Any], partly_read: PartlyRead, length: int | None) -> None:
    """Raise ValueError if a checkpoint stands within an epoch of a different length: its position is in other batches."""
    saved_length, epoch, batch = counts["epoch_length"], counts["epoch"], counts["batch"]
    restored = f"ckpt.restore(state.replace(epoch_length={saved_length}))"
    check(
        length == saved_length or not (batch or read_of_batch(partly_read, epoch, batch)),
        f"{path} was made with epoch_length={saved_length}, the state with {length}, and it stands within an epoch, "
        f"after batch {batch}: the batch size or the data has changed, and the run and its checkpoint do not both know "
        "the loader (ll.init_state(..., loader=loader)), or it differs in more than the size. Nothing needs to be lost. To "
        f"continue this epoch at the sample that comes next: state = loader.resume({restored}). To leave out the rest "
        f"of it: state = {restored}.replace(epoch_length={length}, epoch={epoch + 1}, batch=0)",
    )


Select = Callable[[str, Tensor], bool]


def trees_to_save(state: TrainState, select: Select | None) -> tuple[dict[str, Any], dict[str, int]]:
    """Trees to save, and checksums of the parameters that `select` leaves out, by path."""
    trees = trees_of(state)
    if select is None:
        return trees, {}
    saved = {name: tensor for name, tensor in state.params.items() if select(name, tensor)}
    check(bool(saved), "select chooses none of the state's parameters, so there would be no weights to save")
    return {**trees, "params": saved}, _checksums(leaves_of({"params": without(state.params, saved)}))


def _checksums(leaves: Mapping[str, Any]) -> dict[str, int]:
    sharded = [path for path, leaf in leaves.items() if is_sharded(leaf)]
    check(
        not sharded,
        f"select leaves out {few(sharded, 3)}, which FSDP2 has sharded: no rank has the whole tensor to compute a checksum "
        "of. Save all parameters, or use DistributedDataParallel",
    )
    return dict(zip(leaves, checksums(leaves.values()), strict=True))


def check_left_out(path: Path, left_out: Mapping[str, int], leaves: Mapping[str, Any]) -> None:
    """Raise ValueError if the parameters of a state that a checkpoint left out are not those of the saved run."""
    missing = without(left_out, leaves)
    check(
        not missing,
        f"{path} was saved without the parameters of its base model, and the state has no {few([*missing], 3)}: make the "
        "state with the model that the checkpoint was saved with. Is it wrapped, as by peft.get_peft_model?",
    )
    checksums_here = _checksums(subset(leaves, left_out))
    others = [leaf_path for leaf_path, checksum in left_out.items() if checksums_here[leaf_path] != checksum]
    check(
        not others,
        f"{path} was saved without the parameters of its base model, and {len(others)} of the state's are others: "
        f"{few(others, 3)}. Before init_state, load the base model that it was saved with. If merge_adapter has written "
        "into that, which unmerge_adapter rounds, merge a copy the next time: copy.deepcopy(model).merge_and_unload()",
    )
