"""Chains of parts: their order and their names, and beside raw loops, what each part sees and what it may write."""

import math
import re

import pytest
import torch
from problem import WAYS, adamw, assert_refused, sgd
from shared import bits, both_steps, equal, make_train_step, mean_square, one_report, trained
from torch import nn

import looplib as ll

LBFGS = ll.optimizer(torch.optim.LBFGS, lr=0.1)
CLIP, SCALE = ll.clip_by_global_norm(1.0), ll.optim.dynamic_loss_scale()


def net(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def batches(count, dtype=torch.float64, seed=1):
    """Every third batch is three times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(8, 6, generator=generator, dtype=torch.float64).to(dtype) * (3.0 if at % 3 == 1 else 1.0)
        for at in range(count)
    ]


def loss_fn(model, x):
    return (model(x) - x[:, :2]).square().mean()


def by_layer(name, tensor):
    return "first" if name[0] == "0" else "last"


def split(first, last):
    return ll.optim.partition({"first": first, "last": last}, by_layer)


def made_step(model, optimizer, way="pure", loss_fn=loss_fn):
    return make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, **WAYS[way])


def run(optimizer, data, way="pure"):
    model = net()
    return trained(made_step(model, optimizer, way), ll.copy_state(ll.init_state(model, optimizer)), data)


def assert_as_raw(params, raw, way):
    """The bits of a raw loop; in a graph, which rounds differently, its numbers within a tolerance."""
    if "compiled" in way:
        torch.testing.assert_close(dict(params), dict(raw.named_parameters()), rtol=1e-10, atol=1e-12)
    else:
        assert equal(params, raw.named_parameters())


def scaling(name="halve", factor=0.5):
    """A part that changes gradients, in place."""

    def transform(grads, state, params, step):
        for grad in grads.values():
            grad *= factor
        return ll.types.Transformed(grads)

    return ll.optim.part(name, transform=transform)


# Order


def grad_fn():
    return ll.make_grad_fn(net(), loss_fn)


REFUSED_ORDERS = {
    "clipping last": ("clip_by_global_norm AdamW", "ll.chain(clip_by_global_norm, AdamW)", lambda: (adamw(), CLIP)),
    "a judge last": (
        "skip_nonfinite AdamW",
        "ll.chain(skip_nonfinite, AdamW)",
        lambda: (adamw(), ll.skip_nonfinite()),
    ),
    "a scale last": ("", "ll.chain(dynamic_loss_scale, AdamW)", lambda: (adamw(), SCALE)),
    "a part of mine last": ("", "ll.chain(halve, AdamW)", lambda: (adamw(), scaling())),
    "clipping behind an average": ("", "ll.chain(clip_by_global_norm, ema)", lambda: (ll.ema(), CLIP)),
    "behind both": ("", "ll.chain(clip_by_global_norm, AdamW)", lambda: (adamw(), ll.ema(), CLIP)),
    "an average first": ("update not see", "ll.chain(AdamW, ema)", lambda: (ll.ema(), adamw())),
    "swa first": ("update not see", "ll.chain(AdamW, swa)", lambda: (CLIP, ll.optim.swa(start=3), adamw())),
    "two optimizers": ("SGD AdamW same weights", "ll.optim.partition", lambda: (sgd(), adamw())),
    "of one class": ("one AdamW same weights", "ll.optim.partition", lambda: (("one", adamw()), adamw())),
    "a split and another": ("", "partition and AdamW", lambda: (split(sgd(), sgd()), adamw())),
    "LBFGS clipped": ("LBFGS further gradients", "clip_by_global_norm would not", lambda: (CLIP, LBFGS)),
    "LBFGS scaled": ("LBFGS further gradients", "dynamic_loss_scale would not", lambda: (SCALE, LBFGS)),
    "LBFGS in a split": ("", "halve would not", lambda: (scaling(), split(LBFGS, sgd()))),
    "LBFGS in own_steps": ("", "halve would not", lambda: (scaling(), ll.optim.own_steps(LBFGS))),
    "two scales": ("once is enough", "dynamic_loss_scale and more", lambda: (SCALE, ("more", SCALE), adamw())),
    "nothing": ("no parts", "ll.optimizer(torch.optim.AdamW, lr=1e-3)", lambda: ()),
    "two of one name": ("two parts 'ema' state reports", 'll.chain(("first"', lambda: (adamw(), ll.ema(), ll.ema())),
    "two of one name of mine": ("", "'slow'", lambda: (adamw(), ("slow", ll.ema()), ("slow", ll.ema()))),
    "a name for two parts": ("'x' AdamW, ema", "name its parts", lambda: (("x", ll.chain(adamw(), ll.ema())),)),
}


@one_report
@pytest.mark.parametrize("name", REFUSED_ORDERS)
def test_a_refused_chain_says_what_to_write(name):
    words, instead, parts = REFUSED_ORDERS[name]
    with pytest.raises(ValueError, match=re.escape(instead)) as raised:
        ll.chain(*parts())
    assert all(word in str(raised.value) for word in words.split()), raised.value


def test_what_is_no_part_is_refused():
    for wrong, found in ((torch.optim.SGD, "class SGD"), ([adamw()], "list"), ((3, adamw()), "3"), (None, "None")):
        assert_refused(TypeError, found, lambda wrong=wrong: ll.chain(wrong))


@pytest.mark.parametrize("parts", [(ll.skip_nonfinite(), LBFGS), (LBFGS, ll.ema())], ids=["judge", "average"])
def test_what_leaves_gradients_alone_may_stand_beside_lbfgs(parts):
    assert ll.chain(*parts).init(dict(net().named_parameters())).keys() == {*parts[0].parts, *parts[1].parts}


@pytest.mark.parametrize(
    ("optimizer", "chain"),
    [
        (ll.ema(0.9), "ll.chain(ll.optimizer(torch.optim.AdamW, lr=1e-3), ll.ema(0.9))"),
        (CLIP, "ll.chain(ll.clip_by_global_norm(1.0), ll.optimizer(torch.optim.AdamW, lr=1e-3))"),
        (ll.chain(CLIP, scaling()), "clip_by_global_norm, halve, which changes no weights"),
    ],
    ids=["average", "clipping", "chain"],
)
def test_a_step_without_a_part_that_writes_weights_is_refused(optimizer, chain):
    model = net()
    state, grads = ll.init_state(model, optimizer), dict(model.named_parameters())
    for call in (
        lambda: ll.make_train_step(grad_fn(), optimizer),
        lambda: ll.apply_gradients(optimizer, state, grads),
    ):
        with pytest.raises(ValueError, match=re.escape(chain)):
            call()


# Old spellings

OPTIMIZER = "ll.optimizer(torch.optim.AdamW, lr=1e-3)"
OLD = {
    "ema": (lambda: ll.ema(adamw()), f"ll.chain({OPTIMIZER}, ll.ema(0.999))"),
    "dynamic_loss_scale": (
        lambda: ll.optim.dynamic_loss_scale(adamw()),
        f"ll.chain(ll.optim.dynamic_loss_scale(), {OPTIMIZER})",
    ),
    "skip_nonfinite": (lambda: ll.skip_nonfinite(adamw()), f"ll.chain(ll.skip_nonfinite(), {OPTIMIZER})"),
    "clip_by_global_norm": (
        lambda: ll.clip_by_global_norm(grad_fn(), 1.0),
        f"ll.chain(ll.clip_by_global_norm(1.0), {OPTIMIZER})",
    ),
    "clip_by_norm": (
        lambda: ll.optim.clip_by_norm(grad_fn(), 1.0),
        f"ll.chain(ll.optim.clip_by_norm(1.0), {OPTIMIZER})",
    ),
    "clip_by_value": (
        lambda: ll.optim.clip_by_value(grad_fn()),
        f"ll.chain(ll.optim.clip_by_value(0.5), {OPTIMIZER})",
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", OLD)
def test_a_part_that_is_given_what_it_used_to_wrap_says_which_line_to_write(name):
    call, written = OLD[name]
    with pytest.raises(
        TypeError, match=re.escape(f"{name} is a part of the update and wraps nothing: write {written}")
    ):
        call()
    optimizer = eval(written, {"ll": ll, "torch": torch})  # the line that the message gives works
    state, _ = made_step(model := net(), optimizer)(ll.init_state(model, optimizer), batches(1)[0])
    assert state.step == 1


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda: ll.optim.apply_if_finite, "ll.skip_nonfinite(), a part of ll.chain"),
        (lambda: ll.grads.scale_loss, "ll.optim.dynamic_loss_scale(), a part of ll.chain"),
        (lambda: ll.grads.clip_by_norm, "ll.optim.clip_by_norm"),
        (lambda: ll.grads.clip_by_value, "ll.optim.clip_by_value"),
        (lambda: ll.grads.global_norm, "ll.optim.global_norm"),
    ],
)
def test_an_old_name_says_the_new_one(call, instead):
    with pytest.raises(AttributeError, match=re.escape(f"it is {instead}")):
        call()


# Functions of a part


def of_mine(**given):
    return lambda: ll.optim.part("mine", **given)


ANY = "as (grads, state, params, step, **info)"
REFUSED_PARTS = [
    (TypeError, f"transform of mine 'metircs' {ANY} metrics", of_mine(transform=lambda grads, state, params, step, metircs: 0)),
    (TypeError, f"transform of mine 'carry' {ANY}", of_mine(transform=lambda grads, state, params, step, *, carry=None: 0)),
    (TypeError, f"update_ of mine 'aplied' {ANY} applied", of_mine(update_=lambda grads, state, params, step, aplied: 0)),
    (TypeError, f"update_ of mine 'lr' {ANY}", of_mine(update_=lambda grads, state, params, step, lr=0.1: 0)),
    (TypeError, f"update_ of mine (grads, state, params) {ANY}", of_mine(update_=lambda grads, state, params: 0)),
    (TypeError, "init of mine 'bufers' buffers", of_mine(init=lambda params, bufers: 0, update_=print)),
    (TypeError, "init of mine ()", of_mine(init=lambda: 0, update_=lambda *call, **info: 0)),
    (TypeError, "evaluation of mine (params, state)", of_mine(evaluation=lambda params, state: 0, update_=lambda *a, **k: 0)),
    (TypeError, "hyperparameters of mine (state)", of_mine(hyperparameters=lambda state: 0, update_=lambda *a, **k: 0)),
    (TypeError, "update_ of mine int function", of_mine(update_=3)),
    (TypeError, "3 string", lambda: ll.optim.part(3, update_=lambda *a, **k: 0)),
    (ValueError, "mine neither transform= nor update_=", of_mine(init=lambda params: {})),
    (ValueError, "mine 'average' 'judge', 'gradients', 'weights', 'after'", of_mine(update_=lambda *a, **k: 0, role="average")),
    (ValueError, "mine 'weights' no update_=", of_mine(transform=lambda *a, **k: 0, role="weights")),
]  # fmt: skip


def test_a_function_that_a_part_could_not_call_is_refused_at_once():
    for case in REFUSED_PARTS:
        assert_refused(*case)


@pytest.mark.parametrize("way", WAYS)
def test_functions_of_a_part_are_given_what_they_name(way):
    seen = {}

    def init(params, buffers):
        seen["init"] = sorted(params), buffers
        return {"count": torch.tensor(0)}

    def transform(grads, state, params, step, metrics, seed):
        seen["transform"] = sorted(metrics), type(seed)
        return ll.types.Transformed(grads, state, carry=torch.tensor(3))

    def update_(grads, state, params, step, *, carry, metrics, buffers, applied):
        seen["update_"] = sorted(metrics), buffers, applied
        return params, {"count": state["count"] + carry}

    model = net()
    optimizer = ll.chain(ll.optim.part("mine", init=init, transform=transform, update_=update_), sgd())
    state, _ = made_step(model, optimizer, way)(ll.init_state(model, optimizer), batches(1)[0])
    assert state.opt_state["mine"]["count"] == 3
    assert seen["init"] == (["0.bias", "0.weight", "2.bias", "2.weight"], {})
    assert seen["transform"][0] == ["loss"]
    assert seen["update_"] == (["loss"], {}, True)


# Names


def test_two_parts_of_one_kind_have_a_state_each_and_the_last_one_is_evaluated():
    optimizer = ll.chain(adamw(), ("slow", ll.ema(0.9)), ("fast", ll.ema(0.5)))
    state = run(optimizer, batches(5))
    assert state.opt_state.keys() == optimizer.description.keys() == {"AdamW", "slow", "fast"}
    for name, decay in (("slow", 0.9), ("fast", 0.5)):
        alone = run(ll.chain(adamw(), ll.ema(decay)), batches(5))
        assert bits(state.opt_state[name]) == bits(alone.opt_state["ema"])
    assert equal(ll.eval_state(optimizer, state).params, state.opt_state["fast"]["average"]["params"])


@pytest.mark.parametrize("way", WAYS)
def test_what_two_parts_report_under_one_name_has_theirs_as_well(way):
    optimizer = ll.chain(("outer", ll.clip_by_global_norm(0.5)), ("inner", ll.clip_by_global_norm(0.1)), sgd())
    model, raw, x = net(), net(), batches(1)[0]
    _, metrics = made_step(model, optimizer, way)(ll.init_state(model, optimizer), x)
    loss = loss_fn(raw, x)
    loss.backward()
    norms = [nn.utils.clip_grad_norm_(raw.parameters(), bound).item() for bound in (0.5, 0.1)]
    assert norms[0] > 0.5
    assert ll.compute(metrics) == pytest.approx(
        {"loss": loss.item(), "grad_norm/outer": norms[0], "grad_norm/inner": norms[1]}
    )


@pytest.mark.parametrize("way", WAYS)
def test_what_two_second_halves_report_under_one_name_has_theirs_as_well(way):
    def reporting(name, value):
        return ll.optim.part(name, update_=lambda grads, state, params, step: (params, state, {"value": value}))

    model, optimizer = net(), ll.chain(sgd(), reporting("one", 1.0), reporting("other", 2.0))
    _, metrics = made_step(model, optimizer, way)(ll.init_state(model, optimizer), batches(1)[0])
    values = ll.compute(metrics)
    assert {name: values[name] for name in values if name != "loss"} == {"value/one": 1.0, "value/other": 2.0}


def test_a_name_does_not_reach_the_part_itself():
    """One part may stand in two chains under two names."""
    average = ll.ema(0.9)
    one, other = ll.chain(sgd(), ("mean", average)), ll.chain(sgd(), average)
    assert ([*one.parts], [*other.parts], [*average.parts]) == (["SGD", "mean"], ["SGD", "ema"], ["ema"])


# Chains within chains and labels


@pytest.mark.parametrize("way", WAYS)
def test_a_chain_in_a_chain_is_taken_apart(way):
    flat = ll.chain(ll.skip_nonfinite(), CLIP, adamw(), ("slow", ll.ema(0.9)), ll.optim.swa(start=2))
    inner = ll.chain(ll.chain(CLIP, adamw()), ("slow", ll.ema(0.9)))
    deep = ll.chain(ll.skip_nonfinite(), inner, ll.optim.swa(start=2))
    data = [*batches(3), batches(1)[0] * math.nan, *batches(5)[3:]]
    one, other = run(flat, data, way), run(deep, data, way)
    assert [*one.opt_state] == [*other.opt_state] == ["skip_nonfinite", "AdamW", "slow", "swa"]
    assert bits((one.params, one.opt_state)) == bits((other.params, other.opt_state))
    assert one.step == other.step == 5
    assert flat.description == deep.description
    with pytest.raises(ValueError, match=r"ll\.chain\(skip_nonfinite, AdamW\)"):
        ll.chain(inner, ll.skip_nonfinite())


@pytest.mark.parametrize("way", WAYS)
def test_a_label_is_clipped_by_the_norm_of_its_own_gradients(way):
    optimizer = split(
        ll.chain(ll.clip_by_global_norm(1.0), ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)),
        ll.chain(ll.clip_by_global_norm(1.0), adamw(), ll.ema(0.8)),
    )
    model, raw = net(), net()
    one = torch.optim.SGD(raw[0].parameters(), lr=0.1, momentum=0.9, fused=True)
    two = torch.optim.AdamW(raw[2].parameters(), lr=1e-2, fused=True)
    average = {name: p.detach().clone() for name, p in raw.named_parameters() if name[0] == "2"}
    step, state = made_step(model, optimizer, way), ll.copy_state(ll.init_state(model, optimizer))
    clipped = []
    for x in batches(8):
        raw.zero_grad()
        loss_fn(raw, x).backward()
        norms = [nn.utils.clip_grad_norm_(raw[at].parameters(), 1.0) for at in (0, 2)]
        clipped.append([norm.item() > 1.0 for norm in norms])
        one.step()
        two.step()
        for name, p in raw.named_parameters():
            if name in average:
                average[name].lerp_(p.detach(), 1 - 0.8)
        state, metrics = step(state, x)
        values = ll.compute(metrics)
        found = [values.pop(f"grad_norm/{label}") for label in ("first", "last")]
        assert (found, [*values]) == (pytest.approx([norm.item() for norm in norms]), ["loss"])
    assert any(first != last for first, last in clipped)  # each by its own norm
    assert_as_raw(state.params, raw, way)
    assert state.opt_state["partition"].keys() == {"first", "last"}
    kept = state.opt_state["partition"]["last"]
    assert kept.keys() == {"AdamW", "ema"}
    if "compiled" not in way:
        assert equal(kept["ema"]["average"]["params"], average)
    torch.testing.assert_close(dict(kept["ema"]["average"]["params"]), average)
    evaluated = ll.eval_state(optimizer, state).params
    assert all(torch.equal(evaluated[f"0.{key}"], state.params[f"0.{key}"]) for key in ("weight", "bias"))
    assert all(torch.equal(evaluated[name], kept["ema"]["average"]["params"][name]) for name in average)


@both_steps
def test_a_label_that_skips_leaves_its_own_parts_alone_and_the_others_move(donate):
    chains = [ll.chain(ll.skip_nonfinite(), ll.clip_by_global_norm(0.2), sgd(), ll.ema(0.8)) for _ in range(2)]
    model, optimizer = net(), split(*chains)

    def loss_fn(model, batch):
        x, bad = batch
        return model[0](x).square().mean() * (math.nan if bad else 1) + model[2](x[:, :5]).square().mean()

    step = made_step(model, optimizer, "donated" if donate else "pure", loss_fn)
    state, raw = ll.copy_state(ll.init_state(model, optimizer)), net()
    one = {
        key: torch.optim.SGD(raw[at].parameters(), lr=0.1, momentum=0.9, fused=True)
        for key, at in (("first", 0), ("last", 2))
    }
    for number, x in enumerate(batches(5)):
        bad = number in (1, 2)
        raw.zero_grad()
        loss_fn(raw, (x, False)).backward()
        for key, at in (("first", 0), ("last", 2)):
            nn.utils.clip_grad_norm_(raw[at].parameters(), 0.2)
            if not (bad and key == "first"):
                one[key].step()
        state, _ = step(state, (x, bad))
        assert not state.skipped
    assert equal(state.params, raw.named_parameters())
    kept = state.opt_state["partition"]
    assert [kept[key]["ema"]["updates"].item() for key in ("first", "last")] == [3, 5]
    assert [kept[key]["skip_nonfinite"]["total_notfinite"].item() for key in ("first", "last")] == [2, 0]


# A user's own part, whose first half passes a value to its second


def guard(factor):
    """No update by gradients whose norm is far above the largest that was let through."""

    def init(params):
        return {"largest": torch.zeros((), dtype=torch.float64)}

    def transform(grads, state, params, step):
        norm = ll.optim.global_norm(grads.values())
        flag = (state["largest"] == 0) | (norm <= factor * state["largest"])
        return ll.types.Transformed(grads, state, apply=flag, carry=norm, metrics={"norm": norm})

    def update_(grads, state, params, step, carry):
        return params, {"largest": torch.maximum(state["largest"], carry)}

    return ll.optim.part("guard", init=init, transform=transform, update_=update_, role="judge")


FACTOR = 1.5


def guarded_loop(model, data):
    """The model, whether each update was made, and the largest norm."""
    optimizer, largest, made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True), None, []
    for x in data:
        optimizer.zero_grad()
        loss_fn(model, x).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        made.append(largest is None or norm.item() <= FACTOR * largest)
        if made[-1]:
            optimizer.step()
            largest = max(largest or 0.0, norm.item())
    return model, made, largest


@pytest.mark.parametrize("place", ["alone", "before clipping", "behind clipping"])
@pytest.mark.parametrize("way", [*WAYS, "restored"])
def test_a_part_that_carries_a_value_is_a_variable_of_a_raw_loop(way, place, tmp_path):
    data = batches(12)
    raw, made, largest = guarded_loop(net(), data)
    assert made[0]
    assert 2 <= made.count(False) <= 9
    clip = ll.clip_by_global_norm(1e6)  # which changes nothing
    parts = {
        "alone": [guard(FACTOR)],
        "before clipping": [guard(FACTOR), clip],
        "behind clipping": [clip, guard(FACTOR)],
    }
    model, optimizer = net(), ll.chain(*parts[place], sgd(), ll.ema())
    step, state = made_step(model, optimizer, "pure" if way == "restored" else way), ll.init_state(model, optimizer)
    for at, x in enumerate(data):
        if way == "restored" and at == 5:
            ll.checkpoint_io(tmp_path).save(state)
            fresh = net(seed=3)
            state = ll.checkpoint_io(tmp_path).restore(ll.init_state(fresh, optimizer), quiet=True)
            step = made_step(fresh, optimizer)
        before, (state, metrics) = (state if "donated" not in way else None), step(state, x)
        assert state.skipped is not made[at]
        assert "norm" in metrics
        if before is not None and not made[at]:
            assert bits(before.opt_state) == bits(state.opt_state)
    assert_as_raw(state.params, raw, way)
    assert state.opt_state["guard"]["largest"].item() == pytest.approx(largest, rel=1e-12)
    assert state.opt_state["ema"]["updates"] == state.step == sum(made)


@pytest.mark.slow
def test_each_member_of_a_stack_is_guarded_by_its_own_value():
    data = [batches(10, seed=seed) for seed in (1, 2, 3)]
    data[1] = [x * (3.0 if at % 4 == 2 else 0.7) for at, x in enumerate(data[1])]
    models = [net(seed) for seed in range(3)]
    raws = [guarded_loop(net(seed), own) for seed, own in enumerate(data)]
    assert len({tuple(made) for _, made, _ in raws}) == 3
    optimizer = ll.chain(guard(FACTOR), ll.clip_by_global_norm(1e6), sgd())
    stack = ll.transforms.stack_states([ll.init_state(one, optimizer, seed=at) for at, one in enumerate(models)])
    step = ll.vmap_step(made_step(models[0], optimizer), own_batches=True)
    for xs in zip(*data, strict=True):
        stack, _ = step(stack, torch.stack(xs))
    for member, (raw, _, largest) in zip(ll.transforms.unstack_states(stack), raws, strict=True):
        torch.testing.assert_close(dict(member.params), dict(raw.named_parameters()), rtol=1e-10, atol=1e-12)
        assert member.opt_state["guard"]["largest"].item() == pytest.approx(largest, rel=1e-10)


# What a judge sees


def test_a_judge_that_returns_other_gradients_is_refused():
    def transform(grads, state, params, step):
        return ll.types.Transformed({name: grad * 0 for name, grad in grads.items()})

    chain = ll.chain(ll.optim.part("zeroing", transform=transform, role="judge"), sgd())
    with pytest.raises(
        ValueError, match=r"zeroing, whose role is 'judge', returned other gradients.*role='gradients'"
    ):
        made_step(net(), chain, "pure")(ll.init_state(net(), chain), batches(1)[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("last", [True, False], ids=["behind clipping", "before it"])
def test_a_judge_sees_gradients_as_they_entered_the_chain_wherever_it_stands(last, way):
    def looking():
        def transform(grads, state, params, step):
            norm = ll.optim.global_norm(grads.values())
            return ll.types.Transformed(grads, metrics={"seen": norm})

        return ll.optim.part("looking", transform=transform, role="judge")

    clips = [ll.optim.clip_by_value(0.05), scaling()]
    judges = [ll.skip_nonfinite(), looking()]
    optimizer = ll.chain(*(clips + judges if last else judges + clips), sgd())

    def loss_of(model, batch):
        x, factor = batch
        return loss_fn(model, x) + (model[2].bias * factor).sum()

    model, raw = net(), net()
    theirs = torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9, fused=True)
    step, state = made_step(model, optimizer, way, loss_of), ll.init_state(model, optimizer)
    for at, x in enumerate(batches(6)):
        bad = at in (2, 4)  # an infinite gradient, which clipping by value would make a finite one
        raw.zero_grad()
        loss_fn(raw, x).backward()
        norm = ll.optim.global_norm([p.grad for p in raw.parameters()])
        nn.utils.clip_grad_value_(raw.parameters(), 0.05)
        for p in raw.parameters():
            p.grad *= 0.5
        if not bad:
            theirs.step()
        state, metrics = step(state, (x, torch.tensor(math.inf if bad else 0.0)))
        assert state.skipped is bad
        assert bad or ll.compute(metrics)["seen"] == pytest.approx(norm.item())
    assert_as_raw(state.params, raw, way)
    assert state.opt_state["skip_nonfinite"]["total_notfinite"] == 2


def test_what_changes_gradients_sees_those_of_the_part_before():
    """In the order of the chain: halved and then clipped is not clipped and then halved."""
    params, grads = {"w": torch.zeros(1)}, {"w": torch.tensor([3.0])}
    plain, clip = ll.optimizer(torch.optim.SGD, lr=1.0), ll.optim.clip_by_value(1.0)
    for parts, moved in (([scaling(), clip], 1.0), ([clip, scaling()], 0.5), ([scaling(), scaling("again")], 0.75)):
        optimizer = ll.chain(*parts, plain)
        new, _, _ = optimizer.update(grads, optimizer.init(params), params, 0)
        assert new["w"].item() == -moved


# Gradients by hand


def writing():
    """Optimizers whose parts write over gradients in steps."""
    parts = [scaling(), ll.optim.clip_by_value(0.3), ll.optim.clip_by_norm(0.2), ll.clip_by_global_norm(0.1)]
    chained = ll.chain(*parts, sgd())
    return {
        "chain": chained,
        "average": ll.chain(*parts, sgd(), ll.ema()),
        "judge": ll.chain(*parts, ll.skip_nonfinite(), sgd()),
        "partition": split(chained, chained),
        "own_steps": ll.optim.own_steps(chained),
        "every": ll.optim.every(chained, 1),
        "every, last": ll.optim.every(chained, 1, gradients="last"),
        "within clipping": ll.chain(ll.clip_by_global_norm(0.5), split(chained, sgd())),
    }


@one_report
@pytest.mark.parametrize("name", writing())
def test_gradients_given_by_hand_are_not_written(name):
    optimizer, model = writing()[name], net()
    state, x = ll.copy_state(ll.init_state(model, optimizer)), batches(1)[0]
    out = ll.make_grad_fn(model, loss_fn)(state, x)
    given = {**out.grads}
    before = bits(given)
    expected, metrics = made_step(model, optimizer)(state, x)
    params, _, applied = optimizer.update(given, state.opt_state, state.params, 0)
    assert applied is True
    assert equal(params, expected.params)
    assert bits(given) == before
    for gradients in (out, given):
        new, found = ll.apply_gradients(optimizer, state, gradients)
        assert equal(new.params, expected.params)
        assert bits(given) == before
        assert {**ll.compute(metrics), **ll.compute(found)} == ll.compute(metrics)
        new, _ = ll.apply_gradients(optimizer, ll.copy_state(state), gradients, donate=True)
        assert equal(new.params, expected.params)
        assert bits(given) == before
    second = ll.apply_gradients(optimizer, state, given)[0]
    assert equal(second.params, expected.params)  # the same gradients once more


def test_a_loss_scale_by_hand_is_said():
    model, optimizer = net(), ll.chain(ll.optim.dynamic_loss_scale(2.0**10), sgd())
    state, x = ll.copy_state(ll.init_state(model, optimizer)), batches(1)[0]
    expected, _ = made_step(model, optimizer)(state, x)
    grads = ll.make_grad_fn(model, loss_fn)(state, x).grads
    scale = optimizer.loss_scale(state.opt_state)
    scaled = {name: grad * scale for name, grad in grads.items()}
    assert scale == 2.0**10
    before = bits((grads, scaled))
    for given, said in ((grads, 1.0), (grads, torch.tensor(1.0)), (scaled, scale), (scaled, 2.0**10)):
        params, opt_state, applied = optimizer.update(given, state.opt_state, state.params, 0, scale=said)
        assert applied is True
        assert equal(params, expected.params)
        assert bits(opt_state["dynamic_loss_scale"]) == bits(expected.opt_state["dynamic_loss_scale"])
        for donate in (False, True):
            own = ll.copy_state(state)
            new, metrics = ll.apply_gradients(optimizer, own, given, scale=said, donate=donate)
            assert equal(new.params, expected.params)
            assert ll.compute(metrics) == {"loss_scale": 2.0**10}
        assert bits((grads, scaled)) == before
    given = {**scaled, "2.bias": torch.full_like(grads["2.bias"], torch.inf)}
    new, _ = ll.apply_gradients(optimizer, state, given, scale=scale)
    assert new.skipped
    assert new.opt_state["dynamic_loss_scale"]["loss_scale"] == 2.0**9
    assert equal(new.params, state.params)


def test_a_loss_scale_of_which_nothing_is_said_is_refused():
    model, optimizer = net(), ll.chain(SCALE, sgd())
    state, x = ll.init_state(model, optimizer), batches(1)[0]
    out = ll.make_grad_fn(model, loss_fn)(state, x)
    for donate in (False, True):
        for call in (
            lambda: optimizer.update(out.grads, state.opt_state, state.params, 0),
            lambda donate=donate: ll.apply_gradients(optimizer, state, out, donate=donate),
            lambda donate=donate: ll.apply_gradients(optimizer, state, out.grads, donate=donate),
        ):
            with pytest.raises(ValueError, match=r"scale=optimizer\.loss_scale\(state\.opt_state\)\), or scale=1\.0"):
                call()
        assert equal(state.params, net().named_parameters())
    scaled = ll.make_grad_fn(model, loss_fn)(state, x, scale=optimizer.loss_scale(state.opt_state))
    with pytest.raises(ValueError, match=r"say themselves .* leave scale= out"):
        ll.apply_gradients(optimizer, state, scaled, scale=2.0)
    with pytest.raises(ValueError, match=r"no part of the update divides .* put ll\.optim\.dynamic_loss_scale\(\)"):
        ll.apply_gradients(sgd(), ll.init_state(model, sgd()), scaled)
    with pytest.raises(ValueError, match=r"opt_state holds SGD .*dynamic_loss_scale"):
        optimizer.loss_scale(sgd().init(state.params))
    assert sgd().loss_scale(None) is None


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("who", "call"),
    [
        ("partition", lambda inner: split(inner, sgd())),
        ("own_steps", ll.optim.own_steps),
        ("every", lambda inner: ll.optim.every(inner, 2)),
    ],
)
def test_a_loss_scale_of_some_parameters_alone_is_refused(who, call):
    instead = f"put it into the outer chain, ll.chain(ll.optim.dynamic_loss_scale(), ll.optim.{who}(...))"
    with pytest.raises(ValueError, match=re.escape(instead)):
        call(ll.chain(SCALE, sgd()))
    around, inside = ll.chain(SCALE, call(sgd())), call(sgd())
    one, other = run(around, batches(3)), run(inside, batches(3))
    assert equal(one.params, other.params)  # the outer scale is one for all, and a power of 2 rounds nothing


# every


def raw_every(data, n, gradients="mean", bad=()):
    """A raw loop with Adam in every n-th step, not counting bad ones, and the number of steps that count."""
    model, made = net(), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=True)
    for at, x in enumerate(data):
        if at in bad:
            continue
        if gradients == "last" or made % n == 0:
            optimizer.zero_grad()
        loss_fn(model, x).backward()
        made += 1
        if made % n == 0:
            for p in model.parameters() if gradients == "mean" else ():
                p.grad /= n
            optimizer.step()
    return model, made


def adam(**options):
    return ll.optimizer(torch.optim.Adam, lr=0.02, **options)


@pytest.mark.parametrize("way", [*WAYS, "restored"])
@pytest.mark.parametrize("bad", [(2, 3, 6), ()], ids=["skips", ""])
@pytest.mark.parametrize(("n", "gradients"), [(2, "mean"), (2, "last"), (3, "mean"), (1, "mean")])
def test_an_update_by_every_nth_step_is_that_of_a_raw_loop(n, gradients, bad, way, tmp_path):
    data = batches(10)
    raw, made = raw_every(data, n, gradients, bad)
    model, optimizer = net(), ll.optim.every(adam(), n, gradients=gradients)
    optimizer = ll.chain(ll.skip_nonfinite(), optimizer) if bad else optimizer
    step, state = made_step(model, optimizer, "pure" if way == "restored" else way), ll.init_state(model, optimizer)
    for at, x in enumerate(data):
        if way == "restored" and at == 5:  # with an update half made
            ll.checkpoint_io(tmp_path).save(state)
            fresh = net(seed=3)
            state = ll.checkpoint_io(tmp_path).restore(ll.init_state(fresh, optimizer), quiet=True)
            step = made_step(fresh, optimizer)
        before = state if "donated" not in way else None
        kept = None if before is None else bits((before.params, before.opt_state))
        state, _ = step(state, x * math.nan if at in bad else x)
        assert state.skipped is (at in bad)
        assert before is None or bits((before.params, before.opt_state)) == kept
    assert (state.step, state.batch) == (made, 10)
    assert_as_raw(state.params, raw, way)
    kept = state.opt_state["every"]
    assert kept.keys() == {"inner", "steps"} | ({"sum"} if gradients == "mean" else set())
    assert kept["steps"] == made % n
    assert {row["step"].item() for row in kept["inner"]["Adam"]["state"].values()} == {made // n}


@pytest.mark.parametrize("way", WAYS)
def test_an_update_by_every_second_step_stands_beside_one_by_each(way):
    model, raw, data = net(), net(), batches(9)
    one = torch.optim.SGD(raw[0].parameters(), lr=0.1, momentum=0.9, fused=True)
    two = torch.optim.Adam(raw[2].parameters(), lr=0.02, fused=True)
    optimizer = split(sgd(), ll.optim.every(adam(), 2))
    step, state = made_step(model, optimizer, way), ll.init_state(model, optimizer)
    for number, x in enumerate(data, 1):
        one.zero_grad()
        loss_fn(raw, x).backward()
        one.step()
        if number % 2 == 0:
            for p in raw[2].parameters():
                p.grad /= 2
            two.step()
            two.zero_grad()
        state, _ = step(state, x)
    assert_as_raw(state.params, raw, way)
    assert state.step == 9
    assert state.opt_state["partition"]["last"]["every"]["steps"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_chain_within_every_judges_and_clips_the_mean_and_a_skip_empties_the_sum(way):
    inner = ll.chain(ll.skip_nonfinite(), ll.clip_by_global_norm(0.3), adam(), ll.ema(0.8))
    model, raw, data, bad = net(), net(), batches(12), (2, 7)
    optimizer = ll.optim.every(inner, 2)
    theirs = torch.optim.Adam(raw.parameters(), lr=0.02, fused=True)
    average = {name: p.detach().clone() for name, p in raw.named_parameters()}
    step, state, skipped = made_step(model, optimizer, way), ll.init_state(model, optimizer), []
    made, norms, found = 0, [], []
    for at, x in enumerate(data):
        loss_fn(raw, x * math.nan if at in bad else x).backward()
        if at % 2:
            for p in raw.parameters():
                p.grad /= 2
            if all(p.grad.isfinite().all() for p in raw.parameters()):
                norms.append(nn.utils.clip_grad_norm_(raw.parameters(), 0.3).item())
                theirs.step()
                made += 1
                for name, p in raw.named_parameters():
                    average[name].lerp_(p.detach(), 1 - 0.8)
            raw.zero_grad()
        state, metrics = step(state, x * math.nan if at in bad else x)
        skipped += [at] if state.skipped else []
        norm = ll.compute(metrics).get("grad_norm", math.nan)
        found += [] if math.isnan(norm) else [norm]
    assert skipped == [3, 7]
    assert (made, state.step) == (4, 10)
    assert max(norms) > 0.3
    assert found == pytest.approx(norms)
    assert_as_raw(state.params, raw, way)
    kept = state.opt_state["every"]
    assert kept["inner"]["skip_nonfinite"]["total_notfinite"] == 2
    assert kept["inner"]["ema"]["updates"] == 4
    torch.testing.assert_close(dict(ll.eval_state(optimizer, state).params), average)
    assert all(not total.any() for total in kept["sum"].values())


@pytest.mark.parametrize("own", [False, True], ids=["steps", "updates"])
def test_schedules_within_every_follow_all_steps_or_by_own_steps_the_updates(own):
    def lr(step):
        return 0.1 / (1 + step)

    inner = ll.optimizer(torch.optim.SGD, lr=lr)
    optimizer = ll.optim.every(ll.optim.own_steps(inner) if own else inner, 3, gradients="last")
    model, raw, data = net(), net(), batches(9)
    step, state = made_step(model, optimizer), ll.init_state(model, optimizer)
    for at, x in enumerate(data):
        raw.zero_grad()
        loss_fn(raw, x).backward()
        rate = lr(at // 3 if own else at)
        if at % 3 == 2:
            assert ll.optim.hyperparameters(optimizer, state) == {"lr": rate}
            torch.optim.SGD(raw.parameters(), lr=rate, fused=True).step()
        state, _ = step(state, x)
    assert_as_raw(state.params, raw, "pure")


@pytest.mark.slow
def test_members_of_a_stack_update_by_every_second_step():
    optimizer, data = ll.optim.every(ll.chain(ll.clip_by_global_norm(0.3), adam()), 2), batches(7)
    models = [net(seed) for seed in range(3)]
    step = made_step(models[0], optimizer)
    states = [ll.init_state(one, optimizer, seed=at) for at, one in enumerate(models)]
    stack = trained(ll.vmap_step(step), ll.transforms.stack_states(states), data)
    for member, model in zip(ll.transforms.unstack_states(stack), models, strict=True):
        alone = trained(made_step(model, optimizer), ll.init_state(model, optimizer), data)
        torch.testing.assert_close(dict(member.params), dict(alone.params), rtol=1e-10, atol=1e-12)


def test_every_refuses_what_it_cannot_count_or_take():
    assert_refused(ValueError, "n 0 at least 1", lambda: ll.optim.every(adam(), 0))
    assert_refused(ValueError, "gradients 'sum' 'mean' or 'last'", lambda: ll.optim.every(adam(), 2, gradients="sum"))
    assert_refused(TypeError, "every class SGD", lambda: ll.optim.every(torch.optim.SGD, 2))
    settings = ll.optim.every(adam(), 2).description["every"]
    assert (settings["every"], settings["gradients"], settings["Adam"]["lr"]) == (2, "mean", 0.02)


@both_steps
def test_bfloat16_and_float32_parameters_are_summed_as_they_are(donate):
    def mixed():
        torch.manual_seed(0)
        return nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2).bfloat16()})

    def loss(model, x):
        return mean_square(model["a"], x) + mean_square(model["b"], x.bfloat16()).float()

    model, raw, data = mixed(), mixed(), torch.randn(4, 5, 3).unbind()
    optimizer = ll.optim.every(ll.optimizer(torch.optim.SGD, lr=0.1, fused=False), 2)
    state = trained(
        made_step(model, optimizer, "donated" if donate else "pure", loss), ll.init_state(model, optimizer), data
    )
    theirs = torch.optim.SGD(raw.parameters(), lr=0.1)
    for at, x in enumerate(data):
        loss(raw, x).backward()
        if at % 2:
            for p in raw.parameters():
                p.grad /= 2
            theirs.step()
            theirs.zero_grad()
    assert equal(state.params, raw.named_parameters())


in_each_step = pytest.mark.parametrize("kind", ["pure", "donated", "graph"])


def step_of_kind(kind, grad_fn, optimizer):
    step = ll.make_train_step(grad_fn, optimizer, donate=kind == "donated")
    return ll.compile_step(step, backend="eager") if kind == "graph" else step


@in_each_step
def test_a_first_half_that_writes_its_state_is_refused(kind):
    """The old state of a pure step would change, and a skipped batch would be counted."""

    def transform(grads, state, params, step):
        state["batches"] += 1
        return ll.types.Transformed(grads, state)

    counting = ll.optim.part("counting", init=lambda params: {"batches": torch.tensor(0)}, transform=transform)
    model, optimizer = torch.nn.Linear(2, 1), ll.chain(counting, ll.optimizer(torch.optim.SGD, lr=0.1))
    step = step_of_kind(kind, ll.make_grad_fn(model, mean_square), optimizer)
    with pytest.raises(
        RuntimeError, match=r"transform of counting has written to its state in place.*return a new one"
    ):
        step(ll.init_state(model, optimizer), torch.ones(4, 2))


@in_each_step
def test_a_second_half_that_writes_a_parameter_without_a_gradient_is_refused(kind):
    """A pure step does not copy such a parameter, so the old state would change."""

    def update_(grads, state, params, step):
        for param in params.values():
            param.clamp_(-0.1, 0.1)
        return params, state

    model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    optimizer = ll.chain(optimizer, ll.optim.part("clamped", update_=update_))
    grad_fn = ll.make_grad_fn(model, mean_square, trainable=lambda name, tensor: name == "bias")
    step = step_of_kind(kind, grad_fn, optimizer)
    with pytest.raises(RuntimeError, match="update_ of clamped has written to weight, which has no gradient"):
        step(ll.init_state(model, optimizer), torch.ones(4, 2))


def test_a_run_that_continues_with_a_smaller_n_takes_the_mean_of_all_gradients_so_far(tmp_path):
    def one(n):
        return ll.optim.every(ll.optimizer(torch.optim.SGD, lr=1.0), n)

    model = nn.Linear(1, 1, bias=False)
    start = ll.init_state(model, one(4)).params["weight"].item()
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).sum()), one(4))
    state, slopes = ll.init_state(model, one(4)), (1.0, 2.0, 3.0, 6.0)  # the gradients
    for slope in slopes[:3]:
        state, _ = step(state, torch.tensor([[slope]]))
    ll.checkpoint_io(tmp_path).save(state)
    with pytest.warns(UserWarning, match="every was 4, is 2"):
        state = ll.checkpoint_io(tmp_path).restore(ll.init_state(model, one(2)), quiet=True)
    for way in WAYS:
        again = ll.copy_state(state)
        model.requires_grad_(True)
        step = make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).sum()), one(2), **WAYS[way])
        after, _ = step(again, torch.tensor([[slopes[3]]]))
        assert after.params["weight"].item() == pytest.approx(start - sum(slopes) / 4)
        assert after.opt_state["every"]["steps"] == 0


def test_a_state_of_something_else_is_refused_by_every():
    params = dict(net().named_parameters())
    optimizer = ll.optim.every(adam(), 2)
    state = optimizer.init(params)["every"]
    grads = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    for wrong in (None, {"inner": state["inner"]}, {**state, "inner": {"SGD": {}}}, [*state.items()]):
        with pytest.raises(ValueError, match=r"every.* is to update it"):
            optimizer.update(grads, {"every": wrong}, params, 0)


@pytest.mark.parametrize("method", ["init", "transform", "update_", "update"])
def test_a_name_that_no_part_takes_is_refused_by_hand(method):
    params = dict(net().named_parameters())
    optimizer = ll.chain(ll.clip_by_global_norm(1.0), adam())
    grads = {name: torch.ones_like(tensor) for name, tensor in params.items()}
    given = (params,) if method == "init" else (grads, optimizer.init(params), params, 0)
    near, meant = {"init": ("bufers", "buffers")}.get(method, ("ownd", "owned"))
    with pytest.raises(TypeError, match=f"{near}=, which no part takes: perhaps {meant}="):
        getattr(optimizer, method)(*given, **{near: True})
    with pytest.raises(TypeError, match="else=, which no part takes"):
        getattr(optimizer, method)(*given, **{"else": True})


def test_a_partition_reports_no_infinite_value_of_a_label_that_is_not_updated():
    def told(name, apply):
        def transform(grads, state, params, step):
            return ll.types.Transformed(grads, apply=torch.tensor(apply), metrics={name: ll.Mean(math.inf, 1)})

        return ll.chain(ll.optim.part(name, transform=transform), sgd())

    model = net()
    optimizer = ll.optim.partition(
        {"yes": told("one", True), "no": told("two", False)}, lambda name, _: "yes" if "weight" in name else "no"
    )
    state = ll.init_state(model, optimizer)
    grads = {name: torch.ones_like(tensor) for name, tensor in state.params.items()}
    _, metrics = ll.apply_gradients(optimizer, state, grads)
    values = ll.compute(metrics)
    assert {name.split("/")[0] for name, value in values.items() if not math.isnan(value)} == {"one"}, values
