"""Results as they come: a JSON file and a table, written again after each figure."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Ratio, markdown_table


class OutOfTime(Exception):
    """The time that the command was given is used up."""


@dataclass
class Report:
    """Figures so far.

    Attributes:
        folder: where `gpu.json`, `gpu.md` and the traces go.
        about: versions, device and settings.
        end: time on `time.perf_counter()` by which the command wants to be done.
    """

    folder: Path
    about: dict[str, Any]
    end: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.began:5.0f} s] {line}", flush=True)

    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.perf_counter()

    def check_time(self, needed: float = 0.0) -> None:
        if self.left() < needed:
            raise OutOfTime(
                f"{max(self.left(), 0):.0f} s are left of the given time, and about {needed:.0f} s needed"
            )

    @contextmanager
    def attempt(self, row: str, name: str) -> Iterator[None]:
        """Report an error by name and carry on."""
        try:
            yield
        except (Exception, SystemExit) as error:
            reason = str(error).strip().splitlines() or [""]
            self.failures.append({"row": row, "name": name, "error": f"{type(error).__name__}: {reason[0]}"})
            self.say(f"{row}, {name}: NOT MEASURED, {type(error).__name__}: {reason[0]}")
            if not isinstance(error, (ImportError, OutOfTime)):
                traceback.print_exc()
            self.write()

    def add(self, row: str, name: str, **figures: Any) -> None:
        self.rows.append({"row": row, "name": name, **figures})
        self.say(f"{row}, {name}: " + ", ".join(f"{key} {shown(value)}" for key, value in figures.items()))
        self.write()

    def goal(self, what: str, value: float | Ratio, bound: float, *, at_least: bool) -> None:
        """Print a figure beside its goal."""
        number = value.value if isinstance(value, Ratio) else value
        met = number >= bound if at_least else number <= bound
        sign = ">=" if at_least else "<="
        self.goals.append({"what": what, "value": value, "goal": f"{sign} {bound:.2f}", "met": met})
        self.say(f"GOAL {what}: {shown(value)}, goal {sign} {bound:.2f}: {'met' if met else 'MISSED'}")
        self.write()

    def write(self) -> None:
        """Replace both files, so that each is complete whenever the command is killed."""
        everything = {
            "about": self.about,
            "seconds": time.perf_counter() - self.began,
            "goals": self.goals,
            "failures": self.failures,
            "rows": self.rows,
        }
        text = json.dumps(everything, indent=1, default=lambda value: vars(value))
        for name, content in (("gpu.json", text + "\n"), ("gpu.md", self.markdown())):
            path = self.folder / name
            path.with_suffix(".partial").write_text(content)
            os.replace(path.with_suffix(".partial"), path)

    def markdown(self) -> str:
        lines = ["# looplib on a GPU", "", ", ".join(f"{key} {value}" for key, value in self.about.items()), ""]
        if self.goals:
            cells = [[goal["what"], shown(goal["value"]), goal["goal"], _met(goal["met"])] for goal in self.goals]
            lines += ["## Goals", "", *markdown_table(["what", "measured", "goal", ""], cells)]
        for row in dict.fromkeys(entry["row"] for entry in self.rows):
            entries = [entry for entry in self.rows if entry["row"] == row]
            keys = list(dict.fromkeys(key for entry in entries for key in entry if key not in ("row", "name")))
            cells = [[entry["name"], *[shown(entry.get(key)) for key in keys]] for entry in entries]
            lines += ["", f"## {row}", "", *markdown_table(["", *keys], cells)]
        if self.failures:
            cells = [[failure["row"], failure["name"], failure["error"]] for failure in self.failures]
            lines += ["", "## Not measured", "", *markdown_table(["row", "name", "why"], cells)]
        return "\n".join(lines) + "\n"


def _met(met: bool) -> str:
    return "met" if met else "missed"


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
