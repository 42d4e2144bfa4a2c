"""Gradients that no engine reduces are refused at the first step, on all ranks, with the state unchanged."""

import warnings

import pytest
import torch
from ranks import launch, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import looplib as ll

SGD = ll.optimizer(torch.optim.SGD, lr=0.1)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(model, batch):
    return model(batch).square().mean()


def batch(rank):
    return torch.linspace(-1, 1, 12).view(3, 4) * (rank + 1)


def root_forgotten():
    model = net()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    return model, loss, ["2.weight", "2.bias"]


def inner_module():
    model = DistributedDataParallel(net())
    return model, lambda model, batch: loss(model.module, batch), ["0.weight", "0.bias", "2.weight", "2.bias"]


def kept_module():
    inside = net()
    model = DistributedDataParallel(inside)
    return model, lambda model, batch: loss(inside, batch), ["0.weight", "0.bias", "2.weight", "2.bias"]


def added_later():
    model = DistributedDataParallel(net())
    model.module[2] = nn.Sequential(model.module[2], nn.Linear(2, 2))
    return model, loss, ["2.1.weight", "2.1.bias"]


def thawed_later():
    inside = net()
    inside[0].requires_grad_(False)
    model = DistributedDataParallel(inside)
    inside[0].requires_grad_(True)
    return model, loss, ["0.weight", "0.bias"]


def partly_wrapped():
    model = net()
    model[0] = DistributedDataParallel(model[0])
    return model, loss, ["2.weight", "2.bias"]


def ignored_by_ddp():
    inside = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inside, ["2.weight", "2.bias"])
    return DistributedDataParallel(inside), loss, ["2.weight", "2.bias"]


WAYS = [root_forgotten, inner_module, kept_module, added_later, thawed_later, partly_wrapped, ignored_by_ddp]


def refused():
    with ll.distributed.setup(timeout=60):
        for way in WAYS:
            model, loss_fn, names = way()
            grad_fn = ll.make_grad_fn(model, loss_fn)
            state = ll.init_state(model, SGD)
            before = {name: tensor.clone() for name, tensor in whole(state.params).items()}
            step = ll.make_train_step(grad_fn, SGD, donate=True)
            for _ in range(2):  # a second attempt does not pass
                with pytest.raises(RuntimeError, match="differ between the ranks") as error:
                    step(state, batch(ll.distributed.rank()))
                assert str(error.value).partition(": ")[2].startswith(", ".join(names)), (way, str(error.value))
            assert all(torch.equal(value, before[name]) for name, value in whole(state.params).items())


def test_parameters_that_no_engine_reduces_are_named_before_the_state_is_spent():
    launch(2, refused)


def alike():
    """Loops that are right: DDP, FSDP2, a hybrid mesh, unused and frozen parameters, experts of each rank."""
    with ll.distributed.setup(timeout=60):
        rank = ll.distributed.rank()

        def frozen():
            model = net()
            model[0].requires_grad_(False)
            return model

        def hybrid():
            return fully_shard(net(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))

        models = {
            "ddp": DistributedDataParallel(net()),
            "unused": DistributedDataParallel(net(), find_unused_parameters=True),
            "frozen": DistributedDataParallel(frozen()),
            "fsdp": fully_shard(net(), mesh=init_device_mesh("cpu", (2,))),
            "hybrid": hybrid(),
        }
        for name, model in models.items():
            first = (lambda model, batch: model(batch)[:, :1].sum() * 0) if name == "unused" else loss
            grad_fn = ll.accumulate(ll.make_grad_fn(model, first), 2)
            step = ll.make_train_step(grad_fn, SGD, donate=True)
            state = ll.init_state(model, SGD)
            for _ in range(2):
                state, _ = step(state, batch(rank))
            ll.distributed.check_replicas(state)

        model = net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "2.bias"])
        model = DistributedDataParallel(model)
        grad_fn = ll.make_grad_fn(model, loss, per_rank=lambda name, param: name.startswith("2."))
        state = ll.init_state(model, SGD)
        state, _ = ll.make_train_step(grad_fn, SGD, donate=True)(state, batch(rank))
        raw = net()  # the expert's own gradient: no average over ranks
        loss(raw, batch(rank)).backward()
        torch.testing.assert_close(state.params["2.bias"], raw[2].bias.detach() - 0.1 * raw[2].bias.grad)


def test_right_loops_and_experts_that_differ_on_purpose_are_not_refused():
    launch(2, alike)


def head_first(model, batches, updates, donate):
    """The cookbook's loop: only the last layer until two updates were made."""
    of_head = ll.make_grad_fn(model, loss, trainable=lambda name, tensor: name.startswith("2."))
    head_step = ll.make_train_step(of_head, SGD, donate=donate)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss), SGD, donate=donate)
    state = ll.init_state(model, SGD)
    for batch in batches[:updates]:
        state, _ = (head_step if state.step < 2 else train_step)(state, batch)
    return state


