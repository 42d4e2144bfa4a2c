"""Several losses of one forward pass, each for parameters of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core.checks import check, named
from looplib._core.torch_private import functorch_level_of


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

    It composes with accumulation, loss scaling, clipping and DistributedDataParallel, whose hooks see the sum. For a
    loss `Mean(total, weight)`, put it around the total.

    Args:
        loss: a scalar.
        params: the parameters that it trains, such as `model.critic.parameters()` of the model that the loss function
            is given.

    Raises:
        ValueError: the loss has no gradient; in the backward pass, it reaches none of them, as with FSDP2, whose graphs have
            gathered copies of the parameters; or it is called within a `torch.func` transform, such as that of per-sample
            gradients.
    """
    check(
        not isinstance(params, nn.Module),
        f"restrict_grad got {named(params)} as parameters: give module.parameters()",
        TypeError,
    )
    params = [param for param in params if param.requires_grad]
    check(
        functorch_level_of(loss) < 1,
        "restrict_grad takes gradients of its own, which torch.func (per-sample gradients) does not see: give each "
        "network a gradient function of its own, by trainable=",
    )
    if not torch.is_grad_enabled():
        return loss
    check(loss.requires_grad and params, _UNREACHED)
    restricted: Tensor = _Restricted.apply(loss.detach(), _Graph(loss), *params)  # type: ignore[no-untyped-call]
    return restricted


_UNREACHED = (
    "restrict_grad got a loss that depends on none of these parameters: give parameters of the model that the loss "
    "function is given, model.part.parameters()"
)


class _Graph(NamedTuple):
    """A loss with its graph, which autograd is not to see as an input."""

    loss: Tensor


class _Restricted(torch.autograd.Function):
    """The value of a loss, with a backward pass of its own to some parameters.

    It runs within the backward pass of the sum, and so from a loss that is scaled already: in float16, small gradients
    would be zero without that.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, graph: _Graph, *params: Tensor) -> Tensor:
        ctx.graph, ctx.params = graph, params
        return value.clone()

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.autograd.grad(
            ctx.graph.loss,
            ctx.params,
            seed,
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        check(any(grad is not None for grad in grads), _UNREACHED)
        return None, None, *grads
