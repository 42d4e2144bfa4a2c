"""Parameters and buffers of modules: names, slots, and running a module on a state's tensors.

A state names tensors as the innermost module does. A slot is an entry of one of the module's dictionaries that holds
such a tensor. Reading slots shows if a state is bound. Writing them for the duration of a call runs the module on a
different state's tensors, like `torch.func.functional_call` at a tenth of its cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from looplib._core import interrupts as _interrupts
from looplib._core import random as draws
from looplib._core import torch_private
from looplib._core import tracing as _tracing
from looplib._core.checks import check, check_type, few, warn
from looplib._core.engines import engine_of
from looplib._core.errors import fold, note_batch
from looplib._core.lease import Unwritten
from looplib._core.mappings import mapped, pairs
from looplib._core.torch_private import own_buffers, own_parameters, pytree

R = TypeVar("R")


Slot = tuple[dict[str, Any], str]


Swap = tuple[dict[str, Any], str, Any, Any]  # a slot, its own value, and the one for the duration of a call


# Names under which torch's wrappers hold the wrapped module; they are not part of parameter names.
TRANSPARENT = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class Members(NamedTuple):
    """Slots of each name. Tied tensors share the first of their names, as in `named_parameters`."""

    params: dict[str, list[Slot]]
    buffers: dict[str, list[Slot]]


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` without the prefixes of wrappers."""
    return _walk(model, "", set())


