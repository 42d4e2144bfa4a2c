"""Maximal update parametrization (muP): rates and initial scales by shape."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core.checks import check, check_number
from looplib._core.records import check_kind

# Their updates do not depend on the gradient's scale.
_ADAM_LIKE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad")


class MuP(NamedTuple):
    """Groups and initial scales of a model in the maximal update parametrization.

    Attributes:
        groups: for `groups=` of `ll.optimizer`.
        scales: name -> factor by which to multiply the parameter's initial values.
    """

    groups: list[tuple[Callable[[str, Tensor], bool], dict[str, Any]]]
    scales: dict[str, float]


def mup(
    cls: type,
    model: nn.Module,
    base: nn.Module,
    *,
    lr: float | Callable[[int], float],
    weight_decay: float | None = None,
    initial: Literal["fan_in", "constant"] = "fan_in",
    sums_over: Mapping[str, int | None] | None = None,
) -> MuP:
    """Maximal update parametrization: rates and initial scales with which the best learning rate stays for all widths.

    >>> import looplib as ll, torch
    >>> def network(width):
    ...     return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))
    >>> model = network(256)
    >>> scaling = ll.contrib.mup(torch.optim.AdamW, model, network(64), lr=1e-2)
    >>> with torch.no_grad():
    ...     for name, parameter in model.named_parameters():
    ...         parameter *= scaling.scales[name]
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-2, groups=scaling.groups)
    >>> scaling.scales["2.weight"], ll.optim.hyperparameters(optimizer, ll.init_state(model, optimizer))
    (0.5, {'lr': 0.01, 'lr/0': 0.0025})

    Find the learning rate on the narrow `base`, and train the wide model with it. A dimension that differs between the two
    grows with the width; depth, vocabulary and classes must be the same. At the width of the base, nothing changes.

    Where r_in and r_out are the factors by which a parameter's fan-in and fan-out have grown, the rate is divided by r_in for
    Adam and classes like it, and multiplied by r_out / r_in for SGD. The initial standard deviation of a hidden layer falls
    with the square root of r_in, that of a readout (whose outputs do not grow) with r_in, and all others stay.

    **With groups of your own.** The first group that matches takes a parameter, with all its values: if `no_decay` comes
    first, as in `groups=[no_decay, *scaling.groups]`, biases lose the rates that they have for SGD, and if it comes last, the
    biases of the scaled groups are decayed. Write the scaled groups' own part first, and what is left last:

    >>> is_vector = lambda name, tensor: tensor.ndim < 2
    >>> both = lambda group: lambda name, tensor: is_vector(name, tensor) and group(name, tensor)
    >>> vectors = [(both(group), {**values, "weight_decay": 0.0}) for group, values in scaling.groups]
    >>> groups = [*vectors, *scaling.groups, (is_vector, {"weight_decay": 0.0})]

    The factors are those of a forward pass without multipliers, table 3 of the paper. The `mup` package has those of
    table 8, with a `MuReadout` layer; both train the same function, but for `eps`, which is compared with gradients of
    another scale there. Attention whose heads grow needs the scale 1 / d instead of 1 / sqrt(d), which is in your model.

    Args:
        cls: class of the optimizer: SGD, or one whose updates do not depend on the scale of the gradient (Adam, AdamW,
            Adamax, NAdam, RAdam, RMSprop, Adagrad).
        model: the module to train. Its values are not read, so it may be on the meta device.
        base: the same module with smaller widths, on any device.
        lr: learning rate at the base's width, a number or a schedule. Give it to `ll.optimizer` too, for the other parameters.
        weight_decay: weight decay at the base's width. It is divided by the factor of the rate, so that their product, AdamW's
            decay per step, stays. None leaves it to `ll.optimizer`.
        initial: how the model's initial values depend on the width: "fan_in" for a standard deviation of 1 / sqrt(fan_in), as
            torch's layers draw weights and biases, or "constant", such as GPT-2's 0.02 (with biases that do not depend on it).
        sums_over: name -> the dimension over which the layer sums (its fan-in), or None if it sums over none, for
            parameters that are not of a linear, convolution, embedding, recurrent, attention or normalization layer of
            torch's, and for transposed convolutions in groups.

    Raises:
        TypeError: `cls` is no class, or one for which no factors are known.
        ValueError: the two models have different parameters; three dimensions grow; a parameter is both an embedding and a
            readout; or a parameter needs an entry in `sums_over`. The message names it.

    Source: "Tensor Programs V" (Yang et al., 2022), and the `mup` package.
    """
    like_sgd = isinstance(cls, type) and issubclass(cls, torch.optim.SGD)
    known = like_sgd or (isinstance(cls, type) and any(parent.__name__ in _ADAM_LIKE for parent in cls.__mro__))
    names = ", ".join(("SGD", *_ADAM_LIKE))
    check(known, f"mup got {cls!r}, for which it knows no factors; give one of torch.optim's {names}", TypeError)
    check_kind(model, "mup", "model")
    check_kind(base, "mup", "model")
    if weight_decay is not None:
        check_number("weight_decay", weight_decay, lambda decay: decay >= 0, "give a number of at least 0")
    check(initial in ("fan_in", "constant"), f"initial is {initial!r}; give 'fan_in' or 'constant'")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    base_shapes = {name: tuple(tensor.shape) for name, tensor in base.named_parameters()}
    dimensions = _dimensions(model, sums_over or {})
    unlike = sorted(name for name in {*shapes, *base_shapes} if _rank(shapes, name) != _rank(base_shapes, name))
    check(
        not unlike,
        f"{', '.join(unlike[:5])}: not in both models, or of another number of dimensions; change widths only",
    )
    by_factor: dict[float, set[str]] = defaultdict(set)
    scales = {}
    for name, shape in shapes.items():
        growth = [size / old for size, old in zip(shape, base_shapes[name], strict=True)]
        r_in, r_out, r_drawn = _fans(name, growth, dimensions, shapes, base_shapes)
        by_factor[r_out / r_in if like_sgd else 1 / r_in].add(name)
        wanted = r_in**-0.5 if r_out != 1 else 1 / r_in  # 1 / r_in is that of a readout
        drawn = r_drawn**-0.5 if initial == "fan_in" else 1.0
        scales[name] = wanted / drawn
    groups = []
    for factor, members in sorted(by_factor.items()):
        if factor != 1:
            values = {"lr": _scaled(lr, factor)}
            if weight_decay is not None:
                values["weight_decay"] = weight_decay / factor
            groups.append((_among(frozenset(members)), values))
    return MuP(groups, scales)


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # which sum over dimension 0 of the weight
_SUMS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


class _Layer(NamedTuple):
    """The dimension over which a parameter's layer sums, if any, and what its initial values depend on.

    torch draws the weight and the bias of a layer by the size of dimension 1 of the weight, also where a transposed
    convolution sums over another one. `drawn_by` is the name of this weight; None stands for the dimension of the sum.
    All parameters of a recurrent layer are drawn by its hidden size, which is dimension 1 of one of its weights, and those of
    attention by the sum of their own fan-in and fan-out (`is_xavier`).
    """

    sums_over: int | None
    drawn_by: str | None = None
    is_xavier: bool = False


def _dimensions(model: nn.Module, told: Mapping[str, int | None]) -> dict[str, _Layer]:
    """Facts of the parameters, by name."""
    layers: dict[str, _Layer] = {}
    kinds: dict[str, set[str]] = defaultdict(set)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            layers |= _recurrent(module, names)
        if isinstance(module, nn.MultiheadAttention):
            matrices = module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
            for parameter in (*matrices, module.bias_k, module.bias_v):
                if parameter is not None and (name := names.get(id(parameter))) is not None:
                    layers[name] = _Layer(1 if parameter.ndim == 2 else None, is_xavier=True)
        weight = names.get(id(getattr(module, "weight", None)))
        if weight is None or not isinstance(module, (nn.Embedding, *_SUMS)):
            continue
        if isinstance(module, nn.Embedding):
            kinds[weight].add("embedding")
            layers[weight] = _Layer(0)
            continue
        kinds[weight].add("readout")
        sums_over: int | None = 1
        if isinstance(module, _TRANSPOSED):
            check(
                module.groups in (1, module.in_channels) or weight in told,
                f"{weight} is of a transposed convolution in {module.groups} groups: give sums_over={{{weight!r}: 0}} if the "
                "channels of each group grow, or None if the number of groups does",
            )
            sums_over = None if module.groups == module.in_channels else 0
        layers[weight] = _Layer(sums_over, weight)
        if (bias := names.get(id(getattr(module, "bias", None)))) is not None:
            layers[bias] = _Layer(None, weight)
    tied = sorted(name for name, uses in kinds.items() if len(uses) > 1)
    check(not tied, f"{', '.join(tied)} is both an embedding and a readout, which need different rates: untie them")
    return layers | {name: layers.get(name, _Layer(None))._replace(sums_over=told[name]) for name in told}


def _recurrent(module: nn.Module, names: Mapping[int, str]) -> dict[str, _Layer]:
    """Facts of a recurrent layer's parameters. `weight_hr` is the projection of an LSTM, which has smaller `weight_hh`."""
    full = {name: names[id(parameter)] for name, parameter in module.named_parameters(recurse=False)}
    hidden = max((name for name in full if name.startswith(("weight_hh", "weight_hr"))), default="")
    check(
        hidden, f"{[*full.values()]} are of a recurrent layer whose weight_hh is parametrized: call mup before that"
    )
    return {name: _Layer(1 if short.startswith("weight") else None, full[hidden]) for short, name in full.items()}


