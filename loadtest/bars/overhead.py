"""What the gateway adds to the first byte: the same mock engines asked through it and directly, at the same time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.bars.load import progress
from loadtest.bars.registry import Bench, Measured
from loadtest.client import StreamResult, new_session
from loadtest.closed_loop import keep_busy
from loadtest.exposition import total
from loadtest.kv_events import CHAIN_BLOCKS
from loadtest.mock_engine import Pace
from loadtest.processes import POLL_S, SystemUnderTestError, one_core_left_free
from loadtest.recital import MODEL
from loadtest.rig import gateway_config, mock_addresses, running_gateway, running_mocks
from loadtest.sources import human_eval
from loadtest.statistics import Estimate, percentiles_ms, quantile_difference
from loadtest.system import planned
from loadtest.traffic import Prompt
from wire.ports import free_ports

CONCURRENCY = 64
NUM_DIRECT = 16
"""Streams that ask the engines directly meanwhile: as many as a p99 needs, few enough to leave the machine to the gateway."""
MEASURE_S = 90.0
WARM_UP_S = 5.0
PACE = Pace(first_token_s=0.05, between_tokens_s=0.05)
MIN_TOKENS, MAX_TOKENS = 16, 64
"""Lengths differ, so that streams do not begin and end in step."""
NUM_KV_BLOCKS = 100_000
"""What the gateway knows of the engines' KV, all together, while they go on telling it of every request's."""
INDEXED_WITHIN_S = 60.0
LONG_CHARACTERS = 4000
QUANTILES = {"p50": 0.5, "p99": 0.99}


async def first_byte(bench: Bench) -> dict[str, Measured]:
    """In front of one engine, then of two, where the gateway must be ready to go on elsewhere; the worse counts."""
    target_dir = target_directory(bench)
    found: dict[int, dict[str, Estimate]] = {}
    detail: dict[str, Any] = {"prompts_tokenized": target_dir is not None, "kv_blocks_indexed": NUM_KV_BLOCKS}
    for number in (1, 2):
        via, direct = await compare(number, human_eval.load().train, target_dir)
        found[number] = differences_ms(via, direct)
        detail |= {f"{name}_ms_{number}_engines": shown(estimate) for name, estimate in found[number].items()}
        detail[f"first_byte_ms_{number}_engines"] = {"via_gateway": percentiles_ms(via), "direct": percentiles_ms(direct)}
        detail[f"requests_{number}_engines"] = {"via_gateway": len(via), "direct": len(direct)}
        progress(f"{number} engines: " + ", ".join(f"{name} {shown(value)} ms" for name, value in found[number].items()))
    long = differences_ms(*await compare(2, long_prompts(human_eval.load().train), target_dir))
    detail["long_prompts"] = {f"{name}_ms": shown(estimate) for name, estimate in long.items()}
    return {
        f"overhead_{name}_ms": Measured(max(estimates[name].value for estimates in found.values()), detail)
        for name in QUANTILES
    }


def long_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Of 4 to 8 kB, as of a conversation; the gateway reads such off its event loop. Told, not judged."""
    texts = [prompt.messages[-1]["content"] for prompt in prompts]
    joined: list[Prompt] = []
    text = ""
    for index, part in enumerate(texts):
        text += part
        if len(text) >= LONG_CHARACTERS:
            joined.append(Prompt(f"long-{index}", ({"role": "user", "content": text[: 2 * LONG_CHARACTERS]},)))
            text = ""
    return joined


