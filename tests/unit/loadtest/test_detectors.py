from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from written_run import STEADY, request, sample, write_run

from loadtest.detectors.domain_shift import Recovery, recoveries, shifts
from loadtest.detectors.losslessness import Answer, agree, greedy, losslessness
from loadtest.detectors.regression import independent, regression, verdict, widened, worse
from loadtest.detectors.swap_blip import MARGIN_S, swap_blip
from loadtest.measures.headline import MEASURES
from loadtest.measures.timeline import Window, read_timeline
from loadtest.records import RequestRecord, Swap
from loadtest.report.analysis import analyse
from loadtest.scenario import SHIPPED, Scenario
from loadtest.statistics import Estimate, Interval

SPAN = Interval(0.0, 200.0)
(TTFT,) = (measure for measure in MEASURES if measure.name == "ttft_p50")
(FAILED,) = (measure for measure in MEASURES if measure.name == "failed_share")


def swap(at_s: float, outcome: str = "committed") -> Swap:
    return Swap(at_s=at_s, version=2, previous=1, outcome=outcome, trigger="activate")


def streams(stalls_at_s: list[float], *, stall_s: float, until_s: float = 190.0) -> list[RequestRecord]:
    """One stream of 2 s after the other on two tracks, a chunk every 0.1 s, and a stall at each of these instants."""
    found = []
    for index in range(int(until_s)):
        start = float(index)
        gaps, now = [], start + 0.5
        for _ in range(15):
            gap = 0.1 + sum(stall_s for stall in stalls_at_s if now <= stall < now + 0.1)
            gaps.append(gap)
            now += gap
        found.append(request(index, at_s=start, ttft_s=0.5, gaps_s=gaps))
    return found


@pytest.mark.parametrize("times_s", [[25.05 + 30 * index for index in range(6)], [40.05, 80.05, 120.05, 160.05]])
def test_a_stall_at_every_swap_is_a_blip(times_s: list[float]) -> None:
    found = swap_blip(streams(times_s, stall_s=0.3), [swap(at_s) for at_s in times_s], SPAN)
    assert found is not None
    assert found.verdict == "worse"
    assert found.unit == ("window" if len(times_s) >= 5 else "request")
    assert found.longest_gap_p99_ms is not None
    assert found.longest_gap_p99_ms.value == pytest.approx(300.0, rel=0.01)
    assert found.largest_gap_ms == pytest.approx((400.0, 100.0))
    assert [effect.largest_gap_ms for effect in found.swaps] == pytest.approx([400.0] * len(times_s))


def test_stalls_that_come_with_and_without_swaps_are_not_charged_to_swaps() -> None:
    stalls = [float(second) + 0.05 for second in range(1, 190, 2)]
    found = swap_blip(streams(stalls, stall_s=0.3), [swap(25.0 + 30 * index) for index in range(6)], SPAN)
    assert found is not None
    assert found.verdict == "no blip"
    assert found.largest_gap_ms == pytest.approx((400.0, 400.0))


def test_slow_first_tokens_beside_swaps_are_a_blip() -> None:
    times_s = [25.0 + 30 * index for index in range(6)]
    near = {int(at_s) for at_s in times_s}
    records = [request(index, at_s=index + 0.1, ttft_s=0.9 if index in near else 0.3 + index % 3 / 100) for index in range(190)]
    found = swap_blip(records, [swap(at_s) for at_s in times_s], SPAN)
    assert found is not None
    assert found.ttft_p99_ms is not None
    assert found.ttft_p99_ms.value == pytest.approx(580.0, rel=0.01)
    assert found.verdict == "worse"


def test_failures_beside_swaps_are_a_blip() -> None:
    times_s = [20.5, 60.5, 100.5, 140.5, 180.5]
    records = [
        request(index, at_s=index / 4, outcome="failed" if any(abs(index / 4 - at_s) < 1 for at_s in times_s) else "ok")
        for index in range(4 * 199)
    ]
    found = swap_blip(records, [swap(at_s) for at_s in times_s], SPAN)
    assert found is not None
    assert found.failed_share is not None
    assert found.failed_share.low > 0.2
    assert found.verdict == "worse"


def test_only_committed_swaps_within_the_span_count() -> None:
    assert swap_blip([], [swap(10.0, "refused"), swap(300.0)], SPAN) is None


