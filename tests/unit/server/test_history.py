"""GET /admin/history: what a sample holds, and that the past is bounded."""

from __future__ import annotations

import math
import random
from collections import deque
from pathlib import Path

import msgspec
import pytest
from gateway_rig import ACCEPTED, REJECTED, GatewayRig, run, running
from sample_messages import learner_report

from server.history import MAX_GATES, MAX_SAMPLES, GateDecision, History, HistoryView, Sample
from server.latency import LONGEST_S, SHORTEST_S, Latencies
from server.recorder import MAX_SLICES, Recorder
from wire.control import CalibrationView

ROUTE = 'route="/v1/completions"'
GAPS = """\
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{{engine="0",le="+Inf",model_name="fake"}} {number}.0
vllm:inter_token_latency_seconds_count{{engine="0",model_name="fake"}} {number}.0
vllm:inter_token_latency_seconds_sum{{engine="0",model_name="fake"}} {sum_s}
"""


def _sample(number: int) -> Sample:
    return Sample(number=number, at_s=2.0 * number, span_s=2.0, active_version=0, num_in_flight=0)


async def _view(rig: GatewayRig, after: int = 0) -> HistoryView:
    return msgspec.json.decode((await rig.admin("GET", f"/admin/history?after={after}")).body, type=HistoryView)


def test_a_sample_counts_what_happened_since_the_one_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            recorder = Recorder(rig.gateway)
            await rig.count(rig.engine, 0, 100, (60, 20), tenant="acme", domain="code")
            await rig.complete()
            await recorder.take()
            await rig.count(rig.engine, 0, 140, (90, 30), tenant="acme", domain="code")
            await rig.count(rig.engine, 0, 10, (5, 0), tenant="globex", domain="code")
            await rig.complete()
            await rig.complete()
            await rig.request("POST", "/v1/completions", data=b"{")
            rig.engine.metrics_text = rig.engine.metrics_text.replace(" 41.0", " 64.0")
            sample = await recorder.take()
            (span,) = sample.domains
            assert (span.draft_version, span.domain, span.num_verify_steps) == (0, "code", 50)
            assert (span.proposed, span.accepted) == ((50, 50), (35, 10))
            assert {(one.tenant, one.num_verify_steps, one.num_tokens) for one in sample.tenants} == {
                ("acme", 40, 80),
                ("globex", 10, 15),
            }
            assert sample.ended == {"served": 2, "refused": 1}
            assert sample.routed == {"combined": {"tokens_unknown": 2}}
            assert sample.num_tokens == 23
            assert sample.engines["engine-0"].num_running == 2
            assert sample.active_version == 0
            quiet = await recorder.take()
            assert (quiet.ended, quiet.domains, quiet.routed, quiet.num_tokens) == ({}, (), {}, 0)

    run(scenario())


