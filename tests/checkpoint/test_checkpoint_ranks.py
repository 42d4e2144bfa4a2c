"""Checkpoints of several ranks: whole or not there on all of them, and of n ranks into m, by real processes."""

import os
import re
import shutil
import textwrap

import pytest
import safetensors.torch
import torch
from files import adamw, forged_header, tensors_of
from ranks import launch, run_script
from shared import made_once
from torch import nn

import looplib as ll

COMMON = """
import contextlib, os, resource, sys, time, warnings
from pathlib import Path
import pytest, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
import looplib as ll
COUNTS = ("step", "epoch", "batch", "epoch_length", "samples", "batch_samples", "batch_steps", "seed")
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
pytree = torch.utils._pytree
folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
adamw = ll.optimizer(torch.optim.AdamW, lr=0.1)


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def fsdp(seed, mesh=None):
    model = net(seed)
    mesh = mesh or init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def state_of(model, noise=None):
    '''With moments and averages, random and the same on all ranks.'''
    state = ll.init_state(model, adamw, epoch_length=7)
    ema = {name: p.detach().clone() for name, p in state.params.items()}
    state = state.replace(extra={"ema": ema, "best": 0.5, "none": None})
    if noise is not None:
        torch.manual_seed(noise)
        with torch.no_grad():
            for leaf in pytree.tree_leaves(state):
                if isinstance(leaf, torch.Tensor):
                    value = torch.randn(leaf.shape).mul(100).to(leaf.dtype)
                    whole = isinstance(leaf, DTensor)
                    leaf.copy_(distribute_tensor(value, leaf.device_mesh, leaf.placements) if whole else value)
    return state


def full(state):
    return pytree.tree_map(lambda t: t.detach().full_tensor() if isinstance(t, DTensor) else t, state)


def divided_alike(one, other):
    '''True of shards that each rank compares with its own, without those of the others.'''
    both = isinstance(one, DTensor) and isinstance(other, DTensor)
    return both and (one.device_mesh, one.placements) == (other.device_mesh, other.placements)


def same(one, other):
    counts = all(getattr(one, name) == getattr(other, name) for name in COUNTS)
    leaves, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    pairs = [own if divided_alike(*own) else full(own) for own in zip(leaves, others, strict=True)]
    pairs = [pytree.tree_map_only(DTensor, DTensor.to_local, own) for own in pairs]
    return counts and all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def names_in(place):
    return sorted(path.name for path in place.iterdir())


@contextlib.contextmanager
def full_disk(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def damage(path, name):
    dist.barrier()
    if rank == 0:
        content = bytearray((path / name).read_bytes())
        content[-2] ^= 1
        (path / name).write_bytes(content)
    dist.barrier()
"""


def launch_script(ranks, script, folder):
    path = folder / f"script-{ranks}.py"
    path.write_text(COMMON + textwrap.dedent(script) + "\ndist.barrier()\ndist.destroy_process_group()\n")
    launch(ranks, run_script, str(path), str(folder))


