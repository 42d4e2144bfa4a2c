"""Pictures hold the numbers that were logged; looking for a learning rate leaves the run as it was."""

import builtins
import gc
import io
import itertools
import math
import operator
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

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


def legend(figure):
    """The entries of the one legend, with the colour and style of each."""
    (found,) = figure.legends
    texts = [text.get_text() for text in found.get_texts()]
    return dict(zip(texts, kinds(found.get_lines()), strict=True))


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
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["train", "eval"]
    beside = plot([{"step": 1, "loss": 1.0, "eval/loss": 2.0}])
    assert [text.get_text() for text in beside.legends[0].get_texts()] == ["loss", "eval"]


def test_runs_have_colours_and_sources_line_styles(tmp_path):
    log = ll.jsonl(tmp_path / "large.jsonl")
    for row in rows_of():
        log(ll.TrainState(step=row["step"]), {name: row[name] for name in row if "/" in name})
    small = rows_of(scale=3.0)
    figure = plot({"small": small, "large": tmp_path / "large.jsonl"}, "loss")
    (axes,) = figure.axes
    assert [points(line) for line in axes.lines] == [
        expected(rows, name) for rows in (small, rows_of()) for name in ("train/loss", "eval/loss")
    ]
    assert kinds(axes.lines) == [("C0", "-"), ("C0", "--"), ("C1", "-"), ("C1", "--")]
    assert legend(figure) == {
        "small": ("C0", "-"),
        "large": ("C1", "-"),
        "train": ("#797979", "-"),
        "eval": ("#797979", "--"),
    }
    alone = plot({"small": small}, "loss")  # a colour for each source, as without a label
    assert (alone.legends[0].get_title().get_text(), list(legend(alone))) == ("small", ["train", "eval"])


def test_where_no_panel_mixes_sources_the_legend_names_runs_only():
    runs = {"small": rows_of(), "large": rows_of(scale=2.0)}
    figure = plot(runs, ["train/loss", "eval/auc", "lr"])
    assert [kinds(axes.lines) for axes in figure.axes] == [[("C0", "-"), ("C1", "-")]] * 3
    assert legend(figure) == {"small": ("C0", "-"), "large": ("C1", "-")}
    assert not plot(runs["small"], ["train/loss", "eval/auc", "lr"]).legends
    # The source of a panel of its own is in its title.
    both = plot(runs, ["loss", "lr"])
    assert list(legend(both)) == ["small", "large", "train", "eval"]
    assert kinds(both.axes[1].lines) == [("C0", "-"), ("C1", "-")]
    alike = plot({"train": runs["small"], "eval": runs["large"]}, "loss")
    assert [text.get_text() for text in alike.legends[0].get_texts()] == ["train", "eval", "train", "eval"]
    bare = plot({name: [{"step": 1, "loss": 1.0, "eval/loss": 2.0}] for name in runs})
    assert list(legend(bare)) == ["small", "large", "loss", "eval"]


def test_a_source_stands_for_everything_under_it():
    rows = [
        {"step": step, "train/loss": 1.0, "eval/plain/loss": 2.0, "eval/plain/auc": 0.5, "eval/shifted/loss": 3.0}
        for step in range(3)
    ]
    plain = plot(rows, "eval/plain")
    assert [axes.get_title() for axes in plain.axes] == ["eval/plain/loss", "eval/plain/auc"]
    assert not plain.legends
    figure = plot(rows, ["auc", "eval", "loss"])
    assert [axes.get_title() for axes in figure.axes] == ["eval/plain/auc", "eval loss", "loss"]
    assert [len(axes.lines) for axes in figure.axes] == [1, 2, 3]
    assert points(figure.axes[1].lines[1]) == expected(rows, "eval/shifted/loss")
    with pytest.raises(ValueError, match="no log has 'eval/pl'; there are train/loss, eval/plain/loss"):
        plot(rows, "eval/pl")


def test_names_choose_panels_and_their_order():
    figure = plot(rows_of(), ["eval/auc", "eval/loss"], x="samples")
    assert [axes.get_title() for axes in figure.axes] == ["eval/auc", "eval/loss"]
    assert points(figure.axes[1].lines[0]) == expected(rows_of(), "eval/loss", "samples")
    assert not figure.legends
    over_epochs = plot(rows_of(), "eval/loss", x="epoch")
    assert points(over_epochs.axes[0].lines[0]) == expected(rows_of(), "eval/loss", "epoch")


def test_steps_done_again_after_a_checkpoint_are_drawn_once():
    first = [{"step": step, "loss": 1.0} for step in range(1, 8)]
    second = [{"step": step, "loss": 2.0} for step in range(5, 10)]
    (axes,) = plot(first + second).axes
    assert points(axes.lines[0]) == [(float(step), 1.0 if step < 5 else 2.0) for step in range(1, 10)]


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


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.021, 2.3, ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"]),
        (7e-6, 9e-5, ["0.00001", "0.00002", "0.00005", "0.0001"]),
        (0.0021, 30.0, ["0.01", "0.1", "1", "10"]),
        (3e-9, 2.0, ["1e-08", "0.000001", "0.0001", "0.01", "1"]),
    ],
)
def test_the_ticks_of_a_log_axis_are_even_and_plain(low, high, labels):
    figure = plot([{"step": step, "loss": value} for step, value in enumerate([high, low])])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    bottom, top = axes.get_ylim()
    ticks = [(at, label.get_text()) for at, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)]
    assert [label for at, label in ticks if bottom <= at <= top] == labels
    gaps = [math.log10(b / a) for (a, _), (b, _) in itertools.pairwise(ticks)]
    assert max(gaps) < 1.4 * min(gaps)
    assert len(axes.get_yticks(minor=True)) == 0


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


