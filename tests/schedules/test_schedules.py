import math
import pickle
from bisect import bisect_right
from fractions import Fraction

import pytest
import torch
import transformers.optimization as hf
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import looplib as ll

EPS = 2.0**-52
quick = settings(deadline=None, max_examples=50)

rates = st.floats(1e-8, 10.0)
fractions = st.floats(0.0, 1.0)
counts = st.integers(1, 40)


def run(make_scheduler, lr, steps, key="lr"):
    """The values that a real scheduler gives the updates of a run."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, momentum=0.9)
    scheduler = make_scheduler(optimizer)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0][key])
        optimizer.step()
        scheduler.step()
    return values


def closed_form(make_scheduler, lr, steps):
    scheduler = make_scheduler(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr))
    values = []
    for step in range(steps):
        scheduler.last_epoch = step
        values += scheduler._get_closed_form_lr()
    return values


def values_of(schedule, steps):
    return [schedule(step) for step in range(steps)]


def assert_close(schedule, expected, roundings, scale):
    """Equal up to a number of roundings of numbers of this size, since more cannot be expected near zero."""
    for step, value in enumerate(expected):
        assert abs(schedule(step) - value) <= roundings * EPS * scale, (step, schedule(step), value)


# Against transformers.optimization: closed forms, so equal in all bits where nothing but a product follows.


@quick
@given(rates, st.integers(0, 20), counts)
def test_warmup_linear_is_transformers(peak, warmup, rest):
    total = warmup + rest
    theirs = run(lambda opt: hf.get_linear_schedule_with_warmup(opt, warmup, total), peak, total + 20)
    assert values_of(ll.schedules.warmup_linear(peak, warmup=warmup, total=total), total + 20) == theirs


@quick
@given(rates, st.integers(0, 20), counts)
def test_warmup_cosine_is_transformers_and_then_stays(peak, warmup, rest):
    total = warmup + rest
    schedule = ll.warmup_cosine(peak, warmup=warmup, total=total)
    theirs = run(lambda opt: hf.get_cosine_schedule_with_warmup(opt, warmup, total), peak, total)
    assert values_of(schedule, total) == theirs
    assert {schedule(step) for step in range(total, total + 20)} == {0.0}  # theirs climbs again


@quick
@given(rates, st.integers(0, 20), counts, st.floats(0.1, 5.0))
def test_cosine_with_cycles_is_transformers(peak, warmup, rest, cycles):
    total = warmup + rest
    theirs = run(lambda opt: hf.get_cosine_schedule_with_warmup(opt, warmup, total, cycles), peak, total + 1)
    schedule = ll.schedules.warmup(ll.schedules.cosine(peak, total=rest, cycles=cycles), warmup)
    assert values_of(schedule, total + 1) == theirs
    assert {schedule(step) for step in range(total, total + 20)} == {theirs[-1]}


@quick
@given(rates, st.integers(0, 20))
def test_warmup_is_transformers_constant_with_warmup(peak, warmup):
    theirs = run(lambda opt: hf.get_constant_schedule_with_warmup(opt, warmup), peak, warmup + 20)
    assert values_of(ll.schedules.warmup(ll.schedules.constant(peak), warmup), warmup + 20) == theirs


@quick
@given(rates)
def test_constant_is_transformers(value):
    assert values_of(ll.schedules.constant(value), 20) == run(hf.get_constant_schedule, value, 20)


@quick
@given(rates, fractions, st.integers(0, 20), counts)
def test_warmup_cosine_with_a_final_value_is_transformers(peak, ratio, warmup, rest):
    total = warmup + rest
    theirs = run(
        lambda opt: hf.get_cosine_with_min_lr_schedule_with_warmup(opt, warmup, total, min_lr_rate=ratio),
        peak,
        total + 1,
    )
    assert_close(ll.warmup_cosine(peak, warmup=warmup, total=total, final=peak * ratio), theirs, 4, peak)


@quick
@given(rates, fractions, st.integers(2, 20), counts, st.none() | fractions)
def test_warmup_with_a_start_is_transformers(peak, ratio, warmup, rest, start):
    # Theirs counts updates from 1 here, so that the warmup has one step fewer and begins above 0.
    theirs = run(
        lambda opt: hf.get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
            opt, warmup, warmup + rest, min_lr_rate=ratio, warmup_lr_rate=start
        ),
        peak,
        warmup + rest,
    )
    decay = ll.schedules.cosine(peak, peak * ratio, total=rest)
    schedule = ll.schedules.warmup(decay, warmup - 1, start=peak / warmup if start is None else peak * start)
    assert_close(schedule, theirs, 8, peak)


@quick
@given(rates, st.integers(0, 20), st.none() | counts)
def test_inverse_sqrt_is_transformers(peak, warmup, timescale):
    theirs = run(lambda opt: hf.get_inverse_sqrt_schedule(opt, warmup, timescale), peak, warmup + 50)
    schedule = ll.schedules.warmup(ll.schedules.inverse_sqrt(peak, timescale=timescale or warmup or 10_000), warmup)
    assert_close(schedule, theirs, 2, peak)


@quick
@given(rates, st.floats(0.0, 0.99), st.integers(0, 20), counts, st.floats(0.1, 4.0))
def test_polynomial_is_transformers(peak, ratio, warmup, rest, power):
    final = peak * ratio
    total = warmup + rest
    theirs = run(
        lambda opt: hf.get_polynomial_decay_schedule_with_warmup(opt, warmup, total, final, power), peak, total + 20
    )
    # 1 - step / total is a small difference near the end, and a small power magnifies its rounding by total.
    assert_close(
        ll.schedules.warmup(ll.schedules.polynomial(peak, final, total=rest, power=power), warmup),
        theirs,
        4 + 4 * rest,
        peak,
    )


shapes = st.sampled_from(["linear", "cosine", "1-sqrt"])


@quick
@given(rates, fractions, st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), shapes, shapes)
def test_warmup_stable_decay_is_transformers(peak, ratio, warmup, stable, decay, warmup_shape, decay_shape):
    total = warmup + stable + decay
    assume(total > 0)
    theirs = run(
        lambda opt: hf.get_wsd_schedule(
            opt, warmup, decay, total, warmup_type=warmup_shape, decay_type=decay_shape, min_lr_ratio=ratio
        ),
        peak,
        total + 20,
    )
    schedule = ll.schedules.warmup_stable_decay(
        peak,
        warmup=warmup,
        decay=decay,
        total=total,
        start=peak * ratio,
        final=peak * ratio,
        warmup_shape=warmup_shape,
        decay_shape=decay_shape,
    )
    assert_close(schedule, theirs, 4, peak)


@quick
@given(rates, st.integers(0, 20), counts, st.integers(1, 50))
@example(1.0, 0, 49, 49)
def test_cosine_restarts_is_transformers(peak, warmup, rest, cycles):
    total = warmup + rest
    theirs = run(
        lambda opt: hf.get_cosine_with_hard_restarts_schedule_with_warmup(opt, warmup, total, cycles),
        peak,
        total + 20,
    )
    schedule = ll.schedules.warmup(ll.schedules.cosine_restarts(peak, total=rest, cycles=cycles), warmup)
    for step, value in enumerate(theirs):
        if warmup <= step < total and (step - warmup) * cycles % rest == 0:
            # Theirs takes a remainder of floats, which now and then is 0.999... where a cycle begins.
            assert schedule(step) == peak
        else:
            assert abs(schedule(step) - value) <= 8 * cycles * EPS * peak


# Against torch.optim.lr_scheduler: its closed forms closely, its runs, which multiply the value before by a
# factor and so add a rounding with every step, as closely as that allows.


@quick
@given(rates, counts, fractions)
def test_step_decay_is_torch(start, every, factor):
    def make(opt):
        return lr_scheduler.StepLR(opt, every, factor)

    schedule = ll.schedules.step_decay(start, every=every, factor=factor)
    assert values_of(schedule, 100) == closed_form(make, start, 100)
    assert_close(schedule, run(make, start, 100), 100, start)


@quick
@given(rates, st.lists(counts, unique=True).map(sorted), fractions)
def test_multistep_decay_is_torch(start, boundaries, factor):
    def make(opt):
        return lr_scheduler.MultiStepLR(opt, boundaries, factor)

    schedule = ll.schedules.multistep_decay(start, boundaries=boundaries, factor=factor)
    assert values_of(schedule, 60) == closed_form(make, start, 60)
    assert_close(schedule, run(make, start, 60), 60, start)


@quick
@given(rates, fractions)
def test_exponential_is_torch(start, factor):
    def make(opt):
        return lr_scheduler.ExponentialLR(opt, factor)

    schedule = ll.schedules.exponential(start, factor=factor)
    assert values_of(schedule, 60) == closed_form(make, start, 60)
    assert_close(schedule, run(make, start, 60), 60, start)


@quick
@given(rates, st.floats(0.01, 1.0), fractions, counts)
def test_linear_is_torch(lr, start_factor, end_factor, total):
    def make(opt):
        return lr_scheduler.LinearLR(opt, start_factor, end_factor, total)

    schedule = ll.schedules.linear(lr * start_factor, lr * end_factor, total=total)
    assert_close(schedule, closed_form(make, lr, total + 20), 4, lr)
    assert_close(schedule, run(make, lr, total + 20), 8 * total + 8, lr)


@quick
@given(rates, counts, st.floats(0.1, 4.0))
def test_polynomial_is_torch(start, total, power):
    def make(opt):
        return lr_scheduler.PolynomialLR(opt, total, power)

    schedule = ll.schedules.polynomial(start, total=total, power=power)
    assert_close(schedule, closed_form(make, start, total + 20), 4 + 4 * total, start)
    assert_close(schedule, run(make, start, total + 20), 16 * total + 16, start)


@quick
@given(rates, fractions, st.integers(2, 40), st.integers(1, 4))
def test_cosine_is_torch(start, ratio, half_wave, half_waves):
    def make(opt):
        return lr_scheduler.CosineAnnealingLR(opt, half_wave, start * ratio)

    total = half_wave * half_waves
    schedule = ll.schedules.cosine(start, start * ratio, total=total, cycles=half_waves / 2)
    assert_close(schedule, closed_form(make, start, total + 1), 8 * half_waves, start)
    # Its run divides by 1 + cos, of the size 1 / half_wave**2 at the bottom, and climbs from there.
    assert_close(schedule, run(make, start, total + 1), 8 * half_waves * half_wave**2, start)


@quick
@given(rates, fractions, counts, st.integers(1, 3), st.integers(1, 3))
def test_cosine_restarts_is_torch(start, ratio, period, growth, cycles):
    total = period * sum(growth**cycle for cycle in range(cycles))
    theirs = run(
        lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, period, growth, start * ratio), start, total
    )
    schedule = ll.schedules.cosine_restarts(start, start * ratio, total=total, cycles=cycles, growth=growth)
    assert_close(schedule, theirs, 8, start)
    assert schedule(total) == schedule(total + 100) == start * ratio


@quick
@given(rates, st.floats(1.0, 10.0), counts, counts, st.floats(0.9, 1.0))
@pytest.mark.parametrize("mode", ["triangular", "triangular2", "exp_range"])
def test_cyclic_is_torch(mode, start, ratio, rise, fall, gamma):
    def make(opt):
        return lr_scheduler.CyclicLR(opt, start, start * ratio, rise, fall, mode, gamma)

    factors = {"triangular": {}, "triangular2": {"cycle_factor": 0.5}, "exp_range": {"step_factor": gamma}}[mode]
    # torch finds the place in the cycle from step / cycle, and loses digits with every cycle before it.
    steps = 3 * (rise + fall) + 5
    roundings = 32 * (rise + fall) / min(rise, fall)
    lr = ll.schedules.cyclic(start, start * ratio, rise=rise, fall=fall, **factors)
    assert_close(lr, run(make, start, steps), roundings, start * ratio)
    momentum = ll.schedules.cyclic(0.9, 0.8, rise=rise, fall=fall, **factors)
    assert_close(momentum, run(make, start, steps, "momentum"), roundings, 0.9)


@quick
@given(rates, counts, st.floats(0.0, 1.0, exclude_max=True), st.sampled_from(["cos", "linear"]), st.booleans())
def test_one_cycle_is_torch(peak, total, rise, strategy, three_phase):
    rise = rise / 2 if three_phase else rise
    assume(rise * total != 1)  # torch divides by zero there

    def make(opt):
        return lr_scheduler.OneCycleLR(
            opt, peak, total, pct_start=rise, anneal_strategy=strategy, three_phase=three_phase
        )

    form = {"rise": rise, "shape": {"cos": "cosine"}.get(strategy, strategy), "three_phase": three_phase}
    lr = ll.schedules.one_cycle(peak / 25, peak, peak / 25 / 1e4, total=total, **form)
    assert_close(lr, run(make, 1.0, total), 8, peak)
    momentum = ll.schedules.one_cycle(0.95, 0.85, 0.95, total=total, **form)
    assert_close(momentum, run(make, 1.0, total, "momentum"), 8, 1.0)
    assert lr(total) == lr(total + 100) == peak / 25 / 1e4


def test_one_cycle_begins_at_the_peak_where_torch_divides_by_zero():
    assert ll.schedules.one_cycle(0.1, 1.0, 0.0, total=4, rise=0.25)(0) == 1.0
    assert ll.schedules.one_cycle(0.1, 1.0, 0.0, total=4, rise=0.25, three_phase=True)(0) == 0.1


@quick
@given(rates, fractions, counts, counts, counts, st.floats(0.5, 1.0))
def test_join_is_torch_sequential(lr, start_factor, warmup, half_wave, tail, gamma):
    start_factor = max(start_factor, 0.01)

    def make(opt):
        parts = [
            lr_scheduler.LinearLR(opt, start_factor, 1.0, warmup),
            lr_scheduler.CosineAnnealingLR(opt, half_wave),
            lr_scheduler.ExponentialLR(opt, gamma),
        ]
        return lr_scheduler.SequentialLR(opt, parts, [warmup, warmup + half_wave])

    schedule = ll.schedules.join(
        [
            ll.schedules.linear(lr * start_factor, lr, total=warmup),
            ll.schedules.cosine(lr, total=half_wave),
            ll.schedules.exponential(lr, factor=gamma),
        ],
        [warmup, warmup + half_wave],
    )
    steps = warmup + half_wave + tail
    assert_close(schedule, run(make, lr, steps), 16 * steps, lr)


@quick
@given(rates, st.floats(0.01, 1.0), counts)
def test_join_of_constants_is_torch_constant(lr, factor, total):
    theirs = run(lambda opt: lr_scheduler.ConstantLR(opt, factor, total), lr, total + 20)
    assert_close(
        ll.schedules.join([ll.schedules.constant(lr * factor), ll.schedules.constant(lr)], [total]), theirs, 4, lr
    )


@quick
@given(rates, st.floats(0.01, 1.0), counts, st.floats(0.5, 1.0))
def test_scaled_is_torch_chained(lr, factor, total, gamma):
    def make(opt):
        parts = [lr_scheduler.ConstantLR(opt, factor, total), lr_scheduler.ExponentialLR(opt, gamma)]
        return lr_scheduler.ChainedScheduler(parts, opt)

    schedule = ll.schedules.scaled(
        ll.schedules.exponential(lr, factor=gamma),
        ll.schedules.join([ll.schedules.constant(factor), ll.schedules.constant(1.0)], [total]),
    )
    assert_close(schedule, run(make, lr, total + 20), 2 * total + 40, lr)


# Definitions.


@quick
@given(rates, rates, st.integers(1, 200), st.integers(1, 5), st.integers(1, 4))
def test_cosine_restarts_by_exact_fractions(start, final, total, cycles, growth):
    starts = [Fraction(0)]
    for cycle in range(cycles):
        starts.append(starts[-1] + growth**cycle)
    starts = [total * part / starts[-1] for part in starts]
    schedule = ll.schedules.cosine_restarts(start, final, total=total, cycles=cycles, growth=growth)
    for step in range(total):
        cycle = bisect_right(starts, step) - 1
        progress = (step - starts[cycle]) / (starts[cycle + 1] - starts[cycle])
        expected = final + (start - final) * (1 + math.cos(math.pi * float(progress))) / 2
        assert abs(schedule(step) - expected) <= 8 * EPS * max(start, final)


@quick
@given(rates, rates, counts, st.sampled_from([ll.schedules.linear, ll.schedules.cosine, ll.schedules.polynomial]))
def test_a_decay_begins_and_ends_exactly_and_lies_between(start, final, total, decay):
    schedule = decay(start, final, total=total)
    assert schedule(0) == start
    assert {schedule(step) for step in range(total, total + 20)} == {final}
    slack = 2 * EPS * max(start, final)
    line = sorted(values_of(schedule, total + 1), reverse=start > final)
    for value, ordered in zip(values_of(schedule, total + 1), line, strict=True):
        assert min(start, final) - slack <= value <= max(start, final) + slack
        assert abs(value - ordered) <= slack


@quick
@given(rates, st.integers(0, 20), st.floats(-1.0, 1.0))
def test_warmup_ends_where_the_schedule_begins(peak, steps, start):
    inner = ll.schedules.linear(peak, total=10)
    schedule = ll.schedules.warmup(inner, steps, start=start)
    assert [schedule(steps + step) for step in range(30)] == values_of(inner, 30)
    assert_close(schedule, [start + (peak - start) * step / steps for step in range(steps)], 4, max(peak, 1.0))
    assert steps == 0 or schedule(0) == start


def test_warmup_cosine_composes_from_its_parts():
    whole = ll.warmup_cosine(3e-4, warmup=100, total=2000, final=1e-5)
    parts = ll.schedules.warmup(ll.schedules.cosine(3e-4, 1e-5, total=1900), 100)
    assert_close(parts, values_of(whole, 2100), 2, 3e-4)


def test_warmup_may_take_the_whole_run():
    for schedule in (ll.schedules.warmup_linear, ll.warmup_cosine):
        assert values_of(schedule(1.0, warmup=4, total=4, final=0.1), 6) == [0.0, 0.25, 0.5, 0.75, 0.1, 0.1]


EVERY_KIND = [
    ll.schedules.constant(1),
    ll.schedules.linear(1, 0, total=5),
    ll.schedules.cosine(1, total=5, cycles=2),
    ll.schedules.polynomial(1, total=5, power=2),
    ll.schedules.exponential(1, factor=2),
    ll.schedules.step_decay(1, every=2, factor=1),
    ll.schedules.multistep_decay(1, boundaries=[2, 3], factor=1),
    ll.schedules.inverse_sqrt(1, timescale=4),
    ll.schedules.cosine_restarts(1, total=5, cycles=2, growth=2),
    ll.schedules.cyclic(0, 1, rise=2, fall=3),
    ll.schedules.one_cycle(0, 1, 0, total=5),
    ll.schedules.warmup(ll.schedules.cosine(1, total=3), 2),
    ll.schedules.warmup_linear(1, warmup=2, total=5),
    ll.warmup_cosine(1, warmup=2, total=5),
    ll.schedules.warmup_stable_decay(1, warmup=2, decay=2, total=5),
    ll.schedules.join([ll.schedules.constant(1), ll.schedules.linear(1, total=3)], [2]),
    ll.schedules.scaled(ll.schedules.constant(1), ll.schedules.linear(1, total=3)),
    ll.schedules.scaled(ll.schedules.constant(1), 2),
]


@pytest.mark.parametrize("schedule", EVERY_KIND, ids=repr)
def test_a_schedule_is_a_record_that_reads_as_its_code(schedule):
    assert eval(repr(schedule), vars(ll.schedules)) == schedule
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert hash(copy) == hash(schedule)
    assert values_of(copy, 20) == values_of(schedule, 20)
    assert {type(value) for value in values_of(schedule, 20)} == {float}
    with pytest.raises((AttributeError, TypeError)):
        schedule.start = 2.0


def test_every_kind_is_covered():
    base = ll.schedules.constant.__mro__[1]
    kinds = {kind for kind in vars(ll.schedules).values() if isinstance(kind, type) and issubclass(kind, base)}
    assert {type(schedule) for schedule in EVERY_KIND} == kinds


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ll.schedules.constant(math.nan), "constant: value must be a finite number, got nan"),
        (lambda: ll.schedules.constant("0.1"), "constant: value must be a finite number, got '0.1'"),
        (lambda: ll.schedules.linear(True, total=5), "linear: start must be a finite number, got True"),
        (lambda: ll.schedules.cosine(1.0, math.inf, total=5), "cosine: final must be a finite number, got inf"),
        (lambda: ll.schedules.cosine(1.0, total=0), "cosine: total must be an int of at least 1, got 0"),
        (lambda: ll.schedules.linear(1.0, total=-3), "linear: total must be an int of at least 1, got -3"),
        (lambda: ll.schedules.linear(1.0, total=10.0), "linear: total must be an int of at least 1, got 10.0"),
        (lambda: ll.schedules.linear(1.0, total=True), "linear: total must be an int of at least 1, got True"),
        (lambda: ll.schedules.polynomial(1.0, total=5, power=0), "polynomial: power must be above 0, got 0.0"),
        (lambda: ll.schedules.step_decay(1.0, every=0), "step_decay: every must be an int of at least 1, got 0"),
        (lambda: ll.schedules.multistep_decay(1.0, boundaries=[3, 3]), "boundaries must be ints .* increase, got"),
        (lambda: ll.schedules.multistep_decay(1.0, boundaries=[0, 3]), "boundaries must be ints .* increase, got"),
        (
            lambda: ll.schedules.join([ll.schedules.constant(1.0)] * 3, [5, 2]),
            "join: boundaries must be ints .* increase, got",
        ),
        (
            lambda: ll.schedules.join([ll.schedules.constant(1.0)] * 2, [2.0]),
            "join: boundaries must be ints .* increase, got",
        ),
        (
            lambda: ll.schedules.join([ll.schedules.constant(1.0)], [2]),
            "join: there is one boundary .* got 1 schedules and 1 bound",
        ),
        (lambda: ll.schedules.join([], []), "join: there is one boundary .* got 0 schedules and 0 boundaries"),
        (
            lambda: ll.schedules.warmup(ll.schedules.constant(1.0), -1),
            "warmup: steps must be an int of at least 0, got -1",
        ),
        (lambda: ll.schedules.warmup_linear(1.0, warmup=-1, total=5), "warmup must be an int of at least 0, got -1"),
        (lambda: ll.warmup_cosine(1.0, warmup=6, total=5), "warmup_cosine: warmup=6 is above total=5"),
        (lambda: ll.warmup_cosine(math.nan, warmup=1, total=5), "warmup_cosine: peak must be a finite number"),
        (lambda: ll.schedules.warmup_stable_decay(1.0, warmup=3, decay=3, total=5), "are more than total=5 together"),
        (
            lambda: ll.schedules.warmup_stable_decay(1.0, warmup=1, decay=1, total=5, decay_shape="sqrt"),
            "decay_shape must be one of 'linear', 'cosine', '1-sqrt', got 'sqrt'",
        ),
        (
            lambda: ll.schedules.one_cycle(0.0, 1.0, 0.0, total=5, rise=1.0),
            r"rise must be a fraction in \[0, 1\), got 1.0",
        ),
        (
            lambda: ll.schedules.one_cycle(0.0, 1.0, 0.0, total=5, rise=0.6, three_phase=True),
            "with three phases, got 0.6",
        ),
        (lambda: ll.schedules.cosine_restarts(1.0, total=5, cycles=0), "cycles must be an int of at least 1, got 0"),
        (
            lambda: ll.schedules.scaled(ll.schedules.constant(1.0), math.nan),
            "scaled: factor must be a finite number, got nan",
        ),
    ],
)
def test_a_bad_value_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_number_in_place_of_a_schedule_is_named():
    with pytest.raises(TypeError, match=r"warmup: schedule: expected a function of the step .* got 0.1"):
        ll.schedules.warmup(0.1, 100)
    with pytest.raises(TypeError, match=r"join: schedules: expected a function of the step .* got 0.1"):
        ll.schedules.join([ll.schedules.constant(1.0), 0.1], [100])
