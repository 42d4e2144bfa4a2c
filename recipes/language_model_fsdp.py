"""Train the small language model of language_model.py with sharded weights: FSDP2, `fully_shard`.

    python recipes/language_model_fsdp.py                           (one process, no shards)
    torchrun --nproc-per-node 2 recipes/language_model_fsdp.py      (two on this host, of a GPU or a core each)
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST recipes/language_model_fsdp.py

Run the last command on each of 4 hosts, of which HOST is one. Each process holds its shard of every weight and moment,
and takes its samples of every batch; a block's weights are gathered when it runs. Batches, losses and weights are those
of a single process, except for the rounding of sums. runs/language_model_fsdp, a folder that all hosts must see, has
the log, the output of the other ranks, and checkpoints with the shards of all ranks. Ctrl-C, or SIGTERM from a
scheduler, saves and stops after the step (torchrun allows 30 s, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT, and ends with its own
traceback). Rerunning continues on any number of processes.

Reached with --steps 300 and seed 0, on the CPU in bfloat16: 3.26 bits per byte on the held-out text with 1 and with 2
processes, in 60 seconds on one core. See language_model.py for 2000 steps, and for CPUs without bfloat16. In float32,
small runs agree to 1e-6.

To scale up:

    more GPUs, more hosts   only the command; --batch_size is that of all ranks together, at least one sample each
    larger batches          --microbatches: a rank adds up their gradients, unsharded, and sends them once per step
    larger models           ll.losses.recompute(loss_fn, Block): recompute activations in the backward pass. If no
                            process can hold all weights even initially, create the model on torch.device("meta"),
                            and after fully_shard call model.to_empty(device=device) and fill in the weights
    mixed precision         --precision bfloat16: autocast, and on GPUs weights gathered in bfloat16
    tensor parallelism      language_model_mesh.py, with FSDP2 along one dimension of a mesh, and tensor and sequence
                            parallelism along the other

DeepSpeed's stages as options of fully_shard:

    ZeRO-1, ZeRO-2          reshard_after_forward=False; but weights are sharded between steps, and gathered
                            by each forward pass, while ZeRO gathers them after the update
    ZeRO-3, ZeRO-Offload    reshard_after_forward=True, the default of blocks; offload_policy=CPUOffloadPolicy()
    ZeRO++ hpZ              reshard_after_forward=8: the backward pass gathers weights from the 8 GPUs of the host
    MiCS, or HSDP           mesh=init_device_mesh(device.type, (hosts, 8), mesh_dim_names=("copies", "shards"))
"""

from __future__ import annotations

import argparse
import inspect
import math
import pydoc_data.topics
import re
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import looplib as ll


