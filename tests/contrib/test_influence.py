"""Influence of training samples, beside finite differences of whole runs and runs without a sample."""

import copy
import gc
import weakref

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import looplib as ll
from looplib.contrib import sample_influence

OPTIMIZERS = {
    "adamw": lambda: ll.chain(
        ll.clip_by_global_norm(0.5), ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(0.03, warmup=3, total=300))
    ),
    "sgd": lambda: ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}


def mean_with_gaps(model, batch):
    (x, y), weights = batch
    return (weights * cross_entropy(model(x), y, reduction="none")).mean()


def mean_without_gaps(model, batch):
    (x, y), weights = batch
    return ll.Mean((weights * cross_entropy(model(x), y, reduction="none")).sum(), weights.sum())


class Run:
    """A run over shuffled samples, whose last loss is a function of their weights."""

    def __init__(self, optimizer, loss_fn=mean_with_gaps, samples=40, dropout=0.3, dtype=torch.float64, **options):
        generator = torch.Generator().manual_seed(0)
        digits = load_digits()
        order = torch.randperm(1797, generator=generator)
        x, y = torch.tensor(digits.data, dtype=dtype)[order] / 16, torch.tensor(digits.target)[order]
        torch.manual_seed(1)
        layers = nn.Linear(64, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 10)
        self.model = nn.Sequential(*layers).to(dtype)
        self.judge = copy.deepcopy(self.model).eval()
        self.loader = ll.make_loader(TensorDataset(x[:samples], y[:samples]), seed=2, **{"batch_size": 8, **options})
        self.step = ll.make_train_step(ll.make_grad_fn(self.model, loss_fn), optimizer)
        length = None if self.loader.order.may_vary else len(self.loader)
        self.state = ll.init_state(self.model, optimizer, epoch_length=length)
        self.held_out = x[-200:], y[-200:]

    def loss_of_state(self, state):
        x, y = self.held_out
        return cross_entropy(torch.func.functional_call(self.judge, {**state.params, **state.buffers}, x), y)

    def influence(self, steps):
        return sample_influence(self.step, self.state, self.loader, self.loss_of_state, steps)

    def loss(self, weights, steps):
        """The loss after a run of the plain step."""
        state = self.state
        while True:
            for batch in self.loader(state):
                state, _ = self.step(state, (batch, weights[self.loader.indices(state)]))
                if state.step == steps:
                    return self.loss_of_state(state).item()
            state = ll.state.end_epoch(state) if state.epoch_length is None else state


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (mean_without_gaps, {"order": ll.data.growing({0: 5, 30: 9})}),  # epochs of different lengths
        (mean_with_gaps, {}),
        (mean_with_gaps, {"order": ll.data.with_replacement(40)}),  # a sample twice in a batch
    ],
)
def test_influences_are_finite_differences_of_whole_runs(name, loss_fn, options):
    if "growing" in str(options):
        options = options | {"batch_size": ll.data.make_loader.__kwdefaults__["batch_size"]}
    run, steps, h = Run(OPTIMIZERS[name](), loss_fn, **options), 17, 1e-4  # segments of 5, 5, 5 and 2
    gradients, last = run.influence(steps)
    assert last.step == steps
    assert run.loss_of_state(last).item() == pytest.approx(run.loss(torch.ones(40).double(), steps), abs=1e-12)
    for sample in (0, 7, 23):
        one = torch.zeros(40).double().index_fill(0, torch.tensor(sample), h)
        low, lower, high, higher = (run.loss(1 + times * one, steps) for times in (-1, -2, 1, 2))
        difference = (8 * (high - low) - (higher - lower)) / (12 * h)  # of the fourth order
        assert gradients[sample].item() == pytest.approx(difference, abs=1e-8)
    assert gradients.abs().median() > 1e-4  # 1e-8 is a small part of them


@pytest.mark.slow  # finite differences, above, notice the same mistakes; this one shows what the numbers are good for
@pytest.mark.parametrize(
    "optimizer",
    [ll.optimizer(torch.optim.AdamW, lr=0.01), ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)],
    ids=["adamw", "sgd"],
)
def test_the_order_of_influences_is_that_of_20_runs_without_a_sample(optimizer):
    gradients, changes = influence_and_changes(Run(optimizer, samples=400, batch_size=64), weights=[0.0])
    spearmanr = pytest.importorskip("scipy.stats").spearmanr
    correlation = spearmanr(-gradients, changes[0.0]).statistic
    assert correlation >= 0.9, correlation


