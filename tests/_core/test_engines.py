"""Comparisons of gradients between ranks, and what is kept of a process group."""

import copy
import gc
import weakref

import pytest
import torch
from ranks import launch
from shared import SGD, mean_square
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import looplib as ll
from looplib._core import engines, ranks


def compared_rarely():
    with ll.distributed.setup(timeout=60):
        model = DistributedDataParallel(nn.Linear(4, 2))
        step = ll.make_train_step(ll.make_grad_fn(model, mean_square), SGD, donate=True)
        state, compared = ll.init_state(model, SGD), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines, "different", lambda *_: compared.append(state.step + 1))
            for _ in range(17):
                state, _ = step(state, torch.ones(3, 4))
        assert compared == [1, 2, 4, 8, 16], compared


def test_gradients_are_compared_in_few_steps():
    launch(2, compared_rarely)


def after_a_pass_that_failed():
    with ll.distributed.setup(timeout=60):
        rank, x = ll.distributed.rank(), torch.linspace(-1, 1, 12).double().view(3, 4)
        for fails in ("before the model", "after the model"):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
            raw = copy.deepcopy(net)
            left = {fails}

            def loss_fn(model, x, left=left):
                if "before the model" in left:
                    raise InterruptedError(left.pop())
                loss = mean_square(model, x)
                if left:
                    raise InterruptedError(left.pop())
                return loss

            model = DistributedDataParallel(net, static_graph=True)
            # Two passes on rank 0, and one on rank 1.
            grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), size=1)
            step = ll.make_train_step(grad_fn, SGD, donate=True)
            state, part = ll.init_state(model, SGD), x[2 * rank : 2 * rank + 2]
            with pytest.raises(InterruptedError):
                step(state, part)
            sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
            for _ in range(3):
                state, _ = step(state, part)
                sgd.zero_grad()
                mean_square(raw, x).backward()
                sgd.step()
            torch.testing.assert_close(state.params, dict(raw.named_parameters()), rtol=1e-12, atol=1e-14)


def test_a_static_graph_is_not_learned_from_a_pass_that_failed():
    launch(2, after_a_pass_that_failed)


def ended():
    ll.distributed.setup(timeout=60).__enter__()
    assert ranks.gather(ll.distributed.rank()) == [0, 1]
    group = weakref.ref(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert group() is None


def test_a_process_group_that_was_destroyed_is_freed():
    launch(2, ended)
