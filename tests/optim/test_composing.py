"""Several optimizers, and layers that come and go, against loops written out."""

import pytest
import torch
from problem import adamw, assert_refused, batches, begin, loss_fn, net, raw_adamw, run, sgd, step_of
from shared import bits, both_states, both_steps, equal

import looplib as ll


def by_rank(name, tensor):
    return "matrices" if tensor.ndim == 2 else "rest"


# partition


@both_states
@both_steps
def test_two_optimizers_have_the_bits_of_two_raw_ones(donate, bound):
    def lr(step):
        return 0.1 / (1 + step)

    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    one, two = (
        torch.optim.SGD(matrices, lr=1.0, momentum=0.9, fused=True),
        torch.optim.AdamW(rest, lr=1e-2, fused=True),
    )
    for at, x in enumerate(batches(30)):
        one.param_groups[0]["lr"] = lr(at)
        two.param_groups[0]["weight_decay"] = 0.01 * at
        model.zero_grad()
        loss_fn(model, x).backward()
        one.step()
        two.step()
    optimizer = ll.optim.partition(
        {"matrices": sgd(lr), "rest": adamw(weight_decay=lambda step: 0.01 * step)},
        by_rank,
    )
    state = run(net(), optimizer, batches(30), donate, bound)
    assert equal(state.params, model.named_parameters())
    assert equal(state.buffers, model.named_buffers())
    inner = state.opt_state["partition"]
    for name, p in model.named_parameters():
        kept, raw = (inner["matrices"]["SGD"], one) if p.ndim == 2 else (inner["rest"]["AdamW"], two)
        assert equal(kept["state"][name], raw.state[p])


def split(**members):
    return ll.optim.partition(members, by_rank)


def labelled(**members):
    return ll.init_state(net(), split(**members))


REFUSED = [
    (ValueError, "0.weight 'matrices', rest, x", lambda: labelled(rest=adamw(), x=sgd())),
    (ValueError, "'x', 'y'", lambda: labelled(matrices=sgd(), x=sgd(), rest=adamw(), y=sgd())),
    (TypeError, "'rest' AdamW ll.optimizer", lambda: split(matrices=sgd(), rest=raw_adamw(net()))),
]  # fmt: skip


def test_refusals_name_what_was_found_and_what_to_give():
    for case in REFUSED:
        assert_refused(*case)


@both_steps
def test_a_gradient_without_an_optimizer_leaves_the_state_as_it_was(donate):
    model = net()
    optimizer = ll.optim.partition({"matrices": sgd()}, by_rank)
    for tensor in model.parameters():
        tensor.requires_grad_(tensor.ndim == 2)
    state = ll.init_state(model, optimizer)
    model.requires_grad_(True)
    before = bits(state)
    step = step_of(model, optimizer, donate)
    with pytest.raises(ValueError, match=r"0\.bias has the label 'rest', and there are optimizers for matrices"):
        step(state, batches(1)[0])
    assert bits(state) == before
    good = ll.make_grad_fn(model, loss_fn, trainable=lambda name, tensor: tensor.ndim == 2)
    after, _ = ll.make_train_step(good, optimizer, donate=donate)(state, batches(1)[0])
    assert after.step == 1


@both_steps
def test_a_second_update_on_the_same_batch_that_is_skipped_moves_the_record_alone(donate):
    model = net()
    optimizer = ll.chain(ll.skip_nonfinite(3), sgd())
    first = step_of(model, optimizer, donate)
    second = ll.make_train_step(
        ll.make_grad_fn(model, lambda model, x: loss_fn(model, x * torch.inf)),
        optimizer,
        donate=donate,
        same_batch=True,
    )
    state, _ = first(ll.init_state(model, optimizer, epoch_length=3), batches(1)[0])
    before = ll.copy_state(state)
    state, _ = second(state, batches(1)[0])
    assert (state.step, state.batch, state.epoch, state.samples, state.batch_samples) == (1, 1, 0, 8, 8)
    assert (state.batch_steps, before.batch_steps) == (1, 1)
    assert bits((state.params, state.buffers)) == bits((before.params, before.buffers))
    assert state.opt_state["skip_nonfinite"]["total_notfinite"] == 1


# layers that are frozen for some of the steps


@both_states
@both_steps
@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
        # torch's fused SGD fails on momentum that some parameters have and others have not yet
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ],
)
def test_frozen_layers_keep_their_bits_and_thaw_as_with_a_gradient_of_none(cls, arguments, donate, bound):
    def frozen(name, step):
        return name[0] in "01" and (step < 7 or 12 <= step < 15)

    model = net()
    pure, raw = ll.optimizer(cls, **arguments), cls(model.parameters(), **arguments)
    own = net()
    head_step = step_of(own, pure, donate, trainable=lambda name, tensor: name[0] not in "01")
    whole_step = step_of(own, pure, donate)
    state = begin(own, pure, bound)
    for at, x in enumerate(batches(25)):
        raw.zero_grad()
        loss_fn(model, x).backward()
        for name, p in model.named_parameters():
            if frozen(name, at):
                p.grad = None
        raw.step()
        before = ll.copy_state(state)
        state, _ = (head_step if frozen("0.weight", at) else whole_step)(state, x)
        for name, p in model.named_parameters():
            moments = [s.opt_state[cls.__name__]["state"][name] for s in (before, state)]
            assert torch.equal(state.params[name], p)
            if frozen(name, at):
                assert torch.equal(state.params[name], before.params[name])
                assert bits(moments[0]) == bits(moments[1])
    assert equal(state.buffers, model.named_buffers())
    for name, p in model.named_parameters():
        assert equal(state.opt_state[cls.__name__]["state"][name], raw.state[p])
