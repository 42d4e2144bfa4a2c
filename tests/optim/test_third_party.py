"""Third parties' classes in train steps: keys of their own in groups, objects, closures, draws, few bits; what is refused."""

import copy
import gc
import random
from collections import deque

import pytest
import torch
from problem import assert_refused, batches, net, raw_loop, run, step_of
from shared import bits, both_steps, equal, trained
from stand_ins import PerParameter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import looplib as ll


def is_matrix(name, tensor):
    return tensor.ndim == 2


def by_kind(model):
    """Matrices, and the others."""
    return [[p for p in model.parameters() if (p.ndim == 2) is matrix] for matrix in (True, False)]


def smooth():
    return net(norm=nn.LayerNorm)


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


class Counted(torch.Tensor):
    """A tensor around another one, whose settings, a count, are no tensor."""

    @staticmethod
    def __new__(cls, inner, count):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner, made.count = inner, count
        return made

    def __tensor_flatten__(self):
        return ["inner"], self.count

    @staticmethod
    def __tensor_unflatten__(inner, count, size, stride):
        return Counted(inner["inner"], count)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class CountsInSettings(PerParameter):
    """A class that keeps a count in the settings of a tensor's class, where no state of a run holds it."""

    def update(self, group, p):
        kept = self.state[p].get("kept", Counted(torch.zeros(1), 0))
        self.state[p]["kept"] = Counted(kept.inner + 1, kept.count + 1)
        p.sub_(group["lr"] * kept.count * p.grad)


def test_settings_of_kept_objects_that_change_are_refused():
    optimizer = ll.optimizer(CountsInSettings, lr=0.1)
    with pytest.raises(
        TypeError,
        match=r"under 'kept', an object whose settings differ from one update to the next, .*\(\(1, .*\(2, ",
    ):
        ll.init_state(net(), optimizer)


class ScaledByFirst(PerParameter):
    """A class that keeps, in the settings of a tensor's class, a number taken from the parameter's first gradient."""

    def update(self, group, p):
        kept = self.state[p].setdefault("kept", Counted(torch.zeros(1), p.grad.abs().max().item()))
        p.sub_(group["lr"] * kept.count * p.grad)


@both_steps
def test_settings_of_kept_objects_that_the_first_gradient_decides_are_refused(donate):
    model, optimizer = nn.Linear(2, 1), ll.optimizer(ScaledByFirst, lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).sum()), optimizer, donate=donate)
    for size in (1.0, 9.0):  # whatever another run of the same optimizer has begun with
        assert_refused(
            TypeError,
            "ScaledByFirst weight 'kept' settings first tensors",
            lambda size=size: step(ll.init_state(model, optimizer), torch.full((1, 2), size)),
        )


class Averaging(PerParameter):
    def update(self, group, p):
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        p.sub_(average.mul_(0.9).add_(p.grad), alpha=group["lr"])


@pytest.mark.slow
def test_an_optimizer_holds_no_memory_of_a_states_size_and_keeps_its_strides():
    def large():
        gc.collect()
        return {
            id(leaf): leaf.untyped_storage().nbytes()
            for leaf in gc.get_objects()
            if type(leaf) is torch.Tensor and leaf.shape[:1] == (1013,)
        }

    optimizer, before = ll.optimizer(Averaging, lr=0.1), large()
    for width in (16, 17):
        params = {"w": nn.Parameter(torch.ones(width, 1013).T)}
        for _ in range(2):  # by the second time, the plan is known
            average = optimizer.init(params)["Averaging"]["state"]["w"]["average"]
            assert average.stride() == params["w"].stride()
            assert not average.any()
    del params, average
    assert sum(size for place, size in large().items() if place not in before) == 0


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


def low_rank(**changes):
    return ll.optimizer(LowRank, lr=1e-2, groups=[(is_matrix, {**GROUP, **changes})])


