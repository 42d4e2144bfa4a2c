"""recipes/FROM_TRANSFORMERS.md: the code of each row does what the row says, and each name of transformers has a row.

Values are those of transformers' own Trainer, schedules and callbacks where these can be asked.
"""

import copy
import dataclasses
import inspect
import json
import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import schedulefree
import torch
import torchao.optim
import transformers
from at_hand import GaLoreAdamW, Lion
from checks import (
    assert_gradient,
    at,
    close,
    equal,
    evaluated,
    fires,
    logged,
    looplib_updates,
    parameters,
    rates,
    raw_updates,
    restored,
    same_gradient,
    same_gradient_of_gpt2,
    saved,
    scheduled,
    sizes,
    updates,
    values,
)
from huggingface_hub import ModelCard
from migration_page import ROOT, Page, assert_complete, assert_readable
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, Adagrad, AdamW, RMSprop
from transformers import trainer_callback, trainer_utils
from transformers.trainer_pt_utils import AcceleratorConfig, LabelSmoother, LengthGroupedSampler
from transformers.training_args import OptimizerNames

import looplib as ll

PAGE = Page(ROOT / "recipes/FROM_TRANSFORMERS.md")

PLAIN = {"lr": 5e-5, "weight_decay": 0.0, "fused": True}
CHECKS = {
    "TrainingArguments.per_device_train_batch_size": sizes(8, 8, 8, 8, 8, of_two=[[4] * 5] * 2),
    "TrainingArguments.max_steps": at(12, 2, 2),
    "TrainingArguments.dataloader_pin_memory": sizes(8, 8, 8, 8, 8),
    "TrainingArguments.learning_rate": updates(AdamW, **PLAIN),
    "TrainingArguments.lr_scheduler_type": rates("cosine_with_min_lr", 5e-5, 100, 2000, 2001, min_lr=5e-6),
    "SchedulerType.linear": rates("linear"),
    "SchedulerType.cosine": rates("cosine"),
    "SchedulerType.cosine_with_restarts": rates("cosine_with_restarts", num_cycles=3),
    "SchedulerType.cosine_with_min_lr": rates("cosine_with_min_lr", min_lr=1e-5),
    # their last rate, after the last update, goes up again
    "SchedulerType.cosine_warmup_with_min_lr": rates("cosine_warmup_with_min_lr", steps=100, min_lr=1e-5),
    "SchedulerType.polynomial": rates("polynomial", power=2.0, lr_end=1e-7),
    "SchedulerType.constant": rates("constant"),
    "SchedulerType.constant_with_warmup": rates("constant_with_warmup"),
    "SchedulerType.inverse_sqrt": rates("inverse_sqrt"),
    "SchedulerType.warmup_stable_decay": rates("warmup_stable_decay", num_decay_steps=30, min_lr_ratio=0.1),
    "TrainingArguments.optim": updates(AdamW, **PLAIN),
    "TrainingArguments.adam_beta1": updates(AdamW, betas=(0.9, 0.95), eps=1e-6, **PLAIN),
    "OptimizerNames.sgd": updates(SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "OptimizerNames.adagrad": updates(Adagrad, lr=0.01, fused=True),
    "OptimizerNames.rmsprop": updates(RMSprop, close, lr=0.01, alpha=0.95, centered=True),
    "OptimizerNames.adafactor": updates(transformers.Adafactor, lr=1e-3, scale_parameter=False, relative_step=False),
    "OptimizerNames.lion_32bit": updates(Lion, lr=1e-4, betas=(0.95, 0.98), weight_decay=0.1),
    "TrainingArguments before 5.adafactor": updates(Adafactor, close, lr=1e-3),
    "TrainingArguments.gradient_accumulation_steps": same_gradient,
    "TrainingArguments.activation_checkpointing": same_gradient_of_gpt2,
    "TrainingArguments.torch_empty_cache_steps": fires(last=200, clear_now=[100, 200]),
    "TrainingArguments.logging_strategy": fires(last=150, log_now=[1, 50, 100, 150]),
    "TrainingArguments.eval_delay": fires(30, 40, 50, last=50),
    "TrainingArguments.save_strategy": saved(2, 4, 5),
    "TrainingArguments.eval_on_start": evaluated("eval/", batches=2),
    "TrainingArguments.per_device_eval_batch_size": evaluated(),
    "TrainingArguments.enable_jit_checkpoint": saved(2),
    "TrainingArguments.accelerator_config": sizes(10, 10, 5, of_two=[[5, 5, 3], [5, 5, 2]]),
    "AcceleratorConfig.non_blocking": sizes(8, 8, 8, 8, 8),
    "TrainingArguments before 5.evaluation_strategy": fires(5, 10, 15, 20, 25, 30),
    "TrainingArguments before 5.group_by_length": sizes(4, 4, 4, 4, 4, 4, 4, 4, 4, 4),
    "TrainingArguments before 5.per_gpu_train_batch_size": sizes(16, 16, 8, of_two=[[8, 8, 4]] * 2),
    "Trainer.get_num_trainable_parameters": values(count=4 * 8 + 8 + 8 * 3 + 3),
    "Trainer.num_examples": values(examples=40, batch_size=8, total=15),
    "Trainer.get_optimizer_group": values(found=["0.bias", "2.bias"]),
    "Trainer.add_callback": logged(2, 4),
    "Trainer.save_state": restored,
    "Trainer._save_checkpoint": restored,
    "Trainer.evaluate": evaluated("eval/"),
    "Trainer.evaluate(eval_dataset)": evaluated("test/"),
    # forward, and backward: all weights, and the inputs of the second layer
    "Trainer.floating_point_ops": values(flops=2 * 2 * 12 * (4 * 8 + 8 * 3) + 2 * 12 * 8 * 3),
    "Trainer._inner_training_loop": logged(2, 4, 5),
    "TrainerCallback.on_init_end": logged(0, 5),
    "TrainerCallback.on_epoch_begin": values(events=["begin", "end"] * 2),
    "TrainerCallback.on_step_begin": values(
        events=[(when, step + (when == "end")) for step in range(5) for when in ("begin", "end")]
    ),
    "TrainerCallback.on_prediction_step": values(sizes=[10, 10, 5]),
    "TrainerControl.should_save": saved(3, 4, 5),
    "TrainerState.is_local_process_zero": values(first=True),
    "TrainerState.log_history": lambda history: (
        history.items() >= {"step": [1, 2, 3], "train/loss": [1.0, 0.5, 1 / 3]}.items()
    ),
}


def shows(name):
    """A decorator: the function is the check of this row."""

    def register(check):
        assert CHECKS.setdefault(name, check) is check, name
        return check

    return register


@shows("TrainingArguments.output_dir")
def _(ckpt, log, state):
    ckpt.save(state)
    log(state, {"train/loss": 0.5})
    assert sorted(path.name for path in Path("runs/small").iterdir()) == ["checkpoints", "log.jsonl"]


def arguments(**options):
    quiet = {"save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": "none"}
    return transformers.TrainingArguments("unused", use_cpu=True, **quiet | options)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean()}


