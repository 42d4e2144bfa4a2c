"""transformers' Trainer with all its features, as a loop: each setting has the name that TrainingArguments gives it.

    pip install transformers tensorboard
    python recipes/from_transformers.py                           (one process)
    torchrun --nproc-per-node 2 recipes/from_transformers.py      (two, of a GPU or a core each)

Ctrl-C or SIGTERM stops at the next line of the log, which with torchrun has to come within 30 s (--logging_steps), or
TORCH_ELASTIC_SHUTDOWN_TIMEOUT. Rerunning continues, with the same number of processes (the batch size is per device).
For the same global batch with any number of processes, give make_loader a `batch_size` that does not depend on it.
On a CPU that does not compute in bfloat16 (`lscpu` shows neither avx512_bf16 nor amx_bf16), give --bf16 0: bfloat16
takes thirty times as long there. Reached with one process: 41.5% to 42.9% of the held-out bytes with seeds 0 to 4,
which also chose the weights; 40 seconds each.
"""

from __future__ import annotations

import argparse
import inspect
import math
import pydoc_data.topics
import re
import signal
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import looplib as ll


def main(
    output_dir: str = "runs/from_transformers",  # folder for log, TensorBoard, checkpoints and the model
    num_train_epochs: float = 2.0,  # passes over the training set, rounded up to whole steps
    per_device_train_batch_size: int = 8,  # samples of a microbatch
    gradient_accumulation_steps: int = 2,  # microbatches of an update
    bf16: bool = True,  # 1 for autocast to bfloat16
    learning_rate: float = 5e-3,  # at its peak
    warmup_steps: int = 50,  # updates in which the learning rate rises
    weight_decay: float = 0.1,  # of the matrices
    max_grad_norm: float = 1.0,  # gradients are scaled down to this norm
    label_smoothing_factor: float = 0.1,  # of the targets
    logging_steps: int = 20,  # updates between two lines of the log
    eval_steps: int = 100,  # updates between two evaluations and saves, as load_best_model_at_end needs
    save_total_limit: int = 3,  # checkpoints to keep, and the best
    early_stopping_patience: int = 3,  # evaluations without a better loss
    seed: int = 42,  # of the weights and the order
) -> dict[str, float]:
    torch.set_num_threads(1)
    with ll.distributed.setup(required=False, output_dir=output_dir) as device:
        torch.manual_seed(seed)  # the same weights on all ranks
        sizes = GPT2Config(
            vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        model: nn.Module = GPT2LMHeadModel(sizes)
        model = DistributedDataParallel(model.to(device)) if ll.distributed.launched() else model.to(device)
        train_set, eval_set = load_data()
        size = per_device_train_batch_size * gradient_accumulation_steps * ll.distributed.world_size()  # of an update
        loader = ll.make_loader(train_set, batch_size=size, seed=seed, device=device)
        eval_batches = ll.make_loader(eval_set, batch_size=size, order=ll.data.sequential(), device=device)
        steps = math.ceil(num_train_epochs * len(loader))
        rate = ll.warmup_cosine(learning_rate, warmup=warmup_steps, total=steps)
        groups = [(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})]  # norms and biases
        optimizer = ll.chain(
            ll.clip_by_global_norm(max_grad_norm),
            ll.optimizer(torch.optim.AdamW, lr=rate, weight_decay=weight_decay, groups=groups),
        )
        measured = ll.autocast(partial(metric_fn, label_smoothing=label_smoothing_factor), enabled=bf16)
        grad_fn = ll.make_grad_fn(model, lambda model, batch: measured(model, batch)["loss"])
        train_step = ll.make_train_step(ll.accumulate(grad_fn, gradient_accumulation_steps), optimizer, donate=True)
        eval_step = ll.make_eval_step(model, measured)
        last = ll.predicates.after_samples(math.ceil(num_train_epochs * len(train_set)))  # on any number of ranks
        eval_now = ll.every_n_steps(eval_steps) | last
        log_now, ended = ll.every_n_steps(logging_steps) | eval_now, last | ll.early_stopping(early_stopping_patience)
        done = ended | (log_now & ll.after_signal(signal.SIGINT, signal.SIGTERM))
        board = ll.log.tracker("tensorboard", f"{output_dir}/tensorboard")
        log = ll.tee(board, ll.jsonl(f"{output_dir}/log.jsonl"), ll.console())
        settings, folder = {"loader": loader}, f"{output_dir}/checkpoints"
        best = ll.predicates.BestSoFar("eval/loss")  # metric_for_best_model; mode="max": greater_is_better
        ckpt = ll.checkpoint_io(folder, keep_last=save_total_limit, monitor=best, describe=settings)
        first = ll.init_state(model, optimizer, seed=seed, loader=loader, extra={"best": best})
        state, window = ckpt.restore(first), ll.Window()
        finished = f"already finished at step {state.step}; delete {output_dir} to start again"
        print(finished if ended(state) else f"step {state.step} of {steps}")
        bar = ll.progress(loader, leave=False, disable=None)
        while not done(state):
            for batch in bar(state):
                state, metrics = train_step(state, batch)
                window = window.add(metrics)
                if log_now(state):
                    values = ll.compute(ll.distributed.reduce(window.metrics()), prefix="train/")
                    log(state, values | {"train/learning_rate": rate(state.step - 1)})
                    window = ll.Window()
                if eval_now(state):
                    log(state, scores := ll.evaluate(eval_step, state, eval_batches, prefix="eval/"))
                    ckpt.save(state := ll.update_best(state, scores), scores)
                if done(state):
                    break
        if not ended(state):
            ckpt.save(state)
            print(f"stopped at step {state.step} of {steps}; run the same command to continue")
            return {}
        state = ckpt.restore(state, which="best")  # load_best_model_at_end
        ll.checkpoint.save_pretrained(model, state, output_dir)
        scores = ll.evaluate(eval_step, state, eval_batches)
        print(f"{scores['accuracy']:.2%} of the next bytes guessed, by the weights of step {state.step}")
        return scores


def load_data() -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Windows of 128 bytes of Python's own documentation; the last tenth of them is held out."""
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, 128, 128)
    examples = [{"input_ids": window, "labels": window} for window in windows]
    return examples[: len(windows) * 9 // 10], examples[len(windows) * 9 // 10 :]


def metric_fn(model: nn.Module, batch: dict[str, Tensor], label_smoothing: float) -> dict[str, ll.Mean]:
    logits, labels = model(input_ids=batch["input_ids"]).logits, batch["labels"]
    loss = ll.next_token_loss(logits, labels, label_smoothing=label_smoothing)
    return {"loss": loss, "accuracy": ll.accuracy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, about in re.findall(r"^    (\w+): .*?,  # (.*)", inspect.getsource(main), re.MULTILINE):
        default = inspect.signature(main).parameters[name].default
        kind = int if isinstance(default, bool) else type(default)  # --bf16 0
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{about} (default: {default!r})")
    main(**vars(parser.parse_args()))
