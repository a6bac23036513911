"""Prefill and decode pools from one command: KV goes over NIXL, drafts are swapped in all engines, engines die and nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from loadtest.bars.drill import CONCURRENCY, TWO_DECODE, calm, differing, num_remote_prefills, undisturbed, unlike
from loadtest.bars.load import Load, background_load
from loadtest.exposition import total
from loadtest.sources import human_eval
from loadtest.system import System, make_draft, running_system

CONFIGS = Path(__file__).parents[2] / "configs"
POOLS = ["--config", str(CONFIGS / "eager.toml"), str(CONFIGS / "cpu-pd.toml")]
# fp32, so that an answer that goes on elsewhere goes on alike; a small cache, because three engines share a machine.
SETTINGS = ["learner.enabled=false", "target.dtype=float32", "engine.kv_cache_memory_bytes=268435456"]
SERVED_WITHIN_S = 300.0


@pytest.mark.pools
@pytest.mark.timeout(1800)
def test_pools_serve_swap_and_survive_the_death_of_engines() -> None:
    asyncio.run(the_pools())


async def the_pools() -> None:
    prompts = human_eval.load().train[:8]
    async with running_system(POOLS, SETTINGS, pools=TWO_DECODE) as system:
        reference = await undisturbed(system, prompts)
        assert await undisturbed(system, prompts) == reference
        assert await system.read_metrics(lambda page: total(page, "paceline_routed_total", path="kv_reuse") or 0) > 0
        async with background_load(system, prompts, concurrency=CONCURRENCY, options=unlike) as load:
            await calm(system, load)
            assert await num_remote_prefills(system) > 0
            await a_draft_is_swapped_in_everywhere(system)
            await calm(system, load)
            await an_engine_dies(system, load, "prefill-0")
            await an_engine_dies(system, load, "decode-0")
            assert (
                await system.read_metrics(lambda page: total(page, "paceline_stream_moves_total", engine="decode-0") or 0) > 0
            )
    assert not load.failed, load.reasons()
    assert differing(load.results, reference) == []


async def a_draft_is_swapped_in_everywhere(system: System) -> None:
    await asyncio.to_thread(make_draft, POOLS, [*SETTINGS, "draft.seed=1", f"state.dir={system.state_dir}"])
    await system.must("POST", "/admin/drafts/1/activate", {"expected_active": 0, "force": True})
    status = await system.status()
    assert (status.active_version, [engine.draft_version for engine in status.engines]) == (1, [1, 1, 1])


async def an_engine_dies(system: System, load: Load, name: str) -> None:
    """SIGKILL, and then each client is served again, whether the engine is back or not."""
    pid = system.process_id(name)
    assert pid is not None
    os.killpg(pid, signal.SIGKILL)
    num_before = load.num_ok
    async with asyncio.timeout(SERVED_WITHIN_S):
        while load.num_ok < num_before + 2 * CONCURRENCY:
            await asyncio.sleep(0.5)
