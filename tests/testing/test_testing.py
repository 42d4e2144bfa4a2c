"""Each check passes a run that is put together well, and catches a step that was broken on purpose in its way."""

import copy
import dataclasses
import math
import random
import re
import warnings

import numpy as np
import pytest
import torch
from ranks import in_engine
from shared import SGD, bits, both_states, both_steps, mean_square
from shared import classify as mean_loss
from torch import nn
from torch.nn import functional as F

import looplib as ll
from looplib import testing


class Tagger(nn.Module):
    """A class for each token, from those up to it; in ragged rows, whose labels are -100 where there is none."""

    def __init__(self, dropout=0.0):
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


def adamw():
    return ll.chain(
        ll.optimizer(torch.optim.AdamW, lr=ll.schedules.warmup_linear(3e-2, warmup=3, total=500)), ll.ema(0.9)
    )


def put_together(model, loss_fn=mean_loss, optimizer=None, donate=False, microbatches=3):
    """With all that usually is in a training step."""
    optimizer = ll.chain(ll.clip_by_global_norm(1.0), optimizer or adamw())
    grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches)
    state = ll.init_state(model, optimizer, seed=3, extra={"note": "kept"})
    return ll.make_train_step(grad_fn, optimizer, donate=donate), state


def fails(*words):
    """Names and numbers that the message must have, in this order."""
    return pytest.raises(AssertionError, match=r"(?s)" + ".*".join(map(re.escape, words)))


@pytest.mark.slow
@both_steps
@both_states
def test_a_good_run_passes_every_check_and_is_left_as_it_was(donate, bound):
    torch.manual_seed(0)
    model, batch, optimizer = Tagger(0.2), tokens(), ll.chain(ll.clip_by_global_norm(1.0), adamw())
    grad_fn = ll.make_grad_fn(model, token_loss)
    step = ll.make_train_step(ll.accumulate(grad_fn, 3), optimizer, donate=donate)
    state = ll.init_state(model, optimizer, seed=3, extra={"note": "kept"})
    state = state if bound else ll.copy_state(state)
    kept, kept_batch = ll.copy_state(state), copy.deepcopy(batch)
    modes = [module.training for module in model.modules()]
    predict_step = ll.make_predict_step(model, lambda m, batch: m(batch["tokens"]))
    streams = (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist())  # noqa: NPY002
    testing.assert_pure(step, state, batch)
    testing.assert_pure(predict_step, state, batch)
    testing.assert_resumes(step, state, [batch] * 3)
    testing.assert_samples_independent(predict_step, state, batch)
    testing.assert_causal(lambda state, found: predict_step(state, {"tokens": found}), state, batch["tokens"])
    testing.assert_overfits(step, state, batch, steps=200, fraction=0.3)
    testing.assert_all_gradients(grad_fn, state, batch)
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0 if isinstance(module, nn.MultiheadAttention) else nn.Identity()
    testing.assert_microbatches_equal_batch(grad_fn, state, batch)
    testing.assert_compiles(step, state, batch)
    assert streams == (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist())  # noqa: NPY002
    assert bits((state, batch)) == bits((kept, kept_batch))
    assert modes == [module.training for module in model.modules()]
    step(state, batch)  # which is good still


def test_a_donated_step_spends_its_state_and_is_pure():
    step, state = put_together(mlp(), donate=True)
    testing.assert_pure(step, state, rows())


# a step that is not pure


