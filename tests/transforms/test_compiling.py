"""The compiled step against the eager one: every optimizer, wrapper and model, what is counted, what is refused.

Dynamo has no part in a compiled step, so its counters of graph breaks stand still by construction: what cannot be
written down raises. What is counted instead is how often a graph is handed to the backend.
"""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from shared import SGD, both_steps, make_train_step
from shared import mean_square as squares
from torch import nn, optim
from torch.utils._pytree import tree_leaves
from transform_cases import (
    MODELS,
    OPTIMIZERS,
    ROUGH,
    WRAPPERS,
    batches,
    counts,
    dropping,
    normalized,
    plain,
    seeded,
    with_a_number,
)
from transform_cases import classify as loss_fn

import looplib as ll

QUICK = {"backend": "eager"}  # the graph as it was written down, run operation by operation
UNTRACEABLE = ll.transforms.UntraceableError


def net():
    return seeded(normalized)


def train(step, state, data):
    """The last state, and the metrics of each step as numbers."""
    found = []
    for batch in data:
        state, metrics = step(state, batch)
        found.append(ll.compute(metrics))
    return state, found


def tensors(state):
    return tree_leaves((state.params, state.buffers, state.opt_state))


def same(one, other):
    """True if two states have the same bits."""
    assert counts(one) == counts(other)
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs)


def assert_close(one, other, rtol, atol):
    assert counts(one) == counts(other)
    for name in ("params", "buffers", "opt_state"):
        expected, found = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


LR = ll.warmup_cosine(1e-2, warmup=3, total=50)


def adamw(**options):
    return ll.optimizer(optim.AdamW, **{"lr": LR, **options})


def ramp(first, last, steps=30):
    return lambda step: first + (last - first) * min(step, steps) / steps


# Those in which more changes than the learning rate.
CHANGING = {
    "SGD scheduled": lambda: ll.optimizer(optim.SGD, lr=LR, momentum=ramp(0.8, 0.95), weight_decay=ramp(0.1, 0.01)),
    "Adam betas": lambda: ll.optimizer(optim.Adam, lr=1e-2, betas=(ramp(0.8, 0.95), 0.99), maximize=True),
    "AdamW groups": lambda: adamw(groups=[(lambda name, t: t.ndim < 2, {"weight_decay": 0.0, "lr": 1e-3})]),
    "RMSprop scheduled": lambda: ll.optimizer(optim.RMSprop, lr=LR, alpha=ramp(0.5, 0.9), momentum=ramp(0.8, 0.95)),
    "NumPy": lambda: ll.optimizer(optim.SGD, lr=lambda step: np.float32(0.1) / (step + 1)),
    "Muon": lambda: ll.optim.partition(
        {"matrices": ll.optimizer(optim.Muon, lr=LR), "rest": adamw()},
        lambda name, tensor: "matrices" if tensor.ndim == 2 else "rest",
    ),
}


def optimizer_of(name):
    if name in CHANGING:
        return CHANGING[name]()
    cls, lr, options = OPTIMIZERS[name]
    return ll.optimizer(cls, lr=ll.warmup_cosine(lr, warmup=3, total=50), **options)


def compare(model, grad_fn, optimizer, data, donate, *, compile=QUICK, rtol=1e-10, atol=1e-12, seed=0):
    """The eager step and the compiled one over the batches; returns the compiled step and both states."""
    start = ll.init_state(model, optimizer, seed=seed, epoch_length=20)
    kept = ll.copy_state(start)
    eager = ll.make_train_step(grad_fn, optimizer)
    step = make_train_step(grad_fn, optimizer, donate=donate, compile=compile)
    expected, numbers = train(eager, kept, data)
    state, found = train(step, ll.copy_state(kept), data)
    assert_close(expected, state, rtol, atol)
    for one, other in zip(numbers, found, strict=True):
        assert other == pytest.approx(one, rel=max(rtol, 1e-10), abs=1e-12, nan_ok=True)
    assert same(kept, start)
    return step, state