def history_of_the_trainer(name, **options):
    """Rows of the log of transformers' Trainer that have `name`, in a run with five batches per epoch."""
    rows = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(40)]
    trainer = transformers.Trainer(Regression(), arguments(**options), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return [row for row in trainer.state.log_history if name in row]


@shows("TrainingArguments.num_train_epochs")
def _(state, lr):
    assert (state.epoch, state.batch, state.step) == (2, 3, 13)
    history = history_of_the_trainer("loss", num_train_epochs=2.5, logging_steps=1)
    assert [row["step"] for row in history] == list(range(1, 14))
    assert [row["learning_rate"] for row in history] == pytest.approx([lr(step) for step in range(13)])


@shows("TrainingArguments.dataloader_drop_last")
def _(train_set, loader):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process that has threads
        batches = list(loader(ll.TrainState()))
    assert equal(batches, list(ll.make_loader(train_set, batch_size=16)(ll.TrainState()))[:2])


@shows("TrainingArguments.train_sampling_strategy")
def _(lengths, loader):
    grouped = torch.stack(list(loader(ll.TrainState())))
    theirs = torch.tensor(list(LengthGroupedSampler(4, lengths=lengths.tolist()))).view(100, 4)
    assert sorted(grouped.flatten().tolist()) == list(range(400))
    spreads = [(lengths[rows].amax(1) - lengths[rows].amin(1)).sum() for rows in (grouped, theirs)]
    assert max(spreads) < (lengths.view(100, 4).amax(1) - lengths.view(100, 4).amin(1)).sum() / 4
    assert lengths[grouped[0]].max() == lengths[theirs[0]].max() == lengths.max()


@shows("TrainingArguments.remove_unused_columns")
def _(loss_fn, gpt2, tokens):
    batch = {"input_ids": tokens, "targets": tokens, "source": ["a", "b", "c"]}
    gradient = ll.make_grad_fn(gpt2, loss_fn)(ll.init_state(gpt2), batch)
    assert_gradient(gradient, gpt2, gpt2(input_ids=tokens, labels=tokens).loss)


@shows("TrainingArguments before 5.warmup_ratio")
def _(lr):
    rates("linear", 5e-5, arguments(warmup_steps=0.06).get_warmup_steps(2000), 2000)(lr)


@shows("SchedulerType.reduce_lr_on_plateau")
def _(optimizer, state):
    theirs = SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, patience=0, threshold=0.0)
    for loss in (0.5, 0.4, 0.6):
        scheduler.step(loss)
    assert ll.optim.hyperparameters(optimizer, state) == {"lr": pytest.approx(theirs.param_groups[0]["lr"])}


@shows("TrainingArguments.weight_decay")
def _(optimizer, gpt2):
    state = ll.init_state(gpt2, optimizer)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.params.items()}
    params, _, _ = optimizer.update(zeros, state.opt_state, state.params, 0)
    decayed = {name for name, tensor in params.items() if not torch.equal(tensor, state.params[name])}
    theirs = transformers.Trainer.get_decay_parameter_names(None, gpt2)
    assert decayed == set(theirs) - {"lm_head.weight"}  # another name of the embedding


@shows("TrainingArguments.optim_target_modules")
def _(optimizer, gpt2):
    inner = ll.init_state(gpt2, optimizer).opt_state["inner_states"]
    matrices = {name for name, tensor in gpt2.named_parameters() if ".h." in name and tensor.ndim == 2}
    assert set(inner["muon"]["state"]) == matrices


@shows("OptimizerNames.adamw_torch_4bit")
def _(optimizer, model, loss_fn, batch):
    with torch.compiler.set_stance("force_eager"):
        updates(torchao.optim.AdamW8bit, lr=1e-4)(optimizer, model, loss_fn, batch)


