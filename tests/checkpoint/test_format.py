"""The files of a checkpoint: everything comes back as it was, and nothing else ever does."""

import builtins
import contextlib
import functools
import itertools
import json
import math
import operator
import os
import pickle
import re
import time
import tracemalloc
import warnings
import zlib

import pytest
import safetensors
import safetensors.torch
import torch
from files import DATA, MANIFEST, forged, forged_header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import looplib as ll

DAMAGED = ll.checkpoint.DamagedCheckpointError
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    - {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)
pytree = torch.utils._pytree
numbers = itertools.count()
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def save(folder, tree):
    return ll.checkpoint_io(folder).save(ll.TrainState(extra=tree))


def restore(folder, like):
    return ll.checkpoint_io(folder).restore(ll.TrainState(extra=like), quiet=True).extra


def raw(tensor):
    """Its bytes in order, whatever its dtype can do."""
    memory = bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).tolist())
    size, first, stride = tensor.element_size(), tensor.storage_offset(), tensor.stride()
    places = [first + sum(map(operator.mul, i, stride)) for i in itertools.product(*map(range, tensor.shape))]
    return [memory[at * size : (at + 1) * size] for at in places]


def random_bytes(count):
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_to_the_bit_and_in_the_layout_of_the_state(tmp_path, dtype):
    def tree():
        data = [random_bytes(24 * dtype.itemsize).view(dtype) for _ in range(3)]
        turned = data[2].view(4, 6).as_strided((6, 4), (1, 6))
        single = random_bytes(dtype.itemsize).view(dtype)
        empty = random_bytes(0).view(dtype).view(0, 3)
        return {
            "vector": data[0],
            "cube": data[1].view(2, 3, 4),
            "turned": turned,
            "scalar": single.view(()),
            "no": empty,
        }

    saved, like = tree(), tree()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that complex32 is experimental
        save(tmp_path, saved)
        for given_state in (like, dict.fromkeys(like)):  # into tensors, and in place of None
            for name, found in restore(tmp_path, given_state).items():
                assert (found.dtype, found.shape, raw(found)) == (dtype, saved[name].shape, raw(saved[name])), name
                if given_state is like and found.numel():
                    assert found.stride() == like[name].stride()


