"""Checks for unit tests: a step or a model goes in, an error that says what is wrong comes out.

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

from looplib.testing._compilation import assert_compiles
from looplib.testing._gradients import assert_all_gradients
from looplib.testing._microbatches import assert_pieces_equal_whole, assert_reduces_alike
from looplib.testing._overfitting import assert_overfits
from looplib.testing._purity import assert_pure
from looplib.testing._ranks import assert_ranks_train_alike
from looplib.testing._resume import assert_resumes
from looplib.testing._samples import assert_causal, assert_rows_independent

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
