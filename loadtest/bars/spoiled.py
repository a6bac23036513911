"""Bad drafts, made from a good artifact by editing bytes: this package knows the file format, not the tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from wire.artifact import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, DraftManifest
from wire.spec import file_sha256

_NAN_BYTES = {"BF16": b"\xc0\x7f", "F16": b"\x00\x7e", "F32": b"\x00\x00\xc0\x7f"}


def make_all(drafts: Path, *, good: int) -> dict[str, int]:
    """One bad artifact per kind of damage, beside the good one; returns version by name."""
    newest = max(int(path.name) for path in drafts.iterdir() if path.name.isdecimal())
    made: dict[str, int] = {}
    # Far above the newest, so that nothing published meanwhile takes the number.
    for version, (name, spoil) in enumerate(KINDS.items(), start=newest + 1000):
        directory = drafts / str(version)
        shutil.copytree(drafts / str(good), directory)
        renumber(directory, version, parent=good)
        spoil(directory)
        made[name] = version
    return made


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header, payload) of a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    return header, content[8 + size :]


def write_safetensors(path: Path, header: dict[str, Any], payload: bytes) -> None:
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + payload)


def edit_manifest(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = directory / MANIFEST_FILE
    content = json.loads(path.read_text())
    edit(content)
    msgspec.convert(content, DraftManifest)
    path.write_text(json.dumps(content, indent=2))


def renumber(directory: Path, version: int, *, parent: int) -> None:
    edit_manifest(directory, lambda manifest: manifest.update(version=version, parent=parent))


def reseal(directory: Path) -> None:
    """Make the checksums true again, so that only the loader can notice the damage."""
    sums = {name: file_sha256(directory / name) for name in (WEIGHTS_FILE, CONFIG_FILE)}
    edit_manifest(directory, lambda manifest: manifest["sha256"].update(sums))


def wrong_shape(directory: Path) -> None:
    """Transpose the shape of one matrix that is not square."""
    path = directory / WEIGHTS_FILE
    header, payload = read_safetensors(path)
    entry = next(
        entry
        for name, entry in header.items()
        if name != "__metadata__" and len(entry["shape"]) == 2 and entry["shape"][0] != entry["shape"][1]
    )
    entry["shape"] = entry["shape"][::-1]
    write_safetensors(path, header, payload)
    reseal(directory)


def not_a_number(directory: Path) -> None:
    """One NaN in the first floating-point tensor."""
    path = directory / WEIGHTS_FILE
    header, payload = read_safetensors(path)
    entry = next(entry for name, entry in header.items() if name != "__metadata__" and entry["dtype"] in _NAN_BYTES)
    start = entry["data_offsets"][0]
    nan = _NAN_BYTES[entry["dtype"]]
    write_safetensors(path, header, payload[:start] + nan + payload[start + len(nan) :])
    reseal(directory)


def missing_tensor(directory: Path) -> None:
    """Rename one tensor, so that the expected one is absent."""
    path = directory / WEIGHTS_FILE
    header, payload = read_safetensors(path)
    name = next(name for name in header if name != "__metadata__")
    header[f"{name}.renamed"] = header.pop(name)
    write_safetensors(path, header, payload)
    reseal(directory)


def truncated(directory: Path) -> None:
    """Half of the weights, with checksums to match."""
    path = directory / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    reseal(directory)


def checksum_off(directory: Path) -> None:
    """One byte of the weights flipped, the manifest as before."""
    path = directory / WEIGHTS_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def wrong_target(directory: Path) -> None:
    edit_manifest(directory, lambda manifest: manifest["spec"].update(target_revision="0" * 16))


def other_layers(directory: Path) -> None:
    edit_manifest(directory, lambda manifest: manifest["spec"].update(aux_layer_ids=[1, 2, 3]))


def path_in_manifest(directory: Path) -> None:
    edit_manifest(directory, lambda manifest: manifest["sha256"].update({"../../run/operator.token": "0" * 64}))


def other_version(directory: Path) -> None:
    edit_manifest(directory, lambda manifest: manifest.update(version=int(directory.name) + 1))


def unfinished(directory: Path) -> None:
    (directory / MANIFEST_FILE).unlink()


KINDS: dict[str, Callable[[Path], None]] = {
    "wrong shape": wrong_shape,
    "truncated": truncated,
    "NaN": not_a_number,
    "missing tensor": missing_tensor,
    "wrong target": wrong_target,
    "other layers": other_layers,
    "checksum off": checksum_off,
    "path in the manifest": path_in_manifest,
    "renamed directory": other_version,
    "unfinished": unfinished,
}
