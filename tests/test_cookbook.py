"""Each block of the cookbook runs after the lines at its top, and does what its heading says."""

import re
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from public import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import looplib as ll

OPENING, *SECTIONS = re.split(r"^### ", (ROOT / "recipes/COOKBOOK.md").read_text(), flags=re.M)
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
[SETUP] = BLOCK.findall(OPENING)
TASKS = {
    f"{section.partition(chr(10))[0]} {number}": block
    for section in SECTIONS
    for number, block in enumerate(BLOCK.findall(section), 1)
}
CONTINUES = {  # the run that a block continues
    "Resume with another learning rate 1": "Resume a run 1",
    "Push to the Hugging Face Hub 2": "Push to the Hugging Face Hub 1",
}
TWO = "Train two networks with two optimizers (a GAN, an actor-critic)"
EXPECTED_WARNINGS = {"Resume with another learning rate 1": ["lr was 0.01, is 0.0001"]}


def run(task, directory, monkeypatch):
    """The names after the setup, and those after the block."""
    monkeypatch.chdir(directory)
    names = {}
    exec(compile(SETUP, "the lines at the top", "exec"), names)
    before = {name: tensor.detach().clone() for name, tensor in names["model"].named_parameters()}
    if task in CONTINUES:
        exec(TASKS[CONTINUES[task]], dict(names))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated|Use 'content=<...>' to upload raw")
        exec(compile(TASKS[task], task, "exec"), names)
    names["before"], names["warnings"] = before, [str(warning.message) for warning in caught]
    return names


def moved(names):
    return {name for name, tensor in names["state"].params.items() if not torch.equal(tensor, names["before"][name])}


@pytest.fixture
def task(request):
    """A task, with a stand-in for the Hub or for Comet if it needs one."""
    if "Hub" in request.param:
        request.getfixturevalue("the_hub")
    if request.param == "Log to any other tracker 2":
        comet = mock.MagicMock()
        comet.start.return_value.get_key.return_value = "a-key"
        request.getfixturevalue("monkeypatch").setitem(sys.modules, "comet_ml", comet)
    return request.param


def comet_calls():
    experiment = mock.call.start()
    return [
        experiment.log_metrics({"train/loss": 0.5}, step=100),
        experiment.log_text("note: warm", step=100),
        experiment.end(),
    ]


GRADIENTS = [f"gradients/{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")]


def histograms():
    """Steps of each histogram that TensorBoard reads."""
    events = EventAccumulator("runs/digits/gradients").Reload()
    return {name: [event.step for event in events.Histograms(name)] for name in events.Tags()["histograms"]}


def counts(names, *networks):
    """Updates, epochs and samples of each network's state."""
    states = [names[f"{network}_state"] for network in networks]
    return [(state.step, state.epoch, state.samples) for state in states]


