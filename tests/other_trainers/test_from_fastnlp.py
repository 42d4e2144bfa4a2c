"""recipes/FROM_FASTNLP.md: the code of each row does what the row says, and each name of fastNLP has a row.

fastNLP is not installed here, so the names are listed below as read from its source: `NAMES` has those of 1.0.1, and
for `DistTrainer` those of 0.5.0, 0.5.5 and 0.7.0 together.
"""

import ast
import copy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checks import (
    assert_gradient,
    at,
    close,
    equal,
    evaluated,
    fires,
    logged,
    looplib_updates,
    on_two_ranks,
    parameters,
    rate,
    raw_updates,
    restored,
    same_gradient,
    saved,
    sizes,
    updates,
    values,
)
from migration_page import ROOT, Page, assert_complete, assert_readable
from ranks import launch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

import looplib as ll

PAGE = Page(ROOT / "recipes/FROM_FASTNLP.md")

# fastNLP 1.0.1, fastNLP/core/controllers/trainer.py: Trainer.__init__; evaluate_every has three forms.
PARAMETERS = """
    model train_dataloader optimizers driver device n_epochs evaluate_dataloaders batch_step_fn
    evaluate_batch_step_fn train_fn evaluate_fn callbacks metrics evaluate_every-negative evaluate_every-positive
    evaluate_every-function input_mapping output_mapping model_wo_auto_param_call accumulation_steps fp16 monitor
    larger_better n_batches overfit_batches marker
"""
# The same file: the **kwargs that the docstring lists, and those of torch_kwargs in drivers/torch_driver/*.py.
KEYWORDS = """
    torch_kwargs torch_kwargs.ddp_kwargs torch_kwargs.fsdp_kwargs torch_kwargs.set_grad_to_none
    torch_kwargs.non_blocking torch_kwargs.gradscaler_kwargs paddle_kwargs fairscale_kwargs deepspeed_kwargs
    oneflow_kwargs data_device use_dist_sampler evaluate_use_dist_sampler output_from_new_proc progress_bar
    train_input_mapping train_output_mapping evaluate_input_mapping evaluate_output_mapping
    check_dataloader_legality
"""
# The same file: public methods, with their parameters, and properties that are no parameter as well.
METHODS = """
    run run.num_train_batch_per_epoch run.num_eval_batch_per_dl run.num_eval_sanity_batch run.resume_from
    run.resume_training run.catch_KeyboardInterrupt step_evaluate epoch_evaluate add_callback_fn on on.event on.marker
    train_batch_loop save_model save_model.folder save_model.only_state_dict save_model.model_save_fn load_model
    load_model.folder load_model.only_state_dict load_model.model_load_fn save_checkpoint save_checkpoint.folder
    save_checkpoint.only_state_dict save_checkpoint.model_save_fn load_checkpoint load_checkpoint.folder
    load_checkpoint.resume_training load_checkpoint.only_state_dict load_checkpoint.model_load_fn train_step backward
    zero_grad step move_data_to_device extract_loss_from_outputs get_no_sync_context cur_epoch_idx
    global_forward_batches batch_idx_in_epoch num_batches_per_epoch model_device
"""
# fastNLP 1.0.1, fastNLP/core/callbacks/callback_event.py, and callback.py for Callback.
EVENTS = """
    on_after_trainer_initialized on_sanity_check_begin on_sanity_check_end on_train_begin on_train_end
    on_train_epoch_begin on_train_epoch_end on_fetch_data_begin on_fetch_data_end on_train_batch_begin
    on_train_batch_end on_exception on_save_model on_load_model on_save_checkpoint on_load_checkpoint
    on_before_backward on_after_backward on_before_optimizers_step on_after_optimizers_step on_before_zero_grad
    on_after_zero_grad on_evaluate_begin on_evaluate_end
"""
NAMES = {
    "Trainer": PARAMETERS + KEYWORDS + METHODS,
    # fastNLP/core/controllers/utils/state.py
    "TrainerState": """
        n_epochs cur_epoch_idx global_forward_batches batch_idx_in_epoch num_batches_per_epoch n_batches state_dict
        load_state_dict
    """,
    "Event": EVENTS + "every once filter_fn",
    "Callback": EVENTS + "callback_name need_reproducible_sampler",
    # fastNLP/core/callbacks/checkpoint_callback.py
    "CheckpointCallback": """
        folder every_n_epochs every_n_batches last topk on_exceptions monitor larger_better only_state_dict
        model_save_fn save_object save_evaluate_results
    """,
    # fastNLP/core/callbacks/__init__.py, and the modules beside it for the parameters
    "EarlyStopCallback": "monitor larger_better patience",
    "LoadBestModelCallback": """
        monitor larger_better only_state_dict save_folder model_save_fn model_load_fn delete_after_train
    """,
    "MoreEvaluateCallback": """
        dataloaders metrics evaluate_every watch_monitor watch_monitor_larger_better evaluate_fn
        num_eval_sanity_batch topk topk_monitor topk_larger_better folder only_state_dict save_object model_save_fn
        save_evaluate_results save_kwargs
    """,
    "LRSchedCallback": "scheduler step_on",
    "TorchWarmupCallback": "warmup schedule",
    "TorchGradClipCallback": "clip_value clip_type parameters",
    "TimerCallback": "print_every time_ndigit",
    "RichCallback": "print_every loss_round_ndigit monitor larger_better format_json",
    "TqdmCallback": "print_every loss_round_ndigit monitor larger_better format_json",
    "RawTextCallback": "print_every loss_round_ndigit monitor larger_better format_json",
    "FitlogCallback": "monitor larger_better log_exception log_loss_every",
    "callbacks": """
        Filter choose_progress_callback ProgressCallback HasMonitorCallback ResultsMonitor TopkSaver
    """,
    # fastNLP/core/drivers/__init__.py
    "drivers": """
        Driver TorchDriver TorchSingleDriver TorchDDPDriver FairScaleDriver TorchFSDPDriver DeepSpeedDriver
        PaddleDriver PaddleSingleDriver PaddleFleetDriver JittorDriver JittorSingleDriver JittorMPIDriver
        OneflowDriver OneflowSingleDriver OneflowDDPDriver torch_seed_everything paddle_seed_everything
        oneflow_seed_everything optimizer_state_to_device
    """,
    # fastNLP/core/drivers/driver.py: public methods and properties
    "Driver": """
        setup set_dist_repro_dataloader set_deterministic_dataloader set_sampler_epoch model_call get_model_call_fn
        model optimizers model_device data_device check_dataloader_legality set_optimizers backward step zero_grad
        get_model_no_sync_context get_evaluate_context auto_cast save_model load_model save_checkpoint load_checkpoint
        tensor_to_numeric set_model_mode unwrap_model move_model_to_device move_data_to_device get_local_rank barrier
        is_distributed on_exception broadcast_object all_gather
    """,
    # fastNLP/core/samplers/__init__.py
    "samplers": """
        MixSampler DopedSampler MixSequentialSampler PollingSampler ReproducibleSampler RandomSampler
        SequentialSampler SortedSampler UnrepeatedSampler UnrepeatedRandomSampler UnrepeatedSortedSampler
        UnrepeatedSequentialSampler ReproduceBatchSampler BucketedBatchSampler ReproducibleBatchSampler
        RandomBatchSampler re_instantiate_sampler
    """,
    # fastNLP 0.5.0, fastNLP/core/dist_trainer.py: parameters, methods with theirs, and the function beside it; 0.5.5
    # has some of them, and the last line is what 0.7.0 added
    "DistTrainer": """
        train_data model optimizer loss callbacks_all callbacks_master batch_size_per_gpu n_epochs num_workers
        drop_last dev_data metrics metric_key update_every print_every validate_every save_every save_path device fp16
        backend init_method use_tqdm train train.load_best_model train.on_exception save_check_point
        save_check_point.name save_check_point.only_params load_check_point load_check_point.name is_master close
        get_local_rank
        sampler batch_size grad_scaler set_grad_to_none find_unused_parameters pin_memory test_use_tqdm
        dev_batch_size test_sampler test_use_fp16
    """,
}
EXPECTED = {owner: names.split() for owner, names in NAMES.items()}

