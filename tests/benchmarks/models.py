"""Models of the benchmarks: a tiny MLP, a transformer and many small tensors, each with its loss and a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Pre-norm blocks, learned positions, the head tied to the embedding; 4.9 million parameters unless given."""

    def __init__(
        self, vocabulary: int = 512, width: int = 256, depth: int = 6, length: int = 128, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))
        return out


def classify(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def mlp(batch_size: int = 16) -> tuple[nn.Module, Callable[..., Tensor], Any]:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, classify, (torch.randn(batch_size, 32), torch.randint(0, 10, (batch_size,)))


def transformer() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    return Transformer(), next_token, torch.randint(0, 512, (32, 129))


def small_transformer() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    """The same model on a batch that is small for its size, so that the update takes a good part of the step."""
    return Transformer(), next_token, torch.randint(0, 512, (2, 65))


class Many(nn.Module):
    """Tensors whose forward pass is one concatenation, so that the update is most of the step."""

    def __init__(self, shapes: Iterable[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.weights)).square().mean() * x.mean()


def many(shapes: Iterable[tuple[int, ...]]) -> tuple[nn.Module, Callable[..., Tensor], Any]:
    return Many(shapes), lambda model, x: model(x), torch.ones(1)
