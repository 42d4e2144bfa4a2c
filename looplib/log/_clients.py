"""Clients of experiment trackers: what each needs to start or continue a run and to take its values and files."""

from __future__ import annotations

import importlib
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from looplib._core.checks import as_tensor, check_argument
from looplib.log._loggers import plain_values


@runtime_checkable
class TrackerClient(Protocol):
    """Client of an experiment tracker, for `ll.log.tracker`. Write these four methods for a tracker of your own.

    >>> import looplib as ll, tempfile
    >>> class Printing:  # `run`, if it has one, is the client's own object of the run
    ...     def start(self, folder, run_id, config):
    ...         print("start", run_id, config["seed"])
    ...         return run_id or "run-1"
    ...     def log(self, step, values):
    ...         print(step, values)
    ...     def artifact(self, path, name):
    ...         print("keep", path.name, "as", name)
    ...     def close(self):
    ...         print("end")
    >>> log = ll.log.tracker(Printing(), tempfile.mkdtemp())
    >>> log(ll.TrainState(step=3), {"train/loss": 0.5})
    start None 0
    3 {'train/loss': 0.5}
    >>> log.close()
    end

    They are called on the first rank only, in this order. What they raise, the logger raises.
    """

    def start(self, folder: Path, run_id: str | None, config: dict[str, Any]) -> str | None:
        """Start a run, or continue that of an earlier process.

        Args:
            folder: the run's directory, which exists. Its name is that of the run.
            run_id: what `start` returned in the earlier process, or None for a new run.
            config: settings of the run to store, in nested dicts of plain values.

        Returns:
            The tracker's name of the run, if it needs one to continue it.
        """

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Log values of a step by name.

        A value is a number, bool or str; an array of one dimension, for a histogram; or an image, an array of bytes of
        shape (height, width, channels), or (height, width). Raise TypeError for kinds that the tracker does not take.
        """

    def artifact(self, path: Path, name: str) -> None:
        """Store a file or a folder with the run."""

    def close(self) -> None:
        """End the run. It is called when the process exits, too."""


class _Client:
    """A tracker's library, and the options to start its run with."""

    def __init__(self, library: Any, **options: Any) -> None:
        self._library, self._options = library, options
        self.run: Any = None


class TensorBoard(_Client):
    """Options are those of `torch.utils.tensorboard.SummaryWriter`, which is `run`."""

    def start(self, folder: Path, run_id: str | None, config: dict[str, Any]) -> None:
        self._options["log_dir"] = folder
        self.run = self._library.SummaryWriter(**self._options)
        # An experiment record, as of `add_hparams`, would fix the columns of the table of runs.
        _, session, _ = self._library.summary.hparams(flat(config), {})
        self.run.file_writer.add_summary(session)

    def log(self, step: int, values: dict[str, Any]) -> None:
        try:
            for name, value in values.items():
                self._add(name, value, step)
            self.run.flush()
        except OSError:
            # The writer's thread has ended and would raise this at every later call.
            self.run = self._library.SummaryWriter(**self._options)
            raise

    def _add(self, name: str, value: Any, step: int) -> None:
        match value:
            case str():
                self.run.add_text(name, value, step)
            case bool() | int() | float():
                self.run.add_scalar(name, value, step)
            case _ if value.ndim == 1:
                self.run.add_histogram(name, value, step)
            case _:
                self.run.add_image(name, value, step, dataformats="HWC" if value.ndim == 3 else "HW")

    def artifact(self, path: Path, name: str) -> None:
        raise TypeError(f"tensorboard stores no files of a run; keep {path} where it is, or use another tracker")

    def close(self) -> None:
        self.run.close()


