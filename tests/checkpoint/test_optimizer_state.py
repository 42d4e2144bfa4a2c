"""Optimizer state out and in, against raw loops with torch's optimizers."""

import copy
import inspect

import pytest
import schedulefree
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import is_vector, loss_fn
from shared import bits, equal
from torch import nn

import looplib as ll

optimizer_state_dict, load_optimizer_state_dict = (
    ll.checkpoint.optimizer_state_dict,
    ll.checkpoint.load_optimizer_state_dict,
)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def batch(step):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def raw_steps(model, optimizer, begin, end):
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_fn(model, batch(step)).backward()
        optimizer.step()


def pure_steps(model, state, optimizer, begin, end, donate=False):
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    for at in range(begin, end):
        state, _ = step(state, batch(at))
    return state


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}, {"weight_decay": 0.0}),
    "half momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, {"momentum": 0.0}),
    "SGD": (torch.optim.SGD, {"lr": 0.05}, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.5}, {"centered": True, "momentum": 0.0}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}, {"weight_decay": 0.1}),
}


def both(cls, defaults, overrides, model, reverse):
    """looplib's optimizer and torch's own, with groups in another order where order is free."""
    fused = {"fused": True} if "fused" in inspect.signature(cls).parameters else {}
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": vectors, **overrides}, {"params": matrices[::-1] if reverse else matrices}]
    raw = cls(groups[::-1] if reverse else groups, **defaults, **fused)
    return ll.optimizer(cls, **defaults, groups=[(is_vector, overrides)]), raw


@pytest.mark.every_case
@pytest.mark.parametrize("kind", OPTIMIZERS)
@given(
    steps=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 2)), flags=st.tuples(*[st.booleans()] * 3)
)
@settings(max_examples=8, deadline=None)
def test_a_run_leaves_for_a_raw_loop_and_comes_back_with_the_same_bits(kind, steps, flags):
    (here, there, back), (reverse, donate, bound) = steps, flags
    total = here + there + back
    reference = mlp()
    optimizer, raw = both(*OPTIMIZERS[kind], reference, reverse)
    raw_steps(reference, raw, 0, total)

    model = mlp()
    state = pure_steps(model, ll.init_state(model, optimizer), optimizer, 0, here, donate)
    if bound:
        state = ll.bind(model, state)
    else:
        weights, model = ll.checkpoint.state_dict(model, state), mlp()
        model.load_state_dict(weights)
    before = ll.copy_state(state)
    _, raw = both(*OPTIMIZERS[kind], model, reverse)
    raw.load_state_dict(optimizer_state_dict(model, state, raw))
    raw_steps(model, raw, here, here + there)
    assert bits(state.opt_state) == bits(before.opt_state)  # the raw loop writes into nothing of it

    state = ll.init_state(model, optimizer, seed=3).replace(step=here + there, batch=here + there)
    if here + there:
        state = load_optimizer_state_dict(model, state, raw)
        assert (state.step, state.seed) == (here + there, 3)
    kept = copy.deepcopy(raw.state_dict()["state"])
    state = pure_steps(model, state, optimizer, here + there, total, donate)
    assert equal({**state.params, **state.buffers}, [*reference.named_parameters(), *reference.named_buffers()])
    assert bits(kept) == bits(raw.state_dict()["state"])  # nor looplib into the raw optimizer's


def map_tensors_of(part, function, opt_state):
    """The state of an update with the tensors of one part changed, also if that part is within another."""
    return {
        name: torch.utils._pytree.tree_map_only(torch.Tensor, function, own)
        if name == part
        else map_tensors_of(part, function, own)
        if isinstance(own, dict)
        else own
        for name, own in opt_state.items()
    }


