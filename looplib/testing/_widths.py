"""Coordinate check: activations that do not depend on the width."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import trees
from looplib._core.checks import check, check_count, check_number
from looplib.testing._compare import copied, fail
from looplib.testing._surroundings import streams_kept
from looplib.types import TrainState, TrainStep


def assert_width_stable(
    make_run: Callable[[int], tuple[nn.Module, TrainStep, TrainState]],
    batch: Any,
    *,
    widths: Sequence[int] = (64, 128, 256),
    steps: int = 5,
    seeds: int = 3,
    at_most: float = 1.55,
) -> None:
    """Coordinate check: after a few steps, the activations of all layers are about as large for every width.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> def make_run(width):
    ...     model, base = (
    ...         torch.nn.Sequential(torch.nn.Linear(8, wide), torch.nn.ReLU(), torch.nn.Linear(wide, 1)) for wide in (width, 64)
    ...     )
    ...     scaling = ll.contrib.mup(torch.optim.Adam, model, base, lr=0.02)
    ...     with torch.no_grad():
    ...         for name, parameter in model.named_parameters():
    ...             parameter *= scaling.scales[name]
    ...     optimizer = ll.optimizer(torch.optim.Adam, lr=0.02, groups=scaling.groups)
    ...     step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: (model(x) - 1).square().mean()), optimizer)
    ...     return model, step, ll.init_state(model, optimizer)
    >>> testing.assert_width_stable(make_run, torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))

    In the standard parametrization, the updates of a wide layer add up over its many inputs, so activations grow with the
    width, and the best learning rate falls. A model for which this check passes can be tuned at a small width.

    Each width is trained on the one batch from `seeds` different initial weights. Recorded are the mean absolute outputs of
    each module after `steps` updates, and of their changes since the first forward pass, with the same dropout masks. Tensors
    in tuples, dicts and other containers count each by itself. They are averaged over the seeds, and the largest of all
    widths is divided by the smallest.

    At a low learning rate or after few steps, activations are still those of the initial weights, and only their changes
    show that updates grow with the width. A change below 100 roundings of the dtype is not compared, so in bfloat16, use a
    rate and a number of steps after which activations have about doubled.

    Args:
        make_run: function from a width to the module, a train step that is not compiled, and the first state. torch is seeded
            before each call.
        batch: the batch for all steps.
        widths: two widths or more.
        steps: number of updates before the forward pass that is compared.
        seeds: number of initial weights for each width.
        at_most: largest ratio between widths.

    Raises:
        AssertionError: the ratio is larger for a module. The message has the modules and their activations at each width.
        ValueError: there are fewer than two widths, or no forward pass of the module with a tensor in its output was seen.

    Source: the coordinate check of the `mup` package; "Tensor Programs V" (Yang et al., 2022), appendix D.1.
    """
    __tracebackhide__ = True
    check(len({*widths}) > 1, f"widths are {widths!r}; give two or more that differ")
    check_count("steps", steps)
    check_count("seeds", seeds)
    check_number("at_most", at_most, lambda ratio: ratio > 1, "give a ratio above 1, such as 1.55")
    sizes: dict[str, dict[int, float]] = defaultdict(lambda: dict.fromkeys(widths, 0.0))
    for width in widths:
        for seed in range(seeds):
            for name, size in _activations(partial(make_run, width), batch, steps, seed).items():
                sizes[name][width] += size / seeds
    check(
        sizes,
        "no forward pass of the module was seen: give the module that the step calls, and a step that is not compiled",
    )
    unstable = [
        f"{name}: {_ratio(by_width):.2f}, with "
        + ", ".join(f"{size:.3g} at width {width}" for width, size in by_width.items())
        for name, by_width in sizes.items()
        if _ratio(by_width) > at_most
    ]
    fail(
        f"activations depend on the width: after {steps} steps, the largest is more than {at_most} times the smallest",
        unstable,
        "Usually the standard parametrization, in which updates grow with the width: scale rates and initial values by shape, "
        "as ll.contrib.mup does. If it is used: attention with 1 / sqrt(d) instead of 1 / d, a layer whose initial values were "
        "not scaled, or a learning rate that is too large for each width.",
    )


def _activations(
    make_run: Callable[[], tuple[nn.Module, TrainStep, TrainState]], batch: Any, steps: int, seed: int
) -> dict[str, float]:
    """Mean absolute outputs of the modules after these updates, and of their changes, by name."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, train_step, state = make_run()
    first: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    with streams_kept(state):
        start, outputs = state.step, first
        for number in range(steps + 1):
            if number == steps:
                state, outputs = state.replace(step=start), last  # with the draws of the first forward pass
            with _recorded(model, outputs) if number in (0, steps) else nullcontext():
                state, _ = train_step(state, copied(batch))
    sizes = {name: output.abs().mean().item() for name, output in last.items()}
    changes = {}
    for name, output in last.items():
        if name in first and first[name].shape == output.shape:  # else rows are routed by their values
            change = (output - first[name]).abs().mean().item()
            changes[f"change of {name}"] = max(change, 100 * torch.finfo(output.dtype).eps * sizes[name])
    return sizes | changes


@contextmanager
def _recorded(model: nn.Module, outputs: dict[str, Tensor]) -> Iterator[None]:
    """Put the tensors that modules return into a dict, by the names of the modules and the paths in their outputs."""

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for path, leaf in trees.leaves(output):
            if isinstance(leaf, Tensor) and leaf.numel() and (leaf.is_floating_point() or leaf.is_complex()):
                outputs[trees.python_path(path, name or "the output of the model")] = leaf.detach().clone()

    hooks = [module.register_forward_hook(partial(record, name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _ratio(sizes: dict[int, float]) -> float:
    """The largest by the smallest; infinite if one of them is not finite, or some and not all are 0."""
    smallest, largest = min(sizes.values()), max(sizes.values())
    if not all(map(math.isfinite, sizes.values())):  # min and max would pass over a NaN
        return math.inf
    if largest == 0:
        return 1.0
    return largest / smallest if smallest > 0 else math.inf
