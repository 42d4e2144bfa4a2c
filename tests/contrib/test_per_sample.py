"""Gradients of each example against backward calls one example at a time, and formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import SGD, both_states, examples, mean_square
from shared import classify as mean_loss
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import looplib as ll


class Transformer(nn.Module):
    """A causal language model with tied weights, (batch, time) -> (batch, time, 11)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(6, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        mask = torch.full((tokens.size(1),) * 2, -math.inf, dtype=self.position.dtype).triu(1)
        return self.head(self.layer(self.embedding(tokens) + self.position, src_mask=mask))


def perceptron():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def token_loss(model, tokens):
    losses = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
    counts = tokens.flatten() > 3
    return ll.Mean((losses * counts).sum(), counts.sum())


def a_model_and_batch(kind, count=7):
    torch.manual_seed(3)
    if kind == "transformer":
        tokens = torch.randint(0, 11, (count, 6))
        tokens[:, 0] = 10
        return Transformer().double(), token_loss, tokens
    labels = torch.randint(0, 3, (count,))
    return perceptron(), mean_loss, (torch.randn(count, 5).double(), labels)


def one_by_one(model, loss_fn, batch, count):
    """(count, *shape) for each parameter, by backward calls."""
    found = {name: [] for name, _ in model.named_parameters()}
    for i in range(count):
        model.zero_grad()
        out = loss_fn(model, tuple(t[i : i + 1] for t in batch) if isinstance(batch, tuple) else batch[i : i + 1])
        (out.total / out.weight if isinstance(out, ll.Mean) else out).backward()
        for name, p in model.named_parameters():
            found[name].append(p.grad.clone())
    model.zero_grad()
    return {name: torch.stack(grads) for name, grads in found.items()}


def close(found, expected, rtol=1e-11, atol=1e-13):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=rtol, atol=atol)


# make_per_sample_grad_fn


@pytest.mark.parametrize("kind", ["perceptron", "transformer"])
@both_states
def test_each_example_has_the_gradient_that_it_has_alone(kind, bound):
    model, loss_fn, batch = a_model_and_batch(kind)
    expected = one_by_one(model, loss_fn, batch, 7)
    state = ll.init_state(model)
    if not bound:
        state = ll.copy_state(state)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(torch.nan)
    before = {name: tensor.clone() for name, tensor in state.params.items()}
    out = ll.contrib.make_per_sample_grad_fn(model, loss_fn)(state, batch)
    close(out.grads, expected)
    assert out.samples == 7
    assert not any(grad.requires_grad for grad in out.grads.values())
    assert all(torch.equal(state.params[name], tensor) for name, tensor in before.items())
    assert all(p.grad is None and isinstance(p, nn.Parameter) for p in model.parameters())


def test_metrics_merge_as_those_of_the_whole_batch():
    def with_aux(model, tokens):
        right = model(tokens).argmax(-1) == tokens
        aux = {"accuracy": right.double().mean(), "tokens": ll.Mean(right.sum(), right.numel()), "constant": 2.5}
        return token_loss(model, tokens), aux

    model, _, tokens = a_model_and_batch("transformer")
    tokens[1] = 0  # which token_loss does not count
    state, per_sample = ll.init_state(model), ll.contrib.make_per_sample_grad_fn(model, with_aux)
    empty, *outs = (per_sample(state, piece) for piece in tokens.split([0, 3, 4]))
    expected = ll.compute(ll.make_grad_fn(model, with_aux)(state, tokens).metrics)
    assert set(expected) == {"loss", "accuracy", "tokens", "constant"}
    merged = ll.metrics.merge(empty.metrics, *[out.metrics for out in outs])
    assert ll.compute(merged) == pytest.approx(expected, rel=1e-12)
    assert all(grad.shape == (0, *state.params[name].shape) for name, grad in empty.grads.items())
    assert not any(grad[1].any() for grad in outs[0].grads.values())  # where it has no weight, zero


def dropout_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))


