"""Checks for a project's own unit tests: each names one way in which training goes wrong without an error.

A check takes the very functions that the training script uses, a state and a batch, and raises an AssertionError
that says what was done, what was found, what usually causes it, and what to do.

How to unit-test a training step: let the script get all that it trains with from one function, here `make_run`,
whose settings can be small, and give what it returns to the checks, one line for each. Models may be tiny, since what
is tested is how things are put together. A complete `tests/test_your_step.py` beside such a `train.py`:

    import pytest
    from train import make_run  # returns a record of grad_fn, train_step, predict_step, loader, state, batch

    from looplib import testing

    @pytest.fixture
    def run():
        return make_run(epochs=30, width=8)

    def test_the_step_is_pure(run):
        testing.assert_pure(run.train_step, run.state, run.batch)

    def test_a_stopped_run_goes_on_to_the_same_bits(run):
        testing.assert_resumes(run.train_step, run.state, run.loader)

    def test_rows_do_not_see_each_other(run):
        testing.assert_rows_independent(run.predict_step, run.state, run.batch)

    def test_one_batch_is_learned_by_heart(run):
        testing.assert_overfits(run.train_step, run.state, run.batch)

    def test_pieces_give_the_gradient_of_the_whole(run):
        testing.assert_pieces_equal_whole(run.grad_fn, run.state, run.batch)

    def test_ranks_give_the_gradient_of_the_whole(run):
        testing.assert_reduces_alike(run.grad_fn, run.state, run.batch)

    def test_every_parameter_is_trained(run):
        testing.assert_all_gradients(run.grad_fn, run.state, run.batch)

    def test_the_step_compiles(run):
        testing.assert_compiles(run.train_step, run.state, run.batch)

`recipes/testing_your_step` is such a project. Where the train step clips or scales gradients, `grad_fn` is what these
wrappers are put around. A model of sequences has `assert_causal` besides, a script for several ranks
`assert_ranks_train_alike`.

Each of these lines would have been red for a bug that somebody shipped: a loss averaged wrongly over micro-batches,
a frozen layer, labels shuffled apart from their inputs, an evaluation in training mode. Steps may donate, since
checks work on copies; the state and the batch that they are given stay good, and so do the random streams. (A module
that DDP or FSDP2 wraps works on its own tensors alone: give the checks the unwrapped one, and
`assert_ranks_train_alike` the script.)
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from looplib._core.engines import Context
from looplib._core.torch_private import pytree
from looplib._core.tracing import UntraceableError
from looplib._core.trees import batch_size, split
from looplib.checkpoint._io import checkpoint_io
from looplib.data._loader import Loader
from looplib.distributed import _processes as distributed
from looplib.grads._accumulation import accumulate
from looplib.metrics._mean import compute
from looplib.state import copy_state
from looplib.steps import Parts, parts_of
from looplib.testing._compare import (
    Surroundings,
    WithoutDropout,
    about_kernels,
    beyond_part,
    copied,
    differences,
    fail,
    in_float64,
    is_spent,
    kind_of,
    leaves,
    listed,
    outputs_of,
    recorded,
    rows_apart,
    same,
    seed_otherwise,
    stream_places,
    streams_kept,
    taken,
    users_own,
)
from looplib.transforms._compile import Compiler
from looplib.transforms._compile_step import GraphParts, step_of_graphs
from looplib.transforms._program import Question
from looplib.transforms._watch import changed
from looplib.types import TREES, GradFn, Gradients, Part, PredictStep, TrainState, TrainStep

__all__ = [
    "assert_all_gradients",
    "assert_causal",
    "assert_compiles",
    "assert_overfits",
    "assert_pieces_equal_whole",
    "assert_pure",
    "assert_ranks_train_alike",
    "assert_reduces_alike",
    "assert_resumes",
    "assert_rows_independent",
]


def assert_pure(step: Callable[[TrainState, Any], Any], state: TrainState, batch: Any, *, other: Any = None) -> None:
    """Raise unless a step gives the same bits for the same inputs, whatever ran before, and leaves all else alone.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> testing.assert_pure(step, ll.init_state(model, optimizer), torch.ones(4, 2))

    The step is called three times: on copies of the state and the batch; on other weights, with another seed, after
    torch's, NumPy's and Python's streams were seeded anew; and on copies of the state and the batch again. The first
    and the third result are compared number by number, and whatever must stay as it was with itself: the streams, the
    batch, the state that was given (unless the step donates), and the modules that the step reaches.

    What a step remembers from its very first call for ever after is not seen so, since no call comes before: see
    `restart` of `assert_resumes`.

    Args:
        step: a train step, or one to evaluate or predict with.
        state: what it begins with.
        batch: for all three calls, or
        other: another one for the call in between.

    Raises AssertionError with the names of what differs, and by how much.
    """
    __tracebackhide__ = True
    with streams_kept(state):
        given, inputs = dict(leaves(copy_state(state))), dict(leaves(copied(batch), "batch"))
        surroundings, places = Surroundings(step), stream_places(state)
        mine, rows = copy_state(state), copied(batch)
        first = recorded(step(mine, rows))
        if moved := [
            f"{name} moved on" for name, at in stream_places(state).items() if differences(at, places[name])
        ]:
            fail(
                "the step drew from a global random stream",
                moved,
                "So its result depends on what ran before it, and it changes what runs after. Draw from torch "
                "within the loss function, where looplib seeds the stream by the state's seed and step and puts it "
                "back, and make what NumPy or Python draw in the dataset, where the loader seeds them.",
            )
        if changed := differences(inputs, dict(leaves(rows, "batch"))):
            fail(
                "the step wrote to its batch",
                changed,
                "Whoever reads the batch after it (a second step, a metric, the next epoch of a dataset in memory) "
                "reads something else. Usually an operation in place on an input (x += ..., x.clamp_(...), "
                "labels[mask] = -100, batch.pop(...)): make a new tensor, such as x = x + ...",
            )
        if not is_spent(mine) and (changed := differences(given, dict(leaves(mine)))):
            fail(
                "the step wrote to the state that it was given",
                changed,
                "A state that was kept is no longer what it was. Usually an operation in place on model.weight.data, "
                "on a tensor of state.extra, or on one of opt_state in an optimizer of one's own: make a new tensor, "
                "or make the step with donate=True, which tells everyone that the old state is spent.",
            )
        if changed := surroundings.spoiled() or differences(given, dict(leaves(state))):
            fail(
                "the step changed tensors or modes that belong to neither its state nor its result",
                changed,
                "Usually a loss function that calls model.eval(), model.train() or requires_grad_(...) and does "
                "not put it back, a torch optimizer that steps on the module itself, or a gradient left in .grad. "
                "Let the step return what it changes, as a part of the state.",
            )
        seed_otherwise()
        step(_elsewhere(state), copied(batch if other is None else other))
        second = recorded(step(copy_state(state), copied(batch)))
        if differing := differences(first, second):
            fail(
                "the step is not a function of its state and its batch: two calls on equal ones differ",
                differing,
                "Between them torch's, NumPy's and Python's random streams were seeded otherwise, and the step ran "
                f"on other weights.{surroundings.hint()} Usually something that remembers between calls (a counter "
                "or a cached tensor in a module, a closure or an optimizer, a torch.Generator of one's own), or "
                "the time: put what must be remembered into a buffer or state.extra, and draw from torch's own "
                "stream." + about_kernels(state),
            )


def assert_resumes(
    step: TrainStep,
    state: TrainState,
    batches: Sequence[Any] | Loader,
    *,
    steps: int | None = None,
    restart: Callable[[], tuple[TrainStep, TrainState]] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> None:
    """Raise unless a run that is stopped anywhere, saved and restored ends with the bits of one that never was.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> loader = ll.make_loader(torch.randn(10, 2), batch_size=4)
    >>> state = ll.init_state(model, optimizer, epoch_length=len(loader))
    >>> testing.assert_resumes(step, state, loader, steps=5)

    One run goes through all batches and is saved after each. From each of these checkpoints another run is restored,
    into a template whose numbers were all spoiled, and goes on to the end; what the step says of each batch, and the
    state at the end, are compared number by number. n batches take n * (n + 1) / 2 steps: 4 to 8 are plenty.

    Args:
        step: pure or donated.
        state: at the beginning.
        batches: a list; or a looplib loader, which is asked for what is left of the epoch at each start, and whose
            batches are compared too. Let `steps` go beyond the end of an epoch then.
        steps: how many batches; those of the list, or 6 of a loader.
        restart: makes the step and a first state anew, as a new process of the script does. Without it the same step
            goes on, and what it remembers from its very first call is not missed.
        directory: where to save; a temporary one by default.

    Raises:
        AssertionError: with the batch after which the run was stopped, the first one that differs, and how.
        ValueError: fewer than 2 batches.
        TypeError, ValueError: from `checkpoint_io`, for a state that cannot be saved or restored.
    """
    __tracebackhide__ = True
    if steps is None:
        steps = 6 if isinstance(batches, Loader) else len(batches)
    if steps < 2 or (not isinstance(batches, Loader) and steps > len(batches)):
        there = "" if isinstance(batches, Loader) else f" and the list has {len(batches)}"
        raise ValueError(f"steps is {steps}{there}; a run is stopped between two batches: give 2 or more")
    with streams_kept(state), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if directory is None else directory)
        surroundings = Surroundings(step)
        straight: dict[int, dict[str, Any]] = {}
        for at, said, current in _run(step, copy_state(state), batches, 0, steps):
            straight[at] = said
            if at < steps:
                checkpoint_io(folder / f"after-{at}").save(current)
        end = recorded(current, "state")
        for stop in range(1, steps):
            again, template = (step, state) if restart is None else restart()
            seed_otherwise()
            restored = checkpoint_io(folder / f"after-{stop}").restore(_spoiled(template))
            for at, said, current in _run(again, restored, batches, stop, steps):  # noqa: B007
                if differing := differences(straight[at], said):
                    _fail_to_resume(stop, f"batch {at} of {steps}", differing, surroundings, state)
            if differing := differences(end, recorded(current, "state")):
                _fail_to_resume(stop, f"the state after {steps} batches", differing, surroundings, state)


def _fail_to_resume(
    stop: int, where: str, differing: list[str], surroundings: Surroundings, state: TrainState
) -> NoReturn:
    __tracebackhide__ = True
    fail(
        f"a run that was stopped after {stop} batches and restored is not the run that went on: {where} differs",
        differing,
        f"So something that the run depends on is not in its checkpoint.{surroundings.hint()} Usually a count, an "
        "average or a cache that a closure, a module's attribute or an optimizer's wrapper keeps between steps "
        "(put it into a buffer, opt_state or state.extra, which are saved), a loader or dataset that draws from a "
        "generator of its own, or a step that is not pure: see assert_pure." + about_kernels(state),
    )


def _run(
    step: TrainStep, state: TrainState, batches: Sequence[Any] | Loader, start: int, stop: int
) -> Iterator[tuple[int, dict[str, Any], TrainState]]:
    """Step after step, of a loader epoch after epoch: how many, what was read and said, and the state then."""
    at = start
    while at < stop:
        before = at
        for batch in batches(state) if isinstance(batches, Loader) else batches[start:stop]:
            read = recorded(batch, "batch")
            state, metrics = step(state, copied(batch))
            at += 1
            yield at, {**read, **recorded(metrics, "metrics")}, state
            if at == stop:
                return
        if at == before or state.epoch_length is None:
            raise ValueError(
                f"the loader ended after {at - before} batches, and steps is {stop}: give a state with "
                "epoch_length=len(loader), or, of a stream, fewer steps than it has batches"
            )


def _elsewhere(state: TrainState) -> TrainState:
    """Of the same run, with other weights and another seed."""
    params = {
        name: (t.detach() * 1.125).to(t.dtype).requires_grad_(t.requires_grad) for name, t in state.params.items()
    }
    return copy_state(state).replace(params=params, seed=state.seed + 1)


def _spoiled(state: TrainState) -> TrainState:
    """A template as a new process has it, with other numbers in all tensors and counts."""

    def spoil(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        wrong = math.nan if leaf.is_floating_point() or leaf.is_complex() else 1
        return torch.full_like(leaf, wrong).requires_grad_(leaf.requires_grad)

    trees = {name: pytree.tree_map(spoil, getattr(state, name)) for name in TREES}
    return state.replace(**trees, step=0, epoch=0, batch=0, samples=0, seed=state.seed + 1)


def assert_rows_independent(function: PredictStep, state: TrainState, batch: Any, *, tolerance: float = 1e-5) -> None:
    """Raise unless each row's output depends on that row alone, and not on the rows beside it.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    >>> testing.assert_rows_independent(predict_step, ll.init_state(model), torch.randn(6, 2))

    Where rows are independent, taking rows before the function or after it is the same. It is tried with copies of
    one row in the place of a half of them, and with one row alone. Everything is in float64 where the function takes
    that, and on either side within `tolerance` times the largest output, since the same row may round otherwise in a
    batch of another size. (A gradient of one row's output for another row's input, which must be zero, would say it
    of inputs of floats alone, and not of a predict step, which takes none.)

    Args:
        function: a predict step, or any `(state, batch) -> outputs` with one row for each example, such as the loss
            of each row.
        state: what to predict with.
        batch: 2 rows or more that differ; of tensors, in dicts, lists, tuples or dataclasses.
        tolerance: how far numbers may be apart, relative to the largest of them.

    Raises:
        AssertionError: with the output, its rows, and by how much they change.
        ValueError: a batch of one row or that cannot be cut, an output without one row for each example.

    After Karpathy, "A Recipe for Training Neural Networks", 2019: "use backprop to chart dependencies".
    """
    __tracebackhide__ = True
    count = batch_size(batch)
    if count < 2:
        raise ValueError(f"the batch has {count} row; give 2 or more, which differ, so that one could see another")
    with streams_kept(state):
        wide, rows, out = in_float64(function, state, batch)
        whole = outputs_of(out, count)
        half = count // 2
        ways = {
            "among copies of row 0": [*range(half), *[0] * (count - half)],
            f"among copies of row {count - 1}": [*[count - 1] * half, *range(half, count)],
            "alone": [0],
        }
        for way, index in ways.items():
            found = dict(leaves(function(wide, taken(rows, count, index)), "output"))
            apart = []
            for name, expected in whole.items():
                if (text := rows_apart(name, expected[index], found.get(name), index, tolerance)) is not None:
                    apart.append(text)
            if apart:
                fail(
                    f"rows of a batch see each other: their outputs change when they stand {way}",
                    apart,
                    "Usually BatchNorm in training mode, a mean, softmax or normalization over dimension 0, "
                    "attention with batch and length the wrong way round (batch_first), a reshape or view that "
                    "mixes rows where a transpose is meant, a squeeze() that drops a batch of one, or random "
                    "draws. Name the dimension that is meant, reshape with einops, and predict in eval mode, as "
                    "ll.make_predict_step does.",
                )


def assert_causal(function: PredictStep, state: TrainState, tokens: Tensor, *, tolerance: float = 1e-5) -> None:
    """Raise unless the output at each place of a sequence depends on the places up to it alone.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.GRU(2, 3, batch_first=True)
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x)[0])
    >>> testing.assert_causal(predict_step, ll.init_state(model), torch.randn(2, 8, 2))

    The places from some t on are given other values, those of other places and rows, and the outputs before t must
    stay, within `tolerance` times the largest of them.

    Args:
        function: `(state, tokens) -> outputs`, tensors of (batch, length, ...). For a batch with more in it than
            tokens: `lambda state, tokens: predict_step(state, {**batch, "input_ids": tokens})`.
        state: what to predict with.
        tokens: (batch, length, ...), of integers or floats, which differ from place to place.
        tolerance: how far numbers may be apart, relative to the largest of them.

    Raises:
        AssertionError: with the output, the first place that sees the future, and how far it looks.
        ValueError: tokens that are all alike, an output that is not (batch, length, ...).
    """
    __tracebackhide__ = True
    if tokens.dim() < 2 or tokens.shape[1] < 2:
        raise ValueError(
            f"tokens have the shape {tuple(tokens.shape)}; give (batch, length, ...), of length 2 or more"
        )
    length = tokens.shape[1]
    with streams_kept(state):
        wide, inputs, out = in_float64(function, state, tokens)
        whole = outputs_of(out, len(inputs))
        if odd := [f"{name} {tuple(t.shape)}" for name, t in whole.items() if t.dim() < 2 or t.shape[1] != length]:
            raise ValueError(
                f"outputs must be (batch, length, ...) with length {length}, and there is {', '.join(odd)}"
            )
        for cut in sorted({1, length // 4 or 1, length // 2, length - 1}):
            future = inputs[:, cut:]
            others = [inputs[:, :1].expand_as(future), future.flip(1), future.roll(1, 0)]
            other = next((o for o in others if not torch.equal(o, future)), None)
            if other is None:
                raise ValueError(
                    f"tokens from place {cut} on are all alike; give some that differ from place to place"
                )
            found = dict(leaves(function(wide, torch.cat([inputs[:, :cut], other], 1)), "output"))
            apart = []
            for name, expected in whole.items():
                gap = beyond_part(expected[:, :cut], found[name][:, :cut], tolerance)
                if gap.any():
                    place = gap.transpose(0, 1).flatten(1).any(1).nonzero()[0].item()
                    apart.append(f"{name}: from place {place} on, of those before {cut}")
            if apart:
                fail(
                    f"outputs see the future: they change when only the places from {cut} on are others",
                    apart,
                    "Usually attention without is_causal or with a mask the wrong way round (True means attend in "
                    "scaled_dot_product_attention, and do not attend in nn.MultiheadAttention), a convolution "
                    "padded on both sides, a recurrent layer that is bidirectional, or a normalization over the "
                    "length.",
                )


def assert_overfits(
    step: TrainStep,
    state: TrainState,
    batch: Any,
    *,
    steps: int = 200,
    fraction: float = 0.1,
    below: float | None = None,
    metric: str = "loss",
) -> None:
    """Raise unless a run learns one batch by heart: the loss falls to a fraction of the first within some steps.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.Adam, lr=0.1)
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> testing.assert_overfits(step, ll.init_state(model, optimizer), torch.ones(4, 2))

    It stops as soon as the loss is there. Give a batch of a few rows, and a learning rate for so short a run: a
    schedule with a long warmup has hardly begun.

    Args:
        step: pure or donated.
        state: at the beginning.
        batch: for all steps.
        steps: how many at most.
        fraction: of the first loss, to be reached.
        below: a loss to be reached instead, where the first is not above 0 or the least possible is far from 0, as of
            a density or with label smoothing.
        metric: the metric of the step to look at.

    Raises:
        AssertionError: with the loss along the way.
        ValueError: a first loss that is not above 0, without `below`; a metric that the step does not have.
    """
    __tracebackhide__ = True
    if steps < 1:
        raise ValueError(f"steps is {steps}; give 1 or more")
    curve: list[float] = []
    skipped, current = 0, copy_state(state)
    with streams_kept(state):
        for _ in range(steps):
            current, metrics = step(current, copied(batch))
            if metric not in metrics:
                raise ValueError(f"the step has no metric {metric!r}; it has {', '.join(metrics)}")
            curve.append(compute({metric: metrics[metric]})[metric])
            skipped += current.skipped
            if below is None and curve[0] <= 0:
                raise ValueError(
                    f"the first {metric} is {curve[0]:.4g}, of which there is no fraction: give below=, the value to "
                    "be reached"
                )
            goal = fraction * curve[0] if below is None else below
            if curve[-1] <= goal:
                return
            if not math.isfinite(curve[-1]):
                break
    shown = sorted({0, *(len(curve) * k // 5 for k in range(1, 5)), len(curve) - 1})
    lines = [f"{metric} {curve[k]:.4g} in step {k + 1}" for k in shown]
    if skipped:
        lines.append(f"{skipped} of {len(curve)} updates were skipped")
    moved = any(not torch.equal(tensor, state.params[name]) for name, tensor in current.params.items())
    if not math.isfinite(curve[-1]):
        why = (
            "It blew up: usually a learning rate that is too large (try a tenth, a warmup, "
            "ll.clip_by_global_norm), a log or a division of zero in the loss, or half precision without "
            "ll.grads.scale_loss."
        )
    elif not moved:
        why = (
            "No parameter has moved: usually a learning rate of 0 (the start of a warmup), updates that are all "
            "skipped, or a step that returns the state that it was given."
        )
    elif curve[-1] > curve[0]:
        why = (
            "It rises: usually a learning rate that is too large (try a tenth), or a loss with the wrong sign, "
            "such as an accuracy or a log-likelihood to be maximized."
        )
    else:
        why = (
            "Usually labels or masks that changed from step to step or stand beside other rows' inputs, a softmax "
            "before cross_entropy (which does it itself), predictions and targets of shapes (n,) and (n, 1) that "
            "broadcast, a branch that is detached or frozen (see assert_all_gradients), strong dropout or weight "
            "decay, inputs that are not normalized, or simply a learning rate that is too small or too few steps."
        )
    fail(
        f"one batch was not learned by heart in {len(curve)} steps: the goal was a {metric} of {goal:.4g}", lines, why
    )


def assert_pieces_equal_whole(
    grad_fn: GradFn, state: TrainState, batch: Any, *, microbatches: int = 3, tolerance: float = 1e-4
) -> None:
    """Raise unless a batch in pieces, as `ll.accumulate` cuts it, gives the gradient of the whole.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> testing.assert_pieces_equal_whole(grad_fn, ll.init_state(model), torch.randn(8, 2))

    It is done in float64 where the loss function takes that, and without the dropout of torch's own layers, since
    pieces draw other random numbers than the whole.

    Args:
        grad_fn: without what acts on a whole step's gradient, such as `clip_by_global_norm`, which goes around
            `accumulate`; and what trains must be this one, accumulated.
        state: what to take the gradient at.
        batch: as ragged as real ones: where each row has the same number of tokens, no wrong average shows.
        microbatches: how many pieces; best a number that does not divide the batch evenly.
        tolerance: how far gradients may be apart, relative to the largest of them. What is wrong is so by 1e-2 or so.

    Raises:
        AssertionError: with the parameters and how far their gradients are apart.
        ValueError: a batch of fewer rows than pieces; a loss that draws random numbers by itself; a `grad_fn` of a
            whole step.
    """
    __tracebackhide__ = True
    accumulated = accumulate(_of_parts(grad_fn), microbatches)
    count = batch_size(batch)
    if not 2 <= microbatches <= count:
        raise ValueError(
            f"microbatches is {microbatches}, and the batch has {count} rows: give 2 or more, up to that"
        )
    with streams_kept(state), WithoutDropout():
        wide, rows, whole = in_float64(grad_fn, state, batch)
        _check_draws(grad_fn, wide, rows, whole, tolerance)
        _compare(whole, accumulated(wide, rows).grads, wide, tolerance, f"{microbatches} pieces of {count} rows")


def assert_reduces_alike(
    grad_fn: GradFn, state: TrainState, batch: Any, *, ranks: int = 2, tolerance: float = 1e-4
) -> None:
    """Raise unless the parts of a batch on n ranks reduce to the gradient of the whole.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> testing.assert_reduces_alike(grad_fn, ll.init_state(model), torch.randn(7, 2), ranks=3)

    No process is started: the batch is divided as looplib's loaders do, the gradient of each part is taken in turn,
    and they are added up by their weights as `ll.grads.reduce_gradients` does. So this tests the loss function
    and what wraps it, in milliseconds. That the script reduces at all, and wraps its model rightly, only real
    processes can tell: `assert_ranks_train_alike`.

    Args:
        grad_fn, state, batch, tolerance: as for `assert_pieces_equal_whole`.
        ranks: into how many parts.

    Raises:
        AssertionError: with the parameters and how far their gradients are apart; a part without a weight.
        ValueError: a batch of fewer rows than ranks; a loss that draws random numbers by itself; a `grad_fn` of a
            whole step.
    """
    __tracebackhide__ = True
    _of_parts(grad_fn)
    count = batch_size(batch)
    if not 2 <= ranks <= count:
        raise ValueError(f"ranks is {ranks}, and the batch has {count} rows: give 2 or more, up to that")
    with streams_kept(state), WithoutDropout():
        wide, rows, whole = in_float64(grad_fn, state, batch)
        _check_draws(grad_fn, wide, rows, whole, tolerance)
        parts = split(rows, count, [len(part) for part in torch.arange(count).tensor_split(ranks)])
        outs = [grad_fn(wide, part, Part(reduction="sum", context=Context(local=True))) for part in parts]
        weights = [out.weight for out in outs if out.weight is not None]
        if len(weights) < ranks:
            fail(
                "a part of a batch came without its weight",
                [f"rank {rank} of {ranks}" for rank, out in enumerate(outs) if out.weight is None],
                "A GradFn that wraps another hands its third argument on to it, grad_fn(state, batch, part), and the "
                "weight and normalizer of what that returns: out._replace(grads=...). See ll.types.Part.",
            )
        total = sum(weights)
        added: dict[str, Tensor] = {}
        for out in outs:
            for name, grad in out.grads.items():
                mine = grad * (out.normalizer / (total + (total == 0)))
                added[name] = added[name] + mine if name in added else mine
        _compare(whole, added, wide, tolerance, f"the parts of {ranks} ranks, of {count} rows together")


def _of_parts(grad_fn: GradFn) -> GradFn:
    name = getattr(grad_fn, "of_whole", None)
    if name not in (None, "retry_on_oom"):
        raise ValueError(
            f"this grad_fn ends in {name}, which acts on the gradient of a whole step, not on a part's: give the one "
            f"that {name} is put around"
        )
    return grad_fn


def _check_draws(grad_fn: GradFn, state: TrainState, batch: Any, first: Gradients, tolerance: float) -> None:
    other = grad_fn(state.replace(seed=state.seed + 1), copied(batch))
    if drawn := _apart(first.grads, other.grads, tolerance):
        raise ValueError(
            f"the gradient of {listed(list(drawn))} differs from one state.seed to another: the loss draws random "
            "numbers, and pieces draw others than the whole, so there is nothing to compare. Turn off what draws "
            "(dropout of torch's own layers is off already), such as by model.eval() on that layer before "
            "ll.make_grad_fn"
        )


def _apart(whole: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float) -> dict[str, float]:
    """How far the gradients of each name are apart, where that is more than a part of the largest of all."""
    largest = max((float(grad.abs().max()) for grad in whole.values() if grad.numel()), default=0.0)
    gaps = {
        name: float((found[name].to(grad.dtype) - grad).abs().max()) if name in found else math.inf
        for name, grad in whole.items()
        if grad.numel()
    }
    return {name: gap for name, gap in gaps.items() if not gap <= tolerance * largest}


def _compare(whole: Gradients, found: Mapping[str, Tensor], state: TrainState, tolerance: float, what: str) -> None:
    __tracebackhide__ = True
    apart = _apart(whole.grads, found, tolerance)
    if not apart:
        return
    lines = [
        f"{name}: apart by {gap:.3g}, of {float(whole.grads[name].abs().max()):.3g} at most"
        for name, gap in sorted(apart.items(), key=lambda item: -item[1])
    ]
    written = [name for name, tensor in whole.buffers.items() if not same(tensor, state.buffers[name])]
    why = (
        f"The forward pass moved {listed(written)}: BatchNorm, or another layer in training mode that takes its "
        "statistics over the batch, sees only a part at a time, so that its result depends on the size of the parts. "
        "GroupNorm or LayerNorm does not; on ranks, torch.nn.SyncBatchNorm sees all; or put the layer in eval mode."
        if written
        else "Usually a loss that is a mean over something else than the rows (tokens, pixels, what a mask leaves) "
        "returned as a plain scalar, which weighs by its rows: return ll.Mean(total, weight), the sum and the "
        "number of what counts. Or a sum over the rows: return a mean, or ll.Mean(total, number of rows). Or a "
        "term that looks across rows, such as a contrastive loss or a balance of experts, which parts cannot give."
    )
    fail(f"{what} do not give the gradient of the whole batch", lines, why)


def assert_all_gradients(
    grad_fn: GradFn, state: TrainState, batch: Any, *, frozen: Callable[[str, Tensor], bool] | None = None
) -> None:
    """Raise unless every parameter gets a gradient that is finite and not all zero.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> testing.assert_all_gradients(grad_fn, ll.init_state(model), torch.randn(8, 2))

    Parameters that are not trained must be named by `frozen`, so that none is left out by mistake; nor may one of
    them get a gradient. A branch that begins at zero (LoRA, ReZero) hides what lies behind it until the first update:
    give a state of some steps later.

    Args:
        grad_fn: wrapped or not.
        state: what to take the gradient at.
        batch: one that uses all of the model.
        frozen: `(name, tensor) -> bool`, those that are not trained on purpose.

    Raises AssertionError with the names, by what is wrong with them.
    """
    __tracebackhide__ = True
    with streams_kept(state):
        try:
            out = grad_fn(copy_state(state), copied(batch))
        except ValueError:  # a parameter that is not reached is an error of the whole step alone; others come again
            out = grad_fn(copy_state(state), copied(batch), Part(context=Context(last=False)))
    kept = {name for name, tensor in state.params.items() if frozen is not None and frozen(name, tensor)}
    if frozen is not None and not kept:
        raise ValueError(f"frozen chose none of the parameters, which are {listed(list(state.params))}")
    lines = []
    for name, tensor in state.params.items():
        grad = out.grads.get(name)
        if name in kept:
            if grad is not None:
                lines.append(f"{name}: has a gradient, and is to be frozen")
        elif grad is None:
            reason = "it does not require one" if not tensor.requires_grad else "the loss does not reach it"
            lines.append(f"{name}: has no gradient, {reason}")
        elif not grad.isfinite().all():
            lines.append(f"{name}: {int((~grad.isfinite()).sum())} of {grad.numel()} numbers are NaN or infinite")
        elif grad.numel() and not grad.any():
            lines.append(f"{name}: all of its {grad.numel()} numbers are zero")
    if lines:
        fail(
            f"{len(lines)} of {len(state.params)} parameters do not get the gradient that they should",
            lines,
            "No gradient: usually a layer that forward() does not call, requires_grad_(False) or trainable= that "
            "leaves out too much, or a .detach(), .item(), .data, argmax or no_grad on the way. Zero: a dead ReLU, "
            "a softmax or sigmoid that is saturated, a mask that hides all, weights at zero in the layer after it. "
            "NaN: a log, square root or division at zero, also where torch.where throws the value away. What is "
            "not trained on purpose: frozen=lambda name, tensor: ...",
        )


def assert_compiles(
    step: TrainStep,
    state: TrainState,
    batch: Any,
    *,
    steps: int = 10,
    programs: int = 1,
    tolerance: float = 1e-5,
    backend: str = "eager",
) -> None:
    """Raise unless a step can be compiled whole: without a break, once for all steps, to the eager step's numbers.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model, lr = torch.nn.Linear(2, 1), ll.schedules.warmup_linear(1e-3, warmup=2, total=9)
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=lr)
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> testing.assert_compiles(step, ll.init_state(model, optimizer), torch.randn(4, 2))

    What is found is a matter of the graph, so by default the graph runs as it is, without machine code, which takes
    a fraction of a second instead of ten. Both steps are in float64 where the loss function takes that, and without
    the dropout of torch's own layers, since a compiled step draws other numbers in pieces of a batch.

    Args:
        step: what `make_train_step` returned, compiled or not, pure or donated; of a stack, the step of one member.
        state: what to begin with.
        batch: for all steps: each other shape would compile once more.
        steps: how many.
        programs: how many graphs they may compile: 1, and one more for each switch on the way, such as a layer that
            is thawed, or an average that moves every few steps.
        tolerance: how far metrics and the state may be apart, relative to the largest number of either.
        backend: torch.compile's; "inductor" for the machine code that a run has.

    Raises:
        AssertionError: with the line that no graph can hold, what it is compiled anew for, or what differs.
        TypeError: another step.
        ValueError: one step; a loss that draws random numbers by itself, other ones when compiled.
    """
    __tracebackhide__ = True
    parts = parts_of(step, "assert_compiles")
    if parts.kind != "train":
        raise TypeError(f"assert_compiles got a step of kind {parts.kind!r}: give what ll.make_train_step returned")
    if steps < 2:
        raise ValueError(f"steps is {steps}; give 2 or more: whether it is compiled anew shows from the second on")
    chosen: dict[str, Any] = {"backend": backend}
    given = parts.compiler.options_for("assert_compiles") if isinstance(parts, GraphParts) else {}
    if backend == "inductor":  # whose own draws are others than eager ones
        chosen |= {**given, "backend": backend, "options": {**(given.get("options") or {}), "fallback_random": True}}
    compiler = Compiler(parts.core, parts.donate, chosen, parts.watched)
    compiled = step_of_graphs(step, parts, compiler)
    first: list[Any] = []
    with streams_kept(state), WithoutDropout(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*changed since the step was compiled")  # which is told below
        begin, rows, _ = in_float64(parts.core, state, batch)
        plain, current = begin, copy_state(begin)
        for at in range(1, steps + 1):
            before = plain
            plain, expected = _by_core(parts, before, rows)
            try:
                current, metrics = compiled(current, copied(rows))
                refusal = ""
            except UntraceableError as error:
                refusal = str(error)
            if refusal:
                fail(
                    "the step cannot be compiled whole",
                    [refusal],
                    "Where that is no fault, compile the blocks of the model alone: ll.transforms.compile_blocks(model, Block).",
                )
            first = first or _machines(compiler)
            if compiler.compilations > programs:
                fail(
                    f"the step was compiled anew in step {at}: {compiler.compilations} graphs so far",
                    _reasons(compiler, first, begin, before),
                    "A graph keeps its plain Python numbers, texts and bools for ever, so that each new value of one "
                    "takes another graph. Let schedules and ll.transforms.on_host return floats, and keep counts as tensors in "
                    "opt_state or in buffers. What is switched on purpose within these steps, such as a layer that "
                    "is thawed, is allowed for by programs=, one more for each.",
                )
            found = _outcome(current, metrics)
            differing = [line for name in expected for line in differences(expected[name], found[name], tolerance)]
            if differing and any(machine.random for machine in _machines(compiler)):
                raise ValueError(
                    "the loss draws random numbers by itself, and a compiled step other ones than an eager one, so "
                    "there is nothing to compare. Turn off what draws (dropout of torch's own layers is off already)"
                )
            if differing:
                fail(
                    f"the compiled step is not the eager one: after step {at} numbers differ",
                    differing,
                    "Usually Python that is to run in each step and runs once, while the graph is written down: a "
                    "draw of random or NumPy, the time, a list or dict that is appended to or read, a global or an "
                    "attribute of an object that is set elsewhere. Give what changes in the batch, the state or by "
                    "ll.transforms.on_host. Or rounding, where code insists on float32 or less, or where a gradient is nothing "
                    "else (that of a bias before BatchNorm) and the optimizer blows it up: a larger tolerance.",
                )


def _by_core(parts: Parts, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, dict[str, Any]]]:
    """One step of a step's own Python."""
    out = parts.core(state, copied(batch))
    applied = bool(out.applied)
    new = {"params": out.params, "opt_state": out.opt_state, "buffers": out.buffers if applied else state.buffers}
    later = state.replace(**new, step=state.step + applied)
    return later, _outcome(later, out.metrics)


