"""Migration table: fields of transformers' `TrainingArguments` in looplib."""

# Snippets are printed as a user writes them: with metrics that are not used, and a loop that continues with `state`.
# ruff: noqa: RUF059, B020

import copy
import inspect
import math
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from trainer_rows import Table, close, equal, on_each_of_two_ranks
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.trainer_pt_utils import LabelSmoother, LengthGroupedSampler

import looplib as ll

TABLE = Table(
    "transformers",
    "recipes/FROM_TRANSFORMERS.md",
    """
    # Coming from transformers' Trainer

    looplib has no Trainer and no object of settings. Each setting goes to the function that it is about, and what a
    callback does is a line in your loop; callbacks that you have [run unchanged](#trainer-callbacks). This page has a script
    beside its loop, and then [every name of the Trainer](#all-names) with the line that does the same.

    ## Not supported, and not tried

    Not supported. Use another library if you need one of these:

    - **DeepSpeed**: its engine owns the optimizer, the loop and the checkpoints. torch's `fully_shard` shards parameters,
      gradients and optimizer state as ZeRO does ([stage by stage](SCALE.md#deepspeeds-stages)).
    - **TPUs**, and other devices that need a package beside torch (torch_xla, torch_npu).
    - **Pipeline parallelism**: a pipeline schedules its own forward and backward passes.
    - **Engines** other than `DistributedDataParallel`, `fully_shard` (FSDP2) and tensor parallel plans: FSDP1, FairScale,
      Megatron, Horovod.
    - **Optimizers** that update within the backward pass (LOMO, layerwise GaLore) and paged ones of bitsandbytes.
    - **Frameworks** other than PyTorch.

    Not tried. These may work, but no test runs them:

    - **GPUs**: all tests and benchmarks have run on CPUs and on a stand-in for an accelerator alone. CUDA is provided for
      (`device=`, pinned memory, NCCL, fused kernels, CUDA graphs by `ll.compile_step(train_step, mode="reduce-overhead")`),
      and XPU and MPS take the same paths, but for the graphs. `pytest -m gpu` is ready for the first GPU.
    - **Scale**: tests run up to 4 processes, on one host.
    - **`nn.DataParallel`** on several GPUs. Use `DistributedDataParallel`.
    - **Context parallelism** (`torch.distributed.tensor.experimental.context_parallel`).
    - **FP8** training (torchao, TransformerEngine). An optimizer with FP8 moments, torchao's `AdamWFp8`, is run by the tests.
    - **`device_map`**: models that accelerate spreads over several devices.
    - **Packages** that need a GPU: galore_torch, apollo_torch. Tests run optimizers that are written like theirs.

    [What looplib refuses](REFUSED.md) is a page of its own, with the error messages.

    ## A script, and its loop

    A small BERT that tells Python from the prose of Python's documentation: a tokenizer and a collator, accumulation,
    warmup and a cosine, weight decay without norms and biases, clipping, metrics, TensorBoard, an evaluation and a checkpoint
    each epoch, early stopping, and the best model at the end.

    {{tests/other_trainers/script_transformers.py}}

    And with looplib:

    {{tests/other_trainers/script_looplib.py}}

    A test runs both as they are, with the samples in the same order: all losses and scores agree to 1e-6, the weights to
    1e-5 (but for the bias of the keys in attention, whose gradient is rounding alone), and both stop at the same step with
    the same best checkpoint. What differs:

    - looplib's script has 48 lines, without blank ones, and the Trainer's 56. Its lines are longer, 3,100 characters in all
      instead of 1,900: they are calls and a loop, where the Trainer's are settings.
    - Another test deletes each line of looplib's script in turn. The run then ends with an error or a warning that names
      what is missing, or computes the same without it (the summary, a line that writes a log or a file). Without
      `torch.manual_seed`, it begins with other weights.
    - `accepts_loss_kwargs = False` is the line that the Trainer's script would miss in silence: with transformers 5.23, two
      microbatches of a model that ignores `num_items_in_batch` make twice the gradient, and twice the loss in the log.
    - The order of the samples is different in each library.
    - When the loop is stopped, running the script again resumes it; the Trainer asks for `resume_from_checkpoint=True`.

    With everything on (bfloat16, label smoothing, early stopping, TensorBoard, signals, DDP under torchrun), compare
    [original_transformers.py](../tests/other_trainers/original_transformers.py) and [from_transformers.py](from_transformers.py), whose
    settings have the names of `TrainingArguments`. A test trains both in float32, without dropout and in the same order:
    losses, norms and learning rates of each update and scores of each evaluation agree to 1e-5, and the same checkpoints are
    kept. What differs there: Ctrl-C ends the Trainer without a checkpoint, and after SIGTERM it waits three seconds before
    it asks for one; `save_total_limit=3` counts the best among the three, which looplib keeps beside them. The label -100 of
    each window's first byte, which nothing predicts, is for the Trainer, which would count that byte otherwise.

    ## The table

    What follows has every field of `TrainingArguments`, every parameter and method of `Trainer`, every event of
    `TrainerCallback`, and what `TrainerState` and `TrainerControl` hold. A name is answered by a line of looplib, by one of
    torch or of another library that you have anyway, or by the reason why it has no meaning here.

    In the snippets `F` is `torch.nn.functional`, `gpt2` a transformers model, `tokens` a batch of texts for it with
    the loss function `lm_loss`, and `train(state, steps)` stands for the loop: it gives the states after each step.
    This page is made by `python tests/other_trainers/trainer_rows.py` from `tests/other_trainers/rows_transformers*.py`. Each
    snippet runs in the tests, which also compare the names with those of the installed transformers.
    """,
)
here, plain, nothing = TABLE.looplib, TABLE.torch, TABLE.none


class Lion(torch.optim.Optimizer):
    """A class as third parties write them, that torch does not have (Chen et al., 2023)."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (fast, slow), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(state["exp_avg"].lerp(p.grad, 1 - fast).sign(), alpha=-lr)
                state["exp_avg"].lerp_(p.grad, 1 - slow)


class Lion8bit(Lion):
    """The same with a momentum of 8 bits and a scale, as quantized optimizers keep theirs."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["quantized"], state["absmax"] = torch.zeros_like(p, dtype=torch.int8), p.new_zeros(())
                wide = state["quantized"] * state["absmax"] / 127
                p.add_(wide.lerp(p.grad, 1 - group["betas"][0]).sign(), alpha=-group["lr"])
                wide.lerp_(p.grad, 1 - group["betas"][1])
                state["absmax"].copy_(wide.abs().max().clamp(min=1e-12))
                state["quantized"].copy_((wide / state["absmax"] * 127).round())


class GaLoreProjector:
    """Projection of a matrix's gradient to a few directions, updated from time to time (Zhao et al., 2024)."""

    def __init__(self, rank, update_proj_gap, scale):
        self.rank, self.update_proj_gap, self.scale, self.ortho_matrix = rank, update_proj_gap, scale, None

    def project(self, grad, step):
        if self.ortho_matrix is None or step % self.update_proj_gap == 0:
            self.ortho_matrix = torch.linalg.svd(grad, full_matrices=False).Vh[: self.rank]
        return grad @ self.ortho_matrix.T

    def project_back(self, low):
        return low @ self.ortho_matrix * self.scale


class GaLoreAdamW(torch.optim.Optimizer):
    """As that of galore_torch: `rank` and others are read from a group, and a projector stands in the state."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, grad, (beta1, beta2) = self.state[p], p.grad, group["betas"]
                state.setdefault("step", 0)
                if "rank" in group:
                    if "projector" not in state:
                        options = (group["rank"], group["update_proj_gap"], group["scale"])
                        state["projector"] = GaLoreProjector(*options)
                    grad = state["projector"].project(grad, state["step"])
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
                scale = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                move = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                move = state["projector"].project_back(move) if "rank" in group else move
                p.sub_(move, alpha=group["lr"] * scale)


def raw_updates(model, loss_fn, batch, optimizer, updates=3):
    """The parameters after some updates of a raw loop over one batch."""
    for _ in range(updates):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def looplib_updates(model, loss_fn, batch, optimizer, updates=3):
    model = copy.deepcopy(model)  # the raw loop trains the module itself
    state = ll.init_state(model, optimizer)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    for _ in range(updates):
        state, _ = train_step(state, batch)
    return state.params


def scheduled(name, peak, warmup, total, **kwargs):
    """The learning rates that transformers' own scheduler of this name gives, from step 0 to `total`."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = transformers.get_scheduler(name, optimizer, warmup, total, kwargs)
    lrs = []
    for _ in range(total + 1):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return lrs


def same_rates(lr, lrs):
    return lrs == pytest.approx([lr(step) for step in range(len(lrs))], rel=1e-9, abs=1e-12)


TABLE.section("How long, and with which batches")


@here("TrainingArguments.output_dir", text="Each thing that writes is told where.")
def _(state):
    ckpt = ll.checkpoint_io("runs/small/checkpoints")
    log = ll.jsonl("runs/small/log.jsonl")
    # shows
    ckpt.save(state)
    log(state, {"train/loss": 0.5})
    assert sorted(path.name for path in Path("runs/small").iterdir()) == ["checkpoints", "log.jsonl"]


@here(
    "TrainingArguments.per_device_train_batch_size",
    text="`batch_size` is that of an update, of all ranks together: what the Trainer calls the total train batch size. "
    "Give it as a number, and it is the same on any number of ranks.",
)
def _(train_set, state):
    loader = ll.make_loader(train_set, batch_size=8, seed=42)
    # shows
    assert [len(x) for x, y in loader(state)] == [8] * 5
    assert len(loader) == 5
    assert on_each_of_two_ranks(lambda: [len(x) for x, y in loader(state)]) == [[4] * 5] * 2


