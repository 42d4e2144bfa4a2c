"""Objects of raw loops of several ranks: what they share, what each has of its own, and what cannot be merged."""

import textwrap

import pytest
from ranks import launch, run_script

COMMON = """
import contextlib, random, sys, warnings
from pathlib import Path
import numpy, pytest, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
import looplib as ll
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Sampler:
    def __init__(self):
        self.order = list(range(rank, 9, world))

    def state_dict(self):
        return {"order": self.order, "seen": torch.tensor(self.order)}

    def load_state_dict(self, state):
        self.order, self.seen = state["order"], state["seen"]


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))


def run_of(seed, wrap, lr=0.1):
    model = wrap(net(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    torch.manual_seed(seed + rank)  # each rank has masks of its own
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "sampler": Sampler(),
            "random": ll.checkpoint.RandomStreams(), "loss": 0.0}


def train(run, steps):
    for _ in range(steps):
        run["optimizer"].zero_grad()
        loss = run["model"](torch.randn(6, 3) + run["sampler"].order[0]).square().mean()
        loss.backward()
        run["optimizer"].step()
        run["scheduler"].step()
        run["sampler"].order = run["sampler"].order[1:]
        run["step"] += 1
        run["loss"] = loss.item()


def full(tree):
    whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf
            for leaf in torch.utils._pytree.tree_leaves(torch.utils._pytree.tree_map(whole, tree))]


def end_of(run):
    # The running statistics of batch norm are the first rank's, which FSDP2 leaves to each rank.
    weights = dict(run["model"].state_dict() if rank == 0 else run["model"].named_parameters())
    states = [full(run[name].state_dict()) for name in ("optimizer", "scheduler")]
    return [full(weights), *states, run["sampler"].order, run["loss"], torch.rand(2).tolist()]


def ddp(model):
    return DistributedDataParallel(model)


def fsdp(model):
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def shown(tensors):
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def whole_states(run):
    return full([dict(run["model"].state_dict()), run["optimizer"].state_dict()["state"]])
"""


def launch_script(ranks, script, folder):
    path = folder / f"script-{ranks}.py"
    path.write_text(COMMON + textwrap.dedent(script) + "\ndist.barrier()\ndist.destroy_process_group()\n")
    launch(ranks, run_script, str(path), str(folder))


TWO = """
for wrap in (ddp, fsdp):
    for asynchronous in (False, True):
        ckpt = ll.checkpoint_io(folder / f"{wrap.__name__}-{asynchronous}", asynchronous=asynchronous)
        run = ckpt.restore(run_of(0, wrap))
        train(run, 2)
        ckpt.save(run)
        torch.save(whole_states(run), folder / f"{wrap.__name__}.pt") if rank == 0 else whole_states(run)
        train(run, 2)
        unbroken = end_of(run)
        ckpt.wait()
        again = run_of(5, wrap)
        resumed = ckpt.restore(again, quiet=True)
        train(resumed, 2)
        assert end_of(resumed) == unbroken, (wrap, rank)

# A step that is not counted, which the first rank says
ckpt, run = ll.checkpoint_io(folder / "not counted"), run_of(0, fsdp)
ckpt.save(run)
ckpt.save(run)
train(run, 1)
says = pytest.warns(UserWarning, match="step 0 is saved a second time.*changed: model")
with contextlib.nullcontext() if rank else says:
    ckpt.save({**run, "step": 0})

# A rank that has something else
ckpt, run = ll.checkpoint_io(folder / "refused"), run_of(0, ddp, lr=0.1 * (1 + rank))
with pytest.raises(ValueError, match=r"differs between ranks.*\\n.*/optimizer/param_groups/0/lr is 0.1 on rank 0, 0.2 on rank 1"):
    ckpt.save(run)
run = run_of(0, ddp)
with pytest.raises(ValueError, match="differs between ranks.*\\n.*step is 0 on rank 0, 1 on rank 1"):
    ckpt.save({**run, "step": rank})
with pytest.raises(ValueError, match="differs between ranks.*\\n.*the names are"):
    ckpt.save({**run, f"own of {rank}": 3})
with pytest.raises(TypeError, match="rank 1: /objects/x is the function print, which a checkpoint cannot hold"):
    ckpt.save({**run, "x": print if rank else 3})
sharded = run_of(0, fsdp)
with pytest.raises(TypeError, match="/objects/x/0 is a DTensor, which is restored only in a module"):
    ckpt.save({"x": [next(sharded["model"].parameters())], "step": 0})
assert ckpt.steps() == []

# An object that fits on one rank alone
ckpt.save(run)
fresh = {**run_of(3, ddp)}
before = shown(fresh["model"].state_dict())
with pytest.raises(ValueError, match="rank 1: .*does not fit"):
    ckpt.restore({**fresh, **({"ema": nn.Linear(1, 1)} if rank else {})})
assert shown(fresh["model"].state_dict()) == before
"""

OTHER = """
# Of two ranks with DDP and FSDP2, into this number with each of them
for saved in ("ddp", "fsdp"):
    for wrap in (ddp, fsdp, lambda model: model):
        ckpt, run = ll.checkpoint_io(folder / f"{saved}-False"), run_of(7, wrap)
        with pytest.raises(ValueError, match="sampler was saved for each rank, by a different number of ranks"):
            ckpt.restore(run)
        found = ckpt.restore(run, optional=("sampler", "random", "loss"), quiet=True)
        assert (found["step"], found["loss"]) == (2, 0.0)
        assert whole_states(run) == torch.load(folder / f"{saved}.pt"), (saved, wrap)
        train(run, 1)
"""


@pytest.mark.slow
def test_ranks_resume_with_what_they_share_and_what_each_has_of_its_own(tmp_path):
    launch_script(2, TWO, tmp_path)
    launch_script(1, OTHER, tmp_path)
    launch_script(3, OTHER, tmp_path)
