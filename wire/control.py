"""Control messages: gateway -> engine over the private port, learner -> gateway over the admin port. All JSON."""

from __future__ import annotations

from msgspec import Struct

from wire.artifact import GateReport
from wire.spec import CaptureSpec


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """One engine worker's word that our parts are loaded, and what it holds."""

    rank: int
    pid: int
    runner: str
    """`v1` or `v2`, the vLLM model runner in use."""
    parts: list[str]
    """Loaded parts: `capture`, `weights` and one `mend:<name>` per mend in force."""
    draft_version: int
    target_version: int
    staged_versions: list[int]
    capture_rate: float


class EngineStatus(Struct, frozen=True, kw_only=True):
    """engine -> gateway: GET /paceline/status."""

    schema_version: int
    engine_id: str
    engine_epoch: str
    vllm_version: str
    spec: CaptureSpec
    num_speculative_tokens: int
    depth: int
    """K in force now; 0 is speculation off."""
    workers: list[WorkerStatus]


class StageRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """gateway -> engine: load, verify and hold an artifact in host memory. POST /paceline/stage."""

    version: int


class CommitRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """gateway -> engine: make a staged version the active one between two steps. POST /paceline/commit."""

    version: int
    expected_active: int


class CommitReport(Struct, frozen=True, kw_only=True):
    """engine -> gateway: a commit that happened."""

    version: int
    previous: int
    apply_ms: float
    """Time inside the worker, the slowest rank's."""
    rpc_ms: float
    """Round trip, the wait for the step in flight included."""


class CaptureRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """operator -> gateway -> engine: share of requests to capture. POST /admin/capture, POST /paceline/capture."""

    rate: float


class DepthRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """gateway -> engine: speculation depth for all batch sizes. POST /paceline/depth."""

    depth: int


class Digest(Struct, frozen=True, kw_only=True):
    """engine -> gateway: functional digests, over parameters and over outputs of every linear layer on fixed input.

    GET /paceline/digest. Equal digests mean equal weights also where the engine packed them away.
    """

    target: str
    draft: str


class ActivateRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """learner or operator -> gateway: POST /admin/drafts/{version}/activate."""

    expected_active: int
    force: bool = False
    """Skip the gate verdict in the manifest; integrity checks always hold."""


class LearnerReport(Struct, frozen=True, kw_only=True):
    """learner -> gateway, once a second: POST /admin/learner/report. The reply is LearnerOrders."""

    schema_version: int
    state: str
    """`waiting`, `training`, `paused` or `publishing`."""
    sent_at_s: float
    num_steps: int
    loss: float | None
    tokens_per_s: float
    num_tokens_seen: int
    buffer_requests: int
    buffer_tokens: int
    buffer_oldest_s: float
    capture_lag_s: float
    """Age of the newest captured step when it was received."""
    num_received_rows: int
    num_refused_messages: int
    num_restores: int
    """Times training fell back to a checkpoint because the loss was not finite or exploded."""
    simulated_al: float | None
    num_published: int
    gate: GateReport | None
    """The last decision."""
    num_gate_decisions: dict[str, int]
    """By outcome: `accepted`, `rejected`."""


class LearnerOrders(Struct, frozen=True, kw_only=True):
    """gateway -> learner: the operator's wishes and what serves now."""

    paused: bool
    active_version: int
