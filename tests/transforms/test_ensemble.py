"""Members of a stack against as many runs one after another, which take looplib's step as it is, without a graph."""

import math
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import python
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

import looplib as ll

optim = torch.optim
LRS = (1e-2, 3e-3, 3e-2)
SEEDS = (7, 8, 11)


def classify(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def normalized():
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(count=5, size=8, members=()):
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(*members, size, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (*members, size), generator=generator),
        )
        for _ in range(count)
    ]


def tokens(count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 11, (4, 7), generator=generator) for _ in range(count)]


def next_token(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def member(make, number, dtype=torch.float64):
    torch.manual_seed(number)
    return make().to(dtype)


def of(values):
    """For each member its own value, and for the stack (None) all of them."""
    return lambda number: ll.transforms.per_member(values) if number is None else values[number]


def sgd(number):
    return ll.optimizer(optim.SGD, lr=of(LRS)(number), momentum=0.9)


def adamw(number):
    return ll.optimizer(optim.AdamW, lr=of(LRS)(number), weight_decay=0.1)


def close(found, expected, tolerance=1e-10):
    leaves, others = (tree_flatten_with_path(tree)[0] for tree in (found, expected))
    assert [keystr(path) for path, _ in leaves] == [keystr(path) for path, _ in others]
    for (path, leaf), (_, other) in zip(leaves, others, strict=True):
        if isinstance(leaf, torch.Tensor):
            assert leaf.requires_grad == other.requires_grad, keystr(path)
            torch.testing.assert_close(
                leaf.detach(),
                other.detach(),
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=lambda text, path=path: f"{keystr(path)}: {text}",
            )
        else:
            assert leaf == other, keystr(path)


def trees(state):
    return state.params, state.buffers, state.opt_state


def counts(state):
    return state.step, state.epoch, state.batch, state.samples, state.batch_samples, state.batch_steps, state.seed


def stacked(
    optimizer, make, wrap=lambda grad_fn: grad_fn, loss_fn=classify, own_batches=False, start=None, **options
):
    """The step of a stack, and the stack to begin with."""
    grad_fn = wrap(ll.make_grad_fn(member(make, 0), loss_fn))
    compiles = options.pop("compile", False)
    step = ll.vmap_step(ll.make_train_step(grad_fn, optimizer(None), **options), own_batches=own_batches)
    step = ll.compile_step(step) if compiles else step
    states = [
        ll.init_state(member(make, number), (start or optimizer)(number if start else None), seed=seed)
        for number, seed in enumerate(SEEDS)
    ]
    return step, ll.transforms.stack_states(states)


def alone(number, optimizer, make, wrap=lambda grad_fn: grad_fn, loss_fn=classify):
    """The step of one member alone, and its state to begin with."""
    model, own = member(make, number), optimizer(number)
    step = ll.make_train_step(wrap(ll.make_grad_fn(model, loss_fn)), own)
    return step, ll.init_state(model, own, seed=SEEDS[number])


def check(optimizer, make=mlp, data=None, own_batches=False, tolerance=1e-10, compilations=1, start=None, **settings):
    """All members, their metrics and counts are those of runs one after another; returns the stack."""
    data = batches() if data is None else data
    options = {name: settings.pop(name) for name in ("donate", "compile") if name in settings}
    step, stack = stacked(optimizer, make, own_batches=own_batches, start=start, **settings, **options)
    found = []
    for batch in data:
        stack, metrics = step(stack, batch)
        found.append(ll.transforms.compute_members(metrics))
    for number, one in enumerate(ll.transforms.unstack_states(stack)):
        own_step, state = alone(number, optimizer, make, **settings)
        for place, batch in enumerate(data):
            own_batch = tree_map(lambda tensor, number=number: tensor[number], batch) if own_batches else batch
            state, metrics = own_step(state, own_batch)
            assert found[place][number] == pytest.approx(ll.compute(metrics), rel=tolerance, abs=tolerance)
        close(trees(one), trees(state), tolerance)
        assert counts(one) == counts(state)
    assert step.compiler.compilations == compilations
    return stack


# Optimizers

CLASSES = {
    "Adadelta": (optim.Adadelta, {}),
    "Adafactor": (optim.Adafactor, {}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adam": (optim.Adam, {}),
    "Adam, amsgrad": (optim.Adam, {"amsgrad": True, "maximize": True}),
    "AdamW": (optim.AdamW, {}),
    "Adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {}),
    "RMSprop": (optim.RMSprop, {}),
    "RMSprop, centered": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "SGD": (optim.SGD, {}),
    "SGD, nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_does_for_each_member_what_it_does_alone(name):
    cls, options = CLASSES[name]
    check(lambda number: ll.optimizer(cls, lr=of(LRS)(number), **options))


def test_a_first_step_that_is_another_than_the_rest_is_a_graph_of_its_own():
    check(lambda number: ll.optimizer(optim.SGD, lr=of(LRS)(number), momentum=0.9, dampening=0.5), compilations=2)


@pytest.mark.parametrize(
    # torch keeps the products of NAdam's momenta, and ASGD's counts, in float32, which a graph rounds elsewhere.
    ("cls", "tolerance"),
    [(optim.Rprop, 1e-10), (optim.ASGD, 1e-6)],
    ids=["Rprop", "ASGD"],
)
def test_members_whose_first_state_has_their_learning_rate_begin_with_their_own(cls, tolerance):
    def optimizer(number):
        return ll.optimizer(cls, lr=of(LRS)(number))

    check(optimizer, start=optimizer, tolerance=tolerance)


def test_rprop_for_a_parameter_without_dimensions():
    class Scaled(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(6, 3))
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return super().forward(x) * self.scale

    check(lambda number: ll.optimizer(optim.Rprop, lr=of(LRS)(number)), make=Scaled)


def test_nadam():
    check(lambda number: ll.optimizer(optim.NAdam, lr=of(LRS)(number)), tolerance=1e-6)  # see ASGD


def test_muon(monkeypatch):
    # Its five rounds of Newton-Schulz in bfloat16 enlarge differences in rounding to parts of a step. In double
    # precision, which it has no option for, they show that the arithmetic is the same.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    check(
        lambda number: ll.optimizer(optim.Muon, lr=of(LRS)(number)),
        lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)),
    )


