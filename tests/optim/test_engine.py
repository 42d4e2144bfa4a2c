"""Every class against its own raw loop: over strides, dtypes, kernels, groups, parameters that come late, and options."""

import copy
import functools
import inspect
from typing import NamedTuple

import pytest
import schedulefree
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from problem import raw_loop, run, sgd
from shared import bits, both_steps, equal, examples, update
from stand_ins import STAND_INS, Late, PerParameter
from torch import nn, optim
from torch.utils._pytree import tree_leaves, tree_structure
from torch_collections import optimizers

import looplib as ll

STEPS = 5


def with_strides(tensor, layout):
    """The same numbers in another layout of memory."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "sliced":
        return torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]]
    if layout == "every second":
        return torch.stack([tensor, tensor], -1)[..., 0]
    if layout == "channels_last":  # of four dimensions
        return tensor.reshape(2, -1, 2, 1).to(memory_format=torch.channels_last)
    return tensor.contiguous()


def grad_with_strides(grad, param, layout):
    if layout == "expanded":
        return grad.flatten()[:1].reshape([1] * grad.ndim).expand(grad.shape)
    if layout == "as the parameter":
        return torch.empty_like(param).copy_(grad)
    if layout == "transposed":
        return grad.transpose(0, 1).contiguous().transpose(0, 1)
    return grad.contiguous()


def copied(params):
    """Leaves with the same strides, gaps included."""
    copies = {}
    for name, tensor in params.items():
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        copy = torch.zeros(span, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
        copies[name] = copy.copy_(tensor.detach()).requires_grad_()
    return copies


def start(layout, dtype):
    generator = torch.Generator().manual_seed(11)
    tensors = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        tensors = tensors + 0.5j * tensors.flip(1)
    return {name: with_strides(tensor.to(dtype), layout) for name, tensor in zip("abc", tensors, strict=True)}


def grads_at(params, step, layout="contiguous", late=None):
    generator = torch.Generator().manual_seed(step)
    grads = {}
    for name, tensor in params.items():
        grad = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        if step >= (late or {}).get(name, 0):
            grads[name] = grad_with_strides(grad, tensor.detach(), layout)
    return grads


def raw_updates(make, params, grads_of, steps=STEPS):
    """Parameters and the optimizer after a raw loop; `grads_of(params, step)` has the gradients that there are."""
    params = copied(params)
    optimizer = make(params)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    for step in range(steps):
        grads = grads_of(params, step)
        for name, tensor in params.items():
            tensor.grad = grads.get(name)
        optimizer.step()
    return params, optimizer


def updates(optimizer, params, grads_of, donate, steps=STEPS, first=0):
    """The same by looplib, from step `first` on. A pure update leaves what it was given."""
    params = copied(params)
    opt_state = optimizer.init(params)
    structure = tree_structure(opt_state)
    for step in range(steps):
        given = params, opt_state, grads_of(params, step)
        before = None if donate else copy.deepcopy(given)
        params, opt_state = update(optimizer, given[2], opt_state, params, first + step, donate)
        assert before is None or same(before, given), "a pure update wrote what it was given"
        assert tree_structure(opt_state) == structure
    return params, opt_state


def same(one, other):
    """Equal values; two NaNs are equal."""
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
        if isinstance(a, torch.Tensor):
            a, b = a.detach(), torch.as_tensor(b).detach()
            if a.shape != b.shape or not ((a == b) | ((a != a) & (b != b))).all():
                return False
        elif a != b:
            return False
    return True


CLASSES = [
    cls
    for cls in vars(optim).values()
    if isinstance(cls, type) and issubclass(cls, optim.Optimizer)
    if cls not in (optim.Optimizer, optim.LBFGS, optim.SparseAdam)  # the last two in tests of their own
]


class Case(NamedTuple):
    layout: str
    grads: str
    late: dict
    dtype: torch.dtype
    donate: bool
    first: int  # step


drawn_cases = st.builds(
    Case,
    st.sampled_from(["contiguous", "transposed", "sliced", "every second", "channels_last"]),
    st.sampled_from(["as the parameter", "contiguous", "transposed", "expanded"]),
    st.fixed_dictionaries({"b": st.sampled_from([0, 0, 1, 3]), "c": st.sampled_from([0, 2, STEPS])}),
    st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
    st.booleans(),
    st.sampled_from([0, 1000]),
)


def compared(make, optimizer, params, grads_of, donate, first=0, raw_grads=None):
    """Equal bits of parameters and state, or the same type of error."""
    try:
        expected, raw = raw_updates(make, params, raw_grads or grads_of)
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        with pytest.raises(type(error)):
            updates(optimizer, params, grads_of, donate, first=first)
        return
    found, opt_state = updates(optimizer, params, grads_of, donate, first=first)
    assert same(found, expected), optimizer
    for name, tensor in expected.items() if type(raw) in CLASSES else ():
        for key, value in raw.state[tensor].items():
            kept = opt_state[type(raw).__name__]["state"][name][key]
            assert value is None or same(kept, value), (optimizer, name, key)


def in_groups(cls, **options):
    """A raw optimizer whose first parameter has a learning rate of its own, and the same by looplib."""

    def make(params, **kernel):
        first, *others = params.values()
        return cls([{"params": [first], "lr": 0.02}, {"params": others}], lr=0.05, **options, **kernel)

    return make, ll.optimizer(cls, lr=0.05, groups=[(lambda name, tensor: name == "a", {"lr": 0.02})], **options)


def hyperparameters(cls, dtype):
    """Those with which torch tests the class."""
    entries = optimizers()[cls.__name__].optim_inputs_func(device="cpu", dtype=dtype)
    return [{key: value for key, value in entry.kwargs.items() if key != "lr"} for entry in entries]


def test_torch_has_no_class_that_is_not_compared():
    assert {cls.__name__ for cls in (*CLASSES, optim.LBFGS, optim.SparseAdam)} == set(optimizers())


def drawn(count):
    """A test of all classes, with so many draws of the rest."""
    checks = settings(
        max_examples=examples(count), deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    return lambda test: checks(given(case=drawn_cases, data=st.data())(test))


@drawn(15)
def test_every_class_of_torch_has_the_bits_of_its_raw_loop(case, data):
    for cls in CLASSES:
        takes = inspect.signature(cls).parameters
        options = data.draw(st.sampled_from(hyperparameters(cls, case.dtype)))
        if options.keys().isdisjoint(CHOSEN):
            kernel = data.draw(st.sampled_from([{}, {}, {"foreach": True}, {"foreach": False}, {"fused": True}]))
            options = options | {key: value for key, value in kernel.items() if key in takes}
        against_raw_loop(cls, options, case)


FUSED = {optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad}  # which looplib takes by itself
CHOSEN = {"foreach", "fused", "differentiable", "capturable"}


def against_raw_loop(cls, options, case):
    layout, grads, late, dtype, donate, first = case
    if cls is optim.Muon and layout == "channels_last":
        layout = "contiguous"  # it takes matrices alone
    if cls is optim.SGD and options.get("momentum") and options.get("foreach") is not False:
        # torch's fused kernel fails where only some parameters have momentum; by lists, it rounds otherwise there.
        late = {}
    if cls is optim.SGD and options.get("dampening"):
        first = 0
    params = start(layout, dtype)
    make, optimizer = in_groups(cls, **options)
    dense = layout not in ("sliced", "every second")
    if options.get("fused") and not dense:
        return  # there torch's own numbers are wrong
    wrong = cls is optim.SGD and dtype is torch.bfloat16  # torch's fused kernel
    takes = options.keys().isdisjoint(CHOSEN) and cls in FUSED and dense and dtype.is_floating_point and not wrong
    grads_of = functools.partial(grads_at, layout=grads, late=late)
    raw_grads = laid_out(grads_of) if takes or options.get("fused") else grads_of
    compared(
        functools.partial(make, fused=True) if takes else make, optimizer, params, grads_of, donate, first, raw_grads
    )


def laid_out(grads_of):
    """Gradients with the strides of their parameters: torch's fused kernels pair elements by their position in memory."""

    def with_strides_of(params, step):
        return {name: torch.empty_like(params[name]).copy_(grad) for name, grad in grads_of(params, step).items()}

    return torch.no_grad()(with_strides_of)


