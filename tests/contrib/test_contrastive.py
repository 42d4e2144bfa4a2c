"""Gradient caching against one graph of the whole batch, written in plain torch."""

import pytest
import torch
from ranks import launch
from shared import SGD, saved_at_most
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import looplib as ll


class Masked(nn.Module):
    """Dropout that keeps the masks it has drawn, or takes those it is given."""

    def __init__(self):
        super().__init__()
        self.drawn, self.given = [], None

    def forward(self, x):
        if self.given is None:
            self.drawn.append(torch.rand_like(x) > 0.3)
            return x * self.drawn[-1] / 0.7
        return x * self.given.pop(0) / 0.7


def encoder(mask=True):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.Tanh(), *([Masked()] if mask else []), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def embed(model, batch):
    return F.normalize(model(batch["query"])), F.normalize(model(batch["key"]))


def loss_fn(embeddings):
    queries, keys = embeddings
    target = torch.arange(len(keys))
    logits = queries @ keys.T / 0.1
    return F.cross_entropy(logits, target), {"accuracy": ll.Mean((logits.argmax(1) == target).sum(), len(target))}


def pairs(count, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(count, 5, generator=draw, dtype=torch.float64) for name in ("query", "key")}


def raw(model, batch):
    """Loss and gradients by one graph."""
    loss, _ = loss_fn(embed(model, batch))
    return loss.detach(), dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True)
    )


@pytest.mark.parametrize(("count", "microbatches"), [(16, 4), (17, 5), (3, 8), (6, 1)])
def test_the_gradient_is_the_whole_batchs_dropout_included(count, microbatches):
    model, batch = encoder(), pairs(count)
    grad_fn = ll.contrib.make_contrastive_grad_fn(model, embed, loss_fn, microbatches=microbatches)
    out = grad_fn(ll.init_state(model, seed=3), batch)
    drawn, number = model[2].drawn, 2 * min(count, microbatches)
    assert len(drawn) == 2 * number
    assert all(torch.equal(first, second) for first, second in zip(drawn[:number], drawn[number:], strict=True))
    model[2].given = [torch.cat(drawn[:number:2]), torch.cat(drawn[1:number:2])]
    loss, grads = raw(model, batch)
    torch.testing.assert_close(out.grads, grads, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(out.metrics["loss"].compute(), loss, rtol=1e-13, atol=0)
    assert (out.samples, out.metrics["accuracy"].weight) == (count, count)


def test_graphs_hold_one_microbatch_at_a_time():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).double()
    cached = ll.contrib.make_contrastive_grad_fn(
        model, embed, lambda pair: (pair[0] * pair[1]).sum(), microbatches=32
    )
    plain = ll.make_grad_fn(model, lambda model, batch: torch.mul(*embed(model, batch)).sum())
    state, batch = ll.init_state(model), pairs(512)
    assert saved_at_most(lambda: cached(state, batch)) < saved_at_most(lambda: plain(state, batch)) / 8


def on_two_ranks(engine, uneven):
    with ll.distributed.setup():
        rank, batch = ll.distributed.rank(), pairs(13 if uneven else 12)
        middle = 9 if uneven else 6
        own = {name: rows[:middle] if rank == 0 else rows[middle:] for name, rows in batch.items()}
        model = encoder(mask=False)
        _, grads = raw(encoder(mask=False), batch)
        wrapped = DistributedDataParallel(model) if engine else model
        grad_fn = ll.contrib.make_contrastive_grad_fn(wrapped, embed, loss_fn, microbatches=6)
        optimizer = ll.chain(ll.optim.dynamic_loss_scale(init_scale=8.0), SGD)
        state = ll.init_state(wrapped, optimizer)
        out = grad_fn(state, own, donate=True, scale=optimizer.loss_scale(state.opt_state))
        found = optimizer.transform(out.grads, state.opt_state, state.params, 0, scale=out.scale).grads
        torch.testing.assert_close(found, grads, rtol=1e-12, atol=1e-14)
        assert out.samples == len(batch["key"])
        print("equal on", rank)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("engine", [False, True], ids=["plain", "DDP"])
def test_on_two_ranks_it_is_the_global_batchs(engine, uneven):
    printed = launch(2, on_two_ranks, engine, uneven)
    assert printed.count("equal on") == 2


def make(embed_fn=embed, loss=loss_fn, of=None, **options):
    model = encoder(mask=False)
    grad_fn = ll.contrib.make_contrastive_grad_fn(model, embed_fn, loss, **{"microbatches": 2, **options})
    return lambda: grad_fn(ll.init_state(of or model), pairs(4))


def test_what_does_not_fit_is_named():
    for call, named in (
        (lambda: make(microbatches=0), "microbatches is 0"),
        (make(lambda model, batch: model(batch["key"]).mean()), r"of 2 samples has shape \(\): embed_fn must return"),
        (make(lambda model, batch: torch.ones(2, dtype=torch.long)), "no tensor of floating point"),
        (make(loss=lambda embeddings: torch.ones((), requires_grad=True)), "does not depend on the embeddings"),
        (make(loss=lambda embeddings: embeddings[0]), r"the loss has shape \(4, 3\)"),
        (make(count_samples=lambda batch: 0), "the batch has no samples"),
        (make(of=torch.nn.Linear(2, 2)), "parameter"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


def test_within_accumulate_and_compiled_it_is_refused():
    model = encoder(mask=False)
    grad_fn = ll.contrib.make_contrastive_grad_fn(model, embed, loss_fn, microbatches=2)
    with pytest.raises(ValueError, match=r"make_contrastive_grad_fn within accumulate "):
        ll.accumulate(grad_fn, 2)(ll.init_state(model), pairs(4))
    step = ll.transforms.compile_step(ll.make_train_step(grad_fn, SGD), backend="eager")
    with pytest.raises(ll.transforms.UntraceableError, match="runs each microbatch twice"):
        step(ll.init_state(model, SGD), pairs(4))
