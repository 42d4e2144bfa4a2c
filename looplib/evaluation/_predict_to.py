"""Predictions on disk."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from looplib._core.checksums import checksum
from looplib._core.collective import together
from looplib._core.kinds import checked
from looplib._core.ranks import is_first
from looplib.checkpoint.interop._whole import whole
from looplib.evaluation._batches import Reading
from looplib.evaluation._evaluate import check_order
from looplib.evaluation._predict import predicted
from looplib.evaluation._prediction_files import Writer, check_of_skipped, resume, size_of
from looplib.types import TrainState


def predict_to(
    path: str | os.PathLike[str],
    predict_step: Callable[[TrainState, Any], Any],
    state: TrainState,
    batches: Any,
    *,
    progress: bool = False,
) -> Path:
    """Write predictions to disk batch by batch. Calling it again resumes an interrupted run.

    >>> import looplib as ll, tempfile, torch
    >>> model = torch.nn.Linear(1, 3)
    >>> def predict_fn(model, x):
    ...     return {"logits": (logits := model(x)), "class": logits.argmax(1)}
    >>> predict_step, state = ll.make_predict_step(model, predict_fn), ll.init_state(model)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = ll.predict_to(f"{folder}/predictions", predict_step, state, torch.zeros(7, 1).split(3))
    ...     outputs = ll.evaluation.read_predictions(path)
    ...     {name: tuple(tensor.shape) for name, tensor in outputs.items()}
    {'logits': (7, 3), 'class': (7,)}

    Each tensor of the output, with samples along the first dimension, is written to its own file. `read_predictions`
    maps these files into memory, so neither function holds more than one batch. A list of strings, one per sample, is
    a column too. If the path ends in `.jsonl`, each sample becomes one line of JSON, `{name: value}`, with null for
    non-finite numbers and `[real, imaginary]` for complex ones. A column's name is the leaf's path in the output,
    such as `class` or `deep/x/0`, or `output` if the output is a single leaf.

    Rows may differ in width, as for generated text: from batch to batch, or from sample to sample in a nested tensor
    (`torch.nested`). Such a column is read as a list of tensors.

    An index (in the directory, or next to the lines) records the complete batches, and a fingerprint of all weights
    and buffers. At the next start the data are read once and compared with the checksums in the index. Batches that
    were half written, or lost or damaged in a power failure, are removed and predicted again. If all batches are
    there, nothing else is done. On several ranks the first one writes, and any number of ranks may resume.

    Args:
        path: a directory, or a file whose name ends in `.jsonl`.
        predict_step, state, batches: as for `predict`. The batches must be the same at each start.
        progress: if True, show a progress bar, removed when done.

    Raises:
        ValueError: the path holds predictions of a different state, of batches of a different size, a file without an
            index, an index that `predict_to` did not write, or a link in place of a file; an output's columns differ
            in length, or change from batch to batch in name, dtype or number of dimensions; two leaves have the same
            name, such as those of the keys 1 and "1"; or the loader shuffles.
        TypeError: an output contains something other than tensors and lists of strings.
    """
    check_order("predict_to", predict_step, state, "path, ")
    predict_step = checked(predict_step, "predict_to", "predict_step")
    target = Path(path)
    run = _fingerprint(state)
    index = together().on_first(lambda: resume(target, run, batches))
    check = check_of_skipped(index, batches)
    title = "prediction" if progress else None
    reading = Reading(batches, title=title, start=len(index.batches), check=check)
    with Writer(index, run, size_of(batches)) if is_first() else nullcontext() as writer:
        for samples, output in predicted(predict_step, state, reading, "cpu"):
            if writer is not None:
                writer.add(samples, output)
    together().meet()  # all ranks return when everything is written
    return target


def _fingerprint(state: TrainState) -> dict[str, Any]:
    """Fingerprint of a state: its step, its seed, and a checksum of the bits of its weights and buffers.

    `weights` is a checksum of only the first 16 numbers of each weight, which earlier versions wrote.
    """
    bits = weights = 0
    for name, tensor in {**state.params, **state.buffers}.items():
        full = whole(tensor).detach()  # one at a time, since a sharded model may not fit as a whole
        facts = name, str(full.dtype), tuple(full.shape), int(checksum(full))
        bits = zlib.crc32(repr(facts).encode(), bits)
        if name in state.params:
            weights = zlib.crc32(repr((name, full.flatten()[:16].float().tolist())).encode(), weights)
    return {"step": state.step, "seed": state.seed, "weights": weights, "bits": bits}
