"""The summary of a run, against the Trainer's counts and sums by hand."""

import io
import logging
import re

import pytest
import torch
from ranks import launch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import looplib as ll


def printed(*arguments, **settings):
    file = io.StringIO()
    ll.log.summary(*arguments, file=file, **settings)
    facts, table = file.getvalue().split("\n\n") if "\n\n" in file.getvalue() else ("", file.getvalue())
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.strip().splitlines()]
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in facts.strip().splitlines()), rows


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
        self.head = nn.Linear(4, 10).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.again = self.embed


@pytest.mark.parametrize("depth", range(4))
def test_each_parameter_is_counted_once(depth):
    facts, rows = printed(Tied(), depth=depth)
    total = sum(p.numel() for p in Tied().parameters())
    assert rows[-1][:4] == ["total", "Tied", str(total), str(total - 3)]
    numbers = [[int(cell) for cell in row[2:4]] for row in rows[1:-1]]
    if depth:
        assert [sum(column) for column in zip(*numbers, strict=True)] == [total, total - 3]
        assert not any(row[0].startswith("again") for row in rows)
    else:
        assert not numbers
    assert {row[0].count(".") for row in rows} <= set(range(max(depth, 1)))
    assert facts["frozen parameters"] == "3"


def test_dtypes_and_devices_are_listed():
    rows = {row[0]: row for row in printed(Tied().to("meta"))[1]}
    assert rows["head"][4:] == ["bfloat16", "meta"]
    assert rows["total"][4:] == ["bfloat16, float32", "meta"]


def test_the_numbers_are_those_that_the_trainer_prints(tmp_path, caplog):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=11, **sizes))
    model.bert.embeddings.requires_grad_(False)
    rows = [{"input_ids": torch.ones(3, dtype=torch.long), "labels": torch.tensor(0)}] * 24
    arguments = TrainingArguments(
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        log_level="info",
    )
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        Trainer(model, arguments, train_dataset=rows).train()
    finally:
        logger.removeHandler(caplog.handler)
    said = dict(re.findall(r"^\s*([\w ]+?)(?: \(.*\))? = ([\d,]+)", caplog.text.replace("[transformers] ", ""), re.M))
    said |= dict(re.findall(r"  ([A-Z][\w ]+?)(?: \(.*?\))? = ([\d,]+)", caplog.text))
    facts, _ = printed(model, ll.make_loader(rows, batch_size=8), epochs=2, microbatches=2)
    assert facts["samples"] == said["Num examples"]
    assert facts["epochs"].split()[0] == said["Num Epochs"]
    assert facts["steps"] == said["Total optimization steps"]
    assert facts["batch size"].startswith(f"{said['Total train batch size']}: 1 rank, 2 microbatches of at most 4 ")
    assert facts["trainable parameters"] == said["Number of trainable parameters"]


def test_streams_and_runs_without_a_loader():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(8))

    facts, _ = printed(nn.Linear(2, 1), ll.make_loader(Stream(), batch_size=4), steps=1000)
    assert facts["samples"] == "unknown (a stream)"
    assert facts["steps"] == "1,000"
    assert "samples" not in printed(nn.Linear(2, 1))[0]


def on_two_ranks():
    with ll.distributed.setup():
        ll.log.summary(nn.Linear(2, 1), ll.make_loader(range(100), batch_size=32))


def test_two_ranks_print_once():
    text = launch(2, on_two_ranks)
    assert text.count("batch size") == 1
    assert "32: 2 ranks, 1 microbatch of at most 16 samples each" in text


def test_what_is_refused():
    with pytest.raises(ValueError, match="depth is -1"):
        ll.log.summary(nn.Linear(1, 1), depth=-1)
    with pytest.raises(ValueError, match="microbatches is 0"):
        ll.log.summary(nn.Linear(1, 1), microbatches=0)
