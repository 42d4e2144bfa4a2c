"""The table for those who come from fastNLP: each row runs, each name has one, and the document is that of them."""

import importlib.util
import signal

import pytest
from ranks import launch
from rows_fastnlp import EXPECTED, TABLE
from trainer_rows import ROOT

import looplib as ll

SNIPPETS = [row for row in TABLE.rows if row.function is not None]


@pytest.mark.parametrize("row", SNIPPETS, ids=str)
def test_the_snippet_does_what_its_row_says(row, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    run(row.function)


def test_every_name_has_a_row_and_every_row_a_name():
    assert TABLE.wrong(EXPECTED) == []
    assert sorted(TABLE.names()) == sorted(f"{owner}.{name}" for owner, names in EXPECTED.items() for name in names)


def test_the_document_is_that_of_the_rows():
    assert (ROOT / TABLE.path).read_text() == TABLE.document(), (
        "write it again: python tests/other_trainers/trainer_rows.py"
    )


# recipes/from_fastnlp.py

SMALL = {"n_epochs": 4, "batch_size": 256, "lr": 1e-2, "evaluate_every": 4, "patience": 9}  # of 6 updates each


def load():
    spec = importlib.util.spec_from_file_location("from_fastnlp", ROOT / "recipes/from_fastnlp.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def values(folder):
    """The log, and the steps of the checkpoints."""
    steps = ll.checkpoint_io(folder / "checkpoints").steps()
    return ll.log.read_jsonl(folder / "log.jsonl"), [found.step for found in steps]


def test_the_recipe_is_short():
    assert len((ROOT / "recipes/from_fastnlp.py").read_text().splitlines()) < 130


@pytest.mark.parametrize("fp16", ["bfloat16", "float16", "float32"])
def test_the_recipe_ends_with_the_best_of_its_evaluations(tmp_path, fp16, capsys):
    scores = load().main(**SMALL, fp16=fp16, folder=str(tmp_path))
    rows, steps = values(tmp_path)
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20, 24]
    assert ("train/loss_scale" in rows[0]) == (fp16 == "float16")
    found = {row["step"]: row["eval/accuracy"] for row in rows}
    best = sorted(found, key=lambda step: (-found[step], step))[:2]
    assert steps == sorted({*best, 24})
    assert scores["accuracy"] == found[best[0]] > 0.7
    assert f"by the weights of step {best[0]}" in capsys.readouterr().out


@pytest.mark.parametrize("stopped_after", [1, 7, 12])
def test_the_recipe_continues_with_the_next_sample(tmp_path, stopped_after, capsys):
    expected = load().main(**SMALL, folder=str(tmp_path / "whole"))
    recipe, passes = load(), []
    loss_fn = recipe.loss_fn

    def counted(model, batch):
        passes.append(batch)
        if len(passes) == 2 * stopped_after:  # of two microbatches each
            signal.raise_signal(signal.SIGTERM)
        return loss_fn(model, batch)

    recipe.loss_fn = counted
    assert recipe.main(**SMALL, folder=str(tmp_path / "parts")) == {}
    assert f"stopped at step {stopped_after} of 24" in capsys.readouterr().out
    assert recipe.main(**SMALL, folder=str(tmp_path / "parts")) == expected
    assert values(tmp_path / "parts")[0] == values(tmp_path / "whole")[0]
    assert len(passes) == 48


def test_the_recipe_stops_early(tmp_path):
    load().main(**{**SMALL, "patience": 1, "lr": 0.0}, folder=str(tmp_path))
    rows, _ = values(tmp_path)
    assert [row["step"] for row in rows] == [4, 8]


def test_the_recipe_learns_few_batches_by_heart(tmp_path):
    settings = {**SMALL, "n_epochs": 40, "batch_size": 32, "dropout": 0.0, "patience": 99}
    scores = load().main(**settings, overfit_batches=2, folder=str(tmp_path))
    assert scores["accuracy"] == 1
    assert values(tmp_path)[0][-1]["samples"] == 40 * 2 * 32


def train(settings):
    load().main(**settings)


@pytest.mark.slow
@pytest.mark.parametrize("overfit_batches", [0, 2])
def test_two_ranks_log_what_one_process_logs(tmp_path, overfit_batches):
    settings = {**SMALL, "fp16": "float32", "dropout": 0.0, "overfit_batches": overfit_batches}
    load().main(**settings, folder=str(tmp_path / "one"))
    launch(2, train, {**settings, "folder": str(tmp_path / "two")})
    (one, steps), (two, found) = values(tmp_path / "one"), values(tmp_path / "two")
    assert found == steps
    for expected, row in zip(one, two, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)  # sums of float32 in other orders, which Adam enlarges
