"""Language-model losses.

The average is over tokens, so the loss is returned as a sum and a count, which `accumulate` and the ranks add up
before dividing. The logits of a whole vocabulary take most of a step's memory. If the loss is given the output layer
(the head), it computes them for one chunk of tokens at a time, together with that chunk's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from looplib._core.checks import check, check_count, check_number, check_type
from looplib.metrics import Mean


def next_token_loss(
    inputs: Tensor,
    labels: Tensor,
    *,
    head: nn.Linear | Tensor | None = None,
    shift: bool = True,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int = 1024,
) -> Mean:
    """Next-token cross-entropy for language models, as a sum over tokens and their number.

    >>> import looplib as ll, torch
    >>> tokens, embed, head = torch.tensor([[3, 1, 2], [0, 2, -100]]), torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4)
    >>> hidden = embed(tokens.clamp(min=0))
    >>> loss = ll.next_token_loss(head(hidden), tokens)  # of logits
    >>> loss.weight
    tensor(3)
    >>> torch.testing.assert_close(ll.next_token_loss(hidden, tokens, head=head), loss)  # never all logits at once

    Return the result from your `loss_fn`, or in a loop of your own, call `loss.compute().backward()`. `accumulate`
    then gives the gradient of the mean over all tokens, even if microbatches have different token counts, or none. If no
    token of a whole step counts, its gradient is zero and its loss is 0 / 0, NaN in the log. The softmax is computed in
    float32 (float64 for float64 inputs), under autocast too.

    With `head`, only one chunk's logits are in memory at a time. Gradients are computed together with the loss,
    unless none are needed, and `backward` only scales them. This takes three times the memory of one chunk's logits
    (they, their softmax and their gradient), and that of the head's gradient, once in float32 and once for the chunk in
    the head's dtype. The result can be differentiated only once, and not with `torch.func`.

    Args:
        inputs: logits of shape (batch, length, vocabulary), or with `head`, hidden states of shape (batch, length,
            width).
        labels: int64 of shape (batch, length), usually the input tokens themselves.
        head: an `nn.Linear`, or a weight of shape (vocabulary, width). For tied embeddings, pass the embedding's weight.
        shift: if True, position t predicts label t + 1, as in transformers. Pass False if the labels are already
            shifted.
        ignore_index: label to ignore, such as that of padding.
        label_smoothing: fraction of the target, from 0 to 1, that is spread evenly over the vocabulary.
        chunk_size: number of positions whose logits are computed at a time, with `head`.

    Raises:
        ValueError: shapes or dtypes of inputs and labels do not match, or an argument is out of range.
        TypeError: inputs or labels are not tensors; or `head` is neither a Linear nor a tensor, or does not compute what
            `nn.Linear` computes, in a forward pass or in hooks of its own.

    Source: chunking as in Hsu et al., "Liger kernel", 2024.
    """
    weight, bias = _weight_and_bias(head)
    _check_shapes(inputs, labels)
    if weight is not None and weight.shape[1:] != inputs.shape[2:]:
        raise ValueError(
            f"the head has a weight of shape {tuple(weight.shape)}; inputs of shape {tuple(inputs.shape)} need "
            f"(vocabulary, {inputs.shape[2]})"
        )
    check_count("chunk_size", chunk_size)
    advice = "give a fraction from 0 to 1"
    check_number("label_smoothing", label_smoothing, lambda fraction: 0 <= fraction <= 1, advice)
    if shift:  # shift the labels, since shifting the logits would copy them
        labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    tokens, labels = inputs.flatten(0, 1), labels.flatten()
    loss_of = partial(F.cross_entropy, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing)
    if weight is None:
        total = loss_of(tokens.to(_wide(tokens)), labels)
    else:
        differentiate = torch.is_grad_enabled()  # not known within the function
        total = _ChunkedLoss.apply(tokens, weight, bias, labels, loss_of, chunk_size, differentiate)  # type: ignore[no-untyped-call]
    return Mean(total, (labels != ignore_index).sum())


def _weight_and_bias(head: Any) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(head, nn.Linear):
        hooks = vars(head)["_forward_pre_hooks"], vars(head)["_forward_hooks"]
        check(
            type(head).forward is nn.Linear.forward and not any(hooks),
            f"head is a {type(head).__name__} with a forward pass or forward hooks of its own, which would not run, since "
            "only its weight and bias are used: leave out head, and give the logits, head(hidden)",
            TypeError,
        )
        return head.weight, head.bias
    advice = "give a torch.nn.Linear, or a weight (vocabulary, width)"
    check(isinstance(head, Tensor | None), f"head is a {type(head).__name__}; {advice}", TypeError)
    return head, None


def _check_shapes(inputs: Tensor, labels: Tensor) -> None:
    check_type("inputs are", inputs, Tensor, "give a tensor, such as the logits of a model's output")
    check_type("labels are", labels, Tensor, "give int64 labels (batch, length)")
    shape = tuple(inputs.shape)
    floats = inputs.dim() == 3 and inputs.is_floating_point()
    check(
        floats,
        f"inputs have shape {shape} and dtype {inputs.dtype}; give floats (batch, length, vocabulary), or with head=, "
        "(batch, length, width)",
    )
    check(
        labels.shape == shape[:2] and labels.dtype == torch.int64,
        f"labels have shape {tuple(labels.shape)} and dtype {labels.dtype}; inputs of shape {shape} need {shape[:2]} and "
        "torch.int64",
    )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _ChunkedLoss(torch.autograd.Function):
    """Summed loss of hidden states (tokens, width) under a head, with its gradients, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        chunk_size: int,
        differentiate: bool,
    ) -> Tensor:
        needs = [need and differentiate for need in ctx.needs_input_grad[:3]]
        wide = _wide(hidden)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        # The head's gradients add up over chunks; those of hidden states are written once.
        of_hidden = torch.zeros_like(hidden) if needs[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
        weight = weight.detach().requires_grad_(needs[1])
        bias = None if bias is None else bias.detach().requires_grad_(needs[2])
        for begin in range(0, len(hidden), chunk_size):
            rows = slice(begin, begin + chunk_size)
            with torch.set_grad_enabled(any(needs)):
                x = hidden[rows].detach().requires_grad_(needs[0])
                loss = loss_of(F.linear(x, weight, bias).to(wide), labels[rows])
            total += loss.detach()
            of_chunk = None if of_hidden is None else of_hidden[rows]
            pairs: Any = ((x, of_chunk), (weight, of_weight), (bias, of_bias))
            wanted = [(leaf, grad) for leaf, grad in pairs if grad is not None]
            if wanted:
                parts = torch.autograd.grad(loss, [leaf for leaf, _ in wanted])
                for (_, grad), part in zip(wanted, parts, strict=True):
                    grad += part
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else grad * scale for grad in ctx.saved_tensors)
        return *grads, None, None, None, None  # autograd casts them to the dtypes of the inputs
