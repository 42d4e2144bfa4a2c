"""The seed of a step's random numbers."""

from __future__ import annotations

from looplib._core.random import mix
from looplib.types import TrainState, check_state


def step_seed(state: TrainState, *, rank: int = 0, microbatch: int = 0) -> int:
    """Seed of a step's random numbers, with which your own loop draws the same ones.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5))
    >>> def loss_fn(model, x):
    ...     return model(x).square().mean()
    >>> state, x = ll.init_state(model, seed=3), torch.ones(4, 2)
    >>> metrics = ll.make_grad_fn(model, loss_fn)(state, x).metrics
    >>> _ = torch.manual_seed(ll.debug.step_seed(state))
    >>> loss_fn(model, x).item() == metrics["loss"].item()
    True

    Before the forward pass of each microbatch, a step seeds torch's random streams with a hash of the state's seed, its
    step, the rank and the index of the microbatch, and puts them back afterwards. Eval and predict steps do so too, with
    microbatch 0. Steps that are compiled by Inductor draw other numbers from the same seed. For draws of your own that
    follow from the state, `torch.Generator().manual_seed(ll.debug.step_seed(ll.state.fold_in(state, 1)))`.

    Args:
        state: the state that the step is given.
        rank: rank of the process among those that divide the data.
        microbatch: index of the microbatch within `accumulate`.

    Returns:
        A non-negative int of 63 bits.
    """
    check_state(state, "ll.debug.step_seed(state)")
    return mix(state.seed, state.step, rank, microbatch)
