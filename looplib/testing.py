"""Checks for a project's own unit tests: each names one way in which training goes wrong without an error.

A check takes the very functions that the training script uses, a state and a batch, and raises an AssertionError
that says what was done, what was found, what usually causes it, and what to do. Models may be as tiny as you like,
since what is tested is how things are put together. How to unit-test a training step, in a `tests/test_train.py`
beside a `train.py` whose script calls `make_run` too:

    import pytest
    from looplib import testing
    from train import make_run  # width -> a record of grad_fn, train_step, predict_step, state, loader, batch

    @pytest.fixture
    def run():
        return make_run(width=8)

    def test_step_is_pure(run):
        testing.assert_pure(run.train_step, run.state, run.batch)

    def test_stopped_runs_go_on(run):
        testing.assert_resumes(run.train_step, run.state, run.loader, steps=6)

    def test_rows_do_not_see_each_other(run):
        testing.assert_rows_independent(run.predict_step, run.state, run.batch)

    def test_one_batch_can_be_learned_by_heart(run):
        testing.assert_overfits(run.train_step, run.state, run.batch, steps=100)

    def test_pieces_give_the_gradient_of_the_whole(run):
        testing.assert_pieces_equal_whole(run.grad_fn, run.state, run.batch)

    def test_every_parameter_is_trained(run):
        testing.assert_all_gradients(run.grad_fn, run.state, run.batch)

    def test_ranks_give_the_gradient_of_the_whole(run):
        testing.assert_reduces_alike(run.grad_fn, run.state, run.batch, ranks=2)

Each of these lines would have been red for a bug that somebody shipped: a loss averaged wrongly over micro-batches,
a frozen layer, labels shuffled apart from their inputs, an evaluation in training mode. Steps may donate, since
checks work on copies; the state and the batch that they are given stay good, and so do the random streams. (A module
that DDP or FSDP2 wraps works on its own tensors alone: give the checks the unwrapped one, and
`assert_ranks_train_alike` the script.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pickle
import random
import socket
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from looplib import distributed
from looplib._modules import Host, _generators, named_modules
from looplib.accumulation import _like, _structure, accumulate, split
from looplib.checkpoint import checkpoint_io
from looplib.gradients import GradFn, Gradients, Part
from looplib.loader import Loader
from looplib.metrics import batch_size, compute
from looplib.state import DonatedStateError, TrainState, copy_state
from looplib.steps import PredictStep, TrainStep

__all__ = [
    "assert_all_gradients",
    "assert_causal",
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
    with _streams_kept(state):
        given, inputs = dict(_leaves(copy_state(state))), dict(_leaves(_copied(batch), "batch"))
        surroundings, places = _Surroundings(step), _places(state)
        mine, rows = copy_state(state), _copied(batch)
        first = _recorded(step(mine, rows))
        if moved := [f"{name} moved on" for name, at in _places(state).items() if _differences(at, places[name])]:
            _fail(
                "the step drew from a global random stream",
                moved,
                "So its result depends on what ran before it, and it changes what runs after. Draw from torch "
                "within the loss function, where looplib seeds the stream by the state's seed and step and puts it "
                "back, and make what NumPy or Python draw in the dataset, where the loader seeds them.",
            )
        if changed := _differences(inputs, dict(_leaves(rows, "batch"))):
            _fail(
                "the step wrote to its batch",
                changed,
                "Whoever reads the batch after it (a second step, a metric, the next epoch of a dataset in memory) "
                "reads something else. Usually an operation in place on an input (x += ..., x.clamp_(...), "
                "labels[mask] = -100, batch.pop(...)): make a new tensor, such as x = x + ...",
            )
        if not _is_spent(mine) and (changed := _differences(given, dict(_leaves(mine)))):
            _fail(
                "the step wrote to the state that it was given",
                changed,
                "A state that was kept is no longer what it was. Usually an operation in place on model.weight.data, "
                "on a tensor of state.extra, or on one of opt_state in an optimizer of one's own: make a new tensor, "
                "or make the step with donate=True, which tells everyone that the old state is spent.",
            )
        if changed := surroundings.spoiled() or _differences(given, dict(_leaves(state))):
            _fail(
                "the step changed tensors or modes that belong to neither its state nor its result",
                changed,
                "Usually a loss function that calls model.eval(), model.train() or requires_grad_(...) and does "
                "not put it back, a torch optimizer that steps on the module itself, or a gradient left in .grad. "
                "Let the step return what it changes, as a part of the state.",
            )
        _seed_otherwise()
        step(_elsewhere(state), _copied(batch if other is None else other))
        second = _recorded(step(copy_state(state), _copied(batch)))
        if differing := _differences(first, second):
            _fail(
                "the step is not a function of its state and its batch: two calls on equal ones differ",
                differing,
                "Between them torch's, NumPy's and Python's random streams were seeded otherwise, and the step ran "
                f"on other weights.{surroundings.hint()} Usually something that remembers between calls (a counter "
                "or a cached tensor in a module, a closure or an optimizer, a torch.Generator of one's own), or "
                "the time: put what must be remembered into a buffer or state.extra, and draw from torch's own "
                "stream." + _about_kernels(state),
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
    with _streams_kept(state), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if directory is None else directory)
        surroundings = _Surroundings(step)
        straight: dict[int, dict[str, Any]] = {}
        for at, said, current in _run(step, copy_state(state), batches, 0, steps):
            straight[at] = said
            if at < steps:
                checkpoint_io(folder / f"after-{at}").save(current)
        end = _recorded(current, "state")
        for stop in range(1, steps):
            again, template = (step, state) if restart is None else restart()
            _seed_otherwise()
            restored = checkpoint_io(folder / f"after-{stop}").restore(_spoiled(template))
            for at, said, current in _run(again, restored, batches, stop, steps):  # noqa: B007
                if differing := _differences(straight[at], said):
                    _fail_to_resume(stop, f"batch {at} of {steps}", differing, surroundings, state)
            if differing := _differences(end, _recorded(current, "state")):
                _fail_to_resume(stop, f"the state after {steps} batches", differing, surroundings, state)


def _fail_to_resume(
    stop: int, where: str, differing: list[str], surroundings: _Surroundings, state: TrainState
) -> NoReturn:
    __tracebackhide__ = True
    _fail(
        f"a run that was stopped after {stop} batches and restored is not the run that went on: {where} differs",
        differing,
        f"So something that the run depends on is not in its checkpoint.{surroundings.hint()} Usually a count, an "
        "average or a cache that a closure, a module's attribute or an optimizer's wrapper keeps between steps "
        "(put it into a buffer, opt_state or state.extra, which are saved), a loader or dataset that draws from a "
        "generator of its own, or a step that is not pure: see assert_pure." + _about_kernels(state),
    )


def _run(
    step: TrainStep, state: TrainState, batches: Sequence[Any] | Loader, start: int, stop: int
) -> Iterator[tuple[int, dict[str, Any], TrainState]]:
    """Step after step, of a loader epoch after epoch: how many, what was read and said, and the state then."""
    at = start
    while at < stop:
        before = at
        for batch in batches(state) if isinstance(batches, Loader) else batches[start:stop]:
            read = _recorded(batch, "batch")
            state, metrics = step(state, _copied(batch))
            at += 1
            yield at, {**read, **_recorded(metrics, "metrics")}, state
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

    trees = {name: torch.utils._pytree.tree_map(spoil, getattr(state, name)) for name in _TREES}
    return state.replace(**trees, step=0, epoch=0, batch=0, samples=0, seed=state.seed + 1)


_TREES = ("params", "buffers", "opt_state", "extra")


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
    with _streams_kept(state):
        wide, rows, out = _in_float64(function, state, batch)
        whole = _outputs(out, count)
        half = count // 2
        ways = {
            "among copies of row 0": [*range(half), *[0] * (count - half)],
            f"among copies of row {count - 1}": [*[count - 1] * half, *range(half, count)],
            "alone": [0],
        }
        for way, index in ways.items():
            found = dict(_leaves(function(wide, _taken(rows, count, index)), "output"))
            apart = []
            for name, expected in whole.items():
                if (text := _rows_apart(name, expected[index], found.get(name), index, tolerance)) is not None:
                    apart.append(text)
            if apart:
                _fail(
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
    with _streams_kept(state):
        wide, inputs, out = _in_float64(function, state, tokens)
        whole = _outputs(out, len(inputs))
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
            found = dict(_leaves(function(wide, torch.cat([inputs[:, :cut], other], 1)), "output"))
            apart = []
            for name, expected in whole.items():
                gap = _gap(expected[:, :cut], found[name][:, :cut], tolerance)
                if gap.any():
                    place = gap.transpose(0, 1).flatten(1).any(1).nonzero()[0].item()
                    apart.append(f"{name}: from place {place} on, of those before {cut}")
            if apart:
                _fail(
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
    with _streams_kept(state):
        for _ in range(steps):
            current, metrics = step(current, _copied(batch))
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
            "ll.scale_loss."
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
    _fail(
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
    with _streams_kept(state), _WithoutDropout():
        wide, rows, whole = _in_float64(grad_fn, state, batch)
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
    and they are added up by their weights as `ll.distributed.reduce_gradients` does. So this tests the loss function
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
    with _streams_kept(state), _WithoutDropout():
        wide, rows, whole = _in_float64(grad_fn, state, batch)
        _check_draws(grad_fn, wide, rows, whole, tolerance)
        parts = split(rows, count, [len(part) for part in torch.arange(count).tensor_split(ranks)])
        outs = [grad_fn(wide, part, Part(sums=True, local=True)) for part in parts]
        weights = [out.weight for out in outs if out.weight is not None]
        if len(weights) < ranks:
            _fail(
                "a part of a batch came without its weight",
                [f"rank {rank} of {ranks}" for rank, out in enumerate(outs) if out.weight is None],
                "A GradFn that wraps another hands its third argument on to it, grad_fn(state, batch, part), and the "
                "weight and per of what that returns: out._replace(grads=...). See ll.Part.",
            )
        total = sum(weights)
        added: dict[str, Tensor] = {}
        for out in outs:
            for name, grad in out.grads.items():
                mine = grad * (out.per / (total + (total == 0)))
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
    other = grad_fn(state.replace(seed=state.seed + 1), _copied(batch))
    if drawn := _apart(first.grads, other.grads, tolerance):
        raise ValueError(
            f"the gradient of {_listed(list(drawn))} differs from one state.seed to another: the loss draws random "
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
    written = [name for name, tensor in whole.buffers.items() if not _same(tensor, state.buffers[name])]
    why = (
        f"The forward pass moved {_listed(written)}: BatchNorm, or another layer in training mode that takes its "
        "statistics over the batch, sees only a part at a time, so that its result depends on the size of the parts. "
        "GroupNorm or LayerNorm does not; on ranks, torch.nn.SyncBatchNorm sees all; or put the layer in eval mode."
        if written
        else "Usually a loss that is a mean over something else than the rows (tokens, pixels, what a mask leaves) "
        "returned as a plain scalar, which weighs by its rows: return ll.Mean(total, weight), the sum and the "
        "number of what counts. Or a sum over the rows: return a mean, or ll.Mean(total, number of rows). Or a "
        "term that looks across rows, such as a contrastive loss or a balance of experts, which parts cannot give."
    )
    _fail(f"{what} do not give the gradient of the whole batch", lines, why)


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
    with _streams_kept(state):
        try:
            out = grad_fn(copy_state(state), _copied(batch))
        except ValueError:  # a parameter that is not reached is an error of the whole step alone; others come again
            out = grad_fn(copy_state(state), _copied(batch), Part(last=False))
    kept = {name for name, tensor in state.params.items() if frozen is not None and frozen(name, tensor)}
    if frozen is not None and not kept:
        raise ValueError(f"frozen chose none of the parameters, which are {_listed(list(state.params))}")
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
        _fail(
            f"{len(lines)} of {len(state.params)} parameters do not get the gradient that they should",
            lines,
            "No gradient: usually a layer that forward() does not call, requires_grad_(False) or trainable= that "
            "leaves out too much, or a .detach(), .item(), .data, argmax or no_grad on the way. Zero: a dead ReLU, "
            "a softmax or sigmoid that is saturated, a mask that hides all, weights at zero in the layer after it. "
            "NaN: a log, square root or division at zero, also where torch.where throws the value away. What is "
            "not trained on purpose: frozen=lambda name, tensor: ...",
        )


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
    with _streams_kept(state), tempfile.TemporaryDirectory() as folder:
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
        f"rank {rank}: {line}" for rank, params in enumerate(trained) for line in _differences(trained[0], params)
    ]
    if drifted:
        _fail(
            f"after {steps} steps the ranks' weights differ from those of rank 0",
            drifted,
            "So each trains a model of its own: usually gradients that nothing reduces (wrap the model in "
            "DistributedDataParallel or fully_shard, or the grad_fn in ll.distributed.reduce_gradients, within what "
            "clips), weights that are initialized by another seed on each rank and not broadcast, or parameters that "
            "each rank updates by itself.",
        )
    largest = max(float((alone[name] - tensor).abs().max()) for name, tensor in before.items() if tensor.numel())
    gaps = {name: float((trained[0][name] - tensor).abs().max()) for name, tensor in alone.items() if tensor.numel()}
    apart = {name: gap for name, gap in gaps.items() if not gap <= tolerance * largest}
    if apart:
        _fail(
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


def _fail(what: str, found: Iterable[str], why: str) -> NoReturn:
    __tracebackhide__ = True
    lines = list(found)
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise AssertionError("\n".join([f"{what}:", *(f"  {line}" for line in lines[:_SHOWN] + more), why]))


_SHOWN = 8


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _about_kernels(state: TrainState) -> str:
    if all(tensor.device.type == "cpu" for tensor in state.params.values()):
        return ""
    return (
        " On an accelerator some kernels add up in another order each time: torch.use_deterministic_algorithms(True) "
        "names those, or takes others."
    )


def _leaves(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """All that a tree holds, by name: `params['0.weight']`, `metrics['loss'].total`."""
    children: Iterable[tuple[str, Any]]
    if isinstance(node, Mapping):
        children = [(f"[{key!r}]", value) for key, value in node.items()]
    elif isinstance(node, (list, tuple)):
        names = getattr(node, "_fields", None)
        children = [(f"[{i}]" if names is None else f".{names[i]}", value) for i, value in enumerate(node)]
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        children = [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    elif not isinstance(node, Tensor) and len(found := torch.utils._pytree.tree_flatten_with_path(node)[0]) != 1:
        children = [(torch.utils._pytree.keystr(path), leaf) for path, leaf in found]
    else:
        yield place, node
        return
    for name, child in children:
        yield from _leaves(child, f"{place}{name}".removeprefix("."))


def _recorded(result: Any, place: str = "") -> dict[str, Any]:
    """The same with copies of the tensors, which no later call can write to."""
    if not place and isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], TrainState):
        return {**_recorded(result[1], "metrics"), **_recorded(result[0], "state")}
    return {name: _copied_leaf(leaf) for name, leaf in _leaves(result, place or "output")}


def _is_spent(state: TrainState) -> bool:
    try:
        return not all(hasattr(state, name) for name in _TREES)
    except DonatedStateError:
        return True


def _same(one: Any, other: Any) -> bool:
    """To the bit, but that NaN is NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
    if type(one) is not type(other):
        return False
    if hasattr(one, "tobytes") and hasattr(one, "shape"):  # NumPy's
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    if type(one).__eq__ is object.__eq__:  # type: ignore[comparison-overlap]  # nothing says what it would be for two of them to be equal
        return _plain(vars(one)) == _plain(vars(other)) if hasattr(one, "__dict__") else True
    return bool(one == other or (one != one and other != other))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    lines = [f"{name}: is no longer there" for name in one if name not in other]
    lines += [f"{name}: is new" for name in other if name not in one]
    for name, leaf in one.items():
        if name in other and not _same(leaf, other[name]):
            lines.append(f"{name}: {_difference(leaf, other[name])}")
    return lines


