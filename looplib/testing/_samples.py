"""Independence checks: of samples in a batch, and of a sequence's past from its future."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from looplib._core import samples, trees
from looplib._core.checks import check
from looplib._core.records import check_no_module
from looplib.testing._compare import check_tolerance, copied, differing, fail, in_float64, in_its_dtype
from looplib.testing._surroundings import streams_kept
from looplib.types import PredictStep, TrainState

_PREDICT = "a predict step of it, ll.make_predict_step(model, lambda model, batch: model(batch))"


def assert_samples_independent(
    function: PredictStep, state: TrainState, batch: Any, *, tolerance: float = 1e-5
) -> None:
    """Check that samples are independent: each row of the output depends only on its own sample.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    >>> testing.assert_samples_independent(predict_step, ll.init_state(model), torch.randn(6, 2))

    If samples are independent, selecting rows before the function or after it gives the same result. Both are
    compared with half of the rows replaced by copies of one row, with half of the rows, and with a single row. The
    computation is in float64 if the function supports it. Outputs may differ by `tolerance` times the largest one,
    since the same sample may be rounded differently in a batch of a different size. If rows change, the message names
    the first module whose output changes.

    `tolerance=0` compares bits, in the dtype of the state, for reinforcement learning: the ratio of two probabilities
    of one policy is 1 only if both were rounded alike.

    Args:
        function: a predict step, or any `(state, batch) -> outputs` with one row per sample, such as the loss of each
            sample.
        state: the state to predict with.
        batch: at least 2 samples that differ, in any container that looplib's steps accept.
        tolerance: largest difference, relative to the largest number; 0 for equal bits.

    Raises:
        AssertionError: rows change. The message has the output, its rows, and the differences.
        ValueError: the batch has a single sample or cannot be split, or an output does not have one row per sample.

    After Karpathy, "A Recipe for Training Neural Networks", 2019: "use backprop to chart dependencies".
    """
    __tracebackhide__ = True
    check_no_module(
        "assert_samples_independent",
        function,
        _PREDICT,
    )
    check_tolerance(tolerance)
    count = samples.counter_of(function)(batch)
    check(count > 1, f"the batch has {count} row; give 2 or more, which differ, so that one could see another")
    with streams_kept(state):
        begin = in_float64 if tolerance else in_its_dtype
        wide, rows, out = begin(function, state, batch)
        _check_outputs(out, (count,), "tensors with one row for each sample")
        half = count // 2
        ways = {
            "among copies of sample 0": [*range(half), *[0] * (count - half)],
            f"among copies of sample {count - 1}": [*[count - 1] * half, *range(half, count)],
            "in a batch of half the size": list(range(half)),
            "alone": [0],
        }
        for way, index in ways.items():
            expected = trees.map_tensors(lambda output: output[index], out)  # noqa: B023
            changed = _differing_outputs(expected, function(wide, take(rows, count, index)), tolerance)
            where = _first_module(function, wide, rows, count, index, tolerance) if changed else ""
            if not tolerance:
                where += "With tolerance=0, a kernel may also round differently for another size of the batch. "
            fail(
                f"samples of a batch see each other: their outputs change when they stand {way}",
                changed,
                f"{where}Usually BatchNorm in training mode, a mean, softmax or normalization over dimension 0, attention with "
                "batch and length the wrong way round (batch_first), a reshape or view that mixes samples where a "
                "transpose is meant, a squeeze() that drops a batch of one, or random draws. Name the dimension that "
                "is meant, reshape with einops, and predict in eval mode, as ll.make_predict_step does.",
            )


def _first_module(
    function: PredictStep, state: TrainState, rows: Any, count: int, index: list[int], tolerance: float
) -> str:
    """Name of the first module whose output for these samples depends on the rest of the batch, as a sentence."""
    calls, calls_alone = (_calls(function, state, batch) for batch in (rows, take(rows, count, index)))
    modules = [module for module, _ in calls]
    root = max(modules, key=lambda module: len([*module.modules()]), default=None)
    for (module, output), (module_alone, alone) in zip(calls, calls_alone, strict=False):
        if module is not module_alone or root is None:
            break
        outputs = [leaf for _, leaf in trees.leaves(output) if isinstance(leaf, Tensor) and leaf.dim()]
        if not outputs or any(leaf.shape[0] != count for leaf in outputs):
            continue  # its samples do not stand along the first dimension
        expected = trees.map_tensors(lambda leaf: leaf[index] if leaf.dim() else leaf, output)
        if _differing_outputs(expected, alone, tolerance):
            name = next((name for name, inner in root.named_modules() if inner is module), "")
            return f"The first module that does so is {name or 'the model itself'} ({type(module).__name__}). "
    return ""


def _calls(function: PredictStep, state: TrainState, batch: Any) -> list[tuple[nn.Module, Any]]:
    """Modules that a step calls, in the order in which they end, with their outputs."""
    calls: list[tuple[nn.Module, Any]] = []
    hook = register_module_forward_hook(lambda module, args, output: calls.append((module, copied(output))))
    try:
        function(state, batch)
    finally:
        hook.remove()
    return calls


def take(batch: Any, count: int, index: list[int]) -> Any:
    """Samples of a batch of `count` at these indices, in this order."""

    def at_index(rows: Any) -> Any:
        return type(rows)(rows[i] for i in index) if isinstance(rows, (list, tuple)) else rows[index]

    [taken] = samples.cut(batch, count, [at_index])
    return taken


def assert_causal(function: PredictStep, state: TrainState, tokens: Tensor, *, tolerance: float = 1e-5) -> None:
    """Check causality: the output at each position of a sequence depends only on positions up to it.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.GRU(2, 3, batch_first=True)
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x)[0])
    >>> testing.assert_causal(predict_step, ll.init_state(model), torch.randn(2, 8, 2))

    The positions from some t on are replaced by values of other positions or samples, and the outputs before t must
    not change by more than `tolerance` times the largest of them.

    Args:
        function: `(state, tokens) -> outputs`, tensors of shape (batch, length, ...). If a batch contains more than
            tokens: `lambda state, tokens: predict_step(state, {**batch, "input_ids": tokens})`.
        state: the state to predict with.
        tokens: (batch, length, ...), integers or floats, which differ from position to position.
        tolerance: largest difference, relative to the largest number.

    Raises:
        AssertionError: an output depends on the future. The message has the output, the first such position, and how
            far ahead it looks.
        ValueError: all tokens are the same, or an output does not have the shape (batch, length, ...).
    """
    __tracebackhide__ = True
    check_no_module(
        "assert_causal",
        function,
        _PREDICT,
    )
    check_tolerance(tolerance)
    check(
        tokens.dim() > 1 and tokens.shape[1] > 1,
        f"tokens have the shape {tuple(tokens.shape)}; give (batch, length, ...), of length 2 or more",
    )
    length = tokens.shape[1]
    with streams_kept(state):
        wide, inputs, out = in_float64(function, state, tokens)
        _check_outputs(out, tokens.shape[:2], "tensors (batch, length, ...)")
        for cut in sorted({1, length // 4 or 1, length // 2, length - 1}):
            before, after = (
                trees.map_tensors(lambda output: output[:, :cut], outputs)  # noqa: B023
                for outputs in (out, function(wide, _with_another_future(inputs, cut)))
            )
            fail(
                f"outputs see the future: those before position {cut} change with the tokens from there on",
                _differing_outputs(before, after, tolerance),
                "Usually attention without is_causal or with a mask the wrong way round (True means attend in "
                "scaled_dot_product_attention, and do not attend in nn.MultiheadAttention), a convolution padded on "
                "both sides, a recurrent layer that is bidirectional, or a normalization over the length.",
            )


def _with_another_future(inputs: Tensor, cut: int) -> Tensor:
    """Sequences with the same values before a position and different ones from there on."""
    future = inputs[:, cut:]
    for other in (inputs[:, :1].expand_as(future), future.flip(1), future.roll(1, 0)):
        if not torch.equal(other, future):
            return torch.cat([inputs[:, :cut], other], 1)
    raise ValueError(f"tokens from position {cut} on are all alike; give some that differ")


def _differing_outputs(expected: Any, actual: Any, tolerance: float) -> list[str]:
    expected, actual = (
        {trees.python_path(p, "output"): x for p, x in trees.leaves(out)} for out in (expected, actual)
    )
    return differing(expected, actual, tolerance)


def _check_outputs(outputs: Any, shape: tuple[int, ...], wanted: str) -> None:
    for path, leaf in trees.leaves(outputs):
        described = tuple(leaf.shape) if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        check(
            isinstance(leaf, Tensor) and leaf.shape[: len(shape)] == shape,
            f"{trees.python_path(path, 'output')} is {described}, where the batch has {tuple(shape)}; return {wanted}",
        )
