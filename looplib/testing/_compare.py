"""What the checks of `looplib.testing` compare, and how they say what they found.

A result is compared leaf by leaf under the names that a user knows it by, to the bit or in float64. What must stay as
it was besides (random streams, modules, what a closure remembers) is looked at before and after.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from looplib._core import trees
from looplib._core.closures import Variable, walk
from looplib._core.modules import _generators, named_modules
from looplib.state import copy_state
from looplib.types import DonatedStateError, TrainState

TREES = ("params", "buffers", "opt_state", "extra")


def fail(what: str, found: Iterable[str], why: str) -> NoReturn:
    __tracebackhide__ = True
    lines = list(found)
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise AssertionError("\n".join([f"{what}:", *(f"  {line}" for line in lines[:_SHOWN] + more), why]))


_SHOWN = 8


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def about_kernels(state: TrainState) -> str:
    if all(tensor.device.type == "cpu" for tensor in state.params.values()):
        return ""
    return (
        " On an accelerator some kernels add up in another order each time: torch.use_deterministic_algorithms(True) "
        "names those, or takes others."
    )


def leaves(tree: Any, root: str = "") -> Iterator[tuple[str, Any]]:
    """All that a tree holds, by name: `params['0.weight']`, `metrics['loss'].total`."""
    return ((trees.named(path, root), leaf) for path, leaf in trees.leaves(tree))


def recorded(result: Any, place: str = "") -> dict[str, Any]:
    """The same with copies of the tensors, which no later call can write to."""
    if not place and isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], TrainState):
        return {**recorded(result[1], "metrics"), **recorded(result[0], "state")}
    return {name: _copied_leaf(leaf) for name, leaf in leaves(result, place or "output")}


def is_spent(state: TrainState) -> bool:
    try:
        return not all(hasattr(state, name) for name in TREES)
    except DonatedStateError:
        return True


def same(one: Any, other: Any, margin: float = 0.0) -> bool:
    """To the bit, or floats within a margin; but that NaN is NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        return torch.equal(one, other) or not bool(beyond(one, other, margin).any())
    if type(one) is not type(other):
        return False
    if hasattr(one, "tobytes") and hasattr(one, "shape"):  # NumPy's
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    if type(one).__eq__ is object.__eq__:  # type: ignore[comparison-overlap]  # nothing says what it would be for two of them to be equal
        return _plain(vars(one)) == _plain(vars(other)) if hasattr(one, "__dict__") else True
    if type(one) is float and margin:
        return same(torch.tensor(one), torch.tensor(other), margin)
    return bool(one == other or (one != one and other != other))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}


def differences(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float = 0.0) -> list[str]:
    """What differs, by name; floats by more than a part of the largest number of all."""
    margin = tolerance * max(map(_largest, one.values()), default=0.0) if tolerance else 0.0
    lines = [f"{name}: is no longer there" for name in one if name not in other]
    lines += [f"{name}: is new" for name in other if name not in one]
    for name, leaf in one.items():
        if name in other and not same(leaf, other[name], margin):
            lines.append(f"{name}: {_difference(leaf, other[name])}")
    return lines


def _difference(one: Any, other: Any) -> str:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return f"{one!r}, then {other!r}" if type(one) is type(other) else f"{kind_of(one)}, then {kind_of(other)}"
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return f"{kind_of(one)}, then {kind_of(other)}"
    one, other = one.detach(), other.detach()
    if one.numel() == 1:
        return f"{one.item():.9g}, then {other.item():.9g}"
    differing = beyond(one, other, 0.0)
    gap = (other.double() - one.double()).abs() if not one.is_complex() else (other - one).abs()
    return f"{int(differing.sum())} of {one.numel()} numbers differ, by {float(gap[differing].max()):.3g} at most"


