"""What a rollout's verdicts count together."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from rl.rewards.config import RewardSettings
from rl.trajectory import RewardPart
from wire.errors import RolloutError


def combine(parts: Sequence[RewardPart], settings: RewardSettings) -> tuple[RewardPart, ...]:
    """The parts with the weights they have in this run: no part is left out, one that does not count is watched.

    Raises RolloutError where a part that has to be there for another one is not, or a name is there twice.
    """
    values = {part.name: part.value for part in parts}
    if len(values) < len(parts):
        raise RolloutError(f"reward parts {[part.name for part in parts]} are not all of different names; rename one")
    return tuple(replace(part, weight=_weight(part, values, settings)) for part in parts)


def _weight(part: RewardPart, values: dict[str, float], settings: RewardSettings) -> float:
    weight = settings.weights.get(part.name, part.weight)
    condition = settings.only_if.get(part.name)
    if condition is None:
        return weight
    if condition not in values:
        raise RolloutError(
            f"{part.name!r} counts only if {condition!r} is 1, and the environment gives {sorted(values)}; "
            f"mend only_if.{part.name}"
        )
    return weight if values[condition] == 1.0 else 0.0