@both_steps
@pytest.mark.parametrize("name", [*OPTIMIZERS, *CHANGING])
def test_every_optimizer_of_torch_is_that_of_the_eager_step(name, donate):
    model, rtol = seeded(with_a_number), ROUGH.get(name, 1e-10)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    step, _ = compare(model, grad_fn, optimizer_of(name), batches(30), donate, rtol=rtol, atol=rtol)
    # With dampening, the first update makes the state, in a graph of its own.
    assert step.compiler.compilations == (2 if name == "SGD, dampening" else 1)


@pytest.mark.slow
def test_other_classes_of_torch_are_refused_by_name():
    classes = {cls for cls in vars(optim).values() if isinstance(cls, type) and issubclass(cls, optim.Optimizer)}
    others = classes - {cls for cls, *_ in OPTIMIZERS.values()} - {optim.Optimizer, optim.Muon}
    assert {cls.__name__ for cls in others} == {"ASGD", "Adafactor", "LBFGS", "RAdam", "Rprop", "SparseAdam"}
    model = nn.Linear(4, 3).double()
    for optimizer in (ll.optimizer(cls, lr=0.1) for cls in others - {optim.SparseAdam}):
        step = ll.compile_step(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer), **QUICK)
        (name,) = optimizer.description
        with pytest.raises(ll.transforms.UntraceableError, match=rf"found {name} \(it.*block\.compile"):
            step(ll.init_state(model, optimizer), batches(1)[0])


@pytest.mark.parametrize("name", ["dampening", "dampening, scheduled"])
def test_a_late_first_gradient_begins_in_a_graph_as_in_torch(name):
    options = {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}
    model, raw = seeded(with_a_number), seeded(with_a_number)
    scheduled = {"momentum": lambda step: 0.9} if "scheduled" in name else {}
    optimizer, theirs = (
        ll.optimizer(optim.SGD, **{**options, **scheduled}),
        optim.SGD(raw.parameters(), **options),
    )
    steps = {}
    for late in (False, True):
        grad_fn = ll.make_grad_fn(
            model, loss_fn, trainable=lambda name, tensor, late=late: late or not name.startswith("0.")
        )
        steps[late] = ll.compile_step(ll.make_train_step(grad_fn, optimizer), **QUICK)
    state = ll.init_state(model, optimizer)
    for number, batch in enumerate(batches(8)):
        late = number >= 3
        state, _ = steps[late](state, batch)
        raw.zero_grad()
        loss_fn(raw, batch).backward()
        for tensor in raw[0].parameters():
            tensor.grad = tensor.grad if late else None
        theirs.step()
        torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()), rtol=1e-10, atol=1e-12)
    assert [steps[late].compiler.compilations for late in (False, True)] == [2, 2]


def compare_wrapper(name, donate, compile, tolerance):
    grads, updates, programs = WRAPPERS[name]
    without_norm = name in ("accumulate ragged", "accumulate within")  # batch norm takes no single sample
    model = seeded(lambda: normalized(nn.Identity if without_norm else nn.BatchNorm1d))
    data = batches(35, at_7=math.inf if name == "finite" else 1.0)
    grad_fn = grads(ll.make_grad_fn(model, loss_fn))
    step, state = compare(model, grad_fn, updates(adamw()), data, donate, compile=compile, rtol=tolerance)
    assert step.compiler.compilations == programs
    assert (state.step < 35) == (name == "finite")


@both_steps
@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper(name, donate):
    compare_wrapper(name, donate, QUICK, 1e-10)


@both_steps
@pytest.mark.parametrize("name", MODELS)
def test_models(name, donate):
    make, loss, data = MODELS[name]
    model = seeded(make)
    # oneDNN's operation for an LSTM rounds elsewhere than those of a graph.
    step, _ = compare(model, ll.make_grad_fn(model, loss), SGD, data(), donate)
    assert step.compiler.compilations == 1


@pytest.mark.slow
@both_steps
def test_a_loss_scale_that_overflows(donate):
    # In float16 the backward pass of some steps overflows at first; both sides skip the same ones.
    model = seeded(plain, 0, torch.float32)
    grad_fn = ll.make_grad_fn(model, ll.autocast(loss_fn, torch.float16))
    scaled = ll.optim.dynamic_loss_scale(init_scale=2.0**20, growth_interval=5)
    optimizer = ll.chain(scaled, ll.clip_by_global_norm(1.0), adamw())
    data = batches(50, dtype=torch.float32)
    step, state = compare(model, grad_fn, optimizer, data, donate, rtol=2e-5, atol=1e-6)
    assert 0 < state.step < 50
    assert step.compiler.compilations == 1


