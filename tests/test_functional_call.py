"""A module, a submodule or a method with other weights: beside torch's functional_call, raw copies and raw loops."""

import copy
from dataclasses import dataclass

import pytest
import torch
from problem import WAYS
from shared import SGD, assert_each_refused, bits, make_train_step
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import looplib as ll

each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Agent(nn.Module):
    """An actor and a critic, with a method beside forward, tied weights, batch norm, dropout and a frozen layer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.critic = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.critic[2].weight = self.critic[0].weight
        self.embedding = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        return self.critic(self.body(self.embedding(x)))

    def get_value(self, x, scale=1.0):
        return scale * self(x).sum(1)


X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def tensors(agent):
    return {**dict(agent.named_parameters()), **dict(agent.named_buffers())}


def seeded(call):
    torch.manual_seed(5)
    return call()


@pytest.mark.parametrize("of_state", [True, False], ids=["a state", "a mapping"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("wrap", [lambda agent: agent, torch.compile], ids=["plain", "wrapped"])
def test_it_computes_what_a_module_with_these_weights_does(of_state, training, wrap):
    agent, other = Agent(0).train(training), Agent(1).train(training)
    weights = ll.copy_state(ll.init_state(other)) if of_state else tensors(copy.deepcopy(other))
    before = bits((tensors(agent), weights))
    calls = [
        (lambda: ll.state.apply(wrap(agent), weights, X), lambda: other(X)),
        (lambda: ll.state.apply(agent, weights, X, method="body"), lambda: other.body(X)),
        (lambda: ll.state.apply(agent, weights, X, method="body.0"), lambda: other.body[0](X)),
        (
            lambda: ll.state.apply(agent, weights, X, method="get_value", scale=2.0),
            lambda: other.get_value(X, scale=2.0),
        ),
        (lambda: ll.state.apply(agent, weights, X, method="body.forward"), lambda: other.body.forward(X)),
    ]
    for call, expected in calls:
        start = copy.deepcopy(other.state_dict())
        wanted = seeded(expected)
        other.load_state_dict(start)
        assert torch.equal(seeded(call), wanted)
        assert bits((tensors(agent), weights)) == before


def test_gradients_are_those_of_functional_call():
    agent, weights = Agent(0), {name: tensor.clone() for name, tensor in tensors(Agent(1)).items()}
    given = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in weights.items()}
    agent.body[2].p = 0.0
    names = [name for name, tensor in weights.items() if tensor.requires_grad]
    copies = {**given, **{name: tensor.clone() for name, tensor in given.items() if "running" in name}}
    expected = functional_call(agent, copies, (X,)).square().sum()
    actual = ll.state.apply(agent, given, X).square().sum()
    pairs = [torch.autograd.grad(loss, [given[name] for name in names]) for loss in (actual, expected)]
    assert all(map(torch.equal, *pairs))


def test_a_part_may_be_given_and_the_rest_is_the_modules():
    agent, other = Agent(0).eval(), Agent(1).eval()
    part = {name: tensor for name, tensor in other.named_parameters() if name.startswith("critic.")}
    inputs = torch.ones(2, 4)
    assert torch.equal(ll.state.apply(agent, part, inputs, method="critic"), other.critic(inputs))
    trained = {name: tensor for name, tensor in other.named_parameters() if tensor.requires_grad}
    mixed = copy.deepcopy(other)
    mixed.embedding.load_state_dict(agent.embedding.state_dict())
    assert torch.equal(ll.state.apply(agent, trained, X), mixed(X))


class Written(nn.Module):
    """An embedding whose forward pass writes its weight."""

    def __init__(self, write=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.write, self.layer = write, nn.Embedding(6, 3, **options)
        with torch.no_grad():
            self.layer.weight.mul_(10)

    def forward(self, rows):
        if self.write is not None:
            with torch.no_grad():
                self.write(self.layer.weight)
        return self.layer(rows)


@pytest.mark.parametrize("bound", [True, False])
def test_weights_of_an_embedding_that_shortens_them_stay_and_get_their_gradients(bound):
    model, raw, rows = Written(max_norm=0.5), Written(max_norm=0.5), torch.tensor([0, 3, 3])
    state = ll.init_state(model)
    state = state if bound else ll.copy_state(state)
    before = bits((tensors(model), dict(state.params)))
    loss = ll.state.apply(model, state, rows).square().sum()
    expected = raw(rows).square().sum()
    assert torch.equal(loss, expected)
    grads = [torch.autograd.grad(loss, state.params["layer.weight"]), torch.autograd.grad(expected, raw.layer.weight)]
    torch.testing.assert_close(*grads)
    assert bits((tensors(model), dict(state.params))) == before


@pytest.mark.parametrize("bound", [True, False])
def test_a_call_that_writes_the_given_weights_is_refused(bound):
    model = Written(lambda weight: weight.clamp_(-0.1, 0.1))
    state = ll.init_state(model)
    state = state if bound else ll.copy_state(state)
    with pytest.raises(
        RuntimeError, match=r"wrote to the parameter layer\.weight in place.*that were given have changed"
    ):
        ll.state.apply(model, state, torch.tensor([0, 3]))


def test_within_a_donated_step_a_call_on_its_own_weights_may_write_them_as_in_a_raw_loop():
    write = lambda weight: weight.clamp_(-0.1, 0.1)  # noqa: E731
    model, raw, rows = Written(write), Written(write), torch.tensor([0, 3])

    def loss_fn(model, rows):
        return ll.state.apply(model, tensors(model), rows).square().mean()

    step = make_train_step(ll.make_grad_fn(model, loss_fn), SGD, donate=True)
    state, _ = step(ll.init_state(model, SGD), rows)
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
    raw(rows).square().mean().backward()
    sgd.step()
    torch.testing.assert_close(state.params["layer.weight"], raw.layer.weight)


def test_the_module_is_left_as_it_was_when_the_call_fails():
    agent = Agent(0)
    before = bits(tensors(agent))
    with pytest.raises(RuntimeError, match="shapes"):
        ll.state.apply(agent, tensors(Agent(1)), torch.ones(2, 7))
    assert bits(tensors(agent)) == before
    assert all(agent.get_parameter(name) is tensor for name, tensor in agent.named_parameters())


def test_wrong_weights_and_methods_are_refused():
    agent, good = Agent(0), tensors(Agent(1))
    without = {name: tensor for name, tensor in good.items() if name != "critic.0.bias"}
    spent = ll.init_state(Agent(1))
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    state = ll.init_state(agent, optimizer)
    step = ll.make_train_step(ll.make_grad_fn(agent, lambda agent, x: agent(x).mean()), optimizer, donate=True)
    step(state, X)
    assert_each_refused(
        (lambda: ll.state.apply(agent, without, X), ValueError, r"missing critic\.0\.bias, unexpected none"),
        (lambda: ll.state.apply(agent, {**good, "other": X}, X), ValueError, "missing none, unexpected other"),
        (
            lambda: ll.state.apply(agent, {**good, "critic.0.bias": X}, X),
            ValueError,
            r"critic\.0\.bias has shape \(8, 3\), the model's has \(4,\)",
        ),
        (
            lambda: ll.state.apply(agent, good, X, method="get_action"),
            ValueError,
            "no submodule or method 'get_action'",
        ),
        (lambda: ll.state.apply(agent, good, X, method="body.9"), ValueError, "no submodule or method 'body.9'"),
        (lambda: ll.state.apply(agent, [good], X), TypeError, "weights is a list; give a state, or a mapping"),
        (lambda: ll.state.apply(agent, state, X), ll.DonatedStateError, "was donated"),
        (
            lambda: ll.state.apply(nn.Linear(3, 2), spent, X),
            ValueError,
            "the state's parameters are not those of this Linear",
        ),
    )
    assert ll.state.apply(agent, without, X, method="body").shape == (8, 4)


class Checkpointed(nn.Module):
    """Two layers with buffers, of which the first may be in a torch.utils.checkpoint."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh()), nn.Linear(5, 1)
        self.reentrant = reentrant

    def forward(self, x):
        hidden = self.first(x) if self.reentrant is None else checkpoint(self.first, x, use_reentrant=self.reentrant)
        return Output(self.last(hidden))


