"""Writes of a forward pass, other than those that torch counts."""

import copy
import warnings

import pytest
import torch
from problem import run, step_of
from shared import SGD, bits, both_steps, mean_output
from shared import mean_square as mean_of_square
from torch import nn

import looplib as ll
from looplib._core.random import generators_of


class Counting(nn.Module):
    """Counts its calls as some quantizers and routers do: in integers, and behind torch's back."""

    def __init__(self, dtype):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(2, dtype=dtype))

    def forward(self, x):
        self.calls.data.copy_(self.calls.data + 1)
        return self.inner(x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float32])
@both_steps
def test_buffers_that_are_written_behind_torchs_back_are_kept(dtype, donate):
    model, reference = Counting(dtype), Counting(dtype)
    step = step_of(model, SGD, donate, mean_output)
    state = ll.init_state(model, SGD)
    for _ in range(3):
        before = ll.copy_state(state)
        given, (state, _) = state, step(state, torch.ones(4, 3))
        if not donate:
            assert torch.equal(given.buffers["calls"], before.buffers["calls"])
        reference(torch.ones(4, 3))
    assert torch.equal(state.buffers["calls"], reference.calls)


class Filled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("scale", None)

    def forward(self, x):
        if self.scale is None:
            self.scale = x.abs().mean()
        return self.inner(x) / self.scale


@pytest.mark.parametrize("call", ["grad", "pure", "donated", "eval", "predict"])
def test_a_buffer_that_the_forward_pass_fills_is_refused_by_name(call):
    model = nn.Sequential(Filled())
    state, x = ll.init_state(model, SGD), torch.ones(4, 3)
    grad_fn = ll.make_grad_fn(model, mean_output)
    function = {
        "grad": grad_fn,
        "pure": ll.make_train_step(grad_fn, SGD),
        "donated": ll.make_train_step(grad_fn, SGD, donate=True),
        "eval": ll.make_eval_step(model, lambda m, x: {"mean": m(x).mean()}),
        "predict": ll.make_predict_step(model, lambda m, x: m(x)),
    }[call]
    with pytest.raises(ValueError, match=r"put a tensor into 0\.scale, .* run the model on one batch before"):
        function(state, x)
    assert model[0].scale is None
    model = copy.deepcopy(model)  # which no pure step has left behind
    model(2 * x)
    state = ll.init_state(model, SGD)
    assert state.buffers["0.scale"] == 2
    step_of(model, SGD, loss_fn=mean_output)(state, x)


class Longer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        if self.training:
            self.seen = torch.cat([self.seen, x.mean().reshape(1)])
        return self.inner(x)


@both_steps
@pytest.mark.parametrize("bound", [False, True])
def test_buffers_of_a_new_shape_work_alike_in_all_steps(donate, bound):
    model = Longer()
    step = step_of(model, SGD, donate, mean_output)
    evaluate = ll.make_eval_step(model, lambda m, x: {"seen": m(x).sum() * 0 + len(m.seen)})
    state = ll.init_state(model, SGD)
    state = state if bound else ll.copy_state(state)
    for n in range(1, 4):
        state, _ = step(state, torch.full((4, 3), float(n)))
        assert state.buffers["seen"].tolist() == [1.0, 2.0, 3.0][:n]
        assert ll.compute(evaluate(state, torch.ones(4, 3))) == {"seen": n}


