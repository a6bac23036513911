from __future__ import annotations

import math
import statistics

import pytest

from loadtest.client import StreamResult
from loadtest.exposition import acceptance, parse, total
from loadtest.statistics import Interval, changed, commit_gaps, gaps, halfway, paired_ratio, quantile_difference, quantile_ratio


def stream(times: list[float], *, sent: float = -1.0, name: str = "p", tokens: list[int] | None = None) -> StreamResult:
    return StreamResult(prompt_id=name, sent_at_s=sent, chunk_times_s=times, token_ids=tokens or [])


def steady(stall_s: float = 0.0) -> StreamResult:
    """A chunk every 0.1 s for 4 s, with one stall after 2 s."""
    return stream([0.1 * index + (stall_s if index > 20 else 0.0) for index in range(41)])


def test_the_wait_for_the_first_chunk_is_no_gap() -> None:
    assert [gap.length_s for gap in gaps(stream([5.0, 5.5, 7.0], sent=0.0))] == [0.5, 1.5]


COMMITS = [Interval(2.02, 2.06), Interval(3.22, 3.26)]
"""Inside the stall, and 1.2 s later; the control lies between them."""


def test_the_extra_gap_of_a_commit_is_its_stall() -> None:
    result = commit_gaps([steady(0.03), steady(0.03)], COMMITS)
    assert result.step_s == pytest.approx(0.1)
    assert result.control_s == pytest.approx(0.1)
    assert result.extra_s == pytest.approx([0.03, 0.0])


def test_a_commit_without_a_stall_has_no_extra_gap() -> None:
    assert commit_gaps([steady()], COMMITS).extra_s == pytest.approx([0.0, 0.0])


def test_unsteady_streams_are_not_charged_to_commits() -> None:
    times = [0.0]
    while times[-1] < 60.0:
        times.append(times[-1] + (0.05 if len(times) % 2 else 0.25))
    commits = [Interval(start, start + 0.05) for start in (1.0 + 0.55 * index for index in range(100))]
    result = commit_gaps([stream(times)], commits)
    assert statistics.median(result.extra_s) == pytest.approx(0.0, abs=1e-9)


def test_controls_lie_halfway_between_commits() -> None:
    (control,) = halfway(COMMITS)
    assert (control.start_s, control.end_s) == pytest.approx((2.62, 2.66))


def test_commits_beside_a_prefill_are_left_out_and_counted() -> None:
    newcomer = stream([2.5], sent=2.01, name="new")
    result = commit_gaps([steady(0.5), newcomer], COMMITS)
    assert (len(result.extra_s), result.num_beside_prefill) == (1, 1)


def test_a_commit_no_stream_saw_is_counted_apart() -> None:
    assert commit_gaps([steady()], [Interval(9.0, 9.1)]).num_unobserved == 1


def test_a_paired_ratio_has_a_standard_error() -> None:
    ratio = paired_ratio([98.0, 99.0, 100.0], [100.0, 100.0, 100.0])
    assert ratio.mean == pytest.approx(0.99)
    assert ratio.standard_error == pytest.approx(0.01 / math.sqrt(3))
    assert paired_ratio([1.0], [2.0]).standard_error == math.inf


def test_changed_answers_are_named() -> None:
    results = [stream([], name="a", tokens=[1, 2]), stream([], name="b", tokens=[1]), stream([], name="b", tokens=[1, 3])]
    assert changed(results, {"a": [1, 2], "b": [1, 3]}) == ["b"]


METRICS = """
# HELP paceline_verify_steps_total Verify steps with at least one proposal.
paceline_verify_steps_total{domain="heldout",draft_version="1",tenant="default"} 10.0
paceline_verify_steps_total{domain="heldout",draft_version="2",tenant="default"} 30.0
paceline_verify_steps_total{domain="default",draft_version="2",tenant="default"} 99.0
paceline_accepted_tokens_total{domain="heldout",draft_version="1",position="0",tenant="default"} 5.0
paceline_accepted_tokens_total{domain="heldout",draft_version="2",position="0",tenant="default"} 20.0
paceline_accepted_tokens_total{domain="heldout",draft_version="2",position="1",tenant="default"} 7.0
broken line
"""


def test_acceptance_of_a_domain_sums_versions_and_positions() -> None:
    assert acceptance(METRICS, domain="heldout").acceptance_length == pytest.approx(1 + 32 / 40)


def test_acceptance_between_two_readings_ignores_versions_that_left() -> None:
    earlier = """
paceline_verify_steps_total{domain="heldout",draft_version="0",tenant="default"} 500.0
paceline_verify_steps_total{domain="heldout",draft_version="1",tenant="default"} 10.0
paceline_accepted_tokens_total{domain="heldout",draft_version="1",position="0",tenant="default"} 5.0
"""
    between = acceptance(METRICS, domain="heldout") - acceptance(earlier, domain="heldout")
    assert between.acceptance_length == pytest.approx(1 + 27 / 30)


def test_acceptance_of_a_silent_domain_is_not_measured() -> None:
    assert acceptance(METRICS, domain="nowhere").acceptance_length is None


def test_labels_with_escapes_are_read() -> None:
    (sample,) = parse('m_total{a="x\\"y, z",b="2"} 1e3 1700000000')
    assert (sample.name, sample.labels, sample.value) == ("m_total", {"a": 'x\\"y, z', "b": "2"}, 1000.0)


def test_quantiles_are_compared_with_an_interval_that_covers_them() -> None:
    control = [float(value) for value in range(100)]
    treated = [value + 10 for value in control]
    difference = quantile_difference(treated, control, 0.5)
    assert difference.value == pytest.approx(10.0)
    assert difference.low < 10.0 < difference.high
    assert quantile_difference(treated, control, 0.5) == difference, "the same data give the same interval"
    ratio = quantile_ratio([2.0] * 50, [4.0] * 50, 0.99)
    assert (ratio.value, ratio.low, ratio.high) == (0.5, 0.5, 0.5)


def test_a_total_is_over_the_series_with_these_labels() -> None:
    page = 'm{engine="a",source="x"} 1\nm{engine="b",source="x"} 2\nm{engine="b",source="y"} 4\nmore 8'
    assert total(page, "m") == 7
    assert total(page, "m", source="x") == 3
    assert total(page, "m", source="z") is None
