"""What the load tester writes is what the report reads: a real run over real sockets, then its report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from run_rig import Server, phase, run, scenario

from loadtest.report.analysis import analyse
from loadtest.report.command import report
from loadtest.statistics import Interval

METRICS = """
vllm:spec_decode_num_drafts_total{{engine="0"}} {steps}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
vllm:generation_tokens_total{{engine="0"}} {tokens}
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:num_requests_running{{engine="0"}} 2
"""


async def slow_answer(body: dict[str, Any], send: Callable[[Any], Awaitable[None]]) -> None:
    """Four tokens in two chunks 100 ms apart; a prompt that ends in 7 gets an error after the first."""
    await asyncio.sleep(0.05)
    await send({"choices": [{"delta": {"content": "two tokens"}}]})
    await asyncio.sleep(0.1)
    if body["messages"][0]["content"].endswith("7"):
        await send({"error": {"message": "the engine failed", "type": "server_error", "param": None, "code": "engine_failed"}})
        return
    await send({"choices": [{"delta": {"content": " two more"}, "finish_reason": "stop"}]})
    await send({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}})
    await send("[DONE]")


@pytest.mark.rig
def test_the_report_of_a_run_says_what_the_server_did(tmp_path: Path) -> None:
    server = Server(slow_answer, metrics=METRICS.format(steps=1000, first=900, second=800, tokens=5000))

    async def serve_on() -> None:
        while not server.num_pages:
            await asyncio.sleep(0.01)
        server.metrics = METRICS.format(steps=1100, first=960, second=820, tokens=5180)

    open_loop = phase({"kind": "poisson", "rate_per_s": 20.0}, duration_s=3.0)
    closed = phase({"kind": "closed", "concurrency": 2}, duration_s=3.0)
    left = run(scenario({"phase": [open_loop]}, {"phase": [closed]}), server, tmp_path, beside=serve_on)
    found = analyse(tmp_path)

    assert found.why_invalid == []
    counts = {outcome: count for outcome, count in found.everything.num_by_outcome.items() if count}
    assert counts == {outcome: count for outcome, count in left.run.num_requests.items() if count}
    assert counts["failed"] > 0
    assert found.everything.num_requests == len(server.asked)
    assert found.span == Interval(0.0, pytest.approx(left.run.duration_s, abs=0.1))
    assert 50.0 <= found.everything.ttft_ms.percentiles["p50"].value < 1000.0
    assert 33.0 <= found.everything.tpot_ms.percentiles["p50"].value < 500.0
    assert found.everything.tokens_per_chunk.value == pytest.approx(2.0)
    assert found.acceptance.acceptance_length.value == pytest.approx(1.8)
    assert found.acceptance.by_position == pytest.approx([0.6, 0.2])
    assert found.cost.num_tokens == 180.0
    assert found.series.kv_usage["0"][1] == 0.25
    assert set(found.groups["lane"]) == {"lane-0", "lane-1"}
    assert list(found.groups["kv_path"]) == ["combined"]
    # Of fewer than a hundred requests it lies between the two largest, wherever one puts it there.
    *_, second_ms, first_ms = sorted(1e3 * (one.sent_at_s - one.intended_at_s) for one in left.requests if one.is_open_loop)
    for lag_ms in (found.dispatch_lag_p99_ms, left.run.dispatch_lag_ms["p99"]):
        assert lag_ms is not None
        assert second_ms - 0.1 <= lag_ms <= first_ms + 0.1

    said: list[str] = []
    assert report(tmp_path, None, said.append) == 0
    assert f"{counts['failed']} failed" in said[1]
