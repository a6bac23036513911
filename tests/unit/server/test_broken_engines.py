"""Engines that answer what no engine should: the client gets an answer or one well-formed error, never a cut connection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_engine import FakeEngine
from fake_model import FakeModel, build_tokenizer
from gateway_rig import GatewayRig, Reply, eventually, run, running
from msgspec import Raw
from tokenizers import decoders

from server.paths import COMPLETIONS_PATH
from server.relay.exchange import Exchange
from server.relay.join import CannotResume
from server.relay.legs import Legs
from server.relay.resume import Resumption
from wire.control import AnswerLimits
from wire.errors import EngineError

DEEP = b"[" * 5000 + b"]" * 5000
DONE = b"data: [DONE]\n\n"


def _event(token_ids: str, prompt_ids: str = "[1,2]") -> bytes:
    choice = f'{{"index":0,"text":"and","prompt_token_ids":{prompt_ids},"token_ids":{token_ids},"finish_reason":null}}'
    return f'data: {{"id":"c","object":"text_completion","created":1,"model":"fake","choices":[{choice}]}}\n\n'.encode()


def _running(tmp_path: Path, **options: Any) -> Any:
    build_tokenizer(tmp_path / "target")
    return running(tmp_path, num_engines=2, target_dir=tmp_path / "target", **options)


def _say(rig: GatewayRig, *chunks: bytes, death: int | None = None) -> None:
    """What the engines stream; the first asked dies before chunk `death`."""
    deaths = [] if death is None else [("break", death)]
    for engine in rig.engines:
        engine.chunks = list(chunks)
        engine.deaths = deaths


def _error(reply: Reply) -> Any:
    """Of the last event, which is the only error."""
    *_, last, empty = reply.body.split(b"\n\n")
    assert empty == b""
    assert reply.body.count(b'{"error"') == 1
    return json.loads(last.removeprefix(b"data: "))["error"]


@pytest.mark.parametrize(
    "event",
    [_event("[-5]"), _event("[99999999999]"), _event("[5]", "[-1,1,1,1,1,1,1,1,1,1]")],
    ids=["negative", "too large", "in the prompt"],
)
def test_engine_that_dies_after_ids_that_are_none_ends_its_stream_with_one_error(tmp_path: Path, event: bytes) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            _say(rig, event, DONE, death=1)
            reply = await rig.complete(stream=True)
            assert _error(reply)["code"] == "engine_failed"
            assert sum(len(engine.bodies) for engine in rig.engines) == 1

    run(scenario())


def test_ids_that_cannot_be_decoded_cannot_be_gone_on_with(tmp_path: Path) -> None:
    class Refusing:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            raise ValueError(f"none of these is known: {tokens}")

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            tokenizer = build_tokenizer(tmp_path / "target")
            tokenizer.decoder = decoders.Decoder.custom(Refusing())
            fields = {"prompt": Raw(b'"say it"'), "stream": Raw(b"true")}
            stream = Resumption(rig.gateway.fleet, tokenizer).open(Exchange("POST", COMPLETIONS_PATH, "one", fields))
            stream.take(_event("[5]"))
            with pytest.raises(CannotResume, match="cannot be decoded"):
                stream.go_on(max_model_len=512, limits=AnswerLimits(), target_version=0)

    run(scenario())


@pytest.mark.parametrize("n", [1, 2], ids=["resumable", "plain"])
def test_event_too_deep_to_read_passes_as_it_is(tmp_path: Path, n: int) -> None:
    chunks = [_event("null", "null"), b'data: {"x":' + DEEP + b"}\n\n", DONE]

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            _say(rig, *chunks)
            assert (await rig.complete(stream=True, n=n)).body == b"".join(chunks)
            _say(rig, *chunks, death=2)
            assert _error(await rig.complete(stream=True, n=n))["code"] == "engine_failed"

    run(scenario())


def test_event_too_deep_to_read_is_no_continuation(tmp_path: Path) -> None:
    def give(engines: list[FakeEngine]) -> None:
        tokenizer = build_tokenizer(tmp_path / "target")
        engines[0].model = FakeModel(tokenizer, "the quick brown fox", [])
        engines[0].deaths = [("break", 2)]
        engines[1].chunks = [b'data: {"choices":' + DEEP + b"}\n\n", DONE]

    async def scenario() -> None:
        async with _running(tmp_path, before=give) as rig:
            while rig.engines[0].deaths:
                reply = await rig.complete(stream=True, max_tokens=50)
            assert b"the" in reply.body
            assert _error(reply)["code"] == "engine_failed"

    run(scenario())


def test_error_too_deep_to_read_is_the_engines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.relay.proxy.RESUME_WAIT_S", 0.1)

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            _say(rig, _event("[4000000]"), b'data: {"error":{"x":' + DEEP + b"}}\n\n", DONE)
            assert _error(await rig.complete(stream=True))["code"] == "engine_failed"
            assert [len(engine.bodies) for engine in rig.engines] == [1, 1], "another one may do better"

    run(scenario())


@pytest.mark.parametrize("status", [200, 500])
def test_whole_answer_too_deep_to_read_breaks_nothing(tmp_path: Path, status: int) -> None:
    deep = b'{"x":' + DEEP + b"}"

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=deep, content_type="application/json")

    def give(engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.on_completion = answer  # type: ignore[method-assign]

    async def scenario() -> None:
        async with _running(tmp_path, before=give) as rig:
            reply = await rig.complete()
            assert reply.status == status
            assert reply.body == deep if status == 200 else reply.code == "engine_error"
            assert (await rig.status())["traffic"]["num_failed"] == (status == 500)

    run(scenario())


def test_prefill_too_deep_to_read_is_computed_where_it_is_decoded(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b'{"kv_transfer_params":' + DEEP + b"}", content_type="application/json")

    def give(engines: list[FakeEngine]) -> None:
        engines[0].on_completion = answer  # type: ignore[method-assign]

    build_tokenizer(tmp_path / "target")
    options: dict[str, Any] = {"kinds": ("prefill", "decode"), "target_dir": tmp_path / "target", "before": give}

    async def scenario() -> None:
        async with running(tmp_path, **options) as rig:
            for engine, rate in zip(rig.gateway.fleet.engines, (0.1, 1000.0), strict=True):
                for _ in range(20):
                    rig.gateway.router.costs.learn_prefill(engine, rate, 1000, 0)
            reply = await rig.complete(prompt="the quick brown fox jumps over the lazy dog " * 20)
            assert (reply.status, reply.headers["X-Paceline-Kv-Path"]) == (200, "recompute")

    run(scenario())


@pytest.mark.parametrize("status", [200, 500])
def test_status_too_deep_to_read_is_an_error_of_the_engine(tmp_path: Path, status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=b'{"x":' + DEEP + b"}")

    def give(engines: list[FakeEngine]) -> None:
        engines[1].on_status = answer  # type: ignore[method-assign]

    async def scenario() -> None:
        async with _running(tmp_path, before=give, wait_ready=False) as rig:
            await eventually(lambda: len(rig.gateway.fleet.ready()) == 1)
            with pytest.raises(EngineError):
                await rig.gateway.fleet.engines[1].client.status(timeout_s=5.0)

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ["Content-Type", "Retry-After"])
def test_engine_whose_headers_cannot_be_sent_on_has_failed(tmp_path: Path, stream: bool, name: str) -> None:
    num_odd = 0

    async def odd(request: web.Request) -> web.Response:
        nonlocal num_odd
        num_odd += 1
        return web.Response(status=429, body=b"{}", headers={name: "text/plăin"})

    def give(engines: list[FakeEngine]) -> None:
        engines[0].on_completion = odd  # type: ignore[method-assign]

    async def scenario() -> None:
        async with _running(tmp_path, before=give) as rig:
            replies = [await rig.complete(stream=stream) for _ in range(4)]
            assert [reply.status for reply in replies] == [200] * 4
            assert num_odd

    run(scenario())


def test_fault_of_the_gateway_in_mid_stream_is_one_well_formed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("a fault")

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            _say(rig, _event("[5]"), DONE, death=1)
            monkeypatch.setattr("server.relay.stream.find_join", fail)
            assert _error(await rig.complete(stream=True))["code"] == "internal_error"
            assert (await rig.status())["traffic"]["num_failed"] == 1

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_fault_of_the_gateway_after_an_answer_leaves_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("a fault")

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            _say(rig, _event("null", "null"), DONE)
            expected = (await rig.complete(stream=stream)).body
            monkeypatch.setattr(Legs, "judge", fail)
            for _ in range(2):
                assert (await rig.complete(stream=stream)).body == expected
            assert (await rig.status())["traffic"]["num_failed"] == 2

    run(scenario())
