"""Train a small Llama on a mesh of ranks: sharded data parallel (FSDP2) x tensor parallel x sequence parallel.

    python recipes/language_model_mesh.py                                   (one process)
    torchrun --nproc-per-node 4 recipes/language_model_mesh.py              (2 x 2 on this host, of a GPU or a core each)
    torchrun --nproc-per-node 4 recipes/language_model_mesh.py --tensor 1   (4 x 1: FSDP2 alone)

The model and its plan are those of distributed/tensor_parallelism/fsdp_tp_example.py in pytorch/examples, trained here
on the text of Python's help topics. --tensor ranks, which should be on one host, hold one copy of the model and see the
same samples: each has its share of the heads and of the MLP's hidden units, and in between its part of each sequence.
FSDP2 shards what a rank holds over the other dimension of the mesh, which divides the batches.

Ctrl-C, or SIGTERM from a scheduler, saves and stops after the step. Rerunning continues: on a mesh of the same shape
with the same bits; on another, or in one process, with the same numbers except for the rounding of sums.

Reached: 2.08 to 2.09 bits per byte on the held-out text with seeds 0 to 2, in 56 seconds on one core; with seed 0, 2.09
on 2 x 2 and on 4 x 1 ranks. In float64, the losses of 20 steps are those of one process, to nine digits.

To scale up, see language_model_fsdp.py and SCALE.md. On GPUs also loss_parallel, so that no rank has all logits.
"""

from __future__ import annotations

import argparse
import inspect
import math
import pydoc_data.topics
import re
import signal

import torch
import torch.distributed.tensor.parallel as tp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import looplib as ll


def main(
    steps: int = 300,  # updates
    batch_size: int = 16,  # windows in a step, of all ranks together
    tensor: int = 2,  # number of processes that hold one copy of the model; a divisor of heads and length
    length: int = 128,  # bytes that the model sees
    width: int = 128,  # of the hidden states
    depth: int = 4,  # number of blocks
    heads: int = 4,  # of the attention
    lr: float = 3e-3,  # learning rate at its peak, after the warmup
    dtype: str = "float32",  # of weights and activations: float32 or float64
    eval_every: int = 100,  # steps between two evaluations and checkpoints
    log_every: int = 20,  # steps between two lines of the log
    seed: int = 0,  # of the weights and the order
    directory: str = "runs/language_model_mesh",  # folder for log and checkpoints
) -> dict[str, float]:
    with ll.distributed.setup(required=False, output_dir=directory) as device:
        torch.manual_seed(seed)  # the same weights on all ranks
        model = Transformer(width, depth, heads).to(device, getattr(torch, dtype))
        if ll.distributed.launched():  # by torchrun
            if (ranks := ll.distributed.world_size()) % tensor or heads % tensor or length % tensor:
                raise SystemExit(f"--tensor {tensor} must divide the ranks, {heads} heads and length {length}")
            mesh = init_device_mesh(device.type, (ranks // tensor, tensor), mesh_dim_names=("data", "tensor"))
            ll.distributed.set_data_parallel_group(mesh["data"])
            parallelize(model, mesh)
        text = load_text()
        cut = len(text) * 9 // 10  # the last tenth is held out
        train_set, test_set = (ll.data.windows(part, length) for part in (text[:cut], text[cut:]))
        loader = ll.make_loader(train_set, batch_size=batch_size, seed=seed, drop_last=True, device=device)
        test_batches = ll.make_loader(test_set, batch_size=4 * batch_size, order=ll.data.sequential(), device=device)
        rate = ll.warmup_cosine(lr, warmup=steps // 6, total=steps)
        optimizer = ll.chain(ll.clip_by_global_norm(1.0), ll.optimizer(torch.optim.AdamW, lr=rate))
        train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
        eval_step = ll.make_eval_step(model, lambda model, batch: {"loss": loss_fn(model, batch)})

        ended, eval_now = ll.after_steps(steps), ll.every_n_steps(eval_every) | ll.after_steps(steps)
        log_now = ll.every_n_steps(log_every) | eval_now
        # Asked at each step, by a small message to all ranks. With hundreds, ask `ll.every_n_steps(10) & after_signal`.
        done = ended | ll.after_signal(signal.SIGTERM, signal.SIGINT)
        log = ll.tee(ll.jsonl(f"{directory}/log.jsonl"), ll.console())
        ckpt = ll.checkpoint_io(f"{directory}/checkpoints", keep_last=1)
        state = ckpt.restore(ll.init_state(model, optimizer, seed=seed, loader=loader))
        print(f"ranks that divide the data: {ll.distributed.world_size()}; step {state.step} of {steps}")

        while not done(state):
            for batch in loader(state):
                state, metrics = train_step(state, batch)
                if log_now(state):
                    log(state, ll.compute(ll.distributed.reduce(metrics), prefix="train/"))
                if eval_now(state):
                    log(state, ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
                    ckpt.save(state)
                if done(state):
                    break
        if not ended(state):
            ckpt.save(state)
            print(f"stopped at step {state.step} of {steps}; run the same command to continue")
            return {}

        scores = ll.evaluate(eval_step, state, test_batches)
        scores["bits_per_byte"] = scores["loss"] / math.log(2)
        print(f"{scores['bits_per_byte']:.3f} bits a byte on the held-out text")
        return scores


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Divide the layers over mesh["tensor"], and then what a process holds of them over mesh["data"], in place."""
    # Activations (batch, length, width) lie cut along the sequence, and attention and MLP gather them.
    gather = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {
        "embed": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm[12]": tp.SequenceParallel(),
        "blocks.*.attention": gather,
        "blocks.*.attention.[qkv]": tp.ColwiseParallel(),
        "blocks.*.attention.out": tp.RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp": gather,
        "blocks.*.mlp.w[13]": tp.ColwiseParallel(),
        "blocks.*.mlp.w2": tp.RowwiseParallel(output_layouts=Shard(1)),
        "norm": tp.SequenceParallel(),
        "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    tp.parallelize_module(model, mesh["tensor"], plan)
    for part in (*model.blocks, model):  # blocks are gathered one at a time; the root holds the rest
        fully_shard(part, mesh=mesh["data"])


def load_text() -> Tensor:
    """The bytes (n,) of Python's help topics."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: turn the pairs of x (batch, length, heads, size) by angles that grow with the position."""
    pairs = torch.arange(0, x.shape[3], 2, dtype=x.dtype, device=x.device)
    positions = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    angles = torch.outer(positions, 10000.0 ** (-pairs / x.shape[3]))[:, None]
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads  # of a head; a process has those of them that its part of q, k and v makes
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (rotate(q), rotate(k), v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        sizes = (width, hidden), (hidden, width), (width, hidden)
        self.w1, self.w2, self.w3 = (nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention, self.mlp = Attention(width, heads), MLP(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    # FSDP2 acts when the module is called, so the loss is in here, and loss_fn uses no parameters.
    def forward(self, tokens: Tensor, labels: Tensor) -> ll.Mean:
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        return ll.next_token_loss(logits, labels, shift=False)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ll.Mean:
    return model(*batch)  # type: ignore[no-any-return]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, about in re.findall(r"^    (\w+): .*?,  # (.*)", inspect.getsource(main), re.MULTILINE):
        default = inspect.signature(main).parameters[name].default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{about} (default: {default!r})")
    main(**vars(parser.parse_args()))