@both_steps
def test_a_fused_step_gets_gradients_with_the_strides_of_parameters(donate):
    # With dampening, the first update is of its own kind, so looplib leaves the call of the kernel to the class.
    make, optimizer = in_groups(optim.SGD, momentum=0.9, dampening=0.1, fused=True)
    params = start("transposed", torch.float32)
    compared(make, optimizer, params, grads_at, donate, raw_grads=laid_out(grads_at))


@drawn(4)
def test_classes_of_third_parties_have_the_bits_of_their_raw_loops(case, data):
    for cls in STAND_INS:
        grads_of = functools.partial(grads_at, layout=case.grads, late=case.late)
        compared(*in_groups(cls), start(case.layout, case.dtype), grads_of, case.donate, case.first)
    make, optimizer = in_groups(schedulefree.AdamWScheduleFree, foreach=False)
    grads_of = functools.partial(grads_at, late=case.late)  # not expanded ones, into which it could not write
    compared(make, optimizer, start(case.layout, torch.float32), grads_of, case.donate, case.first)


@both_steps
@pytest.mark.parametrize("options", ["amsgrad", "decoupled_weight_decay", "fused", "foreach", "differentiable"])
def test_options_of_a_group_are_honoured(options, donate):
    options = {options: True, "weight_decay": 0.1}
    kernel = {} if options.keys() & {"fused", "foreach", "differentiable"} else {"fused": True}

    def make(params):
        first, *others = params.values()
        return optim.Adam([{"params": [first], **options, **kernel}, {"params": others, "fused": True}], lr=0.05)

    optimizer = ll.optimizer(optim.Adam, lr=0.05, groups=[(lambda name, tensor: name == "a", options)])
    compared(make, optimizer, start("contiguous", torch.float32), grads_at, donate)


