"""Settings of the learner role."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from wire.config import Config

DeviceChoice = Literal["auto", "cpu", "cuda"]


class ReplaySettings(Config):
    """`[learner.replay]`: what is kept to learn from. All of it in host memory, bounded (`learner/request.py` tells to how much)."""

    recent_tokens: int = Field(60_000, ge=1)
    """Completion tokens in the recent window."""
    reservoir_tokens: int = Field(60_000, ge=0)
    """Completion tokens in the per-domain reservoirs together."""
    max_groups: int = Field(8, ge=1)
    """Pairs of tenant and domain that have a reservoir and anchors of their own; further ones share one."""
    holdout_share: float = Field(0.10, gt=0.0, lt=1.0)
    """Share of requests, by hash of the prompt, that is never trained on: the gate's evidence."""
    fresh_tokens: int = Field(2_000, ge=0)
    """Completion tokens of the newest requests that judge drafts before they teach, at most half of what has come, and a tenth
    of it once the gate has counted them. After a shift of traffic they are the first of its kind, when few of the held-out ones are."""
    max_passes: int = Field(4, ge=1)
    """Visits of one request; when all have had them the learner waits for traffic. The first requests would else get
    more than the late ones: 9 where the mean is 3.7."""
    max_open_rows: int = Field(40_000, ge=1)
    """Rows of requests that are still running; over it the oldest is closed early."""
    max_completion_rows: int = Field(2048, ge=2)
    """Rows of one completion that are kept, the first ones. Attention over M of them takes memory as M times all rows."""
    idle_timeout_s: float = Field(300.0, gt=0.0)
    """A running request without a new row for so long is closed as it is."""
    max_queued_messages: int = Field(512, ge=1)
    """Capture messages waiting in the learner; then the engine drops and counts."""
    max_queued_bytes: int = Field(256 * 1024 * 1024, ge=1)
    """Of their tensors; one message that alone is larger is still taken."""
    max_age_s: float | None = Field(None, gt=0.0)
    """Captured requests are forgotten that long after, in memory and on disk; only newer ones and the bounds above push them out where
    absent. What a draft has learned of them stays."""
    on_disk: bool = True
    """Keep requests in the state directory too, so that a restarted learner remembers them."""


OBJECTIVE_KNOBS = {
    "hard_weight": "kl+ce",
    "lambda_discard": "aurora",
    "discard_top_k": "aurora",
    "baseline_momentum": "reinforce",
    "kl_weight": "reinforce",
    "lk_decay": "lk",
}
"""The objective that owns each knob of `TrainSettings`."""


class TrainSettings(Config):
    """`[learner.train]`: how the draft is trained."""

    unroll: int = Field(3, ge=1)
    """Draft steps per position (TTT); at least the served speculation depth."""
    seed: int = 0
    """Of every random choice of the learner."""
    batch_tokens: int = Field(100, ge=1)
    """Completion tokens a step, at least; whole requests are packed."""
    muon_rate: float = Field(0.08, ge=0.0)
    """Learning rate of matrices, in spectral norm a step; 0 leaves them to AdamW like everything else."""
    adamw_rate: float = Field(5e-3, ge=0.0)
    """Learning rate of everything else."""
    settling_tokens: float = Field(200_000.0, gt=0.0)
    """Rates fall as 1 / sqrt(1 + tokens / settling_tokens), tokens being the distinct ones that are remembered. So large that
    little is lost of the whole rate, the one that was measured with the average below."""
    momentum: float = Field(0.95, ge=0.0, lt=1.0)
    """Of matrices: the share of it that one step leaves."""
    average_decay: float = Field(0.99, ge=0.0, lt=1.0)
    """Of the running average of the weights over steps; the average is what is gated and served. It takes the place of a
    falling rate: held-out AL after 7 simulated minutes is 1.88 with 0.9, 1.97 with 0.97 and with 0.99."""
    clip_norm: float = Field(1.0, gt=0.0)
    """Norm of the whole gradient above which it is scaled down."""
    depth_decay: float = Field(0.8, gt=0.0, le=1.0)
    """Weight of a depth against the one before it."""
    accepted_credit: float = Field(1.0, ge=0.0)
    """Weight of a depth whose proposal verification accepted."""
    rejected_credit: float = Field(1.0, ge=0.0)
    """Weight of the first depth it rejected."""
    beyond_credit: float = Field(1.0, ge=0.0)
    """Weight of depths after a rejection."""
    unverified_credit: float = Field(1.0, ge=0.0)
    """Weight of positions from which nothing was proposed."""
    objective: Literal["kl", "kl+ce", "aurora", "reinforce", "tv", "lk"] = "kl"
    """What is learned (`drafter/objectives`): the target's distribution (`kl`), its best token besides (`kl+ce`), rejected proposals
    as a term of their own (`aurora`), what verification said as a reward (`reinforce`); `tv` and `lk` are for drafts whose
    proposals are sampled. A knob below that another objective owns must stay at its default."""
    hard_weight: float = Field(0.2, gt=0.0, le=1.0)
    """`kl+ce`: share of the target's own best token in what is learned."""
    lambda_discard: float = Field(0.1, ge=0.0)
    """`aurora`: weight of the rejected proposals' mean against that of all others."""
    discard_top_k: int = Field(10, ge=0)
    """`aurora`: the target's likeliest tokens that are learned where a proposal was rejected; 0: all."""
    baseline_momentum: float = Field(0.95, ge=0.0, lt=1.0)
    """`reinforce`: share of the past returns that a step leaves in the baseline."""
    kl_weight: float = Field(1.0, ge=0.0)
    """`reinforce`: weight of the KL to the target beside the policy gradient."""
    lk_decay: float = Field(3.0, ge=0.0)
    """`lk`: how soon total variation takes over from KL as target and draft overlap; 0 is KL alone."""
    target_temperature: float = Field(1.0, gt=0.0)
    """Sharpens (below 1) the target distribution that is learned."""
    noise: float = Field(0.0, ge=0.0)
    """Gaussian noise on the target's features in training, as a share of the root mean square of each row and layer."""
    max_context_rows: int = Field(1024, ge=1)
    """Prompt rows before the first completion row that the draft attends to in training."""
    bfloat16: bool = True
    """Matrix products in bfloat16; weights and sums stay in float32."""
    exploding_factor: float = Field(3.0, gt=1.0)
    """A KL to the target above so many times its running mean, and above that of a draft that knows nothing, counts as divergence."""
    min_coverage_gain: float = Field(0.002, ge=0.0)
    """Coverage a newly chosen draft vocabulary must add before it replaces the present one."""

    @property
    def objective_knobs(self) -> dict[str, float]:
        """The knobs of the chosen objective, by name."""
        return {knob: getattr(self, knob) for knob, owner in OBJECTIVE_KNOBS.items() if owner == self.objective}

    @model_validator(mode="after")
    def _knobs_belong_to_the_objective(self) -> Self:
        for knob, owner in OBJECTIVE_KNOBS.items():
            default = type(self).model_fields[knob].default
            if owner != self.objective and getattr(self, knob) != default:
                raise ValueError(
                    f'{knob} = {getattr(self, knob)} belongs to objective = "{owner}", and the objective is "{self.objective}"; '
                    f"choose that objective or leave {knob} out"
                )
        return self


