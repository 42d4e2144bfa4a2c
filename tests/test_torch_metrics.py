"""torchmetrics by its public interface."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import looplib as ll


def dim_zero_sum(x):
    return x.sum(0)


def dim_zero_max(x):
    return x.amax(0)


def dim_zero_cat(x):
    return torch.cat(x)


class Stub(nn.Module):
    """What a torchmetrics.Metric is to its user: states with reductions, and update, compute, reset."""

    sync_on_compute = _to_sync = True

    def __init__(self):
        super().__init__()
        self._defaults, self._reductions, self._update_count = {}, {}, 0

    def add_state(self, name, default, reduction):
        self._defaults[name], self._reductions[name] = default, reduction
        setattr(self, name, copy.deepcopy(default))

    def reset(self):
        self._update_count = 0
        for name, default in self._defaults.items():
            if isinstance(default, list):
                getattr(self, name).clear()
            else:
                setattr(self, name, default.clone())


class Spread(Stub):
    """Sums, an extreme and a list; the last is what a metric of collected predictions has."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dim_zero_sum)
        self.add_state("top", torch.tensor(-torch.inf), dim_zero_max)
        self.add_state("seen", [], dim_zero_cat)

    def update(self, x):
        self._update_count += 1
        if x.dim() != 1:
            raise ValueError("not a vector")
        self.total += x.sum()
        self.top = torch.maximum(self.top, x.max())
        self.seen.append(x)

    def compute(self):
        assert self._update_count
        assert not self._to_sync
        return torch.stack([self.total, self.top, torch.cat(self.seen).median()])


class Running(Stub):
    """A state without a reduction, which only the updates in their order give."""

    def __init__(self):
        super().__init__()
        self.add_state("average", torch.zeros(()), None)

    def update(self, x):
        self._update_count += 1
        self.average = 0.5 * self.average + x.mean()

    def compute(self):
        return self.average


class Wrapper(Stub):
    """A metric around another, with states of that one's."""

    def __init__(self):
        super().__init__()
        self.add_state("calls", torch.zeros(()), dim_zero_sum)
        self.inner = Running()

    def update(self, x):
        self._update_count += 1
        self.calls += 1
        self.inner.update(x)

    def compute(self):
        return self.inner.compute() + self.calls

    def reset(self):
        super().reset()
        self.inner.reset()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.data())
@pytest.mark.parametrize("kind", [Spread, Running, Wrapper])
def test_a_torchmetrics_metric_merges_as_if_it_had_seen_every_batch(kind, batches, data):
    batches = [torch.tensor(batch, dtype=torch.float32) for batch in batches]
    alone, used = kind(), kind()
    alone.sync_on_compute = alone._to_sync = False
    for batch in batches:
        alone.update(batch)
    used.update(torch.tensor([100.0]))
    metric = ll.torchmetric(used)
    lent = [batch.clone() for batch in batches]
    records = [metric.of(batch) for batch in lent]
    for batch in lent:  # what a loader that reuses its memory does
        batch.zero_()
    while len(records) > 1:
        i = data.draw(st.integers(0, len(records) - 2))
        records[i : i + 2] = [records[i].merge(records[i + 1])]
    whole = metric.merge(records[0]).merge(metric)
    assert torch.equal(whole.value(), alone.compute())
    assert torch.equal(whole.value(), alone.compute())
    assert torch.equal(pickle.loads(pickle.dumps(whole)).value(), alone.compute())
    assert used._update_count == 1
    if kind is not Spread:
        assert ll.compute({"whole": whole})["whole"] == alone.compute()


def test_a_torchmetrics_metric_of_several_numbers_is_read_and_one_that_failed_is_whole():
    metric = ll.torchmetric(Spread())
    record = metric.of(torch.tensor([1.0, 2.0, 6.0]))
    with pytest.raises(ValueError, match="not a vector"):
        metric.of(torch.ones(1, 1))
    assert ll.compute({"top": ll.Reading(record, lambda record: record.value()[1])}) == {"top": 6.0}
    with pytest.raises(ValueError, match=r"Spread computes a Tensor of shape \(3,\), not a number: read one"):
        record.compute()
    with pytest.raises(TypeError, match="found the class Spread, not a metric of torchmetrics"):
        ll.torchmetric(Spread)
    with pytest.raises(TypeError, match="found a function, not a metric"):
        ll.torchmetric(dim_zero_sum)
