"""A taskset of the library `verifiers`, where that is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from rl.environments.interface import Action, Chat
from rl.environments.verifiers import Verifiers, VerifiersConfig
from wire.errors import ConfigError

needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="the package verifiers is not installed"
)
TASKSET = """
import verifiers.v1 as vf

class Doubled(vf.TaskData):
    expected: int

class DoubleTask(vf.Task[Doubled]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.expected))

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class Doubling(vf.Taskset[DoubleTask]):
    def load(self):
        return [DoubleTask(Doubled(prompt=f"Twice {n}?", system_prompt="Be brief.", expected=2 * n)) for n in range(40)]

__all__ = ["Doubling"]
"""


@needs_verifiers
def test_a_taskset_is_played_and_scored_by_its_own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doubling_taskset.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = Verifiers(VerifiersConfig(name="doubling", taskset="doubling_taskset"))

    async def play(seed: int) -> None:
        episode = await environment.reset(seed, "train")
        observation = episode.first.observation
        assert isinstance(observation, Chat)
        assert [message.role for message in observation.messages] == ["system", "user"]
        number = int(observation.messages[-1].content.split()[1].rstrip("?"))
        await episode.step(Action(str(2 * number)))
        scored = await episode.score()
        assert scored.reward == 1.0
        assert scored.info["length"] == len(str(2 * number))
        wrong = await environment.reset(seed, "train")
        await wrong.step(Action("no idea"))
        assert (await wrong.score()).reward == 0.0

    for seed in range(3):
        asyncio.run(play(seed))


def test_without_the_library_the_kind_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])  # no distribution can be found
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    with pytest.raises(ConfigError, match="not installed"):
        Verifiers(VerifiersConfig(name="doubling", taskset="doubling_taskset"))
