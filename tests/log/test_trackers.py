"""One logger for all trackers: each client's files are read back after a run that was stopped and resumed."""

import io
import json
import math
import os
import re
import sqlite3
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import orjson
import pytest
import torch
from PIL import Image
from ranks import launch
from shared import STATE, assert_each_refused, at, python

import looplib as ll
from looplib.log import tracker

# Of TensorBoard's writer on a full disk, whose thread may end after its test has.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

SCENARIO = """
import sys, types
from pathlib import Path
import torch
import looplib as ll

name, folder, part = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
model = torch.nn.Linear(2, 1)
model.load_state_dict({"weight": torch.tensor([[0.5, -0.25]]), "bias": torch.tensor([0.125])})
model.config = types.SimpleNamespace(hidden=2, kind="tiny")
options = {"settings": {"silent": True, "console": "off"}} if name == "wandb" else {}
board = ll.log.tracker(name, folder, config={"args": {"note": "x"}}, **options)
log = ll.tee(board, ll.jsonl(folder / "log.jsonl"))
optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1)
train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
loader = ll.make_loader(torch.arange(64.0).reshape(32, 2) / 64, batch_size=4)
ckpt = ll.checkpoint_io(folder / "checkpoints")
state = ckpt.restore(ll.init_state(model, optimizer, loader=loader))
for batch in loader(state):
    state, metrics = train_step(state, batch)
    log(state, {"train/loss": metrics["loss"].item(), "note": f"step {state.step}"})
    if state.step % 2 == 0 and name != "mlflow":  # which takes no histograms
        board(state, {"params/weight": state.params["weight"].flatten()})
    if state.step == 3 and part == "first":
        path = ckpt.save(state, {})
        if name != "tensorboard":
            board.artifact(path)
    if state.step == 5:
        if part == "first":
            sys.exit()
        board(state, {"picture": torch.ones(1, 4, 4) / 2})
print("ran to", state.step)
"""


