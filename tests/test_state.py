"""The record: frozen, a pytree, short to read."""

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
from problem import adamw
from shared import SGD, both_steps, equal, make_train_step, mean_output, mean_square
from torch import nn

import looplib as ll

pytree = torch.utils._pytree


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    return model, ll.init_state(model, adamw(0.1), seed=4, epoch_length=10)


def test_it_is_frozen():
    _, state = made()
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 3
    with pytest.raises((AttributeError, TypeError)):
        state.other = 3
    assert [field.name for field in dataclasses.fields(state)] == [
        *("step", "epoch", "batch", "epoch_length", "samples", "batch_samples", "batch_steps", "no_batch"),
        *("params", "buffers", "opt_state", "seed", "extra", "run"),
    ]


def test_replace_shares_the_rest_and_names_what_is_unknown():
    _, state = made()
    for changed in (state.replace(step=7), dataclasses.replace(state, step=7)):
        assert (changed.step, state.step) == (7, 0)
        assert changed.params is state.params
    with pytest.raises(TypeError, match="'steps': replace step, "):
        state.replace(steps=3)


def test_repr_is_short_and_has_no_numbers_of_tensors():
    _, state = made()
    assert repr(state) == (
        "TrainState(step=0, epoch=0, batch=0/10, samples=0, params=4 tensors (12 numbers), "
        "buffers=3 tensors (5 numbers), seed=4)"
    )
    assert repr(state.replace(extra={"ema": state.params})).endswith("extra=dict of ema)")


def test_it_is_a_pytree_of_its_tensors():
    _, state = made()
    leaves, spec = pytree.tree_flatten(state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves if leaf is not None)
    doubled = pytree.tree_map(lambda t: t.detach() * 2, state)
    assert isinstance(doubled, ll.TrainState)
    assert doubled.seed == 4
    assert torch.equal(doubled.params["0.weight"], state.params["0.weight"] * 2)
    assert pytree.tree_unflatten(leaves, spec).params["0.weight"] is state.params["0.weight"]
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(state)[0]]
    assert ".params['0.weight']" in paths


def test_it_is_pickled_and_copied():
    _, state = made()
    state = state.replace(extra=[1, "two"])
    for other in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), copy.copy(state)):
        assert repr(other) == repr(state)
        for one, two in zip(pytree.tree_leaves(other), pytree.tree_leaves(state), strict=True):
            assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
    assert copy.deepcopy(state).run is copy.copy(state).run is state.run


def test_copy_keeps_ties_and_flags():
    shared = torch.ones(2, requires_grad=True)
    state = ll.TrainState(params={"w": shared, "b": torch.zeros(1)}, extra={"same": shared})
    copied = ll.copy_state(state)
    assert copied.params["w"] is copied.extra["same"]
    assert copied.params["w"] is not shared
    assert copied.params["w"].requires_grad
    assert not copied.params["b"].requires_grad
    assert copied.params["w"].is_leaf


class Masked(nn.Module):
    """A trained and a frozen layer, and a mask of integers, as in many transformers models."""

    def __init__(self):
        super().__init__()
        self.layer, self.frozen = nn.Linear(3, 3), nn.Linear(3, 1).requires_grad_(False)
        self.register_buffer("ids", torch.arange(3))

    def forward(self, x):
        return self.frozen(self.layer(x)[:, self.ids])


@pytest.mark.parametrize("use", ["bind", "bind a copy", "restore"])
def test_a_pure_state_is_not_spent_by_what_reads_it_into_the_module(use, tmp_path):
    model = Masked()
    grad_fn = ll.make_grad_fn(model, mean_square)
    step, x, ckpt = ll.make_train_step(grad_fn, SGD), torch.randn(4, 3), ll.checkpoint_io(tmp_path)
    state, _ = step(ll.init_state(model, SGD), x)
    ckpt.save(state)
    if use == "restore":
        other = ckpt.restore(ll.init_state(model, SGD))
    else:
        other = ll.bind(model, ll.copy_state(state) if use == "bind a copy" else state)
    torch.testing.assert_close(dict(model.state_dict()), {**state.params, **state.buffers})
    donated = ll.make_train_step(grad_fn, SGD, donate=True)
    other, _ = donated(donated(other, x)[0], x)
    state, _ = step(step(state, x)[0], x)
    torch.testing.assert_close(dict(state.params), dict(other.params))


@both_steps
def test_a_step_in_inference_mode_is_named_and_states_made_there_are_trained(donate):
    model, optimizer = nn.Linear(3, 1), ll.optimizer(torch.optim.Adam, lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(model, mean_output), optimizer, donate=donate)
    x = torch.ones(2, 3)
    with torch.inference_mode():
        state = ll.init_state(model, optimizer)
        with pytest.raises(ValueError, match="inference_mode"):
            step(state, x)
        copied = ll.copy_state(state)
        bound = ll.bind(model, ll.copy_state(state))
    for each in (copied, bound):
        assert step(each, x)[0].step == 1


