"""The rule by which the samples of a batch are counted, and the loader that holds it against what it drew."""

import dataclasses
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from plain_loader import as_rank, at, quiet
from shared import one_report
from torch import nn
from torch.utils.data import DataLoader, default_collate
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

import looplib as ll
from looplib.data import count_samples, make_loader

pytestmark = quiet


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any = None


class Padded:
    """As DETR's NestedTensor."""

    def __init__(self, count):
        self.tensors, self.mask = torch.zeros(count, 3, 8, 8), torch.zeros(count, 8, 8)


class Graphs:
    """As torch_geometric's Data and Batch: the length is the number of attributes."""

    def __init__(self, nodes=7):
        self.x, self.edge_index, self.num_graphs = torch.zeros(nodes, 2), torch.zeros(2, 9), 3

    def __len__(self):
        return 2


def images(*widths):
    return tuple(torch.zeros(3, 8, width) for width in widths)


def boxes(*counts):
    return tuple({"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in counts)


x, y = torch.zeros(6, 2), torch.zeros(6)
SAMPLE_DICT = {
    "image": torch.zeros(3, 8, 8),
    "size": (8, 8),
    "name": "a",
    "meta": {"id": 1, "views": [torch.zeros(4)] * 2},
}

COUNTED = {
    "tensor": (x, 6),
    "sparse tensor": (torch.zeros(6, 2).to_sparse(), 6),
    "nested tensor": (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(5)], layout=torch.jagged), 2),
    "array": (np.zeros((6, 2)), 6),
    "table": (pd.DataFrame({"a": range(6), "b": range(6)}), 6),
    "tuple": ((x, y), 6),
    "list": ([x, y, None, 0.5, "name"], 6),
    "dict": ({"x": x, "y": y}, 6),
    "dict of arrays": ({"x": np.zeros((6, 2)), "y": y}, 6),
    "scalars beside tensors": ({"x": x, "temperature": 0.5, "scale": torch.tensor(2.0), "epoch": 3, "lang": "en"}, 6),
    "OrderedDict": (OrderedDict(x=x), 6),
    "UserDict": (UserDict({"x": x}), 6),
    "BatchEncoding": (BatchEncoding({"input_ids": x, "attention_mask": x}), 6),
    "ModelOutput": (BaseModelOutput(last_hidden_state=x), 6),
    "named tuple": (Pair(x, "name"), 6),
    "dataclass": (Record(x), 6),
    "nested dicts": (({"x": x, "z": {"w": y}}, y), 6),
    "texts": (["to", "be", "or"], 3),
    "texts in a dict": ({"text": ["a", "b", "c"], "language": "en"}, 3),
    "texts and labels": ((("a", "b", "c"), torch.zeros(3)), 3),
    "captions of each image": ({"x": x, "captions": [["a", "b"]] * 6}, 6),
    "numbers": ([1, 2, 3, 4], 4),
    "detection": ((images(8, 9), boxes(0, 5)), 2),
    "detection with as many boxes as channels": ((images(8, 9), boxes(3, 3)), 2),
    "detection with boxes alone": ((images(8, 9), (torch.zeros(4, 4), torch.zeros(1, 4))), 2),
    "segmentation": ((images(8, 8, 8, 8), tuple(torch.zeros(8, 8) for _ in range(4))), 4),
    "DETR": ((Padded(2), list(boxes(0, 5))), 2),
    "graphs": ([Graphs(2), Graphs(2), Graphs(5)], 3),
    "graphs as dicts": ([{"x": torch.zeros(n, 3), "edge_index": torch.zeros(2, 9)} for n in (4, 5, 6)], 3),
    "graphs as dataclasses": ([Record(torch.zeros(n, 3), torch.zeros(2, 9)) for n in (4, 4, 4)], 3),
    "a graph batch and its labels": ((Graphs(), torch.zeros(3)), 3),
    "two views": (([x, x], y), 6),
    "two views of two": (([x[:2], x[:2]], y[:2]), 2),
    "collated": (default_collate([SAMPLE_DICT] * 5), 5),
    "collated pairs of texts": (default_collate([("a", "b")] * 5), 5),
    "collated numbers and texts": (default_collate([(1, "b", (2, "c"))] * 5), 5),
    "nothing": ({"x": x[:0], "names": []}, 0),
    "no graphs": ([], 0),
}


