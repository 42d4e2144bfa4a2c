"""Frozen weights that are quantized, as for QLoRA: everything that reads or trains around them."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

import looplib as ll
from looplib import testing

CONFIGS = {
    "int8": Int8WeightOnlyConfig(),
    "float8": Float8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4),
}
SGD = ll.optimizer(torch.optim.SGD, lr=0.1)
BATCHES = [torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Adapted(nn.Module):
    """A frozen quantized layer with a trained one beside it."""

    def __init__(self, config, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.adapter = nn.Linear(32, 32), nn.Linear(32, 32)
        quantize_(self.base, config)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


def loss_fn(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("donate", [False, True])
def test_training_beside_quantized_weights_is_the_raw_loop(name, donate):
    model = Adapted(CONFIGS[name])
    raw = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in raw.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    recipe = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), recipe, donate=donate)
    state = ll.init_state(model, recipe)
    for batch in BATCHES:
        optimizer.zero_grad()
        loss_fn(raw, batch).backward()
        optimizer.step()
        state, _ = step(state, batch)
    torch.testing.assert_close(state.params["adapter.weight"].detach(), raw.adapter.weight.detach(), rtol=0, atol=0)
    with torch.no_grad():
        expected = torch.stack([loss_fn(raw, batch) for batch in BATCHES]).mean().item()
        outputs = torch.cat([raw(batch) for batch in BATCHES])
    assert ll.evaluate(ll.make_eval_step(model, loss_fn), state, BATCHES)["loss"] == pytest.approx(expected, rel=1e-6)
    predicted = [*ll.predict(ll.make_predict_step(model, lambda model, x: model(x)), state, BATCHES)]
    torch.testing.assert_close(torch.cat(predicted), outputs, rtol=0, atol=0)
    ll.copy_state(state)


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_of_a_quantized_model_are_saved_and_its_weights_compared(tmp_path, name):
    def adapters(name, tensor):
        return name.startswith("adapter.")

    model = Adapted(CONFIGS[name])
    ckpt = ll.checkpoint_io(tmp_path, select=adapters)
    state = ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.1)).replace(step=3)
    expected = state.params["adapter.weight"].detach().clone()
    ckpt.save(state)
    again = Adapted(CONFIGS[name])  # the same base model
    again.adapter.reset_parameters()
    restored = ckpt.restore(ll.init_state(again, ll.optimizer(torch.optim.SGD, lr=0.1)), quiet=True)
    torch.testing.assert_close(restored.params["adapter.weight"].detach(), expected, rtol=0, atol=0)
    with pytest.raises(
        ValueError, match=r"of the state's are others: /params/base\.bias, /params/base\.weight|base\.weight"
    ):
        ckpt.restore(ll.init_state(Adapted(CONFIGS[name], seed=1), ll.optimizer(torch.optim.SGD, lr=0.1)))


def test_the_memory_of_quantized_weights_is_that_of_what_they_hold():
    weight = Adapted(CONFIGS["int8"]).base.weight
    parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    assert ll.debug.nbytes([weight, weight]) == sum(part.nbytes for part in parts) < 32 * 32 * 2


def test_trained_quantized_weights_are_not_handed_out_by_a_prediction():
    """A later donated step writes over them, so a prediction that returns a weight returns a copy."""
    model = nn.Linear(32, 32)
    quantize_(model, Int8WeightOnlyConfig())
    state = ll.init_state(model)
    weight = ll.make_predict_step(model, lambda model, x: model.weight)(state, BATCHES[0])
    assert weight is not state.params["weight"]
    torch.testing.assert_close(weight.dequantize(), state.params["weight"].dequantize(), rtol=0, atol=0)


def test_a_checkpoint_of_quantized_weights_is_refused_with_what_can_be_saved(tmp_path):
    state = ll.init_state(Adapted(CONFIGS["int8"]))
    with pytest.raises(
        TypeError, match=r"/params/base\.weight is a Int8Tensor.*select=lambda name, tensor: tensor\.requires_grad"
    ):
        ll.checkpoint_io(tmp_path).save(state)
    ll.checkpoint_io(tmp_path, select=lambda name, tensor: tensor.requires_grad).save(state)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CONFIGS)
def test_fingerprints_and_differences_are_those_of_the_tensors_in_a_quantized_weight(name):
    state, other = (ll.init_state(Adapted(CONFIGS[name], seed)) for seed in (0, 1))
    weight, other_weight = state.params["base.weight"], other.params["base.weight"]
    prints, parts = ll.debug.fingerprint(state), weight.__tensor_flatten__()[0]
    assert prints == ll.debug.fingerprint(ll.copy_state(state))
    assert [path for path in prints if "base.weight/" in path] == [f"/params/base.weight/{part}" for part in parts]
    for part in parts:
        assert prints[f"/params/base.weight/{part}"] == ll.debug.fingerprint(getattr(weight, part))["/"]
    assert ll.debug.differences(state, ll.copy_state(state)) == []
    leaves = {leaf.path: leaf for leaf in ll.debug.differences(weight, other_weight)}
    for part in parts:
        a, b = (getattr(tensor, part).double() for tensor in (weight, other_weight))
        leaf = leaves.pop(f"/{part}", None)
        assert (0, 0) if leaf is None else (leaf.differing, leaf.largest) == ((a != b).sum(), (a - b).abs().max())
    assert not leaves


def test_a_quantized_weight_differs_from_a_plain_one_by_its_kind():
    weight = Adapted(CONFIGS["int8"]).base.weight
    first, *_ = ll.debug.differences({"w": weight}, {"w": weight.dequantize()})
    assert str(first) == "/w: 'Int8Tensor of float32' against float32 (32, 32)"


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_on_quantized_weights_that_runs_twice_is_the_step(donate):
    (model, state), (raw, start) = (
        (model, ll.init_state(model, SGD)) for model in map(Adapted, [CONFIGS["int8"]] * 2)
    )
    step = ll.debug.run_twice(ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD, donate=donate))
    expected, _ = ll.make_train_step(ll.make_grad_fn(raw, loss_fn), SGD)(start, BATCHES[0])
    state, _ = step(state, BATCHES[0])
    torch.testing.assert_close(state.params["adapter.weight"], expected.params["adapter.weight"], rtol=0, atol=0)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_on_quantized_weights_are_checked_for_purity(name):
    model = Adapted(CONFIGS[name])
    grad_fn, state = ll.make_grad_fn(model, loss_fn), ll.init_state(model, SGD)
    train_step = ll.make_train_step(grad_fn, SGD)
    for step in (
        train_step,
        ll.make_eval_step(model, loss_fn),
        ll.make_predict_step(model, lambda model, x: model(x)),
    ):
        testing.assert_pure(step, state, BATCHES[0])
    testing.assert_donated_equals_pure(grad_fn, SGD, state, BATCHES)

    def writing(state, batch):
        state.params["base.weight"].qdata.zero_()
        return train_step(state, batch)

    with pytest.raises(AssertionError, match=r"wrote to the state that it was given:\n.*base\.weight/qdata"):
        testing.assert_pure(writing, ll.copy_state(state), BATCHES[0])


def test_kept_states_share_quantized_weights_that_stay():
    model = Adapted(CONFIGS["int8"])
    step, state = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD), ll.init_state(model, SGD)
    kept = ll.debug.record_steps(ll.debug.record_steps({}, state), step(state, BATCHES[0])[0])
    first, second = (kept[number].params for number in (0, 1))
    assert first["base.weight"] is second["base.weight"]
    assert first["adapter.weight"] is not second["adapter.weight"]


def test_graphs_and_stacks_of_quantized_weights_are_refused_by_name():
    model = Adapted(CONFIGS["int8"])
    state = ll.init_state(model, SGD)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD)
    predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    for step in (
        ll.compile_step(train_step, backend="eager"),
        ll.compile_step(predict_step, backend="eager"),
        ll.transforms.differentiable(train_step),
    ):
        with pytest.raises(
            ll.transforms.UntraceableError, match=r"base\.weight in the state: an Int8Tensor consists of"
        ):
            step(state, BATCHES[0])
    with pytest.raises(ValueError, match=r"params\['base\.weight'\] is an Int8Tensor, .* cannot be stacked"):
        ll.transforms.stack_states([state, ll.state.fold_in(state, 1)])
