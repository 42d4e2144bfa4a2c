"""The cookbook's loop for callbacks of transformers' Trainer, beside the Trainer on the same batches."""

import re

import cookbook
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import looplib as ll

[BLOCK] = cookbook.BLOCK.findall(cookbook.SECTIONS["Use callbacks of transformers' Trainer"])
EVENTS = [name for name in re.findall(r"handler\.(on_\w+)\(", BLOCK) if name != "on_train_end"]
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Recorder(TrainerCallback):
    """Each event of the loop, with what a callback sees there."""

    def __init__(self):
        self.seen, self.logs = [], []

    def record(self, event, args, state, control, logs=None, **values):
        if "train_loss" in (logs or {}):  # the Trainer's summary at the end
            return
        flags = [name for name in FLAGS if getattr(control, name)]
        self.seen.append((event, flags, state.global_step, state.epoch, state.logging_steps, state.best_metric))
        self.logs += [{name: value for name, value in (logs or {}).items() if name in ("loss", "eval_loss")}]


for name in EVENTS:
    setattr(Recorder, name, lambda self, *given, _name=name, **values: self.record(_name, *given, **values))


class LeaveAndStop(TrainerCallback):
    """Leaves the second epoch after three steps, and stops in the fourth."""

    def on_step_end(self, args, state, control, **values):
        control.should_epoch_stop = control.should_log = state.global_step == 11
        control.should_training_stop = state.global_step == 30


class WithLoss(nn.Module):
    """A classifier with the loss among its outputs, as the Trainer takes models."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, labels):
        logits = self.inner(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: EarlyStoppingCallback(1, 0.05), LeaveAndStop], ids=["early", "flags"])
def test_callbacks_see_what_they_see_in_the_trainer(make, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names, ours, theirs = {}, Recorder(), Recorder()
    exec(cookbook.SETUP, names)
    names["loader"] = ll.make_loader(names["train_set"], batch_size=32, order=ll.data.sequential())
    raw, names["callbacks_here"] = WithLoss(names["model"]), [make(), ours]
    start = {name: tensor.clone() for name, tensor in raw.state_dict().items()}
    block, number = re.subn(r"callbacks = \[.*\]", "callbacks = callbacks_here", BLOCK)
    assert number == 1
    exec(block, names)

    args = names["args"]
    args.per_device_train_batch_size, args.max_grad_norm, args.disable_tqdm = 32, 0.0, True
    args.train_sampling_strategy, args.output_dir, args.dataloader_pin_memory = "sequential", "trainer", False
    raw.load_state_dict(start)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.05)
    sets = ([{"x": x, "labels": y} for x, y in names[name]] for name in ("train_set", "test_set"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    Trainer(
        raw,
        args,
        train_dataset=next(sets),
        eval_dataset=next(sets),
        callbacks=[make(), theirs],
        optimizers=(optimizer, schedule),
    ).train()
    assert theirs.seen[-1][2] < 9 * 8, "the test is about runs that stop early"
    for one, other in zip(ours.seen, theirs.seen, strict=True):
        assert one == (*other[:-1], pytest.approx(other[-1], rel=1e-4) if other[-1] else None)
    for one, other in zip(ours.logs, theirs.logs, strict=True):
        assert one == pytest.approx(other, rel=1e-3)
