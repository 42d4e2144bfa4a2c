"""Several losses of one forward pass, each for parameters of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.torch_private import functorch_level_of
from looplib._core.tracing import differentiated, entered


def restrict_grad(loss: Tensor, params: Iterable[Tensor]) -> Tensor:
    """Restrict the gradient of a loss to some parameters. The value stays the same.

    >>> import looplib as ll, torch
    >>> from torch.nn.functional import softplus
    >>> model = torch.nn.ModuleDict({"generator": torch.nn.Linear(2, 3), "critic": torch.nn.Linear(3, 1)})
    >>> def loss_fn(model, batch):
    ...     noise, real = batch
    ...     of_fake, of_real = model["critic"](model["generator"](noise)), model["critic"](real)
    ...     critic_loss = softplus(of_fake).mean() + softplus(-of_real).mean()
    ...     generator_loss = softplus(-of_fake).mean()
    ...     loss = ll.losses.restrict_grad(critic_loss, model["critic"].parameters())
    ...     return loss + ll.losses.restrict_grad(generator_loss, model["generator"].parameters())
    >>> grad_fn = ll.make_grad_fn(model, loss_fn)
    >>> sorted(grad_fn(ll.init_state(model), (torch.randn(4, 2), torch.randn(4, 3))).grads)
    ['critic.bias', 'critic.weight', 'generator.bias', 'generator.weight']

    Use it to update two networks at once, both at their old weights, from one forward pass: their losses share what they
    compute, and each has a backward pass of its own, inside the loss function. Give each network its own optimizer by
    `ll.optim.partition`. To update them one after the other, as DCGAN does, make two steps instead.

    It composes with accumulation, loss scaling, clipping and DistributedDataParallel, whose hooks see the sum. A loss
    `Mean(total, weight)` takes it around its total.

    Args:
        loss: a scalar.
        params: the parameters that it trains, such as `model.critic.parameters()` of the model that the loss function
            is given.

    Raises:
        ValueError: the loss reaches none of them, as with FSDP2, whose graphs have gathered copies of the parameters; or it
            is called within a `torch.func` transform, such as that of per-sample gradients.
    """
    params = [param for param in params if param.requires_grad]
    check(
        functorch_level_of(loss) < 1,
        "restrict_grad takes gradients of its own, which torch.func (per-sample gradients) does not see: give each "
        "network a gradient function of its own, by trainable=",
    )
    reached: list[tuple[Tensor, Tensor]] = []
    if loss.requires_grad and params:
        again = bool(entered) and differentiated()
        grads = torch.autograd.grad(loss, params, retain_graph=True, create_graph=again, allow_unused=True)
        reached = [(param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None]
    check(
        reached or not torch.is_grad_enabled(),
        "restrict_grad got a loss that depends on none of these parameters: give parameters of the model that the loss "
        "function is given, model.part.parameters()",
    )
    if not reached:
        return loss.detach()
    restricted: Tensor = _Restricted.apply(loss.detach(), *(part for pair in reached for part in pair))  # type: ignore[no-untyped-call]
    return restricted


class _Restricted(torch.autograd.Function):
    """The value of a loss, with gradients that are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(*pairs[1::2])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None]
        for grad in ctx.saved_tensors:
            grads += [grad * seed.to(grad.dtype), None]
        return tuple(grads)
