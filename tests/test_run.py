"""The record of a run: made by `init_state`, carried by all that follows, and written by nothing."""

import copy
import pickle

import pytest
import torch
from shared import SGD, mean_square, one_report
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import looplib as ll
from looplib import debug

DATA = torch.linspace(-1, 1, 24).reshape(8, 3)


def loader_of(size=2, **options):
    return ll.make_loader(DATA, batch_size=size, **options)


def started(loader=None, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, ll.init_state(model, SGD, loader=loader, seed=seed, **options)


def one_step(state, model, compiled=False, **options):
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), SGD, **options)
    return (ll.compile_step(step, backend="eager") if compiled else step)(state, DATA[:2])[0]


def restored(state, model, folder):
    ckpt = ll.checkpoint_io(folder)
    ckpt.save(state)
    return ckpt.restore(state)


# What carries it: the same object, or in another process or checkpoint, the same settings.
SAME = {
    "replace": lambda state, model: state.replace(step=3, params=state.params),
    "a pure step": one_step,
    "a donated step": lambda state, model: one_step(state, model, donate=True),
    "a compiled step": lambda state, model: one_step(state, model, compiled=True),
    "apply_gradients": lambda state, model: ll.apply_gradients(SGD, state, {"bias": torch.ones(2)})[0],
    "copy_state": lambda state, model: ll.copy_state(state),
    "bind": lambda state, model: ll.bind(model, ll.copy_state(state)),
    "end_epoch": lambda state, model: ll.state.end_epoch(state.replace(epoch_length=None)),
    "fold_in": lambda state, model: ll.state.fold_in(state, 1),
    "stack": lambda state, model: ll.transforms.stack_states([state, state], same_seeds=True),
    "member": lambda state, model: ll.transforms.unstack_states(ll.transforms.stack_states([state]))[0],
    "tree_map": lambda state, model: pytree.tree_map(torch.clone, state),
    "copy": lambda state, model: copy.copy(state),
}
EQUAL = {
    "pickle": lambda state, model, folder: pickle.loads(pickle.dumps(state)),
    "deepcopy": lambda state, model, folder: copy.deepcopy(state),
    "restore": restored,
}
SETTINGS = ("optimizer", "model", "loaders")


def settings_of(run):
    return [getattr(run, name) for name in SETTINGS]


@one_report
@pytest.mark.parametrize("path", SAME)
def test_states_that_follow_hold_the_same_record(path):
    model, state = started(loader_of())
    run = state.run
    assert SAME[path](state, model).run is run


@pytest.mark.every_case
@pytest.mark.parametrize("path", EQUAL)
def test_states_that_are_written_out_and_read_hold_equal_settings(path, tmp_path):
    model, state = started(loader_of())
    found = EQUAL[path](state, model, tmp_path).run
    assert settings_of(found) == settings_of(state.run)
    assert found.loaders == (loader_of().description,)
    assert found.model == {"class": "Linear", "parameters": 8}
    assert found.optimizer["SGD"]["class"] == "torch.optim.sgd.SGD"


def test_a_restore_says_from_where(tmp_path):
    model, state = started(loader_of())
    run = restored(ll.copy_state(state).replace(step=7), model, tmp_path).run
    assert (run.restored, run.at_step) == (str(ll.checkpoint_io(tmp_path).latest().path), 7)
    assert run.saved_loaders == run.loaders == (loader_of().description,)
    weights = ll.checkpoint_io(tmp_path).restore(state, weights_only=True)
    assert weights.run is state.run
    assert (state.run.restored, state.run.saved_loaders) == ("", ())