def test_every_optimizer_of_torch_is_tested_here():
    first_order = {cls for cls in vars(optim).values() if isinstance(cls, type) and issubclass(cls, optim.Optimizer)}
    elsewhere = {optim.Optimizer, optim.LBFGS, optim.NAdam, optim.Muon, optim.Rprop, optim.ASGD, optim.SparseAdam}
    assert first_order - elsewhere == {cls for cls, _ in CLASSES.values()}


# Hyperparameters of their own

SCHEDULES = [ll.warmup_cosine(1e-2 * (k + 1), warmup=2, total=6) for k in range(3)]
OWN = {
    "schedules": lambda k: ll.optimizer(optim.AdamW, lr=of(SCHEDULES)(k)),
    "a schedule for one of them": lambda k: ll.optimizer(optim.AdamW, lr=of([1e-2, SCHEDULES[1], 0.0])(k)),
    "weight decays": lambda k: ll.optimizer(optim.AdamW, lr=1e-2, weight_decay=of([0.1, 0.0, 0.3])(k)),
    "weight decays in the gradient": lambda k: ll.optimizer(optim.SGD, lr=1e-2, weight_decay=of([0.0, 0.2, 0.3])(k)),
    "weight decays, none at all": lambda k: ll.optimizer(optim.SGD, lr=1e-2, weight_decay=of([0.0, 0.0, 0.0])(k)),
    "betas": lambda k: ll.optimizer(optim.AdamW, lr=1e-2, betas=(of([0.5, 0.6, 0.7])(k), 0.99)),
    "eps": lambda k: ll.optimizer(optim.AdamW, lr=1e-2, eps=of([1e-8, 1e-3, 1e-2])(k)),
    "momenta": lambda k: ll.optimizer(optim.SGD, lr=1e-2, momentum=of([0.5, 0.6, 0.9])(k)),
    "two at once": lambda k: ll.optimizer(
        optim.RMSprop, lr=1e-2, alpha=of([0.9, 0.95, 0.99])(k), weight_decay=of([0.0, 0.1, 0.2])(k)
    ),
    "groups": lambda k: ll.optimizer(
        optim.AdamW,
        lr=of(LRS)(k),
        weight_decay=0.1,
        groups=[(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0, "lr": of([1e-3, 1e-4, 0.0])(k)})],
    ),
    "a schedule of decays that begin at 0": lambda k: ll.optimizer(
        optim.SGD, lr=1e-2, weight_decay=of([0.0, lambda step: 0.1 * step, lambda step: 0.1 * (step < 2)])(k)
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_members_have_hyperparameters_of_their_own(name):
    check(OWN[name])


def test_a_momentum_of_0_beside_others_keeps_a_buffer_that_does_nothing():
    momenta = of([0.0, 0.6, 0.9])

    def optimizer(number):
        return ll.optimizer(optim.SGD, lr=1e-2, momentum=momenta(number))

    step, stack = stacked(optimizer, mlp)
    for batch in batches():
        stack, _ = step(stack, batch)
    for number, one in enumerate(ll.transforms.unstack_states(stack)):
        own_step, state = alone(number, optimizer, mlp)
        for batch in batches():
            state, _ = own_step(state, batch)
        close(one.params, state.params)
        own_step(one, batches()[0])  # and continues alone


def test_hyperparameters_in_the_state_are_each_members_own():
    def optimizer(number):
        return ll.optimizer(optim.SGD, lr=ll.optim.injected(0.1), weight_decay=ll.optim.injected(0.0), momentum=0.9)

    def changed(state, number):
        (values,) = state.opt_state["hyperparameters"]
        own = {"lr": values["lr"] * (number + 1), "weight_decay": values["weight_decay"] + 0.1 * number}
        return state.replace(opt_state={**state.opt_state, "hyperparameters": [own]})

    grad_fn = ll.make_grad_fn(member(mlp, 0), classify)
    step = ll.vmap_step(ll.make_train_step(grad_fn, optimizer(None)))
    starts = [changed(alone(number, optimizer, mlp)[1], number) for number in range(3)]
    stack = ll.transforms.stack_states(starts)
    for batch in batches():
        stack, _ = step(stack, batch)
    assert step.compiler.compilations == 1
    for number, one in enumerate(ll.transforms.unstack_states(stack)):
        own_step, state = alone(number, optimizer, mlp)[0], starts[number]
        for batch in batches():
            state, _ = own_step(state, batch)
        close(trees(one), trees(state))


# What is around the gradients and the optimizer

WRAPPED = {
    "pure": {},
    "donated": {"donate": True},
    "accumulated": {"wrap": lambda g: ll.accumulate(g, 2)},
    "accumulated in pieces that differ": {"wrap": lambda g: ll.accumulate(g, 3)},
    "accumulated within": {"wrap": lambda g: ll.accumulate(ll.accumulate(g, 2), 2)},
    "clipped by the norm": {"wrap": lambda g: ll.clip_by_global_norm(g, 0.1)},
    "clipped by value": {"wrap": lambda g: ll.grads.clip_by_value(g, 0.01)},
    "clipped by unit": {"wrap": lambda g: ll.contrib.adaptive_grad_clip(g, 0.01)},
    "sharpness-aware": {"wrap": lambda g: ll.contrib.sam(g, 0.05)},
    "EMA with buffers": {
        "make": normalized,
        "optimizer": lambda k: ll.ema(adamw(k), ll.optim.ema_warmup(0.9), buffers=True),
    },
    "SWA": {"optimizer": lambda k: ll.optim.swa(sgd(k), start=2, every=2), "compilations": 3},
    "lookahead": {"optimizer": lambda k: ll.contrib.lookahead(sgd(k), 3), "compilations": 2},
    "finite": {"optimizer": lambda k: ll.optim.apply_if_finite(adamw(k), 3)},
    "spikes": {"optimizer": lambda k: ll.optim.skip_spikes(adamw(k))},
    "loss scale": {
        "optimizer": lambda k: ll.optim.dynamic_loss_scale(adamw(k), growth_interval=2),
        "wrap": ll.grads.scale_loss,
    },
    "partition": {
        "optimizer": lambda k: ll.optim.partition(
            {"a": adamw(k), "b": sgd(k)}, lambda name, tensor: "a" if tensor.ndim < 2 else "b"
        )
    },
    "frozen for a while": {
        "optimizer": lambda k: ll.optim.freeze(adamw(k), lambda name, step: name.startswith("0") and step < 3),
        "compilations": 2,
    },
    "recomputed": {"loss_fn": ll.losses.recompute(classify, nn.Linear)},
    "recomputed with dropout": {
        "make": lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh()), nn.Linear(8, 3)),
        "loss_fn": ll.losses.recompute(classify, lambda name, module: name == "0"),
    },
    "a loss as a Mean, with others": {
        "loss_fn": lambda model, batch: (
            ll.Mean(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), (batch[1] > 0).sum()),
            {"positive": (batch[1] > 0).double().mean(), "size": ll.Mean(model[0].weight.square().sum(), 2)},
        )
    },
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_is_around_a_step_does_for_each_member_what_it_does_alone(name):
    settings = dict(WRAPPED[name])
    check(settings.pop("optimizer", adamw), **settings)


