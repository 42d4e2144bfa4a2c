"""The files of a checkpoint: everything comes back as it was, and nothing else ever does."""

import builtins
import itertools
import json
import math
import operator
import os
import pickle
import warnings

import pytest
import safetensors
import safetensors.torch
import torch
from files import DATA, MANIFEST, forged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import looplib as ll
from looplib.checkpoint import _format_write
from looplib.checkpoint._format import leaves_of
from looplib.checkpoint._format_read import Reader, read_manifest
from looplib.checkpoint._format_write import Parts, write

DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    - {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)
numbers = itertools.count()
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stored(tree, folder):
    folder.mkdir(parents=True)
    write(folder, Parts(tree), {})
    return Reader(folder, read_manifest(folder))


def raw(tensor):
    """Its bytes in order, whatever its dtype can do."""
    memory = bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).tolist())
    size, first, stride = tensor.element_size(), tensor.storage_offset(), tensor.stride()
    places = [first + sum(map(operator.mul, i, stride)) for i in itertools.product(*map(range, tensor.shape))]
    return [memory[at * size : (at + 1) * size] for at in places]


def same(one, other):
    about = [(t.dtype, t.shape, t.stride() if t.numel() else ()) for t in (one, other)]
    return about[0] == about[1] and raw(one) == raw(other)


def random_bytes(count):
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that complex32 is experimental
        tree = {
            "vector": random_bytes(24 * dtype.itemsize).view(dtype),
            "matrix": random_bytes(24 * dtype.itemsize).view(dtype).view(2, 3, 4),
            "turned": random_bytes(24 * dtype.itemsize).view(dtype).view(4, 6).as_strided((6, 4), (1, 6)),
            "scalar": random_bytes(dtype.itemsize).view(dtype).view(()),
            "empty": random_bytes(0).view(dtype).view(0, 3),
        }
        reader = stored(tree, tmp_path / "c")
        for name, tensor in tree.items():
            for found in (reader.tensor("/" + name), reader.tensor("/" + name, {})):
                assert same(found, tensor), name


def test_a_file_written_in_any_pieces_is_the_same(tmp_path, monkeypatch):
    """A system call may write a part of what it is given."""
    tree = [torch.randn(n) for n in (0, 1, 7, 300, 0, 2, 1000)]
    stored(tree, tmp_path / "whole")
    writev = os.writev
    monkeypatch.setattr(_format_write, "_CHUNK", 100)
    monkeypatch.setattr(_format_write, "_MOST", 3)
    monkeypatch.setattr(os, "writev", lambda file, views: writev(file, [b"".join(views)[:70]]))
    reader = stored(tree, tmp_path / "pieces")
    assert (tmp_path / "pieces" / DATA).read_bytes() == (tmp_path / "whole" / DATA).read_bytes()
    assert all(same(reader.tensor(f"/{number}"), tensor) for number, tensor in enumerate(tree))


def test_what_cannot_be_kept_is_refused_with_its_place():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that these are deprecated
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    for leaf, words in [
        (quantized, "quantized tensor"),
        (torch.ones(2, 2).to_sparse(), r"layout torch\.sparse_coo"),
        (torch.ones(2, device="meta"), "meta device, without values"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
        ({1, 2}, "set"),
        (torch.float32, "dtype"),
    ]:
        with pytest.raises(TypeError, match=rf"/extra/0/it is a .*{words}.*cannot hold"):
            Parts({"extra": [{"it": leaf}]})


def test_two_leaves_at_one_place_are_refused():
    with pytest.raises(ValueError, match="two leaves of the state are both at /extra/1"):
        Parts({"extra": {1: 0, "1": 1}})


plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers()
)


@few
@given(st.recursive(plain_values, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_plain_values_come_back_exactly(tmp_path, tree):
    reader = stored({"t": tree}, tmp_path / str(next(numbers)))
    leaves = leaves_of({"t": tree})
    assert reader.values.keys() == leaves.keys()
    for place, value in leaves.items():
        # repr tells -0.0 from 0.0, True from 1 and finds nan equal to nan
        assert repr(reader.values[place]) == repr(value)


@st.composite
def views(draw):
    """Tensors of various dtypes over two storages, any way that as_strided can make them."""
    storages = [random_bytes(96), random_bytes(96)]
    tree = {}
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int8, torch.bfloat16, torch.complex64]))
        own = storages[draw(st.integers(0, 1))].view(dtype)
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        stride = [draw(st.integers(0, 3)) for _ in shape]
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if math.prod(shape) else 1
        if reach <= len(own):
            tree[f"t{number}"] = own.as_strided(shape, stride, draw(st.integers(0, len(own) - reach)))
    return tree