FOUR = """
# Sharded, in the loop and in the background
given = state_of(fsdp(0), noise=1).replace(step=3, epoch=1, batch=2, samples=40)
for asynchronous in (False, True):
    ckpt = ll.checkpoint_io(folder / f"sharded-{asynchronous}", monitor="loss", asynchronous=asynchronous)
    assert ckpt.restore(given) is given
    for step in (3, 4):
        path = ckpt.save(given.replace(step=step), {"loss": float(step)})
        if asynchronous:
            with torch.no_grad():  # as a donated step would
                kept = [leaf.to_local().clone() for leaf in given.params.values()]
                for leaf in given.params.values():
                    leaf.to_local().zero_()
            ckpt.wait()
            with torch.no_grad():
                for leaf, value in zip(given.params.values(), kept, strict=True):
                    leaf.to_local().copy_(value)
        assert path.exists()
    assert [c.step for c in ckpt.steps()] == [3, 4]
    assert (ckpt.latest().step, ckpt.best().step) == (4, 3)
    model = fsdp(5)
    start = state_of(model)
    restored = ckpt.restore(start, "best")
    assert same(restored, given)
    assert all(restored.params[name] is p for name, p in model.named_parameters())  # bound stays bound
    free = ll.copy_state(state_of(fsdp(6)))
    found = ckpt.restore(free, "best")
    assert same(found, given)
    assert not same(free, given)
    assert all(isinstance(p, DTensor) and p.requires_grad for p in found.params.values())
    with pytest.raises(ValueError, match="no checkpoint 9: .*steps there: 3, 4"):
        ckpt.restore(start, 9)
reference = full(given)  # collective
if rank == 0:
    torch.save([leaf for leaf in pytree.tree_leaves(reference) if isinstance(leaf, torch.Tensor)], folder / "full.pt")

# A full disk of one rank
for broken in (0, 2):
    ckpt = ll.checkpoint_io(folder / "full", keep_last=1, asynchronous=broken == 2)
    before = ckpt.save(given).name
    ckpt.wait()
    large = distribute_tensor(torch.zeros(40_000), init_device_mesh("cpu", (world,)), [Shard(0)])
    bigger = given.replace(step=given.step + 1, extra={"large": large})
    words = rf"step-00000004 could not be saved: rank {broken}: File too large.*before it are untouched"
    with full_disk(20_000) if rank == broken else contextlib.nullcontext(), pytest.raises(OSError, match=words):
        ckpt.save(bigger)
        ckpt.wait()
    dist.barrier()
    assert names_in(folder / "full") == [before], names_in(folder / "full")
    assert same(ckpt.restore(state_of(fsdp(5))), given)
    ckpt.save(bigger)
    ckpt.wait()
    ckpt.delete(after=3)
    ckpt.save(given)
    ckpt.wait()

# A flipped byte of one shard, and one of the first rank's file
ckpt = ll.checkpoint_io(folder / "flipped")
for step in range(4):
    path = ckpt.save(given.replace(step=step))
damage(folder / "flipped" / "step-00000003", "tensors-00002.safetensors")
damage(folder / "flipped" / "step-00000002", "manifest.json")
ckpt = ll.checkpoint_io(folder / "flipped")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    restored = ckpt.restore(state_of(fsdp(5)))
assert same(restored, given.replace(step=1))
said = [str(w.message) for w in seen]
words = "step-00000003/tensors-00002.safetensors is damaged"
assert any(words in text and text.startswith("rank ") for text in said), said
assert (rank == 0) == any("step-00000002/manifest.json" in text for text in said), said
ckpt.save(given.replace(step=2))
assert names_in(folder / "flipped")[2:] == ["step-00000002", "step-00000002.1", "step-00000003"]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    assert [c.step for c in ckpt.steps()] == [0, 1, 2] if rank == 0 else [0, 1, 2, 3]  # which saw no bytes of the last
ckpt.delete(after=2)

# A file of one rank is gone, a later step, a state that does not fit
dist.barrier()
if rank == 0:
    (folder / "flipped" / "step-00000002.1" / "tensors-00001.safetensors").unlink()
dist.barrier()
other = ll.checkpoint_io(folder / "flipped")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    assert other.latest().step == 1
with pytest.raises(ValueError, match="rank 0: .* holds later steps"):
    ll.checkpoint_io(folder / "sharded-False").save(given.replace(step=0))
small = ll.init_state(nn.Linear(3, 5), adamw)
with pytest.raises(ValueError, match=r"(?s)rank 0: .*does not fit the state:.*/params/weight is in the state"):
    ll.checkpoint_io(folder / "sharded-False").restore(small)
ckpt = ll.checkpoint_io(folder / "never")

# What differs between ranks, or cannot be saved on one
wrong = given.replace(extra={"best": float(rank == 2)}, step=9)
with pytest.raises(ValueError, match=r"differs between ranks.*\\n  /extra/best is .*0.0.* on rank 0, .*1.0.* on rank 2"):
    ckpt.save(wrong)
with pytest.raises(ValueError, match=r"\\n  batch is 2 on rank 0, 1 on rank 1"):
    ckpt.save(given.replace(batch=2 if rank != 1 else 1, step=9))
with pytest.raises(TypeError, match=r"rank 3: /extra/x is a set, which a checkpoint cannot hold"):
    ckpt.save(given.replace(extra={"x": {1} if rank == 3 else 1}, step=9))
part = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (world,)), [Partial()])
with pytest.raises(TypeError, match=r"rank 0: /extra/x is a DTensor .* not summed up yet"):
    ckpt.save(given.replace(extra={"x": part}, step=9))

# An interrupt of one rank amid a save, which the others hear of
def interrupted(*args):
    raise KeyboardInterrupt


for broken in (0, 1):
    for state, writers in ((given, (0, 1, 2, 3)), (ll.TrainState(params={"w": torch.zeros(3)}), (0,))):
        if broken not in writers:
            continue  # a rank that writes nothing has nothing that is interrupted
        kept = os.fsync
        if rank == broken:
            os.fsync = interrupted
        expected = KeyboardInterrupt if rank == broken else RuntimeError
        with pytest.raises(expected, match=None if rank == broken else f"rank {broken}: KeyboardInterrupt"):
            ckpt.save(state)
        os.fsync = kept
        dist.barrier()
        assert names_in(folder / "never") == []

# Two dimensions: sharded and replicated, sharded twice, columns
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
values = {"a": torch.randn(7, 6), "b": torch.randn(8, 5).bfloat16(), "c": torch.randn(3, 9), "s": torch.tensor(5.0)}
places = {"a": [Replicate(), Shard(0)], "b": [Shard(0), Shard(1)], "c": [Shard(1), Replicate()]}
places["s"] = [Replicate(), Replicate()]
torch.manual_seed(0)
values = {name: torch.randn(value.shape).to(value.dtype) for name, value in values.items()}
spread = {name: distribute_tensor(value, mesh, places[name]) for name, value in values.items()}
ckpt = ll.checkpoint_io(folder / "mesh")
state = ll.TrainState(params=spread, step=1)
path = ckpt.save(state)
size = sum(value.nbytes for value in values.values())
assert sum(p.stat().st_size for p in path.glob("tensors-*")) < size + 4 * 1000  # each number once, and headers
blank = {name: torch.zeros_like(value) for name, value in values.items()}
turned = {name: distribute_tensor(value, mesh, places[name][::-1]) for name, value in blank.items()}
found = ckpt.restore(ll.TrainState(params=turned))
for name, value in values.items():
    assert torch.equal(found.params[name].full_tensor(), value), name
    assert found.params[name].placements == tuple(places[name][::-1])
whole = ckpt.restore(ll.TrainState(params=blank))
assert all(torch.equal(whole.params[name], value) for name, value in values.items())

# Tensor parallel within FSDP2, whose shards are of shards
model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
given = state_of(model, noise=2).replace(step=1)
ckpt = ll.checkpoint_io(folder / "parallel")
ckpt.save(given)
plain = state_of(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4)))
assert same(ckpt.restore(plain), given)

# Copies on two meshes, of which the one with rank 0 writes
value = torch.arange(10.0)
ckpt = ll.checkpoint_io(folder / "meshes")
ckpt.save(ll.TrainState(params={"w": distribute_tensor(value, mesh["data"], [Shard(0)])}))
assert torch.equal(ckpt.restore(ll.TrainState(params={"w": torch.zeros(10)})).params["w"], value)

# Not sharded: the first rank writes what one process does
ddp = DistributedDataParallel(net(0))
given = state_of(ddp, noise=1).replace(step=3)
for asynchronous in (False, True):
    ckpt = ll.checkpoint_io(folder / f"whole-{asynchronous}", keep_last=2, asynchronous=asynchronous)
    for step in range(3, 6):
        path = ckpt.save(given.replace(step=step))
    ckpt.wait()
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "tensors.safetensors"]
    assert [c.step for c in ckpt.steps()] == [4, 5]
    restored = ckpt.restore(state_of(DistributedDataParallel(net(rank))))
    assert same(restored, given.replace(step=5))
    with full_disk(100) if rank == 0 else contextlib.nullcontext():
        with pytest.raises(OSError, match=r"step-00000006 could not be saved: rank 0: File too large"):
            ckpt.save(given.replace(step=6))
            ckpt.wait()
    assert ckpt.latest().step == 5
    damage(folder / f"whole-{asynchronous}" / "step-00000005", "tensors.safetensors")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert ckpt.restore(restored).step == 4
    assert ["rank 0: " in str(w.message) for w in seen] == [True]
"""

