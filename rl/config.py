"""Settings of a run: `[rl]` and its tables, and the `[[environment]]` tables it draws problems from."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rl.algorithms.config import AlgorithmSettings
from rl.controllers.curriculum import CurriculumSettings
from rl.controllers.temperature import TemperatureSettings
from rl.environments.registry import read_environments as read_environments
from rl.generator.config import GeneratorSettings
from rl.rewards.config import RewardModelSettings, RewardSettings
from rl.trainer.config import TrainerSettings
from wire.config import Config


class HeldoutSettings(Config):
    """`[rl.heldout]`: how well the policy does on problems it is never trained on."""

    every_steps: int = Field(20, ge=1)
    """Besides before the first step and after the last."""
    num_problems: int = Field(64, ge=1)
    """Of each environment; always the same ones, one greedy answer each."""


class RunSettings(Config):
    """`[rl]`: one run, from its first rollout to its last version of the target."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Its directory under `<state>/rl`. A run of the same name goes on where the last one was."""
    num_steps: int = Field(100, ge=1)
    """Batches to train on, counted from the run's beginning; raised, a finished run goes on."""
    groups_per_step: int = Field(8, ge=1)
    """Groups with something to learn from, of one batch; each batch makes a new version of the target."""
    eta: int = Field(1, ge=0)
    """Versions by which the oldest token of a rollout may trail the policy that trains on it; 0: generate and train in turn."""
    num_workers: int = Field(1, ge=1)
    """Processes that environments live in."""
    num_threads: int = Field(1, ge=1)
    """The trainer's, on a CPU."""
    checkpoint_every_steps: int = Field(10, ge=1)
    """A run that was killed makes the steps since then again, from their batches, before it goes on."""
    keep_versions: int = Field(2, ge=1)
    """The newest so many of the target; the active one and the one before it stay in any case."""
    generator: GeneratorSettings = GeneratorSettings()
    trainer: TrainerSettings = TrainerSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    reward: RewardSettings = RewardSettings()
    reward_model: RewardModelSettings | None = None
    """None: rules alone."""
    temperature: TemperatureSettings | None = None
    """None: `generator.temperature` stays; else that of rollouts that begin goes by the controller."""
    curriculum: CurriculumSettings | None = None
    """None: each environment's problems in their order."""
    heldout: HeldoutSettings | None = None
    """None: nothing is measured but what is trained on."""

    @model_validator(mode="after")
    def _parts_go_together(self) -> Self:
        longest, limit = self.generator.max_output_tokens, self.trainer.max_output_tokens
        if longest != limit:
            raise ValueError(
                f"generator.max_output_tokens is {longest} and trainer.max_output_tokens {limit}; give both the same limit"
            )
        if self.trainer.num_dumps < self.checkpoint_every_steps:
            raise ValueError(
                f"trainer.num_dumps is {self.trainer.num_dumps}, but up to {self.checkpoint_every_steps} steps are made again after a "
                "kill; keep as many batches as checkpoint_every_steps at least"
            )
        return self
