"""A state in parts goes out whole and comes in again: real ranks against the same model in one process."""

import argparse
import contextlib
import copy
import time
import warnings
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from ranks import launch
from shared import file_size_limit
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import looplib as ll


class Net(nn.Module):
    """Of three rows and of seven, which neither two ranks nor four divide; tied weights; buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 7, bias=False)
        self.block = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.ones(7), persistent=False)

    def forward(self, x):
        return self.head(self.block(x)) * self.gain * self.mask + self.embed(x)


def net(seed=0):
    torch.manual_seed(seed)
    model = Net()
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = torch.randn(tensor.shape).to(tensor.dtype)
    return model


def sharded(model):
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    fully_shard(model.block[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensors(table):
    return {name: value for name, value in table.items() if isinstance(value, torch.Tensor)}


def equal(found, expected):
    """The same names in the same order, and whole tensors of the same bits."""
    found, expected = tensors(found), tensors(expected)
    return list(found) == list(expected) and all(
        not isinstance(found[name], DTensor) and torch.equal(found[name], expected[name]) for name in expected
    )


def full(tree):
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.detach().full_tensor() if isinstance(leaf, DTensor) else leaf, tree
    )


def spread(state):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, DTensor)]


def same_trees(one, other):
    one, other = (torch.utils._pytree.tree_flatten(full(tree)) for tree in (one, other))
    return one[1] == other[1] and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one[0], other[0], strict=True)
    )


def trained(model, optimizer, steps=3):
    """After some donated steps, each rank on its own rows."""
    step = ll.make_train_step(
        ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer, donate=True
    )
    state = ll.init_state(model, optimizer)
    for number in range(steps):
        generator = torch.Generator().manual_seed(10 * number + distributed.get_rank())
        state, _ = step(state, torch.randn(3, 4, generator=generator))
    return state


def on_ranks(function, folder):
    """Work of each rank, with warnings as errors as in the test process."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
    distributed.init_process_group("gloo")
    function(folder)
    distributed.barrier()
    distributed.destroy_process_group()


# Out


def weights_go_out(folder):
    first = distributed.get_rank() == 0
    plain, model = net(), sharded(net())
    state = ll.init_state(model)
    found, expected = ll.checkpoint.state_dict(model, state), plain.state_dict()
    assert equal(found, expected)
    assert found._metadata == expected._metadata
    assert equal(found, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in tensors(found).values())
    plain.load_state_dict(found)

    # Another state than the module's, such as an average
    doubled = state.replace(params={name: p.detach() * 2 for name, p in state.params.items()})
    expected = ll.checkpoint.state_dict(plain, ll.init_state(plain))
    params = dict(plain.named_parameters())
    expected = {k: v * 2 if k in params or k == "head.weight" else v for k, v in tensors(expected).items()}
    assert equal(ll.checkpoint.state_dict(model, doubled), expected)
    assert equal(ll.checkpoint.state_dict(model, state), plain.state_dict())
    offloaded = ll.checkpoint.state_dict(model, doubled, cpu_offload=True)
    assert equal(offloaded, expected) if first else offloaded == {}
    ll.checkpoint.save_safetensors(model, doubled, folder / "doubled.safetensors")

    # After training, and of whole tensors
    state = trained(model, ll.optimizer(torch.optim.AdamW, lr=0.1))
    whole = full(state.params)
    found = ll.checkpoint.state_dict(model, state)
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    ll.checkpoint.save_safetensors(model, state, folder / "trained.safetensors")
    ll.checkpoint.save_safetensors(DistributedDataParallel(net()), ll.init_state(net()), folder / "whole.safetensors")
    if first:
        torch.save(found, folder / "trained.pt")
    for name, params in {"trained": whole, "doubled": full(doubled.params)}.items():  # for all have waited for it
        loaded = safetensors.torch.load_file(folder / f"{name}.safetensors")
        assert all(torch.equal(loaded[name], value) for name, value in params.items())


