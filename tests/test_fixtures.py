"""Files written and numbers computed by the code of commit 43d2fb8, compared with those of the current code.

The files are in `tests/fixtures` and were made by `make.py` there. If a change makes one of these tests fail, it
changes the result of runs that were started before it.
"""

import json
import math
import shutil
from functools import cache

import fixture_cases as cases
import pytest
import torch
from ranks import launch
from safetensors.torch import load_file

import looplib as ll

DATA = cases.DATA
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    pytest.mark.filterwarnings("ignore:.*other settings. seed was"),  # which is to come from the checkpoint
]


def same_bits(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(one, other)
    return type(one) is type(other) and repr(one) == repr(other)  # also of NaN and of -0.0


def check(values, expected):
    assert [*values] == [*expected]
    assert [place for place, value in expected.items() if not same_bits(values[place], value)] == []


def kept(name):
    return torch.load(DATA / name, weights_only=True)


@cache
def read_json(name):
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def as_json(found):
    return json.loads(json.dumps(found))


# Checkpoints


def opened(tmp_path, *names, **options):
    """A copy of the directory: reading it is not to change the fixture."""
    shutil.copytree(DATA.joinpath(*names), tmp_path / names[-1])
    return ll.checkpoint_io(tmp_path / names[-1], **options)


@pytest.mark.parametrize("kind", cases.CHECKPOINTS)
def test_a_checkpoint_of_each_kind_is_restored_to_the_bit(kind, tmp_path):
    ckpt = opened(tmp_path, "checkpoints", kind)
    expected = kept(f"checkpoints/{kind}.pt")
    free = ll.copy_state(cases.checkpoint_start(kind))
    check(cases.values_of(ckpt.restore(free)), expected)
    bound = cases.checkpoint_start(kind)
    check(cases.values_of(ckpt.restore(bound)), expected)
    found = ckpt.latest()
    assert (found.step, found.metrics) == (expected["/step"], {"eval/loss": 0.5})
    assert (found.epoch, found.batch, found.samples) == tuple(
        expected[f"/{name}"] for name in ("epoch", "batch", "samples")
    )


def test_tied_weights_of_a_checkpoint_stay_tied(tmp_path):
    state = opened(tmp_path, "checkpoints", "tied-ema").restore(ll.copy_state(cases.checkpoint_start("tied-ema")))
    model = cases.Tied()
    ll.bind(model, state)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, kept("checkpoints/tied-ema.pt")["/params/embedding.weight"])


def test_a_checkpoint_written_in_the_background_and_what_rotation_left(tmp_path):
    ckpt = opened(tmp_path, "checkpoints", "background", monitor="loss")
    assert [found.step for found in ckpt.steps()] == [6, 12]
    assert (ckpt.best().step, ckpt.latest().step) == (6, 12)
    assert math.isnan(ckpt.latest().metrics["auc"])
    model, optimizer, _ = cases.STEPS["adamw, donated"].make()
    for which, step in (("best", 6), ("latest", 12), (6, 6)):
        state = ckpt.restore(ll.init_state(model, optimizer, epoch_length=7), which)
        check(cases.values_of(state), kept(f"checkpoints/background-{step}.pt"))


def test_a_checkpoint_of_a_stack(tmp_path):
    start, _ = cases.stacked(0)
    state = opened(tmp_path, "checkpoints", "stack").restore(start)
    check(cases.values_of(state), kept("checkpoints/stack.pt"))
    assert (ll.transforms.members_of(state), state.seed) == (3, (5, 6, 7))


@pytest.mark.parametrize("name", ["weights", "plain"])
def test_the_weights_alone(name, tmp_path):
    start = ll.init_state(cases.small(), cases.adamw(), seed=77)
    state = opened(tmp_path, "checkpoints", name).restore(start, weights_only=True)
    expected = {
        place: value
        for place, value in kept("checkpoints/plain.pt").items()
        if place.startswith(("/params/", "/buffers/"))
    }
    found = cases.values_of(state)
    check({place: found[place] for place in expected}, expected)
    assert (state.step, state.seed) == (0, 77)


def test_a_sharded_checkpoint_is_restored_into_one_process(tmp_path):
    ckpt = opened(tmp_path, "ranks", "sharded")
    check(cases.values_of(ckpt.restore(cases.one_start())), kept("ranks/sharded.pt"))


