"""Early stopping and saving the best model.

The history (the best value, its step, the number of evaluations without an improvement) is an immutable record in
`state.extra`, so it is saved and restored with the state. Predicates read the record and decide, for example how long
to be patient.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from looplib._core.checks import check, check_argument, check_number, check_type, few, is_count, named, warn
from looplib._core.errors import with_advice
from looplib._core.misuse import warn_of_unwatched
from looplib._core.ranks import is_first
from looplib._core.torch_private import pytree
from looplib.predicates._predicate import Predicate
from looplib.types import TrainState, check_state

Mode = Literal["min", "max"]

_LOWER = re.compile(
    "bpb|bpc|brier|cer|crossentropy|ece|eer|err|error|fid|loss|mae|mape|mse|nll|perplexity|ppl|rmse|ter|wer"
)
_HIGHER = re.compile(
    r"acc|accuracy|ap|auc|auprc|auroc|bertscore|bleu\d*|chrf|dice|em|f1|gauc|iou|kappa|map|mcc|meteor|miou|mrr|ndcg|"
    r"precision|psnr|r2|recall|rouge\w*|ssim"
)
# Words that say of which data, and how averaged, and not what: in "macro_f1_score" and "accuracy/test".
_QUALIFIER = re.compile(
    r"(at|avg|dev|eval|macro|mean|micro|rate|score|test|top|train|val|valid|validation|weighted)?\d*"
)
# With one of these, as in "neg_loss", a known name may mean its opposite.
_OPPOSITE = {"drop", "gap", "inv", "inverse", "minus", "neg", "negative", "one"}


@cache  # a record is remade at each update; the warning comes once
def mode_of(monitor: str, mode: str | None) -> Mode:
    """The direction of a metric: `mode`, or if that is None, the one that its name is known for.

    >>> mode_of("eval/loss", None), mode_of("val_top5_accuracy", None), mode_of("score", "max")
    ('min', 'max', 'max')

    Warns if the name is known for the opposite direction. Raises ValueError if nothing says the direction.
    """
    known = _direction(monitor)
    advice = f'this metric may be better lower or higher: write BestSoFar({monitor!r}, mode="min"), or mode="max"'
    check_argument(mode is not None or known is not None, "mode", mode, advice)
    check_argument(mode in ("min", "max", None), "mode", mode, 'give "min" if lower is better, or "max"')
    if mode and known and mode != known:
        better, best = ("higher", "highest") if mode == "max" else ("lower", "lowest")
        warn(
            f"mode={mode!r} takes the {best} {monitor!r} for the best, and by its name it is not better {better}: leave out "
            "mode=, or give the metric another name if this is what you mean"
        )
    return mode or known  # type: ignore[return-value]


def _direction(monitor: str) -> Mode | None:
    words = [word for word in re.split(r"[^a-z0-9]+", monitor.lower()) if word]
    if _OPPOSITE.intersection(words) or monitor.startswith(("-", "1")):  # "-loss", "1-accuracy"
        return None
    named = [word for word in words if not _QUALIFIER.fullmatch(word)]
    if named and _LOWER.fullmatch(named[-1]):
        return "min"
    return "max" if named and _HIGHER.fullmatch(named[-1]) else None


class Watched:
    """Base of the records of a metric in `state.extra`, which `update_best` updates."""

    __slots__ = ()
    # The call that updates the record, and what is wrong without it.
    USE: ClassVar = ("ll.update_best", "early_stopping would never stop the run")
    monitor: str
    mode: Mode | None
    reference: float | None
    waited: int

    def update(self, value: float | Tensor, step: int) -> Any:
        raise NotImplementedError

    def is_nan(self, value: float, step: int) -> bool:
        """True for NaN, which is no improvement, and gets a warning."""
        if math.isnan(value) and is_first():
            warn(
                f"{self.monitor!r} is NaN at step {step}, which counts as an evaluation without an improvement: go back "
                "to an earlier state, or leave this evaluation out (no update) if the metric may well be NaN"
            )
        return math.isnan(value)


@dataclass(frozen=True, slots=True)
class BestSoFar(Watched):
    """Best value of a metric so far, and the number of evaluations since the last improvement.

    >>> import looplib as ll
    >>> best = ll.predicates.BestSoFar("eval/loss", min_delta=0.1)
    >>> for step, loss in [(100, 0.9), (200, 0.5), (300, 0.45), (400, 0.7)]:
    ...     best = best.update(loss, step)
    >>> best.best, best.best_step, best.waited
    (0.45, 300, 2)

    It is the one place that says which metric counts and in which direction. Put it into `state.extra`, where `update_best`
    updates it and `early_stopping` reads it, and give it to `checkpoint_io` for the best checkpoint:

        best = ll.predicates.BestSoFar("eval/score", mode="max")
        ckpt = ll.checkpoint_io("runs/checkpoints", keep_best=1, monitor=best)
        state = ckpt.restore(ll.init_state(model, optimizer, extra={"best": best}))
        done = ll.after_epochs(10) | ll.early_stopping(patience=3)

    A checkpoint stores what it has counted: `best`, `best_step`, `reference` and `waited`. The settings (`monitor`, `mode`,
    `min_delta`, `cumulative`) are those of the record that a run is restored into, so you can change `min_delta` between two
    runs. A record of a different metric or mode is refused.

    Attributes:
        monitor: name of the metric.
        mode: "min" if lower is better, "max" if higher is. Names that everyone knows choose their own: loss, error,
            perplexity, ... "min"; accuracy, f1, auc, bleu, ... "max". Any other name needs it.
        min_delta: smallest difference from `reference` that counts as an improvement (exclusive), at least 0.
        cumulative: if True, each value is compared with that of the last improvement, so that small gains add up until
            they count, as in torch's ReduceLROnPlateau. If False, it is compared with the best so far, so that small
            gains never count, as with transformers' `early_stopping_threshold`.
        best: the best value, or None before the first evaluation.
        best_step: step of the best value, or the first such step if there are several.
        reference: value at the last improvement, or with `cumulative=False`, the best value.
        waited: evaluations since the last improvement, which `early_stopping` compares with its patience.

    Raises:
        ValueError: `mode` is neither "min" nor "max", or is missing for a name that does not say it; or `min_delta` is
            negative or not finite.
        TypeError: `monitor` is not a name, or `min_delta` not a number.
    """

    monitor: str
    mode: Literal["min", "max"] | None = field(default=None, kw_only=True)
    min_delta: float = field(default=0.0, kw_only=True)
    cumulative: bool = field(default=True, kw_only=True)
    best: float | None = field(default=None, kw_only=True)
    best_step: int | None = field(default=None, kw_only=True)
    reference: float | None = field(default=None, kw_only=True)
    waited: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_type("monitor is", self.monitor, str, "give the name of a metric, such as 'eval/loss'")
        object.__setattr__(self, "mode", mode_of(self.monitor, self.mode))
        advice = "give a finite number of at least 0, also where higher is better"
        check_number(
            f"BestSoFar({self.monitor!r}): min_delta", self.min_delta, lambda least: 0 <= least < math.inf, advice
        )

    def update(self, value: float | Tensor, step: int) -> BestSoFar:
        """Return the record after one more evaluation, at `step`. NaN is no improvement, and gets a warning.

        >>> BestSoFar("accuracy").update(0.5, step=10).best
        0.5
        """
        value = float(value)
        changes: dict[str, Any] = {"waited": self.waited + 1}
        if self.is_nan(value, step):
            return replace(self, **changes)
        sign = 1 if self.mode == "max" else -1
        if self.best is None or sign * value > sign * self.best:
            changes |= {"best": value, "best_step": step}
        if self.reference is None or sign * (value - self.reference) > self.min_delta:
            changes |= {"reference": value, "waited": 0}
        elif not self.cumulative:
            changes |= {"reference": changes.get("best", self.best)}
        return replace(self, **changes)


def register(kind: type[Watched], settings: Sequence[str], counted: Sequence[str]) -> None:
    """Make a record a pytree: a checkpoint holds what it has counted, and a restore keeps the settings of the new record."""

    def flatten(record: Watched) -> tuple[list[Any], Any]:
        return [{name: getattr(record, name) for name in counted}], {name: getattr(record, name) for name in settings}

    def flatten_with_keys(record: Watched) -> tuple[list[Any], Any]:
        [children], structure = flatten(record)
        # The leaves' paths contain the metric's name, so a checkpoint of a different metric does not fit.
        return [(pytree.MappingKey(f"{record.mode} {record.monitor}"), children)], structure

    def unflatten(children: Any, structure: Any) -> Watched:
        return kind(**structure, **next(iter(children)))

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"looplib.{kind.__name__}",
    )


register(BestSoFar, ("monitor", "mode", "min_delta", "cumulative"), ("best", "best_step", "reference", "waited"))


def update_best(state: TrainState, scores: Mapping[str, float], key: str = "best") -> TrainState:
    """Record the scores of an evaluation: return the state with its `BestSoFar` (or `Plateau`) updated.

    >>> import looplib as ll
    >>> state = ll.TrainState(step=100, extra={"best": ll.predicates.BestSoFar("eval/loss")})
    >>> state = ll.update_best(state, {"eval/loss": 0.3, "eval/accuracy": 0.9})
    >>> state.extra["best"].best, state.extra["best"].best_step
    (0.3, 100)

    Call it once per evaluation and before saving, so that the checkpoint contains the record:

        if eval_now(state):
            log(state, scores := ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
            state = ll.update_best(state, scores)
            ckpt.save(state, scores)

    Args:
        state: a state with a `BestSoFar` in `extra`. In a loop of your own, keep one for this alone,
            `watch = ll.update_best(watch.replace(step=step), scores)`.
        scores: name -> value, as returned by `evaluate`; the same on all ranks.
        key: key of the record in `state.extra`. Use one record for each metric that you watch.

    Raises:
        ValueError: there is no record under `key`, or its metric is not among the scores.
        TypeError: `scores` is no mapping, but a list of those of members, for example; or the metric is complex.
    """
    check_state(state, "state = ll.update_best(state, scores)")
    record = record_of(state, key, Watched)
    check_type(
        "scores are",
        scores,
        Mapping,
        "give name -> value, as ll.evaluate returns them. A stack of states has one record for all of its members: compare the "
        "scores of members by hand",
    )
    if record.monitor not in scores:
        raise ValueError(
            f"{record.monitor!r}, the metric of state.extra[{key!r}], is not among the scores: {few([*map(repr, scores)])}"
        )
    score = scores[record.monitor]
    is_complex = score.is_complex() if isinstance(score, Tensor) else isinstance(score, complex)
    check(not is_complex, f"{record.monitor!r} is complex; give a real number, such as its absolute value", TypeError)
    return state.with_extra(**{key: record.update(score, state.step)})


_METRIC = (
    "The metric is that of the record in the state: ll.init_state(..., "
    'extra={"best": ll.predicates.BestSoFar("eval/loss")})'
)


@dataclass(frozen=True, slots=True, repr=False, init=False)
class early_stopping(Predicate):
    """Early stopping: true once `patience` evaluations in a row have brought no improvement.

    >>> import looplib as ll
    >>> done = ll.after_epochs(10) | ll.early_stopping(patience=2)
    >>> state = ll.TrainState(extra={"best": ll.predicates.BestSoFar("eval/loss")})
    >>> for loss in [0.5, 0.4, 0.6]:
    ...     state = ll.update_best(state, {"eval/loss": loss})
    >>> done(state), done(ll.update_best(state, {"eval/loss": 0.4}))
    (False, True)

    Make the first state by `ll.init_state(..., extra={"best": ll.predicates.BestSoFar("eval/loss")})`, which also says which
    metric it is, and call `state = ll.update_best(state, scores)` after each evaluation.

    Everything it needs is in the state, so a resumed run stops where an uninterrupted one would, and a larger
    patience lets a stopped run continue. Evaluate within the `for` (`if eval_now(state):`), not after it, where a `break` in
    the middle of an epoch would count as an evaluation more. If you evaluate more than once in an epoch, ask
    `if done(state): break` after `update_best`. To return to the best checkpoint, call
    `ckpt.restore(state, which="best")` after the loop. In a loop of your own, ask it about the state that `update_best`
    returned.

    Args:
        patience: number of evaluations, at least 1. The very first evaluation is an improvement.
        key: key of the `BestSoFar` in `state.extra`, which defines an improvement.

    Raises:
        ValueError: `patience` is not an int of at least 1; or, when called, the state has no such record.

    It behaves like Lightning's EarlyStopping and, with `BestSoFar(..., cumulative=False)`, like transformers'
    EarlyStoppingCallback. NaN counts as an evaluation without an improvement, with a warning. There is also a
    warning if `ll.evaluate` has returned the metric twice and the record has seen no value of it. Of an evaluation that you
    write yourself nothing is known, and scores of other names (`"loss"` for a record of `"eval/loss"`) may be meant for
    something else. A record that is never updated then never stops the run, and no warning says so; you can see it by
    `state.extra["best"].best`, which is still None after an evaluation. `update_best` refuses scores without the record's metric.
    """

    patience: int
    key: str = field(default="best", kw_only=True)

    @with_advice(f"write ll.early_stopping(patience=3), without the metric. {_METRIC}")
    def __init__(self, patience: int, *, key: str = "best") -> None:
        object.__setattr__(self, "patience", patience)
        object.__setattr__(self, "key", key)
        if not is_count(patience):
            raise ValueError(f"{self!r}: patience must be an int of at least 1. {_METRIC}")

    def fires(self, state: TrainState) -> bool:
        record = record_of(state, self.key, BestSoFar)
        if record.best is None and not record.waited:
            warn_of_unwatched(state, self.key, record.monitor)
        return record.waited >= self.patience

    def __repr__(self) -> str:
        key = "" if self.key == "best" else f", key={self.key!r}"
        return f"early_stopping(patience={self.patience!r}{key})"


@dataclass(frozen=True, slots=True, repr=False)
class at_best(Predicate):
    """True if the last evaluation was the best so far. Ask it after `update_best` to save the best model.

    >>> import looplib as ll
    >>> save_now = ll.predicates.at_best()
    >>> state = ll.TrainState(extra={"best": ll.predicates.BestSoFar("eval/loss")})
    >>> for step, loss in [(100, 0.5), (200, 0.6), (300, 0.4)]:
    ...     state = ll.update_best(state.replace(step=step), {"eval/loss": loss})
    ...     print(step, save_now(state))
    100 True
    200 False
    300 True

    It is false again after the next update, and before the first evaluation. A value equal to the best is not better.
    `min_delta` does not matter here: any gain makes a new best, while patience waits for a larger one. In the loop,
    put it after the evaluation:

        if eval_now(state):
            state = ll.update_best(state, scores := ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
            if save_now(state):
                ckpt.save(state, scores)

    Args:
        key: key of the `BestSoFar` in `state.extra`.

    Raises:
        ValueError: when called, if the state has no such record.

    It is the condition of transformers' `save_strategy="best"`.
    """

    key: str = field(default="best", kw_only=True)

    def fires(self, state: TrainState) -> bool:
        record = record_of(state, self.key, BestSoFar)
        # A second evaluation at the step of the best, as after a restore, increases `waited`. If small improvements do
        # not count as such, `waited` shows nothing.
        return record.best_step == state.step and (record.waited == 0 or record.min_delta > 0)

    def __repr__(self) -> str:
        return "at_best()" if self.key == "best" else f"at_best(key={self.key!r})"


W = TypeVar("W", bound=Watched)


def record_of(state: TrainState, key: str, kind: type[W]) -> W:
    """The record of a kind under a key of `state.extra`."""
    extra = state.extra
    record = extra.get(key) if isinstance(extra, Mapping) else None
    if isinstance(record, kind):
        return record
    if record is not None:
        description = f"it is {named(record)}"
    elif isinstance(extra, Mapping):
        description = f"state.extra has {few([*map(repr, extra)])}"
    else:
        description = f"state.extra is {named(extra)}"
    name = "BestSoFar" if kind is Watched else kind.__name__
    raise ValueError(
        f"there is no {name} in state.extra[{key!r}]: {description}; begin with "
        f'll.init_state(..., extra={{{key!r}: ll.predicates.{name}("eval/loss")}})'
    )
