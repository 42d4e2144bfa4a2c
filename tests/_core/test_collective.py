"""Collective work: agreement between ranks, and errors of one rank raised on all."""

import pytest
import torch
from ranks import launch

import looplib as ll
from looplib._core import ranks as _ranks
from looplib._core.collective import together, with_rank
from looplib._core.torch_private import timeout_of
from looplib.distributed.records import gather_tensors


def test_an_error_is_told_as_what_it_is_if_that_can_be_said():
    class Odd(ValueError):  # of no module, so it cannot be sent
        pass

    gone = with_rank(3, FileNotFoundError(2, "No such file", "/x"))
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
        found = with_rank(3, error)
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


def test_tensors_of_one_kind_are_sent_together_up_to_a_number_of_bytes(monkeypatch):
    monkeypatch.setattr(_ranks, "_BUCKET", 40)
    four, wide, three, six = torch.zeros(4), torch.zeros(1, dtype=torch.float64), torch.zeros(3), torch.zeros(2, 3)
    sent = [[tuple(tensor.shape) for tensor in bucket] for bucket in _ranks._buckets([four, wide, three, six])]
    assert sent == [[(4,), (3,)], [(1,)], [(2, 3)]]  # 28 bytes, 8 of another kind, and 24 more


def two_ranks():
    with ll.distributed.setup(timeout=60):
        ranks = together()

        def fail(error, rank):
            if ranks.rank == rank:
                raise error
            return ranks.rank

        assert timeout_of(ranks.group) > 60  # a rank may wait for the slowest disk
        assert ranks.on_rank0(lambda: (ranks.rank, 5)) == (0, 5)
        assert ranks.all_or_raise(lambda: fail(None, 2)) == ranks.rank
        for way, rank in ((ranks.on_rank0, 0), (ranks.all_or_raise, 0), (ranks.all_or_raise, 1)):
            with pytest.raises(ValueError, match=f"^rank {rank}: bad$") as seen:
                way(lambda rank=rank: fail(ValueError("bad"), rank))
            assert isinstance(seen.value.__cause__, ValueError) is (ranks.rank == rank)
            with pytest.raises(KeyboardInterrupt if ranks.rank == rank else RuntimeError):
                way(lambda rank=rank: fail(KeyboardInterrupt(), rank))
        values = [
            torch.tensor([ranks.rank], dtype=dtype) for dtype in (torch.uint16, torch.float8_e4m3fn, torch.int8)
        ]
        gathered = [[one.float().item() for one in sent] for sent in gather_tensors(values)]
        assert gathered == [[0.0] * 3, [1.0] * 3]
        assert gather_tensors(torch.tensor([ranks.rank + 1j]).conj())[1].item() == 1 - 1j
        assert ranks.another().gather(ranks.rank) == [0, 1]
        ranks.check_alike({"a": 1, "b": 2}, "title: ")
        with pytest.raises(ValueError, match=r"^title: b is 0 on rank 0, 1 on rank 1$"):
            ranks.check_alike({"a": 1, "b": ranks.rank}, "title: ")
        assert ranks.barrier("test", ranks.rank == 1)
        assert not ranks.barrier("test")
        state = ll.TrainState()
        meet = ll.distributed.check_replicas if ranks.rank else ll.predicates.after_seconds(60)
        with pytest.raises(RuntimeError, match=r"(?s)rank 0: .*after_seconds.*\n.*rank 1: .*check_replicas"):
            meet(state)
        ll.distributed.check_replicas(state)  # the next call of all ranks meets again


@pytest.mark.slow
def test_an_error_of_one_rank_is_raised_on_all():
    launch(2, two_ranks)
