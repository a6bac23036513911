"""`paceline rl why`: one page about a run, or one of its groups, from what the run left on disk; it may be going on meanwhile."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from rl.config import RunSettings
from rl.rewards.audit import Audit, alarms
from rl.rewards.length_guard import length_report
from rl.run.diagnosis import NUM_STEPS, disagreement, shares, what_is_wrong, what_limits
from rl.run.directory import RunDirectory
from rl.run.explain import explain
from rl.run.heldout import gains
from rl.run.metrics import progress
from rl.run.record import read_record
from rl.trajectory import Group
from wire.errors import ConfigError, RolloutError

NUM_GROUPS = 64
"""The newest finished ones, whose rewards are compared with lengths."""
_WHICH = re.compile(r"(\d{1,15})(?:\.(\d{1,9}))?")


def why(state_dir: Path, name: str, group: str | None) -> Iterator[str]:
    """Lines. group: `GROUP` or `GROUP.SAMPLE`; None: the whole run. Raises ConfigError."""
    directory = RunDirectory.of(state_dir, name)
    if not directory.settings.is_file():
        raise ConfigError(f"no run called {name!r} in {state_dir / 'rl'}; begin one with `paceline rl run CONFIG`")
    settings = RunSettings.read_json(directory.settings)
    if group is None:
        yield from _page(directory, settings)
        return
    which = _WHICH.fullmatch(group)
    if which is None:
        raise ConfigError(f"--group takes a group's number, or one of its rollouts as 12.3, got {group!r}")
    yield from explain(directory, settings, int(which[1]), None if which[2] is None else int(which[2]))


def _page(directory: RunDirectory, settings: RunSettings) -> Iterator[str]:
    metrics = directory.metrics.read()
    record = read_record(directory.record)
    state = "goes on" if directory.is_locked() else "does not run"
    num_steps = record.num_steps if record is not None else 0
    yield f"run {directory.root.name}: {num_steps} of {settings.num_steps} steps, {state}"
    if record is not None:
        ledger = record.ledger
        num_running = sum(entry.finished_rank is None for entry in ledger.open)
        yield (
            f"target {ledger.version}; groups: {num_running} run, {len(ledger.open) - num_running} wait, {len(ledger.training)} in "
            f"training, {len(ledger.owed)} owed; --group N tells of one"
        )
        oldest = min((entry.group_id for entry in ledger.open), default=None)
        if oldest is not None:
            yield f"the oldest one that is not trained on is group {oldest}"
    yield from gains(directory.heldout.read())
    if not metrics:
        yield "no step is made yet"
        return
    yield f"last step, {time.time() - metrics[-1].at_s:.0f} s ago: {progress(metrics[-1], settings.num_steps)}"
    newest = metrics[-NUM_STEPS:]
    spent = ", ".join(f"{name} {share:.0%}" for name, share in shares(newest).items())
    yield f"time of the last {len(newest)} steps: {spent}"
    yield f"what limits it: {what_limits(newest, settings)}"
    lengths = [each.acceptance_length for each in newest if each.acceptance_length is not None]
    if lengths:
        yield f"the draft before each change of the target: AL {lengths[0]:.2f} to {lengths[-1]:.2f}"
    audit = disagreement(newest)
    if audit is not None:
        yield _told(audit)
    problems = [*what_is_wrong(newest), *_hacking(audit, settings), *_follows_length(directory, settings)]
    yield from (f"wrong: {problem}" for problem in problems)
    if not problems:
        yield "nothing is wrong by what was measured"


def _told(audit: Audit) -> str:
    if not audit.num_verdicts:
        return "the reward model has no verdict on any answer: it has learned nothing yet, or no environment has a right answer in words"
    gap = f", its scores of right and wrong ones {audit.score_gap:.2f} apart" if audit.score_gap is not None else ""
    return (
        f"the reward model and the rule disagree on {audit.disagreement:.0%} of {audit.num_verdicts} answers: it accepts "
        f"{audit.num_accepted_wrong} wrong ones and refuses {audit.num_refused_right} right ones{gap}"
    )


def _hacking(audit: Audit | None, settings: RunSettings) -> Iterator[str]:
    """Rule and reward model disagree too often. Nothing where the model is gone from the settings."""
    if audit is not None and settings.reward_model is not None:
        yield from alarms(audit, settings.reward_model.max_disagreement)


def _follows_length(directory: RunDirectory, settings: RunSettings) -> Iterator[str]:
    """Where reward goes with length, by environment; its first reward part is taken for what says whether an answer is right."""
    by_environment: dict[str, list[Group]] = {}
    for group_id in directory.finished.ids()[-NUM_GROUPS:]:
        try:
            group = directory.finished.read(group_id)
        except RolloutError:  # pruned meanwhile
            continue
        if group.scored:
            by_environment.setdefault(group.environment, []).append(group)
    for environment, groups in sorted(by_environment.items()):
        rule = groups[-1].scored[0].reward_parts[0].name
        report = length_report(groups, rule, settings.reward.max_length_correlation)
        yield from (f"{environment}: {alarm}" for alarm in report.alarms)
