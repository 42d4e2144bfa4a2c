"""`ll.grads.backward` beside loops that call `loss.backward()`: same `.grad`, same buffers, same weights."""

import copy
import itertools
import warnings

import pytest
import torch
from problem import assert_refused
from ranks import launch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import looplib as ll

STEPS = 6


def net(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), norm(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def group_norm(channels):
    return nn.GroupNorm(2, channels)


def data(steps=STEPS, samples=9):
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(samples, 7, generator=generator) for _ in range(steps)]
    return [(draw[:, :6], draw[:, 6].abs().long() % 3) for draw in draws]


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def seed(step, microbatch=0, rank=0):
    """The dropout masks that looplib draws, for a loop that does not use it."""
    torch.manual_seed(ll.debug.step_seed(ll.TrainState(step=step, seed=7), rank=rank, microbatch=microbatch))


def torch_optimizer(model, kind=torch.optim.AdamW):
    optimizer = kind(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def loop(model, passes, batches, kind=torch.optim.AdamW):
    """A raw loop. `passes(step, batch)` is all that happens between zero_grad() and step()."""
    optimizer, scheduler = torch_optimizer(model, kind)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        passes(step, batch)
        optimizer.step()
        scheduler.step()


def same(model, raw):
    one, other = model.state_dict(), raw.state_dict()
    assert [*one] == [*other]
    assert all(torch.equal(one[name], other[name]) for name in one)
    for mine, its in zip(model.parameters(), raw.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, its.grad)


def close(model, raw):
    """In float64, of sums in another order."""
    torch.testing.assert_close(model.state_dict(), raw.state_dict(), rtol=1e-9, atol=1e-12)


def plain(model, step, batch):
    seed(step)
    loss_fn(model, batch).backward()


def in_three(model, step, batch):
    for microbatch, (x, y) in enumerate(zip(*(part.tensor_split(3) for part in batch), strict=True)):
        seed(step, microbatch)
        (loss_fn(model, (x, y)) * (len(x) / len(batch[0]))).backward()


def halves(grad_fn):
    def halved(state, batch, **request):
        out = grad_fn(state, batch, **request)
        return out._replace(grads={name: grad / 2 for name, grad in out.grads.items()})

    return halved


def halved(model, step, batch):
    plain(model, step, batch)
    for param in model.parameters():
        param.grad /= 2


def scaled(model, step, batch):
    seed(step)
    (loss_fn(model, batch) * (step / 4)).backward()


def as_on_one_rank(grad_fn):
    return ll.grads.reduce_gradients(ll.accumulate(grad_fn, 3))


def annealed(grad_fn_of):
    grad_fn = grad_fn_of(lambda model, batch: loss_fn(model, batch[:2]) * batch[2])
    return ll.grads.map_batch(grad_fn, lambda state, batch: (*batch, state.step / 4))


CASES = {
    "accumulate": (lambda of: ll.accumulate(of(loss_fn), 3), in_three),
    "plain": (lambda of: of(loss_fn), plain),
    "reduce_gradients": (lambda of: ll.grads.reduce_gradients(ll.accumulate(of(loss_fn), 3)), in_three),
    "a wrapper of one's own": (lambda of: halves(of(loss_fn)), halved),
    "map_batch": (annealed, scaled),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES)
def test_a_loop_with_torchs_optimizer_has_the_bits_of_loss_backward(case):
    build, by_hand = CASES[case]
    model, raw = net(), net()
    grad_fn = build(lambda loss_fn: ll.make_grad_fn(model, loss_fn))
    stream = torch.get_rng_state()
    loop(model, lambda step, batch: ll.grads.backward(grad_fn, model, batch, step=step, seed=7), data())
    assert torch.equal(torch.get_rng_state(), stream)
    loop(raw, lambda step, batch: by_hand(raw, step, batch), data())
    same(model, raw)
    assert model[1].num_batches_tracked == STEPS * (3 if by_hand is in_three else 1)


def test_each_step_draws_masks_of_its_own_and_a_step_the_same_again():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
    grad_fn, masks = ll.make_grad_fn(model, lambda model, x: model(x).sum()), {}
    for step in (*range(20), 3):
        model.zero_grad()
        ll.grads.backward(grad_fn, model, torch.ones(1, 64), step=step)
        mask = tuple(model[1].weight.grad.flatten().tolist())
        assert masks.setdefault(step, mask) == mask
    assert len({*masks.values()}) == 20


def test_it_adds_to_grad_and_leaves_that_of_unreached_parameters():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)
            self.table = nn.Embedding(9, 6, sparse=True)
            self.frozen = nn.Linear(6, 6).requires_grad_(False)

        def forward(self, x):
            return self.used(self.frozen(x) + self.table(x[:, 0].abs().long()))

    model, raw = Two(), Two()
    grad_fn = ll.make_grad_fn(model, loss_fn, allow_unused=True)
    for each in model, raw:
        each.unused.weight.grad = torch.full((3, 6), 5.0)
    grads = [model.used.weight.grad]
    for step, batch in enumerate(data(3)):
        metrics = ll.grads.backward(grad_fn, model, batch, step=step)
        grads.append(model.used.weight.grad)
        loss = loss_fn(raw, batch)
        loss.backward()
        assert metrics["loss"].item() == loss.item()
    assert grads[1] is grads[3]  # added in place
    assert model.table.weight.grad.is_sparse
    for each in model, raw:
        each.table.weight.grad = each.table.weight.grad.to_dense()
    same(model, raw)
    assert model.unused.bias.grad is None


