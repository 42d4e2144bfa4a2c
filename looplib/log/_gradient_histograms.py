"""Histograms of the gradients, for sinks that draw them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from looplib._core.calls import remember
from looplib._core.checks import check
from looplib._core.kinds import check_kind
from looplib._core.ranks import is_first, is_sharded
from looplib._core.tracing import tracing
from looplib._wrapping import check_whole, of_whole_step
from looplib.log._boards import Histogram, histogram_of
from looplib.predicates._predicate import Predicate
from looplib.types import WHOLE, GradFn, Gradients, Part, Sink, TrainState


def gradient_histograms(
    grad_fn: GradFn,
    sink: Sink,
    when: Predicate,
    *,
    names: Callable[[str], bool] | None = None,
    prefix: str = "gradients/",
) -> GradFn:
    """Log a histogram of each parameter's gradient at chosen steps, to a sink that draws histograms.

    >>> import looplib as ll, tempfile, torch
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> log = ll.log.tracker("tensorboard", tempfile.mkdtemp() + "/digits")
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> grad_fn = ll.log.gradient_histograms(grad_fn, log, ll.every_n_steps(100))
    >>> train_step = ll.make_train_step(grad_fn, optimizer)
    >>> state, metrics = train_step(ll.init_state(model, optimizer), torch.ones(4, 2))

    The gradients are those of the whole step, averaged over ranks, so it goes around `accumulate`, and around or
    inside clipping for the gradients after or before it. They are counted on their device in 64 bins between the
    smallest and the largest finite element; only the counts are copied to the host. Other steps pay for the predicate.

    The step logged is the one that these gradients make, and the predicate sees its count, as it sees that of the
    state after the step: `ll.every_n_steps(100)` logs steps 100, 200, and so on.

    Args:
        grad_fn: gradient function of a whole step.
        sink: a sink of `ll.log.tracker` for TensorBoard, W&B, Trackio, Aim, Comet or ClearML, or `ll.log.tensorboard`.
        when: a predicate of the step's counts.
        names: `name -> bool`, selects parameters. Defaults to all.
        prefix: put in front of a parameter's name.

    Raises:
        ValueError: it is used inside `accumulate`, where it would see each microbatch.
        RuntimeError: at the first call, in a compiled or vectorized step.
    """
    grad_fn = check_whole(grad_fn, "gradient_histograms")
    check_kind(sink, "gradient_histograms", "sink")
    check_kind(when, "gradient_histograms", "predicate")

    def logged(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        out = grad_fn(state, batch, part)
        check(
            not tracing(),
            "gradient_histograms reads the gradients of each step, which a compiled or vectorized step does not show: "
            "leave it out, or do not compile this step",
            RuntimeError,
        )
        after = state.replace(step=state.step + 1, batch=state.batch + 1, samples=state.samples + out.samples)
        if when(after):
            histograms: dict[str, Histogram] = {}
            for name, grad in out.grads.items():
                if names is None or names(name):
                    whole = grad.full_tensor() if is_sharded(grad) else grad  # on all ranks
                    if is_first() and (histogram := histogram_of(whole)) is not None:
                        histograms[f"{prefix}{name}"] = histogram
            if histograms:
                sink(after, histograms)  # type: ignore[arg-type]
        return out

    made = of_whole_step("gradient_histograms", logged, grad_fn)
    return remember(made, gradient_histograms, grad_fn, sink, when, names=names, prefix=prefix)