@dataclass
class Output:
    value: torch.Tensor


def through_a_critic(critic, wrap, way):
    """The actor's weights after two steps whose loss goes through the critic with other weights."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"actor": nn.Linear(3, 3), "critic": critic()})
    target = {name: 1.5 * p.detach() for name, p in net["critic"].named_parameters(prefix="critic")}

    def loss_fn(net, x):
        return -ll.state.apply(net, target, net["actor"](x), method="critic").value.mean()

    grad_fn = ll.make_grad_fn(net, wrap(loss_fn), trainable=lambda name, tensor: name.startswith("actor"))
    step, state = make_train_step(grad_fn, SGD, **way), ll.init_state(net, SGD)
    for _ in range(2):
        state, _ = step(state, X)
    return {name: tensor.detach().clone() for name, tensor in state.params.items()}, bits(dict(state.buffers))


@each_way
@pytest.mark.parametrize("layers", [nn.Linear, (nn.Sequential, nn.Linear), Checkpointed])
def test_recomputed_layers_run_again_with_the_weights_that_they_were_given(way, layers):
    expected, buffers = through_a_critic(Checkpointed, lambda loss_fn: loss_fn, way)
    actual, buffers_again = through_a_critic(Checkpointed, lambda loss_fn: ll.losses.recompute(loss_fn, layers), way)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)  # a graph may order a sum differently
    assert buffers_again == buffers


@pytest.mark.parametrize("wrap", [lambda loss_fn: loss_fn, lambda loss_fn: ll.losses.recompute(loss_fn, nn.Tanh)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_torchs_that_would_run_again_without_the_weights_is_refused(reentrant, wrap):
    for way in WAYS.values():
        with pytest.raises(RuntimeError, match=r"within ll\.state\.apply runs layers again.*ll\.losses\.recompute"):
            through_a_critic(lambda: Checkpointed(reentrant), wrap, way)


def test_checkpoints_whose_second_run_has_the_same_weights_are_not_refused():
    model, outside = Checkpointed(False), nn.Linear(3, 3)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        assert not ll.state.apply(model, weights, X).value.requires_grad
    plain = Checkpointed()
    plain.load_state_dict(model.state_dict())
    grads = []
    for run in (lambda x: checkpoint(outside, x, use_reentrant=False), outside):
        grads += torch.autograd.grad(ll.state.apply(plain, weights, run(X)).value.sum(), outside.weight)
    assert torch.equal(*grads)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    inner.run = lambda x: checkpoint(inner, x, use_reentrant=False)
    ll.state.apply(inner, dict(inner.named_parameters()), X, method="run").sum().backward()
    assert inner[0].weight.grad.any()


class SharedEncoder(nn.Module):
    """Two heads over one encoder, which is registered first under the actor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        encoder = nn.Linear(3, 4)
        self.actor = nn.Sequential(encoder, nn.ReLU(), nn.Linear(4, 1))
        self.critic = nn.Sequential(encoder, nn.ReLU(), nn.Linear(4, 1))


