"""Samples of a batch: the one rule by which they are counted, and how a batch is split along it.

The number of samples weights losses over ranks and microbatches, counts `state.samples` and says where a batch may be
cut. `count_samples` states the rule. What follows from it for cutting:

The samples lie along the first dimension of every tensor and array, and along every list or tuple that is as long as
the batch. Leaves without samples (a number, a name) belong to the whole batch, so each part of it has them too. An
object that holds samples where looplib cannot see them is refused, since each part would contain all of them, and so is
a list that could be cut in two ways.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from looplib._core import checks
from looplib._core.checks import check, few
from looplib._core.records import records_of
from looplib._core.trees import LEAVES, Path, is_array, node_of, python_path

CountSamples = Callable[[Any], int]

_ADVICE = (
    "Say how samples are counted: count_samples=lambda batch: ..., given to ll.make_grad_fn, ll.make_eval_step and "
    "ll.make_loader (functions around these take it from them; an evaluation that returns ll.Mean(total, weight) needs none)"
)


def count_samples(batch: Any) -> int:
    """Number of samples in a batch.

    >>> import torch
    >>> count_samples({"x": torch.zeros(16, 3), "y": torch.zeros(16), "temperature": 0.5})
    16
    >>> images, targets = [torch.zeros(3, 8, 8), torch.zeros(3, 6, 9)], [{"boxes": torch.zeros(5, 4)}, {}]
    >>> count_samples((images, targets)), count_samples(["to", "be", "or"])
    (2, 3)
    >>> count_samples({"image": torch.zeros(2, 3, 8, 8), "boxes": torch.zeros(5, 4)})
    Traceback (most recent call last):
    ValueError: the entries of a batch disagree on the number of samples: batch['image'] has 2, batch['boxes'] has 5...

    A batch that is a tuple, a list or a dict is a record, as torch's `default_collate` returns it: tensors and arrays in it
    count by their first dimension, lists and tuples by their length or as records of their own, and the number of
    samples is the one on which all of them agree. A list without any of these, such as one of strings or graphs, has its
    length.

    Named tuples, dataclasses, other mappings and types registered with torch's pytrees are records too. Numbers, strings,
    tensors without dimensions and unknown objects do not count.

    Args:
        batch: a tensor, an array, or any container of these.

    Raises:
        ValueError: the entries disagree, or agree on several numbers, as of a list of dicts: its length, and the number
            of rows in the dicts.
        TypeError: nothing in the batch can be counted.
    """
    # Each step calls this, so the common cases come first.
    if isinstance(batch, Tensor):
        if batch.dim():
            return batch.size(0)
    elif type(batch) in (tuple, list, dict) and batch:
        count = None
        for entry in batch.values() if type(batch) is dict else batch:
            if not isinstance(entry, Tensor) or not entry.dim():
                break
            size = entry.size(0)
            if count is not None and size != count:
                break
            count = size
        else:
            return count  # type: ignore[return-value]
    counts = _counts_of_batch(batch)
    if len(counts) == 1:
        return counts.pop()
    if counts:
        kind = type(batch).__name__
        raise ValueError(f"a {kind} may be a batch of {_either(counts)} samples: {counted(batch)}. {_ADVICE}")
    raise ValueError(f"the entries of a batch disagree on the number of samples: {counted(batch)}. {_ADVICE}")


def _counts_of_batch(batch: Any) -> set[int]:
    """Numbers of samples that a batch may have. A list is a record if anything in it counts, otherwise one of samples."""
    counts = _agreed(batch) if _is_list(batch) else _counts(batch)
    if _is_list(batch) and (counts is None or _may_be_samples(batch)):
        return {len(batch)} | (counts or set())
    if counts is None:
        kind = "tensor of shape ()" if isinstance(batch, Tensor) else type(batch).__name__
        raise TypeError(
            f"cannot count the samples in a {kind}: no tensor, array, list or tuple with samples is in it. {_ADVICE}"
        )
    return counts


def _may_be_samples(batch: Sequence[Any]) -> bool:
    """True for a list of dicts, or one of tuples with the same kinds of values: one for each sample, or columns."""
    if all(map(_is_record, batch)):
        return True
    if not all(map(_is_list, batch)):
        return False
    kinds = {tuple(map(_kind, entry)) for entry in batch}
    return len(kinds) == 1 and len({*kinds.pop()}) > 1


def _kind(value: Any) -> Any:
    return (value.dtype, value.ndim) if is_array(value) and hasattr(value, "dtype") else type(value)


def _counts(node: Any) -> set[int] | None:
    """Numbers of samples that an entry of a batch may stand for; None if it does not count."""
    if type(node) in _WITHOUT_SAMPLES:
        return None
    if is_array(node):
        return {_length(node)}
    if _is_list(node):
        as_record = None if _are_records(node) else _agreed(node)
        return {len(node)} | (as_record or set())
    inner = node_of(node)
    return None if inner is None else _agreed(inner.children)


# The common leaves, so that long lists of them cost little.
_WITHOUT_SAMPLES = {str, int, float, bool, bytes, type(None)}


def _agreed(children: Iterable[Any]) -> set[int] | None:
    """Numbers on which all children that count agree; None if none counts."""
    counts = [count for child in children if (count := _counts(child)) is not None]
    return set.intersection(*counts) if counts else None


def counted(batch: Any) -> str:
    """Counts of the entries of a batch, for messages: "batch['x'] has 16, batch['y'] has 12"."""
    return few([f"{python_path(path, 'batch')} has {_either(counts)}" for path, counts in _entries(batch)])


def _entries(node: Any, path: Path = ()) -> list[tuple[Path, set[int]]]:
    """Entries of a batch that count, for messages."""
    inner = None if is_array(node) or (path and _is_list(node)) else node_of(node)
    if inner is None:
        counts = _counts(node)
        return [] if counts is None else [(path, counts)]
    pairs = zip(inner.names, inner.children, strict=True)
    return [entry for name, child in pairs for entry in _entries(child, (*path, name))]


def _either(counts: set[int]) -> str:
    return " or ".join(map(str, sorted(counts)))


def _length(rows: Any) -> int:
    return rows.size(0) if isinstance(rows, Tensor) else len(rows)


def _is_list(node: Any) -> bool:
    return isinstance(node, (list, tuple)) and not hasattr(node, "_fields") and not isinstance(node, torch.Size)


def _is_record(node: Any) -> bool:
    """True for a container that is neither a list nor a tensor."""
    return not _is_list(node) and not is_array(node) and node_of(node) is not None


def _are_records(node: Sequence[Any]) -> bool:
    return bool(node) and all(map(_is_record, node))


# ---- parts ----


def split(
    batch: Any, count: int, sizes: int | list[int], count_samples: CountSamples = count_samples
) -> Sequence[Any]:
    """Split a batch of `count` samples into parts of these sizes, or of one size, with a smaller last part."""
    if isinstance(sizes, int):
        sizes = [min(sizes, count - low) for low in range(0, count, sizes)]
    if len(sizes) <= 1:
        return [batch]
    ends = pairwise([0, *accumulate(sizes)])
    with torch.enable_grad():  # a trace has it off, and a loss may take derivatives with respect to its microbatch
        parts = cut(batch, count, [operator.itemgetter(slice(low, high)) for low, high in ends])
    part_sizes = [*map(count_samples, parts)]
    if sum(part_sizes) != count:
        raise ValueError(
            f"a {type(batch).__name__} of {count} samples cannot be cut: its parts would have "
            f"{', '.join(map(str, part_sizes))}. Give a batch of tensors (a dict, list, tuple or dataclass), smaller "
            "batches that need not be cut, or another count (count_samples=)"
        )
    return parts


def padding_batch(batch: Any) -> Any:
    """Two samples of ones in place of a batch of none, with its dtypes and further dimensions."""

    def ones(rows: Any) -> Tensor:
        check(
            isinstance(rows, Tensor),
            f"this rank has no sample of the batch, and a {type(rows).__name__} is no tensor to run the model on in their "
            "place: give the loader drop_last=True, or another batch_size",
            TypeError,
        )
        return rows.new_ones(2, *rows.shape[1:])  # type: ignore[no-any-return]

    [padding] = cut(batch, 0, [ones])
    return padding


def cut(batch: Any, count: int, cuts: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """A copy of the batch for each function of `cuts`, with what it makes of each array or list that holds samples."""
    return _cut(batch, count, cuts, (), _has_lists_of_samples(batch, count))


def _cut(node: Any, count: int, cuts: Sequence[Callable[[Any], Any]], path: Path, by_lists: bool) -> list[Any]:
    has_rows = is_array(node)
    if has_rows and _length(node) != count:
        raise ValueError(
            f"{python_path(path, 'batch')} has shape {tuple(node.shape)}, and the batch {count} samples: it cannot be cut "
            "along its first dimension. Give tensors with one row for each sample, say how samples are counted "
            "(count_samples=), or make smaller batches; a gradient may have its pieces as a list (accumulate(grad_fn) "
            "without a count; a loader's collate_fn can make it)"
        )
    if has_rows or (_is_list(node) and len(node) == count and _is_list_of_samples(node, path, by_lists)):
        rows = getattr(node, "iloc", node)  # pandas objects are indexed by position
        return [cut_rows(rows) for cut_rows in cuts]
    inner = node_of(node)
    if inner is None and path and _hides_samples(node, count):
        raise ValueError(
            f"{python_path(path, 'batch')} is a {type(node).__name__}, an object that cannot be cut into "
            f"{count} samples: each part of the batch would have all of it. Give tensors, arrays or lists with "
            "one item for each sample, or make it a dataclass or a registered pytree"
        )
    if inner is None or not inner.children:
        return [node] * len(cuts)
    columns = [
        _cut(child, count, cuts, (*path, name), by_lists)
        for name, child in zip(inner.names, inner.children, strict=True)
    ]
    return [inner.rebuild(list(members)) for members in zip(*columns, strict=True)]


def one_for_each(node: Any, count: int) -> bool:
    """True for a list or tuple of one item per sample, which cannot be one of columns."""
    return _is_list(node) and len(node) == count and count not in (_agreed(node) or ())


def _is_list_of_samples(node: Sequence[Any], path: Path, by_lists: bool) -> bool:
    """True if a list that is as long as the batch has one item per sample, and not a column in each item.

    It may be either if its items have as many rows, as three images of three channels have. Then lists of other objects
    in the batch decide, such as boxes: what `default_collate` returns has none.
    """
    count = len(node)
    if one_for_each(node, count) or (path and (by_lists or _are_records(node))):
        return True
    check(
        count < 2 or not (path or _may_be_samples(node)),
        f"{python_path(path, 'batch')} is a {type(node).__name__} of {count} whose items have {count} rows each, in a batch of "
        f"{count} samples: it may have one item for each sample, or a column of the batch in each item. To cut it, stack "
        "what is in it into one tensor; a gradient may have its pieces as a list (accumulate(grad_fn) without a count)",
    )
    return False


def _has_lists_of_samples(node: Any, count: int, nested: bool = False) -> bool:
    """True if there is a list in a batch with one dict or unknown object for each sample."""
    inner = None if is_array(node) else node_of(node)
    if inner is None:
        return False
    if nested and _is_list(node):
        others = (child for child in node if type(child) not in _WITHOUT_SAMPLES)
        return len(node) == count and any(_is_record(child) or _counts(child) is None for child in others)
    return any(_has_lists_of_samples(child, count, nested=True) for child in inner.children)


def _hides_samples(leaf: Any, count: int) -> bool:
    """True if an unknown object contains tensors, or as many items as there are samples."""
    if isinstance(leaf, (*LEAVES, torch.nn.Module)):
        return False
    if any(isinstance(value, Tensor) and value.dim() for value in getattr(leaf, "__dict__", {}).values()):
        return True
    try:
        return len(leaf) == count
    except TypeError:
        return False


# ---- functions that count ----


def counter_of(function: Any, count_by: Any = None) -> CountSamples:
    """Function that counts the samples of a gradient function's or a step's batches: the one given, or that of its record."""
    if count_by is not None:
        return as_counter(count_by)
    return next(
        (record.count_samples for record in records_of(function) if record.count_samples is not None), count_samples
    )


def as_counter(function: Any) -> CountSamples:
    """The function given as `count_samples=`, with a check of what it returns; the rule if none is given."""
    if function is None or function is count_samples:
        return count_samples
    check(
        callable(function),
        f"count_samples is {checks.named(function)}; give a function from a batch to its number of samples, such as "
        "count_samples=lambda batch: len(batch['labels'])",
        TypeError,
    )

    return partial(_checked_count, function)


def _checked_count(function: CountSamples, batch: Any) -> int:
    count = function(batch)
    try:
        number = operator.index(count)  # of NumPy's integers too
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"count_samples returned {count!r}; return an int, the number of samples in the batch")
    return number


def are_columns(values: Any) -> bool:
    """True for the columns of a table, such as (x, y): tensors or arrays of equal length that differ in dtype or dimensions.

    >>> import torch
    >>> x, y = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
    >>> are_columns((x, y)), are_columns((x, x))
    (True, False)
    """
    if not isinstance(values, (tuple, list)) or not are_arrays_of_one_length(values):
        return False
    return len({(str(getattr(value, "dtype", "")), value.ndim) for value in values}) > 1


def are_arrays_of_one_length(values: Sequence[Any]) -> bool:
    return all(map(is_array, values)) and len({*map(len, values)}) == 1


def even(count: int, pieces: int) -> list[int]:
    """Sizes of this many microbatches, as of `torch.tensor_split`: the first ones may have one sample more."""
    pieces = max(1, min(pieces, count))
    return [count // pieces + (index < count % pieces) for index in range(pieces)]
