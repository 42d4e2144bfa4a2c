"""recipes/names/transformers.toml: the code of each answer does what it says, and each name of transformers has an answer.

Values are those of transformers' own Trainer, schedules and callbacks where these can be asked.
"""

import copy
import dataclasses
import inspect
import math
import sys
from types import SimpleNamespace

import at_hand
import pytest
import torch
import torchao.optim
import transformers
from answers import assert_complete, assert_readable, blocks, run_answer, with_code
from at_hand import Lion
from checks import (
    assert_gradient,
    at,
    clips,
    close,
    equal,
    evaluated,
    fires,
    in_one_process,
    logged,
    looplib_updates,
    parameters,
    rates,
    registers,
    restored,
    runs,
    same_gradient,
    same_gradient_of_gpt2,
    saved,
    scheduled,
    sizes,
    updates,
    values,
    with_the_hub,
)
from documentation.trainers import LIBRARIES
from torch.optim import SGD, Adafactor, Adagrad, AdamW, RMSprop
from torch.utils._pytree import tree_leaves
from transformers import trainer_callback, trainer_utils
from transformers.trainer_pt_utils import AcceleratorConfig, LabelSmoother
from transformers.training_args import OptimizerNames

import looplib as ll

[TRANSFORMERS] = [library for library in LIBRARIES if library.name == "transformers"]

PLAIN = {"lr": 5e-5, "weight_decay": 0.0, "fused": True}
# Those of a step of the model: forward, and backward through all weights and the inputs of the second layer.
FLOPS = 2 * 2 * 12 * (4 * 8 + 8 * 3) + 2 * 12 * 8 * 3
# Answers that are not here run all the same: their code is calls whose results are tested where they are defined.
CHECKS = {
    "TrainingArguments.per_device_train_batch_size": sizes(8, 8, 8, 8, 8, of_two=[[4] * 5] * 2),
    "TrainingArguments.max_steps": at(12, 2, 2),
    "TrainingArguments.num_train_epochs": at(13, 2, 3),
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
    "TrainingArguments (transformers 4).adafactor": updates(Adafactor, close, lr=1e-3),
    "TrainingArguments.gradient_accumulation_steps": same_gradient,
    "TrainingArguments.max_grad_norm": clips(0.1),
    "TrainingArguments.activation_checkpointing": same_gradient_of_gpt2,
    "TrainingArguments.torch_empty_cache_steps": fires(last=200, clear_now=[100, 200]),
    "TrainingArguments.logging_strategy": fires(last=150, log_now=[1, 50, 100, 150]),
    "TrainingArguments.disable_tqdm": at(5, 1, 0),
    "TrainingArguments.eval_strategy": logged(2, 4, 5),
    "TrainingArguments.eval_delay": fires(30, 40, 50, last=50),
    "TrainingArguments.save_strategy": saved(2, 4, 5),
    "TrainingArguments.eval_on_start": evaluated("eval/", batches=2),
    "TrainingArguments.per_device_eval_batch_size": evaluated(),
    "TrainingArguments.enable_jit_checkpoint": saved(2),
    "TrainingArguments.accelerator_config": sizes(10, 10, 5, of_two=[[5, 5, 3], [5, 5, 2]]),
    "TrainingArguments.ddp_find_unused_parameters": in_one_process,
    "TrainingArguments.fsdp": in_one_process,
    "TrainingArguments.parallelism_config": lambda one_process, after: ll.distributed.set_data_parallel_group(None),
    "TrainingArguments.hub_revision": with_the_hub,
    "AcceleratorConfig.non_blocking": sizes(8, 8, 8, 8, 8),
    "TrainingArguments (transformers 4).evaluation_strategy": fires(5, 10, 15, 20, 25, 30),
    "TrainingArguments (transformers 4).group_by_length": sizes(4, 4, 4, 4, 4, 4, 4, 4, 4, 4),
    "TrainingArguments (transformers 4).per_gpu_train_batch_size": sizes(16, 16, 8, of_two=[[8, 8, 4]] * 2),
    "TrainingArguments (transformers 4).fsdp_min_num_params": in_one_process,
    "TrainingArguments (transformers 4).push_to_hub_model_id": with_the_hub,
    "Trainer.get_train_dataloader": sizes(8, 8, 8, 8, 8),
    "Trainer.get_tp_size": in_one_process,
    "Trainer.train": logged(5, 10),
    "Trainer.push_to_hub": with_the_hub,
    "Trainer.push_to_hub(blocking)": with_the_hub,
    "Trainer.push_to_hub(commit_message)": with_the_hub,
    "Trainer._clip_grad_norm": clips(math.inf),
    "Trainer._determine_best_metric": values(is_new_best=True),
    "Trainer._update_auto_batch_size": values(microbatches=2),
    "Trainer._wrap_model": in_one_process,
    "Trainer.get_num_trainable_parameters": values(count=4 * 8 + 8 + 8 * 3 + 3),
    "Trainer.num_examples": values(examples=40, batch_size=8, total=15),
    "Trainer.get_optimizer_group": values(found=["0.bias", "2.bias"]),
    "Trainer.add_callback": logged(2, 4),
    "Trainer.save_state": restored,
    "Trainer._save_checkpoint": restored,
    "Trainer.evaluate": evaluated("eval/"),
    "Trainer.evaluate(eval_dataset)": evaluated("test/"),
    "Trainer.floating_point_ops": values(flops=FLOPS),
    "Trainer._inner_training_loop": logged(2, 4, 5),
    "TrainerCallback.on_init_end": logged(0, 5),
    "TrainerCallback.on_epoch_begin": values(events=["begin", "end"] * 2),
    "TrainerCallback.on_step_begin": values(
        events=[(when, step + (when == "end")) for step in range(5) for when in ("begin", "end")]
    ),
    "TrainerCallback.on_prediction_step": values(sizes=[10, 10, 5]),
    "TrainerCallback.on_substep_end": same_gradient,
    "TrainerCallback.on_log": values(lines=["0: {'train/loss': 0.5}"]),
    "TrainerControl.should_training_stop": at(3, 1, 0),
    "TrainerControl.should_save": saved(3, 4, 5),
    "TrainerState.global_step": at(8, 1, 3),
    "TrainerState.total_flos": values(total=3 * FLOPS),
    "TrainerState.train_batch_size": values(batch_size=8, consumed=16),
    "TrainerState.is_local_process_zero": values(first=True),
    "TrainerState.log_history": lambda history: (
        history.items() >= {"step": [1, 2, 3], "train/loss": [1.0, 0.5, 1 / 3]}.items()
    ),
}


