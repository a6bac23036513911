"""Our gateway and vllm-router in front of the same mock engines: waits under equal load, and who fails when an engine dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from loadtest.bars.load import progress, reasons
from loadtest.bars.overhead import CONCURRENCY, PACE, first_bytes, lengths, shown, side_by_side, target_directory
from loadtest.bars.registry import Bench, Measured
from loadtest.client import StreamResult
from loadtest.closed_loop import keep_busy
from loadtest.processes import one_core_left_free
from loadtest.recital import MODEL, is_recital
from loadtest.rig import MockAddress, gateway_config, mock_addresses, running_gateway, running_mocks
from loadtest.sources import human_eval
from loadtest.statistics import percentiles_ms, quantile_ratio
from loadtest.traffic import Prompt
from loadtest.vllm_router import VERSION, running_vllm_router

BLOCK_S = 15.0
WARM_UP_S = 3.0
ORDER = ("ours", "theirs", "theirs", "ours")
KILL_AFTER_S = 3.0
DOWN_S = 3.0
AFTERWARDS_S = 4.0
P99 = 0.99


async def vllm_router(bench: Bench) -> dict[str, Measured]:
    """Blocks of load in turn on one and the other, then one engine killed and started again under each."""
    prompts = human_eval.load().train
    addresses = mock_addresses(2, PACE, target_dir=target_directory(bench))
    waits: dict[str, list[float]] = {"ours": [], "theirs": []}
    with one_core_left_free() as cores:
        async with (
            running_mocks(addresses),
            running_gateway(gateway_config(addresses), cores=cores) as our_url,
            running_vllm_router([one.url for one in addresses], cores=cores) as their_url,
        ):
            urls = {"ours": our_url, "theirs": their_url}
            for side in ORDER:
                lanes = [(urls[side], CONCURRENCY)]
                (results,) = await side_by_side(lanes, prompts, for_s=WARM_UP_S + BLOCK_S, skip_s=WARM_UP_S)
                waits[side] += first_bytes(results)
                progress(f"{side}: {len(results)} requests")
    killed = {side: await kill_one(bench, side, prompts) for side in ("ours", "theirs")}
    return values(waits, killed)


async def kill_one(bench: Bench, side: str, prompts: Sequence[Prompt]) -> list[StreamResult]:
    """All results of one side while one of its two engines is killed and comes back."""
    addresses = mock_addresses(2, PACE, target_dir=target_directory(bench))
    results: list[StreamResult] = []
    is_over = False
    async with running_mocks(addresses) as pids:
        router = (
            running_gateway(gateway_config(addresses))
            if side == "ours"
            else running_vllm_router([one.url for one in addresses])
        )
        async with router as url:
            load = asyncio.create_task(
                keep_busy(
                    url,
                    MODEL,
                    prompts,
                    concurrency=CONCURRENCY,
                    should_stop=lambda: is_over,
                    on_result=results.append,
                    options=lengths(0),
                )
            )
            await asyncio.sleep(KILL_AFTER_S)
            await die_and_return(addresses[1], pids[1])
            is_over = True
            await load
    progress(f"{side}: {len(failed(results))} of {len(results)} requests failed around the kill")
    return results


async def die_and_return(address: MockAddress, pid: int) -> None:
    """SIGKILL an engine; it is back after a while and stays for a while."""
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(DOWN_S)
    async with running_mocks([address]):
        await asyncio.sleep(AFTERWARDS_S)


def values(waits: dict[str, list[float]], killed: dict[str, list[StreamResult]]) -> dict[str, Measured]:
    """`waits`: seconds to the first byte. `killed`: all results around the kill. Both by side."""
    ratio = quantile_ratio(waits["ours"], waits["theirs"], P99)
    detail = {
        "baseline": f"vllm-router {VERSION}",
        "ratio": shown(ratio),
        **{f"ttft_{side}_ms": percentiles_ms(seconds) for side, seconds in waits.items()},
        **{f"requests_{side}": len(seconds) for side, seconds in waits.items()},
    }
    broken = {side: failed(results) for side, results in killed.items()}
    around_kill = {
        **{f"failed_{side}": len(results) for side, results in broken.items()},
        **{f"requests_{side}": len(results) for side, results in killed.items()},
        **{f"reasons_{side}": reasons(results) for side, results in broken.items()},
    }
    return {
        "vllm_router_ttft_p99_ratio": Measured(ratio.value, detail),
        "vllm_router_failed": Measured(len(broken["ours"]) if killed["ours"] else None, around_kill),
    }


def failed(results: Sequence[StreamResult]) -> list[StreamResult]:
    """Those that failed, or in whose answer a token is lost or doubled."""
    return [result for result in results if not result.is_ok or not is_recital(result.text, result.num_tokens)]