@one_report
@pytest.mark.parametrize("name", COUNTED)
def test_the_samples_of_real_batches_are_counted(name):
    batch, count = COUNTED[name]
    assert count_samples(batch) == count


REFUSED = {
    "one image of a detector": (images(8), "the entries|may be"),
    "a list of images": ([*images(8, 9)], None),  # taken for a record of 3: the loader notices
    "entries that disagree": (
        {"x": x, "edges": y[:2]},
        r"batch\['x'\] has 6, batch\['edges'\] has 2\. .*count_samples=",
    ),
    "classes beside samples": ({"x": x, "classes": ["a", "b"]}, r"batch\['classes'\] has 2"),
    "packed rows": ({"input_ids": torch.zeros(1, 99), "cu_seq_lens_q": torch.zeros(8)}, "has 1, .* has 8"),
    "patches": (BatchEncoding({"input_ids": x, "pixel_values": torch.zeros(400, 9)}), "has 6, .* has 400"),
    "sequences": ([torch.zeros(5), torch.zeros(7)], r"batch\[0\] has 5, batch\[1\] has 7"),
    "pairs of images": ((images(8, 8), images(9, 9)), r"batch of 2 or 3 samples: batch\[0\] has 2 or 3"),
    "images alone": ({"images": images(8, 9, 9, 9)}, "batch of 3 or 4 samples"),
    "samples as tuples": (
        [(torch.zeros(5, 2), 1), (torch.zeros(7, 2), 0), (torch.zeros(4, 2), 0)],
        "of 2 or 3 samples",
    ),
    "samples as dicts": ([{"image": image} for image in images(8, 9)], "a list may be a batch of 2 or 3 samples"),
    "inputs and targets": (({"x": x}, {"y": y}), "a tuple may be a batch of 2 or 6 samples"),
    "packed sequence": (nn.utils.rnn.pack_sequence([torch.zeros(4, 2), torch.zeros(2, 2)]), "disagree"),
    "a graph batch": (Graphs(), "cannot count the samples in a Graphs"),
    "a state's counts": ({"epoch": 3}, "cannot count the samples in a dict"),
    "a text": ("to be", "cannot count the samples in a str"),
    "a set": ({1, 2}, "cannot count the samples in a set"),
    "a number": (torch.tensor(1.0), r"tensor of shape \(\)"),
    "None": (None, "NoneType"),
}
del REFUSED["a list of images"], REFUSED["one image of a detector"]


@one_report
@pytest.mark.parametrize("name", REFUSED)
def test_what_may_be_several_numbers_is_refused_by_name(name):
    batch, words = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=words):
        count_samples(batch)


def test_a_function_that_counts_is_checked():
    model, batch = nn.Linear(2, 1), x
    with pytest.raises(TypeError, match="count_samples is an int; give a function"):
        ll.make_grad_fn(model, lambda model, x: model(x).mean(), count_samples=4)
    for wrong in (None, 2.5, -1, [1]):
        grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean(), count_samples=lambda batch, n=wrong: n)
        with pytest.raises(ValueError, match=r"count_samples returned .*; return an int"):
            grad_fn(ll.init_state(model), batch)
    answers = iter([-1, 5])  # if the function were called twice, the message would quote the second answer
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean(), count_samples=lambda batch: next(answers))
    with pytest.raises(ValueError, match="count_samples returned -1"):
        grad_fn(ll.init_state(model), batch)
    counted = ll.make_grad_fn(model, lambda model, x: model(x).mean(), count_samples=lambda batch: np.int64(3))
    assert counted(ll.init_state(model), batch).samples == 3


# The loader


def collated(function, count=8, size=4, **options):
    data = [(torch.full((3, 4, 4 + k % 2), float(k)), k) for k in range(count)]
    return make_loader(data, batch_size=size, order=ll.data.sequential(), collate_fn=function, **options)