def one_tensor_at_a_time(folder):
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(32)])
    for layer in model:
        fully_shard(layer)
    state = ll.init_state(fully_shard(model))
    alive, gather = weakref.WeakSet(), DTensor.full_tensor
    first = distributed.get_rank() == 0

    def counted(tensor):
        end = time.monotonic() + 300
        while alive and not first:  # until gloo's thread has let go of the last as well
            assert time.monotonic() < end, "the tensor that was gathered before is still there"
        found = gather(tensor)
        alive.add(found.untyped_storage())
        return found

    DTensor.full_tensor = counted
    ll.checkpoint.save_safetensors(model, state, folder / "large.safetensors")
    DTensor.full_tensor = gather


def what_fails_on_the_first_fails_on_all(folder):
    rank = distributed.get_rank()
    model = sharded(net())
    state = ll.init_state(model)
    path = folder / "kept.safetensors"
    ll.checkpoint.save_safetensors(model, state, path)
    before = path.read_bytes()
    distributed.barrier()

    def limit(first=0):
        return file_size_limit(50) if rank == first else contextlib.nullcontext()

    words = r"rank 0: .*kept.safetensors could not be written: .*File too large"
    with pytest.raises(OSError, match=words), limit():
        ll.checkpoint.save_safetensors(model, state, path)
    assert path.read_bytes() == before
    with pytest.raises(OSError, match=r"rank 0: .*nowhere/file could not be written: .*No such file or directory"):
        ll.checkpoint.save_safetensors(model, state, folder / "nowhere" / "file")
    (folder / "taken").mkdir(exist_ok=True)
    with pytest.raises(OSError, match=r"rank 0: .*directory"):
        ll.checkpoint.save_safetensors(model, state, folder / "taken")
    with limit(1):  # who writes nothing
        ll.checkpoint.save_safetensors(model, state, path)
    assert sorted(found.name for found in folder.iterdir()) == ["kept.safetensors", "taken"]

    other = ll.init_state(nn.Linear(2, 1))
    for call in (
        lambda: ll.checkpoint.state_dict(model, other),
        lambda: ll.checkpoint.save_safetensors(model, other, path),
    ):
        with pytest.raises(ValueError, match=r"the state's parameters are not those of this FSDPNet"):
            call()


# In


def weights_come_in(folder):
    rank, world = distributed.get_rank(), distributed.get_world_size()
    plain, model = net(1), sharded(net())
    state = ll.init_state(model).replace(step=7)
    expected = plain.state_dict()
    path = folder / "in.pt"
    if rank == 0:
        torch.save(expected, path)
        safetensors.torch.save_model(plain, str(folder / "in.safetensors"))
    distributed.barrier()
    for source in (expected, path, folder / "in.safetensors"):
        with CommDebugMode() as sent:
            loaded = ll.checkpoint.load_state_dict(model, state, source)
        assert sent.get_total_counts() == 0
        for name, value in state.params.items():
            new = loaded.params[name]
            assert (new.placements, new.device_mesh, new.shape, new.stride()) == (
                value.placements,
                value.device_mesh,
                value.shape,
                value.stride(),
            )
            assert new.to_local().shape == value.to_local().shape
            assert new.requires_grad
            assert new.is_leaf
        assert equal(full(loaded.params), dict(plain.named_parameters()))
        assert loaded.step == 7
        assert equal(ll.checkpoint.state_dict(model, state), net().state_dict())  # as it was
    state = ll.bind(model, loaded)
    assert equal(ll.checkpoint.state_dict(model, state), expected)
    assert state.params["gain"] is model.gain

    # From parts: of the same layout, of others, and into whole ones
    other = sharded(net(2))
    loaded = ll.checkpoint.load_state_dict(model, state, other.state_dict())
    assert equal(ll.checkpoint.state_dict(model, loaded), net(2).state_dict())
    line = init_device_mesh("cpu", (world,))
    parts = {
        name: distribute_tensor(value, line, [Shard(value.ndim - 1) if value.ndim else Replicate()])
        for name, value in expected.items()
    }
    for into in (model, net()):
        loaded = ll.checkpoint.load_state_dict(into, ll.init_state(into), parts)
        assert equal(ll.checkpoint.state_dict(into, loaded), expected)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in expected.items()}
    assert equal(ll.checkpoint.state_dict(model, ll.checkpoint.load_state_dict(model, state, wide)), expected)

    # What does not fit is told on each rank, though one has none of what differs
    wrong = expected["head.weight"].clone()
    wrong[0, 0] += 1
    cases = {
        r"head.weight has other values than another name of the same tied weight": {"head.weight": wrong},
        r"0.weight has shape \(1, 4\), the state's has \(3, 4\), of which each rank holds a part: give it whole": {
            "block.0.weight": torch.ones(1, 4)
        },
        r"gain is of torch.complex64, which does not go into the state's torch.float32": {
            "gain": torch.ones(1, dtype=torch.complex64)
        },
    }
    for words, change in cases.items():
        with pytest.raises(ValueError, match=words):
            ll.checkpoint.load_state_dict(model, state, {**expected, **change})
    torn = {**parts, "head.weight": distribute_tensor(wrong, line, [Shard(0)])}
    with pytest.raises(ValueError, match=r"head.weight has other values"):
        ll.checkpoint.load_state_dict(model, state, torn)


