"""Averages against torch's AveragedModel, schedulefree's own classes, and loops written out."""

import copy

import pytest
import schedulefree
import torch
from problem import adamw, assert_refused, batches, begin, loss_fn, net, raw_adamw, raw_loop, run, step_of
from shared import bits, both_states, both_steps, equal
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import looplib as ll


def loss_of(model):
    return ll.make_eval_step(model, lambda model, x: {"loss": loss_fn(model, x)})


# EMA and SWA


def ema_or_swa(kind, **options):
    """The chain, and torch's function for the same averages."""
    if kind == "ema":
        return ll.chain(adamw(), ll.ema(0.9, **options)), get_ema_multi_avg_fn(0.9)
    return ll.chain(adamw(), ll.optim.swa(**options)), get_swa_multi_avg_fn()


@both_states
@both_steps
@pytest.mark.parametrize("buffers", [True, False], ids=["buffers too", "weights"])
@pytest.mark.parametrize("options", [{"start": 7, "every": 4}, {"start": 0}, {"start": 0, "every": 3}, {"start": 7}])
@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averages_have_the_bits_of_torchs(kind, options, buffers, donate, bound):
    optimizer, fn = ema_or_swa(kind, buffers=buffers, **options)
    start, every = options["start"], options.get("every", 1)
    model, pure = net(), net()
    for one in (model, pure) if buffers else ():
        one[1].num_batches_tracked = None  # torch would average the integer as well
    averaged = AveragedModel(model, multi_avg_fn=fn, use_buffers=buffers)

    def after(step):
        if step >= start and (step - start) % every == 0:
            averaged.update_parameters(model)

    after(0)
    raw_loop(model, raw_adamw(model), batches(27), after)
    state = run(pure, optimizer, batches(27), donate, bound)
    assert equal(state.params, model.named_parameters())
    assert equal(state.opt_state[kind]["average"]["params"], averaged.module.named_parameters())
    chosen = ll.eval_state(optimizer, state)
    assert equal(chosen.params, averaged.module.named_parameters())
    assert equal(chosen.buffers, (averaged.module if buffers else model).named_buffers())
    assert equal(state.buffers, model.named_buffers())
    x = batches(28)[-1]
    expected = loss_fn(averaged.module.eval(), x).item()
    assert ll.compute(loss_of(pure)(chosen, x))["loss"] == expected
    assert ll.compute(loss_of(pure)(state, x))["loss"] != expected


