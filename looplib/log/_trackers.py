"""Experiment trackers: one logger for all of them, which continues a run where it stopped."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from looplib._core.checks import check, check_type
from looplib._core.ranks import is_first
from looplib.log._clients import TrackerClient, client_of, tracked_values
from looplib.log._configuration import configuration
from looplib.log._loggers import CodedLogger
from looplib.types import TrainState


def tracker(
    client: str | TrackerClient,
    directory: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Tracker:
    """Experiment tracker as a logger: TensorBoard, W&B, MLflow, Trackio, or a client of your own.

    >>> import looplib as ll, tempfile
    >>> log = ll.log.tracker("tensorboard", tempfile.mkdtemp() + "/digits", config={"args": {"warmup": 100}})
    >>> log(ll.TrainState(step=3), {"train/loss": 0.5, "note": "warm"})
    >>> log.close()

    The first call starts the run, on the first rank only, and stores its configuration: that of
    `ll.log.configuration` (optimizer, loaders, model, seed, versions, git commit) and `config`. A run that is resumed
    with the same directory continues the tracker's run; for a new run, use another directory.

    Args:
        client: "tensorboard", "wandb", "mlflow", "trackio", or an object with the methods of `ll.log.TrackerClient`.
        directory: folder of this run, created if missing. Its name is that of the run, and its parent's name that of
            the experiment in MLflow and the project in Trackio. TensorBoard and W&B write their files to it; MLflow and
            Trackio have a place of their own for all runs.
        config: further settings by name, such as `vars(args)`.
        **options: arguments of `SummaryWriter`, `wandb.init` (`mode="online"` sends to its service, and the default
            "offline" writes files for `wandb sync`) or `trackio.init`; for MLflow, tracking_uri, experiment_name,
            run_name and tags.

    Raises:
        ValueError: there is no tracker of this name.
        TypeError: `client` lacks a method, options are given to a client of your own, or `config` is not a mapping.
        ImportError: its package is not installed. The message says what to install.

    The logger raises TypeError for a value of a kind that the tracker does not take, naming it, and the client's
    errors.

    **Values.** If the state has an `epoch_length`, each step also has an `epoch`, with its fraction, as in the Trainers'
    charts. Numbers, bools and strs are logged at `state.step`. A tensor or array with one dimension becomes the
    histogram of its finite elements (MLflow takes none). One with three dimensions, (channels, height, width) with 1,
    3 or 4 channels, becomes an image: floats from 0 to 1 or uint8 from 0 to 255.

    **Resumed runs.** The directory keeps the id of the run and the last step of each name in the file `NAME.json`.
    What an earlier process logged stays as it is: values of the same name up to the same step are left out. The new
    configuration is stored, except in MLflow, which keeps the first parameters. W&B draws values over the metric
    `step`, so that none is dropped as too late. If a process is killed, the values that the client had not yet
    written are lost; `ll.jsonl` loses none.

    **Methods.** `log.artifact(path)` stores a file or folder such as a checkpoint, `log.run` is the client's own
    object for all else, and `log.close()` ends the run, which the end of the process does as well.
    """
    check_type("config is", config, (Mapping, type(None)), "give a mapping, such as vars(args)")
    arguments = {"config": config, **options} if config is not None else options
    code = "".join(f", {key}={value!r}" for key, value in arguments.items())
    name = client if isinstance(client, str) else type(client).__name__
    resolved = client_of(client, options) if isinstance(client, str) else client
    methods = "an object with the methods start, log, artifact and close of ll.log.TrackerClient"
    check_type("client is", resolved, TrackerClient, f"give a name such as 'wandb', or {methods}")
    check(resolved is not client or not options, f"give the options {[*options]} to your own client", TypeError)
    return Tracker(
        resolved, name, Path(directory), config or {}, f"tracker({client!r}, {os.fspath(directory)!r}{code})"
    )


class Tracker(CodedLogger):
    """Logger of a tracker, as `ll.log.tracker` makes it.

    Its file in the directory holds {"id": ..., "steps": {name: step}}.
    """

    def __init__(self, client: TrackerClient, name: str, folder: Path, config: Mapping[str, Any], code: str) -> None:
        super().__init__(self._log, code, first_rank=True)
        self._client, self._name, self._config = client, name, config
        self._path = folder.absolute() / f"{name}.json"
        self._started = False
        self._id: str | None = None
        self._before: dict[str, int] = {}  # name -> last step that an earlier process logged
        self._steps: dict[str, int] = {}

    @property
    def run(self) -> Any:
        """The client's own object of the run. None before the first call, and on ranks other than the first."""
        return getattr(self._client, "run", None)

    def artifact(self, path: str | os.PathLike[str], name: str = "checkpoint") -> None:
        """Store a file or a folder with the run, such as a checkpoint, on the first rank only.

        Each call with the same name adds a version, with the name of the path as its label:

            log.artifact(ckpt.save(state, scores))

        The client copies or uploads the files before it returns, or keeps a copy, so that the checkpoint may be
        deleted afterwards. Checkpoints saved in the background are complete after `ckpt.wait()`.

        Raises:
            FileNotFoundError: there is nothing at this path.
            TypeError: the tracker stores no files (TensorBoard).
            RuntimeError: the logger has not been called yet.
        """
        if is_first():
            path = Path(path).absolute()
            missing = f"there is nothing at {path} to store; a checkpoint saved in the background needs ckpt.wait()"
            check(path.exists(), missing, FileNotFoundError)
            early = (
                f"the {self._name} run has not been started: the first call of the logger does, log(state, values)"
            )
            check(self._started, early, RuntimeError)
            self._client.artifact(path, name)

    def close(self) -> None:
        """End the run, on the first rank. Another call of the logger continues it."""
        if self._started:
            self._started = False
            atexit.unregister(self.close)
            self._client.close()

    def _log(self, state: TrainState, values: Mapping[str, Any]) -> None:
        if not self._started:
            self._start(state)
        if state.epoch_length and state.step > self._steps.get("epoch", -1):
            values = {"epoch": state.epoch + state.batch / state.epoch_length, **values}
        new = {name: value for name, value in values.items() if state.step > self._before.get(name, -1)}
        if tracked := tracked_values(new):
            self._client.log(state.step, tracked)
        self._steps |= {name: max(state.step, self._steps.get(name, 0)) for name in new}
        self._write()

    def _start(self, state: TrainState) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            try:
                record = orjson.loads(self._path.read_bytes())
            except orjson.JSONDecodeError as error:
                message = f"{self._path} does not hold the record of a run ({error}); delete it for a new run"
                raise ValueError(message) from error
            self._id, self._steps = record["id"], record["steps"]
            self._before = dict(self._steps)
        self._id = self._client.start(self._path.parent, self._id, configuration(state, **self._config))
        self._started = True
        atexit.register(self.close)
        self._write()

    def _write(self) -> None:
        record = {"id": self._id, "steps": self._steps}
        _replace_file(self._path, orjson.dumps(record, option=orjson.OPT_INDENT_2))


def _replace_file(path: Path, data: bytes) -> None:
    """Write a whole file atomically."""
    target = path.resolve()  # the target of a link, so that the link is kept
    beside = target.with_name(f".{target.name}.writing")
    beside.unlink(missing_ok=True)  # what a killed process has left, or a link to elsewhere
    try:
        beside.write_bytes(data)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
