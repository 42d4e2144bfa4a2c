"""Hyperparameters that stand in the state, against those that are given as numbers."""

import pytest
import torch
from torch import nn

import looplib as ll


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_fn(model, x):
    return (model(x) - 1).square().mean()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator).double() for _ in range(count)]


def train(optimizer, count=4, change=None, **options):
    step = ll.make_train_step(ll.make_grad_fn(net := model(), loss_fn), optimizer, **options)
    state = ll.copy_state(ll.init_state(net, optimizer))
    for x in batches(count):
        if change is not None:
            state = state.replace(opt_state=change(state.step, state.opt_state))
        state, _ = step(state, x)
    return state


def same(one, other):
    return all(torch.equal(one.params[name], other.params[name]) for name in one.params)


def is_vector(name, tensor):
    return tensor.ndim < 2


OPTIONS = [{}, {"donate": True}, {"compile": {"backend": "eager"}}]


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("options", OPTIONS, ids=["pure", "donated", "compiled"])
def test_an_injected_number_is_the_number(cls, options):
    injected = ll.optimizer(cls, lr=ll.injected(0.03), weight_decay=ll.injected(0.1))
    found, expected = (train(one, **options) for one in (injected, ll.optimizer(cls, lr=0.03, weight_decay=0.1)))
    if "compile" in options:  # a tensor, of which formulas are multiplied in another order
        assert all(torch.allclose(found.params[name], expected.params[name], rtol=1e-12) for name in found.params)
    else:
        assert same(found, expected)
    assert found.opt_state["hyperparameters"] == [{"lr": 0.03, "weight_decay": 0.1}]


@pytest.mark.parametrize("options", OPTIONS, ids=["pure", "donated", "compiled"])
def test_training_may_change_it(options):
    def halved(step, opt_state):
        return {**opt_state, "hyperparameters": [{"lr": torch.tensor(0.1 * 0.5**step, dtype=torch.float64)}]}

    found = train(ll.optimizer(torch.optim.SGD, lr=ll.injected(9.0)), change=halved, **options)
    expected = train(ll.optimizer(torch.optim.SGD, lr=lambda step: 0.1 * 0.5**step), **options)
    assert same(found, expected)


def test_groups_have_their_own():
    groups = [(is_vector, {"lr": ll.injected(0.2), "weight_decay": 0.0})]
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, weight_decay=ll.injected(0.3), groups=groups)
    plain_groups = [(is_vector, {"lr": 0.2, "weight_decay": 0.0})]
    plain = ll.optimizer(torch.optim.SGD, lr=0.1, weight_decay=0.3, groups=plain_groups)
    found = train(optimizer)
    assert [sorted(numbers) for numbers in found.opt_state["hyperparameters"]] == [["lr"], ["weight_decay"]]
    assert same(found, train(plain))


def test_it_stands_beside_schedules_and_within_wrappers():
    schedule = ll.warmup_cosine(0.1, warmup=2, total=9)
    options = {"lr": schedule, "betas": (0.8, 0.9)}
    found = train(ll.ema(ll.optimizer(torch.optim.Adam, eps=ll.injected(1e-3), **options), 0.9))
    assert same(found, train(ll.ema(ll.optimizer(torch.optim.Adam, eps=1e-3, **options), 0.9)))
    assert found.opt_state["inner_state"]["hyperparameters"] == [{"eps": 1e-3}]


def test_checkpoints_keep_it(tmp_path):
    optimizer = ll.optimizer(torch.optim.SGD, lr=ll.injected(0.1))
    state = ll.init_state(model(), optimizer)
    changed = {**state.opt_state, "hyperparameters": [{"lr": torch.tensor(0.7).double()}]}
    ll.checkpoint_io(tmp_path).save(state.replace(opt_state=changed))
    restored = ll.checkpoint_io(tmp_path).restore(ll.init_state(model(), optimizer))
    assert restored.opt_state["hyperparameters"] == [{"lr": torch.tensor(0.7).double()}]


def test_without_it_the_state_has_no_place_for_it():
    state = ll.init_state(model(), ll.optimizer(torch.optim.SGD, lr=0.1))
    assert "hyperparameters" not in state.opt_state


@pytest.mark.parametrize("value", ["0.1", True, None, torch.tensor(0.1)])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match=f"injected got a {type(value).__name__}; give a number"):
        ll.injected(value)


def test_a_member_of_a_tuple_is_refused():
    optimizer = ll.optimizer(torch.optim.Adam, lr=0.1, betas=(ll.injected(0.9), 0.99))
    with pytest.raises(TypeError, match=r"betas has an injected member: .* a hyperparameter as a whole"):
        ll.init_state(model(), optimizer)


def test_its_repr_is_the_code_that_made_it():
    assert repr(ll.injected(0.1)) == "injected(0.1)"
    assert ll.injected(3)(7) == 3.0
