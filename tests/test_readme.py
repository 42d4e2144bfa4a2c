"""The README: its script runs, each diff of its ladder applies and does what it says, its links lead somewhere."""

import copy
import re
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
import torch
from ranks import launch, run_script
from shared import one_report
from torch import nn

import looplib as ll

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
DATA, LOOP, INTERRUPT, AFTER, PIECES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
DIFFS = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
PAGES = ["README.md", "CHANGELOG.md", "recipes/COMPARISON.md", "tests/benchmarks/README.md"]


def patched(program, diff):
    """The program after a diff, whose hunks are apart by empty lines: each must fit in one place."""
    for hunk in diff.strip("\n").split("\n\n"):
        lines = hunk.split("\n")
        before = "\n".join(line[1:] for line in lines if line[0] in " -") + "\n"
        after = "\n".join(line[1:] for line in lines if line[0] in " +")
        assert program.count("\n" + before) == 1, f"this part of a diff does not fit:\n{hunk}"
        program = program.replace(before, after + "\n" if after else "")
    return program


def program(rungs):
    """The script of the README with so many of its diffs."""
    text = DATA + "\n" + LOOP
    for diff in DIFFS[:rungs]:
        text = patched(text, diff)
    return text


def run(text):
    names = {}
    exec(compile(text, "README.md", "exec"), names)
    return names


def test_it_is_one_page():
    assert len(TEXT.split()) <= 1000
    assert len(DIFFS) == 4
    loop = LOOP.partition("\n\n")[0].splitlines()
    assert len(loop) == 8
    assert "<!-- tests -->\n```sh\n" in TEXT


def test_the_loop_learns_and_says_so(capsys):
    state = run(program(0))["state"]
    assert (state.epoch, state.step) == (10, 130)
    loss = float(re.search(r"'loss': ([\d.]+)", capsys.readouterr().out)[1])
    assert loss < 0.5


def test_the_first_diff_clips_and_follows_a_schedule():
    names = run(program(1))
    assert "grad_norm" in names["metrics"]
    rates = [ll.optim.hyperparameters(names["optimizer"], names["state"].replace(step=k))["lr"] for k in (0, 13, 130)]
    assert rates == pytest.approx([0.0, 1e-2, 0.0], abs=1e-9)


def test_the_second_diff_logs_the_mean_of_each_epoch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(program(2))
    rows = ll.log.read_jsonl("runs/first/log.jsonl")
    assert [row["step"] for row in rows] == list(range(13, 131, 13))
    assert capsys.readouterr().out.count("eval/accuracy") == 10
    assert rows[-1]["eval/accuracy"] > 0.7


