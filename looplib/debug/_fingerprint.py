"""State fingerprints: short hashes of the bits of each leaf."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check, parts_of
from looplib._core.checksums import bits_of, bytes_of
from looplib._core.ranks import local
from looplib._core.torch_private import wraps_tensors
from looplib.log import read_jsonl
from looplib.metrics import Mean

Fingerprint = Mapping[str, str]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def fingerprint(tree: Any) -> dict[str, str]:
    """Fingerprint a state or any tree: a short hash for each leaf, equal only if the bits are equal.

    >>> import looplib as ll, torch
    >>> state = ll.init_state(torch.nn.Linear(2, 1), seed=3)
    >>> hashes = fingerprint(state)
    >>> hashes["/seed"], len(hashes["/params/weight"]), hashes == fingerprint(ll.copy_state(state))
    ('3', 16, True)

    Log fingerprints to find where two runs on different machines or versions start to differ. On each machine:

        prints = ll.jsonl("prints.jsonl")
        ...
        if print_now(state):
            prints(state, ll.debug.fingerprint(state))

    Then compare the logs: `first_difference(read_fingerprints("a.jsonl"), read_fingerprints("b.jsonl"))`.

    The fingerprint of a tensor is a hash of its dtype, shape and bytes, on any device and with any strides. For a
    DTensor, it is the hash of this process's shard. A tensor that consists of others, such as a quantized one, has a hash
    for each of these (`/params/0.weight/scale`). A plain value is its own fingerprint. 0.0 and -0.0 differ, and two NaNs
    may. Each tensor is copied to the CPU.

    Args:
        tree: a state, or any tree of tensors, NumPy arrays and plain values, such as a batch, or
            `{"state": state, "batch": batch}`.

    Raises:
        TypeError: a leaf is none of these. The message gives its path.
    """
    return {path: _hash(path, leaf) for path, leaf in leaves_by_path(tree)}


def leaves_by_path(tree: Any) -> Iterator[tuple[str, Any]]:
    """Leaves of a tree by path, such as /params/0.weight. A `Mean` counts as its value, however it was accumulated.

    Of a tensor that consists of others, such as a quantized one, its kind and each of these, /params/0.weight/scale.
    """
    for path, leaf in trees.leaves(tree, is_leaf=lambda node: isinstance(node, Mean)):
        yield from _parts(trees.pointer(path) or "/", leaf.compute() if isinstance(leaf, Mean) else leaf)


def _parts(path: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(leaf, Tensor) or not wraps_tensors(tensor := local(leaf)):
        yield path, leaf
        return
    yield path, f"{type(tensor).__name__} of {str(tensor.dtype).removeprefix('torch.')}"
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _parts(f"{path.rstrip('/')}/{name}", getattr(tensor, name))


def _hash(path: str, leaf: Any) -> str:
    if isinstance(leaf, _PLAIN):
        text = repr(leaf)
        return text if len(text) <= 32 else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    check(
        isinstance(leaf, Tensor) or (hasattr(leaf, "tobytes") and hasattr(leaf, "shape")),  # NumPy arrays and scalars
        f"{path} is a {type(leaf).__name__}, which has no bytes to take a fingerprint of; give a tree of tensors, NumPy "
        "arrays and plain values",
        TypeError,
    )
    digest = hashlib.blake2b(repr((leaf.dtype, tuple(leaf.shape))).encode(), digest_size=8)
    bits = bits_of(local(leaf)).cpu() if isinstance(leaf, Tensor) else None  # bytes_of does not keep it alive
    digest.update(leaf.tobytes() if bits is None else bytes_of(bits))
    return digest.hexdigest()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have the same dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    parts, others = parts_of(local(one)), parts_of(local(other))
    if len(parts) != len(others):
        return False
    if len(parts) > 1:
        return all(map(same_bits, parts, others))
    return torch.equal(bits_of(parts[0]), bits_of(others[0]).to(parts[0].device))


def read_fingerprints(path: str | os.PathLike[str]) -> dict[int, dict[str, str]]:
    """Read fingerprints from a `jsonl` log, by step.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/prints.jsonl"
    >>> for step in (0, 10):
    ...     ll.jsonl(path)(ll.TrainState(step=step), fingerprint({"x": step / 10}))
    >>> read_fingerprints(path)
    {0: {'/x': '0.0'}, 10: {'/x': '1.0'}}

    Rows of one step that have different leaves, such as those of a state and of a batch, are read as one. Other rows of the
    log are skipped. If the run went back to a step, and logs the same leaves or after later ones, its previous rows from that
    step on are left out.

    Args:
        path: path of the log.

    Raises:
        FileNotFoundError: nothing has been logged yet.
    """
    by_step: dict[int, dict[str, str]] = {}
    for row in read_jsonl(path):
        if hashes := {name: str(value) for name, value in row.items() if name.startswith("/")}:
            # A later step, or a leaf that is there already, shows that the run went back to this one.
            step, went_back = row["step"], False
            while by_step and next(reversed(by_step)) > step:
                by_step.popitem()
                went_back = True
            before = by_step.get(step, {})
            went_back = went_back or not before.keys().isdisjoint(hashes)
            by_step[step] = hashes if went_back else {**before, **hashes}
    return by_step
