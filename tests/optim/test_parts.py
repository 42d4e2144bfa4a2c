"""Parts of an update of a user's own, against a raw loop with an `if` in it, and what spends no state."""

import collections
from functools import partial

import pytest
import torch
from problem import QUICK, WAYS, adamw, raw_adamw, sgd
from shared import SGD, bits, both_states, both_steps, equal, make_train_step, one_report
from shared import mean_square as mean
from torch import nn

import looplib as ll

LIMIT = 0.6
Kept = collections.namedtuple("Kept", "momentum")


def mapped_zeros(params):
    return {name: torch.zeros_like(tensor) for name, tensor in params.items()}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) * (3.0 if at % 3 == 1 else 0.5) for at in range(count)]


def loss_fn(model, x):
    return (model(x) - x[:, :2]).square().mean()


def made_step(model, optimizer, way, loss_fn=loss_fn):
    return make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, **WAYS[way])


# What a user writes


def skip_large(limit):
    """No update where a gradient has an element above the limit."""

    def transform(grads, state, params, step):
        largest = torch.stack([grad.abs().max() for grad in grads.values()]).max()
        return ll.types.Transformed(grads, apply=largest < limit)

    return ll.optim.part("skip_large", transform=transform, role="judge")


def count():
    """Counts of its own: of batches, which move also if the update is skipped, and of updates."""

    def init(params):
        return {"seen": torch.tensor(0), "made": torch.tensor(0)}

    def transform(grads, state, params, step):
        return ll.types.Transformed(grads, {**state, "seen": state["seen"] + 1})

    def update_(grads, state, params, step):
        return params, {**state, "made": state["made"] + 1}

    return ll.optim.part("count", init=init, transform=transform, update_=update_)


def momentum(lr=0.1):
    """Momentum in plain functions, which return new tensors and write nothing."""

    def init(params):
        return {name: torch.zeros_like(tensor) for name, tensor in params.items()}

    def update_(grads, state, params, step):
        state = {name: 0.9 * old + grads[name] if name in grads else old for name, old in state.items()}
        return {**params, **{name: params[name] - lr * state[name] for name in grads}}, state

    return ll.optim.part("momentum", init=init, update_=update_, role="weights")


def report(name="moved"):
    """The norm of the update, as a metric beside those of the step."""

    def transform(grads, state, params, step):
        return ll.types.Transformed(grads, carry={key: params[key].detach().clone() for key in grads})

    def update_(grads, state, params, step, carry):
        norm = ll.optim.global_norm([params[key].detach() - old for key, old in carry.items()])
        return params, state, {name: ll.Mean(norm, 1)}

    return ll.optim.part(f"report_{name}", transform=transform, update_=update_, role="after")


def raw_loop(data, limit=LIMIT):
    model = net()
    optimizer = raw_adamw(model)
    made = []
    for x in data:
        optimizer.zero_grad()
        loss_fn(model, x).backward()
        made.append(max(p.grad.abs().max() for p in model.parameters()) < limit)
        if made[-1]:
            optimizer.step()
    return model, made


