"""Callbacks of transformers' Trainer in a looplib loop, beside the Trainer: the same run, with the same recorder in both."""

import dataclasses
import re

import pytest
import torch
from ranks import launch
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

import looplib as ll

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
# log_history has its own comparison; the Trainer counts tokens and operations, and this adapter does not.
OTHERS = {"log_history", "best_metric", "best_model_checkpoint", "total_flos", "num_input_tokens_seen"}


class Recorder(TrainerCallback):
    """Each event with the fields of the state and the switches that a callback sees there."""

    def __init__(self):
        self.seen, self.logs, self.best = [], [], []

    def record(self, event, args, state, control, **values):
        flags = tuple(name for name in FLAGS if getattr(control, name))
        fields = {name: value for name, value in dataclasses.asdict(state).items() if name not in OTHERS}
        best = state.best_model_checkpoint and int(re.split("[-/]", state.best_model_checkpoint)[-1])
        self.seen.append((event, flags, fields, best))
        if event == "on_log":
            self.logs.append({"step": state.global_step, **values["logs"]})
        if event == "on_step_begin":
            self.best.append(state.best_metric)


for name in EVENTS:
    setattr(Recorder, name, lambda self, *given, _name=name, **values: self.record(_name, *given, **values))


class EndEpochsEarly(TrainerCallback):
    """Leaves every epoch after two steps, and asks for a log there."""

    def on_step_end(self, args, state, control, **values):
        control.should_epoch_stop = round(state.epoch % 1 * 5) == 2
        control.should_log |= control.should_epoch_stop
        return control


class StopAt(TrainerCallback):
    def on_step_begin(self, args, state, control, **values):
        if state.global_step == 6:
            control.should_training_stop = True
            control.should_save = True


class SaveWhenLow(TrainerCallback):
    """Evaluates every fourth step, saves if the loss is low, and at the end of epochs asks for what has been logged."""

    def on_step_end(self, args, state, control, **values):
        control.should_evaluate |= state.global_step % 4 == 0

    def on_evaluate(self, args, state, control, metrics, **values):
        control.should_save |= metrics["eval_loss"] < 2.295

    def on_epoch_end(self, args, state, control, **values):
        control.should_save |= state.epoch == 2
        control.should_log = True


