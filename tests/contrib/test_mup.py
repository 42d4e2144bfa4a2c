"""muP beside the `mup` package, a raw loop in its form (table 8 of the paper), and the check of its widths."""

import copy
import importlib
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm

import looplib as ll
from looplib import testing

BASE = 16
IMAGES, LABELS = (torch.tensor(column) for column in load_digits(return_X_y=True))


class Swap(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def network(width):
    """With an embedding, a convolution, a hidden layer and a readout."""
    return nn.Sequential(
        nn.Embedding(9, width),
        Swap(),
        nn.Conv1d(width, 2 * width, 2),
        nn.Tanh(),
        nn.LayerNorm(3),
        nn.Flatten(),
        nn.Linear(6 * width, width),
        nn.Tanh(),
        nn.Linear(width, 3),
    )


def mlp(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def loss_fn(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def scaled(cls, model, base, **options):
    """The groups, after the initial values of the model are scaled."""
    scaling = ll.contrib.mup(cls, model, base, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= scaling.scales[name]
    return scaling.groups


class Readout(nn.Module):
    """As mup's `MuReadout`: inputs are divided by the growth of the width."""

    def __init__(self, layer, growth):
        super().__init__()
        self.layer, self.growth = layer, growth

    def forward(self, x):
        return self.layer(x / self.growth)


def as_mup_package(model, growth, sgd, lr):
    """The model and torch's groups in the form of the package, by table 8: a rate for each parameter, and a multiplier."""
    with torch.no_grad():
        for parameter in (model[2].bias, model[6].bias, model[8].bias, model[8].weight):
            parameter *= growth**0.5
    matrices = [model[2].weight, model[6].weight]
    vectors = [model[0].weight, model[2].bias, model[6].bias, model[8].weight]
    others = [*model[4].parameters(), model[8].bias]
    model[8] = Readout(model[8], growth)
    factors = [(matrices, 1.0 if sgd else 1 / growth), (vectors, growth if sgd else 1.0), (others, 1.0)]
    return [{"params": params, "lr": lr * factor} for params, factor in factors]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.Adam, {"lr": 0.01, "eps": 1e-30}),
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (torch.optim.RMSprop, {"lr": 1e-3, "eps": 1e-30}),
    ],
)
@pytest.mark.parametrize("growth", [4, 1])
def test_ten_steps_are_those_of_a_raw_loop_in_the_form_of_the_package(cls, options, growth):
    model = network(growth * BASE).double()
    raw = copy.deepcopy(model)
    groups = scaled(cls, model, network(BASE), lr=options["lr"])
    optimizer = ll.optimizer(cls, groups=groups, **options)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    state = ll.init_state(model, optimizer)
    theirs = cls(as_mup_package(raw, growth, cls is torch.optim.SGD, options["lr"]), **options)
    batch = torch.randint(0, 9, (32, 4)), torch.arange(32) % 3
    first = copy.deepcopy(raw.state_dict())
    for _ in range(10):
        state, _ = train_step(state, batch)
        theirs.zero_grad()
        loss_fn(raw, batch).backward()
        theirs.step()
    expected = {name.replace("8.layer", "8"): weight.detach() for name, weight in raw.named_parameters()}
    expected["8.weight"] = expected["8.weight"] / growth
    for name, weight in state.params.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
    assert not any(torch.equal(tensor, raw.state_dict()[name]) for name, tensor in first.items())


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """mup 1.0.0 without the packages it asks for. It uses only torch and yaml of them, and torchvision, if it is not of
    the same build as torch, would keep transformers from being imported."""
    folder = tmp_path_factory.mktemp("mup")
    pins = Path(__file__).parents[1] / "constraints.txt"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, "-c", pins, "mup"]
    subprocess.run(pip, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("mup")


def network_of_package(package, width):
    model = network(width)
    model[8] = package.MuReadout(width, 3)
    return model.double()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"lr": 0.01, "eps": 1e-30}),
        ("AdamW", {"lr": 0.01, "eps": 1e-30, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("growth", [4, 1])
def test_ten_steps_are_those_of_the_package(package, name, options, growth):
    """To 1e-12 in float64: the multiplier of the package's readout, and its rates, are in other places of the products."""
    cls = getattr(torch.optim, name)
    model = network(growth * BASE).double()
    other = network_of_package(package, growth * BASE)
    other.load_state_dict(model.state_dict())
    package.set_base_shapes(other, network_of_package(package, BASE), delta=network_of_package(package, 2 * BASE))
    theirs = getattr(package, f"Mu{name}")(other.parameters(), **options)
    groups = scaled(cls, model, network(BASE), lr=options["lr"], weight_decay=options.get("weight_decay"))
    optimizer = ll.optimizer(cls, groups=groups, **options)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    state = ll.init_state(model, optimizer)
    batch = torch.randint(0, 9, (32, 4)), torch.arange(32) % 3
    for _ in range(10):
        state, _ = train_step(state, batch)
        theirs.zero_grad()
        loss_fn(other, batch).backward()
        theirs.step()
    expected = {name: weight.detach() for name, weight in other.named_parameters()}
    expected["8.weight"] = expected["8.weight"] / growth
    for name, weight in state.params.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-12)


@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_rates_and_initial_values_are_those_of_table_3(wide_in, wide_out, sgd):
    def layers(one, other):
        return nn.ModuleDict(
            {"input": nn.Linear(5, one), "hidden": nn.Linear(one, other), "readout": nn.Linear(other, 2)}
        )

    cls = torch.optim.SGD if sgd else torch.optim.AdamW
    model = layers(8 * wide_in, 8 * wide_out).to("meta")
    groups, scales = ll.contrib.mup(cls, model, layers(8, 8), lr=1.0)
    rates = {}
    for name, tensor in model.named_parameters():
        rates[name] = next((values["lr"] for predicate, values in groups if predicate(name, tensor)), 1.0)
    a, b = wide_in, wide_out
    # Rates by fan-in and fan-out, in units of the base's.
    expected = {
        "input.weight": a if sgd else 1,
        "input.bias": a if sgd else 1,
        "hidden.weight": b / a if sgd else 1 / a,
        "hidden.bias": b if sgd else 1,
        "readout.weight": 1 / b,
        "readout.bias": 1,
    }
    assert rates == pytest.approx(expected)
    # Standard deviations: 1 for an input and biases, 1 / sqrt(fan_in) for hidden layers, 1 / fan_in for a readout.
    drawn = {"hidden.weight": a**-0.5, "hidden.bias": a**-0.5, "readout.weight": b**-0.5, "readout.bias": b**-0.5}
    wanted = {"hidden.weight": a**-0.5 if b > 1 else 1 / a, "readout.weight": 1 / b}
    assert {name: scales[name] * drawn.get(name, 1) for name in scales} == pytest.approx(
        {name: wanted.get(name, 1) for name in scales}
    )
    _, of_constant = ll.contrib.mup(cls, model, layers(8, 8), lr=1.0, initial="constant")
    assert of_constant == pytest.approx({name: wanted.get(name, 1) for name in scales})


def convolutions(width):
    """Transposed ones, which sum over dimension 0 of their weights, while torch draws these by the size of dimension 1."""
    return nn.ModuleDict(
        {
            "input": nn.ConvTranspose1d(3, width, 5),
            "hidden": nn.ConvTranspose1d(width, 2 * width, 5),
            "depthwise": nn.ConvTranspose1d(2 * width, 2 * width, 5, groups=2 * width),
            "groups": nn.ConvTranspose1d(2 * width, 2 * width, 5, groups=4),
            "more_groups": nn.ConvTranspose1d(2 * width, 2 * width, 5, groups=width),
            "readout": nn.ConvTranspose1d(2 * width, 40, 5),
        }
    )


def test_the_spread_of_transposed_convolutions_is_that_of_table_3():
    model, base, growth = convolutions(256), convolutions(64), 4
    sums_over = {"groups.weight": 0, "more_groups.weight": None}
    groups, scales = ll.contrib.mup(torch.optim.SGD, model, base, lr=1.0, sums_over=sums_over)
    sums = {"hidden.weight": growth**-0.5, "groups.weight": growth**-0.5, "readout.weight": 1 / growth}
    rates = {"hidden.weight": 1, "groups.weight": 1, "readout.weight": 1 / growth, "readout.bias": 1}
    for (name, wide), narrow in zip(model.named_parameters(), base.parameters(), strict=True):
        measured = scales[name] * wide.std() / narrow.std()
        assert measured.item() == pytest.approx(sums.get(name, 1), rel=0.25), (
            name
        )  # torch's own draws: wrong ones are 2
        rate = next((values["lr"] for predicate, values in groups if predicate(name, wide)), 1.0)
        assert rate == pytest.approx(rates.get(name, growth)), name


def recurrent(width):
    """All of torch's recurrent layers, which draw each parameter by the hidden size, and attention, which does not."""
    return nn.ModuleDict(
        {
            "rnn": nn.RNN(24, width),
            "lstm": nn.LSTM(24, width, num_layers=2, bidirectional=True),
            "gru": nn.GRU(width // 2, width, bias=False),
            "narrow": nn.LSTM(24, width, proj_size=24),
            "projected": nn.LSTM(width, width, proj_size=width // 2),
            "of_many": nn.GRU(width, 24),
            "rnn_cell": nn.RNNCell(24, width),
            "lstm_cell": nn.LSTMCell(24, width),
            "gru_cell": nn.GRUCell(width, width),
            "attention": nn.MultiheadAttention(width, 4),
            "narrow_keys": nn.MultiheadAttention(width, 4, kdim=24, vdim=width // 2, add_bias_kv=True),
        }
    )


def test_the_spread_of_recurrent_layers_and_attention_is_that_of_table_3():
    model, base, growth = recurrent(256), recurrent(64), 4
    groups, scales = ll.contrib.mup(torch.optim.SGD, model, base, lr=1.0)
    for (name, wide), narrow in zip(model.named_parameters(), base.parameters(), strict=True):
        fan_in = narrow.shape[1] != wide.shape[1] if narrow.ndim == 2 else False
        fan_out = narrow.shape[0] != wide.shape[0] or (narrow.shape[-1] != wide.shape[-1] and narrow.ndim == 3)
        expected = {(True, True): growth**-0.5, (True, False): 1 / growth}.get((fan_in, fan_out), 1)
        measured = scales[name] * wide.std() / narrow.std() if narrow.any() else torch.tensor(expected)
        assert measured.item() == pytest.approx(expected, rel=0.25), name  # wrong ones are 2 or more times too far
        rate = next((values["lr"] for predicate, values in groups if predicate(name, wide)), 1.0)
        assert rate == pytest.approx((growth if fan_out else 1) / (growth if fan_in else 1)), name


def test_schedules_and_weight_decay_are_scaled():
    groups, _ = ll.contrib.mup(
        torch.optim.AdamW, mlp(64), mlp(16), lr=lambda step: 0.1 / (1 + step), weight_decay=0.5
    )
    [(_, values)] = groups
    assert values["lr"](1) == pytest.approx(0.1 / 2 / 4)
    assert values["weight_decay"] == 2.0


def test_groups_without_decay_beside_those_of_mup():
    """In the order of the docstring: zero gradients show the decay of each parameter, and ones its rate."""
    model, growth, decay = mlp(64).double(), 4, 0.5
    scaling = ll.contrib.mup(torch.optim.SGD, model, mlp(16), lr=0.1, weight_decay=decay)
    names = {"scaling": scaling}
    for line in re.findall(r">>> ((?:is_vector|both|vectors|groups) = .*)", ll.contrib.mup.__doc__):
        exec(line, names)
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1, weight_decay=decay, groups=names["groups"])
    state = ll.init_state(model, sgd)
    for grad in (torch.zeros_like, torch.ones_like):
        after, _ = ll.apply_gradients(sgd, state, {name: grad(tensor) for name, tensor in state.params.items()})
        for name, weight in state.params.items():
            fan_in = growth if name in ("2.weight", "4.weight") else 1
            fan_out = 1 if name.startswith("4") else growth
            rate = 0.1 * fan_out / fan_in
            moved = 0.1 * decay * weight if weight.ndim == 2 else 0  # the product of rate and decay stays
            torch.testing.assert_close(weight - after.params[name], moved + rate * grad(weight), rtol=0, atol=1e-12)


def make_run(width, is_mup=True, cls=torch.optim.Adam, lr=0.01):
    model = mlp(width)
    groups = scaled(cls, model, mlp(64), lr=lr) if is_mup else ()
    optimizer = ll.optimizer(cls, lr=lr, groups=groups)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    return model, train_step, ll.init_state(model, optimizer)


BATCH = IMAGES[:64].float() / 16, LABELS[:64]


def test_activations_are_stable_with_mup_and_not_in_the_standard_parametrization():
    testing.assert_width_stable(make_run, BATCH)
    with pytest.raises(AssertionError, match=r"activations depend on the width(?s:.*)4: .*at width 64.*at width 256"):
        testing.assert_width_stable(lambda width: make_run(width, is_mup=False), BATCH)


@pytest.mark.parametrize(
    ("cls", "lr"),
    [
        *((torch.optim.Adam, lr) for lr in (1e-3, 5e-4, 3e-5, 2e-3)),
        *((torch.optim.SGD, lr) for lr in (1e-3, 0.1, 0.5)),
    ],
)
def test_rates_of_all_sizes_tell_the_parametrizations_apart(cls, lr):
    """Also where activations are still those of the initial weights: their changes are not."""
    testing.assert_width_stable(partial(make_run, cls=cls, lr=lr), BATCH)
    with pytest.raises(AssertionError, match=r"change of 4: .*at width 64.*at width 256"):
        testing.assert_width_stable(partial(make_run, is_mup=False, cls=cls, lr=lr), BATCH)


class Recorded(nn.Module):
    """Returns containers, in which one tensor grows with the width. The loss of the model does not."""

    def __init__(self, layers, factor):
        super().__init__()
        self.layers, self.factor = layers, factor

    def forward(self, x):
        logits = self.layers(x)
        return {"logits": logits, "cache": (logits[:0], [logits * self.factor])}


@pytest.mark.parametrize("in_layer", [True, False])
def test_tensors_within_outputs_are_compared(in_layer):
    def run(width, grows=True):
        layers, _, _ = make_run(width)
        model = Recorded(layers, width if grows else 1)
        model = nn.Sequential(model, Logits()) if in_layer else model
        sgd = ll.optimizer(torch.optim.SGD, lr=0.0)
        grad_fn = ll.make_grad_fn(model, lambda model, batch: loss_fn(model if in_layer else logits_of(model), batch))
        return model, ll.make_train_step(grad_fn, sgd), ll.init_state(model, sgd)

    name = "0" if in_layer else "the output of the model"
    testing.assert_width_stable(partial(run, grows=False), BATCH)
    with pytest.raises(AssertionError, match=rf"{name}\['cache'\]\[1\]\[0\]: [34].*at width 64"):
        testing.assert_width_stable(run, BATCH)


class Logits(nn.Module):
    def forward(self, outputs):
        return outputs["logits"]


def logits_of(model):
    return lambda x: model(x)["logits"]


@pytest.mark.slow
def test_changes_are_those_under_the_same_dropout_masks():
    """Other masks would change activations by as much at each width, and so hide what a low rate does."""

    def run(width, is_mup):
        model, *_ = make_run(width, is_mup, lr=3e-4)
        model = nn.Sequential(*model[:4], nn.Dropout(0.5), model[4])
        adam = ll.optimizer(torch.optim.Adam, lr=3e-4, groups=groups_of(model, is_mup))
        return model, ll.make_train_step(ll.make_grad_fn(model, loss_fn), adam), ll.init_state(model, adam)

    def groups_of(model, is_mup):
        base = nn.Sequential(*mlp(64)[:4], nn.Dropout(0.5), mlp(64)[4])
        return ll.contrib.mup(torch.optim.Adam, model, base, lr=3e-4).groups if is_mup else ()

    testing.assert_width_stable(partial(run, is_mup=True), BATCH)
    with pytest.raises(AssertionError, match="change of 5"):
        testing.assert_width_stable(partial(run, is_mup=False), BATCH)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_activations_that_are_not_finite_at_one_width_fail(factor):
    def run(width):
        model, step, state = make_run(width)
        with torch.no_grad():
            model[4].bias *= factor if width == 128 else 1
        return model, step, state

    with pytest.raises(AssertionError, match=r"the output of the model: inf, .*(nan|inf) at width 128"):
        testing.assert_width_stable(run, BATCH)


@pytest.mark.slow
def test_the_best_rate_moves_by_at_most_a_factor_of_two():
    lrs = [2.0**-power for power in range(2, 13)]
    best = {True: [], False: []}
    for is_mup, best_lrs in best.items():
        for width in (64, 128, 256, 512):
            losses = torch.zeros(len(lrs))
            for seed in range(3):
                torch.manual_seed(seed)
                model = mlp(width)
                groups = scaled(torch.optim.Adam, model, mlp(64), lr=1.0) if is_mup else []
                by_member = [
                    (predicate, {"lr": ll.transforms.per_member([values["lr"] * lr for lr in lrs])})
                    for predicate, values in groups
                ]
                adam = ll.optimizer(torch.optim.Adam, lr=ll.transforms.per_member(lrs), groups=by_member)
                train_step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, loss_fn), adam))
                stack = ll.transforms.stack_states([ll.init_state(model, adam)] * len(lrs), same_seeds=True)
                for step in range(20):
                    rows = slice(64 * step, 64 * step + 64)
                    stack, metrics = train_step(stack, (IMAGES[rows].float() / 16, LABELS[rows]))
                    if step >= 15:
                        values = ll.transforms.compute_members(metrics)
                        losses += torch.tensor([member["loss"] for member in values]).nan_to_num(1e3, 1e3)
            best_lrs.append(lrs[int(losses.argmin())])
    print(best)
    assert max(best[True]) <= 2 * min(best[True])
    assert max(best[False]) > 2 * min(best[False])


