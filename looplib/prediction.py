"""From a state to the outputs of whole sets, in the order of the data, in memory or on disk.

Neither side holds more than a batch, and what was stopped goes on where it was.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from looplib._agreement import together
from looplib._ranks import any_rank, gather, is_first, several
from looplib._tree_file import bytes_of, pointer
from looplib.evaluation import read
from looplib.evaluation_retry import end_to_end
from looplib.metrics import batch_size
from looplib.state import TrainState


def predict(
    predict_step: Callable[[TrainState, Any], Any],
    state: TrainState,
    batches: Any,
    *,
    start: int = 0,
    limit: int | None = None,
    progress: bool = False,
    divide: bool = True,
    device: torch.device | str | None = "cpu",
) -> Iterator[Any]:
    """The outputs of each batch, one after another, in the order of the data.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1)
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    >>> outputs = ll.predict(predict_step, ll.init_state(model), torch.zeros(7, 1).split(3))
    >>> torch.cat(list(outputs)).shape
    torch.Size([7, 1])

    Args:
        predict_step: from `make_predict_step`.
        state: what to predict with.
        batches: as for `evaluate`.
        start: the batch to begin with; a looplib loader reads nothing before it.
        limit: how many batches.
        progress: show a bar that goes away.
        divide: on several ranks, as for `evaluate`; with False the outputs are those of each rank's own batches.
        device: where to bring the outputs; None to leave them.

    On several ranks each predicts its part, and each is given all outputs, through the host.

    Raises ValueError for a loader that shuffles.
    """
    sampler = getattr(batches, "sampler", None)
    if getattr(batches, "shuffles", False) or isinstance(sampler, torch.utils.data.RandomSampler):
        raise ValueError(
            "predictions would come out in a shuffled order, and nothing says which is whose: give a loader made "
            "with shuffle=False"
        )

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) and device is not None else leaf

    by_rows = divide and getattr(batches, "divide", False)
    for batch, counts in read(batches, state, start, limit, "prediction" if progress else None, divide):
        output = predict_step(state, batch)
        if not (divide and several()):
            if counts:
                yield tree_map(move, output)
            continue
        mine = (batch_size(batch) if by_rows else 1, tree_map(_on_host, output)) if counts else None
        found = [part for part in gather(mine) if part is not None]
        if by_rows and len(found) > 1:
            found = [(0, end_to_end([rows for rows, _ in found], [part for _, part in found]))]
        for _, part in found:
            yield tree_map(move, part)


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


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
    ...     outputs = ll.read_predictions(path)
    ...     {name: tuple(tensor.shape) for name, tensor in outputs.items()}
    {'/logits': (7, 3), '/class': (7,)}

    Each tensor of the output, with the examples along its first dimension, goes into a file of its own, which
    `read_predictions` maps; so neither side holds more than one batch. A path that ends in `.jsonl` gets one line of
    JSON for each example instead, `{name: value}`, with null for what is not finite. An index (in the directory, or
    beside the lines) says which batches are there; whatever was half written is cut off at the next start. On several
    ranks the first one writes, and any number of them may go on.

    Args:
        path: a directory, or a file whose name ends in `.jsonl`.
        predict_step, state, batches: as for `predict`; the batches must be the same at each start.
        progress: show a bar that goes away.

    Raises:
        ValueError: the path holds predictions of another state; an output whose tensors differ in length, or in
            shape or dtype from batch to batch; a loader that shuffles.
        TypeError: an output with something else than tensors in it.
    """
    target = Path(path)
    lines = target.suffix == ".jsonl"
    index = target.with_name(target.name + ".index") if lines else target / "index.jsonl"
    run = _fingerprint(state)
    done = together().on_first(lambda: _resume(index, target, run))
    with open(index, "ab") if is_first() else nullcontext() as record:
        for number, output in enumerate(predict(predict_step, state, batches, start=done, progress=progress)):
            if record is None:
                continue
            leaves = _rows(output)
            if number == 0 and not done:
                outputs = _described(leaves)
                record.write(orjson.dumps({"run": run, "outputs": outputs}) + b"\n")
            elif number == 0:
                outputs = orjson.loads(index.read_bytes().split(b"\n", 1)[0])["outputs"]
            if (found := _described(leaves)) != outputs:
                raise ValueError(
                    f"the outputs of batch {done + number} are {found}, before it {outputs}: give all one shape"
                )
            sizes = {}
            for name, data in _encoded(leaves, lines).items():
                file = target if lines else target / _file_of(name)
                with open(file, "ab") as out:
                    out.write(data)
                    sizes[file.name] = out.tell()
            record.write(orjson.dumps(sizes) + b"\n")  # only now does the batch count
            record.flush()
    any_rank(False)  # all return when all is written
    return target


