"""Speculation depth at run time: overwrite the scheduler's batch-size -> K table between two steps.

vLLM has no setter for K. An engine started with a schedule keeps a lookup table in its scheduler; a utility method on
EngineCore runs between steps and may change the table's values. Under async scheduling the scheduler also places the
placeholders from the same table, so this is the one place that is right for both runners.

After each step the core also asks its workers for proposals, K = 0 or not; at K = 0 that question is spared.
"""

from __future__ import annotations

import sys
from typing import Any

UTILITY = "paceline_set_depth"


def set_depth(core: Any, depth: int | list[int] | None) -> list[int]:
    """Set K, one for every batch size or one for each of 1, 2, ... requests; `None` only asks. Returns K by batch size.

    Raises ValueError for a K outside 0..num_speculative_tokens and for a table of another length, RuntimeError where the
    engine has no schedule.
    """
    spare_questions(core)
    scheduler = core.scheduler
    table: list[int] | None = scheduler.dynamic_sd_lookup
    if table is None:
        raise RuntimeError("the engine was started without num_speculative_tokens_per_batch_size; depth is fixed")
    max_requests = len(table) - 1  # entry 0 stands for no request
    if depth is not None:
        depths = [depth] * max_requests if isinstance(depth, int) else depth
        if len(depths) != max_requests:
            raise ValueError(f"depth needs one K for each batch of 1..{max_requests} requests, got {len(depths)}")
        for each in depths:
            if not 0 <= each <= scheduler.num_spec_tokens:
                raise ValueError(f"depth must lie in 0..{scheduler.num_spec_tokens}, got {each}")
        table[1:] = depths
    return table[1:]


def spare_questions(core: Any) -> None:
    """Let a core without overlapping steps ask for proposals only after steps that made some.

    It asks where `check_for_draft_tokens` is set, by one more call to its workers, and waits for the answer. What a
    request had proposed before is used up or cleared when its next step is scheduled, so at K = 0 no answer is missed.
    """
    schedule = core.scheduler.schedule
    if core.async_scheduling or core.batch_queue is not None or getattr(schedule, "spares_questions", False):
        return

    def shadow(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        core.check_for_draft_tokens = output.num_spec_tokens_to_schedule > 0
        return output

    shadow.spares_questions = True  # type: ignore[attr-defined]
    core.scheduler.schedule = shadow


def install() -> None:
    """Add the utility to EngineCore where this process runs one."""
    module = sys.modules.get("vllm.v1.engine.core")
    if module is not None and not hasattr(module.EngineCore, UTILITY):
        setattr(module.EngineCore, UTILITY, set_depth)
