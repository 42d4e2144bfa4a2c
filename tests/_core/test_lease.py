"""Leases: a state can be read until one of its tensors is written by a step, and not afterwards."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problem import sgd
from shared import SGD, bits, one_report
from shared import mean_square as squares
from torch import nn, testing
from torch.utils._pytree import tree_leaves, tree_map

import looplib as ll
from looplib._core.memory import overlaps
from looplib.types import TREES, TrainState

ROWS = torch.linspace(-1, 1, 24).view(8, 3)
EAGER = partial(ll.compile_step, backend="eager")

each_kind = pytest.mark.parametrize("transform", [lambda step: step, EAGER], ids=["eager", "graph"])


class Run:
    """A donated run with momentum and batch norm, of a new module or of this one."""

    def __init__(self, optimizer=None, model=None, loss_fn=squares, transform=lambda step: step, trainable=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) if model is None else model
        self.optimizer = optimizer or sgd()
        self.grad_fn = ll.make_grad_fn(self.model, loss_fn, trainable=trainable, allow_unused=True)
        self.step = transform(ll.make_train_step(self.grad_fn, self.optimizer, donate=True))
        self.state = ll.init_state(self.model, self.optimizer)

    def train(self, steps=1):
        for _ in range(steps):
            self.state, _ = self.step(self.state, ROWS)
        return self.state


def spent(state, tree="params", message="donated"):
    with pytest.raises(ll.DonatedStateError, match=message):
        getattr(state, tree)
    assert "donated" in repr(state)
    return True


# Whatever shares memory with a state


SHARING = {
    "the record": lambda state: state,
    "replace": lambda state: state.replace(epoch=5),
    "another dict": lambda state: state.replace(params=dict(state.params)),
    "tree_map": lambda state: tree_map(lambda leaf: leaf, state),
    "detach": lambda state: TrainState(params={"w": state.params["0.weight"].detach()}),
    "data": lambda state: TrainState(params={"w": state.params["0.weight"].data}),
    "Parameter": lambda state: TrainState(params={"w": nn.Parameter(state.params["0.weight"])}),
    "rows": lambda state: TrainState(params={"w": state.params["0.weight"][1:]}),
    "transposed": lambda state: TrainState(params={"w": state.params["0.weight"].detach().T}),
    "buffers": lambda state: TrainState(buffers={"mean": state.buffers["1.running_mean"].view(1, -1)}),
    "opt_state": lambda state: TrainState(opt_state=state.opt_state),
    "extra": lambda state: TrainState(extra={"ema": [state.params["0.weight"].view(-1)]}),
}


@pytest.mark.parametrize("started", [True, False])
@each_kind
def test_records_that_share_a_written_tensor_are_spent(transform, started):
    run = Run(transform=transform)
    run.train(2 * started)
    sharing = {way: share(run.state) for way, share in SHARING.items()}
    kept = {way: ll.copy_state(state) for way, state in sharing.items()}
    values = bits(kept)
    step = run.train().step
    for again in (f"that run is at step {step} now", ""):
        for state in sharing.values():
            tree = next(name for name in TREES if getattr(state, f"_{name}"))
            assert spent(state, tree, f"the state at step .* its {tree} can .*{again}")
        run = None  # they stay so when the run is gone
    assert bits(kept) == values


def test_two_runs_over_one_module_hand_the_parameters_to_each_other():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    raw = copy.deepcopy(model)
    first, second = (Run(model=model, trainable=lambda name, _, part=part: name[0] == part) for part in "01")
    sgds = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, fused=True) for part in raw]
    for _ in range(3):
        for run, other, raw_sgd in ((first, second, sgds[0]), (second, first, sgds[1])):
            before = run.state
            run.train()
            assert spent(before)
            assert spent(other.state)
            other.state = other.state.replace(params=run.state.params)  # whose moments are its own
            raw.zero_grad()
            squares(raw, ROWS).backward()
            raw_sgd.step()
    assert bits(second.state.params) == bits(dict(raw.named_parameters()))


@pytest.mark.parametrize("skipped", [True, False])
def test_another_run_within_the_loss_is_no_write_of_this_one(skipped):
    other = Run(model=nn.Linear(3, 2))

    def loss_fn(model, x):
        other.train()
        return squares(model, x)

    run = Run(ll.chain(ll.skip_nonfinite(9), SGD), loss_fn=loss_fn)
    before = run.train()
    values = bits(ll.copy_state(before))
    run.state, _ = run.step(before, ROWS * torch.inf if skipped else ROWS)
    assert run.state.skipped == skipped
    if skipped:
        assert bits(before.params) == bits(run.state.params)
        assert bits(before) == values
    else:
        assert spent(before)
    assert (run.train().step, other.state.step) == (3 - skipped, 3)


def test_parameters_replaced_between_steps_are_written_from_then_on():
    run = Run()
    for _ in range(4):
        fresh = {name: tensor.detach().clone().requires_grad_() for name, tensor in run.state.params.items()}
        before, sharing = run.state, TrainState(params=fresh)
        values = bits(before.params)
        run.state = before.replace(params=fresh)
        run.train()
        assert spent(sharing)
        assert spent(before, "opt_state")
        assert bits(before.params) == values


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.frozen = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.chosen = 0

    def forward(self, x):
        return self.frozen(self.experts[self.chosen](x))


@pytest.mark.parametrize("started", [True, False])
def test_what_a_pure_step_shares_is_spent_once_a_donated_step_writes_it(started):
    run = Run(model=Experts())
    pure = ll.make_train_step(run.grad_fn, run.optimizer)
    start = run.train(started)
    one, _ = pure(start, ROWS)
    assert all(one.params[name] is start.params[name] for name in ("experts.1.weight", "frozen.weight"))
    values, moments = bits(start.params), bits(start.opt_state)
    two, _ = run.step(one, ROWS)
    assert spent(one)
    assert bits(start.params) == values  # the second expert is shared, and not yet written
    run.model.chosen = 1
    run.step(two, ROWS)
    assert spent(start)
    assert bits(start.opt_state) == moments  # which the pure step has copied
    frozen = TrainState(params={"w": two._params["frozen.weight"]})
    assert frozen.params["w"] is run.model.frozen.weight


def test_a_donated_step_gives_up_all_buffers():
    class Assigns(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("mask", torch.ones(2))
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            out = self.linear(x) * self.mask
            self.seen = self.seen + 1 if self.seen[0] < 1 else self.seen.add_(1)
            return out

    run, states = Run(model=Assigns()), []
    for _ in range(4):
        states += [run.state, TrainState(buffers={"mask": run.state.buffers["mask"]})]
        run.train()
    for state in states:
        assert spent(state, "buffers")
    assert run.state.buffers["seen"].tolist() == [4, 4]


# Updates that fail


class Failing(torch.optim.SGD):
    """Fails once when one of two parameters is written. A rehearsal, of one parameter alone, is no update."""

    fails = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.sub_(tensor.grad, alpha=group["lr"])
                if len(group["params"]) > 1 and Failing.fails:
                    Failing.fails = False
                    raise MemoryError("halfway")


def by_hand(init, update_):
    return ll.optim.part("by_hand", init=init, update_=update_, role="weights")


def failing_by_hand():
    def update_(grads, state, params, step):
        new = {}
        for name, grad in grads.items():
            with torch.no_grad():
                new[name] = params[name].sub_(grad, alpha=0.1)
            if Failing.fails:
                Failing.fails = False
                raise MemoryError("halfway")
        return {**params, **new}, state

    return by_hand(lambda params: {"mean": torch.zeros(2)}, update_)


@pytest.fixture
def fails():
    yield partial(setattr, Failing, "fails", True)
    Failing.fails = False


def failing_behind_a_kernel():
    """torch does not count the writes of a fused kernel, so only the order of the update spends the state."""

    def update_(grads, state, params, step):
        if Failing.fails:
            Failing.fails = False
            raise MemoryError("halfway")
        return params, state

    return ll.chain(ll.optimizer(torch.optim.AdamW, lr=0.1, fused=True), ll.optim.part("late", update_=update_))


FAILING = {
    "kernel": failing_behind_a_kernel,
    "function": failing_by_hand,
    "class": lambda: ll.optimizer(Failing, lr=0.1, momentum=0.9),
    "average": lambda: ll.chain(ll.optimizer(Failing, lr=0.1), ll.ema(0.5)),
}


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING)
def test_an_update_that_fails_halfway_leaves_no_state_that_can_be_read(make, started, fails):
    run = Run(make())
    run.train(started)
    kept, before = ll.copy_state(run.state), run.state
    sharing = [before.replace(extra=1), TrainState(params={"w": before.params["0.weight"].detach()})]
    fails()
    with pytest.raises(MemoryError, match="halfway") as raised:
        run.train()
    assert "spent, since the update was writing over its tensors" in raised.value.__notes__[-1]
    assert not torch.equal(run.model[0].weight, kept.params["0.weight"])
    for state in (before, *sharing):
        assert spent(state, message="when it failed, so there is no state after it.*copy_state")
    assert spent(before, "opt_state", "when it failed")
    with pytest.raises(ll.DonatedStateError, match="failed"):
        run.step(before, ROWS)
    run.state = ll.bind(run.model, kept)
    assert bits(run.train(2).params) == bits(Run(make()).train(2 + started).params)


def refuse(*arguments, **info):
    raise ValueError("refused")


def test_a_decision_that_fails_leaves_the_state_with_its_statistics():
    run = Run(ll.chain(ll.optim.part("refuse", transform=refuse), SGD))
    values = bits(ll.copy_state(run.state))
    with pytest.raises(ValueError, match="refused"):
        run.train()
    assert bits(run.state) == values


# What `extra` keeps


KEPT = {
    "parameters": lambda state: {"start": state.params},
    "a view of one": lambda state: [state.params["0.weight"].detach().view(-1)[:2]],
    "moments": lambda state: state.opt_state["SGD"]["state"],
    "statistics": lambda state: (state.buffers["1.running_mean"],),
}


@one_report
@pytest.mark.slow
@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
@each_kind
def test_a_donated_step_refuses_to_write_what_extra_keeps(transform, keep, started):
    run = Run(transform=transform)
    run.train(started)
    before = ll.copy_state(run.state)
    sharing = run.state.replace(extra=keep(run.state))
    with pytest.raises(ValueError, match=r"extra\[.* shares memory with .* donate=True writes in place.*copy_state"):
        run.step(sharing, ROWS)
    testing.assert_close(tree_leaves(sharing), tree_leaves(before.replace(extra=keep(before))), rtol=0, atol=0)
    run.state = sharing.replace(extra=keep(ll.copy_state(run.state)))  # as the message says
    values = bits(keep(before))
    assert bits(run.train(2).extra) == values


def test_a_copy_of_a_state_that_is_given_up_meanwhile_is_refused(monkeypatch):
    run = Run()
    run.train()
    state, copied = run.state, ll.state.pytree.tree_map_only

    def and_another_thread_trains(*args):
        out = copied(*args)
        monkeypatch.undo()
        run.train()
        return out

    monkeypatch.setattr(ll.state.pytree, "tree_map_only", and_another_thread_trains)
    with pytest.raises(ll.DonatedStateError):
        ll.copy_state(state)


class TwoNetworks(nn.Module):
    """An online network, its target, which is frozen, and a buffer."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        return self.online(x) - self.target(x)


