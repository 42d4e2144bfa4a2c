"""One rank of 8, 128 and 1024: planning, steps, merged metrics and a sharded save, on torch's fake process group.

    python tests/benchmarks/scale.py                  (`all.py --only scale` puts figure and table into recipes/SCALE.md)
    python tests/benchmarks/scale.py --dry-run        (fewer tensors)

The fake group sends nothing, so times are those of this rank's own work, what all ranks send is counted, not timed, and
gradients are only this rank's.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Report, options_of, own_process, parser, svg
from loops import looplib_step, raw_step
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import looplib as ll

RANKS = (8, 128, 1024)
ROWS = {
    "plan an epoch of 1e9 samples and find batch 900,000, ms": "plan",
    "memory for that, MB": "plan_memory",
    "step with DDP, ms": "DDP",
    "the same, over a raw loop with DDP": "DDP_ratio",
    "collective calls in it (raw loop)": "DDP_calls",
    "bytes handed to them (raw loop)": "DDP_bytes",
    "step with FSDP2, ms": "FSDP2",
    "the same, over a raw loop with FSDP2": "FSDP2_ratio",
    "collective calls in it (raw loop)&nbsp;": "FSDP2_calls",
    "bytes handed to them (raw loop)&nbsp;": "FSDP2_bytes",
    "collective calls to merge two metrics, as `evaluate` does once": "evaluation_calls",
    "bytes handed to them for the metrics": "evaluation_bytes",
    "write and describe {tensors} tensors on rank 0, s": "save",
    "bytes of the description that rank 0 writes of its own chunks": "described",
    "bytes that rank 0 receives about the chunks of all ranks": "received",
    "merge these on rank 0, ms": "merge",
}


def measure(ranks: int, tensors: int) -> dict[str, float]:
    """All numbers for rank 0 of this many; in a process of its own, for its memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    from looplib._core import ranks as _ranks
    from looplib.checkpoint._write import Parts, write_tensors

    def world(*args: Any) -> Any:
        return distributed.group.WORLD

    vars(_ranks).update(host_group=world, new_group=world)  # there is no gloo between ranks that do not exist
    found: dict[str, float] = {}
    torch.set_num_threads(1)
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=store)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    loader = ll.make_loader(range(1_000_000_000), batch_size=1024)
    next(loader(ll.TrainState(batch=900_000)))
    found["plan"] = 1000 * (time.perf_counter() - began)
    found["plan_memory"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000

    for kind in ("DDP", "FSDP2"):
        sgd, batch = ll.optimizer(torch.optim.SGD, lr=1e-3), torch.randn(16, 64)
        raw = raw_step(wrapped(kind), loss_fn, batch, cls=torch.optim.SGD, options={"lr": 1e-3})
        own = looplib_step(wrapped(kind), loss_fn, batch, True, optimizer=sgd)
        for _ in range(3):  # DDP builds its buckets in the first step
            raw(), own()
        times = [(seconds(raw), seconds(own)) for _ in range(50)]
        of_raw, of_own = (statistics.median(column) for column in zip(*times, strict=True))
        found[kind], found[f"{kind}_ratio"] = 1000 * of_own, of_own / of_raw
        for name, numbers in zip(("calls", "bytes"), zip(calls(own), calls(raw), strict=True), strict=True):
            found[f"{kind}_{name}"], found[f"{kind}_{name}_raw"] = map(float, numbers)
    metrics = {"loss": ll.Mean(1.0, 4), "accuracy": ll.Mean(1.0, 4)}
    found["evaluation_calls"], found["evaluation_bytes"] = calls(lambda: ll.distributed.reduce(metrics))

    mesh = init_device_mesh("cpu", (ranks,))
    shard = torch.zeros(1, 4)
    state = {
        f"layers.{n}.weight": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False) for n in range(tensors)
    }
    with tempfile.TemporaryDirectory() as folder:
        path, began = Path(folder) / "tensors-00000.safetensors", time.perf_counter()
        written, synced = write_tensors(path, Parts({"params": state}, first=True))
        found["save"] = time.perf_counter() - began
        synced()
        found["described"] = float(int.from_bytes(path.read_bytes()[:8], "little"))
    of_ranks = [json.dumps({path.name: written})] * ranks
    found["received"] = float(sum(map(len, of_ranks)))

    def merge() -> None:
        files: dict[str, Any] = {}
        for text in of_ranks:
            files |= json.loads(text)

    found["merge"] = 1000 * fastest(merge)
    distributed.destroy_process_group()
    return found


