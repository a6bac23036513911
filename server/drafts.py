"""Drafts: the store as the gateway sees it, and what it remembers about versions: lineage and roll backs.

File work runs beside the event loop. This module knows no engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from server.disk import Disk
from server.errors import DraftNotFound
from wire.artifact import DraftManifest
from wire.control import DraftEntry, DraftList
from wire.errors import ArtifactError, SwapError
from wire.store import DraftStore

MAX_LINEAGE = 32
MAX_MARKS = 256

Result = TypeVar("Result")


class NotAccepted(SwapError):
    """The gate or a canary spoke against this draft, and nobody forced it."""

    code = "draft_not_accepted"


class Drafts:
    """Active version, those before it, and those that were rolled back."""

    def __init__(self, store: DraftStore, *, target_since_s: float = 0.0) -> None:
        """`target_since_s` is the Unix time since which the target that serves does."""
        self.store = store
        self.active: int | None = store.active()
        self.floor: int | None = store.floor()
        """As of the last look at the store; `find_floor` looks again."""
        self.rolled_back: dict[int, str] = {}
        self.simulated_al: dict[int, float] = {}
        """By version, as the gate put it into the manifest, of drafts made for the target that serves."""
        self._target_since_s = target_since_s
        self._disk = Disk()
        self._lineage: list[int] = []
        self._read_records()

    @property
    def previous(self) -> int | None:
        """The version active before the present one."""
        return self._lineage[-1] if self._lineage else None

    async def find_floor(self) -> int | None:
        """The floor as it is now; raises DiskStuck."""
        self.floor = await self._disk.do(self.store.floor)
        return self.floor

    async def absence(self, version: int) -> ArtifactError | None:
        """DraftNotFound where there is no such version, or why nobody can tell; None where it is there."""
        try:
            await self._read(partial(self._require_present, version))
        except ArtifactError as error:
            return error
        return None

    async def verify(self, version: int) -> DraftManifest:
        """The manifest of an intact artifact; raises ArtifactError, DraftNotFound where there is none."""
        manifest = await self._read(partial(self._verify, version))
        self._note_simulated(manifest)
        return manifest

    def forget_simulated(self) -> None:
        """Another target serves: the gate judged the drafts made until now on what the one before made of its requests."""
        self._target_since_s = time.time()
        self.simulated_al.clear()

    def require_accepted(self, manifest: DraftManifest) -> None:
        """Raises NotAccepted unless the gate accepted it and no canary rolled it back."""
        version = manifest.version
        if version in self.rolled_back:
            raise NotAccepted(f"draft {version} was rolled back ({self.rolled_back[version]}); use force to try it again")
        if manifest.gate is None:
            raise NotAccepted(f"draft {version} ({manifest.origin}) never passed the gate; use force to activate it anyway")
        if not manifest.gate.accepted:
            raise NotAccepted(f"the gate rejected draft {version}: {manifest.gate.reason}; use force to activate it anyway")

    def advance(self, version: int) -> None:
        """`version` is active now, the former one its predecessor."""
        if self.active is not None:
            self._lineage = [*self._lineage, self.active][-MAX_LINEAGE:]
        self.active = version
        self.rolled_back.pop(version, None)

    def retreat(self, version: int) -> None:
        """`version` is active again; whatever came after it is no predecessor any more."""
        while self._lineage and self._lineage.pop() != version:
            pass
        self.active = version

    def mark_rolled_back(self, version: int, reason: str) -> None:
        self.rolled_back[version] = reason
        while len(self.rolled_back) > MAX_MARKS:
            self.rolled_back.pop(next(iter(self.rolled_back)))

    async def persist_active(self, version: int) -> str:
        """Move the pointer on disk; returns what went wrong, empty when nothing did."""
        try:
            await self._disk.do(partial(self.store.set_active, version))
        except (OSError, ArtifactError) as error:
            return str(error)
        return ""

    async def listing(self) -> DraftList:
        """Raises ArtifactError where the store cannot be read."""
        await self.find_floor()
        return await self._read(self._listing)

    async def entry(self, version: int) -> DraftEntry:
        """Raises ArtifactError, DraftNotFound where there is none."""
        await self.find_floor()
        return await self._read(partial(self._present_entry, version))

    async def _read(self, work: Callable[[], Result]) -> Result:
        try:
            return await self._disk.do(work)
        except OSError as error:
            raise ArtifactError(f"the drafts under {self.store.root} cannot be read: {error}") from error

    def _listing(self) -> DraftList:
        return DraftList(
            active_version=self.active,
            previous_version=self.previous,
            floor_version=self.floor,
            drafts=[self._entry(version) for version in self.store.versions()],
        )

    def _verify(self, version: int) -> DraftManifest:
        self._require_present(version)
        return self.store.verify(version)

    def _present_entry(self, version: int) -> DraftEntry:
        self._require_present(version)
        return self._entry(version)

    def _entry(self, version: int) -> DraftEntry:
        marks = {"active": self.active, "previous": self.previous, "floor": self.floor}
        names = [name for name, marked in marks.items() if marked == version]
        reason = self.rolled_back.get(version, "")
        if version in self.rolled_back:
            names.append("rolled_back")
        try:
            manifest = self.store.manifest(version)
        except ArtifactError as error:
            return DraftEntry(version=version, marks=[*names, "unreadable"], reason=str(error))
        return DraftEntry(version=version, marks=names, reason=reason, manifest=manifest)

    def _require_present(self, version: int) -> None:
        if not self.store.directory(version).is_dir():
            raise DraftNotFound(f"there is no draft {version}; GET /admin/drafts lists what there is")

    def _read_records(self) -> None:
        """What manifests tell a gateway that finds itself started on a store with history: the active version's parent, and
        simulated AL."""
        try:
            versions = self.store.versions()
        except OSError:
            return
        for version in dict.fromkeys((*versions[-MAX_MARKS:], self.active)):
            if version is None:
                continue
            try:
                manifest = self.store.manifest(version)
            except (ArtifactError, OSError):
                continue
            self._note_simulated(manifest)
            if version == self.active and manifest.parent is not None:
                self._lineage = [manifest.parent]

    def _note_simulated(self, manifest: DraftManifest) -> None:
        if manifest.gate is not None and manifest.created_at_s >= self._target_since_s:
            self.simulated_al[manifest.version] = manifest.gate.candidate_al
        while len(self.simulated_al) > MAX_MARKS:
            self.simulated_al.pop(min(self.simulated_al))