def _walk(module: nn.Module | None, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if module is None or id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    transparent = TRANSPARENT | {"module"} if is_parallel(module) else TRANSPARENT
    for name, child in torch_private.own_modules(module).items():
        yield from _walk(child, prefix if name in transparent else f"{prefix}.{name}".lstrip("."), seen)


def is_parallel(module: nn.Module) -> bool:
    """True for torch's wrappers that hold the wrapped module as `module`."""
    return isinstance(module, (DataParallel, DistributedDataParallel))


def slots_in(model: nn.Module) -> Iterator[tuple[int, dict[str, Any], str, str, Any]]:
    """All slots: 0 for a parameter or 1 for a buffer, the dictionary, the key, the name, and the tensor or None."""
    for prefix, module in named_modules(model):
        groups: tuple[dict[str, Any], ...] = own_parameters(module), own_buffers(module)
        for kind, own in enumerate(groups):
            for key, tensor in own.items():
                yield kind, own, key, f"{prefix}.{key}".lstrip("."), tensor


def members(model: nn.Module) -> Members:
    instance = f", an instance such as {model.__name__}(...)" if isinstance(model, type) else ""
    check_type("model is", model, nn.Module, f"looplib needs a torch.nn.Module{instance}")
    all_slots = Members({}, {})
    names: dict[int, str] = {}
    for kind, own, key, path, tensor in slots_in(model):
        if tensor is not None:
            check(not is_lazy(tensor), f"{path} has no shape yet (a lazy module): run the model on one batch first")
            name = names.setdefault(id(tensor), path)
            all_slots[kind].setdefault(name, []).append((own, key))
    return all_slots


def tensors(slots: dict[str, list[Slot]]) -> dict[str, Tensor]:
    return {name: places[0][0][places[0][1]] for name, places in slots.items()}


def check_names(what: str, of_state: Mapping[str, Tensor], slots: dict[str, list[Slot]], model: nn.Module) -> None:
    """Raise unless `given` matches the model in names, shapes and dtypes."""
    of_model = tensors(slots)
    title = f"the state's {what} are not those of this {type(model).__name__}"
    advice = "make the state with ll.init_state from the same model"
    if of_state.keys() != of_model.keys():
        missing, unexpected = sorted(of_model.keys() - of_state.keys()), sorted(of_state.keys() - of_model.keys())
        raise ValueError(f"{title}: missing {missing or 'none'}, unexpected {unexpected or 'none'}; {advice}")
    for name, tensor in of_state.items():
        shape, of_tensor = tuple(of_model[name].shape), tuple(tensor.shape)
        if shape != of_tensor:
            stack = "; for a stack of states, ll.vmap_step(step)" * (of_tensor[1:] == shape)
            raise ValueError(f"{title}: {name} has shape {of_tensor}, the model's has {shape}; {advice}{stack}")


def check_materialized(params: Mapping[str, Tensor]) -> None:
    """Raise ValueError for parameters on the meta device, which has no memory."""
    empty = [name for name, tensor in params.items() if tensor.is_meta]
    check(
        not empty,
        f"{few(empty)} on the meta device, without values: device_map= of from_pretrained leaves parameters there that do "
        "not fit on the devices, and torch.device('meta') all of them. Load the model without device_map, and call "
        "model.to(device), or give it values first, model.to_empty(device=...)",
    )


def trainable_names(model: nn.Module, predicate: Callable[[str, Tensor], bool] | None) -> list[str]:
    """Names of the trained parameters: those selected by `predicate`, or those that require a gradient."""
    params = tensors(members(model).params)
    chosen = [
        name
        for name, tensor in params.items()
        if (tensor.requires_grad if predicate is None else predicate(name, tensor))
    ]
    if not chosen:
        reason = "none requires a gradient" if predicate is None else f"{predicate} chose none"
        raise ValueError(f"no parameter of this {type(model).__name__} is trainable: {reason}")
    return chosen


class _Running(threading.local):
    def __init__(self) -> None:
        self.models: list[nn.Module] = []


running = _Running()  # modules that this thread runs on states at present, the innermost last


class FunctionalModule:
    """A module that can run on any state's tensors, in its own modes, and is left unchanged."""

    def __init__(self, model: nn.Module, training: bool, backward: bool | None = None) -> None:
        """`training` is the mode in which it runs; `backward` is False if no gradients are taken in that mode either."""
        self.model, self.training = model, training
        self.slots = members(model)
        self.devices, self.generators = (_CPU, _CPU), _generators(_CPU)
        self.backward = training if backward is None else backward
        self._read_modules()
        self.looked = False
        self.params_at, self.buffers_at = map(_places, self.slots)
        self.unfilled = [slot[1:4] for slot in slots_in(model) if slot[0] and slot[4] is None]
        check(
            not any(
                isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm for module in self.modules
            ),
            "the model has an embedding with max_norm=, whose forward pass writes its weight, in an evaluation too: leave it "
            "out, and compute the shortened rows, F.embedding(x, torch.renorm(weight, 2, 0, max_norm))",
        )
        self.engine = engine_of(model)
        self.unwritten = Unwritten()

    def _read_modules(self) -> None:
        # If the root is in training mode, submodules in eval mode stay so, since they were chosen. If it is not,
        # as with pretrained models, the whole module is trained.
        everything = self.training and not self.model.training
        self.modules = [*self.model.modules()]
        self.modes = [self.training and (everything or module.training) for module in self.modules]
        self.children = [*map(torch_private.own_modules, self.modules)]
        self.submodules = _submodules(self.children)

    def warn_of_eval_mode(self, names: Sequence[str]) -> None:
        """Warn of layers in eval mode that may have been left so, if these parameters are trained."""
        layers = [*named_modules(self.model)]
        if self.model.training:
            for prefix, module in layers:
                if _drops_nothing(module) and any(name.startswith(f"{prefix}.") for name in names):
                    return warn(_PART_IN_EVAL.format(part=f"{prefix} ({type(module).__name__})"))
        elif found := [f"{name or 'it'} ({type(module).__name__})" for name, module in layers if _differs(module)]:
            more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
            warn(_ALL_IN_EVAL.format(model=type(self.model).__name__, layers=", ".join(found[:_SHOWN] + more)))

    def batch_norms(self) -> tuple[str, ...]:
        """Layers that normalize a sample by the others of its batch."""
        modes = dict(zip(self.modules, self.modes, strict=True))
        return tuple(
            f"{name or 'the model'} ({type(module).__name__})"
            for name, module in named_modules(self.model)
            if isinstance(module, torch_private.BatchNorm) and (modes[module] or module.running_mean is None)
        )

    def run(
        self,
        params: dict[str, Tensor],
        buffers: Mapping[str, Tensor],
        seed: int,
        body: Callable[[], R],
        in_place: bool = False,
    ) -> R:
        """Run `body()` with these tensors in the module and the random streams seeded with `seed`.

        In place, a module that holds the parameters is given the buffers for good.
        """
        _interrupts.install()  # before anything that holds signals back
        # A trace takes long, and draws no numbers.
        with draws.turn if not (_tracing.entered and _tracing.tracing()) else nullcontext():
            modes = [module.training for module in self.modules]
            # The first and the last parameter tell if the model has moved: looking at all of them takes too long.
            values = params.values()
            ends = next(iter(values), _NO_TENSOR).device, next(reversed(values), _NO_TENSOR).device
            if ends != self.devices:
                self.devices, self.generators = ends, _generators(*(tensor.device for tensor in values))
            generators = self.generators
            streams = [generator.get_state() for generator in generators]
            hosted, depth = running.models, len(running.models)
            swaps: list[Swap] = []
            engine, lent = self.engine, None
            try:
                hosted.append(self.model)
                if engine is not None:
                    lent = engine.swap_in(params, self.params)
                swaps = self._swaps(params if lent is None else self.params(), buffers, in_place)
                for owner, key, _, tensor in swaps:
                    owner[key] = tensor
                for module, mode in pairs(self.modules, self.modes):
                    if module.training is not mode:
                        module.training = mode
                self.seed(seed)
                out = body()
                if self.unfilled:
                    self._refuse_filled()
                return out
            finally:
                _hold_signals = True
                del hosted[depth:]  # also if an interrupt came before the first line above
                for owner, key, own, _ in swaps:
                    owner[key] = own
                for owner, key, _ in self.unfilled:
                    owner[key] = None
                if engine is not None:
                    engine.restore(lent)
                for module, mode in pairs(self.modules, modes):
                    if module.training is not mode:
                        module.training = mode
                for generator, stream in pairs(generators, streams):
                    generator.set_state(stream)

    def _swaps(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], in_place: bool) -> list[Swap]:
        """Slots that hold other tensors than these."""
        # A loss that misses the replaced layers is noticed by their gradients, so only the first call looks.
        if not (self.looked and self.backward) and _submodules(self.children) != self.submodules:
            self._refuse_replaced()
        if not self.looked and self.model.training:
            self._warn_of_late_eval()
        self.looked = True
        if self.unfilled:
            self._refuse_filled()
        swaps = _differing(self.params_at, params)
        if swaps:
            if any(own.shape != tensor.shape for _, _, own, tensor in swaps):
                self.explain(params, buffers, None)
            if self.backward and torch_private.any_gradient_hooks([own for _, _, own, _ in swaps]):
                self._refuse_hooks(params)
        if not buffers:
            return swaps
        # Buffers may have any shape, since a forward pass may assign a longer one.
        others = _differing(self.buffers_at, buffers)
        if others and in_place and not swaps:  # assigned by a pass that was skipped or has failed
            for owner, key, _, tensor in others:
                owner[key] = tensor
            return []
        return swaps + others

    def _warn_of_late_eval(self) -> None:
        modes = dict(zip(self.modules, self.modes, strict=True))
        late = [name for name, module in named_modules(self.model) if modes[module] and not module.training]
        if late:
            warn(_LATE_EVAL.format(layers=few(late, _SHOWN)))

    def _refuse_replaced(self) -> None:
        """Raise if layers have been replaced since this was made, unless the tensors are still in the same slots."""
        for known, now in zip(self.slots, members(self.model), strict=True):
            for name in {**known, **now}:
                if _identity(known.get(name, [])) != _identity(now.get(name, [])):
                    raise ValueError(
                        f"the layer with {name} was replaced after this function was made from the model, so a state's "
                        "tensors would go into the old layer, and the new one would run on its own: call "
                        "ll.make_grad_fn, ll.make_eval_step, ll.make_predict_step and ll.init_state after you change "
                        "the model"
                    )
        self._read_modules()

    def _refuse_hooks(self, params: Mapping[str, Tensor]) -> None:
        for name, own in self.params().items():
            if own is not params[name] and torch_private.any_gradient_hooks([own]):
                raise ValueError(_OF_HOOKS.format(name=name))

    def seed(self, seed: int) -> None:
        """Seed the random streams of a microbatch inside `run`."""
        for generator in self.generators:
            generator.manual_seed(seed)
        if _tracing.entered:
            _tracing.draws_for(seed)

    def _refuse_filled(self) -> None:
        if filled := [name for owner, key, name in self.unfilled if owner[key] is not None]:
            raise ValueError(
                f"the forward pass put a tensor into {', '.join(filled)}, which register_buffer(..., None) left "
                "empty, so no state and no checkpoint has it: run the model on one batch before ll.init_state and "
                "before functions are made of it, or register a tensor"
            )

    def params(self) -> dict[str, Tensor]:
        """The module's own parameters."""
        return tensors(self.slots.params)

    def buffers(self) -> dict[str, Tensor]:
        """The module's current buffers: some modules assign new ones instead of writing to them."""
        return tensors(self.slots.buffers)

    def aside(self, body: Callable[[], R]) -> R:
        """Run `body()` within `run`, on copies of the buffers: a pass that does not count leaves no statistics."""
        swaps = _differing(self.buffers_at, mapped(Tensor.clone, self.buffers()))
        try:
            for owner, key, _, copy in swaps:
                owner[key] = copy
            return body()
        finally:
            _hold_signals = True
            for owner, key, own, _ in swaps:
                owner[key] = own

    def holds(self, params: Mapping[str, Tensor]) -> bool:
        """True if these are the module's own parameters."""
        return not _differing(self.params_at, params)

    def explain(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any) -> None:
        """Raise the cause of a torch error, if the state or the batch is at fault."""
        check_names("parameters", params, self.slots.params, self.model)
        check_names("buffers", buffers, self.slots.buffers, self.model)
        check_materialized(params)
        devices = {tensor.device for tensor in params.values()}
        leaves = pytree.tree_flatten_with_path(batch)[0]
        strays = [
            f"batch{pytree.keystr(path)} is on {leaf.device}"
            for path, leaf in leaves
            if isinstance(leaf, Tensor) and leaf.device not in devices
        ]
        check(
            not (strays and params),
            f"{', '.join(strays)}, and the parameters are on {', '.join(sorted(map(str, devices)))}: move the batch, or "
            "let make_loader(..., device=...) do it",
        )

    def explained(
        self, error: Exception, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
    ) -> Exception:
        """The error, or a better one if it is torch's and the state or the batch explains it."""
        fold(error)
        if self.backward and torch_private.functorch_level() and not _tracing.tracing():
            return RuntimeError(_IN_FUNC)
        if isinstance(error, RuntimeError):
            if "backward through the graph a second time" in str(error):
                return RuntimeError(
                    "the graph behind the loss is gone before its backward pass: loss_fn returns the loss and does not "
                    "call loss.backward(), which looplib does; what it keeps from an earlier batch it must detach()"
                )
            if "use_reentrant=True, torch.utils.checkpoint is incompatible" in str(error):
                return RuntimeError(LATE_CHECKPOINT)
            try:
                self.explain(params, buffers, batch)
            except ValueError as better:
                return better
        note_batch(error, batch, named_modules(self.model))
        return error


