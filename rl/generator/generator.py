"""The generator: problems become finished groups of trajectories, as many at a time as staleness and engines allow.

    ledger admits -> a group of rollouts begins -> each plays its episode, turn by turn, in seats the controllers give
                  -> the group is complete: handed over; evicted meanwhile: given up; failed: evicted, its refill is owed

It has one event loop with the ledger and whoever takes the groups: a group is finished in the ledger and handed over in one go, and
`state` and the ledger's state, taken in one go, are one checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from rl.controllers.concurrency import ConcurrencyDecision, ConcurrencyReading
from rl.controllers.priority import PriorityReading, Rollout
from rl.environments.interface import EnvironmentFailed, Problem
from rl.environments.pool import EnvironmentPool
from rl.generator.config import GeneratorSettings
from rl.generator.counts import GeneratorCounts
from rl.generator.episodes import Episodes
from rl.generator.gateway import Gateway
from rl.generator.groups import RunningGroup
from rl.generator.rendering import TargetText
from rl.generator.seats import Seats
from rl.generator.setbacks import Setbacks
from rl.generator.state import GeneratorState
from rl.generator.target_watch import TargetWatch
from rl.generator.turns import RunningRollout, TurnFailed, Turns
from rl.staleness.ledger import Ledger
from rl.trajectory import Group
from wire.errors import RolloutError

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""At one rollout, where its environment fails; then its group is evicted and another problem takes its place."""
ROUND_S = 1.0
"""Between two rounds of the priority controller, and after which at the latest the ledger's evictions are heard of."""


