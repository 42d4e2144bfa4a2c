"""Private names of torch used by eager code, in one place.

If a version of torch moves one of them, only this file changes. Private names that concern graphs are used only in
`looplib/transforms`. Most of what is here is torch's own object under a different name, so calls cost the same.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices as fused_devices
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as wraps_tensors

__all__ = ["TorchDispatchMode", "disable_current_modes", "fused_devices", "pytree", "wraps_tensors"]

# Turns gradients on or off without the object that `torch.set_grad_enabled` creates: 0.1 instead of 1 µs.
set_grad_enabled = torch._C._set_grad_enabled
any_autocast = torch._C._is_any_autocast_enabled  # of any device, in this thread
# The function behind `Tensor.backward`, without its checks.
run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward


def in_backward() -> bool:
    """True within a backward pass of this thread."""
    return torch._C._current_graph_task_id() != -1


# Number of writes counted by torch. The kernels of batch norm and fused optimizers write without counting.
version = operator.attrgetter("_version")
is_view = operator.methodcaller("_is_view")
# Tells whether two storages are one, also where they have no address, as while a graph is traced.
identity_of_storage = operator.attrgetter("_cdata")
values_of_coo = operator.methodcaller("_values")  # of a sparse tensor, whether its indices are sorted or not
# Context in which torch's functions do what they do for plain tensors, whatever `__torch_function__` a class has.
without_torch_function = torch._C.DisableTorchFunctionSubclass

# A module's own entries, without those of submodules: name -> tensor or module, or None for an empty name.
own_modules, own_parameters, own_buffers = map(operator.attrgetter, ("_modules", "_parameters", "_buffers"))
transient_buffers = operator.attrgetter("_non_persistent_buffers_set")  # names of those that are not saved
# Base classes: of BatchNorm1d to 3d and SyncBatchNorm, and of all dropout layers.
BatchNorm = nn.modules.batchnorm._BatchNorm
Dropout = nn.modules.dropout._DropoutNd

# Of an iterator of a DataLoader, and of an optimizer.
shutdown_workers = operator.methodcaller("_shutdown_workers")
init_group = operator.attrgetter("_init_group")


def without_dataset(iterator: Any) -> Any:
    """A DataLoader's iterator without what its workers have got: a dataset or a collate_fn may hold the loader."""
    vars(iterator).update(_dataset=None, _collate_fn=None, _worker_init_fn=None)
    return iterator


@contextmanager
def outside_of_workers() -> Iterator[None]:
    """Context in which `torch.utils.data.get_worker_info()` returns None, as in a process that is no worker.

    What reads the whole of a source in each worker has to hide the workers from it: Hugging Face's `IterableDataset` and
    others divide themselves among those that they see.
    """
    worker = torch.utils.data._utils.worker
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


# One call for many tensors. (`Any`: torch says "list or tuple", and calls of ours pass on sequences and settings.)
foreach_add_: Any = torch._foreach_add_
foreach_clone: Any = getattr(
    torch, "_foreach_clone", lambda tensors: [tensor.clone() for tensor in tensors]
)  # later than torch 2.11
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
fused_adagrad_: Any = torch._fused_adagrad_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_: Any = torch._fused_sgd_
amp_update_scale_ = torch._amp_update_scale_


_backward_hooks = operator.attrgetter("_backward_hooks")
_accumulate_hooks = operator.attrgetter("_post_accumulate_grad_hooks")


def any_gradient_hooks(params: Collection[Tensor]) -> bool:
    """True if the user has registered a function that torch calls with a parameter's gradient."""
    return any(map(_backward_hooks, params)) or any(map(_accumulate_hooks, params))


def timeout_of(group: Any) -> float:
    """Seconds after which a process group gives up a call."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return math.inf if options is None else float(options._timeout.total_seconds())


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the time after which a process group gives up a call."""
    if hasattr(torch.distributed, "set_timeout"):  # since torch 2.15, which warns of the other one
        torch.distributed.set_timeout(timeout, group)
    else:
        torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


def thread_value(key: str) -> Any:
    """Value that this thread has stored under a key, or None. autograd's threads see those of the calling thread."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


set_thread_value = torch._C._stash_obj_in_tls


def functorch_level() -> int:
    """Number of active torch.func transforms.

    Asking once makes every later backward pass of the thread copy the answer's storage (1% of a small step), so a step
    asks a tensor for its own level instead.
    """
    return torch._C._functorch.maybe_current_level() or 0


# Level of the torch.func transform that a tensor belongs to, or a number below 1 for none.
functorch_level_of = torch._C._functorch.maybe_get_level
in_transform = torch._C._functorch.is_functorch_wrapped_tensor
# The tensor inside one that a transform has wrapped: one level further out.
wrapped_by_transform: Callable[[Tensor], Tensor] = torch._C._functorch.get_unwrapped


def is_differentiated(tensor: Tensor) -> bool:
    """True if torch.func takes gradients with respect to a tensor, within torch.vmap too."""
    functorch = torch._C._functorch
    while functorch.is_batchedtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.grad_fn is not None or functorch.is_gradtrackingtensor(tensor)


def reduction_of(node: Any) -> str | None:
    """The `reduction=` of one of torch's losses, by the function of its graph; None for another function."""
    return {0: "none", 1: "mean", 2: "sum"}.get(getattr(node, "_saved_reduction", None))  # type: ignore[arg-type]


def has_class_weights(node: Any) -> bool:
    """True for a cross-entropy with class weights, by the function of its graph."""
    if not hasattr(node, "_raw_saved_total_weight"):  # not the value, which a hook may compute
        return False
    return _has_hook(node._raw_saved_weight) or node._saved_weight is not None


def ignored_label_of(node: Any) -> int | None:
    """The label that a cross-entropy leaves out, by the function of its graph; None for another function."""
    index: int | None = getattr(node, "_saved_ignore_index", None)
    return index if index is None or index < 1 << 63 else index - (1 << 64)  # torch shows it without its sign


def saved_by(node: Any, name: str) -> Tensor | None:
    """A tensor that a function of a graph has saved. None if a hook has it, which computes it again or copies it back."""
    return None if _has_hook(getattr(node, f"_raw_saved_{name}")) else getattr(node, f"_saved_{name}")


def _has_hook(saved: Any) -> bool:
    return getattr(saved, "unpack_hook", None) is not None


def mean_shape_of(node: Any) -> tuple[int, ...]:
    """The shape of what a mean is of, by the function of its graph."""
    return tuple(node._saved_self_sym_sizes)


def mps_generator() -> torch.Generator:
    """Random number generator of an Apple GPU."""
    return torch.mps._get_default_mps_generator()
