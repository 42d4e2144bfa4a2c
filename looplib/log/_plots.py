"""Plots of logs.

A plot is a separate matplotlib Figure that pyplot does not know about, so there is nothing to close, and a notebook
shows the figure that a cell returns.
"""

from __future__ import annotations

import functools
import io
import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplib._core.checks import check, check_argument
from looplib._core.mappings import without
from looplib.log._sinks import COUNTS, read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


Log = str | os.PathLike[str] | Sequence[Row]


_STYLES = ("-", "--", ":", "-.")


_GREY = "#797979"  # text and axes: on white and on a dark page, its contrast is above 4


_MARKED = 25  # lines with at most this many points are not smoothed and show each point


def plot(
    logs: Log | Mapping[str, Log],
    names: str | Sequence[str] | None = None,
    *,
    x: str = "step",
    smooth: float = 0.0,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Plot a log, or compare several runs, with one panel for each metric.

    >>> import looplib as ll
    >>> rows = [{"step": step, "train/loss": 1 / step, "eval/loss": 2 / step} for step in range(1, 100)]
    >>> figure = ll.plot(rows)
    >>> [axes.get_title() for axes in figure.axes]
    ['loss']
    >>> figure = ll.plot({"small": rows, "large": rows}, "eval/loss", smooth=0.9)  # paths of logs do as well

    The part of a name after the last slash is its metric and the part before it is its source, so `train/loss` and
    `eval/loss` share a panel. A single run has one color per source. Several runs have one color each, and sources
    that share a panel differ in line style.

    Losses and perplexities are drawn on a log scale if they span a factor of ten. Infinite and NaN values are crosses
    at the lower edge. If a run went back to a checkpoint, its repeated steps replace the earlier ones.

    Args:
        logs: path of a `jsonl` log, or its rows as returned by `read_jsonl`; or a dict of these by label.
        names: what to draw, in this order: metrics (`"loss"`), full names (`"eval/auc"`), or all metrics of a source
            (`"eval"`, `"eval/plain"`). Defaults to all numbers.
        x: horizontal axis: `"step"`, `"epoch"`, `"samples"`, or any name in the same rows.
        smooth: from 0 to below 1, weight of the previous average in an exponential moving average. The line is this
            average, corrected for its start, and the raw values are drawn in a pale color behind it. Lines with at
            most 25 points are not smoothed and show a dot for each.
        path: file to save the figure to as well, such as `"loss.png"` or `"loss.pdf"`. Missing folders are created.

    Returns:
        A `matplotlib.figure.Figure`, which you can change. A notebook displays it.

    Raises:
        ValueError: no log has the name, a log has no numbers to draw, or `smooth` is out of range.
        FileNotFoundError: the log does not exist.
        ImportError: matplotlib is not installed.
    """
    advice = "give the share of the past to keep at each point, from 0 to below 1"
    check_argument(0 <= smooth < 1, "smooth", smooth, advice)
    runs = logs if isinstance(logs, Mapping) else {"": logs}
    lines = {label: _lines(_rows(log), x) for label, log in runs.items()}
    panels = _panels(lines, names, x)
    figure = _draw(lines, panels, x, smooth)
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


def _lines(rows: Sequence[Row], x: str) -> dict[str, list[tuple[float, float]]]:
    """Points of each name, without those that were repeated after going back to a checkpoint."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    axis = {x, *COUNTS}
    for row in [row for row in rows if isinstance(row.get(x), (int, float))]:
        step = row.get("step", row[x])
        for name, value in _numbers_in(without(row, axis)).items():
            line = points.setdefault(name, [])
            del line[bisect_left(line, (step,)) :]
            line.append((step, row[x], value))
    return {name: [(at, value) for _, at, value in line] for name, line in points.items()}


def _numbers_in(row: Row) -> dict[str, int | float]:
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def _split(name: str) -> tuple[str, str]:
    source, _, metric = name.rpartition("/")
    return source, metric


def _panels(
    lines: Mapping[str, Mapping[str, Any]], names: str | Sequence[str] | None, x: str
) -> dict[str, list[str]]:
    """Full names in each panel, by panel title."""
    available = list(dict.fromkeys(chain.from_iterable(lines.values())))
    logs = ", ".join(map(repr, filter(None, lines))) or "the log"
    check(available, f"there is nothing to draw: no row of {logs} has a number beside its {x!r}")
    if isinstance(names, str):
        names = [names]
    panels: dict[str, list[str]] = {}
    for wanted in [_split(name)[1] for name in available] if names is None else names:
        matches = _panels_of(wanted, available)
        check(matches, f"no log has {wanted!r}; there are {', '.join(available)}")
        panels |= matches
    return panels


def _panels_of(wanted: str, available: Iterable[str]) -> dict[str, list[str]]:
    """Panels for a requested name: one for a full name or a metric, or one for each metric of a source."""
    names = [name for name in available if wanted in (name, _split(name)[1])]
    panels = {wanted: names} if names else _panels_of_source(wanted, available)
    return {names[0] if len(names) == 1 else title: names for title, names in panels.items()}


def _panels_of_source(source: str, available: Iterable[str]) -> dict[str, list[str]]:
    panels: dict[str, list[str]] = {}
    for name in [name for name in available if name.startswith(f"{source}/")]:
        panels.setdefault(f"{source} {_split(name)[1]}", []).append(name)
    return panels


Lines = Mapping[str, Mapping[str, list[tuple[float, float]]]]  # label of a run -> name -> points


def _draw(lines: Lines, panels: Mapping[str, list[str]], x: str, smooth: float) -> Figure:
    figure, grid = _grid(len(panels))
    key = _key(lines, panels)
    for axes, (title, names) in zip(grid, panels.items(), strict=False):
        drawn = [(label, name) for label, run in lines.items() for name in names if name in run]
        for label, name in drawn:
            key.note(label, name, _draw_line(axes, lines[label][name], *key.look(label, name), smooth))
        dress(axes, title, x, [value for label, name in drawn for _, value in lines[label][name]])
    key.add_to(figure)
    return figure


def _grid(count: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels."""
    columns = min(count, 3 if count > 4 else 2)
    down = -(-count // columns)
    figure = figure_of(figsize=(4.8 * columns + 0.8, 3.2 * down), layout="constrained")
    grid = list(figure.subplots(down, columns, squeeze=False).ravel())
    for axes in grid[count:]:
        axes.remove()
    return figure, grid[:count]


@dataclass
class _Key:
    """Colors and line styles, and their legend.

    With one run, each source has a color, and is in the legend if sources share a panel. With several runs, each run
    has a color, and a source that shares a panel has a line style.

    Attributes:
        labels: labels of the runs.
        sources: sources of all names drawn, each with one of its names.
        mixed: sources that share a panel with others.
        entries: legend entries so far.
    """

    labels: list[str]
    sources: dict[str, str]
    mixed: list[str]
    entries: dict[str, Any] = field(default_factory=dict)

    @property
    def several(self) -> bool:
        return len(self.labels) > 1

    @property
    def styles(self) -> dict[str, str]:
        return (
            {source: _STYLES[index % len(_STYLES)] for index, source in enumerate(self.mixed)} if self.several else {}
        )

    def look(self, label: str, name: str) -> tuple[str, str]:
        """Color and style of a line."""
        source = _split(name)[0]
        index = self.labels.index(label) if self.several else list(self.sources).index(source)
        return f"C{index}", self.styles.get(source, "-")

    def note(self, label: str, name: str, line: Any) -> None:
        """Record that a line was drawn."""
        source = _split(name)[0]
        if self.several:
            self.entries.setdefault(label, _sample(self.look(label, name)[0], "-"))
        elif source in self.mixed:  # otherwise the title is enough
            self.entries.setdefault(source or name, line)

    def add_to(self, figure: Figure) -> None:
        entries = list(self.entries.items())
        entries += [(source or self.sources[source], _sample(_GREY, style)) for source, style in self.styles.items()]
        if len(entries) > 1:
            labels, handles = zip(*entries, strict=True)
            title = None if self.several else self.labels[0] or None
            legend = figure.legend(handles, labels, loc="outside right upper", frameon=False, title=title)
            for text in (legend.get_title(), *legend.get_texts()):
                text.set_color(_GREY)


def _key(lines: Lines, panels: Mapping[str, list[str]]) -> _Key:
    sources: dict[str, str] = {}
    mixed: dict[str, None] = {}
    for names in panels.values():
        inside = dict.fromkeys(_split(name)[0] for name in names)
        for name in names:
            sources.setdefault(_split(name)[0], name)
        mixed |= inside if len(inside) > 1 else {}
    return _Key(list(lines), sources, list(mixed))


def _sample(colour: str, style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=style, linewidth=1.6)


def _draw_line(axes: Axes, points: list[tuple[float, float]], colour: str, style: str, smooth: float) -> Any:
    xs, raw = zip(*points, strict=True)
    values = [value if math.isfinite(value) else math.nan for value in raw]
    sparse = len(points) <= _MARKED
    if smooth and not sparse:
        axes.plot(xs, values, color=colour, alpha=0.25, linewidth=1)
        values = smoothed(values, smooth)
    # Draw lines with few points, as of evaluations, on top of noisy ones.
    dots: dict[str, Any] = {"marker": "o", "markersize": 5, "markeredgecolor": "white", "zorder": 3} if sparse else {}
    (line,) = axes.plot(xs, values, style, color=colour, linewidth=1.6, **dots)
    _mark_lost(axes, points, colour)
    return line


def _mark_lost(axes: Axes, points: list[tuple[float, float]], colour: str) -> None:
    """Draw a cross at the lower edge for each value that is infinite or NaN."""
    if lost := [at for at, value in points if not math.isfinite(value)]:
        edge = axes.get_xaxis_transform()
        axes.plot(lost, [0.0] * len(lost), "x", color=colour, transform=edge, clip_on=False, zorder=3)


def dress(axes: Axes, title: str, x: str, values: list[float]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_title(title, color=_GREY)
    axes.set_xlabel(x, color=_GREY)
    axes.tick_params(which="both", colors=_GREY)
    axes.spines[:].set_color(_GREY)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if x in COUNTS:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _scale(axes, _split(title)[1], [*filter(math.isfinite, values)])


def _scale(axes: Axes, metric: str, finite: list[float]) -> None:
    """A log scale for a loss or perplexity that spans a factor of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    spans_ten = bool(finite) and 0 < 10 * min(finite) <= max(finite)
    if spans_ten and ("loss" in metric or "perplexity" in metric):
        axes.set_yscale("log")
        decades = math.log10(max(finite) / min(finite))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades <= 3 else (1,)))  # evenly spaced
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: plain_number(value))


