"""Parameters and buffers of modules: names, slots, and running a module on a state's tensors.

A state names tensors as the innermost module does. A slot is an entry of one of the module's dictionaries that holds
such a tensor. Reading slots shows if a state is bound. Writing them for the duration of a call runs the module on a
different state's tensors, like `torch.func.functional_call` at a tenth of its cost.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from looplib._core import interrupts as _interrupts
from looplib._core import random as draws
from looplib._core import torch_private
from looplib._core import tracing as _tracing
from looplib._core.checks import check, check_type, few, warn
from looplib._core.engines import Engine, engine_of, refuse_late
from looplib._core.errors import fold, note_batch
from looplib._core.forward_writes import Unwritten, has_values
from looplib._core.graphs import REENTRANT
from looplib._core.mappings import mapped, pairs
from looplib._core.switch import warnings_of_misuse
from looplib._core.torch_private import own_buffers, own_parameters

R = TypeVar("R")


class Slot(NamedTuple):
    """An entry of one of a module's dictionaries, and the name in a state of the tensor that it holds."""

    owner: dict[str, Any]
    key: str
    name: str


Swap = tuple[dict[str, Any], str, str, Any, Any]  # a slot, its name and value, and the value for a call


# Names under which torch's wrappers hold the wrapped module; they are not part of parameter names.
TRANSPARENT = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class Members(NamedTuple):
    """Slots of a module. Tied tensors share the first of their names, as in `named_parameters`.

    `empty` are those that `register_buffer(name, None)` has left so.
    """

    params: list[Slot]
    buffers: list[Slot]
    empty: list[Slot]


