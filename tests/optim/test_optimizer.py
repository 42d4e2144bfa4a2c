"""Optimizers: groups and schedules against a raw loop, purity, kernels, and what is refused."""

import copy
import functools
import importlib
import warnings

import pytest
import schedulefree
import torch
from problem import QUICK, adamw, assert_refused, batches, is_vector, net, raw_loop, run, sgd, step_of
from shared import bits, both_steps, equal, mean_output, one_report
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import looplib as ll


@both_steps
def test_groups_and_schedules_on_any_hyperparameter_equal_the_raw_loop(donate):
    def lr(step):
        return 1e-2 / (1 + step)

    def beta(step):
        return 0.8 + 0.01 * step

    def eps(step):
        return 10.0 ** -(3 + step)

    model = net(norm=nn.LayerNorm)
    named = dict(model.named_parameters())
    vectors = [p for p in named.values() if p.ndim < 2]
    head, rest = [named["4.weight"]], [named["0.weight"]]
    groups = [
        {"params": head, "lr": 0.5, "weight_decay": 0.3},
        {"params": vectors, "weight_decay": 0.0},
        {"params": rest},
    ]
    raw = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.1, fused=True)

    def schedule(step):
        for group in raw.param_groups:
            group["betas"] = (beta(step), 0.99)
        for group in raw.param_groups[1:]:
            group["lr"] = lr(step)
        raw.param_groups[1]["eps"] = eps(step)

    schedule(0)
    raw_loop(model, raw, batches(20), schedule)
    groups = [
        (lambda name, tensor: name == "4.weight", {"lr": 0.5, "weight_decay": 0.3}),
        (is_vector, {"weight_decay": 0.0, "eps": eps}),
    ]
    optimizer = adamw(lr, betas=lambda step: (beta(step), 0.99), weight_decay=0.1, groups=groups)
    assert equal(run(net(norm=nn.LayerNorm), optimizer, batches(20), donate).params, model.named_parameters())


def test_update_is_pure_and_takes_gradients_of_a_part():
    writes_grads = ll.optimizer(schedulefree.AdamWScheduleFree, lr=1e-2, foreach=False)
    nesterov = sgd(nesterov=True, foreach=True)  # which adds to lists of gradients
    for optimizer in (adamw(), writes_grads, nesterov):
        params = dict(net().named_parameters())
        given = {"0.weight": torch.full((5, 6), 2.0)}, optimizer.init(params), params, 0
        before = bits(given)
        one, two = optimizer.update(*given), optimizer.update(*given)
        assert bits(given) == before
        assert bits(one) == bits(two)
        assert one[2] is True
        assert one[0]["4.bias"] is params["4.bias"]
        assert not torch.equal(one[0]["0.weight"], params["0.weight"])
        assert list(one[0]) == list(params)


class Kernels(TorchDispatchMode):
    """The optimizer's kernels that were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "dtype", "cut", "kernel", "told"),
    [
        ({}, torch.float32, None, "_fused_adamw_", "fused"),
        ({}, torch.complex64, None, "lerp_", "torch's default"),  # there is no fused kernel for it
        ({}, torch.float32, 3, "lerp_", "torch's default"),
        ({"foreach": True}, torch.float32, None, "_foreach_lerp_", "foreach=True"),
        ({"fused": False}, torch.float32, None, "lerp_", "fused=False"),
        ({"fused": True}, torch.float32, None, "_fused_adamw_", "fused=True"),
    ],
)
def test_fused_where_torch_has_it_unless_the_user_says_and_the_repr_says_which(options, dtype, cut, kernel, told):
    optimizer, params = adamw(**options), {"w": torch.ones(4, 6, dtype=dtype)[:, :cut]}
    opt_state = optimizer.init(params)
    with Kernels() as called:
        optimizer.update({"w": torch.ones_like(params["w"])}, opt_state, params, 0)
    assert called.names & {"_fused_adamw_", "_foreach_lerp_", "lerp_"} == {kernel}
    assert repr(optimizer).endswith(f"kernel: {told}")


def fused_with_other_strides():
    optimizer, params = adamw(fused=True), {"w": torch.ones(4, 6)}
    opt_state = optimizer.init(params)
    opt_state["AdamW"]["state"]["w"]["exp_avg"] = torch.zeros(6, 4).t()
    optimizer.update({"w": torch.ones(4, 6)}, opt_state, params, 0)


def by_identity():
    model = net()
    head = set(model[4].parameters())
    ll.init_state(model, sgd(groups=[(lambda name, p: p in head, {"lr": 0.5})]))


def unknown_gradient():
    optimizer, params = adamw(), {"w": torch.ones(1)}
    optimizer.update({"other": torch.ones(1)}, optimizer.init(params), params, 0)


def of_ranks(name):
    return getattr(importlib.import_module("torch.distributed.optim"), name)


class Decayed(torch.optim.SGD):
    """A third party's class, which may read other keys from a group."""


SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
MISSPELT = [(is_vector, {"rank": 3, "weigth_decay": 0.9})]
REFUSED = {
    "an instance": (TypeError, "AdamW lr", lambda: ll.optimizer(AdamW(net().parameters()), lr=0.1)),
    "parameters": (TypeError, "SGD generator init_state", lambda: ll.optimizer(SGD, net().parameters(), lr=0.1)),
    "params=": (TypeError, "SGD list lr=...", lambda: ll.optimizer(SGD, params=[*net().parameters()], lr=0.1)),
    "a bare rate": (TypeError, "float keyword lr=...", lambda: ll.optimizer(SGD, 0.1, lr=0.1)),
    "no optimizer": (TypeError, "dict torch.optim.Optimizer", lambda: ll.optimizer(dict, lr=0.1)),
    "a group": (TypeError, "group bias", lambda: adamw(groups=[("bias", {"weight_decay": 0.0})])),
    "a rate": (ValueError, "-1", lambda: ll.init_state(net(), adamw(lr=-1.0))),
    "a rate at step 0": (ValueError, "-1", lambda: adamw(lr=lambda step: step - 1.0)),
    "a group's rate at step 0": (
        ValueError,
        "-1",
        lambda: adamw(groups=[(is_vector, {"lr": lambda step: step - 1.0})]),
    ),
    "a text for a rate": (TypeError, "'0.1' 1e-3, schedule", lambda: adamw(lr="0.1")),
    "a schedule of no numbers": (TypeError, "lr(0) None number", lambda: adamw(lr=lambda step: None)),
    "unknown": (TypeError, "SGD momentumm lr, momentum,", lambda: ll.optimizer(SGD, lr=0.1, momentumm=0.9)),
    "unknown in a group": (
        TypeError,
        "SGD weight_decai weight_decay",
        lambda: ll.optimizer(SGD, lr=0.1, groups=[(is_vector, {"weight_decai": 0.9})]),
    ),
    "misspelt": (TypeError, "'weigth_decay' 'weight_decay'", lambda: ll.optimizer(Decayed, lr=0.1, groups=MISSPELT)),
    "unknown to a third party": (TypeError, "Decayed rank", lambda: ll.optimizer(Decayed, lr=0.1, rank=2)),
    "by identity": (ValueError, "group 4. name, shape dtype", by_identity),
    "gaps": (ValueError, "fused=True w, gaps", lambda: adamw(fused=True).init({"w": torch.ones(4, 6)[:, :3]})),
    "strides": (ValueError, "fused=True w, init_state", fused_with_other_strides),
    "a gradient": (ValueError, "other requires gradient", unknown_gradient),
}
for name in ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"):
    REFUSED[name] = (TypeError, f"{name} fully_shard", lambda name=name: ll.optimizer(of_ranks(name), lr=0.1))
    mine = f"Mine{name}"
    REFUSED[mine] = (
        TypeError,
        mine,
        lambda name=name: ll.optimizer(type(f"Mine{name}", (of_ranks(name),), {}), lr=0.1),
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, when it is imported
def test_refusals_name_what_was_found_and_what_to_give():
    for case in REFUSED.values():
        assert_refused(*case)


@both_steps
def test_an_update_that_fails_in_its_step_leaves_no_gradients_on_the_model(donate):
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise MemoryError
            super().step()

    model, optimizer = net(), ll.optimizer(Failing, lr=0.1)
    step, state = step_of(model, optimizer, donate), ll.init_state(model, optimizer)
    Failing.fails = True
    with pytest.raises(MemoryError):
        step(state, batches(1)[0])
    assert all(p.grad is None for p in model.parameters())


def warnings_of(lr, steps):
    """Warnings of a run, each with its step."""
    model, sgd = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=lr)
    train_step = ll.make_train_step(ll.make_grad_fn(model, mean_output), sgd, donate=True)
    state, said = ll.init_state(model, sgd), []
    for step in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = train_step(state, torch.ones(4, 2))
        said += [(step, str(warning.message)) for warning in caught]
    return said


class Triangles:
    """A schedule of the user's, whose `total` is the length of a cycle."""

    total = 3

    def __call__(self, step):
        return 0.1 * (step % self.total)


def test_a_schedule_of_the_users_that_passes_through_0_does_not_warn():
    assert warnings_of(Triangles(), 9) == []


def test_training_past_the_end_at_a_rate_of_0_warns_once():
    for lr in (
        ll.warmup_cosine(0.1, warmup=2, total=6),
        ll.schedules.linear(0.1, total=6),
        ll.schedules.one_cycle(1.0, total=6, start=0.1, final=0.0),
    ):
        ((step, message),) = warnings_of(lr, 9)
        assert step == 6
        assert f"{lr!r}, is 0 from step 6 on" in message
        assert warnings_of(lr, 6) == []
    ((step, message),) = warnings_of(ll.schedules.one_cycle(1.0, total=6), 9)  # whose default end is nearly 0
    assert step == 6
    assert "is 4e-06 from step 6 on" in message
    for lr in (
        0.0,
        ll.schedules.linear(0.1, total=6, final=0.01),
        ll.schedules.step_decay(0.1, every=3),
        lambda step: 0.0,
    ):
        assert warnings_of(lr, 9) == []