@both_steps
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_averaged_in_float32(dtype, donate):
    optimizer, model = ll.chain(adamw(), ll.ema(0.99)), net(dtype)
    wide = copy.deepcopy(model).float()
    averaged = AveragedModel(wide, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    averaged.update_parameters(wide)

    def after(step):
        wide.load_state_dict(model.state_dict())
        averaged.update_parameters(wide)

    raw_loop(model, raw_adamw(model), batches(20, dtype), after)
    state = run(net(dtype), optimizer, batches(20, dtype), donate)
    assert equal(state.params, model.named_parameters())
    assert equal(state.opt_state["ema"]["average"]["params"], averaged.module.named_parameters())
    assert equal(ll.eval_state(optimizer, state).params, averaged.module.to(dtype).named_parameters())


@both_steps
def test_before_the_start_the_weights_themselves_are_evaluated(donate):
    for optimizer in (ll.chain(adamw(), ll.ema(start=4)), ll.chain(adamw(), ll.optim.swa(start=4, buffers=True))):
        model = net()
        step = step_of(model, optimizer, donate)
        state = ll.init_state(model, optimizer)
        for at, batch in enumerate(batches(6)):
            chosen = ll.eval_state(optimizer, state)
            assert (chosen is state) == (at < 4)
            if at == 4:
                assert equal(chosen.params, state.params)
            state, _ = step(state, batch)


@both_steps
def test_a_decay_that_moves_is_asked_for_the_averages_so_far(donate):
    optimizer, model = ll.chain(adamw(), ll.ema(ll.optim.ema_warmup(0.9), start=2, every=2)), net()
    average = {}

    def after(step):
        if step < 2 or step % 2:
            return
        n = (step - 2) // 2
        for name, p in model.named_parameters():
            decay = min(0.9, (1 + n) / (10 + n))
            average[name] = average[name].lerp(p.detach(), 1 - decay) if n else p.detach().clone()

    raw_loop(model, raw_adamw(model), batches(40), after)
    assert equal(run(net(), optimizer, batches(40), donate).opt_state["ema"]["average"]["params"], average)


@both_states
def test_a_donated_step_spends_an_eval_state_that_shares_its_averages(bound):
    for optimizer in (ll.chain(adamw(), ll.ema()), ll.chain(adamw(), ll.optim.swa(start=1))):
        model = net()
        step = step_of(model, optimizer, donate=True)
        state = begin(model, optimizer, bound)
        for batch in batches(4):
            chosen = ll.eval_state(optimizer, state)
            kept = ll.copy_state(chosen)
            before = bits(kept)
            state, _ = step(state, batch)
            with pytest.raises(ll.DonatedStateError, match="has written over its tensors"):
                _ = chosen.params
            assert bits(kept) == before


AVERAGING = {
    "ema": lambda inner: ll.chain(inner, ll.ema(0.9, start=2, every=3, buffers=True)),
    "swa": lambda inner: ll.chain(inner, ll.optim.swa(start=3, every=2)),
}
SKIPPING = {
    "skip_nonfinite": lambda inner: ll.chain(ll.skip_nonfinite(5), inner),
    "dynamic_loss_scale": lambda inner: ll.chain(ll.optim.dynamic_loss_scale(), inner),
}


@both_steps
@pytest.mark.parametrize("skip", SKIPPING)
@pytest.mark.parametrize("outside", ["average", "skip"])
@pytest.mark.parametrize("average", AVERAGING)
def test_skipped_steps_move_neither_average_nor_count(average, outside, skip, donate):
    averaging, skipping = AVERAGING[average], SKIPPING[skip]
    optimizer = averaging(skipping(adamw())) if outside == "average" else skipping(averaging(adamw()))
    good, bad, plain = batches(16), torch.full((8, 6), torch.inf), averaging(adamw())
    state = run(net(), optimizer, [bad, *good[:2], bad, good[2], bad, bad, *good[3:], bad], donate)
    clean = run(net(), plain, good, donate)
    assert (state.step, state.skipped) == (16, True)
    assert bits((state.params, state.buffers)) == bits((clean.params, clean.buffers))
    assert state.opt_state.keys() - clean.opt_state.keys() == {skip}
    assert all(bits(state.opt_state[key]) == bits(kept) for key, kept in clean.opt_state.items())
    assert bits(ll.eval_state(optimizer, state).params) == bits(ll.eval_state(plain, clean).params)


REFUSED = [
    *((ValueError, f"decay {wrong}", lambda wrong=wrong: ll.chain(adamw(), ll.ema(wrong))) for wrong in (-0.1, 1.5, float("nan"))),
    (ValueError, "start -1 every 1", lambda: ll.chain(adamw(), ll.optim.swa(start=-1))),
    (ValueError, "start 0 every 0", lambda: ll.chain(adamw(), ll.ema(every=0))),
    *(
        (ValueError, f"{found} AdamW", lambda wrong=wrong, made=made: ll.eval_state(wrong, ll.init_state(net(), made)))
        for wrong in (ll.chain(adamw(), ll.ema()), ll.chain(adamw(), ll.optim.swa(start=1)))
        for made, found in ((adamw(), "exp_avg"), (None, "nothing"))
    ),
    *(
        (ValueError, names, lambda cls=cls, given=given: ll.optimizer(cls, lr=0.1, **given))
        for cls, given, names in (
            (schedulefree.SGDScheduleFree, {"momentum": lambda step: 0.9}, "momentum SGDScheduleFree eval inject"),
            (schedulefree.AdamWScheduleFree, {"betas": (0.9, lambda step: 0.9)}, "betas AdamWScheduleFree eval inject"),
        )
    ),
]  # fmt: skip


def test_refusals_name_what_was_found_and_what_to_give():
    for case in REFUSED:
        assert_refused(*case)
    other, state = ll.chain(adamw(lr=0.1), ll.ema()), ll.init_state(net(), adamw())
    for call in (lambda: ll.eval_state(other, state), lambda: other.update({}, state.opt_state, {}, 0)):
        with pytest.raises(
            ValueError, match=r"ll\.chain\(ll\.optimizer\(AdamW, lr=0\.1\), ll\.ema\(0\.999\)\)(:| is)"
        ) as error:
            call()
        assert "KeyError" not in str(error.value)


@pytest.mark.parametrize("around", [lambda chain: chain, ll.optim.own_steps, lambda chain: ll.optim.every(chain, 2)])
@pytest.mark.parametrize("start", [3, 0])
def test_an_average_is_read_by_its_name_and_is_what_eval_state_takes(start, around):
    def averaged(*averages):
        return around(ll.chain(adamw(), *averages))

    vectors = averaged(("slow", ll.ema(0.99, start=start)), ("fast", ll.ema(0.5, start=start, buffers=True)))
    optimizer = ll.optim.partition(
        {"vectors": vectors, "matrices": averaged(ll.optim.swa(start=start))},
        lambda name, tensor: "vectors" if tensor.ndim < 2 else "matrices",
    )
    model = net().to(torch.bfloat16)
    step, state = step_of(model, optimizer), begin(model, optimizer)
    for batch in batches(9, torch.bfloat16):
        chosen = ll.eval_state(optimizer, state)  # of the last average of each label
        fast = ll.optim.average(optimizer, state, "fast")
        matrices = ll.optim.average(optimizer, state, "matrices")
        assert equal(
            fast | matrices,
            {name: tensor for name, tensor in (chosen.params | chosen.buffers).items() if name in fast | matrices},
        )
        assert {*fast, *matrices} == {*chosen.params, "1.running_mean", "1.running_var"}
        for name in ("slow", "vectors/slow", "partition/vectors/slow"):
            slow = ll.optim.average(optimizer, state, name)
            assert equal(slow, ll.optim.average(optimizer, state, "slow"))
            assert {tensor.dtype for tensor in slow.values()} == {torch.bfloat16}
        assert [*slow] == [name for name in fast if "running" not in name]
        state, _ = step(state, batch)
    assert not equal(slow, {name: fast[name] for name in slow})
    within = r"(?:/(?:own_steps|every))?"  # the wrapper around the chain, if there is one
    kept = rf"'partition/vectors{within}/slow', 'partition/vectors{within}/fast', 'partition/matrices{within}/swa'"
    for name, words in (
        ("", "3 averages"),
        ("vectors", "2 averages are called 'vectors'"),
        ("ema", "no averages are called"),
    ):
        with pytest.raises(ValueError, match=f"{words}.* in this state, which keeps {kept}"):
            ll.optim.average(optimizer, state, name)
    with pytest.raises(ValueError, match="no averages in this state, which keeps none"):
        ll.optim.average(adamw(), begin(net(), adamw()))
    with pytest.raises(ValueError, match="is not that of"):
        ll.optim.average(adamw(), state)


# Schedule-free


@both_states
@both_steps
@pytest.mark.parametrize("cls", [schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree])
def test_schedule_free_evaluates_where_its_own_eval_does_and_continues(cls, donate, bound):
    arguments = {"lr": 0.02, "weight_decay": 0.1, "warmup_steps": 5}
    model, pure = net(), net()
    raw = cls(model.parameters(), **arguments)
    raw.train()
    optimizer = ll.optimizer(cls, **arguments)
    step = step_of(pure, optimizer, donate)
    state = begin(pure, optimizer, bound)
    evaluate = loss_of(pure)
    for part in range(4):
        data = batches(40)[10 * part : 10 * part + 10]
        fork = copy.deepcopy((model, raw))  # its own eval and train move the weights there and back, not to the bit
        raw_loop(model, raw, data)
        for batch in data:
            state, _ = step(state, batch)
        assert equal(state.params, model.named_parameters())
        raw_loop(*fork, data)
        fork[1].eval()
        before = bits(state)
        chosen = ll.eval_state(optimizer, state)
        assert equal(chosen.params, fork[0].named_parameters())
        assert not equal(chosen.params, state.params)
        expected = loss_fn(fork[0].eval(), data[0]).item()
        assert ll.compute(evaluate(chosen, data[0]))["loss"] == expected
        assert bits(state) == before


def test_without_averages_the_state_itself_is_evaluated():
    for optimizer in (
        adamw(),
        ll.chain(ll.skip_nonfinite(2), adamw()),
        ll.optim.partition({"all": adamw()}, lambda name, tensor: "all"),
    ):
        state = ll.init_state(net(), optimizer)
        assert ll.eval_state(optimizer, state) is state


def test_averages_of_an_optimizer_that_is_not_given_are_not_left_out_silently():
    state = ll.init_state(net(), ll.chain(adamw(), ll.ema()))
    for optimizer in (adamw(), ll.chain(ll.skip_nonfinite(2), adamw())):
        with pytest.raises(ValueError, match=r"opt_state holds AdamW .*, ema \(average.*not that of .*AdamW"):
            ll.eval_state(optimizer, state)


def test_a_part_with_an_average_is_evaluated_by_it():
    optimizer = ll.optim.partition(
        {"matrices": ll.chain(adamw(), ll.ema(0.9)), "rest": adamw()},
        lambda name, tensor: "matrices" if tensor.ndim == 2 else "rest",
    )
    state, alone = run(net(), optimizer, batches(3)), run(net(), ll.chain(adamw(), ll.ema(0.9)), batches(3))
    averaged = alone.opt_state["ema"]["average"]["params"]
    expected = {name: averaged[name] if p.ndim == 2 else p for name, p in state.params.items()}
    assert equal(ll.eval_state(optimizer, state).params, expected)


def diffusers_decay(step, decay, inv_gamma, power):
    """`EMAModel.get_decay` of diffusers with `use_ema_warmup`, as published; its step counts from 1 at the first call."""
    return min(1 - (1 + step / inv_gamma) ** -power, decay)


@pytest.mark.every_case
@pytest.mark.parametrize(("inv_gamma", "power"), [(1.0, None), (None, 0.75), (10.0, 1.0)])
def test_the_warmup_is_that_of_diffusers(inv_gamma, power):
    warmup = ll.optim.ema_warmup(0.999, inv_gamma=inv_gamma, power=power)
    for step in (1, 2, 10, 1000, 10**6):
        assert warmup(step) == diffusers_decay(step, 0.999, inv_gamma or 1.0, power or 2 / 3)
    with pytest.raises(ValueError, match="inv_gamma is -1"):
        ll.optim.ema_warmup(0.9, inv_gamma=-1)


@pytest.mark.parametrize(
    ("entry", "settings"),
    [({"average": 1.0, "updates": 2.0}, {}), ({"begun": 1.0}, {"start": 5})],
    ids=["as an average", "with a start"],
)
@pytest.mark.every_case
def test_a_part_of_a_users_own_that_looks_like_an_average_is_none(entry, settings):
    def init(params):
        return {name: torch.tensor(value) for name, value in entry.items()}

    def update_(grads, state, params, step):
        return params, state

    model = torch.nn.Linear(2, 1)
    own = ll.optim.part("own", init=init, update_=update_, settings=settings)
    optimizer = ll.chain(ll.optimizer(torch.optim.SGD, lr=0.1), ll.ema(0.5), own)
    state = ll.init_state(model, optimizer)
    assert equal(ll.optim.average(optimizer, state), dict(state.params))


def test_averaged_buffers_alone_are_those_of_torch_and_are_asked_for():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    ema = ll.ema(0.9, start=1, buffers=True)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    kept = ema.init(params, buffers=buffers)
    for step in range(4):
        model(torch.randn(8, 3)).sum().backward()
        with torch.no_grad():
            for param in params.values():
                param.sub_(param.grad, alpha=0.1)
        theirs.update_parameters(model)
        _, kept, _ = ema.update({}, kept, params, step, buffers=buffers)
    averaged = ll.eval_state(ema, ll.init_state(model).replace(opt_state=kept))
    for name, tensor in (dict(averaged.params) | dict(averaged.buffers)).items():
        if tensor.is_floating_point():  # and not the count of batches
            torch.testing.assert_close(tensor, theirs.module.state_dict()[name], rtol=0, atol=0)
    for call in (lambda: ema.init(params), lambda: ema.update({}, kept, params, 4)):
        with pytest.raises(
            TypeError, match=r"got none: with buffers = dict\(model\.named_buffers\(\)\), write ema\.init"
        ):
            call()


def test_by_default_the_buffers_to_evaluate_with_are_the_states_own():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    for average in (ll.ema(0.5), ll.optim.swa(start=1)):
        optimizer = ll.chain(ll.optimizer(torch.optim.SGD, lr=0.1), average)
        step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().sum()), optimizer)
        state = ll.init_state(model, optimizer)
        for x in torch.randn(3, 8, 3):
            state, _ = step(state, x)
        averaged = ll.eval_state(optimizer, state)
        assert not equal(averaged.params, state.params)
        assert equal(averaged.buffers, state.buffers)
