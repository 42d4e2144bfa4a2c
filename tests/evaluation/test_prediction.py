"""Predictions in the order of the data, each once, whatever ends the process or divides the work."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import launch
from shared import examples, one_report
from test_evaluation import Stream, parts
from torch import nn

import looplib as ll
from looplib.evaluation import read_predictions


def predict_fn(model, x):
    out = model(x)
    return {"out": out, "half": (out[:, 0].bfloat16(), out.argmax(1) > 0)}


def same(state, x):
    return x


def stopped_after(count, step):
    """The step, interrupted at each call after a number of calls."""
    calls = []

    def stopping(state, x):
        calls.append(x)
        if len(calls) > count:
            raise KeyboardInterrupt
        return step(state, x)

    return stopping


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Sizes(torch.utils.data.Sampler):
    """A batch sampler whose batches have these sizes, which cannot be told from outside."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        return (indices.tolist() for indices in torch.arange(sum(self.sizes)).split(self.sizes))


CUTS = {
    "generator": lambda x, sizes: (part for part in x.split(sizes)),
    "list": lambda x, sizes: list(x.split(sizes)),
    "function": lambda x, sizes: lambda state: x.split(sizes),
    "DataLoader": lambda x, sizes: torch.utils.data.DataLoader(x, batch_sampler=Sizes(sizes)),
    "stream": lambda x, sizes: torch.utils.data.DataLoader(Stream(x), batch_size=sizes[0]),
    "stream loader": lambda x, sizes: ll.make_loader(Stream(x), batch_size=sizes[0]),
    "loader": lambda x, sizes: ll.make_loader(x, order=ll.data.batch_sampler(lambda *_: list(Sizes(sizes)))),
}


def test_outputs_on_disk_are_those_in_memory_and_torch_reads_the_files(tmp_path, capsys):
    model, _, state = parts()
    batches = torch.randn(11, 3).split(4)
    step = ll.make_predict_step(model, predict_fn)
    outputs = list(ll.predict(step, state, batches))
    path = ll.evaluation.predict_to(tmp_path / "a/b", step, state, batches, progress=True)
    expected = {
        "out": torch.cat([o["out"] for o in outputs]),
        "half/0": torch.cat([o["half"][0] for o in outputs]),
        "half/1": torch.cat([o["half"][1] for o in outputs]),
    }
    files = [torch.load(file)["columns"] for file in sorted(path.glob("batch-*.pt"))]
    for found in read_predictions(path), {name: torch.cat([file[name] for file in files]) for name in files[0]}:
        assert list(found) == list(expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    shown = capsys.readouterr().err
    view = ll.evaluation.predict_to(tmp_path / "view", lambda state, x: torch.zeros(10**6)[: len(x)], state, batches)
    assert max(map(len, contents(view).values())) < 10_000
    assert shown  # a progress bar, only if asked for
    assert not capsys.readouterr().err


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6), stops=st.lists(st.integers(0, 6), max_size=3))
@settings(max_examples=examples(30), deadline=None)
@pytest.mark.parametrize("kind", CUTS)
def test_an_interrupted_run_predicts_each_batch_once(kind, sizes, stops, tmp_path_factory):
    *_, state = parts()
    if "stream" in kind:
        sizes = [sizes[0]] * len(sizes)
    x, path = torch.arange(float(sum(sizes))), tmp_path_factory.mktemp("predictions") / "out"
    done = []

    def step(state, batch):
        done.append(batch)
        return batch.repeat(2)  # any number of rows

    for stop in stops:
        try:
            ll.evaluation.predict_to(path, stopped_after(stop, step), state, CUTS[kind](x, sizes))
        except KeyboardInterrupt:
            (path / "batch-00000009.pt.1.looplib-partial").write_bytes(b"as a killed process leaves it")
    ll.evaluation.predict_to(path, step, state, CUTS[kind](x, sizes))
    assert torch.equal(torch.cat(done), x)
    assert torch.equal(read_predictions(path)["output"], torch.cat([part.repeat(2) for part in x.split(sizes)]))
    assert len(contents(path)) == 1 + len(sizes)


CUT = [3, 3, 3, 2]
SHORTER, LONGER = [[3, 3, 3], [3, 2]], [[3, 3, 3, 3], [3, 3, 3, 3, 4]]


@one_report
@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("begun", [2, 4])
def test_other_batches_are_refused_before_a_sample_is_skipped(tmp_path, kind, begun):
    *_, state = parts()
    x, path = torch.arange(32.0).view(16, 2), tmp_path / "out"

    def predict_to(step, sizes):
        return ll.evaluation.predict_to(path, step, state, CUTS[kind](x[: sum(sizes)], sizes))

    with pytest.raises(KeyboardInterrupt) if begun < 4 else nullcontext():
        predict_to(stopped_after(begun, same), CUT)
    before = contents(path)
    assert torch.equal(read_predictions(path)["output"], x[: sum(CUT[:begun])])
    others = SHORTER + LONGER if begun == 4 and kind != "stream loader" else []  # which describes no length
    for sizes in [4, 4, 3], [2, 3, 6], [11], *others:
        with pytest.raises(ValueError, match=r"out holds .* batch.* delete it to start over"):
            predict_to(same, sizes)
        assert contents(path) == before
    if begun == 4:
        predict_to(stopped_after(0, same), CUT)
        assert contents(path) == before


