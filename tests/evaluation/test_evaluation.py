"""Evaluation and prediction: what is merged, in which order, what is written, and that training does not notice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import adamw
from shared import both_steps, examples, mean_square
from torch import nn

import looplib as ll
from looplib.evaluation import evaluate_records


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = adamw(0.1)
    return model, optimizer, ll.init_state(model, optimizer)


def metric_fn(model, x):
    out = model(x)
    return {"mean": ll.Mean(out.double().sum(), out.numel()), "mse": out.square().mean()}


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=80))
@settings(max_examples=examples(25), deadline=None)
def test_any_split_gives_the_whole(sizes):
    model, _, state = parts()
    x = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(1))
    eval_step = ll.make_eval_step(model, metric_fn)
    whole, split = (ll.evaluate(eval_step, state, batches) for batches in ([x], x.split(sizes)))
    assert split["mean"] == pytest.approx(whole["mean"], rel=1e-5, abs=1e-7)  # the matmuls are in float32
    assert split["mse"] == pytest.approx(whole["mse"], rel=1e-5)


def test_several_sets():
    model, _, state = parts()
    eval_step = ll.make_eval_step(model, metric_fn)
    sets = {"a": [torch.ones(2, 3)], "b": [torch.zeros(5, 3), torch.ones(2, 3)]}
    found = ll.evaluate(eval_step, state, sets, prefix="eval/", max_batches=1)
    assert list(found) == ["eval/a/mean", "eval/a/mse", "eval/b/mean", "eval/b/mse"]
    assert found["eval/b/mean"] == ll.evaluate(eval_step, state, sets["b"][:1])["mean"]
    count = ll.make_eval_step(model, lambda model, x: {"count": ll.Mean(len(x))})
    assert list(ll.evaluate({"a": eval_step, "b": count}, state, sets)) == ["a/mean", "a/mse", "b/count"]


def test_the_first_batches_rates_and_a_bar_that_goes_away(capfd):
    model, _, state = parts()
    eval_step = ll.make_eval_step(model, lambda model, x: {"count": ll.Mean(len(x))})
    batches = torch.zeros(9, 3).split(2)
    assert ll.evaluate(eval_step, state, batches, max_batches=2)["count"] == 2
    found = ll.evaluate(eval_step, state, batches, "e/", rates=True, progress=True)
    assert list(found) == ["e/count", "e/samples_per_second", "e/steps_per_second", "e/seconds"]
    assert found["e/samples_per_second"] * found["e/seconds"] == pytest.approx(9)
    assert found["e/steps_per_second"] * found["e/seconds"] == pytest.approx(5)
    shown = capfd.readouterr().err
    assert "e:" in shown
    assert shown.endswith("\r")  # the bar's line is blank again
    for progress in (True, False):
        assert evaluate_records(eval_step, state, batches, progress=progress)["count"].total == 9
        assert ("evaluation:" in capfd.readouterr().err) is progress


@both_steps
def test_evaluations_at_every_step_leave_the_bits_of_training(donate):
    def run(evaluated):
        model, optimizer, state = parts()
        step = ll.make_train_step(ll.make_grad_fn(model, mean_square), optimizer, donate=donate)

        def noisy(model, x):  # a metric that draws, writes into a buffer, and changes the mode
            torch.rand(3)
            model.train()
            model[1].running_mean.add_(1)
            return metric_fn(model, x)

        for batch in torch.randn(12, 3).split(4):
            state, _ = step(state, batch)
            if evaluated:
                ll.evaluate(ll.make_eval_step(model, noisy), state, torch.randn(6, 3).split(2))
                list(ll.predict(ll.make_predict_step(model, noisy), state, torch.zeros(4, 3).split(2)))
        return state

    one, other = run(False), run(True)
    for tree in ("params", "buffers"):
        for name, tensor in getattr(one, tree).items():
            assert torch.equal(tensor, getattr(other, tree)[name]), name


def test_measure_gives_the_records_that_evaluate_computes():
    model, _, state = parts()
    eval_step, batches = ll.make_eval_step(model, metric_fn), torch.randn(20, 3).split(3)
    found = evaluate_records(eval_step, state, batches, max_batches=4)
    assert found["mean"].weight == 24
    assert ll.compute(found) == ll.evaluate(eval_step, state, batches, max_batches=4)


ROWS = [torch.zeros(2, 3)]
REFUSED = [
    (lambda step, state: ll.evaluate(step, state, {"x": ROWS[0]}), ValueError, "x"),
    (lambda step, state: ll.evaluate(step, state, ROWS, max_batches=0), ValueError, "max_batches is 0"),
    (lambda step, state: ll.evaluate({"a": step}, state, {"a": ROWS, "b": ROWS}), ValueError, "sets b"),
    (lambda step, state: ll.evaluate({"a": step}, state, ROWS), ValueError, "eval_step has a"),
    (lambda step, state: evaluate_records(step, state, {"a": ROWS, "b": ROWS}), ValueError, "a, b"),
    (lambda step, state: evaluate_records(step, state, []), ValueError, "no batches"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
@pytest.mark.every_case
def test_wrong_arguments_are_named(call, error, words, tmp_path, monkeypatch):
    model, _, state = parts()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        call(ll.make_eval_step(model, metric_fn), state)
    assert not list(tmp_path.iterdir())


class Stream(torch.utils.data.IterableDataset):
    """Rows one by one, of a number that nothing tells, divided among workers."""

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(self.x[worker.id :: worker.num_workers] if worker else self.x)


def test_a_stream_without_a_length_is_evaluated_and_predicted_as_a_list_is(capfd):
    model, _, state = parts()
    x = torch.randn(11, 3)
    stream = torch.utils.data.DataLoader(Stream(x), batch_size=4)
    eval_step = ll.make_eval_step(model, metric_fn)
    for options in ({}, {"max_batches": 2}, {"progress": True}):
        assert ll.evaluate(eval_step, state, stream, **options) == ll.evaluate(
            eval_step, state, x.split(4), **options
        )
    assert "evaluation: 0it" in capfd.readouterr().err  # counted, with no end in sight
    predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    expected = torch.cat([predict_step(state, batch) for batch in x.split(4)])
    assert torch.equal(torch.cat(list(ll.predict(predict_step, state, stream, start=1))), expected[4:])
    for one in stream, ll.make_loader(Stream(x), batch_size=4):
        assert list(ll.predict(predict_step, state, one, start=9)) == []


def test_a_state_before_its_step_is_refused_by_the_order_to_write(tmp_path):
    model, _, state = parts()
    steps = {ll.evaluate: ll.make_eval_step(model, metric_fn), evaluate_records: ll.make_eval_step(model, metric_fn)}
    steps |= dict.fromkeys(
        (ll.predict, ll.evaluation.predict_to), ll.make_predict_step(model, lambda model, x: model(x))
    )
    for function, step in steps.items():
        before = [tmp_path / "out"] if function is ll.evaluation.predict_to else []
        with pytest.raises(
            TypeError, match=rf"found a TrainState and then .* write {function.__name__}\(.*step, state"
        ):
            function(*before, state, step, [torch.ones(2, 3)])
