"""Bytes that a step sends to other ranks, compared with a raw loop's and with formulas."""

import json
import socket
from pathlib import Path
from statistics import mean

import pytest
from ranks import launch, run_script
from shared import made_once
from traffic import bytes_sent

SCRIPT = """
import json, sys, tempfile, torch
from contextlib import nullcontext
from torch import nn, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from traffic import bytes_sent
import looplib as ll

WIDTH, WIDE, LAYERS, ROWS = 64, 256, 4, 8


def wrapped(engine, buffers=False, width=WIDTH, count=LAYERS):
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(count)]
    model = nn.Sequential(*layers, *([nn.BatchNorm1d(width)] if buffers else []))
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (world,))
        if engine == "fsdp-hybrid":  # two hosts, say
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
        for layer in layers[1:]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=engine in ("fsdp", "fsdp-hybrid"))
        fully_shard(model, mesh=mesh)
    return model


def mean_loss(model, batch):
    return model(batch[0]).square().mean()


def weighed_loss(model, batch):
    x, weights = batch
    return ll.Mean((model(x).square().mean(1) * weights).sum(), weights.sum())


def raw(engine, weighed=False, pieces=1, counted=True, clip=False, buffers=False):
    # What a script without looplib does. `counted` averages over the rows, or the weights, of all ranks.
    model = wrapped(engine, buffers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        total = (batch[1].sum() if weighed else torch.tensor(float(ROWS))).double()
        if counted:
            distributed.all_reduce(total)
        optimizer.zero_grad()
        for n, piece in enumerate(zip(*[column.chunk(pieces) for column in batch])):
            last = n == pieces - 1
            if engine.startswith("fsdp"):
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last or engine != "fsdp-kept")
            with model.no_sync() if engine == "ddp" and not last else nullcontext():
                loss = weighed_loss(model, piece).total if weighed else mean_loss(model, piece) * len(piece[0])
                (loss * (world / total)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def looped(engine, weighed=False, pieces=1, clip=False, buffers=False, before=(), after=()):
    model = wrapped(engine, buffers)
    if engine == "fsdp-kept":
        model.set_reshard_after_backward(False)
    grad_fn = ll.make_grad_fn(model, weighed_loss if weighed else mean_loss)
    if pieces > 1:
        grad_fn = ll.accumulate(grad_fn, pieces)
    if engine == "reduce":
        grad_fn = ll.grads.reduce_gradients(grad_fn)
    if clip:
        before = [*before, ll.clip_by_global_norm(1.0)]
    optimizer = ll.chain(*before, ll.optimizer(torch.optim.AdamW, lr=1e-3), *after)
    train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    state = ll.init_state(model, optimizer)

    def step():
        nonlocal state
        state, _ = train_step(state, batch)

    return step


def evaluated(engine, batches, buffers=False):
    model = wrapped(engine, buffers)
    eval_step, state = ll.make_eval_step(model, lambda model, x: {"loss": model(x).mean()}), ll.init_state(model)
    return lambda: ll.evaluate(eval_step, state, [batch[0]] * batches)


def predicted(engine):
    model = wrapped(engine)
    predict_step, state = ll.make_predict_step(model, lambda model, x: model(x)), ll.init_state(model)
    return lambda: list(ll.predict(predict_step, state, [batch[0]] * world))


def kept(engine, count=LAYERS):
    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder, 0)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    state = ll.init_state(wrapped(engine, width=WIDE, count=count), optimizer)
    checkpoints = ll.checkpoint_io(folder[0], keep_last=1)

    def save():
        nonlocal state
        state = state.replace(step=state.step + 1)
        checkpoints.save(state)
        checkpoints.wait()

    def restore():
        nonlocal state
        state = checkpoints.restore(state, quiet=True)

    return save, restore


def each(call, times=2, before=4):
    for _ in range(before):  # which also find out what there is to send, and in which gradients are compared (steps 1, 2, 4)
        call()
    distributed.barrier()
    before = bytes_sent()
    for _ in range(times):
        call()
    found = (bytes_sent() - before) / times
    distributed.barrier()
    return found


def reduced(count, dtype=torch.float64):
    return lambda: distributed.all_reduce(torch.zeros(count, dtype=dtype))


with ll.distributed.setup():
    rank, world = ll.distributed.rank(), ll.distributed.world_size()
    batch = torch.randn(ROWS, WIDTH), torch.rand(ROWS)
    ways = {
        "mean": {},
        "weighed": {"weighed": True},
        "pieces": {"pieces": 4},
        "weighed pieces": {"weighed": True, "pieces": 4},
        "clipped": {"clip": True},
        "buffers": {"buffers": True, "pieces": 4},
    }
    found = {}
    for engine, names in {
        "ddp": ["mean", "weighed", "pieces", "weighed pieces", "buffers"],
        "fsdp": ["mean", "weighed", "pieces", "weighed pieces", "clipped"],
        "fsdp-kept": ["pieces"],
    }.items():
        for name in names:
            found[f"{engine} {name} raw"] = each(raw(engine, **ways[name]))
            found[f"{engine} {name}"] = each(looped(engine, **ways[name]))
    for name in ("mean", "pieces"):
        found[f"fsdp-whole {name}"] = each(looped("fsdp-whole", **ways[name]))
    if world == 4:
        found["fsdp-hybrid pieces"] = each(looped("fsdp-hybrid", **ways["pieces"]))
    for name in ("mean", "pieces", "weighed"):
        found[f"reduce {name}"] = each(looped("reduce", **ways[name]))
    for engine in ("ddp", "fsdp"):
        found[f"{engine} uncounted raw"] = each(raw(engine, counted=False))
        found[f"{engine} finite"] = each(looped(engine, before=[ll.skip_nonfinite(3)]))
        found[f"{engine} scaled"] = each(looped(engine, before=[ll.optim.dynamic_loss_scale()]))
        for rounds in (1, 3):
            found[f"{engine} evaluation, {rounds}"] = each(evaluated(engine, rounds * world), before=1)
        found[f"{engine} prediction"] = each(predicted(engine), before=1)
        save, restore = kept(engine)
        found[f"{engine} save"], found[f"{engine} restore"] = each(save, before=1), each(restore, before=1)
    found["fsdp save of more"] = each(kept("fsdp", 3 * LAYERS)[0], before=1)
    for rounds in (1, 3):
        found[f"ddp evaluation with buffers, {rounds}"] = each(evaluated("ddp", rounds * world, buffers=True), before=1)
    found["fsdp ema"] = each(looped("fsdp", after=[ll.ema(0.9)]))
    found["ddp clipped"] = each(looped("ddp", **ways["clipped"]))
    clock = ll.predicates.after_seconds(1000)
    found["clock"] = each(lambda: clock(ll.TrainState()))
    found["clock, seldom asked"] = each(lambda: (ll.every_n_steps(10) & clock)(ll.TrainState(step=11, batch_steps=1)))
    found["count"] = each(reduced(1))
    found["flag"] = each(reduced(1, torch.float32))
    numbers = torch.zeros(2, dtype=torch.int64)
    found["gathered"] = each(lambda: torch.distributed.all_gather([numbers.clone() for _ in range(world)], numbers))
    tensors = 2 * LAYERS
    found["norms"] = each(reduced(tensors, torch.float32))
    found["reached"] = each(reduced(1 + tensors + 1))
    everyone = [None] * world
    distributed.all_gather_object(everyone, found)
    if rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump({name: [one[name] for one in everyone] for name in found}, file)
"""

