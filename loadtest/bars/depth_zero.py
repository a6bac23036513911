"""What an engine at K = 0 loses to one that never speculates."""

from __future__ import annotations

from loadtest.bars.lone_engines import against_stock
from loadtest.bars.registry import Bench, Measured
from loadtest.client import new_session
from loadtest.exposition import total
from loadtest.processes import SystemUnderTestError
from loadtest.system import LONE_ENGINE_TOKEN, OUR_PARTS, SPECULATION


async def k0_ratio(bench: Bench) -> dict[str, Measured]:
    """Our engine with its draft loaded and depth 0 against stock vLLM without a draft."""
    sides = await against_stock(bench, without=(*OUR_PARTS, *SPECULATION), before=set_depth_zero, after=require_no_proposals)
    return {"k0_ratio": Measured(sides.ratio().mean, sides.detail())}


async def set_depth_zero(url: str) -> None:
    """Raises SystemUnderTestError where the engine refuses."""
    headers = {"Authorization": f"Bearer {LONE_ENGINE_TOKEN}"}
    async with (
        new_session(1) as session,
        session.post(f"{url}/paceline/depth", json={"depth": 0}, headers=headers) as response,
    ):
        if response.status != 200:
            raise SystemUnderTestError(f"{url}/paceline/depth: {response.status} {await response.text()}")


async def require_no_proposals(url: str) -> None:
    """Raises SystemUnderTestError where an engine that was told not to has speculated."""
    async with new_session(1) as session, session.get(f"{url}/metrics") as response:
        num_drafts = total(await response.text(), "vllm:spec_decode_num_drafts_total") or 0.0
    if num_drafts:
        raise SystemUnderTestError(f"{url} made proposals in {num_drafts:.0f} steps at depth 0")
