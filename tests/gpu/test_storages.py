"""Storages of torch on an accelerator, as leases need them."""

import pytest
from storages import CHECKS, check_aliases


def test_a_lease_is_seen_by_whatever_has_the_memory(device):
    check_aliases(device, left_out=["inference mode"])  # of which the far device has none


@pytest.mark.slow
def test_torch_keeps_what_lies_on_a_storage_as_long_as_the_memory(device):
    for check in CHECKS:
        check(device)
