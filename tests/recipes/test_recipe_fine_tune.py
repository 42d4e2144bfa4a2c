import itertools
import re
import shutil
import sysconfig
from pathlib import Path

import peft
import pytest
import torch
from shared import InDouble
from test_recipes import load
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

import looplib as ll

# peft asks transformers for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
recipe = load("fine_tune_lora")


@pytest.fixture(scope="module")
def docstrings(tmp_path_factory):
    """The packages, and a little of the rest: to read all of the standard library takes seconds."""
    folder, source = tmp_path_factory.mktemp("library"), Path(sysconfig.get_paths()["stdlib"])
    for name in (*recipe.PACKAGES, "json"):
        shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("test*", "__pycache__"))
    for name in ("argparse.py", "pathlib.py", "typing.py"):
        if (source / name).is_file():
            shutil.copy(source / name, folder)
    with pytest.MonkeyPatch().context() as patched:
        patched.setattr(recipe.sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
        return recipe.read_library()


@pytest.fixture(scope="module")
def run(docstrings, tmp_path_factory):
    """A small run: its folder and its scores."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch().context() as patched:
        patched.setattr(recipe, "read_library", lambda: docstrings[::4])
        topics = recipe.pydoc_data.topics.topics
        patched.setattr(recipe.pydoc_data.topics, "topics", {name: topics[name] for name in sorted(topics)[:40]})
        scores = recipe.main(1, 128, rank=2, base_steps=2, base_width=24, directory=str(folder))
    return folder, scores


@pytest.fixture(scope="module")
def base(docstrings, tmp_path_factory):
    """The folder of the base model after two steps."""
    return recipe.make_base(tmp_path_factory.mktemp("base") / "base", docstrings[::4], 2, 24, 128, 0)


@pytest.mark.slow
def test_the_files_are_the_model_of_the_loop(run):
    folder, scores = run
    assert scores["served"] == 1
    assert all(0 <= scores[method] <= 1 for method in ("head", "lora", "full"))
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "merged")
    fresh = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=len(recipe.PACKAGES))
    adapted = peft.PeftModel.from_pretrained(fresh, folder / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
    batch = tokenizer(["Send a mail message.", "An event loop.", "Parse."], padding=True, return_tensors="pt")
    with torch.no_grad():
        # A product of low rank, added to the weights or to the outputs.
        torch.testing.assert_close(merged(**batch).logits, adapted(**batch).logits, rtol=1e-4, atol=1e-5)
    assert merged.config.id2label == dict(enumerate(recipe.PACKAGES))
    assert (folder / "adapter/adapter_model.safetensors").stat().st_size < 0.5 * (
        folder / "merged/model.safetensors"
    ).stat().st_size


def small_task(base):
    """A loader of five epochs in 20 batches, and a function that makes a model with LoRA and dropout."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 200, (32, 12), generator=generator)
    examples = [{"input_ids": row, "labels": row[0] % 9} for row in ids]
    loader = ll.make_loader(examples, batch_size=8, seed=0)

    def model():
        torch.manual_seed(0)
        classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=9)
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules="all-linear")
        return peft.get_peft_model(classifier, lora)

    return loader, model


@pytest.mark.slow
def test_the_first_20_steps_are_those_of_pefts_example(base, tmp_path):
    loader, model = small_task(base)
    ours, theirs = model().double(), model().double()
    with InDouble():
        state = recipe.fit(ours, loader, 1e-2, 20, 0, tmp_path)
    adamw = torch.optim.AdamW(params=theirs.parameters(), lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(adamw, num_warmup_steps=2, num_training_steps=20)
    theirs.train()
    for epoch in range(5):
        for batch in loader(at := ll.TrainState(step=4 * epoch, epoch=epoch, epoch_length=4)):
            torch.manual_seed(ll.debug.step_seed(at.replace(step=scheduler.last_epoch)))
            with InDouble():
                theirs(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            adamw.step()
            scheduler.step()
            adamw.zero_grad()
    assert state.step == scheduler.last_epoch == 20
    for name, tensor in theirs.named_parameters():
        torch.testing.assert_close(state.params[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_fit_that_was_interrupted_ends_as_one_that_was_not(base, tmp_path):
    loader, model = small_task(base)
    expected = recipe.fit(model(), loader, 1e-2, 20, 0, tmp_path / "whole").params
    stopped, calls = model(), itertools.count()

    def press(module, inputs):
        if next(calls) == 10:
            raise KeyboardInterrupt

    stopped.register_forward_pre_hook(press)
    with pytest.raises(KeyboardInterrupt):
        recipe.fit(stopped, loader, 1e-2, 20, 0, tmp_path / "stopped")
    found = recipe.fit(model(), loader, 1e-2, 20, 0, tmp_path / "stopped").params
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_held_out_docstrings_are_of_their_package_and_no_near_duplicates(docstrings):
    packages, tables = dict(docstrings), recipe.make_tables(docstrings)
    numbers, words = {}, {}
    for name in tables:
        words[name] = torch.zeros(len(tables[name]), 20_000)
        for row, text in zip(words[name], tables[name]["text"], strict=True):
            for word in set(re.findall("[a-z]+", text.lower())):
                row[numbers.setdefault(word, len(numbers))] = 1
    assert min(len(words["train"]), 3 * len(words["test"])) > 600
    for name in tables:
        for text, label in zip(tables[name]["text"], tables[name]["labels"], strict=True):
            assert packages[text] == recipe.PACKAGES[label]
    both = words["test"] @ words["train"].T
    either = words["test"].sum(1, keepdim=True) + words["train"].sum(1) - both
    assert 0.3 < (both / either).max() <= 0.5