@settings(few, max_examples=100)
@given(views(), st.booleans())
def test_views_come_back_as_views(tmp_path, tree, copied):
    folder = tmp_path / str(next(numbers))
    folder.mkdir()
    parts = Parts(tree)
    before = {name: raw(tensor) for name, tensor in tree.items()}
    if copied:
        parts.copy()
        for tensor in tree.values():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).random_()
    write(folder, parts, {})
    reader, copies = Reader(folder, read_manifest(folder)), {}
    restored = {name: reader.tensor("/" + name, copies) for name in tree}
    for name, tensor in tree.items():
        assert raw(restored[name]) == before[name]
        assert (restored[name].dtype, restored[name].shape) == (tensor.dtype, tensor.shape)
        if tensor.numel() > 1 and not tensor.is_contiguous():
            assert restored[name].stride() == tensor.stride()
    # What overlapped overlaps still: a byte written through one is seen in the others.
    for name, tensor in tree.items():
        if tensor.numel():
            for one, other in ((tensor, tree), (restored[name], restored)):
                seen = torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
                seen[one.storage_offset() * one.element_size()] ^= 255
                after = {key: raw(value) for key, value in other.items()}
                if one is tensor and not copied:
                    expected = {key: value != before[key] for key, value in after.items()}
                elif one is not tensor and not copied:
                    assert {key: value != before[key] for key, value in after.items()} == expected
                seen[one.storage_offset() * one.element_size()] ^= 255


def test_two_alike_that_overlap_in_part_are_kept_apart(tmp_path):
    base = torch.arange(6.0)
    reader, copies = stored({"a": base[:4], "b": base[2:]}, tmp_path / "c"), {}
    assert reader.tensor("/a", copies).tolist() == [0, 1, 2, 3]
    assert reader.tensor("/b", copies).tolist() == [2, 3, 4, 5]
    assert reader.tensor("/b", copies).data_ptr() == reader.tensor("/a", copies).data_ptr() + 8


def test_conjugate_and_negative_views_are_stored_as_what_they_stand_for(tmp_path):
    z = torch.randn(3, dtype=torch.complex64)
    tree = {"conj": z.conj(), "neg": z.conj().imag}
    assert tree["conj"].is_conj()
    assert tree["neg"].is_neg()
    reader = stored(tree, tmp_path / "c")
    for name, tensor in tree.items():
        assert torch.equal(reader.tensor("/" + name), tensor)


def test_what_is_shared_is_stored_once(tmp_path):
    weight = torch.randn(1000)
    tree = {"a": weight, "b": weight, "c": weight[10:20], "d": torch.zeros(1).expand(10**9)}
    reader = stored(tree, tmp_path / "c")
    assert (tmp_path / "c" / DATA).stat().st_size < 5000
    copies = {}
    a, b, c, d = (reader.tensor(f"/{name}", copies) for name in "abcd")
    assert a.data_ptr() == b.data_ptr() == c.data_ptr() - 40
    assert d.shape == (10**9,)
    # Parts of one storage that do not overlap are stored as what they are, without what lies between.
    both = torch.randn(10**6)
    stored({"first": both[:10], "last": both[-10:]}, tmp_path / "d")
    assert (tmp_path / "d" / DATA).stat().st_size < 1000


def test_safetensors_reads_it(tmp_path):
    tree = {
        "params": {f"w/{d}~".replace("torch.", ""): torch.ones(3, 5).to(getattr(torch, d)) for d in
                   ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "float8_e4m3fn")},
        "empty": torch.zeros(0, 4), "scalar": torch.tensor(7), "complex": torch.ones(2, dtype=torch.complex64),
    }  # fmt: skip
    reader = stored(tree, tmp_path / "c")
    found = safetensors.torch.load_file(tmp_path / "c" / DATA)
    leaves = leaves_of(tree)
    assert leaves.keys() <= found.keys()
    assert all(name.startswith("padding/") for name in found.keys() - leaves.keys())
    for place, tensor in leaves.items():
        if tensor.dtype != torch.complex64:
            assert same(found[place], tensor)
            assert same(found[place], reader.tensor(place))
    with safetensors.safe_open(tmp_path / "c" / DATA, "pt") as file:
        assert file.get_slice("/params/w~1float32~0").get_shape() == [3, 5]


