"""AcceptanceCounter: cumulative proposals and acceptances by draft version, tenant and domain, every request counted.

Cheap enough to run at capture rate 0: it is what the canary and the metrics see. Written by the step thread, read by
the channel's thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from wire.messages import AcceptanceCount

_MAX_VERSIONS = 16
_MAX_LABELS = 128
_OTHER = "other"


class AcceptanceCounter:
    """Bounded: the 16 draft versions that served last, 128 tenant and domain pairs, further pairs count as `other`."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._lock = threading.Lock()
        self._labels: set[tuple[str, str]] = set()
        self._versions: OrderedDict[int, None] = OrderedDict()
        """The version that served longest ago first."""
        self._steps: dict[tuple[int, str, str], int] = {}
        self._proposed: dict[tuple[int, str, str], list[int]] = {}
        self._accepted: dict[tuple[int, str, str], list[int]] = {}

    def add(self, draft_version: int, tenant: str, domain: str, num_proposed: int, num_accepted: int) -> None:
        """Count one verify step of one request."""
        with self._lock:
            key = (draft_version, *self._bounded(tenant, domain))
            self._versions[draft_version] = None
            self._versions.move_to_end(draft_version)
            if key not in self._steps:
                self._open(key)
            self._steps[key] += 1
            for position in range(num_proposed):
                self._proposed[key][position] += 1
            for position in range(num_accepted):
                self._accepted[key][position] += 1

    def snapshot(self) -> list[AcceptanceCount]:
        with self._lock:
            return [
                AcceptanceCount(
                    draft_version=key[0],
                    tenant=key[1],
                    domain=key[2],
                    num_verify_steps=num_steps,
                    proposed_per_position=list(self._proposed[key]),
                    accepted_per_position=list(self._accepted[key]),
                )
                for key, num_steps in self._steps.items()
            ]

    def _bounded(self, tenant: str, domain: str) -> tuple[str, str]:
        if (tenant, domain) in self._labels:
            return tenant, domain
        if len(self._labels) >= _MAX_LABELS:
            return _OTHER, _OTHER
        self._labels.add((tenant, domain))
        return tenant, domain

    def _open(self, key: tuple[int, str, str]) -> None:
        while len(self._versions) > _MAX_VERSIONS:
            oldest, _ = self._versions.popitem(last=False)
            for known in [known for known in self._steps if known[0] == oldest]:
                for table in (self._steps, self._proposed, self._accepted):
                    table.pop(known)
        self._steps[key] = 0
        self._proposed[key] = [0] * self._max_depth
        self._accepted[key] = [0] * self._max_depth
