"""RequestBook: what the worker knows about live requests, and which of them are captured."""

from __future__ import annotations

import hashlib
import re
import zlib
from array import array
from typing import Any, NamedTuple

DEFAULT_LABEL = "default"

# The engine appends `-<8 hex>` to every request id (vllm/v1/engine/input_processor.py:assign_request_id).
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)
# Requests the V2 runner makes up to warm itself (vllm/v1/worker/gpu/warmup.py).
_WARMUP_PREFIXES = ("_warmup", "_v2_mixed_warmup")
_HASH_RANGE = 2**32


class RequestInfo(NamedTuple):
    """One live request, as its first step told of it."""

    request_id: str
    """The engine's own: distinct also where clients repeat theirs."""
    base_id: str
    """Without the engine's random suffix: the same on every engine a request visits."""
    tenant: str
    domain: str
    temperature: float
    allows_capture: bool
    prompt_key: str
    """Hash of the prompt's token ids; empty where the prompt has none or the request is not captured."""


def is_selected(base_id: str, rate: float) -> bool:
    """Whether a request belongs to the captured share; the same answer on every engine."""
    return zlib.crc32(base_id.encode()) < rate * _HASH_RANGE


class RequestBook:
    """Live requests by engine id. The gateway's labels arrive in `SamplingParams.extra_args` (vLLM's `vllm_xargs`)."""

    def __init__(self) -> None:
        self._live: dict[str, RequestInfo] = {}
        self._finished: list[str] = []
        self.proposer: dict[str, int] = {}
        """Draft version that made each request's outstanding proposals."""

    def note(self, scheduler_output: Any) -> None:
        """Take in one step's news: requests that begin and requests that ended."""
        for request_id in scheduler_output.finished_req_ids:
            info = self._live.pop(request_id, None)
            self.proposer.pop(request_id, None)
            if info is not None and info.allows_capture:
                self._finished.append(info.request_id)
        for new in scheduler_output.scheduled_new_reqs:
            if not new.req_id.startswith(_WARMUP_PREFIXES):
                self._live[new.req_id] = _request_info(new.req_id, new.sampling_params, new.prompt_token_ids)

    def get(self, request_id: str) -> RequestInfo | None:
        return self._live.get(request_id)

    def take_finished(self) -> list[str]:
        """Ids of requests that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished


def _request_info(request_id: str, sampling_params: Any, prompt_ids: list[int] | None) -> RequestInfo:
    labels = (sampling_params.extra_args if sampling_params is not None else None) or {}
    allows_capture = labels.get("paceline_capture", 1) != 0
    return RequestInfo(
        request_id=request_id,
        base_id=_RANDOM_SUFFIX.sub("", request_id),
        tenant=str(labels.get("paceline_tenant") or DEFAULT_LABEL),
        domain=str(labels.get("paceline_domain") or DEFAULT_LABEL),
        temperature=float(sampling_params.temperature) if sampling_params is not None else 0.0,
        allows_capture=allows_capture,
        prompt_key=_prompt_key(prompt_ids) if prompt_ids and allows_capture else "",
    )


def _prompt_key(prompt_ids: list[int]) -> str:
    return hashlib.blake2b(array("I", prompt_ids).tobytes(), digest_size=8).hexdigest()