def test_the_documented_lines_read_everything(tmp_path):
    """As a stranger would, from the docstring of checkpoint_io alone."""
    tree = {"plain": torch.randn(3), "turned": torch.randn(2, 3).T, "odd": torch.ones(2, dtype=torch.complex64)}
    stored(tree, tmp_path / "c")
    raw_tensors = safetensors.torch.load_file(tmp_path / "c" / "tensors.safetensors")
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())["manifest"]
    for name, tensor in tree.items():
        entry = manifest["tensors"]["/" + name]
        found = raw_tensors[entry["data"]]
        if str(found.dtype) != "torch." + entry["dtype"] or "stride" in entry:
            found = found[entry.get("offset", 0) :].view(getattr(torch, entry["dtype"]))
            found = found.as_strided(entry["shape"], entry.get("stride", [1]))
        assert same(found, tensor)


# Damage and malice


def whole(folder):
    """A checkpoint's files, and what reading all of it gives."""
    shared = torch.arange(6.0)
    tree = {
        "w": torch.arange(12.0).view(3, 4), "half": torch.arange(5).bfloat16(), "turned": torch.randn(2, 3).T,
        "a": shared, "b": shared[2:], "step": 3, "name": "run", "ratio": 0.25, "none": None, "empty": torch.zeros(0),
    }  # fmt: skip
    stored(tree, folder)
    return everything(folder)


def everything(folder):
    reader = Reader(folder, read_manifest(folder))
    reader.verify(reader.tensors)
    return {**reader.values, **{place: raw(reader.tensor(place, {})) for place in reader.tensors}}


def found_in(path, error):
    assert str(path) in str(error)


def test_any_flipped_bit_of_the_manifest_is_found(tmp_path):
    expected = whole(tmp_path / "c")
    path = tmp_path / "c" / MANIFEST
    good = path.read_bytes()
    outcomes = set()
    for at in range(len(good)):
        for bit in (0, 3, 7):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            try:
                assert everything(tmp_path / "c") == expected
                outcomes.add(("harmless", len(good) - at))
            except ll.checkpoint.DamagedCheckpointError as error:
                found_in(path, error)
                outcomes.add("found")
    assert "found" in outcomes
    assert {o for o in outcomes if o != "found"} <= {("harmless", 1)}  # the line's end


def test_any_cut_of_either_file_is_found(tmp_path):
    whole(tmp_path / "c")
    for name in (MANIFEST, DATA):
        path = tmp_path / "c" / name
        good = path.read_bytes()
        for at in [*range(0, len(good) - 1, 7), len(good) - 2]:
            for changed in (good[:at], good[:at] + good[at + 1 :], good + good[at:]):
                path.write_bytes(changed)
                with pytest.raises(ll.checkpoint.DamagedCheckpointError, match=name):
                    everything(tmp_path / "c")
        path.unlink()
        with pytest.raises(ll.checkpoint.DamagedCheckpointError, match=f"{name} is missing"):
            everything(tmp_path / "c")
        path.mkdir()
        with pytest.raises(ll.checkpoint.DamagedCheckpointError, match=name):
            everything(tmp_path / "c")
        path.rmdir()
        path.write_bytes(good)


def test_a_flipped_bit_of_the_data_is_found_or_harmless(tmp_path):
    expected = whole(tmp_path / "c")
    manifest = read_manifest(tmp_path / "c")
    used = [range(run["begin"], run["begin"] + run["bytes"]) for run in manifest["data"].values()]
    path = tmp_path / "c" / DATA
    good = path.read_bytes()
    found = set()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        try:
            assert everything(tmp_path / "c") == expected
        except ll.checkpoint.DamagedCheckpointError as error:
            found_in(path, error)
            found.add(at)
    assert found == {at for run in used for at in run}


class Bomb:
    def __reduce__(self):
        return exec, ("import builtins; builtins.exploded = True",)