class Counting(nn.Module):
    """A module whose output depends on how often it ran."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x / self.calls


class Remembering:
    """A train step as an object, with an average of its own."""

    def __init__(self, step):
        self.step, self.average = step, 0.0

    def __call__(self, state, batch):
        state, metrics = self.step(state, batch)
        self.average = 0.9 * self.average + 0.1 * ll.compute(metrics)["loss"]
        return state, {**metrics, "average": ll.Mean(self.average)}


def drawing(draw):
    return lambda model, batch: mean_loss(model, batch) * (1 + draw())


def with_loss(loss_fn, **options):
    return lambda donate: put_together(mlp(), loss_fn, donate=donate, **options)


def augmenting(donate):
    step, state = put_together(mlp(), donate=donate)
    return lambda state, batch: step(state, (batch[0] + torch.randn_like(batch[0]), batch[1])), state


def augmenting_in_a_fork(donate):
    step, state = augmenting(donate)

    def forked(state, batch):
        with torch.random.fork_rng():
            return step(state, batch)

    return forked, state


def remembering(donate):
    step, state = put_together(mlp(), donate=donate)
    return Remembering(step), state


def writing_to_the_state(donate):
    step, state = put_together(mlp(), donate=donate)

    def writing(state, batch):  # in a loss function, the step itself refuses it
        state.params["0.weight"].data.clamp_(-0.01, 0.01)
        return step(ll.copy_state(state), batch)

    return writing, state


def leaving_in_training_mode(donate):
    model = mlp(nn.Tanh())
    model[1].eval()
    eval_step = ll.make_eval_step(model, lambda model, batch: {"loss": mean_loss(model, batch)})

    def step(state, batch):
        model.train()  # within metric_fn, looplib would put the modes back
        return eval_step(state, batch)

    return step, ll.init_state(model)


def raw_loop(donate):
    """torch's own, that calls itself a step."""
    optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=0.1)

    def step(state, batch):
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        return state.replace(step=state.step + 1), {"loss": ll.Mean(loss.detach())}

    return step, ll.init_state(model)


IMPURE = [
    (with_loss(drawing(random.random)), ["global random stream", "Python's random"]),
    (with_loss(drawing(np.random.rand)), ["global random stream", "numpy.random"]),
    (lambda d: put_together(mlp(Counting()), donate=d), ["two calls", "/metrics/loss"]),
    (augmenting, ["global random stream", "torch's random stream on cpu"]),
    (augmenting_in_a_fork, ["two calls"]),
    (remembering, ["two calls", "/metrics/average: ", "numbers, by"]),
    (with_loss(lambda m, b: mean_loss(m, (b[0].mul_(2), b[1]))), ["wrote to its batch", "/0: 21 of 21 numbers, by"]),
    (writing_to_the_state, ["wrote to the state", "/params/0.weight: 17 of 18", "donate=True"]),
    (leaving_in_training_mode, ["belong to neither", "Sequential.1.training: False against True"]),
    (raw_loop, ["belong to neither", "Sequential.0.weight/numbers: 18 of 18", "Sequential.0.weight/grad"]),
]


@both_steps
def test_what_is_not_pure_is_named(donate):
    for make, named in IMPURE:
        step, state = make(donate)
        with fails(*named) as error:
            testing.assert_pure(step, state, rows())
        assert len(error.traceback.filter(error)) == 1  # pytest shows the line of the test


# a run that does not resume


@both_steps
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_resumes_across_the_end_of_an_epoch(donate, workers):
    loader = ll.make_loader(torch.utils.data.TensorDataset(*rows(11)), batch_size=4, seed=1, num_workers=workers)
    step, state = put_together(mlp(nn.BatchNorm1d(6), nn.Dropout()), donate=donate, microbatches=1)
    state = state.replace(epoch_length=len(loader), run=dataclasses.replace(state.run, loaders=(loader.description,)))
    testing.assert_resumes(step, state, loader, steps=5 if not workers else 3)


@both_steps
def test_what_is_not_in_the_checkpoint_is_named(donate):
    step, state = remembering(donate)
    with fails("after 1 batches", "/batch/2/metrics/average"):
        testing.assert_resumes(step, state, [rows()] * 5)


def test_what_a_checkpoint_lacks_is_not_taken_from_the_template(monkeypatch):
    model = mlp()
    nn.init.ones_(model[0].weight.requires_grad_(False))  # the same at the beginning and at the end
    restore = ll.checkpoint.CheckpointIO.restore

    def forgetful(ckpt, state, **options):
        restored = restore(ckpt, state, **options)
        return restored.replace(params={**restored.params, "0.weight": state.params["0.weight"]})

    monkeypatch.setattr(ll.checkpoint.CheckpointIO, "restore", forgetful)
    with fails("after 1 batches", "/batch/2/metrics/loss"):
        testing.assert_resumes(*put_together(model), [rows()] * 3)


# samples that see each other, and positions that see the future


SEE_EACH_OTHER = [
    lambda x: x.flatten(1).softmax(0),
    lambda x: x + 1e-3 * x.roll(1, 0),  # beside the next sample
    lambda x: x[:, :1, :1].squeeze(),
    lambda x: x.unflatten(0, (-1, 2)).sum(1).repeat_interleave(2, 0) if len(x) % 2 == 0 else x,  # pairs
]


