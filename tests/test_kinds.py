"""Every public function that takes one of looplib's things, given every other of them, or text and NaN for a number:
refused by name, when built.

The table is made from the rooms' indexes: a new function with a parameter called `grad_fn`, `logger` or the like is in it
without a line here.
"""

import inspect
import math
import re

import pytest
import torch
from shared import assert_each_refused
from torch import nn

import looplib as ll
import looplib.testing

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
ALL_ROOMS = (*ROOMS, "checkpoint", "data", "distributed", "metrics", "schedules", "state", "testing")
STEPS = {"train_step", "eval_step", "predict_step"}
# What a parameter of this name takes.
PARAMETERS = {name: {name} for name in (*STEPS, "grad_fn", "optimizer", "loss_fn", "model", "logger", "predicate")}
PARAMETERS |= {
    "state": {"state"},
    "metric_fn": {"loss_fn"},
    "predict_fn": {"loss_fn"},
    "embed_fn": {"loss_fn"},
    "loggers": {"logger"},
}
SPECIAL = {
    ("log.windowed", "when"): {"predicate"},
    ("evaluation.split_on_oom", "step"): {"eval_step", "predict_step"},
    ("transforms.vmap_step", "step"): STEPS,
    ("transforms.compile_step", "step"): STEPS,
    ("losses.autocast", "function"): {"loss_fn"},
}
MODEL, BATCH = nn.Linear(3, 2), torch.ones(4, 3)


def loss_fn(model, batch):
    return model(batch).square().mean()


def not_a_step(model, batch):
    return model(batch)


SGD, GRAD_FN = ll.optimizer(torch.optim.SGD, lr=0.1), ll.make_grad_fn(MODEL, loss_fn)
THINGS = {
    "loss_fn": loss_fn,
    "model": MODEL,
    "grad_fn": GRAD_FN,
    "optimizer": SGD,
    "torch's optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.1),
    "train_step": ll.make_train_step(GRAD_FN, SGD),
    "eval_step": ll.make_eval_step(MODEL, lambda model, batch: {"loss": loss_fn(model, batch)}),
    "predict_step": ll.make_predict_step(MODEL, not_a_step),
    "predicate": ll.every_n_steps(2),
    "logger": ll.console(),
    "file": ll.jsonl("runs/none.jsonl"),
    "schedule": ll.warmup_cosine(0.1, warmup=1, total=9),
    "loader": ll.make_loader(BATCH, batch_size=2),
    "state": ll.init_state(MODEL, SGD),
    "number": 3,
}
# Right arguments for parameters of these names, beside the things.
FILLERS = {
    "max_norm": 1.0,
    "max_value": 1.0,
    "noise_multiplier": 1.0,
    "microbatches": 2,
    "decay": 0.9,
    "max_consecutive": 3,
    "start": 0,
    "batch": BATCH,
    "batches": [BATCH],
    "names": {"a": "b"},
    "embedding_loss": torch.sum,
    "modules": nn.Linear,
    "blocks": nn.Linear,
    "embedding": "0",
    "frozen": lambda name, step: False,
    "optimizer_of_lr": lambda lr: SGD,
    "path": "runs/none",
    "directory": "runs/none",
    "size": 2,
    "when": THINGS["predicate"],
    "function": loss_fn,
    "batch_fn": lambda state, batch: batch,
    # For functions of numbers alone.
    **dict.fromkeys(
        ("cycles", "every", "fall", "n", "rise", "steps", "timescale", "total", "warmup", "length", "batch_size"), 2
    ),
    **dict.fromkeys(("factor", "final", "peak"), 0.5),
    "lengths": [1, 2],
    "weights": [1.0, 2.0],
    "boundaries": [2],
    "collate_fn": list,
    "dataset": BATCH,
    "inputs": torch.ones(2, 3, 4),
    "labels": torch.ones(2, 3, dtype=torch.int64),
    "head": nn.Linear(4, 5),
    "logs": [{"step": 1, "loss": 1.0}],
    "monitor": "eval/loss",
    "one": BATCH,
    "other": BATCH,
    "folder": "runs/none",
    "index": 0,
    "seed": 0,
    "rows": {},
    "predictions": torch.ones(2, 3, 5),
    "scores": {"eval/loss": 1.0},
    "source": MODEL.state_dict(),
    "torch_optimizer": THINGS["torch's optimizer"],
    "kept": {},
    "tensors": [BATCH],
    "begin": loss_fn,
    "cls": torch.optim.SGD,
    "read": lambda shard, start: iter(BATCH),
    "base": MODEL,
    "lr": 0.1,
    "loss_of_state": lambda state: state.params["weight"].sum(),
    "make_run": lambda width: (MODEL, THINGS["train_step"], THINGS["state"]),
    "schedule": THINGS["schedule"],
    "tokens": torch.ones(2, 9),
    **{name: THINGS[next(iter(kinds))] for name, kinds in PARAMETERS.items()},
}


