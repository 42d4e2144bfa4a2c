"""Restores that fit or say why not: of damaged checkpoints, into bound states, shared tensors and other epochs."""

import contextlib
import functools
import operator
import os
import re
import time

import pytest
import torch
from files import DATA, MANIFEST, adamw, advanced, damage, names_in, net, same, unbound
from shared import bits, both_states, equal, mean_square, one_report
from torch import nn

import looplib as ll
from looplib.predicates import BestSoFar

DAMAGED = ll.checkpoint.DamagedCheckpointError


def values(tree):
    return {name: tensor.detach().clone() for name, tensor in tree.items()}


# Damage


DAMAGES = {
    "flipped": lambda path: damage(path.parent, path.name),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": os.unlink,
}


@pytest.mark.every_case
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_latest_is_named_and_the_one_before_it_taken(tmp_path, how):
    for name in (DATA, MANIFEST):
        ckpt = ll.checkpoint_io(tmp_path / name, keep_last=2)
        states = [advanced(unbound(), steps) for steps in range(3)]
        paths = [ckpt.save(state) for state in states]
        DAMAGES[how](paths[2] / name)
        if how in ("cut", "missing"):  # a listing sees it as well
            with pytest.warns(UserWarning, match=rf"step-00000002/{name}"):
                assert ll.checkpoint_io(tmp_path / name).latest().step == 1
        ckpt = ll.checkpoint_io(tmp_path / name, keep_last=2)
        with pytest.warns(UserWarning, match=rf"step-00000002/{name}"):
            restored = ckpt.restore(unbound(5))
        assert same(restored, states[1])
        assert [c.step for c in ckpt.steps()] == [1]
        # The run continues beside it, and it stays until somebody deletes it.
        ckpt.save(states[2])
        assert same(ckpt.restore(unbound(5)), states[2])
        assert [c.step for c in ckpt.steps()] == [1, 2]
        assert names_in(tmp_path / name) == ["step-00000001", "step-00000002", "step-00000002.1"]
        ckpt.delete(after=1)
        assert names_in(tmp_path / name) == ["step-00000001"]


def test_the_damaged_one_that_was_asked_for_is_an_error(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path, monitor=BestSoFar("x", mode="min"))
    for step in range(3):
        damage(ckpt.save(unbound().replace(step=step), {"x": step}))
    state = ll.init_state(net(3), adamw)
    kept = ll.copy_state(state)
    for which, words in ((1, "step-00000001/tensors"), ("best", "step-00000000/tensors")):
        with pytest.raises(DAMAGED, match=words):
            ckpt.restore(state, which)
    with (
        pytest.warns(UserWarning, match="going back"),
        pytest.raises(DAMAGED, match=r"'latest'.*none.*step-0.*-00000002"),
    ):
        ckpt.restore(state)
    with pytest.raises(DAMAGED, match=r"1:.*damaged"):
        ckpt.restore(state, 1)
    assert same(state, kept)


# Into states


def test_nothing_there_is_a_start(tmp_path, capsys):
    ckpt = ll.checkpoint_io(tmp_path / "none", monitor=BestSoFar("x", mode="min"))
    state = unbound()
    assert ckpt.restore(state) is state
    assert ckpt.latest() is ckpt.best() is None
    assert ckpt.steps() == []
    assert not (tmp_path / "none").exists()
    assert capsys.readouterr().out == ""