def test_what_cannot_be_kept_is_refused_with_its_path(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that these are deprecated
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    for leaf, words in [
        (quantized, "qint8"),
        (torch.ones(2, 2).to_sparse(), r"torch\.sparse_coo"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
        ({1, 2}, "set"),
        (torch.float32, "dtype"),
    ]:
        with pytest.raises(TypeError, match=rf"/extra/0/it is a .*{words}"):
            save(tmp_path, [{"it": leaf}])
    with pytest.raises(ValueError, match="/extra/1"):
        save(tmp_path, {1: 0, "1": 1})


plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers()
)


@few
@given(st.recursive(plain_values, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_plain_values_come_back_exactly(tmp_path, tree):
    folder = tmp_path / str(next(numbers))
    save(folder, [tree])
    # repr tells -0.0 from 0.0, True from 1 and finds nan equal to nan
    assert repr(restore(folder, pytree.tree_map(lambda leaf: None, [tree]))) == repr([tree])


@st.composite
def views(draw):
    """Tensors over two storages of one dtype each, any way that as_strided can make them, and some of them twice."""
    dtypes = [draw(st.sampled_from([torch.float32, torch.float64, torch.int8, torch.complex64])) for _ in range(2)]
    storages = [random_bytes(96).view(dtype) for dtype in dtypes]
    tree = {}
    for number in range(draw(st.integers(1, 4))):
        own = storages[draw(st.integers(0, 1))]
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        stride = [draw(st.integers(0, 3)) for _ in shape]
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if math.prod(shape) else 1
        if reach <= len(own):
            tree[f"t{number}"] = own.as_strided(shape, stride, draw(st.integers(0, len(own) - reach)))
            if draw(st.booleans()):
                tree[f"tied{number}"] = tree[f"t{number}"]
    return tree


def addresses(tensor):
    """Of its elements, in order."""
    steps = [stride * tensor.element_size() for stride in tensor.stride()]
    indices = itertools.product(*map(range, tensor.shape))
    return [tensor.data_ptr() + sum(map(operator.mul, index, steps)) for index in indices]


@settings(few, max_examples=50)
@given(views(), st.booleans())
def test_ties_come_back_as_ties_and_other_overlaps_are_refused_by_name(tmp_path, tree, asynchronous):
    layouts = {name: (t.shape, t.stride() if t.numel() > 1 else (), addresses(t)) for name, t in tree.items()}
    pairs = [pair for pair in itertools.combinations(tree, 2) if {*layouts[pair[0]][2]} & {*layouts[pair[1]][2]}]
    before = {name: raw(tensor) for name, tensor in tree.items()}
    folder = tmp_path / str(next(numbers))
    ckpt, state = ll.checkpoint_io(folder, asynchronous=asynchronous), ll.TrainState(extra=tree)
    overlapping = [{*pair} for pair in pairs if tree[pair[0]].stride() != tree[pair[1]].stride()
                   or layouts[pair[0]] != layouts[pair[1]]]  # fmt: skip
    if overlapping:
        with pytest.raises(ValueError, match="share memory") as error:
            ckpt.save(state)
        assert {*re.findall(r"/extra/(\w+)", str(error.value))} in overlapping
        return
    ckpt.save(state)
    ckpt.wait()
    restored = restore(folder, tree)
    assert {name: raw(tensor) for name, tensor in restored.items()} == before
    for one, other in itertools.combinations([name for name in tree if tree[name].numel()], 2):
        tied = restored[one].data_ptr() == restored[other].data_ptr()
        assert tied == ((one, other) in pairs)


def test_what_is_tied_is_stored_once_and_parts_of_a_buffer_without_the_rest(tmp_path):
    weight, buffer = torch.randn(1000), torch.randn(10**6)
    path = save(tmp_path, {"a": weight, "b": weight, "first": buffer[:10], "last": buffer[-10:]})
    assert (path / DATA).stat().st_size < 5000


def test_conjugate_and_negative_views_are_stored_as_what_they_stand_for(tmp_path):
    for name, view in (("conj", torch.Tensor.conj), ("neg", lambda z: z.conj().imag)):
        tensor = view(torch.randn(3, dtype=torch.complex64))
        assert tensor.is_conj() or tensor.is_neg()
        save(tmp_path / name, tensor)
        assert torch.equal(restore(tmp_path / name, torch.zeros_like(tensor)), tensor)


def test_safetensors_reads_it_as_documented(tmp_path):
    """As a stranger would, from the docstring of checkpoint_io alone."""
    names = ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "float8_e4m3fn", "complex64")
    params = {f"w/{name}~": torch.ones(3, 5).to(getattr(torch, name)).t() for name in names}
    params |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(7)}
    path = ll.checkpoint_io(tmp_path).save(ll.TrainState(params={**params, "tied": params["scalar"]}))
    found = safetensors.torch.load_file(path / "tensors.safetensors")
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    assert manifest["ties"] == {"/params/tied": "/params/scalar"}
    for name, tensor in params.items():
        key = "/params/" + name.replace("~", "~0").replace("/", "~1")
        about = manifest["tensors"].pop(key)
        value = found.pop(key)
        if str(tensor.dtype) == "torch.complex64":
            value = value.view(getattr(torch, about["dtype"])).view(about["shape"])
        assert value.dtype == tensor.dtype
        assert raw(value) == raw(tensor)
    assert not found
    assert not manifest["tensors"]


# Damage and malice


def tree_of_all():
    shared = torch.arange(6.0)
    return {
        "w": torch.arange(12.0).view(3, 4), "half": torch.arange(5).bfloat16(), "a": shared, "b": shared,
        "step": 3, "name": "run", "ratio": 0.25, "none": None, "empty": torch.zeros(0), "turned": torch.ones(2, 3).T,
    }  # fmt: skip


def read(folder):
    """All that a checkpoint holds, as text."""
    like = pytree.tree_map(
        lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree_of_all()
    )
    found = ll.checkpoint_io(folder).restore(ll.TrainState(extra=like), 0, quiet=True).extra
    return {name: raw(leaf) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in found.items()}


def refused(folder, *names):
    """A restore names the file, soon and in little memory."""
    tracemalloc.start()
    begin = time.thread_time()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with pytest.raises(DAMAGED, match="step-00000000") as error:
            read(folder)
    took, (_, peak) = time.thread_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    messages = "".join(str(message) for message in [error.value, *(warning.message for warning in shown)])
    assert not names or any(f"step-00000000/{name}" in messages for name in names), messages
    assert took < 10  # a second on a machine that does nothing else
    assert peak < 100e6


def test_any_flipped_bit_and_any_cut_is_found_or_harmless(tmp_path):
    for name in (MANIFEST, DATA):
        folder = tmp_path / name
        path = save(folder, tree_of_all()) / name
        expected, good, harmless = read(folder), path.read_bytes(), []
        for at in [*range(0, len(good), 5), len(good) - 1]:
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
            with warnings.catch_warnings(), contextlib.suppress(DAMAGED):
                warnings.simplefilter("ignore")
                assert read(folder) == expected
                harmless.append(at)
        assert {*harmless} <= ({len(good) - 1} if name == MANIFEST else set())  # the line's end
        for at in [*range(0, len(good) - 1, 397), len(good) - 2]:
            for changed in (good[:at], good[:at] + good[at + 1 :], good + good[at:]):
                path.write_bytes(changed)
                refused(folder, name)


class Bomb:
    def __reduce__(self):
        return exec, ("import builtins; builtins.exploded = True",)


@pytest.mark.parametrize("name", [MANIFEST, DATA])
@pytest.mark.parametrize("kind", ["pickle", "torch.save", "pipe", "/dev/zero", "folder", "sparse", "empty"])
def test_a_file_that_is_another_is_refused_and_nothing_in_it_runs(tmp_path, name, kind):
    path = save(tmp_path, tree_of_all()) / name
    size = path.stat().st_size
    path.unlink()
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb()).ljust(size, b"\0"))
    elif kind == "torch.save":
        torch.save(Bomb(), path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("sparse", "empty"):
        path.touch()
        os.truncate(path, 2**40 if kind == "sparse" else 0)
    else:
        path.symlink_to(kind)
    if name == DATA and kind != "folder":  # the manifest says what stat says
        forged(path.parent, lambda manifest: manifest["files"][DATA].update(bytes=path.stat().st_size))
    refused(tmp_path, name, MANIFEST)
    assert not hasattr(builtins, "exploded")
    pickle.loads(pickle.dumps(Bomb()))
    assert builtins.exploded  # so it was one
    del builtins.exploded


def test_links_to_files_are_followed(tmp_path):
    """As a snapshot of huggingface_hub has them."""
    path = save(tmp_path, tree_of_all())
    expected = read(tmp_path)
    for name in (MANIFEST, DATA):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
    assert read(tmp_path) == expected


@pytest.mark.parametrize(("version", "words"), [(99, "install a newer looplib"), (3, "that wrote it")])
def test_another_format_is_told_apart(tmp_path, version, words):
    path = save(tmp_path, tree_of_all())
    forged(path, lambda manifest: {"format": version, "bytes": 0, "runes": [1]})
    with pytest.raises(ll.checkpoint.CheckpointVersionError, match=rf"manifest.json is of format {version}.*{words}"):
        read(tmp_path)


HUGE = [2**47] * 300_000  # the product of these takes long
COUNTS = ("step", "epoch", "batch", "samples", "batch_samples", "batch_steps", "epoch_length")
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "float32", "float64", "qint8", "nn", "int", "__dict__", "/extra/w", "/extra/a", DATA]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["value", "int"]), inner),
    max_leaves=6,
)


