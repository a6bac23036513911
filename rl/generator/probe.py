"""Whether the gateway serves rollouts that can be trained on, asked once before the first.

The gateway refuses engines that were started with what breaks training and says why. What it answers is checked besides: of the
processed distribution, the difference between two tokens' log-probabilities is theirs at temperature 1 over the temperature.
"""

from __future__ import annotations

from math import isfinite

import msgspec
from msgspec import Struct

from rl.generator.gateway import Gateway, GenerateRequest, Lost, Refused, Sampling
from wire.errors import ConfigError

_PROBE_TEMPERATURE = 0.5
_NUM_TOKENS = 20
_PRECISION = 0.05
"""Relative. Engines in bfloat16 are at 0.01, raw log-probabilities at 0.5."""
_MIN_SPREAD = 0.5
"""Nats between the two tokens that are compared."""


class _Entry(Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Top] = []


class _Top(Struct):
    token_id: int
    logprob: float


class _Logprobs(Struct):
    content: list[_Entry]


class _Span(Struct):
    version: str
    start: int
    end: int


class _Choice(Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str


class _Answer(Struct):
    choices: list[_Choice]


async def probe(gateway: Gateway, *, token_ids: tuple[int, ...]) -> int:
    """The target's version. token_ids: any short prompt. Raises ConfigError that says what breaks training."""
    whole = await _ask(gateway, token_ids, 1.0)
    half = await _ask(gateway, token_ids, _PROBE_TEMPERATURE)
    problem = why_unprocessed(_by_token(whole), _by_token(half), _PROBE_TEMPERATURE)
    if problem:
        raise ConfigError(f"the gateway cannot serve rollouts: {problem}")
    return int(half.weight_versions[0].version)


def why_unprocessed(whole: dict[int, float], tempered: dict[int, float], temperature: float) -> str:
    """What is wrong with the log-probabilities of the same next token at temperature 1 and another; empty: nothing."""
    both = sorted(whole.keys() & tempered.keys(), key=lambda token_id: whole[token_id])
    if any(not (isfinite(value) and value <= 0.0) for value in (*whole.values(), *tempered.values())):
        return "log-probabilities are not all finite and at most 0"
    if len(both) < 2 or whole[both[-1]] - whole[both[0]] < _MIN_SPREAD:
        return f"{len(both)} of the likeliest tokens are the same at two temperatures, which tells nothing; ask with another prompt"
    ratio = (tempered[both[-1]] - tempered[both[0]]) / (whole[both[-1]] - whole[both[0]])
    if abs(ratio * temperature - 1.0) > _PRECISION:
        return (
            f"at temperature {temperature:g} log-probabilities differ {ratio:.2f} times as much as at 1, not {1.0 / temperature:g} "
            "times: they are not of the distribution tokens are drawn from; start engines with rollouts.enabled"
        )
    return ""


async def _ask(gateway: Gateway, token_ids: tuple[int, ...], temperature: float) -> _Choice:
    sampling = Sampling(max_tokens=1, temperature=temperature, seed=0, logprobs=_NUM_TOKENS)
    request = GenerateRequest(token_ids=token_ids, sampling_params=sampling, cache_salt="probe", priority=1, stream=False)
    try:
        (choice,) = msgspec.json.decode(await gateway.ask(request), type=_Answer).choices
    except (Refused, Lost) as error:
        raise ConfigError(f"the gateway cannot serve rollouts: {error}") from error
    except ValueError as error:
        raise ConfigError(
            f"the gateway's answer lacks what training needs, tokens, log-probabilities and target versions: {error}"
        ) from error
    _require_sound(choice)
    return choice


def _require_sound(choice: _Choice) -> None:
    if len(choice.token_ids) != 1 or [entry.token_id for entry in choice.logprobs.content] != choice.token_ids:
        raise ConfigError(
            f"asked for one token, the gateway gave {choice.token_ids} with {len(choice.logprobs.content)} log-probabilities"
        )
    spans = [(span.version.isdecimal(), span.start, span.end) for span in choice.weight_versions]
    if spans != [(True, 0, 1)]:
        raise ConfigError(
            f"the gateway names the target of one token as {choice.weight_versions}; engines number their targets since they "
            "change them through the gateway, start them with rollouts.enabled"
        )


def _by_token(choice: _Choice) -> dict[int, float]:
    return {entry.token_id: entry.logprob for entry in choice.logprobs.content[0].top_logprobs}
