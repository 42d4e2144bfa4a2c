"""Each check passes a run that is put together well, and catches a step that was broken on purpose in its way."""

import copy
import dataclasses
import math
import random
import re
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import make_train_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import looplib as ll
from looplib import testing
from looplib.types import WHOLE

both_steps = pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
both_states = pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])


class Tagger(nn.Module):
    """A class for each token, from those up to it; in ragged rows, whose labels are -100 where there is none."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.inner, self.dropout, self.head = nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 5)
        self.causal = True

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype) if self.causal else None
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return self.head(self.dropout(F.gelu(self.inner(x))))


def token_loss(model, batch):
    logits = model(batch["tokens"])
    total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
    return ll.Mean(total, (batch["labels"] != -100).sum())


def tokens(rows=7, length=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 11, (rows, length), generator=generator)
    labels = torch.randint(0, 5, (rows, length), generator=generator)
    for row in range(rows):
        labels[row, 1 + row % length :] = -100
    return {"tokens": found, "labels": labels}


def mlp(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), *layers, nn.Linear(6, 2))


def rows(count=7):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, generator=generator), torch.arange(count) % 2


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def adamw():
    return ll.ema(ll.optimizer(torch.optim.AdamW, lr=ll.schedules.warmup_linear(3e-2, warmup=3, total=500)), 0.9)


def put_together(model, loss_fn=mean_loss, optimizer=None, donate=False, bound=True, pieces=3):
    """With all that usually is in a training step."""
    optimizer = optimizer or adamw()
    grad_fn = ll.clip_by_global_norm(ll.accumulate(ll.make_grad_fn(model, loss_fn), pieces), 1.0)
    state = ll.init_state(model, optimizer, seed=3, extra={"note": "kept"})
    return ll.make_train_step(grad_fn, optimizer, donate=donate), state if bound else ll.copy_state(state)


def fails(*words):
    """Words that the message must have, in this order."""
    return pytest.raises(AssertionError, match=r"(?s)" + ".*".join(map(re.escape, words)))


def equal(one, other):
    leaves, others = (torch.utils._pytree.tree_leaves(tree) for tree in (one, other))
    assert len(leaves) == len(others)
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others, strict=True)
    )


def check_all(step, grad_fn, predict_step, state, batch, stop_after=3):
    testing.assert_pure(step, state, batch)
    testing.assert_pure(predict_step, state, batch)
    testing.assert_resumes(step, state, [batch] * stop_after)
    testing.assert_rows_independent(predict_step, state, batch)
    testing.assert_causal(lambda state, found: predict_step(state, {"tokens": found}), state, batch["tokens"])
    testing.assert_overfits(step, state, batch, steps=200, fraction=0.3)
    testing.assert_pieces_equal_whole(grad_fn, state, batch)
    testing.assert_all_gradients(grad_fn, state, batch)
    testing.assert_reduces_alike(grad_fn, state, batch, ranks=2)
    testing.assert_compiles(step, state, batch)


@both_steps
@both_states
def test_a_good_run_passes_every_check_and_is_left_as_it_was(donate, bound):
    torch.manual_seed(0)
    model = Tagger()
    optimizer = adamw()
    grad_fn = ll.make_grad_fn(model, token_loss)
    step = ll.make_train_step(ll.clip_by_global_norm(ll.accumulate(grad_fn, 3), 1.0), optimizer, donate=donate)
    state = ll.init_state(model, optimizer, seed=3, extra={"note": "kept"})
    state = state if bound else ll.copy_state(state)
    batch = tokens()
    kept, kept_batch = ll.copy_state(state), copy.deepcopy(batch)
    modes = [module.training for module in model.modules()]
    random.seed(7), np.random.seed(7), torch.manual_seed(7)  # noqa: NPY002
    expected = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
    random.seed(7), np.random.seed(7), torch.manual_seed(7)  # noqa: NPY002
    check_all(step, grad_fn, ll.make_predict_step(model, lambda m, batch: m(batch["tokens"])), state, batch)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected  # noqa: NPY002
    assert equal(state, kept)
    assert equal(batch, kept_batch)
    assert modes == [module.training for module in model.modules()]
    step(state, batch)  # which is good still


# a step that is not pure


def drawing(draw):
    def loss_fn(model, batch):
        return mean_loss(model, batch) * (1 + draw())

    return loss_fn


@both_steps
@pytest.mark.parametrize(
    ("draw", "stream"),
    [(random.random, "Python's random"), (lambda: np.random.rand(), "numpy.random")],  # noqa: NPY002
    ids=["python", "numpy"],
)
def test_a_loss_that_draws_from_a_global_stream_is_not_pure(donate, draw, stream):
    step, state = put_together(mlp(), drawing(draw), donate=donate)
    with fails("drew from a global random stream", f"{stream} moved on", "Draw from torch within the loss function"):
        testing.assert_pure(step, state, rows())


def test_a_step_around_looplibs_that_draws_from_torch_is_not_pure():
    step, state = put_together(mlp())

    def augmented(state, batch):
        return step(state, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    with fails("drew from a global random stream", "torch's random stream on cpu moved on"):
        testing.assert_pure(augmented, state, rows())


def test_a_step_that_depends_on_a_global_stream_and_puts_it_back_is_not_pure():
    step, state = put_together(mlp())

    def augmented(state, batch):
        with torch.random.fork_rng():
            noise = torch.randn_like(batch[0])
        return step(state, (batch[0] + noise, batch[1]))

    with fails("not a function of its state and its batch", "random streams were seeded otherwise"):
        testing.assert_pure(augmented, state, rows())


@both_steps
def test_a_generator_of_ones_own_and_the_time_are_not_pure(donate):
    generator = torch.Generator().manual_seed(0)
    for draw in (lambda: torch.rand((), generator=generator), lambda: time.perf_counter() % 1):
        step, state = put_together(mlp(), drawing(draw), donate=donate)
        with fails("not a function of its state and its batch", "metrics['loss'].total: ", "numbers differ, by"):
            testing.assert_pure(step, state, rows())


class Counting(nn.Module):
    """A module whose output depends on how often it ran."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x / self.calls


