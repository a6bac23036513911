"""From what a killed run left on disk to where it was: weights, ledger, waiting groups, open groups.

The newest checkpoint's weights make the steps since then again, from the batches that were dumped before each, on CPUs to the last
bit. The record, which is newer than the checkpoint, says what the ledger knew by then. Where batches or record are damaged, the
checkpoint alone is gone back to: rollouts are lost then, and none is counted twice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rl.generator.state import GeneratorState
from rl.run.finished import FinishedGroups
from rl.run.record import RunRecord
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


def resume(
    trainer: Trainer, checkpoints: Checkpoints, dumps: Dumps, record: RunRecord | None, finished: FinishedGroups
) -> Resumed:
    """Bring the trainer there. Raises TrainerError where there is a run and nothing of it can be used."""
    progress = checkpoints.restore(trainer)
    if record is not None and _catch_up(trainer, dumps, record):
        return Resumed(record.num_steps, record.ledger, record.generator, _read(finished, record.ledger), record.history_bytes)
    if progress is not None:
        return Resumed(progress.num_steps, progress.ledger, progress.generator, progress.waiting, None)
    if record is not None:
        raise TrainerError(
            f"the run made {record.num_steps} steps, but has no checkpoint and not all their batches; begin anew under another rl.name"
        )
    return Resumed(0, LedgerState(version=BASE_VERSION), GeneratorState(), (), None)


def _catch_up(trainer: Trainer, dumps: Dumps, record: RunRecord) -> bool:
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
