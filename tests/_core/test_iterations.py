"""Spans of positions, which are merged where they meet."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from looplib._core.iterations import _merged


@given(spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12))
def test_spans_that_meet_are_one(spans):
    """The same positions, in the smallest number of spans: a set of numbers says which."""
    spans = [(first, first + length) for first, length in spans]
    merged = _merged(spans)
    assert {n for first, last in merged for n in range(first, last + 1)} == {
        n for first, last in spans for n in range(first, last + 1)
    }
    assert all(one[1] < other[0] for one, other in itertools.pairwise(merged))