@both_steps
def test_a_class_reads_keys_of_its_own_from_a_group_and_keeps_objects(donate, tmp_path):
    """From the start, from a state that was kept, and from the disk by an optimizer that has made no state yet."""
    raw, model = smooth(), smooth()
    matrices, vectors = by_kind(raw)
    theirs = LowRank([{"params": matrices, **GROUP}, {"params": vectors}], lr=1e-2)
    raw_loop(raw, theirs, batches(10))
    step, state = step_of(model, low_rank(), donate), ll.copy_state(ll.init_state(model, low_rank()))
    # What is given and stays is none of the class's own numbers.
    assert state.opt_state["LowRank"].keys() == {"state", "started"}
    for batch in batches(4):
        state, _ = step(state, batch)
    kept = ll.copy_state(state)
    ll.checkpoint_io(tmp_path).save(state)
    restored = ll.checkpoint_io(tmp_path).restore(ll.init_state(smooth(), low_rank()))
    for now, own_step in ((state, step), (kept, step), (restored, step_of(smooth(), low_rank(), donate))):
        for batch in batches(10)[4:]:
            now, _ = own_step(now, batch)
        assert equal(now.params, raw.named_parameters())
        projector = now.opt_state["LowRank"]["state"]["0.weight"]["projector"]
        assert bits(projector) == bits(vars(theirs.state[raw[0].weight]["projector"]))


def test_a_key_of_a_group_may_be_a_schedule_or_stand_in_the_state():
    values = 0.5, lambda step: 0.5, ll.optim.inject(0.5), lambda step: 0.5 * (step + 1)
    number, schedule, injected, growing = (
        run(smooth(), low_rank(scale=value), batches(5)).params for value in values
    )
    assert equal(schedule, number)
    assert equal(injected, number)
    assert not equal(growing, number)


class HandsOn(torch.optim.AdamW):
    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)


def test_numbers_that_a_constructor_hands_on_are_the_optimizers_and_not_the_states():
    params, grads = {"w": torch.ones(3)}, {"w": torch.ones(3)}
    opt_state = ll.optimizer(HandsOn, lr=0.1).init(params)  # as from a checkpoint of a run with another rate
    new, _, _ = ll.optimizer(HandsOn, lr=0.5, weight_decay=0.2).update(grads, opt_state, params, 0)
    raw = nn.Parameter(torch.ones(3))
    raw.grad = grads["w"]
    torch.optim.AdamW([raw], lr=0.5, weight_decay=0.2).step()
    assert torch.equal(new["w"], raw)


