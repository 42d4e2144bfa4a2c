"""Steps had again are those of the run, bit by bit, and a change made at a known step is found at that step."""

import hashlib
import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import assert_each_refused, both_states, both_steps, examples, mean_square
from shared import classify as loss_fn
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import looplib as ll
from looplib.debug import (
    differences,
    fingerprint,
    first_difference,
    nbytes,
    read_fingerprints,
    record_steps,
    replay,
    worst_samples,
)

DIGITS = load_digits()
ROWS, LENGTH = 70, 5  # of 16 rows, the last batch of 6


class Noisy(torch.utils.data.Dataset):
    """Digits with new noise from all three global streams each time one is read."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        noise = torch.randn(64) + np.random.rand() + random.random()  # noqa: NPY002
        return torch.tensor(DIGITS.data[i], dtype=torch.float32) / 16 + 0.1 * noise, int(DIGITS.target[i])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        source = Noisy()
        return (source[i] for i in range(ROWS))


class Case:
    """A small training with dropout, batch norm, noise in the data and an epoch whose last batch is not full."""

    def __init__(
        self, *, donate=False, bound=False, stream=False, optimizer=None, wrap=lambda model: model, frozen=""
    ):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 10))
        if frozen:
            self.model.get_parameter(frozen).requires_grad_(False)
        self.optimizer = optimizer or ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(0.01, warmup=3, total=40))
        self.grad_fn = ll.make_grad_fn(wrap(self.model), loss_fn)
        self.step = ll.make_train_step(self.grad_fn, self.optimizer, donate=donate)
        self.loader = ll.make_loader(Stream() if stream else Noisy(), batch_size=16, seed=2)
        length = None if stream else LENGTH
        self.state = ll.init_state(self.model, self.optimizer, seed=5, epoch_length=length, extra={"note": None})
        self.state = self.state if bound else ll.copy_state(self.state)

    def train(self, steps, see=lambda state, batch, metrics, after: None):
        """A loop as anyone writes it."""
        state = self.state
        while True:
            for batch in self.loader(state):
                if state.step == steps:
                    return state
                before = ll.copy_state(state)
                state, metrics = self.step(state, batch)
                see(before, batch, metrics, ll.copy_state(state))
            if state.epoch_length is None:
                state = ll.state.end_epoch(state)


@pytest.mark.filterwarnings("ignore:.*still has the weights of before training")
@pytest.mark.parametrize(
    ("donate", "bound", "stream"), [*itertools.product([True, False], [True, False], [False, True])]
)
def test_every_step_again_from_any_kept_state_is_the_runs_own(donate, bound, stream):
    case, again = (Case(donate=donate, bound=bound, stream=stream) for _ in range(2))
    seen = []
    case.train(13, lambda *step: seen.append(step))
    assert [state.epoch for state, *_ in seen] == [step // LENGTH for step in range(13)]

    def surroundings(kept):
        streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
        return fingerprint((kept, dict(again.model.state_dict()), streams))

    for start, step in [(0, 0), (0, 12), (3, 3), (4, 9), (7, 11)]:
        kept = seen[start][0]
        before = surroundings(kept)
        found = replay(again.step, kept, again.loader, step, grad_fn=again.grad_fn)
        state, batch, metrics, after = seen[step]
        grads = case.grad_fn(state, batch).grads
        expected = fingerprint((state, batch, metrics, after, grads))
        assert fingerprint((found.state, found.batch, found.metrics, found.after, found.grads)) == expected
        assert surroundings(kept) == before
        states = [kept, found.state, found.after]  # which share no tensor
        assert nbytes(states) == sum(map(nbytes, states))


def test_a_wrapped_module_is_replayed_on_its_own_tensors(one_process):
    alone = Case(donate=True, bound=True)
    expected = replay(alone.step, alone.state, alone.loader, 7)
    case = Case(donate=True, bound=True, wrap=nn.parallel.DistributedDataParallel)
    with pytest.raises(RuntimeError, match="DistributedDataParallel works on the module's own parameters"):
        replay(case.step, case.state, case.loader, 7)
    found = replay(case.step, case.state, case.loader, 7, donate=True)
    assert fingerprint((found.batch, found.after)) == fingerprint((expected.batch, expected.after))
    assert found.after.params["0.weight"] is case.model[0].weight


@both_steps
def test_a_skipped_batch_is_had_again_and_the_one_after_it_at_the_same_step(donate):
    model = nn.Linear(1, 1)
    optimizer = ll.chain(ll.skip_nonfinite(max_consecutive=3), ll.optimizer(torch.optim.Adam, lr=0.1))
    grad_fn = ll.make_grad_fn(model, mean_square)
    step = ll.make_train_step(grad_fn, optimizer, donate=donate)
    data = torch.arange(8.0).reshape(8, 1)
    data[4] = math.nan
    loader = ll.make_loader(data, batch_size=2, order=ll.data.sequential())
    found = replay(step, ll.init_state(model, optimizer, epoch_length=4), loader, 2)
    assert (found.after.skipped, found.state.step, found.after.step) == (True, 2, 2)
    found = replay(step, found.after, loader, 2)
    assert (found.after.skipped, found.after.step, found.batch.tolist()) == (False, 3, [[6.0], [7.0]])


def test_a_step_that_makes_two_updates_of_a_batch_is_replayed_where_the_batch_begins():
    case = Case()

    def twice(state, batch):
        for _ in range(2):
            state, metrics = case.step(state, batch)
        return state.replace(batch=0, epoch=0, epoch_length=None), metrics

    assert replay(twice, case.state, lambda state: list(case.loader(case.state)), 4).after.step == 6
    with pytest.raises(ValueError, match=r"step 5.* step 6"):
        replay(twice, case.state, lambda state: list(case.loader(case.state)), 5)


def test_what_cannot_be_is_refused():
    c = Case()
    later = c.state.replace(step=6)
    assert_each_refused(
        (lambda: replay(c.step, {8: later, 6: later}, c.loader, 5), ValueError, "step 5.*6, 8"),
        (lambda: replay(c.step, {}, c.loader, 5), ValueError, "steps given: none"),
        (
            lambda: replay(c.step, c.state, torch.utils.data.DataLoader(range(8)), 5),
            TypeError,
            r"a DataLoader;.*ll\.make_loader\(data",
        ),
        (lambda: replay(c.step, c.state, c.loader, True), TypeError, "True"),
        (lambda: replay(c.step, [c.state], c.loader, 5), TypeError, "list"),
        (lambda: replay(c.step, c.state, lambda state: [], 5), ValueError, r"TrainState\(step=0"),
        (lambda: record_steps(record_steps({}, later), c.state), ValueError, "step 0.* step 6"),
        (lambda: record_steps({}, c.state, at_most=1), ValueError, "at_most"),
        (lambda: fingerprint({"batch": [object()]}), TypeError, "/batch/0"),
        (lambda: first_difference({0: c.state}, {3: c.state, 5: c.state}), ValueError, "0 to 0.* 3 to 5"),
        (lambda: first_difference({0: c.state}, {}), ValueError, "none"),
        (lambda: worst_samples(c.grad_fn, c.state, torch.ones(4, 64), [1, 2]), ValueError, "2.*4"),
    )


@both_states
@both_steps
def test_kept_states_are_those_of_the_run_and_share_what_stays(donate, bound):
    case = Case(donate=donate, bound=bound, frozen="0.weight")
    state, kept, seen = case.state, {}, {}
    for batch in case.loader(state):
        was = dict(kept)
        more = record_steps(kept, state)
        assert kept == was  # the same records: what was given is left as it is
        kept, seen[state.step] = more, fingerprint(state)
        state, _ = case.step(state, batch)
    assert {step: fingerprint(found) for step, found in kept.items()} == seen
    assert kept[0].params["0.weight"] is not case.model[0].weight
    # A leaf that is not as in the one before; moments begin as zeros, a buffer for each parameter.
    expected, before = 0, None
    for found in kept.values():
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        arrays = [leaf.detach().numpy() for leaf in leaves]
        expected += sum(a.nbytes for i, a in enumerate(arrays) if before is None or a.tobytes() != before[i])
        before = [array.tobytes() for array in arrays]
    assert nbytes(list(kept.values())) == expected
    assert len({found.params["0.weight"].data_ptr() for found in kept.values()}) == 1
    begun = []

    def loader(state):
        begun.append(state.step)
        return case.loader(state)

    few = {step: kept[step] for step in (0, 2)}
    assert fingerprint(replay(case.step, few, loader, 3).state) == seen[3]
    assert begun[0] == 2  # the nearest one, and it spends none of them
    assert {step: fingerprint(found) for step, found in kept.items()} == seen


def test_equal_numbers_of_other_bits_or_strides_are_not_shared():
    one = torch.ones(2, 3)
    others = [-torch.zeros(2, 3), torch.ones(3, 2).T, one.double(), torch.ones(2, 3, requires_grad=True)]
    for first, second, shared in [
        (torch.zeros(2, 3), others[0], False),
        *((one, x, False) for x in others[1:]),
        (one, one + 0, True),
    ]:
        kept = record_steps(
            record_steps({}, ll.TrainState(params={"w": first})), ll.TrainState(step=1, params={"w": second})
        )
        found = kept[1].params["w"]
        assert (found is kept[0].params["w"]) == shared
        assert (found.stride(), found.dtype, found.requires_grad) == (
            second.stride(),
            second.dtype,
            second.requires_grad,
        )


def test_a_tensor_that_stands_twice_is_kept_once():
    model = nn.Module()
    model.one = model.other = nn.Parameter(torch.ones(5))
    kept = record_steps({}, ll.init_state(model, extra={"again": model.one}))
    assert kept[0].params["one"] is kept[0].extra["again"] is not model.one
    assert nbytes(kept[0]) == 20
    assert nbytes(model.state_dict()) == 20
    for tree in model, [torch.optim.SGD(model.parameters(), lr=0.1)]:  # of which it saw no tensor
        with pytest.raises(TypeError, match=r"give (module|sgd).state_dict\(\)"):
            nbytes(tree)
    case = Case(donate=True)
    kept = record_steps(
        {0: case.state}, case.state.replace(step=1)
    )  # the first as it is, so that the run may spend it
    was = fingerprint(kept[1])
    _ = case.step(case.state, next(iter(case.loader(case.state))))
    assert fingerprint(kept[1]) == was
    with pytest.raises(ll.DonatedStateError):
        record_steps({}, case.state)


def test_a_tensor_of_others_is_kept_once_while_each_of_them_has_its_bits():
    states = [
        ll.TrainState(step, params={"w": TwoTensor(torch.ones(2), torch.arange(2.0) * last)})
        for step, last in enumerate([1, 1, 2])
    ]
    kept = {}
    for state in states:
        kept = record_steps(kept, state)
    one, two, three = (state.params["w"] for state in kept.values())
    assert one is two is not three


@pytest.mark.parametrize("at_most", [16, 2])
@pytest.mark.every_case
def test_the_first_and_the_last_stay_and_gaps_grow_with_their_age(at_most):
    kept, last = {}, 500
    for step in range(last + 1):
        kept = record_steps(kept, ll.TrainState(step=step), at_most=at_most)
        assert [state.step for state in kept.values()] == list(kept) == sorted(kept)
        assert (min(kept), max(kept), len(kept)) == (0, step, min(step + 1, at_most))
    # From the nearest state before a step, a replay never takes much longer than the step is old.
    for before, after in itertools.pairwise(kept):
        assert after - before <= 2 * max(last - after, 1) or at_most == 2
    assert sorted(kept)[-3:][0] >= last - 4 or at_most == 2


def test_a_fingerprint_is_a_hash_of_dtype_shape_and_bytes():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = hashlib.blake2b(b"(torch.float32, (2, 3))" + array.tobytes(), digest_size=8).hexdigest()
    apart = torch.from_numpy(np.repeat(array.ravel(), 2))[::2].view(2, 3)
    for same in (torch.from_numpy(array), torch.from_numpy(np.asfortranarray(array)), apart):
        assert fingerprint(same) == {"/": expected}
    for other in (array.reshape(3, 2), array.view(np.int32)):
        assert fingerprint(torch.from_numpy(other)) != {"/": expected}
    assert fingerprint(array) == fingerprint(np.asfortranarray(array)) != fingerprint(array.T)
    found = fingerprint(
        {"a/b": [1, 2.5, None, "x" * 30, True, "x" * 31], "m": ll.Mean(torch.tensor(3), 2), "n": array}
    )
    assert list(found) == [*(f"/a~1b/{i}" for i in range(6)), "/m", "/n"]
    long = hashlib.blake2b(repr("x" * 31).encode(), digest_size=8).hexdigest()
    assert list(found.values())[:6] == ["1", "2.5", "None", repr("x" * 30), "True", long]


@given(st.data())
@settings(max_examples=examples(40))
def test_any_flipped_bit_changes_the_fingerprint_of_its_leaf_alone(data):
    kinds = st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn]
    )
    tree = {f"{i}": torch.arange(data.draw(st.integers(1, 5))).to(data.draw(kinds)) for i in range(3)}
    before = fingerprint(tree)
    name = data.draw(st.sampled_from(sorted(tree)))
    assert differences(tree, {**tree, name: tree[name].clone()}) == []
    flipped = tree[name].clone()
    flipped.view(torch.uint8)[data.draw(st.integers(0, flipped.nbytes - 1))] ^= 1
    after = fingerprint({**tree, name: flipped})
    assert {place for place in before if before[place] != after[place]} == {f"/{name}"}
    (found,) = differences(tree, {**tree, name: flipped})
    assert (found.path, found.differing, found.numel) == (f"/{name}", 1, tree[name].numel())


class Named(torch.Tensor):
    """A subclass that consists of no others."""


def test_tensors_of_a_class_without_parts_are_compared():
    one = torch.ones(2).as_subclass(Named)
    assert differences(one, one.clone()) == []
    assert differences(one, torch.tensor([1.0, 3.0]).as_subclass(Named))[0].largest == 2


@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_numbers_of_a_sparse_tensor_are_compared(to_sparse):
    adjacent, other = torch.eye(3), torch.eye(3)
    other[0, 0] = 3
    for tolerance in (0, 1e-3):
        assert differences(to_sparse(adjacent), to_sparse(adjacent), rtol=tolerance) == []
        (found,) = differences(to_sparse(adjacent), to_sparse(other), rtol=tolerance)
        assert (found.largest, found.differing, found.numel) == (2, 1, 9)


def test_fingerprints_come_back_from_a_log_with_other_rows_and_a_run_that_went_back(tmp_path):
    path = tmp_path / "log.jsonl"
    log = ll.jsonl(path)
    states = [ll.TrainState(step=step, params={"w": torch.tensor([float(step)])}) for step in range(6)]
    for state in states:
        log(state, fingerprint(state))
        log(state, {"train/loss": 0.5})
    assert read_fingerprints(path) == {state.step: fingerprint(state) for state in states}
    other = states[3].replace(seed=9)
    log(other, fingerprint(other))
    expected = [fingerprint(state) for state in (*states[:3], other)]
    assert read_fingerprints(path) == dict(enumerate(expected))


def test_rows_of_one_step_are_read_as_one_until_the_run_goes_back(tmp_path):
    log = ll.jsonl(path := tmp_path / "prints.jsonl")
    rows = [(4, "a", 1), (4, "b", 2), (8, "a", 3), (8, "b", 4), (12, "a", 5)]

    def read_after(*more):
        for step, leaf, value in more:
            log(ll.TrainState(step=step), fingerprint({leaf: value}))
        return read_fingerprints(path)

    expected = {4: {"/a": "1", "/b": "2"}, 8: {"/a": "3", "/b": "4"}, 12: {"/a": "5"}}
    assert read_after(*rows) == expected
    assert read_after((8, "c", 6)) == {4: expected[4], 8: {"/c": "6"}}  # after step 12: a restart
    assert read_after((8, "b", 7)) == {4: expected[4], 8: {"/b": "7", "/c": "6"}}
    assert read_after((8, "b", 8)) == {4: expected[4], 8: {"/b": "8"}}  # again: a restart
    assert read_after((4, "a", 9), (4, "b", 10)) == {4: {"/a": "9", "/b": "10"}}


values = st.sampled_from([0.0, -0.0, 1.0, 1.0 + 1e-6, 1.1, -1.0, math.nan, math.inf, -math.inf, 1e300])


@given(st.lists(st.tuples(values, values), min_size=1, max_size=6), st.sampled_from([1e-12, 1e-5, 0.2]))
def test_within_a_tolerance_is_what_torch_calls_close(pairs, tolerance):
    one, other = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    close = torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    found = differences(one, other, rtol=tolerance, atol=tolerance)
    assert sum(leaf.differing for leaf in found) == int((~close).sum())
    if found:
        gaps = [
            math.inf if math.isnan(a - b) else abs(a - b) for a, b in zip(one[~close], other[~close], strict=True)
        ]
        assert found[0].largest == max(map(float, gaps))
    assert bool(differences(one, other)) == (one.numpy().tobytes() != other.numpy().tobytes())


def test_differences_say_where_and_what():
    one = {"x": torch.ones(3), "n": 1, "gone": 2.0, "text": "a"}
    found = differences(one, {"x": torch.ones(2), "n": 4, "text": "b", "new": None})
    assert [(leaf.path, leaf.largest) for leaf in found[1:2]] == [("/n", 3)]
    assert list(map(repr, found)) == [
        "/x: float32 (3,) against float32 (2,)",
        "/n: 1 against 4",
        "/gone: is in the first alone",
        "/text: 'a' against 'b'",
        "/new: is in the second alone",
    ]
    texts = {"60": "a" * 58, "61": "a" * 59, "n": 0}  # with their quotes
    long = list(map(repr, differences(texts, dict.fromkeys(texts, 0))))
    assert long == [f"/60: {texts['60']!r} against 0", "/61: a str against 0"]
    assert repr(differences(torch.ones(2), torch.ones(2).double())[0]) == "/: float32 (2,) against float64 (2,)"
    assert differences(torch.ones(2), torch.ones(2).double(), atol=1e-9) == []
    assert differences(np.float32(1), np.float32(2))[0].largest == 1
    assert repr(differences(fingerprint(one), {**one, "n": 4})[0]) == "/n: '1' against '4'"
    many = [{0: fingerprint({f"{i}": i + run for i in range(12)})} for run in range(2)]
    lines = repr(first_difference(*many)).splitlines()
    assert lines[0] == "the runs differ at step 0, from the first on:"
    assert lines[-2:] == ["  /9: '9' against '10'", "  and 2 more"]


def changed_at(step, at, name):
    """The same step, but that one number of one parameter is moved when step `at` is done."""

    def other(state, batch):
        after, metrics = step(state, batch)
        if state.step == at:
            tensor = after.params[name].detach().clone()
            tensor.view(-1)[0] += 0.5
            after = after.replace(params={**after.params, name: tensor})
        return after, metrics

    return other


@pytest.mark.slow
@given(st.integers(0, 9), st.sampled_from(["0.weight", "0.bias", "4.weight"]), st.integers(1, 3), st.booleans())
@settings(max_examples=examples(15))
def test_one_number_that_moves_is_found_at_its_step(at, name, every, donate):
    case, other = Case(donate=donate), Case(donate=donate)
    other.step, histories = changed_at(other.step, at, name), ({}, {})
    for run, kept in zip((case, other), histories, strict=True):
        run.train(
            13,
            lambda state, *_, kept=kept: kept.update(record_steps(kept, state)) if state.step % every == 0 else None,
        )
    found = first_difference(*histories)
    assert (found.equal, found.different) == (at - at % every, at - at % every + every)
    for step in range(found.equal, found.different):
        one, two = (
            replay(run.step, kept, run.loader, step, grad_fn=run.grad_fn)
            for run, kept in zip((case, other), histories, strict=True)
        )
        if leaves := differences(one, two):
            break
    # Batch, metrics and gradients are the same, and of all that the step made one number is not.
    (leaf,) = leaves
    assert (step, leaf.path, leaf.differing) == (at, f"/after/params/{name}", 1)
    assert leaf.largest == pytest.approx(0.5, rel=1e-6)
    equal = {step: state for step, state in histories[1].items() if step <= at}
    assert first_difference(histories[0], equal) is None
    assert first_difference(histories[0], {found.different: histories[1][found.different]}).equal is None


@pytest.mark.slow
def test_two_logs_and_a_log_against_states_tell_the_step(tmp_path):
    paths, kept = [tmp_path / "a", tmp_path / "b"], {}
    for path in paths:
        case = Case()
        case.step = case.step if path.name == "a" else changed_at(case.step, 6, "0.weight")
        log = ll.jsonl(path)
        case.train(10, lambda state, *_, log=log: log(state, fingerprint(state)))
    Case().train(10, lambda state, *_: kept.update(record_steps(kept, state)))
    first, second = map(read_fingerprints, paths)
    for found in (first_difference(first, second), first_difference(kept, second), first_difference(second, kept)):
        assert (found.equal, found.different) == (6, 7)
        assert [leaf.path for leaf in found.leaves] == ["/params/0.weight"]
    assert first_difference(kept, first) is None


@given(st.integers(2, 12), st.integers(0, 10**6))
@settings(max_examples=examples(25))
def test_rows_are_ranked_by_their_own_gradients(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(count, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    model = nn.Linear(3, 3, bias=False).double()
    loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    state, indices = ll.init_state(model), torch.randperm(100, generator=generator)[:count]
    found = worst_samples(ll.make_grad_fn(model, loss), state, (x, y), indices)
    with torch.no_grad():
        error = x @ model.weight.T - y
        norms = 2 / 3 * error.norm(dim=1) * x.norm(dim=1)  # of an outer product
    assert [row.row for row in found] == norms.argsort(descending=True).tolist()
    assert [row.index for row in found] == indices[norms.argsort(descending=True)].tolist()
    for row in found:
        torch.testing.assert_close(row.grad_norm, norms[row.row].item(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(row.loss, error[row.row].square().mean().item(), rtol=1e-12, atol=1e-12)
    per_sample = worst_samples(ll.contrib.make_per_sample_grad_fn(model, loss), state, (x, y))
    assert [(row.row, row.index) for row in per_sample] == [(row.row, None) for row in found]


def test_rows_have_no_gradients_of_their_own_with_batch_norm_in_training_mode():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    loss, x = mean_square, torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\) would normalise each sample by the others"):
        worst_samples(ll.accumulate(ll.make_grad_fn(model, loss), 1), ll.init_state(model), x)
    model[1].eval()
    assert len(worst_samples(ll.make_grad_fn(model, loss), ll.init_state(model), x)) == 4


def test_rows_that_are_not_finite_come_first_and_indices_must_fit():
    model = nn.Linear(1, 1, bias=False)
    grad_fn = ll.make_grad_fn(model, mean_square)
    batch = torch.tensor([[1.0], [math.nan], [3.0], [math.inf]])
    found = worst_samples(grad_fn, ll.init_state(model), batch, [10, 11, 12, 13])
    assert [row.index for row in found] == [11, 13, 12, 10]
