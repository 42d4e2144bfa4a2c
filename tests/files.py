"""The files of a checkpoint, as their format is documented."""

import json
import zlib

import orjson

DATA, MANIFEST = "tensors.safetensors", "manifest.json"
BLOCK = 8 << 20  # bytes of data that share a checksum


def manifest_of(folder):
    return json.loads((folder / MANIFEST).read_bytes())["manifest"]


def forged(folder, change):
    """Change the manifest as somebody would who knows the format: with the right checksum."""
    manifest = manifest_of(folder)
    text = orjson.dumps(change(manifest) or manifest)
    (folder / MANIFEST).write_bytes(b'{"crc32":%d,"manifest":%s}\n' % (zlib.crc32(text), text))


def forged_header(folder, change, name=DATA):
    """Change the header of a data file likewise, with its right size and checksum in the manifest."""
    content = (folder / name).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    text = orjson.dumps(change(header) or header)
    text += b" " * (-(8 + len(text)) % 64)
    head = len(text).to_bytes(8, "little") + text
    (folder / name).write_bytes(head + content[end:])

    def noted(manifest):
        about = manifest["files"][name]
        about["bytes"] = len(head) + len(content) - end
        about["crc32"][0] = zlib.crc32(head)

    forged(folder, noted)
