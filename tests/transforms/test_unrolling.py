"""Gradients through training, against finite differences, loops written out by hand, and the plain step."""

import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import equal, examples, make_train_step, mean_square
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transform_cases import MODELS, OPTIMIZERS, ROUGH, WRAPPERS, batches, encoder, seeded, with_a_number
from transform_cases import classify as loss_fn

import looplib as ll

injected = ll.optim.inject
UNTRACEABLE = ll.transforms.UntraceableError


def in_a_row(step, state, data):
    metrics = []
    for batch in data:
        state, of_step = step(state, batch)
        metrics.append(of_step)
    return state, metrics


def unroll(step, state, data, every=None):
    """The last state and the metrics of all steps; with `every`, segments of that length are computed again."""
    if every is None:
        return in_a_row(step, state, data)
    metrics = []
    for begin in range(0, len(data), every):
        segment = data[begin : begin + every]
        state, more = checkpoint(in_a_row, step, state, segment, use_reentrant=False)
        metrics += more
    return state, metrics


def net():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)))


def sgd(lr=0.1, **options):
    return ll.optimizer(torch.optim.SGD, lr=lr, **options)


def adamw(lr=0.02, **options):
    return ll.optimizer(torch.optim.AdamW, lr=lr, **options)


def make(model, loss_fn=loss_fn, optimizer=None, wrap=lambda grad_fn: grad_fn, **options):
    """The differentiable step, the plain one, and a first state with tensors that belong to no module."""
    optimizer = optimizer or sgd()
    plain = make_train_step(wrap(ll.make_grad_fn(model, loss_fn)), optimizer, **options)
    state = ll.copy_state(ll.init_state(model, optimizer))
    params = {name: tensor.detach() for name, tensor in state.params.items()}
    return ll.transforms.differentiable(plain), plain, state.replace(params=params)


def after(model, step, start, data, every=None, loss_fn=loss_fn):
    """The loss on the first batch of the model that training has made, as a function of its first weights."""

    def objective(params):
        state, _ = unroll(step, start.replace(params=params), data, every)
        return loss_fn(lambda *x: functional_call(model, {**state.params, **state.buffers}, x), data[0])

    return objective


def last(step, start, data, name="loss"):
    return unroll(step, start, data)[1][-1][name].compute()


def with_hyperparameters(state, values):
    ((name, own),) = state.opt_state.items()
    return state.replace(opt_state={name: {**own, "hyperparameters": [values]}})


def check(function, tree, size=1e-5):
    """The gradient along some directions is the central difference, whose own error is near 1e-10 in float64."""
    found = grad(function)(tree)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        way = {name: torch.randn(t.shape, generator=generator, dtype=t.dtype) for name, t in tree.items()}
        there, back = ({name: t + sign * size * way[name] for name, t in tree.items()} for sign in (1, -1))
        difference = (function(there) - function(back)).item() / (2 * size)
        slope = sum((found[name] * way[name]).sum().item() for name in tree)
        assert slope == pytest.approx(difference, rel=1e-6, abs=1e-8)


