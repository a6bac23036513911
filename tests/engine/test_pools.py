"""A prefill and a decode engine, and the KV between them: pulled over NIXL, the draft's too; computed anew where it is lost."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import tiny
import torch
from conftest import make_drafts
from live_engine import Completion, LiveEngine, start_engine

from launch import host
from launch.config import PoolSettings, SystemConfig
from launch.engine_command import as_flags, kv_events_config, kv_transfer_env, nixl_connector
from server.config import EngineEndpoint

BLOCK_TOKENS = 32
PROMPTS = [f"{index}: " + "what one engine has read the other need not read again. " * 6 for index in range(4)]
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
                 "remote_host": None, "remote_port": None}  # fmt: skip
HITS, FAILED, BYTES = (
    "vllm:external_prefix_cache_hits_total",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_bytes_transferred_sum",
)


class Pair(NamedTuple):
    """One engine of each kind."""

    prefill: LiveEngine
    decode: LiveEngine

    def prefilled(self, prompt: str, salt: str) -> dict[str, Any]:
        """What the decode engine must know to pull the prompt's KV."""
        body = {"model": self.prefill.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "cache_salt": salt}
        return dict(self.prefill.ok("/v1/completions", body | {"kv_transfer_params": REMOTE_DECODE})["kv_transfer_params"])

    def complete(self, prompt: str, *, salt: str, **options: Any) -> Completion:
        """Prefill on one engine, decode on the other."""
        params = self.prefilled(prompt, salt)
        return self.decode.complete(prompt, kv_transfer_params=params, cache_salt=salt, **options)

    def swap(self, version: int) -> None:
        for engine in (self.prefill, self.decode):
            if engine.active() != version:
                engine.swap(version)


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    state_dir = tmp_path_factory.mktemp("pair-state")
    make_drafts(state_dir, tiny_target, draft_vocab_size=tiny.DRAFT_VOCAB, count=2)
    pools = "pool=[{id='prefill-0', kind='prefill', port=0}, {id='decode-0', kind='decode', port=0}]"
    config = host.with_ports(SystemConfig.load([], [pools, "gateway.port=0", "gateway.admin_port=0"]))
    cores = sorted(os.sched_getaffinity(0))

    def start(pool: PoolSettings, core: int) -> LiveEngine:
        facts = host.gather()
        replay = f"ipc://{state_dir}/{pool.id}-kv.sock"
        endpoint = EngineEndpoint(id=pool.id, url="", events_endpoint="", kv_replay_endpoint=replay)
        options = {
            "max_num_seqs": 8,
            "kv_transfer_config": nixl_connector(pool, facts),
            "kv_events_config": kv_events_config(config, endpoint),
            "enable_prompt_tokens_details": True,
        }
        engine = start_engine(
            tiny_target,
            state_dir,
            tiny.DRAFT_VOCAB,
            options=as_flags(options),
            worker_cls="probe_worker.ProbeCpuWorker",
            engine_id=pool.id,
            core=core,
            variables=kv_transfer_env(pool, facts),
        )
        return stack.enter_context(engine)

    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        prefill, decode = threads.map(start, config.pool, (cores[0], cores[-1]))
        yield Pair(prefill, decode)


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


def test_nixl_leaves_each_engine_on_its_own_core(pair: Pair) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for engine, core in ((pair.prefill, cores[0]), (pair.decode, cores[-1])):
        pid = engine.ok("/paceline/status")["workers"][0]["pid"]
        assert os.sched_getaffinity(pid) == {core}


def test_an_idle_engine_leaves_its_core_to_others(pair: Pair) -> None:
    workers = [psutil.Process(engine.ok("/paceline/status")["workers"][0]["pid"]) for engine in (pair.prefill, pair.decode)]
    time.sleep(2.0)  # vLLM's own queues poll for a second before they wait
    before_s = [sum(worker.cpu_times()[:2]) for worker in workers]
    time.sleep(3.0)
    for worker, before in zip(workers, before_s, strict=True):
        assert sum(worker.cpu_times()[:2]) - before < 0.3


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
