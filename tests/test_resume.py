"""A run that is stopped, killed and started again ends with the bits of one that never was."""

import functools
import itertools
import os
import random
import re
import signal
import tempfile
import time
import traceback
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import schedulefree
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import launch
from shared import examples
from torch import nn

import looplib as ll

LENGTH = 6  # batches of an epoch, the last of them not full
OTHER_SEED = ".*was saved with other settings: seed was"  # `begin` gives another one, which is not to matter
pytestmark = pytest.mark.filterwarnings(f"ignore:{OTHER_SEED.replace(':', '.')}")


class Augmented(torch.utils.data.Dataset):
    """Samples with new draws from all three global streams each time they are read."""

    def __init__(self, poisoned=False):
        self.poisoned = poisoned

    def __len__(self):
        return 22

    def __getitem__(self, i):
        x = torch.randn(6) + torch.tensor([i % 3, i % 5, i % 7, 0, 1, np.random.rand() + random.random()])  # noqa: NPY002
        return i, x * torch.inf if self.poisoned and i in (3, 4, 17) else x, i % 3


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        source = Augmented()
        return (source[i] for i in range(22))


FAMILIES = {
    "momentum": lambda: ll.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(0.01, warmup=3, total=3000)),
    "adagrad": lambda: ll.optimizer(torch.optim.Adagrad, lr=0.05),
    "schedule-free": lambda: ll.optimizer(schedulefree.AdamWScheduleFree, lr=0.01, warmup_steps=4),
    "skip_nonfinite": lambda: ll.chain(ll.skip_nonfinite(max_consecutive=3), ll.optimizer(torch.optim.Adam, lr=0.01)),
    "ema": lambda: ll.chain(
        ll.optimizer(torch.optim.RMSprop, lr=0.01), ll.ema(ll.optim.ema_warmup(0.9), buffers=True)
    ),
    "swa": lambda: ll.chain(ll.optimizer(torch.optim.NAdam, lr=0.01), ll.optim.swa(start=4, every=2)),
    "skips": lambda: ll.chain(
        ll.optim.dynamic_loss_scale(growth_interval=4), ll.optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
    ),
    "every": lambda: ll.optim.own_steps(
        ll.optim.every(ll.optimizer(torch.optim.Adam, lr=ll.warmup_cosine(0.01, warmup=3, total=3000)), 4)
    ),
    "groups": lambda: ll.optim.partition(
        {"a": ll.optimizer(torch.optim.Adamax, lr=0.01), "b": ll.optimizer(torch.optim.Rprop, lr=0.01)},
        lambda name, tensor: "a" if tensor.ndim == 2 else "b",
    ),
}
values = itertools.count(1)  # each start has other values in its model: all must come from the checkpoint


def begin(family, *, donate=False, bound=False, workers=0, stream=False, first=False):
    """Setup of a script before it trains. None of it may matter to a resumed run."""
    torch.manual_seed(0 if first else next(values))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = ll.chain(ll.clip_by_global_norm(1.0), FAMILIES[family]())
    grad_fn = ll.make_grad_fn(model, lambda model, batch: nn.functional.cross_entropy(model(batch[1]), batch[2]))
    if family in ("ema", "skips"):
        grad_fn = ll.accumulate(grad_fn, size=2)
    step = ll.make_train_step(grad_fn, optimizer, donate=donate)
    dataset = Stream() if stream else Augmented(poisoned=family in ("skip_nonfinite", "skips"))
    loader = ll.make_loader(dataset, batch_size=4, seed=3, num_workers=workers)
    state = ll.init_state(model, optimizer, seed=7 if first else 0, loader=loader, extra={"seen": 0, "note": None})
    return (state if bound else ll.copy_state(state)), step, loader


def position(state):
    return state.epoch * LENGTH + state.batch


def checksum(tensors):
    return [zlib.crc32(bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist())) for t in tensors]


def train(state, step, loader, until, log, after=lambda state: None):
    """Up to a number of batches; what was seen in each goes into the log."""
    while position(state) < until:
        for batch in loader(state):
            state, metrics = step(state, batch)
            state = state.replace(
                extra={"seen": state.extra["seen"] + len(batch[0]), "note": f"at {position(state)}"}
            )
            loss = ll.compute(metrics)["loss"].hex()
            line = (
                f"{batch[0].tolist()} {checksum([batch[1]])} {loss} {checksum(state.params.values())} {state.skipped}"
            )
            log(position(state), line)
            if state.epoch_length is None and state.batch == LENGTH:
                state = ll.state.end_epoch(state)
            after(state)
            if position(state) >= until:
                break
    return state


@functools.cache
def uninterrupted(family, until, stream=False):
    log = {}
    state = train(*begin(family, stream=stream, first=True), until, log.__setitem__)
    return state, log


modes = st.fixed_dictionaries({"donate": st.booleans(), "bound": st.booleans(), "asynchronous": st.booleans()})
plain = {"donate": False, "bound": False, "asynchronous": False}
other = {"donate": True, "bound": True, "asynchronous": True}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(12), deadline=None)
@given(
    stops=st.lists(st.integers(1, 16), min_size=1, max_size=3, unique=True).map(sorted),
    lives=st.lists(modes, min_size=4),
)
@example(stops=[4], lives=[plain] * 4)  # in the middle of an epoch
@example(stops=[6], lives=[other] * 4)  # at its end
@example(stops=[8, 9], lives=[plain, other, plain, other])  # twice over
def test_resumed_is_uninterrupted_to_the_bit(family, stops, lives):
    log = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, stop in enumerate([*stops, 17]):
            mode = dict(lives[number])
            ckpt = ll.checkpoint_io(folder, asynchronous=mode.pop("asynchronous"))
            state, *rest = begin(family, first=not number, **mode)
            state = train(ckpt.restore(state), *rest, stop, log.__setitem__)
            if stop < 17:
                ckpt.save(state)
                ckpt.wait()
    expected, expected_log = uninterrupted(family, 17)
    assert not ll.debug.differences(state, expected)
    assert log == expected_log
    if family == "skip_nonfinite":
        assert state.opt_state["skip_nonfinite"]["total_notfinite"] == position(state) - state.step > 2
    if family == "skips":
        assert position(state) - state.step > 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # on a machine of two cores
