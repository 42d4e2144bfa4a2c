"""The scripts of recipes/FROM_TRANSFORMERS.md: both train alike, and no line of looplib's is missed in silence."""

import re
import warnings

import pytest
import torch
from answers import ROOT, blocks
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer

import looplib as ll

SETUP, *SCRIPTS = blocks(ROOT / "recipes/FROM_TRANSFORMERS.md")
THEIRS, OURS = (SETUP + script for script in SCRIPTS)


class Order(torch.utils.data.Sampler):
    """That of looplib's loader, for the Trainer."""

    def __init__(self, count, seed):
        self.count, self.epoch = count, 0
        self.loader = ll.make_loader(range(count), batch_size=count, seed=seed)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(self.loader.indices(ll.TrainState(epoch=self.epoch)).tolist())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_both_scripts_train_alike(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # The scripts are run as they are, but for the order of the samples: the Trainer gets that of looplib's loader.
    order = lambda trainer, train_set=None: Order(len(trainer.train_dataset), trainer.args.seed)  # noqa: E731
    monkeypatch.setattr(Trainer, "_get_train_sampler", order)
    theirs, ours = ({"__name__": "__main__"}, {"__name__": "__main__"})
    exec(THEIRS, theirs)
    exec(OURS, ours)
    history, rows = theirs["trainer"].state.log_history, ll.log.read_jsonl("runs/loop/log.jsonl")

    # A loss is averaged in another order, and the machine's kernels decide how far Adam carries the last bits.
    tolerance = 1e-5
    losses = [[row["step"], row["loss"]] for row in history if "loss" in row]
    found = [[row["step"], row["train/loss"]] for row in rows if "train/loss" in row]
    assert found == [pytest.approx(row, abs=tolerance) for row in losses]
    assert losses[-1][1] < 0.9 * losses[0][1]  # the texts, and so the number of epochs, are those of this Python

    scores = [[row["step"], row["eval_loss"], row["eval_accuracy"]] for row in history if "eval_loss" in row]
    found = [[row["step"], row["eval/loss"], row["eval/accuracy"]] for row in rows if "eval/loss" in row]
    assert found == [pytest.approx(row, abs=tolerance) for row in scores[:-1]]  # the last is evaluate() at the end

    best = theirs["trainer"].state.best_global_step
    assert ours["best_state"].step == best < ours["state"].step == scores[-1][0] < 144  # of 12 epochs of 12 steps
    one, other = (load_file(f"runs/{name}/best/model.safetensors") for name in ("trainer", "loop"))
    assert one.keys() == other.keys()
    for name, weight in one.items():
        # In attention, the gradient of a key's bias is 0 but for rounding, and AdamW makes steps of it.
        atol = 1e-3 if name.endswith("key.bias") else 1e-5
        torch.testing.assert_close(other[name], weight, rtol=1e-5, atol=atol, msg=name)
    for name in ("trainer", "loop"):
        assert (tmp_path / f"runs/{name}/best/tokenizer_config.json").exists()

    (path,) = (tmp_path / "runs/loop").glob("events.out.tfevents.*")
    events = EventAccumulator(str(path)).Reload().Scalars("train/loss")
    assert [[event.step, pytest.approx(event.value, abs=tolerance)] for event in events] == losses


# Forgetting one of these lines changes nothing that the others compute.
NOT_NEEDED = (
    "log_metrics(state, metrics)",
    "ll.checkpoint.save_pretrained(",
    "tokenizer.save_pretrained(",
    "print(",
)
# What looplib says if one of these is forgotten. Python says it of the others, by a NameError or a SyntaxError.
SAID = {
    "state = ll.update_best(": r"watches it, has seen no value: .* Write state = ll\.update_best\(state, scores\)",
    "ckpt.save(state, scores)": r"has no checkpoint 'best'",
    "return {": r"'loss' has type NoneType; give a scalar",
}
OTHER_WEIGHTS = "torch.manual_seed(42)"  # the run begins with other weights, as it does with another seed
LINES = [line for line in OURS.splitlines() if line.strip()]


def result(script, folder, monkeypatch):
    """Result of a script: rows of the log, the best step and its weights, and the warnings that it gives."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    small = script.replace("data[:384], data[384:]", "data[:64], data[384:448]").replace("steps(10)", "steps(1)")
    small = small.replace("warmup=10", "warmup=2")
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        names = {"__name__": "__main__"}
        exec(small, names)
    rows = ll.log.read_jsonl("runs/loop/log.jsonl")
    values = {(row["step"], name): value for row in rows for name, value in row.items()}
    best = names["best_state"]
    return values, best.step, dict(best.params), [str(each.message) for each in given]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        values, *rest, given = result(OURS, tmp_path_factory.mktemp("whole") / "run", patch)
    assert given == []
    assert rest[0] < max(step for step, _ in values), "the best is not the last"
    return values, *rest


@pytest.mark.parametrize("number", range(len(LINES)), ids=[line.strip()[:40] for line in LINES])
def test_a_forgotten_line_is_not_needed_or_not_silent(number, expected, tmp_path, monkeypatch, capsys):
    forgotten = LINES[number].strip()
    said = next((what for start, what in SAID.items() if forgotten.startswith(start)), None)
    try:
        values, step, params, messages = result(
            "\n".join(LINES[:number] + LINES[number + 1 :]), tmp_path / "run", monkeypatch
        )
    except Exception as error:
        values, messages = None, [str(error)]
        if said is None and not isinstance(error, (NameError, SyntaxError)):
            raise
    if said is not None:
        assert re.search(said, messages[0])
    elif values is not None:
        assert messages == []
        assert forgotten.startswith((*NOT_NEEDED, OTHER_WEIGHTS))
        if forgotten != OTHER_WEIGHTS:
            assert values.items() <= expected[0].items()
            assert step == expected[1]
            assert not ll.debug.differences(params, expected[2])
