"""Checks of what the code of a row leaves: counts, steps at which something happens, gradients, updates, rates."""

import copy
import math

import pytest
import torch
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore

import looplib as ll


def equal(one, other):
    """True if two states, dicts of tensors or other trees have the same bits."""
    return not ll.debug.differences(one, other)


def close(one, other, rtol=1e-5, atol=1e-6):
    """True if they differ at most by the rounding of float32."""
    return not ll.debug.differences(one, other, rtol=rtol, atol=atol)


def registers(checks):
    """A decorator with the name of a row, whose check the function then is."""

    def shows(name):
        def register(check):
            assert checks.setdefault(name, check) is check, name
            return check

        return register

    return shows


def runs():
    """The code runs."""


def in_one_process(one_process):
    """The code runs in a process group of one."""


def under_torchrun(torchrun):
    """The code runs as torchrun would start it."""


def as_rank_0_of_2(rank_0_of_2):
    """The code runs in the first of two processes."""


def with_the_hub(the_hub):
    """The code runs, with a stand-in for the Hugging Face Hub."""


def on_two_ranks(function):
    """Its results as the first and as the second of two processes, which send each other nothing."""
    results = []
    for rank in range(2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        results.append(function())
        torch.distributed.destroy_process_group()
    return results


def values(**expected):
    """These names have these values."""

    def check(after):
        assert {name: getattr(after, name) for name in expected} == expected

    return check


def at(step, epoch, batch):
    """The run has come to this place."""

    def check(state):
        assert (state.step, state.epoch, state.batch) == (step, epoch, batch)

    return check


def fired(predicate, last=30):
    """The steps, up to the last, after which a predicate is true, in epochs of five batches."""
    states = [
        ll.TrainState(step=step, epoch=step // 5, batch=step % 5, samples=8 * step, epoch_length=5)
        for step in range(1, last + 1)
    ]
    return [state.step for state in states if predicate(state)]


def fires(*steps, last=30, **names):
    """A predicate is true after these steps, or each of several after its own."""

    def check(after):
        expected = names or {"eval_now": list(steps)}
        assert {name: fired(getattr(after, name), last) for name in expected} == expected

    return check


def logged(*steps):
    def check(rows):
        assert [row["step"] for row in rows] == list(steps)

    return check


def saved(*steps):
    def check(ckpt):
        assert [checkpoint.step for checkpoint in ckpt.steps()] == list(steps)

    return check


def sizes(*expected, of_two=None):
    """The loader's batches in an epoch have so many samples, and those of each of two ranks so many."""

    def check(loader):
        def found():
            return [len(batch[0]) for batch in loader(ll.TrainState())]

        assert found() == list(expected)
        assert of_two is None or on_two_ranks(found) == of_two

    return check


def evaluated(prefix="", batches=None):
    """The scores are those of an evaluation of the first batches, or of all."""

    def check(scores, eval_step, state, test_batches):
        expected = ll.evaluate(eval_step, state, test_batches[:batches], prefix=prefix)
        assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-6)

    return check


def restored(ckpt, state):
    """The checkpoint holds all of the state."""
    template = ll.copy_state(state).replace(step=0, epoch=0, batch=0, samples=0)
    assert equal(ckpt.restore(template), state)


def rate(expected):
    """The optimizer's learning rate is this function of the step."""

    def check(optimizer, model):
        state = ll.init_state(model, optimizer)
        for step in range(12):
            found = ll.optim.hyperparameters(optimizer, state.replace(step=step))
            assert found == {"lr": pytest.approx(expected(step))}

    return check


def assert_gradient(gradient, model, loss, **tolerance):
    """The gradient and the metric are torch's own of this loss."""
    loss.backward()
    assert close(gradient.grads, {name: tensor.grad for name, tensor in model.named_parameters()}, **tolerance)
    assert ll.compute(gradient.metrics)["loss"] == pytest.approx(loss.item(), rel=1e-6)


def same_gradient(grad_fn, model, loss_fn, batch):
    assert_gradient(grad_fn(ll.init_state(model), batch), model, loss_fn(model, batch))


def same_gradient_of_gpt2(grad_fn, gpt2, lm_loss, tokens):
    assert_gradient(grad_fn(ll.init_state(gpt2), tokens), gpt2, lm_loss(gpt2, tokens).compute())


def raw_updates(model, loss_fn, batches, *optimizers, pieces=1):
    """The parameters after a raw loop over these batches, on a copy; each optimizer is made of the copy."""
    raw = copy.deepcopy(model)
    optimizers = [make(raw) for make in optimizers]
    for number, batch in enumerate(batches, 1):
        (loss_fn(raw, batch) / pieces).backward()
        if number % pieces == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return parameters(raw)


def parameters(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def looplib_updates(model, loss_fn, batches, optimizer):
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    state = ll.init_state(model, optimizer)
    for batch in batches:
        state, _ = train_step(state, batch)
    return state.params


def updates(cls, same=equal, **options):
    """The optimizer updates as this class of torch's kind does."""

    def check(optimizer, model, loss_fn, batch):
        ours = looplib_updates(model, loss_fn, [batch] * 3, optimizer)
        assert same(ours, raw_updates(model, loss_fn, [batch] * 3, lambda raw: cls(raw.parameters(), **options)))

    return check


def clips(max_norm):
    """SGD with the gradients that `clip_grad_norm_` clips to this norm; the norm before is reported."""

    def check(optimizer, model, loss_fn, batch):
        raw = copy.deepcopy(model)
        loss_fn(raw, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), max_norm).item()
        assert max_norm == math.inf or norm > max_norm
        torch.optim.SGD(raw.parameters(), lr=0.1).step()
        train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
        state, metrics = train_step(ll.init_state(model, optimizer), batch)
        assert close(state.params, parameters(raw))
        assert ll.compute(metrics)["grad_norm"] == pytest.approx(norm, rel=1e-6)

    return check


def scheduled(name, peak, warmup, total, **options):
    """The learning rates of transformers' own scheduler, from step 0 to `total`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = transformers.get_scheduler(name, optimizer, warmup, total, options)
    rates = []
    for _ in range(total + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates(name, peak=1e-3, warmup=10, total=100, steps=101, **options):
    """The schedule is that of transformers with this name."""

    def check(lr):
        theirs = scheduled(name, peak, warmup, total, **options)[:steps]
        assert theirs == pytest.approx([lr(step) for step in range(len(theirs))], rel=1e-9, abs=1e-12)

    return check