def influence_and_changes(run, weights, steps=40):
    """Gradients of 20 samples, and for each weight, the changes of the loss if one of them has it in place of 1."""
    gradients, _ = run.influence(steps)
    ones = torch.ones_like(gradients)
    before = run.loss(ones, steps)
    samples = torch.arange(0, len(ones), len(ones) // 20)
    changes = {
        weight: [run.loss(ones.index_fill(0, sample, weight), steps) - before for sample in samples]
        for weight in weights
    }
    return gradients[samples], changes


@pytest.mark.slow
def test_a_derivative_tells_what_a_small_change_of_a_weight_does():
    # A sample is an eighth of its batch, and the rate is high: the loss is not linear between weights of 1 and 0.
    run = Run(ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), samples=100, batch_size=8)
    gradients, changes = influence_and_changes(run, weights=[0.9, 0.0])
    spearmanr = pytest.importorskip("scipy.stats").spearmanr
    small, whole = (spearmanr(-gradients, changes[weight]).statistic for weight in (0.9, 0.0))
    assert whole < 0.95 < 0.99 < small, (whole, small)


class Live(TorchDispatchMode):
    """The most bytes of storages that were alive together, among those that operations have made."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if type(leaf) is torch.Tensor and (key := leaf.untyped_storage()._cdata) not in self.alive:
                storage = leaf.untyped_storage()
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key, None)
                self.peak = max(self.peak, sum(self.alive.values()))
        return out


def peak_of(run, steps):
    gc.collect()
    with Live() as live:
        run.influence(steps)
    return live.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("sgd", 9),
        pytest.param("adamw", 9, marks=pytest.mark.slow),
        pytest.param("adamw", 64, marks=pytest.mark.slow),
        pytest.param("sgd", 64, marks=pytest.mark.slow),
    ],
)
def test_four_times_the_steps_take_about_twice_the_memory(name, steps):
    small, large = (peak_of(Run(OPTIMIZERS[name]()), count) for count in (steps, 4 * steps))
    assert (
        1.5 < large / small <= 2.2
    )  # the root of 4: both the states that are kept and the graph of a segment double


@pytest.mark.slow
def test_the_given_state_and_the_module_are_as_before():
    run = Run(OPTIMIZERS["sgd"]())
    before = {name: tensor.clone() for name, tensor in run.state.params.items()}
    stream = torch.get_rng_state()
    first, _ = run.influence(9)
    again, _ = run.influence(9)
    assert first.equal(again)
    assert all(tensor.equal(run.state.params[name]) for name, tensor in before.items())
    assert all(tensor.equal(before[name]) for name, tensor in run.model.named_parameters())
    assert stream.equal(torch.get_rng_state())


@pytest.mark.slow
def test_a_run_may_begin_at_a_later_state():
    run, steps = Run(OPTIMIZERS["sgd"]()), 12
    _, later = run.influence(5)
    run.state = later
    gradients, last = run.influence(7)
    assert last.step == steps
    for sample in (3, 11):
        one = torch.zeros(40).double().index_fill(0, torch.tensor(sample), 1e-5)
        difference = (run.loss(1 + one, steps) - run.loss(1 - one, steps)) / 2e-5
        assert gradients[sample].item() == pytest.approx(difference, abs=1e-8)


# Refusals


class Rounded(nn.Module):
    """A conversion to half precision and back, of which autograd saves nothing."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype).to(x.dtype)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow), torch.float8_e4m3fn]
)
def test_half_precision_is_refused_by_name(dtype):
    run = Run(OPTIMIZERS["sgd"]())
    weight = run.state.params["0.weight"].to(dtype)
    halved = run.state.replace(params={**run.state.params, "0.weight": weight})
    with pytest.raises(ValueError, match=r"state.params\['0.weight'\] is in half precision"):
        sample_influence(run.step, halved, run.loader, run.loss_of_state, 4)
    run.judge[1] = Rounded(dtype)
    with pytest.raises(ValueError, match=rf"rounds to half precision \({dtype}\)"):
        run.influence(1)

    def rounded_loss(model, batch):
        return mean_with_gaps(nn.Sequential(model, Rounded(dtype)), batch)

    with pytest.raises(ValueError, match=rf"rounds to half precision \({dtype}\): use no autocast or .bfloat16()"):
        Run(OPTIMIZERS["sgd"](), rounded_loss).influence(4)


def test_autocast_and_muon_are_refused_by_name():
    cast = Run(OPTIMIZERS["sgd"](), ll.autocast(mean_with_gaps, dtype=torch.bfloat16), dtype=torch.float32)
    sgd, muon = ll.optimizer(torch.optim.SGD, lr=0.1), ll.optimizer(torch.optim.Muon, lr=0.01)
    both = ll.optim.partition(
        {"matrices": muon, "rest": sgd}, lambda name, tensor: "matrices" if tensor.ndim == 2 else "rest"
    )
    for run in (cast, Run(both)):
        with pytest.raises(ValueError, match=r"no autocast.* and no optimizer that computes in it, as Muon does"):
            run.influence(4)
    run = Run(sgd)
    run.loss_of_state = lambda state: run.judge.float()(run.held_out[0].float()).sum() * state.params["0.bias"].sum()
    around = torch.autocast("cpu", torch.bfloat16)
    with around, pytest.raises(ValueError, match=r"rounds to half precision \(torch.bfloat16\)"):
        run.influence(1)


