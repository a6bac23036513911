from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from msgspec.structs import replace
from written_run import ENDED, STEADY, request, sample, write_run

from loadtest.measures import bootstrap, definitions
from loadtest.measures.arrivals import Arrivals, between, throughput
from loadtest.measures.histogram import BlockHistogram, bin_of, middle_of
from loadtest.measures.run_directory import RunDirectory, RunDirectoryError
from loadtest.measures.summary import Distribution, distribution
from loadtest.measures.table import RequestTable
from loadtest.measures.timeline import Verified, VerifiedRequests, read_timeline, take_verified, window_length_s
from loadtest.records import EngineSample, RequestRecord, Swap
from loadtest.report.analysis import analyse
from loadtest.report.result import result
from loadtest.scenario import Slo
from loadtest.statistics import Estimate, Interval


def test_latencies_count_from_the_intended_send_time() -> None:
    late = request(0, at_s=10.0, ttft_s=0.5, gaps_s=[0.2, 0.4], per_chunk=2, sent_at_s=10.3)
    assert definitions.ttft_s(late) == pytest.approx(0.5)
    assert definitions.e2e_s(late) == pytest.approx(1.1)
    assert definitions.tpot_s(late) == pytest.approx(0.6 / 5), "6 tokens, 5 of them after the first"
    assert definitions.itls_s(late) == pytest.approx([0.2, 0.4])
    assert definitions.tokens_per_chunk(late) == 2.0


def test_what_a_request_does_not_have_is_none() -> None:
    silent = request(0, at_s=0.0, chunk_times_s=[], chunk_token_counts=[], num_completion_tokens=0, ended_at_s=1.0)
    assert (definitions.ttft_s(silent), definitions.tpot_s(silent), definitions.tokens_per_chunk(silent)) == (None, None, None)
    assert definitions.tpot_s(request(0, at_s=0.0, gaps_s=[])) is None, "one token has no time per further token"
    assert definitions.acceptance_length(silent) is None


def test_al_of_a_request_is_one_and_the_mean_of_what_was_accepted() -> None:
    assert definitions.acceptance_length(request(0, at_s=0.0, accepted_per_step=[2, 0, 1])) == 2.0


@pytest.mark.parametrize(
    ("slo", "is_good"),
    [
        (Slo(), True),
        (Slo(ttft_ms=500, tpot_ms=100, e2e_ms=700), True),
        (Slo(ttft_ms=499), False),
        (Slo(tpot_ms=99), False),
        (Slo(e2e_ms=699), False),
    ],
)
def test_goodput_counts_requests_within_every_objective(slo: Slo, is_good: bool) -> None:
    whole = request(0, at_s=0.0, ttft_s=0.5, gaps_s=[0.1, 0.1])
    assert definitions.is_good(whole, slo) is is_good
    assert not definitions.is_good(request(0, at_s=0.0, outcome="failed"), slo)


def test_chunks_are_scaled_to_what_the_server_counted() -> None:
    assert definitions.tokens_by_chunk(request(0, at_s=0.0, num_completion_tokens=6)) == [2.0, 2.0, 2.0]
    assert definitions.tokens_by_chunk(request(0, at_s=0.0, num_completion_tokens=None)) == [1, 1, 1]


def test_a_bin_is_never_wider_than_a_thousandth_of_its_values() -> None:
    seconds = np.concatenate([np.geomspace(1e-3, 1e4, 20_000), [0.0, 1e-6, 2.047e-3, 2.048e-3]])
    found = middle_of(bin_of(seconds))
    assert np.all(np.abs(found - seconds) <= seconds / 2048 + 0.5e-6)
    assert list(middle_of(bin_of(np.asarray([0.0, 1e-6, 1.234e-3, -5.0])))) == pytest.approx([0.0, 1e-6, 1.234e-3, 0.0])
    assert np.all(np.diff(bin_of(np.geomspace(1e-6, 1e4, 5000))) >= 0), "larger values lie in later bins"


