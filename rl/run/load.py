"""How full the engines are, as the gateway's metrics page tells it, for the controller of concurrency."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import NoReturn

from rl.controllers.concurrency import ConcurrencyReading
from rl.generator.gateway import Gateway, Lost, Refused
from rl.generator.generator import Generator

log = logging.getLogger(__name__)

POLL_S = 5.0
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)
_KV, _RUNNING, _WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"
_PREEMPTED = "vllm:num_preemptions_total"


@dataclass(frozen=True)
class Load:
    """Of all engines together; users' requests included."""

    kv_used: float | None
    """Share of the KV cache, the fullest engine's."""
    num_running: int
    num_waiting: int
    num_preempted: float | None
    """Since the engines started."""

    def reading(self, *, now_s: float, num_seated: int, num_finished: int) -> ConcurrencyReading:
        """num_seated: rollouts that hold a seat. What waits is theirs as far as it can be: users go before them."""
        num_queued = min(self.num_waiting, num_seated)
        num_running = min(self.num_running, num_seated - num_queued)
        return ConcurrencyReading(
            now_s=now_s,
            kv_used=self.kv_used,
            num_running=num_running,
            num_queued=num_queued,
            num_users=self.num_running + self.num_waiting - num_running - num_queued,
            num_preempted=self.num_preempted,
            num_finished=float(num_finished),
        )


def read_load(text: str) -> Load:
    """Of a page in Prometheus' text format."""
    values: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        if name in (_KV, _RUNNING, _WAITING, _PREEMPTED):
            values.setdefault(name, []).append(float(value))
    return Load(
        kv_used=max(values.get(_KV, []), default=None),
        num_running=int(sum(values.get(_RUNNING, []))),
        num_waiting=int(sum(values.get(_WAITING, []))),
        num_preempted=sum(values[_PREEMPTED]) if _PREEMPTED in values else None,
    )


async def follow(gateway: Gateway, generator: Generator) -> NoReturn:
    """Tell the generator again and again, until it is cancelled. Silence is no reading."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            load = read_load(await gateway.metrics())
        except (Lost, Refused, ValueError, OverflowError) as error:
            log.info("the engines' load is not known: %s", error)
        else:
            reading = load.reading(
                now_s=loop.time(), num_seated=generator.num_seated, num_finished=generator.counts.num_rollouts
            )
            generator.observe(reading)
        await asyncio.sleep(POLL_S)
