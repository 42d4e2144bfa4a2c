"""Ranks that differ: told at the first step, and whenever their tensors are compared."""

import pytest
import torch
from ranks import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import looplib as ll


def mean_square(model, batch):
    return model(batch).square().mean()


def message(call):
    with pytest.raises(ValueError, match="rank") as error:
        call()
    return str(error.value)


def differing():
    with ll.distributed.setup(timeout=60):
        rank = ll.distributed.rank()
        torch.manual_seed(0)
        optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        batch = torch.randn(3 + rank, 2)

        def first_step(state, batch, grad_fn):
            return ll.make_train_step(grad_fn, optimizer)(state, batch)

        model = torch.nn.Linear(2, 2 + rank)
        grad_fn = ll.grads.reduce_gradients(ll.make_grad_fn(model, mean_square))
        state = ll.init_state(model, optimizer, seed=rank)
        assert message(lambda: first_step(state, batch, grad_fn)) == (
            "the ranks do not run the same program:\n"
            "  state.seed is 0 on rank 0, 1 on rank 1\n"
            "  params/weight is float32 (2, 2) on rank 0, float32 (3, 2) on rank 1\n"
            "  params/bias is float32 (2,) on rank 0, float32 (3,) on rank 1"
        )

        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        grad_fn = ll.make_grad_fn(model, mean_square)
        step = ll.make_train_step(grad_fn, optimizer, donate=True)
        state = ll.init_state(model, optimizer)
        state = state.replace(step=2 * rank)
        batches = [batch, [batch, batch.long()]]
        found = message(lambda: step(state, batches[rank]))
        assert "state.step is 0 on rank 0, 2 on rank 1" in found
        assert "the batch is float32 (...) on rank 0, float32 (...); int64 (...) on rank 1" in found.replace(
            "..., ...", "..."
        )

        state = state.replace(step=0)
        for _ in range(2):
            state, _ = step(state, batch)
        ll.distributed.check_replicas(state)
        if rank == 1:
            with torch.no_grad():
                model.module.bias.view(torch.int32)[1] ^= 1  # one flipped bit
        found = message(lambda: ll.distributed.check_replicas(state))
        assert found.startswith("the ranks hold different values:\n  params/bias is "), found
        assert "weight" not in found
        assert "opt_state" not in found

        # The copies of each shard are compared, and the shards are not compared with each other.
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
        state = ll.init_state(model, optimizer)
        ll.distributed.check_replicas(state)
        if rank == 1:
            model.weight.to_local().data[0, 0] += 1
        assert "params/weight (shard 0) is " in message(lambda: ll.distributed.check_replicas(state))
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        ll.distributed.check_replicas(ll.init_state(model, optimizer))


def test_ranks_that_differ_are_told_at_the_first_step_and_whenever_they_are_compared():
    launch(2, differing)
