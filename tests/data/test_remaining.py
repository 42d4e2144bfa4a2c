"""`loader(state)` in place of the loader, generators of the user's own, and runs whose batches come from elsewhere."""

import itertools

import pytest
import torch
from ranks import launch
from torch import nn
from torch.utils.data import DataLoader

import looplib as ll

DATA = torch.arange(256.0).unsqueeze(1)
model = nn.Linear(1, 1)
SGD = ll.optimizer(torch.optim.SGD, lr=0.1)
STEPS = {
    "evaluate": lambda batches, **options: ll.evaluate(
        ll.make_eval_step(model, lambda model, x: {"mean": ll.Mean(x.sum(), len(x))}), STATE, batches, **options
    ),
    "predict": lambda batches, **options: list(
        ll.evaluation.predict(ll.make_predict_step(model, lambda model, x: x), STATE, batches, **options)
    ),
}
STATE = ll.copy_state(ll.init_state(model)).replace(epoch_length=4, batch=3)
LOADER = ll.make_loader(DATA, batch_size=64, order=ll.data.sequential())


@pytest.mark.every_case
@pytest.mark.parametrize("function", STEPS)
def test_the_rest_of_an_epoch_in_place_of_a_set_is_named(function):
    call = STEPS[function]
    with pytest.warns(
        UserWarning, match="at batch 3 of its epoch, so only the rest .* give the loader itself"
    ) as told:
        rest = call(LOADER(STATE))
    assert told[0].filename == __file__
    assert len(told) == 1
    whole = call(LOADER)  # which is read from the start
    if function == "evaluate":
        assert (rest["mean"], whole["mean"]) == (DATA[192:].mean(), DATA.mean())
    call(LOADER(STATE), max_batches=1)  # some batches of the training data
    call(LOADER(STATE.replace(batch=0)))
    call([*LOADER(STATE)])


def test_ranks_do_not_divide_again_what_a_loader_has_divided():
    launch(2, evaluated_on_two_ranks)


def evaluated_on_two_ranks():
    with ll.distributed.setup():
        with pytest.raises(ValueError, match="this rank's part of each batch, and the ranks would divide it again"):
            STEPS["evaluate"](LOADER(STATE.replace(batch=0)))
        assert STEPS["evaluate"](LOADER)["mean"] == DATA.mean()


@pytest.mark.every_case
@pytest.mark.parametrize("function", STEPS)
def test_max_batches_leaves_a_generator_open(function):
    batches = (batch for batch in DATA.split(64))
    STEPS[function](batches, max_batches=1)
    assert torch.equal(next(batches), DATA[64:128])
    STEPS[function](batches, max_batches=1, progress=True)
    assert torch.equal(next(batches), DATA[192:])
    rest = LOADER(ll.TrainState())
    STEPS[function](rest, max_batches=1)
    assert len(list(rest)) == 3


class Stream:
    def __iter__(self):
        return iter(DATA)