@both_steps
def test_a_complex_parameter_takes_its_group_with_it_to_the_classs_own_step(donate):
    params = {**start("contiguous", torch.float32), "phase": torch.ones(3, dtype=torch.complex64)}
    optimizer = ll.optimizer(optim.AdamW, lr=0.05)
    compared(lambda params: optim.AdamW(params.values(), lr=0.05), optimizer, params, grads_at, donate)


@both_steps
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["chosen", "asked for"])
def test_parameters_of_two_dtypes_have_a_fused_kernel_each(options, donate):
    params = {**start("contiguous", torch.float32), "wide": torch.linspace(0, 1, 5, dtype=torch.float64)}
    late = functools.partial(grads_at, late={"b": 2, "wide": 1})
    optimizer = ll.optimizer(optim.AdamW, lr=0.05, **options)
    compared(lambda params: optim.AdamW(params.values(), lr=0.05, fused=True), optimizer, params, late, donate)


@both_steps
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
def test_a_chosen_kernel_differs_from_torchs_default_by_rounding_alone(cls, dtype, donate):
    params = {"w": torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)}  # more than a vector has
    found, _ = updates(ll.optimizer(cls, lr=0.05), params, grads_at, donate)
    expected, _ = raw_updates(lambda params: cls(params.values(), lr=0.05), params, grads_at)
    torch.testing.assert_close(found["w"], expected["w"], rtol=0, atol=16 * torch.finfo(dtype).eps)


@both_steps
@pytest.mark.parametrize("cls", [optim.ASGD, optim.Rprop])
def test_a_first_state_of_the_learning_rate_has_that_of_its_own_first_update(cls, donate):
    def rate(step):
        return 0.1 / (1 + step)

    class Scheduled(cls):
        made = 0

        def step(self, closure=None):
            self.param_groups[0]["lr"] = rate(self.made)
            self.made += 1
            super().step()

    late = functools.partial(grads_at, late={"b": 3})
    params = start("contiguous", torch.float32)
    expected, _ = raw_updates(lambda params: Scheduled(params.values(), lr=rate(0)), params, late)
    assert same(updates(ll.optimizer(cls, lr=rate), params, late, donate)[0], expected)


