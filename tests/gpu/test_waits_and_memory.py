"""Steps on a device: nothing waits for it, nothing is pinned, and memory suffices: on a GPU, or on a stand-in for one."""

import copy
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from far.device import host_reads
from shared import classify as loss_fn
from torch import nn

import looplib as ll

pytestmark = pytest.mark.filterwarnings("default")
both_steps = pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])


@contextmanager
def waits(device):
    """The waits for the device while the block runs, as far as the device can tell."""
    if device.type == "far":
        with host_reads() as reads:
            yield reads
    elif device.type == "cuda":
        seen, before = [], torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield seen
            finally:
                torch.cuda.set_sync_debug_mode(before)
                seen += [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    else:
        yield []


def net(device, width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 4)).to(device)


def batch_on(device, size=8):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)
    return x.to(device), y.to(device)


def adamw(**options):
    return ll.optimizer(torch.optim.AdamW, lr=1e-3, **options)


FREE = {
    "plain": lambda loss_fn, model: (ll.make_grad_fn(model, loss_fn), adamw()),
    "schedule": lambda loss_fn, model: (
        ll.make_grad_fn(model, loss_fn),
        ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(1e-3, warmup=2, total=9)),
    ),
    "clipping": lambda loss_fn, model: (
        ll.make_grad_fn(model, loss_fn),
        ll.chain(ll.clip_by_global_norm(1.0), adamw()),
    ),
    "accumulation": lambda loss_fn, model: (ll.accumulate(ll.make_grad_fn(model, loss_fn), 4), adamw()),
    "average": lambda loss_fn, model: (ll.make_grad_fn(model, loss_fn), ll.chain(adamw(), ll.ema(0.9))),
    "autocast": lambda loss_fn, model: (ll.make_grad_fn(model, ll.autocast(loss_fn)), adamw()),
    "recomputation": lambda loss_fn, model: (
        ll.make_grad_fn(model, ll.losses.recompute(loss_fn, nn.Linear)),
        adamw(),
    ),
}
ONE = {
    "loss scale": lambda loss_fn, model: (
        ll.make_grad_fn(model, loss_fn),
        ll.chain(ll.optim.dynamic_loss_scale(), adamw()),
    ),
    "finite or skipped": lambda loss_fn, model: (
        ll.make_grad_fn(model, loss_fn),
        ll.chain(ll.skip_nonfinite(max_consecutive=3), adamw()),
    ),
    "both": lambda loss_fn, model: (
        ll.make_grad_fn(model, loss_fn),
        ll.chain(ll.skip_nonfinite(max_consecutive=3), ll.optim.dynamic_loss_scale(), adamw()),
    ),
}


@both_steps
@pytest.mark.parametrize("kind", [*FREE, *ONE])
def test_a_step_waits_only_to_learn_whether_to_update(device, kind, donate):
    model = net(device)
    grad_fn, optimizer = {**FREE, **ONE}[kind](loss_fn, model)
    step, state, batch = ll.make_train_step(grad_fn, optimizer, donate=donate), None, batch_on(device)
    state = ll.init_state(model, optimizer)
    for _ in range(4):
        state, _ = step(state, batch)
    for _ in range(2):
        with waits(device) as seen:
            state, _ = step(state, batch)
        assert len(seen) == (kind in ONE and device.type in ("far", "cuda")), seen


def too_much(device):
    """More bytes than there are."""
    if device.type in ("cpu", "far"):
        return 2**60
    return 2 * torch.accelerator.get_memory_info(device)[1]


def allocated(device):
    return 0 if device.type in ("cpu", "far") else torch.accelerator.memory_allocated(device)


def test_a_real_out_of_memory_is_retried_with_less_and_leaves_nothing_behind(device):
    model, seen = net(device), []

    def greedy(model, batch):
        x, y = batch
        hidden = model[0](x)
        seen.append((len(x), weakref.ref(hidden)))
        if len(x) > 4:
            torch.empty(too_much(device), dtype=torch.uint8, device=device)
        return F.cross_entropy(model[3](model[1](hidden)), y)

    optimizer = adamw()
    grad_fn = ll.make_grad_fn(model, greedy)
    steps = [ll.make_train_step(ll.accumulate(grad_fn, n), optimizer, donate=True) for n in (1, 2, 4)]

    def step(state, batch):  # the cookbook's
        while True:
            try:
                return steps[0](state, batch)
            except RuntimeError:  # on a CPU, it is not torch.OutOfMemoryError
                if len(steps) == 1:
                    raise
            del steps[0]

    plain = ll.make_train_step(ll.accumulate(grad_fn, size=4), optimizer)
    state, batch = ll.init_state(model, optimizer), batch_on(device, 16)
    expected, _ = plain(ll.copy_state(state), batch)
    seen.clear()
    before = allocated(device)
    state, _ = step(state, batch)
    assert [size for size, _ in seen] == [16, 8, 4, 4, 4, 4]
    assert [hidden() for _, hidden in seen] == [None] * 6
    assert allocated(device) - before < 2**20
    torch.testing.assert_close(state.params, expected.params)


def test_a_spent_state_and_kept_metrics_pin_nothing(device):
    model, optimizer = net(device, width=512), adamw()
    step, state = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True), None
    state, batch, kept = ll.init_state(model, optimizer), batch_on(device), []
    places = {name: tensor.data_ptr() for name, tensor in state.params.items()}
    for _ in range(3):
        kept.append(state)
        state, _ = step(state, batch)
    before = allocated(device)
    for _ in range(5):
        kept.append(state)
        state, metrics = step(state, batch)
        kept.append(metrics)
    assert {name: tensor.data_ptr() for name, tensor in state.params.items()} == places
    assert allocated(device) - before < 2**16  # the losses


