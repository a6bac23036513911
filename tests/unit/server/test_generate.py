"""Rollouts through the gateway: token ids in and out, and whatever would spoil training refused with the reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine
from gateway_rig import GatewayRig, Reply, publish_target, run, running

from server.config import AdmissionSettings, PoolKind
from server.generate import why_unable
from wire.control import GenerateAbilities

ABLE = GenerateAbilities(
    serves_tokens=True,
    logprobs_mode="processed_logprobs",
    scheduling_policy="priority",
    returns_sampling_mask=False,
    rejection_sample_method="standard",
)
ANSWER = {
    "request_id": "generate-tokens-r",
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "token_ids": [8, 9],
            "weight_versions": [{"version": "0", "start": 0, "end": 2}],
            "logprobs": {"content": [{"token_id": 8, "logprob": -0.7}, {"token_id": 9, "logprob": -1.1}]},
        }
    ],
}


@asynccontextmanager
async def rollouts(
    tmp_path: Path, *, abilities: GenerateAbilities | None = ABLE, kinds: tuple[PoolKind, ...] = ("combined",), **options: Any
) -> AsyncIterator[GatewayRig]:
    def prepare(engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.abilities, engine.answer = abilities, (200, ANSWER)

    async with running(tmp_path, kinds=kinds, before=prepare, **options) as rig:
        yield rig


async def generate(rig: GatewayRig, *, headers: dict[str, str] | None = None, sampling: Any = None, **fields: Any) -> Reply:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2} | (sampling or {}), **fields}
    return await rig.request("POST", "/inference/v1/generate", json=body, headers=headers)


def test_the_engine_gets_every_parameter_and_the_client_its_answer_as_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rollouts(tmp_path) as rig:
            headers = {"X-Paceline-Tenant": "trainer", "X-Paceline-Domain": "math", "X-Request-Id": "r-1"}
            reply = await generate(rig, headers=headers, sampling={"temperature": 0.7, "seed": 3}, priority=4)
            assert reply.status == 200
            assert reply.json == ANSWER
            assert reply.headers["X-Paceline-Target-Version"] == "0"
            (body,) = rig.engine.bodies
            assert (body["token_ids"], body["priority"], body["stream"]) == ([5, 6, 7], 4, False)
            assert body["sampling_params"] == {
                "max_tokens": 2,
                "temperature": 0.7,
                "n": 1,
                "min_tokens": 0,
                "seed": 3,
                "stop": [],
                "stop_token_ids": [],
                "ignore_eos": False,
                "logprobs": 0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "detokenize": False,
                "extra_args": {"paceline_capture": 1, "paceline_tenant": "trainer", "paceline_domain": "math"},
            }
            assert rig.engine.headers[-1]["X-Request-Id"] == "r-1"

    run(scenario())


def test_the_salt_names_the_target_the_tenant_and_what_the_client_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rollouts(tmp_path) as rig:
            await generate(rig)
            await generate(rig, headers={"X-Paceline-Tenant": "trainer"}, cache_salt="target-9:mine")
            publish_target(tmp_path)
            assert (await rig.activate_target(1, 0)).status == 200
            await generate(rig)
            salts = [body["cache_salt"] for body in rig.engine.bodies]
            assert salts == ["target-0:default+", "target-0:trainer+target-9:mine", "target-1:default+"]

    run(scenario())


def test_the_salt_is_that_of_the_engine_that_answers_also_during_a_change(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rollouts(tmp_path, kinds=("combined", "combined")) as rig:
            rig.gateway.fleet.engines[1].target_version = 7
            for _ in range(6):
                await generate(rig)
            salts = [{body["cache_salt"] for body in engine.bodies} for engine in rig.engines]
            assert salts[0] <= {"target-0:default+"}
            assert salts[1] <= {"target-7:default+"}
            assert salts[0] | salts[1]

    run(scenario())


def test_a_stream_is_passed_on_byte_for_byte(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rollouts(tmp_path) as rig:
            rig.engine.answer = None
            rig.engine.chunks = [
                b'data: {"request_id":"r","choices":[{"token_ids":[8],"weight_versions":null}]}\n\n',
                b'data: {"request_id":"r","choices":[{"token_ids":[9],"weight_versions":[{"version":"0","start":0,"end":2}]}]}\n\n',
                b"data: [DONE]\n\n",
            ]
            reply = await generate(rig, stream=True, stream_options={"include_usage": True})
            assert reply.body == b"".join(rig.engine.chunks)
            assert rig.engine.bodies[-1]["stream_options"] == {"include_usage": True}

    run(scenario())


BAD_BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "a field nobody knows": ({"tokenids": [1]}, "tokenids"),
    "a parameter nobody knows": ({"sampling_params": {"max_tokens": 2, "temprature": 1.0}}, "temprature"),
    "internal fields": ({"kv_transfer_params": {}}, "kv_transfer_params"),
    "extra arguments of its own": ({"sampling_params": {"max_tokens": 2, "extra_args": {}}}, "extra_args"),
    "no tokens": ({"token_ids": []}, "token_ids"),
    "a negative token": ({"token_ids": [1, -1]}, "token_ids"),
    "text": ({"token_ids": "text"}, "token_ids"),
    "no length": ({"sampling_params": {}}, "max_tokens"),
    "users' priority": ({"priority": 0}, "priority"),
    "an endless salt": ({"cache_salt": "s" * 600}, "cache_salt"),
    "stream options of no stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "a seed that is taken for none": ({"sampling_params": {"max_tokens": 2, "seed": -1}}, "seed"),
    "a seed that no engine can hold": ({"sampling_params": {"max_tokens": 2, "seed": 1 << 63}}, "seed"),
    "a temperature below zero": ({"sampling_params": {"max_tokens": 2, "temperature": -0.1}}, "temperature"),
    "a seed that no generator takes": ({"sampling_params": {"max_tokens": 2, "seed": 2**64}}, "seed"),
    "a number that is no float": ({"sampling_params": {"max_tokens": 2, "min_tokens": 10**400}}, "min_tokens"),
    "a top-k below none": ({"sampling_params": {"max_tokens": 2, "top_k": -2}}, "top_k"),
}


@pytest.mark.parametrize("kind", BAD_BODIES)
def test_what_an_engine_would_silently_take_is_refused(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with rollouts(tmp_path) as rig:
            fields, named = BAD_BODIES[kind]
            body = {"token_ids": [5], "sampling_params": {"max_tokens": 2}} | fields
            reply = await rig.request("POST", "/inference/v1/generate", data=json.dumps(body))
            assert (reply.status, reply.code) == (400, "bad_body")
            assert named in reply.json["error"]["message"]
            assert rig.engine.bodies == []

    run(scenario())


RESHAPED = {
    "temperature": 0.005,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "min_tokens": 4,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
}


@pytest.mark.parametrize("name", RESHAPED)
def test_a_distribution_the_trainer_does_not_compute_is_refused(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with rollouts(tmp_path) as rig:
            reply = await generate(rig, sampling={name: RESHAPED[name]})
            assert (reply.status, reply.code, reply.json["error"]["param"]) == (400, "breaks_training", name)
            assert rig.engine.bodies == []

    run(scenario())


def test_top_p_and_top_k_are_taken_where_answers_tell_what_they_leave(tmp_path: Path) -> None:
    async def scenario() -> None:
        able = msgspec.structs.replace(ABLE, returns_sampling_mask=True)
        async with rollouts(tmp_path, abilities=able) as rig:
            assert (await generate(rig, sampling={"top_p": 0.9, "top_k": 20})).status == 200
            assert (await generate(rig, sampling={"min_p": 0.1})).code == "breaks_training"

    run(scenario())


UNABLE = {
    "serves_tokens": False,
    "logprobs_mode": "raw_logprobs",
    "scheduling_policy": "fcfs",
    "rejection_sample_method": "synthetic",
}


@pytest.mark.parametrize("setting", [*UNABLE, None])
def test_an_engine_started_with_what_breaks_training_is_named(tmp_path: Path, setting: str | None) -> None:
    async def scenario() -> None:
        abilities = msgspec.structs.replace(ABLE, **{setting: UNABLE[setting]}) if setting else None
        async with rollouts(tmp_path, abilities=abilities) as rig:
            reply = await generate(rig)
            assert (reply.status, reply.code) == (501, "generate_unsupported")
            assert "engine-0" in reply.json["error"]["message"]
            assert why_unable(abilities) in reply.json["error"]["message"]
            assert rig.engine.bodies == []
            assert (await rig.complete()).status == 200

    run(scenario())


def test_choices_are_bounded_as_on_the_other_routes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rollouts(tmp_path, admission=AdmissionSettings(max_choices=4)) as rig:
            assert (await generate(rig, sampling={"n": 4})).status == 200
            assert (await generate(rig, sampling={"n": 5})).code == "too_many_choices"

    run(scenario())


def test_rollouts_are_prefilled_where_they_are_decoded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rollouts(tmp_path, kinds=("decode", "prefill")) as rig:
            prompt = list(range(2, 302))
            assert (await generate(rig, token_ids=prompt)).status == 200
            assert [len(engine.bodies) for engine in rig.engines] == [1, 0]

    run(scenario())


def test_stop_strings_are_found_in_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rollouts(tmp_path) as rig:
            await generate(rig, sampling={"stop": ["</answer>"]})
            assert rig.engine.bodies[-1]["sampling_params"]["detokenize"] is True

    run(scenario())
