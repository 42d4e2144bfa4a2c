"""Many processes against one: real ranks by torchrun and gloo, and the same global batches."""

import time

import pytest
import torch
from ranks import launch as fork
from ranks import run_script, torchrun

import looplib as ll

TRAIN = """
import sys, torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
import looplib as ll


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(11, 6), nn.Linear(6, 7), nn.Linear(7, 11)

    def forward(self, tokens):
        return self.head(torch.tanh(self.inner(self.embed(tokens))))


def wrap(model, engine):
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine == "ddp-options":
        return DistributedDataParallel(
            model, static_graph=True, bucket_cap_mb=0.001, gradient_as_bucket_view=True
        )
    if engine == "ddp-unused":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if engine == "ddp-hook":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if engine.startswith("fsdp"):
        options = {"mesh": init_device_mesh("cpu", (world,))}
        if engine == "fsdp-copies":
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        if engine == "fsdp-options":
            options |= {"offload_policy": CPUOffloadPolicy(pin_memory=False), "reshard_after_forward": False}
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        for part in (model.inner, model.head):
            fully_shard(part, **options)
        fully_shard(model, **options)
    return model


def token_loss(model, batch):  # ragged: what counts differs from row to row, and is nothing in some
    tokens, counts = batch
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten(), reduction="none")
    return ll.Mean((loss * counts.flatten()).sum(), counts.sum())


def mean_loss(model, batch):
    tokens, counts = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def counted_loss(model, batch):
    total, weight, _ = token_loss(model, batch)
    return ll.Mean(total / 2, weight.item() / 2, 2)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same_bits_whatever_ran_before():
    model = wrap(Model(), "ddp")
    request = {"donate": True, "scale": torch.tensor(3.0)}
    used, state = ll.make_grad_fn(model, token_loss), ll.init_state(model)
    batch = torch.randint(0, 11, (rank + 2, 5)), torch.randint(0, 3, (rank + 2, 5)).float()
    used(state, batch, **request)  # after this, DDP rebuilds its buckets and adds in a different order
    for _ in range(10):
        found, expected = [f(state, batch, **request).grads for f in (used, ll.make_grad_fn(model, token_loss))]
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        batch = torch.randint(0, 11, (rank + 2, 5)), torch.randint(0, 3, (rank + 2, 5)).float()


def train(engine, ways):
    torch.manual_seed(0)
    model = wrap(Model().double(), engine)
    kinds, log = [counted_loss, token_loss, mean_loss, mean_loss, token_loss], []

    def loss_fn(model, batch):
        kind = kinds[len(log) % 5] if "changing" in ways else mean_loss if "mean" in ways else token_loss
        return kind(model, batch)

    grad_fn = ll.make_grad_fn(model, loss_fn)
    if "pieces" in ways:
        grad_fn = ll.accumulate(grad_fn, size=2)
    if "wrapped" in ways:
        inner = grad_fn
        grad_fn = ll.accumulate(lambda *call, **request: inner(*call, **request), microbatches=2)
    if engine == "reduce":
        grad_fn = ll.grads.reduce_gradients(grad_fn)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(1e-1, warmup=2, total=20), weight_decay=0.1)
    if "all" in ways:
        scale, clip = ll.optim.dynamic_loss_scale(growth_interval=3), ll.clip_by_global_norm(0.3)
        optimizer = ll.chain(scale, ll.skip_nonfinite(5), clip, optimizer, ll.ema(0.9))
    train_step = ll.make_train_step(grad_fn, optimizer, donate=engine != "reduce")
    state = ll.init_state(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for rows in (8, 11, 7, 8, 5, 9, 8, 4):
        tokens = torch.randint(0, 11, (rows, 5), generator=generator)
        counts = torch.randint(0, 2, (rows, 5), generator=generator).double()
        counts[0] = 0
        part = [column.tensor_split(world)[rank] for column in (tokens, counts)]
        state, metrics = train_step(state, part)
        log.append({**ll.compute(ll.distributed.reduce(metrics)), "samples": state.samples, "step": state.step})
    return log, torch.utils._pytree.tree_map_only(torch.Tensor, whole, (state.params, state.opt_state))


with ll.distributed.setup(required=False):
    rank, world = ll.distributed.rank(), ll.distributed.world_size()
    found = {case: train(*case.split(":")) for case in sys.argv[2:]}
    if world > 1:
        same_bits_whatever_ran_before()
    if ll.distributed.is_rank_zero():
        torch.save(found, sys.argv[1])
"""