def read_predictions(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The arrays that `predict_to` wrote, by their places in the output, mapped from disk and not read.

    >>> import looplib as ll, tempfile, torch
    >>> predict_step = ll.make_predict_step(model := torch.nn.Linear(1, 3), lambda model, x: model(x))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = ll.predict_to(folder, predict_step, ll.init_state(model), torch.zeros(7, 1).split(3))
    ...     ll.read_predictions(path)["/output"].shape
    torch.Size([7, 3])

    Raises FileNotFoundError where there are none.
    """
    folder = Path(path)
    head, *batches = (folder / "index.jsonl").read_bytes().splitlines()
    sizes = orjson.loads(batches[-1]) if batches else {}
    found = {}
    for name, about in orjson.loads(head)["outputs"].items():
        dtype, shape = getattr(torch, about["dtype"]), about["shape"]
        count = sizes.get(_file_of(name), 0) // dtype.itemsize
        file = str(folder / _file_of(name))
        flat = torch.from_file(file, shared=False, size=count, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        found[name] = flat.view(-1, *shape)
    return found


def _fingerprint(state: TrainState) -> dict[str, int]:
    """What tells a state from another: its counts, and a checksum over some of each of its weights."""
    checksum = 0
    for name, tensor in state.params.items():
        whole: Any = tensor.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        some = whole.flatten()[:16].float().cpu().tolist()
        checksum = zlib.crc32(repr((name, some)).encode(), checksum)
    return {"step": state.step, "seed": state.seed, "weights": checksum}


def _resume(index: Path, target: Path, run: dict[str, int]) -> int:
    """How many batches are whole; whatever comes after them is cut off."""
    index.parent.mkdir(parents=True, exist_ok=True)
    if not index.exists():
        return 0
    text = index.read_bytes()
    head, *batches = text[: text.rfind(b"\n") + 1].splitlines() or [b""]
    if head and (found := orjson.loads(head)["run"]) != run:
        raise ValueError(
            f"{target} holds predictions of another state ({found}, this one is {run}): delete it, or give another "
            "path"
        )
    files = [target] if target.suffix == ".jsonl" else [file for file in target.iterdir() if file != index]
    last = orjson.loads(batches[-1]) if batches else {}
    for file in files:
        if file.exists():
            os.truncate(file, last.get(file.name, 0))
    os.truncate(index, sum(len(line) + 1 for line in (head, *batches)) if batches else 0)
    return len(batches)


def _rows(output: Any) -> dict[str, Tensor]:
    places = torch.utils._pytree.tree_flatten_with_path(output)[0]
    leaves = {pointer(place) or "/output": leaf for place, leaf in places}
    for name, leaf in leaves.items():
        if not isinstance(leaf, Tensor) or not leaf.dim():
            raise TypeError(
                f"the output's {name} is a {type(leaf).__name__}; predict_to writes tensors with one row for each "
                "example"
            )
    if len({len(leaf) for leaf in leaves.values()}) != 1:
        shapes = ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in leaves.items())
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
    columns = {name.removeprefix("/"): tensor.tolist() for name, tensor in leaves.items()}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {"": b"".join(orjson.dumps(row) + b"\n" for row in rows)}


def _file_of(name: str) -> str:
    return name.removeprefix("/").replace("/", ".") + ".bin"
