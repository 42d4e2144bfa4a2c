"""Scores against definitions and scikit-learn; over every split against the whole."""

import math
import pickle

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shared import examples
from torch import nn

import looplib as ll
from looplib import metrics as S

some = settings(max_examples=examples(60), deadline=None)
unit = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, -0.0, 0.25, 0.5]))
score = st.one_of(unit, st.sampled_from([-1.5, math.inf, -math.inf, 1e-40, -1e-40]))
weight = st.one_of(st.just(0.0), st.floats(0.125, 8, width=32))


@st.composite
def columns(draw, *kinds, min_size=1, max_size=24):
    """So many columns of one length, and the ends of the parts to cut them into: empty ones too."""
    rows = draw(st.lists(st.tuples(*kinds), min_size=min_size, max_size=max_size))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    dtypes = [torch.float64 if isinstance(value, float) else None for value in rows[0]]
    tensors = [
        torch.tensor(values, dtype=dtype) for values, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
    ]
    return tensors, [b - a for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]


def number(metric):
    return ll.compute({"score": metric})["score"]


def split(of, tensors, sizes, data):
    """The record of the parts, merged in an order that hypothesis draws."""
    records = [of(*part) for part in zip(*[tensor.split(sizes) for tensor in tensors], strict=True)]
    while len(records) > 1:
        i = data.draw(st.integers(0, len(records) - 2))
        records[i : i + 2] = [ll.metrics.merge({"score": records[i]}, {"score": records[i + 1]})["score"]]
    return records[0]


def same(found, expected, rel=1e-12):
    assert found == pytest.approx(expected, rel=rel, abs=1e-12, nan_ok=True)


def auc_of(labels, scores):
    """scikit-learn's, or NaN where a class is missing."""
    if labels.unique().numel() < 2:
        return math.nan
    ranks = scores.unique(return_inverse=True)[1]  # since scikit-learn takes no infinite scores
    return reference.roc_auc_score(labels.numpy(), ranks.numpy())


@some
@given(
    columns(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, math.inf, -math.inf, math.nan]), min_size=4, max_size=4),
        st.sampled_from([-100, 0, 1, 2, 3]),
        weight,
    ),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_accuracy_by_its_definition(drawn, dtype, k, weighted, data):
    """NaN ranks first, as for argmax, and is no hit; among equal scores the first class ranks first."""
    (logits, labels, weights), sizes = drawn

    def hit(scores, label):
        ranked = sorted(range(4), key=lambda i: (not math.isnan(scores[i]), -scores[i], i))
        return not math.isnan(scores[label]) and label in ranked[:k]

    weights = weights if weighted else torch.ones(len(labels)).double()
    tensors = (logits.to(dtype), labels, weights)[: 2 + weighted]

    def mean(right):
        kept = labels != -100
        return (weights * right)[kept].sum() / weights[kept].sum()

    right = torch.tensor([hit(*pair) for pair in zip(logits.tolist(), labels.clamp(min=0).tolist(), strict=True)])
    record = split(lambda x, y, w=None: S.accuracy(x, y, weights=w, top_k=k), tensors, sizes, data)
    same(number(record), mean(right).item())
    predicted = logits.argmax(-1)
    record = split(lambda p, y, w=None: S.accuracy(p, y, weights=w), (predicted, *tensors[1:]), sizes, data)
    same(number(record), mean(predicted == labels).item())
    assert number(S.accuracy(predicted, labels, ignore_index=None)) == (predicted == labels).double().mean()
    matrices = [S.ConfusionMatrix.of(p, labels, 4, ignore_index=-100).matrix for p in (tensors[0], predicted)]
    assert torch.equal(*matrices)


def test_accuracy_of_tokens_booleans_and_bytes():
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[:, 3:] = -100
    assert number(S.accuracy(logits, labels)) == (logits.argmax(-1) == labels)[:, :3].double().mean()
    assert number(S.accuracy(torch.tensor([True, False]), torch.tensor([True, True]))) == 0.5
    assert number(S.accuracy(torch.tensor([156, 1]), torch.tensor([156, 0], dtype=torch.uint8))) == 0.5