shows = registers(CHECKS)


def arguments(**options):
    quiet = {"save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": "none"}
    return transformers.TrainingArguments("unused", use_cpu=True, **quiet | options)


@shows("TrainingArguments (transformers 4).warmup_ratio")
def _(lr):
    rates("linear", 5e-5, arguments(warmup_steps=0.06).get_warmup_steps(2000), 2000)(lr)


@shows("SchedulerType.reduce_lr_on_plateau")
def _(optimizer, state, rows):
    theirs, expected = SGD([torch.zeros(1)], lr=0.1), []
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, patience=1, threshold=0.0, min_lr=0.001)
    for step, loss in enumerate((0.9, 0.9, 0.8, 0.9, 0.9, 0.9, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8)):
        expected.append(theirs.param_groups[0]["lr"] * min(1, step / 4))
        scheduler.step(loss)
    assert [row["lr"] for row in rows] == pytest.approx(expected)
    assert expected[3:] == pytest.approx([0.075, 0.1, *[0.01] * 4, *[0.001] * 4])
    assert ll.optim.hyperparameters(optimizer, state) == {"lr": pytest.approx(0.001)}


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
    labels = ll.init_state(gpt2, optimizer).opt_state["partition"]
    matrices = {name for name, tensor in gpt2.named_parameters() if ".h." in name and tensor.ndim == 2}
    assert set(labels["muon"]["Muon"]["state"]) == matrices


@shows("OptimizerNames.adamw_torch_4bit")
def _(optimizer, model, loss_fn, batch):
    with torch.compiler.set_stance("force_eager"):
        updates(torchao.optim.AdamW8bit, lr=1e-4)(optimizer, model, loss_fn, batch)


@shows("TrainingArguments.label_smoothing_factor")
def _(loss_fn, gpt2, tokens):
    gradient = ll.make_grad_fn(gpt2, loss_fn)(ll.init_state(gpt2), tokens)
    logits = gpt2(input_ids=tokens).logits
    assert_gradient(gradient, gpt2, LabelSmoother(0.1)({"logits": logits}, tokens, shift_labels=True))


@shows("TrainingArguments.fp16")
def _(grad_fn, optimizer, gpt2, tokens):
    state, metrics = ll.make_train_step(grad_fn, optimizer)(ll.init_state(gpt2, optimizer), tokens)
    assert ll.compute(metrics)["loss_scale"] == torch.amp.GradScaler("cpu").get_scale()
    assert state.step == 1


