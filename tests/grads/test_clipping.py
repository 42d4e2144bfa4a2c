"""Gradients bounded by value and by unit, against torch's own functions and formulas written out."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import loss_fn
from shared import SGD, equal, mean_square
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


@given(
    seed=st.integers(0, 1000),
    scale=st.floats(1e-4, 1e4),
    bound=st.floats(1e-3, 1e3) | st.just(math.inf),
    norm_type=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
)
@settings(max_examples=40, deadline=None)
def test_gradients_of_any_size_have_the_bits_of_torchs(seed, scale, bound, norm_type):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
    x = torch.randn(4, 7) * scale
    grad_fn, state = ll.make_grad_fn(model, mean_square), ll.init_state(model)
    by_value = ll.optim.clip_by_value(grad_fn, bound)(state, x)
    by_norm = ll.clip_by_global_norm(grad_fn, bound, norm_type)(state, x)
    each = ll.optim.clip_by_norm(grad_fn, bound, norm_type)(state, x)
    assert by_value.metrics.keys() == each.metrics.keys() == {"loss"}

    def clip_each(parameters):
        for parameter in parameters:
            nn.utils.clip_grad_norm_(parameter, bound, norm_type)

    for out, clip in (
        (each, clip_each),
        (by_value, lambda parameters: nn.utils.clip_grad_value_(parameters, bound)),
        (by_norm, lambda parameters: nn.utils.clip_grad_norm_(parameters, bound, norm_type)),
    ):
        model.zero_grad()
        model(x).square().mean().backward()
        norm = clip(model.parameters())
        assert equal(out.grads, {name: p.grad for name, p in model.named_parameters()})
        assert norm is None or ll.compute(out.metrics)["grad_norm"] == norm.item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_without_a_bound_an_infinite_norm_leaves_the_gradients_as_they_are(norm_type):
    model = net()
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).sum() + (model[4].bias * torch.inf).sum())
    out = ll.clip_by_global_norm(grad_fn, math.inf, norm_type)(ll.init_state(model), batches(1)[0])
    assert ll.compute(out.metrics)["grad_norm"] == math.inf
    assert out.grads["0.weight"].isfinite().all()


# Where they stand

WRAPPERS = {
    "clip_by_global_norm": lambda grad_fn: ll.clip_by_global_norm(grad_fn, 1.0),
    "clip_by_norm": lambda grad_fn: ll.optim.clip_by_norm(grad_fn, 0.1),
    "clip_by_value": lambda grad_fn: ll.optim.clip_by_value(grad_fn, 1.0),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_within_accumulate_and_scale_loss_they_are_refused_when_made_or_else_when_run(name):
    model, optimizer = net(), ll.chain(ll.optim.dynamic_loss_scale(), SGD)
    clipped = WRAPPERS[name](ll.make_grad_fn(model, loss_fn))
    state, x = ll.init_state(model, optimizer), batches(1)[0]
    for wrap, part in ((ll.accumulate, "each microbatch alone"), (ll.grads.scale_loss, "scaled gradients")):
        refusal = re.escape(
            f"{name} within {wrap.__name__} would act on {part}: put it around, {name}({wrap.__name__}(grad_fn, ...), ...)"
        )
        with pytest.raises(ValueError, match=refusal):
            wrap(clipped)
        hidden = wrap(lambda *call: clipped(*call))  # nobody sees what a plain function wraps
        with pytest.raises(ValueError, match=refusal):
            hidden(state, [x] if wrap is ll.accumulate else x)


@pytest.mark.parametrize("name", WRAPPERS)
def test_around_pieces_they_clip_the_whole(name):
    grad_fn, state = ll.make_grad_fn(net(torch.float64), loss_fn), ll.init_state(net(torch.float64))
    x = batches(1, torch.float64)[0]
    whole = WRAPPERS[name](grad_fn)(state, x)
    pieces = WRAPPERS[name](ll.accumulate(grad_fn, size=2))(state, x)
    torch.testing.assert_close(pieces.grads, whole.grads, rtol=1e-12, atol=1e-15)
    assert pieces.samples == 5


def test_arguments_out_of_range_are_named():
    grad_fn = ll.make_grad_fn(net(), loss_fn)
    for wrong in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match=rf"max_value is {wrong}; give a magnitude above 0"):
            ll.optim.clip_by_value(grad_fn, wrong)
        for clip in (ll.clip_by_global_norm, ll.optim.clip_by_norm):
            with pytest.raises(ValueError, match=rf"max_norm is {wrong}; give a norm above 0"):
                clip(grad_fn, wrong)


def test_a_metric_whose_name_a_wrapper_takes_is_refused():
    state, x = ll.init_state(net()), batches(1)[0]
    with_norm = ll.make_grad_fn(net(), lambda model, x: (loss_fn(model, x), {"grad_norm": 1.0}))
    clipped = ll.clip_by_global_norm(ll.make_grad_fn(net(), loss_fn), 1.0)
    for grad_fn in (with_norm, clipped):
        with pytest.raises(ValueError, match=r"the metrics have a 'grad_norm' .* another name"):
            ll.clip_by_global_norm(grad_fn, 1.0)(state, x)


@pytest.mark.every_case
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


def test_gradients_that_torch_cannot_clip_are_refused_by_name_and_the_state_stays():
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

    sparse, numbers = (Rows(), torch.tensor([1, 1, 3])), (Complex(), torch.randn(4, 3))
    for (model, x), clip, named in (
        (sparse, lambda grad_fn: ll.clip_by_global_norm(grad_fn, 1.0), r"clip_by_global_norm got the sparse .* rows"),
        (sparse, lambda grad_fn: ll.optim.clip_by_norm(grad_fn, 1.0), r"clip_by_norm got the sparse .* rows\.weight"),
        (
            sparse,
            lambda grad_fn: ll.optim.clip_by_value(grad_fn, 1.0),
            r"clip_by_value got the sparse .* rows\.weight",
        ),
        (numbers, lambda grad_fn: ll.optim.clip_by_value(grad_fn, 1.0), r"clip_by_value got the complex .* weight"),
    ):
        optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
        state = ll.init_state(model, optimizer)
        before = ll.copy_state(state)
        grad_fn = clip(ll.make_grad_fn(model, mean_square))
        with pytest.raises(TypeError, match=named):
            ll.make_train_step(grad_fn, optimizer, donate=True)(state, x)
        assert not ll.debug.differences(state, before)
    (model, x), state = sparse, ll.init_state(sparse[0])
    grad_fn = ll.make_grad_fn(model, mean_square)
    for call in (
        lambda: ll.optim.global_norm(grad_fn(state, x).grads.values()),
        lambda: ll.contrib.sam(grad_fn)(state, x),
        lambda: ll.debug.worst_samples(grad_fn, state, x),
    ):
        with pytest.raises(TypeError, match=r"norm of a sparse tensor .*coalesce"):
            call()
