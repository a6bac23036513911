"""What happened to rollouts so far, since this process began; for metrics and the live view."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GeneratorCounts:
    num_groups: int = 0
    """Handed over."""
    num_rollouts: int = 0
    """Finished, in groups that may not be complete yet."""
    num_tokens: int = 0
    """Kept, as they arrived."""
    num_requests: int = 0
    num_lost: int = 0
    """Requests that brought no whole answer: an engine died, the gateway had no place, a stream fell silent."""
    num_bad_answers: int = 0
    """Answers that could not be believed; none of their tokens is used."""
    num_unattributed_tokens: int = 0
    """Drawn again, because nothing says which target made them."""
    num_excluded: int = 0
    """Episodes whose environment failed."""
    num_failed_groups: int = 0
    """Evicted, because an environment or the gateway failed them for good."""
    num_abandoned_groups: int = 0
    """Given up, because the ledger evicted them."""
    num_forks: int = 0
    """Turns for which the chat template rendered what was said before in other tokens."""
