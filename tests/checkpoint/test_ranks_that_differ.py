"""Ranks that differ: a save refuses to keep only the first rank's values."""

import random
import warnings

import pytest
import torch
from ranks import launch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import looplib as ll

SGD = ll.optimizer(torch.optim.SGD, lr=0.1)


def tokens_of_ranks(folder):
    """Each rank counts the tokens of its own batches: 27 on the first, 20 on the second."""
    with ll.distributed.setup(timeout=60):
        rank = ll.distributed.rank()
        ckpt, count = ll.checkpoint_io(folder), torch.tensor([27, 20][rank])
        model = DistributedDataParallel(nn.Linear(2, 1))
        state = ll.init_state(model, SGD, extra={"tokens": torch.tensor(0)})
        for asynchronous in (False, True):
            io = ll.checkpoint_io(folder, asynchronous=asynchronous)
            with pytest.raises(
                ValueError, match=r"/extra/tokens is 27 on rank 0, 20 on rank 1\n.*reduce.*rank_zero_only"
            ):
                io.save(state.replace(extra={"tokens": state.extra["tokens"] + count}))
        large = torch.arange(9.0)
        large[8] += rank
        with pytest.raises(ValueError, match=r"/extra/x has the checksum [0-9a-f]+ on rank 0, [0-9a-f]+ on rank 1\n"):
            ckpt.save(state.replace(extra={"x": large}))
        random.seed(rank)  # hundreds of numbers that differ
        with pytest.raises(ValueError) as error:
            ckpt.save(state.replace(extra=ll.checkpoint.capture()))
        lines = str(error.value).splitlines()
        assert "0x" not in str(error.value)
        assert len(lines) < 8, lines
        assert not ckpt.steps()

        # The lines of both pages on num_input_tokens_seen
        total = ll.distributed.reduce({"tokens": ll.Mean(int(count), 1)})["tokens"].total
        state = state.replace(extra={"tokens": state.extra["tokens"] + int(total)})
        ckpt.save(state)
        state = ckpt.restore(state, quiet=True)
        assert state.extra["tokens"] == 47

        # All ranks' values, of which each reads its own
        everyone = [torch.zeros_like(count) for _ in range(2)]
        torch.distributed.all_gather(everyone, count)
        ckpt.save(state.replace(step=1, extra={"tokens": torch.stack(everyone)}))
        template = state.replace(extra={"tokens": torch.zeros(2, dtype=torch.long)})
        assert ckpt.restore(template, quiet=True).extra["tokens"][rank] == count


def test_tensors_of_extra_that_differ_between_ranks_are_refused_with_a_remedy(tmp_path):
    launch(2, tokens_of_ranks, str(tmp_path))


def params_of_ranks(folder):
    with ll.distributed.setup(timeout=60):
        rank = ll.distributed.rank()
        model = nn.Linear(2, 1)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
        state = ll.init_state(DistributedDataParallel(model), SGD)
        ckpt = ll.checkpoint_io(folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                ckpt.save(state.replace(step=step))
            with torch.no_grad():
                model.bias.fill_(rank)
            ckpt.save(state.replace(step=2))  # only the first save of a folder's object compares them
            ll.distributed.rank_zero_only(ll.checkpoint_io(folder).save)(state.replace(step=3))
            assert not caught
            for step in range(4, 6):
                ckpt = ll.checkpoint_io(folder) if step == 4 else ckpt
                ckpt.save(state.replace(step=step))
        expected = ["the ranks hold different values of bias, and the checkpoint has only the first rank's"] * (
            rank == 0
        )
        assert [str(warning.message).partition(". ")[0] for warning in caught] == expected


def test_parameters_that_differ_between_ranks_are_warned_of_at_the_first_save(tmp_path):
    launch(2, params_of_ranks, str(tmp_path))
