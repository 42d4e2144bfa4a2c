"""Kernels compiled together against kernels compiled apart, and without a check of vector instructions beforehand."""

import contextlib
import functools

import pytest
import torch
from shared import SGD, mean_square
from torch import nn
from torch._inductor import config, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch.utils._pytree import tree_leaves

import looplib as ll
from looplib.transforms import _backends
from looplib.transforms._backends import Kernel, load, one_file, without_isa_check

HELPED = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <{header}>
static float helper() {{ return {value}f; }}
extern "C"  void  kernel({arguments})
{{
    out_ptr0[0] = helper();
}}
"""


def kernel(value, header="vector", more=()):
    arguments = ", ".join(["float* out_ptr0", *(f"{argtype} more{number}" for number, argtype in enumerate(more))])
    return Kernel(["float*", *more], HELPED.format(value=value, header=header, arguments=arguments))


def files(monkeypatch):
    """The files that are handed to the C++ compiler from now on."""
    found, plain = [], CppPythonBindingsCodeCache.load_pybinding_async.__func__

    def counting(cls, argtypes, source, *args, **kwargs):
        found.append(source)
        return plain(cls, argtypes, source, *args, **kwargs)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", classmethod(counting))
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_in_one_file_keep_their_own_code(monkeypatch, threads):
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    compiled = files(monkeypatch)
    values = [1.5, 2.5, 3.5, 4.5, 5.5]
    kernels = [kernel(value, "array" if value > 3 else "vector", ["const int64_t"] * (value > 5)) for value in values]
    out, results = torch.zeros(1), []
    for value, function in zip(values, load(kernels), strict=True):
        if value > 5:
            function(out, 3)
        else:
            function(out)
        results.append(out.item())
    assert results == values
    assert len(compiled) == threads


def test_a_file_includes_each_header_once_and_outside_of_namespaces():
    code = one_file([kernel(1.5), kernel(2.5, "array"), kernel(3.5)])
    own = code.partition("namespace")[0]
    assert own.count("#include <array>") == own.count("#include <vector>") == code.count("#include <array>") == 1
    assert "#include <Python.h>" in own
    assert "#include" not in code.partition("namespace")[2]


def test_kernels_of_this_thread_are_kept_to_be_compiled_together():
    with _backends.compiled_together():
        assert AsyncCompile().cpp_pybinding(*kernel(1.5)) == kernel(1.5)


def trained():
    """The losses of a small network's compiled steps, and its last tensors."""
    torch.manual_seed(0)
    options = {"fx_graph_cache": False}  # which would hide the second compilation
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3), nn.Softmax(-1))
    grad_fn = ll.make_grad_fn(model, mean_square)
    train_step = ll.compile_step(ll.make_train_step(grad_fn, SGD, donate=True), options=options)
    state, losses = ll.init_state(model, SGD), []
    for _ in range(3):
        state, metrics = train_step(state, torch.randn(8, 5))
        losses.append(metrics["loss"].compute())
    return [*losses, *tree_leaves((state.params, state.opt_state))]


@pytest.mark.slow
def test_a_step_of_few_files_or_of_one_that_fails_has_the_bits_of_one_file_per_kernel(monkeypatch):
    compiled = files(monkeypatch)
    together, few = trained(), len(compiled)
    monkeypatch.setattr(_backends, "one_file", lambda kernels: "this is no C++")
    failed, failures = trained(), compiled.count("this is no C++")
    monkeypatch.setattr(_backends, "compiled_together", contextlib.nullcontext)
    compiled.clear()
    apart = trained()
    assert len(compiled) > few >= failures >= 1
    for found in (together, failed):
        assert all(map(torch.equal, found, apart))


# The check of vector instructions


@pytest.fixture
def isa(monkeypatch):
    """A CPU with one set of instructions, whose checks are counted, and Inductor's function that lists those that work."""

    class ISA:
        checks = 0

        @functools.cache  # noqa: B019
        def __bool__(self):
            if config.cpp.vec_isa_ok is None:
                self.checks += 1
                return False
            return config.cpp.vec_isa_ok

    made = ISA()
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [made])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", functools.cache(lambda: [made] if made else []))
    return made


def compiler(fails=lambda isas: False):
    """A function that compiles with the settings it is given, and the instructions that it used each time."""
    used = []

    def compile(settings):
        with config.patch(settings):
            used.append(list(cpu_vec_isa.valid_vec_isa_list()))
        if fails(used[-1]):
            raise OSError("no such instruction")
        return "compiled"

    return compile, used


def test_the_first_instructions_are_used_without_a_check(isa):
    compile, used = compiler()
    assert without_isa_check(compile, {}) == "compiled"
    assert (used, isa.checks) == ([[isa]], 0)


def test_kernels_that_fail_are_compiled_with_the_check(isa):
    compile, used = compiler(fails=bool)
    assert without_isa_check(compile, {}) == "compiled"
    assert (used, isa.checks) == ([[isa], []], 1)


@pytest.mark.parametrize("allowed", [False, True])
def test_the_users_setting_and_option_hold(isa, allowed):
    compile, used = compiler()
    option = {"cpp.vec_isa_ok": allowed}
    with config.patch(option):  # as by TORCHINDUCTOR_VEC_ISA_OK
        without_isa_check(compile, {})
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    without_isa_check(lambda settings: compile({**option, **settings}), option)
    assert used == [[isa] if allowed else []] * 2
