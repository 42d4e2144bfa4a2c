"""Runs that are changed half way: beside raw loops that change torch's own module and optimizer in the same way."""

import copy

import pytest
import schedulefree
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.stand_ins import Late
from shared import assert_each_refused, bits, both_steps, make_train_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import looplib as ll

X = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, seed=0, tied=False, names=("first", "second"), extra=False, frozen=()):
        super().__init__()
        torch.manual_seed(seed)
        for name in names:
            self.add_module(name, nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        if extra:
            self.extra = nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x):
        *layers, norm = (layer for name, layer in self.named_children() if name != "extra")
        for layer in layers:
            x = layer(x).tanh()
        return self.extra(norm(x)) if hasattr(self, "extra") else norm(x)


def loss_fn(model, x):
    return (model(x) - x).square().mean()


ADAM = ll.optimizer(torch.optim.Adam, lr=0.1)


def trained(model, optimizer, data=X[:4], donate=False, state=None):
    step = make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    state = ll.init_state(model, optimizer, seed=3) if state is None else state
    for x in data:
        state, _ = step(state, x)
    return state


def raw_optimizer(model, cls=torch.optim.Adam, **settings):
    optimizer = cls([p for p in model.parameters() if p.requires_grad], **settings)
    getattr(optimizer, "train", bool)()  # of schedule-free classes
    return optimizer


def raw_steps(model, optimizer, data):
    for x in data:
        optimizer.zero_grad()
        loss_fn(model, x).backward()
        optimizer.step()