@pytest.mark.parametrize("number", [1, 2, 7, 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 0.99, 1.0])
def test_quantiles_of_a_histogram_are_those_of_numpy(number: int, share: float) -> None:
    seconds = np.random.default_rng(number).lognormal(-2.0, 1.0, number)
    histogram = BlockHistogram(seconds, np.zeros(number, dtype=np.int64), 1)
    assert histogram.quantile(share) == pytest.approx(float(np.quantile(seconds, share)), rel=1 / 2048, abs=1e-6)


def test_resampled_quantiles_are_those_of_the_blocks_drawn_again() -> None:
    rng = np.random.default_rng(1)
    seconds, blocks = rng.lognormal(-2.0, 1.0, 500), rng.integers(6, size=500)
    weights = rng.multinomial(6, np.full(6, 1 / 6), size=20).astype(float)
    fast = BlockHistogram(seconds, blocks, 6).resampled(weights, [0.5, 0.99])
    slow = [
        [np.quantile(np.concatenate([np.repeat(seconds[blocks == block], int(times)) for block, times in enumerate(row)]), share)
         for row in weights]
        for share in (0.5, 0.99)
    ]  # fmt: skip
    assert fast == pytest.approx(np.asarray(slow), rel=1 / 1024)


def test_an_empty_resample_says_nothing() -> None:
    histogram = BlockHistogram(np.asarray([1.0]), np.asarray([0]), 2)
    (row,) = histogram.resampled(np.asarray([[0.0, 2.0], [1.0, 1.0]]), [0.5])
    assert math.isnan(row[0])
    assert row[1] == pytest.approx(1.0, rel=1 / 2048)
    estimate = bootstrap.around(float(row[1]), row, 2)
    assert (estimate.low, estimate.high) == pytest.approx((1.0, 1.0), rel=1 / 2048)


def test_a_run_is_divided_into_twenty_blocks() -> None:
    blocks = bootstrap.divide(10.0, 20.0)
    assert (blocks.number, blocks.length_s) == (20, 0.5)
    assert list(blocks.of(np.asarray([9.0, 10.0, 10.6, 19.99, 25.0]))) == [0, 0, 1, 19, 19]
    assert set(blocks.weights.sum(axis=1)) == {20.0}, "a resample has as many blocks as the run"


