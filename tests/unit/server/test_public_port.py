"""The public port: what a client sends reaches an engine, what an engine answers reaches the client, unchanged."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from fake_engine import FakeEngine, events
from gateway_rig import GatewayRig, eventually, run, running

from server.config import AdmissionSettings
from server.relay.breaker import MAX_FAILURES


def test_stream_passes_byte_for_byte_as_it_comes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.chunks = events(5)
            rig.engine.chunk_gate = gate = asyncio.Event()
            url = f"{rig.public_url}/v1/completions"
            async with rig.session.post(url, json={"prompt": "p", "stream": True}) as response:
                assert response.headers["Content-Type"].startswith("text/event-stream")
                first = await response.content.readany()
                assert first == rig.engine.chunks[0], "the first event arrives while the engine still generates"
                gate.set()
                assert first + await response.read() == b"".join(rig.engine.chunks)

    run(scenario())


def test_event_split_over_packets_arrives_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            whole = b"".join(events(4))
            rig.engine.chunks = [whole[i : i + 7] for i in range(0, len(whole), 7)]
            assert (await rig.complete(stream=True)).body == whole

    run(scenario())


def test_whole_answer_models_and_engine_errors_pass_through(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            assert (await rig.complete()).json["choices"][0]["text"] == "whole"
            chat = await rig.request("POST", "/v1/chat/completions", json={"messages": []})
            assert chat.status == 200
            models = await rig.request("GET", "/v1/models")
            assert models.json["data"][0]["id"] == "fake"
            assert "X-Request-Id" in models.headers
            body = {"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}}
            rig.engine.answer = (404, body)
            reply = await rig.complete()
            assert (reply.status, reply.json) == (404, body)
            status = await rig.status()
            assert status["traffic"] | {"num_verified_tokens": 0} == {
                "num_in_flight": 0,
                "num_served": 3,
                "num_failed": 0,
                "num_refused": 1,
                "num_disconnected": 0,
                "num_verified_tokens": 0,
            }

    run(scenario())


def test_headers_identify_request_and_versions(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.target_version = 7
            rig.gateway.fleet.engines[0].request_sync()
            await eventually(lambda: rig.gateway.fleet.engines[0].target_version == 7)
            reply = await rig.complete(headers={"X-Request-Id": "mine-1"}, stream=True)
            assert reply.headers["X-Request-Id"] == "mine-1"
            assert reply.headers["X-Paceline-Draft-Version"] == "0"
            assert reply.headers["X-Paceline-Target-Version"] == "7"
            assert rig.engine.headers[-1]["X-Request-Id"] == "mine-1"
            assert "Authorization" not in reply.headers
            odd = await rig.complete(headers={"X-Request-Id": "no spaces allowed"})
            assert odd.status == 200
            assert odd.headers["X-Request-Id"] != "no spaces allowed"
            assert rig.engine.headers[-1]["X-Request-Id"] == odd.headers["X-Request-Id"]

    run(scenario())


def test_client_credentials_do_not_reach_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await rig.complete(headers={"Authorization": "Bearer client-secret", "Cookie": "a=b"})
            assert "client-secret" not in str(rig.engine.headers[-1])
            assert "Cookie" not in rig.engine.headers[-1]

    run(scenario())


def test_identity_reaches_the_engine_beside_the_clients_own_arguments(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await rig.complete()
            assert rig.engine.bodies[-1]["vllm_xargs"] == {
                "paceline_capture": 1,
                "paceline_tenant": "default",
                "paceline_domain": "default",
            }
            headers = {"X-Paceline-Capture": "off", "X-Paceline-Tenant": "acme", "X-Paceline-Domain": "code"}
            await rig.complete(headers=headers, vllm_xargs={"mine": [1, 2.5]}, temperature=0.3)
            body = rig.engine.bodies[-1]
            assert body["temperature"] == 0.3
            assert body["vllm_xargs"] == {
                "mine": [1, 2.5],
                "paceline_capture": 0,
                "paceline_tenant": "acme",
                "paceline_domain": "code",
            }

    run(scenario())


UNUSABLE: list[tuple[dict[str, str], dict[str, object], str]] = [
    ({"X-Paceline-Tenant": "a b"}, {}, "bad_header"),
    ({"X-Paceline-Domain": "x" * 65}, {}, "bad_header"),
    ({"X-Paceline-Capture": "maybe"}, {}, "bad_header"),
    ({"X-Session-Id": "a b"}, {}, "bad_header"),
    ({}, {"vllm_xargs": {"paceline_tenant": "other"}}, "reserved_xargs"),
    ({}, {"vllm_xargs": {"kv_transfer_params": "x"}}, "internal_field"),
    ({}, {"vllm_xargs": {"kv_cache_report_mode": "full"}}, "internal_field"),
    ({}, {"vllm_xargs": "text"}, "bad_xargs"),
    ({}, {"kv_transfer_params": {"remote_host": "10.0.0.1"}}, "internal_field"),
    ({}, {"n": 999_999}, "too_many_choices"),
    ({}, {"n": "1000"}, "bad_choices"),
    ({}, {"n": 1000.0}, "bad_choices"),
    ({}, {"n": True}, "bad_choices"),
    ({}, {"prompt": ["p"] * 129}, "too_many_choices"),
    ({}, {"prompt": [[1, 2]] * 65, "n": 2}, "too_many_choices"),
    ({}, {"prompt_embeds": ["p"] * 128}, "too_many_choices"),
]


def test_unusable_request_is_refused_with_a_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for headers, fields, code in UNUSABLE:
                reply = await rig.complete(headers=headers, **fields)
                assert (reply.status, reply.code) == (400, code)
            assert not rig.engine.bodies

    run(scenario())


def test_garbage_bodies_and_unknown_routes_get_openai_shaped_errors(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for body in (
                b"",
                b"{",
                b"[]",
                b"\xff\xfe",
                b'{"a": NaN}',
                b"[" * 100_000,
                b'{"vllm_xargs": 3}',
                b'{"prompt": "\xff"}',
            ):
                reply = await rig.request("POST", "/v1/completions", data=body)
                assert reply.status == 400, body[:20]
                assert reply.code in ("invalid_json", "bad_xargs")
            assert (await rig.request("GET", "/v1/nothing")).code == "not_found"
            wrong = await rig.request("GET", "/v1/completions")
            assert (wrong.status, wrong.code) == (405, "method_not_allowed")
            assert not rig.engine.bodies

    run(scenario())


def test_admission_bounds_requests_and_bytes(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = AdmissionSettings(max_in_flight=2, max_body_bytes=2048)
        async with running(tmp_path, admission=settings) as rig:
            rig.engine.chunk_gate = gate = asyncio.Event()
            waiting = [asyncio.create_task(rig.complete()) for _ in range(2)]
            await eventually(lambda: rig.engine.num_running == 2)
            refused = await rig.complete()
            assert (refused.status, refused.code, refused.headers["Retry-After"]) == (429, "too_many_requests", "1")
            gate.set()
            assert [reply.status for reply in await asyncio.gather(*waiting)] == [200, 200]
            assert (await rig.complete()).status == 200
            large = await rig.complete(prompt="x" * 3000)
            assert (large.status, large.code) == (413, "body_too_large")

            async def unannounced():  # type: ignore[no-untyped-def]
                for _ in range(4):
                    yield b"x" * 1000

            chunked = await rig.request("POST", "/v1/completions", data=unannounced())
            assert (chunked.status, chunked.code) == (413, "body_too_large")
            assert rig.gateway.admission.num_in_flight == 0

    run(scenario())


def test_choices_and_prompts_within_the_bound_pass(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for fields in ({"n": 128}, {"n": None}, {"prompt": list(range(500)), "n": 2}, {"prompt": ["p"] * 64, "n": 2}):
                assert (await rig.complete(**fields)).status == 200, fields

    run(scenario())


async def _half_sent(rig: GatewayRig) -> asyncio.StreamWriter:
    """A request whose body does not come to its end."""
    address = urlsplit(rig.public_url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    return writer


def test_half_sent_bodies_hold_no_slot_and_have_a_bound(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, admission=AdmissionSettings(max_in_flight=2)) as rig:
            admission = rig.gateway.admission
            writers = [await _half_sent(rig) for _ in range(7)]
            await eventually(lambda: admission.num_reading == 7)
            assert admission.num_in_flight == 0
            assert (await rig.complete()).status == 200
            writers.append(await _half_sent(rig))
            await eventually(lambda: admission.num_reading == 8)
            refused = await rig.complete()
            assert (refused.status, refused.code, refused.headers["Retry-After"]) == (429, "too_many_requests", "1")
            for writer in writers:
                writer.close()
            await eventually(lambda: admission.num_reading == 0)
            assert (await rig.complete()).status == 200

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_the_slot_and_ends_the_generation(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.chunk_gate = asyncio.Event()
            url = f"{rig.public_url}/v1/completions"
            async with aiohttp.ClientSession() as leaving:
                request = asyncio.create_task(leaving.post(url, json={"prompt": "p", "stream": stream}))
                await eventually(lambda: rig.engine.num_running == 1)
                if stream:
                    await (await request).content.readany()
                request.cancel()
            await eventually(lambda: rig.engine.num_aborted == 1)
            await eventually(lambda: rig.gateway.admission.num_in_flight == 0)
            assert rig.gateway.fleet.engines[0].num_in_flight == 0
            assert rig.gateway.fleet.engines[0].ready, "a client that leaves says nothing about the engine"
            assert (await rig.status())["traffic"]["num_disconnected"] == 1

    run(scenario())


async def _broken_stream(rig: GatewayRig) -> list[bytes]:
    reply = await rig.complete(stream=True)
    assert reply.status == 200
    *rest, last, empty = reply.body.split(b"\n\n")
    assert empty == b""
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["message"]
    assert b"[DONE]" not in reply.body
    return rest


def test_engine_death_mid_stream_ends_with_one_error_event(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            cut_between, cut_within = events(4), [*events(1, done=False), b'data: {"id":"c', b"mpl"]
            for num_failed, chunks in enumerate((cut_between, cut_within), start=1):
                rig.engine.chunks, rig.engine.die_after_chunks = chunks, 2
                sent = await _broken_stream(rig)
                whole = [chunk.removesuffix(b"\n\n") for chunk in chunks[:2] if chunk.endswith(b"\n\n")]
                assert sent == whole[: len(sent)]

                async def is_counted(number: int = num_failed) -> bool:
                    status = (await rig.status())["traffic"]
                    return (status["num_failed"], status["num_in_flight"]) == (number, 0)

                await eventually(is_counted)

    run(scenario())


def test_engine_error_event_is_not_followed_by_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            failure = b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","param":null,"code":500}}\n\n'
            rig.engine.chunks = [*events(2, done=False), failure, b"data: [DONE]\n\n"]
            assert len(await _broken_stream(rig)) == 2
            rig.engine.chunks = [b"".join(rig.engine.chunks)]
            assert len(await _broken_stream(rig)) == 2
            rig.engine.chunks = events(2, done=False)
            assert len(await _broken_stream(rig)) == 2, "a stream without [DONE] was cut short"

    run(scenario())


def test_answer_a_stopping_engine_gave_up_is_not_passed_for_a_whole_one(tmp_path: Path) -> None:
    aborted = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\n'

    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.chunks = [*events(2, done=False), aborted, b"data: [DONE]\n\n"]
            assert len(await _broken_stream(rig)) == 2
            rig.engine.chunks = [b"".join(rig.engine.chunks)]
            assert len(await _broken_stream(rig)) == 2
            rig.engine.answer = (200, {"id": "cmpl-1", "choices": [{"text": "half", "finish_reason": "abort"}]})
            reply = await rig.complete()
            assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "engine_error", "1")
            rig.engine.answer = (
                200,
                {"id": "cmpl-1", "choices": [{"text": '"finish_reason":"abort"', "finish_reason": "stop"}]},
            )
            assert (await rig.complete()).status == 200

    run(scenario())


def _count(engines: list[FakeEngine]) -> list[int]:
    return [len(engine.bodies) for engine in engines]


def test_request_moves_to_another_engine_before_the_first_byte(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            first, second = rig.engines
            first.drop_connections = True
            for stream in (True, False):
                assert (await rig.complete(stream=stream)).status == 200
            first.drop_connections = False
            first.answer = (500, {"error": {"message": "dead", "type": "x", "param": None, "code": 500}})
            await eventually(lambda: len(rig.gateway.fleet.ready()) == 2)
            assert (await rig.complete()).status == 200
            await first.stop()
            assert [(await rig.complete(stream=True)).status for _ in range(3)] == [200] * 3
            assert _count(rig.engines)[1] == 6
            await second.stop()
            reply = await rig.complete()
            assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "no_engine_ready", "10")

    run(scenario())


def test_sole_engines_failure_passes_through_with_its_own_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.answer = (503, {"error": {"message": "queue full", "type": "x", "param": None, "code": 503}})
            reply = await rig.complete()
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
            assert reply.json["error"]["message"] == "queue full"

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_silence_is_no_death_and_the_request_is_not_run_again(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2, settings={"engine_idle_timeout_s": 0.1}) as rig:
            for engine in rig.engines:
                engine.first_gate = asyncio.Event()
            for _ in range(2 * MAX_FAILURES):
                reply = await rig.complete(stream=stream)
                assert (reply.status, reply.code) == (504, "engine_timeout")
            assert sum(len(engine.bodies) for engine in rig.engines) == 2 * MAX_FAILURES
            assert all(engine.takes_requests for engine in rig.gateway.fleet.engines)

    run(scenario())


def test_error_that_quotes_the_client_is_no_engines_death(tmp_path: Path) -> None:
    quoted = "cannot parse 'EngineCore encountered an issue. EngineDeadError'"

    async def scenario() -> None:
        async with running(tmp_path) as rig:
            error = {"error": {"message": quoted, "type": "InternalServerError", "param": None, "code": 500}}
            rig.engine.answer = (500, error)
            for _ in range(2 * MAX_FAILURES):
                reply = await rig.complete()
                assert (reply.status, reply.json) == (500, error)
            rig.engine.answer = None
            rig.engine.chunks = [b"data: " + json.dumps(error, separators=(",", ":")).encode() + b"\n\n"]
            for _ in range(2 * MAX_FAILURES):
                await rig.complete(stream=True)
            assert rig.gateway.fleet.engines[0].takes_requests

    run(scenario())


def test_death_of_the_sole_engines_core_is_no_fault_of_the_request(tmp_path: Path) -> None:
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."

    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.answer = (500, {"error": {"message": message, "type": "x", "param": None, "code": 500}})
            reply = await rig.complete()
            assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "engine_error", "1")
            assert "Engine" not in reply.json["error"]["message"]

    run(scenario())


def test_requests_go_where_fewest_are_in_flight(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            gate = asyncio.Event()
            for engine in rig.engines:
                engine.chunk_gate = gate
            waiting = [asyncio.create_task(rig.complete()) for _ in range(6)]
            await eventually(lambda: _count(rig.engines) == [3, 3])
            gate.set()
            await asyncio.gather(*waiting)

    run(scenario())


def test_running_streams_end_before_a_graceful_shutdown(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, settings={"shutdown_grace_s": 60}) as rig:
            rig.engine.chunk_gate = gate = asyncio.Event()
            url = f"{rig.public_url}/v1/completions"
            response = await rig.session.post(url, json={"prompt": "p", "stream": True})
            rig.stop.set()
            address = urlsplit(rig.public_url)

            async def is_closed() -> bool:
                try:
                    _, writer = await asyncio.open_connection(address.hostname, address.port)
                except ConnectionError:
                    return True
                writer.close()
                return False

            await eventually(is_closed)
            gate.set()
            assert await response.read() == b"".join(rig.engine.chunks)

    run(scenario())


def test_fault_of_the_gateway_ends_one_request_in_openais_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:

            def broken(*args: object, **options: object) -> None:
                raise RuntimeError("a fault")

            with monkeypatch.context() as patched:
                patched.setattr(rig.gateway.router, "choose", broken)
                reply = await rig.complete()
                assert (reply.status, reply.code) == (500, "internal_error")
            assert (await rig.complete()).status == 200
            assert (await rig.status())["traffic"]["num_failed"] == 1
            assert rig.gateway.admission.num_in_flight == 0

    run(scenario())


def test_a_stream_that_outlasts_a_shutdown_ends_with_an_error_and_not_in_the_middle(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.chunk_gate = asyncio.Event()
            async with rig.session.post(f"{rig.public_url}/v1/completions", json={"prompt": "p", "stream": True}) as response:
                assert await response.content.readline()
                rig.stop.set()
                rest = await response.content.read()
            *_, last = [line for line in rest.splitlines() if line]
            error = json.loads(last.removeprefix(b"data: "))["error"]
            assert error["code"] == "server_stopping"
            assert set(error) == {"message", "type", "param", "code"}

    run(scenario())


def test_a_whole_answer_that_outlasts_a_shutdown_is_an_error_to_retry(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.first_gate = asyncio.Event()
            asked = asyncio.create_task(rig.complete())
            await eventually(lambda: bool(rig.gateway.admission.num_in_flight))
            rig.stop.set()
            reply = await asked
            assert (reply.status, reply.code) == (503, "server_stopping")
            assert "Retry-After" in reply.headers

    run(scenario())


@pytest.mark.parametrize(
    "body", [{"detail": "There was an error parsing the body"}, {"error": "text"}, {"error": {"message": ""}}]
)
def test_an_engines_error_of_another_shape_is_put_into_openais(tmp_path: Path, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.answer = (400, body)
            reply = await rig.complete()
            assert (reply.status, reply.code) == (400, "engine_error")

    run(scenario())


@pytest.mark.parametrize("value", [1.5, "text", [1], True])
def test_structured_outputs_that_are_no_object_reach_no_engine(tmp_path: Path, value: Any) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reply = await rig.complete(structured_outputs=value)
            assert (reply.status, reply.code) == (400, "bad_structured_outputs")
            assert not rig.engine.bodies
            for good in (None, {"choice": ["a"]}):
                assert (await rig.complete(structured_outputs=good)).status == 200

    run(scenario())


def test_a_body_in_another_encoding_is_refused_and_not_misread(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            body = gzip.compress(b'{"prompt": "p"}')
            for encoding, status in (("gzip", 415), ("identity", 400)):
                headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
                reply = await rig.request("POST", "/v1/completions", data=body, headers=headers)
                assert reply.status == status

    run(scenario())


def test_balancers_may_ask_by_head(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            assert [(await rig.request("HEAD", path)).status for path in ("/health", "/ready")] == [200, 200]
            assert (await rig.request("HEAD", "/v1/models")).status == 405

    run(scenario())