def weights(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


# The change, what graft is told, and where each of the new parameters' moments come from; None for fresh ones.
SAME = ("first.bias", "second.bias", "norm.weight", "norm.bias")
CHANGES = {
    "untied": (
        {"tied": True},
        {},
        {"rename": {"second.weight": "first.weight"}},
        {"first.weight": "first.weight", "second.weight": "first.weight", **{name: name for name in SAME}},
    ),
    "added": (
        {},
        {"extra": True},
        {"fresh": ("extra.*",)},
        {
            **{name: name for name in ("first.weight", "second.weight", *SAME)},
            "extra.weight": None,
            "extra.bias": None,
        },
    ),
    "renamed": (
        {"names": ("one", "second")},
        {},
        {"rename": lambda name: name.replace("first", "one")},
        {
            "first.weight": "one.weight",
            "first.bias": "one.bias",
            **{name: name for name in ("second.weight", *SAME[1:])},
        },
    ),
    "frozen": (
        {},
        {"frozen": ("first.weight",)},
        {},
        {name: name for name in ("second.weight", *SAME)},
    ),
    "thawed": (
        {"frozen": ("first.weight",)},
        {},
        {},
        {**{name: name for name in ("second.weight", *SAME)}, "first.weight": None},
    ),
    "dropped": (
        {"extra": True},
        {},
        {"drop": ("extra.*",)},
        {name: name for name in ("first.weight", "second.weight", *SAME)},
    ),
    "frozen and added": (  # as many parameters as before
        {},
        {"frozen": ("first.weight", "first.bias"), "extra": True},
        {"fresh": ("extra.*",)},
        {
            **{name: name for name in ("second.weight", *SAME[1:])},
            "extra.weight": None,
            "extra.bias": None,
        },
    ),
}
# Classes whose state is made in a parameter's first update
LATE = (
    (torch.optim.Rprop, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01, "t0": 2}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3}),
    (schedulefree.AdamWScheduleFree, {"lr": 0.01}),
    (Late, {"lr": 0.01}),
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("cls", "settings", "of_raw", "donate"),
    [
        *((torch.optim.Adam, {"lr": 0.1}, {"fused": True}, donate) for donate in (False, True)),
        *((cls, settings, {}, True) for cls, settings in LATE),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_changed_run_is_that_of_a_raw_loop_whose_optimizer_is_changed_by_hand(
    change, cls, settings, of_raw, donate
):
    before, after, told, sources = CHANGES[change]
    optimizer = ll.optimizer(cls, **settings)
    state = trained(Net(**before), optimizer, donate=donate)
    model = Net(1, **after)
    new = ll.init_state(model, optimizer)
    grafted = ll.state.graft(state, new, **told)
    assert sorted(name.removeprefix("params.") for name in grafted.fresh if name.startswith("params.")) == sorted(
        name for name, source in sources.items() if source is None and name.startswith("extra")
    )
    state = ll.bind(model, grafted.state)
    state = trained(model, optimizer, X[4:], donate, state)

    raw = Net(**before)
    inner = raw_optimizer(raw, cls, **settings, **of_raw)
    raw_steps(raw, inner, X[:4])
    changed = Net(1, **after)
    rename = told.get("rename", {})
    with torch.no_grad():
        for name, tensor in weights(changed).items():
            source = rename(name) if callable(rename) else rename.get(name, name)
            if source in weights(raw):
                tensor.copy_(weights(raw)[source])
    new_inner, old_params = raw_optimizer(changed, cls, **settings, **of_raw), dict(raw.named_parameters())
    counts = {key: value for key, value in inner.param_groups[0].items() if key != "params"}
    new_inner.param_groups[0].update(counts)  # which schedule-free classes keep there
    for name, parameter in changed.named_parameters():
        if sources.get(name):
            new_inner.state[parameter] = copy.deepcopy(inner.state[old_params[sources[name]]])
    raw_steps(changed, new_inner, X[4:])
    assert bits({**state.params, **state.buffers}) == bits(weights(changed))
    assert (state.step, state.batch, state.samples, state.seed) == (8, 8, 40, 3)


@pytest.mark.parametrize("kind", ["ema", "ema of later weights", "swa"])
@pytest.mark.parametrize("change", ["thawed", "average added"])
def test_an_average_of_a_carried_weight_begins_there_as_in_a_raw_loop(change, kind):
    """A raw loop needs no second model to thaw a layer or to add an average, so nothing random can get in there."""
    averaging, start = {
        "ema": (ll.ema(0.9), 0),
        "ema of later weights": (ll.ema(0.9, start=1), 1),
        "swa": (ll.optim.swa(start=1), 1),
    }[kind]
    multi_avg_fn = get_swa_multi_avg_fn() if kind == "swa" else get_ema_multi_avg_fn(0.9)
    frozen = ("first.weight",) if change == "thawed" else ()
    chain, added = ll.chain(ADAM, averaging), change == "average added"
    state = trained(Net(frozen=frozen), ADAM if added else chain)
    model = Net(1)
    told = {"fresh": (f"opt_state.{kind.split()[0]}",)} if added else {}
    grafted = ll.state.graft(state, ll.init_state(model, chain), **told)
    averages = [path for path in grafted.carried if ".average." in path]
    assert not [path for path in grafted.fresh if ".average." in path]
    if not added:
        assert grafted.carried[next(path for path in averages if "first.weight" in path)] == "params.first.weight"
    at_graft = ll.eval_state(chain, grafted.state).params
    state = trained(model, chain, X[4:], state=ll.bind(model, grafted.state))

    raw = Net(frozen=frozen)
    adam = raw_optimizer(raw, lr=0.1, fused=True)
    average, updates = None, 0

    def raw_steps_with_average(data):
        nonlocal average, updates
        for x in data:
            raw_steps(raw, adam, [x])
            updates += 1
            if average is None and updates >= start:
                average = AveragedModel(raw, multi_avg_fn=multi_avg_fn)
            if average is not None:
                average.update_parameters(raw)

    if start == 0 and not added:
        average = AveragedModel(raw, multi_avg_fn=multi_avg_fn)
        average.update_parameters(raw)
    if added:
        raw_steps(raw, adam, X[:4])
        if start == 0:
            average = AveragedModel(raw, multi_avg_fn=multi_avg_fn)
            average.update_parameters(raw)
    else:
        raw_steps_with_average(X[:4])
    assert bits(at_graft) == bits(dict((raw if average is None else average.module).named_parameters()))
    for name in frozen:
        raw.get_parameter(name).requires_grad_(True)
        adam.add_param_group({"params": [raw.get_parameter(name)]})
    raw_steps_with_average(X[4:])
    assert bits(ll.eval_state(chain, state).params) == bits(dict(average.module.named_parameters()))


def slow_weights():
    """A part of a user's, as Lookahead: a copy of the weights under their names."""
    return ll.optim.part(
        "slow",
        init=lambda params: {name: tensor.detach().clone() for name, tensor in params.items()},
        update_=lambda grads, state, params, step: (params, state),
    )


def sums_of_squares():
    """A part of a user's that begins with zeros, beside a count."""
    return ll.optim.part(
        "squares",
        init=lambda params: {"of": {name: torch.zeros_like(tensor) for name, tensor in params.items()}, "count": 0},
        update_=lambda grads, state, params, step: (params, state),
    )


class Zeroed(Net):
    """A net in which some weights are zeros, as norms and adapters have them, and state of zeros has their values."""

    def __init__(self, seed=0, frozen=()):
        super().__init__(seed, frozen=frozen)
        nn.init.zeros_(self.second.bias)


def test_what_is_fresh_of_carried_weights_is_what_a_part_keeps_of_a_model_with_these_weights():
    optimizer = ll.chain(ADAM, ll.ema(0.9), slow_weights(), sums_of_squares())
    state = trained(Zeroed(frozen=("first.weight", "second.bias")), ADAM).replace(opt_state={})
    state = state.replace(params={name: tensor + 1 for name, tensor in state.params.items()})
    loaded = Zeroed(1)
    loaded.load_state_dict(ll.checkpoint.state_dict(loaded, state))
    expected = optimizer.init(dict(loaded.named_parameters()))
    grafted = ll.state.graft(state, ll.init_state(Zeroed(1), optimizer), fresh=("opt_state",))
    assert bits(grafted.state.opt_state) == bits(expected)
    assert grafted.carried["opt_state.slow.first.weight"] == "params.first.weight"
    assert "opt_state.squares.of.second.bias" in grafted.fresh


def test_zeros_that_may_be_a_copy_of_a_weight_are_refused_until_the_old_weights_are_loaded():
    def of_biases(*parts):
        return ll.optim.partition(
            {"bias": ll.chain(ADAM, *parts), "rest": ADAM}, lambda name, _: "bias" if "bias" in name else "rest"
        )

    def model(seed=0):
        return nn.LayerNorm(4)

    old = ll.init_state(model(), of_biases())
    old = old.replace(params={name: tensor + 1 for name, tensor in old.params.items()})
    for part, begins in ((slow_weights(), "weight"), (sums_of_squares(), "zeros"), (ll.ema(0.9), "weight")):
        title, optimizer = f"opt_state.partition.bias.{next(iter(part.parts))}", of_biases(part)
        new = ll.init_state(model(), optimizer)
        if "ema" not in part.parts:
            with pytest.raises(ValueError, match=f"{title}.* is zero, as its weight is.*new_model.load_state_dict"):
                ll.state.graft(old, new, fresh=(title,))
            loaded = model()
            loaded.load_state_dict(ll.checkpoint.state_dict(loaded, old), strict=False)
            new = ll.init_state(loaded, optimizer)
        grafted = ll.state.graft(old, new, fresh=(title,)).state
        tensors = [
            tensor
            for tensor in torch.utils._pytree.tree_leaves(
                grafted.opt_state["partition"]["bias"][next(iter(part.parts))]
            )
            if isinstance(tensor, torch.Tensor) and tensor.ndim
        ]
        expected = old.params["bias"] if begins == "weight" else torch.zeros(4)
        assert [torch.equal(tensor, expected) for tensor in tensors] == [True]


def test_every_leaf_is_carried_fresh_or_dropped_and_the_states_stay_as_they_are():
    optimizer = ll.chain(ll.optim.own_steps(ADAM), ll.ema(0.9))
    state, new = trained(Net(extra=True), optimizer), ll.init_state(Net(1, frozen=("first.bias",)), optimizer)
    before = bits(state), bits(new)
    grafted = ll.state.graft(state, new, drop=("extra.*",))
    assert isinstance(grafted, ll.state.Grafted)
    assert (bits(state), bits(new)) == before

    def leaves(state):
        trees = {name: getattr(state, name) for name in ("params", "buffers", "opt_state")}
        paths = torch.utils._pytree.tree_flatten_with_path(trees)[0]
        return [".".join(str(key.key) for key in path) for path, _ in paths]

    assert sorted([*grafted.carried, *grafted.fresh]) == sorted(leaves(new))
    assert sorted([*grafted.carried.values(), *grafted.dropped]) == sorted(leaves(state))
    assert not grafted.fresh
    assert {name.split(".")[0] for name in grafted.dropped} == {"params", "opt_state"}
    assert int(grafted.state.opt_state["own_steps"]["updates"]) == int(grafted.state.opt_state["ema"]["updates"]) == 4


def test_a_part_that_has_moved_is_found_where_it_was():
    state = trained(Net(), ADAM)
    one = ll.optim.partition({"all": ll.chain(ADAM, ll.ema(0.9))}, lambda name, tensor: "all")
    moved = {"opt_state.partition.all.Adam": "opt_state.Adam"}
    new = ll.init_state(Net(1), one)
    grafted = ll.state.graft(state, new, moved, fresh=("opt_state.partition.all.ema",)).state
    assert bits(grafted.opt_state["partition"]["all"]["Adam"]) == bits(state.opt_state["Adam"])
    assert bits(grafted.opt_state["partition"]["all"]["ema"]["average"]["params"]) == bits(state.params)


def test_names_of_parameters_that_are_words_of_a_state_are_told_apart():
    """A parameter `params` stands in a tree of that name, and a label of a partition may be the name of a parameter."""

    def state_of(name):
        model = nn.Module()
        model.register_parameter(name, nn.Parameter(torch.ones(2)))
        model.register_parameter("bias", nn.Parameter(torch.ones(1)))
        optimizer = ll.optim.partition(
            {"bias": ADAM, "rest": ADAM}, lambda param, _: "bias" if param == name else "rest"
        )
        return ll.init_state(model, optimizer)

    for old, new in (("params", "weights"), ("weights", "params")):
        grafted = ll.state.graft(state_of(old), state_of(new), {new: old})
        assert grafted.carried[f"params.{new}"] == f"params.{old}"
        moment = "opt_state.partition.bias.Adam.state.{}.exp_avg"
        assert grafted.carried[moment.format(new)] == moment.format(old)
        assert (grafted.fresh, grafted.dropped) == ([], [])


@pytest.mark.parametrize("name", ["step", "exp_avg", "state", "params", "started", "updates", "k", "lr"])
def test_parameters_with_the_names_of_moments_are_told_apart(name):
    """A parameter at the root of a module may have the name of what a class or an average keeps for each parameter."""

    def state_of(names, updates=0):
        model = nn.ParameterDict({key: torch.full((2,), 2.0) for key in names})
        state = ll.init_state(model, optimizer)
        step = ll.make_train_step(
            ll.make_grad_fn(model, lambda model, x: sum(map(torch.sum, model.values()))), optimizer
        )
        for _ in range(updates):
            state, _ = step(state, torch.ones(1))
        return state

    of_class = schedulefree.AdamWScheduleFree if name in ("started", "k") else torch.optim.Adam
    lr = ll.optim.inject(0.1) if name == "lr" else 0.1
    optimizer = ll.chain(ll.optimizer(of_class, lr=lr), ll.ema(0.9))
    for before, after, told in (
        (["w"], ["w", name], {"fresh": (name,)}),
        (["w", name], ["w"], {"drop": (name,)}),
        (["w", name], ["w", "renamed"], {"rename": {"renamed": name}}),
        (["w", "old"], ["w", name], {"rename": {name: "old"}}),
    ):
        old, new = state_of(before, 3), state_of(after)
        grafted = ll.state.graft(old, new, **told)
        sources = {key: told.get("rename", {}).get(key, key) for key in after}
        for key, source in sources.items():
            of_key = [
                leaves_of(state.opt_state, word) for state, word in ((grafted.state, key), (old, source), (new, key))
            ]
            assert of_key[0] == of_key[1 if source in before else 2]
        rest = [leaves_of(state.opt_state, None) for state in (grafted.state, old)]
        assert rest[0] == rest[1]


def test_a_label_that_is_the_name_of_its_parameter_is_renamed_with_it():
    def state_of(*names):
        model = nn.ParameterDict({name: torch.ones(2) for name in names})
        return ll.init_state(model, ll.optim.partition(dict.fromkeys(names, ADAM), lambda name, _: name))

    rename = {"centers": "means"}
    grafted = ll.state.graft(state_of("means", "colors"), state_of("centers", "colors"), rename)
    moment = "opt_state.partition.{0}.Adam.state.{0}.exp_avg"
    assert grafted.carried[moment.format("centers")] == moment.format("means")
    assert (grafted.fresh, grafted.dropped) == ([], [])


def leaves_of(opt_state, name):
    """Leaves of the states of a class and of an average that belong to one parameter, or for None, to none."""
    (entry, *_), average = opt_state.values(), opt_state["ema"]
    by_name = [entry["state"], entry.get("started", {}), average["average"]["params"]]
    if name is None:
        return bits([entry.get("groups"), entry.get("hyperparameters"), average["updates"]])
    return bits([tree.get(name) for tree in by_name])


def test_what_a_class_makes_as_a_whole_does_not_begin_in_part():
    optimizer = ll.optimizer(torch.optim.Rprop, lr=0.1)
    state, new = trained(Net(), optimizer), ll.init_state(Net(1), optimizer)
    for fresh in ("opt_state.Rprop.started.first.weight", "opt_state.Rprop.state.first.weight.prev", "*.prev"):
        with pytest.raises(
            ValueError, match=r"makes all .* name both or neither of opt_state.Rprop.state.first.weight"
        ):
            ll.state.graft(state, new, fresh=(fresh,))
    whole = ("opt_state.Rprop.state.first.weight", "opt_state.Rprop.started.first.weight")
    grafted = ll.state.graft(state, new, fresh=whole).state.opt_state["Rprop"]
    assert [name for name, begun in grafted["started"].items() if not begun] == ["first.weight"]


def test_vectors_of_all_parameters_are_carried_for_the_same_ones_in_the_same_order_alone():
    """LBFGS keeps its history in vectors: with one layer frozen and another added they are as long as before."""
    optimizer = ll.optimizer(torch.optim.LBFGS, lr=0.1, history_size=3, max_iter=2)
    state = trained(Net(), optimizer)
    changed = ll.init_state(Net(1, frozen=("second.weight", "second.bias"), extra=True), optimizer)
    with pytest.raises(
        ValueError, match=r"opt_state.LBFGS.state.first.weight holds vectors.*name opt_state.LBFGS in"
    ):
        ll.state.graft(state, changed, fresh=("extra.*",))
    grafted = ll.state.graft(state, changed, fresh=("extra.*", "opt_state.LBFGS")).state
    assert bits(grafted.opt_state) == bits(changed.opt_state)
    renamed = ll.init_state(Net(1, names=("first", "another")), optimizer)
    grafted = ll.state.graft(state, renamed, lambda name: name.replace("another", "second")).state
    assert bits(grafted.opt_state["LBFGS"]["state"]["first.weight"]) == bits(
        state.opt_state["LBFGS"]["state"]["first.weight"]
    )


def test_sharded_states_are_grafted_and_one_that_is_not_is_told_what_to_do(one_process):
    def state_of(sharded, optimizer=ADAM, seed=0):
        torch.manual_seed(seed)
        model = nn.Linear(4, 2)
        return ll.init_state(fully_shard(model, mesh=init_device_mesh("cpu", (1,))) if sharded else model, optimizer)

    whole, sharded = state_of(False), state_of(True)
    for old, new in ((whole, sharded), (sharded, whole)):
        with pytest.raises(ValueError, match=r"weight.* is sharded.*wrapped in the same way.*ckpt.restore\("):
            ll.state.graft(old, new)
    grafted = ll.state.graft(sharded, state_of(True)).state
    assert grafted.params["weight"].full_tensor().equal(whole.params["weight"])
    new = state_of(True, ll.chain(ADAM, ll.ema(0.9), slow_weights()), seed=1)
    grafted = ll.state.graft(sharded, new, fresh=("opt_state.ema", "opt_state.slow")).state.opt_state
    for copies in (grafted["ema"]["average"]["params"], grafted["slow"]):
        assert copies["weight"].full_tensor().equal(whole.params["weight"])
    with pytest.raises(ValueError, match=r"weight is sharded.*ll\.grads\.reduce_gradients"):
        ll.optim.take_rows(ADAM, sharded, {"weight": torch.tensor([0])})


def test_the_part_of_a_batch_that_was_read_is_carried(tmp_path):
    def state_of(size):
        return ll.init_state(nn.Linear(1, 1), loader=ll.make_loader(range(24), batch_size=size))

    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state_of(4).replace(step=1, batch=1, samples=4, batch_samples=4))
    with pytest.warns(UserWarning, match="batch_size was 4, is 9"):
        state = ckpt.restore(state_of(9), quiet=True)
    loader = ll.make_loader(range(24), batch_size=9)
    for new in (state_of(9), ll.init_state(nn.Linear(1, 1))):
        assert [len(batch) for batch in loader(ll.state.graft(state, new).state)] == [5, 9, 6]


