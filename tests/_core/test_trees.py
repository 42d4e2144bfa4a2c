"""Trees: every kind of batch is split, chosen from, mapped and compared by one rule."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import examples
from torch.utils import _pytree as pytree

from looplib._core import samples, trees
from looplib.testing._samples import take
from looplib.types import TrainState


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any
    scaled: int = 0

    def __post_init__(self):
        self.scaled += 1  # to be seen if it runs a second time


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any = None


class Tokens(UserDict):
    """As a tokenizer's BatchEncoding: a mapping with attributes of its own."""

    def __init__(self, data, language="en"):
        super().__init__(data)
        self.language = language


class Graphs:
    def __init__(self, x, y):
        self.x, self.y = x, y


pytree.register_pytree_node(Graphs, lambda g: ([g.x, g.y], None), lambda children, _: Graphs(*children))

CONTAINERS = {
    "dict": lambda x, y: {"x": x, 3: y},
    "OrderedDict": lambda x, y: OrderedDict(b=x, a=y),
    "defaultdict": lambda x, y: defaultdict(list, {"x": x, "y": y}),
    "UserDict": lambda x, y: Tokens({"x": x, "y": y}, "fr"),
    "tuple": lambda x, y: (x, y, None),
    "list": lambda x, y: [x, y, "name", 1.5],
    "namedtuple": Pair,
    "dataclass": Record,
    "frozen": Frozen,
    "registered": Graphs,
    "deque": lambda x, y: deque([x, y]),
}


def leaf_of(kind, count, draw):
    number = draw(st.integers(-9, 9))
    return {
        "tensor": lambda: torch.arange(count * 2.0).reshape(count, 2) + number,
        "labels": lambda: torch.arange(count) % 3,
        "array": lambda: np.arange(count * 3).reshape(count, 3) + number,
        "strings": lambda: [f"{number}-{i}" for i in range(count)],
        "ragged": lambda: [torch.full((i + 2,), float(number)) for i in range(count)],
        "tuple of strings": lambda: tuple(f"{number}-{i}" for i in range(count)),
        "scalar": lambda: torch.tensor(float(number)),
        "None": lambda: None,
        "word": lambda: "word",
        "number": lambda: number,
    }[kind]()


LEAVES = ["tensor", "labels", "array", "strings", "ragged", "tuple of strings", "scalar", "None", "word", "number"]
WHOLE = {"scalar", "None", "word", "number"}  # leaves without samples


@st.composite
def batches(draw, kinds=tuple(CONTAINERS)):
    """A batch of 5 to 9 samples in parts: two levels of any containers, with a tensor in each list and tuple.

    (A list without a tensor that is as long as a part reads as one item for each of its samples.)
    """
    count = draw(st.integers(5, 9))
    outer, inner = draw(st.sampled_from(kinds)), draw(st.sampled_from(kinds))
    first = "tensor" if inner in ("list", "tuple", "deque") else draw(st.sampled_from(LEAVES))
    kinds = ["tensor", first, draw(st.sampled_from(LEAVES))]
    a, b, c = (leaf_of(kind, count, draw) for kind in kinds)

    def build(select):
        """The batch with these samples of each leaf that has samples."""
        x, y, z = (leaf if kind in WHOLE else select(leaf) for kind, leaf in zip(kinds, (a, b, c), strict=True))
        return CONTAINERS[outer](x, CONTAINERS[inner](y, z))

    sizes, left = [], count
    while left:
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    return build, count, sizes


def equal(one, other):
    """Written here, of types and values, not by the functions that are tested."""
    assert type(one) is type(other), (one, other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, (dict, UserDict)):
        assert list(one) == list(other)
        for key in one:
            equal(one[key], other[key])
        equal(getattr(one, "language", None), getattr(other, "language", None))
        equal(getattr(one, "default_factory", None) is None, getattr(other, "default_factory", None) is None)
    elif isinstance(one, (list, tuple, deque)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            equal(a, b)
    elif isinstance(one, (Record, Frozen, Graphs)):
        for name in ("x", "y", *(["scaled"] if isinstance(one, Record) else [])):
            equal(getattr(one, name), getattr(other, name))
    else:
        assert one == other


@given(batches())
@settings(max_examples=examples(300), deadline=None)
def test_splitting_is_slicing_each_leaf_with_samples(case):
    build, count, sizes = case
    batch = build(lambda leaf: leaf)
    parts = samples.split(batch, count, sizes)
    assert samples.count_samples(batch) == count
    assert [samples.count_samples(part) for part in parts] == sizes
    for part, low, high in zip(parts, accumulate(sizes, initial=0), accumulate(sizes), strict=False):
        equal(part, build(lambda leaf, low=low, high=high: leaf[low:high]))


@given(batches(), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_taking_samples_is_taking_them_of_each_leaf(case, data):
    build, count, _ = case
    index = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6))
    taken = take(build(lambda leaf: leaf), count, index)
    equal(
        taken, build(lambda leaf: type(leaf)(leaf[i] for i in index) if type(leaf) in (list, tuple) else leaf[index])
    )


