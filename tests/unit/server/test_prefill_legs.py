"""The prefill leg and its lease: what each failure costs, and that nothing is held for nobody."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_engine import FakeEngine
from fake_model import FakeModel, build_tokenizer
from gateway_rig import GatewayRig, Reply, eventually, run, running

from server.config import PoolKind, RoutingSettings
from server.relay.breaker import FIRST_OPEN_S, MAX_FAILURES, NUM_TRIALS, Breaker
from server.relay.prefill import RELEASE_MODEL
from server.routing.router import Route

PROMPT = "the quick brown fox jumps over the lazy dog " * 20
TEXT = "and the cat jumps over the dog"


def _running(tmp_path: Path, *kinds: PoolKind, settings: dict[str, Any] | None = None) -> Any:
    tokenizer = build_tokenizer(tmp_path / "target")
    base: list[int] = []

    def give(engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.model = FakeModel(tokenizer, TEXT, base)

    return running(
        tmp_path,
        kinds=kinds or ("prefill", "decode", "decode"),
        target_dir=tmp_path / "target",
        routing=RoutingSettings(policy="round_robin"),
        before=give,
        settings=settings,
    )


async def _ask(rig: GatewayRig, **fields: Any) -> Reply:
    """A prompt that is worth a prefill engine's attention: decode engines are told to be slow at it."""
    _prefer_prefill(rig)
    return await rig.complete(**{"prompt": PROMPT, "stream": True, "max_tokens": 50, **fields})


def _prefer_prefill(rig: GatewayRig) -> None:
    for engine in rig.gateway.fleet.engines:
        for _ in range(20):
            rig.gateway.router.costs.learn_prefill(engine, 0.1 if engine.kind == "prefill" else 1000.0, 1000, 0)


def test_a_prefill_leg_teaches_its_time_whether_the_answer_streams_or_comes_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            costs = rig.gateway.router.costs
            for stream in (True, False):
                _prefer_prefill(rig)
                before = dict(costs.num_measured)
                reply = await rig.complete(prompt=PROMPT + str(stream), stream=stream, max_tokens=50)
                assert reply.headers["X-Paceline-Kv-Path"] == "remote_prefill"
                assert dict(costs.num_measured) == {**before, "prefill": before["prefill"] + 1}

    run(scenario())


def _decoding(rig: GatewayRig) -> list[FakeEngine]:
    return [engine for engine in rig.engines if engine.kind != "prefill"]


def _decode_bodies(rig: GatewayRig) -> list[dict[str, Any]]:
    return [body for engine in _decoding(rig) for body in engine.bodies]


async def _ends(rig: GatewayRig) -> dict[str, float]:
    ends = {end: await rig.metric(f'paceline_kv_leases_total{{end="{end}"}}') for end in ("pulled", "released", "expired")}
    return {end: count for end, count in ends.items() if count}


