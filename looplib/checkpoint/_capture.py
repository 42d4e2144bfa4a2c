"""Global random streams and objects with a `state_dict`, as a tree that a state's `extra` can hold."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check, check_type, few, named
from looplib._core.errors import with_advice
from looplib._core.random import generators_of
from looplib._core.trees import map_leaves


@with_advice("write ll.checkpoint.capture(environment=environment), each object by a name")
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
    own. (A loop with torch's own optimizer has no `TrainState`: give its objects to `ckpt.save` by name.)
    Capture before each save, `ckpt.save(state.replace(extra=ll.checkpoint.capture(...)))`, and reinstate after a
    restore. The state that you pass to `restore` needs an `extra` of the same structure, so capture once at the start
    as well.

    Args:
        objects: by name, objects with `state_dict()` and `load_state_dict(state)`.

    Returns:
        A tree of tensors and plain values, which are copies. NumPy's stream is in it if NumPy has been imported.

    Raises:
        AttributeError: an object has no `state_dict`.
        TypeError: an object is an optimizer of torch's.
    """
    for name, each in objects.items():
        advice = "save it by name, as in ckpt.save({'optimizer': optimizer, ..., 'step': step})"
        title = (
            f"{name!r} is {named(each)}, whose state a new process does not have yet, and restore needs one like it"
        )
        check(not isinstance(each, torch.optim.Optimizer), f"{title}; {advice}", TypeError)
        check(
            hasattr(each, "state_dict"),
            f"{name!r} is {named(each)}, which has no state_dict(): give the object itself, and plain values to "
            "state.with_extra",
            AttributeError,
        )
    streams = _plain(RandomStreams().state_dict())
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
    RandomStreams().load_state_dict(_original(streams))
    for name, each in objects.items():
        each.load_state_dict(_original(states[name]))


class RandomStreams:
    """The global random streams, as an object with a `state_dict` to save in a checkpoint of your own loop.

    >>> import looplib as ll, tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> ckpt, run = ll.checkpoint_io(folder.name), {"random": ll.checkpoint.RandomStreams(), "step": 3}
    >>> path = ckpt.save(run)
    >>> first = torch.rand(())
    >>> run = ckpt.restore(run, quiet=True)
    >>> torch.equal(first, torch.rand(()))
    True
    >>> folder.cleanup()

    They are those of Python's `random`, of `numpy.random` if it has been imported, and torch's generators of the CPU and
    of the accelerators that this process sees. Dropout in a loop of your own draws from them. A restore loads them last. A
    `DataLoader` draws from torch's stream when its iteration begins, which is after a restore, so give it a
    `generator` of its own if a run that resumes within an epoch is to draw what an unbroken one draws.
    """

    def state_dict(self) -> dict[str, Any]:
        """Copies of the streams' states."""
        state: dict[str, Any] = {
            "torch": [generator.get_state() for generator in _all_generators()],
            "random": random.getstate(),
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the streams back to where `state_dict` found them.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: this process sees a different number of devices.
        """
        misfits = self.misfits(state)
        check(not misfits, f"the streams {few(misfits)}")
        for generator, stream in zip(_all_generators(), state["torch"], strict=True):
            generator.set_state(stream.cpu())
        random.setstate(state["random"])
        if "numpy" in state:
            import_module("numpy.random").set_state(state["numpy"])

    def misfits(self, state: Mapping[str, Any]) -> list[str]:
        """Reasons, in words, why a state cannot be loaded."""
        saved, here = len(state["torch"]), len(_all_generators())
        return [] if saved == here else [f"were saved of {saved} devices, with the CPU, and this process sees {here}"]


def _all_generators() -> tuple[torch.Generator, ...]:
    """The generator of the CPU, and those of the accelerators of this process."""
    return generators_of(*map(torch.device, range(torch.accelerator.device_count())))


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
