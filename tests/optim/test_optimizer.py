"""Optimizers against torch's own loops: groups, schedules, third parties, refusals."""

import copy
import importlib
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from per_parameter import PerParameter
from problem import batches, loss_fn
from shared import make_train_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import looplib as ll


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))


def train(pure, count, donate=False, model=None):
    model = model or net()
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), pure, donate=donate)
    state = ll.init_state(model, pure)
    for batch in batches(count):
        state, _ = step(state, batch)
    return state


def same(state, model):
    return all(torch.equal(state.params[name], p) for name, p in model.named_parameters())


def is_vector(name, tensor):
    return tensor.ndim < 2


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_groups_and_schedules_on_any_hyperparameter_equal_the_raw_loop(donate):
    def lr(step):
        return 1e-2 / (1 + step)

    def beta(step):
        return 0.8 + 0.01 * step

    model = net()
    vectors = [p for p in model.parameters() if p.ndim < 2]
    head = [model[3].weight]
    rest = [model[0].weight]
    groups = [
        {"params": head, "lr": 0.5, "weight_decay": 0.3},
        {"params": vectors, "weight_decay": 0.0},
        {"params": rest},
    ]
    raw = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.1, fused=True)
    for step, batch in enumerate(batches(20)):
        for group in raw.param_groups[1:]:
            group["lr"] = lr(step)
        raw.param_groups[0]["lr"] = 0.5
        raw.param_groups[1]["eps"] = 10.0 ** -(3 + step)
        for group in raw.param_groups:
            group["betas"] = (beta(step), 0.99)
        raw.zero_grad()
        loss_fn(model, batch).backward()
        raw.step()

    pure = ll.optimizer(
        torch.optim.AdamW,
        lr=lr,
        betas=(beta, 0.99),
        weight_decay=0.1,
        groups=[
            (lambda name, tensor: name == "3.weight", {"lr": 0.5, "weight_decay": 0.3}),
            (is_vector, {"weight_decay": 0.0, "eps": lambda step: 10.0 ** -(3 + step)}),
        ],
    )
    assert same(train(pure, 20, donate), model)


def test_update_is_pure_and_takes_gradients_of_a_part():
    pure = ll.optimizer(torch.optim.AdamW, lr=0.1)
    params = dict(net().named_parameters())
    opt_state = pure.init(params)
    grads = {"0.weight": torch.ones(5, 6)}
    before = copy.deepcopy((params, opt_state, grads))
    one = pure.update(grads, opt_state, params, 0)
    two = pure.update(grads, opt_state, params, 0)
    after = (params, opt_state, grads)
    for left, right in zip(
        torch.utils._pytree.tree_leaves(before), torch.utils._pytree.tree_leaves(after), strict=True
    ):
        assert torch.equal(left, right)
    assert one[2] is two[2] is True
    for left, right in zip(
        torch.utils._pytree.tree_leaves(one[:2]), torch.utils._pytree.tree_leaves(two[:2]), strict=True
    ):
        assert torch.equal(left, right)
    assert one[0]["3.bias"] is params["3.bias"]
    assert not torch.equal(one[0]["0.weight"], params["0.weight"])
    assert list(one[0]) == list(params)


def test_the_engine_keeps_no_tensor():
    import gc
    import weakref

    pure = ll.optimizer(torch.optim.AdamW, lr=0.1)
    state = train(pure, 2)
    held = [weakref.ref(p) for p in state.params.values()]
    del state
    gc.collect()
    assert all(ref() is None for ref in held)


