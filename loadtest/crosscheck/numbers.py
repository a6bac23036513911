"""What is compared of one run of a load tester, and how far two load testers are apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from loadtest.processes import SystemUnderTestError


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """One run, as its load tester reports it."""

    num_requests: int
    """Answered whole."""
    prompt_tokens: float
    """Per request, as the server counts them; like the next, it shows that all asked for the same work."""
    output_tokens: float
    """Per request."""
    ttft_mean_ms: float
    ttft_median_ms: float
    tpot_mean_ms: float
    tokens_per_s: float


COMPARED = ("ttft_mean_ms", "ttft_median_ms", "tpot_mean_ms", "tokens_per_s")
"""The measures that must agree."""


def differences_pct(ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> dict[str, float]:
    """How much larger ours is than theirs, in % of theirs, by measure; each side is the mean of its runs."""
    return {name: 100 * (mean(ours, name) / mean(theirs, name) - 1) for name in COMPARED}


def worst_pct(differences: Mapping[str, float]) -> float:
    """The largest difference, whatever its sign."""
    return max(abs(value) for value in differences.values())


def mean(runs: Sequence[Numbers], name: str) -> float:
    """Of one measure over some runs."""
    return sum(getattr(run, name) for run in runs) / len(runs)


def read_json(path: Path) -> dict[str, Any]:
    """A result file; raises SystemUnderTestError where there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemUnderTestError(f"{path} holds no result: {error}") from error
    if not isinstance(content, dict):
        raise SystemUnderTestError(f"{path} holds no result: a JSON object is wanted, not {str(content)[:80]!r}")
    return content


def positive(result: Mapping[str, Any], *keys: str) -> float:
    """The number under these nested keys; raises SystemUnderTestError where there is none, or one that nothing can measure."""
    value: Any = result
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise SystemUnderTestError(f"the result says {value!r} for {'.'.join(keys)}, a number above 0 is wanted")
    return float(value)


def of_vllm_keys(result: Mapping[str, Any]) -> Numbers:
    """From the result of vLLM's `bench serve`, whose keys our report.json has too; raises SystemUnderTestError on failures."""
    if result.get("failed"):
        raise SystemUnderTestError(f"{result['failed']} of {result['failed'] + result.get('completed', 0)} requests failed")
    completed = positive(result, "completed")
    return Numbers(
        num_requests=int(completed),
        prompt_tokens=positive(result, "total_input_tokens") / completed,
        output_tokens=positive(result, "total_output_tokens") / completed,
        ttft_mean_ms=positive(result, "mean_ttft_ms"),
        ttft_median_ms=positive(result, "median_ttft_ms"),
        tpot_mean_ms=positive(result, "mean_tpot_ms"),
        tokens_per_s=positive(result, "output_throughput"),
    )