@shows("TrainingArguments.tf32")
def _(after):
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    assert precision == "high"


@shows("TrainingArguments.logging_nan_inf_filter")
def _(window, state):
    assert len(window) == state.step == 2
    assert math.isfinite(ll.compute(window.metrics())["loss"])


@shows("TrainingArguments.trackio_space_id")
def _(run, state, monkeypatch):
    seen = []
    sent = SimpleNamespace(config={}, log=lambda values, step: seen.append((step, values)), finish=lambda: None)
    trackio = SimpleNamespace(init=lambda **options: seen.append(options["space_id"]) or sent)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    after = run()
    after.log(state, {"train/loss": 0.5})
    after.log.close()
    assert seen == ["me/space", (0, {"epoch": 0.0, "train/loss": 0.5})]


@shows("TrainingArguments.save_total_limit")
def _(ckpt, train, state):
    for later, loss in zip(train(state, 5), (0.5, 0.2, 0.4, 0.3, 0.6), strict=True):
        ckpt.save(later, {"eval/loss": loss})
    saved(2, 4, 5)(ckpt)


@shows("TrainingArguments.resume_from_checkpoint")
def _(run, ckpt, train, state):
    straight = train(ll.copy_state(state), 8)[-1]
    ckpt.save(train(state, 3)[-1])  # here the process ends; the next one makes the same model, optimizer and loader
    state = run().state
    at(3, 0, 3)(state)
    assert equal(train(state, 5)[-1], straight)


@shows("TrainingArguments.save_only_model")
def _(run, gpt2):
    run(state=ll.init_state(gpt2))
    assert equal(parameters(transformers.GPT2LMHeadModel.from_pretrained("runs/gpt2")), parameters(gpt2))


@shows("Trainer.train(resume_from_checkpoint)")
def _(run, ckpt, state, train):
    for later in train(state, 4):
        ckpt.save(later)
    at(2, 0, 2)(run().state)


@shows("TrainingArguments.full_determinism")
def _(after):
    enabled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    assert enabled


@shows("TrainingArguments.ddp_backend")
def _(torchrun, place, device):
    assert place == (0, 1, "gloo")
    assert device.type == getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")


@shows("TrainingArguments.push_to_hub")
def _(the_hub, pushed):
    pushed.result()
    assert [path for path in the_hub.repos["me/gpt2-small"].files if "step-00000004/manifest" in path]


# The parts of a Trainer, and its methods


@shows("Trainer.model_init")
def _(model, model_init):
    assert equal(model.state_dict(), model_init(42).state_dict())
    assert not equal(model.state_dict(), model_init(43).state_dict())


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


@shows("Trainer.get_batch_samples")
def _(found, gpt2, lm_loss, tokens):
    total = lm_loss(gpt2, tokens[:2]).merge(lm_loss(gpt2, tokens[2:, :5]))
    assert_gradient(found, gpt2, total.compute())
    assert found.samples == 3


@shows("Trainer.get_learning_rates")
def _(rows, model):
    weight, bias = copy.deepcopy(model[0]).parameters()
    groups = [{"params": [weight]}, {"params": [bias], "lr": 5e-4}]
    theirs = AdamW(groups, lr=5e-5)
    scheduler = transformers.get_linear_schedule_with_warmup(theirs, 10, 100)
    for row in rows:
        theirs.step()
        scheduler.step()
        assert [row["lr"], row["lr/0"]] == pytest.approx(scheduler.get_last_lr())


@shows("Trainer._remove_unused_columns")
def _(run):
    texts = [{"input_ids": torch.arange(4), "source": object()} for _ in range(4)]
    loader = run(texts=texts).loader
    assert [batch.shape for batch in loader(ll.TrainState())] == [(2, 4), (2, 4)]


@shows("Trainer._get_num_items_in_batch")
def _(grad_fn, gpt2, tokens):
    labels = tokens.masked_fill(torch.arange(10) < torch.tensor([[2], [5], [9]]), -100)
    gradient = grad_fn(ll.init_state(gpt2), {"input_ids": tokens, "labels": labels})
    gpt2.loss_type = "ForCausalLM"
    assert_gradient(gradient, gpt2, gpt2(input_ids=tokens, labels=labels).loss)

    ours, batch = (
        ll.losses.model_loss(gpt2, {"input_ids": tokens, "labels": tokens}),
        {"input_ids": tokens, "labels": tokens},
    )
    for loss_type, share in (("ForCausalLM", 1), (None, 9 / 10)):  # None, as in the class, counts first tokens too
        gpt2.loss_type = loss_type
        trainer = transformers.Trainer(gpt2, arguments())
        count = trainer._get_num_items_in_batch([batch], "cpu")
        torch.testing.assert_close(
            trainer.compute_loss(gpt2, batch, num_items_in_batch=count), ours.compute() * share
        )


