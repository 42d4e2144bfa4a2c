"""The far device itself: what the other tests of this folder rely on."""

import pytest
import torch

from far.device import far, host_reads


@pytest.fixture(autouse=True)
def available():
    with far():
        yield


def ones(device="far:0"):
    return torch.ones(3, device=device)


@pytest.mark.parametrize(
    "meet",
    [
        lambda x: x + torch.ones(3),
        lambda x: x + ones("far:1"),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch.nn.functional.linear(x, torch.ones(2, 3)),
        lambda x: x.normal_(generator=torch.Generator("far:1")),
        lambda x: x.numpy(),
    ],
)
def test_tensors_of_two_devices_do_not_meet(meet):
    with pytest.raises((RuntimeError, TypeError), match=r"device|generator"):
        meet(ones())


READS = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool(x.sum() > 0),
    "cpu": lambda x: x.cpu(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "synchronize": lambda x: torch.accelerator.synchronize(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_by_the_host_is_counted_with_its_line(read):
    x = ones()
    with host_reads() as reads:
        read(x)
    assert reads
    assert all(str(one.line).startswith("tests/far/test_device.py:") for one in reads), reads
    assert "lambda x: " in reads[0].line


def test_a_non_blocking_copy_waits_for_its_stream():
    x, pinned = ones(), torch.zeros(3).pin_memory()
    side, done = torch.Stream("far"), torch.Event("far")
    with side, host_reads() as reads:
        pinned.copy_(x, non_blocking=True)
        done.record(side)
    assert pinned.is_pinned()
    assert pinned.tolist() == [0, 0, 0]
    x.fill_(5)  # on another stream, which nobody told to wait
    done.synchronize()
    assert pinned.tolist() == [5, 5, 5]
    assert reads == []
    pinned.copy_(x, non_blocking=True)
    x.fill_(6)  # on the same stream, so after it
    assert pinned.tolist() == [5, 5, 5]


def test_a_stream_that_waits_for_another_does_not_make_the_host_wait():
    x, pinned = ones(), torch.zeros(3).pin_memory()
    first, second = torch.Stream("far"), torch.Stream("far")
    with first:
        pinned.copy_(x, non_blocking=True)
    second.wait_event(first.record_event())
    done = second.record_event()
    assert pinned.tolist() == [0, 0, 0]
    assert not done.query()
    done.synchronize()
    assert pinned.tolist() == [1, 1, 1]


def test_the_device_is_there_only_while_it_is_used():
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 2
    torch.ops.far.set_available(False)
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0
    assert torch.accelerator.current_accelerator(check_available=True) is None
    assert not torch.get_device_module("far").is_initialized()  # a test may fork
