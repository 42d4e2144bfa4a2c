"""Two networks, two states: what a loss that calls another module trains, touches and warns of."""

import copy
import re
import warnings
from functools import partial

import pytest
import torch
from ranks import launch
from shared import SGD, both_steps
from shared import mean_square as square
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import looplib as ll

EAGER = partial(ll.compile_step, backend="eager")


class Pair:
    """A generator and a critic whose losses call each other, as steps and as a raw loop."""

    def __init__(self):
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        self.batches = [(torch.randn(8, 4), torch.randn(8, 3)) for _ in range(6)]

    def critic_loss(self, critic, batch):
        real, noise = batch
        return critic(self.generator(noise).detach()).mean() - critic(real).mean()

    def generator_loss(self, generator, batch):
        return -self.critic(generator(batch[1])).mean()

    def steps(self, **options):
        for model, loss in ((self.critic, self.critic_loss), (self.generator, self.generator_loss)):
            grad_fn = ll.make_grad_fn(
                model, loss, count_samples=lambda batch: len(batch[0])
            )  # weights are no samples
            step = ll.make_train_step(grad_fn, SGD, same_batch=model is self.generator, **options)
            yield step, ll.init_state(model, SGD)

    def raw(self):
        pairs = [
            (module, loss, torch.optim.SGD(module.parameters(), lr=0.1))
            for module, loss in ((self.critic, self.critic_loss), (self.generator, self.generator_loss))
        ]
        for batch in self.batches:
            for module, loss, optimizer in pairs:
                optimizer.zero_grad()
                loss(module, batch).backward()
                optimizer.step()
        return [dict(module.named_parameters()) for module, *_ in pairs]


def test_donated_steps_are_the_raw_loop_without_a_warning():
    pair, raw = Pair(), Pair().raw()
    (critic_step, critic), (generator_step, generator) = pair.steps(donate=True)
    for batch in pair.batches:
        critic, _ = critic_step(critic, batch)
        generator, _ = generator_step(generator, batch)
    torch.testing.assert_close([critic.params, generator.params], raw)


class FromBatch(Pair):
    """The same losses, with the other network's weights in the batch."""

    def critic_loss(self, critic, batch):
        real, noise, params = batch
        return critic(functional_call(self.generator, params, noise).detach()).mean() - critic(real).mean()

    def generator_loss(self, generator, batch):
        _, noise, params = batch
        return -functional_call(self.critic, params, generator(noise)).mean()


@pytest.mark.parametrize("transform", [lambda step: step, EAGER], ids=["eager", "graph"])
def test_pure_steps_against_the_other_weights_in_the_batch_are_the_raw_loop(transform):
    pair, raw = FromBatch(), Pair().raw()
    (critic_step, critic), (generator_step, generator) = pair.steps()
    critic_step, generator_step = transform(critic_step), transform(generator_step)
    for batch in pair.batches:
        critic, _ = critic_step(critic, (*batch, generator.params))
        generator, _ = generator_step(generator, (*batch, critic.params))
    torch.testing.assert_close([critic.params, generator.params], raw)