@both_states
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "parts",
    [
        [count(), skip_large(LIMIT)],
        [skip_large(LIMIT), count()],
        [("first", skip_large(1e4)), skip_large(LIMIT), count(), ("last", skip_large(1e3))],
    ],
    ids=["behind", "before", "several"],
)
def test_a_part_of_a_users_own_is_an_if_in_a_raw_loop(parts, way, bound):
    data = batches(12)
    raw, made = raw_loop(data)
    assert 3 <= sum(made) <= 9
    model = net()
    optimizer = ll.chain(*parts, adamw())
    step = made_step(model, optimizer, way)
    state = ll.init_state(model, optimizer)
    state = state if bound else ll.copy_state(state)
    for at, x in enumerate(data):
        state, _ = step(state, x)
        assert state.skipped is not made[at]
        assert state.step == state.opt_state["count"]["made"] == sum(made[: at + 1])
        assert state.opt_state["count"]["seen"] == at + 1  # each part sees every batch, whatever the others say
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()), rtol=1e-5, atol=1e-7)
    if way in ("pure", "donated"):
        assert equal(state.params, raw.named_parameters())
    if bound and way == "donated":
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), raw.parameters(), strict=True))


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
def test_a_partition_has_one_flag_for_each_label(way):
    """A chain within a partition skips by its own gradients; the chain around the partition skips for all labels."""

    def split(inner, outer):
        chains = {"in": ll.chain(skip_large(inner), count(), adamw()), "out": ll.chain(count(), adamw())}
        split = ll.optim.partition(chains, lambda name, p: "in" if name[0] == "0" else "out")
        return ll.chain(skip_large(outer), split)

    model, data = net(), batches(12)
    raw = net()
    own = {
        key: torch.optim.AdamW(raw[number].parameters(), lr=1e-2, fused=True)
        for key, number in (("in", 0), ("out", 2))
    }
    optimizer = split(0.15, LIMIT)
    step = made_step(model, optimizer, way)
    state, updates = ll.init_state(model, optimizer), {"in": 0, "out": 0}
    for x in data:
        raw.zero_grad()
        loss_fn(raw, x).backward()
        largest = {key: max(p.grad.abs().max() for p in one.param_groups[0]["params"]) for key, one in own.items()}
        made = {"in": largest["in"] < 0.15 and max(largest.values()) < LIMIT, "out": max(largest.values()) < LIMIT}
        for key in own:
            if made[key]:
                own[key].step()
                updates[key] += 1
        state, _ = step(state, x)
        assert state.skipped is not any(made.values())
    assert 0 < updates["in"] < updates["out"] < 12
    inner = {key: chain["count"] for key, chain in state.opt_state["partition"].items()}
    assert {key: int(inner[key]["made"]) for key in own} == updates
    assert [int(inner[key]["seen"]) for key in own] == [12, 12]
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()), rtol=1e-5, atol=1e-7)


@both_steps
def test_labels_that_decide_by_plain_bools_update_each_by_its_own(donate):
    def one(answers):
        def transform(grads, state, params, step):
            return ll.types.Transformed(grads, apply=next(answers))

        answers = iter(answers)
        return ll.chain(ll.optim.part("answers", transform=transform), count(), sgd())

    parts = {"0": one([True, False, False, True]), "2": one([True, True, False, False])}
    model = net()
    optimizer = ll.optim.partition(parts, lambda name, tensor: name[0])
    step = make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    state, made = ll.init_state(model, optimizer), []
    for x in batches(4):
        state, _ = step(state, x)
        made.append([int(state.opt_state["partition"][label]["count"]["made"]) for label in parts])
    assert made == [[1, 1], [1, 2], [1, 2], [2, 2]]
    assert (state.step, state.batch) == (3, 4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "optimizer",
    [momentum(), ll.chain(momentum(), ll.ema()), ll.chain(skip_large(1e6), momentum())],
    ids=["", "ema", "own"],
)
def test_an_update_in_plain_functions_works_in_every_step(optimizer, way):
    model, raw = net(), net()
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9, foreach=False)
    step = made_step(model, optimizer, way)
    state, first = ll.init_state(model, optimizer), None
    for x in batches(8):
        sgd.zero_grad()
        loss_fn(raw, x).backward()
        sgd.step()
        first, (state, _) = first or state, step(state, x)
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()), rtol=1e-5, atol=1e-6)
    if "donated" in way:
        assert all(state.params[name] is tensor for name, tensor in model.named_parameters())
        with pytest.raises(ll.DonatedStateError):
            _ = first.params
    else:
        assert equal(first.params, net().named_parameters())


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["deque", "OrderedDict", "defaultdict", "namedtuple"])
def test_a_state_in_any_container_of_torchs_pytrees_stays_as_it_was(kind):
    make = {
        "deque": lambda zeros: collections.deque([zeros]),
        "OrderedDict": lambda zeros: collections.OrderedDict(momentum=zeros),
        "defaultdict": lambda zeros: collections.defaultdict(int, momentum=zeros),
        "namedtuple": lambda zeros: Kept(zeros),
    }[kind]

    def update_(grads, state, params, step, **info):
        (momentum,) = state.values() if isinstance(state, dict) else state
        for name, grad in grads.items():
            params[name].sub_(momentum[name].mul_(0.9).add_(grad), alpha=0.1)
        return params, state

    optimizer = ll.optim.part(
        "mine", init=lambda params, **extra: make(mapped_zeros(params)), update_=update_, role="weights"
    )
    model = net()
    step, state = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer), ll.init_state(model, optimizer)
    state, _ = step(state, batches(1)[0])
    before = bits(state)
    (one, _), (two, _) = (step(state, batches(1)[0]) for _ in range(2))
    assert bits(state) == before != bits(one)
    assert bits(one) == bits(two)
    assert type(one.opt_state["mine"]) is type(state.opt_state["mine"]) is type(make({}))


