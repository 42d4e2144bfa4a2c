"""Optimizers and losses that might need more than a shard, with FSDP2: the bits of a raw loop, or refused by name."""

from unittest import mock

import pytest
import schedulefree
import torch
from problem import adamw
from ranks import launch, whole
from shared import SGD
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import looplib as ll


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(dtype)


def sharded(model):
    for module in (model[0], model[2], model):
        fully_shard(module)
    return model


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def batches(part=slice(None), dtype=torch.float32):
    pairs = torch.randn(4, 2, 8, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [(x[part], y[part]) for x, y in pairs]


def muon():
    parts = {"muon": ll.optimizer(torch.optim.Muon, lr=0.02), "rest": adamw(0.01)}
    return ll.optim.partition(parts, lambda name, tensor: "muon" if tensor.ndim == 2 else "rest")


def raw_muon(params):
    matrices, rest = ([p for p in params if (p.ndim == 2) is taken] for taken in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, fused=True)]


def schedule_free():
    return ll.optimizer(schedulefree.AdamWScheduleFree, lr=0.1)


def raw_schedule_free(params):
    raw = schedulefree.AdamWScheduleFree(params, lr=0.1)
    raw.train()
    return [raw]


def raw_loop(model, data, optimizers):
    for batch in data:
        loss_fn(model, batch).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    return dict(model.named_parameters())


def run(model, data, optimizer, loss=loss_fn, state=None):
    step = ll.make_train_step(ll.make_grad_fn(model, loss), optimizer, donate=True)
    state = state or ll.init_state(model, optimizer)
    for batch in data:
        state, _ = step(state, batch)
    return state


def local(params):
    return {name: getattr(p, "to_local", lambda p=p: p)().detach().clone() for name, p in params.items()}


def state_is(state, expected):
    found = local(state.params)
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def continued_and_resumed(data, optimizer, folder):
    """The last state of sharded runs that continue from two batches, of which one was stored in between."""
    model, other, ckpt = sharded(make()), sharded(make()), ll.checkpoint_io(folder)
    state = run(model, data[:2], optimizer)
    ckpt.save(state)
    state = run(model, data[2:], optimizer, state=state)
    resumed = run(other, data[2:], optimizer, state=ckpt.restore(ll.init_state(other, optimizer)))
    assert state_is(resumed, local(state.params))
    return state


def optimizers_on_two_ranks(folder):
    with ll.distributed.setup():
        rank = ll.distributed.rank()
        part = slice(4 * rank, 4 * rank + 4)
        data = batches(part)
        for name, ours, raw in (("muon", muon, raw_muon), ("free", schedule_free, raw_schedule_free)):
            model = sharded(make())
            expected = local(raw_loop(model, data, raw([*model.parameters()])))
            state = continued_and_resumed(data, ours(), f"{folder}/{name}")
            assert state_is(state, expected)
            with pytest.raises(TypeError, match=r"offload_state.*0.weight is a DTensor.*CPUOffloadPolicy"):
                ll.init_state(model, ll.optim.offload_state(adamw(0.01)))

            # Without its rounding to bfloat16 (by a method, since torch 2.15 by `to`), Muon on shards is Muon on whole ones.
            rounding = mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)
            with rounding, mock.patch.object(torch, "bfloat16", torch.float64):
                one = make(torch.double)
                alone = raw_loop(one, batches(dtype=torch.double), raw([*one.parameters()]))
                found = run(sharded(make(torch.double)), batches(part, torch.double), ours()).params
            torch.testing.assert_close(whole(found), alone, rtol=1e-9, atol=1e-12)


def assert_close_but_for_codes(found, expected):
    """Gradients summed over two ranks are rounded otherwise, which moves a moment between two codes of few bits to the other one.

    The weight then differs by up to a step. Such moments are rare.
    """
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0.01)  # the learning rate
        differs = ~torch.isclose(tensor, expected[name], rtol=1e-3, atol=1e-4)
        assert differs.double().mean() <= 1e-3, name


def few_bits_on_two_ranks(folder, names):
    import torchao.optim

    with ll.distributed.setup(), torch.compiler.set_stance("force_eager"):
        part = slice(4 * ll.distributed.rank(), 4 * ll.distributed.rank() + 4)
        data = batches(part)
        for cls in (getattr(torchao.optim, name) for name in names):
            ours, one = ll.optimizer(cls, lr=0.01), make()
            alone = raw_loop(one, batches(), [cls(one.parameters(), lr=0.01)])
            kept = run(DistributedDataParallel(make()), data, ours)
            assert_close_but_for_codes(dict(kept.params), alone)

            raw = cls([*(model := sharded(make())).parameters()], lr=0.01)
            expected = local(raw_loop(model, data, [raw]))
            assert type(raw.state[model[0].weight]["exp_avg"].to_local()).__name__.startswith("OptimState")
            state = continued_and_resumed(data, ours, f"{folder}/{cls.__name__}")
            assert state_is(state, expected)
            assert_close_but_for_codes(whole(state.params), alone)

            odd = nn.Sequential(nn.Linear(2048, 5), nn.Tanh(), nn.Linear(5, 1))
            with pytest.raises(TypeError, match=rf"{cls.__name__} keeps for 0.weight.*\(5, 2048\).*DistributedData"):
                ll.init_state(sharded(odd), ours)


def offloaded_on_two_ranks():
    with ll.distributed.setup():
        data = batches(slice(4 * ll.distributed.rank(), 4 * ll.distributed.rank() + 4))
        for wrap in (DistributedDataParallel, sharded):
            expected = local(run(wrap(make()), data, SGD).params)
            for choice in (nn.Linear, nn.Sequential):
                assert state_is(run(wrap(make()), data, SGD, ll.losses.offload(loss_fn, choice)), expected)


def test_optimizers_on_shards_are_those_of_one_process_or_refused(tmp_path):
    launch(2, optimizers_on_two_ranks, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("names", [["AdamW8bit"], ["AdamW8bit", "AdamW4bit", "AdamWFp8"]], ids=["8", "all"])
def test_moments_of_few_bits_on_shards_are_those_of_a_raw_loop(tmp_path, names):
    import torchao.optim

    launch(2, few_bits_on_two_ranks, str(tmp_path), names)
    model, optimizer = make(), ll.optimizer(torchao.optim.AdamW8bit, lr=0.01)
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match="qmap"):
        ll.checkpoint_io(tmp_path / "AdamW8bit").restore(ll.init_state(model, optimizer))


def test_offloaded_modules_run_in_ddp_and_fsdp():
    launch(2, offloaded_on_two_ranks)
