"""A step as a program: the graph of its tensor operations, with what goes in and what comes out.

The step's own Python runs once on tensors that have shapes and no values, through every wrapper, the backward pass
and the optimizer's own `step`, and torch writes down the operations (`make_fx`). What is left is a function of
flat lists of tensors, which can be compiled, mapped over many members, or differentiated. What it read from the state
as numbers, and what it keeps in Python objects, would be frozen in it: so both are watched.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import numbers
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from looplib._core import tracing as _tracing
from looplib._core.closures import is_library
from looplib._core.tracing import Count, UntraceableError
from looplib.steps import Outcome
from looplib.transforms._watch import Held, changed, kind_of
from looplib.types import TrainState

COUNTS = ("step", "epoch", "batch", "epoch_length", "samples", "batch_samples", "batch_steps", "seed", "extra")


_HOSTS = "looplib_host"  # in the notes of a node: which of the host's answers it stands for


Core = Callable[[TrainState, Any], Outcome]


class Question(NamedTuple):
    """Something that the host is asked before the graph runs; where the answers go that are no tensors."""

    function: Callable[..., Any]
    sources: list[Any]
    answers: dict[Any, Any]  # static part of an answer -> the next Question, or a Program


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
        streams: of each operation that draws random numbers, the microbatch that it draws for.
        written: the names of the parameters, and of the buffers, that it writes in place.
    """

    graph: GraphModule
    inputs: list[tuple[int | None, Any]]
    outputs: list[tuple[str, int]]
    outcome: Any
    afterwards: list[Callable[..., None]]
    successors: list[tuple[int, int]]
    trained: frozenset[int]
    held: list[Held]
    streams: list[int]
    written: tuple[set[str], set[str]] = (set(), set())

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
        returned: list[Node] = list(graph.graph_copy(self.graph.graph, {}))  # type: ignore[arg-type]
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

        def cloned(node: Node) -> Node:
            clone: Node = graph.call_function(torch.ops.aten.clone.default, (node,))
            clone.meta["val"] = node.meta["val"].clone()
            return clone

        state = {_storage(node) for source, node in at.items() if source[0] == 1}
        copies: dict[int, tuple[Node, Node]] = {}  # from the second to the first, by the place among the outputs
        for place, own in self.successors:
            kind, index = outputs[place]
            if (kind, index) != ("f", own):
                new = returned[index] if kind == "o" else taken((1 if kind == "f" else 2, index), leaves[place])
                if new.op == "placeholder" or _storage(new) in state:  # which another copy might write before
                    new = cloned(new)
                copies[place] = taken((1, own), leaves[place]), new
                outputs[place] = "f", own
        written = {_storage(old) for old, _ in copies.values()}
        kept = {place for place, _ in self.successors}
        for place, (kind, index) in enumerate(outputs):  # a metric that is a tensor of the old state
            node = returned[index] if kind == "o" else at.get((1, index)) if kind == "f" else None
            if place not in kept and node is not None and _storage(node) in written:
                outputs[place] = "o", len(returned)
                returned.append(cloned(node))
        for old, new in copies.values():
            graph.call_function(torch.ops.aten.copy_.default, (old, new)).meta["val"] = old.meta["val"]
        left = sorted({index for kind, index in outputs if kind == "o"})
        graph.output([returned[index] for index in left])
        outputs = [(kind, left.index(index) if kind == "o" else index) for kind, index in outputs]
        params, opt_state, buffers = self.outcome[0][:3]
        names = [*params, *[None] * len(dissect(opt_state).tensors), *buffers]
        changed = {place for place in copies if place < len(names)}
        return dataclasses.replace(
            self,
            graph=GraphModule(self.graph, graph),
            inputs=inputs,
            outputs=outputs,
            written=(
                {names[place] for place in changed if place < len(params)},
                {names[place] for place in changed if place >= len(names) - len(buffers)},
            ),
        )


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
        kinds = tuple((*kind_of(tensor), by_gradient and tensor.requires_grad) for tensor in self.tensors)
        return self.source, kinds, tuple(map(_hashable, self.constants))

    def build(self, names: str = "v") -> Callable[..., Any]:
        made: Callable[..., Any] = eval(f"lambda {names}: {self.source}", {"c": self.constants})
        return made


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        raise UntraceableError(
            f"a {type(value).__name__} stands in the state, in the batch, or in what on_host returned: a compiled "
            "step takes tensors, numbers, strings, and dicts, lists, tuples and dataclasses of these; turn NumPy "
            "arrays into tensors (torch.from_numpy)"
        ) from None
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
        if type(node) is dict:
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
        if isinstance(node, Mapping):  # of a tokenizer, for instance
            return f"{constant(type(node))}({walk(dict(node))})"
        if (fields := _fields(node)) is not None:
            return f"{constant(_with_fields)}({constant(type(node))}, {walk(fields)})"
        return constant(node)

    source = walk(tree)
    return Dissected(source, tensors, constants)


