"""Checkpoints of adapters alone: small, complete with their base model, and refused with another one."""

import pytest
import torch
from problem import adamw
from ranks import launch
from shared import equal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import looplib as ll


class Adapted(nn.Module):
    """A frozen layer with a low-rank update, as LoRA adds."""

    def __init__(self, width=256, rank=2):
        super().__init__()
        self.base, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width, affine=False)
        self.lora_a, self.lora_b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return self.norm(self.base(x)) + self.lora_b(self.lora_a(x))


def trainable(name, tensor):
    return name.startswith("lora_")


def make(base_seed=0, wrap=None):
    torch.manual_seed(base_seed)
    model = Adapted()
    model.base.requires_grad_(False)
    if wrap is not None:
        model = wrap(model)
    optimizer = adamw()
    grad_fn = ll.make_grad_fn(model, lambda model, x: (model(x) - x).square().mean())
    step = ll.make_train_step(grad_fn, optimizer, donate=True)
    return model, step, ll.init_state(model, optimizer)


def trained(step, state, steps):
    for _ in range(steps):
        state, _ = step(state, torch.randn(4, 256, generator=torch.Generator().manual_seed(state.step)))
    return state


def test_adapters_are_saved_alone_and_continue_with_the_bits_of_the_whole(tmp_path):
    _, step, state = make()
    ckpt = ll.checkpoint_io(tmp_path, select=trainable, asynchronous=True)
    state = trained(step, state, 3)
    ckpt.save(state)
    ckpt.wait()
    assert ckpt.latest().bytes < 35_000  # of 285,000
    expected = trained(step, state, 3)

    _, step, first = make()
    state = trained(step, ckpt.restore(first), 3)
    assert equal(state.params, expected.params)
    assert torch.equal(state.buffers["norm.running_mean"], expected.buffers["norm.running_mean"])
    assert (state.step, state.samples) == (expected.step, expected.samples) == (6, 24)

    # The weights alone, around the same base.
    _, _, fresh = make()
    found = ckpt.restore(ll.copy_state(fresh), weights_only=True)
    assert found.step == 0
    assert torch.equal(found.params["base.weight"], fresh.params["base.weight"])
    assert not torch.equal(found.params["lora_b.weight"], fresh.params["lora_b.weight"])


def on_two_ranks(folder):
    torch.distributed.init_process_group("gloo")
    ckpt = ll.checkpoint_io(folder, select=trainable)
    _, step, state = make(wrap=DistributedDataParallel)
    state = trained(step, state, 2)
    ckpt.save(state)
    if ll.distributed.is_rank_zero():
        torch.save(dict(state.params), folder / "expected.pt")
    expected = trained(step, state, 2)
    _, step, state = make(wrap=DistributedDataParallel)
    assert equal(trained(step, ckpt.restore(state), 2).params, expected.params)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_resume_from_an_adapter_and_one_process_reads_it(tmp_path):
    launch(2, on_two_ranks, tmp_path)
    restored = ll.checkpoint_io(tmp_path, select=trainable).restore(make()[2])
    assert restored.step == 2
    assert equal(restored.params, torch.load(tmp_path / "expected.pt"))


def test_another_base_model_is_refused(tmp_path):
    _, step, state = make()
    ckpt = ll.checkpoint_io(tmp_path, select=trainable)
    ckpt.save(trained(step, state, 1))
    *_, other = make(base_seed=1)
    *_, again = make()
    with torch.no_grad():
        again.params["base.bias"].view(torch.int32)[3] ^= 1  # one bit
    for state, names in (
        (other, r"2 of .*/params/base.weight, /params/base.bias"),
        (again, r"1 of .*: /params/base.bias"),
    ):
        with pytest.raises(ValueError, match=names):
            ckpt.restore(state)
    # Parameters of the base that the state does not have at all
    *_, other = make()
    bare = other.replace(params={name.removeprefix("base."): tensor for name, tensor in other.params.items()})
    with pytest.raises(
        ValueError, match=r"the state has no /params/base.weight, /params/base.bias: .*get_peft_model"
    ):
        ckpt.restore(bare)
    # A base that has been written since the last save has another digest.
    *_, state = make()
    state = ckpt.restore(state)
    with torch.no_grad():
        state.params["base.bias"].add_(1)
    ckpt.save(state.replace(step=2))
    with pytest.raises(ValueError, match=r"base.bias"):
        ckpt.restore(make()[2])
