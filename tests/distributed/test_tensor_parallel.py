"""Tensor and sequence parallelism in real processes, beside a raw loop in one process, in float64."""

import itertools
import warnings

import pytest
import torch
from problem import adamw
from ranks import launch, whole
from shared import SGD
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import looplib as ll

TOKENS, WIDTH, STEPS = 16, 8, 10
MODELS = [*itertools.product(["sequence", "loss", "sharded"], [2, 4]), ("replicas", 4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.last(x + self.down(torch.tanh(self.up(self.norm(x))))))


def made():
    torch.manual_seed(0)
    model = Model().double()
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, whose gradients would otherwise be alike
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, TOKENS, (8, 4), generator=generator) for _ in range(STEPS)]


def loss_fn(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def with_total(model, tokens):
    loss = loss_fn(model, tokens)
    return loss, {"total": ll.Mean(loss * tokens.numel(), tokens.numel())}


def by_hand():
    """Weights, their moving average and metrics after a raw loop in one process."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    log = []
    for tokens in batches():
        optimizer.zero_grad()
        loss = loss_fn(model, tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        log.append({"loss": loss.item(), "total": loss.item(), "grad_norm": norm.item()})
        optimizer.step()
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach(), 0.1)
    return dict(model.named_parameters()), average, log


def parallel(model, kind):
    """The model over all ranks: sequence parallel, with a parallel loss, or in replicas or shards over the data as well."""
    ranks = torch.distributed.get_world_size()
    data = 2 if kind in ("sharded", "replicas") and ranks == 4 else 1
    mesh = init_device_mesh("cpu", (data, ranks // data), mesh_dim_names=("data", "tensor"))
    ll.distributed.set_data_parallel_group(mesh["data"])
    parts = (
        {"output_layouts": Shard(-1), "use_local_output": False}
        if kind == "loss"
        else {"output_layouts": Replicate()}
    )
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), **parts),
    }
    parallelize_module(model, mesh["tensor"], plan)
    if kind == "sharded":
        fully_shard(model, mesh=mesh["data"])
    return model


def train(kind, donate):
    expected, average, log = by_hand()
    model = parallel(made(), kind)
    grad_fn = ll.make_grad_fn(model, with_total)
    optimizer = adamw()
    grad_fn = ll.accumulate(grad_fn, microbatches=2)
    if kind == "replicas":
        grad_fn = ll.grads.reduce_gradients(grad_fn)
    optimizer = ll.chain(ll.skip_nonfinite(5), ll.clip_by_global_norm(0.5), optimizer, ll.ema(0.9))
    train_step = ll.make_train_step(grad_fn, optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    rank, data = ll.distributed.rank(), ll.distributed.world_size()
    for tokens, values in zip(batches(), log, strict=True):
        with loss_parallel() if kind == "loss" else torch.enable_grad():
            state, metrics = train_step(state, tokens.tensor_split(data)[rank])
        found = ll.compute(ll.distributed.reduce(metrics))
        assert found == pytest.approx({name: values[name] for name in found}, rel=1e-12)
    parameters = {name: parameter.detach() for name, parameter in expected.items()}
    torch.testing.assert_close(whole(state.params), parameters, rtol=1e-12, atol=1e-12)
    eval_step = ll.make_eval_step(model, lambda model, tokens: with_total(model, tokens)[1])
    with loss_parallel() if kind == "loss" else torch.enable_grad():
        total = ll.evaluate(eval_step, state, batches())["total"]
    reference = made()
    reference.load_state_dict(whole(state.params))
    assert total == pytest.approx(sum(loss_fn(reference, tokens).item() for tokens in batches()) / STEPS)
    averaged = whole(ll.eval_state(optimizer, state).params)
    torch.testing.assert_close(averaged, average, rtol=1e-12, atol=1e-12)


def trained(kind, donate):
    with ll.distributed.setup():
        train(kind, donate)


@pytest.mark.parametrize(("kind", "ranks"), MODELS)
def test_a_parallel_model_trains_as_one_process_does(kind, ranks):
    launch(ranks, trained, kind, True)


@pytest.mark.slow
def test_pure_steps_of_a_sequence_parallel_model():
    launch(2, trained, "sequence", False)


def gradients_by_hand():
    with ll.distributed.setup():
        model = parallel(made(), "sequence")
        optimizer = adamw()
        state = ll.init_state(model, optimizer)
        name, mesh = "norm.weight", state.params["norm.weight"].device_mesh
        grads = {name: DTensor.from_local(torch.ones(WIDTH).double(), mesh, [Partial()])}
        with pytest.raises(ValueError, match=r"Partial.*redistribute\(placements=param.placements\)"):
            optimizer.update(grads, state.opt_state, state.params, 0)


def test_partial_sums_as_gradients_are_refused_by_name():
    launch(2, gradients_by_hand)


def forgotten():
    with ll.distributed.setup():
        model = parallel(made(), "sharded")
        state, warned = ll.init_state(model, SGD), []
        for forget in False, True:
            if forget:
                ll.distributed.set_data_parallel_group(None)
            train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD, donate=True)
            with warnings.catch_warnings(record=True) as caught:
                state, _ = train_step(state, batches()[0])
            warned.append([w for w in caught if "embed.weight is sharded along 2 dimensions" in str(w.message)])
        assert [len(found) for found in warned] == [0, 1]
        assert 'set_data_parallel_group(mesh["data"])' in str(warned[1][0].message)


@pytest.mark.slow
def test_ranks_of_one_model_that_read_different_samples_are_warned_of():
    launch(4, forgotten)


def traced():
    with ll.distributed.setup():
        model = parallel(made(), "sequence")
        state, tokens = ll.init_state(model, SGD), batches()[0]
        train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD)
        eval_step = ll.make_eval_step(model, lambda model, tokens: {"loss": loss_fn(model, tokens)})
        graphs = [ll.compile_step(step, backend="eager") for step in (train_step, eval_step)]
        for step in ll.transforms.differentiable(train_step), ll.compile_step(train_step), *graphs:
            with pytest.raises(ll.transforms.UntraceableError, match=r"embed.weight.*DTensor.*block.compile"):
                step(state, tokens)


def test_graphs_of_parameters_that_are_dtensors_are_refused_by_name():
    launch(2, traced)
