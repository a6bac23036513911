"""How an engine is chosen among those that can answer.

A policy is a function of candidates that are all able; whether a remote prefill pays is the router's question after it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from server.fleet import Engine
from server.routing.cost import LocalCost

TIE = 0.02
"""Costs this close to the least, as a share of it, are equal."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine that can answer a request."""

    engine: Engine
    num_cached_tokens: int
    cost: LocalCost


class Policy(Protocol):
    """Chooses one of at least one candidate."""

    def choose(self, candidates: Sequence[Candidate], session: str | None) -> Candidate: ...


class KvAware:
    """The least cost, where what an engine holds already counts against how busy it is. Equal ones take turns."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, candidates: Sequence[Candidate], session: str | None) -> Candidate:
        least_s = min(candidate.cost.total_s for candidate in candidates)
        equals = [candidate for candidate in candidates if candidate.cost.total_s <= least_s * (1.0 + TIE)]
        return self._turns.next_of(equals)


class RoundRobin:
    """One after another, whatever they do."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, candidates: Sequence[Candidate], session: str | None) -> Candidate:
        return self._turns.next_of(candidates)


class PowerOfTwo:
    """The less busy of two chosen by chance: near the least busy of all, without everyone agreeing on it at once."""

    def choose(self, candidates: Sequence[Candidate], session: str | None) -> Candidate:
        pair = random.sample(candidates, min(2, len(candidates)))
        return min(pair, key=lambda candidate: candidate.engine.num_in_flight)


class Session:
    """Every session has its engine, by the highest of the engines' hashes with it: one engine's loss moves only its own."""

    def __init__(self) -> None:
        self._without = PowerOfTwo()

    def choose(self, candidates: Sequence[Candidate], session: str | None) -> Candidate:
        if session is None:
            return self._without.choose(candidates, session)
        return max(candidates, key=lambda candidate: _rank(candidate.engine.id, session))


def make_policy(name: str) -> Policy:
    """The policy called so in `[routing]`."""
    policies: dict[str, type[Policy]] = {
        "kv_aware": KvAware,
        "session": Session,
        "power_of_two": PowerOfTwo,
        "round_robin": RoundRobin,
    }
    return policies[name]()


class _Turns:
    """Whoever was chosen longest ago goes next."""

    def __init__(self) -> None:
        self._num_chosen = 0
        self._last: dict[Engine, int] = {}

    def next_of(self, candidates: Sequence[Candidate]) -> Candidate:
        chosen = min(candidates, key=lambda candidate: self._last.get(candidate.engine, 0))
        self._num_chosen += 1
        self._last[chosen.engine] = self._num_chosen
        return chosen


def _rank(engine_id: str, session: str) -> bytes:
    return blake2b(session.encode(errors="replace"), key=engine_id.encode()[:64], digest_size=8).digest()
