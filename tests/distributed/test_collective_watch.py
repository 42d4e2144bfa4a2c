"""Ranks that do not come: each collective call that waits is named, with the user's line."""

import itertools
import os
import re
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ranks import launch
from shared import SGD, mean_square
from torch.nn.parallel import DistributedDataParallel

import looplib as ll


def parts(norm=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), *[torch.nn.BatchNorm1d(2)] * norm)
    model = DistributedDataParallel(model)
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), SGD, donate=True)
    eval_step = ll.make_eval_step(model, lambda model, x: {"loss": model(x).square().mean()})
    predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    return step, eval_step, predict_step, ll.init_state(model, SGD)


def calls(folder, steps=0):
    """Calls that wait for all ranks, by the name of the function in messages, after some steps."""
    step, eval_step, predict_step, state = parts()
    for _ in range(steps):
        state, _ = step(state, torch.ones(2, 2))
    ckpt, batches = ll.checkpoint_io(folder), list(torch.ones(8, 2).split(2))
    outputs = ll.predict(predict_step, state, batches)
    next(outputs)  # later batches have no barrier before them
    stop, late = ll.after_signal(signal.SIGUSR1), ll.predicates.every_seconds(100)
    return {
        "evaluate": lambda: ll.evaluate(eval_step, state, batches),
        "predict": lambda: list(outputs),
        "CheckpointIO.save": lambda: ckpt.save(state),
        "CheckpointIO.restore": lambda: ckpt.restore(state),
        "reduce": lambda: ll.distributed.reduce({"loss": ll.Mean(1.0, 1)}),
        "barrier": ll.distributed.barrier,
        "every_seconds": lambda: late(state),
        "after_signal": lambda: stop(state),
        "a predicate": lambda: (late | stop)(state),
        "train_step": lambda: step(state, batches[0]),
    }