class Positions(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(4, width))


def tied(width):
    model = nn.ModuleList([nn.Embedding(5, width), nn.Linear(width, 5, bias=False)])
    model[1].weight = model[0].weight
    return model


def test_a_parameter_of_ones_own_is_asked_for():
    with pytest.raises(ValueError, match=r"sums_over=\{'positions': dimension\}"):
        ll.contrib.mup(torch.optim.Adam, Positions(8), Positions(4), lr=0.1)
    told = ll.contrib.mup(torch.optim.Adam, Positions(8), Positions(4), lr=0.1, sums_over={"positions": None})
    assert told == ([], {"positions": 1.0})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.optim.LBFGS, mlp(8), mlp(4)), TypeError, "knows no factors"),
        ((torch.optim.Adam(mlp(4).parameters()), mlp(8), mlp(4)), TypeError, "knows no factors"),
        ((torch.optim.Adam, mlp(8), nn.Linear(2, 1)), ValueError, "not in both models"),
        ((torch.optim.Adam, tied(8), tied(4)), ValueError, "0.weight is both an embedding and a readout"),
        ((torch.optim.Adam, nn.Conv1d(8, 8, 4), nn.Conv1d(4, 4, 2)), ValueError, "3 dimensions that grow"),
        (
            (torch.optim.Adam, nn.ConvTranspose1d(8, 8, 4, groups=2), nn.ConvTranspose1d(4, 4, 4, groups=2)),
            ValueError,
            r"in 2 groups: give sums_over=\{'weight': 0\}",
        ),
        (
            (torch.optim.Adam, *(spectral_norm(nn.RNNCell(4, width), "weight_hh") for width in (8, 4))),
            ValueError,
            r"'weight_ih', .* of a recurrent layer whose weight_hh is parametrized",
        ),
    ],
)
def test_what_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ll.contrib.mup(*arguments, lr=0.1)


def test_the_check_refuses_one_width_and_a_module_that_is_not_called():
    with pytest.raises(ValueError, match="two or more"):
        testing.assert_width_stable(make_run, BATCH, widths=(64,))
    with pytest.raises(ValueError, match="no forward pass"):
        testing.assert_width_stable(lambda width: (nn.Linear(1, 1), *make_run(width)[1:]), BATCH)
