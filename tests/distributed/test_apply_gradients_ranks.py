"""`apply_gradients` on two ranks: a gradient function called by hand under DDP and FSDP2, beside the donated step."""

import pytest
import torch
from ranks import in_engine, launch, whole
from torch import nn

import looplib as ll


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def by_hand_and_by_step(engine):
    with ll.distributed.setup():
        found = []
        for by_hand in (False, True):
            torch.manual_seed(1)
            layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3)
            model = in_engine(nn.Sequential(*layers), engine)
            adamw = ll.optimizer(torch.optim.AdamW, lr=0.01, foreach=True)
            optimizer = ll.chain(ll.skip_nonfinite(), ll.clip_by_global_norm(1.0), adamw)
            grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), 2)
            train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
            state = ll.init_state(model, optimizer)
            generator = torch.Generator().manual_seed(10 + ll.distributed.rank())
            for number in range(5):
                x = torch.randn(6, 4, generator=generator)
                if number == 2 and ll.distributed.rank() == 0:
                    x = x * torch.nan  # one rank alone; both skip
                batch = x, torch.arange(6) % 3
                if by_hand:
                    before = {name: buffer.clone() for name, buffer in state.buffers.items()}
                    gradients = grad_fn(state, batch, donate=True)
                    state, _ = ll.apply_gradients(optimizer, state, gradients, donate=True, samples=12)
                    for name, buffer in state.buffers.items():
                        assert torch.equal(buffer, before[name]) == state.skipped, name
                else:
                    state, _ = train_step(state, batch)
                assert state.skipped == (number == 2)
            found.append((whole(state.params), whole(state.buffers), state.step, state.batch, state.samples))
        torch.testing.assert_close(*found, rtol=0, atol=0)
        print("compared")


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_gradient_function_called_by_hand_is_the_donated_step(engine):
    assert launch(2, by_hand_and_by_step, engine).count("compared") == 2