# Machine code. Float32 is what machine code is made for, and its sums are rounded in another order than the eager
# step's. Where a gradient is next to 0, Adam divides one rounding by another: hence eps=1e-5.


@pytest.mark.slow
@both_steps
def test_machine_code_is_made_once_and_draws_as_the_eager_step(donate, handed):
    model = seeded(dropping, dtype=torch.float32)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    optimizer = ll.chain(ll.clip_by_global_norm(1.0), adamw(eps=1e-5), ll.ema())
    data, options = batches(30, size=16, dtype=torch.float32), {"options": {"fallback_random": True}}
    step, state = compare(model, grad_fn, optimizer, data, donate, compile=options, rtol=1e-4, atol=1e-4)
    assert len(handed) == step.compiler.compilations == 1
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors(state)]
    assert len(places) == len(set(places))


@pytest.mark.slow
def test_machine_code_draws_numbers_of_the_seed_and_step(handed):
    model, optimizer = seeded(dropping, dtype=torch.float32), adamw()
    grad_fn, data = ll.make_grad_fn(model, loss_fn), batches(4, dtype=torch.float32)
    one, other = (make_train_step(grad_fn, optimizer, compile=True) for _ in range(2))
    start = ll.init_state(model, optimizer, seed=7)
    first, losses = train(one, start, data)
    torch.rand(5)
    again, repeated = train(other, start, data)  # compiled twice
    assert same(first, again)
    assert losses == repeated
    places = [start.replace(seed=seed, step=step) for seed in (7, 8) for step in (0, 1, 2)]
    assert len({train(one, state, data[:1])[1][0]["loss"] for state in places}) == 6
    assert len(handed) == 2


def test_machine_code_scales_a_product_that_is_added():
    # Inductor takes x + alpha * (a @ b) for one operation and forgets alpha, which is what SGD's step is made of.
    model, optimizer = net(), ll.optimizer(optim.SGD, lr=0.1, weight_decay=0.01)
    compare(model, ll.make_grad_fn(model, loss_fn), optimizer, batches(3), False, compile=True)


@pytest.mark.large
@both_steps
@pytest.mark.parametrize("name", [*OPTIMIZERS, *CHANGING, *WRAPPERS])
def test_machine_code_of_every_optimizer_and_wrapper(name, donate):
    # Muon computes in bfloat16, and Inductor would leave out the rounding between operations that it fuses.
    options, rtol = {"options": {"emulate_precision_casts": True}}, ROUGH.get(name, 1e-7)
    if name in WRAPPERS:
        compare_wrapper(name, donate, options, rtol)
        return
    model = net()
    grad_fn = ll.make_grad_fn(model, loss_fn)
    compare(model, grad_fn, optimizer_of(name), batches(50), donate, compile=options, rtol=rtol, atol=rtol)


# What is counted


@pytest.fixture
def handed(monkeypatch):
    """The graphs that Inductor is given."""
    from torch._inductor import compile_fx

    graphs, plain = [], compile_fx.compile_fx

    def counting(graph, *args, **options):
        if "config_patches" in options:  # it calls itself when it has set these
            graphs.append(graph)
        return plain(graph, *args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx", counting)
    return graphs


def quick_step(donate=False, optimizer=None, model=None, loss_fn=loss_fn, **options):
    model = net() if model is None else model
    optimizer = adamw() if optimizer is None else optimizer
    step = make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate, compile=QUICK, **options)
    return step, ll.init_state(model, optimizer, epoch_length=4), model, optimizer


@pytest.mark.slow
@both_steps
def test_shapes_and_missing_fields_alone_make_programs(donate, tmp_path):
    step, state, model, optimizer = quick_step(donate)
    epoch = [*batches(3), batches(1, size=4)[0]]  # the last batch is smaller
    state, _ = train(step, state, epoch * 3)
    assert step.compiler.compilations == 2
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state)
    kept = ll.copy_state(state)
    for start in (
        lambda: ckpt.restore(ll.init_state(model, optimizer, epoch_length=4)),
        lambda: ll.copy_state(kept),
        lambda: ll.bind(model, ll.copy_state(kept)),
        lambda: ll.copy_state(kept).replace(extra={"note": torch.zeros(3)}),
        lambda: ll.copy_state(kept).replace(seed=5, epoch_length=7),
    ):
        train(step, start(), epoch)
    one, other = ll.copy_state(kept), ll.copy_state(kept).replace(seed=1)
    for batch in epoch:  # two forks in turn
        (one, _), (other, _) = step(one, batch), step(other, batch)
    assert step.compiler.compilations == 4  # and once more for each shape of a state that has extra


