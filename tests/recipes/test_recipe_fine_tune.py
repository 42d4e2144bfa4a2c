import shutil
import sysconfig
from pathlib import Path

import peft
import pytest
import torch
from test_recipes import load
from transformers import AutoModelForSequenceClassification, AutoTokenizer

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
