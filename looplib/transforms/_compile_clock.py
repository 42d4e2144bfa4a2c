"""The seconds that compiling takes, shown on a terminal or in a notebook while it lasts."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Write = Callable[[str, bool], None]  # of a text, and whether it is the last one


@contextmanager
def compile_clock() -> Iterator[None]:
    """Show for how long the step has been compiling, once a second, and in the end how long it took.

    It is one line on a terminal, and one line below a notebook's cell. Nothing is shown if stderr is a file, or if
    compiling takes less than a second.
    """
    write = _writer()
    if write is None:
        yield
        return
    began, ended = time.monotonic(), threading.Event()

    def show() -> None:
        while not ended.wait(1.0):
            write(f"compiling the step: {time.monotonic() - began:.0f} s", False)

    thread = threading.Thread(target=show, name="compile clock", daemon=True)
    thread.start()
    text = "compiling the step stopped after"
    try:
        yield
        text = "compiled the step in"
    finally:
        ended.set()
        thread.join()
        if time.monotonic() - began >= 1.0:
            write(f"{text} {time.monotonic() - began:.0f} s", True)


def _writer() -> Write | None:
    terminal = sys.stderr
    if terminal is not None and terminal.isatty():

        def write(text: str, last: bool) -> None:
            # A progress bar may be on this line: it is erased, and tqdm draws it again below.
            terminal.write(f"\r\x1b[K{text}" + "\n" * last)
            terminal.flush()

        return write
    return _in_a_notebook()


def _in_a_notebook() -> Write | None:
    """One output of the cell, which each text replaces."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    shown: list[Any] = []

    def write(text: str, last: bool) -> None:
        data = {"text/plain": text}
        if shown:
            shown[0].update(data, raw=True)
        else:
            shown.append(display(data, raw=True, display_id=True))  # type: ignore[no-untyped-call, unused-ignore]

    return write
