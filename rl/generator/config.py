"""Settings of the generator.

What would make the drawn distribution another one than the trainer computes (top-p, top-k, min-p, penalties) has no key on purpose.
"""

from __future__ import annotations

from pydantic import Field

from rl.controllers.concurrency import ConcurrencyLimits
from wire.config import Config


class GeneratorSettings(Config):
    """`[rl.generator]`: how problems become groups of rollouts."""

    group_size: int = Field(8, ge=2)
    """Rollouts of one prompt."""
    temperature: float = Field(1.0, gt=0.0, le=2.0)
    """Above 0: greedy answers have no probabilities to learn from."""
    max_turn_tokens: int = Field(256, ge=1)
    """Of one answer."""
    max_output_tokens: int = Field(1024, ge=1)
    """Of one rollout, over all its turns; the trainer's limit."""
    max_context_tokens: int = Field(2048, ge=2)
    """Prompts, answers and replies together; what the engines' context window holds."""
    silence_s: float = Field(600.0, gt=0.0)
    """A stream that brings nothing for so long is given up and goes on elsewhere; the wait in the engines' queue counts."""
    concurrency: ConcurrencyLimits = ConcurrencyLimits(least=1, most=256)
    """Rollouts in the engines at a time."""
    seed: int = Field(0, ge=0)
    """All random numbers of the engines follow from it."""