def test_intervals_cover_the_truth_where_requests_are_slow_together() -> None:
    def run(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """600 latencies over 300 s whose common factor forgets itself in 3 s."""
        times_s = np.sort(rng.uniform(0, 300, 600))
        load = np.zeros(600)
        for step in range(1, 600):
            load[step] = np.exp(-0.5 / 3) * load[step - 1] + np.sqrt(1 - np.exp(-1 / 3)) * rng.normal()
        return times_s, np.exp(0.3 * load[(times_s * 2).astype(int)]) * rng.lognormal(0, 0.3, 600)

    def covers(found: Distribution) -> list[bool]:
        """Whether the intervals of mean, median and p99 hold the true ones, ms."""
        estimates = [found.mean, found.percentiles["p50"], found.percentiles["p99"]]
        return [estimate.low <= value <= estimate.high for estimate, value in zip(estimates, truth, strict=True)]

    variance = 2 * 0.3**2
    truth = [1e3 * math.exp(variance / 2), 1e3, 1e3 * math.exp(NormalDist().inv_cdf(0.99) * variance**0.5)]
    one_by_one, blocks = bootstrap.equal(600), bootstrap.divide(0.0, 300.0)
    in_blocks, alone = [], []
    for seed in range(100):
        times_s, values = run(np.random.default_rng(seed))
        in_blocks.append(covers(distribution(values, blocks.of(times_s), blocks)))
        alone.append(covers(distribution(values, np.arange(600), one_by_one)))
    assert np.sum(in_blocks, axis=0).tolist() == pytest.approx([91, 90, 87], abs=3)
    assert np.sum(alone, axis=0)[1] == pytest.approx(59, abs=5), "what a bootstrap over requests would have made of it"


def test_a_ratio_is_sum_over_sum_with_an_interval_around_it() -> None:
    blocks = bootstrap.equal(50)
    numerators = np.random.default_rng(0).normal(10.0, 1.0, 50)
    found = bootstrap.ratio(blocks, numerators, np.full(50, 5.0))
    assert found.value == pytest.approx(numerators.sum() / 250)
    half_width = 2.0096 * numerators.std(ddof=1) / math.sqrt(50) / 5  # Student's t for 49 degrees of freedom
    assert (found.low, found.high) == pytest.approx((found.value - half_width, found.value + half_width), rel=0.01)
    assert math.isnan(bootstrap.ratio(blocks, numerators, np.zeros(50)).value)


def test_intervals_of_few_units_are_widened_as_student_has_it() -> None:
    normal = np.random.default_rng(0).normal(size=200_000)
    five, many = bootstrap.around(0.0, normal, 5), bootstrap.around(0.0, normal, 10_000)
    assert (many.low, many.high) == pytest.approx((-1.96, 1.96), rel=0.02)
    assert five.high / many.high == pytest.approx(2.776 / 1.96 * math.sqrt(5 / 4), rel=0.01)
    assert five.low / many.low == pytest.approx(2.776 / 1.96 * math.sqrt(5 / 4), rel=0.01)
    assert math.isnan(bootstrap.around(0.0, normal, 1).low), "one unit does not tell how units differ"


def test_the_interval_of_blocks_is_wider_where_requests_are_slow_together() -> None:
    slow_blocks = np.repeat(np.random.default_rng(0).normal(1.0, 0.3, 20), 50)
    block_of = np.repeat(np.arange(20), 50)
    clustered = bootstrap.mean(bootstrap.equal(20), slow_blocks, block_of)
    one_by_one = bootstrap.mean(bootstrap.equal(1000), slow_blocks, np.arange(1000))
    assert clustered.value == pytest.approx(one_by_one.value)
    assert clustered.high - clustered.low > 5 * (one_by_one.high - one_by_one.low)


def test_no_failure_in_a_few_tries_is_not_yet_no_failure() -> None:
    found = bootstrap.share(bootstrap.equal(4), np.zeros(4), np.full(4, 5.0))
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(0.1611, abs=1e-3), "Wilson, 0 of 20"


def test_a_share_lies_between_nothing_and_all() -> None:
    """Clustered failures: what the blocks tell by themselves reaches beyond both."""
    hits = np.asarray([5.0, 0.0, 0.0, 0.0])
    found = bootstrap.share(bootstrap.equal(4), hits, np.full(4, 5.0))
    assert (found.value, found.low) == (0.25, 0.0)
    assert bootstrap.share(bootstrap.equal(4), 5.0 - hits, np.full(4, 5.0)).high == 1.0


def test_the_difference_of_two_estimates_has_the_interval_of_both() -> None:
    found = bootstrap.difference(Estimate(5.0, 4.0, 8.0), Estimate(3.0, 1.0, 3.5))
    assert found.value == 2.0
    assert found.low == pytest.approx(2.0 - math.hypot(1.0, 0.5))
    assert found.high == pytest.approx(2.0 + math.hypot(3.0, 2.0))


def test_what_arrives_in_the_span_counts_whenever_it_was_asked_for() -> None:
    arrivals = Arrivals()
    arrivals.note(request(0, at_s=8.0, ttft_s=1.5, gaps_s=[1.0, 1.0], per_chunk=3))
    assert list(arrivals.tokens_by_second()) == [0.0] * 9 + [3.0, 3.0, 3.0]
    assert list(arrivals.answers_by_second()) == [0.0] * 11 + [1.0]
    assert list(arrivals.in_flight_by_second()) == [0.0] * 8 + [1.0] * 4
    tokens = arrivals.tokens_by_second()
    assert list(between(tokens, np.asarray([0.0, 9.5, 10.5, 11.5]), 11.5)) == [1.5, 3.0, 4.5]
    assert list(between(tokens, np.asarray([11.0, 11.25, 11.5, 99.0]), 11.5)) == [1.5, 1.5, 0.0], "the run ends in that second"
    assert list(between(tokens, np.asarray([10.0, 12.0]), 11.0)) == [6.0], "at its very end too"


def test_steady_throughput_has_a_narrow_interval_whatever_the_length_of_blocks() -> None:
    arrivals = Arrivals()
    for index in range(100):
        arrivals.note(request(index, at_s=index / 2, ttft_s=0.1, gaps_s=[0.1] * 3))
    found = throughput(arrivals, Interval(0.0, 50.0), np.arange(100) / 2, bootstrap.divide(0.0, 50.0))
    assert found.tokens_per_s.value == pytest.approx(8.0)
    assert found.tokens_per_s.high - found.tokens_per_s.low < 0.1
    assert found.good_requests_per_s.value == pytest.approx(2.0)


def test_a_table_holds_the_columns_and_the_gaps_of_the_chosen() -> None:
    table = RequestTable([request(0, at_s=0.0, gaps_s=[0.25, 0.5]), request(1, at_s=1.0, gaps_s=[], lane="rollouts")], Slo())
    assert list(table["num_tokens"]) == [3.0, 1.0]
    assert math.isnan(table["tpot_s"][1])
    masks = dict(table.groups["lane"].masks())
    assert list(masks["rollouts"]) == [False, True]
    gaps, rows = table.gaps(masks["users"])
    assert (list(gaps), list(rows)) == ([0.25, 0.5], [0, 0])
    assert len(table.gaps(masks["rollouts"])[0]) == 0


def test_windows_hold_what_counters_grew_by() -> None:
    timeline = read_timeline(
        [
            sample(0.0, steps=100, accepted=[50]),
            sample(1.0, steps=110, accepted=[56, 2], completion_tokens=30.0, cpu_s={"engine": 5.0}),
            sample(3.5, steps=120, accepted=[60, 3], completion_tokens=50.0, cpu_s={"engine": 6.5}),
        ],
        2.0,
    )
    first, second = timeline.windows
    assert first.of_domain("sharegpt") == Verified(10.0, [6.0, 2.0])
    assert first.of_domain(None).acceptance_length == 1.8
    assert second.of_domain(None) == Verified(10.0, [4.0, 1.0])
    assert (first.completion_tokens, second.completion_tokens) == (30.0, 20.0)
    assert (first.cpu_s["engine"], second.cpu_s["engine"]) == (0.0, 1.5)


def test_a_counter_that_starts_anew_counts_from_zero() -> None:
    timeline = read_timeline([sample(0.0, steps=100, accepted=[50]), sample(1.0, steps=4, accepted=[3])], 1.0)
    assert timeline.windows[0].of_domain(None) == Verified(4.0, [3.0])


def test_window_lengths_are_round_and_few() -> None:
    assert [window_length_s(seconds) for seconds in (20.0, 120.0, 121.0, 600.0, 3600.0)] == [1.0, 1.0, 2.0, 5.0, 30.0]


def slow_verify_times_s(record: RequestRecord) -> list[float]:
    """Token by token, of an answer whose steps are all told and whose chunks tell how many tokens they bring."""
    time_of = [
        time_s
        for time_s, count in zip(record.chunk_times_s, record.chunk_token_counts, strict=True)
        for _ in range(count)
    ]  # fmt: skip
    number, times_s = 1, []  # the prefill brings the first token
    for accepted in record.accepted_per_step or []:
        number += accepted + 1
        times_s.append(time_of[min(number, len(time_of)) - 1])
    return times_s


@pytest.mark.parametrize("seed", range(20))
def test_a_verify_step_ends_when_its_last_token_comes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    accepted = rng.integers(0, 4, 30).tolist()
    tokens = 1 + sum(accepted) + len(accepted)
    counts: list[int] = []
    while sum(counts) < tokens:
        counts.append(min(int(rng.integers(1, 6)), tokens - sum(counts)))
    if seed % 2:  # the answer ended within the last step
        counts[-1] -= 1
        counts = [count for count in counts if count]
    record = request(
        0, at_s=0.0, gaps_s=rng.uniform(0.01, 0.2, len(counts) - 1).tolist(), accepted_per_step=accepted,
        chunk_token_counts=counts, num_completion_tokens=sum(counts),
    )  # fmt: skip
    assert definitions.verify_times_s(record).tolist() == slow_verify_times_s(record)


def test_steps_that_are_told_are_spread_over_an_answer_that_had_others_too() -> None:
    half = request(0, at_s=0.0, ttft_s=1.0, gaps_s=[1.0] * 8, accepted_per_step=[0, 0, 0, 0])
    assert definitions.verify_times_s(half).tolist() == [3.0, 5.0, 7.0, 9.0]


def test_steps_of_a_request_belong_to_the_windows_in_which_they_were_verified() -> None:
    verified = VerifiedRequests(1.0)
    told = request(
        0, at_s=0.0, ttft_s=0.5, gaps_s=[1.0, 1.0], chunk_token_counts=[1, 4, 3], num_completion_tokens=8,
        accepted_per_step=[2, 0, 1, 0], drafted_per_step=[3, 3, 2, 3], num_spec_tokens=3,
    )  # fmt: skip
    list(verified.watch([told]))
    first, second, third = (window.of_domain(None) for window in verified.timeline.windows)
    assert first == Verified(), "the prefill's token is no verify step's"
    assert second == Verified(2.0, [1.0, 1.0, 0.0], 6.0), "a position at which nothing was accepted is one all the same"
    assert third == Verified(2.0, [1.0, 0.0, 0.0], 5.0)


def test_requests_tell_al_where_counters_do_not_know_the_domains() -> None:
    verified = VerifiedRequests(1.0)
    told = [
        request(0, at_s=0.0, domain="code", accepted_per_step=[2, 0], draft_version="4", per_chunk=2),
        request(1, at_s=2.0, domain="chat", accepted_per_step=[1], draft_version="4"),
    ]
    assert len(list(verified.watch(told))) == 2
    counters = read_timeline([sample(0.0, domain="default"), sample(1.0, domain="default", steps=9, accepted=[1])], 1.0)
    assert take_verified(counters, verified.timeline) == "requests"
    assert counters.domains == ["chat", "code"]
    assert counters.windows[0].of_domain("code") == Verified(2.0, [1.0, 1.0])
    assert counters.windows[2].of_domain("chat").acceptance_length == 2.0


def test_counters_are_believed_where_they_know_the_domains() -> None:
    counters = read_timeline([sample(0.0), sample(1.0, steps=9, accepted=[1])], 1.0)
    assert take_verified(counters, VerifiedRequests(1.0).timeline) == "counters"
    assert take_verified(read_timeline([], 1.0), VerifiedRequests(1.0).timeline) == "nothing"


def test_both_sources_of_al_are_told_with_their_difference(tmp_path: Path) -> None:
    """Counters know other clients' steps too, and those of answers that broke off."""
    told = [request(index, at_s=float(index), accepted_per_step=[1, 1], num_spec_tokens=2) for index in range(10)]
    counted = [sample(float(second), steps=4.0 * second, accepted=[2.0 * second, 1.0 * second]) for second in range(11)]
    both = analyse(write_run(tmp_path / "both", told, counted))
    assert both.acceptance_source == "counters"
    assert both.acceptance_by_source["requests"].by_position == [1.0, 0.0]
    assert both.acceptance_by_source["counters"].by_position == pytest.approx([0.5, 0.25])
    assert both.acceptance_length_difference == pytest.approx(2.0 - 1.75)
    ours = result(both)["paceline"]["acceptance"]
    assert ours["requests_less_counters"] == pytest.approx(0.25)
    assert ours["by_source"]["requests"]["acceptance_length"]["value"] == pytest.approx(2.0)
    alone = analyse(write_run(tmp_path / "alone", told))
    assert (alone.acceptance_source, list(alone.acceptance_by_source)) == ("requests", ["requests"])
    assert alone.acceptance_length_difference is None


def test_files_that_lack_proposals_and_gpus_are_read_all_the_same(tmp_path: Path) -> None:
    told = [request(index, at_s=float(index), accepted_per_step=[1, 1]) for index in range(10)]
    counted = [sample(float(second), steps=4.0 * second, accepted=[2.0 * second]) for second in range(11)]
    path = write_run(tmp_path, told, counted)
    later = {"proposed", "gpu_s", "drafted_per_step", "num_spec_tokens"}
    for name in ("requests.jsonl", "timeline.jsonl"):
        rows = [json.loads(line) for line in (path / name).read_text().splitlines()]
        assert later & set(rows[0])
        kept = [{key: value for key, value in row.items() if key not in later} for row in rows]
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in kept))
    found = analyse(path)
    assert not found.run.num_unreadable.total()
    assert {name: each.acceptance_length.value for name, each in found.acceptance_by_source.items()} == {
        "counters": pytest.approx(1.5),
        "requests": pytest.approx(2.0),
    }
    report = result(found)
    assert (report["spec_decode_draft_tokens"], report["spec_decode_acceptance_rate"]) == (None, None)


