"""Clients of experiment trackers: what each needs to start or continue a run and to take settings, values and files.

A client's package is imported when a run is started. Without `online`, nothing is sent to a service.
"""

from __future__ import annotations

import importlib
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from looplib.log._boards import Histogram, by_kind, tensorboard
from looplib.types import TrainState

Options = dict[str, Any]


class Client:
    """Client of one tracker. A new instance starts a run, or continues that of an earlier `id`.

    Attributes:
        package: module to import.
        install: what to install, for the error.
        replaces: True if values of a step that a resumed run logs again take the place of the earlier ones.
        server: how to choose a server, if `online` does not.
        ends_itself: True if the client ends the run when the process exits.
        run: the client's own object of the run.
        id: what the client needs to find the run again.
    """

    package: ClassVar[str]
    install: ClassVar[str]
    replaces: ClassVar[bool] = False
    server: ClassVar[str | None] = None
    ends_itself: ClassVar[bool] = True
    run: Any = None
    id: str | None = None

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Store the settings of the run, in nested dicts of plain values."""
        raise NotImplementedError

    def log(self, state: TrainState, values: Mapping[str, Any]) -> None:
        scalars, histograms, pictures = by_kind(values)
        for method, kind, given in ((Client.histogram, "histograms", histograms), (Client.image, "images", pictures)):
            if given and getattr(type(self), method.__name__) is method:
                raise TypeError(
                    f"{self.package} takes no {kind}, and {next(iter(given))!r} is one; leave it out, by "
                    "ll.log.only(sink, names), or log numbers of it, such as its mean"
                )
        if scalars:
            self.scalars(state.step, scalars)
        for name, histogram in histograms.items():
            self.histogram(state.step, name, histogram)
        for name, picture in pictures.items():
            self.image(state.step, name, _pixels(picture))

    def scalars(self, step: int, values: Options) -> None:
        """Log numbers, bools and strs."""
        raise NotImplementedError

    def histogram(self, step: int, name: str, histogram: Histogram) -> None:
        raise NotImplementedError

    def image(self, step: int, name: str, pixels: Any) -> None:
        """Log an image, an array of bytes of shape (height, width, channels), or (height, width)."""
        raise NotImplementedError

    def artifact(self, path: Path, name: str) -> None:
        """Store a file or a folder with the run."""
        raise TypeError(f"{self.package} stores no files of a run; keep {path} where it is, or use another tracker")

    def close(self) -> None:
        """End the run."""


class TensorBoard(Client):
    package, install, replaces = "tensorboard", "tensorboard pillow", True
    server = "leave it out"

    def __init__(self, folder: Path, id: str | None, online: bool, options: Options) -> None:
        self._folder, self._options = folder, options
        self._write: Any = None

    def settings(self, settings: Mapping[str, Any]) -> None:
        self._write = tensorboard(self._folder, hyperparameters=flat(settings), **self._options)

    def log(self, state: TrainState, values: Mapping[str, Any]) -> None:
        self._write(state, values)


class WandB(Client):
    package, install = "wandb", "wandb pillow"

    def __init__(self, folder: Path, id: str | None, online: bool, options: Options) -> None:
        self._library = load(self)
        start = {"dir": str(folder), "name": folder.name, "id": id or uuid.uuid4().hex[:8]}
        start |= {"mode": "online", "resume": "allow"} if online else {"mode": "offline"}
        self.run = self._library.init(**start | options)
        self.id = self.run.id
        self._step, self._row = -1, self.run.step - 1
        # W&B drops values of a step below its latest. With a step metric of our own it draws them where they belong.
        self.run.define_metric("*", step_metric="step")

    def settings(self, settings: Mapping[str, Any]) -> None:
        self.run.config.update(dict(settings), allow_val_change=True)

    def _log(self, step: int, values: Options) -> None:
        if step != self._step:  # a row of W&B holds the values of one step, and rows only rise
            self._step, self._row = step, max(step, self._row + 1)
        self.run.log({**values, "step": step}, step=self._row)

    def scalars(self, step: int, values: Options) -> None:
        self._log(step, values)

    def histogram(self, step: int, name: str, histogram: Histogram) -> None:
        self._log(step, {name: self._library.Histogram(np_histogram=(histogram.counts, histogram.edges))})

    def image(self, step: int, name: str, pixels: Any) -> None:
        self._log(step, {name: self._library.Image(pixels)})

    def artifact(self, path: Path, name: str) -> None:
        artifact = self._library.Artifact(f"{name}-{self.id}", type=name)
        (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
        self.run.log_artifact(artifact, aliases=["latest", path.name])

    def close(self) -> None:
        self.run.finish()


class MLflow(Client):
    package, install, server = "mlflow", "mlflow", "give tracking_uri= or set MLFLOW_TRACKING_URI"
    ends_itself = False

    def __init__(self, folder: Path, id: str | None, online: bool, options: Options) -> None:
        self._library = load(self)
        self._begin(folder, id, **options)

    def _begin(
        self,
        folder: Path,
        id: str | None,
        *,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._client = client = self._library.MlflowClient(tracking_uri)
        self.id = id or run_id
        if self.id is not None:
            client.update_run(self.id, status="RUNNING")
        else:
            experiment_name = experiment_name or folder.parent.name
            experiment = client.get_experiment_by_name(experiment_name)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(experiment_name)
            self.id = client.create_run(experiment_id, run_name=run_name or folder.name, tags=tags).info.run_id
        self.run = client.get_run(self.id)

    def settings(self, settings: Mapping[str, Any]) -> None:
        # A parameter of MLflow never changes, so a resumed run keeps its first ones.
        params = [
            self._library.entities.Param(_name_of(name), str(value)[:6000])
            for name, value in flat(settings).items()
            if _name_of(name) not in self.run.data.params
        ]
        for start in range(0, len(params), 100):
            self._client.log_batch(self.id, params=params[start : start + 100])

    def scalars(self, step: int, values: Options) -> None:
        now, entities = int(time.time() * 1000), self._library.entities
        metrics, tags = [], []
        for name, value in values.items():
            if isinstance(value, str):
                tags.append(entities.RunTag(name, value))
            else:
                metrics.append(entities.Metric(name, float(value), now, step))
        self._client.log_batch(self.id, metrics=metrics, tags=tags)

    def image(self, step: int, name: str, pixels: Any) -> None:
        self._client.log_image(self.id, pixels, key=name, step=step)

    def artifact(self, path: Path, name: str) -> None:
        if path.is_dir():
            self._client.log_artifacts(self.id, str(path), f"{name}/{path.name}")
        else:
            self._client.log_artifact(self.id, str(path), name)

    def close(self) -> None:
        failed = getattr(sys, "last_value", None) is not None  # the process ends with an error
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


class Trackio(Client):
    package, install, server = "trackio", "trackio", "give space_id= or server_url="

    def __init__(self, folder: Path, id: str | None, online: bool, options: Options) -> None:
        self._library = load(self)
        self.id = id or options.get("name") or f"{folder.name}-{uuid.uuid4().hex[:8]}"
        start = {"project": folder.parent.name, "resume": "must" if id else "never"}
        self.run = self._library.init(**start | options | {"name": self.id})

    def settings(self, settings: Mapping[str, Any]) -> None:
        self.run.config.update(settings)

    def scalars(self, step: int, values: Options) -> None:
        self.run.log(values, step=step)

    def histogram(self, step: int, name: str, histogram: Histogram) -> None:
        drawn = self._library.Histogram(np_histogram=(histogram.counts, histogram.edges))
        self.run.log({name: drawn}, step=step)

    def image(self, step: int, name: str, pixels: Any) -> None:
        self.run.log({name: self._library.Image(pixels)}, step=step)

    def artifact(self, path: Path, name: str) -> None:
        self.run.log_artifact(path, name=f"{name}-{self.id}", type=name, aliases=["latest", path.name])

    def close(self) -> None:
        self.run.finish()


class Aim(Client):
    package, install, server = "aim", "aim", "give repo=, the address of its server"
    ends_itself = False

    def __init__(self, folder: Path, id: str | None, online: bool, options: Options) -> None:
        self._library = load(self)
        self.run = self._library.Run(**{"run_hash": id, "experiment": folder.parent.name} | options)
        self.id = self.run.hash
        self.run.name = folder.name
        if self.run.artifacts_uri is None:
            self.run.set_artifacts_uri((folder / "aim-artifacts").as_uri())

    def settings(self, settings: Mapping[str, Any]) -> None:
        self.run["hparams"] = dict(settings)

    def scalars(self, step: int, values: Options) -> None:
        for name, value in values.items():
            self.run.track(self._library.Text(value) if isinstance(value, str) else value, name=name, step=step)

    def histogram(self, step: int, name: str, histogram: Histogram) -> None:
        ends = histogram.edges[0], histogram.edges[-1]
        self.run.track(self._library.Distribution(hist=histogram.counts, bin_range=ends), name=name, step=step)

    def image(self, step: int, name: str, pixels: Any) -> None:
        self.run.track(self._library.Image(pixels), name=name, step=step)

    def artifact(self, path: Path, name: str) -> None:
        if path.is_dir():
            self.run.log_artifacts(str(path), name=f"{name}-{path.name}")
        else:
            self.run.log_artifact(str(path), name=f"{name}-{path.name}")

    def close(self) -> None:
        self.run.close()


class Comet(Client):
    package, install = "comet_ml", "comet_ml"

    def __init__(self, folder: Path, id: str | None, online: bool, options: Options) -> None:
        self._library = library = load(self)
        config = library.ExperimentConfig(name=folder.name, offline_directory=str(folder))
        start = {"online": online, "experiment_key": id, "mode": "get_or_create" if id else "create"}
        self.run = library.start(**start | {"experiment_config": config} | options)
        self.id = self.run.get_key()

    def settings(self, settings: Mapping[str, Any]) -> None:
        self.run.log_parameters(flat(settings))

    def scalars(self, step: int, values: Options) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self.run.log_other(name, value)
            else:
                self.run.log_metric(name, value, step=step)

    def histogram(self, step: int, name: str, histogram: Histogram) -> None:
        drawn = importlib.import_module("comet_ml.data_structure").Histogram()
        centers = [(low + high) / 2 for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]
        drawn.add(centers, counts=histogram.counts)
        self.run.log_histogram_3d(drawn, name=name, step=step)

    def image(self, step: int, name: str, pixels: Any) -> None:
        self.run.log_image(pixels, name=name, step=step)

    def artifact(self, path: Path, name: str) -> None:
        self.run.log_model(f"{name}-{path.name}", str(path))

    def close(self) -> None:
        self.run.end()


class ClearML(Client):
    package, install = "clearml", "clearml"

    def __init__(self, folder: Path, id: str | None, online: bool, options: Options) -> None:
        task = load(self).Task
        task.set_offline(not online)
        start = {"project_name": folder.parent.name, "task_name": folder.name, "reuse_last_task_id": False}
        again = {"reuse_last_task_id": id, "continue_last_task": 0}  # 0: do not add the task's last step to each
        self.run = task.init(**start | options | (again if id else {}))
        self.id = self.run.id
        self._logger = self.run.get_logger()

    def settings(self, settings: Mapping[str, Any]) -> None:
        self.run.connect(flat(settings), name="looplib")

    def scalars(self, step: int, values: Options) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self._logger.report_text(f"step {step}: {name} {value}")
            else:
                self._logger.report_scalar(*_title(name), value=float(value), iteration=step)

    def histogram(self, step: int, name: str, histogram: Histogram) -> None:
        labels = [f"{edge:.3g}" for edge in histogram.edges[:-1]]
        self._logger.report_histogram(*_title(name), values=histogram.counts, iteration=step, xlabels=labels)

    def image(self, step: int, name: str, pixels: Any) -> None:
        self._logger.report_image(*_title(name), iteration=step, image=pixels)

    def artifact(self, path: Path, name: str) -> None:
        self.run.upload_artifact(f"{name}-{path.name}", str(path), wait_on_upload=True)

    def close(self) -> None:
        self.run.close()


class Neptune(Client):
    package, install = "neptune", "neptune"

    def __init__(self, folder: Path, id: str | None, online: bool, options: Options) -> None:
        self._library = load(self)
        self.id = id or options.get("custom_run_id") or uuid.uuid4().hex
        start = {"mode": "async" if online else "offline", "name": folder.name}
        self.run = self._library.init_run(**start | options | {"custom_run_id": self.id})

    def settings(self, settings: Mapping[str, Any]) -> None:
        self.run["parameters"] = self._library.utils.stringify_unsupported(dict(settings))

    def scalars(self, step: int, values: Options) -> None:
        for name, value in values.items():
            self.run[name].append(value if isinstance(value, str) else float(value), step=step)

    def image(self, step: int, name: str, pixels: Any) -> None:
        self.run[name].append(self._library.types.File.as_image(pixels / 255), step=step)

    def artifact(self, path: Path, name: str) -> None:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file():
                self.run[f"{name}/{path.name}/{file.name}"].upload(str(file))

    def close(self) -> None:
        self.run.stop()


class SwanLab(Client):
    package, install = "swanlab", "swanlab"

    def __init__(self, folder: Path, id: str | None, online: bool, options: Options) -> None:
        self._library = load(self)
        self.id = id or options.get("id") or uuid.uuid4().hex[:21]
        start = {"mode": "online" if online else "offline", "log_dir": str(folder / "swanlog"), "name": folder.name}
        self.run = self._library.init(**start | {"resume": "allow"} | options | {"id": self.id})

    def settings(self, settings: Mapping[str, Any]) -> None:
        self._library.config.update(flat(settings))

    def scalars(self, step: int, values: Options) -> None:
        drawn = {name: self._library.Text(v) if isinstance(v, str) else float(v) for name, v in values.items()}
        self.run.log(drawn, step=step)

    def image(self, step: int, name: str, pixels: Any) -> None:
        self.run.log({name: self._library.Image(pixels)}, step=step)

    def close(self) -> None:
        self.run.finish()


CLIENTS: dict[str, type[Any]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
    "aim": Aim,
    "comet": Comet,
    "clearml": ClearML,
    "neptune": Neptune,
    "swanlab": SwanLab,
}


def load(client: Client | type[Client]) -> Any:
    """Import a client's package."""
    try:
        return importlib.import_module(client.package)
    except ImportError as error:
        raise ImportError(
            f"the tracker {client.package} needs its package ({error}): pip install {client.install}"
        ) from error