class BySum(torch.optim.Optimizer):
    """Scales by a sum over its group, which depends on the order; `scale` is a tensor in the group."""

    def __init__(self, params, lr=0.1, scale=1.0):
        super().__init__(params, {"lr": lr, "scale": torch.tensor(scale)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            total = sum(p.grad.float().sum() for p in group["params"] if p.grad is not None)
            for p in group["params"]:
                p.sub_((p.grad.float() * total * group["lr"] * group["scale"].square()).to(p.dtype))


class InTwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(9, 30), nn.Linear(30, 20).bfloat16(), nn.Linear(20, 5)

    def forward(self, x):
        return self.last(self.middle(self.first(x).bfloat16()).float())


@both_steps
def test_a_group_of_several_dtypes_keeps_its_order_and_its_tensors(donate):
    torch.manual_seed(0)
    model, x = InTwoDtypes(), torch.randn(6, 9)
    raw = copy.deepcopy(model)
    theirs = BySum(raw.parameters(), lr=0.01, scale=1.0)
    optimizer = ll.optimizer(BySum, lr=0.01, scale=lambda step: 1.0 / (step + 1))
    step = ll.make_train_step(ll.make_grad_fn(model, lambda m, x: m(x).square().mean()), optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    for number in range(4):
        theirs.param_groups[0]["scale"].fill_(1.0 / (number + 1))
        theirs.zero_grad()
        raw(x).square().mean().backward()
        theirs.step()
        state, _ = step(state, x)
    assert equal(state.params, dict(raw.named_parameters()))


class Projecting(PerParameter):
    """Draws in its constructor what it uses from its fourth update on."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["direction"] = torch.rand_like(p)

    def update(self, group, p):
        self.state[p]["count"] = count = self.state[p].get("count", 0) + 1
        p.sub_(p.grad * (self.state[p]["direction"] if count > 3 else 1), alpha=group["lr"])


def test_a_constructor_draws_by_seed_and_step():
    model, optimizer = nn.Linear(2, 1), ll.optimizer(Projecting, lr=0.1)
    state, stream = ll.init_state(model, optimizer), torch.get_rng_state()
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).sum()), optimizer)
    one, other = (step(state, torch.ones(3, 2))[0] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), stream)
    assert bits(one.opt_state) == bits(other.opt_state)


class Noisy(PerParameter):
    """As SGLD: noise in each update."""

    def update(self, group, p):
        p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


@both_steps
def test_an_update_draws_by_seed_and_step(donate):
    def run_on(seed, steps=4, state=None):
        optimizer, model = ll.optimizer(Noisy, lr=0.1), net()
        step, state = step_of(model, optimizer, donate), state or ll.init_state(model, optimizer, seed=seed)
        stream, states = torch.get_rng_state(), [ll.copy_state(state)]
        for batch in batches(4)[-steps:]:
            state, _ = step(state, batch)
            states.append(ll.copy_state(state))
        assert torch.equal(torch.get_rng_state(), stream)
        return states

    states = run_on(5)
    torch.rand(3)
    assert equal(run_on(5)[-1].params, states[-1].params)  # whatever was drawn before
    assert equal(run_on(0, 2, ll.copy_state(states[2]))[-1].params, states[-1].params)  # resumed
    assert not equal(run_on(6)[-1].params, states[-1].params)
    moved = [states[k + 1].params["0.weight"] - states[k].params["0.weight"] for k in range(3)]
    assert not torch.allclose(moved[0], moved[1], atol=1e-3)


# State out of reach


class Queue(PerParameter):
    """As AdaShift: the last gradients in a deque."""

    def update(self, group, p):
        self.state[p].setdefault("last", deque(maxlen=3)).append(p.grad.clone())
        p.sub_(self.state[p]["last"][0], alpha=group["lr"])


class Drawing(PerParameter):
    """Draws from another random stream than torch's."""

    def update(self, group, p):
        p.sub_(p.grad, alpha=group["lr"] * random.random())


class Closed(PerParameter):
    def step(self, closure):
        closure()


class ForAll(PerParameter):
    """A count of updates for all parameters together."""

    def update(self, group, p):
        self.state["count"] = self.state.get("count", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / self.state["count"])


class InAList(PerParameter):
    """A count in a list of its group, of which a pure update keeps nothing."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr, count=[0])

    def update(self, group, p):
        group["count"][0] += 1
        p.sub_(p.grad, alpha=group["lr"] / group["count"][0])


class Growing(PerParameter):
    """Keeps more after its second update than after its first."""

    def update(self, group, p):
        state = self.state[p]
        state["late" if state else "first"] = torch.zeros(())
        p.sub_(p.grad, alpha=group["lr"])


class CountsAside(PerParameter):
    """A count in an attribute, with an effect in every fifth step only."""

    steps = 0

    def update(self, group, p):
        self.steps += 1
        p.sub_(p.grad, alpha=group["lr"] * (self.steps % 5 == 0))


class InATable(PerParameter):
    """Counts by parameter, in a dict of its own."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.seen = {}

    def update(self, group, p):
        self.seen[p] = self.seen.get(p, 0) + 1
        p.sub_(p.grad, alpha=group["lr"] * (self.seen[p] % 5 == 0))


class Masked:
    """A wrapper, as Magma of pytorch_optimizer is."""

    def __init__(self, optimizer, mask_prob=0.5, **kwargs):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)


class Moody(PerParameter):
    """Keeps a set for a parameter whose first gradient is large, as none is when its state is made."""

    def update(self, group, p):
        self.state[p].setdefault("seen", {"large"} if p.grad.abs().max() > 5 else 1.0)


@both_steps
def test_what_a_first_update_keeps_is_looked_at_again(donate):
    model, optimizer = nn.Linear(2, 1), ll.optimizer(Moody, lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).sum()), optimizer, donate=donate)
    assert_refused(
        TypeError, "Moody 'seen' set", lambda: step(ll.init_state(model, optimizer), torch.full((1, 2), 9.0))
    )


