"""Comparisons of gradients between ranks, and what is kept of a process group."""

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