def test_samples_that_see_each_other_are_found():
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    for fault in SEE_EACH_OTHER:

        def predict_fn(model, batch, fault=fault):
            return {"deep": (model(batch["x"]), fault(model(batch["x"])))}

        predict_step, state = ll.make_predict_step(model := nn.Linear(4, 4), predict_fn), ll.init_state(model)
        with fails("samples of a batch see each other", "output['deep'][1]: "):
            testing.assert_samples_independent(predict_step, state, {"x": x})


def test_a_model_that_insists_on_float32_is_judged_in_float32():
    for cast in (lambda x: x.float(), lambda x: x.bfloat16().float()):
        function = ll.make_predict_step(model := mlp(), lambda model, batch, cast=cast: cast(model(batch[0])))
        testing.assert_samples_independent(function, ll.init_state(model), rows(32))


class Rounding(nn.Module):
    """Rounds as some kernels do: differently in a batch of a different size."""

    def forward(self, x):
        self.dtype = x.dtype
        return x / (4 + len(x)) * (4 + len(x))


def test_without_a_tolerance_bits_are_compared_in_float32_and_the_first_module_that_changes_them_is_named():
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Tanh(), Rounding()), Rounding())
    state, x = ll.init_state(model), torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    testing.assert_samples_independent(predict_step, state, x)
    assert model[2].dtype == torch.float64
    with fails(
        "samples of a batch see each other",
        "when they stand in a batch of half the size",
        "The first module that does so is 1.1 (Rounding)",
    ):
        testing.assert_samples_independent(predict_step, state, x, tolerance=0)
    assert model[2].dtype == torch.float32
    exact = ll.make_predict_step(model, lambda model, x: model[0](model[1][0](x)))
    testing.assert_samples_independent(exact, state, x, tolerance=0)


def test_what_happens_outside_of_modules_names_none():
    model = nn.Linear(4, 4)
    predict_step = ll.make_predict_step(model, lambda model, x: x + model(x).mean(0))
    with pytest.raises(AssertionError) as caught:
        testing.assert_samples_independent(predict_step, ll.init_state(model), torch.randn(6, 4))
    assert "first module" not in str(caught.value)


SEE_THE_FUTURE = [
    lambda x: x.softmax(1),
    lambda x: F.conv1d(x.mT, x.new_ones(4, 4, 3), padding=1).mT,
    lambda x: x + x[:, -1:],
]


def test_positions_that_see_the_future_are_found():
    for fault in SEE_THE_FUTURE:
        model = nn.Linear(4, 4)
        predict_step = ll.make_predict_step(model, lambda model, x, fault=fault: (model(x), fault(model(x))))
        with fails("outputs see the future", "before position 1", "output[1]: "):
            testing.assert_causal(predict_step, ll.init_state(model), torch.randn(3, 8, 4))


# a run that does not learn


def learn(loss_fn=mean_loss, **options):
    optimizer = ll.chain(ll.skip_nonfinite(max_consecutive=99), ll.optimizer(torch.optim.Adam, lr=0.05))
    step, state = put_together(mlp(nn.Tanh()), loss_fn, optimizer, donate=True, microbatches=1)
    testing.assert_overfits(step, state, rows(), **options)


def random_labels(model, batch):
    return mean_loss(model, (batch[0], torch.randint(0, 2, (7,))))


def density(model, batch):
    return (model(batch[0]) - 1).square().mean() - 5


def test_what_does_not_learn_is_told_with_its_curve():
    for options, named in (
        (
            {"loss_fn": random_labels, "steps": 40},
            ["in 40 steps: ", "a loss of 0.", "in step 1", "in step 40"],
        ),
        ({"loss_fn": lambda m, b: mean_loss(m, b) * torch.inf, "steps": 5}, ["in 1 steps", "loss inf in step 1"]),
        ({"loss_fn": density, "below": -5.5, "steps": 5}, ["a loss of -5.5"]),
    ):
        with fails(*named):
            learn(**options)


def test_other_goals_can_be_reached():
    learn(density, below=-4.9)
    learn(lambda m, b: (mean_loss(m, b), {"shown": mean_loss(m, b)}), metric="shown")


# microbatches that do not add up to the batch


def token_mean(model, batch):  # wrong for ragged samples: it weighs by samples
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def contrastive(model, batch):
    z = model(batch[0])
    return F.cross_entropy(z @ z.mT, torch.arange(len(z)))


