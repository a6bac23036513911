"""Estimator of a KL divergence from one sample, by d = log(p / q) of a token drawn from q: KL(q || p), in nats.

Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k3(log_ratio: Tensor) -> Tensor:
    """e^d - 1 - d: without bias, never negative. By expm1, because the terms cancel where the policies are close."""
    return torch.expm1(log_ratio) - log_ratio