UNIT = 4 * (64 * 64 + 64)  # bytes of one of the model's four layers, all in float32
P = 4 * UNIT
HEADERS = 3 * 48  # what gloo sends besides the contents of a message: it, and that both sides are ready for it


def measured(folder, ranks):
    (folder / "script.py").write_text(SCRIPT)
    launch(ranks, run_script, str(folder / "script.py"), str(folder / "sent.json"))


def sent_by(folder):
    return json.loads((folder / "sent.json").read_text())


@pytest.fixture(scope="module", params=[pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4)])
def counted(request, tmp_path_factory):
    """Number of ranks, and the bytes that each of them sends, by sender."""
    ranks = request.param
    return ranks, sent_by(made_once(tmp_path_factory, f"scale-{ranks}", lambda folder: measured(folder, ranks)))


def plus(*numbers):
    return [sum(column) for column in zip(*numbers, strict=True)]


def assert_sent(found, contents, messages):
    """Each rank has sent these bytes, and no more than gloo's headers besides."""
    for one in found:
        assert contents <= one <= contents + messages * HEADERS


def test_the_bytes_of_a_step_are_those_of_the_raw_loop(counted):
    _, sent = counted
    count = sent["count"]  # an all-reduce of 8 bytes
    for engine in ("ddp", "fsdp"):
        # How many examples all ranks have, by which a raw loop has to divide as well unless all have as many.
        assert sent[f"{engine} mean"] == sent[f"{engine} mean raw"] == plus(sent[f"{engine} uncounted raw"], count)
    assert sent["ddp pieces"] == sent["ddp pieces raw"] == sent["ddp mean"]
    # And their weight, where the loss has one: a raw loop needs that alone, and no state.samples. It goes after the
    # forward pass, or after that of the last microbatch.
    for engine in ("ddp", "fsdp"):
        assert sent[f"{engine} weighed raw"] == plus(sent[f"{engine} uncounted raw"], count)
        assert sent[f"{engine} weighed"] == plus(sent[f"{engine} uncounted raw"], count, count)
    assert sent["ddp weighed pieces"] == plus(sent["ddp weighed pieces raw"], count)
    assert sent["ddp buffers"] == sent["ddp buffers raw"]
    assert sent["ddp clipped"] == sent["ddp mean"]
    for engine in ("fsdp", "fsdp-kept"):
        # Largest number of microbatches on a rank, since their forward passes need all ranks.
        assert sent[f"{engine} pieces"] == plus(sent[f"{engine} pieces raw"], count)
    assert sent["fsdp weighed pieces"] == plus(sent["fsdp weighed pieces raw"], count, count)
    assert sent["fsdp clipped"] == sent["fsdp clipped raw"] == plus(sent["fsdp mean"], sent["norms"])
    assert sent["fsdp ema"] == sent["fsdp mean"]