def kind_of(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor {tuple(leaf.shape)} of {str(leaf.dtype).removeprefix('torch.')} on {leaf.device}"
    return f"a {type(leaf).__name__}"


def _copied_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if hasattr(leaf, "copy") and hasattr(leaf, "shape") else leaf


def copied(batch: Any) -> Any:
    return trees.map_leaves(_copied_leaf, batch)


def _wide(leaf: Any) -> Any:
    floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().double().requires_grad_(leaf.requires_grad) if floats else leaf


def in_float64(function: Callable[[TrainState, Any], Any], state: TrainState, batch: Any) -> tuple[Any, Any, Any]:
    """Copies of state and batch, and what the function makes of them: in float64, or else in their own dtypes."""
    own = copy_state(state)
    try:
        wide_trees = {
            tree: trees.map_leaves(_wide, getattr(own, tree)) for tree in ("params", "buffers", "opt_state")
        }
        wide, rows = own.replace(**wide_trees), trees.map_leaves(_wide, copied(batch))
        return wide, rows, function(wide, copied(rows))
    except (RuntimeError, TypeError):  # a dtype that the code insists on, or a device without float64
        return own, copied(batch), function(own, copied(batch))


def outputs_of(out: Any, count: int) -> dict[str, Tensor]:
    found = dict(leaves(out, "output"))
    for name, leaf in found.items():
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != count:
            raise ValueError(
                f"{name} is {kind_of(leaf)}, of a batch of {count} rows; return tensors with one row for each example"
            )
    return found


def taken(batch: Any, count: int, index: list[int]) -> Any:
    """A batch of these rows of a batch."""
    try:
        return trees.take(batch, count, index)
    except trees.UnevenBatchError as error:
        raise ValueError(
            f"the batch has {count} rows, and in it is {kind_of(error.leaf)}: its rows cannot be taken; give tensors "
            "with one row for each example"
        ) from error


def _largest(leaf: Any) -> float:
    """The largest finite number of a tensor of floats; of anything else, 0."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return 0.0
    finite = leaf.detach()[leaf.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def beyond(expected: Tensor, found: Tensor, margin: float) -> Tensor:
    """Where two tensors are apart, of floats by more than a margin."""
    apart = (expected != found) & ~((expected != expected) & (found != found))
    if not margin or not expected.is_floating_point():
        return apart
    return apart & ~((expected.double() - found.double()).abs() <= margin)


def beyond_part(expected: Tensor, found: Tensor, tolerance: float) -> Tensor:
    """Where they are apart by more than a part of the largest number."""
    return beyond(expected, found, tolerance * _largest(expected))


def rows_apart(name: str, expected: Tensor, found: Any, index: list[int], tolerance: float) -> str | None:
    if not isinstance(found, Tensor) or expected.shape != found.shape:
        return f"{name}: {kind_of(expected)}, then {kind_of(found)}"
    gap = beyond_part(expected, found, tolerance)
    if not gap.any():
        return None
    rows = gap.flatten(1).any(1) if gap.dim() > 1 else gap
    which = sorted({index[i] for i in rows.nonzero().flatten().tolist()})
    by = float((expected.double() - found.double()).abs()[gap].max())
    return f"{name}: row {listed([str(i) for i in which])} changed by {by:.3g} at most"


class WithoutDropout(TorchFunctionMode):
    """torch's dropout lets everything through, whichever layer asks for it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        if function is F.multi_head_attention_forward:
            kwargs["training"] = False
        return function(*args, **kwargs)


_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
}