def test_members_have_batches_of_their_own():
    check(adamw, data=batches(members=(3,)), own_batches=True)


def test_a_last_batch_that_is_smaller_is_another_graph():
    check(adamw, data=[*batches(2), *batches(1, size=3), *batches(1)], compilations=2)


def test_per_sample_gradients_are_clipped_for_each_member():
    def optimizer(number):
        return sgd(number)

    def step_of(model, number):
        grad_fn = ll.contrib.clip_per_sample(ll.contrib.make_per_sample_grad_fn(model, classify), 0.1)
        return ll.make_train_step(grad_fn, optimizer(number))

    step = ll.vmap_step(step_of(member(plain, 0), None))
    stack = ll.transforms.stack_states([alone(number, optimizer, plain)[1] for number in range(3)])
    for batch in batches():
        stack, _ = step(stack, batch)
    for number, one in enumerate(ll.transforms.unstack_states(stack)):
        own_step, state = step_of(member(plain, number), number), alone(number, optimizer, plain)[1]
        for batch in batches():
            state, _ = own_step(state, batch)
        close(trees(one), trees(state))


# Models


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.tokens, self.cell, self.out = nn.Embedding(11, 5), kind(5, 6, batch_first=True), nn.Linear(6, 11)

    def forward(self, x):
        return self.out(self.cell(self.tokens(x))[0])


class Attention(nn.Module):
    """Fused attention and tied weights."""

    def __init__(self):
        super().__init__()
        self.tokens, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11, bias=False)
        self.norm = nn.LayerNorm(8)
        self.out.weight = self.tokens.weight

    def forward(self, x):
        x = self.tokens(x)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def pictures():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 2, 6, 6, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(0, 3, (3, 4), generator=generator), strict=True))