@shows("OptimizerNames.schedule_free_adamw")
def _(state, train_step, optimizer, model, loss_fn, batch):
    raw = copy.deepcopy(model)
    theirs = schedulefree.AdamWScheduleFree(raw.parameters(), lr=0.01, warmup_steps=2)
    theirs.train()
    for _ in range(3):
        state, _ = train_step(state, batch)
        theirs.zero_grad()
        loss_fn(raw, batch).backward()
        theirs.step()
    assert close(state.params, parameters(raw))
    theirs.eval()
    assert close(ll.eval_state(optimizer, state).params, parameters(raw))


@shows("OptimizerNames.galore_adamw")
def _(optimizer, galore, model, loss_fn, batch):
    def theirs(raw):
        biases = {"params": [raw[0].bias, raw[2].bias]}
        return GaLoreAdamW([{"params": [raw[0].weight, raw[2].weight], **galore}, biases], lr=1e-2)

    ours = looplib_updates(model, loss_fn, [batch] * 3, optimizer)
    assert equal(ours, raw_updates(model, loss_fn, [batch] * 3, theirs))


@shows("TrainingArguments.average_tokens_across_devices")
def _(loss_fn, gpt2, tokens):
    pieces = [tokens, tokens[:1, :4]]
    gradient = ll.accumulate(ll.make_grad_fn(gpt2, loss_fn))(ll.init_state(gpt2), pieces)
    assert_gradient(gradient, gpt2, sum(loss_fn(gpt2, piece).total for piece in pieces) / (3 * 9 + 3))


@shows("TrainingArguments.max_grad_norm")
def _(grad_fn, state, batch, model, loss_fn):
    clipped = grad_fn(state, batch)
    loss_fn(model, batch).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert equal(clipped.grads, {name: tensor.grad for name, tensor in model.named_parameters()})
    assert ll.compute(clipped.metrics)["grad_norm"] == norm.item() > 0.1


@shows("TrainingArguments.label_smoothing_factor")
def _(loss_fn, gpt2, tokens):
    gradient = ll.make_grad_fn(gpt2, loss_fn)(ll.init_state(gpt2), tokens)
    logits = gpt2(input_ids=tokens).logits
    assert_gradient(gradient, gpt2, LabelSmoother(0.1)({"logits": logits}, tokens, shift_labels=True))


@shows("TrainingArguments.neftune_noise_alpha")
def _(noisy_loss, gpt2, lm_loss, tokens):
    state = ll.init_state(gpt2)
    noisy, plain = (ll.make_grad_fn(gpt2, loss)(state, tokens).grads for loss in (noisy_loss, lm_loss))
    assert not close(noisy, plain, atol=1e-4)
    gpt2.eval()
    assert equal(noisy_loss(gpt2, tokens).total, lm_loss(gpt2, tokens).total)


@shows("TrainingArguments.use_liger_kernel")
def _(loss_fn, gpt2, lm_loss, tokens):
    same_gradient_of_gpt2(ll.make_grad_fn(gpt2, loss_fn), gpt2, lm_loss, tokens)


@shows("TrainingArguments.bf16")
def _(grad_fn, gpt2, lm_loss, tokens):
    gradient = grad_fn(ll.init_state(gpt2), tokens)
    with torch.autocast("cpu", torch.bfloat16):
        loss = lm_loss(gpt2, tokens).compute()
    assert_gradient(gradient, gpt2, loss, atol=1e-5)
    assert {tensor.dtype for tensor in gradient.grads.values()} == {torch.float32}


@shows("TrainingArguments.fp16")
def _(grad_fn, optimizer, gpt2, tokens):
    state, metrics = ll.make_train_step(grad_fn, optimizer)(ll.init_state(gpt2, optimizer), tokens)
    assert ll.compute(metrics)["loss_scale"] == torch.amp.GradScaler("cpu").get_scale()
    assert state.step == 1


@shows("TrainingArguments.bf16_full_eval")
def _(scores, gpt2, lm_loss, tokens):
    assert {tensor.dtype for tensor in gpt2.parameters()} == {torch.float32}
    with torch.no_grad():
        half = lm_loss(gpt2.to(torch.bfloat16).eval(), tokens).compute()  # as the Trainer does
    assert scores["loss"] == half.item()


@shows("TrainingArguments.tf32")
def _(after):
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    assert precision == "high"


@shows("TrainingArguments.activation_checkpointing_kwargs")
def _(lean_loss, gpt2, lm_loss, tokens):
    calls = []
    for number, block in enumerate(gpt2.transformer.h):
        block.ln_1.register_forward_hook(lambda *_, number=number: calls.append(number))
    gradient = ll.make_grad_fn(gpt2, lean_loss)(ll.init_state(gpt2), tokens)
    assert sorted(calls) == [0, 0, 1]
    assert_gradient(gradient, gpt2, lm_loss(gpt2, tokens).compute())


@shows("TrainingArguments.torch_compile")
def _(compiled_step, train_step, state, batch):
    ours = eager = state
    for _ in range(3):
        (ours, _), (eager, _) = compiled_step(ours, batch), train_step(eager, batch)
    assert close(ours.params, eager.params)


@shows("TrainingArguments.auto_find_batch_size")
def _(grad_fn, model, loss_fn, state, batch):
    def holds_four(_, inputs):
        if len(inputs[0]) > 4:
            raise torch.OutOfMemoryError("out of memory")

    hook = model.register_forward_pre_hook(holds_four)
    with pytest.warns(UserWarning, match="microbatches of"):
        gradient = grad_fn(state, batch)
    hook.remove()
    assert ll.compute(gradient.metrics)["microbatch_size"] == 3
    assert_gradient(gradient, model, loss_fn(model, batch))


@shows("TrainingArguments.use_cache")
def _(gpt2, tokens):
    assert gpt2(input_ids=tokens).past_key_values is None


