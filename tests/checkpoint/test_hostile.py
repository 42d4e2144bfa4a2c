"""Files from elsewhere: whatever a checkpoint holds, a restore ends soon, in little memory, and names the file."""

import json
import os
import time
import tracemalloc
import warnings

import pytest
import torch
from files import DATA, MANIFEST, forged
from torch import nn

import looplib as ll

DAMAGED = ll.checkpoint.DamagedCheckpointError
COUNTS = ("step", "epoch", "batch", "samples", "batch_samples", "batch_steps")
HUGE = [2**47] * 300_000  # the product of these takes long


def start():
    return ll.copy_state(ll.init_state(nn.Linear(3, 2), ll.optimizer(torch.optim.AdamW, lr=0.1)))


def saved(folder):
    return ll.checkpoint_io(folder).save(start().replace(step=1, extra={"turned": torch.ones(3, 2).t()}))


def refused(folder, *names):
    """A restore names the file, within a second and in 100 MB."""
    template = start().replace(extra={"turned": torch.ones(3, 2).t()})
    tracemalloc.start()
    begin = time.thread_time()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with pytest.raises(DAMAGED, match="step-00000001") as error:
            ll.checkpoint_io(folder).restore(template, 1)
    took, (_, peak) = time.thread_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    messages = "".join(str(message) for message in [error.value, *(warning.message for warning in shown)])
    assert any(name in messages for name in names)
    assert took < 10  # a second on a machine that does nothing else
    assert peak < 100e6


def leaf(**changes):
    return lambda manifest: manifest["tensors"]["/extra/turned"].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        *(leaf(shape=shape) for shape in (["x", 5 * 10**9], HUGE, [2**62] * 10**5, ["x"], [1.0], 3, {}, None)),
        *(leaf(stride=stride) for stride in (["x", 5 * 10**9], HUGE, [-1, 1], 3, "ab")),
        *(leaf(offset=offset) for offset in (-4, "4", 2**62)),
        lambda manifest: manifest["tensors"].update({"/extra/turned": 3}),
        *(lambda manifest, n=name: manifest["counts"].update({n: -1}) for name in (*COUNTS, "epoch_length")),
        *(lambda manifest, left=left: manifest.update(left_out=left)
          for left in (3, {}, [], {"tensors": "x"}, {"tensors": -1, "bytes": 0, "digest": 3})),
        lambda manifest: manifest.update(bytes=-1),
        lambda manifest: manifest["data"]["/extra/turned"].update(begin=-4),
        lambda manifest: manifest["data"]["/extra/turned"].update(crc32="x"),
        lambda manifest: manifest.update(shards={"/extra/turned": {"dtype": "float32", "shape": HUGE}}),
    ],
)  # fmt: skip
def test_a_hostile_manifest_is_damage(tmp_path, change):
    forged(saved(tmp_path), change)
    refused(tmp_path, MANIFEST, DATA)


@pytest.mark.parametrize("name", [MANIFEST, DATA])
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "/dev/null", "folder", "sparse", "empty"])
def test_a_file_that_is_none_is_damage(tmp_path, name, kind):
    path = saved(tmp_path)
    (path / name).unlink()
    if kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "folder":
        (path / name).mkdir()
    elif kind in ("sparse", "empty"):
        (path / name).touch()
        os.truncate(path / name, 2**40 if kind == "sparse" else 0)
    else:
        (path / name).symlink_to(kind)
    if name == DATA and kind != "folder":  # the manifest says what stat says
        forged(path, lambda manifest: manifest.update(bytes=(path / DATA).stat().st_size))
    refused(tmp_path, name, MANIFEST)


def test_links_to_files_are_followed(tmp_path):
    """As a snapshot of huggingface_hub has them."""
    path = saved(tmp_path)
    for name in (MANIFEST, DATA):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
    assert ll.checkpoint_io(tmp_path).restore(start().replace(extra={"turned": torch.ones(3, 2).t()})).step == 1


def test_each_byte_of_the_header_is_checked(tmp_path):
    path = saved(tmp_path) / DATA
    good = path.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    assert json.loads(good[8:end])["/params/weight"]["shape"] == [2, 3]
    for at in (*range(10), *range(10, end, 37), end - 1):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        refused(tmp_path, DATA)