def test_what_cannot_be_kept_is_refused_by_name_at_the_start():
    for cls, names in (
        (Queue, "last deque"),
        (Drawing, "raw loop"),
        (Closed, "step() closure"),
        (ForAll, "together count"),
        (InAList, "raw loop"),
        (Growing, "more after one"),
        (CountsAside, "attribute 'steps'"),
        (InATable, "attribute 'seen'"),
        (Masked, "optimizer params"),
    ):
        params = dict(net().named_parameters())
        words = f"{cls.__name__} {names}"
        assert_refused(TypeError, words, lambda cls=cls, params=params: ll.optimizer(cls, lr=1e-2).init(params))


class InFours(PerParameter):
    """Takes no fewer than four parameters at a time."""

    def step(self, closure=None):
        if len(self.param_groups[0]["params"]) < 4:
            raise ValueError("a block has four parameters")
        super().step()

    def update(self, group, p):
        p.sub_(p.grad, alpha=group["lr"])


@both_steps
def test_a_class_that_cannot_be_compared_with_its_own_step_is_warned_of_and_trains(donate):
    model, raw, optimizer = net(), net(), ll.optimizer(InFours, lr=1e-2)
    words = "InFours could not be compared .*ValueError: a block has four.*raw loop of InFours"
    with pytest.warns(UserWarning, match=words) as caught:
        state = ll.init_state(model, optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    raw_loop(raw, InFours(raw.parameters(), lr=1e-2), batches(3))
    assert equal(trained(step_of(model, optimizer, donate), state, batches(3)).params, raw.named_parameters())


class Scoring(InFours):
    """Has an `eval` of its own, and no `train`."""

    step = PerParameter.step

    def eval(self, loss):
        return loss


def test_a_class_with_an_eval_alone_is_not_taken_for_a_schedule_free_one():
    model, optimizer = net(), ll.optimizer(Scoring, lr=1e-2, momentum=lambda step: 0.9)
    state = ll.init_state(model, optimizer)
    assert equal(ll.eval_state(optimizer, state).params, state.params)


# torchao's classes, whose moments are tensor subclasses of few bits


LRS = {"number": 1e-2, "schedule": lambda step: 1e-2 / (1 + step), "injected": ll.optim.inject(1e-2)}


@pytest.mark.slow
@pytest.mark.parametrize("lr", LRS)
@both_steps
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchaos_optimizers_train_save_and_resume_with_the_bits_of_a_raw_loop(name, donate, lr, tmp_path):
    import torchao.optim

    def wide():
        torch.manual_seed(0)  # of 4,096 numbers on, moments have few bits
        return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))

    cls = getattr(torchao.optim, name)
    data = torch.randn(6, 8, 64, generator=torch.Generator().manual_seed(1)).unbind()
    raw, optimizer = wide(), ll.optimizer(cls, lr=LRS[lr])
    theirs = cls(raw.parameters(), lr=1e-2)

    def schedule(number):
        if lr == "schedule":
            theirs.param_groups[0]["lr"].fill_(LRS[lr](number))

    with torch.compiler.set_stance("force_eager"):  # their step calls torch.compile, here without machine code
        raw_loop(raw, theirs, data, schedule)
        step, another = (step_of(wide(), optimizer, donate) for _ in range(2))
        state = trained(step, ll.init_state(wide(), optimizer), data[:3])
        ll.checkpoint_io(tmp_path).save(state)
        kept = ll.copy_state(state)
        assert state.opt_state[name]["state"]["0.weight"]["exp_avg"]["codes"].dtype.itemsize == 1
        restored = ll.checkpoint_io(tmp_path).restore(ll.init_state(wide(), ll.optimizer(cls, lr=LRS[lr])))
        for own_step, own_state in ((step, state), (step, kept), (another, restored)):
            assert equal(trained(own_step, own_state, data[3:]).params, raw.named_parameters())