class Kernels(TorchDispatchMode):
    """The optimizer's kernels that were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def test_fused_where_torch_has_it_unless_the_user_says():
    def kernels(dtype=torch.float32, **hyperparameters):
        params = {"w": torch.ones(2, dtype=dtype)}
        pure = ll.optimizer(torch.optim.AdamW, lr=0.1, **hyperparameters)
        opt_state = pure.init(params)
        with Kernels() as found:
            pure.update({"w": torch.ones(2, dtype=dtype)}, opt_state, params, 0)
        return {name for name in found.names if "fused" in name or name in ("_foreach_lerp_", "lerp_")}

    assert kernels() == {"_fused_adamw_"}
    assert kernels(foreach=True) == {"_foreach_lerp_"}
    assert kernels(fused=False) == {"lerp_"}
    assert kernels(torch.complex64) == {"lerp_"}  # there is no fused kernel for it
    assert kernels(fused=True) == {"_fused_adamw_"}


FUSED = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad}
CLASSES = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.RMSprop, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adafactor, {}),
]
KERNELS = {"default": {}, "fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}


WITH_KERNELS = [
    (cls, options, kernel) for cls, options in CLASSES for kernel in KERNELS if kernel != "fused" or cls in FUSED
]


@pytest.mark.parametrize(("cls", "options", "kernel"), WITH_KERNELS)
@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_each_class_with_each_kernel_equals_its_raw_loop(cls, options, kernel, donate):
    """With a parameter that gets no gradient in some steps, and two groups."""
    options = {"lr": 0.1, **options, **KERNELS[kernel]}
    model = net()
    taken = {"fused": True} if kernel == "default" and cls in FUSED else {}
    vectors, matrices = ([p for p in model.parameters() if (p.ndim < 2) is small] for small in (True, False))
    raw = cls([{"params": vectors, "lr": 0.05}, {"params": matrices}], **{**options, **taken})

    def loss_fn(model, x):
        out = model[0](x)
        return (model[2](out if len(x) > 7 else model[1](out)) - 1).square().mean()

    sizes = [7, 8, 7, 8, 7]
    for size, batch in zip(sizes, batches(5), strict=True):
        loss_fn(model, batch[:size]).backward()
        raw.step()
        raw.zero_grad()

    optimizer = ll.optimizer(cls, groups=[(is_vector, {"lr": 0.05})], **options)
    ours = net()
    grad_fn = ll.make_grad_fn(ours, loss_fn, allow_unused=True)
    step = ll.make_train_step(grad_fn, optimizer, donate=donate)
    state = ll.init_state(ours, optimizer)
    for size, batch in zip(sizes, batches(5), strict=True):
        state, _ = step(state, batch[:size])
    assert same(state, model)
    for name, tensor in model.named_parameters():
        for key, value in raw.state[tensor].items():
            assert torch.equal(state.opt_state["state"][name][key], value), (name, key)


class Lion(torch.optim.Optimizer):
    """As people copy it: state made in the step, and a count in the group."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = p.clone()  # begins with a value that nobody can know beforehand
                one, two = group["betas"]
                p.add_((state["momentum"] * one + p.grad * (1 - one)).sign(), alpha=-group["lr"] / group["k"])
                state["momentum"] = state["momentum"] * two + p.grad * (1 - two)  # a new tensor each time


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("name", ["Lion", "AdamWScheduleFree", "SGDScheduleFree"])
def test_third_party_optimizers_equal_their_raw_loop(name, donate):
    import schedulefree

    cls = Lion if name == "Lion" else getattr(schedulefree, name)
    options = {} if name == "Lion" else {"warmup_steps": 5, "foreach": False}
    model = net()
    raw = cls(model.parameters(), lr=1e-2, **options)
    if name != "Lion":
        raw.train()
    for batch in batches(15):
        raw.zero_grad()
        loss_fn(model, batch).backward()
        raw.step()
    pure = ll.optimizer(cls, lr=1e-2, **options)
    start = ll.init_state(net(), pure)
    state = train(pure, 15, donate)
    assert same(state, model)
    structure = torch.utils._pytree.tree_structure
    assert structure(state.opt_state) == structure(start.opt_state)
    if name == "Lion":
        assert [group["k"] for group in state.opt_state["groups"]] == [15]


def test_a_donated_state_of_a_class_that_makes_new_tensors_is_still_spent():
    pure = ll.optimizer(Lion, lr=1e-2)
    model = net()
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), pure, donate=True)
    state, _ = step(ll.init_state(model, pure), batches(1)[0])
    share = ll.TrainState(opt_state=state.opt_state)
    step(state, batches(1)[0])
    with pytest.raises(ll.DonatedStateError):
        _ = share.opt_state


class Projector:
    """As GaLore's: an object of the class's own, with a tensor, a count and a name."""

    def __init__(self, rank, kind):
        self.rank, self.kind, self.basis, self.made = rank, kind, None, 0

    def project(self, grad, refresh):
        if self.basis is None or refresh:
            basis = torch.linalg.svd(grad, full_matrices=False).Vh[: self.rank]
            if self.basis is None:
                self.basis = basis
            else:
                self.basis.copy_(basis)  # in place: so one state must not see the basis of another
            self.made += 1
        return grad @ self.basis.T