def test_the_window_of_a_swap_lies_around_its_commit_and_holds_its_loading() -> None:
    slow_swap = Swap(at_s=40.0, duration_s=3.0, version=2, previous=1, outcome="committed", trigger="activate")
    found = swap_blip([request(0, at_s=47.9), request(1, at_s=48.1), request(2, at_s=30.0, gaps_s=[8.0])], [slow_swap], SPAN)
    assert found is not None
    assert found.half_width_s == MARGIN_S + 3.0
    assert found.swaps[0].num_requests == 2, "43 s less and more 5 s"


def test_controls_beside_another_swap_are_left_out() -> None:
    found = swap_blip(streams([], stall_s=0.0), [swap(50.0), swap(50.0 + 3 * MARGIN_S)], SPAN)
    assert found is not None
    assert (found.num_controls, found.num_without_control) == (6 + 17, 1), "evenly before and after, none between"


@pytest.mark.parametrize(("stall_s", "expected"), [(0.0, "no blip"), (0.3, "worse")])
def test_the_storm_that_is_shipped_is_judged_by_the_calm_around_it(stall_s: float, expected: str) -> None:
    storm = Scenario.read(SHIPPED / "swap_storm.toml", [])
    (action,) = storm.action
    assert action.every_s
    assert action.until_s
    times_s = np.arange(action.at_s, action.until_s, action.every_s).tolist()
    assert len(times_s) % 2 == 0, "the draft that was active is so again in the end"
    span = Interval(storm.cut.warm_up_s, storm.duration_s - storm.cut.cool_down_s)
    records = streams([at_s + 0.15 for at_s in times_s], stall_s=stall_s, until_s=storm.duration_s)
    swaps = [
        Swap(at_s=at_s, duration_s=0.1, version=2, previous=1, outcome="committed", trigger="activate") for at_s in times_s
    ]
    found = swap_blip(records, swaps, span)
    assert found is not None
    assert (found.verdict, found.unit, len(found.swaps)) == (expected, "window", len(times_s))
    assert found.num_controls >= 10


def test_a_swap_with_too_few_requests_is_undecided() -> None:
    found = swap_blip([request(0, at_s=49.0)], [swap(50.0)], SPAN)
    assert found is not None
    assert (found.verdict, found.ttft_p99_ms, found.swaps[0].num_requests) == ("undecided", None, 1)


def greedy_run(texts: dict[str, str], **other: str) -> list[RequestRecord]:
    return [
        request(index, at_s=float(index), prompt_id=name, text=text, **other)
        for index, (name, text) in enumerate(texts.items())
    ]


def test_equal_greedy_texts_are_lossless() -> None:
    found = losslessness(greedy_run({"a": "one", "b": "two"}), greedy_run({"b": "two", "a": "one"}))
    assert (found.verdict, found.num_compared, found.num_different) == ("equal", 2, 0)


def test_a_text_that_differs_is_named_with_the_place() -> None:
    found = losslessness(greedy_run({"a": "one two"}), greedy_run({"a": "one too", "new": "x"}))
    assert (found.verdict, found.num_different, found.num_without_reference) == ("differs", 1, 1)
    (difference,) = found.differences
    assert (difference.prompt_id, difference.first_character, difference.reference, difference.found) == (
        "a",
        5,
        "one two",
        "one too",
    )


def test_turns_are_compared_apart() -> None:
    first, second = (request(turn, at_s=0.0, prompt_id="a", turn=turn, text=str(turn)) for turn in (0, 1))
    assert losslessness([first, second], [second]).num_different == 0


def test_a_prompt_that_the_reference_answers_in_two_ways_proves_nothing() -> None:
    reference = [*greedy_run({"a": "one"}), *greedy_run({"a": "two"})]
    found = losslessness(reference, greedy_run({"a": "three"}))
    assert (found.verdict, found.num_unstable, found.num_compared) == ("undecided", 1, 0)


def test_an_answer_that_was_cut_is_compared_as_far_as_it_goes() -> None:
    assert agree(Answer("one", is_cut=True), Answer("one two", is_cut=False))
    assert agree(Answer("one two", is_cut=False), Answer("one", is_cut=True))
    assert not agree(Answer("one", is_cut=False), Answer("one two", is_cut=False))
    assert not agree(Answer("ons", is_cut=True), Answer("one two", is_cut=False))


def test_only_whole_greedy_answers_are_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path, [], scenario=STEADY.replace('name = "users"', 'name = "users"\ntemperature = 0.7'))
    assert not list(greedy(greedy_run({"a": "one"}), Scenario.read(run / "scenario.toml", [])))
    plain = write_run(tmp_path, [])
    whole, failed = greedy_run({"a": "one"})[0], request(1, at_s=0.0, outcome="failed")
    assert list(greedy([whole, failed], Scenario.read(plain / "scenario.toml", []))) == [whole]


