"""A step as a program: the graph of its tensor operations, with what goes in and what comes out.

The step's own Python runs once on tensors that have shapes and no values, through every wrapper, the backward pass
and the optimizer's own `step`, and torch writes down the operations (`make_fx`). What is left is a function of
flat lists of tensors, which can be compiled, mapped over many members, or differentiated. What it read from the state
as numbers, and what it keeps in Python objects, would be frozen in it: so both are watched.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import linecache
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from looplib import _tracing
from looplib._modules import named_modules
from looplib._tracing import Count, UntraceableError
from looplib.state import TrainState
from looplib.steps import Outcome

COUNTS = ("step", "epoch", "batch", "samples", "batch_samples", "batch_steps", "seed")
_SPARE = (torch.float64, torch.int64, torch.float32, torch.bool)
_SPARES = 64  # tensors of each of these dtypes that the host may send for one step


Core = Callable[[TrainState, Any], Outcome]


class Question(NamedTuple):
    """Something that the host is asked before the graph runs; where the answers go that are no tensors."""

    function: Callable[..., Any]
    sources: list[Any]
    answers: dict[Any, Any]  # static part of an answer -> the next Question, or a Program


class Held(NamedTuple):
    """A plain value outside of the state that a step may read."""

    name: str
    read: Callable[[], Any]
    value: Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph, and how to call it.

    Attributes:
        graph: takes the tensors of `inputs`, one by one, and returns a list of tensors.
        inputs: for each placeholder where its value comes from: (1, i) of state and batch, (2, i) of what the host
            answers, (None, tensor) that the step holds in Python.
        outputs: for each tensor of the outcome where it is: ("o", i) of what the graph returns, or an input as it
            was, ("f", i) of state and batch, ("s", i) of what the host answers.
        outcome: an `Outcome` and the arguments of `afterwards`, as a tree.
        afterwards: functions to call when it has run.
        successors: (place among `outputs`, place in the state) of each tensor and of the one that it takes over from.
        trained: the places among `outputs` of parameters that require a gradient.
        held: what it may have read outside of the state.
    """

    graph: GraphModule
    inputs: list[tuple[int | None, Any]]
    outputs: list[tuple[str, int]]
    outcome: Any
    afterwards: list[Callable[..., None]]
    successors: list[tuple[int, int]]
    trained: frozenset[int]
    held: list[Held]

    def rebuild(self) -> Callable[[Any, Any, Any, Any], tuple[Any, Any]]:
        """`rebuild(returned, flat, answers, counts) -> (outcome, arguments)`."""

        def name(_: Tensor, place: int) -> str:
            kind, index = self.outputs[place]
            return f"{kind}[{index}]{'.requires_grad_()' if kind == 'o' and place in self.trained else ''}"

        return dissect(self.outcome, name).build("o, f, s, n")

    def random(self) -> bool:
        """Whether it draws random numbers."""
        return any(map(draws, self.graph.graph.nodes))

    def donated(self) -> Program:
        """One that writes the new state over the old."""
        outputs, inputs = list(self.outputs), list(self.inputs)
        leaves = dissect(self.outcome).tensors
        graph = torch.fx.Graph()
        returned: Any = graph.graph_copy(self.graph.graph, {})
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        at = {source: node for source, node in zip(inputs, placeholders, strict=True) if source[0] is not None}

        def taken(source: tuple[int, int], like: Tensor) -> Node:
            if source not in at:
                with graph.inserting_before(next(iter(graph.nodes))):
                    at[source] = graph.placeholder(f"taken_{len(inputs)}")
                at[source].meta["val"] = like
                inputs.insert(0, source)
            node: Node = at[source]
            return node

        state = {_storage(node) for source, node in at.items() if source[0] == 1}
        copies: list[tuple[Node, Node]] = []
        for place, own in self.successors:
            kind, index = outputs[place]
            if (kind, index) != ("f", own):
                new = returned[index] if kind == "o" else taken((1 if kind == "f" else 2, index), leaves[place])
                if new.op == "placeholder" or _storage(new) in state:  # which another copy might write before
                    value = new.meta["val"]
                    new = graph.call_function(torch.ops.aten.clone.default, (new,))
                    new.meta["val"] = value
                copies.append((taken((1, own), leaves[place]), new))
                outputs[place] = "f", own
        for old, new in copies:
            graph.call_function(torch.ops.aten.copy_.default, (old, new)).meta["val"] = old.meta["val"]
        left = sorted({index for kind, index in outputs if kind == "o"})
        graph.output([returned[index] for index in left])
        outputs = [(kind, left.index(index) if kind == "o" else index) for kind, index in outputs]
        module = GraphModule(self.graph, graph)
        return dataclasses.replace(self, graph=module, inputs=inputs, outputs=outputs)


