"""The share of the learning rates that is left: by what there is to learn from, not by how many steps were made."""

from __future__ import annotations


def rate_share(num_tokens: int, settling_tokens: float) -> float:
    """Share (0..1] of the start rates with so many distinct completion tokens remembered.

    A rate that falls with the step count is low when most of the data arrive, and lower the more steps a machine makes; after
    days of traffic it would be at its floor whatever changed. This one falls with the data, and no further than the replay is
    large. Settling is left to the average of the weights, which is what is served: 7 simulated minutes into code traffic, at
    the whole rate, the last weights reach AL 1.83 and their average 1.97. How fast the rate should fall is not measured.
    """
    return (1 + num_tokens / settling_tokens) ** -0.5
