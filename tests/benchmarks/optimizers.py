"""Cost of a step with each class of torch.optim, against the fastest raw loop with that class.

    python tests/benchmarks/optimizers.py                       # all classes, a small MLP
    python tests/benchmarks/optimizers.py --tensors 4000        # a model of 4,000 tensors of 10 numbers
    python tests/benchmarks/optimizers.py --only SGD AdamW --seconds 60         # 30 s for each of two classes

The raw loops are those with `fused=True`, `foreach=True` and `foreach=False`, as far as the class has them, and the best
is the one with the lowest median. Over it stand looplib's steps with the default kernel: donated, pure, and donated and
traced once (`ll.compile_step(step, backend="eager")`). Donated steps with one of the arguments stand over the raw loop
with the same argument: the numbers of that kernel are what such an argument asks for. In each round all contenders run
one block of steps, in shuffled order. A ratio is that of two medians over the rounds, with a 95% interval from resampled
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
from harness import Report, Seconds, Step, in_turns, options_of, parser, ratio
from loops import looplib_step, raw_step
from models import classify, many
from torch import nn

import looplib as ll

CLASSES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "Muon": {},
}
NOT_TRACED = {"RAdam", "ASGD", "Rprop", "Adafactor"}  # classes that graphs leave out
KERNELS: dict[str, dict[str, Any]] = {
    "fused=True": {"fused": True},
    "foreach=True": {"foreach": True},
    "foreach=False": {"foreach": False},
}
RAW, DONATED, PURE, TRACED = "raw", "donated", "pure", "donated, traced"
Contender = tuple[str, str]  # one of these, and the argument, which is empty for the default


def model_of(tensors: int, biases: bool) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    if tensors:
        return many([(2, 5)] * tensors)
    model = nn.Sequential(nn.Linear(32, 64, bias=biases), nn.Tanh(), nn.Linear(64, 10, bias=biases))
    return model, classify, (torch.randn(16, 32), torch.randint(0, 10, (16,)))


def contenders(name: str, tensors: int) -> dict[Contender, Step]:
    """Steps of a class. A kernel that the class lacks is left out."""
    cls, options = getattr(torch.optim, name.split()[0]), {"lr": 1e-3, **CLASSES[name]}
    biases = cls is not getattr(torch.optim, "Muon", None)  # which takes matrices alone
    steps: dict[Contender, Step] = {}

    def looplib(options: dict[str, Any], donate: bool, compile: dict[str, Any] | None = None) -> Step:
        made = model_of(tensors, biases)
        return looplib_step(*made, donate, optimizer=ll.optimizer(cls, **options), compile=compile)

    for argument, chosen in KERNELS.items():
        try:
            made = raw_step(*model_of(tensors, biases), cls=cls, options=options | chosen)
            made()
        except (TypeError, RuntimeError):
            continue
        steps[RAW, argument] = made
        steps[DONATED, argument] = looplib(options | chosen, True)
    if not steps:
        steps[RAW, ""] = raw_step(*model_of(tensors, biases), cls=cls, options=options)
    for kind in (DONATED, PURE) if name in NOT_TRACED else (DONATED, PURE, TRACED):
        steps[kind, ""] = looplib(options, kind != PURE, {"backend": "eager"} if kind == TRACED else None)
    return steps


def cells_of(times: dict[Contender, list[float]]) -> dict[str, Any]:
    """The fastest raw loop, the default over it, and each argument over the raw loop with the same."""
    medians = {argument: statistics.median(values) for (kind, argument), values in times.items() if kind == RAW}
    best = min(medians, key=medians.__getitem__)
    return {
        "fastest raw loop": ", ".join(filter(None, [best, str(Seconds(medians[best]))])),
        **{kind: ratio(times[kind, ""], times[RAW, best]) for kind in (DONATED, PURE, TRACED) if (kind, "") in times},
        **{
            f"{argument}, donated": ratio(times[DONATED, argument], times[RAW, argument])
            for argument in KERNELS
            if argument in medians
        },
    }


def main(options: argparse.Namespace) -> int:
    model = f"{options.tensors} tensors" if options.tensors else "MLP"
    report = Report("optimizers", options, model)
    for name, seconds in report.rows(options.only):
        with report.attempt(name):
            report.add(name, cells_of(in_turns(contenders(name, options.tensors), seconds, block=0.04, least=5)))
    return report.close()


if __name__ == "__main__":
    made = parser(__doc__, 170.0)
    made.add_argument("--tensors", type=int, default=0, help="number of small tensors, in place of the MLP")
    made.add_argument("--only", nargs="*", default=list(CLASSES), choices=list(CLASSES), help="classes")
    sys.exit(main(options_of(made)))
