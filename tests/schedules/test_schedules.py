"""Schedules against the schedulers of transformers and torch, and by their definitions."""

import inspect
import pickle
import re

import pytest
import torch
import transformers.optimization as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import examples, one_report
from torch.optim import lr_scheduler

import looplib as ll

S = ll.schedules
EPS = 2.0**-52
rates, fractions, counts = st.floats(1e-8, 10.0), st.floats(0.0, 1.0), st.integers(1, 40)


def run(make_scheduler, lr, steps):
    """The values that a real scheduler gives the updates of a run."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make_scheduler(optimizer)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def values_of(schedule, steps):
    return [schedule(step) for step in range(steps)]


def assert_close(schedule, expected, roundings, scale):
    """Equal up to a number of roundings of numbers of this size, since more cannot be expected near zero."""
    for step, value in enumerate(expected):
        assert abs(schedule(step) - value) <= roundings * EPS * scale, (step, schedule(step), value)


# Each takes a peak, a ratio, a warmup, a length, a small count and a float, and gives a schedule, the real scheduler,
# the number of roundings between them, and how many steps to compare. transformers has closed forms, equal in all bits
# where nothing but a product follows; torch multiplies the value before by a factor, a rounding with every step.


def warmup_stable_decay(peak, ratio, warmup, rest, n, x):
    total, low, shape = warmup + rest + n, peak * ratio, ("linear", "cosine", "1-sqrt")[n % 3]
    shapes = {"warmup_shape": shape, "decay_shape": shape}
    theirs = {"warmup_type": shape, "decay_type": shape, "min_lr_ratio": ratio}
    ours = S.warmup_stable_decay(peak, warmup=warmup, decay=rest, total=total, start=low, final=low, **shapes)
    return ours, lambda o: hf.get_wsd_schedule(o, warmup, rest, total, **theirs), 4, total + 20


def cosine(peak, ratio, warmup, rest, n, x):
    ours = S.cosine(peak, total=(rest + 1) * n, cycles=n / 2, final=peak * ratio)
    # torch divides by 1 + cos, of the size 1 / rest**2 at the bottom, and climbs from there.
    theirs = lambda o: lr_scheduler.CosineAnnealingLR(o, rest + 1, peak * ratio)  # noqa: E731
    return ours, theirs, 8 * n * (rest + 1) ** 2, (rest + 1) * n + 1


def cosine_restarts(peak, ratio, warmup, rest, n, x):
    total = rest * (2**n - 1)
    theirs = lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, rest, 2, peak * ratio)  # noqa: E731
    return S.cosine_restarts(peak, total=total, cycles=n, growth=2, final=peak * ratio), theirs, 8, total


def one_cycle(peak, ratio, warmup, rest, n, x):
    rise, strategy, phases = ratio * 0.49, ("cos", "linear")[n % 2], n > 2
    rest += rise * rest == 1  # where torch divides by zero
    form = {"rise": rise, "shape": {"cos": "cosine"}.get(strategy, strategy), "three_phase": phases}
    theirs = {"pct_start": rise, "anneal_strategy": strategy, "three_phase": phases}
    ours = S.one_cycle(peak, total=rest, **form)
    return ours, lambda o: lr_scheduler.OneCycleLR(o, peak, rest, **theirs), 8, rest


def join(peak, ratio, warmup, rest, n, x):
    at, low, gamma = [warmup + 1, warmup + 1 + rest], 0.01 + 0.9 * ratio, 0.5 + ratio / 2
    rise = S.linear(peak * low, total=at[0], final=peak)
    parts = [rise, S.cosine(peak, total=rest), S.exponential(peak, factor=gamma)]

    def theirs(o):
        linear = lr_scheduler.LinearLR(o, low, 1.0, at[0])
        parts = [linear, lr_scheduler.CosineAnnealingLR(o, rest), lr_scheduler.ExponentialLR(o, gamma)]
        return lr_scheduler.SequentialLR(o, parts, at)

    return S.join(parts, at), theirs, 16 * (at[1] + 20), at[1] + 20


def scaled(peak, ratio, warmup, rest, n, x):
    factor, gamma = 0.01 + 0.9 * ratio, 0.5 + ratio / 2
    first = S.join([S.constant(factor), S.constant(1.0)], [rest])

    def theirs(o):
        return lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, factor, rest), lr_scheduler.ExponentialLR(o, gamma)], o
        )

    return S.scaled(S.exponential(peak, factor=gamma), first), theirs, 2 * rest + 40, rest + 20


ORACLES = {
    "constant": lambda p, r, w, m, n, x: (S.constant(p), hf.get_constant_schedule, 0, 20),
    "warmup": lambda p, r, w, m, n, x: (
        *(S.warmup(S.constant(p), w), lambda o: hf.get_constant_schedule_with_warmup(o, w)),
        *(0, w + 20),
    ),
    "warmup_linear": lambda p, r, w, m, n, x: (
        *(S.warmup_linear(p, warmup=w, total=w + m), lambda o: hf.get_linear_schedule_with_warmup(o, w, w + m)),
        *(0, w + m + 20),
    ),
    "warmup_cosine": lambda p, r, w, m, n, x: (
        ll.warmup_cosine(p, warmup=w, total=w + m, final=p * r),
        lambda o: hf.get_cosine_with_min_lr_schedule_with_warmup(o, w, w + m, min_lr_rate=r),
        *(4, w + m + 1),
    ),
    "inverse_sqrt": lambda p, r, w, m, n, x: (
        S.warmup(S.inverse_sqrt(p, timescale=m), w),
        lambda o: hf.get_inverse_sqrt_schedule(o, w, m),
        *(2, w + 50),
    ),
    # 1 - step / total is a small difference near the end, and a small power magnifies its rounding by total.
    "polynomial": lambda p, r, w, m, n, x: (
        S.warmup(S.polynomial(p, total=m, final=p * r * 0.99, power=x), w),
        lambda o: hf.get_polynomial_decay_schedule_with_warmup(o, w, w + m, p * r * 0.99, x),
        *(4 + 4 * m, w + m + 20),
    ),
    "step_decay": lambda p, r, w, m, n, x: (
        *(S.step_decay(p, every=n, factor=r), lambda o: lr_scheduler.StepLR(o, n, r)),
        *(100, 100),
    ),
    "multistep_decay": lambda p, r, w, m, n, x: (
        S.multistep_decay(p, boundaries=[n, n + m], factor=r),
        lambda o: lr_scheduler.MultiStepLR(o, [n, n + m], r),
        *(60, 60),
    ),
    "exponential": lambda p, r, w, m, n, x: (
        *(S.exponential(p, factor=r), lambda o: lr_scheduler.ExponentialLR(o, r)),
        *(60, 60),
    ),
    "linear": lambda p, r, w, m, n, x: (
        *(S.linear(p * x / 4, total=m, final=p * r), lambda o: lr_scheduler.LinearLR(o, x / 4, r, m)),
        *(8 * m + 8, m + 20),
    ),
    "warmup_stable_decay": warmup_stable_decay,
    "cosine": cosine,
    "cosine_restarts": cosine_restarts,
    "one_cycle": one_cycle,
    "join": join,
    "scaled": scaled,
}


@settings(max_examples=examples(500))
@given(
    st.sampled_from(sorted(ORACLES)),
    *(rates, fractions, st.integers(0, 20), counts, st.integers(1, 5), st.floats(0.1, 4.0)),
)
def test_it_is_the_real_scheduler(name, peak, ratio, warmup, rest, n, x):
    schedule, make, roundings, steps = ORACLES[name](peak, ratio, warmup, rest, n, x)
    assert_close(schedule, run(make, peak, steps), roundings, peak)


DEFAULTS = {
    "StepLR": (lambda lr: S.step_decay(lr, every=7), {"step_size": 7}),
    "MultiStepLR": (lambda lr: S.multistep_decay(lr, boundaries=[3, 20]), {"milestones": [3, 20]}),
    "PolynomialLR": (lambda lr: S.polynomial(lr, total=40), {"total_iters": 40}),
    "CosineAnnealingLR": (lambda lr: S.cosine(lr, total=40), {"T_max": 40}),
    "CosineAnnealingWarmRestarts": (lambda lr: S.cosine_restarts(lr, total=40, cycles=4), {"T_0": 10}),
    "OneCycleLR": (lambda lr: S.one_cycle(lr, total=40), {"max_lr": 0.3, "total_steps": 40}),
    "LinearLR": (lambda lr: S.linear(lr / 3, total=5, final=lr), {}),
}


@one_report
@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_left_out_is_as_in_torch(name):
    make, needed = DEFAULTS[name]
    expected = run(lambda optimizer: getattr(lr_scheduler, name)(optimizer, **needed), 0.3, 40)
    assert_close(make(0.3), expected, 4000, 0.3)


def test_momentum_goes_against_the_rate_as_in_torch():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.3, 40)
    momentum = S.one_cycle(0.85, total=40, start=0.95, final=0.95)
    for step in range(40):
        assert momentum(step) == pytest.approx(optimizer.param_groups[0]["momentum"], rel=1e-14)
        optimizer.step()
        if step < 39:
            scheduler.step()


def test_a_whole_run_under_one_cycle_lr_has_torchs_bits():
    """Without the schedule of the momentum, or of Adam's first beta, it does not."""
    total = 12
    lr, momentum = S.one_cycle(0.1, total=total), S.one_cycle(0.85, total=total, start=0.95, final=0.95)
    batches = torch.randn(total, 8, 4)

    def loss_fn(model, x):
        return model(x).square().mean()

    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    for make, cycled, fixed in (
        (torch.optim.AdamW, {"betas": (momentum, 0.999)}, {}),
        (torch.optim.SGD, {"momentum": momentum}, {"momentum": 0.9}),
    ):
        raw = net()
        optimizer = make(raw.parameters(), lr=0.1, fused=False, **fixed)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        for step, batch in enumerate(batches):
            optimizer.zero_grad()
            loss_fn(raw, batch).backward()
            optimizer.step()
            if step < total - 1:
                scheduler.step()
        for options in cycled, fixed:
            model, update = net(), ll.optimizer(make, lr=lr, fused=False, **options)
            state = ll.init_state(model, update)
            train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), update)
            for batch in batches:
                state, _ = train_step(state, batch)
            same = [torch.equal(state.params[key], param) for key, param in raw.named_parameters()]
            assert all(same) == (options is cycled)