def stopped_and_resumed(name, tmp_path):
    """Train for 5 steps, and again from the checkpoint of step 3 up to step 8."""
    environment = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_ERROR_REPORTING": "false",
    }
    for part in ("first", "second"):
        result = python(SCENARIO, name, tmp_path / "runs" / "digits", part, env=environment, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert result.stdout.count("ran to 8") == 1
    assert "UserWarning" not in result.stderr
    columns = ll.log.read_columns(tmp_path / "runs" / "digits" / "log.jsonl")
    assert columns["step"] == [*range(1, 9)]
    return dict(zip(columns["step"], columns["train/loss"], strict=True))


def id_of(name, tmp_path):
    return orjson.loads((tmp_path / "runs" / "digits" / f"{name}.json").read_bytes())["id"]


def events_of(folder):
    """TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0}).Reload()


def hparams_of(events):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    return HParamsPluginData.FromString(content).session_start_info.hparams


def pixels(encoded):
    return np.asarray(Image.open(io.BytesIO(encoded)))


def read_tensorboard(tmp_path):
    return [(event.step, event.value) for event in events_of(tmp_path / "runs/digits").Scalars("train/loss")]


def read_mlflow(tmp_path):
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        (run,) = base.execute("select run_uuid, name, status from runs").fetchall()
        history = base.execute("select step, value from metrics where key = 'train/loss'").fetchall()
    base.close()
    assert run == (id_of("mlflow", tmp_path), "digits", "FINISHED")
    assert [*tmp_path.glob(f"mlruns/*/{run[0]}/artifacts/checkpoint/step-00000003/manifest.json")]
    return history


def read_trackio(tmp_path):
    with sqlite3.connect(tmp_path / "trackio" / "runs.db") as base:
        rows = [(step, json.loads(values)) for step, values in base.execute("select step, metrics from metrics")]
    base.close()
    assert [*(tmp_path / "trackio" / "artifacts").glob("**/blobs/sha256/*/*")]
    return [(step, values["train/loss"]) for step, values in rows if "train/loss" in values]


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "trackio": read_trackio}


def test_each_tracker_is_tested_and_documented(tmp_path):
    with pytest.raises(ValueError, match="the trackers are") as refused:
        tracker("none", tmp_path)
    names = re.search("the trackers are ([^;]*);", str(refused.value))[1].split(", ")
    root = Path(__file__).parents[2]
    places = {
        "READERS in tests/log/test_trackers.py": str([*READERS, "wandb"]),
        "the docstring of ll.log.tracker": tracker.__doc__,
        **{
            name: (root / name).read_text()
            for name in ("pyproject.toml", "recipes/COOKBOOK_LOGS.md", "recipes/WORDS.md")
        },
    }
    missing = [(name, place) for name in names for place, text in places.items() if name.lower() not in text.lower()]
    assert not missing, f"name each tracker there: {missing}; see 'Add a feature' in CONTRIBUTING.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*READERS, "wandb"])
def test_a_resumed_run_continues_the_trackers_run_and_doubles_no_step(name, tmp_path):
    pytest.importorskip(name)
    losses = stopped_and_resumed(name, tmp_path)
    if name == "wandb":  # whose files nothing but the service reads; a test below looks at what it is told
        runs = [path.name for path in (tmp_path / "runs/digits/wandb").glob("offline-run-*/run-*.wandb")]
        assert runs == [f"run-{id_of('wandb', tmp_path)}.wandb"] * 2
        return
    history = READERS[name](tmp_path)
    assert len(history) == 8
    assert dict(history) == pytest.approx(losses, rel=1e-6)  # TensorBoard has 32 bits


@pytest.fixture
def board(tmp_path):
    pytest.importorskip("tensorboard")
    return tracker("tensorboard", tmp_path / "run", config={"args": {"width": 8}})


def test_tensorboard_reads_each_kind_of_value(board, tmp_path):
    vector, picture = torch.randn(1000).bfloat16(), torch.rand(3, 5, 7)
    for step in range(3):
        board(at(step), {"train/loss": torch.tensor(step / 4), "best": step == 1, "nan": math.nan})
    board(at(10), {"vector": vector, "picture": picture, "bytes": np.full((1, 4, 4), 200, np.uint8), "note": "warm"})
    board(at(11), {"vector": torch.tensor([math.nan, 1.0, math.inf]), "none": torch.tensor([math.nan])})
    events = events_of(tmp_path / "run")  # written, though the logger is open
    assert hparams_of(events)["args/width"].number_value == 8
    scalars = {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert math.isnan(scalars.pop("nan")[0][1])
    assert scalars == {"train/loss": [(0, 0.0), (1, 0.25), (2, 0.5)], "best": [(0, 0.0), (1, 1.0), (2, 0.0)]}
    assert events.Tags()["histograms"] == ["vector"]
    first, second = (each.histogram_value for each in events.Histograms("vector"))
    assert (first.num, first.min, first.max, second.num) == (1000, vector.min().item(), vector.max().item(), 1)
    assert first.sum == pytest.approx(vector.double().sum().item())
    for name, expected in (("picture", (picture * 255).byte().permute(1, 2, 0)), ("bytes", np.full((4, 4, 3), 200))):
        (image,) = events.Images(name)
        np.testing.assert_array_equal(pixels(image.encoded_image_string), expected)
    (text,) = events.Tensors("note/text_summary")
    assert text.tensor_proto.string_val[0] == b"warm"
    for shape in ((2, 3), (2, 3, 3), (1, 1, 1, 1)):
        with pytest.raises(TypeError, match=r"'w' is a Tensor of shape .*\.flatten\(\)"):
            board(STATE, {"w": torch.zeros(shape)})


# What the clients tell their libraries, which only remember.


def told(name, monkeypatch, folder, library):
    """Two runs in a folder, with a value of each kind and an artifact: for each, name -> (args, kwargs) of its calls."""
    monkeypatch.setitem(sys.modules, name, library)
    values = {"x": 0.5, "on": True, "note": "warm", "image": torch.ones(3, 2, 2) / 2}
    values |= {} if name == "mlflow" else {"vector": torch.tensor([1.0, math.nan, 3.0])}
    runs = []
    for step in (1, 2):
        library.reset_mock()
        log = tracker(name, folder, config={"args": {"a(b)": 0.1}})
        log(at(step), values)
        log.artifact(folder)
        log.close()
        runs.append({})
        for call, args, kwargs in library.mock_calls:
            runs[-1].setdefault(call.rpartition(".")[2], []).append((args, kwargs))
    return runs


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_client_starts_or_continues_its_run_and_hands_on_each_value(name, monkeypatch, tmp_path):
    folder, library = tmp_path / "runs" / "digits", mock.MagicMock()
    library.init.return_value.id = "an-id"
    first, second = told(name, monkeypatch, folder, library)
    ((_, begun),), ((_, resumed),) = first["init"], second["init"]
    values, ((row,), named) = {"x": 0.5, "on": True, "note": "warm"}, first["log"][0]
    media = {"vector": library.Histogram.return_value, "image": library.Image.return_value}
    if name == "wandb":
        assert begun.items() >= {"dir": str(folder), "name": "digits", "mode": "offline"}.items()
        assert (len(begun["id"]), resumed["id"]) == (8, "an-id")
        assert first["define_metric"] == [(("*",), {"step_metric": "step"})]
        assert first["Artifact"] == [(("checkpoint-an-id",), {"type": "checkpoint"})]
        assert first["add_dir"] == [((str(folder),), {})]
        assert row == values | media | {"step": 1}
    else:
        assert re.fullmatch(r"digits-\w{8}", begun["name"])
        assert begun.items() >= {"project": "runs", "resume": "never"}.items()
        assert resumed.items() >= {"name": begun["name"], "resume": "must"}.items()
        assert first["log_artifact"][0][1]["name"] == f"checkpoint-{begun['name']}"
        assert (row, named) == (values | media, {"step": 1})
    assert first["update"][0][0][0]["args"] == {"a(b)": 0.1}
    assert first["Histogram"][0][0][0].tolist() == [1, 3]
    assert first["Image"][0][0][0].tolist() == [[[127] * 3] * 2] * 2
    assert first["log_artifact"][0][1]["aliases"] == ["latest", "digits"]
    assert first["finish"] == [((), {})]


def test_an_online_run_of_wandb_is_continued_and_not_begun_again(monkeypatch, tmp_path):
    library = mock.MagicMock()
    library.init.return_value.id = "an-id"
    monkeypatch.setitem(sys.modules, "wandb", library)
    for options, resume in (
        ({}, None),
        ({"mode": "online"}, "allow"),
        ({"mode": "online", "resume": "must"}, "must"),
    ):
        tracker("wandb", tmp_path / "digits", **options)(at(1), {"x": 0.5})
        assert library.init.call_args.kwargs.get("resume") == resume


def test_mlflow_gets_an_experiment_a_run_its_parameters_and_a_batch_of_values(monkeypatch, tmp_path):
    library, folder = mock.MagicMock(), tmp_path / "runs" / "digits"
    client = library.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "an-id"
    monkeypatch.setattr("time.time", lambda: 5.0)
    first, second = told("mlflow", monkeypatch, folder, library)
    assert first["create_experiment"] == [(("runs",), {})]
    assert first["create_run"][0][1] == {"run_name": "digits", "tags": None}
    assert (("an-id", "args/a_b_", "0.1"), {}) in first["log_param"]
    assert not {"create_run", "log_param"} & second.keys()  # parameters never change
    assert second["update_run"] == [(("an-id",), {"status": "RUNNING"})]
    assert second["Metric"] == [(("x", 0.5, 5000, 2), {}), (("on", 1.0, 5000, 2), {})]
    assert second["RunTag"] == [(("note", "warm"), {})]
    assert len(second["log_batch"][0][1]["metrics"]) == 2
    ((run, image), named), *_ = second["log_image"]
    assert (run, image.shape, named) == ("an-id", (2, 2, 3), {"key": "image", "step": 2})
    assert second["log_artifacts"] == [(("an-id", str(folder), "checkpoint/digits"), {})]
    assert second["set_terminated"] == [(("an-id", "FINISHED"), {})]


# What the logger does itself, with a client that only remembers.


class Remembering:
    """A client of the documented protocol."""

    def __init__(self):
        self.calls, self.run = [], None

    def start(self, folder, run_id, config):
        self.calls.append(("start", run_id))
        self.folder, self.config, self.run = folder, config, "mine"
        return "id-1"

    def log(self, step, values):
        self.calls.append((step, values))

    def artifact(self, path, name):
        self.calls.append((path.name, name))

    def close(self):
        self.calls.append("end")


def test_values_of_one_name_are_left_out_up_to_the_step_that_was_logged_before(tmp_path):
    first, second = Remembering(), Remembering()
    log = tracker(first, tmp_path / "run")
    assert log.run is None
    rows = [(10, {"train/loss": 1.0}), (10, {"eval/loss": 2.0}), (20, {"train/loss": 3.0})]
    rows += [(15, {"train/loss": 4.0})]  # a run may go back within its process, which is then what happened
    for step, values in rows:
        log(at(step), values)
    assert first.calls == [("start", None), *rows]
    assert (log.run, first.folder) == ("mine", tmp_path / "run")

    log = tracker(second, tmp_path / "run")
    log(at(20), {"train/loss": 3.0, "eval/loss": 5.0})  # the evaluation had not been logged
    log(at(15), {"train/loss": 6.0})
    log(at(21), {"train/loss": 7.0})
    log.close()
    log.close()
    log(at(22), {"train/loss": 8.0})
    begun = ("start", "id-1")
    rows = [(20, {"eval/loss": 5.0}), (21, {"train/loss": 7.0}), "end", begun, (22, {"train/loss": 8.0})]
    assert second.calls == [begun, *rows]


def test_each_step_has_its_epoch_once(tmp_path):
    client = Remembering()
    log = tracker(client, tmp_path)
    state = ll.TrainState(step=7, epoch=1, batch=3, epoch_length=4)
    for values in ({"x": 1.0}, {"y": 2.0}):
        log(state, values)
    log(state.replace(step=8), {"epoch": 9})
    assert client.calls[1:] == [(7, {"epoch": 1.75, "x": 1.0}), (7, {"y": 2.0}), (8, {"epoch": 9})]


def test_a_call_that_failed_is_not_taken_for_logged(tmp_path):
    client = Remembering()
    log = tracker(client, tmp_path)
    with pytest.raises(TypeError, match="'w'"):
        log(at(2), {"x": 2.0, "w": [3]})
    tracker(client, tmp_path)(at(2), {"x": 2.0})
    assert client.calls[-1] == (2, {"x": 2.0})


def test_artifacts_are_stored_with_a_run_that_has_begun_and_mistakes_are_named(tmp_path, board):
    client = Remembering()
    log, folder, other = tracker(client, tmp_path), tmp_path / "step-5", tmp_path / "other"
    folder.mkdir()
    with pytest.raises(RuntimeError, match="Remembering run has not been started"):
        log.artifact(folder)
    for each in (log, board):
        each(STATE, {"x": 1.0})
    log.artifact(folder)
    assert client.calls[-1] == ("step-5", "checkpoint")
    (folder / "Remembering.json").write_text("{")
    assert_each_refused(
        (lambda: log.artifact(tmp_path / "step-6"), FileNotFoundError, r"step-6 .*ckpt\.wait\(\)"),
        (lambda: board.artifact(folder), TypeError, "tensorboard .*step-5"),
        (lambda: tracker(Remembering(), folder)(STATE, {"x": 1.0}), ValueError, r"Remembering\.json .*delete it"),
        (lambda: tracker("wandbb", other), ValueError, "wandbb.*trackio.*ll.log.TrackerClient"),
        (lambda: tracker("tensorboard", other, config=[1]), TypeError, r"config.*vars\(args\)"),
        (lambda: tracker(object(), other), TypeError, "object.*artifact.*TrackerClient"),
        (lambda: tracker(Remembering(), other, project="p"), TypeError, "project"),
    )
    assert not other.exists()


@pytest.mark.parametrize("name", [*READERS, "wandb"])
def test_a_missing_package_is_an_error_that_names_it(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    with pytest.raises(ImportError, match=f"{name} needs its package .*: pip install {name}"):
        tracker(name, tmp_path)


def on_two_ranks(folder):
    with ll.distributed.setup():
        rows = []
        log_metrics = ll.log.windowed(ll.log.record(rows), ll.every_n_steps(1))
        log_metrics(at(1), {"loss": [ll.Mean(1.0, 1), ll.Mean(9.0, 3)][ll.distributed.rank()]})
        assert rows[0]["loss"] == 2.5
        client = Remembering()
        log = tracker(client, folder)
        for step in (1, 2):
            log(at(step), {"x": 1.0})
        log.artifact(folder)
        log.close()
        assert len(client.calls) == (5 if ll.distributed.rank() == 0 else 0)
        assert (log.run is None) == (ll.distributed.rank() == 1)


def test_one_rank_logs_and_means_over_a_window_are_those_of_all(tmp_path):
    launch(2, on_two_ranks, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["Remembering.json"]
