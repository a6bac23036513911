"""The watch over the active draft against the floor: on counters alone, and on a running gateway that no learner speaks to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from alike_requests import Requests, tally
from gateway_rig import GatewayRig, eventually, publish, run, running
from sample_messages import engine_stats

from server.acceptance import AcceptanceLedger
from server.config import CanarySettings
from server.drafts import Drafts
from server.floor import CANARY_WINDOWS, DomainWindow, FloorChange, FloorWatch
from server.tally import Tally, total
from wire.messages import AcceptanceCount
from wire.store import DraftStore

SETTINGS = CanarySettings(min_verify_steps=200, max_relative_drop=0.1)
STEPS_PER_S = 24
FLOOR, LEARNED = 0, 1


@dataclass
class Scene:
    """One engine's counters, a second at a time, and the watch, whose wishes come true."""

    drafts: Drafts
    seed: int
    settings: CanarySettings = SETTINGS
    counts: dict[tuple[int, str], Tally] = field(default_factory=dict)
    changes: list[FloorChange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = AcceptanceLedger(max_label_values=8, window_steps=CANARY_WINDOWS * SETTINGS.min_verify_steps)
        self.watch = FloorWatch(self.ledger, self.drafts, self.settings)
        self._rng = np.random.default_rng(self.seed)

    def serve(self, seconds: int, acceptance: dict[int, float], domain: str = "d", *, until_change: bool = False) -> int:
        """Requests of one domain, with this acceptance by draft; the seconds until the first change, or all of them."""
        requests = {version: Requests(self._rng, rate) for version, rate in acceptance.items()}
        for second in range(1, seconds + 1):
            active = self.drafts.active
            assert active is not None
            self.count(active, domain, requests[active].second())
            if self.look() and until_change:
                return second
        return seconds

    def count(self, version: int, domain: str, part: Tally) -> None:
        self.counts[version, domain] = self.counts.get((version, domain), Tally()) + part
        acceptance = [
            AcceptanceCount(
                draft_version=one,
                tenant="t",
                domain=name,
                num_verify_steps=done.num_verify_steps,
                proposed_per_position=list(done.proposed),
                accepted_per_position=list(done.accepted),
            )
            for (one, name), done in self.counts.items()
        ]
        self.ledger.ingest(engine_stats(*acceptance), keep_versions=frozenset({FLOOR}))

    def look(self) -> bool:
        change = self.watch.evaluate()
        if change is not None:
            self.changes.append(change)
            self.drafts.active = change.version
            self.watch.note(change)
        return change is not None


def scene(tmp_path: Path, seed: int = 0, settings: CanarySettings = SETTINGS) -> Scene:
    """The floor serves, the learned draft is in the store."""
    store = DraftStore(tmp_path)
    if store.active() is None:
        store.set_active(publish(tmp_path, gate=None))
        store.set_floor(FLOOR)
        publish(tmp_path)
    return Scene(Drafts(store), seed, settings)


def test_a_draft_that_falls_below_the_floor_is_left_within_a_canary_window(tmp_path: Path) -> None:
    """The floor has AL 1.8 here, the learned draft falls to 1.1 long after its canary ended."""
    took = []
    for seed in range(20):
        world = scene(tmp_path, seed)
        world.serve(100, {FLOOR: 0.5})
        world.drafts.active = LEARNED
        world.serve(200, {LEARNED: 0.6})
        assert not world.changes
        took.append(world.serve(200, {FLOOR: 0.5, LEARNED: 0.1}, until_change=True))
        assert world.drafts.active == FLOOR
    assert np.median(took) * STEPS_PER_S <= 2 * SETTINGS.min_verify_steps
    assert max(took) * STEPS_PER_S <= 4 * SETTINGS.min_verify_steps


def test_a_loss_too_small_for_one_canary_window_is_found_in_the_long_one(tmp_path: Path) -> None:
    world = scene(tmp_path)
    world.serve(150, {FLOOR: 0.6})
    world.drafts.active = LEARNED
    took = world.serve(1000, {FLOOR: 0.6, LEARNED: 0.45}, until_change=True)
    assert world.drafts.active == FLOOR
    assert took * STEPS_PER_S > SETTINGS.min_verify_steps


@pytest.mark.parametrize(("learned", "at_most"), [(0.5, 0.4), (0.6, 0.0)])
def test_a_draft_that_does_not_lose_is_seldom_left_in_a_long_time(tmp_path: Path, learned: float, at_most: float) -> None:
    """Each watch is of 14 400 verify steps, 72 canary windows. To leave one that is as good costs nothing."""
    num_left = 0
    for seed in range(10):
        world = scene(tmp_path, seed)
        world.serve(100, {FLOOR: 0.5})
        world.drafts.active = LEARNED
        world.serve(600, {FLOOR: 0.5, LEARNED: learned})
        num_left += bool(world.changes)
    assert num_left / 10 <= at_most


def test_where_the_floor_never_served_nothing_is_done_and_the_view_says_so(tmp_path: Path) -> None:
    world = scene(tmp_path)
    world.serve(100, {FLOOR: 0.6}, "code")
    world.drafts.active = LEARNED
    world.serve(200, {LEARNED: 0.0}, "chat")
    view = world.watch.view
    assert not world.changes
    assert (view.state, view.version, view.floor_version) == ("unknown", LEARNED, FLOOR)
    assert [(one.domain, one.floor_num_verify_steps, one.floor_acceptance_length) for one in view.domains] == [
        ("chat", 0, None)
    ]
    assert "chat" in view.reason


def test_a_small_known_domain_does_not_decide_for_the_others(tmp_path: Path) -> None:
    world = scene(tmp_path)
    world.serve(100, {FLOOR: 0.6}, "code")
    world.drafts.active = LEARNED
    for _ in range(300):
        world.count(LEARNED, "code", tally(10, 0, 0, 0))
        world.count(LEARNED, "chat", tally(20, 18, 16, 15))
        world.look()
    assert not world.changes
    assert {one.domain: one.floor_acceptance_length is None for one in world.watch.view.domains} == {
        "chat": True,
        "code": False,
    }


def test_a_shift_to_a_harder_domain_is_no_loss(tmp_path: Path) -> None:
    world = scene(tmp_path)
    world.serve(100, {FLOOR: 0.7}, "code")
    world.serve(100, {FLOOR: 0.2}, "chat")
    world.drafts.active = LEARNED
    world.serve(150, {LEARNED: 0.75}, "code")
    world.serve(150, {LEARNED: 0.25}, "chat")
    assert not world.changes


@pytest.mark.parametrize("serving", [FLOOR, LEARNED])
def test_nothing_is_known_of_the_floor_under_another_target(tmp_path: Path, serving: int) -> None:
    """All drafts fall with the target they follow. The floor is known again once it has served under the new one."""
    world = scene(tmp_path)
    world.serve(100, {FLOOR: 0.6})
    world.drafts.active = serving
    world.serve(100, {FLOOR: 0.6, LEARNED: 0.7})
    world.ledger.forget_recent()
    world.watch.forget()
    if serving == FLOOR:
        world.look()
        world.drafts.active = LEARNED
    world.serve(400, {LEARNED: 0.1})
    assert not world.changes
    assert world.watch.view.state == "unknown"
    world.drafts.active = FLOOR
    world.serve(100, {FLOOR: 0.5})
    world.drafts.active = LEARNED
    world.serve(100, {FLOOR: 0.5, LEARNED: 0.1}, until_change=True)
    assert [change.version for change in world.changes] == [FLOOR]


def test_a_draft_made_the_floor_later_is_not_known_by_what_it_did_under_another_target(tmp_path: Path) -> None:
    world = scene(tmp_path)
    world.drafts.active = LEARNED
    world.serve(100, {LEARNED: 0.7})
    world.ledger.forget_recent()
    world.watch.forget()
    world.drafts.active, world.drafts.floor = FLOOR, LEARNED
    world.serve(400, {FLOOR: 0.1})
    assert not world.changes
    assert world.watch.view.state == "unknown"


def test_a_harder_kind_of_traffic_under_the_same_name_costs_one_look_at_the_floor(tmp_path: Path) -> None:
    """Both drafts fall. That looks like a loss, the floor comes back, proves worse, and is known by that from then on."""
    world = scene(tmp_path)
    world.serve(100, {FLOOR: 0.6})
    world.drafts.active = LEARNED
    world.serve(100, {LEARNED: 0.7})
    world.serve(600, {FLOOR: 0.02, LEARNED: 0.25})
    assert [change.version for change in world.changes] == [FLOOR, LEARNED]
    known = world.watch.view.domains[0].floor_acceptance_length
    assert known is not None
    assert known < 1.1


def test_a_floor_that_is_no_worse_stays(tmp_path: Path) -> None:
    world = scene(tmp_path)
    world.serve(100, {FLOOR: 0.5})
    world.drafts.active = LEARNED
    world.serve(600, {FLOOR: 0.5, LEARNED: 0.1})
    assert [change.version for change in world.changes] == [FLOOR]
    assert (world.watch.view.state, world.drafts.active) == ("idle", FLOOR)


def test_a_draft_that_cannot_be_had_back_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    world = scene(tmp_path, settings=SETTINGS.model_copy(update={"deadline_s": 0.5}))
    world.serve(100, {FLOOR: 0.6})
    world.drafts.active = LEARNED
    world.serve(200, {FLOOR: 0.6, LEARNED: 0.2}, until_change=True)
    assert world.drafts.active == FLOOR
    world.watch.evaluate()
    world.count(FLOOR, "d", tally(2000, 0, 0, 0))
    give_up_s = time.monotonic() + 30.0
    while world.watch.view.state != "idle" and time.monotonic() < give_up_s:
        world.watch.evaluate()  # and nobody can do what it says
    assert world.watch.view.state == "idle"
    assert world.watch.evaluate() is None


def test_why_one_draft_could_not_be_left_is_not_said_of_the_next(tmp_path: Path) -> None:
    world = scene(tmp_path)
    world.drafts.active = LEARNED
    world.watch.evaluate()
    world.watch.postpone("the engine is busy")
    world.watch.evaluate()
    assert world.watch.view.reason == "the engine is busy"
    world.drafts.active = LEARNED + 1
    world.watch.evaluate()
    assert (world.watch.view.version, world.watch.view.reason) == (LEARNED + 1, "no verify steps yet")


def test_the_end_of_a_window_over_all_domains_is_in_order_of_time() -> None:
    window = DomainWindow(1000)
    for number in range(300):
        window.add({"old" if number < 290 else "new": tally(9, 5)})
    assert 1000 <= total(window.whole.values()).num_verify_steps < 1000 + 3 * 18
    assert window.newest(10**9) == window.whole
    assert window.newest(80) == {"new": tally(90, 50)}
    assert set(window.newest(500)) == {"old", "new"}


CANARY = CanarySettings(min_verify_steps=100, max_relative_drop=0.1, check_every_s=0.01)


async def _served_and_passed(rig: GatewayRig, state_dir: Path) -> None:
    """Draft 1 has replaced the floor and passed its canary."""
    await rig.count(rig.engine, FLOOR, 1000, (500, 200))
    assert (await rig.activate(publish(state_dir), FLOOR)).status == 200
    await eventually(lambda: rig.gateway.floor_watch.view.version == LEARNED)
    await rig.count(rig.engine, LEARNED, 200, (120, 60))
    await eventually(lambda: rig.gateway.canary.view.state == "passed")


def test_after_the_canary_a_draft_that_falls_below_the_floor_goes_without_a_learner(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2, canary=CANARY) as rig:
            await _served_and_passed(rig, tmp_path)
            await rig.count(rig.engine, LEARNED, 420, (121, 60))
            await eventually(lambda: rig.gateway.drafts.active == FLOOR)
            assert [engine.draft_version for engine in rig.engines] == [FLOOR, FLOOR]
            status = await rig.status()
            swap = status["swaps"][-1]
            assert (swap["trigger"], swap["outcome"], swap["version"], swap["previous"]) == ("floor", "committed", 0, 1)
            assert "worse than the floor when it last served here: AL 1.0" in swap["reason"]
            assert status["rolled_back_versions"] == []
            await eventually(lambda: rig.gateway.floor_watch.view.state == "back")
            assert await rig.metric('paceline_swaps_total{outcome="committed",trigger="floor"}') == 1.0
            assert (await rig.activate(LEARNED, FLOOR)).status == 200

    run(scenario())


def test_a_system_without_the_watch_keeps_what_loses(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, canary=CANARY.model_copy(update={"watch_floor": False})) as rig:
            await rig.count(rig.engine, FLOOR, 1000, (500, 200))
            assert (await rig.activate(publish(tmp_path), FLOOR)).status == 200
            await rig.count(rig.engine, LEARNED, 200, (120, 60))
            await eventually(lambda: rig.gateway.canary.view.state == "passed")
            await rig.count(rig.engine, LEARNED, 2000, (121, 60))
            assert rig.gateway.floor_watch.evaluate() is None
            status = await rig.status()
            assert (status["floor"]["state"], status["floor"]["reason"], status["active_version"]) == (
                "idle",
                "switched off",
                1,
            )

    run(scenario())


def test_a_floor_that_proves_worse_makes_way_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, canary=CANARY) as rig:
            await _served_and_passed(rig, tmp_path)
            await rig.count(rig.engine, LEARNED, 620, (190, 60))
            await eventually(lambda: rig.gateway.floor_watch.view.state == "back")
            await rig.count(rig.engine, FLOOR, 1400, (500, 200))
            await eventually(lambda: rig.gateway.drafts.active == LEARNED)
            assert [swap["trigger"] for swap in (await rig.status())["swaps"]] == ["activate", "floor", "floor"]
            assert rig.engine.draft_version == LEARNED

    run(scenario())


def test_a_floor_the_engine_refuses_is_tried_again_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, canary=CANARY) as rig:
            await _served_and_passed(rig, tmp_path)
            rig.engine.refuse_commit[FLOOR] = "busy"
            await rig.count(rig.engine, LEARNED, 420, (121, 60))
            await eventually(lambda: "could not be activated" in rig.gateway.floor_watch.view.reason)
            assert (await rig.complete()).headers["X-Paceline-Draft-Version"] == "1"
            assert [swap["outcome"] for swap in (await rig.status())["swaps"]] == ["committed", "refused"]

    run(scenario())