MODELS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, groups=2),
            nn.GroupNorm(2, 4),
            nn.Dropout2d(0.3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        classify,
        pictures,
    ),
    "LSTM": (lambda: Recurrent(nn.LSTM), next_token, tokens),
    "GRU": (lambda: Recurrent(nn.GRU), next_token, tokens),
    "attention": (Attention, next_token, tokens),
    "an encoder of torch with dropout in attention": (
        lambda: nn.Sequential(
            nn.Embedding(11, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 11)
        ),
        next_token,
        tokens,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    make, loss_fn, data = MODELS[name]
    check(sgd, make, data(), loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("LSTM", torch.float32),
        ("LSTM", torch.bfloat16),
        *((name, torch.float32) for name in MODELS if name != "LSTM"),
    ],
)
def test_models_of_less_precision(name, dtype):
    make, loss_fn, data = MODELS[name]
    optimizer, tolerance = ll.optimizer(optim.SGD, lr=0.1), 1e-4 if dtype is torch.float32 else 0.05
    data = [
        tree_map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, one) for one in data()
    ]
    step = ll.make_train_step(ll.make_grad_fn(member(make, 0, dtype), loss_fn), optimizer)
    states = [ll.init_state(member(make, number, dtype), optimizer, seed=number) for number in range(2)]
    stack, mapped = ll.transforms.stack_states(states), ll.vmap_step(step)
    for batch in data:
        stack, _ = mapped(stack, batch)
        states = [step(state, batch)[0] for state in states]
    for one, state in zip(ll.transforms.unstack_states(stack), states, strict=True):
        close((one.params, one.buffers), (state.params, state.buffers), tolerance)


# Random numbers

DRAWS = {
    "randn": lambda x: x + torch.randn_like(x) * torch.rand(6).double(),
    "normal_": lambda x: x + torch.empty(6, dtype=torch.float64).normal_(0, 0.1),
    "randint": lambda x: x[torch.randint(len(x), (len(x),))],
    "randperm": lambda x: x[torch.randperm(8)],
    "bernoulli of numbers": lambda x: x * torch.bernoulli(x.sigmoid()),
    "exponential": lambda x: x * torch.empty_like(x).exponential_(),
    "Gumbel": lambda x: x + F.gumbel_softmax(x),
    "dropout as CUDA has it": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "dropout of another layout": lambda x: F.dropout(x.T, 0.3).T,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_member_draws_the_random_numbers_that_it_draws_alone(name):
    check(sgd, data=batches(3), loss_fn=lambda model, batch: classify(model, (DRAWS[name](batch[0]), batch[1])))


def test_random_numbers_that_cannot_be_mapped_are_named():
    def loss_fn(model, batch):
        return classify(model, (F.rrelu(batch[0], training=True), batch[1]))

    step, stack = stacked(sgd, mlp, loss_fn=loss_fn)
    with pytest.raises(ll.transforms.UntraceableError, match=r"draws random numbers by aten\.rrelu_with_noise"):
        step(stack, batches(1)[0])


def test_the_global_stream_is_left_as_it_was():
    step, stack = stacked(sgd, mlp)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for batch in batches(2):
        stack, _ = step(stack, batch)
    assert torch.equal(torch.get_rng_state(), before)


# Evaluation and prediction


def scores(model, batch):
    x, y = batch
    logits = model(x)
    return {
        "loss": F.cross_entropy(logits, y),
        "accuracy": ll.accuracy(logits, y),
        "confusion": ll.metrics.ConfusionMatrix.of(logits, y, classes=3),
        "auc": ll.metrics.AUC.of(logits[:, 0], y == 0),
    }


def test_a_stack_is_evaluated_member_by_member():
    _, stack = stacked(adamw, normalized)
    model = member(normalized, 0)
    eval_step = ll.make_eval_step(model, scores)
    data = [*batches(5), *batches(1, size=3)]
    found = ll.transforms.compute_members(ll.evaluation.measure(ll.vmap_step(eval_step), stack, data), prefix="eval/")
    for one, state in zip(found, ll.transforms.unstack_states(stack), strict=True):
        assert one == pytest.approx(ll.evaluate(eval_step, state, data, prefix="eval/"), rel=1e-12)


def test_ll_compute_says_who_computes_those_of_a_stack():
    _, stack = stacked(adamw, plain)
    eval_step = ll.vmap_step(ll.make_eval_step(member(plain, 0), scores))
    with pytest.raises(
        ValueError, match=r"'loss' has the shape \(3,\), and not one value.*ll.transforms.compute_members"
    ):
        ll.evaluate(eval_step, stack, batches(2))


def test_a_window_of_a_stacks_metrics():
    step, stack = stacked(adamw, plain)
    window, singles = ll.Window(), [ll.Window() for _ in SEEDS]
    runs = [alone(number, adamw, plain) for number in range(3)]
    for batch in [*batches(66), *batches(1, size=5)]:  # more than wait unmerged
        stack, metrics = step(stack, batch)
        window = window.add(metrics)
        for number, (own_step, state) in enumerate(runs):
            state, metrics = own_step(state, batch)
            runs[number], singles[number] = (own_step, state), singles[number].add(metrics)
    for found, single in zip(ll.transforms.compute_members(window.metrics()), singles, strict=True):
        assert found == pytest.approx(ll.compute(single.metrics()), rel=1e-9)


def test_a_stack_predicts_with_the_members_in_front():
    _, stack = stacked(adamw, normalized)
    predict_step = ll.make_predict_step(member(normalized, 0), lambda model, batch: model(batch[0]).softmax(1))
    mapped = ll.vmap_step(predict_step)
    data = [*batches(2), *batches(1, size=3)]
    for batch in data:
        each = [predict_step(state, batch) for state in ll.transforms.unstack_states(stack)]
        torch.testing.assert_close(mapped(stack, batch), torch.stack(each), rtol=1e-12, atol=0)
    means = torch.cat(list(ll.predict(lambda stack, batch: mapped(stack, batch).mean(0), stack, data)))
    expected = [
        torch.cat(list(ll.predict(predict_step, state, data))) for state in ll.transforms.unstack_states(stack)
    ]
    torch.testing.assert_close(means, torch.stack(expected).mean(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("start", [0, 3])
def test_the_averages_of_a_stack_are_evaluated(start):
    def optimizer(number):
        return ll.ema(ll.contrib.lookahead(sgd(number), 2), 0.5, start=start, buffers=True)

    step, stack = stacked(optimizer, normalized)
    for batch in batches(2 + start):
        stack, _ = step(stack, batch)
        averaged = ll.eval_state(optimizer(None), stack)
        for one, state in zip(
            ll.transforms.unstack_states(averaged), ll.transforms.unstack_states(stack), strict=True
        ):
            close(trees(one), trees(ll.eval_state(optimizer(0), state)), 0)


def test_the_averages_of_some_members_alone_are_evaluated():
    optimizer = ll.ema(sgd(0), 0.5, start=1, buffers=True)
    states = [alone(number, lambda number: optimizer, normalized)[1] for number in range(3)]
    step = ll.make_train_step(ll.make_grad_fn(member(normalized, 0), classify), optimizer)
    states[1] = step(states[1], batches(1)[0])[0].replace(step=0, batch=0, samples=0)
    stack = ll.transforms.stack_states(states)
    for one, state in zip(ll.transforms.unstack_states(ll.eval_state(optimizer, stack)), states, strict=True):
        same_bits(trees(one), trees(ll.eval_state(optimizer, state)))


# Members that part from the others


def same_bits(one, other):
    leaves, others = torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other)
    assert len(leaves) == len(others)
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others, strict=True)
    )


