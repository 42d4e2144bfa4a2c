"""Times and memory, compared with a clock that the test moves. Reading them changes nothing."""

import copy
import gc
import itertools
import sys
import time

import pytest
import torch
from problem import adamw
from ranks import launch
from shared import assert_each_refused, bits, both_steps
from shared import mean_square as loss_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import looplib as ll
from looplib.log import memory, step_timer

PARTS = ["data_seconds", "forward_seconds", "gradients_seconds", "update_seconds", "rest_seconds"]


def net(*sizes):
    torch.manual_seed(0)
    layers = [nn.Linear(i, o, bias=False) for i, o in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def batches(count=4, size=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 2, generator=generator) for _ in range(count)]


def train(state, train_step, given):
    for x in given:
        state, _ = train_step(state, x)
    return state


def metered(cost, model, donate=False, pieces=None, inside=False):
    grad_fn, optimizer = ll.make_grad_fn(model, cost.loss_fn(loss_fn)), cost.optimizer(adamw())
    grad_fn = cost.grad_fn(grad_fn) if inside else grad_fn
    grad_fn = ll.accumulate(grad_fn, pieces) if pieces else grad_fn
    grad_fn = grad_fn if inside else cost.grad_fn(grad_fn)
    return ll.init_state(model, optimizer), ll.make_train_step(grad_fn, optimizer, donate=donate)


class Clock:
    """Stands for the step timer's clock: time passes where the test says so, however busy the machine is."""

    now = 0.0

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    return clock


def slowly(things, seconds, clock):
    for thing in things:
        clock.sleep(seconds)
        yield thing


def test_time_is_found_where_it_was_spent(clock):
    seconds = dict(zip(PARTS, (0.03, 0.02, 0.04, 0.05, 0.06), strict=True))
    cost, model = step_timer(device="cpu"), net(2, 3, 1)

    def slow_loss(model, x):
        clock.sleep(seconds["forward_seconds"])
        return loss_fn(model, x)

    def slow_gradients(state, batch, **request):
        clock.sleep(seconds["gradients_seconds"])
        return grad_fn(state, batch, **request)

    def transform(grads, state, params, step):
        clock.sleep(seconds["update_seconds"] / 4)
        return ll.types.Transformed(grads)

    def update_(grads, state, params, step):
        clock.sleep(seconds["update_seconds"] * 3 / 4)
        return params, state

    # Both halves of all parts are the update, which is counted once.
    slow = ll.optim.part("slow", transform=transform, update_=update_)
    optimizer = cost.optimizer(ll.chain(slow, adamw()))
    grad_fn = ll.make_grad_fn(model, cost.loss_fn(slow_loss))
    train_step = ll.make_train_step(cost.grad_fn(slow_gradients), optimizer)
    state = ll.init_state(model, optimizer)
    for x in cost.data(slowly(batches(5), seconds["data_seconds"], clock)):
        state, _ = train_step(state, x)
        clock.sleep(seconds["rest_seconds"])
    expected = {"step_seconds": 0.2, **seconds, "samples_per_second": 4 / 0.2}
    assert cost.read() == pytest.approx(expected)
    assert cost.read() == {}
    clock.sleep(1)  # which is before the next window
    assert cost.read() == {}
    for _ in cost.data(slowly(batches(5), 0.5, clock)):
        pass
    costs = cost.read("costs/")
    assert (costs["costs/data_seconds"], costs["costs/rest_seconds"]) == (pytest.approx(0.5), pytest.approx(0))


