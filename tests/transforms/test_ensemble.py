"""Members of a stack against as many runs one after another, which take looplib's step as it is, without a graph."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import both_steps, one_report
from torch import nn
from torch.utils._pytree import tree_map
from transform_cases import (
    MODELS,
    OPTIMIZERS,
    WRAPPERS,
    batches,
    classify,
    counts,
    dropping,
    normalized,
    plain,
    seeded,
    the_same,
    with_a_number,
)

import looplib as ll
from looplib.transforms import compute_members, per_member, stack_states, unstack_states

optim = torch.optim
LRS = (1e-2, 3e-3, 3e-2)
SEEDS = (7, 8, 11)


def of(values):
    """For each member its own value, and for the stack (None) all of them."""
    return lambda number: per_member(values) if number is None else values[number]


def sgd(number):
    return ll.optimizer(optim.SGD, lr=of(LRS)(number), momentum=0.9)


def adamw(number):
    return ll.optimizer(optim.AdamW, lr=of(LRS)(number), weight_decay=0.1)


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


exactly = partial(close, tolerance=0)


def trees(state):
    return state.params, state.buffers, state.opt_state


def trainable(state):
    return [name for name, tensor in state.params.items() if tensor.requires_grad]


def step_of(
    optimizer, make, number=0, wrap=lambda grad_fn: grad_fn, loss_fn=classify, grads=ll.make_grad_fn, **options
):
    return ll.make_train_step(wrap(grads(seeded(make, number), loss_fn)), optimizer, **options)


def stacked(optimizer, make, own_batches=False, start=None, seeds=SEEDS, compile=False, **options):
    """The step of a stack, and the stack to begin with."""
    step = ll.vmap_step(step_of(optimizer(None), make, **options), own_batches=own_batches)
    states = [
        ll.init_state(seeded(make, number), (start or optimizer)(number if start else None), seed=seed)
        for number, seed in enumerate(seeds)
    ]
    return ll.compile_step(step) if compile else step, stack_states(states)


def alone(number, optimizer, make, seeds=SEEDS, **settings):
    """The step of one member alone, and its state to begin with."""
    own = optimizer(number)
    return step_of(own, make, number, **settings), ll.init_state(seeded(make, number), own, seed=seeds[number])


def check(
    optimizer,
    make=dropping,
    data=None,
    own_batches=False,
    tolerance=1e-10,
    compilations=1,
    start=None,
    donate=False,
    compile=False,
    **settings,
):
    """All members, their metrics and counts are those of runs one after another; returns the stack."""
    data = batches() if data is None else data
    options = {"own_batches": own_batches, "start": start, "donate": donate, "compile": compile}
    step, stack = stacked(optimizer, make, **options, **settings)
    found = []
    for batch in data:
        stack, metrics = step(stack, batch)
        found.append(compute_members(metrics))
    for number, one in enumerate(unstack_states(stack)):
        own_step, state = alone(number, optimizer, make, **settings)
        for place, batch in enumerate(data):
            own_batch = tree_map(lambda tensor, number=number: tensor[number], batch) if own_batches else batch
            state, metrics = own_step(state, own_batch)
            assert found[place][number] == pytest.approx(ll.compute(metrics), rel=tolerance, abs=tolerance)
        close(trees(one), trees(state), tolerance)
        assert trainable(one) == trainable(state)
        assert counts(one) == counts(state)
    assert step.compiler.compilations == compilations
    return stack


# Optimizers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_for_each_member_what_it_does_alone(name):
    cls, lr, options = OPTIMIZERS[name]

    def optimizer(number):
        return ll.optimizer(cls, lr=of([lr, 0.3 * lr, 2 * lr])(number), **options)

    # torch keeps products of NAdam's momenta in float32, which a graph rounds elsewhere.
    # With dampening, the first update makes the state, in a graph of its own.
    graphs = 2 if name == "SGD, dampening" else 1
    check(optimizer, with_a_number, tolerance=1e-6 if name == "NAdam" else 1e-10, compilations=graphs)


@pytest.mark.slow
def test_muon(monkeypatch):
    # Its five rounds of Newton-Schulz in bfloat16 enlarge differences in rounding to parts of a step. In double
    # precision, which it has no option for, they show that the arithmetic is the same.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    monkeypatch.setattr(torch, "bfloat16", torch.float64)  # to which it converts since torch 2.15
    check(
        lambda number: ll.optimizer(optim.Muon, lr=of(LRS)(number)),
        lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)),
    )


# Hyperparameters of their own

SCHEDULES = [ll.warmup_cosine(1e-2 * (k + 1), warmup=2, total=6) for k in range(3)]
OWN = {
    "a schedule for one of them": lambda k: ll.optimizer(optim.AdamW, lr=of([1e-2, SCHEDULES[1], 0.0])(k)),
    "betas": lambda k: ll.optimizer(optim.AdamW, lr=1e-2, betas=(of([0.5, 0.6, 0.7])(k), 0.99)),
    "groups": lambda k: ll.optimizer(
        optim.AdamW,
        lr=of(LRS)(k),
        weight_decay=0.1,
        groups=[(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0, "lr": of([1e-3, 1e-4, 0.0])(k)})],
    ),
    "a schedule of decays that begin at 0": lambda k: ll.optimizer(
        optim.SGD, lr=1e-2, weight_decay=of([0.0, lambda step: 0.1 * step, lambda step: 0.1 * (step < 2)])(k)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_members_have_hyperparameters_of_their_own(name):
    check(OWN[name])


# What is around the gradients and the optimizer


@both_steps
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_does_for_each_member_what_it_does_alone(name, donate):
    grads, updates, compilations = WRAPPERS[name]
    inner = sgd if updates is the_same else adamw
    make = normalized if name == "ema" else dropping
    check(lambda k: updates(inner(k)), make=make, wrap=grads, donate=donate, compilations=compilations)


def with_others(model, batch):
    x, y = batch
    mean = ll.Mean(F.cross_entropy(model(x), y, reduction="sum"), (y > 0).sum())
    return mean, {
        "positive": ll.Mean((y > 0).double().sum(), len(y)),
        "size": ll.Mean(model[0].weight.square().sum(), 2),
    }


SETTINGS = {
    "recomputed with dropout": {"loss_fn": ll.losses.recompute(classify, lambda name, module: name in ("0", "2"))},
    "a loss as a Mean, with others": {"loss_fn": with_others},
    "per-sample gradients": {
        "make": plain,
        "grads": ll.contrib.make_per_sample_grad_fn,
        "wrap": lambda grad_fn: ll.contrib.clip_per_sample(grad_fn, 0.1),
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_and_gradients_of_other_kinds(name):
    check(sgd, **SETTINGS[name])


# Models


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models(name):
    make, loss_fn, data = MODELS[name]
    check(sgd, make, data(), loss_fn=loss_fn)
    assert torch._C._get_mkldnn_enabled()  # which an LSTM is mapped without


@pytest.mark.slow
def test_buffers_that_a_pass_writes_for_nothing_are_copies():
    check(sgd, normalized, wrap=WRAPPERS["sam"][0])


def test_numbers_of_the_host_meet_stacks_on_another_device():
    step, stack = stacked(adamw, normalized)
    trees = {name: away(getattr(stack, name)) for name in ("params", "buffers", "opt_state")}
    after, _ = step(stack.replace(**trees), away(batches(1)[0]))
    assert all(tensor.is_meta for tensor in after.params.values())


def away(tree):
    return tree_map(lambda tensor: tensor.detach().to("meta"), tree)


def test_one_answer_of_the_host_for_the_seeds_of_all_members_is_refused():
    def asking(grad_fn):
        def asking_grad_fn(state, batch, **request):
            ll.transforms.on_host(lambda seed, step: 0.1, state.seed, state.step)
            return grad_fn(state, batch, **request)

        return asking_grad_fn

    with pytest.raises(UNTRACEABLE, match=r"state.seed within vmap_step"):
        taken_by(wrap=asking)()


# Random numbers

DRAWS = {
    "randn": lambda x: x + torch.randn_like(x) * torch.rand(4).double(),
    "randperm": lambda x: x[torch.randperm(6)],
    "bernoulli of numbers": lambda x: x * torch.bernoulli(x.sigmoid()),
    "Gumbel": lambda x: x + F.gumbel_softmax(x),
    "dropout as CUDA has it": lambda x: torch.native_dropout(x, 0.3, True)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_member_draws_the_random_numbers_that_it_draws_alone(name):
    check(sgd, data=batches(3), loss_fn=lambda model, batch: classify(model, (DRAWS[name](batch[0]), batch[1])))


# Evaluation and prediction


def scores(model, batch):
    x, y = batch
    logits = model(x)
    return {
        "loss": F.cross_entropy(logits, y),
        "confusion": ll.metrics.ConfusionMatrix.of(logits, y, classes=3),
    }


@pytest.mark.slow
def test_a_stack_is_evaluated_and_predicts_member_by_member():
    _, stack = stacked(sgd, normalized)
    model = seeded(normalized, 0)
    eval_step = ll.make_eval_step(model, scores)
    predict_step = ll.make_predict_step(model, lambda model, batch: model(batch[0]).softmax(1))
    data = [*batches(5), *batches(1, size=3)]
    found = compute_members(ll.evaluation.evaluate_records(ll.vmap_step(eval_step), stack, data), prefix="eval/")
    for one, state in zip(found, unstack_states(stack), strict=True):
        assert one == pytest.approx(ll.evaluate(eval_step, state, data, prefix="eval/"), rel=1e-12)
    for batch in data:
        each = torch.stack([predict_step(state, batch) for state in unstack_states(stack)])
        close(ll.vmap_step(predict_step)(stack, batch), each, 1e-12)


# Members that part from the others


@pytest.mark.slow
@both_steps
def test_a_member_whose_update_is_skipped_stays_where_it_was(donate):
    def optimizer(number):
        return ll.chain(ll.skip_nonfinite(1), adamw(number))

    data = batches(6, members=(3,))
    for place in (1, 2, 3):  # more in a row than one run would accept
        data[place][0][1, 0, 0] = math.inf
    step, stack = stacked(optimizer, plain, own_batches=True, donate=donate)
    for batch in data:
        stack, _ = step(stack, batch)
    assert stack.opt_state["skip_nonfinite"]["total_notfinite"].tolist() == [0, 3, 0]
    assert stack.step == 6
    for number, one in enumerate(unstack_states(stack)):
        own_step, state = alone(number, adamw, plain)
        for place, (x, y) in enumerate(data):
            if not (number == 1 and place in (1, 2, 3)):
                state, _ = own_step(state, (x[number], y[number]))
        close(one.params, state.params)
        close(one.opt_state["AdamW"], state.opt_state["AdamW"])


@pytest.mark.slow
def test_where_all_are_skipped_the_step_does_not_count():
    step, stack = stacked(lambda number: ll.chain(ll.skip_nonfinite(5), sgd(number)), plain)
    x, y = batches(1)[0]
    after, _ = step(stack, (x * math.inf, y))
    assert (after.step, after.batch, after.skipped) == (0, 1, True)
    close(after.params, stack.params, 0)


@pytest.mark.slow
def test_members_that_are_chosen_continue_together():
    step, stack = stacked(sgd, dropping)
    stack, _ = step(stack, batches(1)[0])
    members = unstack_states(stack)
    smaller = stack_states([members[2], members[0]])
    assert smaller.seed == (SEEDS[2], SEEDS[0])
    assert (len(stack.seed), len(smaller.seed)) == (3, 2)
    optimizer = ll.optimizer(optim.SGD, lr=per_member([LRS[2], LRS[0]]), momentum=0.9)
    own = ll.vmap_step(step_of(optimizer, dropping))
    for batch in batches(3):
        stack, smaller = step(stack, batch)[0], own(smaller, batch)[0]
    members = unstack_states(stack)
    close(trees(smaller), trees(stack_states([members[2], members[0]])))


def test_a_first_state_has_the_first_value_that_is_not_0_at_step_0():
    assert per_member([0.0, lambda step: 0.1 + step, 0.3])(0) == 0.1


# A stack is a state


@pytest.mark.slow
def test_a_stack_is_saved_and_restored(tmp_path):
    def optimizer(number):
        return ll.chain(sgd(number), ll.ema(0.9))

    step, stack = stacked(optimizer, dropping)
    stack = stack.replace(seed=(-1, 2**70, 3))
    fresh = stack
    ckpt = ll.checkpoint_io(tmp_path)
    for batch in batches(2):
        stack, _ = step(stack, batch)
    ckpt.save(stack)
    restored = ckpt.restore(fresh)
    assert counts(restored) == counts(stack)
    assert restored.seed == (-1, 2**70, 3)
    assert ckpt.latest().step == 2
    exactly(trees(restored), trees(stack))


@pytest.mark.slow
def test_a_donated_stack_is_spent():
    step, stack = stacked(sgd, dropping, donate=True)
    kept = unstack_states(stack)
    after, _ = step(stack, batches(1)[0])
    with pytest.raises(ll.DonatedStateError, match="donated"):
        _ = stack.params
    again, _ = step(stack_states(kept), batches(1)[0])
    exactly(trees(again), trees(after))


@pytest.mark.slow
def test_a_pure_step_leaves_the_stack():
    step, stack = stacked(sgd, lambda: nn.Sequential(normalized(), nn.Dropout(0.3)))
    before, stream = ll.copy_state(stack), torch.get_rng_state()
    first, _ = step(stack, batches(1)[0])
    second, _ = step(stack, batches(1)[0])
    exactly(trees(stack), trees(before))
    exactly(trees(first), trees(second))
    assert torch.equal(torch.get_rng_state(), stream)


def test_members_with_equal_seeds_share_their_masks_which_is_said_unless_it_is_meant(recwarn):
    net = nn.Dropout(0.5)
    sample = ll.vmap_step(ll.make_predict_step(net, lambda net, x: net(x), training=True))
    one = ll.TrainState(seed=5)
    forks = [ll.state.fold_in(one, number) for number in range(3)]
    x = torch.ones(60)
    for states, told, message in (
        ([one] * 3, {}, "members 0, 1, 2 have equal seeds (5)"),
        ([forks[0], one, forks[0]], {}, f"members 0, 2 have equal seeds ({forks[0].seed})"),
        ([one] * 3, {"same_seeds": True}, None),
        (forks, {}, None),
        ([one], {}, None),
    ):
        recwarn.clear()
        masks = sample(stack_states(states, **told), x)
        assert len({tuple(mask.tolist()) for mask in masks}) == len({state.seed for state in states})
        assert [str(warning.message).startswith(message) for warning in recwarn] == [True] * bool(message)
    assert not recwarn


# What is refused


def first_state(**changes):
    return ll.init_state(seeded(plain, 0), adamw(0)).replace(**changes)


def stack_of(*states):
    return lambda: stack_states(states)


def wider():
    state = first_state()
    return state.replace(params={**state.params, "2.bias": torch.zeros(4)})


def taken_by(stack=None, batch=None, optimizer=adamw, make=plain, **options):
    """A step of a stack, called with a state or a batch that it does not take."""

    def call():
        step, own = stacked(optimizer, make, **options)
        return step(own if stack is None else stack(own), batches(1)[0] if batch is None else batch)

    return call


def one_state_of_many():
    step = ll.make_train_step(ll.make_grad_fn(seeded(plain, 0), classify), adamw(None))
    return step(first_state(step=1), batches(1)[0])


def evaluated():
    _, stack = stacked(adamw, plain)
    return ll.evaluate(ll.vmap_step(ll.make_eval_step(seeded(plain, 0), scores)), stack, batches(2))


def plain_step_of_a_stack(transform=lambda step: step):
    _, stack = stacked(adamw, plain)
    transform(ll.make_eval_step(seeded(plain, 0), scores))(stack, batches(1)[0])


def bound():
    return ll.bind(plain(), stacked(adamw, plain)[1])


UNTRACEABLE = ll.transforms.UntraceableError
REFUSED = {  # name -> (call, type, what the message names)
    "moments": (stack_of(first_state(), first_state(step=3)), ValueError, ["member 1", "step 3", "member 0"]),
    "trees": (
        stack_of(first_state(), first_state(opt_state={"AdamW": {"state": {}}})),
        ValueError,
        ["opt_state['AdamW']['state']['0.bias']['exp_avg']", "members 0 and 1"],
    ),
    "shapes": (
        stack_of(first_state(), first_state(), wider()),
        ValueError,
        ["params['2.bias']", "(4,)", "member 2", "(3,)"],
    ),
    "no stack": (lambda: unstack_states(first_state()), ValueError, ["seed 0", "stack_states"]),
    "values": (
        taken_by(lambda stack: stack_states(unstack_states(stack)[:2])),
        ValueError,
        ["per_member([0.01, 0.003, 0.03])", "3 values", "2 members"],
    ),
    "values of one state": (one_state_of_many, ValueError, ["per_member", "ll.vmap_step"]),
    "one state": (taken_by(lambda stack: first_state()), ValueError, ["one state", "seed 0"]),
    "one batch": (taken_by(own_batches=True), ValueError, ["(6, 4)", "3 members", "own_batches=True"]),
    "metrics of one": (
        lambda: compute_members({"loss": ll.Mean(3.0, 2)}),
        ValueError,
        ["(loss)", "ll.compute"],
    ),
    "metrics of members": (
        evaluated,
        ValueError,
        ["'loss'", "(3,)", "compute_members(metrics)", "ll.evaluation.evaluate_records"],
    ),
    "a plain step": (plain_step_of_a_stack, TypeError, ["stack", "ll.vmap_step(step)", "unstack_states(stack)[0]"]),
    "a compiled plain step": (
        lambda: plain_step_of_a_stack(partial(ll.compile_step, backend="eager")),
        ValueError,
        ["has shape (3, ", "ll.vmap_step(step)"],
    ),
    "a module for one": (bound, ValueError, ["has shape (3, ", "ll.vmap_step(step)"]),
}


@one_report
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, kind, words = REFUSED[name]
    with pytest.raises(kind) as error:
        call()
    assert all(word in str(error.value) for word in words)


def test_members_whose_averages_part_are_refused():
    def optimizer(number):
        return ll.chain(ll.skip_nonfinite(5), sgd(number), ll.optim.swa(start=0, every=2))

    step, stack = stacked(optimizer, plain, own_batches=True)
    data = batches(3, members=(3,))
    data[0][0][1, 0, 0] = math.nan
    stack, _ = step(stack, data[0])
    with pytest.raises(
        ValueError, match=r"members 0 and 1 of the stack part in what their step does.*unstack_states"
    ):
        step(stack, data[1])


# Compiled

# Inductor fuses products and sums, and orders sums otherwise.
ROUNDING = 1e-9


@pytest.mark.slow
def test_a_stack_is_compiled():
    def optimizer(number):
        return ll.chain(ll.skip_nonfinite(3), ll.clip_by_global_norm(0.5), adamw(number), ll.ema(0.9))

    check(
        optimizer,
        data=batches(4),
        donate=True,
        compile=True,
        tolerance=ROUNDING,
    )


# Whatever the number of members


@pytest.mark.slow
@settings(deadline=None, max_examples=4)
@given(
    seeds=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    donate=st.booleans(),
    own_batches=st.booleans(),
)
def test_any_number_of_members_and_samples(seeds, sizes, donate, own_batches):
    lrs = [1e-2 * (number + 1) for number in range(len(seeds))]
    data = [batches(1, size, (len(seeds),) if own_batches else ())[0] for size in sizes]
    check(
        lambda number: ll.optimizer(optim.SGD, lr=of(lrs)(number), momentum=0.9),
        data=data,
        seeds=seeds,
        donate=donate,
        own_batches=own_batches,
        compilations=len({*sizes}),
    )


@pytest.mark.slow
def test_batches_of_members_may_have_any_strides():
    data = [(x.permute(2, 0, 1).contiguous().permute(1, 2, 0), y) for x, y in batches(2, members=(3,))]
    check(sgd, data=data, own_batches=True)