def squares(model, batch):
    return (model(batch[0]) - 1).square().mean()


def linear():
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_a_member_that_diverges_leaves_the_bits_of_the_others(donate):
    def run(lr):
        optimizer = ll.ema(ll.optimizer(optim.SGD, lr=ll.transforms.per_member([1e-2, lr, 3e-2]), momentum=0.9), 0.9)
        step, stack = stacked(lambda number: optimizer, linear, loss_fn=squares, donate=donate)
        for batch in batches(8):
            stack, metrics = step(stack, batch)
        return ll.transforms.compute_members(metrics), ll.transforms.unstack_states(stack)

    losses, healthy = run(1e-2)
    broken_losses, broken = run(1e30)
    assert not math.isfinite(broken_losses[1]["loss"])
    assert not broken[1].params["0.weight"].isfinite().all()
    for number in (0, 2):
        same_bits(trees(healthy[number]), trees(broken[number]))
        assert losses[number] == broken_losses[number]


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_a_member_whose_update_is_skipped_stays_where_it_was(donate):
    def optimizer(number):
        return ll.optim.apply_if_finite(adamw(number), 1)

    data = batches(6, members=(3,))
    for place in (1, 2, 3):  # more in a row than one run would accept
        data[place][0][1, 0, 0] = math.inf
    step, stack = stacked(optimizer, plain, own_batches=True, donate=donate)
    for batch in data:
        stack, _ = step(stack, batch)
    assert stack.opt_state["total_notfinite"].tolist() == [0, 3, 0]
    assert stack.step == 6
    for number, one in enumerate(ll.transforms.unstack_states(stack)):
        own_step, state = alone(number, adamw, plain)
        for place, (x, y) in enumerate(data):
            if not (number == 1 and place in (1, 2, 3)):
                state, _ = own_step(state, (x[number], y[number]))
        close(one.params, state.params)
        close(one.opt_state["inner_state"], state.opt_state)


def test_where_all_are_skipped_the_step_does_not_count():
    step, stack = stacked(lambda number: ll.optim.apply_if_finite(adamw(number), 5), plain)
    x, y = batches(1)[0]
    after, _ = step(stack, (x * math.inf, y))
    assert (after.step, after.batch, after.skipped) == (0, 1, True)
    close(after.params, stack.params, 0)


@pytest.mark.slow
def test_the_weak_are_dropped_on_the_way():
    step, stack = stacked(adamw, mlp)
    for batch in batches(3):
        stack, _ = step(stack, batch)
    smaller = ll.transforms.select_members(stack, [2, 0])
    assert smaller.seed == (SEEDS[2], SEEDS[0])
    assert ll.transforms.members_of(smaller) == 2
    first, second = ll.transforms.unstack_states(smaller)
    same_bits(trees(first), trees(ll.transforms.unstack_states(stack)[2]))
    same_bits(trees(second), trees(ll.transforms.unstack_states(stack)[0]))
    single = ll.make_train_step(ll.make_grad_fn(member(mlp, 0), classify), ll.optimizer(optim.AdamW, lr=1e-2))
    mapped = ll.vmap_step(single)
    for batch in batches(3):
        smaller, _ = mapped(smaller, batch)
        first, _ = single(first, batch)
        second, _ = single(second, batch)
    for found, expected in zip(ll.transforms.unstack_states(smaller), (first, second), strict=True):
        close(trees(found), trees(expected))


