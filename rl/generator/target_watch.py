"""Which target certainly made a token whose stream broke before it said so.

Engines tell the versions of an answer's tokens with its end (`weight_versions`), and of an answer that breaks off nothing is known but
the version it began with. Every change of the target is announced here before the gateway is asked for it; what had arrived by then
was made by the version the stream began with. What arrived later cannot be attributed, is counted and drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """The state of affairs when a request was sent."""

    num_changes: int
    was_changing: bool


class TargetWatch:
    """One per run; whoever changes the target calls `begin` and `end`."""

    def __init__(self, version: int) -> None:
        self.version = version
        """Of the target every engine served when the last change ended."""
        self._num_changes = 0
        self._is_changing = False

    def begin(self) -> None:
        """The gateway is about to be asked for another target."""
        self._num_changes += 1
        self._is_changing = True

    def end(self, version: int) -> None:
        """It has answered: every engine serves `version`, the old one where it refused."""
        self.version = version
        self._is_changing = False

    def mark(self) -> Mark:
        return Mark(self._num_changes, self._is_changing)

    def is_certain(self, mark: Mark, begun_with: int | None) -> bool:
        """Whether all that has arrived since the mark is of `begun_with`, the version a stream's head named."""
        is_calm = not mark.was_changing and mark.num_changes == self._num_changes
        return is_calm and begun_with == self.version