def test_acceptance_by_position_is_told_window_by_window(tmp_path: Path) -> None:
    grown = [(0, [0, 0]), (10, [8, 4]), (10, [8, 4]), (30, [28, 4]), (30, [28, 4])]
    counted = [sample(float(second), steps=steps, accepted=accepted) for second, (steps, accepted) in enumerate(grown)]
    found = analyse(write_run(tmp_path, [request(index, at_s=float(index)) for index in range(4)], counted)).series
    assert found.window_s == 1.0
    assert {position: line[:4] for position, line in found.acceptance_by_position.items()} == {
        "1": [0.8, None, 1.0, None],
        "2": [0.4, None, 0.0, None],
    }


CUT = STEADY + "[cut]\nwarm_up_s = 10\ncool_down_s = 20\n[slo]\nttft_ms = 400\n"


def test_a_run_is_measured_between_warm_up_and_cool_down(tmp_path: Path) -> None:
    requests = [request(index, at_s=float(index), ttft_s=9.0 if index < 10 or index >= 80 else 0.25) for index in range(100)]
    found = analyse(write_run(tmp_path, requests, scenario=CUT))
    assert found.span == Interval(10.0, 80.0)
    assert found.everything.num_requests == 70
    assert found.everything.ttft_ms.percentiles["p99"].value == pytest.approx(250.0, rel=1 / 2048)
    assert found.everything.ttft_ms.max == pytest.approx(250.0)
    assert found.everything.good_share.value == 1.0
    assert found.throughput.good_requests_per_s.value == pytest.approx(1.0)
    assert not found.why_invalid


