"""A running group: its rollouts while they are played, and what they make together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from rl.controllers.priority import GroupOutlook
from rl.environments.interface import Problem
from rl.generator.state import OpenGroup, OpenRollout
from rl.generator.turns import RunningRollout
from rl.staleness.ledger import Entry
from rl.trajectory import Group, Trajectory

_SUCCESS = 0.5
"""Rewards above it."""


@dataclass(eq=False, slots=True)
class RunningGroup:
    problem: Problem
    temperature: float
    group_id: int
    rollouts: tuple[RunningRollout, ...]

    @classmethod
    def begin(cls, entry: Entry, *, group_size: int, temperature: float, now_s: float) -> RunningGroup:
        rollouts = tuple(OpenRollout(sample_index=index, submitted_s=now_s) for index in range(group_size))
        return cls.resume(entry, OpenGroup(group_id=entry.group_id, temperature=temperature, rollouts=rollouts))

    @classmethod
    def resume(cls, entry: Entry, saved: OpenGroup) -> RunningGroup:
        rollouts = tuple(
            RunningRollout(entry.group_id, entry.environment, saved.temperature, rollout) for rollout in saved.rollouts
        )
        return cls(Problem(entry.environment, entry.environment_seed), saved.temperature, entry.group_id, rollouts)

    @property
    def unfinished(self) -> list[RunningRollout]:
        return [rollout for rollout in self.rollouts if not rollout.saved.finished]

    def save(self) -> OpenGroup:
        rollouts = tuple(rollout.snapshot() for rollout in self.rollouts)
        return OpenGroup(group_id=self.group_id, temperature=self.temperature, rollouts=rollouts)

    def complete(self) -> Group:
        """Of finished rollouts: one trajectory each in their order, then the forks. Raises RolloutError where they do not go together."""
        return Group(trajectories=tuple(_numbered([rollout.saved.finished for rollout in self.rollouts])))

    def outlook(self, num_updates_left: float) -> GroupOutlook:
        rewards = [rollout.saved.finished[0].reward for rollout in self.rollouts if rollout.saved.finished]
        num_successes = sum(reward > _SUCCESS for reward in rewards)
        return GroupOutlook(
            num_unfinished=len(self.unfinished),
            num_successes=num_successes,
            num_failures=len(rewards) - num_successes,
            num_updates_left=num_updates_left,
        )


def _numbered(rollouts: list[tuple[Trajectory, ...]]) -> Iterator[Trajectory]:
    for index, trajectories in enumerate(rollouts):
        yield replace(trajectories[0], sample_index=index)
    next_index = len(rollouts)
    for index, trajectories in enumerate(rollouts):
        before = index
        for fork in trajectories[1:]:
            yield replace(fork, sample_index=next_index, forked_from=before)
            before, next_index = next_index, next_index + 1
