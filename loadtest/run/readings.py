"""From the system's metrics page and status to one sample. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from loadtest.exposition import ACCEPTED_TOKENS, VERIFY_STEPS, Sample, parse
from loadtest.records import EngineSample, Swap, SystemSample
from wire.control import AdminStatus

_LEARNER_LOSS = "paceline_learner_loss"
_LEARNER_STEPS = "paceline_learner_steps_total"
_ROUTED = "paceline_routed_total"
_ACTIVE = "paceline_active_draft_version"
_READY = "paceline_engine_ready"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_PROMPT_TOKENS = "vllm:prompt_tokens_total"
_COMPLETION_TOKENS = "vllm:generation_tokens_total"
_PROPOSED = "paceline_proposed_tokens_total"
_STOCK_STEPS = "vllm:spec_decode_num_drafts_total"
_STOCK_PROPOSED = "vllm:spec_decode_num_draft_tokens_total"
_STOCK_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

_READ = (VERIFY_STEPS, ACCEPTED_TOKENS, _LEARNER_LOSS, _LEARNER_STEPS, _ROUTED, _ACTIVE, _READY, _RUNNING, _WAITING, _KV_USAGE,
         _PROMPT_TOKENS, _COMPLETION_TOKENS, _PROPOSED, _STOCK_STEPS, _STOCK_PROPOSED, _STOCK_ACCEPTED)  # fmt: skip


_MAX_POSITIONS = 1024
"""Of an engine's proposals; a label beyond is none of an engine's."""
_MAX_WHOLE = 2.0**53


class Page:
    """The few metrics of a page that a sample is made of."""

    def __init__(self, text: str) -> None:
        # A page has thousands of lines, most of them histograms: only what is read is parsed.
        lines = "\n".join(line for line in text.splitlines() if line.startswith(_READ))
        self._samples: dict[str, list[Sample]] = {}
        for sample in parse(lines):
            if isfinite(sample.value):
                self._samples.setdefault(sample.name, []).append(sample)

    def of(self, name: str) -> list[Sample]:
        return self._samples.get(name, [])

    def total(self, name: str) -> float:
        return sum(sample.value for sample in self.of(name))

    def value(self, name: str) -> float | None:
        """None where the metric is absent."""
        return self.total(name) if self.of(name) else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        totals: dict[str, float] = {}
        for sample in self.of(name):
            key = sample.labels.get(label, "")
            totals[key] = totals.get(key, 0.0) + sample.value
        return totals


def sample_of(
    page: Page,
    status: AdminStatus | None,
    *,
    at_s: float,
    cpu_s: Mapping[str, float],
    gpu_s: Mapping[str, float],
    swaps: Sequence[Swap],
) -> SystemSample:
    """What is absent stays empty: another server than ours has no drafts that learn, and needs no operator."""
    active = _whole(page.value(_ACTIVE))
    return SystemSample(
        at_s=at_s,
        active_version=active if active is not None else status.active_version if status else None,
        steps=_by_source(page.of(VERIFY_STEPS) or page.of(_STOCK_STEPS)),
        accepted=_accepted(page),
        proposed=_by_source(page.of(_PROPOSED) or page.of(_STOCK_PROPOSED)),
        kv_paths=page.by_label(_ROUTED, "path"),
        prompt_tokens=page.total(_PROMPT_TOKENS),
        completion_tokens=page.total(_COMPLETION_TOKENS),
        cpu_s=dict(cpu_s),
        gpu_s=dict(gpu_s),
        engines=_engines(page, status),
        learner_loss=page.value(_LEARNER_LOSS),
        learner_steps=_whole(page.value(_LEARNER_STEPS)),
        swaps=list(swaps),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None or abs(value) > _MAX_WHOLE else int(value)


def _by_source(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Sums by domain and draft version; of stock vLLM, which knows neither, under two empty names."""
    found: dict[str, dict[str, float]] = {}
    for sample in samples:
        versions = found.setdefault(sample.labels.get("domain", ""), {})
        version = sample.labels.get("draft_version", "")
        versions[version] = versions.get(version, 0.0) + sample.value
    return found


def _accepted(page: Page) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for sample in page.of(ACCEPTED_TOKENS) or page.of(_STOCK_ACCEPTED):
        label = sample.labels.get("position", "0")
        if not (label.isdecimal() and len(label) < 5 and (position := int(label)) < _MAX_POSITIONS):
            continue
        versions = found.setdefault(sample.labels.get("domain", ""), {})
        counts = versions.setdefault(sample.labels.get("draft_version", ""), [])
        counts += [0.0] * (position + 1 - len(counts))
        counts[position] += sample.value
    return found


def _engines(page: Page, status: AdminStatus | None) -> dict[str, EngineSample]:
    """Of our gateway every engine it knows; of another server those that its metrics name."""
    ready = {name: value > 0 for name, value in page.by_label(_READY, "engine").items()}
    draining = {view.id: view.is_draining for view in status.engines} if status else {}
    running, waiting, usage = (page.by_label(name, "engine") for name in (_RUNNING, _WAITING, _KV_USAGE))
    return {
        name: EngineSample(
            ready=ready.get(name, True),
            draining=draining.get(name, False),
            num_running=running.get(name),
            num_waiting=waiting.get(name),
            kv_usage=usage.get(name),
        )
        for name in sorted(ready or running)
    }


class SwapHistory:
    """The gateway lists its latest swaps each time; this tells those not seen before."""

    def __init__(self, run_started_at_s: float) -> None:
        """What ended before the run (wall clock) is none of its business."""
        self._started_at_s = run_started_at_s
        self._seen: set[tuple[float, int, str]] = set()

    def new(self, status: AdminStatus) -> list[Swap]:
        found = []
        for report in status.swaps:
            key = (report.started_at_s, report.version, report.trigger)
            if key in self._seen or report.started_at_s + report.duration_ms / 1000 < self._started_at_s:
                continue
            self._seen.add(key)
            found.append(
                Swap(
                    at_s=report.started_at_s - self._started_at_s,
                    duration_s=report.duration_ms / 1000,
                    version=report.version,
                    previous=report.previous,
                    outcome=report.outcome,
                    trigger=report.trigger,
                )
            )
        return found
