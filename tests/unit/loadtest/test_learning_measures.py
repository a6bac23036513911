"""The arithmetic of the learning benchmark against slow references."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from loadtest.bars.registry import load
from loadtest.learning import measures, verdicts
from loadtest.learning.answers import Answer, ArmRun
from loadtest.learning.benchmark import Benchmark
from loadtest.learning.course import axis, course
from loadtest.learning.figures import along_work
from loadtest.learning.figures import by_phase as by_phase_figure
from loadtest.learning.measures import CANARY_STEPS, Reached
from loadtest.learning.remarks import remarks
from loadtest.learning.report import by_phase
from loadtest.learning.verdicts import Results
from loadtest.records import RunRecord, Swap
from loadtest.report.theme import ON_WHITE


def answer(index: int, *, at_s: float = 0.0, took_s: float = 1.0, tokens: int = 100, accepted: Any = (), **more: Any) -> Answer:
    fields = {"phase": "code", "is_unseen": False, "prompt_id": f"p{index}", "is_ok": True, **more}
    return Answer(index=index, sent_at_s=at_s, ended_at_s=at_s + took_s, num_tokens=tokens, accepted=tuple(accepted), **fields)


def run(name: str, answers: list[Answer], swaps: tuple[Swap, ...] = ()) -> ArmRun:
    return ArmRun(name, {one.index: one for one in answers}, swaps, {}, None)


def stream(name: str, seconds: list[float], **more: Any) -> ArmRun:
    """One request after the other."""
    answers, now_s = [], 0.0
    for index, took_s in enumerate(seconds):
        answers.append(answer(index, at_s=now_s, took_s=took_s, **more))
        now_s += took_s
    return run(name, answers)


def test_only_requests_that_both_answered_whole_are_pairs() -> None:
    ours = run("ours", [answer(0), answer(1, is_ok=False), answer(2), answer(4)])
    other = run("none", [answer(0), answer(1), answer(2, is_ok=False), answer(3), answer(4)])
    assert [(one.index, two.index) for one, two in measures.pairs(ours, other)] == [(0, 0), (4, 4)]
    assert [one.index for one, _ in measures.pairs(ours, other, [ours.answers[4]])] == [4]


def test_arms_that_did_different_work_are_not_compared() -> None:
    with pytest.raises(ValueError, match="request 0 is p0 in 'code' for ours but other in 'code' for none"):
        measures.pairs(run("ours", [answer(0)]), run("none", [answer(0, prompt_id="other")]))


def test_speed_up_is_the_ratio_of_tokens_over_seconds_of_the_same_requests() -> None:
    draw = random.Random(1)
    ours = stream("ours", [draw.uniform(1, 3) for _ in range(50)])
    none = stream("none", [draw.uniform(2, 5) for _ in range(50)])
    for arm in (ours, none):
        arm.answers.update({index: replace(one, num_tokens=draw.randint(50, 150)) for index, one in arm.answers.items()})
    found = measures.speed_up(measures.pairs(ours, none))
    speeds = [
        sum(one.num_tokens for one in arm.answers.values()) / sum(one.took_s for one in arm.answers.values())
        for arm in (ours, none)
    ]
    assert found.value == pytest.approx(speeds[0] / speeds[1])
    assert found.low < found.value < found.high


def test_an_arm_that_is_always_twice_as_fast_is_so_for_certain() -> None:
    seconds = [random.Random(index).uniform(2, 6) for index in range(40)]
    paired = measures.pairs(stream("ours", [one / 2 for one in seconds]), stream("none", seconds))
    found = measures.speed_up(paired)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_requests_that_run_at_a_time_are_never_drawn_apart() -> None:
    """Eight at a time, of which each eight are equally slow: as many observations as there are eights, not as requests."""
    draw = random.Random(3)
    slowness = [draw.uniform(1, 2) for _ in range(8)]
    batched = run(
        "ours", [answer(8 * n + i, at_s=3.0 * n, took_s=took_s) for n, took_s in enumerate(slowness) for i in range(8)]
    )
    none = run("none", [answer(8 * n + i, at_s=3.0 * n, took_s=1.0) for n in range(8) for i in range(8)])
    alone = measures.speed_up(measures.pairs(stream("ours", slowness), stream("none", [1.0] * 8)))
    together = measures.speed_up(measures.pairs(batched, none))
    assert (together.value, together.low, together.high) == pytest.approx((alone.value, alone.low, alone.high))


def test_nothing_in_common_is_no_number() -> None:
    assert measures.speed_up([]).value != measures.speed_up([]).value
    nothing = run("none", [answer(0, tokens=0)])
    assert math.isnan(measures.speed_up(measures.pairs(run("ours", [answer(0)]), nothing)).value)
    assert measures.worst_minute(run("ours", [answer(0)]), nothing) is None
    assert measures.worst_minute(run("a", [answer(0)]), run("b", [answer(1)])) is None


def test_the_worst_minute_is_found() -> None:
    """One slow minute of the judged arm among five, against a reference that goes through every window by itself."""
    draw = random.Random(2)
    slow = [4.0 * (2.0 if 120 <= 4 * index < 180 else 1.0) * draw.uniform(0.95, 1.05) for index in range(75)]
    ours, none = stream("ours", slow), stream("none", [4.0] * 75)
    found = measures.worst_minute(ours, none)
    assert found is not None
    end_s = max(one.ended_at_s for one in ours.answers.values())
    reference = []
    start_s = 0.0
    while start_s + 30 <= end_s:
        inside = [one for one in ours.answers.values() if start_s <= one.ended_at_s < start_s + 60]
        mine = sum(one.num_tokens for one in inside) / sum(one.took_s for one in inside)
        theirs = [none.answers[one.index] for one in inside]
        reference.append((mine / (sum(one.num_tokens for one in theirs) / sum(one.took_s for one in theirs)), start_s))
        start_s += 60
    assert (found.speed_up.value, found.start_s) == pytest.approx(min(reference))
    assert found.num_windows == len(reference)


def test_a_minute_without_a_token_is_the_worst_and_one_without_a_partners_tokens_is_none() -> None:
    ours, none = stream("ours", [20.0] * 9), stream("none", [20.0] * 9)
    ours.answers.update({index: replace(ours.answers[index], num_tokens=0) for index in (2, 3, 4)})
    none.answers.update({index: replace(none.answers[index], num_tokens=0) for index in (0, 1)})
    found = measures.worst_minute(ours, none)
    assert found is not None
    assert (found.speed_up.value, found.start_s) == (0.0, 60.0)


def test_a_short_rest_at_the_end_is_no_window() -> None:
    ours, none = stream("ours", [4.0] * 15 + [12.0]), stream("none", [4.0] * 16)
    found = measures.worst_minute(ours, none)
    assert found is not None
    assert (found.num_windows, found.speed_up.value) == (1, pytest.approx(1.0))


def test_tokens_are_counted_until_unseen_prompts_have_the_al() -> None:
    """A draft whose AL is 1 + index / 100: the last six unseen answers reach 1.8 together, not the first one that has it."""
    answers = []
    for index in range(120):
        steps = [1] * index + [0] * max(100 - index, 0)
        answers.append(answer(index, at_s=float(index), took_s=0.5, accepted=steps[:100], is_unseen=index % 4 == 3))
    found = measures.tokens_to_reach(run("fresh", answers), 1.8, {"code"})
    unseen = [one for one in answers if one.is_unseen]
    for number in range(6, len(unseen) + 1):
        window = unseen[number - 6 : number]
        if sum(sum(one.accepted) for one in window) / sum(len(one.accepted) for one in window) >= 0.8:
            break
    expected = sum(one.num_tokens for one in answers if not one.is_unseen and one.index <= unseen[number - 1].index)
    assert found == Reached(expected, True)
    assert measures.tokens_to_reach(run("fresh", answers), 3.0, {"code"}) == Reached(90 * 100, False)
    assert measures.tokens_to_reach(run("fresh", answers[:20]), 1.8, {"code"}) is None


def test_what_an_arm_does_after_its_last_unseen_prompt_is_not_what_it_needed() -> None:
    """Twelve prompts of code, every second unseen, at AL 1.5; then chats, unseen ones too, at AL 2."""
    code = [answer(index, at_s=float(index), accepted=[0, 1], is_unseen=index % 2 == 1) for index in range(12)]
    chats = [answer(i, at_s=float(i), accepted=[1], phase="chats", is_unseen=i % 2 == 1) for i in range(12, 36)]
    assert measures.tokens_to_reach(run("aurora", code + chats), 1.8, {"code"}) == Reached(6 * 100, False)
    late = [replace(one, phase="code") if one.index >= 34 else one for one in chats]
    assert measures.tokens_to_reach(run("aurora", code + late), 1.2, {"code"}) == Reached(6 * 100, True)
    assert measures.tokens_to_reach(run("aurora", chats + code), 1.2, {"chats"}) == Reached(12 * 100, True)


def returning(*window_als: float) -> ArmRun:
    """AL 2 at the end of the old phase; then a canary window of each AL."""
    old = [answer(index, at_s=float(index), accepted=[1] * 100) for index in range(9)]
    steps = [int(number < (al - 1) * CANARY_STEPS) for al in window_als for number in range(CANARY_STEPS)]
    new = [
        answer(9 + number, at_s=9.0 + number, accepted=steps[start : start + 50], phase="again")
        for number, start in enumerate(range(0, len(steps), 50))
    ]
    return run("ours", old + new)


@pytest.mark.parametrize(("als", "expected"), [((1.95, 1.2), 0), ((1.5, 1.9), 1), ((1.5, 1.6, 2.0), 2), ((1.5, 1.6), 3)])
def test_windows_pass_until_the_old_al_is_back(als: tuple[float, ...], expected: int) -> None:
    assert measures.windows_to_regain(returning(*als), "code", "again") == expected


def test_without_verify_steps_there_is_no_al_to_regain() -> None:
    assert measures.windows_to_regain(run("none", [answer(0), answer(1, phase="again")]), "code", "again") is None
    assert measures.acceptance_length([answer(0)]) is None


def test_a_few_verify_steps_are_no_canary_window() -> None:
    whole = returning(2.0).answers
    old = [one for one in whole.values() if one.phase == "code"]
    few = run("ours", [*old, answer(9, phase="again", accepted=[1] * (CANARY_STEPS - 1))])
    assert measures.windows_to_regain(few, "code", "again") is None
    enough = run("ours", [*old, answer(9, phase="again", accepted=[1] * CANARY_STEPS)])
    assert measures.windows_to_regain(enough, "code", "again") == 0


def test_the_end_of_a_phase_is_its_last_third() -> None:
    answers = [answer(index) for index in range(30)]
    assert measures.last_part(answers) == answers[20:]
    assert measures.last_part(answers[:1]) == answers[:1]
    assert measures.last_part([]) == []


PHASES = ({"name": "code", "traffic": {"human_eval": 1}}, {"name": "chats", "traffic": {"sharegpt": 1}},
          {"name": "again", "traffic": {"human_eval": 1}}, {"name": "batch", "traffic": {"human_eval": 1}})  # fmt: skip
STREAM = ["code", "chats", "again"]
BENCHMARK = Benchmark.build(
    {
        "name": "b",
        "what": "w",
        "phase": [{**phase, "num_requests": 12} for phase in PHASES],
        "arm": [
            {"name": "none", "method": "none"},
            {"name": "fresh", "method": "draft", "phases": ["code"]},
            {"name": "aurora", "method": "draft", "phases": ["code"]},
            {"name": "static", "method": "draft", "phases": STREAM},
            {"name": "ours", "method": "draft", "phases": STREAM},
            {"name": "cold", "method": "draft", "phases": ["batch"]},
        ],
    },
    source="test",
)


def results(**speed: float) -> Results:
    """Every arm at its speed against `none`; in each phase the last answer of three is to an unseen prompt; AL is always 2."""
    arms = {}
    for arm in BENCHMARK.arm:
        answers, now_s = [], 0.0
        for number, phase in enumerate(BENCHMARK.phase):
            if arm.phases is not None and phase.name not in arm.phases:
                continue
            for index in range(12 * number, 12 * number + 12):
                took_s = 6.0 / speed.get(arm.name, 1.0)
                steps = () if arm.name == "none" else [1] * 50
                answers.append(
                    answer(index, at_s=now_s, took_s=took_s, phase=phase.name, accepted=steps, is_unseen=index % 2 == 1)
                )
                now_s += took_s
        arms[arm.name] = run(arm.name, answers)
    return Results(BENCHMARK, arms)


def test_every_bar_is_measured_from_the_arms_it_names() -> None:
    found = verdicts.measured(results(fresh=1.5, static=1.2, ours=1.8, cold=0.9))
    values = {name: one.value for name, one in found.items()}
    assert values == {
        "day_0_speed_up": pytest.approx(1.5),
        "tokens_to_al": 600,
        "tokens_to_al_share": pytest.approx(1.0),
        "chat_al": pytest.approx(2.0),
        "shift_speed_up": pytest.approx(1.5),
        "worst_minute_static": pytest.approx(1.5),
        "worst_minute_none": pytest.approx(1.8),
        "return_windows": 0,
        "cold_batch_speed": pytest.approx(0.9),
    }
    assert {bar.name for bar in load() if bar.function == verdicts.FUNCTION} == {f"P4.{name}" for name in values}


def test_a_bar_is_not_met_by_leaving_out_a_domain_that_was_not_compared() -> None:
    """The static arm did nothing of the second domain."""
    phases = [*PHASES[:2], {"name": "tools", "traffic": {"tool_calls": 1}}, *PHASES[2:]]
    arms = [{"name": "static", "method": "draft", "phases": STREAM}, {"name": "ours", "method": "draft"}]
    tables = {"name": "b", "what": "w", "phase": [{**phase, "num_requests": 3} for phase in phases], "arm": arms}
    ours = [answer(3 * n + i, phase=str(phase["name"])) for n, phase in enumerate(phases) for i in range(3)]
    static = [one for one in ours if one.phase in STREAM]
    whole = Results(Benchmark.build(tables, source="test"), {"ours": run("ours", ours), "static": run("static", static)})
    found = verdicts.measured(whole)["shift_speed_up"]
    assert (found.value, found.detail) == (None, {"reason": "ours and static share nothing to compare at the end of tools"})


def test_a_bar_tells_of_arms_that_are_not_valid() -> None:
    whole = results()
    record = RunRecord(name="n", url="u", model="m", seed=0, started_at_s=0, commit=None, machine={}, versions={},
                       is_valid=False, invalid_reasons=["1 of 9 requests failed"])  # fmt: skip
    arms = {**whole.arms, "static": replace(whole.arms["static"], record=record)}
    found = verdicts.measured(replace(whole, arms=arms))
    assert found["shift_speed_up"].detail["not_valid"] == "static"
    assert "not_valid" not in found["day_0_speed_up"].detail


def test_an_arm_has_one_colour_in_all_figures() -> None:
    whole = results(fresh=1.5, static=1.2, ours=1.8)
    along = axis(list(whole.arms.values()))
    speeds = along_work({name: course(one, along) for name, one in whole.arms.items()}, along, ON_WHITE).axes[1]
    ups = by_phase_figure({name: by_phase(one, whole.arms["none"]) for name, one in whole.arms.items()}, ON_WHITE)
    assert ups is not None
    colours = {str(line.get_label()): line.get_color() for line in speeds.get_lines()}
    containers = {str(one.get_label()): one.lines[0] for one in ups.axes[0].containers}
    assert set(containers) == set(whole.arms) - {"none"}
    assert {name: line.get_color() for name, line in containers.items()} == {name: colours[name] for name in containers}
    assert len({line.get_marker() for line in containers.values()}) == len(containers)


def test_arms_of_other_machines_and_releases_are_named() -> None:
    whole = results()
    record = RunRecord(name="n", url="u", model="m", seed=0, started_at_s=0, commit="c1", machine={"num_cores": 2}, versions={"vllm": "0.32"})  # fmt: skip
    arms = {name: replace(one, record=record) for name, one in whole.arms.items()}
    assert not [line for line in remarks(replace(whole, arms=arms), {}) if "NOT ALIKE" in line]
    arms["ours"] = replace(arms["ours"], record=structs.replace(record, commit="c2", machine={"num_cores": 4}))
    assert [line for line in remarks(replace(whole, arms=arms), {}) if "NOT ALIKE" in line] == [
        "ARMS ARE NOT ALIKE in commit: c1 (none, fresh, aurora, static, cold); c2 (ours)",
        "ARMS ARE NOT ALIKE in num_cores: 2 (none, fresh, aurora, static, cold); 4 (ours)",
    ]


def test_prompts_that_a_draft_has_learned_from_are_counted() -> None:
    """`ours` starts from `static`, which does not learn and starts from `fresh`, which does: two prompts of code, and one unseen."""
    arms = [{"name": "fresh", "method": "draft"}, {"name": "static", "method": "draft", "draft": "fresh", "learns": False},
            {"name": "ours", "method": "draft", "draft": "static"}]  # fmt: skip
    phases = [{**phase, "num_requests": 3} for phase in PHASES]
    one = Benchmark.build({"name": "b", "what": "w", "phase": phases, "arm": arms}, source="test")
    fresh = run("fresh", [answer(0), answer(1), answer(2, is_unseen=True)])
    static = run("static", [answer(3, phase="chats")])
    again = [answer(index, phase="again", prompt_id=f"p{index - 6}") for index in (6, 7, 8)]
    ours = run("ours", [answer(3, phase="chats"), *again])
    said = remarks(Results(one, {"fresh": fresh, "static": static, "ours": ours}), {})
    assert said == ["ours: 2 of 3 prompts of 'again' are known to the draft it starts from"]


def test_chats_rise_only_where_chance_does_not_explain_it() -> None:
    whole = results()

    def rising(als: list[float]) -> dict[str, Any]:
        answers = dict(whole.arms["ours"].answers)
        for index, al in zip(range(13, 24, 2), als, strict=True):
            answers[index] = replace(answers[index], accepted=[1] * round(100 * (al - 1)) + [0] * round(100 * (2 - al)))
        arms = {**whole.arms, "ours": replace(whole.arms["ours"], answers=answers)}
        return verdicts.measured(replace(whole, arms=arms))["chat_al"].detail

    assert rising([1.2, 1.21, 1.19, 1.8, 1.81, 1.79])["rising"]
    by_chance = rising([1.2, 1.9, 1.2, 1.9, 1.2, 1.3])
    assert not by_chance["rising"]
    assert by_chance["change"].startswith("0.033 (")


def test_the_change_of_al_is_that_of_all_steps() -> None:
    before, after = ([answer(i, accepted=[1] * number + [0] * 10) for i in range(8)] for number in (2, 5))
    found = measures.acceptance_change(before, after)
    assert (found.value, found.low, found.high) == pytest.approx((5 / 15 - 2 / 12,) * 3)
    assert math.isnan(measures.acceptance_change([], after).value)


def test_the_way_back_counts_from_where_the_first_domain_was_left() -> None:
    """Two phases of code in a row are no return; AL 2 at the end of the second is what has to be regained, not 1.5."""
    phases = [{"name": "early", "traffic": {"human_eval": 1}}, *PHASES[:3]]
    tables = {"name": "b", "what": "w", "phase": [{**phase, "num_requests": 3} for phase in phases],
              "arm": [{"name": "ours", "method": "draft"}]}  # fmt: skip
    steps = {"early": [0, 1] * 100, "code": [1] * 200, "chats": [0] * 200, "again": [0, 1] * 100}
    answers = [
        answer(3 * n + i, at_s=3.0 * n + i, phase=name, accepted=steps[name]) for n, name in enumerate(steps) for i in range(3)
    ]
    whole = Results(Benchmark.build(tables, source="test"), {"ours": run("ours", answers)})
    assert verdicts.measured(whole)["return_windows"].value == 4


def test_a_bar_without_its_arms_says_which_are_missing() -> None:
    whole = results()
    found = verdicts.measured(replace(whole, arms={"ours": whole.arms["ours"]}))
    assert found["worst_minute_static"].value is None
    assert found["day_0_speed_up"].detail == {"reason": "arms that did not run: fresh, none"}
    assert found["chat_al"].value == pytest.approx(2.0)


def test_a_recipe_that_never_gets_there_bounds_the_share() -> None:
    whole = results()
    never = {index: replace(one, accepted=(0,) * 50) for index, one in whole.arms["aurora"].answers.items()}
    arms = {**whole.arms, "aurora": replace(whole.arms["aurora"], answers=never)}
    found = verdicts.measured(replace(whole, arms=arms))["tokens_to_al_share"]
    assert found.value == pytest.approx(1.0)
    assert "did not reach AL 1.8" in found.detail["note"]


def test_the_first_domain_is_no_shift() -> None:
    assert [phase.name for phase in verdicts.shifted_phases(BENCHMARK.phases_of(BENCHMARK.arm[4]))] == ["chats"]


def test_the_same_request_lies_at_the_same_place_for_every_arm() -> None:
    ours = run("ours", [answer(0, tokens=100), answer(1, tokens=60, phase="chats")])
    none = run("none", [answer(1, tokens=80, phase="chats")])
    along = axis([ours, none])
    assert along.starts == {0: 0, 1: 100}
    assert along.phases == {"code": (0, 100), "chats": (100, 170)}
    assert course(none, along).at == [100]


def test_a_swap_lies_where_the_next_request_begins() -> None:
    swap = Swap(at_s=0.5, duration_s=0.2, version=1, previous=0, outcome="committed", trigger="activate")
    ours = run("ours", [answer(0, at_s=0.0), answer(1, at_s=1.0)], (swap,))
    assert course(ours, axis([ours])).swaps_at == [100]


def test_a_point_of_a_course_is_a_bin_of_requests() -> None:
    answers = [answer(index, at_s=float(index), accepted=[index % 2] * 10, took_s=2.0) for index in range(600)]
    found = course(run("ours", answers), axis([run("ours", answers)]))
    assert len(found.at) == 60
    assert found.acceptance_length == [1.5] * 60
    assert found.tokens_per_s == [50.0] * 60


def test_speed_ups_are_of_phases_that_both_did() -> None:
    whole = results(static=1.2)
    found = by_phase(whole.arms["static"], whole.arms["none"])
    assert {phase: estimate.value for phase, estimate in found.items()} == pytest.approx(dict.fromkeys(STREAM, 1.2))
