"""From what a killed run left on disk to where it was: weights, ledger, waiting groups, open groups.

The newest checkpoint's weights make the steps since then again, from the batches that were dumped before each, on CPUs to the last
bit. The record, which is newer than the checkpoint, says what the ledger knew by then. Where batches or record are damaged, the
checkpoint alone is gone back to: rollouts are lost then, and none is counted twice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rl.config import RunSettings
from rl.generator.state import GeneratorState
from rl.rewards.reward_model import RewardModel
from rl.run.directory import RunDirectory
from rl.run.finished import FinishedGroups
from rl.run.record import RunRecord, Steering
from rl.run.told_ledger import ToldLedger
from rl.staleness.ledger import LedgerState
from rl.trainer.checkpoint import Checkpoints
from rl.trainer.dumps import Dumps
from rl.trainer.trainer import Trainer
from rl.trajectory import Group
from wire.errors import RolloutError, TrainerError
from wire.target import BASE_VERSION

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    num_steps: int
    ledger: LedgerState
    generator: GeneratorState
    waiting: tuple[Group, ...]
    """Finished groups on disk; those in training at the kill among them."""
    history_bytes: int | None
    """None: the history is kept as it is."""
    num_remade: int = 0
    """Steps since the checkpoint, which were made again from their batches."""
    steering: Steering = field(default_factory=Steering)
    """New where only a checkpoint could be used."""


def resume(
    trainer: Trainer,
    model: RewardModel | None,
    checkpoints: Checkpoints,
    dumps: Dumps,
    record: RunRecord | None,
    finished: FinishedGroups,
) -> Resumed:
    """Bring the trainer and the reward model there. Raises TrainerError where there is a run and nothing of it can be used."""
    progress = checkpoints.restore(trainer)
    if model is not None and progress is not None and progress.rewards:
        model.load(progress.rewards)
    num_before = trainer.num_steps
    if record is not None and _catch_up(trainer, model, dumps, record):
        return Resumed(
            record.num_steps,
            record.ledger,
            record.generator,
            _read(finished, record.ledger),
            record.history_bytes,
            record.num_steps - num_before,
            record.steering,
        )
    if progress is not None:
        return Resumed(progress.num_steps, progress.ledger, progress.generator, progress.waiting, None)
    if record is not None:
        raise TrainerError(
            f"the run made {record.num_steps} steps, but has no checkpoint and not all their batches; begin anew under another rl.name"
        )
    return Resumed(0, LedgerState(version=BASE_VERSION), GeneratorState(), (), None)


def take_up(directory: RunDirectory, settings: RunSettings, version: int, resumed: Resumed) -> tuple[ToldLedger, list[Group]]:
    """The ledger as it stands where `version` is served, and the groups that wait; files of a course that was gone back on go."""
    history = directory.history
    if resumed.history_bytes is not None:
        history.cut(resumed.history_bytes)
    else:
        history.keep(lambda _event: True)  # but for a line that was cut off
    directory.metrics.keep(lambda metrics: metrics.report.step < resumed.num_steps)
    directory.heldout.keep(lambda result: result.num_steps <= resumed.num_steps)
    directory.finished.forget_from(resumed.ledger.next_group_id)
    ledger, evictions = ToldLedger.resume(
        resumed.ledger, version, eta=settings.eta, groups_per_version=settings.groups_per_step
    )
    assert isinstance(ledger, ToldLedger)
    ledger.tell_to(history)
    ledger.tell_evicted(evictions)
    there = {group.group_id: group for group in resumed.waiting}
    finished = [entry.group_id for entry in ledger.state.open if entry.finished_rank is not None]
    lost = [group_id for group_id in finished if group_id not in there or there[group_id].oldest_version > version]
    ledger.evict(lost, "failed")
    return ledger, [there[group_id] for group_id in finished if group_id not in lost]


def _catch_up(trainer: Trainer, model: RewardModel | None, dumps: Dumps, record: RunRecord) -> bool:
    """Make the steps between the trainer and the record again; False where that cannot be, and then nothing was done."""
    missed = range(trainer.num_steps, record.num_steps)
    if record.num_steps < trainer.num_steps:
        return False
    try:
        batches = [dumps.batch(step) for step in missed]
    except TrainerError as error:
        log.warning("the run goes back to step %d: %s", trainer.num_steps, error)
        return False
    for batch in batches:
        log.info("step %d is made again", batch.step)
        trainer.version = batch.version
        trainer.step(batch.groups)
        if model is not None:
            model.update(batch.pairs)
    trainer.version = record.ledger.version
    return True


def _read(finished: FinishedGroups, ledger: LedgerState) -> tuple[Group, ...]:
    found = []
    for entry in (*ledger.open, *ledger.training):
        if entry.finished_rank is not None:
            try:
                found.append(finished.read(entry.group_id))
            except RolloutError as error:
                log.warning("%s", error)
    return tuple(found)
