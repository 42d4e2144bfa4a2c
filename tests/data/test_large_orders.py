"""Orders of datasets that are too large for a list of their indices."""

import resource
import time

import looplib as ll


def test_a_billion_samples_take_no_memory_and_a_late_batch_is_found_at_once():
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for order in (ll.data.shuffled(), ll.data.in_order()):
        loader = ll.make_loader(range(1_000_000_000), batch_size=1024, order=order)
        assert len(loader) == 976_563
        batch = next(loader(ll.TrainState(batch=900_000)))
        assert batch.unique().numel() == 1024
        assert batch.max() < 1_000_000_000
    # A list of the indices would take 8 GB and half a minute.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB
    assert time.process_time() - began < 20
