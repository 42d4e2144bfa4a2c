"""Plots hold the numbers that were logged."""

import gc
import itertools
import math
import operator
import subprocess
import sys
import textwrap

import matplotlib.image
import pytest
import torch
from matplotlib.figure import Figure
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


def labels(axes):
    legend = axes.get_legend()
    return legend and [text.get_text() for text in legend.get_texts()]


def test_train_and_eval_of_a_metric_share_a_panel():
    rows = rows_of()
    axes = plot(rows).axes
    assert [(a.get_title(), a.get_xlabel(), a.get_yscale(), labels(a)) for a in axes] == [
        ("loss", "step", "log", ["train", "eval"]),
        ("lr", "step", "linear", None),
        ("eval/auc", "step", "linear", None),
    ]
    names = ["train/loss", "eval/loss", "lr", "eval/auc"]
    lines = [line for each in axes for line in each.lines]
    assert [points(line) for line in lines] == [expected(rows, name) for name in names]
    assert lines[0].get_color() != lines[1].get_color() == lines[3].get_color()
    assert labels(plot([{"step": 1, "loss": 1.0, "eval/loss": 2.0}]).axes[0]) == ["loss", "eval"]


def test_runs_have_colours_and_sources_line_styles(tmp_path):
    log = ll.jsonl(tmp_path / "large.jsonl")
    for row in rows_of():
        log(ll.TrainState(step=row["step"]), {name: row[name] for name in row if "/" in name})
    small = rows_of(scale=3.0)
    both, auc = plot({"small": small, "large": tmp_path / "large.jsonl"}, ["loss", "auc"]).axes
    assert [points(line) for line in both.lines] == [
        expected(rows, name) for rows in (small, rows_of()) for name in ("train/loss", "eval/loss")
    ]
    assert kinds(both.lines) == [("C0", "-"), ("C0", "--"), ("C1", "-"), ("C1", "--")]
    assert labels(both) == ["small train", "small eval", "large train", "large eval"]
    assert kinds(auc.lines) == [("C0", "-"), ("C1", "-")]
    assert labels(auc) == ["small", "large"]


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
            "no row has a number beside its 'step'",
        ),
        (lambda: plot(rows_of(), smooth=1), ValueError, "smooth is 1"),
        (lambda: plot(["a.jsonl", "b.jsonl"]), TypeError, "dict by label"),
        (lambda: plot("none.jsonl"), FileNotFoundError, "none.jsonl"),
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


def test_a_notebook_cell_is_redrawn_in_its_place(tmp_path):
    code = f"""
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
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True, cwd=tmp_path)