@both_steps
def test_a_module_that_counts_in_an_attribute_is_not_pure_and_is_named(donate):
    step, state = put_together(mlp(Counting()), donate=donate)
    with fails(
        "two calls on equal ones differ", "metrics['loss'].total: ", "Sequential.1.calls changed in these calls"
    ):
        testing.assert_pure(step, state, rows())
    predict_step = ll.make_predict_step(model := mlp(Counting()), lambda model, batch: model(batch[0]))
    with fails("two calls on equal ones differ", "output: 14 of 14 numbers differ"):
        testing.assert_pure(predict_step, ll.init_state(model), rows())


@both_steps
def test_a_tensor_cached_between_calls_is_not_pure_and_is_named(donate):
    cache = {}

    def loss_fn(model, batch):
        logits = model(batch[0])
        pull = (logits - cache.get("logits", logits).detach()).square().mean()
        cache["logits"] = logits.detach()
        return F.cross_entropy(logits, batch[1]) + pull

    optimizer = adamw()
    state = ll.init_state(model := mlp(), optimizer)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    with fails("two calls on equal ones differ", "loss_fn's cache['logits'] changed in these calls"):
        testing.assert_pure(step, state, rows())


class Remembering:
    """A train step as an object, with an average of its own."""

    def __init__(self, step):
        self.step, self.average = step, 0.0

    def __call__(self, state, batch):
        state, metrics = self.step(state, batch)
        self.average = 0.9 * self.average + 0.1 * ll.compute(metrics)["loss"]
        return state, {**metrics, "average": ll.Mean(self.average)}


@both_steps
def test_an_object_that_remembers_is_neither_pure_nor_does_it_resume(donate):
    step, state = put_together(mlp(), donate=donate)
    with fails("two calls on equal ones differ", "metrics['average'].total: 0.0", "Remembering.average changed"):
        testing.assert_pure(Remembering(step), state, rows())
    with fails("stopped after 1 batches", "batch 2 of 4 differs", "metrics['average'].total", "Remembering.average"):
        testing.assert_resumes(Remembering(step), state, [rows()] * 4)


@both_steps
def test_a_write_to_the_batch_is_not_pure(donate):
    def loss_fn(model, batch):
        batch[0].mul_(2)
        return mean_loss(model, batch)

    step, state = put_together(mlp(), loss_fn, donate=donate)
    batch = rows()
    with fails("wrote to its batch", "batch[0]: 21 of 21 numbers differ, by", "make a new tensor"):
        testing.assert_pure(step, state, batch)
    assert equal(batch, rows())

    def popping(model, batch):
        return mean_loss(model, (batch.pop("x"), batch["y"]))

    optimizer = adamw()
    step = ll.make_train_step(ll.make_grad_fn(model := mlp(), popping), optimizer, donate=donate)
    with fails("wrote to its batch", "batch['x']: is no longer there"):
        testing.assert_pure(step, ll.init_state(model, optimizer), dict(zip("xy", rows(), strict=True)))


def test_a_write_to_the_state_is_not_pure_and_may_be_done_by_a_donated_step():
    def loss_fn(model, batch):
        model[0].weight.data.clamp_(-0.01, 0.01)
        return mean_loss(model, batch)

    def writing(state, batch):  # in a loss function, the step itself refuses it
        state.params["0.weight"].data.clamp_(-0.01, 0.01)
        return step(state, batch)

    step, state = put_together(mlp(), mean_loss)
    with fails("wrote to the state that it was given", "params['0.weight']: 17 of 18", "donate=True"):
        testing.assert_pure(writing, state, rows())
    step, state = put_together(mlp(), loss_fn)
    with pytest.raises(RuntimeError, match=r"wrote to the parameter 0\.weight in place"):
        testing.assert_pure(step, state, rows())
    step, state = put_together(mlp(), loss_fn, donate=True)
    testing.assert_pure(step, state, rows())


def leaving_in_training_mode(model):
    eval_step = ll.make_eval_step(model, lambda model, batch: {"loss": mean_loss(model, batch)})

    def step(state, batch):
        model.train()  # within metric_fn, looplib would put the modes back
        return eval_step(state, batch)

    return step


