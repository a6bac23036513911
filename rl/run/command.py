"""`paceline rl run`: what a run works with, made from settings and a running system, and given back at its end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rl.config import RunSettings
from rl.environments.pool import EnvironmentPool, WorkerDied
from rl.environments.settings import EnvironmentConfig
from rl.generator.gateway import Gateway
from rl.generator.probe import probe
from rl.generator.rendering import TargetText
from rl.rewards.reward_model import RewardModel
from rl.run.admin import Admin
from rl.run.directory import RunDirectory
from rl.run.record import read_record
from rl.run.resume import Resumed, resume
from rl.run.run import Parts, Run
from rl.run.updates import Updates
from rl.trainer.checkpoint import Checkpoints
from rl.trainer.dumps import Dumps
from rl.trainer.sink import StoreSink
from rl.trainer.trainer import Trainer
from wire.errors import ConfigError, PacelineError
from wire.target import BASE_VERSION, TargetStore

log = logging.getLogger(__name__)

CANARY = "The train leaves at 9:45 from platform 3. How long is the way from here to the sea, and what does it cost? Let's think step by step."
"""Said to engines after each change of the target; any text that a model finds neither certain nor odd."""


@dataclass(frozen=True, kw_only=True)
class System:
    """The running system a run trains the target of."""

    state_dir: Path
    target_dir: Path
    gateway_url: str
    admin_url: str
    operator_token: str
    dtype: str
    """The engines'."""


def run(settings: RunSettings, environments: Sequence[EnvironmentConfig], system: System, say: Callable[[str], None]) -> None:
    """Begin or go on; returns when all steps are made. Raises PacelineError, OSError where a disk refuses."""
    _require_fit(settings, environments, system)
    directory = RunDirectory.of(system.state_dir, settings.name)
    handle = directory.lock()
    try:
        directory.settings.write_text(settings.model_dump_json(indent=2) + "\n")
        asyncio.run(conduct(directory, settings, environments, system, say))
    except ExceptionGroup as group:
        raise _first(group) from group
    finally:
        os.close(handle)


async def conduct(
    directory: RunDirectory,
    settings: RunSettings,
    environments: Sequence[EnvironmentConfig],
    system: System,
    say: Callable[[str], None],
) -> None:
    """A run from its settings to its last step, in this event loop. Raises what fails, in ExceptionGroups too."""
    async with AsyncExitStack() as stack:
        admin = Admin(system.admin_url, system.operator_token)
        stack.push_async_callback(admin.close)
        gateway = Gateway(system.gateway_url, silence_s=settings.generator.silence_s)
        stack.push_async_callback(gateway.close)
        target = TargetText.load(system.target_dir)
        canary = target.encode(CANARY, special=True)
        await probe(gateway, token_ids=canary[:8])
        say(f"the policy is {system.target_dir.name}; everything of this run is in {directory.root}")
        pool = await stack.enter_async_context(_workers(environments, settings.num_workers))
        sink = StoreSink(TargetStore(system.state_dir), system.target_dir, canary_token_ids=canary, dtype=system.dtype)
        trainer = await asyncio.to_thread(Trainer, system.target_dir, settings.trainer, settings.algorithm)
        model = RewardModel(settings.reward_model) if settings.reward_model is not None else None
        resumed = await asyncio.to_thread(_resume, directory, settings, trainer, model)
        updates = Updates(admin)
        await serve(trainer, sink, updates)
        if resumed.num_steps:
            say(f"going on after step {resumed.num_steps} with target {trainer.version}, {len(resumed.waiting)} groups wait")
        parts = Parts(trainer, model, sink, updates, pool, environments, gateway, target)
        await Run(directory, settings, parts, resumed, say).go()
        say(f"{settings.num_steps} steps are made; target {trainer.version} serves")


async def serve(trainer: Trainer, sink: StoreSink, updates: Updates) -> None:
    """Have the engines serve the trainer's weights: its version, or a new one where that is gone from the store."""
    if trainer.version != BASE_VERSION and not sink.store.exists(trainer.version):
        log.warning("target %d is gone from the store and written anew", trainer.version)
        await asyncio.to_thread(trainer.publish, sink)
    await updates.require(trainer.version)


def _resume(directory: RunDirectory, settings: RunSettings, trainer: Trainer, model: RewardModel | None) -> Resumed:
    return resume(
        trainer,
        model,
        Checkpoints(directory.checkpoints, num_kept=settings.trainer.num_checkpoints),
        Dumps(directory.dumps, num_kept=settings.trainer.num_dumps),
        read_record(directory.record),
        directory.finished,
    )


@asynccontextmanager
async def _workers(environments: Sequence[EnvironmentConfig], number: int) -> AsyncIterator[EnvironmentPool]:
    try:
        pool = await EnvironmentPool.start(environments, num_workers=number)
    except WorkerDied as error:
        raise ConfigError(f"environments cannot be begun: {error}") from error
    try:
        yield pool
    finally:
        await pool.close()


def _require_fit(settings: RunSettings, environments: Sequence[EnvironmentConfig], system: System) -> None:
    if not environments:
        raise ConfigError("there is no [[environment]] to draw problems from; name one, as configs/rl.toml does")
    if settings.trainer.dtype != system.dtype:
        raise ConfigError(
            f"rl.trainer.dtype is {settings.trainer.dtype}, but the engines compute in {system.dtype}: the two would not agree on any "
            "probability; make rl.trainer.dtype and target.dtype the same"
        )


def _first(group: BaseException) -> Exception:
    """What to tell of several failures: the first that says what to do, else the first."""
    leaves = list(_leaves(group))
    return next((leaf for leaf in leaves if isinstance(leaf, PacelineError)), leaves[0])


def _leaves(error: BaseException) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error] if isinstance(error, Exception) else []
