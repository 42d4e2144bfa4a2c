"""Plots of logs.

A plot is a matplotlib Figure of its own. Nothing here keeps figures open or touches those of pyplot, so there is nothing
to close, and a notebook shows the one that a cell returns.
"""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplib._core.checks import check_argument
from looplib.log._sinks import read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


Log = str | os.PathLike[str] | Sequence[Row]


_COUNTS = ("step", "epoch", "batch", "samples")


_STYLES = ("-", "--", ":", "-.")


_MARKED = 25  # a line of no more points than this shows each, and is not smoothed


def plot(
    logs: Log | Mapping[str, Log],
    names: str | Sequence[str] | None = None,
    *,
    x: str = "step",
    smooth: float = 0.0,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Plot a log, or several runs beside each other, with a panel for each metric.

    >>> import looplib as ll
    >>> rows = [{"step": step, "train/loss": 1 / step, "eval/loss": 2 / step} for step in range(1, 100)]
    >>> figure = ll.plot(rows)
    >>> [axes.get_title() for axes in figure.axes]
    ['loss']
    >>> figure = ll.plot({"small": rows, "large": rows}, "eval/loss", smooth=0.9)  # paths of logs do as well

    What comes after the last slash of a name is its metric and before it its source, so `train/loss` and `eval/loss`
    share a panel. One run has a colour for each source. Several runs have a colour each, and where sources share a
    panel, a line style for each source.
    Losses and perplexities are drawn on a log scale where they span a factor of ten. A value that is infinite or NaN
    is a cross at the lower edge. Where a run went back to a checkpoint, what it did again replaces what was there.

    Args:
        logs: the path of a `jsonl` log, or its rows as `read_jsonl` gives them; or a dict of these, by labels.
        names: what to draw, in this order: metrics (`"loss"`), full names (`"eval/auc"`) or all of a source
            (`"eval"`, `"eval/plain"`); all numbers by default.
        x: what to draw it over: `"step"`, `"epoch"`, `"samples"`, or any name in the same rows.
        smooth: from 0 to below 1, how much of the average before a point is kept at each; the line is then this
            exponential average, corrected for its beginning, and the values stand pale behind it. A line of at most
            25 points is drawn as it is, with a dot for each.
        path: a file to save it to as well, such as `"loss.png"` or `"loss.pdf"`; its folders are made where missing.

    Returns:
        A `matplotlib.figure.Figure`, to change at will; a notebook shows it.

    Raises:
        ValueError: a name that no log has, a log without numbers to draw, a `smooth` out of its range.
        FileNotFoundError: a log that is not there.
        ImportError: without `pip install looplib[recipes]`.
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
    return read_jsonl(log) if isinstance(log, (str, os.PathLike)) else log


def _lines(rows: Sequence[Row], x: str) -> dict[str, list[tuple[float, float]]]:
    """The points of each name, without those that were drawn again after going back to a checkpoint."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        at = row.get(x)
        if not isinstance(at, (int, float)):
            continue
        step = row.get("step", at)
        for name, value in row.items():
            if name in _COUNTS or name == x or not isinstance(value, (int, float)):
                continue
            line = points.setdefault(name, [])
            while line and line[-1][0] >= step:
                line.pop()
            line.append((step, at, value))
    return {name: [(at, value) for _, at, value in line] for name, line in points.items()}


def _split(name: str) -> tuple[str, str]:
    source, _, metric = name.rpartition("/")
    return source, metric


def _panels(
    lines: Mapping[str, Mapping[str, Any]], names: str | Sequence[str] | None, x: str
) -> dict[str, list[str]]:
    """The full names in each panel, by its title."""
    there = list(dict.fromkeys(name for run in lines.values() for name in run))
    if not there:
        raise ValueError(f"there is nothing to draw: no row of {_listed(lines)} has a number beside its {x!r}")
    if isinstance(names, str):
        names = [names]
    panels: dict[str, list[str]] = {}
    for wanted in [_split(name)[1] for name in there] if names is None else names:
        found = _panels_of(wanted, there)
        if not found:
            raise ValueError(f"no log has {wanted!r}; there are {', '.join(there)}")
        panels |= found
    return panels


def _panels_of(wanted: str, there: Iterable[str]) -> dict[str, list[str]]:
    """One for a name or a metric, or else one for each metric of a source."""
    panels: dict[str, list[str]] = {}
    for name in there:
        if wanted in (name, _split(name)[1]):
            panels.setdefault(wanted, []).append(name)
    if not panels:
        for name in there:
            if name.startswith(f"{wanted}/"):
                panels.setdefault(f"{wanted} {_split(name)[1]}", []).append(name)
    return {names[0] if len(names) == 1 else title: names for title, names in panels.items()}


def _listed(runs: Iterable[str]) -> str:
    return ", ".join(repr(label) for label in runs if label) or "the log"


Lines = Mapping[str, Mapping[str, list[tuple[float, float]]]]  # of each run, by label: the points of each name


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
    """A figure with so many panels."""
    columns = min(count, 3 if count > 4 else 2)
    down = -(-count // columns)
    figure = figure_of(figsize=(4.8 * columns + 0.8, 3.2 * down), layout="constrained")
    grid = list(figure.subplots(down, columns, squeeze=False).ravel())
    for axes in grid[count:]:
        axes.remove()
    return figure, grid[:count]


@dataclass
class _Key:
    """Colours and styles of lines, and their legend.

    Of one run each source has a colour, and stands in the legend where sources share a panel. Of several runs each has
    a colour, and a source that shares a panel has a line style.

    Attributes:
        labels: of the runs.
        sources: of all names that are drawn, each with one of these names.
        mixed: those that share a panel with others.
        entries: of the legend so far.
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
            {source: _STYLES[place % len(_STYLES)] for place, source in enumerate(self.mixed)} if self.several else {}
        )

    def look(self, label: str, name: str) -> tuple[str, str]:
        """The colour and the style of a line."""
        source = _split(name)[0]
        place = self.labels.index(label) if self.several else list(self.sources).index(source)
        return f"C{place}", self.styles.get(source, "-")

    def note(self, label: str, name: str, line: Any) -> None:
        """A line was drawn."""
        source = _split(name)[0]
        if self.several:
            self.entries.setdefault(label, _sample(self.look(label, name)[0], "-"))
        elif source in self.mixed:  # else the title says it all
            self.entries.setdefault(source or name, line)

    def add_to(self, figure: Figure) -> None:
        entries = list(self.entries.items())
        entries += [(source or self.sources[source], _sample("0.4", style)) for source, style in self.styles.items()]
        if len(entries) > 1:
            labels, handles = zip(*entries, strict=True)
            title = None if self.several else self.labels[0] or None
            figure.legend(handles, labels, loc="outside right upper", frameon=False, title=title)


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
    places = [at for at, _ in points]
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    sparse = len(points) <= _MARKED
    if smooth and not sparse:
        axes.plot(places, values, color=colour, alpha=0.25, linewidth=1)
        values = smoothed(values, smooth)
    # Few points, of an evaluation, stand out from a noisy line that they lie in.
    dots: dict[str, Any] = {"marker": "o", "markersize": 5, "markeredgecolor": "white", "zorder": 3} if sparse else {}
    (line,) = axes.plot(places, values, style, color=colour, linewidth=1.6, **dots)
    lost = [at for at, value in points if not math.isfinite(value)]
    if lost:
        edge = axes.get_xaxis_transform()
        axes.plot(lost, [0.0] * len(lost), "x", color=colour, transform=edge, clip_on=False, zorder=3)
    return line


def dress(axes: Axes, title: str, x: str, values: list[float]) -> None:
    from matplotlib.ticker import EngFormatter, LogFormatter, MaxNLocator

    class PlainLog(LogFormatter):
        def __call__(self, value: float, pos: int | None = None) -> str:
            return f"{value:g}" if super().__call__(value, pos) else ""

    axes.set_title(title)
    axes.set_xlabel(x)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if x in _COUNTS:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    finite = [value for value in values if math.isfinite(value)]
    metric = _split(title)[1]
    if finite and ("loss" in metric or "perplexity" in metric) and 0 < 10 * min(finite) <= max(finite):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PlainLog())
        axes.yaxis.set_minor_formatter(PlainLog(minor_thresholds=(2, 0.5)))


def smoothed(values: Iterable[float], keep: float) -> list[float]:
    """The exponential average at each value, corrected for its beginning as Adam's moments are; NaN is left out.

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
    made: Figure = _figure_class()(**options)
    return made


@functools.cache
def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install looplib[recipes]") from error

    class Picture(Figure):
        """A Figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Picture


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
