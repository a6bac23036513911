"""/metrics: names, values, bounds, and the engines' own metrics beside ours."""

from __future__ import annotations

from pathlib import Path

from gateway_rig import eventually, run, running
from prometheus_client.parser import text_string_to_metric_families
from sample_messages import engine_stats

from server.acceptance import MAX_VERSIONS, AcceptanceLedger
from wire.messages import AcceptanceCount, EngineStats


def test_acceptance_is_exported_by_version_position_and_labels(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.num_dropped_rows = {"queue_full": 7}
            await rig.count(rig.engine, 0, 100, (60, 20), tenant="acme", domain="code")
            await rig.count(rig.engine, 0, 200, (120, 50), tenant="acme", domain="code")
            labels = 'domain="code",draft_version="0"'
            for name, value in {
                f'paceline_acceptance_length{{{labels},tenant="acme"}}': 1.85,
                f'paceline_verify_steps_total{{{labels},tenant="acme"}}': 200.0,
                f'paceline_proposed_tokens_total{{{labels},position="1",tenant="acme"}}': 200.0,
                f'paceline_accepted_tokens_total{{{labels},position="0",tenant="acme"}}': 120.0,
                f'paceline_accepted_tokens_total{{{labels},position="1",tenant="acme"}}': 50.0,
                'paceline_dropped_rows_total{reason="queue_full"}': 7.0,
                "paceline_captured_rows_total": 2.0,
                "paceline_active_draft_version": 0.0,
                'paceline_engine_ready{engine="engine-0"}': 1.0,
            }.items():
                assert await rig.metric(name) == value, name
            status = await rig.status()
            assert status["acceptance"] == {
                "draft_version": 0,
                "acceptance_length": 1.85,
                "per_position": [0.6, 0.25],
                "num_verify_steps": 200,
            }
            assert status["traffic"]["num_verified_tokens"] == 370

    run(scenario())


def test_requests_are_counted_and_timed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await rig.complete(stream=True)
            await rig.request("POST", "/v1/completions", data=b"{")
            route = 'route="/v1/completions"'
            assert await rig.metric(f'paceline_requests_total{{outcome="served",{route},status="200"}}') == 1.0
            assert await rig.metric(f'paceline_requests_total{{outcome="refused",{route},status="400"}}') == 1.0
            assert await rig.metric(f"paceline_time_to_first_byte_seconds_count{{{route}}}") == 1.0
            assert await rig.metric(f"paceline_request_duration_seconds_count{{{route}}}") == 2.0
            assert await rig.metric("paceline_requests_in_flight") == 0.0

    run(scenario())


def test_engine_metrics_pass_through_with_an_engine_label(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            for index in range(2):
                labels = f'engine="engine-{index}",engine_index="0",model_name="fake"'
                assert await rig.metric(f"vllm:num_requests_running{{{labels}}}") == 2.0
                assert await rig.metric(f"vllm:generation_tokens_total{{{labels}}}") == 41.0
                assert await rig.metric(f'paceline_kv_store_blocks_total{{engine="engine-{index}",event="loaded"}}') == 7.0
            text = (await rig.request("GET", "/metrics")).body.decode()
            assert "process_open_fds" not in text
            names = [family.name for family in text_string_to_metric_families(text)]
            assert len(names) == len(set(names)), "a family may appear once"
            await rig.engines[1].stop()
            assert await rig.metric('paceline_engine_up{engine="engine-1"}') == 0.0
            assert await rig.metric('paceline_engine_up{engine="engine-0"}') == 1.0
            rig.engines[0].metrics_text = "this is {not a metric\n"
            assert await rig.metric('paceline_engine_up{engine="engine-0"}') == 0.0

    run(scenario())


def test_labels_are_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, settings={"max_label_values": 3}) as rig:
            for index in range(8):
                await rig.count(rig.engine, 0, 10, (5,), tenant=f"tenant-{index}", domain=f"domain-{index}")
            text = (await rig.request("GET", "/metrics")).body.decode()
            lines = [line for line in text.splitlines() if line.startswith("paceline_verify_steps_total{")]
            assert len(lines) == 4
            other = 'paceline_verify_steps_total{domain="other",draft_version="0",tenant="other"}'
            assert await rig.metric(other) == 50.0

    run(scenario())


def test_garbage_on_the_event_channel_is_counted_and_survived(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await rig.count(rig.engine, 0, 10, (5,))
            await rig.engine.publish_garbage()
            counter = rig.gateway.metrics.bad_events.labels("engine-0")
            await eventually(lambda: counter._value.get() == 1)
            await rig.count(rig.engine, 0, 20, (10,))

    run(scenario())


def _stats(version: int, num_steps: int = 10, num_accepted: int = 4) -> EngineStats:
    count = AcceptanceCount(
        draft_version=version,
        tenant="t",
        domain="d",
        num_verify_steps=num_steps,
        proposed_per_position=[num_steps],
        accepted_per_position=[num_accepted],
    )
    return engine_stats(count, engine_epoch=str(version), draft_version=version)


def test_only_the_newest_versions_are_remembered() -> None:
    ledger = AcceptanceLedger(max_label_values=4, window_steps=100)
    for version in range(40):
        ledger.ingest(_stats(version), keep_versions=frozenset({3}))
    versions = {key.draft_version for key in ledger.totals}
    assert versions == {3, *range(40 - MAX_VERSIONS, 40)}
    assert ledger.num_verified_tokens == 40 * 14


def test_recent_window_follows_the_newest_steps() -> None:
    ledger = AcceptanceLedger(max_label_values=4, window_steps=100)
    for step in range(1, 51):
        ledger.ingest(_stats(1, num_steps=10 * step, num_accepted=10 * min(step, 30)))
    recent = ledger.recent_of(1)
    assert (recent.num_verify_steps, recent.acceptance_length) == (100, 1.0)
    assert sum(tally.num_verify_steps for tally in ledger.totals.values()) == 500


def test_a_difference_of_two_histories_is_no_change() -> None:
    ledger = AcceptanceLedger(max_label_values=4, window_steps=100)
    ledger.ingest(_stats(0, num_steps=10, num_accepted=0))
    ledger.ingest(_stats(0, num_steps=11, num_accepted=11))
    tally = ledger.recent_of(0)
    assert (tally.num_verify_steps, tally.accepted) == (10 + 11, (11,)), "the engine counts anew"