@shows("TrainingArguments.logging_nan_inf_filter")
def _(window, state):
    assert len(window) == state.step == 2
    assert math.isfinite(ll.compute(window.metrics())["loss"])


@shows("TrainingArguments.include_num_input_tokens_seen")
def _(state):
    assert state.extra["tokens"].item() == 40


@shows("TrainingArguments.log_on_each_node")
def _(log, state):
    log(state, {"train/loss": 0.5})
    assert ll.log.read_jsonl("runs/small/log-0.jsonl")[0]["train/loss"] == 0.5


@shows("TrainingArguments.disable_tqdm")
def _(capsys, state):
    assert state.epoch == 1
    assert capsys.readouterr().err == ""  # which is no terminal


@shows("TrainingArguments.report_to")
def _(log, state):
    log(state, {"train/loss": 0.5})
    assert ll.log.read_jsonl("log.jsonl")[0]["train/loss"] == 0.5
    assert list(Path("runs/tb").glob("events.*"))


@shows("TrainingArguments.trackio_space_id")
def _(run, state, monkeypatch):
    seen = []
    sent = SimpleNamespace(config={}, log=lambda values, step: seen.append((step, values)), finish=lambda: None)
    trackio = SimpleNamespace(init=lambda **options: seen.append(options["space_id"]) or sent)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    after = run()
    after.log(state, {"train/loss": 0.5})
    after.log.close()
    assert seen == ["me/space", (0, {"train/loss": 0.5})]


@shows("TrainingArguments.eval_strategy")
def _(rows):
    steps = [
        row["step"] for row in history_of_the_trainer("eval_loss", max_steps=5, eval_strategy="steps", eval_steps=2)
    ]
    assert [row["step"] for row in rows] == steps == [2, 4, 5]
    history = history_of_the_trainer("loss", max_steps=13, logging_steps=0.1)
    assert [row["step"] for row in history][:3] == [math.ceil(0.1 * 13) * k for k in (1, 2, 3)]


@shows("TrainingArguments.prediction_loss_only")
def _(eval_step, state, test_batches):
    assert list(ll.evaluate(eval_step, state, test_batches)) == ["loss"]


@shows("TrainingArguments.eval_do_concat_batches")
def _(logits, predict_step, state, test_batches, model, test_set):
    assert close(logits, model(test_set[:][0]).detach())
    path = ll.predict_to("runs/predictions", predict_step, state, test_batches)
    assert equal(ll.evaluation.read_predictions(path)["output"].clone(), logits)


@shows("TrainingArguments.include_for_metrics")
def _(metric_fn, model, state, test_batches, test_set):
    scores = ll.evaluate(ll.make_eval_step(model, metric_fn), state, test_batches)
    x, y = test_set[:]
    positive = F.cross_entropy(model(x[x[:, 0] > 0]), y[x[:, 0] > 0])
    assert scores["positive/loss"] == pytest.approx(positive.item(), rel=1e-6)


@shows("TrainingArguments.batch_eval_metrics")
def _(metric_fn, model, state, test_batches, test_set):
    from sklearn.metrics import accuracy_score, f1_score

    scores = ll.evaluate(ll.make_eval_step(model, metric_fn), state, test_batches)
    x, y = test_set[:]
    predicted = model(x).argmax(1)
    expected = {"accuracy": accuracy_score(y, predicted), "macro_f1": f1_score(y, predicted, average="macro")}
    assert scores == pytest.approx(expected)


@shows("Seq2SeqTrainingArguments.predict_with_generate")
def _(predict_step, predict_fn, gpt2, tokens):
    generated = predict_step(ll.init_state(gpt2), tokens)
    assert equal(generated, predict_fn(gpt2.eval(), tokens))
    assert torch.equal(generated[:, :10], tokens)


@shows("Seq2SeqTrainingArguments.sortish_sampler")
def _(loader):
    first, second = (torch.cat(list(loader(ll.TrainState(epoch=epoch)))) for epoch in (0, 1))
    assert not torch.equal(first, second)
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(100))


@shows("TrainingArguments.save_total_limit")
def _(ckpt, train, state):
    for later, loss in zip(train(state, 5), (0.5, 0.2, 0.4, 0.3, 0.6), strict=True):
        ckpt.save(later, {"eval/loss": loss})
    saved(2, 4, 5)(ckpt)


@shows("TrainingArguments.load_best_model_at_end")
def _(best, ckpt, state):
    assert best.step == 2
    assert equal(best, ckpt.restore(state, which=2))
    assert not equal(best.params, state.params)


@shows("TrainingArguments.resume_from_checkpoint")
def _(run, ckpt, train, state):
    straight = train(ll.copy_state(state), 8)[-1]
    ckpt.save(train(state, 3)[-1])  # here the process ends; the next one makes the same model, optimizer and loader
    state = run().state
    at(3, 0, 3)(state)
    assert equal(train(state, 5)[-1], straight)


@shows("TrainingArguments.ignore_data_skip")
def _(run, ckpt, train, state, loader):
    ckpt.save(train(state, 3)[-1])
    after = run()
    assert (len(list(loader(after.state))), len(list(loader(after.from_its_start)))) == (2, 5)


@shows("TrainingArguments.restore_callback_states_from_checkpoint")
def _(state):
    assert state.extra["best"].best == 0.3
    assert equal(state.extra["mine"], torch.zeros(3))


