"""The files of a checkpoint, as their format is documented, and states to save in them."""

import json
import zlib
from pathlib import Path

import orjson
import torch
from shared import mean_square
from torch import nn

import looplib as ll

DATA, MANIFEST = "tensors.safetensors", "manifest.json"
COUNTS = ("step", "epoch", "batch", "epoch_length", "samples", "batch_samples", "batch_steps", "seed")
adamw = ll.optimizer(torch.optim.AdamW, lr=0.1)


def manifest_of(folder):
    manifest = json.loads((folder / MANIFEST).read_bytes())
    del manifest["crc32"]
    return manifest


def forged(folder, change):
    """Change the manifest as somebody would who knows the format: with the right checksum."""
    manifest = manifest_of(folder)
    change(manifest)
    checksum = zlib.crc32(orjson.dumps(manifest))
    (folder / MANIFEST).write_bytes(orjson.dumps({**manifest, "crc32": checksum}))


def forged_header(path, change):
    """Change the header of a data file so that all sizes and checksums are right."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = orjson.loads(content[8:end])
    change(header)
    text = orjson.dumps(header)
    content = len(text).to_bytes(8, "little") + text + content[end:]
    path.write_bytes(content)
    checksum = zlib.crc32(zlib.crc32(content).to_bytes(4, "little"))  # of a file of one slice
    entry = {"bytes": len(content), "crc32": checksum}
    forged(path.parent, lambda manifest: manifest["files"].update({path.name: entry}))


def damage(folder, name=DATA):
    """Flip one bit."""
    content = bytearray((folder / name).read_bytes())
    content[-20] ^= 1
    (folder / name).write_bytes(content)


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def unbound(values=0, **kwargs):
    return ll.copy_state(ll.init_state(net(values), adamw, **kwargs))


def advanced(state, steps=1, model=None, **options):
    model = model or net()
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), adamw, **options)
    for i in range(steps):
        state, _ = step(state, torch.ones(5, 3) * i + torch.eye(5, 3))
    return state


def tensors_of(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def same(one, other):
    """True if two states have the same counts and leaves."""
    counts = all(getattr(one, name) == getattr(other, name) for name in COUNTS)
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (one, other)), strict=True)
    return counts and all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