def test_dropout_differs_by_example_and_is_a_function_of_the_place():
    model, x = dropout_model(), torch.ones(6, 4)
    grad_fn = ll.contrib.make_per_sample_grad_fn(model, lambda model, x: model(x).sum())
    state = ll.init_state(model, seed=5)
    stream = torch.get_rng_state()

    def masks(state, **request):
        return grad_fn(state, x, **request).grads["2.weight"][:, 0] != 0

    first = masks(state)
    assert len({tuple(row.tolist()) for row in first}) == 6
    assert 0.3 < first.float().mean() < 0.7
    assert torch.equal(first, masks(state))
    for other in (masks(state.replace(step=1)), masks(state.replace(seed=6)), masks(state, index=1)):
        assert not torch.equal(first, other)
    clipped = ll.contrib.clip_per_sample(grad_fn, 1e6)
    for index, expected in ((0, first), (1, masks(state, index=1))):
        grads = clipped(state, x, index=index).grads
        assert torch.equal(grads["2.weight"][0] != 0, expected.any(0))
    assert torch.equal(stream, torch.get_rng_state())


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return self.linear(x)


def test_a_buffer_that_is_written_is_refused_and_stays():
    for model, name in (
        (Writes(), "count"),
        (nn.InstanceNorm1d(2, affine=True, track_running_stats=True), "running_mean"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), "parametrizations.weight.0._u"),
    ):
        grad_fn = ll.contrib.make_per_sample_grad_fn(model, mean_square)
        state = ll.init_state(model)
        before = state.buffers[name].clone()
        with pytest.raises(ValueError, match=rf"writes to a buffer \(of .*{name}.*eval mode before"):
            grad_fn(state, torch.randn(4, 2, 3))
        assert torch.equal(state.buffers[name], before)
        assert model.get_buffer(name) is state.buffers[name]


# clip_per_sample


