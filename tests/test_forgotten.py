"""Warnings for common mistakes with pure steps: a forgotten `state =`, and a module that keeps its first weights."""

import copy
import io
import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch
from shared import SGD, mean_square
from torch import nn

import looplib as ll

SAME = "the same state 10 times in a row"
STALE = "still has the weights of before training"
X = torch.ones(2, 4)


class Run:
    """A small run: a module, its loader of 12 batches, and how to make steps."""

    def __init__(self, model=None):
        self.model = model or nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.optimizer = ll.chain(ll.clip_by_global_norm(1.0), SGD)
        self.grad_fn = ll.make_grad_fn(self.model, mean_square)
        self.loader = ll.make_loader(torch.randn(24, 4), batch_size=2)
        self.state = ll.init_state(self.model, self.optimizer, epoch_length=12)
        self.batches = list(self.loader(self.state))
        self.step = self.make_step()

    def make_step(self, **options):
        return ll.make_train_step(self.grad_fn, self.optimizer, **options)

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
    step = transform(run.step)
    with pytest.warns(UserWarning, match=SAME) as caught:
        outs = [step(run.state, batch) for batch in run.batches * 2]
    assert outs[-1][0].step == 1
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "stays at step 0" in str(caught[0].message)


def test_loops_forks_replays_and_benchmarks_are_not_warned_of():
    run = Run()
    start, batches = run.state, run.batches
    for _ in range(12):
        run.step(start, batches[0])  # a benchmark
    for _ in range(3):  # forks of a state
        run.train(start)
    for batch in batches[:8]:  # one step on each of a few batches
        run.step(start, batch)
    members = [start] * 12
    for batch in batches:  # a population, by one step
        members = [run.step(member, batch)[0] for member in members]
    # States at the address of the last one are not taken for it.
    state = start
    for batch in batches:
        state = run.step(state, batch)[0].replace(step=0)
    for batch in batches:
        state = ll.init_state(run.model, run.optimizer)
        state, _ = run.step(state, batch)


# The weights in the module.


def save(run, folder):
    torch.save(run.model.state_dict(), folder / "weights.pt")


def call(run, folder):
    run.model(X)


@pytest.mark.parametrize("use", [save, call])
def test_a_module_that_keeps_its_first_weights_is_warned_of_once(use, tmp_path):
    run = Run()
    use(run, tmp_path)
    state = ll.bind(run.model, run.train())
    use(run, tmp_path)
    run.train(state)  # which makes it stale again
    with pytest.warns(UserWarning, match=STALE) as caught:
        use(run, tmp_path)
    use(run, tmp_path)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "ll.bind(model, state)" in str(caught[0].message)
    assert "ll.checkpoint.state_dict" in str(caught[0].message)
    (call if use is save else save)(run, tmp_path)


def called_with_a_state(run, state, folder):
    eval_step = ll.make_eval_step(run.model, lambda model, x: {"loss": model(x).square().mean()})
    for each in (run.state, state):  # the first one has the module's own weights
        eval_step(each, X)
        run.grad_fn(each, X)
        run.step(each, X)
    torch.func.functional_call(run.model, {**state.params, **state.buffers}, X)
    with pytest.warns(UserWarning, match=STALE):  # none of which has put them into the module
        call(run, folder)


def saved_by_looplib(run, state, folder):
    ll.checkpoint_io(folder / "checkpoints").save(state)
    ll.checkpoint.save_safetensors(run.model, state, folder / "model.safetensors")
    for each in (state, run.state):  # the first one has the module's own weights
        ll.checkpoint.state_dict(run.model, each)


def bound_to_the_module(run, state, folder):
    ll.bind(run.model, state)
    assert not run.model._state_dict_pre_hooks
    assert not run.model._forward_pre_hooks
    call(run, folder)


def copied_into_the_module(run, state, folder):
    for name, parameter in run.model.named_parameters():
        parameter.data = state.params[name]
    save(run, folder)


def loaded_by_torch(run, state, folder):
    run.model.load_state_dict({**state.params, **state.buffers})
    call(run, folder)
    save(run, folder)


def set_to_its_first_weights(run, state, folder):
    first = {name: tensor.detach().clone() for name, tensor in run.model.named_parameters()}
    run.model.load_state_dict(first, strict=False)
    call(run, folder)


