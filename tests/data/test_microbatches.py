"""Microbatches that are padded or packed one by one.

That their gradient is that of the batch padded as a whole is tested with the page on fine-tuning and with `model_loss`.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplib.data import collate_microbatches


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=30),
    st.sampled_from(["microbatches", "tokens"]),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_each_sample_is_in_one_microbatch_within_its_limit(lengths, way, limit, packed, in_dicts):
    samples = [{"input_ids": [n] * n} if in_dicts else [n] * n for n in lengths]
    cut = collate_microbatches(list, **{way: limit}, packed=packed)(samples)
    cut = [[sample["input_ids"] if in_dicts else sample for sample in microbatch] for microbatch in cut]
    assert list(map(len, itertools.chain(*cut))) == sorted(lengths, reverse=True)
    assert all(cut)
    if way == "microbatches":
        assert len(cut) == min(limit, len(samples))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
    if way == "tokens":
        costs = [sum(map(len, m)) if packed else len(m) * max(map(len, m)) for m in cut]
        assert all(cost <= limit or len(m) == 1 for cost, m in zip(costs, cut, strict=True))
        merged = [a + b[:1] for a, b in itertools.pairwise(cut)]  # none could have taken one more
        assert all((sum(map(len, m)) if packed else len(m) * max(map(len, m))) > limit for m in merged)


def test_arguments_are_checked():
    for options, names in (({}, "microbatches.*tokens"), ({"tokens": 3}, "microbatches.*tokens")):
        with pytest.raises(ValueError, match=names):
            collate_microbatches(list, **({"microbatches": 2} if "tokens" in options else {}), **options)
