"""What is drawn: as often as asked, as bursty as asked, and the same each time."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.draws import Deck, Mix, arrival_times, generator
from loadtest.scenario import Phase, Poisson


def times(burstiness: float = 1.0, end_rate_per_s: float | None = None, seed: int = 0) -> np.ndarray:
    arrivals = Poisson(rate_per_s=50, burstiness=burstiness, end_rate_per_s=end_rate_per_s)
    return arrival_times(arrivals, 200.0, generator(seed, "a"))


def test_arrivals_come_at_their_rate_in_order_within_their_phase() -> None:
    found = times()
    assert len(found) == pytest.approx(10_000, rel=0.05)
    assert np.all(np.diff(found) >= 0)
    assert found[0] >= 0
    assert found[-1] < 200


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_intervals(burstiness: float) -> None:
    intervals = np.diff(times(burstiness))
    assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


@pytest.mark.parametrize("end_rate_per_s", [5.0, 150.0])
def test_a_ramp_goes_from_rate_to_rate_linearly(end_rate_per_s: float) -> None:
    counts, _ = np.histogram(times(end_rate_per_s=end_rate_per_s), bins=4, range=(0, 200))
    expected = [50 * (50 + (end_rate_per_s - 50) * (quarter + 0.5) / 4) for quarter in range(4)]
    assert counts == pytest.approx(expected, rel=0.12)


def test_a_ramp_keeps_its_burstiness() -> None:
    found = times(0.25, end_rate_per_s=150.0)
    late = np.diff(found[found > 150])
    assert late.std() / late.mean() == pytest.approx(2.0, rel=0.15)


def test_a_seed_draws_the_same_and_another_something_else() -> None:
    assert np.array_equal(times(), times())
    assert not np.array_equal(times(), times(seed=1))


def phase(traffic: dict[str, float], end_traffic: dict[str, float] | None = None) -> Phase:
    return Phase(name="p", duration_s=1, arrivals=Poisson(rate_per_s=1), traffic=traffic, end_traffic=end_traffic)


def test_a_mix_follows_its_weights() -> None:
    mix = Mix(phase({"a": 1, "b": 3}))
    chosen = mix.choose(np.zeros(4000), generator(0).random(4000))
    assert mix.names == ["a", "b"]
    assert chosen.mean() == pytest.approx(0.75, abs=0.03)


def test_a_mix_shifts_linearly_to_sources_that_were_not_there() -> None:
    mix = Mix(phase({"a": 2}, {"b": 5}))
    uniforms = generator(0).random(4000)
    shares = [mix.choose(np.full(4000, progress), uniforms).mean() for progress in (0.0, 0.25, 1.0)]
    assert shares == pytest.approx([0.0, 0.25, 1.0], abs=0.03)


def test_one_choice_at_a_time_is_the_same_choice() -> None:
    mix = Mix(phase({"a": 2, "b": 1}, {"b": 5, "c": 1}))
    progress, uniforms = generator(1).random(500), generator(2).random(500)
    together = [mix.names[index] for index in mix.choose(progress, uniforms)]
    assert [mix.choose_one(*pair) for pair in zip(progress.tolist(), uniforms.tolist(), strict=True)] == together
    assert set(together) == {"a", "b", "c"}


def test_a_deck_gives_every_prompt_before_any_twice_and_then_in_another_order() -> None:
    deck = Deck(50, generator(0))
    first = [*deck.take(20).tolist(), *deck.take(30).tolist()]
    second = deck.take(50).tolist()
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert len(Deck(3, generator(0)).take(10)) == 10
