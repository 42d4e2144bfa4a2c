import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import load_file
from test_recipes import load

import looplib as ll

SMALL = {"epochs": 3, "batch_size": 256, "width": 8}  # 4 batches of the 1,198 digits, and so 8 updates an epoch


@pytest.fixture
def recipe():
    return load("gan_digits")


def test_training_is_that_of_a_raw_loop(recipe, tmp_path, monkeypatch):
    def noise(i, count):
        return torch.randn(count, recipe.NOISE, generator=torch.Generator().manual_seed(i))

    calls = itertools.count()
    monkeypatch.setattr(recipe, "draw", lambda model, real: model["generator"](noise(next(calls), len(real))))
    recipe.main(**SMALL, directory=str(tmp_path), picture=str(tmp_path / "pictures/digits.png"))
    (found,) = ll.checkpoint_io(tmp_path / "checkpoints").steps()
    tensors = load_file(found.path / "tensors.safetensors")

    train = recipe.load_data()[0]
    loader = ll.make_loader(train, batch_size=256, drop_last=True)
    batches = [batch for epoch in range(3) for batch in loader(ll.TrainState(epoch=epoch, epoch_length=4))]
    torch.manual_seed(0)
    model = recipe.make_model(8)
    g, d = model["generator"], model["discriminator"]
    optimizers = [torch.optim.Adam(network.parameters(), lr=2e-3, betas=(0.0, 0.99)) for network in (d, g)]
    draws, average = itertools.count(), {name: tensor.detach().clone() for name, tensor in g.named_parameters()}

    def softplus(x):
        return (1 + x.exp()).log()

    for i, real in enumerate(batches):
        for k, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            drawn = g(noise(next(draws), 256))
            if k == 0:
                real_leaf, drawn_leaf = real.clone().requires_grad_(), drawn.detach().requires_grad_()
                d_real, d_drawn = d(real_leaf), d(drawn_leaf)
                slopes = [
                    torch.autograd.grad(out.sum(), leaf, create_graph=True)[0].square().sum(1).mean()
                    for out, leaf in ((d_real, real_leaf), (d_drawn, drawn_leaf))
                ]
                loss = softplus(d_drawn - d_real).mean() + 0.03 / 2 * sum(slopes)
            else:
                loss = softplus(d(real) - d(drawn)).mean()
            loss.backward()
            optimizer.param_groups[0]["lr"] = 2e-3 * (1 + math.cos(math.pi * (2 * i + k) / 24)) / 2
            optimizer.step()
        decay = min(0.998, (2 + i) / (11 + i))
        for name, tensor in g.named_parameters():
            average[name] = decay * average[name] + (1 - decay) * tensor.detach()

    # The last bias cancels in the difference of two outputs: its gradient is rounding alone, which Adam blows up.
    cancelled, bias = [(name, p) for name, p in d.named_parameters() if p.shape == (1,)][-1]
    assert bias.grad.abs().item() < 1e-6
    for name, tensor in model.named_parameters():
        if name != f"discriminator.{cancelled}":
            torch.testing.assert_close(tensors[f"/params/{name}"], tensor.detach(), rtol=1e-3, atol=1e-5)
    for name, tensor in average.items():
        found = tensors[f"/opt_state/inner_states/generator/average/params/generator.{name}"]
        torch.testing.assert_close(found, tensor, rtol=1e-3, atol=1e-5)


def test_frechet_is_its_formula(recipe):
    generator = np.random.default_rng(0)
    one, other = (
        generator.normal(size=(50, 6)),
        generator.normal(0.5, 2, size=(70, 6)) @ generator.normal(size=(6, 6)),
    )
    a, b = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    mean = one.mean(0) - other.mean(0)
    expected = mean @ mean + np.trace(a + b - 2 * scipy.linalg.sqrtm(a @ b).real)
    torch.testing.assert_close(recipe.frechet(torch.tensor(one), torch.tensor(other)), expected)
