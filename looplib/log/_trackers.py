"""Experiment trackers: one sink for all of them, which continues a run where it stopped."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from looplib._core.checks import check_argument, check_type
from looplib._core.descriptions import differences
from looplib._core.notices import warn
from looplib._core.ranks import is_first
from looplib.log._clients import CLIENTS, Client, check_online, load
from looplib.log._configuration import configuration
from looplib.log._sinks import CodedSink
from looplib.types import TrainState


def tracker(
    name: str,
    directory: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    online: bool = False,
    **options: Any,
) -> Tracker:
    """Experiment tracker as a sink: TensorBoard, W&B, MLflow, Trackio, Aim, Comet, ClearML, Neptune or SwanLab.

    >>> import looplib as ll, tempfile
    >>> log = ll.log.tracker("tensorboard", tempfile.mkdtemp() + "/digits", config={"args": {"warmup": 100}})
    >>> log(ll.TrainState(step=3), {"train/loss": 0.5, "note": "warm"})
    >>> log.close()

    The first call starts the run, on the first rank only, and stores its configuration: that of `ll.log.configuration`
    (optimizer, loaders, model, seed, versions, git commit) and `config`.

    Numbers, bools and strs are logged at `state.step`, a tensor or array with one dimension as a histogram, and one
    with three, (channels, height, width), as an image. MLflow, Neptune and SwanLab take no histograms.

    A run that is resumed with the same directory continues the tracker's run. The directory keeps the id of the run
    and the last step of each name in the file `NAME.json`. What an earlier process logged is not logged twice:

    - TensorBoard starts a new file, which hides what the earlier ones hold from its first step on.
    - For the others, the values that were logged before stay as they are, and those of the same name up to the same
      step are left out. Values under W&B are drawn over the metric `step`, so that none is dropped as too late.
    - If the configuration differs from that of the earlier process, a warning names the differences. MLflow keeps the
      first parameters; the others store the new ones.

    Only values that a client had not yet written when its process was killed are lost; `ll.jsonl` loses none. To start
    a new run, use another directory or delete this one.

    `log.artifact(path)` stores a file or folder such as a checkpoint, `log.run` is the client's own object for all
    else, and `log.close()` ends the run, which the end of the process does as well. For histograms of the gradients,
    see `ll.log.gradient_histograms`.

    Args:
        name: "tensorboard", "wandb", "mlflow", "trackio", "aim", "comet", "clearml", "neptune" or "swanlab".
        directory: folder of this run, created if missing. Its name is that of the run, and its parent's name that of
            the project or experiment where a client needs one. W&B, Comet, SwanLab and TensorBoard write their files
            to it; MLflow, Trackio, Aim, ClearML and Neptune have a place of their own for all runs.
        config: further settings by name, such as `vars(args)`.
        online: if True, send to the service of W&B, Comet, ClearML, Neptune or SwanLab. If False, these write files
            that their own commands upload later. The others take the address of a server as an option.
        **options: arguments of `wandb.init`, `trackio.init`, `aim.Run`, `comet_ml.start`, `clearml.Task.init`,
            `neptune.init_run` or `swanlab.init`; for MLflow, tracking_uri, experiment_name, run_name, run_id and tags.

    Raises:
        ValueError: there is no tracker of this name, or it has no service for `online`.
        ImportError: its package is not installed. The message says what to install.

    The sink raises TypeError for a value of a kind that the tracker does not take, naming it, and the client's errors.
    """
    check_argument(name in CLIENTS, "name", name, f"the trackers are {', '.join(CLIENTS)}")
    check_type("config is", config, (Mapping, type(None)), "give a mapping, such as vars(args)")
    load(CLIENTS[name])
    check_online(CLIENTS[name], online)
    run = _Run(name, Path(directory).absolute(), config or {}, online, options)
    arguments = {"config": config, "online": online or None, **options}
    given = "".join(f", {key}={value!r}" for key, value in arguments.items() if value is not None)
    return Tracker(run.log, f"tracker({name!r}, {os.fspath(directory)!r}{given})", True, run)


@dataclass(frozen=True, repr=False)
class Tracker(CodedSink):
    """Sink of a tracker, as `ll.log.tracker` makes it."""

    _run: Any = field(default=None)

    @property
    def run(self) -> Any:
        """The client's own object of the run. None on other ranks than the first.

        Raises RuntimeError before the first call of the sink, which starts the run.
        """
        if not is_first():
            return None
        return self._run.started("run").run

    def artifact(self, path: str | os.PathLike[str], name: str = "checkpoint") -> None:
        """Store a file or a folder with the run, such as a checkpoint, on the first rank only.

        Each call with the same name adds a version, with the name of the path as its label:

            log.artifact(ckpt.save(state, scores))

        The client copies or uploads the files before it returns, or keeps a copy, so that the checkpoint may be
        deleted afterwards. Checkpoints saved in the background are complete after `ckpt.wait()`.

        Raises:
            FileNotFoundError: there is nothing at this path.
            TypeError: the tracker stores no files (TensorBoard, SwanLab).
            RuntimeError: the sink has not been called yet.
        """
        if is_first():
            self._run.artifact(Path(path), name)

    def close(self) -> None:
        """End the run, on the first rank. Another call of the sink continues it."""
        if is_first():
            self._run.close()


class _Run:
    """Run of a tracker and its file in the directory: {"id": ..., "steps": {name: step}, "config": {...}}."""

    def __init__(
        self, name: str, folder: Path, config: Mapping[str, Any], online: bool, options: dict[str, Any]
    ) -> None:
        self._name, self._folder, self._config = name, folder, config
        self._online, self._options = online, options
        self._path = folder / f"{name}.json"
        self._client: Client | None = None
        self._id: str | None = None
        self._before: dict[str, int] = {}  # name -> last step that an earlier process logged
        self._steps: dict[str, int] = {}
        self._settings: dict[str, Any] = {}

    def log(self, state: TrainState, values: Mapping[str, Any]) -> None:
        client = self._client or self._open(state)
        new = {name: value for name, value in values.items() if state.step > self._before.get(name, -1)}
        if new:
            client.log(state, new)
        if not client.replaces:
            self._steps |= {name: max(state.step, self._steps.get(name, 0)) for name in new}
            self._write()

    def started(self, what: str) -> Client:
        if self._client is None:
            raise RuntimeError(
                f"the {self._name} run has not been started, so it has no {what} yet: the first call of the sink "
                "starts it, log(state, values)"
            )
        return self._client

    def artifact(self, path: Path, name: str) -> None:
        if not path.exists():
            raise FileNotFoundError(
                f"there is nothing at {path} to store; a checkpoint saved in the background is complete after ckpt.wait()"
            )
        self.started("artifacts").artifact(path.absolute(), name)

    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            atexit.unregister(self.close)
            client.close()

    def _open(self, state: TrainState) -> Client:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._read()
        settings = configuration(state, **self._config)
        client: Client = CLIENTS[self._name](self._folder, self._id, self._online, dict(self._options))
        before, self._settings = self._settings, settings
        self._id, self._client = client.id, client
        if not client.ends_itself:
            atexit.register(self.close)
        self._write()  # before anything can fail, so that a second try does not start a second run
        client.settings(settings)
        if before and (changed := differences(_compared(before), _compared(settings))):
            warn(
                f"the run of {self._name} in {self._folder} continues with other settings: {'; '.join(changed)}. "
                "Values that it logged before stay as they are; for a new run, give another directory"
            )
        return client

    def _read(self) -> None:
        try:
            record = orjson.loads(self._path.read_bytes())
        except FileNotFoundError:
            return
        except orjson.JSONDecodeError as error:
            raise ValueError(
                f"{self._path} does not hold the record of a run ({error}); delete it for a new run"
            ) from error
        self._id, self._settings, self._steps = record["id"], record["config"], record["steps"]
        self._before = dict(self._steps)

    def _write(self) -> None:
        """Replace the file at once, so that a killed process leaves a whole one."""
        data = orjson.dumps(
            {"id": self._id, "steps": self._steps, "config": self._settings}, option=orjson.OPT_INDENT_2
        )
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}-{threading.get_ident()}")
        beside.unlink(missing_ok=True)  # a link would be followed
        beside.write_bytes(data)
        beside.replace(self._path)


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that say nothing of the results."""
    return {name: value for name, value in settings.items() if name not in ("command", "device")}