def _difference(one: Any, other: Any) -> str:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return f"{one!r}, then {other!r}" if type(one) is type(other) else f"{_kind(one)}, then {_kind(other)}"
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return f"{_kind(one)}, then {_kind(other)}"
    one, other = one.detach(), other.detach()
    if one.numel() == 1:
        return f"{one.item():.9g}, then {other.item():.9g}"
    differing = (one != other) & ~((one != one) & (other != other))
    gap = (other.double() - one.double()).abs() if not one.is_complex() else (other - one).abs()
    return f"{int(differing.sum())} of {one.numel()} numbers differ, by {float(gap[differing].max()):.3g} at most"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor {tuple(leaf.shape)} of {str(leaf.dtype).removeprefix('torch.')} on {leaf.device}"
    return f"a {type(leaf).__name__}"


def _map(
    function: Callable[[Any], Any], node: Any, is_leaf: Callable[[Any], bool] = lambda node: isinstance(node, Tensor)
) -> Any:
    """A tree with the function of each leaf in its place, in whatever containers batches come."""
    if is_leaf(node):
        return function(node)
    if isinstance(node, Mapping):
        values = {key: _map(function, value, is_leaf) for key, value in node.items()}
        return values if type(node) is dict or not isinstance(node, MutableMapping) else _like(node, values)
    if isinstance(node, (list, tuple)):
        members = [_map(function, value, is_leaf) for value in node]
        return type(node)(*members) if hasattr(node, "_fields") else type(node)(members)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if field.init]
        return dataclasses.replace(node, **{name: _map(function, getattr(node, name), is_leaf) for name in names})
    return torch.utils._pytree.tree_map(function, node)


