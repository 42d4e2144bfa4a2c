"""Arguments of a model, picked from a batch."""

import re

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

import looplib as ll


class Net(nn.Module):
    def forward(self, x, *, y=None, **settings):
        return x if y is None else x + y


class Open(nn.Module):
    def forward(self, **columns):
        return columns


def test_columns_that_forward_takes_are_picked_and_others_named_once():
    batch = {"text": ["a"], "x": torch.ones(1), "index": 3}
    with pytest.warns(UserWarning, match=re.escape("left out of the batch: text, index; Net.forward takes x, y")):
        assert ll.losses.model_inputs(Net(), batch) == {"x": torch.ones(1)}
    ll.losses.model_inputs(Net(), batch)  # warnings are errors in tests
    assert ll.losses.model_inputs(Net(), {"y": 1, "x": 2}) == {"y": 1, "x": 2}
    assert ll.losses.model_inputs(Open(), batch) == batch


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


def test_what_is_missing_is_named():
    with pytest.raises(TypeError, match=r"^Net.forward takes x, y; the batch has z, y, but not x$"):
        ll.losses.model_inputs(Net(), {"z": 1, "y": 2})
    with pytest.raises(TypeError, match="the batch is a tuple; give a dict"):
        ll.losses.model_inputs(Net(), (1, 2))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collator_that_cannot_take_text_is_told_about_it(workers):
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0})), pad_token="[PAD]")
    rows = [{"input_ids": [1, 2], "text": "a b"}, {"input_ids": [1], "text": "a"}]
    loader = ll.make_loader(rows, batch_size=2, collate_fn=DataCollatorWithPadding(tokenizer), num_workers=workers)
    with pytest.raises(ValueError, match="Unable to create tensor") as caught:
        list(loader(ll.TrainState(epoch_length=1)))
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "columns of text: text. If collate_fn cannot take them, tokenize or remove them" in told
