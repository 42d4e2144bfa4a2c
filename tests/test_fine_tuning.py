"""The page "Fine-tune a language model", beside padded batches and the files of transformers and peft."""

import contextlib
import math
import operator
import re

import peft
import pytest
import torch
import transformers
from public import ROOT
from shared import InDouble
from torch.nn.utils.rnn import pad_sequence

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "recipes/FINE_TUNING.md").read_text(), re.S)
TASK, SAMPLES, PACKING, LORA, CHECK, TRAIN, WRITE, SAVE = BLOCKS
# peft asks transformers for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def run(names, *blocks):
    for block in blocks:
        exec(compile(block, "FINE_TUNING.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that all blocks leave, and the folder in which they ran."""
    folder = tmp_path_factory.mktemp("page")
    with contextlib.chdir(folder):
        return run({}, *BLOCKS), folder


def adapted(page, attention="sdpa"):
    """The page's names up to the model, in float64 and without dropout."""
    names, folder = page
    names = {**names}
    with contextlib.chdir(folder):
        block = LORA.replace("lora_dropout=0.05", "lora_dropout=0.0")
        run(names, block.replace('("base"', f'("base", attn_implementation="{attention}"'))
    # One of LoRA's matrices begins as zero, and gives the other no gradient.
    generator = torch.Generator().manual_seed(1)
    for name, tensor in names["model"].named_parameters():
        if "lora_B" in name:
            tensor.data.normal_(0, 0.02, generator=generator)
    names["model"].double()
    return names


def padded(samples):
    """A batch as transformers pads it."""
    columns = {name: [torch.tensor(sample[name]) for sample in samples] for name in ("input_ids", "labels")}
    mask = [torch.ones_like(ids) for ids in columns["input_ids"]]
    return {
        "input_ids": pad_sequence(columns["input_ids"], batch_first=True),
        "attention_mask": pad_sequence(mask, batch_first=True),
        "labels": pad_sequence(columns["labels"], batch_first=True, padding_value=-100),
    }


def batches_of(names, epochs):
    """The samples of each batch, in the loader's order."""
    for epoch in range(epochs):
        for batch in range(len(names["loader"])):
            at = names["ll"].TrainState(epoch=epoch, batch=batch, epoch_length=len(names["loader"]))
            yield [names["train_set"][index] for index in names["loader"].indices(at)]


def trained(model):
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_gradient_of_packed_rows_is_that_of_the_padded_batch(page, attention):
    names = adapted(page, attention)
    assert names["model"].config._attn_implementation == attention
    run(names, TRAIN.partition("ckpt = ")[0])
    samples = next(batches_of(names, 1))
    rows = names["collate_fn"](samples)
    assert len(rows) > 2
    model = adapted(page)["model"]
    with InDouble():
        found = names["grad_fn"](names["ll"].init_state(names["model"]), rows)
        model(**padded(samples)).loss.backward()
    assert found.samples == len(samples) == 16
    assert trained(model).keys() == found.grads.keys()
    for name, tensor in trained(model).items():
        assert tensor.grad.abs().max() > 1e-6
        torch.testing.assert_close(found.grads[name], tensor.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.slow
def test_the_first_20_steps_are_those_of_a_loop_of_transformers(page):
    names = adapted(page)
    run(names, TRAIN.partition("ckpt = ")[0])
    state = names["ll"].init_state(names["model"], names["optimizer"], loader=names["loader"])
    with InDouble():
        while state.step < 20:
            for batch in names["loader"](state):
                if state.step < 20:
                    state, _ = names["train_step"](state, batch)
    model = adapted(page)["model"]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 3, 5 * len(names["loader"]))
    clipped = 0
    for samples, _ in zip(batches_of(names, 3), range(20), strict=False):
        with InDouble():
            model(**padded(samples)).loss.backward()
        clipped += torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert clipped > 0
    for name, tensor in trained(model).items():
        torch.testing.assert_close(state.params[name], tensor, rtol=1e-9, atol=1e-11)


def loaded(folder):
    """The adapter on the base model and the merged model, as transformers and peft load them."""
    auto = transformers.AutoModelForCausalLM
    adapter = peft.PeftModel.from_pretrained(auto.from_pretrained(folder / "base"), folder / "adapter")
    return adapter.eval(), auto.from_pretrained(folder / "merged").eval()


def perplexity(model, samples):
    """That of all answers together, from transformers' mean loss of each."""
    counts = [sum(label != -100 for label in sample["labels"]) for sample in samples]
    with torch.no_grad():
        losses = [model(**padded([sample])).loss.item() for sample in samples]
    return math.exp(sum(map(operator.mul, losses, counts)) / sum(counts))


@pytest.mark.slow
def test_the_files_are_the_model_of_the_loop_with_its_perplexity(page):
    names, folder = page
    for model in loaded(folder):
        assert names["perplexity"] == pytest.approx(perplexity(model, names["test_set"]), rel=1e-4)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    assert names["perplexity"] < 0.5 * perplexity(base, names["test_set"])
    assert (folder / "adapter/adapter_model.safetensors").stat().st_size < 2e5


@pytest.mark.slow
def test_what_is_written_is_what_the_loaded_model_generates(page):
    names, folder = page
    adapter, merged = loaded(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "merged")
    for question, row in zip(("str.upper: ", "list.append: "), names["written"], strict=True):
        alone = tokenizer(question, return_tensors="pt")
        expected = adapter.generate(**alone, max_new_tokens=30, do_sample=False)[0]
        assert tokenizer.decode(row, skip_special_tokens=True) == tokenizer.decode(expected, skip_special_tokens=True)
        with torch.no_grad():
            logits = adapter(expected[None]).logits
            torch.testing.assert_close(merged(expected[None]).logits, logits, rtol=1e-4, atol=1e-4)
