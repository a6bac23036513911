"""Ledger: which requests were counted in the comparison of one draft with the active one, and what they add up to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from learner.evaluate import Score
from learner.request import CapturedRequest
from learner.wager import Wager


class Ledger:
    """A wager and the prompts it has counted, each of them once for good: the same prompt again is no new evidence."""

    def __init__(self, level: float) -> None:
        self.wager = Wager(level)
        self._counted: set[str] = set()

    def restart(self, level: float) -> None:
        """Another draft is active: nothing is known of the comparison with it. What was counted stays counted."""
        self.wager = Wager(level)

    def resume(self, wager: Wager, counted: Iterable[CapturedRequest]) -> None:
        """Go on from a wager that has counted all these requests; anew where it was about another level."""
        self._counted.update(request.prompt_key for request in counted)
        if wager.level == self.wager.level:
            self.wager = wager

    def pass_over(self, requests: Iterable[CapturedRequest]) -> None:
        """These have chosen which draft is compared here, so they are no evidence for it."""
        self._counted.update(request.prompt_key for request in requests)

    def keep_only(self, prompt_keys: Collection[str]) -> None:
        """Forget prompts of requests that are remembered no longer."""
        self._counted.intersection_update(prompt_keys)

    def uncounted(self, requests: Iterable[CapturedRequest]) -> list[CapturedRequest]:
        """Those whose prompt was not counted yet, in the same order, one of each prompt."""
        found: dict[str, CapturedRequest] = {}
        for request in requests:
            if request.prompt_key not in self._counted:
                found.setdefault(request.prompt_key, request)
        return list(found.values())

    def count(self, requests: Sequence[CapturedRequest], draft: Mapping[str, Score], active: Mapping[str, Score]) -> None:
        """Count these requests in this order. Scores are by request key; what could not be scored tells nothing."""
        self._counted.update(request.prompt_key for request in requests)
        for key in (request.key for request in requests):
            if key in draft and key in active:
                num_anchors = active[key].num_anchors
                self.wager.count((draft[key].total_length - active[key].total_length) / num_anchors, num_anchors)
