"""The files of a checkpoint, as their format is documented."""

import json
import zlib

import orjson

DATA, MANIFEST = "tensors.safetensors", "manifest.json"


def manifest_of(folder):
    return json.loads((folder / MANIFEST).read_bytes())["manifest"]


def forged(folder, change):
    """Change the manifest as somebody would who knows the format: with the right checksum."""
    manifest = manifest_of(folder)
    text = orjson.dumps(change(manifest) or manifest)
    (folder / MANIFEST).write_bytes(b'{"crc32":%d,"manifest":%s}\n' % (zlib.crc32(text), text))


def forged_header(folder, name, change):
    """Change the header of a data file so that all sizes and checksums are right."""
    content = (folder / name).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = orjson.loads(content[8:end])
    text = orjson.dumps(change(header) or header)
    content = len(text).to_bytes(8, "little") + text + content[end:]
    (folder / name).write_bytes(content)
    entry = {"bytes": len(content), "crc32": zlib.crc32(content)}
    forged(folder, lambda manifest: manifest["files"].update({name: entry}))
