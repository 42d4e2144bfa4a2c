"""Migration table: names of fastNLP's `Trainer`, and of its earlier `DistTrainer`, in looplib.

fastNLP is not installed here, so the names are listed below as read from its source: `NAMES` has those of 1.0.1, and
for `DistTrainer` those of 0.5.0, 0.5.5 and 0.7.0 together.
"""

import copy
import io
import os
import signal
import time
import types
from itertools import chain, islice, zip_longest
from pathlib import Path

import pytest
import torch
from ranks import launch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader
from trainer_rows import Table, close, equal, on_each_of_two_ranks

import looplib as ll
from looplib import testing

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

TABLE = Table(
    "fastNLP",
    "recipes/FROM_FASTNLP.md",
    """
    # Coming from fastNLP, and from its DistTrainer

    Every parameter, method and event of the `Trainer` of fastNLP 1.0.1, its callbacks, drivers and samplers, and
    every parameter and method of the `DistTrainer` of 0.5 and 0.7: here is the line for it, or why there is none. A
    name is answered by a line of looplib, by one of torch, or it has no meaning here. At the end is an
    [index of all names](#all-names). What looplib does not support, and what was never tried, is
    [one list](FROM_TRANSFORMERS.md#not-supported-and-not-tried).

    There is no object that the settings go into: each is given to the function that it is about, and what a callback
    does is a line in the loop. The snippets stand in a loop such as this one:

    ```py
    import looplib as ll, torch

    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)                        # optimizers
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)  # model, train_fn
    eval_step = ll.make_eval_step(model, metric_fn)                             # metrics, evaluate_fn
    loader = ll.make_loader(train_set, batch_size=16, seed=0)                   # train_dataloader
    ckpt = ll.checkpoint_io("runs/small", keep_best=1, monitor="eval/accuracy", mode="max")  # CheckpointCallback
    eval_now, done = ll.at_epoch_end(), ll.after_epochs(20)                     # evaluate_every=-1, n_epochs=20

    state = ckpt.restore(ll.init_state(model, optimizer, epoch_length=len(loader)))  # run(resume_from=...)
    ll.evaluate(eval_step, state, test_batches, limit=2)                        # num_eval_sanity_batch=2
    bar = ll.progress(loader)
    while not done(state):
        for batch in bar(state):
            state, metrics = train_step(state, batch)
            bar.show(metrics)
            if eval_now(state):
                ckpt.save(state, ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
    ```

    Two things are counted in another way. fastNLP counts batches, of which `accumulation_steps` make an update; here
    a batch is what one update takes, and is cut into microbatches, so a number of batches there is that number divided by
    `accumulation_steps` here. And with fastNLP a batch size is that of one process, here it is that of all together.

    In the snippets `batch` is `(x, y)`; `classifier` is a model as fastNLP has them, whose `forward`, `train_step`
    and `evaluate_step` return dicts, with `words` a batch for it. `train(state, steps)` stands for the loop: it gives
    the states after each step. `log` takes numbers, as `ll.console()` does. This page is made by
    `python tests/other_trainers/trainer_rows.py` from `tests/rows_fastnlp.py`, where each snippet runs and what it does is asserted.

    ## A whole script, and the loop that it becomes

    The Trainer of fastNLP 1.0.1 with everything on:

    {{tests/other_trainers/original_fastnlp.py trainer}}

    And the loop, [from_fastnlp.py](from_fastnlp.py) without its data and its two functions, with the settings' names:

    {{recipes/from_fastnlp.py main}}

    ## The DistTrainer's script, and its loop

    fastNLP 0.5.5, with everything on:

    {{tests/other_trainers/original_fastnlp.py dist_trainer}}

    And the loop, [from_dist_trainer.py](from_dist_trainer.py), which runs without torchrun as well:

    {{recipes/from_dist_trainer.py main loss_fn metric_fn}}

    fastNLP is not among what the tests install, so its scripts stand here as they are written for it, and are not
    run; the loops are. What differs, as its source has it: the DistTrainer divides the loss by `update_every` twice,
    evaluates on the first rank alone (so that an EarlyStopCallback hears on the others that nothing is ever better),
    keeps the model alone, without the optimizer, and cannot continue.
    """,
)
here, plain, nothing = TABLE.looplib, TABLE.torch, TABLE.none


