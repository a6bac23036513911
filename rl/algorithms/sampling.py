"""Dynamic sampling: groups whose rewards are all the same teach nothing. DAPO (arXiv 2503.14476, eq. 11)."""

from __future__ import annotations

from collections.abc import Sequence

from rl.trajectory import Group


def has_signal(group: Group) -> bool:
    """Whether two of its scored rollouts differ in reward: the advantage of some is not 0."""
    return len({trajectory.reward for trajectory in group.scored}) > 1


def with_signal(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """(groups to learn from, groups to evict so that others take their place), each in the order given."""
    kept = [group for group in groups if has_signal(group)]
    return kept, [group for group in groups if not has_signal(group)]