def test_what_differs_and_is_not_named_is_refused_by_name():
    state, same = trained(Net(), ADAM), ll.init_state(Net(1), ADAM)
    graft = ll.state.graft
    sgd = ll.init_state(Net(1), ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9))
    stack = ll.transforms.stack_states([state, ll.state.fold_in(state, 1)])
    wide = Net(1)
    wide.second = nn.Linear(4, 6)
    within = state.replace(epoch_length=9)
    assert_each_refused(
        (
            lambda: graft(state, ll.init_state(Net(1, extra=True), ADAM)),
            ValueError,
            "params.extra.weight is new: name it",
        ),
        (
            lambda: graft(trained(Net(extra=True), ADAM), same),
            ValueError,
            "params.extra.weight is in the old state alone",
        ),
        (
            lambda: graft(state, ll.init_state(wide, ADAM)),
            ValueError,
            r"second.weight is .*\(6, 4\) in the new.*\(4, 4\)",
        ),
        (
            lambda: graft(state, ll.init_state(Net(1).double(), ADAM)),
            ValueError,
            "params.first.weight is a float64 .* in the new state, a float32",
        ),
        (
            lambda: graft(state, sgd),
            ValueError,
            "opt_state.SGD.state.first.weight.momentum_buffer is in the new state alone",
        ),
        (
            lambda: graft(state, sgd, fresh=("opt_state",)),
            ValueError,
            "opt_state.Adam.state.first.weight.* old state alone",
        ),
        (
            lambda: graft(state, same, {"third.weight": "first.weight"}),
            ValueError,
            "third.weight is named, and neither",
        ),
        (lambda: graft(state, same, fresh=("third.*",)), ValueError, r"third\.\* is named, and neither"),
        (lambda: graft(state, same, drop=("third.*",)), ValueError, r"third\.\* is named, and neither"),
        (
            lambda: graft(trained(Net(tied=True), ADAM), same, {"second.weight": "frist.weight"}),
            ValueError,
            "params.second.weight is new",
        ),
        (lambda: graft(stack, same), ValueError, "a state is a stack"),
        (lambda: graft(state, same.replace(extra=1)), ValueError, "the new state has an extra"),
        (lambda: graft(within, same.replace(epoch_length=5)), ValueError, "within an epoch of 9 batches, at batch 4"),
        (lambda: graft(state, same, fresh="first"), TypeError, "fresh is 'first'; give names"),
        (lambda: graft(state, same, rename=3), TypeError, "rename is an int"),
    )
    assert graft(state, sgd, fresh=("opt_state",), drop=("opt_state.Adam",)).state.step == 4


