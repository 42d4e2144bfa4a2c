"""Plots hold the numbers that were logged."""

import builtins
import gc
import math
import operator
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch
from matplotlib.figure import Figure

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
    figure = plot(rows)
    loss, lr, auc = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["loss", "lr", "eval/auc"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["step"] * 3
    assert [points(line) for line in loss.lines] == [expected(rows, name) for name in ("train/loss", "eval/loss")]
    assert points(lr.lines[0]) == expected(rows, "lr")
    assert points(auc.lines[0]) == expected(rows, "eval/auc")
    assert loss.lines[0].get_color() != loss.lines[1].get_color() == auc.lines[0].get_color()
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear", "linear"]
    assert [labels(axes) for axes in figure.axes] == [["train", "eval"], None, None]
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
    rows = [
        {
            "step": step,
            "samples": 8 * step,
            "train/loss": 1.0,
            "eval/plain/loss": 2.0,
            "eval/plain/auc": 0.5,
            "eval/shifted/loss": 3.0,
        }
        for step in range(3)
    ]
    plain = plot(rows, "eval/plain", x="samples")
    assert [axes.get_title() for axes in plain.axes] == ["eval/plain/loss", "eval/plain/auc"]
    assert points(plain.axes[0].lines[0]) == expected(rows, "eval/plain/loss", "samples")
    figure = plot(rows, ["auc", "eval", "loss"])
    assert [axes.get_title() for axes in figure.axes] == ["eval/plain/auc", "loss", "eval/plain/auc", "loss"]
    assert [len(axes.lines) for axes in figure.axes] == [1, 2, 1, 3]
    assert points(figure.axes[1].lines[1]) == expected(rows, "eval/shifted/loss")
    with pytest.raises(ValueError, match=r"'eval/pl'.*train/loss"):
        plot(rows, "eval/pl")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_crosses_at_the_edge(bad):
    rows = [{"step": step, "loss": bad if step == 3 else 1.0 / step, "note": "text"} for step in range(1, 6)]
    (axes,) = plot(rows).axes
    line, crosses = axes.lines
    assert math.isnan(line.get_ydata()[2])
    assert points(crosses) == [(3.0, 0.0)]
    assert crosses.get_marker() == "x"


@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [
        ("loss", [1.0, 0.1], "log"),
        ("loss", [1.0, 0.11], "linear"),
        ("loss", [1.0, 0.0], "linear"),
        ("loss", [10.0, -1.0], "linear"),
        ("eval/perplexity", [100.0, 3.0], "log"),
        ("accuracy", [1.0, 0.01], "linear"),
        ("loss", [math.nan], "linear"),
    ],
)
def test_losses_have_a_log_scale_where_it_helps(name, values, scale):
    (axes,) = plot([{"step": step, name: value} for step, value in enumerate(values)]).axes
    assert axes.get_yscale() == scale


def test_a_smooth_line_stands_before_its_values_and_few_points_stay():
    rows = rows_of()
    (axes,) = plot(rows, "loss", smooth=0.9).axes
    values, line, few = axes.lines
    assert points(values) == expected(rows, "train/loss")
    weights = [0.9**k for k in range(100)]
    past = [values.get_ydata()[step::-1] for step in range(100)]
    means = [math.fsum(map(operator.mul, weights, ys)) / math.fsum(weights[: len(ys)]) for ys in past]
    assert list(line.get_ydata()) == pytest.approx(means)
    assert points(few) == expected(rows, "eval/loss")


