"""report.json: the keys of vLLM's `bench serve` where they exist, and ours under `paceline`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from loadtest.detectors.regression import Comparison
from loadtest.measures import bootstrap
from loadtest.measures.acceptance import Acceptance
from loadtest.measures.headline import MEASURES
from loadtest.measures.run_directory import RunDirectoryError
from loadtest.measures.summary import Distribution
from loadtest.report.analysis import Analysis
from loadtest.scenario import Closed, Poisson, Scenario
from loadtest.statistics import Estimate

SCHEMA_VERSION = 1
FILE = "report.json"
SUMMARY_FILE = "summary.json"
"""Where `vllm bench sweep plot` and `plot_pareto` look for results."""


def result(analysis: Analysis) -> dict[str, Any]:
    """The whole report as plain values; what is not a number is null."""
    whole: dict[str, Any] = plain({**_vllm_keys(analysis), "paceline": _ours(analysis)})
    return whole


def summary(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """vLLM's keys of a report alone, in the list that vLLM's plots of sweeps read."""
    return [{name: value for name, value in report.items() if name != "paceline"}]


def write(path: Path, report: Mapping[str, Any] | Sequence[Any]) -> None:
    """Replace the file at once, so that nobody reads half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def read_measures(path: Path) -> dict[str, Estimate]:
    """The measures of a saved report; raises RunDirectoryError where it is none of ours."""
    try:
        ours = json.loads(path.read_text())["paceline"]
        version = ours["schema_version"]
        if version != SCHEMA_VERSION:
            raise RunDirectoryError(f"{path} has schema_version {version}, this program reads {SCHEMA_VERSION}; make it anew")
        return {row["name"]: Estimate(*(_number(row[part]) for part in ("value", "low", "high"))) for row in ours["measures"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RunDirectoryError(f"{path} is no report of ours ({error!r}); `paceline bench report DIR` makes one") from error


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def plain(value: Any) -> Any:
    """Values that JSON has."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    return value


def _vllm_keys(analysis: Analysis) -> dict[str, Any]:
    everything, flow, record = analysis.everything, analysis.throughput, analysis.run.record
    outcomes = everything.num_by_outcome
    length_s = analysis.span.length_s
    input_rate = everything.num_prompt_tokens / length_s if length_s else 0.0
    keys: dict[str, Any] = {
        "date": datetime.fromtimestamp(record.started_at_s, UTC).strftime("%Y%m%d-%H%M%S") if record else None,
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": analysis.scenario.name,
        "model_id": record.model if record else None,
        "tokenizer_id": None,
        "num_prompts": everything.num_requests,
        **_traffic(analysis.scenario, everything.num_requests / length_s if length_s else 0.0),
        "duration": length_s,
        "completed": outcomes["ok"],
        "failed": outcomes["failed"] + outcomes["truncated"],
        "total_input_tokens": everything.num_prompt_tokens,
        "total_output_tokens": everything.num_tokens,
        "request_throughput": flow.requests_per_s.value,
        "request_goodput": flow.good_requests_per_s.value if analysis.has_objectives else None,
        "output_throughput": flow.tokens_per_s.value,
        "total_token_throughput": flow.tokens_per_s.value + input_rate,
        "max_output_tokens_per_s": flow.max_tokens_per_s,
        "max_concurrent_requests": flow.max_in_flight,
        "rtfx": 0.0,  # of speech, as vLLM has it for text
    }
    for name, distribution in (
        ("ttft", everything.ttft_ms), ("tpot", everything.tpot_ms), ("itl", everything.itl_ms), ("e2el", everything.e2e_ms)
    ):  # fmt: skip
        keys |= _latency(name, distribution)
    return keys | _speculation(analysis.acceptance)


def _speculation(found: Acceptance) -> dict[str, Any]:
    """As vLLM, nothing without verify steps; the rate is in %."""
    if not found.num_steps:
        return {}
    return {
        "spec_decode_acceptance_rate": 100.0 * found.num_accepted / found.num_proposed if found.num_proposed else None,
        "spec_decode_acceptance_length": found.acceptance_length.value,
        "spec_decode_num_drafts": round(found.num_steps),
        "spec_decode_draft_tokens": round(found.num_proposed) if found.num_proposed else None,
        "spec_decode_accepted_tokens": round(found.num_accepted),
        "spec_decode_per_position_acceptance_rates": found.by_position,
    }


def _latency(name: str, distribution: Distribution) -> dict[str, float]:
    return {
        f"mean_{name}_ms": distribution.mean.value,
        f"median_{name}_ms": distribution.percentiles["p50"].value,
        f"std_{name}_ms": distribution.std,
        **{f"{percentile}_{name}_ms": estimate.value for percentile, estimate in distribution.percentiles.items()},
    }


def _traffic(scenario: Scenario, mean_rate_per_s: float) -> dict[str, Any]:
    """What one number can say of the arrivals."""
    by_lane = [[phase.arrivals for phase in lane.phase] for lane in scenario.lane]
    every = [arrivals for lane in by_lane for arrivals in lane]
    burstinesses = {arrivals.burstiness for arrivals in every if isinstance(arrivals, Poisson)}
    is_closed = all(isinstance(arrivals, Closed) for arrivals in every)
    limits = [max((arrivals.concurrency for arrivals in lane if isinstance(arrivals, Closed)), default=0) for lane in by_lane]
    return {
        "request_rate": "inf" if is_closed else mean_rate_per_s,
        "burstiness": burstinesses.pop() if len(burstinesses) == 1 else None,
        "max_concurrency": sum(limits) if is_closed else None,
    }


def _ours(analysis: Analysis) -> dict[str, Any]:
    measured = analysis.headline
    return {
        "schema_version": SCHEMA_VERSION,
        "run": msgspec.to_builtins(analysis.run.record),
        "scenario": analysis.scenario.model_dump(mode="json"),
        "is_valid": not analysis.why_invalid,
        "why_invalid": analysis.why_invalid,
        "num_unreadable_lines": dict(analysis.run.num_unreadable),
        "span_s": [analysis.span.start_s, analysis.span.end_s],
        "intervals": {
            "level": bootstrap.LEVEL,
            "num_resamples": bootstrap.NUM_RESAMPLES,
            "num_blocks": analysis.blocks.number,
            "block_s": analysis.blocks.length_s,
        },
        "measures": [{**asdict(measure), **asdict(measured[measure.name])} for measure in MEASURES if measure.name in measured],
        "dispatch_lag_p99_ms": analysis.dispatch_lag_p99_ms,
        "summary": analysis.everything,
        "by": analysis.groups,
        "throughput": analysis.throughput,
        "acceptance": {
            "source": analysis.acceptance_source,
            "overall": analysis.acceptance,
            "by_source": analysis.acceptance_by_source,
            "requests_less_counters": analysis.acceptance_length_difference,
            "by_domain": analysis.acceptance_by_domain,
            "by_version": analysis.acceptance_by_version,
        },
        "cost": analysis.cost,
        "worst_window": analysis.worst,
        "shifts": analysis.recoveries,
        "swap_blip": analysis.blip,
        "swaps": msgspec.to_builtins(analysis.timeline.swaps),
        "series": analysis.series,
    }


def comparisons(rows: Sequence[Comparison]) -> list[dict[str, Any]]:
    """For machines."""
    found: list[dict[str, Any]] = plain(rows)
    return found
