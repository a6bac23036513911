"""`paceline rl run`: a system to train the target of, started or joined, and the run in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from launch import host
from launch.config import SystemConfig
from launch.cores import share_cores
from launch.detached import start_and_wait
from launch.rundir import LaunchError, RunDir
from rl.config import read_environments
from wire.errors import ConfigError

Say = Callable[[str], None]


def train(config: SystemConfig, arguments: list[str], say: Say) -> int:
    """Run to the end; the system stays up. arguments: this configuration, for `paceline up`. Raises PacelineError."""
    run_dir = RunDir(config.state.directory)
    environments = read_environments(config.environment, source="the configuration")
    if not environments:
        raise ConfigError("there is no [[environment]] to draw problems from; name one, as configs/rl.toml does")
    if not config.rollouts.enabled:
        raise ConfigError("rollouts.enabled is false, so engines would give no token ids; set it, as configs/rl.toml does")
    if run_dir.is_locked():
        say(f"joining the system that runs from {run_dir.state}")
    else:
        start_and_wait(config, arguments, say)
    served = _served(run_dir, config)
    use_threads(config.rl.num_threads)
    _take_cores(served)
    from rl.run.command import System, run  # after the number of threads is said: torch reads it when it is imported

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    system = run_dir.read_system()
    run(
        config.rl,
        environments,
        System(
            state_dir=run_dir.state,
            target_dir=Path(system["target_dir"]),
            gateway_url=system["gateway_url"],
            admin_url=system["admin_url"],
            operator_token=run_dir.operator_token(),
            dtype=served.target.dtype,
        ),
        say,
    )
    say("the system still serves; `paceline down` stops it")
    return 0


def _served(run_dir: RunDir, config: SystemConfig) -> SystemConfig:
    """What the running system was started with. Raises LaunchError where a run cannot join it."""
    if not run_dir.read_system().get("is_ready"):
        raise LaunchError(
            f"the system of {run_dir.state} is not ready yet; `paceline view` tells when it is, then give this command again"
        )
    served = SystemConfig.read_json(run_dir.role_file("system-config"))
    for name, there, wanted in (
        ("target.path", served.target.path, config.target.path),
        ("target.dtype", served.target.dtype, config.target.dtype),
        ("rollouts.enabled", served.rollouts.enabled, config.rollouts.enabled),
    ):
        if there != wanted:
            raise LaunchError(
                f"the running system has {name} = {there!r}, this configuration {wanted!r}; stop it with `paceline down` and give this "
                "command again, which starts it anew"
            )
    return served


def use_threads(number: int) -> None:
    """Before torch is imported, which reads it then; as many make the same steps to the last bit."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(number)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _take_cores(served: SystemConfig) -> None:
    """Trainer and environments compute where no engine does, if there is such a place."""
    facts = host.gather()
    if facts.is_cuda:
        return
    taken = {core for cores in share_cores(served, facts.cores).pools.values() for core in cores}
    if left := cores_left(facts.cores, taken):
        os.sched_setaffinity(0, left)


def cores_left(available: Sequence[int], taken: set[int]) -> set[int]:
    """Cores without an engine's threads; empty where engines have them all."""
    return set(available) - taken
