"""Scores against scikit-learn, and over every split against the whole."""

import math
import pickle
import warnings
from fractions import Fraction

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import looplib as ll
from looplib import metrics as S

unit = st.floats(0, 1, width=32)
weight = st.one_of(st.just(0.0), st.floats(0.125, 8, width=32))


@st.composite
def columns(draw, *kinds, min_size=1, max_size=24):
    """So many columns of one length, and the ends of the parts to cut them into: empty ones too."""
    rows = draw(st.lists(st.tuples(*kinds), min_size=min_size, max_size=max_size))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    tensors = [
        torch.tensor([row[i] for row in rows], dtype=torch.float64 if isinstance(rows[0][i], float) else None)
        for i in range(len(kinds))
    ]
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    return tensors, sizes


def number(metric):
    return ll.compute({"score": metric})["score"]


def split(of, tensors, sizes, data):
    """The record of the parts, merged in an order that hypothesis draws."""
    records = [of(*part) for part in zip(*[tensor.split(sizes) for tensor in tensors], strict=True)]
    while len(records) > 1:
        i = data.draw(st.integers(0, len(records) - 2))
        records[i : i + 2] = [ll.merge({"score": records[i]}, {"score": records[i + 1]})["score"]]
    return records[0]


def same(found, expected, rel=1e-12):
    assert found == pytest.approx(expected, rel=rel, abs=1e-12, nan_ok=True)


def auc_of(labels, scores, weights=None):
    """scikit-learn's, or NaN where it has none: a class that is missing or weighs nothing."""
    weights = torch.ones(len(labels)) if weights is None else weights
    if not (weights[labels > 0].sum() > 0 and weights[labels == 0].sum() > 0):
        return math.nan
    return reference.roc_auc_score(labels.numpy(), scores.numpy(), sample_weight=weights.numpy())


# Classes