def raw_loop(model):
    """torch's own, that calls itself a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(state, batch):
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        return state.replace(step=state.step + 1), {"loss": ll.Mean(loss.detach())}

    return step


@both_states
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (leaving_in_training_mode, ["Sequential.1.training: False, then True"]),
        (raw_loop, ["Sequential.0.weight: 18 of 18 numbers differ", "Sequential.0.weight.grad: a NoneType, then a"]),
    ],
)
def test_a_step_that_changes_the_module_is_not_pure(make, found, bound):
    model = mlp(nn.Tanh())
    model[1].eval()
    state = ll.init_state(model)
    with fails("changed tensors or modes that belong to neither", *found, "Let the step return what it changes"):
        testing.assert_pure(make(model), state if bound else ll.copy_state(state), rows())


def test_dropout_batch_norm_buffers_and_nan_are_pure():
    def loss_fn(model, batch):
        return mean_loss(model, batch), {"none": torch.tensor(float("nan"))}

    step, state = put_together(mlp(nn.BatchNorm1d(6), nn.Dropout()), loss_fn)
    assert state.buffers
    testing.assert_pure(step, state, rows())


# a run that does not resume


@both_steps
@both_states
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loaders_place_resumes_across_the_end_of_an_epoch(donate, bound, workers, tmp_path):
    loader = ll.make_loader(torch.utils.data.TensorDataset(*rows(11)), batch_size=4, seed=1, num_workers=workers)
    step, state = put_together(mlp(nn.BatchNorm1d(6), nn.Dropout()), donate=donate, bound=bound, pieces=1)
    state = state.replace(epoch_length=len(loader))
    testing.assert_resumes(step, state, loader, steps=5 if not workers else 3, directory=tmp_path)
    assert len(list(tmp_path.iterdir())) == (4 if not workers else 2)


@given(period=st.integers(2, 5), steps=st.integers(5, 7))
@settings(max_examples=10, deadline=None)
def test_what_is_done_every_few_steps_by_a_closures_count_does_not_resume(period, steps):
    calls = 0

    def loss_fn(model, batch):
        nonlocal calls
        calls += 1
        return mean_loss(model, batch) * (2 if calls % period == 0 else 1)

    optimizer = adamw()
    state = ll.init_state(model := mlp(), optimizer)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    with fails(
        "stopped after", "differs", "So something that the run depends on is not in its checkpoint", "loss_fn's calls"
    ):
        testing.assert_resumes(step, state, [rows()] * steps)


@both_steps
def test_an_optimizer_that_remembers_outside_of_its_state_does_not_resume(donate):
    inner, last = ll.optimizer(torch.optim.SGD, lr=0.1), {}

    def update_(grads, opt_state, params, step, **options):
        grads = {name: grad + 0.9 * last.get(name, 0) for name, grad in grads.items()}
        last.update({name: grad.clone() for name, grad in grads.items()})
        return inner.update_(grads, opt_state, params, step, **options)

    step, state = put_together(mlp(), optimizer=ll.types.Optimizer(inner.init, update_), donate=donate)
    with fails("stopped after 1 batches", "metrics['loss'].total", "update_'s last['0.weight']"):
        testing.assert_resumes(step, state, [rows()] * 4)


def test_what_is_remembered_from_the_first_call_is_missed_after_a_restart_alone():
    def make():
        first = []

        def loss_fn(model, batch):
            logits = model(batch[0])
            first.append(logits.detach().mean())
            return F.cross_entropy(logits - first[0], batch[1]) + (logits - first[0]).square().mean()

        optimizer = ll.optimizer(torch.optim.SGD, lr=0.5)
        model = mlp()
        return ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer), ll.init_state(model, optimizer)

    step, state = make()
    testing.assert_resumes(step, state, [rows()] * 3)
    with fails("stopped after 1 batches", "batch 2 of 3 differs"):
        testing.assert_resumes(step, state, [rows()] * 3, restart=make)
    testing.assert_resumes(*put_together(mlp()), [rows()] * 3, restart=lambda: put_together(mlp()))


def test_what_a_checkpoint_lacks_is_not_taken_from_the_template(monkeypatch):
    model = mlp()
    model[0].weight.requires_grad_(False)  # so that it is the same at the beginning and at the end

    restore = ll.checkpoint.CheckpointIO.restore

    def forgetful(ckpt, state, **options):
        restored = restore(ckpt, state, **options)
        return restored.replace(params={**restored.params, "0.weight": state.params["0.weight"]})

    monkeypatch.setattr(ll.checkpoint.CheckpointIO, "restore", forgetful)
    with fails("stopped after 1 batches", "metrics['loss'].total", ", then nan"):
        testing.assert_resumes(*put_together(model), [rows()] * 3)


def test_a_loader_that_draws_by_itself_does_not_resume():
    class Noisy(torch.utils.data.Dataset):
        generator = torch.Generator().manual_seed(0)

        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.randn(3, generator=self.generator), index % 2

    loader = ll.make_loader(Noisy(), batch_size=2)
    step, state = put_together(mlp())
    with fails(
        "stopped after 1 batches", "batch 2 of 4 differs", "batch[0]: 6 of 6 numbers differ", "a generator of"
    ):
        testing.assert_resumes(step, state.replace(epoch_length=3), loader, steps=4)


class Stream:
    def __iter__(self):
        return iter(list(rows()[0]))


def test_resuming_needs_two_batches_a_state_that_can_be_saved_and_epochs_with_an_end():
    step, state = put_together(mlp())
    with pytest.raises(ValueError, match=r"steps is 1 and the list has 1; .*give 2 or more"):
        testing.assert_resumes(step, state, [rows()])
    with pytest.raises(TypeError, match="/extra/f"):
        testing.assert_resumes(step, state.replace(extra={"f": print}), [rows()] * 2)
    stream = ll.make_loader(Stream(), batch_size=3)
    step = ll.make_train_step(ll.make_grad_fn(model := mlp(), lambda m, x: m(x).mean()), optimizer := adamw())
    testing.assert_resumes(step, ll.init_state(model, optimizer), stream, steps=3)
    with pytest.raises(ValueError, match="the loader ended after 3 batches, and steps is 4"):
        testing.assert_resumes(step, ll.init_state(model, optimizer), stream, steps=4)


# rows that see each other, and places that see the future


FAULTY_ROWS = {
    "batch norm in training mode": lambda x: F.batch_norm(x.flatten(1), None, None, training=True),
    "softmax over the rows": lambda x: x.flatten(1).softmax(0),
    "less the mean": lambda x: x - x.mean(),
    "divided by the largest": lambda x: x / x.abs().max(),
    "beside the next row": lambda x: x + 1e-3 * x.roll(1, 0),
    "by the place in the batch": lambda x: x + torch.arange(len(x), dtype=x.dtype)[:, None, None],
    "reshaped where transposed is meant": lambda x: x.transpose(0, 1).reshape(x.shape),
    "ranks": lambda x: x[:, 0, 0].argsort().argsort(),
}


@pytest.mark.parametrize("fault", FAULTY_ROWS)
def test_rows_that_see_each_other_are_found(fault):
    model = nn.Linear(4, 4)

    def predict_fn(model, batch):
        return {"deep": (model(batch["x"]), FAULTY_ROWS[fault](model(batch["x"])))}

    predict_step, state = ll.make_predict_step(model, predict_fn), ll.init_state(model)
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    with fails(
        "samples of a batch see each other",
        "output['deep'][1]: row",
        "changed by",
        "Name the dimension that is meant",
    ):
        testing.assert_rows_independent(predict_step, state, {"x": x})


def test_pairs_of_rows_that_stay_together_in_each_half_are_found():
    pairs = ll.make_predict_step(
        model := nn.Linear(3, 2), lambda model, x: model(x).view(-1, 2, 2).sum(1).repeat_interleave(2, 0)
    )
    with fails("see each other", "when they stand among copies of sample 0", "output: row 0 changed by"):
        testing.assert_rows_independent(pairs, ll.init_state(model), rows(8)[0])


def test_attention_with_batch_and_length_the_wrong_way_round_is_found():
    torch.manual_seed(0)
    for batch_first in (True, False):
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=batch_first)
        predict_step = ll.make_predict_step(model, lambda model, x: model(x))
        state, x = ll.init_state(model), torch.randn(5, 4, 8)
        if batch_first:
            testing.assert_rows_independent(predict_step, state, x)
            continue
        with fails("samples of a batch see each other", "when they stand among copies of sample 0", "batch_first"):
            testing.assert_rows_independent(predict_step, state, x)


def test_a_batch_of_one_that_is_squeezed_is_found():
    model = nn.Linear(3, 2)
    predict_step = ll.make_predict_step(model, lambda model, batch: model(batch[0])[:, None].squeeze())
    with fails("when they stand alone", "output: a tensor (1, 2) of float64 on cpu, then a tensor (2,)", "squeeze()"):
        testing.assert_rows_independent(predict_step, ll.init_state(model), rows())


@dataclasses.dataclass
class Texts:
    words: list
    x: torch.Tensor
    scale: torch.Tensor


def test_rows_are_taken_from_strings_dataclasses_tuples_and_numbers_that_all_rows_share():
    model = nn.Linear(3, 2)

    def predict_fn(model, batch):
        x, texts, others = batch
        lengths = torch.tensor([len(word) for word in texts.words])
        return {"y": model(x + texts.x) * texts.scale * lengths[:, None] + torch.from_numpy(others["y"])[:, None]}

    x = rows(4)[0]
    batch = (x, Texts(["a", "bcd", "ef", "g"], x, torch.tensor(2.0)), {"y": np.arange(4)})
    predict_step, state = ll.make_predict_step(model, predict_fn), ll.init_state(model)
    testing.assert_rows_independent(predict_step, state, batch)

    def leaking(state, batch):
        return predict_step(state, batch)["y"] + len("".join(batch[1].words))

    with fails("output: row 0, 1 changed by 1 at most"):
        testing.assert_rows_independent(leaking, state, batch)


def test_a_model_that_insists_on_float32_is_judged_in_float32():
    model = mlp(nn.LayerNorm(6))
    for cast in (lambda x: x.float(), lambda x: x.bfloat16().float()):
        function = ll.make_predict_step(model, lambda model, batch, cast=cast: cast(model(batch[0])))
        testing.assert_rows_independent(function, ll.init_state(model), rows(32))
    weight = torch.randn(2, 2)
    function = ll.make_predict_step(model, lambda model, batch: model(batch[0]) @ weight)
    testing.assert_rows_independent(function, ll.init_state(model), rows(32))
    leaking = ll.make_predict_step(model, lambda model, batch: (model(batch[0]) @ weight).softmax(0))
    with fails("samples of a batch see each other"):
        testing.assert_rows_independent(leaking, ll.init_state(model), rows(32))


def test_rows_need_two_rows_and_an_output_for_each():
    state = ll.init_state(model := mlp())
    with pytest.raises(ValueError, match="the batch has 1 row; give 2 or more"):
        testing.assert_rows_independent(ll.make_predict_step(model, lambda m, b: m(b[0])), state, rows(1))
    with pytest.raises(ValueError, match=r"output\[1\] is a tensor \(\) of float64 on cpu, of a batch of 7 samples"):
        testing.assert_rows_independent(
            ll.make_predict_step(model, lambda m, b: (m(b[0]), m(b[0]).mean())), state, rows()
        )
    with pytest.raises(ValueError, match=r"batch\[1\] has shape \(3,\), and the batch 7 samples: it cannot be cut"):
        testing.assert_rows_independent(
            ll.make_predict_step(model, lambda m, b: m(b[0])), state, (rows()[0], torch.zeros(3))
        )


FAULTY_PLACES = {
    "attention without a mask": lambda x: x.softmax(1),
    "a mean over the length": lambda x: x - x.mean(1, keepdim=True),
    "a convolution padded on both sides": lambda x: F.conv1d(x.mT, x.new_ones(4, 4, 3), padding=1).mT,
    "the last place": lambda x: x + x[:, -1:],
    "flipped": lambda x: x.flip(1),
}


@pytest.mark.parametrize("fault", FAULTY_PLACES)
def test_places_that_see_the_future_are_found(fault):
    model = nn.Linear(4, 4)
    predict_step = ll.make_predict_step(model, lambda model, x: (model(x), FAULTY_PLACES[fault](model(x))))
    with fails("outputs see the future", "from 1 on are others", "output[1]: from place 0 on, of those before 1"):
        testing.assert_causal(predict_step, ll.init_state(model), torch.randn(3, 8, 4))


def test_a_mask_that_is_left_out_is_found_and_tokens_must_differ():
    model = Tagger()
    model.causal = False
    predict_step, state = ll.make_predict_step(model, lambda m, found: m(found)), ll.init_state(model)
    with fails("outputs see the future", "a mask the wrong way round"):
        testing.assert_causal(predict_step, state, tokens()["tokens"])
    with pytest.raises(ValueError, match="tokens from place 1 on are all alike"):
        testing.assert_causal(predict_step, state, torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens have the shape \(4,\); give \(batch, length, ...\)"):
        testing.assert_causal(predict_step, state, torch.ones(4, dtype=torch.long))
    pooled = ll.make_predict_step(model, lambda m, found: m(found).mean(1))
    with pytest.raises(ValueError, match=r"with length 6, and there is output \(7, 5\)"):
        testing.assert_causal(pooled, state, tokens()["tokens"])


# a run that does not learn


def learn(loss_fn=mean_loss, lr=0.05, cls=torch.optim.Adam, donate=False, maximize=False, **options):
    optimizer = ll.optimizer(cls, lr=lr, maximize=maximize)
    model = mlp(nn.Tanh())
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn, allow_unused=True), optimizer, donate=donate)
    testing.assert_overfits(step, ll.init_state(model, optimizer), rows(), **options)


@both_steps
def test_what_does_not_learn_is_told_with_its_curve(donate):
    learn(donate=donate)
    with fails(
        "not learned by heart in 40 steps: the goal was a loss of 0.07", "loss 0.7", "in step 1", "in step 40"
    ):
        learn(lambda model, batch: mean_loss(model, (batch[0], torch.randint(0, 2, (7,)))), steps=40, donate=donate)
    with fails("No parameter has moved", "learning rate of 0"):
        learn(lr=0.0, steps=5, donate=donate)
    with fails("in 6 steps", "loss inf in step 6", "It blew up", "learning rate that is too large"):
        learn(lambda model, batch: (model(batch[0]) - 1).square().mean(), cls=torch.optim.SGD, lr=1e4, donate=donate)
    with fails("It rises", "wrong sign"):
        learn(cls=torch.optim.SGD, maximize=True, steps=20, donate=donate)


def test_softmax_twice_a_detached_branch_and_a_broadcast_do_not_learn():
    def twice(model, batch):
        return F.cross_entropy(model(batch[0]).softmax(1), batch[1])

    def detached(model, batch):
        return F.cross_entropy(model[2](model[:2](batch[0]).detach().mean(0).expand(7, -1)), batch[1])

    def broadcast(model, batch):
        return (model(batch[0])[:, :1] - batch[1].float()).square().mean()

    for loss_fn in (twice, detached, broadcast):
        with fails("one batch was not learned by heart", "Usually labels", "softmax before cross_entropy"):
            learn(loss_fn, steps=60)


def test_skipped_updates_are_counted_and_other_goals_can_be_given():
    def loss_fn(model, batch):
        return mean_loss(model, batch), {"shown": mean_loss(model, batch)}

    def spiked(state, batch, part=WHOLE):
        out = grad_fn(state, batch, part)
        return out._replace(grads={name: grad * torch.inf for name, grad in out.grads.items()})

    optimizer = ll.optim.apply_if_finite(ll.optimizer(torch.optim.SGD, lr=0.1), max_consecutive=99)
    grad_fn = ll.make_grad_fn(model := mlp(), loss_fn)
    step = ll.make_train_step(spiked, optimizer)
    with fails("in 5 steps", "5 of 5 updates were skipped", "No parameter has moved"):
        testing.assert_overfits(step, ll.init_state(model, optimizer), rows(), steps=5)

    def density(model, batch):
        return (model(batch[0]) - 1).square().mean() - 5

    learn(density, below=-4.9)
    with fails("the goal was a loss of -5.5"):
        learn(density, below=-5.5, steps=5)
    with pytest.raises(ValueError, match=r"the first loss is -.*give below="):
        learn(density)
    with pytest.raises(ValueError, match="no metric 'accuracy'; it has loss"):
        learn(metric="accuracy")


# microbatches and ranks that do not add up to the whole


def token_mean(model, batch):  # wrong for ragged rows: it weighs by rows
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def row_sum(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def contrastive(model, batch):
    z = model(batch[0])
    return F.cross_entropy(z @ z.mT, torch.arange(len(z)))


def check_parts(*arguments):
    testing.assert_pieces_equal_whole(*arguments)
    testing.assert_reduces_alike(*arguments)


def check_each_part(words, grad_fn, state, batch):
    for check, name in (
        (testing.assert_pieces_equal_whole, "3 microbatches of 7 samples"),
        (testing.assert_reduces_alike, "the parts of 2 ranks, of 7 samples together"),
    ):
        with fails(name, "do not give the gradient of the whole batch", "apart by", *words):
            check(grad_fn, state, batch)


def test_pieces_and_ranks_of_a_loss_that_is_no_mean_over_rows_differ():
    model = Tagger()
    check_parts(ll.make_grad_fn(model, token_loss), ll.init_state(model), tokens())
    check_each_part(
        ["return ll.Mean(total, weight)"], ll.make_grad_fn(model, token_mean), ll.init_state(model), tokens()
    )
    for loss_fn in (row_sum, contrastive):
        check_each_part(
            ["a sum over the rows", "contrastive"],
            ll.make_grad_fn(model := mlp(), loss_fn),
            ll.init_state(model),
            rows(),
        )


def test_pieces_and_ranks_of_batch_norm_differ_and_its_buffers_are_named():
    model = mlp(nn.BatchNorm1d(6))
    check_each_part(
        ["moved 1.running_mean, 1.running_var, 1.num_batches_tracked: BatchNorm", "SyncBatchNorm"],
        ll.make_grad_fn(model, mean_loss),
        ll.init_state(model),
        rows(),
    )
    model[1].eval()
    check_parts(ll.make_grad_fn(model, mean_loss), ll.init_state(model), rows())


class Dropping(nn.Module):
    """Every way in which torch's layers drop."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
        self.layers = nn.Sequential(nn.Dropout(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Dropout1d())

    def forward(self, x):
        x = self.embed(x)[:, None].expand(-1, 4, -1)
        x = self.layers(self.layer(x))
        x = F.scaled_dot_product_attention(x, x, x, None, 0.5) + F.scaled_dot_product_attention(
            x, x, x, dropout_p=0.5
        )
        return F.dropout(x, 0.5).mean(1)[:, :2]


def test_dropout_of_torchs_layers_is_off_and_other_draws_are_refused():
    model = Dropping()
    check_parts(ll.make_grad_fn(model, mean_loss), ll.init_state(model), rows())

    def noisy(model, batch):
        return mean_loss(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    grad_fn, state = ll.make_grad_fn(model := mlp(), noisy), ll.init_state(model)
    for check in (testing.assert_pieces_equal_whole, testing.assert_reduces_alike):
        with pytest.raises(ValueError, match=r"gradient of 0.weight, .* differs from one state.seed to another"):
            check(grad_fn, state, rows())
    other, state = ll.make_grad_fn(model := mlp(nn.Dropout()), mean_loss), ll.init_state(model)  # which is on again
    assert not equal(other(state, rows()).grads, other(state.replace(seed=1), rows()).grads)


def test_wrappers_of_parts_are_checked_and_those_of_wholes_refused():
    model = mlp()
    state, inner = ll.init_state(model), ll.make_grad_fn(model, mean_loss)
    check_parts(ll.accumulate(inner, 2), state, rows())
    clipped = ll.clip_by_global_norm(inner, 1.0)
    for check in (testing.assert_pieces_equal_whole, testing.assert_reduces_alike):
        with pytest.raises(
            ValueError, match=r"ends in clip_by_global_norm.*give the one that clip_by_global_norm is put"
        ):
            check(clipped, state, rows())
        with pytest.raises(ValueError, match="has 7 samples: give 2 or more"):
            check(inner, state, rows(), **{"ranks" if check is testing.assert_reduces_alike else "microbatches": 8})

    def deaf(state, batch, part=None):
        return inner(state, batch)

    with fails("a part of a batch came without its weight", "rank 0 of 2", "grad_fn(state, batch, part)"):
        testing.assert_reduces_alike(deaf, state, rows())

    def weighing_rows(state, batch, part=WHOLE):
        out = inner(state, batch, part)
        return out._replace(weight=None if out.weight is None else 1)

    check_each_part([], weighing_rows, state, rows())


def test_reducing_in_one_process_is_what_reduce_gradients_does_on_many(tmp_path):
    """The weights and sums that the check adds up, against looplib's own reduction with torch.distributed."""
    model = Tagger(dropout=0.0).double()
    grad_fn, state, batch = ll.make_grad_fn(model, token_loss), ll.init_state(model), tokens()
    out = [
        grad_fn(
            state,
            {name: column.tensor_split(2)[rank] for name, column in batch.items()},
            ll.types.Part(reduction="sum"),
        )
        for rank in range(2)
    ]
    whole = grad_fn(state, batch).grads
    for name, grad in whole.items():
        added = sum(o.grads[name] * o.normalizer for o in out) / sum(o.weight for o in out)
        torch.testing.assert_close(added, grad, rtol=1e-12, atol=1e-14)


# parameters without a gradient


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x, mode):
        hidden = self.first(x)
        if mode == "detached":
            hidden = hidden.detach()
        if mode == "dead":
            hidden = (hidden - 100).relu()
        if mode == "nan":
            hidden = torch.where(hidden > -100, hidden, (hidden - hidden).sqrt())
        hidden = hidden if mode == "unused" else hidden + self.unused(hidden[:, :2]).mean()
        return self.second(hidden)


def check_gradients(mode, frozen=None, allow_unused=False, model=None, wrap=lambda grad_fn: grad_fn):
    torch.manual_seed(0)
    model = model or Branches()
    grad_fn = ll.make_grad_fn(model, lambda m, b: F.cross_entropy(m(b[0], mode), b[1]), allow_unused=allow_unused)
    testing.assert_all_gradients(wrap(grad_fn), ll.init_state(model), rows(), frozen=frozen)


@pytest.mark.parametrize("allow_unused", [True, False])
@pytest.mark.parametrize(
    "wrap", [lambda g: g, lambda g: ll.clip_by_global_norm(ll.accumulate(g, 2), 1.0)], ids=["bare", "wrapped"]
)
def test_parameters_without_a_gradient_are_named(allow_unused, wrap):
    check_gradients("", wrap=wrap)
    with fails("2 of 6 parameters", "unused.weight: has no gradient, the loss does not reach it", "unused.bias"):
        check_gradients("unused", allow_unused=allow_unused, wrap=wrap)
    with fails("2 of 6 parameters", "first.weight: has no gradient, the loss does not reach it", ".detach()"):
        check_gradients("detached", allow_unused=allow_unused, wrap=wrap)


def test_gradients_that_are_zero_or_not_finite_are_named():
    with fails("first.weight: all of its 12 numbers are zero", "first.bias: all of its 4", "a dead ReLU"):
        check_gradients("dead")
    with fails("first.weight: 12 of 12 numbers are NaN or infinite", "torch.where throws the value away"):
        check_gradients("nan")


def test_frozen_parameters_are_frozen_on_purpose_or_told():
    def first(name, tensor):
        return name.startswith("first")

    model = Branches()
    model.first.requires_grad_(False)
    check_gradients("", first, model=model)
    with fails("first.weight: has no gradient, it does not require one", "frozen=lambda name, tensor"):
        check_gradients("", model=model)
    with fails("first.weight: has a gradient, and is to be frozen"):
        check_gradients("", first)
    with pytest.raises(ValueError, match=r"frozen chose none of the parameters, which are first.weight, "):
        check_gradients("", lambda name, tensor: False)
    vector_valued = ll.make_grad_fn(model, lambda m, b: m(b[0], ""))
    with pytest.raises(ValueError, match="the loss has shape"):  # errors of another kind come as they are
        testing.assert_all_gradients(vector_valued, ll.init_state(model), rows())


# a step that cannot be compiled whole


def scheduled(**options):
    return ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(1e-2, warmup=3, total=8), **options)


