"""Launcher: start a function on several processes of this host, from a script or a notebook cell.

torch's elastic launcher, the one inside torchrun, starts the processes, watches them and restarts them. This module
chooses how they start, brings the error of the one that failed first to the caller, and leaves no process behind.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from looplib._core import ranks as _ranks
from looplib._core.checks import check, check_count
from looplib.distributed._processes import launched

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPED = "stopped"  # name of a file that exists once one of these has arrived

_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_VARIABLES = (_NVML, "TORCHELASTIC_SIGNALS_TO_HANDLE")  # environment variables that are set while processes run


def launch(
    main: Callable[..., Any],
    *args: Any,
    nproc: int,
    max_restarts: int = 0,
    start_method: Literal["spawn", "fork"] | None = None,
) -> list[Any]:
    """Launch a function on several processes of this host, and return what it returned on each rank.

    >>> import looplib as ll
    >>> def main(lr):
    ...     with ll.distributed.setup() as device:
    ...         return ll.distributed.rank(), lr
    >>> ll.distributed.launch(main, 0.1, nproc=2)
    [(0, 0.1), (1, 0.1)]

    `main` is what you would start with torchrun, without its command line: wrap its body in
    `with ll.distributed.setup()`. For several hosts use torchrun, which needs no change to `main`.

    In a script, call it under `if __name__ == "__main__":`. In a notebook, define `main` in a cell and call it in that
    cell or a later one. Ctrl-C, or interrupting the kernel, sends each process one SIGINT, allows it 30 s to end (a
    step is never cut in half), and kills what is left; a second Ctrl-C kills at once. If the calling process is
    killed, Linux sends each of the others a SIGINT.

    **Start method.** A function that another process can import is *spawned*: each process imports its module again.
    A function of a notebook cell, a lambda and a closure can only be *forked*: each process starts as a copy of this
    one, with one CPU thread. A GPU that this process has used cannot be used in its copies, so that is refused.

    Args:
        main: function to call on each rank.
        args: arguments for it, the same on each rank. `functools.partial` passes arguments by name.
        nproc: number of processes, at most one for each GPU if there are GPUs.
        max_restarts: if a process fails, end all and start them again, up to this many times. A run that restores its
            last checkpoint then continues from there.
        start_method: "spawn" or "fork"; by default, as described above.

    Returns:
        What `main` returned, in the order of the ranks. It is pickled: return numbers, or tensors on the CPU.

    Raises:
        RuntimeError: a process failed. The message has the rank that failed first and its traceback. Or the call
            cannot work here: torchrun started this process, it is not the main thread, or `main` would have to be
            forked after this process has used a GPU or joined a process group.
        KeyboardInterrupt: Ctrl-C was pressed. All processes have ended.
        TypeError: `start_method="spawn"`, and `main` or its arguments cannot be pickled.
    """
    check_count("nproc", nproc, advice="expected a number of processes, at least 1")
    check_count("max_restarts", max_restarts, least=0, advice="expected a number of restarts, or 0 for none")
    _check_caller(main)
    method = start_method or _start_method(main, args)
    if method == "fork":
        _check_fork(main)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="looplib-launch-") as name, _supervised(Path(name), method) as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            logs_specs=DefaultLogsSpecs(log_dir=name),
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            local_addr="localhost",
            max_restarts=max_restarts,
            start_method=method,
            signals_to_handle="SIGQUIT",  # the others have handlers of this module
        )
        received = None
        try:
            results = elastic_launch(config, _child)((main, args), folder, method)
        except ChildFailedError as error:
            raise RuntimeError(_failure(folder, error.failures)) from None
        except SignalException as error:
            received = error.sigval
    if received is not None:
        signal.raise_signal(received)  # for the caller's own handler, now that all processes have ended
        raise KeyboardInterrupt if received == signal.SIGINT else SystemExit(128 + received)
    return [pickle.loads(results[rank]) for rank in range(nproc)]


def _check_caller(main: Any) -> None:
    check(
        getattr(main, "__module__", None) != "__mp_main__",
        "launch was called while a process that it started imports the script; write the call under "
        '`if __name__ == "__main__":`',
        RuntimeError,
    )
    check(
        not launched(),
        "this process was itself started by launch or torchrun, as one of several ranks: call the function "
        "without launch, or start the script with python",
        RuntimeError,
    )
    check(
        threading.current_thread() is threading.main_thread(),
        "launch was called in a thread, where Ctrl-C could not end the processes; call it in the main thread",
        RuntimeError,
    )


def _start_method(main: Any, args: Any) -> Literal["spawn", "fork"]:
    """Return "spawn" if a new process can import the function and unpickle its arguments."""
    try:
        pickled = pickle.dumps((main, args))
    except Exception:  # any type may raise an error of its own
        return "fork"
    # The main module of a notebook or a prompt is no file that another process could import.
    in_cell = b"__main__" in pickled and not hasattr(sys.modules["__main__"], "__file__")
    return "fork" if in_cell else "spawn"


def _check_fork(main: Any) -> None:
    name = getattr(main, "__qualname__", repr(main))
    accelerator = torch.accelerator.current_accelerator()
    reasons = {
        "this system cannot fork processes": "fork" not in multiprocessing.get_all_start_methods(),
        f"this process has used the {accelerator}, which its forks could not": _accelerator_used(),
        "this process has joined a process group, whose threads a fork would not have": _ranks.running(),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    check(
        reason is None,
        f"{name} is defined in a notebook cell or in a function, so its processes have to be forked from this one, but "
        f"{reason}; move it into a module (a .py file) and import it, or restart the kernel and call launch first",
        RuntimeError,
    )


def _accelerator_used() -> bool:
    device = torch.accelerator.current_accelerator()
    if device is None:
        return False
    return bool(getattr(torch.get_device_module(device), "is_initialized", bool)())


@contextmanager
def _supervised(folder: Path, method: str) -> Iterator[Path]:
    """Handle signals while processes run. Afterwards no process is left, and handlers and environment are as before."""
    handlers = {number: signal.getsignal(number) for number in (*_STOPPING, signal.SIGQUIT)}
    environment = {name: os.environ.get(name) for name in _VARIABLES}
    children = set(multiprocessing.active_children())
    for number in _STOPPING:
        if handlers[number] is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, partial(_stop, folder))
    # Ask NVML for the number of GPUs: asking CUDA would keep a forked process from using it.
    os.environ[_NVML] = "1"
    try:
        with warnings.catch_warnings():
            if method == "fork":  # Python 3.12 warns about the threads of a notebook, which the copy does not need
                warnings.filterwarnings("ignore", ".*use of fork\\(\\) may lead to deadlocks", DeprecationWarning)
            yield folder
    finally:
        # A second Ctrl-C interrupts torch while it waits for processes to end.
        _end(set(multiprocessing.active_children()) - children)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _set_environment(environment)


def _stop(folder: Path, number: int, frame: Any) -> None:
    """Handler of the signals that end all processes."""
    from torch.distributed.elastic.multiprocessing import SignalException, start_processes

    if any(one.f_code is start_processes.__code__ for one, _ in traceback.walk_stack(frame)):
        # Torch would end the processes with SIGTERM, whatever it received. Ask again when it has started them.
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, number)).start()
        return
    (folder / _STOPPED).touch()
    # torch's launcher sends it on to the processes, and waits for them.
    raise SignalException("signal", signal.Signals(number))


def _end(processes: Collection[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _child(call: tuple[Callable[..., Any], Any], folder: Path, method: str) -> bytes:
    """Call the function in a new process, and write down its traceback if it fails."""
    # In a process group of its own, so that Ctrl-C comes once, from torch's launcher, and not from the terminal too.
    os.setpgid(0, 0)
    _default_handlers()  # a fork has those of its parent
    if method == "fork":
        # A notebook's streams belong to threads that a fork does not have. Lines go to the same place without them.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    # As torchrun does. A fork cannot use the threads of OpenMP that this process had.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)) if method == "spawn" else 1)
    main, args = call
    try:
        result = _ranks.pickled(_result(main, args))
    except (Exception, SystemExit):
        name = f"failed-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
        (folder / name).write_text(traceback.format_exc(), encoding="utf-8")
        # If another rank was killed, let torch's launcher, which looks every 0.1 s, find that one first.
        time.sleep(0.3)
        raise
    # A process now waits until the launcher has the results of all, which it will not ask for if it was stopped.
    _default_handlers()
    if (folder / _STOPPED).exists() or not _launcher_lives():
        raise KeyboardInterrupt  # ends the process quietly
    return result


def _result(main: Callable[..., Any], args: Any) -> Any:
    try:
        return main(*args)
    except SystemExit as end:
        if end.code:
            raise
        return None  # sys.exit() and sys.exit(0) end a program that has succeeded


def _launcher_lives() -> bool:
    launcher = multiprocessing.parent_process()
    return launcher is not None and launcher.pid == os.getppid()


def _default_handlers() -> None:
    for number in (*_STOPPING, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _failure(folder: Path, failures: Any) -> str:
    """Message with the traceback of the rank that failed first. Torch reports the one that it noticed first."""
    attempts: dict[int, list[Path]] = {}
    for path in folder.glob("failed-*"):
        attempts.setdefault(int(path.name.split("-")[1]), []).append(path)
    rank, failure = next(iter(failures.items()))
    text = f"rank {rank} (pid {failure.pid}) ended with exit code {failure.exitcode}; its output may say why"
    if failure.exitcode < 0:
        text = f"rank {rank} (pid {failure.pid}) was ended by {signal.Signals(-failure.exitcode).name}"
    elif attempts:
        path = min(attempts[max(attempts)], key=lambda path: path.stat().st_mtime_ns)
        lines = path.read_text(encoding="utf-8").strip()
        text = f"rank {path.name.split('-')[2]} failed with {lines.splitlines()[-1]}\n\n{lines}"
    return text
