"""Speculation depth at run time: overwrite the scheduler's batch-size -> K table between two steps.

vLLM has no setter for K. An engine started with a schedule keeps a lookup table in its scheduler; a utility method on
EngineCore runs between steps and may change the table's values. Under async scheduling the scheduler also places the
placeholders from the same table, so this is the one place that is right for both runners.
"""

from __future__ import annotations

import sys
from typing import Any

UTILITY = "paceline_set_depth"


def set_depth(core: Any, depth: int | None) -> int:
    """Set K for every batch size and return the K in force for one request; `None` only asks.

    Raises ValueError for a K outside 0..num_speculative_tokens, RuntimeError where the engine has no schedule.
    """
    scheduler = core.scheduler
    table: list[int] | None = scheduler.dynamic_sd_lookup
    if table is None:
        raise RuntimeError("the engine was started without num_speculative_tokens_per_batch_size; depth is fixed")
    if depth is not None:
        if not 0 <= depth <= scheduler.num_spec_tokens:
            raise ValueError(f"depth must lie in 0..{scheduler.num_spec_tokens}, got {depth}")
        table[:] = [depth] * len(table)
    return table[1]


def install() -> None:
    """Add the utility to EngineCore where this process runs one."""
    module = sys.modules.get("vllm.v1.engine.core")
    if module is not None and not hasattr(module.EngineCore, UTILITY):
        setattr(module.EngineCore, UTILITY, set_depth)
