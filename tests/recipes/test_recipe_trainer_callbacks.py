"""The adapter against the real Trainer: the same run, with the same recording callback in both."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_recipes import load
from torch import nn
from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

import looplib as ll

recipe = load("trainer_callbacks")
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Recorder(TrainerCallback):
    """Each event with the counts and the switches that a callback sees there."""

    def __init__(self):
        self.seen, self.logs, self.best = [], [], []

    def record(self, event, args, state, control, **values):
        flags = tuple(name for name in FLAGS if getattr(control, name))
        known = event == "on_init_end" or (state.max_steps, state.num_train_epochs)  # the Trainer's are 0 there
        self.seen.append((event, state.global_step, state.epoch, known, flags))
        if event == "on_log":
            self.logs.append({"step": state.global_step, **values["logs"]})
        if event == "on_step_begin":
            self.best.append((state.best_metric, state.best_global_step))


for name in EVENTS:
    setattr(Recorder, name, lambda self, *given, _name=name, **values: self.record(_name, *given, **values))


class EndEpochsEarly(TrainerCallback):
    """A user's own: leaves every epoch after two steps, and asks for a log there."""

    def on_step_end(self, args, state, control, **values):
        control.should_epoch_stop = round(state.epoch % 1 * 5) == 2
        control.should_log |= control.should_epoch_stop
        return control


class StopAt(TrainerCallback):
    def on_step_begin(self, args, state, control, **values):
        if state.global_step == 6:
            control.should_training_stop = True
            control.should_save = True


RUNS = {
    "steps": ({"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 6}, []),
    "parts of all steps": (
        {"logging_steps": 0.2, "eval_strategy": "steps", "eval_steps": 0.4, "save_steps": 0.4},
        [],
    ),
    "epochs": ({"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"}, []),
    "nothing but a first log": ({"logging_first_step": True, "save_strategy": "no"}, []),
    "early stopping": (
        {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
        | {"metric_for_best_model": "accuracy", "load_best_model_at_end": True},
        [lambda: EarlyStoppingCallback(2)],
    ),
    "epochs left": ({"logging_steps": 3, "eval_strategy": "epoch", "save_strategy": "epoch"}, [EndEpochsEarly]),
    "stopped within an epoch": ({"logging_steps": 4, "eval_strategy": "steps", "eval_steps": 5}, [StopAt]),
}


def data():
    """Whole batches to train with: the Trainer logs a mean over batches, and a window is one over examples."""
    examples, _ = recipe.load_data()
    return examples[:80], examples[80:128]


def model():
    torch.manual_seed(0)
    return recipe.Classifier(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def arguments(directory, **given):
    best = {} if given.get("save_strategy") == "no" else {"metric_for_best_model": "loss"}
    sizes = {"num_train_epochs": 4, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 20}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
    order = {"train_sampling_strategy": "sequential"}
    return TrainingArguments(str(directory), **{"learning_rate": 3e-3, **best, **sizes, **quiet, **order, **given})


def accuracy(predicted):
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


def by_trainer(directory, given, callbacks):
    recorder, (train_set, test_set) = Recorder(), data()
    trainer = Trainer(
        model(),
        arguments(directory, **given),
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=accuracy,
        callbacks=[*(make() for make in callbacks), recorder],
    )
    trainer.train()
    return recorder, trainer.state


def by_looplib(directory, given, callbacks):
    recorder = Recorder()
    recipe.train(arguments(directory, **given), [*(make() for make in callbacks), recorder], model(), *data())
    return recorder


@pytest.mark.parametrize("name", RUNS)
def test_callbacks_are_called_as_by_the_trainer(name, tmp_path, capsys):
    given, callbacks = RUNS[name]
    expected, last = by_trainer(tmp_path / "trainer", given, callbacks)
    found = by_looplib(tmp_path / "looplib", given, callbacks)
    assert found.seen == expected.seen
    assert expected.seen[-1][1] == last.global_step
    if name == "early stopping":
        assert 4 < last.global_step < 20  # of 4 epochs of 5 steps
    # The two runs are the same to rounding, float32 summed in another order.
    for ours, theirs in zip(found.logs, expected.logs, strict=True):
        for key in ("step", "epoch", "loss", "learning_rate", "eval_loss", "eval_accuracy", "train_loss"):
            assert (key in ours) == (key in theirs), key
            assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-4, abs=1e-9), (key, ours["step"])
    for ours, theirs in zip(found.best, expected.best, strict=True):
        assert ours == (theirs if None in theirs else pytest.approx(theirs, rel=1e-4))


def test_predicates_ask_for_what_the_arguments_ask_for(tmp_path):
    """Two ways of saying when."""
    given, _ = RUNS["steps"]
    expected = by_looplib(tmp_path / "arguments", given, [])
    last = ll.after_epochs(4)
    when = {"log": ll.every_n_steps(2), "evaluate": ll.every_n_steps(3) | last, "save": ll.every_n_steps(6) | last}
    found = by_looplib(tmp_path / "predicates", {"save_strategy": "no"} | given, [lambda: recipe.Flow(**when)])

    def events(recorder):
        return [event[:3] for event in recorder.seen]

    assert events(found) == events(expected)


class Crash(TrainerCallback):
    def on_step_begin(self, args, state, control, **values):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_goes_on_with_what_the_callbacks_remember(tmp_path):
    given, callbacks = RUNS["early stopping"]
    expected = by_looplib(tmp_path / "whole", given, callbacks)
    with pytest.raises(KeyboardInterrupt):
        by_looplib(tmp_path / "parts", given, [*callbacks, Crash])
    found = by_looplib(tmp_path / "parts", given, callbacks)
    resumed = found.seen.index(("on_step_begin", 4, 0.8, (20, 4), ()))
    after = expected.seen.index(("on_step_begin", 4, 0.8, (20, 4), ()))
    assert found.seen[resumed:] == expected.seen[after:]
    assert found.best == expected.best[4:]


def test_the_recipe_writes_what_its_callbacks_write_and_returns_the_best(tmp_path, capsys):
    scores = recipe.main(epochs=3, every=10, directory=str(tmp_path))
    rows = ll.log.read_jsonl(tmp_path / "log.jsonl")
    evaluated = [row for row in rows if "eval_accuracy" in row]
    steps, accuracies = [row["step"] for row in evaluated], [row["eval_accuracy"] for row in evaluated]
    assert steps == [10, 20, 30, 40, 50, 60, 69]
    assert scores["accuracy"] == max(accuracies) > 0.8
    assert scores["steps"] == steps[accuracies.index(max(accuracies))]
    (folder,) = (tmp_path / "runs").iterdir()
    board = EventAccumulator(str(folder)).Reload()
    written = [event.value for event in board.Scalars("eval/accuracy")]
    assert written == pytest.approx(accuracies)
    assert [event.step for event in board.Scalars("train/loss")] == [10, 20, 30, 40, 50, 60]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{'eval_loss'")]
    assert len(printed) == len(accuracies) == 7


def test_the_progress_bar_is_of_all_steps(tmp_path, capsys):
    bars = []

    class Watched(ProgressCallback):
        def on_train_end(self, args, state, control, **values):
            bars.append((self.training_bar.n, self.training_bar.total))
            super().on_train_end(args, state, control, **values)

    by_looplib(tmp_path, {"logging_steps": 5, "save_strategy": "no"}, [Watched])
    assert bars == [(20, 20)]
