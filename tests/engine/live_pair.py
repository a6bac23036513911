"""Pair: a prefill and a decode engine as the launcher would start them, with NIXL between them and KV events for one gateway."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from live_engine import CPU_WORKER, Completion, LiveEngine, start_engine

from launch import host
from launch.config import PoolSettings, SystemConfig
from launch.engine_command import as_flags, kv_events_config, kv_transfer_env, nixl_connector
from server.config import EngineEndpoint

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
                 "remote_host": None, "remote_port": None}  # fmt: skip
HITS, FAILED, BYTES, EXPIRED = (
    "vllm:external_prefix_cache_hits_total",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_num_kv_expired_reqs_total",
)
"""EXPIRED of a prefill engine: leases that ran out, as those do that nobody ends; of a decode engine: pulls it did not dare."""


class Pair(NamedTuple):
    """One engine of each kind."""

    prefill: LiveEngine
    decode: LiveEngine
    endpoints: tuple[EngineEndpoint, ...]
    """How a gateway reaches them."""
    kv_events_endpoint: str
    """Where that gateway takes their KV events."""

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


@contextmanager
def start_pair(target_dir: Path, state_dir: Path, draft_vocab_size: int, *, worker_cls: str = CPU_WORKER) -> Iterator[Pair]:
    """Each engine on a core of its own."""
    pools = "pool=[{id='prefill-0', kind='prefill', port=0}, {id='decode-0', kind='decode', port=0}]"
    config = host.with_ports(SystemConfig.load([], [pools, "gateway.port=0", "gateway.admin_port=0"]))
    cores = sorted(os.sched_getaffinity(0))

    def start(pool: PoolSettings, core: int) -> tuple[LiveEngine, EngineEndpoint]:
        facts = host.gather()
        replay = f"ipc://{state_dir}/{pool.id}-kv.sock"
        endpoint = EngineEndpoint(id=pool.id, kind=pool.kind, url="", events_endpoint="", kv_replay_endpoint=replay)
        options = {
            "max_num_seqs": 8,
            "kv_transfer_config": nixl_connector(pool, facts),
            "kv_events_config": kv_events_config(config, endpoint),
            "enable_prompt_tokens_details": True,
        }
        started = start_engine(
            target_dir,
            state_dir,
            draft_vocab_size,
            options=as_flags(options),
            worker_cls=worker_cls,
            engine_id=pool.id,
            core=core,
            variables=kv_transfer_env(pool, facts),
        )
        engine = stack.enter_context(started)
        reached = {"url": engine.url, "events_endpoint": engine.listener.events_endpoint}
        return engine, endpoint.model_copy(update=reached)

    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        (prefill, prefill_end), (decode, decode_end) = threads.map(start, config.pool, (cores[0], cores[-1]))
        yield Pair(prefill, decode, (prefill_end, decode_end), config.kv_events_endpoint)
