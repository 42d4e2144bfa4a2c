"""Gradients bounded by value and by norm, against torch's own functions and formulas written out."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import WAYS, loss_fn
from shared import SGD, equal, examples, make_train_step, mean_square, one_report, trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import looplib as ll


def net(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    nn.init.zeros_(model[4].bias)  # a unit whose weights are below eps
    return model.to(dtype)


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 2, 4, 4, generator=generator).to(dtype) for _ in range(count)]


def clip_each(parameters, bound, norm_type=2.0):
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, bound, norm_type)


@given(
    seed=st.integers(0, 1000),
    scale=st.floats(1e-4, 1e4),
    bound=st.floats(1e-3, 1e3) | st.just(math.inf),
    norm_type=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
)
@settings(max_examples=examples(40), deadline=None)
def test_gradients_of_any_size_have_the_bits_of_torchs(seed, scale, bound, norm_type):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
    x = torch.randn(4, 7) * scale
    state = ll.init_state(model)
    grads = ll.make_grad_fn(model, mean_square)(state, x).grads
    by_value, by_norm, each = (
        part.transform(grads, {}, state.params, 0)
        for part in (
            ll.optim.clip_by_value(bound),
            ll.clip_by_global_norm(bound, norm_type),
            ll.optim.clip_by_norm(bound, norm_type),
        )
    )
    assert (by_value.metrics, by_norm.metrics.keys(), each.metrics) == ({}, {"grad_norm"}, {})
    for out, clip in (
        (each, lambda parameters: clip_each(parameters, bound, norm_type)),
        (by_value, lambda parameters: nn.utils.clip_grad_value_(parameters, bound)),
        (by_norm, lambda parameters: nn.utils.clip_grad_norm_(parameters, bound, norm_type)),
    ):
        model.zero_grad()
        model(x).square().mean().backward()
        assert equal(grads, {name: p.grad for name, p in model.named_parameters()})
        norm = clip(model.parameters())
        assert equal(out.grads, {name: p.grad for name, p in model.named_parameters()})
        assert out.apply is True
        assert norm is None or ll.compute(out.metrics)["grad_norm"] == norm.item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_without_a_bound_an_infinite_norm_leaves_the_gradients_as_they_are(norm_type):
    model = net()
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).sum() + (model[4].bias * torch.inf).sum())
    state = ll.init_state(model)
    clip = ll.clip_by_global_norm(math.inf, norm_type)
    out = clip.transform(grad_fn(state, batches(1)[0]).grads, {}, state.params, 0)
    assert ll.compute(out.metrics)["grad_norm"] == math.inf
    assert out.grads["0.weight"].isfinite().all()


# Where they stand

CLIPS = {
    "clip_by_global_norm": (ll.clip_by_global_norm(0.2), lambda ps: nn.utils.clip_grad_norm_(ps, 0.2)),
    "clip_by_norm": (ll.optim.clip_by_norm(0.1), lambda ps: clip_each(ps, 0.1)),
    "clip_by_value": (ll.optim.clip_by_value(0.05), lambda ps: nn.utils.clip_grad_value_(ps, 0.05)),
}


def raw_loop(clip, data):
    """A raw loop with clipping, and whether it has clipped in each step."""
    model = net(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    clipped = []
    for x in data:
        optimizer.zero_grad()
        loss_fn(model, x).backward()
        before = [p.grad.clone() for p in model.parameters()]
        clip([*model.parameters()])
        clipped.append(not all(torch.equal(old, p.grad) for old, p in zip(before, model.parameters(), strict=True)))
        optimizer.step()
    return model, clipped


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLIPS)
def test_a_step_has_the_bits_of_a_raw_loop_with_torchs_function(name, way):
    (part, clip), data = CLIPS[name], batches(6, torch.float64)
    raw, clipped = raw_loop(clip, data)
    assert any(clipped)
    model, optimizer = net(torch.float64), ll.chain(part, SGD)
    step = make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, **WAYS[way])
    state = trained(step, ll.init_state(model, optimizer), data)
    if "compiled" in way:
        torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()), rtol=1e-12, atol=1e-14)
    else:
        assert equal(state.params, raw.named_parameters())


@pytest.mark.parametrize("name", CLIPS)
def test_gradients_of_pieces_are_clipped_as_the_whole(name):
    (part, clip), data = CLIPS[name], batches(6, torch.float64)
    raw, _ = raw_loop(clip, data)
    model, optimizer = net(torch.float64), ll.chain(part, SGD)
    pieces = ll.accumulate(ll.make_grad_fn(model, loss_fn), size=2)
    state = trained(ll.make_train_step(pieces, optimizer), ll.init_state(model, optimizer), data)
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()), rtol=1e-12, atol=1e-15)
    assert state.batch_samples == 5


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("scaled_first", [True, False], ids=["behind the scale", "before it"])
def test_gradients_of_a_scaled_loss_are_clipped_without_the_scale(scaled_first, name):
    (part, clip), data, scale = CLIPS[name], batches(6, torch.float64), ll.optim.dynamic_loss_scale(2.0**10)
    raw, _ = raw_loop(clip, data)
    model, optimizer = net(torch.float64), ll.chain(*([scale, part] if scaled_first else [part, scale]), SGD)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    state = trained(step, ll.init_state(model, optimizer), data)
    assert equal(state.params, raw.named_parameters())  # a power of 2 rounds nothing


def test_arguments_out_of_range_are_named():
    for wrong in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match=rf"max_value is {wrong}; give a magnitude above 0"):
            ll.optim.clip_by_value(wrong)
        for clip in (ll.clip_by_global_norm, ll.optim.clip_by_norm):
            with pytest.raises(ValueError, match=rf"max_norm is {wrong}; give a norm above 0"):
                clip(wrong)


@pytest.mark.parametrize("donate", [False, True])
def test_a_metric_of_the_loss_whose_name_a_part_takes_is_refused_and_the_state_stays(donate):
    model, optimizer = net(), ll.chain(ll.clip_by_global_norm(1.0), SGD)
    with_norm = ll.make_grad_fn(model, lambda model, x: (loss_fn(model, x), {"grad_norm": 1.0}))
    state = ll.init_state(model, optimizer)
    before = ll.copy_state(state)
    with pytest.raises(ValueError, match=r"the update reports 'grad_norm', and the gradient function .* rename one"):
        ll.make_train_step(with_norm, optimizer, donate=donate)(state, batches(1)[0])
    assert not ll.debug.differences(state, before)


@one_report
@pytest.mark.parametrize("seed", range(20))
def test_the_norm_of_mixed_dtypes_has_the_bits_of_torchs(seed):
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float32)
    params = [nn.Parameter(torch.zeros(7, 5, dtype=dtype)) for dtype in dtypes]
    for p in params:
        p.grad = torch.randn(7, 5, generator=generator).to(p.dtype)
    assert ll.optim.global_norm([p.grad for p in params]) == nn.utils.clip_grad_norm_(params, 0.5)


def test_the_norm_of_shards_and_whole_tensors_is_that_of_all_elements(one_process):
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    whole = [torch.randn(4, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    for norm_type in (2.0, math.inf):
        norm = ll.optim.global_norm([distribute_tensor(whole[0], mesh, [Shard(0)]), whole[1]], norm_type)
        expected = torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in whole]), norm_type)
        torch.testing.assert_close(norm, expected)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.rows(x))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.weight).abs()


def has_norm_of_sparse():
    """True from torch 2.14 on."""
    try:
        torch.linalg.vector_norm(torch.ones(1).to_sparse())
    except (RuntimeError, TypeError):
        return False
    return True


def test_gradients_that_torch_cannot_clip_are_refused_by_name_and_the_state_stays():
    sparse, numbers = (Rows(), torch.tensor([1, 1, 3])), (Complex(), torch.randn(4, 3))
    for (model, x), clip, named in (
        (sparse, ll.clip_by_global_norm(1.0), r"clip_by_global_norm got the sparse .* rows\.weight"),
        (sparse, ll.optim.clip_by_norm(1.0), r"clip_by_norm got the sparse .* rows\.weight"),
        (sparse, ll.optim.clip_by_value(1.0), r"clip_by_value got the sparse .* rows\.weight"),
        (numbers, ll.optim.clip_by_value(1.0), r"clip_by_value got the complex .* weight"),
    ):
        optimizer = ll.chain(clip, ll.optimizer(torch.optim.SGD, lr=0.1))
        state = ll.init_state(model, optimizer)
        before = ll.copy_state(state)
        train_step = ll.make_train_step(ll.make_grad_fn(model, mean_square), optimizer, donate=True)
        if model is sparse[0] and has_norm_of_sparse() and "value" not in named:
            raw = copy.deepcopy(model)
            mean_square(raw, x).backward()
            of_each = "by_norm" in named
            for clipped in [[param] for param in raw.parameters()] if of_each else [[*raw.parameters()]]:
                torch.nn.utils.clip_grad_norm_(clipped, 1.0)
            torch.optim.SGD(raw.parameters(), lr=0.1).step()
            assert train_step(state, x)[0].params["rows.weight"].equal(raw.rows.weight)
            continue
        with pytest.raises(TypeError, match=named):
            train_step(state, x)
        assert not ll.debug.differences(state, before)
    if has_norm_of_sparse():
        return
    (model, x), state = sparse, ll.init_state(sparse[0])
    grad_fn = ll.make_grad_fn(model, mean_square)
    for call in (
        lambda: ll.optim.global_norm(grad_fn(state, x).grads.values()),
        lambda: ll.contrib.sam(grad_fn)(state, x),
        lambda: ll.debug.worst_samples(grad_fn, state, x),
    ):
        with pytest.raises(TypeError, match=r"norm of a sparse tensor .*coalesce"):
            call()
