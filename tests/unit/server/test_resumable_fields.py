"""What a client sent in place of a field's type is the engine's to refuse, and breaks nothing here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_model import build_tokenizer
from gateway_rig import run, running
from msgspec import Raw

from server.paths import CHAT_PATH, COMPLETIONS_PATH
from server.relay.resumable import asking_for_ids, continuation, max_tokens_left, read_wishes, why_not_resumable
from wire.control import AnswerLimits

VALUES = [7, -7, 1.5, 1 << 70, True, False, None, "", "x", [], [7], [None], [["x"]], {}, {"x": 7}]
NAMES = [
    *("stop", "stream_options", "n", "logprobs", "tools", "tool_choice", "response_format", "include_stop_str_in_output"),
    *("prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "return_token_ids", "skip_special_tokens"),
    *("echo", "bad_words", "stream", "seed", "logit_bias"),
]


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
@pytest.mark.parametrize("name", NAMES)
def test_field_of_any_type_is_read(path: str, name: str) -> None:
    num_asked = 0
    for value in VALUES:
        fields = {"prompt": Raw(b'"say it"'), name: Raw(msgspec.json.encode(value))}
        if why_not_resumable(path, fields):
            continue
        wishes = read_wishes(path, fields)
        left = max_tokens_left(fields, wishes, AnswerLimits(), num_prompt=3, num_kept=2, max_model_len=512)
        asked = continuation(fields, wishes, [1, 2, 3], num_kept=2, max_tokens=left)
        assert json.loads(msgspec.json.encode(asked))["prompt"] == [1, 2, 3]
        assert json.loads(msgspec.json.encode(asking_for_ids(fields)))["return_token_ids"] is True
        num_asked += 1
    assert num_asked


@pytest.mark.parametrize(
    ("stop", "stops"), [("x", ("x",)), (["x", "yz"], ("x", "yz")), (7, ()), (True, ()), ({"x": 1}, ()), (None, ())], ids=str
)
def test_stop_strings_are_a_string_or_a_list_of_strings(stop: Any, stops: tuple[str, ...]) -> None:
    assert read_wishes(CHAT_PATH, {"stop": Raw(msgspec.json.encode(stop))}).stops == stops


@pytest.mark.parametrize("stop", [7, True])
def test_stop_of_a_wrong_type_is_refused_by_the_engine(tmp_path: Path, stop: Any) -> None:
    async def scenario() -> None:
        build_tokenizer(tmp_path / "target")
        async with running(tmp_path, num_engines=2, target_dir=tmp_path / "target") as rig:
            for engine in rig.engines:
                engine.answer = (400, {"error": {"message": "stop must be a string", "code": 400}})
            reply = await rig.complete(stream=True, stop=stop)
            assert reply.status == 400
            assert b"stop must be a string" in reply.body
            assert [body["stop"] for engine in rig.engines for body in engine.bodies] == [stop]

    run(scenario())
