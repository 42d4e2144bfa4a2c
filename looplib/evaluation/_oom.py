"""Out-of-memory recovery for evaluation and prediction.

A batch that does not fit is split and the results are combined: records are merged and outputs concatenated. The
caller gets the result of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.calls import remember
from looplib._core.checks import check, check_optional_count
from looplib._core.kinds import checked, mark_alike
from looplib._core.memory import half, out_of_memory
from looplib._core.trees import batch_size as count_examples
from looplib._core.trees import split
from looplib.evaluation._columns import is_texts, named_leaves
from looplib.metrics._mean import merge
from looplib.types import Metric, TrainState

Step = TypeVar("Step", bound=Callable[[TrainState, Any], Any])


def split_on_oom(step: Step, size: int | None = None, *, batch_size: Callable[[Any], int] = count_examples) -> Step:
    """Out-of-memory recovery: evaluate or predict with microbatches of half the size, and keep that size from then on.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state, batches = ll.init_state(model), torch.ones(10, 2).split(4)
    >>> eval_step = ll.evaluation.split_on_oom(ll.make_eval_step(model, lambda model, x: {"ones": ll.Mean(x.sum(), x.numel())}))
    >>> ll.evaluate(eval_step, state, batches)
    {'ones': 1.0}
    >>> predict_step = ll.evaluation.split_on_oom(ll.make_predict_step(model, lambda model, x: model(x)), size=3)
    >>> [len(out) for out in ll.predict(predict_step, state, batches)]
    [4, 4, 2]

    The metrics are those of the whole batch: the totals and weights of a `Mean` are added up, and a scalar is
    weighted by the number of samples in its microbatch. Outputs are in the order of the batch. A warning is given
    each time the size is halved. The returned function remembers the size that fits; training steps have their own.

    On several ranks each rank splits its batches independently. Models in FSDP2 are an exception, since their forward
    passes need all ranks together: use batches that fit.

    Args:
        step: from `make_eval_step` or `make_predict_step`. If it draws random numbers, it draws the same ones for
            each microbatch.
        size: number of samples per microbatch to start with. None starts with the whole batch.
        batch_size: function that counts the samples in a batch, as for `make_grad_fn`.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: the original error, if a single sample does not fit.
        ValueError: a batch cannot be split, or outputs do not have one row per sample.
        TypeError: the output of a batch that was split contains something other than tensors.
    """
    _check_split(step, size)
    step = checked(step, "split_on_oom", "eval_step", "predict_step")
    fitting = size

    def pieces_of(state: TrainState, batch: Any) -> list[tuple[Any, Any]]:
        """Each microbatch's size and the step's result for it."""
        nonlocal fitting
        if fitting is None or batch_size(batch) <= fitting:
            if (out := _attempt(step, state, batch, batch_size)) is not None:
                return [(batch, out[0])]
            count = batch_size(batch)
            fitting = half(count, count)
        cut = split(batch, batch_size(batch), fitting, batch_size)
        return [*chain.from_iterable(pieces_of(state, piece) for piece in cut)]

    def splitting(state: TrainState, batch: Any) -> Any:
        pieces, outs = zip(*pieces_of(state, batch), strict=True)
        return outs[0] if len(outs) == 1 else _together([*map(batch_size, pieces)], list(outs))

    made = mark_alike(cast(Step, splitting), "split_on_oom", step)
    remembered: Step = remember(made, split_on_oom, step, size=size, batch_size=batch_size)
    return remembered


def _check_split(step: Any, size: Any) -> None:
    check_optional_count("size", size, advice="give a whole number of samples, at least 1")
    check(
        callable(step) and not isinstance(step, torch.nn.Module),
        f"split_on_oom got a {type(step).__name__}; give a step, as ll.make_eval_step or ll.make_predict_step returns",
        TypeError,
    )


def _attempt(
    step: Callable[[TrainState, Any], Any], state: TrainState, batch: Any, batch_size: Callable[[Any], int]
) -> tuple[Any] | None:
    """Call the step, and return None if memory runs out and the batch can be split."""
    try:
        return (step(state, batch),)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        if batch_size(batch) <= 1:
            error.add_note("split_on_oom: this is one sample alone, which cannot be cut")
            raise
    return None


def _together(counts: list[int], outs: list[Any]) -> Any:
    """Combine the results of the microbatches."""
    if all(isinstance(out, Mapping) and all(isinstance(value, Metric) for value in out.values()) for out in outs):
        return merge(*outs)
    return end_to_end(counts, outs)


def end_to_end(counts: list[int], outs: list[Any]) -> Any:
    """Concatenate the outputs of microbatches, which have these numbers of samples."""
    for count, out in zip(counts, outs, strict=True):
        for name, leaf in named_leaves(out).items():
            _check_part(name, leaf, count)
    names = iter(named_leaves(outs[0]))
    try:
        return trees.map_leaves(lambda *parts: _joined(next(names), parts), *outs, is_leaf=is_texts)
    except ValueError as error:
        raise ValueError(f"the outputs of two parts of a batch do not fit together: {error}") from error


def _check_part(name: str, leaf: Any, count: int) -> None:
    title = f"the output's {name!r}"
    check(
        isinstance(leaf, Tensor) or is_texts(leaf),
        f"{title} is a {type(leaf).__name__}; parts of a batch need tensors or lists of strings",
        TypeError,
    )
    shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else (len(leaf),)
    check(
        shape[:1] == (count,),
        f"{title} has shape {shape} for {count} samples, which are part of a batch: give one row for each sample",
    )


def _joined(name: str, parts: Sequence[Any]) -> Any:
    """Concatenate rows. Tensors whose rows differ in shape, as for generated text, become a nested tensor."""
    if all(map(is_texts, parts)):
        return [*chain.from_iterable(parts)]
    kinds = [type(part).__name__ for part in parts]
    check(all(isinstance(part, Tensor) for part in parts), f"{name!r} is a {' and a '.join(kinds)}")
    alike = not any(part.is_nested for part in parts) and len({part.shape[1:] for part in parts}) == 1
    return torch.cat(list(parts)) if alike else _nested(name, parts)


def _nested(name: str, parts: Sequence[Tensor]) -> Tensor:
    rows = [*chain.from_iterable(part.unbind() for part in parts)]
    try:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    except RuntimeError as error:
        shapes = " and ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"{name!r} has shapes {shapes}, of which at most the second dimension may differ") from error
