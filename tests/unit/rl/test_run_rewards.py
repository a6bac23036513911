"""What a run's rollouts earn where a reward model is trained along, and what it is taught; without engines or workers."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from generator_rig import make_target
from rl_samples import make_trajectory, make_turn

from rl.config import RunSettings
from rl.generator.rendering import TargetText
from rl.rewards.claims import Claim, Pair
from rl.rewards.reward_model import RewardModel
from rl.run import rewards as rewards_module
from rl.run.rewards import Rewards
from rl.trajectory import Group, RewardPart
from wire.errors import RolloutError

RIGHT, WRONG = "Answer: 7", "Answer: 8"


def taught(**settings: Any) -> tuple[RunSettings, RewardModel]:
    """A model that knows these two from one another."""
    run_settings = RunSettings.build(settings, source="test")
    assert run_settings.reward_model is not None
    model = RewardModel(run_settings.reward_model)
    for _ in range(5):
        model.update([Pair(Claim("7", RIGHT), Claim("7", WRONG))])
    return run_settings, model


def group_of(target: TargetText, *, reference: str | None = "7", part: str = "correct") -> Group:
    """A right answer and a wrong one."""
    trajectories = []
    for index, text in enumerate((RIGHT, WRONG)):
        token_ids = target.encode(text)
        turn = make_turn([0] * len(token_ids), output_token_ids=token_ids)
        parts = (RewardPart(part, float(text == RIGHT)),)
        trajectories.append(make_trajectory(sample_index=index, turns=(turn,), reward_parts=parts, reference=reference))
    return Group(trajectories=tuple(trajectories))


def given(tmp_path: Path, group_settings: dict[str, Any] | None = None, **settings: Any) -> list[dict[str, float]]:
    """By rollout: each part's weight."""
    target = make_target(tmp_path)
    rewards = Rewards(*taught(**settings), pool=None, target=target)  # type: ignore[arg-type]
    group = rewards.give(group_of(target, **(group_settings or {})))
    return [{part.name: part.weight for part in trajectory.reward_parts} for trajectory in group.trajectories]


def test_the_models_part_counts_only_where_the_settings_of_the_reward_let_it(tmp_path: Path) -> None:
    model = {"weight": 0.25}
    assert given(tmp_path, reward_model=model) == [{"correct": 0.75, "reward_model": 0.25}] * 2
    assert given(tmp_path, reward_model=model, reward={"only_if": {"reward_model": "correct"}}) == [
        {"correct": 0.75, "reward_model": 0.25},
        {"correct": 0.75, "reward_model": 0.0},
    ]
    halved = {"weights": {"correct": 2.0, "reward_model": 0.5}}
    assert given(tmp_path, reward_model=model, reward=halved) == [{"correct": 1.5, "reward_model": 0.125}] * 2


def test_an_environment_without_a_right_answer_has_its_own_reward_alone(tmp_path: Path) -> None:
    assert given(tmp_path, {"reference": None}, reward_model={"weight": 0.25}) == [{"correct": 1.0}] * 2


def test_an_environments_part_may_not_be_called_as_the_models(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="different names"):
        given(tmp_path, {"part": "reward_model"}, reward_model={})


class SlowText:
    """Decodes only once the event loop has gone on."""

    def __init__(self, target: TargetText) -> None:
        self.encode, self._target = target.encode, target
        self.loop_went_on = threading.Event()

    def decode(self, token_ids: tuple[int, ...], *, special: bool) -> str:
        assert self.loop_went_on.wait(10.0), "the event loop waits for the decoding"
        return self._target.decode(token_ids, special=special)


def test_streams_are_read_while_a_batch_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> bool:
        return False

    monkeypatch.setattr(rewards_module, "would_be_right", refused)
    text = SlowText(make_target(tmp_path))
    rewards = Rewards(*taught(reward_model={}), pool=None, target=text)  # type: ignore[arg-type]

    async def scenario() -> list[Pair]:
        batch = [group_of(make_target(tmp_path))]
        lesson = asyncio.create_task(rewards.lesson(batch, step=0))
        await asyncio.sleep(0.05)
        text.loop_went_on.set()
        return list((await lesson).pairs)

    (pair,) = asyncio.run(scenario())
    assert pair.right == Claim("7", RIGHT)
    assert pair.wrong.completion.startswith("Answer: ")
    assert pair.wrong.completion != RIGHT