SHAPES = """
# Every shape over every mesh
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
shapes = [(), (0,), (1,), (3,), (4,), (9,), (0, 3), (1, 7), (5, 3), (2, 3, 5)]
line = init_device_mesh("cpu", (world,))
ways = [(line, [Replicate()])] + [(line, [Shard(axis)]) for axis in range(3)]
ways += [(mesh, [a, b]) for a in (Replicate(), Shard(0), Shard(1)) for b in (Replicate(), Shard(0), Shard(1))]
values, spread, other = {}, {}, {}
for shape in shapes:
    fit = [way for way in ways if all(p.is_replicate() or p.dim < len(shape) for p in way[1])]
    for i, (grid, placed) in enumerate(fit):
        name = f"{shape} {i}"
        torch.manual_seed(len(values))
        values[name] = torch.randn(shape)
        spread[name] = distribute_tensor(values[name], grid, placed)
        grid, placed = fit[(i + 3) % len(fit)]
        other[name] = distribute_tensor(torch.zeros(shape), grid, placed)
ckpt = ll.checkpoint_io(folder / "shapes")
ckpt.save(ll.TrainState(params=spread))
for start in (spread, other, {name: torch.zeros_like(value) for name, value in values.items()}):
    found = full(ckpt.restore(ll.TrainState(params=start))).params
    assert all(torch.equal(found[name], value) for name, value in values.items())
"""

