"""Predictions in the order of the data, on disk to the byte, whatever kills the process."""

import os
import signal
import subprocess
import sys
import textwrap

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import launch
from torch import nn

import looplib as ll


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1)
    return model, optimizer, ll.init_state(model, optimizer)


def metric_fn(model, x):
    out = model(x)
    return {"mean": ll.Mean(out.double().sum(), out.numel()), "mse": out.square().mean()}


def predict_fn(model, x):
    out = model(x)
    return {"out": out, "half": (out[:, 0].bfloat16(), out.argmax(1) > 0)}


@pytest.mark.parametrize("workers", [0, 2])
def test_outputs_come_in_the_order_of_the_data(workers):
    model, _, state = parts()
    x = torch.arange(33.0).view(11, 3)
    loader = ll.make_loader(
        torch.utils.data.TensorDataset(x), batch_size=4, order=ll.data.in_order(), num_workers=workers
    )
    step = ll.make_predict_step(model, lambda model, batch: batch[0])
    assert torch.equal(torch.cat(list(ll.predict(step, state, loader))), x)
    assert torch.equal(torch.cat(list(ll.predict(step, state, loader, start=1, limit=1))), x[4:8])
    shuffled = ll.make_loader(torch.utils.data.TensorDataset(x), batch_size=4)
    theirs = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), shuffle=True)
    for wrong in (shuffled, theirs):
        with pytest.raises(ValueError, match="shuffled order, and nothing says which is whose"):
            next(ll.predict(step, state, wrong))


def test_outputs_on_disk_are_those_in_memory(tmp_path):
    model, _, state = parts()
    batches = torch.randn(11, 3).split(4)
    step = ll.make_predict_step(model, predict_fn)
    outputs = list(ll.predict(step, state, batches))
    found = ll.evaluation.read_predictions(ll.predict_to(tmp_path / "a/b", step, state, batches))
    assert list(found) == ["out", "half/0", "half/1"]
    assert torch.equal(found["out"], torch.cat([o["out"] for o in outputs]))
    for i in range(2):
        assert torch.equal(found[f"half/{i}"], torch.cat([o["half"][i] for o in outputs]))
    lines = ll.predict_to(tmp_path / "lines.jsonl", step, state, batches).read_bytes().splitlines()
    assert len(lines) == 11
    assert orjson.loads(lines[5])["out"] == outputs[1]["out"][1].tolist()
    assert orjson.loads(lines[5])["half/1"] is bool(outputs[1]["half"][1][1])


