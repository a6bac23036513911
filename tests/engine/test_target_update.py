"""Versions of the target in a live engine: exact, labelled at the token, never over old KV, and taken back where they fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
from conftest import make_drafts
from live_engine import LiveEngine, start_engine
from safetensors.torch import load_file, save_file
from targets import CANARY_IDS, greedy, make_moved, publish_target, score

from server.generate import engine_fields, read_generate, why_unable
from server.identity import Identity
from wire.artifact import WEIGHTS_FILE
from wire.control import EngineStatus
from wire.spec import file_sha256, resolve_capture_spec
from wire.target import TargetStore

PROMPT = [40 + i % 150 for i in range(70)]
"""More than two KV blocks."""
FLOOR = 1e-3
"""Nats between one fp32 computation and another, with room; the models of these tests are whole nats apart."""


@pytest.fixture(scope="module")
def models(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By version."""
    directory = tmp_path_factory.mktemp("moved")
    return {0: tiny_target} | {version: make_moved(tiny_target, directory / str(version), seed=version) for version in (1, 2)}


@pytest.fixture(scope="module")
def serving(models: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    """As an engine of a system that trains its target is started."""
    state_dir = tmp_path_factory.mktemp("target-state")
    make_drafts(state_dir, models[0], draft_vocab_size=tiny.DRAFT_VOCAB, count=2)
    spec = resolve_capture_spec(models[0], dtype="float32", draft_vocab_size=tiny.DRAFT_VOCAB)
    assert [publish_target(state_dir, spec, models[version]) for version in (1, 2)] == [1, 2]
    options = ["--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "64"]
    options += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--scheduling-policy", "priority"]
    options += ["--enable-prompt-tokens-details"]
    worker = "probe_worker.ProbeCpuWorker"
    with start_engine(models[0], state_dir, tiny.DRAFT_VOCAB, options=options, worker_cls=worker) as engine:
        yield engine


@pytest.fixture
def engine(serving: LiveEngine) -> Iterator[LiveEngine]:
    yield serving
    if version_of(serving) != 0:
        change(serving, 0)


def version_of(engine: LiveEngine) -> int:
    return engine.ok("/paceline/status")["workers"][0]["target_version"]


def commit(engine: LiveEngine, version: int, *, expected: int | None = None, deadline_s: float = 120.0) -> tuple[int, Any]:
    expected = version_of(engine) if expected is None else expected
    body = {"version": version, "expected_active": expected, "deadline_s": deadline_s}
    return engine.call("/paceline/target/commit", body)


def change(engine: LiveEngine, version: int) -> dict[str, Any]:
    engine.ok("/paceline/target/stage", {"version": version})
    status, report = commit(engine, version)
    assert status == 200, report
    return report


def generate(engine: LiveEngine, ids: list[int], num_tokens: int, **sampling: Any) -> dict[str, Any]:
    params = {"max_tokens": num_tokens, "temperature": 0.0, "logprobs": 0, "ignore_eos": True} | sampling
    return engine.ok("/inference/v1/generate", {"token_ids": ids, "sampling_params": params})


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    return [one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]]


def spans_of(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in answer["choices"][0]["weight_versions"]]


def test_each_version_says_what_a_plain_forward_of_its_weights_says(engine: LiveEngine, models: dict[int, Path]) -> None:
    digests = {0: engine.ok("/paceline/digest")}
    quick = {}
    for version in (1, 2, 1, 0):
        report = change(engine, version)
        assert quick.setdefault(version, report["digest"]) == report["digest"]
        expected_sum = file_sha256(models[version] / WEIGHTS_FILE) if version else ""
        assert report["weights_sha256"] == expected_sum
        answer = generate(engine, PROMPT, 24)
        assert answer["choices"][0]["token_ids"] == greedy(models[version], PROMPT, 24)
        assert spans_of(answer) == [(str(version), 0, 24)]
        digest = digests.setdefault(version, engine.ok("/paceline/digest"))
        assert engine.ok("/paceline/digest") == digest
    assert len({digest["target"] for digest in digests.values()}) == len(set(quick.values())) == 3
    # The draft's digest covers the embedding it shares.
    assert len({digest["draft"] for digest in digests.values()}) == 3


def test_kv_of_another_version_is_never_reused(engine: LiveEngine, models: dict[int, Path]) -> None:
    """Without a salt: an engine that kept its cache would find the prompt in it, and go on from the wrong numbers."""
    for _ in range(2):
        kept = generate(engine, PROMPT, 8)
    assert kept["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    change(engine, 1)
    first = generate(engine, PROMPT, 24)
    assert not (first["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
    assert first["choices"][0]["token_ids"] == greedy(models[1], PROMPT, 24)


def test_requests_in_flight_go_on_and_every_token_is_its_versions(engine: LiveEngine, models: dict[int, Path]) -> None:
    engine.ok("/paceline/target/stage", {"version": 1})
    prompts = [[30 + i, *PROMPT[:20]] for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(generate, engine, prompt, 300, temperature=1.0) for prompt in prompts]
        while not engine.metric("vllm:generation_tokens_total") or not engine.metric("vllm:num_requests_running"):
            pass
        status, report = commit(engine, 1)
        assert status == 200, report
        answers = [future.result() for future in running]
    num_cut = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, told = answer["choices"][0]["token_ids"], logprobs_of(answer)
        spans = spans_of(answer)
        assert [span[1:] for span in spans] == [(0, 300)] or spans[0][2] == spans[1][1]
        num_cut += len(spans) == 2
        for label, start, end in spans:
            expected = score(models[int(label)], prompt + ids)[len(prompt) - 1 :]
            assert max(abs(told[i] - expected[i]) for i in range(start, end)) < FLOOR, (label, start, end)
    assert num_cut > 0


def test_a_failure_half_way_through_restores_weights_label_and_digest(engine: LiveEngine, models: dict[int, Path]) -> None:
    digest = engine.ok("/paceline/digest")
    engine.ok("/paceline/target/stage", {"version": 1})
    engine.rpc("probe_fail_next_target_load")
    status, answer = commit(engine, 1)
    assert status == 409
    assert "target 0 is back in force" in answer["error"]["message"]
    assert engine.ok("/paceline/digest") == digest
    restored = generate(engine, PROMPT, 24)
    assert (restored["choices"][0]["token_ids"], spans_of(restored)) == (greedy(models[0], PROMPT, 24), [("0", 0, 24)])
    assert change(engine, 1)["previous"] == 0


def test_a_version_that_is_not_in_force_at_the_deadline_is_taken_back(engine: LiveEngine, models: dict[int, Path]) -> None:
    engine.ok("/paceline/target/stage", {"version": 2})
    status, answer = commit(engine, 2, deadline_s=0.001)
    assert (status, answer["error"]["code"]) == (409, "target_refused")
    assert version_of(engine) == 0
    assert generate(engine, PROMPT, 16)["choices"][0]["token_ids"] == greedy(models[0], PROMPT, 16)


def test_a_stale_expectation_and_an_unstaged_version_are_refused(engine: LiveEngine) -> None:
    engine.ok("/paceline/target/stage", {"version": 1})
    status, answer = commit(engine, 1, expected=7)
    assert (status, answer["error"]["code"]) == (409, "stale_expected_active")
    status, answer = commit(engine, 77)
    assert status == 409
    assert "stage it first" in answer["error"]["message"]
    assert spans_of(generate(engine, PROMPT, 4)) == [("0", 0, 4)]


def test_bad_weights_are_refused_while_staging(engine: LiveEngine) -> None:
    store = TargetStore(engine.state_dir)

    def spoil(directory: Path, version: int) -> None:
        tensors = load_file(store.weights(1))
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        save_file(tensors, directory / WEIGHTS_FILE)
        text = (store.directory(1) / "manifest.json").read_text()
        old = store.manifest(1).sha256[WEIGHTS_FILE]
        text = text.replace(old, file_sha256(directory / WEIGHTS_FILE)).replace('"version": 1', f'"version": {version}')
        (directory / "manifest.json").write_text(text)

    version = store.publish(spoil)
    status, answer = engine.call("/paceline/target/stage", {"version": version})
    shutil.rmtree(store.directory(version))
    assert status == 422
    assert "model.norm.weight has shape" in answer["error"]["message"]


def test_drafts_can_be_swapped_under_another_target(engine: LiveEngine, models: dict[int, Path]) -> None:
    """The draft embeds with the target's own module, so it has the new embedding at once and a swap leaves that alone."""
    change(engine, 1)
    target = engine.ok("/paceline/digest")["target"]
    for version in (1, 0):
        engine.swap(version)
        assert generate(engine, PROMPT, 24)["choices"][0]["token_ids"] == greedy(models[1], PROMPT, 24)
    assert engine.ok("/paceline/digest")["target"] == target


def test_captured_steps_name_the_version_that_computed_them(engine: LiveEngine) -> None:
    engine.listener.clear()
    change(engine, 2)
    completion = engine.complete(PROMPT, max_tokens=8)
    engine.settle()
    assert {message.target_version for message, _ in engine.spans_of(completion)} == {2}


def test_an_engine_takes_a_rollout_as_the_gateway_passes_it_on(engine: LiveEngine, models: dict[int, Path]) -> None:
    """Every parameter written out, labels for the capture, a salt and a priority behind users."""
    sampling = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    asked = read_generate(json.dumps({"token_ids": PROMPT, "sampling_params": sampling}).encode(), max_choices=8)
    identity = Identity("rollout-1", "trainer", "math", capture=True)
    engine.listener.clear()
    answer = engine.ok("/inference/v1/generate", msgspec.json.decode(msgspec.json.encode(engine_fields(asked, identity, 0))))
    assert answer["choices"][0]["token_ids"] == greedy(models[0], PROMPT, 16)
    assert len(logprobs_of(answer)) == 16
    engine.settle()
    labels = {(span.tenant, span.domain) for captured in engine.listener.captured for span in captured.message.spans}
    assert labels == {("trainer", "math")}
    status = msgspec.convert(engine.ok("/paceline/status"), EngineStatus)
    assert why_unable(status.generate) == ""
    assert status.workers[0].staged_target_versions[:1] == [0]


def test_top_k_and_penalties_change_what_log_probabilities_are_of(engine: LiveEngine, models: dict[int, Path]) -> None:
    """Why the gateway refuses them: with `top_k` 1 a token that was all but certain is told with probability 1."""
    plain = logprobs_of(generate(engine, PROMPT, 8, temperature=1.0, seed=1))
    expected = score(models[0], PROMPT + generate(engine, PROMPT, 8, temperature=1.0, top_k=1)["choices"][0]["token_ids"])
    cut = logprobs_of(generate(engine, PROMPT, 8, temperature=1.0, top_k=1))
    assert max(abs(one) for one in cut) < FLOOR
    assert min(expected[len(PROMPT) - 1 :]) < -FLOOR
    assert min(plain) < -FLOOR


def test_an_engine_scores_a_canary_as_the_gateway_asks_it_to(engine: LiveEngine, models: dict[int, Path]) -> None:
    """See `server.engines.EngineClient.score`."""
    for version in (1, 0):
        change(engine, version)
        body = {"prompt": list(CANARY_IDS), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        told = engine.ok("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        assert told[0] is None
        logprobs = [entry[str(token)]["logprob"] for token, entry in zip(CANARY_IDS[1:], told[1:], strict=True)]
        manifest = TargetStore(engine.state_dir).manifest(1)
        error = manifest.canary.mean_error(logprobs)
        assert (error < manifest.canary.max_mean_error) == (version == 1), (version, error)