def test_no_comparison_of_states_sees_it():
    _, one = started(loader_of(2))
    _, other = started(loader_of(2, seed=9))
    assert one.run.loaders != other.run.loaders
    structures = [pytree.tree_flatten(state)[1] for state in (one, other)]
    assert structures[0] == structures[1]
    both = pytree.tree_map(torch.add, one, other)  # of the first run
    assert both.run is one.run
    assert torch.equal(both.params["weight"], 2 * one.params["weight"])
    assert debug.fingerprint(one) == debug.fingerprint(other)
    assert debug.differences(one, other) == []
    assert not any("run" in path for path in debug.fingerprint(one))
    assert pytree.tree_flatten(one.replace(step=1))[1] != structures[0]  # a count is seen


def test_a_structure_goes_through_json_without_it():
    structure = pytree.tree_flatten(started(loader_of())[1])[1]
    text = pytree.treespec_dumps(structure)
    assert "batch_size" not in text
    assert pytree.treespec_loads(text) == structure


def slots_and_fields_of(record):
    slots = [name for cls in type(record).__mro__ for name in getattr(cls, "__slots__", ())]
    slots = {name: getattr(record, name) for name in slots if name not in ("__weakref__", "__dict__")}
    return {**slots, **vars(record)}


def test_a_loader_changes_nothing_that_it_is_given(tmp_path):
    for state in (
        started(loader_of())[1],
        started(None)[1].replace(epoch_length=4),
        restored(*reversed(started(loader_of())), tmp_path),
    ):
        for loader in (loader_of(), loader_of(seed=4)):
            before = slots_and_fields_of(state)
            run_before = dict(vars(state.run))
            assert {"_at", "_lease", "run", "step"} <= before.keys()
            list(loader(state))
            after = slots_and_fields_of(state)
            assert before.keys() == after.keys()
            assert all(after[name] is value for name, value in before.items())
            assert vars(state.run) == run_before


# `init_state(loader=)`


class Plain(IterableDataset):
    def __iter__(self):
        return iter(DATA)


class Sized:
    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(5))


def test_the_first_loader_gives_the_length_of_an_epoch_and_those_of_looplib_their_settings():
    two, four = loader_of(2), loader_of(4)
    theirs = DataLoader(TensorDataset(DATA), batch_size=3)
    stream = ll.make_loader(Plain(), batch_size=2)
    for loader, length, known in (
        (two, 4, [two]),
        ([four, two], 2, [four, two]),
        ((two, theirs), 4, [two]),
        ([theirs, two], 3, [two]),
        (theirs, 3, []),
        (Sized(), 5, []),
        (stream, None, [stream]),
        (DataLoader(Plain(), batch_size=2), None, []),
        (None, None, []),
    ):
        state = started(loader)[1]
        assert state.epoch_length == length
        assert [*state.run.loaders] == [each.description for each in known]
    assert started(stream, epoch_length=3)[1].epoch_length == 3
    assert started(two, epoch_length=2)[1].epoch_length == 2
    assert started(two)[1].replace(epoch_length=None).run.loaders == (two.description,)


@one_report
@pytest.mark.parametrize(
    "wrong",
    [
        DATA,
        TensorDataset(DATA),
        [DATA, DATA],
        [[DATA], [DATA]],
        {"x": DATA},
        4,
        "loader",
        Plain(),
        iter([DATA]),
        loader_of()(ll.TrainState()),
        [loader_of(), 3],
        [],
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_has_another_length_than_an_epoch_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match=r"^loader is .*; give"):
        started(wrong)


def test_a_run_of_a_loader_of_torchs_is_that_of_its_length():
    """The same bits as with `epoch_length=`, and with the raw loop's count of batches."""
    theirs = DataLoader(DATA, batch_size=3)
    states = []
    for options in ({"loader": theirs}, {"epoch_length": len(theirs)}):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        state = ll.init_state(model, SGD, **options)
        step = ll.make_train_step(ll.make_grad_fn(model, mean_square), SGD)
        for _ in range(2):
            for batch in theirs:
                state, _ = step(state, batch)
        states.append(state)
    assert (states[0].epoch, states[0].batch, states[0].step) == (2, 0, 6)
    assert debug.differences(*states) == []