@settings(few, max_examples=100)
@given(data=st.data())
def test_a_forged_checkpoint_gives_damage_or_what_it_says_and_never_a_crash(tmp_path, data):
    """Junk at one place of the manifest, at whatever depth."""
    folder, kept = tmp_path / "good", tmp_path / "kept"
    path = folder / "step-00000000"
    if not folder.exists():
        save(folder, tree_of_all())
        kept.write_bytes((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_bytes(kept.read_bytes())
    legal = {byte for tensor in tree_of_all().values() if isinstance(tensor, torch.Tensor) for byte in raw(tensor)}

    def change(node):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], (dict, list)) and node[key] and data.draw(st.integers(0, 4)):
            change(node[key])
        else:
            node[key] = data.draw(junk)

    forged(path, change)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = read(folder)
        except ValueError:  # damage, another version, or a state that it does not fit
            return
    assert all({*value} <= legal for value in found.values() if isinstance(value, list))  # bytes of the file


def of(*keys, **changes):
    """Change an entry of the manifest, such as of("files", DATA, bytes=3)."""
    return lambda manifest: functools.reduce(operator.getitem, keys, manifest).update(changes)


def test_a_forged_manifest_is_damage_and_costs_neither_time_nor_memory(tmp_path):
    path = save(tmp_path, tree_of_all())
    good = (path / MANIFEST).read_bytes()
    shapes = (["x", 5 * 10**9], HUGE, [2**62] * 10**5, [3.0, 4.0], 3, None, [2, 4])
    for change in (
        *(of("tensors", "/extra/w", shape=shape) for shape in shapes),
        *(of("tensors", "/extra/w", dtype=dtype) for dtype in ("float128", "load", "qint8", "int16", 3)),
        *(of("tensors", **{"/extra/w": entry}) for entry in (3, {})),
        *(of("files", DATA, bytes=size) for size in (-1, 2**40, "x")),
        *(of("files", DATA, crc32=checksum) for checksum in (0, "x", None)),
        of("files", **{"../../secret": {"bytes": 7, "crc32": 0}}),
        of(files={}),
        of("ties", **{"/extra/w": "/nowhere"}),
        *(of("counts", **{name: -1}) for name in COUNTS),
        *(of("counts", **change) for change in ({"seed": "x"}, {"seed": None}, {"step": 1.5}, {"more": 1})),
        of(counts=[]),
        of(metrics={"x": "much"}),
        *(of(left_out=left) for left in (3, [])),
        lambda manifest: manifest.pop("created"),
    ):
        (path / MANIFEST).write_bytes(good)
        forged(path, change)
        refused(tmp_path)