# The value to scale, when, the values elsewhere, and the shape.
ORDER = (
    {"value", "peak", "schedule", "schedules"},
    {"warmup", "decay", "total", "rise", "fall", "steps", "every", "boundaries", "timescale", "cycles", "growth"},
    {"start", "final"},
    {"factor", "cycle_factor", "power", "shape", "warmup_shape", "decay_shape", "three_phase"},
)
KINDS = {name: getattr(S, name) for name in S.__all__}


@one_report
@pytest.mark.parametrize("name", KINDS)
def test_arguments_come_in_one_order(name):
    first, *rest = inspect.signature(KINDS[name]).parameters.values()
    assert first.name in ORDER[0] | {"start"}
    places = [next(place for place, names in enumerate(ORDER) if parameter.name in names) for parameter in rest]
    assert 0 not in places
    assert places == sorted(places)
    numbers = 0 if first.name in ("schedule", "schedules") else 1
    by_position = [parameter for parameter in rest if parameter.kind is not parameter.KEYWORD_ONLY]
    assert len(by_position) + numbers <= 1  # so that no two numbers can change places


def test_a_second_number_by_position_is_refused():
    for call in (
        lambda: S.one_cycle(0.04, 1.0, 0.0, total=100),
        lambda: S.linear(0.0, 1.0, total=9),
        lambda: S.cosine(1.0, 0.1, total=9),
        lambda: S.polynomial(1.0, 0.1, total=9),
        lambda: S.cosine_restarts(1.0, 0.1, total=9, cycles=3),
        lambda: S.warmup(S.constant(1.0), 9, 0.1),
    ):
        with pytest.raises(TypeError, match="positional arguments"):
            call()