AGAIN = "starts the epoch again: skip its first 3 batches, or write loader = ll.make_loader(dataloader)"
THEIRS, OURS = DataLoader(DATA, batch_size=64), ll.make_loader(DATA, batch_size=64)
STREAM = ll.make_loader(Stream(), batch_size=64)
RUNS = {  # batches, epochs before, steps in this one, options of init_state, and if the epoch starts again
    "plain": (THEIRS, 0, 3, {"epoch_length": 4}, True),
    "plain, at the end": (THEIRS, 0, 4, {"epoch_length": 4}, False),
    "plain, without epochs": (THEIRS, 0, 3, {}, False),
    "plain, which end_epoch ends": (THEIRS, 1, 3, {}, True),
    "plain, at the end that end_epoch makes": (THEIRS, 1, 0, {}, False),
    "known": (OURS, 0, 3, {"loader": OURS}, False),
    "ours": (OURS, 1, 3, {"epoch_length": 4}, False),
    "a stream": (STREAM, 1, 3, {}, False),
    "a stream that is known": (STREAM, 1, 3, {"loader": STREAM}, False),
    "endless": (ll.data.endless(OURS), 1, 3, {"epoch_length": 4}, False),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", RUNS)
def test_a_restore_within_an_epoch_of_a_plain_dataloader_says_what_it_starts_again(kind, tmp_path, capsys):
    batches, epochs, steps, options, again = RUNS[kind]
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.0)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer)
    state = ll.init_state(model, optimizer, **options)

    def train(state, count):
        for batch in itertools.islice(batches if batches is THEIRS else batches(state), count):
            state, _ = step(state, batch)
        return state

    for _ in range(epochs):
        state = train(state, 4)
        ll.evaluate(ll.make_eval_step(model, lambda model, x: model(x).mean()), state, OURS)  # not what it trains on
        state = state if state.epoch_length else ll.state.end_epoch(state)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(train(state, steps))
    ckpt.restore(ll.init_state(model, optimizer, **options))
    told = capsys.readouterr().out
    assert (AGAIN in told) == again
    assert len(told.splitlines()) == 1 + again


def test_loaders_that_are_described_and_restores_of_weights_say_nothing_of_a_plain_dataloader(tmp_path, capsys):
    known = {"epoch_length": 4}
    ckpt = ll.checkpoint_io(tmp_path, describe={"loader": ll.make_loader(THEIRS)})
    ckpt.save(ll.init_state(model, SGD, **known).replace(step=1, batch=1))
    ckpt.restore(ll.init_state(model, SGD, **known))
    plain = ll.checkpoint_io(tmp_path / "plain")
    plain.save(ll.init_state(model, SGD, **known).replace(step=1, batch=1))
    plain.restore(ll.init_state(model, SGD, **known), weights_only=True)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_checkpoint_that_is_required(tmp_path):
    ckpt, state = ll.checkpoint_io(tmp_path), ll.init_state(model)
    assert ckpt.restore(state) is state
    with pytest.raises(ValueError, match=f"no checkpoint in {tmp_path}, and required=True"):
        ckpt.restore(state, required=True)
    ckpt.save(state.replace(step=3))
    assert ckpt.restore(ll.init_state(model), required=True).step == 3


def test_the_mode_of_a_metric_that_checkpoints_are_compared_by(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path, monitor="score", mode="max")
    for step, score in ((1, 0.5), (2, 0.7), (3, 0.6)):
        ckpt.save(STATE.replace(step=step), {"score": score})
    assert ckpt.best().step == 2
    for options in {"mode": "max"}, {"mode": "max", "monitor": ll.predicates.BestSoFar("eval/loss")}:
        with pytest.raises(ValueError, match=r"mode='max' is given with monitor=.*BestSoFar has its own"):
            ll.checkpoint_io(tmp_path, **options)


def test_a_prefix_of_letters_gets_a_slash():
    for prefix, name in (("eval", "eval/mean"), ("eval/", "eval/mean"), ("eval_", "eval_mean"), ("", "mean")):
        assert [*STEPS["evaluate"](LOADER, prefix=prefix)] == [name]
        assert [*ll.compute({"mean": ll.Mean(1.0, 1)}, prefix=prefix)] == [name]
    assert [*ll.optim.hyperparameters(SGD, ll.init_state(model, SGD), prefix="train")] == ["train/lr"]
    assert all(name.startswith("mem/") for name in ll.log.memory(prefix="mem"))
    assert "eval/samples_per_second" in STEPS["evaluate"](LOADER, prefix="eval", rates=True)
    assert [*STEPS["evaluate"]({"a": LOADER}, prefix="eval")] == ["eval/a/mean"]
    stack = {"loss": ll.Mean(torch.tensor([2.0, 6.0]), 2)}
    assert ll.transforms.compute_members(stack, prefix="train")[0] == {"train/loss": 1.0}
