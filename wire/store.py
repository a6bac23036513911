"""ArtifactStore: a directory of artifacts by version, and pointers to some of them.

Drafts lie in `<state>/drafts/<version>/`, with the pointers `active` and `floor`; versions of the target in `<state>/targets`
(`wire/target.py`). Pointers are symbolic links replaced by rename, so a reader sees the old or the new version, never neither.
The engine starts from the `active` draft; the floor is the static draft that is kept whatever the learner does.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Generic

from wire.artifact import MANIFEST_FILE, DraftManifest, Manifest, read_manifest, verify_artifact
from wire.errors import ArtifactError
from wire.spec import fsync_path

_STAGING_PREFIX = ".staging-"
VERSION_NAME = re.compile(r"0|[1-9][0-9]{0,14}")
"""What names a version, here and in the admin API; whatever else lies beside the drafts is none of them."""


class ArtifactStore(Generic[Manifest]):
    """Artifacts by version. Writers of artifacts exclude one another by a file lock; pointers are replaced in one step, so the
    last of two owners wins. Readers need no lock."""

    folder: ClassVar[str]
    """In the state directory."""
    first_version: ClassVar[int] = 0
    _where_listed: ClassVar[str]
    manifest_type: type[Manifest]

    def __init__(self, state_dir: Path) -> None:
        self.root = state_dir / self.folder

    @property
    def _highest_file(self) -> Path:
        return self.root.with_name(f"{self.folder}.highest")

    @property
    def _kind(self) -> str:
        return self.manifest_type.kind

    def directory(self, version: int) -> Path:
        """Where a version lives. Only a non-negative int names one: no path can be smuggled in."""
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ArtifactError(f"a {self._kind} version is a non-negative integer, got {version!r}")
        return self.root / str(version)

    def versions(self) -> list[int]:
        """Finished versions, ascending."""
        if not self.root.is_dir():
            return []
        return sorted(version for version in self._named() if (self.directory(version) / MANIFEST_FILE).is_file())

    def exists(self, version: int) -> bool:
        """Whether a pointer may name it."""
        return (self.directory(version) / MANIFEST_FILE).is_file()

    def manifest(self, version: int) -> Manifest:
        """What a version says it is, its files not verified; raises ArtifactError."""
        return read_manifest(self.directory(version), self.manifest_type)

    def verify(self, version: int) -> Manifest:
        """The manifest of a version whose every file is whole; raises ArtifactError."""
        return verify_artifact(self.directory(version), self.manifest_type)

    def active(self) -> int | None:
        """The version engines start from; None without one."""
        return self._read_pointer("active")

    def active_since_s(self) -> float:
        """When the pointer was last written, seconds of the wall clock; 0 where there is none."""
        try:
            return (self.root / "active").lstat().st_mtime
        except OSError:
            return 0.0

    def set_active(self, version: int) -> None:
        """Raises ArtifactError for a version that does not exist, OSError where the disk refuses."""
        self._write_pointer("active", version)

    def publish(self, fill: Callable[[Path, int], None]) -> int:
        """Make the next version: `fill(directory, version)` writes all files, the manifest last; then one rename.

        Raises what `fill` raises, and OSError on a full disk; nothing is visible then.
        """
        with self._writing():
            return self._publish(fill)

    def _publish(self, fill: Callable[[Path, int], None]) -> int:
        staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=self.root))
        try:
            version = max(*self._named(), self._highest(), self.first_version - 1) + 1
            fill(staging, version)
            staging.chmod(0o755)
            self._remember(version)
            staging.rename(self.directory(version))
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        fsync_path(self.root)
        return version

    def prune(self, keep: int, spare: Collection[int] = ()) -> list[int]:
        """Remove all but the newest `keep` versions, never one of `spare`, the active one, its parent or one that a pointer names.

        Returns what went.

        Raises ArtifactError where the active one cannot be read: its parent is not known then.
        """
        with self._writing():
            return self._prune(keep, spare)

    def _prune(self, keep: int, spare: Collection[int]) -> list[int]:
        versions = self.versions()
        kept: set[int | None] = {*self._pointed_at(), *spare, *versions[-keep:]}
        active = self.active()
        if active is not None and active in versions:
            kept.add(self.manifest(active).parent)
        removed = [version for version in versions if version not in kept]
        for version in removed:
            shutil.rmtree(self.directory(version), ignore_errors=True)
        for leftover in self.root.glob(f"{_STAGING_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return removed

    def _pointed_at(self) -> set[int | None]:
        return {self.active()}

    def _named(self) -> Iterator[int]:
        """Of every entry that is named like a version, whole or not."""
        return (int(path.name) for path in self.root.iterdir() if VERSION_NAME.fullmatch(path.name))

    def _highest(self) -> int:
        """The newest version there ever was, so that none is given twice; -1 where it is not known."""
        try:
            text = self._highest_file.read_text()
        except (OSError, UnicodeDecodeError):
            return -1
        return int(text) if VERSION_NAME.fullmatch(text) else -1

    def _remember(self, version: int) -> None:
        temporary = self._highest_file.with_suffix(f".{os.getpid()}")
        temporary.write_text(str(version))
        temporary.rename(self._highest_file)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Alone among all processes that write artifacts here: half-made ones are then nobody's but ours."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self.root.with_name(f"{self.folder}.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read_pointer(self, name: str) -> int | None:
        try:
            target = os.readlink(self.root / name)
        except OSError:
            return None
        return int(target) if VERSION_NAME.fullmatch(target) else None

    def _write_pointer(self, name: str, version: int) -> None:
        if not self.exists(version):
            raise ArtifactError(f"{self._kind} {version} does not exist; {self._where_listed} shows what does")
        temporary = self.root / f".{name}-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(str(version))
        try:
            temporary.rename(self.root / name)
        except IsADirectoryError:
            temporary.unlink()
            raise ArtifactError(
                f"{self.root / name} is a directory, where a link to a {self._kind} belongs; move it away and try again"
            ) from None
        fsync_path(self.root)


class DraftStore(ArtifactStore[DraftManifest]):
    """The drafts."""

    folder = "drafts"
    manifest_type = DraftManifest
    _where_listed = "`paceline draft list`"

    @property
    def active_link(self) -> Path:
        """The path an engine loads its draft from."""
        return self.root / "active"

    def floor(self) -> int | None:
        """The version to fall back to; None without one."""
        return self._read_pointer("floor")

    def set_floor(self, version: int) -> None:
        """Raises as `set_active` does."""
        self._write_pointer("floor", version)

    def _pointed_at(self) -> set[int | None]:
        return {self.active(), self.floor()}
