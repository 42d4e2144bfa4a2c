"""The far device: a stand-in for an accelerator, for tests on any machine.

    with far():
        x = torch.ones(3, device="far:0")   # far:0 and far:1
        with host_reads() as reads:
            x.sum().item()                  # reads == [Read("_local_scalar_dense", "test_x.py:7 ...")]

Its tensors are real ones, with storages, views, autograd and vmap. They meet tensors of another device only with an
error, and each read by the host is noted with the line that made it. It has its own random generators, pinned memory,
streams and events; a non-blocking copy is carried out when something waits for it, and not before. Kernels are those of
the CPU over the same memory, so results have the CPU's bits. torch.compile has no compiler for it.

Why a C++ extension (`device.cpp`): a wrapper subclass in Python has no storage, so `save`, donation, `data_ptr`, `set_`
and views would be tested on something that no accelerator has; and torch's own OpenReg is not on PyPI. The extension
needs a C++ compiler, which the tests of `torch.compile` need as well. It is compiled once, in about ten seconds, and
kept in the user's cache. A machine without a compiler gets an error, and no test is skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
ROOT = Path(__file__).parents[2]
COUNT = 2


@dataclass(frozen=True)
class Read:
    """One read by the host.

    Attributes:
        what: torch's operator, or what the host waited for.
        line: where in looplib or in the test it was made.
    """

    what: str
    line: str


_lists: list[list[Read]] = []


@contextmanager
def far() -> Iterator[torch.device]:
    """The first far device, available as `torch.accelerator` while the block runs."""
    _load()
    before = torch.ops.far.is_available()
    torch.ops.far.set_available(True)
    try:
        yield torch.device("far", 0)
    finally:
        torch.ops.far.set_available(before)


@contextmanager
def host_reads() -> Iterator[list[Read]]:
    """The reads by the host while the block runs, by any thread."""
    reads: list[Read] = []
    _lists.append(reads)
    try:
        yield reads
    finally:
        _lists[:] = [one for one in _lists if one is not reads]


def _note(what: str) -> None:
    if _lists:
        read = Read(what, _line())
        for reads in _lists:
            reads.append(read)


def _line() -> str:
    """The innermost line of looplib or of the tests."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT))]
    frames = [frame for frame in frames if frame.filename != __file__ and "site-packages" not in frame.filename]
    if not frames:
        return "a thread of autograd"
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}: {frames[-1].line}"


@cache
def _load() -> None:
    torch.ones(1, requires_grad=True).sum().backward()  # autograd counts the devices, before there is one more
    torch.ops.load_library(str(_compiled()))
    torch.ops.far.start_threads()
    library = torch.library.Library("far", "IMPL")
    library.impl("read", _note, "CompositeExplicitAutograd")
    _load.library = library  # it unregisters what it holds when it is collected
    torch.utils.rename_privateuse1_backend("far")
    torch._register_device_module("far", _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def _module() -> types.ModuleType:
    """`torch.far`, as torch asks it of a device."""
    ops = torch.ops.far
    generators = tuple(ops.default_generator(index) for index in range(COUNT))

    def index_of(device):
        index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        return ops.device() if index is None or index < 0 else index

    @contextmanager
    def device(index):
        before = ops.device()
        ops.set_device(index_of(index))
        try:
            yield
        finally:
            ops.set_device(before)

    module = types.ModuleType("torch.far")
    module.device = device
    module.default_generators = generators
    module._initialized = True
    module.is_initialized = ops.is_available
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: COUNT if ops.is_available() else 0
    module.is_available = ops.is_available
    module.current_device = ops.device
    module.set_device = lambda device: ops.set_device(index_of(device))
    module.synchronize = lambda device=None: ops.synchronize(index_of(device))
    module.get_rng_state = lambda device="far": generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device="far": generators[index_of(device)].set_state(state)
    module.manual_seed = lambda seed: generators[ops.device()].manual_seed(seed)
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in generators]
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


def _compiled() -> Path:
    """The path of the compiled extension: compiled by the first process that needs it."""
    kind = f"{torch.__version__} {sys.platform}".encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "looplib-tests"
    path = folder / f"far-{hashlib.sha256(SOURCE.read_bytes() + kind).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "far.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            home = Path(torch.__file__).parent
            unfinished = path.with_suffix(".unfinished")
            command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-O1", "-std=c++20", "-w", str(SOURCE)]
            command += ["-o", str(unfinished), f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
            command += [f"-L{home}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home}/lib"]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except FileNotFoundError as error:
                raise RuntimeError(f"the far device needs a C++ compiler (set CXX): {error}") from error
            except subprocess.CalledProcessError as error:
                raise RuntimeError(f"{SOURCE} does not compile:\n{error.stderr[-4000:]}") from error
            unfinished.replace(path)
    return path
