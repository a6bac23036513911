"""The measures that runs are compared by: name, unit, and which way is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from loadtest.measures.acceptance import Acceptance, Cost
from loadtest.measures.arrivals import Throughput
from loadtest.measures.bootstrap import NOTHING
from loadtest.measures.summary import Summary
from loadtest.statistics import Estimate


@dataclass(frozen=True)
class Measure:
    """One number of a run."""

    name: str
    title: str
    unit: str
    better: Literal["lower", "higher"]
    by: Literal["ratio", "difference"] = "ratio"
    """How two runs are compared. A share may be 0, so shares are subtracted."""

    @property
    def shown(self) -> tuple[float, str]:
        """Factor and unit for people: shares are shown in %."""
        return (100.0, "%") if self.by == "difference" else (1.0, self.unit)


MEASURES = (
    Measure("ttft_p50", "TTFT p50", "ms", "lower"),
    Measure("ttft_p99", "TTFT p99", "ms", "lower"),
    Measure("tpot_p50", "TPOT p50", "ms", "lower"),
    Measure("tpot_p99", "TPOT p99", "ms", "lower"),
    Measure("itl_p50", "ITL p50", "ms", "lower"),
    Measure("itl_p99", "ITL p99", "ms", "lower"),
    Measure("e2e_p50", "E2E p50", "ms", "lower"),
    Measure("e2e_p99", "E2E p99", "ms", "lower"),
    Measure("tokens_per_chunk", "tokens per chunk", "", "higher"),
    Measure("requests_per_s", "whole answers", "1/s", "higher"),
    Measure("good_requests_per_s", "goodput", "1/s", "higher"),
    Measure("tokens_per_s", "output tokens", "1/s", "higher"),
    Measure("good_share", "within objectives", "", "higher", "difference"),
    Measure("failed_share", "failed", "", "lower", "difference"),
    Measure("acceptance_length", "AL", "tokens/step", "higher"),
    Measure("cpu_s_per_token", "processor time", "s/token", "lower"),
    Measure("cpu_s_per_accepted_token", "CPU/effective token", "s", "lower"),
    Measure("gpu_s_per_token", "GPU time", "s/token", "lower"),
    Measure("gpu_s_per_accepted_token", "GPU/effective token", "s", "lower"),
)


def headline(
    everything: Summary, throughput: Throughput, acceptance: Acceptance, cost: Cost, *, has_objectives: bool
) -> Mapping[str, Estimate]:
    """What was measured, by name."""
    found = {
        f"{name}_{percentile}": distribution.percentiles[percentile]
        for name, distribution in (
            ("ttft", everything.ttft_ms), ("tpot", everything.tpot_ms), ("itl", everything.itl_ms), ("e2e", everything.e2e_ms)
        )
        for percentile in ("p50", "p99")
    }  # fmt: skip
    found |= {
        "tokens_per_chunk": everything.tokens_per_chunk,
        "requests_per_s": throughput.requests_per_s,
        "good_requests_per_s": throughput.good_requests_per_s if has_objectives else NOTHING,
        "tokens_per_s": throughput.tokens_per_s,
        "good_share": everything.good_share if has_objectives else NOTHING,
        "failed_share": everything.failed_share,
        "acceptance_length": acceptance.acceptance_length if acceptance.num_steps else everything.acceptance_length,
        "cpu_s_per_token": cost.cpu_s_per_token,
        "cpu_s_per_accepted_token": cost.cpu_s_per_accepted_token,
        "gpu_s_per_token": cost.gpu_s_per_token,
        "gpu_s_per_accepted_token": cost.gpu_s_per_accepted_token,
    }
    return {name: estimate for name, estimate in found.items() if estimate.value == estimate.value}