def fails(call):
    """The one warning of a call for which no other rank comes, and its error."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        error = raised(call, RuntimeError)
    (warned,) = [one for one in said if one.category is RuntimeWarning]
    assert warned.filename == __file__
    return str(warned.message), error


def raised(call, kind):
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def one_rank_alone(name, folder):
    ll.distributed.watch(seconds=0.3)
    with ll.distributed.setup(timeout=2):
        call = calls(folder)[name]
        if ll.distributed.rank() == 0:
            words = rf"rank 0 waits for other ranks in {re.escape(name)}, called at {re.escape(__file__)}:\d+\. All ranks must"
            for text in fails(call):
                assert re.search(words, text), text
        else:
            time.sleep(2.5)
        torch.distributed.destroy_process_group()  # broken by now
        raise SystemExit


NAMES = ["predict", "evaluate", "CheckpointIO.save", "train_step", "reduce", "CheckpointIO.restore", "barrier"]


@pytest.mark.parametrize("name", [*NAMES, "every_seconds", "after_signal"])
def test_a_call_to_which_one_rank_does_not_come_is_named_with_its_line(tmp_path, name):
    launch(2, one_rank_alone, name, str(tmp_path))


def in_different_calls(folder, other, asked):
    ll.distributed.watch(seconds=0.3)
    with ll.distributed.setup(timeout=2):
        rank, made, names = ll.distributed.rank(), calls(folder, steps=1), ["train_step", other]
        if asked:  # as a loop does, which then makes another number of steps on one of the ranks
            made[other]()
        said, error = fails(made[names[rank]])
        for text in [said, error] if rank else [said]:  # rank 0 waits in DDP's backward pass, whose error it is
            assert re.search(rf"rank {rank} waits for other ranks in {names[rank]}, called at", text), text
        torch.distributed.destroy_process_group()
        raise SystemExit


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("other", ["after_signal", "every_seconds", "evaluate"])
def test_when_torchs_timeout_ends_the_wait_the_error_of_each_rank_names_its_own_call(tmp_path, other, asked):
    launch(2, in_different_calls, str(tmp_path), other, asked)


def a_peer_that_ends(seconds):
    ll.distributed.watch(seconds=seconds)
    with ll.distributed.setup(timeout=60):
        ll.distributed.barrier()
        if ll.distributed.rank() == 1:
            time.sleep(1 if seconds < 1 else 0)  # so that the other is warned before
            os._exit(0)
        wait = ll.distributed.barrier
        for text in fails(wait) if seconds < 1 else [raised(wait, RuntimeError)]:
            assert re.search(r"in barrier, called at .* If a rank has ended, its own output", text)
        os._exit(0)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("seconds", [0.3, 100])
def test_the_error_about_a_peer_that_has_ended_points_to_its_output(seconds):
    launch(2, a_peer_that_ends, seconds)


def in_different_functions(folder):
    ll.distributed.watch(seconds=60)
    with ll.distributed.setup(timeout=timedelta(minutes=1)):
        rank, made = ll.distributed.rank(), calls(folder)
        names = ["CheckpointIO.save", "evaluate", "train_step", "after_signal", "every_seconds", "a predicate"]
        for pair in itertools.permutations(names, 2):
            if {*pair} == {"every_seconds", "a predicate"}:
                continue  # the predicate begins with every_seconds, so the ranks are in the same function there
            found = raised(made[pair[rank]], RuntimeError)
            for place, name in enumerate(pair):
                assert re.search(rf"rank {place}: {name}, called at {re.escape(__file__)}:\d+", found), found

        step, _, _, state = parts()
        ckpt = ll.checkpoint_io(folder)
        # The ranks are together again.
        state, _ = step(state, torch.ones(1, 2))
        state = state.replace(step=0)
        path = ckpt.save(state)
        ckpt.save(state.replace(step=1))
        assert path.name == "step-00000000"
        found = raised(lambda: ckpt.restore(state, rank), ValueError)
        assert "the ranks ask for different checkpoints" in found
        assert "is 0 on rank 0, 1 on rank 1" in found

        # As on two hosts that do not share the folder: the same path holds another checkpoint on rank 1.
        other = ll.checkpoint_io(f"{folder}-other").save(state.replace(step=1), {"loss": 1.0}) / "manifest.json"
        open_file = Path.open
        Path.open = lambda path, *mode: open_file(other if rank and path.name == other.name else path, *mode)
        found = raised(lambda: ckpt.restore(state), ValueError)
        assert re.search(r"different checkpoints at .*step-00000001: (.|\n)* \w+ on rank 0, \w+ on rank 1", found), (
            found
        )


def test_ranks_in_different_functions_raise_at_once_on_all_ranks(tmp_path):
    launch(2, in_different_functions, str(tmp_path))


def first_rank_alone(folder):
    ll.distributed.watch(seconds=5)
    with warnings.catch_warnings(), ll.distributed.setup(timeout=20):
        warnings.simplefilter("error")  # nothing waits
        rank = ll.distributed.rank()
        step, eval_step, predict_step, state = parts(norm=True)
        data = torch.randn(9, 2)
        loader = ll.make_loader(data, batch_size=4, order=ll.data.sequential())
        ckpt = ll.checkpoint_io(folder, keep_best=1, monitor="eval/loss")
        ckpt.save(state, {"eval/loss": 1.0})
        expected = ll.evaluate(eval_step, state, loader)
        validate = ll.distributed.rank_zero_only(lambda: ll.evaluate(eval_step, state, loader))
        if rank == 0:
            assert ckpt.latest().step == ckpt.best().step == len(ckpt.steps()) - 1 == 0
            for batches in (loader, list(data.split(3)), iter(data.split(2))):
                found = ll.evaluate(eval_step, state, batches, divide=False)
                assert found == pytest.approx(expected, rel=1e-6)
            outputs = torch.cat(list(ll.predict(predict_step, state, loader, divide=False)))
            assert outputs.shape == (9, 2)
        assert validate() == (pytest.approx(expected, rel=1e-6) if rank == 0 else None)
        ll.distributed.rank_zero_only(ckpt.save)(state.replace(step=state.step + 1), {"eval/loss": 2.0})
        for _ in range(2):  # DDP sends buffers again
            state, _ = step(state, data[rank::2])
        assert ll.evaluate(eval_step, state, loader).keys() == expected.keys()
        mean = ll.compute(
            ll.distributed.reduce(ll.evaluation.evaluate_records(eval_step, state, [data[rank::2]], divide=False))
        )
        assert mean.keys() == expected.keys()
        # One thread is alone, whichever it is, and not one that it starts.
        ranks = ll.distributed.world_size
        sizes = ll.distributed.rank_zero_only(lambda: (ranks(), in_thread(ranks)))
        assert sizes() == in_thread(sizes) == ((1, 2) if rank == 0 else None)
        assert ranks() == 2


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_reading_a_folder_and_a_validation_need_no_other_rank(tmp_path):
    launch(2, first_rank_alone, str(tmp_path))
