"""Closure inspection: what a walk finds, and where it does not go."""

import functools
import types
from pathlib import Path

import torch
from shared import SGD

import looplib as ll
from looplib.transforms import closures as closures


def found(*roots):
    return {v.path: v.value for v in closures.walk(*roots) if closures.is_plain(v.value)}


def test_the_folder_of_looplib_is_known():
    # The line of the user in an error message, and what is left out of the walk, depend on it.
    assert set(closures.LIBRARIES) - {"<string>"} == {
        f"{Path(ll.__file__).parent}/",
        f"{Path(torch.__file__).parent}/",
    }
    assert closures.is_library(ll.make_grad_fn.__code__.co_filename)
    assert not closures.is_library(__file__)


def test_a_file_whose_name_begins_like_the_package_is_the_users():
    names = {}
    path = f"{Path(ll.__file__).parent}_train.py"  # beside the package's folder
    exec(compile("k = 2.0\ndef loss_fn(x):\n    return x * k", path, "exec"), names)
    assert not closures.is_library(path)
    assert found(names["loss_fn"]) == {"k": 2.0}


def test_variables_of_functions():
    scale, hidden = 2.0, [3, 4]

    def inner(x, power=5):
        return x**power

    def outer(x):
        return inner(x) * scale * hidden[0] * outer.gain

    outer.gain, outer.unread = 6.0, 7.0
    assert found(outer) == {
        "scale": 2.0, "the length of hidden": 2, "hidden[0]": 3, "hidden[1]": 4, "a default of inner": 5, "outer.gain": 6.0
    }  # fmt: skip
    assert set(found(functools.partial(outer, power=8)).values()) == {2.0, 3, 4, 5, 6.0, 8}


def test_an_object_is_searched_again_for_what_other_code_mentions():
    settings = types.SimpleNamespace(inner=types.SimpleNamespace(scale=2.0, shift=3.0, unread=4.0))

    def one(x):
        return x * settings.inner.scale

    def other(x):
        return x + settings.inner.shift

    assert found(one, other) == {"settings.inner.scale": 2.0, "settings.inner.shift": 3.0}


def test_circles_end():
    one = types.SimpleNamespace(scale=1.0)
    one.next = types.SimpleNamespace(next=one)
    assert found(lambda: one.next.next.scale) == {"one.scale": 1.0}


def test_looplibs_own_objects_are_not_searched_but_what_they_wrap_is():
    model, scale = torch.nn.Linear(2, 1), 3.0
    grad_fn = ll.make_grad_fn(model, lambda model, x: scale * model(x).mean())
    walked = list(closures.walk(grad_fn, SGD.update))
    assert any(variable.value is model for variable in walked)
    kept = [v.path for v in walked if closures.is_plain(v.value) and not closures.is_installed(v.owner)]
    assert "scale" in kept
    assert not {"lr", "params", "beta1"} & set(kept)


def test_what_is_read_later_is_what_stands_there_then():
    values = {"a": 1.0}

    def function():
        return values["a"]

    (variable,) = [v for v in closures.walk(function) if v.path == "values['a']"]
    values["a"] = 2.0
    assert (variable.value, variable.read()) == (1.0, 2.0)
