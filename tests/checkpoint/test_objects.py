"""Objects of a raw loop in a checkpoint, by name: the bits of an unbroken loop of plain torch after a resume."""

import random
import re
import warnings
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from files import damage
from ranks import launch, run_script
from raw_loops import AFTER, BEFORE, CASES, Loader, end_of, objects_of, train
from shared import bits
from torch import nn

import looplib as ll

RAW_LOOPS = Path(__file__).parents[1] / "raw_loops.py"


@pytest.mark.slow
def test_a_resume_in_a_new_process_has_the_bits_of_an_unbroken_loop(tmp_path):
    unbroken = {}
    for case in CASES:
        run = objects_of(case, seed=0)
        train(case, run, BEFORE)
        ll.checkpoint_io(tmp_path / case).save(run)
        train(case, run, AFTER)
        unbroken[case] = end_of(run)
    launch(0, run_script, str(RAW_LOOPS), str(tmp_path), *CASES)
    resumed = {case: torch.load(tmp_path / f"{case}.pt", weights_only=False) for case in CASES}
    assert [case for case in CASES if bits(resumed[case]) != bits(unbroken[case])] == []
    assert {each["step"] for each in resumed.values()} == {BEFORE + AFTER}


def test_a_loader_without_workers_resumes_as_after_torch_save(tmp_path):
    run, path = {"loader": Loader(0, 0), "step": 3}, tmp_path / "loader.pt"
    for _ in range(3):
        next(run["loader"])
    torch.save(run["loader"].state_dict(), path)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(run)
    resumed, native = ckpt.restore({"loader": Loader(1, 0), "step": 0}, quiet=True)["loader"], Loader(1, 0)
    native.load_state_dict(torch.load(path))
    assert [next(resumed) for _ in range(9)] == [next(native) for _ in range(9)]


KILLED = """
import os, random, signal, sys, time, warnings
from pathlib import Path
import torch
import looplib as ll
warnings.simplefilter("error")
folder = Path(sys.argv[1])
random.seed(0)


def objects():
    model = torch.nn.Linear(300, 100)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), "list": [0], "step": 0}


def check_of_one_moment(run):
    state = run["optimizer"].state_dict()["state"]
    assert {float(entry["step"]) for entry in state.values()} == {run["step"]}
    for tensor in (*run["model"].parameters(), *(entry["exp_avg"] for entry in state.values())):
        assert (tensor == run["step"]).all()
    assert run["list"] == [run["step"]]


def work(asynchronous):
    ckpt = ll.checkpoint_io(folder / "runs", keep_last=3, asynchronous=asynchronous)
    run = ckpt.restore(objects(), quiet=True)
    if run["step"]:
        check_of_one_moment(run)
    model, optimizer = run["model"], run["optimizer"]
    while True:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        run["step"] += 1
        run["list"][0] += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(run["step"])
                optimizer.state[parameter]["exp_avg"].fill_(run["step"])
        ckpt.save(run)


last = 0
for number in range(20):
    if (process := os.fork()) == 0:
        try:
            work(asynchronous=number % 2 == 1)
        except BaseException as error:
            print(f"ended by {type(error).__name__}: {str(error)[:500]}", flush=True)
        os._exit(3)
    end = time.monotonic() + 200
    while (now := ll.checkpoint_io(folder / "runs").latest()) is None or now.step <= last:  # until it saves
        assert time.monotonic() < end, "no save came"
        assert os.waitpid(process, os.WNOHANG) == (0, 0)
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.1))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    ckpt = ll.checkpoint_io(folder / "runs")
    for saved in ckpt.steps():
        check_of_one_moment(ckpt.restore(objects(), saved.step, quiet=True))
    assert ckpt.latest().step > last
    last = ckpt.latest().step
"""


@pytest.mark.slow
def test_a_loop_that_is_killed_at_twenty_moments_leaves_whole_checkpoints(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    launch(0, run_script, str(tmp_path / "killed.py"), str(tmp_path))


def run_of(seed=0, **more):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "step": 0, **more}


def step(run):
    run["optimizer"].zero_grad()
    run["model"](torch.ones(4, 2)).square().mean().backward()
    run["optimizer"].step()
    run["step"] += 1