def launch(folder, ranks, code, *arguments):
    """Run a script in `ranks` processes, or for 0 in one that torchrun has not started. Gives all that they print."""
    script = folder / "script.py"
    script.write_text(code)
    return fork(ranks, run_script, str(script), *map(str, arguments))


WAYS = ["mean", "tokens", "changing", "tokens in pieces with all", "mean in pieces with all"]
ENGINES = ["ddp", "ddp-options", "ddp-unused", "ddp-hook", "fsdp", "fsdp-options", "reduce"]


def trained(folder, ranks, cases):
    launch(folder, ranks, TRAIN, folder / f"{ranks}.pt", *cases)
    return torch.load(folder / f"{ranks}.pt", weights_only=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    found = trained(tmp_path_factory.mktemp("alone"), 0, [f"none:{way}" for way in [*WAYS, "tokens wrapped"]])
    assert all(log[-1]["samples"] == 60 for log, _ in found.values())
    return {case.partition(":")[2]: value for case, value in found.items()}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_train_as_one_process_does(tmp_path, alone, ranks):
    engines = ["fsdp-copies"] if ranks == 4 else ENGINES
    # Two ranks take the options of an engine in two ways alone, three in all.
    ways = {engine: WAYS if ranks > 2 or engine in ("ddp", "fsdp", "reduce") else WAYS[2:4] for engine in engines}
    cases = [f"{engine}:{way}" for engine in engines for way in ways[engine]]
    cases.append("reduce:tokens wrapped")  # which accumulates what a user's function returns
    for case, (log, found) in trained(tmp_path, ranks, cases).items():
        expected_log, expected = alone[case.partition(":")[2]]
        for one, other in zip(expected_log, log, strict=True):
            assert other == pytest.approx(one, rel=1e-12), case
        # Sums over other parts, so not the same bits; Adam's quotients are worst where gradients are small.
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13, msg=case)


EVALUATE = """
import sys, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
import looplib as ll

folder, engine = sys.argv[1:]
with ll.distributed.setup(required=False, output_dir=folder + "/ranks"):
    rank, world = ll.distributed.rank(), ll.distributed.world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    if engine == "ddp":
        model = DistributedDataParallel(model)
    elif engine == "fsdp":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    data = torch.randn(101, 3, dtype=torch.float64)
    labels, users = (data.sum(1) > 0), torch.arange(101) % 7

    def metric_fn(model, batch):
        x, y, user = batch
        scores = model(x).squeeze(1)
        by_user = ll.metrics.GroupedAUC.of(scores, y, user)
        return {
            "count": ll.metrics.Reading(by_user, lambda record: sum(len(scores) for scores, *_ in record.columns)),
            "loss": nn.functional.binary_cross_entropy_with_logits(scores, y.double()),
            "auc": ll.metrics.AUC.of(scores, y),
            "user_auc": by_user,
            "left_out": ll.metrics.Reading(by_user, lambda record: record.left_out() + 0.0),
            "first": ll.metrics.Reading(ll.metrics.AUC.of(scores, y), lambda record: record.columns[0][0][0]),
        }

    eval_step = ll.make_eval_step(model, metric_fn)
    predict_step = ll.make_predict_step(model, lambda model, batch: {"score": model(batch[0]), "user": batch[2]})
    state = ll.init_state(model)
    plain = torch.utils.data.TensorDataset(data, labels, users)
    own = [[column[n : n + 1] for column in (data, labels, users)] for n in range(rank, 101, world)]
    sets = {
        "loader": ll.make_loader(plain, batch_size=7, order=ll.data.sequential()),
        "small": ll.make_loader(torch.utils.data.Subset(plain, range(3)), batch_size=2, order=ll.data.sequential()),
        "list": list(zip(data.split(9), labels.split(9), users.split(9))),
        "torch": torch.utils.data.DataLoader(plain, batch_size=10),
    }
    found = {}
    for name, batches in sets.items():
        found |= ll.evaluate(eval_step, state, batches, prefix=f"{name}/", rates=True)
        outputs = list(ll.predict(predict_step, state, batches))
        found[f"{name}/batches"] = len(outputs)
        found[f"{name}/outputs"] = {key: torch.cat([output[key] for output in outputs]) for key in ("score", "user")}
    records = ll.evaluation.evaluate_records(eval_step, state, own, divide=False)  # of this rank alone
    found |= ll.compute(ll.distributed.reduce(records), prefix="own/")
    found |= ll.evaluate(eval_step, state, sets["loader"], prefix="limited/", max_batches=3)
    ll.evaluation.predict_to(f"{folder}/predictions", predict_step, state, sets["loader"])
    state = state.replace(step=1)
    log = ll.tee(ll.jsonl(f"{folder}/log.jsonl"), ll.console())
    mean = ll.distributed.reduce({"rank": ll.Mean(rank + 1.0, 1), "weighed": ll.Mean(rank * 2.0, rank)})
    log(state, ll.compute(mean))
    print("rank", rank, "printed")
    once = []
    ll.distributed.rank_zero_only(once.append)(1)
    assert len(once) == (rank == 0)
    torch.save(found, f"{folder}/found-{rank}.pt")
"""


