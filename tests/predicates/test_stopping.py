"""Best-so-far and early stopping against transformers' callback, torch's own bookkeeping and plain definitions."""

import copy
import dataclasses
import math
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import examples, mean_square
from torch import nn
from transformers import EarlyStoppingCallback, TrainerState
from transformers.trainer import Trainer

import looplib as ll
from looplib.predicates import BestSoFar, at_best, early_stopping, update_best

quick = settings(deadline=None, max_examples=examples(200))
modes = st.sampled_from(["min", "max"])
# Eighths, so that differences are exact and equality with min_delta happens.
eighths = st.integers(-40, 40).map(lambda n: n / 8)
some_values = st.lists(eighths, max_size=40)
some_deltas = st.integers(0, 8).map(lambda n: n / 8)


def begin(record, step=0):
    return ll.TrainState(step=step, extra={"best": record})


# Against others


@quick
@given(some_values, modes, some_deltas, st.booleans())
def test_the_best_is_saved_where_transformers_does(values, mode, delta, moving):
    args = SimpleNamespace(metric_for_best_model="eval_loss", greater_is_better=mode == "max", save_strategy="best")
    theirs = TrainerState()
    state, save_now = begin(BestSoFar("score", mode=mode, min_delta=delta if moving else 0.0)), at_best()
    assert not save_now(state)
    for value in values:
        theirs.global_step += 10 if moving else 0  # or several evaluations at one step
        state = update_best(state.replace(step=theirs.global_step), {"score": value})
        best = Trainer._determine_best_metric(SimpleNamespace(args=args, state=theirs), {"eval_loss": value}, None)
        assert save_now(state) is best
        assert not save_now(state.replace(step=state.step + 1))
        assert (save_now & ~ll.predicates.at_step(state.step + 1) | ll.predicates.at_step(state.step + 2))(
            state
        ) is best


@quick
@given(some_values, modes, some_deltas)
def test_it_waits_as_torchs_plateau_does(values, mode, delta):
    sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        sgd, mode=mode, threshold=delta, threshold_mode="abs", patience=len(values)
    )
    record = BestSoFar("score", mode=mode, min_delta=delta)
    for step, value in enumerate(values):
        plateau.step(value)
        record = record.update(value, step)
        assert (record.reference, record.waited) == (plateau.best, plateau.num_bad_epochs)


@quick
@given(some_values, modes, some_deltas, st.integers(1, 5))
def test_compared_with_the_best_it_waits_as_transformers_callback_does(values, mode, delta, patience):
    args, callback = SimpleNamespace(greater_is_better=mode == "max"), EarlyStoppingCallback(patience, delta)
    record, best = BestSoFar("score", mode=mode, min_delta=delta, cumulative=False), None
    for step, value in enumerate(values):
        callback.check_metric_value(args, SimpleNamespace(best_metric=best), None, value)
        best = (
            value if best is None else {"min": min, "max": max}[mode](best, value)
        )  # as the Trainer does afterwards
        record = record.update(value, step)
        assert at_best()(begin(record, step)) == (record.best_step == step)
        assert (record.waited, record.reference) == (callback.early_stopping_patience_counter, best)


# Survival


def test_a_checkpoint_holds_what_was_counted_and_the_settings_are_the_new_ones(tmp_path):
    model = torch.nn.Linear(1, 1)
    ckpt = ll.checkpoint_io(tmp_path, monitor="eval_loss")

    def fresh(record):
        return ll.init_state(model).replace(extra={"best": record})

    state = fresh(BestSoFar("eval_loss"))
    for step, value in ((10, 0.3), (20, 0.1), (30, 0.2)):
        state = update_best(state.replace(step=step), {"eval_loss": value})
    ckpt.save(state, {"eval_loss": 0.2})
    restored = ckpt.restore(fresh(BestSoFar("eval_loss", min_delta=0.5)))
    expected = dataclasses.replace(state.extra["best"], min_delta=0.5)
    assert restored.extra["best"] == expected
    assert (expected.best, expected.best_step, expected.waited) == (0.1, 20, 1)
    assert ckpt.restore(fresh(BestSoFar("eval_loss"))).extra == state.extra
    for other in (BestSoFar("eval_accuracy"), BestSoFar("score", mode="max")):
        with pytest.raises(ValueError, match=f"{other.mode} {other.monitor}"):
            ckpt.restore(fresh(other))


# Records