def state_of(run):
    return bits([run["model"].state_dict(), run["optimizer"].state_dict()])


def test_without_a_checkpoint_the_start_values_are_returned_and_nothing_is_loaded(tmp_path):
    run = run_of(best=0.5)
    before = state_of(run)
    found = ll.checkpoint_io(tmp_path).restore(run)
    assert found == run
    assert found is not run
    assert state_of(run) == before


def test_a_save_in_the_background_copies_first(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path, asynchronous=True)
    run = run_of(array=np.arange(3), list=[1])
    for _ in range(3):
        step(run)
        ckpt.save(run)
        saved = state_of(run)
        run["array"] += 1
        run["list"].append(2)
        step(run)
    ckpt.wait()
    again = ckpt.restore(run_of(1, array=0, list=0), quiet=True)
    assert state_of(again) == saved
    assert (again["array"].tolist(), again["list"], again["step"]) == ([2, 3, 4], [1, 2, 2], 5)


def test_a_step_that_is_not_counted_is_named_once(tmp_path):
    for number, asynchronous in enumerate((False, True)):
        ckpt = ll.checkpoint_io(tmp_path / str(number), asynchronous=asynchronous)
        run = ckpt.restore(run_of(random=ll.checkpoint.RandomStreams(), ema={"0": torch.zeros(1)}))
        ckpt.save(run)
        ckpt.save(run)  # again, as after Ctrl-C
        for counts in 1, 0:  # the line that counts is forgotten from here on
            step(run)
            run["step"] = counts or 1
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                ckpt.save(run)
            assert len(heard) == 1 - counts
        assert re.search("step 1 is saved a second time.*changed: model, optimizer\\. ", str(heard[0].message))
        assert heard[0].filename == __file__
        step(run)
        ckpt.save(run)  # said once: a warning is an error here
        ckpt.wait()


