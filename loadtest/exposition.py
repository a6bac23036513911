"""Reading Prometheus text, and sums and acceptance out of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

VERIFY_STEPS = "paceline_verify_steps_total"
ACCEPTED_TOKENS = "paceline_accepted_tokens_total"

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Acceptance:
    """Cumulative acceptance of one domain by draft version. Subtract two to get what lies between."""

    steps: dict[str, float]
    accepted: dict[str, float]

    def __sub__(self, earlier: Acceptance) -> Acceptance:
        """Versions that are exported no more count for nothing: only what is there now can have grown."""
        return Acceptance(
            {version: count - earlier.steps.get(version, 0.0) for version, count in self.steps.items()},
            {version: count - earlier.accepted.get(version, 0.0) for version, count in self.accepted.items()},
        )

    @property
    def acceptance_length(self) -> float | None:
        """AL; None where nothing was verified."""
        num_steps = sum(self.steps.values())
        return 1.0 + sum(self.accepted.values()) / num_steps if num_steps > 0 else None


def parse(text: str) -> Iterator[Sample]:
    """Every sample of an exposition; lines that are none are skipped."""
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            yield Sample(name, dict(_LABEL.findall(labels or "")), float(value))
        except ValueError:
            continue


def total(text: str, name: str, **labels: str) -> float | None:
    """The sum over a metric's series that carry these labels; None where there is none."""
    values = [sample.value for sample in parse(text) if sample.name == name and labels.items() <= sample.labels.items()]
    return sum(values) if values else None


def acceptance(text: str, *, domain: str) -> Acceptance:
    """Of a domain, over all tenants and positions."""
    found = Acceptance({}, {})
    by_name = {VERIFY_STEPS: found.steps, ACCEPTED_TOKENS: found.accepted}
    for sample in parse(text):
        counts = by_name.get(sample.name)
        if counts is not None and sample.labels.get("domain") == domain:
            version = sample.labels.get("draft_version", "")
            counts[version] = counts.get(version, 0.0) + sample.value
    return found