ONE, FOUR = object(), object()  # stand for values that need parameters and a state


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda new: {name: tensor.double() for name, tensor in new.items()}, ValueError, "0.weight .*torch.float64"),
        (lambda new: {**new, "0.weight": new["0.weight"][:1]}, ValueError, "0.weight .*shape"),
        (lambda new: {**new, "more": torch.zeros(1)}, ValueError, "'more'"),
        (lambda new: {**new, "0.weight": 1.0}, TypeError, "float as 0.weight"),
        (lambda new: [*new.values()], TypeError, "list"),
        (lambda new: None, TypeError, "NoneType"),
        (ONE, TypeError, r"mine returned a dict; it returns \(params, state\), or \(params, state, metrics\)"),
        (FOUR, TypeError, r"mine returned 4 values; it returns \(params, state\), or \(params, state, metrics\)"),
    ],
    ids=["dtype", "shape", "name", "number", "list", "None", "one", "four"],
)
def test_what_an_update_returns_must_fit_the_parameters(change, error, words, way):
    def update_(grads, state, params, step):
        new = {**params, **{name: params[name] - 0.1 * grad for name, grad in grads.items()}}
        if change in (ONE, FOUR):
            return new if change is ONE else (new, state, {}, {})
        return change(new), state

    model, optimizer = net(), ll.optim.part("mine", update_=update_, role="weights")
    step = made_step(model, optimizer, way)
    with pytest.raises(error, match=words):
        step(ll.copy_state(ll.init_state(model, optimizer)), batches(1)[0])


# Metrics of an update


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (ll.optim.partition({"a": ll.chain(adamw(), report())}, lambda name, p: "a"), "moved/a"),
        (ll.chain(adamw(), report("one"), report("other")), "one"),
        (ll.chain(adamw(), report(), ll.ema()), "moved"),
        (ll.chain(ll.skip_nonfinite(3), adamw(), report()), "moved"),
    ],
    ids=["partition", "two", "ema", "skip_nonfinite"],
)
def test_an_update_adds_metrics_to_those_of_the_step(optimizer, name, way):
    model = net()
    step = made_step(model, optimizer, way)
    state = ll.copy_state(ll.init_state(model, optimizer))
    for x in batches(2):
        before = ll.copy_state(state).params
        state, metrics = step(state, x)
        moved = ll.optim.global_norm([state.params[key].detach() - before[key].detach() for key in before])
        torch.testing.assert_close(ll.compute(metrics)[name], moved.item())
        assert "loss" in metrics


