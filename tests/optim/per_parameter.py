"""A base for stand-ins of third parties' optimizers, which update one parameter after the other."""

import torch


class PerParameter(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, **defaults):
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p)
