"""What a load test keeps: one record per request, one sample of the system per second, on one clock.

Both are written as JSON lines while the run goes on, so that a run of any length takes no more memory. All times are seconds
since the run's start on the monotonic clock of the load tester. `run.json` says what ran, and whether it may be believed.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from loadtest.chunks import Count, StepCount

SCENARIO_FILE = "scenario.toml"
RUN_FILE = "run.json"
REQUESTS_FILE = "requests.jsonl"
TIMELINE_FILE = "timeline.jsonl"
"""What lies in the directory of a run."""

MAX_RUN_S = 1e6
"""Eleven days. What a file says of later times is no reading of a run, and would take memory for every second until then."""
Seconds = Annotated[float, Meta(ge=-MAX_RUN_S, le=MAX_RUN_S)]

Outcome = Literal["ok", "failed", "truncated", "cancelled"]


class RequestRecord(Struct, frozen=True, kw_only=True):
    """One request as its client saw it. load tester -> requests.jsonl."""

    index: int
    """Of its lane's schedule; counts from 0. The turns of a conversation share it."""
    lane: str
    phase: str
    domain: str
    """The name of the source its prompt is of."""
    prompt_id: str
    turn: int = 0
    """Of its conversation; 0 for single requests."""
    intended_at_s: Seconds
    """When it had to be sent. Every latency counts from here; in a closed loop it is when it was sent.
    Of a conversation's later turns: the end of the answer before, and the user's pause."""
    is_open_loop: bool = True
    """It had to be sent at a fixed time, or after a pause: only then has it a dispatch lag."""
    sent_at_s: Seconds
    ended_at_s: Seconds
    chunk_times_s: list[Seconds]
    """Arrivals of chunks that carried tokens."""
    chunk_token_counts: list[Count]
    outcome: Outcome
    error: str | None = None
    status: int | None = None
    finish_reason: str | None = None
    num_prompt_tokens: Count | None = None
    num_completion_tokens: Count | None = None
    num_cached_tokens: Count | None = None
    draft_version: str | None = None
    target_version: str | None = None
    kv_path: str | None = None
    request_id: str | None = None
    accepted_per_step: list[StepCount] | None = None
    """Proposals accepted in each verify step, where the engine tells them per request."""
    drafted_per_step: list[StepCount] | None = None
    """Proposals made for each of these steps."""
    num_spec_tokens: StepCount | None = None
    """K, the most proposals that the engine makes for a step."""
    text: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError of what no client saw: a line of a damaged file."""
        if len(self.chunk_times_s) != len(self.chunk_token_counts) or self.ended_at_s < self.sent_at_s:
            raise ValueError("chunks without a time or a count, or an end before the beginning")


class EngineSample(Struct, frozen=True, kw_only=True):
    """One engine at one instant."""

    ready: bool
    draining: bool
    num_running: float | None = None
    num_waiting: float | None = None
    kv_usage: float | None = None


COMMITTED = "committed"
"""The outcome of a swap that was made."""


class Swap(Struct, frozen=True, kw_only=True):
    """A draft that was swapped in, or the attempt."""

    at_s: float
    """When the attempt began. The commit is at its end: the engines load the draft first."""
    duration_s: float = 0.0
    version: int
    previous: int | None
    outcome: str
    trigger: str


class SystemSample(Struct, frozen=True, kw_only=True):
    """The system at one instant. load tester -> timeline.jsonl. Counters are cumulative, as the system exports them."""

    at_s: Seconds
    active_version: int | None
    steps: dict[str, dict[str, float]]
    """Verify steps by domain label and draft version."""
    accepted: dict[str, dict[str, list[float]]]
    """Accepted proposals by domain label and draft version, one number per position."""
    proposed: dict[str, dict[str, float]] = {}
    """Proposals by domain label and draft version, where the system counts them."""
    kv_paths: dict[str, float]
    """Routed requests by path."""
    prompt_tokens: float
    completion_tokens: float
    cpu_s: dict[str, float]
    """Processor seconds by process, where this machine can see them."""
    gpu_s: dict[str, float] = {}
    """GPU seconds since the run's start by GPU of this machine: busy ones; where a GPU does not tell them all, so its name says."""
    engines: dict[str, EngineSample]
    learner_loss: float | None = None
    learner_steps: int | None = None
    swaps: list[Swap] = []
    """Those seen for the first time in this sample."""


class ActionRecord(Struct, frozen=True, kw_only=True):
    """One action of the scenario, as it went."""

    at_s: float
    ended_at_s: float
    do: str
    process: str
    problem: str | None
    """Why it did not happen; None where it did."""


class RunRecord(Struct, frozen=True, kw_only=True):
    """What ran, and whether it may be believed. load tester -> run.json; written at the start and anew at the end."""

    name: str
    """Of the scenario."""
    url: str
    model: str
    seed: int
    started_at_s: Annotated[float, Meta(ge=0, le=2.5e11)]
    """Wall clock; 0 of every other time."""
    commit: str | None
    """Of this source tree; None outside a checkout."""
    machine: dict[str, str | int]
    versions: dict[str, str]
    duration_s: float | None = None
    """Until the last answer; None while it runs, or where it was killed."""
    is_valid: bool | None = None
    """None while it runs."""
    invalid_reasons: list[str] = []
    was_interrupted: bool = False
    num_broken: dict[str, int] = {}
    """What could not be read and was passed over, by source, or by lane for lines of its traces; what was whole is not named."""
    num_requests: dict[str, int] = {}
    """By outcome."""
    dispatch_lag_ms: dict[str, float | None] = {}
    """`p50`, `p99` and `max`, warm-up and cool-down cut; None where nothing was due at a fixed time."""
    busy_share: float | None = None
    """Processor seconds of the load tester per second of the run: near 1 it was the limit, also of a closed loop."""
    niceness: int = 0
    """Of the load tester's sender: below 0, where it is allowed, it goes before what it measures on a full machine."""
    actions: list[ActionRecord] = []