def _storage(node: Node) -> int:
    value: Tensor = node.meta["val"]
    return int(value.untyped_storage()._cdata)


def draws(node: Node) -> bool:
    """Whether it is an operation that draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


class Dissected(NamedTuple):
    """A tree as an expression over its tensors, its other leaves being part of the expression."""

    source: str
    tensors: list[Tensor]
    constants: list[Any]

    def key(self, by_gradient: bool = False) -> Any:
        """What is the same for trees that one program takes; `by_gradient` where it matters who requires one."""
        kinds = tuple(
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, by_gradient and tensor.requires_grad)
            for tensor in self.tensors
        )
        return self.source, kinds, tuple(map(_hashable, self.constants))

    def build(self, names: str = "v") -> Callable[..., Any]:
        made: Callable[..., Any] = eval(f"lambda {names}: {self.source}", {"c": self.constants})
        return made


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def dissect(tree: Any, leaf: Callable[[Tensor, int], str] = lambda tensor, place: f"v[{place}]") -> Dissected:
    """The expression that makes such a tree of other tensors; `leaf` names the tensor at a place."""
    tensors: list[Tensor] = []
    constants: list[Any] = []

    def constant(value: Any) -> str:
        constants.append(value)
        return f"c[{len(constants) - 1}]"

    def walk(node: Any) -> str:
        if isinstance(node, Tensor):
            tensors.append(node)
            return leaf(node, len(tensors) - 1)
        if type(node) is Count:
            return f"n[{node.name!r}]"
        if node is None or type(node) in (bool, int, str) or (type(node) is float and node == node):
            return repr(node) if type(node) is not float or abs(node) < float("inf") else constant(node)
        if type(node) is dict or type(node) is _tracing.Chosen:
            inner = [f"{repr(k) if type(k) in (str, int) else constant(k)}: {walk(v)}" for k, v in node.items()]
            return f"{{{', '.join(inner)}}}"
        if type(node) in (list, tuple):
            inner = [walk(member) for member in node]
            return f"[{', '.join(inner)}]" if type(node) is list else f"({', '.join(inner)}{',' * bool(inner)})"
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return f"{constant(type(node))}({', '.join(map(walk, node))})"
        leaves, spec = torch.utils._pytree.tree_flatten(node)
        if len(leaves) != 1 or leaves[0] is not node:
            return (
                f"{constant(torch.utils._pytree.tree_unflatten)}([{', '.join(map(walk, leaves))}], {constant(spec)})"
            )
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            inner = [f"{f.name!r}: {walk(getattr(node, f.name))}" for f in dataclasses.fields(node)]
            return f"{constant(_with_fields)}({constant(node)}, {{{', '.join(inner)}}})"
        return constant(node)

    source = walk(tree)
    return Dissected(source, tensors, constants)


def _with_fields(record: Any, values: dict[str, Any]) -> Any:
    new = object.__new__(type(record))
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


def reader(tree: Any) -> Callable[[Any], list[Tensor]]:
    """A function that finds the tensors of a tree like this one, in the order of `dissect`, without looking at it."""

    def walk(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, Tensor):
            yield path
        elif isinstance(node, dict) and all(type(key) in (str, int) for key in node):
            for key, value in node.items():
                yield from walk(value, f"{path}[{key!r}]")
        elif isinstance(node, (list, tuple)):
            for place, value in enumerate(node):
                yield from walk(value, f"{path}[{place}]")
        elif dissect(node).tensors:
            raise LookupError

    try:
        found: Callable[[Any], list[Tensor]] = eval(f"lambda t: [{', '.join(walk(tree, 't'))}]")
    except LookupError:
        return lambda t: dissect(t).tensors
    return found


def trace(
    core: Core,
    state: TrainState,
    batch: Any,
    questions: dict[Any, Any],
    flat: list[Tensor],
    held: list[Held],
    evaluate: Callable[[Callable[..., Any], list[Any]], Any],
    begin: Callable[[], None] = lambda: None,
) -> tuple[Program, dict[Any, Any], Any]:
    """Write the step down; returns the program, and the table and the key where it belongs among the questions.

    Args:
        core: the step without its counts.
        state, batch: whose shapes, dtypes and devices are taken.
        questions: where the questions that the step asks are kept, from its first on.
        flat: the tensors of state and batch.
        held: what the step may read outside of the state (`held_by`).
        evaluate: gives the host's answer for this state.
        begin: called when the step's Python begins to run.
        begin: called when the step's Python begins to run.
    """
    in_state, in_batch = dissect((state.params, state.buffers, state.opt_state)), dissect(batch)
    table, key = questions, None
    sent: list[tuple[torch.dtype, Tensor]] = []  # for the spare inputs, in the order of the questions
    result: list[Any] = []
    spare_examples = [torch.zeros((), dtype=dtype) for dtype in _SPARE for _ in range(_SPARES)]
    examples = [tensor.detach() for tensor in flat]

    def run(*inputs: Tensor) -> list[Tensor]:
        nonlocal table, key
        given, spares = inputs[: len(flat)], inputs[len(flat) :]
        # The table is the caller's from its first question on: what a failed attempt has asked is asked again.
        table, key = questions, None
        sent.clear()
        begin()
        used = dict.fromkeys(_SPARE, 0)

        def answer(function: Callable[..., Any], sources: list[Any]) -> Any:
            nonlocal table, key
            with _disable_current_modes():  # the host computes now, and nothing of it is written down
                shape = as_answer(evaluate(function, sources))
            question = table.get(key)
            if question is None:
                question = table[key] = Question(function, sources, {})
            fakes = []
            for tensor in shape.tensors:
                if tensor.dtype not in used or tensor.dim():
                    raise UntraceableError(
                        f"on_host returned a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}: scalars of "
                        f"{', '.join(map(str, _SPARE))} go into a graph"
                    )
                place = _SPARE.index(tensor.dtype) * _SPARES + used[tensor.dtype]
                used[tensor.dtype] += 1
                if used[tensor.dtype] > _SPARES:
                    raise UntraceableError(f"more than {_SPARES} numbers of the host go into one step")
                sent.append((tensor.dtype, tensor))
                spare_order.append(place)
                fakes.append(spares[place])
                known[id(spares[place])] = len(flat) + place
            table, key = question.answers, shape.key()
            return shape.build()(fakes)

        spare_order.clear()
        known = {id(tensor): place for place, tensor in enumerate(given)}
        numbers: dict[str, Any] = {name: Count(name) for name in COUNTS}
        params, buffers, opt_state = in_state.build()(given)
        stand_in = TrainState(
            **numbers,
            epoch_length=state.epoch_length,
            params=params,
            buffers=buffers,
            opt_state=opt_state,
            extra=Count("extra"),
        )
        here = _tracing.Trace(known, answer)
        with _tracing.within(here):
            out = core(stand_in, in_batch.build()(given[len(in_state.tensors) :]))
            flag = _tracing.applied(out.params)
            if out.params is params:
                out = out._replace(applied=False, buffers=buffers)
            elif flag is not None:
                out = out._replace(applied=flag, buffers=_tracing.either(flag, out.buffers, buffers))
        outcome = tuple(out), [values for _, values in here.afterwards]
        result[:] = outcome, [function for function, _ in here.afterwards], _successors(out, stand_in, known)
        return dissect(outcome).tensors

    spare_order: list[int] = []
    with torch.no_grad(), _as_when_compiling():
        try:
            graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples, *spare_examples)
        except UntraceableError:
            raise
        except Exception as error:
            if (explained := _explained(error)) is error:
                raise
            raise explained from error
    if names := changed(held):
        raise UntraceableError(
            f"the forward pass changes {', '.join(sorted(set(names)))}, which is kept as a plain Python value: "
            "a graph would keep what they were. Make them buffers (register_buffer), which are part of the state"
        )
    program = _finished(graph, result, len(flat), spare_order, state, held)
    return program, table, key


def value_of(source: tuple[str, Any], flat: list[Tensor], counts: Mapping[str, Any]) -> Any:
    kind, value = source
    return flat[value] if kind == "input" else counts[value] if kind == "count" else value


def as_answer(found: Any) -> Dissected:
    """What the host said, with floats as tensors."""
    if type(found) is float:
        return Dissected("v[0]", [torch.tensor(found, dtype=torch.float64)], [])
    return dissect(_floats_as_tensors(found))


def _floats_as_tensors(tree: Any) -> Any:
    if type(tree) is float:
        return torch.tensor(tree, dtype=torch.float64)
    if type(tree) is dict:
        return {key: _floats_as_tensors(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_floats_as_tensors, tree))
    return tree


def _successors(out: Outcome, old: TrainState, known: dict[int, int]) -> list[tuple[int, int]]:
    """Which tensor of the outcome takes over from which of the state."""
    found: list[tuple[int, int]] = []
    places = iter(range(len(dissect(tuple(out)).tensors)))

    def walk(new: Any, before: Any) -> None:
        if isinstance(new, Tensor):
            place = next(places)
            if isinstance(before, Tensor) and (new.shape, new.dtype) == (before.shape, before.dtype):
                found.append((place, known[id(before)]))
        elif isinstance(new, dict):
            for key, value in new.items():
                walk(value, before.get(key) if isinstance(before, dict) else None)
        elif isinstance(new, (list, tuple)):
            old = before if isinstance(before, (list, tuple)) and len(before) == len(new) else [None] * len(new)
            for value, was in zip(new, old, strict=True):
                walk(value, was)
        else:
            for _ in dissect(new).tensors:
                next(places)

    for new, before in zip(out[:3], (old.params, old.opt_state, old.buffers), strict=True):
        walk(new, before)
    return found


def _finished(
    graph: GraphModule, result: list[Any], count: int, spare_order: list[int], state: TrainState, held: list[Held]
) -> Program:
    """The graph with the inputs that it needs and the outputs that it computes."""
    outcome, checks, successors = result
    nodes = graph.graph
    nodes.set_codegen(torch.fx.graph.CodeGen())
    placeholders = [node for node in nodes.nodes if node.op == "placeholder"]
    order = {place: position for position, place in enumerate(spare_order)}
    (output,) = (node for node in nodes.nodes if node.op == "output")
    place_of = {node: place for place, node in enumerate(placeholders)}
    outputs: list[tuple[str, int]] = []
    computed: dict[Node, int] = {}
    for node in output.args[0]:
        place = place_of.get(node)
        if place is not None:
            outputs.append(("f", place) if place < count else ("s", order[place - count]))
        else:
            outputs.append(("o", computed.setdefault(node, len(computed))))
    output.args = (list(computed),)
    inputs: list[tuple[int | None, Any]] = []
    for node in list(nodes.nodes):
        if node.op == "get_attr" and isinstance(value := getattr(graph, str(node.target), None), Tensor):
            with nodes.inserting_before(placeholders[0]):
                constant = nodes.placeholder(f"constant_{len(inputs)}")
            constant.meta.update(node.meta)
            node.replace_all_uses_with(constant)
            nodes.erase_node(node)
            inputs.append((None, value))
    nodes.eliminate_dead_code()
    for node, place in place_of.items():
        if node.users:
            inputs.append((1, place) if place < count else (2, order[place - count]))
        else:
            nodes.erase_node(node)
    nodes.lint()
    graph.recompile()
    trained = (place for place, name in enumerate(outcome[0][0]) if state.params[name].requires_grad)
    return Program(graph, inputs, outputs, outcome, checks, successors, frozenset(trained), held)


class _as_when_compiling:
    """What torch's optimizers ask whether they may, for instance, divide by a tensor on a CPU."""

    def __enter__(self) -> None:
        self.before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True

    def __exit__(self, *_: Any) -> None:
        torch.compiler._is_compiling_flag = self.before


