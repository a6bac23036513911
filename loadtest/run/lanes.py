"""The clients of a run: each lane sends by its plan, open loop or closed, and holds its conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from loadtest.run.clock import Clock
from loadtest.run.dialogue import Dialogue
from loadtest.run.sender import Sender, Turn
from loadtest.scenario import Closed, Lane, Trace
from loadtest.schedule import LanePlan, Planned
from loadtest.traces import words_of
from loadtest.traffic import Prompt

Prompts = Mapping[tuple[str, str], Sequence[Prompt]]
"""By source and split."""

_PAUSE_AFTER_FAILURE_S = 0.5
"""Of a closed loop: a server that refuses at once would be asked in a tight loop."""
_NUM_VOCABULARY_PROMPTS = 50


class Lanes:
    """All lanes of a run."""

    def __init__(self, plans: Sequence[LanePlan], prompts: Prompts, sender: Sender, clock: Clock, seed: int) -> None:
        self._plans = plans
        self._prompts = prompts
        self._sender = sender
        self._clock = clock
        self._seed = seed
        self._end_s = max(plan.end_s for plan in plans)
        self._waiting: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._vocabularies: dict[tuple[str, str], list[str]] = {}

    async def run(self) -> None:
        """Send everything; returns after the last answer."""
        async with asyncio.TaskGroup() as clients:
            for plan in self._plans:
                clients.create_task(self._open(plan, clients))
                every = [phase.arrivals for phase in plan.lane.phase]
                num_slots = max((arrivals.concurrency for arrivals in every if isinstance(arrivals, Closed)), default=0)
                for slot in range(num_slots):
                    clients.create_task(self._closed(plan, slot))

    def stop(self) -> None:
        """Send nothing more; clients that wait for an answer leave."""
        self._is_stopping = True
        for task in self._waiting:
            task.cancel()
        self._sender.leave_all()

    async def _open(self, plan: LanePlan, clients: asyncio.TaskGroup) -> None:
        for planned in plan.planned():
            # Before it is due: a long prompt takes its time to make.
            dialogue = self._dialogue(plan.lane, planned)
            await self._until(planned.at_s)
            clients.create_task(self._converse(plan.lane, planned, dialogue, is_closed=False))

    async def _closed(self, plan: LanePlan, slot: int) -> None:
        """One slot, through all phases of the lane: where a phase ends, its answer under way still holds the slot."""
        while not self._is_stopping and (found := plan.phase_at(now_s := self._clock.now_s())) is not None:
            phase, start_s = found
            if not isinstance(phase.arrivals, Closed) or slot >= phase.arrivals.concurrency:
                await self._until(start_s + phase.duration_s)
                continue
            planned = plan.next_closed(phase, start_s, now_s)
            if not await self._converse(plan.lane, planned, self._dialogue(plan.lane, planned), is_closed=True):
                await self._until(self._clock.now_s() + _PAUSE_AFTER_FAILURE_S)

    async def _converse(self, lane: Lane, planned: Planned, dialogue: Dialogue, *, is_closed: bool) -> bool:
        """All turns of a request or conversation; whether the last was answered, or left unanswered by its client."""
        intended_at_s = None if is_closed else planned.at_s
        for number in range(dialogue.num_turns):
            if self._is_stopping:
                return False
            turn = Turn(
                lane=lane,
                planned=planned,
                number=number,
                prompt=dialogue.prompt(),
                max_tokens=_max_tokens(lane, planned),
                intended_at_s=intended_at_s,
                leaves_after_s=dialogue.leaves_after_s(),
            )
            record, result = await self._sender.send(turn)
            if record.outcome != "ok":
                return record.outcome == "cancelled"
            if number + 1 < dialogue.num_turns:
                dialogue.answered(result.text)
                intended_at_s = record.ended_at_s + dialogue.think_time_s()
                if intended_at_s >= self._end_s:
                    return True
                await self._until(intended_at_s)
        return True

    def _dialogue(self, lane: Lane, planned: Planned) -> Dialogue:
        return Dialogue(lane, self._prompt(planned), seed=self._seed, index=planned.index)

    def _prompt(self, planned: Planned) -> Prompt:
        arrivals = planned.phase.arrivals
        key = (planned.source, planned.phase.split)
        if planned.row is None or not isinstance(arrivals, Trace):
            return self._prompts[key][planned.number]
        if key not in self._vocabularies:
            self._vocabularies[key] = _vocabulary(self._prompts[key])
        text = words_of(planned.row, self._vocabularies[key], length_scale=arrivals.length_scale, seed=self._seed)
        return Prompt(f"{arrivals.path.stem}/{planned.index}", ({"role": "user", "content": text},))

    async def _until(self, at_s: float) -> None:
        """Wait where `stop` can end it."""
        task = asyncio.current_task()
        assert task is not None
        if self._is_stopping:
            raise asyncio.CancelledError
        self._waiting.add(task)
        try:
            await self._clock.until(at_s)
        finally:
            self._waiting.discard(task)


def _max_tokens(lane: Lane, planned: Planned) -> int:
    """Of the lane, of a trace's request its own."""
    arrivals = planned.phase.arrivals
    if planned.row is None or not isinstance(arrivals, Trace):
        return lane.max_tokens
    return planned.row.max_tokens(arrivals.length_scale)


def _vocabulary(prompts: Sequence[Prompt]) -> list[str]:
    """Words of some prompts, as often as they occur there."""
    some = [prompts[index] for index in range(min(len(prompts), _NUM_VOCABULARY_PROMPTS))]
    return [word for prompt in some for message in prompt.messages for word in message["content"].split()]
