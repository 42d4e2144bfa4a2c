"""Plots of logs.

A plot is a separate matplotlib Figure that pyplot does not know about, so there is nothing to close, and a notebook
shows the figure that a cell returns.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplib._core.checks import check, check_number, check_type, few
from looplib._core.ranks import is_first
from looplib.log._loggers import COUNTS, CodedLogger, read_jsonl, row_of
from looplib.log.smoothing import smoothed
from looplib.types import Logger, TrainState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Row = Mapping[str, Any]


Log = str | os.PathLike[str] | Sequence[Row]


Curves = dict[str, list[tuple[float, float]]]  # name -> points


Look = tuple[str, Any]  # color and line style


INK = "#7b838d"  # of text and axes; like the colors of runs, it reads on a light and on a dark page


_ORDERED = ("#2f7fe0", "#9a5fe0", "#d6409f", "#e5484d", "#d0720f")  # colors of runs, from the first to the last


_STYLES = ("-", "--", ":", "-.")


_FEW = 8  # runs that differ enough by color alone


_MARKED = 25  # lines with at most this many points show each point


_LONG = 32  # characters; longer names are cut in the middle


def plot(
    logs: Log | Mapping[str, Log],
    names: str | Sequence[str] | None = None,
    *,
    x: str = "step",
    smooth: float = 0.0,
    color_by: Mapping[str, Sequence[float]] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Plot a log, or compare several runs, with one panel for each metric.

    >>> import looplib as ll, torch
    >>> rows = [{"step": step, "train/loss": 1 / step, "eval/loss": 2 / step} for step in range(1, 100)]
    >>> figure = ll.plot(rows)
    >>> [axes.get_title() for axes in figure.axes]
    ['loss']
    >>> figure = ll.plot({"small": rows, "large": rows}, "eval/loss", smooth=0.9)  # paths of logs do as well

    The part of a name after the last slash is its metric and the part before it is its source, so `train/loss` and
    `eval/loss` share a panel. A single run has one color per source. Several runs have colors in their order, from
    blue over red to orange, and sources that share a panel differ in line style. Up to 32 runs can be told apart: with
    more than 8, neighbors differ in line style, and each source has its own panel. The legend stands below the panels.

    With `color_by`, a number of each run, such as the learning rate of a member of a stack, colors its line, and a
    color bar replaces the legend:

    >>> rates = [0.01, 0.1, 1.0]
    >>> members = {f"member {i}": [] for i in range(len(rates))}
    >>> for epoch in range(3):  # in a loop: values = ll.transforms.compute_members(window.metrics())
    ...     values = ll.transforms.compute_members({"loss": ll.Mean(torch.tensor([3.0, 2.0, 1.0]) - epoch / 4, 1)})
    ...     for rows, row in zip(members.values(), values):
    ...         rows.append({"epoch": epoch} | row)
    >>> figure = ll.plot(members, x="epoch", color_by={"learning rate": rates})

    Losses and perplexities are drawn on a log scale if they span a factor of ten. Infinite and NaN values are crosses
    at the lower edge. If a run went back to a checkpoint, its repeated steps replace the earlier ones.

    Args:
        logs: path of a `jsonl` log, or its rows as returned by `read_jsonl`; or a dict of these by label.
        names: what to draw, in this order: metrics (`"loss"`), full names (`"eval/auc"`), or all metrics of a source
            (`"eval"`, `"eval/plain"`). Defaults to all numbers.
        x: horizontal axis: `"step"`, `"epoch"`, `"samples"`, or any name in the same rows.
        smooth: from 0 to below 1, weight of the previous average in an exponential moving average. The line is this
            average, corrected for its start, and the raw values are drawn in a pale color behind it.
        color_by: a title and one finite number for each run, in the order of `logs`. Positive numbers that span a
            factor of ten have a log scale.
        path: file to save the figure to as well, such as `"loss.png"` or `"loss.pdf"`. Missing folders are created.

    Returns:
        A `matplotlib.figure.Figure`, which you can change. A notebook displays it. Its background is transparent and
        its colors read on a light and on a dark page; `figure.set_facecolor("white")` gives it a background.

    Raises:
        ValueError: no log has the name, a log has no numbers to draw, `smooth` is out of range, or `color_by` does not
            have one title and one finite number for each run.
        TypeError: `logs` is a list of paths, or `color_by` is not a dict of numbers.
        FileNotFoundError: the log does not exist.
        ImportError: matplotlib is not installed.
    """
    _check_smooth(smooth)
    logs = logs if isinstance(logs, Mapping) else {"": logs}
    if color_by is not None:
        _check_color_by(color_by, len(logs))
    rows = {label: _rows(log) for label, log in logs.items()}
    runs = {label: curves_of(of_run, x) for label, of_run in rows.items()}
    available = list(dict.fromkeys(chain.from_iterable(runs.values())))
    present = list(dict.fromkeys(chain.from_iterable(chain.from_iterable(rows.values()))))
    check(available, f"there is nothing to draw: no row has a number beside its {x!r}; the rows have {few(present)}")
    names = [names] if isinstance(names, str) else names
    for name in names or ():
        check(matches(name, available), f"no log has {name!r}; there are {', '.join(available)}")
    figure = draw(runs, names, x, smooth, color_by)
    if path is not None:
        save(figure, path)
    return figure


