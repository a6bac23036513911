"""Muon on matrices, AdamW on everything else, one object with one state that survives publishing.

Muon steps along the orthogonalised momentum of a matrix (Jordan et al. 2024, "Muon"); it learns a draft from about half the
token visits AdamW needs (LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from learner.newton_schulz import orthogonalise
from learner.ranks import OneRank


class DraftOptimiser:
    """Updates a draft core in place; a `muon_rate` of 0 leaves matrices to AdamW too. `rate_scale` multiplies every learning rate; it is halved when training diverged."""

    def __init__(
        self,
        core: nn.Module,
        *,
        muon_rate: float,
        adamw_rate: float,
        momentum: float,
        clip_norm: float,
        ranks: OneRank | None = None,
    ) -> None:
        self._ranks = ranks or OneRank()
        self.muon_rate, self.adamw_rate = muon_rate, adamw_rate
        self.momentum, self.clip_norm = momentum, clip_norm
        self.rate_scale = 1.0
        self.num_steps = 0
        named = list(core.named_parameters())
        self._parameters = [parameter for _, parameter in named]
        self._matrices = [(name, parameter) for name, parameter in named if parameter.ndim == 2 and muon_rate > 0]
        self._others = [(name, parameter) for name, parameter in named if parameter.ndim != 2 or muon_rate == 0]
        self._momenta = {name: torch.zeros_like(matrix) for name, matrix in self._matrices}
        others = [parameter for _, parameter in self._others]
        self._adamw = torch.optim.AdamW(others, lr=adamw_rate, betas=(0.9, 0.99), weight_decay=0.0)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def clip(self) -> float:
        """Scale the gradient to at most `clip_norm`; returns its norm before, which is not finite where it is broken."""
        return float(self._ranks.whole(nn.utils.clip_grad_norm_(self._parameters, self.clip_norm)))

    @torch.no_grad()
    def step(self, rate_share: float = 1.0) -> None:
        """One update with this share of the learning rates."""
        share = rate_share * self.rate_scale
        for group in self._adamw.param_groups:
            group["lr"] = self.adamw_rate * share
        self._adamw.step()
        rate = self.muon_rate * share
        self.num_steps += 1
        moved = [(name, parameter) for name, parameter in self._matrices if parameter.grad is not None]
        matrices = [parameter for _, parameter in moved]
        directions = self._ranks.map_wholes(orthogonalise, (self._blend(name, matrix) for name, matrix in moved), matrices)
        for parameter, direction in zip(matrices, directions, strict=True):
            scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            self._ranks.local(parameter).add_(direction, alpha=-rate * scale)

    def _blend(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Gradient and momentum of this rank's part of a matrix, the momentum moved on (Nesterov)."""
        assert parameter.grad is not None
        gradient, momentum = self._ranks.local(parameter.grad), self._ranks.local(self._momenta[name])
        momentum.lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(momentum, self.momentum)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state as named tensors, for a checkpoint."""
        state = {f"muon.{name}": self._ranks.whole(value) for name, value in self._momenta.items()}
        for name, parameter in self._others:
            for key, value in self._adamw.state.get(parameter, {}).items():
                state[f"adamw.{key}.{name}"] = self._ranks.whole(value)
        state["rate_scale"] = torch.tensor(self.rate_scale)
        state["num_steps"] = torch.tensor(self.num_steps)
        return state

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over a state made by `tensors` for the same core; raises KeyError or ValueError where it does not fit."""
        for name, value in self._momenta.items():
            value.copy_(self._ranks.part(_fitting(tensors, f"muon.{name}", value.shape), value))
        for name, parameter in self._others:
            if f"adamw.step.{name}" not in tensors:
                self._adamw.state.pop(parameter, None)
                continue
            entry: dict[str, Any] = {"step": _fitting(tensors, f"adamw.step.{name}", torch.Size()).clone()}
            for key in ("exp_avg", "exp_avg_sq"):
                whole = _fitting(tensors, f"adamw.{key}.{name}", parameter.shape).to(
                    parameter.device, parameter.dtype, copy=True
                )
                entry[key] = self._ranks.part(whole, parameter)
            self._adamw.state[parameter] = entry
        rate_scale, num_steps = float(tensors["rate_scale"]), int(tensors["num_steps"])
        if not 0 < rate_scale <= 1 or num_steps < 0:
            raise ValueError(f"a rate scale of {rate_scale} after {num_steps} steps is impossible")
        self.rate_scale, self.num_steps = rate_scale, num_steps


def _fitting(tensors: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    if tensors[name].shape != shape:
        raise ValueError(f"optimiser state {name} has shape {tuple(tensors[name].shape)}, needed {tuple(shape)}")
    return tensors[name]
