"""StepView: one engine step seen before sampling, the same for both of vLLM's model runners.

Shape letters: N requests, R rows scheduled this step, D target hidden size, A aux layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class StepView(NamedTuple):
    """Live buffers of the step in flight: read or copy them before the runner samples."""

    request_ids: list[str]
    first_positions_N: torch.Tensor
    """Position of each request's first row, as the step computes with it: integers, on the model's device."""
    num_rows: list[int]
    """Rows of each request; they stand in order and sum to R."""
    num_proposed: list[int]
    token_ids_R: torch.Tensor
    aux_A_RD: list[torch.Tensor]
    hidden_RD: torch.Tensor
    """After the final norm."""
