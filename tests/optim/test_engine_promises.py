"""An update has the bits of the class's own step: what used to differ, each against a raw loop of torch."""

import copy
import dataclasses
import threading
from collections import deque

import pytest
import torch
from per_parameter import PerParameter
from shared import update
from torch import nn

import looplib as ll

both = pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])


def gradients(params, step, names=None):
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for name, tensor in params.items()
        if names is None or name in names
    }


def numbers(**shapes):
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def raw_loop(cls, params, grads_at, steps, groups=None, **options):
    """The class itself: `params` are copied; `grads_at(params, step)` names those that have a gradient."""
    params = {name: copied(tensor).requires_grad_() for name, tensor in params.items()}
    parts = [{**group, "params": [params[name] for name in group["params"]]} for group in groups or ()]
    optimizer = cls(parts or list(params.values()), **options)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    for step in range(steps):
        grads = grads_at(params, step)
        for name, tensor in params.items():
            tensor.grad = grads.get(name)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in params.items()}


def copied(tensor):
    """A copy with the same strides, gaps included."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    copy = torch.zeros(span, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return copy.copy_(tensor.detach())


def looped(optimizer, params, grads_at, steps, donate, first=0):
    params = {name: copied(tensor).requires_grad_() for name, tensor in params.items()}
    opt_state = optimizer.init(params)
    for step in range(first, first + steps):
        before = copy.deepcopy((params, opt_state)), (params, opt_state)
        params, opt_state = update(optimizer, grads_at(params, step - first), opt_state, params, step, donate)
        if not donate:
            assert_same(*before)
    return {name: tensor.detach() for name, tensor in params.items()}, opt_state


def assert_same(one, other):
    leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (one, other)]
    for a, b in zip(*leaves, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def assert_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(torch.nan_to_num(found[name]), torch.nan_to_num(tensor)), name


# A.1: options, of all and of a group


OPTIONS = {
    "decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "foreach": {"foreach": True},
    "plain": {"fused": False, "foreach": False},
    "fused": {"fused": True},
    "differentiable": {"differentiable": True},
    "fused, decoupled": {"fused": True, "decoupled_weight_decay": True, "weight_decay": 0.1},
}


@both
@pytest.mark.parametrize(
    ("name", "of_a_group"),
    # With differentiable=True for all, torch itself refuses parameters that are leaves.
    [*((name, False) for name in OPTIONS if name != "differentiable"), *((name, True) for name in OPTIONS)],
)
def test_options_of_adam_are_honoured(name, of_a_group, donate):
    params, options = numbers(a=(5, 3), b=(4,)), OPTIONS[name]
    kernel = {} if options.keys() & {"fused", "foreach", "differentiable"} else {"fused": True}
    if of_a_group:
        groups = [{"params": ["a"], **options, **kernel}, {"params": ["b"], "fused": True}]
        expected = raw_loop(torch.optim.Adam, params, gradients, 30, groups, lr=0.05)
        optimizer = ll.optimizer(torch.optim.Adam, lr=0.05, groups=[(lambda name, tensor: name == "a", options)])
    else:
        expected = raw_loop(torch.optim.Adam, params, gradients, 30, lr=0.05, **options, **kernel)
        optimizer = ll.optimizer(torch.optim.Adam, lr=0.05, **options)
    assert_bits(looped(optimizer, params, gradients, 30, donate)[0], expected)


# A.2: strides


def layouts():
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(6, 9, generator=generator)
    image = torch.randn(4, 3, 2, 2, generator=generator)
    return {
        "transposed": wide.t(),
        "sliced": wide[:, :4],
        "every second": wide[:, ::2],
        "channels_last": image.to(memory_format=torch.channels_last),
        "contiguous": wide.clone(),
    }


GRAD_LAYOUTS = {
    "as the parameter": lambda grad, like: torch.empty_like(like).copy_(grad),
    "contiguous": lambda grad, like: grad.contiguous(),
    "transposed": lambda grad, like: grad.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda grad, like: grad.flatten()[0].expand(grad.shape),
    "sliced": lambda grad, like: torch.stack([grad, grad], -1)[..., 0],
}


@both
@pytest.mark.parametrize("grads", GRAD_LAYOUTS)
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_strides_do_not_change_the_numbers(cls, layout, grads, donate):
    params = {"w": layouts()[layout], "b": numbers(b=(3,))["b"]}
    options = {"lr": 0.05, **({"momentum": 0.9} if cls is torch.optim.SGD else {})}

    def grads_at(params, step):
        made = gradients(params, step)
        return {**made, "w": GRAD_LAYOUTS[grads](made["w"], params["w"])}

    found, _ = looped(ll.optimizer(cls, **options), params, grads_at, 10, donate)
    plain = raw_loop(cls, params, grads_at, 10, **options)
    # A fused kernel that is right rounds otherwise than the default; one that pairs wrong numbers is off by 0.1.
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
    dense = layout in ("contiguous", "transposed", "channels_last")
    shared = grads_at(params, 0)["w"].stride() == params["w"].stride()
    expected = raw_loop(cls, params, grads_at, 10, fused=True, **options) if dense and shared else plain
    assert_bits(found, expected)


@both
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_kernel_that_was_asked_for_takes_gradients_of_any_strides(cls, donate):
    params = {"w": numbers(w=(6, 9))["w"].t()}

    def other_strides(params, step):
        return {"w": gradients(params, step)["w"].contiguous()}

    def own_strides(params, step):
        return {"w": torch.empty_like(params["w"]).copy_(gradients(params, step)["w"])}

    found, _ = looped(ll.optimizer(cls, lr=0.05, fused=True), params, other_strides, 10, donate)
    assert_bits(found, raw_loop(cls, params, own_strides, 10, lr=0.05, fused=True))


def test_a_fused_kernel_that_was_asked_for_is_refused_where_it_would_be_wrong():
    sliced = {"w": torch.ones(4, 6)[:, :3]}
    with pytest.raises(ValueError, match=r"fused=True for w, whose strides \(6, 1\) leave gaps"):
        ll.optimizer(torch.optim.AdamW, lr=0.1, fused=True).init(sliced)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1, fused=True)
    params = {"w": torch.ones(4, 6)}
    opt_state = optimizer.init(params)
    opt_state["state"]["w"]["exp_avg"] = torch.zeros(6, 4).t()
    with pytest.raises(ValueError, match=r"fused=True for w: its exp_avg has strides"):
        optimizer.update({"w": torch.ones(4, 6)}, opt_state, params, 0)


def test_repr_says_which_kernel_is_taken():
    def told(dtype=torch.float32, shape=(4, 6), cut=None, **options):
        optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1, **options)
        params = {"w": torch.ones(shape, dtype=dtype)[:, :cut]}
        optimizer.update({"w": torch.ones_like(params["w"])}, optimizer.init(params), params, 0)
        return repr(optimizer)

    assert "kernel: fused where" in repr(ll.optimizer(torch.optim.AdamW, lr=0.1))
    assert "AdamW" in told()
    assert "kernel: fused" in told()
    assert "kernel: torch's default" in told(torch.complex64)
    assert "kernel: torch's default" in told(cut=3)
    assert "kernel: foreach=True" in told(foreach=True)
    assert "kernel: torch's default" in repr(ll.optimizer(torch.optim.Adamax, lr=0.1))


# A.3: one optimizer for two models


@both
def test_groups_for_two_models_with_the_same_names(donate):
    def is_matrix(name, tensor):
        return tensor.ndim == 2

    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, groups=[(is_matrix, {"lr": 0.0})])
    models = numbers(a=(2, 2), b=(2,)), numbers(a=(2,), b=(2, 2))
    states = [optimizer.init(params) for params in models]
    for _ in range(2):
        for params, opt_state, still in zip(models, states, ("a", "b"), strict=True):
            before = {name: tensor.clone() for name, tensor in params.items()}
            new, _ = update(optimizer, gradients(params, 0), opt_state, params, 0, donate)
            assert [name for name in params if torch.equal(new[name], before[name])] == [still]


def test_a_predicate_of_which_tensor_it_is_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    head = set(model[1].parameters())
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, groups=[(lambda name, p: p in head, {"lr": 0.5})])
    with pytest.raises(ValueError, match=r"group 0 .* 1\.bias.*by its name, shape or dtype"):
        ll.init_state(model, optimizer)


# A.4: parameters that begin late


class Phantom(PerParameter):
    """As Adan, Yogi, AdaBelief and NAdamW: a first update of its own kind, and counts of Python."""

    def update(self, group, p):
        state = self.state[p]
        if not state:
            state.update(step=0, previous=p.grad.clone(), average=torch.full_like(p, 1e-3))
        state["step"] += 1
        change = p.grad - state["previous"]
        state["previous"].copy_(p.grad)
        state["average"].lerp_(p.grad + change, 0.1)
        p.sub_(state["average"] / (1 - 0.9 ** state["step"]), alpha=group["lr"])


LATE = {
    "Phantom": (Phantom, {}),
    "SGD with dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "foreach": False}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": False}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "AdamWScheduleFree": (None, {"foreach": False}),
}


def late(params, step):
    return gradients(params, step, ["a"] if step < 3 else ["b"] if step == 4 else None)


@both
@pytest.mark.parametrize("first", [0, 1000], ids=["from step 0", "an optimizer of step 1000"])
@pytest.mark.parametrize("name", LATE)
def test_a_parameter_begins_as_in_torch_at_its_own_first_update(name, first, donate):
    import schedulefree

    cls, options = LATE[name]
    cls = cls or schedulefree.AdamWScheduleFree
    params = numbers(a=(3, 2), b=(4,), c=(2, 2))
    expected = raw_loop(cls, params, late, 8, lr=0.05, **options)
    found, _ = looped(ll.optimizer(cls, lr=0.05, **options), params, late, 8, donate, first)
    assert_bits(found, expected)


@both
@pytest.mark.parametrize("cls", [torch.optim.ASGD, torch.optim.Rprop])
def test_a_first_state_of_the_learning_rate_has_that_of_its_own_first_update(cls, donate):
    params = numbers(a=(3, 2), b=(4,))

    def rate(step):
        return 0.1 / (1 + step)

    class Scheduled(cls):
        made = 0

        def step(self, closure=None):
            self.param_groups[0]["lr"] = rate(self.made)
            self.made += 1
            super().step()

    expected = raw_loop(Scheduled, params, late, 8, lr=rate(0))
    assert_bits(looped(ll.optimizer(cls, lr=rate), params, late, 8, donate)[0], expected)


def test_compiled_a_parameter_begins_at_its_own_first_update():
    def frozen(name, step):
        return name.startswith("0.") and step < 3

    def loss_fn(model, x):
        return (model(x) - 1).square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    inner = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    optimizer = ll.optim.freeze(inner, frozen)
    start = ll.copy_state(ll.init_state(model, optimizer))
    ends = []
    for compiled in (False, True):
        step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
        step = ll.compile_step(step, backend="eager") if compiled else step
        state = start
        for number in range(6):
            state, _ = step(state, numbers(x=(4, 3))["x"].double() + number)
        ends.append(state)
    for name, tensor in ends[0].params.items():
        torch.testing.assert_close(ends[1].params[name], tensor, rtol=1e-12, atol=1e-12)
    assert all(state.opt_state["inner_state"]["started"].all() for state in ends)


# A.5: state elsewhere


class Shared(torch.optim.Optimizer):
    """As MADGRAD: a count for all parameters under a key of its own."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.state["k"] = torch.tensor([0])

    @torch.no_grad()
    def step(self, closure=None):
        self.state["k"] += 1
        self.state["total"] = self.state.get("total", 0) + 2
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / (self.state["k"].item() + self.state["total"]))


