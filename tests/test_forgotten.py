"""Warnings for common mistakes with pure steps: a forgotten `state =`, and saving the module without `ll.bind`."""

import copy
import io
import pickle
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import looplib as ll

SAME = "the same state 10 times in a row"
STALE = "still has the weights of before training"


class Run:
    """A small run: a module, its loader of 12 batches, and how to make steps."""

    def __init__(self, **options):
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
        self.grad_fn = ll.make_grad_fn(self.model, lambda model, x: model(x).square().mean())
        self.loader = ll.make_loader(torch.randn(24, 4), batch_size=2)
        self.state = ll.init_state(self.model, self.optimizer, epoch_length=12)
        self.step = self.make_step(**options)

    def make_step(self, **options):
        return ll.make_train_step(ll.clip_by_global_norm(self.grad_fn, 1.0), self.optimizer, **options)

    def train(self, state=None, step=None):
        state = self.state if state is None else state
        for batch in self.loader(state):
            state, _ = (step or self.step)(state, batch)
        return state


# The state that a step returns.


@pytest.mark.parametrize(
    "transform", [lambda step: step, partial(ll.compile_step, backend="eager")], ids=["eager", "graph"]
)
def test_a_loop_without_state_is_warned_of_once(transform):
    run = Run()
    step, state = transform(run.step), run.state
    for epoch in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in run.loader(state):
                _ = step(state, batch)
        assert [SAME in str(warning.message) for warning in caught] == [True] * (epoch == 0)
        if caught:
            assert caught[0].filename == __file__
            assert "stays at step 0" in str(caught[0].message)


def test_loops_forks_replays_and_benchmarks_are_not_warned_of():
    run = Run()
    start = run.state
    batches = list(run.loader(start))
    for _ in range(12):
        run.step(start, batches[0])  # a benchmark
    for _ in range(3):  # forks of a state
        run.train(start)
    for batch in batches[:8]:  # one step on each of a few batches
        run.step(start, batch)
    members = [start] * 12
    for batch in batches:  # a population, by one step
        members = [run.step(member, batch)[0] for member in members]


def test_states_at_the_address_of_the_last_one_are_not_taken_for_it():
    run = Run()
    state = run.state
    for batch in run.loader(state):
        state = run.step(state, batch)[0]
        state = state.replace(extra=None)  # may stand where the state before the step stood
    state = run.state
    for batch in run.loader(state):
        state = run.step(state, batch)[0].replace(step=0)  # the count of samples moves on


def test_new_states_at_step_0_are_not_taken_for_one():
    run = Run()
    for batch in run.loader(run.state):
        state = ll.init_state(run.model, run.optimizer)  # stands where the last one stood
        state, _ = run.step(state, batch)


# The weights in the module.


def saved_weights(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def test_saving_the_module_of_a_pure_run_is_warned_of_once():
    run = Run()
    run.model.state_dict()
    state = run.train()
    with pytest.warns(UserWarning, match=STALE) as caught:
        weights = saved_weights(run.model)
    assert caught[0].filename == __file__
    assert not torch.equal(weights["0.weight"], state.params["0.weight"])
    run.model.state_dict()


def test_save_pretrained_after_a_pure_run_is_warned_of(tmp_path):
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    model, optimizer = BertModel(config, add_pooling_layer=False).train(), ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, ids: model(ids).last_hidden_state.sum(), allow_unused=True)
    state, _ = ll.make_train_step(grad_fn, optimizer)(ll.init_state(model, optimizer), torch.ones(2, 3).long())
    ll.checkpoint.save_pretrained(model, state, tmp_path / "right")
    with pytest.warns(UserWarning, match=STALE):
        model.save_pretrained(tmp_path / "wrong")


def test_calling_the_module_of_a_pure_run_is_warned_of_once():
    run = Run()
    run.model(torch.ones(2, 4))
    run.train()
    with pytest.warns(UserWarning, match=STALE) as caught:
        run.model(torch.ones(2, 4))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert all(name in str(caught[0].message) for name in ("make_predict_step", "ll.bind(model, state)"))
    run.model(torch.ones(2, 4))
    run.model.state_dict()


