"""Run directories as the load tester writes them, with contents that a test chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtest.records import RequestRecord, RunRecord, SystemSample

STEADY = """
name = "steady"
what = "One lane at one rate."
[[lane]]
name = "users"
[[lane.phase]]
name = "only"
duration_s = 100.0
arrivals = { kind = "poisson", rate_per_s = 1.0 }
traffic = { sharegpt = 1.0 }
"""

ENDED = RunRecord(
    name="steady", url="http://127.0.0.1:1", model="tiny", seed=0, started_at_s=1.7e9, commit="abc1234", machine={"cores": 2},
    versions={"paceline": "0"}, duration_s=100.0, is_valid=True,
)  # fmt: skip


def request(index: int, *, at_s: float, ttft_s: float = 0.5, gaps_s: Sequence[float] = (0.1, 0.1), per_chunk: int = 1,
            **other: Any) -> RequestRecord:  # fmt: skip
    """A request that is sent when it has to be, and answered in chunks of `per_chunk` tokens each."""
    times = [at_s + ttft_s]
    for gap_s in gaps_s:
        times.append(times[-1] + gap_s)
    fields: dict[str, Any] = {
        "index": index,
        "lane": "users",
        "phase": "only",
        "domain": "sharegpt",
        "prompt_id": f"p{index}",
        "intended_at_s": at_s,
        "sent_at_s": at_s,
        "ended_at_s": times[-1],
        "chunk_times_s": times,
        "chunk_token_counts": [per_chunk] * len(times),
        "outcome": "ok",
        "status": 200,
        "finish_reason": "stop",
        "num_prompt_tokens": 10,
        "num_completion_tokens": per_chunk * len(times),
    }
    return RequestRecord(**{**fields, **other})


def sample(at_s: float, *, steps: Any = 0.0, accepted: Any = (), domain: str = "sharegpt", version: str = "1",
           **other: Any) -> SystemSample:  # fmt: skip
    """A reading with one domain and one version; or with whole tables of `steps` and `accepted`."""
    fields: dict[str, Any] = {
        "at_s": at_s,
        "active_version": int(version),
        "steps": steps if isinstance(steps, dict) else {domain: {version: steps}},
        "accepted": accepted if isinstance(accepted, dict) else {domain: {version: list(accepted)}},
        "kv_paths": {},
        "prompt_tokens": 0.0,
        "completion_tokens": 0.0,
        "cpu_s": {},
        "engines": {},
    }
    return SystemSample(**{**fields, **other})


def write_run(
    path: Path,
    requests: Iterable[RequestRecord],
    samples: Iterable[SystemSample] = (),
    *,
    scenario: str = STEADY,
    record: RunRecord | None = ENDED,
) -> Path:
    """Write the four files; returns the directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "scenario.toml").write_text(scenario)
    if record is not None:
        (path / "run.json").write_bytes(msgspec.json.encode(record))
    for name, rows in (("requests.jsonl", requests), ("timeline.jsonl", samples)):
        with (path / name).open("wb") as file:
            file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
    return path
