"""Plots hold the numbers that were logged."""

import colorsys
import gc
import io
import itertools
import math
import operator
import sys
import textwrap

import matplotlib.image
import pytest
import torch
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from ranks import launch, run_script
from shared import assert_each_refused

import looplib as ll
from looplib.log import live_plot, plot


def rows_of(count=100, scale=1.0):
    rows = []
    for step in range(1, count + 1):
        rows.append({"step": step, "epoch": step // 20, "samples": 8 * step, "train/loss": scale / step, "lr": 1.0})
        if step % 20 == 0:
            rows.append(
                {"step": step, "epoch": step // 20, "samples": 8 * step, "eval/loss": 2 / step, "eval/auc": 0.5}
            )
    return rows


def points(line):
    return [tuple(map(float, point)) for point in zip(*line.get_data(), strict=True)]


def expected(rows, name, x="step"):
    return [(float(row[x]), row[name]) for row in rows if name in row]


def kinds(lines):
    return [(line.get_color(), line.get_linestyle()) for line in lines]


def labels(figure):
    """The texts of the legend, of which there is at most one."""
    assert not any(axes.get_legend() for axes in figure.axes)
    (*more, legend) = figure.legends or [None]
    assert not more
    return legend and [text.get_text() for text in legend.get_texts()]


def handles(figure):
    """The look of each entry of the legend."""
    return dict(zip(labels(figure), kinds(figure.legends[0].get_lines()), strict=True))


def test_train_and_eval_of_a_metric_share_a_panel():
    rows = rows_of()
    figure = plot(rows)
    axes = figure.axes
    assert [(a.get_title(), a.get_xlabel(), a.get_yscale()) for a in axes] == [
        ("loss", "step", "log"),
        ("lr", "step", "linear"),
        ("eval/auc", "step", "linear"),
    ]
    names = ["train/loss", "eval/loss", "lr", "eval/auc"]
    lines = [line for each in axes for line in each.lines]
    assert [points(line) for line in lines] == [expected(rows, name) for name in names]
    assert lines[0].get_color() != lines[1].get_color() == lines[3].get_color()
    assert handles(figure) == dict(zip(["train", "eval"], kinds(lines), strict=False))
    assert labels(plot([{"step": 1, "loss": 1.0, "eval/loss": 2.0}])) == ["loss", "eval"]
    assert labels(plot(rows, ["lr", "auc"])) is None


def test_runs_have_colours_and_sources_line_styles(tmp_path):
    log = ll.jsonl(tmp_path / "large.jsonl")
    for row in rows_of():
        log(ll.TrainState(step=row["step"]), {name: row[name] for name in row if "/" in name})
    small = rows_of(scale=3.0)
    figure = plot({"small": small, "large": tmp_path / "large.jsonl"}, ["loss", "auc"])
    both, auc = figure.axes
    assert [points(line) for line in both.lines] == [
        expected(rows, name) for rows in (small, rows_of()) for name in ("train/loss", "eval/loss")
    ]
    one, other = (line.get_color() for line in auc.lines)
    assert one != other
    assert kinds(both.lines) == [(one, "-"), (one, "--"), (other, "-"), (other, "--")]
    assert kinds(auc.lines) == [(one, "-"), (other, "-")]
    entries = handles(figure)
    assert list(entries) == ["small", "large", "train", "eval"]
    assert [entries["small"], entries["large"]] == kinds(auc.lines)
    assert [entries[name][1] for name in ("train", "eval")] == ["-", "--"]
    assert not {one, other} & {entries[name][0] for name in ("train", "eval")}


def runs_of(count, name="run {}"):
    return {name.format(k): rows_of(40, scale=1.0 + k) for k in range(count)}


def contrast(color, page):
    """Contrast of two colors, by WCAG 2."""

    def luminance(color):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return sum(map(operator.mul, (0.2126, 0.7152, 0.0722), parts))

    dark, light = sorted([luminance(color), luminance(page)])
    return (light + 0.05) / (dark + 0.05)


def hue(color):
    """Hue in degrees, from the blue of the first run upward."""
    return (360 * colorsys.rgb_to_hsv(*to_rgb(color))[0] - 180) % 360


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [32, 2, 8, 9, 60])
def test_runs_are_ordered_by_color_and_told_apart_with_one_legend_outside_of_the_panels(count):
    figure = plot(runs_of(count))
    figure.draw_without_rendering()
    for axes in figure.axes[-2:]:  # a source each, also with few runs
        hues = [hue(line.get_color()) for line in axes.lines]
        assert hues == sorted(set(hues))
        if count <= 32:
            for one, other in itertools.combinations(axes.lines, 2):
                apart = abs(hue(one.get_color()) - hue(other.get_color())) > 10
                assert apart or one.get_linestyle() != other.get_linestyle()
    assert labels(figure)[:count] == [f"run {k}" for k in range(count)]
    assert list(handles(figure).values())[:count] == kinds(axes.lines)
    assert len(figure.axes) == (3 if count <= 8 else 4)  # line styles tell sources, or runs, apart
    box = figure.legends[0].get_window_extent()
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in figure.axes)
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [32, 2])
@pytest.mark.parametrize(
    "name", ["_{}$x$", "a$_{}", "one\nline {}", "a" * 400 + "{}" + "b" * 400, "name {} " + "c" * 300]
)
def test_any_name_stands_in_the_legend_cut_in_the_middle_and_still_different(name, count):
    runs = runs_of(count, name)
    figure = plot(runs, "lr")
    figure.draw_without_rendering()
    shown = labels(figure)
    assert len(set(shown)) == count
    for text, run in zip(shown, runs, strict=True):
        start, cut, end = text.partition("…")
        plain = run.replace("\n", " ")
        assert text == plain if not cut else plain.startswith(start) and plain.endswith(end) and len(plain) > 32
        assert len(text) <= 32 or "aaa" in text
        if cut:
            assert abs(len(start) - len(end)) <= 1
    box = figure.legends[0].get_window_extent()
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in figure.axes)
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_the_legend_does_not_shrink_the_panels():
    heights, widths = [], []
    for rows in ({"only": rows_of()}, runs_of(32)):
        figure = plot(rows, "lr")
        figure.draw_without_rendering()
        heights.append(figure.axes[0].bbox.height)
        widths.append(figure.axes[0].bbox.width)
    assert heights == pytest.approx([heights[0]] * 2, rel=0.1)
    assert widths == pytest.approx([widths[0]] * 2, rel=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rates", "scale"),
    [([0.1, 0.001, 0.01, 0.01], LogNorm), ([0.0, 1.0, 0.5, 0.5], Normalize), ([0.3] * 4, Normalize)],
)
def test_a_hyperparameter_colors_the_lines_of_members(rates, scale):
    figure = plot(runs_of(4), ["train/loss", "eval/loss"], color_by={"learning rate": rates})
    figure.draw_without_rendering()
    *panels, bar = figure.axes
    (colors,) = {collection for collection in bar.collections if isinstance(collection, QuadMesh)}
    assert (bar.get_ylabel(), labels(figure)) == ("learning rate", None)
    assert type(colors.norm) is scale
    normed = colors.cmap(scale(min(rates), max(rates))(rates))
    for axes in panels:
        assert [to_hex(line.get_color()) for line in axes.lines] == [to_hex(color) for color in normed]
        assert {line.get_linestyle() for line in axes.lines} == {"-"}
        assert not bar.get_tightbbox().overlaps(axes.get_tightbbox())
    order = sorted(range(4), key=lambda run: rates[run])
    hues = [hue(panels[0].lines[run].get_color()) for run in order]
    assert hues == sorted(hues)