# Rows, as 3D Gaussian Splatting adds and prunes them (gaussian_model.py: replace, prune, cat), around torch's Adam


class Splats(nn.Module):
    def __init__(self, means, colors):
        super().__init__()
        self.means, self.colors = nn.Parameter(means), nn.Parameter(colors)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        near = (-(x[:, None] - self.means).square().sum(-1)).softmax(1)
        return (near @ self.colors) * self.scale


def splats(count=5):
    torch.manual_seed(0)
    return Splats(torch.randn(count, 3), torch.rand(count, 3))


POINTS = torch.randn(20, 6, 3, generator=torch.Generator().manual_seed(1))


def splat_loss(model, x):
    return (model(x) - x.sigmoid()).square().mean()


def prune_raw(model, adam, mask):
    for group in adam.param_groups:
        if group["name"] != "scale":
            stored = adam.state.pop(group["params"][0])
            stored["exp_avg"] = stored["exp_avg"][mask]
            stored["exp_avg_sq"] = stored["exp_avg_sq"][mask]
            group["params"][0] = nn.Parameter(group["params"][0][mask].detach())
            adam.state[group["params"][0]] = stored
            setattr(model, group["name"], group["params"][0])


def cat_raw(model, adam, extension):
    for group in adam.param_groups:
        if group["name"] != "scale":
            added = extension[group["name"]]
            stored = adam.state.pop(group["params"][0])
            stored["exp_avg"] = torch.cat((stored["exp_avg"], torch.zeros_like(added)))
            stored["exp_avg_sq"] = torch.cat((stored["exp_avg_sq"], torch.zeros_like(added)))
            group["params"][0] = nn.Parameter(torch.cat((group["params"][0].detach(), added)))
            adam.state[group["params"][0]] = stored
            setattr(model, group["name"], group["params"][0])


