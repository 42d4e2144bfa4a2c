"""Optimizers whose step evaluates the loss, against their own raw loops."""

import pytest
import torch
from problem import adamw, begin, run, step_of
from ranks import launch
from shared import bits, both_steps, equal
from torch import nn

import looplib as ll


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, generator=generator).to(dtype), torch.randn(8, 2, generator=generator).to(dtype))
        for _ in range(6)
    ]


def loss_fn(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def raw_loop(cls, batches, microbatches=1, dtype=torch.float64, **options):
    model = net(dtype)
    optimizer = cls(model.parameters(), **options)
    for batch in batches:

        def closure(batch=batch):
            optimizer.zero_grad()
            total = 0.0
            for x, y in zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True):
                loss = loss_fn(model, (x, y)) / microbatches
                loss.backward()
                total = total + loss.detach()
            return total

        optimizer.step(closure)
    return model, optimizer


def looped(cls, batches, donate, wrap=lambda grad_fn: grad_fn, bound=True, dtype=torch.float64, **options):
    model, optimizer = net(dtype), ll.optimizer(cls, **options)
    step = step_of(model, optimizer, donate, loss_fn, wrap)
    state = begin(model, optimizer, bound)
    structure = torch.utils._pytree.tree_structure(state.opt_state)
    for batch in batches:
        before = None if donate else bits((state.params, state.opt_state))
        new, _ = step(state, batch)
        assert donate or bits((state.params, state.opt_state)) == before
        state = new
    assert torch.utils._pytree.tree_structure(state.opt_state) == structure
    return state, model


OPTIONS = {
    "fixed steps": {"lr": 0.1},
    "strong_wolfe": {"lr": 1.0, "line_search_fn": "strong_wolfe"},
    "short history": {"lr": 0.1, "history_size": 3, "max_iter": 7},
    "one iteration": {"lr": 0.1, "max_iter": 1},
}


@both_steps
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_lbfgs_has_the_bits_of_a_raw_loop(name, dtype, donate):
    model, raw = raw_loop(torch.optim.LBFGS, data(dtype), dtype=dtype, **OPTIONS[name])
    for bound in (True, False):
        state, own = looped(torch.optim.LBFGS, data(dtype), donate, bound=bound, dtype=dtype, **OPTIONS[name])
        assert equal(state.params, model.named_parameters())
        theirs = raw.state[next(iter(model.parameters()))]
        kept = state.opt_state["LBFGS"]["state"]["0.weight"]
        assert (kept["func_evals"], kept["n_iter"]) == (theirs["func_evals"], theirs["n_iter"])
        assert kept["history"] == len(theirs["old_dirs"])
        if donate and bound:
            assert all(state.params[key] is tensor for key, tensor in own.named_parameters())
        assert all(tensor.grad is None for tensor in own.parameters())