def test_a_forged_header_is_damage_and_costs_neither_time_nor_memory(tmp_path):
    path = save(tmp_path, tree_of_all())
    good = {name: (path / name).read_bytes() for name in (MANIFEST, DATA)}
    entry = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
    boxes = ([[0, 2], [0, 4]], [[1, 4], [0, 4]], [[0, 3], [-1, 4]], [[0, 12]], [[0, 3, 1], [0, 4]], [3, 4], [], {}, 3)
    boxes += ([[0, 2**40], [0, 2**40]], [[3, 0], [4, 0]], HUGE)
    for change in (
        *(of(**{"__metadata__": {"/extra/w": json.dumps(box)}}) for box in boxes),
        *(of(**{"__metadata__": boxes}) for boxes in ({"/extra/w": "{"}, {"/extra/w": 3}, [], "/extra/w")),
        *(of("/extra/w", data_offsets=offsets) for offsets in ([8, 56], [-48, 0], [0, 2**40], [0], 3, None)),
        *(of(**{"/extra/w": junk}) for junk in (3, {}, [])),
        of(**{"/extra/other": entry}),
        lambda header: header.pop("/extra/w"),
        lambda header: dict(reversed(header.items())),
        lambda header: [3],
        lambda header: {"/extra/w": entry},
    ):
        for name, content in good.items():
            (path / name).write_bytes(content)
        forged_header(path, DATA, change)
        refused(tmp_path)
    for length in (0, 7, 2**40, 2**63):
        (path / DATA).write_bytes(length.to_bytes(8, "little") + good[DATA][8:])
        forged(path, of("files", DATA, crc32=zlib.crc32((path / DATA).read_bytes()), bytes=len(good[DATA])))
        refused(tmp_path)
    # A file that is longer than its tensors is not read to its end.
    (path / DATA).write_bytes(good[DATA])
    os.truncate(path / DATA, 2**40)
    forged(path, of("files", DATA, bytes=2**40))
    refused(tmp_path)