@both_steps
@pytest.mark.parametrize(
    "optimizer",
    [
        scheduled(),
        scheduled(weight_decay=lambda step: 0.1 / (1 + step)),
        ll.optim.apply_if_finite(ll.ema(scheduled(), 0.9), 5),
        ll.optimizer(torch.optim.SGD, lr=lambda step: 0.1 / (1 + step), momentum=0.9),
    ],
    ids=["schedule", "two schedules", "wrapped", "momentum"],
)
def test_schedules_do_not_recompile(donate, optimizer):
    step, state = put_together(mlp(nn.BatchNorm1d(6), nn.Dropout()), optimizer=optimizer, donate=donate)
    kept = ll.copy_state(state)
    testing.assert_compiles(step, state, rows())
    assert equal(state, kept)


def test_a_step_that_is_compiled_already_and_one_in_machine_code_are_checked_too():
    optimizer = scheduled()
    state = ll.init_state(model := mlp(nn.Tanh(), nn.Dropout()), optimizer)
    grad_fn = ll.make_grad_fn(model, mean_loss)
    step = make_train_step(grad_fn, optimizer, donate=True, compile={"mode": "max-autotune-no-cudagraphs"})
    testing.assert_compiles(step, state, rows())
    step = make_train_step(grad_fn, optimizer, donate=True, compile=True)
    testing.assert_compiles(step, state, rows(), steps=3, backend="inductor")


