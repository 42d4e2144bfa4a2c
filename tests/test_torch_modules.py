"""Every entry of torch's own list of modules, pure and donated, beside raw loops: equal bits."""

import copy
import itertools

import pytest
import torch
from shared import mix
from torch import nn
from torch_collections import modules

import looplib as ll

SAMPLE = "nn.Linear", "nn.Conv2d", "nn.BatchNorm1d", "nn.LSTM", "nn.Embedding", "nn.CTCLoss"
PARTS, STEPS = 8, 2
MOST = 80  # cases of a module, spread over its list: the linear cross-entropy has 1,714


class Scaled(nn.Module):
    """A module whose first input of floating-point numbers is scaled, so that each has a parameter to train."""

    def __init__(self, module, dtype):
        super().__init__()
        self.module, self.scale = module, nn.Parameter(torch.tensor(0.9, dtype=dtype))

    def forward(self, args, kwargs):
        inputs = {**dict(enumerate(args)), **kwargs}
        for key, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                inputs[key] = value * self.scale
                break
        return self.module(*[inputs.pop(at) for at in range(len(args))], **inputs)


def loss_fn(model, batch):
    leaves = torch.utils._pytree.tree_leaves(model(*copy.deepcopy(batch)))
    return sum(leaf.sin().mean() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


def raw_loop(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
    for step in range(STEPS):
        torch.manual_seed(mix(0, step, 0, 0))
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


def trained(model, batch, donate):
    optimizer = ll.optimizer(torch.optim.SGD, lr=1e-4, momentum=0.9, fused=True)
    # Modules of integers (an embedding) leave the scale out.
    grad_fn = ll.make_grad_fn(model, loss_fn, count_samples=lambda batch: 1, allow_unused=True)
    step = ll.make_train_step(grad_fn, optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    for _ in range(STEPS):
        state, _ = step(state, batch)
    return {**state.params, **state.buffers}


def same(tensors, others):
    """True if they have equal bits, or NaN where the others do: some inputs have no logarithm."""
    equal = {
        name: (tensor == others[name]) | (tensor.isnan() & others[name].isnan()) for name, tensor in tensors.items()
    }
    return tensors.keys() == others.keys() and all(map(torch.all, equal.values()))


def cases(info, dtypes):
    """Modules with an input each, in training mode and, where torch's list says that it differs, in eval mode."""
    for dtype in dtypes:
        for training in (True, False):
            torch.manual_seed(0)
            for entry in info.module_inputs_func(info, "cpu", dtype, requires_grad=False, training=training):
                if entry.forward_input is not None:
                    made = info.module_cls(*entry.constructor_input.args, **entry.constructor_input.kwargs)
                    batch = entry.forward_input.args, entry.forward_input.kwargs
                    yield entry.desc, Scaled(made.to(dtype).train(training), dtype), batch


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:LSTM with projections")
@pytest.mark.filterwarnings("ignore:.*divides the total loss by both", "ignore:linear_cross_entropy")
@pytest.mark.parametrize("part", [None, *range(PARTS)], ids=["a sample", *map(str, range(PARTS))])
def test_the_modules_of_torchs_own_tests_have_the_bits_of_a_raw_loop(part):
    if part is None:
        names, dtypes, first = SAMPLE, [torch.float32], 4
    else:
        names, dtypes, first = sorted(modules())[part::PARTS], [torch.float32, torch.float64], None
    compared, wrong = 0, []
    for name in names:
        of_module = [*itertools.islice(cases(modules()[name], dtypes), first)]
        for desc, model, batch in of_module[:: len(of_module) // MOST + 1]:
            if "Lazy" in name:
                model(*copy.deepcopy(batch))  # creates the parameters
            raw = copy.deepcopy(model)
            raw_loop(raw, batch)
            for donate in (False, True):
                found = trained(copy.deepcopy(model), batch, donate)
                compared += 1
                if not same(found, {**dict(raw.named_parameters()), **dict(raw.named_buffers())}):
                    wrong.append((name, desc, "donated" if donate else "pure"))
    assert not wrong
    assert compared > 40
