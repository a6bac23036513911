"""Settings of what is learned from rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from wire.config import Config

Objective = Literal["clip", "cispo", "gspo"]
Share = Literal["token", "sequence", "constant"]
Advantage = Literal["mean", "group_std", "batch_std", "token_batch_std"]


@dataclass(frozen=True)
class Recipe:
    """What an algorithm's name stands for; the functions are in `objectives`, `shares` and `advantages`."""

    objective: Objective
    share: Share
    advantage: Advantage
    clip_low: float
    clip_high: float


RECIPES = {
    # Yu et al., "DAPO", arXiv 2503.14476, with R - mean in place of its standardised advantage.
    "dapo": Recipe("clip", "token", "mean", 0.2, 0.28),
    # Shao et al., "DeepSeekMath", arXiv 2402.03300.
    "grpo": Recipe("clip", "sequence", "group_std", 0.2, 0.2),
    # Liu et al., "Understanding R1-Zero-like training", arXiv 2503.20783.
    "dr_grpo": Recipe("clip", "constant", "mean", 0.2, 0.2),
    # MiniMax-M1, arXiv 2506.13585: no lower limit; the upper one of ScaleRL, arXiv 2510.13786, a ratio of 5.
    "cispo": Recipe("cispo", "token", "batch_std", 1.0, 4.0),
    # Zheng et al., "Group sequence policy optimization", arXiv 2507.18071.
    "gspo": Recipe("gspo", "sequence", "group_std", 3e-4, 4e-4),
    # Hu et al., "REINFORCE++", arXiv 2501.03262, its variant with the group's mean as baseline.
    "reinforce++": Recipe("clip", "token", "token_batch_std", 0.2, 0.2),
}


class CorrectionSettings(Config):
    """`[rl.algorithm.correction]`: what is done about tokens the engine drew with other probabilities than the trainer sees."""

    token_weight: Literal["truncate", "band", "none"] = "truncate"
    """`truncate`: pi/mu, at most `importance_cap` (TIS). `band`: pi/mu inside `token_band`, else nothing (IcePop)."""
    importance_cap: float = Field(2.0, ge=1.0)
    token_band: tuple[float, float] = (0.5, 5.0)
    sequence_band: tuple[float, float] | None = (0.99, 1.01)
    """A sequence counts if the geometric mean of its pi/mu lies inside; None: each does. The default suits long answers in step with
    the weights; answers of a few tokens, or ones made several updates ago, need a wider one."""
    off_policy_delta: float | None = Field(None, ge=0.0)
    """A sequence with negative advantage counts only if its mean log(mu/pi) is at most this; None: each does."""

    @model_validator(mode="after")
    def _bands_hold_one(self) -> Self:
        for name in ("token_band", "sequence_band"):
            band = getattr(self, name)
            if band is not None and not 0.0 <= band[0] <= 1.0 <= band[1]:
                raise ValueError(f"{name} is {band}; it is [low, high] around 1, the ratio of equal policies")
        return self


class AlgorithmSettings(Config):
    """`[rl.algorithm]`: how rewards become a loss."""

    name: Literal["dapo", "grpo", "dr_grpo", "cispo", "gspo", "reinforce++"] = "dapo"
    advantage: Advantage | None = None
    """None: the algorithm's own. `mean`: R minus the group's mean; `group_std`: that over the group's standard deviation;
    `batch_std`, `token_batch_std`: over the batch's, each sequence or each token counting once."""
    clip_low: float | None = Field(None, gt=0.0, le=1.0)
    """The policy's ratio is held above 1 - this; None: the algorithm's own."""
    clip_high: float | None = Field(None, gt=0.0)
    """... and below 1 + this."""
    kl_weight: float = Field(0.0, ge=0.0)
    """Of the KL to the reference policy, which is then kept in memory."""
    drop_equal_rewards: bool = True
    """Leave out groups whose rewards are all the same: they have no gradient, others take their place (DAPO's dynamic sampling)."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """So many tokens below the longest answer the reward begins to fall, by 1 at the end (DAPO's soft punishment)."""
    correction: CorrectionSettings = CorrectionSettings()

    @property
    def recipe(self) -> Recipe:
        """The algorithm's, with what the settings say instead."""
        own = RECIPES[self.name]
        return Recipe(
            objective=own.objective,
            share=own.share,
            advantage=own.advantage if self.advantage is None else self.advantage,
            clip_low=own.clip_low if self.clip_low is None else self.clip_low,
            clip_high=own.clip_high if self.clip_high is None else self.clip_high,
        )
