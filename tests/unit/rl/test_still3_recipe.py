"""The recipe of a published run: what it makes of this system, and its whole run with a tiny policy in place of the large one."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from generator_rig import run
from rl_run_rig import RunRig, make_system, run_rig
from safetensors.torch import load_file

from launch.cli import main
from launch.config import SystemConfig
from rl.config import read_environments
from rl.environments.math import MathConfig
from rl.generator.rendering import TargetText
from rl.run import command
from rl.run.directory import RunDirectory
from rl.trainer.config import TrainerSettings
from rl.trainer.policy import Policy
from wire.target import BASE_VERSION

RECIPE = Path(__file__).resolve().parents[3] / "configs" / "rl-still3.toml"
NUM_STEPS, GROUPS, MAX_TOKENS = 3, 2, 32
TINY = [
    "target.dtype=float32",
    f"rl.num_steps={NUM_STEPS}",
    f"rl.groups_per_step={GROUPS}",
    "rl.num_workers=1",
    "rl.heldout.num_problems=4",
    f"rl.generator.max_turn_tokens={MAX_TOKENS}",
    f"rl.generator.max_output_tokens={MAX_TOKENS}",
    "rl.generator.concurrency={least=16, most=16}",
    "rl.trainer.dtype=float32",
    f"rl.trainer.max_output_tokens={MAX_TOKENS}",
    "rl.trainer.pack_tokens=512",
]
"""What a tiny policy on a CPU needs; all else is the recipe's."""
SAYINGS = (r"\boxed{7}", r"It is \boxed{8}")
"""The first is right."""


def test_the_plan_gives_each_engine_a_gpu_and_what_rollouts_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.host.installed_vllm", lambda: "vllm")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert main(["plan", "--json", "--config", str(RECIPE)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["target_dir"] == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    assert [spec["role"] for spec in plan["processes"]] == ["engine"] * 4 + ["learner", "gateway"]
    engines = plan["processes"][:4]
    assert [spec["env"]["CUDA_VISIBLE_DEVICES"] for spec in engines] == ["0", "1", "2", "3"]
    for spec in engines:
        argv = spec["argv"]
        options = {word: argv[place + 1] for place, word in enumerate(argv[:-1]) if word.startswith("--")}
        assert "--enable-scale-out" in argv
        assert options["--scheduling-policy"] == "priority"
        assert options["--logprobs-mode"] == "processed_logprobs"
        assert options["--dtype"] == "bfloat16"
        assert options["--tensor-parallel-size"] == "1"
        assert options["--max-model-len"] == "30720"
        assert json.loads(options["--speculative-config"])["method"] == "eagle3"


def test_the_recipe_has_the_published_numbers_and_its_parts_fit() -> None:
    config = SystemConfig.load([RECIPE])
    settings, (environment,) = config.rl, read_environments(config.environment, source="test")
    generator, trainer, algorithm = settings.generator, settings.trainer, settings.algorithm
    assert (settings.groups_per_step, generator.group_size, generator.temperature) == (128, 8, 1.0)
    assert settings.groups_per_step * generator.group_size // trainer.num_minibatches == 512
    assert (trainer.learning_rate, trainer.warmup_steps, algorithm.kl_weight) == (2e-6, 0, 1e-3)
    assert (generator.max_output_tokens, generator.max_context_tokens - generator.max_output_tokens) == (29000, 1024)
    recipe = algorithm.recipe
    assert (recipe.advantage, recipe.share, recipe.clip_low, recipe.clip_high) == ("group_std", "sequence", 0.2, 0.2)
    assert isinstance(environment, MathConfig)

    num_seats = len(config.pool) * config.engine["max_num_seqs"]
    assert generator.concurrency.most <= num_seats
    assert generator.concurrency.most < config.admission.max_in_flight
    assert generator.max_context_tokens <= config.engine["max_model_len"]
    assert trainer.dtype == config.target.dtype
    assert config.rollouts.enabled


class Spoken:
    """What the stand-in for engines says, with the log-probabilities that the target of its version gives to it."""

    def __init__(self, rig: RunRig) -> None:
        self._rig = rig
        target = rig.system.target_dir
        self._policy = Policy(target, TrainerSettings(), torch.device("cpu"))
        self._version = BASE_VERSION
        tokens = TargetText.load(target)
        self._sayings = [(*tokens.encode(saying), tokens.stop_token_ids[0]) for saying in SAYINGS]
        rig.engines.speak, rig.engines.logprob_of = self.token, self.logprob

    def token(self, number: int, index: int, _: list[int]) -> int:
        return Random(number).choice(self._sayings)[index]

    def logprob(self, context: list[int]) -> float:
        if self._version != self._rig.engines.version:
            self._version = self._rig.engines.version
            self._policy.model.load_state_dict(load_file(self._rig.admin.store.weights(self._version)))
        return min(0.0, self._policy.logprobs(context)[-1])


def write_problems(path: Path) -> Path:
    """Sums that all make 7, with a field more than is read."""
    problems: list[dict[str, Any]] = [
        {"question": f"What is {number + 7} - {number}?", "answer": r"\frac{14}{2}", "messages": []} for number in range(40)
    ]
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return path


@pytest.mark.rig
@pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None,
    reason="the package math-verify is not installed: pip install 'paceline[rl]'",
)
def test_the_recipe_runs_whole_with_a_tiny_policy(tmp_path: Path) -> None:
    config = SystemConfig.load([RECIPE], TINY)
    table = dict(config.environment[0]) | {"path": str(write_problems(tmp_path / "problems.jsonl")), "num_processes": 1}
    environments = read_environments([table], source="test")

    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            Spoken(rig)
            system = make_system(tmp_path, rig.engines.url, rig.admin.url)
            await asyncio.to_thread(command.run, config.rl, environments, system, rig.said.append)
            check(rig, RunDirectory.of(tmp_path, "still3"))

    run(scenario())


def check(rig: RunRig, directory: RunDirectory) -> None:
    metrics = directory.metrics.read()
    assert [each.version for each in metrics] == list(range(1, NUM_STEPS + 1))
    assert rig.engines.version == NUM_STEPS
    for each in metrics:
        report = each.report
        assert report.num_groups == GROUPS
        assert report.num_rollouts + report.num_failed == 8 * GROUPS
        assert report.num_failed == 0
        assert [update.learning_rate for update in report.updates] == [2e-6, 2e-6]
        # Engine and trainer agree, and an update moves the policy by less than the mask allows: every rollout counts.
        assert all(update.masked_fraction == update.truncated_fraction == 0.0 for update in report.updates)
        assert report.staleness is not None
        assert report.staleness.worst <= 1
    rewards = [each.report.rewards.mean for each in metrics if each.report.rewards is not None]
    assert len(rewards) == NUM_STEPS
    assert 0.0 < sum(rewards) < NUM_STEPS
    floors = [each.report.floor for each in metrics if each.report.floor is not None]
    assert floors
    assert max(floor.abs_logprob.max for floor in floors) < 1e-4
    assert any(update.kl_loss for each in metrics for update in each.report.updates), (
        "the KL to the first policy is in the loss"
    )

    base = load_file(rig.system.target_dir / "model.safetensors")
    newest = load_file(rig.admin.store.weights(NUM_STEPS))
    assert any(not torch.equal(base[name], newest[name]) for name in base)
    heldout = directory.heldout.read()
    assert [(result.num_steps, len(result.rewards)) for result in heldout] == [(0, 4), (NUM_STEPS, 4)]
    asked = [body["sampling_params"]["temperature"] for body in rig.engines.bodies if body["stream"]]
    assert set(asked) == {0.0, 1.0}
