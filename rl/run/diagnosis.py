"""What limits a run and what is wrong with it, from the newest steps' metrics, with what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from rl.config import RunSettings
from rl.rewards.audit import Audit
from rl.run.metrics import StepMetrics

NUM_STEPS = 10
"""The newest ones, that a diagnosis is of."""
SLOW_ENVIRONMENT = 0.5
"""Share of a rollout's time in which it is scored."""
MUCH_SILENCE, MUCH_CUT, MUCH_TOO_OLD, MUCH_LOST = 0.5, 0.3, 0.2, 0.05
"""Shares of groups without signal, of rollouts cut off, of groups too old, and of requests that brought no whole answer."""
COLLAPSE = 0.5
"""Of the entropy, between the older and the newer half."""


def shares(metrics: Sequence[StepMetrics]) -> dict[str, float]:
    """Of the run's time, by what the loop did: `rollouts` (it waited for them), `training`, `reward model` (it asked the rule about
    corruptions), `updates`, `checkpoints`, `held-out problems`."""
    spent = {
        "rollouts": sum(each.wait_s for each in metrics),
        "training": sum(each.train_s for each in metrics),
        "reward model": sum(each.lesson_s for each in metrics),
        "updates": sum(each.write_s + each.activate_s for each in metrics),
        "checkpoints": sum(each.keep_s for each in metrics),
        "held-out problems": sum(each.heldout_s for each in metrics),
    }
    whole_s = sum(spent.values())
    return {name: seconds / whole_s if whole_s > 0.0 else 0.0 for name, seconds in spent.items()}


def what_limits(metrics: Sequence[StepMetrics], settings: RunSettings) -> str:
    """One sentence with what to change; metrics of one step or more."""
    most, share = max(shares(metrics).items(), key=lambda item: item[1])
    match most:
        case "rollouts" if fmean(each.environment_share for each in metrics) > SLOW_ENVIRONMENT:
            return (
                f"the environment: {share:.0%} of the time goes by waiting for rollouts, which are mostly being scored; "
                f"raise rl.num_workers ({settings.num_workers})"
            )
        case "rollouts":
            in_step = " eta is 0, so nothing is generated while it trains: 1 lets both go on." if settings.eta == 0 else ""
            return (
                f"the generator: {share:.0%} of the time goes by waiting for rollouts.{in_step} More at a time "
                f"(rl.generator.concurrency.most is {settings.generator.concurrency.most}), another engine ([[pool]]) or shorter answers make it faster"
            )
        case "training":
            return (
                f"the trainer: {share:.0%} of the time. Give it more cores (rl.num_threads is {settings.num_threads}), fewer groups "
                "per step, or shorter rollouts"
            )
        case "reward model":
            return (
                f"the reward model: {share:.0%} of the time goes by asking environments about corrupted answers; raise rl.num_workers "
                f"({settings.num_workers})"
            )
        case "updates":
            return f"changes of the target: {share:.0%} of the time. More groups per step ({settings.groups_per_step}) make them rarer"
        case "held-out problems":
            return f"held-out problems: {share:.0%} of the time; raise rl.heldout.every_steps, or ask fewer (num_problems)"
        case _:
            return (
                f"checkpoints: {share:.0%} of the time; raise rl.checkpoint_every_steps ({settings.checkpoint_every_steps}) and "
                "rl.trainer.num_dumps with it"
            )


def disagreement(metrics: Sequence[StepMetrics]) -> Audit | None:
    """Of rule and reward model over all these steps; None where there was no model."""
    audits = [each.reward_model.audit for each in metrics if each.reward_model is not None]
    return sum(audits, Audit()) if audits else None


def what_is_wrong(metrics: Sequence[StepMetrics]) -> Iterator[str]:
    """A sentence for each; metrics of one step or more."""
    yield from _alarms(metrics)
    yield from _silence(metrics)
    yield from _entropy(metrics)
    cut = [each.report.truncated_rollout_fraction for each in metrics if each.report.truncated_rollout_fraction is not None]
    if cut and fmean(cut) > MUCH_CUT:
        yield (
            f"{fmean(cut):.0%} of the rollouts are cut off at max_output_tokens: raise it, or punish length "
            "(rl.algorithm.overlong_buffer_tokens)"
        )
    yield from _evictions(metrics)
    yield from _answers(metrics[-1])