@pytest.mark.every_case
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("given", ["params", "buffers"])
def test_a_tensor_that_replace_gives_to_two_names_is_trained_under_one_alone(given, donate):
    model = TwoNetworks()
    step = ll.make_train_step(ll.make_grad_fn(model, squares), SGD, donate=donate)
    state, name = ll.init_state(model, SGD), "target.bias" if given == "params" else "last"
    online = state.params["online.bias"].detach()
    shared = state.replace(**{given: {**getattr(state, given), name: online}})
    if donate:
        kept = bits((shared.params, shared.buffers, shared.opt_state))
        with pytest.raises(ValueError, match=rf"{given}\['{name}'\] shares memory with .*clone"):
            step(shared, ROWS[:, :2])
        assert bits((shared.params, shared.buffers, shared.opt_state)) == kept
        shared = state.replace(**{given: {**getattr(state, given), name: online.clone()}})
    before = online.clone()
    for _ in range(2):
        shared, _ = step(shared, ROWS[:, :2])
    assert torch.equal(getattr(shared, given)[name], before)
    assert not torch.equal(shared.params["online.bias"], before)


def test_what_replaces_extra_between_steps_is_looked_at():
    run = Run()
    run.train()
    for tensor in (torch.ones(2), run.state.params["0.weight"].clone()):
        run.state = run.state.replace(extra=tensor)
        before = run.train(2)
        assert before.extra is tensor
    run.state = run.state.replace(extra=run.state.params["0.weight"].detach())
    with pytest.raises(ValueError, match="extra shares memory with"):
        run.train()


