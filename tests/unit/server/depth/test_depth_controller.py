"""The depth controller against a simulated engine whose best K is known. Times are seconds of traffic; readings come once a second."""

from __future__ import annotations

from random import Random

import pytest
from simulated_engine import COLD, FAIR, GOOD, MAX_DEPTH, Draft, Simulation, best_depth, step_s, tokens

from server.depth.controller import MIN_GAIN, DepthController
from server.depth.readings import Reading, Steps
from server.depth.trial import FIRST_CREDIT_S, SHARE
from server.tally import Tally
from wire.depth import bucket_of

SEEDS = range(2)
EVERY_BATCH = (1, 2, 3, 4, 6, 8, 12, 16)


def simulate(draft: Draft, num_requests: int, seed: int) -> Simulation:
    return Simulation(batch=lambda _: num_requests, draft=lambda _: (0, draft), seed=seed)


def speed_share(simulation: Simulation, draft: Draft, num_requests: int) -> float:
    """Speed at the K in force over that at the best K."""
    (depth,) = simulation.depths([num_requests])
    best = best_depth(draft, num_requests)
    return tokens(draft, depth) / step_s(num_requests, depth) * step_s(num_requests, best) / tokens(draft, best)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_requests", [1, 4, 8])
def test_a_cold_draft_is_switched_off_within_seconds(num_requests: int, seed: int) -> None:
    simulation = simulate(COLD, num_requests, seed)
    simulation.run_until(lambda: simulation.depths([num_requests]) == [0], at_most=20)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cold_draft_is_off_in_all_buckets_and_trials_cost_little(seed: int) -> None:
    simulation = Simulation(batch=lambda second: EVERY_BATCH[second // 20 % 8], draft=lambda _: (0, COLD), seed=seed).run(160)
    assert simulation.depths(EVERY_BATCH) == [0] * 8
    before = simulation.num_tokens, simulation.num_ideal
    simulation.run(800)
    assert simulation.depths(EVERY_BATCH) == [0] * 8
    assert (simulation.num_tokens - before[0]) / (simulation.num_ideal - before[1]) > 0.98


@pytest.mark.parametrize("seed", SEEDS)
def test_a_good_draft_keeps_its_full_depth_alone(seed: int) -> None:
    simulation = simulate(GOOD, 1, seed).run(300)
    assert simulation.depths([1]) == [MAX_DEPTH]
    assert simulation.controller.num_changes == 0
    assert simulation.num_tokens / simulation.num_ideal > 0.99


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_requests", [1, 4, 8])
def test_a_draft_that_a_swap_made_good_is_found(num_requests: int, seed: int) -> None:
    simulation = Simulation(
        batch=lambda _: num_requests, draft=lambda second: (0, COLD) if second < 300 else (1, GOOD), seed=seed
    ).run(300)
    assert simulation.depths([num_requests]) == [0]
    simulation.run_until(lambda: speed_share(simulation, GOOD, num_requests) > 0.95, at_most=90)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_requests", [1, 4, 8])
def test_a_draft_that_another_target_made_good_is_found(num_requests: int, seed: int) -> None:
    """The same draft: nothing but the call tells of the change."""
    simulation = Simulation(
        batch=lambda _: num_requests, draft=lambda second: (0, COLD if second < 300 else GOOD), seed=seed
    ).run(300)
    assert simulation.depths([num_requests]) == [0]
    controller = simulation.controller
    costs = {limit: bucket.costs for limit, bucket in controller.buckets.items()}
    assert _hope(controller) < 0.3
    controller.forget_acceptance()
    assert _hope(controller) > 0.4
    assert all(bucket.costs is costs[limit] for limit, bucket in controller.buckets.items()), "a step costs what it did"
    simulation.run_until(lambda: speed_share(simulation, GOOD, num_requests) > 0.95, at_most=90)


def _hope(controller: DepthController) -> float:
    """For the first position."""
    share = controller.shares[0]
    return share.mean + 2 * share.deviation


@pytest.mark.parametrize("seed", SEEDS)
def test_traffic_that_suits_the_draft_is_found_without_a_swap(seed: int) -> None:
    simulation = Simulation(batch=lambda _: 1, draft=lambda second: (0, COLD if second < 300 else GOOD), seed=seed).run(300)
    assert simulation.depths([1]) == [0]
    simulation.run_until(lambda: speed_share(simulation, GOOD, 1) > 0.95, at_most=400)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draft", [COLD, FAIR, GOOD], ids=["cold", "fair", "good"])
@pytest.mark.parametrize("num_requests", [1, 4])
def test_noise_does_not_make_it_flap(num_requests: int, draft: Draft, seed: int) -> None:
    simulation = simulate(draft, num_requests, seed).run(1200)
    late = [change for change in simulation.controller.changes if change.bucket == num_requests and change.at_s > 300]
    assert len(late) <= 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draft", [COLD, FAIR, GOOD], ids=["cold", "fair", "good"])
@pytest.mark.parametrize("num_requests", [1, 4, 8])
def test_it_is_never_worse_than_the_best_constant_by_more_than_its_budget(num_requests: int, draft: Draft, seed: int) -> None:
    simulation = simulate(draft, num_requests, seed).run(600)
    assert simulation.num_tokens / max(simulation.num_constant) > 1.0 - MIN_GAIN - SHARE
    decode_s = simulation.second
    assert simulation.controller.budget.lost_s <= FIRST_CREDIT_S + SHARE * decode_s + 2.0


@pytest.mark.parametrize("seed", SEEDS)
def test_it_beats_every_constant_where_batches_differ(seed: int) -> None:
    simulation = Simulation(batch=lambda second: (1, 8)[second // 60 % 2], draft=lambda _: (0, FAIR), seed=seed).run(1800)
    assert simulation.num_tokens / max(simulation.num_constant) > 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_that_change_every_second_and_a_draft_that_is_swapped_all_the_time_cost_little(seed: int) -> None:
    random = Random(seed)
    batches = [1 + random.randrange(8) for _ in range(900)]
    simulation = Simulation(
        batch=lambda second: batches[second],
        draft=lambda second: (second // 20, tuple(min(second / 600, 1.0) * share for share in GOOD)),
        seed=seed,
    ).run(900)
    assert simulation.num_tokens / max(simulation.num_constant) > 0.98


def test_a_bucket_that_saw_no_traffic_learns_from_its_neighbour() -> None:
    simulation = simulate(COLD, 4, 0).run(120)
    assert simulation.depths([4]) == [0]
    assert simulation.depths([3, 6]) == [0, 0]
    controller = simulation.controller
    assert controller.buckets[bucket_of(6)].costs is None


def test_a_trial_whose_bucket_loses_its_traffic_ends() -> None:
    simulation = simulate(COLD, 4, 0)
    simulation.run_until(lambda: simulation.controller.trial is not None, at_most=30)
    controller = simulation.controller
    assert controller.trial is not None
    limit = controller.trial.bucket.limit
    steps = {(1, controller.buckets[1].depth): Steps(10, 0.5)}
    for second in range(1, 13):
        controller.update(Reading(0, steps, Tally()), simulation.second + float(second))
    assert controller.trial is None or controller.trial.bucket.limit != limit
    assert all(0 <= depth <= MAX_DEPTH for depth in controller.table())


def test_changes_are_explained() -> None:
    simulation = simulate(COLD, 4, 0).run(60)
    change = next(change for change in simulation.controller.changes if change.bucket == 4)
    assert (change.before, change.after) == (3, 0)
    assert "K=0 is faster than K=3" in change.reason
    assert simulation.controller.buckets[4].reason == change.reason


def test_nothing_happens_without_traffic() -> None:
    controller = simulate(COLD, 1, 0).controller
    for second in range(1000):
        controller.update(Reading(second // 50, {}, Tally()), float(second))
    assert controller.table() == [MAX_DEPTH] * controller.max_requests
    assert (controller.num_trials, controller.num_changes) == (0, 0)
