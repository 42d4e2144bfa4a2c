"""Names that users of other libraries look for: what to write instead, and nothing that `hasattr` would take for true."""

import copy
import inspect
import pickle
import re
from types import ModuleType

import pytest
import torch
from public import public_names
from shared import SGD, mean_square, one_report
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
        (state, "current_epoch", r"it is state\.epoch"),
        (state, "batch_idx", r"it is state\.batch"),
        (ll, "LearningRateMonitor", r"ll\.optim\.hyperparameters"),
        (ll, "AdamW", r"ll\.optimizer\(torch\.optim\.AdamW"),
        (ll, "load", r"ll\.checkpoint_io\(folder\)\.restore"),
        (ll, "Callback", r"if ll\.every_n_steps"),
        (ll, "StepLR", r"it is ll\.schedules\.step_decay"),
        (ll, "NoSuchLR", r"'NoSuchLR': recipes/WORDS\.md"),
        (ll.optim, "AdamW", r"ll\.optimizer\(torch\.optim\.AdamW, lr=1e-3\)"),
        (ll.grads, "clip_by_global_norm", r"it is ll\.clip_by_global_norm$"),
        (ll.schedules, "linear_warmup", r"it is ll\.schedules\.warmup_linear$"),
        (ll.schedules, "get_cosine_schedule_with_warmup", r"it is ll\.warmup_cosine$"),
        (ll.metrics, "confusion_matrix", r"it is ll\.metrics\.ConfusionMatrix$"),
        (ll.predicates, "every_n_step", r"it is ll\.every_n_steps$"),
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
    with pytest.raises(TypeError, match=r"reduce got a Tensor; give metrics, .*\{'loss': ll\.Mean\(x, 1\)\}"):
        ll.distributed.reduce(torch.tensor(1.0))
    with pytest.raises(TypeError, match="dataset is the text 'mnist', whose samples would be characters"):
        ll.make_loader("mnist", batch_size=4)
    with pytest.raises(TypeError, match=r"write ll\.at_epoch_end\(\)\(state\)"):
        ll.at_epoch_end(state)
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
    # By its *parameters: NoReturn, type checkers refuse `ll.optimizer(torch.optim.AdamW, model.parameters())`.
    assert "NoReturn" not in text or name in ("optim.optimizer", "predicates.at_epoch_end")


ROOMS = [
    room for name in ll.__all__ if isinstance(room := getattr(ll, name), ModuleType) and hasattr(room, "__path__")
]


@one_report
@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_each_room_explains_torchs_optimizers_and_schedulers(room):
    classes = [
        cls for cls in vars(torch.optim).values() if isinstance(cls, type) and cls is not torch.optim.Optimizer
    ]
    for cls in classes:
        with pytest.raises(AttributeError, match=rf"write ll\.optimizer\(torch\.optim\.{cls.__name__}, lr="):
            getattr(room, cls.__name__)
    for name in ("CosineAnnealingLR", "OneCycleLR", "get_wsd_schedule"):
        with pytest.raises(AttributeError, match=r"it is ll\.schedules\.(\w+)$") as error:
            getattr(room, name)
        assert hasattr(ll.schedules, str(error.value).rpartition(".")[2])
    for name in ("__wrapped__", "_private", "no_such_thing"):
        assert not hasattr(room, name)


def test_an_instance_is_answered_with_the_line_that_makes_the_same_update():
    for cls, options in (
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": 0.02, "betas": (0.8, 0.95), "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Rprop, {"lr": 0.1, "etas": (0.4, 1.3)}),
    ):
        model, raw = (nn.Linear(3, 2) for _ in range(2))
        raw.load_state_dict(model.state_dict())
        theirs = cls(raw.parameters(), **options)
        with pytest.raises(TypeError, match=r"needs an optimizer class") as error:
            ll.optimizer(theirs)
        optimizer = eval(re.search(r"write (ll\.optimizer\(.*?\)), without", str(error.value))[1])
        train_step = ll.make_train_step(ll.make_grad_fn(model, mean_square), optimizer)
        state = ll.init_state(model, optimizer)
        for x in torch.randn(3, 4, 3):
            state, _ = train_step(state, x)
            theirs.zero_grad()
            mean_square(raw, x).backward()
            theirs.step()
        torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))
    with pytest.raises(TypeError, match=r"groups=\[\(predicate, \{\.\.\.\}\)\]"):
        ll.optimizer(torch.optim.SGD([{"params": [raw.weight]}, {"params": [raw.bias], "lr": 0.2}], lr=0.1))
    for call in (lambda: ll.optimizer(torch.optim.AdamW), lambda: ll.optimizer(torch.optim.AdamW, lr=None)):
        with pytest.raises(TypeError, match="lr is None; give a number such as 1e-3"):
            call()


class Lightning(nn.Linear):
    """A module with the methods of a LightningModule."""

    def training_step(self, batch, batch_idx):
        return self(batch).mean()

    def validation_step(self, batch):
        return {"mean": self(batch).mean()}

    def loss(self, model, batch):
        return model(batch).mean()


def test_a_method_of_a_lightning_module_is_answered_with_a_function_that_calls_it():
    model = Lightning(2, 1)
    state = ll.init_state(model, SGD)
    with pytest.raises(TypeError, match=r"got the method Lightning.training_step, and loss_fn is called") as error:
        ll.make_grad_fn(model, model.training_step)
    grad_fn = eval("ll." + re.search(r"Write (make_grad_fn\(.*\))$", str(error.value))[1])
    assert grad_fn(state, torch.ones(3, 2)).grads["bias"] == 1
    with pytest.raises(
        TypeError, match=r"Write make_eval_step\(model, lambda model, batch: model.validation_step\(batch\)\)"
    ):
        ll.make_eval_step(model, model.validation_step)
    assert ll.make_grad_fn(model, model.loss)(state, torch.ones(3, 2)).grads["bias"] == 1


def test_a_loss_function_in_place_of_a_gradient_function_is_refused_at_once():
    def my_loss(policy, batch):
        return policy(batch).mean()

    for make in (
        lambda: ll.make_train_step(my_loss, SGD),
        lambda: ll.make_train_step(lambda m, b: my_loss(m, b), SGD),
        lambda: ll.accumulate(my_loss, 2),
        lambda: ll.grads.reduce_gradients(my_loss),
        lambda: ll.grads.map_batch(my_loss, lambda batch: batch),
        lambda: ll.contrib.sam(my_loss),
    ):
        with pytest.raises(
            TypeError, match=r"got .*\(.*, b.*\), which cannot be called as grad_fn\(state, batch, \*\*request\)"
        ):
            make()
    own = ll.make_grad_fn(nn.Linear(2, 1), mean_square)
    for grad_fn in (
        lambda state, batch, **request: own(state, batch),
        lambda *args, **request: own(*args, **request),
    ):
        ll.make_train_step(grad_fn, SGD)
