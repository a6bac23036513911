"""A prefill and a decode engine, and the KV between them: pulled over NIXL, the draft's too; computed anew where it is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import tiny
import torch
from conftest import make_drafts
from live_engine import TOKEN, Completion
from live_pair import BYTES, EXPIRED, FAILED, HITS, Pair, start_pair
from waiting import DEADLINE_S, wait_until

from server.config import KV_LEASE_S

BLOCK_TOKENS = 32
PROMPTS = [f"{index}: " + "what one engine has read the other need not read again. " * 6 for index in range(4)]


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    state_dir = tmp_path_factory.mktemp("pair-state")
    make_drafts(state_dir, tiny_target, draft_vocab_size=tiny.DRAFT_VOCAB, count=2)
    with start_pair(tiny_target, state_dir, tiny.DRAFT_VOCAB, worker_cls="probe_worker.ProbeCpuWorker") as pair:
        yield pair


def acceptance_length(completions: list[Completion]) -> float:
    """Tokens emitted per verify step, as vLLM counts them."""
    accepted = [count for each in completions for count in each.metrics["speculative_decoding"]["per_step_accepted"]]
    return 1 + sum(accepted) / len(accepted)


def draft_logits(pair: Pair) -> torch.Tensor:
    """Of the decode engine's draft since the last call, one row a forward."""
    return torch.tensor(pair.decode.rpc("probe_take_draft_logits"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pulled_kv_gives_the_text_that_computed_kv_gives(pair: Pair, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 7}
    local = [pair.decode.complete(prompt, cache_salt=f"local-{temperature}", **options) for prompt in PROMPTS]
    hits, moved_bytes = pair.decode.metric(HITS), pair.decode.metric(BYTES)
    pulled = [pair.complete(prompt, salt=f"pulled-{temperature}", **options) for prompt in PROMPTS]
    assert [completion.token_ids for completion in pulled] == [completion.token_ids for completion in local]
    num_tokens = [len(completion.prompt_ids) for completion in pulled]
    assert pair.decode.metric(HITS) - hits == sum(num_tokens)
    assert pair.decode.metric(FAILED) == 0
    layout = pair.decode.ok("/paceline/status")["kv"]
    num_blocks = sum(-(-count // BLOCK_TOKENS) for count in num_tokens)
    assert pair.decode.metric(BYTES) - moved_bytes == num_blocks * BLOCK_TOKENS * layout["bytes_per_token"]


def test_engines_tell_the_layout_of_their_kv(pair: Pair) -> None:
    layouts = [engine.ok("/paceline/status")["kv"] for engine in (pair.prefill, pair.decode)]
    assert [layout.pop("transfer") for layout in layouts] == ["kv_producer", "kv_consumer"]
    layers = tiny.LAYERS + 1  # the draft has one
    assert layouts[0] == layouts[1]
    assert layouts[0]["bytes_per_token"] == layers * 2 * tiny.KV_HEADS * tiny.HEAD_DIM * 4
    assert layouts[0]["block_size_tokens"] == BLOCK_TOKENS
    assert layouts[0]["max_model_len"] == 1024
    assert layouts[0]["num_blocks"] * BLOCK_TOKENS * layouts[0]["bytes_per_token"] <= 1 << 29


def test_the_drafts_kv_travels_with_the_targets(pair: Pair) -> None:
    """The draft computes what it computes where it has read the prompt itself, and is accepted as often."""
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 64}
    draft_logits(pair)
    local = [pair.decode.complete(prompt, cache_salt="draft-local", **options) for prompt in PROMPTS]
    local_logits = draft_logits(pair)
    pulled = [pair.complete(prompt, salt="draft-pulled", **options) for prompt in PROMPTS]
    torch.testing.assert_close(draft_logits(pair), local_logits, atol=2e-3, rtol=2e-3)
    length = acceptance_length(local)
    assert length > 1.2
    assert acceptance_length(pulled) == pytest.approx(length, rel=0.05)


def test_a_swap_between_the_two_legs_changes_the_drafts_work_only(pair: Pair) -> None:
    """The draft reads what its forerunner left of the prompt: speed may suffer, the text does not."""
    reference = pair.decode.complete(PROMPTS[0], cache_salt="swap-reference")
    params = pair.prefilled(PROMPTS[0], "swapped")
    pair.swap(1)
    try:
        draft_logits(pair)
        swapped = pair.decode.complete(PROMPTS[0], kv_transfer_params=params, cache_salt="swapped")
        swapped_logits = draft_logits(pair)
        settled = pair.complete(PROMPTS[0], salt="swap-settled")
        settled_logits = draft_logits(pair)
        assert swapped.token_ids == settled.token_ids == reference.token_ids
        assert not torch.allclose(swapped_logits[:1], settled_logits[:1], atol=2e-3, rtol=2e-3)
    finally:
        pair.swap(0)


def test_kv_whose_lease_may_be_over_is_not_pulled(pair: Pair) -> None:
    """The prompt is computed where it is decoded, and the text is the same."""
    reference = pair.decode.complete(PROMPTS[1], cache_salt="late-reference")
    params = pair.prefilled(PROMPTS[1], "late")
    assert 0.0 < params["remote_blocks_expiry_time"] - time.perf_counter() <= KV_LEASE_S
    num_bytes, num_expired = pair.decode.metric(BYTES), pair.decode.metric(EXPIRED)
    params["remote_blocks_expiry_time"] -= KV_LEASE_S  # as if all that time had passed
    late = pair.decode.complete(PROMPTS[1], kv_transfer_params=params, cache_salt="late")
    assert late.token_ids == reference.token_ids
    assert pair.decode.metric(EXPIRED) == num_expired + 1
    assert pair.decode.metric(BYTES) == num_bytes


def test_nixl_leaves_each_engine_on_its_own_core(pair: Pair) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for engine, core in ((pair.prefill, cores[0]), (pair.decode, cores[-1])):
        pid = engine.ok("/paceline/status")["workers"][0]["pid"]
        assert os.sched_getaffinity(pid) == {core}


def test_an_idle_engine_leaves_its_core_to_others(pair: Pair) -> None:
    workers = [psutil.Process(engine.ok("/paceline/status")["workers"][0]["pid"]) for engine in (pair.prefill, pair.decode)]

    def busy_s() -> list[float]:
        """Processor time that each takes in the next three seconds."""
        before_s = [sum(worker.cpu_times()[:2]) for worker in workers]
        time.sleep(3.0)
        return [sum(worker.cpu_times()[:2]) - before for worker, before in zip(workers, before_s, strict=True)]

    # vLLM's own queues poll for a while before they wait.
    wait_until(lambda: max(busy_s()) < 0.3, "for both workers to leave their cores to others")


def test_nothing_of_an_engine_listens_beyond_this_machine(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        process = psutil.Process(engine.process.pid)
        family = [process, *process.children(recursive=True)]
        sockets = [socket for member in family for socket in member.net_connections("inet")]
        listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}


def test_a_prefill_engine_lost_between_the_legs_costs_time_only(pair: Pair) -> None:
    reference = pair.decode.complete(PROMPTS[2], cache_salt="lost-reference")
    params = pair.prefilled(PROMPTS[2], "lost")
    pair.prefill.kill()
    status, answer = pair.decode.call("/v1/completions", {
        "model": pair.decode.model, "prompt": PROMPTS[2], "max_tokens": 32, "temperature": 0.0, "ignore_eos": True,
        "kv_transfer_params": params, "cache_salt": "lost",
    })  # fmt: skip
    assert (status, answer["choices"][0]["text"]) == (200, reference.text), json.dumps(answer)
    assert pair.decode.metric(FAILED) > 0


def test_a_core_that_dies_with_a_question_open_takes_its_engine_along(pair: Pair) -> None:
    """vLLM's server would wait for the answer for ever, with its port closed."""
    family = psutil.Process(pair.decode.process.pid).children(recursive=True)
    core = next(member for member in family if "EngineCore" in " ".join(member.cmdline()))
    core.send_signal(signal.SIGSTOP)
    with contextlib.closing(HTTPConnection(urlsplit(pair.decode.url).netloc, timeout=DEADLINE_S)) as asked:
        asked.request("GET", "/paceline/status", headers={"Authorization": f"Bearer {TOKEN}"})
        for _ in range(3):  # the server's event loop takes up what lies on its sockets before it has answered so often
            assert pair.decode.call("/health")[0] == 200
        core.send_signal(signal.SIGKILL)
        response = asked.getresponse()
        status, answer = response.status, json.loads(response.read())
    assert (status, answer["error"]["code"]) == (500, "engine_error")
    pair.decode.process.wait(timeout=DEADLINE_S)