@both_steps
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("pieces", [None, 2])
def test_a_meter_changes_no_bits_and_no_state(pieces, inside, donate):
    given, model = batches(), net(2, 3, 1)
    plain_fn = ll.make_grad_fn(own := copy.deepcopy(model), loss_fn)
    plain = ll.make_train_step(ll.accumulate(plain_fn, pieces) if pieces else plain_fn, adamw())
    expected = train(ll.init_state(own, adamw()), plain, given)
    cost = step_timer(device="cpu", tokens=torch.numel)
    state, train_step = metered(cost, model, donate, pieces, inside)
    assert bits(train(state, train_step, cost.data(given))) == bits(expected)
    costs = cost.read()
    assert costs["tokens_per_second"] == pytest.approx(2 * costs["samples_per_second"])
    assert costs["samples_per_second"] == pytest.approx(4 / costs["step_seconds"])


def test_steps_are_updates_or_else_gradients_or_else_batches(clock):
    given, model = batches(6), net(2, 1)
    for wrapped, steps in (("all", 3), ("gradients", 6), ("data", 6)):
        cost = step_timer(device="cpu")
        grad_fn, optimizer = ll.make_grad_fn(model, loss_fn), adamw()
        state = ll.init_state(model, optimizer)
        grad_fn = grad_fn if wrapped == "data" else cost.grad_fn(grad_fn)
        update = (cost.optimizer(optimizer) if wrapped == "all" else optimizer).update
        for index, x in enumerate(cost.data(given)):
            out = grad_fn(state, x)
            if index % 2:  # an update for every two gradients
                update(out.grads, state.opt_state, state.params, state.step)
            clock.sleep(0.002)
        costs = cost.read()
        assert costs["step_seconds"] == pytest.approx(0.012 / steps)
        assert ("samples_per_second" in costs) == (wrapped != "data")


def test_a_tensor_of_tokens_is_read_only_with_the_costs():
    class Unread(torch.Tensor):
        read = False

        def __float__(self):
            Unread.read = True
            return 10.0

    cost = step_timer(device="cpu", tokens=lambda x: torch.tensor(5).as_subclass(Unread))
    state, train_step = metered(cost, net(2, 1))
    train(state, train_step, batches(2))
    assert not Unread.read
    costs = cost.read()
    assert costs["tokens_per_second"] == pytest.approx(5 / costs["step_seconds"])


class Queue:
    """A device that works behind the host: an event passes when the work before it is done."""

    def __init__(self, clock):
        self.clock, self.busy_until = clock, clock.now
        self.made = self.waits = 0

    def work(self, seconds):
        self.busy_until = max(self.busy_until, self.clock.now) + seconds

    def event(self, device, *, enable_timing):
        assert enable_timing
        return QueueEvent(self)

    def synchronize(self, device):
        self.waits += 1
        self.clock.now = max(self.busy_until, self.clock.now)


class QueueEvent:
    def __init__(self, queue):
        self.queue = queue

    def record(self):
        self.at = max(self.queue.busy_until, self.queue.clock.now)

    def elapsed_time(self, end):
        assert end.at <= self.queue.clock.now
        return 1000 * (end.at - self.at)


def test_an_accelerators_own_times_are_read_without_waiting_for_it(monkeypatch, clock):
    queue = Queue(clock)
    monkeypatch.setattr(torch, "Event", queue.event)
    monkeypatch.setattr(torch.accelerator, "synchronize", queue.synchronize)

    def launches(model, x):
        queue.work(0.05)
        return loss_fn(model, x)

    cost, model = step_timer(device="cuda"), net(2, 1)
    optimizer = cost.optimizer(adamw())
    train_step = ll.make_train_step(cost.grad_fn(ll.make_grad_fn(model, launches)), optimizer)
    train(ll.init_state(model, optimizer), train_step, cost.data(slowly(batches(5), 0.005, clock)))
    assert queue.waits == 0
    costs = cost.read()
    assert queue.waits == 1
    assert costs["gradients_seconds"] >= 0.05
    # The loader's 5 ms pass while the device is at work, but for those of the first batch.
    assert costs["data_seconds"] < costs["gradients_seconds"]
    assert sum(costs[part] for part in PARTS if part in costs) == pytest.approx(costs["step_seconds"])


# Steps that run as graphs