@pytest.mark.slow
def test_all_colors_read_on_a_light_and_on_a_dark_page():
    figure = plot(runs_of(32), ["train/loss", "auc"])
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert {text.get_text() for text in texts} >= {"train/loss", "eval/auc", "step", "run 31"}
    colors = {line.get_color() for axes in figure.axes for line in axes.lines} | {
        to_hex(text.get_color()) for text in texts
    }
    for page in ("#ffffff", "#0d1117"):
        assert min(contrast(color, page) for color in colors) >= 3, page  # WCAG 1.4.11
    file = io.BytesIO()
    figure.savefig(file, format="png")
    file.seek(0)
    assert matplotlib.image.imread(file)[0, 0, 3] == 0


def test_a_source_stands_for_everything_under_it():
    names = ["train/loss", "eval/plain/loss", "eval/plain/auc", "eval/shifted/loss"]
    rows = [{"step": i, "samples": 8 * i, **{name: float(k) for k, name in enumerate(names)}} for i in range(3)]
    for wanted, panels in (
        ("eval/plain", {"eval/plain/loss": names[1:2], "eval/plain/auc": names[2:3]}),
        (["auc", "loss"], {"eval/plain/auc": names[2:3], "loss": [names[0], names[1], names[3]]}),
    ):
        axes = plot(rows, wanted, x="samples").axes
        assert [each.get_title() for each in axes] == list(panels)
        lines = [[expected(rows, name, "samples") for name in panel] for panel in panels.values()]
        assert [[points(line) for line in each.lines] for each in axes] == lines
    with pytest.raises(ValueError, match=r"'eval/pl'.*train/loss"):
        plot(rows, "eval/pl")


