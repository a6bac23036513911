"""Which problem a new group is of: environments take turns; in each, one problem after the other, or the curriculum's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl.controllers import curriculum
from rl.controllers.curriculum import Curriculum, CurriculumSettings, GroupOutcome
from rl.environments.interface import Problem
from rl.trajectory import Group

_PASSED = 0.5
"""Rewards above it."""


class Problems:
    """states: of the curriculum by environment, where there is one. What was chosen and not begun at a kill is chosen anew."""

    def __init__(
        self,
        environments: Sequence[str],
        settings: CurriculumSettings | None,
        states: Mapping[str, Curriculum],
        *,
        groups_per_round: int,
    ) -> None:
        self._environments = environments
        self._settings = settings
        self._groups_per_round = groups_per_round
        self._chosen: dict[str, list[int]] = {name: [] for name in environments}
        self._outcomes: dict[str, list[GroupOutcome]] = {name: [] for name in environments}
        self.states = {name: states.get(name, Curriculum()) for name in environments} if settings is not None else {}

    def of(self, group_id: int) -> Problem:
        round_number, turn = divmod(group_id, len(self._environments))
        environment = self._environments[turn]
        return Problem(environment, round_number if self._settings is None else self._choose(environment, self._settings))

    def note(self, group: Group) -> None:
        """How a group came out. One of a problem that the curriculum does not have, because its settings changed, says nothing."""
        if self._settings is None or group.environment_seed >= self._settings.num_problems:
            return
        rewards = [rollout[0].reward for rollout in group.scored_rollouts]
        num_passed = sum(reward > _PASSED for reward in rewards)
        self._outcomes[group.environment].append(GroupOutcome(group.environment_seed, num_passed, len(rewards) - num_passed))

    def _choose(self, environment: str, settings: CurriculumSettings) -> int:
        if not self._chosen[environment]:
            state, decision = curriculum.decide(
                settings, self.states[environment], self._outcomes[environment], self._groups_per_round
            )
            self.states[environment] = state
            self._outcomes[environment] = []
            self._chosen[environment] = list(decision.problems)
        return self._chosen[environment].pop()
