"""Every class against its own raw loop: over strides, dtypes, parameters that come late, and options."""

import copy
import inspect
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from shared import update
from torch import optim

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


def same_strides(tensor):
    """A copy with the strides of the tensor, gaps included."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.zeros(span, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor.detach())


def start(layout, dtype):
    generator = torch.Generator().manual_seed(11)
    real = {name: torch.randn(4, 6, generator=generator, dtype=torch.float64) for name in "abc"}
    made = {
        name: with_strides(tensor.to(dtype) if dtype.is_floating_point else tensor + 0.5j * tensor.flip(0), layout)
        for name, tensor in real.items()
    }
    return {
        name: tensor.to(dtype) if tensor.dtype is dtype else same_strides(tensor.to(dtype))
        for name, tensor in made.items()
    }


def grads_at(params, step, layout, late):
    generator = torch.Generator().manual_seed(step)
    names = [name for name in "abc" if step >= late.get(name, 0)]
    grads = {}
    for name in names:
        grad = torch.randn(params[name].shape, generator=generator, dtype=torch.float64).to(params[name].dtype)
        grads[name] = grad_with_strides(grad, params[name].detach(), layout)
    return grads


def raw_loop(make, params, layout, late):
    params = {name: same_strides(tensor).requires_grad_() for name, tensor in params.items()}
    optimizer = make(list(params.values()))
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    for step in range(STEPS):
        grads = grads_at(params, step, layout, late)
        for name, tensor in params.items():
            tensor.grad = grads.get(name)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in params.items()}


def run(optimizer, params, layout, late, donate):
    params = {name: same_strides(tensor).requires_grad_() for name, tensor in params.items()}
    opt_state = optimizer.init(params)
    structure = torch.utils._pytree.tree_structure(opt_state)
    for step in range(STEPS):
        grads = grads_at(params, step, layout, late)
        before = None if donate else copy.deepcopy((params, opt_state, grads))
        given = params, opt_state, grads
        params, opt_state = update(optimizer, grads, opt_state, params, step, donate)
        assert before is None or same(before, given), "a pure update wrote what it was given"
        assert torch.utils._pytree.tree_structure(opt_state) == structure
    return {name: tensor.detach() for name, tensor in params.items()}


def alike(one, other):
    one, other = one.detach(), other.detach()
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def same(one, other):
    leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (one, other)]
    return all(alike(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*leaves, strict=True))


def optim_arguments(cls):
    return inspect.signature(cls).parameters.keys()


LAYOUTS = st.sampled_from(["contiguous", "transposed", "sliced", "every second", "channels_last"])
GRADS = st.sampled_from(["as the parameter", "contiguous", "transposed", "expanded"])
LATE = st.fixed_dictionaries({"b": st.sampled_from([0, 0, 1, 3]), "c": st.sampled_from([0, 2, STEPS])})
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.complex64])

OPTIONS = {
    "Adam": {"amsgrad": [False, True], "decoupled_weight_decay": [False, True], "weight_decay": [0.1]},
    "AdamW": {"amsgrad": [False, True], "maximize": [False, True]},
    "SGD": {"momentum": [0.0, 0.9], "dampening": [0.0, 0.5], "weight_decay": [0.0, 0.1]},
    "RMSprop": {"momentum": [0.0, 0.9], "centered": [False, True]},
    "Adagrad": {"initial_accumulator_value": [0.0, 0.1], "lr_decay": [0.1]},
    "NAdam": {"decoupled_weight_decay": [False, True], "weight_decay": [0.1]},
    "RAdam": {"decoupled_weight_decay": [False, True], "weight_decay": [0.1]},
    "ASGD": {"t0": [2]},
}
CLASSES = [
    cls
    for cls in vars(optim).values()
    if isinstance(cls, type) and issubclass(cls, optim.Optimizer)
    if cls not in (optim.Optimizer, optim.LBFGS, optim.SparseAdam)  # the last two in tests of their own
]
KERNELS = [{}, {}, {"foreach": True}, {"foreach": False}, {"fused": True}]


def check(make, optimizer, params, layout, late, donate):
    try:
        expected = raw_loop(make, params, layout, late)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            run(optimizer, params, layout, late, donate)
        return
    found = run(optimizer, params, layout, late, donate)
    for name, tensor in expected.items():
        assert alike(found[name], tensor), name


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=10, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_class_of_torch(cls, donate, data):
    layout, grads, late, dtype = (data.draw(drawn) for drawn in (LAYOUTS, GRADS, LATE, DTYPES))
    if cls is optim.Muon and layout == "channels_last":
        layout = "contiguous"  # it takes matrices alone
    options = {key: data.draw(st.sampled_from(values)) for key, values in OPTIONS.get(cls.__name__, {}).items()}
    takes = optim_arguments(cls)
    kernel = {key: value for key, value in data.draw(st.sampled_from(KERNELS)).items() if key in takes}
    if cls is optim.SGD and options["momentum"] and kernel.get("foreach") and dtype is torch.bfloat16:
        late = {"b": 0, "c": 0}  # torch rounds the momentum only in updates in which no parameter starts: see below
    params = start(layout, dtype)
    optimizer = ll.optimizer(cls, lr=0.05, **options, **kernel)
    if kernel.get("fused"):
        dense = layout not in ("sliced", "every second")
        aligned = all(g.stride() == params[n].stride() for n, g in grads_at(params, STEPS, grads, {}).items())
        if not (dense and aligned):
            return  # there torch's own numbers are wrong: see test_engine_promises.py
        if cls is optim.SGD and options["momentum"] and late != {"b": 0, "c": 0}:
            return  # there torch itself fails: it has buffers for some of the parameters
    elif not kernel and "fused" in takes:
        run(optimizer, params, grads, late, donate)
        if "torch's default" not in repr(optimizer):
            kernel = {"fused": True}
            if cls is optim.SGD and options["momentum"] and late != {"b": 0, "c": 0}:
                late = {"b": 0, "c": 0}
    check(lambda tensors: cls(tensors, lr=0.05, **options, **kernel), optimizer, params, grads, late, donate)


def test_foreach_kernels_round_a_number_to_half_precision_first():
    """Why SGD with foreach=True in half precision may differ from torch in an update in which a parameter starts.

    torch then multiplies all buffers one by one, without rounding the momentum. looplib's update is the usual one.
    """
    buffer = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    in_a_list, alone = buffer.clone(), buffer.clone().mul_(0.9)
    torch._foreach_mul_([in_a_list], 0.9)
    assert not torch.equal(in_a_list, alone)
    assert torch.equal(in_a_list, buffer.clone().mul_(torch.tensor(0.9, dtype=torch.bfloat16).item()))


# Stand-ins for classes of third parties, one for each combination of what they do.


def stand_in(first, count, where, extra):
    """A class whose first update of a parameter, counts, and places of state are as some third parties have them.

    Args:
        first: what a parameter's state begins as: zeros (Lion), its gradient (Adan), itself (MADGRAD's x0), or what
            the constructor has made (LowRank).
        count: of updates: an int or a tensor for each parameter, a number in the group, or in `state` for all.
        where: the average is written in place, or is a new tensor each time, or stands in a list or in an object.
        extra: nothing, noise (SGLD), a flag on the optimizer (bitsandbytes), or a cache in the group (RAdam).
    """

    class Box:
        def __init__(self, value):
            self.value, self.seen = value, 0

    def begin(p):
        value = {"zeros": torch.zeros_like(p), "gradient": p.grad.clone(), "itself": p.clone()}[first]
        return {"place": value, "new": value, "list": [value, 1], "object": Box(value)}[where]

    class StandIn(optim.Optimizer):
        def __init__(self, params, lr=1e-2):
            super().__init__(params, {"lr": lr, **({"cache": [None] * 3} if extra == "cache" else {})})
            if count == "shared":
                self.state["count"] = 0
            if extra == "flag":
                self.begun = False
            for group in self.param_groups:
                for p in group["params"] if count == "constructor" else ():
                    self.state[p]["step"] = 1

        def counted(self, group, state):
            if count == "group":
                return group["count"]
            if count == "shared":
                return self.state["count"]
            if count == "tensor":
                state["step"] = state.get("step", torch.zeros(())) + 1
                return state["step"].item()
            state["step"] = state.get("step", 0) + 1
            return state["step"]

        @torch.no_grad()
        def step(self, closure=None):
            if count == "shared":
                self.state["count"] += 1
            if extra == "flag":
                self.begun = True
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1 if count == "group" else 0
                for p in group["params"]:
                    if p.grad is not None:
                        self.update(group, p)

        def update(self, group, p):
            state = self.state[p]
            if "average" not in state:
                state["average"] = begin(p)
            number, kept = self.counted(group, state), state["average"]
            average = kept.value if where == "object" else kept[0] if where == "list" else kept
            change = (p.grad - average) / (number + 1)
            if extra == "noise":
                change = change + torch.randn(change.shape, dtype=torch.float32).to(change.dtype)
            if extra == "cache":
                slot = int(number) % 3
                if group["cache"][slot] is None or group["cache"][slot][0] != number:
                    group["cache"][slot] = number, math.sqrt(number)
                change = change * group["cache"][slot][1]
            if where == "new":
                state["average"] = average + change
            else:
                average.add_(change)
            if where == "object":
                kept.seen += 1
            p.sub_(average + p.grad, alpha=group["lr"])

    StandIn.__name__ = StandIn.__qualname__ = f"StandIn_{first}_{count}_{where}_{extra}"
    return StandIn


FIRST = ["zeros", "gradient", "itself"]
COUNTS = ["int", "tensor", "group", "shared", "constructor"]
PLACES = ["place", "new", "list", "object"]
EXTRAS = ["nothing", "flag", "cache"]
STAND_INS = [
    stand_in(first, count, where, EXTRAS[number % 3])
    for number, (first, count, where) in enumerate(itertools.product(FIRST, COUNTS, PLACES))
]


def test_there_are_enough_stand_ins():
    assert len({cls.__name__ for cls in STAND_INS}) >= 40
    assert len(CLASSES) >= 13


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("cls", STAND_INS, ids=lambda cls: cls.__name__)
@settings(max_examples=2, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_stand_ins_for_third_parties(cls, donate, data):
    layout, grads, late, dtype = (data.draw(drawn) for drawn in (LAYOUTS, GRADS, LATE, DTYPES))
    params = start(layout, dtype)
    optimizer = ll.optimizer(cls, lr=0.05)
    check(lambda tensors: cls(tensors, lr=0.05), optimizer, params, grads, late, donate)