@here(
    "TrainingArguments.num_train_epochs",
    text="A predicate: `ll.after_epochs(3)`. The Trainer rounds a fraction of an epoch up to whole steps; count these steps, "
    "give them to the schedule too, and leave the epoch by a `break`.",
)
def _(train_step, state, loader):
    steps = math.ceil(2.5 * len(loader))
    done, lr = ll.after_steps(steps), ll.schedules.warmup_linear(5e-5, warmup=0, total=steps)
    while not done(state):
        for batch in loader(state):
            state, metrics = train_step(state, batch)
            if done(state):
                break
    # shows
    assert (state.epoch, state.batch, state.step) == (2, 3, 13)
    history = trained_by_the_trainer(num_train_epochs=2.5, logging_steps=1)
    assert [row["step"] for row in history] == list(range(1, 14))
    assert [row["learning_rate"] for row in history] == pytest.approx([lr(step) for step in range(13)])


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean()}


def trained_by_the_trainer(**options):
    """Log of transformers' Trainer for each step of a run with five batches per epoch."""
    rows = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(40)]
    quiet = {"save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
    trainer = transformers.Trainer(Regression(), arguments(**quiet, **options), train_dataset=rows)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def evaluations_of_the_trainer(**options):
    """Steps at which transformers' Trainer evaluates, in a run with five batches per epoch."""
    rows = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(40)]
    quiet = {"save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
    trainer = transformers.Trainer(
        Regression(), arguments(**quiet, eval_strategy="steps", **options), train_dataset=rows, eval_dataset=rows
    )
    trainer.train()
    return [row["step"] for row in trainer.state.log_history if "eval_loss" in row]


@here(
    "TrainingArguments.max_steps",
    text="The loop is yours, so a `break` leaves the epoch; predicates combine by `|` and `&`.",
)
def _(train_step, state, loader):
    done = ll.after_epochs(3) | ll.after_steps(12)
    while not done(state):
        for batch in loader(state):
            state, metrics = train_step(state, batch)
            if done(state):
                break
    # shows
    assert (state.step, state.epoch, state.batch) == (12, 2, 2)


@here(
    "TrainingArguments.dataloader_drop_last",
    "TrainingArguments.dataloader_num_workers",
    "TrainingArguments.dataloader_persistent_workers",
    "TrainingArguments.dataloader_prefetch_factor",
    "TrainingArguments.dataloader_multiprocessing_context",
    text="`make_loader` takes what a DataLoader takes.",
)
def _(train_set):
    workers = {"num_workers": 1, "prefetch_factor": 2, "persistent_workers": True}
    loader = ll.make_loader(train_set, batch_size=16, drop_last=True, multiprocessing_context="fork", **workers)
    # shows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process that has threads
        batches = list(loader(ll.TrainState()))
    assert [len(x) for x, y in batches] == [16, 16]
    assert equal(batches, list(ll.make_loader(train_set, batch_size=16, drop_last=True)(ll.TrainState())))


@here(
    "TrainingArguments.dataloader_pin_memory",
    text="As for a DataLoader; the copy to `device` is then not waited for.",
)
def _(train_set, state):
    loader = ll.make_loader(train_set, batch_size=8, pin_memory=torch.accelerator.is_available(), device="cpu")
    # shows
    assert next(iter(loader(state)))[0].device.type == "cpu"


nothing(
    "TrainingArguments.dataloader_in_order",
    text="The order of the batches is a function of (seed, epoch), so that a run resumes by itself and continues "
    "with any number of workers; batches out of order would end that.",
)


@here(
    "TrainingArguments.train_sampling_strategy",
    "TrainingArguments.length_column_name",
    text="Shuffled by default. `ll.data.in_order()` is sequential, `ll.data.by_length(lengths)` makes batches of "
    'similar lengths as `"group_by_length"` does (`pool=50` is its mega-batch, and the default; the longest sample '
    "comes first), and `ll.data.batch_sampler(...)` any other, balanced over ranks or not.",
)
def _():
    lengths = torch.randint(1, 100, (400,))  # dataset["length"]
    loader = ll.make_loader(range(400), batch_size=4, order=ll.data.by_length(lengths))

    # shows
    def spread(batches):
        return sum(int(lengths[rows].max() - lengths[rows].min()) for rows in batches)

    start = ll.TrainState()
    grouped, shuffled = list(loader(start)), list(ll.make_loader(range(400), batch_size=4)(start))
    theirs = torch.tensor(list(LengthGroupedSampler(4, lengths=lengths.tolist()))).split(4)
    assert spread(grouped) < spread(shuffled) / 4
    assert spread(theirs) < spread(shuffled) / 4
    assert sorted(torch.cat(grouped).tolist()) == list(range(400))
    assert lengths[grouped[0]].max() == lengths[theirs[0]].max() == lengths.max()
    ordered = ll.make_loader(range(40), batch_size=4, order=ll.data.in_order())
    assert torch.cat(list(ordered(start))).tolist() == list(range(40))
    of_my_own = ll.make_loader(range(4), order=ll.data.batch_sampler(lambda epoch, generator: [[3, 1], [0, 2]]))
    assert [rows.tolist() for rows in of_my_own(start)] == [[3, 1], [0, 2]]


@here(
    "TrainingArguments.remove_unused_columns",
    "TrainingArguments.label_names",
    text="The loss function is given the whole batch and takes what it needs. `ll.losses.model_inputs(model, batch)` picks "
    "what the model's `forward` takes, and names what it leaves out or misses.",
)
def _(gpt2, tokens):
    def loss_fn(model, batch):
        return ll.next_token_loss(model(input_ids=batch["input_ids"]).logits, batch["targets"])

    # shows
    batch = {"input_ids": tokens, "targets": tokens, "source": ["a", "b", "c"]}
    found = ll.make_grad_fn(gpt2, loss_fn)(ll.init_state(gpt2), batch)
    assert found.samples == 3
    assert ll.compute(found.metrics)["loss"] == pytest.approx(gpt2(input_ids=tokens, labels=tokens).loss.item())


TABLE.section("Learning rate")


@here(
    "TrainingArguments.learning_rate",
    text="A number, or a schedule: a function of the step, of which the weights and moments know nothing.",
)
def _(model, loss_fn, batch):
    optimizer = ll.optimizer(torch.optim.AdamW, lr=5e-5, weight_decay=0.0)
    # shows
    ours = looplib_updates(model, loss_fn, batch, optimizer)
    assert equal(ours, raw_updates(model, loss_fn, batch, adamw(model, lr=5e-5)))


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **({"weight_decay": 0.0, "fused": True} | options))


@here(
    "TrainingArguments.lr_scheduler_type",
    "TrainingArguments.lr_scheduler_kwargs",
    "TrainingArguments.warmup_steps",
    text="Schedules are functions from a step to a number, and so is any function of yours; what the Trainer's "
    "names are is listed [below](#schedulertype-linear).",
)
def _():
    lr = ll.warmup_cosine(5e-5, warmup=100, total=2000, final=5e-6)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=lr)
    # shows
    assert [lr(0), lr(50), lr(100), lr(2000)] == pytest.approx([0.0, 2.5e-5, 5e-5, 5e-6])
    assert looplib_steps_follow(optimizer, lr)


def looplib_steps_follow(optimizer, lr):
    """True if the first update, at a rate of 0, changes nothing and the next one does."""
    model = nn.Linear(2, 1)
    state = ll.init_state(model, optimizer)
    train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer)
    first, _ = train_step(state, torch.ones(4, 2))
    second, _ = train_step(first, torch.ones(4, 2))
    return lr(0) == 0 and equal(first.params, state.params) and not equal(second.params, first.params)


@here("TrainingArguments before 5.warmup_ratio", text="A part of the total is a multiplication.")
def _():
    total = 2000
    lr = ll.schedules.warmup_linear(5e-5, warmup=math.ceil(0.06 * total), total=total)
    # shows
    args = arguments(warmup_steps=0.06)
    assert same_rates(lr, scheduled("linear", 5e-5, args.get_warmup_steps(total), total))


def arguments(**options):
    return transformers.TrainingArguments("unused", use_cpu=True, report_to="none", **options)


@here("SchedulerType.linear", text="Up, then down to zero.")
def _():
    lr = ll.schedules.warmup_linear(1e-3, warmup=10, total=100)
    # shows
    assert same_rates(lr, scheduled("linear", 1e-3, 10, 100))


@here("SchedulerType.cosine", text="Up, then along half a cosine.")
def _():
    lr = ll.warmup_cosine(1e-3, warmup=10, total=100)
    # shows
    assert same_rates(lr, scheduled("cosine", 1e-3, 10, 100))


@here("SchedulerType.cosine_with_restarts", text="`num_cycles` are `cycles`.")
def _():
    lr = ll.schedules.warmup(ll.schedules.cosine_restarts(1e-3, total=90, cycles=3), 10)
    # shows
    assert same_rates(lr, scheduled("cosine_with_restarts", 1e-3, 10, 100, num_cycles=3))


@here("SchedulerType.cosine_with_min_lr", text="`min_lr` is `final`.")
def _():
    lr = ll.warmup_cosine(1e-3, warmup=10, total=100, final=1e-5)
    # shows
    assert same_rates(lr, scheduled("cosine_with_min_lr", 1e-3, 10, 100, min_lr=1e-5))


@here(
    "SchedulerType.cosine_warmup_with_min_lr",
    text="The same one step ahead, so that the first update is not at zero; any function of the step will do.",
)
def _():
    schedule = ll.warmup_cosine(1e-3, warmup=10, total=100, final=1e-5)

    def lr(step):
        return schedule(step + 1)

    # shows
    theirs = scheduled("cosine_warmup_with_min_lr", 1e-3, 10, 100, min_lr=1e-5)
    assert same_rates(lr, theirs[:-1])  # their last value, after the last update, goes up again


@here("SchedulerType.polynomial", text="`lr_end` is the second number.")
def _():
    lr = ll.schedules.warmup(ll.schedules.polynomial(1e-3, 1e-7, total=90, power=2.0), 10)
    # shows
    assert same_rates(lr, scheduled("polynomial", 1e-3, 10, 100, power=2.0, lr_end=1e-7))


