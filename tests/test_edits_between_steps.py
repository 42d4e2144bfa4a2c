"""Edits of a module between two steps: they count as in a raw loop, or are named."""

import copy
import warnings
from functools import partial

import pytest
import torch
from shared import SGD, both_states, both_steps, one_report
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters

import looplib as ll

BATCHES = torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(1))
X = BATCHES[0]


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))


def loss_fn(model, x):
    return (model(x) - 1).square().mean()


def begin(donate=False, bound=True, model=None):
    model = net() if model is None else model
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD, donate=donate)
    state = ll.init_state(model, SGD)
    return model, step, state if bound else ll.copy_state(state)


# Parameters and layers that are replaced


def tied(model):
    model[2].weight = model[0].weight


def replaced(model):
    model[2].weight = nn.Parameter(torch.zeros(4, 4))


def assigned(model):
    model.load_state_dict(net(seed=2).state_dict(), assign=True)


def appended(model):
    model.append(nn.Linear(4, 4))


def frozen_layer_swapped(model):
    model[0] = nn.Linear(4, 4).requires_grad_(False)


def without_bias(model):
    model[0].bias = None


def with_spectral_norm(model):
    parametrizations.spectral_norm(model[0])


def pruned(model):
    prune.l1_unstructured(model[0], "weight", amount=0.5)


OTHER_TENSORS = {tied: "2.weight", replaced: "2.weight", assigned: "0.weight"}
OTHER_LAYERS = [appended, frozen_layer_swapped, without_bias, with_spectral_norm, pruned]


@one_report
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("edit", OTHER_TENSORS)
@both_steps
def test_parameters_that_are_replaced_after_init_state_are_named(donate, edit, steps):
    model, step, state = begin(donate)
    for x in BATCHES[:steps]:
        state, _ = step(state, x)
    edit(model)
    with pytest.raises(ValueError, match=rf"{OTHER_TENSORS[edit]}.* is another tensor than when the state was made"):
        step(state, X)
    _ = state.params  # it is not spent
    model, step, state = begin(donate, model=model)
    step(state, X)


@one_report
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("edit", OTHER_LAYERS)
@both_steps
def test_layers_and_parametrizations_that_are_added_later_are_named(donate, edit, steps):
    model, step, state = begin(donate)
    for x in BATCHES[:steps]:
        state, _ = step(state, x)
    edit(model)
    with pytest.raises(
        ValueError, match="layers or parameters of the model were replaced or added after make_grad_fn"
    ):
        step(state, X)
    model, step, state = begin(donate, model=model)
    step(state, X)


def stacked(state):
    return ll.transforms.stack_states([state, ll.state.fold_in(state, 1)])


# What is made of the eager step and of its state; True for a donated step.
WAYS = {
    "compiled": (False, partial(ll.compile_step, backend="eager"), lambda state: state),
    "compiled, donated": (True, partial(ll.compile_step, backend="eager"), lambda state: state),
    "stack": (False, ll.vmap_step, stacked),
    "compiled stack, donated": (True, lambda step: ll.compile_step(ll.vmap_step(step), backend="eager"), stacked),
    "differentiable": (False, ll.transforms.differentiable, lambda state: state),
}


@one_report
@pytest.mark.parametrize("edit", [tied, replaced])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_replaced_before_the_first_step_in_any_way_are_named(way, edit):
    donate, made, given = WAYS[way]
    model, step, state = begin(donate)
    step, state = made(step), given(state)
    edit(model)
    with pytest.raises(ValueError, match=rf"{OTHER_TENSORS[edit]}.* is another tensor than when the state was made"):
        step(state, X)
    _ = state.params  # it is not spent


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.hardest) if way == "compiled, donated" else way for way in WAYS]
)
def test_a_state_that_is_made_after_a_change_before_the_first_step_is_fine_in_any_way(way):
    donate, made, given = WAYS[way]
    model, step, _ = begin(donate)
    replaced(model)
    raw = copy.deepcopy(model)
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
    loss_fn(raw, X).backward()
    sgd.step()
    state, _ = made(step)(given(ll.init_state(model, SGD)), X)
    for name, tensor in raw.named_parameters():  # of the first member of a stack
        torch.testing.assert_close(state.params[name].reshape(-1, *tensor.shape)[0].detach(), tensor.detach())


