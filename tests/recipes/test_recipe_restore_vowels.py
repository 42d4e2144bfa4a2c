"""The recipe of an encoder-decoder: its answers are those of `generate`, its scores those of libraries."""

import re

import pytest
import torch
from sklearn.metrics import accuracy_score
from test_recipes import load
from torchmetrics.functional.text import char_error_rate, word_error_rate

import looplib as ll

SETTINGS = {"steps": 6, "batch_size": 16, "width": 16, "depth": 1, "warmup": 2, "beams": 2, "eval_every": 3}
recipe = load("restore_vowels")


@pytest.fixture(scope="module")
def rows():
    """The shuffled phrases, whose tokens take seconds."""
    return recipe.load_data(0, 0)[0]


def test_answers_are_those_of_generate_and_scores_those_of_the_libraries(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "load_data", lambda held_out, seed: (rows[held_out:], rows[:held_out]))
    models, make = [], recipe.hf.T5ForConditionalGeneration
    monkeypatch.setattr(
        recipe.hf, "T5ForConditionalGeneration", lambda config: models.append(make(config)) or models[0]
    )
    scores = recipe.main(**SETTINGS, held_out=20, directory=str(tmp_path))
    losses = [row["eval/loss"] for row in ll.log.read_jsonl(tmp_path / "log.jsonl") if "eval/loss" in row]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    shown = capsys.readouterr().out

    test_set = rows[:20]
    batch = recipe.hf.DataCollatorForSeq2Seq(recipe.TOKENIZER)([dict(row) for row in test_set])
    phrases = [recipe.TOKENIZER.decode(row["labels"][:-1]) for row in test_set]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for name, beams in (("greedy", 1), ("beam", 2)):
        columns = ll.evaluation.read_predictions(tmp_path / f"answers-step-6-beams-{beams}")
        assert list(columns["phrase"]) == phrases
        with torch.no_grad():
            ids = models[0].eval().generate(**inputs, num_beams=beams, do_sample=False, max_new_tokens=64)
        answers = recipe.TOKENIZER.batch_decode(ids, skip_special_tokens=True)
        assert list(columns["answer"]) == answers
        assert scores[f"{name}_exact_matches"] == accuracy_score(phrases, answers)
        assert scores[f"{name}_word_errors"] == pytest.approx(word_error_rate(answers, phrases).item())
        assert scores[f"{name}_character_errors"] == pytest.approx(char_error_rate(answers, phrases).item())
        assert f"{name} search, 20 held-out phrases: {scores[f'{name}_exact_matches']:.1%} exact matches" in shown
    assert phrases[0] in shown


def test_a_shorthand_lacks_vowels_and_held_out_phrases_are_new(rows):
    assert len(rows) > 8600
    train_set, test_set = rows[300:], rows[:300]
    texts = [{recipe.TOKENIZER.decode(row["labels"][:-1]) for row in rows} for rows in (train_set, test_set)]
    assert not texts[0] & texts[1]
    for row in test_set:
        short, text = (recipe.TOKENIZER.decode(row[name][:-1]) for name in ("input_ids", "labels"))
        assert re.fullmatch("".join(f"[aeiou]*{letter}" for letter in short) + "[aeiou]*", text)
        words = list(zip(short.split(" "), text.split(" "), strict=True))
        assert 1 <= len(words) <= 3
        assert all(a[0] == b[0] and not set("aeiou") & set(a[1:]) for a, b in words)