def test_exact_numbers_of_a_small_run(tmp_path: Path) -> None:
    requests = [
        request(0, at_s=0.0, ttft_s=0.25, gaps_s=[0.5, 0.5], per_chunk=2, num_cached_tokens=5, accepted_per_step=[1, 1, 1]),
        request(1, at_s=2.0, ttft_s=0.75, gaps_s=[1.0], per_chunk=1, num_cached_tokens=0, accepted_per_step=[0]),
        request(2, at_s=4.0, outcome="failed", error="boom"),
        request(3, at_s=5.0, outcome="cancelled"),
    ]
    samples = [
        sample(0.0),
        sample(4.0, steps=10, accepted=[6, 2], completion_tokens=8.0, cpu_s={"engine": 1.0}),
        sample(5.0, steps=10, accepted=[6, 2], completion_tokens=8.0, cpu_s={"engine": 3.0}),
    ]
    found = analyse(write_run(tmp_path, requests, samples))
    everything = found.everything
    assert everything.num_by_outcome == {"ok": 2, "failed": 1, "truncated": 0, "cancelled": 1}
    assert everything.ttft_ms.mean.value == pytest.approx(500.0)
    assert everything.ttft_ms.std == pytest.approx(250.0)
    assert everything.ttft_ms.percentiles["p50"].value == pytest.approx(500.0, rel=1e-3)
    assert everything.tpot_ms.mean.value == pytest.approx((1000 / 5 + 1000) / 2)
    assert everything.itl_ms.mean.value == pytest.approx(2000 / 3)
    assert everything.itl_ms.count == 3
    assert everything.e2e_ms.max == pytest.approx(1750.0)
    assert everything.tokens_per_chunk.value == pytest.approx(8 / 5)
    assert everything.acceptance_length.value == pytest.approx(1 + 3 / 4)
    assert everything.cached_share.value == pytest.approx(5 / 20)
    assert everything.failed_share.value == pytest.approx(1 / 3)
    assert found.span == Interval(0.0, pytest.approx(5.7))
    assert found.throughput.requests_per_s.value == pytest.approx(2 / 5.7)
    assert found.throughput.tokens_per_s.value == pytest.approx(14 / 5.7), "those of failed and cancelled answers came too"
    assert found.acceptance.acceptance_length.value == pytest.approx(1.8)
    assert found.acceptance.by_position == pytest.approx([0.6, 0.2])
    assert found.acceptance_source == "counters"
    assert found.cost.cpu_s == {"engine": 2.0}


