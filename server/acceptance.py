"""AcceptanceLedger: what the engines' cumulative counters add up to, per draft version, tenant and domain.

It turns counters that restart with their engine into totals that do not, keeps a recent window beside them, and bounds
how many tenants, domains and versions it remembers. It knows no sockets and no metrics library.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from server.tally import Tally, total
from wire.messages import AcceptanceCount, EngineStats

OTHER = "other"
MAX_VERSIONS = 16
BATCHES_PER_WINDOW = 10


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """What acceptance is counted by."""

    draft_version: int
    tenant: str
    domain: str


class LabelBound:
    """The first `limit` distinct values keep their name; later ones are `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def admit(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value


@dataclass(slots=True)
class Window:
    """The newest tallies of one slice, at least `min_steps` verify steps of them where there were so many."""

    min_steps: int
    tally: Tally = field(default_factory=Tally)
    _batches: deque[Tally] = field(default_factory=deque)

    @property
    def batches(self) -> list[Tally]:
        """The window in pieces of at least a tenth of `min_steps`, in order of time; the one that is not full is left out."""
        return list(self._batches)[:-1]

    def add(self, part: Tally) -> None:
        if self._batches and self._batches[-1].num_verify_steps < self.min_steps / BATCHES_PER_WINDOW:
            self._batches[-1] += part
        else:
            self._batches.append(part)
        self.tally += part
        while self.tally.num_verify_steps - self._batches[0].num_verify_steps >= self.min_steps:
            self.tally -= self._batches.popleft()


@dataclass(frozen=True, slots=True)
class _Seen:
    """Counters of one engine as last received."""

    epoch: str
    tallies: dict[Slice, Tally]
    num_captured_rows: int
    num_dropped_rows: dict[str, int]


_NOTHING_SEEN = _Seen("", {}, 0, {})


class AcceptanceLedger:
    """Fed with every EngineStats; read by the canary, the metrics and the status page."""

    def __init__(self, *, max_label_values: int, window_steps: int) -> None:
        self.totals: dict[Slice, Tally] = {}
        self.num_captured_rows = 0
        self.num_dropped_rows: Counter[str] = Counter()
        self._num_forgotten_tokens = 0
        self._window_steps = window_steps
        self._recent: dict[Slice, Window] = {}
        self._seen: dict[str, _Seen] = {}
        self._tenants = LabelBound(max_label_values)
        self._domains = LabelBound(max_label_values)
        # Both bounds alone would still allow their product.
        self._pairs = LabelBound(4 * max_label_values)

    def ingest(self, stats: EngineStats, *, keep_versions: frozenset[int] = frozenset()) -> None:
        """Add what changed since this engine's last message. Versions in `keep_versions` are never forgotten."""
        last = self._seen.get(stats.engine_id, _NOTHING_SEEN)
        if last.epoch != stats.engine_epoch:
            last = _NOTHING_SEEN
        tallies = self._bounded(stats.acceptance)
        for key, tally in tallies.items():
            change = tally - last.tallies.get(key, Tally())
            self._add(key, change if change.is_possible else tally)
        self.num_captured_rows += _change(stats.num_captured_rows, last.num_captured_rows)
        for reason, count in stats.num_dropped_rows.items():
            self.num_dropped_rows[reason] += _change(count, last.num_dropped_rows.get(reason, 0))
        self._seen[stats.engine_id] = _Seen(stats.engine_epoch, tallies, stats.num_captured_rows, dict(stats.num_dropped_rows))
        self._forget_old_versions(keep_versions | {stats.draft_version})

    def recent(self) -> dict[Slice, Tally]:
        """The recent window of every slice."""
        return {key: window.tally for key, window in self._recent.items()}

    def forget_recent(self) -> None:
        """What was accepted under another target tells nothing of the one that serves now; totals stay."""
        self._recent.clear()

    def recent_of(self, version: int) -> Tally:
        return total(window.tally for key, window in self._recent.items() if key.draft_version == version)

    def recent_by_domain(self, version: int) -> dict[str, Tally]:
        """The recent window of one version, tenants summed."""
        return _by_domain({key: window.tally for key, window in self._recent.items()}, version)

    def batches_of(self, version: int) -> list[list[Tally]]:
        """The recent window of each slice of one version, in pieces."""
        return [window.batches for key, window in self._recent.items() if key.draft_version == version]

    def totals_by_domain(self, version: int) -> dict[str, Tally]:
        """Everything one version did since the gateway started, tenants summed."""
        return _by_domain(self.totals, version)

    def totals_by_version(self) -> dict[int, Tally]:
        """Everything each remembered version did, tenants and domains summed."""
        versions: dict[int, Tally] = defaultdict(Tally)
        for key, tally in self.totals.items():
            versions[key.draft_version] += tally
        return dict(versions)

    @property
    def num_verified_tokens(self) -> int:
        return self._num_forgotten_tokens + sum(tally.num_emitted for tally in self.totals.values())

    def _bounded(self, counts: list[AcceptanceCount]) -> dict[Slice, Tally]:
        tallies: dict[Slice, Tally] = defaultdict(Tally)
        for count in counts:
            tenant, domain = self._tenants.admit(count.tenant), self._domains.admit(count.domain)
            if self._pairs.admit(f"{tenant}\0{domain}") == OTHER:
                tenant = domain = OTHER
            tallies[Slice(count.draft_version, tenant, domain)] += Tally(
                count.num_verify_steps, tuple(count.proposed_per_position), tuple(count.accepted_per_position)
            )
        return dict(tallies)

    def _add(self, key: Slice, change: Tally) -> None:
        if change.num_verify_steps:
            self.totals[key] = self.totals.get(key, Tally()) + change
            self._recent.setdefault(key, Window(self._window_steps)).add(change)

    def _forget_old_versions(self, keep: frozenset[int]) -> None:
        versions = sorted({key.draft_version for key in self.totals}, reverse=True)
        for version in set(versions[MAX_VERSIONS:]) - keep:
            for key in [key for key in self.totals if key.draft_version == version]:
                self._num_forgotten_tokens += self.totals.pop(key).num_emitted
                self._recent.pop(key, None)


def _by_domain(tallies: dict[Slice, Tally], version: int) -> dict[str, Tally]:
    domains: dict[str, Tally] = defaultdict(Tally)
    for key, tally in tallies.items():
        if key.draft_version == version:
            domains[key.domain] += tally
    return dict(domains)


def _change(now: int, before: int) -> int:
    """Growth of a counter; one that went backwards started anew."""
    return now - before if now >= before else now