def test_a_member_taken_out_continues_alone():
    step, stack = stacked(adamw, mlp, donate=True)
    for batch in batches(3):
        stack, _ = step(stack, batch)
    one = ll.transforms.unstack_states(stack)[1]
    own_step, _ = alone(1, adamw, mlp)
    model = member(mlp, 5)
    bound = ll.bind(model, one)
    own_donated = ll.make_train_step(ll.make_grad_fn(model, classify), adamw(1), donate=True)
    for batch in batches(3):
        stack, _ = step(stack, batch)
        one, _ = own_step(one, batch)
        bound, _ = own_donated(bound, batch)
    close(trees(one), trees(ll.transforms.unstack_states(stack)[1]))
    close(trees(one), trees(bound))


# A stack is a state


def test_a_stack_is_saved_and_continues_to_the_same_bits(tmp_path):
    def optimizer(number):
        return ll.ema(adamw(number), 0.9)

    step, stack = stacked(optimizer, mlp)
    stack = stack.replace(seed=(-1, 2**70, 3))
    fresh = stack
    ckpt = ll.checkpoint_io(tmp_path)
    for batch in batches(2):
        stack, _ = step(stack, batch)
    ckpt.save(stack)
    restored = ckpt.restore(fresh)
    assert counts(restored) == counts(stack)
    assert restored.seed == (-1, 2**70, 3)
    assert ckpt.latest().step == 2
    for batch in batches(2):
        stack, _ = step(stack, batch)
        restored, _ = step(restored, batch)
    same_bits(trees(restored), trees(stack))


def test_a_stack_is_not_bound_to_a_module_for_one_member():
    _, stack = stacked(adamw, plain)
    with pytest.raises(ValueError, match=r"is a stack, .*unstack_states\(state\)\[0\]"):
        ll.bind(plain(), stack)


def test_a_checkpoint_of_one_state_is_none_of_a_stack(tmp_path):
    _, stack = stacked(adamw, plain)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(ll.transforms.unstack_states(stack)[0])
    with pytest.raises(ValueError, match=r"0.weight.*\(3, 8, 6\)"):
        ckpt.restore(stack)


def test_predicates_and_early_stopping_ask_a_stack_as_a_state():
    step, stack = stacked(adamw, plain)
    stack = stack.replace(extra={"best": ll.predicates.BestSoFar("loss")}, epoch_length=2)
    every_two, done, epoch_end = ll.every_n_steps(2), ll.early_stopping(patience=3), ll.at_epoch_end()
    fired = []
    for batch in batches(5):
        stack, _ = step(stack, batch)
        fired.append((every_two(stack), epoch_end(stack)))
        stack = ll.update_best(stack, {"loss": 1.0})
        if done(stack):
            break
    assert fired == [(False, False), (True, True), (False, False), (True, True)]
    assert [state.extra["best"].waited for state in ll.transforms.unstack_states(stack)] == [3, 3, 3]


def test_the_bar_shows_the_mean_loss_of_the_members_that_are_finite(capsys):
    step, stack = stacked(
        lambda number: ll.optimizer(optim.SGD, lr=ll.transforms.per_member([1e-2, 1e30, 1e-2])),
        linear,
        loss_fn=squares,
    )
    bar = ll.progress(lambda state: batches(8), mininterval=0)
    for batch in bar(stack):
        stack, metrics = step(stack, batch)
        bar.show(metrics)
    first, broken, last = (scores["loss"] for scores in ll.transforms.compute_members(metrics))
    assert not math.isfinite(broken)
    assert f"loss={(first + last) / 2:.4g}" in capsys.readouterr().err


def test_a_donated_stack_is_spent():
    step, stack = stacked(adamw, mlp, donate=True)
    kept = ll.transforms.unstack_states(stack)
    after, _ = step(stack, batches(1)[0])
    with pytest.raises(ll.DonatedStateError, match="donated"):
        _ = stack.params
    again, _ = step(ll.transforms.stack_states(kept), batches(1)[0])
    same_bits(trees(again), trees(after))


def test_a_pure_step_leaves_the_stack():
    step, stack = stacked(adamw, normalized)
    before = ll.copy_state(stack)
    first, _ = step(stack, batches(1)[0])
    second, _ = step(stack, batches(1)[0])
    same_bits(trees(stack), trees(before))
    same_bits(trees(first), trees(second))


# What is refused


