"""Replay: what the learner remembers. A recent window, a reservoir for each domain, and requests it never trains on.

The newest requests judge before they teach: no draft has seen them, so they are evidence of what the traffic is now, of which the
held-out tenth alone would tell many times later. From there they go to the recent window, early on as soon as the gate has
counted them. A request leaves the recent window for its domain's reservoir, where it may replace another one at random, so a domain that
went quiet is not forgotten. Held-out requests go from a recent window to the anchors of their domain in the same way.
All bounds are in completion tokens, and with them in rows (`CapturedRequest.size_tokens`).

Shape letters: T rows, V target vocabulary.
"""

from __future__ import annotations

import bisect
import random
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafter.vocabulary import SeenTokens
from learner.config import ReplaySettings
from learner.request import CapturedRequest, is_held_out

OTHER_GROUP = "other"
_FEWEST_DOMAIN_TOKENS = 1000
_FRESH_SHARE, _COUNTED_SHARE = 0.5, 0.1
"""Of what has come so far, that is fresh, and that stays so once it is counted: a young draft learns from nearly all there is."""


class TokenWindow:
    """Requests in order of arrival, at most `max_tokens` of them counted in tokens; `add` returns what fell out.

    `num_tokens` are completion tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._size_tokens = 0
        self._requests: OrderedDict[str, CapturedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[CapturedRequest]:
        return iter(self._requests.values())

    def add(self, request: CapturedRequest) -> list[CapturedRequest]:
        """Takes a request whose key is new here; the newest one stays, however large it is."""
        self._requests[request.key] = request
        self._count(request, 1)
        return self.shrink(self.max_tokens)

    def shrink(self, num_tokens: int) -> list[CapturedRequest]:
        """Lets the oldest ones fall until so many tokens are left, or the newest request alone; returns them."""
        fallen = []
        while self._size_tokens > num_tokens and len(self._requests) > 1:
            _, oldest = self._requests.popitem(last=False)
            self._count(oldest, -1)
            fallen.append(oldest)
        return fallen

    def remove(self, keys: Collection[str]) -> None:
        for key in keys:
            removed = self._requests.pop(key, None)
            if removed is not None:
                self._count(removed, -1)

    def _count(self, request: CapturedRequest, sign: int) -> None:
        self.num_tokens += sign * request.num_tokens
        self._size_tokens += sign * request.size_tokens


@dataclass
class _Group:
    """A sample of one group. Each request offered draws a priority; the lowest ones stay, so all had the same chance."""

    requests: list[tuple[float, CapturedRequest]] = field(default_factory=list)
    """By ascending priority."""
    limit: float = 1.0
    """The lowest priority that was dropped: from it on nothing enters, however much room there is."""
    size_tokens: int = 0

    def insert(self, priority: float, request: CapturedRequest) -> None:
        bisect.insort(self.requests, (priority, request), key=lambda entry: entry[0])
        self.size_tokens += request.size_tokens

    def drop_last(self) -> CapturedRequest:
        self.limit, request = self.requests.pop()
        self.size_tokens -= request.size_tokens
        return request

    def remove(self, keys: Collection[str]) -> None:
        self.requests = [(priority, request) for priority, request in self.requests if request.key not in keys]
        self.size_tokens = sum(request.size_tokens for _, request in self.requests)


class Reservoir:
    """A uniform sample of what was offered, for each group, and never more than `max_tokens` in all.

    The largest group gives way, so groups with much traffic have equal shares and the others keep all they have. Labels come
    from clients: over `max_groups` of them the rest share the group `other`. A group that lost its last request is forgotten.
    """

    def __init__(self, max_tokens: int, max_groups: int, rng: random.Random) -> None:
        self.max_tokens = max_tokens
        self._max_groups = max_groups
        self._rng = rng
        self._groups: dict[str, _Group] = {}

    def __iter__(self) -> Iterator[CapturedRequest]:
        return (request for group in self._groups.values() for _, request in group.requests)

    @property
    def num_tokens(self) -> int:
        """Completion tokens."""
        return sum(request.num_tokens for request in self)

    def groups(self) -> dict[str, list[CapturedRequest]]:
        """What is kept by group; the first ones of a group are a uniform sample too."""
        return {name: [request for _, request in group.requests] for name, group in self._groups.items()}

    def offer(self, request: CapturedRequest) -> list[CapturedRequest]:
        """Keep the request or not; returns what is kept no longer, itself included."""
        name, priority = self._group_of(request), self._rng.random()
        known = self._groups.get(name)
        if request.size_tokens > self.max_tokens or (known is not None and priority >= known.limit):
            return [request]
        self._groups.setdefault(name, _Group()).insert(priority, request)
        gone = []
        while sum(group.size_tokens for group in self._groups.values()) > self.max_tokens:
            gone.append(self._largest().drop_last())
            self._forget_empty()
        return gone

    def remove(self, keys: Collection[str]) -> None:
        for group in self._groups.values():
            group.remove(keys)
        self._forget_empty()

    def _group_of(self, request: CapturedRequest) -> str:
        num_named = len(self._groups.keys() - {OTHER_GROUP})
        return request.group if request.group in self._groups or num_named < self._max_groups else OTHER_GROUP

    def _largest(self) -> _Group:
        """Of equals the newest, so that a new label does not push out a quiet one."""
        return max(reversed(self._groups.values()), key=lambda group: group.size_tokens)

    def _forget_empty(self) -> None:
        self._groups = {name: group for name, group in self._groups.items() if group.requests}


class Replay:
    """Owns all remembered requests, one for each key. `add` returns the keys that are remembered no longer."""

    def __init__(self, settings: ReplaySettings, vocab_size: int, seed: int) -> None:
        self._settings = settings
        self._rng = random.Random(seed)
        held_out = max(int(settings.recent_tokens * settings.holdout_share), 1)
        anchors = max(int(settings.reservoir_tokens * settings.holdout_share), 1)
        self.fresh = TokenWindow(1)
        self.recent = TokenWindow(settings.recent_tokens)
        self.reservoir = Reservoir(settings.reservoir_tokens, settings.max_groups, self._rng)
        self.held_out = TokenWindow(held_out)
        self.anchors = Reservoir(anchors, settings.max_groups, self._rng)
        self.counts_V = torch.zeros(vocab_size)
        """How often each token was emitted in requests that are trained on."""
        self.num_tokens_distinct = 0
        self._order: list[CapturedRequest] = []
        self._visits: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return any(request.key == key for request in self.everything())

    @property
    def num_requests(self) -> int:
        return sum(1 for _ in self.trainable())

    @property
    def num_tokens(self) -> int:
        return self.recent.num_tokens + self.reservoir.num_tokens

    @property
    def oldest_s(self) -> float:
        """Capture time of the oldest trainable request, Unix seconds; 0 without one."""
        return min((request.captured_at_s for request in self.trainable()), default=0.0)

    def evidence(self) -> list[CapturedRequest]:
        """What no draft was trained on, newest first: held-out requests, and fresh ones to prompts that taught nothing yet."""
        taught = {request.prompt_key for request in self.trainable()}
        unseen = [*self.held_out, *(request for request in self.fresh if request.prompt_key not in taught)]
        return sorted(unseen, key=lambda request: request.captured_at_s, reverse=True)

    def trainable(self) -> Iterator[CapturedRequest]:
        """All but the evidence of the gate."""
        yield from self.recent
        yield from self.reservoir

    def everything(self) -> Iterator[CapturedRequest]:
        yield from self.trainable()
        yield from self.fresh
        yield from self.held_out
        yield from self.anchors

    def add(self, request: CapturedRequest) -> list[str]:
        """Remember a request, whose key is new here, on the side its prompt belongs to."""
        if is_held_out(request.prompt_key, self._settings.holdout_share):
            gone = [lost for old in self.held_out.add(request) for lost in self.anchors.offer(old)]
            return [lost.key for lost in gone]
        self.counts_V += token_counts([request], self.counts_V.numel())
        self.num_tokens_distinct += request.num_tokens
        self.fresh.max_tokens = self._fresh_tokens(_FRESH_SHARE)
        is_too_large = request.size_tokens > self.fresh.max_tokens
        released = [request] if is_too_large else self.fresh.add(request)
        return [key for old in released for key in self._teach_with(old)]

    def note_counted(self) -> list[str]:
        """The gate has counted what is fresh, so that more of it can teach. Returns the keys that are remembered no longer."""
        released = self.fresh.shrink(self._fresh_tokens(_COUNTED_SHARE))
        return [key for old in released for key in self._teach_with(old)]

    def _fresh_tokens(self, share: float) -> int:
        return min(self._settings.fresh_tokens, int(share * self.num_tokens_distinct))

    def _teach_with(self, request: CapturedRequest) -> list[str]:
        """A request that is fresh no longer is drawn from now on."""
        gone = [lost for old in self.recent.add(request) for lost in self.reservoir.offer(old)]
        self._order.insert(self._rng.randrange(len(self._order) + 1), request)
        self._forget_plans({lost.key for lost in gone})
        return [lost.key for lost in gone]

    def domain_tokens(self) -> dict[str, SeenTokens]:
        """What was emitted, by group; of the largest groups, those that tell enough to choose tokens by."""
        groups: dict[str, list[CapturedRequest]] = {}
        for request in self.trainable():
            groups.setdefault(request.group, []).append(request)
        sizes = {name: sum(request.num_tokens for request in group) for name, group in groups.items()}
        largest = sorted(sizes, key=lambda name: -sizes[name])[: self._settings.max_groups]
        telling = [name for name in largest if sizes[name] >= _FEWEST_DOMAIN_TOKENS]
        return {name: seen_tokens(groups[name], self.counts_V.numel()) for name in telling}

    def draw(self, num_tokens: int) -> list[CapturedRequest]:
        """Requests of at least `num_tokens` in all, in passes: each is drawn once before one is drawn again.

        Empty when every request has been visited `max_passes` times: more passes would only fit noise.
        """
        drawn: list[CapturedRequest] = []
        total = 0
        while total < num_tokens:
            if not self._order and not self._start_pass():
                break
            request = self._order.pop()
            if self._visits.get(request.key, 0) >= self._settings.max_passes:
                continue
            self._visits[request.key] = self._visits.get(request.key, 0) + 1
            drawn.append(request)
            total += request.num_tokens
        return drawn

    def captured_before(self, time_s: float) -> set[str]:
        """Keys of the requests captured before that Unix time."""
        return {request.key for request in self.everything() if request.captured_at_s < time_s}

    def drop(self, keys: Collection[str]) -> None:
        """Forget requests, on whichever side they are."""
        self.fresh.remove(keys)
        self.recent.remove(keys)
        self.reservoir.remove(keys)
        self.held_out.remove(keys)
        self.anchors.remove(keys)
        self._forget_plans(keys)

    def visits(self) -> dict[str, int]:
        """Passes over each request, by key."""
        return dict(self._visits)

    def restore_visits(self, visits: dict[str, int]) -> None:
        """Go on from these passes; requests that taught before are fresh no longer."""
        for request in [request for request in self.fresh if visits.get(request.key)]:
            self.fresh.remove([request.key])
            self._teach_with(request)
        self._visits = {request.key: visits.get(request.key, 0) for request in self.trainable()}

    def _forget_plans(self, keys: Collection[str]) -> None:
        """Nothing forgotten is drawn again, or its visits and teacher rows would come back and stay."""
        if keys:
            self._order = [request for request in self._order if request.key not in keys]
        for key in keys:
            self._visits.pop(key, None)

    def _start_pass(self) -> bool:
        limit = self._settings.max_passes
        self._order = [request for request in self.trainable() if self._visits.get(request.key, 0) < limit]
        self._rng.shuffle(self._order)
        return bool(self._order)


def emitted_tokens(request: CapturedRequest) -> Tensor:
    """The tokens of a completion that were captured, in order."""
    rows = request.rows
    tokens = rows.next_tokens_T[rows.positions_T >= rows.num_prompt_tokens - 1]
    return tokens[tokens >= 0]


def seen_tokens(requests: Sequence[CapturedRequest], vocab_size: int) -> SeenTokens:
    """What these requests emitted, at least one."""
    counts_V = token_counts(requests, vocab_size)
    said_by_V = torch.bincount(torch.cat([emitted_tokens(request).unique() for request in requests]), minlength=vocab_size)
    return SeenTokens(counts_V, torch.where(said_by_V[:vocab_size] == 1, counts_V, 0))


def token_counts(requests: Sequence[CapturedRequest], vocab_size: int) -> Tensor:
    """How often each token was emitted in these requests, at least one, [V]."""
    return torch.bincount(torch.cat([emitted_tokens(request) for request in requests]), minlength=vocab_size)[
        :vocab_size
    ].float()