def wrapped(kind: str) -> Any:
    """Four layers, with DDP or FSDP2."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    if kind == "FSDP2":
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    def all_reduce(_, bucket):  # type: ignore[no-untyped-def]
        # DDP's own expects a result, which the fake group does not give.
        distributed.all_reduce(bucket.buffer())
        done = torch.futures.Future()  # type: ignore[var-annotated]
        done.set_result(bucket.buffer())
        return done

    replica = DistributedDataParallel(model)
    replica.register_comm_hook(None, all_reduce)
    return replica


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def calls(function: Callable[[], Any]) -> tuple[int, int]:
    """Collective calls that pass torch's dispatcher, and the bytes of their first tensors."""
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    sent: list[int] = []

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op.namespace == "c10d":
                # An all-gather has its output first, and what this rank sends second.
                given = args[1:2] if "allgather_base" in str(op) or "reduce_scatter_base" in str(op) else args[:1]
                tensors = [leaf for leaf in pytree.tree_leaves(given) if hasattr(leaf, "nbytes")]
                sent.append(sum(tensor.nbytes for tensor in tensors))
            return op(*args, **(kwargs or {}))

    with Mode():  # type: ignore[no-untyped-call]
        function()
    return len(sent), sum(sent)


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def fastest(function: Callable[[], Any], times: int = 20) -> float:
    return min(seconds(function) for _ in range(times))


def cell(numbers: dict[str, float], name: str) -> str:
    raw = numbers.get(f"{name}_raw")
    return shown(numbers[name]) + ("" if raw is None else f" ({shown(raw)})")


def shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 20 or number == int(number) else f"{number:.2g}"


def draw(found: dict[int, dict[str, float]], path: Path) -> None:
    """Curves over the number of ranks, in colors that can be read on a light and on a dark page."""
    times = {"plan": "find batch 900,000", "FSDP2": "step with FSDP2", "merge": "merge of a save"}
    sizes = {"described": "own description", "received": "received in a save", "DDP_bytes": "step with DDP"}
    with svg(path, 2, (9, 3.2)) as axes:
        for axis, names, label in zip(axes, (times, sizes), ("milliseconds", "bytes"), strict=True):
            for (name, title), color in zip(names.items(), ("#1f77b4", "#d95f02", "#2ca02c"), strict=True):
                axis.loglog(list(found), [row[name] for row in found.values()], "o-", label=title, color=color)
            axis.set_xticks(list(found), [f"{ranks:,}" for ranks in found])
            axis.set_xticks([], minor=True)
            axis.set(xlabel="ranks", ylabel=label)


def main() -> int:
    made = parser(__doc__, 45.0)
    made.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = options_of(made)
    tensors = 200 if options.dry_run else 10_000
    if options.one:
        print(json.dumps(measure(options.one, tensors)))
        return 0
    report = Report("scale", options, "torch's fake process group")
    found: dict[int, dict[str, float]] = {}
    for row, _ in report.rows([f"{ranks:,} ranks" for ranks in RANKS]):
        ranks = int(row.split()[0].replace(",", ""))
        with report.attempt(row):
            found[ranks] = own_process(__file__, "--one", ranks, *["--dry-run"] * options.dry_run)
            for title, name in ROWS.items():
                cells = {f"{ranks:,}": cell(found[ranks], name)}
                report.add(title.format(tensors=f"{tensors:,}"), cells, "rank 0 of")
    if len(found) == len(RANKS):
        with report.attempt("figure"):
            draw(found, report.path.with_suffix(".svg"))
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