_CPU = torch.device("cpu")
_SHOWN = 4  # layers in a message
_PART_IN_EVAL = (
    "{part} is in eval mode within a module that is not, and has dropout and parameters to train: they are "
    "trained without dropout. from_pretrained gives models in eval mode, and peft and other wrappers leave "
    "them so: call model.train() before make_grad_fn. If it is meant, set p of its dropout to 0"
)
_ALL_IN_EVAL = (
    "the whole {model} is in eval mode, and steps run it in training mode, so batch norm updates its statistics and "
    "dropout drops: {layers}. from_pretrained gives models in eval mode: call model.train() before make_grad_fn, and "
    "then eval() of each layer that is to stay so"
)
_LATE_EVAL = (
    "{layers} went into eval mode after this function was made from the model, which runs each layer in the mode that it "
    "had then, here training mode: call eval() before make_grad_fn"
)
_OF_HOOKS = (
    "the parameter {name} has a hook of its own (register_hook or register_post_accumulate_grad_hook), which torch calls "
    "for the module's parameters only, and this step runs on other tensors: train with donate=True on a state that is "
    "bound to the module (from ll.init_state, or state = ll.bind(model, state)), not compiled, or change the gradients "
    "in a wrapper of the grad_fn"
)
LATE_CHECKPOINT = (
    "the loss has a checkpoint with use_reentrant=True, which runs a backward pass of its own, and had none at the first "
    "call: turn on activation checkpointing before ll.make_grad_fn, or call ll.make_grad_fn again, or use "
    "use_reentrant=False"
)
_IN_FUNC = (
    "a train step inside torch.func.grad or torch.vmap: it takes its gradients by a backward pass, which does not work "
    "there. Use ll.transforms.differentiable(train_step), or ll.vmap_step(train_step) for many members"
)
_NO_TENSOR = torch.empty(0, device=_CPU)


