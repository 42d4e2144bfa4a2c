import functools
import itertools
import math
import pickle
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared import examples, one_report

import looplib as ll
from looplib.state import end_epoch
from looplib.types import TrainState

quick = settings(deadline=None, max_examples=examples(200))


def consume(state, batch_samples, updates):
    """Change the counts as a train step does."""
    batch = state.batch + 1
    ends = batch == state.epoch_length
    return state.replace(
        step=state.step + updates,
        epoch=state.epoch + ends,
        batch=0 if ends else batch,
        samples=state.samples + batch_samples,
        batch_samples=batch_samples,
        batch_steps=updates,
    )


def answers(predicate, batches, epoch_length, resumes=()):
    """A predicate's answers after every batch of a run that is stored and begun again at some of them."""
    state = TrainState(epoch_length=epoch_length)
    found = []
    for index, batch in enumerate(batches):
        if index in resumes:
            predicate, state = pickle.loads(pickle.dumps((predicate, state)))
        state = consume(state, *batch)
        found.append(predicate(state))
    return found


class Points:
    """A predicate as it should not be: it remembers the next point and counts from there."""

    def __init__(self, points):
        self.points = iter(points)
        self.next = next(self.points, math.inf)

    def __call__(self, now):
        fired = False
        while self.next <= now:
            fired, self.next = True, next(self.points, math.inf)
        return fired


def counted(unit, asked, batches, epoch_length):
    """The answers of a function of the steps, samples or epochs so far, counted here batch by batch."""
    counts = {"steps": 0, "samples": 0, "epochs": Fraction(0)}
    found = []
    for batch_samples, updates in batches:
        counts["steps"] += updates
        counts["samples"] += batch_samples
        counts["epochs"] += Fraction(1, epoch_length)
        found.append(asked(counts[unit]))
    return found


some_batches = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 1, 1, 0, 2, 3])), max_size=60)
epoch_lengths = st.integers(1, 12)
some_resumes = st.sets(st.integers(0, 60))
parts_of_epochs = st.builds(Fraction, st.integers(1, 30), st.integers(1, 30))

UNITS = {
    "steps": (ll.every_n_steps, ll.after_steps),
    "samples": (ll.predicates.every_n_samples, ll.predicates.after_samples),
    "epochs": (ll.every_n_epochs, ll.after_epochs),
}


def plain(number):
    """As users write it."""
    return int(number) if number % 1 == 0 else float(number)


def within(points, first, last=math.inf):
    return itertools.takewhile(lambda point: point <= last, itertools.dropwhile(lambda point: point < first, points))


@st.composite
def counting(draw):
    """A unit, a predicate that counts in it, and a function that makes what it should answer to each count."""
    kind, unit = draw(st.sampled_from(["every", "every", "after", "at"])), draw(st.sampled_from(list(UNITS)))
    every, after = UNITS[unit]
    numbers = parts_of_epochs if unit == "epochs" and draw(st.booleans()) else st.integers(1, 40)
    n = draw(numbers)
    if kind == "after":
        return unit, after(plain(n)), lambda: lambda now: now >= n
    window = sorted(draw(st.lists(numbers, max_size=2)))
    if kind == "every":
        predicate, points = every(plain(n)), functools.partial(itertools.count, n, n)
    elif unit == "steps":
        steps = draw(st.sets(st.integers(1, 40), min_size=1))
        return unit, ll.predicates.at_step(*steps), lambda: Points(sorted(steps))
    else:
        unit, predicate, points, window = "epochs", ll.at_epoch_end(), functools.partial(itertools.count, 1), [1, 3]
    if not window:
        return unit, predicate, lambda: Points(points())
    first, *last = map(plain, window)
    return unit, predicate.between(first).between(0, *last), lambda: Points(within(points(), *window))


TENTHS = "epochs", ll.every_n_epochs(0.1).between(0.2, 0.4), lambda: Points([Fraction(n, 10) for n in (2, 3, 4)])


@settings(quick, max_examples=examples(500))
@given(counting(), some_batches, epoch_lengths, some_resumes)
@example(TENTHS, [(1, 1)] * 30, 30, ())
def test_a_predicate_fires_where_a_counter_does_however_often_resumed(made, batches, epoch_length, resumes):
    unit, predicate, asked = made
    expected = counted(unit, asked(), batches, epoch_length)
    assert answers(predicate, batches, epoch_length) == expected
    assert answers(predicate, batches, epoch_length, resumes) == expected


@quick
@given(some_batches, epoch_lengths, st.integers(1, 14), some_resumes, st.integers(0, 8), st.integers(0, 8))
def test_batches_are_counted_within_the_epoch_as_enumerate_does(batches, epoch_length, n, resumes, first, more):
    expected, windowed = [], []
    for begin in range(0, len(batches), epoch_length):
        for index, _ in enumerate(batches[begin : begin + epoch_length], 1):
            expected.append(index % n == 0)
            windowed.append(index % n == 0 and first <= index <= first + more)
    predicate = ll.predicates.every_n_batches(n)
    assert answers(predicate, batches, epoch_length, resumes) == expected
    assert answers(predicate.between(first, first + more), batches, epoch_length, resumes) == windowed
    at_ends = [fired or index % epoch_length == 0 for index, fired in enumerate(expected, 1)]
    assert answers(predicate | ll.at_epoch_end(), batches, epoch_length, resumes) == at_ends


