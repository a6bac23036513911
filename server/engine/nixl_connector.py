"""NixlConnector, which never pulls KV whose lease may be over.

A decode engine reads the memory of a prefill engine without asking whether its blocks are still those of the prompt: where it
comes too late (it was stopped, or starved, between the legs and could send no heartbeat), it gets whatever another prompt left
there, and answers with it. vLLM only logs that on the prefill engine. It has a check for reads in the other direction
(`bidirectional_kv_xfer`): answers name the time their blocks are given up, and a read that comes within five seconds of it
fails, which `kv_load_failure_policy` turns into a recomputation. Here both halves of that check are used for prefills too. It knows
nothing of heartbeats, so a decode engine that is full for longer than that computes the prompt itself.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

Finished = tuple[bool, dict[str, Any] | None]


class NixlConnector(NixlPullConnector):
    """By this name vLLM knows what else NIXL needs; the module's path makes it ours."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            _refuse_late_pulls(self.connector_worker)

    def request_finished(self, request: Any, block_ids: list[int]) -> Finished:
        return self._dated(super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Finished:
        return self._dated(super().request_finished_all_groups(request, block_ids))

    def _dated(self, finished: Finished) -> Finished:
        """With the time, on this host's monotonic clock, from which the blocks may be another prompt's."""
        is_held, params = finished
        if is_held and params and params["do_remote_prefill"]:
            lease_s = self.kv_transfer_config.get_from_extra_config("kv_lease_duration", 30)
            params["remote_blocks_expiry_time"] = time.perf_counter() + lease_s
        return is_held, params


def _refuse_late_pulls(worker: Any) -> None:
    read = worker._read_blocks_for_req

    def read_in_time(req_id: str, meta: Any) -> None:
        engine_id = meta.remote.engine_id
        is_known = engine_id in worker._remote_agents and engine_id not in worker._invalid_remote_engines
        if is_known and worker._is_turn2_read_expired(meta):
            worker.xfer_stats.record_kv_expired_req()
            worker._handle_failed_transfer(req_id, None, worker._recv_failures, record_failed_transfer=False)
        else:
            read(req_id, meta)

    worker._read_blocks_for_req = read_in_time
