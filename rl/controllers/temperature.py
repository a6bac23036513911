"""Sampling temperature, from the policy's entropy, the share of groups without signal, and the pass rate.

It holds the entropy at a level: below it the policy explores too little, so the temperature rises; above it falls. Where nearly
everything fails and groups carry no signal, it rises too, unless the entropy is already high: a small model that writes
gibberish fails because it is hot. Where nearly everything passes the temperature is not at fault: that is the curriculum's.
It moves slowly and within bounds, and a rollout keeps the one it began with, which is logged with it, since the behaviour
distribution depends on it. The training loss is not looked at: it is about 0 by construction under group advantages.

Sources: E3-RL4LLMs adjusts the temperature to hold the entropy. SmolLM2-135M is near gibberish at 1.0 and coherent at 0.7. Integral control of a logarithm with a dead band is textbook.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log

from pydantic import Field, model_validator

from rl.controllers.reading import WINDOW, believable, extended, middle
from wire.config import Config

GAIN = 0.02
"""Of the logarithm of the entropy's error, per update: small, because rollouts in flight answer updates later."""
SLEW = 0.01
"""Largest change of the temperature's logarithm in one update."""
ACTS_FROM, ACTS_UNTIL = 0.15, 0.05
"""Logarithm of the entropy's error at which it begins to act and at which it stops (hysteresis)."""
NO_SIGNAL = 0.5
"""Share of groups without variance from which exploration is too little where most fail."""
MOST_FAIL, MOST_PASS = 0.1, 0.9
LEAST_ENTROPY = 1e-3
"""Nats; a policy that is collapsed altogether counts as this."""


class TemperatureSettings(Config):
    """`[rl.temperature]`."""

    start: float = Field(1.0, gt=0.0, le=2.0)
    least: float = Field(0.6, gt=0.0, le=2.0)
    most: float = Field(1.3, gt=0.0, le=2.0)
    target_entropy: float | None = Field(None, gt=0.0)
    """Nats per token. None: what the first updates have, which the run then keeps."""

    @model_validator(mode="after")
    def _is_in_order(self) -> TemperatureSettings:
        if not self.least <= self.start <= self.most:
            raise ValueError(f"temperatures are in the order least {self.least}, start {self.start}, most {self.most}")
        return self


@dataclass(frozen=True, slots=True)
class TemperatureReading:
    """Over the groups of one update. None: not measured."""

    entropy: float | None
    """Nats per sampled token, of the distribution that was sampled from."""
    zero_variance_rate: float | None
    """Share of groups all of whose rewards are equal, 0 to 1."""
    pass_rate: float | None
    """Share of rollouts that passed, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """State."""

    temperature: float
    entropies: tuple[float, ...] = ()
    """The newest readings."""
    target_entropy: float | None = None
    is_acting: bool = False
    """The entropy's error left the dead band and has not come back to its middle."""


@dataclass(frozen=True, slots=True)
class TemperatureDecision:
    temperature: float
    """For rollouts that begin from now on; each is logged with its own."""
    reason: str


def initial(settings: TemperatureSettings) -> Temperature:
    return Temperature(settings.start, target_entropy=settings.target_entropy)


def decide(
    settings: TemperatureSettings, state: Temperature, reading: TemperatureReading
) -> tuple[Temperature, TemperatureDecision]:
    """The next state and temperature; a reading without entropy changes nothing."""
    entropy = believable(reading.entropy)
    if entropy is None:
        return state, TemperatureDecision(state.temperature, "holds: the entropy is missing or absurd")
    state = replace(state, entropies=extended(state.entropies, max(entropy, LEAST_ENTROPY)))
    if state.target_entropy is None:
        if len(state.entropies) < WINDOW:
            return state, TemperatureDecision(state.temperature, f"holds: {WINDOW} updates tell the entropy to keep")
        state = replace(state, target_entropy=middle(state.entropies))
    change, reason, is_acting = _change(state, reading)
    wanted = state.temperature * exp(max(-SLEW, min(change, SLEW)))
    temperature = max(settings.least, min(wanted, settings.most))
    if temperature == state.temperature and change != 0.0:
        reason += "; it is at its bound"
    return replace(state, temperature=temperature, is_acting=is_acting), TemperatureDecision(temperature, reason)


def _change(state: Temperature, reading: TemperatureReading) -> tuple[float, str, bool]:
    """Wanted change of the temperature's logarithm, why, and whether the entropy is being brought back."""
    assert state.target_entropy is not None
    now = middle(state.entropies)
    error = log(state.target_entropy / now)
    is_acting = abs(error) > (ACTS_UNTIL if state.is_acting else ACTS_FROM)
    level = f"entropy {now:.3g} against {state.target_entropy:.3g} nats"
    if is_acting:
        return GAIN * error, f"{'rises' if error > 0 else 'falls'}: {level}", True
    silent = believable(reading.zero_variance_rate, most=1.0)
    passed = believable(reading.pass_rate, most=1.0)
    if silent is None or passed is None or silent < NO_SIGNAL:
        return 0.0, f"holds: {level}", False
    if passed <= MOST_FAIL and error > -ACTS_UNTIL:
        return SLEW / 2.0, f"rises: {passed:.0%} pass and {silent:.0%} of groups carry no signal, at {level}", False
    if passed >= MOST_PASS:
        return 0.0, f"holds: {passed:.0%} pass, so tasks should be harder, not hotter; {level}", False
    return 0.0, f"holds: {silent:.0%} of groups carry no signal, but the pass rate is {passed:.0%}; {level}", False