TWO = """
reference = torch.load(folder / "full.pt")


def equal(state):
    leaves = [leaf for leaf in pytree.tree_leaves(full(state)) if isinstance(leaf, torch.Tensor)]
    return all(torch.equal(a, b) for a, b in zip(leaves, reference, strict=True))


for source in ("sharded-False", "sharded-True", "whole-False", "one"):
    ckpt = ll.checkpoint_io(folder / source)
    for model in (fsdp(5), DistributedDataParallel(net(5)), net(5)):
        state = state_of(model)
        for start in (ll.copy_state(state), state):
            assert not equal(start)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = ckpt.restore(start)
            assert equal(found), (source, type(model))
            if start is state:
                slots = dict((model.module if hasattr(model, "module") else model).named_parameters())
                assert all(found.params[name] is p for name, p in slots.items())
    weights = ckpt.restore(ll.init_state(fsdp(5)), weights_only=True)
    assert torch.equal(weights.params["0.weight"].full_tensor(), reference[0])
    with pytest.raises(ValueError, match=r"0.weight is a float32 .* in the checkpoint, a float64 .* in the state"):
        ckpt.restore(state_of(fsdp(5).double()))
# From two ranks again, and what they keep
ckpt = ll.checkpoint_io(folder / "again", keep_last=1)
state = ckpt.restore(state_of(fsdp(5)))
state = ll.checkpoint_io(folder / "one").restore(state)
for step in (3, 4):
    ckpt.save(state.replace(step=step))
assert names_in(folder / "again") == ["step-00000004"]
assert equal(ckpt.restore(state_of(fsdp(6))))
"""


SHARED = """
# Shards that share a tensor in the state and were saved apart
state = state_of(fsdp(0), noise=1)
start = {name: p.detach().clone() * 2 for name, p in state.params.items()}
expected = ll.copy_state(state.replace(extra={"start": start}))
ll.checkpoint_io(folder).save(expected)
model = fsdp(5)
state = ll.init_state(model, adamw, epoch_length=7)
restored = ll.checkpoint_io(folder).restore(state.replace(extra={"start": state.params}))
assert same(restored, expected)
assert all(restored.params[name] is p for name, p in model.named_parameters())

# One save of a step after another, with different numbers on each rank's disk
ckpt = ll.checkpoint_io(folder / "again", keep_last=2, monitor="loss")
for samples, metrics in ((1, {"loss": 0.5}), (2, None), (3, {"loss": 0.25})):
    ckpt.save(expected.replace(step=1, samples=samples), metrics)
    (found,) = ckpt.steps()
    assert found.samples == samples
    assert found.metrics == {"loss": 0.25 if samples == 3 else 0.5}  # those of the same weights
assert names_in(folder / "again") == ["step-00000001.2"]
other = fsdp(0)
ckpt.save(ll.init_state(other, adamw, epoch_length=7).replace(step=1, extra=expected.extra))
assert ckpt.latest().metrics == {}
"""


