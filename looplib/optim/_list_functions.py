"""Updates of torch's classes on lists of tensors, with the bits of the class's default.

On a CPU the default is a loop over the parameters. torch's own functions for lists round differently in some classes
(NAdam, RAdam, ASGD), and sort the lists again at each update. These perform the loop's operations in its order, each on
all parameters at once. The counts of updates are increased before the call. `agrees` compares them with the class.

They repeat torch's arithmetic because its own functions take longer, even without their checks (`eager_step`): a step
of an MLP with RMSprop takes 9% more instructions, with Adam and `foreach=True` 13%, and with NAdam 21%.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private as lists
from looplib.optim._recipe import Recipe, values_at

Values = Mapping[str, Any]
Entries = Mapping[str, Any]
Tensors = Sequence[Tensor]
Kernel = Callable[[Values, Tensors, Tensors, Entries], None]

_number, _norm = Tensor.item, torch.linalg.vector_norm


def _direction(values: Values, params: Tensors, grads: Tensors) -> Tensors:
    """The gradients, with the sign for `maximize` and with weight decay."""
    if values["maximize"]:
        grads = lists.foreach_neg(grads)
    if values["weight_decay"] != 0:
        grads = lists.foreach_add(grads, params, alpha=values["weight_decay"])
    return grads


def _decayed(values: Values, params: Tensors, grads: Tensors) -> Tensors:
    """The same for classes that may decay the weights themselves."""
    if values["weight_decay"] == 0 or not values["decoupled_weight_decay"]:
        return _direction(values, params, grads)
    lists.foreach_mul_(params, 1 - values["lr"] * values["weight_decay"])
    return lists.foreach_neg(grads) if values["maximize"] else grads


def _moments(values: Values, grads: Tensors, entries: Entries) -> None:
    beta1, beta2 = values["betas"]
    lists.foreach_lerp_(entries["exp_avg"], grads, 1 - beta1)
    lists.foreach_mul_(entries["exp_avg_sq"], beta2)
    lists.foreach_addcmul_(entries["exp_avg_sq"], grads, grads, 1 - beta2)


def _sgd(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    grads, momentum = _direction(values, params, grads), values["momentum"]
    if momentum != 0:
        buffers = entries["momentum_buffer"]
        lists.foreach_mul_(buffers, momentum)
        lists.foreach_add_(buffers, grads, alpha=1 - values["dampening"])
        grads = lists.foreach_add(grads, buffers, alpha=momentum) if values["nesterov"] else buffers
    lists.foreach_add_(params, grads, alpha=-values["lr"])


def _adam(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    (beta1, beta2), count = values["betas"], _number(entries["step"][0])
    _moments(values, _decayed(values, params, grads), entries)
    squares = entries["exp_avg_sq"]
    if values["amsgrad"]:
        lists.foreach_maximum_(entries["max_exp_avg_sq"], squares)
        squares = entries["max_exp_avg_sq"]
    roots = lists.foreach_sqrt(squares)
    lists.foreach_div_(roots, (1 - beta2**count) ** 0.5)
    lists.foreach_add_(roots, values["eps"])
    lists.foreach_addcdiv_(params, entries["exp_avg"], roots, -(values["lr"] / (1 - beta1**count)))


def _rmsprop(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    alpha, lr, squares = values["alpha"], values["lr"], entries["square_avg"]
    grads = _direction(values, params, grads)
    lists.foreach_mul_(squares, alpha)
    lists.foreach_addcmul_(squares, grads, grads, 1 - alpha)
    if values["centered"]:
        means = entries["grad_avg"]
        lists.foreach_lerp_(means, grads, 1 - alpha)
        roots = lists.foreach_addcmul(squares, means, means, -1)
        lists.foreach_sqrt_(roots)
    else:
        roots = lists.foreach_sqrt(squares)
    lists.foreach_add_(roots, values["eps"])
    if values["momentum"] > 0:
        buffers = entries["momentum_buffer"]
        lists.foreach_mul_(buffers, values["momentum"])
        lists.foreach_addcdiv_(buffers, grads, roots)
        lists.foreach_add_(params, buffers, alpha=-lr)
    else:
        lists.foreach_addcdiv_(params, grads, roots, -lr)


def _adadelta(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    rho, eps = values["rho"], values["eps"]
    squares, sums = entries["square_avg"], entries["acc_delta"]
    grads = _direction(values, params, grads)
    lists.foreach_mul_(squares, rho)
    lists.foreach_addcmul_(squares, grads, grads, 1 - rho)
    roots, deltas = lists.foreach_add(squares, eps), lists.foreach_add(sums, eps)
    lists.foreach_sqrt_(roots)
    lists.foreach_sqrt_(deltas)
    lists.foreach_div_(deltas, roots)
    lists.foreach_mul_(deltas, grads)
    lists.foreach_mul_(sums, rho)
    lists.foreach_addcmul_(sums, deltas, deltas, 1 - rho)
    lists.foreach_add_(params, deltas, alpha=-values["lr"])


def _adamax(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    beta1, beta2 = values["betas"]
    means, norms = entries["exp_avg"], entries["exp_inf"]
    grads = _direction(values, params, grads)
    lists.foreach_lerp_(means, grads, 1 - beta1)
    lists.foreach_mul_(norms, beta2)
    sizes = lists.foreach_abs(grads)
    lists.foreach_add_(sizes, values["eps"])
    lists.foreach_maximum_(norms, sizes)
    rate = values["lr"] / (1 - beta1 ** _number(entries["step"][0]))
    lists.foreach_addcdiv_(params, means, norms, -rate)


def _nadam(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    (beta1, beta2), lr, decay = values["betas"], values["lr"], values["momentum_decay"]
    count = _number(entries["step"][0])
    grads = _decayed(values, params, grads)
    mu = beta1 * (1.0 - 0.5 * (0.96 ** (count * decay)))
    mu_next = beta1 * (1.0 - 0.5 * (0.96 ** ((count + 1) * decay)))
    lists.foreach_mul_(entries["mu_product"], mu)
    _moments(values, grads, entries)
    roots = lists.foreach_div(entries["exp_avg_sq"], 1 - beta2**count)
    lists.foreach_sqrt_(roots)
    lists.foreach_add_(roots, values["eps"])
    product = _number(entries["mu_product"][0])
    lists.foreach_addcdiv_(params, grads, roots, -lr * (1.0 - mu) / (1.0 - product))
    lists.foreach_addcdiv_(params, entries["exp_avg"], roots, (-lr * mu_next) / (1.0 - product * mu_next))


def _radam(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    (beta1, beta2), count = values["betas"], _number(entries["step"][0])
    grads = _decayed(values, params, grads)
    _moments(values, grads, entries)
    correction2 = 1 - beta2**count
    updates = lists.foreach_div(entries["exp_avg"], 1 - beta1**count)
    lists.foreach_mul_(updates, values["lr"])
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * count * (beta2**count) / correction2
    if rho > 5.0:
        rates = lists.foreach_sqrt(entries["exp_avg_sq"])
        lists.foreach_add_(rates, values["eps"])
        lists.foreach_reciprocal_(rates)  # the loop's `number / tensor` is the reciprocal times the number
        lists.foreach_mul_(rates, correction2**0.5)
        lists.foreach_mul_(updates, rates)
        lists.foreach_mul_(updates, ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5)
    lists.foreach_add_(params, updates, alpha=-1.0)


def _asgd(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    lambd, lr = values["lambd"], values["lr"]
    count, rate = _number(entries["step"][0]), _number(entries["eta"][0])
    grads = _direction(values, params, grads)
    lists.foreach_mul_(params, 1 - lambd * rate)
    lists.foreach_add_(params, grads, alpha=-rate)
    if _number(entries["mu"][0]) == 1:
        lists.foreach_copy_(entries["ax"], params)
    else:
        changes = lists.foreach_sub(params, entries["ax"])
        lists.foreach_mul_(changes, entries["mu"])
        lists.foreach_add_(entries["ax"], changes)
    new_rate = torch.as_tensor(lr / ((1 + lambd * lr * count) ** values["alpha"]))
    new_mu = torch.as_tensor(1 / max(1, count - values["t0"]))
    lists.foreach_copy_(entries["eta"], [new_rate] * len(params))
    lists.foreach_copy_(entries["mu"], [new_mu] * len(params))


def _rprop(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    (down, up), sizes, before = values["etas"], entries["step_size"], entries["prev"]
    smallest, largest = values["step_sizes"]
    if values["maximize"]:
        grads = lists.foreach_neg(grads)
    factors = lists.foreach_mul(grads, before)
    lists.foreach_sign_(factors)
    kept = []
    for factor, grad in zip(factors, grads, strict=True):
        factor.masked_fill_(factor.gt(0), up).masked_fill_(factor.lt(0), down).masked_fill_(factor.eq(0), 1)
        kept.append(grad.masked_fill(factor.eq(down), 0))
    lists.foreach_mul_(sizes, factors)
    lists.foreach_clamp_min_(sizes, smallest)
    lists.foreach_clamp_max_(sizes, largest)
    lists.foreach_copy_(before, kept)
    lists.foreach_sign_(kept)
    lists.foreach_addcmul_(params, kept, sizes, -1)


def _adafactor(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    """A loop, since each parameter has numbers of its own: without the Python code of `torch.norm`."""
    lr, decay, (tiny, floor) = values["lr"], values["weight_decay"], values["eps"]
    if tiny is None:
        tiny = torch.finfo(params[0].dtype).eps
    if values["maximize"]:
        grads = lists.foreach_neg(grads)
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        count = _number(entries["step"][index])
        change = count ** values["beta2_decay"]
        size = max(floor, _number(_norm(param, 2)) / (param.numel() ** 0.5)) * min(lr, 1 / (count**0.5))
        if decay != 0:
            param.mul_(1 - lr * decay)
        if grad.dim() > 1:
            rows, columns = entries["row_var"][index], entries["col_var"][index]
            rows.lerp_(_norm(grad, 2, -1, True).square_().div_(grad.size(-1)), change)
            columns.lerp_(_norm(grad, 2, -2, True).square_().div_(grad.size(-2)), change)
            update = (rows @ columns).div_(rows.mean(dim=-2, keepdim=True).clamp_(min=tiny))
        else:
            variance = entries["variance"][index]
            variance.lerp_(grad * grad, change)
            update = variance.clone()
        update.clamp_(min=tiny * tiny).rsqrt_().mul_(grad)
        largest = max(1.0, _number(_norm(update, 2)) / ((update.numel() ** 0.5) * values["d"]))
        param.add_(update, alpha=-size / largest)


IN_LISTS: dict[type, Kernel] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: _adadelta,
    torch.optim.Adamax: _adamax,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.ASGD: _asgd,
    torch.optim.Rprop: _rprop,
    torch.optim.Adafactor: _adafactor,
}

# Entries that must have one value for all parameters of a list: those from which a function computes its numbers.
# They differ where parameters had their first updates at different steps; the class's own step is used there.
_UNIFORM: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("step",),
    torch.optim.AdamW: ("step",),
    torch.optim.Adamax: ("step",),
    torch.optim.NAdam: ("step", "mu_product"),
    torch.optim.RAdam: ("step",),
    torch.optim.ASGD: ("step", "eta", "mu"),
}


# Classes in which the states of a matrix and of a vector have different keys.
RAGGED = {torch.optim.Adafactor}


def is_uniform(cls: type, entries: Entries) -> bool:
    """True if the entries that a class's function reads have one value for all parameters."""
    return all(len({*map(_number, entries[key])}) == 1 for key in _UNIFORM.get(cls, ()))