@some
@given(columns(st.integers(0, 3), st.integers(0, 3), weight), st.booleans(), st.data())
def test_confusion_matrix(drawn, weighted, data):
    (predicted, labels, weights), sizes = drawn
    tensors = (predicted, labels, weights)[: 2 + weighted]
    assume(not weighted or weights.sum() > 0)
    record = split(lambda p, y, w=None: S.ConfusionMatrix.of(p, y, 4, weights=w), tensors, sizes, data)
    record = S.ConfusionMatrix.empty(4).merge(record)
    y, p, w = labels.numpy(), predicted.numpy(), weights.numpy() if weighted else None
    of_classes = {"labels": range(4), "sample_weight": w}
    scores = reference.precision_recall_fscore_support(y, p, **of_classes, zero_division=np.nan)
    expected = (reference.confusion_matrix(y, p, **of_classes), *scores[:3])
    for found, theirs in zip(
        (record.matrix, record.precision(), record.recall(), record.f1()), expected, strict=True
    ):
        np.testing.assert_allclose(found, theirs, rtol=1e-12)
    same(number(record), reference.accuracy_score(y, p, sample_weight=w))
    same(number(S.Reading(record, S.ConfusionMatrix.macro_f1)), np.nanmean(scores[2]))


def test_classes_out_of_range_are_counted_and_named_when_the_matrix_is_read():
    for bad in (-100, -1, 3, 2**62, -(2**62), 2**63 - 1, -(2**63)):
        outside = S.ConfusionMatrix.of(torch.eye(3)[:2], torch.tensor([bad, 1]), 3)
        assert outside.counts.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
        with pytest.raises(ValueError, match=r"1 labels .* 3 classes"):
            outside.compute()
        if bad != -100:
            with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
                S.accuracy(torch.eye(3)[:2], torch.tensor([bad, 1]))
    outside = S.ConfusionMatrix.of(torch.tensor([0, 3]), torch.tensor([0, 1]), 3)
    assert outside.counts.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_perplexity_over_tokens():
    logits, tokens = torch.randn(4, 9, 11).double(), torch.randint(0, 11, (4, 9))
    tokens[1, 3:] = -100
    parts = [S.perplexity(ll.next_token_loss(*part)) for part in zip(logits.split(1), tokens.split(1), strict=True)]
    loss = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:])
    same(number(parts[0].merge(parts[1]).merge(parts[2]).merge(parts[3])), math.exp(loss))


@some
@given(
    columns(score, st.booleans(), st.integers(-2, 3)),
    st.sampled_from([torch.float32, torch.float64]),
    st.data(),
)
def test_auc_and_grouped_auc(drawn, dtype, data):
    (scores, labels, groups), sizes = drawn
    scores = scores.to(dtype)
    same(number(S.AUC().merge(split(S.AUC.of, (scores, labels), sizes, data))), auc_of(labels, scores))
    rows = [groups == group for group in groups.unique()]
    of_groups = [(auc_of(labels[row], scores[row]), int(row.sum())) for row in rows]
    kept = [(auc, count) for auc, count in of_groups if not math.isnan(auc)]
    expected = sum(auc * count for auc, count in kept) / sum(count for _, count in kept) if kept else math.nan
    record = S.GroupedAUC().merge(split(S.GroupedAUC.of, (scores, labels, groups), sizes, data))
    same(number(record), expected)
    assert number(S.Reading(record, S.GroupedAUC.left_out)) == len(rows) - len(kept)
    assert number(S.Reading(record, S.GroupedAUC.number_of_groups)) == len(rows)


def test_scores_that_are_nan_and_no_samples_have_no_value():
    scores, labels = torch.tensor([0.1, torch.nan, 0.7, 0.2]), torch.tensor([0, 1, 1, 0])
    records = [S.AUC.of(scores, labels), S.GroupedAUC.of(scores, labels, torch.zeros(4, dtype=torch.int32))]
    empty = [S.AUC(), S.GroupedAUC(), S.ConfusionMatrix.empty(2)]
    for record in (*records, *empty, *[record.merge(record) for record in empty]):
        assert math.isnan(number(record))
    assert S.GroupedAUC().left_out() == S.GroupedAUC().number_of_groups() == 0


