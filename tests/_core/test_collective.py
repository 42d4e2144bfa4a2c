"""Collective work: agreement between ranks, and errors of one rank raised on all."""

import pytest

import looplib as ll
from looplib._core.collective import named, together


def test_an_error_is_told_as_what_it_is_if_that_can_be_said():
    class Odd(ValueError):  # of no module, so it cannot be sent
        pass

    gone = named(3, FileNotFoundError(2, "No such file", "/x"))
    assert (type(gone), gone.errno, gone.filename) == (FileNotFoundError, 2, "/x")
    for error, kind, text in [
        (
            ll.checkpoint.DamagedCheckpointError("it is cut"),
            ll.checkpoint.DamagedCheckpointError,
            "rank 3: it is cut",
        ),
        (ll.DonatedStateError("spent"), ll.DonatedStateError, "rank 3: spent"),
        (BlockingIOError("somebody writes"), BlockingIOError, "rank 3: somebody writes"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), RuntimeError, "rank 3: UnicodeDecodeError: 'utf-8'"),
        (Odd("x"), RuntimeError, "rank 3: Odd: x"),
        (SystemExit(2), RuntimeError, "rank 3: SystemExit: 2"),
    ]:
        found = named(3, error)
        assert type(found) is kind
        assert str(found).startswith(text)


def test_one_process_agrees_with_itself():
    alone = together()
    error = OSError(28, "full")

    def fail():
        raise error

    assert (alone.first, alone.rank, alone.is_distributed, alone.another()) == (True, 0, False, alone)
    assert alone.on_rank0(lambda: 3) == alone.all_or_raise(lambda: 3) == 3
    assert alone.gather(5) == [5]
    for way in (alone.on_rank0, alone.all_or_raise):
        with pytest.raises(OSError, match="full") as seen:
            way(fail)
        assert seen.value is error
