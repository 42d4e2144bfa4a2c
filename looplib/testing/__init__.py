"""Checks for unit tests: a step or a model goes in, an error that says what is wrong comes out."""

from looplib.testing._checks import (
    assert_all_gradients,
    assert_causal,
    assert_compiles,
    assert_overfits,
    assert_pieces_equal_whole,
    assert_pure,
    assert_ranks_train_alike,
    assert_reduces_alike,
    assert_resumes,
    assert_rows_independent,
)

__all__ = [
    "assert_all_gradients",
    "assert_causal",
    "assert_compiles",
    "assert_overfits",
    "assert_pieces_equal_whole",
    "assert_pure",
    "assert_ranks_train_alike",
    "assert_reduces_alike",
    "assert_resumes",
    "assert_rows_independent",
]
