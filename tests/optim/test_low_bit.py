"""torchao's optimizers, whose moments are tensor subclasses of few bits: training, saving and resuming."""

import pytest
import torch
from torch import nn

import looplib as ll


@pytest.fixture(autouse=True)
def eager():
    """Their step calls torch.compile, here without machine code."""
    with torch.compiler.set_stance("force_eager"):
        yield


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)
    )  # of 4,096 numbers on, moments have few bits


def loss_fn(model, x):
    return (model(x) - 1).square().mean()


def train(step, state, data):
    for x in data:
        state, _ = step(state, x)
    return state


LRS = {"number": 1e-2, "schedule": lambda step: 1e-2 / (1 + step), "injected": ll.optim.injected(1e-2)}


@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchaos_optimizers_train_save_and_resume_with_the_bits_of_a_raw_loop(name, donate, lr, tmp_path):
    import torchao.optim

    cls = getattr(torchao.optim, name)
    data = torch.randn(6, 8, 64, generator=torch.Generator().manual_seed(1)).unbind()
    raw = net()
    theirs = cls(raw.parameters(), lr=1e-2)
    for number, x in enumerate(data):
        if lr == "schedule":
            theirs.param_groups[0]["lr"].fill_(LRS[lr](number))
        theirs.zero_grad()
        loss_fn(raw, x).backward()
        theirs.step()

    def begin():
        model, optimizer = net(), ll.optimizer(cls, lr=LRS[lr])
        step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
        return step, ll.init_state(model, optimizer)

    step, state = begin()
    state = train(step, state, data[:3])
    ll.checkpoint_io(tmp_path).save(state)
    kept = ll.copy_state(state)
    first_layer = state.opt_state["state"]["0.weight"]["exp_avg"]
    assert first_layer["codes"].dtype.itemsize == 1
    another, first = begin()
    restored = ll.checkpoint_io(tmp_path).restore(first)
    for own_step, own_state in ((step, state), (step, kept), (another, restored)):
        params = train(own_step, own_state, data[3:]).params
        assert all(torch.equal(params[name], parameter) for name, parameter in raw.named_parameters())
