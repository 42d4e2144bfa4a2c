"""A run that is stopped between the last batch of an epoch and `end_epoch` continues after a restart."""

import cookbook
import pytest
import torch
from datasets import Dataset
from ranks import launch
from torch import nn

import looplib as ll

[GROWS] = cookbook.BLOCK.findall(cookbook.SECTIONS["Grow the batch size during a run"])


class Stopped(Exception):
    """As Ctrl-C."""


class Plain(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0).unsqueeze(1))


def buffered():
    data = Dataset.from_dict({"x": [[float(k)] for k in range(40)]}).with_format("torch").to_iterable_dataset()
    return data.shuffle(seed=1, buffer_size=30)


LOADERS = {
    "a stream": lambda: ll.make_loader(Plain(), batch_size=4),
    "a stream that workers read": lambda: ll.make_loader(Plain(), batch_size=4, num_workers=1),
    "growing": lambda: ll.make_loader(torch.arange(10.0).unsqueeze(1), order=ll.data.growing({0: 2, 8: 4})),
    "a sampler": lambda: ll.make_loader(torch.arange(10.0).unsqueeze(1), batch_size=4, order=ll.data.sampler(tens)),
    "a kept position": lambda: ll.make_loader(buffered(), batch_size=4, collate_fn=rows),
}
COOKBOOK = "the cookbook's loop"


def tens(epoch, generator):
    return range(10)


def rows(items):
    return torch.stack([item["x"] for item in items])


def train(kind, folder, when=""):
    """Three epochs, a checkpoint after each step. Stopped in the second: before `end_epoch`, or before the last batch."""
    if kind == COOKBOOK:
        names = {"stop": when, "Stopped": Stopped}
        run = GROWS.replace(
            "state = ll.init_state(model, optimizer, loader=loader).replace(epoch_length=None)",
            "state = ckpt.restore(ll.init_state(model, optimizer, loader=loader).replace(epoch_length=None))",
        )
        run = run.replace("(state, batch)\n", "(state, batch); ckpt.save(state)\n")
        run = run.replace(
            "    state = ll.state.end",
            "    if stop and state.epoch:\n        raise Stopped\n    state = ll.state.end",
        )
        assert run.count("ckpt") == 2
        assert run.count("raise") == 1
        exec(cookbook.SETUP, names)
        names["ckpt"] = ll.checkpoint_io(folder)
        exec(run, names)
        return names["state"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 3), nn.Dropout(), nn.Linear(3, 1))
    optimizer = ll.optimizer(torch.optim.Adam, lr=0.1)
    step = ll.make_train_step(
        ll.make_grad_fn(model, lambda model, x: model(x / 9).square().mean()), optimizer, donate=True
    )
    loader, ckpt, done = LOADERS[kind](), ll.checkpoint_io(folder), ll.after_epochs(3)
    new = ll.init_state(model, optimizer, loader=loader, extra={"stream": ""})
    state = ckpt.restore(new.replace(epoch_length=None))
    while not done(state):
        for batch in loader(state):
            state, _ = step(state, batch)
            ckpt.save(ll.data.with_position(loader, state) if kind == "a kept position" else state)
            if when == "in the last buffer" and state.epoch and state.batch == 8:
                raise Stopped
        if when and state.epoch:
            raise Stopped
        state = ll.state.end_epoch(state)
    return state


def train_all(folder, when):
    for kind in (*LOADERS, COOKBOOK):
        try:
            state = train(kind, f"{folder}/{kind}", when)
            torch.save((state.step, state.epoch, state.batch, state.params), f"{folder}/{kind}.pt")
        except Stopped:
            pass


@pytest.mark.slow
def test_a_restarted_run_ends_the_epoch_and_goes_on_with_the_bits_of_an_unbroken_run(tmp_path):
    train_all(tmp_path, "after the last batch")  # all loops, which continue in a new process
    assert not list(tmp_path.glob("*.pt"))
    launch(0, train_all, tmp_path, "")
    for kind in (*LOADERS, COOKBOOK):
        whole = train(kind, tmp_path / "whole" / kind)
        step, epoch, batch, params = torch.load(tmp_path / f"{kind}.pt")
        assert (step, epoch, batch) == (whole.step, 3, 0), kind
        assert all(torch.equal(params[name], tensor) for name, tensor in whole.params.items()), kind


@pytest.mark.slow
def test_a_shuffled_stream_ends_within_its_last_buffer(tmp_path):
    with pytest.raises(Stopped):
        train("a kept position", tmp_path, "in the last buffer")
    assert ll.checkpoint_io(tmp_path).latest().step == 18
    state = train("a kept position", tmp_path)
    assert (state.step, state.epoch) == (28, 3)  # without the samples that were in the buffer, as `datasets` warns


@pytest.mark.every_case
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loop_that_forgets_end_epoch_is_refused(kind):
    loader = LOADERS[kind]()
    state = ll.init_state(nn.Linear(1, 1))
    for _ in loader(state):
        state = state.replace(batch=state.batch + 1)
    with pytest.raises(ValueError, match=r"call state = ll.state.end_epoch\(state\) after the for loop .*now, if"):
        list(loader(state))
    again = ll.TrainState(batch=state.batch)  # as restored
    assert list(loader(again)) == []
    with pytest.raises(ValueError, match=r"call state = ll.state.end_epoch"):
        list(loader(again))
    with pytest.raises(ValueError, match="batch"):
        list(loader(ll.TrainState(batch=state.batch + 1)))


def test_two_loaders_of_one_loop_are_both_at_the_end():
    first, second = LOADERS["growing"](), LOADERS["growing"]()
    state = ll.TrainState(batch=5)
    assert list(zip(first(state), second(state), strict=True)) == []
    with pytest.raises(ValueError, match="end_epoch"):
        first(state)
    with pytest.raises(ValueError, match="end_epoch"):
        first.indices(ll.TrainState(batch=5))