def plain_number(value: float, digits: int = 6) -> str:
    """Format a number without an exponent, unless it is very small or large.

    >>> plain_number(9e-05), plain_number(0.00031415, digits=2), plain_number(1e-09)
    ('0.00009', '0.00031', '1e-09')
    """
    text = f"{value:.{digits}g}"
    return f"{Decimal(text):f}" if 1e-6 <= abs(value) < 1e7 else text


def smoothed(values: Iterable[float], keep: float) -> list[float]:
    """Exponential moving average at each value, bias-corrected as in Adam. NaN values are left out.

    >>> smoothed([1.0, 2.0], 0.5)  # (0.5 * 1) / 0.5, (0.25 * 1 + 0.5 * 2) / 0.75
    [1.0, 1.6666666666666667]
    """
    total = weight = 0.0
    averages = []
    for value in values:
        if not math.isnan(value):
            total = keep * total + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        averages.append(math.nan if math.isnan(value) else total / weight)
    return averages


def figure_of(**options: Any) -> Figure:
    made: Figure = figure_class()(**options)
    return made


def figure_class() -> Any:
    """The class of figures; ImportError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install matplotlib") from error
    return _figure_class(Figure)


@functools.cache
def _figure_class(base: Any) -> Any:
    class Figure(base):  # type: ignore[misc]
        """A Figure that a notebook displays without pyplot, on a light page or a dark one."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", transparent=True)
            return file.getvalue()

    return Figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
