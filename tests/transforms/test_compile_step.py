"""Compiling as a transform: of each kind of step, in either order with the others, and what it refuses."""

from functools import partial

import pytest
import torch
from problem import adamw
from shared import SGD, mean_output
from torch import nn
from torch.nn import functional as F
from transform_cases import batches, normalized, plain, seeded
from transform_cases import classify as loss_fn

import looplib as ll

QUICK = {"backend": "eager"}  # the graph as it was written down, run operation by operation


def train_step(model, optimizer=None, **options):
    return ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer or adamw(), **options)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_steps_that_do_not_train_are_compiled_too(backend):
    model = seeded(normalized)
    state = ll.init_state(model)
    state.buffers["1.running_mean"].fill_(0.5)
    before = ll.copy_state(state)

    def metric_fn(model, batch):
        x, y = batch
        logits = model(x)
        right = (logits.argmax(1) == y).sum()
        return {"loss": F.cross_entropy(logits, y), "accuracy": ll.Mean(right, len(y))}

    def predict_fn(model, batch):
        return {"classes": [model(batch[0]).softmax(1)], "x": batch[0]}

    eval_step, predict_step = ll.make_eval_step(model, metric_fn), ll.make_predict_step(model, predict_fn)
    compiled_eval = ll.compile_step(eval_step, backend=backend)
    compiled_predict = ll.compile_step(predict_step, backend=backend)
    sets = [*batches(3), *batches(1, size=2)]
    assert ll.evaluate(compiled_eval, state, sets) == pytest.approx(ll.evaluate(eval_step, state, sets), rel=1e-12)
    for batch in sets:
        found, expected = compiled_predict(state, batch), predict_step(state, batch)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert compiled_eval.compiler.compilations == compiled_predict.compiler.compilations == 2  # one for each shape
    close(state.params, before.params)
    close(state.buffers, before.buffers)
    assert all(not tensor.requires_grad for tensor in found["classes"])


def refused_calls():
    """name -> (call, what the message names)"""
    model = seeded(plain)
    step = train_step(model)
    compiled, stacked, smooth = ll.compile_step(step, **QUICK), ll.vmap_step(step), ll.transforms.differentiable(step)
    known = "compiled already"
    return {
        "compiled": (lambda: ll.compile_step(compiled), [known, "ll.make_train_step"]),
        "smooth": (lambda: ll.compile_step(smooth), ["compile the outer train step"]),
        "a stack of compiled": (lambda: ll.vmap_step(compiled), ["vmap_step", "ll.compile_step(ll.vmap_step(step))"]),
        "a stack of smooth": (lambda: ll.vmap_step(smooth), ["vmap_step", "differentiable"]),
        "a smooth stack": (lambda: ll.transforms.differentiable(stacked), ["differentiable", "a stack"]),
        "donated": (
            lambda: ll.compile_step(train_step(model, donate=True), mode="reduce-overhead"),
            ["CUDA graph", "donate=True"],
        ),
        "backend": (lambda: ll.compile_step(step, backend="inductr"), ["'inductr'", '"eager"']),
        "Inductor's": (lambda: ll.compile_step(step, backend="eager", mode="default"), ["Inductor's", "'eager'"]),
    }


def test_what_is_refused_when_a_step_is_made():
    for name, (call, words) in refused_calls().items():
        with pytest.raises(TypeError) as error:
            call()
        assert all(word in str(error.value) for word in words), name


@pytest.mark.parametrize("unknown", [{"mode": "fast"}, {"options": {"fallback_randon": True}}])
def test_torch_refuses_modes_and_options_that_it_does_not_know_when_a_step_is_made(unknown):
    step = train_step(seeded(plain))
    with pytest.raises(RuntimeError, match=r"Unrecognized mode=fast|Unexpected optimization option fallback_randon"):
        ll.compile_step(step, **unknown)


class Counting(nn.Linear):
    """A layer that counts its calls in a buffer."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("transform", ["compile_step", "vmap_step"])
@pytest.mark.parametrize("donate", [True, False])
def test_results_of_a_graph_stay_when_a_donated_step_overwrites_the_state(transform, donate):
    model = Counting()

    def metrics_of(model, x):
        calls, corner = model.calls, model.weight[0, 0]
        return {"calls": calls, "view": calls.view(1)[0], "mean": ll.Mean(calls, 1), "corner": corner}

    grad_fn = ll.make_grad_fn(model, lambda model, x: (model(x).mean(), metrics_of(model, x)))
    first, later = (ll.make_train_step(grad_fn, SGD, donate=chosen) for chosen in (donate, True))
    others = (
        ll.make_eval_step(model, metrics_of),
        ll.make_predict_step(model, lambda model, x: [model.calls.view(1), model.weight.t(), model.bias]),
    )
    state, x = ll.copy_state(ll.init_state(model, SGD)), torch.ones(2, 3)
    if transform == "vmap_step":
        state = ll.transforms.stack_states([state, state], same_seeds=True)
        made, values_of = ll.vmap_step, ll.transforms.compute_members
    else:
        made, values_of = partial(ll.compile_step, **QUICK), ll.compute
    first, later, eval_step, predict_step = map(made, (first, later, *others))
    state, metrics = first(state, x)
    results = metrics, eval_step(state, x), predict_step(state, x)
    before = [*map(values_of, results[:2])], [output.tolist() for output in results[2]]
    for _ in range(2):
        state, _ = later(state, x)
    assert ([*map(values_of, results[:2])], [output.tolist() for output in results[2]]) == before


def by_hand(init, update_):
    return ll.optim.part("by_hand", init=init, update_=update_, role="weights")


def test_a_tensor_of_the_users_that_becomes_part_of_the_state_is_copied():
    origin = torch.zeros(())
    optimizer = by_hand(lambda params: origin.clone(), lambda grads, state, params, step: (params, origin))
    model = Counting()
    step = ll.compile_step(ll.make_train_step(ll.make_grad_fn(model, mean_output), optimizer), **QUICK)
    state, _ = step(ll.init_state(model, optimizer), torch.ones(2, 3))
    assert state.opt_state["by_hand"].data_ptr() != origin.data_ptr()


def test_a_compiled_pure_step_gives_each_place_of_the_state_a_memory_of_its_own():
    def update_(grads, state, params, step):
        new = {name: (params[name] - 0.1 * grad).detach() for name, grad in grads.items()}
        return new, {"last": new}

    model = seeded(plain)
    optimizer = by_hand(
        lambda params: {"last": {name: param.detach().clone() for name, param in params.items()}}, update_
    )
    state, _ = ll.compile_step(train_step(model, optimizer), **QUICK)(ll.init_state(model, optimizer), batches(1)[0])
    kept = state.opt_state["by_hand"]["last"]
    close(kept, {name: param.detach() for name, param in state.params.items()})
    places = [*state.params.values(), *kept.values()]
    assert len({tensor.data_ptr() for tensor in places}) == len(places)
