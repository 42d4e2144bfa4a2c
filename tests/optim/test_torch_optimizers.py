"""Every entry of torch's own list of optimizers, pure and donated, beside raw loops: equal bits."""

import copy
import functools
import inspect
import itertools

import pytest
import torch
from shared import equal
from torch import nn
from torch_collections import optimizers

import looplib as ll

CLASSES = [name for name, cls in vars(torch.optim).items() if inspect.isclass(cls) and name != "Optimizer"]
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.complex64
KERNELS = {}, {"foreach": True}, {"foreach": False}, {"fused": True}
STEPS = 4


class Numbers(nn.Module):
    """Parameters of several shapes (matrices alone for Muon), each with its own gradient."""

    def __init__(self, dtype, matrices):
        super().__init__()
        shapes = [(5, 4), (3, 3)] if matrices else [(5, 4), (7,), (), (2, 3, 2)]
        self.numbers = nn.ParameterList([torch.randn(shape, dtype=dtype) for shape in shapes])

    def forward(self, x):
        reals = [torch.view_as_real(p) if p.is_complex() else p for p in self.numbers]
        return sum((p * x[at] + at).sin().sum() for at, p in enumerate(reals))


def loss_fn(model, x):
    return model(x).sum()


def raw_loop(model, batches, cls, options, needs_closure):
    optimizer = cls(model.parameters(), **options)

    def closure(x):
        optimizer.zero_grad()
        loss = loss_fn(model, x)
        loss.backward()
        return loss

    for x in batches:
        if needs_closure:
            optimizer.step(functools.partial(closure, x))
        else:
            closure(x)
            optimizer.step()


def trained(model, batches, cls, options, donate):
    options = {"lr": inspect.signature(cls).parameters["lr"].default, **options}
    optimizer = ll.optimizer(cls, **options)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn, batch_size=lambda batch: 1), optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    for x in batches:
        state, _ = step(state, x)
    return state.params


def cases(info, every):
    """Dtype, hyperparameters and kernel of each case: all of them, or for a sample one or two."""
    takes = inspect.signature(info.optim_cls).parameters
    for dtype in DTYPES if every else DTYPES[:1]:
        real, whole = not dtype.is_complex, dtype is not torch.bfloat16
        if not (info.supports_complex or real) or not (whole or info.optim_cls is not torch.optim.LBFGS):
            continue
        if info.only_supports_sparse_grads and not (real and whole):
            continue
        inputs = info.optim_inputs_func(device="cpu", dtype=dtype)
        for entry, kernel in itertools.product(inputs if every else inputs[-1:], KERNELS if every else KERNELS[:2]):
            # torch refuses a tensor as learning rate with foreach=True, and complex numbers with fused=True.
            if kernel.get("foreach") and isinstance(entry.kwargs.get("lr"), torch.Tensor):
                continue
            if "fused" in kernel and not (real and "cpu" in info.supports_fused_on):
                continue
            if kernel.keys() <= takes.keys():
                yield dtype, entry, kernel


def taken(cls, dtype, kernel):
    """The kernel that looplib takes if none is given: the fused one for what it supports."""
    if kernel or "fused" not in inspect.signature(cls).parameters or dtype.is_complex:
        return kernel
    return kernel if cls is torch.optim.SGD and dtype is torch.bfloat16 else {"fused": True}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("every", [False, True], ids=["a sample", "all"])
def test_the_optimizers_of_torchs_own_tests_have_the_bits_of_a_raw_loop(every):
    assert set(CLASSES) == set(optimizers())
    compared, wrong = 0, []
    for info in optimizers().values():
        cls = info.optim_cls
        for dtype, entry, kernel in cases(info, every):
            torch.manual_seed(0)
            if info.only_supports_sparse_grads:
                first = nn.Embedding(6, 3, sparse=True, dtype=dtype)
                batches = [torch.tensor([[0, 2], [2, number]]) for number in range(STEPS)]
            else:
                first = Numbers(dtype, matrices=cls is torch.optim.Muon)
                batches = torch.randn(STEPS, 4).to(dtype.to_real() if dtype.is_complex else dtype).unbind()
            raw = copy.deepcopy(first)
            raw_loop(raw, batches, cls, {**entry.kwargs, **taken(cls, dtype, kernel)}, info.step_requires_closure)
            for donate in (False, True):
                params = trained(copy.deepcopy(first), batches, cls, {**entry.kwargs, **kernel}, donate)
                compared += 1
                if not equal(params, raw.named_parameters()):
                    wrong.append((cls.__name__, entry.desc, dtype, kernel, "donated" if donate else "pure"))
    assert not wrong
    assert compared > (1000 if every else 40)
