"""TransferWatch: reads off the engines' own metrics how fast KV moves between them, for the router's cost model."""

from __future__ import annotations

import asyncio

from server.fleet import Fleet
from server.routing.cost import CostModel
from wire.errors import EngineError

PERIOD_S = 10.0
TIMEOUT_S = 2.0
_BYTES = "vllm:nixl_bytes_transferred_sum"
_SECONDS = "vllm:nixl_xfer_time_seconds_sum"


class TransferWatch:
    """Asks every engine that pulls KV, again and again."""

    def __init__(self, fleet: Fleet, costs: CostModel, *, period_s: float = PERIOD_S) -> None:
        self._engines = [engine for engine in fleet.engines if engine.kind == "decode"]
        self._costs = costs
        self._period_s = period_s

    async def watch(self) -> None:
        """For as long as the gateway runs; an engine that does not answer is left out."""
        while self._engines:
            await asyncio.sleep(self._period_s)
            for engine in self._engines:
                try:
                    text = await engine.client.metrics_text(timeout_s=TIMEOUT_S)
                except EngineError:
                    continue
                self._costs.learn_transfer(engine, _total(text, _BYTES), _total(text, _SECONDS))


def _total(text: str, name: str) -> float:
    """Sum over the series of one metric, 0 where there is none or it cannot be read."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith(name):
            try:
                total += float(line.rsplit(" ", 1)[-1])
            except ValueError:
                return 0.0
    return total
