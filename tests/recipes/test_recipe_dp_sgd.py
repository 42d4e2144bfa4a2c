"""The recipe dp_sgd_digits: how it draws its batches, and its accountant's epsilon beside the formula."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recipes import load

import looplib as ll


@pytest.fixture(scope="module")
def recipe():
    return load("dp_sgd_digits")


@pytest.mark.slow
def test_each_digit_is_drawn_by_its_own_coin_and_a_batch_may_be_empty(recipe, monkeypatch, tmp_path):
    loaders, make = [], ll.make_loader
    monkeypatch.setattr(
        ll, "make_loader", lambda *args, **options: loaders.append(make(*args, **options)) or loaders[-1]
    )
    scores = recipe.main(epochs=1, batch_size=2, width=1, directory=str(tmp_path))
    assert math.isfinite(scores["loss"])
    steps, rate = round(1437 / 2), 2 / 1437
    plain = ll.TrainState(epoch_length=steps)
    sizes, others = ([len(labels) for _, labels in loaders[0](plain.replace(epoch=epoch))] for epoch in (0, 1))
    assert len(sizes) == steps
    assert sizes.count(0) > 0  # about e**-2 of them
    assert others != sizes
    # The size of a batch is binomial: its mean and variance, within 5 standard errors (4th moment of a Poisson's).
    found = torch.tensor(sizes, dtype=torch.float64)
    mean = 1437 * rate
    assert abs(found.mean() - mean) < 5 * math.sqrt(mean / steps)
    assert abs(found.var() - mean) < 5 * math.sqrt((mean + 2 * mean**2) / steps)


# epsilon


def epsilon_by_formula(steps, rate, noise_multiplier, delta, orders):
    """Epsilon after `steps` steps, by Rényi differential privacy at these orders.

    Of one step: Mironov, Talwar and Zhang, "Rényi differential privacy of the sampled Gaussian mechanism", 2019,
    section 3.3. From Rényi's to (epsilon, delta): Balle, Barthe, Gaboardi, Hsu and Sato, "Hypothesis testing
    interpretations and Rényi differential privacy", 2020, theorem 21.
    """
    return max(
        0.0,
        min(
            steps * renyi_divergence(order, rate, noise_multiplier)
            + math.log1p(-1 / order)
            - math.log(delta * order) / (order - 1)
            for order in orders
        ),
    )


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
@settings(max_examples=4, deadline=None)
def test_the_accountant_agrees_with_the_formula(recipe, steps, rate, noise, delta):
    """Its orders are fractional below 11 and few above 63: it is at most that of the integers among them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the best order is the largest it looks at
        found = recipe.epsilon(steps, rate, noise, delta)
    coarse = epsilon_by_formula(steps, rate, noise, delta, [*range(2, 11), *range(12, 64)])
    assert found <= coarse * (1 + 1e-8) + 1e-9
    assert found > 0.5 * epsilon_by_formula(steps, rate, noise, delta, range(2, 257))
