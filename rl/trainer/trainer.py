"""Trainer: takes batches of groups, moves the policy, and says what each batch did.

A batch is one optimiser step unless the settings say more. With one, the policy that takes the batch up is the one that moves; with
several, its log-probabilities are computed first and each minibatch is weighed as a batch of its own.

Shape letters: N rollouts and S output tokens of a batch, B rollouts and T output tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from rl.algorithms.config import AlgorithmSettings
from rl.algorithms.counts import TokenCounts
from rl.algorithms.losses import PolicyTokens, policy_loss
from rl.algorithms.shares import shares
from rl.trainer.batch import Batch, Sample, make_batch
from rl.trainer.config import TrainerSettings
from rl.trainer.metrics import StepReport, UpdateMetrics, finite
from rl.trainer.packs import Pack, behaviour_logprobs, make_packs
from rl.trainer.policy import DTYPES, Policy
from rl.trainer.ranks import OneRank
from rl.trainer.report import report
from rl.trainer.sharing import can_share_prompts
from rl.trainer.sink import TargetSink
from rl.trajectory import Group
from wire.errors import ConfigError, RolloutError, TrainerError

_BETAS = (0.9, 0.95)
"""Of AdamW: a shorter memory of squares than in supervised training, because the policy's gradients change with its rollouts."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Frozen:
    """What a batch's optimiser steps have in common."""

    samples: tuple[Sample, ...]
    behaviour_NS: Tensor
    proximal_NS: Tensor | None
    reference_NS: Tensor | None


@dataclass(frozen=True)
class _Found:
    """What the policy gave the batch's tokens, whole on every rank."""

    logprobs_NS: Tensor
    entropies_NS: Tensor


