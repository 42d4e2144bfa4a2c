"""Evaluation with DistributedDataParallel uses the first rank's running statistics on every rank, in every batch."""

import torch
from ranks import launch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import looplib as ll


def on_two_ranks():
    with ll.distributed.setup():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
        optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
        grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
        train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
        eval_step = ll.make_eval_step(model, lambda model, x: {"out": ll.Mean(model(x).sum(), 1)})
        state, batch = ll.init_state(model, optimizer), torch.arange(12.0).view(4, 3)
        own = torch.randn(8, 3) * (1 + ll.distributed.rank())  # so that the ranks' statistics differ
        for _ in range(2):
            for _ in range(2):
                state, _ = train_step(state, own)
            before = {name: tensor.clone() for name, tensor in state.buffers.items()}
            outs = [eval_step(state, batch)["out"].compute() for _ in range(3)]
            torch.testing.assert_close(dict(state.buffers), before, rtol=0, atol=0)
            first = {name: tensor.clone() for name, tensor in state.buffers.items()}
            for tensor in first.values():
                torch.distributed.broadcast(tensor, 0)
            with torch.no_grad():
                parameters = dict(model.module.named_parameters())
                expected = torch.func.functional_call(model.module.eval(), {**parameters, **first}, (batch,)).sum()
            model.module.train()
            torch.testing.assert_close(outs, [expected] * 3, rtol=0, atol=0)
        print("equal")


def test_every_batch_is_evaluated_with_the_first_ranks_statistics():
    assert launch(2, on_two_ranks).count("equal") == 2
