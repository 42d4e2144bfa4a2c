"""Mistakes that mypy finds in a user's strictly typed loop, and right lines in which it finds none."""

import re
import subprocess
import sys

import pytest
from public import ROOT

CODE = """
import torch
from torch import nn

import looplib as ll

model = nn.Linear(2, 1)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model(batch)
    return outputs.square().mean()


def with_aux(model: nn.Module, batch: torch.Tensor) -> tuple[ll.Mean, dict[str, torch.Tensor]]:
    outputs: torch.Tensor = model(batch)
    return ll.Mean(outputs.sum(), len(batch)), {"largest": outputs.max()}


def float_loss(model: nn.Module, batch: torch.Tensor) -> float:
    return float(model(batch).square().mean())


def halved(step: int) -> float:
    return 0.5**step


optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
ll.optimizer(torch.optim.SGD, lr=halved)
ll.optimizer(torch.optim.SGD, lr=ll.warmup_cosine(0.1, warmup=1, total=9))
ll.optimizer(torch.optim.SGD, lr=ll.optim.inject(0.1))
ll.optimizer(torch.optim.SGD, lr=torch.tensor(0.1))
grad_fn = ll.make_grad_fn(model, loss_fn)
ll.make_grad_fn(model, with_aux)
ll.make_grad_fn(model, lambda model, batch: model(batch).mean())
train_step = ll.make_train_step(grad_fn, optimizer)
state = ll.init_state(model, optimizer)
batch = torch.ones(4, 2)
state, metrics = train_step(state, batch)
print(metrics["loss"].item(), float(metrics["loss"]), metrics["loss"].total)
ll.console()(state, ll.compute(metrics))
print(ll.every_n_steps(2)(state) and not ll.at_epoch_end()(state))

ll.optimizer(torch.optim.SGD, lr="0.1")  # wrong
ll.optimizer(torch.optim.SGD, lr=[0.1])  # wrong
ll.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), lr=0.1)  # wrong
ll.chain(torch.optim.SGD(model.parameters(), lr=0.1))  # wrong
ll.make_grad_fn(model, float_loss)  # wrong
ll.make_train_step(optimizer, grad_fn)  # wrong
ll.init_state(optimizer, model)  # wrong
ll.accumulate(grad_fn, 2.5)  # wrong
ll.after_epochs("3")  # wrong
ll.warmup_cosine("0.1", warmup=1, total=10)  # wrong
ll.checkpoint_io(3)  # wrong
metrics["loss"] + 1.0  # wrong
ll.console()(state, metrics)  # wrong
ll.console()(metrics)  # wrong
state.step = 3  # wrong
state.steps  # wrong
train_step(batch, state)  # wrong
train_step(train_step(state, batch), batch)  # wrong
ll.evaluate(train_step, state, [batch])  # wrong
"""


@pytest.mark.slow  # mypy reads all of torch
def test_mypy_finds_these_mistakes_and_no_others(tmp_path):
    (tmp_path / "loop.py").write_text(CODE)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        str(tmp_path / "cache"),
        "loop.py",
    ]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = {int(line) for line in re.findall(r"^loop\.py:(\d+): error", out.stdout, re.MULTILINE)}
    wrong = {number for number, line in enumerate(CODE.splitlines(), start=1) if line.endswith("# wrong")}
    assert len(wrong) > 15
    assert found == wrong, out.stdout + out.stderr
    assert (ROOT / "looplib/py.typed").exists()
