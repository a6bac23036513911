"""A run: generate, reward, train, update, until its steps are made.

    generator -> finished groups -> batch -> trainer -> version of the target -> engines -> generator
                     ledger: none is older than eta, none is lost, none counts twice

One event loop holds generator, ledger and this loop; the trainer's work is done beside it, so that rollouts go on while it trains.
After every finished group and every step, and each second in which rollouts finish, a record is written (`record.py`), from which a
process that follows a killed one goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from rl.config import RunSettings
from rl.controllers import temperature
from rl.controllers.temperature import Temperature, TemperatureReading
from rl.environments.pool import EnvironmentPool
from rl.environments.settings import EnvironmentConfig
from rl.generator.gateway import Gateway
from rl.generator.generator import Generator
from rl.generator.rendering import TargetText
from rl.rewards.claims import Pair
from rl.rewards.cooper import RewardModelReport
from rl.rewards.reward_model import RewardModel
from rl.run.batches import Batches
from rl.run.directory import RunDirectory
from rl.run.heldout import Heldout, told
from rl.run.load import follow
from rl.run.metrics import StepMetrics, environment_share, longest_pause_s, progress
from rl.run.pace import Pace
from rl.run.problems import Problems
from rl.run.record import RunRecord, Steering, write_record
from rl.run.resume import Resumed, take_up
from rl.run.rewards import Rewards
from rl.run.stations import Stations
from rl.run.updates import Updates
from rl.trainer.checkpoint import Checkpoints
from rl.trainer.dumps import Dumps
from rl.trainer.metrics import StepReport
from rl.trainer.sink import StoreSink
from rl.trainer.trainer import Trainer
from rl.trajectory import Group
from wire.errors import ArtifactError, TrainerError
from wire.target_control import TargetSwapReport

log = logging.getLogger(__name__)

RECORD_EVERY_S = 1.0
"""While rollouts finish whose group does not yet."""
MAX_SKIPPED = 3
"""Steps in a row that were not finite; more of the same would follow."""


@dataclass(frozen=True)
class Parts:
    """What a run works with; whoever makes them closes them."""

    trainer: Trainer
    """With the weights that the engines serve."""
    model: RewardModel | None
    """The reward model, as far as the trainer; None where rules are all there is."""
    sink: StoreSink
    updates: Updates
    pool: EnvironmentPool
    environments: Sequence[EnvironmentConfig]
    gateway: Gateway
    target: TargetText


class Run:
    """resumed: where it stands; its ledger is of the trainer's version or older. say: gets a line for each step."""

    def __init__(
        self, directory: RunDirectory, settings: RunSettings, parts: Parts, resumed: Resumed, say: Callable[[str], None]
    ) -> None:
        self._directory, self._settings, self._parts, self._say = directory, settings, parts, say
        self._checkpoints = Checkpoints(directory.checkpoints, num_kept=settings.trainer.num_checkpoints)
        self._dumps = Dumps(directory.dumps, num_kept=settings.trainer.num_dumps)
        self._history, self._finished, self._metrics = directory.history, directory.finished, directory.metrics
        self._num_steps = resumed.num_steps
        # The kill came before it was whole. When the next one is due, the batches since the last one would not all be there.
        self._is_checkpoint_due = resumed.num_remade >= settings.checkpoint_every_steps
        self._num_skipped = 0
        self._num_tokens_before = 0
        self._keep_s = self._heldout_s = 0.0
        self._pace = Pace()
        self.ledger, waiting = take_up(directory, settings, parts.trainer.version, resumed)
        names = [environment.name for environment in parts.environments]
        self._problems = Problems(
            names,
            settings.curriculum,
            resumed.steering.curricula,
            groups_per_round=max(1, settings.groups_per_step // len(names)),
        )
        self.generator = Generator(
            settings.generator,
            ledger=self.ledger,
            pool=parts.pool,
            gateway=parts.gateway,
            target=parts.target,
            problem_of=self._problems.of,
            hand_over=self._receive,
            resumed=resumed.generator,
        )
        self._temperature: Temperature | None = None
        if settings.temperature is not None:
            self._temperature = resumed.steering.temperature or temperature.initial(settings.temperature)
            self.generator.temperature = self._temperature.temperature
        self._batches = Batches(
            self.ledger,
            groups_per_step=settings.groups_per_step,
            drop_equal_rewards=settings.algorithm.drop_equal_rewards,
            waiting=waiting,
            on_evict=self.generator.wake,
        )
        self._rewards = Rewards(settings, parts.model, parts.pool, parts.target)
        self._heldout: Heldout | None = None
        if settings.heldout is not None:
            self._heldout = Heldout(
                settings,
                settings.heldout,
                environments=parts.environments,
                pool=parts.pool,
                gateway=parts.gateway,
                target=parts.target,
            )
        self._record()

    async def go(self) -> None:
        """Until all steps are made. What fails is raised in an ExceptionGroup: PacelineErrors say what to do."""
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(self.generator.run()), tasks.create_task(self._record_rollouts())]
            limits = self._settings.generator.concurrency
            if limits.least < limits.most:
                helpers.append(tasks.create_task(follow(self._parts.gateway, self.generator)))
            if self._is_checkpoint_due:
                await self._save()
            await self._examine()
            while self._num_steps < self._settings.num_steps:
                await self._step()
            for helper in helpers:
                helper.cancel()
        self._record()
        if self._num_steps % self._settings.checkpoint_every_steps:
            await self._save()

    async def _step(self) -> None:
        stations = Stations()
        batch, num_with_signal = await self._batches.next()
        stations.end("wait")
        lesson = await self._rewards.lesson(batch, step=self._num_steps)
        stations.end("lesson")
        report = await asyncio.to_thread(self._learn, batch, lesson.pairs)
        stations.end("train")
        swap = None
        if any(update.skipped is None for update in report.updates):
            swap = await self._update(stations)
        else:
            self._give_back(report)
        self._num_steps += 1
        learned = self._rewards.learn(lesson)
        self._steer(report, num_with_signal)
        self._tell(report, learned, num_with_signal, batch, stations, swap)
        self._record()  # with nothing awaited since the ledger has moved on: a group must not be gone and its step not made
        self.generator.wake()
        if swap is not None:
            await asyncio.to_thread(self._prune)
        if self._num_steps % self._settings.checkpoint_every_steps == 0:
            await self._save()
        stations.end("keep")
        self._keep_s = stations.seconds("keep")
        await self._examine()

    async def _examine(self) -> None:
        """What the policy earns on held-out problems, where that is due and was not measured before a kill."""
        heldout, num_steps = self._settings.heldout, self._num_steps
        is_due = heldout is not None and (num_steps % heldout.every_steps == 0 or num_steps == self._settings.num_steps)
        is_known = any(result.num_steps == num_steps for result in self._directory.heldout.read())
        if self._heldout is None or not is_due or is_known:
            return
        stations = Stations()
        results = await self._heldout.measure(num_steps=num_steps, version=self.ledger.state.version)
        self._directory.heldout.append(*results)
        self._say(told(results))
        stations.end("heldout")
        self._heldout_s = stations.seconds("heldout")

    def _learn(self, batch: Sequence[Group], pairs: Sequence[Pair]) -> StepReport:
        self._dumps.write(self._parts.trainer, batch, pairs)
        report = self._parts.trainer.step(batch)
        self._dumps.write_report(report)
        return report

    async def _update(self, stations: Stations) -> TargetSwapReport | None:
        """The policy becomes the next version of the target, and every engine serves it."""
        before = self.ledger.state.version
        version = await asyncio.to_thread(self._parts.trainer.publish, self._parts.sink)
        stations.end("write")
        self.generator.watch.begin()
        reason = f"step {self._num_steps + 1} of the RL run {self._settings.name}"
        swap = await self._parts.updates.activate(version, expected_active=before, reason=reason)
        self.generator.watch.end(version)
        self.ledger.advance(version)
        self.generator.tokens_per_update = self._pace.update(self.generator.counts.num_tokens, self.generator.seat_s)
        self._num_skipped = 0
        stations.end("activate")
        return swap

    def _give_back(self, report: StepReport) -> None:
        """No weights have moved. Raises TrainerError where that goes on because nothing is finite."""
        if not report.updates:
            return
        self._num_skipped += 1
        if self._num_skipped == MAX_SKIPPED:
            raise TrainerError(
                f"{MAX_SKIPPED} steps in a row moved nothing, the last because {report.skipped[-1]}; the batches are in "
                f"{self._dumps.directory}: look at their rewards and lengths, lower rl.trainer.learning_rate and go on"
            )
        self.ledger.evict([entry.group_id for entry in self.ledger.state.training], "failed")

    def _receive(self, group: Group) -> None:
        """A finished group, which the ledger counts as waiting since this very moment."""
        group = self._rewards.give(group)
        self._problems.note(group)
        self._finished.write(group)
        self._batches.add(group)
        self._record()

    def _steer(self, report: StepReport, num_with_signal: int) -> None:
        """The temperature of rollouts that begin from now on."""
        if self._temperature is None or self._settings.temperature is None:
            return
        reading = TemperatureReading(
            entropy=report.entropy,
            zero_variance_rate=1.0 - num_with_signal / report.num_groups,
            pass_rate=report.rewards.mean if report.rewards is not None else None,
        )
        self._temperature, decision = temperature.decide(self._settings.temperature, self._temperature, reading)
        self.generator.temperature = decision.temperature

    async def _record_rollouts(self) -> NoReturn:
        """Until it is cancelled: of groups that run, too, a kill loses no more than the last moment's rollouts."""
        while True:
            await asyncio.sleep(RECORD_EVERY_S)
            if self.generator.counts.num_rollouts > self._num_recorded_rollouts:
                self._record()

    def _record(self) -> None:
        self._num_recorded_rollouts = self.generator.counts.num_rollouts
        record = RunRecord(
            num_steps=self._num_steps,
            ledger=self.ledger.state,
            generator=self.generator.state(),
            history_bytes=self._history.num_bytes,
            steering=Steering(temperature=self._temperature, curricula=self._problems.states),
        )
        write_record(self._directory.record, record)

    def _prune(self) -> None:
        try:
            self._parts.sink.prune(self._settings.keep_versions)
        except (ArtifactError, OSError) as error:
            log.warning("old targets stay: %s", error)

    async def _save(self) -> None:
        """A checkpoint, and what is not needed any more goes."""
        ledger, generator, waiting = self.ledger.state, self.generator.state(), self._batches.waiting
        rewards = self._rewards.state()
        await asyncio.to_thread(self._checkpoints.save, self._parts.trainer, ledger, waiting, rewards, generator)
        self._finished.prune({entry.group_id for entry in (*self.ledger.state.open, *self.ledger.state.training)})

    def _tell(
        self,
        report: StepReport,
        learned: RewardModelReport | None,
        num_with_signal: int,
        batch: Sequence[Group],
        stations: Stations,
        swap: TargetSwapReport | None,
    ) -> None:
        counts = self.generator.counts
        open_groups = self.ledger.state.open
        metrics = StepMetrics(
            at_s=time.time(),
            version=self.ledger.state.version,
            report=report,
            reward_model=learned,
            temperature=self.generator.temperature,
            num_with_signal=num_with_signal,
            wait_s=stations.seconds("wait"),
            lesson_s=stations.seconds("lesson"),
            train_s=stations.seconds("train"),
            write_s=stations.seconds("write"),
            activate_s=stations.seconds("activate"),
            pause_s=longest_pause_s(swap),
            keep_s=self._keep_s,
            heldout_s=self._heldout_s,
            acceptance_length=swap.acceptance_length if swap is not None else None,
            num_tokens=counts.num_tokens - self._num_tokens_before,
            environment_share=environment_share(batch),
            counts=asdict(counts),
            num_evicted=self.ledger.take_evicted(),
            num_running=sum(entry.finished_rank is None for entry in open_groups),
            num_waiting=self.ledger.num_waiting,
        )
        self._num_tokens_before = counts.num_tokens
        self._heldout_s = 0.0
        self._metrics.append(metrics)
        self._say(progress(metrics, self._settings.num_steps))
