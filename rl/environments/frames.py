"""What the pool (`pool.py`, in the generator's process) and an environment worker (`worker.py`) say to each other, as msgpack."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from rl.environments.interface import ENVIRONMENT_SCHEMA_VERSION, Action, Excluded, Problem, Scored, Step


class Begin(Struct, frozen=True, tag="begin"):
    """Pool -> worker, the first frame: build these environments."""

    environments: tuple[dict[str, Any], ...]
    """Validated configurations, as tables."""
    schema_version: int = ENVIRONMENT_SCHEMA_VERSION


class Ready(Struct, frozen=True, tag="ready"):
    """Worker -> pool, the first reply."""


class Refused(Struct, frozen=True, tag="refused"):
    """Worker -> pool, in its place: an environment cannot be built here."""

    detail: str


class ResetCall(Struct, frozen=True, tag="reset"):
    episode_id: int
    problem: Problem
    call_id: int = 0
    """Set by whoever sends it; the reply repeats it."""


class StepCall(Struct, frozen=True, tag="step"):
    episode_id: int
    action: Action
    call_id: int = 0


class ScoreCall(Struct, frozen=True, tag="score"):
    """The worker forgets the episode with its verdict."""

    episode_id: int
    call_id: int = 0


class Forget(Struct, frozen=True, tag="forget"):
    """An episode that nobody goes on with; no reply."""

    episode_id: int


class Reply(Struct, frozen=True, tag="reply"):
    call_id: int
    result: Step | Scored | Excluded


Call = ResetCall | StepCall | ScoreCall
ToWorker = Begin | Call | Forget
FromWorker = Ready | Refused | Reply
