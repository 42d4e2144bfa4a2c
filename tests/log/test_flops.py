"""FLOPs of a step beside formulas, torch's counter and other kernels; peaks beside what the chips' cores can do."""

import itertools
import math

import pytest
import torch
import transformers
from problem import adamw
from ranks import launch
from shared import bits, one_report
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

import looplib as ll
from looplib.log import count_flops, peak_flops, step_timer


def net(*sizes):
    torch.manual_seed(0)
    layers = [nn.Linear(i, o) for i, o in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def mean_square(model, x):
    return model(x).square().mean()


def of_torch(function, *args):
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


# Against formulas


def test_products_are_counted_by_the_formula():
    model = net(64, 32, 16)
    grad_fn, state, x = ll.make_grad_fn(model, mean_square), ll.init_state(model), torch.ones(10, 64)
    expected = 6 * 10 * (64 * 32 + 32 * 16) - 2 * 10 * 64 * 32  # no gradient of the data
    assert count_flops(grad_fn, state, x) == expected == of_torch(grad_fn, state, x)
    assert count_flops(ll.accumulate(grad_fn, 4), state, x) == expected
    optimizer = adamw()
    assert count_flops(ll.make_train_step(grad_fn, optimizer), ll.init_state(model, optimizer), x) == expected
    eval_step = ll.make_eval_step(model, lambda model, x: {"loss": mean_square(model, x)})
    assert count_flops(eval_step, state, x) == 2 * 10 * (64 * 32 + 32 * 16)
    assert count_flops(ll.make_grad_fn(torch.compile(model), mean_square), state, x) == expected
    conv = nn.Conv2d(3, 8, 5)
    grad_fn = ll.make_grad_fn(conv, mean_square)
    pixels = 2 * 28 * 28
    assert count_flops(grad_fn, ll.init_state(conv), torch.ones(2, 3, 32, 32)) == 2 * (2 * pixels * 3 * 25 * 8)


def gpt2(attention, **sizes):
    config = transformers.GPT2Config(
        attn_implementation=attention, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, **sizes
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    model.to_empty(device="cpu").tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model.train()


def lm_loss(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def of_nanogpt(model, tokens):
    """`estimate_mfu` of nanoGPT's model.py: its number of parameters leaves out those of the positions."""
    config, (rows, length) = model.config, tokens.shape
    parameters = sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()
    layers, heads, width = config.n_layer, config.n_head, config.n_embd // config.n_head
    return rows * length * (6 * parameters + 12 * layers * heads * width * length)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        # attention is a fifth of it
        ({"vocab_size": 300, "n_positions": 256, "n_embd": 96, "n_head": 4, "n_layer": 3}, (2, 256)),
        pytest.param({}, (1, 1024), marks=pytest.mark.slow, id="124M"),
    ],
)
def test_a_gpt2_is_within_three_percent_of_nanogpts_formula(sizes, shape):
    model, tokens = gpt2("sdpa", **sizes), torch.zeros(shape, dtype=torch.int64)
    assert sizes or sum(p.numel() for p in model.parameters()) == 124_439_808
    counted = count_flops(ll.make_grad_fn(model, lm_loss), ll.init_state(model), tokens)
    assert counted == pytest.approx(of_nanogpt(model, tokens), rel=0.03)


# Attention


@pytest.mark.slow
def test_fused_attention_counts_as_its_products_do():
    sizes = {"vocab_size": 50, "n_positions": 64, "n_embd": 32, "n_head": 4, "n_layer": 2}
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    counts = {}
    for attention in ("sdpa", "eager"):
        model = gpt2(attention, **sizes)
        grad_fn, state = ll.make_grad_fn(model, lm_loss), ll.init_state(model)
        counts[attention] = count_flops(grad_fn, state, tokens), of_torch(grad_fn, state, tokens)
    assert counts["sdpa"][0] == counts["eager"][0] == counts["eager"][1]
    assert counts["sdpa"][1] < counts["eager"][1]  # torch's counter leaves it out on a CPU


KERNELS = {
    "flash": lambda q, k, v, out: (out[0], out[1], *out[2:6], 0.0, False, *out[6:8]),
    "efficient": lambda q, k, v, out: (None, out[0], out[1], *out[2:4], 0.0, [True, True, True, False]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels_of_a_gpu_count_as_on_a_cpu(kernel):
    """Without a GPU: the kernels' own shapes, on torch's device without values."""
    q, k, v = (torch.empty(2, 4, length, 16, device="meta", dtype=torch.bfloat16) for length in (8, 24, 24))
    aten, more = torch.ops.aten, {"efficient": (None, True)}.get(kernel, ())

    def passes(state, batch):
        out = getattr(aten, f"_scaled_dot_product_{kernel}_attention")(q, k, v, *more)
        backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward")
        backward(out[0], q, k, v, *KERNELS[kernel](q, k, v, out))

    assert (
        count_flops(passes, ll.TrainState(), None) == 3 * (2 * 2 * 2 * 4 * 8 * 24 * 16) < of_torch(passes, None, None)
    )


class Blocks(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(net(16, 16, 16, 16)), reentrant

    def attend(self, layer, x):
        x = layer(x)
        return x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    def forward(self, x):
        x = x.requires_grad_()  # which the reentrant form needs
        for layer in self.layers:
            if self.reentrant is None:
                x = self.attend(layer, x)
            else:
                x = checkpoint(self.attend, layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.every_case
@pytest.mark.parametrize("reentrant", [False])
def test_what_is_recomputed_counts_once(reentrant):
    counts = []
    for kind in (None, reentrant):
        model = Blocks(kind)
        grad_fn, state, x = ll.make_grad_fn(model, mean_square), ll.init_state(model), torch.ones(2, 8, 16)
        counts.append((count_flops(grad_fn, state, x), of_torch(grad_fn, state, x)))
    assert counts[0][0] == counts[1][0]
    assert counts[0][1] < counts[1][1]  # what the device computes


def test_gradients_of_gradients_count():
    model = net(8, 8, 1)

    def penalty(model, x):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return grad.square().mean()

    grad_fn, state, x = ll.make_grad_fn(model, penalty, allow_unused=True), ll.init_state(model), torch.ones(4, 8)
    # In the first layer: the output, the gradient of x, those of this product's two factors, and of the weight by tanh'.
    # In the second one, the last of these has a gradient of its input too.
    assert count_flops(grad_fn, state, x) == 5 * (2 * 4 * 8 * 8) + 6 * (2 * 4 * 8 * 1)


def encoder(layers=2, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor="norm_first" not in options)


def of_encoder(samples, length, layers=2, width=32, hidden=64):
    """Forward pass: four projections, the two products of attention, and the two layers behind it."""
    return layers * samples * length * (8 * width**2 + 4 * length * width + 4 * width * hidden)


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_torchs_fused_layers_count_as_their_parts(options):
    """In eval mode and without gradients, torch has one kernel for a whole layer, and leaves out padding."""
    model, x = encoder(**options), torch.randn(4, 10, 32)
    state, expected = ll.init_state(model), of_encoder(4, 10)
    padding = torch.arange(10).expand(4, 10) > 6
    for batch in (x, padding):
        forward = lambda model, batch: model(x, src_key_padding_mask=None if batch is x else batch)  # noqa: E731
        assert count_flops(ll.make_predict_step(model, forward), state, batch) == expected
        eval_step = ll.make_eval_step(model, lambda model, batch: {"mean": forward(model, batch).mean()})  # noqa: B023
        assert count_flops(eval_step, state, batch) == expected
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    predict_step = ll.make_predict_step(attention, lambda model, x: model(x, x, x)[0])
    assert count_flops(predict_step, ll.init_state(attention), x) == 4 * 10 * (8 * 32**2 + 4 * 10 * 32)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_frozen_teacher_counts_once():
    student, teacher, x = encoder(), encoder(layers=3).eval().requires_grad_(False), torch.randn(4, 10, 32)

    def distill(model, x):
        with torch.no_grad():
            target = teacher(x)
        return (model(x) - target).square().mean()

    grad_fn, state = ll.make_grad_fn(student, distill), ll.init_state(student)
    of_student = 3 * of_encoder(4, 10) - 2 * 4 * 10 * 32 * (3 * 32)  # no gradient of the data
    assert count_flops(grad_fn, state, x) == of_student + of_encoder(4, 10, layers=3)


# Purity, refusals, warnings


def test_counting_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    grad_fn, state, x = ll.make_grad_fn(model, mean_square), ll.init_state(model), torch.randn(6, 4)
    expected = bits(grad_fn(state, x))
    before, module, stream = bits(state), bits(dict(model.state_dict())), torch.get_rng_state()
    count_flops(grad_fn, state, x)
    assert (bits(state), bits(dict(model.state_dict()))) == (before, module)
    assert torch.equal(torch.get_rng_state(), stream)
    assert bits(grad_fn(state, x)) == expected
    assert all(parameter.grad is None for parameter in model.parameters())


def test_refusals():
    model, x = net(4, 2), torch.ones(3, 4)
    grad_fn, optimizer = ll.make_grad_fn(model, mean_square), adamw()
    state = ll.init_state(model, optimizer)
    with pytest.raises(ValueError, match=r"donate=True.*give the gradient function"):
        count_flops(ll.make_train_step(grad_fn, optimizer, donate=True), state, x)
    with pytest.raises(ValueError, match=r"compiled step.*give the gradient function"):
        count_flops(ll.compile_step(ll.make_train_step(grad_fn, optimizer)), state, x)
    stacked = step_timer().train_step(ll.vmap_step(ll.make_train_step(grad_fn, optimizer)))
    with pytest.raises(ValueError, match=r"a compiled step or one of a stack.*give the gradient function"):
        count_flops(stacked, ll.transforms.stack_states([state]), x)
    with pytest.raises(TypeError, match="count_flops"):
        count_flops(model, state, x)


@torch.library.custom_op("looplib_tests::product", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_operations_without_a_formula_are_named():
    model = nn.Linear(4, 2, bias=False)
    grad_fn = ll.make_grad_fn(model, lambda model, x: product(x, model.weight.T).mean())
    state, x = ll.init_state(model), torch.ones(3, 4)
    with pytest.warns(UserWarning, match=r"no formula for looplib_tests\.product .*register_flop_formula"):
        assert count_flops(grad_fn, state, x) == 2 * (2 * 3 * 4 * 2)  # of the backward pass
    register_flop_formula(torch.ops.looplib_tests.product)(lambda x, y, **out: 2 * math.prod(x) * y[-1])
    assert count_flops(grad_fn, state, x) == 3 * (2 * 3 * 4 * 2)
    with pytest.warns(UserWarning, match=r"aten\.mv"):
        count_flops(lambda state, x: torch.mv(x, torch.ones(4)), state, x)


def test_operations_of_torch_without_a_formula_that_multiply_or_factorize_matrices_are_named():
    x, kernel = torch.eye(8), torch.ones(3, 8, 4)
    linalg = torch.linalg
    operations = {
        "conv_tbc": lambda: torch.conv_tbc(torch.ones(5, 2, 8), kernel, torch.zeros(4)),
        "linalg_matrix_exp": lambda: linalg.matrix_exp(x),
        "linalg_cholesky_ex": lambda: linalg.cholesky(x),
        "linalg_inv_ex": lambda: linalg.inv(x),
        "linalg_qr": lambda: linalg.qr(x),
        "_linalg_svd": lambda: linalg.svd(x),
        "_linalg_eigh": lambda: linalg.eigh(x),
        "_linalg_solve_ex": lambda: linalg.solve(x, x),
        "linalg_lu_factor_ex": lambda: linalg.lu_factor(x),
        "linalg_solve_triangular": lambda: linalg.solve_triangular(x, x, upper=True),
        "linalg_lstsq": lambda: linalg.lstsq(x, x),
        "linalg_householder_product": lambda: linalg.householder_product(x, x[0]),
        "_linalg_slogdet": lambda: linalg.slogdet(x),
        "cholesky_inverse": lambda: torch.cholesky_inverse(x),
        "cholesky_solve": lambda: torch.cholesky_solve(x, x),
        "geqrf": lambda: torch.geqrf(x),
        "ormqr": lambda: torch.ormqr(x, x[0], x),
        "_cdist_forward": lambda: torch.cdist(x, x),
        "affine_grid_generator": lambda: F.affine_grid(x[:2, :6].view(2, 2, 3), (2, 3, 4, 4), align_corners=False),
        "_int_mm": lambda: torch._int_mm(*[torch.ones(32, 32, dtype=torch.int8)] * 2),
    }
    for name, operation in operations.items():
        with pytest.warns(UserWarning, match=rf"no formula for .*\b{name}\b"):
            count_flops(lambda state, batch, operation=operation: operation(), ll.TrainState(), None)
    others = {
        "elementwise": lambda: (x * x).relu().softmax(-1).sum(),
        "norms": lambda: linalg.vector_norm(x) + x.norm() + linalg.cross(x[:, :3], x[:, :3]).sum(),
        "pictures": lambda: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
        "samples": lambda: F.grid_sample(x[None, None], torch.zeros(1, 4, 4, 2), align_corners=False),
        "tables": lambda: F.embedding(torch.arange(3), x),
    }
    for name, operation in others.items():
        assert count_flops(lambda state, batch, operation=operation: operation(), ll.TrainState(), None) == 0, name


def test_a_fused_layer_of_a_script_is_named():
    layer = encoder(1).layers[0].eval().requires_grad_(False)
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        script = torch.jit.script(layer)
    with pytest.warns(UserWarning, match=r"aten\._transformer_encoder_layer_fwd"):
        count_flops(lambda state, x: script(x), ll.TrainState(), torch.ones(2, 5, 32))


def on_ranks():
    with ll.distributed.setup():
        for engine in ("ddp", "fsdp", "tensor parallel"):
            check_in_engine(engine)


def check_in_engine(engine):
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x = torch.ones(3 + rank, 8)
    own = (3 + rank) * (6 * (64 + 16) - 2 * 64)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    if engine == "tensor parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        parallelize_module(model[2], mesh, ColwiseParallel())
        grad_fn = ll.make_grad_fn(model, mean_square)
        with pytest.raises(ValueError, match=r"addmm has a DTensor.*divide"):
            count_flops(grad_fn, ll.init_state(model), x)
        return
    if engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if engine == "fsdp":
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    grad_fn = ll.accumulate(ll.make_grad_fn(model, mean_square), 1)
    state = ll.init_state(model)
    before = {name: tensor.clone() for name, tensor in state.buffers.items()}
    assert count_flops(grad_fn, state, x) == own
    assert all(torch.equal(state.buffers[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_each_rank_counts_what_its_device_computes():
    launch(2, on_ranks)


# Peaks

# Name -> multiprocessors (or compute units), operations of one in a cycle, and GHz, as the makers' whitepapers have them.
CORES = {
    "NVIDIA H100 80GB HBM3": (132, 4096, 1.83),
    "NVIDIA H200": (132, 4096, 1.83),
    "NVIDIA GH200 480GB": (132, 4096, 1.83),
    "NVIDIA H100 PCIe": (114, 4096, 1.62),
    "NVIDIA H100 NVL": (132, 4096, 1.545),
    "NVIDIA H200 NVL": (132, 4096, 1.545),
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1.41),
    "NVIDIA A100 80GB PCIe": (108, 2048, 1.41),
    "NVIDIA A100-PCIE-40GB": (108, 2048, 1.41),
    "A100-SXM4-40GB": (108, 2048, 1.41),
    "NVIDIA A30": (56, 2048, 1.44),
    "NVIDIA A40": (84, 1024, 1.74),
    "NVIDIA A10": (72, 1024, 1.695),
    "NVIDIA RTX A6000": (84, 1024, 1.8),
    "NVIDIA L4": (58, 1024, 2.04),
    "NVIDIA L40S": (142, 1024, 2.49),
    "NVIDIA L40": (142, 512, 2.49),  # at half the rate if sums are in float32, as the GeForce cards
    "NVIDIA GeForce RTX 3090": (82, 512, 1.695),
    "NVIDIA GeForce RTX 4090": (128, 512, 2.52),
    "NVIDIA GeForce RTX 5090": (170, 512, 2.407),
    "Tesla V100-SXM2-16GB": (80, 1024, 1.53),
    "Tesla V100-PCIE-32GB": (80, 1024, 1.38),
    "Tesla T4": (40, 1024, 1.59),
    "AMD Instinct MI355X": (256, 4096, 2.4),
    "AMD Instinct MI325X": (304, 2048, 2.1),
    "AMD Instinct MI300X": (304, 2048, 2.1),
    "AMD Instinct MI250X": (110, 1024, 1.7),  # one of its two devices
    "AMD Instinct MI210": (104, 1024, 1.7),
}
# Stated for float8 with sparsity, which is four times bfloat16 without.
PETAFLOPS_IN_FLOAT8 = {"NVIDIA GB200": 10, "NVIDIA B200": 72 / 8}


def test_peaks_are_those_of_the_cores():
    assert len(CORES) >= 12
    for name, (units, operations, gigahertz) in CORES.items():
        assert peak_flops(name) == pytest.approx(units * operations * gigahertz * 1e9, rel=0.01), name
    for name, petaflops in PETAFLOPS_IN_FLOAT8.items():
        assert peak_flops(name) == petaflops * 1e15 / 4


@one_report
@pytest.mark.parametrize(
    "name",
    [
        *(
            "cpu",
            "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA GeForce RTX 3090 Ti",
        ),
        *(
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
            "NVIDIA A10G",
            "NVIDIA H20",
            "NVIDIA H800",
        ),
        *("AMD Instinct MI250X / MI250", "NVIDIA RTX 6000 Ada Generation", "NVIDIA L400", "", "NVIDIA"),
    ],
)
def test_an_unknown_device_has_no_peak(name):
    assert peak_flops(name) is None


def test_the_name_of_a_device_is_its_drivers(monkeypatch):
    assert peak_flops() is None
    assert peak_flops(torch.device("cpu")) is None
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"NVIDIA L4{'S' * (device.index or 0)}")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert peak_flops("cuda") == peak_flops("NVIDIA L4") == peak_flops(torch.device("cuda", 0))
    assert peak_flops("cuda:1") is None


# Utilization


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    return clock


def trained(timer, model, batches, clock, seconds, microbatches=None, inside=False):
    grad_fn = ll.make_grad_fn(model, mean_square)
    grad_fn = timer.grad_fn(grad_fn) if inside else grad_fn
    grad_fn = grad_fn if microbatches is None else ll.accumulate(grad_fn, microbatches)
    optimizer = timer.optimizer(adamw())
    train_step = ll.make_train_step(grad_fn if inside else timer.grad_fn(grad_fn), optimizer)
    state = ll.init_state(model, optimizer)
    for batch in timer.data(batches):
        state, _ = train_step(state, batch)
        clock.now += seconds
    return timer.read()


def test_utilization_is_the_operations_over_the_time_and_the_peak(clock):
    model, batches = net(4, 2), [torch.ones(8, 4)] * 5
    flops = count_flops(ll.make_grad_fn(model, mean_square), ll.init_state(model), batches[0])
    costs = trained(step_timer(flops=flops, peak=1e4, device="cpu"), model, batches, clock, 0.25)
    assert costs["flops_per_second"] == pytest.approx(flops / 0.25)
    assert costs["mfu"] == pytest.approx(flops / 0.25 / 1e4)
    costs = trained(step_timer(flops=flops, device="cpu"), model, batches, clock, 0.25)
    assert costs["flops_per_second"] == pytest.approx(flops / 0.25)
    assert "mfu" not in costs  # a CPU has no known peak
    assert not {"mfu", "flops_per_second"} & trained(step_timer(device="cpu"), model, batches, clock, 1).keys()


@pytest.mark.every_case
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_batches_of_different_lengths_have_a_function(inside, as_tensor, clock):
    model, lengths = net(4, 2), [8, 6, 2, 8]
    of = lambda x: torch.tensor(32.0 * len(x)) if as_tensor else 32 * len(x)  # noqa: E731
    timer = step_timer(flops=of, peak=1e3, device="cpu")
    batches = [torch.ones(length, 4) for length in lengths]
    costs = trained(timer, model, batches, clock, 0.5, microbatches=2, inside=inside)
    assert costs["mfu"] == pytest.approx(32 * sum(lengths) / (4 * 0.5) / 1e3)
    assert type(costs["mfu"]) is float
    clock.now += 9
    assert timer.read("costs/") == {}
    again = trained(timer, model, batches[:1], clock, 1.0)
    assert again["mfu"] == pytest.approx(32 * 8 / 1e3)


def test_one_number_for_batches_of_different_sizes_gets_a_warning(clock):
    model, batches = net(4, 2), [torch.ones(8, 4), torch.ones(8, 4), torch.ones(3, 4), torch.ones(2, 4)]
    with pytest.warns(UserWarning, match="batches of 8 and of 3 samples.*flops=lambda batch") as caught:
        trained(step_timer(flops=100, device="cpu"), model, batches, clock, 1.0)
    assert len(caught) == 1


def test_wrong_settings_are_named():
    for options, error, named in (
        ({"flops": 0}, ValueError, "flops is 0"),
        ({"flops": math.nan}, ValueError, "flops is nan"),
        ({"flops": "3"}, TypeError, "flops is the text '3'"),
        ({"peak": -1.0}, ValueError, "peak is -1.0"),
        ({"peak": math.inf}, ValueError, "peak is inf"),
        ({"tokens": 3}, TypeError, "tokens is 3"),
    ):
        with pytest.raises(error, match=named):
            step_timer(**options)
