"""Every public function that takes one of looplib's things, given every other of them: refused by name, when built.

The table is made from the rooms' indexes: a new function with a parameter called `grad_fn`, `sink` or the like is in it
without a line here.
"""

import inspect
import re

import pytest
import torch
from torch import nn

import looplib as ll

pytestmark = pytest.mark.every_case
ROOMS = (
    "contrib",
    "debug",
    "evaluation",
    "gradients",
    "grads",
    "log",
    "losses",
    "optim",
    "predicates",
    "steps",
    "transforms",
)
# What a parameter of this name takes.
PARAMETERS = {
    "grad_fn": {"grad_fn"},
    "optimizer": {"optimizer"},
    "train_step": {"train_step"},
    "eval_step": {"eval_step"},
    "predict_step": {"predict_step"},
    "loss_fn": {"loss_fn"},
    "metric_fn": {"loss_fn"},
    "predict_fn": {"loss_fn"},
    "embed_fn": {"loss_fn"},
    "model": {"model"},
    "sink": {"sink"},
    "sinks": {"sink"},
    "predicate": {"predicate"},
}
STEPS = {"train_step", "eval_step", "predict_step"}
SPECIAL = {
    ("log.windowed", "when"): {"predicate"},
    ("predicates.stop_when", "step"): STEPS,
    ("evaluation.split_on_oom", "step"): {"eval_step", "predict_step"},
    ("transforms.vmap_step", "step"): STEPS,
    ("transforms.compile_step", "step"): STEPS,
    ("losses.autocast", "function"): {"loss_fn"},
}
# A KeyError here says: add the parameter of your new function, with a value that it takes.
FILLERS = {
    "max_norm": 1.0,
    "max_value": 1.0,
    "noise_multiplier": 1.0,
    "microbatches": 2,
    "decay": 0.9,
    "max_consecutive": 3,
    "start": 0,
    "batch": torch.ones(4, 3),
    "batches": [torch.ones(4, 3)],
    "names": {"a": "b"},
    "embedding_loss": lambda embeddings: embeddings.sum(),
    "modules": nn.Linear,
    "blocks": nn.Linear,
    "embedding": "0",
    "frozen": lambda name, step: False,
    "optimizer_of_lr": lambda lr: ll.optimizer(torch.optim.SGD, lr=lr),
    "step": 1,
    "path": "runs/none",
    "directory": "runs/none",
    "size": 2,
}


def loss_fn(model, batch):
    return model(batch).square().mean()


def things():
    model = nn.Linear(3, 2)
    optimizer, grad_fn = ll.optimizer(torch.optim.SGD, lr=0.1), ll.make_grad_fn(model, loss_fn)
    return {
        "loss_fn": loss_fn,
        "model": model,
        "grad_fn": grad_fn,
        "optimizer": optimizer,
        "torch's optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train_step": ll.make_train_step(grad_fn, optimizer),
        "eval_step": ll.make_eval_step(model, lambda model, batch: {"loss": loss_fn(model, batch)}),
        "predict_step": ll.make_predict_step(model, lambda model, batch: model(batch)),
        "predicate": ll.every_n_steps(2),
        "sink": ll.console(),
        "file": ll.jsonl("runs/none.jsonl"),
        "schedule": ll.warmup_cosine(0.1, warmup=1, total=9),
        "loader": ll.make_loader(torch.ones(4, 3), batch_size=2),
        "state": ll.init_state(model, optimizer),
        "number": 3,
    }


THINGS = things()
OF_A_KIND = {"file": "sink"}


def takers():
    """(name, function, parameter, kinds that it takes)."""
    for room in ROOMS:
        for name in getattr(ll, room).__all__:
            function = getattr(getattr(ll, room), name)
            if isinstance(function, type) or not callable(function):
                continue
            for parameter in inspect.signature(function).parameters:
                kinds = SPECIAL.get((f"{room}.{name}", parameter)) or PARAMETERS.get(parameter)
                if kinds:
                    yield f"{room}.{name}", function, parameter, kinds