@shows("TrainingArguments.save_only_model")
def _(run, ckpt, gpt2):
    state = ll.init_state(gpt2, ll.optimizer(AdamW, lr=1e-2)).replace(step=500)
    run(state=state)
    again = ckpt.restore(ll.copy_state(state).replace(step=0), weights_only=True)
    assert (again.step, equal(again.params, state.params)) == (0, True)
    with pytest.raises(ValueError, match=r"opt_state"):
        ckpt.restore(state)
    assert equal(parameters(transformers.GPT2LMHeadModel.from_pretrained("runs/gpt2")), parameters(gpt2))


@shows("TrainingArguments.seed")
def _(loader, train_set, state):
    for seed in (42, 43):
        other = ll.make_loader(train_set, batch_size=8, seed=seed)
        assert equal(list(loader(state)), list(other(state))) == (seed == 42)


@shows("TrainingArguments.full_determinism")
def _(after):
    enabled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    assert enabled


@shows("TrainingArguments.use_cpu")
def _(model, loader, state):
    assert {tensor.device.type for tensor in (*model.parameters(), *next(loader(state)))} == {"cpu"}


@shows("TrainingArguments.ddp_backend")
def _(torchrun, place, device):
    assert place == (0, 1, "gloo")
    assert device.type == getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")


@shows("TrainingArguments.ddp_find_unused_parameters")
def _(one_process, wrapped, train_step, model, loss_fn, optimizer, batch):
    expected = looplib_updates(model, loss_fn, [batch], optimizer)
    state, _ = train_step(ll.init_state(wrapped, optimizer), batch)
    assert equal(state.params, expected)


@shows("TrainingArguments.fsdp")
def _(one_process, gpt2, train_step, optimizer, tokens):
    state = ll.init_state(gpt2, optimizer)
    before = {name: tensor.full_tensor().clone() for name, tensor in state.params.items()}
    state, _ = train_step(state, tokens)
    weights = ll.checkpoint.state_dict(gpt2, state)
    assert all(not torch.equal(weights[name], tensor) for name, tensor in before.items())


@shows("TrainingArguments.parallelism_config")
def _(one_process, after):
    place = ll.distributed.rank(), ll.distributed.world_size()
    ll.distributed.set_data_parallel_group(None)
    assert place == (0, 1)


@shows("AcceleratorConfig.gradient_accumulation_kwargs")
def _(accumulated, model, loss_fn, batch):
    same_gradient(accumulated, model, loss_fn, batch)


@shows("TrainingArguments.push_to_hub")
def _(the_hub, pushed):
    pushed.result()
    assert [path for path in the_hub.repos["me/gpt2-small"].files if "step-00000004/manifest" in path]


@shows("TrainingArguments.hub_revision")
def _(the_hub, pushed):
    pushed.result()
    assert {"config.json", "model.safetensors"} <= the_hub.repos["user/gpt2-small"].files.keys()


@shows("TrainingArguments.debug")
def _(run, model, grad_fn, batch):
    after = run()
    with pytest.raises(ll.optim.NonFiniteGradientsError, match=r"2\.bias"):
        after.train_step(ll.init_state(model, after.optimizer), (batch[0] * math.inf, batch[1]))


@shows("TrainingArguments.skip_memory_metrics")
def _(rows):
    assert rows[0].keys() >= {"train/host_kept_bytes", "train/host_peak_bytes"}


@shows("TrainingArguments before 5.logging_dir")
def _(log, state):
    log(state, {"train/loss": 0.5})
    assert list(Path("runs/small/tensorboard").glob("events.*"))


@shows("TrainingArguments before 5.include_inputs_for_metrics")
def _(metric_fn, model, test_set):
    x, _ = test_set[:]
    assert metric_fn(model, test_set[:])["mean_input"].compute().item() == pytest.approx(x.mean().item())


@shows("TrainingArguments before 5.include_tokens_per_second")
def _(meter, train_step, gpt2, optimizer, tokens):
    state = ll.init_state(gpt2, optimizer)
    for batch in meter.data([tokens] * 3):
        state, _ = train_step(state, batch)
    assert meter.read()["tokens_per_second"] > 0


@shows("TrainingArguments before 5.torchdynamo")
def _(train_step, state, batch):
    state, _ = train_step(state, batch)
    assert state.step == 1


@shows("TrainingArguments before 5.half_precision_backend")
def _(state):
    assert {tensor.dtype for tensor in state.params.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in state.opt_state["master"].values()} == {torch.float32}


@shows("TrainingArguments before 5.fsdp_min_num_params")
def _(one_process, gpt2):
    assert isinstance(gpt2.transformer.h[0].mlp.c_fc.weight, DTensor)
    assert not isinstance(gpt2.transformer.wte.weight, DTensor)


@shows("TrainingArguments before 5.push_to_hub_model_id")
def _(the_hub, repo):
    assert [*the_hub.repos] == [repo] == ["organization/gpt2-small"]


@shows("TrainingArguments before 5.save_safetensors")
def _(model, state):
    assert equal(torch.load("model.pt"), dict(model.state_dict()))
    assert equal(ll.checkpoint.load_state_dict(model, state, load_file("model.safetensors")).params, state.params)


# The parts of a Trainer, and its methods


@shows("Trainer.model")
def _(grad_fn, loader, model):
    batch = next(loader(ll.TrainState()))
    assert_gradient(grad_fn(ll.init_state(model), batch), model, F.cross_entropy(model(batch[0]), batch[1]))


@shows("Trainer.data_collator")
def _(loader):
    first = next(loader(ll.TrainState()))
    assert first["input_ids"].shape == (5, 4)
    assert first["labels"].tolist() == [0, 1, 2, 3, 4]