def evaluated(folder, ranks, engine):
    folder.mkdir()
    printed = launch(folder, ranks, EVALUATE, folder, engine)
    return printed, [torch.load(folder / f"found-{rank}.pt") for rank in range(ranks or 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "engine"), [(3, "fsdp"), (4, "ddp")])
def test_each_sample_is_evaluated_and_predicted_once_and_in_order(tmp_path, ranks, engine):
    _, (expected,) = evaluated(tmp_path / "one", 0, "none")
    printed, found = evaluated(tmp_path / "many", ranks, engine)
    times = {name for name in expected if name.endswith("second") or name.endswith("seconds")}
    assert len(times) == 12
    for rank in range(ranks):
        for name in expected.keys() - times:
            torch.testing.assert_close(
                found[rank][name], expected[name], rtol=1e-12, atol=1e-14, equal_nan=True, msg=name
            )
        assert all(found[rank][name] == found[0][name] > 0 for name in times)
    assert [expected[f"{name}/count"] for name in ("loader", "small", "limited")] == [101, 3, 21]
    assert expected["own/auc"] == expected["loader/auc"] == expected["list/auc"]
    one, many = (ll.evaluation.read_predictions(tmp_path / name / "predictions") for name in ("one", "many"))
    torch.testing.assert_close(many, one, rtol=1e-12, atol=1e-14)
    assert many["user"].tolist() == [n % 7 for n in range(101)]
    (row,) = ll.log.read_jsonl(tmp_path / "many" / "log.jsonl")
    assert row["rank"] == (ranks + 1) / 2
    assert row["weighed"] == 2.0
    assert printed.count("weighed") == printed.count("printed") == 1
    kept = [(tmp_path / "many/ranks" / f"rank-{rank}.log").read_text() for rank in range(1, ranks)]
    assert [text.split("\n")[-2] for text in kept] == [f"rank {rank} printed" for rank in range(1, ranks)]


UPDATES = """
import sys, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
import looplib as ll

adamw = ll.optimizer(torch.optim.AdamW, lr=1e-2)
CASES = {
    "clip_by_value": ll.chain(ll.optim.clip_by_value(0.01), adamw),
    "clip_by_norm": ll.chain(ll.optim.clip_by_norm(0.05), adamw),
    "norm 1": ll.chain(ll.clip_by_global_norm(0.1, 1.0), adamw),
    "swa": ll.chain(adamw, ll.optim.swa(start=1)),
    "ema": ll.chain(adamw, ll.ema(0.5)),
    "every": ll.optim.every(adamw, 2),
    "sgd": ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": ll.optimizer(torch.optim.RMSprop, lr=0.01),
    "foreach": ll.optimizer(torch.optim.AdamW, lr=1e-2, foreach=True),
    "groups": ll.optimizer(torch.optim.AdamW, lr=1e-2, groups=[(lambda n, t: t.ndim < 2, {"lr": 0.1})]),
}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(engine, optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)).double()
    wrap = {"ddp": DistributedDataParallel, "fsdp": lambda model: fully_shard(model, mesh=mesh)}.get(engine)
    model = wrap(model) if wrap else model
    masks = []
    model.register_forward_hook(lambda module, args, out: masks.append(out.detach().sum().item()))
    grad_fn = ll.make_grad_fn(model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    if engine == "reduce":
        grad_fn = ll.grads.reduce_gradients(grad_fn)
    step = ll.make_train_step(grad_fn, optimizer, donate=True)
    state, generator = ll.init_state(model, optimizer), torch.Generator().manual_seed(1)
    eval_step = ll.make_eval_step(model, lambda model, batch: {"out": model(batch[0]).square().sum()})
    for _ in range(5):
        x = torch.randn(9, 6, generator=generator).double()
        y = torch.randint(0, 3, (9,), generator=generator)
        evaluated = ll.evaluate(eval_step, state, [(x, y)])
        state, metrics = step(state, (x.tensor_split(world)[rank], y.tensor_split(world)[rank]))
    metrics = ll.compute(ll.distributed.reduce(metrics)) | evaluated
    state = ll.bind(model, ll.copy_state(state))
    state, _ = step(state, (x, y))
    averaged = ll.eval_state(optimizer, state)
    return {name: whole(tensor) for name, tensor in averaged.params.items()} | metrics, masks


with ll.distributed.setup():
    rank, world = ll.distributed.rank(), ll.distributed.world_size()
    mesh = init_device_mesh("cpu", (world,))
    for name, optimizer in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        (expected, drawn), *others = [trained(engine, optimizer) for engine in ("ddp", "fsdp", "reduce")]
        for found, masks in others:
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14, msg=name)
            torch.testing.assert_close(masks, drawn, rtol=1e-11, atol=1e-14, msg=name)
    sums = [torch.zeros(1) for _ in range(world)]
    torch.distributed.all_gather(sums, torch.tensor([drawn[1]]))
    if rank == 0:
        print("all alike;", len({value.item() for value in sums}), "masks")
"""


