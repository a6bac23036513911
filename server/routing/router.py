"""Router: which engine answers a request, whether another one prefills for it, and why.

The decode engine comes first, by policy; then a remote prefill is weighed against the engine's own. Every decision is
counted by its path and the kind of its reason, and the latest ones can be looked at with all their costs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import Struct

from server.config import RoutingSettings
from server.fleet import Engine, Fleet
from server.routing.blocks import reusable_tokens
from server.routing.cost import CostModel, ExpectedPrefill, LocalCost, RemoteCost
from server.routing.index import KvIndex
from server.routing.metrics import RoutingMetrics
from server.routing.policies import Candidate, make_policy
from server.routing.tokens import Prompt
from wire.kv_blocks import BlockName, prompt_chain

Path = Literal["combined", "remote_prefill", "kv_reuse", "recompute"]

MIN_REMOTE_BLOCKS = 2
"""Fewer blocks to prefill than this are not worth another engine's attention."""
MAX_DECISIONS = 256


class Decision(Struct, frozen=True, kw_only=True):
    """One routed request, for whoever wants to know why. gateway -> operator."""

    request_id: str
    """`X-Request-Id` of the answer; a request that moves, or whose prefill leg fails, has several decisions."""
    decided_at_s: float
    """Unix time."""
    engine: str
    prefill: str | None
    path: str
    reason: str
    detail: str
    """What made the difference, in words; may be empty."""
    num_prompt_tokens: int | None
    num_cached_tokens: int
    prompt_hash: str | None
    """Name of the prompt's last whole block, as `GET /admin/state` takes it; None where there is none or it is not known."""
    local: LocalCost
    """Of the chosen engine by itself."""
    remote: RemoteCost | None
    """Of the best prefill engine with it, where one was weighed."""


class RoutingView(Struct, frozen=True, kw_only=True):
    """gateway -> operator: GET /admin/routing."""

    policy: str
    prefill_seconds_per_token: dict[str, float]
    """As observed, by kind of pool; a slow one that was not observed for a while fades towards the others', to be tried again."""
    assumed_seconds_per_token: dict[str, float]
    """What estimates take instead for kinds without an observation: as fast as the others, else a mere guess."""
    num_measured_prefills: dict[str, int]
    """Observations by kind. Each moves the estimate by a tenth, so after twenty the guess they began with hardly counts."""
    transfer_bytes_per_second: float
    num_indexed_blocks: dict[str, int]
    """KV blocks each engine is known to hold."""
    decisions: list[Decision]
    """The latest last; where a request id was asked for, those of that request alone."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes."""

    request_id: str
    engine: Engine
    prefill: Engine | None
    """Set for `remote_prefill` only."""
    path: Path
    reason: str
    """One word of a small set; a metric label."""
    num_prompt_tokens: int | None
    num_cached_tokens: int
    """Prompt tokens the engine is expected to report as cached, its own cache alone."""
    expected: ExpectedPrefill
    """Where the prompt is prefilled; of 0 tokens where it is not known."""
    num_queued_tokens: int
    """To compute there before."""
    prompt_hash: str | None
    """Name of the prompt's last whole block."""


@dataclass(frozen=True, slots=True)
class _Choice:
    path: Path
    reason: str
    detail: str = ""
    prefill: Engine | None = None
    remote: RemoteCost | None = None
    num_prefill_tokens: int = 0


