"""Finished groups on disk, one file each: those that wait survive a kill, and those that are gone can be looked at for a while."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rl.trajectory import Group, decode_group, encode_group
from wire.errors import RolloutError

NUM_KEPT = 256
"""The newest groups, beside those that are still needed."""
_SUFFIX = ".group"


class FinishedGroups:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def ids(self) -> list[int]:
        """Ascending."""
        paths = self._directory.glob(f"*{_SUFFIX}")
        return sorted(int(path.stem) for path in paths if path.stem.isdecimal())

    def write(self, group: Group) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._path(group.group_id)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(encode_group(group))
        temporary.rename(path)

    def read(self, group_id: int) -> Group:
        """Raises RolloutError where it is gone or damaged."""
        try:
            return decode_group(self._path(group_id).read_bytes())
        except OSError as error:
            raise RolloutError(f"group {group_id} is not on disk: {error}; the newest {NUM_KEPT} are kept") from error

    def prune(self, needed: Collection[int]) -> None:
        for group_id in self.ids()[:-NUM_KEPT]:
            if group_id not in needed:
                self._path(group_id).unlink(missing_ok=True)

    def forget_from(self, group_id: int) -> None:
        """Groups of these ids and higher are of a course that the run went back on; the ids are given anew."""
        for other in self.ids():
            if other >= group_id:
                self._path(other).unlink(missing_ok=True)

    def _path(self, group_id: int) -> Path:
        return self._directory / f"{group_id}{_SUFFIX}"