@pytest.mark.parametrize("transform", [EAGER, lambda step: step], ids=["graph", "eager"])
def test_pure_steps_that_call_each_others_modules_are_warned_of_once_for_each(transform):
    pair = Pair()
    (critic_step, critic), (generator_step, generator) = pair.steps()
    critic_step, generator_step = transform(critic_step), transform(generator_step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in pair.batches:
            critic, _ = critic_step(critic, batch)
            generator, _ = generator_step(generator, batch)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2, messages
    for message in messages:
        assert "donate=True" in message
        assert "functional_call" in message


@pytest.mark.parametrize("transform", [lambda step: step, EAGER], ids=["eager", "graph"])
@pytest.mark.parametrize("trained", ["pure", "donated", "bound", "never"])
def test_parts_of_a_module_that_pure_steps_train_are_noticed_in_the_loss_of_another(trained, transform):
    pair = Pair()
    critic_grad_fn = ll.make_grad_fn(pair.critic, lambda critic, x: critic(x).mean())
    critic_step = ll.make_train_step(critic_grad_fn, SGD, donate=trained == "donated")

    def loss_fn(generator, x):
        x = x.detach().clone().requires_grad_()  # no network's
        return pair.critic[0](generator(x)).mean()

    step = transform(ll.make_train_step(ll.make_grad_fn(pair.generator, loss_fn), SGD))
    critic, state = ll.init_state(pair.critic, SGD), ll.init_state(pair.generator, SGD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for real, noise in pair.batches[:3]:
            if trained != "never":
                critic, _ = critic_step(critic, real)
            if trained == "bound":
                critic = ll.bind(pair.critic, critic)
            state, _ = step(state, noise)
    assert len(caught) == (trained == "pure")
    for warning in caught:
        assert "this Sequential still has the weights of before training" in str(warning.message)
        assert warning.filename == __file__


@both_steps
def test_a_batch_with_a_graph_is_refused_by_name(donate):
    pair = Pair()
    (step, state), _ = pair.steps(donate=donate)
    real, noise = pair.batches[0]
    with pytest.raises(ValueError, match=r"batch/0.*detach\(\)"):
        step(state, (nn.Linear(4, 4)(real), noise))
    step(state, (real, noise))


@pytest.mark.every_case
@pytest.mark.parametrize("run", [None, False], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("before", [False, True])
def test_gradients_of_another_network_are_left_alone(run, before):
    generator, critic, sigma = nn.Linear(3, 4), nn.Linear(4, 1), torch.ones(1, requires_grad=True)
    if before:
        critic(torch.randn(2, 4)).sum().backward()
    grad = critic.weight.grad
    values = copy.deepcopy(grad)

    def loss_fn(model, x):
        x = torch.sigmoid(model(x))
        return ((critic(x) if run is None else checkpoint(critic, x, use_reentrant=run)) * sigma).mean()

    x = torch.randn(5, 3)
    out = ll.make_grad_fn(generator, loss_fn)(ll.init_state(generator), x)
    assert sigma.grad is None
    assert critic.weight.grad is grad
    torch.testing.assert_close(grad, values, rtol=0, atol=0)
    loss_fn(generator, x).backward()
    torch.testing.assert_close(out.grads["weight"], generator.weight.grad)


@pytest.mark.every_case
@pytest.mark.parametrize("before", [False, True])
def test_reentrant_checkpoints_fill_the_gradients_of_another_network_as_a_raw_loop_does(before):
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    if before:
        critic(torch.randn(2, 4)).sum().backward()
    raw_generator, raw_critic = copy.deepcopy((generator, critic))
    raw_critic.weight.grad = copy.deepcopy(critic.weight.grad)

    def loss_of(critic, model, x):
        return checkpoint(critic, torch.sigmoid(model(x)), use_reentrant=True).mean()

    x = torch.randn(5, 3)
    grad_fn = ll.make_grad_fn(generator, partial(loss_of, critic), reentrant=True)
    out = grad_fn(ll.init_state(generator), x)
    loss_of(raw_critic, raw_generator, x).backward()
    assert torch.equal(out.grads["weight"], raw_generator.weight.grad)
    assert torch.equal(critic.weight.grad, raw_critic.weight.grad)
    assert generator.weight.grad is None


class Blocks(nn.Module):
    """Two blocks; each may be recomputed in a reentrant checkpoint."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(3, 3), nn.Linear(3, 1), True

    def forward(self, x):
        x = x.detach().requires_grad_()  # as for a frozen embedding before the first block
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return x


@both_steps
def test_reentrant_checkpoints_are_trained_in_full(donate):
    model = Blocks()
    grad_fn = ll.make_grad_fn(model, square, reentrant=True)
    step, x = ll.make_train_step(grad_fn, SGD, donate=donate), torch.randn(5, 3)
    raw = copy.deepcopy(model)
    raw_optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    state = ll.init_state(model, SGD)
    for _ in range(3):
        state, _ = step(state, x)
        raw_optimizer.zero_grad()
        square(raw, x).backward()
        raw_optimizer.step()
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))


@pytest.mark.parametrize("allow_unused", [False, True])
def test_reentrant_checkpoints_from_a_later_step_on_are_named(allow_unused):
    model = Blocks()
    grad_fn = ll.make_grad_fn(model, square, allow_unused=allow_unused)
    state, x = ll.init_state(model), torch.randn(5, 3)
    model.reentrant = False
    for _ in range(2):
        grad_fn(state, x)
    model.reentrant = True
    for _ in range(3):  # nothing is learned from a call that is refused
        with pytest.raises(RuntimeError, match=r"use_reentrant=True.*make_grad_fn"):
            grad_fn(state, x)


class Tied(nn.Module):
    """A layer that is in a reentrant checkpoint, and outside of it as well. The checkpoint's input shows no parameter."""

    def __init__(self):
        super().__init__()
        self.layer, self.reentrant, self.writes = nn.Linear(3, 3), True, False

    def forward(self, x):
        x = x.detach().requires_grad_()
        if self.writes:
            with torch.no_grad():
                self.layer.bias.clamp_(-1, 1)
        return self.layer(checkpoint(self.layer, x, use_reentrant=True) if self.reentrant else self.layer(x))


def test_a_reentrant_checkpoint_of_tied_parameters_is_named_where_every_gradient_is_there():
    model, x = Tied(), torch.randn(5, 3)
    raw = copy.deepcopy(model)
    square(raw, x).backward()
    state = ll.init_state(model)
    with pytest.raises(RuntimeError, match=r"make_grad_fn\(\.\.\., reentrant=True\)"):
        ll.make_grad_fn(model, square)(state, x)
    grads = ll.make_grad_fn(model, square, reentrant=True)(state, x).grads
    assert torch.equal(grads["layer.weight"], raw.layer.weight.grad)
    grad_fn = ll.make_grad_fn(model, square)
    model.reentrant = False
    for _ in range(3):
        grad_fn(state, x)
    model.reentrant = True
    for _ in range(3):  # the fourth call looks, and those after it until none is refused
        with pytest.raises(RuntimeError, match="reentrant=True"):
            grad_fn(state, x)


def test_a_donated_step_refused_for_a_reentrant_checkpoint_leaves_its_state_or_says_that_it_is_spent():
    x = torch.randn(5, 3)
    for writes in (False, True):
        model = Tied()
        model.writes = writes
        step = ll.make_train_step(ll.make_grad_fn(model, square), SGD, donate=True)
        state = ll.init_state(model, SGD)
        before = copy.deepcopy({name: param.detach() for name, param in state.params.items()})
        with pytest.raises(RuntimeError, match="reentrant=True") as raised:
            step(state, x)
        notes = "".join(getattr(raised.value, "__notes__", []))
        if writes:
            assert re.search("since the forward pass had written layer.bias.*continue from a checkpoint", notes)
            with pytest.raises(ll.DonatedStateError, match="there is no state after it"):
                state.params  # noqa: B018
        else:
            assert "spent" not in notes
            assert all(torch.equal(state.params[name], value) for name, value in before.items())
            model.reentrant = False
            assert step(state, x)[0].step == 1


def engine_beside_another_network(engine):
    """Two donated steps with microbatches, of a model in an engine whose loss calls another model in one."""
    torch.manual_seed(0)
    generator, critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 1), nn.Tanh())
    if engine == "ddp":
        generator, critic = DistributedDataParallel(generator), DistributedDataParallel(critic)
    if engine == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        generator, critic = fully_shard(generator, mesh=mesh), fully_shard(critic, mesh=mesh)
    kept = [parameter.grad for parameter in critic.parameters()]
    grad_fn = ll.accumulate(ll.make_grad_fn(generator, lambda model, x: critic(model(x)).mean()), 2)
    step, state = ll.make_train_step(grad_fn, SGD, donate=True), ll.init_state(generator, SGD)
    samples = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        state, _ = step(state, samples.tensor_split(2)[ll.distributed.rank()] if engine else samples)
        if engine != "fsdp":  # whose backward pass is a raw loop's
            assert [parameter.grad for parameter in critic.parameters()] == kept == [None, None]
    return {name: p.full_tensor() if engine == "fsdp" else p for name, p in state.params.items()}


def engines_beside_another_network():
    alone = engine_beside_another_network(None)
    with ll.distributed.setup():
        for engine in ("ddp", "fsdp"):
            torch.testing.assert_close(engine_beside_another_network(engine), alone)
        print("left alone")


@pytest.mark.slow
def test_engines_leave_the_gradients_of_another_network_alone():
    assert launch(2, engines_beside_another_network).count("left alone") == 2


def residual(net, x):
    """Mean squared distance of a network from a solution of u' = u."""
    u = net(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (slope - u).square().mean()


@pytest.mark.every_case
@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.double().float(),
        lambda x: x[:, :1],
        lambda x: x.t().reshape(-1, 1)[:8],
        lambda x: x.unsqueeze(0).squeeze(0)[:, 1:],
        lambda x: x.split(1, dim=1)[0],
    ],
)
def test_a_view_or_a_cast_of_a_leaf_is_a_batch_of_a_pinn(form):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    leaf = torch.rand(8, 2, requires_grad=True)
    leaf = leaf if form(leaf).shape[1] == 1 else leaf[:, :1].detach().requires_grad_()

    expected = torch.autograd.grad(residual(net, form(leaf)), [*net.parameters()])
    grad_fn, state = ll.make_grad_fn(net, residual), ll.init_state(net)
    for _ in range(2):
        grads = grad_fn(state, x := form(leaf)).grads
        assert all(map(torch.equal, grads.values(), expected))
        assert all(map(torch.equal, grad_fn(state, x).grads.values(), expected))
    assert leaf.grad is None
    parts = ll.accumulate(grad_fn, 2)(state, form(leaf)).grads
    assert all(torch.allclose(part, whole, atol=1e-6) for part, whole in zip(parts.values(), expected, strict=True))


