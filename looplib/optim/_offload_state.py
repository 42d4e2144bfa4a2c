"""Optimizer state on the host: moments that come to the device for their own update, a few parameters at a time.

The update is the wrapped optimizer's own, on the device, so it has the same bits. For it, the moments of a group of
parameters are copied to the device, updated there, and copied back, on two streams beside that of the computation: one for
each direction. Copies of the next groups are under way while a group is updated. The first ones begin in the first half of
the update, which the host reaches while the device still runs the backward pass.

At the end the host waits until the last copy is back: nothing that is read from the state later can be too early.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from looplib._core.checks import check, check_count, is_plain
from looplib._core.mappings import mapped, pick
from looplib._core.records import with_repr
from looplib._core.tracing import UntraceableError
from looplib.optim.chains import check_writes
from looplib.types import Grads, Optimizer, Params, Part, Transformed

_GROUPS = 4  # groups that the buffer holds: one is updated while others are on their way

Row = dict[str, Any]  # what an optimizer keeps for a parameter


def offload_state(optimizer: Optimizer, *, buffer_bytes: int = 2**28) -> Optimizer:
    """CPU offload of the optimizer's state: keep its moments in the host's memory, and update on the device.

    >>> import looplib as ll, torch
    >>> adamw = ll.optim.offload_state(ll.optimizer(torch.optim.AdamW, lr=1e-3))
    >>> optimizer = ll.chain(ll.clip_by_global_norm(1.0), adamw, ll.ema(0.999))
    >>> model = torch.nn.Linear(2, 1)  # .to(device)
    >>> state = ll.init_state(model, optimizer)
    >>> state.opt_state["AdamW"]["state"]["weight"]["exp_avg"].device
    device(type='cpu')

    Between updates the device holds none of the moments. AdamW's take twice the memory of the weights, which is then free
    for activations. An update copies them to the device in groups of parameters, updates with the same kernel, and copies
    them back, so it has the bits of the optimizer alone. The state has the same structure, so a checkpoint can be restored
    with and without `offload_state`.

    All moments travel to the device and back in each update: 8 bytes per parameter in each direction for AdamW in float32.
    The first `buffer_bytes` of them come while the backward pass still runs; the rest cannot, for want of memory, and the
    way back begins after it. A step therefore takes longer by about the time of one direction on the bus, which counts less
    with `ll.accumulate`. At the end the host waits for the last copy, so that whatever reads the state next reads it whole.

    The moments are in pinned memory, which cannot be swapped out and which torch may round up to a power of two for each
    tensor. Copies, such as those of `ll.copy_state`, are not pinned until their next update. A pure step copies the moments
    on the host and pins new memory, so write `donate=True`. With DistributedDataParallel, each rank keeps all moments. Counts
    stay where the optimizer keeps them. Parameters on the CPU are updated there, and nothing is copied.

    Args:
        optimizer: what `ll.optimizer` returns for a class of `torch.optim` that keeps tensors of the parameter's shape:
            SGD without dampening, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Adagrad, Adadelta, Muon. In a chain or a
            partition, wrap it alone.
        buffer_bytes: bytes of moments on the device at once, during an update; at least those of the largest parameter are.
            With a larger buffer, more of the copies run beside the backward pass.

    Raises:
        TypeError: `optimizer` is something different. From `init`, a parameter is a DTensor or of another subclass.
        ValueError: it is a chain, or a class that keeps something else; `buffer_bytes` is below 1.
        UntraceableError: from a step that runs as a graph (`ll.compile_step`, `ll.vmap_step`, `ll.transforms.differentiable`).

    Source: Ren et al., "ZeRO-Offload", 2021, and torchao's `CPUOffloadOptimizer`, which update on the host instead, by the
    CPU's kernel.
    """
    check_writes(optimizer, "offload_state")
    check_count("buffer_bytes", buffer_bytes)
    label, part = next(iter(optimizer.parts.items()))
    check(
        len(optimizer.parts) == 1 and part.by_parameter,
        "offload_state takes one optimizer of torch's that keeps tensors of the parameter's shape, and got "
        f"{optimizer.call or optimizer}: wrap that optimizer alone, ll.chain(ll.clip_by_global_norm(1.0), "
        "ll.optim.offload_state(ll.optimizer(torch.optim.AdamW, lr=1e-3))), or within a partition those of its labels",
    )
    assert part.init is not None
    assert part.transform is not None
    assert part.update_ is not None
    begin, first_half, second_half = part.init, part.transform, part.update_

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        _check_plain(params)
        states: dict[str, Row] = {}
        for group in _groups(params, params, mapped(_nbytes, params), buffer_bytes):
            opt_state = begin(pick(params, group.names), **extra)
            states |= {name: _on_host(opt_state["state"][name], params[name]) for name in group.names}
        return {**opt_state, "state": pick(states, params)}

    def transform(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Transformed:
        _check_plain(pick(params, grads))
        out = first_half(grads, _as_on_device(state, params), params, step, **info)
        groups = _groups_of(grads, state["state"], params, buffer_bytes)
        visits: deque[_Visit] = deque()
        _load(visits, groups, state["state"], params, buffer_bytes)
        return out._replace(state=state, carry=visits)

    def update_(
        grads: Grads, state: Any, params: Params, step: int, carry: Any = None, **info: Any
    ) -> tuple[Params, Any]:
        states: dict[str, Row] = state["state"]
        visits: deque[_Visit] = carry or deque()  # emptied below, which frees what has been updated
        loaded = {name for visit in visits for name in visit.moments}
        groups = _groups_of([name for name in grads if name not in loaded], states, params, buffer_bytes)
        last: dict[torch.device, torch.Event] = {}
        while visits or groups:
            _load(visits, groups, states, params, buffer_bytes)
            visit = visits.popleft()
            _wait_for(visit)
            rows = {name: {**states[name], **moments} for name, moments in visit.moments.items()}
            # What it returns beside the parameters has the copies in it, and must not outlive this line.
            params = second_half(pick(grads, rows), {**state, "state": {**states, **rows}}, params, step, **info)[0]
            states = _store(visit, states, last)
            del visit, rows  # into whose memory the next groups are loaded
        for saved in last.values():
            saved.synchronize()
        return params, state if states is state["state"] else {**state, "state": states}

    offloaded = dataclasses.replace(
        part,
        init=init,
        transform=transform,
        update_=update_,
        by_parameter=False,
        for_graphs=Part(role="weights", transform=_refuse, update_=_refuse),
    )
    return with_repr(Optimizer({label: offloaded}), offload_state, optimizer, buffer_bytes=buffer_bytes)


def _check_plain(params: Params) -> None:
    for name, param in params.items():
        check(
            is_plain(param),
            f"offload_state keeps the moments of plain tensors, and {name} is a {type(param).__name__}: leave offload_state out, and "
            "for fully_shard write offload_policy=CPUOffloadPolicy(), which keeps weights, gradients and moments on the host",
            TypeError,
        )


def _refuse(*args: Any, **info: Any) -> NoReturn:
    raise UntraceableError(
        "ll.optim.offload_state copies moments while an update runs, and a graph has all of its tensors from its start to its "
        "end: take the step without ll.compile_step, ll.vmap_step and ll.transforms.differentiable (the model's blocks can be "
        "compiled, for block in model.blocks: block.compile()), or leave out ll.optim.offload_state"
    )


# Groups of parameters, and what of their state travels


class _Group(NamedTuple):
    """Parameters that are updated together, and the bytes of their moments."""

    names: list[str]
    size: int


def _groups(names: Iterable[str], params: Params, sizes: Mapping[str, int], buffer_bytes: int) -> deque[_Group]:
    """Parameters in order, in groups of one device. The buffer holds several; a larger parameter is a group by itself."""
    groups: list[_Group] = []
    last: dict[torch.device, int] = {}  # index of the group to which a parameter of the device is added
    for name in names:
        device, size = params[name].device, sizes[name]
        index = last.get(device)
        if index is None or groups[index].size + size > buffer_bytes // _GROUPS:
            last[device] = len(groups)
            groups.append(_Group([name], size))
        else:
            group = groups[index]
            groups[index] = _Group([*group.names, name], group.size + size)
    return deque(groups)


def _groups_of(names: Iterable[str], states: Mapping[str, Row], params: Params, buffer_bytes: int) -> deque[_Group]:
    sizes = {
        name: sum(_nbytes(entry) for entry in states[name].values() if _travels(entry, params[name]))
        for name in names
    }
    return _groups(sizes, params, sizes, buffer_bytes)


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes


def _travels(entry: Any, param: Tensor) -> bool:
    """True for a moment of a parameter on a device, which is on the host between updates.

    Counts stay where the optimizer keeps them: on the host, or on the device if a fused kernel reads them there.
    """
    if not isinstance(entry, Tensor) or not entry.dim() or param.is_cpu or param.is_meta:
        return False
    return entry.shape == param.shape and entry.dtype == param.dtype


def _as_on_device(state: Any, params: Params) -> Any:
    """The state as the update will see it, for checks: in place of each moment a tensor like it on the device."""
    match state:
        case {"state": dict(states)} if states.keys() <= params.keys():
            rows = {
                name: {key: params[name] if _travels(entry, params[name]) else entry for key, entry in row.items()}
                for name, row in states.items()
            }
            return {**state, "state": rows}
    return state  # of another optimizer, whose own first half says so


# Copies


class _Visit(NamedTuple):
    """Moments of a group on the device.

    Attributes:
        moments: name -> key in the parameter's state -> copy on the device. The rest of the state is not looked at before
            the update, which may own copies of it.
        size: bytes of these copies.
        device: that of the parameters.
        loaded: event after their last copy; None if there is none to make.
    """

    moments: dict[str, dict[str, Tensor]]
    size: int
    device: torch.device
    loaded: torch.Event | None


@cache
def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """Streams for copies to a device and from it, kept because each has its own memory in torch's allocator."""
    return torch.Stream(device), torch.Stream(device)


