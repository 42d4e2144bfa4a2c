"""GPT-2 small, a small MLP and a ResNet-20, with seeded batches that need no download."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import Block, Transformer, classify, next_token
from torch import Tensor, nn

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Task:
    """A model to train, with its batches.

    Attributes:
        make: makes the model, the same each time.
        blocks: class of its repeated blocks, for compilation by blocks.
        batches: a few batches on the device, used in turns.
        autocast: dtype of mixed precision, or None for float32.
        max_norm: of the gradients; None for no clipping.
        tokens: in a batch; 0 where samples are counted.
        flops: of one step, forward and backward; 0 if nobody asks.
    """

    make: Callable[[], nn.Module]
    blocks: type[nn.Module]
    loss_fn: LossFn
    batches: list[Any]
    autocast: torch.dtype | None = None
    max_norm: float | None = None
    tokens: int = 0
    flops: float = 0.0


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def text_tokens(count: int, vocabulary: int) -> Tensor:
    """Pairs of neighbouring bytes of Python's own library, as tokens: text whose frequencies are those of text."""
    data = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        data += path.read_bytes()
        if len(data) > 2 * count:
            break
    pairs = torch.frombuffer(data, dtype=torch.uint8)[: len(data) // 2 * 2].view(-1, 2).long()
    tokens = (pairs[:, 0] * 256 + pairs[:, 1]) % vocabulary
    return tokens.repeat(-(-count // len(tokens)))[:count]


def gpt2(device: torch.device, small: bool) -> Task:
    """GPT-2 small with 124 million parameters and 12 texts of 1,024 tokens; or a tiny one."""
    vocabulary, length, width, depth, heads, size = (
        (97, 16, 16, 2, 2, 2) if small else (50_304, 1024, 768, 12, 12, 12)
    )

    def make() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return Transformer(vocabulary, width, depth, length, heads).apply(_initialize)

    count = 4 * size * (length + 1)
    batches = text_tokens(count, vocabulary).view(4, size, length + 1).to(device)
    parameters = sum(p.numel() for p in make().parameters()) - length * width  # nanoGPT does not count the positions
    flops = size * length * (6 * parameters + 12 * depth * width * length)  # PaLM, appendix B, as in nanoGPT
    return Task(make, Block, next_token, [*batches], torch.bfloat16, 1.0, size * length, float(flops))


class Residual(nn.Module):
    """Two convolutions with batch norm beside an identity, which pads channels where their number doubles."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.first = nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, out.shape[1] - x.shape[1]))
        return F.relu(out + x)


def resnet(small: bool) -> nn.Module:
    """ResNet-20 for 32 x 32 pixels: three stages of three blocks with 16, 32 and 64 channels; or a single block.

    Source: He et al., 2016.
    """
    torch.manual_seed(0)
    widths = [4, 8] if small else [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Residual(inputs, outputs) for inputs, outputs in pairwise(widths)]
    stem = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def small_tasks(device: torch.device, small: bool) -> dict[str, Task]:
    """Models at batch 128 whose kernels are short, so that launching them rules."""
    size, side = (4, 8) if small else (128, 32)
    torch.manual_seed(1)
    labels = torch.randint(0, 10, (4, size), device=device)
    flat = torch.randn(4, size, 784, device=device)
    images = torch.randn(4, size, 3, side, side, device=device)
    return {
        f"MLP, batch {size}": Task(lambda: mlp().to(device), nn.Linear, classify, [*zip(flat, labels, strict=True)]),
        f"{'a tiny ResNet' if small else 'ResNet-20'}, batch {size}": Task(
            lambda: resnet(small).to(device), Residual, classify, [*zip(images, labels, strict=True)]
        ),
    }