def stacked(state):
    return ll.transforms.stack_states([state, ll.state.fold_in(state, 1)])


GRAPHS = {
    "compiled": (EAGER, lambda state: state),
    "stack": (ll.vmap_step, stacked),
    "differentiable": (ll.transforms.differentiable, lambda state: state),
}


@pytest.mark.parametrize(
    ("parts", "form"), [(1, lambda x: x.double().float()), (2, lambda x: x)], ids=["a cast", "parts of a leaf"]
)
@pytest.mark.parametrize("way", GRAPHS)
def test_the_graph_of_a_step_takes_derivatives_with_respect_to_its_batch(way, parts, form):
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    made, given = GRAPHS[way]
    step = made(ll.make_train_step(ll.accumulate(ll.make_grad_fn(net, residual), parts), SGD))
    x, raw = torch.rand(6, 1, requires_grad=True), copy.deepcopy(net)
    state, _ = step(given(ll.init_state(net, SGD)), form(x))
    residual(raw, form(x)).backward(inputs=[*raw.parameters()])
    torch.optim.SGD(raw.parameters(), lr=0.1).step()
    for name, tensor in raw.named_parameters():  # of the first member of a stack
        actual = state.params[name].detach().reshape(-1, *tensor.shape)[0]
        torch.testing.assert_close(actual, tensor.detach())
    assert x.grad is None