@shows("Trainer.eval_dataset")
def _(scores, eval_step, state, test_batches, batch):
    sets = {"dev": test_batches, "train": [batch]}
    expected = {
        name: ll.evaluate(eval_step, state, batches, prefix=f"eval/{name}/") for name, batches in sets.items()
    }
    assert scores == expected["dev"] | expected["train"]


@shows("Trainer.model_init")
def _(model, model_init):
    assert equal(model.state_dict(), model_init(42).state_dict())
    assert not equal(model.state_dict(), model_init(43).state_dict())


@shows("Trainer.compute_metrics")
def _(eval_step, model, state, test_batches, test_set):
    x, y = test_set[:]
    logits = model(x)
    expected = {"loss": F.cross_entropy(logits, y).item(), "accuracy": (logits.argmax(1) == y).double().mean().item()}
    assert ll.evaluate(eval_step, state, test_batches) == pytest.approx(expected, rel=1e-6)


@shows("Trainer.optimizers")
def _(optimizer, model, loss_fn, batch):
    ours = looplib_updates(model, loss_fn, [batch] * 6, optimizer)
    raw = copy.deepcopy(model)
    theirs = SGD(raw.parameters(), lr=0.01, momentum=0.9, fused=True)
    scheduler = transformers.get_scheduler("linear", theirs, 2, 10)
    for _ in range(6):
        theirs.zero_grad()
        loss_fn(raw, batch).backward()
        theirs.step()
        scheduler.step()
    assert close(ours, parameters(raw))


@shows("Trainer.callbacks")
def _(run):
    ckpt = ll.checkpoint_io("runs/small", monitor="eval_loss")
    early = transformers.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.1)
    after = run(ckpt=ckpt, early=early, args=arguments(metric_for_best_model="loss"))
    losses = [found.metrics["eval_loss"] for found in ckpt.steps()]
    assert stopped_by_callback(losses, 2, 0.1) == len(losses) - 1 < 8
    assert ll.evaluate(after.eval_step, after.state, after.test_batches)["loss"] == min(losses)


@shows("Trainer.train")
def _(rows, ckpt):
    logged(5, 10)(rows)
    assert rows[1]["eval/loss"] < rows[0]["eval/loss"]
    assert ckpt.latest().step == 10


@shows("Trainer.training_step")
def _(after, again, state):
    assert equal(after.after, again)
    assert (state.step, again.step) == (0, 1)


@shows("Trainer.predict")
def _(probabilities, model, test_set):
    assert close(probabilities, model(test_set[:][0]).softmax(1).detach())


@shows("Trainer.get_train_dataloader")
def _(loader, test_loader, eval_step, state):
    sizes(8, 8, 8, 8, 8)(loader)
    assert set(ll.evaluate(eval_step, state, test_loader)) == {"loss", "accuracy"}


@shows("Trainer.get_batch_samples")
def _(found, gpt2, lm_loss, tokens):
    total = lm_loss(gpt2, tokens[:2]).merge(lm_loss(gpt2, tokens[2:, :5]))
    assert_gradient(found, gpt2, total.compute())
    assert found.samples == 3


@shows("Trainer.get_learning_rates")
def _(rows, model):
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 5e-4}]
    theirs = AdamW(groups, lr=5e-5)
    scheduler = transformers.get_linear_schedule_with_warmup(theirs, 10, 100)
    for row in rows:
        theirs.step()
        scheduler.step()
        assert [row["lr"], row["lr/0"]] == pytest.approx(scheduler.get_last_lr())


@shows("Trainer.autocast_smart_context_manager")
def _(grad_fn, gpt2, lm_loss, tokens):
    state = ll.init_state(gpt2)
    half, full = grad_fn(state, tokens).grads, ll.make_grad_fn(gpt2, lm_loss)(state, tokens).grads
    assert close(half, full, rtol=0.1, atol=0.01)
    assert not equal(half, full)


@shows("Trainer.log")
def _(after):
    row = ll.log.read_jsonl("log.jsonl")[0]
    assert (row["step"], row["train/loss"]) == (50, 0.5)


@shows("Trainer.log_metrics")
def _(printed, after):
    assert printed.getvalue().startswith("step      0  epoch")


@shows("Trainer.save_metrics")
def _(scores):
    assert json.loads(Path("eval_results.json").read_text()) == scores


@shows("Trainer.save_model")
def _(state, optimizer):
    again = transformers.GPT2LMHeadModel.from_pretrained("runs/gpt2")
    averaged = ll.eval_state(optimizer, state).params
    assert equal(parameters(again), averaged)
    assert not equal(averaged, state.params)


@shows("trainer_utils.get_last_checkpoint")
def _(before, ckpt):
    assert before is None
    assert ckpt.latest().path.name == "step-00000500"


@shows("Trainer.is_world_process_zero")
def _(after):
    assert Path("notes.txt").read_text() == "once"


@shows("Trainer.get_tp_size")
def _(one_process, mesh):
    assert mesh["tensor"].size() == mesh["data"].size() == 1


@shows("Trainer.hyperparameter_search")
def _(stack, scores, model, loss_fn, loader):
    alone = looplib_updates(model, loss_fn, loader(ll.TrainState()), ll.optimizer(SGD, lr=0.1))
    assert close(ll.transforms.unstack_states(stack)[1].params, alone)
    assert len({score["loss"] for score in scores}) == 3


@shows("Trainer.push_to_hub")
def _(the_hub, after):
    assert the_hub.repos["user/gpt2-small"].commits[-1] == "End of training"