def test_another_number_anywhere_in_a_weight_or_a_buffer_is_another_state(tmp_path):
    model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40))
    step, state = ll.make_predict_step(model, lambda model, x: model(x)), ll.init_state(model)
    batches = [torch.randn(4, 3)]
    path = ll.evaluation.predict_to(tmp_path / "out", step, state, batches)
    ll.evaluation.predict_to(path, stopped_after(0, step), ll.copy_state(state), batches)
    others = [state.replace(step=3), state.replace(seed=3)]
    for tree, key in (("params", "0.weight"), ("buffers", "1.running_var")):
        other = ll.copy_state(state)
        with torch.no_grad():
            getattr(other, tree)[key].view(-1)[-1] += 1e-6
        others.append(other)
    for other in others:
        with pytest.raises(ValueError, match="out holds predictions of another state"):
            ll.evaluation.predict_to(path, step, other, batches)


DTYPES = torch.uint16, torch.uint64, torch.complex32, torch.float8_e4m3fn, torch.float8_e8m0fnu


def of_odd_dtypes(_, x):
    """Outputs of dtypes that torch does not pickle, each from the same bytes, and views."""
    data = x.view(torch.uint8)
    outputs = {str(dtype): data.view(dtype) for dtype in DTYPES}
    whole, number = outputs["torch.complex32"], data.view(torch.uint16)[0, 0]
    return {**outputs, "conj": whole.conj(), "column": whole[:, 1:], "row": number.expand(len(x), 2)}


def bits(outputs):
    return {
        name: (out.dtype, out.shape, out.resolve_conj().contiguous().view(torch.uint8).tolist())
        for name, out in outputs.items()
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_outputs_of_all_dtypes_are_written(tmp_path):
    x = torch.arange(16.0, dtype=torch.float64).view(4, 4)
    path = ll.evaluation.predict_to(tmp_path, of_odd_dtypes, ll.TrainState(), [x])
    assert bits(read_predictions(path)) == bits(of_odd_dtypes(None, x))


def test_a_folder_of_something_else_is_left_alone_and_a_damaged_file_is_named(tmp_path):
    *_, state = parts()
    batches = torch.arange(9.0).split(3)
    (tmp_path / "file").write_text("mine")
    for name, file in {"notes": "notes.txt", "other": "predictions.json", "list": "predictions.json"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("[]" if name == "list" else "mine")
    for name, named in {"file": "file", "notes": "notes.txt", "other": "predictions.json", "list": "json"}.items():
        with pytest.raises(ValueError, match=rf"{named}.*give"):
            ll.evaluation.predict_to(tmp_path / name, same, state, batches)
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            read_predictions(tmp_path / name)
    assert contents(tmp_path / "notes") == {"notes.txt": b"mine"}

    with pytest.raises(KeyboardInterrupt):  # in the first batch: other settings are free
        ll.evaluation.predict_to(
            tmp_path / "out", stopped_after(0, same), state.replace(step=9), torch.arange(9.0).split(9)
        )
    path = ll.evaluation.predict_to(tmp_path / "out", same, state, batches)
    whole, file = contents(path), path / "batch-00000001.pt"
    for damage in b"", whole[file.name][:-20], b"mine" * 100:
        file.write_bytes(damage)
        for call in lambda: read_predictions(path), lambda: ll.evaluation.predict_to(path, same, state, batches):
            with pytest.raises(ValueError, match=rf"{file.name} is damaged: delete it"):
                call()
    number = torch.tensor(4.0).numpy().tobytes()
    file.write_bytes(whole[file.name].replace(number, torch.tensor(4.5).numpy().tobytes()))
    with pytest.raises(ValueError, match=rf"{file.name} is damaged: delete it"):
        read_predictions(path)
    file.unlink()
    assert read_predictions(path)["output"].tolist() == [0, 1, 2]
    ll.evaluation.predict_to(path, same, state, batches)
    assert contents(path) == whole
    (path / "batch-00000000.pt").unlink()
    with pytest.raises(ValueError, match="another state"):  # or the others would count as those of this state
        ll.evaluation.predict_to(path, same, state.replace(step=1), batches)


SHUFFLED = [
    lambda x: ll.make_loader(x, batch_size=4),
    lambda x: torch.utils.data.DataLoader(x, batch_size=4, shuffle=True),
]


@pytest.mark.parametrize("loader_of", SHUFFLED)
@pytest.mark.every_case
def test_shuffled_batches_are_refused_and_leave_no_folder(tmp_path, loader_of):
    *_, state = parts()
    loader = loader_of(torch.zeros(8, 3))
    for call in (
        lambda: next(ll.predict(same, state, loader)),
        lambda: ll.evaluation.predict_to(tmp_path / "out", same, state, loader),
    ):
        with pytest.raises(ValueError, match=r"shuffled .*sequential\(\)"):
            call()
    assert not (tmp_path / "out").exists()


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("outputs", "error", "words"),
    [
        ([{"0": "text"}], TypeError, "'0' is a str"),
        ([(X, torch.zeros(5))], ValueError, "'0': 2, '1': 5"),
        ([X, torch.zeros(4)], ValueError, "batch 1"),
        ([X, X.half()], ValueError, "batch 1 .*float16"),
        ([{"a": X}, {"a": ["x", "y"]}], ValueError, "batch 1"),
        ([{1: X, "1": X + 1}], ValueError, "'1'"),
        ([torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)], TypeError, "'output' .* nested"),
    ],
)
@pytest.mark.every_case
def test_what_cannot_be_written_is_refused(tmp_path, outputs, error, words):
    *_, state = parts()
    numbers = list(range(len(outputs)))
    with pytest.raises(error, match=words):
        ll.evaluation.predict_to(tmp_path, lambda state, number: outputs[number], state, numbers)
    if len(outputs) > 1:  # after an interruption too
        with pytest.raises(error, match=words):
            ll.evaluation.predict_to(tmp_path, lambda state, number: outputs[number], state, numbers)


