"""One sink for all trackers: each client's files are read back after a run that was stopped and resumed."""

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
import types
import warnings
import zipfile

import numpy as np
import orjson
import pytest
import torch
from ranks import launch
from shared import STATE, at, python
from test_boards import events_of, pixels

import looplib as ll
from looplib.log import tracker

SCENARIO = """
import sys, types
from pathlib import Path
import torch
import looplib as ll

name, folder, part = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
options = eval(sys.argv[4])
model = torch.nn.Linear(2, 1)
model.load_state_dict({"weight": torch.tensor([[0.5, -0.25]]), "bias": torch.tensor([0.125])})
model.config = types.SimpleNamespace(hidden=2, kind="tiny")
board = ll.log.tracker(name, folder, config={"args": {"note": "x"}}, **options)
log = ll.tee(board, ll.jsonl(folder / "log.jsonl"))
optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1)
grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
if name not in ("mlflow", "neptune", "swanlab"):  # which take no histograms
    grad_fn = ll.log.gradient_histograms(grad_fn, board, ll.every_n_steps(2))
train_step = ll.make_train_step(grad_fn, optimizer)
loader = ll.make_loader(torch.arange(64.0).reshape(32, 2) / 64, batch_size=4)
ckpt = ll.checkpoint_io(folder / "checkpoints")
state = ckpt.restore(ll.init_state(model, optimizer, epoch_length=len(loader)))
for batch in loader(state):
    state, metrics = train_step(state, batch)
    log(state, {"train/loss": metrics["loss"].item(), "note": f"step {state.step}"})
    if state.step == 3 and part == "first":
        path = ckpt.save(state, {})
        if name != "swanlab":
            board.artifact(path)
    if state.step == 5:
        if part == "first":
            sys.exit()
        board(state, {"picture": torch.ones(1, 4, 4) / 2})
print("ran to", state.step)
"""

QUIET = {"wandb": {"settings": {"silent": True, "console": "off"}}, "aim": {"system_tracking_interval": None}}