def test_per_sample_gradients_are_clipped_as_by_hand_and_noise_is_added():
    def by_hand(step, batch):
        """One backward pass for each sample, which only eval mode's dropout lets us write as a loop."""
        sums = [torch.zeros_like(param) for param in raw.parameters()]
        for x, y in zip(*batch, strict=True):
            grads = torch.autograd.grad(loss_fn(raw, (x[None], y[None])), [*raw.parameters()])
            norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))
            for total, grad in zip(sums, grads, strict=True):
                total += grad * (0.5 / (norm + 1e-6)).clamp(max=1.0)
        for param, total in zip(raw.parameters(), sums, strict=True):
            param.grad = total / len(batch[0])

    model, raw = net(group_norm).double(), net(group_norm).double()
    model[3].eval()
    raw[3].eval()
    batches = [(x.double(), y) for x, y in data()]
    per_sample = ll.contrib.make_per_sample_grad_fn(model, loss_fn)
    grad_fn = ll.accumulate(ll.contrib.clip_per_sample(per_sample, 0.5), size=4)
    loop(model, lambda step, batch: ll.grads.backward(grad_fn, model, batch, step=step), batches, torch.optim.SGD)
    loop(raw, by_hand, batches, torch.optim.SGD)
    close(model, raw)

    noisy, noise = ll.contrib.add_noise(grad_fn, 0.5, noise_multiplier=2.0), []
    for step in range(3):
        grads = []
        for each in grad_fn, noisy:
            model.zero_grad()
            ll.grads.backward(each, model, batches[0], step=step)
            grads.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
        noise.append(grads[1] - grads[0])
        assert noise[-1].std().item() == pytest.approx(2.0 * 0.5 / 9, rel=0.3)
    assert not torch.allclose(noise[0], noise[1])


def test_contrastive_gradients_are_those_of_the_whole_batch_with_dropout():
    def embed(model, x):
        return F.normalize(model(x)), F.normalize(model(x + 0.1))

    def contrast(embeddings):
        one, other = embeddings
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(other)))

    def by_hand(step, x):
        """The graphs of all microbatches at once."""
        parts = []
        for microbatch, part in enumerate(x.tensor_split(3)):
            seed(step, microbatch)
            parts.append(embed(raw, part))
        contrast([*map(torch.cat, zip(*parts, strict=True))]).backward()

    model, raw = net().double(), net().double()
    batches = [x.double() for x, _ in data()]
    grad_fn = ll.contrib.make_contrastive_grad_fn(model, embed, contrast, microbatches=3)
    loop(model, lambda step, x: ll.grads.backward(grad_fn, model, x, step=step, seed=7), batches, torch.optim.SGD)
    loop(raw, by_hand, batches, torch.optim.SGD)
    close(model, raw)
    assert model[1].num_batches_tracked == raw[1].num_batches_tracked == 2 * 3 * STEPS