def test_a_part_needs_the_parameters_that_it_shares_with_another():
    net, adam = SharedEncoder(), ll.optimizer(torch.optim.Adam, lr=0.1)

    def part_of(name, tensor):
        return "encoder" if name.startswith("actor.0") else name.split(".")[0]

    averaged = ll.chain(adam, ll.ema(0.9))
    optimizer = ll.optim.partition({"actor": adam, "critic": averaged, "encoder": averaged}, part_of)
    step = ll.make_train_step(
        ll.make_grad_fn(net, lambda net, x: net.actor(x).square().mean() + net.critic(x).square().mean()), optimizer
    )
    state, raw = ll.init_state(net, optimizer), copy.deepcopy(net.critic)
    for _ in range(3):
        state, _ = step(state, X)
        for slow, name in zip(
            raw.parameters(), ["actor.0.weight", "actor.0.bias", "critic.2.weight", "critic.2.bias"], strict=True
        ):
            slow.data.lerp_(state.params[name].detach(), 1 - 0.9)
    head, encoder = ll.optim.average(optimizer, state, "critic"), ll.optim.average(optimizer, state, "encoder")
    with pytest.raises(ValueError, match=r"missing actor\.0\.weight, actor\.0\.bias.*critic shares actor\.0\.weight"):
        ll.state.apply(net, head, X, method="critic")
    assert torch.equal(ll.state.apply(net, {**encoder, **head}, X, method="critic"), raw(X))
    assert ll.state.apply(
        net, {**encoder, **dict(net.actor.named_parameters(prefix="actor"))}, X, method="actor"
    ).shape == (8, 1)


