"""Switch for warnings of misuse."""

from __future__ import annotations

from looplib._core.checks import check_type
from looplib._core.misuse import switch


def warn_of_misuse(on: bool) -> None:
    """Switch warnings of misuse on or off, for the whole process. They are on at first.

    >>> import looplib as ll
    >>> ll.debug.warn_of_misuse(False)  # in a script that has run for a month without one
    >>> ll.debug.warn_of_misuse(True)

    These warnings look at what raises no error: a loop without `state =`, a module that keeps its first weights or is written
    between steps that do not use it, an optimizer of torch's that finds no `.grad`, layers that went into eval mode, several
    steps on each batch without `same_batch`, `requires_grad` that changed after `make_grad_fn`, buffers that were replaced,
    losses that are averaged over something other than they mean, packed rows, a record for early stopping that never sees its
    scores.
    All else stays: steps compute the same bits, and what would be wrong in any case is still refused.

    With them, a small step takes some 2% longer, and labels and weights of losses are read now and then (at the 1st, 2nd, 4th,
    ... microbatch), which waits for an accelerator. A step that is compiled, mapped or differentiable is looked at while it is
    traced, without what needs values: labels, and numbers beside a loss. Each `step()` of any of torch's optimizers in the process calls a
    hook, from the first train step on; it looks for one `.grad` and returns. To silence one and keep the others, use Python's own
    `warnings.filterwarnings("ignore", message=...)`.

    Args:
        on: False to switch them off.

    Raises:
        TypeError: `on` is no bool.
    """
    check_type("on is", on, bool, "give True or False")
    switch(on)