GRAPHS = {
    "compiled": lambda step: ll.compile_step(step, backend="eager"),
    "stacked": ll.vmap_step,
    "differentiable": ll.transforms.differentiable,
}
MEMBERS = 3


def graph_step(kind, grad_fn, optimizer, model, donate=False):
    state = ll.init_state(model, optimizer)
    if kind == "stacked":
        state = ll.transforms.stack_states([ll.init_state(model, optimizer, seed=seed) for seed in range(MEMBERS)])
    return state, GRAPHS[kind](ll.make_train_step(grad_fn, optimizer, donate=donate))


@pytest.mark.every_case
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("part", ["grad_fn", "loss_fn", "optimizer"])
def test_a_part_of_a_graph_is_refused(part, kind):
    """Its Python runs while the step is traced, and never again."""
    cost, model = step_timer(device="cpu"), net(2, 1)
    grad_fn = ll.make_grad_fn(model, cost.loss_fn(loss_fn) if part == "loss_fn" else loss_fn)
    optimizer = cost.optimizer(adamw()) if part == "optimizer" else adamw()
    grad_fn = cost.grad_fn(grad_fn) if part == "grad_fn" else grad_fn
    state, train_step = graph_step(kind, grad_fn, optimizer, model, donate=kind == "compiled")
    with pytest.raises(ll.transforms.UntraceableError, match=r"step_timer\.train_step\(ll\.compile_step"):
        train_step(state, batches(1)[0])
    assert torch.isfinite(state.params["0.weight"]).all()  # nothing is spent
    assert cost.read() == {}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", [None, *GRAPHS])
def test_a_whole_step_is_timed_and_its_operations_are_counted(kind, clock):
    members, sizes = MEMBERS if kind == "stacked" else 1, [4, 4, 6, 4, 6]
    compiling = 0 if kind is None else 100

    def slow_to_compile(function):  # the first batch of each size
        new = {*sizes}

        def step(state, batch):
            clock.sleep(compiling if len(batch) in new else 0)
            new.discard(len(batch))
            return function(state, batch)

        return step

    flops = lambda x: 1000 * len(x)  # noqa: E731
    cost = step_timer(device="cpu", tokens=torch.numel, flops=flops, peak=1e6)
    model = net(2, 1)
    optimizer, grad_fn = adamw(), ll.make_grad_fn(model, loss_fn)
    if kind is None:
        state, train_step = ll.init_state(model, optimizer), ll.make_train_step(grad_fn, optimizer)
    else:
        state, train_step = graph_step(kind, grad_fn, optimizer, model)
    if kind != "stacked":  # which is compiled as the others are, and has no function around it
        timed = cost.train_step(slow_to_compile(train_step))
    else:
        timed, compiling = cost.train_step(train_step), 0
    for x in cost.data(slowly([torch.ones(size, 2) for size in sizes], 0.5, clock)):
        expected, _ = train_step(state, x) if kind is None else (None, None)
        state, _ = timed(state, x)
        assert expected is None or bits(state) == bits(expected)
        clock.sleep(0.25)
    # The first call is left out, and the graph for batches of another size is a part of the time.
    elapsed = 4 * (0.5 + 0.25) + 0.25 + compiling
    samples = members * sum(sizes[1:])
    assert cost.read("c/") == pytest.approx(
        {
            "c/step_seconds": elapsed / 4,
            "c/data_seconds": 0.5,
            "c/train_step_seconds": compiling / 4,
            "c/rest_seconds": 1.25 / 4,
            "c/samples_per_second": samples / elapsed,
            "c/tokens_per_second": 2 * samples / elapsed,
            "c/flops_per_second": 1000 * samples / elapsed,
            "c/mfu": 1000 * samples / elapsed / 1e6,
        }
    )
    assert cost.read() == {}