def test_dtypes_are_widened_and_mix():
    scores, labels, users = torch.rand(64), torch.rand(64) < 0.5, torch.randint(0, 6, (64,))
    first, last = slice(32), slice(32, 64)
    low = scores.clone()
    low[first] = scores[first].bfloat16()
    for of, more in ((S.AUC.of, ()), (S.GroupedAUC.of, (users,)), (S.mae, ())):
        mixed = of(low[first].bfloat16(), labels[first].half(), *[x[first].int() for x in more]).merge(
            of(scores[last].double(), labels[last].long(), *[x[last] for x in more])
        )
        same(number(mixed), number(of(low, labels, *more)))
        assert number(torch.utils._pytree.tree_map(lambda leaf: leaf, mixed)) == number(mixed)
        assert number(pickle.loads(pickle.dumps(mixed))) == number(mixed)


def test_a_record_holds_nothing_but_its_scores():
    logits = torch.rand(8, 1000, requires_grad=True)
    labels = torch.ones(8, 50)[:, 3]
    record = S.GroupedAUC.of(logits[:, 1], labels, torch.arange(800).view(8, 100)[:, 0])
    for tensor in torch.utils._pytree.tree_leaves(record)[:-1]:
        assert tensor.untyped_storage().nbytes() <= 8 * 8
        assert not tensor.requires_grad
    scores = torch.tensor([0.1, 0.9])
    kept = S.AUC.of(scores, torch.tensor([0, 1]))
    scores.zero_()
    assert number(kept) == 1


amount = st.one_of(st.floats(-1e4, 1e4, width=32), st.sampled_from([0.0, 1.0, 1e6]))


@some
@given(columns(amount, amount, weight, min_size=2), st.booleans(), st.data())
def test_amounts(drawn, weighted, data):
    (p, y, w), sizes = drawn
    assume(not weighted or w.sum() > 0)
    tensors, w = ((p, y, w), w) if weighted else ((p, y), torch.ones(len(p)).double())
    squared = (w * (p - y) ** 2).sum().item() / w.sum().item()
    for of, expected in (
        (S.mae, ((w * (p - y).abs()).sum() / w.sum()).item()),
        (S.mse, squared),
        (S.rmse, math.sqrt(squared)),
        (lambda p, y, *w: S.calibration(p.abs(), y.abs(), *w), ((w * p.abs()).sum() / (w * y.abs()).sum()).item()),
    ):
        same(number(split(of, tensors, sizes, data)), expected)


def test_what_does_not_fit_is_named():
    x, y = torch.rand(4), torch.tensor([0, 1, 1, 0])
    for call, named in (
        (lambda: S.AUC.of(x[:, None], y), r"scores.*\(4, 1\)"),
        (lambda: S.GroupedAUC.of(x, y, y[:3]), "groups"),
        (lambda: S.GroupedAUC.of(x, y, x), "groups.*float32"),
        (lambda: S.accuracy(x, y), "predicted classes.*float32"),
        (lambda: S.accuracy(x, x), "labels.*float32"),
        (lambda: S.accuracy(x.expand(3, 4), y), "logits"),
        (lambda: S.accuracy(x[:, None], y, top_k=2), "top_k is 2"),
        (lambda: S.accuracy(y, y, top_k=2), "top_k is 2"),
        (lambda: S.ConfusionMatrix.of(x.expand(4, 4), y, 3), "logits.*3 classes"),
        (lambda: S.ConfusionMatrix.empty(3).merge(S.ConfusionMatrix.empty(2)), "3 and 2 classes"),
        (lambda: S.mae(x, x, x[:1]), "weights"),
        (lambda: S.calibration(x, y[:1]), "predictions"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
