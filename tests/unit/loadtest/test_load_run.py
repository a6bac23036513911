"""A run on real sockets: what is sent when, and what is kept of every way an answer can end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from run_rig import ERROR, PROMPTS, Left, Server, good_answer, phase, run, scenario
from waiting import DEADLINE_S

from loadtest.schedule import plan

Send = Callable[[Any], Awaitable[None]]
OPEN = {"kind": "poisson", "rate_per_s": 20}
WORD = {"choices": [{"delta": {"content": "word"}, "finish_reason": None}]}


async def slow_answer(body: dict[str, Any], send: Send) -> None:
    await send(WORD)
    await asyncio.sleep(60)
    await good_answer(body, send)


def test_every_request_of_an_open_loop_is_sent_at_its_time_and_kept(tmp_path: Path) -> None:
    left = run(scenario({"phase": [phase(OPEN)]}), Server(), tmp_path)
    assert [one.outcome for one in left.requests] == ["ok"] * len(left.requests)
    assert left.run.num_requests == {"ok": len(left.requests)}
    assert len(left.requests) > 5
    for one in left.requests:
        assert one.is_open_loop
        assert 0 <= one.intended_at_s <= one.sent_at_s <= one.chunk_times_s[0] <= one.ended_at_s
        assert (one.text, one.num_prompt_tokens, one.num_completion_tokens, one.kv_path) == ("yes", 5, 1, "combined")
    assert left.run.is_valid
    assert left.run.dispatch_lag_ms["p99"] is not None


def test_an_answer_that_never_ends_is_a_failure_of_the_run(tmp_path: Path) -> None:
    async def endless(_body: dict[str, Any], send: Send) -> None:
        while True:
            await send(WORD)
            await asyncio.sleep(0.01)

    lane = {"phase": [phase({"kind": "closed", "concurrency": 2}, 0.5)], "answer_timeout_s": 0.2}
    left = run(scenario(lane), Server(endless), tmp_path)
    assert {(one.outcome, one.error) for one in left.requests} == {("failed", "the answer did not end within 0.2 s")}
    assert left.run.num_requests == {"failed": len(left.requests)}
    assert "no request was answered" in left.run.invalid_reasons


def test_the_sender_goes_before_what_it_measures_where_it_may_and_only_while_it_runs(tmp_path: Path) -> None:
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    async def watching(body: dict[str, Any], send: Send) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))
        await good_answer(body, send)

    left = run(scenario({"phase": [phase(OPEN)]}), Server(watching), tmp_path)
    assert set(seen) == {left.run.niceness}
    assert left.run.niceness == (min(niceness, -10) if _may_go_before_others() else niceness)
    assert os.getpriority(os.PRIO_PROCESS, 0) == niceness


def test_a_closed_loop_whose_load_tester_was_the_limit_must_not_be_believed(tmp_path: Path) -> None:
    closed = {"phase": [phase({"kind": "closed", "concurrency": 2}, 0.5)]}
    assert run(scenario(closed, max_busy_share=100.0), Server(), tmp_path / "idle").run.is_valid
    left = run(scenario(closed, max_busy_share=0.001), Server(), tmp_path / "busy")
    assert not left.run.is_valid
    assert [reason for reason in left.run.invalid_reasons if "busy" in reason] == left.run.invalid_reasons
    open_loop = run(scenario({"phase": [phase(OPEN)]}, max_busy_share=0.001), Server(), tmp_path / "open")
    assert open_loop.run.is_valid


def _may_go_before_others() -> bool:
    """CAP_SYS_NICE is bit 23 of the effective capabilities."""
    (effective,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:")]
    return bool(int(effective.split()[1], 16) >> 23 & 1)


def test_an_open_loop_does_not_wait_for_answers(tmp_path: Path) -> None:
    one_lane = scenario({"phase": [phase(OPEN)]})
    (lane,) = plan(one_lane, lambda *_: len(PROMPTS))
    num_requests = len(list(lane.planned()))

    async def late(body: dict[str, Any], send: Send) -> None:
        """Once every request is there."""
        async with asyncio.timeout(DEADLINE_S):
            while len(server.asked) < num_requests:
                await asyncio.sleep(0.01)
        await good_answer(body, send)

    server = Server(late)
    left = run(one_lane, server, tmp_path)
    assert server.most_running == len(left.requests) == num_requests > 5
    assert min(one.ended_at_s for one in left.requests) > max(one.sent_at_s for one in left.requests)
    assert left.run.duration_s is not None
    assert left.run.duration_s > max(one.sent_at_s for one in left.requests)


def test_two_runs_of_one_scenario_send_the_same(tmp_path: Path) -> None:
    one = scenario({"phase": [phase(OPEN)]}, {"phase": [phase({**OPEN, "burstiness": 0.3})], "turns": {"number": 2}})

    def key(left: Left) -> list[tuple[Any, ...]]:
        first_turns = [one for one in left.requests if one.turn == 0]
        return sorted((one.lane, one.index, one.intended_at_s, one.prompt_id) for one in first_turns)

    assert key(run(one, Server(), tmp_path / "a")) == key(run(one, Server(), tmp_path / "b"))


def test_a_sender_that_lags_makes_the_run_invalid(tmp_path: Path) -> None:
    async def stall() -> None:
        while not server.asked:
            await asyncio.sleep(0.01)
        # Nothing else runs meanwhile, as if the load tester were too slow for its schedule.
        time.sleep(0.4)

    server = Server()
    left = run(scenario({"phase": [phase(OPEN)]}, max_dispatch_lag_p99_ms=100.0), server, tmp_path, beside=stall)
    assert left.run.is_valid is False
    assert left.run.dispatch_lag_ms["p99"] is not None
    assert left.run.dispatch_lag_ms["p99"] > 100
    assert "lagged" in left.run.invalid_reasons[0]
    late = max(left.requests, key=lambda one: one.sent_at_s - one.intended_at_s)
    assert late.chunk_times_s[0] - late.intended_at_s > 0.1


def test_the_lag_of_warm_up_and_cool_down_does_not_count(tmp_path: Path) -> None:
    closed = {"kind": "closed", "concurrency": 1}
    phases = [phase(OPEN, 0.5), phase(closed, 0.3), phase(OPEN, 0.5)]
    left = run(scenario({"phase": phases}, cut={"warm_up_s": 0.5, "cool_down_s": 0.5}), Server(), tmp_path)
    assert any(one.is_open_loop for one in left.requests)
    assert left.run.dispatch_lag_ms == {"p50": None, "p99": None, "max": None}


@pytest.mark.parametrize(
    ("events", "outcome", "error"),
    [
        ([WORD, {"error": ERROR}], "failed", "the engine failed"),
        ([WORD, {"error": ERROR}, "[DONE]"], "failed", "the engine failed"),
        (
            [{"error": ERROR}, WORD, {"choices": [{"delta": {}, "finish_reason": "stop"}]}, "[DONE]"],
            "failed",
            "the engine failed",
        ),
        ([WORD], "truncated", None),
        ([WORD, "[DONE]"], "truncated", None),
        (["{"], "failed", "not JSON"),
        ([], "failed", "the engine failed"),
    ],
    ids=["error", "error-done", "error-answer-done", "no-end", "no-finish", "garbage", "503"],
)
def test_what_is_no_whole_answer_is_kept_as_what_it_is(
    tmp_path: Path, events: list[Any], outcome: str, error: str | None
) -> None:
    async def bad(_body: dict[str, Any], send: Send) -> None:
        for event in events:
            await send(event)

    left = run(scenario({"phase": [phase(OPEN, 0.3)]}), Server(bad), tmp_path)
    assert {one.outcome for one in left.requests} == {outcome}
    assert left.run.num_requests == {outcome: len(left.requests)}
    assert all((one.error is None) if error is None else error in (one.error or "") for one in left.requests)
    assert left.run.invalid_reasons == ["no request was answered"]


def test_clients_that_leave_are_kept_with_what_they_got(tmp_path: Path) -> None:
    server = Server(slow_answer)
    lane = {"phase": [phase(OPEN, 0.5)], "cancel": {"share": 1.0, "mean_after_s": 1.0}}
    left = run(scenario(lane), server, tmp_path)
    assert {one.outcome for one in left.requests} == {"cancelled"}
    assert any(one.text == "word" for one in left.requests)
    assert max(one.ended_at_s - one.sent_at_s for one in left.requests) < 30
    assert server.num_running == 0


def test_a_closed_loop_keeps_its_number_in_flight_and_has_no_lag(tmp_path: Path) -> None:
    async def steady(body: dict[str, Any], send: Send) -> None:
        await asyncio.sleep(0.2)
        await good_answer(body, send)

    server = Server(steady)
    phases = [phase({"kind": "closed", "concurrency": 2}, 1.0), phase({"kind": "closed", "concurrency": 5}, 1.0)]
    left = run(scenario({"phase": phases}), server, tmp_path)
    assert server.most_running == 5
    early = [one for one in left.requests if one.sent_at_s < 0.9]
    assert max(sum(other.sent_at_s <= one.sent_at_s < other.ended_at_s for other in early) for one in early) == 2
    assert all(one.intended_at_s == one.sent_at_s and not one.is_open_loop for one in left.requests)
    assert left.run.dispatch_lag_ms["p99"] is None
    assert left.run.is_valid


def test_a_closed_loop_does_not_hammer_a_server_that_refuses(tmp_path: Path) -> None:
    async def refuse(_body: dict[str, Any], _send: Send) -> None:
        return

    left = run(scenario({"phase": [phase({"kind": "closed", "concurrency": 1}, 1.2)]}), Server(refuse), tmp_path)
    assert 1 <= len(left.requests) <= 4


def test_a_conversation_goes_on_after_the_users_pause(tmp_path: Path) -> None:
    server = Server()
    lane = {"phase": [phase({**OPEN, "rate_per_s": 5}, 2.0)], "turns": {"number": 3, "mean_think_time_s": 0.05}}
    left = run(scenario(lane), server, tmp_path)
    talks: dict[int, list[Any]] = {}
    for one in sorted(left.requests, key=lambda one: one.turn):
        talks.setdefault(one.index, []).append(one)
    whole = [talk for talk in talks.values() if len(talk) == 3]
    assert whole
    for talk in whole:
        assert [one.turn for one in talk] == [0, 1, 2]
        for before, after in pairwise(talk):
            assert before.ended_at_s <= after.intended_at_s <= after.sent_at_s
        assert len({one.prompt_id for one in talk}) == 1
    lengths = {len(body["messages"]) for body in server.asked}
    assert lengths == {1, 3, 5}
    last = next(body for body in server.asked if len(body["messages"]) == 5)
    assert last["messages"][1] == last["messages"][3] == {"role": "assistant", "content": "yes"}
    assert len({body["headers"]["X-Session-Id"] for body in server.asked}) == len(talks)


def test_a_conversation_ends_with_the_turn_that_fails(tmp_path: Path) -> None:
    async def once(body: dict[str, Any], send: Send) -> None:
        if len(body["messages"]) == 1:
            await good_answer(body, send)

    left = run(scenario({"phase": [phase(OPEN, 0.3)], "turns": {"number": 3}}), Server(once), tmp_path)
    assert {(one.turn, one.outcome) for one in left.requests} <= {(0, "ok"), (1, "failed")}
    assert any(one.turn == 1 for one in left.requests)


def test_lanes_say_who_they_are_and_hold_back_held_out_prompts(tmp_path: Path) -> None:
    server = Server()
    held_out = {"phase": [phase(OPEN, 0.3, split="heldout")], "max_tokens": 9, "options": {"top_p": 0.5}}
    named = {"phase": [phase(OPEN, 0.3)], "headers": {"X-Paceline-Domain": "mine", "X-Paceline-Tenant": "t"}}
    run(scenario(held_out, named), server, tmp_path)
    mine = [body for body in server.asked if body["headers"].get("X-Paceline-Tenant") == "t"]
    others = [body for body in server.asked if body not in mine]
    assert {body["headers"]["X-Paceline-Domain"] for body in mine} == {"mine"}
    assert all("X-Paceline-Capture" not in body["headers"] for body in mine)
    assert {(body["max_tokens"], body["top_p"], body["headers"]["X-Paceline-Capture"]) for body in others} == {(9, 0.5, "off")}
    assert {body["headers"]["X-Paceline-Domain"] for body in others} == {"a"}


def test_an_interrupt_ends_the_run_and_keeps_what_was_measured(tmp_path: Path) -> None:
    served: list[int] = []

    async def some(body: dict[str, Any], send: Send) -> None:
        served.append(1)
        await (good_answer if len(served) % 2 else slow_answer)(body, send)

    async def interrupt() -> None:
        while len(served) < 6:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    open_lane = {"phase": [phase(OPEN, 600.0)]}
    closed_lane = {
        "phase": [phase({"kind": "closed", "concurrency": 1}, 600.0)],
        "turns": {"number": 50, "mean_think_time_s": 9},
    }
    left = run(scenario(open_lane, closed_lane), Server(some), tmp_path, beside=interrupt)
    assert left.run.was_interrupted
    assert left.run.is_valid is False
    assert any("interrupted" in reason for reason in left.run.invalid_reasons)
    assert {one.outcome for one in left.requests} == {"ok", "cancelled"}
    assert {one.error for one in left.requests if one.outcome == "cancelled"} == {"the run was interrupted"}
    assert left.run.duration_s is not None
    assert left.run.duration_s < 60
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
