"""How long an answer may be: what the gateway reckons for the rest of a broken one is what vLLM gives an unbroken one."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

from server.engine.answer_limits import read_answer_limits
from server.paths import CHAT_PATH
from server.relay.resumable import max_tokens_left, read_wishes

NUM_PROMPT = 10
MAX_MODEL_LEN = 100
CAP = """\
            self.default_sampling_params.get("max_tokens")
            if mc.generation_config not in ("auto", "vllm")
            else getattr(mc, "override_generation_config", {}).get("max_new_tokens")
"""
"""How vLLM's servers resolve what binds every request."""


def model_config(tiny_target: Path, tmp_path: Path, source: str, override: dict[str, Any]) -> ModelConfig:
    """Of a model whose generation_config.json says 20 new tokens, and an operator's that says 40."""
    model, operators = tmp_path / "model", tmp_path / "operators"
    operators.mkdir()
    (operators / "generation_config.json").write_text(json.dumps({"max_new_tokens": 40}))
    model.mkdir()
    for file in tiny_target.iterdir():
        (model / file.name).symlink_to(file)
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 20}))
    where = str(operators) if source == "operators" else source
    return ModelConfig(
        model=str(model), generation_config=where, override_generation_config=override, max_model_len=MAX_MODEL_LEN
    )


@pytest.mark.parametrize("asked", [None, 5, 30, 500])
@pytest.mark.parametrize("override", [{}, {"max_new_tokens": 25}], ids=str)
@pytest.mark.parametrize("source", ["auto", "vllm", "operators"])
def test_the_rest_of_an_answer_is_as_long_as_vllm_would_have_made_it(
    tiny_target: Path, tmp_path: Path, source: str, override: dict[str, Any], asked: int | None
) -> None:
    config = model_config(tiny_target, tmp_path, source, override)
    default = config.get_diff_sampling_param()
    cap = default.get("max_tokens") if source == "operators" else override.get("max_new_tokens")
    whole = get_max_tokens(MAX_MODEL_LEN, asked, NUM_PROMPT, default, cap)
    fields = {"messages": Raw(b"[]"), "max_tokens": Raw(msgspec.json.encode(asked))}
    wishes = read_wishes(CHAT_PATH, fields)
    limits = read_answer_limits(config)
    for num_kept in (0, 3):
        left = max_tokens_left(fields, wishes, limits, num_prompt=NUM_PROMPT, num_kept=num_kept, max_model_len=MAX_MODEL_LEN)
        assert num_kept + left == whole


@pytest.mark.parametrize("server", [OpenAIServingChat, OpenAIServingCompletion])
def test_vllm_resolves_its_limits_as_ours_does(server: type) -> None:
    source = inspect.getsource(server.__init__)
    assert CAP in source
    assert "self.default_sampling_params = self.model_config.get_diff_sampling_param()" in source
