"""Complex parameters, losses and metrics: right by formulas, or refused by name."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import looplib as ll
from looplib.metrics import AUC, ConfusionMatrix, GroupedAUC, calibration, mae, mse, perplexity, rmse


class Spectrum(nn.Module):
    """A filter with complex weights, whose output is real."""

    def __init__(self, width=3, *, writes=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.complex64, generator=generator))
        self.bias = nn.Parameter(torch.randn(width, generator=generator))
        self.register_buffer("last", torch.zeros(width, dtype=torch.complex64))
        self.writes = writes

    def forward(self, x):
        if self.writes:
            self.last = (x * self.weight).mean(0).detach()
        return (x * self.weight).abs().square() + self.bias


def mean(model, x):
    return model(x).mean()


def test_noise_of_complex_parameters_hides_a_sample_as_that_of_real_ones_does():
    model, x = Spectrum(20_000), torch.randn(4, 20_000)
    per_sample = ll.contrib.make_per_sample_grad_fn(model, mean)
    clipped = ll.contrib.clip_per_sample(per_sample, max_norm=2.5)
    state = ll.init_state(model)
    noisy = ll.contrib.add_noise(clipped, max_norm=2.5, noise_multiplier=20.0)(state, x)
    for name, grad in clipped(state, x).grads.items():
        noise = (noisy.grads[name] - grad).numpy() * 4  # of the sum
        for part in (noise.real, noise.imag) if np.iscomplexobj(noise) else (noise,):
            np.testing.assert_allclose(part.std(), 2.5 * 20, rtol=0.03)


def test_samples_are_ranked_by_the_norms_of_both_parts():
    model, x = Spectrum(), torch.randn(5, 3)
    state = ll.init_state(model)
    grad_fn = ll.make_grad_fn(model, lambda model, x: ((x * model.weight).abs().square() + model.bias).sum())
    found = ll.debug.worst_samples(grad_fn, state, x)
    weight = model.weight.detach().numpy().astype(np.complex128)
    norms = [math.hypot(np.linalg.norm(2 * row**2 * weight), math.sqrt(3)) for row in x.double().numpy()]
    assert [score.row for score in found] == np.argsort(norms)[::-1].tolist()
    np.testing.assert_allclose([score.grad_norm for score in found], sorted(norms, reverse=True), rtol=1e-6)


def test_errors_of_complex_predictions_are_those_of_numpy():
    generator = np.random.default_rng(0)
    p, y = (generator.normal(size=7) + 1j * generator.normal(size=7) for _ in range(2))
    weights = generator.random(7)
    for targets in (y, y.real):
        error = np.abs(p - targets)
        given = torch.tensor(p), torch.tensor(targets)
        for score, expected in ((mae, error), (mse, error**2)):
            assert ll.compute({"x": score(*given)})["x"] == pytest.approx(expected.mean(), rel=1e-12)
            weighted = ll.compute({"x": score(*given, torch.tensor(weights))})["x"]
            assert weighted == pytest.approx(np.average(expected, weights=weights), rel=1e-12)
        assert ll.compute({"x": rmse(*given)})["x"] == pytest.approx(math.sqrt((error**2).mean()), rel=1e-12)


def test_scores_losses_and_means_that_need_real_numbers_refuse_complex_ones_by_name():
    x, z, labels = torch.rand(4), torch.randn(4, dtype=torch.complex64), torch.tensor([0, 1, 1, 0])
    logits, of_logits = torch.rand(4, 2), torch.randn(4, 2, dtype=torch.complex64)
    model, batch = Spectrum(), torch.randn(4, 3)
    state = ll.init_state(model)
    beside = ll.make_grad_fn(model, lambda model, x: (mean(model, x), {"z": (x * model.weight).mean()}))
    weighted = ll.make_grad_fn(model, lambda model, x: (mean(model, x), {"z": ll.Mean(x.sum(), z.sum())}))
    evaluated = ll.make_eval_step(model, lambda model, x: {"z": (x * model.weight).mean()})
    embed = ll.contrib.make_contrastive_grad_fn(
        model,
        lambda model, x: {"real": model(x), "z": x * model.weight},
        lambda tree: tree["real"].mean(),
        microbatches=2,
    )
    watched = ll.TrainState(extra={"best": ll.predicates.BestSoFar("loss")})
    rows = [
        (lambda: calibration(z, x), "predictions are torch.complex64"),
        (lambda: calibration(x, z), "labels are torch.complex64"),
        (lambda: mae(x, x, z), "weights are torch.complex64"),
        (lambda: ll.accuracy(of_logits, labels), "logits are torch.complex64"),
        (lambda: ll.accuracy(logits, labels, weights=z), "weights are torch.complex64"),
        (lambda: ConfusionMatrix.of(logits, labels, 2, weights=z), "weights are torch.complex64"),
        (lambda: AUC.of(z, labels), "scores are torch.complex64"),
        (lambda: GroupedAUC.of(x, z, labels), "labels are torch.complex64"),
        (lambda: ll.compute({"z": ll.Mean(z.sum())}), "'z' is complex"),
        (lambda: ll.Mean(z.sum(), 4).item(), "Mean is complex"),
        (lambda: ll.Mean(z.sum()).merge(ll.Mean(z.sum())), "Mean is complex"),
        (lambda: beside(state, batch), "'z' is complex"),
        (lambda: weighted(state, batch), "'z' is complex"),
        (lambda: ll.evaluate(evaluated, state, [batch]), "'z' is complex"),
        (lambda: embed(state, batch), r"embeddings\['z'\] is complex"),
        (lambda: perplexity(ll.Mean(z.sum(), 4)), "the loss is complex"),
        (lambda: ll.update_best(watched, {"loss": 1j}), "'loss' is complex"),
        (lambda: ll.update_best(watched, {"loss": z.sum()}), "'loss' is complex"),
    ]
    for make in (ll.make_grad_fn, ll.contrib.make_per_sample_grad_fn):
        of_complex = make(model, lambda model, x: ((x * model.weight).sum() + model.bias.sum()) * (1 + 1j))
        rows.append((lambda of_complex=of_complex: of_complex(state, batch), "the loss is complex"))
    for call, named in rows:
        with pytest.raises(TypeError, match=named):
            call()


def test_averages_of_complex_buffers_have_the_bits_of_torchs():
    raw, model = Spectrum(writes=True), Spectrum(writes=True)
    averaged = AveragedModel(raw, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    averaged.update_parameters(raw)  # the first average is a copy
    opt = torch.optim.SGD(raw.parameters(), lr=0.1)
    optimizer = ll.chain(ll.optimizer(torch.optim.SGD, lr=0.1), ll.ema(0.9, buffers=True))
    train_step = ll.make_train_step(ll.make_grad_fn(model, mean), optimizer)
    state = ll.init_state(model, optimizer)
    for x in torch.randn(4, 5, 3):
        state, _ = train_step(state, x)
        opt.zero_grad()
        mean(raw, x).backward()
        opt.step()
        averaged.update_parameters(raw)
    found, expected = ll.eval_state(optimizer, state), dict(averaged.module.named_parameters())
    for name, tensor in expected.items():
        assert torch.equal(found.params[name], tensor)
    assert torch.equal(found.buffers["last"], averaged.module.last)