def test_values_that_are_not_finite_are_crosses_at_the_edge():
    for bad in (math.nan, math.inf, -math.inf):
        rows = [{"step": step, "loss": bad if step == 3 else 1.0 / step, "note": "text"} for step in range(1, 6)]
        (axes,) = plot(rows).axes
        line, crosses = axes.lines
        assert math.isnan(line.get_ydata()[2])
        assert (points(crosses), crosses.get_marker()) == ([(3.0, 0.0)], "x")


def test_losses_have_a_log_scale_where_it_helps():
    for name, values, scale in (
        ("loss", [1.0, 0.1], "log"),
        ("loss", [1.0, 0.11], "linear"),
        ("loss", [1.0, 0.0], "linear"),
        ("eval/perplexity", [100.0, 3.0], "log"),
        ("accuracy", [1.0, 0.01], "linear"),
        ("loss", [math.nan], "linear"),
    ):
        (axes,) = plot([{"step": step, name: value} for step, value in enumerate(values)]).axes
        assert axes.get_yscale() == scale


def test_a_smooth_line_stands_before_its_values_also_if_they_are_few():
    rows = rows_of()
    (axes,) = plot(rows, "loss", smooth=0.9).axes
    weights = [0.9**k for k in range(100)]
    for name, values, line in zip(("train/loss", "eval/loss"), axes.lines[::2], axes.lines[1::2], strict=True):
        assert points(values) == expected(rows, name)
        past = [values.get_ydata()[step::-1] for step in range(len(values.get_ydata()))]
        means = [math.fsum(map(operator.mul, weights, ys)) / math.fsum(weights[: len(ys)]) for ys in past]
        assert list(line.get_ydata()) == pytest.approx(means)