def clipped_by_hand(each, max_norm):
    """The mean of the clipped gradients, the share of those that were clipped, and the mean norm."""
    norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in each.values()]).norm(dim=0)
    factors = (max_norm / (norms + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grad_norm_
    clipped = {name: torch.tensordot(factors, grad, 1) / len(norms) for name, grad in each.items()}
    return clipped, (norms > max_norm).double().mean().item(), norms.mean().item()


@pytest.mark.parametrize("kind", ["perceptron", "transformer"])
def test_each_example_is_clipped_by_itself(kind):
    model, loss_fn, batch = a_model_and_batch(kind)
    each = one_by_one(model, loss_fn, batch, 7)
    norms = sorted(torch.stack([grad.flatten(1).norm(dim=1) for grad in each.values()]).norm(dim=0).tolist())
    per_sample, state = ll.contrib.make_per_sample_grad_fn(model, loss_fn), ll.init_state(model)
    for max_norm in (norms[0] / 2, norms[3] * 1.0001, norms[6] * 2):
        expected, share, mean_norm = clipped_by_hand(each, max_norm)
        out = ll.contrib.clip_per_sample(per_sample, max_norm)(state, batch)
        close(out.grads, expected)
        metrics = ll.compute(out.metrics)
        assert metrics.keys() == {"loss", "clipped", "grad_norm_per_sample"}
        assert metrics["clipped"] == share
        assert metrics["grad_norm_per_sample"] == pytest.approx(mean_norm, rel=1e-12)
    mean = {name: grad.mean(0) for name, grad in each.items()}
    close(ll.contrib.clip_per_sample(per_sample, math.inf)(state, batch).grads, mean)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    max_norm=st.floats(1e-3, 1e2),
)
@settings(max_examples=examples(40), deadline=None)
def test_parts_add_up_to_the_whole(sizes, max_norm):
    torch.manual_seed(sum(sizes))
    model, x, y = perceptron(), torch.randn(sum(sizes), 5).double(), torch.randint(0, 3, (sum(sizes),))
    grad_fn = ll.contrib.clip_per_sample(ll.contrib.make_per_sample_grad_fn(model, mean_loss), max_norm)
    state, pieces = ll.init_state(model), list(zip(x.split(sizes), y.split(sizes), strict=True))
    whole = grad_fn(state, (x, y))
    out = ll.accumulate(grad_fn)(state, pieces)
    close(out.grads, whole.grads)
    assert out.samples == whole.samples == sum(sizes)
    assert ll.compute(out.metrics) == pytest.approx(ll.compute(whole.metrics), rel=1e-12)


# add_noise


def noisy(model, max_norm=0.5, multiplier=2.0, size=None, wrap=lambda grad_fn: grad_fn):
    """Noise alone, since the loss has no gradient."""
    grad_fn = ll.contrib.make_per_sample_grad_fn(model, lambda model, x: 0 * model(x).mean())
    clipped = wrap(ll.contrib.clip_per_sample(grad_fn, max_norm))
    return ll.contrib.add_noise(clipped, max_norm, multiplier, expected_batch_size=size)


def noise_of(seed=1, step=3, samples=8, size=None, max_norm=0.5, multiplier=2.0, **options):
    """Noise of two parameters of one shape, in units of what is asked for."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).double()
    state, x = ll.init_state(model, seed=seed).replace(step=step), torch.ones(samples, 100).double()
    grads = noisy(model, max_norm, multiplier, size, **options)(state, x).grads
    each = torch.stack([grads["0.weight"].flatten(), grads["1.weight"].flatten()])
    return each * (size or samples) / (max_norm * multiplier)


def check_normal(rows):
    """To 5 standard errors of a mean, a standard deviation and a correlation of n normal numbers."""
    n = rows.size(1)
    assert rows.mean(1).abs().max() < 5 / math.sqrt(n)
    assert (rows.std(1) - 1).abs().max() < 5 / math.sqrt(2 * n)
    assert torch.corrcoef(rows).triu(1).abs().max() < 5 / math.sqrt(n)


def test_noise_has_its_standard_deviation_and_its_place():
    first = noise_of()
    check_normal(torch.cat([first, noise_of(step=4), noise_of(seed=2)]))
    for same in (
        noise_of(),
        noise_of(samples=4),
        noise_of(wrap=lambda grad_fn: ll.accumulate(grad_fn, size=2)),  # once for all microbatches
        noise_of(size=32),
        noise_of(max_norm=1.5, multiplier=1.0),
    ):
        torch.testing.assert_close(same, first, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_noise_of_a_traced_step_is_new_in_each_step_and_has_its_standard_deviation():
    """Its numbers are not those of a plain step."""
    model, optimizer = nn.Linear(100, 100), ll.optimizer(torch.optim.SGD, lr=1.0)

    def noise(seed):
        step = ll.compile_step(ll.make_train_step(noisy(model), optimizer), backend="eager")
        state, drawn = ll.copy_state(ll.init_state(model, optimizer, seed=seed)), []
        for _ in range(2):
            new, _ = step(state, torch.ones(8, 100))
            drawn.append((state.params["weight"] - new.params["weight"]).detach().flatten() * 8)
            state = new
        return torch.stack(drawn)

    one = noise(1)
    check_normal(torch.cat([one, noise(2)]))
    assert torch.equal(noise(1), one)


def test_an_empty_batch_is_noise_alone():
    model, loss_fn, (x, y) = a_model_and_batch("perceptron")
    clip = ll.contrib.clip_per_sample(ll.contrib.make_per_sample_grad_fn(model, loss_fn), 2.0)
    state, empty = ll.init_state(model), (x[:0], y[:0])
    for inner in (clip, ll.accumulate(clip, size=4)):
        noise = ll.contrib.add_noise(inner, 2.0, 1.5, expected_batch_size=10)(state, empty)
        full = ll.contrib.add_noise(inner, 2.0, 1.5, expected_batch_size=10)(state, (x, y))
        sums = clip(state, (x, y)).grads
        close({name: full.grads[name] - grad * 7 / 10 for name, grad in sums.items()}, noise.grads)
        assert noise.samples == 0
        with pytest.raises(ValueError, match=r"the batch is empty: .*expected_batch_size"):
            ll.contrib.add_noise(inner, 2.0, 1.5)(state, empty)


# refusals


def whole(model):
    return ll.make_grad_fn(model, mean_loss)


def per_sample(model, loss_fn=mean_loss, **options):
    return ll.contrib.make_per_sample_grad_fn(model, loss_fn, **options)


def clip(model, max_norm=1.0):
    return ll.contrib.clip_per_sample(per_sample(model), max_norm)


def add_noise(model, inner=clip, **options):
    return ll.contrib.add_noise(inner(model), **{"max_norm": 1.0, "noise_multiplier": 1.0, **options})


def halved(grad_fn):
    def halved(state, batch, **request):
        out = grad_fn(state, batch, **request)
        return out._replace(grads={name: grad / 2 for name, grad in out.grads.items()})

    return halved


def test_what_cannot_be_is_refused_when_it_is_made():
    m = perceptron()
    norm = nn.BatchNorm1d(4, track_running_stats=False).eval()
    for make, named in (
        (lambda: per_sample(nn.Sequential(norm)), "0.*BatchNorm1d.*running statistics"),
        (lambda: ll.contrib.clip_per_sample(per_sample(m), 0), "max_norm is 0"),
        (lambda: add_noise(m, max_norm=2.0), "clip_per_sample has max_norm=1.0 .* max_norm=2.0"),
        (lambda: add_noise(m, lambda m: halved(clip(m))), "halved"),
        (lambda: add_noise(m, whole), "clip_per_sample"),
        (lambda: add_noise(m, lambda m: clip(m, math.inf), max_norm=math.inf), "max_norm is inf"),
        (lambda: add_noise(m, noise_multiplier=-0.1), "noise_multiplier is -0.1"),
        (lambda: add_noise(m, expected_batch_size=0), "expected_batch_size is 0"),
    ):
        with pytest.raises(ValueError, match=named):
            make()


def with_auc(model, batch):
    return mean_loss(model, batch), {"auc": ll.metrics.AUC()}


def checkpointed(**options):
    return lambda model, batch: F.cross_entropy(checkpoint(model, batch[0], **options), batch[1])


class Doubled(torch.autograd.Function):
    """Without `generate_vmap_rule`."""

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_what_cannot_be_is_refused_when_it_is_called():
    m, _, (x, y) = a_model_and_batch("perceptron")
    scaled = {"scale": torch.tensor(2.0)}
    for grad_fn, batch, request, named in (
        (per_sample(m), (x, y), scaled, "scaled loss.*dynamic_loss_scale"),
        (clip(m), (x, y), scaled, "scaled loss.*dynamic_loss_scale"),
        (add_noise(m), (x, y), scaled, "scaled loss.*dynamic_loss_scale"),
        (ll.accumulate(add_noise(m), 2), (x, y), None, "add_noise within accumulate"),
        (ll.accumulate(per_sample(m), 2), (x, y), None, "accumulate.*clip_per_sample"),
        (per_sample(m), (x, torch.zeros(6)), None, r"batch\[0\] has 7, batch\[1\] has 6"),
        (per_sample(m, lambda m, b: m(b[0])), (x, y), None, r"\(1, 3\)"),
        (per_sample(m, lambda m, b: b[0].sum()), (x, y), None, "depend"),
        (ll.contrib.clip_per_sample(whole(m), 1.0), (x, y), None, r"\(6, 5\) for 0.weight"),
        (per_sample(m), (x, np.zeros(7)), None, "ndarray"),
        (per_sample(m, with_auc), (x, y), None, "auc.*AUC"),
        (per_sample(m, ll.losses.recompute(mean_loss, nn.Linear)), (x, y), None, "recomputes or offloads"),
        (per_sample(m, ll.losses.offload(mean_loss, nn.Linear)), (x, y), None, "recomputes or offloads"),
        (per_sample(m, checkpointed(use_reentrant=False)), (x, y), None, r"recomputes.*accumulate\(\.\.\., size=\)"),
        (per_sample(m, lambda m, b: Doubled.apply(m(b[0])).sum()), (x, y), None, "generate_vmap_rule"),
    ):
        with pytest.raises(TypeError if named in ("ndarray", "auc.*AUC") else ValueError, match=named):
            grad_fn(ll.init_state(m), batch, **(request or {}))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_have_the_gradients_of_each_sample_in_every_kind_of_step(kind):
    batch = (torch.randn(4, 2, 5).double(), torch.tensor([0, 1, 2, 0]))
    model = Recurrent(kind).double()
    grad_fn = ll.contrib.make_per_sample_grad_fn(model, mean_loss)
    state = ll.init_state(model, SGD)
    close(grad_fn(state, batch).grads, one_by_one(model, mean_loss, batch, 4))
    step = ll.make_train_step(ll.contrib.clip_per_sample(grad_fn, 0.1), SGD)
    expected = step(state, batch)[0].params
    close(ll.compile_step(step, backend="eager")(state, batch)[0].params, expected)
    stack, _ = ll.vmap_step(step)(ll.transforms.stack_states([state, state], same_seeds=True), batch)
    close(ll.transforms.unstack_states(stack)[1].params, expected)