def test_a_restore_says_what_it_restored_and_from_where(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ckpt = ll.checkpoint_io("runs/first")
    ckpt.save(unbound().replace(step=13, epoch=2))
    far = tmp_path.joinpath("other", *"far" * 99)
    far.mkdir(parents=True)
    for folder, options, words in (
        (tmp_path, {}, "Restored step 13 (epoch 2, batch 0) from runs/first/step-00000013\n"),
        (tmp_path, {"weights_only": True}, "Restored weights from runs/first/step-00000013\n"),
        (tmp_path, {"quiet": True}, ""),
        (tmp_path / "other", {}, "Restored step 13 (epoch 2, batch 0) from ../runs/first/step-00000013\n"),
        (far, {}, f"Restored step 13 (epoch 2, batch 0) from {tmp_path}/runs/first/step-00000013\n"),
    ):
        monkeypatch.chdir(folder)
        ckpt.restore(unbound(), 13, **options)
        assert capsys.readouterr().out == words


@pytest.mark.filterwarnings("ignore:.*other settings. seed was")
def test_bound_stays_bound_and_unbound_stays_free(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    extra = {"ema": torch.ones(2), "count": 3, "best": None}
    saved = advanced(unbound(1, seed=2**100, epoch_length=7), 3).replace(extra=extra)
    ckpt.save(saved)
    model = net(2)
    start = ll.init_state(model, adamw, epoch_length=7, extra={"ema": torch.zeros(2), "count": 0.0, "best": 1.5})
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for _ in range(2):  # once more after donated steps
        bound = ckpt.restore(start)
        assert same(bound, saved)
        assert {**bound.params, **bound.buffers}.keys() == own.keys()
        for name, tensor in {**bound.params, **bound.buffers}.items():
            assert tensor is own[name]
        with pytest.raises(ll.DonatedStateError, match=r"ckpt\.restore\(state\) has written over its tensors"):
            _ = start.params
        start = advanced(bound, 1, model, donate=True)
    given_state = unbound(2, epoch_length=7, extra=extra)
    kept = ll.copy_state(given_state)
    free = ckpt.restore(given_state)
    assert same(free, saved)
    assert same(given_state, kept)
    assert not any(isinstance(tensor, nn.Parameter) for tensor in free.params.values())
    assert all(tensor.requires_grad for tensor in free.params.values())
    # What was None may have become something.
    later = ckpt.restore(unbound(2, epoch_length=7, extra=dict.fromkeys(extra)))
    assert torch.equal(later.extra["ema"], torch.ones(2))
    assert later.extra["count"] == 3


def test_a_pure_state_with_frozen_parameters_of_the_module_is_not_written_over(tmp_path):
    model = net()
    model[0].requires_grad_(False)
    start = ll.init_state(model, adamw)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(start)
    state = advanced(start, 1, model)
    assert state.params["0.weight"] is model[0].weight
    kept = ll.copy_state(state)
    restored = ckpt.restore(state)
    assert same(restored, start)
    assert restored.params["0.weight"].requires_grad is False
    # Nor is it spent by a restore into the module, whose frozen parameters have these values already.
    ckpt.restore(start)
    assert same(state, kept)


def test_every_difference_is_told_at_once_and_the_state_stays_good(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    saved = {"gone": torch.ones(2), "wide": torch.ones(2, 3), "half": torch.ones(2).half()}
    ckpt.save(ll.TrainState(params=saved, extra={"best": 0.5, "note": "text", "tensor": torch.ones(1)}))
    params = {"wide": torch.zeros(3, 2), "half": torch.zeros(2), "new/e~r": torch.zeros(1)}
    extra = {"best": torch.zeros(1), "note": 3, "tensor": 1.0}
    state = ll.TrainState(params={name: nn.Parameter(tensor) for name, tensor in params.items()}, extra=extra)
    with pytest.raises(ValueError, match="does not fit the state") as error:
        ckpt.restore(state)
    found = "".join(str(error.value).splitlines()[1:-1])
    assert re.fullmatch(
        r"  /params/new/e~r is in the state.*  /params/gone is in the checkpoint.*  /params/wide .*\(2, 3\).*\(3, 2\).*"
        r"  /params/half .*float16.*float32.*  /extra/best .*float.*a float32 tensor of shape \(1,\).*"
        "  /extra/note .*str.*int.*  /extra/tensor .*float32 tensor.*float.*",
        found,
    )
    assert not isinstance(error.value, DAMAGED)
    assert not any(tensor.any() for tensor in state.params.values())


def test_what_is_added_to_extra_later_is_told_the_way(tmp_path):
    ckpt, state = ll.checkpoint_io(tmp_path), ll.TrainState(extra={"note": 1})
    ckpt.save(state)
    with pytest.raises(ValueError, match=r"/extra/more is in the state.*\n.*with_extra\(key=value"):
        ckpt.restore(state.replace(extra={"note": 0, "more": 2}))
    with pytest.raises(
        ValueError, match=r"/extra/note is in the checkpoint, and not.*\n.*init_state\(\.\.\., extra="
    ):
        ckpt.restore(ll.TrainState())


@pytest.mark.filterwarnings("ignore:.*other settings. seed was")
def test_weights_alone_keep_everything_else(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    state = advanced(unbound(9, seed=9), 2)
    ckpt.save(state.replace(opt_state=None))
    for bind in (False, True):
        template = ll.init_state(net(3), ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), seed=1, extra="mine")
        kept = ll.copy_state(template)
        found = ckpt.restore(template if bind else kept, weights_only=True)
        assert same(found, kept.replace(params=state.params, buffers=state.buffers))
    with pytest.raises(ValueError, match="AdamW, a part of the update, has a state here, and none in the checkpoint"):
        ckpt.restore(unbound())
    with pytest.raises(TypeError, match="weights_only restores none"):
        ckpt.restore(unbound(), weights_only=True, optional=("AdamW",))


# Other parts of the update


def steps(model, optimizer, state, begin, end, donate=False):
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), optimizer, donate=donate)
    for at in range(begin, end):
        state, _ = step(state, torch.randn(5, 3, generator=torch.Generator().manual_seed(at)))
    return state


def within(tree, path):
    return functools.reduce(operator.getitem, path, tree)


def for_all(optimizer):
    return ll.optim.partition({"all": optimizer}, lambda name, tensor: "all")


CLIP = ll.clip_by_global_norm(0.5)
OTHER_PARTS = [  # the update without the part and with it, and where its state is
    (ll.chain(CLIP, adamw), ll.chain(CLIP, adamw, ll.ema(0.9)), ("ema",)),
    (adamw, ll.chain(ll.skip_nonfinite(), adamw), ("skip_nonfinite",)),
    (adamw, ll.chain(adamw, ("slow/er", ll.ema(0.9))), ("slow/er",)),
    (ll.optim.own_steps(adamw), ll.optim.own_steps(ll.chain(adamw, ll.ema(0.9))), ("own_steps", "inner", "ema")),
    (for_all(adamw), for_all(ll.chain(adamw, ll.optim.swa(start=1))), ("partition", "all", "swa")),
]


@one_report
@pytest.mark.slow
@both_states
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "gone"])
@pytest.mark.parametrize(("plain", "longer", "path"), OTHER_PARTS, ids=["/".join(each[2]) for each in OTHER_PARTS])
def test_a_part_that_is_new_or_gone_is_refused_unless_optional(tmp_path, plain, longer, path, is_new, bound):
    """The others continue as in the unbroken run, bit by bit."""
    before, after = (plain, longer) if is_new else (longer, plain)
    outer, name = path[:-1], "/".join(path)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(steps(net(), before, ll.init_state(net(), before), 0, 2))
    start = ll.init_state(net(3), after) if bound else ll.copy_state(ll.init_state(net(3), after))
    kept = ll.copy_state(start)
    where = "here, and none in the checkpoint" if is_new else "in the checkpoint, and none here"
    for optional in ((), ("emma",)):
        with pytest.raises(ValueError, match="does not fit the state") as refused:
            ckpt.restore(start, optional=optional)
        assert f"\n  {name}, a part of the update, has a state {where}\n" in str(refused.value)
        assert f"ckpt.restore(state, optional=({name!r},))" in str(refused.value)
        assert ("emma is no part" in str(refused.value)) == bool(optional)
        assert ("A new average begins" in str(refused.value)) == (is_new and name != "skip_nonfinite")
    state = ckpt.restore(start, optional=(name,), quiet=True)
    if not bound:
        assert same(start, kept)
    assert within(state.opt_state, outer).keys() == within(kept.opt_state, outer).keys()
    if is_new:
        assert bits(within(state.opt_state, path)) == bits(within(kept.opt_state, path))
    state = steps(net(), after, state, 2, 4, donate=bound)
    unbroken = steps(net(), plain, ll.init_state(net(), plain), 0, 4)
    assert state.step == 4
    assert equal({**state.params, **state.buffers}, {**unbroken.params, **unbroken.buffers})
    adams = [within(each.opt_state, outer)["AdamW"] for each in (state, unbroken)]
    assert bits(adams[0]) == bits(adams[1])
    # Once a checkpoint has the part, the same line restores it.
    ckpt.save(state)
    assert same(ckpt.restore(ll.init_state(net(4), after), optional=(name,), quiet=True), state)