def test_states_that_differ_are_named():
    optimizer = adamw(0)
    first = ll.init_state(member(plain, 0), optimizer)
    with pytest.raises(ValueError, match="got no states; give a list"):
        ll.transforms.stack_states([])
    with pytest.raises(ValueError, match="member 1 is at step 3, member 0 at 0: members are stepped together"):
        ll.transforms.stack_states([first, first.replace(step=3)])
    with pytest.raises(
        ValueError, match=r"opt_state\['state'\]\['0.bias'\]\['exp_avg'\], .* stands in one of the members 0 and 1"
    ):
        ll.transforms.stack_states([first, first.replace(opt_state={"state": {}})])
    wide = first.replace(params={**first.params, "2.bias": torch.zeros(4)})
    with pytest.raises(
        ValueError, match=r"params\['2.bias'\] has shape \(4,\), torch.float32 .* in member 2, and \(3,\)"
    ):
        ll.transforms.stack_states([first, first, wide])
    with pytest.raises(ValueError, match=r"extra\['note'\] is 'a' in member 0 and 'b' in member 1; only tensors may"):
        ll.transforms.stack_states([first.replace(extra={"note": "a"}), first.replace(extra={"note": "b"})])
    with pytest.raises(ValueError, match=r"this is one state, with the seed 0, and no stack"):
        ll.transforms.unstack_states(first)
    with pytest.raises(ValueError, match=r"numbers are \[2\]; a stack of 2 has the members 0 to 1"):
        ll.transforms.select_members(ll.transforms.stack_states([first, first]), [2])
    with pytest.raises(ValueError, match=r"numbers are \[\]"):
        ll.transforms.select_members(ll.transforms.stack_states([first, first]), [])


def test_what_is_put_into_a_stack_needs_the_members():
    _, stack = stacked(adamw, plain)
    stack = stack.replace(extra={"note": "kept", "own": torch.arange(3), "shared": torch.zeros(2)})
    with pytest.raises(
        ValueError, match=r"extra\['shared'\] has shape \(2,\), and no first dimension of the stack's 3"
    ):
        ll.transforms.unstack_states(stack)
    one = ll.transforms.unstack_states(stack.replace(extra={"note": "kept", "own": torch.arange(3)}))[2]
    assert (one.extra["note"], one.extra["own"].item()) == ("kept", 2)


def test_values_for_another_number_of_members_are_refused():
    step, stack = stacked(adamw, plain)
    with pytest.raises(
        ValueError, match=r"per_member\(\[0.01, 0.003, 0.03\]\) has 3 values, and the stack 2 members"
    ):
        step(ll.transforms.select_members(stack, [0, 1]), batches(1)[0])
    with pytest.raises(ValueError, match="got no values"):
        ll.transforms.per_member([])


def test_values_of_members_need_a_stack():
    optimizer = adamw(None)
    step = ll.make_train_step(ll.make_grad_fn(model := member(plain, 0), classify), optimizer)
    state = ll.init_state(model, optimizer)
    with pytest.raises(ValueError, match=r"asked for by a step of one state; make a step of a stack: ll.vmap_step"):
        step(state.replace(step=1), batches(1)[0])


def test_a_step_of_a_stack_takes_stacks_and_steps():
    step, stack = stacked(adamw, plain)
    with pytest.raises(ValueError, match="this is one state, with the seed 7, and no stack"):
        step(ll.transforms.unstack_states(stack)[0], batches(1)[0])
    with pytest.raises(TypeError, match="vmap_step got a function that is no step of looplib"):
        ll.vmap_step(lambda state, batch: (state, {}))
    own, stack = stacked(adamw, plain, own_batches=True)
    with pytest.raises(
        ValueError, match=r"a tensor of shape \(8, 6\), and the stack 3 members: with own_batches=True"
    ):
        own(stack, batches(1)[0])


def test_members_whose_averages_part_are_refused():
    def optimizer(number):
        return ll.optim.swa(ll.optim.apply_if_finite(sgd(number), 5), start=0, every=2)

    step, stack = stacked(optimizer, plain, own_batches=True)
    data = batches(3, members=(3,))
    data[0][0][1, 0, 0] = math.nan
    stack, _ = step(stack, data[0])
    with pytest.raises(
        ValueError, match=r"members 0 and 1 of the stack part in what their step does.*select_members"
    ):
        step(stack, data[1])
    for numbers in ([0, 2], [1]):
        chosen = ll.transforms.select_members(stack, numbers)
        lrs = [LRS[number] for number in numbers]
        own = ll.optim.swa(
            ll.optim.apply_if_finite(ll.optimizer(optim.SGD, lr=ll.transforms.per_member(lrs), momentum=0.9), 5),
            start=0,
            every=2,
        )
        ll.vmap_step(ll.make_train_step(ll.make_grad_fn(member(plain, 0), classify), own))(chosen, batches(1)[0])


@pytest.mark.parametrize("cls", [optim.SGD, optim.SparseAdam])
def test_sparse_gradients_are_refused(cls):
    def make():
        return nn.Embedding(11, 11, sparse=True)

    step, stack = stacked(lambda number: ll.optimizer(cls, lr=of(LRS)(number)), make, loss_fn=next_token)
    with pytest.raises(ll.transforms.UntraceableError, match="sparse"):
        step(stack, tokens(1)[0])


def test_a_value_that_is_asked_for_is_named():
    def loss_fn(model, batch):
        loss = classify(model, batch)
        return loss if loss.item() > 0 else -loss

    step, stack = stacked(adamw, plain, loss_fn=loss_fn)
    with pytest.raises(ll.transforms.UntraceableError, match=r"test_ensemble.py:\d+, in loss_fn"):
        step(stack, batches(1)[0])


def test_metrics_of_one_state_are_none_of_members():
    with pytest.raises(ValueError, match=r"these metrics \(loss\) are of no members.*ll.compute those of one state"):
        ll.transforms.compute_members({"loss": ll.Mean(3.0, 2)})
    with pytest.raises(ValueError, match="are of 2 and 3 members"):
        ll.transforms.compute_members({"a": ll.Mean(torch.zeros(2)), "b": ll.Mean(torch.zeros(3))})


