"""The breaker by itself, and an engine that answers its probes but drops requests."""

from __future__ import annotations

from pathlib import Path

from gateway_rig import eventually, run, running

from server.relay.breaker import FIRST_OPEN_S, MAX_FAILURES, MAX_OPEN_S, NUM_TRIALS, WINDOW_S, Breaker


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _opened(clock: _Clock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(MAX_FAILURES):
        assert breaker.allows
        breaker.fail()
    assert not breaker.allows
    return breaker


def test_it_opens_after_repeated_failures_within_its_window_only() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    for _ in range(3 * MAX_FAILURES):
        breaker.fail()
        clock.now_s += WINDOW_S / (MAX_FAILURES - 1) + 0.1
        assert breaker.allows
        assert breaker.reason == ""
    assert _opened(clock).reason


def test_one_request_at_a_time_is_tried_and_successes_close_it() -> None:
    clock = _Clock()
    breaker = _opened(clock)
    clock.now_s += FIRST_OPEN_S
    for _ in range(NUM_TRIALS):
        assert breaker.allows
        visit = breaker.begin()
        assert not breaker.allows
        breaker.succeed(visit)
        breaker.end(visit)
    breaker.begin()
    assert breaker.allows
    assert breaker.reason == ""


def test_trial_without_a_verdict_makes_room_for_the_next() -> None:
    clock = _Clock()
    breaker = _opened(clock)
    clock.now_s += FIRST_OPEN_S
    breaker.end(breaker.begin())
    assert breaker.allows


def test_only_the_trial_ends_or_judges_itself() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    old = [breaker.begin() for _ in range(4)]
    for _ in range(MAX_FAILURES):
        breaker.fail(old[0])
    breaker.succeed(old[1])
    clock.now_s += FIRST_OPEN_S
    for visit in old[1:]:
        breaker.succeed(visit)
        assert breaker.reason, "a request from before the opening closes nothing"
    trial = breaker.begin()
    late = breaker.begin()
    for visit in (*old, late):
        breaker.succeed(visit)
        breaker.fail(visit)
        breaker.end(visit)
        assert not breaker.allows, "the trial is still running"
        assert breaker.reason == "it kept failing; on trial"
    breaker.end(trial)
    assert breaker.allows


def test_engine_that_falls_out_of_service_on_trial_is_left_alone_again() -> None:
    clock = _Clock()
    breaker = _opened(clock)
    clock.now_s += FIRST_OPEN_S
    breaker.begin()
    breaker.fail()
    assert "closed to requests" in breaker.reason


def test_flapping_engine_is_left_alone_for_a_growing_but_bounded_time() -> None:
    clock = _Clock()
    breaker = _opened(clock)
    times_s = []
    for _ in range(9):
        start_s = clock.now_s
        while not breaker.allows:
            clock.now_s += 0.25
        times_s.append(clock.now_s - start_s)
        trial = breaker.begin()
        breaker.fail(trial)
        breaker.end(trial)
    assert times_s == sorted(times_s)
    assert times_s[:3] == [FIRST_OPEN_S, 2 * FIRST_OPEN_S, 4 * FIRST_OPEN_S]
    assert times_s[-1] == MAX_OPEN_S


def test_failures_while_open_do_not_prolong_it() -> None:
    clock = _Clock()
    breaker = _opened(clock)
    for _ in range(50):
        breaker.fail()
    clock.now_s += FIRST_OPEN_S
    assert breaker.allows


def test_engine_that_answers_probes_but_drops_requests_is_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            bad, good = rig.engines
            view = rig.gateway.fleet.engines[0]
            view.breaker = Breaker(_Clock())
            bad.drop_connections = True
            while view.breaker.allows:
                assert (await rig.complete()).status == 200
                await eventually(lambda: view.ready)
            num_asked = len(bad.bodies)
            assert num_asked >= MAX_FAILURES
            for _ in range(5):
                assert (await rig.complete()).status == 200
            assert len(bad.bodies) == num_asked
            engines = (await rig.status())["engines"]
            assert engines[0]["ready"] is True
            assert "failing" in engines[0]["reason"]
            assert len(good.bodies) >= 5

    run(scenario())


def test_new_process_starts_with_a_clean_record(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            view = rig.gateway.fleet.engines[0]
            view.breaker = Breaker(_Clock())  # time alone never opens it
            for _ in range(MAX_FAILURES):
                view.breaker.fail()
            refused = await rig.complete()
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            await rig.engine.stop()
            await eventually(lambda: not view.ready)
            await rig.engine.restart(draft_version=0)
            await eventually(lambda: view.takes_requests)
            assert (await rig.complete()).status == 200

    run(scenario())


def test_errors_a_request_may_have_earned_shut_no_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.engine.answer = (500, {"error": {"message": "bad tensor", "type": "x", "param": None, "code": 500}})
            for _ in range(2 * MAX_FAILURES):
                assert (await rig.complete()).status == 500
            rig.engine.answer = None
            assert (await rig.complete()).status == 200

    run(scenario())