def row_sum(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def test_microbatches_are_compared_in_float64():
    """Sums in another order differ by some 1e-7 in float32, and by 1e-16 in float64."""
    model = mlp()
    grad_fn = ll.make_grad_fn(model, mean_loss)
    testing.assert_microbatches_equal_batch(grad_fn, ll.init_state(model), rows(), tolerance=1e-12)


def test_microbatches_that_differ_are_found():
    for model, loss_fn, batch, named in (
        (Tagger(), token_mean, tokens(), ["embed.weight", "return ll.Mean(total, weight)"]),
        (mlp(), row_sum, rows(), ["0.weight", "a sum over the samples"]),
        (mlp(), lambda model, batch: 1e-6 * row_sum(model, batch), rows(), ["0.weight"]),
        (mlp(), contrastive, rows(), ["0.weight", "contrastive"]),
        (mlp(nn.BatchNorm1d(6)), mean_loss, rows(), ["0.weight", "1.running_mean", "BatchNorm", "SyncBatchNorm"]),
    ):
        with fails("3 microbatches of 7 samples", *named):
            testing.assert_microbatches_equal_batch(ll.make_grad_fn(model, loss_fn), ll.init_state(model), batch)


# parameters without a gradient


class Branches(nn.Module):
    FAULTS = {  # noqa: RUF012
        "detached": torch.Tensor.detach,
        "dead": lambda hidden: (hidden - 100).relu(),
        "nan": lambda hidden: torch.where(hidden > -100, hidden, (hidden - hidden).sqrt()),
    }

    def __init__(self, fault="", frozen=False):
        super().__init__()
        self.first, self.second, self.unused, self.fault = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2), fault
        self.first.requires_grad_(not frozen)

    def forward(self, x):
        hidden = self.FAULTS.get(self.fault, lambda hidden: hidden)(self.first(x))
        return self.second(hidden if self.fault == "unused" else hidden + self.unused(hidden[:, :2]).mean())


def check_gradients(model, frozen=None):
    grad_fn = ll.accumulate(ll.make_grad_fn(model, mean_loss, allow_unused=True), 2)
    testing.assert_all_gradients(grad_fn, ll.init_state(model), rows(), frozen=frozen)


def first(name, tensor):
    return name.startswith("first")


def test_parameters_without_the_gradient_that_they_should_have_are_named():
    for model, frozen, named in (
        (Branches("unused"), None, ["2 of 6 parameters", "unused.weight: has no gradient, the loss", "unused.bias"]),
        (Branches("detached"), None, ["2 of 6 parameters", "first.weight: has no gradient, the loss", ".detach()"]),
        (Branches("dead"), None, ["first.weight: all of its 12 numbers are zero", "first.bias: all of its 4"]),
        (Branches("nan"), None, ["first.weight: 12 of 12 numbers are NaN or infinite"]),
        (Branches(frozen=True), None, ["first.weight: has no gradient, it does not require one", "frozen=lambda"]),
        (Branches(), first, ["first.weight: has a gradient, and is to be frozen"]),
    ):
        with fails(*named):
            check_gradients(model, frozen)
    check_gradients(Branches())
    check_gradients(Branches(frozen=True), first)


# a step that cannot be compiled whole


def scheduled(**options):
    return ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(1e-2, warmup=3, total=8, final=1e-3), **options)


def by_a_number(model, batch):
    loss = mean_loss(model, batch)
    return loss * math.exp(loss.item())


def forgetting(part):
    """An update that does another thing while it is written down, in what the metrics do not show."""
    inner = ll.chain(scheduled(), ll.ema(0.9))

    def update_(grads, state, params, step, **info):
        before = {key: tensor.detach().clone() for key, tensor in params.items()}
        average = {key: tensor.clone() for key, tensor in state["ema"]["average"]["params"].items()}
        new, later, _ = inner.update_(grads, state, params, step, **info)
        if torch.compiler.is_compiling():
            forgotten = {**later["ema"], "average": {"params": average}}
            later = {**later, "ema": forgotten} if part == "average" else later
            new = before if part == "weights" else new
        return new, later

    return ll.optim.part("forgetting", init=inner.init, transform=inner.transform, update_=update_, role="weights")


def with_optimizer(optimizer):
    return lambda donate: put_together(mlp(), optimizer=optimizer, donate=donate)


