"""Stand-ins for optimizers of third parties: state as theirs is kept, in the places where theirs is."""

import itertools
import math

import torch
from torch import optim


class PerParameter(optim.Optimizer):
    """A base for classes that update one parameter after the other."""

    def __init__(self, params, lr=1e-2, **defaults):
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p)


class Late(PerParameter):
    """As Adan, Yogi, AdaBelief and NAdamW: a first update of its own kind, and counts of Python."""

    def update(self, group, p):
        state = self.state[p]
        if not state:
            state.update(step=0, previous=p.grad.clone(), average=torch.full_like(p, 1e-3))
        state["step"] += 1
        change = p.grad - state["previous"]
        state["previous"].copy_(p.grad)
        state["average"].lerp_(p.grad + change, 0.1)
        p.sub_(state["average"] / (1 - 0.9 ** state["step"]), alpha=group["lr"])


class Lion8bit(PerParameter):
    """As Lion8bit of bitsandbytes: moments of 8 bits with a scale for each parameter, kept as plain tensors."""

    def update(self, group, p):
        state = self.state[p]
        if not state:
            state["codes"], state["absmax"] = torch.zeros(p.shape, dtype=torch.int8), torch.zeros(())
        grad = torch.view_as_real(p.grad)[..., 0] if p.is_complex() else p.grad
        moment = state["codes"].float() * state["absmax"] / 127
        p.sub_((moment * 0.9 + grad * 0.1).sign(), alpha=group["lr"])
        moment = moment * 0.99 + grad.float() * 0.01
        state["absmax"] = moment.abs().max()
        state["codes"].copy_((moment / state["absmax"] * 127).round())


class Dividing(optim.Optimizer):
    """As DAdaptSGD: a quotient of sums over gradients, which may not all be 0."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            group["d"] = max(group["d"], 1 / sum(p.grad.abs().square().sum().item() for p in given))
            for p in given:
                p.sub_(p.grad, alpha=group["lr"] * group["d"])


def stand_in(first, count, where, extra):
    """A class whose first update of a parameter, counts, and places of state are as some third parties have them.

    Args:
        first: what a parameter's state begins as: zeros (Lion), its gradient (Adan), itself (MADGRAD's x0), or what
            the constructor has made (LowRank).
        count: of updates: an int or a tensor for each parameter, or a number in the group.
        where: the average is written in place, or is a new tensor each time, or stands in a list or in an object.
        extra: nothing, a flag on the optimizer (bitsandbytes), or a cache in the group (RAdam).
    """

    class Box:
        def __init__(self, value):
            self.value, self.seen = value, 0

    def begin(p):
        value = {"zeros": torch.zeros_like(p), "gradient": p.grad.clone(), "itself": p.clone()}[first]
        return {"place": value, "new": value, "list": [value, 1], "object": Box(value)}[where]

    class StandIn(PerParameter):
        def __init__(self, params, lr=1e-2):
            super().__init__(params, lr, **({"cache": [None] * 3} if extra == "cache" else {}))
            if extra == "flag":
                self.begun = False
            for group in self.param_groups:
                for p in group["params"] if count == "constructor" else ():
                    self.state[p]["step"] = 1

        def counted(self, group, state):
            if count == "group":
                return group["count"]
            if count == "tensor":
                state["step"] = state.get("step", torch.zeros(())) + 1
                return state["step"].item()
            state["step"] = state.get("step", 0) + 1
            return state["step"]

        def step(self, closure=None):
            if extra == "flag":
                self.begun = True
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1 if count == "group" else 0
            super().step()

        def update(self, group, p):
            state = self.state[p]
            if "average" not in state:
                state["average"] = begin(p)
            number, kept = self.counted(group, state), state["average"]
            average = kept.value if where == "object" else kept[0] if where == "list" else kept
            change = (p.grad - average) / (number + 1)
            if extra == "cache":
                slot = int(number) % 3
                if group["cache"][slot] is None or group["cache"][slot][0] != number:
                    group["cache"][slot] = number, math.sqrt(number)
                change = change * group["cache"][slot][1]
            if where == "new":
                state["average"] = average + change
            else:
                average.add_(change)
            if where == "object":
                kept.seen += 1
            p.sub_(average + p.grad, alpha=group["lr"])

    StandIn.__name__ = StandIn.__qualname__ = f"StandIn_{first}_{count}_{where}_{extra}"
    return StandIn


class Factored(PerParameter):
    """State that depends on a parameter's number of dimensions."""

    def update(self, group, p):
        state = self.state[p]
        if not state:
            state["row" if p.ndim > 1 else "whole"] = torch.zeros_like(p.sum(-1) if p.ndim > 1 else p)
        moment = state["row"].add_(p.grad.sum(-1)).unsqueeze(-1) if p.ndim > 1 else state["whole"].add_(p.grad)
        p.sub_(moment * group["lr"])


FIRST = ["zeros", "gradient", "itself"]
COUNTS = ["int", "tensor", "group", "constructor"]
PLACES = ["place", "new", "list", "object"]
EXTRAS = ["nothing", "flag", "cache"]
STAND_INS = [
    stand_in(first, count, where, EXTRAS[number % 3])
    for number, (first, count, where) in enumerate(itertools.product(FIRST, COUNTS, PLACES))
]
STAND_INS = [Factored, Late, Lion8bit, Dividing, *STAND_INS]