@pytest.mark.parametrize("to", [True, False])
def test_modes_that_a_function_of_the_users_flips_are_put_back(to):
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.Tanh())
    model.train(not to)
    model[2].train(to)
    modes = [module.training for module in model.modules()]

    def flip(model, x):
        out = model(x).mean()
        model[1].train(to)
        model[0].train(not to)
        return out

    state, x = ll.init_state(model), torch.ones(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a part in eval mode
        grad_fn = ll.make_grad_fn(model, flip)
    grad_fn(state, x)
    assert [module.training for module in model.modules()] == modes
    ll.accumulate(grad_fn, 2)(state, x)
    assert [module.training for module in model.modules()] == modes
    ll.make_eval_step(model, lambda model, x: {"loss": flip(model, x)})(state, x)
    assert [module.training for module in model.modules()] == modes


def test_the_random_stream_of_each_accelerator_is_found_by_its_module(monkeypatch):
    own = torch.Generator()
    monkeypatch.setattr(torch.xpu, "default_generators", (torch.Generator(), own))
    assert generators_of(torch.device("xpu", 1)) == (torch.default_generator, own)
    assert generators_of(torch.device("meta")) == generators_of(torch.device("cpu")) == (torch.default_generator,)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("kind", ["eval", "predict"])
def test_a_layer_replaced_afterwards_takes_the_states_tensors(kind, called):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    function = {
        "eval": lambda: ll.make_eval_step(model, lambda model, x: {"loss": mean_of_square(model, x)}),
        "predict": lambda: ll.make_predict_step(model, lambda model, x: model(x)),
    }[kind]()
    x = torch.randn(5, 3)
    if called:
        function(ll.init_state(model), x)
    model[2] = nn.Linear(4, 2)
    state = ll.init_state(model)
    state = state.replace(params={name: tensor.detach() + 1 for name, tensor in state.params.items()})
    out = torch.func.functional_call(model, state.params, x)
    if called:  # the function cannot tell this state from one that was made before
        with pytest.raises(
            ValueError, match=r"2.weight, 2.bias of the Sequential is another tensor.*call both again"
        ):
            function(state, x)
    elif kind == "predict":
        torch.testing.assert_close(function(state, x), out)
    else:
        assert ll.compute(function(state, x))["loss"] == pytest.approx(out.square().mean().item())


@pytest.mark.every_case
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.__setitem__(1, nn.Linear(4, 4)),
        lambda model: model.append(nn.Linear(4, 1)),
        lambda model: model.__setitem__(0, nn.Sequential(model[0])),
    ],
    ids=["replaced", "added", "wrapped"],
)
def test_a_gradient_function_refuses_layers_that_were_changed_after_it_was_made(change):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    grad_fn = ll.make_grad_fn(model, mean_of_square)
    change(model)
    state = ll.init_state(model, SGD)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"replaced or added after make_grad_fn.*call ll.make_grad_fn again"):
            grad_fn(state, torch.ones(2, 4))


class Assigning(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", count)

    def forward(self, x):
        self.count = self.count + 1
        return self.weight * x


@pytest.mark.every_case
@both_steps
def test_a_tied_buffer_of_which_one_owner_assigns_a_new_one_has_its_value(donate):
    tied = torch.zeros(())
    model = nn.Sequential(Assigning(tied), nn.BatchNorm1d(1))
    model[1].register_buffer("seen", tied)
    step, state = step_of(model, SGD, donate, mean_of_square), None
    state = ll.init_state(model, SGD)
    for _ in range(3):
        state, _ = step(state, torch.ones(4, 1))
    assert state.buffers["0.count"] == 3


@pytest.mark.slow
def test_replaced_layers_without_tensors_and_wrappers_around_layers_are_followed():
    model = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 2))
    predict_step, state = ll.make_predict_step(model, lambda model, x: model(x)), ll.init_state(model)
    expected = predict_step(state, torch.ones(5, 3))
    model[1] = nn.Dropout(0.5)  # in training mode, which predictions turn off
    model[2] = torch.compile(model[2], backend="eager")
    assert torch.equal(predict_step(state, torch.ones(5, 3)), expected)
    assert model[1].training


@pytest.mark.parametrize("made_in", [True, False], ids=["train", "eval"])
@pytest.mark.filterwarnings("ignore:.* eval mode")
def test_a_later_layer_runs_in_the_mode_that_it_would_have_had_from_the_start(made_in):
    """Of a model in eval mode all layers are trained, one in eval mode too that comes after the model's own train()."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Identity()).train(made_in), torch.ones(4, 3)
    modes = []
    grad_fn = ll.make_grad_fn(model, lambda model, x: (modes.append(model[1].training), mean_output(model, x))[1])
    state = ll.init_state(model)
    model.train()
    model[1] = nn.Dropout(0.5).eval()
    grad_fn(state, x)
    assert modes == [not made_in]


@both_steps
def test_a_compressed_sparse_buffer_is_one_as_any_other(donate):
    class Neighbours(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            with warnings.catch_warnings(action="ignore"):  # torch's own: it calls these tensors a beta
                self.register_buffer("adjacent", torch.eye(3).to_sparse_csr())

        def forward(self, x):
            return self.adjacent @ super().forward(x)

    model, plain = Neighbours(), nn.Linear(3, 3)
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name != "adjacent"})
    state, expected = (run(each, SGD, [torch.ones(3, 3)] * 2, donate) for each in (model, plain))
    assert bits(state.params) == bits(expected.params)
