"""The bars about what a gateway costs, saves and survives: their values, and that each can be missed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tiny_system

from loadtest import vllm_router
from loadtest.bars import baseline, overhead, routing
from loadtest.client import StreamResult
from loadtest.mock_engine import MockEngine, Pace, serving
from loadtest.processes import SystemUnderTestError, running_process
from loadtest.recital import Alphabet
from loadtest.traffic import Prompt
from wire.ports import free_ports

PROMPTS = (Prompt("p", ({"role": "user", "content": "say it"},)),)


def answer(*, wait_s: float = 0.1, text: str = "abc", error: str | None = None) -> StreamResult:
    return StreamResult(
        "p",
        10.0,
        status=200,
        text=text,
        num_completion_tokens=3,
        chunk_times_s=[10.0 + wait_s],
        first_event_at_s=10.0 + wait_s,
        is_complete=error is None,
        finish_reason="length",
        error=error,
    )


def test_overhead_is_the_difference_of_quantiles_in_ms() -> None:
    direct = [0.050 + 0.00001 * index for index in range(200)]
    found = overhead.differences_ms([value + 0.003 for value in direct], direct)
    assert {name: round(estimate.value, 3) for name, estimate in found.items()} == {"p50": 3.0, "p99": 3.0}
    assert found["p99"].low <= 3.0 <= found["p99"].high


def test_a_failed_request_leaves_no_overhead_to_report() -> None:
    assert overhead.first_bytes([answer(wait_s=0.25)]) == [0.25]
    with pytest.raises(SystemUnderTestError, match="1 of 2 requests failed: gone"):
        overhead.first_bytes([answer(), answer(error="gone")])
    with pytest.raises(SystemUnderTestError, match="nothing was sent"):
        overhead.first_bytes([])


def test_lanes_run_side_by_side_and_a_slower_one_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "MIN_TOKENS", 2)
    monkeypatch.setattr(overhead, "MAX_TOKENS", 4)

    async def run() -> list[list[StreamResult]]:
        ports = free_ports(2)
        slow = MockEngine("slow", Pace(first_token_s=1.0, between_tokens_s=0.001), Alphabet())
        fast = MockEngine("fast", Pace(first_token_s=0.01, between_tokens_s=0.001), Alphabet())
        async with (
            serving(slow, 0, f"tcp://127.0.0.1:{ports[0]}") as slow_url,
            serving(fast, 0, f"tcp://127.0.0.1:{ports[1]}") as fast_url,
        ):
            return await overhead.side_by_side([(slow_url, 4), (fast_url, 2)], PROMPTS, for_s=4.0, skip_s=0.2)

    slow, fast = asyncio.run(run())
    found = overhead.differences_ms(overhead.first_bytes(slow), overhead.first_bytes(fast))
    assert found["p50"].value > 300
    assert min(len(slow), len(fast)) >= 4


def test_the_baseline_compares_waits_and_counts_failures_around_the_kill() -> None:
    waits = {"ours": [0.2] * 50, "theirs": [0.1] * 50}
    killed = {"ours": [answer(), answer(text="abb"), answer(error="gone")], "theirs": [answer()]}
    values = baseline.values(waits, killed)
    assert values["vllm_router_ttft_p99_ratio"].value == pytest.approx(2.0)
    assert values["vllm_router_failed"].value == 2
    assert values["vllm_router_failed"].detail["failed_theirs"] == 0
    assert baseline.values(waits, {"ours": [], "theirs": []})["vllm_router_failed"].value is None


def test_the_routers_environment_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(vllm_router, "_REQUIREMENTS", ("no such requirement",))
    with pytest.raises(SystemUnderTestError, match="ended with code"):
        vllm_router.ensure_installed()
    (vllm_router.environment_dir() / "installed").touch()
    assert vllm_router.ensure_installed() == tmp_path / "venvs" / "vllm-router-0.1.17" / "bin" / "python"


def test_a_process_that_ends_at_once_is_reported_with_its_last_words() -> None:
    async def run() -> None:
        argv = ["python3", "-c", "raise SystemExit('no port')"]
        async with running_process(argv, ready_url="http://127.0.0.1:9/health"):
            pass

    with pytest.raises(SystemUnderTestError, match="no port"):
        asyncio.run(run())


def arm(num_tokens: float, wait_s: float) -> routing.Arm:
    return routing.Arm(num_tokens, [answer(wait_s=wait_s + 0.001 * index) for index in range(20)])


def test_what_routing_by_kv_saves_is_a_ratio_of_prefilled_tokens() -> None:
    values = routing.values(arm(1000, 0.1), arm(2500, 0.2))
    assert values["prefill_saving"].value == 2.5
    assert values["ttft_p50_ratio"].value is not None
    assert 0.5 < values["ttft_p50_ratio"].value < 0.6
    worse = routing.values(arm(2500, 0.2), arm(1000, 0.1))
    assert worse["prefill_saving"].value == 0.4
    assert all(worse[name].value > 1 for name in ("ttft_p50_ratio", "ttft_p99_ratio"))  # type: ignore[operator]
    assert routing.values(arm(0, 0.1), arm(0, 0.1))["prefill_saving"].value is None


def test_index_hits_are_the_share_of_predictions_borne_out() -> None:
    page = "\n".join(
        f'paceline_kv_predictions_total{{outcome="{name}"}} {count}' for name, count in (("correct", 9), ("over", 1))
    )
    assert routing.index_hits(page).value == 90
    assert routing.index_hits("").value is None


def test_prefilled_tokens_are_read_off_every_engine_as_soon_as_all_say_them(tmp_path: Path) -> None:
    first = 'vllm:prompt_tokens_by_source_total{engine="engine-0",source="local_compute"} 7'
    cached = 'vllm:prompt_tokens_by_source_total{engine="engine-0",source="local_cache_hit"} 100'
    second = 'vllm:prompt_tokens_by_source_total{engine="engine-1",source="local_compute"} 4'

    async def run() -> float:
        async with tiny_system.running(tmp_path, routing.POOLS) as (tiny, system):
            tiny.extra_metrics = f"{first}\n{cached}"
            with pytest.raises(SystemUnderTestError, match="prompt_tokens_by_source"):
                await system.read_metrics(routing.prefilled, within_s=0.0)
            reading = asyncio.create_task(system.read_metrics(routing.prefilled))
            await asyncio.sleep(0.1)
            tiny.extra_metrics += f"\n{second}"
            return await reading

    assert asyncio.run(run()) == 11
