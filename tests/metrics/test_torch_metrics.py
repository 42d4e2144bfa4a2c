"""Metrics of torchmetrics, merged in any order, beside themselves updated in order."""

import copy
import pickle

import pytest
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import assert_each_refused
from torch import nn
from torchmetrics import aggregation, classification, regression, retrieval, text, wrappers
from torchmetrics.image.fid import FrechetInceptionDistance

import looplib as ll


def binary(rows, flat):
    return torch.rand(rows), torch.zeros(rows).long() if flat else torch.randint(0, 2, (rows,))


def multilabel(rows, flat):
    return torch.rand(rows, 3), torch.ones(rows, 3).long() if flat else torch.randint(0, 2, (rows, 3))


def columns(rows, flat):
    return torch.randn(rows, 2), torch.ones(rows, 2) if flat else torch.randn(rows, 2)


def queries(rows, flat):
    return (
        torch.rand(rows),
        torch.zeros(rows).long() if flat else torch.randint(0, 2, (rows,)),
        torch.arange(rows) % 3,
    )


def sentences(rows, flat):
    words = ["a", "house", "the", "tree", "is"]
    said = [" ".join(words[i] for i in torch.randint(0, 5, (4,))) for _ in range(rows)]
    return said, said if flat else [" ".join(reversed(line.split())) for line in said]


def values(rows, flat):
    return (torch.zeros(rows) if flat else torch.randn(rows),)


# Of each: how to make it, its inputs, and whether the batches as one give the same.
ALL_ONE, BY_BATCH = True, False
METRICS = {
    "auroc": (classification.BinaryAUROC, binary, ALL_ONE),  # of lists
    "f1": (classification.BinaryF1Score, binary, ALL_ONE),
    "accuracy of each sample": (
        lambda: classification.MulticlassAccuracy(4, multidim_average="samplewise", average="micro"),
        lambda rows, flat: (torch.rand(rows, 4, 3), torch.randint(0, 4, (rows, 3))),
        ALL_ONE,
    ),
    "multilabel ranking loss": (lambda: classification.MultilabelRankingLoss(3), multilabel, BY_BATCH),
    "mse of each output": (lambda: regression.MeanSquaredError(num_outputs=2), columns, ALL_ONE),
    "retrieval ndcg": (lambda: retrieval.RetrievalNormalizedDCG(top_k=2), queries, ALL_ONE),
    "bleu": (
        lambda: text.BLEUScore(n_gram=2),
        lambda *a: (sentences(*a)[0], [[s] for s in sentences(*a)[1]]),
        ALL_ONE,
    ),
    "mean": (aggregation.MeanMetric, values, ALL_ONE),
    "max": (aggregation.MaxMetric, values, ALL_ONE),
}


def assert_same(found, expected, record):
    """To the rounding of float32 sums added in another order; of integers and what is collected, exactly."""
    if isinstance(expected, str):
        assert found == expected
        return
    kept = record.states.values()
    exact = not any(isinstance(state, torch.Tensor) and state.is_floating_point() for state in kept)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)


def slices(inputs, sizes):
    low = 0
    for size in sizes:
        yield tuple(column[low : low + size] for column in inputs)
        low += size


def merged(records, data):
    """Neighbours are merged, which keeps the order of what is collected."""
    records = list(records)
    while len(records) > 1:
        i = data.draw(st.integers(0, len(records) - 2))
        records[i : i + 2] = [records[i].merge(records[i + 1])]
    return records[0]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 999), st.booleans(), st.data())
