"""Pieces against the whole: in float64, by a raw loop of backward calls."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import adamw, sgd
from ranks import in_engine, launch
from shared import Opaque, bits, both_steps, equal, examples, mean_square, mix, saved_at_most
from shared import classify as mean_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import looplib as ll


def mlp(dtype=torch.double):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def token_loss(model, batch):
    """Labels of -100 count nothing; a batch may have none that count."""
    x, y = batch
    total = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), ignore_index=-100, reduction="sum")
    return ll.Mean(total, (y != -100).sum())


def close(found, expected):
    # A sum of at most some hundred terms in another order: 1e-13 of the largest, in float64.
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-13)


@given(
    n=st.integers(1, 24),
    cut=st.integers(1, 26),
    by=st.sampled_from(["microbatches", "size"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60), deadline=None)
def test_pieces_of_examples_give_the_gradient_of_the_whole(n, cut, by, seed):
    model, generator = mlp(), torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.double)
    y = torch.randint(0, 3, (n,), generator=generator)
    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, mean_loss)
    whole = grad_fn(state, (x, y))
    pieces = ll.accumulate(grad_fn, **{by: cut})(state, (x, y))
    close(pieces.grads, whole.grads)
    assert pieces.samples == n
    assert pieces.weight is None
    assert ll.compute(pieces.metrics)["loss"] == pytest.approx(ll.compute(whole.metrics)["loss"], rel=1e-14)


@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=examples(60), deadline=None)
def test_ragged_pieces_weigh_by_their_tokens(data, seed):
    model, generator = mlp(), torch.Generator().manual_seed(seed)
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=6))
    pieces = []
    for rows, length in shapes:
        x = torch.randn(rows, length, 5, generator=generator, dtype=torch.double)
        y = torch.randint(0, 3, (rows, length), generator=generator)
        share = data.draw(st.sampled_from([1.1, 0.9, 0.3, 0.0]))
        y[torch.rand(rows, length, generator=generator) < share] = -100
        pieces.append((x, y))
    y[0, 0] = 1  # the last one has a token
    flat = torch.cat([x.flatten(0, 1) for x, _ in pieces]), torch.cat([y.flatten() for _, y in pieces])
    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, token_loss)
    whole = grad_fn(state, flat)
    found = ll.accumulate(grad_fn)(state, pieces)
    close(found.grads, whole.grads)
    assert ll.compute(found.metrics)["loss"] == pytest.approx(ll.compute(whole.metrics)["loss"], rel=1e-14)
    assert found.samples == sum(len(x) for x, _ in pieces)
    nested = ll.accumulate(ll.accumulate(grad_fn, size=2))(state, pieces)
    close(nested.grads, whole.grads)


def net():
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 3))


@both_steps
@pytest.mark.parametrize("bound", [False, True])
def test_batch_norm_and_dropout_are_those_of_a_raw_loop_over_the_pieces(donate, bound):
    torch.manual_seed(0)
    model, raw = net(), net()
    raw.load_state_dict(model.state_dict())
    raw_optimizer = torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9, fused=True)
    optimizer = sgd()
    train_step = ll.make_train_step(
        ll.accumulate(ll.make_grad_fn(model, mean_loss), microbatches=3), optimizer, donate=donate
    )
    state = ll.init_state(model, optimizer, seed=3)
    state = state if bound else ll.copy_state(state)
    for step in range(5):
        x, y = torch.randn(8, 5), torch.randint(0, 3, (8,))
        for index, (piece, labels) in enumerate(zip(x.split(3), y.split(3), strict=True)):
            torch.manual_seed(mix(3, step, 0, index))
            (mean_loss(raw, (piece, labels)) * (len(piece) / 8)).backward()
        raw_optimizer.step()
        raw_optimizer.zero_grad()
        state, _ = train_step(state, (x, y))
    assert equal(state.params, raw.named_parameters())
    assert equal(state.buffers, raw.named_buffers())


@both_steps
def test_pieces_in_one_call_have_the_bits_of_a_call_for_each(donate):
    torch.manual_seed(0)
    model = net()
    optimizer = adamw(0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, batch: (mean_loss(model, batch), {"rows": Count(len(batch[0]))}))

    def plain(state, batch, **request):
        return grad_fn(state, batch, **request)

    def run(grad_fn):
        step, out = ll.make_train_step(grad_fn, optimizer, donate=donate), []
        state = ll.copy_state(start)
        for batch in batches:
            state, metrics = step(state, batch)
            out.append(ll.compute(metrics))
        return state, out

    start = ll.init_state(model, optimizer)
    batches = [(torch.randn(n, 5), torch.randint(0, 3, (n,))) for n in (9, 9, 8)]
    (one, logs), (other, others) = run(ll.accumulate(grad_fn, 3)), run(ll.accumulate(plain, 3))
    assert logs == others
    assert equal(one.params, other.params)
    assert equal(one.buffers, other.buffers)


def test_the_wrapped_function_is_called_once_for_each_piece_and_told_which():
    model, parts = mlp(), []
    grad_fn = ll.make_grad_fn(model, mean_loss)

    def watched(state, batch, **request):
        parts.append((request["index"], len(batch[0])))
        return grad_fn(state, batch, **request)

    batch = torch.randn(10, 5, dtype=torch.double), torch.randint(0, 3, (10,))
    ll.accumulate(watched, microbatches=4)(ll.init_state(model), batch)
    assert parts == [(0, 3), (1, 3), (2, 2), (3, 2)]
    parts.clear()
    ll.accumulate(ll.accumulate(watched, size=2), size=4)(ll.init_state(model), batch)
    assert [n for _, n in parts] == [2, 2, 2, 2, 2]
    assert len({index for index, _ in parts}) == 5


def test_memory_is_that_of_one_piece():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(10)])
    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, mean_square)
    x = torch.randn(8000, 8)
    whole = saved_at_most(lambda: grad_fn(state, x))
    pieces = saved_at_most(lambda: ll.accumulate(grad_fn, microbatches=8)(state, x))
    assert pieces < whole / 8 + 10_000  # the weights are saved too


class Count(collections.namedtuple("Count", "n")):
    def merge(self, other):
        return Count(self.n + other.n)

    def compute(self):
        return self.n


def test_metrics_of_all_kinds_merge():
    model = mlp()

    def loss_fn(model, batch):
        x, y = batch
        logits = model(x)
        right = (logits.argmax(-1) == y).sum()
        loss = nn.functional.cross_entropy(logits, y)
        return loss, {"accuracy": ll.Mean(right, len(y)), "rows": Count(len(y)), "mean": x.mean(), "two": 2.0}

    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, loss_fn)
    batch = torch.randn(10, 5, dtype=torch.double), torch.randint(0, 3, (10,))
    whole = ll.compute(grad_fn(state, batch).metrics)
    pieces = ll.compute(ll.accumulate(grad_fn, size=3)(state, batch).metrics)
    assert pieces == pytest.approx(whole, rel=1e-14)
    assert pieces["rows"] == 10
    assert pieces["accuracy"] == whole["accuracy"]


def test_a_parameter_may_be_reached_by_some_pieces_alone():
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})

    def loss_fn(model, batch):
        return model["a" if batch[0, 0] > 0 else "b"](batch).mean()

    state, grad_fn = ll.init_state(model), ll.accumulate(ll.make_grad_fn(model, loss_fn))
    ones = torch.ones(3, 2)
    assert grad_fn(state, [ones, -ones]).grads.keys() == state.params.keys()
    with pytest.raises(ValueError, match=r"no gradient reached b.weight, b.bias"):
        grad_fn(state, [ones, ones])
    unused = ll.accumulate(ll.make_grad_fn(model, loss_fn, allow_unused=True))
    assert unused(state, [ones, ones]).grads.keys() == {"a.weight", "a.bias"}


def mean_of_outputs(model, x):
    return model(x).sum() / len(x)


def in_bfloat16():
    """A model, 64 microbatches of samples whose gradients are exact in bfloat16, and the gradient in float64."""
    x = torch.randn(64, 256).bfloat16() + 1
    return nn.Linear(256, 1).bfloat16(), x, x.double().mean(0)[None]


def test_adding_up_in_float32_what_bfloat16_would_lose():
    model, x, exact = in_bfloat16()
    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, mean_of_outputs)

    def widened(state, batch, **request):
        out = grad_fn(state, batch, **request)
        return out._replace(grads={name: grad.float() for name, grad in out.grads.items()})

    wide = ll.accumulate(widened, size=1)(state, x).grads["weight"]
    narrow = ll.accumulate(grad_fn, size=1)(state, x).grads["weight"]
    assert wide.dtype == torch.float32
    assert (wide - exact).abs().max() < 1e-5 < (narrow - exact).abs().max()


def test_a_sum_in_float32_is_rounded_once_to_the_dtype_of_the_parameters():
    model, x, exact = in_bfloat16()
    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, mean_of_outputs)
    out, narrow = (ll.accumulate(grad_fn, 64, **options)(state, x) for options in ({"dtype": torch.float32}, {}))
    total = torch.zeros(1, 256)
    for piece in x.split(1):  # what each backward pass gives, in a raw loop
        model.weight.grad = None
        (mean_of_outputs(model, piece) / 64).backward()
        total += model.weight.grad.float()
    assert out.grads["weight"].dtype == model.weight.dtype == torch.bfloat16
    assert torch.equal(out.grads["weight"], total.bfloat16())
    assert (out.weight, out.normalizer, out.samples) == (None, None, 64)
    error, without = ((each.grads["weight"] - exact).norm() / exact.norm() for each in (out, narrow))
    assert error < 2**-9  # half a unit in the last of bfloat16's 8 bits, at most
    assert error < without / 3


@both_steps
def test_a_dtype_that_the_parameters_have_already_changes_no_bit(donate):
    torch.manual_seed(0)
    model, optimizer = net(), adamw(0.1)
    grad_fn, runs = ll.make_grad_fn(model, mean_loss), []
    start = ll.copy_state(ll.init_state(model, optimizer))
    batches = [(torch.randn(9, 5), torch.randint(0, 3, (9,))) for _ in range(4)]
    for dtype in (None, torch.float32):
        step = ll.make_train_step(ll.accumulate(grad_fn, 4, dtype=dtype), optimizer, donate=donate)
        state, logs = ll.copy_state(start), []
        for batch in batches:
            state, metrics = step(state, batch)
            logs.append(ll.compute(metrics))
        runs.append((bits((state.params, state.buffers, state.opt_state)), logs))
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_a_dtype_goes_with_tokens_unreached_parameters_and_graphs():
    model = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3)}).bfloat16()
    optimizer = sgd()

    def loss_fn(model, batch):
        return token_loss(model["a" if len(batch[0]) > 2 else "b"], batch)

    x, y = torch.randn(7, 4, 5).bfloat16(), torch.randint(0, 3, (7, 4))
    y[1:3] = -100
    grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn, allow_unused=True), size=3, dtype=torch.float32)
    state = ll.init_state(model, optimizer)
    found = grad_fn(state, (x, y)).grads
    assert {grad.dtype for grad in found.values()} == {torch.bfloat16}
    total = {name: torch.zeros(param.shape) for name, param in model.named_parameters()}
    for low, high in ((0, 3), (3, 6), (6, 7)):
        model.zero_grad()
        loss_fn(model, (x[low:high], y[low:high])).total.backward()
        for name, param in model.named_parameters():
            total[name] += 0 if param.grad is None else param.grad.float() / (y != -100).sum()
    for name, grad in found.items():  # each pass rounds: here before the division, in the raw loop after it
        torch.testing.assert_close(grad.float(), total[name], rtol=2**-6, atol=2**-9)
    step = ll.make_train_step(grad_fn, optimizer)
    expected, _ = step(state, (x, y))
    graph, _ = ll.compile_step(step, backend="eager")(state, (x, y))
    torch.testing.assert_close(dict(graph.params), dict(expected.params), rtol=2**-6, atol=2**-9)


@pytest.mark.parametrize("dtype", [torch.int32, "float32", 32, torch.complex64])
def test_what_is_no_dtype_to_add_up_in_is_refused(dtype):
    with pytest.raises(TypeError, match=r"give a floating-point dtype, such as torch\.float32"):
        ll.accumulate(ll.make_grad_fn(mlp(), mean_loss), 2, dtype=dtype)


def test_a_dtype_for_ddp_in_one_process_is_the_same_sum(one_process):
    model, x, _ = in_bfloat16()
    grads = []
    for wrapped in (model, DistributedDataParallel(model)):
        grad_fn = ll.accumulate(ll.make_grad_fn(wrapped, mean_of_outputs), 64, dtype=torch.float32)
        out = grad_fn(ll.init_state(wrapped), x, donate=True)
        grads.append(out.grads["weight"].clone())
    assert torch.equal(*grads)


def a_dtype_on_two_ranks(engine):
    with ll.distributed.setup():
        torch.manual_seed(0)
        model, optimizer = nn.Linear(5, 3).bfloat16(), sgd()
        model = in_engine(model, engine)
        grad_fn = ll.accumulate(ll.make_grad_fn(model, mean_loss), 2, dtype=torch.float32)
        step = ll.make_train_step(grad_fn, optimizer, donate=True)
        state = ll.init_state(model, optimizer)
        with pytest.raises(RuntimeError, match=r"accumulate calls make_grad_fn for each microbatch.*without dtype="):
            step(state, (torch.randn(4, 5).bfloat16(), torch.randint(0, 3, (4,))))
        assert state.step == 0  # nothing was spent
        assert state.params
        print("refused")


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_dtype_for_a_model_in_an_engine_on_two_ranks_is_refused(engine):
    assert launch(2, a_dtype_on_two_ranks, engine).count("refused") == 2


@pytest.mark.parametrize("around", ["accumulate", "reduce_gradients on two ranks"])
def test_a_sum_in_float32_within_another_wrapper_has_the_dtype_of_the_parameters(around):
    if around != "accumulate":
        assert launch(2, a_float32_sum_within_reduce_gradients).count("bfloat16") == 2
        return
    model, x, _ = in_bfloat16()
    inner = ll.accumulate(ll.make_grad_fn(model, mean_of_outputs), size=1, dtype=torch.float32)
    assert ll.accumulate(inner, 8)(ll.init_state(model), x).grads["weight"].dtype == torch.bfloat16


def a_float32_sum_within_reduce_gradients():
    with ll.distributed.setup():
        model, x, _ = in_bfloat16()
        inner = ll.accumulate(ll.make_grad_fn(model, mean_of_outputs), size=8, dtype=torch.float32)
        print(ll.grads.reduce_gradients(inner)(ll.init_state(model), x).grads["weight"].dtype)


def test_complex_gradients_keep_both_parts_in_a_sum_of_another_dtype():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x):
            return ((x * self.factors).sum(1) - 1j).abs()

    model, x = Complex(), torch.randn(8, 3)
    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, mean_square)
    wide = ll.accumulate(grad_fn, 4, dtype=torch.float64)(state, x).grads
    torch.testing.assert_close(wide, grad_fn(state, x).grads)


def test_what_cannot_be_cut_is_named():
    model = mlp()
    grad_fn = ll.make_grad_fn(model, mean_loss)
    state = ll.init_state(model)
    batch = {"x": torch.zeros(8, 5), "edges": torch.zeros(2, 7)}
    with pytest.raises(ValueError, match=r"batch\['x'\] has 8, batch\['edges'\] has 2\. .*count_samples="):
        ll.accumulate(grad_fn, microbatches=2)(state, batch)
    counted = ll.make_grad_fn(model, mean_loss, count_samples=lambda batch: len(batch["x"]))
    with pytest.raises(ValueError, match=r"batch\['edges'\] has shape \(2, 7\), and the batch 8 samples.*as a list"):
        ll.accumulate(counted, microbatches=2)(state, batch)
    with pytest.raises(ValueError, match=r"batch\['x'\] has 8, batch\['rows'\] has 3"):
        ll.accumulate(grad_fn, size=2)(state, {"x": torch.zeros(8, 5), "rows": np.zeros(3)})
    counted = ll.make_grad_fn(model, mean_loss, count_samples=len)
    for wrapped in (ll.accumulate(counted, size=3), ll.accumulate(counted, 2)):
        with pytest.raises(TypeError, match=r"cannot count the samples in a Opaque: .*count_samples="):
            ll.accumulate(grad_fn, 2)(state, Opaque(torch.zeros(5, 5)))
        with pytest.raises(ValueError, match=r"a Opaque of 5 samples cannot be cut: its parts would have 5, 5\."):
            wrapped(state, Opaque(torch.zeros(5, 5)))
    with pytest.raises(TypeError, match="takes a list of pieces; this batch is a Tensor"):
        ll.accumulate(grad_fn)(state, torch.zeros(8, 5))
    with pytest.raises(ValueError, match="empty list"):
        ll.accumulate(grad_fn)(state, [])


def test_arguments_and_orders_that_make_no_sense_are_refused():
    model = mlp()
    grad_fn = ll.make_grad_fn(model, mean_loss)
    with pytest.raises(ValueError, match="give microbatches=2 or size=3, not both"):
        ll.accumulate(grad_fn, 2, size=3)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="whole number"):
            ll.accumulate(grad_fn, wrong)
        with pytest.raises(ValueError, match="whole number"):
            ll.accumulate(grad_fn, size=wrong)
    sharp = ll.accumulate(ll.contrib.sam(grad_fn))
    with pytest.raises(ValueError, match=r"put it around, sam\(accumulate\(grad_fn"):
        sharp(ll.init_state(model), [torch.zeros(2, 5)])

    with pytest.raises(ValueError, match="no samples"):
        ll.accumulate(grad_fn, 2)(
            ll.init_state(model), (torch.zeros(0, 5, dtype=torch.double), torch.zeros(0).long())
        )

    def deaf(state, batch, **request):
        return grad_fn(state, batch)

    batch = torch.randn(4, 5, dtype=torch.double), torch.randint(0, 3, (4,))
    with pytest.raises(TypeError, match=r"accumulate around deaf got .*hands what it is given by name on"):
        ll.accumulate(deaf, 2)(ll.init_state(model), batch)

    def positional(state, batch, request=None):
        return grad_fn(state, batch)

    with pytest.raises(TypeError, match=r"accumulate got positional\(state, batch, request\).*takes \*\*request"):
        ll.accumulate(positional, 2)


@pytest.mark.parametrize("nested", [False, True])
def test_a_part_of_a_batch_and_its_gradients_are_records_that_nothing_writes(nested):
    model = mlp()
    grad_fn, seen = ll.make_grad_fn(model, token_loss), []

    def watched(state, batch, **request):
        part = request["part"]
        out = grad_fn(state, batch, **request)
        seen.append((part, dataclasses.astuple(part), out, dict(out.metrics)))
        return out

    x, y = torch.randn(6, 4, 5, dtype=torch.double), torch.randint(0, 3, (6, 4))
    y[:, 2:] = torch.where(torch.rand(6, 2) < 0.5, -100, y[:, 2:])
    state = ll.init_state(model)
    whole = grad_fn(state, (x, y))
    summed = ll.accumulate(ll.accumulate(watched, size=1), size=3) if nested else ll.accumulate(watched, size=1)
    out = summed(state, (x, y))
    close(out.grads, whole.grads)
    assert ll.compute(out.metrics)["loss"] == pytest.approx(ll.compute(whole.metrics)["loss"], rel=1e-14)
    assert (out.samples, out.weight, out.normalizer) == (6, None, None)
    assert len(seen) == 6
    for number, (part, before, each, metrics) in enumerate(seen):
        assert dataclasses.astuple(part) == before
        assert each.metrics == metrics
        assert each.weight == (y[number] != -100).sum()
        assert each.samples == 1
        # The first part chooses the divisor for all of them, and returns it.
        assert part.normalizer is None if number == 0 else part.normalizer == seen[0][2].normalizer
        assert each.normalizer == seen[0][2].normalizer
        for name in ("samples", "normalizer", "local", "wrapper"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, name, None)
        with pytest.raises(AttributeError):
            each.weight = 1


def test_gradients_of_a_part_are_refused_by_an_update_and_add_up_by_hand():
    """The same as `accumulate`: a user's own loop over parts of different sizes, divided by the sum of their weights."""
    model = mlp()
    grad_fn, state = ll.make_grad_fn(model, token_loss), ll.init_state(model, sgd())
    x, y = torch.randn(6, 4, 5, dtype=torch.double), torch.randint(0, 3, (6, 4))
    y[0] = -100
    part, outs = ll.types.BatchPart(), []
    for rows in (slice(0, 1), slice(1, 6)):  # the first one has no weight
        outs.append(grad_fn(state, (x[rows], y[rows]), part=part))
        part = dataclasses.replace(part, normalizer=outs[0].normalizer)
    factor = outs[0].normalizer / sum(out.weight for out in outs)
    found = {name: sum(out.grads[name] for out in outs) * factor for name in state.params}
    close(found, grad_fn(state, (x, y)).grads)
    with pytest.raises(ValueError, match="gradients of a microbatch"):
        ll.apply_gradients(sgd(), state, outs[0])