def close(one, other, tolerance=1e-12):
    """Formulas in another order: float64, so differences are of some 1e-16."""
    torch.testing.assert_close(dict(one), dict(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_against_finite_differences_and_the_plain_step(name):
    cls, lr, options = OPTIMIZERS[name]
    model, data = seeded(with_a_number), batches(9)
    step, plain, start = make(model, optimizer=ll.optimizer(cls, lr=lr, **options))
    # Some plain steps first: in the first one the update of Adam and its kin is a sign, and its slope huge.
    state, _ = unroll(plain, start, data[:6])
    check(after(model, step, state, data[6:]), state.params, size=1e-6)
    assert step.compiler.compilations == 1

    found, expected = unroll(step, start, data)[0], unroll(plain, start, data)[0]
    assert (found.step, found.batch, found.samples) == (expected.step, expected.batch, expected.samples)
    close(found.params, expected.params, ROUGH.get(name, 1e-12))


@pytest.mark.parametrize("name", ["ema", "accumulate ragged", "clip_by_global_norm", "finite", "every"])
def test_wrappers_against_finite_differences_and_the_plain_step(name):
    grads, updates, _ = WRAPPERS[name]
    model, data = net(), batches(4)
    step, plain, start = make(model, optimizer=updates(sgd(0.3, momentum=0.9)), wrap=grads)
    check(after(model, step, start, data), start.params)
    close(unroll(step, start, data)[0].params, unroll(plain, start, data)[0].params)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plain_steps"), [("AdamW", 3), ("NAdam", 3), ("RMSprop", 3), ("Adagrad", 3)])
def test_a_dead_unit_makes_no_nan(name, plain_steps):
    # Its weights have a mean square of 0, of which the root has no slope; torch's differentiable=True has NaN there.
    cls, lr, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[2].bias[0] = -20
    data = batches(7)
    step, plain, start = make(model, optimizer=ll.optimizer(cls, lr=lr, **options))
    state, _ = unroll(plain, start, data[:plain_steps])
    check(after(model, step, state, data[plain_steps:]), state.params, size=1e-6)


# What the gradient reaches: a function of a tree, and the tree


def rates(optimizer, decay):
    step, _, start = make(net(), optimizer=optimizer(injected(0.05), weight_decay=injected(decay)))
    (own,) = start.opt_state.values()
    (values,) = own["hyperparameters"]
    assert sorted(values) == ["lr", "weight_decay"]
    return lambda values: last(step, with_hyperparameters(start, values), batches(4)), values


def a_tensor_of_a_schedule():
    now = {}
    step, _, start = make(net(), optimizer=sgd(lambda step: now["lr"] * 0.9**step if now else 0.1))

    def function(values):
        now.update(values)
        return last(step, start, batches(4))

    values = {"lr": torch.tensor(0.1).double()}
    leaf = values["lr"].clone().requires_grad_()
    function({"lr": leaf}).backward()
    assert torch.equal(leaf.grad, grad(function)(values)["lr"])
    return function, values


def tensors_of_the_batch():
    def weighed(model, batch):
        x, y, weights, power = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        return ll.Mean((weights * losses.pow(power)).sum(), weights.sum())

    def unrolled(learned, step):
        with_learned = [(*batch, learned["weights"], learned["power"]) for batch in batches(3)]
        return unroll(step, start, with_learned)[0].params

    model = net()
    step, plain, start = make(model, weighed)
    learned = {"weights": torch.linspace(0.5, 2, 6).double(), "power": torch.tensor(1.3).double()}
    close(unrolled(learned, step), unrolled(learned, plain))

    def function(learned):
        params = unrolled(learned, step)
        return loss_fn(lambda x: functional_call(model, params, x), batches(1)[0])

    return function, learned


def first_weights(make_model=net, loss=loss_fn):
    def case():
        model = seeded(make_model)
        step, _, start = make(model, loss)
        return after(model.eval(), step, start, batches(3)), start.params

    return case


def metrics_and_aux():
    def with_aux(model, batch):
        return loss_fn(model, batch), {"norm": model[3].weight.square().sum(), "count": 3.0}

    step, _, start = make(net(), with_aux)
    assert ll.compute(step(start, batches(1)[0])[1])["count"] == 3

    def function(params):
        state = start.replace(params=params)
        return last(step, state, batches(2)) + last(step, state, batches(2), "norm")

    return function, start.params


def a_mean_with_a_weight(model, batch):
    # The weight of a Mean is taken as a constant by the inner gradient, and belongs to the update all the same.
    out = model(batch[0])
    return ll.Mean(out.square().sum(), 1 + out.exp().sum())


def frozen():
    model = net()
    model[0].requires_grad_(False)
    step, _, start = make(model)
    assert unroll(step, start, batches(2))[0].params["0.weight"] is start.params["0.weight"]
    return after(model, step, start, batches(2)), start.params


def batch_norm():
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)))
    step, _, start = make(model)
    return after(model, step, start, batches(3)), start.params


REACHED = {
    "rates": partial(rates, adamw, 0.1),
    "a decay of 0": partial(rates, adamw, 0.0),
    "a schedule": a_tensor_of_a_schedule,
    "the batch": tensors_of_the_batch,
    "metrics": metrics_and_aux,
    "the weight of a mean": first_weights(loss=a_mean_with_a_weight),
    "dropout": first_weights(lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))),
    "batch norm": batch_norm,
    "frozen": frozen,
}