def of_tensor_parallel_within_shards(folder):
    """Shards of shards, of sizes that nothing divides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6))
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for wrap in (False, True):
        if wrap:
            fully_shard(model, mesh=mesh["data"])
        state = ll.init_state(model)
        assert equal(ll.checkpoint.state_dict(model, state), plain.state_dict())
        other = {name: value + 1 for name, value in plain.state_dict().items()}
        loaded = ll.checkpoint.load_state_dict(model, state, other)
        assert equal(ll.checkpoint.state_dict(model, loaded), other)
        assert equal(ll.checkpoint.state_dict(model, state), plain.state_dict())


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
}


def optimizers_go_out_and_come_in(folder):
    rank, world = distributed.get_rank(), distributed.get_world_size()
    for name, (cls, options) in [*OPTIMIZERS.items()][: 4 if world == 2 else 1]:
        model, plain = sharded(net()), net()
        optimizer = ll.optimizer(cls, **options)
        state = trained(model, optimizer)
        assert spread(state.opt_state), name
        fresh = ll.init_state(sharded(net()), optimizer).replace(step=3)

        # Whole, as of one process
        raw = cls(model.parameters(), **options)
        whole = ll.checkpoint.optimizer_state_dict(model, state, raw)
        assert not spread(whole)
        alone = cls(plain.parameters(), **options)
        alone.load_state_dict(copy.deepcopy(whole))
        back = ll.checkpoint.load_optimizer_state_dict(plain, ll.init_state(plain, optimizer).replace(step=3), alone)
        assert same_trees(back.opt_state, state.opt_state), name
        offloaded = ll.checkpoint.optimizer_state_dict(model, state, raw, cpu_offload=True)
        assert same_trees(offloaded, whole) if rank == 0 else offloaded == {}

        # In parts, for a raw loop over the same parts, whose next step is looplib's
        parts = ll.checkpoint.optimizer_state_dict(model, state, raw, full_state_dict=False)
        assert len(spread(parts)) == len(spread(state.opt_state))
        assert same_trees(parts, whole)
        raw.load_state_dict(parts)
        grads = {key: (p.detach() + 1).sin() for key, p in state.params.items()}
        params, opt_state, _ = optimizer.update(grads, state.opt_state, state.params, 3)
        back = ll.checkpoint.load_optimizer_state_dict(model, fresh, raw)
        assert same_trees(back.opt_state, state.opt_state), name
        for key, p in model.named_parameters():
            p.grad = grads[key]
        raw.step()
        for key, p in model.named_parameters():
            # Kernels that are not fused on both sides differ in the last bit.
            close = {} if "fused" in options else {"rtol": 1e-6, "atol": 1e-7}
            torch.testing.assert_close(p.to_local(), params[key].to_local(), **(close or {"rtol": 0, "atol": 0}))
        back = ll.checkpoint.load_optimizer_state_dict(model, fresh, raw)
        assert "fused" not in options or same_trees(back.opt_state, opt_state), name

        # Whole ones into parts
        raw.load_state_dict(copy.deepcopy(whole))
        with CommDebugMode() as sent:
            back = ll.checkpoint.load_optimizer_state_dict(model, fresh, raw)
        assert sent.get_total_counts() == 0
        for new, old in zip(spread(back.opt_state), spread(state.opt_state), strict=True):
            assert new.placements == old.placements
            assert torch.equal(new.to_local(), old.to_local())
        key = next(key for key, value in raw.state[model.gain].items() if value.shape == (1,))
        raw.state[model.gain][key] = torch.ones(world + 1)
        words = rf"gain's {key} has shape \({world + 1},\) in this {cls.__name__}, the state's has \(1,\), of which"
        with pytest.raises(ValueError, match=words):
            ll.checkpoint.load_optimizer_state_dict(model, fresh, raw)


class Saving(Net):
    """A model with the method that those of transformers have."""

    def save_pretrained(self, directory, state_dict, **arguments):
        Path(directory).mkdir(exist_ok=True)
        torch.save((state_dict, arguments), Path(directory) / "weights.pt")


def a_folder_goes_out(folder):
    first = distributed.get_rank() == 0
    model = sharded(Saving())
    state = ll.init_state(model)
    state = state.replace(params={name: p.detach() * 3 for name, p in state.params.items()})  # not the module's own
    expected = ll.checkpoint.state_dict(model, state)
    ll.checkpoint.save_pretrained(model, state, folder / "model", max_shard_size="4KB")
    weights, arguments = torch.load(folder / "model" / "weights.pt")
    assert equal(weights, expected)
    assert arguments == {"max_shard_size": "4KB"}
    if first:
        (folder / "file").write_text("kept")
    distributed.barrier()
    with pytest.raises(NotADirectoryError, match=r"rank 0: .*file is a file; save_pretrained needs a folder"):
        ll.checkpoint.save_pretrained(model, state, folder / "file")
    limit = file_size_limit(50) if first else contextlib.nullcontext()
    with pytest.raises(Exception, match="rank 0: "), limit:
        ll.checkpoint.save_pretrained(model, state, folder / "full")
    with pytest.raises(ValueError, match="distributed_checkpoint=True has all ranks write"):
        ll.checkpoint.save_pretrained(model, state, folder / "parts", distributed_checkpoint=True)
    model.config = argparse.Namespace(distributed_config={"tp_size": 2})
    with pytest.raises(ValueError, match=r"config.distributed_config has all ranks write.*fully_shard"):
        ll.checkpoint.save_pretrained(model, state, folder / "parts")
    assert not (folder / "parts").exists()


CASES = [weights_go_out, one_tensor_at_a_time, what_fails_on_the_first_fails_on_all]
CASES += [weights_come_in, optimizers_go_out_and_come_in, a_folder_goes_out]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_of_ranks(case, ranks, tmp_path):
    launch(ranks, on_ranks, case, tmp_path)
    if case is not weights_go_out:
        return
    # What one process has and writes
    plain = net()
    ll.checkpoint.save_safetensors(plain, ll.init_state(plain), tmp_path / "one.safetensors")
    one, whole = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("one", "whole"))
    doubled = safetensors.torch.load_file(tmp_path / "doubled.safetensors")
    params = dict(plain.named_parameters())
    assert equal(whole, one)
    assert equal(doubled, {name: value * 2 if name in params else value for name, value in one.items()})
    with safetensors.safe_open(tmp_path / "trained.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    by_torch = torch.load(tmp_path / "trained.pt", weights_only=True)
    for source in (tmp_path / "trained.safetensors", tmp_path / "trained.pt"):
        loaded = ll.checkpoint.load_state_dict(plain, ll.init_state(plain), source)
        assert equal(ll.checkpoint.state_dict(plain, loaded), by_torch)


def test_of_tensor_parallel_within_shards(tmp_path):
    launch(4, on_ranks, of_tensor_parallel_within_shards, tmp_path)