class GateSettings(Config):
    """`[learner.gate]`: when a candidate is good enough to serve."""

    every_s: float = Field(20.0, gt=0.0)
    """Least time between two evaluations."""
    min_holdout_requests: int = Field(4, ge=2)
    """Requests a judgement needs: held-out ones for a candidate, and anchors for the veto of their domain."""
    confidence: float = Field(0.95, gt=0.5, lt=1.0)
    """One less the chance that, for as long as one draft is active, the gate ever takes the learner's weights for better while they
    are not. The same holds of all warm drafts together, though a restarted learner compares these anew, and of one veto for a domain
    that does not lose."""
    min_gain: float = Field(0.02, ge=0.0)
    """Simulated AL a candidate must add."""
    max_anchor_drop: float = Field(0.05, ge=0.0)
    """Simulated AL that no domain may lose. Domains of too few anchors are judged together."""
    max_requests: int = Field(32, ge=2)
    """Most requests that one round scores a candidate on, but for anchors."""
    max_anchors_per_domain: int = Field(8, ge=1)
    """Anchor requests of each domain that are scored."""
    shift_tokens: int = Field(2000, ge=1)
    """Completion tokens of the newest requests on which drafts are compared with the active one. Few: what they say is of the
    traffic now; many: it is sure."""
    num_resamples: int = Field(2000, ge=100)
    """Of the bootstrap that compares drafts on a set of requests."""
    unjudged_every_steps: int = Field(0, ge=0)
    """Above 0 nothing is judged: after so many optimiser steps the present weights serve, whatever they are worth, and no warm
    draft returns. Published recipes work like that; it is here to be compared with (`paceline bench learning`)."""


class LearnerSettings(Config):
    """`[learner]`."""

    enabled: bool = True
    """Off: the draft that serves stays as it is."""
    num_processes: int = Field(1, ge=1)
    """That train together, each on a share of every step's batch, on a GPU of its own where there are some. More than one pays only
    with a `train.batch_tokens` of many requests."""
    device: DeviceChoice = "auto"
    """Where it trains and judges. `auto`: on a GPU where torch has one, else on the CPU. What engines leave of a GPU's memory has to
    hold weights, optimiser state and the target's embedding and head (`engine.gpu_memory_utilization`)."""
    num_threads: int = Field(1, ge=1)
    """Threads that compute, in each process."""
    nice: int = Field(10, ge=0, le=19)
    """Niceness of the process: engines go first."""
    checkpoint_every_s: float = Field(30.0, gt=0.0)
    keep_versions: int = Field(8, ge=2)
    """Newest drafts that stay on disk; the active one, its parent, the floor and the warm ones (`learner/warm.py`) stay besides."""
    replay: ReplaySettings = ReplaySettings()
    train: TrainSettings = TrainSettings()
    gate: GateSettings = GateSettings()


class LearnerConfig(Config):
    """Resolved configuration of the learner role."""

    learner: LearnerSettings
    target_dir: Path
    state_dir: Path
    capture_endpoint: str
    """ZMQ address the PULL socket binds to."""
    admin_url: str
    """Base URL of the gateway's admin port."""
    num_speculative_tokens: int