async def compare(number: int, prompts: Sequence[Prompt], target_dir: str | None) -> tuple[list[float], list[float]]:
    """First bytes through the gateway and directly, seconds, of requests sent after the warm-up.

    The gateway has a core of its own, or what is measured is how often engines and clients take it away.
    As real engines would, the mocks tell the gateway of the KV of requests that did not pass through it, too.
    """
    (port,) = free_ports(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    num_blocks = NUM_KV_BLOCKS // number
    addresses = mock_addresses(number, PACE, target_dir=target_dir, kv_events_endpoint=endpoint, num_kv_blocks=num_blocks)
    with one_core_left_free() as cores:
        async with (
            running_mocks(addresses),
            running_gateway(gateway_config(addresses), kv_events_endpoint=endpoint, cores=cores) as gateway_url,
        ):
            await until_indexed(gateway_url, number * num_blocks // CHAIN_BLOCKS)
            lanes = [(gateway_url, CONCURRENCY), *((address.url, NUM_DIRECT // number) for address in addresses)]
            via, *direct = await side_by_side(lanes, prompts, for_s=WARM_UP_S + MEASURE_S, skip_s=WARM_UP_S)
    return first_bytes(via), first_bytes([result for lane in direct for result in lane])


async def side_by_side(
    lanes: Sequence[tuple[str, int]], prompts: Sequence[Prompt], *, for_s: float, skip_s: float
) -> list[list[StreamResult]]:
    """Keep each (url, concurrency) busy at the same time; results by lane, without those sent in the first `skip_s`."""
    started_at_s = time.monotonic()
    results: list[list[StreamResult]] = [[] for _ in lanes]
    await asyncio.gather(
        *(
            keep_busy(
                url,
                MODEL,
                prompts,
                concurrency=concurrency,
                should_stop=lambda: time.monotonic() - started_at_s >= for_s,
                on_result=lane.append,
                options=lengths(seed),
            )
            for seed, ((url, concurrency), lane) in enumerate(zip(lanes, results, strict=True))
        )
    )
    return [[result for result in lane if result.sent_at_s - started_at_s >= skip_s] for lane in results]


async def until_indexed(gateway_url: str, num_events: int) -> None:
    """Wait until a gateway has entered that many KV events; raises SystemUnderTestError where it does not, or loses some."""
    deadline_s = time.monotonic() + INDEXED_WITHIN_S
    num_stored: float | None = None
    async with new_session(1) as session:
        while time.monotonic() < deadline_s:
            async with session.get(f"{gateway_url}/metrics") as response:
                page = await response.text()
            num_stored = total(page, "paceline_kv_events_total", kind="stored")
            if num_stored is not None and num_stored >= num_events and not total(page, "paceline_kv_dropped_indexes_total"):
                return
            await asyncio.sleep(POLL_S)
    raise SystemUnderTestError(f"the gateway has entered {num_stored or 0:.0f} of {num_events} KV events, or lost some")


def first_bytes(results: Sequence[StreamResult]) -> list[float]:
    """Seconds to the first byte; raises SystemUnderTestError where a request failed, because its wait would be missing."""
    failed = [result for result in results if not result.is_ok]
    if failed or not results:
        reason = failed[0].error if failed else "nothing was sent"
        raise SystemUnderTestError(f"{len(failed)} of {len(results)} requests failed: {reason}")
    return [result.first_byte_s for result in results if result.first_byte_s is not None]


def differences_ms(via: Sequence[float], direct: Sequence[float]) -> dict[str, Estimate]:
    """By quantile; the arguments are seconds."""
    via_ms, direct_ms = ([1e3 * value for value in values] for values in (via, direct))
    return {name: quantile_difference(via_ms, direct_ms, quantile) for name, quantile in QUANTILES.items()}


def shown(estimate: Estimate) -> str:
    """The number and its interval."""
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def target_directory(bench: Bench) -> str | None:
    """The target's files, with which the gateway tokenizes; None where they are not on this machine."""
    directory = str(planned(bench.up_arguments)["target_dir"])
    return directory if (Path(directory) / "tokenizer.json").is_file() else None


def lengths(seed: int) -> Callable[[int], dict[str, Any]]:
    """Options of the next request: greedy, with a length drawn from a seeded sequence."""
    draw = random.Random(seed)

    def choose(_passes: int) -> dict[str, Any]:
        return {"max_tokens": draw.randint(MIN_TOKENS, MAX_TOKENS), "temperature": 0.0}

    return choose