def test_without_a_cool_down_the_last_answers_are_waited_for(tmp_path: Path) -> None:
    late = request(1, at_s=99.0, ttft_s=5.0, gaps_s=[1.0])
    assert analyse(write_run(tmp_path, [request(0, at_s=0.0), late])).span == Interval(0.0, 105.0)


def test_an_answer_that_breaks_off_is_a_failure(tmp_path: Path) -> None:
    outcomes = ["ok", "truncated", "failed", "cancelled"]
    found = analyse(write_run(tmp_path, [request(index, at_s=index, outcome=word) for index, word in enumerate(outcomes)]))
    assert found.everything.failed_share.value == pytest.approx(2 / 3)
    assert found.everything.good_share.value == pytest.approx(1 / 3)
    assert result(found)["failed"] == 2


def test_cost_is_processor_time_over_tokens(tmp_path: Path) -> None:
    samples = [
        sample(float(second), steps=10.0 * second, accepted=[5.0 * second], completion_tokens=20.0 * second,
               cpu_s={"engine": 2.0 * second, "learner": 1.0 * second}, gpu_s={"gpu-0": 0.25 * second, "gpu-1": 0.75 * second})
        for second in range(11)
    ]  # fmt: skip
    found = analyse(write_run(tmp_path, [request(index, at_s=float(index)) for index in range(10)], samples))
    prices = {
        "cpu_s_per_token": 3 / 20,
        "cpu_s_per_accepted_token": 3 / 5,
        "gpu_s_per_token": 1 / 20,
        "gpu_s_per_accepted_token": 1 / 5,
    }
    assert {name: found.headline[name].value for name in prices} == pytest.approx(prices)
    assert found.cost.gpu_s == pytest.approx({"gpu-0": 2.5, "gpu-1": 7.5})


