"""Batches whose size changes at given samples of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from looplib._core.checks import check, check_type, is_count
from looplib.data._orders import Epoch, Order, shuffled


def growing(sizes: Mapping[int, int], order: Order | None = None) -> Order:
    """Batch size warmup (ramp-up): batches whose size changes at given samples of the run.

    >>> import looplib as ll
    >>> loader = ll.make_loader(range(40), order=ll.data.growing({0: 4, 10: 8, 50: 16}))
    >>> [len(batch) for batch in loader(ll.TrainState())], [len(batch) for batch in loader(ll.TrainState(epoch=1))]
    ([4, 4, 4, 8, 8, 8, 4], [8, 8, 16, 8])

    The samples and their order are those of `order`. A batch has the size of the last entry at or before its first
    sample, so a batch that crosses an entry still has the old size. Samples are counted over all epochs: epoch e begins
    at `e` times the number of samples that the order has in an epoch. Batches are therefore a function of (seed, epoch),
    and a run resumes at any of them. An incomplete last batch of an epoch is kept.

    Epochs have different numbers of batches, so leave `epoch_length` out of `init_state` and call
    `state = ll.state.end_epoch(state)` after the for loop; or let the whole run be one epoch, with
    `order=ll.data.with_replacement(num_samples)`. With `ll.accumulate(grad_fn, size=8)`, larger batches take no more
    memory. Sizes may also fall.

    A run can change its batch size at any of its samples: `growing({0: 64, 448: 100})` has the batches of
    `batch_size=64` up to sample 448. See `Loader.resume`.

    Args:
        sizes: batch sizes by the number of the sample from which they hold; one of them is 0.
        order: order of the samples. Defaults to `shuffled()`.

    Raises:
        TypeError: `sizes` is not a mapping, or `order` is not an order.
        ValueError: `sizes` has no size for sample 0, or sizes are not ints of at least 1; or the order makes batches
            itself (`batch_sampler`), depends on the batch size (`by_length`), or may have epochs of different lengths
            (a `sampler` of a function).

    Source: Smith et al., "Don't decay the learning rate, increase the batch size", 2018; `--rampup-batch-size` in
    Megatron-LM.
    """
    check_type("sizes is", sizes, Mapping, "give a dict of sample numbers to batch sizes, such as {0: 8, 1000: 16}")
    check(
        0 in sizes and all(is_count(begin, 0) and is_count(size) for begin, size in sizes.items()),
        f"sizes is {sizes}; give ints: the numbers of samples, among them 0, from which each batch size holds",
    )
    inner = shuffled() if order is None else order
    check_type("order is", inner, Order, "give an order of ll.data, such as ll.data.sequential()")
    check(
        inner.any_batch_size and not inner.may_vary,
        f"order={inner} has batches of its own, or epochs that may differ in length; give an order of samples whose "
        "epochs all have the same number of them",
    )
    steps = dict(sorted(sizes.items()))

    def draw(epoch: Epoch) -> Iterator[Any]:
        keys = inner.draw(epoch)
        first = 0
        while first < len(keys):
            size = next(size for begin, size in reversed(steps.items()) if begin <= epoch.number * len(keys) + first)
            yield keys[first : first + size]
            first += size

    text = f"growing({steps}{'' if order is None else f', order=ll.data.{order}'})"
    # `any_length` is what a stream needs of an order, and a stream has batches of one size.
    return dataclasses.replace(inner, text=text, draw=draw, whole_batches=True, may_vary=True, any_length=False)
