"""What the gateway's relay takes for granted of vLLM: the chunks of its streams."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import msgspec
import pytest
from live_engine import LiveEngine
from msgspec import Raw
from tokenizers import Tokenizer

from server.relay.exchange import Exchange
from server.relay.sse import EventRelay
from server.relay.stream import ResumableStream
from wire.control import EngineStatus

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_MODEL_LEN = 1024
QUESTION = "Count from one to ten in words, then say naïve café 🦊 twice."


def _events(engine: LiveEngine, path: str, body: Any) -> list[bytes]:
    request = urllib.request.Request(engine.url + path, data=json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=300) as response:
        return [event + b"\n\n" for event in response.read().split(b"\n\n") if event]


def _body(engine: LiveEngine, path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": QUESTION}]} if path == CHAT else {"prompt": QUESTION}
    return {"model": engine.model, "stream": True, "temperature": 0, "max_tokens": 48, **prompt, **fields}


def _stream(engine: LiveEngine, path: str, body: dict[str, Any]) -> ResumableStream:
    tokenizer = Tokenizer.from_file(str(engine.target_dir / "tokenizer.json"))
    fields = {name: Raw(json.dumps(value).encode()) for name, value in body.items()}
    exchange = Exchange("POST", path, "one", fields)
    return ResumableStream(exchange, lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip))


def _asked(stream: ResumableStream) -> Any:
    return json.loads(stream.leg.body() or b"")


def _chunks(events: list[bytes]) -> list[dict[str, Any]]:
    """Without what differs between any two answers."""
    assert events[-1] == b"data: [DONE]\n\n"
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    return [{name: value for name, value in chunk.items() if name not in ("id", "created", "metrics")} for chunk in chunks]


def _text(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}, {"return_token_ids": True}], ids=str)
def test_client_gets_the_chunks_an_engine_would_have_sent_by_itself(
    real_engine: LiveEngine, path: str, options: dict[str, Any]
) -> None:
    body = _body(real_engine, path, **options)
    expected = _events(real_engine, path, body)
    stream = _stream(real_engine, path, body)
    taken = stream.take(b"".join(_events(real_engine, path, _asked(stream))))
    chunks = _chunks([event + b"\n\n" for event in taken.split(b"\n\n") if event])
    for chunk in chunks + (wanted := _chunks(expected)):
        # The last chunk of all carries it, and without usage that is another one.
        chunk.pop("system_fingerprint", None)
    assert _text(chunks) == _text(wanted)
    assert [set(chunk) for chunk in chunks[:1] + chunks[-1:]] == [set(chunk) for chunk in wanted[:1] + wanted[-1:]]
    assert [list(choice) for choice in chunks[1]["choices"]] == [list(choice) for choice in wanted[1]["choices"]]
    if all(len(one["choices"]) == 1 for one in chunks) and len(chunks) == len(wanted):
        assert chunks == wanted


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [{}, {"stop": ["ten", "café 🦊 naïve"]}], ids=str)
def test_real_stream_is_gone_on_with_wherever_it_broke(real_engine: LiveEngine, path: str, options: dict[str, Any]) -> None:
    body = _body(real_engine, path, stream_options={"include_usage": True}, **options)
    wanted = _chunks(_events(real_engine, path, body))
    first = _events(real_engine, path, _asked(_stream(real_engine, path, body)))
    limits = msgspec.convert(real_engine.ok("/paceline/status"), EngineStatus).answer_limits
    for num_taken in range(2, len(first) - 2, 4):
        stream = _stream(real_engine, path, body)
        sent = stream.take(b"".join(first[:num_taken]))
        stream.go_on(max_model_len=MAX_MODEL_LEN, limits=limits, target_version=0)
        relay = EventRelay()
        sent += stream.take(relay.feed(b"".join(_events(real_engine, stream.leg.path, _asked(stream)))))
        assert relay.is_done
        chunks = _chunks([event + b"\n\n" for event in sent.split(b"\n\n") if event])
        assert _text(chunks) == _text(wanted), num_taken
        assert chunks[-1]["usage"]["total_tokens"] == wanted[-1]["usage"]["total_tokens"]
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert ends == [choice["finish_reason"] for chunk in wanted for choice in chunk["choices"] if choice["finish_reason"]]