@shows("Trainer.create_model_card")
def _(ckpt):
    results = ModelCard.load("README.md").data.eval_results
    assert {result.metric_type: result.metric_value for result in results} == ckpt.latest().metrics


@shows("Trainer.train(resume_from_checkpoint)")
def _(run, ckpt, state, train):
    for later in train(state, 4):
        ckpt.save(later)
    at(2, 0, 2)(run().state)


@shows("Trainer.train(ignore_keys_for_eval)")
def _(predict_step, gpt2, tokens):
    assert equal(predict_step(ll.init_state(gpt2), tokens), gpt2(input_ids=tokens).logits[:, -1].detach())


@shows("Trainer.hyperparameter_search(hp_space)")
def _(best, objective):
    assert best != 0.001
    assert objective(0.1) == objective(0.1) < objective(0.001)


@shows("Trainer.push_to_hub(blocking)")
def _(the_hub, hub):
    assert len(the_hub.repos["user/gpt2-small"].commits) == 2


@shows("Trainer.push_to_hub(commit_message)")
def _(the_hub, after):
    assert "last-checkpoint/manifest.json" in the_hub.repos["user/gpt2-small"].files


# Methods that begin with an underscore


@shows("Trainer._get_dataloader")
def _(loader, train_set):
    x, _ = next(loader(ll.TrainState()))
    assert torch.equal(x, train_set.tensors[0].flip(0)[:8])


@shows("Trainer._remove_unused_columns")
def _(run):
    texts = [{"input_ids": torch.arange(4), "source": object()} for _ in range(4)]
    loader = run(texts=texts).loader
    assert [batch.shape for batch in loader(ll.TrainState())] == [(2, 4), (2, 4)]


@shows("Trainer._prepare_input")
def _(loader):
    assert {part.device.type for part in next(loader(ll.TrainState()))} == {"meta"}


@shows("Trainer._get_num_items_in_batch")
def _(grad_fn, gpt2, tokens):
    labels = tokens.masked_fill(torch.arange(10) < torch.tensor([[2], [5], [9]]), -100)
    gradient = grad_fn(ll.init_state(gpt2), {"input_ids": tokens, "labels": labels})
    gpt2.loss_type = "ForCausalLM"
    assert_gradient(gradient, gpt2, gpt2(input_ids=tokens, labels=labels).loss)


@shows("Trainer._get_learning_rate")
def _(rows):
    assert [row["lr"] for row in rows] == pytest.approx(scheduled("linear", 5e-5, 2, 6)[:3])


@shows("Trainer._clip_grad_norm")
def _(measured, grad_fn, state, batch):
    gradient = measured(state, batch)
    assert equal(gradient.grads, grad_fn(state, batch).grads)
    norm = nn.utils.get_total_norm(gradient.grads.values()).item()
    assert ll.compute(gradient.metrics)["grad_norm"] == pytest.approx(norm)


@shows("Trainer._load_from_checkpoint")
def _(run, ckpt, state, train):
    ckpt.save(trained := train(state, 3)[-1])
    state = run().state
    assert state.step == 0
    for name, tensor in state.params.items():
        assert torch.equal(tensor, trained.params[name])


@shows("Trainer._determine_best_metric")
def _(is_new_best, state):
    assert is_new_best
    assert not ll.predicates.at_best()(ll.update_best(state, {"eval/accuracy": 0.6}))


@shows("Trainer._track_num_input_tokens")
def _(loss_fn, gpt2, tokens):
    gradient = ll.make_grad_fn(gpt2, loss_fn)(ll.init_state(gpt2), tokens)
    assert ll.compute(gradient.metrics)["tokens"] == 10


@shows("Trainer._update_auto_batch_size")
def _(found, size, model, loss_fn, batch):
    assert size == 5
    assert_gradient(found, model, loss_fn(model, batch))


@shows("Trainer._wrap_model")
def _(one_process, wrapped, train_step, model, loss_fn, optimizer, batch):
    expected = looplib_updates(model, loss_fn, [batch], optimizer)
    state, _ = train_step(ll.init_state(wrapped, optimizer), batch)
    assert close(state.params, expected, atol=1e-5)


# Callbacks


@shows("TrainerCallback.on_substep_end")
def _(grad_fn, pieces, model, loss_fn, batch):
    same_gradient(grad_fn, model, loss_fn, batch)
    assert pieces == [4, 4, 4]


@shows("TrainerCallback.on_pre_optimizer_step")
def _(train_step, state, batch):
    _, metrics = train_step(state, batch)
    assert 0 < ll.compute(metrics)["largest"] < 0.01 < ll.compute(metrics)["grad_norm"]


@shows("TrainerCallback.on_optimizer_step")
def _(moved):
    assert 0 < moved <= 0.0101 * math.sqrt(67)  # AdamW at 0.01, of 67 weights


@shows("TrainerCallback.on_log")
def _(lines, rows):
    assert lines == ["0: {'train/loss': 0.5}"]
    assert rows[0]["train/loss"] == 0.5


@shows("TrainerCallback.on_evaluate")
def _(path, ckpt, scores):
    assert (path / "note.txt").exists()
    assert ckpt.latest().metrics == scores


@shows("Callbacks.EarlyStoppingCallback")
def _(loss, state):
    assert (loss, state.extra["best"].best) == (0.41, 0.4)
    assert stopped_by_callback([0.5, 0.6, 0.4, 0.45, 0.41], 2) == 4