def _rows(log: Log) -> Sequence[Row]:
    rows = read_jsonl(log) if isinstance(log, (str, os.PathLike)) else log
    check(
        all(isinstance(row, Mapping) for row in rows),
        'plot takes the path of a log, or its rows; give several as a dict by label: {"first": path, "second": path}',
        TypeError,
    )
    return rows


def curves_of(rows: Sequence[Row], x: str) -> Curves:
    """Points of each name, without those that were repeated after going back to a checkpoint."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        if isinstance(row.get(x), (int, float)):
            step = row.get("step", row[x])
            for name, value in row.items():
                if isinstance(value, (int, float)) and name not in (x, *COUNTS):
                    line = points.setdefault(name, [])
                    del line[bisect_left(line, (step,)) :]
                    line.append((step, row[x], value))
    return {name: [(at, value) for _, at, value in line] for name, line in points.items()}


def _source(name: str) -> str:
    return name.rpartition("/")[0]


def _metric(name: str) -> str:
    return name.rpartition("/")[2]


def matches(wanted: str, available: Iterable[str]) -> list[str]:
    """The names that a metric, a full name, or a source stands for."""
    names = [name for name in available if wanted in (name, _metric(name))]
    return names or [name for name in available if name.startswith(f"{wanted}/")]


def _panels(names: Sequence[str] | None, available: list[str]) -> list[list[str]]:
    """Names of the curves in each panel: one panel for each metric that a wanted name stands for."""
    panels: list[list[str]] = []
    for wanted in dict.fromkeys(map(_metric, available)) if names is None else names:
        by_metric: dict[str, list[str]] = {}
        for name in matches(wanted, available):
            by_metric.setdefault(_metric(name), []).append(name)
        panels += by_metric.values()
    return panels


def _check_smooth(smooth: float) -> None:
    advice = "give the share of the past to keep at each point, from 0 to below 1"
    check_number("smooth", smooth, lambda weight: 0 <= weight < 1, advice)


def _check_color_by(color_by: Any, runs: int) -> None:
    example = 'color_by={"learning rate": [0.01, 0.1]}'
    advice = f"give a title and one number for each run, {example}"
    check_type("color_by is", color_by, Mapping, advice)
    check(len(color_by) == 1, f"color_by has {len(color_by)} titles; {advice}")
    ((title, numbers),) = color_by.items()
    sized = isinstance(numbers, Sequence) and not isinstance(numbers, str)
    check(sized, f"color_by[{title!r}] is a {type(numbers).__name__}; {advice}", TypeError)
    check(len(numbers) == runs, f"color_by[{title!r}] has {len(numbers)} numbers for {runs} runs; {advice}")
    for number in numbers:
        check_number(f"a value of color_by[{title!r}]", number, math.isfinite, advice)


def draw(
    runs: Mapping[str, Curves],
    names: Sequence[str] | None,
    x: str,
    smooth: float,
    color_by: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """A figure of the runs' curves, with a panel for each metric that the names stand for."""
    panels = _panels(names, list(dict.fromkeys(chain.from_iterable(runs.values()))))
    if color_by or len(runs) > _FEW or (len(runs) > 1 and max(map(len, panels)) > len(_STYLES)):
        panels = [[name] for name in dict.fromkeys(chain.from_iterable(panels))]  # line styles do not tell sources
    columns = min(len(panels), 2)
    down = -(-len(panels) // columns)
    figure: Figure = figure_class()(figsize=(4.8 * columns, 3.2 * down), layout="constrained", facecolor="none")
    grid = figure.subplots(down, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.remove()
    shown = grid[: len(panels)]
    looks = _looks(runs, panels, color_by)
    for axes, panel in zip(shown, panels, strict=True):
        values: list[float] = []
        for run, curves in runs.items():
            for name in [name for name in panel if name in curves]:
                _draw_line(axes, curves[name], looks(run, name, panel), smooth)
                values += [value for _, value in curves[name]]
        dress(axes, panel[0] if len(panel) == 1 else _metric(panel[0]), x, values)
    if color_by:
        _add_color_bar(figure, shown, color_by)
    else:
        _add_legend(figure, _entries(runs, panels, looks))
    return figure


def _looks(
    runs: Mapping[str, Curves], panels: list[list[str]], color_by: Mapping[str, Sequence[float]] | None
) -> Callable[[str, str, list[str]], Look]:
    """The function from a run, a name and its panel to the look of the line."""
    from matplotlib.colors import to_hex

    sources = list(dict.fromkeys(_source(name) for panel in panels for name in panel))
    numbers = {run: number for number, run in enumerate(runs)}
    values = next(iter(color_by.values())) if color_by else list(range(len(runs)))
    colormap, scale = _colors(values, logarithmic=bool(color_by))
    mixed = list(dict.fromkeys(_source(name) for panel in panels if len(panel) > 1 for name in panel))

    def look(run: str, name: str, panel: list[str]) -> Look:
        if len(runs) == 1 and not color_by:
            number = sources.index(_source(name))
            return f"C{number}", _STYLES[number // 10 % len(_STYLES)]
        number = numbers[run] if len(runs) > _FEW and not color_by else 0
        if len(panel) > 1:
            number = mixed.index(_source(name))
        return to_hex(colormap(scale(values[numbers[run]]))), _STYLES[number % len(_STYLES)]

    return look


def _colors(values: Sequence[float], *, logarithmic: bool) -> tuple[Colormap, Normalize]:
    """The color map of runs, and the scale of the values on it."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    low, high = min(values), max(values)
    scale = LogNorm if logarithmic and 0 < 10 * low <= high else Normalize
    return LinearSegmentedColormap.from_list("runs", _ORDERED), scale(low, high)


def _entries(
    runs: Mapping[str, Curves], panels: list[list[str]], looks: Callable[[str, str, list[str]], Look]
) -> dict[str, Look]:
    """Entries of the legend: the sources of a run, or the runs, and the sources where panels mix them."""
    mixed = [(name, panel) for panel in panels if len(panel) > 1 for name in panel]
    if len(runs) == 1:
        (run,) = runs
        return {_source(name) or name: looks(run, name, panel) for name, panel in mixed}
    drawn = {name: [name] for panel in panels for name in panel}
    of_runs = {
        run: looks(run, *next((name, panel) for name, panel in drawn.items() if name in curves))
        for run, curves in runs.items()
        if not drawn.keys().isdisjoint(curves)
    }
    first = next(iter(runs))
    of_sources = {_source(name) or name: (INK, looks(first, name, panel)[1]) for name, panel in mixed}
    taken = {f"{label} (source)" if label in of_runs else label: look for label, look in of_sources.items()}
    return of_runs | taken


def _shortened(names: Sequence[str]) -> list[str]:
    """Long names, cut in the middle, as far as they stay different."""
    names, length = [" ".join(str(name).split()) for name in names], _LONG
    while True:
        ends = length // 2
        cut = [name if len(name) <= length else f"{name[: ends - 1]}…{name[-ends:]}" for name in names]
        if len(set(cut)) == len(set(names)):
            return cut
        length *= 2


def _add_legend(figure: Figure, entries: Mapping[str, Look]) -> None:
    """One legend below the panels, for which the figure grows."""
    from matplotlib.lines import Line2D

    if len(entries) < 2:
        return
    lines: list[Line2D] = [Line2D([], [], color=color, linestyle=style) for color, style in entries.values()]
    labels = _shortened(list(entries))
    options: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "labelcolor": INK, "handlelength": 3}
    columns = min(len(labels), 12)
    while True:
        legend = figure.legend(lines, ["."] * len(labels), ncols=columns, **options)
        for text, label in zip(legend.get_texts(), labels, strict=True):
            text.set(text=label, parse_math=False)  # also if it begins with _ or has a $
        extent = legend.get_window_extent()
        if columns == 1 or extent.width <= figure.bbox.width:
            break
        legend.remove()
        columns -= 1
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, extent.width / figure.dpi), height + extent.height / figure.dpi)


def _add_color_bar(figure: Figure, axes: Any, color_by: Mapping[str, Sequence[float]]) -> None:
    from matplotlib.cm import ScalarMappable

    ((title, values),) = color_by.items()
    colormap, scale = _colors(values, logarithmic=True)
    bar = figure.colorbar(ScalarMappable(scale, colormap), ax=axes.tolist())
    bar.set_label(title, color=INK, parse_math=False)
    bar.ax.tick_params(which="both", colors=INK)
    bar.outline.set_visible(False)  # type: ignore[operator, unused-ignore]


def _draw_line(axes: Axes, points: list[tuple[float, float]], look: Look, smooth: float) -> None:
    color, style = look
    xs, raw = zip(*points, strict=True)
    values = [value if math.isfinite(value) else math.nan for value in raw]
    sparse = len(points) <= _MARKED
    if smooth:
        axes.plot(xs, values, color=color, alpha=0.25, linewidth=1)
        values = smoothed(values, smooth)
    # Draw lines with few points, as of evaluations, on top of noisy ones.
    dots: dict[str, Any] = {"marker": "o", "markersize": 4, "zorder": 3} if sparse else {}
    axes.plot(xs, values, style, color=color, linewidth=1.6, **dots)
    if lost := [at for at, value in points if not math.isfinite(value)]:
        edge = axes.get_xaxis_transform()
        axes.plot(lost, [0.0] * len(lost), "x", color=color, transform=edge, clip_on=False, zorder=3)


def dress(axes: Axes, title: str, x: str, values: list[float]) -> None:
    """Title, label, grid, and a log scale for a loss or perplexity that spans a factor of ten."""
    axes.set_facecolor("none")
    axes.set_title(title, color=INK, parse_math=False)
    axes.set_xlabel(x, color=INK, parse_math=False)
    axes.tick_params(which="both", colors=INK, labelcolor=INK)
    axes.grid(color=INK, alpha=0.25)
    axes.spines[:].set_color(INK)
    axes.spines[["top", "right"]].set_visible(False)
    finite = [value for value in values if math.isfinite(value)]
    metric = _metric(title)
    if ("loss" in metric or "perplexity" in metric) and finite and 0 < 10 * min(finite) <= max(finite):
        axes.set_yscale("log")


def figure_class() -> Any:
    """The class of figures; ImportError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install matplotlib") from error

    class NotebookFigure(Figure):  # type: ignore[misc, unused-ignore]
        """A Figure that a notebook displays without pyplot."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return NotebookFigure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


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
    _check_smooth(smooth)
    check_number("every", every, lambda seconds: seconds >= 0, "give the seconds between drawings, 0 or more")
    figure_class()  # so that a missing package is named now
    names = [names] if isinstance(names, str) else names
    shell = _shell() if path is None else None
    earlier = read_jsonl(history) if history is not None and Path(history).exists() and is_first() else []
    canvas = _Canvas(names, x, smooth, every, None if path is None else Path(path).absolute(), earlier)

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        canvas.add(row_of(state, values))

    logger = CodedLogger(
        write, "live_plot()" if path is None else f"live_plot(path={os.fspath(path)!r})", first_rank=True
    )
    weakref.finalize(logger, canvas.finish)  # also within a cell, for a logger that has no name there
    if shell is not None:
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
