"""Batches on their way to a device: no batch waits for the steps that the device still has to do."""

import pytest
import torch

import looplib as ll
from far.device import far, host_reads


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"num_workers": 1}], ids=["plain", "pinned", "worker"])
def test_batches_are_copied_from_pinned_memory_without_waiting(monkeypatch, options):
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    copies, to = [], torch.Tensor.to

    def noting(tensor, *args, **named):
        if args[0] == torch.device("far", 0):
            copies.append((tensor.is_pinned(), named.get("non_blocking")))
        return to(tensor, *args, **named)

    with far() as device:
        loader = ll.make_loader(data, batch_size=4, order=ll.data.in_order(), device=device, **options)
        monkeypatch.setattr(torch.Tensor, "to", noting)
        with host_reads() as reads:
            batches = list(loader(ll.TrainState(epoch_length=len(loader))))
        assert reads == []
        assert copies == [(True, True)] * 4
        monkeypatch.undo()
        assert [[part.device for part in batch] for batch in batches] == [[device] * 2] * 2
        assert torch.cat([x for x, _ in batches]).tolist() == torch.arange(12.0).view(6, 2).tolist()
        assert torch.cat([y for _, y in batches]).tolist() == list(range(6))
