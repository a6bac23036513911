"""The objectives by the names that `[learner.train] objective` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from drafter.objectives.aurora import Aurora
from drafter.objectives.base import Objective
from drafter.objectives.kl import Kl, KlCe
from drafter.objectives.overlap import Lk, TotalVariation
from drafter.objectives.reinforce import Reinforce

OBJECTIVES: Mapping[str, Callable[..., Objective]] = {
    "kl": Kl,
    "kl+ce": KlCe,
    "aurora": Aurora,
    "reinforce": Reinforce,
    "tv": TotalVariation,
    "lk": Lk,
}


def make_objective(name: str, knobs: Mapping[str, float]) -> Objective:
    """A new objective; its knobs are the parameters of its class."""
    return OBJECTIVES[name](**knobs)
