"""Trainer: one optimiser step after another on a draft core, and the way back when one goes wrong.

It owns the core, the optimiser and the head in training. It does not know where requests come from or who serves.

Shape letters: A anchors, K depths, T rows, D hidden, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.batch import NoAnchor, RequestRows, anchor_rows, pack, require_tokens
from drafter.credit import CreditWeights, batch_verdicts, credit
from drafter.draft import DTYPES, Draft
from drafter.head import Head
from drafter.model import DraftCore
from drafter.objective import BatchLoss, batch_loss
from drafter.objectives import make_objective
from drafter.objectives.base import Lesson
from drafter.target import TargetParts
from drafter.teacher import TeacherRows
from learner.config import TrainSettings
from learner.noise import noisy
from learner.optimiser import DraftOptimiser
from learner.ranks import OneRank
from learner.request import CapturedRequest
from learner.teaching import TeacherCache

_KL_MEMORY = 0.95
_STEPS_BEFORE_JUDGING = 20


class Diverged(ArithmeticError):
    """Loss or gradient is not finite, or the KL to the target exploded; the core was not changed by this step."""


@dataclass(frozen=True)
class StepResult:
    """loss: the objective's; kl: weighted mean KL to the target, nats, whatever the objective; agreement: top-1 agreement with the target by depth; num_tokens: token visits."""

    loss: float
    kl: float
    agreement: list[float]
    num_tokens: int