class LowRank(PerParameter):
    """As GaLore and APOLLO: keys of a group that the class does not take, and numbers from its constructor."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, lr, weight_decay=weight_decay)
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                self.state[p]["number"] = number + 1

    def update(self, group, p):
        state, grad = self.state[p], p.grad
        state["step"] = state.get("step", 0) + 1
        if "rank" in group:
            if "projector" not in state:
                state["projector"] = Projector(group["rank"], group["kind"])
            low = state["projector"].project(grad, state["step"] % group["every"] == 0)
            grad = low @ state["projector"].basis * group["scale"] / state["number"]
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(grad.sign() * grad.abs().sqrt() * group["lr"])


GROUP = {"rank": 2, "every": 3, "scale": 0.5, "kind": "right", "weight_decay": 0.1}


def is_matrix(name, tensor):
    return tensor.ndim == 2


def low_rank(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return LowRank([{"params": matrices, **GROUP}, {"params": vectors}], lr=1e-2)


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_a_third_partys_class_reads_keys_of_its_own_from_a_group(donate, tmp_path):
    model = net()
    raw = low_rank(model)
    for batch in batches(10):
        raw.zero_grad()
        loss_fn(model, batch).backward()
        raw.step()

    def pure():
        return ll.optimizer(LowRank, lr=1e-2, groups=[(is_matrix, GROUP)])

    def step_of(optimizer):
        return ll.make_train_step(ll.make_grad_fn(net(), loss_fn), optimizer, donate=donate)

    first = pure()
    step, state = step_of(first), ll.copy_state(ll.init_state(net(), first))
    # What is given and stays is none of the class's own numbers.
    assert state.opt_state.keys() == {"state", "started"}
    for number, batch in enumerate(batches(10)):
        if number == 4:
            kept = ll.copy_state(state)
            ll.checkpoint_io(tmp_path).save(state)
        state, _ = step(state, batch)
    assert same(state, model)
    projector, theirs = state.opt_state["state"]["0.weight"]["projector"], raw.state[model[0].weight]["projector"]
    assert torch.equal(projector.pop("basis"), theirs.basis)
    assert projector == {"rank": 2, "kind": "right", "made": theirs.made}

    # From a state that was kept, and from the disk by an optimizer that has made no state yet.
    restored = ll.checkpoint_io(tmp_path).restore(ll.init_state(net(), pure()))
    for again, own_step in ((kept, step), (restored, step_of(pure()))):
        for batch in batches(10)[4:]:
            again, _ = own_step(again, batch)
        assert same(again, model)


class Keyed(PerParameter):
    """Needs a key in each group, as the Muon of pytorch_optimizer does."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        for group in self.param_groups:
            if "use_muon" not in group:
                raise ValueError("`use_muon` must be set.")

    def update(self, group, p):
        moment = self.state[p].setdefault("moment", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        p.sub_(group["lr"] * (moment / moment.norm() if group["use_muon"] else moment.sign()))


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_every_group_of_a_class_may_need_a_key(donate, tmp_path):
    model = net()
    muon, others = ([p for p in model.parameters() if (p.ndim == 2) is use] for use in (True, False))
    raw = Keyed([{"params": muon, "use_muon": True}, {"params": others, "use_muon": False}], lr=1e-2)
    for batch in batches(5):
        raw.zero_grad()
        loss_fn(model, batch).backward()
        raw.step()
    groups = [(is_matrix, {"use_muon": True}), (is_vector, {"use_muon": False})]
    state = train(ll.optimizer(Keyed, lr=1e-2, groups=groups), 5, donate)
    assert same(state, model)
    assert state.opt_state.keys() == {"state", "started"}
    by_schedule = [(predicate, {**values, "lr": lambda step: 1e-2}) for predicate, values in groups]
    assert same(train(ll.optimizer(Keyed, lr=1.0, groups=by_schedule), 5, donate), model)

    with pytest.raises(ValueError, match=r"`use_muon` must be set") as raised:
        ll.init_state(net(), ll.optimizer(Keyed, lr=1e-2, groups=groups[:1]))
    assert "0.bias" in raised.value.__notes__[0]
    assert "use_muon" in raised.value.__notes__[0]


class PolyakStep(torch.optim.Optimizer):
    """Needs a closure, although `step` has a default for it, as AliG of pytorch_optimizer does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("a closure is needed")
        loss = closure()
        every = [p for group in self.param_groups for p in group["params"]]
        size = min(self.param_groups[0]["lr"], loss.item() / sum(p.grad.square().sum().item() for p in every))
        with torch.no_grad():
            for p in every:
                p.sub_(p.grad, alpha=size)


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_a_class_may_need_a_closure_that_its_signature_leaves_out(donate):
    model = net()
    raw = PolyakStep(model.parameters(), lr=0.1)

    def closure(batch):
        raw.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        return loss

    for batch in batches(5):
        raw.step(partial(closure, batch))
    assert same(train(ll.optimizer(PolyakStep, lr=0.1), 5, donate), model)


def test_a_wrapper_around_an_optimizer_is_refused_as_one():
    class Masked:
        """As Magma of pytorch_optimizer is."""

        def __init__(self, optimizer, mask_prob=0.5, **kwargs):
            self.optimizer = optimizer

        def step(self, closure=None):
            self.optimizer.step(closure)

    with pytest.raises(
        TypeError, match=r"Masked takes optimizer where optimizers take params.*give the class that it wraps"
    ):
        ll.optimizer(Masked, lr=0.1)


class Half:
    def __init__(self, grad):
        self.seen, self.factor = [torch.zeros_like(grad)], 0.5


class Twice(Half):
    def __init__(self, grad):
        super().__init__(grad)
        self.factor = 2.0


class ByKind(PerParameter):
    """Objects of two classes under one key, and for the last layer's bias none."""

    def update(self, group, p):
        state = self.state[p]
        if "kind" not in state:
            state["kind"] = None if p.shape == (3,) else (Half if p.ndim == 2 else Twice)(p.grad)
            state["plain"] = {"sum": torch.zeros_like(p)}
        if state["kind"] is not None:
            state["kind"].seen[0].add_(p.grad)
            p.sub_(state["kind"].seen[0] * state["kind"].factor * group["lr"])
        state["plain"]["sum"].add_(p.grad)
        p.sub_(state["plain"]["sum"] * group["lr"])


class Factored(PerParameter):
    """A third party's class whose state depends on a parameter's number of dimensions."""

    def update(self, group, p):
        state = self.state[p]
        if not state:
            state["row" if p.ndim > 1 else "whole"] = torch.zeros_like(p.sum(-1) if p.ndim > 1 else p)
        moment = state["row"].add_(p.grad.sum(-1)).unsqueeze(-1) if p.ndim > 1 else state["whole"].add_(p.grad)
        p.sub_(moment * group["lr"])


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("cls", [torch.optim.Adafactor, Factored, torch.optim.AdamW])
def test_one_optimizer_trains_models_with_the_same_names_and_other_shapes(cls, donate):
    class Sum(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0, 1, math.prod(shape)).reshape(shape))

        def forward(self, x):
            return (self.weight * x.mean()).cos().sum()

    pure = ll.optimizer(cls, lr=1e-2)
    for shape in [(4, 3), (3,), (2, 2, 3), (), (4, 3)]:
        model = Sum(shape)
        raw = cls(model.parameters(), lr=1e-2, **({"fused": True} if cls is torch.optim.AdamW else {}))
        for batch in batches(3):
            raw.zero_grad()
            loss_fn(model, batch).backward()
            raw.step()
        assert same(train(pure, 3, donate, Sum(shape)), model)


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_each_parameter_has_the_objects_of_its_own_kind(donate):
    model = net()
    raw = ByKind(model.parameters(), lr=1e-2)
    for batch in batches(4):
        raw.zero_grad()
        loss_fn(model, batch).backward()
        raw.step()
    pure = ll.optimizer(ByKind, lr=1e-2)
    step, state = ll.make_train_step(ll.make_grad_fn(net(), loss_fn), pure, donate=donate), ll.init_state(net(), pure)
    for number, batch in enumerate(batches(4)):
        if number == 2:
            kept = ll.copy_state(state)
        state, _ = step(ll.copy_state(state) if donate else state, batch)
    assert same(state, model)
    for batch in batches(4)[2:]:
        kept, _ = step(kept, batch)
    assert same(kept, model)


