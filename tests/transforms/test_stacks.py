"""The number of members of a stack."""

import pytest
import torch

import looplib as ll


def test_members_are_counted_and_one_state_is_no_stack():
    state = ll.init_state(torch.nn.Linear(2, 1), seed=4)
    stack = ll.transforms.stack_states([state] * 3)
    assert ll.transforms.members_of(stack) == 3
    assert ll.transforms.members_of(ll.transforms.select_members(stack, [2, 0])) == 2
    with pytest.raises(ValueError, match=r"seed 4.*stack_states"):
        ll.transforms.members_of(state)