def test_bind_copies_the_values_into_the_module():
    model, state = made()
    kept = ll.copy_state(state)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    bound = ll.bind(model, kept)
    for name, parameter in model.named_parameters():
        assert bound.params[name] is parameter
        assert torch.equal(parameter, kept.params[name])
    for name, buffer in model.named_buffers():
        assert bound.buffers[name] is buffer
        assert torch.equal(buffer, kept.buffers[name])
    assert ll.bind(model, bound) is bound
    ours = {id(leaf) for leaf in pytree.tree_leaves(bound)}
    assert not any(id(leaf) in ours for leaf in pytree.tree_leaves(kept) if isinstance(leaf, torch.Tensor))


def training(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    trained = options.pop("trainable", None)
    optimizer = adamw(0.1)
    grad_fn = ll.make_grad_fn(model, mean_square, trainable=trained)
    return make_train_step(grad_fn, optimizer, **options), ll.init_state(model, optimizer)


def halved(state, name="0.weight"):
    return state.replace(params={**state.params, name: state.params[name] * 0.5})


@pytest.mark.parametrize(
    "options",
    [{}, {"donate": True}, {"compile": {"backend": "eager"}}, {"trainable": lambda name, _: name[0] == "1"}],
    ids=["pure", "donated", "compiled", "trainable"],
)
def test_a_step_refuses_parameters_with_a_graph_behind_them(options):
    # torch, too, refuses to optimize what is no leaf.
    step, state = training(**options)
    x = torch.ones(4, 3)
    state, _ = step(state, x)
    for name in ("0.weight", "1.bias"):
        with pytest.raises(
            ValueError, match=rf"the parameter {name} .* \(MulBackward0\): compute it under torch.no_grad"
        ):
            step(halved(state, name), x)
    with torch.no_grad():
        changed = halved(state)
    by_hand = ll.copy_state(state)
    by_hand.params["0.weight"].data.mul_(0.5)
    expected, _ = step(by_hand, x)
    after, _ = step(changed, x)
    assert equal(after.params, expected.params)
    assert all(tensor.grad_fn is None for tensor in after.params.values())


def test_a_stack_with_a_graph_behind_it_is_refused_and_the_refused_state_is_good():
    step, state = training()
    stack = ll.transforms.stack_states([state, state], same_seeds=True)
    leaves = {name: tensor.requires_grad_() for name, tensor in stack.params.items()}
    with pytest.raises(ValueError, match=r"the parameter 0.weight .* ll.transforms.differentiable\(train_step\)"):
        ll.vmap_step(step)(halved(stack.replace(params=leaves)), torch.ones(4, 3))
    donated, state = training(donate=True)
    with pytest.raises(ValueError, match=r"the parameter 0\.weight"):
        donated(halved(state), torch.ones(4, 3))
    after, _ = donated(state, torch.ones(4, 3))
    assert after.step == 1


def test_end_epoch_is_for_streams():
    ended = ll.state.end_epoch(ll.TrainState(epoch=2, batch=7, samples=32, batch_samples=4))
    assert (ended.epoch, ended.batch, ended.samples) == (3, 0, 32)
    assert not ll.predicates.every_n_samples(32)(ended)  # no batch was consumed
    with pytest.raises(ValueError, match=r"epoch_length=10, so train_step ends its epochs"):
        ll.state.end_epoch(made()[1])
    with pytest.raises(TypeError, match=r"seed is a float; give an int"):
        ll.init_state(nn.Linear(2, 1), seed=0.5)
    with pytest.raises(ValueError, match=r"epoch_length is 0; an epoch has 1 batch or more"):
        ll.init_state(nn.Linear(1, 1), epoch_length=0)


def test_each_member_of_a_stack_gets_the_stream_that_it_gets_alone():
    states = [ll.TrainState(seed=seed) for seed in (3, 5)]
    folded = ll.state.fold_in(ll.transforms.stack_states(states), 7)
    assert folded.seed == tuple(ll.state.fold_in(state, 7).seed for state in states)


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def fields_over(model, state, optimizer, data, donate):
    """All fields of a state but the record of its run, with numbers in place of tensors: before the first step, and after each."""
    step = make_train_step(ll.make_grad_fn(model, mean_square), optimizer, donate=donate)
    for batch in (None, *data):
        if batch is not None:
            state, _ = step(state, batch)
        fields = {
            field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "run"
        }
        yield pytree.tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, fields)


