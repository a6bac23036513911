"""One group: why it was used, dropped or waits, and who made the tokens of its rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rl.config import RunSettings
from rl.generator.state import OpenGroup, OpenRollout
from rl.run.directory import RunDirectory
from rl.run.history import GroupEvent
from rl.run.metrics import StepMetrics
from rl.run.record import RunRecord, read_record
from rl.staleness.admission import limit
from rl.staleness.ledger import Entry, LedgerState
from rl.staleness.window import window_size
from rl.trajectory import Group, Trajectory, Turn
from wire.errors import ConfigError, RolloutError

EVICTED = {
    "too old": "its oldest token would have trailed the policy by more than eta versions",
    "no signal": "all its rewards are equal, so that none of its rollouts is better than another",
    "failed": "its environment, its engine or the step that took it failed",
}


def explain(directory: RunDirectory, settings: RunSettings, group_id: int, sample_index: int | None) -> Iterator[str]:
    """Lines for a person. Raises ConfigError for a group or sample there is not."""
    events = directory.history.read()
    own = [event for event in events if event.group_id == group_id]
    if not own:
        raise ConfigError(f"the run {directory.root.name} has no group {group_id}; its history ends with group {_last(events)}")
    record = read_record(directory.record)
    first = own[0]
    again = f", attempt {first.attempt + 1} at its place" if first.attempt else ""
    place = f" in place of group {first.refill_of}" if first.refill_of is not None else ""
    yield f"group {group_id}: problem {first.environment_seed} of {first.environment}{again}, submitted at target {first.version}{place}"
    yield from (f"  {_at(event)}  {_station(event)}" for event in own)
    yield _verdict(own[-1], events, directory.metrics.read(), record, settings)
    yield from _rollouts(directory, record, group_id, sample_index)


def _last(events: Sequence[GroupEvent]) -> object:
    return max((event.group_id for event in events), default="none")


def _at(event: GroupEvent) -> str:
    return time.strftime("%H:%M:%S", time.localtime(event.at_s))


def _station(event: GroupEvent) -> str:
    match event.station:
        case "finished":
            return f"finished at target {event.version}; its oldest token is target {event.oldest_version}'s"
        case "evicted":
            return f"evicted at target {event.version}: {event.reason}"
        case "trained":
            return f"learned from; target {event.version} came of it"
        case _:
            return f"{event.station} at target {event.version}"


def _verdict(
    last: GroupEvent,
    events: Sequence[GroupEvent],
    metrics: Sequence[StepMetrics],
    record: RunRecord | None,
    settings: RunSettings,
) -> str:
    station = last.station
    if record is not None and any(
        entry.group_id == last.group_id and entry.finished_rank is not None for entry in record.ledger.open
    ):
        station = "finished"  # a run that goes on after a kill has what was in training wait again
    match station:
        case "trained":
            step = next((each.report.step for each in metrics if each.version == last.version), None)
            which = "a step" if step is None else f"step {step + 1}"
            return f"used: {which} learned from it"
        case "evicted":
            heir = next((event.group_id for event in events if event.refill_of == last.group_id), None)
            then = f"group {heir} took its place" if heir is not None else "another one is owed for it"
            return f"dropped ({last.reason}): {EVICTED.get(last.reason, 'unknown')}; {then}"
        case "taken":
            return "in training: the step that took it is not over"
        case "finished":
            return "waits: " + (_why_waiting(last.group_id, record.ledger, settings) if record is not None else "for a batch")
        case _:
            return "runs: " + _how_far(_open(record, last.group_id))


def _why_waiting(group_id: int, ledger: LedgerState, settings: RunSettings) -> str:
    """By the ledger's own rules (`rl/staleness/window.py`)."""
    entries = {entry.group_id: entry for entry in ledger.open}
    if group_id not in entries:
        return "for the next record of the run"
    oldest, size = min(entries), window_size(limit(settings.eta, settings.groups_per_step))
    ready = [other for other, entry in entries.items() if entry.finished_rank is not None]
    age = _age(entries[group_id], ledger.version, settings.eta)
    if group_id >= oldest + size:
        return f"group {oldest} came before it and is not done; one {size} places behind it may not overtake it; {age}"
    return f"a batch takes {settings.groups_per_step} groups with signal, {len(ready)} are ready; {age}"


def _age(entry: Entry, version: int, eta: int) -> str:
    return f"{entry.staleness(version)} versions old of {eta} it may be"


def _open(record: RunRecord | None, group_id: int) -> OpenGroup | None:
    groups = record.generator.groups if record is not None else ()
    return next((group for group in groups if group.group_id == group_id), None)


def _how_far(group: OpenGroup | None) -> str:
    if group is None:
        return "nothing is on disk of it yet"
    num_finished = sum(bool(rollout.finished) for rollout in group.rollouts)
    return f"{num_finished} of {len(group.rollouts)} rollouts are finished, at temperature {group.temperature:g}"


def _rollouts(directory: RunDirectory, record: RunRecord | None, group_id: int, sample_index: int | None) -> Iterator[str]:
    """Of the finished group, or as far as an open one has come."""
    found: Group | OpenGroup
    try:
        found = directory.finished.read(group_id)
    except RolloutError as error:
        unfinished = _open(record, group_id)
        if unfinished is None:
            yield f"  no rollouts to show: {error}"
            return
        found = unfinished
    num_samples = len(found.rollouts if isinstance(found, OpenGroup) else found.trajectories)
    if sample_index is not None and sample_index >= num_samples:
        raise ConfigError(f"group {group_id} has samples 0 to {num_samples - 1}, and no {sample_index}")
    if isinstance(found, OpenGroup):
        yield from _open_rollouts(found, sample_index)
        return
    chosen = [each for each in found.trajectories if sample_index in (None, each.sample_index)]
    for trajectory in chosen:
        yield from _trajectory(trajectory)


def _open_rollouts(group: OpenGroup, sample_index: int | None) -> Iterator[str]:
    for rollout in group.rollouts:
        if sample_index not in (None, rollout.sample_index):
            continue
        if rollout.finished:
            for trajectory in rollout.finished:
                yield from _trajectory(trajectory, name=str(rollout.sample_index))
        else:
            yield f"  rollout {rollout.sample_index}: {_progress(rollout)}"


def _progress(rollout: OpenRollout) -> str:
    turns = [played.turn.output_token_ids for played in rollout.turns]
    num_partial = len(rollout.partial.output_token_ids) if rollout.partial is not None else 0
    return f"{len(turns)} turns and {num_partial} tokens of the next, {sum(map(len, turns)) + num_partial} tokens in all"


def _trajectory(trajectory: Trajectory, name: str = "") -> Iterator[str]:
    parts = ", ".join(f"{part.name} {part.value:g}" for part in trajectory.reward_parts)
    worth = f"reward {trajectory.reward:g} ({parts})" if trajectory.failure is None else f"failed: {trajectory.failure}"
    fork = f", forked from {trajectory.forked_from}" if trajectory.forked_from is not None else ""
    yield (
        f"  rollout {name or trajectory.sample_index}{fork}: {worth}, {trajectory.num_output_tokens} tokens at temperature "
        f"{trajectory.temperature:g}"
    )
    for number, turn in enumerate(trajectory.turns):
        yield f"    turn {number}: {_makers(turn)}; it ended with {turn.finish_reason}"


def _makers(turn: Turn) -> str:
    spans = ", ".join(f"tokens {span.start} to {span.end - 1} by target {span.target_version}" for span in turn.weight_spans)
    draft = "without speculation" if turn.draft_version is None else f"proposed by draft {turn.draft_version} when it began"
    return f"{spans}, {draft}"