def stopped_by_callback(losses, patience, threshold=0.0):
    callback = transformers.EarlyStoppingCallback(patience, threshold)
    args = arguments(metric_for_best_model="loss", greater_is_better=False)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    for number, loss in enumerate(losses):
        callback.on_evaluate(args, state, control, {"eval_loss": loss})
        if control.should_training_stop:
            return number
        # as the Trainer does after each evaluation
        state.best_metric = loss if state.best_metric is None else min(loss, state.best_metric)
    return None


@shows("Callbacks.ProgressCallback")
def _(run, terminal):
    run(log=ll.console(file=terminal))
    assert terminal.getvalue().count("train/loss") == 5


@shows("Callbacks.DefaultFlowCallback")
def _(log_now, eval_now, save_now, done):
    when = {"logging_steps": 5, "eval_steps": 10, "save_steps": 20}
    args = arguments(eval_strategy="steps", save_strategy="steps", **when)
    for step in range(1, 26):
        theirs = transformers.TrainerState(global_step=step, max_steps=25, **when)
        control = trainer_callback.DefaultFlowCallback().on_step_end(args, theirs, transformers.TrainerControl())
        asked = control.should_log, control.should_evaluate, control.should_save, control.should_training_stop
        state = ll.TrainState(step=step)
        assert asked == (log_now(state), eval_now(state), save_now(state), done(state))


@shows("TrainerControl.should_training_stop")
def _(state, loader):
    at(3, 1, 0)(state)
    assert len(list(loader(state))) == 5


# TrainerState


@shows("TrainerState.global_step")
def _(state, epoch):
    at(8, 1, 3)(state)
    assert epoch == 1.6


@shows("TrainerState.max_steps")
def _(done):
    assert repr(done) == "(after_epochs(3) | after_steps(2000))"


@shows("TrainerState.train_batch_size")
def _(batch_size, consumed, state, loader):
    assert (batch_size, consumed) == (8, 16)
    assert (state.batch, state.epoch_length, len(next(loader(state))[0])) == (1, 3, 16)


@shows("TrainerState.num_input_tokens_seen")
def _(state):
    assert state.extra["tokens"].item() == 30


@shows("TrainerState.total_flos")
def _(total):
    assert total == 3 * (
        2 * 2 * 12 * (4 * 8 + 8 * 3) + 2 * 12 * 8 * 3
    )  # of the matrix products, forward and backward


@shows("TrainerState.best_metric")
def _(best):
    assert (best.step, best.metrics["eval/loss"], best.path.name) == (2, 0.2, "step-00000002")


@shows("TrainerState.stateful_callbacks")
def _(ckpt, state):
    assert equal(ckpt.restore(state).extra["seen"], torch.ones(5))


@pytest.mark.every_case
@pytest.mark.parametrize("row", PAGE.with_code, ids=str)
def test_the_code_does_what_its_row_says(row, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    PAGE.run(row, CHECKS[str(row)], request.getfixturevalue)


# Fields that transformers had in its fourth version, or before, and has no more.
BEFORE_5 = """
    adafactor dispatch_batches evaluation_strategy fp16_backend fp16_opt_level fsdp_min_num_params
    fsdp_transformer_layer_cls_to_wrap group_by_length half_precision_backend include_inputs_for_metrics
    include_tokens_per_second jit_mode_eval logging_dir mp_parameters no_cuda overwrite_output_dir past_index
    per_gpu_eval_batch_size per_gpu_train_batch_size push_to_hub_model_id push_to_hub_organization
    push_to_hub_token ray_scope save_safetensors sharded_ddp split_batches torchdynamo tpu_metrics_debug
    tpu_num_cores use_ipex use_legacy_prediction_loop use_mps_device warmup_ratio xpu_backend
""".split()  # noqa: SIM905


def fields(cls):
    return [field.name for field in dataclasses.fields(cls)]


def public(cls):
    return [name for name in dir(cls) if not name.startswith("_")]


def named(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "kwargs")]


def methods(cls, *called):
    """Public ones, those that a subclass overrides all the same, and the parameters of those that users call."""
    private = [name for name, value in vars(cls).items() if name[0] == "_" != name[1] and inspect.isfunction(value)]
    return public(cls) + private + [f"{name}({given})" for name in called for given in named(getattr(cls, name))]


def callbacks():
    found = vars(trainer_callback).items()
    classes = {name for name, value in found if isinstance(value, type) and name.endswith("Callback")}
    return classes - {"TrainerCallback"}


EXPECTED = {
    "TrainingArguments": fields(transformers.TrainingArguments),
    "TrainingArguments before 5": BEFORE_5,
    "SchedulerType": [kind.value for kind in trainer_utils.SchedulerType],
    "OptimizerNames": [kind.value for kind in OptimizerNames],
    "Seq2SeqTrainingArguments": set(fields(transformers.Seq2SeqTrainingArguments))
    - set(fields(transformers.TrainingArguments)),
    "AcceleratorConfig": fields(AcceleratorConfig),
    "Trainer": named(transformers.Trainer.__init__)
    + methods(transformers.Trainer, "train", "evaluate", "predict", "hyperparameter_search", "push_to_hub"),
    "TrainerCallback": public(transformers.TrainerCallback),
    "Callbacks": callbacks(),
    "TrainerState": fields(transformers.TrainerState),
    "TrainerControl": fields(transformers.TrainerControl),
    "EvalPrediction": named(transformers.EvalPrediction),
    "trainer_utils": ["get_last_checkpoint"],
}


def test_every_name_has_a_row_and_every_row_a_name():
    assert_complete(PAGE, EXPECTED, CHECKS)
    assert_readable(PAGE)
    assert not set(BEFORE_5) & set(EXPECTED["TrainingArguments"])
