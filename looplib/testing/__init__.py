"""Checks for unit tests: a step or a model goes in and an error that explains the fault comes out.

A check takes the functions that your training script uses, a state and a batch. If it fails, it raises an
AssertionError that says what was done, what was found, the usual cause, and what to do.

To unit-test a training step, put everything that your script trains with into one function, here `make_run`, with
settings that can be small. Pass what it returns to the checks, one line for each. Models can be tiny, since the tests
are about how the parts are put together. A complete `tests/test_your_step.py` next to such a `train.py`:

    import pytest
    from train import make_run  # returns a record of grad_fn, train_step, predict_step, loader, state, batch

    from looplib import testing

    @pytest.fixture
    def run():
        return make_run(epochs=30, width=8)

    @pytest.fixture
    def run_without_dropout():  # of which each microbatch draws its own
        return make_run(epochs=30, width=8, dropout=0.0)

    def test_the_step_is_pure(run):
        testing.assert_pure(run.train_step, run.state, run.batch)

    def test_a_stopped_run_continues_to_the_same_bits(run):
        testing.assert_resumes(run.train_step, run.state, run.loader)

    def test_samples_do_not_see_each_other(run):
        testing.assert_samples_independent(run.predict_step, run.state, run.batch)

    def test_one_batch_is_learned_by_heart(run):
        testing.assert_overfits(run.train_step, run.state, run.batch)

    def test_microbatches_give_the_gradient_of_the_whole(run_without_dropout):
        run = run_without_dropout
        testing.assert_microbatches_equal_batch(run.grad_fn, run.state, run.batch)

    def test_every_parameter_is_trained(run):
        testing.assert_all_gradients(run.grad_fn, run.state, run.batch)

    def test_the_step_compiles(run_without_dropout):
        run = run_without_dropout
        testing.assert_compiles(run.train_step, run.state, run.batch)

`recipes/testing_your_step` is such a project. Sequence models also have `assert_causal`, scripts for several ranks have
`assert_ranks_train_alike`, and wrappers of your own `assert_donated_equals_pure`. `assert_width_stable` is the coordinate
check of the maximal update parametrization (`ll.contrib.mup`).

Each check finds a bug that is common in practice: a loss averaged wrongly over microbatches, a frozen layer, labels
shuffled apart from their inputs, evaluation in training mode. Steps may donate, because checks work on copies: the
state and the batch that you pass can still be used, and the random streams are restored. (A module wrapped in DDP or
FSDP2 works only on its own tensors: pass the unwrapped module to the checks, and the script to
`assert_ranks_train_alike`.)
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.testing._compilation import assert_compiles
from looplib.testing._gradients import assert_all_gradients, assert_microbatches_equal_batch
from looplib.testing._overfitting import assert_overfits
from looplib.testing._purity import assert_donated_equals_pure, assert_pure
from looplib.testing._ranks import assert_ranks_train_alike
from looplib.testing._resume import assert_resumes
from looplib.testing._samples import assert_causal, assert_samples_independent
from looplib.testing._widths import assert_width_stable

__all__ = [
    "assert_all_gradients",
    "assert_causal",
    "assert_compiles",
    "assert_donated_equals_pure",
    "assert_microbatches_equal_batch",
    "assert_overfits",
    "assert_pure",
    "assert_ranks_train_alike",
    "assert_resumes",
    "assert_samples_independent",
    "assert_width_stable",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