@given(batches())
@settings(max_examples=examples(100), deadline=None)
def test_mapping_keeps_the_containers_and_leaves_have_different_paths(case):
    batch = case[0](lambda leaf: leaf)
    equal(trees.map_leaves(lambda leaf: leaf, batch), batch)
    equal(trees.map_leaves(lambda leaf, other: other, batch, batch), batch)
    found = list(trees.leaves(batch))
    assert len({path for path, _ in found}) == len({trees.pointer(path) for path, _ in found}) == len(found)
    for path, leaf in found:  # a name is how Python reaches the leaf
        if not any(isinstance(node, Graphs) for node in nodes_on(batch, path)):
            assert eval(trees.python_path(path, "batch"), {"batch": batch}) is leaf
    for _, one, other in trees.paired(found, trees.leaves(batch)):
        assert trees.same(one, other)


def nodes_on(tree, path):
    for name in path:
        yield tree
        if isinstance(tree, Graphs):  # registered without names
            tree = [tree.x, tree.y][name]
        else:
            tree = getattr(tree, name) if isinstance(name, trees.Attribute) else tree[name]


def test_types_of_torchs_pytrees_are_walked_alike():
    """For containers that torch's pytrees know, looplib finds the same leaves in the same order."""
    tree = {"b": [torch.ones(2), (1, None)], "a": OrderedDict(z=Pair(2, "x"), y=deque([3])), "c": Graphs(4, 5)}
    ours = [leaf for _, leaf in trees.leaves(tree)]
    assert all(a is b for a, b in zip(ours, pytree.tree_leaves(tree), strict=True))


def test_a_mapping_that_cannot_be_written_becomes_a_dict():
    batch = MappingProxyType({"x": torch.arange(4)})
    first, second = samples.split(batch, 4, 2)
    assert type(first) is dict
    assert second["x"].tolist() == [2, 3]


def test_a_record_is_not_made_twice():
    """A dataclass that scales its input in __post_init__ would scale each microbatch again."""
    batch = Record(torch.ones(4), ["a", "b", "c", "d"])
    assert [part.scaled for part in samples.split(batch, 4, 2)] == [1, 1]


def test_a_state_keeps_its_counts_and_its_type():
    state = TrainState(step=3, params={"w": torch.ones(2)})
    assert {trees.python_path(path): leaf for path, leaf in trees.leaves(state)}["step"] == 3
    assert trees.map_leaves(lambda leaf: leaf, state).params["w"] is state.params["w"]


class Boxes:
    def __init__(self, tensor):
        self.tensor = tensor


class Bag:
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)


@pytest.mark.parametrize("way", [lambda batch: samples.split(batch, 4, 2), lambda batch: take(batch, 4, [0])])
def test_a_tensor_of_another_length_is_refused(way):
    with pytest.raises(ValueError, match=r"batch\['y'\]\[0\] has shape \(6, 2\), and the batch 4 samples"):
        way({"x": torch.zeros(4), "y": [torch.zeros(6, 2)]})


@pytest.mark.every_case
@pytest.mark.parametrize("hidden", [Boxes(torch.zeros(4, 2)), Bag([1, 2, 3, 4]), {1, 2, 3, 4}])
def test_an_object_that_hides_samples_is_refused(hidden):
    """Each part would have the samples of all, and train on them without a word."""
    with pytest.raises(
        ValueError, match=rf"batch\['it'\] is a {type(hidden).__name__}, an object that cannot be cut"
    ):
        samples.split({"x": torch.zeros(4), "it": hidden}, 4, 2)
    with pytest.raises(ValueError, match="cannot be cut into 4 samples"):
        take({"x": torch.zeros(4), "it": hidden}, 4, [0])


def test_trees_of_different_structures_are_not_mapped_together():
    for other, words in (({"a": 1}, "a int"), ({"a": {"y": 1}}, r"\['y'\]")):
        with pytest.raises(ValueError, match=rf"two trees differ in their structure: \['x'\] and {words}"):
            trees.map_leaves(lambda a, b: a, {"a": {"x": 1}}, other)


def test_equal_leaves():
    nan = float("nan")
    for one, other in [(nan, nan), (torch.tensor([nan, 1]), torch.tensor([nan, 1])), (np.ones(2), np.ones(2))]:
        assert trees.same(one, other)
    for one, other in [(1, 1.0), (torch.ones(2), torch.ones(2).double()), (np.ones(2), np.ones((2, 1))), ("a", "b")]:
        assert not trees.same(one, other)