def _load(
    visits: deque[_Visit], groups: deque[_Group], states: Mapping[str, Row], params: Params, buffer_bytes: int
) -> None:
    """Begin to copy the next groups to their device: as many as fit into the buffer, and at least one."""
    while groups and (not visits or sum(visit.size for visit in visits) + groups[0].size <= buffer_bytes):
        names, size = groups.popleft()
        moments: dict[str, dict[str, Tensor]] = {
            name: {
                # It is on the device if `offload_state` is new to the run.
                key: entry if entry.is_cpu else entry.cpu()
                for key, entry in states[name].items()
                if _travels(entry, params[name])
            }
            for name in names
        }
        device, loaded = params[names[0]].device, None
        if any(moments.values()):
            to_device, _ = _streams(device)
            with to_device:
                # Into memory of this stream's own, which no kernel of the backward pass uses: the copies wait for none.
                for name, entries in moments.items():
                    for key, entry in entries.items():
                        copy = torch.empty_like(params[name], requires_grad=False)
                        entries[key] = copy.copy_(entry, non_blocking=True)
            loaded = to_device.record_event()
        visits.append(_Visit(moments, size, device, loaded))


def _wait_for(visit: _Visit) -> None:
    """Let the computation wait, and not the host, until the moments are there."""
    if visit.loaded is not None:
        torch.accelerator.current_stream(visit.device).wait_event(visit.loaded)


def _store(visit: _Visit, states: dict[str, Row], last: dict[torch.device, torch.Event]) -> dict[str, Row]:
    """Begin to copy updated moments back into the state, and note the event after the last copy of the device."""
    if visit.loaded is None:
        return states
    to_device, to_host = _streams(visit.device)
    to_host.wait_event(torch.accelerator.current_stream(visit.device).record_event())
    with to_host:
        for name, moments in visit.moments.items():
            for key, moment in moments.items():
                kept = states[name][key]
                if not (kept.is_cpu and kept.is_pinned()):
                    kept = _host_like(moment)
                    states = {**states, name: {**states[name], key: kept}}
                kept.copy_(moment, non_blocking=True)
    last[visit.device] = to_host.record_event()
    to_device.wait_event(last[visit.device])  # before it loads others into this memory
    return states


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _on_host(row: Row, param: Tensor) -> Row:
    return {key: _host_like(entry).copy_(entry) if _travels(entry, param) else entry for key, entry in row.items()}
