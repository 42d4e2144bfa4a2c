"""Gradients of two ranks with different batches, in each engine, against the whole batch in one process."""

import math
import warnings

import torch
from ranks import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import looplib as ll

SIZES = [[3, 1, 1], [4, 2]]  # of each rank's microbatches: the second rank has one less
FEW = [[2, 3], [0]]
FIRST_EMPTY = [[2, 3], [0, 4]]


def token_loss(model, x):
    """A loss whose weights are no counts of samples."""
    weights = (x[:, 0] > 0).double() + 0.5
    return ll.Mean((model(x).square().sum(1) * weights).sum(), weights.sum())


def mean_loss(model, x):
    return model(x).square().sum(1).mean()


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model.register_parameter("scale", nn.Parameter(torch.ones(2, dtype=torch.double)))
    model.register_forward_hook(lambda module, inputs, out: out * module.scale)
    return model


def batches_of(sizes):
    x = torch.randn(sum(map(sum, sizes)), 3, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    of_ranks = x.split([sum(own) for own in sizes])
    return x, [list(batch.split(own)) for batch, own in zip(of_ranks, sizes, strict=True)]


def ddp(grad_of):
    return ll.accumulate(grad_of(DistributedDataParallel(network())))


def ddp_static(grad_of):
    return ll.accumulate(grad_of(DistributedDataParallel(network(), static_graph=True)))


def fsdp(grad_of):
    return ll.accumulate(grad_of(fully_shard(network(), mesh=init_device_mesh("cpu", (2,)))))


def reduced(grad_of):
    return ll.grads.reduce_gradients(ll.accumulate(grad_of(network())))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def each_engine():
    with ll.distributed.setup(timeout=60), warnings.catch_warnings():
        warnings.simplefilter("error")
        rank = ll.distributed.rank()
        for loss_fn in (mean_loss, token_loss):
            every, few = (ddp, ddp_static, fsdp, reduced), (ddp, reduced)
            for sizes, engines in ((SIZES, every), (FEW, few), (FIRST_EMPTY, few)):
                batch, pieces = batches_of(sizes)
                single = network()
                total = token_loss(single, batch) if loss_fn is token_loss else mean_loss(single, batch)
                (total.total / total.weight if loss_fn is token_loss else total).backward()
                norm = nn.utils.get_total_norm([parameter.grad for parameter in single.parameters()])
                for engine in engines:
                    models = []

                    def grad_of(model, loss_fn=loss_fn, models=models):
                        models.append(model)
                        return ll.make_grad_fn(model, loss_fn)

                    clipped = ll.clip_by_global_norm(engine(grad_of), math.inf)
                    state = ll.init_state(models[0])
                    out = clipped(state, pieces[rank], ll.types.GradRequest(donate=True))
                    name = f"{engine.__name__}, {loss_fn.__name__}, {sizes}"
                    assert out.samples == len(batch), name
                    found = out.metrics["grad_norm"].compute()
                    torch.testing.assert_close(torch.as_tensor(found).double(), norm, rtol=1e-12, atol=0, msg=name)
                    for key, parameter in single.named_parameters():
                        torch.testing.assert_close(
                            whole(out.grads[key]), parameter.grad, rtol=1e-12, atol=1e-12, msg=f"{name}: {key}"
                        )


def test_the_gradient_is_that_of_the_whole_batch_whatever_the_engine_and_the_sizes():
    launch(2, each_engine)