@pytest.mark.every_case
@pytest.mark.parametrize("way", ["compiled", "stack"])
def test_the_graph_of_a_step_refuses_a_batch_that_another_network_computed(way):
    net = nn.Linear(1, 1)
    step = ll.make_train_step(ll.make_grad_fn(net, lambda net, x: net(x).mean()), SGD)
    made, given = GRAPHS[way]
    with pytest.raises(ValueError, match=r"carries the graph.*give detach\(\).requires_grad_\(\)"):
        made(step)(given(ll.init_state(net, SGD)), nn.Linear(1, 1)(torch.ones(8, 1)))


@pytest.mark.every_case
@pytest.mark.parametrize(
    "made", [lambda net: net(torch.ones(8, 1)), lambda net: net.weight[:1], lambda net: net.weight * 1]
)
def test_a_batch_that_another_network_computed_is_refused(made):
    net = nn.Linear(1, 1)
    grad_fn = ll.make_grad_fn(net, lambda net, x: net(x).mean())
    state = ll.init_state(net)
    for _ in range(2):
        grad_fn(state, torch.ones(8, 1))
    with pytest.raises(ValueError, match=r"carries the graph.*give detach\(\).requires_grad_\(\)"):
        grad_fn(state, made(nn.Linear(1, 1)))
