"""A whole run but for engines: a tiny policy, real environment workers, gateway and admin port as stand-ins on real sockets.

As a program it is the run alone, to be killed: `rl_run_rig.py STATE_DIR GATEWAY_URL ADMIN_URL SETTINGS_JSON ENVIRONMENT_JSON`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from admin_stand_in import TOKEN, AdminStandIn
from generate_stand_in import GenerateStandIn
from generator_rig import make_target
from tiny_policy import write_policy

from rl.config import RunSettings, read_environments
from rl.run import command
from rl.run.command import System
from rl.run.directory import RunDirectory
from rl.run.history import GroupEvent, Station
from rl.trainer.dumps import Dumps
from rl.trainer.trainer import Trainer

EVEN = {
    "name": "even",
    "kind": "gym",
    "factory": "played_environments:Even",
    "reward_range": [0.0, 4.0],
    "parameters": {"broken_from": 1 << 31},  # held-out seeds begin at 1 << 30
}
MAX_TOKENS = 32
DEADLINE_S = 240.0


def make_settings(**changes: Any) -> RunSettings:
    """Four steps of two groups of three rollouts, at most one version old."""
    common: dict[str, Any] = {
        "num_steps": 4,
        "groups_per_step": 2,
        "eta": 1,
        "checkpoint_every_steps": 3,
        "generator": {"group_size": 3, "max_output_tokens": MAX_TOKENS, "concurrency": {"least": 6, "most": 6}},
        "trainer": {"learning_rate": 1e-2, "max_output_tokens": MAX_TOKENS, "pack_tokens": 256},
        "algorithm": {"correction": {"token_weight": "none", "sequence_band": None}},
    }
    return RunSettings.build(common | changes, source="test")


@dataclass
class RunRig:
    state_dir: Path
    engines: GenerateStandIn
    admin: AdminStandIn
    environment: dict[str, Any]
    said: list[str] = field(default_factory=list)

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory.of(self.state_dir, "run")

    @property
    def system(self) -> System:
        return make_system(self.state_dir, self.engines.url, self.admin.url)

    async def conduct(self, settings: RunSettings) -> None:
        environments = read_environments([self.environment], source="test")
        self.directory.root.mkdir(parents=True, exist_ok=True)
        self.directory.settings.write_text(settings.model_dump_json())
        await command.conduct(self.directory, settings, environments, self.system, self.said.append)

    def groups_at(self, station: Station) -> list[int]:
        return [event.group_id for event in self.directory.history.read() if event.station == station]

    def events(self) -> list[GroupEvent]:
        return self.directory.history.read()

    def retrained(self, settings: RunSettings) -> Trainer:
        """A trainer that has made the steps on disk from the beginning, one after the other."""
        trainer = Trainer(self.system.target_dir, settings.trainer, settings.algorithm)
        dumps = Dumps(self.directory.dumps, num_kept=settings.trainer.num_dumps)
        assert dumps.steps() == list(range(len(dumps.steps())))
        for step in dumps.steps():
            batch = dumps.batch(step)
            trainer.version = batch.version
            trainer.step(batch.groups)
        return trainer


def make_system(state_dir: Path, gateway_url: str, admin_url: str) -> System:
    return System(
        state_dir=state_dir,
        target_dir=state_dir / "model",
        gateway_url=gateway_url,
        admin_url=admin_url,
        operator_token=TOKEN,
        dtype="float32",
    )


@asynccontextmanager
async def run_rig(
    state_dir: Path,
    *,
    admin_fault: Callable[[int], str] = lambda number: "",
    environment: dict[str, Any] = EVEN,
    **stand_in: Any,
) -> AsyncIterator[RunRig]:
    """Rollouts of a group are of different lengths, and so are their rewards."""
    target = make_target(state_dir / "model")
    write_policy(state_dir / "model", vocab_size=target.vocab_size)
    newline_id, eos_id = target.encode("\n")[0], target.stop_token_ids[0]
    served = GenerateStandIn(newline_id=newline_id, eos_id=eos_id, **stand_in)

    def vary(number: int, index: int) -> None:
        served.answer_tokens = 4 + number % 5

    if "before_token" not in stand_in:
        served.before_token = vary
    async with served, AdminStandIn(state_dir, served, admin_fault) as admin:
        yield RunRig(state_dir, served, admin, environment)


class child:  # noqa: N801 - reads as what it starts
    """The run in a process of its own."""

    def __init__(self, rig: RunRig, **settings: object) -> None:
        arguments = [str(rig.state_dir), rig.engines.url, rig.admin.url, json.dumps(settings), json.dumps(rig.environment)]
        self.process = subprocess.Popen([sys.executable, __file__, *arguments])

    async def wait(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            while self.process.poll() is None:
                await asyncio.sleep(0.05)
        return self.process.returncode


async def kill_after(rig: RunRig, num_metrics: int, num_more: int, **settings: object) -> None:
    """Once so many steps are told and so many groups have finished since."""
    started = child(rig, **settings)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while len(rig.directory.metrics.read()) < num_metrics:
                assert started.process.poll() is None
                await asyncio.sleep(0.005)
            num_before = len(rig.groups_at("finished"))
            while len(rig.groups_at("finished")) < num_before + num_more and started.process.poll() is None:
                await asyncio.sleep(0.001)
    finally:
        started.process.send_signal(signal.SIGKILL)
        started.process.wait()


def main(state_dir: Path, gateway_url: str, admin_url: str, settings: str, environment: str) -> None:
    command.run(
        make_settings(**json.loads(settings)),
        read_environments([json.loads(environment)], source="test"),
        make_system(state_dir, gateway_url, admin_url),
        print,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