def test_a_plot_is_saved_and_shown_without_pyplot(tmp_path):
    figure = plot(rows_of(), path=tmp_path / "pictures" / "loss.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "pictures" / "loss.png").shape
    assert (width, height) == tuple(int(inches * figure.dpi) for inches in figure.get_size_inches())
    assert figure._repr_png_().startswith(b"\x89PNG")
    code = "import sys; from looplib.log import plot; plot([dict(step=1, a=1)]); sys.exit('%s' in sys.modules)"
    subprocess.run([sys.executable, "-c", code % "matplotlib.pyplot"], check=True)


@pytest.mark.parametrize(
    ("draw", "error", "parts"),
    [
        (lambda: plot(rows_of(), "acc"), ValueError, ["'acc'", "train/loss, lr, eval/loss, eval/auc"]),
        (lambda: plot({"a": [], "b": [{"step": 1, "note": "text"}]}), ValueError, ["'a', 'b'", "'step'"]),
        (lambda: plot(rows_of(), smooth=1), ValueError, ["smooth is 1"]),
        (lambda: plot(["a.jsonl", "b.jsonl"]), TypeError, ["dict by label"]),
        (lambda: plot("none.jsonl"), FileNotFoundError, ["none.jsonl"]),
        (lambda: live_plot(), RuntimeError, ["no notebook", "path="]),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, error, parts):
    with pytest.raises(error) as raised:
        draw()
    assert all(part in str(raised.value) for part in parts)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def missing(name, *args):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(f"No module named {name!r}")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    for draw in (lambda: plot(rows_of()), lambda: live_plot(path=tmp_path / "loss.png")):
        with pytest.raises(ImportError, match="pip install matplotlib"):
            draw()


def drawings(monkeypatch, draws=lambda: None):
    """Number of rows in each drawing, as they are made."""
    made, real = [], Figure.savefig

    def savefig(figure, *args, **options):
        made.append(len(figure.axes[0].lines[0].get_xdata()))
        draws()
        real(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return made


def test_a_live_plot_is_drawn_now_and_then_and_at_the_end(monkeypatch, tmp_path):
    made = drawings(monkeypatch)
    log = live_plot(path=str(tmp_path / "live" / "loss.png"), every=3600)
    for step in range(1, 6):
        log(ll.TrainState(step=step), {"train/loss": torch.tensor(1.0 / step), "note": "text"})
    assert made == [1]
    first = (tmp_path / "live" / "loss.png").read_bytes()
    assert repr(log) == f"live_plot(path={str(tmp_path / 'live' / 'loss.png')!r})"
    with pytest.raises(TypeError, match=r"'loss' is a Tensor of shape \(2,\)"):
        log(ll.TrainState(step=6), {"loss": torch.ones(2)})
    del log
    gc.collect()
    assert made == [1, 5]
    assert (tmp_path / "live" / "loss.png").read_bytes() != first


def test_drawing_takes_a_tenth_of_the_time_at_most(monkeypatch, tmp_path):
    clock, took = SimpleNamespace(now=0.0), 3.0
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    made = drawings(monkeypatch, lambda: setattr(clock, "now", clock.now + took))
    log = live_plot(path=tmp_path / "loss.png", every=0)
    log(ll.TrainState(step=1), {"train/loss": 1.0})
    ended, step = clock.now, 1
    while len(made) < 2:
        step += 1
        clock.now += 0.25
        waited = clock.now - ended
        log(ll.TrainState(step=step), {"train/loss": 1.0 / step})
        assert len(made) == 1 or waited >= 9 * took
    assert made[1] == step


def test_a_live_plot_waits_for_a_name(tmp_path):
    log = live_plot(["eval/auc", "train"], path=tmp_path / "loss.png", every=0)
    log(ll.TrainState(step=1), {"lr": 1.0})
    assert not (tmp_path / "loss.png").exists()
    log(ll.TrainState(step=1), {"train/loss": 1.0})
    del log
    gc.collect()
    assert (tmp_path / "loss.png").exists()


def test_a_live_plot_of_a_run_that_is_continued_shows_all_of_it(monkeypatch, tmp_path):
    made = drawings(monkeypatch)
    for steps, drawn in ((range(1, 6), 1), (range(4, 8), 4)):  # the second run continues from a checkpoint at step 3
        log = ll.tee(
            ll.jsonl(tmp_path / "log.jsonl"),
            live_plot(path=tmp_path / "loss.png", every=3600, history=tmp_path / "log.jsonl"),
        )
        for step in steps:
            log(ll.TrainState(step=step), {"train/loss": 1.0 / step})
        assert made[-1] == drawn
        del log
        gc.collect()
        assert made[-1] == steps[-1]


@pytest.mark.slow
def test_the_last_drawing_is_drawn_when_the_program_ends(tmp_path):
    code = f"""
        import os
        import looplib as ll
        from looplib.log import live_plot
        log = live_plot(path={str(tmp_path / "loss.png")!r}, every=3600)
        log(ll.TrainState(step=1), {{"train/loss": 1.0}})
        os.remove({str(tmp_path / "loss.png")!r})
        log(ll.TrainState(step=2), {{"train/loss": 0.5}})
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True)
    assert (tmp_path / "loss.png").exists()


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
        hooks = len(shell.events.callbacks["post_execute"])
        shown("import gc; del log; gc.collect()")
        assert len(shell.events.callbacks["post_execute"]) == hooks - 1
        figure = shell.run_cell("plot([dict(step=1, loss=2.0)])").result
        assert "image/png" in shell.display_formatter.format(figure)[0]
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True, cwd=tmp_path)