@pytest.mark.slow
def test_torch_warns_of_no_loop_over_the_members():
    code = """
        import sys, torch
        torch.set_num_threads(1)
        sys.path[:0] = sys.argv[1:]
        import test_ensemble as t
        for name in ("convolutions", "attention", "an encoder of torch with dropout in attention"):
            make, loss_fn, data = t.MODELS[name]
            step, stack = t.stacked(
                lambda number: t.ll.optim.dynamic_loss_scale(t.ll.optimizer(t.optim.Rprop, lr=1e-2)),
                make,
                t.ll.grads.scale_loss,
                loss_fn,
            )
            for batch in data()[:1]:
                step(stack, batch)
        """
    folder = Path(__file__).parent
    out = python(textwrap.dedent(code), folder, folder.parent)
    assert out.returncode == 0, out.stderr
    assert out.stderr == ""


# Compiled

# Inductor fuses products and sums, and orders sums otherwise.
ROUNDING = 1e-9


def test_a_stack_is_compiled():
    def optimizer(number):
        return ll.ema(ll.optim.apply_if_finite(adamw(number), 3), 0.9)

    check(
        optimizer,
        data=batches(4),
        wrap=lambda g: ll.clip_by_global_norm(g, 0.5),
        donate=True,
        compile=True,
        tolerance=ROUNDING,
    )


@pytest.mark.large
@pytest.mark.parametrize("name", [*CLASSES, *OWN, *WRAPPED])
def test_all_is_compiled(name):
    if name in CLASSES:
        cls, options = CLASSES[name]
        check(lambda k: ll.optimizer(cls, lr=of(LRS)(k), **options), compile=True, tolerance=ROUNDING)
    elif name in OWN:
        check(OWN[name], compile=True, tolerance=ROUNDING)
    else:
        settings = {**WRAPPED[name], "compile": True, "tolerance": ROUNDING}
        check(settings.pop("optimizer", adamw), **settings)


@pytest.mark.large
@pytest.mark.parametrize("name", MODELS)
def test_all_models_are_compiled(name):
    make, loss_fn, data = MODELS[name]
    check(sgd, make, data(), loss_fn=loss_fn, compile=True, donate=True, tolerance=ROUNDING)


# Whatever the number of members


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(
    seeds=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    donate=st.booleans(),
    own_batches=st.booleans(),
)
def test_any_number_of_members_and_examples(seeds, sizes, donate, own_batches):
    lrs = [1e-2 * (number + 1) for number in range(len(seeds))]
    data = [batches(1, size, (len(seeds),) if own_batches else ())[0] for size in sizes]

    def make():
        return nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3))

    model = member(make, 0)
    grad_fn = ll.make_grad_fn(model, classify)
    optimizer = ll.optimizer(optim.SGD, lr=ll.transforms.per_member(lrs), momentum=0.9)
    starts = [ll.init_state(member(make, number), optimizer, seed=seed) for number, seed in enumerate(seeds)]
    stack = ll.transforms.stack_states(starts)
    step = ll.vmap_step(ll.make_train_step(grad_fn, optimizer, donate=donate), own_batches=own_batches)
    for batch in data:
        stack, metrics = step(stack, batch)
    assert stack.samples == sum(sizes)
    for number, (one, state) in enumerate(zip(ll.transforms.unstack_states(stack), starts, strict=True)):
        own_step = ll.make_train_step(grad_fn, ll.optimizer(optim.SGD, lr=lrs[number], momentum=0.9))
        for x, y in data:
            state, own_metrics = own_step(state, (x[number], y[number]) if own_batches else (x, y))
        close(trees(one), trees(state))
        assert ll.transforms.compute_members(metrics)[number] == pytest.approx(ll.compute(own_metrics))


class Remembering(nn.Linear):
    """A layer that keeps the mean of its last batch, which is the same for all members."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        self.last = x.mean(0)
        return super().forward(x)


def test_a_buffer_that_is_the_same_for_all_members_may_be_overwritten():
    model, optimizer = Remembering(), ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
    pure, donated = (ll.vmap_step(ll.make_train_step(grad_fn, optimizer, donate=donate)) for donate in (False, True))
    stack = ll.transforms.stack_states([ll.init_state(model, optimizer, seed=seed) for seed in range(2)])
    stack, _ = pure(stack, torch.zeros(4, 3))
    stack, _ = donated(stack, torch.ones(4, 3))
    assert stack.buffers["last"].tolist() == [[1, 1, 1]] * 2


def test_batches_of_members_may_have_any_strides():
    model, optimizer = nn.Linear(4, 3).double(), ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    train_step = ll.make_train_step(grad_fn, optimizer)
    x, y = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(3, 2, 5, dtype=torch.float64).permute(1, 2, 0)
    state = ll.init_state(model, optimizer)
    stack, _ = ll.vmap_step(train_step, own_batches=True)(ll.transforms.stack_states([state, state]), (x, y))
    for member in range(2):
        alone, _ = train_step(state, (x[member], y[member]))
        torch.testing.assert_close(stack.params["weight"][member], alone.params["weight"])
