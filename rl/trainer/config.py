"""Settings of the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wire.config import Config


class TrainerSettings(Config):
    """`[rl.trainer]`: how a batch of rollouts becomes new weights."""

    learning_rate: float = Field(1e-6, ge=0.0)
    """Of AdamW. 0 changes nothing, and shows how far training and inference are apart by themselves."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which the rate rises linearly to its value."""
    weight_decay: float = Field(0.0, ge=0.0)
    clip_norm: float = Field(1.0, gt=0.0)
    """The gradient's norm is held to this."""
    num_minibatches: int = Field(1, ge=1)
    """Optimiser steps per batch. More than one keeps the policy that took the batch up apart from the one that moves (decoupled loss)."""
    max_output_tokens: int = Field(1024, ge=1)
    """Of the longest rollout, over all its turns; a longer one is an error."""
    pack_tokens: int = Field(1024, ge=1)
    """Tokens of one forward pass; a rollout longer than this has a pass of its own. Rollouts that fit with others of their prompt are
    computed with it once. Memory goes by output tokens times vocabulary, about 20 bytes for each pair."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The engines' dtype: forward passes compute in it and versions are written in it. Weights and optimiser stay in float32."""
    recompute_activations: bool = False
    """Forget activations and compute them again in the backward pass: less memory, a third more work."""
    seed: int = Field(0, ge=0)
    """Of how a batch is split into minibatches."""
    num_checkpoints: int = Field(2, ge=1)
    """The newest so many are kept."""
    num_dumps: int = Field(16, ge=1)
    """Batches on disk; a step can be replayed while its batch and those since the checkpoint before it are there."""
