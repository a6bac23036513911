"""KvDirectory: KV of finished conversations on any POSIX path, one immutable file per block and rank.

    <root>/<layout hash>/<target version>/<tenant>/<block name>.<rank>     written under another name, then renamed
    <root>/<layout hash>/<target version>/<tenant>/holds/<block name>      what must not be evicted: pins and leases

Layout, target version and tenant are directories, so KV of another kind, of other weights or of another tenant is not
even looked at. A file tells its own identity and carries a checksum over all of itself. Files are touched when used, and
the least recently used go first where the directory outgrows its bound. Any number of engines may share a directory.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from wire.errors import FrameError, WireError
from wire.kv_block_format import KvBlockHeader, KvRealm, block_bytes_bound, read_header, seal

_HOLDS = "holds"
_TENANT_PREFIX = "t-"
"""A label may be `..`."""
_MAX_HOLD_BYTES = 1 << 24
_STALE_TEMPORARY_S = 600.0
_AGE_STEP_S = 1e-3
"""By which one block of a prefix is older than the one before it."""
_BLOCK_FILE = re.compile(r"([0-9a-f]{32})\.([0-9]+)")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.[0-9]+-[0-9a-f]{16}")
_HOLD_FILE = re.compile(r"[0-9a-f]{32}")
_LAYOUT = re.compile(r"[0-9a-f]{16}")


class StoredBlock(NamedTuple):
    """One file of the directory."""

    path: Path
    realm: KvRealm
    name: str
    num_bytes: int
    used_at_s: float


class Hold(Struct, frozen=True, kw_only=True):
    """Keeps the blocks of one prefix from eviction, of its own realm only."""

    names: tuple[str, ...]
    is_pinned: bool = False
    lease_until_s: float = 0.0
    """Unix time."""

    def is_in_force(self, now_s: float) -> bool:
        return self.is_pinned or self.lease_until_s > now_s


class KvDirectory:
    """The files and what holds them. Methods raise OSError where the disk does."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def block_path(self, realm: KvRealm, name: str, rank: int) -> Path:
        return self._realm_directory(realm) / f"{name}.{rank}"

    def part_path(self, header: KvBlockHeader) -> Path:
        return self.block_path(header.realm, header.name, header.rank)

    def has_block(self, realm: KvRealm, name: str, num_ranks: int) -> bool:
        """Whether every rank's part is there."""
        return all(os.path.isfile(self.block_path(realm, name, rank)) for rank in range(num_ranks))

    def create(self) -> None:
        """For its owner alone: KV tells what was said."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        """Seal and store a file; a reader sees all of it or nothing. After a power cut its checksum tells what it is worth."""
        self.create()
        _replace(path, seal(data))

    def touch(self, paths: Sequence[Path]) -> None:
        """Note the use of a prefix, its files in order. Its start becomes younger than its end, which is worth less alone."""
        now_s = time.time()
        for position, path in enumerate(paths):
            try:
                os.utime(path, (now_s, now_s - position * _AGE_STEP_S))
            except FileNotFoundError:
                continue

    def realms(self) -> list[KvRealm]:
        return [
            KvRealm(layout.name, int(version.name), tenant.name.removeprefix(_TENANT_PREFIX))
            for layout in _directories(self.root)
            if _LAYOUT.fullmatch(layout.name)
            for version in _directories(layout)
            if version.name.isdecimal()
            for tenant in _directories(version)
        ]

    def blocks(self) -> Iterator[StoredBlock]:
        """Every block file, in no order. Files that vanish meanwhile are left out."""
        for realm in self.realms():
            for entry in _files(self._realm_directory(realm)):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                if match := _BLOCK_FILE.fullmatch(entry.name):
                    yield StoredBlock(Path(entry.path), realm, match[1], status.st_size, status.st_mtime)
                elif _TEMPORARY.fullmatch(entry.name) and status.st_mtime < time.time() - _STALE_TEMPORARY_S:
                    Path(entry.path).unlink(missing_ok=True)

    def parts(self, realm: KvRealm, name: str) -> list[Path]:
        """Files of one block, rank 0 first."""
        return list(takewhile(Path.exists, (self.block_path(realm, name, rank) for rank in count())))

    def headers(self, realm: KvRealm) -> list[KvBlockHeader]:
        """Of all blocks of a realm, in no order; unreadable ones are left out."""
        paths = (Path(entry.path) for entry in _files(self._realm_directory(realm)) if _BLOCK_FILE.fullmatch(entry.name))
        return [header for path in paths if path.suffix == ".0" and (header := _readable(path)) is not None]

    def prefix(self, realm: KvRealm, name: str) -> list[KvBlockHeader]:
        """The headers of a block and of all before it, in order; empty where a part of the prefix is missing or unreadable."""
        chain: list[KvBlockHeader] = []
        while True:
            header = _readable(self.block_path(realm, name, 0))
            if header is None or header.name != name or (chain and header.position != chain[-1].position - 1):
                return []
            chain.append(header)
            if header.position == 0:
                return chain[::-1]
            name = header.parent

    def hold(self, realm: KvRealm, name: str) -> Hold | None:
        """What holds a prefix; a file that cannot be read holds nothing."""
        try:
            return msgspec.json.decode(_read(self._hold_path(realm, name), _MAX_HOLD_BYTES), type=Hold)
        except (FileNotFoundError, WireError, msgspec.DecodeError, RecursionError):
            return None

    def set_hold(self, realm: KvRealm, name: str, hold: Hold) -> None:
        """Replace what holds a prefix; one that holds nothing any more is removed."""
        path = self._hold_path(realm, name)
        if not hold.is_in_force(time.time()):
            path.unlink(missing_ok=True)
            return
        _replace(path, msgspec.json.encode(hold))

    def held(self, now_s: float) -> set[tuple[KvRealm, str]]:
        """Blocks that must stay: those of all prefixes held now."""
        held: set[tuple[KvRealm, str]] = set()
        for realm in self.realms():
            for entry in _files(self._realm_directory(realm) / _HOLDS):
                if not _HOLD_FILE.fullmatch(entry.name):  # one that was never renamed nobody could take back
                    continue
                hold = self.hold(realm, entry.name)
                if hold is not None and hold.is_in_force(now_s):
                    held.update((realm, name) for name in hold.names)
        return held

    def shrink(self, max_bytes: int, *, leave_bytes: int) -> tuple[int, int]:
        """Where more than `max_bytes` are stored, remove the least recently used blocks that nothing holds.

        It stops once `leave_bytes` or less are left. Returns (bytes left, files removed).
        """
        blocks = sorted(self.blocks(), key=lambda block: block.used_at_s)
        num_bytes = sum(block.num_bytes for block in blocks)
        if num_bytes <= max_bytes:
            return num_bytes, 0
        held, num_removed = self.held(time.time()), 0
        for block in blocks:
            if num_bytes <= leave_bytes:
                break
            if (block.realm, block.name) not in held:
                block.path.unlink(missing_ok=True)
                num_bytes -= block.num_bytes
                num_removed += 1
        return num_bytes, num_removed

    def _realm_directory(self, realm: KvRealm) -> Path:
        return self.root / realm.layout_hash / str(realm.target_version) / f"{_TENANT_PREFIX}{realm.tenant}"

    def _hold_path(self, realm: KvRealm, name: str) -> Path:
        return self._realm_directory(realm) / _HOLDS / name


def read_block(path: Path, *, tensor_bytes: int) -> bytes:
    """The bytes of a file that may be a block with that many bytes of tensors, unchecked; raises OSError or WireError."""
    return _read(path, block_bytes_bound(tensor_bytes))


def _read(path: Path, max_bytes: int) -> bytes:
    num_bytes = _num_bytes(path)
    if num_bytes > max_bytes:
        raise FrameError(f"{path.name} has {num_bytes} bytes, at most {max_bytes} are read")
    return path.read_bytes()


def _num_bytes(path: Path) -> int:
    """Of a plain file; raises FrameError for anything else. The open of a pipe, say, would never return."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise FrameError(f"{path.name} is not a plain file")
    return status.st_size


def _replace(path: Path, data: bytes) -> None:
    """By way of another name beside it that no other writer on any machine uses, and that a failure leaves nothing of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _readable(path: Path) -> KvBlockHeader | None:
    try:
        _num_bytes(path)
        with path.open("rb") as file:
            return read_header(file)
    except (OSError, WireError):
        return None


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _files(path: Path) -> Iterator[os.DirEntry[str]]:
    """Plain files only: a network disk shows its snapshots as a directory in each directory."""
    return (entry for entry in _entries(path) if entry.is_file(follow_symlinks=False))


def _directories(path: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(path) if entry.is_dir()]
