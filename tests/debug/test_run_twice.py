"""Steps that run twice: flipped bits are found in their step, by leaf and rank, and nothing else is."""

import random
import signal
import time
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
import torch
from ranks import in_engine, launch
from torch import nn

import looplib as ll

STEPS = 2
LARGE = pytest.mark.large


def four_layers():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))


def one_layer():
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 3))


def make_run(donate, engine=None, every=1, checksums=True, seed=0, layers=four_layers):
    """A step with dropout, BatchNorm, accumulation and clipping, in which a `Strike` flips one bit."""
    torch.manual_seed(1)
    model = in_engine(layers(), engine)
    adamw = ll.optimizer(torch.optim.AdamW, lr=0.01)
    parts = [ll.debug.checksums()] if checksums else []
    optimizer = ll.chain(*parts, ll.clip_by_global_norm(1.0), adamw)
    grad_fn = ll.make_grad_fn(model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    grad_fn = ll.accumulate(grad_fn, 2)
    if ll.distributed.world_size() > 1 and engine is None:
        grad_fn = ll.grads.reduce_gradients(grad_fn)
    strike = Strike(grad_fn, donate)
    strike.step = ll.make_train_step(strike.grad_fn, optimizer, donate=donate)
    train_step = ll.debug.run_twice(strike.train_step, every=every)
    generator = torch.Generator().manual_seed(2 * seed + ll.distributed.rank())
    batches = [(torch.randn(6, 4, generator=generator), torch.arange(6) % 3) for _ in range(STEPS)]
    start = ll.init_state(model, optimizer, seed=seed)
    for batch in batches:  # the moments of a first step are zeros
        start, _ = train_step(start, batch)
    strike.calls.clear()
    return model, train_step, ll.copy_state(start), batches, strike


class Strike:
    """Flips one bit of a tensor in one pass of a step, and counts the passes of each step."""

    def __init__(self, grad_fn, donate):
        self.inner, self.donate, self.calls, self.at = grad_fn, donate, Counter(), None

    def aim(self, step, number, where, name, bit):
        """Before pass `number` (0 or 1) of a step, or in its gradients, flip this bit of the tensor."""
        self.at, self.where, self.name, self.bit = (step, number), where, name, bit

    def train_step(self, state, batch):
        if self.at == (state.step, self.calls[state.step]) and self.where != "grads":
            state = state if self.donate else ll.copy_state(state)
            trees = {"params": state.params, "buffers": state.buffers}
            trees["exp_avg"], trees["exp_avg_sq"] = (
                {name: state.opt_state["AdamW"]["state"][name][kind] for name in state.params}
                for kind in ("exp_avg", "exp_avg_sq")
            )
            flip(trees[self.where][self.name], self.bit)
        return self.step(state, batch)

    def grad_fn(self, state, batch, **request):
        out = self.inner(state, batch, **request)
        if self.at == (state.step, self.calls[state.step]) and self.where == "grads":
            flip(out.grads[self.name], self.bit)
        self.calls[state.step] += 1
        return out


def flip(tensor, bit):
    """Flip one bit of the numbers of a tensor, in place."""
    numbers = getattr(tensor, "_local_tensor", tensor).detach().view(-1)  # of FSDP2, this rank's shard
    bits = numbers.view(torch.int32 if numbers.dtype == torch.float32 else torch.int64)
    width = 8 * bits.element_size()
    with torch.no_grad():
        bits[bit // width % len(bits)] ^= torch.tensor(1).to(bits.dtype) << (bit % width)


def train(train_step, state, batches):
    for batch in batches:
        state, _ = train_step(state, batch)
    return state


def outcome(train_step, state, batches):
    """The last state, or the error that a checked step has raised."""
    try:
        return train(train_step, state, batches), None
    except ll.debug.CorruptionError as error:
        return None, error


def targets(state, count, seed):
    """Places of flips, at random."""
    chance = random.Random(seed)
    for number in range(count):
        where = ("params", "exp_avg", "exp_avg_sq", "grads", "buffers")[number % 5]
        floats = [name for name, tensor in state.buffers.items() if tensor.is_floating_point()]
        name = chance.choice(floats if where == "buffers" else [*state.params])
        bit = chance.randrange(32 * 24)
        yield state.step + chance.randrange(STEPS), chance.randrange(2), where, name, bit


def path_of(where, name):
    """The leaf in which the flip is found first."""
    return {
        "params": f"/opt_state/checksums/params/{name}",
        "grads": f"/opt_state/checksums/grads/{name}",
        "buffers": f"/buffers/{name}",
    }.get(where, f"/opt_state/AdamW/state/{name}/{where}")


def raw_bits(state):
    """All numbers of a state but the checksums, by numpy."""
    moments = [tensor for moments in state.opt_state["AdamW"]["state"].values() for tensor in moments.values()]
    return [
        tensor.detach().numpy().tobytes() for tensor in (*state.params.values(), *state.buffers.values(), *moments)
    ]


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=LARGE)])
@pytest.mark.parametrize("donate", [False, True])
def test_every_flipped_bit_is_found_in_its_step_and_leaf(donate, count):
    _, train_step, start, batches, strike = make_run(donate)
    clean, found = train(train_step, ll.copy_state(start), batches), Counter()
    for step, number, where, name, bit in targets(start, count, seed=donate):
        strike.calls.clear()
        strike.aim(step, number, where, name, bit)
        after, error = outcome(train_step, ll.copy_state(start), batches)
        if error is None:  # the rounding of an average took it away: nothing is corrupt
            assert where not in ("params", "grads")
            assert raw_bits(after) == raw_bits(clean)
            found["rounded away"] += 1
            continue
        assert error.step == step
        [(rank, leaves)] = error.leaves.items()
        assert rank == 0
        assert path_of(where, name) in {leaf.path for leaf in leaves}
        assert path_of(where, name) in str(error)
        if where in ("params", "grads"):  # the leaf where it began comes first
            assert leaves[0].path == path_of(where, name)
        elif where != "buffers":  # a moment changes itself and its parameter, and nothing else
            assert {leaf.path for leaf in leaves} <= {path_of(where, name), f"/params/{name}"}
        found[where] += 1
    print(found)
    assert found["params"] + found["grads"] == count * 2 / 5
    assert found["rounded away"] <= max(1, count // 50)


@pytest.mark.parametrize("donate", [False, True])
def test_the_step_is_that_without_the_check_and_a_checked_one_makes_two_passes(donate):
    _, train_step, start, batches, strike = make_run(donate, every=2)
    state = train(train_step, ll.copy_state(start), batches * 2)
    assert strike.calls == {step: 2 - step % 2 for step in range(start.step, start.step + 2 * STEPS)}
    plain = train(strike.step, ll.copy_state(start), batches * 2)
    assert not ll.debug.differences(state, plain)


def test_a_flip_at_rest_is_in_both_runs_and_not_found():
    _, train_step, start, batches, _ = make_run(True)
    flip(start.params["3.weight"], 22)
    assert train(train_step, start, batches).step == 2 * STEPS


def test_a_pure_state_can_be_used_after_an_error():
    _, train_step, start, batches, strike = make_run(False)
    strike.aim(start.step, 1, "grads", "0.bias", 30)
    before = raw_bits(start)
    with pytest.raises(ll.debug.CorruptionError, match="step 2 gave different bits"):
        train_step(start, batches[0])
    assert raw_bits(start) == before
    strike.at = None
    assert train_step(start, batches[0])[0].step == start.step + 1


class Interrupted(nn.Module):
    """Gets Ctrl-C in one of its passes, and counts its calls in a buffer of its own."""

    def __init__(self, at):
        super().__init__()
        self.linear, self.passes, self.at = nn.Linear(4, 4), 0, at
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.passes += 1
        self.calls = self.calls + 1
        if self.passes == self.at:
            signal.raise_signal(signal.SIGINT)
        return self.linear(x)


@pytest.mark.every_case
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("at", [3, 4, 5, 6])
def test_ctrl_c_in_either_pass_leaves_a_state_that_can_be_saved_and_continues(tmp_path, donate, at):
    optimizer = ll.chain(ll.optimizer(torch.optim.AdamW, lr=0.1), ll.ema(0.9))
    batches = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(0))

    def made(at):
        torch.manual_seed(0)
        model = Interrupted(at)
        grad_fn = ll.make_grad_fn(model, lambda model, x: (model(x) - x).square().mean())
        return ll.make_train_step(grad_fn, optimizer, donate=donate), ll.init_state(model, optimizer), model

    plain_step, state, _ = made(at=0)
    plain = [ll.copy_state(state)] + [ll.copy_state(state := plain_step(state, x)[0]) for x in batches]
    inner, state, model = made(at)
    step, ckpt = ll.debug.run_twice(inner, every=1), ll.checkpoint_io(tmp_path)
    with suppress(KeyboardInterrupt):
        for x in batches:
            state, _ = step(state, x)
            if model.passes >= at:
                time.sleep(60)  # the signal comes some milliseconds after the step
    assert state.step == (at + 1) // 2  # at the end of that step
    assert not ll.debug.differences(state, plain[state.step])
    ckpt.save(state)
    assert not ll.debug.differences(ckpt.restore(ll.copy_state(state)), plain[state.step])
    for x in batches[state.step :]:
        state, _ = step(state, x)
    assert not ll.debug.differences(state, plain[-1])


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("number", [0, 1])
def test_a_flip_in_what_the_members_of_a_stack_share_is_found(donate, number):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3))
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    inner, runs = ll.vmap_step(ll.make_train_step(grad_fn, optimizer, donate=donate)), Counter()

    def struck(state, batch):
        if (state.step, runs[state.step]) == (1, number):
            flip(state.params["0.weight"][0], 20)
        runs[state.step] += 1
        return inner(state, batch)

    members = [ll.init_state(model, optimizer, seed=seed) for seed in range(3)]
    state, step = ll.transforms.stack_states(members), ll.debug.run_twice(struck, every=1)
    state, _ = step(state, torch.ones(5, 4))
    with pytest.raises(ll.debug.CorruptionError, match=r"/params/0\.weight: 3 of 48 numbers"):
        step(state, torch.ones(5, 4))


