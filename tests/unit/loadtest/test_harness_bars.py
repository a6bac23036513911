"""The bars of the load tester's own speed: what they count, and what they refuse to count."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.bars import harness
from loadtest.bars.harness import NUM_REQUESTS, Trial, Usage, growth
from loadtest.processes import SystemUnderTestError
from loadtest.records import RunRecord


def trial(rss_mib: list[float], *, num_ok: int = NUM_REQUESTS) -> Trial:
    run = RunRecord(
        name="n", url="u", model="m", seed=0, started_at_s=0, commit=None, machine={}, versions={}, num_requests={"ok": num_ok}
    )
    return Trial(run, Path("requests.jsonl"), Usage(rss_mib))


def test_memory_that_stays_is_flat_and_memory_that_grows_is_not() -> None:
    assert growth(trial([50, 60] + [60] * 98), {}).value == 0
    assert growth(trial([float(value) for value in range(100)]), {}).value == 80


def test_memory_over_too_few_requests_is_not_measured() -> None:
    found = growth(trial([60] * 100, num_ok=NUM_REQUESTS - 1), {})
    assert found.value is None
    assert "99999 requests" in found.detail["reason"]


@pytest.mark.rig
def test_one_run_on_a_core_of_its_own_is_measured() -> None:
    async def run() -> tuple[Trial, int]:
        scenario = harness._scenario({"kind": "closed", "concurrency": 4}, duration_s=2.0, warm_up_s=0.5, max_tokens=3)
        async with harness._tried(scenario, between_tokens_s=0.001) as found:
            return found, sum(len(one.chunk_times_s) for one in found.requests())

    found, num_chunks = asyncio.run(run())
    assert num_chunks == 3 * found.run.num_requests["ok"] > 0
    assert found.usage.cpu_s > 0.1
    assert max(found.usage.rss_mib) > 10


@pytest.mark.rig
def test_a_run_that_cannot_be_made_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        scenario = harness._scenario({"kind": "closed", "concurrency": 1}, duration_s=1.0, warm_up_s=0.1, max_tokens=3)
        monkeypatch.setattr(harness, "as_toml", lambda _scenario: "name = 'x'")
        async with harness._tried(scenario, between_tokens_s=0.0):
            pass

    with pytest.raises(SystemUnderTestError, match="is not a valid Scenario"):
        asyncio.run(run())
