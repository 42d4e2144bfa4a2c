"""A batch that does not fit gives what it gives where it fits."""

import gc
import os
import resource
import subprocess
import sys
import textwrap
import warnings
import weakref
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import Opaque
from torch import nn

import looplib as ll
from looplib.evaluation import split_on_oom


@pytest.fixture(autouse=True)
def frozen():
    """Exclude objects created by importing torch from each garbage collection."""
    gc.freeze()
    yield
    gc.unfreeze()


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
    matrix = ll.metrics.ConfusionMatrix.of(out, labels, classes=2)
    return {
        "scalar": out.square().mean(),
        "number": float(out.sum(1).mean()),
        "weighted": ll.Mean((out[:, 0] * labels).sum(), labels.sum()),
        "auc": ll.metrics.AUC.of(out[:, 1], labels),
        "r2": ll.metrics.R2.of(out[:, 1], x[:, 0]),
        "matrix": matrix,
        "macro_f1": ll.metrics.Reading(matrix, ll.metrics.ConfusionMatrix.macro_f1),
    }


def predict_fn(model, batch):
    out = model(batch["x"])
    return Out(out, {"class": out.argmax(1), "sure": [out.abs().amax(1) > 0.5, out.bfloat16()[:, None]]})


def quiet(step, *args):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "out of memory on a batch")
        return step(*args)


@given(
    room=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    size=st.none() | st.integers(1, 30),
)
@settings(max_examples=20, deadline=None)
def test_metrics_and_outputs_are_those_of_a_batch_that_fits(room, sizes, size, tmp_path_factory):
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
    folder = tmp_path_factory.mktemp("predictions")
    written = ll.evaluation.read_predictions(
        quiet(ll.predict_to, folder, predict_step, ll.init_state(tight), batches)
    )
    assert torch.equal(written["about/class"], torch.cat([out.about["class"] for out in outputs]))


def test_what_fits_is_remembered_and_nothing_is_done_twice():
    tight, _ = models(4)
    step = split_on_oom(ll.make_predict_step(tight, lambda model, x: model(x)))
    state = ll.init_state(tight)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        outs = [step(state, rows(n)) for n in (14, 14, 3)]
    assert [len(out) for out in outs] == [14, 14, 3]
    assert tight.calls == [14, 7, 4, 3, 4, 3, 4, 4, 4, 2, 3]
    assert [str(w.message) for w in warned] == [
        "out of memory on a batch of 14: from now on in microbatches of 7",
        "out of memory on a batch of 7: from now on in microbatches of 4",
    ]


def test_what_is_collected_keeps_the_order_of_the_batch():
    tight, _ = models(3)
    step = split_on_oom(
        ll.make_eval_step(tight, lambda model, x: {"auc": ll.metrics.AUC.of(model(x)[:, 0] * 0 + x[:, 0], x[:, 1])})
    )
    record = quiet(step, ll.init_state(tight), rows(10))["auc"]
    assert torch.equal(torch.cat([scores for scores, *_ in record.columns]), rows(10)[:, 0])


def test_the_size_of_the_training_is_its_own():
    tight, _ = models(4)
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    train_step = ll.make_train_step(
        ll.grads.retry_on_oom(ll.make_grad_fn(tight, lambda model, x: model(x).square().mean())), optimizer
    )
    eval_step = split_on_oom(ll.make_eval_step(tight, lambda model, x: {"mean": model(x).mean()}))
    state = ll.init_state(tight, optimizer)
    quiet(eval_step, state, rows(32))
    tight.room, tight.calls = 16, []
    state, metrics = quiet(train_step, state, rows(16))
    assert ll.compute(metrics)["microbatch_size"] == 16
    eval_step(state, rows(8))
    assert tight.calls == [16, 4, 4]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate"),
        (MemoryError, "no room"),
        (RuntimeError, "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_one_example_that_does_not_fit_raises_the_original_with_a_note(error, message):
    tight, _ = models(0, error=error, message=message)
    with pytest.raises(error) as raised:
        quiet(split_on_oom(ll.make_eval_step(tight, metric_fn)), ll.init_state(tight), {"x": rows(5), "y": rows(5)})
    assert str(raised.value) == message
    assert raised.value.__notes__ == ["split_on_oom: this is one sample alone, which cannot be cut"]
    assert tight.calls == [5, 3, 2, 1]


def test_other_errors_pass_at_once():
    tight, _ = models(0, error=RuntimeError, message="something else")
    with pytest.raises(RuntimeError, match="something else") as raised:
        split_on_oom(ll.make_predict_step(tight, lambda model, x: model(x)))(ll.init_state(tight), rows(5))
    assert tight.calls == [5]
    assert not any("split_on_oom" in note for note in getattr(raised.value, "__notes__", ()))


def test_what_cannot_be_cut_or_put_together_is_refused():
    tight, _ = models(2)
    state = ll.init_state(tight)

    def run(predict_fn, batch):
        return quiet(split_on_oom(ll.make_predict_step(tight, predict_fn)), state, batch)

    with pytest.raises(ValueError, match=r"a Opaque of 4 samples cannot be cut: its parts would have 4, 4"):
        run(lambda model, batch: model(batch.x), Opaque(rows(4)))
    with pytest.raises(ValueError, match=r"batch\['other'\] has shape \(3,\), and the batch 4 samples"):
        run(lambda model, batch: model(batch["x"]), {"x": rows(4), "other": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"the output's 'sum' has shape \(3,\) for 2 samples.*one row"):
        run(lambda model, x: {"out": model(x), "sum": model(x).sum(0)[:1].expand(3)}, rows(4))
    with pytest.raises(TypeError, match=r"the output's 'name' is a str; parts of a batch need tensors"):
        run(lambda model, x: {"out": model(x), "name": "a"}, rows(4))
    with pytest.raises(ValueError, match="differ in their structure"):
        run(lambda model, x: [model(x)] * int(x.sum() > rows(4).sum() / 2) + [model(x)], rows(4))
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match="give a whole number of samples, at least 1"):
            split_on_oom(ll.make_predict_step(tight, predict_fn), wrong)
    with pytest.raises(TypeError, match="split_on_oom got a Refusing; give a step"):
        split_on_oom(tight)


LIMITED = """
    import resource, warnings
    import torch
    import looplib as ll
    from looplib.evaluation import split_on_oom

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 2))
    step = split_on_oom(ll.make_eval_step(model, lambda model, x: {"mean": model(x).mean(), "n": ll.Mean(len(x))}))
    predict_step = split_on_oom(ll.make_predict_step(model, lambda model, x: model(x)))
    state = ll.init_state(model)
    small = torch.randn(64, 64)
    ll.evaluate(step, state, [small])
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    x = torch.randn(40_000, 64)  # 10 MB, and 660 MB of activations
    resource.setrlimit(resource.RLIMIT_AS, (now + 300 * 2**20, -1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = torch.cat(list(ll.predict(predict_step, state, [x])))
        found = ll.evaluate(step, state, [x])
    assert abs(found["mean"] - out.double().mean().item()) < 1e-6, found
    assert torch.allclose(out[-64:], model(x[-64:]), atol=1e-6)
    print(len(caught), len(out))
"""


@pytest.mark.slow
def test_with_a_real_allocator_that_refuses():
    assert resource.getrlimit(resource.RLIMIT_AS)  # what the process below is limited by
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    warned, count = map(int, done.stdout.split())
    assert warned >= 2
    assert count == 40_000
