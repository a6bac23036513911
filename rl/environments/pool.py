"""Environment workers and the episodes on them, as the generator sees both.

A worker may die at any moment. An episode is its problem and the actions taken so far, and both are kept here: it begins again
from its seed on another worker, the actions are taken again, and what is observed has to be what was observed before. Only one that
takes its workers down again and again is given up, and then it is excluded, like any other episode whose environment failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Literal, Self

from msgspec import msgpack, structs

from rl.environments.child import Child, ChildDied
from rl.environments.frames import Begin, Call, Forget, FromWorker, Ready, Refused, Reply, ResetCall, ScoreCall, StepCall
from rl.environments.interface import Action, Excluded, Problem, Scored, Step
from rl.environments.settings import EnvironmentConfig
from wire.errors import ConfigError

MAX_RESTARTS = 2
"""Of one episode, within one call: so often may workers die over it. Its last try is no other episode's, so that neighbours of one that
kills its workers are not given up with it."""
_READY_DEADLINE_S = 120.0


class WorkerDied(Exception):
    def __init__(self, message: str, reason: Literal["unresponsive", "worker_died"] = "worker_died") -> None:
        super().__init__(message)
        self.reason = reason


class _Worker:
    """One process, from its start to its death; another one is another object."""

    def __init__(self, child: Child, call_timeout_s: float) -> None:
        self._child = child
        self._call_timeout_s = call_timeout_s
        self._call_ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Step | Scored | Excluded]] = {}
        self._reason: Literal["unresponsive", "worker_died"] = "worker_died"
        self._reader = asyncio.create_task(self._read())
        self.is_dead = False
        self.num_episodes = 0

    @classmethod
    async def start(cls, configs: Sequence[EnvironmentConfig], call_timeout_s: float) -> Self:
        """Raises ConfigError where it cannot build an environment, WorkerDied where it does not begin."""
        child = await Child.start("rl.environments.worker")
        try:
            async with asyncio.timeout(_READY_DEADLINE_S):
                await child.send(msgpack.encode(Begin(tuple(config.model_dump(mode="json") for config in configs))))
                answer = msgpack.decode(await child.receive(), type=FromWorker)
        except (ChildDied, TimeoutError) as error:
            await child.stop()
            raise WorkerDied(f"an environment worker did not begin: {str(error) or 'it said nothing in time'}") from error
        except BaseException:
            await child.stop()
            raise
        if isinstance(answer, Refused):
            await child.stop()
            raise ConfigError(answer.detail)
        assert isinstance(answer, Ready), f"the first reply of a worker is {answer!r}"
        return cls(child, call_timeout_s)

    @property
    def pid(self) -> int:
        return self._child.pid

    async def call(self, call: Call) -> Step | Scored | Excluded:
        """Raises WorkerDied, also where it takes too long: then it is killed, with every episode on it."""
        if self.is_dead:
            raise WorkerDied(f"worker {self.pid} is dead")
        call_id = next(self._call_ids)
        answer = self._pending[call_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await self._child.send(msgpack.encode(structs.replace(call, call_id=call_id)))
                return await answer
        except TimeoutError:
            self._reason = "unresponsive"
            await self.stop()
            raise WorkerDied(f"worker {self.pid} did not answer within {self._call_timeout_s:g} s", "unresponsive") from None
        except ChildDied as error:
            await self.stop()
            raise WorkerDied(str(error)) from error
        finally:
            self._pending.pop(call_id, None)

    async def forget(self, episode_id: int) -> None:
        if not self.is_dead:
            try:
                await self._child.send(msgpack.encode(Forget(episode_id)))
            except ChildDied:
                self.is_dead = True

    async def finish(self) -> None:
        """Let it put away what it works with; calls under way fail."""
        self.is_dead = True
        await self._child.finish()
        await asyncio.wait([self._reader])

    async def stop(self) -> None:
        """Kill it."""
        self.is_dead = True
        await self._child.stop()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        why = f"worker {self.pid} ended"
        try:
            while True:
                message = msgpack.decode(await self._child.receive(), type=FromWorker)
                if isinstance(message, Reply) and (answer := self._pending.get(message.call_id)) and not answer.done():
                    answer.set_result(message.result)
        except ChildDied as error:
            why = str(error)
        except ValueError as error:  # what msgspec raises for what is no reply
            why = f"worker {self.pid} says what is no reply: {error}"
        self.is_dead = True
        await self._child.stop()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(WorkerDied(why, self._reason))


class EnvironmentPool:
    """`num_workers` processes, each with every environment. Built by `start`, given back by `close`."""

    def __init__(self, configs: Sequence[EnvironmentConfig], call_timeout_s: float, workers: list[_Worker]) -> None:
        self._configs = configs
        self._call_timeout_s = call_timeout_s
        self._workers = workers
        self._replacing = asyncio.Lock()
        self._is_closed = False
        self.last_try = asyncio.Lock()
        self._episode_ids = itertools.count()
        self.num_restarts = 0
        """Workers that died and were replaced."""

    @classmethod
    async def start(cls, configs: Sequence[EnvironmentConfig], *, num_workers: int, call_timeout_s: float = 120.0) -> Self:
        """Raises ConfigError where an environment cannot be built in a worker, WorkerDied where one does not begin; nothing runs then."""
        if num_workers < 1:
            raise ConfigError(f"environments need a worker or more, got {num_workers}")
        begun = await asyncio.gather(
            *(_Worker.start(configs, call_timeout_s) for _ in range(num_workers)), return_exceptions=True
        )
        workers = [worker for worker in begun if isinstance(worker, _Worker)]
        for failure in begun:
            if isinstance(failure, BaseException):
                await asyncio.gather(*(worker.stop() for worker in workers))
                raise failure
        return cls(configs, call_timeout_s, workers)

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    async def reset(self, problem: Problem) -> RemoteEpisode | Excluded:
        """Begin a problem; raises ConfigError where no environment has its name."""
        names = [config.name for config in self._configs]
        if problem.environment not in names:
            raise ConfigError(f"no environment is called {problem.environment!r}; there are {', '.join(names)}")
        return await RemoteEpisode.begin(self, problem, next(self._episode_ids))

    async def close(self) -> None:
        """Calls under way fail, and no worker begins any more."""
        self._is_closed = True
        async with self._replacing:
            await asyncio.gather(*(worker.finish() for worker in self._workers))

    async def place(self) -> _Worker:
        """The worker with the fewest episodes; dead ones are replaced first. Raises WorkerDied where one does not begin."""
        async with self._replacing:
            if self._is_closed:
                raise WorkerDied("the pool of environment workers is closed")
            for index, worker in enumerate(self._workers):
                if worker.is_dead:
                    try:
                        self._workers[index] = await _Worker.start(self._configs, self._call_timeout_s)
                    except ConfigError as error:
                        raise WorkerDied(f"a worker that replaces a dead one refuses to begin: {error}") from error
                    self.num_restarts += 1
        return min(self._workers, key=lambda worker: worker.num_episodes)


class RemoteEpisode:
    """An episode on some worker. One caller at a time; once it is excluded it stays so."""

    def __init__(self, pool: EnvironmentPool, problem: Problem, episode_id: int) -> None:
        self.problem = problem
        self.num_restarts = 0
        """How often a worker died over one of its calls."""
        self._pool = pool
        self._episode_id = episode_id
        self._worker: _Worker | None = None
        self._actions: list[Action] = []
        self._steps: list[Step] = []
        self._excluded: Excluded | None = None

    @classmethod
    async def begin(cls, pool: EnvironmentPool, problem: Problem, episode_id: int) -> Self | Excluded:
        episode = cls(pool, problem, episode_id)
        first = await episode._call(None)
        return first if isinstance(first, Excluded) else episode

    @property
    def first(self) -> Step:
        return self._steps[0]

    async def step(self, action: Action) -> Step | Excluded:
        if self._steps[-1].is_done:
            raise ValueError(f"the episode of {self.problem} is done; it can only be scored")
        step = await self._call(StepCall(self._episode_id, action))
        assert not isinstance(step, Scored)
        if isinstance(step, Step):
            self._actions.append(action)
            self._steps.append(step)
        return step

    async def score(self) -> Scored | Excluded:
        """The end of the episode."""
        scored = await self._call(ScoreCall(self._episode_id))
        assert not isinstance(scored, Step)
        self._leave()
        return scored

    async def close(self) -> None:
        """Give an episode up that is not going to be scored."""
        if self._worker:
            await self._worker.forget(self._episode_id)
        self._leave()

    async def _call(self, call: Call | None) -> Step | Scored | Excluded:
        """Make a call, or only begin; where the worker dies, begin again elsewhere and make it there."""
        for restart in range(1 + MAX_RESTARTS):
            if self._excluded:
                break
            try:
                async with self._pool.last_try if restart == MAX_RESTARTS else contextlib.nullcontext():
                    result = await self._try(call)
            except asyncio.CancelledError:
                await self.close()  # nobody knows what the worker has seen of the call; who goes on begins again
                raise
            except WorkerDied as error:
                self.num_restarts += 1
                last = error
                continue
            if isinstance(result, Excluded):
                self._exclude(result)
            return result
        else:
            self._exclude(Excluded(last.reason, f"{1 + MAX_RESTARTS} times in a row: {last}"))
        assert self._excluded
        return self._excluded

    async def _try(self, call: Call | None) -> Step | Scored | Excluded:
        """On the worker it is on, or one it begins again on; raises WorkerDied."""
        if self._worker is None or self._worker.is_dead:
            await self._begin_on(await self._pool.place())
        if self._excluded:
            return self._excluded
        return await self._worker.call(call) if call and self._worker else self._steps[0]

    async def _begin_on(self, worker: _Worker) -> None:
        """Reset and take the actions so far again; raises WorkerDied. Where it goes another way than before it is excluded."""
        self._leave()
        self._worker = worker
        worker.num_episodes += 1
        seen = [await worker.call(ResetCall(self._episode_id, self.problem))]
        for action in self._actions:
            if not isinstance(seen[-1], Step):
                break
            seen.append(await worker.call(StepCall(self._episode_id, action)))
        for place, step in enumerate(seen):
            if isinstance(step, Excluded):
                return self._exclude(step)
            assert isinstance(step, Step)
            if place < len(self._steps) and not _is_same(step, self._steps[place]):
                await worker.forget(self._episode_id)
                return self._exclude(
                    Excluded("not_reproducible", f"step {place} of {self.problem} differs when it is begun again")
                )
        self._steps = [step for step in seen if isinstance(step, Step)]

    def _exclude(self, excluded: Excluded) -> None:
        self._excluded = excluded
        self._leave()

    def _leave(self) -> None:
        if self._worker:
            self._worker.num_episodes -= 1
            self._worker = None


def _is_same(a: Step, b: Step) -> bool:
    """Up to diagnostics, which may hold times."""
    return (a.observation, a.is_done, a.is_truncated) == (b.observation, b.is_done, b.is_truncated)
