"""Documents packed into one row, which a model keeps apart or does not."""

import warnings

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

import looplib as ll
from looplib import testing

VOCAB = 11
LENGTHS = [4, 3, 6]


def llama():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes)).eval()


def bloom():  # ALiBi: its forward takes no positions
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)).eval()


def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (1, length), generator=generator) for length in LENGTHS]


def packed(**columns):
    ids = torch.cat(documents(), 1)
    labels = ids.clone()
    labels[0, [0, 4, 7]] = -100  # the first token of each document is predicted by none
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(length)[None] for length in LENGTHS], 1),
        **columns,
    }


def each_alone(model):
    """The mean over the tokens of all documents, of the model alone."""
    losses = [model(input_ids=ids, labels=ids).loss.item() for ids in documents()]
    return sum(loss * (length - 1) for loss, length in zip(losses, LENGTHS, strict=True)) / sum(
        length - 1 for length in LENGTHS
    )


def value(model, batch):
    return ll.losses.model_loss(model, batch).compute().item()


MASK = torch.ones(1, sum(LENGTHS), dtype=torch.long)


@pytest.mark.parametrize(
    ("make", "columns", "message"),
    [
        (llama, {"attention_mask": MASK}, r"attention_mask \(b, length\).*LlamaForCausalLM.*leave the mask out"),
        (bloom, {}, "BloomForCausalLM.forward takes no position_ids"),
        (bloom, {"attention_mask": MASK}, "BloomForCausalLM.forward takes no position_ids"),
    ],
)
def test_packed_rows_whose_documents_see_each_other_are_warned_of_once(make, columns, message):
    model, batch = make(), packed(**columns)
    with pytest.warns(UserWarning, match=message) as caught:
        loss = value(model, batch)
    assert [one.filename for one in caught] == [__file__]
    assert abs(loss - each_alone(model)) > 1e-4  # the warning is right
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            value(model, batch)


def test_packed_rows_that_come_later_are_found():
    model = llama()
    single = packed(attention_mask=MASK, position_ids=torch.arange(sum(LENGTHS))[None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            value(model, single)
    with pytest.warns(UserWarning, match="packed"):
        [value(model, packed(attention_mask=MASK)) for _ in range(3)]


def test_rows_that_are_kept_apart_and_rows_with_padding_are_not_warned_of():
    model = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value(model, packed()) == pytest.approx(each_alone(model), rel=1e-5)
        ids = torch.randint(0, VOCAB, (2, 6))
        left = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
        for mask in (left, left.flip(1)):
            positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as in transformers' generate
            value(model, {"input_ids": ids, "labels": ids, "attention_mask": mask, "position_ids": positions})
        causal = torch.ones(sum(LENGTHS), sum(LENGTHS), dtype=torch.bool).tril()
        number = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
        blocks = causal & (number[:, None] == number[None, :])
        loss = value(model, packed(attention_mask=blocks[None, None]))  # a mask that keeps them apart
        assert loss == pytest.approx(each_alone(model), rel=1e-5)


@pytest.mark.parametrize("make", [bloom, llama])
def test_the_line_of_the_page_finds_models_that_leak_between_packed_rows(make):
    model = make()
    predict_step = ll.make_predict_step(model, lambda model, batch: model(**batch, use_cache=False).logits)

    def packed_logits(state, rows):
        samples, length = rows.shape
        positions = torch.arange(length).repeat(samples)[None]
        logits = predict_step(state, {"input_ids": rows.reshape(1, -1), "position_ids": positions})
        return logits.view(samples, length, -1)

    rows = torch.randint(0, VOCAB, (4, 6))
    if make is llama:
        testing.assert_samples_independent(packed_logits, ll.init_state(model), rows)
    else:
        with pytest.raises(AssertionError, match="samples of a batch see each other"):
            testing.assert_samples_independent(packed_logits, ll.init_state(model), rows)
