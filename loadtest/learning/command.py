"""`paceline bench learning`: each arm does the same work, one after the other, then they are compared.

An arm that is done in the directory is not run again, so a benchmark can be interrupted, and arms added later.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import tomllib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import uvloop

from loadtest.client import new_session
from loadtest.learning.answers import read_arm
from loadtest.learning.arms import DRAFT_DIR, Start, settings_of, start_with, why_unavailable
from loadtest.learning.benchmark import Arm, Benchmark, locate
from loadtest.learning.circumstances import why_stale
from loadtest.learning.drive import drive
from loadtest.learning.report import report
from loadtest.learning.verdicts import Results
from loadtest.learning.work import plan_work, sources
from loadtest.records import SCENARIO_FILE
from loadtest.report.theme import require_matplotlib
from loadtest.run.conduct import Provenance
from loadtest.run.target import find
from loadtest.sources import load, open_part
from wire.artifact import WEIGHTS_FILE
from wire.errors import ConfigError, PacelineError
from wire.spec import file_sha256

DONE_FILE = "arm.json"
"""In an arm's directory, written last."""

Say = Callable[[str], None]
Result = TypeVar("Result")


class DoneArm(msgspec.Struct, frozen=True, kw_only=True):
    """arm.json: what the directory holds."""

    name: str
    digest: str
    """Of the work, of the arm, and of the draft it starts from where another arm gave it."""
    settings: list[str]
    unavailable: str | None = None
    """Why it did not run; there is no run then."""


def learning(
    path: Path,
    *,
    arms: Sequence[str],
    out_dir: Path | None,
    up_arguments: Sequence[str],
    provenance: Provenance,
    say: Say,
) -> int:
    """Returns 0; 1 where an arm failed; 130 where it was ended. Raises PacelineError where it cannot begin."""
    benchmark = Benchmark.read(locate(path), [])
    directory = out_dir or Path("runs") / path.stem
    whole = run_and_report(benchmark, arms, directory, start_with(up_arguments), up_arguments, provenance, say)
    try:
        _, failures = uvloop.run(_terminable(whole))
    except (asyncio.CancelledError, KeyboardInterrupt):
        say(f"ended; the same command goes on from {directory}")
        return 130
    return int(bool(failures))