@one_report
@pytest.mark.parametrize(
    "step_of",
    [
        lambda model: ll.make_predict_step(model, lambda model, x: model(x)),
        lambda model: ll.compile_step(ll.make_predict_step(model, lambda model, x: model(x)), backend="eager"),
        lambda model: ll.contrib.make_per_sample_grad_fn(model, loss_fn),
        lambda model: ll.contrib.make_contrastive_grad_fn(model, lambda m, x: m(x), torch.mean, microbatches=2),
    ],
    ids=["predictions", "compiled predictions", "per-sample gradients", "contrastive gradients"],
)
def test_parameters_that_are_replaced_before_the_first_call_of_other_functions_are_named(step_of):
    model = net()[:3]
    call, state = step_of(model), ll.init_state(model)
    replaced(model)
    with pytest.raises(
        ValueError, match=r"2\.weight of the Sequential is another tensor than when the state was made"
    ):
        call(state, X)


def test_an_embedding_that_runs_on_a_copy_and_is_replaced_before_the_first_step_is_named():
    model = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD)
    state = ll.init_state(model, SGD)
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"0\.weight of the Sequential is another tensor"):
        step(state, torch.arange(4))


def test_a_copy_of_a_state_is_trained_before_the_first_step_whatever_the_module_holds():
    model, step, state = begin(bound=False)
    raw = net()
    replaced(model)
    state, _ = step(state, X)
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
    loss_fn(raw, X).backward()
    sgd.step()
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))


def test_a_copy_of_a_state_does_not_fit_a_model_whose_weights_were_tied_since():
    model, step, state = begin(bound=False)
    tied(model)
    with pytest.raises(ValueError, match=r"not those of this Sequential: .*unexpected \['2\.weight'\]"):
        step(state, X)


def test_a_stack_of_other_weights_does_not_fit_a_model_whose_weights_were_tied_since():
    model, step, state = begin(model=net()[:3])
    stack = stacked(state)
    stack = stack.replace(params={name: tensor.detach() + 1 for name, tensor in stack.params.items()})
    tied(model)
    with pytest.raises(ValueError, match=r"not those of this Sequential: .*unexpected \['2\.weight'\]"):
        ll.vmap_step(step)(stack, X)


def test_members_whose_weights_a_model_was_given_one_after_another_are_stacked():
    model, step, _ = begin(model=net()[:3])
    members = []
    for seed in (0, 1):  # the first member has the weights that the model had first
        model.load_state_dict(net(seed)[:3].state_dict(), assign=True)
        members.append(ll.init_state(model, SGD, seed=seed))
    stack, _ = ll.vmap_step(step)(ll.transforms.stack_states(members), X)
    for seed, member in enumerate(ll.transforms.unstack_states(stack)):
        _, alone, state = begin(model=net(seed)[:3])
        expected, _ = alone(state, X)
        torch.testing.assert_close(dict(member.params), dict(expected.params))


def test_a_layer_that_is_added_before_a_prediction_is_part_of_a_state_made_after_it():
    model = net()[:1]
    predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    appended(model)
    expected = model(X).detach()
    assert torch.equal(predict_step(ll.copy_state(ll.init_state(model)), X), expected)


@pytest.mark.parametrize("edit", OTHER_TENSORS)
@both_steps
def test_parameters_that_are_replaced_after_a_step_was_compiled_are_named(donate, edit):
    model, step, state = begin(donate)
    step = ll.compile_step(step, backend="eager")
    for x in BATCHES[:2]:
        state, _ = step(state, x)
    edit(model)
    with (
        pytest.warns(UserWarning, match="the parameters of Sequential changed since the step was compiled"),
        pytest.raises(ValueError, match=rf"{OTHER_TENSORS[edit]}.* is another tensor than when the state was made"),
    ):
        step(state, X)
    _ = state.params  # it is not spent


@pytest.mark.parametrize("edit", [replaced])
def test_compiled_predictions_with_the_old_tensors_are_refused(edit):
    model, _, state = begin()
    predict_step = ll.compile_step(ll.make_predict_step(model, lambda model, x: model(x)), backend="eager")
    predict_step(state, X)
    edit(model)
    with (
        pytest.warns(UserWarning, match="the parameters of Sequential changed"),
        pytest.raises(ValueError, match="is another tensor than when the state was made"),
    ):
        predict_step(state, X)