def test_a_cost_that_nobody_measured_is_none(tmp_path: Path) -> None:
    samples = [sample(float(second), steps=10.0 * second, completion_tokens=20.0 * second) for second in range(5)]
    found = analyse(write_run(tmp_path, [request(0, at_s=0.0)], samples))
    assert not [name for name in found.headline if name.startswith(("cpu_s", "gpu_s"))]


def test_versions_and_paths_are_told_apart(tmp_path: Path) -> None:
    requests = [
        request(index, at_s=float(index), ttft_s=0.1 if index % 2 else 0.3, draft_version=str(index % 2), kv_path="kv_reuse")
        for index in range(20)
    ]
    found = analyse(write_run(tmp_path, requests))
    assert found.groups["draft_version"]["0"].ttft_ms.mean.value == pytest.approx(300.0)
    assert found.groups["draft_version"]["1"].ttft_ms.mean.value == pytest.approx(100.0)
    assert found.groups["kv_path"]["kv_reuse"].num_requests == 20
    assert list(found.groups["target_version"]) == ["unknown"]


def test_an_answer_during_which_a_draft_was_swapped_in_is_in_a_group_of_its_own(tmp_path: Path) -> None:
    def swap(at_s: float, version: int, outcome: str = "committed") -> Swap:
        return Swap(at_s=at_s, duration_s=0.2, version=version, previous=None, outcome=outcome, trigger="activate")

    swaps = [swap(10.0, 4), swap(20.0, 5), swap(30.0, 9, "refused"), swap(50.0, 4)]
    each = [
        request(0, at_s=9.0, ttft_s=0.5, gaps_s=[0.1, 1.5], draft_version="3", target_version="7"),
        request(1, at_s=10.1, ttft_s=0.2, gaps_s=[1.0], draft_version="4", target_version="7"),
        request(2, at_s=19.0, ttft_s=0.1, gaps_s=[5.0], draft_version="4", target_version="7"),
        request(3, at_s=29.0, ttft_s=0.5, gaps_s=[5.0], draft_version="5", target_version="7"),
        request(4, at_s=49.0, ttft_s=0.5, gaps_s=[5.0], draft_version="4", target_version="7"),
    ]
    found = analyse(write_run(tmp_path, each, [sample(60.0, swaps=swaps)]))
    versions = {name: group.num_requests for name, group in found.groups["draft_version"].items()}
    assert versions == {"3 to 4": 1, "4": 2, "4 to 5": 1, "5": 1}
    assert list(found.groups["target_version"]) == ["7"]


