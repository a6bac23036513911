"""The admin port: who may use it, the learner's channel, capture."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from gateway_rig import run, running
from sample_messages import learner_report

from server.learner_link import LearnerLink
from wire.control import AdminStatus, DomainCoverage, LearnerOrders

REPORT = learner_report(
    state="training",
    sent_at_s=time.time(),
    num_steps=42,
    loss=1.5,
    tokens_per_s=800.0,
    num_tokens_seen=9000,
    buffer_requests=12,
    buffer_tokens=3400,
    buffer_oldest_s=60.0,
    capture_lag_s=0.5,
    num_received_rows=3600,
    num_refused_messages=0,
    num_restores=1,
    simulated_al=1.7,
    num_published=2,
    num_gate_decisions={"accepted": 2, "rejected": 3},
    num_timed_out_requests=4,
    num_evicted_requests=5,
    num_late_spans=6,
    num_cut_rows=7,
    num_dropped_requests=8,
    vocabulary_coverage=(DomainCoverage(tenant="acme", domain="code", share=0.96, num_tokens=900.0),),
    wanted_vocabulary_size=9000,
)


def test_every_admin_route_needs_the_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        paths = [("GET", "status"), ("GET", "drafts"), ("POST", "drafts/0/activate"), ("POST", "drafts/rollback")]
        paths += [("POST", "learner/pause"), ("POST", "capture"), ("POST", "learner/report"), ("GET", "nothing")]
        async with running(tmp_path) as rig:
            for authorization in (None, "", "Bearer wrong", "operator-token", "Basic b3A6", "Bearer engine-token"):
                headers = {} if authorization is None else {"Authorization": authorization}
                for method, path in paths:
                    async with rig.session.request(method, f"{rig.admin_url}/admin/{path}", headers=headers) as reply:
                        assert reply.status == 401
                        assert (await reply.json())["error"]["code"] == "unauthorized"

    run(scenario())


def test_public_port_has_no_admin_routes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            headers = {"Authorization": "Bearer operator-token"}
            for path in ("/admin/status", "/paceline/status", "/docs", "/openapi.json"):
                assert (await rig.request("GET", path, headers=headers)).status == 404

    run(scenario())


def test_learner_reports_and_gets_orders(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:

            async def orders() -> LearnerOrders:
                reply = await rig.admin("POST", "/admin/learner/report", data=msgspec.json.encode(REPORT))
                return msgspec.json.decode(reply.body, type=LearnerOrders)

            silent = msgspec.convert(await rig.status(), AdminStatus)
            assert (silent.learner.alive, silent.learner.age_s) == (False, None)
            assert await orders() == LearnerOrders(paused=False, active_version=0)
            assert (await rig.admin("POST", "/admin/learner/pause")).json["paused"] is True
            assert (await orders()).paused
            await rig.admin("POST", "/admin/learner/resume")
            assert not (await orders()).paused
            status = msgspec.convert(await rig.status(), AdminStatus)
            assert status.learner.alive
            assert status.learner.report == REPORT
            for name, value in {
                "paceline_learner_steps_total": 42.0,
                "paceline_learner_loss": 1.5,
                "paceline_learner_tokens_per_second": 800.0,
                "paceline_learner_buffer_tokens": 3400.0,
                "paceline_capture_lag_seconds": 0.5,
                "paceline_learner_restores_total": 1.0,
                "paceline_learner_timed_out_requests_total": 4.0,
                "paceline_learner_evicted_requests_total": 5.0,
                "paceline_learner_late_spans_total": 6.0,
                "paceline_learner_cut_rows_total": 7.0,
                "paceline_learner_dropped_requests_total": 8.0,
                "paceline_learner_wanted_vocabulary_size": 9000.0,
                'paceline_draft_vocabulary_coverage{domain="code",tenant="acme"}': 0.96,
                'paceline_draft_vocabulary_coverage_tokens{domain="code",tenant="acme"}': 900.0,
                'paceline_gate_decisions_total{outcome="rejected"}': 3.0,
                "paceline_learner_up": 1.0,
            }.items():
                assert await rig.metric(name) == value, name

    run(scenario())


def test_learner_of_another_release_or_garbage_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            other = msgspec.structs.replace(REPORT, schema_version=99)
            reply = await rig.admin("POST", "/admin/learner/report", data=msgspec.json.encode(other))
            assert (reply.status, reply.code) == (422, "schema_mismatch")
            for body in (b"", b"null", b"{}", b"x" * 100, b"{" * 5000):
                assert (await rig.admin("POST", "/admin/learner/report", data=body)).code == "bad_body"
            large = await rig.admin("POST", "/admin/learner/report", data=b" " * 2_000_000)
            assert (large.status, large.code) == (413, "body_too_large")

    run(scenario())


def test_silent_learner_is_not_alive() -> None:
    now = [100.0]
    link = LearnerLink(clock=lambda: now[0])
    link.receive(REPORT, 0, 0)
    assert link.view().alive
    now[0] += 60
    assert (link.view().alive, link.view().age_s) == (False, 60.0)


def test_unusable_capture_rate_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        bodies: list[dict[str, object]] = [{"rate": 1.5}, {"rate": -0.1}, {"rate": "all"}, {}, {"rate": 0.5, "engine": "x"}]
        async with running(tmp_path) as rig:
            for body in bodies:
                reply = await rig.admin("POST", "/admin/capture", json=body)
                assert (reply.status, reply.code in ("bad_rate", "bad_body")) == (400, True)
            assert rig.engine.capture_rate == 1.0

    run(scenario())


def test_capture_rate_reaches_every_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            assert (await rig.admin("POST", "/admin/capture", json={"rate": 0})).json == {"rate": 0.0}
            assert [engine.capture_rate for engine in rig.engines] == [0.0, 0.0]
            assert (await rig.status())["capture"]["rate"] == 0.0

    run(scenario())


def test_routing_explains_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            await rig.complete()
            view = (await rig.admin("GET", "/admin/routing")).json
            assert view["policy"] == "kv_aware"
            (decision,) = view["decisions"]
            assert decision["engine"] in view["num_indexed_blocks"]
            assert decision["path"] == "combined"
            assert decision["local"]["active_s"] == 0.0

    run(scenario())


def test_a_request_s_routing_is_found_by_the_id_its_client_was_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            replies = [await rig.complete(headers) for headers in (None, {"X-Request-Id": "mine"}, None)]
            ids = [reply.headers["X-Request-Id"] for reply in replies]
            whole = (await rig.admin("GET", "/admin/routing")).json
            assert [decision["request_id"] for decision in whole["decisions"]] == ids
            for index, request_id in enumerate(ids):
                view = (await rig.admin("GET", "/admin/routing", params={"request_id": request_id})).json
                assert view == {**whole, "decisions": [whole["decisions"][index]]}
            for other in ("min", "mine2", ""):
                assert (await rig.admin("GET", f"/admin/routing?request_id={other}")).json["decisions"] == []

    run(scenario())


def test_state_is_asked_for_by_a_prompt_s_hash(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            nobody = await rig.admin("GET", f"/admin/state?prompt_hash={'0' * 32}")
            assert (nobody.status, nobody.json["objects"]) == (200, [])
            assert (await rig.admin("GET", "/admin/state?prompt_hash=../../etc")).code == "bad_prompt_hash"
            assert (await rig.admin("GET", "/admin/state/usage")).json == {"tenants": []}

    run(scenario())