@pytest.mark.filterwarnings("ignore:.*went into eval mode after this function was made")  # for the loss at the end
@pytest.mark.parametrize(
    "name",
    [pytest.param("a decay of 0", marks=pytest.mark.hardest), *(name for name in REACHED if name != "a decay of 0")],
)
def test_what_the_gradient_reaches(name):
    check(*REACHED[name](), size=1e-6)


def test_a_tensor_that_a_loss_closes_over_has_a_gradient_and_keeps_it_clean():
    power = torch.tensor(1.3).double().requires_grad_()
    step, _, start = make(net(), lambda model, batch: loss_fn(model, batch) ** power)
    (found,) = torch.autograd.grad(last(step, start, batches(3)), power)
    assert power.grad is None
    with torch.no_grad():
        power += 1e-5
        up = last(step, start, batches(3))
        power -= 2e-5
        assert found.item() == pytest.approx((up - last(step, start, batches(3))).item() / 2e-5, rel=1e-6)


# What it does not reach: what the loss function cuts off


def no_grad(function):
    def within(y):
        with torch.no_grad():
            return function(y)

    return within


CUTS = {
    "detach": lambda y: y.detach(),
    "data": lambda y: y.data,
    "no_grad": no_grad(lambda y: y * 2),
    "nothing left": no_grad(lambda y: y),
    "var_mean in no_grad": no_grad(lambda y: torch.var_mean(y)[1]),
    "layer_norm in no_grad": no_grad(lambda y: F.layer_norm(torch.cat([y, y**2], 1), (2,))[:, :1]),
    "in place in no_grad": no_grad(lambda y: y.clone().mul_(2)),
    "part of it": lambda y: no_grad(torch.exp)(y) * y,
    "enable_grad within": no_grad(lambda y: torch.enable_grad()(torch.sin)(y)),
}


