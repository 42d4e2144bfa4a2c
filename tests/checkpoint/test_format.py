"""The files of a checkpoint: everything comes back as it was, and nothing else ever does."""

import builtins
import contextlib
import itertools
import json
import math
import operator
import os
import pickle
import re
import resource
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from files import DATA, MANIFEST, forged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared import examples

import looplib as ll

DAMAGED = ll.checkpoint.DamagedCheckpointError
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTIZED, key=str)
pytree = torch.utils._pytree
numbers = itertools.count()
few = settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def save(folder, tree):
    return ll.checkpoint_io(folder).save(ll.TrainState(extra=tree))


def restore(folder, like):
    return ll.checkpoint_io(folder).restore(ll.TrainState(extra=like), quiet=True).extra


def addresses(tensor):
    """Of its elements in bytes of its storage, in order."""
    indices = itertools.product(*map(range, tensor.shape))
    places = [tensor.storage_offset() + sum(map(operator.mul, index, tensor.stride())) for index in indices]
    return [place * tensor.element_size() for place in places]


def addresses_of(tree):
    return {name: addresses(tensor) for name, tensor in tree.items()}


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def raw(tensor):
    """Its bytes in order, whatever its dtype can do."""
    memory = bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).tolist())
    return [memory[at : at + tensor.element_size()] for at in addresses(tensor)]


def random_bytes(count):
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def test_every_dtype_comes_back_to_the_bit_and_in_the_layout_of_the_state(tmp_path):
    def tree(dtype):
        vector, cube, matrix = (random_bytes(24 * dtype.itemsize).view(dtype) for _ in range(3))
        single, empty = random_bytes(dtype.itemsize).view(dtype), random_bytes(0).view(dtype)
        turned = matrix.view(4, 6).as_strided((6, 4), (1, 6))
        return [vector, cube.view(2, 3, 4), turned, single.view(()), empty.view(0, 3)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that complex32 is experimental
        saved, like = ({str(dtype): tree(dtype) for dtype in DTYPES} for _ in range(2))
        save(tmp_path, saved)
        nothing = {name: [None] * 5 for name in like}
        for given_state in (like, nothing):
            found = restore(tmp_path, given_state)
            for old, new, model in zip(*map(pytree.tree_leaves, (saved, found, like)), strict=True):
                assert (new.dtype, new.shape, raw(new)) == (old.dtype, old.shape, raw(old))
                assert given_state is nothing or not new.numel() or new.stride() == model.stride()


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
        (np.True_, "bool"),
        (torch.float32, "dtype"),
        (ll.Window().add({"x": ll.metrics.perplexity(ll.Mean(1.0))}), r"Window of x \(Reading\)"),
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


@settings(few, max_examples=examples(50))
@given(views(), st.booleans())
def test_ties_come_back_as_ties_and_other_overlaps_are_refused_by_name(tmp_path, tree, asynchronous):
    places = {name: {(t.untyped_storage().data_ptr(), at) for at in addresses(t)} for name, t in tree.items()}
    layouts = {name: (t.shape, t.stride(), addresses(t)) for name, t in tree.items()}
    pairs = [pair for pair in itertools.combinations(tree, 2) if places[pair[0]] & places[pair[1]]]
    ranges = {
        name: range(min(at), max(at) + tree[name].element_size()) for name, at in addresses_of(tree).items() if at
    }
    meeting = [
        (one, other)
        for one, other in itertools.combinations(ranges, 2)
        if storage(tree[one]) == storage(tree[other])
        and ranges[one].start < ranges[other].stop
        and ranges[other].start < ranges[one].stop
    ]
    before = {name: raw(tensor) for name, tensor in tree.items()}
    folder = tmp_path / str(next(numbers))
    ckpt, state = ll.checkpoint_io(folder, asynchronous=asynchronous), ll.TrainState(extra=tree)
    overlapping = [{*pair} for pair in meeting if layouts[pair[0]] != layouts[pair[1]]]
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
        assert (restored[one].data_ptr() == restored[other].data_ptr()) == ((one, other) in pairs)


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
    with pytest.raises(ValueError, match="/extra/0 and /extra/1"):
        save(tmp_path, [one := torch.randn(3, dtype=torch.complex64), one.conj()])


def test_safetensors_reads_it_as_documented(tmp_path):
    """As a stranger would, from the docstring of checkpoint_io alone."""
    names = ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "float8_e4m3fn", "complex64")
    params = {f"w/{name}~": torch.ones(3, 5).to(getattr(torch, name)).t() for name in names}
    params |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(7)}
    path = ll.checkpoint_io(tmp_path).save(ll.TrainState(params={**params, "tied": params["scalar"]}))
    found = safetensors.torch.load_file(path / "tensors.safetensors")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["ties"] == {"/params/tied": "/params/scalar"}
    for name, tensor in params.items():
        key = "/params/" + name.replace("~", "~0").replace("/", "~1")
        about = manifest["tensors"].pop(key)
        value = found.pop(key)
        if value.dtype == torch.uint8:
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
    zeros = {
        k: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for k, leaf in tree_of_all().items()
    }
    found = ll.checkpoint_io(folder).restore(ll.TrainState(extra=zeros), 0, quiet=True).extra
    return {name: raw(leaf) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in found.items()}


