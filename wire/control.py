"""Control messages: gateway -> engine over the private port, learner -> gateway over the admin port. All JSON."""

from __future__ import annotations

from msgspec import Struct

from wire.artifact import DraftManifest, GateReport
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
    staged_target_versions: list[int] = []


class KvLayout(Struct, frozen=True, kw_only=True):
    """What one engine's KV cache is made of; engines whose layouts differ cannot hand blocks to one another."""

    block_size_tokens: int
    bytes_per_token: int
    """Over all layers, the draft's included."""
    num_blocks: int
    max_model_len: int
    transfer: str
    """`none`, `kv_producer`, `kv_consumer` or `kv_both`."""


class AnswerLimits(Struct, frozen=True, kw_only=True):
    """How many tokens an engine lets an answer have at most, beside what the context leaves; None: no more than that."""

    default: int | None = None
    """Of a chat that asks for no number (`max_new_tokens` of the model's generation_config.json)."""
    cap: int | None = None
    """Whatever is asked for."""


class GenerateAbilities(Struct, frozen=True, kw_only=True):
    """What an engine was started with, as far as rollouts depend on it."""

    serves_tokens: bool
    """`/inference/v1/generate` is there."""
    logprobs_mode: str
    """`processed_logprobs`: of the distribution tokens are drawn from, temperature included."""
    scheduling_policy: str
    """`priority`, or `fcfs`, which refuses priorities."""
    returns_sampling_mask: bool
    """Answers tell which tokens top-p and top-k left to choose from."""
    rejection_sample_method: str
    """Of speculation: `standard` and `block` draw from the target's distribution, `synthetic` does not."""


class EngineStatus(Struct, frozen=True, kw_only=True):
    """engine -> gateway: GET /paceline/status."""

    schema_version: int
    engine_id: str
    engine_epoch: str
    vllm_version: str
    spec: CaptureSpec
    num_speculative_tokens: int
    depth: int
    """K in force now for one request; 0 is speculation off."""
    kv: KvLayout
    workers: list[WorkerStatus]
    answer_limits: AnswerLimits = AnswerLimits()
    depths: list[int] = []
    """K in force now for batches of 1, 2, ... requests, up to the most the engine runs at once."""
    generate: GenerateAbilities | None = None


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
    """gateway -> engine: speculation depth, one K for all batch sizes or one for each of 1, 2, ... requests. POST /paceline/depth."""

    depth: int | list[int]


class DepthTable(Struct, frozen=True, kw_only=True):
    """engine -> gateway: K now in force for batches of 1, 2, ... requests."""

    depths: list[int]


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
    reason: str = ""
    """Why, for people: it becomes the swap's reason. At most 500 characters are kept."""


class DomainCoverage(Struct, frozen=True, kw_only=True):
    """How much of what the target says in one domain the active draft can propose: a cap on acceptance."""

    tenant: str
    domain: str
    share: float
    num_tokens: float
    """Completion tokens it is measured on; older ones count for less."""


class LearnerReport(Struct, frozen=True, kw_only=True):
    """learner -> gateway, once a second: POST /admin/learner/report. The reply is LearnerOrders."""

    schema_version: int
    state: str
    """`waiting`, `training`, `paused` or `publishing`."""
    sent_at_s: float
    num_steps: int
    loss: float | None
    """Running mean KL of the draft from the target, nats, whatever the objective."""
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
    """Times training fell back to a checkpoint because a step failed, the loss was not finite or it exploded."""
    simulated_al: float | None
    num_published: int
    gate: GateReport | None
    """The last decision."""
    num_gate_decisions: dict[str, int]
    """By outcome: `accepted`, `rejected`."""
    num_timed_out_requests: int = 0
    """Captured requests closed as they were because nothing more of them came."""
    num_evicted_requests: int = 0
    """Captured requests closed early because too many rows of running ones were held."""
    num_late_spans: int = 0
    """Captured spans of requests that were closed before; not used."""
    num_cut_rows: int = 0
    """Captured rows beyond what is kept of one request."""
    num_dropped_requests: int = 0
    """Captured requests forgotten because a training step or a judgement failed with them."""
    outcome: str = ""
    """What became of the last evaluation, in words: `gate` does not tell that a draft could not be written or activated, nor
    that a warm one came back."""
    vocabulary_coverage: tuple[DomainCoverage, ...] = ()
    """Of the domains that were asked of last."""
    wanted_vocabulary_size: int | None = None
    """None until 2,000 tokens were seen. Tokens the draft's vocabulary needs, by estimate, to cover 98 % of what every domain says next, tokens not seen yet included."""
    vocabulary_shortfall: str = ""
    """Empty, or what the size of the draft's vocabulary costs, by the coverage of what arrives, and what to do about it."""


class LearnerOrders(Struct, frozen=True, kw_only=True):
    """gateway -> learner: the operator's wishes and what serves now."""

    paused: bool
    active_version: int
    target_version: int = 0
    """What the engines compute with; where it changes, the draft has to follow."""


class EngineView(Struct, frozen=True, kw_only=True):
    """One engine as the gateway sees it."""

    id: str
    ready: bool
    reason: str
    """Why it is not ready, or what is odd about it; empty when all is well."""
    engine_epoch: str
    draft_version: int | None
    target_version: int | None
    parts: list[str]
    """Parts every worker has loaded."""
    num_speculative_tokens: int
    depth: int
    num_in_flight: int
    kind: str = "combined"
    """Its pool: `combined`, `prefill` or `decode`."""
    is_draining: bool = False