def test_gradients_cross_once_for_an_update_and_shards_once_for_each_use(counted):
    ranks, sent = counted
    share = (ranks - 1) / ranks
    around = 4 * (ranks - 1)  # messages of one all-reduce by gloo's ring, which cuts into two parts for each rank
    assert_sent(sent["ddp uncounted raw"], 2 * share * P, around)
    assert_sent(sent["ddp pieces"], 2 * share * P, 2 * around)

    # A reduce-scatter would send `share * P`; gloo's is an all-reduce of which each rank keeps its part.
    scatter = 2 * share * P
    per_gather, per_scatter = around / 2, around
    # Units gathered: all four before a forward pass, and before a backward one the three that are not the root.
    gathers = {
        "fsdp uncounted raw": 4 + 3,
        "fsdp mean": 4 + 3,
        "fsdp pieces": 4 * (4 + 3),
        "fsdp-whole mean": 4,
        "fsdp-whole pieces": 4 * 4,
        "fsdp-kept pieces": 4,
    }
    for name, units in gathers.items():
        messages = units * per_gather + 4 * per_scatter + 2 * around
        assert_sent(sent[name], units * share * UNIT + scatter, messages)

    if (
        ranks == 4
    ):  # two copies, each in two shards: shards within a copy, and then their gradients between the copies
        between = 2 * (1 / 2) * P / 2
        messages = 28 * 2 + 4 * 4 + 4 * 4 + 2 * around
        assert_sent(sent["fsdp-hybrid pieces"], 28 * (1 / 2) * UNIT + 2 * (1 / 2) * P + between, messages)


def test_what_stands_around_a_step_sends_numbers_and_no_tensors(counted):
    ranks, sent = counted
    # Of one number gloo sends the number, from rank to rank and around again.
    assert sum(sent["count"]) <= 2 * (ranks - 1) * (8 + HEADERS)
    assert sent["clock"] == sent["gathered"]  # where each rank is, and its answer
    assert sent["clock, seldom asked"] == [0] * ranks
    assert sent["ddp finite"] == sent["ddp scaled"] == plus(sent["ddp mean"], sent["flag"])
    assert sent["fsdp finite"] == sent["fsdp scaled"] == plus(sent["fsdp mean"], sent["flag"])
    # Samples, weight and one number for each tensor in one all-reduce; a weight on the device in one of its own.
    assert sent["reduce mean"] == sent["reduce pieces"] == plus(sent["ddp uncounted raw"], sent["reached"])
    assert sent["reduce weighed"] == plus(sent["ddp uncounted raw"], sent["reached"], sent["count"])