def of_images(samples):
    return [image for image, _ in samples]


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["here", "worker"])
def test_a_loader_refuses_a_batch_that_the_rule_counts_wrongly(options):
    with pytest.raises(ValueError, match=r"drew 4 samples .* has 3 by .*batch\[0\] has 3.*count_samples=len"):
        next(collated(of_images, **options)(at()))
    batch = next(collated(of_images, count_samples=len, **options)(at()))
    assert len(batch) == 4


def test_a_loader_refuses_what_a_collate_fn_leaves_out_unless_it_is_meant():
    def all_but_one(samples):
        return default_collate([(image[..., :4], label) for image, label in samples if label != 2])

    with pytest.raises(ValueError, match=r"drew 4 samples .* has 3 .*count_samples=ll\.data\.count_samples"):
        next(collated(all_but_one)(at()))
    sizes = [len(labels) for _, labels in collated(all_but_one, count_samples=count_samples)(at())]
    assert sizes == [3, 4]


def test_the_settings_of_a_dataloader_are_held_against_the_rule_too():
    plain = DataLoader([(image, 0) for image in images(8, 8, 8, 8)], batch_size=4, collate_fn=of_images)
    with pytest.raises(ValueError, match="drew 4 samples"):
        next(make_loader(plain)(at()))
    assert len(next(make_loader(plain, count_samples=len)(at()))) == 4


def test_streams_are_held_against_the_rule_too():
    with pytest.raises(ValueError, match="drew 4 samples"):
        next(
            make_loader(dict.fromkeys(range(6)).keys(), batch_size=4, collate_fn=lambda items: torch.zeros(1, 9))(
                at()
            )
        )


def test_a_batch_that_the_rule_cannot_count_passes_a_loader():
    """A loop of the user's own may need no count; a step refuses it."""
    loader = make_loader(range(4), batch_size=2, collate_fn=lambda items: Graphs())
    batch = next(loader(at()))
    model = nn.Linear(2, 1)
    loss_fn = lambda model, batch: model(batch.x).mean()  # noqa: E731
    state = ll.init_state(model)
    with pytest.raises(TypeError, match=r"cannot count the samples in a Graphs.*count_samples="):
        ll.make_grad_fn(model, loss_fn)(state, batch)
    assert ll.make_grad_fn(model, loss_fn, count_samples=lambda batch: batch.num_graphs)(state, batch).samples == 3


def test_microbatches_are_counted_one_by_one():
    texts = [torch.ones(n) for n in (1, 7, 2, 8)]
    pad = lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True)  # noqa: E731
    pack = lambda samples: torch.cat(samples).unsqueeze(0)  # noqa: E731
    padded = ll.data.collate_microbatches(pad, 2)
    assert [len(rows) for rows in next(make_loader(texts, batch_size=4, collate_fn=padded)(at()))] == [2, 2]
    packed = ll.data.collate_microbatches(pack, tokens=9, packed=True)
    with pytest.raises(ValueError, match=r"drew 4 samples .* has 3 by"):
        next(make_loader(texts, batch_size=4, collate_fn=packed)(at()))
    counted = make_loader(texts, batch_size=4, collate_fn=packed, count_samples=lambda row: int(row.sum()))
    assert len(next(counted(at()))) == 3


def test_ranks_divide_items_that_are_batches_as_they_are_counted():
    data = [[torch.zeros(3, 8, 8 + k) for k in range(4)]]  # a list of images
    options = {"batch_size": None, "order": ll.data.sequential()}
    for rank in range(2):
        with as_rank(rank, 2):
            (part,) = make_loader(data, count_samples=len, **options)(at())
            assert [image.shape[2] for image in part] == [[8, 9], [10, 11]][rank]


def test_a_run_with_other_samples_than_were_drawn_is_not_continued_at_a_guess():
    """With 7 of 8 samples in the last batch, 4 batches would be taken for 28 samples, where a batch of 4 begins."""
    eight, four = (make_loader(range(64), batch_size=size, order=ll.data.sequential()) for size in (8, 4))
    state = ll.init_state(torch.nn.Linear(1, 1), loader=eight).replace(epoch=1)
    state = state.replace(batch=4, step=12, samples=95, batch_samples=7)
    with pytest.raises(ValueError, match=r"7 samples.*batches of 8"):
        four.resume(state)
    assert four.resume(state.replace(batch_samples=8)).batch == 8
