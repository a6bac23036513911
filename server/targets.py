"""Targets: versions of the target as the gateway sees them. File work runs beside the event loop; this module knows no engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from server.disk import Disk
from server.errors import TargetNotFound
from wire.errors import ArtifactError
from wire.target import BASE_VERSION, TargetManifest, TargetStore
from wire.target_control import TargetEntry

MAX_LINEAGE = 32

Result = TypeVar("Result")


class Targets:
    """The active version and those before it."""

    def __init__(self, store: TargetStore) -> None:
        self.store = store
        pointer = store.active()
        self.active = BASE_VERSION if pointer is None else pointer
        self.is_managed = pointer is not None
        """Whether a version was ever activated here. Until then engines compute with whatever they were started with."""
        self.since_s = store.active_since_s()
        """Wall clock of the last change before this gateway started; 0 where there was none."""
        self._disk = Disk()
        self._lineage: list[int] = self._read_parent()

    @property
    def previous(self) -> int | None:
        """The version active before the present one."""
        return self._lineage[-1] if self._lineage else None

    async def verify(self, version: int) -> TargetManifest | None:
        """The manifest of an intact artifact, None for version 0; raises ArtifactError, TargetNotFound where there is none."""
        return None if version == BASE_VERSION else await self._read(partial(self._verify, version))

    async def absence(self, version: int) -> ArtifactError | None:
        """TargetNotFound where there is no such version, or why nobody can tell; None where it is there."""
        try:
            if version != BASE_VERSION:
                await self._read(partial(self._require, version))
        except ArtifactError as error:
            return error
        return None

    async def require_pointer(self) -> None:
        """Write the pointer before the first change: a gateway that dies in the middle finds there what all engines go back to.

        Raises ArtifactError where the disk refuses.
        """
        if self.is_managed:
            return
        if problem := await self.persist(self.active):
            raise ArtifactError(f"the active target cannot be written down, so no other is activated: {problem}")
        self.is_managed = True

    async def persist(self, version: int) -> str:
        """Move the pointer on disk; returns what went wrong, empty when nothing did."""
        try:
            await self._disk.do(partial(self.store.set_active, version))
        except (OSError, ArtifactError) as error:
            return str(error)
        return ""

    def advance(self, version: int) -> None:
        """`version` is active now, the former one its predecessor."""
        self._lineage = [*self._lineage, self.active][-MAX_LINEAGE:]
        self.active = version

    def retreat(self, version: int) -> None:
        """`version` is active again; whatever came after it is no predecessor any more."""
        while self._lineage and self._lineage.pop() != version:
            pass
        self.active = version

    async def listing(self) -> list[TargetEntry]:
        """By ascending version; raises ArtifactError where the store cannot be read."""
        return await self._read(lambda: [self._entry(version) for version in self.store.versions()])

    async def _read(self, work: Callable[[], Result]) -> Result:
        try:
            return await self._disk.do(work)
        except OSError as error:
            raise ArtifactError(f"the targets under {self.store.root} cannot be read: {error}") from error

    def _require(self, version: int) -> None:
        if not self.store.directory(version).is_dir():
            raise TargetNotFound(f"there is no target {version}; GET /admin/targets lists what there is")

    def _verify(self, version: int) -> TargetManifest:
        self._require(version)
        return self.store.verify(version)

    def _entry(self, version: int) -> TargetEntry:
        is_active = version == self.active
        try:
            return TargetEntry(version=version, is_active=is_active, manifest=self.store.manifest(version))
        except ArtifactError as error:
            return TargetEntry(version=version, is_active=is_active, reason=str(error))

    def _read_parent(self) -> list[int]:
        """What was before the active version, for a gateway that finds itself started on a store with history."""
        if self.active == BASE_VERSION:
            return []
        try:
            parent = self.store.manifest(self.active).parent
        except (ArtifactError, OSError):
            return []
        return [] if parent is None else [parent]
