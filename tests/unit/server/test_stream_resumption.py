"""Going on after an engine's death: the client sees one whole answer, or one well-formed error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from fake_model import FakeModel, build_tokenizer
from gateway_rig import GatewayRig, Reply, eventually, run, running

from server.config import RoutingSettings
from server.relay.resumable import MAX_STOP_CHARS, MAX_STOPS
from wire.control import AnswerLimits

TEXT = "the quick brown fox — ünïcödé 🦊🦊 — jumps over the lazy dog, and the cat says END of it all"
MESSAGES = [{"role": "user", "content": "say it"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def _models(tmp_path: Path, *texts: str) -> Callable[[list[FakeEngine]], None]:
    tokenizer = build_tokenizer(tmp_path / "target")
    base: list[int] = []

    def give(engines: list[FakeEngine]) -> None:
        for index, engine in enumerate(engines):
            engine.model = FakeModel(tokenizer, texts[index] if index < len(texts) else TEXT, base)

    return give


def _running(tmp_path: Path, num_engines: int = 2, *texts: str, max_moves: int = 2) -> Any:
    return running(
        tmp_path,
        num_engines=num_engines,
        target_dir=tmp_path / "target",
        routing=RoutingSettings(max_moves=max_moves, policy="round_robin"),
        before=_models(tmp_path, *texts),
    )


async def _ask(rig: GatewayRig, path: str, **fields: Any) -> Reply:
    prompt: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "say it", "max_tokens": 200}
    headers = {"X-Request-Id": "one"}
    return await rig.request("POST", path, json={**prompt, "stream": True, "temperature": 0, **fields}, headers=headers)


def _chunks(reply: Reply) -> list[dict[str, Any]]:
    *events, done, empty = reply.body.split(b"\n\n")
    assert (done, empty) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def _text(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)


def _die(rig: GatewayRig, *deaths: tuple[str, int]) -> None:
    """The next streams die so, whichever engines they are on; then all is well."""
    shared = list(deaths)
    for engine in rig.engines:
        engine.deaths = shared
        engine.bodies.clear()
    for engine in rig.gateway.fleet.engines:
        engine.breaker.reset()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
        {"return_token_ids": True},
        {"max_tokens": 7},
        {"stop": ["END"]},
    ],
    ids=str,
)
def test_unbroken_stream_is_what_an_engine_sends_by_itself(tmp_path: Path, path: str, fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            reply = await _ask(rig, path, **fields)
            engine = next(engine for engine in rig.engines if engine.bodies)
            assert engine.bodies[-1]["return_token_ids"] is True
            prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "say it", "max_tokens": 200}
            direct = engine.model.chunks(path, {**prompt, **fields}, "one")
            assert reply.body == b"".join(direct)

    run(scenario())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("how", ["break", "report", "abort"])
def test_stream_survives_its_engine_wherever_it_dies(tmp_path: Path, path: str, how: str) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            whole = (await _ask(rig, path, stream_options={"include_usage": True})).body
            expected = _chunks(Reply(200, {}, whole))
            num_moved = 0
            for after in range(1, len(expected)):
                _die(rig, (how, after))
                reply = await _ask(rig, path, stream_options={"include_usage": True})
                chunks = _chunks(reply)
                assert _text(chunks) == TEXT, after
                assert {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks} == {
                    (expected[0]["id"], expected[0]["created"], expected[0]["model"], expected[0]["object"])
                }
                roles = [choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"] if path == CHAT]
                assert roles[:1] == ["assistant"] * (path == CHAT)
                assert set(roles[1:]) <= {None}
                finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
                assert [finish for finish in finishes if finish] == ["stop"]
                assert chunks[-1]["usage"] == expected[-1]["usage"]
                assert chunks[-1]["choices"] == []
                num_moved += all(engine.bodies for engine in rig.engines)
            assert num_moved > 5
            assert (await rig.status())["traffic"]["num_failed"] == 0
            assert [engine.num_in_flight for engine in rig.gateway.fleet.engines] == [0, 0]

    run(scenario())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stream_passes_whole_though_the_prompts_ids_fill_more_than_a_mebibyte(tmp_path: Path, path: str) -> None:
    long = "z q" * 200_000
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            reply = await _ask(rig, path, max_tokens=200, **prompt)
            engine = next(engine for engine in rig.engines if engine.bodies)
            direct = engine.model.chunks(path, {**prompt, "max_tokens": 200, "return_token_ids": True}, "one")
            assert max(map(len, direct)) > 1 << 20
            assert reply.body == b"".join(engine.model.chunks(path, {**prompt, "max_tokens": 200}, "one"))

    run(scenario())


def test_event_too_long_to_hold_ends_the_stream_with_one_whole_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.relay.sse.MAX_HELD_BYTES", 300)

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            for engine in rig.engines:
                engine.model = None
                engine.chunks = [b"data: " + b"x" * 1000]
            reply = await _ask(rig, COMPLETIONS, n=2)
            last, empty = reply.body.split(b"\n\n")
            assert empty == b""
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
            assert sum(len(engine.bodies) for engine in rig.engines) == 1
            assert all(engine.breaker.allows and engine.ready for engine in rig.gateway.fleet.engines)

    run(scenario())


def test_next_engine_is_asked_for_the_rest_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            _die(rig, ("break", 4))
            reply = await _ask(rig, CHAT, max_tokens=20, min_tokens=9, seed=3, top_p=0.5)
            assert len(_chunks(reply)) > 4
            first, second = sorted((engine.bodies[-1] for engine in rig.engines), key=lambda body: "prompt" in body)
            base = rig.engine.model.base
            kept = second["prompt"][len(base) :]
            assert second["prompt"][: len(base)] == base
            assert kept == rig.engine.model.ids[: len(kept)]
            assert len(kept) >= 2
            assert (second["max_tokens"], second["min_tokens"]) == (20 - len(kept), 9 - len(kept))
            assert (second["seed"], second["top_p"], second["temperature"]) == (3, 0.5, 0)
            assert second["vllm_xargs"] == first["vllm_xargs"]
            assert "messages" not in second
            assert _chunks(reply)[-1]["choices"][0]["finish_reason"] == "length"
            moved = [await rig.metric(f'paceline_stream_moves_total{{engine="engine-{index}"}}') for index in range(2)]
            assert sorted(moved, key=str) == [1.0, None]
            view = await rig.admin("GET", "/admin/routing", params={"request_id": reply.headers["X-Request-Id"]})
            assert sorted(one["engine"] for one in view.json["decisions"]) == ["engine-0", "engine-1"], "one for each engine"

    run(scenario())


def test_chat_without_a_limit_gets_what_the_context_leaves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            _die(rig, ("break", 3))
            _chunks(await _ask(rig, CHAT))
            second = next(engine.bodies[-1] for engine in rig.engines if "prompt" in engine.bodies[-1])
            assert second["max_tokens"] == 512 - len(second["prompt"])

    run(scenario())


@pytest.mark.parametrize(
    ("path", "asked", "limits", "num_whole"),
    [
        (CHAT, {}, AnswerLimits(default=20), 20),
        (CHAT, {"max_tokens": 30}, AnswerLimits(default=20), 30),
        (CHAT, {"max_tokens": 30}, AnswerLimits(default=20, cap=20), 20),
        (CHAT, {"max_completion_tokens": 10}, AnswerLimits(default=20, cap=20), 10),
        (COMPLETIONS, {"max_tokens": None}, AnswerLimits(default=200), 16),
        (COMPLETIONS, {"max_tokens": 30}, AnswerLimits(default=20, cap=20), 20),
    ],
    ids=str,
)
def test_a_broken_answer_gets_no_longer_than_an_unbroken_one(
    tmp_path: Path, path: str, asked: dict[str, Any], limits: AnswerLimits, num_whole: int
) -> None:
    async def scenario() -> None:
        def limit(engines: list[FakeEngine]) -> None:
            _models(tmp_path)(engines)
            for engine in engines:
                engine.answer_limits = limits

        async with running(tmp_path, num_engines=2, target_dir=tmp_path / "target", before=limit) as rig:
            _die(rig, ("break", 3))
            await _ask(rig, path, **asked)
            second = next(body for engine in rig.engines for body in engine.bodies if isinstance(body.get("prompt"), list))
            num_kept = len(second["prompt"]) - len(rig.engine.model.base)
            assert num_kept > 0
            assert num_kept + second["max_tokens"] == num_whole

    run(scenario())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stop_string_is_found_though_the_engine_died_within_it(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        expected = TEXT[: TEXT.index("END of it")]
        async with _running(tmp_path) as rig:
            num_chunks = len(_chunks(await _ask(rig, path, stop=["END of it", "never"])))
            for after in range(1, num_chunks):
                _die(rig, ("break", after))
                chunks = _chunks(await _ask(rig, path, stop=["END of it", "never"]))
                assert _text(chunks) == expected, after
                assert chunks[-1]["choices"][0]["stop_reason"] == "END of it"

    run(scenario())


def test_replacement_character_of_the_model_is_told_from_half_a_character(tmp_path: Path) -> None:
    text = "ab \ufffd\nfox and dog"

    async def scenario() -> None:
        async with _running(tmp_path, 2, text, text) as rig:
            for engine in rig.engines:
                engine.model.tokens_per_chunk = 1
            num_moved = 0
            for after in range(1, len(rig.engine.model.ids)):
                _die(rig, ("break", after))
                assert _text(_chunks(await _ask(rig, COMPLETIONS, stop=["\n\n"]))) == text, after
                num_moved += all(engine.bodies for engine in rig.engines)
            assert num_moved > 5

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("gate_name", ["core_gate", "health_gate"])
def test_answer_of_an_engine_that_hangs_comes_from_another(tmp_path: Path, stream: bool, gate_name: str) -> None:
    settings = {"core_interval_s": 0.02, "core_timeout_s": 1.0, "health_timeout_s": 0.5}

    async def scenario() -> None:
        before = _models(tmp_path)
        async with running(tmp_path, num_engines=2, target_dir=tmp_path / "target", before=before, settings=settings) as rig:
            gate = asyncio.Event()
            for engine in rig.engines:
                engine.chunk_gate = gate
            asking = asyncio.create_task(_ask(rig, CHAT, stream=stream))
            await eventually(lambda: any(engine.num_running for engine in rig.engines))
            hung, other = sorted(rig.engines, key=lambda engine: -engine.num_running)
            other.chunk_gate = None
            setattr(hung, gate_name, gate)
            reply = await asking
            assert _text(_chunks(reply)) == TEXT if stream else reply.status == 200
            assert (len(hung.bodies), len(other.bodies)) == (1, 1)
            engine = next(engine for engine in rig.gateway.fleet.engines if engine.id == hung.id)
            assert engine.is_lost
            gate.set()
            await eventually(lambda: engine.ready)
            engine.breaker.reset()
            for _ in range(4):
                assert b"DONE" in (await _ask(rig, CHAT)).body
            assert len(hung.bodies) > 1

    run(scenario())


def test_answer_of_a_lone_engine_that_hangs_is_waited_for(tmp_path: Path) -> None:
    settings = {"core_interval_s": 0.02, "core_timeout_s": 0.05}

    async def scenario() -> None:
        async with running(tmp_path, settings=settings) as rig:
            rig.engine.chunk_gate = rig.engine.core_gate = gate = asyncio.Event()
            asking = asyncio.create_task(rig.complete(stream=True))
            await eventually(lambda: not rig.gateway.fleet.ready())
            await asyncio.sleep(0.1)
            gate.set()
            assert (await asking).body == b"".join(rig.engine.chunks)

    run(scenario())


def test_stream_moves_no_more_often_than_it_may(tmp_path: Path) -> None:
    async def scenario() -> None:
        for max_moves in (0, 1, 2):
            async with _running(tmp_path, 4, max_moves=max_moves) as rig:
                _die(rig, *[("break", 3)] * 4)
                reply = await _ask(rig, COMPLETIONS)
                assert reply.status == 200
                *_, last, empty = reply.body.split(b"\n\n")
                assert empty == b""
                assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
                assert sum(len(engine.bodies) for engine in rig.engines) == max_moves + 1

    run(scenario())


def test_deaths_before_the_first_byte_count_as_moves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path, 5) as rig:
            for engine in rig.engines:
                engine.die_after_chunks = 0
            reply = await _ask(rig, COMPLETIONS)
            assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "engine_error", "1")
            assert sum(len(engine.bodies) for engine in rig.engines) == 3

    run(scenario())


UNRESUMABLE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"n": 2}),
    (CHAT, {"logprobs": True}),
    (COMPLETIONS, {"logprobs": 0}),
    (COMPLETIONS, {"echo": True}),
    (COMPLETIONS, {"prompt": ["a", "b"]}),
    (CHAT, {"presence_penalty": 0.5}),
    (CHAT, {"frequency_penalty": 0.5}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"structured_outputs": {"choice": ["a"]}}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    (COMPLETIONS, {"stop": ["END"], "include_stop_str_in_output": True}),
    (COMPLETIONS, {"bad_words": ["x"]}),
    (COMPLETIONS, {"stop": "#" * (MAX_STOP_CHARS + 1)}),
    (CHAT, {"stop": ["#"] * (MAX_STOPS + 1)}),
    (CHAT, {"stream_options": {"include_usage": "always"}}),
]


@pytest.mark.parametrize(("path", "fields"), UNRESUMABLE, ids=str)
def test_what_cannot_go_on_ends_with_one_error_and_was_not_touched(tmp_path: Path, path: str, fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            _die(rig, ("break", 3))
            reply = await _ask(rig, path, **fields)
            *events, last, _ = reply.body.split(b"\n\n")
            assert len(events) == 3
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
            bodies = [body for engine in rig.engines for body in engine.bodies]
            assert len(bodies) == 1
            assert "return_token_ids" not in bodies[0]

    run(scenario())


def test_harmless_values_of_those_fields_do_not_stand_in_the_way(tmp_path: Path) -> None:
    fields = {"n": 1, "logprobs": False, "presence_penalty": 0, "tools": [], "response_format": {"type": "text"}, "stop": None}

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            _die(rig, ("break", 3))
            assert _text(_chunks(await _ask(rig, CHAT, **fields))) == TEXT

    run(scenario())


def test_engine_that_goes_on_with_another_text_is_not_believed(tmp_path: Path) -> None:
    """These stop strings could begin with the last character of some words, which are then made anew."""
    stops = [char + "#" for char in "kxry"]

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            for after in range(1, 16):
                _die(rig, ("break", after))
                assert _text(_chunks(await _ask(rig, COMPLETIONS, stop=stops))) == TEXT, after
            num_refused = 0
            for after in range(1, 16):
                _die(rig, ("break", after))
                gate = asyncio.Event()
                for engine in rig.engines:
                    engine.model.say(TEXT)
                    engine.chunk_gate = gate
                asking = asyncio.create_task(_ask(rig, COMPLETIONS, stop=stops))
                await eventually(lambda: any(engine.bodies for engine in rig.engines))
                next(engine for engine in rig.engines if not engine.bodies).model.say("?" * 90)
                gate.set()
                reply = await asking
                is_refused = b'"error"' in reply.body
                assert is_refused != (b"?" in reply.body)
                assert is_refused != (b"[DONE]" in reply.body)
                num_refused += is_refused
            assert num_refused

    run(scenario())


def test_answer_goes_on_only_with_the_same_target(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            rig.engines[1].target_version = 7
            rig.gateway.fleet.engines[1].request_sync()
            await eventually(lambda: rig.gateway.fleet.engines[1].target_version == 7)
            _die(rig, ("break", 3))
            reply = await _ask(rig, CHAT)
            assert b'"error"' in reply.body
            assert sum(len(engine.bodies) for engine in rig.engines) == 1

    run(scenario())


def test_lone_engine_that_dies_before_its_first_event_is_a_retry_for_the_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.die_after_chunks = 0
            reply = await rig.complete(stream=True)
            assert (reply.status, reply.headers["Retry-After"]) == (503, "10")
            assert reply.code == "no_engine_ready"

    run(scenario())