def _outcome(state: TrainState, metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    trees = {"metrics": metrics, "params": state.params, "buffers": state.buffers, "opt_state": state.opt_state}
    return {name: dict(leaves(tree, name)) for name, tree in trees.items()} | {"step": {"step": state.step}}


def _machines(compiler: Any) -> list[Any]:
    return [node for node in _asked(compiler) if not isinstance(node, Question)]


def _asked(compiler: Any) -> Iterator[Any]:
    """The questions to the host that a compiled step has asked, and the graphs that it has come to by the answers."""
    waiting = [node for first in compiler.table.values() for node in first.values()]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Question):
            waiting += node.answers.values()


def _reasons(compiler: Any, machines: list[Any], begin: TrainState, now: TrainState) -> list[str]:
    """What has changed since the first graph: values in Python, the kind of the state, answers of the host."""
    lines = [f"{name}: a plain value that has changed" for m in machines for name in changed(m.program.held)]
    for tree in ("params", "buffers", "opt_state"):
        one, other = ({n: _layout(leaf) for n, leaf in leaves(getattr(s, tree), tree)} for s in (begin, now))
        lines += differences(one, other)
    for question in _asked(compiler):
        if isinstance(question, Question) and len(question.answers) > 1:
            own = users_own(question.function)
            place = f" ({own.__code__.co_filename}:{own.__code__.co_firstlineno})" if hasattr(own, "__code__") else ""
            said = [answer[0] for answer in question.answers]
            lines.append(f"{getattr(own, '__qualname__', own)}{place}: returned {', then '.join(said[:4])}")
    return lines


