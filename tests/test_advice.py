"""Names that users of other libraries look for: what to write instead, and nothing that `hasattr` would take for true."""

import copy
import inspect
import pickle

import pytest
import torch
from public import public_names
from shared import SGD
from torch import nn

import looplib as ll


def test_a_name_of_a_room_is_found_from_the_top():
    with pytest.raises(AttributeError, match=r"module 'looplib' has no attribute 'AUC': it is ll\.metrics\.AUC$"):
        ll.AUC  # noqa: B018
    assert not hasattr(ll, "no_such_thing_at_all")
    assert not hasattr(ll, "__wrapped__")
    assert not hasattr(ll, "")
    with pytest.raises(ImportError, match="cannot import name 'AUC' from 'looplib'"):
        from looplib import AUC  # noqa: F401


def test_an_optimizer_and_a_state_have_only_what_they_have():
    state = ll.init_state(nn.Linear(2, 1), SGD)
    for name in ("step", "zero_grad", "state_dict", "__array__"):
        assert not hasattr(SGD, name)
    for name in ("model", "loss", "__len__"):
        assert not hasattr(state, name)
    assert copy.copy(state).step == pickle.loads(pickle.dumps(state)).step == 0


@pytest.mark.parametrize("cls", [ll.types.Optimizer, ll.TrainState, ll.checkpoint.CheckpointIO])
def test_an_attribute_that_is_only_explained_is_offered_nowhere(cls):
    explained = {"zero_grad", "state_dict", "loss", "global_step", "resume", "load"}
    assert explained & {name for base in cls.__mro__ for name in vars(base)} == set()


def test_what_a_newcomer_tries_first_is_answered(tmp_path):
    state = ll.init_state(nn.Linear(2, 1), SGD)
    ckpt, log = ll.checkpoint_io(tmp_path / "checkpoints"), ll.jsonl(tmp_path / "log.jsonl")
    for owner, name, answer in (
        (ckpt, "load", r"ckpt\.restore\(state\)"),
        (SGD, "lr", r"ll\.optim\.hyperparameters\(optimizer, state\)"),
        (state, "global_step", r"it is state\.step"),
        (ll, "AdamW", r"ll\.optimizer\(torch\.optim\.AdamW"),
        (ll, "load", r"ll\.checkpoint_io\(folder\)\.restore"),
        (ll, "Callback", r"if ll\.every_n_steps"),
        (ll, "StepLR", r"'StepLR': recipes/WORDS\.md"),
    ):
        with pytest.raises(AttributeError, match=answer):
            getattr(owner, name)
    assert not hasattr(ckpt, "load")
    with pytest.raises(TypeError, match="metrics is the text 'best'; give the scores by name"):
        ckpt.save(state, "best")
    with pytest.raises(
        AttributeError, match=r"'lr': what ll\.optimizer returns does not change; give lr= to ll\.optimizer"
    ):
        SGD.lr = 0.5
    with pytest.raises(TypeError, match="dataset is the text 'mnist', whose samples would be characters"):
        ll.make_loader("mnist", batch_size=4)
    with pytest.raises(TypeError, match="give several as a dict by label"):
        ll.plot(["a.jsonl", "b.jsonl"])
    # Python's own errors name what the user called.
    for donate in (True, False):
        train_step = ll.make_train_step(
            ll.make_grad_fn(nn.Linear(2, 1), lambda model, x: model(x)), SGD, donate=donate
        )
        with pytest.raises(TypeError, match=r"^train_step\(\) missing 1 required positional argument: 'batch'"):
            train_step(torch.ones(2))
    with pytest.raises(TypeError, match=r"^log\(\) missing 1 required positional argument: 'values'"):
        log({"loss": 1.0})


@pytest.mark.parametrize("name", torch.optim.lr_scheduler.__all__)
def test_a_scheduler_of_torch_is_answered_with_a_schedule(name):
    with pytest.raises(TypeError, match=r"changes an optimizer in place; give a schedule, .*ll\.schedules"):
        ll.optimizer(torch.optim.SGD, lr=getattr(torch.optim.lr_scheduler, name))


@pytest.mark.parametrize("name", public_names())
def test_a_signature_shows_only_arguments_that_can_be_given(name):
    try:
        text = str(inspect.signature(public_names()[name]))
    except (TypeError, ValueError):  # a value, or a class without a signature
        return
    assert "NoReturn" not in text
