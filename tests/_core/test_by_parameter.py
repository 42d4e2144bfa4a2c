"""Leaves of optimizers' states by parameter, where names of parameters are words of the state, too."""

import pytest
import torch

from looplib._core import trees
from looplib._core.by_parameter import name_indices

T, SCALAR = torch.zeros(2), torch.ones(())
CASES = {
    # state -> names of parameters, and for each leaf in order, the parameter or None
    "a moment's name, of a parameter that is frozen": (
        {"SGD": {"state": {"w": {"momentum_buffer": T}}}},
        ["w", "momentum_buffer"],
        ["w"],
    ),
    "a user's part by name, with a moment's name": (
        {"mine": {"w": {"m": T}, "m": {"m": T}}},
        ["w", "m"],
        ["w", "m"],
    ),
    "a user's part by moment": ({"mine": {"m": {"w": T, "m": T}}}, ["w", "m"], ["w", "m"]),
    "labels of a partition": (
        {"partition": {"a": {"SGD": {"state": {"b": {"momentum_buffer": T}}}}, "b": {"mine": {"a": T}}}},
        ["a", "b"],
        ["b", "a"],
    ),
    "counts beside a tree": ({"ema": {"average": {"params": {"w": T}}, "updates": T}}, ["w", "average"], ["w", None]),
    "numbers of a group": ({"SGD": {"state": {"w": {}}, "groups": [{"k": 1}]}}, ["w", "k"], [None]),
    "injected hyperparameters": ({"SGD": {"state": {}, "hyperparameters": [{"lr": T}]}}, ["w", "lr"], [None]),
    "a scale of the loss": ({"loss_scale": {"scale": SCALAR, "growth_tracker": 0}}, ["w", "scale"], [None, None]),
    "values beside a count": ({"mine": {"w": T, "scale": SCALAR, "count": 0}}, ["w", "scale"], ["w", None, None]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES)
def test_a_leaf_belongs_to_the_parameter_under_whose_name_it_is_kept(case):
    opt_state, names, expected = CASES[case]
    leaves = dict(trees.leaves(opt_state))
    indices = name_indices(leaves, {name: SCALAR if name == "scale" else T for name in names})
    assert [path[indices[path]] if path in indices else None for path in leaves] == expected
