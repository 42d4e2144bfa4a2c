"""The seconds that compiling takes, shown on a terminal while it lasts."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def compile_clock() -> Iterator[None]:
    """Show on a terminal for how long the step has been compiling, once a second, and in the end how long it took.

    Nothing is shown if stderr is a file or a notebook, or if it takes less than a second.
    """
    terminal = sys.stderr
    if terminal is None or not terminal.isatty():
        yield
        return
    began, ended = time.monotonic(), threading.Event()

    def write(text: str, end: str = "") -> None:
        # A progress bar may be on this line: it is erased, and tqdm draws it again below.
        terminal.write(f"\r\x1b[K{text} {time.monotonic() - began:.0f} s{end}")
        terminal.flush()

    def show() -> None:
        while not ended.wait(1.0):
            write("compiling the step:")

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
            write(text, "\n")
