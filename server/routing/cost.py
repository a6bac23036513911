"""What serving a prompt would cost, in seconds, and what the estimates are learned from.

The terms need not be exact: they are compared with one another. All but the transfer scale with the seconds one
prefilled token takes, so between equal engines a choice does not depend on that estimate at all.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from msgspec import Struct

from server.fleet import Engine
from server.routing.estimates import Estimate
from wire.control import KvLayout

PRIOR_SECONDS_PER_TOKEN = 0.001
"""A small model on a small CPU; the first answers correct it."""
MIN_LEARNED_TOKENS = 64
"""A first byte after fewer prefilled tokens tells of overhead, not of prefilling."""

ACTIVE_REQUEST_TOKENS = 64
"""What one more request on an engine costs a new one, as prefilled tokens: about 50 verify steps of a few tokens that
share their computation with it."""
DISTURBANCE = 0.25
"""Prefilling holds up the requests decoding beside it; weight of one's delay against the new request's own."""

PRIOR_BYTES_PER_SECOND = 1e9
MIN_LEARNED_BYTES = 1 << 20
HANDSHAKE_S = 0.05
"""Of the second HTTP leg and the transfer's set-up."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedPrefill:
    """What one request has to prefill before its first byte."""

    engine: Engine
    num_tokens: int


class LocalCost(Struct, frozen=True):
    """An engine prefills what it lacks and decodes."""

    prefill_s: float
    queue_s: float
    """Prefills that go before."""
    active_s: float
    """Slowed down by the requests that run there."""
    disturbance_s: float
    """Slowing those down."""

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.queue_s + self.active_s + self.disturbance_s


class RemoteCost(Struct, frozen=True):
    """A prefill engine computes the KV, the decode engine pulls it."""

    prefill_s: float
    queue_s: float
    transfer_s: float
    handshake_s: float
    active_s: float
    """Slowed down by the requests that run on the decode engine."""
    mismatch: str = ""
    """Why these two engines can never share KV."""

    @property
    def total_s(self) -> float:
        parts_s = self.prefill_s + self.queue_s + self.transfer_s + self.handshake_s + self.active_s
        return inf if self.mismatch else parts_s


