"""Predictions written to disk."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from looplib._core.collective import together
from looplib._core.kinds import checked
from looplib._core.ranks import any_rank, is_first
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
    """Write predictions to disk, batch by batch; called again, it continues where it was stopped.

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

    Each tensor of the output, with the samples along its first dimension, goes into a file of its own, which
    `read_predictions` maps; so neither side holds more than one batch. A list of strings, one for each sample, is a
    column as well. A path that ends in `.jsonl` gets one line of JSON for each sample instead, `{name: value}`, with
    null for what is not finite and `[real, imaginary]` for a complex number. A name is the leaf's path in the output,
    such as `class` or `deep/x/0`, and `output` where the output is one leaf.

    Rows may differ in width, as those of generated text do: from batch to batch, or from sample to sample in a nested
    tensor (`torch.nested`). Such a column is read as a list of tensors.

    An index (in the directory, or beside the lines) says which batches are there. Whatever was half written, or was
    lost in a power cut, is cut off at the next start and predicted again; when all batches are there nothing is done.
    On several ranks the first one writes, and any number of them may continue.

    Args:
        path: a directory, or a file whose name ends in `.jsonl`.
        predict_step, state, batches: as for `predict`; the batches must be the same at each start.
        progress: show a bar that goes away.

    Raises:
        ValueError: the path holds predictions of another state, or of batches of another size, or a file without an
            index; an output whose columns differ in length, or from batch to batch in name, dtype or number of
            dimensions; two leaves of one name, such as those of the keys 1 and "1"; a loader that shuffles.
        TypeError: an output with something else in it than tensors and lists of strings.
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
    any_rank(False)  # all return when all is written
    return target


def _fingerprint(state: TrainState) -> dict[str, int]:
    """Fingerprint of a state: its counts, and a checksum over some of each of its weights."""
    checksum = 0
    for name, tensor in state.params.items():
        whole: Any = tensor.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        some = whole.flatten()[:16].float().cpu().tolist()
        checksum = zlib.crc32(repr((name, some)).encode(), checksum)
    return {"step": state.step, "seed": state.seed, "weights": checksum}
