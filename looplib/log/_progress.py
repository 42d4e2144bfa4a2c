"""A progress bar that knows where the run stands.

Position and length come from the state, the loss from the last train step. The loss lives on the device, and
reading it waits for the device: so it is read when tqdm redraws, some ten times a second, and only then.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from torch import Tensor

from looplib._core import latest as _latest
from looplib._core.ranks import is_first
from looplib.metrics._mean import Mean, compute
from looplib.types import Metrics, TrainState

T = TypeVar("T")


class progress(Generic[T]):
    """The batches, unchanged, under a tqdm bar: epoch, position, rate, and the loss of the last train step.

    >>> import looplib as ll
    >>> state = ll.TrainState(epoch=2, batch=1, epoch_length=3)
    >>> [batch for batch in ll.progress(["b", "c"], state)]
    ['b', 'c']

    shows, in a terminal or as a widget in a notebook, with the loss once a step was taken:

        epoch 3: 100%|██████████| 3/3 [00:00<00:00, 61.02it/s, loss=0.2117]

    In a notebook the bars of a cell, one for each epoch, are one output of it below each other: JupyterLab shows no
    more than 50 outputs of a cell, and what is printed is not to be lost behind the bars.

    A batch counts as done when the next one is asked for; one whose loop body was left by `break` or an error
    does not, as in tqdm. The bar ends with the batches, with an error or interrupt, when the loop is left, or
    by `close()`.

    Args:
        batches: what is left of the epoch, such as `loader(state)`.
        state: the state that the batches begin at: `state.batch` of `state.epoch_length` are done (of an
            unknown number for a stream). `state.epoch` is shown counted from 1.
        desc: text before the bar, in place of "epoch 3".
        tqdm_options: any other option of tqdm, such as `leave=False`, `mininterval=1.0` (seconds between two
            redraws), or `disable=None` (no bar unless in a terminal).

    `len()` is the number of batches from the state's position to the end of its epoch. The loss shown is that
    of the last step of `make_train_step` in this process, whichever run it belongs to; the time that such steps took
    to compile while the bar was there stands behind it, if they did; of a stack (`vmap_step`), the
    mean over the members whose loss is finite.

    Raises:
        TypeError: `batches` cannot be iterated over; `len()` of a stream.
    """

    def __init__(
        self, batches: Iterable[T], state: TrainState, *, desc: str | None = None, **tqdm_options: Any
    ) -> None:
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"progress takes the batches of an epoch, and a {type(batches).__name__} is not iterable; "
                "write ll.progress(loader(state), state)"
            )
        self._left = None if state.epoch_length is None else state.epoch_length - state.batch
        position = {"initial": state.batch, "total": state.epoch_length}
        # With miniters=1 tqdm looks at the clock at every batch (some 50 ns), and needs no thread to notice
        # that a loop has become slow.
        options = {"miniters": 1, "disable": not is_first(), **position, **tqdm_options}
        self._bar = _bar_class()(desc=f"epoch {state.epoch + 1}" if desc is None else desc, **options)
        self._batches = iter(batches)
        self._given = False

    def __len__(self) -> int:
        if self._left is None:
            raise TypeError("progress over a stream has no length: state.epoch_length is None")
        return self._left

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            if self._given:
                self._bar.update(1)
            batch = next(self._batches)
        except BaseException:
            self.close()
            raise
        self._given = True
        return batch

    def close(self) -> None:
        """Draw the bar for the last time and let go of the batches, as losing the last reference does."""
        self._batches = iter(())
        self._bar.close()


def _loss_of(metrics: Metrics) -> float:
    """The loss; of a stack, the mean over its members whose loss is finite."""
    loss = metrics["loss"].compute()
    if isinstance(loss, Tensor) and loss.numel() > 1:
        finite = loss[loss.isfinite()]
        loss = (finite if len(finite) else loss).mean()
    return compute({"loss": Mean(loss)})["loss"]


class _Output:
    """What a notebook's cell shows of its bars, a box of widgets; the next cell that runs has another one."""

    def __init__(self) -> None:
        self._place: tuple[Any, int] | None = None
        self._box: Any = None

    def add(self, widget: Any) -> None:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
        from ipywidgets import VBox  # type: ignore[import-untyped, unused-ignore]

        shell: Any = get_ipython()  # type: ignore[no-untyped-call, unused-ignore]
        place = (shell, shell.execution_count)
        if place == self._place:
            self._box.children = (*self._box.children, widget)
        else:
            self._place, self._box = place, VBox([widget])
            display(self._box)  # type: ignore[no-untyped-call, unused-ignore]

    def remove(self, widget: Any) -> None:
        if self._box is not None:
            self._box.children = tuple(child for child in self._box.children if child is not widget)


# tqdm.auto chooses terminal or notebook, and warns of missing widgets, when imported: so at first use.
@functools.cache
def _bar_class() -> Any:
    with warnings.catch_warnings():
        # In a notebook without ipywidgets tqdm warns, and then draws text bars, which is just what is wanted.
        warnings.filterwarnings("ignore", "IProgress not found")
        from tqdm.auto import tqdm
    from tqdm.std import tqdm as tqdm_of_all

    tqdm_of_all.get_lock()  # made here, it is one lock for all classes; else each class would make its own
    of_widgets = hasattr(tqdm, "status_printer") and tqdm.status_printer is not tqdm_of_all.status_printer
    output = _Output()

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread: see miniters above

        def __init__(self, **options: Any) -> None:
            self._before, self._compiled = _latest.metrics, _latest.compiling
            self._loss: str | None = None
            self._thread = threading.get_ident()
            shared = of_widgets and options.get("display", True) and not options.get("delay")
            super().__init__(**options, **({"display": False} if shared else {}))
            self._shared = shared and not self.disable
            if self._shared:
                output.add(self.container)

        # Not in `format_dict` or `display`: tqdm calls these with its lock held, and an error or interrupt
        # there, amid the wait for a device, would leave it locked.
        def refresh(self, nolock: bool = False, lock_args: tuple[Any, ...] | None = None) -> Any:
            self._read_loss()
            return super().refresh(nolock=nolock, lock_args=lock_args)

        def close(self) -> None:
            # A device that failed has raised where it was used; the bar then keeps the loss that it had.
            with suppress(RuntimeError):
                self._read_loss()
            super().close()
            if getattr(self, "_shared", False) and not self.leave and not (self.total and self.n < self.total):
                output.remove(self.container)

        def _read_loss(self) -> None:
            metrics = _latest.metrics
            # Another thread (tqdm.write redraws in its caller's) has another current stream, and would read a
            # tensor that is not written yet.
            here = not getattr(self, "disable", True) and threading.get_ident() == self._thread
            if here and metrics is not None and metrics is not self._before:
                self._loss = f"loss={_loss_of(metrics):.4g}"

        @property
        def format_dict(self) -> dict[str, Any]:
            values: dict[str, Any] = super().format_dict
            parts = [self._loss, values["postfix"]]
            # A bar left open is closed as Python ends, when modules may have lost their globals.
            if spent := (_latest.compiling or 0) - self._compiled:
                parts.append(f"compiling took {spent:.0f} s")
            values["postfix"] = ", ".join(part for part in parts if part) or None
            return values

    return Bar