def _fans(
    name: str,
    growth: list[float],
    layers: Mapping[str, _Layer],
    shapes: Mapping[str, tuple[int, ...]],
    base_shapes: Mapping[str, tuple[int, ...]],
) -> tuple[float, float, float]:
    """Growth of a parameter's fan-in and fan-out, and of the number by which torch draws its initial values."""
    grown = [ratio for ratio in growth if ratio != 1]
    check(len(grown) <= 2, f"{name} has {len(grown)} dimensions that grow, and muP has factors for one or two")
    if name not in layers:
        check(
            len(growth) < 2 or not grown or (len(grown) == 2 and grown[0] == grown[1]),
            f"{name} is of no layer whose fan-in is known: give sums_over={{{name!r}: dimension}}, or None if it sums over "
            "none, such as a table of positions",
        )
        return (grown[0], grown[1], grown[0]) if len(grown) == 2 else (1.0, grown[0] if grown else 1.0, 1.0)
    layer = layers[name]
    r_in = 1.0 if layer.sums_over is None else growth[layer.sums_over]
    r_out = next((ratio for at, ratio in enumerate(growth) if at != layer.sums_over and ratio != 1), 1.0)
    r_drawn = r_in
    if layer.is_xavier:
        fans, base_fans = (sum(shape[:2]) * math.prod(shape[2:]) for shape in (shapes[name], base_shapes[name]))
        r_drawn = fans / base_fans
    elif layer.drawn_by:
        r_drawn = shapes[layer.drawn_by][1] / base_shapes[layer.drawn_by][1]
    return r_in, r_out, r_drawn


def _rank(shapes: Mapping[str, tuple[int, ...]], name: str) -> int:
    return len(shapes[name]) if name in shapes else -1


def _scaled(lr: Any, factor: float) -> Any:
    return (lambda step: factor * lr(step)) if callable(lr) else factor * lr


def _among(members: frozenset[str]) -> Callable[[str, Tensor], bool]:
    return lambda name, tensor: name in members
