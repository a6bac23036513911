"""What a step of a run was: one JSON line of a file, and one line for whoever watches."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from rl.rewards.cooper import RewardModelReport
from rl.trainer.metrics import StepReport
from rl.trajectory import Group
from wire.spec import SCHEMA_VERSION
from wire.target_control import TargetSwapReport


class StepMetrics(Struct, frozen=True, kw_only=True, tag="rl_step"):
    """run -> disk and live view. Times are of this step's stations, one after the other; the generator goes on during all of them."""

    schema_version: int = SCHEMA_VERSION
    at_s: float
    """Unix time of its end."""
    version: int
    """Of the target that serves after it."""
    report: StepReport
    reward_model: RewardModelReport | None = None
    """None where the run has none."""
    temperature: float
    """Of rollouts that begin after it."""
    num_with_signal: int
    """Groups whose rewards differed."""
    wait_s: float
    """Until the batch was complete."""
    lesson_s: float = 0.0
    """Until right answers were corrupted for the reward model, and the rule had seen them."""
    train_s: float
    """The batch on disk and the optimiser's steps."""
    write_s: float = 0.0
    """The new version on disk."""
    activate_s: float = 0.0
    """Until every engine served it and had said the canary."""
    pause_s: float = 0.0
    """In which the slowest engine made no tokens."""
    keep_s: float = 0.0
    """Checkpoint and pruning after the step before this one."""
    heldout_s: float = 0.0
    """Held-out problems before this step."""
    acceptance_length: float | None = None
    """Of the draft under the target before; None: not measured."""
    num_tokens: int = 0
    """The generator kept since the step before."""
    environment_share: float = 0.0
    """Of the batch's rollouts: time in which they were scored over time since they were begun."""
    counts: dict[str, int] = {}
    """The generator's since its process began, by name (`rl/generator/counts.py`)."""
    num_evicted: dict[str, int] = {}
    """Groups since the step before, by reason."""
    num_running: int = 0
    num_waiting: int = 0
    """Groups at the step's end."""

    @property
    def duration_s(self) -> float:
        return self.wait_s + self.lesson_s + self.train_s + self.write_s + self.activate_s + self.keep_s + self.heldout_s


def longest_pause_s(swap: TargetSwapReport | None) -> float:
    """Of the engines; 0 where nothing was committed."""
    commits = swap.commits.values() if swap is not None else ()
    return max((commit.total_ms for commit in commits), default=0.0) / 1000.0


def environment_share(batch: Sequence[Group]) -> float:
    """0 where there are no rollouts."""
    timings = [rollout[0].timings for group in batch for rollout in group.rollouts]
    whole_s = sum(timing.scored_s - timing.submitted_s for timing in timings)
    return sum(timing.scored_s - timing.generated_s for timing in timings) / whole_s if whole_s > 0.0 else 0.0


def progress(metrics: StepMetrics, num_steps: int) -> str:
    """A step in a line; what is wrong stands last."""
    report, model = metrics.report, metrics.reward_model
    reward = f"reward {report.rewards.mean:.3f}" if report.rewards is not None else "no reward"
    loss = report.updates[-1].loss if report.updates else None
    parts = [
        f"step {report.step + 1}/{num_steps}: target {metrics.version}",
        f"{reward} of {metrics.num_with_signal}/{report.num_groups} groups with signal",
        "no update" if loss is None else f"loss {loss:+.4f}",
        *([f"entropy {report.entropy:.2f}"] if report.entropy is not None else []),
        *([f"{report.output_tokens.mean:.0f} tokens a rollout"] if report.output_tokens is not None else []),
        f"{metrics.num_tokens / max(metrics.duration_s, 1e-9):.0f} tok/s",
        f"waited {metrics.wait_s:.1f} s, trained {metrics.train_s:.1f} s, updated {metrics.write_s + metrics.activate_s:.1f} s",
        *([f"staleness {report.staleness.p50} to {report.staleness.worst}"] if report.staleness is not None else []),
        *([f"|dlogp| {report.floor.abs_logprob.mean:.1e}"] if report.floor is not None else []),
        *([f"reward model {_against_rule(model)}"] if model is not None else []),
        *([f"evicted {sum(metrics.num_evicted.values())}"] if metrics.num_evicted else []),
    ]
    alarms = [*report.alarms, *(model.alarms if model is not None else ())]
    return " | ".join([*parts, *(f"NOT LEARNED FROM: {why}" for why in report.skipped), *(f"ALARM: {text}" for text in alarms)])


def _against_rule(model: RewardModelReport) -> str:
    return f"{model.audit.disagreement:.0%} against the rule" if model.audit.num_verdicts else "without a verdict"
