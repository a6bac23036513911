"""What an engine was started with, as far as rollouts depend on it."""

from __future__ import annotations

from argparse import Namespace

from vllm.config import VllmConfig

from wire.control import GenerateAbilities


def read_generate_abilities(config: VllmConfig, args: Namespace) -> GenerateAbilities:
    """`args` are those of `vllm serve`."""
    return GenerateAbilities(
        serves_tokens=bool(args.enable_scale_out or args.tokens_only),
        logprobs_mode=str(config.model_config.logprobs_mode),
        scheduling_policy=str(config.scheduler_config.policy),
        returns_sampling_mask=bool(config.model_config.return_sampling_mask),
        rejection_sample_method=str(config.speculative_config.rejection_sample_method),
    )