@both_steps
@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
def test_lbfgs_over_microbatches(line_search_fn, donate):
    options = {"lr": 0.2, "line_search_fn": line_search_fn, "max_iter": 5}
    model, _ = raw_loop(torch.optim.LBFGS, data()[:3], 4, **options)
    state, _ = looped(torch.optim.LBFGS, data()[:3], donate, lambda grad_fn: ll.accumulate(grad_fn, 4), **options)
    torch.testing.assert_close(dict(state.params), dict(model.named_parameters()), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@both_steps
def test_a_schedule_and_a_wrapper(donate):
    class Scheduled(torch.optim.LBFGS):
        made = 0

        def step(self, closure):
            self.param_groups[0]["lr"] = 0.1 / (1 + self.made)
            self.made += 1
            return super().step(closure)

    model, _ = raw_loop(Scheduled, data(), lr=0.1)
    optimizer = ll.chain(
        ll.skip_nonfinite(3), ll.optimizer(torch.optim.LBFGS, lr=lambda step: 0.1 / (1 + step)), ll.ema()
    )
    assert equal(run(net(), optimizer, data(), donate, loss_fn=loss_fn).params, model.named_parameters())


@both_steps
@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
def test_a_parameter_without_a_gradient_stays(line_search_fn, donate):
    options = {"lr": 0.5, "max_iter": 5, "line_search_fn": line_search_fn}
    raw, model = net(), net()
    theirs, optimizer = torch.optim.LBFGS(raw.parameters(), **options), ll.optimizer(torch.optim.LBFGS, **options)
    steps = [
        step_of(model, optimizer, donate, loss_fn, trainable=lambda name, tensor, part=part: name.startswith(part))
        for part in "02"
    ]
    state = ll.init_state(model, optimizer)
    for at, batch in enumerate(data()):
        others = {raw[2 - 2 * (at % 2)].weight, raw[2 - 2 * (at % 2)].bias}
        values = {tensor: tensor.detach().clone() for tensor in others}

        def put_back(values=values):
            with torch.no_grad():
                for tensor, value in values.items():
                    tensor.copy_(value)

        def closure(batch=batch, others=others, put_back=put_back):
            put_back()
            theirs.zero_grad()
            loss = loss_fn(raw, batch)
            loss.backward()
            for tensor in others:
                tensor.grad = None
            return loss

        theirs.step(closure)
        put_back()
        before = ll.copy_state(state)
        new, _ = steps[at % 2](state, batch)
        assert donate or bits((state.params, state.opt_state)) == bits((before.params, before.opt_state))
        state = new
        assert equal(state.params, raw.named_parameters())


@both_steps
def test_an_error_within_an_update_leaves_a_pure_state_and_spends_a_donated_one(donate):
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("no memory left")
        return loss_fn(model, batch)

    model, optimizer = net(), ll.optimizer(torch.optim.LBFGS, lr=0.1)
    step, state = step_of(model, optimizer, donate, failing), ll.init_state(model, optimizer)
    before = bits((state.params, state.opt_state))
    with pytest.raises(RuntimeError, match="no memory left"):
        step(state, data()[0])
    if donate:  # the loss was evaluated at parameters that had moved already
        with pytest.raises(ll.DonatedStateError):
            _ = state.params
    else:
        assert bits((state.params, state.opt_state)) == before


def test_the_loss_of_the_step_is_lbfgss_first_evaluation():
    calls = []

    def counted(model, batch):
        calls.append(1)
        return loss_fn(model, batch)

    model = net()
    optimizer = ll.optimizer(torch.optim.LBFGS, lr=0.1, max_iter=3)
    run(model, optimizer, data()[:1], loss_fn=counted)
    assert len(calls) == 3  # as many as torch's own step would ask for


def test_refusals():
    params = {"w": torch.ones(2)}
    lbfgs = ll.optimizer(torch.optim.LBFGS, lr=0.1)
    with pytest.raises(TypeError, match=r"LBFGS evaluates the loss .* needs evaluate="):
        lbfgs.update(params, lbfgs.init(params), params, 0)
    with pytest.raises(TypeError, match=r"Mine\.step\(\) needs a closure"):
        ll.optimizer(type("Mine", (torch.optim.LBFGS,), {}), lr=0.1)
    with pytest.raises(ValueError, match=r"and ll\.optimizer\(LBFGS, lr=0\.1\) is to update it"):
        lbfgs.update(params, adamw().init(params), params, 0)


def on_two_ranks():
    with ll.distributed.setup():
        rank, model, options = ll.distributed.rank(), net(), OPTIONS["strong_wolfe"] | {"max_iter": 6}
        optimizer = ll.optimizer(torch.optim.LBFGS, **options)
        step = ll.make_train_step(ll.grads.reduce_gradients(ll.make_grad_fn(model, loss_fn)), optimizer, donate=True)
        state = ll.init_state(model, optimizer)
        # The ranks' losses differ a hundredfold, and a line search decides by the loss.
        scaled = [(x, y * torch.linspace(0.1, 1, len(y), dtype=y.dtype)[:, None]) for x, y in data()[:3]]
        raw, _ = raw_loop(torch.optim.LBFGS, scaled, **options)
        for x, y in scaled:
            state, _ = step(state, (x[4 * rank :][:4], y[4 * rank :][:4]))
        torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_ranks_decide_by_the_loss_of_the_global_batch():
    launch(2, on_two_ranks)


class Clamped(nn.Module):
    """A layer that bounds its weight in each forward pass, and counts its passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2).double()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
            self.passes += 1
        return self.layer(x)


@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
def test_a_forward_pass_writes_its_parameter_in_each_evaluation(line_search_fn):
    options = {"lr": 0.5, "max_iter": 6, "line_search_fn": line_search_fn}
    raw, model = Clamped(), Clamped()
    theirs, optimizer = torch.optim.LBFGS(raw.parameters(), **options), ll.optimizer(torch.optim.LBFGS, **options)
    state = ll.init_state(model, optimizer)
    with pytest.raises(RuntimeError, match=r"wrote to the parameter layer\.weight .* donate=True"):
        step_of(model, optimizer, False, loss_fn)(ll.copy_state(state), data()[0])
    step = step_of(model, optimizer, True, loss_fn)
    for count, batch in enumerate(data(), 1):

        def closure(batch=batch):
            theirs.zero_grad()
            loss = loss_fn(raw, batch)
            loss.backward()
            return loss

        theirs.step(closure)
        state, _ = step(state, batch)
        assert equal(state.params, raw.named_parameters())
        assert state.buffers["passes"] == count  # buffers are those of the first evaluation
        assert model.passes is state.buffers["passes"]
