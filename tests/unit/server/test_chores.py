"""The gateway's background work: what fails is told and begun anew, and takes nothing else with it."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from gateway_rig import eventually, publish, run, running
from sample_messages import engine_stats

from server.chores import Chores
from server.metrics import Metrics
from server.verdict import Verdict
from wire.messages import TOPIC_STATS, AcceptanceCount, encode


def test_a_chore_that_fails_is_begun_anew_and_the_others_go_on() -> None:
    async def scenario() -> None:
        begun: list[str] = []

        async def flaky() -> None:
            begun.append("flaky")
            if begun.count("flaky") < 3:
                raise RuntimeError("a fault")
            await asyncio.Event().wait()

        async def steady() -> None:
            begun.append("steady")
            await asyncio.Event().wait()

        async def finite() -> None:
            begun.append("finite")

        chores = Chores(Metrics(), pause_s=0.0)
        async with chores.running({"flaky": flaky, "steady": steady, "finite": finite}):
            await eventually(lambda: begun.count("flaky") == 3)
        assert dict(chores.num_faults) == {"flaky": 2}
        assert (begun.count("steady"), begun.count("finite")) == (1, 1)

    run(scenario())


def test_a_watch_that_fails_is_told_and_the_next_round_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            gateway = rig.gateway
            await rig.activate(publish(tmp_path, parent=0), 0, force=True)
            num_floor_rounds = 0

            def fails() -> Verdict:
                raise ValueError("math domain error")

            def counts() -> None:
                nonlocal num_floor_rounds
                num_floor_rounds += 1

            with monkeypatch.context() as broken:
                broken.setattr(gateway.canary, "evaluate", fails)
                broken.setattr(gateway.floor_watch, "evaluate", counts)
                await eventually(lambda: gateway.chores.num_faults["canary"] > 1 and num_floor_rounds > 1)
            assert list((await rig.status())["chore_faults"]) == ["canary"]
            assert (await rig.metric('paceline_chore_faults_total{chore="canary"}') or 0.0) > 1.0
            monkeypatch.setattr(gateway.canary, "evaluate", lambda: Verdict("pass", "as good", 1))
            await eventually(lambda: gateway.canary.view.state != "watching")
            assert gateway.canary.view.state == "passed"

    run(scenario())


IMPOSSIBLE = [
    {"num_verify_steps": -5},
    {"proposed_per_position": [10, -1]},
    {"accepted_per_position": [11]},
    {"accepted_per_position": [3, 4]},
    {"proposed_per_position": [10, 11]},
    {"proposed_per_position": [11]},
    {"proposed_per_position": [], "accepted_per_position": [1]},
]


def test_impossible_counts_are_counted_as_unusable_and_end_no_watch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await rig.count(rig.engine, 0, 100, (60,))
            version = publish(tmp_path, parent=0)
            await rig.activate(version, 0)
            counter = rig.gateway.metrics.bad_events.labels("engine-0")
            for number, changes in enumerate(IMPOSSIBLE, 1):
                count = AcceptanceCount(
                    draft_version=version,
                    tenant="t",
                    domain="d",
                    num_verify_steps=10,
                    proposed_per_position=[10, 10],
                    accepted_per_position=[3, 2],
                )
                message = msgspec.msgpack.decode(encode(engine_stats(count)))
                message["acceptance"][0] |= changes
                await rig.engine._publisher.send_multipart([TOPIC_STATS, msgspec.msgpack.encode(message)])
                await eventually(lambda number=number: counter._value.get() == number)
            assert not rig.gateway.ledger.totals_by_domain(version)
            await rig.count(rig.engine, version, 2000, (1200,))
            await eventually(lambda: rig.gateway.canary.view.state == "passed")
            assert not rig.gateway.chores.num_faults

    run(scenario())
