"""Directions of metrics: whether lower or higher is better, by name."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

from looplib._core.checks import check_argument, warn

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