def _fields(node: Any) -> dict[str, Any] | None:
    """What a record is made of: a dataclass, or an object that holds tensors as attributes."""
    if isinstance(node, (type, nn.Module)):
        return None
    if dataclasses.is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    own = dict(getattr(node, "__dict__", {}))
    return own if any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_iter(own)) else None


def _with_fields(kind: type, values: dict[str, Any]) -> Any:
    new: Any = object.__new__(kind)
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
    """
    in_state, in_batch = dissect((state.params, state.buffers, state.opt_state)), dissect(batch)
    table, key = questions, None
    result: list[Any] = []
    without_values = FakeTensorMode(allow_non_fake_inputs=True)  # and without symbols for them, so asking raises
    without_values._allow_unsafe_data_ptr_access = False

    def run(*given: Tensor) -> list[Tensor]:
        nonlocal table, key
        # The table is the caller's from its first question on: what a failed attempt has asked is asked again.
        table, key = questions, None
        begin()
        sent = 0

        def answer(function: Callable[..., Any], sources: list[Any]) -> Any:
            nonlocal table, key, sent
            with _disable_current_modes():  # the host computes now, and nothing of it is written down
                shape = as_answer(evaluate(function, sources))
                inputs = [without_values.from_tensor(tensor) for tensor in shape.tensors]
            if (question := table.get(key)) is None:
                question = table[key] = Question(function, sources, {})
            tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
            for tensor in inputs:
                proxy = tracer.create_proxy("placeholder", f"host_{sent}", (), {})
                proxy.node.meta[_HOSTS] = sent
                track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
                sent += 1
            table, key = question.answers, shape.key()
            return shape.build()(inputs)

        known = {id(tensor): place for place, tensor in enumerate(given)}
        counts: dict[str, Any] = {name: Count(name) for name in COUNTS}
        params, buffers, opt_state = in_state.build()(given)
        stand_in = TrainState(**counts, params=params, buffers=buffers, opt_state=opt_state)
        here = _tracing.Trace(known, answer)
        drawing = _DrawnOnce()
        with _tracing.within(here), drawing:
            out = core(stand_in, in_batch.build()(given[len(in_state.tensors) :]))
            out = out._replace(buffers=_tracing.where(out.applied, out.buffers, buffers))
        outcome = tuple(out), [values for _, values in here.afterwards]
        checks = [function for function, _ in here.afterwards]
        result[:] = outcome, checks, _successors(out, stand_in, known), drawing.streams
        return dissect(outcome).tensors

    examples = [without_values.from_tensor(tensor.detach()) for tensor in flat]
    with torch.no_grad(), torch.random.fork_rng(devices=()), _as_when_compiling():
        try:
            graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
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
    program = _finished(graph, result, state, held)
    return program, table, key


def value_of(source: tuple[str, Any], flat: list[Tensor], counts: Mapping[str, Any]) -> Any:
    """What a question is asked about."""
    kind, value = source
    return flat[value] if kind == "input" else counts[value] if kind == "count" else value


def as_answer(found: Any) -> Dissected:
    """What the host said, with floats as tensors."""
    if type(found) is float:
        return Dissected("v[0]", [torch.tensor(found, dtype=torch.float64)], [])
    return dissect(_floats_as_tensors(found))


def _floats_as_tensors(tree: Any) -> Any:
    if isinstance(tree, numbers.Real) and not isinstance(tree, numbers.Integral):  # NumPy's too
        return torch.tensor(float(tree), dtype=torch.float64)
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


def _finished(graph: GraphModule, result: list[Any], state: TrainState, held: list[Held]) -> Program:
    """The graph with the inputs that it needs and the outputs that it computes."""
    outcome, checks, successors, streams = result
    nodes = graph.graph
    nodes.set_codegen(torch.fx.graph.CodeGen())
    asked = [node for node in nodes.nodes if _HOSTS in node.meta]
    placeholders = [node for node in nodes.nodes if node.op == "placeholder" and _HOSTS not in node.meta]
    for node in asked:  # they stand where they were asked for
        placeholders[0].prepend(node)
    source_of = {node: (1, place) for place, node in enumerate(placeholders)}
    source_of |= {node: (2, node.meta[_HOSTS]) for node in asked}
    (output,) = (node for node in nodes.nodes if node.op == "output")
    outputs: list[tuple[str, int]] = []
    computed: dict[Node, int] = {}
    owns, written = dict(successors), _written(graph)
    for node in output.args[0]:
        if len(outputs) in owns:
            own = placeholders[owns[len(outputs)]]
            node = own if _is_copy(node, own, written) else node
        if node in source_of:
            kind, place = source_of[node]
            outputs.append(("f" if kind == 1 else "s", place))
        else:
            outputs.append(("o", computed.setdefault(node, len(computed))))
    output.args = (list(computed),)
    inputs: list[tuple[int | None, Any]] = []
    reads = {id(value): read for _, read, value in held if isinstance(value, Tensor)}
    for node in list(nodes.nodes):
        if node.op == "get_attr" and isinstance(value := getattr(graph, str(node.target), None), Tensor):
            with nodes.inserting_before(next(iter(nodes.nodes))):
                constant = nodes.placeholder(f"constant_{len(inputs)}")
            constant.meta.update(node.meta)
            node.replace_all_uses_with(constant)
            nodes.erase_node(node)
            inputs.insert(0, (None, reads.get(id(value), partial(_itself, value))))
    for node, stream in zip(filter(draws, nodes.nodes), streams, strict=True):
        node.meta["stream"] = stream
    nodes.eliminate_dead_code()
    streams = [node.meta["stream"] for node in nodes.nodes if draws(node)]
    for node in list(nodes.nodes):
        if node in source_of and node.users:
            inputs.append(source_of[node])
        elif node in source_of:
            nodes.erase_node(node)
    nodes.lint()
    graph.recompile()
    trained = (place for place, name in enumerate(outcome[0][0]) if state.params[name].requires_grad)
    return Program(graph, inputs, outputs, outcome, checks, successors, frozenset(trained), held, streams)


def _written(graph: GraphModule) -> set[int]:
    """The storages that may be written, at the most: batch norm's kernels do so without telling."""
    ops = [node for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    writers = [node for node in ops if node.target._schema.is_mutable or "batch_norm" in str(node.target)]
    return {_storage(node) for writer in writers for node in writer.all_input_nodes if "val" in node.meta}


def _is_copy(node: Node, of: Node, written: set[int]) -> bool:
    """Whether it is a tensor of the state as it was, which a gradient function has copied in case it is written."""
    while node.target in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
        if _storage(node) in written:
            return False
        (node,) = node.all_input_nodes
    return node is of


def _itself(value: Any) -> Any:
    return value


class _DrawnOnce(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is drawn again from the same place of a stream are the same numbers.

    Checkpointing puts the random streams back to where they were, and a second pass over a batch begins where the
    first did. A trace draws nothing; so it moves the stream itself at each draw, and knows a draw by its place.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: dict[Any, Any] = {}
        self.streams: list[int] = []  # of each draw, the microbatch that it is for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        with _disable_current_modes():
            shapes = tuple(arg.shape for arg in args if isinstance(arg, Tensor))
            here = func, shapes, torch.default_generator.get_state().numpy().tobytes()
            torch.rand(())
        in_place = func._schema.is_mutable
        if here in self.drawn:
            return args[0].copy_(self.drawn[here]) if in_place else self.drawn[here]
        self.streams.append(_tracing.stream)
        out = func(*args, **kwargs)
        self.drawn[here] = out.clone() if in_place else out  # the numbers may be written over
        return out


class _as_when_compiling:
    """What torch's optimizers ask whether they may, for instance, divide by a tensor on a CPU."""

    def __enter__(self) -> None:
        self.before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True

    def __exit__(self, *_: Any) -> None:
        torch.compiler._is_compiling_flag = self.before


def _explained(error: Exception) -> Exception:
    """An error of the trace, with the line of the user's that cannot be traced."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    if not frames or not _is_untraceable(error):
        return error
    frame = frames[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return UntraceableError(
        f"{frame.filename}:{frame.lineno}, in {frame.name}: `{line}` cannot be part of a compiled step, which is a "
        "graph of tensor operations: it asks for the value of a tensor (by if, .item(), bool(), int(), float(), a "
        "shape that depends on values, or NumPy). Write it with torch.where or masks, take it out of the step, or "
        f"leave out ll.compile_step. torch says: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    )


_SIGNS = ("DataDependent", "DynamicOutputShape", "Unsupported", "value out of a tracing tensor", "numpy")


def _is_untraceable(error: Exception) -> bool:
    return any(sign in f"{type(error).__name__}: {error}" for sign in _SIGNS)


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