def test_a_model_that_insists_on_float32_is_compiled_in_float32():
    def loss_fn(model, batch):
        return mean_loss(model, (batch[0].float(), batch[1]))

    testing.assert_compiles(*put_together(mlp(nn.Tanh()), loss_fn), rows())


def by_a_number(model, batch):
    loss = mean_loss(model, batch)
    return loss * math.exp(loss.item())


def by_a_branch(model, batch):
    loss = mean_loss(model, batch)
    if loss > 1:
        loss = loss.log()
    return loss


@both_steps
@pytest.mark.parametrize(
    ("loss_fn", "line"),
    [(by_a_number, "return loss * math.exp(loss.item())"), (by_a_branch, "if loss > 1:")],
    ids=["item", "if"],
)
def test_what_asks_for_the_value_of_a_tensor_is_named_with_its_line(donate, loss_fn, line):
    step, state = put_together(mlp(), loss_fn, donate=donate)
    with fails("cannot be compiled whole", "test_testing.py:", f"in {loss_fn.__name__}: `{line}`", "compile_blocks"):
        testing.assert_compiles(step, state, rows())


@both_steps
def test_a_module_that_counts_in_an_attribute_cannot_be_compiled(donate):
    step, state = put_together(mlp(Counting()), donate=donate)
    with fails("cannot be compiled whole", "changes 1.calls", "Make them buffers"):
        testing.assert_compiles(step, state, rows())