def test_moments_of_few_bits_are_kept_as_shards_and_of_other_placements_refused(one_process):
    from torchao.optim import AdamW8bit

    mesh, optimizer = init_device_mesh("cpu", (1,)), ll.optimizer(AdamW8bit, lr=1e-2)

    def begun(placement):
        return optimizer.init({"w": nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [placement]))})

    with torch.compiler.set_stance("force_eager"):
        kept = begun(Shard(0))["AdamW8bit"]["state"]["w"]["exp_avg"]
        assert kept["codes"].placements == (Shard(0),)
        assert_refused(TypeError, "AdamW8bit w, 'exp_avg', (64, 64) Replicate() 1", lambda: begun(Replicate()))


class Lazy(torch.optim.Optimizer):
    """As classes with lazy rows: sparse gradients have a state of their own, and some keep more of it later."""

    def __init__(self, params, lr=0.1, later=0, sparse="apart"):
        super().__init__(params, {"lr": lr, "later": later, "sparse": sparse})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse and group["sparse"] == "never":
                    raise RuntimeError("Lazy does not support sparse gradients")
                state = self.state[p]
                key = "rows" if p.grad.is_sparse and group["sparse"] == "apart" else "average"
                if not state:
                    state["step"], state[key] = 0, torch.zeros_like(p)
                state["step"] += 1
                if state["step"] == group["later"]:
                    state["slow"] = p.clone()
                state[key].add_(p.grad)
                p.sub_(state[key], alpha=group["lr"])


def sparse_setting(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1))
    optimizer = ll.optimizer(Lazy, lr=0.1, **options)
    step = ll.make_train_step(
        ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer, donate=True
    )
    return model, optimizer, step


@pytest.mark.parametrize(
    ("sparse", "error", "words"),
    [
        ("apart", TypeError, "for 0.weight, whose gradient is sparse, .*average, step for dense gradients"),
        ("never", ValueError, "cannot take the sparse gradient of 0.weight.*does not support sparse gradients"),
    ],
)
def test_state_that_depends_on_sparsity_is_refused_before_the_spend(sparse, error, words):
    model, optimizer, step = sparse_setting(sparse=sparse)
    state = ll.init_state(model, optimizer)
    before = model[0].weight.detach().clone()
    for _ in range(2):
        with pytest.raises(error, match=words):
            step(state, torch.tensor([1, 3, 3]))
    assert torch.equal(state.params["0.weight"], before)


def test_the_same_state_for_sparse_gradients_is_a_raw_loops_and_restores(tmp_path):
    model, optimizer, step = sparse_setting(sparse="same")
    raw = copy.deepcopy(model)
    by_hand = Lazy(raw.parameters(), sparse="same")
    state = ll.init_state(model, optimizer)
    for _ in range(3):
        state, _ = step(state, torch.tensor([1, 3, 3]))
        by_hand.zero_grad()
        raw(torch.tensor([1, 3, 3])).square().mean().backward()
        by_hand.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), raw.parameters(), strict=True))
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state)
    again, optimizer, _ = sparse_setting(sparse="same")
    restored = ckpt.restore(ll.init_state(again, optimizer), quiet=True)
    found, kept = (one.opt_state["Lazy"]["state"]["0.weight"]["average"] for one in (restored, state))
    assert torch.equal(found, kept)


def test_a_class_that_keeps_more_in_a_late_update_is_refused_at_that_update(tmp_path):
    model, optimizer, step = sparse_setting(sparse="same", later=5)
    ckpt, state = ll.checkpoint_io(tmp_path), ll.init_state(model, optimizer)
    for _ in range(4):
        state, _ = step(state, torch.tensor([1, 3, 3]))
        ckpt.save(state)
    with pytest.raises(TypeError, match=r"Lazy keeps average, slow, step for 0\.weight.*average, step before"):
        step(state, torch.tensor([1, 3, 3]))
    again, optimizer, _ = sparse_setting(sparse="same", later=5)
    assert ckpt.restore(ll.init_state(again, optimizer), quiet=True).step == 4