@here("SchedulerType.constant", text="A number; or a schedule, where one is combined with others.")
def _():
    lr = ll.schedules.constant(1e-3)
    # shows
    assert same_rates(lr, scheduled("constant", 1e-3, 10, 100))


@here("SchedulerType.constant_with_warmup", text="`warmup` goes around any schedule.")
def _():
    lr = ll.schedules.warmup(ll.schedules.constant(1e-3), 10)
    # shows
    assert same_rates(lr, scheduled("constant_with_warmup", 1e-3, 10, 100))


@here("SchedulerType.inverse_sqrt", text="Without a `timescale` the Trainer takes the warmup's steps for it.")
def _():
    lr = ll.schedules.warmup(ll.schedules.inverse_sqrt(1e-3, timescale=10), 10)
    # shows
    assert same_rates(lr, scheduled("inverse_sqrt", 1e-3, 10, 100))


@here(
    "SchedulerType.warmup_stable_decay",
    text="`num_decay_steps` are `decay`; `min_lr_ratio` is `start` and `final`, as rates. `decay_type` is "
    "`decay_shape`.",
)
def _():
    lr = ll.schedules.warmup_stable_decay(1e-3, warmup=10, decay=30, total=100, start=1e-4, final=1e-4)
    # shows
    theirs = scheduled("warmup_stable_decay", 1e-3, 10, 100, num_decay_steps=30, min_lr_ratio=0.1)
    assert same_rates(lr, theirs)


@here(
    "SchedulerType.reduce_lr_on_plateau",
    "SchedulerType.greedy",
    text="A rate that depends on what was measured stands in the state, and you put another one there: here a "
    "tenth after each evaluation that is no better than the best.",
)
def _(model, grad_fn, batch):
    optimizer = ll.optimizer(torch.optim.SGD, lr=ll.optim.injected(0.1))
    state = ll.init_state(model, optimizer, extra={"best": ll.predicates.BestSoFar("eval/loss")})
    for loss in (0.5, 0.4, 0.6):  # after each evaluation
        state = ll.update_best(state, {"eval/loss": loss})
        if state.extra["best"].waited:
            state = ll.optim.set_hyperparameters(state, lr=lambda lr: lr / 10)
    # shows
    torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(torch_optimizer, patience=0, threshold=0.0)
    for loss in (0.5, 0.4, 0.6):
        theirs.step(loss)
    rate = torch_optimizer.param_groups[0]["lr"]
    assert ll.optim.hyperparameters(optimizer, state) == {"lr": pytest.approx(rate)} == {"lr": pytest.approx(0.01)}
    moved, _ = ll.make_train_step(grad_fn, optimizer)(state, batch)
    gradient = grad_fn(state, batch).grads["0.bias"]
    torch.testing.assert_close(moved.params["0.bias"], state.params["0.bias"] - 0.01 * gradient)


TABLE.section("Optimizer")


@here(
    "TrainingArguments.optim",
    "OptimizerNames.adamw_torch",
    "OptimizerNames.adamw_torch_fused",
    text="The class itself, of torch or of anyone else; fused wherever torch has a fused kernel.",
)
def _(model, loss_fn, batch):
    optimizer = ll.optimizer(torch.optim.AdamW, lr=5e-5, weight_decay=0.0)
    # shows
    ours = looplib_updates(model, loss_fn, batch, optimizer)
    assert equal(ours, raw_updates(model, loss_fn, batch, adamw(model, lr=5e-5, fused=True)))


@here(
    "TrainingArguments.adam_beta1",
    "TrainingArguments.adam_beta2",
    "TrainingArguments.adam_epsilon",
    "TrainingArguments.optim_args",
    text="Hyperparameters have the names of the class, and each may be a schedule.",
)
def _(model, loss_fn, batch):
    optimizer = ll.optimizer(torch.optim.AdamW, lr=5e-5, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    # shows
    ours = looplib_updates(model, loss_fn, batch, optimizer)
    assert equal(ours, raw_updates(model, loss_fn, batch, adamw(model, lr=5e-5, betas=(0.9, 0.95), eps=1e-6)))


@here(
    "TrainingArguments.weight_decay",
    "Trainer.get_decay_parameter_names",
    text="The Trainer decays no biases and no layer norms without being asked; here a predicate on names and "
    "tensors says which. Those of fewer than two dimensions are just these, in GPT-2 as in most.",
)
def _(gpt2, tokens, lm_loss):
    no_decay = (lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})
    optimizer = ll.optimizer(torch.optim.AdamW, lr=5e-5, weight_decay=0.1, groups=[no_decay])
    # shows
    decayed = {name for name, tensor in gpt2.named_parameters(remove_duplicate=False) if tensor.ndim >= 2}
    assert decayed == set(transformers.Trainer.get_decay_parameter_names(None, gpt2))
    assert looplib_updates(gpt2, lm_loss, tokens, optimizer)
    state = ll.init_state(gpt2, optimizer)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.params.items()}
    decayed_only, _, _ = optimizer.update(zeros, state.opt_state, state.params, 0)
    moved = {name for name, tensor in decayed_only.items() if not torch.equal(tensor, state.params[name])}
    assert moved == decayed - {"lm_head.weight"}  # another name of the embedding


@here(
    "TrainingArguments.optim_target_modules",
    text="Groups by a predicate on names and tensors have hyperparameters of their own; `ll.optim.partition` gives them "
    "another class.",
)
def _(gpt2, tokens, lm_loss):
    def label(name, tensor):
        return "muon" if ".h." in name and tensor.ndim == 2 else "adamw"

    muon, adamw = ll.optimizer(torch.optim.Muon, lr=0.02), ll.optimizer(torch.optim.AdamW, lr=3e-4)
    optimizer = ll.optim.partition({"muon": muon, "adamw": adamw}, label)
    # shows
    inner = ll.init_state(gpt2, optimizer).opt_state["inner_states"]
    assert all(name.endswith(".weight") and ".h." in name for name in inner["muon"]["state"])
    assert len(inner["muon"]["state"]) == 8
    assert looplib_updates(gpt2, lm_loss, tokens, optimizer)


@here("OptimizerNames.sgd", text="torch's class.")
def _(model, loss_fn, batch):
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    # shows
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    assert equal(looplib_updates(model, loss_fn, batch, optimizer), raw_updates(model, loss_fn, batch, theirs))


@here("OptimizerNames.adagrad", text="torch's class.")
def _(model, loss_fn, batch):
    optimizer = ll.optimizer(torch.optim.Adagrad, lr=0.01)
    # shows
    theirs = torch.optim.Adagrad(model.parameters(), lr=0.01, fused=True)
    assert equal(looplib_updates(model, loss_fn, batch, optimizer), raw_updates(model, loss_fn, batch, theirs))


@here("OptimizerNames.rmsprop", text="torch's class.")
def _(model, loss_fn, batch):
    optimizer = ll.optimizer(torch.optim.RMSprop, lr=0.01, alpha=0.95, centered=True)
    # shows
    theirs = torch.optim.RMSprop(model.parameters(), lr=0.01, alpha=0.95, centered=True)
    assert close(looplib_updates(model, loss_fn, batch, optimizer), raw_updates(model, loss_fn, batch, theirs))


@here(
    "OptimizerNames.adafactor",
    text="transformers' own class, with what the Trainer gives it; torch has one too, `torch.optim.Adafactor`.",
)
def _(model, loss_fn, batch):
    options = {"scale_parameter": False, "relative_step": False}
    optimizer = ll.optimizer(transformers.Adafactor, lr=1e-3, **options)
    # shows
    theirs = transformers.Adafactor(model.parameters(), lr=1e-3, **options)
    assert equal(looplib_updates(model, loss_fn, batch, optimizer), raw_updates(model, loss_fn, batch, theirs))
    assert looplib_updates(model, loss_fn, batch, ll.optimizer(torch.optim.Adafactor, lr=1e-3))


@here(
    "OptimizerNames.lion_32bit",
    "OptimizerNames.ademamix",
    "OptimizerNames.stable_adamw",
    "OptimizerNames.grokadamw",
    "OptimizerNames.adamw_anyprecision",
    "OptimizerNames.rmsprop_bnb",
    "OptimizerNames.rmsprop_bnb_32bit",
    text="Any class with torch's interface that keeps its state in `state` and `param_groups`: give the class of "
    "its package (bitsandbytes, torch-optimi, grokadamw, ...), here a `Lion`. The tests run one written for them.",
)
def _(model, loss_fn, batch):
    optimizer = ll.optimizer(Lion, lr=1e-4, betas=(0.95, 0.98), weight_decay=0.1)
    # shows
    theirs = Lion(model.parameters(), lr=1e-4, betas=(0.95, 0.98), weight_decay=0.1)
    assert equal(looplib_updates(model, loss_fn, batch, optimizer), raw_updates(model, loss_fn, batch, theirs))


@here(
    "OptimizerNames.adamw_torch_4bit",
    "OptimizerNames.adamw_torch_8bit",
    "OptimizerNames.adamw_bnb_8bit",
    "OptimizerNames.adamw_8bit",
    "OptimizerNames.ademamix_8bit",
    "OptimizerNames.lion_8bit",
    "OptimizerNames.rmsprop_bnb_8bit",
    text="Quantized classes are given as they are: the tests train with torchao's `AdamW8bit`, `AdamW4bit` and `AdamWFp8`, "
    "save and resume. bitsandbytes' 8-bit classes were run once, on a CPU (version 0.50.2): equal bits, and after a resume too.",
)
def _(model, loss_fn, batch):
    import torchao.optim

    optimizer = ll.optimizer(torchao.optim.AdamW8bit, lr=1e-4)
    # shows
    with torch.compiler.set_stance("force_eager"):
        ours = looplib_updates(model, loss_fn, batch, optimizer)
        theirs = torchao.optim.AdamW8bit(model.parameters(), lr=1e-4)
        assert equal(ours, raw_updates(model, loss_fn, batch, theirs))
        optimizer = ll.optimizer(Lion8bit, lr=1e-4)
        ours = looplib_updates(model, loss_fn, batch, optimizer)
        assert equal(ours, raw_updates(model, loss_fn, batch, Lion8bit(model.parameters(), lr=1e-4)))


