"""Buffers of a donated step on a device are copied by few kernels."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import looplib as ll
from far.device import far


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **kwargs or {})


def test_buffers_are_copied_by_one_kernel_for_each_dtype():
    norms = [nn.BatchNorm1d(3) for _ in range(4)]
    with far() as device:
        model = nn.Sequential(nn.Linear(3, 3), *norms).to(device)
        optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
        grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().sum())
        step = ll.make_train_step(grad_fn, optimizer, donate=True)
        state, x = ll.init_state(model, optimizer), torch.randn(5, 3).to(device)
        for _ in range(2):
            state, _ = step(state, x)
        before = {name: tensor.cpu() for name, tensor in state.buffers.items()}
        with Operators() as seen:
            state, _ = step(state, x)
        assert seen.names.count("_foreach_copy_") == 2
        assert "clone" not in seen.names
        assert not any(torch.equal(state.buffers[name].cpu(), value) for name, value in before.items())
