"""Settings of rewards."""

from __future__ import annotations

from pydantic import Field

from wire.config import Config


class RewardModelSettings(Config):
    """`[rl.reward_model]`: a small verifier that is trained along with the policy (Cooper). It judges answers of environments that
    know a right one; held-out problems are never judged by it."""

    weight: float = Field(0.0, ge=0.0, le=1.0)
    """Of its score in the reward; what the environment says has the rest. 0: it is trained and watched, 1: the rule is left to watch. Above
    0, answers on which the rule says the same earn differently: hardly any group is without signal then, those that are all right included."""
    learning_rate: float = Field(0.5, gt=0.0)
    gap_weight: float = Field(1.0, ge=0.0)
    """Of the contrastive loss between a right answer and its corruption, beside each one's own."""
    decay: float = Field(1e-4, ge=0.0, lt=1.0)
    """Of its weights per update, so that what a policy no longer writes is forgotten: half of it after 0.7 / decay updates."""
    max_disagreement: float = Field(0.1, gt=0.0, lt=1.0)
    """A larger share is an alarm: of answers the model accepts, those the rule refuses; of those the rule accepts, those the model refuses; of
    right ones that were changed, those the rule still accepts."""


class RewardSettings(Config):
    """`[rl.reward]`: what the environment's verdicts count."""

    weights: dict[str, float] = Field(default_factory=dict)
    """In place of an environment's own, by the part's name; 0 watches it only. `reward_model` is the reward model's, within its share."""
    only_if: dict[str, str] = Field(default_factory=dict)
    """A part counts only where another one is 1: `{brevity = "correct"}` rewards no short wrong answers,
    `{reward_model = "correct"}` none that only the reward model likes."""
    max_length_correlation: float = Field(0.3, gt=0.0, lt=1.0)
    """Of length and reward among answers to one prompt; more is an alarm."""
