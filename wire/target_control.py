"""Control messages about versions of the target: gateway -> engine over the private port, operator -> gateway over the admin port.

An engine is asked to stage one with a `StageRequest` at POST /paceline/target/stage.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from wire.target import TargetManifest

Seconds = Annotated[float, Meta(gt=0.0, le=3600.0)]


class TargetCommitRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """gateway -> engine: make a staged version the one that is computed with. POST /paceline/target/commit.

    The way back is a commit too: of the version before, which stays staged.
    """

    version: int
    expected_active: int
    deadline_s: Seconds
    """For the pause and the weights; what is not in force by then is taken back."""


class TargetCommitReport(Struct, frozen=True, kw_only=True):
    """engine -> gateway: a commit that happened."""

    version: int
    previous: int
    weights_sha256: str
    """Of the file whose tensors are in force, as every worker verified it; empty for version 0."""
    digest: str
    """Of what the model now computes, see `server.engine.digest.quick_digest`. Equal on engines of one build and set-up."""
    pause_ms: float
    """From the wish to pause until nothing ran and all KV was gone."""
    apply_ms: float
    """Time inside the worker, the slowest rank's."""
    total_ms: float
    """From the wish to pause until requests ran again."""


class ActivateTargetRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """trainer or operator -> gateway: POST /admin/targets/{version}/activate."""

    expected_active: int
    deadline_s: Seconds | None = None
    """For all engines together; absent: `gateway.swap_deadline_s`. A commit that has begun gets 30 s at least."""
    reason: str = ""
    """Why, for people."""


class RollBackTargetRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """operator -> gateway: POST /admin/targets/rollback, to the version that was active before."""

    expected_active: int
    deadline_s: Seconds | None = None


class TargetSwapReport(Struct, frozen=True, kw_only=True):
    """One attempt to change the active target, and what came of it. Also the answer to activate and rollback."""

    version: int
    previous: int
    trigger: str
    """`activate` or `rollback`."""
    outcome: str
    """`committed`, `unchanged`, `refused` (no engine computes with it) or `reverted` (some did, then all went back)."""
    reason: str
    started_at_s: float
    duration_ms: float
    persisted: bool = True
    """False: the engines serve it, but the pointer on disk could not be written, so a gateway that is started anew takes it back."""
    commits: dict[str, TargetCommitReport] = {}
    """By engine id."""
    canary_errors: dict[str, float] = {}
    """Mean absolute difference to the manifest's log-probabilities, nats, by engine id."""
    acceptance_length: float | None = None
    """Recent AL of the active draft under the target before; absent where nothing was measured."""


class TargetEntry(Struct, frozen=True, kw_only=True):
    """One version of the store, as the admin API lists it."""

    version: int
    is_active: bool
    manifest: TargetManifest | None = None
    reason: str = ""
    """Why it cannot be read."""


class TargetList(Struct, frozen=True, kw_only=True):
    """gateway -> trainer or operator: GET /admin/targets. Version 0 is not listed."""

    active_version: int
    previous_version: int | None
    targets: list[TargetEntry]
    swaps: list[TargetSwapReport]
    """Newest last."""