@pytest.mark.parametrize("edit", [frozen_layer_swapped, appended])
@both_steps
def test_layers_that_are_replaced_after_a_step_was_compiled_are_named(donate, edit):
    model, step, state = begin(donate)
    step = ll.compile_step(step, backend="eager")
    state, _ = step(state, X)
    edit(model)
    with (
        pytest.warns(UserWarning, match="the layers of Sequential changed since the step was compiled"),
        pytest.raises(ValueError, match="replaced or added after make_grad_fn"),
    ):
        step(state, X)


@pytest.mark.every_case
@pytest.mark.parametrize("edit", [tied, replaced, assigned, frozen_layer_swapped])
def test_predictions_with_the_old_tensors_are_refused(edit):
    model, _, state = begin()
    predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    predict_step(state, X)
    edit(model)
    with pytest.raises(ValueError, match="is another tensor than when the state was made"):
        predict_step(state, X)


@both_states
@both_steps
def test_a_state_that_is_made_after_the_change_is_fine(donate, bound):
    model = net()
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD, donate=donate)
    assigned(model)
    state = ll.init_state(model, SGD)
    state = state if bound else ll.copy_state(state)
    raw = copy.deepcopy(model)
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
    for x in BATCHES:
        state, _ = step(state, x)
        sgd.zero_grad()
        loss_fn(raw, x).backward()
        sgd.step()
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))
    assigned(model)
    state = ll.bind(model, state) if not donate else ll.init_state(model, SGD)
    for x in BATCHES:
        state, _ = step(state, x)


def test_the_same_module_may_run_on_another_state_within_the_loss():
    model = net()
    teacher_step = ll.make_predict_step(model, lambda model, x: model(x))
    teacher = ll.copy_state(ll.init_state(model))

    def distilled(model, x):
        return (model(x) - teacher_step(teacher, x)).square().mean()

    for donate in (False, True):
        step, state = (
            ll.make_train_step(ll.make_grad_fn(model, distilled), SGD, donate=donate),
            ll.init_state(model, SGD),
        )
        for x in BATCHES:
            state, _ = step(state, x)
        assert state.step == len(BATCHES)


class Pooled(nn.Module):
    """Replaces a layer without parameters in each forward pass, as published models do."""

    def __init__(self):
        super().__init__()
        self.linear, self.pool = nn.Linear(4, 4), nn.Identity()

    def forward(self, x):
        self.pool = nn.AvgPool1d(2)
        return self.pool(self.linear(x))


@both_steps
def test_layers_without_parameters_may_be_replaced(donate):
    for transform in (lambda step: step, lambda step: ll.compile_step(step, backend="eager")):
        _, step, state = begin(donate, model=Pooled())
        step = transform(step)
        for x in BATCHES:
            state, _ = step(state, x)
        assert state.step == len(BATCHES)


# Values that are written into the module


def clipped(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def perturbed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.ones_like(parameter), alpha=0.1)


def reset(model):
    model[2].reset_parameters()


def loaded(model):
    model.load_state_dict(net(seed=2).state_dict())


def from_a_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def in_another_dtype(model):
    model.bfloat16()


EDITS = [clipped, perturbed, reset, loaded, from_a_vector]


def raw_run(edit):
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in BATCHES:
        sgd.zero_grad()
        loss_fn(model, x).backward()
        sgd.step()
        torch.manual_seed(3)
        edit(model)
    return dict(model.named_parameters())


@pytest.mark.every_case
@pytest.mark.parametrize("edit", EDITS)
def test_a_donated_step_on_a_bound_state_trains_what_is_written_into_the_module(edit):
    model, step, state = begin(donate=True)
    for x in BATCHES:
        state, _ = step(state, x)
        torch.manual_seed(3)
        edit(model)
    torch.testing.assert_close(dict(state.params), raw_run(edit))


@pytest.mark.slow
@one_report
@pytest.mark.parametrize(("donate", "bound"), [(False, True), (False, False), (True, False)])
@pytest.mark.parametrize("edit", [*EDITS, in_another_dtype])
def test_writes_into_a_module_that_the_steps_do_not_train_are_warned_of_once(edit, donate, bound):
    model, step, state = begin(donate, bound)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in BATCHES:
            state, _ = step(state, x)
            edit(model)
    assert len(caught) == 1
    assert "which has no effect" in str(caught[0].message)
    assert "state.replace(params=" in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("edit", [perturbed, clipped])
