"""Runs stopped at each of 20 steps on 2 ranks, continued on 3, then on 1: as a plain loop over the same batches."""

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch
from ranks import launch
from torch import nn

import looplib as ll

SAMPLES, EPOCHS = 26, 3
X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIZES = {"batch_size": 4, "batch_size_per_rank": 2}


def lr_of(samples):
    """A learning rate by the samples seen, which decays to 0 at the end of the run."""
    return 0.1 * (1 - samples / (SAMPLES * EPOCHS))


def new_model():
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def loss_fn(model, batch):
    return model(batch[0]).square().mean()


def train(folder, size, steps):
    """The script: it is the same on any number of ranks. It notes the samples of each of its batches."""
    loader = ll.make_loader([*zip(X, range(SAMPLES), strict=True)], seed=5, **{size: SIZES[size]})
    model, done = new_model(), ll.after_epochs(EPOCHS)
    optimizer = ll.optimizer(torch.optim.SGD, lr=ll.optim.inject(0.1), momentum=0.9, fused=False)
    train_step = ll.make_train_step(ll.grads.reduce_gradients(ll.make_grad_fn(model, loss_fn)), optimizer)
    ckpt = ll.checkpoint_io(folder)
    state = ckpt.restore(ll.init_state(model, optimizer, loader=loader))
    last = None if steps is None else state.step + steps
    while not done(state) and state.step != last:
        for batch in loader(state):
            note = {
                "epoch": state.epoch,
                "step": state.step,
                "rank": ll.distributed.rank(),
                "keys": batch[1].tolist(),
            }
            with (folder / f"keys-{ll.distributed.rank()}.jsonl").open("a") as file:
                file.write(json.dumps(note) + "\n")
            state = ll.optim.set_hyperparameters(state, lr=lr_of(state.samples))
            state, _ = train_step(state, batch)
            if state.step == last:
                break
    ckpt.save(state)
    return state


def train_all(folder, size, stops):
    with ll.distributed.setup(timeout=60):
        for stop, steps in stops.items():
            (folder / str(stop)).mkdir(exist_ok=True)
            state = train(folder / str(stop), size, steps)
        if ll.distributed.is_rank_zero():
            print("samples", state.samples)


def batches_of(folder):
    """Samples of each batch of a run, those of all ranks together, with the epoch."""
    rows = [json.loads(line) for path in folder.glob("keys-*") for line in path.read_text().splitlines()]
    rows.sort(key=lambda row: (row["step"], row["rank"]))
    for _, parts in groupby(rows, key=lambda row: row["step"]):
        parts = [*parts]
        yield parts[0]["epoch"], [key for part in parts for key in part["keys"]]


def plain_loop(batches):
    model, samples = new_model(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=False)
    for keys in batches:
        optimizer.param_groups[0]["lr"] = lr_of(samples)
        optimizer.zero_grad()
        loss_fn(model, (X[keys],)).backward()
        optimizer.step()
        samples += len(keys)
    return dict(model.named_parameters())


def order_of(epoch):
    """The order of an epoch, as a loader of its own reads it in one batch."""
    return next(ll.make_loader(range(SAMPLES), batch_size=SAMPLES, seed=5)(ll.TrainState(epoch=epoch))).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stops", [(1, 6, 7, 20), pytest.param(range(21), marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("size", SIZES)
def test_a_run_stopped_at_any_step_continues_on_other_numbers_of_ranks(tmp_path: Path, size, stops):
    shown = launch(2, train_all, tmp_path, size, {stop: stop for stop in stops})
    assert "A batch has" not in shown
    shown += launch(3, train_all, tmp_path, size, dict.fromkeys(stops, 3))
    shown += launch(1, train_all, tmp_path, size, dict.fromkeys(stops, None))
    assert f"samples {EPOCHS * SAMPLES}" in shown
    continued = "A batch has 6 samples instead of 4, an epoch 5 batches: epoch 0 continues after its first 4 samples"
    assert (continued in shown) == (size == "batch_size_per_rank")
    for stop in stops:
        batches = [*batches_of(tmp_path / str(stop))]
        for epoch in range(EPOCHS):
            assert [key for at, keys in batches if at == epoch for key in keys] == order_of(epoch), (stop, epoch)
        sizes = [len(keys) for _, keys in batches]
        if size == "batch_size":
            assert sizes == [4, 4, 4, 4, 4, 4, 2] * EPOCHS
        else:
            assert {*sizes[: min(stop, 6)]} <= {4}
            assert max(sizes) == (6 if stop < 19 else 4)
        state = train(tmp_path / str(stop), size, None)  # which is done
        assert (state.samples, state.step) == (EPOCHS * SAMPLES, len(batches))
        torch.testing.assert_close(state.params, plain_loop(keys for _, keys in batches), rtol=1e-12, atol=1e-14)