class Noisy(PerParameter):
    """As SGLD: noise in each update."""

    def update(self, group, p):
        p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class Queue(PerParameter):
    """As AdaShift: the last gradients in a deque."""

    def update(self, group, p):
        self.state[p].setdefault("last", deque(maxlen=3)).append(p.grad.clone())
        p.sub_(self.state[p]["last"][0], alpha=group["lr"])


class Dividing(torch.optim.Optimizer):
    """As DAdaptSGD: a quotient of sums over gradients."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            squares = sum(p.grad.square().sum().item() for p in group["params"])
            group["d"] = max(group["d"], 1 / squares)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * group["d"])


@both
@pytest.mark.parametrize("cls", [Shared, Dividing])
def test_state_for_all_parameters_together(cls, donate):
    params = numbers(a=(3, 2), b=(4,))
    expected = raw_loop(cls, params, gradients, 6)
    found, opt_state = looped(ll.optimizer(cls, lr=1e-2), params, gradients, 6, donate)
    assert_bits(found, expected)
    if cls is Shared:
        assert (opt_state["shared"]["k"].item(), opt_state["shared"]["total"]) == (6, 12)


@both
def test_an_update_draws_by_seed_and_step(donate):
    def loss_fn(model, x):
        return model(x).square().mean()

    def run(seed, optimizer, steps=4, state=None):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
        state = state or ll.init_state(model, optimizer, seed=seed)
        states = [ll.copy_state(state)]
        for _ in range(steps):
            state, _ = step(state, torch.ones(2, 3))
            states.append(ll.copy_state(state))
        return states

    optimizer = ll.optimizer(Noisy, lr=0.1)
    stream = torch.get_rng_state()
    init = ll.optimizer(Noisy, lr=0.1).init(numbers(a=(2,)))
    assert torch.equal(torch.get_rng_state(), stream)
    assert init.keys() == {"state", "started"}
    states = run(5, optimizer)
    torch.rand(3)
    assert_same(run(5, ll.optimizer(Noisy, lr=0.1))[-1].params, states[-1].params)  # whatever was drawn before
    assert_same(run(0, optimizer, 2, ll.copy_state(states[2]))[-1].params, states[-1].params)  # resumed
    other = run(6, optimizer)[-1]
    assert not torch.equal(other.params["weight"], states[-1].params["weight"])
    moved = [states[k + 1].params["weight"] - states[k].params["weight"] for k in range(3)]
    assert not torch.allclose(moved[0], moved[1], atol=1e-3)


class Drawing(Noisy):
    def step(self, closure=None):
        import random

        random.random()
        super().step()


class Counting(Noisy):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.history = []

    def step(self, closure=None):
        self.history.append(1)
        super().step()


class OnItsClass(Noisy):
    count = 0

    def step(self, closure=None):
        OnItsClass.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad / OnItsClass.count)


class Captured(torch.optim.Optimizer):
    """Its own list of parameters, which a pure update's are not in."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.own = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.own:
            p.sub_(p.grad)


