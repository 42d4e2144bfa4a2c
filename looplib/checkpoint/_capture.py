"""Global random streams and objects with a `state_dict`, as a tree that a state's `extra` can hold."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check, check_type, few
from looplib._core.modules import _generators
from looplib._core.trees import map_leaves


def capture(**objects: Any) -> dict[str, Any]:
    """Capture the global random streams, and the state of objects that have a `state_dict`, for `state.extra`.

    >>> import looplib as ll, random, torch
    >>> environment = torch.nn.Linear(2, 1)  # anything with state_dict and load_state_dict
    >>> state = ll.TrainState(extra=ll.checkpoint.capture(environment=environment))
    >>> first = random.random(), torch.rand(()).item()
    >>> ll.checkpoint.reinstate(state.extra, environment=environment)
    >>> first == (random.random(), torch.rand(()).item())
    True

    looplib's own steps and loaders need none of this: their draws follow from the state. Use it if your loop itself
    draws (`random`, `numpy.random`, `torch.rand`), or has environments, samplers or buffers with a state of their
    own. Capture before each save, `ckpt.save(state.replace(extra=ll.checkpoint.capture(...)))`, and reinstate after a
    restore. The state that you pass to `restore` needs an `extra` of the same structure, so capture once at the start
    as well.

    Args:
        objects: by name, objects with `state_dict()` and `load_state_dict(state)`.

    Returns:
        A tree of tensors and plain values, which are copies. NumPy's stream is in it if NumPy has been imported.

    Raises:
        AttributeError: an object has no `state_dict`.
    """
    streams: dict[str, Any] = {
        "torch": [generator.get_state() for generator in _all_generators()],
        "random": random.getstate(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        streams["numpy"] = _plain(numpy.random.get_state(legacy=False))
    return {"streams": streams, "objects": {name: _plain(each.state_dict()) for name, each in objects.items()}}


def reinstate(captured: Mapping[str, Any], **objects: Any) -> None:
    """Put the global random streams, and objects, back to where `capture` found them.

    >>> import looplib as ll
    >>> ll.checkpoint.reinstate(ll.checkpoint.capture())

    Args:
        captured: what `capture` returned, from the `extra` of a restored state.
        objects: the same names as there.

    Raises:
        TypeError: `captured` is not a mapping.
        ValueError: `captured` is not what `capture` returned, the names are not those that were captured, or this machine has
            different devices.
    """
    advice = "give what ll.checkpoint.capture returned, such as state.extra"
    check_type("captured is", captured, Mapping, advice)
    check(captured.keys() >= {"objects", "streams"}, f"captured has the keys {few(captured)}; {advice}")
    states, streams, generators = captured["objects"], captured["streams"], _all_generators()
    check(
        states.keys() == objects.keys() and len(streams["torch"]) == len(generators),
        f"captured were {few(states)} and the streams of {len(streams['torch'])} devices, and reinstate got "
        f"{few(objects)} and has {len(generators)} devices: give objects of the same names, on the same devices",
    )
    for generator, stream in zip(generators, streams["torch"], strict=True):
        generator.set_state(stream.cpu())
    random.setstate(streams["random"])
    if "numpy" in streams:
        import_module("numpy.random").set_state(_original(streams["numpy"]))
    for name, each in objects.items():
        each.load_state_dict(_original(states[name]))


def _all_generators() -> tuple[torch.Generator, ...]:
    """The generator of the CPU, and those of the accelerators of this process."""
    return _generators(*map(torch.device, range(torch.accelerator.device_count())))


_ARRAY = "numpy array"  # key of an array's tensor


def _plain(tree: Any) -> Any:
    """A copy of a state_dict with NumPy's arrays as tensors, which a checkpoint can hold."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        if type(leaf).__module__ == "numpy" and hasattr(leaf, "tolist"):
            return {_ARRAY: torch.from_numpy(leaf.copy())} if getattr(leaf, "ndim", 0) else leaf.item()
        return leaf

    return map_leaves(plain, tree)


def _original(tree: Any) -> Any:
    """The inverse of `_plain`."""
    return map_leaves(lambda leaf: leaf[_ARRAY].numpy() if _is_array(leaf) else leaf, tree, is_leaf=_is_array)


def _is_array(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {_ARRAY}