class DrainView(Struct, frozen=True, kw_only=True):
    """gateway -> launcher or operator: the answer to POST /admin/engines/{id}/drain and /undrain. Asking again is harmless."""

    id: str
    is_draining: bool
    is_drained: bool
    """It has nothing in flight and holds no KV for others: it can be stopped and nobody notices."""
    num_in_flight: int
    lease_left_s: float
    """Until no other engine can want KV blocks of this one."""


class CanaryView(Struct, frozen=True, kw_only=True):
    """The watch over live AL after a commit."""

    state: str
    """`idle`, `watching`, `passed`, `rolled_back`, `undecided` or `superseded`."""
    version: int | None = None
    baseline_version: int | None = None
    num_verify_steps: int = 0
    acceptance_length: float | None = None
    baseline_acceptance_length: float | None = None
    """Of the baseline version, weighted by the new version's domain mix."""
    reason: str = ""


class FloorDomain(Struct, frozen=True, kw_only=True):
    """Served AL of the active draft on one domain, and of the floor when that last served there."""

    domain: str
    num_verify_steps: int
    """In the sliding window."""
    acceptance_length: float
    floor_num_verify_steps: int
    floor_acceptance_length: float | None
    """None: not known."""


class FloorView(Struct, frozen=True, kw_only=True):
    """The watch over the active draft against the floor."""

    state: str
    """`idle` (the floor itself serves, or there is none), `watching`, `unknown` (nothing is known of the floor on this traffic) or
    `back` (the floor serves again and is compared with the draft it replaced)."""
    version: int | None = None
    floor_version: int | None = None
    domains: tuple[FloorDomain, ...] = ()
    reason: str = ""


class CalibrationPair(Struct, frozen=True, kw_only=True):
    """What the gate said of a draft, and what it did."""

    version: int
    simulated_al: float
    """On held-out requests, before it served."""
    served_al: float
    """Over all it served, at the full depth: 1 plus the accepted share of the proposals at each position."""
    num_verify_steps: int


class CalibrationView(Struct, frozen=True, kw_only=True):
    """How simulated AL goes with served AL, over the drafts that served long enough to tell."""

    pairs: tuple[CalibrationPair, ...] = ()
    """By ascending version."""
    bias: float | None = None
    """Mean of served less simulated AL; absent without a pair."""
    correlation: float | None = None
    """Pearson's; absent below three pairs, or where all are alike."""


class SwapReport(Struct, frozen=True, kw_only=True):
    """One attempt to change the active draft, and what came of it. Also the answer to activate and rollback."""

    version: int
    previous: int | None
    trigger: str
    """`activate`, `rollback` (an operator's), `canary` or `floor` (the floor watch's)."""
    outcome: str
    """`committed`, `unchanged`, `refused` (nothing was committed) or `reverted` (committed somewhere, then taken back)."""
    reason: str
    forced: bool
    started_at_s: float
    duration_ms: float
    persisted: bool = True
    """False: the engines serve it, but the pointer on disk could not be written."""
    commits: dict[str, CommitReport] = {}
    """By engine id."""
    served: CalibrationPair | None = None
    """Of the draft that was active until then; absent where it did not serve long enough, or no gate judged it."""
    correlation: float | None = None
    """Of simulated with served AL over all drafts, as of this swap."""


class LearnerView(Struct, frozen=True, kw_only=True):
    """What the learner last said, and how long ago."""

    alive: bool
    paused: bool
    age_s: float | None
    report: LearnerReport | None


class CaptureView(Struct, frozen=True, kw_only=True):
    """Capture over all engines since the gateway started."""

    rate: float | None
    num_captured_rows: int
    num_dropped_rows: dict[str, int]


class AcceptanceView(Struct, frozen=True, kw_only=True):
    """Recent live acceptance of one draft version over all engines, tenants and domains."""

    draft_version: int
    acceptance_length: float
    per_position: list[float]
    """Accepted share of the proposals at each position."""
    num_verify_steps: int


class TrafficView(Struct, frozen=True, kw_only=True):
    """Requests since the gateway started."""

    num_in_flight: int
    num_served: int
    num_failed: int
    """Ended by a fault of an engine or of ours."""
    num_refused: int
    """Answered 4xx, admission included."""
    num_disconnected: int
    num_verified_tokens: int
    """Tokens emitted by verify steps, as the engines count them."""


class AdminStatus(Struct, frozen=True, kw_only=True):
    """gateway -> operator and terminal view: GET /admin/status."""

    schema_version: int
    ready: bool
    reason: str
    uptime_s: float
    active_version: int | None
    previous_version: int | None
    floor_version: int | None
    rolled_back_versions: list[int]
    """Refused without force."""
    engines: list[EngineView]
    canary: CanaryView
    swaps: list[SwapReport]
    """Newest last."""
    learner: LearnerView
    capture: CaptureView
    acceptance: AcceptanceView | None
    """Of the active version; absent until something is measured."""
    traffic: TrafficView
    calibration: CalibrationView = CalibrationView()
    floor: FloorView = FloorView(state="idle")
    active_target_version: int = 0
    """What every engine computes with, or is brought to before it serves."""
    chore_faults: dict[str, int] = {}
    """Failures of the gateway's own background work by name: its log has each one's traceback. Empty where all is well."""


class DraftEntry(Struct, frozen=True, kw_only=True):
    """One draft of the store, as the admin API lists it."""

    version: int
    marks: list[str]
    """Any of `active`, `previous`, `floor`, `rolled_back`, `unreadable`."""
    reason: str = ""
    """Why it was rolled back or cannot be read."""
    manifest: DraftManifest | None = None


class DraftList(Struct, frozen=True, kw_only=True):
    """gateway -> operator: GET /admin/drafts."""

    active_version: int | None
    previous_version: int | None
    floor_version: int | None
    drafts: list[DraftEntry]