@both_steps
def test_a_fresh_run_is_that_of_a_new_module_with_these_weights(donate):
    model, copied, data = network(0), network(1), torch.randn(5, 8, 3, generator=torch.Generator().manual_seed(0))
    model[0].bias.requires_grad_(False)
    copied[0].bias.requires_grad_(False)
    first, second = SGD, ll.chain(adamw(lambda step: 0.1 / (step + 1)), ll.ema(0.9))
    state = ll.init_state(model, first, seed=3, epoch_length=2, extra={"best": 0.5})
    step = make_train_step(ll.make_grad_fn(model, mean_square), first, donate=donate)
    for batch in data:
        state, _ = step(state, batch)
    state = state.replace(no_batch=True, batch_steps=0)
    copied.load_state_dict({**state.params, **state.buffers})
    fresh = ll.state.fresh(state, second, seed=7)
    expected = ll.init_state(copied, second, seed=7, epoch_length=2)
    assert [*fields_over(model, fresh, second, data, donate)] == [
        *fields_over(copied, expected, second, data, donate)
    ]


def test_a_fresh_run_takes_the_parameters_that_are_chosen_and_refuses_what_cannot_begin():
    _, state = made()
    chosen = {name: tensor if name == "0.bias" else tensor.detach() for name, tensor in state.params.items()}
    begun = ll.state.fresh(state.replace(params=chosen), adamw(0.1), seed=1, extra=[1])
    assert [*begun.opt_state["AdamW"]["state"]] == ["0.bias"]
    assert begun.extra == [1]
    assert ll.state.fresh(state, seed=1).opt_state is None
    frozen = state.replace(params={name: tensor.detach() for name, tensor in state.params.items()})
    stack = ll.transforms.stack_states([state, ll.state.fold_in(state, 1)])
    with pytest.raises(ValueError, match="no parameter of this state is trainable: none requires a gradient"):
        ll.state.fresh(frozen, SGD, seed=1)
    with pytest.raises(ValueError, match="this state is a stack"):
        ll.state.fresh(stack, SGD, seed=1)
    with pytest.raises(TypeError, match="seed is a float; give an int"):
        ll.state.fresh(state, SGD, seed=0.5)
    with pytest.raises(TypeError, match=r"state is a tuple.*ll\.state\.fresh\(state, optimizer"):
        ll.state.fresh((state, {}), SGD, seed=1)  # what a step returns


def test_a_checkpoint_of_a_fresh_run_is_described_by_its_optimizer(tmp_path):
    model, state = made()
    begun = ll.state.fresh(state.replace(step=9), SGD, seed=1)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(begun)
    with pytest.warns(UserWarning, match=r"optimizer SGD lr was 0.1, is 0.2"):
        ckpt.restore(ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.2), seed=1, epoch_length=10), quiet=True)


def test_a_fresh_run_begins_from_averages_of_a_partition():
    model, raw, x = nn.ModuleDict({"q": nn.Linear(3, 2), "pi": nn.Linear(2, 2)}), nn.Linear(3, 2), torch.ones(4, 3)
    averaging = ll.optim.partition(
        {"q": ll.chain(SGD, ll.ema(0.9)), "pi": SGD}, lambda name, tensor: name.split(".")[0]
    )
    grad_fn = ll.make_grad_fn(model, lambda model, x: model["pi"](model["q"](x)).square().mean())
    state = ll.init_state(model, averaging)
    raw.load_state_dict(model["q"].state_dict())
    for _ in range(3):
        state, _ = make_train_step(grad_fn, averaging)(state, x)
        for slow, fast in zip(raw.parameters(), ("q.weight", "q.bias"), strict=True):
            slow.data.lerp_(state.params[fast].detach(), 1 - 0.9)
    averages = ll.eval_state(averaging, state)
    begun = ll.state.fresh(ll.bind(model, averages), SGD, seed=1)
    assert torch.equal(begun.params["q.weight"], raw.weight)
    before = {name: tensor.detach().clone() for name, tensor in begun.params.items()}
    trained, _ = make_train_step(grad_fn, SGD)(begun, x)
    assert not any(torch.equal(trained.params[name], tensor) for name, tensor in before.items())
    alone = averages.replace(params={name: averages.params[name] for name in ("q.weight", "q.bias")})
    with pytest.raises(ValueError, match=r"Averages require none.*ll\.bind\(model, ll\.eval_state"):
        ll.state.fresh(alone, SGD, seed=1)


