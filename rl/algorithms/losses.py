"""The loss of a batch of rollouts, with three policies kept apart: mu drew the tokens (behaviour), pi_old is where the optimiser
was when it took the batch up (proximal), pi_theta is where it is now (current).

    loss = - sum_t share_t w_t (objective_t - kl_weight r_t k3_t)        r = pi_theta / pi_old,  w = weight(pi_old / mu)

which is the decoupled objective (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298): clipping limits the
optimiser's own steps, the importance weight corrects what lies before them. A batch of one optimiser step has pi_old = pi_theta
and needs no log-probabilities of pi_old.

A token that is left out keeps its place in the denominators: a batch with few usable tokens makes a smaller step, not a noisier one.

`losses_reference` states the algorithms one by one. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.config import AlgorithmSettings, CorrectionSettings
from rl.algorithms.counts import TokenCounts
from rl.algorithms.kl import k3
from rl.algorithms.masks import geometric_mask, importance_weights, log_rho, off_policy_mask
from rl.algorithms.objectives import bounded, clip_activity, objective
from wire.errors import RolloutError


@dataclass(frozen=True)
class PolicyTokens:
    """What the loss is a function of. What is outside the mask (padding, prompts, the environment's replies) may be anything finite.

    Raises RolloutError where shapes differ.
    """

    current_BT: Tensor
    """log pi_theta, with gradient."""
    behaviour_BT: Tensor
    mask_BT: Tensor
    """Whether the policy drew this token, bool."""
    share_BT: Tensor
    """Of the whole batch's loss, see `shares`."""
    advantage_B: Tensor
    proximal_BT: Tensor | None = None
    """log pi_old; None: the batch is one optimiser step, pi_old is pi_theta."""
    reference_BT: Tensor | None = None
    """log pi_ref, wanted where the KL has a weight."""

    def __post_init__(self) -> None:
        shape = self.current_BT.shape
        for name in ("behaviour_BT", "mask_BT", "share_BT", "proximal_BT", "reference_BT"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise RolloutError(
                    f"{name} is {list(tensor.shape)}, the current log-probabilities are {list(shape)}; pad all alike"
                )
        if self.advantage_B.shape != shape[:1]:
            raise RolloutError(f"advantage_B is {list(self.advantage_B.shape)}; {shape[0]} sequences have one each")
        if self.mask_BT.dtype != torch.bool:
            raise RolloutError(f"mask_BT is {self.mask_BT.dtype}; it says yes or no, torch.bool")

    @property
    def old_logprobs(self) -> Tensor:
        """log pi_old [B, T], without gradient."""
        return (self.current_BT if self.proximal_BT is None else self.proximal_BT).detach()


@dataclass(frozen=True)
class PolicyLoss:
    total: Tensor
    """To be made smaller; losses of a batch's parts add up to the batch's."""
    kl: Tensor
    """What the KL to the reference adds to it, without gradient."""
    counts: TokenCounts


def policy_loss(tokens: PolicyTokens, settings: AlgorithmSettings) -> PolicyLoss:
    """Raises RolloutError where the KL has a weight and no reference is there."""
    recipe = settings.recipe
    objective_BT, ratio_BT = objective(recipe, tokens.current_BT, tokens.old_logprobs, tokens.advantage_B, tokens.mask_BT)
    weight_BT, kept_BT = correction(tokens, settings.correction)
    total = -(tokens.share_BT * weight_BT * objective_BT).sum()
    kl = total.new_zeros(())
    if settings.kl_weight > 0.0:
        kl = settings.kl_weight * (tokens.share_BT * weight_BT * reference_kl(tokens)).sum()
    high_BT, low_BT = clip_activity(recipe, ratio_BT, tokens.advantage_B[:, None])
    is_truncated_BT = _is_truncated(tokens, settings.correction)
    every = (tokens.mask_BT, ~kept_BT, is_truncated_BT, high_BT, low_BT)
    counts = torch.stack([(which_BT & tokens.mask_BT).sum() for which_BT in every])
    return PolicyLoss(total + kl, kl.detach(), TokenCounts(*counts.tolist()))


def correction(tokens: PolicyTokens, settings: CorrectionSettings) -> tuple[Tensor, Tensor]:
    """(importance weight [B, T], whether the token counts at all [B, T])."""
    weight_BT = importance_weights(settings, tokens.old_logprobs, tokens.behaviour_BT, tokens.mask_BT)
    kept_B = torch.ones_like(tokens.advantage_B, dtype=torch.bool)
    if settings.sequence_band is not None:
        log_rho_BT = log_rho(tokens.old_logprobs, tokens.behaviour_BT, tokens.mask_BT)
        kept_B = kept_B & geometric_mask(log_rho_BT, tokens.mask_BT, *settings.sequence_band)
    if settings.off_policy_delta is not None:
        log_rho_BT = log_rho(tokens.current_BT, tokens.behaviour_BT, tokens.mask_BT)
        kept_B = kept_B & off_policy_mask(log_rho_BT, tokens.mask_BT, tokens.advantage_B, settings.off_policy_delta)
    weight_BT = weight_BT * kept_B[:, None]
    return weight_BT, weight_BT > 0.0


def reference_kl(tokens: PolicyTokens) -> Tensor:
    """r k3(pi_ref / pi_theta) [B, T], 0 outside the mask; with r in front its gradient has no bias.

    DeepSeek-V3.2 (arXiv 2512.02556). GRPO's own (arXiv 2402.03300, eq. 4) is without r and so only its value.
    """
    if tokens.reference_BT is None:
        raise RolloutError(
            "kl_weight is above 0 and the batch has no reference log-probabilities; compute them or set kl_weight = 0"
        )
    zero = tokens.current_BT.new_zeros(())
    ratio_BT = bounded(torch.where(tokens.mask_BT, tokens.current_BT - tokens.old_logprobs, zero)).exp()
    return ratio_BT * k3(bounded(torch.where(tokens.mask_BT, tokens.reference_BT - tokens.current_BT, zero)))


def _is_truncated(tokens: PolicyTokens, settings: CorrectionSettings) -> Tensor:
    if settings.token_weight != "truncate":
        return torch.zeros_like(tokens.mask_BT)
    return log_rho(tokens.old_logprobs, tokens.behaviour_BT, tokens.mask_BT).exp() > settings.importance_cap