def test_an_update_leaves_the_objects_of_the_state_before_as_they_were():
    pure = ll.optimizer(LowRank, lr=1e-2, groups=[(is_matrix, {**GROUP, "every": 1})])
    step = ll.make_train_step(ll.make_grad_fn(net(), loss_fn), pure)
    before, _ = step(ll.init_state(net(), pure), batches(1)[0])
    copied = ll.copy_state(before)
    step(before, batches(2)[1])
    projectors = [state.opt_state["state"]["0.weight"]["projector"] for state in (before, copied)]
    assert torch.equal(*[projector["basis"] for projector in projectors])
    assert [projector["made"] for projector in projectors] == [1, 1]


def test_a_key_of_a_group_may_be_a_schedule_or_stand_in_the_state():
    def trained(scale):
        return train(ll.optimizer(LowRank, lr=1e-2, groups=[(is_matrix, {**GROUP, "scale": scale})]), 5)

    numbers, schedule, injected = trained(0.5), trained(lambda step: 0.5), trained(ll.optim.injected(0.5))
    for other in (schedule, injected):
        assert all(torch.equal(other.params[name], tensor) for name, tensor in numbers.params.items())
    growing = trained(lambda step: 0.5 * (step + 1))
    assert not torch.equal(growing.params["0.weight"], numbers.params["0.weight"])