def _places(slots: Mapping[str, list[Slot]]) -> list[tuple[dict[str, Any], str, str]]:
    """Slots with their names, flat."""
    return [(owner, key, name) for name, each in slots.items() for owner, key in each]


def _differing(places: Sequence[tuple[dict[str, Any], str, str]], tensors: Mapping[str, Tensor]) -> list[Swap]:
    """The slots that do not hold the tensors of these names."""
    return [
        (owner, key, own, tensor)
        for owner, key, name in places
        if (own := owner[key]) is not (tensor := tensors[name])
    ]


def _submodules(children: Sequence[dict[str, nn.Module | None]]) -> list[nn.Module | None]:
    return [*chain.from_iterable(own.values() for own in children)]  # a scripted module's is no dict


def _identity(places: Sequence[Slot]) -> set[tuple[int, str]]:
    return {(id(owner), key) for owner, key in places}


def _differs(module: nn.Module) -> bool:
    """True for batch norm and dropout layers that eval mode changes."""
    if isinstance(module, torch_private.Dropout):
        return module.p > 0
    return isinstance(module, torch_private.BatchNorm) and module.running_mean is not None


def _drops_nothing(module: nn.Module) -> bool:
    """True for a module in eval mode with dropout in eval mode."""
    drops = [part for part in module.modules() if isinstance(part, torch_private.Dropout) and part.p > 0]
    return not module.training and not all(part.training for part in drops)


def _generators(*devices: torch.device) -> tuple[torch.Generator, ...]:
    """The CPU's random generator, and that of each of these devices."""
    found = [torch.default_generator]
    for device in dict.fromkeys(devices):
        own = getattr(getattr(torch, device.type, None), "default_generators", None)  # of each accelerator but MPS
        if device.type == "mps":
            found.append(torch_private.mps_generator())
        elif own:
            found.append(own[device.index or 0])
    return tuple(found)