def _explained(error: Exception) -> Exception:
    """An error of the trace, with the line of the user's that cannot be traced."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    if not frames or not _is_untraceable(error):
        return error
    frame = frames[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return UntraceableError(
        f"{frame.filename}:{frame.lineno}, in {frame.name}: `{line}` cannot be part of a compiled step, which is a "
        "graph of tensor operations: it asks for the value of a tensor (by if, .item(), bool(), int(), float(), a "
        "shape that depends on values, or NumPy). Write it with torch.where or masks, take it out of the step, or "
        f"leave out compile=. torch says: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    )


_SIGNS = ("DataDependent", "DynamicOutputShape", "Unsupported", "value out of a tracing tensor", "numpy")


def _is_untraceable(error: Exception) -> bool:
    return any(sign in f"{type(error).__name__}: {error}" for sign in _SIGNS)


_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parent)


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES) or filename.startswith("<")


_PLAIN = (bool, int, float, str, type(None))
_TORCHS = {"training", "call_super_init", "dump_patches", "_is_full_backward_hook", "_compiled_call_impl"}


def held_by(*functions: Any) -> list[Held]:
    """The attributes of modules, and the globals and closed-over values of functions, that these may read."""
    found: list[Held] = []
    seen: set[int] = set()

    def visit(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            for name, module in named_modules(thing):
                own = vars(module)
                for key, value in own.items():
                    if type(value) in _PLAIN and key not in _TORCHS:
                        found.append(Held(f"{name or type(module).__name__}.{key}", partial(own.get, key), value))
        elif isinstance(thing, types.FunctionType):
            spaces = thing.__globals__
            ours = str(spaces.get("__name__", "")).split(".")[0] in ("looplib", "torch")
            for key in () if ours else _globals_read(thing.__code__):
                if type(spaces.get(key)) in _PLAIN:
                    found.append(Held(key, partial(spaces.get, key), spaces[key]))
                else:
                    visit(spaces.get(key))
            for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
                value = _content(cell)
                if type(value) in _PLAIN:
                    if not ours:
                        found.append(Held(name, partial(_content, cell), value))
                else:
                    visit(value)

    for function in functions:
        visit(function)
    return found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _content  # nothing stands there yet


def _globals_read(code: types.CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals_read(inner)


def changed(held: Iterable[Held]) -> list[str]:
    """The names of those that are no longer what they were."""
    return [name for name, read, value in held if (now := read()) is not value and not (now == value or now != now)]


@functools.cache
def simple_forms() -> dict[Any, Callable[..., Any]]:
    """Operations that torch can neither map nor differentiate as others that it can: those on lists as on each."""

    def each(name: str) -> Callable[..., list[Tensor]]:
        packet = torch.ops.aten.linalg_vector_norm if name == "norm" else getattr(torch.ops.aten, name)

        def of_lists(*args: Any, **kwargs: Any) -> list[Tensor]:
            return [
                packet(*[arg[place] if isinstance(arg, (list, tuple)) else arg for arg in args], **kwargs)
                for place in range(len(args[0]))
            ]

        return of_lists

    def copied(into: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
        return values.to(into.device, into.dtype).expand(into.shape)

    found: dict[Any, Callable[..., Any]] = {torch.ops.aten.copy.default: copied}
    for name in dir(torch.ops.aten):
        base = name.removeprefix("_foreach_")
        if base != name and not base.endswith("_") and (base == "norm" or hasattr(torch.ops.aten, base)):
            packet = getattr(torch.ops.aten, name)
            found |= {
                getattr(packet, overload): each(base) for overload in packet.overloads() if "out" not in overload
            }
    return found
