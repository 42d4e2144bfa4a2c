"""A batch that does not fit gives what it gives where it fits."""

import warnings
import weakref
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import Opaque, examples
from torch import nn

import looplib as ll
from looplib.evaluation import split_on_oom


class Refusing(nn.Module):
    """Runs out of memory half-way for more than a number of rows."""

    def __init__(self, room, error=torch.OutOfMemoryError, message="CUDA out of memory. Tried to allocate 2.00 GiB"):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.room, self.error, self.message, self.calls, self.held = room, error, message, [], []

    def forward(self, x):
        self.calls.append(len(x))
        assert not any(held() is not None for held in self.held)  # an attempt that failed holds no memory in the next
        out = self.norm(self.first(x))
        if len(x) > self.room:
            self.held.append(weakref.ref(out))
            raise self.error(self.message)
        return self.last(out).double()


def models(room, **other):
    torch.manual_seed(0)
    tight, wide = Refusing(room, **other).double(), Refusing(10**6).double()
    wide.load_state_dict(tight.state_dict())
    return tight, wide


def rows(n):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.double)


class Out(NamedTuple):
    logits: torch.Tensor
    about: dict


def metric_fn(model, batch):
    x, labels = batch["x"], batch["y"]
    out = model(x)
    return {
        "scalar": out.square().mean(),
        "number": float(out.sum(1).mean()),
        "weighted": ll.Mean((out[:, 0] * labels).sum(), labels.sum()),
        "auc": ll.metrics.AUC.of(out[:, 1], labels),
        "matrix": ll.metrics.ConfusionMatrix.of(out, labels, classes=2),
    }


def predict_fn(model, batch):
    out = model(batch["x"])
    return Out(out, {"class": out.argmax(1), "sure": [out.abs().amax(1) > 0.5, out.bfloat16()[:, None]]})


def quiet(step, *args):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "out of memory on a batch")
        return step(*args)


@pytest.mark.slow
@given(
    room=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    size=st.none() | st.integers(1, 30),
)
@settings(max_examples=examples(20), deadline=None)
def test_metrics_and_outputs_are_those_of_a_batch_that_fits(room, sizes, size):
    tight, wide = models(room)
    batches = [{"x": rows(n), "y": (rows(n)[:, 0] > 0).long(), "scale": torch.tensor(2.0)} for n in sizes]
    state = ll.init_state(wide)
    step = split_on_oom(ll.make_eval_step(tight, metric_fn), size)
    found = quiet(ll.evaluate, step, ll.init_state(tight), batches, "eval/")
    expected = ll.evaluate(ll.make_eval_step(wide, metric_fn), state, batches, "eval/")
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)  # float64, in another order
    assert found["eval/matrix"] == expected["eval/matrix"]

    predict_step = split_on_oom(ll.make_predict_step(tight, predict_fn), size)
    whole = ll.make_predict_step(wide, predict_fn)
    outputs = quiet(lambda: list(ll.predict(predict_step, ll.init_state(tight), batches)))
    for batch, out in zip(batches, outputs, strict=True):
        torch.testing.assert_close(out, whole(state, batch))


def test_the_size_that_fits_is_remembered_and_outputs_keep_the_order_of_the_batch():
    tight, _ = models(4)
    step = split_on_oom(ll.make_predict_step(tight, lambda model, x: (model(x), x)))
    state = ll.init_state(tight)
    with pytest.warns(UserWarning, match="out of memory on a batch of 14: from now on in microbatches of") as warned:
        outs = [step(state, rows(n)) for n in (14, 14, 3)]
    assert [torch.equal(x, rows(n)) for (_, x), n in zip(outs, (14, 14, 3), strict=True)] == [True] * 3
    assert tight.calls == [14, 7, 4, 4, 4, 2, 4, 4, 4, 2, 3]
    assert len(warned) == 2


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate"),
        (MemoryError, "no room"),
        (RuntimeError, "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    ],
)
@pytest.mark.every_case
def test_one_example_that_does_not_fit_raises_the_original_with_a_note(error, message):
    tight, _ = models(0, error=error, message=message)
    with pytest.raises(error) as raised:
        quiet(split_on_oom(ll.make_eval_step(tight, metric_fn)), ll.init_state(tight), {"x": rows(5), "y": rows(5)})
    assert str(raised.value) == message
    batch, alone = raised.value.__notes__
    assert batch.startswith("The batch was a dict {x: float64 (1, 3)")
    assert alone == "split_on_oom: this is one sample alone, which cannot be cut"
    assert tight.calls == [5, 3, 2, 1]


def test_other_errors_pass_at_once():
    tight, _ = models(0, error=RuntimeError, message="something else")
    with pytest.raises(RuntimeError, match="something else"):
        split_on_oom(ll.make_predict_step(tight, lambda model, x: model(x)))(ll.init_state(tight), rows(5))
    assert tight.calls == [5]


X = rows(4)


@pytest.mark.parametrize(
    ("predict_fn", "batch", "error", "words"),
    [
        (lambda model, batch: model(batch.x), Opaque(X), TypeError, "cannot count the samples in a Opaque"),
        (lambda model, batch: model(batch["x"]), {"x": X, "other": torch.zeros(3)}, ValueError, r"batch\['other'\]"),
        (lambda model, x: {"out": model(x), "sum": torch.zeros(3)}, X, ValueError, "'sum' has 3 rows for 2 samples"),
        (lambda model, x: {"out": model(x), "name": "a"}, X, TypeError, "'name' is a str"),
        (lambda model, x: model(x)[:, : 1 + int(x[0, 0] == X[0, 0])], X, ValueError, r"'output' has shapes \(2, 2\)"),
        (
            lambda model, x: model(x) if x[0, 0] == X[0, 0] else ["a", "b"],
            X,
            TypeError,
            "'output' is a Tensor and a list",
        ),
        (lambda model, x: [model(x)] * (1 + int(x[0, 0] == X[0, 0])), X, ValueError, "differ in their structure"),
    ],
)
@pytest.mark.every_case
def test_what_cannot_be_cut_or_put_together_is_refused(predict_fn, batch, error, words):
    tight, _ = models(2)
    with pytest.raises(error, match=words):
        quiet(split_on_oom(ll.make_predict_step(tight, predict_fn)), ll.init_state(tight), batch)


def test_wrong_arguments_are_refused():
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match="size is"):
            split_on_oom(lambda state, batch: batch, wrong)
    with pytest.raises(TypeError, match="count_samples is an int"):
        split_on_oom(lambda state, batch: batch, count_samples=3)
