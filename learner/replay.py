"""Replay: what the learner remembers. A recent window, a reservoir for each domain, and requests it never trains on.

A request leaves the recent window for its domain's reservoir, where it may replace another one at random, so a domain that
went quiet is not forgotten. Held-out requests go from a recent window to the anchors of their domain in the same way.
All bounds are in completion tokens.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from learner.config import ReplaySettings
from learner.request import CapturedRequest, is_held_out


class TokenWindow:
    """Requests in order of arrival, at most `max_tokens` of them counted in tokens; `add` returns what fell out."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._requests: OrderedDict[str, CapturedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[CapturedRequest]:
        return iter(self._requests.values())

    def add(self, request: CapturedRequest) -> list[CapturedRequest]:
        if request.key in self._requests:
            return []
        self._requests[request.key] = request
        self.num_tokens += request.num_tokens
        fallen = []
        while self.num_tokens > self.max_tokens and len(self._requests) > 1:
            _, oldest = self._requests.popitem(last=False)
            self.num_tokens -= oldest.num_tokens
            fallen.append(oldest)
        return fallen

    def remove(self, keys: Collection[str]) -> None:
        for key in keys:
            removed = self._requests.pop(key, None)
            if removed is not None:
                self.num_tokens -= removed.num_tokens


class Reservoir:
    """A uniform sample of what was offered, for each group, the token budget shared equally by the groups."""

    def __init__(self, max_tokens: int, rng: random.Random) -> None:
        self.max_tokens = max_tokens
        self._rng = rng
        self._groups: dict[str, list[CapturedRequest]] = {}
        self._num_offered: dict[str, int] = {}

    def __iter__(self) -> Iterator[CapturedRequest]:
        return (request for group in self._groups.values() for request in group)

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self)

    def groups(self) -> dict[str, list[CapturedRequest]]:
        return {name: list(requests) for name, requests in self._groups.items()}

    def offer(self, request: CapturedRequest) -> list[CapturedRequest]:
        """Keep the request or not; returns what is kept no longer, itself included."""
        if self.max_tokens <= 0:
            return [request]
        group = self._groups.setdefault(request.group, [])
        offered = self._num_offered[request.group] = self._num_offered.get(request.group, 0) + 1
        budget = self.max_tokens // len(self._groups)
        gone = []
        if sum(kept.num_tokens for kept in group) + request.num_tokens <= budget or not group:
            group.append(request)
        else:
            place = self._rng.randrange(offered)
            gone.append(request if place >= len(group) else group[place])
            if place < len(group):
                group[place] = request
        return gone + self._shrink(budget)

    def remove(self, keys: Collection[str]) -> None:
        for name, group in self._groups.items():
            self._groups[name] = [request for request in group if request.key not in keys]

    def _shrink(self, budget: int) -> list[CapturedRequest]:
        """A new group lowers every group's share."""
        gone = []
        for group in self._groups.values():
            while len(group) > 1 and sum(kept.num_tokens for kept in group) > budget:
                gone.append(group.pop(self._rng.randrange(len(group))))
        return gone


class Replay:
    """Owns all remembered requests. `add` returns the keys that are remembered no longer."""

    def __init__(self, settings: ReplaySettings, vocab_size: int, seed: int) -> None:
        self._settings = settings
        self._rng = random.Random(seed)
        held_out = max(int(settings.recent_tokens * settings.holdout_share), 1)
        anchors = max(int(settings.reservoir_tokens * settings.holdout_share), 1)
        self.recent = TokenWindow(settings.recent_tokens)
        self.reservoir = Reservoir(settings.reservoir_tokens, self._rng)
        self.held_out = TokenWindow(held_out)
        self.anchors = Reservoir(anchors, self._rng)
        self.counts_V = torch.zeros(vocab_size)
        """How often each token was emitted in requests that are trained on."""
        self.num_tokens_distinct = 0
        self._order: list[CapturedRequest] = []
        self._visits: dict[str, int] = {}

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

    def trainable(self) -> Iterator[CapturedRequest]:
        yield from self.recent
        yield from self.reservoir

    def everything(self) -> Iterator[CapturedRequest]:
        yield from self.trainable()
        yield from self.held_out
        yield from self.anchors

    def add(self, request: CapturedRequest) -> list[str]:
        """Remember a request on the side its prompt belongs to."""
        if is_held_out(request.prompt_key, self._settings.holdout_share):
            gone = [lost for old in self.held_out.add(request) for lost in self.anchors.offer(old)]
            return [lost.key for lost in gone]
        self.counts_V += completion_counts(request, self.counts_V.numel())
        self.num_tokens_distinct += request.num_tokens
        gone = [lost for old in self.recent.add(request) for lost in self.reservoir.offer(old)]
        self._order.insert(self._rng.randrange(len(self._order) + 1), request)
        for lost in gone:
            self._visits.pop(lost.key, None)
        return [lost.key for lost in gone]

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

    def drop(self, keys: Collection[str]) -> None:
        """Forget requests that harmed training."""
        self.recent.remove(keys)
        self.reservoir.remove(keys)
        self._order = [request for request in self._order if request.key not in keys]
        for key in keys:
            self._visits.pop(key, None)

    def visits(self) -> dict[str, int]:
        return dict(self._visits)

    def restore_visits(self, visits: dict[str, int]) -> None:
        self._visits = {request.key: visits.get(request.key, 0) for request in self.trainable()}

    def _start_pass(self) -> bool:
        limit = self._settings.max_passes
        self._order = [request for request in self.trainable() if self._visits.get(request.key, 0) < limit]
        self._rng.shuffle(self._order)
        return bool(self._order)


def completion_counts(request: CapturedRequest, vocab_size: int) -> Tensor:
    """How often each token was emitted in a request, [V]."""
    rows = request.rows
    emitted = rows.next_tokens_T[rows.positions_T >= rows.num_prompt_tokens - 1]
    return torch.bincount(emitted[emitted >= 0], minlength=vocab_size)[:vocab_size].float()