def trained_by_donation(run, state, folder):
    run.train(run.state, run.make_step(donate=True))
    call(run, folder)
    save(run, folder)


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


def test_a_copy_of_a_gradient_function_is_of_the_same_module():
    run = Run()
    run.grad_fn = copy.deepcopy({"grad_fn": run.grad_fn})["grad_fn"]
    run.train(step=run.make_step())
    with pytest.warns(UserWarning, match=STALE):
        run.model.state_dict()


def test_a_compiled_loss_is_not_compiled_again_for_other_modules_that_keep_their_first_weights():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    loss_fn = torch.compile(lambda model, x: model(x).square().mean(), backend=backend)

    def run(loss_fn):
        model = nn.Linear(4, 1)
        step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD)
        return step, step(ll.init_state(model, SGD), X)[0]

    step, state = run(loss_fn)
    state, _ = step(state, X)
    count, others = len(compiled), []
    for _ in range(3):
        others.append(run(mean_square))
        state, _ = step(state, X)
    assert len(compiled) == count


@pytest.mark.slow
def test_an_inner_step_of_meta_learning_says_nothing_about_the_module():
    run = Run(nn.Linear(4, 1))
    ll.transforms.differentiable(run.make_step())(ll.copy_state(run.state), X)
    torch.func.functional_call(run.model, run.state.params, X)  # the module's own


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_trains_without_the_warning():
    run = Run(torch.jit.script(nn.Linear(4, 1)))
    assert run.train().step == 12
    run.model.state_dict()


@pytest.mark.slow
def test_a_module_of_a_pure_run_is_copied_and_pickled_as_any_other():
    run = Run()
    run.train()
    for model in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        model.state_dict()
        assert model(X).shape == (2, 1)
    file = io.BytesIO()
    torch.save(run.model, file)
    code = (
        "import io, sys, torch; sys.modules['looplib'] = None; file = io.BytesIO(sys.stdin.buffer.read()); "
        "model = torch.load(file, weights_only=False); "
        "print(len(model.state_dict()), len(model(torch.ones(2, 4))))"
    )
    out = subprocess.run([sys.executable, "-c", code], input=file.getvalue(), capture_output=True, check=True)
    assert out.stdout == b"9 2\n"


# An optimizer of torch's beside the steps.


@pytest.mark.parametrize("donate", [False, True])
def test_an_optimizer_of_torchs_that_finds_no_gradients_is_warned_of_once(donate):
    run = Run()
    state, step = run.state, run.make_step(donate=donate)
    adam = torch.optim.Adam(run.model.parameters())
    before = [parameter.detach().clone() for parameter in run.model.parameters()]

    def train(state):
        for batch in run.batches:
            adam.zero_grad()
            state, _ = step(state, batch)
            adam.step()

    with pytest.warns(UserWarning, match=r"this Adam has parameters.*ll\.grads\.backward") as caught:
        train(state)
    assert [one.filename for one in caught] == [__file__]
    assert not adam.state  # the warning is right
    assert donate or all(map(torch.equal, before, run.model.parameters()))


def by_hand(run, optimizer, batch):
    mean_square(run.model, batch).backward()


def by_looplib(run, optimizer, batch):
    ll.grads.backward(run.grad_fn, run.model, batch, step=0)


@pytest.mark.parametrize("gradients", [by_hand, by_looplib])
def test_optimizers_of_torchs_that_have_something_to_do_are_not_warned_of(gradients):
    run = Run()
    state, step = run.state, run.make_step(donate=True)
    ours, other = (
        torch.optim.SGD(run.model.parameters(), lr=0.1),
        torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1),
    )
    lbfgs = torch.optim.LBFGS(run.model.parameters(), max_iter=1)

    def closure():
        lbfgs.zero_grad()
        loss = mean_square(run.model, run.batches[0])
        loss.backward()
        return loss

    for batch in run.batches:
        state, _ = step(state, batch)
        other.step()  # of another network, whose gradients are not there in each step
        lbfgs.step(closure)
        gradients(run, ours, batch)
        ours.step()
        ours.zero_grad()
    ll.debug.warn_of_misuse(False)
    try:
        ours.step()
    finally:
        ll.debug.warn_of_misuse(True)
    with pytest.warns(UserWarning, match="this SGD has parameters"):
        ours.step()