ONE = """
reference = torch.load(folder / "full.pt")
for asynchronous in (False, True):
    ckpt = ll.checkpoint_io(folder / f"alone-{asynchronous}", asynchronous=asynchronous)
    start = ll.checkpoint_io(folder / "sharded-False").restore(state_of(fsdp(5)))
    path = ckpt.save(start)
    ckpt.wait()
    assert (path / "tensors-00000.safetensors").exists()
    found = full(ckpt.restore(state_of(net(6))))
    leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(leaves, reference, strict=True))
"""


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def state_of(model):
    state = ll.init_state(model, adamw, epoch_length=7)
    ema = {name: p.detach().clone() for name, p in state.params.items()}
    return state.replace(extra={"ema": ema, "best": 0.5, "none": None})


@pytest.fixture
def folder(tmp_path, tmp_path_factory):
    """Folder of checkpoints saved by four ranks, after checking everything in FOUR."""
    made = made_once(tmp_path_factory, "ranks", lambda folder: launch_script(4, FOUR, folder))
    return shutil.copytree(made, tmp_path / "ranks", symlinks=True)


@pytest.mark.slow
def test_of_four_into_one(folder):
    reference = torch.load(folder / "full.pt")
    for source in ("sharded-False", "sharded-True"):
        for bind in (False, True):
            state = state_of(net(5))
            ckpt = ll.checkpoint_io(folder / source, monitor="loss")
            found = ckpt.restore(state if bind else ll.copy_state(state), "best")
            assert all(torch.equal(a, b) for a, b in zip(tensors_of(found), reference, strict=True))
            assert (found.step, found.epoch, found.batch, found.samples) == (3, 1, 2, 40)
            assert found.extra["best"] == 0.5


@pytest.mark.slow
def test_of_four_into_two_and_of_one_into_two(folder):
    reference = torch.load(folder / "full.pt")
    state = ll.checkpoint_io(folder / "sharded-False").restore(state_of(net(5)))
    ll.checkpoint_io(folder / "one").save(state)
    assert len(reference) == len(tensors_of(state))
    launch_script(2, TWO, folder)


def test_shards_that_share_a_tensor_and_a_step_that_is_saved_again(tmp_path):
    launch_script(2, SHARED, tmp_path)


@pytest.mark.slow
def test_every_shape_over_every_mesh(tmp_path):
    launch_script(4, SHAPES, tmp_path)


@pytest.mark.slow
def test_of_four_into_one_rank_that_is_sharded_and_back(folder):
    launch_script(1, ONE, folder)


@pytest.mark.slow
def test_safetensors_reads_the_shards_and_a_part_that_nobody_wrote_is_missed(folder, tmp_path):
    path = shutil.copytree(folder / "sharded-False" / "step-00000003", tmp_path / "step-00000003")
    found = ll.checkpoint_io(tmp_path).restore(state_of(net(5)))
    files = sorted(path.glob("tensors*"))
    rows = [safetensors.torch.load_file(file).get("/params/0.weight") for file in files]
    assert len(files) == 3  # of five rows the fourth rank has none, nor of any other
    assert torch.equal(torch.cat([row for row in rows if row is not None]), found.params["0.weight"])
    (about,) = ll.checkpoint_io(tmp_path).steps()
    assert about.bytes == sum(file.stat().st_size for file in files)
    good = files[1].read_bytes()
    files[1].write_bytes(re.sub(rb"\[\[(\d),", rb"[[\1.", good, count=1))  # one flipped bit
    with pytest.raises(ll.checkpoint.DamagedCheckpointError, match=files[1].name):
        ll.checkpoint_io(tmp_path).restore(state_of(net(5)), 3)
    files[1].write_bytes(good)
    forged_header(files[1], lambda header: header.pop("/params/0.weight"))
    with pytest.raises(ll.checkpoint.DamagedCheckpointError, match="do not have all of /params/0"):
        ll.checkpoint_io(tmp_path).restore(state_of(net(5)), 3)