@pytest.mark.parametrize("way", WAYS)
def test_a_report_under_a_taken_name_is_refused_or_renamed(way):
    """The first half can be refused, since nothing has been written yet. The second cannot."""

    def transform(grads, state, params, step):
        return ll.types.Transformed(grads, metrics={"loss": 1.0})

    model, optimizer = net(), ll.chain(ll.optim.part("early", transform=transform), adamw())
    step, state = made_step(model, optimizer, way), ll.init_state(model, optimizer)
    before = bits((state.params, state.opt_state))
    with pytest.raises(ValueError, match="the update reports 'loss', and the gradient function does so too"):
        step(state, batches(1)[0])
    assert bits((state.params, state.opt_state)) == before

    optimizer, x = ll.chain(adamw(), report("loss")), batches(1)[0]
    step, state = made_step(model, optimizer, way), ll.copy_state(ll.init_state(model, optimizer))
    start = ll.copy_state(state).params
    loss = loss_fn(net(), x).item()
    state, metrics = step(state, x)
    values = ll.compute(metrics)
    moved = ll.optim.global_norm([state.params[key].detach() - start[key].detach() for key in start]).item()
    assert values == {"loss": pytest.approx(loss), "loss/update": pytest.approx(moved)}


@pytest.mark.parametrize("donate", [False, True])
def test_what_updates_report_is_averaged_over_those_that_were_made(donate):
    model, optimizer = net(), ll.chain(skip_large(LIMIT), adamw(), report())
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    state, window, moved = ll.init_state(model, optimizer), ll.Window(), []
    for x in batches(5):
        state, metrics = step(state, x)
        window = window.add(metrics)
        moved += [metrics["moved"].item()] if "moved" in metrics else []
        assert state.skipped == ("moved" not in metrics)
    assert 0 < len(moved) < 5
    assert ll.compute(window.metrics())["moved"] == pytest.approx(sum(moved) / len(moved))


# Refused before anything is spent


@pytest.mark.parametrize("kind", ["applied", "skipped", "pure"])
def test_a_decision_that_donates_the_state_to_another_step_is_refused(kind):
    """None of these steps gives up the state first: the pure and the skipped one never do."""
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), []
    grad_fn = ll.make_grad_fn(model, mean)
    inner = ll.make_train_step(grad_fn, SGD, donate=True)
    state, x = ll.init_state(model, SGD), torch.randn(8, 3) + 5

    def transform(grads, *_, **info):
        other.append(inner(state, x)[0])
        return ll.types.Transformed(grads, apply=kind != "skipped")

    optimizer = ll.chain(ll.optim.part("other_run", transform=transform), SGD)
    step = ll.make_train_step(grad_fn, optimizer, donate=kind != "pure")
    with pytest.raises(ll.DonatedStateError, match="that run is at step 1 now"):
        step(state, x)
    assert other[0].buffers["0.running_mean"].abs().min() > 0  # of the other run, which this one leaves alone


@pytest.mark.parametrize("way", ["donated", "compiled, donated"])
@pytest.mark.parametrize("parts", [1, 2])  # of the model, with an optimizer each
def test_an_optimizer_that_gives_up_says_what_is_left(way, parts):
    """An eager step leaves the state unchanged. A compiled one may have updated another label, which spends the state."""
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    strict = ll.chain(ll.skip_nonfinite(max_consecutive=0), SGD)
    optimizer = ll.optim.partition({"a": strict, "b": strict if parts == 1 else SGD}, lambda name, p: name[0])
    step = made_step(model, optimizer, way, lambda model, x: model["a"](x[0]).mean() + model["b"](x[1]).mean())
    start, good, bad = ll.init_state(model, optimizer), torch.ones(4, 2), torch.full((4, 2), torch.inf)
    state, _ = step(start, (good, good))
    kept = ll.copy_state(state)
    with pytest.raises(ll.optim.NonFiniteGradientsError) as raised:
        step(state, (bad, bad if parts == 1 else good))
    if way == "compiled, donated" and parts == 2:
        assert "continue from a checkpoint" in raised.value.__notes__[-1]
        with pytest.raises(ll.DonatedStateError, match="there is no state after it"):
            _ = state.params
    else:
        assert bits(state.params) == bits(kept.params)
        assert way != "donated" or bits(state.opt_state) == bits(kept.opt_state)
        with pytest.raises(ll.DonatedStateError, match="that run is at step 1 now"):
            _ = start.params