def masks(draw_rows, count):
    return torch.arange(count) % draw_rows != 0


@pytest.mark.slow
@both_steps
@settings(max_examples=10, deadline=None)
@given(plan=st.lists(st.tuples(st.integers(2, 6), st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=3))
def test_rows_that_come_and_go_have_the_bits_of_3d_gaussian_splatting(plan, donate):
    model, raw = splats(), splats()
    rates = {"means": 0.05, "colors": 0.1, "scale": 0.01}
    optimizer = ll.optim.partition(
        {name: ll.optimizer(torch.optim.Adam, lr=rate) for name, rate in rates.items()}, lambda name, tensor: name
    )
    groups = [{"params": [getattr(raw, name)], "lr": rate, "name": name} for name, rate in rates.items()]
    adam = torch.optim.Adam(groups, fused=True)
    step = make_train_step(ll.make_grad_fn(model, splat_loss), optimizer, donate=donate)
    state, data = ll.init_state(model, optimizer), iter(POINTS)
    for every, added, steps in (*plan, (9, 0, 2)):
        for _ in range(steps):
            x = next(data)
            state, _ = step(state, x)
            adam.zero_grad()
            splat_loss(raw, x).backward()
            adam.step()
        mask = masks(every, len(raw.means))
        extension = {"means": raw.means.detach()[:1].repeat(added, 1), "colors": torch.ones(added, 3)}
        cat_raw(raw, adam, extension)
        prune_raw(raw, adam, torch.cat([mask, torch.ones(added, dtype=torch.bool)]))
        rows = {"means": mask, "colors": mask.nonzero().squeeze(1)}
        state = ll.bind(model, ll.optim.take_rows(optimizer, state, rows, append=extension), resize=True)
    assert bits(state.params) == bits(dict(raw.named_parameters()))
    for name in rates:
        moments = state.opt_state["partition"][name]["Adam"]["state"][name]
        assert bits(moments) == bits(dict(adam.state[getattr(raw, name)]))


@pytest.mark.parametrize("added", [2, 0, 3])  # as many as are pruned, which no shape shows
def test_rows_of_averages_and_sums_are_taken_with_those_of_the_weights(added):
    optimizer = ll.chain(ll.optim.every(ll.optimizer(torch.optim.Adam, lr=0.1), 2), ll.ema(0.9))
    model = splats(3 + 2)
    step = make_train_step(ll.make_grad_fn(model, splat_loss), optimizer)
    state = ll.init_state(model, optimizer)
    for x in POINTS[:3]:
        state, _ = step(state, x)
    before, order, new = bits(state), torch.tensor([4, 0, 2]), torch.randn(added, 3)
    changed = ll.optim.take_rows(optimizer, state, {"means": order}, append={"means": new})
    assert bits(state) == before
    slow, total = (tree["ema"]["average"]["params"] for tree in (changed.opt_state, state.opt_state))
    assert torch.equal(slow["means"], torch.cat([total["means"][order], new]))  # an average begins at its row
    assert torch.equal(slow["scale"], total["scale"])
    sums = changed.opt_state["every"]["sum"]["means"], state.opt_state["every"]["sum"]["means"]
    assert torch.equal(sums[0], torch.cat([sums[1][order], torch.zeros(added, 3)]))
    assert int(changed.opt_state["every"]["steps"]) == int(state.opt_state["every"]["steps"]) == 1


@pytest.mark.parametrize(("cls", "settings"), LATE, ids=lambda value: getattr(value, "__name__", ""))
def test_rows_of_state_that_the_first_update_makes_are_pruned_and_not_added(cls, settings):
    """Beside a raw loop over the kept rows alone, since these classes update each row by itself."""
    optimizer, kept = ll.optimizer(cls, **settings), torch.tensor([3, 0, 2])
    model, raw = splats(), splats()
    raw.means, raw.colors = nn.Parameter(raw.means[kept].detach()), nn.Parameter(raw.colors[kept].detach())

    def rows_apart(model, x):
        return sum((tensor.sin() * x.mean()).sum() for tensor in model.parameters())

    step = ll.make_train_step(ll.make_grad_fn(model, rows_apart), optimizer)
    state = ll.init_state(model, optimizer)
    added = {"means": torch.full((2, 3), 5.0)}
    early = ll.optim.take_rows(optimizer, state, {}, append=added)
    assert early.params["means"].shape == (7, 3)
    inner = raw_optimizer(raw, cls, **settings)
    for number, x in enumerate(POINTS[:6]):
        if number == 3:
            with pytest.raises(
                ValueError, match=r"/state/means was made by the first update of means.*before the first"
            ):
                ll.optim.take_rows(optimizer, state, {}, append=added)
            state = ll.optim.take_rows(optimizer, state, {"means": kept, "colors": kept})
            state = ll.bind(model, state, resize=True)
        state, _ = step(state, x)
        inner.zero_grad()
        rows_apart(raw, x).backward()
        inner.step()
    assert bits(state.params) == bits(dict(raw.named_parameters()))


def test_rows_are_those_of_the_parameter_and_not_of_a_label_or_a_moment_of_its_name():
    model = nn.ParameterDict({name: torch.randn(4, 2) for name in ("means", "colors", "exp_avg")})
    optimizer = ll.optim.partition(
        {"means": ADAM, "exp_avg": ADAM}, lambda name, tensor: "exp_avg" if name == "means" else "means"
    )
    state = ll.init_state(model, optimizer)
    grads = {name: torch.randn(4, 2) for name in model}
    state = state.replace(opt_state=optimizer.update(grads, state.opt_state, state.params, 0)[1])
    rows = {"means": torch.tensor([3, 1]), "colors": torch.tensor([0, 2]), "exp_avg": torch.tensor([2, 1])}
    changed = ll.optim.take_rows(optimizer, state, rows).opt_state["partition"]
    for name, kept in rows.items():
        label = "exp_avg" if name == "means" else "means"
        before = state.opt_state["partition"][label]["Adam"]["state"][name]
        after = changed[label]["Adam"]["state"][name]
        assert bits(after) == bits({**before, **{key: before[key][kept] for key in ("exp_avg", "exp_avg_sq")}})


def test_a_donated_run_spends_the_state_before_its_rows_were_taken_and_not_a_copy():
    optimizer, model = ll.optimizer(torch.optim.Adam, lr=0.1), splats()
    step = ll.make_train_step(ll.make_grad_fn(model, splat_loss), optimizer, donate=True)
    state, _ = step(ll.init_state(model, optimizer), POINTS[0])
    copied = ll.copy_state(state)
    before = bits(copied)
    changed = ll.optim.take_rows(optimizer, state, {"means": torch.arange(3), "colors": torch.arange(3)})
    assert bits(state) == before
    step(ll.bind(model, changed, resize=True), POINTS[1])
    with pytest.raises(ll.types.DonatedStateError):
        _ = state.params
    assert bits(copied) == before


def test_rows_that_cannot_be_taken_are_refused_by_name():
    optimizer, model = ll.optimizer(torch.optim.Adam, lr=0.1), splats()
    state = ll.init_state(model, optimizer)
    shampoo = ll.optim.part(
        "shampoo",
        role="weights",
        init=lambda params: {name: torch.eye(len(tensor)) for name, tensor in params.items() if tensor.ndim == 2},
        update_=lambda grads, state, params, step: (params, state),
    )
    take, stack = ll.optim.take_rows, ll.transforms.stack_states([state, state], same_seeds=True)
    mask = torch.ones(5, dtype=torch.bool)
    assert_each_refused(
        (lambda: take(optimizer, state, {"mean": mask}), ValueError, "no parameter mean: it has means"),
        (
            lambda: take(optimizer, state, {"means": mask[:4]}),
            ValueError,
            r"rows\['means'\] has 4 entries, and means 5",
        ),
        (lambda: take(optimizer, state, {"means": torch.tensor([0, 0])}), ValueError, "an index twice or outside"),
        (lambda: take(optimizer, state, {"means": torch.tensor([5])}), ValueError, "an index twice or outside"),
        (
            lambda: take(optimizer, state, {"means": torch.tensor([0.5])}),
            ValueError,
            "is of torch.float32; give a mask",
        ),
        (lambda: take(optimizer, state, {"means": [True]}), TypeError, "is a list; give a mask of 5 bools"),
        (lambda: take(optimizer, state, mask), TypeError, "rows is a Tensor; give a dict"),
        (
            lambda: take(optimizer, state, {}, append={"means": torch.ones(2, 4)}),
            ValueError,
            r"append gives means rows of shape \(4,\), and it has rows of \(3,\)",
        ),
        (
            lambda: take(shampoo, ll.init_state(model, shampoo), {"means": mask}, append={"means": torch.ones(1, 3)}),
            ValueError,
            "/opt_state/shampoo/means of shape .* depends on the rows of means, and has none of its own",
        ),
        (lambda: take(shampoo, state, {"means": mask}), ValueError, "is not that of"),
        (lambda: take(optimizer, stack, {"means": mask}), ValueError, "is a stack: change one of .*unstack_states"),
    )


def test_a_run_with_rows_that_come_and_go_is_resumed_with_its_shapes(tmp_path):
    optimizer = ll.optimizer(torch.optim.Adam, lr=0.1)

    def run(folder, stop=None):
        model = splats()
        step = ll.make_train_step(ll.make_grad_fn(model, splat_loss), optimizer, donate=True)
        ckpt = ll.checkpoint_io(folder)
        state = ll.init_state(model, optimizer, extra={"counts": []})
        state = ckpt.restore(state, resized=("params.means", "params.colors", "extra.counts"), quiet=True)
        state = ll.bind(model, state, resize=True)
        for x in POINTS[state.step : stop]:
            state, _ = step(state, x)
            if state.step % 4 == 0:
                mask = masks(3, len(state.params["means"]))
                added = {"means": torch.zeros(3, 3), "colors": torch.ones(3, 3)}
                state = ll.optim.take_rows(optimizer, state, {"means": mask, "colors": mask}, append=added)
                state = ll.bind(
                    model, state.with_extra(counts=[*state.extra["counts"], int(mask.sum())]), resize=True
                )
        ckpt.save(state)
        return bits((state.params, state.opt_state, state.extra)), state.step

    expected = run(tmp_path / "unbroken")
    for stop in (3, 4, 11, None):
        found = run(tmp_path / "stopped", stop)
    assert found == expected