def thawed():
    with ll.distributed.setup(timeout=60):
        rank = ll.distributed.rank()
        batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
        own = [part[3 * rank : 3 * rank + 3] for part in batches]
        model = DistributedDataParallel(net(), find_unused_parameters=True)
        state = head_first(model, own, 4, donate=True)
        raw = net()
        for number, part in enumerate(batches):  # the whole batch in one process
            raw[0].requires_grad_(number >= 2)
            raw.zero_grad()
            loss(raw, part).backward()
            with torch.no_grad():
                for param in raw.parameters():
                    param -= 0.1 * (0 if param.grad is None else param.grad)
        for name, param in raw.named_parameters():
            torch.testing.assert_close(state.params[name].detach(), param.detach())

        # Without it, DDP waits for gradients that this loss does not have, and reduces none of their bucket.
        model = DistributedDataParallel(net())
        with pytest.raises(RuntimeError, match=r"2\.weight, 2\.bias.*find_unused_parameters=True"):
            head_first(model, own, 1, donate=True)


def test_layers_thaw_under_ddp_that_finds_unused_parameters():
    launch(2, thawed)


class LowRank(nn.Module):
    """A layer of LoRA's form: the first gradient of `down` is 0, since `up` is 0."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.up(self.down(x)) - 1


def zero_at_first():
    with ll.distributed.setup(timeout=60):
        torch.manual_seed(0)
        model = LowRank()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["down.weight"])
        model = DistributedDataParallel(model)
        step = ll.make_train_step(ll.make_grad_fn(model, loss), SGD, donate=True)
        state, _ = step(ll.init_state(model, SGD), batch(ll.distributed.rank()))
        ll.distributed.check_replicas(state)
        for _ in range(2):  # a second attempt does not pass
            with pytest.raises(
                RuntimeError, match=r"gradients of 1 parameters differ between the ranks.*: down\.weight\."
            ):
                step(state, batch(ll.distributed.rank()))
        ll.distributed.check_replicas(state)


def test_a_gradient_that_is_zero_at_first_is_compared_again():
    launch(2, zero_at_first)


def late():
    """A part that is wrapped after `make_grad_fn` is averaged over batches of different sizes as one wrapped before."""
    with ll.distributed.setup(timeout=60):
        rank = ll.distributed.rank()
        whole_batch = torch.linspace(-1, 1, 16).view(4, 4)
        part = whole_batch[:1] if rank == 0 else whole_batch[1:]
        model = nn.Sequential(net())
        grad_fn = ll.make_grad_fn(model, loss)
        model[0] = DistributedDataParallel(model[0])
        step, state = ll.make_train_step(grad_fn, SGD, donate=True), ll.init_state(model, SGD)
        raw = net()  # on the whole batch, in one process
        for _ in range(3):
            state, _ = step(state, part)
            raw.zero_grad()
            loss(raw, whole_batch).backward()
            with torch.no_grad():
                for param in raw.parameters():
                    param -= 0.1 * param.grad
        for name, param in raw.named_parameters():
            torch.testing.assert_close(state.params[f"0.{name}"].detach(), param.detach())
        with pytest.raises(RuntimeError, match="DistributedDataParallel works on the module's own parameters"):
            ll.make_train_step(grad_fn, SGD)(state, part)

        model = net()
        grad_fn, predict_step = ll.make_grad_fn(model, loss), ll.make_predict_step(model, lambda model, x: model(x))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        state = ll.init_state(model, SGD)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"FSDP.* was applied to the model after a function was made from it"
            ):
                ll.make_train_step(grad_fn, SGD, donate=True)(state, part)
        with pytest.raises(RuntimeError, match=r"FSDP.* was applied to the model after a function was made from it"):
            predict_step(ll.copy_state(state), part)


def test_a_model_that_is_wrapped_after_make_grad_fn_is_averaged_or_refused():
    launch(2, late)


def lone():
    with ll.distributed.setup(timeout=60):
        told = []
        for _ in range(2):
            model = net()
            step, state = ll.make_train_step(ll.make_grad_fn(model, loss), SGD), ll.init_state(model, SGD)
            with warnings.catch_warnings(record=True, action="always") as caught:
                for _ in range(2):
                    state, _ = step(state, batch(ll.distributed.rank()))
            told.append([str(warning.message).partition(":")[0] for warning in caught])
        assert told == [["there are 2 ranks and the model is in no engine that reduces its gradients"]] * 2, told


def test_each_function_of_a_model_in_no_engine_warns_once():
    launch(2, lone)
