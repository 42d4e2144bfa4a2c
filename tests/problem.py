"""A small problem for tests of optimizers: a model, batches, a loss, and runs of a raw loop and of a train step."""

import pytest
import torch
from torch import nn

import looplib as ll

QUICK = {"backend": "eager"}
WAYS = {"pure": {}, "donated": {"donate": True}, "compiled": {"compile": QUICK}}
WAYS["compiled, donated"] = {"compile": QUICK, "donate": True}


def net(dtype=torch.float32, norm=nn.BatchNorm1d, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), norm(5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 2)).to(dtype)


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator).to(dtype) for _ in range(count)]


def loss_fn(model, x):
    return (model(x) - 1).square().mean()


def is_vector(name, tensor):
    return tensor.ndim < 2


def sgd(lr=0.1, **changes):
    return ll.optimizer(torch.optim.SGD, lr=lr, momentum=0.9, **changes)


def adamw(lr=1e-2, **changes):
    return ll.optimizer(torch.optim.AdamW, lr=lr, **changes)


def raw_adamw(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)  # the kernel that looplib takes


def begin(model, optimizer, bound=True, **arguments):
    state = ll.init_state(model, optimizer, **arguments)
    return state if bound else ll.copy_state(state)


def step_of(model, optimizer, donate=False, loss_fn=loss_fn, wrap=lambda grad_fn: grad_fn, **options):
    return ll.make_train_step(wrap(ll.make_grad_fn(model, loss_fn, **options)), optimizer, donate=donate)


def run(model, optimizer, data, donate=False, bound=True, **options):
    step, state = step_of(model, optimizer, donate, **options), begin(model, optimizer, bound)
    for batch in data:
        state, _ = step(state, batch)
    return state


def raw_loop(model, optimizer, data, after=lambda step: None, loss_fn=loss_fn):
    for step, batch in enumerate(data, start=1):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
        after(step)


def assert_refused(error, words, call):
    """The call raises this error, whose message has these words: what was found, and what to give."""
    with pytest.raises(error) as raised:
        call()
    assert all(word in str(raised.value) for word in words.split()), (words, raised.value)
