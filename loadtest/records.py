"""What a load test keeps: one record per request, one sample of the system per second, on one clock.

Both are written as JSON lines while the run goes on, so that a run of any length takes no more memory. All times are seconds
since the run's start on the monotonic clock of the load tester.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Outcome = Literal["ok", "failed", "truncated", "cancelled"]


class RequestRecord(Struct, frozen=True, kw_only=True):
    """One request as its client saw it. load tester -> requests.jsonl."""

    index: int
    """Of the schedule; counts from 0."""
    lane: str
    phase: str
    domain: str
    """The name of the source its prompt is of."""
    prompt_id: str
    turn: int = 0
    """Of its conversation; 0 for single requests."""
    intended_at_s: float
    """When it had to be sent. Every latency counts from here; in a closed loop it is when it was sent."""
    sent_at_s: float
    ended_at_s: float
    chunk_times_s: list[float]
    """Arrivals of chunks that carried tokens."""
    chunk_token_counts: list[int]
    outcome: Outcome
    error: str | None = None
    status: int | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    num_cached_tokens: int | None = None
    draft_version: str | None = None
    target_version: str | None = None
    kv_path: str | None = None
    request_id: str | None = None
    accepted_per_step: list[int] | None = None
    """Proposals accepted in each verify step, where the engine tells them per request."""
    text: str = ""


class EngineSample(Struct, frozen=True, kw_only=True):
    """One engine at one instant."""

    ready: bool
    draining: bool
    num_running: float | None = None
    num_waiting: float | None = None
    kv_usage: float | None = None


class Swap(Struct, frozen=True, kw_only=True):
    """A draft that was swapped in, or the attempt."""

    at_s: float
    version: int
    previous: int | None
    outcome: str
    trigger: str


class SystemSample(Struct, frozen=True, kw_only=True):
    """The system at one instant. load tester -> timeline.jsonl. Counters are cumulative, as the system exports them."""

    at_s: float
    active_version: int | None
    steps: dict[str, dict[str, float]]
    """Verify steps by domain label and draft version."""
    accepted: dict[str, dict[str, list[float]]]
    """Accepted proposals by domain label and draft version, one number per position."""
    kv_paths: dict[str, float]
    """Routed requests by path."""
    prompt_tokens: float
    completion_tokens: float
    cpu_s: dict[str, float]
    """Processor seconds by process, where this machine can see them."""
    engines: dict[str, EngineSample]
    learner_loss: float | None = None
    learner_steps: int | None = None
    swaps: list[Swap] = []
    """Those seen for the first time in this sample."""
