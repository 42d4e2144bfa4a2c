"""BatchNorm statistics computed again, beside torch's update_bn."""

import copy
import functools

import pytest
import torch
from ranks import launch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

import looplib as ll

recompute = ll.evaluation.recompute_batch_norm


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=0.3)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def data(samples=24):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 1, 6, 6, generator=generator) * 2 + 1
    return x, torch.randint(0, 3, (samples,), generator=generator)


def batches(size=7):  # the last one is smaller
    x, y = data()
    return list(zip(x.split(size), y.split(size), strict=True))


def net(**options):
    torch.manual_seed(0)
    return Net(**options)


def everything(model):
    modes = [module.training for module in model.modules()]
    momenta = [getattr(module, "momentum", None) for module in model.modules()]
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, modes, momenta


def assert_same(left, right):
    assert left[1:] == right[1:]
    assert left[0].keys() == right[0].keys()
    assert all(torch.equal(left[0][name], right[0][name]) for name in left[0])


@pytest.mark.every_case
@pytest.mark.parametrize("average", ["swa", "ema", "none"])
def test_an_averaged_state_has_the_bits_of_update_bn(average):
    part, fn = {
        "swa": (ll.optim.swa(start=1), get_swa_multi_avg_fn()),
        "ema": (ll.ema(0.7, start=1), get_ema_multi_avg_fn(0.7)),
        "none": (None, None),
    }[average]
    model, theirs = net(), net()
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1, foreach=False)
    optimizer = sgd if part is None else ll.chain(sgd, part)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    state = ll.init_state(model, optimizer)
    raw = torch.optim.SGD(theirs.parameters(), lr=0.1, foreach=False)
    averaged = None if fn is None else AveragedModel(theirs, multi_avg_fn=fn)
    for batch in batches(8):
        state, _ = train_step(state, batch)
        raw.zero_grad()
        loss_fn(theirs, batch).backward()
        raw.step()
        if averaged is not None:
            averaged.update_parameters(theirs)
    expected = theirs if averaged is None else averaged.module
    update_bn(batches(), expected)

    before, given, stream = everything(model), ll.eval_state(optimizer, state), torch.get_rng_state()
    kept = {name: tensor.clone() for name, tensor in given.buffers.items()}
    ready = recompute(model, given, batches())
    assert_same(everything(model), before)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(given.buffers[name], tensor) for name, tensor in kept.items())
    assert all(torch.equal(ready.params[name], tensor) for name, tensor in expected.named_parameters())
    assert all(torch.equal(ready.buffers[name], tensor) for name, tensor in expected.named_buffers())
    assert not torch.equal(ready.buffers["norm.running_mean"], given.buffers["norm.running_mean"])
    assert all(ready.params[name] is given.params[name] for name in given.params)
    # evaluated as torch's model in eval mode
    expected.eval()
    with torch.no_grad():
        logits = expected(data()[0])
    predict_step = ll.make_predict_step(model, lambda model, batch: model(batch[0]))
    assert torch.equal(predict_step(ready, data()), logits)


def test_any_forward_pass_and_any_kind_of_batches():
    model, expected = net(), net()
    update_bn(batches(), expected)
    state, x = ll.init_state(model), data()[0]
    loader = ll.make_loader(
        torch.utils.data.TensorDataset(*data()), batch_size=7, order=ll.data.sequential(), divide=False
    )
    for found in (
        recompute(model, state, [x for x, _ in batches()]),
        recompute(model, state, batches(), forward=loss_fn),
        recompute(model, state, loader),
        recompute(model, state, ({"x": x} for x in x.split(7)), forward=lambda model, batch: model(batch["x"])),
        recompute(model, state, [*batches(), *batches()], max_batches=4),
    ):
        assert all(torch.equal(found.buffers[name], tensor) for name, tensor in expected.named_buffers())


def test_dropout_draws_other_masks_in_each_batch_and_the_same_ones_again():
    model = net(dropout=0.5)
    state, same = ll.init_state(model), [batches()[0]] * 2
    one, two = recompute(model, state, same[:1]).buffers, recompute(model, state, same).buffers
    assert not torch.equal(one["head.2.running_mean"], two["head.2.running_mean"])
    assert torch.equal(one["norm.running_mean"], two["norm.running_mean"])  # before the dropout
    assert torch.equal(two["head.2.running_mean"], recompute(model, state, same).buffers["head.2.running_mean"])