@quick
@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 4))
def test_batches_of_a_stream_are_counted_before_end_epoch(lengths, n):
    state, fires = TrainState(), ll.predicates.every_n_batches(n)
    assert not fires(state)
    for length in lengths:
        for index in range(1, length + 1):
            state = consume(state, 4, 1)
            assert fires(state) == (index % n == 0)
        state = end_epoch(state)
        assert not fires(state)


def test_batches_of_a_real_run_are_counted_beside_a_plain_loop():
    model = torch.nn.Linear(2, 1)
    optimizer = ll.chain(ll.skip_nonfinite(), ll.optimizer(torch.optim.SGD, lr=0.1))
    train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer, donate=True)
    data = torch.ones(12, 2)
    data[5] = math.inf  # its update is skipped, and its batch counts
    loader = ll.make_loader(data, batch_size=2, order=ll.data.sequential())
    state, fires = ll.init_state(model, optimizer, epoch_length=len(loader)), ll.predicates.every_n_batches(3)
    fired = []
    for _ in range(2):
        for index, batch in enumerate(loader(state), 1):
            state, _ = train_step(state, batch)
            assert fires(state) == (index % 3 == 0)
            fired.append(fires(state))
            # an update that belongs to no batch
            zeros = {name: torch.zeros_like(tensor) for name, tensor in state.params.items()}
            state = ll.apply_gradients(optimizer, state, zeros, donate=True)[0]
            assert not fires(state)
    assert fired == [False, False, True] * 4


@quick
@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 4))
def test_epochs_of_a_stream_end_with_end_epoch(lengths, n):
    state = TrainState()
    for epoch, length in enumerate(lengths, 1):
        for _ in range(length):
            state = consume(state, 4, 1)
            assert not ll.at_epoch_end()(state)
            assert not ll.every_n_epochs(n)(state)
        state = end_epoch(state)
        assert ll.at_epoch_end()(state)
        assert ll.every_n_epochs(n)(state) == (epoch % n == 0)


def test_a_fraction_of_a_streams_epoch_is_refused():
    with pytest.raises(ValueError, match=r"every_n_epochs\(0.25\): a fraction of an epoch needs state.epoch_length"):
        ll.every_n_epochs(0.25)(TrainState(batch=3))
    with pytest.raises(ValueError, match=r"after_epochs\(1.5\): a fraction .* use after_steps or after_samples, or"):
        ll.after_epochs(1.5)(TrainState(batch=3))
    assert ll.after_epochs(2.0)(TrainState(epoch=2))


def test_samples_without_those_of_the_last_batch_are_refused_instead_of_never_firing():
    every = ll.predicates.every_n_samples(100)
    with pytest.raises(ValueError, match=r"every_n_samples\(100\): .*samples=128 and batch_samples=0; give both"):
        every(TrainState(step=2, samples=128))
    counts = range(0, 640, 64)
    assert [n for n in counts if every(TrainState(samples=n, batch_samples=min(n, 64)))] == [128, 256, 320, 448, 512]
    assert not every(end_epoch(TrainState(samples=128, batch=2, batch_samples=64)))
    assert not every(TrainState(samples=128, batch=3))  # after an empty batch


def test_nothing_fires_before_the_first_update():
    fresh = TrainState(epoch_length=4)
    skipped = fresh.replace(batch=1, samples=2, batch_samples=2, batch_steps=0)
    assert skipped.skipped
    by_steps = [ll.every_n_steps(1), ll.predicates.at_step(1), ll.after_steps(1)]
    fractions, samples = ll.every_n_epochs(0.5), ll.predicates.every_n_samples(1)
    for predicate in (*by_steps, fractions, samples, ll.every_n_epochs(1), ll.at_epoch_end()):
        assert predicate(fresh) is False
    for predicate in by_steps:
        assert predicate(skipped) is False
    for _, after in UNITS.values():
        assert after(0)(fresh)


# Algebra


def test_combinations_are_those_of_their_answers():
    large = ll.predicates.predicate(lambda state: state.batch_samples > 4)
    kinds = [
        ll.every_n_steps(2),
        ll.predicates.at_step(1, 3),
        ll.every_n_epochs(0.5),
        ~ll.after_steps(2),
        large & ll.at_epoch_end(),
    ]
    state = TrainState(epoch_length=3)
    for batch_samples in (1, 9, 5, 2, 3, 7):
        state = consume(state, batch_samples, updates=batch_samples % 4)
        for a, b in itertools.product(kinds, repeat=2):
            assert (a & b)(state) is (a(state) and b(state))
            assert (a | b)(state) is (a(state) or b(state))
            assert (~a)(state) is (not a(state))