NOT_COMPILED = [
    (with_loss(by_a_number), ["whole", "test_testing.py:", "loss.item()", "block.compile()"]),
    (lambda d: put_together(mlp(Counting()), donate=d), ["whole", "1.calls"]),
    (with_optimizer(ll.optimizer(torch.optim.SGD, lr=lambda step: step + 1)), ["in step 2: 2 graphs", "schedules"]),
    (with_loss(drawing(random.random)), ["after step 1", "/metrics/loss: "]),
    (
        with_optimizer(forgetting("average")),
        ["not the eager one: after step", "/opt_state/forgetting/ema/average/params"],
    ),
    (with_optimizer(forgetting("weights")), ["not the eager one: after step", "/params/0.weight"]),
]


@both_steps
@pytest.mark.parametrize(("make", "named"), NOT_COMPILED)
def test_what_does_not_compile_or_compiles_to_something_else_is_named(make, named, donate):
    step, state = make(donate)
    with fails(*named):
        testing.assert_compiles(step, state, rows())


def test_a_step_that_is_compiled_already_is_refused():
    step, state = put_together(mlp())
    with pytest.raises(TypeError, match="assert_compiles got a step of graphs"):
        testing.assert_compiles(ll.compile_step(step, backend="eager"), state, rows())


def test_a_number_that_changes_is_named_also_where_warnings_are_not_shown():
    factors = [1.0]

    def schedule(step):
        factors[0] = step + 1.0
        return 0.1

    optimizer = ll.optimizer(torch.optim.SGD, lr=schedule)
    step, state = put_together(mlp(), lambda model, batch: mean_loss(model, batch) * factors[0], optimizer)
    with warnings.catch_warnings(), fails("again in step", "factors[0] changed since the step was compiled"):
        warnings.simplefilter("ignore")
        testing.assert_compiles(step, state, rows())


@pytest.mark.slow
def test_a_switch_on_the_way_is_allowed_for():
    step, state = put_together(mlp(), optimizer=ll.chain(scheduled(), ll.optim.swa(start=5, every=100)))
    with fails("again in step 5", "programs="):
        testing.assert_compiles(step, state, rows())
    testing.assert_compiles(step, state, rows(), steps=4)
    testing.assert_compiles(step, state, rows(), programs=2)


# what a check cannot check


class Stream:
    def __iter__(self):
        return zip(*rows(), strict=True)


def predicting(function):
    return lambda check, batch: check(ll.make_predict_step(model := mlp(), function), ll.init_state(model), batch)


def on_grads(wrap=lambda grad_fn: grad_fn, loss_fn=mean_loss, **options):
    def call(check, batch):
        check(wrap(ll.make_grad_fn(model := mlp(), loss_fn)), ll.init_state(model), batch, **options)

    return call


def on_step(wrap=lambda step: step, **options):
    def call(check, batch):
        step, state = put_together(mlp())
        check(wrap(step), state, batch, **options)

    return call


def noisy(model, batch):
    return mean_loss(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))


def test_what_cannot_be_checked_is_refused():
    falling = put_together(mlp(), lambda model, batch: model(batch[0]).mean() - 9)[0]
    for check, call, batch, error, named in (
        ("samples_independent", predicting(lambda m, b: (b[0], b[0].mean())), rows(), ValueError, r"output\[1\].*7"),
        ("causal", predicting(lambda m, x: m(x)), torch.ones(2, 4, 3), ValueError, "position 1"),
        ("causal", predicting(lambda m, x: m(x)), torch.randn(2, 1, 3), ValueError, r"\(2, 1, 3\).*length 2"),
        ("causal", predicting(lambda m, x: m(x).mean(1)), torch.randn(2, 4, 3), ValueError, r"\(2, 2\).*\(2, 4\)"),
        ("samples_independent", predicting(lambda m, x: m(x)), rows()[0][:1], ValueError, "1 row"),
        ("microbatches_equal_batch", on_grads(microbatches=8), rows(), ValueError, "microbatches is 8.* 7 samples"),
        ("microbatches_equal_batch", on_grads(ll.contrib.sam), rows(), ValueError, "sam within accumulate"),
        ("overfits", on_step(metric="nothing"), rows(), ValueError, "no metric 'nothing'; it has loss"),
        ("overfits", on_step(lambda step: falling), rows(), ValueError, "first loss .*below="),
        (
            "compiles",
            on_step(lambda step: ll.compile_step(step, backend="eager")),
            rows(),
            TypeError,
            "compiled already",
        ),
        ("microbatches_equal_batch", on_grads(loss_fn=noisy), rows(), ValueError, "0.weight.* state.seed"),
        ("all_gradients", on_grads(frozen=lambda name, tensor: False), rows(), ValueError, "0.weight"),
        ("resumes", on_step(), [rows()], ValueError, "steps is 1"),
        ("resumes", on_step(), ll.make_loader(Stream(), batch_size=2), ValueError, "after 4 .* steps is 6"),
        ("compiles", on_step(Remembering), rows(), TypeError, "Remembering"),
        ("compiles", on_step(steps=1), rows(), ValueError, "steps is 1"),
    ):
        with pytest.raises(error, match=named):
            call(getattr(testing, f"assert_{check}"), batch)
    with pytest.raises(TypeError, match="lambda"):
        testing.assert_ranks_train_alike(lambda: begin())