# Clipping and decisions meet the ranks; other classes and options of torch's optimizers run in the full suite.
@pytest.mark.slow
@pytest.mark.parametrize("names", [("clip_by_norm", "norm 1", "ema", "every", "groups"), ()], ids=["some", "all"])
def test_every_update_is_the_same_with_each_engine(tmp_path, names):
    assert launch(tmp_path, 2, UPDATES, *names) == "all alike; 2 masks\n"


BATCHNORM = """
import sys, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import looplib as ll

with ll.distributed.setup(required=False):
    rank, world = ll.distributed.rank(), ll.distributed.world_size()
    torch.manual_seed(0)
    alone = nn.BatchNorm1d(3).double()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    model = DistributedDataParallel(model) if world > 1 else model
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    grad_fn = grad_fn if world > 1 else ll.accumulate(grad_fn, size=4)
    train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    state, generator = ll.init_state(model, optimizer), torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(8, 3, generator=generator).double()
        alone(x[:4])
        state, _ = train_step(state, x.tensor_split(world)[rank])
    eval_step = ll.make_eval_step(model, lambda model, x: {"out": model(x).square().mean()})
    found = ll.evaluate(eval_step, state, [x] * 5)  # all ranks, with the statistics of the first in every batch
    if rank == 0:
        statistics = {name.partition(".")[2]: tensor for name, tensor in state.buffers.items()}
        torch.save((dict(state.params), statistics, dict(alone.named_buffers()), found), sys.argv[1])
"""


def test_batch_norm_normalises_each_part_and_keeps_the_statistics_of_the_first(tmp_path):
    for ranks in (0, 2):
        launch(tmp_path, ranks, BATCHNORM, tmp_path / str(ranks))
    (pieces, _, alone, _), (parts, statistics, _, found) = (torch.load(tmp_path / str(ranks)) for ranks in (0, 2))
    torch.testing.assert_close(parts, pieces, rtol=1e-12, atol=1e-14)
    assert statistics.keys() == alone.keys()
    assert all(torch.equal(statistics[name], alone[name]) for name in alone)
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(8, 3, generator=generator).double() for _ in range(5)][-1]
    shown = (x - alone["running_mean"]) / (alone["running_var"] + 1e-5).sqrt() * parts["0.weight"] + parts["0.bias"]
    out = (shown @ parts["1.weight"].T + parts["1.bias"]).square().mean()
    assert found["out"] == pytest.approx(out.item(), rel=1e-12)