def test_sam_takes_its_second_gradient_from_the_same_masks_and_moves_statistics_once():
    def by_hand(step, batch):
        plain(raw, step, batch)
        kept = copy.deepcopy(raw.state_dict())
        grads = [param.grad for param in raw.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))
        with torch.no_grad():
            for param, grad in zip(raw.parameters(), grads, strict=True):
                param += grad * (0.05 / (norm + 1e-12))
        raw.zero_grad()
        plain(raw, step, batch)
        raw.load_state_dict(kept)

    model, raw = net().double(), net().double()
    batches = [(x.double(), y) for x, y in data()]
    grad_fn = ll.contrib.sam(ll.make_grad_fn(model, loss_fn), rho=0.05)
    loop(
        model,
        lambda step, batch: ll.grads.backward(grad_fn, model, batch, step=step, seed=7),
        batches,
        torch.optim.SGD,
    )
    loop(raw, by_hand, batches, torch.optim.SGD)
    close(model, raw)


def test_beside_torchs_grad_scaler_with_an_overflow():
    def scaled_loop(model, backward):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
        optimizer, _ = torch_optimizer(model)
        scales = []
        for step, batch in enumerate(data(30)):
            optimizer.zero_grad()
            backward(step, batch, scaler)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    def by_hand(step, batch, scaler):
        seed(step)
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(raw, batch)
        scaler.scale(loss).backward()

    model, raw = net(), net()
    grad_fn = ll.make_grad_fn(model, ll.autocast(loss_fn, torch.float16))
    scales = scaled_loop(
        model, lambda *call: ll.grads.backward(grad_fn, model, *call[1:2], step=call[0], seed=7, scaler=call[2])
    )
    assert scales == scaled_loop(raw, by_hand)
    assert min(scales) < 2.0**40
    assert any(one < other for one, other in itertools.pairwise(scales))  # it grew again
    assert all(torch.equal(*both) for both in zip(model.parameters(), raw.parameters(), strict=True))
    off = torch.amp.GradScaler("cpu", enabled=False)
    model.zero_grad()
    ll.grads.backward(grad_fn, model, data(1)[0], step=0, scaler=off)
    expected = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    ll.grads.backward(grad_fn, model, data(1)[0], step=0)
    assert all(torch.equal(*both) for both in zip(expected, (p.grad for p in model.parameters()), strict=True))


def test_lbfgs_of_torch_evaluates_again_with_the_masks_of_its_step():
    def train(model, backward):
        lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        for step, batch in enumerate(data(3)):

            def closure(step=step, batch=batch):
                lbfgs.zero_grad()
                return backward(step, batch)

            lbfgs.step(closure)

    def by_hand(step, batch):
        seed(step)
        loss = loss_fn(raw, batch)
        loss.backward()
        return loss.item()

    model, raw = net(), net()
    grad_fn = ll.make_grad_fn(model, loss_fn)
    train(model, lambda step, batch: ll.grads.backward(grad_fn, model, batch, step=step, seed=7)["loss"].item())
    train(raw, by_hand)
    same(model, raw)