def refused(folder, name):
    """A restore names the file."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with pytest.raises(DAMAGED, match="step-00000000") as error:
            read(folder)
    messages = "".join(str(message) for message in [error.value, *(warning.message for warning in shown)])
    assert f"step-00000000/{name}" in messages


def test_any_flipped_bit_and_any_cut_is_found(tmp_path):
    for name in (MANIFEST, DATA):
        path = save(tmp_path / name, tree_of_all()) / name
        good = path.read_bytes()
        for at in [*range(0, len(good), 5), len(good) - 1]:
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
            refused(tmp_path / name, name)
        for at in range(0, len(good), 397):
            for changed in (good[:at], good[:at] + good[at + 1 :], good + good[at:]):
                path.write_bytes(changed)
                refused(tmp_path / name, name)
        path.write_bytes(good)
        assert read(tmp_path / name)["w"] == raw(tree_of_all()["w"])


class Bomb:
    def __reduce__(self):
        return exec, ("import builtins; builtins.exploded = True",)


def test_a_file_that_is_another_is_refused_and_nothing_in_it_runs(tmp_path):
    for name in (MANIFEST, DATA):
        folder = tmp_path / name
        path = save(folder, tree_of_all()) / name
        size = path.stat().st_size
        for kind in ("pickle", "torch.save", "number", "empty", "folder"):
            path.unlink()
            if kind == "torch.save":
                torch.save(Bomb(), path)
            elif kind == "folder":
                path.mkdir()
            else:
                content = {"pickle": pickle.dumps(Bomb()).ljust(size, b"\0"), "number": b"3", "empty": b""}
                path.write_bytes(content[kind])
            if name == DATA:  # the manifest says what stat says
                forged(
                    path.parent, lambda manifest, path=path: manifest["files"][DATA].update(bytes=path.stat().st_size)
                )
            refused(folder, name)
    assert not hasattr(builtins, "exploded")
    pickle.loads(pickle.dumps(Bomb()))
    assert builtins.exploded  # so it was one
    del builtins.exploded


def test_another_format_is_told_apart(tmp_path):
    path = save(tmp_path, tree_of_all())
    for version in (99, 3):
        forged(path, lambda manifest, version=version: manifest.update(format=version))
        with pytest.raises(ll.checkpoint.CheckpointVersionError, match=f"manifest.json is of format {version}"):
            read(tmp_path)


def test_a_checkpoint_without_the_entries_of_today_is_of_another_format(tmp_path):
    """Format 9 came to have them one by one, so its number does not say which a file has."""
    path = save(tmp_path, tree_of_all())

    def of_format_9(manifest):
        for name in ("partly_read", "structure", "shared"):
            del manifest[name]
        manifest["format"] = 9

    forged(path, of_format_9)
    with pytest.raises(
        ll.checkpoint.CheckpointVersionError, match=r"is of format 9, .* use the looplib that wrote it"
    ):
        read(tmp_path)


@contextlib.contextmanager
def within_a_second_and_100_mb():
    """Raise if the block waits, as for the writer of a pipe, or takes memory without end, as from /dev/zero."""

    def late(*_):
        raise TimeoutError("more than a second")

    before, limits = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 1)
    resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30), limits[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


def as_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def as_zeros(path):
    with open(path, "wb") as file:
        file.truncate(1 << 38)


def with_a_hole(path):
    size = 1 << 31
    with open(path, "wb") as file:
        file.write(b"{")
        file.truncate(size)
        file.seek(size - 1)
        file.write(b"}")


def of_size(replace):
    """The manifest says what stat says of the file."""

    def hostile(path):
        replace(path / DATA)
        forged(path, lambda manifest: manifest["files"][DATA].update(bytes=(path / DATA).stat().st_size))

    return hostile


def of_shape(*shape):
    return lambda path: forged(path, lambda manifest: manifest["tensors"]["/extra/x"].update(shape=shape))


def of_entry(name, value):
    return lambda path: forged(path, lambda manifest: manifest.update({name: value}))


HOSTILE = {
    "a pipe as manifest": lambda path: as_pipe(path / MANIFEST),
    "a device as manifest": lambda path: as_device(path / MANIFEST),
    "zeros as manifest": lambda path: as_zeros(path / MANIFEST),
    "a manifest with a hole": lambda path: with_a_hole(path / MANIFEST),
    "a pipe as data": lambda path: as_pipe(path / DATA),
    "a pipe of the right size": of_size(as_pipe),
    "a device as data": lambda path: as_device(path / DATA),
    "a device of the right size": of_size(as_device),
    "a device as another file": of_entry("files", {"/dev/zero": {"bytes": 0, "crc32": 0}}),
    "a huge shape": of_shape(2**40),
    "a shape that overflows": of_shape(2**62),
    "a product that overflows": of_shape(2**62, 4),
    "an empty product that overflows": of_shape(2**62, 2**62, 0),
    "a negative shape": of_shape(-4),
    "a seed that no parser takes": lambda path: forged(path, lambda m: m["counts"].update(seed="(" * 100_000)),
    "a seed that would be computed": lambda path: forged(path, lambda m: m["counts"].update(seed="9**9**9**9")),
    "values of another kind": of_entry("values", {"/extra/n": {"int": 5}}),
    "a list of values": of_entry("values", [1]),
    "a list of files": of_entry("files", [1]),
    "a tie to nothing": of_entry("ties", {"/extra/x": "/extra/y"}),
    "other counts": of_entry("counts", {"seed": "0"}),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_folder_is_damage_within_a_second_and_100_mb(tmp_path, hostile):
    good = ll.TrainState(step=1, extra={"x": torch.ones(4), "n": 1})
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(good)
    hostile(ckpt.save(good.replace(step=2)))
    for like in ({"x": torch.zeros(4), "n": 0}, {"x": None, "n": None}):
        with within_a_second_and_100_mb(), pytest.warns(UserWarning, match=r"step-00000002.* damaged"):
            found = ll.checkpoint_io(tmp_path).restore(good.replace(extra=like), quiet=True)
        assert found.step == 1
        assert torch.equal(found.extra["x"], good.extra["x"])
    with within_a_second_and_100_mb(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = ll.checkpoint_io(tmp_path)
        other.save(good.replace(step=3))
        assert 1 in [checkpoint.step for checkpoint in other.steps()]
        assert other.latest().step == 3