class Router:
    """Chooses, and learns from what came of it."""

    def __init__(self, fleet: Fleet, index: KvIndex, settings: RoutingSettings, metrics: RoutingMetrics) -> None:
        self.costs = CostModel()
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        """Newest last."""
        self._fleet = fleet
        self._index = index
        self._settings = settings
        self._policy = make_policy(settings.policy)
        self._metrics = metrics

    def choose(self, prompt: Prompt, exclude: Collection[Engine] = (), *, request_id: str = "") -> Route | None:
        """None where no engine can answer. Whoever takes the route says with `forget` when it is over."""
        chains = _Chains(prompt)
        candidates = [
            self._candidate(engine, prompt, chains)
            for engine in self._fleet.engines
            if engine.can_answer and engine not in exclude
        ]
        if not candidates:
            return None
        candidate = self._policy.choose(candidates, prompt.session)
        choice = self._weigh(candidate, prompt, chains, exclude)
        num_tokens = None if prompt.token_ids is None else len(prompt.token_ids)
        return self._settle(request_id, candidate, choice, num_tokens, chains.prompt_hash(candidate.engine))

    def view(self, request_id: str | None = None) -> RoutingView:
        """Why requests went where they went: all that are remembered, or the one of that id."""
        observed = self.costs.observed_seconds_per_token()
        kinds = sorted({engine.kind for engine in self._fleet.engines})
        return RoutingView(
            policy=self._settings.policy,
            prefill_seconds_per_token=observed,
            assumed_seconds_per_token={kind: self.costs.seconds_per_token(kind) for kind in kinds if kind not in observed},
            num_measured_prefills=dict(self.costs.num_measured),
            transfer_bytes_per_second=self.costs.bytes_per_second,
            num_indexed_blocks={engine.id: self._index.num_held(engine.id) for engine in self._fleet.engines},
            decisions=[one for one in self.decisions if request_id is None or one.request_id == request_id],
        )

    def degrade(self, route: Route, why: str) -> Route:
        """The same engine, which now prefills by itself, because the prefill leg failed."""
        candidate = Candidate(route.engine, route.num_cached_tokens, self._local_cost(route.engine, route))
        self.forget(route)
        choice = _Choice("recompute", "prefill_failed", why)
        return self._settle(route.request_id, candidate, choice, route.num_prompt_tokens, route.prompt_hash)

    def observe(self, route: Route, *, first_byte_s: float | None) -> None:
        """An answer has begun, that many seconds after it was asked for; None where it came whole, its decoding included."""
        if route.prefill is None and first_byte_s is not None:
            self.observe_prefill(route, first_byte_s)
        self.forget(route)

    def observe_prefill(self, route: Route, prefill_s: float) -> None:
        """The route's prefill is done, so long after it was asked for."""
        self.forget(route)
        if route.num_prompt_tokens is not None:
            expected = route.expected
            self.costs.learn_prefill(expected.engine, prefill_s, expected.num_tokens, route.num_queued_tokens)

    def forget(self, route: Route) -> None:
        """Its prefill is over, however it ended."""
        self.costs.forget(route.expected)

    def judge(self, route: Route, num_cached_tokens: int) -> None:
        """Hold the index's prediction against the cached prompt tokens the engine reports."""
        # With a remote prefill an engine reports the other's cache hits.
        if route.num_prompt_tokens is None or route.prefill is not None:
            return
        error = route.num_cached_tokens - num_cached_tokens
        outcome = "correct" if abs(error) <= _block_size(route.engine) else "over" if error > 0 else "under"
        self._metrics.predictions.labels(outcome).inc()
        self._metrics.predicted_tokens.inc(route.num_cached_tokens)
        self._metrics.reported_tokens.inc(num_cached_tokens)

    def _candidate(self, engine: Engine, prompt: Prompt, chains: _Chains) -> Candidate:
        num_cached = self._num_cached(engine, prompt, chains)
        return Candidate(engine, num_cached, self.costs.local(engine, len(prompt.token_ids or ()) - num_cached))

    def _num_cached(self, engine: Engine, prompt: Prompt, chains: _Chains) -> int:
        status = engine.status
        if prompt.token_ids is None or status is None:
            return 0
        block_size = status.kv.block_size_tokens
        num_held = self._index.count_held(engine.id, chains.of(engine))
        return reusable_tokens(num_held, len(prompt.token_ids), block_size, speculative=status.num_speculative_tokens > 0)

    def _weigh(self, candidate: Candidate, prompt: Prompt, chains: _Chains, exclude: Collection[Engine]) -> _Choice:
        """Whether a prefill engine should do the prefill."""
        alone: Path = "kv_reuse" if candidate.num_cached_tokens else "combined"
        pool = [engine for engine in self._fleet.engines if engine.kind == "prefill"]
        if prompt.token_ids is None:
            return _Choice(alone, "tokens_unknown", prompt.reason)
        num_prompt_tokens = len(prompt.token_ids)
        if limit := _limit_exceeded(candidate.engine, num_prompt_tokens):
            return _Choice(alone, "prompt_too_long", f"the engine takes {limit} tokens and will refuse it")
        if candidate.engine.kind == "combined" or not pool:
            return _Choice(alone, "cached" if candidate.num_cached_tokens else "not_cached")
        if num_prompt_tokens - candidate.num_cached_tokens < MIN_REMOTE_BLOCKS * _block_size(candidate.engine):
            return _Choice(alone, "cached" if candidate.num_cached_tokens else "short_prompt")
        usable = [engine for engine in pool if engine.takes_prefills and engine not in exclude]
        if not usable:
            # Nothing is left to weigh; what a prefill engine would have cost depends on how busy and how warm it is.
            return _Choice("recompute", "no_prefill_engine", "no prefill engine takes requests")
        offers = [self._offer(engine, candidate, prompt, chains) for engine in usable]
        offer = min(offers, key=lambda offer: offer.remote.total_s if offer.remote else 0.0)
        remote, local_s = offer.remote, candidate.cost.total_s
        assert remote is not None
        if remote.mismatch:
            return replace(offer, path="recompute", reason="mismatch", detail=remote.mismatch, prefill=None)
        if remote.total_s >= local_s:
            return replace(offer, path=alone, reason="local_cheaper", prefill=None)
        return offer

    def _offer(self, prefill: Engine, candidate: Candidate, prompt: Prompt, chains: _Chains) -> _Choice:
        num_prompt_tokens = len(prompt.token_ids or ())
        num_uncached = num_prompt_tokens - self._num_cached(prefill, prompt, chains)
        remote = self.costs.remote(
            prefill,
            candidate.engine,
            num_uncached_tokens=num_uncached,
            num_prompt_tokens=num_prompt_tokens,
            num_pulled_tokens=num_prompt_tokens - candidate.num_cached_tokens,
        )
        return _Choice("remote_prefill", "remote_cheaper", "", prefill, remote, num_uncached)

    def _settle(
        self, request_id: str, candidate: Candidate, choice: _Choice, num_prompt_tokens: int | None, prompt_hash: str | None
    ) -> Route:
        """Enter a decision everywhere it counts."""
        worker = choice.prefill or candidate.engine
        num_uncached = (num_prompt_tokens or 0) - candidate.num_cached_tokens
        num_queued_tokens = self.costs.queued_tokens(worker)
        route = Route(
            request_id=request_id,
            engine=candidate.engine,
            prefill=choice.prefill,
            path=choice.path,
            reason=choice.reason,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=candidate.num_cached_tokens,
            expected=self.costs.expect(worker, choice.num_prefill_tokens if choice.prefill else max(0, num_uncached)),
            num_queued_tokens=num_queued_tokens,
            prompt_hash=prompt_hash,
        )
        self._metrics.routed.labels(route.path, route.reason).inc()
        self.decisions.append(
            Decision(
                request_id=request_id,
                decided_at_s=time.time(),
                engine=route.engine.id,
                prefill=route.prefill.id if route.prefill else None,
                path=route.path,
                reason=route.reason,
                detail=choice.detail,
                num_prompt_tokens=route.num_prompt_tokens,
                num_cached_tokens=route.num_cached_tokens,
                prompt_hash=prompt_hash,
                local=candidate.cost,
                remote=choice.remote,
            )
        )
        return route

    def _local_cost(self, engine: Engine, route: Route) -> LocalCost:
        return self.costs.local(engine, max(0, (route.num_prompt_tokens or 0) - route.num_cached_tokens))


class _Chains:
    """A prompt's blocks, named once for each block size in use."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._names: dict[int, list[BlockName]] = {}

    def of(self, engine: Engine) -> list[BlockName]:
        """Empty for a prompt the engine refuses as too long: naming its blocks would only hold up other requests."""
        token_ids = self._prompt.token_ids or ()
        if engine.status is None or _limit_exceeded(engine, len(token_ids)):
            return []
        block_size = engine.status.kv.block_size_tokens
        names = self._names.get(block_size)
        if names is None:
            names = self._names[block_size] = prompt_chain(token_ids, block_size, self._prompt.salt)
        return names

    def prompt_hash(self, engine: Engine) -> str | None:
        names = self.of(engine)
        return names[-1].hex() if names else None


def _limit_exceeded(engine: Engine, num_prompt_tokens: int) -> int:
    """The engine's context in tokens, where the prompt is longer; else 0."""
    max_model_len = engine.status.kv.max_model_len if engine.status else 0
    return max_model_len if num_prompt_tokens > max_model_len else 0


def _block_size(engine: Engine) -> int:
    return engine.status.kv.block_size_tokens if engine.status else 0
