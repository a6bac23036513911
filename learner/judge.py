"""Judge: compares the learner's weights with the active draft on requests neither has seen, each counted once.

In every round the requests that arrived since the last one are scored by the active draft and by the weights as they are then,
before they teach. So the evidence is about the learner's weights over time; whether the very last ones may serve is then asked
of them alone, on the newest requests and on the anchors of every domain (`learner/gate.py`).

Where no request to a new prompt has come since the last round and the learner has learned from a quarter more tokens than when it
was so last, all unseen ones are asked again. Such rounds share a part of the chance of an error, round n as much as 1 / (n (n + 1)) of
it (Bonferroni: they depend on one another); because they grow rarer, the share does not become too small to be of use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafter.draft import Draft
from learner.config import GateSettings
from learner.evaluate import Evaluator, Score
from learner.gate import AnchorScores, decide
from learner.ledger import Ledger
from learner.published import PublishedDrafts
from learner.replay import Replay
from learner.request import CapturedRequest
from learner.wager import Wager
from wire.artifact import GateReport

_RECOUNT_SHARE = 0.25
"""Of the chance of an error, for rounds where no request has arrived."""
_RECOUNT_GROWTH = 1.25
"""From one such round to the next, of the tokens learned from."""


class Judge:
    """Owns the evidence for the learner's weights against the draft that is active."""

    def __init__(self, evaluator: Evaluator, published: PublishedDrafts, settings: GateSettings) -> None:
        self._evaluator, self._published, self._settings = evaluator, published, settings
        self._level = 1.0 - settings.confidence
        self.ledger = Ledger((1.0 - _RECOUNT_SHARE) * self._level)
        self.num_recounts = 0
        """Rounds in which unseen requests were asked again, since that draft is active."""
        self._num_tokens_at_recount = 0
        self.against: int | None = None
        """The active version the evidence is about."""
        self._when_counted: dict[str, Score] = {}
        """Of the newest requests, by key, under the weights of the round that scored them last."""

    def begin(self, active_version: int, replay: Replay) -> None:
        """A round begins; the evidence starts anew where another draft is active than in the last one."""
        if active_version != self.against:
            self.against, self.num_recounts, self._num_tokens_at_recount = active_version, 0, 0
            self.ledger.restart((1.0 - _RECOUNT_SHARE) * self._level)
        self.ledger.keep_only({request.prompt_key for request in replay.everything()})

    def resume(self, against: int, wager: Wager, num_recounts: int, replay: Replay) -> None:
        """Go on from the evidence of an earlier process, which has counted all the replay holds."""
        self.against, self.num_recounts = against, num_recounts
        self.ledger.resume(wager, replay.everything())

    def judge(
        self,
        candidate: Draft,
        window: Sequence[CapturedRequest],
        incumbent: Mapping[str, Score],
        anchors: Mapping[str, Sequence[CapturedRequest]],
        *,
        num_tokens: int,
    ) -> tuple[GateReport, dict[str, Score]]:
        """The verdict, and all scores of the candidate it took, by request key.

        `window` are the newest unseen requests, newest first, `incumbent` the active draft's scores of them, `anchors` are by domain,
        and the candidate has learned from `num_tokens`.
        """
        new = self.ledger.uncounted(window)
        recount_level = None if new else self._next_recount_level(num_tokens)
        scores = self._evaluator.scores(candidate, new if recount_level is None else window)
        self.ledger.count(new[::-1], scores, incumbent)
        if self.ledger.wager.is_won:
            scores |= self._evaluator.scores(candidate, [request for request in window if request.key not in scores])
        known = self._when_counted | scores
        self._when_counted = {request.key: known[request.key] for request in window if request.key in known}

        def anchor_scores() -> list[AnchorScores]:
            asked = [request for group in anchors.values() for request in group]
            scores.update(self._evaluator.scores(candidate, asked))
            before = self._published.scores(self.against, asked) if self.against is not None else None
            return [AnchorScores(name, _of(group, scores), _of(group, before or {})) for name, group in anchors.items()]

        report = decide(
            self.ledger.wager,
            self._when_counted,
            incumbent,
            anchor_scores,
            self._settings,
            recount_level=recount_level,
        )
        return report, scores

    def _next_recount_level(self, num_tokens: int) -> float | None:
        """None where it is too early to ask again."""
        if num_tokens < _RECOUNT_GROWTH * self._num_tokens_at_recount:
            return None
        self.num_recounts += 1
        self._num_tokens_at_recount = num_tokens
        return _RECOUNT_SHARE * self._level / (self.num_recounts * (self.num_recounts + 1))


def _of(requests: Sequence[CapturedRequest], scores: Mapping[str, Score]) -> dict[str, Score]:
    """The scores of these requests."""
    return {request.key: scores[request.key] for request in requests if request.key in scores}