CHECKS = {
    "Trainer.batch_step_fn": at(5, 1, 0),
    "Trainer.n_epochs": at(15, 3, 0),
    "Trainer.n_batches": at(7, 1, 2),
    "Trainer.run": at(10, 2, 0),
    "Trainer.cur_epoch_idx": values(position=(1, 7, 2, 5)),
    "Trainer.evaluate_every-negative": fires(10, 20, 30),
    "Trainer.evaluate_every-positive": fires(3, 6, 9, last=10),
    "Trainer.evaluate_every-function": fires(1, 8, 10, 12, last=12),
    "LRSchedCallback.scheduler": rate(lambda step: 0.1 * 0.5 ** (step // 2)),
    "LRSchedCallback.step_on": rate(lambda step: 0.1 * 0.9 ** (step // 5)),
    "Trainer.evaluate_batch_step_fn": evaluated(),
    "Trainer.run.num_eval_batch_per_dl": evaluated(batches=1),
    "DistTrainer.dev_batch_size": evaluated(),
    "CheckpointCallback.on_exceptions": restored,
    "Trainer.save_checkpoint": restored,
    "MoreEvaluateCallback.dataloaders": logged(10),
    "CheckpointCallback.every_n_epochs": saved(4, 8, 10, 12),
    "CheckpointCallback.last": saved(10),
    "CheckpointCallback.topk": saved(2, 3, 5),
    "CheckpointCallback.save_evaluate_results": values(scores={"eval/loss": 0.3, "eval/accuracy": 0.9}),
    "Event.every": fires(last=20, at_batches=[3, 6, 9, 12, 15, 18], at_epochs=[15]),
    "Event.once": fires(at_batch=[4], at_epoch=[20]),
    "Event.filter_fn": fires(at_powers=[1, 2, 4, 8, 16]),
    "Trainer.progress_bar": at(5, 1, 0),
    "Trainer.torch_kwargs.non_blocking": sizes(8, 8, 8, 8, 8),
    "DistTrainer.optimizer": updates(Adam, close, lr=4e-3),
    "DistTrainer.n_epochs": fires(last=9, done=[5, 6, 7, 8, 9]),
    "DistTrainer.update_every": same_gradient,
    "DistTrainer.validate_every": fires(4, 5, 8, 10, last=10),
    "DistTrainer.save_every": saved(4, 8),
    "DistTrainer.use_tqdm": at(5, 1, 0),
    "DistTrainer.train.on_exception": at(2, 0, 2),
}


def shows(name):
    """A decorator: the function is the check of this row."""

    def register(check):
        assert CHECKS.setdefault(name, check) is check, name
        return check

    return register


def adamw(raw):
    return AdamW(raw.parameters(), lr=1e-2)


@shows("Trainer.model")
def _(state, model):
    assert all(state.params[name] is tensor for name, tensor in model.named_parameters())


@shows("Trainer.train_dataloader")
def _(loader, state, train_set):
    x, first = train_set.tensors[0], torch.cat([x for x, _ in loader(state)])
    assert not torch.equal(first, x)
    assert torch.equal(first.sort(0).values, x.sort(0).values)
    assert torch.equal(first[8:], torch.cat([x for x, _ in loader(state.replace(batch=1))]))


@shows("Trainer.optimizers")
def _(optimizer, model, loss_fn, batch):
    theirs = [lambda raw: SGD(raw[0].parameters(), lr=0.1), lambda raw: adamw(raw[2])]
    ours = looplib_updates(model, loss_fn, [batch] * 3, optimizer)
    assert close(ours, raw_updates(model, loss_fn, [batch] * 3, *theirs))


@shows("Trainer.device")
def _(state, loader, device, train_set):
    assert {tensor.device.type for tensor in (*state.params.values(), *next(loader(state)))} == {device.type}
    moved = ll.make_loader(train_set, batch_size=8, device="meta")
    assert {part.device.type for part in next(moved(state))} == {"meta"}


@shows("Trainer.driver")
def _(torchrun, device, model):
    assert device.type == getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")
    assert model.device == device  # which DDP refuses to be made without the processes
    assert not distributed.is_initialized()


@shows("Trainer.train_fn")
def _(grad_fn, predict_step, classifier, words):
    state = ll.init_state(classifier)
    assert_gradient(grad_fn(state, words), classifier, 2 * classifier(**words)["loss"])
    assert torch.equal(predict_step(state, words), classifier.linear(words["words"]).argmax(1))


@shows("Trainer.model_wo_auto_param_call")
def _(loss_fn, classifier, words):
    batch = words | {"seq_len": torch.ones(12)}
    assert_gradient(
        ll.make_grad_fn(classifier, loss_fn)(ll.init_state(classifier), batch),
        classifier,
        classifier(**words)["loss"],
    )


@shows("Trainer.input_mapping")
def _(loss_fn, classifier, batch):
    chars, label = batch
    gradient = ll.make_grad_fn(classifier, loss_fn)(ll.init_state(classifier), {"chars": chars, "label": label})
    assert_gradient(gradient, classifier, classifier(chars, label)["loss"])


@shows("Trainer.output_mapping")
def _(loss_fn, classifier, words):
    gradient = ll.make_grad_fn(classifier, loss_fn)(ll.init_state(classifier), words)
    right = (classifier(words["words"])["pred"].argmax(1) == words["target"]).float().mean().item()
    assert ll.compute(gradient.metrics)["accuracy"] == pytest.approx(right)


@shows("Trainer.accumulation_steps")
def _(train_step, loader, optimizer, model, loss_fn, train_set):
    pieces = [train_set[first : first + 4] for first in range(0, 40, 4)]
    state = ll.init_state(model, optimizer, epoch_length=len(loader))
    for batch in loader(state):
        state, _ = train_step(state, batch)
    assert state.step == 5
    assert close(state.params, raw_updates(model, loss_fn, pieces, adamw, pieces=2))


@shows("Trainer.fp16")
def _(grad_fn, optimizer, model, loss_fn, batch):
    raw, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    sgd = SGD(raw.parameters(), lr=0.1)
    step, state = ll.make_train_step(grad_fn, optimizer), ll.init_state(model, optimizer)
    for _ in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(raw, batch)
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
        state, _ = step(state, batch)
    assert close(state.params, parameters(raw))
    assert state.opt_state["loss_scale"].item() == scaler.get_scale() == 2.0**11


@shows("TorchGradClipCallback.clip_value")
def _(clipped, model, loss_fn, state, batch):
    gradient = clipped(state, batch)
    loss_fn(model, batch).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert equal(gradient.grads, {name: tensor.grad for name, tensor in model.named_parameters()})
    assert ll.compute(gradient.metrics)["grad_norm"] == pytest.approx(norm.item())


@shows("TorchWarmupCallback.warmup")
def _(linear, constant):
    for a in (1, 2, 4):  # the formulas of torch_lr_sched_callback.py
        for done in range(20):
            progress, part, step = (done * a + 2 * a - 1) / (20 * a), 2 / 20, done + 2 - 1 / a
            rising = progress / part
            falling = max(0.0, (progress - 1) / (part - 1))
            assert linear(step) == pytest.approx(1e-2 * (rising if progress < part else falling))
            assert constant(step) == pytest.approx(1e-2 * (rising if progress < part else 1))


@shows("Trainer.backward")
def _(gradients, model, loss_fn, batch):
    assert all(tensor.grad is None for tensor in model.parameters())
    assert_gradient(gradients, model, loss_fn(model, batch))


@shows("Trainer.step")
def _(params, opt_state, applied, train_step, state, batch):
    after, _ = train_step(state, batch)
    assert applied
    assert equal((params, opt_state), (after.params, after.opt_state))


# How long, and on how much


@shows("Trainer.run.num_train_batch_per_epoch")
def _(loader, train_set):
    whole = ll.make_loader(train_set, batch_size=8)
    for epoch in range(2):
        state = ll.TrainState(epoch=epoch)
        assert equal(list(loader(state)), list(whole(state))[:3])
    assert len(loader) == 3


@shows("Trainer.overfit_batches")
def _(few, scores, state, loader, eval_step):
    assert (state.epoch, state.step, state.samples) == (1, 2, 16)
    first = list(loader(ll.TrainState()))[:2]
    assert equal(first, list(few(ll.TrainState(epoch=5))))
    assert scores == ll.evaluate(eval_step, state, first)


@shows("Trainer.run.catch_KeyboardInterrupt")
def _(state, model, optimizer, train):
    at(3, 0, 3)(state)
    first = ll.init_state(model, optimizer, seed=0, epoch_length=5)
    assert equal(train(state, 2)[-1], train(first, 5)[-1])


# Evaluation


@shows("Trainer.evaluate_dataloaders")
def _(scores, eval_step, state, test_batches, loader):
    sets = {"dev": test_batches, "train": list(loader(state))}
    expected = [ll.evaluate(eval_step, state, batches, prefix=f"eval/{name}/") for name, batches in sets.items()]
    assert scores == pytest.approx(expected[0] | expected[1])


@shows("Trainer.metrics")
def _(eval_step, model, state, test_batches, test_set):
    from sklearn.metrics import accuracy_score, f1_score

    x, y = test_set[:]
    predicted = model(x).argmax(1)
    expected = {"f1": f1_score(y, predicted, average="macro"), "acc": accuracy_score(y, predicted)}
    assert ll.evaluate(eval_step, state, test_batches) == pytest.approx(expected, rel=1e-6)


@shows("Trainer.run.num_eval_sanity_batch")
def _(state, model, optimizer):
    assert equal(state, ll.init_state(model, optimizer, seed=0, epoch_length=5))


@shows("Trainer.evaluate_use_dist_sampler")
def _(rank_0_of_2, mine, test_set):
    assert [(len(x), counts) for (x, y), counts in mine] == [(3, True)] * 4 + [(1, True)]
    assert torch.equal(mine[0][0][0], test_set.tensors[0][:3])


@shows("Driver.get_evaluate_context")
def _(train_step, eval_step, model, batch, optimizer):
    modes = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    state = ll.init_state(model, optimizer)
    eval_step(state, batch)
    model.eval()
    train_step(state, batch)
    assert modes == [False, True]
    assert not model.training


@shows("Driver.tensor_to_numeric")
def _(numbers):
    assert {name: type(number) for name, number in numbers.items()} == {"train/loss": float}


@shows("MoreEvaluateCallback.watch_monitor")
def _(more_now, state):
    assert more_now(state)
    assert not more_now(ll.update_best(state.replace(step=10), {"eval/accuracy": 0.4}))


@shows("MoreEvaluateCallback.topk")
def _(by_bleu):
    saved(2, 3)(by_bleu)
    assert (by_bleu.best().step, by_bleu.best().metrics) == (2, {"eval/bleu": 0.3})


# The best, and checkpoints


@shows("Trainer.monitor")
def _(ckpt, state):
    assert ckpt.best().step == 1
    with pytest.raises(ValueError, match="eval/sum"):
        ckpt.save(state.replace(step=5), {"eval/summ": 1.0})


@shows("CheckpointCallback.folder")
def _(path):
    assert path == Path("runs/small/step-00000020").absolute()
    assert path.is_dir()


@shows("CheckpointCallback.save_object")
def _(ckpt, state):
    assert equal(ckpt.restore(ll.copy_state(state).replace(step=0)), state)
    assert equal(torch.load("model.pt"), dict(state.params))


@shows("CheckpointCallback.model_save_fn")
def _(model, after):
    assert equal(torch.load("mine.pt"), model.state_dict())


@shows("Trainer.save_model")
def _(model, state):
    assert equal(torch.load("model.pt"), dict(state.params))
    weights = ll.checkpoint.load_state_dict(model, ll.init_state(model), load_file("model.safetensors")).params
    assert equal(weights, state.params)


@shows("Trainer.load_model")
def _(state, trained):
    assert equal(state.params, trained.params)
    assert state.step == 0


@shows("Trainer.load_model.model_load_fn")
def _(state):
    assert not any(tensor.any() for tensor in state.params.values())


@shows("Trainer.run.resume_from")
def _(state, states, train):
    at(7, 1, 2)(state)
    assert equal(train(state, 2)[-1], states[-1])


@shows("Trainer.run.resume_training")
def _(state, last):
    assert equal((state.params, state.opt_state), (last.params, last.opt_state))
    assert (state.step, state.epoch, state.batch, state.samples) == (0, 0, 0, 0)


@shows("EarlyStopCallback.monitor")
def _(state):
    assert (state.step, state.extra["best"].best) == (4, 0.5)


@shows("LoadBestModelCallback.monitor")
def _(state, states, ckpt):
    assert equal(state, states[1])
    assert ckpt.latest().step == 3


@shows("LoadBestModelCallback.delete_after_train")
def _(run, state, train):
    best = run(losses=[0.9, 0.5, 0.3, 0.4, 0.3, 0.8]).best
    assert equal(best.params, train(state, 2)[-1].params)
    assert not Path("runs").exists()


# Events, and functions at them


@shows("Trainer.callbacks")
def _(rows):
    logged(2, 4)(rows)
    assert rows[1]["train/loss"] > 0


@shows("Event.on_after_trainer_initialized")
def _(rows):
    logged(0, 5)(rows)
    assert "sanity/accuracy" in rows[0]


@shows("Event.on_train_epoch_begin")
def _(rows):
    assert [(row["note"], row["epoch"]) for row in rows] == [("begin", 0), ("end", 1), ("begin", 1), ("end", 2)]


@shows("Event.on_fetch_data_begin")
def _(waits, state):
    assert (len(waits), min(waits) > 0, state.epoch) == (6, True, 1)  # the last finds the end


@shows("Event.on_train_batch_begin")
def _(batch, indices, train_set):
    assert equal(list(batch), list(train_set[indices]))


@shows("Event.on_exception")
def _(rows):
    assert (rows[0]["step"], rows[0]["error"]) == (3, "no space left")
    assert rows[0]["loss"] > 0


@shows("Event.on_save_model")
def _(again):
    assert (again.extra["hard"].tolist(), again.extra["note"]) == ([17, 503], "warm")


@shows("Event.on_before_backward")
def _(loss_fn, model, state, batch):
    gradient = ll.make_grad_fn(model, loss_fn)(state, batch)
    assert ll.compute(gradient.metrics)["largest"] == pytest.approx(model(batch[0]).max().item())


@shows("Event.on_after_backward")
def _(halved, model, loss_fn, state, batch):
    sgd = ll.optimizer(SGD, lr=0.1)
    after, _ = ll.make_train_step(halved, sgd)(state.replace(opt_state=sgd.init(state.params)), batch)
    assert close(after.params, raw_updates(model, loss_fn, [batch], lambda raw: SGD(raw.parameters(), lr=0.05)))


@shows("Event.on_after_optimizers_step")
def _(state, train_step, batch):
    assert max(tensor.abs().max().item() for tensor in state.params.values()) == pytest.approx(0.2)
    later, _ = train_step(state, batch)
    assert not equal(later.params, state.params)


@shows("Event.on_evaluate_begin")
def _(rows):
    assert rows[0]["eval/error"] + rows[0]["eval/accuracy"] == 1


# Progress, times, logs


@shows("RawTextCallback.print_every")
def _(printed, after):
    lines = printed.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["2", "4"]
    assert all("train/loss" in line for line in lines)


@shows("TqdmCallback.monitor")
def _(rows):
    assert (rows[0]["best/accuracy"], rows[0]["best/step"]) == (0.8, 5)


@shows("FitlogCallback.log_loss_every")
def _(run, state):
    sent = []
    log = run(fitlog=SimpleNamespace(add_loss=lambda value, name, step: sent.append((value, step)))).log
    assert sent == [(row["train/loss"], row["step"]) for row in ll.log.read_jsonl("log.jsonl")]
    on_two_ranks(lambda: log(state, {"train/loss": 0.5}))
    assert len(sent) == len(ll.log.read_jsonl("log.jsonl")) == 2


@shows("FitlogCallback.log_exception")
def _(after):
    assert ll.log.read_jsonl("log.jsonl")[0]["exception"] == "RuntimeError('no space left')"


@shows("TimerCallback.print_every")
def _(seconds):
    parts = [seconds[f"{name}_seconds"] for name in ("data", "gradients", "update", "rest")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(seconds["step_seconds"])


# Drivers and several processes


@shows("drivers.TorchSingleDriver")
def _(state):
    assert (ll.distributed.world_size(), state.step) == (1, 1)


@shows("drivers.TorchDDPDriver")
def _(one_process, train_step, state, model, loss_fn, batch):
    expected = raw_updates(model, loss_fn, [batch] * 2, adamw)
    for _ in range(2):
        state, _ = train_step(state, batch)
    assert close(state.params, expected)


@shows("drivers.TorchFSDPDriver")
def _(one_process, model, train_step, state, ckpt, loss_fn, batch):
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plain.load_state_dict(ll.checkpoint.state_dict(model, state))
    ckpt.save(train_step(state, batch)[0])
    weights = ll.checkpoint.state_dict(model, ckpt.restore(ll.init_state(model, ll.optimizer(AdamW, lr=1e-2))))
    assert close(weights, raw_updates(plain, loss_fn, [batch], adamw))


@shows("drivers.torch_seed_everything")
def _(model, state, batch):
    grad_fn = ll.make_grad_fn(model, lambda model, batch: model(batch[0]).square().mean())
    first = grad_fn(state, batch).grads
    torch.manual_seed(123)
    assert equal(first, grad_fn(state, batch).grads)


def say_rank(folder):
    with ll.distributed.setup(output_dir=folder):
        print(f"rank {ll.distributed.rank()}")


@shows("Trainer.output_from_new_proc")
def _(torchrun, printed, after):
    assert printed.getvalue() == "rank 0\n"
    assert launch(2, say_rank, str(Path("two").absolute())) == "rank 0\n"
    assert Path("two/rank-1.log").read_text() == "rank 1\n"


@shows("Driver.model")
def _(one_process, weights, wrapped, model):
    assert list(weights) == list(model.state_dict())
    assert next(iter(wrapped.state_dict())).startswith("module.")


@shows("Trainer.use_dist_sampler")
def _(rank_0_of_2, rest, train_set):
    whole = ll.make_loader(train_set, batch_size=8, seed=0, divide=False)
    assert equal(rest, [tuple(part[:4] for part in batch) for batch in list(whole(ll.TrainState(epoch=1)))[3:]])


@shows("samplers.SequentialSampler")
def _(loader, train_set):
    assert torch.equal(torch.cat([x for x, _ in loader(ll.TrainState(epoch=3))]), train_set.tensors[0])


@shows("samplers.SortedSampler")
def _(loader, lengths, train_set):
    longest_first = torch.tensor(lengths).argsort(descending=True, stable=True)
    assert torch.equal(torch.cat([x for x, _ in loader(ll.TrainState())]), train_set.tensors[0][longest_first])


def in_batches(loader, epoch=0):
    """The indices of each batch of an epoch."""
    return [loader.indices(ll.TrainState(epoch=epoch, batch=k)).tolist() for k in range(len(loader))]


@shows("samplers.BucketedBatchSampler")
def _(loader, lengths, train_set):
    def padding(loader):
        pairs = [[lengths[i] for i in pair] for epoch in range(5) for pair in in_batches(loader, epoch)]
        return sum(2 * max(pair) - sum(pair) for pair in pairs)

    assert sorted(chain.from_iterable(in_batches(loader))) == list(range(40))
    assert padding(loader) < 0.5 * padding(ll.make_loader(train_set, batch_size=2))
    assert in_batches(loader, 0) != in_batches(loader, 1)


@shows("samplers.ReproduceBatchSampler")
def _(loader):
    epoch = list(loader(ll.TrainState(epoch=2)))
    assert equal(list(loader(ll.TrainState(epoch=2, batch=3))), epoch[3:])
    assert not equal(epoch, list(loader(ll.TrainState(epoch=3))))


@shows("samplers.MixSampler")
def _(loader, by_share):
    assert sorted(chain.from_iterable(in_batches(loader))) == list(range(65))
    drawn = list(chain.from_iterable(in_batches(by_share)))
    assert sum(index >= 40 for index in drawn) == 630 == 0.7 * len(drawn)


@shows("samplers.MixSequentialSampler")
def _(loader):
    batches = in_batches(loader)
    assert [{index < 40 for index in batch} for batch in batches] == [{True}] * 5 + [{False}] * 4
    assert sorted(chain.from_iterable(batches)) == list(range(65))
    assert batches != in_batches(loader, 1)


@shows("samplers.PollingSampler")
def _(loader):
    batches = in_batches(loader)
    assert [{index < 40 for index in batch} for batch in batches] == [{True}, {False}] * 4 + [{True}]
    assert sorted(chain.from_iterable(batches)) == list(range(65))


@shows("Driver.get_local_rank")
def _(rank_0_of_2, rank, ranks):
    assert (rank, ranks) == (0, 2)


@shows("Driver.barrier")
def _(one_process, after):
    assert distributed.is_initialized()


@shows("Driver.broadcast_object")
def _(one_process, everyone):
    assert everyone == [{"vocabulary": 100}]


# The DistTrainer


@shows("DistTrainer.train_data")
def _(loader, train_set):
    assert equal(list(loader(ll.TrainState())), list(ll.make_loader(train_set, batch_size=16)(ll.TrainState()))[:2])


@shows("DistTrainer.batch_size_per_gpu")
def _(loader, train_set):
    sizes(16, 16, 8, of_two=[[8, 8, 4]] * 2)(loader)
    state = ll.TrainState(batch=1, samples=16, batch_samples=16, epoch_length=len(loader))
    of_one_rank = ll.make_loader(train_set, batch_size=8)
    assert [len(x) for x, _ in of_one_rank(of_one_rank.resume(state))] == [8, 8, 8]


@shows("DistTrainer.model")
def _(one_process, state, model):
    assert list(state.params) == [name for name, _ in model.named_parameters()]


@shows("DistTrainer.loss")
def _(grad_fn, classifier, words):
    assert_gradient(grad_fn(ll.init_state(classifier), words), classifier, classifier(**words)["loss"])


@shows("DistTrainer.callbacks_all")
def _(after):
    assert Path("begun").exists()


@shows("DistTrainer.get_local_rank")
def _(torchrun, local_rank, device):
    assert local_rank == 0
    assert device.index in (0, None)


@shows("DistTrainer.dev_data")
def _(scores, ckpt, model, test_set):
    x, y = test_set[:]
    assert scores["dev/ppl"] == pytest.approx(F.cross_entropy(model(x), y).exp().item(), rel=1e-5)
    assert ckpt.best().metrics == scores


@shows("DistTrainer.metric_key")
def _(ckpt, best, train, state):
    for later, ppl in zip(train(state, 3), (9.0, 4.0, 6.0), strict=True):
        ckpt.save(later, {"dev/ppl": ppl})
        best = best.update(ppl, later.step)
    assert (ckpt.best().step, best.best_step) == (2, 2)


@shows("DistTrainer.print_every")
def _(run, rows, state, train_step, loader):
    run()
    losses = []
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        losses.append(ll.compute(metrics)["loss"])
    logged(5)(rows)
    assert rows[0]["train/loss"] == pytest.approx(sum(losses) / 5)


@shows("DistTrainer.save_check_point.name")
def _(model, state):
    weights = ll.checkpoint.load_state_dict(model, ll.init_state(model), load_file("small.safetensors")).params
    assert equal(weights, state.params)


@shows("DistTrainer.load_check_point")
def _(state, states, ckpt):
    assert equal(state, states[1])
    assert equal(ckpt.restore(ll.copy_state(state), which=3), states[2])


@shows("DistTrainer.device")
def _(torchrun, loader, model):
    assert next(loader(ll.TrainState()))[0].device == next(model.parameters()).device


@shows("DistTrainer.fp16")
def _(grad_fn, optimizer, model, batch):
    start = ll.init_state(model, optimizer)
    state, _ = ll.make_train_step(grad_fn, optimizer)(start, batch)
    assert state.params["0.weight"].dtype == torch.bfloat16
    moved = state.opt_state["master"]["0.weight"] - start.opt_state["master"]["0.weight"]
    assert moved.abs().max().item() == pytest.approx(1e-5, rel=0.1)  # less than bfloat16 could say


@shows("DistTrainer.backend")
def _(torchrun, backend):
    assert backend == "gloo"


@shows("DistTrainer.init_method")
def _(after):
    place = ll.distributed.rank(), ll.distributed.world_size()
    distributed.destroy_process_group()
    assert place == (0, 1)


@shows("DistTrainer.sampler")
def _(rank_0_of_2, mine, backwards):
    assert [len(x) for x, _ in mine(ll.TrainState())] == [8] * 5
    assert backwards.indices(ll.TrainState()).tolist() == [39, 38, 37, 36]


@shows("DistTrainer.test_use_fp16")
def _(scores, model, test_set):
    x, y = test_set[:]
    with torch.autocast("cpu", torch.float16):
        half = F.cross_entropy(model(x), y).item()
    assert scores["loss"] == pytest.approx(half, rel=1e-6)
    assert scores["loss"] != pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)


@shows("DistTrainer.train")
def _(results):
    assert results["seconds"] > 0
    assert (results["step"], results["dev/loss"]) == (6, 0.4)


@shows("DistTrainer.close")
def _(torchrun, ranks):
    assert ranks == 1
    assert not distributed.is_initialized()


@pytest.mark.every_case
@pytest.mark.parametrize("row", PAGE.with_code, ids=str)
def test_the_code_does_what_its_row_says(row, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    PAGE.run(row, CHECKS[str(row)], request.getfixturevalue)


def test_every_name_has_a_row_and_every_row_a_name():
    assert_complete(PAGE, EXPECTED, CHECKS)
    assert_readable(PAGE)


def test_the_names_in_fastnlps_scripts_are_those_of_the_table():
    scripts = [block for block in PAGE.blocks() if "fastNLP import" in block]
    calls = [node for block in scripts for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    used = {f"{ast.unparse(call.func)}.{keyword.arg}" for call in calls for keyword in call.keywords}
    used = {name for name in used if name.startswith(("Trainer.", "DistTrainer."))}
    assert len(used) > 25
    assert used <= {name.partition("-")[0] for name in PAGE.index}


def test_the_loops_of_the_page_are_those_of_the_recipes():
    for name, functions in {"from_fastnlp": ["main"], "from_dist_trainer": ["main", "loss_fn", "metric_fn"]}.items():
        source = (ROOT / f"recipes/{name}.py").read_text()
        code = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        expected = "\n\n\n".join(ast.get_source_segment(source, code[function]) for function in functions)
        assert f"{expected}\n" in PAGE.blocks(), f"copy {', '.join(functions)} of recipes/{name}.py into {PAGE.path}"
