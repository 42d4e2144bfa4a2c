"""The contract of states and steps, on the far device and on the CPU."""

import pytest
import torch

import looplib as ll
from far import cases
from far.test_cases import bits

CONDITIONAL = ll.optim.skip_spikes(ll.optim.apply_if_finite(ll.ema(cases.ADAMW), 3), window=4)


def run(device, donate, batches, optimizer=CONDITIONAL):
    model, state = cases.started(device, optimizer)
    step = ll.make_train_step(ll.make_grad_fn(model, cases.loss_fn), optimizer, donate=donate)
    for batch in batches:
        before, (state, _) = state, step(state, batch)
    return model, before, state


def test_a_donated_step_has_the_bits_of_a_pure_one_and_spends_its_state(device):
    model, spent, state = run(device, True, cases.batches(device))
    _, kept, pure = run(device, False, cases.batches(device))
    assert bits(state) == bits(pure)
    assert kept.step == 2
    assert state.params["0.weight"] is model[0].weight
    assert model[0].weight.device == device
    with pytest.raises(ll.DonatedStateError):
        _ = spent.params["0.weight"] + 1


@pytest.mark.parametrize("donate", [True, False])
def test_a_skipped_update_leaves_everything_but_its_record(device, donate):
    first, bad, _ = cases.with_infinity(device)
    _, _, once = run(device, donate, [first])
    _, _, skipped = run(device, donate, [first, bad])
    assert skipped.skipped
    assert (skipped.step, skipped.batch) == (1, 2)
    inner = [state.opt_state["inner_state"]["inner_state"] for state in (once, skipped)]
    assert bits((once.params, once.buffers, inner[0])) == bits((skipped.params, skipped.buffers, inner[1]))


def test_a_step_is_pure(device):
    model, state = cases.started(device, CONDITIONAL)
    step = ll.make_train_step(ll.make_grad_fn(model, cases.loss_fn), CONDITIONAL)
    ll.testing.assert_pure(step, ll.copy_state(state), cases.data(device))


def test_a_bound_state_is_restored_into_its_module(device, tmp_path):
    _, _, state = run(device, True, cases.batches(device))
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state)
    model, fresh = cases.started(device, CONDITIONAL)
    restored = ckpt.restore(fresh)
    assert restored.params["0.weight"] is model[0].weight
    assert torch.equal(model[0].weight, state.params["0.weight"])