@pytest.mark.parametrize("stream", [True, False])
def test_prompt_is_prefilled_there_and_decoded_here(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            reply = await _ask(rig, stream=stream, stream_options=None, min_tokens=3, temperature=0.5)
            assert (reply.status, reply.headers["X-Paceline-Kv-Path"]) == (200, "remote_prefill")
            (prefill,), (decode,) = rig.engine.bodies, _decode_bodies(rig)
            assert prefill["kv_transfer_params"]["do_remote_decode"] is True
            assert (prefill["max_tokens"], prefill["temperature"], prefill["prompt"]) == (1, 0.5, PROMPT)
            assert not {"stream", "stream_options", "min_tokens"} & set(prefill)
            assert (prefill["vllm_xargs"]["paceline_capture"], decode["vllm_xargs"]["paceline_capture"]) == (0, 1)
            assert decode["kv_transfer_params"]["remote_engine_id"] == rig.engine.id
            assert (decode["max_tokens"], decode["min_tokens"]) == (50, 3)
            ids = {engine.headers[-1]["X-Request-Id"] for engine in rig.engines if engine.headers}
            assert ids == {reply.headers["X-Request-Id"]}
            assert await _ends(rig) == {"pulled": 1.0}
            assert await rig.metric("paceline_kv_leases_held") == 0.0
            assert not rig.engine.leases

    run(scenario())


def test_short_limits_are_kept_in_both_spellings(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            await _ask(rig, max_completion_tokens=9, n=1)
            assert (rig.engine.bodies[0]["max_tokens"], rig.engine.bodies[0]["max_completion_tokens"]) == (1, 1)
            assert "n" not in rig.engine.bodies[0]
            assert _decode_bodies(rig)[0]["max_completion_tokens"] == 9

    run(scenario())


def _answer_500(engine: FakeEngine) -> None:
    engine.answer = (500, {"error": {"message": "boom", "type": "x", "param": None, "code": 500}})


def _answer_dead(engine: FakeEngine) -> None:
    engine.answer = (500, {"error": {"message": "EngineCore encountered an issue.", "type": "x", "param": None, "code": 500}})


def _answer_busy(engine: FakeEngine) -> None:
    engine.answer = (429, {"error": {"message": "busy", "type": "x", "param": None, "code": 429}})


def _drop(engine: FakeEngine) -> None:
    engine.drop_connections = True


def _offer_nothing(engine: FakeEngine) -> None:
    engine.offers_kv = False


def _hang(engine: FakeEngine) -> None:
    engine.first_gate = asyncio.Event()


FAILURES = [_answer_500, _answer_dead, _answer_busy, _drop, _offer_nothing, _hang]


@pytest.mark.parametrize("fail", FAILURES)
def test_prompt_is_computed_where_it_is_decoded_when_its_prefill_fails(
    tmp_path: Path, fail: Callable[[FakeEngine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.relay.prefill.PREFILL_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            fail(rig.engine)
            reply = await _ask(rig)
            assert (reply.status, reply.headers["X-Paceline-Kv-Path"]) == (200, "recompute")
            assert b"[DONE]" in reply.body
            (body,) = _decode_bodies(rig)
            assert "kv_transfer_params" not in body
            assert await rig.metric('paceline_prefill_failures_total{engine="engine-0"}') == 1.0
            assert await rig.metric('paceline_routed_total{path="recompute",reason="prefill_failed"}') == 1.0
            assert await _ends(rig) == {}

    run(scenario())


def test_failed_prefill_does_not_make_its_decode_engine_look_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leg_s = 0.5
    monkeypatch.setattr("server.relay.prefill.PREFILL_TIMEOUT_S", leg_s)

    async def scenario() -> None:
        async with _running(tmp_path, "prefill", "decode") as rig:
            _hang(rig.engine)
            observed: list[float | None] = []
            observe = rig.gateway.router.observe

            def watch(route: Route, *, first_byte_s: float | None) -> None:
                observed.append(first_byte_s)
                observe(route, first_byte_s=first_byte_s)

            monkeypatch.setattr(rig.gateway.router, "observe", watch)
            started_s = time.monotonic()
            assert (await _ask(rig)).headers["X-Paceline-Kv-Path"] == "recompute"
            (first_byte_s,) = observed
            assert first_byte_s is not None
            assert first_byte_s <= time.monotonic() - started_s - leg_s

    run(scenario())


def test_prompt_that_kills_prefill_engines_too_kills_no_more_than_it_may(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path, "prefill", "prefill", "decode", "decode", "decode") as rig:
            for engine in rig.engines:
                engine.drop_connections = True
            reply = await _ask(rig)
            assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "engine_error", "1")
            asked = [engine for engine in rig.engines if engine.bodies]
            assert len(asked) == RoutingSettings().max_moves + 1

    run(scenario())


def test_prefill_engines_breaker_opens_and_closes_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            prefill = rig.gateway.fleet.engines[0]
            clock_s = 100.0
            prefill.breaker = breaker = Breaker(lambda: clock_s)
            rig.engine.drop_connections = True
            while breaker.allows:
                await _ask(rig)
                await eventually(lambda: prefill.ready)
            assert len(rig.engine.bodies) == MAX_FAILURES
            rig.engine.drop_connections = False
            assert (await _ask(rig)).headers["X-Paceline-Kv-Path"] == "recompute"
            clock_s += FIRST_OPEN_S
            for _ in range(NUM_TRIALS):
                assert breaker.reason == "it kept failing; on trial"
                assert (await _ask(rig)).headers["X-Paceline-Kv-Path"] == "remote_prefill"
            assert breaker.reason == ""
            assert prefill.num_in_flight == 0

    run(scenario())


def test_prefill_that_takes_too_long_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.relay.prefill.PREFILL_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            _hang(rig.engine)
            engine = rig.gateway.fleet.engines[0]
            for _ in range(2 * MAX_FAILURES):
                assert (await _ask(rig)).headers["X-Paceline-Kv-Path"] == "recompute"
                assert engine.takes_requests
                await eventually(lambda: engine.takes_prefills)
            assert len(rig.engine.bodies) == 2 * MAX_FAILURES

    run(scenario())


def test_prefill_engine_that_took_too_long_is_asked_again_once_its_core_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.relay.prefill.PREFILL_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with _running(tmp_path, settings={"core_timeout_s": 600.0}) as rig:
            engine = rig.gateway.fleet.engines[0]
            rig.engine.first_gate = rig.engine.core_gate = gate = asyncio.Event()
            for _ in range(4):
                assert (await _ask(rig)).headers["X-Paceline-Kv-Path"] == "recompute"
            assert len(rig.engine.bodies) == 1
            assert engine.ready, "it has missed no probe yet"
            gate.set()
            await eventually(lambda: engine.takes_prefills)
            monkeypatch.setattr("server.relay.prefill.PREFILL_TIMEOUT_S", 600.0)
            assert (await _ask(rig)).headers["X-Paceline-Kv-Path"] == "remote_prefill"

    run(scenario())


def test_prefill_engine_that_hangs_is_waited_for_no_longer_than_its_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.relay.prefill.PREFILL_TIMEOUT_S", 600.0)

    async def scenario() -> None:
        async with _running(tmp_path, "prefill", "decode", settings={"core_interval_s": 0.02, "core_timeout_s": 1.0}) as rig:
            engine = rig.gateway.fleet.engines[0]
            rig.engine.first_gate = rig.engine.core_gate = gate = asyncio.Event()
            reply = await _ask(rig)
            assert (reply.status, reply.headers["X-Paceline-Kv-Path"]) == (200, "recompute")
            assert b"[DONE]" in reply.body
            assert engine.is_lost
            await eventually(lambda: rig.engine.num_aborted == 1)
            assert (await _ask(rig)).headers["X-Paceline-Kv-Path"] == "recompute"
            assert len(rig.engine.bodies) == 1
            gate.set()
            await eventually(lambda: engine.ready)
            assert (await _ask(rig)).headers["X-Paceline-Kv-Path"] == "remote_prefill"
            assert await rig.metric('paceline_prefill_failures_total{engine="engine-0"}') == 1.0

    run(scenario())


def test_prefill_engine_that_is_gone_costs_only_its_help(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            await rig.engine.stop()
            for _ in range(4):
                assert (await _ask(rig)).headers["X-Paceline-Kv-Path"] == "recompute"
            assert await rig.metric('paceline_prefill_failures_total{engine="engine-0"}') in (None, 1.0)

    run(scenario())


def test_client_gets_a_prefill_engines_refusal_as_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            refusal = {"error": {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}}
            rig.engine.answer = (400, refusal)
            reply = await _ask(rig)
            assert (reply.status, reply.json) == (400, refusal)
            assert not _decode_bodies(rig)
            assert (await rig.status())["traffic"]["num_refused"] == 1

    run(scenario())


def test_lease_is_released_when_the_decode_leg_is_refused_with_its_body(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            reply = await _ask(rig, stream=False, stream_options={"include_usage": True})
            assert (reply.status, rig.engine.num_leases) == (400, 1)
            await eventually(lambda: not rig.engine.leases)

            async def is_counted() -> bool:
                return await _ends(rig) == {"released": 1.0}

            await eventually(is_counted)

    run(scenario())


def test_prefill_engine_is_not_drained_while_a_decode_leg_waits_for_its_kv(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            engine = rig.gateway.fleet.engines[0]
            gate = asyncio.Event()
            for decode in _decoding(rig):
                decode.first_gate = gate
            asking = asyncio.create_task(_ask(rig))
            await eventually(lambda: any(decode.num_running for decode in _decoding(rig)))
            engine.is_draining, engine.last_lease_s = True, None
            assert not engine.is_drained
            gate.set()
            assert (await asking).status == 200
            assert engine.is_drained

    run(scenario())


def test_lease_that_was_not_pulled_lasts_from_the_end_of_its_decode_leg(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            engine = rig.gateway.fleet.engines[0]
            for decode in _decoding(rig):
                decode.first_gate = asyncio.Event()
            asking = asyncio.create_task(_ask(rig))
            await eventually(lambda: any(decode.num_running for decode in _decoding(rig)))
            engine.last_lease_s = None
            asking.cancel()
            await eventually(lambda: not engine.leases)
            assert engine.lease_left_s > 0

    run(scenario())


def test_no_byte_is_sent_before_the_prefill_has_succeeded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            rig.engine.first_gate = gate = asyncio.Event()
            asking = asyncio.create_task(_ask(rig))
            await eventually(lambda: rig.engine.num_running == 1)
            await asyncio.sleep(0.05)
            assert not asking.done()
            assert not _decode_bodies(rig)
            rig.engine.answer = None
            gate.set()
            assert (await asking).status == 200

    run(scenario())


@pytest.mark.parametrize("fields", [{"n": 2}, {"echo": True}, {"use_beam_search": True}], ids=str)
def test_what_cannot_be_handed_over_is_computed_in_one_place(tmp_path: Path, fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            reply = await _ask(rig, **fields)
            assert reply.headers["X-Paceline-Kv-Path"] == "recompute"
            assert not rig.engine.bodies
            assert await rig.metric('paceline_prefill_failures_total{engine="engine-0"}') is None

    run(scenario())


def test_client_that_leaves_during_the_prefill_ends_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            rig.engine.first_gate = asyncio.Event()
            asking = asyncio.create_task(_ask(rig))
            await eventually(lambda: rig.engine.num_running == 1)
            asking.cancel()
            await eventually(lambda: rig.engine.num_aborted == 1)
            await eventually(lambda: not any(engine.num_in_flight for engine in rig.gateway.fleet.engines))
            assert not _decode_bodies(rig)
            assert await _ends(rig) == {}

    run(scenario())


def test_client_that_leaves_between_the_legs_leaves_no_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            for engine in _decoding(rig):
                engine.first_gate = asyncio.Event()
            asking = asyncio.create_task(_ask(rig))
            await eventually(lambda: any(engine.num_running for engine in _decoding(rig)))
            assert len(rig.engine.leases) == 1
            assert await rig.metric("paceline_kv_leases_held") == 1.0
            asking.cancel()
            await eventually(lambda: not rig.engine.leases)
            assert sum(engine.num_pulled for engine in _decoding(rig)) == 0

            async def is_counted() -> bool:
                return await _ends(rig) == {"released": 1.0} and await rig.metric("paceline_kv_leases_held") == 0.0

            await eventually(is_counted)

    run(scenario())


def test_decode_engine_that_dies_with_a_lease_gets_another_one_no_stale_kv(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            first, second = _decoding(rig)
            shared = [("break", 0)]
            first.deaths = second.deaths = shared
            reply = await _ask(rig)
            assert reply.status == 200
            legs = [body for body in _decode_bodies(rig) if body.get("model") != RELEASE_MODEL]
            one, two = (body["kv_transfer_params"]["remote_request_id"] for body in legs)
            assert one != two, "the blocks of the first lease may hold another prompt by now"
            await eventually(lambda: not rig.engine.leases)

    run(scenario())


def test_lease_nobody_can_release_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.relay.prefill.RELEASE_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with _running(tmp_path, "prefill", "decode") as rig:
            rig.engines[1].first_gate = asyncio.Event()
            asking = asyncio.create_task(_ask(rig))
            await eventually(lambda: rig.engines[1].num_running == 1)
            rig.engines[1].drop_connections = True
            asking.cancel()

            async def has_expired() -> bool:
                return await _ends(rig) == {"expired": 1.0}

            await eventually(has_expired)

    run(scenario())


def test_dying_and_leaving_at_random_leaks_nothing(tmp_path: Path) -> None:
    """200 clients leave at random points while engines break; every counter is back to 0 and every lease ended."""
    rng = random.Random(7)

    async def client(rig: GatewayRig, session: aiohttp.ClientSession, wait_s: float) -> None:
        body = {"prompt": PROMPT, "stream": rng.random() < 0.7, "max_tokens": 50}
        try:
            async with asyncio.timeout(wait_s), session.post(f"{rig.public_url}/v1/completions", json=body) as response:
                await response.read()
        except (TimeoutError, aiohttp.ClientError):
            pass

    async def scenario() -> None:
        async with _running(tmp_path) as rig, aiohttp.ClientSession() as session:
            for engine in _decoding(rig):
                engine.deaths = [("break", 99)] * 12 + [("break", 2), ("report", 1), ("break", 0)]
            num_rounds, longest_wait_s = 0, 0.2
            while num_rounds < 10 or len(await _ends(rig)) < 2:
                num_rounds += 1
                longest_wait_s *= 1.2 if num_rounds > 10 else 1.0  # a slow machine needs clients with more patience
                _prefer_prefill(rig)
                await asyncio.gather(*(client(rig, session, rng.uniform(0.001, longest_wait_s)) for _ in range(20)))
            gateway = rig.gateway
            await eventually(lambda: gateway.admission.num_in_flight == 0)
            await eventually(lambda: not any(engine.num_in_flight for engine in gateway.fleet.engines))
            assert await rig.metric("paceline_kv_leases_held") == 0.0

            async def are_all_ended() -> bool:
                return rig.engine.num_leases == sum((await _ends(rig)).values())

            await eventually(are_all_ended)
            assert not rig.engine.leases
            ends = await _ends(rig)
            assert "expired" not in ends
            assert ends["pulled"] > 0
            assert ends["released"] > 0
            await eventually(lambda: not any(engine.num_running for engine in rig.engines))
            assert (await _ask(rig)).status == 200

    run(scenario())


def test_whole_answers_have_no_trace_of_the_hand_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            reply = await _ask(rig, stream=False)
            assert json.loads(reply.body) == {"id": "cmpl-1", "choices": [{"text": "whole"}]}

    run(scenario())


def test_prefill_engine_that_redirects_is_not_followed(tmp_path: Path) -> None:
    asked: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/v1/chat/completions"})

    async def scenario() -> None:
        async with _running(tmp_path) as rig:
            await rig.engine.stop()
            rig.engine.on_completion = redirect
            await rig.engine.start()
            await eventually(lambda: rig.gateway.fleet.engines[0].ready)
            assert (await _ask(rig)).status == 200
            assert asked == ["/v1/completions"]
            assert rig.gateway.metrics.prefill_failures.labels("engine-0")._value.get() == 1.0

    run(scenario())
