"""An engine core asks its workers for proposals after the steps that make some, and after no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from server.engine.depth import set_depth


class Scheduler:
    """K by batch size, and a schedule that looks it up; no vLLM."""

    num_spec_tokens = 3

    def __init__(self) -> None:
        self.dynamic_sd_lookup = [3, 3, 3]

    def schedule(self, num_requests: int) -> SimpleNamespace:
        return SimpleNamespace(num_spec_tokens_to_schedule=self.dynamic_sd_lookup[num_requests])


def core(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"scheduler": Scheduler(), "check_for_draft_tokens": True, "async_scheduling": False, "batch_queue": None} | changes
    )


def test_a_core_asks_after_steps_that_propose_only() -> None:
    asking = core()
    assert set_depth(asking, [3, 0]) == [3, 0]
    found = []
    for num_requests in (1, 2, 2, 1):
        asking.scheduler.schedule(num_requests)
        found.append(asking.check_for_draft_tokens)
    assert found == [True, False, False, True]


def test_setting_depth_again_leaves_the_schedule_as_it_is() -> None:
    asking = core()
    set_depth(asking, 0)
    schedule = asking.scheduler.schedule
    set_depth(asking, 2)
    assert asking.scheduler.schedule is schedule
    asking.scheduler.schedule(1)
    assert asking.check_for_draft_tokens


@pytest.mark.parametrize("changes", [{"async_scheduling": True}, {"batch_queue": []}], ids=["async", "queue"])
def test_a_core_whose_steps_overlap_asks_as_before(changes: dict[str, Any]) -> None:
    overlapping = core(**changes)
    set_depth(overlapping, 0)
    overlapping.scheduler.schedule(1)
    assert overlapping.check_for_draft_tokens