class Classifier(nn.Module):
    """As models for fastNLP are written: arguments by the names of the batch, and a dict as the output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, words, target=None):
        logits = self.linear(words)
        return {"pred": logits} if target is None else {"pred": logits, "loss": F.cross_entropy(logits, target)}

    def train_step(self, words, target):
        return {"loss": 2 * self(words, target)["loss"]}

    def evaluate_step(self, words):
        return {"pred": self(words)["pred"].argmax(1)}


def say_rank(folder):
    with ll.distributed.setup(output_dir=folder):
        print(f"rank {ll.distributed.rank()}")


def raw_training(model, loss_fn, batches, *optimizers, pieces=1):
    """The loop that fastNLP runs, on a copy: the parameters after these batches, by name."""
    raw = copy.deepcopy(model)
    optimizers = [make(raw) for make in optimizers]
    for number, batch in enumerate(batches, 1):
        (loss_fn(raw, batch) / pieces).backward()
        if number % pieces == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in raw.named_parameters()}


def adamw(raw):
    return torch.optim.AdamW(raw.parameters(), lr=1e-2)


def fires(predicate, states):
    return [state.step for state in states if predicate(state)]


TABLE.section("Model, data, optimizer")


@here("Trainer.model", text="The module, as it is. Its tensors are in the state, uncopied, until a step is taken.")
def _(model, optimizer):
    state = ll.init_state(model, optimizer)
    # shows
    assert all(state.params[name] is tensor for name, tensor in model.named_parameters())


@here("Trainer.train_dataloader", text="A DataLoader is taken over with its settings; a dataset does as well.")
def _(train_set, model):
    loader = ll.make_loader(DataLoader(train_set, batch_size=8, shuffle=True), seed=0)
    state = ll.init_state(model, epoch_length=len(loader))
    # shows
    assert state.epoch_length == 5
    found = torch.cat([x for x, y in loader(state)])
    expected = train_set.tensors[0]
    assert not torch.equal(found, expected)
    assert torch.equal(found.sort(0).values, expected.sort(0).values)
    assert torch.equal(found[8:], torch.cat([x for x, y in loader(state.replace(batch=1))]))


@here(
    "Trainer.optimizers",
    text="The class and what it is to be given, which makes it two pure functions; for a list of optimizers, which "
    "of them has which parameters.",
)
def _(model, loss_fn, batch):
    first, rest = ll.optimizer(torch.optim.SGD, lr=0.1), ll.optimizer(torch.optim.AdamW, lr=1e-2)
    optimizer = ll.optim.partition(
        {"first": first, "rest": rest}, lambda name, tensor: "first" if name.startswith("0.") else "rest"
    )
    # shows
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    state = ll.init_state(model, optimizer)
    expected = raw_training(
        model,
        loss_fn,
        [batch] * 3,
        lambda raw: torch.optim.SGD(raw[0].parameters(), lr=0.1),
        lambda raw: torch.optim.AdamW(raw[2].parameters(), lr=1e-2),
    )
    for _ in range(3):
        state, _ = step(state, batch)
    assert close(state.params, expected)


@here(
    "Trainer.device",
    "Trainer.data_device",
    "Trainer.model_device",
    "Trainer.move_data_to_device",
    "Driver.model_device",
    "Driver.data_device",
    "Driver.move_data_to_device",
    "Driver.move_model_to_device",
    text="The model is moved once, and the loader moves each batch. Several devices are several processes: "
    "`torchrun`.",
)
def _(model, train_set, optimizer):
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    loader = ll.make_loader(train_set, batch_size=8, device=device)
    state = ll.init_state(model.to(device), optimizer, epoch_length=len(loader))
    # shows
    assert state.params["0.weight"].device.type == device.type
    moved = ll.make_loader(train_set, batch_size=8, device="meta")
    assert {part.device.type for part in next(moved(state))} == {"meta"}


@here(
    "Trainer.driver",
    "drivers.Driver",
    "drivers.TorchDriver",
    "Driver.setup",
    text="One script for one process, or for many under `torchrun --nproc-per-node 4 train.py`; this gives each its "
    "device, and closes what it opened. What spreads the model (DDP, FSDP2, a tensor parallel plan) is torch's own.",
)
def _(model, torchrun):
    with ll.distributed.setup(required=False) as device:
        model = DistributedDataParallel(model.to(device))
    # shows
    assert device.type == getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")
    assert model.device == device  # which DDP refuses to be made without the processes
    assert not distributed.is_initialized()


nothing(
    "Trainer.marker",
    "Trainer.on.marker",
    text="It says which of several trainers a decorated function belongs to. A loop has its own lines, and no "
    "other's.",
)
nothing(
    "Trainer.check_dataloader_legality",
    "Driver.check_dataloader_legality",
    text="`make_loader` refuses what it cannot read, or what gives another order when it is asked again, in any "
    "case.",
)

TABLE.section("The step")


@here(
    "Trainer.batch_step_fn",
    "Trainer.train_batch_loop",
    text="The body of the loop is yours. What it does to a batch stands there, or in a function `(state, batch)`.",
)
def _(train_step, loader, state):
    for x, y in loader(state):
        noisy = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(state.step))
        state, _ = train_step(state, (noisy, y))
    # shows
    assert (state.step, state.samples, state.epoch) == (5, 40, 1)


@here(
    "Trainer.evaluate_batch_step_fn",
    text="Any function from a state and a batch to metrics, such as one that cuts batches that are too large.",
)
def _(eval_step, state, test_batches):
    def in_halves(state, batch):
        return ll.merge(*[eval_step(state, half) for half in zip(*[part.chunk(2) for part in batch], strict=True)])

    scores = ll.evaluate(in_halves, state, test_batches)
    # shows
    assert scores == pytest.approx(ll.evaluate(eval_step, state, test_batches), rel=1e-6)


@here(
    "Trainer.train_fn",
    "Trainer.evaluate_fn",
    "Trainer.train_step",
    "Trainer.extract_loss_from_outputs",
    "Driver.model_call",
    "Driver.get_model_call_fn",
    text="The loss function calls the method that you mean, and takes the loss out of what it returns.",
)
def _(classifier, words):
    grad_fn = ll.make_grad_fn(classifier, lambda model, batch: model.train_step(**batch)["loss"])
    predict_step = ll.make_predict_step(classifier, lambda model, batch: model.evaluate_step(batch["words"])["pred"])
    # shows
    state = ll.init_state(classifier)
    loss = ll.compute(grad_fn(state, words).metrics)["loss"]
    assert loss == pytest.approx(classifier.train_step(**words)["loss"].item())
    assert loss == pytest.approx(2 * classifier(**words)["loss"].item())
    assert torch.equal(predict_step(state, words), classifier.linear(words["words"]).argmax(1))


@here(
    "Trainer.model_wo_auto_param_call",
    text="Nothing is matched by the names of arguments: the loss function says what the model is given, all of a "
    "dict or some of it.",
)
def _(classifier, words):
    def loss_fn(model, batch):
        return model(batch["words"], target=batch["target"])["loss"]

    # shows
    words["seq_len"] = torch.ones(12)
    gradients = ll.make_grad_fn(classifier, loss_fn)(ll.init_state(classifier), words)
    assert ll.compute(gradients.metrics)["loss"] == pytest.approx(
        classifier(words["words"], words["target"])["loss"].item()
    )


@here(
    "Trainer.input_mapping",
    "Trainer.train_input_mapping",
    "Trainer.evaluate_input_mapping",
    text="A function of the batch, where the batch is taken: in the loss function, in the metric function, or in "
    "both. A dict of new names is such a function.",
)
def _(classifier, words):
    names = {"chars": "words", "label": "target"}

    def loss_fn(model, batch):
        return model(**{names.get(name, name): value for name, value in batch.items()})["loss"]

    # shows
    state = ll.init_state(classifier)
    mapped = ll.make_grad_fn(classifier, loss_fn)(state, {"chars": words["words"], "label": words["target"]})
    assert equal(mapped.grads, ll.make_grad_fn(classifier, lambda model, x: model(**x)["loss"])(state, words).grads)


@here(
    "Trainer.output_mapping",
    "Trainer.train_output_mapping",
    "Trainer.evaluate_output_mapping",
    text="What the loss function returns is the loss, and beside it a dict of whatever else is to be logged, under "
    "the names that you give.",
)
def _(classifier, optimizer, words):
    def loss_fn(model, batch):
        outputs = model(**batch)
        return outputs["loss"], {"accuracy": ll.accuracy(outputs["pred"], batch["target"])}

    # shows
    step = ll.make_train_step(ll.make_grad_fn(classifier, loss_fn), optimizer)
    right = (classifier(words["words"])["pred"].argmax(1) == words["target"]).float().mean().item()
    _, metrics = step(ll.init_state(classifier, optimizer), words)
    assert ll.compute(metrics)["accuracy"] == pytest.approx(right)


@here(
    "Trainer.accumulation_steps",
    "Trainer.get_no_sync_context",
    "Driver.get_model_no_sync_context",
    text="The batch of one update, cut into microbatches. Ranks exchange gradients once an update, and where the loss is "
    "weighed by tokens the gradient is the whole batch's. `state.step` counts updates.",
)
def _(model, loss_fn, optimizer, train_set):
    loader = ll.make_loader(train_set, batch_size=2 * 4, order=ll.data.in_order())
    train_step = ll.make_train_step(ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches=2), optimizer)
    # shows
    pieces = [train_set[first : first + 4] for first in range(0, 40, 4)]
    expected = raw_training(model, loss_fn, pieces, adamw, pieces=2)
    state = ll.init_state(model, optimizer, epoch_length=len(loader))
    for batch in loader(state):
        state, _ = train_step(state, batch)
    assert state.step == 5
    assert close(state.params, expected)


@here(
    "Trainer.fp16",
    "Trainer.torch_kwargs.gradscaler_kwargs",
    "DistTrainer.grad_scaler",
    "Driver.auto_cast",
    text="float16 with a loss scale, as torch's `GradScaler` moves it. For bfloat16 the first line is enough, with "
    "`torch.bfloat16` and no `scale_loss`.",
)
def _(model, loss_fn, batch):
    grad_fn = ll.grads.scale_loss(ll.make_grad_fn(model, ll.autocast(loss_fn, torch.float16)))
    optimizer = ll.optim.dynamic_loss_scale(
        ll.optimizer(torch.optim.SGD, lr=0.1), init_scale=2.0**10, growth_interval=2
    )
    # shows
    raw, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
    step, state = ll.make_train_step(grad_fn, optimizer), ll.init_state(model, optimizer)
    for _ in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(raw, batch)
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
        state, metrics = step(state, batch)
    assert close(state.params, {name: tensor.detach() for name, tensor in raw.named_parameters()})
    assert ll.compute(metrics)["loss_scale"] == 2.0**11  # of the third update
    assert state.opt_state["loss_scale"].item() == scaler.get_scale() == 2.0**11


@here(
    "TorchGradClipCallback.clip_value",
    "TorchGradClipCallback.clip_type",
    "TorchGradClipCallback.parameters",
    text="Around the gradient of the whole batch; `ll.grads.clip_by_value` for `clip_type='value'`. All gradients together "
    "are clipped; the norm is logged as `grad_norm`.",
)
def _(grad_fn, state, batch):
    clipped = ll.clip_by_global_norm(grad_fn, 0.1)
    # shows
    given, whole = clipped(state, batch), grad_fn(state, batch)
    assert ll.grads.global_norm(given.grads.values()).item() == pytest.approx(0.1, rel=1e-4)
    assert ll.compute(given.metrics)["grad_norm"] == pytest.approx(ll.grads.global_norm(whole.grads.values()).item())
    by_value = ll.grads.clip_by_value(grad_fn, 0.01)(state, batch).grads
    assert equal(by_value, {name: grad.clamp(-0.01, 0.01) for name, grad in whole.grads.items()})


@here(
    "LRSchedCallback.scheduler",
    text="A learning rate is a function of the step; there is no scheduler to step. `ll.optim.hyperparameters(optimizer, "
    "state)` has it as a number for the log.",
)
def _(model, loss_fn, grad_fn, batch):
    optimizer = ll.optimizer(torch.optim.SGD, lr=ll.schedules.step_decay(0.1, every=2, factor=0.5))
    # shows
    raw = copy.deepcopy(model)
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, step_size=2, gamma=0.5)
    step, state = ll.make_train_step(grad_fn, optimizer), ll.init_state(model, optimizer)
    for _ in range(5):
        loss_fn(raw, batch).backward()
        sgd.step()
        assert ll.optim.hyperparameters(optimizer, state) == {"lr": scheduler.get_last_lr()[0]}
        scheduler.step()
        sgd.zero_grad()
        state, _ = step(state, batch)
    assert close(state.params, {name: tensor.detach() for name, tensor in raw.named_parameters()})


@here("LRSchedCallback.step_on", text="For `step_on='epoch'`, the step divided by the updates in an epoch.")
def _(loader):
    by_epoch = ll.schedules.exponential(0.1, factor=0.9)
    optimizer = ll.optimizer(torch.optim.SGD, lr=lambda step: by_epoch(step // len(loader)))
    # shows
    params = {"w": torch.zeros(1)}
    opt_state, before = optimizer.init(params), 0.0
    for step in range(12):
        params, opt_state, _ = optimizer.update({"w": torch.ones(1)}, opt_state, params, step)
        assert before - params["w"].item() == pytest.approx(0.1 * 0.9 ** (step // 5), rel=1e-4)
        before = params["w"].item()


@here(
    "TorchWarmupCallback.warmup",
    "TorchWarmupCallback.schedule",
    text="'linear' and 'constant', with warmup and total in updates. fastNLP counts the batches until the next update is "
    "made, so its first one has a learning rate and its last has none: for the same values with "
    "`accumulation_steps=a`, `lambda step: lr(step + 2 - 1 / a)`.",
)
def _():
    linear = ll.schedules.warmup_linear(1e-2, warmup=2, total=20)
    constant = ll.schedules.warmup(ll.schedules.constant(1e-2), steps=2)
    # shows
    for a in (1, 2, 4):  # the formulas of torch_lr_sched_callback.py
        for done in range(20):
            progress, part, step = (done * a + 2 * a - 1) / (20 * a), 2 / 20, done + 2 - 1 / a
            rising = progress / part
            falling = max(0.0, (progress - 1) / (part - 1))
            assert linear(step) == pytest.approx(1e-2 * (rising if progress < part else falling))
            assert constant(step) == pytest.approx(1e-2 * (rising if progress < part else 1))


nothing(
    "Trainer.zero_grad",
    "Driver.zero_grad",
    "Trainer.torch_kwargs.set_grad_to_none",
    "DistTrainer.set_grad_to_none",
    text="Gradients are values that a function returns; nothing has to be cleared.",
)


@here(
    "Trainer.backward",
    "Driver.backward",
    text="`grad_fn(state, batch)` gives the gradients by name; the module's own `.grad` stays as it is.",
)
def _(grad_fn, model, loss_fn, state, batch):
    gradients = grad_fn(state, batch)
    # shows
    assert all(tensor.grad is None for tensor in model.parameters())
    loss_fn(model, batch).backward()
    assert close(gradients.grads, {name: tensor.grad for name, tensor in model.named_parameters()})


@here(
    "Trainer.step",
    "Driver.step",
    "Driver.optimizers",
    "Driver.set_optimizers",
    text="An optimizer is a function as well: from gradients, its state and the parameters to new ones.",
)
def _(grad_fn, optimizer, train_step, state, batch):
    grads = grad_fn(state, batch).grads
    params, opt_state, applied = optimizer.update(grads, state.opt_state, state.params, state.step)
    # shows
    after, _ = train_step(state, batch)
    assert applied
    assert equal(params, after.params)
    assert equal(opt_state, after.opt_state)


TABLE.section("How long, and on how much")


@here("Trainer.n_epochs", "TrainerState.n_epochs", text="A predicate, which the outer loop asks.")
def _(train_step, loader, state):
    done = ll.after_epochs(3)
    while not done(state):
        for batch in loader(state):
            state, _ = train_step(state, batch)
    # shows
    assert (state.epoch, state.step) == (3, 15)


@here(
    "Trainer.n_batches",
    "TrainerState.n_batches",
    text="Another predicate, which the inner loop asks too; here it stops amid the second epoch.",
)
def _(train_step, loader, state):
    done = ll.after_steps(7)
    while not done(state):
        for batch in loader(state):
            state, _ = train_step(state, batch)
            if done(state):
                break
    # shows
    assert (state.epoch, state.batch, state.step) == (1, 2, 7)


@here(
    "Trainer.run.num_train_batch_per_epoch",
    text="The first batches of each epoch's shuffle. The state's epochs have as many.",
)
def _(train_set, train_step, model, optimizer):
    loader = ll.make_loader(train_set, batch_size=8, limit=3)
    # shows
    assert len(loader) == 3
    whole = ll.make_loader(train_set, batch_size=8)
    assert equal(list(loader(ll.TrainState(epoch=1))), list(whole(ll.TrainState(epoch=1)))[:3])
    state = ll.init_state(model, optimizer, epoch_length=len(loader))
    for _ in range(2):
        for batch in loader(state):
            state, _ = train_step(state, batch)
    assert (state.epoch, state.step) == (2, 6)
    first, second = (loader.indices(ll.TrainState(epoch=epoch)) for epoch in (0, 1))
    assert not torch.equal(first, second)


@here(
    "Trainer.overfit_batches",
    text="A loader over a few batches, which each epoch gives again, and which are evaluated, too; for -1, `few = "
    "loader`. (`order=ll.data.in_order(), limit=2` of a dataset's loader reads the same samples again.) To ask whether a model "
    "learns one batch by heart at all, `looplib.testing.assert_overfits(train_step, state, batch)`.",
)
def _(loader, model, optimizer, train_step, eval_step):
    few = ll.make_loader(list(islice(loader(ll.TrainState()), 2)), batch_size=None, order=ll.data.in_order())
    state = ll.init_state(model, optimizer, epoch_length=len(few))
    for batch in few(state):
        state, _ = train_step(state, batch)
    scores = ll.evaluate(eval_step, state, few)
    # shows
    assert (state.epoch, state.step, state.samples) == (1, 2, 16)
    first = list(few(ll.TrainState()))
    assert equal(first, list(few(ll.TrainState(epoch=5))))
    assert equal(first, list(loader(ll.TrainState()))[:2])
    assert scores == ll.evaluate(eval_step, state, first)
    testing.assert_overfits(train_step, ll.init_state(model, optimizer), first[0], steps=400, fraction=0.5)


@here("Trainer.run", text="The loop itself. It may be run again: a state that is done is left as it is.")
def _(train_step, loader, state):
    done = ll.after_epochs(2)
    while not done(state):
        for batch in loader(state):
            state, _ = train_step(state, batch)
    # shows
    assert (state.epoch, state.step, state.batch) == (2, 10, 0)
    assert done(state)


@here(
    "Trainer.run.catch_KeyboardInterrupt",
    text="Ctrl-C at any moment leaves `state` as the last whole one. Running the loop again continues from there.",
)
def _(model, optimizer, train_step, loader, state, train):
    try:
        for batch in loader(state):
            state, _ = train_step(state, batch)
            if state.step == 3:
                signal.raise_signal(signal.SIGINT)  # Ctrl-C
    except KeyboardInterrupt:
        print(f"stopped at step {state.step}")
    # shows
    assert state.step == 3
    first = ll.init_state(model, optimizer, seed=0, epoch_length=5)
    assert equal(train(state, 2)[-1], train(first, 5)[-1])


@here(
    "Trainer.cur_epoch_idx",
    "Trainer.global_forward_batches",
    "Trainer.batch_idx_in_epoch",
    "Trainer.num_batches_per_epoch",
    "TrainerState.cur_epoch_idx",
    "TrainerState.global_forward_batches",
    "TrainerState.batch_idx_in_epoch",
    "TrainerState.num_batches_per_epoch",
    text="Counts of the state, which are stored with it. A batch is that of one update.",
)
def _(state, train):
    state = train(state, 7)[-1]
    position = state.epoch, state.step, state.batch, state.epoch_length
    # shows
    assert position == (1, 7, 2, 5)


TABLE.section("Evaluation")


@here(
    "Trainer.evaluate_dataloaders",
    text="Batches of any kind, or several sets by name; the names stand in front of the metrics.",
)
def _(eval_step, state, test_batches, loader):
    scores = ll.evaluate(eval_step, state, {"dev": test_batches, "train": loader}, prefix="eval/")
    # shows
    assert list(scores) == ["eval/dev/loss", "eval/dev/accuracy", "eval/train/loss", "eval/train/accuracy"]
    assert scores["eval/train/loss"] == pytest.approx(ll.evaluate(eval_step, state, list(loader(state)))["loss"])


@here(
    "Trainer.metrics",
    text="A function that gives records by name: looplib's own, or any of torchmetrics. They merge exactly for any "
    "sizes of batches, and over ranks.",
)
def _(model, state, test_batches, test_set):
    import torchmetrics

    f1 = ll.metrics.torchmetric(torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"))
    eval_step = ll.make_eval_step(
        model,
        lambda model, batch: {"f1": f1.of(model(batch[0]), batch[1]), "acc": ll.accuracy(model(batch[0]), batch[1])},
    )
    # shows
    x, y = test_set[:]
    logits = model(x)
    scores = ll.evaluate(eval_step, state, test_batches)
    whole = torchmetrics.functional.f1_score(logits, y, task="multiclass", num_classes=3, average="macro")
    assert scores["f1"] == pytest.approx(whole.item(), rel=1e-6)
    assert scores["acc"] == pytest.approx((logits.argmax(1) == y).float().mean().item())


@here(
    "Trainer.evaluate_every-negative",
    "Trainer.epoch_evaluate",
    text="`evaluate_every=-2`: at the end of every second epoch.",
)
def _(state, train):
    eval_now = ll.every_n_epochs(2)
    # shows
    assert fires(eval_now, train(state, 22)) == [10, 20]


@here(
    "Trainer.evaluate_every-positive",
    "Trainer.step_evaluate",
    text="`evaluate_every=3`: every third batch, counted over the whole run. Divide by `accumulation_steps`.",
)
def _(state, train):
    eval_now = ll.every_n_steps(3)
    # shows
    assert fires(eval_now, train(state, 10)) == [3, 6, 9]


@here(
    "Trainer.evaluate_every-function",
    text="A function of the state, which combines with others by `&`, `|` and `~`.",
)
def _(state, train):
    eval_now = ll.predicates.predicate(lambda state: state.samples > 60) & ll.every_n_steps(2) | ll.at_step(1)
    # shows
    assert fires(eval_now, train(state, 12)) == [1, 8, 10, 12]


@here("Trainer.run.num_eval_batch_per_dl", text="The first batches of each set only.")
def _(eval_step, state, test_batches):
    scores = ll.evaluate(eval_step, state, test_batches, limit=1)
    # shows
    assert scores == ll.evaluate(eval_step, state, test_batches[:1])
    assert scores != ll.evaluate(eval_step, state, test_batches)


@here(
    "Trainer.run.num_eval_sanity_batch",
    text="A line ahead of the loop. It changes nothing, so the run has the bits that it would have without.",
)
def _(eval_step, state, test_batches, model, optimizer):
    ll.evaluate(eval_step, state, test_batches, limit=2)
    # shows
    assert equal(state, ll.init_state(model, optimizer, seed=0, epoch_length=5))

    def broken(model, batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ll.evaluate(ll.make_eval_step(nn.Linear(4, 3), broken), ll.init_state(nn.Linear(4, 3)), test_batches, limit=2)


@here(
    "Trainer.evaluate_use_dist_sampler",
    "samplers.UnrepeatedSampler",
    "samplers.UnrepeatedRandomSampler",
    "samplers.UnrepeatedSortedSampler",
    "samplers.UnrepeatedSequentialSampler",
    text="`evaluate` divides batches among the ranks by itself, and each sample counts once: a stand-in makes up the "
    "number of forward passes where a batch has no row for a rank. `divide=False` where each rank has its own set.",
)
def _(test_set, state, rank_0_of_2):
    loader = ll.make_loader(test_set, batch_size=6, order=ll.data.in_order())
    mine = list(loader.parts(ll.TrainState()))
    # shows
    assert [(len(x), counts) for (x, y), counts in mine] == [(3, True)] * 4 + [(1, True)]
    assert torch.equal(mine[0][0][0], test_set.tensors[0][:3])


@here(
    "Driver.get_evaluate_context",
    "Driver.set_model_mode",
    text="A train step runs in training mode and an eval step in eval mode without gradients, each for its own time.",
)
def _(batch, optimizer):
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x[0]).square().mean()), optimizer)
    eval_step = ll.make_eval_step(model, lambda model, x: {"loss": model(x[0]).square().mean()})
    # shows
    state = ll.init_state(model, optimizer)
    scores = ll.compute(eval_step(state, batch))
    assert model.training
    assert scores["loss"] == pytest.approx(model[0](batch[0]).square().mean().item())
    model.eval()
    _, metrics = train_step(state, batch)
    assert not model.training
    assert ll.compute(metrics)["loss"] != pytest.approx(scores["loss"], rel=0.01)  # with dropout, all the same


@here("Driver.tensor_to_numeric", text="Metrics stay on the device until this; on several ranks, `reduce` before it.")
def _(train_step, state, batch, log):
    state, metrics = train_step(state, batch)
    numbers = ll.compute(ll.distributed.reduce(metrics), prefix="train/")
    # shows
    assert list(numbers) == ["train/loss"]
    assert isinstance(numbers["train/loss"], float)


@here(
    "MoreEvaluateCallback.dataloaders",
    "MoreEvaluateCallback.metrics",
    "MoreEvaluateCallback.evaluate_every",
    "MoreEvaluateCallback.evaluate_fn",
    "MoreEvaluateCallback.num_eval_sanity_batch",
    text="A second evaluation is a second line, with a step, a set and a predicate of its own.",
)
def _(predict_step, state, test_batches, train, log, rows):
    generate_now = ll.every_n_epochs(2)
    states = train(state, 10)
    for state in states:
        if generate_now(state):
            answers = torch.cat([*ll.predict(predict_step, state, test_batches)]).argmax(1)
            log(state, {"eval/classes": answers.unique().numel()})
    # shows
    assert [row["step"] for row in rows] == [10]
    assert 1 <= rows[0]["eval/classes"] <= 3


@here(
    "MoreEvaluateCallback.watch_monitor",
    "MoreEvaluateCallback.watch_monitor_larger_better",
    text="A predicate, true where the evaluation that `update_best` was told of is the best so far.",
)
def _(state):
    more_now = ll.predicates.at_best()
    state = state.replace(extra={"best": ll.predicates.BestSoFar("eval/accuracy", mode="max")})
    state = ll.update_best(state, {"eval/accuracy": 0.5})
    if more_now(state):
        print("the best so far")
    # shows
    assert more_now(state)
    assert not more_now(ll.update_best(state.replace(step=10), {"eval/accuracy": 0.4}))


@here(
    "MoreEvaluateCallback.topk",
    "MoreEvaluateCallback.topk_monitor",
    "MoreEvaluateCallback.topk_larger_better",
    "MoreEvaluateCallback.folder",
    "MoreEvaluateCallback.only_state_dict",
    "MoreEvaluateCallback.save_object",
    "MoreEvaluateCallback.model_save_fn",
    "MoreEvaluateCallback.save_evaluate_results",
    "MoreEvaluateCallback.save_kwargs",
    text="A second `checkpoint_io`, in a folder of its own, with the metric of that evaluation.",
)
def _(state, train, ckpt):
    by_bleu = ll.checkpoint_io("runs/bleu", keep_last=1, keep_best=1, monitor="eval/bleu", mode="max")
    states = train(state, 3)
    for state, bleu in zip(states, [0.2, 0.3, 0.1], strict=True):
        by_bleu.save(state, {"eval/bleu": bleu})
    # shows
    assert [found.step for found in by_bleu.steps()] == [2, 3]
    assert by_bleu.best().step == 2
    assert by_bleu.best().metrics == {"eval/bleu": 0.3}


TABLE.section("The best, and checkpoints")


@here(
    "Trainer.monitor",
    "Trainer.larger_better",
    "CheckpointCallback.monitor",
    "CheckpointCallback.larger_better",
    "callbacks.HasMonitorCallback",
    "callbacks.ResultsMonitor",
    text="The metric's whole name: nothing is guessed from a similar one. The default is that smaller is better; "
    "fastNLP's is the other way. What a function would compute is one more score.",
)
def _(state, train):
    ckpt = ll.checkpoint_io("runs/small", monitor="eval/sum", mode="max")
    states = train(state, 2)
    for state, scores in zip(states, [{"eval/p": 0.5, "eval/r": 0.5}, {"eval/p": 0.6, "eval/r": 0.1}], strict=True):
        ckpt.save(state, {**scores, "eval/sum": scores["eval/p"] + scores["eval/r"]})
    # shows
    assert ckpt.best().step == 1
    with pytest.raises(ValueError, match="eval/sum"):
        ckpt.save(state.replace(step=5), {"eval/summ": 1.0})


@here("CheckpointCallback.folder", text="A folder for each run; a resumed run finds its own by the same name.")
def _(state):
    ckpt = ll.checkpoint_io("runs/small")
    path = ckpt.save(state.replace(step=20))
    # shows
    assert path == Path("runs/small/step-00000020").absolute()
    assert path.is_dir()


@here(
    "CheckpointCallback.every_n_epochs",
    "CheckpointCallback.every_n_batches",
    text="Predicates say when to save; and which stay, where not all do: `keep_every=100` for those at every 100th "
    "step.",
)
def _(state, train, ckpt):
    save_now = ll.every_n_epochs(2) | ll.every_n_steps(4)
    states = train(state, 12)
    for state in states:
        if save_now(state):
            ckpt.save(state)
    # shows
    assert [found.step for found in ckpt.steps()] == [4, 8, 10, 12]


@here("CheckpointCallback.last", text="At the end of each epoch, the one before it goes once this one is whole.")
def _(state, train):
    ckpt, save_now = ll.checkpoint_io("runs/small", keep_last=1), ll.at_epoch_end()
    states = train(state, 12)
    for state in states:
        if save_now(state):
            ckpt.save(state)
    # shows
    assert [found.step for found in ckpt.steps()] == [10]


@here(
    "CheckpointCallback.topk",
    "callbacks.TopkSaver",
    text="The best two and the last; `topk=-1` is neither of the two arguments, which keeps all.",
)
def _(state, train):
    ckpt = ll.checkpoint_io("runs/small", keep_last=1, keep_best=2, monitor="eval/loss")
    states = train(state, 5)
    for state, loss in zip(states, [0.5, 0.3, 0.4, 0.9, 0.8], strict=True):
        ckpt.save(state, {"eval/loss": loss})
    # shows
    assert [found.step for found in ckpt.steps()] == [2, 3, 5]


@here(
    "CheckpointCallback.on_exceptions",
    text="Around the loop, for the exceptions that you name. The state is the last whole one.",
)
def _(train_step, loader, state, ckpt):
    try:
        for batch in loader(state):
            state, _ = train_step(state, batch)
            if state.step == 2:
                raise MemoryError
    except MemoryError:
        ckpt.save(state)
    # shows
    assert equal(ckpt.restore(ll.copy_state(state)), state)
    assert ckpt.latest().step == 2


@here(
    "CheckpointCallback.save_object",
    text="'trainer': a checkpoint is the whole state. For 'model', the weights alone, as any program reads them.",
)
def _(model, state, train, ckpt):
    state = train(state, 3)[-1]
    ckpt.save(state)
    torch.save(ll.checkpoint.state_dict(model, state), "model.pt")
    # shows
    assert equal(ckpt.restore(ll.copy_state(state).replace(step=0)), state)
    assert equal(torch.load("model.pt"), dict(state.params))


@here("CheckpointCallback.save_evaluate_results", text="The scores that a checkpoint is saved with stand in it.")
def _(state, ckpt):
    ckpt.save(state.replace(step=1), {"eval/loss": 0.3, "eval/accuracy": 0.9})
    scores = ckpt.latest().metrics
    # shows
    assert scores == {"eval/loss": 0.3, "eval/accuracy": 0.9}


nothing(
    "CheckpointCallback.only_state_dict",
    "Trainer.save_model.only_state_dict",
    "Trainer.load_model.only_state_dict",
    "Trainer.save_checkpoint.only_state_dict",
    "Trainer.load_checkpoint.only_state_dict",
    "LoadBestModelCallback.only_state_dict",
    text="A pickled module is code that runs when it is loaded. Files here hold tensors and plain values, always.",
)


@here(
    "CheckpointCallback.model_save_fn",
    "Trainer.save_model.model_save_fn",
    "Trainer.save_checkpoint.model_save_fn",
    "LoadBestModelCallback.model_save_fn",
    text="Your own function, called where it is to save; of several ranks, by the first.",
)
def _(model, state):
    @ll.distributed.rank_zero_only
    def save(folder):
        torch.save(ll.checkpoint.state_dict(model, state, cpu_offload=True), f"{folder}/mine.pt")

    save(".")
    # shows
    assert equal(torch.load("mine.pt"), model.state_dict())


@here(
    "Trainer.save_model",
    "Trainer.save_model.folder",
    "Driver.save_model",
    text="A `state_dict` with the module's own names, whatever wraps it; `ll.checkpoint.save_safetensors` for that format.",
)
def _(model, state, train):
    state = train(state, 2)[-1]
    torch.save(ll.checkpoint.state_dict(model, state), "model.pt")
    ll.checkpoint.save_safetensors(model, state, "model.safetensors")
    # shows
    assert equal(torch.load("model.pt"), dict(state.params))
    assert equal(ll.checkpoint.load_state_dict(model, ll.init_state(model), "model.safetensors").params, state.params)
    stream = io.BytesIO()  # as folder may be one
    torch.save(ll.checkpoint.state_dict(model, state), stream)
    stream.seek(0)
    assert equal(torch.load(stream), dict(state.params))


@here(
    "Trainer.load_model",
    "Trainer.load_model.folder",
    "Driver.load_model",
    text="Names and shapes are compared before anything is copied; `names=` loads some of them, `strict=False` those "
    "that fit.",
)
def _(model, state, train):
    torch.save(ll.checkpoint.state_dict(model, trained := train(state, 2)[-1]), "model.pt")
    state = ll.checkpoint.load_state_dict(model, state, "model.pt")
    # shows
    assert equal(state.params, trained.params)
    assert state.step == 0


@here(
    "Trainer.load_model.model_load_fn",
    "Trainer.load_checkpoint.model_load_fn",
    "LoadBestModelCallback.model_load_fn",
    text="Whatever gives names and tensors can be loaded.",
)
def _(model, state):
    weights = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    state = ll.checkpoint.load_state_dict(model, state, weights)
    # shows
    assert not any(tensor.any() for tensor in state.params.values())


@here(
    "Trainer.save_checkpoint",
    "Trainer.save_checkpoint.folder",
    "Driver.save_checkpoint",
    "TrainerState.state_dict",
    text="The state: counts, weights, the optimizer's state, the loss scale, and `extra`. The position in the data "
    "is a count, and predicates hold nothing, so neither samplers nor callbacks have a state to save.",
)
def _(state, train, ckpt):
    state = train(state, 7)[-1]
    ckpt.save(state)
    # shows
    template = ll.copy_state(state).replace(step=0, epoch=0, batch=0, samples=0)
    assert equal(ckpt.restore(template), state)


@here(
    "Trainer.run.resume_from",
    "Trainer.load_checkpoint",
    "Trainer.load_checkpoint.folder",
    "Trainer.load_checkpoint.resume_training",
    "Driver.load_checkpoint",
    "TrainerState.load_state_dict",
    text="Goes on with the next sample, to the bits of a run that never stopped; where there is no checkpoint yet, "
    "this is the state itself. `which=400` or `which='best'` takes another than the latest.",
)
def _(model, optimizer, loader, state, train, ckpt):
    states = train(state, 9)
    ckpt.save(states[6])
    state = ckpt.restore(ll.init_state(model, optimizer, epoch_length=len(loader)))
    # shows
    assert (state.step, state.epoch, state.batch) == (7, 1, 2)
    assert equal(train(state, 2)[-1], states[-1])


@here(
    "Trainer.run.resume_training",
    text="False: the weights and the optimizer's state, with all counts at 0. (Schedules start over, too.) For the "
    "weights alone, `ckpt.restore(state, weights_only=True)`.",
)
def _(state, train, ckpt):
    ckpt.save(last := train(state, 7)[-1])
    state = ckpt.restore(state).replace(step=0, epoch=0, batch=0, samples=0)
    # shows
    assert equal(state.params, last.params)
    assert equal(state.opt_state, last.opt_state)
    assert (state.step, state.epoch, state.batch, state.samples) == (0, 0, 0, 0)


@here(
    "EarlyStopCallback.monitor",
    "EarlyStopCallback.larger_better",
    "EarlyStopCallback.patience",
    text="The record is in the state, so after a resume patience continues where it was. After `update_best`, and "
    "before the save.",
)
def _(state, train_step, batch):
    state = state.replace(extra={"best": ll.predicates.BestSoFar("eval/accuracy", mode="max")})
    done = ll.after_epochs(20) | ll.early_stopping(patience=2)
    for accuracy in [0.1, 0.5, 0.4, 0.5, 0.6, 0.7]:
        state, _ = train_step(state, batch)
        state = ll.update_best(state, {"eval/accuracy": accuracy})
        if done(state):
            break
    # shows
    assert state.step == 4
    assert state.extra["best"].best == 0.5


@here(
    "LoadBestModelCallback.monitor",
    "LoadBestModelCallback.larger_better",
    "LoadBestModelCallback.save_folder",
    text="One line after the loop. What was trained last is in the latest checkpoint, as before.",
)
def _(state, train):
    ckpt = ll.checkpoint_io("runs/small", keep_last=1, keep_best=1, monitor="eval/loss")
    states = train(state, 3)
    for state, loss in zip(states, [0.5, 0.3, 0.4], strict=True):
        ckpt.save(state, {"eval/loss": loss})
    state = ckpt.restore(ll.copy_state(state), which="best")
    # shows
    assert equal(state, states[1])
    assert ckpt.latest().step == 3


@here(
    "LoadBestModelCallback.delete_after_train",
    text="Or in memory, and no file: states can be kept. (Where steps donate, a copy: `ll.copy_state(state)`.)",
)
def _(state, train_step, loader, train):
    first, losses = state, [0.9, 0.5, 0.3, 0.4, 0.3, 0.8]
    # given
    state, is_best = state.replace(extra={"best": ll.predicates.BestSoFar("eval/loss")}), ll.predicates.at_best()
    for batch in loader(state):
        state, _ = train_step(state, batch)
        state = ll.update_best(state, {"eval/loss": losses[state.step]})
        if is_best(state):
            best = state
    # shows
    assert best.step == 2
    assert equal(best.params, train(first, 2)[-1].params)
    assert not Path("runs").exists()


TABLE.section("Events, and functions at them")


@here(
    "Trainer.callbacks",
    "Trainer.on",
    "Trainer.on.event",
    "Trainer.add_callback_fn",
    text="What a callback does is a line in the loop, at the place of its event, and after `if` where not every "
    "time.",
)
def _(state, train_step, loader, log, rows):
    log_now = ll.every_n_steps(2)
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        if log_now(state):
            log(state, ll.compute(metrics, prefix="train/"))
    # shows
    assert [row["step"] for row in rows] == [2, 4]
    assert rows[1]["train/loss"] > 0


@here(
    "Event.every",
    "callbacks.Filter",
    text="`every=3`: of batches, or of epochs. Nothing counts calls, so a resumed run fires where it would have.",
)
def _(state, train):
    at_batches, at_epochs = ll.every_n_steps(3), ll.every_n_epochs(3)
    # shows
    states = train(state, 16)
    assert fires(at_batches, states) == [3, 6, 9, 12, 15]
    assert fires(at_epochs, states) == [15]
    assert fires(at_batches, train(states[3], 4)) == [6]


@here("Event.once", text="`once=4`: the fourth time alone, of batches or of epochs.")
def _(state, train):
    at_batch, at_epoch = ll.at_step(4), ll.at_epoch_end().between(4, 4)
    # shows
    states = train(state, 30)
    assert fires(at_batch, states) == [4]
    assert fires(at_epoch, states) == [20]


@here("Event.filter_fn", text="A function of the state. The number of calls is `state.step`, or `state.epoch`.")
def _(state, train):
    at_powers = ll.predicates.predicate(lambda state: state.step.bit_count() == 1)
    # shows
    assert fires(at_powers, train(state, 20)) == [1, 2, 4, 8, 16]


@here(
    "Event.on_after_trainer_initialized",
    "Callback.on_after_trainer_initialized",
    "Event.on_sanity_check_begin",
    "Callback.on_sanity_check_begin",
    "Event.on_sanity_check_end",
    "Callback.on_sanity_check_end",
    "Event.on_train_begin",
    "Callback.on_train_begin",
    "Event.on_train_end",
    "Callback.on_train_end",
    text="Lines before the loop, and after it; `finally` for what is to be done after an error, too.",
)
def _(state, train_step, eval_step, loader, test_batches, log, rows):
    log(state, ll.evaluate(eval_step, state, test_batches, prefix="sanity/", limit=2))
    try:
        for batch in loader(state):
            state, _ = train_step(state, batch)
    finally:
        log(state, {"note": "on_train_end"})
    # shows
    assert [row["step"] for row in rows] == [0, 5]
    assert "sanity/accuracy" in rows[0]


@here(
    "Event.on_train_epoch_begin",
    "Callback.on_train_epoch_begin",
    "Event.on_train_epoch_end",
    "Callback.on_train_epoch_end",
    text="Before and after the inner loop. A run that is resumed within an epoch passes the first line with `state.batch` "
    "above 0; `ll.at_epoch_end()` within the loop is the same moment as the last line.",
)
def _(state, train_step, loader, log, rows):
    while not ll.after_epochs(2)(state):
        log(state, {"note": "begin"})
        for batch in loader(state):
            state, _ = train_step(state, batch)
        log(state, {"note": "end"})
    # shows
    assert [(row["note"], row["epoch"]) for row in rows] == [("begin", 0), ("end", 1), ("begin", 1), ("end", 2)]


@here(
    "Event.on_fetch_data_begin",
    "Callback.on_fetch_data_begin",
    "Event.on_fetch_data_end",
    "Callback.on_fetch_data_end",
    text="Around `next`, in a generator of your own; to know how long it takes, `ll.log.meter().data(loader(state))`.",
)
def _(state, loader, train_step):
    waits = []

    def timed(batches):
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            waits.append(time.perf_counter() - began)
            if batch is None:
                return
            yield batch

    for batch in timed(loader(state)):
        state, _ = train_step(state, batch)
    # shows
    assert len(waits) == 6  # the last finds the end
    assert min(waits) > 0
    assert state.epoch == 1


@here(
    "Event.on_train_batch_begin",
    "Callback.on_train_batch_begin",
    "Event.on_train_batch_end",
    "Callback.on_train_batch_end",
    text="The first and the last line of the loop's body. Which samples a batch has, the loader says of the state.",
)
def _(state, train_step, loader, train_set):
    for batch in loader(state):
        indices = loader.indices(state)
        state, _ = train_step(state, batch)
    # shows
    assert equal(list(batch), list(train_set[indices]))


@here(
    "Event.on_exception",
    "Callback.on_exception",
    text="`except`, around the loop or in it. `metrics` and `batch` are those of the last pass.",
)
def _(state, train_step, loader, log, rows):
    try:
        for batch in loader(state):
            state, metrics = train_step(state, batch)
            if state.step == 3:
                raise RuntimeError("no space left")
    except RuntimeError as error:
        log(state, {"error": str(error), **ll.compute(metrics)})
    # shows
    assert (rows[0]["step"], rows[0]["error"]) == (3, "no space left")
    assert rows[0]["loss"] > 0


@here(
    "Event.on_save_model",
    "Callback.on_save_model",
    "Event.on_load_model",
    "Callback.on_load_model",
    "Event.on_save_checkpoint",
    "Callback.on_save_checkpoint",
    "Event.on_load_checkpoint",
    "Callback.on_load_checkpoint",
    text="Lines beside the save. What a callback would keep in its own state goes into `extra`, which is stored with "
    "the rest.",
)
def _(model, optimizer, state, ckpt):
    state = state.replace(step=3, extra={"hard": torch.tensor([17, 503]), "note": "warm"})
    ckpt.save(state)
    again = ckpt.restore(
        ll.init_state(model, optimizer, extra={"hard": torch.tensor([0, 0]), "note": ""}, epoch_length=5)
    )
    # shows
    assert again.extra["hard"].tolist() == [17, 503]
    assert again.extra["note"] == "warm"


@here(
    "Event.on_before_backward",
    "Callback.on_before_backward",
    text="The last lines of the loss function, which have all that the model gave.",
)
def _(optimizer, model, state, batch):
    def loss_fn(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), {"largest": logits.detach().max()}

    # shows
    largest = model(batch[0]).max().item()
    _, metrics = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)(state, batch)
    assert ll.compute(metrics)["largest"] == pytest.approx(largest)


@here(
    "Event.on_after_backward",
    "Callback.on_after_backward",
    "Event.on_before_optimizers_step",
    "Callback.on_before_optimizers_step",
    text="A function around the gradient function, which may look at the gradients or change them.",
)
def _(grad_fn, state, batch):
    def halved(state, batch, *part):
        out = grad_fn(state, batch, *part)
        return out._replace(grads={name: grad / 2 for name, grad in out.grads.items()})

    # shows
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)
    state = state.replace(opt_state=sgd.init(state.params))
    after, _ = ll.make_train_step(halved, sgd)(state, batch)
    expected = {name: state.params[name] - 0.05 * grad for name, grad in grad_fn(state, batch).grads.items()}
    assert close(after.params, {name: tensor.detach() for name, tensor in expected.items()})


@here(
    "Event.on_after_optimizers_step",
    "Callback.on_after_optimizers_step",
    text="The line after the step, on the state that it gave; here it keeps the weights within bounds.",
)
def _(state, train_step, batch):
    state, _ = train_step(state, batch)
    bounded = {name: tensor.detach().clamp(-0.2, 0.2) for name, tensor in state.params.items()}
    state = state.replace(params=bounded)
    # shows
    assert max(tensor.abs().max().item() for tensor in state.params.values()) == pytest.approx(0.2)
    later, _ = train_step(state, batch)
    assert (later.step, later.skipped) == (2, False)
    assert not equal(later.params, bounded)


nothing(
    "Event.on_before_zero_grad",
    "Callback.on_before_zero_grad",
    "Event.on_after_zero_grad",
    "Callback.on_after_zero_grad",
    text="No gradient stays between two steps, so nothing is set to zero.",
)


@here(
    "Event.on_evaluate_begin",
    "Callback.on_evaluate_begin",
    "Event.on_evaluate_end",
    "Callback.on_evaluate_end",
    text="The lines before and after `evaluate`, which have its scores.",
)
def _(state, eval_step, test_batches, log, rows):
    scores = ll.evaluate(eval_step, state, test_batches, prefix="eval/")
    log(state, {**scores, "eval/error": 1 - scores["eval/accuracy"]})
    # shows
    assert rows[0]["eval/error"] + rows[0]["eval/accuracy"] == 1


nothing(
    "Callback.callback_name",
    "Callback.need_reproducible_sampler",
    text="There are no callbacks whose states are stored by name, and each loader can be resumed.",
)

TABLE.section("Progress, times, logs")


@here(
    "Trainer.progress_bar",
    "TqdmCallback.print_every",
    "RichCallback.print_every",
    "callbacks.ProgressCallback",
    "callbacks.choose_progress_callback",
    text="A bar of tqdm, with the loss that it is shown, in a terminal or a notebook. `mininterval` and `miniters` "
    "say how often it is drawn, and `disable=None` hides it where there is no terminal.",
)
def _(state, loader, train_step):
    bar = ll.progress(loader, miniters=10, disable=None)
    for batch in bar(state):
        state, metrics = train_step(state, batch)
        bar.show(metrics)
    # shows
    assert state.epoch == 1


@here(
    "RawTextCallback.print_every",
    text="`progress_bar='raw'`: a line of text, when a predicate says so.",
)
def _(state, loader, train_step, printed):
    log, log_now = ll.console(), ll.every_n_steps(2)
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        if log_now(state):
            log(state, ll.compute(metrics, prefix="train/"))
    # shows
    lines = printed.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["2", "4"]
    assert all("train/loss" in line for line in lines)


nothing(
    "TqdmCallback.loss_round_ndigit",
    "RichCallback.loss_round_ndigit",
    "RawTextCallback.loss_round_ndigit",
    "TqdmCallback.format_json",
    "RichCallback.format_json",
    "RawTextCallback.format_json",
    "TimerCallback.time_ndigit",
    text="The console has four significant digits, and the bar has the loss with as many; a file has all of them.",
)


@here(
    "TqdmCallback.monitor",
    "TqdmCallback.larger_better",
    "RichCallback.monitor",
    "RichCallback.larger_better",
    "RawTextCallback.monitor",
    "RawTextCallback.larger_better",
    "FitlogCallback.monitor",
    "FitlogCallback.larger_better",
    text="The best so far is logged like any other number.",
)
def _(state, log, rows):
    state = state.replace(step=5, extra={"best": ll.predicates.BestSoFar("eval/accuracy", mode="max")})
    state = ll.update_best(state, scores := {"eval/accuracy": 0.8})
    log(state, {**scores, "best/accuracy": state.extra["best"].best, "best/step": state.extra["best"].best_step})
    # shows
    assert rows[0]["best/accuracy"] == 0.8
    assert rows[0]["best/step"] == 5


@here(
    "FitlogCallback.log_loss_every",
    text="A sink is any function of the state and a dict of values. looplib's own (`ll.jsonl`, `ll.log.csv_file`, "
    "`ll.log.tracker`) write on the first rank alone; a function of yours is called on each, so it asks.",
)
def _(state, train_step, batch):
    sent = []
    fitlog = types.SimpleNamespace(add_loss=lambda value, name, step: sent.append((value, step)))

    # given
    def to_fitlog(state, values):
        if ll.distributed.is_rank_zero():
            fitlog.add_loss(values["train/loss"], name="loss", step=state.step)

    log = ll.tee(ll.jsonl("log.jsonl"), ll.log.safely(to_fitlog))
    state, metrics = train_step(state, batch)
    log(state, ll.compute(metrics, prefix="train/"))
    # shows
    assert sent == [(row["train/loss"], row["step"]) for row in ll.log.read_jsonl("log.jsonl")]
    assert on_each_of_two_ranks(lambda: log(state, {"train/loss": 0.5})) == [None, None]
    assert len(sent) == len(ll.log.read_jsonl("log.jsonl")) == 2


@here("FitlogCallback.log_exception", text="A sink takes strings; the log has them beside the numbers.")
def _(state):
    log = ll.jsonl("log.jsonl")
    try:
        raise RuntimeError("no space left")
    except RuntimeError as error:
        log(state, {"exception": repr(error)})
    # shows
    assert ll.log.read_jsonl("log.jsonl")[0]["exception"] == "RuntimeError('no space left')"


@here(
    "TimerCallback.print_every",
    text="Where the time of a step goes, since the last `read`: to the data, the gradients, the update and the rest.",
)
def _(state, grad_fn, optimizer, loader):
    meter = ll.log.meter()
    train_step = ll.make_train_step(meter.grad_fn(grad_fn), meter.optimizer(optimizer))
    for batch in meter.data(loader(state)):
        state, _ = train_step(state, batch)
    seconds = meter.read()
    # shows
    parts = [seconds[f"{name}_seconds"] for name in ("data", "gradients", "update", "rest")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(seconds["step_seconds"])


TABLE.section("Drivers and several processes")


@here(
    "drivers.TorchSingleDriver",
    text="A script under `setup(required=False)` runs alone, too, with `python train.py`.",
)
def _(model, train_step, batch, optimizer):
    with ll.distributed.setup(required=False) as device:
        state, _ = train_step(ll.init_state(model.to(device), optimizer), batch)
    # shows
    assert ll.distributed.world_size() == 1
    assert state.step == 1


@plain(
    "drivers.TorchDDPDriver",
    "Trainer.torch_kwargs",
    "Trainer.torch_kwargs.ddp_kwargs",
    "DistTrainer.find_unused_parameters",
    text="torch's own wrapper, with its own arguments; steps donate. A parameter that the loss does not reach needs "
    "`allow_unused=True` of `make_grad_fn` besides, so that none is forgotten unseen.",
)
def _(model, loss_fn, optimizer, batch, one_process):
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    train_step = ll.make_train_step(ll.make_grad_fn(wrapped, loss_fn), optimizer, donate=True)
    state = ll.init_state(wrapped, optimizer)
    # shows
    expected = raw_training(model, loss_fn, [batch] * 2, adamw)
    for _ in range(2):
        state, _ = train_step(state, batch)
    assert close(state.params, expected)

    halves = Classifier()
    halves.other = nn.Linear(4, 3)
    halves = DistributedDataParallel(halves, find_unused_parameters=True)
    words = {"words": batch[0], "target": batch[1]}
    for allow_unused in (True, False):
        grad_fn = ll.make_grad_fn(halves, lambda model, batch: model(**batch)["loss"], allow_unused=allow_unused)
        step, state = ll.make_train_step(grad_fn, optimizer, donate=True), ll.init_state(halves, optimizer)
        if allow_unused:
            assert step(state, words)[0].step == 1
        else:
            with pytest.raises(ValueError, match="no gradient reached other"):
                step(state, words)


@plain(
    "drivers.TorchFSDPDriver",
    "Trainer.torch_kwargs.fsdp_kwargs",
    text="FSDP2: each block and then the whole, with torch's own arguments. Checkpoints are sharded, and any "
    "number of ranks restores them.",
)
def _(model, loss_fn, optimizer, batch, one_process, ckpt):
    fully_shard(model[0])
    fully_shard(model)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    state = ll.init_state(model, optimizer)
    # shows
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plain.load_state_dict(ll.checkpoint.state_dict(model, state))
    for _ in range(2):
        state, _ = train_step(state, batch)
    ckpt.save(state)
    assert close(
        ll.checkpoint.state_dict(model, ckpt.restore(state)), raw_training(plain, loss_fn, [batch] * 2, adamw)
    )


nothing(
    "drivers.FairScaleDriver",
    "drivers.DeepSpeedDriver",
    "Trainer.fairscale_kwargs",
    "Trainer.deepspeed_kwargs",
    text="Sharding of parameters, gradients and the optimizer's state is torch's `fully_shard` (and with its "
    "`CPUOffloadPolicy` they are on the host); an engine that takes over optimizer and checkpoints has no place in a "
    "loop whose state is a value.",
)
nothing(
    "drivers.PaddleDriver",
    "drivers.PaddleSingleDriver",
    "drivers.PaddleFleetDriver",
    "drivers.JittorDriver",
    "drivers.JittorSingleDriver",
    "drivers.JittorMPIDriver",
    "drivers.OneflowDriver",
    "drivers.OneflowSingleDriver",
    "drivers.OneflowDDPDriver",
    "drivers.paddle_seed_everything",
    "drivers.oneflow_seed_everything",
    "Trainer.paddle_kwargs",
    "Trainer.oneflow_kwargs",
    text="looplib is for torch alone.",
)


@here(
    "drivers.torch_seed_everything",
    text="torch's seed for the weights that the model begins with; what a run draws comes from the state's and the "
    "loader's, whatever ran before, and on each rank its own.",
)
def _(train_set, optimizer, batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    loader = ll.make_loader(train_set, batch_size=8, seed=0)
    state = ll.init_state(model, optimizer, seed=0, epoch_length=len(loader))
    # shows
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, batch: model(batch[0]).square().mean()), optimizer)
    first, _ = step(state, batch)
    torch.manual_seed(123)
    again, _ = step(state, batch)
    assert equal(first, again)
    assert equal(list(loader(state)), list(loader(state)))


nothing(
    "drivers.optimizer_state_to_device",
    text="`restore` puts each tensor on the device of the state that it restores into.",
)


@here(
    "Trainer.torch_kwargs.non_blocking",
    "DistTrainer.pin_memory",
    text="Copies do not wait where the loader pins its memory.",
)
def _(train_set):
    loader = ll.make_loader(train_set, batch_size=8, device="cpu", pin_memory=torch.accelerator.is_available())
    # shows
    assert sum(len(x) for x, y in loader(ll.TrainState())) == 40


@here(
    "Trainer.output_from_new_proc",
    text="What the ranks but the first print goes into files. (Sinks write on the first alone, in any case.)",
)
def _(torchrun, printed):
    with ll.distributed.setup(output_dir="out"):
        print(f"rank {ll.distributed.rank()}")
    # shows
    assert printed.getvalue() == "rank 0\n"
    assert launch(2, say_rank, str(Path("two").absolute())) == "rank 0\n"
    assert Path("two/rank-1.log").read_text() == "rank 1\n"


@here(
    "Driver.model",
    "Driver.unwrap_model",
    text="Names are those of the innermost module, whatever wraps it, so nothing has to be unwrapped.",
)
def _(model, one_process):
    weights = ll.checkpoint.state_dict(wrapped := DistributedDataParallel(model), ll.init_state(wrapped))
    # shows
    assert list(weights) == list(model.state_dict())
    assert next(iter(wrapped.state_dict())).startswith("module.")


@here(
    "Trainer.use_dist_sampler",
    "Driver.set_dist_repro_dataloader",
    "Driver.set_deterministic_dataloader",
    "Driver.set_sampler_epoch",
    "samplers.ReproducibleSampler",
    "samplers.ReproducibleBatchSampler",
    "samplers.RandomSampler",
    "samplers.RandomBatchSampler",
    text="Every loader is of this kind: global batches are shuffled by (seed, epoch) and then divided among the "
    "ranks, nothing is repeated to make them even, and a run can continue from any state. `divide=False` for "
    "data that differ from rank to rank already.",
)
def _(train_set, rank_0_of_2):
    loader = ll.make_loader(train_set, batch_size=8, seed=0)
    rest = list(loader(ll.TrainState(epoch=1, batch=3)))
    # shows
    whole = ll.make_loader(train_set, batch_size=8, seed=0, divide=False)
    assert equal(rest, [tuple(part[:4] for part in batch) for batch in list(whole(ll.TrainState(epoch=1)))[3:]])


@here("samplers.SequentialSampler", text="In the order of the dataset.")
def _(train_set):
    loader = ll.make_loader(train_set, batch_size=8, order=ll.data.in_order())
    # shows
    assert torch.equal(torch.cat([x for x, y in loader(ll.TrainState(epoch=3))]), train_set.tensors[0])


@here("samplers.SortedSampler", text="Any sequence of indices is an order; here from long to short.")
def _(train_set, lengths):
    order = sorted(range(len(train_set)), key=lambda index: -lengths[index])
    loader = ll.make_loader(train_set, batch_size=8, order=ll.data.sampler(order))
    # shows
    assert torch.equal(torch.cat([x for x, y in loader(ll.TrainState())]), train_set.tensors[0][order])


@here(
    "samplers.BucketedBatchSampler",
    text="Shuffled, sorted by length within pools of several batches (50, or a quarter of a small set), and the "
    "batches shuffled. fastNLP goes the other way: it sorts all and shuffles within buckets of "
    "`num_batch_per_bucket` batches, so that fewer are more alike in length; here it is more.",
)
def _(train_set, lengths):
    loader = ll.make_loader(train_set, batch_size=2, order=ll.data.by_length(lengths, pool=10))

    # shows
    def padding(loader):
        places = [ll.TrainState(epoch=epoch, batch=k) for epoch in range(5) for k in range(len(loader))]
        return sum(2 * max(pair) - sum(pair) for pair in ([lengths[i] for i in loader.indices(at)] for at in places))

    order = torch.cat([loader.indices(ll.TrainState(batch=k)) for k in range(len(loader))])
    assert torch.equal(order.sort().values, torch.arange(40))
    assert padding(loader) < 0.5 * padding(ll.make_loader(train_set, batch_size=2))
    assert padding(loader) < padding(
        ll.make_loader(train_set, batch_size=2, order=ll.data.by_length(lengths, pool=2))
    )
    assert not torch.equal(loader.indices(ll.TrainState()), loader.indices(ll.TrainState(epoch=1)))


@here(
    "samplers.ReproduceBatchSampler",
    text="Any batch sampler of torch's kind; what it draws is seeded by the epoch, and it can be resumed.",
)
def _(train_set):
    batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(train_set), batch_size=8, drop_last=True)
    loader = ll.make_loader(train_set, order=ll.data.batch_sampler(batches))
    # shows
    epoch = list(loader(ll.TrainState(epoch=2)))
    assert equal(list(loader(ll.TrainState(epoch=2, batch=3))), epoch[3:])
    assert not equal(epoch, list(loader(ll.TrainState(epoch=3))))


@here(
    "samplers.MixSampler",
    "samplers.DopedSampler",
    text="Several sets as one, and mixed batches. For a `ds_ratio`, the weights say how likely each sample is: the "
    "share of its set, divided by the number of samples that it has.",
)
def _(train_set, test_set):
    both = ConcatDataset([train_set, test_set])
    loader = ll.make_loader(both, batch_size=13, seed=0)
    weights = [0.3 / len(train_set)] * len(train_set) + [0.7 / len(test_set)] * len(test_set)
    by_share = ll.make_loader(both, batch_size=13, order=ll.data.weighted(weights, num_samples=900))
    # shows
    assert len(loader) == 5
    assert sum(len(x) for x, y in loader(ll.TrainState())) == 65
    drawn = torch.cat([by_share.indices(ll.TrainState(batch=k)) for k in range(len(by_share))])
    assert (drawn >= 40).double().mean().item() == pytest.approx(0.7, abs=0.07)  # four standard deviations


@here("samplers.MixSequentialSampler", text="Batches of the one set, and then of the other, each shuffled by itself.")
def _(train_set, test_set):
    def batches(epoch, generator):
        first, second = torch.randperm(40, generator=generator), 40 + torch.randperm(25, generator=generator)
        return [*first.split(8), *second.split(8)]

    loader = ll.make_loader(ConcatDataset([train_set, test_set]), order=ll.data.batch_sampler(batches))
    # shows
    found = [loader.indices(ll.TrainState(batch=k)) for k in range(len(loader))]
    assert [len(part) for part in found] == [8, 8, 8, 8, 8, 8, 8, 8, 1]
    assert all((part < 40).all() for part in found[:5])
    assert all((part >= 40).all() for part in found[5:])
    assert not torch.equal(found[0], loader.indices(ll.TrainState(epoch=1)))


@here(
    "samplers.PollingSampler",
    text="A batch of each set in turn. Here until all are read once; `itertools.cycle` repeats the shorter one.",
)
def _(train_set, test_set):
    def batches(epoch, generator):
        first, second = torch.randperm(40, generator=generator), 40 + torch.randperm(25, generator=generator)
        return [part for pair in zip_longest(first.split(8), second.split(8)) for part in pair if part is not None]

    loader = ll.make_loader(ConcatDataset([train_set, test_set]), order=ll.data.batch_sampler(batches))
    # shows
    found = [loader.indices(ll.TrainState(batch=k)) for k in range(len(loader))]
    assert [bool((part < 40).all()) for part in found] == [True, False, True, False, True, False, True, False, True]
    assert sorted(chain.from_iterable(part.tolist() for part in found)) == list(range(65))


nothing(
    "samplers.re_instantiate_sampler",
    text="A loader has no position of its own, so one serves any number of runs.",
)


@here("Driver.get_local_rank", "Driver.is_distributed", text="Asked for at each call; 0 of 1 without torchrun.")
def _(rank_0_of_2):
    rank, ranks = ll.distributed.rank(), ll.distributed.world_size()
    # shows
    assert (rank, ranks) == (0, 2)


@here("Driver.barrier", text="Where there is one process, nothing.")
def _(one_process):
    ll.distributed.barrier()
    # shows
    assert distributed.is_initialized()


nothing(
    "Driver.on_exception",
    text="An error within `ll.distributed.setup` ends its process at once, and torchrun the others.",
)


@plain("Driver.broadcast_object", "Driver.all_gather", text="torch's collectives for objects.")
def _(one_process):
    found = [{"vocabulary": 100}]
    distributed.broadcast_object_list(found, src=0)
    distributed.all_gather_object(everyone := [None] * ll.distributed.world_size(), found[0])
    # shows
    assert everyone == [{"vocabulary": 100}]


TABLE.section("The DistTrainer of fastNLP 0.5 and 0.7")


@here(
    "DistTrainer.train_data",
    "DistTrainer.num_workers",
    "DistTrainer.drop_last",
    text="The plain dataset: no DistributedSampler, which would divide it twice, and is refused. The order and what "
    "is drawn are the same for any number of workers.",
)
def _(train_set):
    loader = ll.make_loader(train_set, batch_size=16, num_workers=1, drop_last=True)
    # shows
    assert equal(list(loader(ll.TrainState())), list(ll.make_loader(train_set, batch_size=16)(ll.TrainState()))[:2])
    assert [len(x) for x, y in loader(ll.TrainState())] == [16, 16]
    sampler = torch.utils.data.DistributedSampler(train_set, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="divides each batch among the ranks"):
        ll.make_loader(train_set, batch_size=16, order=ll.data.sampler(sampler))


@here(
    "DistTrainer.batch_size_per_gpu",
    "DistTrainer.batch_size",
    text="`batch_size` is that of all ranks together. Give it as a number, and the batches are the same on any number of "
    "ranks, so that a run may continue on more or fewer of them. With `batch_size=8 * ll.distributed.world_size()`, the "
    "batches change with the number of ranks, and `loader.resume` continues where one of them begins.",
)
def _(train_set):
    loader = ll.make_loader(train_set, batch_size=16)  # 8 on each of two ranks

    # shows
    def sizes(state, loader):
        return [len(x) for x, y in loader(state)]

    assert on_each_of_two_ranks(lambda: sizes(ll.TrainState(), loader)) == [[8, 8, 4], [8, 8, 4]]
    assert sizes(ll.TrainState(), loader) == [16, 16, 8]
    state = ll.TrainState(batch=1, samples=16, batch_samples=16, epoch_length=len(loader))
    of_one_rank = ll.make_loader(train_set, batch_size=8 * ll.distributed.world_size())
    with pytest.raises(ValueError, match=r"another batch_size or dataset .* state = loader.resume\(state\)"):
        sizes(state, of_one_rank)
    assert sizes(of_one_rank.resume(state), of_one_rank) == [8, 8, 8]


@plain(
    "DistTrainer.model",
    text="torch's DistributedDataParallel; `ll.bind` and `ll.checkpoint.state_dict` see through it.",
)
def _(model, optimizer, one_process):
    wrapped = DistributedDataParallel(model)
    state = ll.init_state(wrapped, optimizer)
    # shows
    assert list(state.params) == [name for name, _ in model.named_parameters()]


@here("DistTrainer.optimizer", text="What None stands for there. A class and its settings, not an instance.")
def _(model, loss_fn, batch):
    optimizer = ll.optimizer(torch.optim.Adam, lr=4e-3)
    # shows
    step, state = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer), ll.init_state(model, optimizer)
    expected = raw_training(model, loss_fn, [batch] * 3, lambda raw: torch.optim.Adam(raw.parameters(), lr=4e-3))
    for _ in range(3):
        state, _ = step(state, batch)
    assert close(state.params, expected)


@here("DistTrainer.loss", text="A function of the model and the batch. None there is the loss in the model's output.")
def _(classifier, words):
    grad_fn = ll.make_grad_fn(classifier, lambda model, batch: model(**batch)["loss"])
    # shows
    metrics = grad_fn(ll.init_state(classifier), words).metrics
    assert ll.compute(metrics)["loss"] == pytest.approx(classifier(**words)["loss"].item())


@here(
    "DistTrainer.callbacks_all",
    "DistTrainer.callbacks_master",
    "DistTrainer.is_master",
    text="Lines in the loop, which all ranks pass; for the first alone, behind this question. Sinks and "
    "checkpoints ask it themselves.",
)
def _(state):
    if ll.distributed.is_rank_zero():
        Path("begun").touch()
    # shows
    assert Path("begun").exists()


@here("DistTrainer.get_local_rank", text="`setup` has taken the device of it; as a number, it is in the environment.")
def _(torchrun):
    with ll.distributed.setup() as device:
        local_rank = int(os.environ["LOCAL_RANK"])
    # shows
    assert local_rank == 0
    assert device.index in (0, None)


@here("DistTrainer.n_epochs", text="A predicate, as above.")
def _(state, train):
    done = ll.after_epochs(1)
    # shows
    assert [done(found) for found in train(state, 5)] == [False] * 4 + [True]


@here(
    "DistTrainer.dev_data",
    "DistTrainer.metrics",
    text="All ranks evaluate, each its part, and get the same scores.",
)
def _(model, state, test_batches):
    def metric_fn(model, batch):
        x, y = batch
        return {"ppl": ll.metrics.perplexity(ll.Mean(F.cross_entropy(model(x), y, reduction="sum"), len(y)))}

    eval_step = ll.make_eval_step(model, metric_fn)
    ckpt = ll.checkpoint_io("runs/small", keep_best=1, monitor="dev/ppl", mode="min")
    ckpt.save(state, scores := ll.evaluate(eval_step, state, test_batches, prefix="dev/"))
    # shows
    x, y = (torch.cat(parts) for parts in zip(*test_batches, strict=True))
    assert scores["dev/ppl"] == pytest.approx(F.cross_entropy(model(x), y).exp().item(), rel=1e-5)
    assert ckpt.best().metrics == scores


@here(
    "DistTrainer.metric_key",
    text="The metric's name and `mode=`. fastNLP puts both into the name, where `-ppl` means that smaller is better, and "
    "`ppl` or `+ppl` that larger is; two expressions take such a setting apart.",
)
def _(state, train):
    metric_key = "-ppl"
    monitor, mode = f"dev/{metric_key.lstrip('+-')}", "min" if metric_key.startswith("-") else "max"
    ckpt = ll.checkpoint_io("runs/small", keep_best=1, monitor=monitor, mode=mode)
    best = ll.predicates.BestSoFar(monitor, mode=mode)
    # shows
    for later, ppl in zip(train(state, 3), (9.0, 4.0, 6.0), strict=True):
        ckpt.save(later, {"dev/ppl": ppl})
        best = best.update(ppl, later.step)
    assert (ckpt.best().step, best.best_step) == (2, 2)


@here(
    "DistTrainer.update_every",
    text="The batch of an update, in microbatches. `batch_size_per_gpu` is the size of one of them there; `batch_size` is "
    "that times `update_every` times the number of ranks here.",
)
def _(model, loss_fn, train_set):
    loader = ll.make_loader(train_set, batch_size=16)  # two microbatches of 4 on each of two ranks
    grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches=2)
    # shows
    state, batch = ll.init_state(model), next(loader(ll.TrainState()))
    assert close(grad_fn(state, batch).grads, ll.make_grad_fn(model, loss_fn)(state, batch).grads)


@here("DistTrainer.print_every", text="The mean of the loss since the last line, which is exact, and of all ranks.")
def _(state, train_step, loader, log, rows):
    first, window, log_now = state, ll.Window(), ll.every_n_steps(5)
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        window = window.add(metrics)
        if log_now(state):
            log(state, ll.compute(ll.distributed.reduce(window.metrics()), prefix="train/"))
            window = ll.Window()
    # shows
    again, losses = first, []
    for batch in loader(first):
        again, metrics = train_step(again, batch)
        losses.append(ll.compute(metrics)["loss"])
    assert [row["step"] for row in rows] == [5]
    assert rows[0]["train/loss"] == pytest.approx(sum(losses) / 5)


@here("DistTrainer.validate_every", text="After a number of batches, or with -1 at the end of each epoch.")
def _(state, train):
    eval_now = ll.every_n_steps(4) | ll.at_epoch_end()
    # shows
    assert fires(eval_now, train(state, 10)) == [4, 5, 8, 10]


@here(
    "DistTrainer.save_every",
    "DistTrainer.save_path",
    "DistTrainer.save_check_point",
    text="A checkpoint there is the pickled model; here it is the whole state, and the run can continue from it. All "
    "ranks call `save`, and the first writes.",
)
def _(state, train):
    ckpt, save_now = ll.checkpoint_io("runs/small/checkpoints"), ll.every_n_steps(4)
    states = train(state, 9)
    for state in states:
        if save_now(state):
            ckpt.save(state)
    # shows
    assert [found.path.name for found in ckpt.steps()] == ["step-00000004", "step-00000008"]


@here(
    "DistTrainer.save_check_point.name",
    "DistTrainer.save_check_point.only_params",
    text="The weights alone, under a name of your own.",
)
def _(model, state):
    ll.checkpoint.save_safetensors(model, state, "small.safetensors")
    # shows
    assert equal(ll.checkpoint.load_state_dict(model, ll.init_state(model), "small.safetensors").params, state.params)


@here(
    "DistTrainer.load_check_point",
    "DistTrainer.load_check_point.name",
    "DistTrainer.train.load_best_model",
    text="'best', 'latest', or a step.",
)
def _(state, train):
    ckpt = ll.checkpoint_io("runs/small", monitor="dev/loss")
    states = train(state, 3)
    for state, loss in zip(states, [0.5, 0.3, 0.4], strict=True):
        ckpt.save(state, {"dev/loss": loss})
    state = ckpt.restore(ll.copy_state(state), which="best")
    # shows
    assert equal(state, states[1])
    assert equal(ckpt.restore(ll.copy_state(state), which=3), states[2])


@here("DistTrainer.device", text="The GPU of the process's `LOCAL_RANK`, or the CPU where there is none.")
def _(model, train_set, torchrun):
    with ll.distributed.setup() as device:
        model, loader = model.to(device), ll.make_loader(train_set, batch_size=8, device=device)
    # shows
    assert next(loader(ll.TrainState()))[0].device == next(model.parameters()).device


@here(
    "DistTrainer.fp16",
    text="Apex is not needed. 'O1' is autocast with a loss scale (see `fp16` above); 'O2' is a model of half "
    "precision whose optimizer keeps masters in float32.",
)
def _(model, batch):
    model = model.bfloat16()
    optimizer = ll.optim.master_weights(ll.optimizer(torch.optim.Adam, lr=1e-5))
    grad_fn = ll.make_grad_fn(
        model, lambda model, batch: F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])
    )
    # shows
    start = ll.init_state(model, optimizer)
    state, _ = ll.make_train_step(grad_fn, optimizer)(start, batch)
    assert state.params["0.weight"].dtype == torch.bfloat16
    moved = state.opt_state["master"]["0.weight"] - start.opt_state["master"]["0.weight"]
    assert moved.abs().max().item() == pytest.approx(1e-5, rel=0.1)  # less than bfloat16 could say


@here("DistTrainer.backend", text="NCCL between GPUs and gloo between hosts, unless another is given.")
def _(torchrun):
    with ll.distributed.setup(backend="gloo"):
        backend = distributed.get_backend()
    # shows
    assert backend == "gloo"


@plain(
    "DistTrainer.init_method",
    text="torchrun's environment is what `setup` reads. By another way, torch makes the processes known to each "
    "other, and looplib finds them.",
)
def _():
    path = Path("rendezvous").absolute()
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    # shows
    assert (ll.distributed.rank(), ll.distributed.world_size()) == (0, 1)
    distributed.destroy_process_group()


@here(
    "DistTrainer.sampler",
    text="For a dataset that is another one on each rank already: `divide=False`, and the batch size of one rank. "
    "`ll.data.sampler(...)` is an order of your own, of the epoch, which is divided like any other.",
)
def _(train_set, rank_0_of_2):
    mine = ll.make_loader(train_set, batch_size=8, divide=False)
    backwards = ll.make_loader(
        train_set, batch_size=8, order=ll.data.sampler(lambda epoch, generator: range(39, -1, -1))
    )
    # shows
    assert [len(x) for x, y in mine(ll.TrainState())] == [8] * 5
    assert backwards.indices(ll.TrainState()).tolist() == [39, 38, 37, 36]


@here("DistTrainer.test_use_fp16", text="The metric function under autocast, too.")
def _(model, metric_fn, state, test_batches):
    eval_step = ll.make_eval_step(model, ll.autocast(metric_fn, torch.float16))
    scores = ll.evaluate(eval_step, state, test_batches)
    # shows
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        losses = [(F.cross_entropy(model(x), y).item(), len(y)) for x, y in test_batches]
    assert scores["loss"] == pytest.approx(sum(loss * count for loss, count in losses) / 25, rel=1e-6)
    assert scores["loss"] != ll.evaluate(ll.make_eval_step(model, metric_fn), state, test_batches)["loss"]


@here(
    "DistTrainer.dev_batch_size",
    "DistTrainer.test_sampler",
    "DistTrainer.test_use_tqdm",
    text="The set to evaluate has a loader of its own; any size of its batches gives the same scores.",
)
def _(eval_step, state, test_set, test_batches):
    loader = ll.make_loader(test_set, batch_size=7, order=ll.data.in_order())
    scores = ll.evaluate(eval_step, state, loader, progress=False)
    # shows
    assert scores == pytest.approx(ll.evaluate(eval_step, state, test_batches), rel=1e-6)


@here("DistTrainer.use_tqdm", text="`disable=True` for no bar. On several ranks the first alone has one.")
def _(state, loader, train_step):
    for batch in ll.progress(loader, disable=True)(state):
        state, _ = train_step(state, batch)
    # shows
    assert state.epoch == 1


@here(
    "DistTrainer.train",
    text="The loop. What the method returns (seconds, the best scores and when they were) is asked of where it is.",
)
def _(state, train):
    ckpt, began = ll.checkpoint_io("runs/small", monitor="dev/loss"), time.perf_counter()
    states = train(state, 7)
    for state, loss in zip(states, [0.9, 0.8, 0.5, 0.6, 0.7, 0.4, 0.6], strict=True):
        ckpt.save(state, {"dev/loss": loss})
    results = {"seconds": time.perf_counter() - began, "step": ckpt.best().step, **ckpt.best().metrics}
    # shows
    assert results["seconds"] > 0
    assert (results["step"], results["dev/loss"]) == (6, 0.4)


@here(
    "DistTrainer.train.on_exception",
    text="'ignore' is `except Exception: pass` around the loop, 'raise' is no `except`, and 'auto' passes over "
    "Ctrl-C.",
)
def _(state, train_step, loader):
    try:
        for batch in loader(state):
            state, _ = train_step(state, batch)
            if state.step == 2:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        print(f"stopped at step {state.step}")
    # shows
    assert state.step == 2


@here("DistTrainer.close", text="The end of the `with` block of `setup`.")
def _(torchrun):
    with ll.distributed.setup():
        ranks = ll.distributed.world_size()
    # shows
    assert ranks == 1
    assert not distributed.is_initialized()