class WandB(_Client):
    """Options are those of `wandb.init`. `mode` is "offline" unless given, so nothing is sent to the service."""

    def start(self, folder: Path, run_id: str | None, config: dict[str, Any]) -> str:
        options = {"dir": str(folder), "name": folder.name, "id": run_id or uuid.uuid4().hex[:8], "mode": "offline"}
        options |= self._options
        if options["mode"] == "online":
            options.setdefault("resume", "allow")
        self.run = self._library.init(**options)
        self.run.config.update(config, allow_val_change=True)
        # W&B drops values of a step below its latest. With a step metric of our own it draws them where they belong.
        self.run.define_metric("*", step_metric="step")
        return str(self.run.id)

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.run.log({**media_of(self._library, values), "step": step})

    def artifact(self, path: Path, name: str) -> None:
        artifact = self._library.Artifact(f"{name}-{self.run.id}", type=name)
        (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
        self.run.log_artifact(artifact, aliases=["latest", path.name])

    def close(self) -> None:
        self.run.finish()


class Trackio(_Client):
    """Options are those of `trackio.init`. The project is the name of the run's parent folder unless given."""

    def start(self, folder: Path, run_id: str | None, config: dict[str, Any]) -> str:
        self._name: str = run_id or self._options.get("name") or f"{folder.name}-{uuid.uuid4().hex[:8]}"
        options = {"project": folder.parent.name, "resume": "must" if run_id else "never"}
        self.run = self._library.init(**options | self._options | {"name": self._name})
        self.run.config.update(config)
        return self._name

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.run.log(media_of(self._library, values), step=step)

    def artifact(self, path: Path, name: str) -> None:
        self.run.log_artifact(path, name=f"{name}-{self._name}", type=name, aliases=["latest", path.name])

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """The experiment is the name of the run's parent folder unless given. It takes no histograms."""

    def __init__(
        self,
        library: Any,
        *,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._library, self._client = library, library.MlflowClient(tracking_uri)
        self._experiment, self._name, self._tags = experiment_name, run_name, tags
        self.run: Any = None

    def start(self, folder: Path, run_id: str | None, config: dict[str, Any]) -> str:
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self.run = self._client.get_run(run_id)
            self._id = run_id
            return run_id  # a parameter of MLflow never changes, so the run keeps its first ones
        name = self._experiment or folder.parent.name
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self.run = self._client.create_run(experiment_id, run_name=self._name or folder.name, tags=self._tags)
        self._id = str(self.run.info.run_id)
        for name, value in flat(config).items():
            allowed = "".join(letter if letter.isalnum() or letter in "_-. :/" else "_" for letter in name)
            self._client.log_param(self._id, allowed, str(value)[:6000])
        return self._id

    def log(self, step: int, values: dict[str, Any]) -> None:
        now, entities = int(time.time() * 1000), self._library.entities
        metrics, tags = [], []
        for name, value in values.items():
            match value:
                case str():
                    tags.append(entities.RunTag(name, value))
                case bool() | int() | float():
                    metrics.append(entities.Metric(name, float(value), now, step))
                case _ if value.ndim == 1:
                    raise TypeError(
                        f"mlflow takes no histograms, and {name!r} is one; leave it out, by ll.log.select(logger, names), or "
                        "log numbers of it, such as its mean"
                    )
                case _:
                    self._client.log_image(self._id, value, key=name, step=step)
        self._client.log_batch(self._id, metrics=metrics, tags=tags)

    def artifact(self, path: Path, name: str) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._id, str(path), f"{name}/{path.name}")
        else:
            self._client.log_artifact(self._id, str(path), name)

    def close(self) -> None:
        failed = hasattr(sys, "last_value")  # the process ends with an error
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


CLIENTS: dict[str, tuple[str, Any]] = {  # name -> module to import, client
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
    "trackio": ("trackio", Trackio),
}


def client_of(name: str, options: Mapping[str, Any]) -> TrackerClient:
    """Client of a tracker that looplib knows."""
    advice = f"the trackers are {', '.join(CLIENTS)}; for a different one, give an object like ll.log.TrackerClient"
    check_argument(name in CLIENTS, "client", name, advice)
    module, make = CLIENTS[name]
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"the tracker {name} needs its package ({error}): pip install {name} pillow") from error
    client: TrackerClient = make(library, **options)
    return client


def tracked_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the clients of trackers take them.

    Numbers, bools and strs stay. A tensor with one dimension becomes an array of its finite elements, for a histogram,
    and is left out if there are none. One with three, (channels, height, width), becomes an array of bytes,
    (height, width, channels), or (height, width) for one channel.
    """
    tracked: dict[str, Any] = {}
    for name, value in values.items():
        shape = tuple(getattr(value, "shape", ()))
        if not shape:
            tracked |= plain_values({name: value})
        elif len(shape) == 1:
            elements = as_tensor(value).detach().cpu().double()
            elements = elements[elements.isfinite()]
            if len(elements):
                tracked[name] = elements.numpy()
        elif len(shape) == 3 and shape[0] in (1, 3, 4):
            image = as_tensor(value).detach().cpu()
            # Trackers may rescale floats by their range; uint8 values are used unchanged.
            pixels = image if image.dtype == torch.uint8 else (image.float().clamp(0, 1) * 255).to(torch.uint8)
            tracked[name] = pixels.permute(1, 2, 0).squeeze(-1).numpy()
        else:
            raise TypeError(
                f"{name!r} is a {type(value).__name__} of shape {shape}; one dimension makes a histogram, and (1, 3 "
                "or 4 channels, height, width) an image: for a histogram of all its elements give .flatten()"
            )
    return tracked


def media_of(library: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with histograms and images as W&B and Trackio take them."""
    media: dict[str, Any] = {}
    for name, value in values.items():
        match value:
            case bool() | int() | float() | str():
                media[name] = value
            case _ if value.ndim == 1:
                media[name] = library.Histogram(value)
            case _:
                media[name] = library.Image(value)
    return media


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
