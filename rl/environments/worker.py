"""An environment worker: a process that plays episodes for a pool. It keeps nothing that their seeds and actions do not give again.

usage: python -m rl.environments.worker PARENT_PID, by `pool.py` only; frames on standard input and output.
"""

from __future__ import annotations

import asyncio
import sys
from typing import BinaryIO

from msgspec import msgpack

from rl.environments.child import frames_of_child, read_frame, write_frame
from rl.environments.frames import Begin, Call, Forget, Ready, Refused, Reply, ResetCall, ScoreCall, StepCall, ToWorker
from rl.environments.interface import (
    ENVIRONMENT_SCHEMA_VERSION,
    Environment,
    EnvironmentFailed,
    Episode,
    Excluded,
    Scored,
    Step,
)
from rl.environments.registry import build, read_environments
from wire.errors import ConfigError, SchemaMismatch


class Worker:
    def __init__(self, environments: dict[str, Environment]) -> None:
        self._environments = environments
        self._episodes: dict[int, Episode] = {}

    async def answer(self, call: Call) -> Step | Scored:
        """Raises whatever the environment does."""
        match call:
            case ResetCall():
                environment = self._environments[call.problem.environment]
                episode = await environment.reset(call.problem.seed, call.problem.split)
                self._episodes[call.episode_id] = episode
                return episode.first
            case StepCall():
                return await self._episodes[call.episode_id].step(call.action)
            case ScoreCall():
                return await self._episodes.pop(call.episode_id).score()

    def forget(self, episode_id: int) -> None:
        self._episodes.pop(episode_id, None)

    async def reply(self, call: Call) -> bytes:
        """The frame that answers a call. Where the environment raises, or says what is no message, that is data and not a crash."""
        try:
            return msgpack.encode(Reply(call.call_id, await self.answer(call)))
        except EnvironmentFailed as error:
            excluded = Excluded("failed", str(error))
        except Exception as error:  # noqa: BLE001 - an environment is foreign code; this is the outermost loop around it
            excluded = Excluded("crashed", f"{type(error).__name__}: {error}")
        self.forget(call.episode_id)
        return msgpack.encode(Reply(call.call_id, excluded))


async def serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Answer calls, many at a time, until the pool closes the pipe."""
    decoder = msgpack.Decoder(ToWorker)
    begin = decoder.decode(read_frame(incoming) or b"")
    assert isinstance(begin, Begin), f"the first frame is {begin!r}"
    if begin.schema_version != ENVIRONMENT_SCHEMA_VERSION:
        raise SchemaMismatch(f"the pool speaks schema {begin.schema_version}, this worker {ENVIRONMENT_SCHEMA_VERSION}")
    try:
        configs = read_environments(begin.environments, source="the pool's environments")
        environments = {config.name: build(config) for config in configs}
    except ConfigError as error:
        write_frame(outgoing, msgpack.encode(Refused(str(error))))
        return
    write_frame(outgoing, msgpack.encode(Ready()))
    worker = Worker(environments)
    running: set[asyncio.Task[None]] = set()

    async def handle(call: Call) -> None:
        write_frame(outgoing, await worker.reply(call))

    while (frame := await asyncio.to_thread(read_frame, incoming)) is not None:
        message = decoder.decode(frame)
        if isinstance(message, Forget):
            worker.forget(message.episode_id)
        elif not isinstance(message, Begin):
            task = asyncio.create_task(handle(message))
            running.add(task)
            task.add_done_callback(running.discard)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for environment in environments.values():
        await environment.close()


if __name__ == "__main__":
    asyncio.run(serve(*frames_of_child(int(sys.argv[1]))))