def test_a_plot_is_saved_and_shown_without_pyplot(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    figure = plot(rows_of(), path=tmp_path / "pictures" / "loss.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "pictures" / "loss.png").shape
    assert (width, height) == tuple(int(inches * figure.dpi) for inches in figure.get_size_inches())
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused():
    assert_each_refused(
        (lambda: plot(rows_of(), "acc"), ValueError, "'acc'.*train/loss, lr, eval/loss, eval/auc"),
        (
            lambda: plot({"a": [], "b": [{"step": 1, "note": "text"}]}),
            ValueError,
            "no row has a number beside its 'step'; the rows have step, note",
        ),
        (lambda: plot(rows_of(), x="nope"), ValueError, "beside its 'nope'; the rows have step,.* train/loss"),
        (lambda: plot(rows_of(), smooth=1), ValueError, "smooth is 1"),
        (lambda: plot(["a.jsonl", "b.jsonl"]), TypeError, "dict by label"),
        (lambda: plot("none.jsonl"), FileNotFoundError, "none.jsonl"),
        (lambda: plot(runs_of(2), color_by=[0.1, 0.2]), TypeError, "color_by is a list.*title"),
        (lambda: plot(runs_of(2), color_by={"lr": "ab"}), TypeError, "'lr'.*str.*one number for each run"),
        (lambda: plot(runs_of(2), color_by={"lr": [1, "b"]}), TypeError, "'lr'.*'b'.*one number for each run"),
        (lambda: plot(runs_of(2), color_by={"lr": [0.1]}), ValueError, "'lr'.* 1 numbers for 2 runs"),
        (lambda: plot(runs_of(2), color_by={"lr": [0.1, math.nan]}), ValueError, "'lr'.*nan"),
        (lambda: plot(runs_of(2), color_by={"lr": [1, 2], "seed": [1, 2]}), ValueError, "2 titles"),
        (live_plot, RuntimeError, "no notebook.*path="),
    )


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (lambda: plot(rows_of()), lambda: live_plot(path=tmp_path / "loss.png")):
        with pytest.raises(ImportError, match="pip install matplotlib"):
            draw()


class Drawings:
    """Number of rows in each drawing, as they are made, and a clock; a drawing takes 3 seconds."""

    def __init__(self, monkeypatch):
        self.made, self.now, self.real = [], 0.0, Figure.savefig
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(Figure, "savefig", lambda *args, **options: self.savefig(*args, **options))

    def savefig(self, figure, *args, **options):
        self.made.append(len(figure.axes[0].lines[0].get_xdata()))
        self.now += 3
        self.real(figure, *args, **options)


@pytest.fixture
def drawings(monkeypatch):
    yield Drawings(monkeypatch)
    gc.collect()  # which draws what the test has left


def test_drawing_takes_a_tenth_of_the_time_at_most(drawings, tmp_path):
    log = live_plot(path=tmp_path / "loss.png", every=0)
    times = []
    for step in range(1, 300):
        made = len(drawings.made)
        log(ll.TrainState(step=step), {"train/loss": 1.0 / step})
        if len(drawings.made) > made:
            times.append(drawings.now)
        drawings.now += 0.25
    assert len(times) >= 3
    assert all(30 <= after - before < 31 for before, after in itertools.pairwise(times))


@pytest.mark.slow
def test_a_live_plot_is_drawn_at_intervals_and_shows_all_of_a_continued_run(drawings, tmp_path):
    path, picture = tmp_path / "log.jsonl", tmp_path / "live" / "loss.png"
    assert repr(live_plot(path=str(picture))) == f"live_plot(path={str(picture)!r})"
    for steps, drawn in ((range(1, 6), 1), (range(4, 8), 4)):  # the second run continues from a checkpoint at step 3
        log = ll.tee(ll.jsonl(path), live_plot(path=str(picture), every=3600, history=path))
        for step in steps:
            log(ll.TrainState(step=step), {"train/loss": torch.tensor(1.0 / step), "note": "text"})
        assert drawings.made[-1] == drawn
        first = picture.read_bytes()
        del log
        gc.collect()
        assert drawings.made[-1] == steps[-1]
        assert picture.read_bytes() != first


CELL = """
import looplib as ll
from looplib.log import live_plot
from looplib.log import plot
log = live_plot(every=3600)
for step in (1, 2, 3):
    log(ll.TrainState(step=step), {"train/loss": 1.0 / step})
"""


@pytest.mark.slow
def test_a_notebook_cell_is_redrawn_in_its_place(tmp_path):
    code = f"""
        import warnings
        warnings.simplefilter("error")
        from IPython.core.displaypub import CapturingDisplayPublisher
        from IPython.core.history import HistoryManager
        from IPython.core.interactiveshell import InteractiveShell
        HistoryManager.enabled = False
        shell = InteractiveShell.instance()
        shell.display_pub = CapturingDisplayPublisher()
        def shown(cell):
            shell.display_pub.outputs.clear()
            shell.run_cell(cell).raise_error()
            for out in shell.display_pub.outputs:
                assert out["data"]["image/png"]
            return [(out["update"], out["transient"]["display_id"]) for out in shell.display_pub.outputs]

        first = shown({CELL!r})
        assert [update for update, _ in first] == [False, True] and first[0][1] == first[1][1], first
        second = shown('for step in (4, 5): log(ll.TrainState(step=step), {{"train/loss": 0.1}})')
        assert [update for update, _ in second] == [False, True] and second[0][1] != first[0][1], second
        assert shown("1 + 1") == []
        unnamed = shown("def fit(log):\\n for step in (1, 2): log(ll.TrainState(step=step), dict(loss=0.1))\\nfit(live_plot(every=3600))")
        assert [update for update, _ in unnamed] == [False, True], unnamed
        hooks = len(shell.events.callbacks["post_execute"])
        shown("import gc; del log; gc.collect()")
        assert len(shell.events.callbacks["post_execute"]) == hooks - 1
        figure = shell.run_cell("plot([dict(step=1, loss=2.0)])").result
        assert "image/png" in shell.display_formatter.format(figure)[0]
    """
    (tmp_path / "notebook.py").write_text(textwrap.dedent(code))
    launch(0, run_script, str(tmp_path / "notebook.py"))
