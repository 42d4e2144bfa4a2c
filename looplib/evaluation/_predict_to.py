"""Predictions written to disk."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.collective import together
from looplib._core.ranks import any_rank, is_first
from looplib.checkpoint._format import bytes_of
from looplib.evaluation._batches import Reading
from looplib.evaluation._evaluate import check_order
from looplib.evaluation._oom import name_of
from looplib.evaluation._predict import predicted, samples_of
from looplib.types import TrainState


def predict_to(
    path: str | os.PathLike[str],
    predict_step: Callable[[TrainState, Any], Any],
    state: TrainState,
    batches: Any,
    *,
    progress: bool = False,
) -> Path:
    """Write the outputs of all batches to disk as they come; started again, it goes on where it was stopped.

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

    Each tensor of the output, with the examples along its first dimension, goes into a file of its own, which
    `read_predictions` maps; so neither side holds more than one batch. A path that ends in `.jsonl` gets one line of
    JSON for each example instead, `{name: value}`, with null for what is not finite. A name is the tensor's place in
    the output, such as `class` or `deep/x/0`, and `output` where the output is one tensor.

    An index (in the directory, or beside the lines) says which batches are there; whatever was half written is cut
    off at the next start, and when all are there nothing is done. On several ranks the first one writes, and any
    number of them may go on.

    Args:
        path: a directory, or a file whose name ends in `.jsonl`.
        predict_step, state, batches: as for `predict`; the batches must be the same at each start.
        progress: show a bar that goes away.

    Raises:
        ValueError: the path holds predictions of another state, or of batches of another size, where that can be told
            (of a list or tuple, and of a loader with a `batch_size`); an output whose tensors differ in length, or in
            shape or dtype from batch to batch; a loader that shuffles.
        TypeError: an output with something else than tensors in it.
    """
    check_order("predict_to", predict_step, state, "path, ")
    target = Path(path)
    lines, index = target.suffix == ".jsonl", _index_of(target)
    run = _fingerprint(state)
    done = together().on_first(lambda: _resume(index, target, run, batches))
    with open(index, "ab") if is_first() else nullcontext() as record:
        found = predicted(
            predict_step, state, Reading(batches, None, "prediction" if progress else None, True, done), "cpu"
        )
        for number, (size, output) in enumerate(found):
            if record is None:
                continue
            leaves = _rows(output)
            if number == 0 and not done:
                outputs = _described(leaves)
                head = {"run": run, "outputs": outputs, "batch_size": _size_of(batches)}
                record.write(orjson.dumps(head) + b"\n")
            elif number == 0:
                outputs = orjson.loads(_whole_lines(index)[0])["outputs"]
            if (described := _described(leaves)) != outputs:
                raise ValueError(
                    f"the outputs of batch {done + number} are {described}, before it {outputs}: give all one shape"
                )
            ends = {}
            for name, data in _encoded(leaves, lines).items():
                file = target if lines else target / _file_of(name)
                with open(file, "ab") as out:
                    out.write(data)
                    ends[file.name] = out.tell()
            record.write(orjson.dumps({"examples": size, "ends": ends}) + b"\n")  # only now does the batch count
            record.flush()
    any_rank(False)  # all return when all is written
    return target


def read_predictions(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The arrays that `predict_to` wrote, by their places in the output, mapped from disk and not read.

    >>> import looplib as ll, tempfile, torch
    >>> predict_step = ll.make_predict_step(model := torch.nn.Linear(1, 3), lambda model, x: model(x))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = ll.predict_to(folder, predict_step, ll.init_state(model), torch.zeros(7, 1).split(3))
    ...     ll.evaluation.read_predictions(path)["output"].shape
    torch.Size([7, 3])

    Lines of JSON cannot be mapped: of a path that ends in `.jsonl` they are read into memory, as tensors of the same
    names, shapes and dtypes, with NaN for what was not finite. Batches that are not whole yet are left out.

    Args:
        path: as it was given to `predict_to`.

    Raises FileNotFoundError where there are none.
    """
    target = Path(path)
    index = _index_of(target)
    head, *batches = _whole_lines(index) or [b""]
    if not head:
        raise FileNotFoundError(
            f"{target} holds no predictions: {index} is {'empty' if index.exists() else 'not there'}; give the path "
            "that ll.predict_to returned"
        )
    ends, outputs = orjson.loads(batches[-1])["ends"] if batches else {}, orjson.loads(head)["outputs"]
    rows: list[dict[str, Any]] = []
    if target.suffix == ".jsonl" and batches:
        with open(target, "rb") as lines:
            rows = [orjson.loads(line) for line in lines.read(ends[target.name]).splitlines()]
    found = {}
    for name, about in outputs.items():
        dtype, shape = getattr(torch, about["dtype"]), about["shape"]
        if target.suffix == ".jsonl":
            found[name] = torch.tensor(_with_nan([row[name] for row in rows]), dtype=dtype).view(len(rows), *shape)
            continue
        count = ends.get(_file_of(name), 0) // dtype.itemsize
        file = str(target / _file_of(name))
        flat = torch.from_file(file, shared=False, size=count, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        found[name] = flat.view(-1, *shape)
    return found


def _with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value


def _index_of(target: Path) -> Path:
    return target.with_name(target.name + ".index") if target.suffix == ".jsonl" else target / "index.jsonl"


def _whole_lines(index: Path) -> list[bytes]:
    """Without the last one, where a process that was killed has left it half written."""
    text = index.read_bytes() if index.exists() else b""
    return text[: text.rfind(b"\n") + 1].splitlines()


def _fingerprint(state: TrainState) -> dict[str, int]:
    """What tells a state from another: its counts, and a checksum over some of each of its weights."""
    checksum = 0
    for name, tensor in state.params.items():
        whole: Any = tensor.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        some = whole.flatten()[:16].float().cpu().tolist()
        checksum = zlib.crc32(repr((name, some)).encode(), checksum)
    return {"step": state.step, "seed": state.seed, "weights": checksum}


def _resume(index: Path, target: Path, run: dict[str, int], batches: Any) -> int:
    """How many batches are whole; whatever comes after them is cut off."""
    index.parent.mkdir(parents=True, exist_ok=True)
    if not index.exists():
        return 0
    head, *written = _whole_lines(index) or [b""]
    there = [orjson.loads(line) for line in written]
    if head:
        about = orjson.loads(head)
        if about["run"] != run:
            raise ValueError(
                f"{target} holds predictions of another state ({about['run']}, this one is {run}): delete it, or "
                "give another path"
            )
        _check_sizes(target, about["batch_size"], [batch["examples"] for batch in there], batches)
    files = [target] if target.suffix == ".jsonl" else [file for file in target.iterdir() if file != index]
    ends = there[-1]["ends"] if there else {}
    for file in files:
        if file.exists():
            os.truncate(file, ends.get(file.name, 0))
    os.truncate(index, sum(len(line) + 1 for line in (head, *written)) if written else 0)
    return len(there)


def _check_sizes(target: Path, size: int | None, there: list[int | None], batches: Any) -> None:
    """Batches that were cut otherwise would begin at another row than the one that is next."""
    given = _size_of(batches)
    if there and size is not None and given is not None and size != given:
        raise ValueError(
            f"{target} holds predictions of a loader with batch_size={size}, and this one has batch_size={given}: "
            "give the same, or delete it to begin anew"
        )
    if isinstance(batches, (list, tuple)):
        sizes = [samples_of(batch) for batch in batches[: len(there)]]
        if sizes != there:
            raise ValueError(
                f"{target} holds batches of {_listed(there)} examples, and those given have {_listed(sizes)}: give "
                "the same batches, or delete it to begin anew"
            )


def _size_of(batches: Any) -> int | None:
    size = getattr(batches, "batch_size", None)
    return size if isinstance(size, int) else None


def _listed(sizes: list[int | None]) -> str:
    return ", ".join(map(str, sizes[:8])) + (f", ... ({len(sizes)} batches)" if len(sizes) > 8 else "")


def _rows(output: Any) -> dict[str, Tensor]:
    leaves = {name_of(path): leaf for path, leaf in trees.leaves(output)}
    for name, leaf in leaves.items():
        if not isinstance(leaf, Tensor) or not leaf.dim():
            raise TypeError(
                f"the output's {name!r} is a {type(leaf).__name__}; predict_to writes tensors with one row for each "
                "example"
            )
    if len({len(leaf) for leaf in leaves.values()}) != 1:
        shapes = ", ".join(f"{name!r} {tuple(leaf.shape)}" for name, leaf in leaves.items())
        raise ValueError(f"the output's tensors differ in their number of rows: {shapes}; one row for each example")
    return leaves


def _described(leaves: dict[str, Tensor]) -> dict[str, Any]:
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape[1:])}
        for name, tensor in leaves.items()
    }


def _encoded(leaves: dict[str, Tensor], lines: bool) -> dict[str, bytes]:
    if not lines:
        plain = {name: t.flatten().clone(memory_format=torch.contiguous_format) for name, t in leaves.items()}
        return {name: bytes(bytes_of(tensor.view(torch.uint8))) for name, tensor in plain.items()}
    columns = {name: tensor.tolist() for name, tensor in leaves.items()}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {"": b"".join(orjson.dumps(row) + b"\n" for row in rows)}


def _file_of(name: str) -> str:
    return name.replace("/", ".") + ".bin"