def counting(inner):
    """An optimizer that counts its updates in a plain number of its state."""

    def init(params):
        return {"inner_state": inner.init(params), "count": 0}

    def update_(grads, opt_state, params, step, **options):
        new, found = inner.update_(grads, opt_state["inner_state"], params, step, **options)
        return new, {"inner_state": found, "count": opt_state["count"] + 1}

    return ll.types.Optimizer(init, update_)


def whole_numbers(step):
    return step + 1


@both_steps
@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (
            ll.optimizer(torch.optim.SGD, lr=whole_numbers),
            ["whole_numbers (", "test_testing.py:", "returned 1, then 2"],
        ),
        (counting(scheduled()), ["opt_state['count']: 0, then 1", "keep counts as tensors"]),
    ],
    ids=["schedule of ints", "count"],
)
def test_a_value_that_changes_each_step_is_compiled_anew_and_named(donate, optimizer, named):
    step, state = put_together(mlp(), optimizer=optimizer, donate=donate)
    with fails("compiled again in step 2: 2 graphs so far", *named):
        testing.assert_compiles(step, state, rows())


def test_an_attribute_that_is_set_from_step_to_step_is_compiled_anew_and_named():
    model = mlp()
    model.temperature = 1.0
    inner = ll.make_grad_fn(model, lambda model, batch: mean_loss(model, batch) / model.temperature)

    def anneal(step):
        model.temperature = 1.0 / (1 + step)

    def grad_fn(state, batch, part=WHOLE):
        ll.transforms.on_host(anneal, state.step)
        return inner(state, batch, part)

    optimizer = scheduled()
    step = ll.make_train_step(grad_fn, optimizer)
    with fails("compiled again in step 2", "Sequential.temperature: a plain value that has changed"):
        testing.assert_compiles(step, ll.init_state(model, optimizer), rows())