PHASE = """
[[lane.phase]]
name = "{name}"
duration_s = {duration_s}
arrivals = {{ kind = "poisson", rate_per_s = 1.0 }}
traffic = {{ {source} = 1.0 }}
{more}
"""


def phases(tmp_path: Path, *rows: tuple[str, float, str]) -> Scenario:
    text = 'name = "shifts"\nwhat = "."\n[[lane]]\nname = "users"\n'
    for number, (source, duration_s, more) in enumerate(rows):
        text += PHASE.format(name=str(number), duration_s=duration_s, source=source, more=more)
    (tmp_path / "s.toml").write_text(text)
    return Scenario.read(tmp_path / "s.toml", [])


def test_every_change_of_traffic_is_a_shift(tmp_path: Path) -> None:
    scenario = phases(
        tmp_path, ("code", 60.0, ""), ("code", 40.0, ""), ("chat", 100.0, ""), ("chat", 50.0, "end_traffic = { code = 3.0 }"),
        ("code", 50.0, ""),
    )  # fmt: skip
    sudden, gradual = shifts(scenario)
    assert (sudden.at_s, sudden.ends_at_s, sudden.before, sudden.after) == (100.0, 100.0, "code", "chat")
    assert (sudden.previous_start_s, sudden.next_at_s) == (0.0, 200.0)
    assert (gradual.at_s, gradual.ends_at_s, gradual.after) == (200.0, 250.0, "code")
    assert (gradual.previous_start_s, gradual.next_at_s) == (100.0, 300.0)


def test_the_same_mix_by_other_weights_is_no_shift(tmp_path: Path) -> None:
    assert shifts(phases(tmp_path, ("code", 10.0, ""), ("code", 10.0, "end_traffic = { code = 7.0 }"))) == []


def al_windows(lengths: list[float], window_s: float = 5.0) -> list[Window]:
    """Windows of 100 verify steps each with these acceptance lengths."""
    counts = np.cumsum([100 * (length - 1) for length in lengths])
    samples = [
        sample(window_s * (index + 0.9), steps=100.0 * (index + 1), accepted=[count]) for index, count in enumerate(counts)
    ]
    return read_timeline([sample(0.0), *samples], window_s).windows


def recovery_of(tmp_path: Path, before: list[float], after: list[float]) -> Recovery:
    scenario = phases(tmp_path, ("code", 5.0 * len(before), ""), ("chat", 5.0 * len(after), ""))
    (found,) = recoveries(al_windows(before + after), scenario)
    return found


def test_depth_and_recovery_of_a_shift(tmp_path: Path) -> None:
    found = recovery_of(tmp_path, [2.0] * 9, [1.2, 1.2, 1.2, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8])
    assert (found.before, found.plateau) == pytest.approx((2.0, 1.8))
    assert found.lowest == pytest.approx(1.2)
    assert found.dip_share == pytest.approx(0.4)
    assert found.recovered_after_s == 30.0, "AL over three windows is 1.8 at the end of the sixth"


def test_recovery_counts_from_the_lowest_point_on(tmp_path: Path) -> None:
    found = recovery_of(tmp_path, [2.0] * 9, [2.0, 1.2, 1.2, 1.2, 1.2, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8])
    assert found.recovered_after_s == 40.0, "the draft did well for a window, before the traffic had changed"


def test_a_shift_that_nothing_notices_needs_no_recovery(tmp_path: Path) -> None:
    found = recovery_of(tmp_path, [2.0] * 9, [2.0] * 9)
    assert (found.dip_share, found.recovered_after_s) == (pytest.approx(0.0), 0.0)


def test_a_shift_upwards_has_no_dip(tmp_path: Path) -> None:
    found = recovery_of(tmp_path, [1.5] * 9, [1.6] * 3 + [2.0] * 9)
    assert found.dip_share is not None
    assert found.dip_share < 0
    assert found.recovered_after_s == 30.0, "the smoothed curve passes 1.9 at the end of the sixth window: 2.0"


def test_a_change_that_begins_with_the_run_has_no_before(tmp_path: Path) -> None:
    scenario = phases(tmp_path, ("code", 30.0, "end_traffic = { chat = 1.0 }"), ("chat", 30.0, ""))
    (found,) = recoveries(al_windows([1.2] * 6 + [2.0] * 6), scenario)
    assert (found.before, found.dip_share) == (None, None)
    assert (found.lowest, found.plateau) == pytest.approx((1.2, 2.0))
    assert found.recovered_after_s == 45.0