async def _terminable(whole: Coroutine[Any, Any, Result]) -> Result:
    """SIGTERM cancels, as SIGINT does by itself, so that the system under measurement is stopped."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await whole


async def run_and_report(
    benchmark: Benchmark,
    arms: Sequence[str],
    directory: Path,
    start: Start,
    up_arguments: Sequence[str],
    provenance: Provenance,
    say: Say,
) -> tuple[Results, dict[str, str]]:
    """Run the arms of these names (all where none is named) that are not done, and report on all that are.

    Returns what there is to judge, and why arms failed, by name.
    """
    require_matplotlib()
    chosen = _choose(benchmark, arms)
    runner = _Runner(benchmark, directory, start, up_arguments, provenance, say)
    failures: dict[str, str] = {}
    for arm in chosen:
        try:
            await runner.run(arm)
        except (PacelineError, aiohttp.ClientError) as error:
            failures[arm.name] = str(error)
            say(f"{arm.name} FAILED: {error}")
    done = runner.done()
    runs = {name: read_arm(name, directory / name) for name, arm in done.items() if arm.unavailable is None}
    stale = {name: why_stale(run.record, provenance, directory / name) for name, run in runs.items()}
    results = Results(benchmark, runs, {name: reason for name, reason in stale.items() if reason is not None})
    unavailable = {name: arm.unavailable for name, arm in done.items() if arm.unavailable is not None} | runner.left_out()
    report(results, unavailable, directory, say)
    return results, failures


def _choose(benchmark: Benchmark, names: Sequence[str]) -> list[Arm]:
    known = [arm.name for arm in benchmark.arm]
    unknown = set(names) - set(known)
    if unknown:
        raise ConfigError(f"the benchmark has no arm {sorted(unknown)}; there are {', '.join(known)}")
    return [arm for arm in benchmark.arm if not names or arm.name in names]


class _Runner:
    """Runs arms into one directory."""

    def __init__(
        self,
        benchmark: Benchmark,
        directory: Path,
        start: Start,
        up_arguments: Sequence[str],
        provenance: Provenance,
        say: Say,
    ) -> None:
        """Raises TrafficError where a source is absent."""
        self._benchmark, self._directory, self._start = benchmark, directory, start
        self._up_arguments, self._say = up_arguments, say
        wanted = sources(benchmark)
        loaded = {name: load(name) for name in dict.fromkeys(name for name, _ in wanted)}
        num_broken = {name: source.num_broken for name, source in loaded.items() if source.num_broken}
        self._provenance = replace(provenance, num_broken=num_broken)
        self._prompts = {(name, split): open_part(name, loaded[name], split) for name, split in wanted}
        self._work = plan_work(benchmark, lambda name, split: len(self._prompts[name, split]))

    async def run(self, arm: Arm) -> None:
        """Nothing where it is done; raises PacelineError where it is done otherwise, or fails."""
        directory = self._directory / arm.name
        digest = self._digest(arm)
        done = _read(directory)
        if done is not None and done.unavailable is None:
            if done.digest != digest:
                raise ConfigError(
                    f"{directory} holds this arm with other work or settings, or from another draft; give another --out, or remove "
                    "it to run it anew"
                )
            self._say(f"{arm.name}: done before")
            return
        _clear(directory)
        settings = settings_of(arm, self._benchmark.settings, self._directory)
        reason = why_unavailable(arm)
        if reason is not None:
            self._say(f"{arm.name}: not available: {reason}")
            directory.mkdir(parents=True, exist_ok=True)
        else:
            await self._do(arm, settings, directory)
        finished = DoneArm(name=arm.name, digest=digest, settings=settings, unavailable=reason)
        (directory / DONE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(finished), indent=2) + b"\n")

    async def _do(self, arm: Arm, settings: Sequence[str], directory: Path) -> None:
        self._require_draft(arm)
        self._say(f"{arm.name}: starting")
        async with self._start(arm, settings) as system, new_session(1) as session:
            state_dir = system.system.state_dir if system.system else self._directory
            target = await find(session, url=system.url, admin_url=None, model=None, state_dir=state_dir)
            await drive(self._benchmark, arm, self._work, self._prompts, target, directory, self._provenance, self._say)
            if self._benchmark.gives_draft(arm):
                await system.keep_draft(directory / DRAFT_DIR)

    def _require_draft(self, arm: Arm) -> None:
        giver = self._benchmark.find(arm.draft)
        if giver is None:
            return
        if _read(self._directory / giver.name) is None:
            raise ConfigError(f"{arm.name} starts from the draft of {giver.name}, which has not run; run it too (--arms)")
        if giver.name not in self.done():
            raise ConfigError(
                f"{arm.name} starts from the draft of {giver.name}, which ran with other work or settings; give another --out, or "
                f"remove {self._directory / giver.name} and run it too (--arms)"
            )

    def _digest(self, arm: Arm) -> str:
        common = self._benchmark.model_dump(mode="json", include={"seed", "max_tokens", "settings", "phase"})
        weights = self._directory / arm.draft / DRAFT_DIR / WEIGHTS_FILE
        draft = file_sha256(weights) if self._benchmark.find(arm.draft) and weights.is_file() else None
        parts = [common, arm.model_dump(mode="json"), _by_content(self._up_arguments), draft]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]

    def done(self) -> dict[str, DoneArm]:
        """In the benchmark's order, those made with this work and these settings."""
        found = self._found()
        return {arm.name: found[arm.name] for arm in self._benchmark.arm if self._is_of_this_work(arm, found.get(arm.name))}

    def left_out(self) -> dict[str, str]:
        """Why arms whose results are there are not reported on, by name."""
        done = self.done()
        reason = "what it left is of other work or settings, or from another draft"
        return {name: reason for name in self._found() if name not in done}

    def _found(self) -> dict[str, DoneArm]:
        found = {arm.name: _read(self._directory / arm.name) for arm in self._benchmark.arm}
        return {name: done for name, done in found.items() if done is not None}

    def _is_of_this_work(self, arm: Arm, done: DoneArm | None) -> bool:
        return done is not None and done.digest == self._digest(arm)


def _by_content(up_arguments: Sequence[str]) -> list[str]:
    """A configuration file goes by what it says, which may be something else the next time."""
    return [file_sha256(Path(word)) if word.startswith("/") and Path(word).is_file() else word for word in up_arguments]


def _clear(directory: Path) -> None:
    """Remove the rest of an arm that was interrupted; raises ConfigError for anything else."""
    held = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    if held and DONE_FILE not in held and not _is_begun_arm(directory):
        raise ConfigError(f"{directory} holds something that is no arm of a benchmark; give another --out")
    if held:
        shutil.rmtree(directory)


def _is_begun_arm(directory: Path) -> bool:
    """A load test of the user's own leaves a scenario as well, but one of another name."""
    try:
        name = tomllib.loads((directory / SCENARIO_FILE).read_text())["name"]
    except (OSError, ValueError, KeyError):
        return False
    return str(name).endswith(f", {directory.name}")


def _read(directory: Path) -> DoneArm | None:
    """None where the arm is not done."""
    try:
        return msgspec.json.decode((directory / DONE_FILE).read_bytes(), type=DoneArm)
    except (OSError, msgspec.DecodeError):
        return None
