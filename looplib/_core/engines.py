"""Gradient engines: what DistributedDataParallel and FSDP2 add to computing gradients.

A single process runs a loss and its gradient, microbatch by microbatch. An engine that reduces gradients over ranks
must be told which backward pass is the last one. It divides by the number of ranks, which is right only if all ranks
know the weight of the whole batch, and it may need the same number of passes on each rank. `Sync` does all of this; a
single process has none. Before the first step, ranks compare what must be the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from looplib._core import torch_private, trees
from looplib._core.checks import few, is_due, warn
from looplib._core.collective import together_with_data
from looplib._core.contracts import BatchPart
from looplib._core.forward_writes import put_back, with_copies
from looplib._core.ranks import Sums, is_alone, is_sharded, largest_over_ranks, shards, world_size
from looplib._core.replicas import checksums_by_name, different
from looplib._core.tracing import refuse_in_graph
from looplib._core.version import __version__


class Sync:
    """Passes of one step on all ranks, whose gradients an engine averages."""

    def __init__(
        self,
        engine: Engine,
        ranks: int,
        part: BatchPart | None,
        batches: Sequence[Any],
        count_samples: Callable[[Any], int],
    ) -> None:
        self.engine, self.ranks = engine, ranks
        known = None if part is None else part.samples
        # Sent during the first forward pass.
        self._counted = Sums([sum(map(count_samples, batches)) if known is None else known])
        self.passes = self.needed = len(batches)
        # If a pass involves all ranks, those with fewer microbatches repeat their last one and discard the result.
        if part is not None and engine.passes_together():
            self.passes = largest_over_ranks(self.needed)

    def samples(self) -> int:
        """Samples of the whole step, on all ranks."""
        return round(self._counted.read()[0])

    def make(self, number: int, make_pass: Callable[[], Any]) -> Any:
        """Make one pass. The first one counts the samples of all."""
        self.engine.sync(number == self.passes - 1)
        out = make_pass()
        self.engine.learned.update(self.engine.replicas)  # only now: a pass that fails teaches nothing
        return out._replace(samples=0 if number else self.samples())

    def pad(self, make_pass: Callable[[], Any]) -> None:
        """Make the passes that only other ranks need."""
        for number in range(self.needed, self.passes):
            self.make(number, make_pass)

    def end(self) -> None:
        self.engine.sync(True)

    def check_reduced(
        self,
        grads: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        per_rank: Callable[[str, Tensor], bool] | None,
    ) -> None:
        """Raise on all ranks if gradients differ that should be the same, in the steps 1, 2, 4, 8, ... with this engine.

        Not in the first alone: gradients that are equal by chance, such as zeros, may differ later.
        """
        if self.engine.reduced and not is_due(self.engine.steps):
            return
        self.engine.reduced = False
        if per_rank is not None:
            grads = {name: grad for name, grad in grads.items() if not per_rank(name, params[name])}
        with torch.no_grad():
            facts = checksums_by_name(grads)
        names = different(together_with_data(), *facts)
        if names:
            raise RuntimeError(_UNREDUCED.format(count=len(names), names=few(names, 10), engine=self.engine.name))
        self.engine.reduced = True


def sync_over_ranks(
    engine: Engine | None,
    ranks: int,
    state: Any,
    batches: Sequence[Any],
    count_samples: Callable[[Any], int],
    part: BatchPart | None,
    in_place: bool,
    warn_of_lone_ranks: Callable[[], None],
) -> Sync | None:
    """Averaging over ranks for the passes of one call; None for a single rank or a model in no engine.

    `in_place` is True if the call runs on the module's own tensors.
    """
    local = part is not None and part.local
    if engine is None:
        if not local:
            warn_of_lone_ranks()
        return None
    engine.refuse_strangers(in_place)
    if ranks == 1:
        return None
    if local:
        raise RuntimeError(
            f"reduce_gradients around a model in {engine.name}, which reduces its gradients itself: leave one of "
            "them out"
        )
    if part is not None and part.wrapper:
        raise RuntimeError(
            f"accumulate calls {part.wrapper} for each microbatch, and {engine.name} adds up the gradients of all of them in "
            "one call: put accumulate directly around make_grad_fn and without dtype=, and wrappers around it, or leave the "
            "model unwrapped and use ll.grads.reduce_gradients(accumulate(...))"
        )
    if not engine.compared:
        compare(state)
        engine.compared = True  # only now, since all ranks compare again after one that was not in this step
    engine.steps += 1  # here, where all ranks begin one: a step that fails later may do so on one of them
    return Sync(engine, ranks, part, batches, count_samples)


_UNREDUCED = (
    "gradients of {count} parameters differ between the ranks, so {engine} has not averaged them and each rank would train "
    "its own: {names}. The state is unchanged. Usual causes: fully_shard was called on the blocks and not on the model "
    "around them; the loss calls model.module, or a module that it has kept, instead of its argument; the parameters were "
    "added, replaced or thawed after the model was wrapped, lie outside of the wrapped part, or are ignored by it; "
    "DistributedDataParallel without find_unused_parameters=True, if the loss does not reach all of its parameters or "
    "trainable= leaves some out; a communication hook or a process group of your own. For parameters that each rank trains "
    "by itself on purpose, such as its experts, use make_grad_fn(..., per_rank=lambda name, param: ...)"
)


def warn_of_lone_ranks(model: nn.Module) -> None:
    """Warn that each rank trains a model of its own. Raise if it is in an engine that was not there before."""
    refuse_late(engine_of(model))
    warn(
        f"there are {world_size()} ranks and the model is in no engine that reduces its gradients: each rank "
        "trains one of its own. Wrap the model in DistributedDataParallel or fully_shard before make_grad_fn, "
        "and give make_grad_fn what that returns; or wrap the grad_fn in ll.grads.reduce_gradients",
        RuntimeWarning,
    )


class Engine:
    """A module in DistributedDataParallel, or sharded by FSDP2, and what one function of the module notes of it.

    Attributes:
        replicas: its modules in DistributedDataParallel.
        shards: its modules that FSDP2 shards.
        name: class of the first of them, for messages.
        compared: True once the ranks have compared their programs, before the first step of several ranks.
        steps: number of steps that several ranks have begun.
        reduced: True while the last comparison of gradients has found them the same on all ranks.
        learned: the replicas that have been through a whole pass, in which torch learns a static graph.
        sends: replicas whose sending of buffers is changed during a call, with the value to put back.
    """

    def __init__(self, replicas: list[DistributedDataParallel], shards: list[nn.Module]) -> None:
        self.replicas, self.shards = replicas, shards
        self.name = type([*replicas, *shards][0]).__name__
        self.compared = self.reduced = False
        self.steps = 0
        self.learned: set[nn.Module] = set()
        self.sends: list[tuple[DistributedDataParallel, bool]] = []

    def refuse_strangers(self, in_place: bool) -> None:
        refuse_in_graph(
            f"{self.name} sends gradients from within the backward pass, which a graph of a step cannot hold: "
            "leave out ll.compile_step, and compile the blocks of the model instead, for block in model.blocks: block.compile(), "
            "before it is wrapped"
        )
        if not in_place:
            raise RuntimeError(
                f"{self.name} works on the module's own parameters, in place, and would be silently wrong on "
                "others: use make_train_step(..., donate=True) and a bound state (from ll.init_state, or "
                "state = ll.bind(model, state)). An optimizer that evaluates the loss at other parameters (LBFGS) needs "
                f"ll.grads.reduce_gradients(grad_fn) in place of {self.name}"
            )

    @property
    def lends_grads(self) -> bool:
        """True if the next backward pass writes over the gradients, which an update reads at once and others may keep."""
        return any(replica.gradient_as_bucket_view for replica in self.replicas)

    def passes_together(self) -> bool:
        """True if all ranks must make the same number of passes: to gather shards, or to learn a static graph."""
        return bool(self.shards) or any(r.static_graph and r not in self.learned for r in self.replicas)

    def sync(self, now: bool) -> None:
        """Turn the reduction of gradients in later backward passes on or off.

        It sets attributes of the user's wrappers, as their own `no_sync()` and `set_requires_gradient_sync` do. Only the last
        of a step's passes reduces, and `Sync.end` turns it on again, so that a raw loop finds them as they were.
        """
        for replica in self.replicas:
            # A static graph is learned in the first backward pass, which must reduce; averaging again changes nothing.
            replica.require_backward_grad_sync = now or (replica.static_graph and replica not in self.learned)
        for shard in self.shards:
            shard.set_requires_gradient_sync(now, recurse=False)  # type: ignore[operator]

    def copy_in(
        self, params: Mapping[str, Tensor], module_params: Callable[[], Mapping[str, Tensor]]
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Write values into FSDP2's own parameters for the call, since FSDP2 gathers these and ignores the slots.

        For evaluations and predictions of a state that is not bound: steps that train are refused for such a state, because
        this copies all parameters twice. `restore` writes the old values back, in whatever way the call ends.

        Returns this rank's parts of the parameters with copies of their values, if it has written them.
        """
        alone = is_alone()
        if alone and self.shards:
            raise RuntimeError(
                f"{self.name} gathers its shards in each forward pass, on all ranks together: one rank cannot run the "
                "model alone. Call this on all ranks, without ll.distributed.rank_zero_only"
            )
        if alone or not torch.is_grad_enabled():
            # After a pass without gradients, DDP takes the first rank's buffers as sent. These went into copies, so the
            # next pass has to send them again. A rank that is alone sends none, for which the others would have to be here.
            for replica in self.replicas:
                self.sends.append((replica, replica.require_forward_param_sync))
                replica.require_forward_param_sync &= not alone
        if not self.shards:
            return None
        own_params = module_params()
        if all(tensor is params[name] for name, tensor in own_params.items()):
            return None
        with torch.no_grad():
            lent = with_copies(shards(own_params.values()))
            torch_private.foreach_copy_([part for part, _ in lent], shards(params[name] for name in own_params))
        return lent

    def restore(self, lent: list[tuple[Tensor, Tensor]] | None) -> None:
        while self.sends:
            replica, sends = self.sends.pop()
            replica.require_forward_param_sync = sends
        for shard in self.shards:  # the outermost module stays gathered after a forward pass without backward
            shard.reshard()  # type: ignore[operator]
        put_back(lent or [])


