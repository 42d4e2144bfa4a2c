"""One case for each public name that computes with tensors: a function of a device, whose result has the same bits on
each. `test_cases.py` runs them on the CPU and on the far device, and looks for names that have neither a case nor a
reason in `EXCEPTIONS`.
"""

import functools
import tempfile
from pathlib import Path

import torch
from shared import classify as loss_fn
from torch.nn import functional as F

import looplib as ll

CASES = {}


def case(*names):
    """Register a case under the names that it shows."""

    def register(function):
        for name in names:
            CASES[name] = function
        return function

    return register


# What the cases train.

ADAMW = ll.optimizer(torch.optim.AdamW, lr=0.01)
SGD = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)


def classifier(device, dtype=torch.float32):
    torch.manual_seed(0)
    layers = (
        torch.nn.Linear(4, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(8, 3),
    )
    return torch.nn.Sequential(*layers).to(device, dtype)


def plain(device):
    """Without BatchNorm, for what computes the gradient of each sample, or of stacked ones in another order."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(device)


def dropping(device):
    model = plain(device)
    model[1] = torch.nn.Dropout(0.5)
    return model


def language_model(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)).to(device)


@functools.cache
def samples(count=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def data(device, count=24):
    return tuple(column.to(device, copy=True) for column in samples(count))


def batches(device, size=8):
    x, y = data(device)
    return list(zip(x.split(size), y.split(size), strict=True))


def tokens(device):
    return torch.randint(0, 8, (4, 6), generator=torch.Generator().manual_seed(2)).to(device)


def metric_fn(model, batch):
    return {"accuracy": ll.accuracy(model(batch[0]), batch[1]), "loss": loss_fn(model, batch)}


def started(device, optimizer=ADAMW, make=classifier, **options):
    model = make(device)
    return model, ll.init_state(model, optimizer, **options)


def train(
    device, grads=lambda grad_fn: grad_fn, optimizer=ADAMW, loss=loss_fn, make=classifier, donate=False, of=batches
):
    """A short run: the last state and the metrics of the last step."""
    model, state = started(device, optimizer, make)
    step = ll.make_train_step(grads(ll.make_grad_fn(model, loss)), optimizer, donate=donate)
    for batch in of(device):
        state, metrics = step(state, batch)
    return state, ll.compute(metrics)


def both(device, **options):
    """A short run with pure steps, and one with donated ones."""
    return [train(device, donate=donate, **options) for donate in (False, True)]


def scores(device):
    generator = torch.Generator().manual_seed(3)
    score = torch.rand(32, generator=generator)
    label = (torch.rand(32, generator=generator) < score).float()
    return score.to(device), label.to(device), torch.rand(32, generator=generator).to(device)


def in_folder(function):
    """A case that gets a folder as well."""

    @functools.wraps(function)
    def with_folder(device):
        with tempfile.TemporaryDirectory() as folder:
            return function(device, Path(folder))

    return with_folder


# Steps, gradients and states.


@case("gradients.make_grad_fn", "state.init_state")
def _(device):
    model, state = started(device)
    return ll.make_grad_fn(model, loss_fn)(state, data(device)), state


@case("steps.make_train_step")
def _(device):
    return both(device), both(device, optimizer=SGD)


@case("updates.apply_gradients")
def _(device):
    found = []
    for donate in (False, True):
        model, state = started(device)
        grad_fn = ll.make_grad_fn(model, loss_fn)
        gradients = grad_fn(state, data(device), donate=donate)
        state, _ = ll.apply_gradients(ADAMW, state, gradients, donate=donate, samples=8)
        kept = {name: torch.full_like(tensor, 0.5) for name, tensor in state.buffers.items()}
        grads = {name: torch.full_like(tensor, 0.1) for name, tensor in state.params.items()}
        found.append(ll.apply_gradients(ADAMW, state, grads, donate=donate, buffers=kept)[0])
    return found


@case("state.bind", "state.copy_state", "state.end_epoch")
def _(device):
    model, state = started(device)
    kept = ll.copy_state(state)
    torch.nn.init.zeros_(model[0].weight)
    bound = ll.bind(model, kept.replace(batch=3))
    return ll.state.end_epoch(bound), model[0].weight


@case("state.fresh", "state.graft", "state.apply")
def _(device):
    model, _ = started(device)
    optimizer = ll.chain(ll.optimizer(torch.optim.Adam, lr=0.1), ll.ema(0.9))
    state = ll.state.fresh(ll.init_state(model), optimizer, seed=1)
    name = next(iter(state.params))
    taken = ll.optim.take_rows(
        optimizer, state, {name: torch.tensor([1, 0])}, append={name: torch.ones_like(state.params[name][:2])}
    )
    grafted = ll.state.graft(state, ll.init_state(model, optimizer))
    average = ll.optim.average(optimizer, grafted.state)
    with torch.no_grad():
        out = ll.state.apply(model.eval(), {**state.params, **average}, data(device)[0])
    return state, taken, grafted.state, average, out


# Gradients.


@case("grads.accumulate")
def _(device):
    return [
        train(device, lambda g: ll.accumulate(g, 3), donate=True),
        train(device, lambda g: ll.accumulate(g, size=2)),
    ]


@case("grads.backward")
def _(device):
    model, added = classifier(device), []
    grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), 3)
    for step, batch in enumerate(batches(device)):
        metrics = ll.grads.backward(grad_fn, model, batch, step=step)
        added.append([parameter.grad.clone() for parameter in model.parameters()])
    return added, metrics["loss"].total, dict(model.named_buffers())


WRAPPED = {
    "grads.reduce_gradients": [lambda g: ll.grads.reduce_gradients(ll.accumulate(g, 2))],
    "contrib.sam": [ll.contrib.sam, lambda g: ll.contrib.sam(g, adaptive=True)],
}
for name, wrappers in WRAPPED.items():
    case(name)(lambda device, wrappers=wrappers: [both(device, grads=wrapper) for wrapper in wrappers])


# Losses.


@case("losses.autocast")
def _(device):
    return both(device, loss=ll.autocast(loss_fn))


@case("losses.next_token_loss", "metrics.perplexity")
def _(device):
    def loss(model, batch):
        return ll.next_token_loss(model(batch), batch)

    def of_head(model, batch):
        return ll.next_token_loss(model[0](batch), batch, head=model[1])

    runs = [
        train(device, loss=one, make=language_model, of=lambda device: [tokens(device)] * 2)
        for one in (loss, of_head)
    ]
    return runs, ll.metrics.perplexity(loss(language_model(device), tokens(device))).compute()


# Optimizers.


@case("optim.optimizer")
def _(device):
    classes = [
        (torch.optim.SGD, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {"foreach": True}),  # torch's default there, and not on the CPU
        (torch.optim.RAdam, {"foreach": True}),
        (torch.optim.ASGD, {"foreach": True}),
        (torch.optim.Rprop, {}),
        (torch.optim.LBFGS, {"max_iter": 3}),
    ]
    optimizers = [
        ll.optimizer(cls, lr=lr, **options)
        for cls, options in classes
        for lr in (0.01, lambda step: 0.1 / (1 + step))
    ]
    return [both(device, optimizer=optimizer) for optimizer in optimizers]


@case("optim.dynamic_loss_scale")
def _(device):
    optimizer = ll.chain(ll.optim.dynamic_loss_scale(2.0**127, growth_interval=2), ADAMW)  # the first step overflows
    return both(device, optimizer=optimizer)


@case("optim.skip_nonfinite", "optim.chain", "optim.NonFiniteGradientsError")
def _(device):
    optimizer = ll.chain(ll.skip_nonfinite(1), ADAMW)
    runs = both(device, optimizer=optimizer, of=with_infinity)
    try:
        train(device, optimizer=optimizer, of=lambda device: with_infinity(device)[1:2] * 3)
    except ll.optim.NonFiniteGradientsError as error:
        return runs, str(error)


def with_infinity(device):
    first, (x, y), third = batches(device)
    return first, (x / 0, y), third


OPTIMIZERS = {
    "optim.swa": ll.chain(ADAMW, ll.optim.swa(start=1, buffers=True)),
    "optim.offload_state": ll.chain(
        ll.clip_by_global_norm(0.1), ll.optim.offload_state(ADAMW, buffer_bytes=200), ll.ema(0.9)
    ),
    "optim.own_steps": ll.optim.own_steps(ll.optimizer(torch.optim.SGD, lr=lambda step: 0.1 / (1 + step))),
    "optim.partition": ll.optim.partition({"2": SGD, "1": ADAMW}, lambda name, tensor: str(tensor.ndim)),
}
CLIPPED = {
    "optim.clip_by_global_norm": [ll.clip_by_global_norm(0.1), ll.clip_by_global_norm(0.1, 1)],
    "optim.clip_by_norm": [ll.optim.clip_by_norm(0.01)],
    "optim.clip_by_value": [ll.optim.clip_by_value(0.01)],
}
for name, parts in CLIPPED.items():
    case(name)(lambda device, parts=parts: [both(device, optimizer=ll.chain(part, ADAMW)) for part in parts])


@case("optim.every")
def _(device):
    return [both(device, optimizer=ll.optim.every(SGD, 2, gradients=which)) for which in ("mean", "last")]


@case("optim.part")
def _(device):
    def init(params):
        return {name: tensor.detach().clone() for name, tensor in params.items()}

    def transform(grads, state, params, step):
        norm = ll.optim.global_norm(grads.values())
        return ll.types.Transformed(grads, state, apply=norm < 100, carry=norm)

    def update_(grads, state, params, step, carry):
        for name, tensor in state.items():
            params[name].add_(tensor * carry, alpha=1e-3)
        return params, state, {"norm": carry}

    own = ll.optim.part("own", init=init, transform=transform, update_=update_, role="weights")
    return both(device, optimizer=own)


for name, optimizer in OPTIMIZERS.items():
    case(name)(functools.partial(both, optimizer=optimizer))


@case("optim.ema", "optim.ema_warmup", "optim.eval_state")
def _(device):
    optimizers = (
        ll.chain(ADAMW, ll.ema(0.9)),
        ll.chain(ADAMW, ll.ema(ll.optim.ema_warmup(0.9), buffers=True, every=2)),
        ll.chain(ll.skip_nonfinite(1), SGD, ll.ema(0.5)),
    )
    runs = [
        (optimizer, run) for optimizer in optimizers for run in both(device, optimizer=optimizer, of=with_infinity)
    ]
    return [(ll.eval_state(optimizer, state), state, metrics) for optimizer, (state, metrics) in runs]


@case("optim.inject", "optim.hyperparameters", "optim.set_hyperparameters")
def _(device):
    optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.optim.inject(0.01), weight_decay=ll.optim.inject(0.1))
    state, metrics = train(device, optimizer=optimizer)
    state = ll.optim.set_hyperparameters(state, lr=lambda lr: lr / 2)
    return state, metrics, ll.optim.hyperparameters(optimizer, state)


@case("optim.reduce_on_plateau")
def _(device):
    optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.optim.inject(0.01))
    state, metrics = train(device, optimizer=optimizer)
    state = state.replace(extra={"plateau": ll.predicates.Plateau("loss", patience=0)})
    for _ in range(2):
        state = ll.optim.reduce_on_plateau(state, metrics, factor=0.5)
    return state, ll.optim.hyperparameters(optimizer, state)


@case("optim.average", "optim.take_rows")
def _(device):
    optimizer = ll.chain(ll.optimizer(torch.optim.AdamW, lr=0.01), ll.ema(0.5))
    state, _ = train(device, optimizer=optimizer, make=plain)
    first = next(name for name, tensor in state.params.items() if tensor.ndim == 2)
    rows = torch.arange(len(state.params[first]), device=device) > 0
    return ll.optim.average(optimizer, state), ll.optim.take_rows(optimizer, state, {first: rows})


@case("optim.where")
def _(device):
    return ll.optim.where(torch.tensor(True, device=device), {"x": data(device)[0]}, {"x": data(device)[0] * 2})


# Methods.


@case("contrib.make_per_sample_grad_fn", "contrib.clip_per_sample", "contrib.add_noise")
def _(device):
    model, state = started(device, make=plain)
    grad_fn = ll.contrib.clip_per_sample(ll.contrib.make_per_sample_grad_fn(model, loss_fn), max_norm=0.5)
    grad_fn = ll.contrib.add_noise(ll.accumulate(grad_fn, size=16), max_norm=0.5, noise_multiplier=1.1)
    return grad_fn(state, data(device))


@case("contrib.make_contrastive_grad_fn")
def _(device):
    model, state = started(device, make=plain)
    grad_fn = ll.contrib.make_contrastive_grad_fn(
        model,
        lambda model, x: F.normalize(model(x)),
        lambda out: F.cross_entropy(out @ out.T, torch.arange(len(out), device=out.device)),
        microbatches=3,
    )
    return grad_fn(state, data(device)[0])


@case("contrib.sample_influence")
def _(device):
    model = plain(device)
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 24).view(6, 4), torch.arange(6) % 3)
    loader = ll.make_loader(data, batch_size=3, device=device)

    def weighted(model, batch):
        (x, y), weights = batch
        return (weights * F.cross_entropy(model(x), y, reduction="none")).mean()

    step = ll.make_train_step(ll.make_grad_fn(model, weighted), SGD)
    state = ll.init_state(model, SGD, epoch_length=2)
    return ll.contrib.sample_influence(step, state, loader, lambda state: state.params["0.weight"].square().sum(), 3)


# Metrics.


@case("metrics.Mean", "metrics.merge", "metrics.compute", "metrics.Reading", "metrics.mae", "metrics.mse", "metrics.rmse",
      "metrics.calibration", "metrics.AUC")  # fmt: skip
def _(device):
    def of(score, label, weight):
        return {
            "mean": ll.Mean(score.sum(), weight.sum()),
            "mae": ll.metrics.mae(score, label, weight),
            "mse": ll.metrics.mse(score, label),
            "rmse": ll.metrics.rmse(score, label, weight),
            "calibration": ll.metrics.calibration(score, label, weight),
            "auc": ll.metrics.AUC.of(score, label),
        }

    halves = zip(*(column.split(16) for column in scores(device)), strict=True)
    merged = ll.metrics.merge(*(of(*half) for half in halves))
    return merged, ll.compute(merged)


@case("metrics.GroupedAUC")
def _(device):
    score, label, _ = scores(device)
    record = ll.metrics.GroupedAUC.of(score, label, torch.arange(32, device=device) // 8)
    return record, record.compute(), record.left_out(), record.number_of_groups()


@case("metrics.accuracy", "metrics.ConfusionMatrix")
def _(device):
    model, (x, y) = plain(device), data(device)
    matrix = ll.metrics.ConfusionMatrix.of(model(x).argmax(1), y, classes=3)
    metrics = {"accuracy": ll.accuracy(model(x), y, top_k=2), "matrix": matrix}
    return metrics, matrix.matrix, ll.compute(metrics), matrix.macro_f1()


@case("metrics.Cat")
def _(device):
    model, state = started(device)[:2]
    step = ll.make_eval_step(model, lambda model, batch: {"outputs": ll.metrics.Cat(model(batch[0]))})
    return ll.evaluation.evaluate_records(step, state, batches(device, 2))["outputs"].compute()


# Evaluation and prediction.


@case("evaluation.evaluate", "evaluation.evaluate_records", "steps.make_eval_step")
def _(device):
    model, state = started(device)
    step = ll.make_eval_step(model, metric_fn)
    return ll.evaluate(step, state, batches(device)), ll.evaluation.evaluate_records(step, state, batches(device))


@case("evaluation.recompute_batch_norm")
def _(device):
    model, state = started(device)
    return ll.evaluation.recompute_batch_norm(model, state, batches(device))


def predict_fn(model, batch):
    logits = model(batch[0])
    return {"logits": logits, "class": logits.argmax(1)}


@case("evaluation.predict", "steps.make_predict_step")
def _(device):
    model, state = started(device)
    return list(ll.predict(ll.make_predict_step(model, predict_fn), state, batches(device), device=device))


@case("evaluation.predict_to", "evaluation.read_predictions")
@in_folder
def _(device, folder):
    model, state = started(device)
    path = ll.evaluation.predict_to(folder / "out", ll.make_predict_step(model, predict_fn), state, batches(device))
    return ll.evaluation.read_predictions(path)


# Data.


@case("data.make_loader", "data.Loader", "data.count_samples")
def _(device):
    loader = ll.make_loader(torch.utils.data.TensorDataset(*samples()), batch_size=8, device=device)
    state = started(device, epoch_length=3)[1]
    one, *others = loader(state)
    return one, others, ll.data.count_samples(one)


# Checkpoints.


@case("checkpoint.checkpoint_io", "checkpoint.CheckpointIO")
@in_folder
def _(device, folder):
    optimizer = ll.chain(ADAMW, ll.ema())
    model, fresh = started(device, optimizer)
    state, _ = train(device, optimizer=optimizer)
    ckpt = ll.checkpoint_io(folder)
    ckpt.save(state)
    bound = ckpt.restore(fresh)
    return ll.copy_state(bound), ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)(
        bound, data(device)
    )[0]


@case("checkpoint.capture", "checkpoint.reinstate")
def _(device):
    model, other = plain(device), plain(device)
    with torch.no_grad():
        model[0].weight.add_(1)
    ll.checkpoint.reinstate(ll.checkpoint.capture(model=model), model=other)
    return other[0].weight


@case("checkpoint.RandomStreams")
def _(device):
    state = ll.checkpoint.RandomStreams().state_dict()
    first = torch.rand(3, device=device)
    ll.checkpoint.RandomStreams().load_state_dict(state)
    return first, torch.rand(3, device=device)


@case("checkpoint.state_dict", "checkpoint.load_state_dict")
def _(device):
    model, state = started(device)
    trained, _ = train(device)
    loaded = ll.checkpoint.load_state_dict(model, state, ll.checkpoint.state_dict(model, trained))
    return loaded, ll.checkpoint.state_dict(model, trained)


@case("checkpoint.iter_weights")
def _(device):
    model, _ = started(device)
    return dict(ll.checkpoint.iter_weights(model, train(device)[0]))


@case("checkpoint.optimizer_state_dict", "checkpoint.load_optimizer_state_dict")
def _(device):
    trained, _ = train(device)
    model, state = started(device)
    raw = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept = ll.checkpoint.optimizer_state_dict(model, trained, raw)
    raw.load_state_dict(kept)
    return kept, ll.checkpoint.load_optimizer_state_dict(model, state.replace(step=3), raw)


# Looking into a run.


@case("debug.fingerprint")
def _(device):
    return ll.debug.fingerprint(train(device)[0])


@case("debug.worst_samples", "debug.SampleScore")
def _(device):
    model, state = started(device, make=plain)
    return ll.debug.worst_samples(
        ll.make_grad_fn(model, loss_fn), state, data(device), torch.arange(24, device=device)
    )


@case("debug.run_twice", "debug.checksums")
def _(device):
    optimizer = ll.chain(ll.debug.checksums(), ll.optimizer(torch.optim.SGD, lr=0.1))
    model, state = started(device, optimizer, plain)
    step = ll.debug.run_twice(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer), every=1)
    for batch in batches(device):
        state, metrics = step(state, batch)
    return state, ll.compute(metrics)


# Stacks and derivatives of steps.


@case("transforms.vmap_step", "transforms.stack_states", "transforms.unstack_states",
      "transforms.compute_members", "transforms.per_member")  # fmt: skip
def _(device):
    rates = ll.transforms.per_member([0.01, 0.1, 0.2])
    changing = ll.optimizer(torch.optim.AdamW, lr=rates, weight_decay=ll.optim.inject(0.1))
    optimizer = ll.chain(ll.skip_nonfinite(3), ll.clip_by_global_norm(1.0), changing, ll.ema())
    model = dropping(device)
    step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer))
    stack = ll.transforms.stack_states([ll.init_state(model, optimizer, seed=seed) for seed in range(3)])
    for batch in batches(device):
        stack, metrics = step(stack, batch)
    numbers = ll.transforms.compute_members(metrics), len(stack.seed)
    return stack, ll.transforms.unstack_states(stack), numbers


@case("transforms.differentiable")
def _(device):
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    model, state = started(device, optimizer, plain)
    step = ll.transforms.differentiable(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer))

    def loss(params):
        new = state.replace(params=params)
        for batch in batches(device):
            new, metrics = step(new, batch)
        return metrics["loss"].compute()

    return torch.func.grad(loss)({name: tensor.detach() for name, tensor in model.named_parameters()})


@case("transforms.on_host")
def _(device):
    return ll.transforms.on_host(float, data(device)[0][0, 0])


# Checks of steps.


_COMPILED = "torch.compile has no compiler for the far device; `pytest -m gpu` runs it on a GPU"
_RECORD = "a record, which holds what the case of its function shows"
_MODULES = "tests/losses/test_offload.py runs it on the far device, with the bits of the CPU"
_RANKS = "starts processes on the CPU; `pytest -m gpu` is where ranks have devices"


# Names that make no tensors of their own.
COMPOSED = """
    checkpoint.save_pretrained checkpoint.save_safetensors contrib.LRCurve contrib.MuP contrib.find_lr contrib.mup contrib.neftune
    debug.CorruptionError debug.record_steps
    debug.Difference debug.Replayed debug.differences debug.first_difference debug.nbytes debug.replay
    debug.step_seed debug.warn_of_misuse evaluation.split_on_oom grads.map_batch optim.global_norm losses.model_inputs
    losses.model_loss losses.restrict_grad metrics.Corpus metrics.TorchMetric metrics.Window metrics.torchmetric state.Grafted state.fold_in
    testing.assert_all_gradients testing.assert_causal testing.assert_donated_equals_pure
    testing.assert_microbatches_equal_batch testing.assert_overfits testing.assert_pure testing.assert_resumes
    testing.assert_samples_independent testing.assert_width_stable
""".split()  # noqa: SIM905
EXCEPTIONS = dict.fromkeys(COMPOSED, "calls functions that other cases run") | {
    "checkpoint.Checkpoint": _RECORD,
    "checkpoint.CheckpointVersionError": "an error about a file",
    "checkpoint.DamagedCheckpointError": "an error about a file",
    "debug.LeafDifference": _RECORD,
    "losses.offload": _MODULES,
    "losses.recompute": _MODULES,
    "debug.read_fingerprints": "reads a text file",
    "testing.assert_compiles": _COMPILED,
    "testing.assert_ranks_train_alike": _RANKS,
    "transforms.UntraceableError": _COMPILED,
    "transforms.compile_step": _COMPILED,
}

# Results with tensors on the CPU.
_COUNTS = "the number of updates, which the host reads at each step, and waits for nothing"
ON_THE_HOST = {
    "state.fresh": _COUNTS,
    "optim.average": _COUNTS,
    "checkpoint.checkpoint_io": _COUNTS,
    "checkpoint.optimizer_state_dict": "the number of updates, where torch.optim has it",
    "transforms.vmap_step": _COUNTS,
    "optim.optimizer": "the number of updates, where torch.optim has it",
    "evaluation.predict_to": "files",
    "optim.ema": _COUNTS,
    "optim.offload_state": "moments, which it keeps there",
    "optim.own_steps": _COUNTS,
    "optim.every": _COUNTS,
    "optim.inject": "numbers that the host reads at each step",
    "optim.reduce_on_plateau": "numbers that the host reads at each step",
    "optim.swa": _COUNTS,
}