class Growing(PerParameter):
    """Keeps more after its second update than after its first."""

    def update(self, group, p):
        state = self.state[p]
        state["late" if state else "first"] = torch.zeros(())
        p.sub_(p.grad, alpha=group["lr"])


def test_what_cannot_be_kept_is_refused_by_name_at_the_start():
    for cls, message in [
        (Queue, r"Queue keeps for a, under 'last', a deque"),
        (Drawing, r"Drawing draws from the random streams of Python or NumPy"),
        (Counting, r"Counting keeps 'history' on the optimizer itself"),
        (OnItsClass, r"OnItsClass keeps something out of reach"),
        (Captured, r"Captured keeps something out of reach"),
        (Growing, r"Growing keeps something out of reach .* keeps more after some updates than after one"),
    ]:
        with pytest.raises(TypeError, match=message):
            ll.optimizer(cls, lr=1e-2).init(numbers(a=(3, 2), b=(4,)))


# A.6: complex parameters


# A.7: the state of another optimizer


def test_a_state_of_another_optimizer_names_both():
    params = numbers(a=(3, 2))
    grads = gradients(params, 0)
    adamw = ll.optimizer(torch.optim.AdamW, lr=0.1)
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = ll.optimizer(torch.optim.SGD, lr=0.1)
    wrapped = ll.optim.apply_if_finite(plain, 3)
    for _ in range(2):  # with nothing known of these parameters, and then with what an update has found out
        with pytest.raises(
            ValueError, match=r"holds (momentum_buffer|nothing) for a parameter, and AdamW is to update it"
        ):
            adamw.update(grads, sgd.init(params), params, 1)
        for other in (sgd, plain):
            with pytest.raises(
                ValueError, match=r"holds step, exp_avg, exp_avg_sq for a parameter, and SGD is to update it"
            ):
                other.update(grads, adamw.init(params), params, 1)
        with pytest.raises(ValueError, match=r"made without an optimizer, and AdamW is to update it"):
            adamw.update(grads, None, params, 0)
        with pytest.raises(
            ValueError,
            match=r"notfinite_count, .* around \(nothing for a parameter\), and AdamW is to update it, .*without a wrapper",
        ):
            adamw.update(grads, wrapped.init(params), params, 0)
        for own in (adamw, sgd, plain):
            own.update(grads, own.init(params), params, 0)


