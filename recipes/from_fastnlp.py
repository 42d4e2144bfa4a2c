"""fastNLP's Trainer with all its features, as a loop: each setting has the name that fastNLP gives it.

    pip install scikit-learn
    python recipes/from_fastnlp.py                           (one process)
    torchrun --nproc-per-node 2 recipes/from_fastnlp.py      (two, of a GPU or a core each)

Ctrl-C or SIGTERM stops; rerunning continues with the next sample, on any number of processes. Reached: 97.2% to 97.8%
of the 360 held-out digits with seeds 0 to 4, which also chose the weights; 5 seconds each on one core.
"""

from __future__ import annotations

import argparse
import inspect
import re
import signal
from functools import partial
from itertools import islice

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import looplib as ll


def main(
    n_epochs: int = 40,  # passes over the training set
    batch_size: int = 64,  # samples of an update, of all ranks together
    accumulation_steps: int = 2,  # microbatches of an update
    fp16: str = "bfloat16",  # bfloat16, float16 (with a loss scale) or float32
    lr: float = 3e-3,  # learning rate at its peak
    warmup: float = 0.1,  # share of all updates: TorchWarmupCallback(warmup, "linear")
    clip_value: float = 1.0,  # norm: TorchGradClipCallback(clip_value, "norm")
    evaluate_every: int = 20,  # updates between two evaluations
    topk: int = 2,  # checkpoints: CheckpointCallback(topk=topk, last=True), and LoadBestModelCallback()
    patience: int = 15,  # evaluations: EarlyStopCallback(patience=patience)
    overfit_batches: int = 0,  # number of batches to overfit, as a check; 0 for all
    dropout: float = 0.2,  # probability of dropping a feature
    seed: int = 0,  # of the weights, the order and the dropout
    folder: str = "runs/from_fastnlp",  # for log and checkpoints
) -> dict[str, float]:
    torch.set_num_threads(1)
    with ll.distributed.setup(required=False, output_dir=folder) as device:
        torch.manual_seed(seed)  # the same weights on all ranks
        model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 10))
        model = DistributedDataParallel(model.to(device)) if ll.distributed.launched() else model.to(device)
        train_set, test_set = load_data()
        loader = ll.make_loader(train_set, batch_size=batch_size, seed=seed, device=device)
        test_batches = ll.make_loader(test_set, batch_size=256, order=ll.data.sequential(), device=device)
        if overfit_batches:  # whole batches, of which each rank takes its samples
            undivided = ll.make_loader(train_set, batch_size=batch_size, seed=seed, divide=False)
            few = list(islice(undivided(ll.TrainState()), overfit_batches))
            loader = test_batches = ll.make_loader(few, batch_size=None, order=ll.data.sequential(), device=device)

        half = torch.float16 if fp16 == "float16" else torch.bfloat16
        cast = partial(ll.autocast, dtype=half, enabled=fp16 != "float32")
        steps = n_epochs * len(loader)
        rate = ll.schedules.warmup_linear(lr, warmup=warmup, total=steps)
        scale = [ll.optim.dynamic_loss_scale()] if fp16 == "float16" else []
        adamw = ll.optimizer(torch.optim.AdamW, lr=rate, weight_decay=0.1)
        optimizer = ll.chain(*scale, ll.clip_by_global_norm(clip_value), adamw)
        grad_fn = ll.accumulate(ll.make_grad_fn(model, cast(loss_fn)), accumulation_steps)
        train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
        eval_step = ll.make_eval_step(model, cast(metric_fn))

        ended = ll.after_epochs(n_epochs) | ll.early_stopping(patience)
        done = ended | ll.after_signal(signal.SIGINT, signal.SIGTERM)
        eval_now, save_now = ll.every_n_steps(evaluate_every) | ll.after_epochs(n_epochs), ll.at_epoch_end()
        log = ll.tee(ll.jsonl(f"{folder}/log.jsonl"), ll.console())
        best = ll.predicates.BestSoFar("eval/accuracy")
        ckpt = ll.checkpoint_io(f"{folder}/checkpoints", keep_last=1, keep_best=topk, monitor=best)
        first = ll.init_state(model, optimizer, seed=seed, loader=loader, extra={"best": best})
        state = ckpt.restore(first)
        finished = f"already finished at step {state.step}; delete {folder} to start again"
        print(finished if ended(state) else f"step {state.step} of {steps}")

        ll.evaluate(eval_step, state, test_batches, max_batches=2)  # num_eval_sanity_batch=2
        bar = ll.progress(loader, leave=False, disable=None)
        while not done(state):
            for batch in bar(state):
                state, metrics = train_step(state, batch)
                if eval_now(state):
                    scores = ll.evaluate(eval_step, state, test_batches, prefix="eval/")
                    log(state, ll.compute(ll.distributed.reduce(metrics), prefix="train/") | scores)
                    ckpt.save(state := ll.update_best(state, scores), scores)
                elif save_now(state):
                    ckpt.save(state)
                if done(state):
                    break
        if not ended(state):
            ckpt.save(state)
            print(f"stopped at step {state.step} of {steps}; run the same command to continue")
            return {}
        state = ckpt.restore(state, which="best")
        scores = ll.evaluate(eval_step, state, test_batches)
        print(f"{scores['accuracy']:.2%} right, by the weights of step {state.step}")
        return scores


def load_data() -> tuple[TensorDataset, TensorDataset]:
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    train, test = train_test_split(range(len(y)), test_size=0.2, stratify=y, random_state=0)
    return TensorDataset(x[train].float() / 16, y[train]), TensorDataset(x[test].float() / 16, y[test])


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def metric_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, object]:
    logits = model(batch[0])
    return {"loss": nn.functional.cross_entropy(logits, batch[1]), "accuracy": ll.accuracy(logits, batch[1])}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, about in re.findall(r"^    (\w+): .*?,  # (.*)", inspect.getsource(main), re.MULTILINE):
        default = inspect.signature(main).parameters[name].default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{about} (default: {default!r})")
    main(**vars(parser.parse_args()))
