"""Training on a device against the raw loop, resumed runs, replays and stacks: on a GPU, or on a stand-in for one."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import looplib as ll

# Warnings of kernels and of Inductor differ between devices, and are none of looplib's.
pytestmark = pytest.mark.filterwarnings("default")
both_steps = pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])


class Attention(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, width), nn.LayerNorm(width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.tokens(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):  # the only one that adds up in the same order each time
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(attended.transpose(1, 2).flatten(2)))


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 11))


def convolutions():
    body = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), *body, nn.Flatten(), nn.Linear(4, 11))


def classify(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


MODELS = {"mlp": mlp, "convolutions": convolutions, "attention": Attention}
LOSS_SCALE = 2.0**10


def batches_for(kind, device, count=4, size=12):
    generator = torch.Generator().manual_seed(3)
    shape = (size, 6) if kind == "attention" else (size,)
    made = []
    for _ in range(count):
        y = torch.randint(0, 11, shape, generator=generator)
        x = y.roll(1, -1) if kind == "attention" else torch.randn(size, 8, generator=generator)
        made.append((x.to(device), y.to(device)))
    return made


def kernel_of(device):
    """AdamW's fused kernel, which the far device does not have."""
    return {"fused": False, "foreach": False} if device.type == "far" else {"fused": True}


def raw(model, batches, device, dtype, optimizer):
    """The loop as everyone writes it; returns the losses."""
    scaler = torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE) if dtype is torch.float16 else None
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype) if dtype else nullcontext():
            loss = classify(model, batch)
        losses.append(loss.detach())
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return losses


def looplib(model, batches, dtype, optimizer, donate, wrap=lambda step: step):
    loss_fn = ll.autocast(classify, dtype) if dtype else classify
    grad_fn = ll.make_grad_fn(model, loss_fn)
    if dtype is torch.float16:
        optimizer = ll.chain(ll.optim.dynamic_loss_scale(LOSS_SCALE), optimizer)
    step, state = wrap(ll.make_train_step(grad_fn, optimizer, donate=donate)), ll.init_state(model, optimizer)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].compute())
    return state, losses


@both_steps
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_eager_steps_have_the_bits_of_the_raw_loop(device, deterministic, kind, dtype, donate):
    model, batches = MODELS[kind]().to(device), batches_for(kind, device)
    other = copy.deepcopy(model)
    raw(other, batches, device, dtype, torch.optim.AdamW(other.parameters(), lr=1e-2, **kernel_of(device)))
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-2, **kernel_of(device))
    state, _ = looplib(model, batches, dtype, optimizer, donate)
    expected = other.state_dict()
    for name, tensor in {**state.params, **state.buffers}.items():
        assert torch.equal(tensor, expected[name]), name


@both_steps
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_float16_with_a_loss_scale_has_the_bits_of_the_grad_scaler(compiling_device, deterministic, kind, donate):
    device = compiling_device
    model, batches = MODELS[kind]().to(device), batches_for(kind, device)
    other = copy.deepcopy(model)
    raw(other, batches, device, torch.float16, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, fused=True))
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    state, _ = looplib(model, batches, torch.float16, optimizer, donate)
    assert state.step == len(batches)
    for name, tensor in other.named_parameters():
        assert torch.equal(state.params[name], tensor), name


COMPILED = {"default": {}, "reduce-overhead": {"mode": "reduce-overhead"}}


@both_steps
@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_compiled_steps_agree_with_the_raw_loop(compiling_device, mode, dtype, donate):
    """Inductor fuses operations and adds up in another order, so 4 steps agree to 4 digits, and to 2 in bfloat16."""
    device = compiling_device
    if donate and mode == "reduce-overhead":
        pytest.skip("a donated step is no CUDA graph")
    options = COMPILED[mode] if device.type != "cpu" else {"backend": "eager"}
    model, batches = convolutions().to(device), batches_for("convolutions", device)
    other = copy.deepcopy(model)
    losses = raw(other, batches, device, dtype, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    state, found = looplib(model, batches, dtype, optimizer, donate, lambda step: ll.compile_step(step, **options))
    tolerance = {"rtol": 3e-2, "atol": 3e-3} if dtype else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.stack(found), torch.stack(losses), check_dtype=False, **tolerance)
    torch.testing.assert_close(state.params, dict(other.named_parameters()), **tolerance)
    assert (
        torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skips
    )  # Inductor counts what it did not record


