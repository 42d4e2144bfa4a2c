"""Kernels compiled together against kernels compiled apart: the same results, from fewer files."""

import contextlib
import threading
import time

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch.utils._pytree import tree_leaves

import looplib as ll
from looplib.transforms import _inductor, _kernels
from looplib.transforms._kernels import Kernel, load, one_file

HELPED = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <{header}>
static float helper() {{ return {value}f; }}
extern "C"  void  kernel(float* out_ptr0)
{{
    out_ptr0[0] = helper();
}}
"""


def kernel(value, header="vector"):
    return Kernel(["float*"], HELPED.format(value=value, header=header))


def files(monkeypatch):
    """The files that are handed to the C++ compiler from now on."""
    found, plain = [], CppPythonBindingsCodeCache.load_pybinding_async.__func__

    def counting(cls, argtypes, source, *args, **kwargs):
        found.append(source)
        return plain(cls, argtypes, source, *args, **kwargs)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", classmethod(counting))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 1])
def test_kernels_in_one_file_keep_their_own_code(monkeypatch, threads):
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    compiled = files(monkeypatch)
    values = [1.5, 2.5, 3.5, 4.5, 5.5]
    out, results = torch.zeros(1), []
    for function in load([kernel(value, "array" if value > 3 else "vector") for value in values]):
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


def trained(options):
    """The losses of a small network's compiled steps, and its last tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3), nn.Softmax(-1))
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-2)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    train_step = ll.compile_step(ll.make_train_step(grad_fn, optimizer, donate=True), options=options)
    state, losses = ll.init_state(model, optimizer), []
    for _ in range(3):
        state, metrics = train_step(state, torch.randn(8, 5))
        losses.append(metrics["loss"].compute())
    return losses, tree_leaves((state.params, state.opt_state))


@pytest.mark.slow
def test_a_step_of_few_files_has_the_bits_of_one_file_per_kernel(monkeypatch):
    options = {"fx_graph_cache": False}  # which would hide the second compilation
    compiled = files(monkeypatch)
    losses, tensors = trained(options)
    few = len(compiled)
    monkeypatch.setattr(_inductor, "compiled_together", contextlib.nullcontext)
    losses_apart, tensors_apart = trained(options)
    assert len(compiled) - few > few >= 1
    assert losses == losses_apart
    assert all(torch.equal(one, other) for one, other in zip(tensors, tensors_apart, strict=True))


@pytest.mark.slow
def test_kernels_that_do_not_compile_together_are_compiled_apart(monkeypatch):
    options = {"fx_graph_cache": False}
    monkeypatch.setattr(_kernels, "one_file", lambda kernels: "this is no C++")
    compiled = files(monkeypatch)
    losses, tensors = trained(options)
    assert compiled.count("this is no C++") >= 1
    monkeypatch.setattr(_inductor, "compiled_together", contextlib.nullcontext)
    losses_apart, tensors_apart = trained(options)
    assert losses == losses_apart
    assert all(torch.equal(one, other) for one, other in zip(tensors, tensors_apart, strict=True))


def test_another_thread_and_code_with_macros_of_its_own_are_compiled_as_usual(monkeypatch):
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda compiler, argtypes, source: "as usual")
    before = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    with _kernels.compiled_together():
        compiler = AsyncCompile()
        assert isinstance(compiler.cpp_pybinding(*kernel(1.5)), Kernel)
        assert compiler.cpp_pybinding(["float*"], "#define SIZE 3\n" + kernel(1.5).source) == "as usual"
        found = in_a_thread(lambda: compiler.cpp_pybinding(*kernel(1.5)))
        assert found == "as usual"
    assert (AsyncCompile.cpp_pybinding, AsyncCompile.wait) == before


def test_two_threads_that_compile_at_once_leave_inductor_as_it_was():
    before, second_is_in = (AsyncCompile.cpp_pybinding, AsyncCompile.wait), threading.Event()

    def second():
        with _kernels.compiled_together():
            second_is_in.set()
            time.sleep(0.1)  # without the lock, the first thread leaves in this time

    with _kernels.compiled_together():
        thread = threading.Thread(target=second)
        thread.start()
        assert not second_is_in.wait(0.1)
    thread.join()
    assert (AsyncCompile.cpp_pybinding, AsyncCompile.wait) == before


def in_a_thread(function):
    """Call a function in a thread of its own and return its result."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
