"""Imports that the code of an answer has at hand, and two classes of other packages."""

# ruff: noqa: F401
import itertools
import json
import math
import os
import signal
import time
from itertools import islice, zip_longest
from pathlib import Path

import torch
import transformers
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

import looplib as ll


class Lion(torch.optim.Optimizer):
    """A class as third parties write them, that torch does not have (Chen et al., 2023)."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (fast, slow), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(state["exp_avg"].lerp(p.grad, 1 - fast).sign(), alpha=-lr)
                state["exp_avg"].lerp_(p.grad, 1 - slow)


class GaLoreAdamW(torch.optim.SGD):
    """Reads options of its own from a group, as the classes of galore_torch do."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * group.get("scale", 1.0))