TABLE = [
    pytest.param(function, parameter, thing, id=f"{name}({parameter}={thing})")
    for name, function, parameter, kinds in takers()
    for thing in THINGS
    if OF_A_KIND.get(thing, thing) not in kinds
]


def call(function, parameter, thing, state=None):
    """The function with one argument of another kind, and all others right."""
    given = THINGS[thing] if isinstance(thing, str) else thing
    args, kwargs = [], {}
    for name, one in inspect.signature(function).parameters.items():
        right = {"state": THINGS["state"] if state is None else state, **FILLERS}
        right["loader"] = THINGS["loader"]
        right |= {p: THINGS[next(iter(kinds))] for p, kinds in PARAMETERS.items()}
        right |= {p: THINGS[sorted(k)[0]] for (f, p), k in SPECIAL.items() if f.endswith(f".{function.__name__}")}
        if one.kind is one.VAR_POSITIONAL:
            args += [given] if name == parameter else []
        elif one.kind is one.VAR_KEYWORD:
            continue
        elif name == parameter or one.default is one.empty:
            value = given if name == parameter else right[name]
            if one.kind is one.KEYWORD_ONLY:
                kwargs[name] = value
            else:
                args.append(value)
        elif one.kind is not one.KEYWORD_ONLY:
            args.append(one.default)
    out = function(*args, **kwargs)
    return list(out) if inspect.isgenerator(out) else out


def test_the_table_has_the_functions_that_came_to_mind_and_many_more():
    names = {name for name, *_ in takers()}
    assert {"grads.accumulate", "grads.clip_by_global_norm", "steps.make_train_step", "evaluation.evaluate"} <= names
    assert len(names) > 40
    assert len(TABLE) > 500


@pytest.mark.parametrize(("function", "parameter", "thing"), TABLE)
def test_what_is_of_another_kind_is_refused_by_name(function, parameter, thing):
    with pytest.raises((TypeError, ValueError)) as raised:
        call(function, parameter, thing)
    message = str(raised.value)
    assert not re.search(
        r"positional argument|unexpected keyword|has no attribute|not callable|not iterable", message
    )
    assert re.search(r"\bgive\b|\btakes\b|\bneeds\b", message), message


