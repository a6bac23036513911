"""aiperf, NVIDIA's load tester: installed on demand into a virtual environment of its own, because it pins many packages."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.crosscheck.child import run_to_end
from loadtest.crosscheck.numbers import Numbers, positive, read_json
from loadtest.crosscheck.workload import Workload
from loadtest.environments import ensure_installed
from loadtest.processes import SystemUnderTestError

VERSION = "0.13.0"
NAME = f"aiperf {VERSION}"
LOCK = Path(__file__).with_name("aiperf.lock")
_ENVIRONMENT = f"aiperf-{VERSION}"
_RESULT = "profile_export_aiperf.json"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""With one of these set aiperf takes the tokenizer's directory for the name of a repository."""


def prepare() -> None:
    """Install it where it is absent; raises SystemUnderTestError with pip's reason."""
    python()


def python() -> Path:
    """The Python of its environment."""
    return ensure_installed(_ENVIRONMENT, ["--no-deps", "-r", str(LOCK)])


async def measure(workload: Workload, num_requests: int, directory: Path) -> Numbers:
    """So many requests in a closed loop; raises SystemUnderTestError where it fails or requests do."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in workload.texts(num_requests)))
    environment = {name: value for name, value in os.environ.items() if name not in _OFFLINE}
    argv = [str(python().with_name("aiperf")), *words(workload, num_requests, prompts)]
    await run_to_end(argv, directory, cores=workload.cores, environment=environment)
    return read(read_json(directory / "artifacts" / _RESULT))


def words(workload: Workload, num_requests: int, prompts: Path) -> list[str]:
    """The options. A concurrency without a rate is its closed loop."""
    return [
        *("profile", "--model", workload.model, "--url", workload.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(workload.tokenizer_dir), "--use-server-token-count"),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn", "--dataset-sampling-strategy", "sequential"),
        *("--request-count", str(num_requests), "--concurrency", str(workload.concurrency)),
        *("--extra-inputs", json.dumps(workload.body)),
        *("--workers-max", "1", "--record-processors", "1", "--no-gpu-telemetry", "--no-server-metrics"),
        *("--ui", "none", "--export-level", "summary", "--artifact-dir", str(prompts.parent / "artifacts")),
    ]


def read(result: Mapping[str, Any]) -> Numbers:
    """From its `profile_export_aiperf.json`. Its inter-token latency is what we and vLLM call TPOT."""
    if result.get("was_cancelled"):
        raise SystemUnderTestError("aiperf's run was cancelled")
    if result.get("error_summary"):
        raise SystemUnderTestError(f"aiperf's requests failed: {str(result['error_summary'])[:500]}")
    return Numbers(
        num_requests=int(positive(result, "request_count", "avg")),
        prompt_tokens=positive(result, "usage_prompt_tokens", "avg"),
        output_tokens=positive(result, "output_sequence_length", "avg"),
        ttft_mean_ms=positive(result, "time_to_first_token", "avg"),
        ttft_median_ms=positive(result, "time_to_first_token", "p50"),
        tpot_mean_ms=positive(result, "inter_token_latency", "avg"),
        tokens_per_s=positive(result, "output_token_throughput", "avg"),
    )
