"""Orders of datasets that are too large for a list of their indices."""

import resource
from contextlib import contextmanager
from pathlib import Path

import torch

import looplib as ll


@contextmanager
def memory_limit(size):
    """Make allocations fail beyond so many bytes more than the process has now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_late_batch_of_a_billion_samples_is_found_without_a_list_of_their_indices():
    with memory_limit(2**30):  # a list of the indices takes 8 GB
        shuffled, in_order = (
            ll.make_loader(range(1_000_000_000), batch_size=1024, order=order)
            for order in (ll.data.shuffled(), ll.data.in_order())
        )
        assert len(shuffled) == len(in_order) == -(-1_000_000_000 // 1024)
        first = 900_000 * 1024
        assert torch.equal(next(in_order(ll.TrainState(batch=900_000))), torch.arange(first, first + 1024))
        batch = next(shuffled(ll.TrainState(batch=900_000)))
    assert batch.unique().numel() == 1024
    assert 0 <= batch.min() < batch.max() < 1_000_000_000
