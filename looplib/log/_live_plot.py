"""Live plot: a logger that redraws during training."""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplib._core.checks import check
from looplib._core.mappings import fields_of
from looplib._core.ranks import is_first
from looplib.log._loggers import COUNTS, CodedLogger, plain_values, read_jsonl
from looplib.log._plots import curves_of, draw, figure_class, matches, save
from looplib.types import Logger, TrainState


def live_plot(
    names: str | Sequence[str] | None = None,
    *,
    x: str = "step",
    smooth: float = 0.0,
    every: float = 5.0,
    path: str | os.PathLike[str] | None = None,
    history: str | os.PathLike[str] | None = None,
) -> Logger:
    """Live plot: a logger that redraws its plot during training, in the notebook cell or in a file.

    >>> import looplib as ll, tempfile
    >>> log = ll.log.live_plot(path=tempfile.mkdtemp() + "/loss.png", every=60)
    >>> log(ll.TrainState(step=1), {"train/loss": 0.5})

    The first call draws. After that, a call draws if at least `every` seconds have passed and drawing has used less
    than a tenth of the time. The final plot is drawn when the cell finishes; for a file, when the logger is deleted or
    the program exits. A call that does not draw takes microseconds.

    Args:
        names, x, smooth: as for `plot`. A name may appear later than the first call.
        every: seconds between drawings.
        path: file to draw to. None draws in the notebook cell.
        history: path of the run's `jsonl` log, if it has one. Its rows are drawn first, so a resumed run, or a cell
            that is run again, shows the whole run. Steps that the run repeats replace the earlier ones. Without it,
            the plot shows what this logger was given, in all cells together.

    The logger raises TypeError for a value that is not a number, bool or str, naming it.

    Raises:
        RuntimeError: `path` is None and there is no notebook (or IPython shell) to draw in.
        ImportError: matplotlib is not installed.
    """
    figure_class()  # so that a missing package is named now
    names = [names] if isinstance(names, str) else names
    shell = _shell() if path is None else None
    earlier = read_jsonl(history) if history is not None and Path(history).exists() and is_first() else []
    canvas = _Canvas(names, x, smooth, every, None if path is None else Path(path).absolute(), earlier)

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        canvas.add({**plain_values(values), **fields_of(state, COUNTS)})

    logger = CodedLogger(
        write, "live_plot()" if path is None else f"live_plot(path={os.fspath(path)!r})", first_rank=True
    )
    if shell is None:
        weakref.finalize(logger, canvas.finish)
    else:
        shell.events.register("post_execute", canvas.finish)
        weakref.finalize(logger, shell.events.unregister, "post_execute", canvas.finish)
    return logger


@dataclass
class _Canvas:
    """The rows so far, and when and where to draw them."""

    names: Sequence[str] | None
    x: str
    smooth: float
    every: float
    path: Path | None
    rows: list[Any]
    stale: bool = False
    due: float = -math.inf
    handle: Any = None  # of the display in the cell

    def add(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)
        self.stale = True
        if time.monotonic() >= self.due:
            self.draw()

    def draw(self) -> None:
        began = time.monotonic()
        self.stale = False
        curves = curves_of(self.rows, self.x)
        names = None if self.names is None else [name for name in self.names if matches(name, curves)]
        if curves and names != []:
            self.show(draw({"": curves}, names, self.x, self.smooth))
        ended = time.monotonic()
        self.due = ended + max(self.every, 9 * (ended - began))

    def show(self, figure: Any) -> None:
        if self.path is not None:
            save(figure, self.path)
        elif self.handle is None:
            from IPython.display import display

            self.handle = display(figure, display_id=True)  # type: ignore[no-untyped-call, unused-ignore]
        else:
            self.handle.update(figure)

    def finish(self) -> None:
        """Draw what has not been drawn yet. The next cell gets its own plot, which is drawn immediately."""
        if self.stale:
            self.draw()
        self.handle, self.due = None, -math.inf


def _shell() -> Any:
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = ipython and ipython.get_ipython()
    check(
        shell is not None,
        "live_plot found no notebook to draw in: give it a file, ll.log.live_plot(path='loss.png'), or draw the log of a "
        "run with ll.plot",
        RuntimeError,
    )
    return shell
