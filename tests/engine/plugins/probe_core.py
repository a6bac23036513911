"""What tests ask of an engine core between two of its steps, where no clock has a say."""

from __future__ import annotations

import sys
from typing import Any

from server.engine.depth import set_depth


def set_depth_after(core: Any, depth: int, num_rows: int) -> None:
    """Set K before the first step that finds so many rows scheduled since this call."""
    scheduler = core.scheduler
    schedule = scheduler.schedule
    num_scheduled = 0

    def shadow(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_scheduled
        if num_scheduled >= num_rows:
            scheduler.schedule = schedule
            set_depth(core, depth)
        output = schedule(*args, **kwargs)
        num_scheduled += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = shadow


def install() -> None:
    """Add the probe to EngineCore where this process runs one."""
    module = sys.modules.get("vllm.v1.engine.core")
    if module is not None:
        module.EngineCore.probe_set_depth_after = set_depth_after