def test_frozen_layers_keep_their_statistics_and_a_model_in_eval_mode_has_none_that_are_frozen():
    model = net()
    model.norm.eval()
    state = ll.init_state(model)
    found = recompute(model, state, batches())
    assert found.buffers["norm.running_mean"] is state.buffers["norm.running_mean"]
    assert found.buffers["head.2.num_batches_tracked"] == 4
    assert not model.norm.training
    model.eval()
    expected = net()
    update_bn(batches(), expected)
    found = recompute(model, ll.init_state(model), batches())
    assert all(torch.equal(found.buffers[name], tensor) for name, tensor in expected.named_buffers())
    assert not model.training


def test_a_pass_that_fails_leaves_the_module_as_it_was():
    model = net()
    before, state = everything(model), ll.init_state(model)

    def forward(model, batch):
        model(batch[0])
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        recompute(model, state, batches(), forward=forward)
    assert_same(everything(model), before)


def test_refusals():
    model, plain = net(), nn.Linear(3, 3)
    state = ll.init_state(model)
    with pytest.raises(ValueError, match="no BatchNorm layer in training mode"):
        recompute(plain, ll.init_state(plain), [torch.ones(4, 3)])
    with pytest.raises(ValueError, match=r"does not reach head\.2"):
        recompute(model, state, batches(), forward=lambda model, batch: model.norm(model.conv(batch[0])))
    with pytest.raises(ValueError, match="no batches"):
        recompute(model, state, [])
    with pytest.raises(TypeError, match="one batch is"):
        recompute(model, state, data()[0])
    with pytest.raises(ValueError, match="not those of this Net"):
        recompute(model, ll.init_state(plain), batches())
    with pytest.raises(TypeError, match="recompute_batch_norm"):
        recompute(state, model, batches())


class Synced(nn.SyncBatchNorm):
    """SyncBatchNorm, which torch has for accelerators only, with the samples of all ranks and no gradient."""

    def forward(self, x):
        parts = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, x)
        everyone = functools.partial(
            nn.functional.batch_norm, training=True, momentum=1 / (self.num_batches_tracked + 1)
        )
        everyone(torch.cat(parts), self.running_mean, self.running_var)
        self.num_batches_tracked += 1
        return nn.functional.batch_norm(x, self.running_mean, self.running_var)


def on_ranks(engine):
    with ll.distributed.setup():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        model = net(dropout=0.0)
        wrapped = nn.parallel.DistributedDataParallel(model) if engine == "ddp" else model
        if engine == "synced":
            wrapped = model = nn.Sequential(model.conv, Synced(4))
        state = ll.init_state(wrapped)
        everyone = copy.deepcopy(model) if engine != "synced" else nn.Sequential(net().conv, nn.BatchNorm2d(4))

        def check(found, parts):
            update_bn(parts, everyone)
            for name, tensor in everyone.named_buffers():
                if not (engine == "synced" and name.endswith("tracked")):
                    torch.testing.assert_close(found.buffers[name], tensor, rtol=1e-5, atol=1e-6)
            everywhere = [None] * ranks
            torch.distributed.all_gather_object(everywhere, found.buffers)
            assert all(torch.equal(everywhere[0][name], everywhere[-1][name]) for name in found.buffers)

        # the ranks take turns, and one of them has none for the last
        given = [part for part, _ in batches(8)]
        rounds = [given[i : i + ranks] for i in range(0, len(given), ranks)]
        if engine == "synced":
            check(recompute(wrapped, state, given), [torch.cat(parts) for parts in rounds if len(parts) == ranks])
            return
        check(recompute(wrapped, state, given), given)
        # a loader divides each batch
        loader = ll.make_loader(torch.utils.data.TensorDataset(*data()), batch_size=8, order=ll.data.sequential())
        check(recompute(wrapped, state, loader), [part for x in given for part in x.tensor_split(ranks)])
        # each has its own
        own = recompute(wrapped, state, given[rank : rank + 1], divide=False)
        update_bn(given[rank : rank + 1], everyone)
        assert all(torch.equal(own.buffers[name], tensor) for name, tensor in everyone.named_buffers())


@pytest.mark.every_case
@pytest.mark.parametrize("engine", ["ddp", "plain", "synced"])
def test_ranks_get_the_average_over_the_parts_of_all(engine):
    launch(2, on_ranks, engine)