def test_what_is_put_into_the_dict_of_extra_is_looked_at():
    run = Run()
    run.state = run.state.replace(extra={"best": torch.ones(2)})
    run.train(2)
    for keep in KEPT.values():
        before = ll.copy_state(run.state)
        run.state.extra["kept"] = keep(run.state)
        with pytest.raises(ValueError, match=r"extra\['kept'\].* shares memory with"):
            run.train()
        assert bits(run.state.params) == bits(before.params)  # nothing is spent
        run.state.extra["kept"] = keep(before)
        values = bits(keep(before))
        assert bits(run.train(2).extra["kept"]) == values


def test_extra_may_share_what_no_step_writes():
    run = Run()
    start = run.state.params["0.weight"].clone()
    pure = ll.make_train_step(run.grad_fn, run.optimizer)
    run.state, _ = pure(run.state.replace(extra={"start": run.state.params}), ROWS)  # new tensors
    run.train(2)
    assert torch.equal(run.state.extra["start"]["0.weight"], start)


# Functions of the user's own


@pytest.mark.parametrize("donate", [True, False])
def test_a_functional_update_may_keep_the_parameters_of_before(donate):
    def update_(grads, state, params, step, **info):
        new = {name: (params[name] - 0.1 * grad).detach() for name, grad in grads.items()}
        return {**params, **new}, {"last": {name: params[name].detach() for name in grads}}

    run = Run(by_hand(lambda params, **extra: {"last": {}}, update_))
    step = run.step if donate else ll.make_train_step(run.grad_fn, run.optimizer)
    for _ in range(3):
        values = bits(ll.copy_state(run.state).params)
        run.state, _ = step(run.state, ROWS)
        assert bits(run.state.opt_state["by_hand"]["last"]) == values