def test_a_critic_that_is_written_is_warned_of_once(edit):
    critic, critic_step, critic_state = begin()
    generator = nn.Linear(4, 4)
    generator_step = ll.make_train_step(ll.make_grad_fn(generator, lambda model, x: critic(model(x)).mean()), SGD)
    generator_state = ll.init_state(generator, SGD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in BATCHES:
            critic_state, _ = critic_step(critic_state, x)
            edit(critic)
            generator_state, _ = generator_step(generator_state, x)
    assert len(caught) == 1
    assert "which has no effect" in str(caught[0].message) or "hand this one's state.params on" in str(
        caught[0].message
    )


def copied(model, state):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state.params[name])


def loaded_with_buffers(model, state):
    model.load_state_dict({**state.params, **state.buffers})


def average_evaluated(model, state):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state.params[name] * 0.5)
    model(X)


def called_with_its_params(model, state):
    torch.func.functional_call(model, state.params, X)


def bound_to_the_module(model, state):
    ll.bind(model, ll.copy_state(state))


@pytest.mark.every_case
@pytest.mark.parametrize(
    "use", [copied, loaded_with_buffers, average_evaluated, called_with_its_params, bound_to_the_module]
)
def test_writes_that_serve_the_module_are_not_warned_of(use):
    model, step, state = begin(bound=False)
    for x in BATCHES:
        state, _ = step(state, x)
        use(model, state)


def test_members_and_runs_of_one_module_are_not_warned_of():
    model, step, _ = begin()
    members = []
    for seed in range(3):
        model.load_state_dict(net(seed).state_dict())
        members.append(ll.copy_state(ll.init_state(model, SGD, seed=seed)))
    for x in BATCHES:
        members = [step(member, x)[0] for member in members]
    for seed in range(3):
        model.load_state_dict(net(seed).state_dict())
        state = ll.copy_state(ll.init_state(model, SGD))
        for x in BATCHES:
            state, _ = step(state, x)
    donated = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD, donate=True)
    state = ll.init_state(model, SGD)
    for number, x in enumerate(BATCHES):
        state, _ = (donated if number % 2 else step)(state, x)


def test_saving_a_module_that_a_run_on_a_copy_left_behind_warns():
    model, step, state = begin(donate=True, bound=False)
    for x in BATCHES:
        state, _ = step(state, x)
    assert not torch.equal(model[0].weight, state.params["0.weight"])
    with pytest.warns(UserWarning, match=r"still has the weights of before training.*not bound"):
        model.state_dict()
    ll.bind(model, state)
    torch.testing.assert_close(model.state_dict()["0.weight"], state.params["0.weight"].detach())


def test_a_trial_on_a_copy_of_a_run_says_nothing_about_its_module():
    model, step, state = begin(donate=True)
    for x in BATCHES:
        state, _ = step(state, x)
    trial = ll.copy_state(state)
    for x in BATCHES:
        trial, _ = step(trial, x)
    torch.testing.assert_close(model.state_dict()["0.weight"], state.params["0.weight"].detach())


def cut(state):
    return state.replace(params={name: param.detach().clamp(-0.01, 0.01) for name, param in state.params.items()})


def cut_in_part(state):
    return state.replace(params={**state.params, "0.weight": torch.zeros(4, 4)})


@pytest.mark.every_case
@pytest.mark.parametrize("trial", [False, True])
@pytest.mark.parametrize("edit", [cut, cut_in_part])
def test_saving_a_module_that_a_run_left_behind_by_replace_warns(edit, trial):
    adam = ll.optimizer(torch.optim.Adam, lr=0.1)
    model = net()
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), adam, donate=True)
    state = ll.init_state(model, adam)
    for x in BATCHES:
        state, _ = step(state, x)
    if trial:
        copied = ll.copy_state(state)
        for x in BATCHES:
            copied, _ = step(copied, x)
        model.state_dict()
    state = edit(state)
    for x in BATCHES:
        state, _ = step(state, x)
    assert not torch.equal(model[0].weight, state.params["0.weight"])
    with pytest.warns(UserWarning, match=r"still has the weights of before training.*not bound") as caught:
        model.state_dict()
    model.state_dict()
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.every_case
@pytest.mark.parametrize("compiled", [False, True])
def test_a_tensor_that_is_put_into_the_params_of_a_donated_state_is_refused(compiled):
    kept = ll.copy_state(ll.init_state(net(seed=2)))
    _, step, state = begin(donate=True)
    step = ll.compile_step(step, backend="eager") if compiled else step
    for bound in (True, False):
        state = state if bound else ll.copy_state(state)
        for x in BATCHES[:2]:
            state, _ = step(state, x)
        assigned = state.params["2.weight"]
        state.params["2.weight"] = kept.params["2.weight"]  # which the next step would write over
        with pytest.raises(ValueError, match=r"state.params\['2.weight'\] is another tensor.*state.replace\(params="):
            step(state, X)
        state.params["2.weight"] = assigned
        state, _ = step(state, X)
    torch.testing.assert_close(dict(kept.params), dict(net(seed=2).named_parameters()), rtol=0, atol=0)


