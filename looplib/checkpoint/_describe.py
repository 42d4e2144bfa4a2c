"""Checkpoint descriptions: facts that can be read without the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from looplib._core.checks import are_counts, check, is_count
from looplib._core.mappings import fields_of, mapped, without
from looplib.checkpoint._directory import in_words
from looplib.checkpoint._format import MANIFEST, errors_as_damage
from looplib.checkpoint._read import bytes_in, check_files, read_manifest
from looplib.types import COUNTS, TREES, TrainState


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Description of one checkpoint, from its manifest.

    Attributes:
        path: the checkpoint's directory.
        step, epoch, batch, samples: the state's counts.
        metrics: the metrics passed to `save`.
        bytes: size of the tensor files, in bytes.
        parts: bytes of the tensors in params, buffers, opt_state and extra, if there are any.
        created: time of the save, in UTC.
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
    """List of the checkpoints in a directory, oldest first, which prints as a table."""

    def __repr__(self) -> str:
        if not self:
            return "no checkpoints"
        parts = dict.fromkeys(chain.from_iterable(checkpoint.parts for checkpoint in self), "")
        names = dict.fromkeys(chain.from_iterable(checkpoint.metrics for checkpoint in self), "")
        rows = [["step", "epoch", "batch", "samples", "saved", "size", *parts, *names]]
        for checkpoint in self:
            counts = checkpoint.step, checkpoint.epoch, checkpoint.batch, checkpoint.samples
            saved = checkpoint.created.replace("T", " ").replace("Z", " UTC")
            sizes = parts | mapped(in_words, checkpoint.parts)
            scores = names | mapped("{:.5g}".format, checkpoint.metrics)
            size = in_words(checkpoint.bytes)
            rows.append([*map(str, counts), saved, size, *sizes.values(), *scores.values()])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def describe(path: Path) -> Checkpoint:
    """Describe a checkpoint after checking its manifest and the sizes of its files."""
    manifest, _ = read_manifest(path)
    with errors_as_damage(path / MANIFEST):
        counts = counts_in(manifest)
        size = check_files(path, manifest)
        parts: Counter[str] = Counter()
        for leaf_path, entry in manifest["tensors"].items():
            parts[leaf_path.split("/")[1]] += bytes_in(leaf_path, entry)
        return Checkpoint(
            path=path,
            step=counts["step"],
            epoch=counts["epoch"],
            batch=counts["batch"],
            samples=counts["samples"],
            metrics=mapped(float, manifest["metrics"]),
            bytes=size,
            parts=dict(parts),
            created=str(manifest["created"]),
        )


def counts_in(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Counts and seed stored in a manifest."""
    counts: dict[str, Any] = manifest["counts"]
    length = counts["epoch_length"]
    sound = are_counts(without(counts, ("seed", "epoch_length")).values()) and (length is None or is_count(length, 0))
    check(sound and counts.keys() == set(COUNTS), f"counts that are no counts of a state: {counts}")
    seed = counts["seed"]
    return {**counts, "seed": tuple(map(int, seed)) if isinstance(seed, list) else int(seed)}


def counts_of(state: TrainState) -> dict[str, Any]:
    """Counts and seed of a state, in the form stored in a manifest."""
    seed = state.seed
    # Stored as text, since JSON numbers have 64 bits. The seeds of a stack are a list.
    written = [*map(str, seed)] if isinstance(seed, tuple) else str(seed)
    return {**fields_of(state, COUNTS), "seed": written}


def trees_of(state: TrainState) -> dict[str, Any]:
    """Trees of a state that a checkpoint stores: those that are not None."""
    return {name: tree for name in TREES if (tree := getattr(state, name)) is not None}