def test_a_sample_tells_how_long_answers_took_to_begin_and_between_their_chunks(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            recorder = Recorder(rig.gateway)
            rig.engine.metrics_text = GAPS.format(number=40, sum_s=2.5)
            await rig.complete(stream=True)
            await recorder.take()
            rig.engine.metrics_text = GAPS.format(number=48, sum_s=2.9)
            for is_streamed in (True, True, True, False):
                await rig.complete(stream=is_streamed)
            sample = await recorder.take()
            assert sum(number for _, number in sample.first_bytes) == 3, "a whole answer has no first byte of its own"
            assert [time_s for time_s, _ in sample.first_bytes] == sorted(time_s for time_s, _ in sample.first_bytes)
            # The metrics counted one more, before the first sample.
            total_s = await rig.metric(f"paceline_time_to_first_byte_seconds_sum{{{ROUTE}}}")
            assert sum(time_s * number for time_s, number in sample.first_bytes) < 1.06 * total_s + 3 * SHORTEST_S
            assert (sample.num_gaps, sample.gaps_s) == (8, 0.4)
            # An engine that starts anew counts anew.
            rig.engine.metrics_text = GAPS.format(number=3, sum_s=0.1)
            quiet = await recorder.take()
            assert (quiet.first_bytes, quiet.num_gaps, quiet.gaps_s) == ((), 0, 0.0)

    run(scenario())


def test_classes_of_times_tell_quantiles_within_five_percent() -> None:
    chance = random.Random(7)
    times_s = sorted(chance.lognormvariate(-2.0, 1.2) for _ in range(5000))
    latencies = Latencies()
    for time_s in times_s:
        latencies.observe(time_s)
    told_s = sorted(latencies.counts.elements())
    for share in (0.01, 0.5, 0.9, 0.99):
        rank = math.ceil(share * len(times_s)) - 1
        assert told_s[rank] == pytest.approx(times_s[rank], rel=0.05), share
    for odd_s in (-1.0, 0.0, 1e9):
        latencies.observe(odd_s)
    assert min(latencies.counts) == pytest.approx(SHORTEST_S, rel=0.06)
    assert max(latencies.counts) == pytest.approx(LONGEST_S, rel=0.06)


def test_an_engine_that_is_down_or_starts_anew_has_no_odd_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            recorder = Recorder(rig.gateway)
            await recorder.take()
            await rig.engines[1].stop()
            rig.engine.metrics_text = rig.engine.metrics_text.replace(" 41.0", " 3.0")
            sample = await recorder.take()
            assert set(sample.engines) == {"engine-0"}
            assert sample.num_tokens == 0
            for odd in ("many", "NaN", "+Inf"):
                rig.engine.metrics_text = f"vllm:num_requests_running{{}} {odd}\n"
                assert (await recorder.take()).engines == {}

    run(scenario())


def test_the_learner_s_numbers_and_each_gate_decision_are_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            recorder = Recorder(rig.gateway)
            assert (await recorder.take()).learner is None

            async def report(num_gates: int, gate: object) -> Sample:
                body = learner_report(num_steps=7, loss=1.25, gate=gate, num_gate_decisions={"rejected": num_gates})
                assert (await rig.admin("POST", "/admin/learner/report", data=msgspec.json.encode(body))).status == 200
                return await recorder.take()

            # Decided before this gateway lived: nobody knows when.
            sample = await report(4, REJECTED)
            assert sample.learner is not None
            assert (sample.learner.num_steps, sample.learner.loss) == (7, 1.25)
            for num_gates, gate in ((5, ACCEPTED), (5, ACCEPTED), (6, REJECTED)):
                await report(num_gates, gate)
            # The gateway's own recorder saw the same reports, and may have noted the same decisions.
            reports = [decision.report for decision in (await _view(rig)).gates]
            assert [one for index, one in enumerate(reports) if one not in reports[:index]] == [ACCEPTED, REJECTED]

    run(scenario())


def test_a_sample_s_size_does_not_grow_with_tenants_and_domains(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            recorder = Recorder(rig.gateway)
            for index in range(MAX_SLICES + 6):
                await rig.count(rig.engine, 0, 100 - index, (50,), tenant=f"tenant-{index}", domain=f"domain-{index}")
            sample = await recorder.take()
            assert len(sample.domains) == len(sample.tenants) == MAX_SLICES + 1
            steps = {span.domain: span.num_verify_steps for span in sample.domains}
            assert (steps["domain-0"], "domain-29" in steps) == (100, False)
            assert steps["other"] == sum(100 - index for index in range(MAX_SLICES, MAX_SLICES + 6))
            assert sum(one.num_verify_steps for one in sample.tenants) == sum(steps.values())

    run(scenario())


def test_a_reader_gets_only_what_is_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            recorder = Recorder(rig.gateway)
            first, second = await recorder.take(), await recorder.take()
            view = await _view(rig)
            assert [sample.number for sample in view.samples][:2] == [first.number, second.number]
            assert (await _view(rig, after=first.number)).samples[0] == second
            assert (await _view(rig, after=10**9)).samples == []
            assert (await _view(rig)).epoch == view.epoch
            for after in ("-1", "x", "1.5", "9" * 40, "٣"):
                assert (await rig.admin("GET", "/admin/history", params={"after": after})).code == "bad_after"

    run(scenario())


def test_swaps_and_their_reasons_are_part_of_the_past(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await rig.activate(7, 0)
            (swap,) = (await _view(rig)).swaps
            assert (swap.version, swap.outcome) == (7, "refused")
            assert "7" in swap.reason

    run(scenario())


def test_the_past_is_bounded() -> None:
    history = History(deque(), CalibrationView)
    for number in range(1, MAX_SAMPLES + 100):
        assert history.next_number == number
        history.add(_sample(number))
        history.add_gate(GateDecision(at_s=float(number), report=REJECTED))
    view = history.view(after=0)
    assert (len(view.samples), len(view.gates)) == (MAX_SAMPLES, MAX_GATES)
    assert (view.samples[-1].number, view.gates[-1].at_s) == (MAX_SAMPLES + 99, float(MAX_SAMPLES + 99))
    assert view.kept_s == MAX_SAMPLES * 2.0
