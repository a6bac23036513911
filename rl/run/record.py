"""Where a run stands, on disk after every finished group and every step, and each second in which rollouts finish.

The trainer's checkpoints hold gigabytes and are made now and then. In between, this small record holds the ledger and the open groups,
finished groups are files (`finished.py`) and each batch was dumped before it was learned from: a checkpoint, the batches since and the
record together are the state of a run that was killed (`resume.py`).
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from msgspec import Struct

from rl.controllers.curriculum import Curriculum
from rl.controllers.temperature import Temperature
from rl.generator.state import GeneratorState
from rl.staleness.ledger import LedgerState
from wire.spec import SCHEMA_VERSION

log = logging.getLogger(__name__)


class Steering(Struct, frozen=True, kw_only=True):
    """What the controllers know."""

    temperature: Temperature | None = None
    """None: it is not controlled."""
    curricula: dict[str, Curriculum] = {}
    """By environment; empty without a curriculum."""


class RunRecord(Struct, frozen=True, kw_only=True, tag="rl_run_record"):
    schema_version: int = SCHEMA_VERSION
    num_steps: int
    """Batches that are done with: learned from, and their groups gone from the ledger."""
    ledger: LedgerState
    """Its version is the one the engines served then."""
    generator: GeneratorState
    """What the ledger's running groups have."""
    history_bytes: int
    """How much of the history is of before."""
    steering: Steering = Steering()


def write_record(path: Path, record: RunRecord) -> None:
    """Whole or not at all, as far as a killed process goes; a machine that loses power may lose the last ones."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(msgspec.msgpack.encode(record))
    temporary.rename(path)


def read_record(path: Path) -> RunRecord | None:
    """None where there is none, or none that can be read."""
    try:
        record = msgspec.msgpack.decode(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be read: %s", path.name, error)
        return None
    if record.schema_version != SCHEMA_VERSION:
        log.warning("%s is of schema %d, this release reads %d", path.name, record.schema_version, SCHEMA_VERSION)
        return None
    return record
