"""An environment worker: a process that plays episodes for a pool. It keeps nothing that their seeds and actions do not give again.

usage: python -m rl.environments.worker PARENT_PID, by `pool.py` only; frames on standard input and output.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import BinaryIO

from msgspec import msgpack

from rl.environments.child import MAX_FRAME_BYTES, frames_of_child, read_frame, write_frame
from rl.environments.frames import (
    Begin,
    Call,
    Forget,
    FromWorker,
    Ready,
    Refused,
    Reply,
    ResetCall,
    ScoreCall,
    StepCall,
    ToWorker,
)
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

_log = logging.getLogger(__name__)
_FROM_WORKER = msgpack.Decoder(FromWorker)


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
                return await self._episodes[call.episode_id].score()

    async def forget(self, episode_id: int) -> None:
        """The end of an episode; one that cannot be closed concerns nobody who plays."""
        if episode := self._episodes.pop(episode_id, None):
            try:
                await episode.close()
            except Exception as error:  # noqa: BLE001 - foreign code, as in `reply`
                _log.warning("episode %d cannot be closed: %s: %s", episode_id, type(error).__name__, error)

    async def close(self) -> None:
        for episode_id in list(self._episodes):
            await self.forget(episode_id)
        for environment in self._environments.values():
            await environment.close()

    async def reply(self, call: Call) -> bytes:
        """The frame that answers a call. Where the environment raises, or says what is no message, that is data and not a crash."""
        try:
            frame = _frame_of(Reply(call.call_id, await self.answer(call)))
        except EnvironmentFailed as error:
            frame = msgpack.encode(Reply(call.call_id, Excluded("failed", str(error))))
        except Exception as error:  # noqa: BLE001 - an environment is foreign code; this is the outermost loop around it
            frame = msgpack.encode(Reply(call.call_id, Excluded("crashed", f"{type(error).__name__}: {error}")))
        else:
            if not isinstance(call, ScoreCall):
                return frame
        await self.forget(call.episode_id)
        return frame


def _frame_of(reply: Reply) -> bytes:
    """Raises where it is none that the pool can read, which would end this worker and every episode on it."""
    frame = msgpack.encode(reply)
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"a reply of {len(frame)} bytes; {MAX_FRAME_BYTES} are the most")
    _FROM_WORKER.decode(frame)
    return frame


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
    running: dict[int, asyncio.Task[None]] = {}

    async def handle(message: Call | Forget, before: asyncio.Task[None] | None) -> None:
        """Episodes side by side, the messages of one in their order; who forgets an episode wants no reply to what is under way."""
        if before:
            if isinstance(message, Forget):
                before.cancel()
            await asyncio.wait([before])
        if isinstance(message, Forget):
            await worker.forget(message.episode_id)
        else:
            write_frame(outgoing, await worker.reply(message))

    def begin_handling(message: Call | Forget) -> None:
        episode_id = message.episode_id
        task = running[episode_id] = asyncio.create_task(handle(message, running.get(episode_id)))
        task.add_done_callback(lambda done: running.pop(episode_id) if running.get(episode_id) is done else None)

    while (frame := await asyncio.to_thread(read_frame, incoming)) is not None:
        message = decoder.decode(frame)
        if not isinstance(message, Begin):
            begin_handling(message)
    under_way = list(running.values())
    for task in under_way:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)
    await worker.close()


if __name__ == "__main__":
    asyncio.run(serve(*frames_of_child(int(sys.argv[1]))))