@here(
    "OptimizerNames.schedule_free_adamw",
    "OptimizerNames.schedule_free_sgd",
    "OptimizerNames.schedule_free_radam",
    text="The classes of schedulefree. There is no `train()` and `eval()` to call: `eval_state` has the point to "
    "evaluate at.",
)
def _(model, loss_fn, batch, metric_fn, test_batches):
    import schedulefree

    optimizer = ll.optimizer(schedulefree.AdamWScheduleFree, lr=0.01, warmup_steps=2)
    state = ll.init_state(model, optimizer)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    # shows
    raw = copy.deepcopy(model)
    for _ in range(3):
        state, _ = train_step(state, batch)
    theirs = schedulefree.AdamWScheduleFree(raw.parameters(), lr=0.01, warmup_steps=2)
    theirs.train()
    trained = raw_updates(raw, loss_fn, batch, theirs)
    assert close(state.params, trained)
    theirs.eval()
    assert close(ll.eval_state(optimizer, state).params, {n: p.detach() for n, p in raw.named_parameters()})
    for cls in (schedulefree.SGDScheduleFree, schedulefree.RAdamScheduleFree):
        assert looplib_updates(model, loss_fn, batch, ll.optimizer(cls, lr=0.01))


@here(
    "OptimizerNames.galore_adamw",
    "OptimizerNames.galore_adafactor",
    "OptimizerNames.apollo_adamw",
    text="The classes of galore_torch and apollo_torch: what they read from a group stands in the group, whose "
    "predicate takes the place of `optim_target_modules`. The tests run a class written like these.",
)
def _(model, loss_fn, batch):
    galore = {"rank": 2, "update_proj_gap": 2, "scale": 0.25}
    groups = [(lambda name, tensor: name in ("0.weight", "2.weight"), galore)]
    optimizer = ll.optimizer(GaLoreAdamW, lr=1e-2, groups=groups)
    # shows
    ours = looplib_updates(model, loss_fn, batch, optimizer, updates=5)
    biases = {"params": [model[0].bias, model[2].bias]}
    theirs = GaLoreAdamW([{"params": [model[0].weight, model[2].weight], **galore}, biases], lr=1e-2)
    assert equal(ours, raw_updates(model, loss_fn, batch, theirs, updates=5))
    assert ll.init_state(model, optimizer).opt_state["state"]["0.weight"]["exp_avg"].shape == (8, 2)


nothing(
    "OptimizerNames.galore_adamw_8bit",
    text="Its class puts other tensors into the parameters' `data` while it steps, and runs on GPUs alone, where it "
    "was never tried here: take `galore_adamw` or `adamw_8bit`.",
)
nothing(
    "OptimizerNames.galore_adamw_layerwise",
    "OptimizerNames.galore_adamw_8bit_layerwise",
    "OptimizerNames.galore_adafactor_layerwise",
    "OptimizerNames.apollo_adamw_layerwise",
    "OptimizerNames.lomo",
    "OptimizerNames.adalomo",
    text="These update each weight within the backward pass, so that there is no gradient to clip, to accumulate "
    "or to look at, and a step could not be taken back. For the memory, `fully_shard` with a `CPUOffloadPolicy`.",
)
nothing(
    "OptimizerNames.paged_adamw_32bit",
    "OptimizerNames.paged_adamw_8bit",
    "OptimizerNames.paged_ademamix_32bit",
    "OptimizerNames.paged_ademamix_8bit",
    "OptimizerNames.paged_lion_32bit",
    "OptimizerNames.paged_lion_8bit",
    text="Paged state lies in memory that bitsandbytes allocates by itself on a GPU (on a CPU nothing is paged, and a "
    "paged class trains like the others), and a state here is made of tensors "
    "that can be copied, saved and forked; `fully_shard` with a `CPUOffloadPolicy` keeps state on the host.",
)
nothing(
    "OptimizerNames.adamw_torch_xla",
    "OptimizerNames.adamw_torch_npu_fused",
    text="For torch_xla and torch_npu, on whose devices nothing here was ever run.",
)


TABLE.section("Gradients and loss")


@here(
    "TrainingArguments.gradient_accumulation_steps",
    text="One call is one update over the whole batch, in microbatches. The gradient is that of the whole, however it is "
    "cut, and `state.step` counts updates.",
)
def _(model, loss_fn, state, batch):
    grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches=5)
    # shows
    assert close(grad_fn(state, batch).grads, ll.make_grad_fn(model, loss_fn)(state, batch).grads)
    state, _ = ll.make_train_step(grad_fn, ll.optimizer(torch.optim.AdamW, lr=1e-2))(state, batch)
    assert state.step == 1