@shows("Trainer._get_learning_rate")
def _(rows):
    assert [row["lr"] for row in rows] == pytest.approx(scheduled("linear", 5e-5, 2, 6)[:3])


@shows("Trainer._load_from_checkpoint")
def _(run, ckpt, state, train):
    ckpt.save(trained := train(state, 3)[-1])
    state = run().state
    assert state.step == 0
    for name, tensor in state.params.items():
        assert torch.equal(tensor, trained.params[name])


@shows("Trainer._load_rng_state")
def _(run, ckpt, state, train):
    ckpt.save(trained := train(state, 3)[-1])
    state = run().state
    assert (state.step, state.batch, state.seed) == (3, trained.batch, trained.seed)
    leaves, of_run = tree_leaves(state.opt_state), tree_leaves(trained.opt_state)
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(leaves, of_run, strict=True))


@shows("TrainerCallback.on_pre_optimizer_step")
def _(train_step, state, model, loss_fn, batch):
    metrics = ll.compute(train_step(state, batch)[1])
    raw = copy.deepcopy(model)
    loss_fn(raw, batch).backward()
    torch.nn.utils.clip_grad_norm_(raw.parameters(), 0.01)
    largest = max(tensor.grad.abs().max().item() for tensor in raw.parameters())
    assert metrics["grad_norm"] > 0.01 > largest == pytest.approx(metrics["largest"], rel=1e-6)


@shows("TrainerCallback.on_optimizer_step")
def _(moved):
    assert 0 < moved <= 0.0101 * math.sqrt(67)  # AdamW at 0.01, of 67 weights


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


@shows("TrainerState.max_steps")
def _(done):
    assert repr(done) == "(after_epochs(3) | after_steps(2000))"


@pytest.mark.every_case
@pytest.mark.parametrize("answer", with_code(TRANSFORMERS), ids=str)
def test_the_code_does_what_its_answer_says(answer, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    run_answer(TRANSFORMERS, answer, CHECKS.get(str(answer), runs), request.getfixturevalue)


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
    "TrainingArguments (transformers 4)": BEFORE_5,
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


def test_every_name_has_an_answer_and_every_answer_a_name():
    assert_complete(TRANSFORMERS, EXPECTED, CHECKS)
    assert not set(BEFORE_5) & set(EXPECTED["TrainingArguments"])


def test_the_table_has_a_line_for_each_name():
    assert_readable(TRANSFORMERS)


def test_the_two_functions_of_the_page_are_those_that_the_code_runs_with(
    gpt2, tokens, lm_loss, train, train_step, loader, state
):
    [block] = blocks(TRANSFORMERS.page)
    page = {**vars(at_hand), "train_step": train_step, "loader": loader}
    exec(block, page)
    torch.testing.assert_close(page["lm_loss"](gpt2, tokens).compute(), lm_loss(gpt2, tokens).compute())
    assert equal(page["train"](state, 7)[-1], train(state, 7)[-1])
    at(7, 1, 2)(page["train"](state, 7)[-1])


def test_outputs_of_different_lengths_are_padded_as_the_trainer_pads_them():
    from transformers.trainer_pt_utils import EvalLoopContainer

    code = TRANSFORMERS.of_name["TrainingArguments.eval_do_concat_batches"][0].code
    model = torch.nn.Linear(1, 3)
    for lengths in ((5, 7, 2), (4, 4, 4)):
        test_batches = [torch.randn(2, length, 1) for length in lengths]
        predict_step = ll.make_predict_step(model, lambda model, x: model(x))
        names = {"ll": ll, "torch": torch, "predict_step": predict_step, "state": ll.init_state(model)}
        exec(code, names := names | {"test_batches": test_batches})
        theirs = EvalLoopContainer(do_nested_concat=True, padding_index=-100)
        for batch in test_batches:
            theirs.add(model(batch).detach())
        torch.testing.assert_close(names["logits"], torch.as_tensor(theirs.get_arrays()))