CLASSES = {
    "AdamW": adamw,
    "Adagrad": lambda **options: ll.optimizer(torch.optim.Adagrad, lr=0.1, **options),
    "momentum": sgd,
    "RMSprop": lambda **options: ll.optimizer(torch.optim.RMSprop, lr=0.1, **options),
    "NAdam": lambda **options: ll.optimizer(torch.optim.NAdam, lr=0.1, **options),
}
UNFIT = {
    "another shape": lambda row: row.update({[*row][-1]: torch.zeros(9)}),
    "another dtype": lambda row: row.update({[*row][-1]: row[[*row][-1]].double()}),
    "another device": lambda row: row.update({[*row][-1]: row[[*row][-1]].to("meta")}),
    "a missing entry": lambda row: row.pop([*row][-1]),
    "another class's": lambda row: row.update(other=row.pop([*row][-1])),
}


@one_report
@both_steps
@pytest.mark.parametrize("edit", UNFIT)
@pytest.mark.parametrize("name", CLASSES)
def test_a_state_that_does_not_fit_one_parameter_is_refused_while_it_can_be_read(name, edit, donate):
    model, optimizer = net(), CLASSES[name]()
    step, state = step_of(model, optimizer, donate), ll.init_state(model, optimizer)
    state, _ = step(state, batches(1)[0])
    ((part, kept),) = state.opt_state.items()
    rows = {key: dict(row) for key, row in kept["state"].items()}
    UNFIT[edit](rows["4.bias"])
    wrong = state.replace(opt_state={part: {**kept, "state": rows}})
    before = bits(wrong.params)
    found = r"for 4\.bias, and (the parameter is .* on cpu|.* for 0.weight)"
    with pytest.raises(ValueError, match=found):
        step(wrong, batches(1)[0])
    assert bits(wrong.params) == before


@pytest.mark.parametrize("compile", [None, QUICK], ids=["eager", "compiled"])
def test_a_state_of_more_rows_is_refused(compile):
    few, many, optimizer = nn.Embedding(5, 4), nn.Embedding(6, 4), adamw()
    state = ll.init_state(many).replace(opt_state=ll.init_state(few, optimizer).opt_state)
    step = ll.make_train_step(ll.make_grad_fn(many, mean_output), optimizer)
    step = ll.compile_step(step, **compile) if compile else step
    with pytest.raises(ValueError, match=r"shape \(5, 4\) on cpu for weight, and the parameter .* shape \(6, 4\)"):
        step(state, torch.tensor([5]))


@pytest.mark.parametrize(
    "optimizer",
    [
        adamw(),
        ll.chain(ll.skip_nonfinite(3), ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), ll.ema()),
        ll.optimizer(torch.optim.LBFGS, lr=0.1),
        ll.optimizer(schedulefree.AdamWScheduleFree, lr=0.1),
        ll.optim.partition({"all": adamw()}, lambda name, tensor: "all"),
    ],
    ids=["AdamW", "wrapped", "LBFGS", "third party", "partition"],
)
def test_a_used_optimizer_can_be_copied_and_pickled(optimizer):
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    grad_fn = ll.make_grad_fn(net, lambda net, x: net(x).square().mean())
    state, _ = ll.make_train_step(grad_fn, optimizer)(ll.init_state(net, optimizer), x)
    copied = copy.deepcopy({"optimizer": optimizer, "epochs": 3})["optimizer"]
    (one, _), (other, _) = (ll.make_train_step(grad_fn, each)(state, x) for each in (optimizer, copied))
    assert equal(one.params, other.params)
    assert repr(copied) == repr(optimizer)


def test_a_group_by_device_is_that_of_each_parameters_device():
    groups = [(lambda name, tensor: tensor.device.type == "meta", {"lr": 0.0})]
    optimizer = ll.optimizer(torch.optim.SGD, lr=1.0, groups=groups)
    here = {"a": torch.ones(2), "b": torch.ones(2)}
    optimizer.init({**here, "b": torch.ones(2, device="meta")})
    new, _, _ = optimizer.update(here, optimizer.init(here), here, 0)
    assert torch.equal(new["b"], torch.zeros(2))


def test_a_step_that_was_put_into_torchs_class_is_used(monkeypatch):
    theirs = torch.optim.AdamW.step

    def step(self, closure=None):
        theirs(self)
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.detach().clamp_(max=0.5)

    params, grads = {"w": torch.ones(2, 2)}, {"w": torch.ones(2, 2)}
    for put in (torch.no_grad()(step), functools.wraps(theirs)(step)):
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", put)
            optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1)
            new, _, _ = optimizer.update(grads, optimizer.init(params), params, 0)
            raw = torch.nn.Parameter(torch.ones(2, 2))
            raw.grad = grads["w"]
            torch.optim.AdamW([raw], lr=0.1).step()
        assert torch.equal(new["w"], torch.full((2, 2), 0.5))
        assert torch.equal(new["w"], raw)
