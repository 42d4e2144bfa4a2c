"""Progress bar: position and length from the state, and the metrics that the loop passes to it.

Metrics are on the device, and reading them waits for the device, so they are read only when tqdm redraws, about ten
times a second.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from typing import Any, Generic, Self, TextIO, TypeVar

from torch import Tensor

from looplib._core.checks import check, check_optional_count, check_type, named
from looplib._core.mappings import mapped
from looplib._core.ranks import is_first
from looplib._core.records import shown
from looplib.types import TrainState

T = TypeVar("T")


class progress(Generic[T]):
    """Progress bar (tqdm): epoch, position, time left and the latest metrics, in one bar for a run.

    >>> import looplib as ll
    >>> loader = ll.make_loader(range(6), batch_size=2)
    >>> state, done = ll.TrainState(epoch_length=3), ll.after_epochs(2)
    >>> bar = ll.progress(loader, epochs=2)
    >>> while not done(state):
    ...     for batch in bar(state):
    ...         metrics = {"loss": ll.Mean(0.21168)}  # in a loop: state, metrics = train_step(state, batch)
    ...         bar.show(metrics)
    ...     state = state.replace(epoch=state.epoch + 1)  # as train_step does

    shows, in a terminal or as a widget in a notebook:

        epoch 2/2: 100%|██████████| 6/6 [00:00<00:00, 61.02it/s, loss=0.2117]

    `bar(state)` yields the batches of `loader(state)`. In a resumed run, the bar starts at the state's position. It
    ends after the last batch of the last epoch, on an error or interrupt, when `break` leaves the loop, or by
    `close()`, which a run that stops early between two epochs should call, unless it uses the bar as a context.

    As a context, the bar is closed when the block is left, also by an error. `bar.print` prints a line beside it:

    >>> with ll.progress(loader, epochs=1) as bar:
    ...     for batch in bar(ll.TrainState(epoch_length=3)):
    ...         bar.print("a batch of", len(batch))
    a batch of 2
    a batch of 2
    a batch of 2

    Without `epochs`, each epoch has a bar of its own. As in tqdm, a batch counts as done when the next one is
    requested.

    In a loop of your own, give `bar(ll.TrainState(epoch=epoch, batch=batch, epoch_length=len(loader)))`: without the length it
    knows no end.

    Args:
        loader: the loader, or any function from a state to the batches of its epoch.
        epochs: number of epochs in the run. For a run that is measured in steps, pass tqdm's `total=steps`.
        desc: text before the bar, instead of "epoch 3/10".
        tqdm_options: any other option of tqdm, such as `leave=False`, `mininterval=1.0` (seconds between two
            redraws), or `disable=None` (no bar unless in a terminal). `postfix` is taken by the metrics.

    Raises:
        TypeError: `loader` is not a function of the state.
        ValueError: `epochs` is not a count.
    """

    def __init__(
        self,
        loader: Callable[[TrainState], Iterable[T]],
        *,
        epochs: int | None = None,
        desc: str | None = None,
        **tqdm_options: Any,
    ) -> None:
        check(
            callable(loader),
            f"progress takes the loader of a run, and {named(loader)} is no function of the state; write "
            "bar = ll.progress(loader, epochs=10) and `for batch in bar(state)`",
            TypeError,
        )
        check_optional_count("epochs", epochs, advice="give the number of epochs of the run")
        self._loader, self._epochs, self._desc, self._options = loader, epochs, desc, tqdm_options
        self._bar: Any = None
        self._metrics: dict[str, Any] = {}  # not read yet
        self._shown: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"ll.progress({shown(self._loader)}, epochs={self._epochs})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, state: TrainState) -> Generator[T, None, None]:
        """Yield the batches of the state's epoch, shown in the bar."""
        bar = self._begin(state)
        continues = False
        try:
            for batch in self._loader(state):
                yield batch
                if not bar.disable and time.time() - bar.last_print_t >= bar.mininterval:
                    self._read_metrics()  # just before the bar is redrawn
                bar.update(1)
            continues = self._is_of_the_run and bar.n != bar.total
        finally:
            if continues:
                bar.refresh()
            else:
                self.close()

    @property
    def _is_of_the_run(self) -> bool:
        return self._epochs is not None or "total" in self._options

    def _begin(self, state: TrainState) -> Any:
        """The bar, at the start of an epoch. That of a run continues."""
        title = self._desc or f"epoch {state.epoch + 1}{f'/{self._epochs}' if self._epochs else ''}"
        position, total = state.batch, state.epoch_length
        if self._is_of_the_run:
            position += state.epoch * (state.epoch_length or 0)
            total = (state.epoch_length or 0) * (self._epochs or 0) or None
        if self._bar is None or self._bar.disable:
            # With miniters=1 tqdm checks the clock at every batch, so a loop that becomes slow is still redrawn.
            options = {"miniters": 1, "disable": not is_first(), "desc": title, "initial": position, "total": total}
            self._bar = _bar_class()(**options | self._options)
        else:
            if state.epoch_length:
                self._bar.n = self._bar.last_print_n = position
            self._bar.set_description_str(title)
        return self._bar

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show these metrics from the next redraw on, together with earlier ones of different names.

        >>> import looplib as ll
        >>> bar = ll.progress(lambda state: [1])
        >>> for batch in bar(ll.TrainState(epoch_length=1)):
        ...     bar.show({"loss": ll.Mean(0.5)})

        Pass the metrics returned by a train step or `ll.evaluate`. Those whose value is a single number are shown.
        They stay on their device until the bar is redrawn, so a call takes less than a microsecond. For a stack
        (`vmap_step`), the bar shows the mean over the members whose value is finite.

        Raises:
            TypeError: `metrics` is not a mapping.
        """
        check_type("bar.show got", metrics, Mapping, "give the metrics that the train step returned")
        self._metrics.update(metrics)

    def print(self, *values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """Print like Python's `print`, on a line of its own above the bar, which stays whole.

        >>> import looplib as ll
        >>> bar = ll.progress(lambda state: [1])
        >>> bar.print("learning rate", 0.1)
        learning rate 0.1

        Python's own `print` would continue the line of the bar. Lines of `ll.console` need no `bar.print`. Like the bar
        and loggers, it prints on the first rank only, with `disable=True` too.

        Args:
            values: what to print.
            sep: text between the values.
            end: text after the last one.
            file: text stream to print to. Defaults to standard output at the time of the call.
        """
        if is_first():
            _bar_class().write(sep.join(map(str, values)), file=file, end=end)

    def close(self) -> None:
        """Draw the bar a last time and end it."""
        if self._bar is not None:
            try:
                with suppress(RuntimeError):  # a device that failed has raised elsewhere; the last metrics stay
                    self._read_metrics()
            finally:
                bar, self._bar = self._bar, None
                self._metrics, self._shown = {}, {}
                bar.close()

    def _read_metrics(self) -> None:
        metrics, self._metrics = self._metrics, {}  # only once, even if it fails: closing the bar reads again
        if not self._bar.disable:
            numbers = mapped(_number, metrics)
            self._shown |= {name: f"{name}={number:.4g}" for name, number in numbers.items() if number is not None}
            self._bar.set_postfix_str(", ".join(self._shown.values()), refresh=False)


def _number(metric: Any) -> float | None:
    """Value of a metric with a single number, or for a stack, the mean over the members whose value is finite."""
    value = metric.compute() if hasattr(metric, "compute") else metric
    if not isinstance(value, Tensor):
        return value if isinstance(value, (int, float)) else None
    if value.numel() == 0 or value.numel() != max(value.shape, default=1):
        return None
    members = value.detach().cpu().double().flatten()
    finite = members[members.isfinite()]
    return float((finite if len(finite) else members).mean())


# tqdm.auto chooses terminal or notebook, and warns about missing widgets, on import, so import it at first use.
@functools.cache
def _bar_class() -> Any:
    with warnings.catch_warnings():
        # In a notebook without ipywidgets tqdm warns and then draws text bars, which is fine.
        warnings.filterwarnings("ignore", "IProgress not found")
        from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread, as `miniters` is given

    return Bar