@settings(max_examples=60, deadline=None)
@given(columns(st.permutations(range(5)), st.integers(0, 4), min_size=2), st.integers(1, 5), st.data())
def test_top_k_of_logits(drawn, k, data):
    (logits, labels), sizes = drawn
    record = split(lambda x, y: S.accuracy(x.bfloat16(), y, top_k=k), (logits, labels), sizes, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that k classes of k are always right
        expected = reference.top_k_accuracy_score(labels, logits, k=k, labels=range(5))
    assert number(record) == expected
    assert number(S.accuracy(logits, labels)) == (logits.argmax(1) == labels).double().mean()


def test_accuracy_of_tokens_and_of_a_model_that_broke():
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[:, 3:] = -100
    expected = (logits.argmax(-1) == labels)[:, :3].double().mean()
    assert number(S.accuracy(logits, labels, ignore_index=-100)) == expected
    same(number(S.accuracy(logits, labels, ignore_index=-100, weights=torch.full((3, 5), 0.3))), float(expected))
    assert number(S.accuracy(torch.full((4, 3), torch.nan), torch.zeros(4, dtype=torch.long), top_k=3)) == 0
    assert number(S.accuracy(torch.tensor([True, False]), torch.tensor([True, True]))) == 0.5


@settings(max_examples=40, deadline=None)
@given(columns(st.integers(0, 3), st.sampled_from([-100, 0, 1, 2, 3]), weight), st.data())
def test_labels_of_minus_100_count_nothing_as_in_torchs_losses(drawn, data):
    (predicted, labels, weights), sizes = drawn
    kept = labels != -100
    logits = torch.nn.functional.one_hot(predicted, 4).double()
    for predictions in (predicted, logits):
        record = split(S.accuracy, (predictions, labels), sizes, data)
        weighted = split(lambda p, y, w: S.accuracy(p, y, weights=w), (predictions, labels, weights), sizes, data)
        if not kept.any():
            same(number(record), math.nan)
            continue
        same(number(record), reference.accuracy_score(labels[kept], predicted[kept]))
        theirs = MulticlassAccuracy(4, average="micro", ignore_index=-100)
        assert number(record) == pytest.approx(theirs(predictions, labels).item(), rel=1e-6)
        if weights[kept].sum():
            expected = reference.accuracy_score(labels[kept], predicted[kept], sample_weight=weights[kept])
            same(number(weighted), expected)
    assert number(S.accuracy(predicted, labels, ignore_index=None)) == (predicted == labels).double().mean()


@settings(max_examples=60, deadline=None)
@given(
    columns(
        st.lists(st.sampled_from([0.0, 1.0, math.inf, -math.inf, math.nan]), min_size=4, max_size=4),
        st.integers(0, 3),
    ),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_the_predicted_class_is_that_of_argmax_and_nan_is_no_hit(drawn, dtype):
    (logits, labels), _ = drawn
    logits = logits.to(dtype)
    predicted = logits.argmax(-1)
    right = (predicted == labels) & ~logits.isnan().any(-1)
    assert number(S.accuracy(logits, labels)) == right.double().mean()
    expected = S.ConfusionMatrix.of(predicted, labels, 4).matrix
    assert torch.equal(S.ConfusionMatrix.of(logits, labels, 4).matrix, expected)
    logits = logits > 0
    assert number(S.accuracy(logits, labels)) == (logits.int().argmax(-1) == labels).double().mean()


@settings(max_examples=60, deadline=None)
@given(columns(st.integers(0, 3), st.integers(0, 3), weight), st.booleans(), st.data())
def test_confusion_matrix(drawn, weighted, data):
    (predicted, labels, weights), sizes = drawn
    tensors = (predicted, labels, weights)[: 2 + weighted]
    assume(not weighted or weights.sum() > 0)

    def of(p, y, w=None):
        return S.ConfusionMatrix.of(p, y, 4, weights=w)

    record = S.ConfusionMatrix.empty(4).merge(split(of, tensors, sizes, data)).merge(S.ConfusionMatrix.empty(4))
    w = weights.numpy() if weighted else None
    y, p = labels.numpy(), predicted.numpy()
    np.testing.assert_allclose(
        record.matrix, reference.confusion_matrix(y, p, labels=range(4), sample_weight=w), rtol=1e-12
    )
    if not weighted:
        assert torch.equal(record.matrix, of(*tensors).matrix)
    same(number(record), reference.accuracy_score(y, p, sample_weight=w))
    precision, recall, f1, _ = reference.precision_recall_fscore_support(
        y, p, labels=range(4), sample_weight=w, zero_division=np.nan
    )
    np.testing.assert_allclose(record.precision(), precision, rtol=1e-12)
    np.testing.assert_allclose(record.recall(), recall, rtol=1e-12)
    np.testing.assert_allclose(record.f1(), f1, rtol=1e-12)
    if not weighted:
        same(number(S.Reading(record, S.ConfusionMatrix.macro_f1)), reference.f1_score(y, p, average="macro"))


def test_a_confusion_matrix_of_logits_without_padding():
    logits, labels = torch.eye(3)[[0, 2, 1, 1]].view(2, 2, 3), torch.tensor([[0, 1], [1, -100]])
    record = S.ConfusionMatrix.of(logits, labels, 3, ignore_index=-100)
    assert record.matrix.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]
    for bad in (-100, 3):
        outside = S.ConfusionMatrix.of(torch.tensor([0, 0]), torch.tensor([0, bad]), 3)
        with pytest.raises(ValueError, match=r"1 labels or predictions lie outside 0 to 2, for 3 classes"):
            outside.compute()
    for bad in (-1, 3, 2**62, -(2**62), 2**63 - 1, -(2**63)):
        outside = S.ConfusionMatrix.of(torch.eye(3)[:2], torch.tensor([bad, 1]), 3)
        assert outside.counts.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            S.accuracy(torch.eye(3)[:2], torch.tensor([bad, 1]))
    with pytest.raises(ValueError, match=r"shapes \(3, 3\) and \(2, 2\)"):
        record.merge(S.ConfusionMatrix.empty(2))
    assert math.isnan(number(S.ConfusionMatrix.empty(2)))


def test_perplexity_over_tokens():
    logits, tokens = torch.randn(4, 9, 11), torch.randint(0, 11, (4, 9))
    tokens[1, 3:] = -100
    parts = [
        S.perplexity(ll.next_token_loss(x.double(), y)) for x, y in zip(logits.split(1), tokens.split(1), strict=True)
    ]
    loss = nn.functional.cross_entropy(logits[:, :-1].double().transpose(1, 2), tokens[:, 1:])
    same(number(parts[0].merge(parts[1]).merge(parts[2]).merge(parts[3])), math.exp(loss))


# AUC


@settings(max_examples=60, deadline=None)
@given(columns(st.one_of(unit, st.sampled_from([0.0, 0.25, 0.5])), st.booleans(), weight), st.data())
def test_auc(drawn, data):
    (scores, labels, weights), sizes = drawn
    whole = number(S.AUC.of(scores, labels))
    same(whole, auc_of(labels, scores))
    merged = S.AUC.empty().merge(split(S.AUC.of, (scores, labels), sizes, data)).merge(S.AUC.empty())
    assert number(merged) == whole or math.isnan(whole)
    same(number(split(S.AUC.of, (scores, labels, weights), sizes, data)), auc_of(labels, scores, weights))


@settings(max_examples=60, deadline=None)
@given(
    columns(st.sampled_from([0.0, 0.1, 0.5, 0.9]), st.booleans(), st.integers(-2, 3), weight),
    st.sampled_from(["examples", "groups"]),
    st.data(),
)
def test_grouped_auc(drawn, average, data):
    (scores, labels, groups, weights), sizes = drawn
    for tensors in ((scores, labels, groups), (scores, labels, groups, weights)):
        w = weights if len(tensors) == 4 else torch.ones(len(labels))
        rows = [groups == group for group in groups.unique()]
        found = [auc_of(labels[row], scores[row], w[row]) for row in rows]
        kept = [(auc, w[row].sum().item()) for auc, row in zip(found, rows, strict=True) if not math.isnan(auc)]
        shares = [share if average == "examples" else 1 for _, share in kept]
        expected = np.average([auc for auc, _ in kept], weights=shares) if kept else math.nan
        record = split(lambda *part: S.GroupedAUC.of(*part, average=average), tensors, sizes, data)
        record = S.GroupedAUC.empty(average).merge(record)
        same(number(record), expected)
        assert number(S.Reading(record, S.GroupedAUC.left_out)) == len(rows) - len(kept)
        assert number(S.Reading(record, S.GroupedAUC.number_of_groups)) == len(rows)
        if len(tensors) == 3 and kept:
            assert number(record) == number(S.GroupedAUC.of(*tensors, average=average))


def test_scores_that_are_nan_are_not_ranked():
    scores, labels = torch.tensor([0.1, torch.nan, 0.7, 0.2]), torch.tensor([0, 1, 1, 0])
    for record in (
        S.AUC.of(scores, labels),
        S.GroupedAUC.of(scores, labels, torch.zeros(4, dtype=torch.int32)),
    ):
        assert math.isnan(number(record))
    for empty in (S.AUC.empty(), S.GroupedAUC.empty(), S.R2.empty()):
        assert math.isnan(number(empty))
        assert math.isnan(number(empty.merge(empty)))
    assert S.GroupedAUC.empty().left_out() == S.GroupedAUC.empty().number_of_groups() == 0
    infinite = torch.tensor([-torch.inf, torch.inf, 0.5, 0.2])
    assert number(S.AUC.of(infinite, labels)) == 1


def test_dtypes_are_widened_and_mix():
    scores, labels, users = torch.rand(64), torch.rand(64) < 0.5, torch.randint(0, 6, (64,))
    first, last = slice(32), slice(32, 64)
    low = scores.clone()
    low[first] = scores[first].bfloat16()
    for of, more in ((S.AUC.of, ()), (S.GroupedAUC.of, (users,)), (S.R2.of, ())):
        mixed = of(scores[first].bfloat16(), labels[first].float(), *[x[first].int() for x in more]).merge(
            of(scores[last].double(), labels[last].long(), *[x[last] for x in more])
        )
        same(number(mixed), number(of(low, labels, *more)), rel=1e-12)
        assert number(torch.utils._pytree.tree_map(lambda leaf: leaf, mixed)) == number(mixed)
        assert number(pickle.loads(pickle.dumps(mixed))) == number(mixed)
    half = S.mae(low[first].bfloat16(), labels[first]).merge(S.mae(scores[last].double(), labels[last].half()))
    same(number(half), number(S.mae(low, labels)))


def test_a_record_holds_nothing_but_its_scores():
    logits = torch.rand(8, 1000, requires_grad=True)
    labels = torch.ones(8, 50)[:, 3]
    record = S.GroupedAUC.of(logits[:, 1], labels, torch.arange(800).view(8, 100)[:, 0], labels)
    for tensor in torch.utils._pytree.tree_leaves(record)[:-1]:
        assert tensor.untyped_storage().nbytes() <= 8 * 8
        assert not tensor.requires_grad
    scores = torch.tensor([0.1, 0.9])
    kept = S.AUC.of(scores, torch.tensor([0, 1]))
    scores.zero_()
    assert number(kept) == 1


# Amounts


@settings(max_examples=60, deadline=None)
@given(columns(unit, st.booleans(), weight), st.data())
def test_calibration(drawn, data):
    (predicted, labels, weights), sizes = drawn
    for tensors in ((predicted, labels), (predicted, labels, weights)):
        w = (tensors[2] if len(tensors) == 3 else torch.ones(len(labels))).double()
        expected = (w * predicted).sum() / (w * labels).sum()
        same(number(split(S.calibration, tensors, sizes, data)), float(expected))


amount = st.one_of(st.floats(-1e4, 1e4, width=32), st.sampled_from([0.0, 1.0, 1e6]))


@settings(max_examples=60, deadline=None)
@given(columns(amount, amount, weight, min_size=2), st.booleans(), st.data())
def test_regression(drawn, weighted, data):
    tensors, sizes = drawn
    p, y, w = (tensor.numpy() for tensor in tensors)
    tensors, w = (tensors, w) if weighted else (tensors[:2], None)
    assume(not weighted or w.sum() > 0)
    for of, expected in (
        (S.mae, reference.mean_absolute_error(y, p, sample_weight=w)),
        (S.mse, reference.mean_squared_error(y, p, sample_weight=w)),
        (S.rmse, reference.root_mean_squared_error(y, p, sample_weight=w)),
    ):
        same(number(split(of, tensors, sizes, data)), expected)
    record = S.R2.empty().merge(split(S.R2.of, tensors, sizes, data)).merge(S.R2.empty())
    exact = exact_r2(*tensors)
    # 1 - x loses what x loses.
    assert number(record) == pytest.approx(exact, rel=0, abs=1e-12 * (1 + abs(1 - exact)))
    if len(set(y[w != 0] if weighted else y)) > 1:
        loose = 1e-9 * (1 + abs(1 - exact))  # scikit-learn's own rounding
        assert number(record) == pytest.approx(reference.r2_score(y, p, sample_weight=w), rel=0, abs=loose)


def exact_r2(p, y, w=None):
    p, y = ([Fraction(value) for value in column.tolist()] for column in (p, y))
    w = [Fraction(value) for value in w.tolist()] if w is not None else [Fraction(1)] * len(y)
    mean = sum(a * b for a, b in zip(w, y, strict=True)) / sum(w)
    spread = sum(a * (b - mean) ** 2 for a, b in zip(w, y, strict=True))
    residual = sum(a * (b - c) ** 2 for a, b, c in zip(w, y, p, strict=True))
    return float(1 - residual / spread) if spread else float(residual == 0)


def test_r2_far_from_zero_and_of_constant_targets():
    y = 1e8 + torch.arange(1000, dtype=torch.float64) / 7
    p = y + torch.randn(1000)
    record = S.R2.empty()
    for part in zip(p.split(7), y.split(7), strict=True):
        record = record.merge(S.R2.of(*part))
    same(1 - number(record), 1 - exact_r2(p, y), rel=1e-9)
    constant = torch.full((3,), 0.1, dtype=torch.float64)
    missed = S.R2.of(constant + 1, constant)
    assert number(S.R2.of(constant, constant)) == 1
    assert number(missed) == number(missed.merge(missed).merge(missed)) == 0
    assert math.isnan(number(S.R2.of(constant[:1], constant[:1])))
    assert math.isnan(number(S.R2.of(constant, constant, torch.zeros(3))))


# Any record


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x, y: S.AUC.of(x[:, None], y), r"scores.*\(4, 1\).* labels \(4,\)"),
        (lambda x, y: S.AUC.of(x, y, x[:2]), r"weights.*\(2,\).* labels.*\(4,\)"),
        (lambda x, y: S.GroupedAUC.of(x, y, y[:3]), r"groups.*\(4,\)"),
        (lambda x, y: S.GroupedAUC.of(x, y, x), "groups.* torch.float32"),
        (lambda x, y: S.GroupedAUC.of(x, y, y, average="mean"), "average is 'mean'"),
        (lambda x, y: S.GroupedAUC.empty().merge(S.GroupedAUC.empty("groups")), "'examples' and 'groups'"),
        (lambda x, y: S.accuracy(x, y), r"predictions.*\(4,\).* torch.float32"),
        (lambda x, y: S.accuracy(x, x), r"labels.*\(4,\).* torch.float32"),
        (lambda x, y: S.accuracy(x.expand(3, 4), y), r"logits.*\(3,\)"),
        (lambda x, y: S.accuracy(x[:, None], y, top_k=2), r"top_k is 2.*\(4, 1\)"),
        (lambda x, y: S.ConfusionMatrix.of(x.expand(4, 4), y, 3), r"logits.*\(4, 4\).* 3 classes"),
        (lambda x, y: S.ConfusionMatrix.of(x, y, 3), r"predicted classes.*\(4,\).* torch.float32"),
        (lambda x, y: S.mse(x[:, None], x), r"predictions.*\(4, 1\).* targets \(4,\)"),
        (lambda x, y: S.R2.of(x, x, x[:1]), r"weights.*\(1,\).* targets"),
        (lambda x, y: S.calibration(x, y[:1]), r"predictions.*\(4,\).* labels \(1,\)"),
    ],
)
def test_what_does_not_fit_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call(torch.rand(4), torch.tensor([0, 1, 1, 0]))


def test_auc_of_negative_zero_infinities_and_both_widths():
    scores = [0.0, -0.0, -1.5, float("inf"), -float("inf"), 1e-40, -1e-40, 2.5, 0.0, -2.5]
    labels = [1, 0, 0, 1, 0, 1, 1, 0, 0, 1]
    ordered = sorted(set(scores))  # the order of Python's floats, where -0.0 equals 0.0
    expected = reference.roc_auc_score(labels, [ordered.index(score) for score in scores])
    for dtype in (torch.float32, torch.float64):
        record = ll.metrics.AUC.of(torch.tensor(scores, dtype=dtype), torch.tensor(labels))
        assert ll.compute({"auc": record})["auc"] == pytest.approx(expected, abs=1e-15)