RUNS = {
    "early stopping": (
        {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
        | {"metric_for_best_model": "accuracy", "load_best_model_at_end": True},
        [lambda: EarlyStoppingCallback(2)],
    ),
    "early stopping with a threshold": (
        {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 9},
        [lambda: EarlyStoppingCallback(2, 0.3)],
    ),
    "a callback that saves": ({"logging_steps": 4, "save_strategy": "no"}, [SaveWhenLow]),
    "steps": ({"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 6}, []),
    "parts of all steps": (
        {"logging_steps": 0.2, "eval_strategy": "steps", "eval_steps": 0.4, "save_steps": 0.4},
        [],
    ),
    "epochs": ({"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"}, []),
    "nothing but a first log": ({"logging_first_step": True, "save_strategy": "no"}, []),
    "epochs left": ({"logging_steps": 3, "eval_strategy": "epoch", "save_strategy": "epoch"}, [EndEpochsEarly]),
    "stopped within an epoch": ({"logging_steps": 4, "eval_strategy": "steps", "eval_steps": 5}, [StopAt]),
    "a number of steps": ({"max_steps": 7, "logging_steps": 3, "save_steps": 3, "save_total_limit": 2}, []),
    "part of an epoch": ({"num_train_epochs": 1.5, "eval_strategy": "epoch", "save_strategy": "epoch"}, []),
    "the best alone": (
        {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "eval_on_start": True, "eval_delay": 3}
        | {"metric_for_best_model": "eval_accuracy"},
        [],
    ),
}


class Classifier(nn.Sequential):
    """With the loss among the outputs, as the Trainer takes models."""

    def forward(self, pixels, labels):
        logits = super().forward(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def data():
    """Whole batches to train with: the Trainer logs a mean over steps, and looplib one over samples."""
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    samples = [{"pixels": x[i].float() / 16, "labels": y[i]} for i in range(128)]
    return samples[:80], samples[80:]


def new_model():
    torch.manual_seed(0)
    return Classifier(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def arguments(directory, **given):
    best = {} if given.get("save_strategy") == "no" else {"metric_for_best_model": "loss"}
    sizes = {"num_train_epochs": 4, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 20}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
    order = {"train_sampling_strategy": "sequential"}
    return TrainingArguments(str(directory), **{"learning_rate": 3e-3, **best, **sizes, **quiet, **order, **given})


def by_trainer(directory, given, callbacks, sets=None):
    recorder, (train_set, test_set), model = Recorder(), data(), new_model()
    trainer = Trainer(
        model,
        arguments(directory, **given),
        train_dataset=train_set,
        eval_dataset=sets(test_set) if sets else test_set,
        compute_metrics=lambda out: {"accuracy": float((out.predictions.argmax(1) == out.label_ids).mean())},
        callbacks=[*(make() for make in callbacks), recorder],
    )
    trainer.train()
    return recorder, trainer.state, model


def by_looplib(directory, given, callbacks, sets=None, log=None, engine=False):
    recorder, (train_set, test_set), model = Recorder(), data(), new_model()
    args = arguments(directory, **given)
    trained = nn.parallel.DistributedDataParallel(model) if engine else model

    def metric_fn(model, batch):
        out = model(**batch)
        return {"loss": out["loss"], "accuracy": ll.accuracy(out["logits"], batch["labels"])}

    def batches(samples):
        return ll.make_loader(samples, batch_size=args.per_device_eval_batch_size, order=ll.data.in_order())

    loader = ll.make_loader(train_set, batch_size=args.per_device_train_batch_size, order=ll.data.in_order())
    steps = args.max_steps if args.max_steps > 0 else -int(-args.num_train_epochs * len(loader) // 1)
    rate = ll.schedules.warmup_linear(args.learning_rate, warmup=0, total=steps)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=rate, weight_decay=0.0)
    grad_fn = ll.clip_by_global_norm(ll.make_grad_fn(trained, lambda model, batch: model(**batch)["loss"]), 1.0)
    held = {name: batches(samples) for name, samples in sets(test_set).items()} if sets else batches(test_set)
    callbacks = ll.contrib.TrainerCallbacks(
        args,
        [*(make() for make in callbacks), recorder],
        trained,
        loader,
        eval_step=ll.make_eval_step(trained, metric_fn),
        eval_batches=held,
        log=log or ll.jsonl(directory / "log.jsonl"),
    )
    train_step = callbacks.make_train_step(grad_fn, optimizer)
    for state, batch in callbacks.loop(ll.init_state(trained, optimizer, epoch_length=len(loader))):
        state, _ = train_step(state, batch)
    return recorder, callbacks, model


def check_logs(found, expected):
    names = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "train_loss")
    for ours, theirs in zip(found, expected, strict=True):
        for name in names:
            assert (name in ours) == (name in theirs), name
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-6, abs=1e-9), (name, ours["step"])


@pytest.mark.parametrize("name", RUNS)
def test_callbacks_are_called_as_by_the_trainer(name, tmp_path, capsys):
    given, callbacks = RUNS[name]
    expected, last, theirs = by_trainer(tmp_path / "trainer", given, callbacks)
    found, ours, model = by_looplib(tmp_path / "looplib", given, callbacks)
    assert [each[0] for each in found.seen] == [each[0] for each in expected.seen]
    assert found.seen == expected.seen
    check_logs(found.logs, expected.logs)
    check_logs(ours.trainer_state.log_history, last.log_history)
    assert found.best == [value if value is None else pytest.approx(value, rel=1e-6) for value in expected.best]
    torch.testing.assert_close(model.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-5)
    folders = {int(path.name.split("-")[1]) for path in (tmp_path / "trainer").glob("checkpoint-*")}
    kept = {found.step for found in ours.checkpoints.steps()}
    assert folders <= kept <= folders | {last.best_global_step}
    if name.startswith("early stopping"):
        assert 4 < last.global_step < last.max_steps
        assert ours.state.step == last.best_global_step
    if name == "a callback that saves":
        assert folders == {10, 12, 16, 20}, "the test is about some of the evaluations"


def test_each_of_several_sets_is_evaluated_with_its_events(tmp_path, capsys):
    def sets(samples):
        return {"first": samples[:24], "last": samples[24:]}

    given = {"eval_strategy": "epoch", "save_strategy": "no", "metric_for_best_model": "last_loss"}
    expected, _, _ = by_trainer(tmp_path / "trainer", given, [], sets)
    found, _, _ = by_looplib(tmp_path / "looplib", given, [], sets)
    assert found.seen == expected.seen
    rows = [row for row in expected.logs if "eval_last_loss" in row]
    mine = [row for row in found.logs if "eval_last_loss" in row]
    assert [row["eval_last_loss"] for row in mine] == pytest.approx([row["eval_last_loss"] for row in rows], rel=1e-6)


def scalars(folder):
    (path,) = folder.rglob("events.out.tfevents.*")
    board = EventAccumulator(str(path)).Reload()
    names = ("train/loss", "train/learning_rate", "train/grad_norm", "train/train_loss", "eval/loss", "eval/accuracy")
    return {name: [(event.step, event.value) for event in board.Scalars(name)] for name in names}


def test_a_trackers_callback_writes_what_it_writes_for_the_trainer(tmp_path, capsys):
    given, _ = RUNS["steps"]
    by_trainer(tmp_path / "trainer", given, [TensorBoardCallback])
    by_looplib(tmp_path / "looplib", given, [TensorBoardCallback])
    expected, found = scalars(tmp_path / "trainer"), scalars(tmp_path / "looplib")
    assert len(expected["train/loss"]) == 10
    for name, rows in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in rows], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in rows], rel=1e-6), name


