"""Values as code in reprs, and as plain values in checkpoints."""

from functools import partial

import numpy as np
import torch

import looplib as ll
from looplib._core.records import Made, described, shown, with_record, with_repr, without_record


class Plain:
    pass


def scaled(factor, name="x"):
    return lambda step: (factor, name, 3)


def test_settings_are_described_by_their_names_and_numbers():
    for setting, description in [
        (set("hgfedcba"), list("abcdefgh")),  # the order of text differs between processes
        (frozenset({3, 1}), [1, 3]),
        (scaled(0.5), "lambda step: ... (3, factor=0.5, name=x)"),
        (partial(scaled, 0.5, name="y"), {"function": "scaled", "args": [0.5], "name": "y"}),
        (ll.optimizer, "optimizer"),
        ([Plain(), torch.nn.Linear, max], ["Plain", "torch.nn.modules.linear.Linear", "max"]),
        ([1j, np.float64(0.5), np.int64(3), np.array(2.0)], ["1j", 0.5, 3, 2.0]),
    ]:
        assert described(setting) == description


def test_what_has_no_short_code_is_shown_by_its_name():
    values = list(range(20)), torch.zeros(1000), object(), (1,), [torch.nn.Linear(2, 1)]
    assert [*map(shown, values)] == ["list of 20", "Tensor(...)", "object(...)", "(1,)", "[Linear]"]


def repeat(step, n):
    return with_repr(lambda state, batch: step(state, batch), repeat, step, n)


def test_what_a_function_of_a_users_made_is_shown_as_its_call():
    assert repr(repeat(len, 3)) == "repeat(len, 3)"
    assert repr(repeat(repeat(max, 2), 3)) == "repeat(repeat(max, 2), 3)"


def test_a_partial_keeps_its_arguments_under_a_record_and_without_it():
    def sum_of(factor, number, *, plus=0):
        return factor * number + plus

    for plain in (partial(sum_of, 3), partial(sum_of, 3, plus=1), partial(sum_of), sum_of):
        arguments = (5,) if plain.__class__ is partial and plain.args else (3, 5)
        marked = with_record(with_record(plain, Made(None, "first")), Made("predicate", "second"))
        assert marked(*arguments) == plain(*arguments)
        assert without_record(marked) is plain
        assert marked.record.name == "second"