@pytest.mark.parametrize("options", [{"workers": [3, 0, 3]}, {"workers": [3, 0, 3]} | other, {"stream": True}])
def test_with_workers_or_over_a_stream(tmp_path, options):
    """With workers: three of them, then none, then three again."""
    log, stream = {}, "stream" in options
    mode = {name: value for name, value in options.items() if name not in ("workers", "asynchronous")}
    ckpt = ll.checkpoint_io(tmp_path, asynchronous=options.get("asynchronous", False))
    for number, (stop, workers) in enumerate(zip((4, 6, 10), options.get("workers", [0] * 3), strict=True)):
        state, *rest = begin("adamw", first=not number, workers=workers, **mode)
        state = train(ckpt.restore(state), *rest, stop, log.__setitem__)
        ckpt.save(state)
    expected, expected_log = uninterrupted("adamw", 10, stream)
    assert not ll.debug.differences(state, expected)
    assert log == expected_log


# Processes


def life(folder, until, *, family="adamw", asynchronous=False, first=False, every=True, **mode):
    """A process that trains: it starts where the last one ended, saves at every batch or the last, and may be killed."""
    ckpt = ll.checkpoint_io(folder, keep_last=2, keep=lambda c: c.step % 50 == 0, asynchronous=asynchronous)
    state, *rest = begin(family, first=first or ckpt.latest() is None, **mode)
    Path(folder).mkdir(exist_ok=True)
    file = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    state, save = ckpt.restore(state, quiet=True), ckpt.save if every else lambda state: None
    state = train(state, *rest, until, lambda at, line: os.write(file, f"{at} {line}\n".encode()), save)
    if not every:
        ckpt.save(state)
    ckpt.wait()


def lines_in(folder):
    log = Path(folder) / "log"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def strict(function, *arguments):
    """In another process, where each warning that is not expected is an error."""
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", OTHER_SEED)
    function(*arguments)


def check(folder, until, family="adamw"):
    """The last checkpoint and each line that any of the processes logged are those of an uninterrupted run."""
    state, log = uninterrupted(family, until)
    ckpt = ll.checkpoint_io(folder)
    assert not ll.debug.differences(ckpt.restore(begin(family)[0], quiet=True), state)
    lines = (Path(folder) / "log").read_text().splitlines()
    assert set(lines) == {f"{at} {line}" for at, line in log.items()}


def lives(folder, until, first):
    """Take a run of each kind some batches further, every second one donated and saved in threads."""
    for number, family in enumerate(FAMILIES):
        late = bool(number % 2)
        mode = {"asynchronous": late, "donate": late, "bound": late}
        life(Path(folder) / family, until, family=family, first=first, every=False, **mode)


@pytest.mark.slow
def test_each_kind_of_run_continues_in_another_process(tmp_path):
    lives(tmp_path, 4, True)  # in the middle of an epoch, and of the next one
    launch(0, strict, lives, str(tmp_path), 9, False)
    for family in FAMILIES:
        check(tmp_path / family, 9, family)


def kill_again_and_again(folder, kills, seed):
    """Fork lives from this process, which has everything imported, and kill each at a random moment."""
    uninterrupted("adamw", 1)  # all that torch imports late is there for the forks
    draw = random.Random(seed)
    inside, reached = 0, []

    def start(until):
        mode = {name: draw.random() < 0.5 for name in ("donate", "bound", "asynchronous")}
        if pid := os.fork():
            return pid
        try:
            life(folder, until, **mode)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    for number in range(kills):
        more = lines_in(folder) + (0, 1, 3)[number % 3]  # so that some come far, on a slow machine too
        pid = start(10**9)
        while lines_in(folder) < more:
            time.sleep(0.001)
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "a life ended by itself: what it said is above"
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status), "a life ended by itself: what it said is above"
        inside += any(path.name.startswith((".writing-", ".deleting-")) for path in Path(folder).iterdir())
        latest = ll.checkpoint_io(folder).latest()
        reached.append(latest.epoch * LENGTH + latest.batch if latest else 0)
    assert reached == sorted(reached)
    until = reached[-1] + 5
    assert os.waitpid(start(until), 0)[1] == 0
    check(folder, until)
    print(f"{kills} kills, {inside} of them inside a save, {len(set(reached))} places, {until} batches")


@pytest.mark.parametrize("kills", [10, pytest.param(400, marks=pytest.mark.large)])
def test_killed_at_any_moment_and_started_again(tmp_path, kills):
    out = launch(0, strict, kill_again_and_again, str(tmp_path), kills, random.randrange(10**6))
    print(out)
    assert re.fullmatch(r"\d+ kills, .* batches\n", out)  # and no error or warning
    found = [int(word) for word in out.split() if word.isdigit()]
    assert found[0] == kills
    assert found[1] >= kills // 15
    assert found[2] >= kills // 5