class CostModel:
    """Estimates, and the observations that correct them. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds_per_token: dict[str, Estimate] = {}
        """By kind of pool, not by engine: one slow answer must not turn traffic away from the engine that gave it."""
        self.num_measured: Counter[str] = Counter()
        """Prefills learned from, by kind of pool."""
        self._seconds_per_byte = Estimate(1.0 / PRIOR_BYTES_PER_SECOND, clock())
        self._transfers: dict[Engine, tuple[float, float]] = {}
        """Bytes and seconds already learned from."""
        self._expected: defaultdict[Engine, set[ExpectedPrefill]] = defaultdict(set)
        """Of requests without a first byte."""

    def seconds_per_token(self, kind: str) -> float:
        """A kind nothing is known of is as fast as the others: looking slower, it would never be tried."""
        known = self._seconds_per_token.get(kind)
        others = [estimate.value_s for other, estimate in self._seconds_per_token.items() if other != kind]
        if known is None:
            return sum(others) / len(others) if others else PRIOR_SECONDS_PER_TOKEN
        return known.faded(sum(others) / len(others), self._clock()) if others else known.value_s

    def observed_seconds_per_token(self) -> dict[str, float]:
        """Of kinds with an observation."""
        return {kind: self.seconds_per_token(kind) for kind in self._seconds_per_token}

    @property
    def bytes_per_second(self) -> float:
        return 1.0 / self._seconds_per_byte.faded(1.0 / PRIOR_BYTES_PER_SECOND, self._clock())

    def local(self, engine: Engine, num_uncached_tokens: int) -> LocalCost:
        per_token_s = self.seconds_per_token(engine.kind)
        num_active = engine.num_in_flight
        prefill_s = num_uncached_tokens * per_token_s
        return LocalCost(
            prefill_s=prefill_s,
            queue_s=self.queued_tokens(engine) * per_token_s,
            active_s=num_active * ACTIVE_REQUEST_TOKENS * per_token_s,
            disturbance_s=num_active * prefill_s * DISTURBANCE,
        )

    def remote(
        self, prefill: Engine, decode: Engine, *, num_uncached_tokens: int, num_prompt_tokens: int, num_pulled_tokens: int
    ) -> RemoteCost:
        """`num_uncached_tokens` are those the prefill engine lacks, `num_pulled_tokens` those the decode engine does."""
        per_token_s = self.seconds_per_token(prefill.kind)
        layout = prefill.status.kv if prefill.status else None
        num_bytes = num_pulled_tokens * (layout.bytes_per_token if layout else 0)
        return RemoteCost(
            prefill_s=num_uncached_tokens * per_token_s,
            queue_s=self.queued_tokens(prefill) * per_token_s,
            transfer_s=num_bytes / self.bytes_per_second,
            handshake_s=HANDSHAKE_S,
            active_s=decode.num_in_flight * ACTIVE_REQUEST_TOKENS * self.seconds_per_token(decode.kind),
            mismatch=mismatch(prefill, decode, num_prompt_tokens),
        )

    def queued_tokens(self, engine: Engine) -> int:
        """Tokens to prefill before a new request's."""
        return sum(expected.num_tokens for expected in self._expected[engine])

    def expect(self, engine: Engine, num_uncached_tokens: int) -> ExpectedPrefill:
        """A request goes to this engine and has that much to prefill there; whoever sends it must see to `forget`."""
        expected = ExpectedPrefill(engine, num_uncached_tokens)
        self._expected[engine].add(expected)
        return expected

    def forget(self, expected: ExpectedPrefill) -> None:
        """That request waits there no more; saying so twice does no harm."""
        self._expected[expected.engine].discard(expected)

    def learn_prefill(self, engine: Engine, prefill_s: float, num_uncached_tokens: int, num_queued_tokens: int) -> None:
        """An engine took that long for `num_uncached_tokens`, the `num_queued_tokens` of others before them included."""
        num_tokens = num_uncached_tokens + num_queued_tokens
        if num_tokens >= MIN_LEARNED_TOKENS:
            now_s = self._clock()
            estimate = self._seconds_per_token.setdefault(engine.kind, Estimate(self.seconds_per_token(engine.kind), now_s))
            estimate.learn(prefill_s / num_tokens, now_s)
            self.num_measured[engine.kind] += 1

    def learn_transfer(self, engine: Engine, total_bytes: float, total_s: float) -> None:
        """What an engine has pulled over NIXL since it started, as its metrics say; called again and again."""
        old_bytes, old_s = self._transfers.get(engine, (0.0, 0.0))
        if total_bytes < old_bytes or total_s < old_s:
            old_bytes, old_s = 0.0, 0.0  # Another process counts anew.
        num_bytes, duration_s = total_bytes - old_bytes, total_s - old_s
        if num_bytes >= MIN_LEARNED_BYTES and duration_s > 0.0:
            self._transfers[engine] = (total_bytes, total_s)
            self._seconds_per_byte.learn(duration_s / num_bytes, self._clock())


def mismatch(prefill: Engine, decode: Engine, num_prompt_tokens: int) -> str:
    """Why KV of one must never be used by the other; empty where it may."""
    if prefill.status is None or decode.status is None:
        return "an engine's KV layout is not known"
    ours, theirs = decode.status.kv, prefill.status.kv
    if prefill.target_version != decode.target_version:
        return f"target version {prefill.target_version} against {decode.target_version}"
    if _geometry(ours) != _geometry(theirs):
        return f"KV layout {theirs} against {ours}"
    if theirs.transfer not in ("kv_producer", "kv_both") or ours.transfer not in ("kv_consumer", "kv_both"):
        return f"no transfer from {theirs.transfer} to {ours.transfer}"
    if num_prompt_tokens > theirs.max_model_len:
        return f"the prompt is longer than the prefill engine's {theirs.max_model_len} tokens"
    return ""


def _geometry(layout: KvLayout) -> tuple[int, int]:
    return layout.block_size_tokens, layout.bytes_per_token