def _copied_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if hasattr(leaf, "copy") and hasattr(leaf, "shape") else leaf


def _copied(batch: Any) -> Any:
    return _map(_copied_leaf, batch)


def _wide(leaf: Any) -> Any:
    return leaf.detach().double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _in_float64(function: Callable[[TrainState, Any], Any], state: TrainState, batch: Any) -> tuple[Any, Any, Any]:
    """Copies of state and batch, and what the function makes of them: in float64, or else in their own dtypes."""
    own = copy_state(state)
    try:
        trees = {
            tree: {name: _wide(t).requires_grad_(t.requires_grad) for name, t in getattr(own, tree).items()}
            for tree in ("params", "buffers")
        }
        wide, rows = own.replace(**trees), _map(_wide, _copied(batch))
        return wide, rows, function(wide, _copied(rows))
    except (RuntimeError, TypeError):  # a dtype that the code insists on, or a device without float64
        return own, _copied(batch), function(own, _copied(batch))


def _outputs(out: Any, count: int) -> dict[str, Tensor]:
    found = dict(_leaves(out, "output"))
    for name, leaf in found.items():
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != count:
            raise ValueError(
                f"{name} is {_kind(leaf)}, of a batch of {count} rows; return tensors with one row for each example"
            )
    return found


def _taken(batch: Any, count: int, index: list[int]) -> Any:
    """A batch of these rows of a batch."""

    def has_rows(node: Any) -> bool:
        if isinstance(node, (list, tuple)):
            return len(node) == count and not hasattr(node, "_fields") and not _structure(node, count)
        return isinstance(node, Tensor)

    def rows(node: Any) -> Any:
        if isinstance(node, (list, tuple)):
            return type(node)([node[i] for i in index])
        if not getattr(node, "shape", ()):
            return node
        if len(node) != count:
            raise ValueError(
                f"the batch has {count} rows, and in it is {_kind(node)}: its rows cannot be taken; give tensors "
                "with one row for each example"
            )
        return node[index]

    return _map(rows, batch, has_rows)