# Buffers


def assigned_buffer(model):
    model[3].running_mean = torch.full((4,), 5.0)


def reset_statistics(model):
    model[3].reset_running_stats()


@pytest.mark.every_case
@pytest.mark.parametrize(("donate", "bound"), [(False, True), (False, False), (True, False)])
@pytest.mark.parametrize("edit", [assigned_buffer, reset_statistics])
def test_buffers_that_are_written_in_a_module_that_the_steps_do_not_use_are_warned_of_once(edit, donate, bound):
    model, step, state = begin(donate, bound)
    mean = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in BATCHES:
            state, _ = step(state, x)
            mean.append(state.buffers["3.running_mean"])
            edit(model)
    assert [one.filename for one in caught] == [__file__]
    assert "the buffers 3.running_mean" in str(caught[0].message)
    assert "state.replace(buffers={**state.buffers, '3.running_mean': value})" in str(caught[0].message)
    _, plain_step, plain_state = begin(donate, bound)
    for x in BATCHES:
        plain_state, _ = plain_step(plain_state, x)
    assert torch.equal(plain_state.buffers["3.running_mean"], mean[-1])  # the warning is right: it has no effect


@pytest.mark.parametrize("use", ["forward", "its own values", "switched off", "caches"])
def test_buffers_that_move_for_another_reason_are_not_warned_of(use):
    model, step, state = begin(bound=False)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    state = state.replace(buffers={**state.buffers, "cache": torch.zeros(2)})
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD)
    ll.debug.warn_of_misuse(use != "switched off")
    try:
        for x in BATCHES:
            state, _ = step(state, x)
            if use == "forward":
                torch.func.functional_call(model, state.params, x)  # which moves the module's statistics
            elif use == "its own values":
                model.load_state_dict({**state.params, **{k: v for k, v in state.buffers.items() if k != "cache"}})
            elif use == "caches":
                model.cache = torch.ones(3)
            else:
                reset_statistics(model)
    finally:
        ll.debug.warn_of_misuse(True)
    assert state.step == len(BATCHES)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("edit", [assigned_buffer, nn.Module.float], ids=["assigned", "converted to its own dtype"])
def test_a_buffer_that_is_assigned_between_donated_steps_is_warned_of_once(edit, steps):
    model, step, state = begin(donate=True)
    for x in BATCHES[:steps]:
        state, _ = step(state, x)
    mean = state.buffers["3.running_mean"].clone()
    edit(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in BATCHES[:2]:
            state, _ = step(state, x)
    assert len(caught) == (edit is assigned_buffer)
    for one in caught:
        assert "3.running_mean of the Sequential is another tensor than before" in str(one.message)
        assert "copy_" in str(one.message)
    assert (state.buffers["3.running_mean"] - mean).abs().max() < 2


class Assigning(nn.Module):
    """Assigns new buffers in its forward pass, one of which is saved."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.cache = torch.zeros(len(x))
        return self.linear(x - self.mean)


@both_states
@both_steps
def test_buffers_that_the_forward_pass_assigns_are_not_warned_of(donate, bound):
    model = Assigning()
    optimizer = ll.chain(ll.skip_nonfinite(9), SGD)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    step, other = (
        ll.make_train_step(each, optimizer, donate=donate) for each in (grad_fn, ll.make_grad_fn(model, loss_fn))
    )
    state = ll.init_state(model, optimizer)
    state = state if bound else ll.copy_state(state)
    raw = Assigning()
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
    for number, x in enumerate(BATCHES):
        model.cache = torch.ones(3)
        state, _ = step(state, x * torch.inf)
        state, _ = (other if number % 2 else step)(state, x)
        sgd.zero_grad()
        loss_fn(raw, x).backward()
        sgd.step()
    assert state.step == len(BATCHES)
    torch.testing.assert_close(state.buffers["mean"], raw.mean)
    torch.testing.assert_close(state.params["linear.weight"], raw.linear.weight, check_dtype=False)
