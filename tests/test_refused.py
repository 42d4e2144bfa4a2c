"""The page "What looplib refuses, and why": each line's code raises or warns what the line says."""

import random
import re
import warnings
from collections import deque
from pathlib import Path

import pytest
import torch
from public import ROOT
from ranks import launch
from shared import mean_square
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import looplib as ll

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: F401 - a line of the page names it
    from torchao.optim import CPUOffloadOptimizer  # noqa: F401 - as above

PAGE = (ROOT / "recipes/REFUSED.md").read_text()
BEGINNING = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
SECTIONS = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
ROWS = [
    (title, code, words)
    for title, text in SECTIONS
    for code, words in re.findall(r"^\| `(.*?)` \| (.*?) \|", text, re.MULTILINE)
]


class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.change(param)


class KeepsADeque(Plain):
    def change(self, param):
        history = self.state[param].setdefault("history", deque(maxlen=3))
        history.append(param.grad.clone())
        param.sub_(sum(history))


class DrawsFromPython(Plain):
    def change(self, param):
        param.sub_(random.random() * param.grad)


class SharesMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 4))
        self.column = nn.Parameter(self.table.data[:, 0])


class WithLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls = 0
        self.register_buffer("mean", None)

    def forward(self, x):
        return self.layer(x)


class FillsABuffer(WithLayer):
    def forward(self, x):
        self.mean = x.mean(0)
        return self.layer(x - self.mean)


class HasAnUnusedLayer(WithLayer):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 2)


class ClampsItsWeight(WithLayer):
    def forward(self, x):
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(x)


class CountsItsCalls(WithLayer):
    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(8, 4))


class EndsEarly(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        raise StopIteration


def halved(grad_fn):
    def halved_grad_fn(state, batch, **request):
        out = grad_fn(state, batch, **request)
        return out._replace(grads={name: grad / 2 for name, grad in out.grads.items()})

    return halved_grad_fn


def calls_backward(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def tokens_loss(model, batch):
    return nn.functional.cross_entropy(model(batch["input"]).flatten(0, 1), batch["labels"].flatten())


RAGGED = {"input": torch.zeros(3, 4, dtype=torch.int64), "labels": torch.tensor([[1] * 4, [1, -100, -100, -100]] * 2)}


def train_other(model, compiled=False):
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    batch = torch.zeros(6, dtype=torch.int64) if isinstance(model, nn.Embedding) else torch.randn(6, 4)
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), optimizer)
    return (ll.compile_step(step, backend="eager") if compiled else step)(ll.init_state(model, optimizer), batch)


def damage(path):
    file = max(Path(path).iterdir(), key=lambda file: file.stat().st_size * (file.suffix != ".json"))
    file.write_bytes(bytes(byte ^ 255 for byte in file.read_bytes()))


def names(folder):
    """Names that the page's code can use."""
    known = {
        **globals(),
        "folder": folder,
        "tokens": nn.Embedding(5, 5),
        "ragged": {k: v[:3] for k, v in RAGGED.items()},
    }
    exec(compile(BEGINNING, "REFUSED.md", "exec"), known)
    known["ckpt"] = ll.checkpoint_io(folder)
    return known


def check(code, words, known):
    """The code's error, or its warning, has these words."""
    if words.startswith("a warning: "):
        with pytest.warns(Warning, match=re.escape(words.removeprefix("a warning: "))):
            exec(code, known)
    else:
        warnings.simplefilter("ignore")
        with pytest.raises((AttributeError, OSError, RuntimeError, TypeError, ValueError), match=re.escape(words)):
            exec(code, known)


@pytest.mark.every_case
@pytest.mark.parametrize("subject", dict.fromkeys(title for title, *_ in ROWS if title != "Ranks"))
def test_the_lines_of_the_page(subject, tmp_path):
    """All of one subject, whose failures stand in one report."""
    faults = []
    for number, (title, code, words) in enumerate(ROWS):
        if title != subject:
            continue
        (tmp_path / str(number)).mkdir()
        known = names(tmp_path / str(number) / "folder")
        if "trained" in code:
            known["trained"] = known["state"]
            for _ in range(3):
                known["trained"], _ = known["train_step"](known["trained"], known["batch"])
        try:
            with warnings.catch_warnings():
                check(code, words, known)
        except (Exception, pytest.fail.Exception) as error:
            faults.append(f"{code}: {error}")
    assert not faults, "\n".join(faults)


def on_two_ranks(rows, folder):
    torch.distributed.init_process_group("gloo")
    for code, words in rows:
        known = names(folder)
        known["ddp"] = nn.parallel.DistributedDataParallel(known["model"])
        check(code, words, known)
    print("all refused")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_the_lines_about_ranks(tmp_path):
    rows = [row[1:] for row in ROWS if row[0] == "Ranks"]
    assert launch(2, on_two_ranks, rows, str(tmp_path)).count("all refused") == 2


def test_the_page_has_rows_for_each_subject():
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(ROWS) == len(lines) > 50
    assert all(len(re.split(r" \| ", line.strip("| "))) == 4 for line in lines)
    assert {title for title, *_ in ROWS} == {title for title, _ in SECTIONS} - {"What looplib cannot see"}