FAIL = """
import os, signal, sys, time, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import looplib as ll

how, folder = sys.argv[1:]
with ll.distributed.setup(output_dir=folder, timeout=600):
    rank = ll.distributed.rank()
    torch.manual_seed(0)
    plain = nn.Linear(3, 1)
    model = plain if how == "plain" else DistributedDataParallel(plain)
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)

    def loss_fn(model, batch):
        if how == "error" and rank == 1 and len(seen) == 3:
            raise ArithmeticError("the fourth batch of this rank is bad")
        return model(batch[0]).square().mean()

    seen = []
    grad_fn = ll.make_grad_fn(model, loss_fn)
    train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    loader = ll.make_loader(torch.utils.data.TensorDataset(torch.randn(40, 3)), batch_size=4)
    state = ll.init_state(model, optimizer, loader=loader)
    clock = [0.0]
    stop, late = ll.after_signal(signal.SIGUSR1), ll.predicates.after_seconds(0.5 + 1000 * rank)
    now = ll.predicates.every_seconds(2 if rank else 1000, clock=lambda: clock[0])
    asked = [now(state)]
    clock[0] = 2.0
    asked.append(now(state))
    done = ll.after_epochs(2000) | stop
    while not done(state):
        for batch in loader(state):
            state, _ = train_step(state, batch)
            seen.append(state.step)
            if state.step == 7 and rank == 1 and how == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
            if stop(state):
                break
    while not late(state):
        time.sleep(0.01)
    open(f"{folder}/end-{rank}", "w").write(f"{state.step} {asked}")
"""


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_with_its_own_traceback(tmp_path):
    began = time.monotonic()
    script = tmp_path / "script.py"
    script.write_text(FAIL)
    run = torchrun(3, script, "error", tmp_path)
    assert run.returncode != 0
    assert time.monotonic() - began < 300  # not the 600 seconds of a timeout
    cause = run.stderr[run.stderr.index("Root Cause") :]
    assert "the fourth batch of this rank is bad" in cause
    assert "rank      : 1" in cause
    assert "in loss_fn" in cause
    assert "the fourth batch of this rank is bad" in (tmp_path / "rank-1.log").read_text()


def test_what_the_world_decides_for_one_rank_it_decides_for_all(tmp_path):
    launch(tmp_path, 2, FAIL, "signal", tmp_path)
    assert [(tmp_path / f"end-{rank}").read_text() for rank in range(2)] == ["7 [False, True]"] * 2


def test_what_would_be_wrong_on_several_ranks_is_told(tmp_path):
    strict = "import warnings; warnings.simplefilter('error', RuntimeWarning)\n"
    with pytest.raises(AssertionError, match="there are 2 ranks and the model is in no engine that reduces its grad"):
        launch(tmp_path, 2, strict + FAIL, "plain", tmp_path)


def test_a_script_that_torchrun_did_not_start_is_told_how(monkeypatch):
    missing = r"RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not in the environment.*torchrun"
    with pytest.raises(RuntimeError, match=missing), ll.distributed.setup():
        pass
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    missing = r"^LOCAL_RANK, MASTER_ADDR, MASTER_PORT not in the environment"
    with pytest.raises(RuntimeError, match=missing), ll.distributed.setup(required=False):
        pass


ELASTIC = """
import sys, torch
from pathlib import Path
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
import looplib as ll

folder, engine, until = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

with ll.distributed.setup(required=False):
    rank, world = ll.distributed.rank(), ll.distributed.world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        model = DistributedDataParallel(model) if engine == "ddp" else fully_shard(model, mesh=mesh)
    data = torch.utils.data.TensorDataset(torch.randn(50, 5).double(), torch.randint(0, 3, (50,)))
    adamw = ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(1e-2, warmup=3, total=600))
    optimizer = ll.chain(ll.clip_by_global_norm(0.5), adamw, ll.ema(0.9))
    grad_fn = ll.make_grad_fn(model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    loader = ll.make_loader(data, batch_size=8, drop_last=True)
    ckpt = ll.checkpoint_io(folder / "checkpoints", keep_last=2, asynchronous=engine == "fsdp")
    state = ckpt.restore(ll.init_state(model, optimizer, loader=loader))
    log, done, save_now = ll.jsonl(folder / "log.jsonl"), ll.after_steps(until), ll.every_n_steps(3)
    while not done(state):
        for batch in loader(state):
            state, metrics = train_step(state, batch)
            log(state, ll.compute(ll.distributed.reduce(metrics)))
            if save_now(state) or done(state):
                ckpt.save(state)
            if done(state):
                break
    ckpt.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_run_of_four_ranks_continues_with_two_and_then_one(tmp_path, engine):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    launch(tmp_path, 0, ELASTIC, tmp_path / "whole", engine, 12)
    for ranks, until in ((4, 4), (2, 8), (0, 12)):
        launch(tmp_path, ranks, ELASTIC, tmp_path / "parts", engine, until)
    expected, found = (ll.log.read_columns(tmp_path / name / "log.jsonl") for name in ("whole", "parts"))
    assert found["step"] == expected["step"] == list(range(1, 13))
    for name in ("samples", "epoch", "batch"):
        assert found[name] == expected[name]
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-11)