def test_a_run_continues_from_a_checkpoint_as_it_would_have(tmp_path):
    ckpt = opened(tmp_path, "checkpoints", "midway")
    which = cases.STEPS["dropout"]
    model, optimizer, train_step = which.make()
    state = ckpt.restore(ll.init_state(model, optimizer, epoch_length=7))
    assert state.step == 11
    state, _ = cases.continued(which, model, train_step, state, range(11, 20))
    compare("dropout", {"params/" + name: tensor for name, tensor in state.params.items()}, which)


# Steps


@cache
def trajectories():
    found = {}
    for place, tensor in load_file(DATA / "trajectories.safetensors").items():
        name, _, leaf = place.partition(": ")
        found.setdefault(name, {})[leaf] = tensor
    return found


@cache
def rounds_alike(name):
    """True if a loop in plain torch has the same bits here as where the fixtures were made."""
    return all(torch.equal(tensor, trajectories()["raw " + name][place]) for place, tensor in cases.raw(name).items())


@cache
def draws_alike():
    return as_json(cases.machine_draws()) == read_json("draws.json")["machine"]


def compare(name, found, which):
    """To the bit where plain torch has the bits of then, else closely.

    Kernels of matrix products and of convolutions differ from processor to processor and from one torch to the next
    in the last bits; 20 steps make that some 1e-12 in float64, and 1e-6 in float32. An update that is another one
    moves a weight by a learning rate, 1e-2. In bfloat16 a last bit is 4e-3 of the number.
    """
    if which.draws and not draws_alike():
        pytest.skip("torch's random stream is another one on this machine")
    expected = trajectories()[name]
    if all(map(rounds_alike, which.raw)):
        wrong = [place for place, tensor in found.items() if not same_bits(tensor, expected[place])]
        assert wrong == []
    else:
        for place, tensor in found.items():
            torch.testing.assert_close(tensor, expected[place], rtol=which.tolerance, atol=which.tolerance)


@pytest.mark.parametrize("name", cases.STEPS)
def test_twenty_steps_end_where_they_did(name):
    if "schedulefree" in name:
        pytest.importorskip("schedulefree")
    found = cases.trajectory(name)
    assert found.keys() == trajectories()[name].keys()
    compare(name, found, cases.STEPS[name])


def test_twenty_steps_of_a_stack_end_where_they_did():
    compare("stack", cases.stack_trajectory(), cases.Step(draws=True))


RAW_OF = {
    "adamw": "adamw, pure",
    "adamw32": "adamw, float32",
    "sgd": "sgd",
    "rmsprop": "rmsprop",
    "adafactor": "adafactor",
    "conv": "conv",
    "bfloat16": "autocast",
}


@pytest.mark.parametrize("name", cases.RAW)
def test_the_fixtures_have_the_bits_of_raw_loops(name):
    """On the machine that made them, whichever this one is."""
    expected = trajectories()[RAW_OF[name]]
    assert all(torch.equal(tensor, expected[place]) for place, tensor in trajectories()["raw " + name].items())


# Orders and draws


def longest_first(batches):
    """Batches by length, as the code of then gave them, in the order of now: the longest sample is in the first."""
    lengths, batches = cases.LENGTHS, [list(batch) for batch in batches]
    full = len(batches) - (len(batches[-1]) < len(batches[0]))
    first = max(range(full), key=lambda k: max(lengths[i] for i in batches[k]))
    batches[0], batches[first] = batches[first], batches[0]
    head, rest = batches[0], batches[-1]
    ours, theirs = (max(range(len(batch)), key=lambda i: lengths[batch[i]]) for batch in (head, rest))
    if lengths[rest[theirs]] > lengths[head[ours]]:
        head[ours], rest[theirs] = rest[theirs], head[ours]
    return batches


def expected_orders():
    orders = dict(read_json("orders.json"))
    for name in ("lengths", "lengths, pool", "lengths, pool 1, drop_last"):
        orders[name] = {epoch: longest_first(batches) for epoch, batches in orders[name].items()}
        assert orders[name] != read_json("orders.json")[name]
    return orders


def test_the_orders_of_loaders():
    expected = expected_orders()
    found = as_json(cases.orders())
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def test_the_draws_of_items():
    if not draws_alike():
        pytest.skip("torch's random stream is another one on this machine")
    expected = read_json("draws.json")["items"]
    found = as_json(cases.draws_of_items())
    assert [name for name in expected if found[name] != expected[name]] == []
    assert found["items"] == found["items, 2 workers"]