def stopped_and_resumed(name, tmp_path):
    """Train for 5 steps, and again from the checkpoint of step 3 up to step 8."""
    environment = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_ERROR_REPORTING": "false",
    }
    for part in ("first", "second"):
        arguments = name, tmp_path / "runs" / "digits", part, QUIET.get(name, {})
        result = python(SCENARIO, *arguments, env=environment, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert result.stdout.count("ran to 8") == 1
    assert "UserWarning" not in result.stderr
    columns = ll.log.read_columns(tmp_path / "runs" / "digits" / "log.jsonl")
    assert columns["step"] == [*range(1, 9)]
    assert len(ll.log.read_jsonl(tmp_path / "runs" / "digits" / "log.jsonl")) == 10
    return dict(zip(columns["step"], columns["train/loss"], strict=True))


def skip_without(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def flat(settings, prefix=""):
    entries = {}
    for name, value in settings.items():
        entries |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return entries


def id_of(name, tmp_path):
    return orjson.loads((tmp_path / "runs" / "digits" / f"{name}.json").read_bytes())["id"]


def records_of(path):
    """The records of W&B's file: a LevelDB log of blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def read_mlflow(tmp_path):
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        (run,) = base.execute("select run_uuid, name, status from runs").fetchall()
        history = base.execute(
            "select step, value from metrics where key = 'train/loss' order by timestamp, step"
        ).fetchall()
        params = dict(base.execute("select key, value from params").fetchall())
        tags = dict(base.execute("select key, value from tags").fetchall())
        assert ("runs",) in base.execute("select name from experiments").fetchall()
    base.close()
    assert run == (id_of("mlflow", tmp_path), "digits", "FINISHED")
    assert tags["note"] == "step 8"
    files = {file.name for file in tmp_path.glob(f"mlruns/*/{run[0]}/artifacts/checkpoint/step-00000003/*")}
    assert files == {"manifest.json", "tensors.safetensors"}
    assert [*tmp_path.glob(f"mlruns/*/{run[0]}/artifacts/images/picture*.png")]
    return history, params


def read_wandb(tmp_path):
    history, config, pictures, histograms, artifacts = [], {}, [], [], []
    paths = sorted(
        (tmp_path / "runs/digits/wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime
    )
    assert len(paths) == 2
    for path in paths:
        assert path.name == f"run-{id_of('wandb', tmp_path)}.wandb"
        for one in records_of(path):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
            if "train/loss" in row:
                assert one.history.step.num == row["step"]
                history.append((row["step"], row["train/loss"]))
                histograms += [row["step"]] * ("gradients/weight/values" in row)
            for item in [*one.run.config.update, *one.config.update]:
                config[item.key] = json.loads(item.value_json)
            if one.HasField("metric"):
                assert (one.metric.glob_name, one.metric.step_metric) == ("*", "step")
            if one.request.log_artifact.artifact.name:
                artifacts.append(one.request.log_artifact.artifact)
            if one.artifact.name:
                artifacts.append(one.artifact)
        pictures += path.parent.glob("files/media/images/picture*.png")
    assert len(pictures) == 1
    assert histograms == [2, 4, 6, 8]
    assert artifacts[0].name.startswith("checkpoint-")
    assert sorted(artifacts[0].aliases) == ["latest", "step-00000003"]
    return history, flat(config)


def read_trackio(tmp_path):
    with sqlite3.connect(tmp_path / "trackio" / "runs.db") as base:
        rows = [
            (step, json.loads(values))
            for step, values in base.execute("select step, metrics from metrics order by id")
        ]
        config = json.loads(base.execute("select config from configs").fetchone()[0])
    base.close()
    assert [step for step, values in rows if "gradients/weight" in values] == [2, 4, 6, 8]
    assert [step for step, values in rows if "picture" in values] == [5]
    assert len([*(tmp_path / "trackio" / "artifacts").glob("**/blobs/sha256/*/*")]) == 2
    return [(step, values["train/loss"]) for step, values in rows if "train/loss" in values], flat(config)


def read_aim(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import aim
        from aim.storage.context import Context

        run = aim.Run(run_hash=id_of("aim", tmp_path), repo=str(tmp_path))
        frame = run.get_metric("train/loss", Context({})).dataframe()
    assert run.name == "digits"
    assert [*(tmp_path / "runs/digits/aim-artifacts").glob("**/tensors.safetensors")]
    return sorted(zip(frame["step"], frame["value"], strict=True)), flat(run["hparams"])


def read_comet(tmp_path):
    history, config, kinds = [], {}, set()
    for path in (tmp_path / "runs/digits").glob("*.zip"):
        for line in zipfile.ZipFile(path).read("messages.json").decode().splitlines():
            message = json.loads(line)
            payload = message["payload"]
            kinds.add(payload.get("upload_type") or message["type"])
            if (metric := payload.get("metric")) and metric["metricName"] == "train/loss":
                history.append((metric["step"], metric["metricValue"]))
            if param := payload.get("param"):
                config[param["paramName"]] = param["paramValue"]
    assert {"histogram3d", "visualization"} <= kinds
    return sorted(history), config


def read_clearml(tmp_path):
    (folder,) = [path for path in (tmp_path / "home/.clearml/cache/offline").glob("offline-*") if path.is_dir()]
    events = [event for line in (folder / "metrics.jsonl").read_text().splitlines() for event in json.loads(line)]
    losses = [event for event in events if (event["metric"], event["variant"]) == ("loss", "train")]
    assert {event["iter"] for event in events if event["variant"] == "gradients"} == {2, 4, 6, 8}
    task = json.loads((folder / "task.json").read_text())
    assert [*(folder / "data").glob("**/artifacts/checkpoint-step-00000003/step-00000003.zip")]
    assert [*(folder / "data").glob("**/picture*.jpeg")]
    parameters = task["hyperparams"]["looplib"]
    return sorted((event["iter"], event["value"]) for event in losses), {n: p["value"] for n, p in parameters.items()}


PACKAGES = {"comet": "comet_ml"}
READERS = {
    "mlflow": read_mlflow,
    "wandb": read_wandb,
    "trackio": read_trackio,
    "aim": read_aim,
    "comet": read_comet,
    "clearml": read_clearml,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_continues_the_trackers_run_and_doubles_no_step(name, tmp_path):
    skip_without(PACKAGES.get(name, name))
    losses = stopped_and_resumed(name, tmp_path)
    history, config = READERS[name](tmp_path)
    assert dict(history) == losses
    assert len(history) == 8
    config = {key: str(value) for key, value in config.items()}
    wanted = {
        "optimizer/class": "torch.optim.adamw.AdamW",
        "optimizer/lr": "0.1",
        "optimizer/weight_decay": "0.01",
        "model/hidden": "2",
        "model/kind": "tiny",
        "loader/batch_size": "4",
        "args/note": "x",
        "versions/torch": torch.__version__,
    }
    assert {key: config[key] for key in wanted} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neptune", "swanlab"])
def test_clients_whose_files_have_no_reader_here_run_offline(name, tmp_path):
    skip_without(name)
    stopped_and_resumed(name, tmp_path)
    record = orjson.loads((tmp_path / f"runs/digits/{name}.json").read_bytes())
    assert record["steps"] == {"train/loss": 8, "note": 8, "picture": 5}


OFFLINE = """
import sys, numpy as np, torch
from looplib.types import TrainState
from looplib.log import in_background, tracker

log = tracker("wandb", sys.argv[1], project="digits", config={"lr": 0.5}, settings={"silent": True, "console": "off"})
log = in_background(log)
log(TrainState(step=3), {"train/loss": 0.25, "note": "warm"})
log(TrainState(step=3), {"eval/auc": 0.75})
log(TrainState(step=5), {"vector": torch.arange(10.0), "picture": torch.ones(1, 4, 4) / 2})
log(TrainState(step=4), {"late": 1.5})  # a state that was restored
log(TrainState(step=6), {"after": 2.5})
"""


@pytest.mark.slow
def test_wandb_holds_what_was_logged_offline(tmp_path):
    skip_without("wandb")
    result = python(OFFLINE, tmp_path, env={**os.environ, "WANDB_ERROR_REPORTING": "false"})
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history, config = {}, {}
    for one in records_of(path):
        for item in one.history.item:
            history.setdefault(one.history.step.num, {})[item.key or "/".join(item.nested_key)] = item.value_json
        for item in [*one.run.config.update, *one.config.update]:
            config[item.key] = item.value_json
    assert json.loads(config["lr"]) == 0.5
    assert json.loads(history[3]["train/loss"]) == 0.25
    assert json.loads(history[3]["note"]) == "warm"
    assert json.loads(history[3]["eval/auc"]) == 0.75
    assert {row: json.loads(values["step"]) for row, values in history.items()} == {3: 3, 5: 5, 6: 4, 7: 6}
    assert json.loads(history[6]["late"]) == 1.5
    assert json.loads(history[7]["after"]) == 2.5
    # The only image that it keeps is half gray, with 8 bits.
    (picture,) = path.parent.glob("files/media/images/*.png")
    assert set(pixels(picture.read_bytes()).flat) == {127}
    assert json.loads(history[5]["picture/_type"]) == "image-file"
    assert sum(json.loads(history[5]["vector/values"])) == 10


# What the sink does itself, with a client that only remembers.


class Remembering:
    """In place of the package trackio."""

    def __init__(self):
        self.runs, self.Histogram = {}, dict

    def init(self, *, name, **options):
        return self.runs.setdefault(name, RememberedRun(options))


class RememberedRun:
    def __init__(self, options):
        self.options, self.config, self.rows, self.files = options, {}, [], []

    def log(self, values, step):
        self.rows.append((step, values))

    def log_artifact(self, path, name, type, aliases):
        self.files.append((path.name, type, aliases))

    def finish(self):
        self.rows.append("finished")


@pytest.fixture
def runs(monkeypatch):
    client = Remembering()
    monkeypatch.setitem(sys.modules, "trackio", client)
    return client.runs


def test_values_of_one_name_are_left_out_up_to_the_step_that_was_logged_before(runs, tmp_path):
    first = tracker("trackio", tmp_path, project="p")
    first(at(10), {"train/loss": 1.0})
    first(at(10), {"eval/loss": 2.0})
    first(at(20), {"train/loss": 3.0})
    # A run may go back within its process, which is then what happened.
    first(at(15), {"train/loss": 4.0})
    second = tracker("trackio", tmp_path, project="p")
    second(at(20), {"train/loss": 3.0, "eval/loss": 5.0})  # the evaluation had not been logged
    second(at(15), {"train/loss": 6.0})
    second(at(21), {"train/loss": 7.0})
    second.close()
    second(at(22), {"train/loss": 8.0})
    rows = [(10, {"train/loss": 1.0}), (10, {"eval/loss": 2.0}), (20, {"train/loss": 3.0}), (15, {"train/loss": 4.0})]
    rows += [(20, {"eval/loss": 5.0}), (21, {"train/loss": 7.0}), "finished", (22, {"train/loss": 8.0})]
    (run,) = runs.values()
    assert run.rows == rows
    assert run.options["project"] == "p"
    tracker("trackio", tmp_path / "other")(at(1), {"train/loss": 9.0})
    assert [*runs.values()][1].rows == [(1, {"train/loss": 9.0})]


def test_a_call_that_failed_is_not_taken_for_logged(runs, tmp_path):
    log = tracker("trackio", tmp_path)
    log(at(1), {"x": 1.0})
    with pytest.raises(TypeError, match=r"'w' is a list of 1; a sink takes one number"):
        log(at(2), {"x": 2.0, "w": [3]})
    tracker("trackio", tmp_path)(at(2), {"x": 2.0})
    (run,) = runs.values()
    assert run.rows == [(1, {"x": 1.0}), (2, {"x": 2.0})]


def test_a_kind_that_a_tracker_does_not_take_is_refused_before_anything_is_logged(monkeypatch, tmp_path):
    run, told = RememberedRun({}), types.SimpleNamespace(update=lambda settings: None)
    monkeypatch.setitem(sys.modules, "swanlab", types.SimpleNamespace(init=lambda **options: run, config=told))
    log = tracker("swanlab", tmp_path)
    with pytest.raises(TypeError, match=r"swanlab takes no histograms, and 'w' is one; leave it out"):
        log(at(2), {"x": 2.0, "w": torch.ones(3)})
    with pytest.raises(TypeError, match=r"swanlab stores no files of a run; keep .* where it is"):
        log.artifact(tmp_path)
    assert run.rows == []


def test_a_run_that_continues_with_other_settings_says_which(runs, tmp_path):
    tracker("trackio", tmp_path, config={"lr": 0.1, "width": 8})(STATE, {"x": 1.0})
    log = tracker("trackio", tmp_path, config={"lr": 0.2, "width": 8})
    with pytest.warns(UserWarning, match=r"of trackio in .* continues with other settings: lr was 0.1, is 0.2\. "):
        log(STATE, {"x": 1.0})
    (run,) = runs.values()
    assert run.config["lr"] == 0.2


def test_checkpoints_are_stored_once_there(runs, tmp_path):
    log = tracker("trackio", tmp_path / "run")
    (tmp_path / "step-5").mkdir()
    with pytest.raises(RuntimeError, match=r"the trackio run has not been started, so it has no artifacts yet"):
        log.artifact(tmp_path / "step-5")
    with pytest.raises(RuntimeError, match=r"has no run yet: the first call of the sink starts it"):
        log.run  # noqa: B018
    log(STATE, {"x": 1.0})
    with pytest.raises(FileNotFoundError, match=r"step-6 to store; .* is complete after ckpt.wait\(\)"):
        log.artifact(tmp_path / "step-6")
    log.artifact(tmp_path / "step-5")
    log.artifact(tmp_path / "step-5", name="model")
    assert log.run.files == [("step-5", kind, ["latest", "step-5"]) for kind in ("checkpoint", "model")]
    board = tracker("tensorboard", tmp_path / "board")
    board(STATE, {"x": 1.0})
    with pytest.raises(TypeError, match=r"tensorboard stores no files of a run; keep .*step-5 where it is"):
        board.artifact(tmp_path / "step-5")


def test_mistakes_are_named_when_the_sink_is_made(monkeypatch, tmp_path):
    with pytest.raises(
        ValueError, match=r"name is 'wandbb'; the trackers are tensorboard, wandb, mlflow, trackio, aim, "
    ):
        tracker("wandbb", tmp_path)
    with pytest.raises(TypeError, match=r"config is .*; give a mapping, such as vars\(args\)"):
        tracker("tensorboard", tmp_path, config=[1])
    with pytest.raises(ValueError, match="tensorboard has no service that online=True would choose: leave it out"):
        tracker("tensorboard", tmp_path, online=True)
    for name in (*READERS, "neptune", "swanlab", "tensorboard"):
        package = PACKAGES.get(name, name)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"{package} needs its package .*: pip install {package}"):
            tracker(name, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_damaged_record_is_named(runs, tmp_path):
    (tmp_path / "trackio.json").write_text("{")
    with pytest.raises(ValueError, match=r"trackio.json does not hold the record of a run .*; delete it for a new"):
        tracker("trackio", tmp_path)(STATE, {"x": 1.0})


def test_the_repr_is_the_code(runs):
    assert repr(tracker("trackio", "runs/a", project="p")) == "tracker('trackio', 'runs/a', project='p')"


def test_tensorboard_draws_the_resumed_steps_once_and_holds_the_settings(tmp_path):
    pytest.importorskip("tensorboard")
    first = tracker("tensorboard", tmp_path, config={"width": 8})
    for step in range(1, 6):
        first(at(step), {"loss": float(step)})
    (path,) = tmp_path.glob("events*")
    path.rename(path.with_name(path.name.replace(path.name.split(".")[3], "0000000001")))  # an older file
    second = tracker("tensorboard", tmp_path, config={"width": 8})
    for step in range(3, 7):
        second(at(step), {"loss": -float(step)})
    events = events_of(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1), (2, 2), (3, -3), (4, -4), (5, -5), (6, -6)]
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["width"].number_value == 8
    assert hparams["versions/torch"].string_value == torch.__version__


def on_two_ranks(folder):
    with ll.distributed.setup():
        client = sys.modules["trackio"] = Remembering()
        log = tracker("trackio", folder)
        for step in (1, 2):
            log(at(step), {"x": 1.0})
        log.artifact(folder)
        rank = ll.distributed.rank()
        assert len(client.runs) == (1 if rank == 0 else 0)
        assert (log.run is None) == (rank == 1)
        log.close()


def test_one_rank_logs(tmp_path):
    launch(2, on_two_ranks, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["trackio.json"]


# The configuration.


def trained(model, **settings):
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, **settings)
    loader = ll.make_loader(torch.ones(8, 2), batch_size=4)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer, donate=True)
    state = ll.init_state(model, optimizer, epoch_length=len(loader))
    for batch in loader(state):
        state, _ = step(state, batch)
    return state


def test_nothing_has_to_be_listed(runs, tmp_path):
    model = torch.nn.Linear(2, 1)
    model.config = types.SimpleNamespace(hidden=2, labels={n: str(n) for n in range(1000)})
    state = trained(torch.nn.Sequential(model), momentum=0.9)
    assert ll.log.configuration(state)["model"] == {"class": "Sequential", "parameters": 3}
    state = trained(model, momentum=0.9)
    log = ll.log.in_background(tracker("trackio", tmp_path))
    log(state, {"x": 1.0})
    log.close()
    (run,) = runs.values()
    settings = run.config
    assert settings == ll.log.configuration(state)
    assert settings["model"] == {"class": "Linear", "parameters": 3, "hidden": 2, "labels": "dict of 1000"}
    optimizer = settings["optimizer"]
    assert (optimizer["lr"], optimizer["momentum"], optimizer["nesterov"]) == (0.1, 0.9, False)
    assert settings["loader"]["batch_size"] == 4
    assert (settings["seed"], settings["epoch_length"], settings["ranks"]) == (0, 2, 1)
    assert settings["versions"]["torch"] == torch.__version__
    assert json.loads(orjson.dumps(settings)) == settings


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
def test_models_within_wrappers_of_torch_and_peft_give_their_config():
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    small = transformers.GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(small)
    settings = ll.log.configuration(ll.init_state(torch.compile(model)))["model"]
    assert (settings["class"], settings["n_embd"], settings["model_type"]) == ("GPT2LMHeadModel", 8, "gpt2")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    settings = ll.log.configuration(ll.init_state(adapted))["model"]
    assert (settings["n_embd"], settings["adapters"]["default"]["r"]) == (8, 2)


def test_a_config_that_fails_does_not_end_the_run():
    model = torch.nn.Linear(2, 1)
    model.config = types.SimpleNamespace(to_dict=lambda: 1 / 0)
    settings = ll.log.configuration(ll.init_state(model))["model"]
    assert settings["config"] == "not described: ZeroDivisionError('division by zero')"


@pytest.mark.slow
def test_the_commit_is_that_of_the_program(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("import looplib as ll\nprint(ll.log.configuration(ll.TrainState()).get('git_commit'))\n")

    def git(*arguments):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    def printed():
        result = subprocess.run(
            [sys.executable, program], capture_output=True, text=True, check=True, env=environment
        )
        return result.stdout.strip()

    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert printed() == commit
    program.write_text(program.read_text() + "# changed\n")
    assert printed() == f"{commit}-dirty"


# Histograms of gradients.


def test_gradient_histograms_count_the_gradient_of_the_whole_step(tmp_path):
    pytest.importorskip("tensorboard")
    model, optimizer = torch.nn.Linear(40, 30), ll.optimizer(torch.optim.SGD, lr=0.1)
    data = torch.randn(8, 40)
    plain = ll.accumulate(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), 2)
    board = tracker("tensorboard", tmp_path)
    watched = ll.log.gradient_histograms(plain, board, ll.every_n_steps(2), names=lambda name: name == "weight")
    state = ll.init_state(model, optimizer)
    other, expected = ll.copy_state(state), []
    steps = [ll.make_train_step(grad_fn, optimizer) for grad_fn in (watched, plain)]
    for _ in range(5):
        expected.append(plain(state, data).grads["weight"])
        state, _ = steps[0](state, data)
        other, _ = steps[1](other, data)
    assert torch.equal(state.params["weight"], other.params["weight"])
    found = events_of(tmp_path).Histograms("gradients/weight")
    assert events_of(tmp_path).Tags()["histograms"] == ["gradients/weight"]
    assert [event.step for event in found] == [2, 4]
    for event in found:
        counts, edges = np.histogram(expected[event.step - 1].numpy(), bins=64)
        at_edges = np.abs(np.subtract([*event.histogram_value.bucket], counts)).sum()
        assert at_edges <= 4  # an element at an edge may be rounded into the bin beside it
        assert event.histogram_value.num == 1200
        np.testing.assert_allclose([*event.histogram_value.bucket_limit], edges[1:], atol=1e-6)
        assert event.histogram_value.sum == pytest.approx(expected[event.step - 1].double().sum().item())


def test_gradient_histograms_refuse_microbatches_and_compiled_steps(tmp_path):
    model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
    watched = ll.log.gradient_histograms(grad_fn, ll.console(), ll.every_n_steps(1))
    with pytest.raises(ValueError, match="gradient_histograms within accumulate would act on each microbatch alone"):
        ll.accumulate(watched, 2)
    step = ll.compile_step(ll.make_train_step(watched, optimizer), backend="eager")
    with pytest.raises(RuntimeError, match=r"gradient_histograms reads the gradients .* do not compile this step"):
        step(ll.init_state(model, optimizer), torch.ones(4, 2))


@pytest.mark.parametrize(
    "values",
    [torch.randn(1000), torch.full((5,), 3.0), torch.tensor([1.0, float("nan"), 2.0]), torch.randn(9).bfloat16()],
)
def test_a_histogram_counts_finite_elements(values, tmp_path):
    board = tracker("tensorboard", tmp_path)
    board(at(1), {"values": values, "none": torch.tensor([float("inf")])})
    assert events_of(tmp_path).Tags()["histograms"] == ["values"]
    histogram = events_of(tmp_path).Histograms("values")[0].histogram_value
    finite = values[values.isfinite()].double()
    assert sum(histogram.bucket) == histogram.num == len(finite)
    assert (histogram.min, histogram.max) == (finite.min().item(), finite.max().item())
    assert histogram.sum == pytest.approx(finite.sum().item(), rel=1e-6)
    assert histogram.sum_squares == pytest.approx(finite.square().sum().item(), rel=1e-6)
    counts, edges = np.histogram(finite.numpy(), bins=64)
    np.testing.assert_allclose([*histogram.bucket_limit], edges[1:], rtol=1e-6, atol=1e-6)
    assert np.abs(np.subtract([*histogram.bucket], counts)).sum() <= 2
