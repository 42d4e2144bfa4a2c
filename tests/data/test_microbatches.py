"""Microbatches that are padded or packed one by one, against the batch that is padded as a whole."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import looplib as ll
from looplib.data import collate_microbatches

LENGTHS = [5, 9, 2, 7, 2, 8, 3, 3]
ROWS = [{"input_ids": (torch.arange(n) * 7 % 11 + 1), "labels": (torch.arange(n) * 7 % 11 + 1)} for n in LENGTHS]


def padded(samples):
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def as_lists(samples):
    return DataCollatorWithFlattening()([{key: column.tolist() for key, column in s.items()} for s in samples])


def of_loader(collate_fn, **settings):
    loader = ll.make_loader(ROWS, batch_size=8, collate_fn=collate_fn, **settings)
    return next(iter(loader(ll.TrainState(epoch_length=1))))


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=30),
    st.sampled_from(["microbatches", "tokens"]),
    st.integers(1, 40),
    st.booleans(),
)
def test_each_sample_is_in_one_microbatch_within_its_limit(lengths, way, limit, packed):
    samples = [[n] * n for n in lengths]
    cut = collate_microbatches(list, **{way: limit}, packed=packed)(samples)
    assert sorted(itertools.chain(*cut)) == sorted(samples)
    assert all(cut)
    if way == "microbatches":
        assert len(cut) == min(limit, len(samples))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
    if way == "tokens":
        costs = [sum(map(len, m)) if packed else len(m) * max(map(len, m)) for m in cut]
        assert all(cost <= limit or len(m) == 1 for cost, m in zip(costs, cut, strict=True))
        merged = [a + b[:1] for a, b in itertools.pairwise(cut)]  # none could have taken one more
        assert all((sum(map(len, m)) if packed else len(m) * max(map(len, m))) > limit for m in merged)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "collate_fn",
    [
        collate_microbatches(padded, 3),
        collate_microbatches(padded, tokens=16),
        collate_microbatches(as_lists, tokens=16, packed=True),
        collate_microbatches(as_lists, 1, packed=True),
    ],
    ids=["microbatches", "tokens", "packed", "packed into one row"],
)
def test_the_gradient_is_that_of_the_batch_padded_as_a_whole(collate_fn, attention):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=12, attn_implementation=attention, **sizes)).double()
    state = ll.init_state(model)
    grad_fn = ll.make_grad_fn(model, ll.losses.model_loss)
    loss = model(**padded(ROWS)).loss  # the mean over all tokens, by the model alone
    expected = torch.autograd.grad(loss, list(model.parameters()))
    microbatches = of_loader(collate_fn)
    grads = ll.accumulate(grad_fn)(state, microbatches)
    for (name, _), wanted in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(grads.grads[name], wanted, rtol=1e-4, atol=1e-8, msg=name)
    assert ll.compute(grads.metrics)["loss"] == pytest.approx(loss.item(), rel=1e-6)
    computed = sum(m["input_ids"].numel() for m in microbatches)
    assert sum(LENGTHS) <= computed < padded(ROWS)["input_ids"].numel()
    if collate_fn.packed:
        assert computed == sum(LENGTHS)


def test_arguments_are_checked():
    for options, names in (({}, "microbatches.*tokens"), ({"tokens": 3}, "microbatches.*tokens")):
        with pytest.raises(ValueError, match=names):
            collate_microbatches(padded, **({"microbatches": 2} if "tokens" in options else {}), **options)