def by_hand(init, update_):
    return ll.optim.part("by_hand", init=init, update_=update_, role="weights")


@pytest.mark.parametrize("compiled", [True, False])
def test_entries_with_other_strides_than_their_parameters_are_left_to_the_step_of_the_class(compiled):
    """A fused kernel needs the same ones, and is not asked for: as in torch with `foreach=False`."""
    model, raw = seeded(lambda: nn.Linear(6, 4)), seeded(lambda: nn.Linear(6, 4))
    optimizer = adamw(lr=0.01)
    step = ll.make_train_step(ll.make_grad_fn(model, squares), optimizer)
    step = ll.compile_step(step, **QUICK) if compiled else step
    state = ll.init_state(model, optimizer)
    theirs = optim.AdamW(raw.parameters(), lr=0.01, foreach=False)
    entry = state.opt_state["AdamW"]["state"]["weight"]
    entry["exp_avg"] = torch.zeros(6, 4, dtype=raw.weight.dtype).t()
    for batch in torch.randn(3, 2, 6, dtype=raw.weight.dtype):
        state, _ = step(state, batch)
        theirs.zero_grad()
        squares(raw, batch).backward()
        theirs.step()
    rtol = 1e-12 if compiled else 0  # the graph has numbers that move as tensors, which are rounded elsewhere
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()), rtol=rtol, atol=0)


@pytest.mark.slow
@both_steps
def test_a_state_whose_layout_changes_with_the_first_update(donate):
    plain = adamw()

    def update_(grads, state, params, step):
        params, inner, _ = plain.update_(grads, state["inner"], params, step)
        return params, {"inner": inner, "sum": state.get("sum", 0.0) + grads["0.weight"]}

    optimizer = by_hand(lambda params: {"inner": plain.init(params)}, update_)
    model = net()
    step, _ = compare(model, ll.make_grad_fn(model, loss_fn), optimizer, batches(5), donate)
    assert step.compiler.compilations == 2


def test_many_compilations_are_warned_of():
    model = nn.Linear(4, 3).double()
    step, state = ll.compile_step(ll.make_eval_step(model, loss_fn), **QUICK), ll.init_state(model)
    for size in range(2, 17):
        step(state, batches(1, size=size)[0])
    with pytest.warns(UserWarning, match="compiled 16 times.*pad batches"):
        step(state, batches(1, size=17)[0])


@pytest.mark.slow
def test_numbers_and_strings_of_a_batch_belong_to_its_shape():
    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"]) * (batch["times"] if batch["kind"] == "a" else 0.5)

    step, state, model, optimizer = quick_step(loss_fn=loss_fn)
    eager = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    x, y = batches(1)[0]
    for times, kind, programs in ((1, "a", 1), (2, "a", 2), (2, "b", 3), (1, "a", 3), (1.5, "a", 4)):
        batch = {"x": x, "y": y, "times": times, "kind": kind}
        torch.testing.assert_close(step(state, batch)[0].params, eager(state, batch)[0].params, rtol=1e-12, atol=0)
        assert step.compiler.compilations == programs


# What cannot be part of a graph


def counting(model, batch):
    model.calls = getattr(model, "calls", 0) + 1
    return loss_fn(model, batch)


CALLS = {"n": 0}


def counting_global(model, batch):
    CALLS["n"] += 1
    return loss_fn(model, batch)


def read(model, batch):
    return loss_fn(model, batch) * float(batch[0].sum().item() > 0)


def through_numpy(model, batch):
    return loss_fn(model, (torch.as_tensor(np.tanh(batch[0].numpy())), batch[1]))


def of_another_shape(model, batch):
    x, y = batch
    return loss_fn(model, (x[x[:, 0] > 0], y[x[:, 0] > 0]))


