"""WebDataset: shards in tar files, which its pipeline divides between ranks and workers and shuffles."""

import gc
import itertools
import random

import pytest
import torch
import webdataset
from plain_loader import as_rank

import looplib as ll

# webdataset 1.0 does not close the files that it has read.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def shards(tmp_path):
    for shard in range(4):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for number in range(10 * shard, 10 * shard + 10):
                writer.write({"__key__": f"{number:04d}", "n.cls": number})
    yield str(tmp_path / "{0..3}.tar")
    gc.collect()


def loader_over(shards, **options):
    stages = [
        webdataset.SimpleShardList(shards),
        webdataset.split_by_node,
        webdataset.split_by_worker,
        webdataset.shuffle(100, rng=random),  # after the splits, since each worker draws an order of its own
        webdataset.tarfile_to_samples(),
        webdataset.shuffle(8, rng=random),
        webdataset.decode(),
        webdataset.to_tuple("n.cls"),
    ]
    return ll.make_loader(webdataset.DataPipeline(*stages), batch_size=4, divide=False, seed=3, **options)


def numbers(loader, state, rank=0, ranks=1):
    with as_rank(rank, ranks), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))  # as torchrun does: workers know no process group
        patch.setenv("WORLD_SIZE", str(ranks))
        return [batch[0].tolist() for batch in loader(state)]


def at(epoch=0, batch=0):
    return ll.TrainState(epoch=epoch, batch=batch)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_two_ranks_read_each_sample_once_also_in_a_new_process(shards, options):
    ranks = [numbers(loader_over(shards, **options), at(), rank, 2) for rank in range(2)]
    assert sorted(itertools.chain(*ranks[0], *ranks[1])) == list(range(40))
    assert ranks[0] != [sorted(batch) for batch in ranks[0]]
    again = loader_over(shards, **options)  # as after a restart, in the middle of the epoch
    random.seed(17)
    torch.manual_seed(17)
    assert numbers(again, at(batch=2), 1, 2) == ranks[1][2:]