# SIGKILL

KILL = """
import os, random, signal, sys, time, warnings
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import looplib as ll
import torch.distributed.checkpoint  # once, before the forks
warnings.simplefilter("error")
folder, rounds, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
random.seed(0)


def plain(step):
    return {f"w{i}": torch.full((7, 1001), float(step)) for i in range(5)}


def rank_of_a_run(rank, number, form, asynchronous):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{number}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))

    def state_at(step):
        params = plain(step)
        if form == "sharded":
            params = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in params.items()}
        return ll.TrainState(step=step, params=params)

    ckpt = ll.checkpoint_io(folder / form, keep_last=2, asynchronous=asynchronous)
    step = ckpt.restore(state_at(0)).step
    print("begin", rank, step, flush=True)
    while True:
        step += 1
        ckpt.save(state_at(step))


last = {"sharded": 0, "whole": 0}
for number in range(rounds):
    form, asynchronous = ("sharded", "whole", "sharded")[number % 3], number % 2 == 0
    ranks = []
    for rank in range(world):
        if (process := os.fork()) == 0:
            try:
                rank_of_a_run(rank, number, form, asynchronous)
            except BaseException as error:
                print(f"rank {rank} ended by {type(error).__name__}: {str(error)[:200]}", flush=True)
            os._exit(3)
        ranks.append(process)
    ckpt = ll.checkpoint_io(folder / form)
    end = time.monotonic() + 300
    while (now := ckpt.latest()) is None or now.step <= last[form]:  # until it saves
        assert time.monotonic() < end, "no save came"
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    victim = random.randrange(world)
    os.kill(ranks[victim], signal.SIGKILL)
    ended = []
    end = time.monotonic() + 300
    for process in ranks:
        while not (done := os.waitpid(process, os.WNOHANG))[0]:
            assert time.monotonic() < end, "a rank hangs"
            time.sleep(0.01)
        ended.append(os.waitstatus_to_exitcode(done[1]))
    assert sorted(ended) == [-9] + [3] * (world - 1), ended
    fresh = ll.checkpoint_io(folder / form)
    for found in fresh.steps():  # each is whole, and of one moment
        state = fresh.restore(ll.TrainState(params=plain(0)), found.step)
        assert all(torch.equal(value, plain(found.step)[name]) for name, value in state.params.items())
    assert fresh.latest().step > last[form]
    last[form] = fresh.latest().step
for form in last:
    if (folder / form).exists():
        ckpt = ll.checkpoint_io(folder / form)
        ckpt.save(ll.TrainState(step=10**6, params=plain(1)))
        names = [path.name for path in (folder / form).iterdir() ]
        assert all(name.startswith("step-") for name in names), names
"""


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.large)])
def test_a_killed_rank_takes_the_others_down_and_leaves_whole_ones(tmp_path, rounds):
    (tmp_path / "kill.py").write_text(KILL)
    launch(0, run_script, str(tmp_path / "kill.py"), str(tmp_path), str(rounds), "2")


def restored_on_ranks(folder):
    with ll.distributed.setup():
        assert ll.checkpoint_io(folder).restore(ll.TrainState(params={"w": torch.zeros(2)})).step == 7


def test_the_first_rank_says_what_was_restored(tmp_path):
    path = ll.checkpoint_io(tmp_path).save(ll.TrainState(step=7, params={"w": torch.ones(2)}))
    printed = launch(2, restored_on_ranks, str(tmp_path))
    words = f"Restored step 7 (epoch 0, batch 0) from {min(os.path.relpath(path), str(path), key=len)}\n"
    assert printed.count(words) == printed.count("Restored") == 1