class Crash(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **values):
        if state.global_step == self.step:
            raise KeyboardInterrupt


EACH_STEP = {
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 1,
}  # also where a callback leaves the epoch


@pytest.mark.parametrize(
    ("name", "more", "step"), [("early stopping", {}, 5), ("epochs left", {}, 5), ("epochs left", EACH_STEP, 4)]
)
def test_a_stopped_run_continues_with_what_the_callbacks_remember(name, more, step, tmp_path, capsys):
    given, callbacks = RUNS[name]
    given = given | more
    expected, _, whole = by_looplib(tmp_path / "whole", given, callbacks)
    with pytest.raises(KeyboardInterrupt):
        by_looplib(tmp_path / "parts", given, [*callbacks, lambda: Crash(step)])
    found, ours, model = by_looplib(tmp_path / "parts", given, callbacks)

    def after(recorder, step):
        begins = [event == "on_step_begin" and fields["global_step"] == step for event, _, fields, _ in recorder.seen]
        return [each[:3] for each in recorder.seen[begins.index(True) :]]

    assert after(found, 4) == after(expected, 4)
    assert found.best == expected.best[4:]
    assert not ll.debug.differences(dict(model.state_dict()), dict(whole.state_dict()))
    assert [row["step"] for row in ours.trainer_state.log_history] == [row["step"] for row in expected.logs]


def test_a_run_that_has_ended_does_nothing_again(tmp_path, capsys):
    given, callbacks = RUNS["epochs"]
    by_looplib(tmp_path, given, callbacks)
    found, _, _ = by_looplib(tmp_path, given, callbacks)
    assert [each[0] for each in found.seen] == ["on_init_end", "on_train_begin", "on_train_end"]


def test_the_progress_bar_is_of_all_steps(tmp_path, capsys):
    bars = []

    class Watched(ProgressCallback):
        def on_train_end(self, args, state, control, **values):
            bars.append((self.training_bar.n, self.training_bar.total))
            super().on_train_end(args, state, control, **values)

    by_looplib(tmp_path, {"logging_steps": 5, "save_strategy": "no"}, [Watched])
    assert bars == [(20, 20)]


def test_callbacks_get_gradients_weights_and_the_state_by_name(tmp_path, capsys):
    norms, weights = [], []

    class Watched(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, grads, model, train_state, **values):
            norms.append(ll.grads.global_norm(grads.values()).item())
            weights.append(model[0].weight.clone())
            assert (train_state.step, values["optimizer"]) == (state.global_step, None)

        def on_step_end(self, args, state, control, model, **values):
            assert not model[0].weight.equal(weights[-1])

    rows = []
    given = {"logging_steps": 1, "save_strategy": "no", "max_steps": 3}
    recorder, _, _ = by_looplib(tmp_path, given, [Watched], log=ll.log.record(rows))
    assert all(norm <= 1.001 for norm in norms)
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert [row["loss"] for row in rows[:3]] == [row["loss"] for row in recorder.logs[:3]]


def small(tmp_path, callbacks=(), epoch_length=5, **given):
    model, optimizer = new_model(), ll.optimizer(torch.optim.SGD, lr=0.1)
    loader = ll.make_loader(data()[0], batch_size=16)
    args = arguments(tmp_path, **{"save_strategy": "no", **given})
    callbacks = ll.contrib.TrainerCallbacks(args, list(callbacks), model, loader)
    grad_fn = ll.make_grad_fn(model, lambda model, batch: model(**batch)["loss"])
    return (
        callbacks,
        callbacks.make_train_step(grad_fn, optimizer),
        ll.init_state(model, optimizer, epoch_length=epoch_length),
    )


