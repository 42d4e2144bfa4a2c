"""Transforms: a step goes in and a step comes out (compiled, vectorized, differentiable)."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib._core.tracing import UntraceableError, on_host
from looplib.transforms._compile_step import compile_step
from looplib.transforms._differentiable import differentiable
from looplib.transforms._stacks import compute_members, per_member, stack_states, unstack_states
from looplib.transforms._vmap import vmap_step

__all__ = [
    "UntraceableError",
    "compile_step",
    "compute_members",
    "differentiable",
    "on_host",
    "per_member",
    "stack_states",
    "unstack_states",
    "vmap_step",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