def _streams(state: TrainState) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """The global random streams, as functions that get and set where each stands."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "Python's random": (random.getstate, random.setstate)
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy.random"] = numpy.random.get_state, numpy.random.set_state
    for device in {torch.device("cpu"), *(tensor.device for tensor in state.params.values())}:
        for generator in _generators(device):
            found[f"torch's random stream on {generator.device}"] = generator.get_state, generator.set_state
    return found


def stream_places(state: TrainState) -> dict[str, dict[str, Any]]:
    return {name: recorded(get()) for name, (get, _) in _streams(state).items()}


@contextmanager
def streams_kept(state: TrainState) -> Iterator[None]:
    """A test that uses a check draws what it would have drawn without it."""
    kept = [(put, get()) for get, put in _streams(state).values()]
    try:
        yield
    finally:
        for put, place in kept:
            put(place)


def seed_otherwise() -> None:
    """All global streams at places where no run begins, which differ from call to call."""
    global _seeds
    _seeds += 1
    torch.manual_seed(_seeds)
    random.seed(_seeds)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(_seeds)


_seeds = 20_000_000


class Surroundings:
    """What a step can reach besides its arguments: modules, and what closures and attributes remember."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.fixed, self.memory = self._look()

    def spoiled(self) -> list[str]:
        """What has changed of that which no step may change: parameters, buffers, gradients and modes of modules."""
        return differences(self.fixed, self._look()[0])

    def hint(self) -> str:
        """What else has changed since, as a sentence about where the memory may be."""
        now = self._look()[1]
        changed = [name for name, value in now.items() if not same(value, self.memory.get(name))]
        return f" Besides the state, {listed(changed)} changed in these calls." if changed else ""

    def _look(self) -> tuple[dict[str, Any], dict[str, Any]]:
        fixed: dict[str, Any] = {}
        memory: dict[str, Any] = {}
        for variable in walk(self.step, in_whole=_is_searched):
            if isinstance(variable.value, nn.Module):
                _add_module(variable.value, fixed, memory)
            elif name := _name_of(variable):
                memory |= _remembered(name, variable.value)
        return fixed, memory


def _add_module(model: nn.Module, fixed: dict[str, Any], memory: dict[str, Any]) -> None:
    for prefix, module in named_modules(model):
        path = f"{type(model).__name__}.{prefix}".rstrip(".")
        fixed[f"{path}.training"] = module.training
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and not nn.parameter.is_lazy(tensor):
                fixed[f"{path}.{name}"] = _copied_leaf(tensor)
                fixed[f"{path}.{name}.requires_grad"] = tensor.requires_grad
                fixed[f"{path}.{name}.grad"] = _copied_leaf(tensor.grad) if tensor.is_leaf else None
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training":
                memory |= _remembered(f"{path}.{name}", value)


def _is_searched(thing: Any) -> bool:
    """Whether to search all attributes of an object that a step leads to, and not only those that code names."""
    if isinstance(thing, (type, TrainState)):
        return False
    return dataclasses.is_dataclass(thing) or callable(thing)


def _name_of(variable: Variable) -> str:
    """A variable of a function or an object as messages name it; empty for looplib's, which remember nothing of a run."""
    owner = variable.owner
    module = owner.__module__ if isinstance(owner, types.FunctionType) else type(owner).__module__
    if owner is None or isinstance(owner, nn.Module) or module.split(".")[0] in ("looplib", "builtins"):
        return ""
    if isinstance(owner, types.FunctionType):
        return f"{owner.__name__}'s {variable.path}"
    return f"{type(owner).__name__}.{variable.key}"


def users_own(function: Callable[..., Any]) -> Any:
    """The first function that a function leads to and that is not looplib's, or the function itself."""
    functions = (thing.value for thing in walk(function) if isinstance(thing.value, types.FunctionType))
    return next((inner for inner in functions if not inner.__module__.startswith("looplib.")), function)


def _remembered(name: str, value: Any) -> dict[str, Any]:
    """A number, a text or a tensor, or those in a container."""
    members = {name: value}
    if isinstance(value, Mapping):
        members = {f"{name}[{key!r}]": member for key, member in value.items()}
    elif isinstance(value, (list, tuple)):
        members = {f"{name}[{i}]": member for i, member in enumerate(value)}
    plain = (bool, int, float, str, Tensor, type(None))
    return {place: _copied_leaf(leaf) for place, leaf in members.items() if isinstance(leaf, plain)}