def takers():
    """(name, function, parameter, kinds that it takes)."""
    for room in ALL_ROOMS:
        for name in getattr(ll, room).__all__:
            function = getattr(getattr(ll, room), name)
            if inspect.isfunction(function):
                for parameter in inspect.signature(function).parameters:
                    if kinds := SPECIAL.get((f"{room}.{name}", parameter)) or PARAMETERS.get(parameter):
                        yield f"{room}.{name}", function, parameter, kinds


def call(function, parameter, given, state=THINGS["state"]):
    """The function with one argument of another kind, and all others right."""
    step = THINGS["train_step" if function.__module__.startswith("looplib.testing") else "eval_step"]
    if function in (ll.debug.replay, ll.grads.backward):
        step = 1
    right = {"step": step, "loader": THINGS["loader"], "state": state, **FILLERS}
    args, kwargs = [], {}
    for name, one in inspect.signature(function).parameters.items():
        if one.kind is one.VAR_POSITIONAL:
            args = [given] if name == parameter else []
        elif name == parameter:
            kwargs[name] = given
        elif (
            one.default is one.empty or type(one.default).__name__ == "Required"
        ) and one.kind is not one.VAR_KEYWORD:
            if name not in right:
                pytest.fail(f"add {name!r}, with a value that {function.__qualname__} takes, to FILLERS in this file")
            kwargs[name] = right[name]
    out = function(*args, **kwargs)
    return list(out) if inspect.isgenerator(out) else out


def by_function(rows):
    """The rows of each function together, whose failures then stand in one report."""
    table = {}
    for name, *row in rows:
        table.setdefault(name, []).append(row)
    return [pytest.param(rows, id=name) for name, rows in table.items()]


def fault(function, parameter, thing):
    """The fault if a function gets a thing of another kind for this parameter; "" if it refuses that by name."""
    try:
        call(function, parameter, THINGS[thing])
    except (TypeError, ValueError) as error:
        message = str(error)
    except Exception as error:
        return repr(error)
    else:
        return "taken: begin it with check_kind, or what its neighbours begin with"
    of_python = r"positional argument|unexpected keyword|has no attribute|not callable|not iterable"
    says_what_to_give = re.search(r"\bgive\b|\btakes\b|\bneeds\b", message)
    return "" if says_what_to_give and not re.search(of_python, message) else message


@pytest.mark.parametrize("rows", by_function(takers()))
def test_what_is_of_another_kind_is_refused_by_name(rows):
    faults = [
        f"{parameter}={thing}: {found}"
        for function, parameter, kinds in rows
        for thing in THINGS
        if {"file": "logger"}.get(thing, thing) not in kinds
        # A plain function is judged by whether it can be called, and not by the names of its parameters.
        and not (thing == "loss_fn" and kinds & {"eval_step", "predict_step", "train_step", "logger"})
        and (found := fault(function, parameter, thing))
    ]
    assert not faults, "\n".join(faults)


def takers_of_numbers():
    """(name, function, parameter) of functions, and of classes that check what they are given."""
    for room in ALL_ROOMS:
        for name in getattr(ll, room).__all__:
            taker = getattr(getattr(ll, room), name)
            if inspect.isfunction(taker) or hasattr(taker, "__post_init__"):
                for one in inspect.signature(taker).parameters.values():
                    is_number = re.fullmatch(r"(int|float)( \| None)?", str(one.annotation))
                    if is_number and (name, one.name) not in LEFT_ALONE:
                        yield f"{room}.{name}", taker, one.name


# Counted by the record itself; or asked in each step, where torch answers.
LEFT_ALONE = {("BestSoFar", name) for name in ("best", "best_step", "reference", "waited")}
LEFT_ALONE |= {("Plateau", name) for name in ("reference", "waited", "cooling", "count", "reached")}
LEFT_ALONE |= {("global_norm", "norm_type"), ("next_token_loss", "ignore_index"), ("accuracy", "ignore_index")}


@pytest.mark.parametrize("rows", by_function(takers_of_numbers()))
def test_text_for_a_number_and_nan_are_refused_by_name(rows):
    faults = []
    for taker, parameter in rows:
        for given in ("0.1", math.nan):
            try:
                call(taker, parameter, given)
                faults.append(f"{parameter}={given!r} is taken")
            except (TypeError, ValueError) as error:
                of_python = re.search(r"not supported|must be real|unexpected keyword", str(error))
                if of_python or not re.search(rf"\b{parameter}\b", str(error)):
                    faults.append(f"{parameter}={given!r}: {error}")
    assert not faults, "\n".join(faults)