@pytest.mark.every_case
@pytest.mark.parametrize("compiled", [False, True])
def test_members_with_batches_of_their_own_are_counted_by_the_batch_of_one(compiled, clock):
    cost = step_timer(device="cpu", tokens=lambda batch: batch["x"].numel(), flops=5, peak=100)
    model, optimizer = net(2, 1), adamw()
    grad_fn = ll.make_grad_fn(model, lambda model, batch: loss_fn(model, batch["x"]))
    train_step = ll.vmap_step(ll.make_train_step(grad_fn, optimizer), own_batches=True)
    train_step = cost.train_step(GRAPHS["compiled"](train_step) if compiled else train_step)
    stack = ll.transforms.stack_states([ll.init_state(model, optimizer, seed=seed) for seed in range(MEMBERS)])
    for _ in range(3):
        stack, _ = train_step(stack, {"x": torch.ones(MEMBERS, 4, 2)})
        clock.sleep(1)
    costs = cost.read()  # of 2 steps in 3 seconds: the first second begins after the first step
    assert costs["samples_per_second"] == pytest.approx(2 * MEMBERS * 4 / 3)
    assert costs["tokens_per_second"] == pytest.approx(2 * MEMBERS * 8 / 3)
    assert costs["mfu"] == pytest.approx(2 * MEMBERS * 5 / 3 / 100)


def test_a_whole_step_of_an_accelerator_is_timed_after_the_first_without_waiting(monkeypatch, clock):
    queue = Queue(clock)
    monkeypatch.setattr(torch, "Event", queue.event)
    monkeypatch.setattr(torch.accelerator, "synchronize", queue.synchronize)
    cost, model = step_timer(device="cuda", flops=10, peak=1000), net(2, 1)
    train_step = ll.compile_step(ll.make_train_step(ll.make_grad_fn(model, loss_fn), adamw()), backend="eager")

    def launches(state, batch):
        queue.work(0.05 if state.step else 7)
        return train_step(state, batch)

    train(ll.init_state(model, adamw()), cost.train_step(launches), cost.data(slowly(batches(5), 0.005, clock)))
    assert queue.waits == 1  # for the first step, which is left out
    costs = cost.read()
    assert costs["train_step_seconds"] == pytest.approx(0.05)
    assert costs["step_seconds"] == pytest.approx((4 * 0.05 + 0.005) / 4)  # the others' batches come while it works
    assert costs["mfu"] == pytest.approx(10 / costs["step_seconds"] / 1000)


def test_without_counted_samples_there_is_no_rate_of_them(clock):
    cost, model, optimizer = step_timer(device="cpu", flops=3), net(2, 1), adamw()

    def own_step(state, batch):
        clock.sleep(1)
        return ll.apply_gradients(optimizer, state, ll.make_grad_fn(model, loss_fn)(state, batch).grads)

    train(ll.init_state(model, optimizer), cost.train_step(own_step), batches(3))
    costs = cost.read()
    assert costs["flops_per_second"] == pytest.approx(3)
    assert "samples_per_second" not in costs


@pytest.mark.slow
def test_peak_memory_sees_what_was_allocated_and_forgets_it():
    # The system counts pages by core and adds up now and then, so all bounds are loose.
    memory(reset=True)
    before = memory()["host_peak_bytes"]
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    peak = memory(reset=False)["host_peak_bytes"]
    assert peak - before > 50 * 2**20
    del block
    gc.collect()
    assert memory(reset=True, prefix="m/")["m/host_peak_bytes"] > peak - 10 * 2**20
    if sys.platform == "linux":
        assert memory()["host_peak_bytes"] < peak - 50 * 2**20
    assert ("device_peak_bytes" in memory()) == torch.accelerator.is_available()