def test_a_skipped_update_counts_as_in_the_trainer(tmp_path, capsys):
    model, recorder = new_model(), Recorder()
    optimizer = ll.optim.apply_if_finite(ll.optimizer(torch.optim.SGD, lr=0.1), max_consecutive=5)
    loader = ll.make_loader(data()[0], batch_size=16)
    args = arguments(tmp_path, save_strategy="no", max_steps=5)
    callbacks = ll.contrib.TrainerCallbacks(args, [recorder], model, loader)

    def loss_fn(model, batch):
        loss = model(**batch)["loss"]
        return loss * float("nan") if len(recorder.best) == 2 else loss

    train_step = callbacks.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    for state, batch in callbacks.loop(ll.init_state(model, optimizer, epoch_length=5)):
        state, _ = train_step(state, batch)
    assert (callbacks.state.step, callbacks.trainer_state.global_step) == (4, 5)


class AlwaysEvaluate(TrainerCallback):
    def on_step_end(self, args, state, control, **values):
        control.should_evaluate = True


def test_a_loop_that_forgets_a_line_is_refused(tmp_path):
    callbacks, train_step, state = small(tmp_path / "none")
    with pytest.raises(
        RuntimeError, match=r"called callbacks' train step 0 times for one batch; call what callbacks\.make"
    ):
        for _ in callbacks.loop(state):
            pass
    callbacks, train_step, state = small(tmp_path / "two")
    pairs = callbacks.loop(state)
    state, batch = next(pairs)
    train_step(train_step(state, batch)[0], batch)
    with pytest.raises(RuntimeError, match="2 times for one batch"):
        next(pairs)
    callbacks, _, state = small(tmp_path / "length", epoch_length=4)
    with pytest.raises(ValueError, match=r"epoch_length=4, and the loader 5 batches; write ll\.init_state"):
        next(callbacks.loop(state))
    with pytest.raises(
        ValueError, match=r"eval_strategy='epoch'; give TrainerCallbacks\(\.\.\., eval_step=eval_step"
    ):
        small(tmp_path / "evaluation", eval_strategy="epoch")
    callbacks, train_step, state = small(tmp_path / "asked", [AlwaysEvaluate])
    with pytest.raises(ValueError, match="a callback has set should_evaluate; give TrainerCallbacks"):
        train_step(*next(callbacks.loop(state)))
    with pytest.raises(ValueError, match="Recorder has on_substep_end, which would never be called"):
        small(tmp_path / "substeps", [Recorder()], gradient_accumulation_steps=2)


def test_arguments_in_the_wrong_place_are_refused(tmp_path):
    args, loader = arguments(tmp_path), ll.make_loader(data()[0], batch_size=16)
    with pytest.raises(TypeError, match=r"TrainerCallbacks got a Loader; give a torch\.nn\.Module"):
        ll.contrib.TrainerCallbacks(args, [], loader, new_model())
    with pytest.raises(TypeError, match=r"give a loader, as ll\.make_loader returns"):
        ll.contrib.TrainerCallbacks(args, [], new_model(), data()[0])


def test_the_best_metric_must_be_measured(tmp_path, capsys):
    given = {"eval_strategy": "epoch", "save_strategy": "no", "metric_for_best_model": "f1"}
    with pytest.raises(
        ValueError, match="metric_for_best_model is 'eval_f1'; the scores are eval_loss, eval_accuracy"
    ):
        by_looplib(tmp_path, given, [])


def test_the_state_before_the_best_weights_cannot_be_used(tmp_path, capsys):
    """A script that forgets `callbacks.state` after the loop is told so."""
    given, callbacks = RUNS["early stopping"]
    kept = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, train_state, **values):
            kept.append(train_state)

    by_looplib(tmp_path, given, [*callbacks, Keep])
    with pytest.raises(ll.DonatedStateError):
        kept[-1].params  # noqa: B018


def on_two_ranks(directory):
    with ll.distributed.setup():
        by_looplib(directory, RUNS["early stopping"][0], RUNS["early stopping"][1], engine=True)


@pytest.mark.slow
def test_two_ranks_log_and_stop_as_one_process_does(tmp_path, capsys):
    given, callbacks = RUNS["early stopping"]
    by_looplib(tmp_path / "one", given, callbacks)
    launch(2, on_two_ranks, tmp_path / "two")
    expected, found = (ll.log.read_jsonl(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)  # sums of float32 in another order