def test_a_compiled_step_refuses_objects():
    pure = ll.optimizer(LowRank, lr=1e-2, groups=[(is_matrix, GROUP)])
    step = make_train_step(ll.make_grad_fn(model := net(), loss_fn), pure, compile={"backend": "eager"})
    with pytest.raises(
        ll.transforms.UntraceableError, match=r"LowRank keeps objects for its parameters, .* without ll.compile_step"
    ):
        step(ll.init_state(model, pure), batches(1)[0])


def test_a_class_may_note_that_it_has_begun():
    class Begun(Lion):  # as those of bitsandbytes do
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.begun = False

        def step(self, closure=None):
            if not self.begun:
                self.begun = True
            super().step()

    state = train(ll.optimizer(Begun, lr=0.1), 3)
    plain = train(ll.optimizer(Lion, lr=0.1), 3)
    assert all(torch.equal(state.params[name], tensor) for name, tensor in plain.params.items())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_gradients():
    def embedding_loss(model, tokens):
        return model(tokens).square().sum()

    tokens = torch.tensor([[0, 2], [2, 5]])
    sgd, adagrad = torch.optim.SGD, torch.optim.Adagrad
    with_momentum = sgd, {"momentum": 0.9, "dampening": 0.5}  # which is sparse from the first update on
    for cls, flags in [
        (torch.optim.SparseAdam, {}),
        (sgd, {}),
        with_momentum,
        (adagrad, {}),
        (adagrad, {"foreach": True}),
    ]:
        torch.manual_seed(0)
        model = nn.Embedding(8, 3, sparse=True)
        ours = copy.deepcopy(model)
        raw = cls(model.parameters(), lr=0.1, **flags)
        for _ in range(4):
            raw.zero_grad()
            embedding_loss(model, tokens).backward()
            raw.step()
        for donate in (False, True):
            pure = ll.optimizer(cls, lr=0.1, **flags)
            step = ll.make_train_step(ll.make_grad_fn(ours, embedding_loss), pure, donate=donate)
            state = ll.copy_state(ll.init_state(ours, pure))
            for _ in range(4):
                state, _ = step(state, tokens)
            assert same(state, model)

    dense = nn.Embedding(8, 3)
    for cls, model, message in [
        (torch.optim.SparseAdam, dense, r"SparseAdam cannot take these gradients.*'weight': 'dense'"),
        (torch.optim.Adam, ours, r"Adam cannot take these gradients.*'weight': 'sparse'"),
    ]:
        pure = ll.optimizer(cls, lr=0.1)
        step, state = ll.make_train_step(ll.make_grad_fn(model, embedding_loss), pure), ll.init_state(model, pure)
        with pytest.raises(ValueError, match=message):
            step(state, tokens)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, when it is imported
@pytest.mark.parametrize("name", ["ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"])
def test_optimizers_that_talk_to_other_ranks_are_refused_by_name(name):
    cls = getattr(importlib.import_module("torch.distributed.optim"), name)
    for refused in cls, type("Mine", (cls,), {}):
        with pytest.raises(TypeError, match=rf"{refused.__name__} .*the class that makes the update.*fully_shard"):
            ll.optimizer(refused, optimizer_class=torch.optim.Adam, lr=0.1)