def test_several_records_stand_side_by_side():
    state = ll.TrainState(extra={"loss": BestSoFar("eval/loss"), "accuracy": BestSoFar("eval/accuracy"), "mine": 7})
    for step, (loss, accuracy) in enumerate([(0.5, 0.8), (0.4, 0.7), (0.6, 0.9)]):
        scores = {"eval/loss": loss, "eval/accuracy": accuracy}
        state = update_best(update_best(state.replace(step=step), scores, "loss"), scores, key="accuracy")
    assert (state.extra["loss"].best_step, state.extra["accuracy"].best_step, state.extra["mine"]) == (1, 2, 7)
    assert (early_stopping(1, key="accuracy") | early_stopping(1, key="loss"))(state)
    assert not early_stopping(1, key="accuracy")(state)


# Errors


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: BestSoFar("loss", mode="low"), "mode is 'low'"),
        (lambda: BestSoFar("fitness"), "'fitness'.* mode="),
        (lambda: early_stopping(0), r"early_stopping\(patience=0\)"),
        (lambda: update_best(begin(BestSoFar("eval/loss")), {"loss": 0.5}), r"'eval/loss'.*'best'.* 'loss'"),
        (lambda: early_stopping(1)(ll.TrainState()), r"state.extra\['best'\].* None"),
        (lambda: early_stopping(1, key="x")(begin(BestSoFar("loss"))), r"state.extra\['x'\].* 'best'"),
        (lambda: update_best(begin(0.5), {}), r"state.extra\['best'\].* float"),
        (lambda: update_best(begin(BestSoFar("loss")), [{"loss": 0.5}]), "scores are .*list.* one record for all"),
    ],
)
@pytest.mark.every_case
def test_errors_name_what_was_found(make, named):
    with pytest.raises((ValueError, TypeError), match=named):
        make()


@pytest.mark.parametrize(
    ("names", "mode"),
    [
        ("loss eval/loss train_loss loss/val error_rate dev/ppl perplexity mean_absolute_error", "min"),
        (
            "accuracy eval/top5_accuracy eval_auc_accuracy acc@1 macro_f1_score eval/all/user_auc bleu4 rougeL mAP@50 r2",
            "max",
        ),
        ("score eval/sum x -loss neg_loss 1-accuracy one_minus_acc accuracy_drop best_loss_step", None),
    ],
)
@pytest.mark.every_case
def test_a_known_name_chooses_its_direction_and_others_are_asked_for_it(names, mode, tmp_path):
    for name in names.split():
        if mode is None:
            for make in (BestSoFar, lambda name: ll.checkpoint_io(tmp_path, monitor=name)):
                with pytest.raises(ValueError, match=f"BestSoFar\\('{name}', mode="):
                    make(name)
            continue
        assert BestSoFar(name).mode == mode


def test_one_record_serves_stopping_and_the_best_checkpoint(tmp_path):
    record = BestSoFar("fitness", mode="max")
    assert eval(repr(record)) == pickle.loads(pickle.dumps(record)) == record
    ckpt = ll.checkpoint_io(tmp_path, keep_last=1, keep_best=1, monitor=record)
    state, done = begin(record), early_stopping(2)
    for step, value in enumerate([0.1, 0.7, 0.3, 0.2]):
        assert not done(state)
        state = update_best(state.replace(step=step), {"fitness": value})
        ckpt.save(state, {"fitness": value})
    assert done(state)
    assert ckpt.best().step == ckpt.restore(state, "best").step == state.extra["best"].best_step == 1
    for wrong in (len, 3):
        for make in (BestSoFar, lambda wrong: ll.checkpoint_io(tmp_path, monitor=wrong)):
            with pytest.raises(TypeError, match=r"monitor is .*'eval/loss'"):
                make(wrong)


def test_a_direction_that_the_name_contradicts_is_warned_of_once():
    with pytest.warns(UserWarning, match="mode='min' takes the lowest 'accuracy' for the best") as caught:
        record = BestSoFar("accuracy", mode="min")
    assert record.update(0.5, 1).update(0.4, 2).best == 0.4
    assert (len(caught), caught[0].filename) == (1, __file__)