def test_the_right_side_is_asked_only_where_the_left_leaves_it_open():
    asked = []
    spy = ll.predicates.predicate(lambda state: asked.append(state.step) or True)
    (ll.after_steps(5) & spy)(TrainState(step=1))
    (ll.after_steps(5) | spy)(TrainState(step=6))
    assert asked == []
    (ll.after_steps(5) & spy)(TrainState(step=7))
    (ll.after_steps(5) | spy)(TrainState(step=2))
    assert asked == [7, 2]


# Records


TEXTS = [
    "every_n_steps(5)",
    "every_n_steps(5).between(8, 25)",
    "every_n_steps(5).between(0, 0)",
    "every_n_samples(100)",
    "every_n_epochs(1)",
    "every_n_epochs(0.25)",
    "every_n_epochs(0.25).between(1.5)",
    "at_step(10, 100)",
    "at_epoch_end()",
    "after_steps(10)",
    "after_epochs(1.5)",
    "after_samples(10)",
    "early_stopping(patience=3, key='loss')",
    "at_best(key='loss')",
    "~at_epoch_end()",
    "((at_step(1) & ~at_epoch_end()) | after_steps(3))",
]


@one_report
@pytest.mark.parametrize("text", TEXTS)
def test_a_predicate_is_a_record_that_reads_as_its_code(text):
    predicate = eval(text, vars(ll.predicates))
    assert repr(predicate) == text
    copy = pickle.loads(pickle.dumps(predicate))
    assert copy == predicate == eval(text, vars(ll.predicates))
    assert hash(copy) == hash(predicate)
    assert not hasattr(predicate, "__dict__")


def test_a_function_is_a_predicate_under_its_name():
    @ll.predicates.predicate
    def large_batch(state):
        return torch.tensor(state.batch_samples > 4)

    assert repr(large_batch & ll.predicates.at_step(1)).endswith("large_batch) & at_step(1))")
    assert large_batch(TrainState(batch_samples=5)) is True
    assert large_batch(TrainState(batch_samples=4)) is False
    with pytest.raises(TypeError, match="predicate: expected a function of the state, got 5"):
        ll.predicates.predicate(5)


# Errors


@one_report
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ll.every_n_steps(True), r"every_n_steps\(True\)"),
        (lambda: ll.every_n_steps(2.5), "n .* 2.5"),
        (lambda: ll.every_n_steps(5).between(1, 8).between(9), r"between\(9, 8\)"),
        (lambda: ll.every_n_steps(5).between(-1, 8), "first .* -1"),
        (lambda: ll.every_n_epochs(1e-9), "n"),
        (lambda: ll.predicates.at_step(1, 2.0), "2.0"),
        (lambda: ll.after_steps(-1), "-1"),
        (lambda: ll.after_epochs(math.inf), "inf"),
        (lambda: ll.predicates.every_seconds(0), "every_seconds"),
    ],
)
def test_a_bad_value_is_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_all_but_the_first_setting_are_given_by_name():
    for predicate in (ll.every_n_steps, ll.every_n_epochs):
        with pytest.raises(TypeError):
            predicate(2, 1)
    with pytest.raises(TypeError):
        ll.predicates.BestSoFar("loss", "min")


@one_report
@pytest.mark.parametrize("text", [*TEXTS, "every_seconds(60)"])
def test_what_a_predicate_cannot_do_is_refused_by_name(text):
    predicate = eval(text, vars(ll.predicates))
    for found in (5, None, (TrainState(), {}), {"loss": 1.0}, torch.tensor(5), SimpleNamespace(n=5)):
        if not isinstance(predicate, ll.predicates.every_seconds):
            with pytest.raises(TypeError, match=r"state is .*TrainState.*ll\.init_state.*\(state\)"):
                predicate(found)
    for use in (bool, lambda p: p and True, lambda p: True and p and True, lambda p: p or True, lambda p: not p):
        with pytest.raises(TypeError, match=r"`if predicate\(state\):`.* & \| ~"):
            use(predicate)
    for other in (True, None, len, lambda state: True):
        for combine in (lambda p, other: p & other, lambda p, other: p | other):
            with pytest.raises(TypeError, match=r"predicates.*ll\.predicates\.predicate"):
                combine(predicate, other)
    if not text.startswith(("every_n", "at_epoch_end")):
        with pytest.raises(TypeError, match=r"between\(8, 25\).*after_steps\(first\)"):
            predicate.between(8, 25)


# Clocks


def test_clocks_by_a_clock_of_our_own():
    times = [0.0, 59.0, 60.0, 61.0, 119.9, 130.0, 189.9, 190.0]
    for kind, fires_at in (("every_seconds", [60.0, 130.0, 190.0]), ("after_seconds", times[2:])):
        now = iter(times)
        predicate = getattr(ll.predicates, kind)(60, clock=lambda now=now: next(now))
        assert [time for time in times[1:] if predicate(TrainState())] == fires_at


def test_a_clock_on_the_right_keeps_its_firing_for_a_left_side_that_says_no():
    now = iter([0.0, 70.0])
    save_now = ll.every_n_steps(10) & ll.predicates.every_seconds(60, clock=lambda: next(now))
    assert [save_now(TrainState(step=step)) for step in (8, 9, 10)] == [False, False, True]
