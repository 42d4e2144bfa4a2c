"""One optimizer step over a batch in pieces.

A piece gives the gradient of its summed loss, added into those of the pieces before it, and its weight; the sum of
gradients is divided by the sum of weights once. So the result is the whole batch's, however it was cut, and an
update never knows that there were pieces.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import accumulate as accumulated_sum
from typing import Any, NoReturn

import torch
from torch import Tensor

from looplib._agreement import named, raise_of
from looplib._ranks import gather, largest_over_ranks, rank, several, total_over_ranks
from looplib._tracing import UntraceableError, tracing
from looplib.gradients import WHOLE, GradFn, Gradients, Part, check_parts, indices, multiply
from looplib.metrics import Mean, merge
from looplib.metrics import batch_size as count_examples
from looplib.state import TrainState


def accumulate(
    grad_fn: GradFn,
    microbatches: int | None = None,
    *,
    size: int | None = None,
    dtype: torch.dtype | None = None,
    batch_size: Callable[[Any], int] = count_examples,
) -> GradFn:
    """The gradient of a whole batch, taken piece by piece, in the memory of one.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> state, batch = ll.init_state(model), torch.randn(10, 2)
    >>> whole, in_pieces = grad_fn(state, batch), ll.accumulate(grad_fn, microbatches=4)(state, batch)
    >>> torch.testing.assert_close(in_pieces.grads, whole.grads)
    >>> ragged = ll.accumulate(grad_fn)(state, [batch[:7], batch[7:]])  # pieces of the user's own
    >>> torch.testing.assert_close(ragged.grads, whole.grads)

    A loss that is a `Mean(total, weight)` averages over all the weight of the batch, such as its tokens; a scalar
    one over its examples. Metrics merge exactly. A piece may be without any weight.

    Each piece draws random numbers of its own, a function of the state's seed and step and of its index: with
    dropout the result depends on how the batch is cut. BatchNorm normalises each piece by itself and moves its
    running statistics once for each, as in a raw loop.

    Args:
        grad_fn: of a piece.
        microbatches: cut the batch along the first dimension into so many pieces, or one for each example where there
            are fewer; the first are larger by one example where they must be, as by `torch.tensor_split`.
        size: or into pieces of so many examples, the last one smaller. With neither, the batch is a list of pieces.
        dtype: add up in this dtype, in memory of its own, and return it. The default adds in that of the
            parameters, which loses small pieces of many in bfloat16.
        batch_size: counts the examples in a batch, as for `make_grad_fn`.

    Raises:
        ValueError: a count below 1; both given; a batch of no pieces, with tensors of different lengths, or of a type
            that cannot be cut; a `grad_fn` whose wrapper belongs around `accumulate` (clipping, `scale_loss`).
        TypeError: a batch that is no list where it must be.
    """
    if microbatches is not None and size is not None:
        raise ValueError(f"give microbatches={microbatches} or size={size}, not both")
    for name, value in (("microbatches", microbatches), ("size", size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}; give a whole number of at least 1")
    check_parts(grad_fn, "accumulate")

    def accumulated(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        if microbatches is None and size is None:
            pieces = _given(batch)
            count = sum(map(batch_size, pieces))
        else:
            count = batch_size(batch)
            sizes = size if size is not None else _even(count, microbatches or 1)
            pieces = split(batch, count, sizes, batch_size)
        return over(grad_fn, state, pieces, count, part, dtype)

    if hasattr(grad_fn, "max_norm"):  # which add_noise compares with its own
        accumulated.max_norm = grad_fn.max_norm  # type: ignore[attr-defined]
    return accumulated


def over(
    grad_fn: GradFn,
    state: TrainState,
    pieces: Sequence[Any],
    count: int,
    part: Part,
    dtype: torch.dtype | None = None,
) -> Gradients:
    """The gradients of all pieces together, of so many examples."""
    # Other ranks may have more pieces, and what they send each other comes in one order.
    if len(pieces) == 1 and dtype is None and (part.sums or not several()):
        return grad_fn(state, pieces[0], part)
    whole = dataclasses.replace(part, sums=True, samples=count if part.samples is None else part.samples)
    many = getattr(grad_fn, "many", None)
    if many is not None and dtype is None:
        outs: list[Gradients] = many(state, pieces, whole)
    else:
        outs = _one_by_one(grad_fn, state, pieces, whole, dtype)
    grads, _, buffers, _, _, per, ranks = outs[-1]
    metrics, samples = merge(*[out.metrics for out in outs]), sum(out.samples for out in outs)
    weights = [out.weight for out in outs if out.weight is not None]
    weight = _total(weights) if weights else None
    out = Gradients(grads, metrics, buffers, samples, weight, per, ranks)
    return out if part.sums else _mean(out)


def _mean(out: Gradients) -> Gradients:
    """The gradients of the mean loss, from those of the summed loss over `per`."""
    if out.weight is not None:
        total = total_over_ranks(out.weight) if out.ranks > 1 else out.weight
        multiply(out.grads, _factor(out.per * out.ranks, total))
    return out._replace(weight=None, per=1.0)


def _one_by_one(
    grad_fn: GradFn, state: TrainState, pieces: Sequence[Any], part: Part, dtype: torch.dtype | None
) -> list[Gradients]:
    """A call for each piece, which adds to the gradients of those before it."""
    per, grads = part.per, part.into
    wide: dict[str, Tensor] = {}
    if dtype is not None:  # each call gives its own alone
        _add(wide, grads or {}, dtype)
        grads = None
    outs: list[Gradients] = []
    for index, piece in zip(indices(part, len(pieces)), pieces, strict=True):
        last = part.last and len(outs) == len(pieces) - 1
        out = grad_fn(state, piece, dataclasses.replace(part, index=index, per=per, into=grads, last=last))
        if out.ranks > 1 and dtype is not None:
            raise RuntimeError(
                f"accumulate(dtype={dtype}) adds up in memory of its own, which DDP and FSDP2 do not reduce over the "
                "ranks: leave it out, and give fully_shard a MixedPrecisionPolicy(reduce_dtype=...), or leave the "
                "model unwrapped and use ll.distributed.reduce_gradients"
            )
        if out.weight is None and out.ranks == 1:
            raise TypeError(
                f"{getattr(grad_fn, '__name__', grad_fn)} gave no weight for a piece of a batch: a GradFn that is "
                "accumulated hands its `part` on to the one that it wraps (see ll.Part)"
            )
        per = out.per
        if dtype is None:
            grads = out.grads
        else:
            _add(wide, out.grads, dtype)
        outs.append(out._replace(grads={}))
        if any(tensor is not state.buffers[name] for name, tensor in out.buffers.items()):
            state = state.replace(buffers=out.buffers)
    outs[-1] = outs[-1]._replace(grads=out.grads if dtype is None else wide)
    return outs


def _given(batch: Any) -> Sequence[Any]:
    if not isinstance(batch, (list, tuple)):
        raise TypeError(
            f"accumulate without microbatches= or size= takes a list of pieces; this batch is a "
            f"{type(batch).__name__}: say how to cut it, or let the loader's collate_fn make a list"
        )
    if not batch:
        raise ValueError("the batch is an empty list: accumulate needs at least one piece")
    return batch


def _factor(per: Tensor | float, total: Tensor | float) -> Tensor | float:
    """`per / total`; the gradient of a batch without any weight is zero, as that of a whole one is."""
    if not isinstance(total, Tensor):
        return per / (total or 1)
    if total.device.type != "mps":
        total = total.double()
    return per / (total + (total == 0))


def _even(count: int, pieces: int) -> list[int]:
    pieces = max(1, min(pieces, count))
    return [count // pieces + (index < count % pieces) for index in range(pieces)]


def _total(weights: Sequence[Tensor | float]) -> Tensor | float:
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    number = sum(weight for weight in weights if not isinstance(weight, Tensor))
    return torch.stack(tensors).sum() + number if tensors else number


def _add(wide: dict[str, Tensor], grads: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    new = [name for name in grads if name not in wide]
    old = [name for name in grads if name in wide]
    if old:
        torch._foreach_add_([wide[name] for name in old], [grads[name] for name in old])
    wide.update({name: grads[name].to(dtype) for name in new})


def split(
    batch: Any, count: int, sizes: int | list[int], batch_size: Callable[[Any], int] = count_examples
) -> Sequence[Any]:
    """A batch of `count` examples in pieces of these sizes, or of one size, the last one smaller."""
    if isinstance(sizes, int):
        sizes = [min(sizes, count - low) for low in range(0, count, sizes)]
    if len(sizes) <= 1:
        return [batch]
    pieces = _split(batch, count, sizes, "")
    found = [batch_size(piece) for piece in pieces]
    if sum(found) != count:
        raise ValueError(
            f"a {type(batch).__name__} of {count} examples cannot be cut: its pieces would have "
            f"{', '.join(map(str, found))}. Give a batch of tensors (a dict, list, tuple or dataclass), smaller "
            "batches that need not be cut, or another count (batch_size=)"
        )
    return pieces


def _split(node: Any, count: int, sizes: list[int], place: str) -> list[Any]:
    pieces = len(sizes)
    if isinstance(node, Tensor):
        if not node.dim():
            return [node] * pieces
        if node.size(0) != count:
            raise ValueError(_odd(place, f"shape {tuple(node.shape)}", count))
        return list(torch.split(node, sizes))
    if isinstance(node, Mapping):
        cut = {key: _split(value, count, sizes, f"{place}[{key!r}]") for key, value in node.items()}
        rows: list[dict[Any, Any]] = [{key: cut[key][i] for key in cut} for i in range(pieces)]
        return rows if type(node) is dict or not isinstance(node, MutableMapping) else [_like(node, r) for r in rows]
    if isinstance(node, (list, tuple)):
        if len(node) == count and not _structure(node, count):
            return [node[low : low + size] for low, size in zip(accumulated_sum([0, *sizes]), sizes, strict=False)]
        members = [_split(value, count, sizes, f"{place}[{i}]") for i, value in enumerate(node)]
        if not members:
            return [node] * pieces
        columns = zip(*members, strict=True)
        if hasattr(node, "_fields"):
            return [type(node)(*column) for column in columns]
        return [type(node)(column) for column in columns]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        cut = {name: _split(getattr(node, name), count, sizes, f"{place}.{name}") for name in names}
        return [dataclasses.replace(node, **{name: cut[name][i] for name in names}) for i in range(pieces)]
    if getattr(node, "ndim", 0) and hasattr(node, "__getitem__"):  # a NumPy array and its like
        if len(node) != count:
            raise ValueError(_odd(place, f"shape {tuple(node.shape)}", count))
        return [node[low : low + size] for low, size in zip(accumulated_sum([0, *sizes]), sizes, strict=False)]
    leaves, structure = torch.utils._pytree.tree_flatten(node)
    if len(leaves) == 1 and leaves[0] is node:
        return [node] * pieces
    cut_leaves = [_split(leaf, count, sizes, place) for leaf in leaves]
    return [torch.utils._pytree.tree_unflatten(list(column), structure) for column in zip(*cut_leaves, strict=True)]


def _structure(node: Sequence[Any], count: int) -> bool:
    """Whether a list as long as the batch holds its fields, rather than one item for each example."""
    leaves = torch.utils._pytree.tree_leaves(list(node))
    lengths = {leaf.size(0) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    return lengths == {count}


def _like(node: Any, values: dict[Any, Any]) -> Any:
    new = copy.copy(node)
    for key, value in values.items():
        new[key] = value
    return new


def _odd(place: str, found: str, count: int) -> str:
    return (
        f"batch{place} has {found}, and the batch {count} examples: it cannot be cut along its first dimension. "
        "Give tensors with one row for each example, say how examples are counted (batch_size=), or make smaller "
        "batches; a gradient may have its pieces as a list (accumulate(grad_fn) without a count; a loader's "
        "collate_fn can make it)"
    )


def retry_on_oom(
    grad_fn: GradFn, size: int | None = None, *, batch_size: Callable[[Any], int] = count_examples
) -> GradFn:
    """When memory runs out, take the gradient of the same batch in pieces of half the size, and so from then on.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.retry_on_oom(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()))
    >>> gradients = grad_fn(ll.init_state(model), torch.zeros(8, 2))
    >>> gradients.metrics["microbatch_size"].compute()
    8

    The gradient is the whole batch's, as by `accumulate`; the metric `microbatch_size` says how large the pieces
    were, and a warning when they become smaller. What is remembered is the size that fits, which belongs to
    the machine and not to the run, so it is no part of the state: it stands in this function, and with dropout or
    BatchNorm, whose results depend on the pieces, so do the results.

    Args:
        grad_fn: of a piece; `accumulate(...)` too.
        size: the size of pieces to begin with; None for the whole batch.
        batch_size: counts the examples in a batch, as for `make_grad_fn`.

    A model in DistributedDataParallel is cut alike on all ranks: when memory runs out on one, all begin again with
    pieces that are half as large, and `microbatch_size` is that of the rank with the largest. The engine then sends
    nothing while the passes run, so that they can be given up; the gradients are reduced after them, in buckets, and
    the buffers of the first rank are sent to all. That takes longer than DDP's own reduction, which is hidden
    behind the backward pass. Within `ll.distributed.reduce_gradients`, around a model that is not wrapped, each rank
    cuts its own part by itself.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: the original, when one example alone does not fit. With DDP
            this or any other error of one rank's is raised on all, with the rank in the message.
        RuntimeError: a model whose passes no rank can give up alone, on several ranks: in FSDP2 or tensor parallel,
            with SyncBatchNorm, in DDP with `static_graph=True` or a communication hook.
        ValueError: within `accumulate`, whose gradients so far a failed attempt would have spoiled.
    """
    check_parts(grad_fn, "retry_on_oom")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"size is {size!r}; give a whole number of examples, at least 1")
    fitting = size
    engine: list[Callable[[TrainState, Gradients], Gradients]] = []  # if there is one, what it does at the end

    def attempt(state: TrainState, batch: Any, pieces: int, count: int, part: Part) -> tuple[Gradients | None, float]:
        """The gradients, or None where memory ran out on any rank; and the size of the pieces there."""
        saved = {name: tensor.clone() for name, tensor in state.buffers.items()} if part.donate else {}
        out, error, failed, largest = None, None, 0.0, float(pieces)
        try:
            out = over(grad_fn, state, split(batch, count, pieces, batch_size), count, part)
        except Exception as raised:
            failed = pieces if pieces > 1 and out_of_memory(raised) else math.inf
            error = raised if failed == math.inf else None
        if together := bool(engine) and several():
            failed, largest = largest_over_ranks([failed, largest])
        if not failed:
            return out, largest
        with torch.no_grad():
            for name, tensor in saved.items():
                state.buffers[name].copy_(tensor)
        if failed == math.inf:
            try:
                _raise(error, together)
            finally:
                error = None  # which knows this frame, and all that the attempt had allocated
        return None, failed

    def retrying(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        nonlocal fitting
        if tracing():
            raise UntraceableError(
                "retry_on_oom cannot try again within a compiled step: leave it out and give ll.accumulate(grad_fn, "
                "size=...), or leave out compile="
            )
        if part.into is not None or not part.last:
            raise ValueError(
                "retry_on_oom within accumulate would add to gradients that a failed attempt has spoiled: put it "
                "around, retry_on_oom(accumulate(grad_fn, ...))"
            )
        own = several() and not part.local  # what an engine would average, or this rank's alone
        asked = dataclasses.replace(part, retried=engine, sums=part.sums or own)
        count = batch_size(batch)
        while True:
            pieces = max(1, count if fitting is None else min(fitting, count))
            out, size = attempt(state, batch, pieces, count, asked)
            if out is not None:
                break
            fitting = half(round(size), count)
        if own and engine:
            if part.sums:
                raise ValueError(
                    "retry_on_oom of a model in DistributedDataParallel gives the gradient of a whole step, and was "
                    "asked for a part of one: put it around what asks"
                )
            out = engine[0](state, out)
        elif own and not part.sums:
            out = _mean(out)
        return out._replace(metrics={**out.metrics, "microbatch_size": Mean(round(size))})

    retrying.of_whole = "retry_on_oom"  # type: ignore[attr-defined]
    return retrying


def _raise(error: Exception | None, together: bool) -> NoReturn:
    """Raise this rank's error, or on all ranks that of the first that has one."""
    failures = gather(None if error is None else named(rank(), error)) if together else []
    raise_of({place: one for place, one in enumerate(failures) if one is not None}, rank(), error)
    assert error is not None
    raise error


_SIGNS = (
    "out of memory",
    "can't allocate memory",  # torch's allocator for the CPU
    "not enough memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def half(pieces: int, count: int) -> int:
    """The next size to try, when an attempt has failed."""
    # Only now, out of the handler, has the traceback let go of what the attempt had allocated.
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    smaller = -(-pieces // 2)
    warnings.warn(f"out of memory on a batch of {count}: from now on in pieces of {smaller}", stacklevel=3)
    return smaller


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
