import pytest
from train import Run, make_run

from looplib import testing


@pytest.fixture
def run() -> Run:
    return make_run(epochs=30, width=8)


@pytest.fixture
def run_without_dropout() -> Run:  # of which each microbatch draws its own
    return make_run(epochs=30, width=8, dropout=0.0)


def test_the_step_is_pure(run: Run) -> None:
    testing.assert_pure(run.train_step, run.state, run.batch)


def test_a_stopped_run_continues_to_the_same_bits(run: Run) -> None:
    testing.assert_resumes(run.train_step, run.state, run.loader)


def test_samples_do_not_see_each_other(run: Run) -> None:
    testing.assert_samples_independent(run.predict_step, run.state, run.batch)


def test_one_batch_is_learned_by_heart(run: Run) -> None:
    testing.assert_overfits(run.train_step, run.state, run.batch)


def test_microbatches_give_the_gradient_of_the_whole(run_without_dropout: Run) -> None:
    run = run_without_dropout
    testing.assert_microbatches_equal_batch(run.grad_fn, run.state, run.batch)


def test_every_parameter_is_trained(run: Run) -> None:
    testing.assert_all_gradients(run.grad_fn, run.state, run.batch)


def test_the_step_compiles(run_without_dropout: Run) -> None:
    run = run_without_dropout
    testing.assert_compiles(run.train_step, run.state, run.batch)