def test_the_masks_of_dropout():
    if not draws_alike():
        pytest.skip("torch's random stream is another one on this machine")
    expected = read_json("draws.json")["masks"]
    found = as_json(cases.dropout_masks())
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def test_what_two_ranks_are_given_and_restore(tmp_path):
    shutil.copytree(DATA / "ranks" / "sharded", tmp_path / "sharded")
    launch(2, cases.on_two_ranks, str(tmp_path), False)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        expected = dict(read_json(f"ranks/rank-{rank}.json"))
        then, now = read_json("orders.json")["lengths"], expected_orders()["lengths"]
        own = {
            epoch: [torch.tensor(batch).tensor_split(2)[rank].tolist() for batch in now[epoch]]
            for epoch in expected["lengths"]
        }
        for epoch, parts in expected["lengths"].items():
            assert parts == [torch.tensor(batch).tensor_split(2)[rank].tolist() for batch in then[epoch]]
        expected |= {"lengths": own, "lengths, parts": [[part, True] for part in own["epoch 1"][1:]]}
        assert found.keys() == expected.keys()
        drawn = {name for name in expected if name.startswith(("draws", "masks"))}
        compared = expected.keys() - (set() if draws_alike() else drawn)
        assert [name for name in sorted(compared) if found[name] != expected[name]] == []
    check(torch.load(tmp_path / "sharded.pt", weights_only=True), kept("ranks/sharded.pt"))


def test_schedules():
    expected = read_json("schedules.json")
    for name, values in cases.schedule_values().items():
        assert values == pytest.approx(expected[name], rel=1e-12, abs=1e-15), name


# Logs and predictions


@pytest.mark.parametrize("name", ["log.jsonl", "log.csv", "console.txt", "prints.jsonl"])
def test_the_bytes_of_logs(name, tmp_path):
    cases.write_logs(tmp_path)
    assert (tmp_path / name).read_bytes() == (DATA / "logs" / name).read_bytes()


def test_logs_are_read_back():
    rows = ll.log.read_jsonl(DATA / "logs" / "log.jsonl")
    given = cases.log_rows() + cases.metrics_rows()
    assert [row["step"] for row in rows] == [state.step for state, _ in given]
    for row, (state, values) in zip(rows, given, strict=True):
        assert [row.pop(name) for name in ("step", "epoch", "batch", "samples")] == [
            state.step,
            state.epoch,
            state.batch,
            state.samples,
        ]
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
        assert row == pytest.approx(plain, nan_ok=True, rel=1e-6) if "note" not in row else row == plain


def test_columns_are_read_back():
    for name in ("log.jsonl", "log.csv"):
        columns = ll.log.read_columns(DATA / "logs" / name)
        # The run went back to step 120, then to step 3.
        assert repr(columns) == read_json("columns.json")[name]


def test_fingerprints_are_read_back():
    found = ll.debug.read_fingerprints(DATA / "logs" / "prints.jsonl")
    assert [*found] == [0, 1]
    for number, prints in found.items():
        assert prints == ll.debug.fingerprint(cases.printed(number))
    assert found[0] != found[1]


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "predictions" in str(path.relative_to(folder)) and path.name != ".lock"
    }


def then(files, expected):
    """Files of predictions, and of the lines of an index only what they had when the expected ones were written."""

    def known(line, like):
        return {key: known(line[key], value) if isinstance(value, dict) else line[key] for key, value in like.items()}

    for name in files.keys() & expected.keys():
        if name.endswith("index") or name.endswith("index.jsonl"):
            lines = zip(files[name].splitlines(), expected[name].splitlines(), strict=True)
            old = [known(json.loads(line), json.loads(like)) for line, like in lines]
            files[name] = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in old)
    return files


def test_the_bytes_of_predictions(tmp_path):
    cases.write_predictions(tmp_path)
    expected = files_of(DATA / "logs")
    assert len(expected) > 4
    assert then(files_of(tmp_path), expected) == expected


def test_predictions_are_read_and_continued(tmp_path):
    x = torch.arange(14.0).reshape(7, 2)
    logits = x @ torch.arange(6.0).reshape(3, 2).T + 0.25
    expected = {
        "logits": logits,
        "deep/class": logits.argmax(1),
        "deep/pair/0": x.half(),
        "deep/pair/1": x[:, 0] > 1,
    }
    check(dict(ll.evaluation.read_predictions(DATA / "logs" / "predictions")), expected)

    # As if it had been stopped in the middle of the last batch: what was written before is kept.
    shutil.copytree(DATA / "logs", tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("**/*"):
        if path.is_file() and path.read_bytes().endswith(b"}\n") and "ends" in path.read_text():
            lines = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(lines[:-1]) + lines[-1][:5])
    cases.write_predictions(tmp_path)
    expected = files_of(DATA / "logs")
    assert then(files_of(tmp_path), expected) == expected