def _gap(expected: Tensor, found: Tensor, tolerance: float) -> Tensor:
    """Where two tensors are apart by more than a part of the largest number; integers, at all."""
    if not expected.is_floating_point():
        return expected != found
    expected, found = expected.double(), found.double()
    finite = expected[expected.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    alike = (expected == found) | ((expected != expected) & (found != found))
    return ~(alike | ((expected - found).abs() <= tolerance * largest))


def _rows_apart(name: str, expected: Tensor, found: Any, index: list[int], tolerance: float) -> str | None:
    if not isinstance(found, Tensor) or expected.shape != found.shape:
        return f"{name}: {_kind(expected)}, then {_kind(found)}"
    gap = _gap(expected, found, tolerance)
    if not gap.any():
        return None
    rows = gap.flatten(1).any(1) if gap.dim() > 1 else gap
    which = sorted({index[i] for i in rows.nonzero().flatten().tolist()})
    by = float((expected.double() - found.double()).abs()[gap].max())
    return f"{name}: row {_listed([str(i) for i in which])} changed by {by:.3g} at most"


class _WithoutDropout(TorchFunctionMode):
    """torch's dropout lets everything through, whichever layer asks for it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        if function is F.multi_head_attention_forward:
            kwargs["training"] = False
        return function(*args, **kwargs)


_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
}


def _streams(state: TrainState) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """The global random streams, as functions that get and set where each stands."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "Python's random": (random.getstate, random.setstate)
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy.random"] = numpy.random.get_state, numpy.random.set_state
    for device in {torch.device("cpu"), *(tensor.device for tensor in state.params.values())}:
        for generator in _generators(device):
            found[f"torch's random stream on {generator.device}"] = generator.get_state, generator.set_state
    return found


def _places(state: TrainState) -> dict[str, dict[str, Any]]:
    return {name: _recorded(get()) for name, (get, _) in _streams(state).items()}


@contextmanager
def _streams_kept(state: TrainState) -> Iterator[None]:
    """A test that uses a check draws what it would have drawn without it."""
    kept = [(put, get()) for get, put in _streams(state).values()]
    try:
        yield
    finally:
        for put, place in kept:
            put(place)


def _seed_otherwise() -> None:
    """All global streams at places where no run begins, which differ from call to call."""
    global _seeds
    _seeds += 1
    torch.manual_seed(_seeds)
    random.seed(_seeds)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(_seeds)


_seeds = 20_000_000


class _Surroundings:
    """What a step can reach besides its arguments: modules, and what closures and attributes remember."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.fixed, self.memory = self._look()

    def spoiled(self) -> list[str]:
        """What has changed of that which no step may change: parameters, buffers, gradients and modes of modules."""
        return _differences(self.fixed, self._look()[0])

    def hint(self) -> str:
        """What else has changed since, as a sentence about where the memory may be."""
        now = self._look()[1]
        changed = [name for name, value in now.items() if not _same(value, self.memory.get(name))]
        return f" Besides the state, {_listed(changed)} changed in these calls." if changed else ""

    def _look(self) -> tuple[dict[str, Any], dict[str, Any]]:
        fixed: dict[str, Any] = {}
        memory: dict[str, Any] = {}
        for thing, variables in _reached(self.step):
            for name, value in variables.items():
                memory |= _remembered(name, value)
            if not isinstance(thing, nn.Module):
                continue
            for prefix, module in named_modules(thing):
                place = f"{type(thing).__name__}.{prefix}".rstrip(".")
                fixed[f"{place}.training"] = module.training
                for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                    if tensor is not None and not nn.parameter.is_lazy(tensor):
                        fixed[f"{place}.{name}"] = _copied_leaf(tensor)
                        fixed[f"{place}.{name}.requires_grad"] = tensor.requires_grad
                        fixed[f"{place}.{name}.grad"] = _copied_leaf(tensor.grad) if tensor.is_leaf else None
                for name, value in vars(module).items():
                    if not name.startswith("_") and name != "training":
                        memory |= _remembered(f"{place}.{name}", value)
        return fixed, memory


def _remembered(name: str, value: Any) -> dict[str, Any]:
    """A number, a text or a tensor, or those in a container."""
    members = {name: value}
    if isinstance(value, Mapping):
        members = {f"{name}[{key!r}]": member for key, member in value.items()}
    elif isinstance(value, (list, tuple)):
        members = {f"{name}[{i}]": member for i, member in enumerate(value)}
    plain = (bool, int, float, str, Tensor, type(None))
    return {place: _copied_leaf(leaf) for place, leaf in members.items() if isinstance(leaf, plain)}


def _reached(step: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each module that a function leads to, and each function and object on the way, with its variables by name."""
    waiting, seen = [step], set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            yield thing, {}
        elif isinstance(thing, types.FunctionType):
            code, cells = thing.__code__, thing.__closure__ or ()
            own = {
                name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True) if _full(cell)
            }
            shared = {name: thing.__globals__[name] for name in code.co_names if name in thing.__globals__}
            waiting += [*own.values(), *vars(thing).values(), *(thing.__defaults__ or ())]
            waiting += [value for value in shared.values() if isinstance(value, (nn.Module, types.FunctionType))]
            if not thing.__module__.startswith("looplib."):  # whose closures remember nothing of a run
                yield thing, {f"{thing.__name__}'s {name}": value for name, value in {**shared, **own}.items()}
        elif isinstance(thing, types.MethodType):
            waiting += [thing.__self__, thing.__func__]
        elif isinstance(thing, functools.partial):
            waiting += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, Host):
            waiting.append(thing.model)
        elif isinstance(thing, (list, tuple)):
            waiting += [member for member in thing if callable(member)]
        elif isinstance(thing, Mapping):
            waiting += [member for member in thing.values() if callable(member)]
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, (type, TrainState)):
            waiting += [getattr(thing, field.name) for field in dataclasses.fields(thing)]
        elif callable(thing) and hasattr(thing, "__dict__") and not isinstance(thing, type):
            waiting += vars(thing).values()
            yield thing, {f"{type(thing).__name__}.{name}": value for name, value in vars(thing).items()}


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a name that has no value yet
        return False