@pytest.mark.parametrize("name", [MANIFEST, DATA])
@pytest.mark.parametrize("same_size", [True, False])
@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_a_hostile_pickle_does_not_run(tmp_path, name, same_size, kind):
    whole(tmp_path / "c")
    path = tmp_path / "c" / name
    size = path.stat().st_size
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save(Bomb(), path)
    if same_size:
        path.write_bytes(path.read_bytes()[:size].ljust(size, b"\0"))
    with pytest.raises(ll.checkpoint.DamagedCheckpointError, match=name):
        everything(tmp_path / "c")
    assert not hasattr(builtins, "exploded")
    pickle.loads(pickle.dumps(Bomb()))
    assert builtins.exploded  # so it was one
    del builtins.exploded


def test_a_manifest_from_the_future_is_told_apart(tmp_path):
    whole(tmp_path / "c")
    forged(tmp_path / "c", lambda manifest: {"format": 99, "bytes": 0, "runes": [1]})
    with pytest.raises(
        ll.checkpoint.CheckpointVersionError, match=r"is of format 99, and this looplib reads up to 3: install"
    ):
        everything(tmp_path / "c")


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "float32", "float64", "qint8", "nn", "w", "int", "__dict__", "/w", "/a"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["value", "int", "x"]), inner),
    max_leaves=6,
)


@settings(few, max_examples=200)
@given(data=st.data())
def test_a_forged_manifest_gives_damage_and_no_crash(tmp_path, data):
    folder = tmp_path / "c"
    if not folder.exists():
        tmp_path.joinpath("good").mkdir(exist_ok=True)
        whole(folder)
        (tmp_path / "good" / MANIFEST).write_bytes((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes((tmp_path / "good" / MANIFEST).read_bytes())
    size = (folder / DATA).stat().st_size

    def change(node):
        """Put junk at one place of the manifest, at whatever depth."""
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], (dict, list)) and node[key] and data.draw(st.integers(0, 4)):
            change(node[key])
        else:
            node[key] = data.draw(junk)

    forged(folder, change)
    try:
        reader = Reader(folder, read_manifest(folder))
        reader.verify(reader.tensors)
        for place in reader.tensors:
            for copies in (None, {}):
                tensor = reader.tensor(place, copies)
                assert tensor.untyped_storage().nbytes() <= size
    except (ll.checkpoint.DamagedCheckpointError, ll.checkpoint.CheckpointVersionError):
        pass


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        ("/w", {"shape": [2**40, 4]}),
        ("/w", {"shape": [-3, -4]}),
        ("/w", {"shape": [3, 5]}),
        ("/w", {"shape": [3.0, 4.0]}),
        ("/w", {"shape": [2**62, 2**62]}),
        ("/w", {"shape": [2**62, 2**62], "stride": [0, 0]}),
        ("/w", {"dtype": "float128"}),
        ("/w", {"dtype": "load"}),
        ("/w", {"dtype": "qint8"}),
        ("/w", {"dtype": "float64"}),
        ("/w", {"data": "/nothing"}),
        ("/turned", {"stride": [-1, 3]}),
        ("/turned", {"stride": [1, 300]}),
        ("/turned", {"stride": [1]}),
        ("/turned", {"stride": None}),
        ("/turned", {"stride": {}}),
        ("/turned", {"offset": -4}),
        ("/turned", {"offset": 3}),
        ("/turned", {"offset": 4}),
    ],
)
def test_a_forged_entry_is_named(tmp_path, place, changes):
    whole(tmp_path / "c")
    forged(tmp_path / "c", lambda manifest: manifest["tensors"][place].update(changes))
    with pytest.raises(ll.checkpoint.DamagedCheckpointError, match=MANIFEST):
        everything(tmp_path / "c")


@pytest.mark.parametrize(
    "changes", [{"begin": -64}, {"begin": 2**40}, {"bytes": -1}, {"bytes": 2**40}, {"begin": "0"}]
)
def test_a_forged_run_of_bytes_is_named(tmp_path, changes):
    whole(tmp_path / "c")
    forged(tmp_path / "c", lambda manifest: manifest["data"]["/w"].update(changes))
    with pytest.raises(ll.checkpoint.DamagedCheckpointError, match=MANIFEST):
        everything(tmp_path / "c")