SCALED = ll.chain(ll.optim.dynamic_loss_scale(), SGD)
SPLIT = ll.evaluation.split_on_oom(THINGS["eval_step"])


def evaluate(step, batches=()):
    return ll.evaluate(step, THINGS["state"], batches)


REFUSED = [
    (
        lambda: ll.contrib.sam(THINGS["train_step"]),
        r"sam got the train_step of make_train_step; give a grad_fn",
    ),
    (lambda: ll.accumulate(THINGS["train_step"], 2), r"accumulate.*train_step.*make_train_step\(accumulate"),
    (lambda: ll.make_train_step(loss_fn, SGD), r"loss_fn\(model, batch\).*loss"),
    (lambda: ll.accumulate(loss_fn, 2), r"accumulate.*loss_fn\(model, batch\)"),
    # No plain function is a module or an optimizer.
    (lambda: ll.make_grad_fn(lambda x: x, loss_fn), r"make_grad_fn got <lambda>\(x\); give a torch.nn.Module"),
    (
        lambda: ll.init_state(MODEL, lambda x: x),
        r"init_state got <lambda>\(x\); give what ll.optimizer or ll.chain returns",
    ),
    # Wrappers of any step are of the step's kind, and name the function that the user gave.
    (lambda: list(ll.predict(SPLIT, THINGS["state"], [])), "predict got the eval_step of split_on_oom"),
    # A wrapper that does not pass its keywords on would lose the loss scale.
    (
        lambda: ll.make_train_step(lambda state, batch, **request: GRAD_FN(state, batch), SCALED)(
            ll.init_state(MODEL, SCALED), BATCH
        ),
        r"scale of dynamic_loss_scale.*grad_fn\(state, batch, \*\*request\)",
    ),
    (
        lambda: ll.make_train_step(lambda state, batch, request: GRAD_FN(state, batch), SGD),
        r"<lambda>\(state, batch, request\), which cannot be called as grad_fn\(state, batch, \*\*request\)",
    ),
    # Parts of the update that were wrappers in the past.
    *(
        (lambda part=part, shown=shown, given=given: part(given), rf"wraps nothing: write ll\.chain\(.*{shown}")
        for part, shown in (
            (ll.clip_by_global_norm, r"ll\.clip_by_global_norm\(1\.0\), ll\.optimizer"),
            (ll.optim.clip_by_norm, r"ll\.optim\.clip_by_norm\(1\.0\), ll\.optimizer"),
            (ll.optim.clip_by_value, r"ll\.optim\.clip_by_value\(0\.5\), ll\.optimizer"),
            (ll.skip_nonfinite, r"ll\.skip_nonfinite\(\), ll\.optimizer"),
            (ll.optim.dynamic_loss_scale, r"ll\.optim\.dynamic_loss_scale\(\), ll\.optimizer"),
            (ll.ema, r"ll\.optimizer\(.*\), ll\.ema"),
        )
        for given in (GRAD_FN, SGD)
    ),
    *(
        (lambda args=args, settings=settings, part=part: part(*args, **settings), rf"{name} is a part.*wraps nothing")
        for name, part, setting in (
            ("clip_by_global_norm", ll.clip_by_global_norm, "max_norm"),
            ("clip_by_norm", ll.optim.clip_by_norm, "max_norm"),
            ("clip_by_value", ll.optim.clip_by_value, "max_value"),
            ("skip_nonfinite", ll.skip_nonfinite, "max_consecutive"),
            ("dynamic_loss_scale", ll.optim.dynamic_loss_scale, "init_scale"),
            ("ema", ll.ema, "decay"),
            ("swa", ll.optim.swa, "start"),
        )
        for args, settings in (((SGD, 1), {}), ((1, SGD), {}), ((GRAD_FN,), {setting: 1}), ((SGD,), {}))
    ),
    # Pieces taken alone, with what a raw loop has.
    (
        lambda: ll.checkpoint_io("unused").save(MODEL),
        r'save\(\{"model": model, "optimizer": optimizer, "step": step\}\)',
    ),
    (lambda: ll.evaluate(THINGS["eval_step"], MODEL, [BATCH]), r"ll\.init_state\(model\)"),
    (lambda: ll.state.end_epoch(MODEL), r"state is a Linear; give a TrainState.*ll\.state\.end_epoch\(state\)"),
    (lambda: ll.every_n_steps(5)(5), r"counts.*ll\.TrainState\(step=step, epoch=epoch, batch=batch\)"),
    (lambda: GRAD_FN(MODEL, BATCH), r"ll\.grads\.backward\(grad_fn, model, batch, step=step\)"),
    (lambda: ll.checkpoint.capture(MODEL), r"write ll\.checkpoint\.capture\(environment=environment\)"),
    (lambda: ll.data.windows("some text", 4), r"tokens are a str.*input_ids"),
    (
        lambda: ll.debug.first_difference([THINGS["state"]], {}),
        "a run is a list; give a mapping from steps to states",
    ),
    (
        lambda: ll.grads.map_batch(GRAD_FN, lambda batch: batch),
        r"<lambda>\(batch\), which is called as \(state, batch\)",
    ),
    (lambda: ll.losses.restrict_grad(BATCH.sum(), MODEL), r"got a Linear as parameters: give module\.parameters\(\)"),
    (lambda: ll.Window().add(BATCH.sum()), r"the metrics of a step are a Tensor.*second value"),
    (lambda: ll.metrics.merge([{"loss": ll.Mean(1.0)}]), r"merge got a list.*merge\(\*list\)"),
    (
        lambda: ll.optim.global_norm(dict(MODEL.named_parameters())),
        r"global_norm got a dict: give tensors, such as grads\.values",
    ),
    (lambda: ll.optim.global_norm(MODEL), r"global_norm got a Linear: give tensors"),
    (lambda: ll.optim.partition([SGD], lambda name, tensor: "all"), "optimizers are a list; give a dict of label"),
    (lambda: SGD.init(MODEL.parameters()), r"params are a generator: give name -> tensor.*named_parameters"),
    (lambda: ll.transforms.stack_states([MODEL, MODEL]), "state is a Linear; give a TrainState"),
    (lambda: ll.distributed.rank_zero_only(None), r"rank_zero_only got None: give the function"),
    *(
        (
            lambda check=check: check(MODEL, THINGS["state"], BATCH),
            f"{check.__name__} got a Linear; give a .*step of it",
        )
        for check in (
            ll.testing.assert_pure,
            ll.testing.assert_overfits,
            ll.testing.assert_resumes,
            ll.testing.assert_samples_independent,
            ll.testing.assert_causal,
        )
    ),
    (
        lambda: ll.make_train_step(MODEL, lambda model, batch: model(batch), SGD),
        r"write ll\.make_train_step\(ll\.make_grad_fn",
    ),
]


