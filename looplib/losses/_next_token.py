"""Language-model losses.

The average is over tokens, so the loss is returned as a sum and a count, which `accumulate` and the ranks add up
before dividing. The logits of a whole vocabulary take most of a step's memory. If the loss is given the output layer
(the head), it computes them for one chunk of tokens at a time, together with that chunk's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from looplib._core.checks import check
from looplib.metrics._mean import Mean


def next_token_loss(
    inputs: Tensor,
    labels: Tensor,
    *,
    head: nn.Linear | Tensor | None = None,
    shift: bool = True,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
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

    Return the result from your `loss_fn`. `accumulate` then gives the gradient of the mean over all tokens, even if
    microbatches have different token counts. The softmax is computed in float32 (float64 for float64 inputs), under
    autocast too.

    With `head`, only one chunk's logits are in memory at a time. Gradients are computed together with the loss,
    unless none are needed, and `backward` only scales them. This takes three times the memory of one chunk's logits
    (they, their softmax and their gradient), and that of the head's gradient in float32. The result can be
    differentiated only once, and not with `torch.func`.

    Args:
        inputs: logits of shape (batch, length, vocabulary), or with `head`, hidden states of shape (batch, length,
            width).
        labels: int64 of shape (batch, length), usually the input tokens themselves.
        head: an `nn.Linear`, or a weight of shape (vocabulary, width). For tied embeddings, pass the embedding's weight.
        shift: if True, position t predicts label t + 1, as in transformers. Pass False if the labels are already
            shifted.
        ignore_index: label to ignore, such as that of padding.
        label_smoothing: fraction of the target, from 0 to 1, that is spread evenly over the vocabulary.
        z_loss: coefficient of the squared log of the softmax's denominator, added for each token to keep logits
            small.
        chunk_size: number of positions whose logits are computed at a time, with `head`.

    Raises:
        ValueError: shapes or dtypes do not match, or an argument is out of range.
        TypeError: `head` is neither a Linear nor a tensor.

    Source: chunking as in Hsu et al., "Liger kernel", 2024; z-loss from Chowdhery et al., "PaLM", 2022, section 5.
    """
    weight, bias = _weight_and_bias(head)
    _check_shapes(inputs, labels, weight)
    check(
        0 <= label_smoothing <= 1 and z_loss >= 0 and chunk_size >= 1,
        f"label_smoothing={label_smoothing}, z_loss={z_loss}, chunk_size={chunk_size}: smoothing is from 0 to 1, "
        "z_loss at least 0, and a chunk at least 1 position",
    )
    if shift:  # shift the labels, since shifting the logits would copy them
        labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    tokens, labels = inputs.flatten(0, 1), labels.flatten()
    terms: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    if weight is None:
        with torch.autocast(tokens.device.type, enabled=False):
            total = _of_logits(tokens.to(_wide(tokens)), labels, **terms)
    else:
        differentiate = torch.is_grad_enabled()  # not known within the function
        total = _ChunkedLoss.apply(tokens, weight, bias, labels, terms, chunk_size, differentiate)  # type: ignore[no-untyped-call]
    return Mean(total, (labels != ignore_index).sum())


def _weight_and_bias(head: Any) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(head, nn.Linear):
        return head.weight, head.bias
    advice = "give a torch.nn.Linear, or a weight (vocabulary, width)"
    check(isinstance(head, Tensor | None), f"head is a {type(head).__name__}; {advice}", TypeError)
    return head, None


def _check_shapes(inputs: Tensor, labels: Tensor, weight: Tensor | None) -> None:
    shape, last = tuple(inputs.shape), "vocabulary" if weight is None else "width"
    floats = inputs.dim() == 3 and inputs.is_floating_point()
    check(floats, f"inputs have shape {shape} and dtype {inputs.dtype}; give floats (batch, length, {last})")
    check(
        labels.shape == shape[:2] and labels.dtype == torch.int64,
        f"labels have shape {tuple(labels.shape)} and dtype {labels.dtype}; inputs of shape {shape} need {shape[:2]} and "
        "torch.int64",
    )
    if weight is not None:
        head = tuple(weight.shape)
        wanted = f"hidden states of shape {shape} need (vocabulary, {shape[2]})"
        check(head[1:] == shape[2:], f"the head's weight has shape {head}; {wanted}")


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _of_logits(logits: Tensor, labels: Tensor, *, ignore_index: int, label_smoothing: float, z_loss: float) -> Tensor:
    total = F.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    if z_loss:
        squares = logits.logsumexp(-1).square()
        total = total + z_loss * squares.masked_fill(labels == ignore_index, 0).sum()
    return total


def _grads(needs: Sequence[bool], tensors: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
    """Tensors for the requested gradients of hidden states, which are written once, and of weight and bias."""
    makers = (torch.empty_like, torch.zeros_like, torch.zeros_like)
    rows = zip(needs, makers, tensors, dtypes, strict=True)
    return [make(tensor, dtype=dtype) if need else None for need, make, tensor, dtype in rows]


def _add_gradients(
    grads: list[Tensor | None], rows: slice, by_logits: Tensor, hidden: Tensor, weight: Tensor
) -> None:
    """Add a chunk's contribution to the requested gradients of hidden states, weight and bias."""
    of_hidden, of_weight, of_bias = grads
    if of_bias is not None:
        of_bias += by_logits.sum(0)
    by_logits = by_logits.to(hidden.dtype)
    if of_hidden is not None:
        torch.mm(by_logits, weight, out=of_hidden[rows])
    if of_weight is None:
        return
    if hidden.dtype == of_weight.dtype:
        of_weight.addmm_(by_logits.T, hidden)
    else:
        of_weight += by_logits.T @ hidden


class _ChunkedLoss(torch.autograd.Function):
    """Summed loss of hidden states (tokens, width) under a head, with its gradients, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        terms: dict[str, Any],
        chunk_size: int,
        differentiate: bool,
    ) -> Tensor:
        needs = ctx.needs_input_grad[:3] if differentiate else (False, False, False)
        device, wide = hidden.device, _wide(hidden)
        low = torch.is_autocast_enabled(device.type) and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device.type) if low else hidden.dtype
        ctx.dtypes = [getattr(tensor, "dtype", None) for tensor in (hidden, weight, bias)]
        total = torch.zeros((), dtype=wide, device=device)
        grads = _grads(needs, (hidden, weight, bias), (dtype, wide, wide))
        with torch.autocast(device.type, enabled=False):
            # Cast once instead of in each chunk, as autocast would.
            weight, bias = (weight.to(dtype), None if bias is None else bias.to(dtype)) if low else (weight, bias)
            for begin in range(0, len(hidden), chunk_size):
                rows = slice(begin, begin + chunk_size)
                x = hidden[rows].to(dtype)
                logits = F.linear(x, weight, bias).to(wide).requires_grad_(any(needs))
                with torch.set_grad_enabled(any(needs)):
                    loss = _of_logits(logits, labels[rows], **terms)
                total += loss.detach()
                if any(needs):
                    _add_gradients(grads, rows, torch.autograd.grad(loss, logits)[0], x, weight)
                del logits, loss  # free these logits before computing the next chunk's
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            None if grad is None else (grad * scale).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *grads, None, None, None, None