def check_online(client: type[Client], online: bool) -> None:
    """Raise ValueError for `online` with a tracker that has no service, or whose server is chosen by an option."""
    if online and client.server is not None:
        raise ValueError(f"{client.package} has no service that online=True would choose: {client.server}")


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Settings with one level of names.

    >>> flat({"optimizer": {"lr": 0.1, "betas": [0.9, 0.99], "fused": None}})
    {'optimizer/lr': 0.1, 'optimizer/betas': '[0.9, 0.99]', 'optimizer/fused': 'None'}
    """
    entries: dict[str, bool | int | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            entries |= flat(value, f"{prefix}{name}/")
        else:
            entries[f"{prefix}{name}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return entries


def _name_of(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return "".join(letter if letter.isalnum() or letter in "_-. :/" else "_" for letter in name)


def _title(name: str) -> tuple[str, str]:
    """ClearML's title of a plot and name of its curve: "train/loss" is the curve "train" in the plot "loss"."""
    series, slash, title = name.partition("/")
    return (title, series) if slash else (name, name)


def _pixels(picture: Tensor) -> Any:
    """Bytes, of shape (height, width, channels), or (height, width) for one channel."""
    # Trackers may rescale floats by their range; uint8 values are used unchanged.
    bits = picture if picture.dtype == torch.uint8 else (picture.clamp(0, 1) * 255).to(torch.uint8)
    return bits.permute(1, 2, 0).squeeze(-1).numpy()
