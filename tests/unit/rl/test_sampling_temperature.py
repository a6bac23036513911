from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import exp, inf, log, nan
from random import Random

import msgspec
import pytest
from pydantic import ValidationError

from rl.controllers.temperature import (
    SLEW,
    Temperature,
    TemperatureDecision,
    TemperatureReading,
    TemperatureSettings,
    decide,
    initial,
)

SETTINGS = TemperatureSettings(target_entropy=1.0)


def reading(
    entropy: float | None = 1.0, zero_variance_rate: float | None = 0.2, pass_rate: float | None = 0.5
) -> TemperatureReading:
    return TemperatureReading(entropy, zero_variance_rate, pass_rate)


def after(
    readings: list[TemperatureReading], settings: TemperatureSettings = SETTINGS
) -> tuple[Temperature, list[TemperatureDecision]]:
    state, decisions = initial(settings), []
    for one in readings:
        state, decision = decide(settings, state, one)
        decisions.append(decision)
    return state, decisions


def test_little_entropy_raises_it_and_much_lowers_it() -> None:
    assert after([reading(0.5)])[0].temperature > 1.0
    assert after([reading(2.0)])[0].temperature < 1.0
    assert after([reading(1.1)])[0].temperature == 1.0
    assert "rises" in after([reading(0.5)])[1][-1].reason


@pytest.mark.parametrize("entropy", [0.0, 1e-9, 0.3, 1.0, 3.0, 1e12])
@pytest.mark.parametrize("pass_rate", [0.0, 1.0])
def test_it_moves_slowly_and_stays_within_its_bounds(entropy: float, pass_rate: float) -> None:
    _, decisions = after([reading(entropy, 1.0, pass_rate)] * 300)
    temperatures = [decision.temperature for decision in decisions]
    assert all(SETTINGS.least <= temperature <= SETTINGS.most for temperature in temperatures)
    assert all(abs(log(new / old)) <= SLEW * (1 + 1e-9) for old, new in pairwise([1.0, *temperatures]))


def test_where_most_fail_without_signal_it_rises_unless_the_entropy_is_high_already() -> None:
    failing = {"zero_variance_rate": 0.9, "pass_rate": 0.02}
    assert after([reading(1.0, **failing)] * 3)[0].temperature > 1.0
    assert after([reading(1.12, **failing)] * 3)[0].temperature == 1.0
    assert after([reading(2.0, **failing)] * 3)[0].temperature < 1.0


def test_where_most_pass_it_leaves_the_matter_to_the_curriculum() -> None:
    state, decisions = after([reading(1.0, 0.9, 0.98)] * 3)
    assert state.temperature == 1.0
    assert "harder" in decisions[-1].reason


@pytest.mark.parametrize("bad", [None, nan, inf, -0.1])
def test_missing_and_absurd_readings_hold_it(bad: float | None) -> None:
    state, decisions = after([reading(0.5)])
    again, decision = decide(SETTINGS, state, reading(bad, 1.0, 0.0))
    assert again == state
    assert decision.temperature == decisions[-1].temperature
    for rates in ((bad, 0.0), (1.0, bad)):
        assert after([reading(1.0, *rates)] * 5)[0].temperature == 1.0
    assert after([reading(1.0, 7.0, 0.0)] * 5)[0].temperature == 1.0


def test_one_wild_reading_does_not_move_it() -> None:
    _, decisions = after([reading()] * 4 + [reading(1e9)] + [reading()] * 4 + [reading(0.0)] + [reading()] * 4)
    assert {decision.temperature for decision in decisions} == {1.0}


def test_without_a_target_it_keeps_the_level_the_run_began_with() -> None:
    settings = TemperatureSettings()
    state, decisions = after([reading(2.4)] * 5 + [reading(1.2)] * 10, settings)
    assert state.target_entropy == pytest.approx(2.4)
    assert {decision.temperature for decision in decisions[:5]} == {1.0}
    assert state.temperature > 1.0


def policy(elasticity: float, delay: int, noise: float, *, seed: int, number: int = 400, step_at: int = 200) -> list[float]:
    """Entropies of a policy that answers the temperature `delay` updates later and loses half of its entropy at `step_at`."""
    random, state = Random(seed), initial(SETTINGS)
    flight = deque([state.temperature] * (delay + 1), maxlen=delay + 1)
    entropies = []
    for update in range(number):
        level = 1.6 if update < step_at else 0.8
        entropies.append(level * flight[0] ** elasticity)
        state, decision = decide(SETTINGS, state, reading(entropies[-1] * exp(random.gauss(0.0, noise))))
        flight.append(decision.temperature)
    return entropies


@pytest.mark.parametrize("elasticity", [2.0, 5.0])
@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_brings_the_entropy_to_its_level_and_keeps_it_there(elasticity: float, delay: int, noise: float) -> None:
    entropies = policy(elasticity, delay, noise, seed=1)
    for settled in (entropies[120:200], entropies[320:]):
        assert max(abs(log(entropy)) for entropy in settled) < 0.3
        middle = sorted(settled)[len(settled) // 2]
        assert abs(log(middle)) < 0.17


def test_without_noise_it_comes_to_rest() -> None:
    entropies = policy(3.0, 3, 0.0, seed=1, step_at=10_000)
    assert len({round(entropy, 12) for entropy in entropies[200:]}) == 1


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="in the order"):
        TemperatureSettings(start=0.5)


def test_the_state_survives_a_checkpoint() -> None:
    state, _ = after([reading(0.5)] * 7)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Temperature) == state
