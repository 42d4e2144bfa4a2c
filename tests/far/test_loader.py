"""Batches on their way to a device: no batch waits for the steps that the device still has to do."""

import pytest
import torch

import looplib as ll
from far import cases
from far.device import far, host_reads
from far.test_cases import bits

CPU = torch.device("cpu")


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"num_workers": 1}])
def test_a_run_over_copied_batches_has_the_bits_of_the_cpu(options):
    dataset = torch.utils.data.TensorDataset(*cases.samples())
    ends = []
    with far() as device:
        for target in (CPU, device):
            model, state = cases.started(target, make=cases.plain, epoch_length=3)
            step = ll.make_train_step(ll.make_grad_fn(model, cases.loss_fn), cases.ADAMW, donate=True)
            loader = ll.make_loader(dataset, batch_size=8, device=target, **options)
            for _ in range(2):  # the first steps of a run look at what the later ones rely on
                queued = torch.ops.far.queued_copies()
                with host_reads() as reads:
                    for batch in loader(state):
                        assert {column.device for column in batch} == {target}
                        state, _ = step(state, batch)
            assert reads == []
            assert torch.ops.far.queued_copies() - queued == (6 if target == device else 0)
            ends.append(bits(state.params))
    assert ends[0] == ends[1]


def test_an_index_is_one_of_the_accelerator():
    with far() as device:
        loader = ll.make_loader(torch.arange(4.0), batch_size=2, device=1)
        assert next(iter(loader(ll.TrainState()))).device == torch.device(device.type, 1)