def test_worst_window_is_where_fewest_kept_the_objectives(tmp_path: Path) -> None:
    requests = [request(index, at_s=float(index), ttft_s=0.9 if index == 42 else 0.1) for index in range(90)]
    found = analyse(write_run(tmp_path, requests, scenario=STEADY + "[slo]\nttft_ms = 500\n"))
    assert found.worst is not None
    assert (found.worst.start_s, found.worst.good_share, found.worst.num_requests) == (42.0, 0.0, 1)


def test_a_sender_that_lags_makes_the_run_invalid(tmp_path: Path) -> None:
    requests = [request(index, at_s=float(index), sent_at_s=index + 0.05) for index in range(50)]
    found = analyse(write_run(tmp_path, requests, record=None))
    assert found.dispatch_lag_p99_ms == pytest.approx(50.0)
    assert len(found.why_invalid) == 2
    assert "killed" in found.why_invalid[0]
    assert "50.0 ms" in found.why_invalid[1]


def test_a_closed_loop_has_no_schedule_to_lag_behind(tmp_path: Path) -> None:
    assert analyse(write_run(tmp_path, [request(0, at_s=0.0, is_open_loop=False)])).dispatch_lag_p99_ms is None


def test_a_half_written_last_line_is_left_out_and_counted(tmp_path: Path) -> None:
    path = write_run(tmp_path, [request(index, at_s=float(index)) for index in range(5)], [sample(0.0)])
    for name in ("requests.jsonl", "timeline.jsonl"):
        with (path / name).open("ab") as file:
            file.write(b'{"index": 5, "lane": "us')
    found = analyse(path)
    assert found.everything.num_requests == 5
    assert dict(found.run.num_unreadable) == {"requests.jsonl": 1, "timeline.jsonl": 1}
    assert not found.why_invalid, "a killed run leaves half a line"


def test_many_broken_lines_make_the_run_invalid(tmp_path: Path) -> None:
    path = write_run(tmp_path, [request(index, at_s=float(index)) for index in range(5)])
    with (path / "requests.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"index": "x"}\n\n')
    assert analyse(path).why_invalid == ["3 lines of the run's files could not be read"]


@pytest.mark.parametrize("requests", [[], [request(0, at_s=1.0, outcome="failed", chunk_times_s=[], chunk_token_counts=[])]])
def test_a_run_without_an_answer_says_so(tmp_path: Path, requests: list) -> None:
    found = analyse(write_run(tmp_path, requests))
    assert len(found.why_invalid) == 1
    assert math.isnan(found.everything.ttft_ms.mean.value)


def test_what_the_run_says_against_itself_is_kept(tmp_path: Path) -> None:
    record = replace(ENDED, is_valid=False, invalid_reasons=["stopped by its user"])
    assert analyse(write_run(tmp_path, [request(0, at_s=0.0)], record=record)).why_invalid == ["stopped by its user"]


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"scenario\.toml is missing"):
        RunDirectory(tmp_path)


def test_engines_readings_are_the_last_of_each_window() -> None:
    def engine(usage: float) -> dict[str, EngineSample]:
        return {"e": EngineSample(ready=True, draining=False, kv_usage=usage)}

    timeline = read_timeline([sample(0.0, engines=engine(0.1)), sample(0.9, engines=engine(0.7))], 1.0)
    assert timeline.windows[0].engines["e"].kv_usage == 0.7