def test_a_shift_without_verify_steps_cannot_be_judged(tmp_path: Path) -> None:
    scenario = phases(tmp_path, ("code", 50.0, ""), ("chat", 50.0, ""))
    (found,) = recoveries([], scenario)
    assert (found.before, found.lowest, found.recovered_after_s) == (None, None, None)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Estimate(1.2, 1.1, 1.3), "worse"),
        (Estimate(0.8, 0.7, 0.9), "better"),
        (Estimate(1.2, 0.9, 1.5), "undecided"),
        (Estimate(1.005, 1.004, 1.006), "undecided"),
        (Estimate(float("nan"), float("nan"), float("nan")), "undecided"),
    ],
)
def test_a_latency_is_worse_if_its_whole_interval_is_longer(change: Estimate, expected: str) -> None:
    assert verdict(TTFT, change) == expected


def test_shares_are_subtracted_because_they_may_be_zero() -> None:
    found = independent(FAILED, Estimate(0.0, 0.0, 0.01), Estimate(0.1, 0.08, 0.12), 0.95)
    assert found.change.value == pytest.approx(0.1)
    assert found.change.low == pytest.approx(0.1 - np.hypot(0.02, 0.01))
    assert found.verdict == "worse"


def test_ratios_are_compared_by_their_logarithms() -> None:
    found = independent(TTFT, Estimate(100.0, 90.0, 110.0), Estimate(200.0, 190.0, 210.0), 0.95)
    below = np.hypot(np.log(200 / 190), np.log(110 / 100))
    assert found.change.value == pytest.approx(2.0)
    assert found.change.low == pytest.approx(2.0 / np.exp(below))
    assert found.verdict == "worse"


def test_an_interval_is_widened_on_both_sides() -> None:
    found = widened(Estimate(10.0, 8.0, 13.0), 0.99)
    assert (found.low, found.high) == pytest.approx((10 - 2 * 2.5758 / 1.95996, 10 + 3 * 2.5758 / 1.95996), rel=1e-4)


def test_more_measures_need_wider_intervals() -> None:
    before, after = Estimate(100.0, 95.0, 105.0), Estimate(108.0, 103.0, 113.0)
    assert regression({"ttft_p50": before}, {"ttft_p50": after})[0].verdict == "worse"
    names = [measure.name for measure in MEASURES]
    every = regression(dict.fromkeys(names, before), dict.fromkeys(names, after))
    assert len(every) == len(MEASURES)
    assert next(row.verdict for row in every if row.measure.name == "ttft_p50") == "undecided"


def test_measures_that_only_one_run_has_are_left_out() -> None:
    assert regression({"ttft_p50": Estimate(1.0, 1.0, 1.0)}, {"ttft_p99": Estimate(1.0, 1.0, 1.0)}) == []


def test_two_runs_of_one_system_are_rarely_told_apart(tmp_path: Path) -> None:
    def measured(seed: int) -> dict[str, Estimate]:
        rng = np.random.default_rng(seed)
        records = [
            request(i, at_s=i / 2, ttft_s=float(rng.gamma(4, 0.05)), gaps_s=rng.normal(0.05, 0.01, 8).clip(0.001).tolist())
            for i in range(200)
        ]
        return dict(analyse(write_run(tmp_path / str(seed), records)).headline)

    runs = [measured(seed) for seed in range(6)]
    false_alarms = [worse(regression(one, other)) for one, other in pairwise(runs)]
    assert sum(map(bool, false_alarms)) <= 1


def test_every_request_is_counted_in_just_the_windows_it_was_open_in() -> None:
    rng = np.random.default_rng(0)
    records = [
        request(index, at_s=float(at_s), gaps_s=[float(gap_s)])
        for index, (at_s, gap_s) in enumerate(zip(rng.uniform(0, 195, 300), rng.uniform(0, 30, 300), strict=True))
    ]
    times_s = [float(at_s) for at_s in rng.uniform(5, 190, 12)]
    found = swap_blip(records, [swap(at_s) for at_s in sorted(times_s)], SPAN)
    assert found is not None
    for effect in found.swaps:
        start_s, end_s = effect.at_s - MARGIN_S, effect.at_s + MARGIN_S
        slow = sum(record.intended_at_s < end_s and start_s < record.ended_at_s for record in records)
        assert effect.num_requests == slow