class Generator:
    """problem_of: the problem of a group's id, always the same one. hand_over: gets each finished group, once.

    resumed: open groups of the checkpoint the ledger is resumed from. clock: Unix time.
    """

    def __init__(
        self,
        settings: GeneratorSettings,
        *,
        ledger: Ledger,
        pool: EnvironmentPool,
        gateway: Gateway,
        target: TargetText,
        problem_of: Callable[[int], Problem],
        hand_over: Callable[[Group], None],
        resumed: GeneratorState | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._problem_of = problem_of
        self._hand_over = hand_over
        self._clock = clock
        self._wake = asyncio.Event()
        self._groups: dict[int, RunningGroup] = {}
        self._num_done_tokens = self._num_done_rollouts = 0
        self._setbacks = Setbacks()
        self.counts = GeneratorCounts()
        self.watch = TargetWatch(ledger.state.version)
        self.temperature = settings.temperature
        """Of groups that begin from now on; the temperature controller's."""
        self.tokens_per_update: float | None = None
        """Tokens one running rollout makes between two updates, once the run knows."""
        self._seats = Seats(settings.concurrency, self.wake)
        turns = Turns(
            settings,
            gateway,
            self._seats,
            self.watch,
            self.counts,
            vocab_size=target.vocab_size,
            stop_token_ids=target.stop_token_ids,
        )
        self._episodes = Episodes(settings, pool, target, turns, clock)
        self._take_up(resumed or GeneratorState())

    def wake(self) -> None:
        """Something has changed that decides what runs: call it after the ledger has advanced, taken or evicted."""
        self._wake.set()

    def observe(self, reading: ConcurrencyReading) -> ConcurrencyDecision:
        """One poll of the engines' metrics, from which follows how many rollouts they hold."""
        return self._seats.observe(reading)

    @property
    def seat_s(self) -> float:
        """Seconds that requests which have ended were in the engines, all together; `counts.num_tokens` is what they brought."""
        return self._seats.held_s

    @property
    def num_seated(self) -> int:
        """Rollouts that are in the engines."""
        return sum(self._seats.wanted.values())

    @property
    def num_preempted(self) -> int:
        return self._seats.num_preempted

    def state(self) -> GeneratorState:
        """For a checkpoint; take the ledger's with it, in one go."""
        return GeneratorState(groups=tuple(group.save() for group in self._groups.values()))

    async def run(self) -> NoReturn:
        """Until it is cancelled. Raises (in an ExceptionGroup) ConfigError where target and environments do not go together, or the
        gateway's engines can serve no rollouts (501), RolloutError where group after group fails (`setbacks.py`)."""
        loop = asyncio.get_running_loop()
        round_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                self._give_up_evicted()
                if loop.time() >= self._setbacks.paused_until_s:
                    self._admit()
                self._start(tasks)
                if loop.time() >= round_s:
                    self._play_round()
                    round_s = loop.time() + ROUND_S
                if self._seats.num_free > 0:
                    self._seats.fill(self._reading())
                try:
                    async with asyncio.timeout_at(self._next_look_s(round_s)):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    def _next_look_s(self, round_s: float) -> float:
        """At the next round, or where groups may begin again before it."""
        paused_until_s = self._setbacks.paused_until_s
        return min(round_s, paused_until_s) if paused_until_s > asyncio.get_running_loop().time() else round_s

    def _take_up(self, state: GeneratorState) -> None:
        """Open groups of a checkpoint go on; what the ledger takes to run and nothing is known of has failed."""
        saved = {group.group_id: group for group in state.groups}
        for entry in [entry for entry in self._ledger.state.open if entry.finished_rank is None]:
            if entry.group_id in saved:
                self._groups[entry.group_id] = RunningGroup.resume(entry, saved[entry.group_id])
            else:
                self._ledger.evict([entry.group_id], "failed")

    def _give_up_evicted(self) -> None:
        running = {entry.group_id for entry in self._ledger.state.open if entry.finished_rank is None}
        for group_id in self._groups.keys() - running:
            self._give_up(group_id)
            self.counts.num_abandoned_groups += 1

    def _give_up(self, group_id: int) -> None:
        """End its rollouts, but for the one that says so."""
        for rollout in self._groups.pop(group_id).rollouts:
            if rollout.task is not None and rollout.task is not asyncio.current_task():
                rollout.task.cancel()

    def _admit(self) -> None:
        """As many groups as the ledger allows, refills first. A prompt that was only too slow is asked again."""
        while self._ledger.capacity > 0:
            state = self._ledger.state
            owed = state.owed[0] if state.owed else None
            if owed is not None and owed.reason == "too old":
                problem = Problem(owed.entry.environment, owed.entry.environment_seed)
            else:
                problem = self._problem_of(state.next_group_id)
            refill_of = owed.entry.group_id if owed is not None else None
            entry = self._ledger.submit(problem.environment, problem.seed, refill_of=refill_of)
            self._groups[entry.group_id] = RunningGroup.begin(
                entry, group_size=self._settings.group_size, temperature=self.temperature, now_s=self._clock()
            )

    def _start(self, tasks: asyncio.TaskGroup) -> None:
        for group in self._groups.values():
            for rollout in group.unfinished:
                if rollout.task is None:
                    rollout.task = tasks.create_task(self._play(group, rollout))

    def _play_round(self) -> None:
        decision = self._seats.allot(self._reading())
        if decision.hopeless_groups:
            self._ledger.evict(decision.hopeless_groups, "too old")
            self._give_up_evicted()

    def _reading(self) -> PriorityReading:
        wanted, expected = self._seats.wanted, self._expected_tokens()
        rollouts = [
            Rollout(rollout.id, group.group_id, rollout.num_tokens, expected, wanted[rollout.id])
            for group in self._groups.values()
            for rollout in group.unfinished
            if rollout.id in wanted
        ]
        left = {
            entry.group_id: self._ledger.eta + 1 - entry.staleness(self._ledger.state.version)
            for entry in self._ledger.state.open
        }
        outlooks = {group_id: group.outlook(left[group_id]) for group_id, group in self._groups.items()}
        return PriorityReading(rollouts, outlooks, self._seats.cap, self.tokens_per_update)

    def _expected_tokens(self) -> float:
        if not self._num_done_rollouts:
            return float(self._settings.max_output_tokens)
        return self._num_done_tokens / self._num_done_rollouts

    async def _play(self, group: RunningGroup, rollout: RunningRollout) -> None:
        """One rollout to its end, or its group's."""
        while not rollout.saved.finished:
            try:
                rollout.finish(await self._episodes.play(rollout, group.problem))
            except EnvironmentFailed as error:
                self.counts.num_excluded += 1
                log.warning("rollout %s is excluded: %s", rollout.id, error)
                if rollout.saved.attempt + 1 == MAX_ATTEMPTS:
                    return self._fail(group, error)
                rollout.begin_anew(self._clock())
            except (TurnFailed, RolloutError) as error:
                return self._fail(group, error)
        self._note(rollout)
        if not group.unfinished:
            self._complete(group)

    def _note(self, rollout: RunningRollout) -> None:
        num_tokens = sum(trajectory.num_output_tokens for trajectory in rollout.saved.finished)
        self._num_done_tokens += num_tokens
        self._num_done_rollouts += 1
        self.counts.num_rollouts += 1
        self.counts.num_forks += len(rollout.saved.finished) - 1
        self.wake()

    def _complete(self, group: RunningGroup) -> None:
        try:
            finished = group.complete()
        except RolloutError as error:
            return self._fail(group, error)
        del self._groups[group.group_id]
        if self._ledger.finish(finished):
            self._setbacks.succeeded()
            self.counts.num_groups += 1
            self._hand_over(finished)

    def _fail(self, group: RunningGroup, error: Exception) -> None:
        """Evict it, so that its refill is owed. Raises RolloutError where nothing but failures came for long."""
        log.warning("group %d is evicted: %s", group.group_id, error)
        if any(entry.group_id == group.group_id for entry in self._ledger.state.open):
            self._ledger.evict([group.group_id], "failed")
            self.counts.num_failed_groups += 1
            self._give_up(group.group_id)
            now_s = asyncio.get_running_loop().time()
            self._setbacks.failed(group.group_id, error, next_group_id=self._ledger.state.next_group_id, now_s=now_s)
        self.wake()