def test_nan_is_an_evaluation_without_an_improvement(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path, monitor="eval/loss", keep_last=1)
    state = ll.TrainState(extra={"best": BestSoFar("eval/loss")})
    for step, value in enumerate([math.nan, 0.5, math.nan, math.nan]):
        state, scores = state.replace(step=step), {"eval/loss": value}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = update_best(state, scores)
            ckpt.save(state, scores)
        told = "\n".join(str(warning.message) for warning in caught)
        assert (f"is NaN at step {step}" in told) == ("NaN: the checkpoint is sav" in told) == math.isnan(value)
        assert at_best()(state) == (step == 1)
        assert early_stopping(2)(state) == (step == 3)
    record = state.extra["best"]
    assert (record.best, record.best_step, record.reference, record.waited) == (0.5, 1, 0.5, 2)
    assert [checkpoint.step for checkpoint in ckpt.steps()] == [1, 3]  # the best and the latest
    assert (ckpt.best().step, ckpt.latest().step) == (1, 3)


def test_a_save_warns_of_a_record_that_was_never_updated(tmp_path):
    """Without update_best, early_stopping would never stop the run."""
    state = ll.TrainState(step=1, extra={"best": ll.predicates.BestSoFar("eval/loss"), "more": 3})
    ckpt, scores = ll.checkpoint_io(tmp_path), {"eval/loss": 0.5}
    with pytest.warns(
        UserWarning, match=r"'eval/loss', but state\.extra\['best'\].* ll\.update_best\(state, scores\)"
    ) as caught:
        ckpt.save(state, scores)
    assert caught[0].filename == __file__
    # filterwarnings = error: these are silent.
    ckpt.save(state.replace(step=2))
    ckpt.save(state.replace(step=3), {"eval/accuracy": 0.5})
    ckpt.save(ll.update_best(state.replace(step=4), scores), scores)
    ckpt.save(state.replace(step=5, extra=None), scores)


def test_a_record_that_never_sees_its_scores_is_named_once_they_were_returned_twice():
    model, sgd = nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    loader = ll.make_loader(torch.arange(4.0)[:, None], batch_size=2)
    train_step = ll.make_train_step(ll.make_grad_fn(model, mean_square), sgd)
    eval_step = ll.make_eval_step(model, mean_square)
    done = ll.after_epochs(9) | ll.early_stopping(patience=2)

    def run(every=1, updates=True, before=False, of_training=False, asks_in_body=True):
        state = ll.init_state(model, sgd, loader=loader, extra={"best": BestSoFar("eval/loss")})
        if before:  # a baseline, which is only looked at
            ll.evaluate(eval_step, state, loader, prefix="eval/")
        epochs = 0
        while not done(state):
            for batch in loader(state):
                state, _ = train_step(state, batch)
                assert not asks_in_body or not done(state) or state.epoch > 3
            epochs += 1
            if of_training:
                ll.evaluate(eval_step, state, loader, prefix="train/")
            if epochs % every == 0:
                scores = ll.evaluate(eval_step, state, loader, prefix="eval/")
                if updates:
                    state = ll.update_best(state, scores)
        return epochs

    for asks_in_body in (True, False):  # or in the `while` alone, at the step of the last evaluation
        with pytest.warns(UserWarning, match=r"returned 'eval/loss' at steps 2 and 4.*'best'.*update_best") as told:
            assert run(updates=False, asks_in_body=asks_in_body) == 9
        assert len(told) == 1
        assert told[0].filename == __file__
    for every in (1, 4):  # also more rarely than patience would let a run continue that is evaluated in each epoch
        for before in (False, True):
            run(every, before=before, of_training=True)
            run(every, before=before, asks_in_body=False)
    ll.debug.warn_of_misuse(False)
    try:
        run(updates=False)
    finally:
        ll.debug.warn_of_misuse(True)


def test_early_stopping_with_the_name_of_a_metric_says_what_to_write():
    for call in (
        lambda: early_stopping("val_loss", patience=3),
        lambda: early_stopping("val_loss", 3),
        lambda: early_stopping(monitor="val_loss", patience=3),
        lambda: early_stopping(),
    ):
        with pytest.raises(TypeError, match=r"early_stopping.*: write ll\.early_stopping\(patience=3\).*BestSoFar\("):
            call()
    assert early_stopping(3, key="mine") == early_stopping(patience=3, key="mine") != early_stopping(3)
    assert pickle.loads(pickle.dumps(early_stopping(3))) == copy.deepcopy(early_stopping(3)) == early_stopping(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        early_stopping(3).patience = 4
    with pytest.raises(ValueError, match=r"early_stopping\(patience='val_loss'\): patience must.*BestSoFar"):
        ll.early_stopping("val_loss")