@here(
    "TrainingArguments.average_tokens_across_devices",
    text="A loss that says its sum and its number of tokens is averaged over all tokens of the batch, whatever "
    "microbatch or rank they are in.",
)
def _(gpt2, tokens):
    def loss_fn(model, tokens):
        logits, targets = model(input_ids=tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        return ll.Mean(F.cross_entropy(logits, targets, reduction="sum"), len(targets))

    # shows
    pieces = [tokens, tokens[:1, :4]]
    found = ll.accumulate(ll.make_grad_fn(gpt2, loss_fn))(ll.init_state(gpt2), pieces)
    sums = sum(loss_fn(gpt2, piece).total for piece in pieces) / (3 * 9 + 3)
    sums.backward()
    assert close(found.grads, {name: tensor.grad for name, tensor in gpt2.named_parameters()})
    assert ll.compute(found.metrics)["loss"] == pytest.approx(sums.item())


@here(
    "TrainingArguments.max_grad_norm",
    text="A wrapper around the gradient, which reports the norm as `grad_norm`; `math.inf` for the report alone.",
)
def _(model, loss_fn, state, batch):
    grad_fn = ll.clip_by_global_norm(ll.make_grad_fn(model, loss_fn), 0.1)
    # shows
    found = grad_fn(state, batch)
    loss_fn(model, batch).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert equal(found.grads, {name: tensor.grad for name, tensor in model.named_parameters()})
    assert ll.compute(found.metrics)["grad_norm"] == norm.item() > 0.1


@here(
    "TrainingArguments.label_smoothing_factor",
    text="The loss is yours: `label_smoothing=` of torch's cross-entropy, or of `ll.next_token_loss`.",
)
def _(gpt2, tokens):
    def loss_fn(model, tokens):
        return ll.next_token_loss(model(input_ids=tokens).logits, tokens, label_smoothing=0.1)

    # shows
    theirs = LabelSmoother(0.1)({"logits": gpt2(input_ids=tokens).logits}, tokens, shift_labels=True)
    ours = ll.make_grad_fn(gpt2, loss_fn)(ll.init_state(gpt2), tokens)
    assert ll.compute(ours.metrics)["loss"] == pytest.approx(theirs.item(), rel=1e-6)


@here("TrainingArguments.neftune_noise_alpha", text="A wrapper around the loss function; the model stays as it is.")
def _(gpt2, lm_loss, tokens):
    noisy_loss = ll.contrib.neftune(lm_loss, "transformer.wte", alpha=5.0)
    # shows
    state = ll.init_state(gpt2)
    noisy, plain = ll.make_grad_fn(gpt2, noisy_loss)(state, tokens), ll.make_grad_fn(gpt2, lm_loss)(state, tokens)
    assert not close(noisy.grads, plain.grads, atol=1e-4)
    gpt2.eval()
    assert equal(noisy_loss(gpt2, tokens).total, lm_loss(gpt2, tokens).total)


@here(
    "TrainingArguments.use_liger_kernel",
    "TrainingArguments.liger_kernel_config",
    text="What its fused linear cross-entropy saves, the logits of all tokens at once, `next_token_loss` saves "
    "when it is given the head. Liger's other kernels change the model, before it comes here.",
)
def _(gpt2, lm_loss, tokens):
    def loss_fn(model, tokens):
        hidden = model.transformer(input_ids=tokens).last_hidden_state
        return ll.next_token_loss(hidden, tokens, head=model.lm_head)

    # shows
    state = ll.init_state(gpt2)
    ours, all_logits = ll.make_grad_fn(gpt2, loss_fn)(state, tokens), ll.make_grad_fn(gpt2, lm_loss)(state, tokens)
    assert close(ours.grads, all_logits.grads)


TABLE.section("Precision, memory and speed")


@here("TrainingArguments.bf16", text="A wrapper around the loss function; weights and gradients stay in float32.")
def _(gpt2, lm_loss, tokens):
    grad_fn = ll.make_grad_fn(gpt2, ll.autocast(lm_loss, torch.bfloat16))
    # shows
    found = grad_fn(ll.init_state(gpt2), tokens)
    with torch.autocast("cpu", torch.bfloat16):
        lm_loss(gpt2, tokens).compute().backward()
    assert close(found.grads, {name: tensor.grad for name, tensor in gpt2.named_parameters()}, atol=1e-5)
    assert {tensor.dtype for tensor in found.grads.values()} == {torch.float32}


@here(
    "TrainingArguments.fp16",
    text="float16 needs a loss scale besides: one wrapper multiplies and divides by it, one moves it and skips "
    "what overflows, as torch's `GradScaler` does.",
)
def _(gpt2, lm_loss, tokens):
    grad_fn = ll.grads.scale_loss(ll.make_grad_fn(gpt2, ll.autocast(lm_loss, torch.float16)))
    optimizer = ll.optim.dynamic_loss_scale(ll.optimizer(torch.optim.AdamW, lr=5e-5))
    # shows
    state = ll.init_state(gpt2, optimizer)
    for _ in range(4):
        state, metrics = ll.make_train_step(grad_fn, optimizer)(state, tokens)
    assert state.step == 4
    assert ll.compute(metrics)["loss_scale"] == 65536


@here(
    "TrainingArguments.bf16_full_eval",
    "TrainingArguments.fp16_full_eval",
    text="A state is a record of tensors, so evaluate one whose weights are of half precision. "
    "(`ll.autocast(metric_fn, torch.bfloat16)` is the mixed form.)",
)
def _(gpt2, lm_loss, tokens):
    state, eval_step = ll.init_state(gpt2), ll.make_eval_step(gpt2, lambda model, x: {"loss": lm_loss(model, x)})
    scores = ll.evaluate(eval_step, ll.state.cast(state, torch.bfloat16), [tokens])
    # shows
    assert {tensor.dtype for tensor in gpt2.parameters()} == {torch.float32}
    assert scores["loss"] != ll.evaluate(eval_step, state, [tokens])["loss"]
    with torch.no_grad():
        half = lm_loss(gpt2.to(torch.bfloat16).eval(), tokens).compute()  # as the Trainer does
    assert scores["loss"] == half.item()


@plain("TrainingArguments.tf32", text="A switch of torch's.")
def _():
    torch.set_float32_matmul_precision("high")
    # shows
    found = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    assert found == "high"


@here(
    "TrainingArguments.activation_checkpointing",
    "TrainingArguments.gradient_checkpointing",
    text="A wrapper around the loss function, for the modules of a class; the bits stay the same, dropout included.",
)
def _(gpt2, lm_loss, tokens):
    grad_fn = ll.make_grad_fn(gpt2, ll.losses.recompute(lm_loss, GPT2Block))
    # shows
    state = ll.init_state(gpt2)
    assert equal(grad_fn(state, tokens).grads, ll.make_grad_fn(gpt2, lm_loss)(state, tokens).grads)


@here(
    "TrainingArguments.activation_checkpointing_kwargs",
    "TrainingArguments.gradient_checkpointing_kwargs",
    text="Which modules is a predicate on names and modules: here `every_n_layers=2`. `offload` is torch's "
    "`torch.autograd.graph.save_on_cpu`, a `with` in the loss function.",
)
def _(gpt2, lm_loss, tokens):
    def every_other(name, module):
        return isinstance(module, GPT2Block) and int(name.split(".")[-1]) % 2 == 0

    lean_loss = ll.losses.recompute(lm_loss, every_other)
    # shows
    calls = []
    for number, block in enumerate(gpt2.transformer.h):
        block.ln_1.register_forward_hook(lambda *_, number=number: calls.append(number))
    found = ll.make_grad_fn(gpt2, lean_loss)(ll.init_state(gpt2), tokens).grads
    assert sorted(calls) == [0, 0, 1]

    def offloaded(model, tokens):
        with torch.autograd.graph.save_on_cpu():
            return lm_loss(model, tokens)

    assert equal(found, ll.make_grad_fn(gpt2, offloaded)(ll.init_state(gpt2), tokens).grads)


@here(
    "TrainingArguments.torch_compile",
    "TrainingArguments.torch_compile_backend",
    "TrainingArguments.torch_compile_mode",
    text="The whole step in one graph: forward and backward pass, clipping, schedule and update, with "
    "torch.compile's options; `ll.transforms.compile_blocks` compiles a large model's blocks alone.",
)
def _(grad_fn, optimizer, state, batch, train_step):
    compiled_step = ll.compile_step(ll.make_train_step(grad_fn, optimizer), backend="eager")
    # shows
    ours, eager = state, state
    for _ in range(3):
        (ours, _), (eager, _) = compiled_step(ours, batch), train_step(eager, batch)
    assert close(ours.params, eager.params)


@here(
    "TrainingArguments.auto_find_batch_size",
    text="When memory runs out, the same batch is taken again in smaller microbatches, with the whole batch's gradient: "
    "training does not start over.",
)
def _(model, loss_fn, state, batch):
    grad_fn = ll.grads.retry_on_oom(ll.make_grad_fn(model, loss_fn))

    # shows
    def holds_four(_, inputs):
        if len(inputs[0]) > 4:
            raise torch.OutOfMemoryError("out of memory")

    whole = ll.make_grad_fn(model, loss_fn)(state, batch)
    model.register_forward_pre_hook(holds_four)
    with pytest.warns(UserWarning, match="microbatches of"):
        found = grad_fn(state, batch)
    assert ll.compute(found.metrics)["microbatch_size"] == 3
    assert close(found.grads, whole.grads)


@plain("TrainingArguments.torch_empty_cache_steps", text="torch's function, where a predicate says so.")
def _(state):
    clear_now = ll.every_n_steps(100)
    if clear_now(state):
        torch.accelerator.memory.empty_cache()
    # shows
    assert [step for step in range(300) if clear_now(state.replace(step=step))] == [100, 200]


@plain("TrainingArguments.use_cache", text="A setting of the model's.")
def _(gpt2, tokens):
    gpt2.config.use_cache = False
    # shows
    assert gpt2(input_ids=tokens).past_key_values is None
    gpt2.config.use_cache = True
    assert gpt2(input_ids=tokens).past_key_values is not None


TABLE.section("Logs")


@here(
    "TrainingArguments.logging_strategy",
    "TrainingArguments.logging_steps",
    "TrainingArguments.logging_first_step",
    text='Predicates of the state, combined at will: `ll.at_epoch_end()` is `"epoch"`, and a part of the whole is '
    "a multiplication.",
)
def _(state):
    log_now = ll.every_n_steps(50) | ll.at_step(1)
    # shows
    fired = [step for step in range(151) if log_now(state.replace(step=step, batch=1))]
    assert fired == [1, 50, 100, 150]
    assert ll.at_epoch_end()(state.replace(epoch=1, batch=0))


@here(
    "TrainingArguments.logging_nan_inf_filter",
    text="What was measured is what is logged. A step that is not finite can be skipped, and what was skipped left "
    "out of the mean since the last log.",
)
def _(grad_fn, model, batch):
    optimizer = ll.optim.apply_if_finite(ll.optimizer(torch.optim.AdamW, lr=1e-2), max_consecutive=5)
    train_step, window = ll.make_train_step(grad_fn, optimizer), ll.Window()
    state = ll.init_state(model, optimizer)
    for inputs in (batch, (batch[0] * math.nan, batch[1]), batch):
        state, metrics = train_step(state, inputs)
        if not state.skipped:
            window = window.add(metrics)
    # shows
    assert len(window) == state.step == 2
    assert math.isfinite(ll.compute(window.metrics())["loss"])


@here(
    "TrainingArguments.include_num_input_tokens_seen",
    text='A count of your own in the state, which checkpoints keep; `(tokens != pad).sum()` is `"non_padding"`.',
)
def _(gpt2, lm_loss, tokens):
    optimizer = ll.optimizer(torch.optim.AdamW, lr=5e-5)
    train_step = ll.make_train_step(ll.make_grad_fn(gpt2, lm_loss), optimizer)
    state = ll.init_state(gpt2, optimizer, extra={"tokens": torch.tensor(0)})
    for batch in (tokens, tokens[:1]):
        state, metrics = train_step(state, batch)
        state = state.replace(extra={"tokens": state.extra["tokens"] + batch.numel()})
    # shows
    assert state.extra["tokens"].item() == 40


@here(
    "TrainingArguments.log_on_each_node",
    text="The first rank writes; a sink in `every_rank` writes on each.",
)
def _(state):
    log = ll.log.every_rank(ll.jsonl(f"runs/small/log-{ll.distributed.rank()}.jsonl"))
    # shows
    log(state, {"train/loss": 0.5})
    assert ll.log.read_jsonl("runs/small/log-0.jsonl")[0]["train/loss"] == 0.5


nothing(
    "TrainingArguments.log_level",
    "TrainingArguments.log_level_replica",
    text="Nothing is said through `logging`: sinks write what you give them, what is amiss is a warning or an "
    "error. What other ranks print goes to files by `ll.distributed.setup(output_dir=...)`.",
)


@here(
    "TrainingArguments.disable_tqdm",
    text="The bar is a function around the loader: leave it out, or `disable=None` for none unless in a terminal.",
)
def _(loader, state, train_step, terminal):
    bar = ll.progress(loader, disable=None)
    for batch in bar(state):
        state, metrics = train_step(state, batch)
        bar.show(metrics)
    # shows
    assert state.epoch == 1
    assert len(list(ll.progress(loader, disable=None, file=terminal)(state))) == 5
    assert terminal.getvalue() == ""
    assert len(list(ll.progress(loader, file=terminal)(state))) == 5
    assert "epoch 2: 100%" in terminal.getvalue()


@here(
    "TrainingArguments.report_to",
    "TrainingArguments.run_name",
    "TrainingArguments.project",
    text="A sink for each of TensorBoard, W&B, MLflow and Trackio. The run has the name of its folder, and a resumed "
    "run continues it. The settings of the optimizer, the loaders and the model are stored without being listed. For "
    "Comet, ClearML, Aim, Neptune or SwanLab, give an object with four methods, as in "
    "[COOKBOOK.md](COOKBOOK.md#log-to-any-other-tracker), or write a function.",
)
def _(state):
    wandb = ll.log.tracker("wandb", "runs/small", project="huggingface", mode="disabled")
    log = ll.tee(ll.jsonl("log.jsonl"), ll.log.tracker("tensorboard", "runs/tb"), wandb)
    # shows
    log(state, {"train/loss": 0.5})
    assert ll.log.read_jsonl("log.jsonl")[0]["train/loss"] == 0.5
    assert list(Path("runs/tb").glob("events.*"))


@here(
    "TrainingArguments.trackio_space_id",
    "TrainingArguments.trackio_bucket_id",
    "TrainingArguments.trackio_static_space_id",
    text="Options of `trackio.init`, as for each tracker. It logs on the first rank alone, and "
    "`ll.log.in_background` keeps it from delaying the loop.",
)
def _(state, monkeypatch):
    seen = []
    run = types.SimpleNamespace(
        config={}, log=lambda values, step: seen.append((step, values)), finish=lambda: seen.append("finished")
    )
    trackio = types.SimpleNamespace(init=lambda **options: seen.append(options["space_id"]) or run)
    monkeypatch.setitem(sys.modules, "trackio", trackio)

    # given
    board = ll.log.tracker("trackio", "runs/small", space_id="me/space")
    log = ll.log.in_background(board)

    # shows
    def once():
        log(state.replace(step=7), {"train/loss": 0.5})
        log.close()
        board.close()

    on_each_of_two_ranks(once)
    assert seen == ["me/space", (7, {"train/loss": 0.5}), "finished"]


TABLE.section("Evaluation")


@here(
    "TrainingArguments.eval_strategy",
    "TrainingArguments.eval_steps",
    text="A predicate, asked after the step; the Trainer also evaluates after the last one. "
    "It takes a number below 1, here and for `logging_steps` and "
    "`save_steps`, as a share of all steps, rounded up: `ll.every_n_steps(math.ceil(0.1 * steps))`.",
)
def _(train_step, state, loader, eval_step, test_batches, log, rows):
    done = ll.after_epochs(1)
    eval_now = ll.every_n_steps(2) | done  # or ll.at_epoch_end()
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        if eval_now(state):
            log(state, ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
    # shows
    assert [row["step"] for row in rows] == [2, 4, 5] == evaluations_of_the_trainer(max_steps=5, eval_steps=2)
    assert set(rows[0]) >= {"eval/loss", "eval/accuracy"}
    history = trained_by_the_trainer(max_steps=13, logging_steps=0.1)
    assert [row["step"] for row in history][:3] == [math.ceil(0.1 * 13) * k for k in (1, 2, 3)]


@here("TrainingArguments.eval_delay", text="Not before step 30.")
def _(state):
    eval_now = ll.every_n_steps(10) & ll.after_steps(30)
    # shows
    assert [step for step in range(51) if eval_now(state.replace(step=step))] == [30, 40, 50]


@here(
    "TrainingArguments.per_device_eval_batch_size",
    text="Batches to evaluate on are any iterable; a loader is read from its beginning. The metrics are those of "
    "the set, whatever the size.",
)
def _(test_set, eval_step, state, test_batches):
    loader = ll.make_loader(test_set, batch_size=7, order=ll.data.in_order())
    scores = ll.evaluate(eval_step, state, loader)
    # shows
    assert scores == pytest.approx(ll.evaluate(eval_step, state, [test_set[:]]), rel=1e-6)


@here("TrainingArguments.prediction_loss_only", text="The metric function returns what it is to return.")
def _(model, loss_fn, state, test_batches):
    eval_step = ll.make_eval_step(model, lambda model, batch: {"loss": loss_fn(model, batch)})
    # shows
    assert list(ll.evaluate(eval_step, state, test_batches)) == ["loss"]


@here("TrainingArguments.eval_on_start", text="A line before the loop; `limit` for a check on few batches.")
def _(eval_step, state, test_batches):
    scores = ll.evaluate(eval_step, state, test_batches, prefix="eval/", limit=2)
    # shows
    assert scores == ll.evaluate(eval_step, state, test_batches[:2], prefix="eval/")


@here(
    "TrainingArguments.eval_do_concat_batches",
    "TrainingArguments.eval_accumulation_steps",
    text="Evaluation keeps no outputs. Predictions come batch by batch, each on the host before the next is made; "
    "concatenate them, or let `predict_to` write them to disk.",
)
def _(predict_step, state, test_batches, model):
    outputs = ll.predict(predict_step, state, test_batches)
    logits = torch.cat(list(outputs))
    # shows
    assert logits.shape == (25, 3)
    assert close(logits, model(torch.cat([x for x, y in test_batches])).detach())
    path = ll.predict_to("runs/predictions", predict_step, state, test_batches)
    assert equal(ll.evaluation.read_predictions(path)["output"].clone(), logits)


nothing(
    "TrainingArguments.eval_use_gather_object",
    text="Records of metrics and outputs of any structure are brought together as they are.",
)


@here(
    "TrainingArguments.include_for_metrics",
    text="The metric function is given the model and the batch, inputs and all.",
)
def _(model, state, test_batches):
    def metric_fn(model, batch):
        x, y = batch
        losses, positive = F.cross_entropy(model(x), y, reduction="none"), x[:, 0] > 0
        return {"loss": losses.mean(), "positive/loss": ll.Mean(losses[positive].sum(), positive.sum())}

    # shows
    scores = ll.evaluate(ll.make_eval_step(model, metric_fn), state, test_batches)
    x, y = (torch.cat(parts) for parts in zip(*test_batches, strict=True))
    positive = F.cross_entropy(model(x[x[:, 0] > 0]), y[x[:, 0] > 0])
    assert scores["positive/loss"] == pytest.approx(positive.item(), rel=1e-6)


@here(
    "TrainingArguments.batch_eval_metrics",
    text="Always: metrics are small records that merge exactly, so no logits are kept. Those of torchmetrics are "
    "too, by `ll.metrics.torchmetric`.",
)
def _(model, state, test_batches):
    def metric_fn(model, batch):
        x, y = batch
        matrix = ll.metrics.ConfusionMatrix.of(model(x).argmax(1), y, classes=3)
        return {"accuracy": matrix, "macro_f1": ll.metrics.Reading(matrix, ll.metrics.ConfusionMatrix.macro_f1)}

    # shows
    from sklearn.metrics import f1_score

    scores = ll.evaluate(ll.make_eval_step(model, metric_fn), state, test_batches)
    x, y = (torch.cat(parts) for parts in zip(*test_batches, strict=True))
    predicted = model(x).argmax(1)
    assert scores["accuracy"] == pytest.approx((predicted == y).float().mean().item())
    assert scores["macro_f1"] == pytest.approx(f1_score(y, predicted, average="macro"))


@here(
    "Seq2SeqTrainingArguments.predict_with_generate",
    "Seq2SeqTrainingArguments.generation_max_length",
    "Seq2SeqTrainingArguments.generation_num_beams",
    "Seq2SeqTrainingArguments.generation_config",
    text="A predict function may call whatever the model can do, `generate` with its arguments too; so may a "
    "metric function.",
)
def _(gpt2, tokens):
    def predict_fn(model, tokens):
        mask = torch.ones_like(tokens)
        return model.generate(
            tokens, attention_mask=mask, max_length=14, num_beams=2, do_sample=False, pad_token_id=0
        )

    predict_step = ll.make_predict_step(gpt2, predict_fn)
    # shows
    gpt2.eval()
    expected = predict_fn(gpt2, tokens)
    found = predict_step(ll.init_state(gpt2), tokens)
    assert equal(found, expected)
    assert torch.equal(found[:, :10], tokens)


@here(
    "Seq2SeqTrainingArguments.sortish_sampler",
    text="Batches of similar lengths, in an order that changes from epoch to epoch.",
)
def _():
    lengths = torch.arange(100) % 10
    loader = ll.make_loader(range(100), batch_size=5, order=ll.data.by_length(lengths))
    # shows
    first, second = (torch.cat(list(loader(ll.TrainState(epoch=epoch)))) for epoch in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


TABLE.section("Checkpoints")


@here(
    "TrainingArguments.save_strategy",
    "TrainingArguments.save_steps",
    text='A predicate says when; the Trainer also saves after the last step. For `"best"` it is '
    "`ll.predicates.at_best()`, asked after `ll.update_best(state, scores)`.",
)
def _(ckpt, state, train):
    done = ll.after_steps(5)
    save_now = ll.every_n_steps(2) | done  # or ll.predicates.at_best()
    for state in train(state, 5):
        if save_now(state):
            ckpt.save(state)
    # shows
    assert [checkpoint.step for checkpoint in ckpt.steps()] == [2, 4, 5]
    state = state.replace(extra={"best": ll.predicates.BestSoFar("eval/loss")})
    at_best, saved = ll.predicates.at_best(), []
    for loss in (0.5, 0.6, 0.4):
        state = ll.update_best(state, {"eval/loss": loss})
        saved.append(at_best(state))
    assert saved == [True, False, True]


@here(
    "TrainingArguments.save_total_limit",
    text="The newest, the best, and any others that a policy wants; the latest and the best are never let go of.",
)
def _(state, train):
    ckpt = ll.checkpoint_io("runs/small", keep_last=2, keep_best=1, monitor="eval/loss")
    # shows
    for state, loss in zip(train(state, 5), (0.5, 0.2, 0.4, 0.3, 0.6), strict=True):
        ckpt.save(state, {"eval/loss": loss})
    assert sorted(path.name for path in Path("runs/small").glob("step-*")) == [
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]


@here(
    "TrainingArguments.load_best_model_at_end",
    "TrainingArguments.metric_for_best_model",
    "TrainingArguments.greater_is_better",
    text='The checkpoints are told which metric, and one line after the loop restores the best. `mode` is `"min"` unless '
    "you say so; the Trainer guesses it from the name, higher being better unless it ends in `loss`.",
)
def _(state, train):
    ckpt = ll.checkpoint_io("runs/small", keep_best=1, monitor="eval/accuracy", mode="max")
    for state, accuracy in zip(train(state, 3), (0.5, 0.8, 0.7), strict=True):
        ckpt.save(state, {"eval/accuracy": accuracy})
    best = ckpt.restore(state, which="best")
    # shows
    assert best.step == 2
    assert equal(best, ckpt.restore(state, which=2))
    assert not equal(best.params, state.params)


@here(
    "TrainingArguments.resume_from_checkpoint",
    text="The state of a run continues from its latest checkpoint, or begins where there is none; the loader gives "
    "what is left of the epoch. The bits are those of a run that was never stopped.",
)
def _(ckpt, model, optimizer, loader, train, state):
    straight = train(ll.copy_state(state), 8)[-1]
    ckpt.save(train(state, 3)[-1])  # here the process ends; the next one makes the same model, optimizer and loader
    # given
    state = ckpt.restore(ll.init_state(model, optimizer, epoch_length=len(loader)))
    # shows
    assert (state.step, state.batch) == (3, 3)
    assert equal(train(state, 5)[-1], straight)


@here(
    "TrainingArguments.ignore_data_skip",
    text="Nothing is read on the way to where the run was, so there is no time to be saved. To begin the epoch "
    "again all the same:",
)
def _(ckpt, state, train, loader):
    ckpt.save(train(state, 3)[-1])
    # given
    state = ckpt.restore(state)
    from_its_start = state.replace(batch=0)
    # shows
    assert (len(list(loader(state))), len(list(loader(from_its_start)))) == (2, 5)


@here(
    "TrainingArguments.restore_callback_states_from_checkpoint",
    text="What is to be remembered stands in `state.extra`, and is saved and restored with the rest.",
)
def _(ckpt, model, optimizer):
    state = ll.init_state(
        model, optimizer, extra={"best": ll.predicates.BestSoFar("eval/loss"), "mine": torch.zeros(3)}
    )
    ckpt.save(ll.update_best(state, {"eval/loss": 0.3}))
    state = ckpt.restore(state)
    # shows
    assert state.extra["best"].best == 0.3
    assert equal(state.extra["mine"], torch.zeros(3))


@here(
    "TrainingArguments.save_only_model",
    text="A state without the optimizer's, which is restored with `weights_only=True`, and from which no run can "
    "continue. As others read them: `ll.checkpoint.save_pretrained(model, state, folder)`.",
)
def _(gpt2, tokens, ckpt):
    state = ll.init_state(gpt2, ll.optimizer(torch.optim.AdamW, lr=1e-2)).replace(step=500)
    # given
    ckpt.save(state.replace(opt_state=None), {"eval/loss": 0.3})
    ll.checkpoint.save_pretrained(gpt2, state, "runs/gpt2")
    # shows
    assert set(ckpt.latest().parts) == {"params"}
    again = ckpt.restore(ll.copy_state(state).replace(step=0), weights_only=True)
    assert equal(again.params, state.params)
    assert again.step == 0
    with pytest.raises(ValueError, match=r"opt_state.* is in the state, and not in the checkpoint"):
        ckpt.restore(state)
    again = transformers.GPT2LMHeadModel.from_pretrained("runs/gpt2")
    assert torch.equal(again(input_ids=tokens).logits, gpt2(input_ids=tokens).logits)


nothing(
    "TrainingArguments.save_on_each_node",
    text="A checkpoint is written once, into a directory that all ranks see; where none is shared, no node could "
    "resume from its own alone.",
)


@here(
    "TrainingArguments.enable_jit_checkpoint",
    text="A signal is a predicate: the batch at hand is finished, and then the loop is left.",
)
def _(train_step, state, loader, ckpt):
    import signal

    with ll.after_signal(signal.SIGUSR1) as stop_now:  # SIGTERM, as a rule
        for batch in loader(state):
            state, metrics = train_step(state, batch)
            if state.step == 2:
                signal.raise_signal(signal.SIGUSR1)
            if stop_now(state):
                break
    ckpt.save(state)
    # shows
    assert ckpt.latest().step == 2


TABLE.section("Seeds and devices")


@here(
    "TrainingArguments.seed",
    "TrainingArguments.data_seed",
    text="The state's seed is for dropout and the like, the loader's for the order. The weights come from torch's "
    "own, `torch.manual_seed`, when the model is made.",
)
def _(model, optimizer, train_set):
    loader = ll.make_loader(train_set, batch_size=8, seed=42)
    state = ll.init_state(model, optimizer, seed=42, epoch_length=len(loader))
    # shows
    again = ll.make_loader(train_set, batch_size=8, seed=42)
    other = ll.make_loader(train_set, batch_size=8, seed=43)
    assert equal(list(loader(state)), list(again(state)))
    assert not equal(list(loader(state)), list(other(state)))
    dropout = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
    grad_fn = ll.make_grad_fn(dropout, lambda model, batch: model(batch[0]).mean())
    grads = [grad_fn(ll.init_state(dropout, seed=seed), train_set[:8]).grads for seed in (42, 42, 43)]
    assert equal(grads[0], grads[1])
    assert not equal(grads[0], grads[2])


@plain(
    "TrainingArguments.full_determinism",
    text="Steps are functions of the state's seed and step already; for kernels that add up in any order, torch's "
    "switch.",
)
def _():
    torch.use_deterministic_algorithms(True)
    # shows
    found = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    assert found


@plain(
    "TrainingArguments.use_cpu",
    "TrainingArguments before 5.no_cuda",
    "TrainingArguments before 5.use_mps_device",
    text="The model is where you put it, and the loader moves batches to `device`.",
)
def _(model, train_set, state):
    model = model.to("cpu")
    loader = ll.make_loader(train_set, batch_size=8, device="cpu")
    # shows
    assert {p.device.type for p in model.parameters()} == {x.device.type for x, y in loader(state)} == {"cpu"}


TABLE.section("Many processes")


@here(
    "TrainingArguments.ddp_backend",
    "TrainingArguments.ddp_timeout",
    "TrainingArguments.local_rank",
    text="One `with` joins what torchrun started, and gives this process's device.",
)
def _(torchrun):
    with ll.distributed.setup(backend="gloo", timeout=1800) as device:
        place = ll.distributed.rank(), ll.distributed.world_size(), torch.distributed.get_backend()
    # shows
    assert place == (0, 1, "gloo")
    assert device.type == getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")


@plain(
    "TrainingArguments.ddp_find_unused_parameters",
    "TrainingArguments.ddp_bucket_cap_mb",
    "TrainingArguments.ddp_broadcast_buffers",
    "TrainingArguments.ddp_static_graph",
    text="Arguments of torch's own wrapper; the loop stays as it is.",
)
def _(one_process, model, loss_fn, optimizer, batch):
    wrapped = DistributedDataParallel(model, find_unused_parameters=False, bucket_cap_mb=25, static_graph=True)
    train_step = ll.make_train_step(ll.make_grad_fn(wrapped, loss_fn), optimizer, donate=True)
    # shows
    plain = ll.copy_state(ll.init_state(model, optimizer))
    state, _ = train_step(ll.init_state(wrapped, optimizer), batch)
    expected, _ = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)(plain, batch)
    assert equal(state.params, expected.params)
    assert "broadcast_buffers" in inspect.signature(DistributedDataParallel).parameters


@plain(
    "TrainingArguments.fsdp",
    "TrainingArguments.fsdp_config",
    text="torch's `fully_shard`, for each block and then the whole; the keys of the config are its arguments "
    "(`reshard_after_forward`, `offload_policy`), `ll.losses.recompute` is its `activation_checkpointing`, and "
    '`ll.checkpoint.state_dict` gathers what `"FULL_STATE_DICT"` does.',
)
def _(one_process, gpt2, lm_loss, optimizer, tokens):
    for block in gpt2.transformer.h:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(gpt2)
    train_step = ll.make_train_step(ll.make_grad_fn(gpt2, lm_loss), optimizer, donate=True)
    # shows
    state = ll.init_state(gpt2, optimizer)
    before = {name: tensor.full_tensor().clone() for name, tensor in state.params.items()}
    state, metrics = train_step(state, tokens)
    assert math.isfinite(ll.compute(metrics)["loss"])
    assert all(not torch.equal(tensor.full_tensor(), before[name]) for name, tensor in state.params.items())
    assert ll.checkpoint.state_dict(gpt2, state)["transformer.wte.weight"].shape == (50, 16)
    assert {"reshard_after_forward", "offload_policy"} <= set(inspect.signature(fully_shard).parameters)


nothing(
    "TrainingArguments.deepspeed",
    text="DeepSpeed's engine is an optimizer, a loop and a state of its own. What ZeRO does torch's `fully_shard` "
    "does, with `CPUOffloadPolicy` for its offloading.",
)


@here(
    "TrainingArguments.parallelism_config",
    text="torch's device mesh and its plans for tensor parallelism; looplib is told which ranks divide the data.",
)
def _(one_process):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    ll.distributed.set_data_parallel_group(mesh["data"])
    # shows
    place = ll.distributed.rank(), ll.distributed.world_size()
    ll.distributed.set_data_parallel_group(None)
    assert place == (0, 1)


@here(
    "TrainingArguments.accelerator_config",
    "AcceleratorConfig.split_batches",
    "AcceleratorConfig.dispatch_batches",
    "AcceleratorConfig.even_batches",
    "AcceleratorConfig.use_seedable_sampler",
    text="These are about loaders that do not know of ranks. Here the global batches are planned from (seed, "
    "epoch) and each rank reads its rows of them: nothing is sent, repeated or dropped.",
)
def _(test_set):
    loader = ll.make_loader(test_set, batch_size=10, seed=42)
    # shows
    batches = list(loader(ll.TrainState()))
    assert [len(x) for x, y in batches] == [10, 10, 5]
    assert equal(torch.cat([x for x, y in batches]).sort(0).values, test_set[:][0].sort(0).values)
    assert equal(batches, list(ll.make_loader(test_set, batch_size=10, seed=42)(ll.TrainState())))


@here("AcceleratorConfig.non_blocking", text="With `pin_memory=True` the copy to the device is not waited for.")
def _(train_set):
    loader = ll.make_loader(train_set, batch_size=8, pin_memory=torch.accelerator.is_available(), device="cpu")
    # shows
    assert next(iter(loader(ll.TrainState())))[0].device.type == "cpu"


@here(
    "AcceleratorConfig.gradient_accumulation_kwargs",
    text="`num_steps` is `microbatches`, or a `size` of each; a window never reaches over the end of an epoch, and "
    "what is sent is sent once.",
)
def _(grad_fn, state, batch):
    accumulated = ll.accumulate(grad_fn, size=5)
    # shows
    assert close(accumulated(state, batch).grads, grad_fn(state, batch).grads)


nothing("AcceleratorConfig.use_configured_state", text="There is no accelerator, and so no state of one.")


TABLE.section("Hub, debugging, and flags of scripts")


@here(
    "TrainingArguments.push_to_hub",
    "TrainingArguments.hub_model_id",
    "TrainingArguments.hub_token",
    "TrainingArguments.hub_private_repo",
    "TrainingArguments.hub_strategy",
    "TrainingArguments.hub_always_push",
    text="A checkpoint is a folder, which huggingface_hub uploads in the background, in one commit. (The tests send them to "
    "a stand-in for the Hub.)",
)
def _(server, ckpt, state, train):
    import huggingface_hub

    hub = huggingface_hub.HfApi(token=None)
    repo = hub.create_repo("me/gpt2-small", private=True, exist_ok=True).repo_id
    for state in train(state, 4):
        path = ckpt.save(state)
        target = f"checkpoints/{path.name}"
        pushed = hub.upload_folder(repo_id=repo, folder_path=path, path_in_repo=target, run_as_future=True)
    # shows
    pushed.result()
    assert [path for path in server.repos["me/gpt2-small"].files if "step-00000004/manifest" in path]


@plain(
    "TrainingArguments.hub_revision",
    text="huggingface_hub's own functions, for a branch, or for other files than checkpoints; `run_as_future=True` does "
    "not wait. (The tests send them to a stand-in for the Hub.)",
)
def _(server, gpt2):
    import huggingface_hub

    ll.checkpoint.save_pretrained(gpt2, ll.init_state(gpt2), "runs/gpt2")
    repo = huggingface_hub.create_repo("user/gpt2-small", private=True, exist_ok=True).repo_id
    folder = {"folder_path": "runs/gpt2", "revision": "main"}
    pushed = huggingface_hub.upload_folder(repo_id=repo, token=None, run_as_future=True, **folder)
    # shows
    pushed.result()
    assert {"config.json", "model.safetensors"} <= server.repos["user/gpt2-small"].files.keys()


@here(
    "TrainingArguments.debug",
    text='For `"underflow_overflow"`: gradients that are not finite raise an error which names the parameters.',
)
def _(model, batch):
    def loss_fn(model, batch):
        return model[2](model[0](batch[0]).detach()).mean() * math.inf

    grad_fn = ll.make_grad_fn(model, loss_fn, allow_unused=True)
    # given
    optimizer = ll.optim.apply_if_finite(ll.optimizer(torch.optim.AdamW, lr=1e-2), max_consecutive=0)
    train_step = ll.make_train_step(grad_fn, optimizer)
    # shows
    with pytest.raises(ll.optim.NonFiniteGradientsError) as error:
        train_step(ll.init_state(model, optimizer), batch)
    assert "2.bias" in str(error.value)
    assert "0.bias" not in str(error.value)


@here(
    "TrainingArguments.skip_memory_metrics",
    text="The peaks of a stage, on the CPU and on the accelerator; psutil has the memory in use before and after.",
)
def _(log, rows, state, batch, train_step):
    import psutil

    process = psutil.Process()
    before = process.memory_info().rss
    ll.log.memory(reset=True)  # a stage begins
    state, metrics = train_step(state, batch)
    kept = process.memory_info().rss - before
    log(state, {"train/host_kept_bytes": kept, **ll.log.memory(reset=True, prefix="train/")})
    # shows
    assert rows[0]["train/host_peak_bytes"] > 1e6
    assert rows[0]["train/host_kept_bytes"] == kept


nothing(
    "TrainingArguments.do_train",
    "TrainingArguments.do_eval",
    "TrainingArguments.do_predict",
    text="Flags of example scripts, which the Trainer does not read either: your script calls what it wants.",
)


TABLE.section("Names of before transformers 5")


@here(
    "TrainingArguments before 5.evaluation_strategy",
    text="Now `eval_strategy`: a predicate.",
)
def _(state):
    eval_now = ll.at_epoch_end()
    # shows
    assert eval_now(state.replace(epoch=1, batch=0))
    assert not eval_now(state.replace(epoch=1, batch=1))


@here("TrainingArguments before 5.logging_dir", text="Each sink is told where.")
def _(state):
    log = ll.log.tracker("tensorboard", "runs/small/tensorboard")
    # shows
    log(state, {"train/loss": 0.5})
    assert list(Path("runs/small/tensorboard").glob("events.*"))


@here(
    "TrainingArguments before 5.group_by_length",
    text="Batches of similar lengths.",
)
def _(train_set):
    loader = ll.make_loader(train_set, batch_size=4, order=ll.data.by_length([1, 9] * 20))
    # shows
    assert len(loader) == 10


@here(
    "TrainingArguments before 5.include_inputs_for_metrics",
    text="The metric function is given the batch.",
)
def _(model, state, test_batches):
    def metric_fn(model, batch):
        x, y = batch
        return {"mean_input": ll.Mean(x.sum(), x.numel())}

    # shows
    eval_step = ll.make_eval_step(model, metric_fn)
    x = torch.cat([x for x, y in test_batches])
    assert ll.evaluate(eval_step, state, test_batches)["mean_input"] == pytest.approx(x.mean().item(), rel=1e-5)


@here(
    "TrainingArguments before 5.include_tokens_per_second",
    text="A meter says where a step's time goes, and how many tokens went through in a second.",
)
def _(gpt2, lm_loss, optimizer, tokens):
    meter = ll.log.meter(tokens=lambda batch: batch.numel())
    train_step = ll.make_train_step(meter.grad_fn(ll.make_grad_fn(gpt2, lm_loss)), meter.optimizer(optimizer))
    # shows
    state = ll.init_state(gpt2, optimizer)
    for batch in meter.data([tokens] * 3):
        state, _ = train_step(state, batch)
    assert meter.read()["tokens_per_second"] > 0


@here(
    "TrainingArguments before 5.per_gpu_train_batch_size",
    "TrainingArguments before 5.per_gpu_eval_batch_size",
    "TrainingArguments before 5.split_batches",
    "TrainingArguments before 5.dispatch_batches",
    text="`batch_size` is that of all ranks together; each reads its own rows of it.",
)
def _(train_set):
    loader = ll.make_loader(train_set, batch_size=16)
    # shows
    assert [len(x) for x, y in loader(ll.TrainState())] == [16, 16, 8]


@here(
    "TrainingArguments before 5.half_precision_backend",
    "TrainingArguments before 5.fp16_backend",
    "TrainingArguments before 5.fp16_opt_level",
    text="torch's autocast; with weights of half precision, masters of them in float32 (apex's O2).",
)
def _(gpt2, lm_loss, tokens):
    optimizer = ll.optim.master_weights(ll.optimizer(torch.optim.AdamW, lr=1e-3))
    state = ll.init_state(gpt2.bfloat16(), optimizer)
    # shows
    state, _ = ll.make_train_step(ll.make_grad_fn(gpt2, lm_loss), optimizer)(state, tokens)
    assert {tensor.dtype for tensor in state.params.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in state.opt_state["master"].values()} == {torch.float32}


@here(
    "TrainingArguments before 5.adafactor",
    text="A class like any other.",
)
def _(model, loss_fn, batch):
    optimizer = ll.optimizer(torch.optim.Adafactor, lr=1e-3)
    # shows
    theirs = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    assert close(looplib_updates(model, loss_fn, batch, optimizer), raw_updates(model, loss_fn, batch, theirs))


@here(
    "TrainingArguments before 5.torchdynamo",
    text="A backend of the compiled step.",
)
def _(grad_fn, optimizer, state, batch):
    train_step = ll.compile_step(ll.make_train_step(grad_fn, optimizer), backend="eager")
    # shows
    state, _ = train_step(state, batch)
    assert state.step == 1


@plain(
    "TrainingArguments before 5.fsdp_min_num_params",
    "TrainingArguments before 5.fsdp_transformer_layer_cls_to_wrap",
    "TrainingArguments before 5.sharded_ddp",
    text="Which modules are sharded by themselves is a loop over them.",
)
def _(one_process, gpt2):
    for block in [module for module in gpt2.modules() if isinstance(module, GPT2Block)]:
        fully_shard(block)
    # shows
    assert isinstance(gpt2.transformer.h[0].mlp.c_fc.weight, torch.distributed.tensor.DTensor)
    assert not isinstance(gpt2.transformer.wte.weight, torch.distributed.tensor.DTensor)


@plain(
    "TrainingArguments before 5.push_to_hub_model_id",
    "TrainingArguments before 5.push_to_hub_organization",
    "TrainingArguments before 5.push_to_hub_token",
    text="Name and token of the repository that huggingface_hub uploads to. (The tests use a stand-in for the Hub.)",
)
def _(server):
    import huggingface_hub

    repo = huggingface_hub.HfApi(token=None).create_repo("organization/gpt2-small", exist_ok=True).repo_id
    # shows
    assert [*server.repos] == [repo] == ["organization/gpt2-small"]


@here(
    "TrainingArguments before 5.save_safetensors",
    text="Weights go out as safetensors, or as a `state_dict` for `torch.save`.",
)
def _(model, state):
    ll.checkpoint.save_safetensors(model, state, "model.safetensors")
    torch.save(ll.checkpoint.state_dict(model, state), "model.pt")
    # shows
    assert equal(torch.load("model.pt"), dict(model.state_dict()))
    assert equal(ll.checkpoint.load_state_dict(model, state, "model.safetensors").params, state.params)


nothing(
    "TrainingArguments before 5.overwrite_output_dir",
    text="Nothing that was written is taken away: checkpoints and logs continue, and another run has another directory.",
)
nothing(
    "TrainingArguments before 5.use_legacy_prediction_loop",
    text="There is one way to evaluate, which keeps no outputs.",
)
nothing(
    "TrainingArguments before 5.past_index",
    text="A memory from one batch to the next is a tensor in `state.extra`, given to the model by a step of your "
    "own.",
)
nothing(
    "TrainingArguments before 5.jit_mode_eval",
    "TrainingArguments before 5.use_ipex",
    "TrainingArguments before 5.tpu_num_cores",
    "TrainingArguments before 5.tpu_metrics_debug",
    "TrainingArguments before 5.xpu_backend",
    "TrainingArguments before 5.mp_parameters",
    "TrainingArguments before 5.ray_scope",
    text="About TorchScript, IPEX, TPUs, XPUs, SageMaker and Ray, none of which looplib knows of.",
)
