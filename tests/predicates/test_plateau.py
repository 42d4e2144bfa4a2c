"""Plateaus against torch's ReduceLROnPlateau and by their definition."""

import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import examples, one_report
from torch.optim.lr_scheduler import ReduceLROnPlateau

import looplib as ll
from looplib.predicates import Plateau, at_plateau

modes, kinds = st.sampled_from(["min", "max"]), st.sampled_from(["rel", "abs"])
waits, shares = st.integers(0, 4), st.integers(0, 7).map(lambda n: n / 8)
# Eighths, so that a value can be just at the threshold, and few of them, so that a metric can stay where it is.
values = st.lists(st.integers(0, 12).map(lambda n: n / 8), max_size=40)


@settings(deadline=None, max_examples=examples(300))
@given(values, modes, kinds, waits, waits, shares)
def test_it_counts_as_torch_does(metrics, mode, kind, patience, cooldown, threshold):
    sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    options = {"patience": patience, "cooldown": cooldown, "threshold": threshold, "threshold_mode": kind}
    theirs, record, plateaus = ReduceLROnPlateau(sgd, mode=mode, factor=0.5, eps=0, **options), None, 0
    for step, value in enumerate(metrics):
        before = sgd.param_groups[0]["lr"]
        theirs.step(value)
        reduced = sgd.param_groups[0]["lr"] < before
        plateaus += reduced
        record = (record or Plateau("score", mode=mode, **options)).update(value, step)
        assert (record.reference, record.waited) == (theirs.best, theirs.num_bad_epochs)
        assert (record.cooling, record.count) == (theirs.cooldown_counter, plateaus)
        state = ll.TrainState(step=step, extra={"plateau": record})
        assert at_plateau()(state) == reduced
        assert not at_plateau()(state.replace(step=step + 1))


def test_the_defaults_are_torchs():
    theirs, ours = ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0)), Plateau("loss")
    for name in ("mode", "patience", "threshold", "threshold_mode", "cooldown"):
        assert getattr(ours, name) == getattr(theirs, name)


@settings(deadline=None)
@given(st.lists(st.floats(-4, 4), min_size=1, max_size=40), modes, shares)
def test_a_relative_improvement_is_a_share_of_the_size_of_the_best_also_below_zero(metrics, mode, threshold):
    better = {"min": -1, "max": 1}[mode]
    record = Plateau("score", mode=mode, threshold=threshold).update(metrics[0], 0)
    for step, value in enumerate(metrics[1:], 1):
        before, record = record.reference, record.update(value, step)
        gain, least = better * (value - before), threshold * abs(before)
        if not math.isclose(gain, least, rel_tol=1e-9, abs_tol=1e-12):
            assert (record.reference == value) == (gain > least) or value == before
        assert better * record.reference >= better * before


@settings(deadline=None)
@given(values.filter(len), st.data())
def test_a_resumed_record_continues(metrics, data):
    at = data.draw(st.integers(0, len(metrics)))
    whole = record = Plateau("loss", patience=1, cooldown=2)
    for step, value in enumerate(metrics):
        whole = whole.update(value, step)
        if step == at:
            leaves, structure = torch.utils._pytree.tree_flatten(pickle.loads(pickle.dumps(record)))
            record = torch.utils._pytree.tree_unflatten(leaves, structure)
        record = record.update(value, step)
    assert record == whole
    assert eval(repr(record)) == whole


def test_a_checkpoint_holds_what_was_counted_and_the_settings_are_the_new_ones(tmp_path):
    model, ckpt = torch.nn.Linear(1, 1), ll.checkpoint_io(tmp_path)

    def fresh(record):
        return ll.init_state(model).replace(extra={"plateau": record})

    state = fresh(Plateau("loss", patience=1, cooldown=3))
    with pytest.warns(UserWarning, match=r"'plateau'.* learning rate would never be lowered.*reduce_on_plateau"):
        ckpt.save(state, {"loss": 0.1})
    for step in range(1, 5):
        state = ll.update_best(state.replace(step=step), {"loss": 0.5}, key="plateau")
    ckpt.save(state)
    expected = dataclasses.replace(state.extra["plateau"], patience=7)
    assert ckpt.restore(fresh(Plateau("loss", patience=7, cooldown=3))).extra["plateau"] == expected
    assert (expected.count, expected.cooling, expected.reached) == (1, 2, None)
    with pytest.raises(ValueError, match="max accuracy"):
        ckpt.restore(fresh(Plateau("accuracy")))


def test_nan_is_no_improvement():
    record = Plateau("loss", patience=1)
    for step, value in enumerate([math.nan, math.nan, math.inf, 0.5]):
        if math.isnan(value):
            with pytest.warns(UserWarning, match=f"NaN at step {step}"):
                record = record.update(value, step)
        else:
            record = record.update(value, step)
        assert at_plateau()(ll.TrainState(step=step, extra={"plateau": record})) == (step == 1)
    assert record.reference == 0.5


@one_report
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Plateau("loss", patience=-1), r"Plateau\('loss'\): patience is -1"),
        (lambda: Plateau("loss", cooldown=0.5), r"cooldown is 0\.5"),
        (lambda: Plateau("loss", threshold_mode="relative"), "threshold_mode is 'relative'"),
        (lambda: Plateau("loss", threshold=1.0), "threshold is .*below 1"),
        (lambda: Plateau("loss", threshold=-0.1), "threshold is .*-0.1"),
        (lambda: Plateau("fitness"), "'fitness'.* mode="),
        (lambda: at_plateau()(ll.TrainState()), r"no Plateau in state.extra\['plateau'\].*Plateau\(\"eval/loss"),
        (
            lambda: at_plateau(key="best")(ll.TrainState(extra={"best": ll.predicates.BestSoFar("loss")})),
            "no Plateau .*BestSoFar",
        ),
        (
            lambda: ll.early_stopping(1, key="p")(ll.TrainState(extra={"p": Plateau("loss")})),
            "no BestSoFar .*Plateau",
        ),
    ],
)
def test_errors_name_what_was_found(make, named):
    with pytest.raises(ValueError, match=named):
        make()
