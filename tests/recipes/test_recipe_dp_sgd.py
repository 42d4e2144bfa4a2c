"""The recipe dp_sgd_digits: it trains, and its accountant's epsilon stands beside a formula, integrals and bounds."""

import importlib.util
import itertools
import math
import warnings
from pathlib import Path

import opacus.accountants
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import looplib as ll


@pytest.fixture(scope="module")
def recipe():
    path = Path(__file__).parents[2] / "recipes/dp_sgd_digits.py"
    spec = importlib.util.spec_from_file_location("dp_sgd_digits", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits_are_learned_with_privacy(recipe, tmp_path, capsys):
    scores = recipe.main(epochs=8, noise_multiplier=2.0, width=8, directory=str(tmp_path))
    assert scores["accuracy"] > 0.7
    steps = 8 * round(1437 / 256)
    assert scores["epsilon"] == recipe.epsilon(steps, 256 / 1437, 2.0, 1e-5)
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("step")] == [
        str(steps // 8 * epoch) for epoch in range(1, 9)
    ]
    assert f"({scores['epsilon']:.2f}, 1e-05)-differentially private in the 1437 others" in shown
    assert f"{scores['accuracy']:.2%} of the 360 held-out digits right" in shown


def test_the_run_is_a_function_of_its_settings(recipe, tmp_path):
    runs = itertools.count()

    def run(**settings):
        scores = recipe.main(epochs=1, width=2, directory=str(tmp_path / str(next(runs))), **settings)
        return scores["loss"], scores["epsilon"]

    assert run() == run()
    assert run()[0] != run(seed=1)[0]
    assert run(piece_size=7)[0] == pytest.approx(run(piece_size=1437)[0], rel=1e-3)


@pytest.mark.slow
def test_each_digit_is_drawn_by_its_own_coin_and_a_batch_may_be_empty(recipe, monkeypatch, tmp_path):
    loaders, sizes, gradients = [], [], []

    def make_loader(*args, make=ll.make_loader, **options):
        loaders.append(make(*args, **options))
        return loaders[-1]

    def add_noise(*args, add=ll.contrib.add_noise, **options):
        noisy = add(*args, **options)

        def seen(state, batch, part):
            sizes.append(len(batch[1]))
            gradients.append(noisy(state, batch, part))
            return gradients[-1]

        return seen

    monkeypatch.setattr(ll, "make_loader", make_loader)
    monkeypatch.setattr(ll.contrib, "add_noise", add_noise)
    recipe.main(epochs=1, batch_size=2, width=1, directory=str(tmp_path))
    steps, rate = round(1437 / 2), 2 / 1437
    assert len(sizes) == steps
    assert sizes.count(0) > 0  # about e**-2 of them
    for size, out in zip(sizes, gradients, strict=True):
        assert out.samples == size
        assert all(grad.isfinite().all() and grad.any() for grad in out.grads.values())
    # The size of a batch is binomial: its mean and variance, within 5 standard errors (4th moment of a Poisson's).
    found = torch.tensor(sizes, dtype=torch.float64)
    mean = 1437 * rate
    assert abs(found.mean() - mean) < 5 * math.sqrt(mean / steps)
    assert abs(found.var() - mean) < 5 * math.sqrt((mean + 2 * mean**2) / steps)
    # The batches are a function of the epoch, and of no other.
    plain = ll.TrainState(epoch_length=steps)
    again = [[len(labels) for _, labels in loaders[0](plain.replace(epoch=epoch))] for epoch in (0, 1)]
    assert again[0] == sizes
    assert again[1] != sizes


# epsilon


def epsilon_by_formula(steps, rate, noise_multiplier, delta):
    """Epsilon after `steps` steps, by Rényi differential privacy at the orders 2 to 256.

    Of one step: Mironov, Talwar and Zhang, "Rényi differential privacy of the sampled Gaussian mechanism", 2019,
    section 3.3. From Rényi's to (epsilon, delta): Balle, Barthe, Gaboardi, Hsu and Sato, "Hypothesis testing
    interpretations and Rényi differential privacy", 2020, theorem 21.
    """
    best = math.inf
    for order in range(2, 257):
        divergence = steps * renyi_divergence(order, rate, noise_multiplier)
        best = min(best, divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return max(best, 0.0)


def renyi_divergence(order, rate, noise_multiplier):
    """Rényi divergence of one step with an image from one without it: the log of a sum over its number of draws."""
    k = torch.arange(order + 1, dtype=torch.float64)
    binomial = math.lgamma(order + 1) - torch.lgamma(k + 1) - torch.lgamma(order - k + 1)
    drawn = torch.special.xlogy(k, rate) + torch.special.xlog1py(order - k, -rate)
    total = torch.logsumexp(binomial + drawn + k * (k - 1) / (2 * noise_multiplier**2), 0)
    return total.item() / (order - 1)


@given(
    steps=st.integers(1, 400),
    rate=st.floats(0.005, 0.9),
    noise=st.floats(1.0, 8.0),
    delta=st.sampled_from([1e-4, 1e-5, 1e-6]),
)
@settings(max_examples=8, deadline=None)
def test_the_accountant_agrees_with_the_formula(recipe, steps, rate, noise, delta):
    """At the same orders to eight digits. At its own, which are fractional below 11 and few above 63, it is at most
    that of the integers among them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the best order is the largest it looks at
        found = recipe.epsilon(steps, rate, noise, delta)
        accountant = opacus.accountants.RDPAccountant()
        accountant.history = [(noise, rate, steps)]
        same_orders = accountant.get_privacy_spent(delta=delta, alphas=range(2, 257))[0]
    expected = epsilon_by_formula(steps, rate, noise, delta)
    assert max(same_orders, 0.0) == pytest.approx(expected, rel=1e-8, abs=1e-9)
    coarse = min(
        steps * renyi_divergence(order, rate, noise) + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order in (*range(2, 11), *range(12, 64))
    )
    assert found <= max(coarse, 0.0) * (1 + 1e-8) + 1e-9
    assert found > 0.5 * expected


def integral(order, rate, noise):
    """The Rényi divergence of (1 - rate) N(0, noise) + rate N(1, noise) from N(0, noise), by the trapezoidal rule."""
    x = torch.linspace(-40 * noise, 40 * noise + order, 400_001, dtype=torch.float64)
    density = -(x**2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))
    ratio = torch.log(1 - rate + rate * torch.exp((2 * x - 1) / (2 * noise**2)))
    return (torch.logsumexp(density + order * ratio, 0) + math.log((80 * noise + order) / 400_000)).item() / (
        order - 1
    )


@given(order=st.integers(2, 40), rate=st.floats(0.001, 0.9), noise=st.floats(0.8, 10))
@settings(max_examples=30, deadline=None)
def test_divergence_of_one_step_is_the_integral(order, rate, noise):
    assert renyi_divergence(order, rate, noise) == pytest.approx(integral(order, rate, noise), rel=1e-8, abs=1e-11)


def test_epsilon_follows_from_the_integrals():
    # With L the logarithm of the ratio of densities, delta is E max(0, 1 - exp(epsilon - L)), and so at most
    # exp((order - 1) * (divergence - epsilon)) times the largest (1 - exp(-t)) * exp(-(order - 1) * t).
    steps, rate, noise, delta, t = 200, 0.05, 1.0, 1e-5, torch.linspace(0, 1, 200_001, dtype=torch.float64)
    found = []
    for order in range(2, 20):
        largest = ((1 - torch.exp(-t)) * torch.exp(-(order - 1) * t)).max().item()
        found.append(steps * integral(order, rate, noise) + math.log(largest / delta) / (order - 1))
    assert found.index(min(found)) not in (0, len(found) - 1)
    assert epsilon_by_formula(steps, rate, noise, delta) == pytest.approx(min(found), rel=1e-8)


@pytest.mark.parametrize("noise", [1.0, 4.0])
@pytest.mark.parametrize("steps", [1, 20])
def test_epsilon_of_the_whole_set_is_between_the_true_one_and_a_cruder_bound(recipe, noise, steps):
    # Each example in each batch is one Gaussian with less noise, whose delta is known for each epsilon (Balle and
    # Wang, 2018, theorem 8); Mironov (2017, propositions 3 and 7) has a simpler bound.
    sigma, delta, normal = noise / math.sqrt(steps), 1e-5, torch.special.ndtr

    def delta_of(epsilon):
        at = torch.tensor([1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma]).double()
        return (normal(at)[0] - math.exp(epsilon) * normal(at)[1]).item()

    low, high = 0.0, 100.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    cruder = min(a / (2 * sigma**2) + math.log(1 / delta) / (a - 1) for a in range(2, 257))
    assert high < recipe.epsilon(steps, 1.0, noise, delta) < cruder


def test_epsilon_moves_as_it_must(recipe):
    base = recipe.epsilon(300, 0.1, 2.0, 1e-5)
    assert recipe.epsilon(600, 0.1, 2.0, 1e-5) > base
    assert recipe.epsilon(300, 0.2, 2.0, 1e-5) > base
    assert recipe.epsilon(300, 0.1, 3.0, 1e-5) < base
    assert recipe.epsilon(300, 0.1, 2.0, 1e-4) < base
    assert recipe.epsilon(1, 1e-6, 1e6, 0.5) == 0