def one_of_three_ranks_is_slow():
    with ll.distributed.setup():
        own, second = ll.distributed.rank(), 0.25
        slow = None

        def late(part, function):
            def called(*args, **named):
                time.sleep(second if (part, own) == slow else 0)
                return function(*args, **named)

            return called

        cost = step_timer(device="cpu")
        slow_part = ll.optim.part(
            "slow", update_=late("update", lambda grads, state, params, step, **_: (params, state))
        )
        model = DistributedDataParallel(net(2, 3, 1))
        grad_fn = ll.make_grad_fn(model, cost.loss_fn(late("forward", loss_fn)))
        optimizer = cost.optimizer(ll.chain(adamw(), slow_part))
        train_step = ll.make_train_step(cost.grad_fn(grad_fn), optimizer, donate=True)
        state = ll.init_state(model, optimizer)
        state = train(state, train_step, batches(1))  # in which the ranks compare their programs
        for number, part in enumerate(("data", "forward", "update", "rest")):
            slow = part, (number + 1) % 3
            ll.distributed.barrier()
            cost.read()
            for x in cost.data(map(late("data", lambda x: x), batches(3))):
                state, _ = train_step(state, x)
                late("rest", print)()
            costs = cost.read()
            found = ll.log.slowest_rank(costs)
            assert (found["slow_part"], found["slow_rank"]) == slow, (slow, costs)
            assert found["slow_seconds"] > 0.6 * second
            # The others have waited within the gradients, as long as the slow rank took.
            assert own == found["slow_rank"] or costs["gradients_seconds"] > 0.5 * second
        with pytest.raises(ValueError, match=r"same names on all ranks.*\['data'\], \[\], \['data'\]"):
            ll.log.slowest_rank({} if own == 1 else {"data_seconds": 1.0})


@pytest.mark.slow
def test_the_slow_rank_and_its_part_are_named():
    launch(3, one_of_three_ranks_is_slow)


def test_what_cannot_be_metered_is_refused():
    model = net(2, 1)
    state, timed = ll.init_state(model), step_timer().grad_fn(ll.contrib.sam(ll.make_grad_fn(model, loss_fn), 0.1))
    plain = ll.make_train_step(ll.make_grad_fn(model, loss_fn), adamw())
    both, whole = step_timer(), step_timer()
    both.grad_fn(ll.make_grad_fn(model, loss_fn))
    whole.train_step(plain)
    stack = ll.transforms.stack_states([ll.init_state(model, adamw(), seed=seed) for seed in range(2)])
    stacked = ll.vmap_step(plain)
    assert_each_refused(
        (lambda: step_timer().data(lambda state: []), TypeError, r"function.*step_timer.data\(loader\(state\)\)"),
        (lambda: step_timer().grad_fn(nn.Linear(1, 1)), TypeError, "step_timer.grad_fn.*Linear"),
        (lambda: step_timer().loss_fn(adamw()), TypeError, "step_timer.loss_fn got an Optimizer"),
        (lambda: ll.log.slowest_rank({"train/data_seconds": 1.0}), ValueError, r"without a prefix.*\[\]"),
        (lambda: step_timer().optimizer(nn.Linear(1, 1)), TypeError, "step_timer.optimizer.*Linear.*ll.optimizer"),
        (lambda: ll.accumulate(timed, 2)(state, batches()[0]), ValueError, "sam within accumulate"),
        (lambda: step_timer().train_step(timed), TypeError, "step_timer.train_step got the grad_fn of"),
        (
            lambda: ll.compile_step(step_timer().train_step(plain)),
            TypeError,
            "compile_step got a function.*around the result",
        ),
        (lambda: both.train_step(plain), ValueError, r"step_timer\.train_step.*step_timer\.grad_fn.*count twice"),
        (lambda: whole.optimizer(adamw()), ValueError, r"step_timer\.train_step.*step_timer\.optimizer.*count twice"),
        (lambda: step_timer().train_step(lambda *a: stacked(*a))(stack, batches()[0]), ValueError, "directly around"),
        (
            lambda: step_timer().train_step(plain)((state, state), batches()[0]),
            TypeError,
            "state is a tuple.*step_timer.train_step",
        ),
    )
