import importlib.util
import itertools
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import load_file
from sklearn.neural_network import MLPClassifier

import looplib as ll

SMALL = {"epochs": 3, "batch_size": 256, "width": 8}  # 4 batches of the 1,198 digits, and so 8 updates an epoch


fitted = []


class FittedOnce(MLPClassifier):
    """The judge of all these tests, which learns from the same digits in each."""

    def fit(self, *data):
        if not fitted:
            fitted.append(super().fit(*data))
        return fitted[0]


@pytest.fixture
def recipe():
    spec = importlib.util.spec_from_file_location("gan_digits", Path(__file__).parents[2] / "recipes/gan_digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MLPClassifier = FittedOnce
    return module


@pytest.fixture
def interruptible():
    """Ctrl-C works: processes that were started in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(recipe, folder, **settings):
    return recipe.main(**SMALL | settings, directory=str(folder), picture=str(folder / "pictures/digits.png"))


def saved(recipe, folder):
    """The state of the last checkpoint, as a dict of tensors by the paths of their leaves."""
    (found,) = ll.checkpoint_io(folder / "checkpoints").steps()
    return found.step, load_file(found.path / "tensors.safetensors")


def of(network):
    return lambda name: name.startswith(f"{network}.")


def test_two_updates_a_batch_are_counted_and_logged(recipe, tmp_path, capsys):
    scores = run(recipe, tmp_path)
    rows = ll.log.read_jsonl(tmp_path / "log.jsonl")
    assert [(row["step"], row["epoch"], row["batch"], row["samples"]) for row in rows] == [
        (8 * epoch, epoch, 0, 4 * 256 * epoch) for epoch in (1, 2, 3)
    ]
    names = {"discriminator/loss", "discriminator/margin", "discriminator/penalty", "generator/loss"}
    assert all(names <= row.keys() and all(math.isfinite(row[name]) for name in names) for row in rows)
    assert [found.step for found in ll.checkpoint_io(tmp_path / "checkpoints").steps()] == [24]
    assert (tmp_path / "pictures/digits.png").read_bytes().startswith(b"\x89PNG")
    assert scores["accuracy"] > 0.95
    assert scores["real_classes"] == 10
    shown = capsys.readouterr().out
    assert all(f"{name:16} {score:.3f}" in shown for name, score in scores.items())
    assert run(recipe, tmp_path) == scores  # a finished run is judged again, and not trained
    assert ll.log.read_jsonl(tmp_path / "log.jsonl") == rows


@pytest.mark.parametrize("loss", ["discriminator_loss", "generator_loss"])
def test_an_interrupted_run_continues_to_the_same_bits(recipe, tmp_path, monkeypatch, interruptible, capsys, loss):
    expected = run(recipe, tmp_path / "whole")
    inner, calls = getattr(recipe, loss), itertools.count(1)

    def interrupted(model, real):
        if next(calls) in (1, 7):  # the first batch of epoch 1, the third of epoch 2
            signal.raise_signal(signal.SIGINT)
        return inner(model, real)

    monkeypatch.setattr(recipe, loss, interrupted)
    for epoch in (1, 2):
        with pytest.raises(SystemExit, match=f"stopped after epoch {epoch} of 3; run the same command to continue"):
            run(recipe, tmp_path / "parts")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run(recipe, tmp_path / "parts") == expected
    whole, parts = (saved(recipe, tmp_path / name) for name in ("whole", "parts"))
    assert whole[0] == parts[0] == 24
    assert whole[1].keys() == parts[1].keys()
    assert all(torch.equal(whole[1][name], tensor) for name, tensor in parts[1].items())
    assert (tmp_path / "parts/log.jsonl").read_bytes() == (tmp_path / "whole/log.jsonl").read_bytes()


def test_each_step_trains_its_own_network_alone(recipe, tmp_path, monkeypatch):
    trained = []

    def spied(*args, make_train_step=ll.make_train_step, **options):
        step = make_train_step(*args, **options)

        def spy(state, batch):
            before = {name: tensor.detach().clone() for name, tensor in state.params.items()}
            moments = {key: torch.tensor(count(state, key)) for key in ("generator", "discriminator")}
            new, metrics = step(state, batch)
            changed = {name for name, tensor in new.params.items() if not torch.equal(tensor, before[name])}
            updated = {key for key, was in moments.items() if count(new, key) != was}
            trained.append((changed, updated, new.step, new.samples))
            return new, metrics

        return spy

    def count(state, key):
        inner = state.opt_state["inner_states"][key]
        return max(int(tensor["step"]) for tensor in inner.get("inner_state", inner)["state"].values())

    monkeypatch.setattr(recipe.ll, "make_train_step", spied)
    run(recipe, tmp_path, epochs=1)
    names = [name for name, _ in recipe.make_model(8).named_parameters()]
    assert len(trained) == 8
    for i, (changed, updated, step, samples) in enumerate(trained):
        network = ("discriminator", "generator")[i % 2]
        assert changed == set(filter(of(network), names))
        assert updated == {network}
        assert (step, samples) == (i + 1, 256 * (i // 2 + 1))


def test_no_gradient_of_the_discriminators_loss_reaches_the_generator(recipe):
    model, real = recipe.make_model(8), torch.rand(16, 64)
    loss, aux = recipe.discriminator_loss(model, real)
    loss.backward()
    reached = {name for name, tensor in model.named_parameters() if tensor.grad is not None}
    assert reached == {name for name, _ in model.named_parameters() if of("discriminator")(name)}
    assert not real.requires_grad
    assert not any(tensor.isnan() for tensor in aux.values())

    model.zero_grad()
    recipe.generator_loss(model, real).backward()  # this one runs through both, hence trainable=
    assert all(tensor.grad is not None for tensor in model.parameters())


def test_training_is_that_of_a_raw_loop(recipe, tmp_path, monkeypatch):
    def noise(i, count):
        return torch.randn(count, recipe.NOISE, generator=torch.Generator().manual_seed(i))

    calls = itertools.count()
    monkeypatch.setattr(recipe, "draw", lambda model, real: model["generator"](noise(next(calls), len(real))))
    run(recipe, tmp_path)
    _, tensors = saved(recipe, tmp_path)

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


def test_the_digits_are_drawn_with_the_averaged_weights(recipe, tmp_path, monkeypatch):
    noises, drawn = [], []

    def draw(model, real):
        noises.append(torch.randn(len(real), recipe.NOISE))
        return model["generator"](noises[-1])

    def judge(*args, judge=recipe.judge):
        drawn.append(args[-1])
        return judge(*args)

    monkeypatch.setattr(recipe, "draw", draw)
    monkeypatch.setattr(recipe, "judge", judge)
    run(recipe, tmp_path, epochs=1)
    _, tensors = saved(recipe, tmp_path)
    prefix = "/opt_state/inner_states/generator/average/params/generator."
    generator = recipe.make_model(8)["generator"]
    generator.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    torch.testing.assert_close(generator(noises[-1]).detach(), drawn[0])


def test_a_third_of_the_digits_is_held_out(recipe):
    train, test, train_labels, test_labels = recipe.load_data()
    assert (train.shape, test.shape) == ((1198, 64), (599, 64))
    assert (len(train_labels), len(test_labels)) == (1198, 599)
    assert torch.bincount(test_labels).min() > 55
    assert torch.cdist(test, train).min() > 0
    assert 0 == torch.cat([train, test]).min() < torch.cat([train, test]).max() == 1


def test_the_judge_tells_digits_from_others(recipe):
    train, test, labels, test_labels = recipe.load_data()
    same = recipe.judge(train, labels, test, test_labels, test)
    for what in ("confident", "classes", "nearest", "frechet"):
        assert same[f"drawn_{what}"] == same[f"real_{what}"]
    ones = test[test_labels == 1].repeat(20, 1)[: len(test)]
    collapsed = recipe.judge(train, labels, test, test_labels, ones)
    assert collapsed["drawn_classes"] < 3
    assert collapsed["drawn_frechet"] > 10 * collapsed["real_frechet"]
    copied = recipe.judge(train, labels, test, test_labels, train[: len(test)])
    assert copied["drawn_nearest"] < 1e-3 < copied["real_nearest"]
    noisy = recipe.judge(train, labels, test, test_labels, torch.rand(len(test), 64))
    assert noisy["drawn_confident"] < same["real_confident"] - 0.2
    assert noisy["drawn_nearest"] > 2 * same["real_nearest"]


@pytest.mark.parametrize("seed", range(3))
def test_frechet_is_its_formula(recipe, seed):
    generator = np.random.default_rng(seed)
    one, other = (
        generator.normal(size=(50, 6)),
        generator.normal(0.5, 2, size=(70, 6)) @ generator.normal(size=(6, 6)),
    )
    a, b = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    mean = one.mean(0) - other.mean(0)
    expected = mean @ mean + np.trace(a + b - 2 * scipy.linalg.sqrtm(a @ b).real)
    torch.testing.assert_close(recipe.frechet(torch.tensor(one), torch.tensor(other)), expected)


@pytest.mark.large
@pytest.mark.parametrize("seed", range(3))
def test_digits_are_drawn_as_the_docstring_says(recipe, tmp_path, seed):
    scores = recipe.main(seed=seed, directory=str(tmp_path), picture=str(tmp_path / "digits.png"))
    assert scores["drawn_classes"] == 10
    assert scores["drawn_confident"] > 0.75
    assert scores["drawn_frechet"] < 1.3 * scores["real_frechet"]
    assert scores["drawn_nearest"] > 0.95 * scores["real_nearest"]