# processes


def begin():
    torch.manual_seed(0)
    model = in_engine(Tagger().double(), "fsdp" if ll.distributed.launched() else None)
    grad_fn = ll.make_grad_fn(model, token_loss)
    optimizer = ll.chain(ll.clip_by_global_norm(1.0), adamw())
    batch = tokens(24)
    loader = ll.make_loader([{name: column[i] for name, column in batch.items()} for i in range(24)], batch_size=7)
    state = ll.init_state(model, optimizer, loader=loader)
    return ll.make_train_step(grad_fn, optimizer, donate=True), state, loader


def test_ranks_meet_at_a_free_port(monkeypatch):
    ports = []
    of_the_check = testing.assert_ranks_train_alike.__globals__
    monkeypatch.setitem(of_the_check, "spawn", lambda run, arguments, nprocs: ports.append(arguments[3]))
    with pytest.raises(FileNotFoundError):  # which the ranks would have written
        testing.assert_ranks_train_alike(begin)
    assert ports[0] >= 1024


def test_weights_that_differ_between_ranks_or_from_those_of_one_process_are_found(monkeypatch):
    def ranks_that_add(*numbers):
        def spawn(run, arguments, nprocs):
            begin, _, steps, _, folder, _ = arguments
            step, state, loader = begin()
            for batch, _ in zip(loader(state), range(steps), strict=False):
                state, _ = step(state, batch)
            for rank, number in enumerate(numbers):
                weights = {name: param.detach() + number for name, param in state.params.items()}
                torch.save(weights, f"{folder}/{rank}.pt")

        monkeypatch.setitem(testing.assert_ranks_train_alike.__globals__, "spawn", spawn)

    ranks_that_add(0.0, 0.0)
    testing.assert_ranks_train_alike(begin)
    ranks_that_add(0.0, 0.1)
    with fails("differ from those of rank 0", "/rank 1/"):
        testing.assert_ranks_train_alike(begin)
    ranks_that_add(0.1, 0.1)
    with fails("after 3 steps 2 ranks have other weights than one process", "/embed.weight: "):
        testing.assert_ranks_train_alike(begin)


@pytest.mark.slow
def test_ranks_that_reduce_train_as_one_process():
    testing.assert_ranks_train_alike(begin, ranks=2, steps=5)


def test_a_wrapper_that_keeps_parameters_or_buffers_is_found_by_its_donated_step():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state, batches = ll.init_state(model, SGD), torch.randn(3, 5, 3)
    grad_fn = ll.make_grad_fn(model, mean_square)
    before = bits(state)
    testing.assert_donated_equals_pure(grad_fn, SGD, state, batches)
    assert bits(state) == before

    last = []

    def pulled(state, batch, **request):  # towards the last step's weights, which a donated step overwrites
        out = grad_fn(state, batch, **request)
        if state.step == 0:
            last.clear()
        earlier, last[:] = (last or [state.params["0.weight"]])[0], [state.params["0.weight"].detach()]
        return out._replace(grads={**out.grads, "0.weight": out.grads["0.weight"] + earlier})

    with pytest.raises(
        AssertionError, match=r"after step \d, a donated step differs from a pure one(.|\n)*tensor.clone"
    ):
        testing.assert_donated_equals_pure(pulled, SGD, state, batches)

    def watched(state, batch, **request):
        out = grad_fn(state, batch, **request)
        return out._replace(metrics={**out.metrics, "mean": ll.Mean(out.buffers["1.num_batches_tracked"])})

    with pytest.raises(AssertionError, match="have changed since"):
        testing.assert_donated_equals_pure(watched, SGD, state, batches)
