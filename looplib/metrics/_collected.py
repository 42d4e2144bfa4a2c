"""Records that keep what each sample gave, to be concatenated or scored all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check


class Cat(NamedTuple):
    """Tensor to hand out of a loss or metric function, such as a hidden state. Merging concatenates.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> def loss_fn(model, x):
    ...     out = model(x)
    ...     return out.square().mean(), {"outputs": ll.metrics.Cat(out)}
    >>> grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches=2)
    >>> metrics = grad_fn(ll.init_state(model), torch.ones(6, 2)).metrics
    >>> metrics["outputs"].compute().shape, list(ll.compute(metrics))
    (torch.Size([6, 1]), ['loss'])

    The step detaches it. The microbatches of `accumulate` and the batches of an evaluation follow each other along `dim`.
    It is no number, so `ll.compute`, and therefore what you log, leaves it out; `ll.evaluate` warns that it does, and
    `ll.evaluation.evaluate_records` returns it. A `Window` keeps the tensors of all its
    steps: take those that you do not log out of the metrics before you add them.

    Attributes:
        tensor: a tensor of any shape.
        dim: dimension along which to concatenate, that of the samples: 0, or 1 for the state of an RNN.

    Source: `torchmetrics.CatMetric`.
    """

    tensor: Tensor
    dim: int = 0

    def merge(self, other: Cat) -> Cat:
        """The tensors of both, one after the other."""
        both = [tensor if tensor.dim() else tensor.reshape(1) for tensor in (self.tensor, other.tensor)]
        return Cat(torch.cat(both, self.dim), self.dim)

    def compute(self) -> Tensor:
        """The whole tensor."""
        return self.tensor


Column = Sequence[Any] | Tensor


class Corpus(NamedTuple):
    """Metric of a whole corpus: keeps what each sample gave and hands all of it to a function at the end.

    >>> import looplib as ll
    >>> def exact_match(predictions, references):
    ...     return sum(map(str.__eq__, predictions, references)) / len(predictions)
    >>> record = ll.metrics.Corpus.of(exact_match, ["a cat", "a dog"], ["a cat", "the dog"])
    >>> ll.compute({"exact_match": record})
    {'exact_match': 0.5}

    Use it in the `metric_fn` of an evaluation with `model.generate`, with a function of sacrebleu, torchmetrics or
    evaluate:

        def metric_fn(model, batch):
            tokens = model.generate(input_ids=batch["input_ids"], max_new_tokens=32)
            texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            return {"bleu": ll.metrics.Corpus.of(bleu, texts, batch["reference"])}

    Memory grows with the dataset. On several ranks, the function gets the samples of all ranks, in the order of the
    ranks, so it must not depend on the order of the samples.

    Attributes:
        function: `(*columns) -> number`, called once with a list per column. It must be a function of a module, not a
            lambda that captures values of one rank. For a function that returns a dict, such as those of evaluate, make one
            record of each number.
        parts: columns of each batch.
    """

    function: Callable[..., Any]
    parts: tuple[tuple[Column, ...], ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], *columns: Column) -> Corpus:
        """Record of a batch.

        Args:
            function: see `Corpus`.
            columns: one value per sample each: a list of strings or of other values, or a tensor whose rows are the
                samples; rows may have different widths in different batches, as token ids have.

        Raises:
            ValueError: there are no columns, or they have different lengths.
            TypeError: a column is a dict.
        """
        check(
            not any(isinstance(column, Mapping) for column in columns),
            "Corpus.of got a dict, of which it would keep the keys; give its columns, Corpus.of(function, *columns.values())",
            TypeError,
        )
        lengths = [len(column) for column in columns]
        message = f"Corpus.of got columns of lengths {lengths}; give at least one, all of the same length"
        check(len(set(lengths)) == 1, message)
        kept = [trees.map_leaves(_copy, column) for column in columns]
        return cls(function, (tuple(column if isinstance(column, Tensor) else list(column) for column in kept),))

    def merge(self, other: Corpus) -> Corpus:
        return Corpus(self.function, self.parts + other.parts)

    def compute(self) -> Any:
        columns = ([row for part in parts for row in _rows(part)] for parts in zip(*self.parts, strict=True))
        return self.function(*columns)


def _copy(leaf: Any) -> Any:
    """A copy of a tensor or array, since the reader of the next batch may overwrite it."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if type(leaf).__module__ == "numpy" else leaf


def _rows(part: Column) -> Sequence[Any]:
    return part.tolist() if isinstance(part, Tensor) else part