@pytest.mark.slow
def test_data_in_half_precision_are_no_rounding():
    run = Run(OPTIMIZERS["sgd"]())
    x, y = run.loader.dataset.tensors
    halves = ll.make_loader(TensorDataset(x.half(), y), seed=2, batch_size=8)  # sixteenths, which it holds

    def loss_of_halves(model, batch):
        (x, y), weights = batch
        return mean_with_gaps(model, ((x.flatten(1).double(), y), weights))

    step = ll.make_train_step(ll.make_grad_fn(run.model, loss_of_halves), OPTIMIZERS["sgd"]())
    gradients, _ = sample_influence(step, run.state, halves, run.loss_of_state, 4)
    assert gradients.equal(run.influence(4)[0])


class MovesLater(nn.Module):
    """Adds the running mean of its inputs, which moves from the third step on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        self.mean.lerp_(x.mean(0).detach(), (self.count >= 2).to(x) / 2)
        self.count += 1
        return x + self.mean


@pytest.mark.parametrize("steps", [3, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (2, 11))])
def test_a_buffer_that_moves_in_a_later_step_is_refused(steps):
    run = Run(OPTIMIZERS["sgd"]())
    run.model[2] = nn.Sequential()
    model = nn.Sequential(MovesLater(), run.model).double()
    run.step = ll.make_train_step(ll.make_grad_fn(model, mean_with_gaps), OPTIMIZERS["sgd"]())
    run.state = ll.init_state(model, OPTIMIZERS["sgd"](), epoch_length=5)
    x, y = run.held_out
    judge = copy.deepcopy(model).eval()
    run.loss_of_state = lambda state: cross_entropy(torch.func.functional_call(judge, state.params, x), y)
    if steps == 2:
        assert run.influence(steps)[0].count_nonzero() == 16  # the counter has no gradient, so it may move
    else:
        with pytest.raises(ValueError, match=r"update 3 moves buffers .*\['0.mean'\]"):
            run.influence(steps)


@pytest.mark.slow
def test_batch_norm_that_moves_is_refused_and_one_in_eval_mode_is_not():
    x, y = torch.randn(12, 3).double(), torch.randint(2, (12,))
    loader = ll.make_loader(TensorDataset(x, y), batch_size=4)
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)
    for training in (True, False):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        model[1].train(training)
        judge = copy.deepcopy(model).eval()
        step = ll.make_train_step(ll.make_grad_fn(model, mean_with_gaps), sgd)
        state = ll.init_state(model, sgd, epoch_length=3)

        def loss_of_state(state, judge=judge):
            return cross_entropy(torch.func.functional_call(judge, {**state.params, **state.buffers}, x), y)

        if training:
            with pytest.raises(ValueError, match=r"moves buffers .*: \['1.running_mean', '1.running_var'\]"):
                sample_influence(step, state, loader, loss_of_state, 4)
        else:
            assert sample_influence(step, state, loader, loss_of_state, 4)[0].count_nonzero() == 12


def unweighted(model, batch):
    return cross_entropy(model(batch[0][0]), batch[0][1])


@pytest.mark.slow
def test_what_has_no_influences_is_refused():
    run = Run(OPTIMIZERS["sgd"]())
    stream = ll.make_loader(torch.utils.data.ChainDataset([]), batch_size=2)
    pair = ll.data.zipped(run.loader, run.loader)
    step, state, loader, loss = run.step, run.state, run.loader, run.loss_of_state
    with pytest.raises(ValueError, match="does not use the weights of its batch"):
        Run(OPTIMIZERS["sgd"](), unweighted).influence(3)
    with pytest.raises(ValueError, match="a scalar with a graph"):
        sample_influence(step, state, loader, lambda state: loss(state).detach(), 3)
    with pytest.raises(ValueError, match="a scalar with a graph to its state"):
        sample_influence(step, state, loader, lambda state: run.model[0].weight.sum(), 3)
    for other in (stream, pair, [1, 2]):
        with pytest.raises(TypeError, match=r"needs a loader of ll.make_loader over a dataset with indices"):
            sample_influence(step, state, other, loss, 3)
    with pytest.raises(ValueError, match="steps is 0"):
        sample_influence(step, state, loader, loss, 0)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match="needs one process"):
            sample_influence(step, state, loader, loss, 3)
    finally:
        torch.distributed.destroy_process_group()