def test_an_evaluation_sends_its_records_once_and_the_shards_for_each_batch(counted):
    ranks, sent = counted
    for name, gathers in {"ddp evaluation": 0, "fsdp evaluation": 2 * 4}.items():
        contents, headers = gathers * (ranks - 1) / ranks * UNIT, gathers * 2 * (ranks - 1) * HEADERS
        for one, three in zip(sent[f"{name}, 1"], sent[f"{name}, 3"], strict=True):
            assert -10 * ranks <= three - one - contents <= headers + 10 * ranks  # by which pickles of floats differ
    assert max(sent["ddp evaluation, 3"]) < (ranks - 1) * 2000
    # The first rank's buffers go to all others for each batch, by way of a tree: a mean, a variance and a count.
    one, three = (sum(sent[f"ddp evaluation with buffers, {count}"]) for count in (1, 3))
    contents = 2 * (ranks - 1) * (2 * 4 * 64 + 8)
    assert contents <= three - one <= contents + 2 * (ranks - 1) * 2 * HEADERS + 10 * ranks**2
    outputs = 4 * 8 * 64  # bytes of a rank's own, which all others are given
    for one in sent["ddp prediction"]:
        assert 0 <= one - (ranks - 1) * outputs < (ranks - 1) * outputs


def test_no_tensor_of_a_checkpoint_is_sent(counted):
    _, sent = counted
    state = 3 * 4 * 4 * (256 * 256 + 256)  # bytes: parameters and AdamW's two moments
    for name in ("ddp save", "ddp restore", "fsdp save", "fsdp restore"):
        assert 0 < sum(sent[name]) < state / 10  # the files there are, and whether all ranks agree
    # Each rank describes its own tensors, so more of them cost only digits of sizes and checksums.
    for few, many in zip(sent["fsdp save"], sent["fsdp save of more"], strict=True):
        assert abs(many - few) < 100


def test_the_page_has_these_figures(counted):
    ranks, sent = counted
    page = (Path(__file__).parents[1] / "recipes" / "SCALE.md").read_text()
    table = page[page.index("## Counted") : page.index("## Latency")]
    rows = [[cell.strip(" |") for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"]
    first = rows[0].index(f"W = {ranks}: formula")
    names = {
        "DDP, one microbatch or four": "ddp pieces",
        "DDP, weighted loss": "ddp weighed",
        "FSDP2": "fsdp mean",
        "FSDP2, four microbatches": "fsdp pieces",
        "FSDP2, four microbatches, weighted loss": "fsdp weighed pieces",
        "the same, gathered once per update": "fsdp-kept pieces",
        "HSDP, 2 x 2, four microbatches": "fsdp-hybrid pieces",
        "`reduce_gradients`": "reduce mean",
    }
    assert [row[0] for row in rows[2:]] == list(names)
    for row in rows[2:]:
        for cell, suffix in ((row[first + 1], " raw"), (row[first + 2], "")):
            if cell:
                assert cell == f"{mean(sent[names[row[0]] + suffix]):,.0f}", row


@pytest.mark.slow
def test_one_process_sends_nothing(tmp_path):
    measured(tmp_path, 1)
    assert {name: one for name, one in sent_by(tmp_path).items() if one != [0]} == {}


def test_the_counter_counts_what_was_written(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        with here, there, here.dup(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(bytes(100), server.getsockname())
            before = bytes_sent()
            here.sendall(bytes(100_003))  # of which some wait in the kernel, for nobody reads
            assert bytes_sent() - before == 100_003
            there.sendall(bytes(7))
            assert bytes_sent() - before == 100_010
            monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
            without = bytes_sent()
            here.sendall(bytes(1000))
            assert bytes_sent() == without