def test_cuda_graphs_run(compiling_device):
    """A step compiled for CUDA graphs launches graphs on CUDA, and gives its own results to each step."""
    device = compiling_device
    options = {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "eager"}
    model, batches, optimizer = mlp().to(device), batches_for("mlp", device), ll.optimizer(torch.optim.AdamW, lr=0.01)
    step = ll.make_train_step(ll.make_grad_fn(model, classify), optimizer)
    step, state, kept = ll.compile_step(step, **options), ll.init_state(model, optimizer), []
    for _ in range(3):
        for batch in batches:
            state, metrics = step(state, batch)
            kept.append(metrics["loss"].compute())
    with torch.profiler.profile() as profile:
        state, _ = step(state, batches[0])
    assert len({float(loss) for loss in kept}) == len(kept)
    launched = [event.name for event in profile.events() if event.name.startswith("cudaGraphLaunch")]
    assert bool(launched) == (device.type == "cuda")


@both_steps
def test_models_compiled_by_blocks_agree_with_the_raw_loop(compiling_device, donate):
    """The tolerance is that of whole compiled steps."""
    device = compiling_device
    options = {} if device.type != "cpu" else {"backend": "eager"}
    model, batches = Attention().to(device), batches_for("attention", device)
    other = copy.deepcopy(model)
    losses = raw(other, batches, device, None, torch.optim.SGD(other.parameters(), lr=0.1))
    for module in model.children():
        module.compile(**options)
    state, found = looplib(model, batches, None, ll.optimizer(torch.optim.SGD, lr=0.1), donate)
    torch.testing.assert_close(torch.stack(found), torch.stack(losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.params, dict(other.named_parameters()), rtol=1e-4, atol=1e-5)


@both_steps
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_members_of_a_stack_agree_with_their_own_runs(compiling_device, donate, compiled):
    """Batched kernels round differently from those of one member: 4 digits after 4 steps."""
    device, optimizer = compiling_device, ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    batches, models = batches_for("mlp", device), []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(mlp().to(device))
    stack = ll.transforms.stack_states([ll.init_state(model, optimizer, seed=5) for model in models], same_seeds=True)
    step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(models[0], classify), optimizer, donate=donate))
    if compiled and device.type != "cpu":
        step = ll.compile_step(step, mode=None if donate else "reduce-overhead")
    for batch in batches:
        stack, _ = step(stack, batch)
    for model, member in zip(models, ll.transforms.unstack_states(stack), strict=True):
        alone, _ = looplib(copy.deepcopy(model), batches, None, optimizer, donate=False)
        torch.testing.assert_close(member.params, alone.params, rtol=1e-4, atol=1e-5)


class Case:
    """A run with dropout and batch norm over data on the CPU, moved by the loader."""

    def __init__(self, device, donate):
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(8)
        data = torch.utils.data.TensorDataset(
            torch.randn(20, 8, generator=generator), torch.randint(0, 11, (20,), generator=generator)
        )
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 11)).to(
            device
        )
        self.optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(0.01, warmup=2, total=20))
        self.step = ll.make_train_step(ll.make_grad_fn(self.model, classify), self.optimizer, donate=donate)
        self.loader = ll.make_loader(data, batch_size=6, device=device)
        self.start = ll.init_state(self.model, self.optimizer, seed=1, loader=self.loader)

    def train(self, state, until):
        while True:
            for batch in self.loader(state):
                if state.step == until:
                    return state
                state, _ = self.step(state, batch)


def leaves(state):
    trees = state.params, state.buffers, state.opt_state
    return [leaf.detach().cpu() for leaf in torch.utils._pytree.tree_leaves(trees)]


@both_steps
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    device, deterministic, tmp_path, donate, asynchronous
):
    case = Case(device, donate)
    ckpt = ll.checkpoint_io(tmp_path, asynchronous=asynchronous)
    state = case.train(case.start, 6)
    ckpt.save(state)
    expected = case.train(state, 11)  # while the writer may still read what a pure step leaves alone
    ckpt.wait()
    again = Case(device, donate)
    resumed = ckpt.restore(again.start)
    assert resumed.step == 6
    assert {tensor.device for tensor in resumed.params.values()} == {device}
    assert all(map(torch.equal, leaves(again.train(resumed, 11)), leaves(expected)))
    near = ll.checkpoint_io(tmp_path).restore(Case(torch.device("cpu"), False).start)
    assert {leaf.device.type for leaf in near.params.values()} == {"cpu"}
