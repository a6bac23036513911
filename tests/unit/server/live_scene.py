"""A past worth looking at, put into a running gateway's history: two shifts of domain, swaps, gate decisions, engines at work."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import msgspec
from gateway_rig import GatewayRig
from sample_messages import learner_report
from samples import fill

from server.history import DomainSpan, EngineLoad, GateDecision, LearnerPoint, Sample, TenantSpan
from server.latency import Latencies
from server.routing.cost import LocalCost, RemoteCost
from server.routing.router import Decision
from wire.artifact import DraftManifest, GateReport, read_manifest, write_manifest
from wire.control import CommitReport, LearnerReport, SwapReport
from wire.store import DraftStore

EVERY_S = 2.0
LONG_S = 1500.0
HOSTILE = "<img src=x onerror=alert(1)>"
"""A name no gateway lets in by a header, and an engine could still report."""
DOMAINS = ("chat", "code", "maths")
SWAPS_AT_S = (380.0, 760.0, 1010.0, 1240.0)
"""After the past's start; the third is a roll back."""
DEPTH = 3
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="fake"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="fake"}} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="fake"}} {kv_use}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="fake"}} {tokens}
"""


def gate(accepted: bool, incumbent: float, candidate: float, reason: str) -> GateReport:
    gain = candidate - incumbent
    return GateReport(
        accepted=accepted,
        reason=reason,
        candidate_al=candidate,
        incumbent_al=incumbent,
        gain_low=gain - 0.05,
        gain_high=gain + 0.06,
        num_requests=64,
        worst_anchor_domain="maths",
        worst_anchor_change=-0.01,
    )


async def stage_scene(rig: GatewayRig, *, last_name: str = HOSTILE) -> None:
    """Drafts 1 to 3 are in the store, 3 was tried and taken back, 2 serves; the learner works.

    `last_name` is that of one more domain and of one more tenant.
    """
    start_s = time.time() - LONG_S
    for made_s, incumbent, candidate in ((370, 1.31, 1.52), (750, 1.52, 1.66), (1170, 1.66, 1.71)):
        _publish(rig, start_s + made_s, gate(True, incumbent, candidate, "gain is above zero on recent requests"))
    _publish(rig, start_s + 1300, gate(False, 1.66, 1.64, "no gain on recent requests"))
    for version, before in ((1, 0), (2, 1)):
        assert (await rig.activate(version, before)).status == 200
    await rig.activate(4, 2)
    rig.gateway.swap.history.clear()
    for index, engine in enumerate(rig.engines):
        engine.metrics_text = METRICS.format(
            running=4 + index, waiting=index, kv_use=(0.43, 0.71, 0.12, 0.55)[index], tokens=41 + 94 * (index + 1)
        )
    _swaps(rig, start_s)
    _gates(rig, start_s)
    # What was recorded while this was set up is younger than the past that follows.
    rig.gateway.history._samples.clear()
    for number in range(1, int(LONG_S / EVERY_S) + 1):
        rig.gateway.history.add(_sample(number, start_s, last_name))
    for engine in rig.engines:
        await rig.count(engine, 2, 2000, (1500, 880, 420), domain="code", tenant="acme")
    for number in range(8):
        rig.gateway.router.decisions.append(_decision(number))
    rig.engine.num_dropped_rows = {"queue_full": 1204}
    await rig.count(rig.engine, 2, 2100, (1575, 924, 441), domain="code", tenant="acme")
    await rig.admin("POST", "/admin/learner/report", data=msgspec.json.encode(_report()))


def _publish(rig: GatewayRig, made_at_s: float, report: GateReport) -> None:
    def write(directory: Path, version: int) -> None:
        fill(directory, version, gate=report)
        write_manifest(directory, msgspec.structs.replace(read_manifest(directory, DraftManifest), created_at_s=made_at_s))

    DraftStore(rig.state_dir).publish(write)


def _swaps(rig: GatewayRig, start_s: float) -> None:
    steps = [
        (1, 0, "activate", "committed", ""),
        (2, 1, "activate", "committed", ""),
        (3, 2, "activate", "committed", ""),
        (
            2,
            3,
            "canary",
            "committed",
            "draft 3: AL 1.412 against 1.655 over 214 verify steps (noise bound 0.110): a drop beyond 10%",
        ),
    ]
    times = (SWAPS_AT_S[0], SWAPS_AT_S[1], SWAPS_AT_S[3] - 60, SWAPS_AT_S[3])
    for at_s, (version, previous, trigger, outcome, reason) in zip(times, steps, strict=True):
        commit = CommitReport(version=version, previous=previous, apply_ms=7.4, rpc_ms=31.0)
        rig.gateway.swap.history.append(
            _swap(start_s + at_s, version, previous, trigger, outcome, reason, {"engine-0": commit})
        )
    refusal = "the gate rejected draft 4: no gain on recent requests; use force to activate it anyway"
    rig.gateway.swap.history.append(_swap(start_s + 1350, 4, 2, "activate", "refused", refusal, {}))


def _swap(
    at_s: float, version: int, previous: int, trigger: str, outcome: str, reason: str, commits: dict[str, CommitReport]
) -> SwapReport:
    return SwapReport(
        version=version,
        previous=previous,
        trigger=trigger,
        outcome=outcome,
        reason=reason,
        forced=False,
        started_at_s=at_s,
        duration_ms=640.0,
        commits=commits,
    )


def _gates(rig: GatewayRig, start_s: float) -> None:
    for at_s, incumbent in {180: 1.31, 590: 1.52, 905: 1.66, 1400: 1.66}.items():
        report = gate(False, incumbent, incumbent + 0.01, "the gain may be nothing: its lower end is -0.04")
        rig.gateway.history.add_gate(GateDecision(at_s=start_s + at_s, report=report))


def _sample(number: int, start_s: float, last_name: str) -> Sample:
    at_s = number * EVERY_S
    chance = random.Random(number)
    version = sum(at_s >= swap_s for swap_s in (SWAPS_AT_S[0], SWAPS_AT_S[1]))
    version = 3 if SWAPS_AT_S[3] - 60 <= at_s < SWAPS_AT_S[3] else version
    spans = [_span(index, domain, version, at_s, chance) for index, domain in enumerate((*DOMAINS, last_name))]
    domains = tuple(span for span in spans if span.num_verify_steps)
    num_tokens = sum(span.num_verify_steps + sum(span.accepted) for span in domains)
    return Sample(
        number=number,
        at_s=start_s + at_s,
        span_s=EVERY_S,
        active_version=version,
        num_in_flight=9,
        ended={"served": chance.randint(2, 6), **({"refused": 1} if number % 90 == 0 else {})},
        num_tokens=num_tokens,
        first_bytes=_first_bytes(version, chance),
        num_gaps=100,
        gaps_s=100 * chance.uniform(0.036, 0.042) + (0.8 if at_s in SWAPS_AT_S else 0.0),
        domains=domains,
        tenants=(
            TenantSpan(tenant="acme", num_verify_steps=60, num_tokens=int(num_tokens * 0.6)),
            TenantSpan(tenant="globex", num_verify_steps=25, num_tokens=int(num_tokens * 0.25)),
            TenantSpan(tenant=last_name, num_verify_steps=15, num_tokens=int(num_tokens * 0.15)),
        ),
        routed={
            "kv_reuse": {"cached": chance.randint(0, 3)},
            "remote_prefill": {"remote_cheaper": chance.randint(0, 2)},
            "combined": {"short_prompt": 1},
        },
        num_captured_rows=400,
        dropped_rows={"queue_full": 20} if number % 100 == 0 else {},
        engines={
            "engine-0": EngineLoad(num_running=4, num_waiting=number % 3, kv_use=0.43),
            "engine-1": EngineLoad(num_running=5, num_waiting=0, kv_use=0.71),
        },
        learner=LearnerPoint(
            num_steps=number * 3,
            loss=1.1 + math.exp(-at_s / 500) + chance.uniform(-0.04, 0.04),
            tokens_per_s=820,
            buffer_tokens=120_000,
            capture_lag_s=0.4,
            simulated_al=1.66,
        ),
    )


def _first_bytes(version: int, chance: random.Random) -> tuple[tuple[float, int], ...]:
    """Those of one sample; a bad draft takes steps from prefills."""
    slowdown = 1.6 if version == 3 else 1.0
    latencies = Latencies()
    for _ in range(6):
        latencies.observe(slowdown * chance.lognormvariate(math.log(0.14), 0.45))
    return tuple(sorted(latencies.counts.items()))


def _span(index: int, domain: str, version: int, at_s: float, chance: random.Random) -> DomainSpan:
    """Traffic shifts from chat to code to maths; each is learned a while after it came."""
    share = max(math.exp(-(((at_s - 250 - 500 * index) / 330) ** 2)), 0.08 if index == 0 else 0.0)
    num_steps = int(90 * share * chance.uniform(0.8, 1.2))
    skill = 0.34 + 0.12 * version - 0.05 * index - (0.22 if version == 3 else 0.0)
    rates = [min(max(skill, 0.05) ** (0.6 + 0.5 * position), 0.95) for position in range(DEPTH)]
    accepted = tuple(sum(chance.random() < rate for _ in range(num_steps)) for rate in rates)
    return DomainSpan(
        draft_version=version,
        domain=domain,
        num_verify_steps=num_steps,
        proposed=(num_steps,) * DEPTH,
        accepted=tuple(sorted(accepted, reverse=True)),
    )


def _decision(number: int) -> Decision:
    is_remote = number % 3 == 0
    local = LocalCost(prefill_s=0.21 if is_remote else 0.02, queue_s=0.0, active_s=0.05, disturbance_s=0.02)
    remote = RemoteCost(prefill_s=0.08, queue_s=0.0, transfer_s=0.01, handshake_s=0.05, active_s=0.03)
    return Decision(
        request_id=f"request-{number}",
        decided_at_s=time.time() - 8 + number,
        engine="engine-1",
        prefill="engine-0" if is_remote else None,
        path="remote_prefill" if is_remote else "kv_reuse",
        reason="remote_cheaper" if is_remote else "local_cheaper",
        detail="",
        num_prompt_tokens=412,
        num_cached_tokens=0 if is_remote else 384,
        prompt_hash=None,
        local=local,
        remote=remote,
    )


def _report() -> LearnerReport:
    return learner_report(
        state="training",
        sent_at_s=time.time(),
        num_steps=2250,
        loss=1.182,
        tokens_per_s=822.0,
        num_tokens_seen=1_840_000,
        buffer_requests=412,
        buffer_tokens=121_400,
        buffer_oldest_s=1310.0,
        capture_lag_s=0.42,
        num_received_rows=300_000,
        num_restores=1,
        simulated_al=1.66,
        num_published=4,
        gate=gate(False, 1.66, 1.64, "no gain on recent requests"),
        num_gate_decisions={"accepted": 3, "rejected": 4},
        num_late_spans=12,
    )
