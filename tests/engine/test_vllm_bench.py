"""vLLM's own load tester, called as the cross-check calls it: it takes our options, and its result has the keys we read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.crosscheck import vllm_bench
from loadtest.crosscheck.numbers import Numbers
from loadtest.crosscheck.workload import Workload
from loadtest.mock_engine import Pace
from loadtest.processes import SystemUnderTestError
from loadtest.recital import MODEL
from loadtest.rig import mock_addresses, running_mocks

FIRST_TOKEN_MS = 1500.0
BETWEEN_TOKENS_MS = 100.0


def measured(tokenizer_dir: Path, directory: Path, *, model: str = MODEL) -> Numbers:
    async def run() -> Numbers:
        addresses = mock_addresses(1, Pace(first_token_s=FIRST_TOKEN_MS / 1e3, between_tokens_s=BETWEEN_TOKENS_MS / 1e3))
        async with running_mocks(addresses):
            workload = Workload(
                url=addresses[0].url,
                model=model,
                tokenizer_dir=tokenizer_dir,
                prompts=("What is the sum of two and three?", "And of four and five?"),
                concurrency=2,
                max_tokens=6,
            )
            return await vllm_bench.measure(workload, 5, directory)

    return asyncio.run(run())


def test_it_reports_what_the_server_did(tiny_target: Path, tmp_path: Path) -> None:
    found = measured(tiny_target, tmp_path)
    assert found.num_requests == 5
    assert found.output_tokens == 6
    # A busy machine adds to each, and may take from the second what it adds to the first.
    assert found.ttft_mean_ms >= FIRST_TOKEN_MS
    assert found.ttft_mean_ms + 5 * found.tpot_mean_ms >= FIRST_TOKEN_MS + 5 * BETWEEN_TOKENS_MS
    assert found.tpot_mean_ms < FIRST_TOKEN_MS / 2


def test_requests_that_the_server_refuses_are_no_result(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemUnderTestError, match="5 of 5 requests failed"):
        measured(tiny_target, tmp_path, model="absent")
