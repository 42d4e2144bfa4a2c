"""Differences between two pytrees, and the first step at which two runs differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import as_tensor, check, check_number, check_type, few
from looplib._core.checksums import bits_of
from looplib._core.ranks import local
from looplib.debug._fingerprint import Fingerprint, fingerprint, leaves_by_path, same_bits
from looplib.types import TrainState


@dataclass(frozen=True, slots=True, repr=False)
class LeafDifference:
    """A leaf that differs between two trees.

    Attributes:
        path: path of the leaf, such as "/params/0.weight".
        largest: largest absolute difference between two numbers; NaN if there are no numbers to subtract.
        differing: number of numbers that differ.
        numel: number of all numbers.
        summary: the difference in words.
    """

    path: str
    largest: float
    differing: int
    numel: int
    summary: str

    def __repr__(self) -> str:
        return f"{self.path}: {self.summary}"


def differences(one: Any, other: Any, *, rtol: float = 0.0, atol: float = 0.0) -> list[LeafDifference]:
    """Compare two states, replayed steps, batches, or any two trees, leaf by leaf.

    >>> import torch
    >>> differences({"x": torch.ones(3), "n": 1}, {"x": torch.tensor([1.0, 1.0, 1.5]), "n": 1})
    [/x: 1 of 3 numbers, by 0.5 at most]
    >>> differences(torch.ones(3), torch.ones(3) + 1e-6, rtol=1e-5)
    []

    The result is in the order of the first tree. For `Replayed` steps that is batch, metrics, gradients, and then the
    state after the step, so the first difference is the cause of the others.

    Args:
        one, other: trees, on any devices. If one of them is a fingerprint, the other is compared by its fingerprint.
        rtol, atol: floating-point numbers may differ by `atol + rtol * abs(other)`, as in `torch.allclose`, and NaN
            equals NaN. If both are 0, bits are compared.
    """
    _check_tolerances(rtol, atol)
    if _is_fingerprint(one) or _is_fingerprint(other):
        prints = (tree if _is_fingerprint(tree) else fingerprint(tree) for tree in (one, other))
        pairs = trees.paired(*(print_.items() for print_ in prints))
    else:
        pairs = trees.paired(leaves_by_path(one), leaves_by_path(other))
    return [difference for pair in pairs if (difference := _difference(*pair, rtol, atol))]


def _is_fingerprint(tree: Any) -> bool:
    return isinstance(tree, Mapping) and {*map(type, tree.values())} == {str}


def _check_tolerances(rtol: float, atol: float) -> None:
    for name, value in (("rtol", rtol), ("atol", atol)):
        check_number(name, value, lambda part: part >= 0, "give a number of at least 0, such as 1e-5")


def _difference(path: str, one: Any, other: Any, rtol: float, atol: float) -> LeafDifference | None:
    if one is trees.MISSING or other is trees.MISSING:
        which = "second" if one is trees.MISSING else "first"
        return LeafDifference(path, math.nan, 0, 0, f"is in the {which} alone")
    if (first := _numbers(one)) is not None and (second := _numbers(other)) is not None:
        return _difference_of_numbers(path, first, second, rtol, atol)
    if type(one) is type(other) and one == other:
        return None
    both = isinstance(one, (int, float)) and isinstance(other, (int, float))
    largest = abs(float(one) - float(other)) if both else math.nan
    return LeafDifference(path, largest, 1, 1, f"{_described(one)} against {_described(other)}")


def _numbers(leaf: Any) -> Tensor | None:
    """Numbers of a tensor, a NumPy array or scalar, or a float, as a tensor."""
    if isinstance(leaf, Tensor):
        tensor = local(leaf).detach()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()  # whose bits are compared too
        return tensor
    if type(leaf) is float:
        return torch.tensor(leaf, dtype=torch.float64, device="cpu")
    return as_tensor(leaf) if hasattr(leaf, "__array__") and leaf.dtype.kind in "biufc" else None


def _difference_of_numbers(path: str, one: Tensor, other: Tensor, rtol: float, atol: float) -> LeafDifference | None:
    by_bits = not (rtol or atol)
    if one.shape != other.shape or (by_bits and one.dtype != other.dtype):
        return LeafDifference(path, math.nan, 0, one.numel(), f"{_described(one)} against {_described(other)}")
    if same_bits(one, other):
        return None
    one, other = one.cpu(), other.cpu()
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (one, other))
    if by_bits:
        differs = (bits_of(one) != bits_of(other)).reshape(*one.shape, -1).any(-1)
    elif one.is_floating_point() or one.is_complex():
        differs = ~torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    else:
        differs = one != other
    if not (differing := int(differs.sum())):
        return None
    largest = float((a - b)[differs].abs().nan_to_num(math.inf, math.inf).max())  # infinite if one is not finite
    summary = f"{differing} of {one.numel()} numbers, by {largest:.3g} at most"
    return LeafDifference(path, largest, differing, one.numel(), summary)


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    text = repr(leaf)
    return text if len(text) <= 60 else f"a {type(leaf).__name__}"


@dataclass(frozen=True, eq=False, repr=False)
class Difference:
    """The first kept step at which two runs differ.

    Attributes:
        equal: last step at which their states were the same; None if the first ones differ.
        different: next step that was compared, at which the states differ.
        leaves: leaves that differ there.
    """

    equal: int | None
    different: int
    leaves: list[LeafDifference]

    def __repr__(self) -> str:
        since = "from the first on" if self.equal is None else f"and were the same at step {self.equal}"
        return f"the runs differ at step {self.different}, {since}:\n  " + few(self.leaves, 10, "\n  ")


def first_difference(
    one: Mapping[int, TrainState | Fingerprint],
    other: Mapping[int, TrainState | Fingerprint],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Difference | None:
    """Find the first step at which two runs differ, and what differs there. Returns None if they do not.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> def run(step_fn, state, kept):
    ...     for x in torch.ones(10, 4, 1):
    ...         kept = ll.debug.record_steps(kept, state)
    ...         state, metrics = step_fn(state, x)
    ...     return kept
    >>> def other_step(state, batch):
    ...     return train_step(state, batch * 2 if state.step == 7 else batch)
    >>> start = ll.init_state(model, optimizer)
    >>> found = first_difference(run(train_step, start, {}), run(other_step, start, {}))
    >>> found.equal, found.different, found.leaves[0].path
    (7, 8, '/params/weight')

    The steps that both mappings have are compared one after another; if one run has steps that the other lacks, as it ended
    earlier, compare `one.keys()` and `other.keys()` too. If only every hundredth state was kept, replay the
    steps between the last equal states and the first different ones, and compare each: the differences of two
    `Replayed` steps come in the order in which they arise (batch, loss, gradients, update), so the first one shows the
    cause.

        for step in range(found.equal, found.different):
            replayed = [ll.debug.replay(run.train_step, run.kept, run.loader, step, grad_fn=run.grad_fn) for run in runs]
            if leaves := ll.debug.differences(*replayed):
                break

    If kept states differ but no replayed step does, the cause is outside the functions of either run: they ran on
    different machines or versions. For such runs, log `fingerprint(state)` on each to find the steps between which they
    start to differ. Then, from the last checkpoint before, log each step with its batch and gradients: `prints(found.state,
    ll.debug.fingerprint({"batch": found.batch, "grads": found.grads}))` of a `replay`.

    Args:
        one, other: mappings from steps to states or fingerprints, from `record_steps` or `read_fingerprints`.
        rtol, atol: see `differences`. If both are 0, bits are compared.

    Raises:
        ValueError: the runs have no step in common.
    """
    _check_tolerances(rtol, atol)
    for run in (one, other):
        check_type("a run is", run, Mapping, "give a mapping from steps to states, such as {state.step: state}")
    steps = sorted(set(one) & set(other))
    check(
        steps,
        f"the runs have no step in common: one has {_listed(one)}, the other {_listed(other)}; keep or log both at the "
        "same steps, such as ll.every_n_steps(100), or give them one state to begin with",
    )
    equal = None
    for step in steps:
        if leaves := differences(one[step], other[step], rtol=rtol, atol=atol):
            return Difference(equal, step, leaves)
        equal = step
    return None


def _listed(steps: Iterable[int]) -> str:
    ordered = sorted(steps)
    return f"steps {ordered[0]} to {ordered[-1]}" if ordered else "none"