def test_a_switch_on_the_way_is_allowed_for():
    def frozen(name, step):
        return name.startswith("0.") and step < 4

    step, state = put_together(mlp(), optimizer=ll.optim.freeze(scheduled(), frozen))
    with fails(
        "compiled again in step 5", "frozen (", "returned ['1.weight', '1.bias'], then ['0.weight',", "programs="
    ):
        testing.assert_compiles(step, state, rows())
    testing.assert_compiles(step, state, rows(), steps=4)
    testing.assert_compiles(step, state, rows(), programs=2)


def test_python_that_runs_while_the_graph_is_written_down_gives_other_numbers():
    step, state = put_together(mlp(), drawing(random.random))
    with fails("not the eager one: after step 1", "metrics['loss'].total: ", "a draw of random"):
        testing.assert_compiles(step, state, rows())


@pytest.mark.parametrize("name", ["average", "weights"])
def test_a_compiled_step_that_forgets_a_part_is_found(name):
    """An update that does another thing while it is written down, in what the metrics do not show."""
    inner = ll.ema(scheduled(), 0.9)

    def update_(grads, opt_state, params, step, **options):
        before, average = dict(params), {key: part.clone() for key, part in opt_state["average"]["params"].items()}
        before = {key: tensor.detach().clone() for key, tensor in before.items()}
        new, later, *_ = inner.update_(grads, opt_state, params, step, **options)
        if torch.compiler.is_compiling():
            later = {**later, "average": {"params": average}} if name == "average" else later
            new = before if name == "weights" else new
        return new, later

    step, state = put_together(mlp(), optimizer=ll.types.Optimizer(inner.init, update_))
    with fails("not the eager one: after step", "['average']" if name == "average" else "params['0.weight']"):
        testing.assert_compiles(step, state, rows())