def asking_for_what_it_computes(model, batch):
    return loss_fn(model, batch) * ll.transforms.on_host(lambda x: 1.0, batch[0] * 2)


def counted(state):
    return (state.step + 1) * (state.seed + 1) * (state.epoch_length or 1)


def scaled_by_a_count(grad_fn):
    def scaled(state, batch, **request):
        out = grad_fn(state, batch, **request)
        return out._replace(grads={key: grad / counted(state) for key, grad in out.grads.items()})

    return scaled


def embedding():
    return nn.Sequential(nn.Embedding(5, 3, sparse=True)), torch.tensor([1, 2])


def schedule_free():
    return ll.optimizer(pytest.importorskip("schedulefree").AdamWScheduleFree, lr=0.1)


def counting_first():
    """An optimizer that asks for a number of the state after it has moved it."""
    plain = adamw()

    def update_(grads, state, params, step):
        state["n"] += 1
        ll.transforms.on_host(int, state["n"])
        params, state["inner"], _ = plain.update_(grads, state["inner"], params, step)
        return params, state

    return by_hand(lambda params: {"inner": plain.init(params), "n": torch.tensor(0)}, update_)


LINE = "cannot be part of a compiled step"
REFUSED = {  # name -> (arguments of `refused`, what the message names)
    "read": ({"loss": read}, [__file__, "in read:", "float", LINE]),
    "NumPy": ({"loss": through_numpy}, ["in through_numpy:", "np.tanh", LINE]),
    "shape": ({"loss": of_another_shape}, ["in of_another_shape:", "x[x[:, 0] > 0]", LINE]),
    "attribute": ({"loss": counting}, ["Sequential.calls", "register_buffer"]),
    "global": ({"loss": counting_global}, ["CALLS['n']", "register_buffer"]),
    "count": ({"wrap": scaled_by_a_count}, ["state.step", "ll.transforms.on_host(function, state.step)"]),
    "computed": ({"loss": asking_for_what_it_computes}, ["on_host", "computed"]),
    "moved": ({"optimizer": counting_first}, ["on_host", "computed"]),
    "array": ({"batch": (np.ones((2, 4)), 0)}, ["ndarray", "torch.from_numpy"]),
    "sparse": ({"model": embedding, "loss": squares}, ["0.weight", "sparse=True"]),
    "numbers of its own": ({"optimizer": schedule_free}, ["AdamWScheduleFree"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_part_of_a_graph_is_refused_by_name(name):
    given, words = REFUSED[name]
    model, batch = given["model"]() if "model" in given else (net(), given.get("batch", batches(1)[0]))
    model.calls = 0
    optimizer = given.get("optimizer", adamw)()
    grad_fn = given.get("wrap", lambda grad_fn: grad_fn)(ll.make_grad_fn(model, given.get("loss", loss_fn)))
    step, state = make_train_step(grad_fn, optimizer, compile=QUICK), ll.init_state(model, optimizer, epoch_length=3)
    for _ in range(2):  # what failed is traced again
        with pytest.raises(UNTRACEABLE) as error:
            step(state, batch)
        assert all(word in str(error.value) for word in words)


@both_steps
def test_numbers_that_are_asked_for(donate):
    model = net()
    inner, plain = ll.make_grad_fn(model, loss_fn), adamw()

    def factor_of(step, extra, cycle):
        length, usual = cycle
        return extra["by"] if step % length else usual

    def grad_fn(state, batch, **request):
        out = inner(state, batch, **request)
        factor = ll.transforms.on_host(factor_of, state.step, state.extra, (3, 1.0))
        return out._replace(grads={key: grad * factor for key, grad in out.grads.items()})

    def update_(grads, state, params, step):
        negative = ll.transforms.on_host(lambda step: step >= 4, step)
        grads = {key: -grad for key, grad in grads.items()} if negative else grads
        return plain.update_(grads, state, params, step)

    optimizer = by_hand(plain.init, update_)
    state = ll.init_state(model, optimizer, extra={"by": 0.5})
    expected, _ = train(ll.make_train_step(grad_fn, optimizer), ll.copy_state(state), batches(10))
    step = make_train_step(grad_fn, optimizer, donate=donate, compile=QUICK)
    found, _ = train(step, ll.copy_state(state), batches(10))
    assert_close(expected, found, 1e-10, 1e-12)
    assert step.compiler.compilations == 2


def test_an_engine_is_refused(one_process):
    step, state, _, _ = quick_step(model=nn.parallel.DistributedDataParallel(net()), donate=True)
    with pytest.raises(UNTRACEABLE, match=r"DistributedDataParallel sends gradients .* block.compile"):
        step(state, batches(1)[0])


# Purity, donation, interrupts


@pytest.mark.filterwarnings("ignore:.*still has the weights of before training")
def test_a_pure_step_leaves_all_as_it_was():
    model = nn.Sequential(net(), nn.Dropout(0.5))
    step, state, _, _ = quick_step(model=model, optimizer=ll.chain(adamw(), ll.ema()))
    kept = ll.copy_state(state)
    batch = batches(1)[0]
    stream, x = torch.get_rng_state(), batch[0].clone()
    one, _ = step(state, batch)
    torch.rand(3)
    other, _ = step(state, batch)
    torch.set_rng_state(stream)
    step(one, batch)
    assert same(one, other)
    assert same(state, kept)
    assert torch.equal(torch.get_rng_state(), stream)
    assert torch.equal(batch[0], x)
    assert all(tensor.grad is None and tensor.grad_fn is None for tensor in [*model.parameters(), *tensors(one)])
    assert all(tensor.requires_grad for tensor in one.params.values())


def test_a_donated_step_writes_the_state_and_spends_it():
    step, state, model, _ = quick_step(donate=True)
    places = {name: tensor.data_ptr() for name, tensor in state.params.items()}
    new, _ = step(state, batches(1)[0])
    assert {name: tensor.data_ptr() for name, tensor in new.params.items()} == places
    assert new.params["0.weight"] is model[0].weight  # it is bound still
    with pytest.raises(ll.DonatedStateError, match="a train step with donate=True"):
        _ = state.params


@pytest.mark.every_case
@both_steps
def test_giving_up_leaves_the_state_as_it_was(donate):
    model, optimizer = net(), ll.chain(ll.skip_nonfinite(1), adamw())
    step, state, _, _ = quick_step(donate, model=model, optimizer=optimizer)
    bad = batches(1, at_0=math.inf)[0]
    first = state
    state, _ = step(first, bad)
    if donate:  # its counts are written, and so it is spent
        with pytest.raises(ll.DonatedStateError):
            _ = first.params
    kept = ll.copy_state(state)
    with pytest.raises(ll.optim.NonFiniteGradientsError, match=r"2 times in a row .*at step 0"):
        step(state, bad)
    assert all(torch.equal(state.params[name], tensor) for name, tensor in kept.params.items())
    state, _ = step(state, batches(1)[0])
    assert state.step == 1


@pytest.mark.slow
def test_nothing_holds_on_to_a_state_that_is_let_go():
    step, state, _, _ = quick_step()
    state = ll.copy_state(state)
    born = state
    state, _ = train(step, state, batches(3))
    watched = [weakref.ref(tensor) for one in (born, state) for tensor in tensors(one)]
    del born, state
    gc.collect()
    assert not any(reference() is not None for reference in watched)


# The blocks alone


class Block(nn.Sequential):
    """torch leaves blocks of its own classes eager."""

    def forward(self, x):
        return super().forward(x)


@both_steps
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by dynamo, which looks at the gradients of its inputs
def test_blocks_that_torch_compiles_in_an_eager_step(donate):
    def make():
        return nn.Sequential(nn.Linear(4, 4), Block(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3))

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain, model = seeded(make), seeded(make)
    names, graphs = list(dict(model.named_parameters())), []
    torch._dynamo.reset()
    model[1].compile(backend=counting)
    steps = [
        ll.make_train_step(ll.make_grad_fn(one, loss_fn), adamw(eps=1e-4), donate=donate) for one in (plain, model)
    ]
    (expected, _), (found, _) = (
        train(step, ll.init_state(one, adamw()), batches(3)) for step, one in zip(steps, (plain, model), strict=True)
    )
    assert 0 < len(graphs) < 3  # for the three steps
    torch._dynamo.reset()
    assert list(found.params) == names
    assert_close(expected, found, 1e-10, 1e-12)