# C.4: traces write nothing into torch


@pytest.mark.parametrize("nested", [False, True], ids=["one trace", "a trace within a trace"])
def test_a_trace_writes_nothing_into_torchs_module(nested):
    module = vars(torch.optim._adafactor)
    before, seen = dict(module), []

    def loss_fn(model, x):
        return model(x).square().mean()

    def trained(weight_decay):
        model = nn.Linear(3, 2)
        optimizer = ll.optimizer(torch.optim.Adafactor, lr=lambda step: 0.1, weight_decay=weight_decay)
        step = ll.compile_step(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer), backend="eager")
        return step(ll.init_state(model, optimizer), torch.ones(4, 3))

    def looking(step):
        seen.append({"max", "min"} & module.keys())
        if nested and len(seen) == 2:
            thread = threading.Thread(target=errors_of, args=(lambda: trained(lambda step: 0.2),))
            thread.start()
            thread.join()
        return 0.1

    errors = []

    def errors_of(function):
        try:
            function()
        except Exception as error:
            errors.append(error)

    trained(looking)
    assert seen
    assert not any(seen)
    assert dict(module) == before
    assert not [error for error in errors if isinstance(error, KeyError)]


def test_updates_leave_nothing_that_grows():
    """Objects of the class, and tensors, after many updates of a class that begins late, and of one with a closure."""
    import gc

    class Counted(Phantom):
        pass

    class Closed(Phantom):
        def step(self, closure):
            closure()
            super().step()

    params = numbers(a=(3, 2), b=(4,))
    for cls in (Counted, Closed):
        optimizer = ll.optimizer(cls, lr=0.1)
        now, opt_state = params, optimizer.init(params)
        for step in range(12):
            grads = gradients(now, step, ["a"] if step % 2 else None)
            now, opt_state, _ = optimizer.update(
                grads, opt_state, now, step, evaluate=lambda params: (0.0, gradients(params, 0))
            )
        gc.collect()
        assert sum(type(thing) is cls for thing in gc.get_objects()) <= 4


