"""A run with a reward model: it scores what finishes, learns from what is trained on, and is where it was after a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from generator_rig import TALK, importable, make_target, run
from rl_run_rig import RunRig, child, kill_after, make_settings, run_rig
from safetensors import safe_open

from rl.environments.interface import Action, Problem, Scored
from rl.environments.pool import EnvironmentPool, RemoteEpisode
from rl.environments.registry import read_environments
from rl.rewards.config import RewardModelSettings
from rl.rewards.reward_model import RewardModel
from rl.run.rule import would_be_right
from rl.run.why import why
from rl.trainer.checkpoint import Checkpoints, Progress
from rl.trainer.dumps import Dumps

SUMS = {"name": "sums", "kind": "addition"}
WEIGHT = 0.25


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    importable(monkeypatch)


def speaker(state_dir: Path, styles: tuple[str, ...]) -> Callable[[int, int, list[int]], int]:
    """Every other answer or so is the sum, the others are one more; each in one of the styles."""
    target = make_target(state_dir / "model")

    def speak(number: int, index: int, context: list[int]) -> int:
        prompt, _, begun = target.decode(tuple(context), special=False).rpartition("assistant\n")
        a, b = [int(word) for word in prompt.replace("?", "").split() if word.isdigit()]
        answers = [style.replace("{}", str(a + b + off)) for style in styles for off in (0, 1)]
        fitting = [answer for answer in answers if answer.startswith(begun)]
        rest = fitting[number % len(fitting)].removeprefix(begun)
        return target.encode(rest)[0] if rest else target.stop_token_ids[0]

    return speak


def relearned(rig: RunRig, num_steps: int) -> bytes:
    """A model that learned from the pairs on disk from the beginning, one step after the other."""
    model = RewardModel(RewardModelSettings())
    dumps = Dumps(rig.directory.dumps, num_kept=16)
    for step in range(num_steps):
        model.update(dumps.batch(step).pairs)
    return model.state()


def saved(rig: RunRig, step: int) -> bytes:
    with safe_open(rig.directory.checkpoints / f"{step}.safetensors", framework="pt") as opened:
        return msgspec.msgpack.decode(opened.get_tensor("progress").numpy().tobytes(), type=Progress).rewards


def test_the_model_scores_what_finishes_and_learns_from_what_is_trained_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path, environment=SUMS, speak=speaker(tmp_path, ("Answer: {}", "It is {}"))) as rig:
            await rig.conduct(make_settings(reward_model={"weight": WEIGHT}))
            groups = [rig.directory.finished.read(group_id) for group_id in rig.directory.finished.ids()]
            for trajectory in (each for group in groups for each in group.trajectories):
                rule, model = trajectory.reward_parts
                assert (rule.name, rule.weight) == ("correct", 1.0 - WEIGHT)
                assert (model.name, model.weight) == ("reward_model", WEIGHT)
                assert trajectory.reward == pytest.approx(rule.value * (1.0 - WEIGHT) + model.value * WEIGHT)
            untaught = [
                each for group in Dumps(rig.directory.dumps, num_kept=16).batch(0).groups for each in group.trajectories
            ]
            assert {each.reward_parts[1].value for each in untaught} == {0.5}
            metrics = rig.directory.metrics.read()
            reports = [each.reward_model for each in metrics if each.reward_model is not None]
            assert len(reports) == 4
            assert sum(report.num_pairs for report in reports) > 8
            assert reports[-1].loss < reports[0].loss
            assert all(each.lesson_s > 0.0 for each in metrics)
            pairs = [pair for step in range(4) for pair in Dumps(rig.directory.dumps, num_kept=16).batch(step).pairs]
            assert all(pair.right.reference in pair.right.completion for pair in pairs)
            assert all(pair.right.completion != pair.wrong.completion for pair in pairs)
            assert saved(rig, 4) == relearned(rig, 4)
            page = "\n".join(why(tmp_path, "run", None))
            assert "the reward model and the rule disagree on " in page

    run(scenario())


def test_a_killed_run_goes_on_with_the_model_it_had(tmp_path: Path) -> None:
    """From the checkpoint after three steps, and the pairs of the fourth one."""
    settings = {"reward_model": {"weight": WEIGHT}, "num_steps": 6, "checkpoint_every_steps": 3}

    async def scenario() -> None:
        speak = speaker(tmp_path, ("Answer: {}", "It is {}"))
        async with run_rig(tmp_path, environment=SUMS, speak=speak, pause_s=0.01) as rig:
            await kill_after(rig, 4, 0, **settings)
            assert Checkpoints(rig.directory.checkpoints, num_kept=2).steps() == [3]
            assert Dumps(rig.directory.dumps, num_kept=16).batch(3).pairs
            assert await child(rig, **settings).wait() == 0
            assert [each.report.step for each in rig.directory.metrics.read()] == list(range(6))
            assert saved(rig, 6) == relearned(rig, 6)

    run(scenario())


def test_a_run_without_a_model_is_as_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path, environment=SUMS, speak=speaker(tmp_path, ("Answer: {}",))) as rig:
            await rig.conduct(make_settings(num_steps=1))
            (group_id, *_) = rig.directory.finished.ids()
            group = rig.directory.finished.read(group_id)
            assert [[part.name for part in each.reward_parts] for each in group.trajectories] == [["correct"]] * 3
            assert rig.directory.metrics.read()[0].reward_model is None
            assert saved(rig, 1) == b""
            assert "the rule disagree" not in "\n".join(why(tmp_path, "run", None))

    run(scenario())


def test_an_environment_of_several_turns_is_asked_about_another_ending() -> None:
    async def scenario() -> None:
        configs = read_environments([{"name": "shop", "kind": "tools"}], source="test")
        pool = await EnvironmentPool.start(configs, num_workers=1)
        try:
            problem = Problem("shop", 5)
            episode = await pool.reset(problem)
            assert isinstance(episode, RemoteEpisode)
            scored = await episode.score()
            assert isinstance(scored, Scored)
            assert scored.reference is not None
            looked_up = Action('<tool_call>{"name": "lookup", "arguments": {"item": "jar"}}</tool_call>')
            for answer, expected in ((scored.reference, True), (scored.reference + "1", False)):
                ending = Action(f"The answer is {answer}.")
                assert await would_be_right(pool, problem, [looked_up, ending]) is expected
        finally:
            await pool.close()

    run(scenario())


def test_an_environment_that_fails_when_asked_again_says_nothing() -> None:
    async def scenario() -> None:
        configs = read_environments([TALK | {"parameters": {"broken_from": 3}}], source="test")
        pool = await EnvironmentPool.start(configs, num_workers=1)
        try:
            assert await would_be_right(pool, Problem("talk", 3), [Action("yes")]) is None
        finally:
            await pool.close()

    run(scenario())
