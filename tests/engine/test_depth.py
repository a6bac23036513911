"""Depth at run time: K changes between steps, never the output."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from live_engine import LiveEngine
from waiting import wait_until

PROMPTS = [f"depth prompt {i}: " for i in range(6)]


def test_an_engine_whose_schedule_shrinks_starts_with_full_depth_for_every_batch_size(tiny_engine: LiveEngine) -> None:
    tiny_engine.settle()
    tiny_engine.listener.clear()
    tiny_engine.complete_all(PROMPTS)
    tiny_engine.settle()
    depths = {span.num_proposed for item in tiny_engine.listener.captured for span in item.message.spans}
    assert depths == {0, 3}  # 0: the prompts


def test_depth_changes_under_load_leave_every_token_as_it_was(tiny_engine: LiveEngine) -> None:
    reference = tiny_engine.complete_all(PROMPTS, max_tokens=150)
    tiny_engine.settle()
    tiny_engine.listener.clear()

    def depths_seen() -> set[int]:
        return {span.num_proposed for item in list(tiny_engine.listener.captured) for span in item.message.spans}

    def vary() -> None:
        """Until each depth has been in force with steps in flight, five times over."""
        for _ in range(5):
            for depth in (0, 3, 1, 2):
                tiny_engine.set_depth(depth)
                num_captured = len(tiny_engine.listener.captured)
                wait_until(lambda before=num_captured: len(tiny_engine.listener.captured) > before + 2)

    try:
        with ThreadPoolExecutor(1) as pool:
            varying = pool.submit(vary)
            while not varying.done():
                varied = tiny_engine.complete_all(PROMPTS, max_tokens=150)
                assert [each.token_ids for each in varied] == [each.token_ids for each in reference]
            varying.result()
    finally:
        tiny_engine.set_depth(3)
    tiny_engine.settle()
    assert depths_seen() == {0, 1, 2, 3}


def test_an_impossible_depth_is_refused(tiny_engine: LiveEngine) -> None:
    for depth in (-1, 4, "3", None):
        status, answer = tiny_engine.call("/paceline/depth", {"depth": depth})
        assert status == 400
        assert answer["error"]["message"]
    assert tiny_engine.ok("/paceline/status")["depth"] == 3
