"""`paceline bench reference`: the engine of a configuration without speculation and without our parts, to compare with."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from loadtest.system import OUR_PARTS, SPECULATION, lone_engine, served_model


def serve(up_arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Serve until SIGINT or SIGTERM; returns 0. Raises SystemUnderTestError where the engine does not start."""
    asyncio.run(_serve(up_arguments, say))
    return 0


async def _serve(up_arguments: Sequence[str], say: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    say("starting stock vLLM without speculation")
    async with lone_engine(up_arguments, without=(*OUR_PARTS, *SPECULATION)) as url:
        say(f"{await served_model(url)} is served at {url}; measure it: paceline bench run SCENARIO --url {url}")
        await stop.wait()