NUMBERS = [2, 0, 1, 4, 0, 0, 3, 3, 1, 6]


def generate(state, x):
    """As text is generated: rows as wide as the longest of the batch, and their strings."""
    width = int(x.max()) + 1
    tokens = torch.arange(width).expand(len(x), width) * x[:, None].long()
    texts = [f'{int(n)} ☃ \n\r\u2028 "{"x" * int(n)}' for n in x]
    return {"tokens": tokens, "deep": {"text": texts}, "logits": torch.ones(len(x), width, 2) * x[:, None, None]}


def check_generated(path, sizes):
    found, x = read_predictions(path), torch.tensor(NUMBERS, dtype=torch.float32)
    outputs = [generate(None, part) for part in x.split(sizes)]
    assert found["deep/text"] == [text for out in outputs for text in out["deep"]["text"]]
    for column in ("tokens", "logits"):
        expected = [row for out in outputs for row in out[column]]
        assert [row.tolist() for row in found[column]] == [row.tolist() for row in expected]


def generate_on_ranks(folder):
    """Continue what one process began, after refusing another cut."""
    with ll.distributed.setup():
        own = {"ranks": ll.metrics.Corpus.of(str, [f"rank {ll.distributed.rank()}"])}
        assert ll.distributed.reduce(own)["ranks"].compute() == "['rank 0', 'rank 1']"
        rows = torch.arange(40.0, dtype=torch.float64).view(10, 4)
        expected = [bits(of_odd_dtypes(None, part)) for part in rows.split(4)]
        loader = ll.make_loader(rows, batch_size=4, order=ll.data.sequential())
        for batches in loader, list(rows.split(4)):
            assert [bits(out) for out in ll.predict(of_odd_dtypes, ll.TrainState(), batches)] == expected
        state, x, path = ll.TrainState(), torch.tensor(NUMBERS, dtype=torch.float32), f"{folder}/DataLoader"
        with pytest.raises(ValueError, match="DataLoader holds"):
            ll.evaluation.predict_to(path, generate, state, CUTS["DataLoader"](x, [7, 3]))
        ll.evaluation.predict_to(path, generate, state, CUTS["DataLoader"](x, [4, 4, 2]))
        with pytest.raises(ValueError, match=r"'tokens' has shapes .*pad"):  # a loader divides each batch among ranks
            ll.evaluation.predict_to(f"{folder}/loader", generate, state, CUTS["loader"](x, [4, 4, 2]))


def test_strings_and_batches_of_varying_width_are_continued_by_several_ranks(tmp_path):
    state, x = ll.TrainState(), torch.tensor(NUMBERS, dtype=torch.float32)
    for kind in ("DataLoader", "list"):
        with pytest.raises(KeyboardInterrupt):
            ll.evaluation.predict_to(tmp_path / kind, stopped_after(1, generate), state, CUTS[kind](x, [4, 4, 2]))
    launch(2, generate_on_ranks, str(tmp_path))
    check_generated(
        ll.evaluation.predict_to(tmp_path / "list", generate, state, CUTS["list"](x, [4, 4, 2])), [4, 4, 2]
    )
    check_generated(tmp_path / "DataLoader", [4, 4, 2])
