"""NEFTune: noise on embeddings during training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from looplib._core import modules as _modules
from looplib._core.checks import check_number
from looplib._core.records import check_kind, with_repr

R = TypeVar("R")


def neftune(
    loss_fn: Callable[[nn.Module, Any], R],
    embedding: str | Callable[[nn.Module], nn.Module],
    alpha: float = 5.0,
) -> Callable[[nn.Module, Any], R]:
    """NEFTune: add uniform noise to the embeddings during training, to reduce overfitting in fine-tuning.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
    >>> def loss_fn(model, tokens):
    ...     return ll.next_token_loss(model(tokens), tokens)
    >>> state, tokens = ll.init_state(model), torch.randint(0, 8, (2, 6))
    >>> noisy = ll.make_grad_fn(model, ll.contrib.neftune(loss_fn, "0"))(state, tokens)
    >>> plain = ll.make_grad_fn(model, loss_fn)(state, tokens)
    >>> bool((noisy.grads["1.bias"] != plain.grads["1.bias"]).any())
    True

    The noise is uniform within alpha / sqrt(length * width) of zero and uses the step's own random numbers (in a loop of your
    own, torch's global stream). There is
    none while the embedding is in eval mode. It is added by a forward hook that exists only during the loss.
    `ll.losses.recompute` restores the hook in the backward pass; torch's own checkpointing around the embedding does
    not, so the noise would be missing there.

    Args:
        loss_fn: any loss function that `make_grad_fn` accepts.
        embedding: name of the module, such as "transformer.wte", or a function model -> module. Its output has the
            shape (batch, length, width).
        alpha: strength of the noise; the paper uses 5, 10 and 15.

    Raises:
        TypeError, ValueError: `alpha` is no number, or below 0.
        ValueError: when called, if the model has no module of this name.

    Source: Jain et al., "NEFTune: Noisy embeddings improve instruction finetuning", 2023.
    """
    check_kind(loss_fn, "neftune", "loss_fn")
    check_number("alpha", alpha, lambda alpha: 0 <= alpha < math.inf, "give a strength of 0 or more, such as 5")

    def noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        # In float32, for the same bits as in transformers, and on the CPU, where nothing waits for it.
        bound = (alpha / torch.tensor(output.shape[-2] * output.shape[-1], device="cpu").sqrt()).item()
        return output + torch.zeros_like(output).uniform_(-bound, bound)

    def noisy(model: nn.Module, batch: Any) -> R:
        hook = _embedding(model, embedding).register_forward_hook(noise)
        try:
            return loss_fn(model, batch)
        finally:
            hook.remove()

    return with_repr(noisy, neftune, loss_fn, embedding, alpha=alpha)


def _embedding(model: nn.Module, embedding: str | Callable[[nn.Module], nn.Module]) -> nn.Module:
    if not isinstance(embedding, str):
        return embedding(model)
    modules = dict(_modules.named_modules(model))
    if embedding not in modules:
        known = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
        raise ValueError(
            f"this {type(model).__name__} has no module {embedding!r}; its embeddings are {known or 'none'}: give "
            "one of these, the name of another module, or a function model -> module"
        )
    return modules[embedding]