def test_draws_of_the_loss_are_compared_where_they_are_the_same_and_refused_elsewhere():
    noisy = drawing(lambda: torch.rand(()))
    testing.assert_compiles(*put_together(mlp(), noisy, pieces=1), rows())
    with pytest.raises(ValueError, match="the loss draws random numbers by itself"):
        testing.assert_compiles(*put_together(mlp(), noisy, pieces=3), rows())


def test_compiling_is_checked_of_looplibs_steps_over_two_steps_or_more():
    step, state = put_together(mlp())
    with pytest.raises(TypeError, match=r"got a Remembering that is no step of looplib.*ll.make_train_step"):
        testing.assert_compiles(Remembering(step), state, rows())
    with pytest.raises(ValueError, match="steps is 1; give 2 or more"):
        testing.assert_compiles(step, state, rows(), steps=1)


# processes


def begin(engine="ddp", loss_fn=token_loss):
    torch.manual_seed(0)
    model = Tagger(dropout=0.0).double()
    if ll.distributed.launched() and engine == "ddp":
        model = DistributedDataParallel(model)
    if ll.distributed.launched() and engine == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (ll.distributed.world_size(),)))
    grad_fn = ll.clip_by_global_norm(ll.make_grad_fn(model, loss_fn), 1.0)
    optimizer = adamw()
    batch = tokens(24)
    loader = ll.make_loader([{name: column[i] for name, column in batch.items()} for i in range(24)], batch_size=7)
    state = ll.init_state(model, optimizer, epoch_length=len(loader))
    return ll.make_train_step(grad_fn, optimizer, donate=True), state, loader


def begin_alone():
    return begin("nothing")


def begin_with_means():
    return begin("fsdp", token_mean)


@pytest.mark.slow
def test_ranks_that_reduce_train_as_one_process():
    testing.assert_ranks_train_alike(begin, ranks=2, steps=5)


@pytest.mark.slow
def test_ranks_that_each_train_a_model_of_their_own_are_found():
    with fails("the ranks' weights differ from those of rank 0", "rank 1: ", "gradients that nothing reduces"):
        testing.assert_ranks_train_alike(begin_alone)


@pytest.mark.slow
def test_ranks_that_are_alike_and_not_as_one_process_are_found():
    with fails(
        "after 3 steps 2 ranks have other weights than one process", "apart by", "return ll.Mean(total, weight)"
    ):
        testing.assert_ranks_train_alike(begin_with_means)
    with pytest.raises(TypeError, match="which a new process cannot import: put it at the top of a module"):
        testing.assert_ranks_train_alike(lambda: begin())