class Trainer:
    """The policy begins as the model of `model_dir`, which also stays the reference of the KL. `version` is what engines call it.

    `ranks` are the processes that train together; each is given the same batches. Raises ConfigError.
    """

    def __init__(
        self,
        model_dir: Path,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        *,
        version: int = 0,
        ranks: OneRank | None = None,
    ) -> None:
        if algorithm.overlong_buffer_tokens > settings.max_output_tokens:
            raise ConfigError(
                f"overlong_buffer_tokens {algorithm.overlong_buffer_tokens} is more than max_output_tokens "
                f"{settings.max_output_tokens}; the shortest answer would be punished: make it smaller"
            )
        self.settings, self.algorithm = settings, algorithm
        self.ranks = ranks if ranks is not None else OneRank()
        self.policy = Policy(model_dir, settings, self.ranks.device)
        self._shares_prompts = can_share_prompts(self.policy.model, self.ranks.device, settings.pack_tokens)
        self.ranks.shard(self.policy.model)
        self.optimiser = torch.optim.AdamW(
            self.policy.parameters().values(), lr=settings.learning_rate, betas=_BETAS, weight_decay=settings.weight_decay
        )
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.version = version
        self.num_steps = 0
        """Batches taken up."""
        self.num_updates = 0
        """Optimiser steps made."""
        self._reference: Policy | None = None
        if algorithm.kl_weight > 0.0:
            self._reference = Policy(model_dir, settings, self.ranks.device)
            self._reference.model.requires_grad_(False)
            self.ranks.shard(self._reference.model)

    def step(self, groups: Sequence[Group]) -> StepReport:
        """Learn from one batch. What is not finite moves no weights, and the report says so.

        Raises RolloutError for rollouts that do not fit, before anything has moved.
        """
        batch = make_batch(groups, self.algorithm, max_output_tokens=self.settings.max_output_tokens)
        self._require_known(batch)
        found, counts, updates = None, TokenCounts(), []
        if batch.samples:
            minibatches = self._split(batch.rollouts)
            frozen, found = self._freeze(batch, len(minibatches))
            for rows in minibatches:
                update, added, moved = self._update(frozen, rows)
                updates.append(update)
                counts = counts + added
                found = moved if found is None else found
        tensors = None if found is None else (found.logprobs_NS, found.entropies_NS)
        told = report(self.num_steps, self.version, groups, batch, tensors, counts, tuple(updates), self.settings.dtype)
        self.num_steps += 1
        return told

    def publish(self, sink: TargetSink) -> int:
        """Write the policy as the next target version. Raises what the sink raises (on other ranks than the first TrainerError),
        TrainerError where it does not count up."""
        weights = self.weights()
        canary = self.policy.logprobs(sink.canary_token_ids) if len(sink.canary_token_ids) > 1 else []
        version = 0
        try:
            version = sink.write(weights, canary, num_updates=self.num_updates) if self.ranks.rank == 0 else 0
        finally:  # a failure too, for which the other ranks would wait without end
            version = int(self.ranks.total(torch.tensor(version)))
        if version <= self.version:
            raise TrainerError(
                f"the sink calls the new target {version} (0 on ranks that did not write: it failed), the last one is "
                f"{self.version}; versions count up"
            )
        self.version = version
        return version

    def weights(self) -> dict[str, Tensor]:
        """Every tensor of the model's own files by its name there, whole, on the CPU, in the engines' dtype."""
        dtype = DTYPES[self.settings.dtype]
        found = {name: self.ranks.whole(tensor.detach()) for name, tensor in self.policy.stored().items()}
        return self.policy.untouched() | {
            name: tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
            for name, tensor in found.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """All that `load` needs besides the counters: weights, the optimiser's state, the random generator's.

        Whole and on the CPU, where the trainer's own are not copied: use them before the next step.
        """
        found = {"generator": self.generator.get_state()}
        for name, parameter in self.policy.parameters().items():
            found[f"weight.{name}"] = self.ranks.whole(parameter.detach()).cpu()
            for key, value in self.optimiser.state.get(parameter, {}).items():
                found[f"{key}.{name}"] = self.ranks.whole(value).cpu()
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError where they are another policy's, and has loaded nothing then."""
        parameters = self.policy.parameters()
        weights = {name: _only(tensors, f"weight.{name}") for name in parameters}
        extra = {name for name in tensors if name.startswith("weight.")} - {f"weight.{name}" for name in weights}
        if extra:
            raise ValueError(f"weight {min(extra)} is not the policy's")
        parts = {name: self.ranks.part(weights[name], parameter) for name, parameter in parameters.items()}
        states: dict[Tensor, dict[str, Tensor]] = {}
        for name, parameter in parameters.items():
            if f"exp_avg.{name}" in tensors:
                moments = {key: self.ranks.part(_only(tensors, f"{key}.{name}"), parameter) for key in _MOMENTS}
                states[parameter] = {"step": _only(tensors, f"step.{name}").clone(), **moments}
        self.generator.set_state(_only(tensors, "generator"))
        self.optimiser.state.clear()
        for parameter, state in states.items():
            like = {key: value.to(parameter.device, copy=True) if key in _MOMENTS else value for key, value in state.items()}
            self.optimiser.state[parameter] = like
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(parts[name])

    def _split(self, rollouts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows by optimiser step, of much the same number of rollouts; the trajectories of one stay together."""
        num_minibatches = min(self.settings.num_minibatches, len(rollouts))
        if num_minibatches == 1:
            return [[row for rows in rollouts for row in rows]]
        order = torch.randperm(len(rollouts), generator=self.generator).tolist()
        return [
            [row for number in order[first::num_minibatches] for row in rollouts[number]] for first in range(num_minibatches)
        ]

    def _freeze(self, batch: Batch, num_minibatches: int) -> tuple[_Frozen, _Found | None]:
        proximal = self._scores(self.policy, batch.samples) if num_minibatches > 1 else None
        reference = self._scores(self._reference, batch.samples) if self._reference is not None else None
        frozen = _Frozen(
            samples=batch.samples,
            behaviour_NS=behaviour_logprobs(batch.samples).to(self.ranks.device),
            proximal_NS=None if proximal is None else proximal.logprobs_NS,
            reference_NS=None if reference is None else reference.logprobs_NS,
        )
        return frozen, proximal

    @torch.no_grad()
    def _scores(self, policy: Policy, samples: Sequence[Sample]) -> _Found:
        found = self._empty(samples)
        for pack, counts in self._packs(samples, range(len(samples))):
            logprob_BT, entropy_BT = policy.score(pack)
            if counts:
                pack.put(logprob_BT, found.logprobs_NS)
                pack.put(entropy_BT, found.entropies_NS)
        return self._together(found)

    def _update(self, frozen: _Frozen, rows: Sequence[int]) -> tuple[UpdateMetrics, TokenCounts, _Found]:
        found = self._empty(frozen.samples)
        share_N = self._shares(frozen.samples, rows)
        losses = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        counts = TokenCounts()
        for pack, is_counted in self._packs(frozen.samples, rows):
            logprob_BT, entropy_BT = self.policy.score(pack)
            loss = policy_loss(_tokens(frozen, pack, logprob_BT, share_N), self.algorithm)
            (loss.total if is_counted else loss.total * 0.0).backward()
            if is_counted:
                pack.put(logprob_BT.detach(), found.logprobs_NS)
                pack.put(entropy_BT, found.entropies_NS)
                losses += torch.stack([loss.total.detach(), loss.kl])
                counts = counts + loss.counts
        total, kl = self.ranks.total(losses).tolist()
        counts = TokenCounts(*self.ranks.total(torch.tensor(counts.as_list)).tolist())
        return self._move(total, kl, counts), counts, self._together(found)

    def _packs(self, samples: Sequence[Sample], rows: Sequence[int]) -> Iterator[tuple[Pack, bool]]:
        packs = make_packs(samples, rows, self.settings.pack_tokens, share_prompts=self._shares_prompts)
        for pack, is_counted in self.ranks.deal(packs):
            yield pack.to(self.ranks.device), is_counted

    def _move(self, loss: float, kl: float, counts: TokenCounts) -> UpdateMetrics:
        """The optimiser's step, unless loss or gradient is not finite."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters().values(), self.settings.clip_norm)
        grad_norm = float(self.ranks.whole(norm))
        skipped = None
        if not isfinite(loss):
            skipped = f"the loss is {loss}"
        elif not isfinite(grad_norm):
            skipped = f"the gradient's norm is {grad_norm}"
        rate = self.settings.learning_rate * min(1.0, (self.num_updates + 1) / max(1, self.settings.warmup_steps))
        if skipped is None:
            self.optimiser.param_groups[0]["lr"] = rate
            self.optimiser.step()
            self.num_updates += 1
        self.optimiser.zero_grad()
        return UpdateMetrics(
            loss=finite(loss),
            kl_loss=finite(kl),
            grad_norm=finite(grad_norm),
            learning_rate=rate,
            num_tokens=counts.num_tokens,
            masked_fraction=counts.masked_fraction,
            truncated_fraction=counts.truncated_fraction,
            clipped_high_fraction=counts.num_clipped_high / max(counts.num_tokens, 1),
            clipped_low_fraction=counts.num_clipped_low / max(counts.num_tokens, 1),
            skipped=skipped,
        )

    def _shares(self, samples: Sequence[Sample], rows: Sequence[int]) -> Tensor:
        """[N]: what one token of each trajectory is of the minibatch's loss; 0 outside the minibatch."""
        lengths_N = torch.zeros(len(samples), dtype=torch.int64)
        for row in rows:
            lengths_N[row] = samples[row].num_outputs
        mask_NS = torch.arange(int(lengths_N.max()))[None, :] < lengths_N[:, None]
        rollouts_N = torch.tensor([sample.rollout for sample in samples])
        share_NS = shares(self.algorithm.recipe.share, mask_NS, rollouts_N, self.settings.max_output_tokens)
        return share_NS[:, 0].to(self.ranks.device)

    def _empty(self, samples: Sequence[Sample]) -> _Found:
        shape = (len(samples), max(sample.num_outputs for sample in samples))
        return _Found(torch.zeros(shape, device=self.ranks.device), torch.zeros(shape, device=self.ranks.device))

    def _together(self, found: _Found) -> _Found:
        return _Found(self.ranks.total(found.logprobs_NS), self.ranks.total(found.entropies_NS))

    def _require_known(self, batch: Batch) -> None:
        """Tokens of the vocabulary, and none from rollouts that began after the policy's version."""
        for sample in batch.samples:
            who = f"sample {sample.trajectory.sample_index} of group {sample.trajectory.group_id}"
            highest, oldest = max(sample.token_ids), sample.trajectory.oldest_version
            if highest >= self.policy.vocab_size:
                raise RolloutError(
                    f"{who} has token {highest}, the policy's vocabulary ends at {self.policy.vocab_size}; its rollouts come from "
                    "another model"
                )
            if oldest > self.version:
                raise RolloutError(
                    f"{who} was drawn by target {oldest}, the policy is version {self.version}; give a trainer that went back to "
                    "a checkpoint the rollouts of its own versions, or its version the number that engines serve"
                )


def _only(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"there is no {name}")
    return tensors[name]


def _tokens(frozen: _Frozen, pack: Pack, logprob_BT: Tensor, share_N: Tensor) -> PolicyTokens:
    advantage_N = torch.tensor([sample.advantage for sample in frozen.samples], device=logprob_BT.device)
    return PolicyTokens(
        current_BT=logprob_BT,
        behaviour_BT=pack.take(frozen.behaviour_NS),
        mask_BT=pack.mask,
        share_BT=share_N[pack.rows_B][:, None] * pack.mask,
        advantage_B=advantage_N[pack.rows_B],
        proximal_BT=None if frozen.proximal_NS is None else pack.take(frozen.proximal_NS),
        reference_BT=None if frozen.reference_NS is None else pack.take(frozen.reference_NS),
    )