def main(
    steps: int = 2000,  # updates
    batch_size: int = 16,  # windows in a step, of all ranks together
    microbatches: int = 2,  # number per rank and step, processed one after the other to save memory
    length: int = 128,  # bytes that the model sees at most
    width: int = 128,  # of the hidden states
    depth: int = 4,  # number of blocks
    heads: int = 4,  # of the attention
    lr: float = 3e-3,  # learning rate at its peak, after the warmup
    warmup: int = 50,  # steps in which the learning rate rises
    weight_decay: float = 0.1,  # of the matrices
    max_norm: float = 1.0,  # gradients are scaled down to this norm
    precision: str = "bfloat16",  # bfloat16 or float32
    eval_every: int = 500,  # steps between two evaluations and checkpoints
    log_every: int = 20,  # steps between two lines of the log
    seed: int = 0,  # of the weights and the order
    directory: str = "runs/language_model_fsdp",  # folder for log and checkpoints
) -> dict[str, float]:
    folder = Path(directory)
    with ll.distributed.setup(required=False, output_dir=folder) as device:
        torch.manual_seed(seed)  # the same weights on all ranks
        model = Transformer(width, depth, heads, length).to(device)
        cast = precision == "bfloat16"
        if ll.distributed.launched():  # by torchrun
            mesh = init_device_mesh(device.type, (ll.distributed.world_size(),))
            dtype = torch.bfloat16 if cast and device.type != "cpu" else None
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for part in (*model.blocks, model):  # blocks are gathered one at a time; the root holds the rest
                fully_shard(part, mesh=mesh, mp_policy=policy)
        train_set, test_set = load_data(length)
        loader = ll.make_loader(train_set, batch_size=batch_size, seed=seed, drop_last=True, device=device)
        test_batches = ll.make_loader(test_set, batch_size=batch_size, order=ll.data.sequential(), device=device)
        rate = ll.warmup_cosine(lr, warmup=min(warmup, steps), total=steps)
        groups = [(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})]  # norms and biases
        optimizer = ll.chain(
            ll.clip_by_global_norm(max_norm),
            ll.optimizer(torch.optim.AdamW, lr=rate, betas=(0.9, 0.95), weight_decay=weight_decay, groups=groups),
        )
        grad_fn = ll.accumulate(ll.make_grad_fn(model, ll.autocast(loss_fn, enabled=cast)), microbatches)
        train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
        eval_step = ll.make_eval_step(model, ll.autocast(metric_fn, enabled=cast))

        ended, eval_now = ll.after_steps(steps), ll.every_n_steps(eval_every) | ll.after_steps(steps)
        log_now = ll.every_n_steps(log_every) | eval_now
        # Asked at each step, by a small message to all ranks. With hundreds, ask `ll.every_n_steps(10) & stop_now`.
        stop_now = ll.after_signal(signal.SIGTERM, signal.SIGINT)
        to_file = ll.jsonl(folder / "log.jsonl")
        log = ll.tee(to_file, ll.console())
        ckpt = ll.checkpoint_io(folder / "checkpoints", keep_last=1)
        state = ckpt.restore(ll.init_state(model, optimizer, seed=seed, loader=loader))
        print(f"{ll.distributed.world_size()} ranks, step {state.step} of {steps}")
        if done := ended(state):
            print(f"already finished at step {state.step}; delete {directory} to start again")

        began, first, window, bar = time.perf_counter(), state.samples, ll.Window(), ll.progress(loader, leave=False)
        while not done:
            for batch in bar(state):
                state, metrics = train_step(state, batch)
                bar.show(metrics)
                window = window.add(metrics)
                if (stopped := stop_now(state)) or log_now(state):  # a checkpoint holds no window, so log before
                    speed = {"tokens_per_second": (state.samples - first) * length / (time.perf_counter() - began)}
                    to_file(state, ll.compute(ll.distributed.reduce(window.metrics()), prefix="train/") | speed)
                    window = ll.Window()
                if eval_now(state):
                    log(state, ll.evaluate(eval_step, state, test_batches, prefix="eval/", progress=True))
                    ckpt.save(state)
                if done := stopped or ended(state):
                    break
        if not ended(state):
            ckpt.save(state)
            print(f"stopped at step {state.step} of {steps}; run the same command to continue")
            return {}

        seconds = time.perf_counter() - began
        scores = ll.evaluate(eval_step, state, test_batches, progress=True)
        scores["bits_per_byte"] = scores["loss"] / math.log(2)
        print(f"{scores['bits_per_byte']:.3f} bits a byte on the held-out text, {scores['accuracy']:.1%} guessed")
        print(f"{seconds:.0f} s, {(state.samples - first) * length / seconds:,.0f} tokens a second")
        return scores


def load_data(length: int) -> tuple[TensorDataset, TensorDataset]:
    """Windows (n, length + 1) of bytes, as int64; each starts with the last byte of the previous one."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    train, test = (part.unfold(0, length + 1, length) for part in (data[:cut], data[cut:]))
    return TensorDataset(train), TensorDataset(test)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for table in (self.bytes, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.bytes.weight

    # FSDP2 acts when the module is called, so head and loss are in here, and loss_fn uses no parameters.
    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        """Logits (batch, length, 256), or with labels (batch, length) the loss, without all logits at once."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.bytes(tokens) + self.positions(positions)))
        return self.head(x) if labels is None else ll.next_token_loss(x, labels, head=self.head, shift=False)


def loss_fn(model: nn.Module, batch: tuple[Tensor]) -> Any:
    return model(batch[0][:, :-1], batch[0][:, 1:])


def metric_fn(model: nn.Module, batch: tuple[Tensor]) -> dict[str, ll.Mean]:
    logits, labels = model(batch[0][:, :-1]), batch[0][:, 1:]
    right = (logits.argmax(-1) == labels).sum()
    return {"loss": ll.next_token_loss(logits, labels, shift=False), "accuracy": ll.Mean(right, labels.numel())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, about in re.findall(r"^    (\w+): .*?,  # (.*)", inspect.getsource(main), re.MULTILINE):
        default = inspect.signature(main).parameters[name].default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{about} (default: {default!r})")
    main(**vars(parser.parse_args()))