@one_report
@pytest.mark.parametrize("name", KINDS)
def test_an_old_order_by_position_is_answered_by_the_line_to_write(name):
    parameters = inspect.signature(KINDS[name]).parameters.values()
    by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    needed = [f"{p.name}=..." for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    line = f"write ll.schedules.{name}({', '.join(by_position + needed)})"
    with pytest.raises(TypeError, match=re.escape(line)):
        KINDS[name](*[1] * (len(by_position) + 1))
    left = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty]
    if left:
        with pytest.raises(TypeError, match=f"with {', '.join(f'{other}=' for other in left)} where meant"):
            KINDS[name](*[1] * (len(by_position) + 2))


# Definitions.


@given(rates, rates, counts, st.sampled_from([S.linear, S.cosine, S.polynomial]))
def test_a_decay_begins_and_ends_exactly_and_lies_between(start, final, total, decay):
    schedule = decay(start, total=total, final=final)
    assert schedule(0) == start
    assert {schedule(step) for step in range(total, total + 20)} == {final}
    line = [*values_of(schedule, total), final]
    assert_close(schedule, sorted(line, reverse=start > final), 2, max(start, final))
    assert_close(lambda step: sorted([start, line[step], final])[1], line, 2, max(start, final))


@given(rates, st.integers(0, 20), st.floats(-1.0, 1.0))
def test_warmup_ends_where_the_schedule_begins(peak, steps, start):
    inner = S.linear(peak, total=10)
    schedule = S.warmup(inner, steps, start=start)
    assert [schedule(steps + step) for step in range(30)] == values_of(inner, 30)
    assert_close(schedule, [start + (peak - start) * step / steps for step in range(steps)], 4, max(peak, 1.0))
    assert steps == 0 or schedule(0) == start