def test_the_message_names_what_was_found_and_what_to_give():
    for build, names in REFUSED:
        with pytest.raises((TypeError, ValueError), match=names):
            build()


def test_a_plain_function_is_judged_by_whether_it_can_be_called_and_not_by_names():
    """Names that looplib itself uses for another kind of function (`model`, `net`, `values`)."""
    state = ll.init_state(MODEL, SGD)
    assert evaluate(lambda net, batch: {"n": ll.Mean(net.step + len(batch))}, [BATCH]) == {"n": 4.0}
    assert list(ll.predict(lambda model, values: values, state, [BATCH])) == [BATCH]
    seen = []
    ll.tee(lambda model, batch: seen.append((model, batch)))(state, {"a": 1.0})
    assert seen == [(state, {"a": 1.0})]
    assert_each_refused(
        (
            lambda: ll.tee(lambda state: None),
            TypeError,
            r"<lambda>\(state\), which cannot be called as logger\(state, values\)",
        ),
        (
            lambda: ll.log.windowed(print, loss_fn),
            TypeError,
            r"loss_fn\(model, batch\), which cannot be called as predicate\(state\)",
        ),
    )


def test_plain_functions_of_users_are_taken_everywhere():
    state = ll.init_state(MODEL, SCALED)
    out, (after, _) = GRAD_FN(state, BATCH), ll.make_train_step(GRAD_FN, SCALED)(state, BATCH)
    for wrapped in (
        lambda *call, **request: GRAD_FN(*call, **request),
        ll.accumulate(lambda state, batch, **request: GRAD_FN(state, batch, **request), 2),
        ll.grads.map_batch(lambda *call, **request: GRAD_FN(*call, **request), lambda state, batch: batch),
        lambda state, batch, index=0, scale=None, donate=False, in_step=False, part=None: GRAD_FN(
            state, batch, scale=scale
        ),
    ):
        torch.testing.assert_close(wrapped(state, BATCH).grads, out.grads)
        stepped, _ = ll.make_train_step(wrapped, SCALED)(state, BATCH)
        torch.testing.assert_close(dict(stepped.params), dict(after.params))
    assert evaluate(lambda state, batch: {"n": ll.Mean(len(batch))}, [BATCH]) == {"n": 4.0}
    assert list(ll.predict(lambda s, b: b, state, [BATCH])) == [BATCH]
    ll.tee(lambda state, values: None, print)(state, {"a": 1.0})
    ll.log.select(lambda *args: None, {"a"})(state, {"a": 1.0})
    ll.autocast(lambda m, b: m(b))(nn.Linear(3, 2), BATCH)
    with pytest.raises(AttributeError, match="nonsense"):
        evaluate(lambda state, batch: {"n": ll.Mean(batch.nonsense)}, [BATCH])