@pytest.mark.parametrize("kind", ["plain", "clipping", "autocast"])
def test_a_donated_step_takes_no_more_memory_than_the_raw_loop(compiling_device, kind):
    """Peaks of the allocator, which the CPU does not have: there, both loops only have to run."""
    device = compiling_device
    width, samples = (64, 32) if device.type == "cpu" else (4096, 2048)
    model, batch = net(device, width=width), batch_on(device, samples)
    other = copy.deepcopy(model)
    raw = torch.optim.AdamW(other.parameters(), lr=1e-3, fused=True)

    def raw_step():
        raw.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=kind == "autocast"):
            loss = loss_fn(other, batch)
        loss.backward()
        if kind == "clipping":
            nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        raw.step()
        raw.zero_grad()  # looplib keeps no gradients between steps either

    grad_fn, optimizer = FREE[kind](loss_fn, model)
    step, state = ll.make_train_step(grad_fn, optimizer, donate=True), ll.init_state(model, optimizer)

    def donated_step():
        nonlocal state
        state, _ = step(state, batch)

    def peak(run):
        for _ in range(3):
            run()
        if device.type == "cpu":
            return 1
        before = allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        run()
        torch.accelerator.synchronize(device)
        return torch.accelerator.max_memory_allocated(device) - before

    assert peak(donated_step) <= 1.0 * peak(raw_step) + 2**16  # a few scalars


def moments(state, part):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state.opt_state[part]) if leaf.dim()]


@both_steps
def test_moments_on_the_host_are_pinned_and_change_no_bits(device, donate):
    batch = batch_on(device)

    def trained(optimizer):
        model = net(device)
        step = ll.make_train_step(ll.accumulate(ll.make_grad_fn(model, loss_fn), 2), optimizer, donate=donate)
        state = ll.init_state(model, optimizer)
        for _ in range(4):
            state, _ = step(state, batch)
        return state

    inner = [adamw(), ll.optim.offload_state(adamw()), ll.optim.offload_state(adamw(), buffer_bytes=1000)]
    plain, *hosted = (trained(ll.chain(ll.clip_by_global_norm(0.1), one, ll.ema(0.9))) for one in inner)
    for state in hosted:
        for kept, expected in zip(moments(state, "AdamW"), moments(plain, "AdamW"), strict=True):
            assert kept.is_cpu
            assert kept.is_pinned() == (device.type != "cpu")
            assert torch.equal(kept, expected.cpu())
        assert all(torch.equal(tensor, plain.params[name]) for name, tensor in state.params.items())


def test_moments_come_to_the_device_while_the_backward_pass_runs(device):
    """On CUDA, the backward pass is made to take about a second, and all first copies end before it does."""
    model, optimizer, late = net(device, width=512), ll.optim.offload_state(adamw()), False

    def slow(model, batch):
        loss = loss_fn(model, batch)
        if late and device.type == "cuda":
            loss.register_hook(lambda grad: torch.cuda._sleep(2 * 10**9))
        return loss

    grad_fn, state, batch = ll.make_grad_fn(model, slow), ll.init_state(model, optimizer), batch_on(device)
    step = ll.make_train_step(grad_fn, optimizer, donate=True)
    for _ in range(3):  # which allocate
        state, _ = step(state, batch)
    late = True
    grads = grad_fn(state, batch).grads
    ended = None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
    out = optimizer.transform(grads, state.opt_state, state.params, state.step)
    visits = [*out.carry["AdamW"]]
    assert sum(len(visit.moments) for visit in visits) == len(state.params)
    for visit in visits:
        if visit.loaded is not None:
            visit.loaded.synchronize()
    if device.type == "cuda":
        assert not ended.query()
    for name, row in state.opt_state["AdamW"]["state"].items():
        for key, moment in visits[0].moments[name].items():
            assert torch.equal(moment.cpu(), row[key])


@pytest.mark.slow
def test_moments_on_the_host_leave_their_memory_free(device):
    """As far as the device counts its memory: elsewhere, the steps only have to run."""
    buffer_bytes, batch, found = 2**22, torch.randn(64, 512).to(device), []
    for wrap in (lambda inner: inner, lambda inner: ll.optim.offload_state(inner, buffer_bytes=buffer_bytes)):
        empty = allocated(device)
        model, optimizer = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))).to(device), wrap(adamw())
        step = ll.make_train_step(
            ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer, donate=True
        )
        state = ll.init_state(model, optimizer)
        for _ in range(3):
            state, _ = step(state, batch)
        between = allocated(device) - empty
        if device.type not in ("cpu", "far"):
            torch.accelerator.reset_peak_memory_stats(device)
        state, _ = step(state, batch)
        peak = 0 if device.type in ("cpu", "far") else torch.accelerator.max_memory_allocated(device) - empty
        found.append((between, peak))
        size = sum(tensor.nbytes for tensor in moments(state, "AdamW"))
        del model, step, state
    if device.type not in ("cpu", "far"):
        (plain_between, plain_peak), (between, peak) = found
        assert between <= plain_between - size + 2**16
        assert peak <= plain_peak - size + buffer_bytes + 2**16