def test_without_checksums_a_gradient_whose_flip_is_rounded_away_leaves_the_same_bits():
    _, train_step, start, batches, strike = make_run(False, checksums=False)
    clean, found = train(train_step, start, batches), 0
    for bit in range(12):
        strike.calls.clear()
        strike.aim(start.step, 0, "grads", "0.weight", bit)
        after, error = outcome(train_step, start, batches)
        assert error is not None or raw_bits(after) == raw_bits(clean)
        found += error is not None
    assert found > 0


def on_ranks(engine, count, quiet_steps, seed):
    with ll.distributed.setup():
        model, train_step, start, batches, strike = make_run(
            engine is not None, engine, checksums=engine != "fsdp", seed=seed
        )
        rank = ll.distributed.rank()

        def begin():
            strike.calls.clear()
            return ll.bind(model, start) if engine else start

        state = begin()
        for number in range(quiet_steps):
            state, _ = train_step(state, batches[number % STEPS])
        assert strike.calls == dict.fromkeys(range(start.step, start.step + quiet_steps), 2)
        for number, target in enumerate(targets(start, 5 * count, seed)):
            step, _, where, name, bit = target
            if where == "buffers":
                continue
            if engine == "fsdp":
                bit = 32 * (bit // 32) + 20 + bit % 8  # large enough not to be rounded away
            strike.at = None
            if rank == number % 2:
                strike.aim(*target[:4], bit)
            _, error = outcome(train_step, begin(), batches)
            if error is None:
                assert where in ("exp_avg", "exp_avg_sq"), target
                continue
            assert error.step == step
            if engine == "fsdp":
                assert any(name in leaf.path for leaf in error.leaves[number % 2])
                continue
            began = {
                rank
                for rank, leaves in error.leaves.items()
                if path_of(where, name) in {leaf.path for leaf in leaves}
            }
            assert began == {number % 2}, (target, error)
            if where != "params":
                assert {*error.leaves} == {number % 2}
        print("done")


@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("engine", "count", "quiet_steps", "times"),
    [("ddp", 2, 6, 1), (None, 4, 6, 1), ("fsdp", 2, 6, 1), pytest.param("ddp", 20, 6, 10, marks=LARGE)],
)
def test_on_two_ranks_the_rank_is_named_and_there_is_no_false_alarm(engine, count, quiet_steps, times):
    for seed in range(times):
        assert launch(2, on_ranks, engine, count, quiet_steps, seed).count("done") == 2