NOTHING = object()  # no optimizer


def refused(optimizer, error, words, model=None, other=None, data=None, wrap=lambda grad_fn: grad_fn, **options):
    """The step raises an error with these words, and the state that it was given can be used as before."""
    model = model or net()
    step = make_train_step(wrap(ll.make_grad_fn(model, mean if data is not None else loss_fn)), optimizer, **options)
    state = ll.init_state(model) if other is NOTHING else ll.init_state(model, other or optimizer)
    before, module = bits((state.params, state.opt_state)), bits(dict(model.named_parameters()))
    with pytest.raises(error) as raised:
        step(state, batches(1)[0] if data is None else data)
    assert all(word in str(raised.value) for word in words.split())
    assert (bits((state.params, state.opt_state)), bits(dict(model.named_parameters()))) == (before, module)


def fails(grads):
    raise KeyError("perplexity")


@one_report
@pytest.mark.parametrize("options", [{}, {"donate": True}, {"compile": QUICK, "donate": True}], ids=str)
@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (lambda grads: True, TypeError, "judge bool ll.types.Transformed(grads, state, ...)"),
        (lambda grads: (grads, None, True), TypeError, "judge 3 values ll.types.Transformed(grads, state, ...)"),
        (lambda grads: ll.types.Transformed(grads, apply=None), TypeError, "judge apply=None bool tensor"),
        (lambda grads: ll.types.Transformed(grads, apply=torch.ones(2) > 0), TypeError, "judge torch.bool (2,)"),
        (lambda grads: ll.types.Transformed(grads, apply=torch.tensor(1.0)), TypeError, "judge float32 ()"),
        (lambda grads: ll.types.Transformed(grads, {"count": torch.ones(1)}), ValueError, "judge state init="),
        (fails, KeyError, "perplexity"),  # its own error, which is not blamed on the state
    ],
    ids=["flag alone", "three", "none", "shape", "dtype", "state", "its own error"],
)
def test_what_a_first_half_must_not_return_is_refused(answer, error, words, options):
    judge = ll.optim.part("judge", transform=lambda grads, state, params, step: answer(grads), role="judge")
    refused(ll.chain(judge, adamw(), ll.ema()), error, words, **options)


AROUND = {
    "ema": lambda inner: ll.chain(inner, ll.ema()),
    "swa": lambda inner: ll.chain(inner, ll.optim.swa(start=0)),
    "skip_nonfinite": lambda inner: ll.chain(ll.skip_nonfinite(3), inner),
    "dynamic_loss_scale": lambda inner: ll.chain(ll.optim.dynamic_loss_scale(), inner),
    "own_steps": ll.optim.own_steps,
    "every": lambda inner: ll.optim.every(inner, 1),
    "partition": lambda inner: ll.optim.partition({"all": inner}, lambda name, tensor: "all"),
}


@one_report
@both_steps
@pytest.mark.parametrize("name", [*AROUND, ""])
def test_the_state_of_another_optimizer_is_refused(name, donate):
    """By chains and by optimizers alone, at the first call for these parameters and at later ones."""
    around = {**AROUND, "": lambda inner: inner}
    momentum = sgd()
    own, who, options = around[name](adamw()), f"{name} AdamW", {"donate": donate}
    refused(own, ValueError, f"without {who}", other=NOTHING, **options)
    refused(own, ValueError, "momentum_buffer AdamW", other=around[name](momentum), **options)
    refused(around[name](momentum), ValueError, "exp_avg, SGD", other=own, **options)
    for other in around.keys() - {name}:
        refused(own, ValueError, f"{who} which keeps exp_avg", other=around[other](adamw()), **options)
    split = {"p": adamw(), "q": momentum}
    members = ll.optim.partition(split, lambda name, tensor: "pq"[tensor.ndim == 2])
    refused(own, ValueError, f"exp_avg momentum_buffer {who}", other=members, **options)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.words = nn.Linear(2, 1), nn.Embedding(4, 2, sparse=True)

    def forward(self, x):
        return self.first(self.words(x))