def _layout(leaf: Any) -> Any:
    return f"{kind_of(leaf)}, strides {leaf.stride()}" if isinstance(leaf, Tensor) else leaf


def assert_ranks_train_alike(
    begin: Callable[[], tuple[TrainStep, TrainState, Loader]],
    *,
    ranks: int = 2,
    steps: int = 3,
    tolerance: float = 1e-4,
    timeout: float = 60,
) -> None:
    """Raise unless n processes train as one does: the same weights on all, and those of a run in one process.

    `begin()` does what the script does up to its loop; `assert_reduces_alike` is the quick check without processes.
    In a file `tests/test_train.py`:

        def begin():  # at the top of the file, so that a new process can import it
            model = make_model().double()
            wrapped = DistributedDataParallel(model) if ll.distributed.launched() else model
            optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
            train_step = ll.make_train_step(ll.make_grad_fn(wrapped, loss_fn), optimizer, donate=True)
            loader = ll.make_loader(data.double(), batch_size=8)
            return train_step, ll.init_state(wrapped, optimizer, epoch_length=len(loader)), loader

        def test_ranks_train_alike():
            testing.assert_ranks_train_alike(begin, ranks=2)

    It is called in this process, and in n new ones on this host's CPU, within `ll.distributed.setup()` and with the
    environment that torchrun sets, which costs some seconds. Seed what initializes the weights, turn dropout off
    (ranks draw each their own), and use float64: Adam makes a whole step of the rounding of a gradient near zero.

    Args:
        begin: makes `(train_step, state, loader)`; a function at the top of a module that can be imported.
        ranks: how many processes.
        steps: how many batches.
        tolerance: how far weights may be apart, relative to the largest change of any.
        timeout: seconds that ranks wait for each other.

    Raises:
        AssertionError: with the weights that differ from rank to rank, or from those of one process.
        TypeError: a `begin` that a new process cannot import.
        torch.multiprocessing.ProcessRaisedException: an error in one of them, with its traceback.
    """
    __tracebackhide__ = True
    try:
        pickle.dumps(begin)
    except (AttributeError, pickle.PicklingError) as error:
        raise TypeError(
            f"begin is {begin!r}, which a new process cannot import: put it at the top of a module, as a def"
        ) from error
    step, state, loader = begin()
    with streams_kept(state), tempfile.TemporaryDirectory() as folder:
        before = {name: tensor.detach().cpu().clone() for name, tensor in state.params.items()}
        *_, (_, _, end) = _run(step, state, loader, 0, steps)
        alone = {name: tensor.detach().cpu() for name, tensor in end.params.items()}
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        arguments = (begin, ranks, steps, port, folder, timeout)
        spawn(_train_on_rank, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
        trained = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]
    drifted = [
        f"rank {rank}: {line}" for rank, params in enumerate(trained) for line in differences(trained[0], params)
    ]
    if drifted:
        fail(
            f"after {steps} steps the ranks' weights differ from those of rank 0",
            drifted,
            "So each trains a model of its own: usually gradients that nothing reduces (wrap the model in "
            "DistributedDataParallel or fully_shard, or the grad_fn in ll.grads.reduce_gradients, within what "
            "clips), weights that are initialized by another seed on each rank and not broadcast, or parameters that "
            "each rank updates by itself.",
        )
    largest = max(float((alone[name] - tensor).abs().max()) for name, tensor in before.items() if tensor.numel())
    gaps = {name: float((trained[0][name] - tensor).abs().max()) for name, tensor in alone.items() if tensor.numel()}
    apart = {name: gap for name, gap in gaps.items() if not gap <= tolerance * largest}
    if apart:
        fail(
            f"after {steps} steps {ranks} ranks have other weights than one process",
            [f"{name}: apart by {gap:.3g}, of changes of {largest:.3g} at most" for name, gap in apart.items()],
            "Usually a loss or gradient that is divided by the number of ranks once more or once less, a loss that "
            "is a mean over something else than the rows (return ll.Mean(total, weight); see "
            "assert_reduces_alike), BatchNorm, batches that are not divided or not the same (a loader of another "
            "kind), dropout or another draw, weights that depend on the rank or the time, or float32 with Adam: "
            "use float64 here.",
        )


def _train_on_rank(
    rank: int, begin: Callable[[], Any], ranks: int, steps: int, port: int, folder: str, timeout: float
) -> None:
    """The life of one process of `assert_ranks_train_alike`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with distributed.setup(timeout=timeout):
        step, state, loader = begin()
        *_, (_, _, end) = _run(step, state, loader, 0, steps)
        whole: dict[str, Any] = dict(end.params)
        params = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in whole.items()}
        torch.save({name: tensor.detach().cpu() for name, tensor in params.items()}, Path(folder) / f"{rank}.pt")
