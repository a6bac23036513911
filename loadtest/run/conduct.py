"""One run from the first request to the last answer."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from loadtest.client import new_session
from loadtest.machine import machine
from loadtest.records import RunRecord, SystemSample
from loadtest.run.actions import Actions
from loadtest.run.clock import Clock
from loadtest.run.lanes import Lanes, Prompts
from loadtest.run.live import LiveLine
from loadtest.run.output import Output, OutputError
from loadtest.run.sampler import EVERY_S, Sampler
from loadtest.run.sender import Sender
from loadtest.run.tally import Tally
from loadtest.run.target import Target
from loadtest.scenario import Scenario
from loadtest.schedule import LanePlan

_SWITCH_INTERVAL_S = 0.0005
"""Longest wait for the interpreter while another thread has it; Python's own 5 ms would be our lag."""
_AUTOGROUP_FILE = Path("/proc/self/autogroup")
_NICENESS = -10
"""What is measured may fill every core of this machine; a sender that waits for its turn would send late."""


@dataclass(frozen=True)
class Provenance:
    """What a run is made with and from, as `run.json` tells."""

    commit: str | None
    versions: Mapping[str, str]
    num_broken: Mapping[str, int]


async def conduct(
    scenario: Scenario,
    plans: Sequence[LanePlan],
    prompts: Prompts,
    target: Target,
    output: Output,
    provenance: Provenance,
) -> RunRecord:
    """Run it and return what `run.json` says. An interrupt ends it early; what was measured is kept."""
    async with new_session(None) as session:
        with prompt_machine() as niceness:
            clock = Clock()
            record = begun(scenario, target, clock, provenance, niceness)
            output.write_run(record)
            record = await _Run(scenario, plans, prompts, target, output, session, clock).measure(record)
    return _written(output, record)


def _written(output: Output, record: RunRecord) -> RunRecord:
    """The record as it is on disk, or with the reason why it is not there."""
    try:
        output.write_run(record)
    except OutputError as error:
        return msgspec.structs.replace(record, is_valid=False, invalid_reasons=[*record.invalid_reasons, str(error)])
    return record


def begun(scenario: Scenario, target: Target, clock: Clock, provenance: Provenance, niceness: int) -> RunRecord:
    """What `run.json` says while the run goes on."""
    return RunRecord(
        name=scenario.name,
        url=target.url,
        model=target.model,
        seed=scenario.seed,
        started_at_s=clock.started_at_s,
        commit=provenance.commit,
        machine=machine(),
        versions=dict(provenance.versions),
        num_broken=dict(provenance.num_broken),
        niceness=niceness,
    )


class _Run:
    """The parts of a run, side by side."""

    def __init__(
        self,
        scenario: Scenario,
        plans: Sequence[LanePlan],
        prompts: Prompts,
        target: Target,
        output: Output,
        session: aiohttp.ClientSession,
        clock: Clock,
    ) -> None:
        self._scenario = scenario
        self._clock = clock
        self._output = output
        self._tally = Tally(scenario)
        self._line = LiveLine(scenario, self._tally, clock)
        self._sampler = Sampler(session, target, clock, self._keep_sample)
        self._actions = Actions(scenario.action, target, clock, scenario.duration_s)
        sender = Sender(session, target, clock, self._tally, output.add_request)
        self._lanes = Lanes(plans, prompts, sender, clock, scenario.seed)
        self._was_interrupted = False

    async def measure(self, record: RunRecord) -> RunRecord:
        """Returns `record` with what came out."""
        processor_s = time.process_time()
        with self._interruptible():
            async with asyncio.TaskGroup() as parts:
                beside = [
                    parts.create_task(part)
                    for part in (self._sampler.run(), self._actions.run(), self._line.run(), self._flush())
                ]
                await self._lanes.run()
                for part in beside:
                    part.cancel()
        duration_s = self._clock.now_s()
        busy_share = (time.process_time() - processor_s) / duration_s
        await self._sampler.sample()
        self._output.flush()
        invalid_reasons = self._invalid_reasons(busy_share)
        return msgspec.structs.replace(
            record,
            duration_s=duration_s,
            is_valid=not invalid_reasons,
            invalid_reasons=invalid_reasons,
            was_interrupted=self._was_interrupted,
            num_requests=dict(self._tally.outcomes),
            dispatch_lag_ms=self._tally.lags.summary_ms(),
            busy_share=round(busy_share, 3),
            actions=self._actions.done,
        )

    def _invalid_reasons(self, busy_share: float) -> list[str]:
        reasons = []
        lag_ms, bound_ms = self._tally.lags.quantile_ms(0.99), self._scenario.max_dispatch_lag_p99_ms
        if lag_ms is not None and lag_ms > bound_ms:
            reasons.append(f"the load tester lagged behind its schedule: p99 {lag_ms:.1f} ms, the bound is {bound_ms:g} ms")
        if self._scenario.has_closed_loop and busy_share > self._scenario.max_busy_share:
            reasons.append(
                f"the load tester was busy {busy_share:.0%} of the time, more than {self._scenario.max_busy_share:.0%}: "
                "what its closed loop measured is itself"
            )
        if self._output.problem:
            reasons.append(self._output.problem)
        if self._was_interrupted:
            reasons.append(f"interrupted before its end at {self._scenario.duration_s:g} s")
        if not self._tally.outcomes["ok"]:
            reasons.append("no request was answered")
        return reasons

    def _keep_sample(self, sample: SystemSample) -> None:
        self._output.add_sample(sample)
        self._line.see(sample)

    async def _flush(self) -> None:
        """A run of which nothing more can be kept ends."""
        while self._output.problem is None:
            await asyncio.sleep(EVERY_S)
            self._output.flush()
        self._lanes.stop()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the run, a second one the process."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)

        def interrupt() -> None:
            self._was_interrupted = True
            self._lanes.stop()
            for number in signals:
                loop.remove_signal_handler(number)

        for number in signals:
            loop.add_signal_handler(number, interrupt)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def _set_niceness(niceness: int) -> None:
    """Of this process, and of its session where the kernel shares the machine between those (sched_autogroup, sched(7))."""
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with suppress(OSError):
        _AUTOGROUP_FILE.write_text(str(niceness))


@contextmanager
def prompt_machine() -> Iterator[int]:
    """Settings of this process that keep its lag small and its connections unbounded; yields its niceness."""
    switch_interval_s = sys.getswitchinterval()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # The prompts and the schedule stay: the collector need not look at them again and again.
    gc.collect()
    gc.freeze()
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):  # needs CAP_SYS_NICE; without it the run tells its lag all the same
        _set_niceness(min(niceness, _NICENESS))
    try:
        yield os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        _set_niceness(niceness)
        gc.unfreeze()
        sys.setswitchinterval(switch_interval_s)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