def ragged(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """States of parameters as lists, with None where a state lacks a key."""
    return {key: [row.get(key) for row in rows] for key in dict.fromkeys(chain.from_iterable(rows))}


def agrees(recipe: Recipe, number: int, dtype: torch.dtype) -> bool:
    """True if the class's function for lists has the bits of the class's step, with a group's hyperparameters.

    It is compared in a few updates of small tensors, so that a version of torch that computes differently is noticed.
    """
    values = values_at(recipe.values[number], 0)
    if any(isinstance(value, Tensor) for value in values.values()):
        return False
    numbers = torch.linspace(-2, 2, 35, dtype=dtype, device="cpu")
    params = [numbers.clone().view(5, 7), numbers[:1].clone(), numbers[3:5].mul(0)]
    made, step = recipe.cls(params, **values), inspect.unwrap(recipe.cls.step)  # without the user's hooks
    for update in range(8):  # RAdam takes its other branch from the sixth on
        grads = [(param * (update - 1.3)).sin_() for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        expected = _updated(made, params, grads) if update else None  # the first update makes the state
        step(made)
        entries = ragged([made.state[param] for param in params])
        if expected and not (_same(params, expected[0]) and all(map(_same, entries.values(), expected[1].values()))):
            return False
    return True


def _updated(made: Any, params: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], dict[str, list[Any]]]:
    """Copies of an optimizer's parameters and of their states, updated by the class's function for lists."""
    tensors, entries = [param.clone() for param in params], ragged([made.state[param] for param in params])
    copies = {key: [None if value is None else value.clone() for value in entries[key]] for key in entries}
    if "step" in copies:
        lists.foreach_add_(copies["step"], 1)
    IN_LISTS[type(made)](made.param_groups[0], tensors, grads, copies)
    return tensors, copies


def _same(column: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(
        one is two or torch.allclose(one, two, 0.0, 0.0, equal_nan=True)
        for one, two in zip(column, other, strict=True)
    )
