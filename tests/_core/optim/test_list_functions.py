"""Functions that update lists of tensors, against the classes that they stand for."""

import torch

import looplib as ll
from looplib.optim import _list_functions


def test_a_function_for_lists_that_differs_from_torchs_class_is_not_used(monkeypatch):
    """As it would after a change in torch: each is compared with the class before its first use."""
    torchs = _list_functions.IN_LISTS[torch.optim.Adamax]

    def changed(values, *tensors):
        torchs({**values, "lr": values["lr"] * (1 + 1e-6)}, *tensors)

    for function, kernel in ((torchs, "foreach, with the bits"), (changed, "torch's default")):
        monkeypatch.setitem(_list_functions.IN_LISTS, torch.optim.Adamax, function)
        optimizer, params = ll.optimizer(torch.optim.Adamax, lr=0.1), {"w": torch.ones(3)}
        optimizer.update({"w": torch.ones(3)}, optimizer.init(params), params, 0)
        assert f"kernel: {kernel}" in repr(optimizer)
