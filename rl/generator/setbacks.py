"""Groups that fail one after the other: how long to wait before the next ones begin, and when that has no sense any more.

Failures come in waves: with hundreds of groups under way, many that begin together may fail together. So only a group that began after
the last counted failure counts as the next one, and a share of broken problems ends no run whose other groups come about.
"""

from __future__ import annotations

from wire.errors import RolloutError

MAX_IN_A_ROW = 32
"""Without a finished group; with the pauses between them about four minutes of nothing but failures."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 10.0
"""Doubles with each in a row."""


class Setbacks:
    """now_s: of any clock that does not go back."""

    def __init__(self) -> None:
        self._num_in_a_row = 0
        self._next_group_id = 0
        """Groups from here on began after the last counted failure."""
        self.paused_until_s = 0.0

    def failed(self, group_id: int, reason: object, *, next_group_id: int, now_s: float) -> None:
        """next_group_id: of the first group that will begin from now on. Raises RolloutError after MAX_IN_A_ROW."""
        if group_id < self._next_group_id:
            return
        self._next_group_id = next_group_id
        self._num_in_a_row += 1
        if self._num_in_a_row == MAX_IN_A_ROW:
            raise RolloutError(
                f"groups failed {MAX_IN_A_ROW} times in a row and none was finished, the last, group {group_id}, because {reason}; "
                "mend the gateway or the environment this names and go on from the checkpoint"
            )
        self.paused_until_s = now_s + min(FIRST_PAUSE_S * 2.0 ** (self._num_in_a_row - 1), LAST_PAUSE_S)

    def succeeded(self) -> None:
        """A group was finished."""
        self._num_in_a_row = 0
        self.paused_until_s = 0.0