def not_a_step(model, batch):
    return model(batch)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ll.clip_by_global_norm(THINGS["train_step"], 1.0),
            r"clip_by_global_norm got a train step .*put it inside",
        ),
        (
            lambda: ll.accumulate(THINGS["train_step"], 2),
            r"accumulate got a train step .*make_train_step\(accumulate",
        ),
        (
            lambda: ll.make_train_step(loss_fn, THINGS["optimizer"]),
            r"loss_fn\(model, batch\), which looks like a loss",
        ),
        (lambda: ll.make_train_step(lambda m, b: None, THINGS["optimizer"]), r"\(m, b\); give a grad_fn"),
        (lambda: ll.accumulate(loss_fn, 2), r"accumulate got loss_fn\(model, batch\)"),
        (lambda: ll.evaluate(THINGS["model"], THINGS["state"], []), "evaluate got a Linear; give an eval step"),
        (lambda: ll.evaluate({"a": THINGS["model"]}, THINGS["state"], {"a": []}), "evaluate got a Linear"),
        (lambda: ll.evaluate(not_a_step, THINGS["state"], []), "evaluate got not_a_step"),
        (
            lambda: ll.make_grad_fn(THINGS["model"], nn.MSELoss()),
            "make_grad_fn got a MSELoss, which takes outputs and targets; loss_fn is called as loss_fn.model, batch.",
        ),
    ],
)
def test_the_message_says_what_was_found_and_what_to_give(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


def test_plain_functions_of_a_users_own_are_taken_everywhere():
    state, batch = THINGS["state"], torch.ones(4, 3)
    ll.clip_by_global_norm(lambda *call: THINGS["grad_fn"](*call), 1.0)(state, batch)
    ll.accumulate(lambda state, batch, request: THINGS["grad_fn"](state, batch, request), 2)(state, batch)
    assert ll.evaluate(lambda state, batch: {"n": ll.Mean(len(batch))}, state, [batch]) == {"n": 4.0}
    assert list(ll.predict(lambda s, b: b, state, [batch])) == [batch]
    ll.tee(lambda state, values: None, print)(state, {"a": 1.0})
    ll.log.only(lambda *args: None, {"a"})(state, {"a": 1.0})
    ll.autocast(lambda m, b: m(b))(THINGS["model"], batch)


# Plain functions of a model, whose parameters are not named so, and what they fail with or return.
PLAIN = {
    "calls the model": lambda m, b, more=None: m(b).square().mean(),
    "reads a weight": lambda m, b, more=None: b @ m.weight.T,
    "gives the model to torch": lambda m, b, more=None: nn.functional.linear(b, m),
    "returns nothing": lambda m, b, more=None: None,
    "returns a tuple": lambda m, b, more=None: (b, b, b),
}
CALLED = [
    pytest.param(name, function, parameter, kinds, plain, id=f"{name}({parameter}={plain})")
    for name, function, parameter, kinds in takers()
    if kinds & (STEPS | {"grad_fn"}) and name != "grads.wrapper"
    for plain in PLAIN
    if "predict_step" not in kinds or "returns" not in plain  # which a predict step may return
]


@pytest.mark.parametrize(("name", "function", "parameter", "kinds", "plain"), CALLED)
def test_a_plain_function_of_another_kind_is_named_when_it_is_called(name, function, parameter, kinds, plain):
    optimizer = ll.optim.dynamic_loss_scale(THINGS["optimizer"])
    optimizer = optimizer if name == "grads.scale_loss" else THINGS["optimizer"]
    state = ll.init_state(THINGS["model"], optimizer, epoch_length=2)
    batch = [torch.ones(4, 3)] if name == "grads.accumulate" else torch.ones(4, 3)
    with pytest.raises((TypeError, ValueError)) as raised:
        call(function, parameter, PLAIN[plain], state=state)(state, batch)
    message = str(raised.value)
    assert "<lambda>" in message or "got a function" in message
    assert re.search(r"\bgive\b|Give it", message), message


def test_a_users_own_error_is_handed_on():
    def step(state, batch):
        return {"n": ll.Mean(batch.nonsense)}

    with pytest.raises(AttributeError, match="nonsense"):
        ll.evaluate(step, THINGS["state"], [torch.ones(4, 3)])


def test_the_message_names_the_function_that_the_user_gave_through_wrappers():
    loss = PLAIN["calls the model"]
    step = ll.predicates.stop_when(ll.evaluation.split_on_oom(loss), ll.after_steps(9))
    with pytest.raises(TypeError, match=r"split_on_oom got <lambda>\(m, b, more\), .* failed on the state"):
        ll.evaluate(step, THINGS["state"], [torch.ones(4, 3)])


def test_steps_in_a_wrapper_of_any_step_are_still_of_their_kind():
    step = ll.predicates.stop_when(THINGS["train_step"], ll.after_steps(9))
    with pytest.raises(TypeError, match=r"evaluate got a train step \(of stop_when\); give an eval step"):
        ll.evaluate(step, THINGS["state"], [])
    with pytest.raises(TypeError, match=r"predict got an eval step \(of split_on_oom\)"):
        list(ll.predict(ll.evaluation.split_on_oom(THINGS["eval_step"]), THINGS["state"], []))


def test_a_wrapper_that_keeps_the_part_to_itself_does_not_lose_the_loss_scale():
    optimizer = ll.optim.dynamic_loss_scale(THINGS["optimizer"])
    state, batch = ll.init_state(THINGS["model"], optimizer), torch.ones(4, 3)

    def deaf(state, batch, request=None):
        return THINGS["grad_fn"](state, batch)

    with pytest.raises(TypeError, match="scale_loss would divide gradients by a scale that their loss was not"):
        ll.grads.scale_loss(deaf)(state, batch)
    heard = ll.grads.scale_loss(lambda *call: THINGS["grad_fn"](*call))(state, batch).grads
    torch.testing.assert_close(heard, THINGS["grad_fn"](state, batch).grads)