def test_a_new_average_starts_as_in_the_state_or_behind_the_next_update(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(steps(net(), adamw, ll.init_state(net(), adamw), 0, 2))
    for start in (0, 1):
        model, optimizer = net(3), ll.chain(adamw, ll.ema(0.9, start=start))
        first = ll.copy_state(ll.init_state(model, optimizer))
        states = [ckpt.restore(first, optional=("ema",), quiet=True)]
        for at in (2, 3):
            states.append(steps(model, optimizer, states[-1], at, at + 1))
        average = first.params["0.weight"].detach() if start == 0 else states[1].params["0.weight"].detach()
        for state in states[1 + start :]:
            average = average.lerp(state.params["0.weight"].detach(), 1 - 0.9)
        averaged = ll.eval_state(optimizer, states[2]).params["0.weight"]
        torch.testing.assert_close(averaged, average, rtol=0, atol=0)


def test_another_class_starts_from_nothing_where_that_is_meant(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    saved = steps(net(), adamw, ll.init_state(net(), adamw), 0, 2)
    ckpt.save(saved)
    momentum = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    start = ll.copy_state(ll.init_state(net(3), momentum))
    effect = "SGD will start as in the state, and what AdamW kept will be dropped"
    both = rf"(?s)SGD, a.*here, and none in.*AdamW, a.*in the checkpoint.*optional=\('SGD', 'AdamW'\)\); {effect}"
    for optional, words in (((), both), (("SGD",), r"optional=\('SGD', 'AdamW'\)")):
        with pytest.raises(ValueError, match=words):
            ckpt.restore(start, optional=optional)
    with pytest.warns(UserWarning, match=r"optimizer AdamW class was .*AdamW, is not given"):
        state = ckpt.restore(start, optional={"SGD", "AdamW"}, quiet=True)
    assert same(state, saved.replace(opt_state=start.opt_state))


def test_what_differs_within_a_part_is_no_part(tmp_path):
    """The error names its path, and `optional` does not permit it."""
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(ll.init_state(net(), ll.chain(adamw, ll.ema(0.9))))
    for optimizer, words in (
        (ll.chain(adamw, ll.ema(0.9, buffers=True)), "/opt_state/ema/average/buffers/1.running_mean is in the state"),
        (
            ll.chain(ll.optimizer(torch.optim.AdamW, lr=0.1, amsgrad=True), ll.ema(0.9)),
            "/opt_state/AdamW/state/0.weight/max_exp_avg_sq is in the state",
        ),
    ):
        with pytest.raises(ValueError, match=words) as refused:
            ckpt.restore(ll.init_state(net(), optimizer), optional=("ema", "AdamW"))
        assert "If the update" not in str(refused.value)
    with pytest.raises(TypeError, match=r"optional is 'ema'; give names"):
        ckpt.restore(ll.init_state(net(), adamw), optional="ema")


def test_an_interrupt_amid_a_bound_restore_waits(tmp_path, monkeypatch):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(unbound(1))
    model = net(2)
    state = ll.init_state(model, adamw)
    copy_, calls = torch.Tensor.copy_, []

    def interrupting(self, *args):
        if len(calls) == 3:
            os.kill(os.getpid(), 2)
        calls.append(1)
        return copy_(self, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", interrupting)
    before = state
    with contextlib.suppress(KeyboardInterrupt):
        state = ckpt.restore(state)
        time.sleep(300)  # the signal comes once the restored state has its name
        pytest.fail("the signal was lost")
    monkeypatch.undo()
    assert len(calls) > 10
    assert same(state, unbound(1))
    with pytest.raises(ll.DonatedStateError, match=r"ckpt.restore\(state\) has written"):
        _ = before.params
    assert torch.equal(model[0].weight, net(1)[0].weight)


# Leaves that share a tensor


def with_start(seed=0):
    """The state of a script that remembers the weights it began with."""
    model = net(seed)
    state = ll.init_state(model, adamw)
    return model, state.replace(extra={"start": state.params})


def test_leaves_that_share_a_tensor_and_were_saved_apart_both_come_back(tmp_path):
    model, state = with_start()
    state = advanced(state, 3, model)
    weights, start = values(state.params), values(state.extra["start"])
    assert not equal(weights, start)
    ll.checkpoint_io(tmp_path).save(state)
    for bound in (True, False):
        model, state = with_start(seed=1)
        restored = ll.checkpoint_io(tmp_path).restore(state if bound else ll.copy_state(state))
        assert equal(values(restored.params), weights)
        assert equal(values(restored.extra["start"]), start)
        if bound:
            assert all(tensor is restored.params[name] for name, tensor in model.named_parameters())
        advanced(restored, 1, model)  # which writes nothing that it was given
        assert equal(values(restored.extra["start"]), start)


def test_leaves_that_shared_a_tensor_when_they_were_saved_share_it_again(tmp_path):
    ll.checkpoint_io(tmp_path).save(with_start()[1])
    model, state = with_start(seed=1)
    restored = ll.checkpoint_io(tmp_path).restore(state)
    assert equal(values(restored.params), values(dict(net().named_parameters())))
    for name, tensor in model.named_parameters():
        assert restored.params[name] is restored.extra["start"][name] is tensor


def test_what_is_not_restored_keeps_its_values(tmp_path):
    ll.checkpoint_io(tmp_path).save(ll.init_state(net(5)))
    _, state = with_start(seed=1)
    start = values(state.extra["start"])
    restored = ll.checkpoint_io(tmp_path).restore(state, weights_only=True)
    assert equal(values(restored.extra["start"]), start)
    assert torch.equal(restored.params["0.weight"], net(5)[0].weight)


@pytest.mark.parametrize("part", [ll.ema(0.9), ("slow", ll.optim.swa(start=0))])
def test_weights_alone_leave_an_average_of_other_weights_behind_and_say_so(tmp_path, part):
    optimizer = ll.chain(ll.optimizer(torch.optim.SGD, lr=0.1), part)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(ll.init_state(net(5), optimizer))
    name = part[0] if isinstance(part, tuple) else "ema"
    with pytest.warns(UserWarning, match=f"the average of {name} as it is.*ll.state.fresh"):
        left = ckpt.restore(ll.init_state(net(1), optimizer), weights_only=True)
    assert torch.equal(ll.optim.average(optimizer, left)["0.weight"], net(1)[0].weight)
    # What the warning says to write
    weights = ckpt.restore(ll.init_state(net(1)), weights_only=True)
    for state in (ll.state.fresh(weights, optimizer, seed=0), ckpt.restore(ll.init_state(net(1), optimizer))):
        assert torch.equal(ll.optim.average(optimizer, state)["0.weight"], net(5)[0].weight)
    later = ll.chain(ll.optimizer(torch.optim.SGD, lr=0.1), ll.ema(0.9, start=1))
    ckpt.restore(
        ll.init_state(net(1), later), weights_only=True
    )  # begins after the next update, so without a warning
    members = ll.checkpoint_io(tmp_path / "members")
    stack = ll.transforms.stack_states([ll.init_state(net(seed), optimizer, seed=seed) for seed in (1, 2)])
    members.save(stack)
    with pytest.warns(UserWarning, match=f"the average of {name} as it is"):
        members.restore(stack, weights_only=True)
    with pytest.raises(ValueError, match=r"For the weights alone: ckpt\.restore.*weights_only=True"):
        ckpt.restore(ll.init_state(net(1)))


class Views(nn.Module):
    """Two parameters that are views of one memory, apart, overlapping or all of it; or an expanded one."""

    def __init__(self, kind):
        super().__init__()
        memory = torch.zeros(6, 4)
        left, right = {"apart": (3, 3), "overlap": (4, 3), "tied": (6, 0), "expanded": (3, 3)}[kind]
        self.left, self.right = nn.Parameter(memory[:left]), nn.Parameter(memory[right:])
        if kind == "expanded":
            self.left = nn.Parameter(torch.zeros(1, 4).expand(3, 4))


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["apart", "overlap", "tied", "expanded"])
def test_parameters_that_are_views_of_one_memory(tmp_path, kind):
    """Ones apart are two tensors, the same one twice takes one value, and all else is refused by name."""
    model = Views(kind)
    state, numbers = ll.init_state(model), torch.arange(24.0).view(6, 4)
    saved = {name: tensor + numbers[: tensor.shape[0]] for name, tensor in values(state.params).items()}
    saved["right"] = saved["right"] + 1
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(ll.TrainState(params=saved))
    if kind == "apart":
        ckpt.restore(state)
        assert equal(values(dict(model.named_parameters())), saved)
        return
    names = r"/params/left" if kind == "expanded" else "/params/left and /params/right|/params/right.*/params/left"
    with pytest.raises(ValueError, match=names) as error:
        ckpt.restore(state)
    assert not model.left.any()  # nothing was written
    assert ("ll.copy_state" in str(error.value)) == (kind != "overlap")
    if kind != "expanded":
        assert equal(values(ckpt.restore(ll.copy_state(state)).params), saved)
    if kind == "tied":
        ckpt.save(ll.TrainState(params=dict.fromkeys(saved, numbers)))
        ckpt.restore(state)
        assert torch.equal(model.left, numbers)
        assert torch.equal(model.right, numbers)


# Epochs of a different length


def test_within_an_epoch_the_message_names_two_ways_that_keep_everything(tmp_path):
    before, loader = (ll.make_loader(torch.arange(24.0), batch_size=size, seed=5) for size in (4, 8))
    counts = {"step": 10, "epoch": 1, "batch": 4, "samples": 40, "batch_samples": 4, "batch_steps": 1}
    ckpt, saved = ll.checkpoint_io(tmp_path), unbound(epoch_length=6).replace(**counts)
    ckpt.save(saved.replace(run=ll.types.Run(loaders=(before.description,))))
    with pytest.raises(ValueError, match="after batch 4") as error:
        ckpt.restore(unbound(1, epoch_length=3))
    ways = re.findall(r"state = (\w.*?\))(?:\.|$)(?: To|$)", str(error.value))
    for way, place in zip(ways, ((10, 1, 2, 3), (10, 2, 0, 3)), strict=True):
        state = eval(way, {"ckpt": ckpt, "loader": loader, "state": unbound(1, epoch_length=3)})
        assert equal(values(state.params), values(saved.params))
        assert (state.step, state.epoch, state.batch, state.epoch_length) == place


def test_nothing_is_restored_into_a_tensor_on_the_meta_device(tmp_path):
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1)
    model, empty = nn.Linear(2, 1), nn.Linear(2, 1, device="meta")
    state = ll.init_state(model, optimizer)
    raw = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    raw.step()
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state)

    def on_meta(leaf):
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    template = torch.utils._pytree.tree_map(on_meta, state)
    for call in (
        lambda: ckpt.restore(template),
        lambda: ckpt.restore(ll.init_state(empty).replace(opt_state=state.opt_state)),
        lambda: ckpt.restore(ll.init_state(empty), weights_only=True),
        lambda: ll.checkpoint.load_state_dict(empty, ll.init_state(empty), model.state_dict()),
        lambda: ll.checkpoint.load_optimizer_state_dict(model, template.replace(step=1), raw),
        lambda: ll.bind(empty, state),
    ):
        with pytest.raises(ValueError, match=r"on the meta device, without values.*to_empty"):
            call()
    # Only what is restored needs memory, and a module has it after to_empty.
    mixed = state.replace(opt_state=template.opt_state)
    assert not ckpt.restore(mixed, weights_only=True, quiet=True).params["bias"].is_meta
    restored = ckpt.restore(ll.init_state(empty.to_empty(device="cpu"), optimizer), quiet=True)
    torch.testing.assert_close(restored.params["weight"].detach(), model.weight.detach(), rtol=0, atol=0)