def test_a_partition_names_the_labels_that_are_not_its_own():
    params = numbers(a=(3, 2), b=(4,))
    adamw, sgd = ll.optimizer(torch.optim.AdamW, lr=0.1), ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)

    def partition(**members):
        return ll.optim.partition(members, lambda name, tensor: [*members][name == "b"])

    with pytest.raises(
        ValueError,
        match=r"x: step, exp_avg, .*; y: momentum_buffer for a parameter, and partition around SGD and AdamW is to update "
        "it, which keeps inner_states of p, q",
    ):
        partition(p=sgd, q=adamw).update(gradients(params, 0), partition(x=adamw, y=sgd).init(params), params, 0)


def test_an_error_of_a_wrappers_own_is_not_blamed_on_the_state():
    params, sgd = numbers(a=(3, 2)), ll.optimizer(torch.optim.SGD, lr=0.1)

    def failing(optimizer):
        def decide(grads, opt_state, metrics, **info):
            raise KeyError(metrics["perplexity"])

        return dataclasses.replace(ll.ema(optimizer), decide=decide)

    optimizer = failing(sgd)
    with pytest.raises(KeyError, match="perplexity"):
        optimizer.update(gradients(params, 0), optimizer.init(params), params, 0, metrics={})


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_a_kernel_that_looplib_takes_by_itself_differs_from_torchs_default_by_rounding_alone(
    cls, options, dtype, donate
):
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(100, generator=draw).to(dtype)}  # more numbers than a vector of the processor has
    grads = [{"w": torch.randn(100, generator=draw).to(dtype)} for _ in range(6)]
    raw = torch.nn.Parameter(params["w"].clone())
    torchs = cls([raw], lr=0.05, **options)
    optimizer = ll.optimizer(cls, lr=0.05, **options)
    opt_state = optimizer.init(params)
    for step, given in enumerate(grads):
        raw.grad = given["w"].clone()
        torchs.step()
        params, opt_state = update(optimizer, given, opt_state, params, step, donate)
    torch.testing.assert_close(params["w"], raw.detach(), rtol=0, atol=16 * torch.finfo(dtype).eps)
