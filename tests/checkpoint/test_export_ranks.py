"""A state in parts goes out whole and comes in again: real ranks against the same model in one process."""

import contextlib
import copy
import time
import warnings
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from problem import adamw
from ranks import launch
from shared import bits, file_size_limit, mean_square
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
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
    return bits(full(one)) == bits(full(other))


def trained(model, optimizer, steps=3):
    """After some donated steps, each rank on its own rows."""
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), optimizer, donate=True)
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
    plain.load_state_dict(found)

    # Another state than the module's, such as an average
    doubled = state.replace(params={name: p.detach() * 2 for name, p in state.params.items()})
    params = {**dict(plain.named_parameters()), "head.weight": None}
    expected = {key: value * 2 if key in params else value for key, value in tensors(found).items()}
    assert equal(ll.checkpoint.state_dict(model, doubled), expected)
    assert equal(ll.checkpoint.state_dict(model, state), plain.state_dict())
    offloaded = ll.checkpoint.state_dict(model, doubled, cpu_offload=True)
    assert equal(offloaded, expected) if first else offloaded == {}

    # Files after training, and of whole tensors
    state = trained(model, adamw(0.1))
    for name, given_model, given_state in (
        ("trained", model, state), ("whole", DistributedDataParallel(net()), ll.init_state(net())),
    ):  # fmt: skip
        ll.checkpoint.save_safetensors(given_model, given_state, folder / f"{name}.safetensors")
        loaded = safetensors.torch.load_file(folder / f"{name}.safetensors")  # for all have waited for it
        assert all(torch.equal(loaded[key], value) for key, value in full(given_state.params).items())


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
    with (
        pytest.raises(Exception, match=r"rank 0: .*File too large"),
        file_size_limit(50) if rank == 0 else contextlib.nullcontext(),
    ):
        ll.checkpoint.save_safetensors(model, state, path)
    assert path.read_bytes() == before
    with pytest.raises(Exception, match=r"rank 0: .*No such file or directory"):
        ll.checkpoint.save_safetensors(model, state, folder / "nowhere" / "file")
    with file_size_limit(50) if rank == 1 else contextlib.nullcontext():  # who writes nothing
        ll.checkpoint.save_safetensors(model, state, path)
    assert [found.name for found in folder.iterdir()] == ["kept.safetensors"]


# In


def weights_come_in(folder):
    plain, model = net(1), sharded(net())
    state = ll.init_state(model).replace(step=7)
    expected = plain.state_dict()
    with CommDebugMode() as sent:
        loaded = ll.checkpoint.load_state_dict(model, state, expected)
    assert sent.get_total_counts() == 0
    for name, value in state.params.items():
        new = loaded.params[name]
        for attribute in ("placements", "device_mesh", "shape", "requires_grad", "is_leaf"):
            assert getattr(new, attribute) == getattr(value, attribute)
        assert (new.stride(), new.to_local().shape) == (value.stride(), value.to_local().shape)
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
    line = init_device_mesh("cpu", (distributed.get_world_size(),))
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
    for source, words in (
        (expected | {"head.weight": wrong}, "head.weight has other values"),
        (parts | {"head.weight": distribute_tensor(wrong, line, [Shard(0)])}, "head.weight has other values"),
        (expected | {"block.0.weight": torch.ones(1, 4)}, r"0.weight is .*\(1, 4\), .*\(3, 4\)"),
    ):
        with pytest.raises(ValueError, match=words):
            ll.checkpoint.load_state_dict(model, state, source)


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
}


def optimizers_go_out_and_come_in(folder):
    for name, (cls, options) in OPTIMIZERS.items():
        model, plain = sharded(net()), net()
        optimizer = ll.optimizer(cls, **options)
        state = trained(model, optimizer)
        fresh = ll.init_state(sharded(net()), optimizer).replace(step=3)

        # In parts, for a raw loop over the same parts, whose next step is looplib's
        raw = cls(model.parameters(), **options)
        parts = ll.checkpoint.optimizer_state_dict(model, state, raw)
        assert len(spread(parts)) == len(spread(state.opt_state)) > 0
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
            close = {"rtol": 0, "atol": 0} if "fused" in options else {"rtol": 1e-6, "atol": 1e-7}
            torch.testing.assert_close(p.to_local(), params[key].to_local(), **close)
        back = ll.checkpoint.load_optimizer_state_dict(model, fresh, raw)
        assert "fused" not in options or same_trees(back.opt_state, opt_state), name

        # Whole ones, as of one process, and back into parts
        whole = full(ll.checkpoint.optimizer_state_dict(model, state, raw))
        alone = cls(plain.parameters(), **options)
        alone.load_state_dict(copy.deepcopy(whole))
        back = ll.checkpoint.load_optimizer_state_dict(plain, ll.init_state(plain, optimizer).replace(step=3), alone)
        assert same_trees(back.opt_state, state.opt_state), name
        raw.load_state_dict(copy.deepcopy(whole))
        with CommDebugMode() as sent:
            back = ll.checkpoint.load_optimizer_state_dict(model, fresh, raw)
        assert sent.get_total_counts() == 0
        for new, old in zip(spread(back.opt_state), spread(state.opt_state), strict=True):
            assert new.placements == old.placements
            assert torch.equal(new.to_local(), old.to_local())


class Saving(Net):
    """A model with the method that those of transformers have."""

    def save_pretrained(self, directory, state_dict, **arguments):
        Path(directory).mkdir(exist_ok=True)
        torch.save((state_dict, arguments), Path(directory) / "weights.pt")


def a_folder_goes_out(folder):
    model = sharded(Saving())
    state = ll.init_state(model)
    state = state.replace(params={name: p.detach() * 3 for name, p in state.params.items()})  # not the module's own
    expected = ll.checkpoint.state_dict(model, state)
    ll.checkpoint.save_pretrained(model, state, folder / "model", max_shard_size="4KB")
    weights, arguments = torch.load(folder / "model" / "weights.pt")
    assert equal(weights, expected)
    assert arguments == {"max_shard_size": "4KB"}


CASES = [weights_go_out, one_tensor_at_a_time, what_fails_on_the_first_fails_on_all]
CASES += [weights_come_in, optimizers_go_out_and_come_in, a_folder_goes_out]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_of_ranks(case, ranks, tmp_path):
    launch(ranks, on_ranks, case, tmp_path)
    if case is weights_go_out:  # what one process has and writes
        plain = net()
        ll.checkpoint.save_safetensors(plain, ll.init_state(plain), tmp_path / "one.safetensors")
        assert equal(*(safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("one", "whole")))
