"""Arguments of a model, picked from a batch."""

import re

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import looplib as ll


class Net(nn.Module):
    def forward(self, x, *, y=None, **settings):
        return x if y is None else x + y


class Open(nn.Module):
    def forward(self, **columns):
        return columns


def test_columns_that_forward_takes_are_picked_and_others_named():
    batch = {"text": ["a"], "x": torch.ones(1), "index": 3}
    with pytest.warns(UserWarning, match=re.escape("left out of the batch: text, index; Net.forward takes x, y")):
        assert ll.losses.model_inputs(Net(), batch) == {"x": torch.ones(1)}
    assert ll.losses.model_inputs(Net(), {"y": 1, "x": 2}) == {"y": 1, "x": 2}
    assert ll.losses.model_inputs(Open(), batch) == batch
    with pytest.raises(TypeError, match=r"the batch is a .*list"):
        ll.losses.model_inputs(Net(), [torch.ones(1)])


def test_the_columns_are_those_that_the_trainer_keeps(tmp_path):
    datasets = pytest.importorskip("datasets")
    from transformers import Trainer, TrainingArguments

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=11, **sizes))
    columns = {"input_ids": [[1, 2]], "labels": [0], "text": ["a b"], "attention_mask": [[1, 1]], "row": [7]}
    dataset = datasets.Dataset.from_dict(columns)
    trainer = Trainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to="none"), train_dataset=dataset)
    [kept] = trainer.get_train_dataloader()
    with pytest.warns(UserWarning, match="left out of the batch: text, row;"):
        assert set(ll.losses.model_inputs(model, dataset[:1])) == set(kept)