# What a task leaves, beyond a trained state.
HOLDS = {
    "Freeze layers 1": lambda n: moved(n) == {"2.weight", "2.bias"},
    "Freeze layers 2": lambda n: moved(n) == {"0.weight", "0.bias", "2.weight", "2.bias"},
    f"{TWO} 1": lambda n: counts(n, "critic", "generator") == [(8, 1, 256), (8, 0, 0)],
    f"{TWO} 2": lambda n: counts(n, "critic", "actor") == [(8, 1, 256), (8, 0, 0)],
    "Set the learning rate by hand, or by the epoch 1": lambda n: (
        ll.optim.hyperparameters(n["optimizer"], n["state"]) == {"lr": 1e-2 * 0.5**3}
    ),
    "Use the model between steps 1": lambda n: len({tuple(each.tolist()) for each in n["rollouts"]}) == 4,
    "Let a loss depend on the step 1": lambda n: n["with_smoothing"](n["state"], ())[1] == 0.2 - 16 / 100,
    "Train in float8 1": lambda n: type(n["model"][0]).__name__ == "Float8Linear",
    "Train for quantized weights (QAT) 1": lambda n: (
        type(n["model"][0].weight).__name__ == "IntxUnpackedToInt8Tensor"
        and torch.equal(n["model"](n["x"]), n["trained"])
    ),
    "Resume a run 1": lambda n: n["state"].step == 16 and n["ckpt"].latest().step == 15,
    "Resume with another learning rate 1": lambda n: n["state"].step == 16,
    "Keep the best checkpoint 1": lambda n: n["state"].step == n["ckpt"].best().step,
    "Stop early 1": lambda n: n["state"].epoch < 50,
    "Save the model 1": lambda n: torch.equal(torch.load("model.pt")["0.bias"], n["state"].params["0.bias"]),
    "Save the model 2": lambda n: torch.equal(torch.load("model.pt")["0.bias"], n["state"].params["0.bias"]),
    "Log to any other tracker 1": lambda n: n["mine"] == [{"step": 100, "train/loss": 0.5}],
    "Log to any other tracker 2": lambda n: n["comet_ml"].mock_calls[-3:] == comet_calls(),
    "Log histograms of the gradients 1": lambda n: histograms() == {name: [4] for name in GRADIENTS},
    "Profile a step 1": lambda n: len(list(Path("runs/profile").glob("*.pt.trace.json"))) == 1,
    "Make predictions 1": lambda n: n["probabilities"].shape == (64, 3),
    "Debug a NaN 1": lambda n: n["worst"].index == 17,
    "Cross-validate (k-fold) 1": lambda n: len(n["accuracies"]) == 4,
    # 13 batches of 8 and 10 of 16 are an epoch with the rest of 8; the second has 9 of 16 and 2 of 64
    "Grow the batch size during a run 1": lambda n: (
        (n["state"].step, n["state"].samples) == (13 + 10 + 9 + 2 + 4, 768)
    ),
    "Change the batch size in the middle of an epoch 1": lambda n: (
        (n["state"].step, n["state"].epoch, n["state"].samples, n["state"].epoch_length) == (14 + 5, 2, 512, 7)
    ),
    "Replay a step 1": lambda n: n["again"].state.step == 12,
    "Push to the Hugging Face Hub 2": lambda n: n["state"].step == n["pulled"].latest().step == 24,
}


COMPILED = "Compile the step 1"  # by Inductor, which takes ten seconds


@pytest.mark.every_case
@pytest.mark.parametrize(
    "task",
    [*(task for task in TASKS if task != COMPILED), pytest.param(COMPILED, marks=pytest.mark.slow)],
    indirect=True,
)
def test_the_block_does_its_task(task, tmp_path, monkeypatch):
    names = run(task, tmp_path, monkeypatch)
    expected = EXPECTED_WARNINGS.get(task, [])
    assert len(names["warnings"]) == len(expected), names["warnings"]
    assert all(part in text for part, text in zip(expected, names["warnings"], strict=True))
    if task in HOLDS:
        assert HOLDS[task](names)
    if "state" in names and not task.startswith(("Overfit", "Find")):
        assert names["state"].step > 0


def test_each_task_that_is_checked_is_on_the_page():
    assert {*HOLDS, *CONTINUES, *EXPECTED_WARNINGS} <= TASKS.keys()


def test_the_cheat_sheet_has_every_everyday_name_once_and_every_room():
    tables = "\n".join(re.findall(r"^\| `.*", (ROOT / "recipes/CHEAT_SHEET.md").read_text(), re.M))
    calls = re.findall(r"`ll\.(\w+)", "\n".join(line.split(" | ")[0] for line in tables.splitlines()))
    assert sorted(calls) == sorted(set(ll.__all__))


def test_every_name_of_both_pages_exists():
    for page in ("CHEAT_SHEET.md", "COOKBOOK.md"):
        for path in re.findall(r"\bll\.(\w+(?:\.\w+)?)", (ROOT / "recipes" / page).read_text()):
            value = ll
            for name in path.split("."):
                value = getattr(value, name)
