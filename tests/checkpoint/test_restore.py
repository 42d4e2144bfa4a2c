"""Restores into states whose leaves share memory, and into epochs of a different length."""

import re

import pytest
import torch
from shared import equal
from torch import nn

import looplib as ll

adamw = ll.optimizer(torch.optim.AdamW, lr=0.1)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def with_start(seed=0):
    """The state of a script that remembers the weights it began with."""
    model = net(seed)
    state = ll.init_state(model, adamw)
    return model, state.replace(extra={"start": state.params})


def trained(model, state, steps=3):
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), adamw)
    for _ in range(steps):
        state, _ = step(state, torch.eye(3))
    return state


def values(tree):
    return {name: tensor.detach().clone() for name, tensor in tree.items()}


# Leaves that share a tensor


@pytest.mark.parametrize("bound", [True, False])
def test_leaves_that_share_a_tensor_and_were_saved_apart_both_come_back(tmp_path, bound):
    state = trained(*with_start())
    weights, start = values(state.params), values(state.extra["start"])
    assert not equal(weights, start)
    ll.checkpoint_io(tmp_path).save(state)
    model, state = with_start(seed=1)
    restored = ll.checkpoint_io(tmp_path).restore(state if bound else ll.copy_state(state))
    assert equal(values(restored.params), weights)
    assert equal(values(restored.extra["start"]), start)
    if bound:
        assert all(tensor is restored.params[name] for name, tensor in model.named_parameters())
    trained(model, restored)  # which writes nothing that it was given
    assert equal(values(restored.extra["start"]), start)


def test_leaves_that_shared_a_tensor_when_they_were_saved_share_it_again(tmp_path):
    model, state = with_start()
    ll.checkpoint_io(tmp_path).save(state)
    model, state = with_start(seed=1)
    restored = ll.checkpoint_io(tmp_path).restore(state)
    assert equal(values(restored.params), values(dict(net().named_parameters())))
    for name, tensor in model.named_parameters():
        assert restored.params[name] is restored.extra["start"][name] is tensor


@pytest.mark.parametrize("chosen", [{"weights_only": True}, {"names": lambda name: name.startswith("0.")}])
def test_what_is_not_restored_keeps_its_values(tmp_path, chosen):
    ll.checkpoint_io(tmp_path).save(ll.init_state(net(5)))
    _, state = with_start(seed=1)
    start = values(state.extra["start"])
    restored = ll.checkpoint_io(tmp_path).restore(state, **chosen)
    assert equal(values(restored.extra["start"]), start)
    assert torch.equal(restored.params["0.weight"], net(5)[0].weight)


class Halves(nn.Module):
    """Two parameters that are views of one memory: interleaved; with `overlap`, sharing a column; or all of it."""

    def __init__(self, overlap):
        super().__init__()
        memory = torch.zeros(4, 6)
        self.left = nn.Parameter(memory[:, : 3 + overlap])
        self.right = nn.Parameter(memory[:, 3 - (overlap == 3) * 3 :])


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_parameters_that_are_views_of_one_memory(tmp_path, overlap):
    """Interleaved ones are two tensors, the same one twice takes one value, and what overlaps otherwise is refused."""
    model = Halves(overlap)
    state, numbers = ll.init_state(model), torch.arange(24.0).view(4, 6)
    saved = {"left": model.left.detach() + numbers[:, : 3 + overlap], "right": model.right.detach() + 1}
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(ll.TrainState(params=saved))
    if not overlap:
        ckpt.restore(state)
        assert equal(values(dict(model.named_parameters())), saved)
        return
    with pytest.raises(ValueError, match="/params/left and /params/right") as error:
        ckpt.restore(state)
    assert not model.left.any()  # nothing was written
    assert equal(values(ckpt.restore(ll.copy_state(state)).params), saved)
    if overlap == 3:
        assert "ll.copy_state" in str(error.value)
        ckpt.save(ll.TrainState(params=dict.fromkeys(saved, numbers)))
        ckpt.restore(state)
        assert torch.equal(model.left, numbers)
        assert torch.equal(model.right, numbers)


# Epochs of a different length


@pytest.mark.filterwarnings("ignore:.*other settings")
@pytest.mark.parametrize("describe", [False, True])
def test_within_an_epoch_the_message_names_two_ways_that_keep_everything(tmp_path, describe):
    def run(batch_size, state, until, seen):
        loader = ll.make_loader(torch.arange(24.0), batch_size=batch_size, seed=5)
        step = ll.make_train_step(ll.make_grad_fn(net(), lambda m, x: m(x[:, None] * torch.ones(3)).sum()), adamw)
        while state.samples < until:
            for batch in loader(state):
                seen += batch.tolist()
                state, _ = step(state, batch)
                if state.samples >= until:
                    break
        return state

    seen = []
    loaders = {size: ll.make_loader(torch.arange(24.0), batch_size=size, seed=5) for size in (4, 8)}
    ckpts = [ll.checkpoint_io(tmp_path, describe={"loader": loaders[n]} if describe else None) for n in (4, 8)]
    saved = run(4, ll.init_state(net(), adamw, epoch_length=6), 40, seen)
    assert (saved.epoch, saved.batch) == (1, 4)
    ckpts[0].save(saved)
    names = {"ckpt": ckpts[1], "state": ll.init_state(net(1), adamw, epoch_length=3), "loader": loaders[8]}
    with pytest.raises(ValueError, match="stands within an epoch, after batch 4") as error:
        ckpts[1].restore(names["state"])
    resumed, skipped = re.findall(r"state = (\w.*?\))(?:\.|$)(?: To|$)", str(error.value))
    skipped = eval(skipped, names)
    assert (skipped.step, skipped.epoch, skipped.batch, skipped.epoch_length) == (10, 2, 0, 3)
    names["state"] = ll.init_state(net(1), adamw, epoch_length=3)
    resumed = eval(resumed, names)
    for state in (resumed, skipped):
        assert equal(values(state.params), values(saved.params))
        assert torch.equal(*[each.opt_state["state"]["0.weight"]["exp_avg"] for each in (state, saved)])
    assert (resumed.step, resumed.epoch, resumed.batch, resumed.epoch_length) == (10, 1, 2, 3)
    # Each sample of the epoch is seen once, in the order of a run that was not stopped.
    after = run(8, resumed, 48, seen)
    assert (after.epoch, after.batch, after.samples, after.step) == (2, 0, 48, 11)
    (order,) = ll.make_loader(torch.arange(24.0), batch_size=24, seed=5)(ll.TrainState(epoch=1, epoch_length=1))
    assert seen[24:] == order.tolist()
