"""Helpers for tests of several rooms: states, seeds, a Python process, and a full disk."""

import inspect
import itertools
import os
import resource
import subprocess
import sys
import traceback
from contextlib import contextmanager

import hypothesis
import pytest
import torch
from filelock import FileLock
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

import looplib as ll
from looplib.types import TrainState

SGD = ll.optimizer(torch.optim.SGD, lr=0.1)
STATE = TrainState(step=7, epoch=2, batch=3, epoch_length=4, samples=96)
both_steps = pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
both_states = pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
PARAM = type(pytest.param())
COUNTS = {"step": 7, "epoch": 2, "batch": 3, "samples": 96}


def at(step, samples=0):
    return TrainState(step=step, samples=samples)


def examples(count):
    """Number of hypothesis' examples: all in the full suite, and in the fast tier the first 30%."""
    return max(1, count * hypothesis.settings.default.max_examples // 100)


def mix(*values):
    """The seed of a draw, by the published formula: the finalizer of splitmix64 over a polynomial in the values."""
    seed = len(values)
    for value in values:
        seed = (seed * 0xD1342543DE82EF95 + value + 1) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        seed = (seed ^ (seed >> shift)) * factor % 2**64
    return (seed ^ (seed >> 31)) // 2


def equal(tensors, others):
    """True if two mappings of tensors have the same names and values."""
    others = dict(others)
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def bits(tree):
    """Everything about a tree of tensors that could differ, for ==."""
    leaves, spec = torch.utils._pytree.tree_flatten(tree)
    return [
        (leaf.dtype, tuple(leaf.shape), leaf.detach().numpy().tobytes()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ], spec


def update(optimizer, grads, opt_state, params, step, donate=False, **info):
    """An update by hand: pure, or as a donated step makes it, over what it is given."""
    if not donate:
        params, opt_state, applied = optimizer.update(grads, opt_state, params, step, **info)
        assert applied is True
        return params, opt_state
    out = optimizer.transform(grads, opt_state, params, step, owned=True, **info)
    assert out.apply is True
    return optimizer.update_(out.grads, out.state, dict(params), step, carry=out.carry, **info)[:2]


def mean_square(model, x):
    return model(x).square().mean()


def mean_output(model, x):
    return model(x).mean()


def classify(model, batch):
    x, y = batch
    return cross_entropy(model(x), y)


def assert_each_refused(*cases):
    """Each call raises its error, whose message has these words, a regular expression."""
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()


def one_report(test):
    """All cases of a parametrized test as one test, with each case that fails in its report.

    For tables of many cheap cases. It stands above the marks, and each case begins with the same seed and with files and
    patches of its own.
    """
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    cases = [
        {key: value for part in case for key, value in part.items()}
        for case in itertools.product(*map(rows_of, marks))
    ]
    signature = inspect.signature(test)
    fixtures = [parameter for name, parameter in signature.parameters.items() if name not in cases[0]]

    def run(**given):
        faults = []
        for number, case in enumerate(cases):
            torch.default_generator.manual_seed(0)  # as in conftest.py
            with pytest.MonkeyPatch.context() as patch:
                new = {"monkeypatch": patch}
                if "tmp_path" in given:
                    new["tmp_path"] = given["tmp_path"] / str(number)
                    new["tmp_path"].mkdir()
                try:
                    test(**case, **{name: new.get(name, value) for name, value in given.items()})
                except (Exception, pytest.fail.Exception) as error:
                    told = traceback.format_exception(error.with_traceback(error.__traceback__.tb_next))
                    faults.append(f"{short_repr(case)}\n{''.join(told)}")
        if faults:
            pytest.fail(f"{len(faults)} of {len(cases)} cases:\n\n" + "\n".join(faults), pytrace=False)

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    run.__signature__ = signature.replace(parameters=fixtures)
    run.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
    return run


def rows_of(mark):
    """The arguments of each case of a `parametrize`, by name."""
    names, values = mark.args
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    rows = (value.values if isinstance(value, PARAM) else value if len(names) > 1 else [value] for value in values)
    return [dict(zip(names, row, strict=True)) for row in rows]


def short_repr(case):
    return ", ".join(
        f"{name}={getattr(value, '__name__', None) or repr(value)[:200]}" for name, value in case.items()
    )


class Opaque:
    """A batch with a length, and nothing else that is known."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)


def make_train_step(grad_fn, optimizer, *, compile=False, **options):
    """A train step, compiled where `compile` is True or a dict of `ll.compile_step`'s options."""
    step = ll.make_train_step(grad_fn, optimizer, **options)
    return ll.compile_step(step, **({} if compile is True else compile)) if compile else step


def trained(step, state, data):
    """The state after a step on each batch."""
    for batch in data:
        state, _ = step(state, batch)
    return state


def python(code, *arguments, **options):
    # No time-out of its own: pytest has one, and how long the import of torch takes depends on the machine.
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, **options
    )


def made_once(tmp_path_factory, name, make):
    """The folder that `make` has filled, made for all workers of a run by the one that asks first."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")
    folder = tmp_path_factory.getbasetemp().parent / f"{name}-{run}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "made").exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            (folder / "made").touch()
    return folder


def saved_at_most(function):
    """The most bytes that autograd held for backward passes at one time."""
    held = most = 0

    class Held:
        def __init__(self, tensor):
            nonlocal held, most
            self.tensor = tensor
            held += tensor.nbytes
            most = max(most, held)

        def __del__(self):
            nonlocal held
            held -= self.tensor.nbytes

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda packed: packed.tensor):
        function()
    return most


@contextmanager
def file_size_limit(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class InDouble(TorchFunctionMode):
    """Computes in float64 where transformers converts to float32: in norms, rotary embeddings and its loss."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return function(*args, **kwargs)