def test_a_state_dict_names_tied_tensors_more_than_once():
    agent, other = Agent(0).eval(), Agent(1).eval()
    saved = other.state_dict()
    assert {"critic.0.weight", "critic.2.weight"} <= saved.keys()
    assert torch.equal(ll.state.apply(agent, saved, X), other(X))
    alias = {name: tensor for name, tensor in saved.items() if name != "critic.0.weight"}
    assert torch.equal(ll.state.apply(agent, alias, X), other(X))
    shared, other = SharedEncoder(), SharedEncoder().requires_grad_(False)  # a module under two names
    nn.init.ones_(other.actor[0].weight)
    assert {"actor.0.weight", "critic.0.weight"} <= other.state_dict().keys()
    assert torch.equal(ll.state.apply(shared, other.state_dict(), X, method="critic"), other.critic(X))
    apart = {**saved, "critic.2.weight": torch.zeros(4, 4)}
    leaves = {**saved, "critic.2.weight": saved["critic.0.weight"].detach().requires_grad_()}
    for weights in (apart, leaves):
        with pytest.raises(ValueError, match=r"critic\.2\.weight is tied to critic\.0\.weight.*leave out critic\.2"):
            ll.state.apply(agent, weights, X)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.q = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def best(self, x):
        return self.q(x).amax(1)


def q_loss(agent, batch):
    x, target = batch
    with torch.no_grad():
        best = ll.state.apply(agent, target, x.roll(1, 0), method="best")
    return (agent.q(x)[:, 0] - best).square().mean()


@pytest.mark.slow
def test_a_target_network_follows_a_raw_loop_with_a_copied_module():
    raw = ActorCritic()
    target, raw_adam = copy.deepcopy(raw), torch.optim.Adam(raw.q.parameters(), lr=0.1, fused=True)
    data = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1))
    for x in data:
        with torch.no_grad():
            best = target.best(x.roll(1, 0))
        raw_adam.zero_grad()
        (raw.q(x)[:, 0] - best).square().mean().backward()
        raw_adam.step()
        for slow, fast in zip(target.q.parameters(), raw.q.parameters(), strict=True):
            slow.data.lerp_(fast.data, 1 - 0.9)
    for way in WAYS.values():
        agent = ActorCritic()
        adam = ll.optimizer(torch.optim.Adam, lr=0.1)
        optimizer = ll.optim.partition(
            {"actor": adam, "q": ll.chain(adam, ll.ema(0.9))}, lambda name, tensor: name.split(".")[0]
        )

        def with_target(state, x, optimizer=optimizer):
            return x, {**state.params, **ll.optim.average(optimizer, state, "q")}

        grad_fn = ll.make_grad_fn(
            agent,
            q_loss,
            trainable=lambda name, tensor: name.startswith("q."),
            count_samples=lambda batch: len(batch[0]),
        )
        step = make_train_step(ll.grads.map_batch(grad_fn, with_target), optimizer, **way)
        state = ll.init_state(agent, optimizer)
        for x in data:
            state, _ = step(state, x)
        slow = ll.optim.average(optimizer, state, "q")
        exact = {} if "compile" not in way else {"rtol": 1e-6, "atol": 1e-7}  # a graph may order a sum differently
        for name, tensor in target.q.named_parameters():
            torch.testing.assert_close(slow[f"q.{name}"], tensor.detach(), **(exact or {"rtol": 0, "atol": 0}))
