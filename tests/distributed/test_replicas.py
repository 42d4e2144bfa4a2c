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


def with_other_steps():
    with ll.distributed.setup(timeout=60):
        rank, batch = ll.distributed.rank(), torch.ones(3, 2)
        torch.manual_seed(0)

        def first_step(optimizer, wrap=lambda grad_fn: grad_fn, cut=None):
            model = DistributedDataParallel(torch.nn.Linear(2, 2))
            grad_fn = wrap(ll.accumulate(ll.make_grad_fn(model, mean_square), cut or 1))
            step = ll.make_train_step(grad_fn, optimizer, donate=True)
            return step(ll.init_state(model, optimizer), batch)

        def adamw(lr=0.1):
            return ll.optimizer(torch.optim.AdamW, lr=lr)

        found = message(lambda: first_step([adamw(), ll.optimizer(torch.optim.RMSprop, lr=0.1)][rank]))
        assert (
            "the optimizer's class is torch.optim.adamw.AdamW on rank 0, torch.optim.rmsprop.RMSprop on rank 1"
            in found
        )
        assert "opt_state/state/weight/exp_avg is float32 on rank 0, nothing on rank 1" in found
        title = "the ranks do not run the same program:\n  "
        found = message(lambda: first_step(adamw([0.1, 0.2][rank])))
        assert found == f"{title}the optimizer's lr is 0.1 on rank 0, 0.2 on rank 1"
        found = message(lambda: first_step(ll.ema(adamw(), [0.9, 0.8][rank])))
        assert found == f"{title}the optimizer's ema decay is 0.9 on rank 0, 0.8 on rank 1"
        wraps = [lambda grad_fn: grad_fn, lambda grad_fn: ll.clip_by_global_norm(grad_fn, 0.5)]
        found = message(lambda: first_step(adamw(), wraps[rank]))
        assert found == (
            f"{title}grad_fn is not wrapped on rank 0, clip_by_global_norm(..., 0.5, norm_type=2.0) on rank 1"
        )
        model = torch.nn.Linear(2, 2)
        averaged = ll.grads.reduce_gradients(ll.make_grad_fn(model, mean_square))
        step = ll.make_train_step(ll.clip_by_global_norm(averaged, 1.0 + rank), adamw())
        found = message(lambda: step(ll.init_state(model, adamw()), batch))
        assert "clip_by_global_norm(..., 1.0, " in found

        # A rank with less memory may cut its batch into more microbatches.
        first_step(adamw(), wraps[1], cut=1 + rank)


def test_ranks_with_different_optimizers_or_wrappers_are_told_at_the_first_step():
    launch(2, with_other_steps)


def test_ranks_that_differ_are_told_at_the_first_step_and_whenever_they_are_compared():
    launch(2, differing)


def with_other_loaders():
    with ll.distributed.setup(timeout=60):
        rank = ll.distributed.rank()
        torch.manual_seed(0)
        optimizer, data = ll.optimizer(torch.optim.SGD, lr=0.1), torch.arange(64.0)

        def first_step(*loaders, engine=DistributedDataParallel):
            model = engine(torch.nn.Linear(8, 2))
            grad_fn = ll.make_grad_fn(model, mean_square)
            if engine is not DistributedDataParallel:
                grad_fn = ll.grads.reduce_gradients(grad_fn)
            step = ll.make_train_step(grad_fn, optimizer, donate=True)
            state = ll.init_state(model, optimizer, epoch_length=len(loaders[0]))
            for batches in zip(*(loader(state) for loader in loaders), strict=True):
                step(state, torch.cat(batches).expand(8, -1).T.contiguous())
                break

        def loader(seed=0, **options):
            return ll.make_loader(data, batch_size=8, seed=seed, **options)

        title = "the ranks do not run the same program:\n  "
        for engine in DistributedDataParallel, lambda model: model:
            found = message(lambda engine=engine: first_step(loader(rank), engine=engine))
            assert found == f"{title}the loader's seed is 0 on rank 0, 1 on rank 1"
        found = message(lambda: first_step(loader(5), loader(rank)))
        assert found == f"{title}loader 2's seed is 0 on rank 0, 1 on rank 1"
        found = message(lambda: first_step(loader(order=[ll.data.shuffled(), ll.data.in_order()][rank])))
        assert found == f"{title}the loader's order is shuffled() on rank 0, in_order() on rank 1"
        found = message(lambda: first_step(loader(divide=not rank)))
        assert "the loader's seed is 0 on rank 0, nothing on rank 1" in found, found

        first_step(loader())
        first_step(loader(rank, divide=False))  # each rank chooses its own batches


def test_ranks_with_different_loaders_are_told_at_the_first_step():
    launch(2, with_other_loaders)