def test_edges():
    for schedule in (S.warmup_linear, ll.warmup_cosine):  # a warmup that takes the whole run
        assert values_of(schedule(1.0, warmup=4, total=4, final=0.1), 6) == [0.0, 0.25, 0.5, 0.75, 0.1, 0.1]
    # where torch divides by zero
    assert S.one_cycle(1.0, total=4, rise=0.25, start=0.1, final=0.0)(0) == 1.0
    assert S.one_cycle(1.0, total=4, rise=0.25, start=0.1, final=0.0, three_phase=True)(0) == 0.1
    # cycles of 2, 6 and 18 steps
    assert S.cosine_restarts(1.0, total=4, cycles=2, final=0.5)(4) == 0.5
    restarts = values_of(S.cosine_restarts(1.0, total=26, cycles=3, growth=3, final=0.5), 26)
    assert [step for step, value in enumerate(restarts) if value == 1.0] == [0, 2, 8]


EVERY_KIND = [make(1.0, 0.5, 2, 5, 2, 1.0)[0] for make in ORACLES.values()]
EVERY_KIND += [
    S.polynomial(1, total=5, power=2),
    S.inverse_sqrt(1, timescale=4),
    S.constant(1),
    S.linear(1, total=5, final=0),
    S.scaled(S.constant(1), 2),
    S.join([S.constant(1)] * 2, [2]),
]


def test_a_float_is_a_share_of_the_steps():
    assert ll.warmup_cosine(1.0, warmup=0.1, total=130) == ll.warmup_cosine(1.0, warmup=13, total=130)
    assert S.warmup_linear(1.0, warmup=0.0, total=9) == S.warmup_linear(1.0, warmup=0, total=9)
    shares, steps = {"warmup": 0.05, "decay": 0.2}, {"warmup": 5, "decay": 20}
    assert S.warmup_stable_decay(1.0, total=100, **shares) == S.warmup_stable_decay(1.0, total=100, **steps)


def test_a_schedule_is_a_record_that_reads_as_its_code():
    for schedule in EVERY_KIND:
        copy = pickle.loads(pickle.dumps(schedule))
        assert eval(repr(schedule), vars(ll.schedules)) == copy == schedule
        assert hash(copy) == hash(schedule)
        assert values_of(copy, 20) == values_of(schedule, 20)
        assert {type(value) for value in values_of(schedule, 20)} == {float}
        with pytest.raises((AttributeError, TypeError)):
            schedule.start = 2.0
    base = S.constant.__mro__[1]
    kinds = {kind for kind in vars(ll.schedules).values() if isinstance(kind, type) and issubclass(kind, base)}
    assert {type(schedule) for schedule in EVERY_KIND} == kinds


ONE = S.constant(1.0)


def test_a_bad_value_is_named():
    for make, named in (
        (lambda: S.linear(True, total=5), "linear: start .*True"),
        (lambda: S.linear(1.0, total=10.0), "total"),
        (lambda: S.polynomial(1.0, total=5, power=0), "power"),
        (lambda: S.step_decay(1.0, every=0), "every"),
        (lambda: S.multistep_decay(1.0, boundaries=[3, 3]), "boundaries"),
        (lambda: S.multistep_decay(1.0, boundaries=[0, 3]), "boundaries"),
        (lambda: S.join([ONE] * 2, [2.0]), "join: boundaries"),
        (lambda: S.join([ONE], [2]), "join"),
        (lambda: S.warmup(ONE, -1), "warmup: steps .*-1"),
        (lambda: S.warmup(ONE, 0.1), r"warmup: steps is 0\.1, .*share"),
        (lambda: ll.warmup_cosine(1.0, warmup=6, total=5), "warmup=6"),
        (
            lambda: ll.warmup_cosine(1.0, warmup=1.0, total=5),
            "warmup must be an int, or a float of at least 0 and below 1",
        ),
        (lambda: S.warmup_stable_decay(1.0, warmup=3, decay=3, total=5), "total=5"),
        (lambda: S.warmup_stable_decay(1.0, warmup=1, decay=1, total=5, decay_shape="x"), "decay_shape"),
        (lambda: S.one_cycle(1.0, total=5, rise=1.0), "rise"),
        (lambda: S.one_cycle(1.0, total=5, rise=0.6, three_phase=True), "rise"),
    ):
        with pytest.raises(ValueError, match=named):
            make()
    for make in (lambda: S.warmup(0.1, 9), lambda: S.join([ONE, 0.1], [9])):
        with pytest.raises(TypeError, match=r"0\.1"):
            make()