def named_modules(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` without the prefixes of wrappers."""
    names, parallel = {"": ""}, set()
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        parent, _, key = path.rpartition(".")
        wrapped = key in TRANSPARENT or (key == "module" and parent in parallel)
        names[path] = names[parent] if wrapped else f"{names[parent]}.{key}".lstrip(".")
        if is_parallel(module):
            parallel.add(path)
        yield names[path], module


def first_names(model: nn.Module) -> dict[str, str]:
    """The name in a state of each name that a parameter or buffer has: of tied ones, the first."""
    names: dict[int, str] = {}
    paths = (
        (f"{prefix}.{key}".lstrip("."), tensor)
        for prefix, module in named_modules(model, remove_duplicate=False)
        for key, tensor in (*own_parameters(module).items(), *own_buffers(module).items())
        if tensor is not None
    )
    return {path: names.setdefault(id(tensor), path) for path, tensor in paths}


def innermost(model: nn.Module) -> nn.Module:
    """The module within torch's wrappers."""
    return [module for name, module in named_modules(model) if not name][-1]


def is_parallel(module: nn.Module) -> bool:
    """True for torch's wrappers that hold the wrapped module as `module`."""
    return isinstance(module, (DataParallel, DistributedDataParallel))


def members(model: nn.Module) -> Members:
    instance = f", an instance such as {model.__name__}(...)" if isinstance(model, type) else ""
    check_type("model is", model, nn.Module, f"looplib needs a torch.nn.Module{instance}")
    slots = Members([], [], [])
    names: dict[int, str] = {}
    for prefix, module in named_modules(model):
        for of_kind, entries in ((slots.params, own_parameters(module)), (slots.buffers, own_buffers(module))):
            for key, tensor in entries.items():
                path = f"{prefix}.{key}".lstrip(".")
                if tensor is not None:
                    check(
                        not is_lazy(tensor),
                        f"{path} has no shape yet (a lazy module): run the model on one batch first",
                    )
                    of_kind.append(Slot(entries, key, names.setdefault(id(tensor), path)))
                elif of_kind is slots.buffers:
                    slots.empty.append(Slot(entries, key, path))
    return slots


def tensors(slots: Iterable[Slot]) -> dict[str, Tensor]:
    """Tensors by name; of tied ones that are no longer the same, the first."""
    by_name: dict[str, Tensor] = {}
    for owner, key, name in slots:
        by_name.setdefault(name, owner[key])
    return by_name


def check_names(
    what: str, of_state: Mapping[str, Tensor], slots: list[Slot], model: nn.Module, shapes: bool = True
) -> None:
    """Raise unless these tensors of a state have the names and, with `shapes`, the shapes of the model's."""
    of_model = tensors(slots)
    title = f"the state's {what} are not those of this {type(model).__name__}"
    advice = "make the state with ll.init_state from the same model"
    if of_state.keys() != of_model.keys():
        missing, unexpected = sorted(of_model.keys() - of_state.keys()), sorted(of_state.keys() - of_model.keys())
        raise ValueError(f"{title}: missing {missing or 'none'}, unexpected {unexpected or 'none'}; {advice}")
    for name, tensor in of_state.items():
        shape, of_tensor = tuple(of_model[name].shape), tuple(tensor.shape)
        if shapes and shape != of_tensor:
            stack = "; for a stack of states, ll.vmap_step(step)" * (of_tensor[1:] == shape)
            rows = "; to give the module the state's, ll.bind(model, state, resize=True)" * (
                of_tensor[1:] == shape[1:]
            )
            raise ValueError(f"{title}: {name} has shape {of_tensor}, the model's has {shape}; {advice}{stack}{rows}")


def check_materialized(params: Mapping[str, Tensor]) -> None:
    """Raise ValueError for parameters on the meta device, which has no memory."""
    empty = [name for name, tensor in params.items() if tensor.is_meta]
    check(
        not empty,
        f"{few(empty)} on the meta device, without values: device_map= of from_pretrained leaves parameters there that do "
        "not fit on the devices, and torch.device('meta') all of them. Load the model without device_map, and call "
        "model.to(device), or give it values first, model.to_empty(device=...)",
    )


def trainable_names(model: nn.Module, predicate: Callable[[str, Tensor], bool] | None = None) -> list[str]:
    """Names of the parameters of a module that are trained: those that require a gradient, or of these a selection."""
    params, owner = tensors(members(model).params), f"this {type(model).__name__}"
    if predicate is None:
        return requiring_gradient(params, owner)
    chosen = {name: tensor for name, tensor in params.items() if predicate(name, tensor)}
    check(chosen, f"no parameter of {owner} is trainable: {predicate} chose none")
    frozen = [name for name, tensor in chosen.items() if not tensor.requires_grad]
    check(
        not frozen,
        f"trainable= chose {few(frozen)} of {owner}, which require no gradient, so that no optimizer has a state for them: leave "
        "them out, or call requires_grad_() before ll.init_state and ll.make_grad_fn",
    )
    return [*chosen]


def requiring_gradient(params: Mapping[str, Tensor], owner: str, advice: str = "") -> list[str]:
    """Names of the parameters that require a gradient, which an optimizer keeps a state for."""
    names = [name for name, tensor in params.items() if tensor.requires_grad]
    check(names, f"no parameter of {owner} is trainable: none requires a gradient{advice}")
    return names


class Lent(NamedTuple):
    """Weights that a functional call has put into a module, and takes out before the backward pass.

    Attributes:
        entries: the dictionaries, keys and weights, of the calls around it too.
        run_again: functions of the graph whose second forward pass gets these weights again.
    """

    entries: list[tuple[dict[str, Any], str, Any]]
    run_again: set[Any]


class _Running(threading.local):
    models: tuple[nn.Module, ...] = ()  # modules that this thread runs on states at present, the innermost last
    lent: Lent | None = None  # by the functional calls of this thread, such as `ll.state.apply`


running = _Running()


class FunctionalModule:
    """A module that can run on any state's tensors, in its own modes, and is left unchanged.

    Each function of a module has one, and copies of the function share it. It notes facts of the module alone: what concerns
    one call is in arguments. `run` lets the calls of several threads take turns.

    Attributes:
        model, training, backward: as given.
        made_in_training: True if the module was in training mode when this was made.
        slots, engine, modes, parents, children, flags, transient: of the module, as `_read` has last found it. `check` has
            it read again when layers were replaced; `flags` also change with a warning that they have changed.
        param_names, buffer_names: the names in `slots`.
        unwritten: guard of the parameters, which learns which ones the forward pass writes.
        devices, generators: those of the last call's parameters, and their random streams.
        known_params: the parameters that the module held at the last call, or at first. Others in their places, which are
            not the state's either, came after the state, which is refused.
        ran: True from the first call on. Parameters that were replaced before it are fine if the state came after them.
        found_modes: modes of the module of which a warning was last given.
    """

    def __init__(self, model: nn.Module, training: bool, backward: bool | None = None) -> None:
        """`training` is the mode in which it runs; `backward` is False if no gradients are taken in that mode either."""
        self.model, self.training = model, training
        self.backward = training if backward is None else backward
        self.devices: set[torch.device] = set()
        self.generators = draws.generators_of()
        self.modes: dict[nn.Module, bool] = {}
        self.unwritten = Unwritten()
        self.engine: Engine | None = None
        self.found_modes: list[bool] = []
        self.made_in_training = model.training
        self._read()
        self.known_params = tensors(self.slots.params)
        self._leave()
        self.ran = False

    def _read(self) -> None:
        """Learn which modules there are, and what they hold."""
        self.slots, self.engine = members(self.model), engine_of(self.model, self.engine)
        self.param_names, self.buffer_names = tensors(self.slots.params).keys(), tensors(self.slots.buffers).keys()
        # If the root is in training mode, submodules in eval mode stay so, since they were chosen. If it is not,
        # as with pretrained models, the whole module is trained. Later layers run as they would have then.
        everything = self.training and not (self.made_in_training and self.model.training)
        self.modes = {
            module: self.modes.get(module, self.training and (everything or module.training))
            for module in self.model.modules()
        }
        self.parents = [children for module in self.modes if (children := torch_private.own_modules(module))]
        self.children = self._children()
        self.flags = [owner[key].requires_grad for owner, key, _ in self.slots.params]
        self.transient = {
            (id(own_buffers(module)), key) for module in self.modes for key in torch_private.transient_buffers(module)
        }
        self.unwritten.names |= names_of_shortened(self.modes, self.slots.params)

    @property
    def sharded(self) -> bool:
        """True if FSDP2 shards the module: the leaves of its graphs are its own, which no backward pass can be told to fill."""
        return self.engine is not None and bool(self.engine.shards)

    def _children(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(_values, self.parents))]

    def check(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Raise ValueError for tensors with other names than the module's, as it is now."""
        if self._children() != self.children:
            if self.backward and _places(members(self.model)) != _places(self.slots):
                raise ValueError(_CHANGED)
            self._read()
        if params.keys() != self.param_names or buffers.keys() != self.buffer_names:
            self.explain(params, buffers)
        if not (self.ran or running.models or self.sharded):  # the last two put tensors of their own there
            self._take_over(params, buffers)

    def _take_over(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Learn parameters that were replaced before the first call; raise ValueError if the state is older than they are.

        Asked here, of the state's own tensors: passes run on copies of them, on leaves over them, or on those of a trace.
        """
        replaced = self._replaced(self._differing(params))
        if not replaced:
            return
        of_state = {name: _tracing.original(params[name]) for name in replaced}
        old = {name: self.known_params[name] for name in replaced}
        # A stack of older states has new tensors with the old values. A copy of one state may be meant.
        if any(of_state[name] is old[name] for name in replaced) or (
            _stack_holds(of_state, old) and not _stack_holds(of_state, replaced)
        ):
            self._refuse_replaced(replaced)
        engine = self.engine
        self._read()
        if self.engine is not engine:  # sharded, without a change of the layers
            refuse_late(self.engine)
        self.known_params = tensors(self.slots.params)
        if params.keys() != self.param_names:  # tied
            self.explain(params, buffers)

    def warn_of_eval_mode(self, names: Sequence[str]) -> None:
        """Warn of layers in eval mode that may have been left so, if these parameters are trained."""
        if not self.model.training:
            return self._warn_of_layers_in_eval_mode(_ALL_IN_EVAL)
        for prefix, module in named_modules(self.model):
            drops = [part for part in module.modules() if isinstance(part, torch_private.Dropout) and part.p > 0]
            in_eval_mode = not (module.training or all(part.training for part in drops))
            if in_eval_mode and any(name.startswith(f"{prefix}.") for name in names):
                return warn(_PART_IN_EVAL.format(part=f"{prefix} ({type(module).__name__})"))

    def _warn_of_layers_in_eval_mode(self, message: str) -> None:
        """Warn of layers in eval mode, in which they would differ, that run in training mode."""
        layers = [
            f"{name or 'it'} ({type(module).__name__})"
            for name, module in named_modules(self.model)
            if self.modes[module] and not module.training and _differs(module)
        ]
        if layers:
            warn(message.format(model=type(self.model).__name__, layers=few(layers, _SHOWN)))

    def batch_norms(self) -> tuple[str, ...]:
        """Layers that normalize a sample by the others of its batch."""
        return tuple(
            f"{name or 'the model'} ({type(module).__name__})"
            for name, module in named_modules(self.model)
            if isinstance(module, torch_private.BatchNorm) and (self.modes[module] or module.running_mean is None)
        )

    def run(
        self,
        params: dict[str, Tensor],
        buffers: Mapping[str, Tensor],
        seed: int,
        body: Callable[[], R],
        in_place: bool = False,
        if_unbound: Callable[[], None] | None = None,
    ) -> R:
        """Run `body()` with these tensors in the module and the random streams seeded with `seed`.

        The buffers are copied, unless in place. To train in place, a module that holds the parameters is given them for
        good. `if_unbound()` is called before a body that runs in place on tensors that are not the module's: all parameters
        are compared here in any case.
        """
        _interrupts.install()  # before anything that signals wait for
        with draws.turn:
            devices = {tensor.device for tensor in params.values()}
            if devices != self.devices:
                self.devices, self.generators = devices, draws.generators_of(*devices)
            generators = self.generators
            streams = [generator.get_state() for generator in generators]
            # autocast keeps the casts of weights until its block ends, and steps write the weights or take new ones.
            cast = not running.models and torch_private.any_autocast()
            try:
                if cast:
                    torch.clear_autocast_cache()
                self.seed(seed)
                if not in_place:
                    buffers = {name: buffer.clone() for name, buffer in buffers.items()}
                return self._run_with(params, buffers, body, in_place, if_unbound)
            finally:
                _interrupts.waits.depth += 1
                try:
                    if cast:
                        torch.clear_autocast_cache()
                    for generator, stream in pairs(generators, streams):
                        generator.set_state(stream)
                finally:
                    _interrupts.waits.depth -= 1

    def _run_with(
        self,
        params: dict[str, Tensor],
        buffers: Mapping[str, Tensor],
        body: Callable[[], R],
        in_place: bool,
        if_unbound: Callable[[], None] | None,
    ) -> R:
        """Run `body()` with these tensors in the module, in the modes of this function."""
        modes = [*map(_is_training, self.modes)]
        engine, lent = self.engine, None
        swaps: list[Swap] = []
        hosted, for_good, done = running.models, False, False
        try:
            running.models = (*hosted, self.model)
            if engine is not None:
                lent = engine.copy_in(params, self.params)
            swaps = self._swaps_of_params(params if lent is None else self.params(), params, bool(hosted))
            if in_place and swaps and if_unbound is not None:
                if_unbound()
            if buffers:
                for_good = in_place and self.backward and not swaps
                of_buffers = _differing(self.slots.buffers, buffers)
                if of_buffers and for_good and warnings_of_misuse.on:
                    self._warn_of_buffers(of_buffers)
                swaps += of_buffers
            for owner, key, _, _, tensor in swaps:
                owner[key] = tensor
            if modes != [*self.modes.values()]:
                self._enter_modes(modes)
            self.ran = True
            out = body()
            done = True
            if filled := [name for owner, key, name in self.slots.empty if owner[key] is not None]:
                raise ValueError(_FILLED.format(names=", ".join(filled)))
            return out
        finally:
            _interrupts.waits.depth += 1
            try:
                running.models = hosted
                if for_good:
                    self._keep_buffers(None if done else buffers)
                else:
                    for owner, key, _, before, _ in swaps:
                        owner[key] = before
                for owner, key, _ in self.slots.empty:
                    owner[key] = None
                if engine is not None:
                    engine.restore(lent)
                if modes != [*map(_is_training, self.modes)]:
                    _set_modes(self.modes, modes)
            finally:
                _interrupts.waits.depth -= 1

    def _swaps_of_params(self, now: Mapping[str, Tensor], params: dict[str, Tensor], hosted: bool) -> list[Swap]:
        """The slots that do not hold the parameters of a call, which may take their places; `hosted` within another call."""
        swaps = self._differing(now)
        if swaps:
            # Before the first call, the state may have been made after the parameters were replaced: see `_take_over`.
            if self.ran and not (hosted or self.sharded) and (replaced := self._replaced(swaps)):
                self._refuse_replaced(replaced)
            self._check_swaps(swaps, params)
        elif not hosted:  # else the module may hold the tensors of the call around this one
            self.known_params = dict(params)
        return swaps

    def _enter_modes(self, modes: list[bool]) -> None:
        """Put the module into the modes of this function from those that it was found in, and warn of these once."""
        # After the first call, a module that is in eval mode as a whole was evaluated.
        began_in_eval = self.made_in_training and self.backward and not self.ran
        if warnings_of_misuse.on and modes != self.found_modes and (self.model.training or began_in_eval):
            self.found_modes = modes
            self._warn_of_layers_in_eval_mode(_LATE_EVAL)
        _set_modes(self.modes, self.modes.values())

    def _differing(self, params: Mapping[str, Tensor]) -> list[Swap]:
        try:
            return _differing(self.slots.params, params)
        except KeyError:  # a parametrization or pruning has put others into its place
            raise ValueError(_CHANGED) from None

    def _replaced(self, swaps: Sequence[Swap]) -> dict[str, Tensor]:
        """Those of these parameters that the module did not hold at the last call, or at first."""
        known = self.known_params
        replaced = {name: present for _, _, name, present, _ in swaps if present is not known.get(name, present)}
        check(all(present is not None for present in replaced.values()), _CHANGED)
        return replaced

    def _refuse_replaced(self, replaced: Iterable[str]) -> NoReturn:
        raise ValueError(_REPLACED.format(names=few([*replaced]), model=type(self.model).__name__))

    def _keep_buffers(self, buffers: Mapping[str, Tensor] | None) -> None:
        """Leave the buffers of a donated state in the module; after a pass that failed, those that were given."""
        if buffers is not None:
            for owner, key, name in self.slots.buffers:
                owner[key] = buffers[name]
        self._leave()

    def _leave(self) -> None:
        """Note the buffers that the module is left with, by whichever of its functions ran last.

        By name, and by their place: of two tied ones, a forward pass may replace one.
        """
        if not warnings_of_misuse.on:
            _left.pop(self.model, None)
            return
        places = {(id(owner), key): id(owner[key]) for owner, key, _ in self.slots.buffers}
        _left[self.model] = mapped(id, self.buffers()), places

    def _warn_of_buffers(self, swaps: Sequence[Swap]) -> None:
        """Warn once of buffers of a bound state that were replaced since the last call.

        Those that are not persistent, such as caches, may be replaced by any forward pass.
        """
        if self.model not in _left:  # left while the warnings were switched off
            return
        by_name, places = _left[self.model]
        replaced = [
            name
            for owner, key, name, present, tensor in swaps
            if id(tensor) == by_name.get(name)
            and id(present) != places.get((id(owner), key))
            and (id(owner), key) not in self.transient
        ]
        if replaced:
            self._leave()
            warn(_BUFFERS.format(names=few(replaced), model=type(self.model).__name__))

    def _check_swaps(self, swaps: Sequence[Swap], params: Mapping[str, Tensor]) -> None:
        """Raise ValueError for parameters that cannot take the places of the module's own."""
        # Buffers may have any shape, since a forward pass may assign a longer one.
        if any(present.shape != tensor.shape for _, _, _, present, tensor in swaps):
            check_names("parameters", params, self.slots.params, self.model)
        if self.backward and torch_private.any_gradient_hooks([present for _, _, _, present, _ in swaps]):
            hooked = [name for _, _, name, present, _ in swaps if torch_private.any_gradient_hooks([present])]
            raise ValueError(_OF_HOOKS.format(name=few(hooked)))

    def seed(self, seed: int) -> None:
        """Seed the random streams of a microbatch inside `run`."""
        for generator in self.generators:
            generator.manual_seed(seed)
        # A trace notes for which microbatch its graph draws. Outside of one, the call is not worth its time.
        if _tracing.entered:
            _tracing.draws_for(seed)

    def params(self) -> dict[str, Tensor]:
        """The module's own parameters."""
        return tensors(self.slots.params)

    def warn_of_flags(self) -> None:
        """Warn of parameters of the module's own whose `requires_grad` has changed since this was made."""
        try:
            flags = [owner[key].requires_grad for owner, key, _ in self.slots.params]
        except (KeyError, AttributeError):
            raise ValueError(_CHANGED) from None
        if flags != self.flags and warnings_of_misuse.on:
            slots = zip(self.slots.params, flags, self.flags, strict=True)
            warn(_TOGGLED.format(names=few([slot.name for slot, flag, before in slots if flag is not before])))
            self.flags = flags  # so that it is told once

    def buffers(self) -> dict[str, Tensor]:
        """The module's current buffers: some modules assign new ones instead of writing to them."""
        return tensors(self.slots.buffers)

    def run_uncounted(self, body: Callable[[], R]) -> R:
        """Run `body()` within `run`, on copies of the buffers: a pass that does not count leaves no statistics."""
        return self.run(self.params(), self.buffers(), 0, body)

    def is_bound(self, params: Mapping[str, Tensor]) -> bool:
        """True if these are the module's own parameters."""
        return not _differing(self.slots.params, params)

    def explain(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Raise the cause of a torch error, if the state is at fault."""
        check_names("parameters", params, self.slots.params, self.model)
        check_names("buffers", buffers, self.slots.buffers, self.model)
        check_materialized(params)

    def explained(
        self, error: Exception, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
    ) -> Exception:
        """The error, or a better one if it is torch's and the state explains it."""
        fold(error)
        if self.backward and torch_private.functorch_level():
            return RuntimeError(_IN_FUNC)
        if isinstance(error, RuntimeError):
            # With torch's advice, retain_graph=True, the gradient would be counted twice.
            if "backward through the graph a second time" in str(error):
                return RuntimeError(
                    "the graph behind the loss is gone before its backward pass: loss_fn returns the loss and does not "
                    "call loss.backward(), which looplib does; what it keeps from an earlier batch it must detach()"
                )
            if "use_reentrant=True, torch.utils.checkpoint is incompatible" in str(error):
                return RuntimeError(REENTRANT)
            try:
                self.explain(params, buffers)
            except ValueError as better:
                return better
        note_batch(error, batch, named_modules(self.model))
        return error


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
    "{layers} went into eval mode after this function was made from the {model}, which runs each layer in the mode that it "
    "had then, here training mode: call eval() before make_grad_fn, and model.train() after an evaluation of your own"
)
_CHANGED = (
    "layers or parameters of the model were replaced or added after make_grad_fn, which chose then what is trained: call "
    "ll.make_grad_fn again, and ll.init_state, after you change the model"
)
_REPLACED = (
    "{names} of the {model} is another tensor than when the state was made (a new nn.Parameter, tied weights, or "
    "load_state_dict(assign=True)). The state still has the old one, which steps would use in its place: make such changes "
    "before ll.make_grad_fn and ll.init_state, or call both again; to give a parameter other values, write them in place "
    "(weight.copy_(...) under torch.no_grad()) and donate, or into a new state, "
    "state.replace(params={{**state.params, name: value}})"
)
_BUFFERS = (
    "{names} of the {model} is another tensor than before (assigned, or replaced by model.to(...)), and steps use the "
    "state's buffer in its place: write the new value into the old tensor (model.running_mean.copy_(value)) and donate, or "
    "into the state, state.replace(buffers={{**state.buffers, name: value}}), and move a model before ll.init_state"
)
_TOGGLED = (
    "requires_grad of {names} changed after make_grad_fn, which chose then what this step trains. To train other layers "
    "later in a run, make a step for each choice before it, by ll.make_grad_fn(..., trainable=...), over one state "
    '(see "Freeze layers" in recipes/COOKBOOK_OPTIMIZERS.md); in a loop with torch\'s own optimizer, call make_grad_fn again'
)
_OF_HOOKS = (
    "the parameter {name} has a hook of its own (register_hook or register_post_accumulate_grad_hook), which torch calls "
    "for the module's parameters only, and this step runs on other tensors: train with donate=True on a state that is "
    "bound to the module (from ll.init_state, or state = ll.bind(model, state)), not compiled, or change the gradients "
    "in a wrapper of the grad_fn"
)
_IN_FUNC = (
    "a train step inside torch.func.grad or torch.vmap: it takes its gradients by a backward pass, which does not work "
    "there. Use ll.transforms.differentiable(train_step), or ll.vmap_step(train_step) for many members"
)
_FILLED = (
    "the forward pass put a tensor into {names}, which register_buffer(..., None) left empty, so no state and no "
    "checkpoint has it: run the model on one batch before ll.init_state and before functions are made of it, or register "
    "a tensor"
)


_is_training = attrgetter("training")
# The ids of the buffers that each module was last left with, by name and by place. Ids are enough: the state of a donated
# run keeps its buffers alive.
_left: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, int], dict[Any, int]]] = weakref.WeakKeyDictionary()
_values = methodcaller("values")


def _set_modes(modules: Iterable[nn.Module], modes: Iterable[bool]) -> None:
    """Set the modes of single modules. Not by `train()`, which sets their children too."""
    for module, mode in zip(modules, modes, strict=True):
        if module.training is not mode:
            module.training = mode


def _differing(slots: Iterable[Slot], tensors: Mapping[str, Tensor]) -> list[Swap]:
    """The slots that do not hold the tensors of these names."""
    return [
        (owner, key, name, present, tensor)
        for owner, key, name in slots
        if (present := owner[key]) is not (tensor := tensors[name])
    ]


def _stack_holds(of_state: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """True if the parameters of a stack of states have the values of these in all members."""
    with torch_private.disable_current_modes():  # these have values, also while a step is traced
        return all(_member_holds(of_state[name], other) for name, other in others.items())


def _member_holds(stacked: Tensor, other: Tensor) -> bool:
    if not (has_values(stacked) and has_values(other) and stacked.device == other.device):
        return False
    return stacked.shape[1:] == other.shape and bool((stacked == other).all())


def _places(slots: Members) -> list[Any]:
    return [(id(owner), key, name) for owner, key, name in slots.params]


def _differs(module: nn.Module) -> bool:
    """True for batch norm and dropout layers that eval mode changes."""
    if isinstance(module, torch_private.Dropout):
        return module.p > 0
    return isinstance(module, torch_private.BatchNorm) and module.running_mean is not None


def names_of_shortened(modules: Iterable[nn.Module], params: Iterable[Slot]) -> set[str]:
    """Names of the weights of embeddings with `max_norm`, which their forward passes write."""
    layers = (module for module in modules if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    shortened = {id(own_parameters(layer)) for layer in layers if layer.max_norm is not None}
    return {slot.name for slot in params if id(slot.owner) in shortened}
