"""How long vLLM lets an answer be, for a gateway that has another engine go on with one."""

from __future__ import annotations

from vllm.config import ModelConfig

from wire.control import AnswerLimits


def read_answer_limits(config: ModelConfig) -> AnswerLimits:
    """As OpenAIServingChat resolves them (entrypoints/openai/chat_completion/serving.py): a generation configuration that the
    operator named, and `max_new_tokens` that he overrode, bind every request; the model's own is a default only."""
    default = config.get_diff_sampling_param().get("max_tokens")
    is_cap = config.generation_config not in ("auto", "vllm") or "max_new_tokens" in config.override_generation_config
    return AnswerLimits(default=default, cap=default if is_cap else None)