@pytest.mark.parametrize("known", [True, False], ids=["loader", "epoch_length"])
def test_a_fresh_run_over_other_batches_is_continued_in_these(tmp_path, known):
    data = torch.arange(64.0)[:, None]
    first, second = (ll.make_loader(data, batch_size=size) for size in (16, 8))
    model = nn.Linear(1, 1)
    step, state = make_train_step(ll.make_grad_fn(model, mean_square), SGD), ll.init_state(model, SGD, loader=first)
    for batch in first(state):
        state, _ = step(state, batch)
    state = ll.state.fresh(state, SGD, seed=0, loader=second if known else None)
    state = state if known else state.replace(epoch_length=len(second))
    assert state.epoch_length == 8
    seen, ckpt = [], ll.checkpoint_io(tmp_path)
    for batch in second(state):
        seen, (state, _) = seen + batch.flatten().tolist(), step(state, batch)
        if state.step == 3:
            ckpt.save(state)
            break
    restored = ckpt.restore(ll.init_state(model, SGD, loader=second), quiet=True)
    assert (restored.batch, restored.samples) == (3, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if known else "ignore")
        for batch in second(restored):
            seen += batch.flatten().tolist()
    assert sorted(seen) == data.flatten().tolist()
    assert seen == torch.cat([*second(ll.init_state(model, SGD, loader=second))]).flatten().tolist()
    with pytest.raises(TypeError, match=r"loader is a Tensor; give what ll.make_loader returns"):
        ll.state.fresh(state, SGD, seed=0, loader=data)


def test_with_extra_changes_entries_of_a_dict():
    state = ll.TrainState(step=2, extra={"kept": 1, "changed": 2})
    changed = state.with_extra(changed=3, added=4)
    assert changed.extra == {"kept": 1, "changed": 3, "added": 4}
    assert (changed.step, state.extra) == (2, {"kept": 1, "changed": 2})
    assert ll.TrainState().with_extra(added=4).extra == {"added": 4}
    for extra in ([1], (1,), torch.ones(2), 0, ""):
        with pytest.raises(TypeError, match=f"the state's extra is a {type(extra).__name__}: "):
            ll.TrainState(extra=extra).with_extra(added=4)


def shares_memory(kind):
    model = nn.Module()
    memory = torch.randn(6, 4)
    halves = {
        "whole": (memory, memory),
        "rows": (memory[:4], memory[3:]),
        "other numbers": (memory, memory.view(torch.int32)),
        "apart": (memory[:3], memory[3:]),
        "columns apart": (memory[:, :2], memory[:, 2:]),
        "expanded apart": (memory[:1, :1].expand(3, 3), memory[1:]),
    }[kind]
    model.one = nn.Parameter(halves[0])
    if halves[1].is_floating_point():
        model.other = nn.Parameter(halves[1])
    else:
        model.register_buffer("other", halves[1])
    return model


@pytest.mark.parametrize("kind", ["whole", "rows", "columns apart", "other numbers"])
def test_parameters_that_share_memory_are_refused(kind):
    model = shares_memory(kind)
    with pytest.raises(ValueError, match=r"(one and other|other and one) are two tensors that share memory"):
        ll.init_state(model, SGD)
    ll.init_state(model)  # to evaluate
    model.other.requires_grad_(False)
    with pytest.raises(ValueError, match=r"share memory"):
        ll.init_state(model, SGD)


@pytest.mark.parametrize(
    "keep",
    [
        lambda params: [zeros := torch.zeros(2), zeros[:1]],
        lambda params: dict.fromkeys("mv", torch.zeros(2)),
        lambda params: params["weight"],
    ],
)
def test_an_optimizer_that_keeps_one_memory_twice_is_refused(keep):
    optimizer = ll.optim.part("kept", init=keep, update_=lambda grads, state, params, step: (params, state))
    with pytest.raises(ValueError, match=r"opt_state\S* are two tensors that share memory.*an optimizer's init"):
        ll.init_state(nn.Linear(2, 1), optimizer)


def test_parameters_that_share_memory_may_be_frozen():
    model = shares_memory("rows")
    model.requires_grad_(False)
    model.head = nn.Linear(2, 1)
    state = ll.init_state(model, SGD)
    assert {"one", "other"} < state.params.keys()


@pytest.mark.parametrize("kind", ["apart", "expanded apart"])
def test_parameters_in_separate_ranges_of_one_storage_are_accepted(kind):
    assert ll.init_state(shares_memory(kind), SGD).step == 0


def test_a_tensor_under_two_names_is_one_parameter():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert list(ll.init_state(model, SGD).params) == [
        "0.weight",
        "0.bias",
        "1.bias",
    ]


def test_what_does_not_fit_is_refused_before_anything_is_copied():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = ll.copy_state(ll.init_state(model))
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with torch.no_grad():
        state.params["0.weight"].add_(1)
    with pytest.raises(ValueError, match="buffers are not those of"):
        ll.bind(model, state.replace(buffers={}))
    assert all(map(torch.equal, before, model.state_dict().values()))


@pytest.mark.parametrize("make", [ll.make_eval_step, ll.make_predict_step])
def test_a_step_refuses_a_state_without_the_models_buffers(make):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    step = make(model, lambda model, x: {"loss": model(x).mean()})
    with pytest.raises(ValueError, match="buffers are not those of"):
        step(ll.init_state(model).replace(buffers={}), torch.ones(4, 3))
