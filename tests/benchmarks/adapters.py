"""Many LoRA adapters on one frozen base: one step of all members, and a raw loop over them one after another.

    python tests/benchmarks/adapters.py                    (an idle machine; about 2 minutes)
    python tests/benchmarks/adapters.py --dry-run          (a tiny model; the figures mean nothing)

Every contender trains the same 8 adapters by AdamW, each with its own rate, on the same batch. Before they are timed, the
members must have the weights of as many single runs, in float64. The raw loop has one base model, whose adapters share it, as
peft's do. The claim to check is that the compiled step takes at most 0.45 of the loop. The memory is that of the state: bytes
of distinct storages.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from harness import Mebibytes, Report, Step, in_turns, options_of, parser
from loops import in_order, stepping
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import looplib as ll

MEMBERS, RANK = 8, 8
SIZES = {"width 128, 4 layers, batch 16": (128, 4, 16), "width 512, 4 layers, batch 16": (512, 4, 16)}


class Adapted(nn.Module):
    """A linear layer with a low-rank update, as LoRA adds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, RANK, bias=False), nn.Linear(RANK, width, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.base(x) + self.b(self.a(x))
        return hidden.tanh()


def model_of(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted(width) for _ in range(depth)])


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) - batch).square().mean()
    return loss


def rates() -> list[float]:
    return [1e-4 * 2**member for member in range(MEMBERS)]


def raw_loop(width: int, depth: int, batch: Tensor) -> Step:
    base = model_of(width, depth)
    shared = {id(p): p for p in base.parameters() if not p.requires_grad}
    steps = []
    for lr in rates():
        model = model_of(width, depth)
        for layer, of_base in zip(model, base, strict=True):
            layer.base = of_base.base
        trained = [p for p in model.parameters() if id(p) not in shared]
        optimizer = torch.optim.AdamW(trained, lr=lr, fused=True)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        steps.append(step)
    return in_order(steps)


def stacked(model: nn.Module, batch: Tensor, compiled: bool) -> tuple[Step, ll.TrainState]:
    optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.transforms.per_member(rates()))
    train_step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True))
    train_step = ll.compile_step(train_step) if compiled else train_step
    stack = ll.transforms.stack_states([ll.init_state(model, optimizer)] * MEMBERS, same_seeds=True)
    return stepping(train_step, stack, batch), ll.copy_state(stack)


def memory(state: ll.TrainState) -> int:
    """Bytes behind the tensors of a state, in which members may share some."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def check_agreement(width: int, depth: int, batch: Tensor) -> None:
    """Raise unless the members reach the weights of as many single runs, in float64.

    Float32 would need a tolerance that says little: Adam divides a gradient by its own size, so where one is nearly zero, its
    rounding error moves the weight by a visible part of the rate (1e-4 at a width of 512 and a rate of 0.0064).
    """
    batch = batch.double()
    step, _ = stacked(model_of(width, depth).double(), batch, False)
    for _ in range(3):
        last: Any = step()
    for member, lr in zip(ll.transforms.unstack_states(last), rates(), strict=True):
        model = model_of(width, depth).double()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        for _ in range(3):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        torch.testing.assert_close(dict(member.params), dict(model.named_parameters()), rtol=0, atol=1e-10)


def main(options: argparse.Namespace) -> int:
    report = Report("adapters", options, "AdamW")
    sizes = {"width 16, 2 layers, batch 4": (16, 2, 4)} if options.dry_run else SIZES
    for row, seconds in report.rows(list(sizes)):
        width, depth, size = sizes[row]
        batch, began = torch.randn(size, width, generator=torch.Generator().manual_seed(1)), time.perf_counter()
        with report.attempt(row):
            check_agreement(width, depth, batch)
            steps: dict[str, Step] = {"raw loop over the members": raw_loop(width, depth, batch)}
            steps["all members in one step"], stack = stacked(model_of(width, depth), batch, False)
            if not options.dry_run:
                steps["all members, compiled"], _ = stacked(model_of(width, depth), batch, True)
            for step in steps.values():
                for _ in range(2):  # which compile
                    step()
            times = in_turns(steps, max(0.0, seconds - (time.perf_counter() - began)))
            report.compare(row, times, "raw loop over the members", "time of a step")
            alone = ll.init_state(model_of(width, depth), ll.optimizer(torch.optim.AdamW, lr=1e-3))
            cells = {
                "stack": Mebibytes(memory(stack) / 2**20),
                "as many states": Mebibytes(MEMBERS * memory(alone) / 2**20),
            }
            report.add(row, cells, "memory of the state")
    return report.close()


if __name__ == "__main__":
    sys.exit(main(options_of(parser(__doc__, 120.0))))
