"""Names of the classes whose states have certain keys."""

import torch

import looplib as ll
from looplib._core.optimizer_states import makers_of


def test_what_is_known_of_torchs_classes_is_what_they_keep():
    sets = {"SGD": [{}, {"momentum": 0.9}], "RMSprop": [{}, {"momentum": 0.9, "centered": True}, {"centered": True}]}
    options = {**sets, "Adam": [{}, {"amsgrad": True}], "AdamW": [{}, {"amsgrad": True}]}
    for name in torch.optim.__all__:
        cls = getattr(torch.optim, name)
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            for chosen in options.get(name, [{}]):
                state = ll.optimizer(cls, lr=0.1, **chosen).init({"w": torch.ones(2, 2)})["state"]["w"]
                assert name in makers_of(frozenset(state)), (name, [*state])