def test_the_third_diff_resumes_to_the_same_bits(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = run(program(3))["state"]
    monkeypatch.chdir(tmp_path / "parts")
    assert run(program(3).replace("after_epochs(10)", "after_epochs(4)"))["state"].epoch == 4
    assert not ll.debug.differences(run(program(3))["state"], whole)
    assert not ll.debug.differences(run(program(3))["state"], whole)  # a finished run stays as it is
    assert ll.log.read_jsonl("runs/first/log.jsonl") == ll.log.read_jsonl("../whole/runs/first/log.jsonl")


@pytest.mark.parametrize(
    ("place", "step", "restored"),
    [
        ("window = window.add(metrics)", 20, "step 20 (epoch 1, batch 7)"),
        ("scores = ", 26, "step 26 (epoch 2, batch 0)"),  # the evaluation is cut
        ("window = ll.Window()\n", 26, "step 26 (epoch 2, batch 0)"),  # logged, and not saved yet
        ("done(state):\n", 26, "step 26 (epoch 2, batch 0)"),  # saved
    ],
)
def test_ctrl_c_saves_and_a_rerun_ends_like_an_unbroken_run(tmp_path, monkeypatch, capsys, place, step, restored):
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = run(program(3))["state"]
    monkeypatch.chdir(tmp_path)
    before, loop = program(3).split("while not done(state):\n")
    body = "".join(
        f"    {line}" for line in f"while not done(state):\n{loop}".splitlines(keepends=True) if line.strip()
    )
    place, before_it = (
        (place, "done(strike(state)):\n") if place.startswith("done") else (place, f"strike(state); {place}")
    )
    assert body.count(place) == 1
    interrupted = body.replace(place, before_it)
    strike = f"def strike(state):\n    if state.step == {step}:\n        signal.raise_signal(signal.SIGINT)\n    return state\n"
    run(f"import signal\n{strike}{before}try:\n{interrupted}{INTERRUPT}")
    capsys.readouterr()
    assert not ll.debug.differences(run(program(3))["state"], whole)
    assert f"Restored {restored} from" in capsys.readouterr().out
    logged, unbroken = (ll.log.read_jsonl(f"{folder}/runs/first/log.jsonl") for folder in (".", "whole"))
    kept = [row for row in unbroken if (row["step"], place) != (26, "scores = ")]
    for name in ("step", "eval/accuracy"):  # the window starts again
        assert [row[name] for row in logged] == [row[name] for row in kept]
    run(program(3))
    assert "Restored step 130 (epoch 10, batch 0) from" in capsys.readouterr().out  # a finished run says so


@pytest.mark.every_case
@pytest.mark.parametrize("page", ["README.md", "recipes/CHEAT_SHEET.md", "recipes/COOKBOOK.md"])
def test_where_donate_appears_first_the_page_says_when_to_use_which(page):
    text = (ROOT / page).read_text()
    paragraphs = [text for text in re.split(r"\n\n|```", text) if "donate" in text]
    first = next(number for number, text in enumerate(paragraphs) if re.search(r"the\s+default", text))
    assert first <= 1  # the word, or the code that has it
    assert re.search(r"in place.*old state.*[Ll]eave it out.*branch", paragraphs[first], re.DOTALL)


@pytest.mark.slow
def test_the_fourth_diff_trains_on_two_ranks_as_on_one(tmp_path, monkeypatch):
    """Of what stands below the imports, as the README has it."""
    imports, rest = program(4).split("import looplib as ll\n")
    body = "".join(f"    {line}" if line.strip() else line for line in rest.splitlines(keepends=True))
    script = f"{imports}import looplib as ll\n\nwith ll.distributed.setup() as device:\n{body}"
    (tmp_path / "train.py").write_text(script.replace("after_epochs(10)", "after_epochs(2)"))
    for ranks in 1, 2:
        folder = tmp_path / str(ranks)
        folder.mkdir()
        launch(ranks, run_in, str(folder), str(tmp_path / "train.py"))
    one, two = (ll.log.read_jsonl(tmp_path / str(ranks) / "runs/first/log.jsonl") for ranks in (1, 2))
    assert len(one) == len(two) == 2
    for first, second in zip(one, two, strict=True):
        assert second == pytest.approx(first, rel=1e-3)


def run_in(folder, path):
    import os

    os.chdir(folder)
    run_script(path)


def test_after_training_the_weights_are_saved_and_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for donate in "True", "False":
        names = run(program(0).replace("donate=True", f"donate={donate}"))
        assert torch.equal(names["model"][0].weight, names["state"].params["0.weight"]) == (donate == "True")
        exec(AFTER, names)
        weights = torch.load("weights.pt")
        assert all(torch.equal(weights[name], tensor) for name, tensor in names["state"].params.items())


def test_each_piece_works_in_a_loop_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(program(0))
    setting, accumulate, loader, checkpoints, predicates = PIECES.split("\n\n")
    # A layer of each kind that a gradient by hand would have got wrong.
    model = names["model"] = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 10))
    other = copy.deepcopy(model)
    exec(setting, names)

    adamw = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for step in 1000, 1001:
        x, y = names["x"], names["y"] = names["train_set"][:64]
        exec(accumulate, names | {"step": step})
        adamw.zero_grad()
        for number, batch in enumerate(zip(x.split(16), y.split(16), strict=True)):
            torch.manual_seed(ll.debug.step_seed(ll.TrainState(step=step), microbatch=number))
            (names["loss_fn"](other, batch) / 4).backward()
        adamw.step()
        for one, by_hand in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad, by_hand.grad)
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))

    names["x"] = names["train_set"].tensors[0]
    exec(loader.replace("...", "seen.append(x)"), names | {"seen": (seen := [])})
    rest = [names["loader"].indices(ll.TrainState(epoch=3, batch=batch)) for batch in range(5, 13)]
    assert torch.equal(torch.cat(seen), names["x"][torch.cat(rest)])

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exec(checkpoints, names)
    with torch.no_grad():
        model[0].weight.zero_()
    exec("\n".join(checkpoints.splitlines()[1:3]), names)
    assert names["run"]["step"] == 1
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())

    fired = []
    for step in range(2200):
        exec(predicates.replace("...", "fired.append(step)"), names | {"step": step, "fired": fired})
    assert fired == [1, *range(100, 2001, 50)]


def anchors(page):
    """The names of the headings of a Markdown page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.pages
@one_report
@pytest.mark.parametrize(
    "page", [*PAGES, "CONTRIBUTING.md", *(f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.md"))]
)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if not link.startswith("http"):
            name, _, anchor = unquote(link).partition("#")
            target = (ROOT / page).parent / name if name else ROOT / page
            assert target.exists(), link
            text = target.read_text() if anchor else ""
            line = re.fullmatch(r"L(\d+)", anchor)  # of a file that is no page
            is_there = line and int(line[1]) <= text.count("\n")
            assert not anchor or is_there or anchor in anchors(target) or f'id="{anchor}"' in text, link


@pytest.mark.every_case
@pytest.mark.parametrize("page", PAGES)
def test_rows_of_a_table_have_as_many_cells_as_its_head(page):
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_the_diagram_is_readable_on_a_phone():
    """At 390 pixels, of which a page's margins take 32, no text is smaller than 12 pixels."""
    diagram = ElementTree.parse(ROOT / "notebooks/figures/loop.svg").getroot()
    text = ElementTree.tostring(diagram, encoding="unicode")
    sizes = [float(size) for size in re.findall(r"font-size[:=]\s*\"?([\d.]+)", text)]
    width = float(diagram.get("viewBox").split()[2])
    assert len(sizes) == 3
    assert min(sizes) * min(1, (390 - 32) / width) >= 12
