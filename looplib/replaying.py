"""Any step of a run again, and where two runs part.

A step is a function of a state and a batch, and the batch one of the state. So a kept state holds all of the run that
came after it: any step is had again, to the bit, by going there, and two runs that should be one are compared by
going on with both from where they still were.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib import _donation
from looplib._ranks import is_first, is_sharded
from looplib._tree_file import bytes_of, leaves_of, local
from looplib.accumulation import split
from looplib.checkpoint import CheckpointIO
from looplib.clipping import global_norm
from looplib.gradients import GradFn
from looplib.metrics import Mean, Metric, batch_size, compute
from looplib.progress import progress
from looplib.sinks import read_jsonl
from looplib.state import TrainState, copy_state, end_epoch
from looplib.steps import TrainStep

Batches = Callable[[TrainState], Iterable[Any]]
States = TrainState | Mapping[int, TrainState]
Fingerprint = Mapping[str, str]


@dataclass(frozen=True, eq=False, repr=False)
class Replayed:
    """One step of a run, as it was.

    Attributes:
        state: the one before the step.
        indices: of the batch's rows in the dataset, where the loader can tell.
        batch: what the step was given.
        metrics: those of the step.
        grads: name -> gradient, where a `grad_fn` was given.
        after: the state that it returned.
    """

    state: TrainState
    indices: Any
    batch: Any
    metrics: dict[str, Metric]
    grads: dict[str, Tensor] | None
    after: TrainState

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.6g}" for name, value in compute(self.metrics).items())
        return f"Replayed(step={self.state.step}, epoch={self.state.epoch}, batch={self.state.batch}, {values})"


def replay(
    train_step: TrainStep,
    state: States,
    loader: Batches,
    step: int,
    *,
    grad_fn: GradFn | None = None,
    donate: bool = False,
) -> Replayed:
    """The batch, the loss and the gradients of any step again, from a state kept at or before it.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    >>> loader = ll.make_loader(torch.arange(12.0).reshape(12, 1) / 12, batch_size=4)
    >>> kept = ll.copy_state(ll.init_state(model, optimizer, epoch_length=len(loader)))
    >>> found = replay(train_step, kept, loader, 7, grad_fn=grad_fn)
    >>> found
    Replayed(step=7, epoch=2, batch=1, loss=...)
    >>> found.batch.shape, sorted(found.grads), found.after.step, kept.step
    (torch.Size([4, 1]), ['bias', 'weight'], 8, 0)

    The run goes on from the state that is nearest before, with the loader, up to that step and through it: the update
    from a state at step 7 to one at step 8 is step 7. Where its batch was skipped (`found.after.skipped`), the next
    one tried at the same step is `replay(train_step, found.after, loader, 7)`.

    The bits are those of the run, if what it did between its steps is in `train_step` too: a loop that changes
    `state.extra` for the step to read, or makes two updates on a batch, is given as a function
    `(state, batch) -> (state, metrics)` of all that. The states given stay good, whether the step donates or not, and
    those returned share no tensor with them. A replay of more than a second shows a bar in a terminal or notebook.

    Args:
        train_step: the run's own.
        state: one of the run, or a mapping from steps to such, as `keep` and `saved_states` give them.
        loader: the run's own: a function from a state to what is left of its epoch.
        step: which one, as `state.step` counts them.
        grad_fn: for the gradients too: the one that the step was made of.
        donate: a step that donates may spend the state given. For a module wrapped in DDP or FSDP2, which works on
            its own tensors alone: the state is then one bound to it, and the grad_fn left out.

    Raises:
        ValueError: no state at or before the step, a step that no batch begins with, a loader that gives no batch.
        TypeError: a step that is no whole number, a state that is none.
    """
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step is {step!r}; give a whole number, as state.step counts them")
    start = _nearest(_by_step(state), step)
    start = start if donate else copy_state(start)
    whole = TrainState(epoch_length=max(step - start.step, 1))
    walk = _walk(train_step, start, loader)
    disable = None if is_first() else True  # None: unless in a terminal or a notebook
    with closing(progress(walk, whole, desc=f"to step {step}", leave=False, delay=1.0, disable=disable)) as places:
        now, batch, _ = next(place for place in places if place[0].step >= step)
    if now.step > step:
        raise ValueError(
            f"no batch begins at step {step}: one begins before it and ends at step {now.step}, as several updates "
            "are made on each; give the step at which that batch begins"
        )
    before = copy_state(now)
    grads = None if grad_fn is None else grad_fn(before, batch).grads
    after, metrics = train_step(now, batch)
    return Replayed(before, _indices(loader, before), batch, metrics, grads, after)


def _by_step(states: States) -> Mapping[int, TrainState]:
    if isinstance(states, TrainState):
        return {states.step: states}
    if not isinstance(states, Mapping):
        raise TypeError(f"state is a {type(states).__name__}; give a TrainState, or a mapping from steps to these")
    return states


def _nearest(states: Mapping[int, TrainState], step: int) -> TrainState:
    before = [at for at in states if at <= step]
    if not before:
        raise ValueError(
            f"there is no state at or before step {step}, and a run cannot be run back: those given are at "
            f"{', '.join(map(str, sorted(states))) or 'no step at all'}; give one that was kept earlier, such as the "
            "first of the run"
        )
    return states[max(before)]


def _walk(
    train_step: TrainStep, state: TrainState, loader: Batches
) -> Iterator[tuple[TrainState, Any, dict[str, Metric] | None]]:
    """A run without end: each state, its batch, and the metrics of the step that led there."""
    metrics: dict[str, Metric] | None = None
    while True:
        empty = True
        for batch in loader(state):
            empty = False
            yield state, batch, metrics
            state, metrics = train_step(state, batch)
        if empty:
            raise ValueError(f"the loader gave no batch for {state}; is it the run's own?")
        if state.epoch_length is None:
            state = end_epoch(state)


def _indices(loader: Any, state: TrainState) -> Any:
    return loader.indices(state) if hasattr(loader, "indices") else None


def keep(kept: Mapping[int, TrainState], state: TrainState, *, at_most: int | None = None) -> dict[int, TrainState]:
    """The kept states of a run and one more, which costs only what differs from the last of them.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(100, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> model.weight.requires_grad_(False).shape
    torch.Size([1, 100])
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer, donate=True)
    >>> state, kept = ll.init_state(model, optimizer), {}
    >>> for _ in range(10):
    ...     kept = keep(kept, state)
    ...     state, metrics = step(state, torch.ones(2, 100))
    >>> len(kept), nbytes(kept[0].params), nbytes([state.params for state in kept.values()])
    (10, 404, 440)

    A tensor with the same bits as in the last one kept is shared with it: a frozen parameter, an unchanged buffer.
    The others are copied, so that the run, if its steps donate, spends none that is kept. What all of them take is
    `nbytes(list(kept.values()))`.

    With `at_most`, the first and the last stay, and between them those go first that stand closest for their age.
    What is left stands ever wider apart, so that a step is replayed from about as far before it as it lies back.

    Args:
        kept: by step; `{}` to begin with. It is left as it is.
        state: no earlier than those.
        at_most: how many to keep, 2 or more; None for all.

    Raises:
        ValueError: the state is from before the last one kept, or `at_most` is below 2.
        DonatedStateError: the state is spent.
    """
    if at_most is not None and at_most < 2:
        raise ValueError(f"at_most is {at_most}; give 2 or more: the first state and the last are always kept")
    last = max(kept, default=None)
    if last is not None and last > state.step:
        raise ValueError(
            f"the state is at step {state.step}, and the last one kept at step {last}, so they are not one after "
            "another in a run. After a roll-back, take the others along no further: "
            f"kept = {{step: state for step, state in kept.items() if step <= {state.step}}}"
        )
    known = {} if last is None else dict(_leaves(kept[last]))
    copies: dict[int, Tensor] = {}

    def own(place: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            old, plain = known.get(place), leaf.detach().requires_grad_(leaf.requires_grad)
            if isinstance(old, Tensor) and old is not leaf and _interchangeable(old, plain):
                copies[id(leaf)] = old
            else:
                copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    trees = {}
    for name in ("params", "buffers", "opt_state", "extra"):
        leaves, structure = torch.utils._pytree.tree_flatten(tree := getattr(state, name))
        owned = [own(f"/{name}{below}", leaf) for below, leaf in zip(leaves_of(tree), leaves, strict=True)]
        trees[name] = torch.utils._pytree.tree_unflatten(owned, structure)
    found = {**kept, state.step: state.replace(**trees)}
    steps = sorted(found)
    while at_most is not None and len(steps) > at_most:
        # Where they stand apart by a factor, the gap that each would leave is the same part of its age.
        neighbours = zip(steps, steps[1:], steps[2:], strict=False)
        gaps = [(after - before) / (steps[-1] - at) for before, at, after in neighbours]
        del steps[1 + gaps.index(min(gaps))]
    return {step: found[step] for step in steps}


def _interchangeable(old: Tensor, new: Tensor) -> bool:
    """Not only in their bits, but for whoever computes with them."""

    def kind(tensor: Tensor) -> Any:
        strides = tensor.stride() if tensor.layout == torch.strided else None
        return type(tensor), tensor.device, tensor.layout, strides, tensor.requires_grad

    return kind(old) == kind(new) and _same_bits(old, new)


def nbytes(tree: Any) -> int:
    """How many bytes the tensors of a tree take, each piece of memory counted once, however many share it.

    >>> import torch
    >>> weight = torch.zeros(1000)
    >>> nbytes(weight), nbytes([weight, {"view": weight[:10], "copy": weight.clone()}])
    (4000, 8000)

    Args:
        tree: any pytree: a state, a list of states, a batch. Of a DTensor, what this process holds.

    Raises DonatedStateError for a spent state.
    """
    storages = {}
    for leaf in _donation.tensors_in(tree):
        storage = (local(leaf) if is_sharded(leaf) else leaf).untyped_storage()
        storages[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _Saved(Mapping[int, TrainState]):
    """The states of a directory of checkpoints, each read when it is asked for."""

    def __init__(self, ckpt: CheckpointIO, state: TrainState) -> None:
        self._ckpt, self._like = ckpt, copy_state(state)  # which is bound to no module that a restore would write to

    def __getitem__(self, step: int) -> TrainState:
        if step not in self:
            raise KeyError(step)
        return self._ckpt.restore(self._like, which=step)

    def __contains__(self, step: object) -> bool:
        return step in list(self)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({found.step for found in self._ckpt.steps()}))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def saved_states(ckpt: CheckpointIO, state: TrainState) -> Mapping[int, TrainState]:
    """The states of a directory of checkpoints by their steps, each read when it is asked for.

    >>> import looplib as ll, tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> ckpt = ll.checkpoint_io(folder.name)
    >>> state = ll.init_state(torch.nn.Linear(2, 1))
    >>> for step in (0, 500):
    ...     path = ckpt.save(state.replace(step=step))
    >>> states = saved_states(ckpt, state)
    >>> list(states), states[500].step
    ([0, 500], 500)
    >>> folder.cleanup()

    So `replay(train_step, saved_states(ckpt, state), loader, 730)` begins at the checkpoint of step 500. Nothing is
    written into the module that `state` is bound to.

    Args:
        ckpt: from `checkpoint_io`.
        state: any state of that structure, such as that of `init_state`; it stays good.

    Asking for a step raises what `ckpt.restore` does, and KeyError for one that is not there.
    """
    return _Saved(ckpt, state)


def fingerprint(tree: Any) -> dict[str, str]:
    """A few characters for each leaf of a state, or of any tree, that are the same just where its bits are.

    >>> import looplib as ll, torch
    >>> state = ll.init_state(torch.nn.Linear(2, 1), seed=3)
    >>> found = fingerprint(state)
    >>> found["/seed"], len(found["/params/weight"]), found == fingerprint(ll.copy_state(state))
    ('3', 16, True)

    In a log, they tell where two runs part that never meet, on two machines or by two versions. On each:

        prints = ll.jsonl("prints.jsonl")
        ...
        if print_now(state):
            prints(state, ll.fingerprint(state))

    and where both logs are: `first_difference(read_fingerprints("a.jsonl"), read_fingerprints("b.jsonl"))`.

    Args:
        tree: a state; or anything of tensors, NumPy arrays and plain values, such as a batch, or
            `{"state": state, "batch": batch}`.

    Of a tensor it is a hash of dtype, shape and bytes, wherever it lies and whatever its strides (of a DTensor, this
    process's part); a plain value stands for itself. So 0.0 and -0.0 differ, as two NaNs may. Each tensor is copied
    to the host.

    Raises TypeError for a leaf that is none of these, with its place.
    """
    return {place: _digest(place, leaf) for place, leaf in _leaves(tree)}


def _digest(place: str, leaf: Any) -> str:
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        text = repr(leaf)
        return text if len(text) <= 32 else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    if isinstance(leaf, Tensor):
        data = _bits(leaf).cpu()
        found, content = (leaf.dtype, tuple(leaf.shape)), bytes_of(data)
    elif hasattr(leaf, "tobytes") and hasattr(leaf, "shape"):  # NumPy's
        found, content = (leaf.dtype, tuple(leaf.shape)), memoryview(leaf.tobytes())
    else:
        raise TypeError(
            f"{place} is a {type(leaf).__name__}, which has no bytes to take a fingerprint of; give a tree of "
            "tensors, NumPy arrays and plain values"
        )
    digest = hashlib.blake2b(repr(found).encode(), digest_size=8)
    digest.update(content)
    return digest.hexdigest()


def _bits(tensor: Tensor) -> Tensor:
    """Its bytes, in the order of its numbers."""
    tensor = local(tensor) if is_sharded(tensor) else tensor.detach()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other).to(one.device))


def _leaves(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """All that a tree holds by place, such as /params/0.weight; the counts of a state, and records, too."""
    children: Iterable[tuple[Any, Any]]
    if isinstance(node, Mean):  # by its value, in however many parts it came
        yield place or "/", node.compute()
        return
    if isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, (list, tuple)):
        children = zip(getattr(node, "_fields", range(len(node))), node, strict=True)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        children = [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    elif not isinstance(node, Tensor) and list(found := leaves_of(node)) != [""]:
        yield from ((place + below, leaf) for below, leaf in found.items())
        return
    else:
        yield place or "/", node
        return
    for key, child in children:
        yield from _leaves(child, f"{place}/{str(key).replace('~', '~0').replace('/', '~1')}")


def read_fingerprints(path: str | os.PathLike[str]) -> dict[int, dict[str, str]]:
    """The fingerprints that were logged into a `jsonl` file, by step.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/prints.jsonl"
    >>> for step in (0, 10):
    ...     ll.jsonl(path)(ll.TrainState(step=step), fingerprint({"x": step / 10}))
    >>> read_fingerprints(path)
    {0: {'/x': '0.0'}, 10: {'/x': '1.0'}}

    Other rows of the log are passed over. Where a run went back, what it had logged beyond is left out.

    Args:
        path: the log.

    Raises FileNotFoundError when nothing was logged yet.
    """
    found: dict[int, dict[str, str]] = {}
    for row in read_jsonl(path):
        if prints := {name: str(value) for name, value in row.items() if name.startswith("/")}:
            found = {step: kept for step, kept in found.items() if step < row["step"]}
            found[row["step"]] = prints
    return found


@dataclass(frozen=True, slots=True, repr=False)
class LeafDifference:
    """A leaf that is not the same in two trees.

    Attributes:
        place: where in the tree, such as "/params/0.weight".
        largest: the largest difference of two of its numbers; NaN where there are none to subtract.
        differing: how many numbers differ.
        numel: of how many.
        found: what was found, in words.
    """

    place: str
    largest: float
    differing: int
    numel: int
    found: str

    def __repr__(self) -> str:
        return f"{self.place}: {self.found}"


def differences(one: Any, other: Any, *, rtol: float = 0.0, atol: float = 0.0) -> list[LeafDifference]:
    """The leaves that are not the same in two states, two replayed steps, two batches, or any two trees.

    >>> import torch
    >>> differences({"x": torch.ones(3), "n": 1}, {"x": torch.tensor([1.0, 1.0, 1.5]), "n": 1})
    [/x: 1 of 3 numbers, by 0.5 at most]
    >>> differences(torch.ones(3), torch.ones(3) + 1e-6, rtol=1e-5)
    []

    They come in the order of the first tree: of `Replayed` steps that is the batch, metrics, gradients, and then the
    state after, so the first to be named is what parted first.

    Args:
        one, other: trees, on any devices; either may be a fingerprint, and then the other is taken for one.
        rtol, atol: floating-point numbers may differ by `atol + rtol * abs(other)`, as in `torch.allclose`, and NaN
            equals NaN. Both 0 compares bits.
    """
    if _is_fingerprint(one) or _is_fingerprint(other):
        first, second = (tree if _is_fingerprint(tree) else fingerprint(tree) for tree in (one, other))
    else:
        first, second = dict(_leaves(one)), dict(_leaves(other))
    nan, found = math.nan, []
    for place in {**first, **second}:
        if place not in first or place not in second:
            which = "first" if place in first else "second"
            found.append(LeafDifference(place, nan, 0, 0, f"is in the {which} alone"))
        elif difference := _difference(place, first[place], second[place], rtol, atol):
            found.append(difference)
    return found


def _is_fingerprint(tree: Any) -> bool:
    return isinstance(tree, Mapping) and bool(tree) and all(type(leaf) is str for leaf in tree.values())


def _difference(place: str, one: Any, other: Any, rtol: float, atol: float) -> LeafDifference | None:
    if (first := _tensor_of(one)) is not None and (second := _tensor_of(other)) is not None:
        return _difference_of_tensors(place, first, second, rtol, atol)
    if type(one) is type(other) and one == other:
        return None
    numbers = all(isinstance(leaf, (int, float)) for leaf in (one, other))
    largest = abs(float(one) - float(other)) if numbers else math.nan
    return LeafDifference(place, largest, 1, 1, f"{_in_words(one)} against {_in_words(other)}")


def _tensor_of(leaf: Any) -> Tensor | None:
    """The numbers of a tensor, of an array or scalar of NumPy, or of a float."""
    if isinstance(leaf, Tensor):
        return local(leaf) if is_sharded(leaf) else leaf.detach()
    if type(leaf) is float:
        return torch.tensor(leaf, dtype=torch.float64)
    return torch.as_tensor(leaf) if hasattr(leaf, "__array__") and leaf.dtype.kind in "biufc" else None


def _difference_of_tensors(place: str, one: Tensor, other: Tensor, rtol: float, atol: float) -> LeafDifference | None:
    exact = not (rtol or atol)
    if one.shape != other.shape or (exact and one.dtype != other.dtype):
        return LeafDifference(place, math.nan, 0, one.numel(), f"{_in_words(one)} against {_in_words(other)}")
    if _same_bits(one, other):
        return None
    one, other = one.cpu(), other.cpu()
    real = one.is_floating_point() or one.is_complex()
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(math.inf, math.inf)
    if exact:  # by their bytes: 0.0 and -0.0, and two NaNs, have no gap
        rows = torch.stack([_bits(one), _bits(other)]).reshape(2, one.numel(), -1)
        apart = (rows[0] != rows[1]).any(1).reshape(one.shape)
    elif real:
        apart = ~same & ~(gap.isfinite() & (gap <= atol + rtol * b.abs()))
    else:
        apart = one != other
    if not (differing := int(apart.sum())):
        return None
    largest = float(gap[apart].max())
    found = f"{differing} of {one.numel()} numbers, by {largest:.3g} at most"
    return LeafDifference(place, largest, differing, one.numel(), found)


def _in_words(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    text = repr(leaf)
    return text if len(text) <= 60 else f"a {type(leaf).__name__}"


@dataclass(frozen=True, eq=False)
class Run:
    """What a run is replayed from.

    >>> Run(lambda state, batch: (state, {}), TrainState(), lambda state: []).states
    TrainState(step=0, epoch=0, batch=0, samples=0, seed=0)

    Attributes:
        train_step: its step.
        states: one state of it, or a mapping from steps to such, as `keep` and `saved_states` give them.
        loader: its batches, as a function of the state.
        grad_fn: what the step was made of, to compare gradients.
    """

    train_step: TrainStep
    states: States
    loader: Batches
    grad_fn: GradFn | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Difference:
    """Where two runs part.

    Attributes:
        equal: the last step at which their states were the same; None where the first ones differ.
        different: the next one that was looked at, where they are not.
        leaves: what differs there, in the order in which it came to differ.
        replayed: the step between, of either run, where they were replayed.
    """

    equal: int | None
    different: int
    leaves: list[LeafDifference]
    replayed: tuple[Replayed, Replayed] | None = None

    def __repr__(self) -> str:
        since = "from the first on" if self.equal is None else f"and were the same at step {self.equal}"
        shown = [f"  {leaf}" for leaf in self.leaves[:10]]
        more = [f"  and {len(self.leaves) - 10} more"] if len(self.leaves) > 10 else []
        return "\n".join([f"the runs differ at step {self.different}, {since}:", *shown, *more])


def first_difference(
    one: Run | Mapping[int, TrainState | Fingerprint],
    other: Run | Mapping[int, TrainState | Fingerprint],
    *,
    stop: int | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Difference | None:
    """The first step at which two runs part, and what parts there; None where they do not.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> loader = ll.make_loader(torch.arange(12.0).reshape(12, 1), batch_size=4)
    >>> state = ll.init_state(model, optimizer, epoch_length=len(loader))
    >>> train_step = ll.make_train_step(grad_fn, optimizer)
    >>> def other_step(state, batch):
    ...     return train_step(state, batch * 2 if state.step == 7 else batch)
    >>> one, other = Run(train_step, state, loader, grad_fn), Run(other_step, state, loader, grad_fn)
    >>> found = first_difference(one, other, stop=20)
    >>> found.equal, found.different, found.leaves[0].place
    (7, 8, '/metrics/loss')
    >>> print(first_difference(one, one, stop=20))
    None

    Of two mappings from steps to states or fingerprints (`keep`, `saved_states`, `read_fingerprints`) the steps in
    common are compared. Checkpoints are found by bisection: of a thousand pairs ten are read, since runs that have
    parted are taken to stay so.

    Of two `Run`s, their kept states are compared so, and from the last that are the same both run on, side by side,
    until they part: to the first that differ, or to `stop`. What parts in that step is named in the order in which it
    came about, so that it shows where it begins: with the batch, the loss, a gradient, or only the update. Steps may
    donate; the states given stay good.

    Two machines or two versions: a log of `fingerprint(state)` on each tells between which steps to look. From the
    last checkpoint before, log each step, the batch and the gradients too:
    `prints(found.state, ll.fingerprint({"batch": found.batch, "grads": found.grads}))` of a `replay`. Eager
    against compiled: two `Run`s from one state, with a tolerance.

    Args:
        one, other: two `Run`s, or two mappings.
        stop: where to end if the runs have not parted; without it, at the last kept states in common.
        rtol, atol: see `differences`; both 0 compares bits.

    Where kept states differ, and the same steps replayed do not, what parted the runs is in neither's functions: they
    ran on another machine, or by another version. `replayed` is None then, and the steps are those of kept states.

    Raises:
        ValueError: no step in common, or nothing to run on to.
        TypeError: a run and a mapping: log the run, or give both with their steps.
    """
    if isinstance(one, Run) != isinstance(other, Run):
        raise TypeError(
            "one of these is a Run and the other is not; give two Runs, or two mappings from steps to states or "
            "fingerprints, such as the states that the Run has kept"
        )
    first: Mapping[int, Any] = _by_step(one.states) if isinstance(one, Run) else one
    second: Mapping[int, Any] = _by_step(other.states) if isinstance(other, Run) else other
    steps = sorted(set(first) & set(second))
    if not steps:
        raise ValueError(
            f"the runs have no step in common: one has {_listed(first)}, the other {_listed(second)}; keep or log "
            "both at the same steps, such as ll.every_n_steps(100), or give them one state to begin with"
        )

    def leaves_at(step: int) -> list[LeafDifference]:
        return differences(first[step], second[step], rtol=rtol, atol=atol)

    lazy = isinstance(first, _Saved) or isinstance(second, _Saved)
    index = (_bisect if lazy else _scan)(steps, lambda step: bool(leaves_at(step)))
    equal = steps[index - 1] if index else None
    kept = Difference(equal, steps[index], leaves_at(steps[index])) if index < len(steps) else None
    if equal is None or not (isinstance(one, Run) and isinstance(other, Run)):
        return kept
    if kept is None and len(steps) == 1 and stop is None:
        raise ValueError(f"the runs have one state in common, at step {equal}; give stop=, a step to run on to")
    ends = [end for end in (stop, None if kept is None else kept.different) if end is not None]
    return _side_by_side(one, other, first[equal], second[equal], min(ends, default=equal), rtol, atol) or kept


def _listed(steps: Iterable[int]) -> str:
    found = sorted(steps)
    return f"steps {found[0]} to {found[-1]}" if found else "none"


def _scan(steps: Sequence[int], differ: Callable[[int], bool]) -> int:
    """Where the first of the steps is that differs, or how many there are."""
    return next((index for index, step in enumerate(steps) if differ(step)), len(steps))


def _bisect(steps: Sequence[int], differ: Callable[[int], bool]) -> int:
    """The same, where all that come after one that differs do."""
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if differ(steps[middle]) else (middle + 1, high)
    return low


class _Place(NamedTuple):
    state: TrainState
    batch: Any
    metrics: dict[str, Metric] | None


def _side_by_side(
    one: Run, other: Run, first: TrainState, second: TrainState, stop: int, rtol: float, atol: float
) -> Difference | None:
    """Both runs on from states that are the same, to the first that are not or to a step."""
    runs = one, other
    walks = [
        _walk(run.train_step, copy_state(start), run.loader) for run, start in zip(runs, (first, second), strict=True)
    ]
    before: list[_Place] | None = None
    for pair in zip(*walks, strict=True):
        now = [_Place(*place) for place in pair]
        leaves = differences(now[0].state, now[1].state, rtol=rtol, atol=atol)
        if leaves and before is not None:
            rows = [_indices(run.loader, was.state) for run, was in zip(runs, before, strict=True)]
            known = all(indices is not None for indices in rows)
            replayed = [
                Replayed(
                    state=was.state,
                    indices=indices if known else None,
                    batch=was.batch,
                    metrics=place.metrics or {},
                    grads=None if run.grad_fn is None else run.grad_fn(was.state, was.batch).grads,
                    after=place.state,
                )
                for run, was, place, indices in zip(runs, before, now, rows, strict=True)
            ]
            leaves = differences(*replayed, rtol=rtol, atol=atol)
            different = max(place.state.step for place in now)
            return Difference(before[0].state.step, different, leaves, (replayed[0], replayed[1]))
        if max(place.state.step for place in now) >= stop:
            return None
        before = [place._replace(state=copy_state(place.state)) for place in now]  # which the step may spend
    return None


@dataclass(frozen=True, slots=True)
class RowScore:
    """One row of a batch by itself.

    Attributes:
        row: which of the batch.
        index: of the dataset, where that is known.
        loss: of this row alone.
        grad_norm: of its gradient, over all parameters.
    """

    row: int
    index: Any
    loss: float
    grad_norm: float


def worst_rows(
    grad_fn: GradFn,
    state: TrainState,
    batch: Any,
    indices: Any = None,
    *,
    batch_size: Callable[[Any], int] = batch_size,
) -> list[RowScore]:
    """The rows of a batch by the norms of their own gradients, largest first: who made the spike.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> batch, indices = torch.tensor([[0.1], [50.0], [0.2]]), torch.tensor([31, 7, 12])
    >>> [row.index for row in worst_rows(grad_fn, ll.init_state(model), batch, indices)]
    [7, 12, 31]

    Losses and norms that are infinite or NaN come first. Each row goes through `grad_fn` alone, as a batch of one:
    what is drawn within the model differs from what the row met among the others, and BatchNorm in training mode,
    which cannot do with one row, is to be put into eval mode before `make_grad_fn`.

    With the `Replayed` step of the spike: `worst_rows(grad_fn, found.state, found.batch, found.indices)`.

    Args:
        grad_fn: from `make_grad_fn` or `make_per_sample_grad_fn`; not clipped, or all norms are the clip's.
        state: the one that the batch was met at.
        batch: anything that `accumulate` can cut.
        indices: (batch,) of the rows in the dataset.
        batch_size: counts the rows.

    Raises ValueError for indices that are not one for each row.
    """
    count = batch_size(batch)
    if indices is not None and len(indices) != count:
        raise ValueError(f"{len(indices)} indices for a batch of {count} rows; give one for each")
    scores = []
    for row, piece in enumerate(split(batch, count, [1] * count, batch_size)):
        out = grad_fn(state, piece)
        index = None if indices is None else indices[row]
        index = index.item() if isinstance(index, Tensor) else index
        norm = float(global_norm(grad.double() for grad in out.grads.values()))
        scores.append(RowScore(row, index, compute(out.metrics)["loss"], norm))

    def order(score: RowScore) -> tuple[bool, float]:
        finite = math.isfinite(score.loss) and math.isfinite(score.grad_norm)
        return finite, -score.grad_norm if finite else 0.0

    return sorted(scores, key=order)