@both_steps
def test_gradients_that_a_class_cannot_take_are_refused(donate):
    def changing(grad_fn, change):
        def changed(state, batch, **request):
            out = grad_fn(state, batch, **request)
            return out._replace(grads={name: change(grad) for name, grad in out.grads.items()})

        return changed

    for change, words in (
        (torch.Tensor.half, "0.weight torch.float16 autocast"),
        (torch.Tensor.t, "0.weight (6, 5) (5, 6)"),
    ):
        refused(adamw(), ValueError, words, wrap=partial(changing, change=change), donate=donate)
    sparse = ll.optimizer(torch.optim.SparseAdam, lr=0.1)
    # The group of the first layer would already be written.
    groups = [(lambda name, p: "first" in name, {"lr": 0.2})]
    rms = ll.optimizer(torch.optim.RMSprop, lr=0.1, groups=groups)
    swapped = ll.optim.partition(
        {"sparse": sparse, "dense": adamw()}, lambda name, p: "dense" if "words" in name else "sparse"
    )
    nesterov = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    fused = ll.optimizer(torch.optim.Adagrad, lr=0.1, fused=True)
    for optimizer, words in (
        (adamw(), "AdamW"),
        (sparse, "SparseAdam dense first.weight"),
        (rms, "RMSprop"),
        (swapped, "take"),
        (nesterov, "SGD words.weight nesterov=True"),
        (fused, "Adagrad words.weight fused=True"),
    ):
        words += " Embedding(sparse=True)"
        refused(optimizer, ValueError, words, Words(), data=torch.tensor([1]), donate=donate)


# An update that fails


@pytest.mark.parametrize("flag", [True, False])
def test_where_takes_trees_of_one_kind(flag):
    new = {"a": torch.ones(2), "b": [torch.tensor(1)], "c": 3}
    old = {"a": torch.zeros(2), "b": [torch.tensor(0)], "c": 3}
    for given in (flag, torch.tensor(flag)):
        assert bits(ll.optim.where(given, new, old)) == bits(new if flag else old)
    for other in (torch.ones(1), torch.ones(2).double()):
        with pytest.raises(ValueError, match="shapes and dtypes"):
            ll.optim.where(torch.tensor(flag), torch.ones(2), other)
    assert ll.optim.where(torch.tensor(flag), nn.Parameter(torch.ones(2)), torch.zeros(2)).requires_grad


def halved():
    """Halve each update, from the weights before it, which `transform` puts into the state without a copy."""

    def init(params):
        return {key: p.detach().clone() for key, p in params.items()}

    def transform(grads, state, params, step):
        return ll.types.Transformed(grads, {key: params[key].detach() for key in state})

    def update_(grads, state, params, step):
        return {name: tensor.lerp_(state[name], 0.5) for name, tensor in params.items()}, state

    return ll.optim.part("halved", init=init, transform=transform, update_=update_, role="after")


@pytest.mark.slow
@one_report
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("last", [True, False], ids=["skipped last", "skipped between"])
def test_weights_that_a_decision_keeps_are_those_of_that_moment(way, last):
    model, raw = net(), net()
    optimizer = ll.chain(ll.skip_nonfinite(3), ll.optimizer(torch.optim.SGD, lr=0.2), halved())
    step, state = made_step(model, optimizer, way), ll.init_state(model, optimizer)
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1)  # half the rate
    for x in [batches(1)[0], batches(1)[0] * torch.nan, *([] if last else batches(3))]:
        expected = {key: p.detach().clone() for key, p in state.params.items()}
        state, _ = step(state, x)
        assert bits(state.opt_state["halved"]) == bits(expected)
        sgd.zero_grad()
        loss_fn(raw, x).backward()
        if not state.skipped:
            sgd.step()
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))
    with torch.no_grad():
        for p in state.params.values():
            p.add_(1)
    assert bits(state.opt_state["halved"]) == bits(expected)


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_of_a_part_are_logged_with_those_of_the_others(way):
    def init(params):
        return {"made": torch.tensor(0)}

    def update_(grads, state, params, step):
        return params, {"made": state["made"] + 1}

    def hyperparameters(state, step):
        return {"made": float(state["made"]), "now": float(step)}

    functions = {"init": init, "update_": update_, "hyperparameters": hyperparameters}
    optimizer = ll.chain(sgd(lr=ll.schedules.linear(1.0, total=10)), ll.optim.part("counting", **functions))
    model, data = net(), batches(3)
    step, state = made_step(model, optimizer, way), ll.init_state(model, optimizer)
    for x in data:
        state, _ = step(state, x)
    values = ll.optim.hyperparameters(optimizer, state)
    assert (values["made"], values["now"]) == (3, 3)
    assert values["lr"] == pytest.approx(0.7)