@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torchmetrics' own on classes that are missing, and the like
def test_it_merges_as_if_it_had_seen_every_batch(name, sizes, seed, flat, data):
    make, draw, all_one = METRICS[name]
    torch.manual_seed(seed)
    inputs = draw(sum(sizes), flat)
    batches = list(slices(inputs, sizes))
    alone, whole, used = make(), make(), make()
    for batch in batches:
        alone.update(*batch)
    whole.update(*inputs)
    used.update(*inputs)
    expected = outcome(alone.compute)
    before = bits(states(used))

    metric = ll.metrics.torchmetric(used)
    lent = copy.deepcopy(batches)
    records = [metric.of(*batch) for batch in lent]
    for column in torch.utils._pytree.tree_leaves(lent):
        if isinstance(column, torch.Tensor):
            column.zero_()  # what a loader that reuses its memory does
    record = metric.merge(merged(records, data)).merge(metric)
    found = outcome(record.value)
    assert_same(found, expected, record)
    if all_one:
        assert_same(found, outcome(whole.compute), record)
    (first := make()).update(*batches[0])
    assert_same(outcome(metric.of(*batches[0]).value), outcome(first.compute), record)
    for again in (record, pickle.loads(pickle.dumps(record))):
        assert bits(outcome(again.value)) == bits(found)
    assert bits(states(used)) == before


def bits(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return repr([leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def states(metric):
    return [
        (part.metric_state, getattr(part, "update_count", 0))
        for part in metric.modules()
        if hasattr(part, "metric_state")
    ]


def outcome(compute):
    """Its value, or the error that torchmetrics raises for too little data."""
    try:
        return compute()
    except ValueError as error:
        return str(error)


def test_a_metric_of_sums_holds_sums():
    metric = ll.metrics.torchmetric(classification.MulticlassF1Score(4))
    record = metric.of(torch.rand(1000, 4), torch.randint(0, 4, (1000,)))
    held = sum(leaf.numel() for leaf in torch.utils._pytree.tree_leaves(record.states))
    assert held == 4 * 4  # true and false, positives and negatives, of each class


class Pixels(nn.Module):
    num_features = 4


def test_errors_say_what_to_give_and_leave_the_metric_whole():
    metric = ll.metrics.torchmetric(classification.MulticlassAccuracy(3, average=None))
    record = metric.of(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
    unmerged = (
        torchmetrics.MetricCollection([aggregation.MaxMetric(), aggregation.MinMetric()]),
        regression.PearsonCorrCoef(),
        wrappers.MinMaxMetric(classification.BinaryAccuracy()),
        2 * classification.BinaryPrecision(),
        FrechetInceptionDistance(Pixels(), reset_real_features=False, input_img_size=(3, 2, 2)),
        aggregation.RunningMean(window=3),
        aggregation.MaxMetric,
        slices,
    )
    assert_each_refused(
        (lambda: metric.of(torch.tensor([0, 1]), torch.tensor([0])), ValueError, "same shape"),
        (lambda: ll.compute({"score": record}), ValueError, r"'score'.*\(3,\).*Reading"),
        (lambda: ll.compute({"score": metric.merge(metric)}), ValueError, "MulticlassAccuracy"),
        *((lambda other=other: ll.metrics.torchmetric(other), TypeError, "Corpus") for other in unmerged),
    )
    of_one = ll.metrics.Reading(record, lambda record: record.value()[1])
    assert ll.compute({"of_one": of_one}) == {"of_one": 0.5}


def test_merging_adds_up_the_ranks_and_torchmetrics_does_not_do_it_again():
    def sync(*args, **options):
        pytest.fail("ranks would be added up twice")

    metric = aggregation.SumMetric(dist_sync_fn=sync, distributed_available_fn=lambda: True)
    assert ll.metrics.torchmetric(metric).of(torch.ones(3)).value() == 3


@pytest.mark.parametrize("metric", [classification.BinaryF1Score(), aggregation.MeanMetric()], ids=["f1", "mean"])
def test_a_metric_that_is_returned_as_it_is_is_answered_with_its_record(metric):
    model = torch.nn.Linear(2, 1)
    step = ll.make_eval_step(model, lambda model, x: {"score": metric})
    with pytest.raises(
        ValueError, match=r"a \w+ of torchmetrics.*ll\.metrics\.torchmetric.*metric\.of\(predictions, targets"
    ):
        step(ll.init_state(model), torch.ones(3, 2))


def test_a_record_that_is_called_as_the_metric_is_says_of():
    metric = ll.metrics.torchmetric(classification.BinaryF1Score())
    with pytest.raises(TypeError, match=r"this BinaryF1Score is a record.*metric\.of\(predictions, labels\)"):
        metric(torch.tensor([1, 0]), torch.tensor([1, 1]))