def test_what_is_filled_is_torchs_own_state_dict():
    model, reference = mlp(), mlp()
    plain, raw = both(*OPTIMIZERS["AdamW"], reference, True)
    raw_steps(reference, raw, 0, 3)
    # The one ll.optimizer of a chain is found wherever it stands, also in another part.
    around = ll.chain(ll.skip_nonfinite(2), plain, ll.ema(0.9))
    for optimizer in (
        plain,
        around,
        ll.optim.own_steps(plain),
        ll.chain(ll.skip_nonfinite(), ll.optim.own_steps(around)),
        ll.optim.every(plain, 1),
    ):
        state = pure_steps(model, ll.init_state(model, optimizer), optimizer, 0, 3)
        _, empty = both(*OPTIMIZERS["AdamW"], model, True)
        filled = optimizer_state_dict(nn.DataParallel(model), state, empty)
        assert empty.state_dict()["state"] == {}
        assert list(filled["state"]) == list(raw.state_dict()["state"])
        assert bits(filled) == bits(raw.state_dict())
        empty.load_state_dict(filled)
        # All else is as in the state: averages and counts, which a torch optimizer does not have.
        fresh = ll.copy_state(state).replace(opt_state=map_tensors_of("AdamW", torch.zeros_like, state.opt_state))
        assert bits(fresh.opt_state) != bits(state.opt_state)
        assert bits(load_optimizer_state_dict(model, fresh, empty).opt_state) == bits(state.opt_state)


def test_what_is_kept_takes_the_dtype_of_its_new_place():
    model = mlp()
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.05)
    raw = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    raw_steps(model, raw, 0, 2)
    double = ll.init_state(copy.deepcopy(model).double(), optimizer).replace(step=2)
    state = load_optimizer_state_dict(model, double, raw)
    for name, p in model.named_parameters():
        kept = state.opt_state["AdamW"]["state"][name]
        assert (kept["exp_avg"].dtype, kept["step"].dtype) == (torch.float64, torch.float32)
        assert torch.equal(kept["exp_avg"], raw.state[p]["exp_avg"].double())
    single = ll.init_state(model, optimizer).replace(step=2, opt_state=state.opt_state)
    assert bits(optimizer_state_dict(model, single, raw)["state"]) == bits(raw.state_dict()["state"])