@given(stop=st.integers(0, 5), torn=st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_stopped_and_torn_it_continues_to_the_same_bytes(stop, torn, tmp_path_factory):
    model, _, state = parts()
    batches = torch.randn(11, 3, generator=torch.Generator().manual_seed(0)).split(2)
    step, calls = ll.make_predict_step(model, predict_fn), []

    def stopping(state, batch):
        calls.append(len(batch))
        if len(calls) == stop + 1:
            raise KeyboardInterrupt
        return step(state, batch)

    folder = tmp_path_factory.mktemp("predictions")
    for name in ("arrays", "lines.jsonl"):
        whole, parted = folder / "whole" / name, folder / "parted" / name
        ll.predict_to(whole, step, state, batches)
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            ll.predict_to(parted, stopping, state, batches)
        for file in [parted] if parted.is_file() else parted.glob("*.bin"):
            with open(file, "ab") as out:
                out.write(b"x" * torn)  # as a process that was killed within a write leaves it
        calls.clear()
        ll.predict_to(parted, step, state, batches)
        for file in (folder / "whole").rglob("*"):
            if file.is_file():
                assert (folder / "parted" / file.relative_to(folder / "whole")).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
@pytest.mark.parametrize(
    "batches_of",
    [
        lambda x, size: ll.make_loader(x, batch_size=size, order=ll.data.in_order()),
        lambda x, size: ll.make_loader(Stream(x), batch_size=size),
        lambda x, size: torch.utils.data.DataLoader(x, batch_size=size),
        lambda x, size: x.split(size),
    ],
    ids=["loader", "stream", "DataLoader", "tuple"],
)
def test_a_run_that_is_finished_is_left_alone_and_other_batches_are_refused(tmp_path, name, batches_of):
    model, _, state = parts()
    x = torch.randn(10, 3)
    step = ll.make_predict_step(model, predict_fn)
    path = ll.predict_to(tmp_path / name, step, state, batches_of(x, 4))

    def contents():
        return {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    before = contents()
    assert ll.predict_to(path, step, state, batches_of(x, 4), progress=True) == path
    assert contents() == before
    assert list(ll.predict(step, state, batches_of(x, 4), start=7)) == []
    for size in (2, 5, 10):
        with pytest.raises(ValueError, match=r"holds .*: give the same.*, or delete it to start over"):
            ll.predict_to(path, step, state, batches_of(x, size))
        assert contents() == before
    index = tmp_path / ("lines.jsonl.index" if path.is_file() else "arrays/index.jsonl")
    index.write_bytes(b"".join(index.read_bytes().splitlines(True)[:2]))  # stopped after the first
    with pytest.raises(ValueError, match=rf"{name} holds .*(batch_size=4, .*batch_size=2|of 4 samples, .* have 2):"):
        ll.predict_to(path, step, state, batches_of(x, 2))
    ll.predict_to(path, step, state, batches_of(x, 4))
    assert contents() == before


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, x):
        self.x = x

    def __iter__(self):
        return iter(self.x)


def test_outputs_of_any_number_of_rows_are_continued(tmp_path):
    """The number of samples in a batch is compared, not the rows of its output."""
    _, _, state = parts()
    batches = torch.arange(9.0).split(3)
    calls = []

    def stopping(state, x):
        calls.append(x)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return x.repeat(2)

    for form in (list(batches), ll.make_loader(torch.arange(9.0), batch_size=3, order=ll.data.in_order())):
        path = tmp_path / type(form).__name__
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            ll.predict_to(path, stopping, state, form)
        ll.predict_to(path, stopping, state, form)
        assert (
            ll.evaluation.read_predictions(path)["output"].tolist()
            == torch.cat([x.repeat(2) for x in batches]).tolist()
        )


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
def test_reading_before_all_is_written(tmp_path, name):
    _, _, state = parts()
    path = tmp_path / name
    index = tmp_path / "lines.jsonl.index" if path.suffix else path / "index.jsonl"
    with pytest.raises(FileNotFoundError, match=rf"{name} holds no predictions: .* is not there; give the path"):
        ll.evaluation.read_predictions(path)
    ll.predict_to(path, lambda state, x: x, state, torch.arange(6.0).split(2))
    whole = index.read_bytes()
    for torn in range(len(whole)):
        index.write_bytes(whole[:torn])
        lines = whole[:torn].count(b"\n")
        if lines:
            assert ll.evaluation.read_predictions(path)["output"].tolist() == list(range(2 * (lines - 1)))
        else:
            with pytest.raises(FileNotFoundError, match=rf"{name} holds no predictions: .* is empty; give the path"):
                ll.evaluation.read_predictions(path)


def test_lines_are_read_as_the_arrays_are(tmp_path):
    _, _, state = parts()
    batches = torch.randn(7, 3).split(2)

    def predict_step(state, x):
        strange = torch.where(x > 1, torch.nan, x)
        about = [x.bfloat16(), x[:, 0] > 0, (x * 100).long()[:, None]]
        return {"chance": x[:, 0], "deep": {"x": about, "null": strange}}

    arrays, lines = (
        ll.evaluation.read_predictions(ll.predict_to(tmp_path / name, predict_step, state, batches))
        for name in ("arrays", "lines.jsonl")
    )
    assert list(arrays) == list(lines) == ["chance", "deep/x/0", "deep/x/1", "deep/x/2", "deep/null"]
    for name, tensor in arrays.items():
        assert tensor.dtype == lines[name].dtype
        torch.testing.assert_close(lines[name], tensor, rtol=0, atol=0, equal_nan=True)


KILLED = """
    import sys, torch, looplib as ll
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    step = ll.make_predict_step(model, lambda model, x: model(x))
    x = torch.arange(30000.0).view(-1, 3)
    print("ready", flush=True)
    ll.predict_to(sys.argv[1], step, ll.init_state(model), x.split(2))
"""


@pytest.mark.slow
def test_killed_processes_lose_nothing(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "out")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    index = tmp_path / "out/index.jsonl"
    for kills in (1, 2):
        run = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
        run.stdout.readline()
        while not (index.exists() and index.read_bytes().count(b"\n") > 200 * kills):
            assert run.poll() is None
        run.send_signal(signal.SIGKILL)
        run.communicate()
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = torch.arange(30000.0).view(-1, 3)
    expected = torch.cat([model(part) for part in x.split(2)]).detach()
    assert torch.equal(ll.evaluation.read_predictions(tmp_path / "out")["output"], expected)


def test_what_cannot_be_written_is_refused(tmp_path):
    model, _, state = parts()
    batches = torch.zeros(4, 3).split(2)
    step = ll.make_predict_step(model, lambda model, x: model(x))
    ll.predict_to(tmp_path / "a", step, state, batches)
    with pytest.raises(ValueError, match=r"holds predictions of another state .*'step': 0.*delete it, or give"):
        ll.predict_to(tmp_path / "a", step, state.replace(step=3), batches)
    with pytest.raises(TypeError, match="the output's '0' is a str"):
        ll.predict_to(tmp_path / "b", lambda state, x: {"0": "text"}, state, batches)
    with pytest.raises(ValueError, match=r"differ in their number of rows: '0' \(2, 3\), '1' \(5,\)"):
        ll.predict_to(tmp_path / "c", lambda state, x: (x, torch.zeros(5)), state, batches)
    with pytest.raises(ValueError, match="the outputs of batch 1 are"):
        ll.predict_to(tmp_path / "d", lambda state, x: x, state, [torch.zeros(2, 3), torch.zeros(4)])
    with pytest.raises(ValueError, match="the outputs of batch 1 are"):
        ll.predict_to(tmp_path / "e", lambda state, x: x, state, [torch.zeros(2, 3), torch.zeros(4, 3).half()])
    with pytest.raises(ValueError, match="two leaves of the output are both named '1': give their keys different"):
        ll.predict_to(tmp_path / "f", lambda state, x: {1: x, "1": x + 1}, state, batches)
    with pytest.raises(TypeError, match=r"'output' is a sparse tensor .*; give output\.to_dense\(\)"):
        ll.predict_to(tmp_path / "g", lambda state, x: x.to_sparse(), state, batches)


class Sizes(torch.utils.data.Sampler):
    """A batch sampler whose batches have these sizes, of which nothing tells from outside."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        first = 0
        for size in self.sizes:
            yield list(range(first, first + size))
            first += size


CUTS = {
    "generator": lambda x, sizes: (part for part in x.split(sizes)),
    "batch_sampler": lambda x, sizes: torch.utils.data.DataLoader(x, batch_sampler=Sizes(sizes)),
    "loader": lambda x, sizes: ll.make_loader(x, order=ll.data.batch_sampler(lambda *_: list(Sizes(sizes)))),
    "list": lambda x, sizes: list(x.split(sizes)),
}


def stopped_after(count, step):
    """The step, interrupted at each call after a number of calls."""
    calls = []

    def stopping(state, x):
        calls.append(x)
        if len(calls) > count:
            raise KeyboardInterrupt
        return step(state, x)

    return stopping


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
@pytest.mark.parametrize("kind", CUTS)
def test_batches_that_are_cut_differently_are_refused_before_a_sample_is_skipped(tmp_path, name, kind):
    _, _, state = parts()
    x = torch.arange(24.0).view(12, 2)
    cut_of, path = CUTS[kind], tmp_path / name
    with pytest.raises(KeyboardInterrupt):
        ll.predict_to(path, stopped_after(2, lambda state, x: x), state, cut_of(x, [3, 3, 3, 3]))
    for sizes in ([4, 4, 4], [6, 6], [12]):
        with pytest.raises(ValueError, match=rf"{name} holds batches of 3, 3 samples, and those given have .*: give"):
            ll.predict_to(path, lambda state, x: x, state, cut_of(x, sizes))
        assert torch.equal(ll.evaluation.read_predictions(path)["output"], x[:6])
    ll.predict_to(path, lambda state, x: x, state, cut_of(x, [3, 3, 3, 3]))
    assert torch.equal(ll.evaluation.read_predictions(path)["output"], x)


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
@pytest.mark.parametrize(
    "loader_of",
    [
        lambda x: ll.make_loader(x, batch_size=4, order=ll.data.in_order()),
        lambda x: torch.utils.data.DataLoader(x, batch_size=4),
        lambda x: torch.utils.data.DataLoader(Stream(x), batch_size=4),
    ],
    ids=["loader", "DataLoader", "stream"],
)
@pytest.mark.parametrize("rows", [12, 16, 8, 5])
def test_data_of_another_length_skip_no_sample(tmp_path, name, loader_of, rows):
    """10 samples were predicted in batches of 4, 4 and 2; with more of them the third batch is another, with fewer
    there are not so many."""
    _, _, state = parts()
    x = torch.arange(2.0 * 16).view(16, 2)
    path = ll.predict_to(tmp_path / name, lambda state, x: x, state, loader_of(x[:10]))
    with pytest.raises(ValueError, match=rf"{name} holds batches of 4, 4, 2 samples, and those given have .*: give"):
        ll.predict_to(path, lambda state, x: x, state, loader_of(x[:rows]))
    assert torch.equal(ll.evaluation.read_predictions(path)["output"], x[:10])


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
def test_another_number_anywhere_in_a_weight_or_a_buffer_is_another_state(tmp_path, name):
    model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40))
    step, state = ll.make_predict_step(model, lambda model, x: model(x)), ll.init_state(model)
    batches = [torch.randn(4, 3)]
    path = ll.predict_to(tmp_path / name, step, state, batches)
    ll.predict_to(path, step, ll.copy_state(state), batches)
    for tree, key in (("params", "0.weight"), ("params", "1.bias"), ("buffers", "1.running_var")):
        other = ll.copy_state(state)
        with torch.no_grad():
            getattr(other, tree)[key].view(-1)[-1] += 1e-6
        with pytest.raises(ValueError, match="holds predictions of another state"):
            ll.predict_to(path, step, other, batches)


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
def test_bytes_that_a_power_cut_has_changed_are_named_and_predicted_again(tmp_path, name):
    model, _, state = parts()
    batches = torch.randn(11, 3).split(4)
    step = ll.make_predict_step(model, predict_fn)
    path = ll.predict_to(tmp_path / name, step, state, batches)
    file = path if path.is_file() else path / "half.0.bin"
    whole = {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()}
    middle = whole[file].index(b"\n") + 9 if path.is_file() else 9  # in the second batch of the column
    file.write_bytes(whole[file][:middle] + bytes(4) + whole[file][middle + 4 :])
    first = 0 if path.is_file() else 1
    message = rf"{file.name} has other bytes in batch {first} than were written.* from {first} on are predicted again"
    calls = []

    def counting(state, x):
        calls.append(x)
        return step(state, x)

    with pytest.warns(UserWarning, match=message):
        ll.predict_to(path, counting, state, batches)
    assert len(calls) == 3 - first
    assert {one: one.read_bytes() for one in whole} == whole


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
@pytest.mark.parametrize("left", [0, 7, 20, None])
def test_data_that_a_power_cut_has_lost_are_named_and_predicted_again(tmp_path, name, left):
    """The index is on disk, and of the data the first `left` bytes, or no file at all."""
    model, _, state = parts()
    batches = torch.randn(11, 3).split(4)
    step = ll.make_predict_step(model, predict_fn)
    ll.predict_to(tmp_path / "whole" / name, step, state, batches)
    path = ll.predict_to(tmp_path / "cut" / name, step, state, batches)
    file = path if path.is_file() else path / "half.0.bin"  # of 8, 8 and 6 bytes
    if left is None:
        file.unlink()
    else:
        os.truncate(file, left if path.is_dir() else 10 * left)
    with pytest.raises(
        ValueError, match=rf"{file.name} is shorter than its index says.*call ll.predict_to as before"
    ):
        ll.evaluation.read_predictions(path)
    calls = []

    def counting(state, x):
        calls.append(x)
        return step(state, x)

    with pytest.warns(UserWarning, match=rf"{file.name} is shorter than its index says.* are predicted again"):
        ll.predict_to(path, counting, state, batches)
    if path.is_dir():
        assert len(calls) == {None: 3, 0: 3, 7: 3, 20: 1}[left]
    for one in (tmp_path / "whole").rglob("*"):
        if one.is_file():
            assert (tmp_path / "cut" / one.relative_to(tmp_path / "whole")).read_bytes() == one.read_bytes()


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
def test_names_that_look_alike_as_files_are_kept_apart(tmp_path, name):
    _, _, state = parts()
    x = torch.arange(6.0)

    def predict_step(state, x):
        return {"a.b": x, "a": {"b": x + 1}, "A.b": x + 2, "a.b.2": x + 3, "a/b": x + 4}

    path = ll.predict_to(tmp_path / name, predict_step, state, x.split(4))
    found = ll.evaluation.read_predictions(path)
    assert {key: (value - x).unique().tolist() for key, value in found.items()} == {
        "a.b": [0],
        "a/b": [1],
        "A.b": [2],
        "a.b.2": [3],
        "a~1b": [4],
    }


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
@pytest.mark.parametrize("stop", [None, 1, 2])
def test_complex_numbers_and_rows_of_no_width(tmp_path, name, stop):
    _, _, state = parts()
    x = torch.randn(7, 3)

    def predict_step(state, x):
        pair = torch.complex(x, x.cos())
        return {
            "complex": pair,
            "conj": pair[:, :2].conj(),
            "none": x[:, :0],
            "deep": x[:, None, :0].long(),
            "double": pair[:, 0].to(torch.complex128),
        }

    path = tmp_path / name
    if stop:
        with pytest.raises(KeyboardInterrupt):
            ll.predict_to(path, stopped_after(stop, predict_step), state, x.split(3))
    ll.predict_to(path, predict_step, state, x.split(3))
    found = ll.evaluation.read_predictions(path)
    for column, expected in predict_step(state, x).items():
        torch.testing.assert_close(found[column], expected, rtol=0, atol=0)


def generate(state, x):
    """As text is generated: rows as wide as the longest of the batch, and their strings."""
    width = int(x.max()) + 1
    tokens = torch.arange(width).expand(len(x), width) * x[:, None].long()
    texts = [f'{int(n)} ☃ \n\r\u2028 "{"x" * int(n)}' for n in x]
    return {"tokens": tokens, "deep": {"text": texts}, "logits": torch.ones(len(x), width, 2) * x[:, None, None]}


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
@pytest.mark.parametrize("stop", [None, 1, 2])
def test_strings_and_outputs_of_varying_width(tmp_path, name, stop):
    _, _, state = parts()
    batches = torch.tensor([2, 0, 1, 4, 0, 0, 3, 3.0]).split([2, 2, 2, 2])
    path = tmp_path / name
    if stop:
        with pytest.raises(KeyboardInterrupt):
            ll.predict_to(path, stopped_after(stop, generate), state, batches)
    ll.predict_to(path, generate, state, batches)
    found = ll.evaluation.read_predictions(path)
    outputs = [generate(state, x) for x in batches]
    assert found["deep/text"] == [text for out in outputs for text in out["deep"]["text"]]
    for column in ("tokens", "logits"):
        expected = [row for out in outputs for row in out[column]]
        assert len(found[column]) == len(expected) == 8
        for row, other in zip(found[column], expected, strict=True):
            torch.testing.assert_close(row, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
def test_pieces_of_a_batch_may_differ_in_width(tmp_path, name):
    """As those of several ranks, or of a batch that did not fit."""
    _, _, state = parts()
    batches = torch.tensor([2, 0, 1, 4, 0, 0, 3, 3.0]).split(4)
    step = ll.evaluation.split_on_oom(generate, size=2)
    out = next(ll.predict(step, state, batches))
    assert out["deep"]["text"] == generate(state, batches[0])["deep"]["text"]
    rows = out["tokens"].unbind()
    pieces = [row for part in batches[0].split(2) for row in generate(state, part)["tokens"]]
    assert [row.tolist() for row in rows] == [row.tolist() for row in pieces]
    found = ll.evaluation.read_predictions(ll.predict_to(tmp_path / name, step, state, batches))
    expected = [row.tolist() for x in batches for part in x.split(2) for row in generate(state, part)["tokens"]]
    assert [row.tolist() for row in found["tokens"]] == expected
    wide = ll.evaluation.split_on_oom(lambda state, x: torch.ones(len(x), int(x.max()), int(x.max())), size=2)
    with pytest.raises(ValueError, match=r"do not fit together: 'output' has shapes \(2, 2, 2\) and \(2, 4, 4\), of"):
        next(ll.predict(wide, state, batches))


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
def test_a_file_that_is_not_ours_is_left_alone(tmp_path, name):
    _, _, state = parts()
    path = tmp_path / name
    batches = torch.arange(6.0).split(2)
    ll.predict_to(path, lambda state, x: x, state, batches)
    file = path if path.is_file() else path / "output.bin"
    (tmp_path / "lines.jsonl.index" if path.is_file() else path / "index.jsonl").unlink()
    before = file.read_bytes()
    with pytest.raises(
        ValueError, match=rf"{file.name} is there without .*index.*, which says .*: delete it, or give"
    ):
        ll.predict_to(path, lambda state, x: x, state, batches)
    assert file.read_bytes() == before
    if path.is_dir():
        file.unlink()
        (path / "notes.txt").write_text("mine")
        ll.predict_to(path, lambda state, x: x, state, batches)
        ll.predict_to(path, lambda state, x: x, state, batches)
        assert (path / "notes.txt").read_text() == "mine"


NUMBERS = [2, 0, 1, 4, 0, 0, 3, 3, 1, 6]


def generate_on_ranks(folder):
    """Continue what one process began, in shares of a batch and in whole batches, after refusing another cut."""
    with ll.distributed.setup():
        state, x = ll.TrainState(), torch.tensor(NUMBERS, dtype=torch.float32)
        for name in ("arrays", "lines.jsonl"):
            for kind in ("loader", "batch_sampler"):
                path = f"{folder}/{kind}/{name}"
                with pytest.raises(ValueError, match="holds batches of 4 samples, and those given have"):
                    ll.predict_to(path, generate, state, CUTS[kind](x, [7, 3]))
                ll.predict_to(path, generate, state, CUTS[kind](x, [4, 4, 2]))


def test_several_ranks_write_strings_and_outputs_of_varying_width(tmp_path):
    state, x = ll.TrainState(), torch.tensor(NUMBERS, dtype=torch.float32)
    paths = [tmp_path / kind / name for kind in ("loader", "batch_sampler") for name in ("arrays", "lines.jsonl")]
    for path in paths:
        with pytest.raises(KeyboardInterrupt):
            ll.predict_to(path, stopped_after(1, generate), state, CUTS[path.parent.name](x, [4, 4, 2]))
    launch(2, generate_on_ranks, str(tmp_path))
    for path in paths:
        found = ll.evaluation.read_predictions(path)
        assert [int(text.split()[0]) for text in found["deep/text"]] == NUMBERS
        # Of the loader, the ranks divide each batch after the first: each has a width of its own.
        sizes = [4, 2, 2, 1, 1] if path.parent.name == "loader" else [4, 4, 2]
        for column in ("tokens", "logits"):
            expected = [row.tolist() for part in x.split(sizes) for row in generate(state, part)[column]]
            assert [row.tolist() for row in found[column]] == expected


def test_prediction_leaves_the_random_stream_where_it_is(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.randn(3)

    model, step, state = parts()
    batches = torch.utils.data.DataLoader(Noisy(), batch_size=2)
    step = ll.make_predict_step(model, lambda model, x: x)
    torch.manual_seed(3)
    stream, expected = torch.get_rng_state(), torch.cat(list(batches))
    torch.set_rng_state(stream)
    outputs = []
    for output in ll.predict(step, state, batches):
        assert torch.equal(torch.get_rng_state(), stream)
        outputs.append(output)
    assert torch.equal(torch.cat(outputs), expected)
    ll.predict_to(tmp_path / "out", step, state, batches)
    assert torch.equal(torch.get_rng_state(), stream)


@pytest.mark.parametrize("line", [b"0\n", b"{}\n", b"[1]\n"])
def test_a_line_of_the_index_that_says_nothing_is_the_end_of_it(tmp_path, line):
    _, _, state = parts()
    batches = torch.arange(9.0).split(3)
    path = ll.predict_to(tmp_path / "out", lambda state, x: x, state, batches)
    index = path / "index.jsonl"
    whole = index.read_bytes()
    lines = whole.splitlines(keepends=True)
    index.write_bytes(lines[0] + lines[1] + line + lines[3])
    ll.predict_to(path, lambda state, x: x, state, batches)
    assert index.read_bytes() == whole
    assert ll.evaluation.read_predictions(path)["output"].tolist() == list(range(9))


FORGED_SHAPES = [-1], ["x", 5 * 10**9], [2**47] * 10**5


def files_of(path):
    """A file of data of these predictions, and their index."""
    if path.is_dir():
        return path / "output.bin", path / "index.jsonl"
    return path, path.with_name(path.name + ".index")


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
@pytest.mark.parametrize(
    "change",
    [
        *({"ends": {file: 4}} for file in ("OUTSIDE", "../outside.txt", "outside.bin")),
        *({"ends": ends} for ends in ({"FILE": -1}, {"FILE": 1}, {"FILE": "9"}, {"FILE": 4, "outside.bin": 4}, [])),
        *({"examples": examples} for examples in (-1, "3", 1.5, True)),
        *({"shapes": {"output": runs}} for runs in ([[-3, []]], [["x", []]], [3], 3)),
        *({"shapes": {"output": [[3, shape]]}} for shape in FORGED_SHAPES),
    ],
    ids=lambda change: str(change)[:60],
)
def test_an_index_that_predict_to_does_not_write_is_refused(tmp_path, name, change):
    (tmp_path / "outside.txt").write_bytes(bytes(100))
    path, batches = tmp_path / name, torch.arange(9.0).split(3)

    def predict():
        return ll.predict_to(path, lambda state, x: x, ll.TrainState(), batches)

    predict()
    file, index = files_of(path)
    head, first, second, *_ = index.read_bytes().splitlines(keepends=True)
    text = orjson.dumps({**orjson.loads(second), **change}).replace(b"FILE", file.name.encode())
    line = text.replace(b"OUTSIDE", str(tmp_path / "outside.txt").encode()) + b"\n"
    index.write_bytes(head + first + line)
    for call in (predict, lambda: ll.evaluation.read_predictions(path)):
        with pytest.raises(ValueError, match=rf"{index.name} holds .* does not write, in line 3.*: delete"):
            call()
    assert (tmp_path / "outside.txt").read_bytes() == bytes(100)


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
@pytest.mark.parametrize(
    "change",
    [
        {"run": 0},
        {"outputs": 0},
        {"outputs": {"output": 0}},
        {"outputs": {"output": {"dtype": "load", "shape": []}}},
        {"outputs": {"output": {"dtype": "str", "shape": 1}}},
        *({"outputs": {"output": {"dtype": "float32", "shape": shape}}} for shape in FORGED_SHAPES),
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_head_that_predict_to_does_not_write_is_refused(tmp_path, name, change):
    path = ll.predict_to(tmp_path / name, lambda state, x: x, ll.TrainState(), torch.arange(9.0).split(3))
    _, index = files_of(path)
    head, *lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(orjson.dumps({**orjson.loads(head), **change}) + b"\n" + b"".join(lines))
    with pytest.raises(ValueError, match=rf"{index.name} holds .* does not write, in line 1.*: delete"):
        ll.evaluation.read_predictions(path)


@pytest.mark.parametrize("name", ["arrays", "lines.jsonl"])
@pytest.mark.parametrize("lines", [0, 1, 4])  # nothing yet, a head, and all batches
@pytest.mark.parametrize("linked", [0, 1])
def test_links_are_not_followed(tmp_path, name, lines, linked):
    path, outside, batches = tmp_path / name, tmp_path / "outside", torch.arange(9.0).split(3)
    ll.predict_to(path, lambda state, x: x, ll.TrainState(), batches)
    link, index = files_of(path)[linked], files_of(path)[1]
    index.write_bytes(b"".join(index.read_bytes().splitlines(keepends=True)[:lines]))
    link.rename(outside)
    link.symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises(ValueError, match=rf"{link.name} is a link"):
        ll.predict_to(path, lambda state, x: x, ll.TrainState(), batches)
    assert outside.read_bytes() == before


RARE = [
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def of_rare_dtypes(model, x):
    """Outputs of all dtypes that torch does not pickle, each from the same bytes; some are views."""
    data = x.view(torch.uint8)
    outputs = {str(dtype): data.view(dtype) for dtype in RARE}
    whole, scalar = outputs["torch.complex32"], data.view(torch.uint16)[0, 0]
    return {
        **outputs,
        "conj": whole.conj(),
        "column": whole[:, 1:],
        "row": scalar.expand(len(x), 2),
        "none": whole[:, :0],
    }


def exact(outputs):
    return {
        name: (out.dtype, out.shape, out.resolve_conj().contiguous().view(torch.uint8).tolist())
        for name, out in outputs.items()
    }


def rare_on_ranks():
    x = torch.arange(40.0, dtype=torch.float64).view(10, 4)
    model = nn.Linear(4, 1)
    state, step = ll.init_state(model), ll.make_predict_step(model, of_rare_dtypes)
    expected = [exact(of_rare_dtypes(model, part)) for part in x.split(4)]
    with ll.distributed.setup():
        for batches in ll.make_loader(x, batch_size=4, order=ll.data.in_order()), list(x.split(4)):
            assert [exact(out) for out in ll.predict(step, state, batches)] == expected
        columns = of_rare_dtypes(model, x)["torch.uint16"].T[:2]
        own = ll.metrics.Corpus.of(sum, columns[ll.distributed.rank()])
        assert ll.compute(ll.distributed.reduce({"sum": own})) == {"sum": sum(columns.flatten().tolist())}


def test_outputs_of_all_dtypes_are_sent_between_ranks():
    launch(2, rare_on_ranks)