def test_a_picture_is_saved_and_shown_without_pyplot(tmp_path):
    figure = plot(rows_of(), path=tmp_path / "pictures" / "loss.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "pictures" / "loss.png").shape
    assert (width, height) == tuple(int(inches * figure.dpi) for inches in figure.get_size_inches())
    assert figure._repr_png_().startswith(b"\x89PNG")
    plot(rows_of(), path=tmp_path / "loss.pdf")
    assert (tmp_path / "loss.pdf").read_bytes().startswith(b"%PDF")
    code = "import sys; from looplib.log import plot; plot([dict(step=1, a=1)]); sys.exit('%s' in sys.modules)"
    subprocess.run([sys.executable, "-c", code % "matplotlib.pyplot"], check=True)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no log has 'acc'; there are train/loss, lr, eval/loss, eval/auc"):
        plot(rows_of(), "acc")
    with pytest.raises(ValueError, match=r"no row of 'a', 'b' has a number beside its 'step'"):
        plot({"a": [], "b": [{"step": 1, "note": "text"}]})
    with pytest.raises(ValueError, match=r"smooth is 1; give the share .* from 0 to below 1"):
        plot(rows_of(), smooth=1)
    with pytest.raises(FileNotFoundError):
        plot(tmp_path / "none.jsonl")


def without(monkeypatch, package):
    real = builtins.__import__

    def missing(name, *args):
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        without(patch, "matplotlib")
        for draw in (lambda: plot(rows_of()), lambda: live_plot(path=tmp_path / "loss.png")):
            with pytest.raises(ImportError, match=r"figures need matplotlib: pip install matplotlib"):
                draw()
    with monkeypatch.context() as patch:
        without(patch, "IPython")
        with pytest.raises(ImportError, match=r"pip install ipykernel ipywidgets, or give path="):
            live_plot()
        live_plot(path=tmp_path / "loss.png")
    with pytest.raises(RuntimeError, match=r"found no notebook to draw in: give it a file"):
        live_plot()


def drawings(monkeypatch, draws=lambda: None):
    """Number of rows in each drawing, as they are made."""
    made, real = [], Figure.savefig

    def savefig(figure, *args, **options):
        made.append(len(figure.axes[0].lines[0].get_xdata()))
        draws()
        real(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return made


def test_a_live_picture_is_drawn_now_and_then_and_at_the_end(monkeypatch, tmp_path):
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
    log(ll.TrainState(step=1), {"train/loss": 1.0})  # slower than the others, and not counted
    log(ll.TrainState(step=2), {"train/loss": 1.0})
    ended = clock.now
    assert made == [1, 2]
    step = 2
    while len(made) < 3:
        step += 1
        clock.now += 0.25
        waited = clock.now - ended
        log(ll.TrainState(step=step), {"train/loss": 1.0 / step})
        assert len(made) == 2 or waited >= 9 * took
    assert made[2] == step


def test_a_live_picture_waits_for_a_name(tmp_path):
    log = live_plot(["eval/auc", "train"], path=tmp_path / "loss.png", every=0)
    log(ll.TrainState(step=1), {"lr": 1.0})
    assert not (tmp_path / "loss.png").exists()
    log(ll.TrainState(step=1), {"train/loss": 1.0})
    del log
    gc.collect()
    assert (tmp_path / "loss.png").exists()


def test_a_live_picture_of_a_run_that_is_continued_shows_all_of_it(monkeypatch, tmp_path):
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
def test_the_last_picture_is_drawn_when_the_program_ends(tmp_path):
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


def luminance(colour):
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("runs", [rows_of(), {"a": rows_of(), "b": rows_of(scale=2.0)}], ids=["one", "two"])
def test_a_picture_in_a_notebook_is_readable_on_a_light_and_on_a_dark_page(runs):
    with matplotlib.rc_context({"savefig.transparent": False}):
        figure = plot(runs, "loss")
        shown = matplotlib.image.imread(io.BytesIO(figure._repr_png_()))
    assert [shown[at][3] for at in ((0, 0), (-1, -1), (shown.shape[0] // 2, 0))] == [0, 0, 0]
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert len(texts) > 10
    edges = [spine for axes in figure.axes for spine in axes.spines.values()]
    for colour in [text.get_color() for text in texts] + [spine.get_edgecolor() for spine in edges]:
        for page in ("#ffffff", "#111111"):
            dark, light = sorted((luminance(colour), luminance(page)))
            assert (light + 0.05) / (dark + 0.05) > 4, (colour, page)


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
        hooks = len(shell.events.callbacks["post_execute"])

        def shown(cell):
            shell.display_pub.outputs.clear()
            shell.run_cell(cell).raise_error()
            assert len(shell.events.callbacks["post_execute"]) == hooks
            for out in shell.display_pub.outputs:
                assert out["data"]["image/png"]
            return [(out["update"], out["transient"]["display_id"]) for out in shell.display_pub.outputs]

        first = shown({CELL!r})
        assert [update for update, _ in first] == [False, True] and first[0][1] == first[1][1], first
        second = shown('for step in (4, 5): log(ll.TrainState(step=step), {{"train/loss": 0.1}})')
        assert [update for update, _ in second] == [False, True] and second[0][1] != first[0][1], second
        assert shown("1 + 1") == []
        figure = shell.run_cell("plot([dict(step=1, loss=2.0)])").result
        assert "image/png" in shell.display_formatter.format(figure)[0]
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True, cwd=tmp_path)
