"""Hyperparameters that stand in the state, against those given as numbers; and what a log is told of them all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import QUICK, assert_refused, is_vector, loss_fn, sgd
from shared import equal, examples, make_train_step
from torch import nn

import looplib as ll


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator).double() for _ in range(count)]


def train(optimizer, count=4, **options):
    step = make_train_step(ll.make_grad_fn(net := model(), loss_fn), optimizer, **options)
    state = ll.copy_state(ll.init_state(net, optimizer))
    for x in batches(count):
        state, _ = step(state, x)
    return state


OPTIONS = [{}, {"donate": True}, {"compile": QUICK}]


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("options", OPTIONS, ids=["pure", "donated", "compiled"])
def test_an_injected_number_is_the_number(cls, options):
    injected = ll.optimizer(cls, lr=ll.optim.inject(0.03), weight_decay=ll.optim.inject(0.1))
    found, expected = (train(one, **options) for one in (injected, ll.optimizer(cls, lr=0.03, weight_decay=0.1)))
    if "compile" in options:  # a tensor, of which formulas are multiplied in another order
        assert all(torch.allclose(found.params[name], expected.params[name], rtol=1e-12) for name in found.params)
    else:
        assert equal(found.params, expected.params)
    assert found.opt_state[cls.__name__]["hyperparameters"] == [{"lr": 0.03, "weight_decay": 0.1}]


# set_hyperparameters


@pytest.mark.parametrize("options", OPTIONS, ids=["pure", "donated", "compiled"])
def test_values_that_are_set_are_those_that_a_schedule_gives(options):
    optimizer = ll.chain(ll.skip_nonfinite(0), ll.optimizer(torch.optim.SGD, lr=ll.optim.inject(9.0), momentum=0.9))
    step = make_train_step(ll.make_grad_fn(net := model(), loss_fn), optimizer, **options)
    state = ll.copy_state(ll.init_state(net, optimizer))
    for x in batches(4):
        state, _ = step(ll.optim.set_hyperparameters(state, lr=0.1 * 0.5**state.step), x)
    expected = ll.optimizer(torch.optim.SGD, lr=lambda step: 0.1 * 0.5**step, momentum=0.9)
    assert equal(state.params, train(ll.chain(ll.skip_nonfinite(0), expected), **options).params)


def stood(opt_state):
    return [
        {name: value.item() for name, value in numbers.items()} for numbers in opt_state["SGD"]["hyperparameters"]
    ]


def test_a_name_sets_all_groups_and_parts():
    groups = [
        (is_vector, {"weight_decay": 0.0}),
        (lambda name, tensor: name == "2.weight", {"lr": ll.optim.inject(0.2)}),
    ]

    def options(number):
        return {"lr": ll.optim.inject(0.1 * number), "weight_decay": ll.optim.inject(0.3)}

    optimizer = ll.optimizer(torch.optim.SGD, groups=groups, **options(1))
    before = ll.init_state(model(), optimizer)
    state = ll.optim.set_hyperparameters(before, lr=1, weight_decay=lambda old: old * 2)
    assert stood(state.opt_state) == [{"lr": 1.0}, *[{"lr": 1.0, "weight_decay": 0.6}] * 2]
    assert stood(before.opt_state)[1] == {"lr": 0.2, "weight_decay": 0.3}
    assert all(state.params[name] is tensor for name, tensor in before.params.items())

    one, two = (ll.optimizer(torch.optim.SGD, **options(number)) for number in (1, 2))
    both = ll.chain(
        ll.optim.partition(
            {"one": ll.chain(one, ll.ema()), "two": two}, lambda name, t: "one" if t.ndim < 2 else "two"
        ),
        ll.ema(),
    )
    state = ll.optim.set_hyperparameters(ll.init_state(model(), both), weight_decay=0.7)
    inner = state.opt_state["partition"]
    assert stood(inner["one"]) == [{"lr": 0.1, "weight_decay": 0.7}]
    assert stood(inner["two"]) == [{"lr": 0.2, "weight_decay": 0.7}]
    found = {"lr/one": 0.1, "weight_decay/one": 0.7, "lr/two": 0.2, "weight_decay/two": 0.7}
    assert ll.optim.hyperparameters(both, state) == found


@pytest.mark.slow
def test_members_of_a_stack_have_one_value_each():
    optimizer = ll.chain(
        ll.optimizer(torch.optim.SGD, lr=ll.optim.inject(0.1), momentum=ll.optim.inject(0.5)), ll.ema()
    )
    step = ll.make_train_step(ll.make_grad_fn(net := model(), loss_fn), optimizer)
    rates = [0.01, 0.1, 0.3]
    stack = ll.transforms.stack_states([ll.init_state(net, optimizer, seed=seed) for seed in range(3)])
    stack = ll.optim.set_hyperparameters(stack, lr=torch.tensor(rates), momentum=0.9)
    for x in batches(3):
        stack, _ = ll.vmap_step(step)(stack, x)
    for rate, member in zip(torch.tensor(rates).double().tolist(), ll.transforms.unstack_states(stack), strict=True):
        assert ll.optim.hyperparameters(optimizer, member) == {"lr": rate, "momentum": 0.9}
        alone = train(ll.chain(ll.optimizer(torch.optim.SGD, lr=rate, momentum=0.9), ll.ema()), 3)
        for name, tensor in alone.params.items():  # by other kernels
            torch.testing.assert_close(member.params[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "value", [2, 2.0, torch.tensor(2), torch.tensor(2.0).bfloat16(), lambda old: old.float() * 20]
)
def test_dtype_and_place_stay_and_nothing_is_shared(value):
    state = ll.init_state(model(), ll.optimizer(torch.optim.SGD, lr=ll.optim.inject(0.1)))
    ((old,), (new,)) = (
        one.opt_state["SGD"]["hyperparameters"][0].values()
        for one in (state, ll.optim.set_hyperparameters(state, lr=value))
    )
    assert (new.dtype, new.device, new.shape, new.requires_grad) == (torch.float64, old.device, (), False)
    assert old.item() == 0.1
    assert new.item() == pytest.approx(2.0)
    assert new is not value
    mine = torch.tensor(2.0).double()
    state = ll.optim.set_hyperparameters(state, lr=mine)
    mine.zero_()
    assert stood(state.opt_state) == [{"lr": 2.0}]


def test_a_parameter_may_have_the_name_of_the_entry():
    net = nn.Module()
    net.hyperparameters = nn.Parameter(torch.ones(2))
    state = ll.init_state(net, ll.chain(sgd(ll.optim.inject(0.1)), ll.ema()))
    moved = ll.optim.set_hyperparameters(state, lr=0.2)
    assert stood(moved.opt_state) == [{"lr": 0.2}]
    assert moved.opt_state["SGD"]["state"] == state.opt_state["SGD"]["state"]


def prepared(**values):
    options = {"eps": ll.optim.inject(1e-8), "weight_decay": ll.optim.inject(0.1)}
    optimizer = ll.chain(ll.optimizer(torch.optim.AdamW, lr=0.1, **options), ll.ema())
    return ll.optim.set_hyperparameters(ll.init_state(model(), optimizer), **values)


def stacked():
    return ll.transforms.stack_states([ll.init_state(model(), sgd(ll.optim.inject(0.1)), seed=s) for s in range(3)])


REFUSED = [
    *(
        (TypeError, type(value).__name__, lambda value=value: ll.optim.inject(value))
        for value in ("0.1", True, None, torch.tensor(0.1))
    ),
    (ValueError, "lr lr=ll.optim.inject", lambda: prepared(lr=0.2, eps=1e-6)),
    (ValueError, "lr ll.optim.inject", lambda: ll.optim.set_hyperparameters(ll.init_state(model(), sgd()), lr=0.2)),
    (ValueError, "lr ll.optim.inject", lambda: ll.optim.set_hyperparameters(ll.init_state(model()), lr=0.2)),
    *(
        (ValueError, f"eps {value!r} ()", lambda value=value: prepared(eps=value))
        for value in ("0.1", None, [0.1], True)
    ),
    (ValueError, "eps '0.1' ()", lambda: prepared(eps=lambda old: "0.1")),
    (ValueError, "eps ()", lambda: prepared(eps=torch.ones(1))),
    (ValueError, "lr (3,)", lambda: ll.optim.set_hyperparameters(stacked(), lr=torch.tensor([0.1, 0.2]))),
    (ValueError, "3 unstack_states", lambda: ll.optim.hyperparameters(sgd(), stacked())),
    (
        ValueError,
        "SGD momentum_buffer ema",
        lambda: ll.optim.hyperparameters(ll.chain(sgd(), ll.ema()), ll.init_state(model(), sgd())),
    ),
    (
        ValueError,
        "ema average SGD",
        lambda: ll.optim.hyperparameters(sgd(), ll.init_state(model(), ll.chain(sgd(), ll.ema()))),
    ),
]


def test_refusals_name_what_was_found_and_what_to_give():
    for case in REFUSED:
        assert_refused(*case)


# hyperparameters


@given(step=st.integers(0, 30))
@settings(max_examples=examples(20), deadline=None)
def test_a_log_is_told_what_torchs_group_would_have(step):
    lr, beta = ll.warmup_cosine(0.1, warmup=5, total=30), ll.schedules.linear(0.8, total=20, final=0.95)
    groups = [
        (is_vector, {"weight_decay": 0.0}),
        (
            lambda name, tensor: name == "2.weight",
            {"lr": ll.schedules.scaled(lr, 0.1), "betas": lambda step: (0.5, beta(step))},
        ),
    ]
    plain = ll.optimizer(
        torch.optim.AdamW,
        lr=lr,
        betas=lambda step: (beta(step), 0.99),
        weight_decay=ll.optim.inject(0.1),
        groups=groups,
    )
    expected = {
        "lr": lr(step),
        "weight_decay": 0.1,
        "lr/1": 0.1 * lr(step),
        "weight_decay/1": 0.1,
        "betas[0]": beta(step),
        "betas[1]": 0.99,
        "betas[0]/1": 0.5,
        "betas[1]/1": beta(step),
    }
    for optimizer in (plain, ll.chain(ll.skip_nonfinite(3), plain, ll.ema())):
        state = ll.init_state(model(), optimizer).replace(step=step)
        found = ll.optim.hyperparameters(optimizer, state, prefix="train/")
        assert found == pytest.approx({f"train/{name}": value for name, value in expected.items()})
        assert {type(value) for value in found.values()} == {float}


def test_where_updates_are_skipped_or_take_turns_it_is_told_what_is_taken():
    """The rate that is logged before a step is the one that the step takes: seen in how far plain SGD goes."""
    lr = ll.schedules.linear(1.0, total=9, final=0.1)
    sgd = ll.chain(ll.skip_nonfinite(9), ll.optimizer(torch.optim.SGD, lr=lr))
    optimizer = ll.optim.partition({"all": ll.chain(sgd, ll.ema())}, lambda name, tensor: "all")
    step = ll.make_train_step(ll.make_grad_fn(net := nn.Linear(1, 1), lambda net, x: net(x).sum()), optimizer)
    state = ll.init_state(net, optimizer)
    for x in (1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0):
        before, (state, _) = state, step(state, torch.tensor([[x]]))
        moved = (before.params["bias"] - state.params["bias"]).item()
        taken = ll.optim.hyperparameters(optimizer, before)
        assert moved == pytest.approx(0.0 if state.skipped else taken["lr/all"], abs=1e-6)
        assert taken.keys() == {"lr/all"}
    assert state.step == 4


def test_a_rate_that_the_class_itself_changes_is_told():
    class Halving(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * p.grad)
                group["lr"] /= 2

    optimizer = ll.optimizer(Halving, lr=0.8)
    step = ll.make_train_step(ll.make_grad_fn(net := model(), loss_fn), optimizer)
    state, found = ll.init_state(net, optimizer), []
    for x in batches(3):
        found.append(ll.optim.hyperparameters(optimizer, state)["lr"])
        state, _ = step(state, x)
    assert found == [0.8, 0.4, 0.2]


def test_members_of_a_tuple_that_change_are_shown_as_the_update_takes_them():
    def ramp(step):
        return 0.8 + 0.01 * step

    groups = [(lambda name, tensor: tensor.ndim < 2, {"betas": (0.7, ramp)})]
    adam = ll.optimizer(torch.optim.Adam, lr=0.1, betas=(ramp, 0.99), groups=groups)
    optimizer = ll.chain(ll.optim.partition({"all": adam}, lambda name, tensor: "all"), ll.ema())
    net, raw = model(), model()
    raw.load_state_dict(net.state_dict())
    parts = [[p for p in raw.parameters() if (p.ndim < 2) is vector] for vector in (True, False)]
    theirs = torch.optim.Adam([{"params": part} for part in parts], lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(net, lambda net, x: net(x).square().mean()), optimizer)
    state = ll.init_state(net, optimizer)
    for x in torch.randn(4, 5, 3).double():
        shown = ll.optim.hyperparameters(optimizer, state)
        assert shown.keys() == {"lr/all", "betas[0]/all", "betas[1]/all/0"}
        theirs.param_groups[0]["betas"] = 0.7, shown["betas[1]/all/0"]
        theirs.param_groups[1]["betas"] = shown["betas[0]/all"], 0.99
        theirs.zero_grad()
        raw(x).square().mean().backward()
        theirs.step()
        state, _ = step(state, x)
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))
