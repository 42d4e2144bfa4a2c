"""Every public name that computes with tensors runs on the far device, with the bits that it has on the CPU."""

import pytest
import torch
from public import public_names

from far.cases import CASES, EXCEPTIONS, ON_THE_HOST
from far.device import far

ROOMS = {
    "checkpoint", "contrib", "debug", "evaluation", "gradients", "grads", "losses", "metrics", "optim", "state",
    "steps", "testing", "transforms",
}  # fmt: skip
NAMES = {function: name for name, function in reversed(CASES.items())}


def leaves(tree):
    return torch.utils._pytree.tree_leaves(tree)


def bits(tree):
    """All numbers of a tree, for ==."""
    return [
        (
            leaf.dtype,
            tuple(leaf.shape),
            leaf.stride(),
            leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist(),
        )
        if isinstance(leaf, torch.Tensor) and leaf.numel()
        else str(leaf).replace("far:0", "cpu")
        for leaf in leaves(tree)
    ]


def test_every_public_name_has_a_case_or_a_reason():
    public = {name for name in public_names() if name.partition(".")[0] in ROOMS}
    assert public <= CASES.keys() | EXCEPTIONS.keys(), "write a case in tests/far/cases.py, or say why there is none"
    assert CASES.keys() | EXCEPTIONS.keys() <= public_names().keys()
    assert not CASES.keys() & EXCEPTIONS.keys()


@pytest.mark.parametrize("name", NAMES.values())
def test_the_far_device_has_the_bits_of_the_cpu(name):
    near = CASES[name](torch.device("cpu"))
    with far() as device:
        away = CASES[name](device)
        devices = {leaf.device for leaf in leaves(away) if isinstance(leaf, torch.Tensor)}
        assert bits(away) == bits(near)
    assert devices <= {device} | ({torch.device("cpu")} if name in ON_THE_HOST else set())