class Late(torch.optim.Optimizer):
    """Momentum that begins with a parameter's own first gradient."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                if not self.state[p]:
                    self.state[p]["momentum"] = p.grad.clone()
                p.sub_(self.state[p]["momentum"].mul_(0.9).add_(p.grad), alpha=group["lr"])


def test_a_parameter_that_never_had_a_gradient():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    raw = torch.optim.AdamW(model.parameters(), lr=0.1)
    model["used"](torch.ones(1, 2)).sum().backward()
    raw.step()
    start = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=0.1)).replace(step=1)
    kept = load_optimizer_state_dict(model, start, raw).opt_state["AdamW"]["state"]
    assert torch.equal(kept["used.weight"]["exp_avg"], raw.state[model["used"].weight]["exp_avg"])
    assert equal(kept["unused.weight"], start.opt_state["AdamW"]["state"]["unused.weight"])
    # It has no entry where the class makes it in the first update.
    optimizer = ll.optimizer(Late, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model["used"](x).sum(), allow_unused=True)
    state, _ = ll.make_train_step(grad_fn, optimizer)(ll.init_state(model, optimizer), torch.ones(1, 2))
    late = Late(model.parameters(), lr=0.1)
    packed = optimizer_state_dict(model, state, late)
    assert packed["state"].keys() == {0, 1}
    late.load_state_dict(packed)
    again = load_optimizer_state_dict(model, ll.init_state(model, optimizer).replace(step=1), late)
    assert bits(again.opt_state) == bits(state.opt_state)


def test_optimizers_that_do_not_match_are_refused():
    model = mlp()
    adamw = ll.optimizer(torch.optim.AdamW, lr=0.05)
    state = pure_steps(model, ll.init_state(model, adamw), adamw, 0, 2)
    params = list(model.parameters())
    for name, tensor in model.named_parameters():
        tensor.requires_grad_(is_vector(name, tensor))
    part = ll.init_state(model, adamw)
    model.requires_grad_(True)
    schedule_free = ll.init_state(model, ll.optimizer(schedulefree.AdamWScheduleFree, lr=0.05))
    lbfgs = ll.init_state(model, ll.optimizer(torch.optim.LBFGS, lr=0.05))
    sign = ll.optim.part("sign", update_=lambda grads, state, params, step: (params, state), role="weights")
    labels = {"vectors": adamw, "matrices": adamw}
    both = ll.optim.partition(labels, lambda *named: "vectors" if is_vector(*named) else "matrices")
    networks = ll.init_state(model, both)
    for raw, given_state, error, words in (
        (torch.optim.AdamW(params[:-1]), state, ValueError, "missing 3.bias, unexpected none"),
        (torch.optim.AdamW(mlp().parameters()), state, ValueError, r"shape \(4,\) that is not this Sequential's own"),
        (torch.optim.AdamW(params), part, ValueError, "missing none, unexpected 0.weight, 3.weight"),
        (adamw, state, TypeError, "torch_optimizer is an Optimizer"),
        (
            torch.optim.AdamW(params),
            ll.init_state(model),
            TypeError,
            "opt_state holds nothing, and not what one ll.optimizer keeps",
        ),
        (
            torch.optim.AdamW(params),
            networks,
            TypeError,
            r"holds partition \(vectors.*matrices.*partition are not conv",
        ),
        (
            torch.optim.AdamW(params),
            ll.init_state(model, sign),
            TypeError,
            "opt_state holds nothing, and not what one",
        ),
        (schedulefree.AdamWScheduleFree(params), schedule_free, ValueError, "groups"),
        (torch.optim.LBFGS(params), lbfgs, ValueError, "LBFGS keeps its history in lists"),
    ):
        for function in (optimizer_state_dict, load_optimizer_state_dict):
            with pytest.raises(error, match=words):
                function(model, given_state, raw)
    for p in params:
        p.requires_grad_(p.ndim < 2)
    part = ll.init_state(model, adamw)
    raw = torch.optim.AdamW(params)  # frozen ones stand in it as they do in most loops
    assert len(optimizer_state_dict(model, part, raw)["state"]) == len(part.opt_state["AdamW"]["state"]) == 4
    for p in params:
        p.requires_grad_()

    with pytest.raises(ValueError, match=r"0.*AdamW keeps \['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'step'\]"):
        optimizer_state_dict(model, state, torch.optim.AdamW(params, amsgrad=True))
    sgd = torch.optim.SGD(params, momentum=0.9)
    with pytest.raises(ValueError, match=r"step 2.*0 parameters"):
        load_optimizer_state_dict(model, state, sgd)
    ll.bind(model, state)  # which is no longer the module of a pure run, then
    raw_steps(model, sgd, 0, 1)
    with pytest.raises(ValueError, match=r"for 0.weight, this SGD keeps \['momentum_buffer'\], and the state keeps"):
        load_optimizer_state_dict(model, state, sgd)
    momentum = ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9))
    with pytest.raises(ValueError, match=r"step 0.*6 parameters.*state.replace\(step="):
        load_optimizer_state_dict(model, momentum, sgd)
    sgd.state[params[0]]["momentum_buffer"] = torch.ones(7, 7)
    with pytest.raises(ValueError, match=r"0.weight's momentum_buffer has shape \(7, 7\).*\(4, 5\)"):
        load_optimizer_state_dict(model, momentum.replace(step=1), sgd)


def square():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def test_param_names_of_a_file_that_name_other_parameters_are_refused_both_ways():
    model = square()
    backwards = torch.optim.AdamW([*model.named_parameters()][::-1], lr=0.1)
    model(torch.ones(2, 3)).square().sum().backward()
    backwards.step()
    # torch's load_state_dict goes by position: the moments of one bias would become those of the other one.
    raw = torch.optim.AdamW([model[0].bias, model[0].weight, model[1].bias, model[1].weight], lr=0.1)
    raw.load_state_dict(backwards.state_dict())
    state = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=0.1)).replace(step=1)
    for convert in (optimizer_state_dict, load_optimizer_state_dict):
        with pytest.raises(ValueError, match=r"param_names.*0\.bias is called 1\.bias.*named_parameters"):
            convert(model, state, raw)


@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile, lambda model: nn.ModuleDict({"net": model})])
def test_param_names_of_a_wrapper_or_in_another_order_are_loaded(wrap):
    model = square()
    names = [*wrap(model).named_parameters()][::-1]
    raw = torch.optim.AdamW(names, lr=0.1)
    model(torch.ones(2, 3)).square().sum().backward()
    raw.step()
    state = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=0.1)).replace(step=1)
    loaded = load_optimizer_state_dict(model, state, raw).opt_state["AdamW"]["state"]
    for name, param in model.named_parameters():
        torch.testing.assert_close(loaded[name]["exp_avg"], raw.state[param]["exp_avg"], rtol=0, atol=0)
