"""A shuffled stream that is resumed on real ranks and workers, and what each process reads of it."""

import json
import os
from itertools import count
from pathlib import Path

import pytest
from ranks import launch

import looplib as ll

BUFFER, SIZE, START = 1000, 60, 1_000_000  # the batch at START begins in one block and ends in the next


class Source:
    """Endless numbers. Each process adds a byte to a file of its own for each sample that it reads."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, start):
        with (self.folder / f"reads-{os.getpid()}").open("ab", buffering=0) as file:
            for number in count(start):
                file.write(b".")
                yield number


def loader_of(folder, **options):
    stream = ll.data.shuffled_stream(Source(folder), buffer=BUFFER)
    return ll.make_loader(stream, batch_size=SIZE, seed=7, **options)


def read_three(folder, workers):
    with ll.distributed.setup(timeout=60):
        options = {"prefetch_factor": 1} if workers else {}
        batches = loader_of(folder, num_workers=workers, **options)(ll.TrainState(batch=START // SIZE))
        parts = [next(batches).tolist() for _ in range(3)]
        (folder / f"parts-{ll.distributed.rank()}").write_text(json.dumps(parts))
        batches.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 0])
def test_a_run_that_stopped_at_sample_1_000_000_reads_at_most_two_buffers_on_each_rank(tmp_path: Path, workers):
    order = ll.data.shuffled_blocks(BUFFER)
    indexed = ll.make_loader(range(START + 2 * BUFFER), batch_size=SIZE, seed=7, order=order)
    batches = indexed(ll.TrainState(batch=START // SIZE))
    expected = [next(batches).tolist() for _ in range(3)]
    assert len(set(sum(expected, []))) == 3 * SIZE  # noqa: RUF017 - none twice
    for ranks in (1, 2, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        launch(ranks, read_three, folder, workers)
        parts = [json.loads((folder / f"parts-{rank}").read_text()) for rank in range(ranks)]
        assert [sum(batch, []) for batch in zip(*parts, strict=True)] == expected  # noqa: RUF017
        reads = [path.stat().st_size for path in folder.glob("reads-*")]
        assert len(reads) == ranks * (workers or 1)
        assert max(reads) <= 2 * BUFFER