def _alarms(metrics: Sequence[StepMetrics]) -> Iterator[str]:
    """Numbers that no longer agree, and steps left out, as the newest step that says so puts it."""
    newest: dict[tuple[str, str], str] = {}
    number: Counter[tuple[str, str]] = Counter()
    for each in metrics:
        for text in each.report.alarms:
            name, _, rest = text.partition(" is ")
            which = (
                name,
                rest.partition("; ")[2],
            )  # a number of all tokens and of the newest weights' own has one name, and other advice
            newest[which] = text
            number[which] += 1
    for which, text in newest.items():
        yield f"in {number[which]} of {len(metrics)} steps: {text}"
    skipped = [why for each in metrics for why in each.report.skipped]
    if skipped:
        yield f"{len(skipped)} updates were left out, the last because {skipped[-1]}: lower rl.trainer.learning_rate"


def _silence(metrics: Sequence[StepMetrics]) -> Iterator[str]:
    num_groups = sum(each.report.num_groups for each in metrics)
    num_silent = num_groups - sum(each.num_with_signal for each in metrics)
    if not num_groups or num_silent / num_groups <= MUCH_SILENCE:
        return
    rewards = [each.report.rewards.mean for each in metrics if each.report.rewards is not None]
    mean = fmean(rewards) if rewards else 0.0
    advice = "ask harder problems" if mean > 0.5 else "ask easier problems, or raise the temperature or the group size"
    yield (
        f"{num_silent / num_groups:.0%} of the groups have equal rewards and teach nothing, at a mean reward of {mean:.2f}: {advice}"
    )


def _entropy(metrics: Sequence[StepMetrics]) -> Iterator[str]:
    entropies = [each.report.entropy for each in metrics if each.report.entropy is not None]
    half = len(entropies) // 2
    if half and fmean(entropies[half:]) < COLLAPSE * fmean(entropies[:half]):
        yield (
            f"the entropy fell from {fmean(entropies[:half]):.2f} to {fmean(entropies[half:]):.2f} nats: the policy stops exploring; "
            "lower rl.trainer.learning_rate, raise rl.generator.temperature or set rl.algorithm.kl_weight"
        )


def _evictions(metrics: Sequence[StepMetrics]) -> Iterator[str]:
    evicted: Counter[str] = Counter()
    for each in metrics:
        evicted.update(each.num_evicted)
    num_used = sum(each.num_with_signal for each in metrics)
    if evicted["too old"] > MUCH_TOO_OLD * max(num_used, 1):
        yield (
            f"{evicted['too old']} groups became too old against {num_used} that were used: a rollout takes longer than its updates; "
            "raise rl.eta or rl.groups_per_step, or run fewer at a time"
        )
    if evicted["failed"]:
        yield f"{evicted['failed']} groups failed: the run's log names the environment or the gateway's reason"


def _answers(newest: StepMetrics) -> Iterator[str]:
    """Of the process that runs, or ran last."""
    counts = newest.counts
    num_requests = max(counts.get("num_requests", 0), 1)
    if counts.get("num_bad_answers"):
        yield f"{counts['num_bad_answers']} answers of engines could not be believed; the run's log says why"
    if counts.get("num_lost", 0) > MUCH_LOST * num_requests:
        yield f"{counts['num_lost']} of {num_requests} requests were lost: engines die, or have no place (paceline view)"
    num_tokens = max(counts.get("num_tokens", 0), 1)
    if counts.get("num_unattributed_tokens", 0) > MUCH_LOST * num_tokens:
        yield (
            f"{counts['num_unattributed_tokens']} tokens were drawn twice, because their streams broke while the target changed: "
            "change it less often (rl.groups_per_step)"
        )