class Trainer:
    """Trains `draft`'s core in place, in float32; matrix products are in `dtype`. With several `ranks` it is one of equals."""

    def __init__(self, draft: Draft, target: TargetParts, settings: TrainSettings, ranks: OneRank | None = None) -> None:
        self._ranks = ranks or OneRank()
        self.core = draft.core.to(self._ranks.device)
        self._ranks.shard(self.core)
        self.settings = settings
        self.dtype = torch.bfloat16 if settings.bfloat16 else torch.float32
        self.num_steps = 0
        self.num_tokens_seen = 0
        self.mean_kl: float | None = None
        self._target = target
        self._embedding_VD = target.embedding_VD.to(self._ranks.device, self.dtype)
        self._teachers = TeacherCache(temperature=settings.target_temperature)
        self._objective = make_objective(settings.objective, settings.objective_knobs)
        self._credit = CreditWeights(
            accepted=settings.accepted_credit,
            rejected=settings.rejected_credit,
            beyond=settings.beyond_credit,
            unverified=settings.unverified_credit,
            depth_decay=settings.depth_decay,
        )
        self.optimiser = DraftOptimiser(
            self.core,
            muon_rate=settings.muon_rate,
            adamw_rate=settings.adamw_rate,
            momentum=settings.momentum,
            clip_norm=settings.clip_norm,
            ranks=self._ranks,
        )
        self._average = _copy(self.core.state_dict())
        self._train_against(draft.head)

    @property
    def device(self) -> torch.device:
        return self._ranks.device

    @property
    def head(self) -> Head:
        """The head candidates are published with, in the dtype it has on disk."""
        return self._head

    def set_head(self, head: Head) -> None:
        """Train against another vocabulary from now on; the core is the same."""
        self._train_against(head)

    def step(self, requests: Sequence[CapturedRequest], rate_share: float = 1.0) -> StepResult:
        """Learn from a batch with this share of the rates; raises Diverged, and NoAnchor where there is nothing to learn."""
        usable = [request for request in requests if _has_anchor(request.rows)]
        if not usable:
            raise NoAnchor("no request of the batch has an anchor")
        loss, kl, agreement = self.learn(usable, rate_share)
        num_tokens = sum(request.num_tokens for request in usable)
        self.num_tokens_seen += num_tokens
        return StepResult(loss, kl, agreement, num_tokens)

    def learn(
        self, requests: Sequence[CapturedRequest], rate_share: float, weight: float = 1.0
    ) -> tuple[float, float, list[float]]:
        """One step on this rank's share of a batch: (loss, KL, agreement by depth) of the whole batch. All have an anchor.

        `weight` multiplies the share's, 0 for a rank that only computes along. Raises Diverged on every rank or on none.
        """
        ranks = self._ranks
        self.optimiser.zero_grad()
        lesson, totals_S = ranks.attempt(lambda: self._prepare(requests))
        totals_S = ranks.total(totals_S * weight)
        result = ranks.attempt(lambda: batch_loss(self.core, lesson, self._objective, self._embedding_VD, self.dtype, totals_S))
        loss, kl, agreement = self._summed(result, lesson.batch.valid_KA, weight)
        ranks.attempt(lambda: self._check(loss, kl))
        (result.loss * weight).backward()
        norm = self.optimiser.clip()
        if not math.isfinite(norm):
            raise Diverged(f"gradient norm is {norm}")
        self.optimiser.step(rate_share)
        self._objective.follow(result.totals_S)
        self._follow()
        self.num_steps += 1
        self.mean_kl = kl if self.mean_kl is None else _KL_MEMORY * self.mean_kl + (1 - _KL_MEMORY) * kl
        return loss, kl, agreement

    def forget(self, keys: Sequence[str]) -> None:
        """Drop what was cached for requests that are remembered no longer."""
        self._teachers.forget(keys)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of weights and optimiser state in host memory, for a checkpoint; whole, however many ranks there are."""
        state = {f"core.{name}": self._ranks.whole(value) for name, value in self.core.state_dict().items()}
        state |= {f"average.{name}": self._ranks.whole(value) for name, value in self._average.items()}
        state |= {f"optimiser.{name}": value for name, value in self.optimiser.tensors().items()}
        state |= {f"objective.{name}": value for name, value in self._objective.tensors().items()}
        return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over a state made by `tensors`; raises KeyError, RuntimeError or ValueError where it does not fit."""
        weights = self.core.state_dict()
        self.core.load_state_dict({n: self._ranks.part(v, weights[n]) for n, v in _below("core.", tensors).items()})
        average = _below("average.", tensors)
        for name, value in self._average.items():
            if average[name].shape != value.shape:
                raise ValueError(f"average {name} has shape {tuple(average[name].shape)}, needed {tuple(value.shape)}")
        self._average = {n: self._ranks.part(average[n].to(v.device, v.dtype, copy=True), v) for n, v in self._average.items()}
        self.optimiser.load(_below("optimiser.", tensors))
        self._objective.load(_below("objective.", tensors))
        self.mean_kl = None

    def candidate(self) -> Draft:
        """The average of the latest weights, in the precision it would be served with."""
        core = DraftCore(self.core.geometry)
        served = DTYPES[self.core.geometry.dtype]
        core.load_state_dict({name: self._ranks.whole(value).to(served).float() for name, value in self._average.items()})
        return Draft(core, self._head)

    def _train_against(self, head: Head) -> None:
        self._head = head
        self._training_head = head.to(self.dtype, self._ranks.device)

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the average towards the weights; early on it forgets faster than later, when it spans 1 / (1 - decay) steps."""
        decay = min(self.settings.average_decay, self.optimiser.num_steps / (self.optimiser.num_steps + 9))
        for name, value in self.core.state_dict().items():
            self._ranks.local(self._average[name]).lerp_(self._ranks.local(value), 1 - decay)

    def _check(self, loss: float, kl: float) -> None:
        """The KL is judged: the losses of some objectives have no size that could be told from a wrong one."""
        if not (math.isfinite(loss) and math.isfinite(kl)):
            raise Diverged(f"loss is {loss}, the KL to the target {kl}")
        if self.num_steps < _STEPS_BEFORE_JUDGING or self.mean_kl is None:
            return
        limit = exploding_kl(self.mean_kl, self.settings.exploding_factor, self._head.weight_UD.shape[0])
        if kl > limit:
            raise Diverged(f"the KL to the target, {kl:.2f}, is more than {limit:.2f}; its mean is {self.mean_kl:.2f}")

    def _prepare(self, requests: Sequence[CapturedRequest]) -> tuple[Lesson, Tensor]:
        """The lesson, where the products are computed, and what its loss is to be divided by [S]."""
        settings, device = self.settings, self._ranks.device
        batch = pack([request.rows for request in requests], settings.unroll, settings.max_context_rows)
        require_tokens(batch, self._embedding_VD.shape[0])
        batch = noisy(
            batch,
            [request.key for request in requests],
            num_aux=self.core.geometry.num_aux,
            share=settings.noise,
            seed=f"{settings.seed} {self.optimiser.num_steps}",
        )
        verdicts = batch_verdicts(batch, [request.outcomes for request in requests], settings.unroll)
        lesson = Lesson(
            batch=batch.to(device),
            teacher=self._teach(requests, [bounds.row_end - bounds.row_start for bounds in batch.bounds]),
            head=self._training_head,
            verdicts=verdicts.to(device),
            credit_KA=(credit(verdicts, self._credit) * batch.valid_KA).to(device),
        )
        return lesson, self._objective.totals(lesson)

    def _summed(self, result: BatchLoss, valid_KA: Tensor, weight: float) -> tuple[float, float, list[float]]:
        """(loss, KL, agreement by depth) over all ranks."""
        counts_K = valid_KA.sum(1).float()
        losses = torch.stack([result.loss.detach(), result.kl])
        summed = self._ranks.total(torch.cat([losses, result.agreement_K * counts_K, counts_K]) * weight)
        hits_K, counts_K = summed[2:].chunk(2)
        return float(summed[0]), float(summed[1]), (hits_K / counts_K.clamp(min=1)).tolist()

    def _teach(self, requests: Sequence[CapturedRequest], num_rows: Sequence[int]) -> TeacherRows:
        rows = [self._teachers.rows(request, self._training_head) for request in requests]
        return TeacherRows(
            torch.cat([each.expected_TD[-count:] for each, count in zip(rows, num_rows, strict=True)]),
            torch.cat([each.entropy_T[-count:] for each, count in zip(rows, num_rows, strict=True)]),
            torch.cat([each.best_T[-count:] for each, count in zip(rows, num_rows, strict=True)]),
            self._head.vocabulary.sha256,
            self.settings.target_temperature,
        )


def exploding_kl(mean_kl: float, factor: float, num_choices: int) -> float:
    """Nats above which a KL is a fault of ours: so many times the mean, and more than a draft has that knows nothing.

    After a shift of domain a good draft may know nothing, and its KL leaps; but it takes a broken one to do worse than
    spreading its probability evenly, whose KL from any target distribution is at most ln `num_choices`.
    """
    return max(factor * mean_kl, math.log(num_choices))


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _has_anchor(rows: RequestRows) -> bool:
    return anchor_rows(rows)[0].numel() > 0
