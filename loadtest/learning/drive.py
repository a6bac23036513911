"""One arm does its work: each phase's requests in order, so many at a time, and a run directory as any load test leaves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from loadtest.client import new_session
from loadtest.closed_loop import run_batch
from loadtest.learning.benchmark import UNSEEN, Arm, Benchmark, scenario
from loadtest.learning.work import PhaseWork
from loadtest.records import RunRecord
from loadtest.run.clock import Clock
from loadtest.run.conduct import Provenance, begun, prompt_machine
from loadtest.run.lanes import Prompts
from loadtest.run.output import Output, OutputError
from loadtest.run.sampler import EVERY_S, Sampler
from loadtest.run.sender import Sender, Turn
from loadtest.run.tally import Tally
from loadtest.run.target import Target
from loadtest.scenario import Scenario
from loadtest.schedule import Planned
from loadtest.traffic import Prompt

_WARM_UP = {"X-Paceline-Capture": "off", "X-Paceline-Domain": "warm-up"}
_WARM_UP_TOKENS = 32
_MIN_WARM_UP = 4
_PAUSE_AFTER_FAILURE_S = 0.5
"""A server that refuses at once would be through its work in no time."""

Say = Callable[[str], None]


async def drive(
    benchmark: Benchmark,
    arm: Arm,
    work: Sequence[PhaseWork],
    prompts: Prompts,
    target: Target,
    directory: Path,
    provenance: Provenance,
    say: Say,
) -> RunRecord:
    """Do the arm's phases of `work`; returns what `run.json` says. Raises OutputError where `directory` cannot take all of a run."""
    wanted = {phase.name for phase in benchmark.phases_of(arm)}
    mine = [part for part in work if part.phase.name in wanted]
    expected = scenario(benchmark, arm, [float(len(part.requests)) for part in mine])
    output = Output(directory, expected)
    try:
        await _warm_up(target, max(part.phase.concurrency for part in mine))
        async with new_session(None) as session:
            with prompt_machine() as niceness:
                clock = Clock()
                record = begun(expected, target, clock, provenance, niceness)
                output.write_run(record)
                stream = _Stream(expected, prompts, target, output, session, clock)
                record = await stream.run(record, mine, say)
        if output.problem is not None:
            raise OutputError(output.problem)
        output.write_scenario(scenario(benchmark, arm, stream.durations_s))
        output.write_run(record)
    finally:
        output.close()
    return record


async def _warm_up(target: Target, concurrency: int) -> None:
    """The first requests after a start are slow, whatever speculates."""
    number = max(_MIN_WARM_UP, 2 * concurrency)
    prompts = [Prompt(f"warm-up/{index}", ({"role": "user", "content": f"Count from {index} up."},)) for index in range(number)]
    options = {"max_tokens": _WARM_UP_TOKENS, "temperature": 0.0}
    await run_batch(target.url, target.model, prompts, concurrency=concurrency, options=options, headers=_WARM_UP)


class _Stream:
    """The parts of an arm's run."""

    def __init__(
        self,
        whole: Scenario,
        prompts: Prompts,
        target: Target,
        output: Output,
        session: aiohttp.ClientSession,
        clock: Clock,
    ) -> None:
        (lane,) = whole.lane
        self._lanes = {"train": lane, "heldout": lane.model_copy(update={"name": UNSEEN})}
        self._max_busy_share = whole.max_busy_share
        self._prompts, self._output, self._clock = prompts, output, clock
        self._tally = tally = Tally(whole)
        self._sampler = Sampler(session, target, clock, output.add_sample)
        self._sender = Sender(session, target, clock, tally, output.add_request)
        self.durations_s: list[float] = []
        """Of the phases, without a gap from the start on."""

    async def run(self, record: RunRecord, work: Sequence[PhaseWork], say: Say) -> RunRecord:
        processor_s = time.process_time()
        async with asyncio.TaskGroup() as parts:
            beside = [parts.create_task(part) for part in (self._sampler.run(), self._flush())]
            for part in work:
                await self._phase(part, say)
            for task in beside:
                task.cancel()
        duration_s = self._clock.now_s()
        busy_share = (time.process_time() - processor_s) / duration_s
        await self._sampler.sample()
        self._output.flush()
        outcomes = dict(self._tally.outcomes)
        num_failed = sum(outcomes.values()) - outcomes.get("ok", 0)
        invalid_reasons = [f"{num_failed} of {sum(outcomes.values())} requests failed"] if num_failed else []
        if busy_share > (bound := self._max_busy_share):
            invalid_reasons.append(f"the load tester was busy {busy_share:.0%} of the time, more than {bound:.0%}")
        return msgspec.structs.replace(
            record,
            duration_s=duration_s,
            is_valid=not invalid_reasons,
            invalid_reasons=invalid_reasons,
            num_requests=outcomes,
            busy_share=round(busy_share, 3),
        )

    async def _phase(self, work: PhaseWork, say: Say) -> None:
        """All its requests; the next phase begins when the last one is answered."""
        num_tokens = self._tally.num_tokens
        left = iter(work.requests)

        async def slot() -> None:
            for planned in left:
                if self._output.problem is not None:
                    return
                if not await self._send(planned):
                    await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as slots:
            for _ in range(work.phase.concurrency):
                slots.create_task(slot())
        took_s = self._clock.now_s() - sum(self.durations_s)
        self.durations_s.append(took_s)
        num_tokens = self._tally.num_tokens - num_tokens
        say(f"  {work.phase.name}: {len(work.requests)} requests in {took_s:.0f} s, {num_tokens / took_s:.1f} tokens/s")

    async def _send(self, planned: Planned) -> bool:
        """Whether it was answered."""
        split = planned.phase.split
        turn = Turn(
            lane=self._lanes[split],
            planned=planned,
            number=0,
            prompt=self._prompts[planned.source, split][planned.number],
            max_tokens=self._lanes[split].max_tokens,
            intended_at_s=None,
            leaves_after_s=None,
        )
        record, _ = await self._sender.send(turn)
        return record.outcome == "ok"

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self._output.flush()
