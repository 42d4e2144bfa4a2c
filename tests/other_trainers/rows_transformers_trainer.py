"""Migration table: `Trainer`, its callbacks and its state; the arguments are in `rows_transformers`."""

# Snippets are printed as a user writes them: with metrics that are not used, and a loop that continues with `state`.
# ruff: noqa: RUF059, B020

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from rows_transformers import TABLE, arguments, scheduled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from trainer_rows import close, equal
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

import looplib as ll

here, plain, nothing = TABLE.looplib, TABLE.torch, TABLE.none


TABLE.section("What a Trainer is made of")


@here(
    "Trainer.model",
    "Trainer.train_dataset",
    "Trainer.compute_loss_func",
    "Trainer.compute_loss",
    text="Each stands where it is used: the model and its loss in the gradient, the data in a loader. The loss is "
    "a function of the model and the batch; as `Mean(total, weight)` its average is exact over any microbatches and "
    "ranks.",
)
def _(model, train_set):
    def loss_fn(model, batch):
        x, y = batch
        return ll.Mean(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    grad_fn = ll.make_grad_fn(model, loss_fn)
    loader = ll.make_loader(train_set, batch_size=8, seed=42)
    # shows
    state = ll.init_state(model, epoch_length=len(loader))
    x, y = batch = next(iter(loader(state)))
    found = grad_fn(state, batch)
    F.cross_entropy(model(x), y).backward()
    assert close(found.grads, {name: tensor.grad for name, tensor in model.named_parameters()})


nothing(
    "Trainer.args",
    text="There is no object of settings: each is an argument of what it is about. A script's own "
    "`main(**hyperparameters)` takes the place of `HfArgumentParser`.",
)


@here("Trainer.data_collator", text="The loader's `collate_fn`; any collator of transformers will do.")
def _():
    collator = transformers.DefaultDataCollator()
    texts = [{"input_ids": [number] * 4, "label": number} for number in range(10)]
    loader = ll.make_loader(texts, batch_size=5, order=ll.data.in_order(), collate_fn=collator)
    # shows
    first = next(iter(loader(ll.TrainState())))
    assert first["input_ids"].shape == (5, 4)
    assert first["labels"].tolist() == [0, 1, 2, 3, 4]


@here("Trainer.eval_dataset", text="Batches of any kind; several sets by their names.")
def _(eval_step, state, test_batches, batch):
    scores = ll.evaluate(eval_step, state, {"dev": test_batches, "train": [batch]}, prefix="eval/")
    # shows
    assert set(scores) == {"eval/dev/loss", "eval/dev/accuracy", "eval/train/loss", "eval/train/accuracy"}
    assert scores["eval/train/loss"] == ll.evaluate(eval_step, state, [batch])["loss"]


nothing(
    "Trainer.processing_class",
    text="A tokenizer belongs to the dataset or the collate function; `tokenizer.save_pretrained(folder)` puts it "
    "beside the weights.",
)


@plain(
    "Trainer.model_init",
    "Trainer.call_model_init",
    text="A function that makes the model; torch's seed says with which weights.",
)
def _(loss_fn):
    def model_init(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    model = model_init(seed=42)
    # shows
    assert equal(model.state_dict(), model_init(42).state_dict())
    assert not equal(model.state_dict(), model_init(43).state_dict())


@here(
    "Trainer.compute_metrics",
    "Trainer.preprocess_logits_for_metrics",
    "EvalPrediction.predictions",
    "EvalPrediction.label_ids",
    "EvalPrediction.inputs",
    "EvalPrediction.losses",
    text="A function of the model and the batch: predictions, labels, inputs and losses are at hand there, for the "
    "time of a batch. It returns records that merge, such as `ll.accuracy`, `ll.metrics.AUC.of` and `ll.metrics.torchmetric`.",
)
def _(model, state, test_batches):
    def metric_fn(model, batch):
        x, y = batch
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": ll.accuracy(logits.argmax(1), y)}

    eval_step = ll.make_eval_step(model, metric_fn)
    # shows
    x, y = (torch.cat(parts) for parts in zip(*test_batches, strict=True))
    scores = ll.evaluate(eval_step, state, test_batches)
    assert scores["loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)
    assert scores["accuracy"] == pytest.approx((model(x).argmax(1) == y).double().mean().item())


@here(
    "Trainer.optimizers",
    "Trainer.optimizer_cls_and_kwargs",
    "Trainer.create_optimizer",
    "Trainer.create_scheduler",
    "Trainer.create_optimizer_and_scheduler",
    "Trainer.get_optimizer_cls_and_kwargs",
    text="One call: the class, its hyperparameters, and the schedules among them. It is a pair of pure functions; "
    "what it keeps stands in the state. One that you have already continues by `ll.checkpoint.load_optimizer_state_dict`.",
)
def _(model, loss_fn, batch):
    lr = ll.schedules.warmup_linear(0.01, warmup=2, total=10)
    optimizer = ll.optimizer(torch.optim.SGD, lr=lr, momentum=0.9)
    # shows
    raw = copy.deepcopy(model)
    state = ll.init_state(model, optimizer)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    for _ in range(6):
        state, _ = train_step(state, batch)
    theirs = torch.optim.SGD(raw.parameters(), lr=0.01, momentum=0.9, fused=True)
    scheduler = transformers.get_scheduler("linear", theirs, 2, 10)
    for _ in range(6):
        theirs.zero_grad()
        loss_fn(raw, batch).backward()
        theirs.step()
        scheduler.step()
    assert close(state.params, {name: tensor.detach() for name, tensor in raw.named_parameters()})


@here(
    "Trainer.callbacks",
    text="What a callback does is a line at its place in the loop, which you see; the events are "
    "[below](#trainercallback-on-init-end). Callbacks that you have run unchanged: transformers' `CallbackHandler` calls "
    "them. These lines call the event that early stopping uses; "
    "[the cookbook](COOKBOOK.md#use-callbacks-of-transformers-trainer) has a loop with all events, which logs, evaluates "
    "and saves as `args` say.",
)
def _(model, train_step, state, loader, eval_step, test_batches):
    args = transformers.TrainingArguments("runs/small", metric_for_best_model="loss", report_to="none")
    early = transformers.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.1)
    ckpt = ll.checkpoint_io("runs/small", monitor="eval_loss")
    # given
    handler = CallbackHandler([early], model, None, None, None)
    progress, control = TrainerState(), TrainerControl()
    while state.epoch < 9 and not control.should_training_stop:
        for batch in loader(state):
            state, metrics = train_step(state, batch)
        ckpt.save(state, scores := ll.evaluate(eval_step, state, test_batches, prefix="eval_"))
        handler.on_evaluate(args, progress, control, scores)
        progress.best_metric = min(scores["eval_loss"], progress.best_metric or math.inf)
    state = ckpt.restore(state, "best")
    # shows
    losses = [found.metrics["eval_loss"] for found in ckpt.steps()]
    assert stopped_by_callback(losses, 2, 0.1) == len(losses) - 1 < 8
    assert ll.evaluate(eval_step, state, test_batches)["loss"] == min(losses)


@here(
    "Trainer.add_callback",
    "Trainer.pop_callback",
    "Trainer.remove_callback",
    text="What is to be switched on and off is an `if`, or a predicate.",
)
def _(train_step, state, loader, rows, log):
    norm_now = ll.every_n_steps(2)
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        if norm_now(state):
            log(state, {"weight_norm": ll.grads.global_norm(state.params.values()).item()})
    # shows
    assert [row["step"] for row in rows] == [2, 4]
    assert all(row["weight_norm"] > 0 for row in rows)


TABLE.section("What a Trainer does")


@here(
    "Trainer.train",
    text="The loop. It is yours, a few lines long, and begins where the state is.",
)
def _(ckpt, state, loader, train_step, eval_step, test_batches, log, rows):
    eval_now, done = ll.at_epoch_end(), ll.after_epochs(2)
    state = ckpt.restore(state)
    while not done(state):
        for batch in loader(state):
            state, metrics = train_step(state, batch)
            if eval_now(state):
                log(state, scores := ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
                ckpt.save(state, scores)
    # shows
    assert [row["step"] for row in rows] == [5, 10]
    assert rows[1]["eval/loss"] < rows[0]["eval/loss"]
    assert ckpt.latest().step == 10


@here(
    "Trainer.training_step",
    text="A pure function of state and batch. One of your own is a function with the same two arguments.",
)
def _(grad_fn, optimizer, state, batch):
    train_step = ll.make_train_step(grad_fn, optimizer)
    after, metrics = train_step(state, batch)
    again, metrics = train_step(state, batch)
    # shows
    assert equal(after, again)
    assert (state.step, after.step) == (0, 1)


@here(
    "Trainer.evaluate",
    "Trainer.evaluation_loop",
    text="The metrics over all batches, exact for any split; training is left as it was.",
)
def _(eval_step, state, test_batches):
    scores = ll.evaluate(eval_step, state, test_batches, prefix="eval/", rates=True)
    # shows
    assert {"eval/loss", "eval/accuracy", "eval/samples_per_second"} <= set(scores)
    plain = ll.evaluate(eval_step, state, test_batches)
    assert scores["eval/loss"] == plain["loss"]


@here(
    "Trainer.predict",
    "Trainer.prediction_step",
    text="Outputs in the order of the data, batch by batch.",
)
def _(model, state, test_batches):
    predict_step = ll.make_predict_step(model, lambda model, batch: model(batch[0]).softmax(1))
    probabilities = torch.cat(list(ll.predict(predict_step, state, test_batches)))
    # shows
    assert probabilities.shape == (25, 3)
    assert close(probabilities, model(torch.cat([x for x, y in test_batches])).softmax(1).detach())


@here(
    "Trainer.get_train_dataloader",
    "Trainer.get_eval_dataloader",
    "Trainer.get_test_dataloader",
    text="Loaders are functions of the state. A torch DataLoader of yours becomes one by "
    "`ll.make_loader(dataloader)`; to evaluate, it is taken as it is.",
)
def _(train_set, test_set, eval_step, state):
    loader = ll.make_loader(train_set, batch_size=8, seed=42)
    test_loader = torch.utils.data.DataLoader(test_set, batch_size=10)
    # shows
    assert len(loader) == 5
    assert set(ll.evaluate(eval_step, state, test_loader)) == {"loss", "accuracy"}
    own = ll.make_loader(torch.utils.data.DataLoader(train_set, batch_size=8, shuffle=True))
    assert len(list(own(state))) == 5


@here(
    "Trainer.get_batch_samples",
    text="The batch of an update is whole, and `accumulate` cuts it; or it is a list of your own microbatches, here by "
    "length.",
)
def _(gpt2, lm_loss, tokens):
    grad_fn = ll.accumulate(ll.make_grad_fn(gpt2, lm_loss))
    found = grad_fn(ll.init_state(gpt2), [tokens[:2], tokens[2:, :5]])
    # shows
    assert found.samples == 3
    assert found.weight is None
    total = lm_loss(gpt2, tokens[:2]).merge(lm_loss(gpt2, tokens[2:, :5]))
    assert ll.compute(found.metrics)["loss"] == pytest.approx(total.compute().item(), rel=1e-6)


@here(
    "Trainer.num_examples",
    "Trainer.get_total_train_batch_size",
    "Trainer.set_initial_training_values",
    text="Arithmetic with what the loader says.",
)
def _(loader):
    examples, batch_size = len(loader.dataset), loader.batch_size
    total = 3 * len(loader)  # updates in three epochs
    # shows
    assert (examples, batch_size, total) == (40, 8, 15)


@here(
    "Trainer.get_learning_rates",
    text="Numbers for the log, beside the metrics: the rate, that of each group with its own, and what else moves. "
    "They are the next update's, as `scheduler.get_last_lr()` after `scheduler.step()`.",
)
def _(model, grad_fn, batch, log, rows):
    lr, is_vector = ll.schedules.warmup_linear(5e-5, warmup=10, total=100), lambda name, tensor: tensor.ndim < 2
    optimizer = ll.optimizer(torch.optim.AdamW, lr=lr, groups=[(is_vector, {"lr": ll.schedules.scaled(lr, 10)})])
    state = ll.init_state(model, optimizer)
    train_step = ll.make_train_step(grad_fn, optimizer)
    for _ in range(3):
        state, metrics = train_step(state, batch)
        log(state, ll.compute(metrics) | ll.optim.hyperparameters(optimizer, state))
    # shows
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 5e-4}]
    theirs = torch.optim.AdamW(groups, lr=5e-5)
    scheduler = transformers.get_linear_schedule_with_warmup(theirs, 10, 100)
    for row in rows:
        theirs.step()
        scheduler.step()
        assert [row["lr"], row["lr/0"]] == pytest.approx(scheduler.get_last_lr())
        assert "loss" in row


@here(
    "Trainer.get_optimizer_group",
    text="Groups are predicates on names and tensors, so asking is calling one.",
)
def _(model):
    def no_decay(name, tensor):
        return tensor.ndim < 2

    optimizer = ll.optimizer(torch.optim.AdamW, lr=5e-5, groups=[(no_decay, {"weight_decay": 0.0})])
    found = [name for name, tensor in model.named_parameters() if no_decay(name, tensor)]
    # shows
    assert found == ["0.bias", "2.bias"]
    assert set(ll.init_state(model, optimizer).opt_state["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@plain("Trainer.get_num_trainable_parameters", text="A sum over the model's parameters.")
def _(model):
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # shows
    assert count == 4 * 8 + 8 + 8 * 3 + 3


@here(
    "Trainer.autocast_smart_context_manager",
    "Trainer.compute_loss_context_manager",
    text="What stands around the forward pass is a wrapper of the loss function, or a `with` in it.",
)
def _(gpt2, lm_loss, tokens):
    grad_fn = ll.make_grad_fn(gpt2, ll.autocast(lm_loss, torch.bfloat16))
    # shows
    state = ll.init_state(gpt2)
    half, full = grad_fn(state, tokens), ll.make_grad_fn(gpt2, lm_loss)(state, tokens)
    assert close(half.grads, full.grads, rtol=0.1, atol=0.01)
    assert not equal(half.grads, full.grads)


nothing(
    "Trainer.loss_is_scaled_for_ga",
    text="Whether a loss is a mean or a sum with its weight is said by what it returns, and `accumulate` adds up "
    "accordingly.",
)
nothing(
    "Trainer.create_accelerator_and_postprocess",
    text="There is no accelerate in between: models are wrapped by torch's own engines.",
)


@here(
    "Trainer.floating_point_ops",
    "Trainer.store_flos",
    text="Counted by torch's counter for one step, and not estimated.",
)
def _(grad_fn, state, batch):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        grad_fn(state, batch)
    flops = counter.get_total_flops()
    # shows
    forward = 2 * 12 * (4 * 8 + 8 * 3)
    assert flops == 2 * forward + 2 * 12 * 8 * 3  # backward: all weights, and the inputs of the second layer


@here(
    "Trainer.log",
    text="A sink is called with the state and a dict of numbers.",
)
def _(state):
    log = ll.tee(ll.jsonl("log.jsonl"), ll.console())
    log(state.replace(step=50), {"train/loss": 0.5})
    # shows
    row = ll.log.read_jsonl("log.jsonl")[0]
    assert (row["step"], row["train/loss"]) == (50, 0.5)


@here(
    "Trainer.log_metrics",
    "Trainer.metrics_format",
    text="The console's sink prints an aligned line.",
)
def _(eval_step, state, test_batches, terminal):
    log = ll.console()
    log(state, ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
    # shows
    ll.console(file=terminal)(state, ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
    assert terminal.getvalue().startswith("step      0  epoch")
    assert "eval/accuracy 0." in terminal.getvalue()


@plain("Trainer.save_metrics", text="Scores are a dict of floats.")
def _(eval_step, state, test_batches):
    scores = ll.evaluate(eval_step, state, test_batches)
    Path("eval_results.json").write_text(json.dumps(scores, indent=4))
    # shows
    assert json.loads(Path("eval_results.json").read_text()) == scores


@here("Trainer.save_model", text="The weights as the model's own files, with those of the state or of its averages.")
def _(gpt2, lm_loss, tokens):
    optimizer = ll.ema(ll.optimizer(torch.optim.AdamW, lr=1e-3), decay=0.5)
    state = ll.init_state(gpt2, optimizer)
    state, metrics = ll.make_train_step(ll.make_grad_fn(gpt2, lm_loss), optimizer)(state, tokens)
    ll.checkpoint.save_pretrained(gpt2, ll.eval_state(optimizer, state), "runs/gpt2")
    # shows
    again = transformers.GPT2LMHeadModel.from_pretrained("runs/gpt2")
    averaged = ll.eval_state(optimizer, state).params
    assert equal(dict(again.named_parameters()), averaged)
    assert not equal(averaged, state.params)


@here("Trainer.save_state", text="All that a run is, in one checkpoint; its counts can be read without its tensors.")
def _(ckpt, train, state):
    ckpt.save(state := train(state, 3)[-1], {"eval/loss": 0.3})
    # shows
    found = ckpt.latest()
    assert (found.step, found.samples, found.metrics) == (3, 24, {"eval/loss": 0.3})
    assert equal(ckpt.restore(ll.copy_state(state)), state)


@here(
    "trainer_utils.get_last_checkpoint",
    text="None where there is none; a damaged one, as a killed process leaves it, does not count.",
)
def _(state):
    ckpt = ll.checkpoint_io("runs/small")
    before = ckpt.latest()
    ckpt.save(state.replace(step=500))
    # shows
    assert before is None
    assert ckpt.latest().path.name == "step-00000500"


@here(
    "Trainer.is_world_process_zero",
    "Trainer.is_local_process_zero",
    text="For a line of yours; sinks and checkpoints see to it themselves. (Of the ranks of one host, the first "
    'has `os.environ["LOCAL_RANK"] == "0"`.)',
)
def _():
    if ll.distributed.is_rank_zero():
        Path("notes.txt").write_text("once")
    # shows
    assert Path("notes.txt").read_text() == "once"


@plain(
    "Trainer.get_tp_size",
    "Trainer.get_cp_size",
    "Trainer.get_sp_size",
    text="A mesh of yours says its sizes.",
)
def _(one_process):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    # shows
    assert mesh["tensor"].size() == mesh["data"].size() == 1


@here(
    "Trainer.hyperparameter_search",
    text="A run is a function of its hyperparameters, so a search is a loop, or optuna's over that function. Many "
    "small runs of one model go in one step: a stack, each member with a rate of its own.",
)
def _(model, grad_fn, loader, eval_step, test_batches):
    optimizer = ll.optimizer(torch.optim.SGD, lr=ll.transforms.per_member([0.001, 0.1, 1.0]))
    train_step = ll.vmap_step(ll.make_train_step(grad_fn, optimizer))
    stack = ll.transforms.stack_states([ll.init_state(model, optimizer, epoch_length=len(loader))] * 3)
    for batch in loader(stack):
        stack, metrics = train_step(stack, batch)
    scores = [ll.evaluate(eval_step, state, test_batches) for state in ll.transforms.unstack_states(stack)]
    # shows
    alone = ll.optimizer(torch.optim.SGD, lr=0.1)
    state = ll.init_state(model, alone, epoch_length=len(loader))
    for batch in loader(state):
        state, _ = ll.make_train_step(grad_fn, alone)(state, batch)
    assert close(ll.transforms.unstack_states(stack)[1].params, state.params)
    assert scores[1]["loss"] == pytest.approx(ll.evaluate(eval_step, state, test_batches)["loss"], rel=1e-5)


@plain(
    "Trainer.push_to_hub",
    "Trainer.init_hf_repo",
    text="huggingface_hub's own functions, for the folder of a model or of a checkpoint. (The tests send them to a "
    "stand-in for the Hub.)",
)
def _(server, gpt2):
    import huggingface_hub

    ll.checkpoint.save_pretrained(gpt2, ll.init_state(gpt2), "runs/gpt2")
    repo = huggingface_hub.create_repo("user/gpt2-small", exist_ok=True).repo_id
    huggingface_hub.upload_folder(repo_id=repo, folder_path="runs/gpt2", commit_message="End of training")
    # shows
    assert server.repos["user/gpt2-small"].commits[-1]["message"] == "End of training"


@here(
    "Trainer.create_model_card",
    text="huggingface_hub's card, with the metrics of a checkpoint as evaluation results.",
)
def _(ckpt, eval_step, state, test_batches):
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    ckpt.save(state, ll.evaluate(eval_step, state, test_batches))
    about = {"task_type": "text-classification", "dataset_type": "mine", "dataset_name": "mine"}
    results = [EvalResult(**about, metric_type=k, metric_value=v) for k, v in ckpt.latest().metrics.items()]
    data = ModelCardData(model_name="gpt2-small", license="mit", eval_results=results)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n# gpt2-small\n").save("README.md")
    # shows
    card = ModelCard.load("README.md")
    assert {each.metric_type: each.metric_value for each in card.data.eval_results} == ckpt.latest().metrics


nothing(
    "Trainer.end",
    text="Nothing has to be ended: files are closed after each line, and what runs in the background is waited for "
    "at the end of the process (`ckpt.wait()`, `log.flush()` to be sure before).",
)


@here(
    "Trainer.train(resume_from_checkpoint)",
    text='`restore` takes the latest whole checkpoint, `which=` another one by its step, or `"best"`.',
)
def _(ckpt, state, train):
    for state in train(state, 4):
        ckpt.save(state)
    # given
    state = ckpt.restore(state, which=2)
    # shows
    assert (state.step, state.batch) == (2, 2)


@here(
    "Trainer.train(ignore_keys_for_eval)",
    "Trainer.evaluate(ignore_keys)",
    "Trainer.predict(ignore_keys)",
    text="The function of model and batch returns what is wanted, and nothing else is kept.",
)
def _(gpt2, tokens):
    predict_step = ll.make_predict_step(gpt2, lambda model, tokens: model(input_ids=tokens).logits[:, -1])
    # shows
    found = predict_step(ll.init_state(gpt2), tokens)
    assert torch.equal(found, gpt2(input_ids=tokens).logits[:, -1].detach())


@here(
    "Trainer.evaluate(eval_dataset)",
    "Trainer.evaluate(metric_key_prefix)",
    "Trainer.predict(test_dataset)",
    "Trainer.predict(metric_key_prefix)",
    text="Any batches, under any prefix.",
)
def _(eval_step, state, test_batches):
    scores = ll.evaluate(eval_step, state, test_batches, prefix="test/")
    # shows
    assert set(scores) == {"test/loss", "test/accuracy"}


@here(
    "Trainer.hyperparameter_search(hp_space)",
    "Trainer.hyperparameter_search(compute_objective)",
    "Trainer.hyperparameter_search(n_trials)",
    "Trainer.hyperparameter_search(direction)",
    "Trainer.hyperparameter_search(backend)",
    "Trainer.hyperparameter_search(hp_name)",
    text="A function from hyperparameters to a score is what any search takes.",
)
def _(model, grad_fn, loader, eval_step, test_batches):
    def objective(lr):
        optimizer = ll.optimizer(torch.optim.SGD, lr=lr)
        state = ll.init_state(model, optimizer, epoch_length=len(loader))
        train_step = ll.make_train_step(grad_fn, optimizer)
        for batch in loader(state):
            state, metrics = train_step(state, batch)
        return ll.evaluate(eval_step, state, test_batches)["loss"]

    best = min([0.001, 0.1, 1.0], key=objective)
    # shows
    assert best != 0.001
    assert objective(0.1) == objective(0.1) < objective(0.001)


@here(
    "Trainer.push_to_hub(blocking)",
    "Trainer.push_to_hub(token)",
    "Trainer.push_to_hub(private)",
    "Trainer._push_from_checkpoint",
    "Trainer._finish_current_push",
    text="An upload with `run_as_future=True` does not block, and its `result()` does. (The tests push to a stand-in for "
    "the Hub.)",
)
def _(server, ckpt, state):
    import huggingface_hub

    hub = huggingface_hub.HfApi(token=None)
    repo = hub.create_repo("user/gpt2-small", private=True, exist_ok=True).repo_id
    pushed = hub.upload_folder(repo_id=repo, folder_path=ckpt.save(state), run_as_future=True)
    pushed.result()
    # shows
    assert len(server.repos["user/gpt2-small"].commits) == 2


@plain(
    "Trainer.push_to_hub(commit_message)",
    "Trainer.push_to_hub(revision)",
    text="Arguments of huggingface_hub's functions. (The tests push to a stand-in for the Hub.)",
)
def _(server, ckpt, state):
    import huggingface_hub

    repo = huggingface_hub.create_repo("user/gpt2-small").repo_id
    folder = {"folder_path": str(ckpt.save(state)), "path_in_repo": "last-checkpoint", "revision": "main"}
    huggingface_hub.upload_folder(repo_id=repo, commit_message="Step 500", **folder)
    # shows
    assert "last-checkpoint/manifest.json" in server.repos["user/gpt2-small"].files


TABLE.section("Methods that begin with an underscore, and are overridden all the same")


@here(
    "Trainer._inner_training_loop",
    "Trainer._run_epoch",
    "Trainer._init_training_state",
    "Trainer._prepare_for_training",
    "Trainer._finalize_training",
    "Trainer._maybe_log_save_evaluate",
    "Trainer._evaluate",
    text="The loop is in your script, so there is nothing to override.",
)
def _(state, loader, train_step, eval_step, test_batches, log, rows):
    log_now, eval_now = ll.every_n_steps(2), ll.at_epoch_end()
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        if log_now(state):
            log(state, ll.compute(metrics, prefix="train/"))
        if eval_now(state):
            log(state, ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
    # shows
    assert [(row["step"], "eval/loss" in row) for row in rows] == [(2, False), (4, False), (5, True)]


@here(
    "Trainer._get_dataloader",
    "Trainer._get_train_sampler",
    "Trainer._get_eval_sampler",
    text="An order of your own is a function of the epoch and a generator, or torch's Sampler; "
    "`ll.data.weighted(weights)` draws by weight.",
)
def _(train_set):
    def hardest_first(epoch, generator):
        return torch.arange(40).flip(0)

    loader = ll.make_loader(train_set, batch_size=8, order=ll.data.sampler(hardest_first))
    # shows
    x, y = next(iter(loader(ll.TrainState())))
    assert torch.equal(x, train_set[list(range(39, 31, -1))][0])


@here(
    "Trainer._remove_unused_columns",
    "Trainer._set_signature_columns_if_needed",
    "Trainer._get_collator_with_removed_columns",
    text="A collate function takes the columns that it needs.",
)
def _():
    texts = [{"input_ids": torch.arange(4), "source": object()} for _ in range(4)]

    # given
    def collate_fn(rows):
        return torch.stack([row["input_ids"] for row in rows])

    loader = ll.make_loader(texts, batch_size=2, collate_fn=collate_fn)
    # shows
    assert [batch.shape for batch in loader(ll.TrainState())] == [(2, 4), (2, 4)]


@here(
    "Trainer._prepare_input",
    "Trainer._prepare_inputs",
    "Trainer._move_model_to_device",
    text="The loader moves whatever tensors a batch has; the model is moved by you.",
)
def _(model, train_set):
    loader = ll.make_loader(train_set, batch_size=8, device="meta")
    # shows
    x, y = next(iter(loader(ll.TrainState())))
    assert x.device.type == y.device.type == "meta"


@here(
    "Trainer._get_num_items_in_batch",
    text="`model_loss` counts the labels that the model's loss is averaged over, without -100 and, for causal models, "
    "the first of each row. The gradient is that of the mean over all of them, in all microbatches together.",
)
def _(gpt2, tokens):
    grad_fn = ll.accumulate(ll.make_grad_fn(gpt2, ll.losses.model_loss), microbatches=3)
    # shows
    labels = tokens.masked_fill(torch.arange(10) < torch.tensor([[2], [5], [9]]), -100)
    found = grad_fn(ll.init_state(gpt2), {"input_ids": tokens, "labels": labels})
    gpt2.loss_type = "ForCausalLM"
    whole = gpt2(input_ids=tokens, labels=labels).loss
    whole.backward()
    assert ll.compute(found.metrics)["loss"] == pytest.approx(whole.item(), rel=1e-6)
    assert close(found.grads, {name: tensor.grad for name, tensor in gpt2.named_parameters()})


@here(
    "Trainer._get_learning_rate",
    text="Asked before the step it is what the step takes, which is what the Trainer logs.",
)
def _(model, grad_fn, batch, log, rows):
    optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.schedules.warmup_linear(5e-5, warmup=2, total=6))
    train_step, state = ll.make_train_step(grad_fn, optimizer), ll.init_state(model, optimizer)
    for _ in range(3):
        rates = ll.optim.hyperparameters(optimizer, state)
        state, metrics = train_step(state, batch)
        log(state, ll.compute(metrics) | rates)
    # shows
    assert [row["lr"] for row in rows] == pytest.approx(scheduled("linear", 5e-5, 2, 6)[:3])


@here(
    "Trainer._clip_grad_norm",
    "Trainer._get_grad_norm",
    "Trainer._has_mixed_mesh_grads",
    "Trainer._mixed_mesh_grad_norm",
    text="Wrappers of the gradient: `clip_by_global_norm` (with `math.inf` to measure alone), `clip_by_value`, "
    "`adaptive_grad_clip`, or one of yours.",
)
def _(grad_fn, state, batch):
    measured = ll.clip_by_global_norm(grad_fn, math.inf)
    # shows
    found = measured(state, batch)
    assert equal(found.grads, grad_fn(state, batch).grads)
    norm = nn.utils.get_total_norm(found.grads.values()).item()
    assert ll.compute(found.metrics)["grad_norm"] == pytest.approx(norm)


@here(
    "Trainer._save_checkpoint",
    "Trainer._save",
    "Trainer._get_output_dir",
    "Trainer._save_rng_state",
    "Trainer._save_optimizer_and_scheduler",
    "Trainer._save_scaler",
    text="A state is all there is to save: weights, moments, loss scale, averages, counts and the seed. Schedules "
    "and random streams are functions of these.",
)
def _(model, loss_fn, batch, ckpt):
    optimizer = ll.optim.dynamic_loss_scale(ll.ema(ll.optimizer(torch.optim.AdamW, lr=1e-2)))
    train_step = ll.make_train_step(ll.grads.scale_loss(ll.make_grad_fn(model, loss_fn)), optimizer)
    state, metrics = train_step(ll.init_state(model, optimizer), batch)
    ckpt.save(state)
    # shows
    assert equal(ckpt.restore(ll.copy_state(state)), state)
    assert ckpt.latest().parts["opt_state"] > 3 * ckpt.latest().parts["params"]


@here(
    "Trainer._load_from_checkpoint",
    "Trainer._load_best_model",
    "Trainer._load_rng_state",
    "Trainer._load_optimizer_and_scheduler",
    "Trainer._load_scaler",
    "Trainer._load_callback_state",
    "Trainer._issue_warnings_after_load",
    text="`restore` takes all of it, or with `weights_only=True` parameters and buffers, of which `names=` chooses "
    "some; what does not fit is an error that names it.",
)
def _(ckpt, state, train):
    ckpt.save(trained := train(state, 3)[-1])
    # given
    state = ckpt.restore(state, weights_only=True, names=lambda name: name.startswith("0."))
    # shows
    assert state.step == 0
    assert torch.equal(state.params["0.weight"], trained.params["0.weight"])
    assert not torch.equal(state.params["2.weight"], trained.params["2.weight"])
    with pytest.raises(ValueError, match=r"2\.weight"):
        ckpt.restore(state.replace(params={**state.params, "2.weight": torch.zeros(5, 5)}))


@here("Trainer._determine_best_metric", text="`update_best` keeps a record, and `at_best` says whether it has moved.")
def _(model, optimizer):
    state = ll.init_state(model, optimizer, extra={"best": ll.predicates.BestSoFar("eval/accuracy", mode="max")})
    state = ll.update_best(state.replace(step=10), {"eval/accuracy": 0.7})
    is_new_best = ll.predicates.at_best()(state)
    # shows
    assert is_new_best
    assert not ll.predicates.at_best()(ll.update_best(state, {"eval/accuracy": 0.6}))


@here(
    "Trainer._track_num_input_tokens",
    text="A metric of each step: here the mean number of tokens in an example.",
)
def _(gpt2, tokens):
    def loss_fn(model, tokens):
        loss = ll.next_token_loss(model(input_ids=tokens).logits, tokens)
        return loss, {"tokens": ll.Mean(tokens.numel(), len(tokens))}

    # shows
    found = ll.make_grad_fn(gpt2, loss_fn)(ll.init_state(gpt2), tokens)
    assert ll.compute(found.metrics)["tokens"] == 10


@here(
    "Trainer._update_auto_batch_size",
    text="The batch stays what it was; the size of its microbatches is a metric of the step.",
)
def _(grad_fn, state, batch):
    found = ll.grads.retry_on_oom(grad_fn, size=5)(state, batch)
    size = ll.compute(found.metrics)["microbatch_size"]
    # shows
    assert size == 5
    assert close(found.grads, grad_fn(state, batch).grads)


@plain(
    "Trainer._wrap_model",
    "Trainer._sync_replicated_trainable_parameters",
    "Trainer._defer_fsdp_gradient_reduction",
    text="torch's wrapper around the model, or its `fully_shard`; wrappers of the gradient stand around it as "
    "before.",
)
def _(one_process, model, loss_fn, optimizer, batch):
    wrapped = DistributedDataParallel(model)
    grad_fn = ll.accumulate(ll.make_grad_fn(wrapped, loss_fn), microbatches=3)
    train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    # shows
    whole_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    whole, _ = whole_step(ll.copy_state(ll.init_state(model, optimizer)), batch)
    state, _ = train_step(ll.init_state(wrapped, optimizer), batch)
    assert close(state.params, whole.params, atol=1e-5)


nothing(
    "Trainer._prepare_context_parallel_inputs",
    text="torch's context parallelism is an experiment of its own, a `with` around the forward and backward pass; "
    "nothing here was ever run with it.",
)
nothing(
    "Trainer._validate_args",
    "Trainer._build_accelerator_args",
    text="Each function checks its own arguments when it is called, and there is no accelerator to build.",
)
nothing(
    "Trainer._hp_search_setup",
    "Trainer._report_to_hp_search",
    "Trainer._tune_save_checkpoint",
    "Trainer.train(trial)",
    text="A search calls a function of yours, and what it is told of a trial it is told in there: "
    "`trial.report(loss, state.step)` is a line after the evaluation.",
)


TABLE.section("Events of a TrainerCallback")


@here(
    "TrainerCallback.on_init_end",
    "TrainerCallback.on_train_begin",
    "TrainerCallback.on_train_end",
    text="Lines before the loop, and after it.",
)
def _(state, loader, train_step, log, rows, eval_step, test_batches):
    log(state, ll.evaluate(eval_step, state, test_batches, prefix="eval/"))  # on_train_begin
    for batch in loader(state):
        state, metrics = train_step(state, batch)
    log(state, ll.evaluate(eval_step, state, test_batches, prefix="eval/"))  # on_train_end
    # shows
    assert [row["step"] for row in rows] == [0, 5]
    assert rows[1]["eval/loss"] < rows[0]["eval/loss"]


@here(
    "TrainerCallback.on_epoch_begin",
    "TrainerCallback.on_epoch_end",
    text="Lines before and after the `for`; after a step, `at_epoch_end()` says that it was the last one of an "
    "epoch.",
)
def _(state, loader, train_step):
    done, events = ll.after_epochs(2), []
    while not done(state):
        events.append("begin")
        for batch in loader(state):
            state, metrics = train_step(state, batch)
        events.append("end")
    # shows
    assert events == ["begin", "end", "begin", "end"]
    assert ll.at_epoch_end()(state)


@here(
    "TrainerCallback.on_step_begin",
    "TrainerCallback.on_step_end",
    text="Lines before and after the step.",
)
def _(state, loader, train_step):
    events = []
    for batch in loader(state):
        events.append(("begin", state.step))
        state, metrics = train_step(state, batch)
        events.append(("end", state.step))
    # shows
    assert events[:4] == [("begin", 0), ("end", 1), ("begin", 1), ("end", 2)]


@here(
    "TrainerCallback.on_substep_end",
    text="Each microbatch goes through the function that `accumulate` wraps.",
)
def _(model, loss_fn, state, batch):
    pieces = []

    def watched(model, batch):
        pieces.append(len(batch[0]))
        return loss_fn(model, batch)

    grad_fn = ll.accumulate(ll.make_grad_fn(model, watched), microbatches=3)
    # shows
    assert close(grad_fn(state, batch).grads, ll.make_grad_fn(model, loss_fn)(state, batch).grads)
    assert pieces == [4, 4, 4]


@here(
    "TrainerCallback.on_pre_optimizer_step",
    text="A gradient function around the one that you have sees its gradients, here those that were clipped, and "
    "may report on them or change them.",
)
def _(grad_fn, optimizer, state, batch):
    clipped = ll.clip_by_global_norm(grad_fn, 0.01)

    def watched(state, batch, *part):
        found = clipped(state, batch, *part)
        largest = max(grad.abs().max() for grad in found.grads.values())
        return found._replace(metrics={**found.metrics, "largest": ll.Mean(largest)})

    train_step = ll.make_train_step(watched, optimizer)
    # shows
    state, metrics = train_step(state, batch)
    assert 0 < ll.compute(metrics)["largest"] < 0.01 < ll.compute(metrics)["grad_norm"]


@here(
    "TrainerCallback.on_optimizer_step",
    text="After the step, with both states at hand (unless it donates): how far did the weights go?",
)
def _(train_step, state, batch):
    after, metrics = train_step(state, batch)
    moved = ll.grads.global_norm(after.params[name] - tensor for name, tensor in state.params.items())
    # shows
    assert 0 < moved <= 0.0101 * math.sqrt(67)  # AdamW at 0.01, of 67 weights


@here(
    "TrainerCallback.on_log",
    text="A sink is a function, and `tee` calls several.",
)
def _(state, rows, log):
    lines = []
    log = ll.tee(log, lambda state, values: lines.append(f"{state.step}: {values}"))
    log(state, {"train/loss": 0.5})
    # shows
    assert lines == ["0: {'train/loss': 0.5}"]
    assert rows[0]["train/loss"] == 0.5


@here(
    "TrainerCallback.on_evaluate",
    "TrainerCallback.on_predict",
    "TrainerCallback.on_save",
    text="What comes after is the next line, with the scores or the checkpoint's path in hand.",
)
def _(eval_step, state, test_batches, ckpt):
    scores = ll.evaluate(eval_step, state, test_batches, prefix="eval/")
    path = ckpt.save(state, scores)
    (path / "note.txt").write_text(f"loss {scores['eval/loss']:.3f}")
    # shows
    assert (path / "note.txt").exists()
    assert ckpt.latest().metrics == scores


@here(
    "TrainerCallback.on_prediction_step",
    text="Evaluation steps are functions; one around it sees each batch.",
)
def _(eval_step, state, test_batches):
    sizes = []

    def watched(state, batch):
        sizes.append(len(batch[0]))
        return eval_step(state, batch)

    scores = ll.evaluate(watched, state, test_batches)
    # shows
    assert sizes == [10, 10, 5]
    assert scores == ll.evaluate(eval_step, state, test_batches)


nothing("TrainerCallback.on_push_begin", text="Nothing is pushed but by a line of yours; this is the line before it.")


@here(
    "Callbacks.EarlyStoppingCallback",
    text="A record of the best in the state, where a resume finds it, and a predicate that reads it. For "
    "`early_stopping_threshold`, write `BestSoFar(..., min_delta=MinDelta(threshold, cumulative=False))`; a plain number lets "
    "small improvements add up until they count.",
)
def _(model, optimizer):
    done = ll.after_epochs(10) | ll.early_stopping(patience=2)
    state = ll.init_state(model, optimizer, extra={"best": ll.predicates.BestSoFar("eval/loss")})
    for loss in (0.5, 0.6, 0.4, 0.45, 0.41):  # an evaluation each
        state = ll.update_best(state, {"eval/loss": loss})
        if done(state):
            break
    # shows
    assert (loss, state.extra["best"].best) == (0.41, 0.4)
    generator = np.random.default_rng(0)
    for _ in range(20):
        losses = generator.random(12).round(1)
        assert stopped_here(losses, 3) == stopped_by_callback(losses, 3)
    slowly = [0.5, 0.45, 0.4, 0.35, 0.3]
    assert (stopped_here(slowly, 2, 0.08), stopped_by_callback(slowly, 2, 0.08)) == (None, 2)
    assert stopped_here(slowly, 2, ll.predicates.MinDelta(0.08, cumulative=False)) == 2


def stopped_here(losses, patience, threshold=0.0):
    best = ll.predicates.BestSoFar("eval/loss", min_delta=threshold)
    state = ll.TrainState(extra={"best": best})
    done = ll.early_stopping(patience)
    for number, loss in enumerate(losses):
        state = ll.update_best(state, {"eval/loss": float(loss)})
        if done(state):
            return number
    return None


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


@here(
    "Callbacks.ProgressCallback",
    "Callbacks.PrinterCallback",
    text="The bar goes around the loader; the console's lines are printed above it.",
)
def _(loader, state, train_step, terminal):
    log = ll.console(file=terminal)
    # given
    bar = ll.progress(loader)
    for batch in bar(state):
        state, metrics = train_step(state, batch)
        bar.show(metrics)
        log(state, ll.compute(metrics, prefix="train/"))
    # shows
    assert terminal.getvalue().count("train/loss") == 5


@here(
    "Callbacks.DefaultFlowCallback",
    text="Predicates, asked after the step; `done` among them evaluates and saves at the end, whichever step that is.",
)
def _(state):
    done = ll.after_steps(25)
    log_now = ll.every_n_steps(5)
    eval_now, save_now = ll.every_n_steps(10) | done, ll.every_n_steps(20) | done
    # shows
    settings = transformers.TrainingArguments(
        "unused", eval_strategy="steps", save_strategy="steps", logging_steps=5, eval_steps=10, save_steps=20
    )
    theirs = transformers.TrainerState(max_steps=25, logging_steps=5, eval_steps=10, save_steps=20)
    for step in range(1, 26):
        theirs.global_step, at = step, state.replace(step=step)
        asked = transformers.trainer_callback.DefaultFlowCallback().on_step_end(
            settings, theirs, transformers.TrainerControl()
        )
        assert (asked.should_log, asked.should_evaluate, asked.should_save, asked.should_training_stop) == (
            log_now(at),
            eval_now(at),
            save_now(at),
            done(at),
        )


@here(
    "TrainerControl.should_training_stop",
    "TrainerControl.should_epoch_stop",
    text="`break`. What ends an epoch early says so to the state.",
)
def _(state, loader, train_step):
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        if state.step == 3:
            break
    state = state.replace(epoch=state.epoch + 1, batch=0)  # for should_epoch_stop alone
    # shows
    assert (state.step, state.epoch, len(list(loader(state)))) == (3, 1, 5)


@here(
    "TrainerControl.should_save",
    "TrainerControl.should_evaluate",
    "TrainerControl.should_log",
    text="An `if` with a predicate, or with any condition of yours.",
)
def _(state, train_step, loader, ckpt):
    slow_start = ll.predicates.predicate(lambda state: state.samples < 20)
    save_now = ll.every_n_steps(1) & ~slow_start
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        if save_now(state):
            ckpt.save(state)
    # shows
    assert [checkpoint.step for checkpoint in ckpt.steps()] == [3, 4, 5]


TABLE.section("What TrainerState holds")


@here(
    "TrainerState.global_step",
    "TrainerState.epoch",
    text="`step` counts updates and `epoch` whole epochs; `epoch + batch / epoch_length` is the fraction.",
)
def _(train, state):
    state = train(state, 8)[-1]
    epoch = state.epoch + state.batch / state.epoch_length
    # shows
    assert (state.step, state.epoch, state.batch, epoch) == (8, 1, 3, 1.6)


@here(
    "TrainerState.max_steps",
    "TrainerState.num_train_epochs",
    "TrainerState.logging_steps",
    "TrainerState.eval_steps",
    "TrainerState.save_steps",
    text="The state holds where a run is, and not what it is to become: predicates are made in the script, and "
    "print as the code that made them.",
)
def _():
    done = ll.after_epochs(3) | ll.after_steps(2000)
    # shows
    assert repr(done) == "(after_epochs(3) | after_steps(2000))"


@here(
    "TrainerState.train_batch_size",
    text="The loader's. Samples consumed are counted; a run continues with another batch size, at the sample that comes "
    "next, by `loader.resume`.",
)
def _(train, state, loader, train_set):
    state = train(state, 2)[-1]
    batch_size, consumed = loader.batch_size, state.samples
    loader = ll.make_loader(train_set, batch_size=16, seed=0)
    state = loader.resume(state)
    # shows
    assert (batch_size, consumed) == (8, 16)
    assert (state.batch, state.epoch_length, len(next(iter(loader(state)))[0])) == (1, 3, 16)


@here("TrainerState.num_input_tokens_seen", text="A count in `extra`, kept with the rest.")
def _(state, tokens):
    state = state.replace(extra={"tokens": torch.tensor(0)})
    state = state.replace(extra={"tokens": state.extra["tokens"] + tokens.numel()})  # after each step
    # shows
    assert state.extra["tokens"].item() == 30


@here("TrainerState.total_flos", text="Operations of a step, times steps.")
def _(grad_fn, train, state, batch):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        grad_fn(state, batch)
    total = train(state, 3)[-1].step * counter.get_total_flops()
    # shows
    assert total == 3 * (3 * 2 * 12 * (4 * 8 + 8 * 3) - 2 * 12 * 4 * 8)  # no gradient goes back to the data


@here(
    "TrainerState.log_history",
    text="The log is the file, or a list; `read_columns` joins what a resumed run logged again.",
)
def _(train, state):
    log = ll.jsonl("log.jsonl")
    for state in train(state, 3):
        log(state, {"train/loss": 1 / state.step})
    history = ll.log.read_columns("log.jsonl")
    # shows
    assert (history["step"], history["train/loss"]) == ([1, 2, 3], [1.0, 0.5, 1 / 3])


@here(
    "TrainerState.best_metric",
    "TrainerState.best_global_step",
    "TrainerState.best_model_checkpoint",
    text="What the checkpoints know of the best; without checkpoints, a `BestSoFar` in the state.",
)
def _(train, state):
    ckpt = ll.checkpoint_io("runs/small", keep_best=1, monitor="eval/loss")
    for state, loss in zip(train(state, 3), (0.5, 0.2, 0.4), strict=True):
        ckpt.save(state, {"eval/loss": loss})
    best = ckpt.best()
    # shows
    assert (best.step, best.metrics["eval/loss"], best.path.name) == (2, 0.2, "step-00000002")
    record = ll.predicates.BestSoFar("eval/loss").update(0.5, 1).update(0.2, 2).update(0.4, 3)
    assert (record.best, record.best_step) == (0.2, 2)


@here(
    "TrainerState.is_local_process_zero",
    "TrainerState.is_world_process_zero",
    text="Asked for, and not stored: a checkpoint is the same on every rank.",
)
def _():
    first = ll.distributed.is_rank_zero()
    # shows
    assert first is True


nothing(
    "TrainerState.is_hyper_param_search",
    "TrainerState.trial_name",
    "TrainerState.trial_params",
    text="A run does not know that it is part of a search; its directory and its log are where the search says.",
)


@here(
    "TrainerState.stateful_callbacks",
    text="What must remember is a record in `extra`: a pytree of tensors and numbers, checkpointed with the rest.",
)
def _(ckpt, model, optimizer):
    state = ll.init_state(
        model, optimizer, extra={"best": ll.predicates.BestSoFar("eval/loss"), "seen": torch.zeros(5)}
    )
    ckpt.save(state.replace(extra=state.extra | {"seen": torch.ones(5)}))
    # shows
    assert equal(ckpt.restore(state).extra["seen"], torch.ones(5))