def test_an_optimizer_that_keeps_a_parameter_itself_is_refused():
    def update_(grads, state, params, step, **info):
        with torch.no_grad():
            for name, grad in grads.items():
                params[name].sub_(grad, alpha=0.1)
        return params, {"last": {name: params[name].detach() for name in grads}}

    run = Run(by_hand(lambda params, **extra: {"last": {}}, update_))
    state = run.train()
    with pytest.raises(
        ValueError, match=r"opt_state\['by_hand'\]\['last'\]\['0.weight'\] shares memory with params\['0.weight'\]"
    ):
        run.train()
    assert state.params["0.weight"].shape == (2, 3)


def test_a_new_tensor_without_a_gradient_is_refused_in_every_kind_of_step():
    def update_(grads, state, params, step):
        return {name: (tensor * 0.9).detach().requires_grad_() for name, tensor in params.items()}, state

    run = Run(by_hand(lambda params: {}, update_), model=Experts())
    for donate in (False, True):
        step = ll.make_train_step(run.grad_fn, run.optimizer, donate=donate)
        for each in (step, EAGER(step)):
            with pytest.raises(ValueError, match=r"experts.1.weight, which has no gradient in this step"):
                each(ll.copy_state(run.state), ROWS)


# Tensors in one memory


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 4), st.integers(1, 3)), max_size=9))
def test_overlaps_are_the_pairs_of_views_whose_ranges_have_a_byte_in_common(views):
    memory = torch.zeros(2, 20).unbind()  # two rows of one memory
    tensors, ranges = {}, {}
    for number, (row, begin, count, step) in enumerate(views):
        tensors[str(number)] = memory[row][begin:][::step][:count]
        ranges[str(number)] = {row * 20 + place for place in range(begin, begin + (count - 1) * step + 1) if count}
    names = [*tensors]
    expected = [(one, other) for other in names for one in names[: int(other)] if ranges[one] & ranges[other]]
    assert overlaps(tensors) == expected
