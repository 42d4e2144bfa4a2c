"""TensorBoard's own reader finds what was logged."""

import io
import math
import os
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from shared import STATE, at, file_size_limit

from looplib.log import tensorboard


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.csv"


def events_of(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0}).Reload()


def test_tensorboard_reads_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    board = tensorboard(tmp_path / "run", hyperparameters={"lr": 0.5, "layers": 3, "name": "mlp", "fused": True})
    vector = torch.randn(1000).bfloat16()
    picture = torch.rand(3, 5, 7)
    for step in range(10):
        board(at(step), {"train/loss": torch.tensor(step / 4), "best": step == 3, "nan": math.nan})
    board(at(10), {"vector": vector, "picture": picture, "bytes": np.full((1, 4, 4), 200, np.uint8), "note": "warm"})
    board(at(11), {"vector": torch.tensor([math.nan, 1.0, math.inf]), "none": torch.tensor([math.nan])})
    events = events_of(tmp_path / "run")
    assert set(events.Tags()["scalars"]) == {"train/loss", "best", "nan"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(n, n / 4) for n in range(10)]
    assert [event.value for event in events.Scalars("best")] == [float(n == 3) for n in range(10)]
    assert math.isnan(events.Scalars("nan")[0].value)
    first, second = events.Histograms("vector")
    assert (first.step, first.histogram_value.num, second.histogram_value.num) == (10, 1000, 1)
    assert first.histogram_value.sum == pytest.approx(vector.double().sum().item(), rel=1e-3)
    assert (first.histogram_value.min, first.histogram_value.max) == (vector.min().item(), vector.max().item())
    assert sum(first.histogram_value.bucket) == 1000
    assert events.Tags()["histograms"] == ["vector"]
    (image,) = events.Images("picture")
    np.testing.assert_array_equal(pixels(image.encoded_image_string), (picture * 255).byte().permute(1, 2, 0))
    (image,) = events.Images("bytes")
    assert set(pixels(image.encoded_image_string).flat) == {200}
    (text,) = events.Tensors("note/text_summary")
    assert text.tensor_proto.string_val[0] == b"warm"

    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["lr"].number_value == 0.5
    assert hparams["layers"].number_value == 3
    assert hparams["name"].string_value == "mlp"
    assert set(hparams) == {"lr", "layers", "name", "fused"}


def pixels(encoded):
    return np.asarray(Image.open(io.BytesIO(encoded)))


def test_tensorboard_leaves_out_what_a_resumed_run_logs_again(tmp_path):
    pytest.importorskip("tensorboard")
    first = tensorboard(tmp_path)
    for step in range(1, 9):
        first(at(step), {"loss": float(step)})
    time.sleep(1.1)  # files of one directory are read in the order of the second in their names
    second = tensorboard(tmp_path)
    for step in range(5, 7):
        second(at(step), {"loss": -float(step)})
    got = [(event.step, event.value) for event in events_of(tmp_path).Scalars("loss")]
    assert got == [(1, 1), (2, 2), (3, 3), (4, 4), (5, -5), (6, -6)]


def test_tensorboard_reads_on_after_a_full_disk(tmp_path):
    pytest.importorskip("tensorboard")
    log = tensorboard(tmp_path)
    log(at(1), {"x": 1.0})
    with file_size_limit(400), pytest.raises(OSError, match="File too large"):
        log(at(2), {"x": "x" * 1000})
    log(at(3), {"x": 3.0})
    assert [(event.step, event.value) for event in events_of(tmp_path).Scalars("x")] == [(1, 1), (3, 3)]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 3), (1, 1, 1, 1)])
def test_tensorboard_refuses_other_shapes_by_name(tmp_path, shape):
    pytest.importorskip("tensorboard")
    with pytest.raises(TypeError, match=r"'w' is a Tensor of shape .* give .flatten\(\)"):
        tensorboard(tmp_path)(STATE, {"w": torch.zeros(shape)})
    assert os.listdir(tmp_path) == []


def test_a_missing_package_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="needs its package: pip install tensorboard pillow"):
        tensorboard("x")