def test_refusals_say_what_to_do():
    with pytest.raises(
        TypeError, match=r"needs the class, found an instance of AdamW: write ll\.optimizer\(torch\.optim\.AdamW"
    ):
        ll.optimizer(torch.optim.AdamW(net().parameters()), lr=0.1)
    with pytest.raises(TypeError, match=r"dict is no optimizer class"):
        ll.optimizer(dict, lr=0.1)
    with pytest.raises(TypeError, match=r"a group is \(predicate\(name, tensor\)"):
        ll.optimizer(torch.optim.AdamW, lr=0.1, groups=[("bias", {"weight_decay": 0.0})])
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1"):
        ll.init_state(net(), ll.optimizer(torch.optim.AdamW, lr=-1.0))
    with pytest.raises(TypeError, match=r"SGD has no hyperparameter momentumm; it takes lr, momentum,"):
        ll.optimizer(torch.optim.SGD, lr=0.1, momentumm=0.9)
    with pytest.raises(TypeError, match=r"SGD has no hyperparameter weight_decai; it takes lr, momentum,"):
        ll.optimizer(torch.optim.SGD, lr=0.1, groups=[(is_vector, {"weight_decai": 0.9})])
    with pytest.raises(TypeError, match=r"'weigth_decay', which is no parameter of LowRank: give 'weight_decay'"):
        ll.optimizer(LowRank, lr=0.1, groups=[(is_matrix, {**GROUP, "weigth_decay": 0.9})])
    with pytest.raises(TypeError, match=r"LowRank has no hyperparameter rank; it takes"):
        ll.optimizer(LowRank, lr=0.1, rank=2)
    pure = ll.optimizer(torch.optim.AdamW, lr=0.1)
    with pytest.raises(ValueError, match=r"nothing for \['other'\]: make the state with the same model"):
        pure.update({"other": torch.ones(1)}, pure.init({"w": torch.ones(1)}), {"w": torch.ones(1)}, 0)


# apply_if_finite


def poisoned(count, bad):
    return [batch * (math.inf if i in bad else 1.0) for i, batch in enumerate(batches(count))]


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@given(bad=st.sets(st.integers(0, 11), max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_skipped_step_is_as_if_the_batch_had_not_been(donate, bad):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    inner = ll.optimizer(torch.optim.AdamW, lr=ll.schedules.linear(0.1, total=20))
    safe = ll.optim.apply_if_finite(inner, max_consecutive=12)
    model, plain = build(), build()
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), safe, donate=donate)
    state = ll.init_state(model, safe, epoch_length=5)
    plain_step = ll.make_train_step(ll.make_grad_fn(plain, loss_fn), inner)
    reference = ll.init_state(plain, inner)
    in_a_row = 0
    for i, batch in enumerate(poisoned(12, bad)):
        state, _ = step(state, batch)
        in_a_row = in_a_row + 1 if i in bad else 0
        if i not in bad:
            reference, _ = plain_step(reference, batch)
        assert state.skipped == (i in bad)
        assert state.opt_state["notfinite_count"] == in_a_row
    for one, other in [
        (state.params, reference.params),
        (state.buffers, reference.buffers),
        (state.opt_state["inner_state"], reference.opt_state),
    ]:
        leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (one, other)]
        assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True))
    assert state.step == reference.step == 12 - len(bad)
    assert state.opt_state["total_notfinite"] == len(bad)
    assert (state.epoch, state.batch, state.samples) == (2, 2, 12 * 8)


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_too_many_in_a_row_give_up_loudly_with_the_state_intact(donate):
    safe = ll.optim.apply_if_finite(ll.optimizer(torch.optim.SGD, lr=0.1), max_consecutive=2)
    model = net()
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), safe, donate=donate)
    state = ll.init_state(model, safe)
    good, bad = batches(1)[0], batches(1)[0] * math.nan
    for batch in (bad, bad, good, bad, bad):
        state, _ = step(state, batch)
    before = copy.deepcopy(state)
    with pytest.raises(
        ll.optim.NonFiniteGradientsError, match=r"3 times in a row \(max_consecutive=2\), now at step 1 in 6"
    ):
        step(state, bad)
    leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (before, state)]
    assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True))
    state, _ = step(state, good)
    assert state.step == 2


def test_max_consecutive_is_checked():
    for wrong in (-1, True, 1.5):
        with pytest.raises(ValueError, match=r"max_consecutive is .*0 or more"):
            ll.optim.apply_if_finite(ll.optimizer(torch.optim.SGD, lr=0.1), wrong)
