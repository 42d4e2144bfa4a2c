"""recipes/names/fastnlp.toml: the code of each answer does what it says, and each name of fastNLP has an answer.

fastNLP is not installed here, so the names are listed below as read from its source: `NAMES` has those of 1.0.1, and
for `DistTrainer` those of 0.5.0, 0.5.5 and 0.7.0 together.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from answers import assert_complete, assert_readable, run_answer, with_code
from checks import (
    as_rank_0_of_2,
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
    rate,
    raw_updates,
    registers,
    restored,
    runs,
    same_gradient,
    saved,
    sizes,
    under_torchrun,
    updates,
    values,
)
from documentation.trainers import LIBRARIES
from torch import distributed
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

import looplib as ll

[FASTNLP] = [library for library in LIBRARIES if library.name == "fastnlp"]

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


def log_losses_for_fitlog(run, state):
    sent = []
    run(fitlog=SimpleNamespace(add_loss=lambda value, name, step: sent.append((value, step))))
    assert sent == [(row["train/loss"], row["step"]) for row in ll.log.read_jsonl("log.jsonl")]


# Answers that are not here run all the same: their code is calls whose results are tested where they are defined.
CHECKS = {
    "Trainer.batch_step_fn": at(5, 1, 0),
    "Trainer.n_epochs": at(15, 3, 0),
    "Trainer.n_batches": at(7, 1, 2),
    "Trainer.run": at(10, 2, 0),
    "Trainer.cur_epoch_idx": values(position=(1, 7, 2, 5)),
    "Trainer.evaluate_every-negative": fires(10, 20, 30),
    "Trainer.evaluate_every-positive": fires(3, 6, 9, last=10),
    "Trainer.evaluate_every-function": fires(1, 8, 10, 12, last=12),
    "TorchGradClipCallback.clip_value": clips(0.1),
    "Event.on_after_backward": updates(SGD, close, lr=0.1 / 2),
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
    "Trainer.driver": under_torchrun,
    "Trainer.run.num_train_batch_per_epoch": sizes(8, 8, 8),
    "Trainer.overfit_batches": at(2, 1, 0),
    "Trainer.run.catch_KeyboardInterrupt": at(3, 0, 3),
    "Trainer.run.resume_training": at(0, 0, 0),
    "Trainer.evaluate_use_dist_sampler": as_rank_0_of_2,
    "Trainer.use_dist_sampler": as_rank_0_of_2,
    "Trainer.callbacks": logged(2, 4),
    "Trainer.output_from_new_proc": lambda torchrun, printed, after: printed.getvalue() == "rank 0\n",
    "MoreEvaluateCallback.topk": lambda by_bleu: saved(2, 3)(by_bleu),
    "EarlyStopCallback.monitor": lambda state: (state.step, state.extra["best"].best) == (4, 0.5),
    "LoadBestModelCallback.delete_after_train": (
        lambda run: run(losses=[0.9, 0.5, 0.3, 0.4, 0.3, 0.8]).best.step == 2
    ),
    "Event.on_after_trainer_initialized": logged(0, 5),
    "Event.on_exception": logged(3),
    "FitlogCallback.log_loss_every": log_losses_for_fitlog,
    "drivers.TorchDDPDriver": in_one_process,
    "drivers.TorchFSDPDriver": in_one_process,
    "Driver.model": in_one_process,
    "Driver.barrier": in_one_process,
    "Driver.broadcast_object": in_one_process,
    "Driver.get_local_rank": lambda rank_0_of_2, rank, ranks: (rank, ranks) == (0, 2),
    "samplers.MixSampler": sizes(13, 13, 13, 13, 13),
    "samplers.MixSequentialSampler": sizes(8, 8, 8, 8, 8, 8, 8, 8, 1),
    "samplers.PollingSampler": sizes(8, 8, 8, 8, 8, 8, 8, 1, 8),
    "DistTrainer.train_data": sizes(16, 16),
    "DistTrainer.model": in_one_process,
    "DistTrainer.get_local_rank": under_torchrun,
    "DistTrainer.print_every": logged(5),
    "DistTrainer.device": under_torchrun,
    "DistTrainer.backend": under_torchrun,
    "DistTrainer.sampler": as_rank_0_of_2,
    "DistTrainer.optimizer": updates(Adam, close, lr=4e-3),
    "DistTrainer.n_epochs": fires(last=9, done=[5, 6, 7, 8, 9]),
    "DistTrainer.update_every": same_gradient,
    "DistTrainer.validate_every": fires(4, 5, 8, 10, last=10),
    "DistTrainer.save_every": saved(4, 8),
    "DistTrainer.use_tqdm": at(5, 1, 0),
    "DistTrainer.train.on_exception": at(2, 0, 2),
}


shows = registers(CHECKS)


def adamw(raw):
    return AdamW(raw.parameters(), lr=1e-2)


@shows("Trainer.optimizers")
def _(optimizer, model, loss_fn, batch):
    theirs = [lambda raw: SGD(raw[0].parameters(), lr=0.1), lambda raw: adamw(raw[2])]
    ours = looplib_updates(model, loss_fn, [batch] * 3, optimizer)
    assert close(ours, raw_updates(model, loss_fn, [batch] * 3, *theirs))


@shows("Trainer.accumulation_steps")
def _(train_step, loader, optimizer, model, loss_fn, train_set):
    pieces = [train_set[first : first + 4] for first in range(0, 40, 4)]
    state = ll.init_state(model, optimizer, loader=loader)
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
    assert state.opt_state["dynamic_loss_scale"]["loss_scale"].item() == scaler.get_scale() == 2.0**11


@shows("TorchWarmupCallback.warmup")
def _(linear, constant):
    for a in (1, 2, 4):  # the formulas of torch_lr_sched_callback.py
        for done in range(20):
            progress, part, step = (done * a + 2 * a - 1) / (20 * a), 2 / 20, done + 2 - 1 / a
            rising = progress / part
            falling = max(0.0, (progress - 1) / (part - 1))
            assert linear(step) == pytest.approx(1e-2 * (rising if progress < part else falling))
            assert constant(step) == pytest.approx(1e-2 * (rising if progress < part else 1))


@shows("Trainer.run.resume_from")
def _(state, states, train):
    at(7, 1, 2)(state)
    assert equal(train(state, 2)[-1], states[-1])


@shows("Event.on_train_epoch_begin")
def _(rows):
    assert [(row["note"], row["epoch"]) for row in rows] == [("begin", 0), ("end", 1), ("begin", 1), ("end", 2)]


@shows("RawTextCallback.print_every")
def _(printed, after):
    lines = printed.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["2", "4"]
    assert all("train/loss" in line for line in lines)


@shows("DistTrainer.batch_size_per_gpu")
def _(loader, train_set):
    sizes(16, 16, 8, of_two=[[8, 8, 4]] * 2)(loader)
    state = ll.init_state(torch.nn.Linear(1, 1), loader=loader).replace(batch=1, samples=16, batch_samples=16)
    of_one_rank = ll.make_loader(train_set, batch_size=8)
    assert [len(x) for x, _ in of_one_rank(of_one_rank.resume(state))] == [8, 8, 8]


@shows("DistTrainer.fp16")
def _(grad_fn, model, batch):
    out = grad_fn(ll.init_state(model), batch)
    assert {grad.dtype for grad in out.grads.values()} == {torch.float32}


@shows("DistTrainer.init_method")
def _(after):
    place = ll.distributed.rank(), ll.distributed.world_size()
    distributed.destroy_process_group()
    assert place == (0, 1)


@shows("DistTrainer.test_use_fp16")
def _(scores, model, test_set):
    x, y = test_set[:]
    with torch.autocast("cpu", torch.float16):
        half = F.cross_entropy(model(x), y).item()
    assert scores["loss"] == pytest.approx(half, rel=1e-6)
    assert scores["loss"] != pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)


@shows("DistTrainer.close")
def _(torchrun, ranks):
    assert ranks == 1
    assert not distributed.is_initialized()


@pytest.mark.every_case
@pytest.mark.parametrize("answer", with_code(FASTNLP), ids=str)
def test_the_code_does_what_its_answer_says(answer, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    run_answer(FASTNLP, answer, CHECKS.get(str(answer), runs), request.getfixturevalue)


def test_every_name_has_an_answer_and_every_answer_a_name():
    assert_complete(FASTNLP, EXPECTED, CHECKS)


def test_the_table_has_a_line_for_each_name():
    assert_readable(FASTNLP)
