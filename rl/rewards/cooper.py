"""A reward model that is trained along with the policy: Cooper (arXiv 2508.05613), with a program in place of the assistant.

    1. the policy's answers are scored by the model;
    2. of those the rule accepts, each is corrupted, and the model learns the difference;
    3. the rule watches: its verdict stays in the record with weight 0, and disagreement is an alarm.

A model that stands still is found out by the policy within a run; one that learns from the policy's own newest answers is not as
easily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rl.rewards.audit import Audit, Verdict, audit
from rl.rewards.claims import Claim
from rl.rewards.config import RewardModelSettings
from rl.rewards.corruption import corrupt
from rl.rewards.reward_model import RewardModel
from rl.trajectory import RewardPart
from wire.errors import TrainerError

_NUM_STEPS = "num_steps"

Rule = Callable[[Claim], bool]


class CooperReport(Struct, frozen=True, kw_only=True, tag="cooper_report"):
    """Of one step of the reward model."""

    num_right: int
    """Answers the rule accepts."""
    num_pairs: int
    """Of them, those that could be corrupted."""
    loss: float
    """Before the update, nats per pair; 0 without pairs."""
    audit: Audit


class Cooper:
    """rule: exact where it accepts. The seed decides how answers are corrupted."""

    def __init__(self, settings: RewardModelSettings, rule: Rule, *, seed: int) -> None:
        self.model = RewardModel(settings)
        self._settings, self._rule = settings, rule
        self._seed = seed
        self._num_steps = 0

    def parts(self, claim: Claim, *, rule_weight: float = 0.0) -> tuple[RewardPart, RewardPart]:
        """The model's verdict and the rule's."""
        return (
            RewardPart("model", self.model.score(claim), self._settings.weight),
            RewardPart("rule", float(self._rule(claim)), rule_weight),
        )

    def learn(self, claims: Sequence[Claim]) -> CooperReport:
        """One step on the policy's newest answers; the audit is of the model that scored them, before the step."""
        verdicts = [Verdict(self._rule(claim), self.model.score(claim)) for claim in claims]
        right = [claim for claim, verdict in zip(claims, verdicts, strict=True) if verdict.is_right]
        generator = np.random.default_rng((self._seed, self._num_steps))
        pairs = [(claim, wrong) for claim in right if (wrong := self._corrupted(claim, generator)) is not None]
        self._num_steps += 1
        return CooperReport(
            num_right=len(right),
            num_pairs=len(pairs),
            loss=self.model.update(pairs),
            audit=audit(verdicts, self._settings.max_disagreement),
        )

    def state(self) -> bytes:
        """For a checkpoint; `load` goes on from it exactly."""
        return save(self.model.tensors() | {_NUM_STEPS: np.asarray(self._num_steps)})

    def load(self, state: bytes) -> None:
        """Raises TrainerError where it is no state of a Cooper, and has changed nothing then."""
        try:
            tensors = load(state)
            num_steps = int(tensors.pop(_NUM_STEPS))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise TrainerError(f"{len(state)} bytes are no state of a reward model: {error}; begin it anew") from error
        self.model.load(tensors)
        self._num_steps = num_steps

    def _corrupted(self, claim: Claim, generator: np.random.Generator) -> Claim | None:
        def is_right(completion: str) -> bool:
            return self._rule(Claim(claim.question, claim.reference, completion))

        return corrupt(claim, is_right, generator)