class Cube(torch.autograd.Function):
    """Gradients are off within its forward, which is no cut."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


def with_a_slope(create_graph, model, x):
    points = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(points).square().sum(), points, create_graph=create_graph)
    return (model(x) - 1).square().mean() + slope.sum() * model(x).sum()


def with_a_cut(cut, model, x):
    y = model(x)
    return (cut(y) * y**2 - 1).square().mean()


CUT_LOSSES = {name: partial(with_a_cut, cut) for name, cut in CUTS.items()} | {
    "a slope": partial(with_a_slope, True),
    "a constant slope": partial(with_a_slope, False),
    "autograd.Function": lambda model, x: Cube.apply(model(x)).mean(),
}


@pytest.mark.parametrize("name", CUT_LOSSES)
def test_what_the_loss_function_cuts_off_stays_cut_off(name):
    loss, x = CUT_LOSSES[name], torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).double()
    step, _, start = make(nn.Linear(2, 1, bias=False).double(), loss, sgd(0.01))
    w = leaf = start.params["weight"].clone().requires_grad_()
    for _ in range(3):
        w = w - 0.01 * torch.autograd.grad(loss(lambda x, w=w: x @ w.T, x), w, create_graph=True)[0]
    (expected,) = torch.autograd.grad(w.square().sum(), leaf)

    def function(params):
        return unroll(step, start.replace(params=params), [x] * 3)[0].params["weight"].square().sum()

    close(grad(function)(start.params), {"weight": expected})


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        y = torch.tanh(x @ self.weight)
        return y.detach() * y**2


def test_what_a_checkpoint_runs_again_stays_cut_off():
    model = seeded(lambda: nn.Sequential(Cut(), nn.Linear(3, 3)))
    found = []
    for loss in (loss_fn, ll.losses.recompute(loss_fn, Cut), ll.losses.offload(loss_fn, Cut)):
        step, _, start = make(model, loss)
        found.append(grad(after(model, step, start, batches(3)))(start.params))
    close(found[1], found[0])
    close(found[2], found[0])


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    make_model, loss, data = MODELS[name]
    # The plain form of attention draws its dropout in another order than the fused one.
    model, data = seeded(partial(encoder, 0.0) if make_model is encoder else make_model), data()
    step, plain, start = make(model, loss, sgd(0.03))
    found, expected = (unroll(one, start, data)[0] for one in (step, plain))
    close(found.params, expected.params, 1e-9)
    close(found.buffers, expected.buffers, 1e-9)
    function = after(model.eval(), step, start, data, loss_fn=loss)
    trained = {name: start.params[name] for name, param in model.named_parameters() if param.requires_grad}
    if loss is not loss_fn:  # max-pooling has kinks; other convolutions are checked beside each norm
        check(lambda params: function({**start.params, **params}), trained)


# Transforms


@pytest.mark.slow
def test_backward_and_torch_func_agree_to_the_bit():
    model, data = net(), batches(3)
    step, _, start = make(model, optimizer=adamw())
    expected = grad(after(model, step, start, data))(start.params)
    for every in (None, 2):
        function = after(model, step, start, data, every)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in start.params.items()}
        function(leaves).backward()
        assert equal({name: leaf.grad for name, leaf in leaves.items()}, expected)
    state, _ = step(ll.init_state(model, adamw()), data[0])  # of a state that holds the module's own parameters
    loss_fn(lambda x: functional_call(model, state.params, x), data[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


# torch's own, when forward-mode derivatives are first used
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_second_derivatives_and_vectors_through_them():
    model, data = nn.Linear(4, 3, bias=False).double(), batches(3)
    step, _, start = make(model, optimizer=sgd(0.3, momentum=0.9))
    params, way = start.params, {"weight": torch.randn(3, 4).double()}
    whole = after(model, step, start, data)
    expected = jacrev(grad(whole))(params)["weight"]
    close(hessian(whole)(params)["weight"], expected, 1e-10)
    product = {"weight": torch.einsum("abcd,cd->ab", expected["weight"], way["weight"])}
    close(jvp(grad(whole), (params,), (way,))[1], product, 1e-10)


@pytest.mark.slow
def test_tasks_under_vmap_equal_tasks_one_by_one():
    model, data = net(), batches(3)
    step, plain, start = make(model, optimizer=adamw(injected(0.02)))
    start, _ = unroll(plain, start, data)
    xs = torch.stack([torch.stack([x + task for x, _ in data]) for task in range(4)])
    ys = torch.stack([y for _, y in data])
    tasks = {"lr": torch.linspace(0.01, 0.03, 4).double()}

    def loss(params, values, x):
        state = with_hyperparameters(start.replace(params=params), values)
        state, _ = unroll(step, state, list(zip(x, ys, strict=True)))
        return loss_fn(lambda x: functional_call(model, state.params, x), (x[0], ys[0]))

    slopes = grad(loss, argnums=(0, 1))
    params, values = vmap(slopes, in_dims=(None, 0, 0))(start.params, tasks, xs)
    for task in range(4):
        alone = slopes(start.params, {name: value[task] for name, value in tasks.items()}, xs[task])
        for found, expected in zip((params, values), alone, strict=True):
            # Matrices of all tasks are multiplied together, in another order.
            close({name: tensor[task] for name, tensor in found.items()}, expected, 1e-9)
    assert step.compiler.compilations == 1


NORMS = {
    "layer": lambda: nn.LayerNorm((4, 3, 3)),
    "batch": lambda: nn.BatchNorm2d(4),
    "rms": lambda: nn.RMSNorm((4, 3, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_the_outer_gradient_through_tasks_under_vmap_and_a_norm(name, capfd):
    # torch's own derivative of layer norm's backward pass is wrong there (by half of it).
    model = seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 2), NORMS[name](), nn.GELU(), nn.Flatten(), nn.Linear(36, 2))
    )
    step, _, start = make(model, lambda model, x: (model(x) - 1).square().mean())
    xs = torch.randn(3, 5, 1, 4, 4).double()

    def task(params, x):
        state, _ = unroll(step, start.replace(params=params), [x] * 2)
        return sum(tensor.square().sum() for tensor in state.params.values())

    check(lambda params: vmap(task, in_dims=(None, 0))(params, xs).mean(), start.params)
    assert "performance drop" not in capfd.readouterr().err


def test_random_numbers_under_vmap_are_asked_for():
    model, data = seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))), batches(1)
    step, _, start = make(model)
    xs = torch.stack([data[0][0]] * 3)

    def weight(x):
        return step(start, (x, data[0][1]))[0].params["2.weight"]

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(weight)(xs)
    different = vmap(weight, randomness="different")(xs)
    assert not torch.allclose(different[0], different[1])
    assert torch.equal(different, vmap(weight, randomness="different")(xs))


# Recomputation


def recomputed():
    model = seeded(
        lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    )
    return make(model, mean_square, adamw())


RECOMPUTED = recomputed()


@pytest.fixture
def no_garbage_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
def test_what_is_computed_again_is_not_kept(no_garbage_collector):
    _, plain, start = RECOMPUTED
    step = ll.transforms.differentiable(plain)  # whose first call is within a segment
    made = []

    def watched(state, batch):
        state, metrics = step(state, batch)
        made.append([weakref.ref(tensor) for tensor in state.params.values()])
        return state, metrics

    params, data = (
        {name: tensor.clone().requires_grad_() for name, tensor in start.params.items()},
        [torch.randn(2, 3).double()] * 4,
    )
    kept = unroll(watched, start.replace(params=params), data, every=2)
    alive = [sum(reference() is not None for reference in of_step) for of_step in made]
    assert alive == [0, len(params), 0, len(kept[0].params)]


@pytest.mark.slow
@settings(max_examples=examples(15), deadline=None)
@given(count=st.integers(0, 7), every=st.integers(1, 9), seed=st.integers(0, 99))
def test_recomputation_changes_no_bit_and_each_step_draws_what_the_plain_one_does(count, every, seed):
    step, plain, start = RECOMPUTED
    torch.manual_seed(seed)
    data, stream = [torch.randn(2 + place % 2, 3).double() for place in range(count)], torch.get_rng_state()

    def gradient(every=None):
        params = {name: tensor.clone().requires_grad_() for name, tensor in start.params.items()}
        first = start.replace(params=params, seed=seed)
        state, metrics = unroll(step, first, data, every)
        assert (state.step, state.samples, len(metrics)) == (count, sum(map(len, data)), count)
        losses = [record["loss"].compute() for record in metrics]
        total = sum(losses) + sum(
            tensor.square().sum() for tensor in [*state.params.values(), *state.buffers.values()]
        )
        total.backward()
        return {"total": total.detach(), **{name: leaf.grad for name, leaf in params.items()}}

    assert equal(gradient(), gradient(every))
    first = start.replace(seed=seed)
    close(unroll(step, first, data)[0].params, unroll(plain, first, data)[0].params, 1e-9)
    assert torch.equal(torch.get_rng_state(), stream)


# How it is taken


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"donate": True}, {"same_batch": True}])
def test_options_of_the_step_that_is_given(options):
    model, data = net(), batches(2)
    step, _, start = make(model, **options)
    found, expected = (unroll(one, start, data)[0] for one in (step, make(model)[0]))
    assert equal(found.params, expected.params)
    assert (found.step, found.batch) == (2, 0 if "same_batch" in options else 2)
    step(start, data[0])  # nothing is spent


@pytest.mark.slow
def test_one_trace_for_each_shape():
    model, data = net(), batches(3)
    step, _, start = make(model, optimizer=adamw(ll.schedules.cosine(0.1, total=20)))
    for _ in range(3):
        grad(after(model, step, start, data))(start.params)
    step(ll.init_state(model, adamw()), data[0])  # a bound state, whose tensors require a gradient
    assert step.compiler.compilations == 1
    step(start, batches(1, size=4)[0])
    assert step.compiler.compilations == 2


# Refusals


def read_in_the_loss(model, batch):
    value = loss_fn(model, batch)
    return value * 2 if value > 0 else value


def step_that_reads():
    step, _, start = make(net(), read_in_the_loss)
    return step(start, batches(1)[0])


MODEL, DATA = net(), batches(2)  # made outside of torch.func's transforms
START = make(MODEL)[2]


def differentiable_step(loss_fn, optimizer):
    return ll.transforms.differentiable(ll.make_train_step(ll.make_grad_fn(MODEL, loss_fn), optimizer))


def scaled_by(temperature):
    return last(differentiable_step(lambda model, batch: loss_fn(model, batch) * temperature, sgd()), START, DATA)


def that_may_skip():
    step, _, start = make(MODEL, optimizer=ll.chain(ll.skip_nonfinite(3), sgd()))
    function = after(MODEL, step, start, DATA)
    assert function(start.params).isfinite()
    return step, start, function


def skipping_under_vmap():
    step, start, _ = that_may_skip()
    x, y = DATA[0]
    vmap(lambda x: last(step, start, [(x, y)]))(torch.stack([x, x]))


def skipping_in_a_graph():
    _, _, loss = that_may_skip()
    grad_fn = ll.make_grad_fn(MODEL, lambda model, batch: loss(dict(model.named_parameters())))
    make_train_step(grad_fn, sgd(), compile={"backend": "eager"})(ll.init_state(MODEL, sgd()), DATA[0])


LR = torch.tensor(0.1).double()
CUT_OFF = ["eval and predict steps would cut its gradient off", "functional_call", "torch.no_grad()"]


def evaluated(params, transform=lambda step: step):
    metrics = transform(ll.make_eval_step(MODEL, lambda model, batch: {"loss": loss_fn(model, batch)}))(
        START.replace(params=params), DATA[0]
    )
    return metrics["loss"].compute()


def with_graph():
    return {name: param.exp() for name, param in ll.init_state(MODEL).params.items()}


def after_one_step(step):
    return grad(lambda params: step(START.replace(params=params), DATA[0])[1]["loss"].compute())(START.params)


def init_within(lr):
    return ll.init_state(MODEL, sgd(lr)).params["0.weight"].sum()


REFUSED = {  # name -> (call, type, what the message names)
    "a value": (step_that_reads, UNTRACEABLE, ["in read_in_the_loss: `return value * 2 if"]),
    "closed over, in grad": (lambda: grad(scaled_by)(LR), UNTRACEABLE, ["torch.func", "the batch"]),
    "closed over, in vmap": (lambda: vmap(scaled_by)(LR[None]), UNTRACEABLE, ["torch.func", "the batch"]),
    "skipping under vmap": (skipping_under_vmap, RuntimeError, ["vmap", "data-dependent control flow"]),
    "skipping in a graph": (
        skipping_in_a_graph,
        UNTRACEABLE,
        ["in in_a_row: `state, of_step = step(", "ll.compile_step"],
    ),
    "an eval step": (lambda: grad(evaluated)(START.params), ValueError, CUT_OFF),
    "an eval step of a graph": (
        lambda: evaluated(with_graph(), partial(ll.compile_step, backend="eager")),
        ValueError,
        ["ExpBackward0", *CUT_OFF],
    ),
    "a plain step": (
        lambda: after_one_step(ll.make_train_step(ll.make_grad_fn(MODEL, loss_fn), sgd())),
        RuntimeError,
        ["ll.transforms.differentiable(train_step)"],
    ),
    "a state made inside": (lambda: grad(init_within)(LR), RuntimeError, ["requires_grad_()", "functorch"]),
}


def test_what_is_refused():
    for name, (call, kind, words) in REFUSED.items():
        with pytest.raises(kind) as error:
            call()
        assert all(word in str(error.value) for word in words), name
    with torch.no_grad():
        assert evaluated(with_graph()).isfinite()
    assert vmap(evaluated)({name: param.detach()[None] for name, param in START.params.items()}).isfinite()


def test_the_root_of_0_is_0_in_a_differentiable_step():
    def with_root(model, batch):
        return loss_fn(model, batch) + (0 * batch[0]).sqrt().sum()

    differentiable, plain, start = make(net(), with_root)
    (_, found), (_, expected) = differentiable(start, batches(1)[0]), plain(start, batches(1)[0])
    torch.testing.assert_close(found["loss"].compute(), expected["loss"].compute())