# Sparse gradients, and what stays behind


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@both_steps
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (optim.SparseAdam, {}),
        (optim.SGD, {}),
        (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        (optim.Adagrad, {"foreach": True}),
    ],
)
def test_sparse_gradients(cls, options, donate):
    first, data = nn.Embedding(8, 3, sparse=True), [torch.tensor([[0, 2], [2, 5]])] * 4

    def loss_fn(model, x):
        return model(x).square().sum()

    raw = copy.deepcopy(first)
    raw_loop(raw, cls(raw.parameters(), lr=0.1, **options), data, loss_fn=loss_fn)
    state = run(first, ll.optimizer(cls, lr=0.1, **options), data, donate, bound=False, loss_fn=loss_fn)
    assert equal(state.params, raw.named_parameters())


def test_a_first_momentum_is_the_gradient_with_the_signs_of_its_zeros():
    optimizer, params = sgd(), {"w": torch.ones(2)}
    grad = torch.tensor([-0.0, 0.0])
    _, opt_state, _ = optimizer.update({"w": grad}, optimizer.init(params), params, 0)
    assert opt_state["SGD"]["state"]["w"]["momentum_buffer"].signbit().tolist() == [True, False]


class Idle(PerParameter):
    """Makes its state at the first gradient that is not 0."""

    def update(self, group, p):
        if p.grad.any():
            p.sub_(self.state[p].setdefault("moment", torch.zeros_like(p)).add_(p.grad), alpha=group["lr"])


def test_a_state_keeps_its_structure_while_a_class_has_made_none():
    optimizer, params = ll.optimizer(Idle, lr=0.1), {"w": torch.ones(2)}
    start = optimizer.init(params)
    _, opt_state, _ = optimizer.update({"w": torch.zeros(2)}, start, params, 0)
    assert bits(opt_state["Idle"]["state"]) == bits(start["Idle"]["state"])
    assert "moment" in opt_state["Idle"]["state"]["w"]


@pytest.mark.slow
def test_updates_leave_nothing_that_grows():
    """Objects of the class, and tensors, after many updates of a class that begins late."""
    import gc
    import weakref

    class Counted(Late):
        pass

    optimizer = ll.optimizer(Counted, lr=0.1)
    params = start("contiguous", torch.float32)
    opt_state = optimizer.init(params)
    for step in range(24):
        grads = grads_at(params, step, late={"b": 6})
        params, opt_state, _ = optimizer.update(grads, opt_state, params, step)
    held = [weakref.ref(tensor) for tensor in tree_leaves((params, opt_state)) if isinstance(tensor, torch.Tensor)]
    del params, opt_state, grads
    gc.collect()
    assert sum(type(thing) is Counted for thing in gc.get_objects()) <= 8
    assert not any(ref() is not None for ref in held)


def test_a_restore_into_other_order_of_the_parameters_knows_which_have_begun(tmp_path):
    """The state of a parameter that has had no gradient is made in its own first update, wherever it stands in the module."""
    optimizer = ll.optimizer(Late, lr=0.1)

    def of_order(*names):
        model = nn.Module()
        for name in names:
            model.register_parameter(name, nn.Parameter(torch.arange(3.0)))
        return model

    def updated(model, state, trained):
        def loss_fn(model, x):
            return sum((getattr(model, name) * x).square().sum() for name in trained)

        grad_fn = ll.make_grad_fn(model, loss_fn, trainable=lambda name, _: name in trained)
        return ll.make_train_step(grad_fn, optimizer)(state, torch.ones(1))[0]

    model, ckpt = of_order("begun", "late"), ll.checkpoint_io(tmp_path)
    state = updated(model, ll.init_state(model, optimizer), ["begun"])
    ckpt.save(state)
    expected = updated(model, state, ["begun", "late"])
    model = of_order("late", "begun")
    state = ckpt.restore(ll.init_state(model, optimizer), quiet=True)
    state = updated(model, state, ["begun", "late"])
    for name in ("begun", "late"):
        assert torch.equal(state.params[name], expected.params[name])