@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("layers", "steps"), [(four_layers, 20), pytest.param(one_layer, 10_000, marks=LARGE)], ids=["20", "10,000"]
)
@pytest.mark.parametrize("donate", [True, False])
def test_no_false_alarm(donate, layers, steps):
    _, train_step, state, batches, strike = make_run(donate, layers=layers)
    for number in range(steps):
        state, _ = train_step(state, batches[number % STEPS])
    assert list(strike.calls.values()) == [2] * steps
    assert all(np.isfinite(weight.detach().numpy()).all() for weight in state.params.values())


def a_thousand_steps(seed):
    with ll.distributed.setup():
        model, train_step, start, batches, strike = make_run(True, "ddp", seed=seed, layers=one_layer)
        state = ll.bind(model, start)
        for number in range(1000):
            state, _ = train_step(state, batches[number % STEPS])
        assert list(strike.calls.values()) == [2] * 1000
        print("quiet")


@pytest.mark.large
@pytest.mark.timeout(4000)
def test_no_false_alarm_in_10_000_steps_of_two_ranks():
    for seed in range(10):
        assert launch(2, a_thousand_steps, seed).count("quiet") == 2


def test_a_step_that_draws_from_a_generator_of_its_own_is_told():
    generator = torch.Generator().manual_seed(0)
    model, optimizer = nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: (model(x) * torch.rand(4, 1, generator=generator)).mean())
    step = ll.debug.run_twice(ll.make_train_step(grad_fn, optimizer))
    with pytest.raises(ll.debug.CorruptionError, match="assert_pure"):
        step(ll.init_state(model, optimizer), torch.ones(4, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ll.debug.run_twice(lambda state, batch: None, every=0), ValueError, "every is 0"),
        (lambda: ll.debug.run_twice(ll.ema(0.9)), TypeError, "run_twice got"),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.usefixtures("one_process")
def test_checksums_of_shards_are_refused():
    model = in_engine(nn.Linear(2, 1), "fsdp")
    with pytest.raises(ValueError, match="leave it out of the chain"):
        ll.init_state(model, ll.chain(ll.debug.checksums(), ll.optimizer(torch.optim.SGD, lr=0.1)))
