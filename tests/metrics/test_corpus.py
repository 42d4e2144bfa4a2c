"""Metrics of a whole corpus, and predictions by `generate`, against Seq2SeqTrainer and torchmetrics."""

import numpy as np
import pytest
import torch
from ranks import launch
from torchmetrics.functional.text import char_error_rate
from transformers import (
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

import looplib as ll


@pytest.mark.parametrize("beams", [3, 1])
def test_strings_of_padded_inputs_equal_those_of_seq2seq_trainer(beams, tmp_path):
    """Inputs and answers of different lengths, as strings in memory, on disk and in a metric."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    torch.manual_seed(3)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    ids = {"vocab_size": len(tokenizer), "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, **ids)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that answers differ
        model.shared.weight[1] *= 3  # and some end early
    texts = ["one", "twenty two", "a b c d e", "x", "seven eight nine", "z" * 20, "ten"]
    data = [{"input_ids": tokenizer(text).input_ids, "labels": tokenizer(text[::-1]).input_ids} for text in texts]
    collate = DataCollatorForSeq2Seq(tokenizer)
    arguments = Seq2SeqTrainingArguments(
        tmp_path,
        per_device_eval_batch_size=3,
        predict_with_generate=True,
        generation_max_length=12,
        generation_num_beams=beams,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    theirs = Seq2SeqTrainer(model, arguments, data_collator=collate).predict(data).predictions
    expected = tokenizer.batch_decode(np.where(theirs == -100, 0, theirs), skip_special_tokens=True)
    assert len(set(expected)) > 2

    def answer(model, batch):
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        tokens = model.generate(**inputs, max_length=12, num_beams=beams, do_sample=False)
        return {"text": tokenizer.batch_decode(tokens, skip_special_tokens=True)}

    def metric_fn(model, batch):
        references = tokenizer.batch_decode(batch["labels"].clamp(min=0), skip_special_tokens=True)
        return {"errors": ll.metrics.Corpus.of(char_error_rate, answer(model, batch)["text"], references)}

    state = ll.init_state(model)
    loader = ll.make_loader(data, batch_size=3, order=ll.data.in_order(), collate_fn=collate)
    predict_step = ll.make_predict_step(model, answer)
    assert [text for output in ll.predict(predict_step, state, loader) for text in output["text"]] == expected
    path = ll.predict_to(tmp_path / "answers", predict_step, state, loader)
    assert list(ll.evaluation.read_predictions(path)["text"]) == expected
    errors = ll.evaluate(ll.make_eval_step(model, metric_fn), state, loader)["errors"]
    assert errors == pytest.approx(char_error_rate(expected, [text[::-1] for text in texts]).item(), abs=1e-6)


def average_length(names, rows):
    """Of lists: no tensor or array has a method `index`."""
    return sum(map(len, rows)) / (1 + names.index("c"))


def corpora():
    one = ll.metrics.Corpus.of(average_length, ["a", "b"], torch.tensor([[1, 2], [3, 4]]))
    return {"score": one}, {"score": ll.metrics.Corpus.of(average_length, ["c"], torch.tensor([[5, 6, 7]]))}


def test_columns_of_strings_tensors_and_ragged_rows_reach_the_function_as_lists():
    assert ll.compute(ll.merge(*corpora())) == {"score": 7 / 3}


def on_two_ranks():
    with ll.distributed.setup():
        own = corpora()[ll.distributed.rank()]
        assert ll.compute(ll.distributed.reduce(own)) == {"score": 7 / 3}


def test_the_function_gets_the_samples_of_all_ranks():
    launch(2, on_two_ranks)


def test_lengths_are_checked():
    for columns, lengths in ((["ab", "a"], r"\[2, 1\]"), ([], r"\[\]")):
        with pytest.raises(ValueError, match=f"columns of lengths {lengths}"):
            ll.metrics.Corpus.of(len, *columns)


def test_a_corpus_keeps_its_rows_when_a_reader_overwrites_its_batch():
    for column in (
        torch.tensor,
        np.array,
        lambda rows: list(torch.tensor(rows)),
        lambda rows: [{"row": np.array(r)} for r in rows],
    ):
        buffer = column([[1, 2], [3, 4]])
        record = ll.metrics.Corpus.of(str, buffer)
        expected = record.compute()
        for row in buffer:
            (row["row"] if isinstance(row, dict) else row)[:] = 0
        assert record.compute() == expected
