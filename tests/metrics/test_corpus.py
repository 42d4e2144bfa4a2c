"""Metrics of a whole corpus, and predictions by `generate`, against Seq2SeqTrainer and torchmetrics."""

import numpy as np
import pytest
import torch
from torchmetrics.functional.text import bleu_score, char_error_rate
from transformers import (
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

import looplib as ll

GENERATE = {"max_length": 9, "num_beams": 2, "do_sample": False}


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=12, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **sizes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that answers differ, and some end early
    return model.eval()


def rows(count=10):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(2, 12, (6,), generator=generator),
            "labels": torch.randint(2, 12, (5,), generator=generator),
        }
        for _ in range(count)
    ]


def bleu(predictions, references):
    return float(bleu_score([text(ids) for ids in predictions], [[text(ids)] for ids in references], n_gram=1))


def text(ids):
    return " ".join(str(token) for token in ids if token > 1)


def metric_fn(model, batch):
    tokens = model.generate(input_ids=batch["input_ids"], **GENERATE)
    return {"loss": ll.losses.model_loss(model, batch), "bleu": ll.metrics.Corpus.of(bleu, tokens, batch["labels"])}


def test_evaluation_and_prediction_equal_those_of_seq2seq_trainer(tmp_path):
    model, data = t5(), rows()
    arguments = Seq2SeqTrainingArguments(
        tmp_path,
        per_device_eval_batch_size=4,
        predict_with_generate=True,
        generation_max_length=GENERATE["max_length"],
        generation_num_beams=GENERATE["num_beams"],
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )

    def compute_metrics(prediction):
        return {"bleu": bleu(prediction.predictions.tolist(), prediction.label_ids.tolist())}

    theirs = Seq2SeqTrainer(model, arguments, compute_metrics=compute_metrics).predict(data)
    loader = ll.make_loader(data, batch_size=4, order=ll.data.in_order())
    state = ll.init_state(model)
    scores = ll.evaluate(ll.make_eval_step(model, metric_fn), state, loader)
    assert scores["bleu"] == pytest.approx(theirs.metrics["test_bleu"], abs=1e-6)
    assert 0 < scores["bleu"] < 1
    predict_step = ll.make_predict_step(model, lambda model, batch: model.generate(batch["input_ids"], **GENERATE))
    ll.predict_to(tmp_path / "answers", predict_step, state, loader)
    answers = ll.evaluation.read_predictions(tmp_path / "answers")["output"]
    padded = [list(answer) + [0] * (theirs.predictions.shape[1] - len(answer)) for answer in answers]
    np.testing.assert_array_equal(padded, np.where(theirs.predictions == -100, 0, theirs.predictions))


@pytest.mark.parametrize("beams", [1, 3])
def test_strings_of_padded_inputs_equal_those_of_seq2seq_trainer(beams, tmp_path):
    """Inputs and answers of different lengths, greedy and beam search, as strings in memory, on disk and in a metric."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    torch.manual_seed(3)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    ids = {"vocab_size": len(tokenizer), "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, **ids)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        model.shared.weight[1] *= 3  # so that some answers end early
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

    loader, state = (
        ll.make_loader(data, batch_size=3, order=ll.data.in_order(), collate_fn=collate),
        ll.init_state(model),
    )
    predict_step = ll.make_predict_step(model, answer)
    assert [text for output in ll.predict(predict_step, state, loader) for text in output["text"]] == expected
    path = ll.predict_to(tmp_path / "answers", predict_step, state, loader)
    assert list(ll.evaluation.read_predictions(path)["text"]) == expected

    def metric_fn(model, batch):
        references = tokenizer.batch_decode(batch["labels"].clamp(min=0), skip_special_tokens=True)
        return {"errors": ll.metrics.Corpus.of(char_error_rate, answer(model, batch)["text"], references)}

    errors = ll.evaluate(ll.make_eval_step(model, metric_fn), state, loader)["errors"]
    assert errors == pytest.approx(char_error_rate(expected, [text[::-1] for text in texts]).item(), abs=1e-6)


def test_columns_of_strings_tensors_and_ragged_rows_reach_the_function_as_lists():
    seen = []

    def keep(*columns):
        seen.extend(columns)
        return 0.5

    one = ll.metrics.Corpus.of(keep, ["a", "b"], torch.tensor([[1, 2], [3, 4]]))
    two = ll.metrics.Corpus.of(keep, ["c"], torch.tensor([[5, 6, 7]]))
    assert ll.compute({"score": ll.merge({"score": one}, {"score": two})["score"]}) == {"score": 0.5}
    assert seen == [["a", "b", "c"], [[1, 2], [3, 4], [5, 6, 7]]]


def test_lengths_are_checked():
    with pytest.raises(ValueError, match=r"columns of lengths \[2, 1\]; give at least one, all of the same length"):
        ll.metrics.Corpus.of(len, ["a", "b"], ["a"])
    with pytest.raises(ValueError, match=r"columns of lengths \[\]"):
        ll.metrics.Corpus.of(len)


@pytest.mark.parametrize(
    "column",
    [
        torch.tensor,
        np.array,
        lambda rows: list(torch.tensor(rows)),
        lambda rows: [{"row": np.array(r)} for r in rows],
    ],
    ids=["tensor", "array", "list of tensors", "list of dicts"],
)
def test_a_corpus_keeps_its_rows_when_a_reader_overwrites_its_batch(column):
    buffer = column([[1, 2], [3, 4]])
    record = ll.metrics.Corpus.of(lambda rows: str(rows), buffer)
    expected = record.compute()
    rows = [buffer] if isinstance(buffer, (torch.Tensor, np.ndarray)) else buffer
    for row in rows:
        (row["row"] if isinstance(row, dict) else row)[:] = 0
    assert record.compute() == expected