def noise(half):
    """Langevin noise (SGLD), drawn from torch's streams."""

    def transform(grads, state, params, step):
        return ll.types.Transformed({name: grad + torch.randn_like(grad) for name, grad in grads.items()})

    def update_(grads, state, params, step):
        for name in grads:
            params[name].add_(torch.randn_like(params[name]), alpha=0.1)
        return params, state

    return ll.optim.part("noise", **{half: {"transform": transform, "update_": update_}[half]})


@pytest.mark.every_case
@pytest.mark.parametrize("half", ["transform", "update_"])
@pytest.mark.parametrize("way", [way for way in WAYS if "compiled" not in way])
def test_what_a_part_draws_belongs_to_the_seed_and_the_step(half, way):
    parts = (noise(half), SGD) if half == "transform" else (SGD, noise(half))
    model, optimizer, (x,) = net(), ll.chain(*parts), batches(1)
    step, start = made_step(model, optimizer, way), ll.copy_state(ll.init_state(model, optimizer))

    def after(seed=0, number=0, draws=0):
        torch.manual_seed(seed)
        torch.rand(draws)
        stream = torch.get_rng_state()
        out = step(ll.copy_state(start.replace(step=number)), x)[0]
        assert torch.equal(torch.get_rng_state(), stream)
        return bits(dict(out.params))

    first = after()
    assert first == after(seed=5, draws=3)  # whatever the process has drawn
    assert first != after(number=1)
    assert first != bits(dict(step(ll.copy_state(start.replace(seed=4)), x)[0].params))


def test_labels_of_a_partition_draw_apart():
    params = {"a": torch.zeros(3), "b": torch.zeros(3)}
    optimizer = ll.optim.partition(
        {"a": ll.chain(SGD, noise("update_")), "b": ll.chain(SGD, noise("update_"))}, lambda name, _: name
    )
    new, _, _ = optimizer.update(mapped_zeros(params), optimizer.init(params), params, 0, seed=1)
    assert not torch.equal(new["a"], new["b"])


def cut_in_half(tensors):
    for tensor in tensors.values():
        tensor.mul_(0.5)


@one_report
@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"transform": lambda grads, state, params, step: cut_in_half(params) or ll.types.Transformed(grads)},
            "transform of own has written to 0.weight in place",
        ),
        (
            {
                "transform": lambda grads, state, params, step: cut_in_half(grads) or ll.types.Transformed(grads),
                "role": "judge",
            },
            "whose role is 'judge', has written to the gradient of 0.weight",
        ),
        (
            {"update_": lambda grads, state, params, step: cut_in_half(grads) or (params, state)},
            "update_ of own has written to the gradient of 0.weight",
        ),
    ],
)
def test_what_a_half_must_not_write_is_named(part, words):
    model = net()
    own = ll.optim.part("own", **part)
    optimizer = ll.chain(SGD, own) if "update_" in part else ll.chain(own, SGD)
    state = ll.init_state(model, optimizer)
    grads = {name: torch.ones_like(tensor) for name, tensor in state.params.items()}
    with pytest.raises(RuntimeError, match=words):
        ll.apply_gradients(optimizer, state, grads)
