"""Gradient wrappers of a user's own on several ranks: right, or refused by name."""

from functools import partial

import pytest
import torch
from ranks import in_engine, launch, whole
from shared import mean_square as loss_fn
from torch import nn

import looplib as ll


def halved(grad_fn):
    def halved_grad_fn(state, batch, **request):
        out = grad_fn(state, batch, **request)
        return out._replace(grads={name: grad / 2 for name, grad in out.grads.items()})

    return halved_grad_fn


def halved_in_place(grad_fn):
    def halved_grad_fn(state, batch, **request):
        out = grad_fn(state, batch, **request)
        with torch.no_grad():
            for grad in out.grads.values():
                grad.div_(2)
        return out

    return halved_grad_fn


def counted(grad_fn):
    def counted_grad_fn(state, batch, **request):
        out = grad_fn(state, batch, **request)
        return out._replace(metrics={**out.metrics, "microbatches": ll.Mean(1.0, 1)})

    return counted_grad_fn


def deaf(grad_fn):
    return lambda state, batch, **request: grad_fn(state, batch)


def model_in(engine):
    torch.manual_seed(0)
    return in_engine(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), engine)


def samples():
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def gradients(engine, wrap):
    """The gradients of a step of this rank's half of a batch."""
    model = model_in(engine)
    grad_fn = wrap(ll.make_grad_fn(model, loss_fn))
    batch = samples().tensor_split(2)[ll.distributed.rank()]
    out = grad_fn(ll.init_state(model), batch, donate=engine is not None)
    return whole(out.grads)


refused = partial(pytest.raises, (RuntimeError, TypeError))


def on_two_ranks():
    with ll.distributed.setup():
        raw = model_in(None)
        loss_fn(raw, samples()).backward()
        expected = {name: parameter.grad for name, parameter in raw.named_parameters()}
        for engine in ("ddp", "fsdp"):
            for name, wrap in {"halved": halved, "halved_in_place": halved_in_place}.items():
                with refused(match=f"accumulate calls {name} for each microbatch"):
                    gradients(engine, lambda g, wrap=wrap: ll.accumulate(wrap(g), 2))
                found = gradients(engine, lambda g, wrap=wrap: wrap(ll.accumulate(g, 2)))
                torch.testing.assert_close(found, {key: grad / 2 for key, grad in expected.items()})
            around = gradients(engine, lambda g: counted(ll.grads.map_batch(ll.accumulate(g, 2), lambda state, x: x)))
            torch.testing.assert_close(around, expected)
            # Otherwise a rank with fewer microbatches would leave the others waiting in FSDP2's passes.
            with refused(match="accumulate calls accumulate for each microbatch"):
                gradients(engine, lambda g: ll.accumulate(ll.accumulate(g, 1), 1 + ll.distributed.rank()))
        found = gradients(None, lambda g: ll.grads.reduce_gradients(ll.accumulate(halved(g), 2)))
        torch.testing.assert_close(found, {key: grad / 2 for key, grad in expected.items()})
        with refused(match="reduce_gradients got gradients without the weight"):
            gradients(None, lambda g: ll.grads.reduce_gradients(deaf(g)))


def test_wrappers_that_change_gradients_are_right_or_refused():
    launch(2, on_two_ranks)