def engine_of(model: nn.Module, known: Engine | None = None) -> Engine | None:
    """The engine that a module is wrapped in, or None; the known one if it is still that.

    It uses its own parameters, whatever is in the slots.
    """
    modules = list(model.modules())
    replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
    shards = [module for module in modules if _is_sharded(module)]
    if known is not None and (replicas, shards) == (known.replicas, known.shards):
        return known
    return Engine(replicas, shards) if replicas or shards else None


def refuse_late(engine: Engine | None) -> None:
    """Raise for an engine that a function does not know, since the model was not in it when the function was made."""
    if engine is not None:
        raise RuntimeError(
            f"{engine.name} was applied to the model after a function was made from it (make_grad_fn, make_predict_step ...): "
            "wrap or shard the model first, and then make the functions and call ll.init_state"
        )


def _is_sharded(module: nn.Module) -> bool:
    return "FSDPModule" in {kind.__name__ for kind in type(module).__mro__}  # without importing FSDP2


def _warn_of_split_layers(params: Mapping[str, Tensor]) -> None:
    """Warn if ranks that hold parts of the same layers read different samples.

    FSDP2 shards a parameter along one dimension of a mesh (HSDP, too). Another one is that of a tensor-parallel plan.
    """
    for name, param in params.items():
        if not is_sharded(param):
            continue
        mesh = param.device_mesh
        split = [dim for dim, place in enumerate(param.placements) if mesh.size(dim) > 1 and not place.is_replicate()]
        if len(split) > 1 and mesh.size() <= world_size():
            warn(
                f"{name} is sharded along {len(split)} dimensions of a mesh, and all of its {mesh.size()} ranks read "
                "samples of their own: with tensor parallelism those that hold parts of one layer need the same, which "
                'll.distributed.set_data_parallel_group(mesh["data"]) gives them',
                RuntimeWarning,
            )
            return


_COUNTS = ("seed", "step", "epoch", "batch", "epoch_length", "samples")


def compare(state: Any) -> None:
    """Raise on all ranks if they run different programs.

    Compared are versions, the optimizer that made the state, names, dtypes, shapes, counts, seeds and loaders. Only a
    code of the function and a digest of 32 bytes are sent to each rank, and what differs only if something does.
    """
    together_with_data().barrier("the first step")
    _warn_of_split_layers(state.params)
    # With another seed or order on each rank, some samples would come to several ranks, and others to none.
    loaders = [loader for loader in state.run.known_loaders if loader.get("divide", True)]
    settings = {"the optimizer's": state.run.optimizer or {}}
    settings |= {f"loader {number}'s": loader for number, loader in enumerate(loaders, 1)}
    tensors = {**state.params, **state.buffers}
    facts = {
        "torch": torch.__version__,
        "looplib": __version__,
        **{" ".join(map(str, path)): value for path, value in trees.leaves(settings)},
        **{f"state.{name}": getattr(state, name) for name in _COUNTS},
        **{
            name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for name, tensor in tensors.items()
        },
    }
    together_with_data().check_alike(facts, "the ranks do not run the same program:\n  ")