def test_a_save_in_the_middle_of_a_step_is_no_step_that_is_not_counted(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    run = {**run_of(random=ll.checkpoint.RandomStreams()), "bn": nn.BatchNorm1d(2), "rng": torch.get_rng_state()}
    step(run)
    ckpt.save(run)
    run["bn"](torch.rand(4, 2))  # a forward pass, of which Ctrl-C cuts off the rest
    run["rng"] = torch.get_rng_state()
    ckpt.save(run)
    assert ckpt.latest().path.name == "step-00000001.1"
    run["average"] = torch.zeros(2)
    ckpt.save(run)
    run["average"] = torch.ones(2)  # a plain value
    with pytest.warns(UserWarning, match="changed: average"):
        ckpt.save(run)


def test_a_damaged_one_is_named_and_the_one_before_it_is_used(tmp_path, capsys):
    ckpt, run = ll.checkpoint_io(tmp_path), run_of()
    step(run)
    ckpt.save(run)
    first = state_of(run)
    step(run)
    damage(ckpt.save(run))
    fresh = run_of(1)
    with pytest.warns(UserWarning, match="step-00000002.*going back"):
        found = ckpt.restore(fresh)
    assert (found["step"], state_of(found)) == (1, first)
    assert capsys.readouterr().out.startswith("Restored step 1 from ")
    with pytest.raises(ll.checkpoint.DamagedCheckpointError, match="step-00000002"):
        ll.checkpoint_io(tmp_path).restore(fresh, 2)
    assert state_of(fresh) == first


def test_the_best_and_the_last_ones_stay(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path, keep_last=1, monitor="eval/loss")
    for number, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
        ckpt.save({**run_of(), "step": number, "epoch": number // 2}, {"eval/loss": loss})
    assert [(each.step, each.epoch) for each in ckpt.steps()] == [(1, 0), (3, 1)]
    assert ckpt.restore({**run_of(), "epoch": 0}, "best", quiet=True)["step"] == 1
    with pytest.raises(ValueError, match=r"later steps \(1, 3\)"):
        ckpt.save(run_of())


PLAIN = {
    "numbers": [0, -1, 1 << 70, 0.1, -0.0, float("inf"), 1j, True, None, "é", b"bytes"],
    "keys": {0: "int", "0": "str", None: 1, (1, "a"): 2, 0.5: 3, True: 4} | {1 << 70: 5},
    "containers": {"tuple": (1, (2,), []), "empty": {}, "ordered": OrderedDict(b=1, a=2), "counter": Counter([3, 3])},
    "torch": [torch.float8_e4m3fn, torch.device("cuda", 1), torch.Size([2, 3])],
    "tensors": {7: torch.arange(3), "7x": [torch.ones(()), torch.zeros(0, 2), torch.ones(2).to(torch.complex64)]},
    "weight": torch.ones(2, requires_grad=True),
    "image": torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "numpy": [np.arange(4).reshape(2, 2), np.float64(0.1), np.int8(3), np.bool_(True)],
}


def types_in(tree):
    if isinstance(tree, dict):
        return type(tree), [(type(key), key, types_in(value)) for key, value in tree.items()]
    return (type(tree), [*map(types_in, tree)]) if isinstance(tree, (list, tuple)) else type(tree)


def test_nested_values_return_as_they_were_saved_and_without_a_template(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save({**PLAIN, "step": 1})
    found = ckpt.restore({**dict.fromkeys(PLAIN), "step": 0}, quiet=True)
    assert found.pop("step") == 1
    assert types_in(found) == types_in(PLAIN)
    assert repr(found) == repr(PLAIN)
    assert found["weight"].requires_grad
    assert found["image"].stride() == PLAIN["image"].stride()
    found["tensors"][7].add_(1)  # of memory of its own
    assert ckpt.restore({**dict.fromkeys(PLAIN), "step": 0}, quiet=True)["tensors"][7].tolist() == [0, 1, 2]


def test_a_tensor_that_is_in_two_places_is_one_again(tmp_path):
    ckpt, tensor = ll.checkpoint_io(tmp_path), torch.ones(2)
    ckpt.save({"one": [tensor], "other": tensor, "step": 1})
    found = ckpt.restore({"one": 0, "other": 0, "step": 0}, quiet=True)
    found["other"].add_(1)
    assert found["one"][0].tolist() == [2, 2]


class Unstorable:
    def __repr__(self):
        return "Unstorable()"


def test_what_cannot_be_stored_is_refused_by_its_path(tmp_path):
    ckpt, cycle = ll.checkpoint_io(tmp_path / "runs"), []
    cycle.append(cycle)
    refused = {
        r"/x/1/a is an? Unstorable": [0, {"a": Unstorable()}],
        r"/x is the function <lambda>, which a checkpoint cannot hold without a template": lambda: 0,
        r"/x/0 is a set.* give it state_dict and load_state_dict": [{1}],
        r"/x is a BestSoFar, .*: keep dataclasses.asdict\(bestsofar\).*BestSoFar\(\*\*kept\)": ll.predicates.BestSoFar(
            "loss"
        ),
        r"/x is a Window, .*: leave it out, log whenever you save": ll.Window(),
        r"/x/loss is a Mean, .*ll.Mean\(\*kept\)": {"loss": ll.Mean(1.0, 2)},
        r"/x/0 is a NumPy array of <U1": [np.array(["a"])],
        r"/x/0 is a NumPy array of object": [np.array([None])],
        r"/x/0 is an? AdamW, an object with a state.*name of its own": [run_of()["optimizer"]],
        r"/x/0 has containers within each other|/x/0.* has containers": cycle,
        r"/x is the text .*Unicode": "\ud800",
        r"/x is a Tensor of torch.float32 and torch.sparse_coo": torch.eye(2).to_sparse(),
        r"/x/k is a Tensor .* meta": {"k": torch.ones(2, device="meta")},
        r"/objects/x/0": {0: torch.ones(1), "0": torch.ones(1)},
        r"'x' is a TrainState.*ckpt.save\(state\) alone": ll.TrainState(),
        r"'x' is the class Linear; give an instance": nn.Linear,
        r"share memory": [(base := torch.ones(4))[:3], base[1:]],
    }
    for words, value in refused.items():
        with pytest.raises((TypeError, ValueError), match=words):
            ckpt.save({"x": value, "step": 1})
    for given, words in {
        (): "no 'step' among none",
        (("step", -1),): "'step' is an int, -1",
        (("step", 1.0),): "'step' is a float, 1.0; give the number of steps",
        (("step", 1), (2, 3)): "a name is an int; give objects by name",
    }.items():
        with pytest.raises((TypeError, ValueError), match=words):
            ckpt.save(dict(given))
    assert ckpt.steps() == []


class HalfAnObject:
    def state_dict(self):
        return {}


class Picky:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise ArithmeticError("not today")


def test_what_does_not_fit_is_refused_and_all_objects_are_left_as_they_were(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    run = run_of(best=0.5)
    run["scheduler"] = torch.optim.lr_scheduler.StepLR(run["optimizer"], 2)
    run["scaler"] = torch.amp.GradScaler("cpu")
    step(run)
    ckpt.save(run)

    def fresh(**more):
        new = run_of(1, best=0)
        new["scheduler"] = torch.optim.lr_scheduler.StepLR(new["optimizer"], 2)
        return {**new, "scaler": torch.amp.GradScaler("cpu"), **more}

    def groups(*sizes):
        params = [*fresh()["model"].parameters()]
        return torch.optim.AdamW([{"params": [params.pop(0) for _ in range(size)]} for size in sizes])

    reordered = fresh()
    reordered["optimizer"] = torch.optim.AdamW(reversed([*reordered["model"].parameters()]))
    refused = {
        "model: 0.weight is a float32 tensor of shape (3, 2) in the checkpoint, a float32 tensor of shape (5, 2) here": {
            "model": nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1))
        },
        "a float32 tensor of shape (3, 2) in the checkpoint, a float64 tensor": {"model": fresh()["model"].double()},
        "model: 2.weight is here, and not in the checkpoint": {"model": fresh()["model"].append(nn.Linear(1, 1))},
        "optimizer is an AdamW in the checkpoint, an SGD here": {"optimizer": torch.optim.SGD([torch.ones(1)])},
        "optimizer has groups of [4] parameters in the checkpoint, of [2, 2] here": {"optimizer": groups(2, 2)},
        "parameter 0 of group 0 is model/0.weight (3, 2) in the checkpoint, model/1.bias (1,) here": reordered,
        "scheduler is a StepLR in the checkpoint, an ExponentialLR here": {
            "scheduler": torch.optim.lr_scheduler.ExponentialLR(fresh()["optimizer"], 0.9)
        },
        "scaler keeps backoff_factor, growth_factor, growth_interval, scale in the checkpoint, none here": {
            "scaler": torch.amp.GradScaler("cpu", enabled=False)
        },
        "scaler is a GradScaler in the checkpoint, an int here": {"scaler": 3},
        "best is a float in the checkpoint, a Linear here": {"best": nn.Linear(1, 1)},
        "ema is given, and is not in the checkpoint": {"ema": nn.Linear(1, 1)},
    }
    for words, more in refused.items():
        objects = fresh(**more)
        states = {name: each.state_dict() for name, each in objects.items() if hasattr(each, "state_dict")}
        before = bits(states)
        with pytest.raises(ValueError, match="does not fit what is given") as error:
            ckpt.restore(objects)
        assert words in str(error.value)
        assert bits({name: objects[name].state_dict() for name in states}) == before
    for call, words in {
        lambda: ckpt.restore(
            ll.init_state(run["model"])
        ): r"from objects by name and not from a state.*model, optimizer",
        lambda: ckpt.restore(fresh(), weights_only=True): "weights_only is for a state",
        lambda: ckpt.restore(fresh(), optional="ema"): r"optional is 'ema'; give names",
        lambda: ckpt.restore(fresh(half=HalfAnObject())): r"'half' is a HalfAnObject, which has no load_state_dict",
        lambda: ll.checkpoint_io(tmp_path, select=lambda *_: True).save(
            run
        ): "select= is for the parameters of a state",
    }.items():
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def test_names_of_one_side_alone_are_passed_over_where_that_is_meant(tmp_path):
    ckpt, run = ll.checkpoint_io(tmp_path), run_of(best=0.5)
    step(run)
    ckpt.save(run)
    model, ema = run_of(1)["model"], nn.Linear(1, 1)
    before = bits(ema.state_dict())
    names = ("optimizer", "best", "ema")
    found = ckpt.restore({"model": model, "ema": ema, "step": 0}, optional=names, quiet=True)
    assert found == {"model": model, "ema": ema, "step": 1}
    assert bits(model.state_dict()) == bits(run["model"].state_dict())
    assert bits(ema.state_dict()) == before
    with pytest.raises(ValueError, match=r"(?s)best is in the checkpoint.*optional=\('optimizer', 'best'\)"):
        ckpt.restore({"model": model, "step": 0}, optional=("optimizer",))


def test_an_error_of_an_objects_own_comes_before_networks_are_loaded(tmp_path):
    ckpt, run = ll.checkpoint_io(tmp_path), run_of(picky=Picky())
    ckpt.save(run)
    fresh = run_of(1, picky=Picky())
    before = state_of(fresh)
    with pytest.raises(RuntimeError, match=r"'picky' fits the checkpoint.*not today.*loaded before it: none"):
        ckpt.restore(fresh)
    assert state_of(fresh) == before


def test_changed_settings_are_named(tmp_path):
    ll.checkpoint_io(tmp_path, describe={"width": 3}).save(run_of())
    with pytest.warns(UserWarning, match="width was 3, is 4"):
        ll.checkpoint_io(tmp_path, describe={"width": 4}).restore(run_of(), quiet=True)


def test_a_state_is_no_mapping_of_objects(tmp_path):
    ckpt, state = ll.checkpoint_io(tmp_path), ll.init_state(nn.Linear(1, 1))
    ckpt.save(state)
    with pytest.raises(ValueError, match=r"from a state, and not from objects.*ckpt.restore\(state\)"):
        ckpt.restore(run_of())


def test_what_users_of_torch_save_give_is_answered_with_the_line_to_write(tmp_path):
    model, ckpt = torch.nn.Linear(2, 1), ll.checkpoint_io(tmp_path)
    loader, sgd = ll.make_loader(range(8), batch_size=2), torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (ckpt.save, ckpt.restore):
        name = f"ckpt.{call.__name__}"
        for state_dict in (model.state_dict(), sgd.state_dict()):  # which no restore would load into the module
            with pytest.raises(TypeError, match=rf"'it' is a state_dict.*{name}\(\{{\"model\": model, "):
                call({"it": state_dict, "step": 0})
        with pytest.raises(TypeError, match=rf"give all that a resume needs, by name: {name}\(\{{\"model\": model, "):
            call(model)
    for value, words in (
        (loader, "leave it out, since it has no state"),
        (ll.ema(0.9), r"optimizer\.init\(params\)"),
    ):
        with pytest.raises(TypeError, match=words):
            ckpt.save({"it": value, "step": 0})
    ckpt.save({"model": model, "own": {"state": {}, "others": 1}, "step": 1})
    assert ckpt.restore({"model": model, "own": None, "step": 0})["own"] == {"state": {}, "others": 1}


def test_generators_and_the_global_streams_continue(tmp_path):
    ckpt, generator = ll.checkpoint_io(tmp_path), torch.Generator().manual_seed(3)
    run = {"generator": generator, "random": ll.checkpoint.RandomStreams(), "step": 1}
    torch.rand(3, generator=generator)
    ckpt.save(run)

    def draws():
        numbers = random.random(), np.random.rand(), torch.rand(2), torch.rand((), generator=generator)  # noqa: NPY002
        return bits(list(numbers))

    first = draws()
    ckpt.restore(run, quiet=True)
    assert draws() == first
    with pytest.raises(ValueError, match="saved of 2 devices, with the CPU, and this process sees 1"):
        run["random"].load_state_dict({**run["random"].state_dict(), "torch": [1, 2]})


def test_wrapped_modules_are_saved_under_the_names_of_the_innermost_one(tmp_path, one_process):
    model = run_of()["model"]
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save({"model": nn.parallel.DistributedDataParallel(torch.compile(model)), "step": 1})
    plain, wrapped = run_of(1)["model"], nn.parallel.DistributedDataParallel(run_of(2)["model"])
    for again in (plain, wrapped):
        ckpt.restore({"model": again, "step": 0}, quiet=True)
    assert bits(plain.state_dict()) == bits(model.state_dict()) == bits(wrapped.module.state_dict())
