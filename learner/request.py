"""CapturedRequest: one finished request as the learner keeps it, and the stable choice of what is never trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from drafter.batch import RequestRows
from drafter.credit import Outcome

ROWS_PER_TOKEN = 4
"""That one token of the replay's bounds may hold. 132,000 tokens, the default with what is held out, are then at most 528,000 rows,
which are 2.4 GB for a hidden size of 576 (four vectors of two-byte numbers a row)."""


@dataclass(frozen=True)
class CapturedRequest:
    """Rows, and what verification said by anchor position."""

    key: str
    """Unique: engine epoch and request id."""
    prompt_key: str
    tenant: str
    domain: str
    rows: RequestRows
    outcomes: Mapping[int, Outcome]
    captured_at_s: float

    @property
    def num_tokens(self) -> int:
        """Completion tokens that can be learned from."""
        return self.rows.num_completion_rows

    @property
    def size_tokens(self) -> int:
        """What it counts against the bounds of the replay: its completion tokens, or a share of all its rows where that is more.

        Rows are what takes memory. A short answer to a long prompt has hundreds for each completion token.
        """
        return max(self.num_tokens, self.rows.positions_T.numel() // ROWS_PER_TOKEN)

    @property
    def group(self) -> str:
        """The unit of the per-domain reservoirs and anchors."""
        return f"{self.tenant}/{self.domain}"


def is_held_out(prompt_key: str, share: float) -> bool:
    """Whether requests with this prompt are evidence for the gate. By hash, so a repeated prompt never changes sides."""
    digest = hashlib.sha256(prompt_key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