class Counts(nn.Module):
    """A buffer that is written in place, one that is replaced, and one that grows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3)
        for name in ("written", "assigned", "grown"):
            self.register_buffer(name, torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            self.written += 1
            self.assigned = self.assigned + x.mean()
            self.grown = torch.cat([self.grown, x.mean()[None]])
        return self.linear(x)


@pytest.mark.parametrize("donated", [False, True])
def test_buffers_move_however_they_are_written(donated):
    model, raw = Counts(), Counts()
    inner = ll.make_grad_fn(model, loss_fn)

    def on_copies(state, batch, **request):
        return inner(state, batch)

    grad_fn = inner if donated else on_copies
    written = model.written
    loop(model, lambda step, batch: ll.grads.backward(grad_fn, model, batch, step=step), data())
    loop(raw, lambda step, batch: loss_fn(raw, batch).backward(), data())
    same(model, raw)
    assert model.written is written
    assert model.grown.shape == (STEPS + 1,)


def test_a_function_that_reads_the_state_misses_the_rest_by_name():
    model = net()
    grad_fn = ll.make_grad_fn(model, lambda model, batch: loss_fn(model, batch[:2]) * batch[2])

    def factor(state, batch):
        return *batch, state.epoch + state.extra["base"]

    seen = []
    mapped = ll.grads.map_batch(
        grad_fn, lambda state, batch: seen.append(factor(state, batch)[2]) or factor(state, batch)
    )
    ll.grads.backward(mapped, model, data(1)[0], step=0, epoch=3, extra={"base": 0.5})
    assert seen == [3.5]
    with pytest.raises(TypeError) as raised:
        ll.grads.backward(mapped, model, data(1)[0], step=0)
    assert "epoch=" in raised.value.__notes__[0]


def test_what_cannot_be_right_is_refused_and_leaves_grad_as_it_was():
    model, batch = net(), data(1)[0]
    grad_fn, state = ll.make_grad_fn(model, loss_fn), ll.init_state(model)
    scaler, apart = torch.amp.GradScaler("cpu"), net(group_norm)

    def backward(grad_fn, **changes):
        return ll.grads.backward(**{"grad_fn": grad_fn, "model": model, "batch": batch, "step": 0} | changes)

    def changed(change):
        def grad_fn_of_mine(state, batch, **request):
            out = grad_fn(state, batch, **request)
            return out._replace(grads={name: change(grad) for name, grad in out.grads.items()})

        return grad_fn_of_mine

    for error, words, call in [
        (TypeError, "step", lambda: ll.grads.backward(grad_fn, model, batch)),
        (ValueError, "step number updates", lambda: backward(grad_fn, step=-1)),
        (TypeError, "clip_by_global_norm ll.chain", lambda: backward(ll.clip_by_global_norm(grad_fn))),
        (TypeError, "Optimizer make_grad_fn", lambda: backward(ll.clip_by_global_norm(1.0))),
        (
            ValueError,
            "per-sample scaled bfloat16",
            lambda: backward(
                ll.contrib.clip_per_sample(ll.contrib.make_per_sample_grad_fn(apart, loss_fn), 1.0),
                model=apart,
                scaler=scaler,
            ),
        ),
        (TypeError, "**request scale", lambda: backward(lambda s, b, **request: grad_fn(s, b), scaler=scaler)),
        (TypeError, "r **request", lambda: backward(lambda s, b, r=None: grad_fn(s, b), scaler=scaler)),
        (TypeError, "scaler GradScaler", lambda: backward(grad_fn, scaler=2.0)),
        (
            TypeError,
            "train_step",
            lambda: backward(ll.make_train_step(grad_fn, ll.optimizer(torch.optim.SGD, lr=1.0))),
        ),
        (TypeError, "TrainState torch.nn.Module", lambda: backward(grad_fn, model=state)),
        (ValueError, "missing unexpected", lambda: backward(grad_fn, model=nn.Linear(6, 3))),
        (ValueError, "0.weight shape wrapper", lambda: backward(changed(lambda grad: grad[None]))),
        (ValueError, "0.weight float64 wrapper", lambda: backward(changed(torch.Tensor.double))),
        (ValueError, "missing unexpected", lambda: backward(grad_fn, model=Counts())),
    ]:
        assert_refused(error, words, call)
        assert all(param.grad is None for param in model.parameters())


def test_gradients_of_each_sample_are_refused_by_what_brings_them_together():
    model, batch = net(group_norm), data(1)[0]
    grad_fn, sgd = ll.contrib.make_per_sample_grad_fn(model, loss_fn), ll.optimizer(torch.optim.SGD, lr=1.0)
    state = ll.init_state(model, sgd)
    for call in (
        lambda: ll.grads.backward(grad_fn, model, batch, step=0),
        lambda: ll.make_train_step(grad_fn, sgd)(state, batch),
        lambda: ll.contrib.sam(grad_fn)(state, batch),
        lambda: ll.accumulate(grad_fn, 2)(state, batch),
    ):
        assert_refused(ValueError, "clip_per_sample", call)


# Several ranks, beside torch's own loops


def wrapped(engine, model):
    if engine == "reduce":
        return model
    if engine == "fsdp":
        fully_shard(model[0])
        fully_shard(model[4])
        return fully_shard(model)
    options = {"gradient_as_bucket_view": True, "static_graph": True} if engine == "ddp-options" else {}
    return DistributedDataParallel(model, **options)


def values(model):
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in model.state_dict().items()}


def train_on_two_ranks(engine):
    warnings.simplefilter("error")
    with ll.distributed.setup():
        rank = torch.distributed.get_rank()
        batches = [(x[rank::2], y[rank::2]) for x, y in data(6, samples=8)]
        model, raw, in_two = (wrapped(engine, net()) for _ in range(3))
        grad_fn = ll.make_grad_fn(model, loss_fn)
        halves = ll.accumulate(ll.make_grad_fn(in_two, loss_fn), microbatches=2)
        if engine == "reduce":
            grad_fn, halves = map(ll.grads.reduce_gradients, (grad_fn, halves))

        def train(model, backward, kind=torch.optim.AdamW):
            """`each` batches for an update, whose gradients add up in `.grad`."""
            optimizer, scheduler = torch_optimizer(model, kind)
            for step, batch in enumerate(batches):
                if step % each == 0:
                    optimizer.zero_grad()
                backward(step, batch)
                if step % each == each - 1:
                    optimizer.step()
                    scheduler.step()
            return values(model)

        def by_looplib(step, batch):
            ll.grads.backward(grad_fn, model, batch, step=step, seed=7)

        def by_hand(step, batch):
            seed(step, rank=rank)
            loss_fn(raw, batch).backward()
            if engine == "reduce" and step % each == each - 1:
                for param in raw.parameters():
                    torch.distributed.all_reduce(param.grad)
                    param.grad /= 2

        each = 1
        found, expected = train(model, by_looplib), train(raw, by_hand)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        each = 3
        # torch's DDP takes the mean over ranks of the sum, and so rounds in another order.
        found, expected = (train(*both, kind=torch.optim.SGD) for both in ((model, by_looplib), (raw, by_hand)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        found = train(in_two, lambda step, batch: ll.grads.backward(halves, in_two, batch, step=step, seed=7))
        assert next(value for name, value in found.items() if "num_batches" in name) == 12
        if "ddp" in engine:
            ll.distributed.check_replicas(ll.init_state(in_two))


@pytest.mark.parametrize("engine", ["ddp-options", "ddp", "fsdp", "reduce"])
def test_on_two_ranks_it_has_the_bits_of_torchs_loop(engine):
    launch(2, train_on_two_ranks, engine)


def test_another_module_than_that_of_the_gradient_function_is_refused():
    model, other = (nn.Sequential(nn.Linear(2, 3), nn.Dropout(p), nn.Linear(3, 1)) for p in (0.0, 0.9))
    other.load_state_dict(model.state_dict())
    x = torch.randn(4, 2)
    plain = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    per_sample = ll.contrib.make_per_sample_grad_fn(model, lambda model, x: model(x).square().mean())
    for grad_fn in (plain, ll.accumulate(plain, 2), ll.contrib.clip_per_sample(per_sample, max_norm=1.0)):
        for wrong in (other, copy.deepcopy(model)):
            with pytest.raises(
                ValueError, match=r"made of another Sequential than this.*give the model of the grad_fn"
            ):
                ll.grads.backward(grad_fn, wrong, x, step=0)
            assert all(param.grad is None for param in (*wrong.parameters(), *model.parameters()))
        ll.grads.backward(grad_fn, model, x, step=0)
        model.zero_grad()
