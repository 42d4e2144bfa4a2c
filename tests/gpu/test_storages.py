"""Storages of torch on an accelerator, as leases need them."""

import pytest
from storages import ALIASES, CHECKS, check_alias

WAYS = [way for way in ALIASES if way != "inference mode"]  # of which the far device has none


@pytest.mark.every_case
@pytest.mark.parametrize("collected", [False, True], ids=["at once", "collected"])
@pytest.mark.parametrize("way", WAYS)
def test_a_lease_is_seen_by_whatever_has_the_memory(way, collected, device):
    check_alias(way, collected, device)


@pytest.mark.every_case
@pytest.mark.parametrize("check", CHECKS)
def test_torch_keeps_what_lies_on_a_storage_as_long_as_the_memory(check, device):
    check(device)