def test_a_module_that_is_bound_and_trained_on_by_pure_steps_is_warned_of():
    run = Run()
    state = ll.bind(run.model, run.train())
    run.model(torch.ones(2, 4))
    run.train(state)
    with pytest.warns(UserWarning, match=STALE):
        run.model(torch.ones(2, 4))


def called_with_a_state(run, state, folder):
    eval_step = ll.make_eval_step(run.model, lambda model, x: {"loss": model(x).square().mean()})
    for each in (run.state, state):  # the first one has the module's own weights
        eval_step(each, torch.ones(2, 4))
        run.grad_fn(each, torch.ones(2, 4))
        run.step(each, torch.ones(2, 4))
    torch.func.functional_call(run.model, {**state.params, **state.buffers}, torch.ones(2, 4))


def saved_by_looplib(run, state, folder):
    ll.checkpoint_io(folder / "checkpoints").save(state)
    ll.checkpoint.save_safetensors(run.model, state, folder / "model.safetensors")
    for each in (state, run.state):  # the first one has the module's own weights
        ll.checkpoint.state_dict(run.model, each)


def bound_to_the_module(run, state, folder):
    ll.bind(run.model, state)
    run.model.state_dict()
    run.model(torch.ones(2, 4))
    assert not run.model._state_dict_pre_hooks
    assert not run.model._forward_pre_hooks


def copied_into_the_module(run, state, folder):
    for name, parameter in run.model.named_parameters():
        parameter.data = state.params[name]
    run.model.state_dict()


def loaded_by_torch(run, state, folder):
    run.model.load_state_dict({**state.params, **state.buffers})
    run.model(torch.ones(2, 4))
    run.model.state_dict()


def test_an_inner_step_of_meta_learning_says_nothing_about_the_module():
    model, optimizer = nn.Linear(3, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    state = ll.init_state(model, optimizer)
    ll.transforms.differentiable(step)(ll.copy_state(state), torch.ones(2, 3))
    torch.func.functional_call(model, state.params, torch.ones(2, 3))  # the module's own


def set_to_its_first_weights(run, state, folder):
    first = {name: tensor.detach().clone() for name, tensor in run.model.named_parameters()}
    run.model.load_state_dict(first, strict=False)
    run.model(torch.ones(2, 4))


def trained_by_donation(run, state, folder):
    run.train(run.state, run.make_step(donate=True))
    run.model(torch.ones(2, 4))
    run.model.state_dict()


@pytest.mark.parametrize(
    "use",
    [
        called_with_a_state,
        saved_by_looplib,
        bound_to_the_module,
        copied_into_the_module,
        loaded_by_torch,
        set_to_its_first_weights,
        trained_by_donation,
    ],
)
def test_weights_that_were_put_into_the_module_are_not_warned_of(use, tmp_path):
    run = Run()
    use(run, run.train(), tmp_path)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_trains_without_the_warning():
    model, optimizer = torch.jit.script(nn.Linear(4, 1)), ll.optimizer(torch.optim.SGD, lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    state, _ = step(ll.init_state(model, optimizer), torch.randn(2, 4))
    assert state.step == 1
    model.state_dict()


def test_a_module_of_a_pure_run_is_copied_and_pickled_as_any_other():
    run = Run()
    run.train()
    for model in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        model.state_dict()
        assert model(torch.ones(2, 4)).shape == (2, 1)
    file = io.BytesIO()
    torch.save(run.model, file)
    code = (
        "import io, sys, torch; sys.modules['looplib'] = None; file = io.BytesIO(sys.stdin.buffer.read()); "
        "model = torch.load(file, weights_only=False); "
        "print(len(model.state_dict()), len(model(torch.ones(2, 4))))"
    )
    out = subprocess.run([sys.executable, "-c", code], input=file.getvalue(), capture_output=True, check=True)
    assert out.stdout == b"9 2\n"
