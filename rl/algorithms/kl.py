"""Estimators of a KL divergence from one sample, by d = log(p / q) of a token drawn from q: KL(q || p).

Schulman, "Approximating KL divergence", 2020. All are in nats.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(log_ratio: Tensor) -> Tensor:
    """-d: without bias, of either sign."""
    return -log_ratio


def k3(log_ratio: Tensor) -> Tensor:
    """e^d - 1 - d: without bias, never negative. By expm1, because the terms cancel where the policies are close."""
    return torch.expm1(log_ratio) - log_ratio
