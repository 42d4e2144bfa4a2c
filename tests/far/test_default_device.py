"""Tensors of looplib's own lie where those are that they belong to, whatever torch's default device is."""

import pytest
import torch
from torch import nn

import looplib as ll
from far import cases
from far.device import far

DATA = torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12.0).view(12, 1))
ORDERS = {
    "shuffled": lambda: ll.data.shuffled(),
    "sequential": lambda: ll.data.sequential(),
    "with_replacement": lambda: ll.data.with_replacement(8),
    "weighted": lambda: ll.data.weighted([1.0, 2.0] * 6),
    "mixture": lambda: ll.data.mixture([0.5, 0.5], 8),
    "by_length": lambda: ll.data.by_length([*range(1, 13)]),
    "growing": lambda: ll.data.growing({0: 2, 4: 4}),
    "sampler": lambda: ll.data.sampler([3, 1, -1, 3]),
    "batch_sampler": lambda: ll.data.batch_sampler([[3, 1], [2]]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", ORDERS)
def test_orders(name):
    data = torch.utils.data.ConcatDataset([DATA, DATA]) if name == "mixture" else DATA
    size = {} if name in ("growing", "batch_sampler") else {"batch_size": 3}

    def read():
        loader = ll.make_loader(data, order=ORDERS[name](), **size)
        return loader.indices(ll.TrainState()), [batch[0] for batch in loader(ll.TrainState())]

    indices, batches = read()
    with torch.device("meta"):
        other_indices, other_batches = read()
    assert torch.equal(indices, other_indices)
    assert all(map(torch.equal, batches, other_batches))


def test_subsets_windows_and_streams():
    def read():
        subset = torch.utils.data.Subset(DATA, [5, 3, 1])
        text = ll.data.windows(TOKENS, length=3)
        loaders = [ll.make_loader(data, batch_size=2) for data in (subset, text)]
        return [tensor for loader in loaders for batch in loader(ll.TrainState()) for tensor in batch]

    expected = read()
    with torch.device("meta"):
        assert all(map(torch.equal, expected, read()))


TOKENS = torch.arange(13)


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


OPTIMIZERS = {
    "AdamW": lambda: ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(0.1, warmup=2, total=9)),
    "SGD": lambda: ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "ema": lambda: ll.chain(ll.optimizer(torch.optim.SGD, lr=0.01), ll.ema(0.9)),
    "skip_nonfinite": lambda: ll.chain(ll.skip_nonfinite(max_consecutive=2), ll.optimizer(torch.optim.SGD, lr=0.01)),
    "accumulate": lambda: ll.optimizer(torch.optim.SGD, lr=0.01),
}


@pytest.mark.every_case
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_evaluation_and_checkpoints(name, donate, tmp_path):
    def run(folder):
        with torch.device("cpu"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = ll.chain(ll.clip_by_global_norm(1.0), OPTIMIZERS[name]())
        grad_fn = ll.make_grad_fn(model, loss_fn)
        grad_fn = ll.accumulate(grad_fn, 2) if name == "accumulate" else grad_fn
        step = ll.make_train_step(grad_fn, optimizer, donate=donate)
        eval_step = ll.make_eval_step(
            model, lambda model, batch: {"loss": loss_fn(model, batch), "count": ll.Mean(3.0, 2)}
        )
        loader, ckpt = ll.make_loader(DATA, batch_size=6), ll.checkpoint_io(folder)
        state, window = ll.init_state(model, optimizer, loader=loader), ll.Window()
        for _ in range(2):
            for batch in loader(state):
                state, metrics = step(state, batch)
                window = window.add(metrics)
            scores = ll.evaluate(eval_step, ll.eval_state(optimizer, state), loader)
            ckpt.save(state, scores)
            state = ckpt.restore(state, quiet=True)
        return state, {**ll.compute(window.metrics()), **scores}

    state, numbers = run(tmp_path / "one")
    with torch.device("meta"):
        other, other_numbers = run(tmp_path / "other")
    assert other_numbers == numbers
    assert not ll.debug.differences(state, other)


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_workers_read_whatever_the_default_device_is(options):
    loader = ll.make_loader(range(6), batch_size=2, order=ll.data.sequential(), **options)
    for epoch in range(2):  # the second begins with workers that wait
        with torch.device("meta"):
            assert [batch.tolist() for batch in loader(ll.TrainState(epoch=epoch))] == [[0, 1], [2, 3], [4, 5]]


def test_an_accelerator_is_the_default_device():
    with far() as device:
        model, state = cases.started(device, make=cases.plain, epoch_length=3)
        step = ll.make_train_step(ll.make_grad_fn(model, cases.loss_fn), cases.ADAMW, donate=True)
        dataset = torch.utils.data.TensorDataset(*cases.samples())
        with torch.device(device):
            loader = ll.make_loader(dataset, batch_size=8, device=device)
            for batch in loader(state):
                state, metrics = step(state, batch)
            numbers = ll.compute(metrics)
        assert {tensor.device for tensor in state.params.values()} == {device}
        assert numbers.keys() >= {"loss"}
